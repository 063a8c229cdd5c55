"""Where the records of a batch stand in a tensor, found by running a model on batches of two sizes.

Modules see records in different dimensions: (batch, T, n), (T, batch, n) in recurrent layers, or rows that merge
records and positions, (batch T, n) or (T batch, n). A dimension that happens to have the size of the batch says
nothing, so the layout comes from two batch sizes and from which rows move if one record changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


class Layout(NamedTuple):
    """The dimension of records in a tensor.

    Attributes:
        dim: The dimension, of size records * rows.
        rows: Rows of each record; the number may differ from batch to batch if it is above 1.
        interleaved: Whether row r of record i has the index r * records + i, instead of i * rows + r.
    """

    dim: int
    rows: int = 1
    interleaved: bool = False


class Rows(NamedTuple):
    """Arguments of which some tensors have a row for each record.

    Attributes:
        leaves: The arguments, flattened.
        held: Which of them have a row for each record.
        spec: How to put them together again.
        records: Number of records.
    """

    leaves: list[Any]
    held: list[bool]
    spec: TreeSpec
    records: int

    @classmethod
    def of(cls, values: Any) -> Self:
        """Take the first size of the first tensor for the number of records, and tensors of that size for records.

        Raises:
            ValueError: There is no record.
        """
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
        return self.mapped(lambda leaf: leaf[index.to(leaf.device)])._replace(records=len(index))

    def repeated(self, count: int) -> Self:
        """Return a number of records, the given ones in turn."""
        return self.take(torch.arange(count) % self.records)

    def put(self, record: int, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the records with one changed.

        Args:
            record: Its number.
            change: Maps its row of a tensor to the new one.
        """

        def put(leaf: Tensor) -> Tensor:
            changed = leaf.clone()
            changed[record] = change(leaf[record])
            return changed

        return self.mapped(put)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the arguments with all tensors changed that hold records."""
        return self._replace(
            leaves=[change(v) if h else v for v, h in zip(self.leaves, self.held, strict=True)]
        )


def finite(row: Tensor) -> Tensor:
    """Return numbers with 0 for those that are not finite."""
    return row.nan_to_num(0.0, 0.0, 0.0) if row.is_floating_point() else row


def with_nan(row: Tensor) -> Tensor:
    """Return a record of NaN; whole numbers stay."""
    return torch.full_like(row, torch.nan) if row.is_floating_point() else row


def split_records(values: Tensor, layout: Layout, records: int) -> Tensor:
    """View a tensor record by record, shape (records, ...), where each record keeps the number of dimensions.

    Raises:
        ValueError: The tensor does not hold the same number of rows of each record.
    """
    size = values.shape[layout.dim]
    rows, rest = divmod(size, records)
    if rest or (layout.rows == 1 and rows != 1):
        raise ValueError(
            f"model: a module receives {size} rows for {records} records, so that some rows have no owner; give every "
            "record the same number of rows"
        )
    if layout.interleaved:
        return values.unflatten(layout.dim, (rows, records)).movedim(layout.dim + 1, 0)
    return values.unflatten(layout.dim, (records, rows)).movedim(layout.dim, 0)


def layout_of(small: Tensor, large: Tensor, counts: tuple[int, int]) -> Layout | None:
    """Return the layout of a tensor whose shapes in batches of two sizes are known, up to the order of rows.

    Returns:
        The layout, or None if no size depends on the number of records.

    Raises:
        ValueError: The sizes depend on the number of records in another way.
    """
    few, many = counts
    if small.ndim != large.ndim:
        raise ValueError("has more dimensions in a larger batch")
    dims = [d for d in range(small.ndim) if small.shape[d] != large.shape[d]]
    if not dims:
        return None
    (dim, *others) = dims
    size = small.shape[dim]
    if others or size % few or size * many != large.shape[dim] * few:
        raise ValueError(
            f"has shape {tuple(small.shape)} in a batch of {few} and {tuple(large.shape)} in one of {many}"
        )
    return Layout(dim, size // few)


def moved_rows(before: Tensor, after: Tensor, dim: int, *, exact: bool = False) -> Tensor:
    """Return which indices of a dimension hold other numbers, shape (size,).

    A number that became NaN, or ceased to be, has moved.

    Args:
        before: Numbers.
        after: As many.
        dim: The dimension.
        exact: Whether moves by less than the rounding of the type count.
    """
    if before.is_floating_point():
        near = (before == after) | (before.isnan() & after.isnan())
        if not exact and before.numel():
            eps = torch.finfo(before.dtype).eps
            size = before.nan_to_num(0.0, 0.0, 0.0).abs().amax()
            near |= (before - after).abs() <= min(1000 * eps, max(0.01, 2 * eps)) * size
        differs = ~near
    else:
        differs = before != after
    return differs.movedim(dim, 0).flatten(1).any(dim=1) if differs.ndim > 1 else differs


def rows_of(layout: Layout, record: int, records: int) -> Tensor:
    """Return the indices along `layout.dim` that belong to a record, as a mask of shape (size,)."""
    index = torch.arange(records * layout.rows)
    owner = index % records if layout.interleaved else index // layout.rows
    return owner == record
