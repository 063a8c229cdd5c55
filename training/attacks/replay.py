"""A run's own trainer, set back to the same state before every trial of an audit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from opusim.description.schema import DeviceDescription, NoiseSettings
from training.attacks.base import Records, steps_needed
from training.config.run import RunConfig
from training.data import Dataset
from training.engine.algorithm import TrainerFamily, family_of
from training.engine.assembly import configured_sampler, opened_device
from training.engine.optimizers import load_optimizer_tensors, optimizer_tensors, set_learning_rate
from training.engine.trainer import Trainer
from training.networks.base import Network
from training.runs.checkpoints import Checkpoint, copy_parameters

NetworkT = TypeVar("NetworkT", bound=Network)
_LATEST_PROGRESS = 0.5
"""A schedule is followed to its middle only: the rates at its end hide updates in the rounding of the weights, which
protects nobody who trained before."""

_SIMULATED = ("ideal", "gaussian")


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """What a run folder says of a run.

    Attributes:
        config: Its configuration.
        dataset: Its records, in principal components if it trained on those, on the torch device.
        description: Its device; None for a trainer without one.
        network_facts: Its network, as the folder describes it.
        model: A module of a person's own that the folder cannot describe; None for no such.
        checkpoint: Where the audit begins.
        checkpoint_file: Its file, for messages.
        progress: Share of the run that was done there.
    """

    config: RunConfig
    dataset: Dataset
    description: DeviceDescription | None
    network_facts: dict[str, Any]
    model: nn.Module | None
    checkpoint: Checkpoint
    checkpoint_file: Path
    progress: float

    @property
    def family(self) -> TrainerFamily[Any]:
        """Of the run's trainer."""
        return family_of(self.config.trainer.kind)

    def network(self) -> Any:
        """A network of its own with the checkpoint's parameters."""
        network = self.family.rebuilt(self.network_facts, deepcopy(self.model))
        copy_parameters(self.checkpoint, network.tensors, self.checkpoint_file)
        network.model.to(self.config.torch_device)
        return network


class Stage:
    """A trainer at a state that every trial starts from: the checkpoint, and what the attacker must see behind it.

    Args:
        parts: The run.
        config: Its configuration as it is to be played: another seed, maybe another protection.
        trainer: Made from that configuration on the run's network.
    """

    def __init__(self, parts: RunParts, config: RunConfig, trainer: Trainer) -> None:
        self.config, self.dataset = config, parts.dataset
        self._trainer = trainer
        set_learning_rate(trainer.optimizer, config.optimizer, min(parts.progress, _LATEST_PROGRESS))
        self.rate = float(trainer.optimizer.param_groups[0]["lr"])
        load_optimizer_tensors(trainer.optimizer, parts.checkpoint.named("optimizer."))
        self._earlier = steps_needed(config.optimizer)
        self._history = [self._parameters()]
        sampler = configured_sampler(config, parts.dataset)
        for number in range(self._earlier):
            index = sampler.indices(number).to(parts.dataset.train.x.device)
            self._step(index, number)
            self._history.append(self._parameters())
        self._state = {name: tensor.clone() for name, tensor in trainer.state.items()}
        self._optimizer_state = {k: t.clone() for k, t in optimizer_tensors(trainer.optimizer).items()}

    def records(self, index: Tensor) -> Records:
        """Training records by number."""
        return Records(x=self.dataset.train.x[index], y=self.dataset.train.y[index])

    def step_of(self, trial: int) -> int:
        """The number of a trial's step, which keys its noise: no two trials share any."""
        return self._earlier + trial

    def weights_after(self, index: Tensor, trial: int) -> list[Mapping[str, Tensor]]:
        """Consecutive weights up to those after a step on a batch, oldest first.

        Args:
            index: Numbers of the batch's training records.
            trial: Its number, from 0.
        """
        self._restore()
        self._step(index, self.step_of(trial))
        return [*self._history, self._parameters()]

    def _step(self, index: Tensor, number: int) -> None:
        train = self.dataset.train
        self._trainer.step(train.x[index], train.y[index], step=number, observe=False, records=index)

    def _parameters(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._trainer.tensors.items()}

    def _restore(self) -> None:
        """Back to the state behind the warm-up; plain SGD keeps nothing but its momentum."""
        with torch.no_grad():
            for name, tensor in self._trainer.tensors.items():
                tensor.copy_(self._history[-1][name])
            for name, tensor in self._trainer.state.items():
                tensor.copy_(self._state[name])
            for name, tensor in optimizer_tensors(self._trainer.optimizer).items():
                tensor.copy_(self._optimizer_state[name])


@contextmanager
def staged(parts: RunParts, config: RunConfig) -> Iterator[Stage]:
    """Open the device and make the trainer as training does, at the checkpoint's state.

    Raises:
        ConfigError: The optimizer cannot be undone.
        DeviceError: The device cannot be opened.
    """
    network, family = parts.network(), parts.family
    with opened_device(config, family.device_shape(config, network), parts.description) as device:
        yield Stage(parts, config, family.trainer(config, network, parts.dataset, device))


class Shadow(Generic[NetworkT]):
    """The step as an attacker computes it who knows all but the credited noise: the same trainer without that noise.

    Args:
        network: A network of its own.
        trainer: Makes steps on it, at learning rate 1 and without momentum.
    """

    def __init__(self, network: NetworkT, trainer: Trainer) -> None:
        self._network, self._trainer = network, trainer

    def gradients(self, weights: Mapping[str, Tensor], records: Records, *, step: int) -> dict[str, Tensor]:
        """The gradients that a step takes, float64, by parameter.

        Args:
            weights: The parameters that the step starts from.
            records: The batch.
            step: The step's number.
        """
        self.network_at(weights)
        index = torch.zeros(len(records.x), dtype=torch.int64, device=records.x.device)
        self._trainer.step(records.x, records.y, step=step, observe=False, records=index)
        return {
            name: weights[name].double() - t.detach().double() for name, t in self._trainer.tensors.items()
        }

    def network_at(self, weights: Mapping[str, Tensor]) -> NetworkT:
        """The network with these parameters, until the next call."""
        with torch.no_grad():
            for name, tensor in self._network.tensors.items():
                tensor.copy_(weights[name])
        return self._network


@contextmanager
def shadowed(parts: RunParts, config: RunConfig) -> Iterator[Shadow[Any] | None]:
    """The noiseless step; None where the noise, or what is random beside it, cannot be known.

    Args:
        parts: The run.
        config: Its configuration as it is played, seed and all.
    """
    description, silent = parts.description, parts.family.without_noise(config)
    if silent is None or (description is not None and description.kind not in _SIMULATED):
        yield None
        return
    if description is not None and description.noise is not None:
        description = description.model_copy(update={"noise": NoiseSettings(sigma=0.0)})
    plain = {"lr": 1.0, "schedule": "constant", "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
    silent = silent.model_copy(update={"optimizer": silent.optimizer.model_copy(update=plain)})
    network, family = parts.network(), parts.family
    with opened_device(silent, family.device_shape(silent, network), description) as device:
        yield Shadow(network, family.trainer(silent, network, parts.dataset, device))
