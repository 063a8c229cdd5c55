"""The likelihood ratio estimate of a gradient at a module's output, from losses of noisy forward passes.

With z_k ~ N(0, sigma^2 I) on the output v of one module and L_k the loss of the record with it,

    delta = (1 / (K sigma^2)) sum_k z_k L_k,   E delta = grad_v E L(v + z),

the gradient of the smoothed loss (Stein's identity), and J^T delta estimates the gradient of the module's parameters
(eq. 4 of the DP-ULR paper; Jiang et al. 2023). Three reductions of variance leave the mean as it is, because E z = 0
and z and -z have one law: antithetic pairs, z_k (L(z_k) - L(-z_k)) / 2; the loss without noise as a baseline,
z_k (L_k - L_0); the mean of the record's other copies as a baseline, z_k (L_k - mean of L_j over j != k).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opusim.randomness import NoiseStream
from training.config.ulr import Reduction
from training.protections.base import by_record
from training.ulr.network import ModuleSequence, Outputs

Losses = Callable[[Tensor, slice], Tensor]
"""Outputs of the model for copies of some of the batch's records, shape (copies x records, n_classes), to losses
(copies, records)."""


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """How a gradient is estimated.

    Attributes:
        copies: K >= 1, noises a record and module; an antithetic pair is one.
        reduction: How the variance is lowered.
        rows_per_pass: Noisy rows that go through the model together at most; None for one copy of every module at
            all records. Changes memory and rounding, nothing else.
    """

    copies: int
    reduction: Reduction
    rows_per_pass: int | None = None

    def signals(
        self,
        network: ModuleSequence,
        outputs: Outputs,
        losses: Losses,
        clean: Tensor,
        noise: NoiseStream,
        sigmas: Sequence[float],
    ) -> list[Tensor]:
        """The signal delta at each layer, shapes (batch, ...).

        Args:
            network: The modules.
            outputs: The forward pass without noise.
            losses: The loss of the batch's records.
            clean: L_0, shape (batch,).
            noise: Where z comes from; copies are drawn one after the other, modules in order.
            sigmas: Standard deviation of the noise of each layer.
        """
        sums = [_Sum(value, self.reduction, clean) for value in outputs.values]
        for probes in self._passes(network.depth, len(clean)):
            drawn = [
                noise.normal(outputs.values[layer].shape).to(clean.device).mul_(sigmas[layer])
                for layer in probes
            ]
            found = self._losses(network, outputs.values, probes, drawn, losses)
            for layer, z, loss in zip(probes, drawn, found, strict=True):
                sums[layer].add(z, loss)
        return [total.estimate(self.copies, sigma) for total, sigma in zip(sums, sigmas, strict=True)]

    @property
    def _signs(self) -> int:
        return 2 if self.reduction == "antithetic" else 1

    def _passes(self, depth: int, batch: int) -> Iterator[list[int]]:
        """The layers whose noises are drawn and go through the model together, in the order in which they are drawn."""
        probes = [layer for _ in range(self.copies) for layer in range(depth)]
        size = depth
        if self.rows_per_pass is not None:
            size = max(1, self.rows_per_pass // max(self._signs * batch, 1))
        for start in range(0, len(probes), size):
            yield probes[start : start + size]

    def _losses(
        self,
        network: ModuleSequence,
        values: Sequence[Tensor],
        probes: Sequence[int],
        noises: Sequence[Tensor],
        losses: Losses,
    ) -> list[Tensor]:
        """Losses of each probe, shapes (signs, batch); some records at a time where one probe has too many rows."""
        batch, size = len(values[0]), len(values[0])
        if self.rows_per_pass is not None:
            size = min(batch, max(1, self.rows_per_pass // (self._signs * len(probes))))
        if size == batch:
            return noisy_losses(network, values, probes, noises, losses, slice(0, batch), signs=self._signs)
        parts = [
            noisy_losses(network, values, probes, noises, losses, slice(i, i + size), signs=self._signs)
            for i in range(0, batch, size)
        ]
        return [torch.cat(of_probe, dim=1) for of_probe in zip(*parts, strict=True)]


def noisy_losses(
    network: ModuleSequence,
    values: Sequence[Tensor],
    probes: Sequence[int],
    noises: Sequence[Tensor],
    losses: Losses,
    records: slice,
    *,
    signs: int,
) -> list[Tensor]:
    """Losses with noise on one module's output at a time, shapes (signs, records).

    One sweep over the layers: a probe joins it behind its own layer, so nothing before that is computed again.

    Args:
        network: The modules.
        values: v_l without noise, shapes (batch, ...).
        probes: The layer of each probe.
        noises: z of each probe, of the shape of its layer's value.
        losses: The loss of the batch's records.
        records: Which of the batch's records.
        signs: 1 for z alone, 2 for z and -z.
    """
    order = sorted(range(len(probes)), key=lambda number: probes[number])
    n = len(values[0][records])
    with torch.no_grad():
        rows: Tensor | None = None
        for layer in range(probes[order[0]], network.depth):
            joining = [noises[number][records] for number in order if probes[number] == layer]
            old = None if rows is None else network.layer(layer, rows)
            rows = network.after(layer, _joined(old, values[layer][records], joining, signs))
        output = values[-1][records] if rows is None else rows
        found = losses(output, records).view(len(probes), signs, n)
    by_probe = dict(zip(order, found, strict=True))
    return [by_probe[number] for number in range(len(probes))]


def _joined(old: Tensor | None, value: Tensor, noises: Sequence[Tensor], signs: int) -> Tensor:
    """The rows on their way, then v + z and v - z of each noise that joins them."""
    if old is not None and not noises:
        return old
    before, n = 0 if old is None else len(old), len(value)
    rows = value.new_empty(before + len(noises) * signs * n, *value.shape[1:])
    if old is not None:
        rows[:before] = old
    for number, z in enumerate(noises):
        start = before + number * signs * n
        torch.add(value, z, out=rows[start : start + n])
        if signs == 2:
            torch.sub(value, z, out=rows[start + n : start + 2 * n])
    return rows


class _Sum:
    """Running sum of one layer's copies, all that its estimate needs."""

    def __init__(self, value: Tensor, reduction: Reduction, clean: Tensor) -> None:
        self._reduction = reduction
        self._clean = clean
        self._signal: Tensor | None = None
        self._noise: Tensor | None = None
        self._loss: Tensor | float = 0.0

    def add(self, z: Tensor, loss: Tensor) -> None:
        """Take in a copy: z (batch, ...), which is overwritten, and its losses (signs, batch)."""
        weight = (loss[0] - loss[1]) / 2 if self._reduction == "antithetic" else loss[0]
        if self._reduction == "clean-loss":
            weight = weight - self._clean
        if self._reduction == "leave-one-out":
            self._noise = z.clone() if self._noise is None else self._noise.add_(z)
            self._loss = self._loss + weight
        signal = z.mul_(by_record(weight, z))
        self._signal = signal if self._signal is None else self._signal.add_(signal)

    def estimate(self, copies: int, sigma: float) -> Tensor:
        """delta, shape (batch, ...)."""
        signal = self._signal
        if signal is None:
            raise ValueError(f"copies = {copies}: no noise was drawn; at least one copy is needed")
        if self._noise is not None:
            # sum_k z_k (L_k - (S - L_k) / (K - 1)) = [K sum_k z_k L_k - S sum_k z_k] / (K - 1)
            mean = torch.as_tensor(self._loss) / (copies - 1)
            signal = signal.mul_(copies / (copies - 1)).sub_(self._noise * by_record(mean, signal))
        return signal.mul_(1 / (copies * sigma**2))
