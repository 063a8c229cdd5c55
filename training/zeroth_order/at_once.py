"""Evaluate records on both sides of many directions in one forward pass.

For each of K directions and both signs the batch of b records is repeated, 2 K b rows in all, and every product with a
perturbed matrix W becomes, for the rows of direction j and sign s,

    y = x W + s phi (x A_j) B_j^T / sqrt(r),

with factors that are generated from the direction's seed inside the product and dropped after it. Perturbed vectors,
such as biases and the weights of norms, are added and multiplied row by row. What lies before the first perturbed
product is evaluated once, on b rows. No parameter is written to (EGGROLL, arXiv:2511.16652, evaluates so).

A mode of torch sees each function that receives a perturbed tensor. One that has no rule here, or rows that are not
where they should be, is found by passes on two numbers of records before the first step, and directions are then
evaluated one after another, in the parameters' own memory: the same directions, and equal losses up to rounding.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from opusim.medium.transmission import Direction
from opusim.training.zeroth_order.perturbation import InPlacePerturbation, factors, has_factors

_FACTS = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex"),
        *("is_contiguous", "element_size", "get_device", "is_tensor", "__len__", "__hash__"),
    }
)
"""Functions that read no number of a tensor."""
_SAME = frozenset({"to", "float", "contiguous", "type_as"})
"""Functions that may return their argument."""
_ELEMENTWISE = frozenset({"mul", "__mul__", "__rmul__", "add", "__add__", "__radd__", "sub", "__sub__"})
_PROBED = (1, 3)
"""Records of the two passes before the first step; two sizes tell the rows of records from other dimensions."""


class Uncovered(RuntimeError):
    """A function receives a trained tensor and has no rule here, or rows are not where they should be."""


class _Reached(Exception):
    """Raised at the first perturbed product; everything computed before holds for all directions."""


class _Watched(TorchFunctionMode):
    """Calls `perturbed` for each function that receives a perturbed tensor, and lets all others run.

    Args:
        perturbation: Holds the perturbed tensors.
    """

    def __init__(self, perturbation: InPlacePerturbation) -> None:
        super().__init__()
        found = sorted((tensor.data_ptr(), number) for number, tensor in enumerate(perturbation.tensors))
        self._starts = [start for start, _ in found]
        self._found = [(number, perturbation.tensors[number]) for _, number in found]
        self.perturbation = perturbation

    def number_of(self, value: object) -> int | None:
        """Return the number of a perturbed tensor, None for others; raise Uncovered for a part or form of one."""
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return None
        start = value.data_ptr()
        place = bisect.bisect_right(self._starts, start) - 1
        if place < 0 or not start:
            return None
        number, tensor = self._found[place]
        if start >= self._starts[place] + tensor.nbytes or value.device != tensor.device:
            return None
        if start != self._starts[place] or value.shape != tensor.shape or value.stride() != tensor.stride():
            raise Uncovered("a part of a trained tensor is used")
        return number

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look for perturbed tensors among the arguments."""
        kwargs = kwargs or {}
        if all(self.number_of(leaf) is None for leaf in _leaves((args, kwargs))):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _FACTS:
            return func(*args, **kwargs)
        if name == "__get__" or name in _SAME:  # an attribute, or perhaps the tensor itself
            found = func(*args, **kwargs)
            if found is args[0] or (name == "__get__" and not isinstance(found, Tensor)):
                return found
            raise Uncovered(f"{name} makes another tensor of a trained one")
        return self.perturbed(name, func, args, kwargs)

    def perturbed(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the function's result for its perturbed tensors."""
        raise _Reached


def _leaves(value: object) -> Iterator[object]:
    """Yield what stands in nested lists, tuples and mappings."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _leaves(each)
    else:
        yield value


class BothSides(_Watched):
    """Within this context a batch of rows (K, 2, b), flat, is evaluated along K directions, on both sides of each.

    Args:
        perturbation: Holds the tensors, phi and the rank.
        seeds: Seeds of the K directions.
        records: b.

    Attributes:
        rows: 2 K b.
        used: Numbers of the tensors that a function has received.
        per_row: Number of inputs of a row, for each function so far: 1, or a row's tokens in a flat batch.
    """

    def __init__(self, perturbation: InPlacePerturbation, seeds: Sequence[int], records: int) -> None:
        super().__init__(perturbation)
        self._directions, self._records = [Direction(seed) for seed in seeds], records
        self.rows = 2 * len(seeds) * records
        self.used: set[int] = set()
        self.per_row: list[int] = []
        self._rules: dict[Any, Callable[..., Tensor]] = {
            functional.linear: lambda input, weight, bias=None: self._product(
                functional.linear(input, weight), input, weight, bias, transposed=True
            ),
            torch.addmm: lambda bias, input, weight: self._product(  # transformers' Conv1D, rows and tokens
                torch.mm(input, weight), input, weight, bias, transposed=False
            ),
            functional.embedding: self._embedding,
            functional.layer_norm: self._layer_norm,
            functional.rms_norm: self._rms_norm,
        }

    def perturbed(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See _Watched.perturbed."""
        numbers = (self.number_of(leaf) for leaf in _leaves((args, kwargs)))
        self.used |= {number for number in numbers if number is not None}
        if func in self._rules:
            return self._rules[func](*args, **kwargs)
        if name in _ELEMENTWISE and len(args) == 2 and not kwargs:
            return func(*(self._sides(own, other) for own, other in (args, args[::-1])))
        raise Uncovered(f"{name} has no rule for a trained tensor")

    # Rules

    def _product(
        self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool
    ) -> Tensor:
        """Add to y = x W, in place, the bias and the effect of both perturbations."""
        number, directions = self.number_of(weight), len(self._directions)
        if self.number_of(x) is not None:
            raise Uncovered("a product has two trained tensors")
        self._require_rows(x)
        rows, moved = x.reshape(directions, -1, x.shape[-1]), y.view(directions, -1, y.shape[-1])
        if number is not None:
            found = self._factors(number, weight, x.dtype)
            if found is None:
                z = self._dense(number, weight).to(x.dtype)
                moved.baddbmm_(self._signed(rows), z.mT if transposed else z)
            else:
                left, right = reversed(found) if transposed else found
                if left.shape[1] > 1 or rows.device.type != "cpu":
                    products = rows @ left.mT  # rows (K, R, n) times factors (K, r, n)
                else:
                    parts = [torch.mv(own, factor[0]) for own, factor in zip(rows, left, strict=True)]
                    products = torch.stack(parts)[..., None]
                self._add_outer(moved, products, right)
        if bias is not None:
            wide = y.view(self.rows, -1, y.shape[-1])
            wide.add_(self._sides(bias, wide))
        return y

    def _embedding(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        number = self.number_of(weight)
        if number is None or max_norm is not None or input.ndim < 2:
            raise Uncovered("an embedding has a largest norm, or no rows")
        if len(input) == 1:  # positions
            input = input.expand(self.rows, *input.shape[1:])
        self._require_rows(input)
        y, places = functional.embedding(input, weight), input.reshape(len(self._directions), -1)
        moved, found = y.view(len(places), -1, y.shape[-1]), self._factors(number, weight, y.dtype)
        if found is None:
            z = self._dense(number, weight).to(y.dtype)
            moved.add_(self._signed(z.gather(1, places[..., None].expand(-1, -1, z.shape[2]))))
        else:
            left, right = found
            self._add_outer(moved, left.gather(2, places[:, None].expand(-1, left.shape[1], -1)).mT, right)
        return y

    def _layer_norm(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        y = functional.layer_norm(input, normalized_shape, None, None, eps)
        y = y if weight is None else y.mul_(self._sides(weight, y))
        return y if bias is None else y.add_(self._sides(bias, y))

    def _rms_norm(
        self, input: Tensor, normalized_shape: Sequence[int], weight: Tensor, eps: float | None = None
    ) -> Tensor:
        y = functional.rms_norm(input, normalized_shape, None, eps)
        return y.mul_(self._sides(weight, y))

    # Parts of rules

    def _require_rows(self, x: Tensor) -> int:
        """Return how many neighbours along the first axis belong to a row: 1, or any number in a matrix."""
        if x.ndim < 2 or len(x) % self.rows or (x.ndim > 2 and len(x) > self.rows):
            raise Uncovered(f"an input of shape {tuple(x.shape)} does not consist of {self.rows} rows")
        self.per_row.append(len(x) // self.rows)
        return len(x) // self.rows

    def _factors(self, number: int, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return A^T and B^T of the directions, or None if they are full."""
        rank = self.perturbation.rank
        if rank is None or not has_factors(weight.shape, rank):
            return None
        left, right = factors(self._directions, number, weight.shape, rank, weight.device)
        return left.to(dtype), right.to(dtype)

    def _dense(self, number: int, tensor: Tensor) -> Tensor:
        """Return z of each direction, float32, shape (K, *tensor.shape)."""
        found = self._factors(number, tensor, torch.float32)
        if found is not None:
            return (found[0].mT @ found[1]).div_(math.sqrt(found[0].shape[1]))
        z = torch.zeros(len(self._directions), *tensor.shape, device=tensor.device)
        for direction, own in zip(self._directions, z, strict=True):
            direction.add_to(own, number, 1.0)
        return z

    def _signed(self, rows: Tensor, scale: float = 1.0) -> Tensor:
        """Return rows (K, 2 b, ...) times phi scale on the plus side and -phi scale on the minus side."""
        phi = self.perturbation.phi * scale
        signs = torch.tensor([phi, -phi], dtype=rows.dtype, device=rows.device)
        split = rows.unflatten(1, (2, -1))
        return (split * signs.view(1, 2, *[1] * (split.ndim - 2))).flatten(1, 2)

    def _add_outer(self, y: Tensor, own: Tensor, factor: Tensor) -> None:
        """Add s phi own factor / sqrt(r) to y (K, rows, n), from own (K, rows, r) and factor (K, r, n)."""
        own = self._signed(own, 1 / math.sqrt(factor.shape[1]))
        if factor.shape[1] == 1:
            y.addcmul_(own, factor)  # faster than a product of matrices
        else:
            y.baddbmm_(own, factor)

    def _sides(self, tensor: Any, other: Any) -> Any:
        """Return a perturbed tensor on both sides, to broadcast against another's rows; any other value as it is."""
        number = self.number_of(tensor)
        if number is None:
            return tensor
        if not isinstance(other, Tensor) or self.number_of(other) is not None:
            raise Uncovered("a trained tensor is combined with another, or with a number")
        per_row = self._require_rows(other)
        free, z = other.ndim - 1 - tensor.ndim, self._dense(number, tensor)[:, None]  # (K, 1, *shape)
        if free == -1 and tensor.shape[0] == 1:
            z, tensor, free = z[:, :, 0], tensor[0], 0
        if free < 0:
            raise Uncovered("a trained tensor has the axes of a batch")
        z = self._signed(z.expand(-1, 2 * self._records * per_row, *tensor.shape))
        return (tensor + z).to(tensor.dtype).reshape(len(other), *[1] * free, *tensor.shape)


class TwoSides:
    """Evaluates records on both sides of directions: at once if all products are covered, else one after another.

    Attributes:
        at_once: Whether directions are evaluated at once.
        reason: Why they are not; empty if they are, or if no rank is given.

    Args:
        module: The functions to evaluate run it.
        perturbation: Moves its parameters, or holds them.
        rows: Most rows of a forward pass that evaluates directions at once; one direction is always allowed.
        around: Makes a context around each evaluation.
    """

    def __init__(
        self,
        module: nn.Module,
        perturbation: InPlacePerturbation,
        *,
        rows: int,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._module, self._perturbation, self._rows, self._around = module, perturbation, rows, around
        self.at_once, self.reason = False, ""
        self._shared: set[nn.Module] = set()

    def probe(self, function: Callable[..., Tensor], batch: Sequence[Any]) -> None:
        """Find out whether directions can be evaluated at once, by passes on one record and on three.

        The function maps tensors, a batch of at least one record, to a tensor with a row for each record, which depends
        on the record's rows only; other values than tensors are passed on as they are.
        """
        self.at_once, self.reason = False, ""
        shared, per_row = list[set[nn.Module]](), list[list[int]]()
        if self._perturbation.rank is None:
            return
        try:
            for count in _PROBED:
                own = tree_map(partial(_repeated, count=count), batch)
                shared.append(set(self._common(function, own, count)))
                mode = BothSides(self._perturbation, [0], count)
                self._pass(function, own, mode, count, {})
                per_row.append(mode.per_row)
                if len(mode.used) < len(self._perturbation.tensors):
                    raise Uncovered(
                        "a pass leaves out trained tensors, or uses some outside of torch's functions"
                    )
            if per_row[0] != per_row[1]:
                raise Uncovered("a product has inputs that do not belong to records")
        except Uncovered as error:
            self.reason = str(error)
            return
        self._shared, self.at_once = set.intersection(*shared), True

    def pairs(
        self,
        seeds: Sequence[int],
        function: Callable[..., Tensor],
        batch: Sequence[Any],
        *,
        records: int | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what a function returns on the plus side and on the minus side of each direction.

        The parameters are then at the minus side of the last direction, or at theta if directions are evaluated at
        once. Function and batch are as for `probe`; `records` are those of the batch if several share a row.
        """
        count = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), 1)
        if not self.at_once or not count:
            for place, seed in enumerate(seeds, start=1):
                sides = []
                for offset in (1, -2):
                    if not self.at_once:
                        self._perturbation.shift(seed, offset)
                    with torch.no_grad(), self._around():
                        sides.append(function(*batch))
                yield sides[0], sides[1]
                if place < len(seeds) and not self.at_once:
                    self._perturbation.shift(seed, 1)
            return
        together = max(1, self._rows // (2 * (records or count)))
        common = self._common(function, batch, count) if self._shared else {}
        for first in range(0, len(seeds), together):
            mode = BothSides(self._perturbation, seeds[first : first + together], count)
            found = self._pass(function, batch, mode, count, common)
            yield from ((plus, minus) for plus, minus in found.unflatten(0, (-1, 2, count)))

    def _pass(
        self,
        function: Callable[..., Tensor],
        batch: Sequence[Any],
        mode: BothSides,
        count: int,
        common: dict[nn.Module, Any],
    ) -> Tensor:
        """Return the function's result for all rows of a mode; the outputs in `common` are reused."""
        wide = partial(tree_map, partial(_tiled, times=mode.rows // count))
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._around())
            for module, output in common.items():
                stack.enter_context(_next_output(module, partial(wide, output)))
            with mode:
                found = function(*wide(batch))
        if not isinstance(found, Tensor) or not found.ndim or len(found) != mode.rows:
            raise Uncovered("the function does not return a row for each record")
        return found

    def _common(
        self, function: Callable[..., Tensor], batch: Sequence[Any], count: int
    ) -> dict[nn.Module, Any]:
        """Return the outputs of the outermost modules that finish, once, before the first perturbed product.

        Only outputs with a row for each record count; the others are computed again.
        """
        found, calls = dict[nn.Module, Any](), Counter[nn.Module]()

        def note(module: nn.Module, args: Any, output: Any) -> None:
            calls[module] += 1
            for part in module.modules():
                found.pop(part, None)
            leaves = tree_leaves(output)
            if all(isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == count for leaf in leaves):
                found[module] = output

        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._around())
            for module in self._module.modules():
                stack.callback(module.register_forward_hook(note).remove)
            stack.enter_context(suppress(_Reached))
            stack.enter_context(_Watched(self._perturbation))
            function(*batch)
        once = {module: output for module, output in found.items() if calls[module] == 1}
        return {module: once[module] for module in self._shared & set(once)} if self.at_once else once


@contextmanager
def _next_output(module: nn.Module, output: Callable[[], Any]) -> Iterator[None]:
    """Let the next call of a module within the block return an output instead of computing it."""
    before = vars(module).get("forward")

    def restore() -> None:
        if before is None:
            vars(module).pop("forward", None)
        else:
            module.forward = before

    def given(*args: Any, **kwargs: Any) -> Any:
        restore()
        return output()

    module.forward = given
    try:
        yield
    finally:
        restore()


def _repeated(leaf: Any, *, count: int) -> Any:
    """Repeat a tensor's first record `count` times; return anything else as it is."""
    return _tiled(leaf[:1], times=count) if isinstance(leaf, Tensor) and leaf.ndim else leaf


def _tiled(leaf: Any, *, times: int) -> Any:
    """Repeat a tensor's rows `times` times as a block; return anything else as it is."""
    return leaf.repeat(times, *[1] * (leaf.ndim - 1)) if isinstance(leaf, Tensor) and leaf.ndim else leaf
