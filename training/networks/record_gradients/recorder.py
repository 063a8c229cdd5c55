"""Catch every use of a parameter in a forward pass, whatever module or function it stands in."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from training.networks.record_gradients.calls import Call, FlatSpec
from training.networks.record_gradients.followed.placement import Held, Mixed, State
from training.networks.record_gradients.followed.tracking import RowTracker
from training.networks.record_gradients.layout import Layout
from training.networks.record_gradients.normalisation import group_norm
from training.networks.record_gradients.recurrent import (
    CELLS,
    RECURRENT,
    require_no_packing,
    unrolled,
    unrolled_cell,
)
from training.networks.record_gradients.unread import unread_masks
from training.networks.record_gradients.uses import closed_form, copies, require_separate_records

_PLAIN = (Tensor, int, float, complex, str, slice, torch.dtype, torch.device)


class Key(NamedTuple):
    """A kind of use.

    Attributes:
        function: Name of the torch function.
        names: Names of the parameters, or of the tensors that are computed from parameters only.
        ndims: Numbers of dimensions of the other tensors.
    """

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
        """What may not vary between calls; numbers of rows may."""
        if self.layout is None:
            return None, False, False, self.ndim
        return self.layout.dim, self.layout.outer > 1, self.layout.inner > 1, self.ndim


class _Known(NamedTuple):
    """A parameter, or a tensor computed from parameters only: its name and the parameters it comes from."""

    tensor: Tensor
    name: str
    roots: frozenset[int]


@dataclass(kw_only=True)
class Kinds:
    """What a probe found out about the uses of a model.

    Attributes:
        fixed: Uses that depend on no record, though other tensors than parameters take part.
        copied: Uses of parameters only whose output holds a copy for each record.
        slots: Where the records stand in all other uses: in the inputs, then in the outputs.
    """

    fixed: set[Key] = field(default_factory=set)
    copied: set[Key] = field(default_factory=set)
    slots: dict[Key, list[Slot]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of uses that depend on no record."""
        return len(self.fixed) + len(self.copied)


class Recorder(TorchFunctionMode):
    """Catches the uses of parameters in a block.

    A use takes its parameters detached, so that autograd computes no gradients of theirs. Tensors that are computed
    from parameters only, such as a transposed weight, count as parameters; autograd keeps how they came about.

    Attributes:
        calls: Each use, and the numbers of the parameters it leads to.

    Args:
        named: The parameters.
        kinds: What is known about uses.
        probing: Whether uses of unknown kinds are accepted.
        tracker: In a probe, knows where the records stand, so that kinds are noted; or None if nothing is noted.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        kinds: Kinds,
        *,
        probing: bool = False,
        tracker: RowTracker | None = None,
    ) -> None:
        super().__init__()
        self._kinds, self._probing, self._tracker = kinds, probing, tracker
        self._masks = ExitStack()
        self._known: dict[int, _Known] = {}  # by id; the tensors are kept, so that no other takes an id over
        for number, (name, parameter) in enumerate(named):
            self._note(parameter, name, frozenset({number}))
        self._anchor = _anchor(named[0][1].device)
        self.calls: list[tuple[Call, frozenset[int]]] = []
        self._found: list[tuple[Key, list[Slot]]] = []
        self._fixed, self._copied = set[Key](), set[Key]()

    def __enter__(self) -> Self:
        self._masks.enter_context(unread_masks())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._masks.close()

    def __torch_function__(
        self,
        func: Any,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a torch function, and record it if a parameter is among its arguments."""
        options = dict(kwargs or {})
        if func is functional.multi_head_attention_forward:
            with self:
                return _attention(*args, **options)
        if func in RECURRENT:
            require_no_packing(args)
            return unrolled(self._linear, func, *args, **options)
        if func in CELLS:
            return unrolled_cell(self._linear, func, *args, **options)
        if func is functional.one_hot and (classes := _classes(args, options)) is not None:
            return (args[0].unsqueeze(-1) == torch.arange(classes, device=args[0].device)).long()
        name = getattr(func, "__name__", str(func))
        if not torch.is_grad_enabled() or not self._takes_known((args, options)):
            return func(*args, **options)
        leaves, spec = _flattened(func, args, options)
        places = [n for n, leaf in enumerate(leaves) if id(leaf) in self._known]
        facts = [self._known[id(leaves[n])] for n in places]
        others = [leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and n not in places]
        key = Key(name, tuple(fact.name for fact in facts), tuple(leaf.ndim for leaf in others))
        roots = frozenset[int]().union(*(fact.roots for fact in facts))
        in_place = name.endswith("_") and not name.startswith("__")
        if others and (name == "__setitem__" or (in_place and 0 in places)):
            raise ValueError(
                f"model: {key} mixes parameters and records in place; take an operation that returns a new tensor, "
                "such as torch.cat"
            )
        self._require_plain(key, others)
        if not others or key in self._kinds.fixed:
            return self._constants(key, roots, func(*args, **options))
        call = Call(func, leaves, spec, places, str(key), in_place=in_place)
        return self._recorded(call, key, roots, _run(call, leaves))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply a linear map whose weight and bias are uses."""
        if torch.overrides.has_torch_function((x, weight)):  # a subclass has functions of its own
            with self:
                return functional.linear(x, weight, bias)
        output: Tensor = self.__torch_function__(functional.linear, (), (x, weight, bias))
        return output

    def _note(self, tensor: Tensor, name: str, roots: frozenset[int]) -> None:
        """Take a tensor for a parameter, or for one computed from parameters only."""
        self._known[id(tensor)] = _Known(tensor, name, roots)

    def _takes_known(self, arguments: Iterable[Any]) -> bool:
        """Whether a parameter, or a tensor computed from parameters only, is among arguments at any depth.

        Most calls take none; this look costs a fraction of `tree_flatten`.
        """
        known, waiting = self._known, [arguments]
        while waiting:
            for each in waiting.pop():
                if id(each) in known:
                    return True
                if each is None or isinstance(each, _PLAIN):
                    continue
                if isinstance(each, (tuple, list)):
                    waiting.append(each)
                elif isinstance(each, dict):
                    waiting.append(each.values())
                elif any(id(leaf) in known for leaf in tree_leaves(each)):
                    return True
        return False

    def _constants(self, key: Key, roots: frozenset[int], result: Any) -> Any:
        """Follow tensors that are computed from parameters only."""
        leaves, spec = tree_flatten(result)
        for n, leaf in enumerate(leaves):
            if not (isinstance(leaf, Tensor) and leaf.requires_grad) or id(leaf) in self._known:
                continue
            name = f"{key}[{n}]" if len(leaves) > 1 else str(key)
            if key in self._kinds.copied:
                call = Call(copies, [leaf], tree_flatten(((leaf,), {}))[1], [0], name)
                leaves[n] = self._recorded(call, Key("copies", (name,)), roots, leaf.detach().clone())
                continue
            self._note(leaf, name, roots)
            if isinstance(self._state(key, leaf), Held):
                self._copied.add(key)
        return tree_unflatten(leaves, spec)

    def _state(self, key: Key, tensor: Tensor) -> State:
        """Return what a tensor of a use holds, in a probe.

        Raises:
            ValueError: It mixes records.
        """
        state = None if self._tracker is None else self._tracker.state(tensor)
        if self._tracker is not None and isinstance(state, Mixed):
            with self._tracker.noting():
                raise ValueError(
                    f"model: {key} mixes the records of a batch ({state.reason}): {state.remedy}"
                )
        return state

    def _require_plain(self, key: Key, tensors: Sequence[Tensor]) -> None:
        """Refuse uses within torch.vmap and torch.func, which hand out no tensors of the batch.

        Raises:
            ValueError: It is one.
        """
        if self._probing and any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
            raise ValueError(
                f"model: {key} runs within torch.vmap or torch.func, where the rows of records cannot be told; "
                "call the module on the whole batch"
            )

    def _recorded(self, call: Call, key: Key, roots: frozenset[int], result: Any) -> Any:
        """Keep a call, and let it receive the gradients of its outputs."""
        leaves, spec = tree_flatten(result)
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        outputs = [leaves[n] for n in places]
        if any(isinstance(leaf, Tensor) and leaf.is_complex() for leaf in leaves):
            raise ValueError(
                f"model: {key} returns complex numbers, at which no gradient of a parameter is taken; compute it from "
                "real and imaginary parts (torch.view_as_real)"
            )
        if not outputs:
            return result
        call.deltas = [None] * len(outputs)
        tensors = [*(call.leaves[n] for n in call.others), *outputs]
        call.layouts = self._noted(key, call, tensors) if self._probing else self._layouts(key, tensors)
        apart = len(outputs) > 1
        for number, (place, output) in enumerate(zip(places, outputs, strict=True)):
            if not output.requires_grad:
                fresh = output.clone() if output._is_view() else output
                output = _Anchored.apply(fresh, self._anchor)
            elif apart:
                output = (
                    output.clone()
                )  # one output may be computed from another, whose gradient here is its own
            output.register_hook(_Receiver(call, number))
            leaves[place] = output
        self.calls.append((call, roots))
        return tree_unflatten(leaves, spec)

    def _noted(self, key: Key, call: Call, tensors: Sequence[Tensor]) -> list[Layout | None]:
        """Note where the records stand in the tensors of a use, in a probe."""
        if self._tracker is None:
            return [None for _ in tensors]
        states = [self._state(key, tensor) for tensor in tensors]
        layouts = [state.layout if isinstance(state, Held) else None for state in states]
        inputs = len(call.others)
        if not any(layouts):
            self._fixed.add(key)
            return layouts
        for layout in layouts:
            if layout is not None and layout.outer > 1 and layout.inner > 1:
                raise ValueError(
                    f"model: {key} sees rows of a record both as neighbours and a whole batch apart; keep positions in "
                    "a dimension of their own"
                )
        if None in layouts[inputs:]:
            raise ValueError(
                f"model: {key} mixes the records of a batch: its result has no rows for each record"
            )
        if call.func is copies and layouts[0] is not None and layouts[0].rows > 1:
            raise ValueError(
                f"model: {call.where} repeats parameters for each record within a dimension of positions; expand it by "
                "record, into a dimension of its own"
            )
        slots = zip(layouts, tensors, strict=True)
        self._found.append((key, [Slot(layout, tensor.ndim) for layout, tensor in slots]))
        return layouts

    def is_settled(self) -> bool:
        """Take uses that depend on no record for known, and return whether all were known before."""
        kinds, before = self._kinds, self._kinds.size
        kinds.fixed |= self._fixed
        kinds.copied |= self._copied
        return kinds.size == before

    def settle(self) -> None:
        """Take what a probe found about uses for known.

        Raises:
            ValueError: Two calls of a kind see records in different dimensions.
        """
        slots = self._kinds.slots
        for key, found in self._found:
            if key in self._kinds.fixed or [slot.kind for slot in slots.setdefault(key, found)] != [
                slot.kind for slot in found
            ]:
                raise ValueError(
                    f"model: {key} sees records in different dimensions in two calls, or constants in one; keep one"
                )

    def _layouts(self, key: Key, tensors: Sequence[Tensor]) -> list[Layout | None]:
        """Return where the records stand in the tensors of a use."""
        slots = self._kinds.slots.get(key)
        if slots is None or [slot.ndim for slot in slots] != [tensor.ndim for tensor in tensors]:
            raise ValueError(
                f"model: {key} is a use of a parameter that the probe has not seen; probe the model in the mode and "
                "with the kind of records of its training"
            )
        return [slot.layout for slot in slots]


@lru_cache
def _anchor(place: torch.device) -> Tensor:
    """Return a number that needs a gradient, and never gets one."""
    return torch.zeros((), requires_grad=True, device=place)


class _Receiver(NamedTuple):
    """Hook of an output."""

    call: Call
    number: int

    def __call__(self, gradient: Tensor) -> None:
        self.call.receive(self.number, gradient)


class _Anchored(torch.autograd.Function):
    """Let autograd compute the gradient at an output that needs none otherwise."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None


def _run(call: Call, leaves: Sequence[Any]) -> Any:
    """Call the function with its parameters detached.

    Raises:
        ValueError: It mixes records, or it draws random numbers and would have to be called again for each record.
    """
    require_separate_records(call)
    free = [leaf.detach() if n in call.places else leaf for n, leaf in enumerate(leaves)]
    args, kwargs = call.spec.unflatten(free)
    if call.func is functional.group_norm:
        return group_norm(call, *args, **kwargs)
    if closed_form(call.func):
        return call.func(*args, **kwargs)
    place = call.wrt[0].device
    before = _random_state(place)
    result = call.func(*args, **kwargs)
    if not _is_random_state(before, place):
        raise ValueError(
            f"model: {call.where} draws random numbers, which a second call would not repeat; move dropout into a "
            "module of its own"
        )
    return result


def _flattened(
    func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[list[Any], FlatSpec | TreeSpec]:
    """Flatten arguments; functions of closed form take no tensors in containers."""
    if closed_form(func):
        return [*args, *options.values()], FlatSpec(len(args), tuple(options))
    return tree_flatten((args, options))


def _classes(args: Sequence[Any], options: Mapping[str, Any]) -> int | None:
    """Return a given number of classes of one_hot, which torch compares with the largest number of a batch."""
    classes = args[1] if len(args) > 1 else options.get("num_classes", -1)
    return classes if isinstance(classes, int) and classes > 0 and args else None


def _random_state(place: torch.device) -> Tensor:
    with _unfollowed():
        return torch.cuda.get_rng_state(place) if place.type == "cuda" else torch.get_rng_state()


def _is_random_state(state: Tensor, place: torch.device) -> bool:
    with _unfollowed():
        return torch.equal(state, _random_state(place))


@contextmanager
def _unfollowed() -> Iterator[None]:
    """Let no tracker see the operators of this block."""
    if not torch._C._len_torch_dispatch_stack():
        yield
        return
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _transparent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function of torch.nn.functional whose inner calls can be caught.

    The function hands itself to an active TorchFunctionMode as a whole; the copy does not.
    """
    code = function.__code__
    scope = {**function.__globals__, "has_torch_function": lambda tensors: False}
    return types.FunctionType(code, scope, code.co_name, function.__defaults__)


_attention = _transparent(functional.multi_head_attention_forward)
