"""Estimate gradients by likelihood ratios, from the losses of noisy forward passes.

With noise z_k ~ N(0, sigma^2 I) on the output v of one module, and L_k the loss of the record with it,

    delta = (1 / (K sigma^2)) sum_k z_k L_k,   E delta = grad_v E L(v + z),

the gradient of the smoothed loss (Stein's identity). J^T delta estimates the gradient of the module's parameters
(eq. 4 of the DP-ULR paper; Jiang et al. 2023). Three reductions of variance keep the mean, because E z = 0 and z and -z
have the same law:

- antithetic pairs: z_k (L(z_k) - L(-z_k)) / 2;
- the loss without noise as baseline: z_k (L_k - L_0);
- the mean of the record's other copies as baseline (leave one out): z_k (L_k - mean of L_j over j != k).

There are further laws of z, in which a score s_k takes the place of the factor z_k; both are linear in coordinates, in
which the sums are formed. Any law of z with mean zero, together with its score, serves if

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opusim.randomness.streams import NoiseStream
from opusim.training.networks.clipping import by_record, finite_rows
from opusim.training.networks.network import (
    FullyConnected,
    Jacobian,
    LayeredNetwork,
    LinearJacobian,
    jacobian_of,
    require_trainable,
)
from opusim.training.networks.record_independence import batch_statistics
from opusim.training.ulr.config import Directions, Reduction

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
    """Return the coordinates of a layer's noise at input h and output value, matched to the Jacobian if asked.

    Modules whose parameters act at one position, or that have no closed form, have isotropic noise.
    """
    rows = jacobian.factor_rows(h) if matched and value.ndim > 2 and value.numel() else None
    if rows is None:
        return Isotropic(value)
    return Matched(value, rows, channels_last=isinstance(jacobian, LinearJacobian))


class Draws:
    """Draws the copies of one layer's noise in order, any number of them at a time.

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
                # Draw a group's directions, which all records share, and the signs and the shift of each record.
                records, numbers = self.coordinates.shape[0], math.prod(self.coordinates.shape[1:])
                group, place = min(self._left, numbers), self._like.device
                self._left -= group
                columns = haar_columns(self._noise.normal((numbers, group)))
                scaled = (self._sigma * numbers**0.5 * columns).float()
                self._group = list(scaled.to(place, non_blocking=True).T)
                self._signs = torch.where(self._noise.normal((records, numbers), device=place) < 0, -1.0, 1.0)
                uniform = torch.special.ndtr(self._noise.normal((records, 1), device=place))
                self._shifts = (uniform * numbers).long().flatten()
            column, size = self._group.pop(), self._signs.shape[1]
            shifted = torch.cat([column, column]).unfold(0, size, 1)  # row k is the column shifted by k
            torch.mul(self._signs, shifted.index_select(0, self._shifts), out=copy.flatten(1))
        return drawn, self.coordinates.noise(drawn)


def needed_copies(copies: int, outputs: int, directions: Directions, reduction: Reduction) -> int:
    """Return K, or the number of outputs if that is less and orthogonal antithetic pairs already cover them.

    The pairs of a whole group leave no variance of a linear loss, so those of a second group would repeat it.
    """
    covers = directions == "orthogonal" and reduction == "antithetic"
    return min(copies, max(outputs, 1)) if covers else copies


def draw_sizes(size: int, records: float, copies: int, directions: Directions) -> list[float]:
    """Return how many numbers `Draws` asks its source for, draw by draw, of `size` coordinates of a record."""
    if directions == "independent":
        return [size * records] * copies
    groups = [min(copies - start, size) for start in range(0, copies, size)]
    return [numbers for group in groups for numbers in (size * group, size * records, records)]


def haar_columns(normals: Tensor) -> Tensor:
    """Return columns of a Haar-distributed orthogonal matrix, float64, from N(0, 1) of shape (size, columns)."""
    q, r = torch.linalg.qr(normals.double())
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Inputs, values v_l and output, (batch, n_classes), of the layers in a pass without noise, shapes (batch, ...)."""

    inputs: list[Tensor]
    values: list[Tensor]
    output: Tensor


class ModuleSequence(LayeredNetwork):
    """A view of an nn.Sequential: its modules with parameters are the layers.

    A module without parameters may be any map from a batch of records to a batch of records: an activation without
    derivative, a quantiser, a call to another process. A module with parameters needs only the Jacobian of its own
    output (`opusim.training.networks.network`).

    Args:
        model: The sequence. Every module processes records independently. It is put into evaluation mode (no dropout),
            so that all copies of a record pass through the same function.
        n_inputs: Number of features of a record.
        record_shape: Shape in which the first module takes a record; a vector if it is None.

    Raises:
        TypeError: The model is no nn.Sequential, or a module computes batch statistics.
        ValueError: No module has parameters, two share one, or parameters are frozen or not float32.
    """

    def __init__(self, model: nn.Module, *, n_inputs: int, record_shape: Sequence[int] | None = None) -> None:
        if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
            raise TypeError(
                f"model must be an nn.Sequential of modules, got {type(model).__name__}; wrap its modules in "
                "nn.Sequential(...)"
            )
        if found := batch_statistics(model):
            raise TypeError(
                f"model: {found} mixes the records of a batch, so no record has its own estimate; use nn.GroupNorm or "
                "nn.LayerNorm"
            )
        self.model: nn.Module = model.eval()
        self._n_inputs = n_inputs
        if record_shape is not None and tuple(record_shape) != (n_inputs,):
            self.record_shape = tuple(record_shape)
        # The modules before the first layer, the layers, and the modules after each layer.
        self._head: list[nn.Module] = []
        self.jacobians: list[Jacobian] = []
        self._tails: list[list[nn.Module]] = []
        for module in model:
            if any(True for _ in module.parameters()):
                self.jacobians.append(jacobian_of(module))
                self._tails.append([])
            else:
                (self._tails[-1] if self._tails else self._head).append(module)
        if not self.jacobians:
            raise ValueError("model holds no module with parameters; there is nothing to train")
        require_trainable(
            [jacobian.parameters for jacobian in self.jacobians],
            if_frozen="wrap it in a module without parameters, such as a function of a detached copy",
        )

    @property
    def n_inputs(self) -> int:
        """Number of features of a record."""
        return self._n_inputs

    @property
    def facts(self) -> dict[str, Any]:
        """See Network.facts: the layers of a fully connected network, else how each module prints itself."""
        try:
            return FullyConnected(self.model).facts
        except (TypeError, ValueError):
            return {
                "n_inputs": self.n_inputs,
                **({"record_shape": list(self.record_shape)} if self.record_shape else {}),
                "modules": [" ".join(repr(m).split()) for m in self.model.children()],
            }

    def forward(self, x: Tensor) -> Outputs:
        """Run the model without noise on records, shape (batch, n_inputs)."""
        inputs, values = [], []
        with torch.no_grad():
            h = _apply(self._head, self.shaped(x))
            for layer, jacobian in enumerate(self.jacobians):
                inputs.append(h)
                values.append(jacobian.module(h))
                h = self.after(layer, values[-1])
        return Outputs(inputs=inputs, values=values, output=h)

    def layer(self, layer: int, h: Tensor) -> Tensor:
        """Return the output of a layer for an input, without noise."""
        return self.jacobians[layer].module(h)

    def after(self, layer: int, value: Tensor) -> Tensor:
        """Pass a layer's output through the modules without parameters up to the next layer."""
        return _apply(self._tails[layer], value)

    def output_from(self, layer: int, value: Tensor) -> Tensor:
        """Pass a layer's output through the rest of the model."""
        rows = self.after(layer, value)
        for later in range(layer + 1, self.depth):
            rows = self.after(later, self.layer(later, rows))
        return rows


def _apply(modules: Iterable[nn.Module], h: Tensor) -> Tensor:
    for module in modules:
        h = module(h)
    return h


Losses = Callable[[Tensor, slice], Tensor]
"""Maps outputs for copies of some of the batch's records, shape (copies x records, n_classes), to losses (copies,
records)."""


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Estimates the gradients at the outputs of all modules.

    Attributes:
        copies: K >= 1 of each module, or one for all: noise draws per record; an antithetic pair is one. Orthogonal
            pairs are at most as many as the module's outputs.
        reduction: Reduction of variance.
        rows_per_pass: Largest number of noisy rows in one pass through the model; None for as many copies of all
            records as there are modules. It changes memory and rounding only.
        directions: Directions of a record's copies.
        matched: Whether the noise's covariance is matched to each record's Jacobian.
    """

    copies: int | Sequence[int]
    reduction: Reduction
    rows_per_pass: int | None = None
    directions: Directions = "independent"
    matched: bool = False

    def signals(
        self,
        network: ModuleSequence,
        outputs: Outputs,
        losses: Losses,
        clean: Tensor,
        noise: NoiseStream,
        sigmas: Sequence[float],
    ) -> list[Tensor]:
        """Return the signal delta at each layer, shapes (batch, ...), from z drawn layer by layer and copy by copy.

        `clean` has the losses of the outputs without noise, shape (batch,), `sigmas` the noise's deviation in each
        layer.
        """
        depth = len(outputs.values)
        each = [self.copies] * depth if isinstance(self.copies, int) else self.copies
        counts = [
            needed_copies(copies, math.prod(value.shape[1:]), self.directions, self.reduction)
            for copies, value in zip(each, outputs.values, strict=True)
        ]
        sums: dict[int, _Sum] = {}
        found: list[Tensor] = []
        size = len(counts)
        if self.rows_per_pass is not None:
            size = max(1, self.rows_per_pass // max(self._signs * len(clean), 1))
        ends = list(accumulate(counts))
        for start in range(0, ends[-1], size):
            # The noises of each pass, in the order in which they are drawn, from each layer's copies.
            stop = min(start + size, ends[-1])
            shares = (min(stop, end) - max(start, end - n) for end, n in zip(ends, counts, strict=True))
            probes = [Probe(layer, copies) for layer, copies in enumerate(shares) if copies > 0]
            drawn = []
            for layer, copies in probes:
                if layer not in sums:
                    value, h = outputs.values[layer], outputs.inputs[layer]
                    coordinates = coordinates_of(network.jacobians[layer], value, h, matched=self.matched)
                    draws = Draws(coordinates, noise, sigmas[layer], counts[layer], self.directions, value)
                    sums[layer] = _Sum(draws, self.reduction, clean, counts[layer])
                drawn.append(sums[layer].draws.next(copies))
            noises = [z for _, z in drawn]
            parts = self._losses(network, outputs.values, probes, noises, losses)
            for (layer, _), (own, _), part in zip(probes, drawn, parts, strict=True):
                sums[layer].add(own, part)
                if sums[layer].complete:  # frees its noise
                    found.append(sums.pop(layer).estimate(sigmas[layer]))
        return found

    @property
    def _signs(self) -> int:
        return 2 if self.reduction == "antithetic" else 1

    def _losses(
        self,
        network: ModuleSequence,
        values: Sequence[Tensor],
        probes: Sequence[Probe],
        noises: Sequence[Tensor],
        losses: Losses,
    ) -> list[Tensor]:
        """Return each probe's losses, shapes (copies, signs, batch), with noise on one module's output at a time.

        Records go through in parts if one copy of all is too many. In one sweep over the layers a probe joins after its
        own layer, so that earlier layers are not computed again.
        """
        batch, size, signs = len(values[0]), len(values[0]), self._signs
        if self.rows_per_pass is not None:
            copies = sum(probe.copies for probe in probes)
            size = min(batch, max(1, self.rows_per_pass // (signs * copies)))
        parts, sizes, first = [], [probe.copies * signs for probe in probes], probes[0].layer
        for start in range(0, max(batch, 1), max(size, 1)):
            records = slice(start, start + size)
            joining = {probe.layer: z[:, records] for probe, z in zip(probes, noises, strict=True)}
            with torch.no_grad():
                rows = network.after(first, _joined(None, values[first][records], joining[first], signs))
                for layer in range(first + 1, network.depth):
                    rows = network.layer(layer, rows)
                    if layer in joining:
                        rows = _joined(rows, values[layer][records], joining[layer], signs)
                    rows = network.after(layer, rows)
                n = len(values[0][records])
                found = losses(rows, records).view(sum(sizes), n).split(sizes)
            parts.append([own.view(p.copies, signs, n) for p, own in zip(probes, found, strict=True)])
        return (
            parts[0] if len(parts) == 1 else [torch.cat(found, dim=2) for found in zip(*parts, strict=True)]
        )


class Probe(NamedTuple):
    """Copies of one layer's noise in one pass through the model."""

    layer: int
    copies: int


def _joined(old: Tensor | None, value: Tensor, z: Tensor, signs: int) -> Tensor:
    """Append v + z, and v - z if signs is 2, of each copy to the rows of earlier layers."""
    copies, n = z.shape[:2]
    before = 0 if old is None else len(old)
    rows = value.new_empty(before + copies * signs * n, *value.shape[1:])
    if old is not None:
        rows[:before] = old
    new = rows[before:].view(copies, signs, n, *value.shape[1:])
    torch.add(value, z, out=new[:, 0])
    if signs == 2:
        torch.sub(value, z, out=new[:, 1])
    return rows


class _Sum:
    """Running sums of one layer's copies, in the coordinates of their noise, from which its estimate follows."""

    def __init__(self, draws: Draws, reduction: Reduction, clean: Tensor, copies: int) -> None:
        self.draws = draws
        self._reduction, self._clean, self._copies, self._left = reduction, clean, copies, copies
        self._signal: Tensor | None = None
        self._noise: Tensor | None = None
        self._loss: Tensor | float = 0.0

    @property
    def complete(self) -> bool:
        """Whether all copies were added."""
        return self._left == 0

    def add(self, drawn: Tensor, loss: Tensor) -> None:
        """Add copies: coordinates (copies, batch, ...), overwritten, and their losses (copies, signs, batch)."""
        self._left -= len(drawn)
        weight = (loss[:, 0] - loss[:, 1]) / 2 if self._reduction == "antithetic" else loss[:, 0]
        if self._reduction == "clean-loss":
            weight = weight - self._clean
        if self._reduction == "leave-one-out":
            self._noise = _plus(self._noise, drawn.sum(dim=0))
            self._loss = self._loss + weight.sum(dim=0)
        weighed = drawn.mul_(weight.view(*weight.shape, *[1] * (drawn.ndim - 2)))
        self._signal = _plus(self._signal, weighed.sum(dim=0))

    def estimate(self, sigma: float) -> Tensor:
        """Return delta, shape (batch, ...)."""
        signal, copies = self._signal, self._copies
        if signal is None:
            raise ValueError(f"copies = {copies}: no noise was drawn; use at least one copy")
        if self._noise is not None:
            # sum_k z_k (L_k - (S - L_k) / (K - 1)) = [K sum_k z_k L_k - S sum_k z_k] / (K - 1)
            mean = torch.as_tensor(self._loss) / (copies - 1)
            signal = signal.mul_(copies / (copies - 1)).sub_(self._noise * by_record(mean, signal))
        return self.draws.coordinates.score(signal.mul_(1 / (copies * sigma**2)))


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)


_PARAMETERS_LIMIT = 2**24
"""Noisy parameters in memory at once."""


def parts_of_records(size: int, records: float) -> list[float]:
    """Return the records of each part in which `parameter_estimates` of `size` parameters takes a batch."""
    at_once = max(1, _PARAMETERS_LIMIT // (2 * size))
    whole, left = divmod(records, at_once)
    return [float(at_once)] * int(whole) + ([left] if left else [])


def parameter_estimates(
    network: ModuleSequence,
    layer: int,
    h: Tensor,
    losses: Losses,
    noise: NoiseStream,
    sigma: float,
    copies: int,
) -> Iterator[tuple[Tensor, slice]]:
    """Estimate (1 / (K sigma^2)) sum_k Z_k L_k with Z_k ~ N(0, sigma^2 I) on a layer's parameters, record by record.

    The parameters act as the weight of a virtual linear module whose input is the identity, so that its Jacobian is I
    (section 3.2 of the DP-ULR paper). Each record and copy draws as many numbers as the module has parameters. `losses`
    maps outputs to losses; yields estimates as rows, shape (some records, parameters), and their records.
    """
    module = network.jacobians[layer].module
    named = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def of_record(moves: Tensor, x: Tensor) -> Tensor:
        """Return the layer's output for one record, with parameters shifted by its own row of z."""
        parts = moves.split([value.numel() for value in named.values()])
        moved = {
            name: value + part.view_as(value)
            for (name, value), part in zip(named.items(), parts, strict=True)
        }
        result: Tensor = torch.func.functional_call(module, moved, (x[None],))[0]
        return result

    size = sum(parameter.numel() for parameter in network.layer_parameters(layer))
    stops = [0, *accumulate(map(int, parts_of_records(size, len(h))))]
    for part in starmap(slice, pairwise(stops)):
        total = h.new_zeros(part.stop - part.start, size)
        for _ in range(copies):
            z = noise.normal(total.shape).to(h.device).mul_(sigma)
            with torch.no_grad():
                value = torch.func.vmap(of_record)(z, h[part])
                loss = losses(network.output_from(layer, value), part)[0]
            total.add_(z.mul_(loss[:, None]))
        yield total.mul_(1 / (copies * sigma**2)), part
