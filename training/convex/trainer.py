"""Train a gated model by noisy gradient descent, with gradients and their norms in closed form.

A record's gradient is x~ residual^T, of norm |x~| |residual|, so a bound on the residual bounds the gradient.
`accounting.mechanisms.convex` states each residual's formula, Lipschitz constant and bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from accounting.mechanisms.convex import residual_bound
from opusim.devices.base import NoisyDevice
from opusim.randomness.streams import NoiseStream
from training.config.run import LossName
from training.convex.config import ConvexConfig
from training.convex.gated import GatedNetwork, device_hyperplanes
from training.engine.algorithm import StepRecord, Trainer
from training.networks.clipping import bounded_factors, finite_rows, full_precision, row_norms
from training.networks.functions import LOSSES


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A convex objective, given by the residual of a record's logits.

    Attributes:
        name: squared, margin, one-against-rest or softmax.
        clip: Largest norm C of a residual, or None if the residual is bounded without a clip.
    """

    name: str
    clip: float | None

    @classmethod
    def from_config(cls, options: ConvexConfig) -> Objective:
        """Return the objective of a configuration."""
        return cls(name=options.objective, clip=options.residual_clip)

    def residual(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the clipped residual of each record, shape (batch, k); 0 for a record whose logits are not finite.

        Args:
            logits: Shape (batch, k).
            labels: Class numbers, shape (batch,).
        """
        target = torch.zeros_like(logits).scatter_(1, labels.unsqueeze(1), 1.0)
        residual = _RESIDUALS[self.name](logits, target)
        if self.clip is not None and self.name == "one-against-rest":  # entry by entry, which keeps it convex
            bound = self.clip / math.sqrt(logits.shape[1])
            residual = residual.clamp(-bound, bound)
        norms = row_norms(residual)
        residual = finite_rows(residual, torch.isfinite(norms))
        if self.clip is None or self.name == "one-against-rest":
            return residual
        return (residual * bounded_factors(norms, self.clip).unsqueeze(1)).to(residual.dtype)

    def bound(self, n_classes: int) -> float:
        """Return the largest norm of a residual, which bounds the norm of a record's gradient."""
        return residual_bound(self.name, self.clip, n_classes)


_RESIDUALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared": lambda logits, target: logits - target,
    # distance to the box z_y >= 1, z_c <= 0
    "margin": lambda logits, target: torch.where(
        target > 0, (logits - 1.0).clamp_max(0.0), logits.clamp_min(0.0)
    ),
    "one-against-rest": lambda logits, target: torch.sigmoid(logits) - target,
    "softmax": lambda logits, target: torch.softmax(logits, dim=1) - target,
}
"""Residual of each objective from logits and one-hot targets, both of shape (batch, k)."""


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Constants of a descent.

    Attributes:
        regularisation: lambda.
        divisor: b, the constant that divides a batch's sum.
        noise_std: Standard deviation of the noise on a batch's sum, z C; 0 for none.
        final_std: Standard deviation of the extra noise that the last step adds to the weights.
        total_steps: Number of steps of the run.
    """

    regularisation: float
    divisor: float
    noise_std: float
    final_std: float
    total_steps: int


class ConvexTrainer(Trainer):
    """v <- (1 - eta lambda) v - (eta / b) [sum over the batch of x~ residual^T + N(0, (z C)^2 I)].

    Guarantees for every batch, whatever it holds:
        - x~ of every finite record has norm at most 1 and its term of the sum norm at most C, both up to float32
          rounding (relative 1e-6);
        - a record whose features or logits are not finite counts as 0;
        - an empty batch takes the same noisy step.

    Args:
        network: The network; its weights are updated in place.
        optimizer: Holds the learning rate that the engine sets; it takes no step.
        objective: Supplies the residuals.
        descent: Constants of the run.
        loss: Loss that the metrics report.
        noise: Source of independent N(0, 1); required if the descent has noise.
        device: The open device that supplies gates or noise, or None.
    """

    network: GatedNetwork

    def __init__(
        self,
        network: GatedNetwork,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        descent: Descent,
        *,
        loss: LossName = "cross-entropy",
        noise: NoiseStream | None = None,
        device: NoisyDevice | None = None,
    ) -> None:
        if noise is None and descent.noise_std:
            raise ValueError(f"noise is missing; noise_std = {descent.noise_std} draws from a NoiseStream")
        self.network, self.optimizer, self.device = network, optimizer, device
        self._objective, self._descent, self._noise = objective, descent, noise
        self._loss = LOSSES[loss]

    def step(
        self, x: Tensor, y: Tensor, *, step: int, observe: bool = False, records: Tensor | None = None
    ) -> StepRecord:
        """See Trainer.step; there are no diagnostics."""
        for source in (self.device, self._noise):
            if source is not None:
                source.seek(step)
        with torch.no_grad(), full_precision():
            batch = self.network.model.gated(x)
            logits = self.network.model.logits(batch)
            residual = self._objective.residual(logits, y)
            residual = self.network.model.clipped(
                batch, residual, self._objective.bound(self.network.model.n_classes)
            )
            self._descend(batch.x, self.network.model.spread(batch, residual), step)
        return StepRecord(
            loss_sum=self._loss(logits, y).per_record.sum(dtype=torch.float64),
            n_correct=(logits.argmax(dim=1) == y).sum(),
            n_records=len(x),
        )

    def recover_hyperplanes(self, readings: int) -> None:
        """Read the hyperplanes from the device, once, before the first step."""
        if self.device is None:
            raise ValueError("device is missing; trainer.gates = 'device' reads them from an open device")
        self.device.seek(self._descent.total_steps)  # repeats no step's noise
        self.network.model.hyperplanes.copy_(device_hyperplanes(self.device, readings=readings))

    def _descend(self, x: Tensor, spread: Tensor, step: int) -> None:
        """Update the weights in place, after all noise is drawn: a device that fails leaves them unchanged."""
        numbers = self._descent
        rate = self.optimizer.param_groups[0]["lr"]
        weight = self.network.model.weight.data.flatten(1)  # (d, P k), a view
        move = torch.mm(x.t(), spread).neg_()
        std = numbers.noise_std
        if step == numbers.total_steps - 1 and numbers.final_std:
            std = math.hypot(
                std, numbers.final_std * numbers.divisor / rate
            )  # on the weights it is final_std
        if self._noise is not None and std:
            self._noise.add_rounded(move, std)
        torch.add(
            move.mul_(rate / numbers.divisor), weight, alpha=1 - rate * numbers.regularisation, out=weight
        )
