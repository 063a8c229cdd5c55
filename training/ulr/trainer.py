"""Train by unified likelihood ratios: forward passes only, no gradient of anything behind a module.

One step runs a forward pass without noise. Then, for every module with parameters, copies of its output with Gaussian
noise pass through the rest of the model to the loss. Noise times loss estimates the gradient at that output
(`training.ulr.estimator`), the module's Jacobian takes it to the parameters, and the optimizer updates them.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from contextlib import nullcontext

import torch
from torch import Tensor

from opusim.devices.base import NoisyDevice
from opusim.randomness.streams import NoiseStream
from training.config.run import LossName
from training.engine.algorithm import StepRecord, Trainer
from training.errors import TrainingDiverged
from training.networks.clipping import finite_rows
from training.networks.functions import LOSS_VALUES
from training.networks.memory import preserved_state
from training.protections.base import PrivateGradients
from training.ulr.estimator import Estimator, Losses
from training.ulr.network import ModuleSequence, Outputs


class Update(ABC):
    """Writes the gradients of one step."""

    @abstractmethod
    def seek(self, step: int) -> None:
        """Position every noise source at the start of a step."""

    @abstractmethod
    def set_gradients(
        self, outputs: Outputs, losses: Losses, clean: Tensor, records: Tensor | None = None
    ) -> Tensor:
        """Write the gradient of every parameter.

        Args:
            outputs: The forward pass without noise.
            losses: Maps outputs to losses of the batch's records.
            clean: Losses without noise, shape (batch,).
            records: Numbers of the batch's records in the training set, shape (batch,).

        Returns:
            The records used, bool, shape (batch,): all but those with a loss that is NaN or infinite.
        """

    @property
    def state(self) -> dict[str, Tensor]:
        """See Trainer.state."""
        return {}


class PlainUpdate(Update):
    """Writes the mean of the records' estimates, or their clipped and noised sum.

    Args:
        network: The network.
        estimator: Estimates the signals.
        sigma: Standard deviation of the noise on every output.
        noise: Source of that noise.
        protection: Clips the records' contributions and adds noise; None averages over the batch.
    """

    def __init__(
        self,
        network: ModuleSequence,
        estimator: Estimator,
        *,
        sigma: float,
        noise: NoiseStream,
        protection: PrivateGradients | None = None,
    ) -> None:
        self._network = network
        self._estimator = estimator
        self._sigmas = [sigma] * network.depth
        self._noise = noise
        self._protection = protection

    def seek(self, step: int) -> None:
        """See Update."""
        self._noise.seek(step)
        if self._protection is not None:
            self._protection.seek(step)

    @property
    def state(self) -> dict[str, Tensor]:
        """See Trainer.state: that of the protection."""
        return {} if self._protection is None else self._protection.state

    def set_gradients(
        self, outputs: Outputs, losses: Losses, clean: Tensor, records: Tensor | None = None
    ) -> Tensor:
        """See Update."""
        network, inputs = self._network, outputs.inputs
        signals = self._estimator.signals(network, outputs, losses, clean, self._noise, self._sigmas)
        used = used_records(signals, clean)
        if not bool(used.all()):  # 0 times NaN is NaN
            signals = [finite_rows(delta, used) for delta in signals]
            inputs = [finite_rows(h, used) for h in inputs]
        if self._protection is not None:
            self._protection.set_gradients([network.contributions(signals, inputs)], records=records)
            return used
        for layer, (delta, h) in enumerate(zip(signals, inputs, strict=True)):
            network.set_gradient(layer, delta, h, max(len(clean), 1))
        return used


def used_records(signals: list[Tensor], clean: Tensor) -> Tensor:
    """Return which records have only finite losses, bool, shape (batch,)."""
    used = torch.isfinite(clean)
    for delta in signals:
        used = used & torch.isfinite(delta).flatten(1).all(dim=1)
    return used


class UlrTrainer(Trainer):
    """Trains a sequence of modules.

    A step ignores records whose loss, with or without noise, is NaN or infinite.

    Args:
        network: The network; its parameters are updated in place.
        optimizer: Any torch optimizer over the network's parameters.
        update: Writes the gradients.
        loss: "cross-entropy" or "squared-error".
        device: The open device that supplies noise, or None.
        reports: Whether to warn of ignored records and to stop if a step ignores all of them. Both reveal something
            about the records.
        protected: Whether a step must leave nothing of the records in the module's buffers and Python attributes.
    """

    network: ModuleSequence

    def __init__(
        self,
        network: ModuleSequence,
        optimizer: torch.optim.Optimizer,
        update: Update,
        *,
        loss: LossName = "cross-entropy",
        device: NoisyDevice | None = None,
        reports: bool = True,
        protected: bool = False,
    ) -> None:
        self.network, self.optimizer, self.device = network, optimizer, device
        self._update = update
        self._loss = LOSS_VALUES[loss]
        self._reports, self._protected = reports, protected

    def step(
        self, x: Tensor, y: Tensor, *, step: int, observe: bool = False, records: Tensor | None = None
    ) -> StepRecord:
        """See Trainer.step; the diagnostics are estimate_norm, one number per module."""
        if self.device is not None:
            self.device.seek(step)
        self._update.seek(step)
        with preserved_state(self.model) if self._protected else nullcontext():
            return self._learn(x, y, step, observe=observe, records=records)

    def _learn(self, x: Tensor, y: Tensor, step: int, *, observe: bool, records: Tensor | None) -> StepRecord:
        """Take a step; arguments as in `step`."""
        outputs = self.network.forward(x)

        def losses(output: Tensor, rows: slice) -> Tensor:
            labels = y[rows]
            copies = len(output) // max(len(labels), 1)
            return self._loss(output, labels.repeat(copies)).view(copies, len(labels))

        clean = self._loss(outputs.output, y)
        used = self._update.set_gradients(outputs, losses, clean, records)
        if self._reports:
            self._report(used, records, step)
        self.optimizer.step()
        return StepRecord(
            loss_sum=torch.where(used, clean, 0.0).sum(dtype=torch.float64),
            n_correct=((outputs.output.argmax(dim=1) == y) & used).sum(),
            n_records=int(used.sum()),
            diagnostics=self._diagnostics() if observe else {},
        )

    @property
    def state(self) -> dict[str, Tensor]:
        """See Trainer.state."""
        return self._update.state

    def _report(self, used: Tensor, records: Tensor | None, step: int) -> None:
        """Warn of ignored records.

        Raises:
            TrainingDiverged: The step ignored all records.
        """
        if bool(used.all()):
            return
        if not bool(used.any()):
            raise TrainingDiverged(
                f"step {step}: training diverged, because no record of the batch has a finite loss; start a new run "
                "with a lower optimizer.lr or trainer.sigma, or check the inputs"
            )
        places = torch.nonzero(~used).flatten()
        numbers = (places if records is None else records.to(places.device)[places]).tolist()
        named = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
        warnings.warn(
            f"step {step}: ignored {len(numbers)} of {len(used)} records, whose loss is NaN or infinite "
            f"(training records {named})",
            stacklevel=3,
        )

    def _diagnostics(self) -> dict[str, list[float]]:
        norms = [
            float(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm())
            for parameters in map(self.network.layer_parameters, range(self.network.depth))
        ]
        return {"estimate_norm": norms}
