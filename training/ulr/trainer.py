"""Training by unified likelihood ratios: forward passes alone, no gradient of anything behind a module.

One step: a forward pass without noise; for every module with parameters, copies of its output with Gaussian noise go
on through the rest of the model to the loss; noise times loss estimates the gradient at the output, the module's own
Jacobian takes it to the parameters (`training.ulr.estimator`), and the optimizer updates.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from opusim.devices.base import NoisyDevice
from opusim.usage import Usage
from training.config.run import LossName
from training.engine.trainer import StepRecord, Trainer
from training.errors import TrainingDiverged
from training.networks.functions import LOSS_VALUES
from training.ulr.network import ModuleSequence
from training.ulr.updates import Update


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
