"""Hooks of feedback points: what a forward pass records, and the autograd function that connects points and error.

The hooks detach the output of each point and keep it until the error is taken. There, one autograd function takes the
error's tensor and all kept outputs; its backward pass returns dL/dz for the error and the result of
`PointHooks._project` for the outputs.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from opusim.devices.base import NoisyDevice
from opusim.training.feedback.choice import INPUT, OUTPUT, Choosing, Followed, is_a_stream, mapped, tensors_of
from opusim.training.feedback.diagnosis import Reading
from opusim.training.feedback.layout import Extent, Rows, Slice, View, arrange
from opusim.training.networks.record_gradients.followed.placement import Held, Mixed, State, active_tracker
from opusim.training.networks.record_gradients.followed.tracking import RowTracker


def holds_no_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape only, on torch's meta device."""
    return tensor.is_meta


class FeedbackShape(NamedTuple):
    """Width of the error and number of outputs of B that a model needs; `opusim.open_device` takes both."""

    n_inputs: int
    n_outputs: int


class PointHooks(Choosing, nn.Module):
    """Records feedback points in a forward pass of `model` and connects them to the error.

    It stands in for the plain model: parameters, buffers and submodules have the model's names, in state dicts and in
    `named_parameters`. Subclasses choose the points, install the hooks and project the error.

    Args:
        model: The model.
        rows: See FeedbackAlignment.
        shared: Whether all points use the same outputs of B.
        view: Where outputs have their records and channels.
        device: See FeedbackAlignment.
    """

    def __init__(
        self, model: nn.Module, *, rows: Rows, shared: bool, view: View, device: NoisyDevice | None
    ) -> None:
        super().__init__()
        self.model = model
        self._rows, self._shared, self._view, self._noisy_device = rows, shared, view, device
        self._n_inputs, self._slices, self._extent = 0, list[Slice](), Extent(0, 0, 0)
        self._calls: list[tuple[str, Tensor]] | None = None
        self._kept: list[tuple[str, Tensor]] = []
        self._connected = self._learning = self._told = self._outside = self._started = False
        self._state: Literal["learning", "measuring", "backpropagating"] = "learning"
        self._observed: list[Reading] | None = None
        self._error: Tensor | None = None
        self._followed: Followed | None = None

    @abstractmethod
    def _project(self, gradient: Tensor, points: Sequence[Tensor]) -> list[Tensor | None]:
        """Return each point's feedback from dL/dz; `points` are their outputs or tensors of such shape and type."""

    @abstractmethod
    def _begin(self, module: nn.Module, *, compiled: bool) -> None:
        """Start to record points of a module; `compiled` is known only if the pass decides the feedback's norm."""

    @property
    def _shape(self) -> FeedbackShape:
        return FeedbackShape(self._n_inputs, max((part.end for part in self._slices), default=0))

    def _install(self) -> list[Any]:
        """Put the hooks on the model."""
        handles: list[Any] = [self.model.register_forward_pre_hook(self._enter)]
        for name in self.points:
            submodule = self.model.get_submodule(name)
            handles.append(submodule.register_forward_hook(partial(self._mark, name)))
        # Where the error is taken, or where the first forward pass may choose to take it.
        received = self._vocabulary
        if self.error_at is not None and self.error_at not in dict(self.model.named_modules()):
            received = self.error_at.removesuffix(INPUT)
        if received is not None:
            module = self.model.get_submodule(received)
            handles.append(module.register_forward_pre_hook(partial(self._connect_input, received)))
        if received is None or self._vocabulary is not None:
            place = self.model.get_submodule(self.error_at or OUTPUT)
            handles.append(place.register_forward_hook(self._connect_output))
        handles.append(self.model.register_forward_hook(self._end))
        handles.append(self.model.register_forward_hook(self._forget, always_call=True))
        self.register_state_dict_post_hook(_drop_prefix)
        self.register_load_state_dict_pre_hook(_add_prefix)
        return handles

    def _enter(self, module: nn.Module, args: Any) -> None:
        """Begin a forward pass; refuse (ValueError) one that torch exports or traces: points are Python code."""
        if torch.compiler.is_exporting():
            raise ValueError(_no_export("torch.export"))
        if torch.jit.is_tracing():
            raise ValueError(_no_export("torch.jit.trace"))
        self._begin(module, compiled=self._normalised is None and torch.compiler.is_compiling())

    @torch._disable_dynamo
    def _mark(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        """Record the output of a point and return it detached."""
        if self._state == "learning" and not torch.is_grad_enabled():
            if self._calls is not None and self._learning:
                raise ValueError(_no_gradient(name))
            return None
        if self._calls is None:  # outside a forward pass, or in the recomputation of a checkpointed part
            if self._state != "learning":
                return None
            if torch._C._current_graph_task_id() != -1:  # autograd runs a backward pass, which recomputes
                return mapped(output, Tensor.detach)
            if not self._outside:  # warn once
                self._outside = True
                warnings.warn(
                    f"feedback point {name!r} runs outside a forward pass of the whole model, so that its block learns "
                    "by backpropagation there; call the model itself, wrap the module whose forward runs, or use "
                    "torch.no_grad()",
                    stacklevel=2,
                )
            return None
        if self._connected and self._state != "backpropagating":
            raise ValueError(
                f"point {name!r} runs after the error is taken at {self.error_at!r}; leave it out of points, or take "
                "the error further down"
            )
        tensors = list(tensors_of(output))
        if not tensors:
            raise ValueError(f"point {name!r} returns no tensor of real numbers; name a module that does")
        self._calls.append((name, tensors[0]))
        if self._state != "learning":
            if self._followed is not None:
                self._followed.start(tensors[0], tensors[0])
            return None
        if not tensors[0].requires_grad and any(p.requires_grad for p in module.parameters()):
            raise ValueError(_no_gradient(name))
        detached = mapped(output, Tensor.detach)
        if self._followed is not None:
            self._followed.start(next(tensors_of(detached)), tensors[0])
        return detached

    @torch._disable_dynamo
    def _connect_input(self, name: str, module: nn.Module, args: Any) -> Any:
        """Take the error at what a submodule receives, if it is to be taken there."""
        received = args[0] if args else None
        if self._idle:
            if self.error_at == name + INPUT:
                self._keep_error(received)
            return None
        if self._vocabulary is not None:
            if not is_a_stream(received) or self._at_point(received, self._calls or ()):
                return None  # the error is taken at the model's output instead
            self.error_at, self._vocabulary = name + INPUT, None
        if self.error_at != name + INPUT:
            return None
        if not isinstance(received, Tensor) or not received.is_floating_point():
            raise ValueError(
                f"error_at = {self.error_at!r}: {name!r} receives no tensor of real numbers as its first argument; "
                "name a submodule that returns what carries the error"
            )
        return (self._connected_error(received), *args[1:])

    @torch._disable_dynamo
    def _connect_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Take the error at what a submodule or the model returns, if it is to be taken there."""
        if (self.error_at or OUTPUT).endswith(INPUT) and module is self.model:
            return None
        tensors = list(tensors_of(output))
        if self._idle:
            self._keep_error(tensors[0] if tensors else None)
            return None
        if not tensors or (self.error_at is None and not isinstance(output, Tensor)):
            raise ValueError(
                f"the model returns {type(output).__name__} instead of one tensor; name the submodule whose output "
                "carries the error, error_at = the module before the output layer or the output layer"
            )
        if len(tensors) > 1 and any(tensor.requires_grad for tensor in tensors[1:]):
            raise ValueError(
                f"error_at = {self.error_at!r} returns several tensors that depend on parameters, and only one error "
                "can be projected; name a later module that returns one tensor"
            )
        self._vocabulary = None
        error, connected = tensors[0], self._connected_error(tensors[0])
        return mapped(output, lambda tensor: connected if tensor is error else tensor)

    def _keep_error(self, error: Any) -> None:
        """Keep the error's tensor in a pass that is backpropagated to observe gradients."""
        if self._observed is not None and self._state == "backpropagating":
            self._error = error

    @property
    def _idle(self) -> bool:
        """Whether no error is taken in this forward pass."""
        evaluates = self._state == "learning" and not torch.is_grad_enabled()
        return evaluates or self._state == "backpropagating" or self._calls is None

    def _connected_error(self, error: Tensor) -> Tensor:
        """Return the error's tensor, whose gradient is projected to all points recorded so far."""
        if self._connected:
            raise ValueError(
                f"error_at = {self.error_at!r} runs twice in one forward pass; name a module that runs once"
            )
        self._connected, calls = True, self._calls or []
        added = self._followed is not None and self._followed.end()
        if torch._C._functorch.is_functorch_wrapped_tensor(error):
            raise NotImplementedError(
                "feedback points do not run inside torch.func.grad or vmap; use loss.backward() or "
                "torch.autograd.grad, and opacus.GradSampleModule for gradients of single records"
            )
        self._lay_out(error, calls)
        if self._normalised is None and any(h.grad_fn is not None for _, h in calls):
            self._look(calls, added=added)
        if self._state == "measuring":
            return error
        if holds_no_numbers(error):
            raise ValueError(
                "the model is on the meta device, whose tensors hold no numbers that a point could receive; give it "
                "storage by to_empty(device='cpu') and fill it, or get the plain model from remove()"
            )
        if not self._told:
            self._told = True
            self._tell(calls)
        return _Project.apply(self, error, *(h for _, h in calls))

    @torch._disable_dynamo
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Stop recording; refuse a forward pass whose error was never taken."""
        if self._observed is not None:
            self._kept = self._calls or []
        wanted = self._state == "measuring" or (self._state == "learning" and torch.is_grad_enabled())
        if wanted and not self._connected:
            raise ValueError(
                f"error_at = {self.error_at!r} did not run in this forward pass; name a module that does"
            )

    @torch._disable_dynamo
    def _forget(self, module: nn.Module, args: Any, output: Any) -> None:
        """Drop the recorded outputs, also if the forward pass failed."""
        self._calls = None
        if self._followed is not None:
            self._followed.end()
            self._followed = None

    @staticmethod
    def _at_point(error: Tensor, calls: Sequence[tuple[str, Tensor]]) -> str | None:
        """Return the point whose output a tensor is, or None."""
        if not error.numel():
            return None
        place = error.data_ptr(), error.shape
        return next((name for name, h in calls if (h.data_ptr(), h.shape) == place), None)

    def _lay_out(self, error: Tensor, calls: Sequence[tuple[str, Tensor]]) -> None:
        """Give every call of a point its outputs of B; they must stay the same, and the device must have them."""
        last = self._at_point(error, calls)
        if last:
            raise ValueError(
                f"the error is taken at the output of point {last!r}; leave it out of points, so that it receives "
                "the true gradient"
            )
        missing = [name for name in self.points if name not in {called for called, _ in calls}]
        if missing:
            raise ValueError(
                f"point {missing[0]!r} does not run before the error is taken; leave it out of points, or name another "
                "error_at"
            )
        extent = self._view.extent(error.shape)
        slices = arrange(
            extent,
            [(name, self._view.extent(h.shape)) for name, h in calls],
            rows=self._rows,
            full=self._full,
            shared=self._shared,
            records_first=self._view.batch_dim == 0,
        )
        self._extent = extent
        if not self._slices:
            self._n_inputs, self._slices = extent.channels, slices
        if len(self._slices) != len(slices):
            raise ValueError(
                f"points run {len(slices)} times in this forward pass and ran {len(self._slices)} times in the first, "
                "and each call has its own place in B; run them equally often, or name points that run once"
            )
        if (self._n_inputs, self._slices) != (extent.channels, slices):
            raise ValueError(
                "the points' outputs have other sizes than in the first forward pass, and each entry has its own "
                "output of B; keep the sizes, or take spread = 'broadcast'"
            )
        device, shape = self._noisy_device, self._shape
        if device is not None and (device.n_inputs < shape.n_inputs or device.n_outputs < shape.n_outputs):
            raise ValueError(
                f"device {device.name!r} is open with {device.n_inputs} inputs and {device.n_outputs} outputs, the "
                f"model needs {shape.n_inputs} and {shape.n_outputs}; open it with n_inputs={shape.n_inputs}, "
                f"n_outputs={shape.n_outputs}"
            )

    # The plain model's names, attributes and state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        return self.model(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module first, under a name of its own, then those of the model under the model's names."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield f"{prefix}.{_OWN_NAME}" if prefix else _OWN_NAME, self
            yield from self.model.named_modules(memo, prefix, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        """Look up in the model what this module lacks, such as `config` or `generate`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":
                raise
            return getattr(super().__getattr__("model"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a tensor under the name of the model's parameter or buffer takes its place in the model.

        `torch.func.functional_call` sets parameters by their names in `named_parameters`.
        """
        if isinstance(value, Tensor) and name not in vars(self) and "model" in self._modules:
            registries: tuple[dict[str, Any], ...] = (self.model._parameters, self.model._buffers)
            for registry in registries:
                if name in registry:
                    registry[name] = value
                    return
        super().__setattr__(name, value)

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse `torch.jit.script`, which calls this method first."""
        raise ValueError(_no_export("torch.jit.script"))


class _Project(torch.autograd.Function):
    """z, unchanged; backward returns dL/dz for z and the projected error for the points."""

    @staticmethod
    def forward(ctx: Any, owner: PointHooks, z: Tensor, *points: Tensor) -> Tensor:
        ctx.owner = owner
        tracker = active_tracker()
        ctx.states = None if tracker is None else _states(tracker, owner, z, points)
        if owner._normalised:
            ctx.save_for_backward(*points)
        else:  # only shapes and types are needed, so that the outputs can be freed
            meta = [torch.empty(h.shape, dtype=h.dtype, device="meta") for h in points]
            ctx.points = [m.requires_grad_(h.requires_grad) for m, h in zip(meta, points, strict=True)]
        return z.view_as(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        points = ctx.saved_tensors if ctx.owner._normalised else ctx.points
        tracker, states = active_tracker(), ctx.states
        if tracker is not None and states is not None:
            # zeros in place of the feedback, which no device reads while operators are followed
            (given,) = tracker.states(gradient)
            found: list[Tensor | None] = []
            for h, state in zip(points, states[1:], strict=True):
                zeros = torch.zeros(h.shape, dtype=h.dtype, device=gradient.device)
                mixed = next((each for each in (given, states[0], state) if isinstance(each, Mixed)), None)
                tracker.note(mixed or state, zeros)
                found.append(zeros if h.requires_grad else None)
            return None, gradient, *found
        with torch.autocast(gradient.device.type, enabled=False):
            return None, gradient, *ctx.owner._project(gradient, points)


def _states(tracker: RowTracker, owner: PointHooks, z: Tensor, points: Sequence[Tensor]) -> list[State]:
    """Return the states of z and of the points, `Mixed` where feedback would mix records.

    The projection maps every row of z to a row of a point, or to all rows of the same record, where the view says which
    rows belong to a record.
    """
    view, states = owner._view, tracker.states(z, *points)
    source = states[0]
    for number, (tensor, state) in enumerate(zip((z, *points), states, strict=True)):
        if not isinstance(state, Held) or not isinstance(source, Held):
            continue
        alike = tensor.ndim == z.ndim and view.extent(tensor.shape)[:2] == view.extent(z.shape)[:2]
        by_row = owner._rows == "each" and alike and state.layout == source.layout
        dim = view.batch_dim % tensor.ndim if tensor.ndim >= 3 else 0
        ordered = state.layout == source.layout or state.layout.outer == source.layout.outer == 1
        if not by_row and not (state.layout.dim == dim and ordered):
            states[number] = Mixed(
                "feedback takes another dimension for that of the records",
                "give batch_dim to FeedbackAlignment",
            )
    return states


def _no_gradient(name: str) -> str:
    return (
        f"point {name!r} computes without gradients, so that its block cannot learn; give use_reentrant=False if "
        "activations are checkpointed (torch.utils.checkpoint), else leave the point out or take it out of no_grad"
    )


_OWN_NAME = "(FeedbackAlignment)"
"""Name of the wrapper among the named modules; no attribute can have it, so that it is no submodule's."""


def _no_export(call: str) -> str:
    return (
        f"{call} cannot record feedback points, which are Python code; give it the plain model, which remove() of "
        "FeedbackAlignment returns"
    )


def _drop_prefix(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Name the entries of a state dict, and its metadata, as the plain model does."""
    inner = f"{prefix}model."
    _rename(state, {key: prefix + key.removeprefix(inner) for key in state if key.startswith(inner)})
    versions = getattr(state, "_metadata", {})
    whole = inner.removesuffix(".")
    renamed = {key: prefix + key.removeprefix(inner) for key in versions if key.startswith(inner)}
    _rename(versions, {whole: prefix.removesuffix("."), **renamed} if whole in versions else renamed)


def _add_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Undo `_drop_prefix` before a state dict is loaded."""
    _rename(
        state, {key: f"{prefix}model.{key.removeprefix(prefix)}" for key in state if key.startswith(prefix)}
    )


def _rename(entries: dict[str, Any], names: dict[str, str]) -> None:
    """Rename entries, all at once: a new name may be another entry's old one."""
    values = {new: entries.pop(old) for old, new in names.items()}
    entries.update(values)


def refuse_second(model: nn.Module) -> None:
    """Refuse a model that has feedback points already: the first ones would win in silence."""
    if points_in(model):
        raise ValueError(
            "model has feedback points already; call remove() of its FeedbackAlignment first, which returns the plain "
            "model"
        )


def points_in(model: nn.Module) -> list[Any]:
    """Return the feedback points, each a `FeedbackAlignment`, in a module or on it."""
    found: dict[int, PointHooks] = {}
    for module in model.modules():
        owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
        found |= {id(owner): owner for owner in (module, *owners) if isinstance(owner, PointHooks)}
    return list(found.values())
