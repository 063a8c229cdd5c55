"""A module whose training passes are recorded and whose parameters receive private gradients only.

The user's module stays the object that it is: calls of it are caught where `torch.nn.Module.compile` catches them, so
that frameworks, optimizers, hooks and state dicts see the plain module, and a copy of it is plain. A call in training
mode on the batch at hand is recorded by a `RecordTape`, and its outputs are returned detached. The criterion brings the
gradient of each record's loss at these outputs; a backward pass from there gives the gradients of single records, which
`RecordGradients` clips, sums and noises.

A parameter's `.grad` is therefore private at all times, and every other backward pass that would reach a parameter is
refused:

| what the loop does | what happens |
| --- | --- |
| another criterion, or outputs changed before the criterion | refused in the backward pass |
| a second backward pass on a batch, or on a batch that is over | refused |
| the module in evaluation mode, on other rows, or outside of the loop, then a backward pass | refused |
| evaluation, with or without torch.no_grad | plain, whenever it happens |
| gradients clipped, scaled or zeroed after the backward pass | allowed: post-processing |
| several batches before a step | allowed: their private gradients add up |
| another optimizer on the parameters | sees private gradients only |
| a step without a new backward pass | refused after it; it saw private gradients only |
| parameters frozen, unfrozen, exchanged or added; parts exchanged; hooks added | refused |
| numbers, or tensors without a row for each record, as arguments in training | refused |
| rows of a filled batch in another order | refused if nothing else was changed; the order says which rows only fill |
| rows of a batch of users in another order | refused likewise; the order says whose they are |
| the module's arguments and the targets in different orders | refused likewise; a loss would join two records |
| buffers and Python attributes that a pass changes | as before after each pass |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from typing_extensions import override

from opusim.processes.ranks import Ranks
from opusim.training.engine.steps import PaidSteps
from opusim.training.feedback.points import FeedbackAlignment
from opusim.training.networks.clipping import by_record, finite_rows
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.networks.record_gradients.calls import Rows
from opusim.training.networks.record_gradients.recorder import Recorder, unread_masks
from opusim.training.networks.record_gradients.tape import RecordTape
from opusim.training.networks.record_independence import (
    preserved_generators,
    preserved_state,
    system_generators,
)
from opusim.training.private_loop.folder import generator_states, set_generator_states
from opusim.training.private_loop.inputs import (
    FILLED,
    OF_USERS,
    ProbedParts,
    cut_rows,
    require_order,
    require_own_rows,
    require_rows,
    require_steady,
    rows_of,
    template_of,
)
from opusim.training.protections.base import PrivateGradients
from opusim.training.zeroth_order.optimizer import ZerothOrder
from opusim.training.zeroth_order.trainer import ScalarRelease

Gradients = Sequence[tuple[Tensor, Tensor]]
"""Outputs as the user received them, and the gradients of the records' summed losses there."""


@dataclass(kw_only=True)
class Pass:
    """One call of the module on the batch at hand.

    Attributes:
        args: Its arguments.
        kwargs: Its keyword arguments.
        attached: Its outputs with their graph, by place; empty if parts of the batch run again.
        handed: The detached outputs that the user received instead.
        versions: Torch's version of each of these when it was handed out; a change in place raises it.
        states: The states of torch's generators before each part, if parts run again.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    attached: dict[int, Tensor] = field(default_factory=dict)
    handed: dict[int, Tensor] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    states: list[list[Tensor]] = field(default_factory=list)

    def wanted(self, gradients: Gradients) -> dict[int, Tensor]:
        """Return the gradients at its outputs, by place."""
        return {n: g for output, g in gradients for n, handed in self.handed.items() if handed is output}


@dataclass(kw_only=True)
class Batch:
    """The batch at hand.

    Attributes:
        step: Its number.
        records: Its rows.
        recorder: Records its passes; None before the first, and if parts run again.
        passes: The calls of the module on it.
        written: Whether its gradients were written.
        failed: How many backward passes on it ended in an error.
    """

    step: int
    records: int
    recorder: Recorder | None = None
    passes: list[Pass] = field(default_factory=list)
    written: bool = False
    failed: int = 0


USES_PARAMETERS = (
    "criterion: uses parameters of the module, such as a penalty on them, and that gradient would be left out; use the "
    "optimizer's weight_decay, or compute what it needs in the module"
)
_UNSEEN = "the module ran where its calls are not caught, such as compiled, or a part of it ran outside of it"
_LEAST_SCALE = 2.0**8
"""Powers of two from here on count as the factor of a GradScaler, which starts at 2^16."""
_ORDER_CHECKS = 4
"""Number of batches whose order of rows is checked; a loop that changes it does so in every batch."""
_PASSES_A_STEP = 2**20
"""Step numbers of the device for each step's backward passes, so that parts of a batch do not share its noise."""


class ModuleInLoop(ABC):
    """A module in a private loop: the batch at hand, and what may reach the parameters.

    Args:
        module: In training mode. Calls of it are caught until `close`.
        given: Arguments for a few records, as a probe (`arguments_for`).
        steps: The processes that share each batch.
        points: The feedback points in the module.
        most_rows: Rows in one pass at most, or None for all.
        group: Neighbouring rows that are clipped as one, those of a user; `most_rows` is a multiple of it.

    Raises:
        ValueError: The module mixes records, or cannot be recorded.
    """

    def __init__(
        self,
        module: nn.Module,
        given: Rows,
        *,
        steps: PaidSteps,
        points: Sequence[FeedbackAlignment],
        most_rows: int | None = None,
        group: int = 1,
    ) -> None:
        self.module = module
        self.factor: float | None = None
        """What the loop multiplies its loss by before the backward pass, such as 1 / number of accumulated batches; it
        is a constant, None until the first backward pass."""
        self.unused_gradients = 0
        """Batches that were trained on since the last step of the optimizer."""
        self.paid_on: str | None = None
        """Type of the parameters' torch device when the step was paid for; None before the first."""
        self._limit, self._group, self._steps = most_rows, group, steps
        self._template = template_of(module, given)
        args, kwargs = given.values
        self.tape = RecordTape(module, *args, **kwargs)
        """The tape that follows the records through the module."""
        require_steady(self.tape, args, kwargs, points)
        self.trained_parameters = [p for layer in self.tape.layers for p in layer]
        """The parameters that are trained."""
        self.probed = ProbedParts(module)
        for parameter in self.trained_parameters:
            parameter.grad = None  # of earlier training, which was not private
        self._batch: Batch | None = None
        self.records = 0
        """Rows of the batch at hand."""
        self._writing = False
        self.padding: Tensor | None = None
        """Marks the rows of the batch at hand that only fill it, bool, shape (records,); None if rows never do."""
        self._weights: Tensor | None = None
        self.handed: list[Any] = []
        """Leaves of the batch at hand as the loop received it, if the order of its rows is checked."""
        self.arguments: dict[int, list[Any]] = {}
        """Leaves that the module was given on that batch, by the `id` of each output."""
        self._order: str | None = None
        self._order_checks = _ORDER_CHECKS
        self._plain = _UNSEEN
        self._handles = [
            p.register_post_accumulate_grad_hook(self._refuse_gradient) for p in self.trained_parameters
        ]
        module._compiled_call_impl = _Caught(self)

    def close(self) -> None:
        """Give the plain module back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.module._compiled_call_impl = None
        self.drop()
        self.handed, self.arguments = [], {}

    # The batch at hand

    def begin(
        self, step: int, rows: int, drawn: int | Sequence[int] | None = None, handed: Any = None
    ) -> None:
        """Take a batch of some rows, as the loop receives it, as the one at hand.

        `drawn` is the number of its first rows that are records, the others having weight zero, or of each user; None
        for all.
        """
        self.probed.require_same()
        self.padding = self._weights = None
        self.handed, self.arguments, self._order = [], {}, None
        place = self.trained_parameters[0].device
        if isinstance(drawn, Sequence):
            self._order = OF_USERS if rows > self._group else None
        elif 0 < (drawn or 0) < rows:
            self._order = FILLED
        if rows > self._group and self._order_checks:
            self.handed, self._order_checks = tree_leaves(handed), self._order_checks - 1
        if isinstance(drawn, Sequence):
            used = torch.tensor([*drawn, *[0] * (rows // self._group - len(drawn))]).view(-1, 1)
            padding = torch.arange(self._group) >= used
            weights = torch.where(padding, 0.0, 1 / used)  # of the mean over a user's records
            self._weights = weights.view(-1).to(place, non_blocking=True)
            self.padding = padding.view(-1).to(place, non_blocking=True)
        elif drawn is not None:
            self.padding = (torch.arange(rows) >= drawn).to(place, non_blocking=True)
        self._plain, self._batch, self.records = _UNSEEN, Batch(step=step, records=rows), rows

    def drop(self) -> None:
        """Forget the batch at hand."""
        self._batch, self.records = None, 0

    @property
    def trained(self) -> bool:
        """Whether the gradients of the batch at hand were written, or there is none."""
        return self._batch is None or self._batch.written

    @property
    def place(self) -> str:
        """Type of the torch device of the trained parameters, which decides how their noise is rounded."""
        places = {parameter.device.type for parameter in self.trained_parameters}
        return places.pop() if len(places) == 1 else "meta"

    @property
    def state(self) -> dict[str, Tensor]:
        """Tensors for a save, by name; a resumed loop copies into them."""
        return {}

    @abstractmethod
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module: on the batch at hand if the loop trains on it, else as it is."""

    @abstractmethod
    def outputs(self, leaves: Sequence[Any]) -> dict[int, Tensor]:
        """Return the leaves, by place, that are outputs of the batch at hand and were not changed in place."""

    def _parts_of(self, records: int) -> list[slice]:
        size = self._limit or max(records, 1)
        return [slice(start, min(start + size, records)) for start in range(0, records, size)]

    def _refuse_gradient(self, parameter: Tensor) -> None:
        """Refuse a gradient that autograd brings to a parameter."""
        if self._writing:
            return  # the tape refuses it, and says why
        parameter.grad = None
        raise RuntimeError(
            f"backward: a gradient that is not private reached a parameter, because {self._plain}; train on batches of "
            "the private loader, with the criterion that make_private returned"
        )


class PrivateModule(ModuleInLoop):
    """Records the training passes of a module and writes its private gradients.

    Args:
        module, given, steps, points, group: See `ModuleInLoop`.
        gradients: Clips, sums and noises.
        most_rows: Rows in one forward and backward pass at most, or None for all. Larger batches run in parts, and
            forward passes twice.
        release: Whether what the module draws in a step, such as dropout, comes from the system.

    Raises:
        ValueError: The module mixes records, or cannot be recorded.
    """

    def __init__(
        self,
        module: nn.Module,
        given: Rows,
        *,
        gradients: PrivateGradients,
        steps: PaidSteps,
        points: Sequence[FeedbackAlignment],
        most_rows: int | None = None,
        group: int = 1,
        release: bool = False,
    ) -> None:
        self.gradients = gradients
        place = next(module.parameters()).device
        self._drawing = partial(system_generators, place) if release else nullcontext
        self._points = points
        self._anchor = torch.zeros((), requires_grad=True)
        super().__init__(module, given, steps=steps, points=points, most_rows=most_rows, group=group)

    @property
    @override
    def state(self) -> dict[str, Tensor]:
        return self.gradients.state

    @override
    def outputs(self, leaves: Sequence[Any]) -> dict[int, Tensor]:
        handed = {
            id(output)
            for one in (self._batch.passes if self._batch is not None else ())
            for n, output in one.handed.items()
            if output._version == one.versions[n]
        }
        return {n: leaf for n, leaf in enumerate(leaves) if id(leaf) in handed}

    # Forward

    @torch._disable_dynamo
    @override
    def call(self, *args: Any, **kwargs: Any) -> Any:
        batch, leaves, reason = self._batch, tree_leaves((args, kwargs)), None
        # 1. Find out whether this is a training pass, and if not, why.
        if not torch.is_grad_enabled():
            reason = "the module ran under torch.no_grad"
        elif not self.module.training:
            reason = "the module ran in evaluation mode; call module.train() first"
        elif batch is None:
            reason = "the module ran without a batch of the private loader"
        elif (rows := rows_of(leaves)) != batch.records:
            reason = f"the module ran on {rows} rows, but the loader's batch has {batch.records} records"
        elif batch.written:
            reason = (
                "the module ran again on a batch whose gradients were written (for a GAN, give the real and the "
                "generated record to one call of the module and of the criterion)"
            )
        if reason is not None or batch is None:
            if torch.is_grad_enabled():
                self._plain = reason or self._plain
            with preserved_state(self.module, follow_hooks=False):
                return self.module._call_impl(*args, **kwargs)
        # 2. Refuse what was not probed, and run the module.
        self.probed.require_same()
        self.probed.require_same_modes()
        require_rows(leaves, batch.records)
        if self.handed and self._order is not None:
            require_order(leaves, self.handed, self._order)
        one = Pass(args=args, kwargs=kwargs)
        batch.passes.append(one)
        if not batch.records:
            # the outputs of the probe without their rows
            whole = tree_map(lambda v: v[:0] if isinstance(v, Tensor) and v.ndim else v, self._template)
            return self._handed(one, whole, attach=False)
        self.tape.follow(args, kwargs)
        if self._limit is not None and batch.records > self._limit:
            with self._drawing():
                outputs = self._in_parts(one, batch.records)
            return self._handed(one, outputs, attach=False)
        if batch.recorder is None:
            batch.recorder = self.tape.begin(batch.records // self._group, self._group)
        with self._drawing(), preserved_state(self.module, fixed=True), batch.recorder:
            output = self.module._call_impl(*args, **kwargs)
        return self._handed(one, output, attach=True)

    def _in_parts(self, one: Pass, records: int) -> Any:
        """Return the outputs of a batch that runs in parts, without a graph."""
        outputs = []
        cut = partial(cut_rows, records=records)
        for part in self._parts_of(records):
            one.states.append(generator_states())
            with preserved_state(self.module, fixed=True), unread_masks(), torch.no_grad():
                outputs.append(
                    self.module._call_impl(*cut(one.args, part=part), **cut(one.kwargs, part=part))
                )
        flat = [tree_flatten(output) for output in outputs]
        joined = []
        for values in zip(*(leaves for leaves, _ in flat), strict=True):
            sizes = [part.stop - part.start for part in self._parts_of(records)]
            if not isinstance(values[0], Tensor):
                joined.append(values[0])
                continue
            if [v.shape[:1] for v in values] != [(size,) for size in sizes]:
                raise ValueError(
                    f"module returns a tensor of shape {tuple(values[0].shape)} for {sizes[0]} records, which cannot "
                    "be joined from parts; leave max_physical_batch_size out, or return one row per record"
                )
            joined.append(torch.cat(values))
        return tree_unflatten(joined, flat[0][1])

    def _handed(self, one: Pass, output: Any, *, attach: bool) -> Any:
        """Return outputs detached; only the criterion brings gradients to those that lead to parameters."""
        leaves, spec = tree_flatten(output)
        for n, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            learns = leaf.requires_grad if attach else leaf.is_floating_point()
            leaves[n] = leaf.detach()
            if learns:
                leaves[n].requires_grad_().register_post_accumulate_grad_hook(_refuse_output)
                one.handed[n], one.versions[n] = leaves[n], leaves[n]._version
                if self.handed:
                    self.arguments[id(leaves[n])] = tree_leaves((one.args, one.kwargs))
                if attach:
                    one.attached[n] = leaf
        return tree_unflatten(leaves, spec)

    # Backward

    def loss(self, value: Tensor, gradients: Gradients) -> Tensor:
        """Return the user's loss; its backward pass writes the private gradients from those at the outputs."""
        batch = self._batch
        if not torch.is_grad_enabled():
            return value

        write = partial(self._write, batch, gradients, 0 if batch is None else batch.failed)
        loss: Tensor = _PrivateLoss.apply(self._anchor, value, self._steps.ranks, write)
        return loss

    def _write(self, batch: Batch | None, gradients: Gradients, attempt: int, factor: float) -> None:
        """Write the private gradients of a batch, and add those of earlier batches since the last step or zero_grad."""
        self._steps.require_own()
        # 1. Refuse a batch that is over, or whose gradients were released.
        if batch is None or batch is not self._batch:
            raise RuntimeError(
                "backward: the loss belongs to a batch that is over; call it once, before the next batch is drawn"
            )
        if batch.written:
            raise RuntimeError(
                f"backward: was called before on the batch of step {batch.step}, whose gradients were released once; "
                "call it once on each batch, on all that belongs to its records: for a GAN, give the real and the "
                "generated record to one call of the module and of the criterion"
            )
        if batch.failed != attempt:
            raise RuntimeError(
                f"backward: failed before on the batch of step {batch.step}; run module and criterion on it again"
            )
        # 2. Refuse a factor that depends on records, and what was not probed or paid for.
        if factor >= _LEAST_SCALE and math.frexp(factor)[0] == 0.5:
            raise RuntimeError(
                f"backward: the loss was multiplied by {factor:g}, as a GradScaler does, whose factor depends on the "
                "records and would act after the clip; leave it out, and take torch.bfloat16 or float32 instead of "
                "torch.float16"
            )
        self.factor = factor if self.factor is None else self.factor
        if factor != self.factor or not 0 < abs(factor) < float("inf"):
            raise RuntimeError(
                f"backward: the loss was multiplied by {factor:g}, and by {self.factor:g} before; multiply it by the "
                "same constant in every step, since a factor that depends on records would not be private"
            )
        self.probed.require_same()
        if self.paid_on not in (None, self.place):
            raise RuntimeError(
                f"backward: the module was moved to or from a graphics card after step {batch.step} was paid for, and "
                "the ledger says how noise is rounded there; move it before its batch is drawn"
            )
        # 3. Write the gradients of this batch only, then add the earlier ones.
        earlier = [parameter.grad for parameter in self.trained_parameters]
        for parameter in self.trained_parameters:
            parameter.grad = None
        # How often the backward passes read a feedback device, if there is one.
        readings = 0
        if self._points:
            passes = sum(bool(one.wanted(gradients)) for one in batch.passes)
            readings = passes * len(self._parts_of(batch.records))
        most = max(self._steps.agree("calls backward on the batch", readings, step=batch.step))
        self._writing, batch.written = True, True
        try:
            self.gradients.seek(batch.step)
            for feedback in self._points:
                feedback.seek(batch.step * _PASSES_A_STEP)
            self.gradients.set_gradients(self._recorded(batch, gradients, most - readings))
        except BaseException:
            for parameter in self.trained_parameters:
                parameter.grad = None
            # nothing was released; it may be tried again
            batch.written, batch.failed = False, batch.failed + 1
            raise
        finally:
            self._writing = False
            batch.passes, batch.recorder = [], None
        for parameter, before in zip(self.trained_parameters, earlier, strict=True):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
            if before is not None and parameter.grad is not None:
                parameter.grad.add_(before)
        self.unused_gradients += 1

    def _recorded(
        self, batch: Batch, gradients: Gradients, readings_of_others: int
    ) -> Iterator[Contributions]:
        """Yield the contributions of a batch's records, and take part in the further readings of other processes."""
        padding, weights = self.padding, self._weights
        if padding is not None and weights is not None:
            gradients = [
                (output, finite_rows(g * by_record(weights, g), ~padding)) for output, g in gradients
            ]
        whole = batch.recorder is not None or not batch.records
        for number, part in enumerate([slice(0, batch.records)] if whole else self._parts_of(batch.records)):
            # 1. Take the outputs, or run the forward passes of a part again.
            recorder = batch.recorder or self.tape.begin((part.stop - part.start) // self._group, self._group)
            if whole:
                pairs = [
                    (one.attached[n], g) for one in batch.passes for n, g in one.wanted(gradients).items()
                ]
            else:
                pairs, place = [], self.trained_parameters[0].device
                for one in batch.passes:
                    if not (wanted := one.wanted(gradients)):
                        continue
                    args, kwargs = cut_rows((one.args, one.kwargs), records=batch.records, part=part)
                    # with the same random numbers
                    with self._drawing(), preserved_generators(place), torch.enable_grad():
                        set_generator_states(one.states[number])
                        with preserved_state(self.module, fixed=True), recorder:
                            leaves = tree_leaves(self.module._call_impl(*args, **kwargs))
                    pairs += [(leaves[n], g[part]) for n, g in wanted.items() if leaves[n].requires_grad]
            # 2. Run the backward pass; hooks on tensors leave nothing in the module either.
            if pairs:
                with preserved_state(self.module, fixed=True):
                    torch.autograd.backward(
                        [output for output, _ in pairs], [gradient for _, gradient in pairs]
                    )
            self.tape.end(recorder)
            # 3. Leave out rows that only fill the batch.
            found = self.tape.contributions
            if padding is not None:
                own = padding[part]
                found.leave_out(own if weights is None else own.view(-1, self._group).all(dim=1))
            yield found
        for points in self._points:
            is_shared = points.noisy_device is not None and points.noisy_device.world is not None
            for _ in range(readings_of_others if is_shared else 0):
                points.read_nothing()


class _NewShapes(Exception):
    """Arguments, and keyword arguments, of shapes in which the module was not followed yet."""


class MeasuredModule(ModuleInLoop):
    """Measures the losses of the batch at hand along the directions of a `ZerothOrder`, and hands it noised sums.

    Nothing else of the records reaches the optimizer. A call of the module within `ZerothOrder.measure` is one on the
    batch at hand; every other one is plain.

    | what the loop does | what happens |
    | --- | --- |
    | `measure` on other rows than the loader's batch, or twice on a batch | refused |
    | losses that are not what the private criterion returned | refused |
    | a part of the module in training mode; rows of a filled batch in another order, or orders that differ | refused |
    | a backward pass that reaches a trained parameter | refused |
    | several batches before a step | allowed: the mean of their noised sums |
    | a step without a measured batch | refused |

    Args:
        module, given, steps, points, most_rows: See `ModuleInLoop`; the module runs in evaluation mode.
        optimizer: The optimizer whose directions are measured.
        release: Clips jointly, sums and noises.
    """

    def __init__(
        self,
        module: nn.Module,
        given: Rows,
        *,
        optimizer: ZerothOrder,
        release: ScalarRelease,
        steps: PaidSteps,
        points: Sequence[FeedbackAlignment],
        most_rows: int | None = None,
    ) -> None:
        self._optimizer, self._release = optimizer, release
        self._running = False
        self._outputs: list[tuple[Tensor, int]] = []
        self._losses: list[Tensor] = []
        with optimizer.evaluation_mode():
            super().__init__(module, given, steps=steps, points=points, most_rows=most_rows)

        def first_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
            """Return the first output with a row for each record."""
            records = rows_of(tree_leaves((args, kwargs)))
            leaves = (v for v in tree_leaves(module(*args, **kwargs)) if isinstance(v, Tensor) and v.ndim)
            return next(leaf for leaf in leaves if len(leaf) == records)

        try:
            optimizer.prepare(first_rows, given.values)
        except BaseException:
            self.close()
            raise
        optimizer.zero_grad()
        optimizer.private, optimizer.around = self._measure, partial(preserved_state, module, fixed=True)

    @override
    def close(self) -> None:
        self._optimizer.private, self._optimizer.around = None, nullcontext
        super().close()

    @override
    def outputs(self, leaves: Sequence[Any]) -> dict[int, Tensor]:
        handed = {id(output) for output, version in self._outputs if output._version == version}
        return {n: leaf for n, leaf in enumerate(leaves) if id(leaf) in handed}

    @torch._disable_dynamo
    @override
    def call(self, *args: Any, **kwargs: Any) -> Any:
        if not self._running:
            with preserved_state(self.module, follow_hooks=False):
                return self.module._call_impl(*args, **kwargs)
        given = tree_leaves((args, kwargs))
        self.probed.require_same_modes()
        require_rows(given, self.records)
        if self.handed and self._order is not None:
            require_order(given, self.handed, self._order)
        if not self.tape.has_followed(args, kwargs):
            raise _NewShapes(args, kwargs)
        output = self.module._call_impl(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self._outputs += [(leaf, leaf._version) for leaf in leaves]
        self.arguments |= {id(leaf): given for leaf in leaves}
        return output

    def losses(self, found: Tensor) -> Tensor:
        """Note losses, shape (records,), as those that the private criterion returned."""
        if found.requires_grad:
            raise ValueError(USES_PARAMETERS)
        self._losses.append(found)
        return found

    def _measure(self, losses: Callable[..., Tensor], batch: tuple[Any, ...]) -> Tensor:
        """Measure the batch at hand, in place of `ZerothOrder.measure`; return the mean loss on the first plus side."""
        self._steps.require_own()
        at_hand, leaves = self._batch, tree_leaves(batch)
        # 1. Refuse what is not the batch that was drawn and paid for, or was measured before.
        if at_hand is None:
            raise RuntimeError("measure: there is no batch at hand; take batches from the private loader")
        if at_hand.written:
            raise RuntimeError(
                f"measure: was called before on the batch of step {at_hand.step}, whose sums were released once; call "
                "it once on each batch, on all that belongs to its records"
            )
        if rows_of(leaves) != at_hand.records:
            raise ValueError(
                f"measure: was given {rows_of(leaves)} rows, but the loader's batch has {at_hand.records} records; "
                "give losses and the batch as the loader returned it"
            )
        require_rows([leaf for leaf in leaves if isinstance(leaf, Tensor)], at_hand.records)
        if self.handed:
            if self._order is not None:
                require_order(leaves, self.handed, self._order)
            require_own_rows(leaves, self.handed)
        self.probed.require_same()
        # 2. Its clipped sums; arguments of new shapes are followed with invented records first.
        try:
            while True:
                try:
                    found, first = self._sums(losses, batch, at_hand.records)
                    break
                except _NewShapes as new:
                    with self._optimizer.evaluation_mode():
                        self.tape.follow(*new.args)
            # 3. Their noise.
            noise = self._release.drawn(self._optimizer.directions, at_hand.step)
            released = found if noise is None else noise.added_to(found)
        except BaseException:
            at_hand.failed += 1  # nothing was released; it may be tried again
            raise
        at_hand.written = True
        self._optimizer.add(released, self._release.divisor)
        self.unused_gradients += 1
        if self.padding is None:
            return first.mean() if len(first) else first.sum()
        return torch.where(self.padding, 0.0, first).sum() / (~self.padding).sum().clamp_min(1)

    def _sums(
        self, losses: Callable[..., Tensor], batch: tuple[Any, ...], records: int
    ) -> tuple[Tensor, Tensor]:
        """Return the clipped sums of the batch at hand, and its losses on the plus side of the first direction.

        Moving the parameters to a side and back rounds them, and no noise protects that. So the number of moves must
        not depend on the draw: all parts run on one side before the next.
        """
        place, at_once = self.trained_parameters[0].device, self._optimizer.at_once
        parts = self._parts_of(records) or [slice(0)]
        cut = partial(cut_rows, batch, records=records)

        def own(*rows: Any) -> Tensor:
            leaves = tree_leaves(rows)
            self._running, self.records, self._outputs, self._losses = True, rows_of(leaves) or 0, [], []
            whole, self.handed, self.arguments = self.handed, leaves if self.handed else [], {}
            try:
                if not self.records:  # no pass for a batch without records
                    return torch.zeros(0, device=place)
                found = losses(*rows)
                if not any(found is each for each in self._losses):
                    raise ValueError(
                        "losses: must return what the criterion of make_private returned, called on outputs of the "
                        "module exactly as they were; move what comes between and after into the criterion"
                    )
                return found
            finally:
                self._running, self.records, self._outputs, self._losses = False, records, [], []
                self.handed, self.arguments = whole, {}

        if not at_once:
            keep = None if self.padding is None else ~self.padding
            return self._optimizer.sums(
                self._release,
                lambda *rows: torch.cat([own(*cut_rows(rows, records=records, part=part)) for part in parts]),
                batch,
                keep=keep,
            )
        found = [
            self._optimizer.sums(
                self._release, own, cut(part=part), keep=None if self.padding is None else ~self.padding[part]
            )
            for part in parts
        ]
        return torch.stack([sums for sums, _ in found]).sum(dim=0), torch.cat([first for _, first in found])


class _Caught:
    """Stands where a compiled module has its compiled call; copies and pickles of the module are plain."""

    def __init__(self, owner: ModuleInLoop) -> None:
        self._owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner.call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self | None:
        return None


class _PrivateLoss(torch.autograd.Function):
    """A number whose backward pass writes private gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, value: Tensor, ranks: Ranks, write: Callable[[float], None]
    ) -> Tensor:
        ctx.ranks, ctx.write = ranks, write
        return value.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        with ctx.ranks.handing_errors():
            ctx.write(float(factor))
        return None, None, None, None


def _refuse_output(output: Tensor) -> None:
    output.grad = None
    raise RuntimeError(
        "backward: an output of the private module learns through the criterion of make_private only, which takes it "
        "exactly as it was returned; call that criterion, and move everything else into it"
    )
