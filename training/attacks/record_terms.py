"""What single records contribute to an update without noise, kept between the trials of a game.

Under record protection, the update of a fully connected layer is a sum of outer products, one for each record:

    G_l = sum_i a_(l,i) b_(l,i)^T,    a_(l,i) = f_i delta_(l,i) / divisor,    b_(l,i) = (h_(l-1,i), 1),

with the clip factor f_i. All trials of a game start from the same weights, so a and b of a record are the same in each.
Inner products of such sums need no matrix: <G, a b^T> = a^T G b, and <a b^T, c d^T> = (a^T c) (b^T d).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opusim.training.networks.contributions.sums import Contributions
from opusim.training.networks.network import FullyConnected
from opusim.training.protections.base import PrivateGradients, WrappedGradients, linear_uses, with_constant
from opusim.training.protections.record import RecordGradients

_MOST_NUMBERS = 6e7
"""Numbers kept, 240 MB."""


@dataclass(frozen=True, kw_only=True)
class OuterProducts:
    """sum_i a_i b_i^T, in a layer's weights and, if it has a bias, one more column.

    Attributes:
        signals: a_i, shape (n, n_l).
        inputs: b_i, shape (n, n_(l-1)), or (n, n_(l-1) + 1) with a bias.
    """

    signals: Tensor
    inputs: Tensor

    def with_products(self, other: OuterProducts, sign: float = 1.0) -> OuterProducts:
        """Return this sum plus or minus another."""
        return OuterProducts(
            signals=torch.cat([self.signals, sign * other.signals]),
            inputs=torch.cat([self.inputs, other.inputs]),
        )

    def dot(self, other: OuterProducts) -> float:
        """Return the inner product with another sum."""
        signals, inputs = self.signals @ other.signals.t(), self.inputs @ other.inputs.t()
        return float((signals.double() * inputs.double()).sum())

    def dot_parts(self, parts: Sequence[Tensor]) -> float:
        """Return the inner product with a layer's gradient.

        Args:
            parts: That of the weights and, if there is one, of the bias, as vectors, whose type is calculated in.
        """
        signals, inputs = self.signals.to(parts[0]), self.inputs.to(parts[0])
        weight = parts[0].view(signals.shape[1], -1)
        width = weight.shape[1]
        total = ((signals @ weight) * inputs[:, :width]).sum(dtype=torch.float64)
        for bias in parts[1:]:
            total = total + (signals @ bias * inputs[:, width]).sum(dtype=torch.float64)
        return float(total)

    def parts(self, *, bias: bool) -> list[Tensor]:
        """Return the sum as float64 vectors: the weights' and, if there is one, the bias's."""
        whole = (self.signals.t() @ self.inputs).double()
        return [whole[:, :-1].flatten(), whole[:, -1]] if bias else [whole.flatten()]


class NotedTerms(WrappedGradients):
    """Notes the outer products of a batch's records, and writes the gradients only if asked to.

    Args:
        writer: The writer of clipped sums; it makes the clip factors.
        divisor: What the sum is divided by.
    """

    def __init__(self, writer: RecordGradients, divisor: float) -> None:
        super().__init__(writer)
        self._writer: RecordGradients = writer
        self._divisor = divisor
        self.writes = True
        """Whether gradients are written."""
        self.noted: list[OuterProducts] = []
        """Those of the last batch that was not written, layer by layer, a row for each record."""

    def _write(
        self,
        parts: Iterable[Contributions],
        *,
        records: Tensor | None = None,
        public_inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """See PrivateGradients._write."""
        if self.writes:
            self._writer.set_gradients(parts, records=records, public_inputs=public_inputs)
            return
        (found,) = parts
        uses = linear_uses(found)
        self.noted = [
            OuterProducts(
                signals=(
                    clip.finite(use.delta[:, 0]).double() * (clip.factors / self._divisor)[:, None]
                ).float(),
                inputs=with_constant(clip.finite(use.h[:, 0]), bias=use.bias is not None),
            )
            for use, clip in zip(uses, self._writer.clips(found), strict=True)
        ]


class KeptTerms:
    """The outer products of records at some weights, by the records' numbers.

    Args:
        weights: The parameters at which they hold.
        network: Whose layers they belong to.
        n_records: Training records.
    """

    def __init__(self, weights: Mapping[str, Tensor], network: FullyConnected, n_records: int) -> None:
        self.weights = weights
        shapes = [
            (linear.out_features, linear.in_features + (linear.bias is not None))
            for linear in network.linears
        ]
        place = network.linears[0].weight.device
        self._rows = min(n_records, max(int(_MOST_NUMBERS / sum(map(sum, shapes))), 1))
        self._used = 0
        self._slots = torch.full((n_records,), -1, device=place)
        self._layers = [
            OuterProducts(
                signals=torch.empty(self._rows, outputs, device=place),
                inputs=torch.empty(self._rows, inputs, device=place),
            )
            for outputs, inputs in shapes
        ]

    def missing(self, numbers: Tensor) -> Tensor | None:
        """Return the positions in a batch of the records that are not kept; None if the batch does not fit.

        All rows are forgotten if those that the batch lacks do not fit.
        """
        if len(numbers) > self._rows:
            return None
        found = torch.nonzero(self._slots[numbers] < 0).flatten()
        if self._used + len(found) <= self._rows:
            return found
        self._slots.fill_(-1)
        self._used = 0
        return torch.arange(len(numbers), device=self._slots.device)

    def add(self, numbers: Tensor, noted: Sequence[OuterProducts]) -> None:
        """Keep the rows of records."""
        rows = torch.arange(self._used, self._used + len(numbers), device=self._slots.device)
        for layer, new in zip(self._layers, noted, strict=True):
            layer.signals[rows] = new.signals
            layer.inputs[rows] = new.inputs
        self._slots[numbers] = rows
        self._used += len(numbers)

    def of(self, numbers: Tensor) -> list[OuterProducts]:
        """Return the rows of a batch, layer by layer; its records must be kept."""
        slots = self._slots[numbers]
        return [
            OuterProducts(
                signals=layer.signals.index_select(0, slots), inputs=layer.inputs.index_select(0, slots)
            )
            for layer in self._layers
        ]


def noting(writer: PrivateGradients, divisor: float) -> Any:
    """Return a writer that notes outer products, or the writer itself if it writes no clipped sums."""
    return NotedTerms(writer, divisor) if type(writer) is RecordGradients else writer
