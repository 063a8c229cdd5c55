"""The operators whose rows are known: for each one, where the records stand in its results.

A rule takes an operation on tensors that hold records and returns the state of each result (see
`training.networks.record_gradients.placement`). Operators that no table names have no rule and are refused. Operators
on tensors that hold no record need no rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from training.networks.record_gradients.layout import Layout
from training.networks.record_gradients.placement import (
    Held,
    Mixed,
    Refused,
    State,
    joined,
    moved_state,
    strided_like,
)

REDUCE_REMEDY = (
    "no guarantee for records covers it; use modules that process records independently, such as nn.GroupNorm or "
    "nn.LayerNorm instead of batch statistics, or train without protection"
)
_ORDER_REMEDY = "keep every record in its own row, in the order of the batch, and leave positions out with torch.where or a product"
_TABLE_REMEDY = "look rows up in parameters or constants, or in the record's own row (torch.gather)"


@dataclass(frozen=True)
class Operation:
    """One call of an operator.

    Attributes:
        func: The operator's overload.
        name: Its name, without the mark of an operator in place.
        where: The operator and the submodule, for messages.
        arguments: Its arguments by name.
        states: The states of its tensors, by id.
        records: Number of records.
    """

    func: Any
    name: str
    where: str
    arguments: dict[str, Any]
    states: dict[int, State]
    records: int

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def state(self, tensor: Tensor | None) -> State:
        """Return the state of an argument before the call."""
        return None if tensor is None else self.states[id(tensor)]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return [leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, Tensor)]

    def pairs(self, *names: str) -> list[tuple[Tensor, State]]:
        """Return tensors of these names, or all, and their states."""
        given = [self[name] for name in names] if names else self.tensors
        return [(tensor, self.state(tensor)) for tensor in given if isinstance(tensor, Tensor)]

    def mixed(self, reason: str, remedy: str = REDUCE_REMEDY) -> Mixed:
        """Return the state of results that depend on several records."""
        return Mixed(f"{self.where} {reason}", remedy)

    def require_none(self, *names: str) -> None:
        """Refuse records in arguments that every record shares."""
        for name in names:
            if self.state(self[name]) is not None:
                raise Refused(
                    f"takes numbers of the batch for its {name}",
                    "compute weights and tables from parameters and constants only",
                )


Outputs = list[Tensor | None]
Rule = Callable[[Operation, Outputs], State | list[State]]


def _pointwise(op: Operation, outputs: Outputs) -> State | list[State]:
    """Combine numbers that stand at the same place, with broadcasting."""
    ndim = max(t.ndim for t in outputs if t is not None)
    state, size = joined(op.pairs(), ndim)
    if not isinstance(state, Held):
        return state
    dim = state.layout.dim
    return [state if t is not None and t.ndim > dim and t.shape[dim] == size else None for t in outputs]


def _dims(op: Operation, ndim: int, name: str = "dim") -> list[int]:
    """Return dimensions as numbers from 0; all of them if none are given."""
    given = op[name]
    dims = [given] if isinstance(given, int) else list(given or ())
    return [dim % max(ndim, 1) for dim in dims] or list(range(ndim))


def _reduced(op: Operation, outputs: Outputs) -> State:
    """Reduce dimensions, one result for all numbers along them."""
    tensor, state = _single(op)
    if not isinstance(state, Held):
        return state
    dims, dim = _dims(op, tensor.ndim), state.layout.dim
    if dim in dims:
        return op.mixed("reduces over the records")
    moved = dim if op["keepdim"] else dim - sum(each < dim for each in dims)
    return Held(state.layout._replace(dim=moved))


def _along(op: Operation, outputs: Outputs) -> State | list[State]:
    """Work along a dimension, numbers of one line depending on each other."""
    state = _pointwise(op, outputs)
    for tensor, own in op.pairs():
        if isinstance(own, Held) and own.layout.dim in _dims(op, tensor.ndim):
            raise Refused("works along the records", _ORDER_REMEDY)
    return state


def _single(op: Operation) -> tuple[Tensor, State]:
    """Return the only tensor."""
    (pair,) = op.pairs()
    return pair


def _moved(op: Operation, outputs: Outputs) -> State | list[State]:
    """Move numbers; those of records are moved likewise to see where they go."""
    given = op.pairs()
    if mixed := _first_mixed(given):
        return mixed
    as_strided = op.name == "as_strided"
    if op.name in _VIEWS and "size" not in op.arguments:
        raise Refused("reads the bits of numbers as another type", "convert numbers with Tensor.to")

    def move(coded: dict[int, Tensor]) -> list[Tensor]:
        def place(leaf: Any) -> Any:
            return coded.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

        arguments = tree_map(place, op.arguments)
        if op.name in _VIEWS:
            return [arguments["self"].reshape(arguments["size"])]
        if as_strided:
            arguments["self"] = strided_like(op["self"], arguments["self"])
            arguments["storage_offset"] = (op["storage_offset"] or 0) - op["self"].storage_offset()
        if "value" in arguments and not isinstance(arguments["value"], Tensor):
            arguments["value"] = 0.0
        found = op.func(**arguments)
        return [found] if isinstance(found, Tensor) else list(found)

    fixed = [
        pair for pair in given if pair[0].dtype.is_floating_point or pair[1] is not None or op.name in _JOINS
    ]
    return moved_state(fixed, op.records, move)


def _squeezed(op: Operation, outputs: Outputs) -> State | list[State]:
    if "dim" not in op.arguments and isinstance(_single(op)[1], Held):
        raise Refused(
            "drops the records' dimension in a batch of one", "name the dimension, as in x.squeeze(-1)"
        )
    return _moved(op, outputs)


def _unfolded_back(op: Operation, outputs: Outputs) -> State:
    state = _single(op)[1]
    if isinstance(state, Held) and state.layout.dim == op["dim"] % len(op["input_sizes"]):
        raise Refused("works along the records", _ORDER_REMEDY)
    return state


def _loss(op: Operation, outputs: Outputs) -> State | list[State]:
    """A loss for each number, or one of all records."""
    if op["reduction"] == 0 and op.name != "nll_loss_forward":
        return _pointwise(op, outputs)
    return _first_mixed(op.pairs()) or op.mixed(
        "joins the losses of records", "return outputs; losses belong outside"
    )


def _first_mixed(pairs: Sequence[tuple[Tensor, State]]) -> Mixed | None:
    return next((state for _, state in pairs if isinstance(state, Mixed)), None)


# Products


def _product(op: Operation, a: Tensor, b: Tensor) -> State:
    """Return the state of a matrix product, (..., n, k) by (..., k, m)."""
    pairs = [(a, op.state(a)), (b, op.state(b))]
    if mixed := _first_mixed(pairs):
        return mixed
    (_, first), (_, second) = pairs
    ndim = a.ndim
    inner = isinstance(first, Held) and first.layout.dim == ndim - 1
    if inner or (isinstance(second, Held) and second.layout.dim == ndim - 2):
        return op.mixed("sums over the records")
    if first is None or second is None:
        return first or second
    if ndim < 3 or not first.layout.dim == second.layout.dim < ndim - 2:
        raise Refused("multiplies rows of different records", _ORDER_REMEDY)
    return joined(pairs, ndim)[0]


def _mm(op: Operation, outputs: Outputs) -> State:
    return _product(op, op["self"], op["mat2"])


def _mv(op: Operation, outputs: Outputs) -> State:
    vector = op["vec"]
    op.states[id(column := vector.unsqueeze(1))] = op.state(vector)
    return _product(op, op["self"], column)


def _dot(op: Operation, outputs: Outputs) -> State:
    return _first_mixed(op.pairs()) or op.mixed("sums over the records")


def _added(product: Callable[[Operation], State]) -> Rule:
    def rule(op: Operation, outputs: Outputs) -> State:
        (result,) = outputs
        if result is None:
            return None
        pairs = [(op["self"], op.state(op["self"])), (result, product(op))]
        return joined(pairs, result.ndim)[0]

    return rule


def _linear(op: Operation, outputs: Outputs) -> State:
    op.require_none("weight", "bias")
    values = op["input"] if op["input"] is not None else op["self"]
    state = op.state(values)
    if isinstance(state, Held) and state.layout.dim == values.ndim - 1:
        return op.mixed("sums over the records")
    return state


def _trilinear(op: Operation, outputs: Outputs) -> State:
    """The sum over some dimensions of the product of three tensors, which get new dimensions first."""
    pairs: list[tuple[Tensor, State]] = []
    ndim = op["i1"].ndim + len(op["expand1"])
    for n in (1, 2, 3):
        tensor, state = op[f"i{n}"], op.state(op[f"i{n}"])
        for dim in sorted(d % ndim for d in op[f"expand{n}"]):
            tensor = tensor.unsqueeze(dim)
            if isinstance(state, Held) and state.layout.dim >= dim:
                state = Held(state.layout._replace(dim=state.layout.dim + 1))
        pairs.append((tensor, state))
    state, _ = joined(pairs, ndim)
    if not isinstance(state, Held):
        return state
    dims = [dim % ndim for dim in op["sumdim"]]
    if state.layout.dim in dims:
        return op.mixed("sums over the records")
    return Held(state.layout._replace(dim=state.layout.dim - sum(d < state.layout.dim for d in dims)))


# Convolutions, norms, attention


def _with_weight_gradients(state: State, op: Operation, outputs: Outputs) -> list[State]:
    """The gradient of the input, then those of what every record shares."""
    return [state, *(op.mixed("sums gradients over the records") for _ in outputs[1:])]


def _convolution(op: Operation, outputs: Outputs) -> State | list[State]:
    op.require_none("weight", "bias")
    values = op["input"]
    state = op.state(values) or op.state(op["grad_output"])
    if isinstance(state, Held) and state.layout.dim:
        raise Refused(
            "sees the records in another dimension than the first", "give it (records, channels, ...)"
        )
    return state if op["grad_output"] is None else _with_weight_gradients(state, op, outputs)


def _layer_norm(op: Operation, outputs: Outputs) -> State | list[State]:
    op.require_none("weight", "bias")
    shared = {id(op["weight"]), id(op["bias"])}
    values = op["input"]
    state, _ = joined([pair for pair in op.pairs() if id(pair[0]) not in shared], values.ndim)
    if isinstance(state, Held) and state.layout.dim >= values.ndim - len(op["normalized_shape"]):
        return op.mixed("normalises over the records")
    return _with_weight_gradients(state, op, outputs) if op.name.endswith("backward") else state


def _group_norm(op: Operation, outputs: Outputs) -> State | list[State]:
    op.require_none("weight", "bias")
    shared = {id(op["weight"]), id(op["bias"])}
    state, _ = joined(
        [pair for pair in op.pairs() if id(pair[0]) not in shared], op["input"].ndim, leading=True
    )
    if isinstance(state, Held) and state.layout.dim:
        return op.mixed("normalises over the records")
    return _with_weight_gradients(state, op, outputs) if op.name.endswith("backward") else state


def _batch_norm(op: Operation, outputs: Outputs) -> State | list[State]:
    """Statistics for each channel; they are a record's own if its channels are, as in an instance norm."""
    backward = op.name.endswith("backward")
    shared = [
        op[n]
        for n in ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "reserve")
    ]
    ids = {id(tensor) for tensor in shared if tensor is not None}
    state, _ = joined([pair for pair in op.pairs() if id(pair[0]) not in ids], op["input"].ndim)
    own = _first_mixed([(t, op.state(t)) for t in shared if t is not None])
    if own is not None or not isinstance(state, Held):
        return own or state
    training = op["train" if backward else "training"]
    if state.layout.dim == 1:
        channels = Held(state.layout._replace(dim=0))
        for tensor in shared:
            if tensor is not None and tensor.numel() and op.state(tensor) not in (None, channels):
                raise Refused("combines rows of different records", _ORDER_REMEDY)
        return [state, *(channels if t is not None and t.numel() else None for t in outputs[1:])]
    if training or any(op.state(tensor) is not None for tensor in shared):
        return op.mixed("computes statistics over the records")
    return _with_weight_gradients(state, op, outputs) if backward else [state, *(None for _ in outputs[1:])]


def _attention(op: Operation, outputs: Outputs) -> State | list[State]:
    """Attention over the last but one dimension, the records in a dimension before it."""
    pairs = [pair for name in _ATTENDS for pair in op.pairs(name)]
    state, size = joined(pairs, op["query"].ndim, leading=True)
    masks = [pair for name in ("attn_mask", "attn_bias") for pair in op.pairs(name)]
    if isinstance(state, Held) and masks:
        state, size = joined([*((pairs[0][0], state),), *masks], op["query"].ndim)
    if not isinstance(state, Held):
        return state
    if state.layout.dim >= op["query"].ndim - 2:
        raise Refused(
            "attends from one record to another", "let the records come first, as with batch_first=True"
        )
    dim = state.layout.dim
    return [state if t is not None and t.ndim > dim and t.shape[dim] == size else None for t in outputs]


_ATTENDS = ("query", "key", "value", "grad_out", "grad_out_", "grad_output", "out", "logsumexp")


def _spatial(op: Operation, outputs: Outputs) -> State | list[State]:
    """Pool, resample or pad the last one, two or three dimensions."""
    match = re.search(r"([123])d", op.name)
    spatial = int(match[1]) if match else 1
    pairs = op.pairs()
    state, _ = joined(pairs, pairs[0][0].ndim, leading=True)
    if isinstance(state, Held) and state.layout.dim >= pairs[0][0].ndim - spatial:
        raise Refused("works along the records", "give it (records, channels, ...)")
    return state


def _leading(trailing: int) -> Rule:
    """Rule of operators on the last dimensions, batched over those before."""

    def rule(op: Operation, outputs: Outputs) -> State:
        pairs = op.pairs()
        state, _ = joined(pairs, max(tensor.ndim for tensor, _ in pairs), leading=True)
        if isinstance(state, Held) and state.layout.dim >= min(tensor.ndim for tensor, _ in pairs) - trailing:
            raise Refused("works along the records", _ORDER_REMEDY)
        return state

    return rule


def _first_dimension(op: Operation, outputs: Outputs) -> State:
    state = _single(op)[1]
    if isinstance(state, Held) and state.layout.dim:
        raise Refused(
            "sees the records in another dimension than the first", "give it (records, channels, ...)"
        )
    return state


# Look-ups


def _embedding(op: Operation, outputs: Outputs) -> State:
    op.require_none("weight")
    return op.state(op["indices"])


def _embedding_bag(op: Operation, outputs: Outputs) -> State | list[State]:
    """Bags of the same size; offsets that count them hold no record."""
    op.require_none("weight")
    state, offsets = op.state(op["indices"]), op["offsets"]
    weights = op["per_sample_weights"]
    if isinstance(state, Held) and weights is not None and op.state(weights) not in (None, state):
        raise Refused("combines rows of different records", _ORDER_REMEDY)
    rows = state.layout.rows if isinstance(state, Held) else 0
    counted = torch.arange(op.records, device=offsets.device) * rows
    fixed = op.state(offsets) is None or isinstance(op.state(offsets), Mixed) and op.state(offsets).placed  # type: ignore[union-attr]
    if (
        not isinstance(state, Held)
        or state.layout.outer > 1
        or not fixed
        or not torch.equal(offsets, counted.to(offsets))
    ):
        raise Refused(
            "takes bags that begin where offsets say",
            "give ids of shape (records, length), padded, without offsets",
        )
    return [Held(Layout(0)), *(op.mixed("counts over the bags") for _ in outputs[1:])]


def _indexed_lines(op: Operation, outputs: Outputs) -> State:
    """gather and scatter: places along one dimension, of the record's own numbers."""
    given = op.pairs()
    state, _ = joined(given, given[0][0].ndim)
    if isinstance(state, Mixed):
        return state
    dims = _dims(op, given[0][0].ndim)
    if any(own is None or (isinstance(own, Held) and own.layout.dim in dims) for _, own in given):
        raise Refused("takes rows by their place in the batch", _TABLE_REMEDY)
    return state


def _selected(op: Operation, outputs: Outputs) -> State | list[State]:
    table, index = op.state(op["self"]), op.state(op["index"])
    if mixed := _first_mixed([(op["self"], table), (op["index"], index)]):
        raise Refused("takes rows by their place in the batch", mixed.remedy)
    dim = op["dim"] % max(op["self"].ndim, 1)
    if table is None and isinstance(index, Held):
        return Held(index.layout._replace(dim=dim))
    if isinstance(table, Held) and index is None and table.layout.dim != dim:
        return table
    raise Refused("takes rows by their place in the batch", _TABLE_REMEDY)


def _added_at(op: Operation, outputs: Outputs) -> State:
    """index_add and index_copy: whole lines at constant places of another dimension."""
    own = op.state(op["self"])
    given = [pair for name in ("self", "source", "value") for pair in op.pairs(name)]
    state, _ = joined([pair for pair in given if pair[0].ndim], op["self"].ndim)
    dim = op["dim"] % max(op["self"].ndim, 1)
    if isinstance(state, Mixed):
        return state
    if op.state(op["index"]) is not None or not isinstance(own, Held) or own.layout.dim == dim:
        raise Refused("puts rows where an index says", _ORDER_REMEDY)
    return state


@dataclass(frozen=True)
class _Places:
    """The places that a list of indices takes.

    Attributes:
        own: Whether each record is taken at its own place, by 0, 1, ... in the dimension of records.
        dim: Where the records stand in the result, or None if the indices hold none.
        layout: Of the records among the indices.
    """

    own: bool
    dim: int | None
    layout: Layout | None


def _places(op: Operation, state: State) -> _Places:
    """Read the indices of x[...], of which at least one depends on records or on their number.

    Raises:
        Refused: They take rows of other records, or as many as the numbers say.
    """
    given = [(n, index) for n, index in enumerate(op["indices"]) if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for _, index in given):
        raise Refused(
            "chooses rows by a mask, as many as the records' numbers say",
            "keep all positions and mask them with torch.where, a product or masked_fill",
            sizes=True,
        )
    ndim = max(index.ndim for _, index in given)
    own, found = False, []
    for n, index in given:
        placed = op.state(index)
        if isinstance(placed, Mixed):
            at_records = isinstance(state, Held) and state.layout.dim == n and state.layout.rows == 1
            dim = _counting_dimension(index, op.records) if placed.placed and at_records else None
            if dim is None:
                raise Refused("takes rows by their place in the batch", _TABLE_REMEDY)
            own = True
            found.append(Layout(dim + ndim - index.ndim))
        elif isinstance(placed, Held):
            found.append(placed.layout._replace(dim=placed.layout.dim + ndim - index.ndim))
    if len(set(found)) > 1 or (isinstance(state, Held) and not own and found):
        raise Refused("takes rows of other records", _TABLE_REMEDY)
    numbers = [n for n, _ in given]
    start = numbers[0] if numbers == list(range(numbers[0], numbers[-1] + 1)) else 0
    return _Places(own, start + found[0].dim, found[0]) if found else _Places(own, None, None)


def _counting_dimension(index: Tensor, records: int) -> int | None:
    """Return the dimension along which an index counts the records, if it does nothing else."""
    dims = [d for d in range(index.ndim) if index.shape[d] > 1]
    counts = torch.arange(records, device=index.device)
    if dims == [] or len(dims) > 1 or not torch.equal(index.flatten(), counts.to(index)):
        return None
    return dims[0]


def _is_constant(op: Operation) -> bool:
    return all(index is None or op.state(index) is None for index in op["indices"])


def _indexed(op: Operation, outputs: Outputs) -> State | list[State]:
    state = op.state(op["self"])
    if isinstance(state, Mixed):
        raise Refused("takes rows of numbers that all records share", state.remedy)
    if _is_constant(op):
        return _moved(op, outputs)
    places = _places(op, state)
    if places.dim is None or places.layout is None:
        raise Refused("takes rows by their place in the batch", _TABLE_REMEDY)
    return Held(places.layout._replace(dim=places.dim))


def _put(op: Operation, outputs: Outputs) -> State:
    target, values = op["self"], op["values"]
    state, added = op.state(target), op.state(values)
    if mixed := _first_mixed([(target, state), (values, added)]):
        return mixed
    mask = op["indices"][0]
    if (
        len(op["indices"]) == 1
        and mask is not None
        and mask.dtype == torch.bool
        and added is None
        and values.numel() == 1
    ):
        return joined([(target, state), (mask, op.state(mask))], target.ndim, leading=True)[0]
    if not isinstance(state, Held):
        raise Refused(
            "writes rows of records into a tensor without them", "begin with zeros for every record"
        )
    if _is_constant(op):
        shape = target.detach()[tuple(slice(None) if i is None else i for i in op["indices"])]
        within = _moved_by_index(op, target, state)
    else:
        places = _places(op, state)
        shape = target.detach()[tuple(slice(None) if i is None else i for i in op["indices"])]
        within = (
            None
            if places.dim is None or places.layout is None
            else Held(places.layout._replace(dim=places.dim))
        )
    if not isinstance(within, Held):
        raise Refused("writes to the places of some records only", _ORDER_REMEDY)
    joined([(shape, within), (values, added)], shape.ndim)
    return Held(state.layout, state.free and (added is None or added.free))  # type: ignore[union-attr]


def _moved_by_index(op: Operation, target: Tensor, state: State) -> State:
    """Return the state of x[indices] for constant indices."""
    places = tuple(slice(None) if index is None else index for index in op["indices"])
    (found,) = moved_state([(target, state)], op.records, lambda coded: [coded[id(target)][places]])
    return found


# Factories


def _like(op: Operation, outputs: Outputs) -> State:
    """A tensor of the same shape whose numbers depend on no record."""
    state = op.state(op["self"] if op["self"] is not None else op["input"])
    return Held(state.layout, free=True) if isinstance(state, Held) else state


def _view_as_numbers(op: Operation, outputs: Outputs) -> State:
    return _single(op)[1]


def _each(names: str, rule: Rule) -> Iterator[tuple[str, Rule]]:
    return ((name, rule) for name in names.split())


_POINTWISE = """
add sub rsub mul div true_divide floor_divide remainder fmod pow neg abs sign sgn exp exp2 expm1 log log2 log10 log1p
sqrt rsqrt reciprocal square sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf erfc erfinv sigmoid
logit relu relu6 leaky_relu elu celu selu gelu silu mish hardtanh hardswish hardsigmoid softplus softshrink hardshrink
threshold _prelu_kernel rrelu_with_noise rrelu_with_noise_functional clamp clamp_min clamp_max clip maximum minimum fmax
fmin where eq ne lt le gt ge logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor
bitwise_not bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ isnan isinf isfinite
isposinf isneginf signbit nan_to_num round floor ceil trunc frac lerp addcmul addcdiv masked_fill hypot xlogy logaddexp
logaddexp2 copysign nextafter heaviside polar complex digamma lgamma polygamma sinc i0 deg2rad rad2deg angle real imag
conj _conj _conj_physical conj_physical resolve_conj resolve_neg log_sigmoid_forward clone _to_copy detach alias lift
copy positive fill zero contiguous native_dropout native_dropout_backward bernoulli normal uniform exponential
random cauchy log_normal geometric special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr
special_ndtri special_xlog1py special_zeta ldexp threshold_backward gelu_backward silu_backward mish_backward
elu_backward hardtanh_backward hardswish_backward hardsigmoid_backward leaky_relu_backward softplus_backward
softshrink_backward hardshrink_backward tanh_backward sigmoid_backward logit_backward log_sigmoid_backward
rrelu_with_noise_backward _prelu_kernel_backward gelu_backward infinitely_differentiable_gelu_backward
huber_loss_backward smooth_l1_loss_backward mse_loss_backward fake_quantize_per_tensor_affine_cachemask
"""
_REDUCTIONS = """
sum nansum mean nanmean prod amax amin var std var_mean std_mean logsumexp linalg_vector_norm norm argmax argmin any all
max min median nanmedian mode kthvalue count_nonzero aminmax
"""
_ALONG = """
_softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod logcumsumexp cummax
cummin sort topk glu glu_backward linalg_cross
"""
_VIEWS = frozenset({"view", "_unsafe_view", "_reshape_alias", "view_copy", "reshape", "_reshape_copy"})
_JOINS = frozenset({"cat", "stack", "_stack"})
_MOVES = """
permute transpose t unsqueeze expand slice select split unsafe_split split_with_sizes unsafe_split_with_sizes unbind
chunk narrow repeat flip roll rot90 diagonal unfold as_strided constant_pad_nd pixel_shuffle pixel_unshuffle
channel_shuffle slice_backward select_backward diagonal_backward tril triu movedim expand_copy permute_copy
"""
_SPATIAL = """
avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward max_pool2d_with_indices max_pool3d_with_indices
max_pool2d_with_indices_backward max_pool3d_with_indices_backward _adaptive_avg_pool2d _adaptive_avg_pool3d
adaptive_avg_pool1d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d adaptive_max_pool3d
adaptive_max_pool2d_backward adaptive_max_pool3d_backward upsample_nearest1d upsample_nearest2d upsample_nearest3d
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa upsample_nearest1d_backward
upsample_nearest2d_backward upsample_nearest3d_backward upsample_linear1d_backward upsample_bilinear2d_backward
upsample_bicubic2d_backward upsample_trilinear3d_backward reflection_pad1d reflection_pad2d reflection_pad3d
replication_pad1d replication_pad2d replication_pad3d reflection_pad1d_backward reflection_pad2d_backward
reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
"""
_MATRICES = """
linalg_inv_ex linalg_cholesky_ex _linalg_solve_ex linalg_solve_triangular linalg_qr _linalg_svd _linalg_eigh
_linalg_slogdet _linalg_det linalg_lu_factor_ex linalg_matrix_exp cholesky_solve cholesky_inverse _cdist_forward
"""
_BATCH_NORMS = """
native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional cudnn_batch_norm
native_batch_norm_backward cudnn_batch_norm_backward _native_batch_norm_legit_no_training
"""
RULES: dict[str, Rule] = {
    **dict(_each(_POINTWISE, _pointwise)),
    **dict(_each(_REDUCTIONS, _reduced)),
    **dict(_each(_ALONG, _along)),
    **dict(_each(" ".join(_VIEWS | _JOINS) + _MOVES, _moved)),
    **dict(_each("squeeze", _squeezed)),
    **dict(_each("unfold_backward", _unfolded_back)),
    **dict(_each("mse_loss smooth_l1_loss huber_loss binary_cross_entropy nll_loss_forward", _loss)),
    **dict(_each("mm bmm", _mm)),
    **dict(_each("mv", _mv)),
    **dict(_each("dot vdot", _dot)),
    **dict(_each("addmm", _added(lambda op: _product(op, op["mat1"], op["mat2"])))),
    **dict(_each("baddbmm", _added(lambda op: _product(op, op["batch1"], op["batch2"])))),
    **dict(_each("linear", _linear)),
    **dict(_each("_trilinear", _trilinear)),
    **dict(_each("convolution convolution_backward", _convolution)),
    **dict(_each("native_layer_norm native_layer_norm_backward", _layer_norm)),
    **dict(_each("_fused_rms_norm _fused_rms_norm_backward", _layer_norm)),
    **dict(_each("native_group_norm native_group_norm_backward", _group_norm)),
    **dict(_each(_BATCH_NORMS, _batch_norm)),
    **dict(_each(_SPATIAL, _spatial)),
    **dict(_each(_MATRICES, _leading(2))),
    **dict(
        _each(
            "grid_sampler_2d grid_sampler_3d grid_sampler_2d_backward grid_sampler_3d_backward", _leading(2)
        )
    ),
    **dict(_each("im2col col2im", _first_dimension)),
    **dict(_each("_fft_r2c _fft_c2c _fft_c2r", _along)),
    **dict(_each("view_as_real view_as_complex", _view_as_numbers)),
    **dict(_each("embedding", _embedding)),
    **dict(_each("_embedding_bag _embedding_bag_forward_only", _embedding_bag)),
    **dict(_each("gather scatter scatter_add scatter_reduce", _indexed_lines)),
    **dict(_each("index_select", _selected)),
    **dict(_each("index_add index_copy index_fill", _added_at)),
    **dict(_each("index _unsafe_index", _indexed)),
    **dict(_each("index_put _index_put_impl _unsafe_index_put", _put)),
    **dict(_each("zeros_like ones_like full_like empty_like rand_like randn_like randint_like", _like)),
}
"""The rule of each operator, by its name in torch.ops.aten."""


def rule_of(name: str) -> Rule | None:
    """Return the rule of an operator, or None if its rows are not known."""
    return _attention if name.startswith("_scaled_dot_product") else RULES.get(name)
