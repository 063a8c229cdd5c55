"""The options of the trainer; light, because `opusim train --help` imports it."""

from typing import ClassVar, Literal

from pydantic import Field

from opusim.training import TrainerSection


class SoftmaxConfig(TrainerSection):
    """Softmax regression."""

    implementation = "lab_softmax.trainer:SoftmaxTrainer"
    summary: ClassVar[str] = "Softmax regression at a temperature (from lab-softmax)."
    protections: ClassVar[tuple[str, ...]] = ("none", "record")

    kind: Literal["softmax"] = "softmax"
    """softmax: one linear layer."""
    temperature: float = Field(1.0, gt=0.0)
    """Temperature that divides the logits."""
