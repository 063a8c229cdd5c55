"""Residuals of the convex objectives: what a record's logits leave to be desired, with a bound on its norm.

A record's gradient is x~ residual^T, of norm |x~| |residual|, so a bound on the residual is one on the gradient.
accounting.convex.constants has each residual's formula, its Lipschitz constant and its bound.

Noisy gradient descent on a gated model, gradients and their norms in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from accounting.convex.constants import residual_bound
from opusim.devices.base import NoisyDevice
from opusim.randomness.streams import NoiseStream
from opusim.usage import Usage
from training.config.run import LossName
from training.convex.config import ConvexConfig
from training.convex.gated import GatedNetwork, GatedRelu, device_hyperplanes
from training.engine.trainer import StepRecord, Trainer
from training.networks.clipping import bounded_factors, finite_rows, full_precision, row_norms
from training.networks.functions import LOSSES


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One objective with its numbers.

    Attributes:
        name: squared, margin, one-against-rest or softmax.
        clip: C, or None where the residual bounds itself.
    """

    name: str
    clip: float | None

    @classmethod
    def from_config(cls, options: ConvexConfig) -> Objective:
        """The objective of a configuration."""
        return cls(name=options.objective, clip=options.residual_clip)

    def residual(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The clipped residual of each record, shape (batch, k); 0 for one whose logits are not finite.

        Args:
            logits: Shape (batch, k).
            labels: Class numbers, shape (batch,).
        """
        target = torch.zeros_like(logits).scatter_(1, labels.unsqueeze(1), 1.0)
        residual = _RESIDUALS[self.name](logits, target)
        if self.clip is not None and self.name == "one-against-rest":  # scalar by scalar, which stays convex
            bound = self.clip / math.sqrt(logits.shape[1])
            residual = residual.clamp(-bound, bound)
        norms = row_norms(residual)
        residual = finite_rows(residual, torch.isfinite(norms))
        if self.clip is None or self.name == "one-against-rest":
            return residual
        return (residual * bounded_factors(norms, self.clip).unsqueeze(1)).to(residual.dtype)

    def bound(self, n_classes: int) -> float:
        """C: the largest norm of a residual, and so of a record's gradient."""
        return residual_bound(self.name, self.clip, n_classes)


def _squared(logits: Tensor, target: Tensor) -> Tensor:
    return logits - target


def _margin(logits: Tensor, target: Tensor) -> Tensor:
    """From the nearest point of the box z_y >= 1, z_c <= 0."""
    return torch.where(target > 0, (logits - 1.0).clamp_max(0.0), logits.clamp_min(0.0))


def _one_against_rest(logits: Tensor, target: Tensor) -> Tensor:
    return torch.sigmoid(logits) - target


def _softmax(logits: Tensor, target: Tensor) -> Tensor:
    return torch.softmax(logits, dim=1) - target


_RESIDUALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared": _squared,
    "margin": _margin,
    "one-against-rest": _one_against_rest,
    "softmax": _softmax,
}


@dataclass(frozen=True, kw_only=True)
class Descent:
    """The numbers of a descent.

    Attributes:
        regularisation: lambda.
        divisor: b, the constant that a batch's sum is divided by.
        noise_std: Standard deviation of the noise on a batch's sum, z C; 0 for none.
        final_std: That of the noise which the last step adds to the weights beside its own.
        total_steps: Steps of the run.
    """

    regularisation: float
    divisor: float
    noise_std: float
    final_std: float
    total_steps: int


class ConvexTrainer(Trainer):
    """v <- (1 - eta lambda) v - (eta / b) [sum over the batch of x~ residual^T + N(0, (z C)^2 I)].

    Guarantees, for every batch whatever it holds: x~ of every finite record has norm at most 1, and a record's share of
    the sum norm at most C, both up to float32 rounding (relative 1e-6); a record whose features or logits are not
    finite counts as 0; an empty batch takes the same noisy step.

    Args:
        network: The model; its weights are updated in place.
        optimizer: Holds the learning rate that the engine sets; it does no step of its own.
        objective: Whose residual is followed.
        descent: Constants of the run.
        loss: Loss that the metrics report.
        noise: Source of independent N(0, 1); required where there is noise.
        device: The open device of gates or noise, None for a run without one.
    """

    kind = "convex"
    model: GatedRelu

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
        self.model = network.model
        self.optimizer = optimizer
        self._network, self._objective, self._descent = network, objective, descent
        self._loss = LOSSES[loss]
        self._noise, self._device = noise, device

    def step(
        self, x: Tensor, y: Tensor, *, step: int, observe: bool = False, records: Tensor | None = None
    ) -> StepRecord:
        """See Trainer.step; there are no diagnostics."""
        for source in (self._device, self._noise):
            if source is not None:
                source.seek(step)
        with torch.no_grad(), full_precision():
            batch = self.model.gated(x)
            logits = self.model.logits(batch)
            residual = self._objective.residual(logits, y)
            residual = self.model.clipped(batch, residual, self._objective.bound(self.model.n_classes))
            self._descend(batch.x, self.model.spread(batch, residual), step)
        return StepRecord(
            loss_sum=self._loss(logits, y).per_record.sum(dtype=torch.float64),
            n_correct=(logits.argmax(dim=1) == y).sum(),
            n_records=len(x),
        )

    def recover_hyperplanes(self, readings: int) -> None:
        """Take the device's own matrix for the hyperplanes, once, before the first step."""
        if self._device is None:
            raise ValueError("device is missing; gates from a device are read from an open one")
        self._device.seek(self._descent.total_steps)  # no step's own noise
        self.model.hyperplanes.copy_(device_hyperplanes(self._device, readings=readings))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Weights and hyperplanes."""
        return self._network.tensors

    @property
    def usage(self) -> Usage:
        """Usage of the device."""
        return Usage() if self._device is None else self._device.usage

    def _descend(self, x: Tensor, spread: Tensor, step: int) -> None:
        """Move the weights, in place and at once: a device that fails while it gives noise has moved nothing."""
        numbers = self._descent
        rate = self.optimizer.param_groups[0]["lr"]
        weight = self.model.weight.data.flatten(1)  # (d, P k), a view
        move = self._scaled_noise(weight, rate, step).addmm_(x.t(), spread, alpha=-rate / numbers.divisor)
        torch.add(move, weight, alpha=1 - rate * numbers.regularisation, out=weight)

    def _scaled_noise(self, weight: Tensor, rate: float, step: int) -> Tensor:
        """Noise of one step on the weights; the last step's holds what is added at the end."""
        numbers = self._descent
        std = rate * numbers.noise_std / numbers.divisor
        if step == numbers.total_steps - 1:
            std = math.hypot(std, numbers.final_std)
        noise = torch.zeros_like(weight)
        return self._noise.add_to(noise, std) if self._noise is not None and std else noise
