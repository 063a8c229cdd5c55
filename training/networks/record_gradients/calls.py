"""A call of a torch function on parameters, the gradients that reached its outputs, and where its records stand.

Modules see records in different dimensions: (batch, T, n), (T, batch, n) in recurrent layers, or rows that merge
records and positions, (batch T, n) or (T batch, n).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from opusim.training.networks.contributions.uses import Use


class Layout(NamedTuple):
    """The dimension of records in a tensor, of size outer x records x inner.

    Record i holds the indices (o records + i) inner + r, with o below `outer` and r below `inner`.

    Attributes:
        dim: The dimension, counted from the first.
        outer: Rows of each record that stand a whole batch apart.
        inner: Neighbouring rows of each record.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    @property
    def rows(self) -> int:
        """Rows of each record in a probe's batch; if above 1, their number may differ in other batches."""
        return self.outer * self.inner

    def owners(self, records: int) -> Tensor:
        """Return the record of every index of the dimension, shape (outer x records x inner,)."""
        return torch.arange(records).repeat_interleave(self.inner).repeat(self.outer)


class Rows(NamedTuple):
    """Arguments, flattened, with how to rebuild them; those that are held have a row for each record."""

    leaves: list[Any]
    held: list[bool]
    spec: TreeSpec
    records: int

    @classmethod
    def of(cls, values: Any) -> Self:
        """Read the number of records, at least 1, from the first tensor; tensors of that first size hold records."""
        leaves, spec = tree_flatten(values)
        sizes = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        if not sizes or not sizes[0]:
            raise ValueError("model: the probe needs arguments with at least one record; give a few records")
        held = [isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == sizes[0] for leaf in leaves]
        return cls(leaves, held, spec, sizes[0])

    @property
    def values(self) -> Any:
        """The arguments as they were given."""
        return tree_unflatten(self.leaves, self.spec)

    @property
    def tensors(self) -> list[Tensor]:
        """Those that hold records; at least one."""
        return [leaf for leaf, held in zip(self.leaves, self.held, strict=True) if held]

    def take(self, index: Tensor) -> Self:
        """Return some records."""
        pairs = zip(self.leaves, self.held, strict=True)
        taken = [leaf[index.to(leaf.device)] if held else leaf for leaf, held in pairs]
        return self._replace(leaves=taken, records=len(index))

    def repeated(self, *counts: int) -> list[Self]:
        """Return batches of some numbers of records, the given ones in turn."""
        return [self.take(torch.arange(count) % self.records) for count in counts]

    def invented(self, count: int, below: int) -> Self:
        """Draw records of these shapes, unread: whole numbers below a limit, true, and real numbers N(0, 1)."""
        generator = torch.Generator().manual_seed(0)

        def drawn(leaf: Tensor) -> Tensor:
            shape = (count, *leaf.shape[1:])
            if leaf.is_floating_point() or leaf.is_complex():
                return torch.randn(shape, generator=generator).to(leaf)
            if leaf.dtype == torch.bool:
                return torch.ones(shape, dtype=torch.bool, device=leaf.device)
            return torch.randint(0, below, shape, generator=generator).to(leaf)

        return self.mapped(drawn)._replace(records=count)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply a change to all tensors that hold records."""
        return self._replace(
            leaves=[change(v) if h else v for v, h in zip(self.leaves, self.held, strict=True)]
        )


class FlatSpec(NamedTuple):
    """How to rebuild positional and named arguments without containers, in a fraction of a TreeSpec's time."""

    positional: int
    names: tuple[str, ...]

    def unflatten(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional arguments and the others by name."""
        return tuple(leaves[: self.positional]), dict(zip(self.names, leaves[self.positional :], strict=True))


@dataclass(slots=True)
class Site:
    """What all calls of one function on the same parameters have in common.

    Attributes:
        func: The function.
        spec: How to put its flattened arguments together.
        where: What the call is, for messages.
        places: Which arguments are parameters, or computed from parameters only.
        others: Which arguments are other tensors.
        roots: Numbers of the parameters that the call leads to.
        in_place: Whether the function overwrites its first argument.
        layouts: Where the records stand in the other tensors among the arguments, then in the outputs; empty until it
            is known.
        made: How the use of a call is made, for functions of closed form; None for others.
    """

    func: Callable[..., Any]
    spec: TreeSpec | FlatSpec
    where: Key | str
    places: tuple[int, ...]
    others: tuple[int, ...]
    roots: frozenset[int]
    in_place: bool = False
    layouts: Sequence[Layout | None] = ()
    made: Form | Callable[[Call, int], Use] | None = None

    def layout(self, leaf: int) -> Layout | None:
        """Return where the records stand in an argument; None if nowhere, or if it is not among `others`."""
        return self.layouts[self.others.index(leaf)] if leaf in self.others else None


class Form(NamedTuple):
    """How `of` makes the use of a call with one output from its signals and one argument h, record by record."""

    of: Callable[[Tensor, Tensor], Use]
    h: int


class Key(NamedTuple):
    """A kind of use: the function, the parameters (or what comes of them only), dimensions of the other tensors."""

    function: str
    names: tuple[str, ...]
    ndims: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.function}({', '.join(repr(name) for name in self.names)})"


class Slot(NamedTuple):
    """Where the records stand in one tensor of a use, which has `ndim` dimensions."""

    layout: Layout | None
    ndim: int

    @property
    def kind(self) -> tuple[int | None, bool, bool, int]:
        """The facts that may not vary between calls; numbers of rows may."""
        if self.layout is None:
            return None, False, False, self.ndim
        return self.layout.dim, self.layout.outer > 1, self.layout.inner > 1, self.ndim


@dataclass(kw_only=True)
class Kinds:
    """What a probe found out about the uses of a model.

    Attributes:
        fixed: Uses that depend on no record, though other tensors than parameters take part.
        copied: Uses of parameters only whose output holds a copy for each record.
        slots: Where the records stand in all other uses: in the inputs, then in the outputs.
        sites: Calls that steps have made, by function, parameters and options.
        everything: Whether a step must see functions that take no parameter, too.
    """

    fixed: set[Key] = field(default_factory=set)
    copied: set[Key] = field(default_factory=set)
    slots: dict[Key, list[Slot]] = field(default_factory=dict)
    sites: dict[tuple[Any, ...], Site] = field(default_factory=dict)
    everything: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """One call of a torch function on parameters, and the gradients at its outputs.

    Attributes:
        site: What it has in common with other calls.
        wrt: The parameters among its arguments, with the graph that led to them.
        leaves: The arguments, flattened and detached.
        autocast: Whether torch.autocast was on, and its type.
        versions: Of the tensors among the arguments, which in-place functions count up.
        deltas: The gradients that arrived at each output, one for each backward pass.
        group: Neighbouring records of the batch that count as one, such as those of a user.
        statistics: Mean and 1 / standard deviation of each group of a group norm; None if they were not kept.
    """

    site: Site
    wrt: list[Tensor]
    leaves: list[Any]
    autocast: tuple[bool, torch.dtype]
    versions: list[int]
    deltas: list[list[Tensor]] = field(default_factory=list)
    group: int = 1
    statistics: tuple[Tensor, Tensor] | None = None


def split_records(
    records: int,
    outputs: Iterable[tuple[Call, int]] = (),
    leaves: Iterable[tuple[Call, int]] = (),
    like: Iterable[tuple[Call, int, Tensor]] = (),
) -> list[Tensor]:
    """View tensors of calls record by record, shapes (records, ...), where each record keeps the number of dimensions.

    The tensors are the gradients at some outputs of calls, then arguments of calls, then tensors `like` an argument,
    whose records stand where theirs do. The number of rows of a record, or of a group of them, is the size of the
    dimension over the number of records, as only the operators of
    `opusim.training.networks.record_gradients.followed.tracking` led to it. Raises RuntimeError if an output has no
    gradient or a size is no such multiple, so that the module did not run as it did when it was prepared, and
    ValueError if an argument belongs to no record.
    """
    parts = list[tuple[Call, Tensor, Layout]]()
    for call, n in outputs:
        found, layout = call.deltas[n], call.site.layouts[len(call.site.others) + n]
        if not found or layout is None:
            raise RuntimeError(f"{call.site.where} has no gradient by record")
        parts.append((call, found[0].detach() if len(found) == 1 else torch.stack(found).sum(dim=0), layout))
    for call, n, values in (*((call, n, call.leaves[n]) for call, n in leaves), *like):
        layout = call.site.layouts[call.site.others.index(n)]
        if layout is None:
            raise ValueError(f"model: the input of {call.site.where} holds no records")
        parts.append((call, values, layout))
    apart = []
    for call, values, (dim, outer, inner) in parts:
        size, group = values.shape[dim], call.group
        rows, rest = divmod(size, records)
        if rest or rows % group or (outer * inner == 1 and rows != group):
            raise RuntimeError(
                f"model: an operator sees {size} rows for {records * group} records, other than when the model was "
                "prepared; let its Python code take the same path in every pass"
            )
        if outer > 1:
            cut = values.unflatten(dim, (rows // group, records, group)).movedim(dim + 1, 0)
            apart.append(cut.flatten(dim + 1, dim + 2))
            continue
        cut = values.unflatten(dim, (records, rows))
        apart.append(cut.movedim(dim, 0) if dim else cut)
    return apart


def require_inputs_kept(calls: Sequence[Call]) -> None:
    """Refuse (RuntimeError) inputs of calls that were overwritten between the forward and the backward pass."""
    for call in calls:
        if [leaf._version for leaf in call.leaves if isinstance(leaf, Tensor)] != call.versions:
            raise RuntimeError(
                f"model: an input of {call.site.where} was modified in place after its use; take the operation that is "
                "not in place (inplace=False)"
            )


class CallUse(Use):
    """A use that is one call on the records of a batch, whose outputs have received their gradients."""

    def __init__(self, call: Call, records: int) -> None:
        self.call, self.records, self.wrt = call, records, call.wrt
        inputs = sum(leaf.numel() for leaf in call.leaves if isinstance(leaf, Tensor))
        self.numbers = sum(t.numel() for t in self.wrt) + inputs // max(1, records)


class Bound(NamedTuple):
    """A call's arguments by name: values that are no tensors, and the tensors' places among the flattened ones."""

    values: dict[str, Any]
    places: dict[str, int]

    @classmethod
    def of(cls, site: Site, leaves: Sequence[Any], names: Sequence[str], defaults: dict[str, Any]) -> Bound:
        """Bind the flattened arguments of a call at a site to their names, in order, and to the defaults."""
        tensors = {n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        positional, others = site.spec.unflatten(range(len(leaves)))
        numbers = {**dict(zip(names, positional, strict=False)), **others}
        return cls(
            {**defaults, **{name: leaves[n] for name, n in numbers.items() if n not in tensors}},
            {name: n for name, n in numbers.items() if n in tensors},
        )

    def learnt(self, site: Site, name: str) -> int | None:
        """Return the index of an argument among the call's parameters, or None if it is no parameter."""
        place = self.places.get(name)
        return site.places.index(place) if place in site.places else None


def real_tensors(values: Any) -> list[Tensor]:
    """Return the floating-point tensors of what a function returns."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
