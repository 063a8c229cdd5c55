"""What a run asks of an algorithm: its network, its device, its trainer, and what a step releases."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from opusim.accounting.guarantee import Adjacency, NoGuarantee
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.records import RecordCentral, RecordReplaced, Unprotected
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork, Usage
from opusim.errors import ConfigError
from opusim.noise import NoiseModel
from opusim.training.config.kinds import TrainerSection
from opusim.training.config.run import RunConfig
from opusim.training.data import Dataset
from opusim.training.data.dataset import Target
from opusim.training.data.tables import Arrays
from opusim.training.networks.base import Network
from opusim.training.networks.clipping import WITHOUT_FLOAT64, widest
from opusim.training.protections.base import (
    Applied,
    Plan,
    PrivateGradients,
    ProtectedAlgorithm,
    Protection,
    SoftLabels,
)
from opusim.training.runs.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step measured before its update.

    Attributes:
        loss_sum: Sum of the records' losses, float64 scalar tensor; float32 on a torch device without float64.
        n_correct: Correct decisions, such as correctly classified records, int64 scalar tensor.
        n_records: Records in the batch, or int64 scalar tensor.
        n_judged: Decisions that `n_correct` counts, if a record is not one decision: tokens, labels, or 0 for real
            numbers; None for one each record. It may be an int64 scalar tensor.
        diagnostics: Named figures, one value per layer; empty unless the step was observed.
    """

    loss_sum: Tensor
    n_correct: Tensor
    n_records: int | Tensor
    n_judged: int | Tensor | None = None
    diagnostics: dict[str, list[float]] = field(default_factory=dict)


class Trainer(ABC):
    """Parameters, what one step releases, and the step.

    Attributes:
        network: The network to train.
        optimizer: Carries the learning rate.
        device: The open device that it reads, or None.
        intact: Whether the parameters are, to the bit, those after the last finished step, so that a checkpoint may be
            written. False if a step was interrupted while it moved them.
    """

    network: Network
    optimizer: torch.optim.Optimizer
    device: NoisyDevice | None = None
    intact: bool = True

    @abstractmethod
    def step(
        self, x: Tensor, y: Tensor, *, step: int, observe: bool, records: Tensor | None = None
    ) -> StepRecord:
        """Do one update.

        A trainer that fills batches also takes `filled`, which marks rows of weight zero among those of users.

        Args:
            x: Inputs, shape (batch, n_inputs); the batch may be empty.
            y: Class numbers, shape (batch,), or values of another target of the data set.
            step: Number of the step, from 0; noise is keyed by it in experiment mode.
            observe: Whether to fill in the diagnostics, which cost time.
            records: Numbers of the batch's records in the training set, shape (batch,); a protection that keeps
                something for each record needs them.

        Raises:
            TrainingDiverged: The error is not finite; nothing was updated.
        """

    @property
    def model(self) -> nn.Module:
        """The module that is trained."""
        return self.network.model

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters by name, as a checkpoint holds them; a checkpoint is restored by copying into them."""
        return self.network.tensors

    @property
    def usage(self) -> Usage:
        """Frames, seconds and joules used so far; zero for a trainer without a device."""
        return Usage() if self.device is None else self.device.usage

    def close(self) -> None:  # noqa: B027  # optional hook
        """Remove training's hooks from the model; called after the last step, or after an error."""

    def before_checkpoint(self) -> None:  # noqa: B027  # optional hook
        """Bring parameters and files to a point from which a run can resume; called before each checkpoint."""

    @property
    def state(self) -> dict[str, Tensor]:
        """Everything else that a resumed run needs, by name; a checkpoint is restored by copying into these tensors."""
        return {}


class EpochSums:
    """Running sums of step records over an epoch, on the torch device that computes them.

    Losses are added in float64. Without float64 the sum is a pair of float32 numbers, the second of which holds what
    rounding took from the first: over n steps it is off by at most n^2 2^-48 of the sum of the magnitudes (Ogita, Rump
    and Oishi 2005, proposition 4.5), besides the float32 rounding of each batch's own sum.

    Args:
        place: The torch device.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self.clear()

    def clear(self) -> None:
        """Start a new epoch."""
        self._loss: Tensor = torch.zeros((), dtype=widest(self._place), device=self._place)
        self._rest: Tensor | None = (
            None if self._loss.dtype == torch.float64 else torch.zeros_like(self._loss)
        )
        self._correct: Tensor = torch.zeros((), dtype=torch.int64, device=self._place)
        self._records: int | Tensor = 0
        self._judged: int | Tensor = 0
        self._observed: list[dict[str, list[float]]] = []

    def add(self, record: StepRecord) -> None:
        """Add a step, without waiting for the torch device."""
        total = self._loss + record.loss_sum
        if self._rest is not None:
            part = total - self._loss
            self._rest = self._rest + ((self._loss - (total - part)) + (record.loss_sum - part))
        self._loss = total
        self._correct = self._correct + record.n_correct
        self._records = self._records + record.n_records
        self._judged = self._judged + (record.n_records if record.n_judged is None else record.n_judged)
        if record.diagnostics:
            self._observed.append(record.diagnostics)

    def means(self) -> dict[str, float]:
        """Return mean loss and accuracy; each record is measured just before its batch's update."""
        records, judged = int(self._records), int(self._judged)
        means = {"loss": self._loss_sum / records} if records else {}
        return means | ({"accuracy": int(self._correct) / judged} if judged else {})

    @property
    def _loss_sum(self) -> float:
        return float(self._loss) + (0.0 if self._rest is None else float(self._rest))

    def diagnostics(self) -> dict[str, list[float]]:
        """Return each diagnostic's mean over the observed steps, by layer."""
        if not self._observed:
            return {}
        return {
            name: [
                statistics.fmean(values)
                for values in zip(*(seen[name] for seen in self._observed), strict=True)
            ]
            for name in self._observed[0]
            if all(name in seen for seen in self._observed)
        }

    def dump(self) -> dict[str, Any]:
        """Return the sums as a checkpoint holds them."""
        return {
            "loss": self._loss_sum,
            "correct": int(self._correct),
            "records": int(self._records),
            "judged": int(self._judged),
            "observed": self._observed,
        }

    def load(self, sums: dict[str, Any]) -> None:
        """Take over the sums that `dump` returned."""
        self._loss = torch.tensor(sums["loss"], dtype=widest(self._place), device=self._place)
        if self._rest is not None:
            self._rest = torch.full_like(self._loss, sums["loss"] - float(self._loss))
        self._correct = torch.tensor(sums["correct"], dtype=torch.int64, device=self._place)
        self._records = sums["records"]
        self._judged = sums.get("judged", self._records)  # an older checkpoint counts records
        self._observed = list(sums["observed"])


OptionsT = TypeVar("OptionsT", bound=TrainerSection)
NetworkT = TypeVar("NetworkT", bound=Network)
TrainerT = TypeVar("TrainerT", bound=Trainer)


@dataclass(frozen=True, kw_only=True)
class DeviceShape:
    """The widths with which a run opens its device.

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
    - `open` and `step`, if it is a `Trainer`, too; else `trainer`, which returns one on `self.network`.

    It may also give

    - `device_shape`, if the run opens a device, and `work_of_step`, so that the run can forecast the device's usage;
    - `mechanism` and `clip_norm`, if a step under protection.kind = 'record' releases something other than a sum of
      contributions that `RecordGradients` (`self.protection.gradients`) clips and noises;
    - `released`, if a run without protection releases more than unprotected updates;
    - `initialise` and `prepare`, for work before the first checkpoint and before the first step;
    - `noiseless` and `equivalent_noise`, which an audit needs for its controls.

    An algorithm whose section lists protections declares in `applies` how it applies them. A run whose protection needs
    something else is refused.

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
    """Targets that the trainer can predict; with "tokens" it also takes records that hold tokens."""
    rounds_own_noise: ClassVar[bool] = False
    """Whether noise that it adds itself to clipped records goes through `NoiseStream.add_rounded`."""
    counts_own_sums: ClassVar[bool] = False
    """Whether that noise also covers the rounding of its sum, as `Protection.counted_sums` says."""
    uses_public_randomness: ClassVar[bool] = False
    layer_signals: ClassVar[Literal["none", "estimated", "exact"]] = "none"
    """Whether a layer's own signals are estimated or exact, if its update is a sum of outer products of its inputs with
    them; else "none". An audit attacks it accordingly."""
    processes: ClassVar[Literal["none", "steps", "replicas"]] = "none"
    """What several processes share: nothing (they are refused), the steps that the first one leads
    (`opusim.training.engine.session`), or batches of runs that each process keeps itself."""
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
            facts: The content of the run folder's facts under "network".
            model: A module like the user-supplied one, if the folder cannot describe that one.

        Raises:
            RunFolderError: The folder cannot describe the module, and `model` is None.
        """

    # What a run is made of

    @property
    def needs_float64(self) -> str | None:
        """Why a step without protection needs float64, which Apple's GPU lacks; None if it does not."""
        return f"trainer.kind = {self.options.kind!r}"

    def chosen(self) -> Mapping[str, Any]:
        """Return keys of the section `trainer` that the algorithm chooses for a new run, with their values.

        They must not include a key that the user gives. A resumed run keeps what its folder holds.
        """
        return {}

    @cached_property
    def protection(self) -> Protection:
        """The protection of the run."""
        protection: Protection = self.config.protection.implementing_class()(self.plan, self)
        return protection

    def gradients(self, device: NoisyDevice | None) -> PrivateGradients | None:
        """Return the writer of a trainer's gradients in this run, or None if the trainer writes them itself.

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
        """The widths of the opened device, if `config.uses_device`."""
        raise NotImplementedError(f"{type(self).__name__} uses a device and must override device_shape")

    def trainer(self, device: NoisyDevice | None, labels: SoftLabels | None = None) -> TrainerT:
        """Return the trainer, with its noise and protection: by default a copy of this, opened.

        Args:
            device: The open device, or None if the run has none.
            labels: What training sees instead of the labels, or None if it sees the labels.
        """
        opened: Any = copy(self)
        opened.open(device, labels)
        self.writer = opened.writer
        return cast(TrainerT, opened)

    def open(self, device: NoisyDevice | None, labels: SoftLabels | None) -> None:
        """Prepare for steps: set `optimizer`, and what a step needs; the arguments are those of `trainer`."""
        raise NotImplementedError(f"{type(self).__name__} must override open and step, or trainer")

    def protected_trainer(self, device: NoisyDevice | None, folder: RunFolder) -> TrainerT:
        """Return the trainer of the run, with everything by which the protection replaces data.

        Args:
            device: The open device, or None if the run has none.
            folder: The run folder, which keeps what was read of the labels.

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
        """Return the device work of a new run before its first step: by default the protection's readings."""
        return self.protection.work_before()

    def work_of_step(self, records: float, n_outputs: int, *, observed: bool) -> DeviceWork | None:
        """Return the device work of one step; None if it is known only after a step.

        Args:
            records: Records of the batch; their mean, if it is random.
            n_outputs: Outputs of the open device.
            observed: Whether the step fills in its diagnostics.
        """
        return None

    def initialise(self, trainer: TrainerT) -> None:  # optional hook
        """Set the parameters of a new run, before its first checkpoint."""

    def prepare(self, trainer: TrainerT, folder: RunFolder) -> None:  # optional hook
        """Open a trainer's own files; called before the first step of a new or resumed run."""

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

    @property
    def own_clip(self) -> float:
        """C of this run."""
        return self.clip_norm(self.config, self.dataset.n_classes)

    def mechanism(self, noise_multiplier: float) -> Mechanism:
        """Return what a run releases of whole records: by default a step of clipped contributions."""
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
        exact = self.protection.rounds_exactly and ("gradients" in self.applies or self.rounds_own_noise)
        parameters: dict[str, Any] = {
            "noise_multiplier": noise_multiplier,
            "sampling_probability": self.plan.sampling_probability,
            "clip_norm": self.own_clip,
            "divisor": divisor,
            "device_noise": config.protection.noise == "device",
            "correlation": self.protection.correlation,
            "exactly_rounded": exact,
            "counts_sums": exact
            and ("gradients" in self.applies or self.counts_own_sums)
            and self.protection.counted_sums is not None,
            "clipping": self.protection.clipping.kind,
            "count_noise": self.protection.clipping.count_noise,
            **self.plan.credit,
        }
        if relation is Adjacency.REPLACE_ONE:
            return RecordReplaced(**parameters)
        if config.of_users:
            parameters["records_per_user"] = config.group
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
    def noises_signals(self) -> bool:
        """Whether the signal of every hidden layer has noise of one standard deviation, before the slope."""
        return False

    @property
    def leaves_directions(self) -> bool:
        """Whether directions that a batch's inputs do not span get next to no noise."""
        return False

    @property
    def noiseless(self) -> Mapping[str, Any] | None:
        """Keys of the section `trainer` that remove the trainer's own digital noise, with their values.

        None if the protective noise cannot be separated from the algorithm's own randomness.
        """
        return {}

    def equivalent_noise(self, noise_multiplier: float) -> float:
        """Return the noise multiplier that gives a step the guarantee of one Gaussian release at `noise_multiplier`."""
        return noise_multiplier


def require_float64(algorithm: Algorithm[Any, Any, Any]) -> None:
    """Refuse (ConfigError) a run on a torch device without float64 whose steps need it."""
    config = algorithm.config
    place = torch.device(config.torch_device)
    if place.type not in WITHOUT_FLOAT64:
        return
    found = algorithm.needs_float64
    if config.protection.protects != "nothing":
        found = f"protection.kind = {config.protection.kind!r}"
    if found is not None:
        reason = f"{place.type!r} has no float64, in which a step under {found} computes; use 'cpu'"
        raise ConfigError("configuration", "torch_device", reason)


def require_applied(algorithm: Algorithm[Any, Any, Any]) -> None:
    """Refuse (NoGuarantee) a protection whose noise the algorithm does not apply: none of its `needs`."""
    needs = algorithm.protection.needs
    protects = algorithm.config.protection.protects != "nothing"
    if protects and not needs & algorithm.applies:
        raise NoGuarantee(_not_applied(algorithm, *sorted(needs)))


def _not_applied(algorithm: Algorithm[Any, Any, Any], *needs: Applied) -> str:
    """Return why a protection does not hold under an algorithm."""
    kind, trainer = algorithm.config.protection.kind, algorithm.options.kind
    return (
        f"protection.kind = {kind!r} needs a trainer that applies {' or '.join(repr(need) for need in needs)}, and "
        f"trainer.kind = {trainer!r} applies {', '.join(map(repr, sorted(algorithm.applies))) or 'no protection'}; "
        "take another trainer, or declare what it applies in its Algorithm.applies"
    )
