"""The fully connected network that a run builds."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from training.config.clips import check_clip
from training.config.section import Section

ActivationName = Literal["tanh", "relu", "sigmoid", "gelu", "identity"]


class ModelConfig(Section):
    """A fully connected network."""

    hidden: tuple[int, ...] = (512, 512)
    """Widths of the hidden layers."""
    activation: ActivationName = "tanh"
    """Activation of the hidden layers."""
    output_activation: ActivationName = "identity"
    """Activation of the last layer; cross-entropy takes identity (logits)."""
    bias: bool = True
    """Whether layers have biases."""
    initial_gain: float = Field(1.0, gt=0.0)
    """Initial parameters are uniform on +-gain/sqrt(fan_in)."""
    initial_output: Literal["random", "feedback"] = "random"
    """feedback: the output layer starts as the feedback matrix of the last hidden layer (read from the device), so
    that the projected error starts out as the backpropagated one."""
    tau_h_max: float | None = Field(None, gt=0.0)
    """tau_h^max of eq. 9 for the neurons themselves: hidden activations are clipped to tau_h_max / sqrt(width) in
    the forward pass, at inference too."""
    tau_h_min: float = Field(0.0, ge=0.0)
    """tau_h^min of eq. 9 for the neurons: offset tau_h_min / sqrt(width) before that clip."""

    @model_validator(mode="after")
    def _check_widths(self) -> Self:
        if any(width < 1 for width in self.hidden):
            raise ValueError(f"hidden holds a width below 1: {list(self.hidden)}; give positive widths")
        check_clip(self.tau_h_max, self.tau_h_min)
        return self
