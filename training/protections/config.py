"""Options of the protections: what is protected, and how strongly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from typing_extensions import override

from opusim.accounting.guarantee import Adjacency
from opusim.description.section import BadKey
from opusim.training.config.kinds import ProtectionSection, TrainerSection
from opusim.training.config.sections import Effect, Given, Relation

_ABOUT_LABELS = {"relation": "its theorem is about replacing a label; leave it out"}
_STEPS_LOST = (
    "a kill or a power cut makes it pay again for the steps since its last checkpoint, and for up to 15 that it "
    "reserved, so that its budget may end before its last epoch"
)
_MORE_ACCURATE = (
    "take protection.kind = 'label-randomized-response' or 'record', which learn more at the same epsilon"
)
Source = Literal["digital", "device"]


class NoProtectionConfig(ProtectionSection):
    """No protection: the only noise is the trainer's own."""

    implementation = "opusim.training.protections.base:NoProtection"
    protects = "nothing"
    summary: ClassVar[str] = "No protection; the only noise is the trainer's own."
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            keys=("protection.divisor",),
            needs="protection.kind = 'record' or 'label-amplified', or trainer.kind = 'zo' or 'convex'",
            holds=lambda run: run.trainer.plain_descent,
        ),
    )

    kind: Literal["none"] = "none"
    """none: the only noise is the trainer's own."""
    divisor: float | None = Field(None, ge=1e-12, le=1e12)
    """Constant that a batch's sum is divided by (zo, convex); None takes sampler.batch_size."""

    @override
    def relation_of(self, trainer: TrainerSection) -> Adjacency | None:
        return None


class _Strength(ProtectionSection):
    """A protection with a budget."""

    needs_epsilon: ClassVar[bool] = True
    """Whether a noise multiplier cannot replace epsilon."""

    epsilon: float | None = Field(None, gt=0.0)
    """Budget at delta: training stops before the step that would exceed it. Unless the noise is given, it is the least
    that reaches this epsilon."""

    @model_validator(mode="after")
    def _check_strength(self) -> Self:
        if any(getattr(self, key, None) in better for key, better in self.dropped.items()):
            return self  # `require_offered` refuses it, and says what to take instead
        if self.epsilon is None and (self.needs_epsilon or self.noise_multiplier is None):
            other = "" if self.needs_epsilon else ", or a noise_multiplier"
            reason = f"is missing; kind = {self.kind!r} needs one above 0, such as 3.0{other}"
            raise BadKey("protection.epsilon", reason)
        return self


class _NoisyStrength(_Strength):
    """A protection by noise of a given or calibrated strength."""

    needs_epsilon = False

    noise_multiplier: float | None = Field(None, gt=0.0)
    """z: the noise's standard deviation over the clip; None calibrates it to epsilon."""
    noise: Source = "digital"
    """Source of the noise that the guarantee rests on. digital: a generator; the device's own noise earns nothing.
    device: the device, whose noise must be Gaussian."""


_CLIPPING_KEYS: Mapping[str, tuple[str, ...]] = {
    "per_layer": ("layer_norms",),
    "automatic": ("stability",),
    "adaptive": ("target_quantile", "bound_rate", "count_noise"),
}
"""Keys of the rules of `protection.clipping`."""


def _clips_so(kind: str, run: Any) -> bool:
    return bool(run.protection.clipping == kind)


class RecordConfig(_NoisyStrength):
    """Whole records: clipped contributions, central Gaussian noise, Poisson batches."""

    implementation = "opusim.training.protections.record:RecordProtection"
    poisson = True
    cost_of_a_kill: ClassVar[str | None] = _STEPS_LOST
    summary: ClassVar[str] = "Whole records: clipped contributions, central noise, Poisson batches."
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            keys=("protection.correlation",),
            needs="protection.bands above 1",
            holds=lambda run: run.protection.bands > 1,
        ),
        Effect(
            keys=("protection.records_per_user",),
            needs="protection.unit = 'user'",
            holds=lambda run: run.of_users,
        ),
        *(
            Effect(
                keys=tuple(f"protection.{key}" for key in keys),
                needs=f"protection.clipping = {kind!r}",
                holds=partial(_clips_so, kind),
            )
            for kind, keys in _CLIPPING_KEYS.items()
        ),
    )

    kind: Literal["record"] = "record"
    """record: whole records, by clipped contributions, central Gaussian noise and Poisson batches."""
    relation: Relation | None = None
    """Which data sets count as neighbours. zero_out: a record against an empty place; the number of records is public.
    add_or_remove_one: one record more or less; their number is private, so sampler.sampling_probability is required.
    replace_one: a record against any other (not for zo). None: zero_out, and replace_one for convex."""
    unit: Literal["record", "user"] = "record"
    """What is protected: a record, or a user with all its records (bp, dfa, tdfa, pdfa). Users are drawn and clipped in
    the place of records, and sampler.batch_size counts them. data.user names the column of their IDs."""
    records_per_user: int | None = Field(None, ge=1, le=65536)
    """k: a step takes at most k records of a drawn user, others in each step, and clips their mean gradient once."""
    clip_norm: float | None = Field(None, ge=1e-12, le=1e12)
    """Largest norm of a record's contribution over all layers; 1 by default. zo: of its loss difference, 0.05 by
    default. convex takes trainer.clip instead."""
    clipping: Literal["flat", "per_layer", "automatic", "adaptive"] = "flat"
    """How a record's contribution is brought within clip_norm, C (bp, dfa, tdfa, pdfa). flat: one factor min(1, C /
    norm). per_layer: one for each layer. automatic: C / (norm + stability), for every record. adaptive: flat, with a
    bound that begins at C and follows a quantile of the norms by noisy counts; the noise multiplier pays for these."""
    layer_norms: tuple[float, ...] | None = None
    """Bound of each layer in place of clip_norm, which is then the root of the sum of their squares; None takes C /
    sqrt(layers) for each. A layer is a weight with its bias."""
    stability: float = Field(0.01, ge=1e-6, le=1e6)
    """Constant added to a record's norm before C is divided by it, so that short gradients stay short."""
    target_quantile: float = Field(0.5, gt=0.0, lt=1.0)
    """Share of the records whose norm the bound exceeds in the long run."""
    bound_rate: float = Field(0.2, ge=1e-6, le=10.0)
    """eta: a step multiplies the bound by exp(-eta (noisy share within it - target_quantile))."""
    count_noise: float = Field(5.0, ge=0.6, le=1e6)
    """Noise of a step's count of records within the bound, over noise_multiplier. The sum's noise grows by 1 / sqrt(1 -
    1 / (2 count_noise)^2), so that both together cost what noise_multiplier says."""
    divisor: float | None = Field(None, ge=1e-12, le=1e12)
    """Constant that the noisy sum is divided by; None takes sampler.batch_size, never the realised size."""
    bands: int = Field(1, ge=1, le=256)
    """b: the noise is correlated over b steps, so that much of it cancels in the sum of updates, and step t draws from
    the t-th of b random subsets of the records in turn (bp, dfa, tdfa, pdfa, ulr). At most 1 / q; 1 for independent
    noise. Less noise stays in the parameters at small batches and large epsilon; accuracy need not follow."""
    fixed_batches: bool | None = None
    """Run the same number of rows in every step, with rows of weight zero after the records that were drawn, so that
    the time of a step does not reveal their number (bp, dfa, tdfa, pdfa). A batch of more records, at most once in 10^9
    steps, runs as many rows again. It costs arithmetic: 1.2 times at 1,024 expected records, 1.4 at 256. None: on a
    graphics card, and from 1,024 expected records. Under add_or_remove_one sampler.batch_size says what is expected."""
    correlation: tuple[float, ...] | None = None
    """Coefficients of the correlated noise, one for each band; None takes those with the least noise in the parameters
    over the run, for its momentum and schedule."""

    @model_serializer(mode="wrap")
    def _stored(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out unset keys that former versions lacked, so that their folders resume."""
        found: dict[str, Any] = write(self)
        if self.fixed_batches is None:
            found.pop("fixed_batches", None)
        if self.unit == "record":
            found.pop("unit", None)
            found.pop("records_per_user", None)
        if self.clipping == "flat":
            found.pop("clipping", None)
        for kind, keys in _CLIPPING_KEYS.items():
            for key in keys if kind != self.clipping else ():
                found.pop(key, None)
        return found

    @property
    def clip(self) -> float:
        """C: clip_norm or its default, or the root of the sum of squares of layer_norms."""
        return super().clip if self.layer_norms is None else math.hypot(*self.layer_norms)

    @property
    def clipping_rule(self) -> dict[str, Any]:
        """The rule as `opusim.training.protections.clipping.Clipping` takes it."""
        keys = _CLIPPING_KEYS.get(self.clipping, ())
        return {"kind": self.clipping, **{key: getattr(self, key) for key in keys}}

    @classmethod
    def defaults(cls, given: Given) -> dict[str, dict[str, Any]]:
        """Poisson batches, which the theorem asks for."""
        return {"sampler": {"scheme": "poisson"}}

    def relation_of(self, trainer: TrainerSection) -> Adjacency | None:
        """The relation given, or the trainer's default."""
        return Adjacency(self.relation or trainer.relations[0])

    def check(self, run: Any) -> None:
        """Refuse a relation that the trainer does not take."""
        trainer = run.trainer
        if self.relation is not None and self.relation not in trainer.relations:
            raise BadKey(
                "protection.relation",
                f"{self.relation!r} is not for trainer.kind = {trainer.kind!r}; "
                f"take one of {', '.join(trainer.relations)}",
            )
        if run.of_users and self.records_per_user is None:
            reason = (
                "is missing; protection.unit = 'user' needs the number of a user's records that a step takes"
            )
            raise BadKey("protection.records_per_user", f"{reason}, such as 10")
        if run.of_users and self.bands > 1:
            raise BadKey(
                "protection.bands", f"{self.bands} is not for protection.unit = 'user'; leave it out"
            )
        if self.layer_norms is not None:
            norms = list(self.layer_norms)
            if not norms or not all(1e-12 <= norm <= 1e12 for norm in norms):
                raise BadKey(
                    "protection.layer_norms", f"{norms} must be numbers in [1e-12, 1e12], one for each layer"
                )
            if self.clip_norm is not None:
                reason = f"{self.clip_norm:g} follows from protection.layer_norms; leave one of them out"
                raise BadKey("protection.clip_norm", reason)
        if self.clipping == "adaptive" and (self.bands > 1 or self.noise == "device"):
            key, value = ("bands", self.bands) if self.bands > 1 else ("noise", "'device'")
            reason = f"{value} is not for protection.clipping = 'adaptive', whose noise is digital and fresh each step"
            raise BadKey(f"protection.{key}", f"{reason}; leave it out, or take another clipping")
        if self.bands > 1 and run.sampler.scheme != "poisson":
            reason = f"{run.sampler.scheme!r} draws no subsets in turn; protection.bands = {self.bands} needs 'poisson'"
            raise BadKey("sampler.scheme", reason)
        if self.correlation is not None and len(self.correlation) != self.bands:
            given = len(self.correlation)
            reason = f"has {given} coefficients: protection.bands = {self.bands} needs as many; leave it out"
            raise BadKey("protection.correlation", reason)
        # If c_0 >= c_1 >= ... >= 0, no root of the sum over k of c_k x^k lies inside the unit circle (Enestroem and
        # Kakeya), so that the inverse of the banded Toeplitz matrix of these coefficients cannot grow.
        falls = all(first >= second >= 0 for first, second in pairwise((*(self.correlation or ()), 0.0)))
        if self.correlation is not None and not (falls and self.correlation[0] > 0):
            reason = (
                f"{list(self.correlation)} must not increase, with the first above 0 and none below 0: else the noise, "
                "C^-1 times fresh numbers, may grow until rounding replaces it; leave it out"
            )
            raise BadKey("protection.correlation", reason)


class LastIterateConfig(_NoisyStrength):
    """Whole records; only the final model is published."""

    implementation = "opusim.training.protections.record:LastIterateProtection"
    last_iterate = True
    summary: ClassVar[str] = "Whole records, if only the final model is published (convex)."
    instead: ClassVar[Mapping[str, str]] = {
        "relation": "its theorem is about replacing a record; leave it out",
        "clip_norm": "use trainer.clip",
        "divisor": "the theorem divides by the batch size; leave it out",
    }

    kind: Literal["last-iterate"] = "last-iterate"
    """last-iterate: whole records, if only the final model is published."""

    @classmethod
    def defaults(cls, given: Given) -> dict[str, dict[str, Any]]:
        """A released run keeps only its newest checkpoint."""
        return {"checkpoint": {"keep": 1}} if given["run"].get("mode") == "release" else {}

    def check(self, run: Any) -> None:
        """Refuse to keep models before the last one in a released run."""
        if run.mode == "release" and run.checkpoint.keep > 1:
            raise BadKey(
                "checkpoint.keep",
                f"{run.checkpoint.keep} keeps iterates before the last one, which protection.kind = 'last-iterate' "
                "does not cover; leave it out",
            )


class LabelNoiseConfig(_NoisyStrength):
    """Labels protected by noise on the gradients, with public features."""

    protects = "labels"
    instead: ClassVar[Mapping[str, str]] = _ABOUT_LABELS

    floor: float = Field(1e-3, gt=0.0)
    """Additional noise on every weight, as a share of the mean second moment of a layer's inputs."""


class LabelBudgetConfig(LabelNoiseConfig):
    """Labels: noise on every layer's signal, and a privacy budget for each record; of stored runs only."""

    trainers = ("bp", "dfa", "tdfa", "pdfa")
    dropped: ClassVar[Mapping[str, Mapping[Any, str]]] = {"kind": {"label-budget": _MORE_ACCURATE}}

    kind: Literal["label-budget"] = "label-budget"
    clip_norm: float | None = Field(None, ge=1e-12, le=1e12)


class LabelAmplifiedConfig(LabelNoiseConfig):
    """Labels: clipping and noise in the geometry of public features, on secret Poisson batches."""

    implementation = "opusim.training.protections.amplified_labels:AmplifiedLabelProtection"
    poisson = True
    cost_of_a_kill: ClassVar[str | None] = _STEPS_LOST
    default_clip: ClassVar[float] = 0.2
    tested_with: ClassVar[Mapping[str, Any]] = {"noise_multiplier": 1.0, "clip_norm": 0.005}
    summary: ClassVar[str] = "Labels: clipping and noise in the geometry of public features; Poisson batches."

    kind: Literal["label-amplified"] = "label-amplified"
    """label-amplified: labels, with public features, by clipping and noise in the geometry of these features and secret
    Poisson batches."""
    clip_norm: float | None = Field(None, ge=1e-12, le=1e12)
    """Largest norm of a record's contribution over all layers, in the geometry of public features; 0.2 by default."""
    divisor: float | None = Field(None, ge=1e-12, le=1e12)
    """Constant that the noisy sum is divided by; None takes sampler.batch_size, never the realised size."""
    reference_size: int = Field(4096, ge=1)
    """Number of public records, drawn from the training features, that define the noise's geometry."""
    reference_every: int = Field(4, ge=1)
    """Steps for which the geometry of hidden layers is kept; 1 computes it at every step, which takes longer."""
    equalise: bool = False
    """Weight these records by the D-optimal design in the first layer."""

    @classmethod
    def defaults(cls, given: Given) -> dict[str, dict[str, Any]]:
        """Poisson batches, which the theorem asks for."""
        return {"sampler": {"scheme": "poisson"}}


class OneLookConfig(_Strength):
    """Labels that are read or randomized once, before training."""

    protects = "labels"
    labels_read_once = True
    tested_with: ClassVar[Mapping[str, Any]] = {"epsilon": 2.0}
    instead: ClassVar[Mapping[str, str]] = _ABOUT_LABELS

    flat_prior: float = Field(0.3, ge=0.0, le=1.0)
    """Share of the training before the model's own prediction becomes the prior of a noisy label; 1 for never."""


class LabelReadoutConfig(OneLookConfig):
    """Labels: one noisy reading of each label, kept and reused."""

    summary: ClassVar[str] = "Labels: one reading of each label through a device, kept; posterior targets."
    dropped: ClassVar[Mapping[str, Mapping[Any, str]]] = {
        "noise": {
            "digital": f"{_MORE_ACCURATE}; or read labels through a device: 'device', 'counts', 'argmax'"
        }
    }
    tested_records: ClassVar[int] = 1000

    kind: Literal["label-readout"] = "label-readout"
    """label-readout: labels, with public features, by one noisy reading of each label through a device."""
    noise: Literal["digital", "device", "counts", "argmax"] = "digital"
    """Source of the noise that the guarantee rests on; digital is found in stored runs only. device: the device, whose
    noise must be Gaussian. counts: a camera's photon counts of each label, kept; the laser is dimmed until they cost
    epsilon. argmax: only the brightest group of pixels, one group for each label, under a secret permutation of each
    record's labels; the counts are discarded."""
    rate_frames: int | None = Field(None, ge=500, le=1_000_000)
    """Frames of each label's pattern, before and after the labels, from which limits of every pixel's rates are
    measured for any medium and responses; None takes the described rates. More frames narrow the limits."""
    top_up: bool = True
    """Whether digital noise is added if the device's is too little for epsilon; false refuses such a device, and says
    how much noise it lacks."""
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            keys=("protection.top_up",),
            needs="protection.noise = 'device'",
            holds=lambda run: run.protection.noise == "device",
        ),
        Effect(
            keys=("protection.rate_frames",),
            needs="protection.noise = 'counts'",
            holds=lambda run: run.protection.noise == "counts",
        ),
    )

    @model_serializer(mode="wrap")
    def _stored(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out unset keys that former versions lacked, so that their folders resume."""
        found: dict[str, Any] = write(self)
        if self.rate_frames is None:
            found.pop("rate_frames", None)
        return found

    @property
    @override
    def implementation(self) -> str:  # type: ignore[override]
        special = {"counts": "counted_labels:LabelCounts", "argmax": "counted_labels:LabelArgmax"}
        return f"opusim.training.protections.{special.get(self.noise, 'noisy_labels:LabelReadout')}Protection"


class LabelRandomizedResponseConfig(OneLookConfig):
    """Labels: each replaced once by randomized response."""

    summary: ClassVar[str] = "Labels: randomized response; posterior targets."
    tested_records: ClassVar[int] = 4000

    kind: Literal["label-randomized-response"] = "label-randomized-response"
    """label-randomized-response: labels, with public features, by randomized response."""
    stages: int = Field(1, ge=1, le=64)
    """Parts of the records, drawn at random. The labels of each part after the first are randomized among the classes
    that a linear model of the public features, fitted to earlier responses, makes likely (Ghazi et al. 2021). 1 for
    plain randomized response."""

    @property
    @override
    def implementation(self) -> str:  # type: ignore[override]
        name = "RandomizedResponse" if self.stages == 1 else "StagedResponse"
        return f"opusim.training.protections.noisy_labels:{name}Protection"


class LabelReleaseConfig(_Strength):
    """Labels: one noisy linear model of public features, drawn once."""

    implementation = "opusim.training.protections.released_model:LabelReleaseProtection"
    protects = "labels"
    labels_read_once = True
    tested_with: ClassVar[Mapping[str, Any]] = {"epsilon": 2.0}
    instead: ClassVar[Mapping[str, str]] = _ABOUT_LABELS
    summary: ClassVar[str] = "Labels: one noisy linear model of public features (ridge)."

    kind: Literal["label-release"] = "label-release"
    """label-release: labels, with public features, by one noisy linear model (ridge)."""
    noise: Source = "digital"
    """Source of the noise that the guarantee rests on. digital: a generator. device: the device, whose noise must be
    Gaussian."""
    rounds: int = Field(1, ge=0, le=100)
    """How often the weights of records are fitted to their leverages; 0 leaves all weights at 1. The noise follows the
    largest weighted leverage."""
    level: float = Field(1.0, gt=0.0, le=1e6)
    """Largest root of a weighted leverage that is kept, over the root mean square of all."""
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            keys=("protection.level",),
            needs="protection.rounds above 0",
            holds=lambda run: run.protection.rounds > 0,
        ),
    )
