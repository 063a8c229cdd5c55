"""Compute the gated ReLU model: linear in its weights, nonlinear in a record through fixed gates.

f_c(x) = sum_p 1[u_p . x >= 0] x . v_pc / R(x),   R(x) = |x| sqrt(number of open gates)

with fixed hyperplanes u_p ~ N(0, I), from a generator or a device's scattering medium, and trained v_pc (eq. 3.8 of the
paper, one linear model per class). R depends on the record only, and makes the features
x~ = (1[u_p . x >= 0] x)_p / R of every record a vector of norm 1. x~ has P d entries and is never formed: the forward
pass is one product x V followed by a masked sum, the gradient one product x^T (gates * residual).

The theorems need |x~| <= 1 for every record, so x is centred and divided by |x| in float64, which holds the squares of
all float32 numbers; in float32, squares below 7e-46 vanish and sums above 3e38 overflow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.training.networks.base import Network
from opusim.training.networks.clipping import (
    bounded_factors,
    finite_rows,
    full_precision,
    norm_bounds,
    row_norms,
)

_FLOAT64_CHUNK = 2**20
"""Numbers converted to float64 at once, 8 MiB."""
_VECTORS_PER_CALL = 256
"""Unit vectors that a device projects in one call."""


@dataclass(frozen=True, kw_only=True)
class GatedRecords:
    """A batch as the model uses it.

    Attributes:
        x: Features, centred if the model centres them, then scaled to norm 1, shape (batch, d); 0 for a record that is
            not finite, or constant and centred.
        gates: 1 for an open gate, 0 for a closed one, shape (batch, P), float32.
        scale: 1 / sqrt(open gates) of each record, 0 for one without open gates or without features, shape (batch,).
    """

    x: Tensor
    gates: Tensor
    scale: Tensor


class GatedRelu(nn.Module):
    """The model as a torch module; its logits carry gradients for any optimizer.

    Args:
        n_inputs: d.
        n_classes: k.
        hyperplanes: u_p as rows, shape (P, d); stored as a buffer.
        centre: Whether to subtract each record's mean feature from it first.
    """

    hyperplanes: Tensor

    def __init__(self, n_inputs: int, n_classes: int, hyperplanes: Tensor, *, centre: bool = True) -> None:
        super().__init__()
        if hyperplanes.ndim != 2 or hyperplanes.shape[1] != n_inputs:
            raise ValueError(
                f"hyperplanes has shape {tuple(hyperplanes.shape)}: must be (P, n_inputs = {n_inputs})"
            )
        self.n_inputs, self.n_classes, self.centre = n_inputs, n_classes, centre
        self.register_buffer("hyperplanes", hyperplanes.clone().to(torch.float32))
        self.weight = nn.Parameter(torch.zeros(n_inputs, len(hyperplanes), n_classes))  # (d, P, k)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape (batch, k), of records of shape (batch, d)."""
        return self.logits(self.gated(x))

    def gated(self, x: Tensor) -> GatedRecords:
        """Return the features, gates and scales of records of shape (batch, d)."""
        x, kept = unit_rows(x, centre=self.centre)
        gates = open_gates(x, self.hyperplanes).to(x.dtype)
        count = gates.sum(dim=1)
        return GatedRecords(x=x, gates=gates, scale=torch.where(kept & (count > 0), count.rsqrt(), 0.0))

    def logits(self, records: GatedRecords) -> Tensor:
        """Return f(x), shape (batch, k)."""
        products = (records.x @ self.weight.flatten(1)).unflatten(1, self.weight.shape[1:])  # (batch, P, k)
        summed = torch.bmm(records.gates.unsqueeze(1), products).squeeze(1)
        return summed * records.scale.unsqueeze(1)

    def clipped(self, records: GatedRecords, residual: Tensor, bound: float) -> Tensor:
        """Scale the residual down if the gradient that `spread` makes of it exceeds the bound.

        The norm of that gradient is |x| sqrt(open gates) |residual scale|, computed from the numbers that are
        multiplied, so the bound does not rely on the normalisation.

        Args:
            records: The batch.
            residual: Shape (batch, k).
            bound: C > 0.
        """
        spread = norm_bounds(residual * records.scale.unsqueeze(1)) * records.gates.sum(dim=1).double().sqrt()
        factors = bounded_factors(norm_bounds(records.x) * spread, bound)
        return (residual * factors.unsqueeze(1)).to(residual.dtype)

    def spread(self, records: GatedRecords, residual: Tensor) -> Tensor:
        """Copy the scaled residual to every open gate, shape (batch, P k).

        x^T times the result is the sum over the batch of x~ residual^T, the gradient of all weights.
        """
        scaled = residual * records.scale.unsqueeze(1)
        return (records.gates.unsqueeze(2) * scaled.unsqueeze(1)).flatten(1)


def unit_rows(x: Tensor, *, centre: bool) -> tuple[Tensor, Tensor]:
    """Divide rows by their norms; return them and which rows have a norm, shapes (batch, d) and (batch,).

    Guarantees for every float32 row: the norm is 1 up to 2^-23, or the row is 0 because it was 0, not finite, or, if
    centred, constant up to 2^-24 of its largest entry, the resolution of float32 features.

    Args:
        x: Shape (batch, d).
        centre: Whether to subtract each row's mean first.
    """
    exact = x.to(torch.float64, copy=True)
    least = exact.new_zeros(())
    if centre:
        mean = exact.mean(dim=1, keepdim=True)
        exact -= mean
        least = mean[:, 0].abs() * (2.0**-24 * x.shape[1] ** 0.5)
    norms = torch.linalg.vector_norm(exact, dim=1)
    kept = (norms > least) & torch.isfinite(norms)
    exact.mul_(norms.reciprocal()[:, None])
    return (exact if bool(kept.all()) else finite_rows(exact, kept)).to(x.dtype), kept


def open_gates(x: Tensor, hyperplanes: Tensor) -> Tensor:
    """Return 1[u_p . x >= 0], bool, shape (batch, P), for each record independently of the others.

    A float32 product rounds differently in a batch of another size, so adding a record could switch gates of records
    near a hyperplane. If |u_p . x| is within the rounding of any order of summation, (d + 4) 2^-24 |u_p| |x|, that
    record's product in float64 decides.

    Args:
        x: Records of norm 0 or 1, float32, shape (batch, d).
        hyperplanes: u_p as rows, float32, shape (P, d).
    """
    with full_precision():
        values = x @ hyperplanes.t()
    rounding = ((x.shape[1] + 4) * 2.0**-23 * row_norms(hyperplanes)).to(
        values.dtype
    )  # twice, for |x| = 1 + 2^-23
    gates = values >= 0
    for entries in (values.abs() <= rounding).nonzero().split(max(1, _FLOAT64_CHUNK // x.shape[1])):
        record, plane = entries.unbind(1)
        gates[record, plane] = (x[record].double() * hyperplanes[plane].double()).sum(dim=1) >= 0
    return gates


class GatedNetwork(Network):
    """A view of a gated model as a network."""

    model: GatedRelu

    def __init__(self, model: GatedRelu) -> None:
        self.model = model

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Self:
        """Build the network that `facts` describes, with hyperplanes and weights to be filled in."""
        hyperplanes = torch.zeros(facts["hyperplanes"], facts["n_inputs"])
        return cls(GatedRelu(facts["n_inputs"], facts["n_classes"], hyperplanes, centre=facts["centre"]))

    @property
    def n_inputs(self) -> int:
        """Number of features of a record."""
        return self.model.n_inputs

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights, and the hyperplanes, which never change but belong to the model."""
        return {"weight": self.model.weight, "hyperplanes": self.model.hyperplanes}

    @property
    def facts(self) -> dict[str, Any]:
        """See Network.facts."""
        return {
            "n_inputs": self.model.n_inputs,
            "n_classes": self.model.n_classes,
            "hyperplanes": len(self.model.hyperplanes),
            "centre": self.model.centre,
        }


def seeded_hyperplanes(count: int, n_inputs: int, generator: torch.Generator) -> Tensor:
    """Draw rows u_p ~ N(0, I), shape (count, n_inputs)."""
    return torch.randn(count, n_inputs, generator=generator)


def hyperplanes_work(n_inputs: int, *, readings: int) -> DeviceWork:
    """Return what `device_hyperplanes` takes of a device of so many inputs."""
    calls = math.ceil(n_inputs / _VECTORS_PER_CALL)
    return DeviceWork(projections=n_inputs, calls=calls).times(readings)


def device_hyperplanes(device: NoisyDevice, *, readings: int) -> Tensor:
    """Read the device's matrix: column i of B is the mean of `readings` projections of the unit vector e_i.

    The noise is that of a reading divided by sqrt(readings). The gates use the result from then on, in training and at
    inference, so noise only makes it a slightly different random matrix.

    Args:
        device: An open device; its inputs are the features, its outputs the hyperplanes.
        readings: Readings of each unit vector, at least 1.

    Returns:
        B, shape (device.n_outputs, device.n_inputs), on the CPU.
    """
    units = torch.eye(device.n_inputs)
    columns = []
    for block in units.split(_VECTORS_PER_CALL):
        total = torch.zeros(len(block), device.n_outputs)
        for _ in range(readings):
            total += device.project(block).cpu()
        columns.append(total / readings)
    return torch.cat(columns).t().contiguous()
