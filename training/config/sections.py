"""The parts of a run's configuration: what every section is, the shared ones, and the bases of those chosen by kind.

A trainer's section is a `TrainerSection` and a protection's is a `ProtectionSection`; each kind is one class, found by
its name in an entry-point group (`opusim.training.config.kinds`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from opusim.accounting.guarantee import Adjacency
from opusim.description.section import Section as BaseSection
from opusim.description.section import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Effect:
    """When keys have an effect. A key without one is refused, never ignored.

    Attributes:
        keys: Dotted keys of the run, or whole sections.
        needs: The condition in words, after "it needs".
        holds: The condition on the RunConfig.
    """

    keys: tuple[str, ...]
    needs: str
    holds: Callable[[Any], bool]


class Section(BaseSection):
    """A part of the configuration of a run, whose numbers are at most 1e12 in size."""

    effects: ClassVar[tuple[Effect, ...]] = ()
    """Keys that have an effect only under a condition; every other key always has one."""
    largest: ClassVar[dict[str, float]] = {}
    """Smaller limits of single keys."""

    @model_validator(mode="after")
    def _check_magnitudes(self) -> Self:
        for name in type(self).model_fields:
            value, limit = (
                getattr(self, name),
                self.largest.get(name, 1e12),
            )  # squares stay below float32's 3e38
            if isinstance(value, float) and abs(value) > limit:
                raise ValueError(
                    f"{name} = {value:g} exceeds {limit:g}, beyond which float32 overflows; lower it"
                )
        return self


ClippedLayers = Literal["all", "hidden", "feedback", "none"]
WidthRule = Literal["fan-in", "layer"]
ActivationName = Literal["tanh", "relu", "sigmoid", "gelu", "identity"]
LOSS_NAMES = ("cross-entropy", "squared-error", "binary-cross-entropy")
MODEL_NAMES = (
    *("mlp", "vit-small", "mixer-small", "resnet-small", "conv-small"),
    *("transformer-lm", "transformer-encoder", "gru"),
)
"""The networks that a run can build by name."""
Relation = Literal["zero_out", "add_or_remove_one", "replace_one"]
Given = Mapping[str, Mapping[str, Any]]
"""The keys that a run was given, by section, before any default is filled in."""


def is_import_path(name: str) -> bool:
    """Whether a name is of the form package.module:attribute."""
    return re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", name) is not None


def import_path_of(name: str) -> str | None:
    """Return the import path that own.py:Net, models/own.py:Net or own.Net probably means, or None."""
    module, colon, attribute = name.partition(":")
    if not colon and not module.endswith(".py"):
        module, _, attribute = name.rpartition(".")
    meant = f"{module.removesuffix('.py').removeprefix('./').replace('/', '.')}:{attribute}"
    return meant if meant != name and is_import_path(meant) else None


def _known(names: tuple[str, ...], what: str, example: str) -> Callable[[str], str]:
    """Return a check that a name is one of `names` or an import path."""

    def check(name: str) -> str:
        if name in names or is_import_path(name):
            return name
        meant = import_path_of(name)
        hint = f"; did you mean {meant!r}?" if meant else did_you_mean(name, names)
        raise ValueError(
            f"{name!r} is no {what}{hint}; known are {', '.join(map(repr, names))}, or an import "
            f"path such as {example!r}"
        )

    return check


LossName = Annotated[str, AfterValidator(_known(LOSS_NAMES, "loss", "my_package.losses:focal"))]
"""A loss by name, or the import path of a function (output, target) -> losses of the records."""
OWN_MODULE = "module"
"""The model.name of a run on a user-supplied module other than a fully connected network."""
ModelName = Annotated[
    str, AfterValidator(_known((*MODEL_NAMES, OWN_MODULE), "model", "my_package.models:build"))
]
"""A network by name, or the import path of a class or function that returns a module."""


def check_clip(tau_h_max: float | None, tau_h_min: float) -> None:
    """Refuse an offset of eq. 9 without its clip, or above it."""
    if tau_h_max is None and tau_h_min:
        raise ValueError(
            f"tau_h_min = {tau_h_min} offsets what tau_h_max clips, which is missing; set tau_h_max"
        )
    if tau_h_max is not None and tau_h_min > tau_h_max:
        raise ValueError(f"tau_h_min = {tau_h_min} exceeds tau_h_max = {tau_h_max}; lower it")


class DeviceChoice(BaseModel):
    """A device description by name or path, with some of its keys overridden."""

    model_config = ConfigDict(frozen=True, extra="allow", defer_build=True)
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            keys=("device",),
            needs="a run that opens a device: trainer.kind = 'pdfa', trainer.noise (ulr), trainer.gates (convex) or "
            "protection.noise = 'device'",
            holds=lambda run: run.uses_device,
        ),
        Effect(
            keys=("device.certificate",),
            needs="a guarantee that rests on the device's noise: protection.noise = 'device', 'counts' or 'argmax'",
            holds=lambda run: run.protection.credits_device,
        ),
        Effect(
            keys=("device.certificate_days",),
            needs="device.certificate",
            holds=lambda run: run.device.certificate is not None,
        ),
    )

    name: str = "gaussian"
    """A name of `opusim device list`, the path of a TOML file, or the address of a served device (remote://HOST:PORT);
    any other key of this section, such as device.noise.sigma, overrides that key of the description. Refused if the run
    opens no device."""

    certificate: str | None = None
    """Path of the device's certificate (`opusim device calibrate`). The guarantee then rests on its limits instead of
    the description's numbers, and its beta is taken off delta once; the monitor compares the noise with it."""
    certificate_days: int = Field(30, ge=0)
    """Largest age of the certificate, in days, when a run starts or resumes."""

    @property
    def overrides(self) -> dict[str, Any]:
        """The keys that override the description's, as a nested mapping."""
        return dict(self.model_extra or {})


def _is_mlp(run: Any) -> bool:
    return bool(run.model.name == "mlp")


class ModelConfig(Section):
    """The network that a run builds."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            keys=("model.options",),
            needs="a model.name other than 'mlp'",
            holds=lambda run: not _is_mlp(run),
        ),
        Effect(
            keys=(
                *("model.hidden", "model.activation", "model.output_activation", "model.bias"),
                *("model.initial_gain", "model.tau_h_max"),
            ),
            needs="model.name = 'mlp'; options of other models are keys of model.options",
            holds=_is_mlp,
        ),
        Effect(
            keys=("model.initial_output",),
            needs="a feedback matrix (trainer.kind = 'dfa', 'tdfa' or 'pdfa')",
            holds=lambda run: run.trainer.feedback_matrix,
        ),
        Effect(
            keys=("model.tau_h_min",),
            needs="model.tau_h_max",
            holds=lambda run: run.model.tau_h_max is not None,
        ),
    )

    name: ModelName = "mlp"
    """mlp (fully connected), vit-small, mixer-small, resnet-small, conv-small, transformer-lm, transformer-encoder, gru
    (`opusim.training.networks.models`), or the import path package.module:factory of a class or function. It gets
    record_shape, n_outputs, vocabulary (of tokens) and the options as keywords and returns a torch module. "module" if
    `opusim.train` was given one that is not fully connected."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keywords of the model, such as model.options.depth = 4."""
    hidden: tuple[int, ...] = (512, 512)
    """Widths of the hidden layers of an mlp."""
    activation: ActivationName = "tanh"
    """Activation of the hidden layers."""
    output_activation: ActivationName = "identity"
    """Activation of the last layer; cross-entropy takes identity (logits)."""
    bias: bool = True
    """Whether layers have biases."""
    initial_gain: float = Field(1.0, gt=0.0)
    """Initial parameters are uniform on +-gain/sqrt(fan_in)."""
    initial_output: Literal["random", "feedback"] = "random"
    """How the output layer starts: from random parameters (random) or as the feedback matrix (feedback). The matrix is
    that of the last hidden layer, read from the device, so that the projected error starts out as the backpropagated
    one. Other models than mlp name the layer themselves (feedback_start)."""
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


class OptimizerConfig(Section):
    """Optimizer, learning-rate schedule and averaging."""

    largest: ClassVar[dict[str, float]] = {"lr": 1e4}  # parameters of order 1 overflow in ten such steps
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            keys=("optimizer.momentum",),
            needs="optimizer.name = 'sgd'",
            holds=lambda run: run.optimizer.name == "sgd" or run.trainer.plain_descent,  # refuses it itself
        ),
        Effect(
            keys=("optimizer.nesterov",),
            needs="optimizer.name = 'sgd' with a momentum",
            holds=lambda run: run.optimizer.name == "sgd" and run.optimizer.momentum > 0,
        ),
        Effect(
            keys=("optimizer.beta1", "optimizer.beta2"),
            needs="an optimizer.name of the Adam family",
            holds=lambda run: run.optimizer.name != "sgd",
        ),
        Effect(
            keys=("optimizer.step_size", "optimizer.gamma"),
            needs="optimizer.schedule = 'step'",
            holds=lambda run: run.optimizer.schedule == "step",
        ),
    )

    name: Literal["sgd", "adam", "adamw", "nadam", "radam", "adamax"] = "sgd"
    """Class in torch.optim; adam by default for a model.name other than mlp."""
    lr: float = Field(0.01, gt=0.0)
    """Learning rate; 0.002 by default for zo and for a model.name other than mlp, 1.9 for convex, 0.04 for an mlp whose
    labels are read once (label-readout, label-randomized-response)."""
    momentum: float = Field(0.9, ge=0.0, lt=1.0)
    """Momentum (only sgd); 0 for zo and convex, which have none."""
    nesterov: bool = False
    """Nesterov's form of momentum (only sgd)."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of the first moment (Adam family)."""
    beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """Decay of the second moment (Adam family)."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Weight decay as the torch class defines it."""
    schedule: Literal["constant", "linear", "cosine", "step"] = "constant"
    """How the learning rate falls over the run: not at all, linearly to 0, as half a cosine to 0, or in steps."""
    step_size: float = Field(0.4, gt=0.0, le=1.0)
    """Share of the run after which the rate falls, repeatedly (only schedule = 'step')."""
    gamma: float = Field(0.85, gt=0.0, le=1.0)
    """Factor by which the rate falls each time (only schedule = 'step')."""
    averaged_tail: float = Field(0.0, ge=0.0, lt=1.0)
    """The final model is the mean of the parameters over this last share of the steps; 0 takes the last parameters, and
    so does a run that its budget ends early. 0.5 by default for an mlp whose labels are read once."""


class SamplerConfig(Section):
    """How records are drawn into batches (see opusim.training.data.samplers)."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            keys=("sampler.sampling_probability",),
            needs="sampler.scheme = 'poisson'",
            holds=lambda run: run.sampler.scheme == "poisson",
        ),
        Effect(
            keys=("sampler.min_batch_size",),
            needs="sampler.scheme = 'poisson-min-batch'",
            holds=lambda run: run.sampler.scheme == "poisson-min-batch",
        ),
        Effect(
            keys=("sampler.drop_last",),
            needs="sampler.scheme = 'shuffled-epochs'",
            holds=lambda run: run.sampler.scheme == "shuffled-epochs",
        ),
        Effect(
            keys=("sampler.batch_size",),
            needs="a sampler.scheme other than 'full-batch'",
            holds=lambda run: run.sampler.scheme != "full-batch" or run.divides_by_batch_size,
        ),
    )

    scheme: Literal[
        "shuffled-epochs", "poisson", "poisson-min-batch", "fixed-size", "disjoint-cyclic", "full-batch"
    ] = "shuffled-epochs"
    """Sampling scheme, by the name that an accountant asks for. The default follows from the protection (record and
    label-amplified take poisson) and from the trainer (convex otherwise takes disjoint-cyclic)."""
    batch_size: int = Field(256, ge=1)
    """Records in a batch (expected number under Poisson sampling); 250 by default for convex, 64 for a model.name other
    than mlp. If sampling_probability is given, only the default of protection.divisor."""
    sampling_probability: float | None = Field(None, gt=0.0, le=1.0)
    """q, with which each record enters a Poisson batch; an epoch has 1 / q steps. None takes batch_size over the number
    of training records. protection.relation = 'add_or_remove_one' requires it, because that number is private."""
    min_batch_size: int | None = Field(None, ge=1)
    """Smallest batch that poisson-min-batch accepts."""
    drop_last: bool = False
    """Leave out the last, shorter batch of an epoch (only shuffled-epochs)."""

    @property
    def is_random(self) -> bool:
        """Whether the number of records in a batch is random."""
        return self.scheme.startswith("poisson")


class CheckpointConfig(Section):
    """When checkpoints are written and how many are kept."""

    every_steps: int | None = Field(None, ge=1)
    """Steps between checkpoints; None writes one at the end of each epoch."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep."""


class KindSection(Section):
    """A section chosen by its `kind`; a third party's class is found through an entry point.

    A subclass declares `kind: Literal["name"] = "name"`, its own keys as typed fields with attribute docstrings, and
    the class variables below. The docstrings become the command line's help.
    """

    summary: ClassVar[str] = ""
    """One line for help pages."""
    formerly: ClassVar[tuple[str, ...]] = ()
    """Earlier names of this kind; a configuration that uses one is told the new name."""
    instead: ClassVar[Mapping[str, str]] = {}
    """Keys of other kinds that this kind lacks for a reason: what to do instead."""
    implementation: ClassVar[str] = ""
    """The class that carries this kind out, as "module:Class": an `Algorithm` of a trainer, a `Protection` of a
    protection. Reading a configuration and `--help` import neither it nor torch."""
    dropped: ClassVar[Mapping[str, Mapping[Any, str]]] = {}
    """Values that stored runs may have and new ones may not: by key and value, what to take instead."""

    kind: str
    """Name of the kind."""

    @classmethod
    def defaults(cls, given: Given) -> dict[str, dict[str, Any]]:
        """Defaults of other sections that follow from this kind, below everything that was given.

        Args:
            given: The keys that the run was given, by section; "run" holds those outside of sections.
        """
        return {}

    def implementing_class(self) -> Any:
        """Import the class that `implementation` names."""
        if not (isinstance(self.implementation, str) and self.implementation):
            raise TypeError(f"{type(self).__name__}.implementation must name a class, as 'module:Class'")
        return resolve_name(self.implementation)

    def check(self, run: Any) -> None:
        """Refuse a RunConfig whose other sections do not fit this one.

        Raises:
            ValueError: They do not fit; the message begins with "key = value".
        """
        return


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A command-line option besides those of the trainer's own fields.

    Attributes:
        name: The option without its dashes.
        key: The dotted key of the run that it sets; empty for an option with words.
        help: Its help; empty takes the key's own description.
        words: The values that the option takes, with the keys that each sets. A key of the section protection is set
            only if the command protects something.
    """

    name: str
    key: str = ""
    help: str = ""
    words: Mapping[str, Mapping[str, str]] | None = None


class ProtectionSection(KindSection):
    """What is protected and how strongly; the base of every `protection.kind`.

    Code outside the configuration asks for the properties below and compares no kind. `epsilon`, `noise_multiplier`,
    `noise`, `clip_norm`, `divisor`, `bands` and `correlation` can be read of every kind: a kind without such a field
    has None, digital noise, and 1 band.
    """

    protects: ClassVar[Literal["nothing", "records", "labels"]] = "records"
    """What the guarantee is about."""
    poisson: ClassVar[bool] = False
    """Whether every step is paid for and draws a secret Poisson batch."""
    last_iterate: ClassVar[bool] = False
    """Whether only the final model is published."""
    labels_read_once: ClassVar[bool] = False
    """Whether the labels are read or randomized once, before training."""
    default_clip: ClassVar[float] = 1.0
    """Norm to which contributions are clipped if clip_norm is None."""
    cost_of_a_kill: ClassVar[str | None] = None
    """What a kill of a release run under a budget costs, after "Ctrl-C only; "; None if it costs nothing."""
    tested_with: ClassVar[Mapping[str, Any]] = {"noise_multiplier": 1.0}
    """Keys that `opusim audit --mechanism` sets unless they are given."""
    tested_records: ClassVar[int] = 400
    """Number of records of such a test."""
    trainers: ClassVar[tuple[str, ...]] = ()
    """Trainers that take this protection besides those whose sections list it."""

    delta: float = Field(1e-5, ge=0.0, lt=1.0)
    """delta of every guarantee that this run prints; 0 asks for pure privacy, which only Laplace noise (zo) and
    randomized response give."""

    if TYPE_CHECKING:  # fields of most kinds; `__pydantic_init_subclass__` completes the others

        @property
        def epsilon(self) -> float | None:
            """Budget, or None."""

        @property
        def noise_multiplier(self) -> float | None:
            """z, or None."""

        @property
        def noise(self) -> Literal["digital", "device", "counts", "argmax"]:
            """Source of the credited noise."""

        @property
        def clip_norm(self) -> float | None:
            """The clip if it was given."""

        @property
        def divisor(self) -> float | None:
            """The divisor if it was given."""

        @property
        def bands(self) -> int:
            """Number of steps over which the noise is correlated, and of subsets of records; 1 for neither."""

        @property
        def correlation(self) -> tuple[float, ...] | None:
            """Coefficients of such noise if they are known."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Let the common properties be read of a kind that neither has such a field nor defines the property."""
        if not cls.model_fields["kind"].is_required():
            own = cls.__mro__[: cls.__mro__.index(ProtectionSection)]
            for name, value in _COMMON.items():
                if name not in cls.model_fields and not any(name in vars(base) for base in own):
                    setattr(cls, name, value)

    @property
    def credits_device(self) -> bool:
        """Whether the guarantee rests on the noise of the run's device."""
        return self.noise != "digital"

    @property
    def clip(self) -> float:
        """clip_norm, or its default for this kind."""
        return self.default_clip if self.clip_norm is None else self.clip_norm

    def relation_of(self, trainer: TrainerSection) -> Adjacency | None:
        """Which data sets the guarantee calls neighbours, or None without protection."""
        return Adjacency.REPLACE_ONE


_COMMON: Mapping[str, Any] = {
    "epsilon": None,
    "noise_multiplier": None,
    "noise": "digital",
    "clip_norm": None,
    "divisor": None,
    "bands": 1,
    "correlation": None,
}


class TrainerSection(KindSection):
    """The options of a trainer; the base of every `trainer.kind`."""

    protections: ClassVar[tuple[str, ...]] = ("none",)
    """Values of protection.kind that this trainer takes; its `Algorithm.applies` says how it carries them out."""
    relations: ClassVar[tuple[Relation, ...]] = ("zero_out", "add_or_remove_one", "replace_one")
    """Values of protection.relation that this trainer takes; the first is the default."""
    any_module: ClassVar[bool] = False
    """Whether it trains any torch module, and not only fully connected networks."""
    feedback_matrix: ClassVar[bool] = False
    """Whether the error is projected by a fixed feedback matrix."""
    plain_descent: ClassVar[bool] = False
    """Whether the update is plain gradient descent, without momentum or moments."""
    device_keys: ClassVar[Mapping[str, str] | None] = None
    """Keys that the option --device sets besides device.name; None if the command has no such option. A key of the
    section protection is set only if the command protects something."""
    flags: ClassVar[tuple[Flag, ...]] = ()
    """Options of the command besides one for each own field."""
    examples: ClassVar[tuple[str, ...]] = (
        "--data digits --epochs 30",
        "--data fashion-mnist --set optimizer.lr=0.01 --set model.hidden=[512,512]",
        "--config run.toml --seed 3 --out runs/third",
    )
    """Arguments of the command that its help shows."""

    @classmethod
    def default_protection(cls, given: Given) -> str:
        """The protection.kind of a run that gives none."""
        return "none"

    def uses_device(self, protection: ProtectionSection) -> bool:
        """Whether the run opens its device."""
        return False

    def divides_by_batch_size(self, protection: ProtectionSection) -> bool:
        """Whether a full batch's sum is divided by sampler.batch_size unless protection.divisor is given."""
        return protection.poisson
