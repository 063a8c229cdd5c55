"""Follow the records of a batch through every operator of a forward and a backward pass.

`RowTracker` runs below autograd, so that it sees what a module computes, whatever Python code called it, and what hooks
and custom autograd functions compute in the backward pass. It knows for every tensor in which rows each record stands
(`placement`), by one rule for each operator (`operators`). An operator without a rule, or whose rule finds that rows
have no known owner, is refused: nothing follows from the numbers that records hold.

Numbers of a batch that a module draws from its size are found by comparing two passes on batches of two sizes. Not
seen: Python code that takes another path in training than in these passes, by a count of its calls, a clock, random
draws of its own, the size of a batch, an error that an operator raised and it caught, or a question whether a tracker
is there; native code or other threads that read or change a tensor's memory behind torch; states of generators that
numbers of a batch become; and memory that is read before it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opusim.training.networks.record_gradients.followed.arguments import (
    address,
    cuts_of,
    cuts_of_records,
    guarded,
    keep_shape,
    memory,
    named_arguments,
    numbers,
    operator_name,
    outputs_of,
    overwritten,
    own_draws,
    require_dense,
)
from opusim.training.networks.record_gradients.followed.operators import rule_of
from opusim.training.networks.record_gradients.followed.placement import (
    Held,
    Mixed,
    Refused,
    State,
    agrees,
    constant_state,
    overlap,
    same_owners,
    scaled_dimension,
)
from opusim.training.networks.record_gradients.followed.rules import BY_PLACE, Operation, Outputs, counts_on
from opusim.training.networks.record_gradients.followed.tracking import keeps_alike
from opusim.training.networks.record_gradients.layout import Layout

_LOGGED = 4096
"""Numbers of a tensor that Python's numbers make, which are kept to compare two passes."""
_FACTORIES = frozenset({
    "zeros", "ones", "full", "empty", "empty_strided", "rand", "randn", "randint", "new_zeros", "new_ones", "new_full",
    "new_empty", "new_empty_strided", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "randint_like",
})  # fmt: skip
"""Operators whose results are the same, or drawn alike, at every place."""
_REPEATS = frozenset({"expand", "expand_copy", "repeat", "cat", "stack", "affine_grid_generator"})
"""Operators whose results may hold a constant for each record."""
_READS = frozenset({"_local_scalar_dense", "equal", "is_nonzero"})
_SHOWN = {"_local_scalar_dense": "item (or a condition of Python)"}
_TENSOR_REMEDY = "compute with tensors, such as torch.where: a number in Python may depend on all records"
_LIST = (
    "use operators of training/networks/record_gradients/followed/operators.py, which keep every record in rows of its "
    "own, or train without protection"
)
_NO_RULE = {
    "nonzero": "keep all positions and mask them with torch.where, a product or masked_fill",
    "masked_select": "keep all positions and mask them with torch.where, a product or masked_fill",
    "masked_scatter": "write with torch.where",
    "bernoulli_backward": "detach the draw",
    "_linalg_check_errors": "take the operator that reads nothing, such as torch.linalg.inv_ex or cholesky_ex",
}


@dataclass
class _Step:
    """One operator of the first pass.

    Attributes:
        name: The operator.
        numbers: Its arguments that are no tensors.
        shapes: The shapes of its results.
        values: Copies of small tensors that Python's numbers make.
        cuts: Where it cuts a tensor, if it does.
    """

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


_active: list[RowTracker] = []


def active_tracker() -> RowTracker | None:
    """Return the tracker that follows the pass that runs, if one does.

    A function that leaves torch, such as one that reads a device, asks it, and notes where the records stand in what it
    returns instead of running.
    """
    return _active[-1] if _active else None


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
        self._stack = ExitStack()
        self._kept: dict[int, str] = {}
        for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in named:
                self.note(tensor, None)
                self._kept[memory(tensor)._cdata] = f"{kind} {name!r}"

    def __enter__(self) -> Self:
        self._stack.enter_context(guarded(self))
        _active.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.pop()
        self._stack.close()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from loading its compiler, which takes seconds, to say that it does not compile this class."""
        return False

    # States

    def note(self, tensor: Tensor, state: State) -> None:
        """Say what a tensor holds."""
        with torch._C.DisableTorchFunction():
            storage, key = address(tensor)
            number = storage._cdata
            if number not in self.survey.states:
                self.survey.storages.append(storage)
            self.survey.states.setdefault(number, {})[key] = state

    def state(self, tensor: Tensor) -> State:
        """Return what a tensor holds."""
        with torch._C.DisableTorchFunction():
            storage, key = address(tensor)
        known = self.survey.states.get(storage._cdata)
        if known is None:
            return self._outside(tensor, storage, key)
        if key in known:
            return known[key]
        if all(state is None for state in known.values()):
            return None
        return next(
            (state for state in known.values() if isinstance(state, Mixed)),
            Mixed(
                "a view that no operator made mixes the records of a batch", "take views by torch's functions"
            ),
        )

    def _outside(self, tensor: Tensor, storage: Any, key: Any) -> State:
        """Return the state of a tensor that no operator of this pass has computed."""
        number = storage._cdata
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
        self.note(tensor, None)
        return None

    def require_inside(self, tensor: Tensor, method: str) -> None:
        """Refuse to hand numbers of records to code outside of torch.

        Args:
            tensor: A tensor.
            method: The method that would hand its numbers out.

        Raises:
            ValueError: It holds records, or what they share.
        """
        if active_tracker() is not self or self.state(tensor) is None:
            return
        with self.noting():
            raise ValueError(
                f"model: {self._where(method)} hands numbers of the batch to code outside of torch, which may mix the "
                f"records of a batch: {_TENSOR_REMEDY}"
            )

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note a refusal in this block, so that code which catches it does not hide it."""
        try:
            yield
        except ValueError as error:
            self.refused = self.refused or error
            raise

    def require_unrefused(self) -> None:
        """Raise the first refusal again.

        Raises:
            ValueError: There was one.
        """
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
        with torch._C.DisableTorchFunction(), self.noting():
            arguments = named_arguments(func, args, kwargs or {})
            name = operator_name(func)
            self._require_plain_pass(name)
            self._require_plain_tensors(name, types)
            keep_shape(func, name, arguments)
            tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
            try:
                states = {id(t): None if name == "lift_fresh" else self.state(t) for t in tensors}
                op = Operation(func, name, self._where(name), arguments, states, self._records)
                self._require_unread(op)
                result = func(*args, **(kwargs or {}))
                require_dense(result)
                self._note_results(op, result)
            except Refused as refused:
                raise self._refusal(name, refused) from None
            return result

    def _require_plain_pass(self, name: str) -> None:
        """Refuse gradients, and directional derivatives, that a forward pass computes."""
        if self.backward:
            return
        if torch._C._current_graph_task_id() != -1:
            raise ValueError(
                f"model: {self._where()} computes gradients in its forward pass (torch.autograd.grad, backward or "
                "torch.func.grad), of which those of single records cannot be told; compute them outside of the model"
            )
        if forward_ad._current_level >= 0:
            raise ValueError(
                f"model: {self._where()} computes directional derivatives in its forward pass (forward_ad or "
                "torch.func.jvp), in which uses of parameters are not seen; compute them outside of the model"
            )

    def _require_plain_tensors(self, name: str, types: Collection[type]) -> None:
        """Refuse tensors of classes whose operators are Python code, which runs where no tracker sees it."""
        plain = Tensor.__torch_dispatch__
        others = [kind.__name__ for kind in types if getattr(kind, "__torch_dispatch__", plain) is not plain]
        if others:
            raise ValueError(
                f"model: {self._where(name)} takes a {others[0]}, a class of tensors with operators of its own "
                "(__torch_dispatch__), which are not seen; compute with plain tensors"
            )

    def _require_unread(self, op: Operation) -> None:
        """Refuse numbers of records that become numbers of Python."""
        if op.name not in _READS:
            return
        for tensor in op.tensors:
            state = op.state(tensor)
            if state is not None:
                why = f" ({state.reason})" if isinstance(state, Mixed) else ""
                raise Refused(f"reads numbers of the batch into Python{why}", _TENSOR_REMEDY)

    def _note_results(self, op: Operation, result: Any) -> None:
        outputs = outputs_of(result)
        given = numbers(op)
        if self._first is None:
            self._take_notes(op, outputs, given)
            return
        self._require_nothing_kept(op)
        step = self._step(op, outputs)
        states = self._states(op, outputs, step, given)
        for output, state, shape in zip(outputs, states, step.shapes, strict=True):
            if output is None:
                continue
            self._require_scaled(output, state, shape)
            self._write(op, output, state)
        self._require_known_writes(op, outputs)

    def _require_nothing_kept(self, op: Operation) -> None:
        """Refuse numbers of records that are written into a parameter or a buffer."""
        for tensor in overwritten(op) if any(op.states.values()) else ():
            kept = self._kept.get(memory(tensor)._cdata)
            if kept is not None:
                raise _keeps(kept, op.where)

    def require_nothing_left(self) -> None:
        """Refuse numbers of records that passes, which are over, wrote into a tensor that they had not computed.

        Raises:
            ValueError: There are some.
        """
        for number in self.survey.outside:
            if any(self.survey.states[number].values()):
                raise ValueError(
                    "model: a training pass writes numbers of the batch into a tensor that it did not make, from which "
                    "the next batch would read them; write into new tensors (torch.zeros_like)"
                )

    def require_parameters_kept(self, model: nn.Module) -> None:
        """Refuse numbers of records that a pass, which is over, put in the place of a parameter; `memory` keeps others.

        Raises:
            ValueError: There are some.
        """
        for name, parameter in model.named_parameters():
            if self.state(parameter) is not None:
                raise _keeps(f"parameter {name!r}", type(model).__name__)

    def _take_notes(self, op: Operation, outputs: Outputs, numbers: tuple[Any, ...]) -> None:
        """Note an operator of the first pass."""
        held = next((state for state in op.states.values() if state is not None), None)
        values = [
            output.detach().clone()
            if output is not None and op.name == "lift_fresh" and output.numel() <= _LOGGED
            else None
            for output in outputs
        ]
        shapes = [None if output is None else tuple(output.shape) for output in outputs]
        self.survey.steps.append(_Step(op.name, numbers, shapes, values, cuts_of(op)))
        for output in outputs:
            if output is not None:
                self.note(output, held)
        for tensor in overwritten(op) if held is not None else ():
            self._spread(tensor, held)

    def _step(self, op: Operation, outputs: Outputs) -> _Step:
        """Return the operator of the first pass that corresponds to this one."""
        number = len(self.survey.steps)
        step = self._first.steps[number] if self._first and number < len(self._first.steps) else None
        self.survey.steps.append(_Step(op.name, (), [], []))
        if step is None or step.name != op.name or len(step.shapes) != len(outputs):
            raise Refused(
                "does not run in batches of every size",
                "run the same operators whatever the batch holds and however many records it has",
            )
        return step

    def _states(self, op: Operation, outputs: Outputs, step: _Step, numbers: tuple[Any, ...]) -> list[State]:
        """Return the states of an operator's results."""
        given = list(op.states.values())
        factory = op.name in _FACTORIES and not (op.name.endswith("_like") and any(given))
        found: State | list[State]
        if factory or not any(state is not None and not _is_placed(state) for state in given):
            found = [
                None if output is None else self._constant(op, output, step, n, numbers, factory=factory)
                for n, output in enumerate(outputs)
            ]
            return self._undrawn(op, found)
        rule = rule_of(op.name)
        if rule is None:
            raise Refused("has no known rule for the rows of records", _NO_RULE.get(op.name, _LIST))
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
        by_place = op.name in BY_PLACE
        if not keeps_alike(op):
            states = [replace(state, free=False) if isinstance(state, Held) else state for state in states]
        shared = next((s for s in given if isinstance(s, Mixed) and not (s.placed and by_place)), None)
        if shared is not None:  # whatever the rule looks at
            return [
                s if isinstance(s, Mixed) else replace(shared, placed=False, counts=False) for s in states
            ]
        cuts = cuts_of_records(op) or ()
        fixed = [a for a, b in zip(cuts, step.cuts, strict=False) if a is not None and a == b]
        if fixed:  # also if it leaves nothing of the batches of these passes
            mixed = op.mixed("cuts the batch at a fixed number of records", "work on the whole batch")
            return [state if isinstance(state, Mixed) else mixed for state in states]
        if not any(cuts) and not agrees(numbers, step.numbers):
            mixed = op.mixed(
                "takes the number of records as a number", "let no number depend on the batch's size"
            )
            return [mixed if isinstance(state, Held) else state for state in states]
        return self._undrawn(op, states)

    @staticmethod
    def _undrawn(op: Operation, states: list[State]) -> list[State]:
        """Return states, and what is known by its place in the batch if a generator of known seed drew for records."""
        if not any(isinstance(state, Held) for state in states) or not own_draws(op):
            return states
        mixed = op.mixed(
            "draws for every place in the batch from a generator that the model made or seeded, so that records that "
            "come or go change what the others get",
            "draw from torch's generator as it is",
        )
        return [mixed if isinstance(state, Held) else state for state in states]

    def _constant(
        self, op: Operation, output: Tensor, step: _Step, n: int, numbers: tuple[Any, ...], *, factory: bool
    ) -> State:
        """Return the state of a result that depends on no record, only perhaps on their number and order."""
        shape, counts = step.shapes[n], (self._first.records if self._first else 0, self._records)
        placed = Mixed(
            f"{op.where} makes numbers that depend on the number of records or on their order",
            "let no number depend on a record's place in the batch or on the batch's size",
            placed=True,
            counts=counts_on(op, output),
        )
        if "." in op.name and not op.name.startswith("prims."):
            return op.mixed("is an operator of a package, which may see more than its arguments", _LIST)
        if shape is None:
            return placed
        same = agrees(numbers, step.numbers) and not any(_is_placed(state) for state in op.states.values())
        if shape != tuple(output.shape):
            scaled = scaled_dimension(shape, tuple(output.shape), counts)
            if factory and scaled is not None and same:
                return Held(Layout(scaled[0], 1, scaled[1]), free=True)
            same = same and op.name in _REPEATS
            return (constant_state(output, shape, counts) if same else None) or placed
        if op.name != "lift_fresh":
            return None if same else placed
        before = step.values[n]
        return None if before is not None and _same(before, output) else placed

    def _require_scaled(self, output: Tensor, state: State, shape: tuple[int, ...] | None) -> None:
        """Refuse a result whose shape depends on the number of records in another way than by its rows."""
        now = tuple(output.shape)
        if isinstance(state, Held):
            layout, before = state.layout, self._first.records if self._first else 0
            wanted = list(now)
            fits = len(now) > layout.dim and now[layout.dim] == layout.rows * self._records
            if fits:
                wanted[layout.dim] = layout.rows * before
            if fits and shape == tuple(wanted):
                return
        elif isinstance(state, Mixed) or shape == now:
            return
        raise Refused(
            f"returns shape {now} for {self._records} records and {shape} for another number",
            "let no size but that of the records' dimension depend on the batch",
        )

    # Memory

    def _write(self, op: Operation, output: Tensor, state: State) -> None:
        """Note the state of a result, and what it means for other views of the same memory."""
        if any(output is tensor for tensor in overwritten(op)):
            self._spread(output, state)
        self.note(output, state)

    def _require_known_writes(self, op: Operation, outputs: Outputs) -> None:
        """Follow tensors that an operator overwrites besides its results."""
        for tensor in overwritten(op):
            if not any(tensor is output for output in outputs) and any(op.states.values()):
                self._spread(tensor, op.mixed("overwrites a tensor by what records share"))

    def _spread(self, tensor: Tensor, state: State) -> None:
        """Give the views of a tensor's memory the state that it was overwritten with.

        Raises:
            Refused: They would hold the records in another order.
        """
        storage, key = address(tensor)
        known = self.survey.states.get(storage._cdata, {})
        if state is None:
            return
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

    def _refusal(self, name: str, refused: Refused) -> ValueError:
        return ValueError(
            f"model: {self._where(name)} {refused.reason}, and so mixes the records of a batch: {refused.remedy}"
        )

    def _where(self, name: str = "") -> str:
        """Return the submodule that runs, after the operator's name."""
        node = torch._C._current_autograd_node() if self.backward else None
        if node is not None:
            place = (
                self._nodes.get(node._sequence_nr(), "the model") + f", backward pass of {_node_name(node)}"
            )
        else:
            place = self._running(sys._getframe(1))
            self._nodes[torch._C._autograd._get_sequence_nr() - 1] = place
        return f"{_SHOWN.get(name, name)} in {place}" if name else place

    def _running(self, frame: FrameType | None) -> str:
        """Return the innermost submodule whose code runs."""
        while frame is not None:
            own = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
            if isinstance(own, nn.Module) and id(own) in self._names:
                name = self._names[id(own)]
                return f"{type(own).__name__} {name!r}" if name else type(own).__name__
            frame = frame.f_back
        return "the model"


def _keeps(kept: str, where: str) -> ValueError:
    return ValueError(
        f"model: a training pass changes {kept} ({where} writes numbers of the batch into it), which a checkpoint "
        "would hold without noise; use modules that keep nothing of a batch"
    )


def _is_placed(state: State) -> bool:
    return isinstance(state, Mixed) and state.placed


def _same(first: Tensor, second: Tensor) -> bool:
    same = (first == second) | ((first != first) & (second != second))
    return first.dtype == second.dtype and bool(same.all())


def _node_name(node: Any) -> str:
    return str(node.name()).removesuffix("0")
