"""Measure the contributions of a batch's records to all parameters, and sum them with factors.

Every part of every layer is measured in float32; one stack of these norms is then resolved in float64 for all layers
at once, so that a step takes few operators and reads no tensor's value on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from opusim.training.networks.clipping import (
    CANCELLED,
    Clip,
    Measured,
    constants,
    full_precision,
    measured,
    resolved,
)
from opusim.training.networks.contributions.uses import (
    NOWHERE,
    LinearUse,
    OuterUse,
    Part,
    Use,
    chunked,
    joined,
    measured_by_gram,
)

_GRAM_SHARE = 1.0
"""Largest ratio of multiplications, gradient over Gram matrices, at which a record's gradient is formed."""
_EXACT = 64
"""Records whose gradients are converted to float64 at once."""
_CACHE_LIMIT = 2**24
"""Most numbers of per-record gradients that a layer keeps between its norms and its sum."""


class Contributions:
    """What the records of a batch add to the gradients of parameters, layer by layer.

    Attributes:
        layers: The layers as they were given, until their records are measured.
        several_uses: Whether a parameter is used several times, so that the sum's rounding counts (`SUM_ERROR`).
        parameters: The parameters of all layers, in the order of `totals`.
        records: Number of rows in the batch.
        padding: Marks rows that only fill the batch (`leave_out`), or None.

    Args:
        layers: The parameters of each layer, and their uses. A layer is a group of parameters that are measured
            together: a weight and its bias, or everything that shares a use.
        records: Number of records in the batch.
        several_uses: Whether a parameter may be used several times in a batch, even if not in this one.
    """

    def __init__(
        self,
        layers: Sequence[tuple[Sequence[nn.Parameter], Sequence[Use]]],
        records: int,
        *,
        several_uses: bool = False,
    ) -> None:
        self.several_uses = several_uses or any(len(uses) > 1 for _, uses in layers)
        self.records = records
        self._parameters = [list(parameters) for parameters, _ in layers]
        self.parameters = list(chain.from_iterable(self._parameters))
        self._place = self.parameters[0].device
        self.layers = layers
        self._squares: Tensor | None = None
        self.padding: Tensor | None = None
        # How each layer is measured: by one use as it is, jointly, or by forming the gradients of records.
        self._layers: list[OuterUse | _Formed | _Joint | None] = []
        for parameters, uses in layers:
            if not records or not uses:
                self._layers.append(None)
                continue
            several, uses = len(uses) > 1, _merged(uses) if len(uses) > 1 else uses
            outer = [use for use in uses if isinstance(use, OuterUse)]
            # The number of records must not count: one record would change how others are measured.
            if len(outer) == len(uses):
                s, u = outer[0].sizes
                smaller = s * u <= _GRAM_SHARE * sum(use.positions for use in outer) * (s + u)
                same = len({id(use.weight) for use in outer}) == 1
                biases = {id(use.bias) for use in outer if use.bias is not None}
                leaf = all(tensor.is_leaf for use in outer for tensor in use.wrt)
                if leaf and same and len(biases) <= 1 and not smaller:
                    self._layers.append(_Joint(parameters, outer, records) if several else outer[0])
                    continue
            self._layers.append(_Formed(parameters, uses, records, several=several))
        # Layers of a kind are measured and summed together.
        self._kinds: dict[type[OuterUse | _Formed | _Joint], list[int]] = {}
        for number, layer in enumerate(self._layers):
            if layer is not None:
                self._kinds.setdefault(type(layer), []).append(number)

    def leave_out(self, padding: Tensor) -> None:
        """Leave out the rows that padding, bool, marks as filling; call this before anything is measured."""
        self.padding = padding

    def squared_norms(self) -> Tensor:
        """Return the squared norm of each record's gradient by layer, or a bound on it, shape (depth, records).

        float64; NaN or infinite if the gradient is not finite, or if float32 cannot hold it; infinite for padding.
        """
        if self._squares is None:
            self.layers = ()  # signals and inputs that are not needed any more are freed
            with full_precision(self._place.type):
                self._squares = self._measured()
                if self.padding is not None:
                    self._squares.masked_fill_(self.padding, torch.inf)
        return self._squares

    def totals(
        self, factors: Tensor, into: Mapping[int, Tensor] = NOWHERE, block: int | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter with sum_i f_i g_i, in float32, or in float64 if products may cancel.

        Factors f_i lie in [0, 2^60], float64, shape (depth, records); 0 removes a record, and records whose gradients
        are not finite are always removed. `into` has float32 tensors, by the parameter's id, that may be overwritten.
        `CountedSums.block` keeps rounding within `CountedSums.error`; None if the noise does not cover rounding.
        """
        squares = self.squared_norms() if self._squares is None else self._squares
        found: list[tuple[Tensor, Tensor]] = []
        with full_precision(self._place.type):
            clips = Clip.of_layers(factors, squares) if self.records else []
            sums: dict[int, list[Tensor]] = {}
            for kind, numbers in self._kinds.items():
                own: list[Any] = [(self._layers[n], clips[n]) for n in numbers]
                sums |= zip(numbers, kind.totals_of(own, into, block), strict=True)
            for number, (parameters, layer) in enumerate(zip(self._parameters, self._layers, strict=True)):
                if layer is not None:
                    found += zip(layer.wrt, sums[number], strict=True)
                if layer is None or len(layer.wrt) < len(parameters):
                    used = set() if layer is None else {id(tensor) for tensor in layer.wrt}
                    found += [(p, torch.zeros_like(p)) for p in parameters if id(p) not in used]
        return found

    def record_gradients(self) -> Iterator[list[Tensor]]:
        """Yield the gradients of every record by layer, one tensor (records, numbers) for each parameter.

        Norms and totals avoid forming them, so use it for small models, diagnoses and tests only.
        """
        for parameters, layer in zip(self._parameters, self._layers, strict=True):
            if layer is None:
                yield [parameter.new_zeros(self.records, parameter.numel()) for parameter in parameters]
                continue
            formed = _Formed(parameters, [layer], self.records) if isinstance(layer, OuterUse) else layer
            with full_precision(self._place.type):
                parts = list(formed.rows())
            yield [torch.cat(rows) for rows in zip(*parts, strict=True)]

    def _measured(self) -> Tensor:
        """Return the squared norms."""
        depth, records = len(self._layers), self.records
        # 1. Measure the layers, those of a kind together.
        if not self._kinds:
            return torch.zeros(depth, records, dtype=torch.float64, device=self._place)
        of_layers: dict[int, list[Part]] = {}
        for kind, numbers in self._kinds.items():
            own: list[Any] = [self._layers[n] for n in numbers]
            of_layers |= zip(numbers, kind.parts_of(own), strict=True)
        parts = [(number, part) for number in sorted(of_layers) for part in of_layers[number]]
        # 2. Number the measured norms; a norm that a part lacks is a row of zeros, or of ones in a product.
        first = next(m for _, part in parts for m in (part.formed, part.s) if m is not None)
        zero = Measured(torch.zeros_like(first.norms), 0.0, 0.0)
        one = Measured(torch.ones_like(first.norms), 0.0, 0.0)
        found: dict[int, Measured] = {}
        rows: list[tuple[int, int, int]] = []
        for _, part in parts:
            s = zero if part.s is None else part.s
            u = one if part.u is None else part.u
            chosen = (zero if part.formed is None else part.formed, s, u)
            found |= {id(each.norms): each for each in chosen}
            rows.append(tuple(id(each.norms) for each in chosen))  # type: ignore[arg-type]
        order = {key: number for number, key in enumerate(found)}
        # 3. Resolve them all in float64, and pick those of each part.
        bounds = resolved(list(found.values()))
        formed, s_norms, u_norms = (
            bounds.index_select(0, index)
            for index in _indices(
                tuple(zip(*[[order[key] for key in row] for row in rows], strict=True)), self._place
            )
        )
        # 4. max(formed + slack |s| |u|, least |s| |u|), squared, and summed over the parts of each layer.
        slack, least = constants(
            (tuple(part.slack for _, part in parts), tuple(part.least for _, part in parts)), self._place
        )
        products = s_norms * u_norms
        norms = torch.maximum(torch.addcmul(formed, products, slack), products * least)
        (owners,) = _indices((tuple(number for number, _ in parts),), self._place)
        return norms.new_zeros(depth, records).index_add_(0, owners, norms * norms)


class _Formed:
    """A layer that forms each record's gradient, and keeps those of the batch if they fit `_CACHE_LIMIT`.

    Its uses are of its parameters, or of tensors computed from them; with several of a parameter all sums are float64.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], uses: Sequence[Use], records: int, *, several: bool = False
    ) -> None:
        self.wrt, self.uses, self.records, self.several = parameters, uses, records, several
        self._size = sum(parameter.numel() for parameter in parameters) * (1 + several)  # counted in float32
        self.numbers = 4 * self._size + max(use.numbers for use in uses)
        self._kept: list[list[Tensor]] = []

    def rows(self, cut: Sequence[slice] = ()) -> Iterator[list[Tensor]]:
        """Yield the gradients of some records, `cut` by `chunked`, as rows, one tensor (some, numbers) a parameter."""
        if self._kept:
            yield from self._kept
            return
        kept = []
        for part in cut or chunked([self])[0]:
            found = self._joined(part) if self.several else {}
            # A parameter's gradient of one use is float32; sums over uses are float64.
            for use in () if found else self.uses:
                for tensor, formed in zip(use.wrt, use.rows(part), strict=True):
                    leaf = isinstance(tensor, nn.Parameter)
                    for parameter, own in [(tensor, formed)] if leaf else _pulled(tensor, formed, self.wrt):
                        before, flat = found.get(id(parameter)), own.reshape(len(own), -1)
                        found[id(parameter)] = flat if before is None else before.double() + flat
            count = part.stop - part.start
            rows = [found[id(p)] if id(p) in found else p.new_zeros(count, p.numel()) for p in self.wrt]
            if self.records * self._size <= _CACHE_LIMIT:
                kept.append(rows)
            yield rows
        self._kept = kept
        if kept:
            self.uses = ()  # the signals and the inputs are not needed any more

    def _joined(self, part: slice) -> dict[int, Tensor]:
        """Return the gradients of some records by parameter, float64, if all uses are of one weight; else nothing."""
        outer = [use for use in self.uses if isinstance(use, OuterUse)]
        if len(outer) < len(self.uses) or len({id(use.weight) for use in outer}) > 1:
            return {}
        weight, biases = outer[0].weight, [use for use in outer if use.bias is not None]
        if not weight.is_leaf or len({id(use.bias) for use in biases}) > 1:
            return {}
        s, u = _joined_pairs(outer, part)
        found = {id(weight): (s @ u.mT).flatten(1)}
        if biases:
            signals = [use.pairs(part)[0].double().sum(dim=-1).flatten(1) for use in biases]
            found[id(biases[0].bias)] = torch.stack(signals).sum(dim=0)
        return found

    @classmethod
    def parts_of(cls, layers: Sequence[_Formed]) -> list[list[Part]]:
        """Return the parts of each record's norm in each layer."""
        counts = list[int]()  # of the parts of the batch of each layer

        def formed() -> Iterator[Tensor]:
            for layer, cut in zip(layers, chunked(layers), strict=True):
                counts.append(0)
                for rows in layer.rows(cut):
                    counts[-1] += 1
                    yield from rows

        norms = iter(measured(formed()))
        found = []
        for layer, count in zip(layers, counts, strict=True):
            own = [[next(norms) for _ in layer.wrt] for _ in range(count)]
            found.append([Part(each[0] if count == 1 else joined(each)) for each in zip(*own, strict=True)])
        return found

    @classmethod
    def totals_of(
        cls,
        layers: Sequence[tuple[_Formed, Clip]],
        into: Mapping[int, Tensor] = NOWHERE,
        block: int | None = None,
    ) -> list[list[Tensor]]:
        """See OuterUse."""
        return [layer._totals(clip, block) for layer, clip in layers]

    def _totals(self, clip: Clip, block: int | None) -> list[Tensor]:
        """Return sum_i f_i g_i, a tensor for each parameter.

        Gradients that were not kept are measured again, so that another rounding cannot exceed the clip.
        """
        start, again = 0, not self._kept
        totals: list[Tensor] = []
        for rows in self._kept or self.rows():
            own, count = clip, len(rows[0])
            if count < self.records:
                part, start = slice(start, start + count), start + count
                own = Clip(
                    factors=clip.factors[part],
                    rounded=clip.rounded[part],
                    squares=clip.squares[part],
                    kept=None if clip.kept is None else clip.kept[part],
                )
            if again:
                # keep recomputed gradients within the norms measured before
                squares = resolved(measured(rows)).square().sum(dim=0)
                finite = squares < torch.inf
                shorter = torch.where(squares > own.squares, (own.squares / squares).sqrt(), 1.0)
                scaled = torch.where(finite, shorter * own.factors, 0.0)
                kept = finite if own.kept is None else own.kept & finite
                own = Clip(factors=scaled, rounded=scaled.float(), squares=own.squares, kept=kept)
            factors = {torch.float32: own.rounded, torch.float64: own.factors}
            finite_rows = rows if own.kept is None else [own.finite(values) for values in rows]
            step = block or (count if block is None else _EXACT)
            for first in range(0, count, step):
                part = slice(first, first + step)
                if block == 0:
                    added = [own.factors[part] @ values[part].double() for values in finite_rows]
                else:
                    added = [factors[values.dtype][part] @ values[part] for values in finite_rows]
                pairs = zip(totals, added, strict=True)
                totals = [total.double() + more for total, more in pairs] if totals else added
        return [total.view_as(p) for total, p in zip(totals, self.wrt, strict=True)]


class _Joint:
    """A layer of several uses of one weight and one or no bias: measured as one sum, and summed in float64."""

    def __init__(self, parameters: Sequence[nn.Parameter], uses: Sequence[OuterUse], records: int) -> None:
        self.wrt, self.uses, self.records = parameters, uses, records
        self.numbers = 4 * sum(use.numbers for use in uses)

    def rows(self) -> Iterator[list[Tensor]]:
        """See _Formed."""
        return _Formed(self.wrt, self.uses, self.records, several=True).rows()

    @classmethod
    def parts_of(cls, layers: Sequence[_Joint]) -> list[list[Part]]:
        """See _Formed; `CANCELLED` of the products' magnitudes bounds the rounding of each layer's sum."""
        parts = []
        for layer, cut in zip(layers, chunked(layers), strict=True):
            uses = layer.uses
            norms = joined([measured_by_gram(*_joined_pairs(uses, part)) for part in cut])
            magnitudes = []
            for use in uses:
                s, u, factor = use.sizes_of()
                bounds = resolved([s, u])
                magnitudes.append(bounds[0] * bounds[1] * factor)
            size = Measured(torch.stack(magnitudes).sum(dim=0).float(), 2.0**-22, 0.0)
            parts.append([Part(norms, size, None, CANCELLED)])
            with_bias = [use for use in uses if use.bias is not None]
            if with_bias:
                signals = torch.stack([use.signals().double() for use in with_bias]).sum(dim=0)
                sizes = [resolved([use.sizes_of()[0]])[0] * use.positions**0.5 for use in with_bias]
                own = Measured(torch.stack(sizes).sum(dim=0).float(), 2.0**-22, 0.0)
                slack = CANCELLED + sum(use.positions for use in uses) * 2.0**-23
                parts[-1].append(Part(measured([signals])[0], own, None, slack))
        return parts

    @classmethod
    def totals_of(
        cls,
        layers: Sequence[tuple[_Joint, Clip]],
        into: Mapping[int, Tensor] = NOWHERE,
        block: int | None = None,
    ) -> list[list[Tensor]]:
        """See OuterUse; always in float64."""
        found = []
        for layer, clip in layers:
            totals = {id(p): torch.zeros_like(p, dtype=torch.float64) for p in layer.wrt}
            for use in layer.uses:
                (own,) = use.totals_of([(use, clip)], block=0)
                for tensor, total in zip(use.wrt, own, strict=True):
                    totals[id(tensor)] += total
            found.append([totals[id(parameter)] for parameter in layer.wrt])
        return found


def _merged(uses: Sequence[Use]) -> Sequence[Use]:
    """Join linear maps of one weight and bias into one at the positions of all."""
    if not all(type(use) is LinearUse for use in uses):
        return uses
    if len({(id(use.weight), id(use.bias)) for use in uses}) > 1:  # type: ignore[attr-defined]
        return uses
    first = uses[0]
    deltas, inputs = (torch.cat([getattr(use, name) for use in uses], dim=1) for name in ("delta", "h"))
    return [LinearUse(deltas, inputs, first.weight, first.bias)]  # type: ignore[attr-defined]


def _joined_pairs(uses: Sequence[OuterUse], part: slice) -> tuple[Tensor, Tensor]:
    """Return the factors of all uses of a weight as columns, float64."""
    pairs = [use.pairs(part) for use in uses]
    s, u = (torch.cat(columns, dim=-1).double() for columns in zip(*pairs, strict=True))
    return s, u


def _pulled(
    tensor: Tensor, rows: Tensor, parameters: Sequence[nn.Parameter]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield records' gradients by parameter, from those with respect to a tensor computed from the parameters."""
    with torch.enable_grad():
        found = torch.autograd.grad(
            tensor, list(parameters), rows.to(tensor.dtype), is_grads_batched=True, retain_graph=True, allow_unused=True
        )  # fmt: skip
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is not None:
            yield parameter, gradient


@lru_cache(maxsize=512)
def _indices(columns: tuple[tuple[int, ...], ...], place: torch.device) -> tuple[Tensor, ...]:
    """Return tuples of numbers as tensors on a torch device; copied there once."""
    return tuple(torch.tensor(column, device=place) for column in columns)
