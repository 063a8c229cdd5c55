"""Estimate gradients by likelihood ratios, from the losses of noisy forward passes.

With noise z_k ~ N(0, sigma^2 I) on the output v of one module, and L_k the loss of the record with it,

    delta = (1 / (K sigma^2)) sum_k z_k L_k,   E delta = grad_v E L(v + z),

the gradient of the smoothed loss (Stein's identity). J^T delta estimates the gradient of the module's parameters
(eq. 4 of the DP-ULR paper; Jiang et al. 2023). Three reductions of variance keep the mean, because E z = 0 and z and -z
have the same law:

- antithetic pairs: z_k (L(z_k) - L(-z_k)) / 2;
- the loss without noise as baseline: z_k (L_k - L_0);
- the mean of the record's other copies as baseline (leave one out): z_k (L_k - mean of L_j over j != k).

`training.ulr.directions` has further laws of z, in which a score takes the place of the factor z_k. Both are linear in
coordinates, in which the sums are formed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opusim.randomness.streams import NoiseStream
from training.networks.clipping import by_record
from training.networks.layers import Jacobian, LayeredNetwork, jacobian_of, require_trainable
from training.networks.network import FullyConnected
from training.networks.record_independence import batch_statistics
from training.ulr.config import Directions, Reduction
from training.ulr.directions import Draws, coordinates_of, needed_copies


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Intermediate values of a forward pass without noise.

    Attributes:
        inputs: Input of each layer, shapes (batch, ...).
        values: v_l, output of each layer, shapes (batch, ...).
        output: Output of the model, shape (batch, n_classes).
    """

    inputs: list[Tensor]
    values: list[Tensor]
    output: Tensor


class ModuleSequence(LayeredNetwork):
    """A view of an nn.Sequential: its modules with parameters are the layers.

    A module without parameters may be any map from a batch of records to a batch of records: an activation without
    derivative, a quantiser, a call to another process. A module with parameters needs only the Jacobian of its own
    output (`training.networks.layers`).

    Args:
        model: The sequence. Every module processes records independently. It is put into evaluation mode (no dropout),
            so that all copies of a record pass through the same function.
        n_inputs: Number of features of a record.

    Raises:
        TypeError: The model is no nn.Sequential, or a module computes batch statistics.
        ValueError: No module has parameters, two share one, or parameters are frozen or not float32.
    """

    def __init__(self, model: nn.Module, *, n_inputs: int) -> None:
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
                "modules": [" ".join(repr(m).split()) for m in self.model.children()],
            }

    def forward(self, x: Tensor) -> Outputs:
        """Run the model without noise.

        Args:
            x: Records, shape (batch, n_inputs).
        """
        inputs, values = [], []
        with torch.no_grad():
            h = _apply(self._head, x)
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
        """Return the signal delta at each layer, shapes (batch, ...).

        Args:
            network: The network.
            outputs: The forward pass without noise.
            losses: Maps outputs to losses of the batch's records.
            clean: L_0, shape (batch,).
            noise: Source of z, drawn layer by layer and copy by copy.
            sigmas: Standard deviation of the noise of each layer.
        """
        depth = len(outputs.values)
        each = [self.copies] * depth if isinstance(self.copies, int) else self.copies
        counts = [
            needed_copies(copies, math.prod(value.shape[1:]), self.directions, self.reduction)
            for copies, value in zip(each, outputs.values, strict=True)
        ]
        sums: dict[int, _Sum] = {}
        found: list[Tensor] = []
        for probes in self._passes(counts, len(clean)):
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
                if sums[layer].complete:  # its noise is let go
                    found.append(sums.pop(layer).estimate(sigmas[layer]))
        return found

    @property
    def _signs(self) -> int:
        return 2 if self.reduction == "antithetic" else 1

    def _passes(self, counts: Sequence[int], batch: int) -> Iterator[list[Probe]]:
        """Yield the noises of each pass through the model, in the order in which they are drawn.

        Args:
            counts: Copies of each layer.
            batch: Number of records.
        """
        size = len(counts)
        if self.rows_per_pass is not None:
            size = max(1, self.rows_per_pass // max(self._signs * batch, 1))
        ends = list(accumulate(counts))
        for start in range(0, ends[-1], size):
            stop = min(start + size, ends[-1])
            shares = (min(stop, end) - max(start, end - n) for end, n in zip(ends, counts, strict=True))
            yield [Probe(layer, copies) for layer, copies in enumerate(shares) if copies > 0]

    def _losses(
        self,
        network: ModuleSequence,
        values: Sequence[Tensor],
        probes: Sequence[Probe],
        noises: Sequence[Tensor],
        losses: Losses,
    ) -> list[Tensor]:
        """Return each probe's losses, shapes (copies, signs, batch), some records at a time if one copy is too many."""
        batch, size = len(values[0]), len(values[0])
        if self.rows_per_pass is not None:
            copies = sum(probe.copies for probe in probes)
            size = min(batch, max(1, self.rows_per_pass // (self._signs * copies)))
        parts = [
            noisy_losses(network, values, probes, noises, losses, slice(i, i + size), signs=self._signs)
            for i in range(0, max(batch, 1), max(size, 1))
        ]
        return (
            parts[0] if len(parts) == 1 else [torch.cat(found, dim=2) for found in zip(*parts, strict=True)]
        )


class Probe(NamedTuple):
    """Copies of one layer's noise in one pass through the model."""

    layer: int
    copies: int


def noisy_losses(
    network: ModuleSequence,
    values: Sequence[Tensor],
    probes: Sequence[Probe],
    noises: Sequence[Tensor],
    losses: Losses,
    records: slice,
    *,
    signs: int,
) -> list[Tensor]:
    """Return losses with noise on one module's output at a time, shapes (copies, signs, records).

    One sweep over the layers: a probe joins behind its own layer, so earlier layers are not computed again.

    Args:
        network: The network.
        values: v_l without noise, shapes (batch, ...).
        probes: Layers in ascending order, each once, and their copies.
        noises: z of each probe, shapes (copies, batch, ...).
        losses: Maps outputs to losses of the batch's records.
        records: Selects some of the batch's records.
        signs: 1 for z only, 2 for z and -z.
    """
    joining = {probe.layer: z[:, records] for probe, z in zip(probes, noises, strict=True)}
    n = len(values[0][records])
    with torch.no_grad():
        first = probes[0].layer
        rows = network.after(first, _joined(None, values[first][records], joining[first], signs))
        for layer in range(first + 1, network.depth):
            rows = network.layer(layer, rows)
            if layer in joining:
                rows = _joined(rows, values[layer][records], joining[layer], signs)
            rows = network.after(layer, rows)
        sizes = [probe.copies * signs for probe in probes]
        found = losses(rows, records).view(sum(sizes), n)
    return [part.view(probe.copies, signs, n) for probe, part in zip(probes, found.split(sizes), strict=True)]


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
        self._reduction = reduction
        self._clean = clean
        self._copies, self._left = copies, copies
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


def _records_at_once(size: int) -> int:
    return max(1, _PARAMETERS_LIMIT // (2 * size))


def parts_of_records(size: int, records: float) -> list[float]:
    """Return the records of each part in which `parameter_estimates` takes a batch.

    Args:
        size: Parameters of the module.
        records: Records of the batch; their mean, if it is random.
    """
    at_once = _records_at_once(size)
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
    """Estimate (1 / (K sigma^2)) sum_k Z_k L_k with Z_k ~ N(0, sigma^2 I) on the parameters, record by record.

    The parameters act as the weight of a virtual linear module whose input is the identity, so that its Jacobian is I
    (section 3.2 of the DP-ULR paper). Each record and copy draws as many numbers as the module has parameters.

    Args:
        network: The network.
        layer: The layer whose parameters get the noise.
        h: The layer's input, shape (batch, ...).
        losses: Maps outputs to losses of the batch's records.
        noise: Source of Z.
        sigma: Standard deviation of Z.
        copies: K.

    Yields:
        Estimates as rows, shape (some records, parameters), and the records that they belong to.
    """
    size = sum(parameter.numel() for parameter in network.layer_parameters(layer))
    at_once = _records_at_once(size)
    for start in range(0, len(h), at_once):
        part = slice(start, min(start + at_once, len(h)))
        total = h.new_zeros(part.stop - part.start, size)
        for _ in range(copies):
            z = noise.normal(total.shape).to(h.device).mul_(sigma)
            with torch.no_grad():
                value = _with_own_parameters(network, layer, h[part], z)
                loss = losses(network.output_from(layer, value), part)[0]
            total.add_(z.mul_(loss[:, None]))
        yield total.mul_(1 / (copies * sigma**2)), part


def _with_own_parameters(network: ModuleSequence, layer: int, h: Tensor, z: Tensor) -> Tensor:
    """Return the layer's outputs, each record with parameters shifted by its own row of z."""
    module = network.jacobians[layer].module
    named = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def of_record(moves: Tensor, x: Tensor) -> Tensor:
        parts = moves.split([value.numel() for value in named.values()])
        moved = {
            name: value + part.view_as(value)
            for (name, value), part in zip(named.items(), parts, strict=True)
        }
        result: Tensor = torch.func.functional_call(module, moved, (x[None],))[0]
        return result

    return torch.func.vmap(of_record)(z, h)
