"""What a run asks of a family of trainers: its network, its device, its step, and what the step releases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from torch import Tensor, nn

from accounting.guarantee import Adjacency
from accounting.ledger.ledger import Ledger
from accounting.mechanisms import Mechanism
from opusim.devices.base import NoisyDevice
from opusim.errors import ConfigError
from opusim.noise import NoiseModel
from training.config.run import RunConfig
from training.data import Dataset
from training.data.samplers import Sampler
from training.data.splits import Ids
from training.engine.trainer import Trainer
from training.networks.base import Network
from training.protections.config import RecordConfig
from training.protections.planning import divisor_of, require_covered, with_multiplier, with_sampled_noise
from training.runs.folder import RunFolder

Array = np.ndarray | Tensor
Arrays = tuple[Array, Array] | tuple[Array, Array, Ids]
"""User-supplied data: features and class numbers, and for data.split = 'id' an ID of each record."""
NetworkT = TypeVar("NetworkT", bound=Network)


@dataclass(frozen=True, kw_only=True)
class DeviceShape:
    """How wide a run opens its device.

    Attributes:
        n_inputs: Entries of a vector that it projects.
        n_outputs: Entries of a reading.
    """

    n_inputs: int
    n_outputs: int


class TrainerFamily(ABC, Generic[NetworkT]):
    """Builds, checks and prices the runs of some trainers; stateless.

    Attributes:
        protections: Values of protection.kind that these trainers take.
        draws_in_public: Whether a step draws more than the noise that a guarantee rests on (directions, probes); an
            audit lets its attacker know that.
    """

    protections: ClassVar[tuple[str, ...]] = ("none", "record")
    draws_in_public: ClassVar[bool] = False

    def own_parts(self, config: RunConfig) -> tuple[RunConfig, Arrays | None, nn.Module | None]:
        """The configuration, with the data and the module that it names itself where none were given.

        Raises:
            ConfigError: It names something that is not there.
        """
        return config, None, None

    @abstractmethod
    def network(self, config: RunConfig, dataset: Dataset, model: nn.Module | None) -> NetworkT:
        """The network to train: a person's own module, or a new one as the configuration says.

        Raises:
            TypeError, ValueError: The module cannot be trained so, or does not fit the data.
        """

    @abstractmethod
    def rebuilt(self, facts: dict[str, Any], model: nn.Module | None) -> NetworkT:
        """A network as `Network.facts` describes it, its parameters yet to be filled in.

        Args:
            facts: What the run folder holds under "network".
            model: A person's own module, where the run was given one that its folder cannot describe.

        Raises:
            RunFolderError: The run was given a module of its own, and `model` is None.
        """

    @abstractmethod
    def device_shape(self, config: RunConfig, network: NetworkT) -> DeviceShape:
        """How wide the device is opened, where `config.uses_device`."""

    @abstractmethod
    def trainer(
        self, config: RunConfig, network: NetworkT, dataset: Dataset, device: NoisyDevice | None
    ) -> Trainer:
        """The trainer, with its noise and protection."""

    @abstractmethod
    def step_mechanisms(
        self, config: RunConfig, network: NetworkT, sampler: Sampler, noise: NoiseModel | None
    ) -> tuple[Mechanism, ...]:
        """What one step releases; empty where everything is paid for at the beginning.

        Args:
            config: The run, with its noise multiplier.
            network: Its network.
            sampler: Its sampler.
            noise: The device's noise, None for a run without a device.
        """

    def require_covered(self, config: RunConfig, dataset: Dataset, sampler: Sampler) -> None:
        """Refuse a run that this family cannot train, or that no theorem covers, before anything is computed.

        Raises:
            ConfigError: A protection that these trainers do not take.
            NoGuarantee: The sampling scheme, the standardisation or the number of classes leaks what is protected.
        """
        kind = config.protection.kind
        if kind not in self.protections:
            raise ConfigError(
                "configuration",
                "protection.kind",
                f"{kind!r} is not for trainer.kind = {config.trainer.kind!r}; it takes {', '.join(self.protections)}",
            )
        require_covered(config, dataset, sampler)

    def with_noise(self, config: RunConfig, network: NetworkT, sampler: Sampler) -> RunConfig:
        """The configuration with the noise multiplier that its epsilon asks for, where none was given.

        Raises:
            NoGuarantee: No noise reaches epsilon.
        """
        return with_sampled_noise(config, sampler)

    def begin(self, config: RunConfig, trainer: Trainer) -> None:
        """Prepare the parameters of a new run, before its first checkpoint."""
        return

    def pay_at_start(
        self,
        config: RunConfig,
        trainer: Trainer,
        dataset: Dataset,
        device: NoisyDevice | None,
        ledger: Ledger,
        folder: RunFolder,
        *,
        steps: int,
    ) -> None:
        """Pay for, and take, what the run looks at once; called whenever it begins or goes on.

        Raises:
            BudgetExceeded: It would cost more than the budget.
            LedgerCorrupt: It was taken and is not paid for.
        """
        return

    def record_protected(self, config: RunConfig, noise_multiplier: float) -> RunConfig:
        """The run with whole records protected by a known digital noise on Poisson batches: a control of its audit.

        Args:
            config: The run.
            noise_multiplier: z, for a step with one direction (zo); doubled where a record is replaced, which moves a
                sum twice as far as leaving it out.
        """
        protection = RecordConfig(
            noise_multiplier=noise_multiplier,
            delta=config.protection.delta,
            relation=getattr(config.protection, "relation", None),
            clip_norm=config.protection.clip,
            divisor=divisor_of(config),
        )
        sampler = {"scheme": "poisson", "min_batch_size": None}
        control = config.model_copy(
            update={
                "protection": protection,
                "sampler": config.sampler.model_copy(update=sampler),
            }
        )
        if control.relation is Adjacency.REPLACE_ONE:
            return with_multiplier(control, 2 * noise_multiplier)
        return control

    def without_noise(self, config: RunConfig) -> RunConfig | None:
        """The run without the digital noise that its guarantee rests on: what a person who forgot it would train.

        None where that noise is not apart from what else a step draws.
        """
        if config.protection.kind == "none":
            return config
        silent = {"noise_multiplier": 0.0, "noise": "digital"}
        return config.model_copy(update={"protection": config.protection.model_copy(update=silent)})


_HOMES = {
    **dict.fromkeys(("bp", "dfa", "tdfa", "pdfa"), "training.feedback.algorithm:FeedbackFamily"),
    "ulr": "training.ulr.algorithm:UlrFamily",
    "zo": "training.zeroth_order.algorithm:ZoFamily",
    "convex": "training.convex.algorithm:ConvexFamily",
}
"""Where each trainer's family stands; imported when it is needed."""


def family_of(kind: str) -> TrainerFamily[Any]:
    """The family of a trainer, by `trainer.kind`."""
    module, _, name = _HOMES[kind].partition(":")
    make: Callable[[], TrainerFamily[Any]] = getattr(import_module(module), name)
    return make()
