"""A run's own trainer, set back to the same state before every trial of an audit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from opusim.description_schema import DeviceDescription, NoiseSettings
from training.assembly import configured_sampler, opened_device
from training.attacks.base import Records
from training.attacks.updates import steps_needed
from training.config.run import RunConfig
from training.data import Dataset
from training.feedback.family import FeedbackFamily
from training.feedback.trainer import FeedbackTrainer
from training.networks.network import FullyConnected, LayerShape
from training.optimizers import load_optimizer_tensors, optimizer_tensors, set_learning_rate
from training.protections.plan import divisor_of
from training.runs.checkpoints import Checkpoint, copy_parameters

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
        n_inputs: Width of the network's input.
        layers: The network.
        checkpoint: Where the audit begins.
        checkpoint_file: Its file, for messages.
        progress: Share of the run that was done there.
    """

    config: RunConfig
    dataset: Dataset
    description: DeviceDescription | None
    n_inputs: int
    layers: Sequence[LayerShape]
    checkpoint: Checkpoint
    checkpoint_file: Path
    progress: float

    def network(self) -> FullyConnected:
        """A network with the checkpoint's weights."""
        network = FullyConnected.from_facts(
            {"n_inputs": self.n_inputs, "layers": [asdict(layer) for layer in self.layers]}
        )
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

    def __init__(self, parts: RunParts, config: RunConfig, trainer: FeedbackTrainer) -> None:
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
        self._optimizer_state = {k: t.clone() for k, t in optimizer_tensors(trainer.optimizer).items()}

    def records(self, index: Tensor) -> Records:
        """Training records by number."""
        return Records(x=self.dataset.train.x[index], y=self.dataset.train.y[index])

    def weights_after(self, index: Tensor, trial: int) -> list[Mapping[str, Tensor]]:
        """Consecutive weights up to those after a step on a batch, oldest first.

        Args:
            index: Numbers of the batch's training records.
            trial: Keys the noise: no two trials share any.
        """
        self._restore()
        self._step(index, self._earlier + trial)
        return [*self._history, self._parameters()]

    def _step(self, index: Tensor, number: int) -> None:
        train = self.dataset.train
        self._trainer.step(train.x[index], train.y[index], step=number, records=index)

    def _parameters(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._trainer.tensors.items()}

    def _restore(self) -> None:
        """Back to the state behind the warm-up; plain SGD keeps nothing but its momentum."""
        with torch.no_grad():
            for name, tensor in self._trainer.tensors.items():
                tensor.copy_(self._history[-1][name])
            for name, tensor in optimizer_tensors(self._trainer.optimizer).items():
                tensor.copy_(self._optimizer_state[name])


@contextmanager
def staged(parts: RunParts, config: RunConfig) -> Iterator[Stage]:
    """Open the device and make the trainer as training does, at the checkpoint's state.

    Raises:
        ConfigError: The optimizer cannot be undone.
        DeviceError: The device cannot be opened.
    """
    network = parts.network()
    family = FeedbackFamily()
    with opened_device(config, family.device_shape(config, network), parts.description) as device:
        yield Stage(parts, config, family.trainer(config, network, parts.dataset, device))


class Shadow:
    """The step as an attacker who knows the device computes it: the same trainer without any noise.

    Args:
        network: A network of its own.
        trainer: Makes noiseless steps on it.
        divisor: What the trainer divides sums by; None for the batch size.
    """

    def __init__(self, network: FullyConnected, trainer: FeedbackTrainer, divisor: float | None) -> None:
        self._network, self._trainer, self._divisor = network, trainer, divisor

    def sums(self, weights: Mapping[str, Tensor], records: Records) -> list[Tensor]:
        """The expected sum of the records' contributions to each layer, float64, bias as a last column.

        Args:
            weights: The parameters that the step starts from.
            records: The batch.
        """
        self._load(weights)
        index = torch.zeros(len(records.x), dtype=torch.int64, device=records.x.device)
        self._trainer.step(records.x, records.y, step=0, records=index)
        divisor = self._divisor or float(max(len(records.x), 1))
        return [self._gradient(layer).double() * divisor for layer in range(self._network.depth)]

    def slopes(self, weights: Mapping[str, Tensor], x: Tensor, *, through_clip: bool) -> Tensor:
        """The slopes phi'_1 of records, float64, shape (n, n_1).

        Args:
            weights: The parameters.
            x: Features, shape (n, d).
            through_clip: See FullyConnected.derivative.
        """
        self._load(weights)
        forward = self._network.forward(x)
        slope = self._network.derivative(forward, 0, through_clip=through_clip)
        return torch.ones_like(forward.pre_activations[0]).double() if slope is None else slope.double()

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self._network.tensors.items():
                tensor.copy_(weights[name])

    def _gradient(self, layer: int) -> Tensor:
        linear = self._network.linears[layer]
        parts = [p.grad.reshape(len(linear.weight), -1) for p in linear.parameters() if p.grad is not None]
        return torch.cat(parts, dim=1)


@contextmanager
def shadowed(parts: RunParts, config: RunConfig) -> Iterator[Shadow | None]:
    """The noiseless step; None where the device is no simulation whose noise can be switched off.

    Args:
        parts: The run.
        config: Its configuration as it is played.
    """
    description = parts.description
    if description is not None:
        if description.kind not in _SIMULATED:
            yield None
            return
        if description.noise is not None:
            description = description.model_copy(update={"noise": NoiseSettings(sigma=0.0)})
    silent = without_noise(config)
    network, family = parts.network(), FeedbackFamily()
    with opened_device(silent, family.device_shape(silent, network), description) as device:
        divisor = None if config.protection.kind == "none" else divisor_of(config)
        yield Shadow(network, family.trainer(silent, network, parts.dataset, device), divisor)


def without_noise(config: RunConfig) -> RunConfig:
    """The configuration with its digital noise at 0: what a person who forgot it would run."""
    changes: dict[str, object] = {"trainer": config.trainer.model_copy(update={"sigma": 0.0})}
    if config.protection.kind != "none":
        changes["protection"] = config.protection.model_copy(
            update={"noise_multiplier": 0.0, "noise": "digital"}
        )
    return config.model_copy(update=changes)
