"""Find the records of a batch in a tensor, and in the arguments of a module.

Modules see records in different dimensions: (batch, T, n), (T, batch, n) in recurrent layers, or rows that merge
records and positions, (batch T, n) or (T batch, n).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


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
