"""What the engine asks of a trainer: its parameters, one step, and its usage; and the sums of its steps."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from opusim.devices.base import NoisyDevice
from opusim.devices.usage import Usage
from opusim.training.networks.base import Network


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step measured before its update.

    Attributes:
        loss_sum: Sum of the records' losses, float64 scalar tensor.
        n_correct: Correct decisions, such as correctly classified records, int64 scalar tensor.
        n_records: Records in the batch.
        n_judged: Decisions that `n_correct` counts, if a record is not one decision: tokens, labels, or 0 for real
            numbers; None for one each record.
        diagnostics: Named figures, one value per layer; empty unless the step was observed.
    """

    loss_sum: Tensor
    n_correct: Tensor
    n_records: int
    n_judged: int | None = None
    diagnostics: dict[str, list[float]] = field(default_factory=dict)


class Trainer(ABC):
    """Parameters, what one step releases, and the step.

    Attributes:
        network: What is trained.
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

        Args:
            x: Inputs, shape (batch, n_inputs); the batch may be empty.
            y: Class numbers, shape (batch,), or what else the data set's target is.
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
        """Take off the model what training put on it; called after the last step, or after an error."""

    def before_checkpoint(self) -> None:  # noqa: B027  # optional hook
        """Bring parameters and files to a point from which a run can resume; called before each checkpoint."""

    @property
    def state(self) -> dict[str, Tensor]:
        """Everything else that a resumed run needs, by name; a checkpoint is restored by copying into these tensors."""
        return {}


class EpochSums:
    """Running sums of step records over an epoch, on the torch device that computes them.

    Args:
        place: The torch device.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self.clear()

    def clear(self) -> None:
        """Start a new epoch."""
        self._loss: Tensor = torch.zeros((), dtype=torch.float64, device=self._place)
        self._correct: Tensor = torch.zeros((), dtype=torch.int64, device=self._place)
        self._records = self._judged = 0
        self._observed: list[dict[str, list[float]]] = []

    def add(self, record: StepRecord) -> None:
        """Add a step, without waiting for the torch device."""
        self._loss = self._loss + record.loss_sum
        self._correct = self._correct + record.n_correct
        self._records += record.n_records
        self._judged += record.n_records if record.n_judged is None else record.n_judged
        if record.diagnostics:
            self._observed.append(record.diagnostics)

    def means(self) -> dict[str, float]:
        """Return mean loss and accuracy; each record is measured just before its batch's update."""
        means = {"loss": float(self._loss) / self._records} if self._records else {}
        return means | ({"accuracy": int(self._correct) / self._judged} if self._judged else {})

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
            "loss": float(self._loss),
            "correct": int(self._correct),
            "records": self._records,
            "judged": self._judged,
            "observed": self._observed,
        }

    def load(self, sums: dict[str, Any]) -> None:
        """Take over the sums that `dump` returned."""
        self._loss = torch.tensor(sums["loss"], dtype=torch.float64, device=self._place)
        self._correct = torch.tensor(sums["correct"], dtype=torch.int64, device=self._place)
        self._records = sums["records"]
        self._judged = sums.get("judged", self._records)  # an older checkpoint counts records
        self._observed = list(sums["observed"])
