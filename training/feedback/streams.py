"""Find residual streams that no normalisation bounds, in the first forward pass of a model with feedback points.

The projected error does not shrink as a stream grows, so such a stream may grow without bound. A point is in one if its
output is a residual sum, which its autograd graph shows (`unnormalised`), or is added to a residual sum later, as the
output of a branch in x + branch(norm(x)) is (`Followed`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_PASSED = (
    "View",
    "UnsafeView",
    "Reshape",
    "Transpose",
    "Permute",
    "Clone",
    "ToCopy",
    "NativeDropout",
    "Relu",
    "Gelu",
    "Silu",
)
"""Names of autograd nodes, before "Backward", that leave a residual sum unnormalised."""
_MOST_STEPS = 6
_SUMS = ("add", "radd", "iadd")
"""Names of torch's functions and operators, without underscores, that add two tensors."""
_FACTORS = ("mul", "rmul", "imul", "div", "idiv", "itruediv", "truediv")
_KEPT = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "relu", "gelu", "silu"),
    *("view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute"),
    *("clone", "contiguous", "to", "float", "half", "bfloat16", "double", "type", "type_as"),
)
"""Names of functions whose output grows in proportion to their first argument."""
_NORMS = (
    *("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "normalize"),
    *("mean", "var", "std", "var_mean", "norm", "pow", "square"),
)
"""Names of functions that normalise, or that a normalisation written out begins with."""


def unnormalised(calls: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Return the points whose outputs, by their graph, are residual sums that no normalisation follows."""
    found: dict[str, None] = {}
    for name, output in calls:
        node = _source(output.grad_fn)
        # A sum of summands that may both grow: neither is a bias or the output of a normalisation.
        if _operation(node) == "Add" and all(
            before is not None
            and type(before).__name__ != "AccumulateGrad"
            and "Norm" not in _operation(before)
            for before, _ in node.next_functions
        ):
            found[name] = None
    return list(found)


def _source(node: Any) -> Any:
    """Return the autograd node to whose output that of a node is proportional."""
    for _ in range(_MOST_STEPS):
        # a product with a constant keeps the scale, as in dropout
        before: Any = node.next_functions if node is not None else ()
        constant = _operation(node) == "Mul" and len(before) == 2 and before[1][0] is None
        if not before or not (constant or _operation(node) in _PASSED):
            break
        node = before[0][0]
    return node


def _operation(node: Any) -> str:
    """Return the name of an autograd node's operation."""
    return type(node).__name__.partition("Backward")[0]


@dataclass(eq=False)
class _Use:
    """How a pass uses a point's output: summed with one that may grow, read by a normalisation, or added as it is."""

    summed: bool = False
    normalised: bool = False
    added: bool = False


class Followed:
    """Follows the outputs of points through one forward pass, to find those that are added to a residual stream.

    A tensor that is followed is of a class of its own until `end`, so that torch hands over the functions that take it;
    values, gradients and all other tensors stay as they are.
    """

    def __init__(self) -> None:
        self._uses: list[_Use] = []
        self._tensors: list[weakref.ref[Tensor]] = []

    def start(self, returned: Tensor, computed: Tensor) -> None:
        """Follow what a point returns (`computed` has its graph), unless a normalisation at its end bounds it."""
        if _grows(computed) and type(returned) is Tensor:
            self.follow(returned, self.use())

    def use(self, *, summed: bool = False) -> _Use:
        """Return a new record of uses."""
        self._uses.append(_Use(summed=summed))
        return self._uses[-1]

    def follow(self, tensor: Tensor, use: _Use) -> None:
        """Note the uses of a tensor in this record."""
        if type(tensor) is Tensor:
            tensor.__class__ = _FollowedTensor
            self._tensors.append(weakref.ref(tensor))
        if type(tensor) is _FollowedTensor:
            tensor.followed, tensor.use = self, use

    def end(self) -> bool:
        """Stop, and return whether a point is added to an unnormalised stream.

        A residual stream x + branch(norm(x)) is read by a normalisation and added to the next branch as it is. In a
        post-norm block, norm(x + branch(x)), only the normalisation takes the sum; without norms, none takes it.
        """
        for reference in self._tensors:
            _release(reference())
        self._tensors = []
        return any(use.summed and use.normalised and use.added for use in self._uses)


class _FollowedTensor(Tensor):
    """A tensor whose uses are noted."""

    followed: Followed
    use: _Use

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Compute as with plain tensors, and note how those that are followed are used."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        followed = [tensor for tensor in tensors if type(tensor) is cls]
        if any(kind is not cls for kind in types):  # another class that says how its tensors are computed
            for tensor in followed:
                _release(tensor)
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            if followed and any(isinstance(leaf, Tensor) for leaf in tree_leaves(found)):
                name = getattr(func, "__name__", "").strip("_")
                owner, use = followed[0].followed, followed[0].use
                constant = len(followed) == 1 and all(t.is_leaf for t in tensors if t is not followed[0])
                if name in _SUMS:
                    if sum(map(_grows, tensors)) > 1:
                        for tensor in followed:
                            tensor.use.added = True
                        use = owner.use(summed=True)
                    owner.follow(found, use)
                elif name in _KEPT or (name in _FACTORS and constant):
                    owner.follow(found, use)
                else:
                    for tensor in followed:
                        tensor.use.normalised |= name in _NORMS
                    _release(found)  # if it was changed in place
        return found


def _grows(tensor: Tensor) -> bool:
    """Return whether a tensor is an activation that no normalisation bounds: followed, or computed from parameters."""
    if type(tensor) is _FollowedTensor:
        return True
    return tensor.grad_fn is not None and "Norm" not in _operation(_source(tensor.grad_fn))


def _release(tensor: Any) -> None:
    """Give a tensor that is followed its own class back."""
    if type(tensor) is _FollowedTensor:
        del tensor.followed, tensor.use
        tensor.__class__ = Tensor  # type: ignore[assignment]
