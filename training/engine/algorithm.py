"""What a run asks of an algorithm: its network, its device, its trainer, and what a step releases."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

from torch import nn

from opusim.accounting.guarantee import Adjacency, NoGuarantee
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.records import RecordCentral, RecordReplaced, Unprotected
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.errors import ConfigError
from opusim.noise import NoiseModel
from opusim.training.config.kinds import TrainerSection
from opusim.training.config.run import RunConfig
from opusim.training.data import Dataset
from opusim.training.data.dataset import Target
from opusim.training.data.tables import Arrays
from opusim.training.engine.algorithm import Trainer
from opusim.training.networks.base import Network
from opusim.training.protections.base import Applied, PrivateGradients, Protection, SoftLabels
from opusim.training.protections.planning import Plan, ProtectedAlgorithm
from opusim.training.runs.folder import RunFolder

OptionsT = TypeVar("OptionsT", bound=TrainerSection)
NetworkT = TypeVar("NetworkT", bound=Network)
TrainerT = TypeVar("TrainerT", bound=Trainer)


@dataclass(frozen=True, kw_only=True)
class DeviceShape:
    """How wide a run opens its device.

    Attributes:
        n_inputs: Entries of a vector that it projects.
        n_outputs: Entries of a reading.
    """

    n_inputs: int
    n_outputs: int


class Algorithm(ProtectedAlgorithm, Generic[OptionsT, NetworkT, TrainerT]):
    """An algorithm bound to the plan of one run.

    A new algorithm is a subclass of this and of `TrainerSection`, whose `implementation` names it. It must give

    - `build_network` and `rebuild_network`: the network, new and from its description in a run folder;
    - `open` and `step`, if it is a `opusim.training.engine.trainer.Trainer`, too; else `trainer`, which returns one on
      `self.network`.

    It may also give

    - `device_shape`, if the run opens a device, and `work_of_step`, so that the run can say what it will take;
    - `mechanism` and `clip_norm`, if a step under protection.kind = 'record' releases something other than a sum of
      contributions that `RecordGradients` (`self.protection.gradients`) clips and noises;
    - `released`, if a run without protection releases more than unprotected updates;
    - `initialise` and `prepare`, for work before the first checkpoint and before the first step;
    - `noiseless` and `equivalent_noise`, which an audit needs for its controls.

    An algorithm whose section lists protections declares in `applies` how it carries them out. A run whose protection
    needs something else is refused.

    Attributes:
        plan: The run.
        config: Its configuration.
        options: Its section `trainer`.
        dataset: Its records.
        network: The network to train.
        writer: The writer of private gradients that the trainer was given, or None.
        uses_public_randomness: Whether a step draws more than the noise that a guarantee rests on, such as directions
            or probes. An audit lets its attacker know those draws.
    """

    targets: ClassVar[tuple[Target, ...]] = ("class",)
    """What the trainer predicts of a record; one that names "tokens" also takes records that hold tokens."""
    rounds_own_noise: ClassVar[bool] = False
    """Whether noise that it adds itself to clipped records goes through `NoiseStream.add_rounded`."""
    uses_public_randomness: ClassVar[bool] = False
    processes: ClassVar[Literal["none", "steps", "replicas"]] = "none"
    """What several processes share: nothing (they are refused), the steps that the first one leads
    (`opusim.training.engine.leading`), or batches of runs that each process keeps itself."""
    record_options: ClassVar[Mapping[str, Any]] = {}
    """Keys of the section `trainer` that a run under protection.kind = 'record' must have, with their values."""

    network: NetworkT

    def __init__(self, plan: Plan, options: OptionsT) -> None:
        self.plan, self.config, self.options = plan, plan.config, options
        self.dataset, self.network = plan.dataset, plan.network
        self.writer: PrivateGradients | None = None

    # Before there is a plan

    @classmethod
    def default_inputs(cls, config: RunConfig) -> tuple[RunConfig, Arrays | None, nn.Module | None]:
        """Return the configuration, and the data and the module that it names if the user gives neither.

        Raises:
            ConfigError: It names something that does not exist.
        """
        return config, None, None

    @classmethod
    @abstractmethod
    def build_network(cls, config: RunConfig, dataset: Dataset, model: nn.Module | None) -> NetworkT:
        """Return the network to train: the user-supplied module, or a new one of the configuration.

        Raises:
            TypeError, ValueError: The module cannot be trained so, or does not fit the data.
        """

    @classmethod
    @abstractmethod
    def rebuild_network(cls, facts: dict[str, Any], model: nn.Module | None) -> NetworkT:
        """Return a network as `Network.facts` describes it; its parameters are still to be filled in.

        Args:
            facts: What the run folder holds under "network".
            model: A module like the user-supplied one, if the folder cannot describe that one.

        Raises:
            RunFolderError: The folder cannot describe the module, and `model` is None.
        """

    # What a run is made of

    def chosen(self) -> Mapping[str, Any]:
        """Return keys of the section `trainer` that the algorithm chooses for a new run, with their values.

        Nothing that the user gives may be among them. A resumed run keeps what its folder holds.
        """
        return {}

    @cached_property
    def protection(self) -> Protection:
        """The protection of the run."""
        protection: Protection = self.config.protection.implementing_class()(self.plan, self)
        return protection

    def gradients(self, device: NoisyDevice | None) -> PrivateGradients | None:
        """Return what writes the gradients of a trainer in this run, or None if the trainer writes them itself.

        Args:
            device: The run's open device, for noise that is the device's.

        Raises:
            ConfigError: The device's noise cannot be credited.
        """
        writer, wrap = self.protection.gradients(device), self.plan.wrap_writer
        self.writer = writer if writer is None or wrap is None else wrap(writer)
        return self.writer

    @property
    def device_shape(self) -> DeviceShape:
        """How wide the device is opened, if `config.uses_device`."""
        raise NotImplementedError(f"{type(self).__name__} uses a device and must override device_shape")

    def trainer(self, device: NoisyDevice | None, labels: SoftLabels | None = None) -> TrainerT:
        """Return the trainer, with its noise and protection: by default a copy of this, opened.

        Args:
            device: The open device, or None if the run has none.
            labels: What training knows of the labels in their place, or None if it sees the labels.
        """
        opened: Any = copy(self)
        opened.open(device, labels)
        self.writer = opened.writer
        return cast(TrainerT, opened)

    def open(self, device: NoisyDevice | None, labels: SoftLabels | None) -> None:
        """Prepare for steps: set `optimizer`, and what a step needs; the arguments are those of `trainer`."""
        raise NotImplementedError(f"{type(self).__name__} must override open and step, or trainer")

    def protected_trainer(self, device: NoisyDevice | None, folder: RunFolder) -> TrainerT:
        """Return the trainer of the run, which was given everything that the protection puts in place of the data.

        Args:
            device: The open device, or None if the run has none.
            folder: The run folder, which holds a look at the labels.

        Raises:
            NoGuarantee: The trainer does not take what the protection gives it.
        """
        labels = self.protection.soft_labels(device, folder)
        if labels is not None and "soft labels" not in self.applies:
            raise NoGuarantee(_not_applied(self, "soft labels"))
        trainer = self.trainer(device, labels)
        if self.applies & self.protection.needs == {"gradients"} and self.writer is None:
            raise NoGuarantee(
                f"trainer.kind = {self.options.kind!r} declares that it applies 'gradients' and never asked for their "
                "writer; its algorithm must hand self.gradients(device) to its trainer"
            )
        return trainer

    def work_before(self) -> DeviceWork:
        """Return what a new run takes of the device before its first step: by default what the protection reads."""
        return self.protection.work_before()

    def work_of_step(self, records: float, n_outputs: int, *, observed: bool) -> DeviceWork | None:
        """Return what one step takes of the device; None if that is known only once a step is done.

        Args:
            records: Records of the batch; their mean, if it is random.
            n_outputs: Outputs of the open device.
            observed: Whether the step fills in its diagnostics.
        """
        return None

    def initialise(self, trainer: TrainerT) -> None:  # optional hook
        """Set the parameters of a new run, before its first checkpoint."""

    def prepare(self, trainer: TrainerT, folder: RunFolder) -> None:  # optional hook
        """Open what a trainer writes besides checkpoints; called before the first step of a new or resumed run."""

    # What it releases

    def require_covered(self) -> None:
        """Refuse a run that this algorithm cannot train, or that no theorem covers, before anything is computed.

        Raises:
            ConfigError: Keys that the algorithm does not take.
            NoGuarantee: The sampling scheme, the standardisation or the number of classes leaks what is protected.
        """
        self.protection.require_covered()

    @classmethod
    def clip_norm(cls, config: RunConfig, n_classes: int) -> float:
        """Return C, the largest norm of a record's contribution in a protected run.

        Args:
            config: The run.
            n_classes: Classes of its data.
        """
        return config.protection.clip

    def mechanism(self, noise_multiplier: float) -> Mechanism:
        """See ProtectedAlgorithm.mechanism; by default a step of clipped contributions."""
        return self.clipped_records(noise_multiplier, divisor=self.config.divisor)

    def clipped_records(self, noise_multiplier: float, *, divisor: float) -> RecordCentral | RecordReplaced:
        """Return one step of clipped records with central Gaussian noise, under the run's relation.

        Args:
            noise_multiplier: z, the noise's standard deviation over C.
            divisor: The constant that the noisy sum is divided by.

        Raises:
            NoGuarantee: The sampling scheme has no sampling probability.
        """
        config = self.config
        relation = config.relation or Adjacency.ZERO_OUT
        parameters: dict[str, Any] = {
            "noise_multiplier": noise_multiplier,
            "sampling_probability": self.plan.sampling_probability,
            "clip_norm": self.clip_norm(config, self.dataset.n_classes),
            "divisor": divisor,
            "device_noise": config.protection.noise == "device",
            "correlation": self.protection.correlation,
            "exactly_rounded": self.protection.rounds_exactly
            and ("gradients" in self.applies or self.rounds_own_noise),
            **self.plan.credit,
        }
        if relation is Adjacency.REPLACE_ONE:
            return RecordReplaced(**parameters)
        return RecordCentral(relation=relation, **parameters)

    def released(self, noise: NoiseModel | None) -> tuple[Mechanism, ...]:
        """Return what one step releases; nothing if the run pays for everything upfront.

        Args:
            noise: The law of the device's noise, or None if there is no device or its law is unknown.
        """
        if self.config.protection.protects == "nothing":
            return (Unprotected(what=f"{self.config.trainer.kind} without protection"),)
        return self.protection.released()

    # What its audit needs

    @property
    def noiseless(self) -> Mapping[str, Any] | None:
        """Keys of the section `trainer` that remove the trainer's own digital noise, with their values.

        None if the protective noise cannot be separated from the algorithm's own randomness.
        """
        return {}

    def equivalent_noise(self, noise_multiplier: float) -> float:
        """Return the noise multiplier at which a step's guarantee is that of one Gaussian release at the given one."""
        return noise_multiplier


def require_target(config: RunConfig, dataset: Dataset) -> None:
    """Refuse records that the run's trainer or protection does not take, before a network is built.

    Raises:
        ConfigError: `Algorithm.targets` lacks what is predicted of them, they hold tokens and it lacks tokens, or their
            labels are protected and are no classes.
    """
    kind, found = config.trainer.kind, dataset.target
    taken = config.trainer.implementing_class().targets
    if found not in taken:
        reason = (
            f"{found!r} is not what trainer.kind = {kind!r} learns, which is {' or '.join(map(repr, taken))}; take "
            "trainer.kind = 'bp', 'dfa', 'tdfa' or 'pdfa' with a model of your own"
        )
        raise ConfigError("configuration", "data.target", reason)
    if dataset.holds_tokens and "tokens" not in taken:
        reason = f"'tokens' is not what trainer.kind = {kind!r} takes; give features, as float32"
        raise ConfigError("configuration", "data.inputs", reason)
    if config.protection.protects == "labels" and found != "class":
        reason = f"{config.protection.kind!r} protects class numbers, and data.target is {found!r}; take another one"
        raise ConfigError("configuration", "protection.kind", reason)


def require_applied(algorithm: Algorithm[Any, Any, Any]) -> None:
    """Refuse a protection that the algorithm does not carry out, so that no guarantee is stated without its noise.

    Raises:
        NoGuarantee: `Algorithm.applies` holds nothing of `Protection.needs`.
    """
    needs = algorithm.protection.needs
    protects = algorithm.config.protection.protects != "nothing"
    if protects and not needs & algorithm.applies:
        raise NoGuarantee(_not_applied(algorithm, *sorted(needs)))


def _not_applied(algorithm: Algorithm[Any, Any, Any], *needs: Applied) -> str:
    """Why a protection does not hold under an algorithm."""
    kind, trainer = algorithm.config.protection.kind, algorithm.options.kind
    return (
        f"protection.kind = {kind!r} needs a trainer that applies {' or '.join(repr(need) for need in needs)}, and "
        f"trainer.kind = {trainer!r} applies {', '.join(map(repr, sorted(algorithm.applies))) or 'no protection'}; "
        "take another trainer, or declare what it applies in its Algorithm.applies"
    )
