"""Options of the feedback trainers: backpropagation and direct feedback alignment, digital or photonic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from training.config.section import TrainerSection
from training.config.sections import ClippedLayers, WidthRule, check_clip
from training.protections.config import ProtectionConfig, Relation


class FeedbackConfig(TrainerSection):
    """Which feedback trains the hidden layers, and what happens to it."""

    protections: ClassVar[tuple[str, ...]] = (
        "none",
        "record",
        "label",
        "label-amplified",
        "label-once",
        "label-response",
    )
    """See TrainerSection."""
    relations: ClassVar[tuple[Relation, ...]] = ("zero_out", "add_or_remove_one", "replace_one")
    """What protection.relation may be under protection.kind = 'record'; the first is its default."""

    kind: Literal["bp", "dfa", "tdfa", "pdfa"] = "pdfa"
    """bp: backpropagation; dfa: digital random projection of the error; tdfa: of the ternarized error;
    pdfa: of the ternarized error, through the device."""
    order: Literal["hardware", "published"] = "hardware"
    """hardware: the noise of the device's reading is the noise, only a constant gain follows.
    published: eq. 8, the reading is scaled into the ball tau_b, then noise is added (for pdfa from the
    device's draw, for the digital feedbacks from a generator with standard deviation sigma), and the default of a
    digital feedback that is given a sigma."""
    threshold: float = Field(0.15, ge=0.0)
    """Ternarization threshold of tdfa and pdfa (0.15 in the paper)."""
    encoding: Literal["ternary", "planes"] = "ternary"
    """How pdfa shows the error: ternary, one reading a record (the paper); planes, in signed binary digits of
    e / max|e|, one reading a digit, which keeps magnitudes at more frames, and noise in proportion to the error."""
    planes: int = Field(4, ge=1, le=24)
    """Number of digits of encoding = 'planes'; the error is shown to 2^-planes of its largest entry."""
    gain: float = Field(1.0, gt=0.0)
    """The projected error of a layer of width n is multiplied by gain / sqrt(n), before any scale."""
    signal_gain: float = Field(1.0, gt=0.0)
    """Public constant on what each hidden layer receives, noise included (for bp: on the error at the top)."""
    tau_b: float | None = Field(None, gt=0.0)
    """tau_B of eq. 9: norm of a layer's signal before noise (published order only)."""
    scale: Literal["ball", "sphere"] = "ball"
    """ball: longer signals are shortened to tau_b (eq. 8). sphere: every signal is brought to tau_b."""
    sigma: float = Field(0.0, ge=0.0)
    """Standard deviation of the digital noise of bp, dfa and tdfa; pdfa takes its noise from the device."""
    tau_h_max: float | None = Field(None, gt=0.0)
    """tau_h^max of eq. 9: activations in updates are clipped to tau_h_max / sqrt(width)."""
    tau_h_min: float = Field(0.0, ge=0.0)
    """tau_h^min of eq. 9: activations are offset by tau_h_min / sqrt(width) before the clip."""
    clipped_layers: ClippedLayers = "all"
    """Whose updates take clipped activations: all, hidden (not the network's input), feedback (not the
    output layer), none."""
    clip_width: WidthRule = "fan-in"
    """Width in tau / sqrt(width): of the clipped vector (fan-in) or of the updated layer (layer)."""
    through_clip: bool = False
    """Whether a clipped neuron (model.tau_h_max) has slope 0, as autograd finds, or phi' all the same (eq. 8)."""
    feedback_seed: int = Field(20210603, ge=0)
    """Seed of the digital feedback matrix of dfa and tdfa; the default is the packaged devices' medium, so that
    tdfa is pdfa without noise."""

    def implementation(self) -> Any:
        """See TrainerSection.implementation."""
        from training.feedback.algorithm import FeedbackAlgorithm

        return FeedbackAlgorithm

    def uses_device(self, protection: ProtectionConfig) -> bool:
        """Whether the run opens its device."""
        return self.kind == "pdfa"

    @model_validator(mode="before")
    @classmethod
    def _order_of_digital_noise(cls, values: Any) -> Any:
        """A digital feedback that is given a sigma takes the order that has one, unless it is given another."""
        if isinstance(values, Mapping) and "sigma" in values and values.get("kind") in ("bp", "dfa", "tdfa"):
            return {"order": "published", **values}
        return values

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.kind == "pdfa" and self.sigma:
            raise ValueError(
                f"sigma = {self.sigma} is for the digital feedbacks; the noise of pdfa is the device's: "
                "set device.noise.sigma"
            )
        if self.kind != "pdfa" and self.encoding != "ternary":
            raise ValueError(
                f"encoding = {self.encoding!r} is how pdfa shows the error to a device, but kind = {self.kind!r}; "
                "leave it out"
            )
        if self.order == "hardware" and self.tau_b is not None:
            raise ValueError(
                f"tau_b = {self.tau_b} scales each record after its noisy reading, which shrinks the noise with it; "
                "use order = 'published' (scale, then noise), or leave tau_b out"
            )
        if self.order == "hardware" and self.sigma:
            raise ValueError(
                f"sigma = {self.sigma} is noise added after the scale; use order = 'published' with it"
            )
        if self.scale == "sphere" and self.tau_b is None:
            raise ValueError("scale = 'sphere' brings signals to tau_b, which is missing; set tau_b")
        check_clip(self.tau_h_max, self.tau_h_min)
        return self
