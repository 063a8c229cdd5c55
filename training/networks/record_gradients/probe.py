"""Find where the records of a batch stand in every use of a parameter, and refuse models that mix records.

The model runs forwards and backwards on batches of two sizes, and every operator is followed
(`opusim.training.networks.record_gradients.followed.tracking`): which rows belong to a record, and whether rows depend
on other records, follows from the operators, not from what the records hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from opusim.devices.base import NoisyDevice
from opusim.training.networks.record_gradients.calls import (
    Key,
    Kinds,
    Layout,
    Rows,
    Site,
    Slot,
    require_inputs_kept,
)
from opusim.training.networks.record_gradients.followed.placement import Held, Mixed, State, seed_pass
from opusim.training.networks.record_gradients.followed.tracking import RowTracker, Survey
from opusim.training.networks.record_gradients.recorder import Recorder
from opusim.training.networks.record_gradients.uses import copies
from opusim.training.networks.record_independence import (
    MIXES_REMEDY,
    batch_statistics,
    perturbed,
    preserved_buffers,
    preserved_generators,
    require_fixed_tensors,
    require_forgetful,
    runs_torch_only,
    scaled,
    seeded_output,
)

_COUNTS = (6, 37)
"""Batch sizes whose remainders differ modulo every number up to 30, so that code that branches on one takes two paths.

The second exceeds a block of some kernels.
"""
_FEW = 7
"""The second size for models of more than `_SMALL` parameters."""
_SMALL = 2**24
_ROUNDS = 20
"""Most rounds: each meets one more function on the way from parameters and constants to a tensor."""
UNSEEN = (
    "is used where single records cannot be told apart (a compiled, checkpointed or custom autograd function, an "
    "assignment into a tensor, or a penalty on the parameters); use it in ordinary torch functions"
)
"""End of a message about a parameter that receives a gradient of its own."""


def probe(
    model: nn.Module,
    named: Sequence[tuple[str, nn.Parameter]],
    given: Rows,
    kinds: Kinds,
) -> tuple[list[list[int]], bool]:
    """Note the kinds of uses of trained parameters; return the layers, and whether a parameter has several uses.

    A layer is the numbers of the parameters that share a use. The model, in the mode in which it will be trained, runs
    on the given arguments for at least one record. Its parameters, gradients, buffers and Python attributes, and
    torch's generators, are restored. Raises ValueError if it mixes records, or a use has no rows for each record.
    """
    batches = _batches(model, given)
    with _restored(model, given.tensors[0].device), torch.enable_grad():
        remembers = not runs_torch_only(model)
        if remembers:  # some models fill caches in their first pass
            seed_pass()
            args, kwargs = batches[0].values
            with _ProbeRecorder(named, kinds):
                model(*args, **kwargs)
        for _ in range(_ROUNDS):
            first = _Pass(model, named, kinds, batches[0], None)
            second = _Pass(model, named, kinds, batches[1], first.tracker.survey)
            if second.recorder.is_settled():
                break
        second.require_rows(first)
        pairs = enumerate(zip(second.outputs, second.states, strict=True))
        seeded = [n for n, (output, state) in pairs if isinstance(state, Held) and output.requires_grad]
        first.differentiate(named, seeded)
        second.differentiate(named, seeded)
        second.require_rows_of_signals()
        second.tracker.require_parameters_kept(model)
        second.tracker.require_nothing_left()
        if remembers:
            after = _Pass(model, named, kinds, batches[1], first.tracker.survey)
            after.require_rows(first)  # meets what the backward pass kept
    second.recorder.settle()
    uses = [call.site.roots for call in second.recorder.calls]
    several = any(sum(n in roots for roots in uses) > 1 for n in range(len(named)))
    return _components(uses, len(named)), several


def require_separate_outputs(model: nn.Module, x: Tensor) -> None:
    """Refuse (ValueError) a module in which one record of a batch changes another's output, or that keeps some.

    Forward passes on two numbers of invented records, shape (n, ...), are followed operator by operator, see the top of
    this file; a pass must leave parameters, buffers and attributes as they are, and return one row for each record. The
    module, in the mode in which it will be trained, is restored, except for what its first pass sets.
    """
    if found := batch_statistics(model):
        raise ValueError(f"model: {found} mixes the records of a batch: {MIXES_REMEDY}")
    with preserved_generators(x.device), _without_readings(model, x):
        require_fixed_tensors(model, x)
        require_forgetful(model, lambda index, factor: seeded_output(model, scaled(x, index, factor)))
    batches = _batches(model, Rows.of(((x,), {})))
    with _restored(model, x.device, move=False), _without_readings(model, x), torch.no_grad():
        seed_pass()
        model(*batches[0].values[0])
        first = _Pass(model, [], Kinds(), batches[0], None)
        second = _Pass(model, [], Kinds(), batches[1], first.tracker.survey)
        second.require_rows(first, whole=True)
        second.tracker.require_nothing_left()


@contextmanager
def _without_readings(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Let layers that read a device multiply digitally within the block; a device processes each row separately."""
    layers = [layer for layer in model.modules() if isinstance(getattr(layer, "device", None), NoisyDevice)]
    for layer in layers:
        device: Any = layer.device
        weight = torch.zeros(device.n_outputs, device.n_inputs, device=x.device)
        layer.forward = partial(functional.linear, weight=weight)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _batches(model: nn.Module, given: Rows) -> list[Rows]:
    """Return batches of two sizes."""
    small = sum(parameter.numel() for parameter in model.parameters()) <= _SMALL
    return given.repeated(_COUNTS[0], _COUNTS[1] if small else _FEW)


@contextmanager
def _restored(model: nn.Module, place: torch.device, *, move: bool = True) -> Iterator[None]:
    """Perturb the parameters within the block, or only keep them, and restore everything on exit."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        with (
            preserved_generators(place),
            preserved_buffers(model),
            perturbed(model) if move else nullcontext(),
        ):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


class _ProbeRecorder(Recorder):
    """Catches all functions of a probe's pass, and notes the kind of each use; without a tracker it notes nothing."""

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], kinds: Kinds, tracker: RowTracker | None = None
    ) -> None:
        super().__init__(named, kinds, probing=True)
        self._tracker = tracker
        self._found: list[tuple[Key, list[Slot]]] = []
        self._fixed, self._copied = set[Key](), set[Key]()

    def is_settled(self) -> bool:
        """Add uses that depend on no record to `kinds`; return whether all were there before."""
        kinds = self.kinds
        settled = self._fixed <= kinds.fixed and self._copied <= kinds.copied
        kinds.fixed |= self._fixed
        kinds.copied |= self._copied
        return settled

    def settle(self) -> None:
        """Add the uses found to `kinds`; raise ValueError if calls of a kind see records in different dimensions."""
        slots = self.kinds.slots
        for key, found in self._found:
            known = slots.setdefault(key, found)
            differs = known is not found and [slot.kind for slot in known] != [slot.kind for slot in found]
            if differs or key in self.kinds.fixed:
                raise ValueError(
                    f"model: {key} sees records in different dimensions in two calls, or none in one; keep the same"
                )

    def _states(self, key: Key, *tensors: Tensor) -> list[State]:
        """Return the states of tensors of a use; raise ValueError if one mixes records."""
        if self._tracker is None:
            return [None for _ in tensors]
        states = self._tracker.states(*tensors)
        for state in states:
            if isinstance(state, Mixed):
                raise self._tracker.noted(
                    f"model: {key} mixes the records of a batch ({state.reason}): {state.remedy}"
                )
        return states

    def _look_at_constant(self, key: Key, tensor: Tensor) -> None:
        """Note whether a tensor that is computed from parameters only holds a copy for each record."""
        if isinstance(self._states(key, tensor)[0], Held):
            self._copied.add(key)

    def _layouts(self, key: Key, site: Site, tensors: Sequence[Tensor]) -> list[Layout | None]:
        """Note where the records stand in the tensors of a use, which must be those of the batch."""
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
            raise ValueError(
                f"model: {key} runs within torch.vmap or torch.func, where the rows of records cannot be told apart; "
                "call the module on the whole batch"
            )
        if self._tracker is None:
            return [None for _ in tensors]
        states = self._states(key, *tensors)
        layouts = [state.layout if isinstance(state, Held) else None for state in states]
        inputs = len(site.others)
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
        if site.func is copies and layouts[0] is not None and layouts[0].rows > 1:
            raise ValueError(
                f"model: {site.where} repeats parameters for each record within a dimension of positions; expand it by "
                "record, into a dimension of its own"
            )
        slots = zip(layouts, tensors, strict=True)
        self._found.append((key, [Slot(layout, tensor.ndim) for layout, tensor in slots]))
        return layouts


class _Pass:
    """One forward and one backward pass of the model on a batch; the second, on another size, fills `kinds`."""

    def __init__(
        self,
        model: nn.Module,
        named: Sequence[tuple[str, nn.Parameter]],
        kinds: Kinds,
        batch: Rows,
        first: Survey | None,
    ) -> None:
        self.tracker = RowTracker(model, batch.records, first)
        for leaf, held in zip(batch.leaves, batch.held, strict=True):
            if isinstance(leaf, Tensor):
                self.tracker.note(Held(Layout(0)) if held else None, leaf)
        self._records = batch.records
        self.recorder = _ProbeRecorder(named, kinds, None if first is None else self.tracker)
        args, kwargs = batch.values
        seed_pass()
        try:
            with self.tracker, self.recorder:
                output = model(*args, **kwargs)
        finally:
            self.tracker.require_unrefused()
        self.outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self.states = self.tracker.states(*self.outputs)
        require_inputs_kept(self.recorder.calls)

    def require_rows(self, first: _Pass, *, whole: bool = False) -> None:
        """Refuse (ValueError) outputs that mix records and grow from the first pass's batch to this one.

        If `whole`, every output must have one row for each record, in their order.
        """
        for number, (output, state) in enumerate(zip(self.outputs, self.states, strict=True)):
            grows = number >= len(first.outputs) or first.outputs[number].shape != output.shape
            if isinstance(state, Mixed) and grows:
                raise mixes("the model's output", state)
            if whole and not (isinstance(state, Held) and state.layout == Layout(0)):
                raise ValueError(
                    f"model: its output of shape {tuple(output.shape)} has no row for each of {self._records} records; "
                    "return one row per record, in the order of the batch"
                )

    def differentiate(self, named: Sequence[tuple[str, nn.Parameter]], seeded: Sequence[int]) -> None:
        """Run the backward pass from gradients at seeded outputs; refuse (ValueError) one that mixes records."""
        generator = torch.Generator().manual_seed(1)
        roots = [self.outputs[n] for n in seeded]
        seeds = [torch.randn(root.shape, generator=generator).to(root) for root in roots]
        for seed, n in zip(seeds, seeded, strict=True):
            self.tracker.note(self.states[n], seed)
        for _, parameter in named:
            parameter.grad = None
        self.tracker.backward = True
        try:
            with self.tracker:
                if roots:
                    torch.autograd.backward(roots, seeds)
            self.tracker.require_unrefused()
        except CheckpointError as error:
            raise ValueError(
                "model: recomputes activations in the backward pass (torch.utils.checkpoint), where uses of parameters "
                "are not seen; switch it off, and take smaller batches or max_physical_batch_size"
            ) from error
        for name, parameter in named:
            if parameter.grad is not None:
                raise ValueError(f"model: parameter {name!r} {UNSEEN}")

    def require_rows_of_signals(self) -> None:
        """Refuse (ValueError) gradients at uses whose records stand in other places than in the outputs."""
        for call in self.recorder.calls:
            where, layouts = call.site.where, call.site.layouts[len(call.site.others) :]
            for found, layout in zip(call.deltas, layouts, strict=True):
                (state,) = self.tracker.states(found[0]) if found else [None]
                if isinstance(state, Mixed):
                    raise mixes(f"the gradient at {where}", state)
                if isinstance(state, Held) and state.layout != layout and not state.free:
                    raise ValueError(
                        f"model: the gradient at {where} holds the records in another order than its output, as after "
                        f"a custom autograd function that mixes the records of a batch: {MIXES_REMEDY}"
                    )


def mixes(where: str, state: Mixed) -> ValueError:
    """Return the refusal of something that depends on several records."""
    return ValueError(f"model: {where} mixes the records of a batch ({state.reason}): {state.remedy}")


def invented_rows(model: nn.Module, rows: Rows) -> Rows:
    """Invent records of given shapes, whose whole numbers are indices into every embedding of the model."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    sizes = [part.num_embeddings for part in model.modules() if isinstance(part, kinds)]
    return rows.invented(max(_COUNTS[0], 7), min(sizes, default=2))


def _components(groups: Sequence[frozenset[int]], count: int) -> list[list[int]]:
    """Return the connected components of parameters that share a use, in order."""
    heads = list(range(count))
    for group in groups:
        joined = {heads[n] for n in group}
        heads = [min(joined) if head in joined else head for head in heads]
    return [[n for n in range(count) if heads[n] == head] for head in sorted(set(heads))]
