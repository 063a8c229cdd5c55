"""How often a run can be taken up again.

The clips of eq. 9 of the PDFA paper, as a configuration names them.

What the network learns from.

Which device a run uses.

The fully connected network that a run builds.

Optimizer, schedule and averaging.

How records are drawn into batches.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from training.config.section import Section

ClippedLayers = Literal["all", "hidden", "feedback", "none"]
WidthRule = Literal["fan-in", "layer"]


def check_clip(tau_h_max: float | None, tau_h_min: float) -> None:
    """The offset of eq. 9 belongs to a clip, and stays below it."""
    if tau_h_max is None and tau_h_min:
        raise ValueError(
            f"tau_h_min = {tau_h_min} offsets what tau_h_max clips, which is missing; set tau_h_max"
        )
    if tau_h_max is not None and tau_h_min > tau_h_max:
        raise ValueError(f"tau_h_min = {tau_h_min} exceeds tau_h_max = {tau_h_max}; lower it")


SplitRule = Literal["index", "content", "id"]


class DataConfig(Section):
    """What the network learns from."""

    name: str = "digits"
    """digits, mnist, fashion-mnist, cifar-10; "arrays" where training.train was given user-supplied ones."""
    validation_fraction: float = Field(0.1, ge=0.0, lt=1.0)
    """Share of the training records held out for validation (0.1 in the PDFA paper)."""
    split_seed: int = Field(0, ge=0)
    """Public seed of the rule that picks the validation records; it never looks at labels."""
    split: SplitRule | None = None
    """What decides whether a record is held out. index: its place among all n, by a seeded permutation. content: a
    keyed hash of its own features. id: a keyed hash of the ID that was given with it. None: id where IDs were given,
    else content for protection.relation = 'add_or_remove_one', else index."""
    n_classes: int | None = Field(None, ge=2)
    """Number of classes of user-supplied arrays; None reads it off the labels (one more than the largest)."""
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


class DeviceChoice(BaseModel):
    """A device description by name or path, with keys of the description overridden."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    name: str = "gaussian"
    """A name of `opusim device list`, or the path of a TOML file; other keys of this section, such as
    device.noise.sigma, override keys of that description. Refused where the run opens no device."""

    @property
    def overrides(self) -> dict[str, Any]:
        """The keys given beside the name, as a nested mapping."""
        return dict(self.model_extra or {})


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


class OptimizerConfig(Section):
    """A torch optimizer of the SGD or Adam family."""

    largest: ClassVar[dict[str, float]] = {"lr": 1e4}  # parameters of order 1 overflow within ten such steps
    name: Literal["sgd", "adam", "adamw", "nadam", "radam", "adamax"] = "sgd"
    """Class in torch.optim."""
    lr: float = Field(0.01, gt=0.0)
    """Learning rate; 0.002 by default for zo, 1.9 for convex."""
    momentum: float = Field(0.9, ge=0.0, lt=1.0)
    """Momentum (sgd only); 0 for zo and convex, which have none."""
    nesterov: bool = False
    """Nesterov's form of momentum (sgd only)."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of the first moment (Adam family)."""
    beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """Decay of the second moment (Adam family)."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Weight decay as the torch class defines it."""
    schedule: Literal["constant", "linear", "cosine", "step"] = "constant"
    """How the learning rate falls over the run: not at all, linearly to 0, as half a cosine to 0, or in steps."""
    step_size: float = Field(0.4, gt=0.0, le=1.0)
    """Share of the run after which the rate falls, again and again (schedule step only)."""
    gamma: float = Field(0.85, gt=0.0, le=1.0)
    """Factor by which it falls each time (schedule step only)."""
    averaged_tail: float = Field(0.0, ge=0.0, lt=1.0)
    """The final model is the mean of the parameters over this share of the steps, the last ones; 0 for the last. A run
    that its budget ends early keeps its last parameters."""


class SamplerConfig(Section):
    """How records are drawn into batches (see training.data.samplers)."""

    scheme: Literal[
        "shuffled-epochs", "poisson", "poisson-min-batch", "fixed-size", "disjoint-cyclic", "full-batch"
    ] = "shuffled-epochs"
    """Sampling scheme; an accountant asks for it by this name. Unless it is given, protection.kind = 'record' and
    'label-amplified' take poisson, and convex takes disjoint-cyclic otherwise."""
    batch_size: int = Field(256, ge=1)
    """Records in a batch (expected number under Poisson sampling); 250 by default for convex. Where
    sampling_probability is given it is only the default of protection.divisor."""
    sampling_probability: float | None = Field(None, gt=0.0, le=1.0)
    """q, with which each record enters a Poisson batch, and 1 / q steps an epoch; None takes batch_size over the number
    of training records. protection.relation = 'add_or_remove_one' needs it: there that number is private."""
    min_batch_size: int | None = Field(None, ge=1)
    """Smallest batch that poisson-min-batch accepts."""
    drop_last: bool = False
    """Leave out the last, shorter batch of an epoch (shuffled-epochs only)."""


class CheckpointConfig(Section):
    """How often a run can be taken up again."""

    every_steps: int | None = Field(None, ge=1)
    """Steps between checkpoints; None: one at the end of each epoch."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""
