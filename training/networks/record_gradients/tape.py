"""Measure, clip and sum the gradients of single records in an ordinary training step of any module.

`RecordTape` watches one forward and one backward pass. For every use of a parameter it keeps the input h and the
gradient delta at the output, from which it computes the norm of each record's gradient and the clipped sum; a second
backward pass is not needed (Bu et al., "Differentially private optimization on large model at small cost", 2023, call
this book-keeping). Gradients may come from backpropagation or from feedback points: each use takes the gradient that
reached it.

Uses are found by catching torch functions, not modules, so bare parameters, functional calls, shared weights and
attention need no module of their own. A parameter that is used several times gets one gradient per record, the sum over
its uses, before any norm is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from opusim import checks
from training.networks.clipping import (
    CANCELLED,
    Clip,
    ExactRows,
    ScaledRows,
    bounded_factors,
    cancels,
    finite_rows,
    full_precision,
    norm_bounds,
    row_norms,
    scaled_rows,
    weighted_sums,
)
from training.networks.record_gradients.calls import Use
from training.networks.record_gradients.layout import Rows
from training.networks.record_gradients.probe import UNSEEN, invented_rows, probe
from training.networks.record_gradients.recorder import Kinds, Recorder
from training.networks.record_gradients.uses import OuterUse, PlantedUse, use_of

_NUMBERS_LIMIT = 2**24
"""Numbers of per-record gradients or unfolded inputs in memory at once, counted in float32."""
_CACHE_LIMIT = 2**24
"""Numbers of per-record gradients that a layer keeps from its norms to its sum."""


class RecordTape:
    """Gradients of single records, for any module that processes records independently.

    A record is whatever has one index in the batch: features, an image, a sequence. The loss of a step must be a sum
    over records, so that the gradient at a use belongs to the record.

    With factors f_i from `squared_norms`, the contribution of a record to the sum that `set_gradients` writes, as
    float32 arithmetic forms it, has at most the norm that was measured times f_i, up to 1e-6 of it, whatever finite
    numbers the record holds (training.networks.clipping); a record whose norm is not finite must get the factor 0 and
    then adds exactly nothing. Products of several uses of a weight may cancel, so they are summed in float64; so are
    those of one use at several positions, for the records for which they do.

    Attributes:
        several_uses: Whether a parameter is used several times in a forward pass.
        layers: Groups of parameters that are measured together, in the order of the model: a weight and its bias, or
            everything that shares a use. Their number is depth.
        names: Names of the parameters of each layer.

    Args:
        model: The module, in the mode in which it will be trained. Parameters that do not require gradients are
            constants.
        *args: Arguments of the model for at least one record, as a probe; tensors of the same first size as the first
            tensor hold records. The model runs a few times on batches of 5 and 37 records, or 7 if it is large.
        **kwargs: Keyword arguments, likewise.

    Raises:
        ValueError: The model mixes records, has parameters that are not float32, or no parameters to train.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> tape, x = RecordTape(net, torch.randn(2, 3)), torch.randn(6, 3)
        >>> with tape.recording(len(x)):
        ...     net(x).square().sum().backward()
        >>> tape.squared_norms().shape
        torch.Size([2, 6])
        >>> tape.clip(1.0)
        0
    """

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        named = trained_parameters(model)
        self.model = model
        self._named = named
        self._records: int | None = None
        self._begun = 0
        self._uses: list[list[Use]] = []
        self._cache: dict[int, list[list[Tensor]]] = {}
        self._kinds, given = Kinds(), Rows.of((args, kwargs))
        members, self.several_uses = probe(model, named, given, self._kinds)
        self._members = members
        self._followed = {self._signature(given)}
        self.layers: list[list[nn.Parameter]] = [[named[n][1] for n in group] for group in members]
        self.names: list[list[str]] = [[named[n][0] for n in group] for group in members]
        self._layer_of = {id(p): number for number, layer in enumerate(self.layers) for p in layer}

    def follow(self, args: Any, kwargs: Any) -> None:
        """Find out where the records stand for arguments of shapes that were not seen yet, on invented records.

        Args:
            args: Arguments of a batch, of which only types and shapes are read.
            kwargs: Keyword arguments, likewise.

        Raises:
            ValueError: The model mixes records of these shapes, or uses its parameters in another way.
        """
        given = Rows.of((args, kwargs))
        signature = self._signature(given)
        if signature in self._followed:
            return
        members, several = probe(self.model, self._named, invented_rows(self.model, given), self._kinds)
        self.several_uses = self.several_uses or several
        if members != self._members:
            raise ValueError(
                "model: uses other parameters together for records of this shape than for those it was prepared with; "
                "use all of them in every batch"
            )
        self._followed.add(signature)

    def _signature(self, given: Rows) -> tuple[Any, ...]:
        """Return what decides which operators run."""
        place = self._named[0][1].device.type
        return (*given.signature, torch.is_autocast_enabled(place), torch.get_autocast_dtype(place))

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @contextmanager
    def recording(self, records: int) -> Iterator[None]:
        """Watch the forward passes and the backward pass of one batch; the parameters' gradients are discarded.

        The model may run several times on the same records; their gradients add up. Recomputed activations
        (torch.utils.checkpoint) and torch.autograd.grad are not supported; call `backward`.

        Args:
            records: Number of records in the batch; 0 for none.

        Raises:
            ValueError: The model uses a parameter in another way than in the probe.
        """
        for _, parameter in self._named:
            parameter.grad = None
        recorder = self.begin(records)
        with recorder:
            yield
        self.end(recorder)

    def begin(self, records: int) -> Recorder:
        """Return the context for the forward passes of a batch; `recording` is `begin`, that context and `end`.

        A training loop whose backward pass happens elsewhere calls `begin` and `end` itself. The parameters must have
        no gradients when the backward pass starts.

        Args:
            records: Number of records in the batch; 0 for none.
        """
        checks.integer(records=records, minimum=0)
        self._records, self._uses, self._cache = None, [], {}
        self._begun = records
        return Recorder(self._named, self._kinds)

    def end(self, recorder: Recorder) -> None:
        """Take what the forward passes and the backward pass of a batch left.

        Args:
            recorder: What `begin` returned.

        Raises:
            ValueError: The model uses a parameter in another way than in the probe.
        """
        seen = [name for name, parameter in self._named if parameter.grad is not None]
        if seen:
            raise ValueError(f"model: parameter {seen[0]!r} {UNSEEN}")
        self._records = records = self._begun
        self._uses = [[] for _ in self.layers]
        for call, roots in recorder.calls if records else ():
            use = use_of(call, records)
            if use is not None:
                self._uses[self._layer_of[id(self._named[min(roots)][1])]].append(use)
        if any(
            len(uses) > 1 for uses in self._uses
        ):  # longer records than the probe's may use a parameter again
            self.several_uses = True

    def plant(self, name: str, signals: Tensor, inputs: Tensor) -> None:
        """Add s_i u_i^T to what each record of the recorded batch adds to a weight, before any norm is measured.

        An audit plants gradients of its choice by it.

        Args:
            name: The weight's, a matrix of shape (a, b).
            signals: s, float32, shape (records, a); 0 for a record to which nothing is added.
            inputs: u, float32, shape (records, b).
        """
        checks.shape((self._recorded(), None), signals=signals, inputs=inputs)
        number = next(n for n, names in enumerate(self.names) if name in names)
        weight = self.layers[number][self.names[number].index(name)]
        self._uses[number].append(PlantedUse(weight, signals, inputs))

    def squared_norms(self) -> Tensor:
        """Return the squared norm of each record's gradient by layer, or a bound on it, shape (depth, records).

        float64; NaN or infinite if the gradient is not finite.
        """
        with self._arithmetic():
            return torch.stack([self._layer_norms(n).square() for n in range(self.depth)])

    def set_gradients(self, factors: Tensor, squared_norms: Tensor, divisor: float = 1.0) -> None:
        """Write (1/divisor) sum_i f_i g_i into the gradients of all parameters.

        Args:
            factors: f_i of each layer and record in [0, 1], float64, shape (depth, records); 0 removes a record.
            squared_norms: As `squared_norms` returned them; no contribution exceeds them.
            divisor: The batch size, or a constant in its place.
        """
        for parameter, total in self.totals(factors, squared_norms):
            parameter.grad = total.div_(divisor).float()

    def totals(self, factors: Tensor, squared_norms: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with sum_i f_i g_i, in float32, or in float64 if products may cancel.

        Args:
            factors: See `set_gradients`.
            squared_norms: See `set_gradients`.
        """
        norms = squared_norms.sqrt()
        finite = torch.isfinite(norms).all(dim=0)
        for number, parameters in enumerate(self.layers):
            clip = Clip(factors=factors[number], norms=norms[number])
            with self._arithmetic():
                totals = self._total(number, clip, finite)
            yield from zip(parameters, totals, strict=True)

    def clip(self, bound: float, divisor: float = 1.0) -> int:
        """Write (1/divisor) sum_i min(1, C / norm(g_i)) g_i into the gradients, g_i over all parameters.

        Args:
            bound: C, above 0.
            divisor: See `set_gradients`.

        Returns:
            The number of records left out because their gradients are not finite. It depends on private records.
        """
        checks.positive(bound=bound, divisor=divisor)
        squares = self.squared_norms()
        norms = squares.sum(dim=0).sqrt()
        self.set_gradients(bounded_factors(norms, bound).expand(self.depth, -1), squares, divisor)
        return int((~torch.isfinite(norms)).sum())

    def record_gradients(self) -> dict[str, Tensor]:
        """Return the gradient of every record by name of parameter, shapes (records, *shape).

        It forms what `squared_norms` and `clip` need not, so it is for small models, diagnoses and tests.
        """
        found = {}
        with self._arithmetic():
            for number, (names, parameters) in enumerate(zip(self.names, self.layers, strict=True)):
                recorded = self._recorded() and (self._uses[number] or number in self._cache)
                parts = list(self._rows(number)) if recorded else []
                empty = [parameter.new_zeros(self._recorded(), parameter.numel()) for parameter in parameters]
                joined = [torch.cat(rows) for rows in zip(*parts, strict=True)] if parts else empty
                for name, parameter, rows in zip(names, parameters, joined, strict=True):
                    found[name] = rows.view(len(rows), *parameter.shape)
        return found

    # Layers

    def _layer_norms(self, number: int) -> Tensor:
        """Return the norm of each record's gradient of one layer, float64, shape (records,)."""
        records, uses = self._recorded(), self._uses[number]
        if not (uses or number in self._cache) or not records:
            return torch.zeros(records, dtype=torch.float64, device=self.layers[number][0].device)
        outer = _outer_uses(uses)
        if number in self._cache or outer is None or _is_smaller(outer):
            return torch.cat([_joint_norms(rows) for rows in self._rows(number)])
        if len(outer) > 1:
            parts = _parts(records, 4 * sum(use.numbers for use in outer))
            return torch.cat([_norms_of_sum(outer, part) for part in parts])
        return torch.cat([outer[0].norms(part) for part in _parts(records, outer[0].numbers)])

    def _total(self, number: int, clip: Clip, finite: Tensor) -> list[Tensor]:
        """Return sum_i f_i g_i of one layer, a tensor for each parameter."""
        uses, parameters = self._uses[number], self.layers[number]
        if number in self._cache:
            return self._formed_total(number, clip)
        if not uses or not self._recorded():
            return [torch.zeros_like(parameter) for parameter in parameters]
        outer = _outer_uses(uses)
        if outer is None or _is_smaller(outer):
            return self._formed_total(number, clip)
        several, positions = len(outer) > 1, max(use.positions for use in outer)
        kind = torch.float64 if several else torch.float32
        totals = {id(parameter): torch.zeros_like(parameter, dtype=kind) for parameter in parameters}
        cancelling = None
        if positions > 1 and not several:
            cancelling = cancels(outer[0].magnitudes(slice(None)), clip.norms)

        def keep(delta: Tensor) -> ScaledRows | ExactRows:
            if several:
                return ExactRows(rows=delta, factors=clip.factors, positions=positions)
            return scaled_rows(delta, clip.factors, cancelling)

        def only_finite(values: Tensor) -> Tensor:
            return values if bool(finite.all()) else finite_rows(values, finite)

        for use in outer:
            for tensor, total in zip(use.wrt, use.totals(keep, only_finite), strict=True):
                totals[id(tensor)] += total
        return [totals[id(parameter)] for parameter in parameters]

    def _formed_total(self, number: int, clip: Clip) -> list[Tensor]:
        """Sum clipped gradients of a layer whose gradients are formed.

        Gradients that were not kept are measured again, so that another rounding cannot exceed their norms.
        """
        start, kept = 0, number in self._cache
        totals: list[Tensor] = []
        for rows in self._rows(number):
            part = slice(start, start + len(rows[0]))
            norms, factors = clip.norms[part], clip.factors[part]
            if not kept:
                realised = _joint_norms(rows)
                factors = torch.where(realised > norms, norms / realised, 1.0) * factors
                norms = realised
            factors = torch.where(torch.isfinite(norms), factors, 0.0)
            added = weighted_sums(rows, factors, norms)
            both = zip(totals, added, strict=True) if totals else ()
            totals = [total.double() + more for total, more in both] or added
            start = part.stop
        return [total.view_as(p) for total, p in zip(totals, self.layers[number], strict=True)]

    def _rows(self, number: int) -> Iterator[list[Tensor]]:
        """Yield the gradients of some records as rows, one tensor (some, numbers) for each parameter of a layer.

        If those of the whole batch fit into `_CACHE_LIMIT`, they are kept in place of the signals and the inputs.
        """
        if number in self._cache:
            yield from self._cache[number]
            return
        uses, parameters, records = self._uses[number], self.layers[number], self._recorded()
        outer, size = _outer_uses(uses), sum(parameter.numel() for parameter in parameters)
        size *= 1 + (len(uses) > 1)  # then they are float64
        needed = sum(use.numbers for use in uses) if outer else max(use.numbers for use in uses)
        kept = []
        for part in _parts(records, 4 * size + needed):
            if outer and len(outer) > 1:
                rows = _outer_rows(outer, parameters, part)
            else:
                rows = _summed_rows(uses, parameters, part)
            if records * size <= _CACHE_LIMIT:
                kept.append(rows)
            yield rows
        if kept:
            self._cache[number], self._uses[number] = kept, []

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        """Compute in float32, even within torch.autocast, and without a graph."""
        place = self.layers[0][0].device.type
        with full_precision(), torch.no_grad(), torch.autocast(place, enabled=False):
            yield

    def _recorded(self) -> int:
        if self._records is None:
            raise RuntimeError("no batch is recorded; run a forward and a backward pass in tape.recording(n)")
        return self._records


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are trained, with their names.

    Raises:
        ValueError: There are none, or one is not float32.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("model has no parameter to train; set requires_grad of some")
    for name, parameter in named:
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"model: parameter {name!r} has dtype {parameter.dtype}; train in torch.float32 (model.float())"
            )
    return named


def _outer_uses(uses: Sequence[Use]) -> list[OuterUse] | None:
    """Return the uses if all add outer products to the same weight and bias, else None."""
    outer = [use for use in uses if isinstance(use, OuterUse)]
    if len(outer) < len(uses):
        return None
    leaf = all(tensor.is_leaf for use in outer for tensor in use.wrt)
    biases = {id(use.bias) for use in outer if use.bias is not None}
    same = len({id(use.weight) for use in outer}) == 1 and len(biases) <= 1
    return outer if leaf and same else None


def _is_smaller(uses: Sequence[OuterUse]) -> bool:
    """Whether a record's gradient takes fewer products than its Gram matrices.

    The number of records has no say: it would let one record decide how others are measured.
    """
    s, u = uses[0].sizes
    return s * u <= sum(use.positions for use in uses) * (s + u)


def _joined_pairs(uses: Sequence[OuterUse], part: slice) -> tuple[Tensor, Tensor]:
    """Return the factors of all uses of a weight as columns; those of a use without the bias have a 0 for it."""
    pairs = [use.pairs(part) for use in uses]
    if len(pairs) == 1:
        return pairs[0]
    widest = max(u.shape[2] for _, u in pairs)
    inputs = [functional.pad(u, (0, 0, 0, widest - u.shape[2])) for _, u in pairs]
    return torch.cat([s for s, _ in pairs], dim=-1), torch.cat(inputs, dim=-1)


def _joint_norms(rows: Sequence[Tensor]) -> Tensor:
    """Return bounds on the norms of each record's gradient over several parameters, float64, shape (some,)."""
    norms = [row_norms(own) if own.dtype == torch.float64 else norm_bounds(own) for own in rows]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), dim=0)


def _outer_rows(uses: Sequence[OuterUse], parameters: Sequence[nn.Parameter], part: slice) -> list[Tensor]:
    """Return the gradients of some records as rows for a weight and its bias, float64, by one product for all uses."""
    s, u = (columns.double() for columns in _joined_pairs(uses, part))
    whole = s @ u.mT  # (some, groups, a, b)
    if not any(use.bias is not None for use in uses):
        return [whole.flatten(1)]
    by_parameter = {id(uses[0].weight): whole[..., :-1].flatten(1)}
    return [by_parameter.get(id(p), whole[..., -1].flatten(1)) for p in parameters]


def _summed_rows(uses: Sequence[Use], parameters: Sequence[nn.Parameter], part: slice) -> list[Tensor]:
    """Return the gradients of some records as rows for each parameter: float32 of one use, else sums in float64."""
    sums: dict[int, Tensor] = {}
    for use in uses:
        for tensor, rows in zip(use.wrt, use.rows(part), strict=True):
            for parameter, own in _pulled(tensor, rows, parameters):
                before, flat = sums.get(id(parameter)), own.reshape(len(own), -1)
                sums[id(parameter)] = flat if before is None else before.double() + flat
    count = part.stop - part.start
    return [sums[id(p)] if id(p) in sums else p.new_zeros(count, p.numel()) for p in parameters]


def _norms_of_sum(uses: Sequence[OuterUse], part: slice) -> Tensor:
    """Return bounds on the norms of contributions of several uses of one weight, float64, shape (some,).

    The positions of all uses count as one sum of products, whose Gram matrices are computed in float64. The share
    `CANCELLED` of the products' magnitudes is added, so that the sum over the batch rounds by a bounded amount.
    """
    s, u = (columns.double() for columns in _joined_pairs(uses, part))
    (a, positions), b = s.shape[-2:], u.shape[-2]
    squares = ((s.mT @ s) * (u.mT @ u)).sum(dim=(-2, -1)).clamp_min(0.0).sum(dim=1)
    magnitudes = [use.magnitudes(part) for use in uses]
    gram = ((a + b + positions**2) * 2.0**-52) ** 0.5
    lost = [(CANCELLED + gram) * size for size in magnitudes]
    return squares.sqrt() + torch.stack(lost).sum(dim=0)


def _pulled(
    tensor: Tensor, rows: Tensor, parameters: Sequence[nn.Parameter]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield gradients of records with respect to parameters from those with respect to a tensor computed from them."""
    if isinstance(tensor, nn.Parameter):
        yield tensor, rows
        return
    with torch.enable_grad():
        found = torch.autograd.grad(
            tensor, list(parameters), rows.to(tensor.dtype), is_grads_batched=True, retain_graph=True, allow_unused=True
        )  # fmt: skip
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is not None:
            yield parameter, gradient


def _parts(records: int, numbers: int) -> list[slice]:
    """Cut a batch into parts whose numbers fit into memory."""
    step = max(1, _NUMBERS_LIMIT // max(1, numbers))
    return [slice(start, min(start + step, records)) for start in range(0, records, step)]
