"""Options of the feedback trainers: backpropagation and direct feedback alignment, digital or photonic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from typing_extensions import override

from opusim.errors import ConfigError
from opusim.training.config.kinds import PROTECTIONS, Flag, ProtectionSection, TrainerSection
from opusim.training.config.sections import ClippedLayers, Effect, Given, WidthRule, check_clip

Names = Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)]
"""One name or several."""


def _checked_rows(value: Any) -> Any:
    """Refuse an invalid `rows` in one line; pydantic would report each choice of the union."""
    whole = isinstance(value, int) or (isinstance(value, str) and value.strip().lstrip("+-").isdigit())
    if value in ("each", "sum") or (whole and not isinstance(value, bool)):
        return value
    raise ValueError(f"{value!r}: must be 'each', 'sum' or a whole number of at least 1")


class FeedbackConfig(TrainerSection):
    """How a feedback trains the hidden layers; the base of bp, dfa, tdfa and pdfa.

    Fully connected networks on class numbers take a closed form, every other module `opusim.FeedbackAlignment`. Only
    the closed form takes the keys of the PDFA paper (`opusim.training.feedback.trainer`).
    """

    implementation = "opusim.training.feedback.trainer:FeedbackTrainer"
    any_module = True
    examples: ClassVar[tuple[str, ...]] = (
        *TrainerSection.examples[:2],
        "--data fashion-mnist --model vit-small --epochs 5",
        TrainerSection.examples[2],
    )
    protections: ClassVar[tuple[str, ...]] = (
        "none",
        "record",
        "label-amplified",
        "label-readout",
        "label-randomized-response",
    )
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            keys=("trainer.scale",), needs="trainer.tau_b", holds=lambda run: run.trainer.tau_b is not None
        ),
        Effect(
            keys=("trainer.tau_h_min", "trainer.clip_width"),
            needs="trainer.tau_h_max",
            holds=lambda run: run.trainer.tau_h_max is not None,
        ),
        Effect(
            keys=("trainer.clipped_layers",),
            needs="trainer.tau_h_max",
            holds=lambda run: run.trainer.tau_h_max is not None or run.trainer.clipped_layers == "none",
        ),
    )

    order: Literal["hardware", "published"] = "hardware"
    """Where noise enters: after the reading (hardware) or after scaling into tau_B (published). hardware: the device's
    reading carries the noise; only a constant gain follows. published: eq. 8, the reading is scaled into the
    ball tau_b, then noise is added (for pdfa from the device's draw, for the digital feedbacks from a generator with
    standard deviation sigma). A digital feedback with a sigma takes published by default."""
    signal_gain: float = Field(1.0, gt=0.0)
    """Public constant on what each hidden layer receives, noise included (for bp: on the error at the top)."""
    tau_b: float | None = Field(None, gt=0.0)
    """tau_B of eq. 9: norm of a layer's signal before noise (only order = 'published')."""
    scale: Literal["ball", "sphere"] = "ball"
    """Which signals are scaled to tau_b: only longer ones (ball, eq. 8) or every one (sphere)."""
    tau_h_max: float | None = Field(None, gt=0.0)
    """tau_h^max of eq. 9: activations in updates are clipped to tau_h_max / sqrt(width)."""
    tau_h_min: float = Field(0.0, ge=0.0)
    """tau_h^min of eq. 9: activations are offset by tau_h_min / sqrt(width) before the clip."""
    clipped_layers: ClippedLayers = "all"
    """Layers whose updates take clipped activations: all, hidden (not the network's input), feedback (not the
    output layer), none."""
    clip_width: WidthRule = "fan-in"
    """Width in tau / sqrt(width): of the clipped vector (fan-in) or of the updated layer (layer)."""
    through_clip: bool = False
    """Slope of a clipped neuron (model.tau_h_max): if true 0, as in autograd, else phi' (eq. 8)."""

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.order == "hardware" and self.tau_b is not None:
            raise ValueError(
                f"tau_b = {self.tau_b} scales each record after its noisy reading, which shrinks the noise with it; "
                "use order = 'published' (scale, then noise), or leave tau_b out"
            )
        if self.scale == "sphere" and self.tau_b is None:
            raise ValueError("scale = 'sphere' brings signals to tau_b, which is missing; set tau_b")
        check_clip(self.tau_h_max, self.tau_h_min)
        return self

    @classmethod
    def defaults(cls, given: Given) -> dict[str, dict[str, Any]]:
        """Adam and smaller batches for every named network but the fully connected one; larger steps for noisy labels.

        Labels that are read once are noisy for good, and a mean over the last half of larger steps lowers that noise.
        The rate was the best on FashionMNIST's validation records, tried with this mean only.
        """
        if names_model(given):
            batches = given["sampler"].get("scheme") != "full-batch"
            return {"optimizer": {"name": "adam", "lr": 0.002}} | (
                {"sampler": {"batch_size": 64}} if batches else {}
            )
        descends = given["optimizer"].get("name", "sgd") == "sgd"
        if descends and PROTECTIONS.find(given["protection"]["kind"]).labels_read_once:
            return {"optimizer": {"lr": 0.04, "averaged_tail": 0.5}}
        return {}

    @property
    @override
    def update_clipping(self) -> dict[str, Any]:
        limits = {"tau_h_max": self.tau_h_max, "tau_h_min": self.tau_h_min}
        return {**limits, "layers": self.clipped_layers, "width": self.clip_width}

    @property
    def digital_sigma(self) -> float:
        """Standard deviation of the digital noise; 0 for a feedback whose noise is the device's."""
        return 0.0

    def require_keys(self, *, closed_form: bool) -> None:
        """Refuse (ConfigError) keys of the other kind of network, which would do nothing; see `closed_form`."""
        encoding = getattr(self, "encoding", "ternary")
        if closed_form and encoding not in ("ternary", "planes"):
            reason = (
                f"{encoding!r} is for other modules than fully connected networks; use 'ternary' or 'planes'"
            )
            raise ConfigError("configuration", "trainer.encoding", reason)
        if closed_form and getattr(self, "gain", 1.0) == 0:
            reason = (
                "0 leaves a fully connected network without feedback; give a gain above 0 (modules take 0)"
            )
            raise ConfigError("configuration", "trainer.gain", reason)
        for name, reason in (_OF_MODULES if closed_form else _OF_CLOSED_FORM).items():
            field, value = type(self).model_fields.get(name), getattr(self, name, None)
            if field is None or value == field.default or (name == "slices" and value == "own"):
                continue
            raise ConfigError(
                "configuration", f"trainer.{name}", f"{value!r} does nothing for this model: {reason}"
            )


class _DigitalConfig(FeedbackConfig):
    """A feedback that is computed digitally, with optional noise."""

    sigma: float = Field(0.0, ge=0.0)
    """Standard deviation of the digital noise, in units of the projection."""

    @property
    @override
    def digital_sigma(self) -> float:
        return self.sigma

    @model_validator(mode="before")
    @classmethod
    def _order_of_noise(cls, values: Any) -> Any:
        """A sigma takes order = 'published', unless another order is given."""
        if isinstance(values, Mapping) and "sigma" in values:
            return {"order": "published", **values}
        return values

    @model_validator(mode="after")
    def _check_sigma(self) -> Self:
        if self.order == "hardware" and self.sigma:
            raise ValueError(
                f"sigma = {self.sigma} is noise added after the scale; use order = 'published' with it"
            )
        return self


class BpConfig(_DigitalConfig):
    """Backpropagation, as the reference."""

    summary: ClassVar[str] = "Backpropagation, as the reference (no device)."

    effects: ClassVar[tuple[Effect, ...]] = (
        *_DigitalConfig.effects,
        Effect(
            keys=("trainer.augment_mirror", "trainer.augment_shift"),
            needs="trainer.augmented_copies above 0",
            holds=lambda run: run.trainer.augmented_copies > 0,
        ),
    )

    kind: Literal["bp"] = "bp"
    """bp: backpropagation."""
    augmented_copies: int = Field(0, ge=0, le=256)
    """Random copies of each training image in a step. A record's gradient is the mean over its copies, taken before the
    clip, so that they cost no epsilon. Memory and time grow with them. 0 takes images as they are."""
    augment_mirror: bool = True
    """Exchange left and right of a copy with probability 1/2."""
    augment_shift: int = Field(4, ge=0, le=64)
    """Largest shift of a copy in pixels, up and down, left and right; the image is reflected at its border."""


def names_model(given: Given) -> bool:
    """Return whether a run names another network than the fully connected one."""
    model: Any = given["run"].get("model")
    name = model.get("name") if isinstance(model, Mapping) else getattr(model, "name", None)
    return name not in (None, "mlp")


class PointsConfig(FeedbackConfig):
    """Where a projected error enters a module (`opusim.FeedbackAlignment`)."""

    feedback_matrix = True

    points: Names | None = None
    """Feedback points: names or shell patterns of names of submodules, or blocks, the repeated blocks but the last.
    Each one's output receives a slice of the projected error. A fully connected network has its hidden layers. None
    takes those that the model declares, else those that suit it; a run's folder names them."""
    error_at: str | None = None
    """Submodule whose output carries the error that is projected; NAME.input takes its input, "" the model's output.
    None takes the place that the model declares, else the one that suits it."""
    rows: Annotated[Literal["each", "sum"] | int, BeforeValidator(_checked_rows)] = "each"
    """Which rows of the error are projected if a record has several, as a sequence has: each one (each), their sum
    (sum), or a number of them, drawn at random."""
    spread: Literal["broadcast", "full"] | None = None
    """How a record's one row reaches a point with several positions: the same vector everywhere (broadcast), or outputs
    of the projection for every position (full). None takes full for chosen points before a head that has weights for
    each position, else broadcast."""
    slices: Literal["own", "shared"] | None = None
    """Which outputs of the projection the points take: each its own (own, as an mlp always has), or all the same ones
    (shared, the default of other modules)."""
    normalised: bool | None = None
    """Whether the feedback passes through the slope of a layer norm at each point, for models whose residual stream is
    not normalised, such as those with pre-norm blocks. None looks at the model."""
    readout_every: int = Field(0, ge=0)
    """Steps from one fit of a learnt read-out of the projection to the next (`fit_readout` of `FeedbackAlignment`); the
    batch of such a step is backpropagated once more, and in the first of these steps three other batches. 0 takes plain
    feedback. No protection covers what a fit learns of records."""

    @property
    def projected(self) -> dict[str, Any]:
        """How the error is shown, and to which matrix, as arguments of `opusim.FeedbackAlignment`."""
        return {"encoding": "real"}

    @model_serializer(mode="wrap")
    def _without_a_readout(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave readout_every out of a run without a read-out, as in folders of earlier versions."""
        found: dict[str, Any] = handler(self)
        if not self.readout_every:
            found.pop("readout_every", None)
        return found

    @model_validator(mode="after")
    def _check_points(self) -> Self:
        if self.points is not None and not self.points:
            raise ValueError("points is empty; name submodules, or take 'blocks'")
        if isinstance(self.rows, int) and self.rows < 1:
            raise ValueError(f"rows = {self.rows}: must be at least 1, or 'each' or 'sum'")
        return self


class _ProjectedConfig(PointsConfig, _DigitalConfig):
    """A digital random projection of the error."""

    dropped: ClassVar[Mapping[str, Mapping[Any, str]]] = {
        "projection": {
            "hadamard": "take 'gaussian', which learns as well, or trainer.kind = 'bp' for wide outputs"
        }
    }

    gain: float | None = Field(None, ge=0.0)
    """The projected error of a layer of width n is multiplied by gain / sqrt(n), before any scale (by default 1, and
    0.3 where the feedback is chosen to be normalised). 0, for modules only, is the control in which nothing before the
    last feedback point learns."""
    projection: Literal["gaussian", "hadamard"] = "gaussian"
    """Digital feedback matrix; hadamard is found in stored runs only. gaussian: independent entries, as an optical
    medium has."""
    feedback_seed: int = Field(20210603, ge=0)
    """Seed of the digital feedback matrix; the default is the packaged devices' medium, so that tdfa is pdfa without
    noise."""

    @property
    @override
    def projected(self) -> dict[str, Any]:
        return {**super().projected, "seed": self.feedback_seed}


class DfaConfig(_ProjectedConfig):
    """Direct feedback alignment with a digital random matrix."""

    summary: ClassVar[str] = (
        "Direct feedback alignment: a digital random projection of the error (no device)."
    )

    kind: Literal["dfa"] = "dfa"
    """dfa: digital random projection of the error."""


class EncodedConfig(PointsConfig):
    """A projection of the error in entries of -1, 0 and 1, as a device takes them; the base of tdfa and pdfa."""

    effects: ClassVar[tuple[Effect, ...]] = (
        *FeedbackConfig.effects,
        Effect(
            keys=("trainer.threshold", "trainer.relative_threshold"),
            needs="trainer.encoding = 'ternary'",
            holds=lambda run: run.trainer.encoding == "ternary",
        ),
        Effect(
            keys=("trainer.planes",),
            needs="trainer.encoding = 'planes'",
            holds=lambda run: run.trainer.encoding == "planes",
        ),
        Effect(  # of several effects of a key, the message names the last
            keys=("trainer.threshold",),
            needs="model.name = 'mlp'; other models take trainer.relative_threshold with trainer.encoding = 'ternary'",
            holds=lambda run: run.model.name == "mlp",
        ),
    )

    threshold: float = Field(0.15, ge=0.0)
    """Ternarization threshold of a fully connected network (0.15 in the paper)."""
    relative_threshold: float = Field(0.6, ge=0.0)
    """Ternarization threshold of any other module, relative to the root mean square of an error's entries."""
    encoding: Literal["ternary", "planes", "stochastic", "sign"] = "ternary"
    """How the error is shown (ternary, planes, stochastic or sign, by default ternary for an mlp and stochastic for
    other modules). ternary: one reading a row, by a threshold (the paper). planes: signed binary digits of
    e / max|e|, one reading a digit, which keeps magnitudes at the cost of more frames, and noise in proportion to the
    error. stochastic: one reading, in which an entry is shown with a probability in proportion to its size. sign: one
    reading of the signs. A fully connected network takes ternary or planes."""
    planes: int = Field(4, ge=1, le=24)
    """Number of digits of encoding = 'planes'; the error is shown to 2^-planes of its largest entry."""

    @property
    @override
    def projected(self) -> dict[str, Any]:
        shown = {"encoding": self.encoding, "threshold": self.relative_threshold, "planes": self.planes}
        return {**super().projected, **shown}

    @classmethod
    def defaults(cls, given: Given) -> dict[str, dict[str, Any]]:
        """See FeedbackConfig.defaults; named networks show the error stochastically."""
        others = {"trainer": {"encoding": "stochastic"}} if names_model(given) else {}
        return {**super().defaults(given), **others}


class TdfaConfig(EncodedConfig, _ProjectedConfig):
    """Direct feedback alignment of the ternarized error."""

    summary: ClassVar[str] = (
        "Ternarized direct feedback alignment: a digital projection of the error in {-1, 0, 1}."
    )

    kind: Literal["tdfa"] = "tdfa"
    """tdfa: digital random projection of the ternarized error."""


class PdfaConfig(EncodedConfig):
    """Photonic direct feedback alignment: the error goes through the device."""

    summary: ClassVar[str] = (
        "Photonic direct feedback alignment: the ternarized error goes through the device."
    )
    device_keys: ClassVar[Mapping[str, str] | None] = {}
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            name="sigma",
            key="device.noise.sigma",
            help="Standard deviation of the device's noise, in units of the projection.",
        ),
    )
    instead: ClassVar[Mapping[str, str]] = {"sigma": "its noise is the device's; set device.noise.sigma"}

    kind: Literal["pdfa"] = "pdfa"
    """pdfa: projection of the ternarized error through the device."""
    gain: float | None = Field(None, ge=0.0)
    """The projected error of a layer of width n is multiplied by gain / sqrt(n), before any scale (by default 1, and
    0.3 where the feedback is chosen to be normalised). 0, for modules only, is the control in which nothing before the
    last feedback point learns."""

    def uses_device(self, protection: ProtectionSection) -> bool:
        """Always."""
        return True


_OF_CLOSED_FORM = {
    **dict.fromkeys(
        sorted({*_DigitalConfig.model_fields} - {*TrainerSection.model_fields}),
        "only fully connected networks on class numbers have it; leave it out",
    ),
    "threshold": "other modules than fully connected networks take trainer.relative_threshold; leave it out",
}
_OF_MODULES = {
    **dict.fromkeys(
        sorted({*PointsConfig.model_fields} - {*FeedbackConfig.model_fields}),
        "a fully connected network receives the error of its output at its hidden layers; leave it out",
    ),
    "slices": "each hidden layer of a fully connected network has its own outputs; take 'own', or leave it out",
    "relative_threshold": "a fully connected network takes trainer.threshold; leave it out",
    "augmented_copies": "is for modules; take a model.name other than 'mlp', or leave it out",
}
