"""What is protected, and how strongly."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from training.config.section import Section

Relation = Literal["zero_out", "add_or_remove_one", "replace_one"]
ProtectionName = Literal[
    "none", "record", "last-iterate", "label", "label-amplified", "label-once", "label-response"
]


class ProtectionConfig(Section):
    """What is protected, and how strongly."""

    kind: ProtectionName = "none"
    """none: noise only where the trainer puts it. record: whole records, by clipped contributions, central Gaussian
    noise and Poisson batches. last-iterate (convex): whole records, of which only the last model is published. label,
    label-amplified, label-once, label-response: the labels alone, the features being public; by noise on every layer's
    signal and a budget for each record, by clipping and noise in the geometry of public features with secret Poisson
    batches, by one noisy reading of each label, by randomized response. convex with an epsilon or a
    noise_multiplier: last-iterate by default, record with Poisson batches."""
    relation: Relation | None = None
    """Which data sets count as neighbours under kind = 'record'. zero_out: a record against an empty place, the number
    of records being public. add_or_remove_one: a record more or less, their number being private; needs
    sampler.sampling_probability. replace_one: a record against any other (not for zo). None: zero_out; for the convex
    trainer replace_one. All other kinds are about replacing: a record (last-iterate) or a label."""
    epsilon: float | None = Field(None, gt=0.0)
    """Budget at delta: training stops before the step that would exceed it. Where the noise is not given it is the
    least that reaches this epsilon."""
    delta: float = Field(1e-5, ge=0.0, lt=1.0)
    """delta of every guarantee that this run prints; 0 asks for pure privacy, which Laplace noise (zo) and randomized
    response give."""
    noise_multiplier: float | None = Field(None, gt=0.0)
    """z: the noise's standard deviation over the clip (all kinds but label-once and label-response); None takes it from
    epsilon."""
    clip_norm: float | None = Field(None, ge=1e-12, le=1e12)
    """Largest norm of a record's contribution: over all layers (record, 1 by default; zo: its loss difference, 0.05 by
    default), of each layer's signal (label, 1 by default), over all layers in the geometry of public features
    (label-amplified, 0.2 by default)."""
    divisor: float | None = Field(None, ge=1e-12, le=1e12)
    """Constant that the noisy sum is divided by; None takes sampler.batch_size, never the realised size."""
    noise: Literal["digital", "device"] = "digital"
    """Where the credited noise comes from: a digital generator, and the device's own noise earns nothing; or the
    device, whose noise must be Gaussian."""
    floor: float = Field(1e-3, gt=0.0)
    """Noise on every weight beside that on the signals, as a share of the mean second moment of a layer's inputs
    (label, label-amplified)."""
    reference_size: int = Field(4096, ge=1)
    """Public records, drawn from the training features, that give label-amplified noise its geometry."""
    equalise: bool = False
    """Whether these records are weighed by the D-optimal design in the first layer (label-amplified)."""
    flat_prior: float = Field(0.3, ge=0.0, le=1.0)
    """Share of the training before the model's own prediction becomes the prior of a noisy label (label-once,
    label-response); 1 for never."""

    @property
    def protects(self) -> Literal["nothing", "records", "labels"]:
        """What the run's guarantee is about."""
        if self.kind == "none":
            return "nothing"
        return "records" if self.kind in ("record", "last-iterate") else "labels"

    @property
    def poisson(self) -> bool:
        """Whether every step is paid for and draws a secret Poisson batch."""
        return self.kind in ("record", "label-amplified")

    @property
    def last_iterate(self) -> bool:
        """Whether only the final model is published."""
        return self.kind == "last-iterate"

    @property
    def one_look(self) -> bool:
        """Whether the labels are read or randomized once, before training."""
        return self.kind in ("label-once", "label-response")

    @property
    def clip(self) -> float:
        """clip_norm, or its default for this kind."""
        default = 0.2 if self.kind == "label-amplified" else 1.0
        return default if self.clip_norm is None else self.clip_norm

    @model_validator(mode="after")
    def _check_relation(self) -> Self:
        if self.relation is None or self.kind in ("none", "record"):
            return self
        if self.relation != "replace_one":
            what = "a record" if self.kind == "last-iterate" else "a label"
            raise ValueError(
                f"relation = {self.relation!r} is not for kind = {self.kind!r}, whose theorem is about replacing "
                f"{what}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_strength(self) -> Self:
        given = {"epsilon": self.epsilon, "noise_multiplier": self.noise_multiplier}
        if self.kind == "none":
            for name, value in given.items():
                if value is not None:
                    raise ValueError(
                        f"{name} = {value} does nothing under kind = 'none'; set protection.kind"
                    )
        elif self.kind in ("record", "last-iterate", "label-amplified"):
            if self.epsilon is None and self.noise_multiplier is None:
                raise ValueError(
                    f"epsilon is missing; kind = {self.kind!r} needs one above 0, such as 3.0, or a noise_multiplier"
                )
        elif self.epsilon is None:
            raise ValueError(f"epsilon is missing; kind = {self.kind!r} needs one above 0, such as 3.0")
        return self
