"""Find where the records of a batch stand in every use of a parameter, and refuse models that mix records.

The model runs on batches of two sizes, then on batches whose first or last record is another one or NaN. A dimension
that grows with the batch holds the records, and only the rows of a changed record may move. This holds for the records
of the probe; a model that sorts, packs or chooses rows by their content is refused only if the probe shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from training.networks.memory import preserved_attributes
from training.networks.record_gradients.calls import real_tensors
from training.networks.record_gradients.layout import (
    Layout,
    Rows,
    finite,
    layout_of,
    moved_rows,
    rows_of,
    with_nan,
)
from training.networks.record_gradients.recorder import Key, Kinds, Recorder, Seen, Slot
from training.networks.record_independence import MIXES_REMEDY, preserved_generators

_COUNTS = (5, 7)
"""Batch sizes; primes, so that few other dimensions have such a factor."""
_ROUNDS = 20
"""Most steps by which a tensor may be computed from parameters and tensors that the model holds."""


class _Moved(NamedTuple):
    """A tensor before and after a record changed."""

    record: int
    before: Tensor
    after: Tensor


class _Trace(NamedTuple):
    """One run of the model: its uses, the parameters that each leads to, and its output."""

    seen: list[Seen]
    roots: list[frozenset[int]]
    ragged: bool
    output: list[Tensor]


def probe(
    model: nn.Module, named: Sequence[tuple[str, nn.Parameter]], args: Any, kwargs: Any
) -> tuple[Kinds, list[list[int]], bool]:
    """Return the kinds of uses, the layers, and whether a parameter has several uses.

    A layer is the numbers of the parameters that share a use.

    The model's buffers, its Python attributes and torch's generators are as before afterwards.

    Args:
        model: In the mode in which it will be trained.
        named: Its parameters that are trained.
        args: Its arguments for at least one record; tensors of the same first size as the first tensor hold records.
        kwargs: Its keyword arguments, likewise.

    Raises:
        ValueError: The model mixes records, or a use has no rows for each record.
    """
    given = Rows.of((args, kwargs))
    batches = [given.repeated(count) for count in _COUNTS]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    kinds = Kinds()
    with preserved_generators(given.tensors[0].device), preserved_attributes(model), torch.enable_grad():
        try:
            for _ in range(_ROUNDS):
                few, many = (_trace(model, named, kinds, batch) for batch in batches)
                changed = [
                    (record, _trace(model, named, kinds, batch)) for record, batch in _changed(batches[0])
                ]
                if not _settle(kinds, few, many, changed):
                    break
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
    kinds.slots = _slots(few, many, changed)
    layers = _components(few.roots, len(named))
    return (
        kinds,
        layers,
        any(sum(not roots.isdisjoint({n}) for roots in few.roots) > 1 for n in range(len(named))),
    )


def _trace(model: nn.Module, named: Sequence[tuple[str, nn.Parameter]], kinds: Kinds, batch: Rows) -> _Trace:
    torch.manual_seed(0)
    args, kwargs = batch.values
    with Recorder(named, kinds, probing=True) as recorder:
        output = model(*args, **kwargs)
    for call, _ in recorder.calls:
        call.check_inputs()
    outputs = [tensor.detach() for tensor in real_tensors(output)]
    return _Trace(recorder.seen, [roots for _, roots in recorder.calls], recorder.ragged, outputs)


def _changed(batch: Rows) -> Iterator[tuple[int, Rows]]:
    """Yield batches whose first or last record is another one, and of which it is NaN."""
    for record in (0, _COUNTS[0] - 1):
        yield record, _with_another(batch, record)
        yield record, batch.put(record, with_nan)


def _with_another(batch: Rows, record: int) -> Rows:
    """Return the batch with another record in one's place: whole numbers of one that differs, other real numbers."""
    whole = [leaf for leaf in batch.tensors if not leaf.is_floating_point()]
    donors = (
        d for d in range(batch.records) if any(not torch.equal(leaf[d], leaf[record]) for leaf in whole)
    )
    donor = next(donors, record)

    def change(leaf: Tensor) -> Tensor:
        other = leaf[donor]
        if leaf.is_floating_point():
            other = finite(other.flip(-1) if other.ndim else other) * 0.5 + 0.25
        return torch.cat([leaf[:record], other[None], leaf[record + 1 :]])

    changed = batch.mapped(change)
    if all(torch.equal(new, old) for new, old in zip(changed.tensors, batch.tensors, strict=True)):
        raise ValueError(
            "model: the probe's records are equal, so that it cannot see whether the model mixes records; give "
            "records that differ"
        )
    return changed


def _settle(kinds: Kinds, few: _Trace, many: _Trace, changed: Sequence[tuple[int, _Trace]]) -> bool:
    """Note uses that depend on no record; return whether there were new ones."""
    keys = [use.key for use in few.seen]
    if any(keys != [use.key for use in trace.seen] for trace in (many, *(trace for _, trace in changed))):
        raise ValueError(
            "model: which parameters are used depends on the records or on their number; use all of them in every batch"
        )
    before = len(kinds.fixed), len(kinds.copied)
    for number, use in enumerate(few.seen):
        first = len(use.inputs)
        outputs = range(first, len(use.tensors))
        varies = any(_layout(few, many, number, n) is not None for n in outputs)
        if use.constant:
            if varies:
                kinds.copied.add(use.key)
        elif not varies and not any(
            bool(_moved(each, None).any())
            for n in range(len(use.tensors))
            for each in _pairs(few, changed, number, n)
        ):
            kinds.fixed.add(use.key)
    return before != (len(kinds.fixed), len(kinds.copied))


def _slots(few: _Trace, many: _Trace, changed: Sequence[tuple[int, _Trace]]) -> dict[Key, list[Slot]]:
    """Return where the records stand in every use.

    Raises:
        ValueError: A use mixes records, or has no rows for each record.
    """
    slots: dict[Key, list[Slot]] = {}
    for number, use in enumerate(few.seen):
        found = []
        for n, value in enumerate(use.tensors):
            pairs = _pairs(few, changed, number, n)
            layout = _ordered(_layout(few, many, number, n), pairs, str(use.key))
            if layout is None and n >= len(use.inputs) and not use.constant:
                raise _mixes(str(use.key))
            if layout is not None and layout.rows > 1 and few.ragged:
                raise ValueError(
                    f"model: {use.key} merges records and positions after a mask chose rows, so that rows have no "
                    "fixed owner; keep the positions in a dimension of their own and mask them"
                )
            found.append(Slot(layout, value.ndim))
        if not use.constant and slots.setdefault(use.key, found) != found:
            raise ValueError(f"model: {use.key} sees records in different dimensions in two calls; keep one")
    for n, value in enumerate(few.output):
        layout = layout_of(value, many.output[n], _COUNTS)
        if layout is not None:
            pairs = [_Moved(record, value, trace.output[n]) for record, trace in changed]
            _ordered(layout, pairs, "the model")
    return slots


def _pairs(few: _Trace, changed: Sequence[tuple[int, _Trace]], number: int, n: int) -> list[_Moved]:
    before = few.seen[number].tensors[n]
    return [_Moved(record, before, trace.seen[number].tensors[n]) for record, trace in changed]


def _layout(few: _Trace, many: _Trace, number: int, n: int) -> Layout | None:
    use = few.seen[number]
    try:
        return layout_of(use.tensors[n], many.seen[number].tensors[n], _COUNTS)
    except ValueError as error:
        raise ValueError(
            f"model: a tensor of {use.key} {error}; no record has rows of its own in it"
        ) from None


def _ordered(layout: Layout | None, pairs: Sequence[_Moved], where: str) -> Layout | None:
    """Return the layout with the order of rows that explains which rows moved.

    Raises:
        ValueError: None does, or it cannot be told.
    """
    if layout is None:
        if any(bool(_moved(each, None).any()) for each in pairs):
            raise _mixes(where)
        return None
    orders = [layout] if layout.rows == 1 else [layout, layout._replace(interleaved=True)]
    fitting = [order for order in orders if _explains(order, pairs)]
    if not fitting:
        raise _mixes(where)
    if len(fitting) > 1:
        fitting = [order for order in orders if _explains(order, pairs, exact=True)]
    if len(fitting) != 1:
        raise ValueError(
            f"model: {where} merges records and positions, and which rows belong to a record cannot be seen; probe "
            "with records that differ"
        )
    return fitting[0]


def _explains(layout: Layout, pairs: Sequence[_Moved], *, exact: bool = False) -> bool:
    """Whether only rows of the changed records moved."""
    return not any(
        bool((_moved(each, layout.dim, exact=exact) & ~rows_of(layout, each.record, _COUNTS[0])).any())
        for each in pairs
    )


def _moved(pair: _Moved, dim: int | None, *, exact: bool = False) -> Tensor:
    """Return which rows of a dimension moved, or of all numbers, on the CPU."""
    before, after = pair.before, pair.after
    if before.shape != after.shape:
        return torch.ones(1, dtype=torch.bool)
    if dim is None:
        return moved_rows(before.reshape(1, -1), after.reshape(1, -1), 0, exact=exact).cpu()
    return moved_rows(before, after, dim, exact=exact).cpu()


def _mixes(where: str) -> ValueError:
    return ValueError(f"model: {where} mixes the records of a batch: {MIXES_REMEDY}")


def _components(groups: Sequence[frozenset[int]], count: int) -> list[list[int]]:
    """Return the connected components of parameters that share a use, in order."""
    heads = list(range(count))
    for group in groups:
        joined = {heads[n] for n in group}
        heads = [min(joined) if head in joined else head for head in heads]
    return [[n for n in range(count) if heads[n] == head] for head in sorted(set(heads))]
