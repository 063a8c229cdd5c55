"""A call of a torch function on parameters, and the gradients that reached its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_leaves

from training.networks.contributions.uses import Use
from training.networks.record_gradients.layout import Layout, split_records


class FlatSpec(NamedTuple):
    """How to put arguments together again of which none holds tensors in a container; a fraction of a TreeSpec's time.

    Attributes:
        positional: Number of positional arguments, which stand first.
        names: Names of the others.
    """

    positional: int
    names: tuple[str, ...]

    def unflatten(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional arguments and the others by name."""
        return tuple(leaves[: self.positional]), dict(zip(self.names, leaves[self.positional :], strict=True))


class Call:
    """One call of a torch function on parameters, and the gradients at its outputs.

    Args:
        func: The function.
        leaves: Its arguments, flattened; parameters detached.
        spec: How to put them together again.
        places: Which leaves are parameters, or computed from parameters only.
        where: What the call is, for messages.
        in_place: Whether the function overwrites its first argument.

    Attributes:
        deltas: The gradient at each output; None until one arrives.
        autocast: Whether torch.autocast was on, and its type.
        layouts: Where the records stand in the other tensors among the arguments, then in the outputs.
        statistics: Of a group norm, the mean and 1 / standard deviation of each group; None if they were not kept.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        leaves: Sequence[Any],
        spec: TreeSpec | FlatSpec,
        places: Sequence[int],
        where: str,
        *,
        in_place: bool = False,
    ) -> None:
        self.func, self.spec, self.places, self.where = func, spec, tuple(places), where
        self.wrt: list[Tensor] = [leaves[n] for n in places]
        kept = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if in_place:
            kept[0] = kept[0].clone()
        self.leaves, self.in_place = kept, in_place
        place = self.wrt[0].device.type
        self.autocast = torch.is_autocast_enabled(place), torch.get_autocast_dtype(place)
        self._versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in kept]
        self.deltas: list[Tensor | None] = []
        self.layouts: list[Layout | None] = []
        self.statistics: tuple[Tensor, Tensor] | None = None

    @property
    def others(self) -> list[int]:
        """Which leaves are tensors but no parameters."""
        return [n for n, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and n not in self.places]

    def receive(self, output: int, gradient: Tensor) -> None:
        """Add a gradient at an output; backward calls it."""
        before, new = self.deltas[output], gradient.detach()
        self.deltas[output] = new if before is None else before + new

    def check_inputs(self) -> None:
        """Refuse inputs that were overwritten between the forward and the backward pass.

        Raises:
            RuntimeError: One was.
        """
        for leaf, version in zip(self.leaves, self._versions, strict=True):
            if isinstance(leaf, Tensor) and leaf._version != version:
                raise RuntimeError(
                    f"model: an input of {self.where} was modified in place after its use; take the operation that is "
                    "not in place (inplace=False)"
                )

    def output(self, number: int, records: int) -> Tensor:
        """Return the gradient at an output, record by record."""
        delta, layout = self.deltas[number], self.layouts[len(self.others) + number]
        if delta is None or layout is None:
            raise RuntimeError(f"{self.where} has no gradient by record")
        return split_records(delta, layout, records)

    def argument(self, leaf: int, records: int) -> Tensor:
        """Return an argument record by record.

        Raises:
            ValueError: It belongs to no record.
        """
        layout = self.layouts[self.others.index(leaf)]
        if layout is None:
            raise ValueError(f"model: the input of {self.where} holds no records")
        values: Tensor = self.leaves[leaf]
        return split_records(values, layout, records)


class CallUse(Use):
    """A use that is one call, whose outputs have received their gradients.

    Args:
        call: The call.
        records: Number of records in the batch.
    """

    def __init__(self, call: Call, records: int) -> None:
        self.call, self.records, self.wrt = call, records, call.wrt

    @property
    def numbers(self) -> int:
        """See Use: the parameters, and the inputs of a record."""
        inputs = [leaf.numel() for leaf in self.call.leaves if isinstance(leaf, Tensor)]
        return sum(t.numel() for t in self.wrt) + sum(inputs) // max(1, self.records)


def bound(
    call: Call, names: Sequence[str], defaults: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return a call's arguments by name, and the positions of tensors among its leaves."""
    args, kwargs = call.spec.unflatten(
        [_Place(n) if isinstance(leaf, Tensor) else leaf for n, leaf in enumerate(call.leaves)]
    )
    found = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    places = {name: value.number for name, value in found.items() if isinstance(value, _Place)}
    return found, places


class _Place:
    def __init__(self, number: int) -> None:
        self.number = number


def affine(call: Call, places: dict[str, int]) -> tuple[Tensor | None, Tensor | None]:
    """Return the weight and the bias that learn."""
    by_place = dict(zip(call.places, call.wrt, strict=True))
    weight, bias = (by_place.get(places.get(name, -1)) for name in ("weight", "bias"))
    return weight, bias


def real_tensors(values: Any) -> list[Tensor]:
    """Return the floating-point tensors of what a function returns."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
