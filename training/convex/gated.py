"""Where the hyperplanes of the gates come from: a generator, or a device's own scattering medium.

The gated ReLU model: linear in its weights, nonlinear in a record through fixed gates.

f_c(x) = sum_p 1[u_p . x >= 0] x . v_pc / R(x),   R(x) = |x| sqrt(number of open gates)

with fixed hyperplanes u_p ~ N(0, I) and trained v_pc (eq. 3.8 of the paper, one linear model for each class). Dividing
by R makes the features x~ = (1[u_p . x >= 0] x)_p / R of every record a vector of norm 1, whatever the record; R
depends on that record only. x~ has P d entries and is never formed: the forward pass is one product x V followed by
a masked sum, the gradient one product x^T (gates * residual).

The theorems about these models need |x~| <= 1 of every record, so x is centred and divided by |x| in float64, which
holds the squares of all float32 numbers; in float32 squares below 7e-46 vanish and sums above 3e38 overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from opusim.devices.base import NoisyDevice
from training.networks.base import Network
from training.networks.clipping import bounded_factors, finite_rows, full_precision, norm_bounds, row_norms

_FLOAT64_CHUNK = 2**20
"""Numbers that are held in float64 at once, 8 MiB."""


@dataclass(frozen=True, kw_only=True)
class GatedRecords:
    """What the model needs to know of a batch.

    Attributes:
        x: Features of norm 1, centred before if the model centres them, shape (batch, d); 0 for a record that is
            constant or not finite.
        gates: 1 where a hyperplane's side is open and 0 where not, shape (batch, P), float32.
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
        hyperplanes: u_p as rows, shape (P, d); kept as a buffer.
        centre: Whether each record's own mean feature is subtracted from it first.
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
        """Logits, shape (batch, k), of records of shape (batch, d)."""
        return self.logits(self.gated(x))

    def gated(self, x: Tensor) -> GatedRecords:
        """Gates and scales of records of shape (batch, d)."""
        x, kept = unit_rows(x, centre=self.centre)
        gates = open_gates(x, self.hyperplanes).to(x.dtype)
        count = gates.sum(dim=1)
        return GatedRecords(x=x, gates=gates, scale=torch.where(kept & (count > 0), count.rsqrt(), 0.0))

    def logits(self, records: GatedRecords) -> Tensor:
        """f(x), shape (batch, k)."""
        products = (records.x @ self.weight.flatten(1)).unflatten(1, self.weight.shape[1:])  # (batch, P, k)
        summed = torch.bmm(records.gates.unsqueeze(1), products).squeeze(1)
        return summed * records.scale.unsqueeze(1)

    def clipped(self, records: GatedRecords, residual: Tensor, bound: float) -> Tensor:
        """The residual, scaled down if the gradient that `spread` makes of it has a norm above the bound.

        That is |x| sqrt(open gates) |residual scale| of the numbers that are multiplied, so the bound does not rest on
        the normalisation.

        Args:
            records: The batch.
            residual: Shape (batch, k).
            bound: C > 0.
        """
        spread = norm_bounds(residual * records.scale.unsqueeze(1)) * records.gates.sum(dim=1).double().sqrt()
        factors = bounded_factors(norm_bounds(records.x) * spread, bound)
        return (residual * factors.unsqueeze(1)).to(residual.dtype)

    def spread(self, records: GatedRecords, residual: Tensor) -> Tensor:
        """The residual on every open gate, scaled as the features are, shape (batch, P k).

        x^T times it is the sum over the batch of x~ residual^T, the gradient of all weights.
        """
        scaled = residual * records.scale.unsqueeze(1)
        return (records.gates.unsqueeze(2) * scaled.unsqueeze(1)).flatten(1)


def unit_rows(x: Tensor, *, centre: bool) -> tuple[Tensor, Tensor]:
    """Rows divided by their norms, and which rows have one, shapes (batch, d) and (batch,).

    Guarantees, for every float32 row: the norm is 1 up to 2^-23, or the row is 0 because it was 0, not finite, or, if
    centred, constant up to 2^-24 of its largest entry, which is what float32 features cannot tell from a constant.

    Args:
        x: Shape (batch, d).
        centre: Whether each row's own mean is subtracted first.
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
    """1[u_p . x >= 0], bool, shape (batch, P), for each record whatever the others are.

    A float32 product rounds differently in a batch of another size, so that one record more could turn the gates of
    records near a hyperplane. If |u_p . x| is at most what any order of summation may round, (d + 4) 2^-24 |u_p| |x|,
    the record's own product in float64 decides.

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
    """A run's view on a gated model."""

    model: GatedRelu

    def __init__(self, model: GatedRelu) -> None:
        self.model = model

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Self:
        """A network as `facts` describes it, its hyperplanes and weights yet to be filled in."""
        hyperplanes = torch.zeros(facts["hyperplanes"], facts["n_inputs"])
        return cls(GatedRelu(facts["n_inputs"], facts["n_classes"], hyperplanes, centre=facts["centre"]))

    @property
    def n_inputs(self) -> int:
        """Features of a record."""
        return self.model.n_inputs

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Weights, and the hyperplanes that never change: the model is not itself without them."""
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


_VECTORS_PER_CALL = 256


def seeded_hyperplanes(count: int, n_inputs: int, generator: torch.Generator) -> Tensor:
    """Rows u_p ~ N(0, I), shape (count, n_inputs)."""
    return torch.randn(count, n_inputs, generator=generator)


def device_hyperplanes(device: NoisyDevice, *, readings: int) -> Tensor:
    """The device's matrix as it reads it: unit vector e_i is projected `readings` times, and the mean is column i of B.

    Exact up to noise of 1 / sqrt(readings) of a reading's; whatever it is, the result is the matrix that the gates use
    from then on, in training and at inference, so its noise costs nothing but a slightly different random matrix.

    Args:
        device: Open; its inputs are the features, its outputs the hyperplanes.
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
