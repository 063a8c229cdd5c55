"""Follow the records of a batch through every operator of a forward and a backward pass.

`RowTracker` runs below autograd, so that it sees what a module computes, whatever Python code called it, and what hooks
and custom autograd functions compute in the backward pass. It knows for every tensor in which rows each record stands
(`placement`), by one rule for each operator (`RULES`). An operator without a rule, or whose rule finds that rows
have no known owner, is refused: nothing follows from the numbers that records hold.

Numbers that a module derives from the batch's size are found by comparing passes on batches of two sizes. Not
detected: Python code that takes another path in training than in these passes, because of a count of its calls, a
clock, random draws of its own, the size of a batch, a caught error of an operator, or the tracker itself; native code
or other threads that read or change a tensor's memory; generators that are seeded by numbers of a batch; and memory
that is read before it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opusim.training.networks import record_independence
from opusim.training.networks.record_gradients.calls import Layout
from opusim.training.networks.record_gradients.followed import rules
from opusim.training.networks.record_gradients.followed.placement import (
    CONVERSIONS,
    GUARDS,
    WRITES,
    Held,
    Mixed,
    Refused,
    State,
    active,
    constant_state,
    has_own_generator,
    operator_of,
    overlap,
    same_owners,
    scaled_dimension,
)
from opusim.training.networks.record_gradients.followed.rules import (
    BY_PLACE,
    JOINS,
    VIEWS,
    Operation,
    Outputs,
    Rule,
    counts_on,
)

_LOGGED = 4096
"""Size up to which a tensor made from Python's numbers is kept, to compare two passes."""
_FACTORIES = frozenset({
    "zeros", "ones", "full", "empty", "empty_strided", "rand", "randn", "randint", "new_zeros", "new_ones", "new_full",
    "new_empty", "new_empty_strided", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "randint_like",
})  # fmt: skip
"""Operators whose results are the same, or drawn alike, at every place."""
_REPEATS = frozenset({"expand", "expand_copy", "repeat", "cat", "stack", "affine_grid_generator"})
"""Operators whose results may hold a constant for each record."""
_CUTS = frozenset({
    "slice", "split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes", "split_copy",
})  # fmt: skip
_SAME_PLACE = frozenset({"detach", "alias"})
"""Operators whose result has the memory and the place of their argument, and so its state."""
_READS = frozenset({"_local_scalar_dense", "equal", "is_nonzero"})
_SHOWN = {
    "_local_scalar_dense": "item (or a condition of Python)",
    **dict.fromkeys(CONVERSIONS, "torch.tensor of a list of tensors"),
}
_TENSOR_REMEDY = "compute with tensors, such as torch.where: a number in Python may depend on all records"
_LIST = (
    "use operators of training/networks/record_gradients/followed/tracking.py, which keep every record in rows of its "
    "own, or train without protection"
)
_NO_RULE = {
    "nonzero": "keep all positions and mask them with torch.where, a product or masked_fill",
    "masked_select": "keep all positions and mask them with torch.where, a product or masked_fill",
    "masked_scatter": "write with torch.where",
    "bernoulli_backward": "detach the draw",
    "_linalg_check_errors": "take the operator that reads nothing, such as torch.linalg.inv_ex or cholesky_ex",
}


# The operators whose rows are known; one that no table names is refused if it takes records


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
fake_quantize_per_tensor_affine_cachemask
"""
_REDUCTIONS = """
sum nansum mean nanmean prod amax amin var std var_mean std_mean logsumexp linalg_vector_norm norm argmax argmin any all
max min median nanmedian mode kthvalue count_nonzero aminmax
"""
_ALONG = """
_softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod logcumsumexp cummax
cummin sort topk glu glu_backward linalg_cross
"""
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
_cdist_backward grid_sampler_2d grid_sampler_3d grid_sampler_2d_backward grid_sampler_3d_backward
"""
_BATCH_NORMS = """
native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional cudnn_batch_norm
native_batch_norm_backward cudnn_batch_norm_backward _native_batch_norm_legit_no_training
"""
_NORMS = """
native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward native_group_norm
native_group_norm_backward
"""
RULES: dict[str, Rule] = {
    **dict.fromkeys(_POINTWISE.split(), rules.pointwise),
    **dict.fromkeys(_REDUCTIONS.split(), rules.reduced),
    **dict.fromkeys(_ALONG.split(), rules.along),
    **dict.fromkeys((" ".join(VIEWS | JOINS) + _MOVES).split(), rules.moved),
    "squeeze": rules.squeezed,
    "unfold_backward": rules.unfolded_back,
    **dict.fromkeys(
        ["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "nll_loss_forward"], rules.loss
    ),
    **dict.fromkeys(
        ["mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward"], rules.loss_backward
    ),
    **dict.fromkeys(["mm", "bmm"], rules.mm),
    "mv": rules.mv,
    **dict.fromkeys(["dot", "vdot"], rules.dot),
    "addmm": rules.added(lambda op: rules.product(op, op["mat1"], op["mat2"])),
    "baddbmm": rules.added(lambda op: rules.product(op, op["batch1"], op["batch2"])),
    "linear": rules.linear,
    **dict.fromkeys(["mkldnn_rnn_layer", "_cudnn_rnn"], rules.recurrent),
    "_trilinear": rules.trilinear,
    **dict.fromkeys(["convolution", "convolution_backward"], rules.convolution),
    **dict.fromkeys(_NORMS.split(), rules.norm),
    **dict.fromkeys(_BATCH_NORMS.split(), rules.batch_norm),
    **dict.fromkeys(_SPATIAL.split(), rules.spatial),
    **dict.fromkeys(_MATRICES.split(), rules.leading(2)),
    **dict.fromkeys(["im2col", "col2im", "affine_grid_generator"], rules.first_dimension),
    **dict.fromkeys(["_fft_r2c", "_fft_c2c", "_fft_c2r"], rules.along),
    **dict.fromkeys(["view_as_real", "view_as_complex"], rules.view_as_numbers),
    "embedding": rules.embedding,
    **dict.fromkeys(["_embedding_bag", "_embedding_bag_forward_only"], rules.embedding_bag),
    **dict.fromkeys(["gather", "scatter", "scatter_add", "scatter_reduce"], rules.indexed_lines),
    "index_select": rules.selected,
    **dict.fromkeys(["index_add", "index_copy", "index_fill"], rules.added_at),
    **dict.fromkeys(["index", "_unsafe_index"], rules.indexed),
    **dict.fromkeys(["index_put", "_index_put_impl", "_unsafe_index_put"], rules.put),
    **dict.fromkeys(
        ["zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"],
        rules.like,
    ),
}
"""The rule of each operator, by its name in torch.ops.aten."""


_PATTERNS = JOINS | {
    "constant_pad_nd",
    "tril",
    "triu",
    "slice_backward",
    "select_backward",
    "diagonal_backward",
}
"""Operators that put other numbers next to those that they move."""


def keeps_alike(op: Operation) -> bool:
    """Return whether numbers that are alike at every place stay so after an operator, whatever their rows are."""
    if RULES.get(op.name) not in (rules.pointwise, rules.moved, rules.squeezed, rules.like):
        return False
    others = [tensor for tensor, state in op.pairs() if state is None]
    return op.name not in _PATTERNS and all(tensor.numel() == 1 for tensor in others)


# Passes


@dataclass
class _Step:
    """One operator of the first pass: its numbers, results' shapes, copies of Python's numbers, where it cuts."""

    name: str
    numbers: tuple[Any, ...]
    shapes: list[tuple[int, ...] | None]
    values: list[Tensor | None]
    cuts: tuple[Any, ...] = ()


@dataclass
class Survey:
    """What the first pass, on a batch of another size, leaves for the second one.

    Attributes:
        records: The size of its batch.
        steps: Its operators.
        outside: Tensors that it met and no operator had computed, by their storage.
        states: The states of the tensors that it computed, by their storage.
        storages: Keeps these alive, so that nothing else takes their place.
    """

    records: int
    steps: list[_Step] = field(default_factory=list)
    outside: set[int] = field(default_factory=set)
    states: dict[int, dict[Any, State]] = field(default_factory=dict)
    storages: list[Any] = field(default_factory=list)


_PLAIN = Tensor.__torch_dispatch__
_memory = torch._C.TensorBase.untyped_storage
"""Return the memory of a tensor."""


class RowTracker(TorchDispatchMode):
    """Knows the rows of each record in every tensor of a pass; a context around it.

    Args:
        model: The module; its parameters and buffers hold no record.
        records: Number of records in the batch.
        first: What a pass on a batch of another size left; None for that pass, which only takes notes.

    Attributes:
        survey: The notes of this pass.
        backward: Whether the backward pass runs.
        refused: The first refusal, which the module's code may have caught.
    """

    def __init__(self, model: nn.Module, records: int, first: Survey | None = None) -> None:
        super().__init__()
        self.survey, self._first, self._records = Survey(records), first, records
        self.backward = False
        self.refused: ValueError | None = None
        self._names = {id(module): name for name, module in model.named_modules()}
        self._nodes: dict[int, str] = {}
        named: list[tuple[str, Tensor]] = []
        named += [(f"parameter {name!r}", tensor) for name, tensor in model.named_parameters()]
        named += [(f"buffer {name!r}", tensor) for name, tensor in model.named_buffers()]
        known = {} if first is None else first.states
        # a buffer that the first pass exchanged holds what that pass computed
        self.note(None, *(t for _, t in named if not any(known.get(_memory(t)._cdata, {}).values())))
        self._kept = {_memory(tensor)._cdata: name for name, tensor in named}

    def __enter__(self) -> Self:
        self._unguarded = [vars(owner).get(name) for owner, name, _ in GUARDS]
        for owner, name, method in GUARDS:
            setattr(owner, name, method)
        active.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        active.pop()
        for (owner, name, _), method in zip(GUARDS, self._unguarded, strict=True):
            if method is None:
                delattr(owner, name)
            else:
                setattr(owner, name, method)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from loading its compiler, which takes seconds, to say that it does not compile this class."""
        return False

    # States

    def note(self, state: State, *tensors: Tensor) -> None:
        """Set the state of tensors."""
        with torch._C.DisableTorchFunction():
            for tensor in tensors:
                storage = _memory(tensor)
                if (number := storage._cdata) not in self.survey.states:
                    self.survey.storages.append(storage)
                    self.survey.states[number] = {}
                key = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.element_size()
                self.survey.states[number][key] = state

    def states(self, *tensors: Tensor) -> list[State]:
        """Return the state of each tensor."""
        found: list[State] = []
        with torch._C.DisableTorchFunction():
            for tensor in tensors:
                key = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.element_size()
                known = self.survey.states.get(_memory(tensor)._cdata)
                if known is None:
                    found.append(self._outside(tensor, key))
                elif key in known:
                    found.append(known[key])
                elif all(state is None for state in known.values()):
                    found.append(None)
                else:
                    reason = "a view that no operator made mixes the records of a batch"
                    unknown = Mixed(reason, "take views by torch's functions")
                    found.append(next((s for s in known.values() if isinstance(s, Mixed)), unknown))
        return found

    def _outside(self, tensor: Tensor, key: Any) -> State:
        """Return the state of a tensor that no operator of this pass has computed."""
        number = _memory(tensor)._cdata
        if self._first is not None:
            kept = self._first.states.get(number, {})
            outside = number in self._first.outside
            if (not outside and kept.get(key, True) is not None) or (outside and any(kept.values())):
                return Mixed(
                    f"{self._where()} takes a tensor that torch did not compute in this pass",
                    "compute it from the arguments by torch's operators, or register constants as buffers; leave "
                    "numpy, threads and attributes that keep results out",
                )
        self.survey.outside.add(number)
        self.note(None, tensor)
        return None

    def require_inside(self, tensor: Tensor, method: str) -> None:
        """Refuse (ValueError) a method that hands numbers of records to code outside of torch."""
        if self.states(tensor) != [None]:
            raise self.noted(
                f"model: {self._where(method)} hands numbers of the batch to code outside of torch, which may mix the "
                f"records of a batch: {_TENSOR_REMEDY}"
            )

    def noted(self, message: str) -> ValueError:
        """Return a refusal, and note it, so that code which catches it does not hide it."""
        error = ValueError(message)
        self.refused = self.refused or error
        return error

    def require_unrefused(self) -> None:
        """Raise the first refusal, a ValueError, again."""
        if self.refused is not None:
            raise self.refused

    # Operators

    def __torch_dispatch__(
        self,
        func: Any,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and note where the records stand in its results."""
        kwargs = kwargs or {}
        operator = operator_of(func)
        name = operator.name
        try:
            with torch._C.DisableTorchFunction():
                # 1. The pass and its tensors must be plain.
                if not self.backward and (
                    torch._C._current_graph_task_id() != -1 or forward_ad._current_level >= 0
                ):
                    self._refuse_gradients()
                for kind in types:
                    if getattr(kind, "__torch_dispatch__", _PLAIN) is not _PLAIN:
                        self._refuse_tensors(name, kind)
                if name in _SAME_PLACE:
                    return func(*args, **kwargs)
                # 2. Name the arguments, with those left out; a reshape in place takes another view of its tensor.
                arguments = {**operator.defaults, **dict(zip(operator.names, args, strict=False)), **kwargs}
                if operator.reshapes:
                    arguments["self"] = arguments["self"].detach()
                leaves = tree_leaves([arguments.get(each) for each in operator.counted])
                unsaid = WRITES.get(name, ()) if arguments.get("training") else ()
                written = [arguments.get(each) for each in (*operator.written, *unsaid)]
                tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
                fresh = name == "lift_fresh" and _memory(tensors[0])._cdata not in self.survey.states
                states = [None] if fresh else self.states(*tensors)
                op = Operation(
                    func=func,
                    name=name,
                    where=partial(self._where, name),
                    arguments=arguments,
                    numbers=tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor | torch.Generator)),
                    tensors=tensors,
                    written=[leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)],
                    states=dict(zip(map(id, tensors), states, strict=True)),
                    records=self._records,
                )
                # 3. Run it, and follow its results.
                for state in op.states.values() if name in _READS else ():
                    if state is not None:
                        why = f" ({state.reason})" if isinstance(state, Mixed) else ""
                        raise Refused(f"reads numbers of the batch into Python{why}", _TENSOR_REMEDY)
                result = func(*args, **kwargs)
                rows = list(result) if isinstance(result, tuple | list) else [result]
                flat = [each for row in rows for each in (row if isinstance(row, list) else [row])]
                outputs = [each if isinstance(each, Tensor) else None for each in flat]
                if any(
                    each is not None and (each.is_nested or each.layout != torch.strided) for each in outputs
                ):
                    raise Refused(
                        "makes a sparse or nested tensor, whose rows have no known owner",
                        "take dense tensors",
                    )
                if self._first is None:
                    self._take_notes(op, outputs)
                else:
                    self._follow(op, outputs, self._first)
                return result
        except Refused as refused:
            raise self.noted(
                f"model: {self._where(name)} {refused.reason}, and so mixes the records of a batch: {refused.remedy}"
            ) from None
        except ValueError as error:
            self.refused = self.refused or error
            raise

    def _refuse_gradients(self) -> None:
        """Refuse gradients, and directional derivatives, that a forward pass computes."""
        if torch._C._current_graph_task_id() != -1:
            raise ValueError(
                f"model: {self._where()} computes gradients in its forward pass (torch.autograd.grad, backward or "
                "torch.func.grad), which cannot be split by record; compute them outside of the model"
            )
        raise ValueError(
            f"model: {self._where()} computes directional derivatives in its forward pass (forward_ad or "
            "torch.func.jvp), in which uses of parameters are not seen; compute them outside of the model"
        )

    def _refuse_tensors(self, name: str, kind: type) -> None:
        """Refuse tensors of a class whose operators are Python code, which runs where no tracker sees it."""
        raise ValueError(
            f"model: {self._where(name)} takes a {kind.__name__}, a class of tensors with operators of its own "
            "(__torch_dispatch__), which are not seen; compute with plain tensors"
        )

    def require_nothing_left(self) -> None:
        """After the passes, refuse (ValueError) numbers of records in a tensor that no pass computed."""
        for number in self.survey.outside:
            if any(self.survey.states[number].values()):
                raise ValueError(
                    "model: a training pass writes numbers of the batch into a tensor that it did not make, from which "
                    "the next batch would read them; write into new tensors (torch.zeros_like)"
                )

    def require_parameters_kept(self, model: nn.Module) -> None:
        """Refuse (ValueError) a parameter that records' numbers replaced; `_follow` refuses writes into one."""
        named = dict(model.named_parameters())
        for name, state in zip(named, self.states(*named.values()), strict=True):
            if state is not None:
                raise _keeps(f"parameter {name!r}", type(model).__name__)

    def _take_notes(self, op: Operation, outputs: Outputs) -> None:
        """Note an operator of the first pass."""
        held = next((state for state in op.states.values() if state is not None), None)
        values = [
            output.detach().clone()
            if output is not None and op.name == "lift_fresh" and output.numel() <= _LOGGED
            else None
            for output in outputs
        ]
        shapes = [None if output is None else tuple(output.shape) for output in outputs]
        cuts = _cuts_of(op) if op.name in _CUTS else ()
        self.survey.steps.append(_Step(op.name, op.numbers, shapes, values, cuts))
        self.note(held, *(output for output in outputs if output is not None))
        for tensor in op.written if held is not None else ():
            self._spread(tensor, held)

    def _follow(self, op: Operation, outputs: Outputs, first: Survey) -> None:
        """Note where the records stand in the results of an operator of the second pass.

        Raises ValueError if it writes numbers of records into a parameter or a buffer, and Refused without a known rule
        or owner.
        """
        # 1. Refuse numbers of records that are written into a parameter or a buffer.
        written = op.written if any(op.states.values()) else []
        for tensor in written:
            kept = self._kept.get(_memory(tensor)._cdata)
            if kept is not None:
                raise _keeps(kept, op.where())
        # 2. Find the operator of the first pass that corresponds to this one.
        number = len(self.survey.steps)
        step = first.steps[number] if number < len(first.steps) else None
        if step is None or step.name != op.name or len(step.shapes) != len(outputs):
            raise Refused(
                "does not run in batches of every size",
                "run the same operators whatever the batch holds and however many records it has",
            )
        self.survey.steps.append(step)
        # 3. Note the states of the results, whose shapes may depend on the number of records by its rows only.
        states = self._states(op, outputs, step, first.records)
        for output, state, shape in zip(outputs, states, step.shapes, strict=True):
            if output is None:
                continue
            now = tuple(output.shape)
            fits = isinstance(state, Mixed) or shape == now
            if isinstance(state, Held):
                dim, rows = state.layout.dim, state.layout.outer * state.layout.inner
                fits = (
                    now[dim : dim + 1] == (rows * self._records,)
                    and (*now[:dim], rows * first.records, *now[dim + 1 :]) == shape
                )
            if not fits:
                raise Refused(
                    f"returns shape {now} for {self._records} records and {shape} for another number",
                    "let no size but that of the records' dimension depend on the batch",
                )
            if any(output is tensor for tensor in op.written):
                self._spread(output, state)
            self.note(state, output)
        # 4. Follow tensors that it overwrites besides its results.
        for tensor in written:
            if not any(tensor is output for output in outputs):
                self._spread(tensor, op.mixed("overwrites a tensor by what records share"))

    def _states(self, op: Operation, outputs: Outputs, step: _Step, before: int) -> list[State]:
        """Return the states of an operator's results from its step of the first pass, on `before` records."""
        given = list(op.states.values())
        now, then = op.numbers, step.numbers  # NaN equals NaN
        alike = len(now) == len(then) and all(
            type(a) is type(b) and (a is b or a == b or (a != a and b != b))
            for a, b in zip(now, then, strict=True)
        )
        takes = op.written if op.name.startswith("new_") else op.tensors
        factory = op.name in _FACTORIES and not any(op.state(tensor) for tensor in takes)
        states: list[State]
        if factory or all(state is None or (isinstance(state, Mixed) and state.placed) for state in given):
            states = [
                None
                if output is None
                else self._constant(op, output, step, n, before, factory=factory, alike=alike)
                for n, output in enumerate(outputs)
            ]
        else:
            states = self._of_records(op, outputs, step, alike=alike)
        seeded = torch.Tag.nondeterministic_seeded in op.func.tags and op["dropout_p"] != 0
        if seeded and any(isinstance(state, Held) for state in states) and has_own_generator(op.arguments):
            mixed = op.mixed(
                "draws for every place in the batch from a generator that the model made or seeded, so that one record "
                "more or less changes the draws of the others",
                "draw from torch's generator as it is",
            )
            return [mixed if isinstance(state, Held) else state for state in states]
        return states

    def _of_records(self, op: Operation, outputs: Outputs, step: _Step, *, alike: bool) -> list[State]:
        """Return the states of the results of an operator that takes records, by its rule."""
        name = op.name
        rule = rules.attention if name.startswith("_scaled_dot_product") else RULES.get(name)
        if rule is None:
            raise Refused("has no known rule for the rows of records", _NO_RULE.get(name, _LIST))
        found: State | list[State]
        try:
            found = rule(op, outputs)
        except Refused as refused:
            if refused.sizes:
                raise
            found = op.mixed(refused.reason, refused.remedy)
        states = [
            replace(state, placed=False, counts=False)
            if isinstance(state, Mixed)
            else state  # records take part, too
            for state in (found if isinstance(found, list) else [found] * len(outputs))
        ]
        if any(isinstance(state, Held) and state.free for state in states) and not keeps_alike(op):
            states = [Held(state.layout) if isinstance(state, Held) else state for state in states]
        shared = [
            s for s in op.states.values() if isinstance(s, Mixed) and not (s.placed and name in BY_PLACE)
        ]
        if shared:  # even if the rule does not read them
            mixed = replace(shared[0], placed=False, counts=False)
            return [state if isinstance(state, Mixed) else mixed for state in states]
        cuts: tuple[Any, ...] = ()
        own = op.state(op["self"]) if name in _CUTS else None
        if isinstance(own, Held) and own.layout.dim == op["dim"] % op["self"].ndim:
            cuts = _cuts_of(op)
        if any(a is not None and a == b for a, b in zip(cuts, step.cuts, strict=False)):
            # even if it leaves nothing of the batches of these passes
            mixed = op.mixed("cuts the batch at a fixed number of records", "work on the whole batch")
            return [state if isinstance(state, Mixed) else mixed for state in states]
        if not any(cuts) and not alike:
            mixed = op.mixed(
                "takes the number of records as a number", "let no number depend on the batch's size"
            )
            return [mixed if isinstance(state, Held) else state for state in states]
        return states

    def _constant(
        self, op: Operation, output: Tensor, step: _Step, n: int, before: int, *, factory: bool, alike: bool
    ) -> State:
        """Return the state of a result that depends on no record, only perhaps on their number and order."""
        if "." in op.name and not op.name.startswith("prims."):
            return op.mixed("is an operator of a package, which may see more than its arguments", _LIST)
        shape, counts = step.shapes[n], (before, self._records)
        placed = any(isinstance(state, Mixed) and state.placed for state in op.states.values())
        same = not placed and alike
        if shape is not None and shape != tuple(output.shape):
            scaled = scaled_dimension(shape, tuple(output.shape), counts)
            if same and factory and scaled is not None:
                return Held(Layout(scaled[0], 1, scaled[1]), free=True)
            if same and op.name in _REPEATS and (held := constant_state(output, shape, counts)):
                return held
        elif shape is not None and op.name == "lift_fresh":
            value = step.values[n]
            if value is not None and value.dtype == output.dtype and record_independence.same(value, output):
                return None
        elif shape is not None and same:
            return None
        return Mixed(
            f"{op.where()} makes numbers that depend on the number of records or on their order",
            "let no number depend on a record's place in the batch or on the batch's size",
            placed=True,
            counts=counts_on(op, output),
        )

    # Memory

    def _spread(self, tensor: Tensor, state: State) -> None:
        """Give the views of a tensor's memory the state it was overwritten with; refuse (Refused) another order."""
        if state is None:
            return
        known = self.survey.states.get(_memory(tensor)._cdata, {})
        key = int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.element_size()
        for other, before in known.items():
            if other == key or not overlap(other, key):
                continue
            if isinstance(state, Mixed) or self._first is None:
                known[other] = state
            elif isinstance(before, Held):
                if not same_owners(key, state.layout, other, before.layout, self._records):
                    raise Refused(
                        "writes rows of records into memory that holds them in another order",
                        "write into a tensor of its own",
                    )
                known[other] = Held(before.layout)
            elif before is None:
                known[other] = Mixed(
                    f"{self._where()} writes rows of records into a tensor that holds none",
                    "begin with zeros for every record",
                )
        known[key] = state

    # Messages

    def _where(self, name: str = "") -> str:
        """Return the submodule that runs, after the operator's name."""
        node = torch._C._current_autograd_node() if self.backward else None
        if node is not None:
            kind = str(node.name()).removesuffix("0")
            place = f"{self._nodes.get(node._sequence_nr(), 'the model')}, backward pass of {kind}"
        else:
            place = "the model"
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                own = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
                if isinstance(own, nn.Module) and id(own) in self._names:
                    inner = self._names[id(own)]
                    place = f"{type(own).__name__} {inner!r}" if inner else type(own).__name__
                    break
                frame = frame.f_back
            self._nodes[torch._C._autograd._get_sequence_nr() - 1] = place
        return f"{_SHOWN.get(name, name)} in {place}" if name else place


def _keeps(kept: str, where: str) -> ValueError:
    return ValueError(
        f"model: a training pass changes {kept} ({where} writes numbers of the batch into it), which a checkpoint "
        "would hold without noise; use modules that keep nothing of a batch"
    )


def _cuts_of(op: Operation) -> tuple[Any, ...]:
    """Return where an operator cuts a dimension: its start, its end and its sizes; None for what cuts nothing."""
    given = (op[name] for name in ("start", "end", "split_size", "split_sizes"))
    return tuple(None if each in (0, sys.maxsize) else each for each in given)
