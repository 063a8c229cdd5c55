"""Every option of a run as one frozen, validated configuration (TOML file, `--set`, or a mapping)."""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from opusim.errors import ConfigError

ActivationName = Literal["tanh", "relu", "sigmoid", "gelu", "identity"]
TrainerName = Literal["bp", "dfa", "tdfa", "pdfa"]
LossName = Literal["cross-entropy", "squared-error"]
ClippedLayers = Literal["all", "hidden", "feedback", "none"]
WidthRule = Literal["fan-in", "layer"]
ProtectionName = Literal["none", "record", "label", "label-amplified", "label-once", "label-response"]


class Section(BaseModel):
    """A part of the configuration: frozen, unknown keys refused, numbers finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def _check_clip(tau_h_max: float | None, tau_h_min: float) -> None:
    """The offset of eq. 9 belongs to a clip, and stays below it."""
    if tau_h_max is None and tau_h_min:
        raise ValueError(
            f"tau_h_min = {tau_h_min} offsets what tau_h_max clips, which is missing; set tau_h_max"
        )
    if tau_h_max is not None and tau_h_min > tau_h_max:
        raise ValueError(f"tau_h_min = {tau_h_min} exceeds tau_h_max = {tau_h_max}; lower it")


class DataConfig(Section):
    """What the network learns from."""

    name: str = "digits"
    """digits, mnist, fashion-mnist; "arrays" where training.train was given a person's own."""
    validation_fraction: float = Field(0.1, ge=0.0, lt=1.0)
    """Share of the training records held out for validation (0.1 in the PDFA paper)."""
    split_seed: int = Field(0, ge=0)
    """Seed of the permutation that picks the validation records; it never looks at labels."""
    n_classes: int | None = Field(None, ge=2)
    """Number of classes of a person's own arrays; None reads it off the labels (one more than the largest)."""
    standardise: bool = True
    """Subtract and divide by public constants of the data set."""
    mean: float | None = None
    """Another public constant to subtract instead, for features in [0, 1]; together with std."""
    std: float | None = Field(None, gt=0.0)
    """Another public constant to divide by instead; together with mean."""
    components: int | None = Field(None, ge=1)
    """Replace the features by so many principal components of the training records; for public features only."""
    whitening: float = Field(0.5, ge=0.0, le=1.0)
    """How far the components are brought to one variance: 0 not at all, 1 completely."""

    @model_validator(mode="after")
    def _check_constants(self) -> Self:
        if (self.mean is None) != (self.std is None):
            raise ValueError(f"mean = {self.mean} and std = {self.std} go together; give both or neither")
        return self


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
        _check_clip(self.tau_h_max, self.tau_h_min)
        return self


class OptimizerConfig(Section):
    """A torch optimizer of the SGD or Adam family."""

    name: Literal["sgd", "adam", "adamw", "nadam", "radam", "adamax"] = "sgd"
    """Class in torch.optim."""
    lr: float = Field(0.01, gt=0.0)
    """Learning rate."""
    momentum: float = Field(0.9, ge=0.0, lt=1.0)
    """Momentum (sgd only)."""
    nesterov: bool = False
    """Nesterov's form of momentum (sgd only)."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of the first moment (Adam family)."""
    beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """Decay of the second moment (Adam family)."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Weight decay as the torch class defines it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to 0 over the run: not at all, linearly, or as half a cosine."""
    averaged_tail: float = Field(0.0, ge=0.0, lt=1.0)
    """The final model is the mean of the parameters over this share of the steps, the last ones; 0 for the last."""


class SamplerConfig(Section):
    """How records are drawn into batches (see training.data.samplers)."""

    scheme: Literal[
        "shuffled-epochs", "poisson", "poisson-min-batch", "fixed-size", "disjoint-cyclic", "full-batch"
    ] = "shuffled-epochs"
    """Sampling scheme; an accountant asks for it by this name."""
    batch_size: int = Field(256, ge=1)
    """Records in a batch (expected number under Poisson sampling)."""
    min_batch_size: int | None = Field(None, ge=1)
    """Smallest batch that poisson-min-batch accepts."""
    drop_last: bool = False
    """Leave out the last, shorter batch of an epoch (shuffled-epochs only)."""


class TrainerConfig(Section):
    """Which feedback trains the hidden layers, and what happens to it."""

    kind: TrainerName = "pdfa"
    """bp: backpropagation; dfa: digital random projection of the error; tdfa: of the ternarized error;
    pdfa: of the ternarized error, through the device."""
    order: Literal["hardware", "published"] = "hardware"
    """hardware: the noise of the device's reading is the noise, only a constant gain follows.
    published: eq. 8, the reading is scaled into the ball tau_b, then noise is added (for pdfa from the
    device's draw, for the digital feedbacks from a generator with standard deviation sigma)."""
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
        _check_clip(self.tau_h_max, self.tau_h_min)
        return self


class ProtectionConfig(Section):
    """What is protected, and how strongly."""

    kind: ProtectionName = "none"
    """none: noise only where the trainer puts it. record: whole records, by clipped contributions, central Gaussian
    noise and Poisson batches. label, label-amplified, label-once, label-response: the labels alone, the features
    being public; by noise on every layer's signal and a budget for each record, by clipping and noise in the geometry
    of public features with secret Poisson batches, by one noisy reading of each label, by randomized response."""
    epsilon: float | None = Field(None, gt=0.0)
    """Budget at delta: training stops before the step that would exceed it. Where the noise is not given it is the
    least that reaches this epsilon."""
    delta: float = Field(1e-5, gt=0.0, lt=1.0)
    """delta of every guarantee that this run prints."""
    noise_multiplier: float | None = Field(None, gt=0.0)
    """z: the noise's standard deviation over clip_norm (record, label, label-amplified); None takes it from epsilon."""
    clip_norm: float | None = Field(None, gt=0.0)
    """Largest norm of a record's contribution: over all layers (record, 1 by default), of each layer's signal (label,
    1 by default), over all layers in the geometry of public features (label-amplified, 0.2 by default)."""
    divisor: float | None = Field(None, gt=0.0)
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
    """Whether these records are weighed by the D-optimal design in the first layer (label-amplified, S2)."""
    flat_prior: float = Field(0.3, ge=0.0, le=1.0)
    """Share of the training before the model's own prediction becomes the prior of a noisy label (label-once,
    label-response); 1 for never."""

    @property
    def clip(self) -> float:
        """clip_norm, or its default for this kind."""
        default = 0.2 if self.kind == "label-amplified" else 1.0
        return default if self.clip_norm is None else self.clip_norm

    @model_validator(mode="after")
    def _check_strength(self) -> Self:
        given = {"epsilon": self.epsilon, "noise_multiplier": self.noise_multiplier}
        if self.kind == "none":
            for name, value in given.items():
                if value is not None:
                    raise ValueError(
                        f"{name} = {value} does nothing under kind = 'none'; set protection.kind"
                    )
        elif self.kind in ("record", "label-amplified"):
            if self.epsilon is None and self.noise_multiplier is None:
                raise ValueError(
                    f"epsilon is missing; kind = {self.kind!r} needs one above 0, such as 3.0, or a noise_multiplier"
                )
        elif self.epsilon is None:
            raise ValueError(f"epsilon is missing; kind = {self.kind!r} needs one above 0, such as 3.0")
        return self


class DeviceChoice(BaseModel):
    """A device description by name or path, with keys of the description overridden."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    name: str = "gaussian"
    """A name of `opusim device list`, or the path of a TOML file; other keys of this section, such as
    device.noise.sigma, override keys of that description."""

    @property
    def overrides(self) -> dict[str, Any]:
        """The keys given beside the name, as a nested mapping."""
        return dict(self.model_extra or {})


class CheckpointConfig(Section):
    """How often a run can be taken up again."""

    every_steps: int | None = Field(None, ge=1)
    """Steps between checkpoints; None: one at the end of each epoch."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""


class RunConfig(Section):
    """A whole run. `training.train` takes it, `config.json` of a run folder holds it resolved."""

    schema_version: Literal[1] = 1
    """Version of this format."""
    mode: Literal["experiment", "release"] = "experiment"
    """experiment: seeded and reproducible, not for release (the noise can be rebuilt from the seed).
    release: noise and sampling from the operating system's entropy; no seed is stored."""
    seed: int = Field(0, ge=0)
    """Seed of initialisation, sampling and simulated noise (experiment mode)."""
    epochs: int = Field(15, ge=1)
    """Passes over the training records."""
    loss: LossName = "cross-entropy"
    """Loss whose derivative is the error e."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of torch; None takes torch's default. A resumed run repeats bit for bit at the same number."""
    torch_device: str = "cpu"
    """Where the network is trained: cpu, cuda, cuda:0."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sampler: SamplerConfig = SamplerConfig()
    trainer: TrainerConfig = TrainerConfig()
    protection: ProtectionConfig = ProtectionConfig()
    device: DeviceChoice = DeviceChoice()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def digest(self) -> str:
        """BLAKE2b of the whole configuration, by which a checkpoint knows the run it belongs to."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.protection.noise == "device" and self.trainer.kind != "pdfa":
            raise ValueError(
                f"protection.noise = 'device' needs a device, but trainer.kind = {self.trainer.kind!r} has none; "
                "train pdfa, or take 'digital'"
            )
        if self.loss == "cross-entropy" and self.model.output_activation != "identity":
            raise ValueError(
                f"loss = 'cross-entropy' takes logits, but model.output_activation = "
                f"'{self.model.output_activation}'; set it to 'identity' or take loss = 'squared-error'"
            )
        return self


def load_config(
    source: str | Path | Mapping[str, Any] | RunConfig | None = None,
    settings: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Resolve a configuration: the file or mapping, then `changes`, then `key=value` settings.

    Args:
        source: A TOML file (or the config.json of a run), a mapping, a RunConfig, or None for the defaults.
        settings: Lines "dotted.key=value"; the value is read as TOML, a bare word as a string.
        changes: A nested mapping merged over the source.

    Raises:
        ConfigError: Missing file, malformed TOML, an unknown key or a value out of range; one line that
            names file, key and reason.
    """
    origin = str(source) if isinstance(source, str | Path) else "configuration"
    values = merged(_read(source), changes or {})
    for setting in settings:
        values = merged(values, parse_setting(setting))
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise _first_problem(error, origin) from error


def parse_setting(setting: str) -> dict[str, Any]:
    """Turn "a.b=1.5" into {"a": {"b": 1.5}}.

    Raises:
        ConfigError: There is no "=" or no key.
    """
    key, separator, text = setting.partition("=")
    if not separator or not key.strip():
        raise ConfigError("--set", setting, "is not of the form key=value, as in trainer.threshold=0.1")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for part in reversed(key.strip().split(".")):
        value = {part: value}
    return value


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` laid over it, mappings merged key by key."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _read(source: str | Path | Mapping[str, Any] | RunConfig | None) -> dict[str, Any]:
    if source is None:
        return {}
    if isinstance(source, RunConfig):
        return source.model_dump()
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".json":
            return tomllib.loads(text)
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ConfigError(str(path), "syntax", f"holds a {type(values).__name__}, not a table of keys")
        return dict(
            values.get("config", values)
        )  # the config.json of a run holds more than the configuration
    except OSError as error:
        reason = f"cannot be read ({error.strerror}); check the path"
        raise ConfigError(str(path), "path", reason) from error
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), "syntax", f"is not valid {path.suffix or 'TOML'}: {error}") from error


def _first_problem(error: ValidationError, origin: str) -> ConfigError:
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return ConfigError(origin, key, f"is not a key of the configuration{_suggestion(problem['loc'])}")
    reason = problem["msg"].removeprefix("Value error, ")
    if problem["type"] != "value_error":
        reason = f"{reason}, got {problem['input']!r}"
    return ConfigError(origin, key or "configuration", reason)


def _suggestion(location: tuple[str | int, ...]) -> str:
    section: Any = RunConfig
    for part in location[:-1]:
        section = section.model_fields[str(part)].annotation
    known = list(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; the keys here are {', '.join(known)}"


def option_rows(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[tuple[str, str, str]]:
    """Every key as (dotted key, default, meaning), for help and documentation."""
    rows: list[tuple[str, str, str]] = []
    for name, field in section.model_fields.items():
        default = field.default
        if isinstance(default, BaseModel):
            rows += option_rows(type(default), f"{prefix}{name}.")
        else:
            meaning = " ".join((field.description or "").split())
            rows.append((f"{prefix}{name}", json.dumps(default), meaning))
    return rows
