"""Draw the noise of the estimates: its directions and its covariance.

An estimate weighs scores s_k with losses at v + z_k. Any law of z with mean zero, together with its score, serves if

    E s z^T g = sigma^2 g for every gradient g that the module's Jacobian J does not annihilate.

Directions. `independent` draws z_k ~ N(0, sigma^2 I). `orthogonal` draws groups of up to D copies (D coordinates) that
are orthogonal for each record: the columns q_k of one Haar-distributed orthogonal matrix for a layer's group, and for
each record a cyclic shift of their coordinates and independent signs, times sigma sqrt(D). Each z_k is uniform on the
sphere of that radius, so the mean is the gradient of the loss smoothed over the ball (Flaxman, Kalai, McMahan 2005,
lemma 1). If the loss is linear, K < D antithetic copies leave a relative variance of D / K - 1 in place of
(D + 1) / K, and K = D leave none. Given the others, a copy still has mean zero, so every reduction of variance holds.

Covariance. `isotropic` is sigma^2 I. `matched` serves modules whose parameters act at several positions: for
v_p = W u_p, with the rows u_p = U = Q S V^T of a record, z = sigma Q f^(1/2) e for each channel, and s = sigma Q
f^(-1/2) e. The trace of J^T Sigma^-1 J, times that of Sigma, is smallest at Sigma = (J J^T)^(1/2) (Cauchy-Schwarz), so
f = S, with a floor and scaled to mean 1. Directions that J annihilates get no noise. Sigma of a record depends on that
record only, so a clipped contribution stays a function of its own record.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opusim.randomness.streams import NoiseStream
from training.networks.clipping import finite_rows
from training.networks.layers import Jacobian, LinearJacobian
from training.ulr.config import Directions, Reduction

_FLOOR = 1e-2
"""Least singular value that the matched covariance counts with, as a part of the record's largest."""
_NEGLIGIBLE = 1e-5
"""Singular values below this part of the largest one count as zero if the patches are fewer than the positions."""


class Isotropic:
    """Maps coordinates of a layer's noise to its output: the coordinates are the outputs themselves.

    Attributes:
        shape: Shape of the coordinates, (batch, ...).

    Args:
        value: The layer's output, shape (batch, ...).
    """

    def __init__(self, value: Tensor) -> None:
        self.shape: tuple[int, ...] = tuple(value.shape)

    def noise(self, drawn: Tensor) -> Tensor:
        """Return z, shape (copies, batch, ...), for coordinates of shape (copies, *shape)."""
        return drawn

    def score(self, drawn: Tensor) -> Tensor:
        """Return s, shape (batch, ...), for coordinates of shape `shape`: linear, so a sum may stand for many."""
        return drawn


class Matched(Isotropic):
    """Coordinates along the left singular vectors of each record's patches, for each channel.

    Args:
        value: The layer's output, shape (batch, channels, ...), or (batch, ..., channels) if `channels_last`.
        rows: u_ip, shape (batch, positions, inputs).
        channels_last: Where the channels stand.
    """

    def __init__(self, value: Tensor, rows: Tensor, *, channels_last: bool) -> None:
        finite = torch.isfinite(rows).flatten(1).all(dim=1)
        basis, scale = _basis(finite_rows(rows, finite).double())
        self._basis, self._scale = basis.mT.float(), scale[:, None].float()  # (batch, rank, positions or 1)
        self._channels_last, self._value_shape = channels_last, tuple(value.shape)
        channels = value.shape[-1] if channels_last else value.shape[1]
        self.shape = (len(value), channels, self._basis.shape[1])

    def noise(self, drawn: Tensor) -> Tensor:
        """Return sigma Q f^(1/2) e; see Isotropic."""
        rows = drawn.transpose(0, 1).flatten(1, 2)  # one product for all copies of a record
        return self._placed((rows * self._scale) @ self._basis, len(drawn))

    def score(self, drawn: Tensor) -> Tensor:
        """Return sigma Q f^(-1/2) e; see Isotropic."""
        return self._placed((drawn / self._scale) @ self._basis, 1)[0]

    def _placed(self, flat: Tensor, copies: int) -> Tensor:
        """Return (batch, copies x channels, positions) in the layout of the output, copies first."""
        placed = flat.unflatten(1, (copies, -1)).transpose(0, 1)
        if self._channels_last:
            placed = placed.transpose(2, 3)
        return placed.reshape(copies, *self._value_shape)


def _basis(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q, shape (batch, positions, rank), and f^(1/2), (batch, rank), from the smaller Gram matrix."""
    positions, inputs = rows.shape[1:]
    if positions <= inputs:
        values, basis = torch.linalg.eigh(rows @ rows.mT)
        return basis, _scale(values.clamp_min(0.0).sqrt(), positions)
    values, right = torch.linalg.eigh(rows.mT @ rows)
    s = values.clamp_min(0.0).sqrt()
    kept = s > _NEGLIGIBLE * s.amax(dim=1, keepdim=True)
    inverse = torch.where(kept, 1 / torch.where(kept, s, 1.0), 0.0)
    return rows @ (right * inverse[:, None]), _scale(s, positions)


def _scale(s: Tensor, positions: int) -> Tensor:
    """Return f^(1/2) of singular values, shape (batch, rank): floored, and the variance of an output has mean 1."""
    f = s.clamp_min(_FLOOR * s.amax(dim=1, keepdim=True))
    f = torch.where(f.sum(dim=1, keepdim=True) > 0, f, 1.0)
    return (f * (positions / f.sum(dim=1, keepdim=True))).sqrt()


def coordinates_of(jacobian: Jacobian, value: Tensor, h: Tensor, *, matched: bool) -> Isotropic:
    """Return the coordinates of a layer's noise.

    Modules whose parameters act at one position, or that have no closed form, have isotropic noise.

    Args:
        jacobian: The layer's.
        value: Its output, shape (batch, ...).
        h: Its input, shape (batch, ...).
        matched: Whether the covariance is matched to the Jacobian.
    """
    rows = jacobian.factor_rows(h) if matched and value.ndim > 2 and value.numel() else None
    if rows is None:
        return Isotropic(value)
    return Matched(value, rows, channels_last=isinstance(jacobian, LinearJacobian))


class Draws:
    """The copies of one layer's noise, in order, however many are asked for at a time.

    Args:
        coordinates: Maps coordinates to outputs.
        noise: Source of N(0, 1) numbers.
        sigma: Standard deviation of the noise.
        copies: K, the copies that will be drawn in all.
        directions: Law of the coordinates.
        like: Tensor whose place and type the noise takes.
    """

    def __init__(
        self,
        coordinates: Isotropic,
        noise: NoiseStream,
        sigma: float,
        copies: int,
        directions: Directions,
        like: Tensor,
    ) -> None:
        self.coordinates, self._noise, self._sigma = coordinates, noise, sigma
        self._left, self._orthogonal, self._like = copies, directions == "orthogonal", like
        self._group: list[Tensor] = []
        self._signs, self._shifts = like.new_zeros(0), like.new_zeros(0, dtype=torch.long)

    def next(self, copies: int) -> tuple[Tensor, Tensor]:
        """Return the coordinates of the next copies, (copies, *shape), and z, (copies, batch, ...)."""
        drawn = self._like.new_zeros(copies, *self.coordinates.shape)
        for copy in drawn:
            if not self._orthogonal:
                self._noise.add_to(copy, self._sigma)
                continue
            if not self._group:
                self._begin_group()
            column, size = self._group.pop(), self._signs.shape[1]
            shifted = torch.cat([column, column]).unfold(0, size, 1)  # row k is the column shifted by k
            torch.mul(self._signs, shifted.index_select(0, self._shifts), out=copy.flatten(1))
        return drawn, self.coordinates.noise(drawn)

    def _begin_group(self) -> None:
        """Draw the next group's directions, which all records share, and the signs and the shift of each record."""
        records, size = self.coordinates.shape[0], math.prod(self.coordinates.shape[1:])
        group, place = min(self._left, size), self._like.device
        self._left -= group
        columns = haar_columns(self._noise.normal((size, group)))
        self._group = list((self._sigma * size**0.5 * columns).float().to(place).T)
        self._signs = torch.where(self._noise.normal((records, size), device=place) < 0, -1.0, 1.0)
        uniform = torch.special.ndtr(self._noise.normal((records, 1), device=place))
        self._shifts = (uniform * size).long().flatten()


def needed_copies(copies: int, outputs: int, directions: Directions, reduction: Reduction) -> int:
    """Return K, or the number of outputs if that is less and orthogonal antithetic pairs already cover them.

    The pairs of a whole group leave no variance of a linear loss, so those of a second group would repeat it.

    Args:
        copies: K.
        outputs: Outputs of the module for a record.
        directions: Law of the coordinates.
        reduction: Reduction of variance.
    """
    covers = directions == "orthogonal" and reduction == "antithetic"
    return min(copies, max(outputs, 1)) if covers else copies


def draw_sizes(size: int, records: float, copies: int, directions: Directions) -> list[float]:
    """Return how many numbers `Draws` asks its source for, draw by draw.

    Args:
        size: Coordinates of a record.
        records: Records of the batch; their mean, if it is random.
        copies: K.
        directions: Law of the coordinates.
    """
    if directions == "independent":
        return [size * records] * copies
    groups = [min(copies - start, size) for start in range(0, copies, size)]
    return [numbers for group in groups for numbers in (size * group, size * records, records)]


def haar_columns(normals: Tensor) -> Tensor:
    """Return columns of a Haar-distributed orthogonal matrix, float64, from N(0, 1) of shape (size, columns)."""
    q, r = torch.linalg.qr(normals.double())
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)
