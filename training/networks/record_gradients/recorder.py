"""Catch every use of a parameter in a forward pass, whatever module or function it stands in.

Models of the transformers package leave a mask out if it hides nothing in the whole batch, so that one record decides
for all others, and warn if a record ends in padding. They do neither while a graph is traced, so `unread_masks` makes
their `is_tracing` return True.
"""

from __future__ import annotations

import operator
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from opusim.training.networks.record_gradients.calls import Call, FlatSpec, Key, Kinds, Layout, Site
from opusim.training.networks.record_gradients.layers import (
    CELLS,
    RECURRENT,
    group_norm,
    unrolled,
    unrolled_cell,
)
from opusim.training.networks.record_gradients.uses import (
    CLOSED,
    EMBEDDINGS,
    copies,
    require_separate_records,
)

_PACKAGE, _NAME = "transformers", "is_tracing"


@contextmanager
def unread_masks() -> Iterator[None]:
    """Let models of transformers run within the block as if their graphs were traced; other packages see nothing."""
    modules = _modules(len(sys.modules)) if _PACKAGE in sys.modules else ()
    before = [vars(module)[_NAME] for module in modules]
    try:
        for module in modules:
            vars(module)[_NAME] = _always
        yield
    finally:
        for module, function in zip(modules, before, strict=True):
            vars(module)[_NAME] = function


def _always(*_: Any) -> bool:
    return True


@lru_cache(maxsize=1)
def _modules(loaded: int) -> tuple[ModuleType, ...]:
    """Return the modules of the package that ask whether a graph is traced, anew when more modules are loaded."""
    found = [module for name, module in sys.modules.items() if name.startswith(f"{_PACKAGE}.")]
    return tuple(module for module in found if isinstance(vars(module).get(_NAME), type(_always)))


_PLAIN = (Tensor, int, float, complex, str, slice, torch.dtype, torch.device)


class _Known(NamedTuple):
    """A parameter, or a tensor computed from parameters only: its name and the parameters it comes from."""

    tensor: Tensor
    name: str
    roots: frozenset[int]


class _Everything(TorchFunctionMode):
    """Hands all torch functions of a block to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See _handed."""
        if not all(kind in _OWN for kind in types):
            self._recorder.kinds.everything = True  # a tensor class of the user has functions of its own
        return _handed(Tensor, func, types, args, kwargs, self._recorder)


class _Local(threading.local):
    """The recorder of the thread's innermost block."""

    recorder: Recorder | None = None


_LOCAL = _Local()


def _handed(
    cls: type,
    func: Any,
    types: Collection[type],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    recorder: Recorder | None = None,
) -> Any:
    """Call a torch function, see torch for the arguments, and record it if a parameter is among them.

    The recorder is that of the thread's innermost block unless one is given.
    """
    options, self = kwargs or {}, recorder or _LOCAL.recorder
    if self is None:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **options)
    if func in _REPLACED:
        return self._replaced(func, args, options)
    with self._uncaught():
        if func in _FACTS or not torch.is_grad_enabled():
            return func(*args, **options)
        # 1. Flatten the arguments; functions of closed form take no tensors in containers.
        closed = func in CLOSED
        leaves: list[Any]
        spec: FlatSpec | TreeSpec
        if closed:
            leaves, spec = [*args, *options.values()], FlatSpec(len(args), tuple(options))
        elif self._mode is None or self._takes_known((args, options)):
            leaves, spec = tree_flatten((args, dict(options)))
        else:
            return func(*args, **options)
        places = tuple(n for n, leaf in enumerate(leaves) if id(leaf) in self._known)
        if not places:
            return func(*args, **options)
        # 2. A call that an earlier step made, with the same parameters and options, is known.
        signature: tuple[Any, ...] | None = None
        if closed and self._sites is not None and all(leaves[n].is_leaf for n in places):
            facts = [
                id(leaf) if n in places else (Tensor, leaf.ndim) if isinstance(leaf, Tensor) else leaf
                for n, leaf in enumerate(leaves)
            ]
            signature = func, spec, *(tuple(fact) if isinstance(fact, list) else fact for fact in facts)
            if (site := self._sites.get(signature)) is not None:
                return self._recorded(site, leaves)
        # 3. Any other one has to be of a kind that the probe has met.
        return self._settled(func, spec, leaves, places, signature)


class _WatchedParameter(nn.Parameter):
    """The class of a parameter within a recorder's block; outside, the parameter is an nn.Parameter again."""

    __torch_function__: Any = classmethod(_handed)


class _WatchedTensor(Tensor):
    """A tensor that is computed from parameters only."""

    __torch_function__: Any = classmethod(_handed)


_OWN = (Tensor, nn.Parameter, _WatchedParameter, _WatchedTensor)


class Recorder:
    """Catches the uses of parameters in a block.

    A use takes its parameters detached, so that autograd computes no gradients of theirs. Tensors that are computed
    from parameters only, such as a transposed weight, count as parameters; autograd keeps their graph.

    Within the block parameters have a class that hands only functions of parameters to the recorder. A probe hands over
    all functions, and so does a model that calls functions which must be replaced although they take no parameter.

    Attributes:
        kinds: What is known about uses.
        calls: Each use.

    Args:
        named: The parameters.
        kinds: What is known about uses.
        probing: Whether uses of any kind are accepted, and all functions are handed over.
    """

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], kinds: Kinds, *, probing: bool = False
    ) -> None:
        self.kinds = kinds
        self._sites = None if probing else kinds.sites
        self._blocks: list[tuple[ExitStack, tuple[Recorder | None, list[type[nn.Parameter]]] | None]] = []
        self._known = {id(p): _Known(p, name, frozenset({n})) for n, (name, p) in enumerate(named)}
        self._parameters = [parameter for _, parameter in named]
        kinds.everything |= any(type(parameter) not in _OWN for parameter in self._parameters)
        self._mode = _Everything(self) if probing or kinds.everything else None
        # Begins a block in which no torch function is handed over; a mode needs none, since torch leaves it meanwhile.
        self._uncaught: Callable[[], AbstractContextManager[Any]] = (
            torch._C.DisableTorchFunctionSubclass if self._mode is None else nullcontext
        )
        self._anchor = _anchor(named[0][1].device if named else torch.device("cpu"))
        self.calls: list[Call] = []

    def __enter__(self) -> Self:
        block, before = ExitStack(), None
        block.enter_context(unread_masks())
        if self._mode is not None:
            block.enter_context(self._mode)
        else:
            before = _LOCAL.recorder, [type(p) for p in self._parameters]
            _LOCAL.recorder = self
            for parameter in self._parameters:
                parameter.__class__ = _WatchedParameter
        self._blocks.append((block, before))
        return self

    def __exit__(self, *error: Any) -> None:
        block, before = self._blocks.pop()
        if before is not None:
            _LOCAL.recorder, kinds = before
            for parameter, kind in zip(self._parameters, kinds, strict=True):
                parameter.__class__ = kind
        block.close()

    def _settled(
        self,
        func: Any,
        spec: FlatSpec | TreeSpec,
        leaves: list[Any],
        places: tuple[int, ...],
        signature: tuple[Any, ...] | None,
    ) -> Any:
        """Call a function with parameters at some places of its flattened arguments, and record it.

        Raises ValueError if it mixes records, or the probe has not met its kind.
        """
        name = getattr(func, "__name__", str(func))
        facts = [self._known[id(leaves[n])] for n in places]
        others = tuple(n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and n not in places)
        tensors = [leaves[n] for n in others]
        key = Key(name, tuple(fact.name for fact in facts), tuple(tensor.ndim for tensor in tensors))
        roots = frozenset[int]().union(*(fact.roots for fact in facts))
        in_place = name.endswith("_") and not name.startswith("__")
        if others and (name == "__setitem__" or (in_place and 0 in places)):
            raise ValueError(
                f"model: {key} mixes parameters and records in place; take an operation that returns a new tensor, "
                "such as torch.cat"
            )
        if not others or key in self.kinds.fixed:
            args, options = spec.unflatten(leaves)
            return self._constants(key, roots, func(*args, **options))
        site = Site(func, spec, key, places, others, roots, in_place)
        if func in EMBEDDINGS:
            require_separate_records(site, leaves)
        return self._recorded(site, leaves, key, signature)

    def _recorded(
        self, site: Site, leaves: list[Any], key: Key | None = None, signature: tuple[Any, ...] | None = None
    ) -> Any:
        """Call a function with its parameters detached, and let the call receive the gradients of its outputs.

        Its kind, `key`, is not needed if it is known where the records stand; later calls find the site by the
        signature. Raises ValueError if it mixes records, returns complex numbers, or draws random ones.
        """
        # 1. The arguments without their graph.
        kept = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if site.in_place:
            kept[0] = kept[0].clone()
        place = kept[site.places[0]].device.type
        call = Call(
            site=site,
            wrt=[leaves[n] for n in site.places],
            leaves=kept,
            autocast=(torch.is_autocast_enabled(place), torch.get_autocast_dtype(place)),
            versions=[leaf._version for leaf in kept if isinstance(leaf, Tensor)],
        )
        # 2. The function; one of closed form draws no random numbers.
        free = list(leaves)
        for n in site.places:
            free[n] = kept[n]
        if isinstance(site.spec, FlatSpec):
            count = site.spec.positional
            options = dict(zip(site.spec.names, free[count:], strict=True))
            grouped = site.func is functional.group_norm
            result = (
                group_norm(call, *free[:count], **options) if grouped else site.func(*free[:count], **options)
            )
        else:
            result = _called_once(site, free, call.wrt[0].device)
        found, spec = ([result], None) if isinstance(result, Tensor) else tree_flatten(result)
        outputs = [n for n, leaf in enumerate(found) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        # 3. Where the records stand.
        if key is not None:
            if any(isinstance(leaf, Tensor) and leaf.is_complex() for leaf in found):
                raise ValueError(
                    f"model: {key} returns complex numbers, at which no gradient of a parameter is taken; compute it "
                    "from real and imaginary parts (torch.view_as_real)"
                )
            if not outputs:
                return result
            tensors = [*(kept[n] for n in site.others), *(found[n] for n in outputs)]
            site.layouts = self._layouts(key, site, tensors)
            if self._sites is not None:
                site.made = CLOSED[site.func](call) if site.func in CLOSED else None
                if signature is not None:
                    self._sites[signature] = site
        # 4. The gradients of the outputs.
        for n in outputs:
            output = found[n]
            if not output.requires_grad:
                fresh = output.clone() if output._is_view() else output
                output = _Anchored.apply(fresh, self._anchor)
            elif len(outputs) > 1:  # one output may be computed from another, whose gradient here is its own
                output = output.clone()
            call.deltas.append([])
            output.register_hook(call.deltas[-1].append)
            found[n] = output
        self.calls.append(call)
        return found[0] if spec is None else tree_unflatten(found, spec)

    def _replaced(self, func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Call the replacement of a function whose own arithmetic hides uses of parameters."""
        if func is functional.multi_head_attention_forward:
            with nullcontext() if self._mode is None else self._mode:
                return _attention(*args, **options)
        with self._uncaught():
            if func is functional.one_hot:
                classes = args[1] if len(args) > 1 else options.get("num_classes", -1)
                if not isinstance(classes, int) or classes <= 0 or not args:
                    return func(*args, **options)
                self.kinds.everything = True  # torch compares the classes with the largest number of a batch
                return (args[0].unsqueeze(-1) == torch.arange(classes, device=args[0].device)).long()
            if func in CELLS:
                return unrolled_cell(self._linear, func, *args, **options)
            return unrolled(self._linear, func, *args, **options)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply a linear map whose weight and bias are uses."""
        if self._mode is not None and torch.overrides.has_torch_function((x, weight)):
            with self._mode:  # a subclass has functions of its own
                return functional.linear(x, weight, bias)
        output: Tensor = _handed(Tensor, functional.linear, (), (x, weight, bias), recorder=self)
        return output

    def _takes_known(self, arguments: Iterable[Any]) -> bool:
        """Return whether a parameter, or a tensor computed from parameters only, is among arguments at any depth.

        Most calls take none; this check costs a fraction of `tree_flatten`.
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
        if isinstance(result, _PLAIN) and not isinstance(result, Tensor):
            return result
        leaves, spec = tree_flatten(result)
        for n, leaf in enumerate(leaves):
            if not (isinstance(leaf, Tensor) and leaf.requires_grad) or id(leaf) in self._known:
                continue
            name = f"{key}[{n}]" if len(leaves) > 1 else str(key)
            if key in self.kinds.copied:
                site = Site(copies, FlatSpec(1, ()), name, (0,), (), roots)
                leaves[n] = self._recorded(site, [leaf], Key("copies", (name,)))
                continue
            self._known[id(leaf)] = _Known(leaf, name, roots)
            if self._mode is None:
                leaf.__class__ = _WatchedTensor
            self._look_at_constant(key, leaf)
        return tree_unflatten(leaves, spec)

    def _look_at_constant(self, key: Key, tensor: Tensor) -> None:
        """Do nothing; a probe looks at tensors that are computed from parameters only."""

    def _layouts(self, key: Key, site: Site, tensors: Sequence[Tensor]) -> list[Layout | None]:
        """Return where the records stand in the tensors of a use; raise ValueError if its kind was not probed."""
        slots = self.kinds.slots.get(key)
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


class _Anchored(torch.autograd.Function):
    """Let autograd compute the gradient at an output that needs none otherwise."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None


def _called_once(site: Site, leaves: Sequence[Any], place: torch.device) -> Any:
    """Call a function, parameters detached, that may be called again for each record; refuse random numbers."""
    args, kwargs = site.spec.unflatten(leaves)
    before = _random_state(place)
    result = site.func(*args, **kwargs)
    with _unfollowed():
        draws = not torch.equal(before, _random_state(place))
    if draws:
        raise ValueError(
            f"model: {site.where} draws random numbers, which a second call would not repeat; move dropout into a "
            "module of its own"
        )
    return result


def _random_state(place: torch.device) -> Tensor:
    with _unfollowed():
        return torch.cuda.get_rng_state(place) if place.type == "cuda" else torch.get_rng_state()


@contextmanager
def _unfollowed() -> Iterator[None]:
    """Hide the operators of this block from trackers."""
    if not torch._C._len_torch_dispatch_stack():
        yield
        return
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


# torch's function hands itself to an active TorchFunctionMode as a whole; this copy does not, so that its inner calls
# can be caught
_attention = types.FunctionType(
    functional.multi_head_attention_forward.__code__,
    {**functional.multi_head_attention_forward.__globals__, "has_torch_function": operator.not_},
    functional.multi_head_attention_forward.__name__,
    functional.multi_head_attention_forward.__defaults__,
)
_REPLACED = {functional.multi_head_attention_forward, functional.one_hot, *RECURRENT, *CELLS}
_FACTS = {
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
}
"""Functions that tell of a tensor what no record changes, and return no tensor."""
