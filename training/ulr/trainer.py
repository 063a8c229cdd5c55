"""Training by unified likelihood ratios: forward passes alone, no gradient of anything behind a module.

One step: a forward pass without noise; for every module with parameters, copies of its output with Gaussian noise go
on through the rest of the model to the loss; noise times loss estimates the gradient at the output, the module's own
Jacobian takes it to the parameters (`training.ulr.estimator`), and the optimizer updates.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from opusim.devices.base import NoisyDevice
from opusim.randomness.streams import NoiseStream
from opusim.usage import Usage
from training.config.run import LossName
from training.engine.trainer import StepRecord, Trainer
from training.errors import TrainingDiverged
from training.networks.clipping import finite_rows
from training.networks.functions import LOSS_VALUES
from training.protections.record import RecordProtection
from training.ulr.estimator import Estimator, Losses
from training.ulr.network import ModuleSequence, Outputs


class Update(ABC):
    """Writes the gradients of one step."""

    @abstractmethod
    def seek(self, step: int) -> None:
        """Position every noise at the start of a step."""

    @abstractmethod
    def set_gradients(self, outputs: Outputs, losses: Losses, clean: Tensor) -> Tensor:
        """Write the gradient of every parameter.

        Args:
            outputs: The forward pass without noise.
            losses: The losses of the batch's records.
            clean: Losses without noise, shape (batch,).

        Returns:
            Which records were used, bool, shape (batch,): not those with a loss that is NaN or infinite.
        """


class PlainUpdate(Update):
    """The mean of the records' estimates; or their clipped and noised sum.

    Args:
        network: The modules.
        estimator: How the signals are estimated.
        sigma: Standard deviation of the noise on every output.
        noise: Where that noise comes from.
        protection: Clips and noises the records' contributions; None averages over the batch.
    """

    def __init__(
        self,
        network: ModuleSequence,
        estimator: Estimator,
        *,
        sigma: float,
        noise: NoiseStream,
        protection: RecordProtection | None = None,
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

    def set_gradients(self, outputs: Outputs, losses: Losses, clean: Tensor) -> Tensor:
        """See Update."""
        network, inputs = self._network, outputs.inputs
        signals = self._estimator.signals(network, outputs, losses, clean, self._noise, self._sigmas)
        used = used_records(signals, clean)
        if not bool(used.all()):  # a factor of 0 would meet the NaN
            signals = [finite_rows(delta, used) for delta in signals]
            inputs = [finite_rows(h, used) for h in inputs]
        if self._protection is not None:
            self._protection.set_gradients(network, signals, inputs)
            return used
        for layer, (delta, h) in enumerate(zip(signals, inputs, strict=True)):
            network.set_gradient(layer, delta, h, max(len(clean), 1))
        return used


def used_records(signals: list[Tensor], clean: Tensor) -> Tensor:
    """Records all of whose losses are finite, bool, shape (batch,)."""
    used = torch.isfinite(clean)
    for delta in signals:
        used = used & torch.isfinite(delta).flatten(1).all(dim=1)
    return used


class UlrTrainer(Trainer):
    """Trains a sequence of modules.

    A record with a loss that is NaN or infinite, with or without noise, takes no part in its step.

    Args:
        network: The modules; their parameters are updated in place.
        optimizer: Any torch optimizer over the network's parameters.
        update: What writes the gradients.
        loss: "cross-entropy" or "squared-error".
        device: The open device that noise comes from, if any does.
        reports: Whether to warn of records that were left out, and to stop where all were; both tell of records.
    """

    kind = "ulr"

    def __init__(
        self,
        network: ModuleSequence,
        optimizer: torch.optim.Optimizer,
        update: Update,
        *,
        loss: LossName = "cross-entropy",
        device: NoisyDevice | None = None,
        reports: bool = True,
    ) -> None:
        self.model = network.model
        self.optimizer = optimizer
        self._network = network
        self._update = update
        self._loss = LOSS_VALUES[loss]
        self._device = device
        self._reports = reports

    def step(
        self, x: Tensor, y: Tensor, *, step: int, observe: bool = False, records: Tensor | None = None
    ) -> StepRecord:
        """See Trainer.step; the diagnostics are estimate_norm, one figure a module."""
        if self._device is not None:
            self._device.seek(step)
        self._update.seek(step)
        outputs = self._network.forward(x)

        def losses(output: Tensor, rows: slice) -> Tensor:
            labels = y[rows]
            copies = len(output) // max(len(labels), 1)
            return self._loss(output, labels.repeat(copies)).view(copies, len(labels))

        clean = self._loss(outputs.output, y)
        used = self._update.set_gradients(outputs, losses, clean)
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
    def tensors(self) -> dict[str, Tensor]:
        """The parameters by layer."""
        return self._network.tensors

    @property
    def usage(self) -> Usage:
        """Usage of the device."""
        return self._device.usage if self._device is not None else Usage()

    def _report(self, used: Tensor, records: Tensor | None, step: int) -> None:
        """Warn of the records that were left out.

        Raises:
            TrainingDiverged: All were.
        """
        if bool(used.all()):
            return
        if not bool(used.any()):
            raise TrainingDiverged(
                f"step {step}: no record of the batch has a finite loss, so the training diverged; start a new run "
                "with a lower optimizer.lr or trainer.sigma, or check the inputs"
            )
        places = torch.nonzero(~used).flatten()
        numbers = (places if records is None else records.to(places.device)[places]).tolist()
        named = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
        warnings.warn(
            f"step {step}: {len(numbers)} of {len(used)} records have a loss that is NaN or infinite and were left out "
            f"(training records {named})",
            stacklevel=3,
        )

    def _diagnostics(self) -> dict[str, list[float]]:
        norms = [
            float(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm())
            for parameters in map(self._network.layer_parameters, range(self._network.depth))
        ]
        return {"estimate_norm": norms}
