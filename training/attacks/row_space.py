"""The row-space attack: an unprotected update of the first layer is spanned by the inputs of its batch.

The gradient of layer 1 is (1/m) sum_i delta_i (h_i, 1)^T, whatever the noise in delta_i: its rows are combinations of
the batch's inputs. With m below the fan-in and at most the width they span all of them, so a member's input lies in
the row space and another record's does not. The score is -log10 of the part of the record's input, relative to its
norm, that lies outside.
Source: docs/privacy.md, section 2 (whole records have no guarantee at any sigma).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from training.attacks.base import Attack, Candidates, Observation
from training.networks.clipping import ActivationClipping
from training.protections.base import with_constant

_SMALLEST = 1e-17
_MARGIN = 8
_REFINEMENTS = 2


class RowSpaceAttack(Attack):
    """Looks for a record's input in the row space of the first layer's update.

    Args:
        clipping: What the update does to the inputs, which is public.
        width: Width of the first layer.
        depth: Layers of the network.
        bias: Whether the first layer has a bias.
    """

    name = "row space"
    knows = "the candidate's features and the batch's size, no other record, neither the device nor its noise"

    def __init__(self, clipping: ActivationClipping, *, width: int, depth: int, bias: bool) -> None:
        self._clipping, self._width, self._depth, self._bias = clipping, width, depth, bias
        self._seen: tuple[Observation, Tensor] | None = None

    def score(self, observation: Observation, candidates: Candidates) -> float:
        """See Attack.score."""
        h = self._clipping(candidates.member.x, layer=0, depth=self._depth, n_layer=self._width)
        outside = residual(with_constant(h, bias=self._bias)[0], self._basis(observation))
        return -math.log10(max(outside, _SMALLEST))

    def figure(self, score: float) -> str:
        """The relative residual."""
        return f"residual {10**-score:.2g}"

    def _basis(self, observation: Observation) -> Tensor:
        """The row space; candidates and strangers are looked for in the same one."""
        if self._seen is None or self._seen[0] is not observation:
            self._seen = observation, row_space(observation.gradient(0), observation.batch_size)
        return self._seen[1]


def row_space(gradient: Tensor, rank: int) -> Tensor:
    """An orthonormal basis that contains the rows' span, up to rounding, shape (fan_in, at most rank + margin).

    Random combinations of the rows, a few more than the rank, span what the rows span (Halko, Martinsson, Tropp 2011);
    those to spare point where rounding does. Subspace iterations average the rounding
    over all rows.

    Args:
        gradient: Shape (n, fan_in), float64.
        rank: Expected rank: the batch size.
    """
    n, fan_in = gradient.shape
    wanted = min(n, rank + _MARGIN, fan_in)
    if wanted == n:
        return torch.linalg.qr(gradient.t()).Q
    generator = torch.Generator().manual_seed(0)  # the attacker's own, no secret
    mixing = torch.randn(n, wanted, generator=generator, dtype=gradient.dtype).to(gradient.device)
    basis = torch.linalg.qr(gradient.t() @ mixing).Q
    for _ in range(_REFINEMENTS):
        basis = torch.linalg.qr(gradient.t() @ torch.linalg.qr(gradient @ basis).Q).Q
    return basis


def residual(h: Tensor, basis: Tensor) -> float:
    """The norm of the part of h outside the span of an orthonormal basis, relative to h's; 0 for h = 0.

    Args:
        h: Shape (fan_in,).
        basis: Shape (fan_in, rank), float64.
    """
    exact = h.double()
    norm = float(exact.norm())
    return float((exact - basis @ (basis.t() @ exact)).norm()) / norm if norm else 0.0
