"""The sections of a run's configuration that every run has; `opusim.training.config.kinds` has those chosen by kind."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from opusim.description.section import Section as BaseSection
from opusim.description.section import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Effect:
    """When keys, or whole sections, have an effect, in words after "it needs"; a key without one is refused."""

    keys: tuple[str, ...]
    needs: str
    holds: Callable[[Any], bool]


class Section(BaseSection):
    """A section of a run's configuration; its numbers are at most 1e12 in size."""

    effects: ClassVar[tuple[Effect, ...]] = ()
    """Keys that have an effect only under a condition; every other key always has one."""
    largest: ClassVar[dict[str, float]] = {}
    """Smaller limits of single keys."""

    @model_validator(mode="after")
    def _check_magnitudes(self) -> Self:
        for name in type(self).model_fields:
            # squares stay below float32's 3e38
            value, limit = getattr(self, name), self.largest.get(name, 1e12)
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
            f"tau_h_min = {tau_h_min} is an offset before the clip to tau_h_max, which is missing; set tau_h_max"
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


class ModelConfig(Section):
    """The network that a run builds."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            keys=("model.options",),
            needs="a model.name other than 'mlp'",
            holds=lambda run: run.model.name != "mlp",
        ),
        Effect(
            keys=(
                *("model.hidden", "model.activation", "model.output_activation", "model.bias"),
                *("model.initial_gain", "model.tau_h_max"),
            ),
            needs="model.name = 'mlp'; options of other models are keys of model.options",
            holds=lambda run: run.model.name == "mlp",
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
            # plain descent has a check of its own
            holds=lambda run: run.optimizer.name == "sgd" or run.trainer.plain_descent,
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


SplitRule = Literal["index", "content", "id"]
FileKind = Literal["csv", "parquet", "npz", "folder", "text"]
FILE_KINDS: tuple[FileKind, ...] = get_args(FileKind)
"""Prefixes of a data.name that takes records from a file, before a colon and the path."""


def is_data_factory(name: str) -> bool:
    """Whether a data.name is the import path of a function that returns records, and no file."""
    return is_import_path(name) and name.partition(":")[0] not in FILE_KINDS


OWN_ARRAYS = "arrays"
"""The data.name of a run on user-supplied arrays or on texts."""


def _finite_numbers(value: object) -> object:
    entries = value if isinstance(value, list | tuple) else (value,)
    if not entries or not all(isinstance(entry, Real) and math.isfinite(entry) for entry in entries):
        raise ValueError(f"must be a finite number, or one for each feature, got {value!r}")
    return value


def _column_names(value: object) -> object:
    """Return one name or several as a tuple of texts; a number is the name of a numbered column."""
    names = value if isinstance(value, list | tuple) else (value,)
    return tuple(
        str(name) if isinstance(name, Real) and not isinstance(name, bool) else name for name in names
    )


Constants = Annotated[float | tuple[float, ...], BeforeValidator(_finite_numbers)]
"""A number for all features, or one for each."""


class DataConfig(Section):
    """Data set, split and standardisation."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            keys=("data.whitening", "data.components_from"),
            needs="data.components",
            holds=lambda run: run.data.components is not None,
        ),
        Effect(
            keys=("data.components_mirrored",),
            needs="data.components with data.components_from = 'synthetic'",
            holds=lambda run: run.data.components is not None and run.data.components_from == "synthetic",
        ),
        Effect(
            keys=("data.features_groups",),
            needs="data.features",
            holds=lambda run: run.data.features is not None,
        ),
        Effect(
            keys=("data.features_threshold",),
            needs="data.features = 'optical:DEVICE'",
            holds=lambda run: run.data.features_kind == "optical",
        ),
        Effect(
            keys=("data.n_features",),
            needs="data.features = 'optical:DEVICE' or 'convolutions'",
            holds=lambda run: run.data.features_kind in ("optical", "convolutions"),
        ),
        Effect(
            keys=("data.context", "data.tokenizer"),
            needs="data.name = 'text:PATH'",
            holds=lambda run: run.data.file_kind == "text",
        ),
        Effect(
            keys=(
                *("data.split", "data.split_seed", "data.mean", "data.std", "data.standardise"),
                *("data.components", "data.features", "data.n_classes", "data.target", "data.inputs"),
                *("data.vocabulary", "data.label", "data.classes"),
            ),
            needs="data other than text:PATH, which determines it",
            holds=lambda run: run.data.file_kind != "text",
        ),
        Effect(
            keys=("data.user",),
            needs="protection.unit = 'user'",
            holds=lambda run: run.of_users,
        ),
        Effect(
            keys=("data.test",),
            needs="a data.name that begins with csv:, parquet:, npz:, folder: or text:",
            holds=lambda run: run.data.file_kind is not None,
        ),
    )

    name: str = "digits"
    """digits, mnist, fashion-mnist or cifar-10; csv:PATH or parquet:PATH for a table with a column data.label; npz:PATH
    for arrays x and y (and ids); folder:PATH for images in a folder for each class; text:PATH for windows of a text
    file; an import path package.module:function of a function that returns (x, y), a data set of torch or a DataFrame;
    "arrays" if `opusim.train` was given the records."""
    validation_fraction: float = Field(0.1, ge=0.0, lt=1.0)
    """Share of the training records held out for validation (0.1 in the PDFA paper)."""
    split_seed: int = Field(0, ge=0)
    """Public seed of the rule that picks the validation records; the rule never looks at labels."""
    split: SplitRule | None = None
    """What decides whether a record is held out. index: its position among all n, by a seeded permutation. content: a
    keyed hash of its own features. id: a keyed hash of the ID given with it. None: id if IDs were given, else content
    for protection.relation = 'add_or_remove_one', else index."""
    target: Literal["auto", "class", "tokens", "real", "labels"] = "auto"
    """What to predict of user-supplied records. class: one of n_classes, whole numbers y (n,). tokens: the token at
    each position, whole numbers y (n, T). real: numbers, y (n,) or (n, k). labels: which of k labels hold, zeros and
    ones y (n, k). auto: tokens if y is missing or has the shape of x, both int64; else class."""
    inputs: Literal["auto", "features", "tokens"] = "auto"
    """What user-supplied x holds: quantities (features) or numbers of tokens (tokens). auto: tokens only for tokens to
    predict."""
    n_classes: int | None = Field(None, ge=2)
    """Number of classes of user-supplied records, or of token values to predict. None counts the different labels,
    which must then be 0, 1, 2, ... without gaps; for tokens it takes one more than the largest."""
    vocabulary: int | None = Field(None, ge=2)
    """Number of token values in user-supplied x; None takes n_classes for tokens to predict, else reads it off x (one
    more than the largest)."""
    standardise: bool | Literal["records"] = True
    """Subtract and divide by public constants of the data set. records: by the mean and the standard deviation of each
    feature over user-supplied training records, which no guarantee for records covers."""
    mean: Constants | None = None
    """Another public constant to subtract instead, or one for each feature; for images, of pixels in [0, 1]. Requires
    std."""
    std: Constants | None = None
    """Another public constant to divide by instead, or one for each feature; requires mean."""
    features: str | None = None
    """Replace the features by a public map of them. optical:DEVICE: |R x|^2 of a device (`opusim device list`, or a
    TOML file), where x is 1 for each feature above data.features_threshold, else 0. For images: scattering
    (scattering:J for another scale than 2), hog, convolutions (random ones)."""
    n_features: int = Field(1000, ge=1)
    """Number of features of data.features = optical:DEVICE or convolutions (a multiple of 32); the other maps determine
    theirs."""
    features_threshold: float = 0.0
    """Public number that a standardised feature must exceed to be 1 under data.features = optical:DEVICE."""
    features_groups: int | None = Field(None, ge=1)
    """Normalise the channels of data.features to mean 0 and variance 1 within each record, in this many groups of
    neighbouring channels."""
    components: int | None = Field(None, ge=1)
    """Replace the features by this many principal components of data.components_from."""
    components_from: Literal["records", "synthetic"] = "records"
    """records: the training records, so only for public features. synthetic: invented images of the same shape, mapped
    by data.features, which use no record; at most 2999 components."""
    components_mirrored: bool = False
    """Average the features of each invented image with those of its mirror image (left and right) before its components
    are computed, so that a record and its mirror image have the same components, as far as data.features commutes with
    mirroring."""
    whitening: float = Field(0.5, ge=0.0, le=1.0)
    """How far the variances of the components are equalised: 0 not at all, 1 completely."""
    label: Annotated[tuple[str, ...], BeforeValidator(_column_names)] = ()
    """Column of a table that holds what to predict; several for data.target = 'real' or 'labels'. The others are
    features."""
    user: str | None = None
    """Column of a table that holds the ID of each record's user, for protection.unit = 'user'; it is no feature. Arrays
    bring IDs as (x, y, ids)."""
    classes: tuple[str, ...] = ()
    """Names of the classes, if labels are strings, in the order of their numbers; empty reads them off the labels,
    sorted."""
    context: int = Field(128, ge=1)
    """Tokens of a record of text:PATH: the text is cut into windows of one more, each token to be predicted from those
    before it. The end of the text is held out, not windows drawn at random."""
    tokenizer: str | None = None
    """A tokenizer.json of the library tokenizers, for text:PATH in UTF-8; None takes the bytes of the file."""
    test: str | None = None
    """A file, or a folder of images, of test records of the same kind as that of data.name."""

    @model_serializer(mode="wrap")
    def _stored(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out a key that earlier versions lack unless it is set, so that their folders resume."""
        found: dict[str, Any] = write(self)
        if self.user is None:
            found.pop("user", None)
        return found

    @property
    def file_kind(self) -> FileKind | None:
        """The kind of the file that data.name names, or None if it names none."""
        kind = self.name.partition(":")[0]
        return next((known for known in FILE_KINDS if known == kind and ":" in self.name), None)

    @property
    def factory(self) -> str | None:
        """data.name if it is an import path, else None."""
        return self.name if is_data_factory(self.name) else None

    @property
    def is_own(self) -> bool:
        """Whether records are user-supplied, so that whatever is read off their labels depends on private records."""
        own = self.name == OWN_ARRAYS or self.factory is not None
        return own or self.file_kind not in (None, "text")

    @property
    def file(self) -> Path:
        """The file that data.name names; raise ValueError if it names none."""
        if self.file_kind is None:
            raise ValueError(f"data.name = {self.name!r} names no file; see file_kind")
        return Path(self.name.partition(":")[2])

    @property
    def short_name(self) -> str:
        """data.name as a part of a folder's name; of a file only its stem."""
        return re.sub(r"[^\w.-]+", "-", self.name if self.file_kind is None else self.file.stem)

    @property
    def features_kind(self) -> str:
        """The map that data.features names; empty without one."""
        return (self.features or "").partition(":")[0]

    @property
    def features_argument(self) -> str:
        """What follows the colon of data.features: a device, or the scale of scattering."""
        return (self.features or "").partition(":")[2]

    @model_validator(mode="after")
    def _check(self) -> Self:
        argument, kind = self.features_argument, self.features_kind
        fits = {
            "": self.features is None,
            "optical": bool(argument),
            "scattering": argument in ("1", "2", "3", "4") or self.features == kind,
            "hog": self.features == kind,
            "convolutions": self.features == kind,
        }
        if not fits.get(kind, False):
            raise ValueError(
                f"features = {self.features!r}: must be optical:DEVICE (such as optical:ideal), scattering, "
                "scattering:J with J from 1 to 4, hog or convolutions"
            )
        if self.file_kind is not None and not self.file.name:
            raise ValueError(f"name = {self.name!r} lacks the path of the file; give {self.file_kind}:PATH")
        if self.standardise == "records" and self.mean is not None:
            raise ValueError(
                f"standardise = 'records' computes what mean = {self.mean} states; give one of them"
            )
        if (self.mean is None) != (self.std is None):
            raise ValueError(f"mean = {self.mean} and std = {self.std} go together; give both or neither")
        if self.std is not None and min(self.std if isinstance(self.std, tuple) else (self.std,)) <= 0:
            raise ValueError(
                f"std = {self.std} must be above 0 everywhere; use 1 for a feature that never changes"
            )
        return self
