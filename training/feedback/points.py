"""Train any torch module by direct feedback alignment in an ordinary training loop: feedback points.

A feedback point is a submodule whose output is detached, so that autograd stops there. What follows the last point, and
every block between two points, is differentiated by autograd as usual. One autograd function connects the
blocks: its backward takes e = dL/dz at the place of the error, and returns e for what computed z and slices of one
projection B e for the points (Launay et al., "Direct feedback alignment scales to modern deep learning tasks and
architectures", 2020). Optimizers, hooks, mixed precision, gradient accumulation and DDP see an ordinary backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from typing_extensions import override

from opusim import checks
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork, Usage
from opusim.medium.transmission import Medium
from opusim.randomness.seeds import derive_seed
from opusim.training.feedback.choice import Followed
from opusim.training.feedback.diagnosis import (
    BATCHES,
    Control,
    Diagnosis,
    Reading,
    compared,
)
from opusim.training.feedback.hooks import FeedbackShape, PointHooks, refuse_second
from opusim.training.feedback.layout import (
    Extent,
    LearntReadout,
    Rows,
    Slice,
    View,
    chosen_rows,
    one_to_one,
    row_std,
    spread,
    through_layer_norm,
)
from opusim.training.feedback.projection import (
    DenseProjection,
    DeviceProjection,
    Encoding,
    EncodingName,
    Projection,
    calibration_work,
    make_encoding,
)
from opusim.training.networks.base import preserved_modes, require_not_of_opacus
from opusim.training.networks.clipping import finite_rows
from opusim.training.networks.record_independence import put_back

_LARGEST_STEP = 2**63
_READOUT_STEP = 2**62
"""First step number of the readings to which a read-out is fitted."""
_NO_PASS = "loss() returns a value that no forward pass of the model led to; run it on a batch"
_NUMBERS_AT_ONCE = 2**18
"""Numbers of an error or a reading in one call of the device, so that their copies take little memory."""


class FeedbackAlignment(PointHooks):
    """A module whose blocks learn from a projected error instead of a backpropagated one.

    With e a row of dL/dz at `error_at`, n_inputs numbers, a point of C channels receives in place of dL/dh

        gain / sqrt(C) B_point e        a row for a row (tokens, nodes, records)
        gain / sqrt(C P) B_point e      one row for the P positions of a record

    Entries of B have variance 1, so the feedback to a record has the expected norm gain * norm(e). B is a Gaussian
    matrix of this seed, or the device's, whose readings carry noise. Parameters after the last point receive their
    exact gradients.

    Training is `loss.backward()` as usual. The hooks are on `model`, so that a framework may be given `model` itself;
    `remove` takes them off. If a module returns a tuple or a mapping, all of it is detached and its first tensor
    receives the feedback. A module that is called several times is a point at each call.

    Arguments that are not given are chosen to suit the model, shown with reasons by `repr`, and logged once by the
    first pass that learns.

    Args:
        model: Any module. The state dict has the keys of the plain model.
        points: None for those that suit the model (see `opusim.training.feedback.choice.choose_points`); "blocks" for
            all repeated blocks but the last (`opusim.training.feedback.choice.find_blocks`); or names, shell patterns
            of names such as "layers.*", which means layers.0 and not layers.0.norm, or classes of submodules.
        device: An open device of the model's `shape`, or a larger one. None computes B e digitally.
        error_at: Name of the submodule whose output, or its first tensor, is z; the loss must be computed from z.
            "NAME.input" takes the submodule's input, and "" the model's output, which must be one tensor. None takes
            the place that an attribute error_at of the model names; else the input of a language model's vocabulary
            layer, so that the error is as wide as the stream; else the model's output.
        rows: Which rows of the error are projected. "each": every position's; "sum": their sum over a record's
            positions, which all positions receive; k: those of k positions drawn in each step, times positions / k.
        spread: How one row reaches the positions of a record. "broadcast": the same C numbers at every position;
            "full": every position has its own outputs of B, C P in all. None takes "full" for a chosen point before a
            head that has weights for each position, else "broadcast".
        slices: "shared": all points use the same outputs of B, as in TinyDFA, which suits a residual stream, where all
            points see nearly the same gradient. "own": disjoint outputs for each point, as in the PDFA paper.
        encoding: How the device is shown e: "stochastic" (each entry with a probability in proportion to its size,
            right on average), "ternary" or "sign" (the entries above a threshold, and a constant for each row, for
            which B 1 is measured at the first step), or "planes" (binary digits, one reading each; all others take one
            reading a row); or "real" without a device. See `opusim.training.feedback.projection`. None takes
            "stochastic" with a device, else "real".
        threshold: Threshold of "ternary", in units of the row's root mean square, at least 0.
        planes: Digits of "planes", from 1 to 24.
        normalised: Whether the feedback passes through the Jacobian of a layer norm of the point's output, as the
            gradient at a pre-norm residual stream does. It bounds the stream of models that do not normalise it. None
            lets `shape` or the first pass decide: true if a point's output is a residual sum that no norm follows, or
            is added to such a stream.
        gain: Factor on the feedback, at least 0. At 0 only what follows the last point learns, the control that
            feedback has to beat. None takes 1, or 0.3 where `normalised` is chosen to be true: such feedback is large
            while the stream is small, which SGD does not even out as Adam does.
        projection: Digital matrix: "gaussian", independent entries, as an optical medium has.
        seed: Seed of the digital matrix, in [0, 2^64). The default is the packaged devices' medium.
        draw_seed: Seed of drawn positions and stochastic codes, in [0, 2^64); None takes `seed`.
        batch_dim: Dimension of records in outputs of three dimensions and more, else 0; 1 for modules that put time
            first.
        channel_dim: Dimension of channels; None takes 1 in outputs of four or five dimensions, else the last.

    Raises:
        ValueError: An argument is out of range or no submodule matches. A forward or backward pass raises it if points
            and error do not fit together, or the device is too small; the message says how to open one that fits.

    Example:
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        >>> model = FeedbackAlignment(net)
        >>> model.points, model.shape(torch.zeros(2, 8))
        (('1', '3'), FeedbackShape(n_inputs=3, n_outputs=16))
        >>> nn.functional.cross_entropy(model(torch.randn(2, 8)), torch.tensor([0, 1])).backward()
    """

    attached: ClassVar[WeakSet[FeedbackAlignment]] = WeakSet()
    """All instances whose hooks are on a model."""

    def __init__(
        self,
        model: nn.Module,
        points: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = None,
        *,
        device: NoisyDevice | None = None,
        error_at: str | None = None,
        rows: Rows = "each",
        spread: Literal["broadcast", "full"] | None = None,
        slices: Literal["own", "shared"] = "shared",
        encoding: EncodingName | None = None,
        threshold: float = 0.6,
        planes: int = 4,
        normalised: bool | None = None,
        gain: float | None = None,
        projection: str = "gaussian",
        seed: int = 20210603,
        draw_seed: int | None = None,
        batch_dim: int = 0,
        channel_dim: int | None = None,
    ) -> None:
        if isinstance(rows, int) and not isinstance(rows, bool):
            checks.integer(rows=rows, minimum=1)
        else:
            checks.choice(("each", "sum"), rows=rows, remedy="or give a number of positions")
        if spread is not None:
            checks.choice(("broadcast", "full"), spread=spread)
        checks.choice(("own", "shared"), slices=slices)
        if projection != "gaussian":
            raise ValueError(
                f"projection = {projection!r}: was dropped; leave it out for 'gaussian', which learns as well"
            )
        if gain is not None:
            checks.non_negative(gain=gain)
        draw_seed = seed if draw_seed is None else draw_seed
        checks.integer(seed=seed, draw_seed=draw_seed, minimum=0, maximum=2**64 - 1)
        if device is not None:
            _require_device(device)
        make_encoding(encoding or "real", threshold=threshold, planes=planes)
        refuse_second(model)
        require_not_of_opacus(model)
        view = View(batch_dim=batch_dim, channel_dim=channel_dim)
        super().__init__(model, rows=rows, shared=slices == "shared", view=view, device=device)
        self._choose(points, error_at=error_at, spread=spread, normalised=normalised, gain=gain)
        self._encoding, self._threshold, self._planes = encoding, threshold, planes
        self._seed, self._draw_seed = seed, draw_seed
        self._rows_before: Callable[[int], int] | None = None
        self.column_sum: Tensor | None = None
        """B 1 as measured on the device, or None before. Set it in a resumed run to spare the measurement."""
        self._projection: Projection | None = None
        self._place = torch.device("cpu")
        self.readout: LearntReadout | None = None
        """The learnt read-out; None before `start_readout` or `fit_readout`."""
        self.private_loops = 0
        """How many private loops train the model, whose records no read-out may learn from."""
        self._step = 0
        self._handles = self._install()
        FeedbackAlignment.attached.add(self)

    def _sized(self) -> list[Slice]:
        if not self._slices:
            raise RuntimeError(
                "the sizes of the points are not known yet; call shape(x) with two records first"
            )
        return self._slices

    def draw_from(self, seed: int) -> None:
        """Draw positions and stochastic codes from another seed, in [0, 2^64), from now on."""
        self._draw_seed, self._projection = seed, None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the model and its hooks; the copy reads the same device."""
        memo[id(self._noisy_device)] = self._noisy_device
        memo[id(self._rows_before)] = self._rows_before
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update({name: deepcopy(value, memo) for name, value in self.__dict__.items()})
        return copied

    def remove(self) -> nn.Module:
        """Take the hooks off the model and return it; it learns by backpropagation from then on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        FeedbackAlignment.attached.discard(self)
        return self.model

    def backpropagating(self) -> AbstractContextManager[None]:
        """Switch the points off within the block: its forward passes are backpropagated.

        With activation checkpointing the block must include the backward pass, which runs parts of the model again.
        """
        return self._in_state("backpropagating")

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Project the error digitally, without encoding and noise, within the block: a probe repeats to the bit."""
        kept = self._noisy_device, self._encoding, self._projection, self.column_sum, self._step, self._told
        self._noisy_device, self._encoding, self._projection = None, "real", None
        try:
            yield
        finally:
            self._noisy_device, self._encoding, self._projection = kept[:3]
            self.column_sum, self._step, self._told = kept[3:]

    @contextmanager
    def _in_state(self, state: Literal["measuring", "backpropagating"]) -> Iterator[None]:
        before, self._state = self._state, state
        try:
            yield
        finally:
            self._state = before

    # The device

    @property
    def noisy_device(self) -> NoisyDevice | None:
        """The device that projects; None projects digitally. It may be set once `shape` is known."""
        return self._noisy_device

    @noisy_device.setter
    def noisy_device(self, device: NoisyDevice | None) -> None:
        if device is not None:
            _require_device(device)
        self._noisy_device, self._projection, self.column_sum = device, None, None

    @property
    def device(self) -> torch.device:
        """The torch device of the model's first parameter or buffer, as in `x.to(model.device)`; else the processor.

        An assignment sets `noisy_device`.
        """
        tensor = next(self.model.parameters(), next(self.model.buffers(), None))
        return torch.device("cpu") if tensor is None else tensor.device

    @device.setter
    def device(self, device: NoisyDevice | None) -> None:
        self.noisy_device = device

    @property
    def usage(self) -> Usage:
        """Frames, seconds and joules of the device so far; zero without a device."""
        return Usage() if self._noisy_device is None else self._noisy_device.usage

    def seek(self, step: int) -> None:
        """Set the step number of the next backward pass, such as after loading a checkpoint; each pass adds one.

        A device in experiment mode repeats the noise of a repeated step.
        """
        checks.integer(step=step, minimum=0, maximum=_LARGEST_STEP)
        self._step = step

    def shape(self, *args: Any, **kwargs: Any) -> FeedbackShape:
        """Return the size of B that the model needs, from a forward pass in evaluation mode.

        Args:
            *args: Arguments of the model, such as two records.
            **kwargs: Keyword arguments of the model.
        """
        self._slices, self._projection = [], None
        looks = self._normalised is None  # the graph says how a point's output was computed
        with preserved_modes(self.model), torch.set_grad_enabled(looks), self._in_state("measuring"):
            self.model.eval()(*args, **kwargs)
        return self._shape

    def work(self, *args: Any, times: float = 1.0, fits: bool = False, **kwargs: Any) -> DeviceWork:
        """Return the device work of a backward pass, from a forward pass as for `shape`.

        It is an upper bound: rows of zeros, such as those of padding, are not shown.

        Args:
            *args: Arguments of the model, such as two records.
            times: Number of records of a pass, over that of these arguments.
            fits: Whether the pass fits a read-out, which reads every row of the error.
            **kwargs: Keyword arguments of the model.
        """
        self.shape(*args, **kwargs)
        encoding = self._encoding_of(self._encoding or "stochastic")
        if not self.gain or encoding is None:
            return DeviceWork()
        chosen = self._extent.positions
        if self._rows == "sum":
            chosen = 1
        elif isinstance(self._rows, int) and not fits:
            chosen = min(self._rows, chosen)
        rows = times * self._extent.records * chosen
        calls = math.ceil(rows / self._rows_at_once(self._shape.n_outputs))
        return DeviceWork(projections=encoding.frames_per_row * rows, calls=calls)

    @property
    def work_before(self) -> DeviceWork:
        """Extra device work of the first backward pass, or of `measure`: B 1, if the encoding needs it."""
        encoding = self._encoding_of(self._encoding or "stochastic")
        measures = (
            bool(self.gain) and encoding is not None and encoding.has_offset and self.column_sum is None
        )
        return calibration_work(1) if measures else DeviceWork()

    def measure(self, *args: Any, **kwargs: Any) -> None:
        """Calibrate the device for the encoding now, instead of in the first backward pass.

        Args:
            *args: Arguments of the model, such as two records.
            **kwargs: Keyword arguments of the model.
        """
        self.shape(*args, **kwargs)
        self._projector(self._place)

    @property
    @override
    def unstarted(self) -> str | None:
        if self._started or not self._slices or not self.gain or self._slices[-1].positions > 1:
            return None
        wanted, points = (
            (self._n_inputs, self._slices[-1].channels),
            tuple(f"{name}." for name in self.points),
        )
        linears = [(name, m) for name, m in self.model.named_modules() if isinstance(m, nn.Linear)]
        name, layer = linears[-1] if linears else ("", None)
        fits = layer is not None and tuple(layer.weight.shape) == wanted and not f"{name}.".startswith(points)
        return name if fits and self.error_at in (None, name) else None

    def start_from_feedback(self, linear: nn.Linear | str) -> None:
        """Set a linear layer's weights to the feedback of the last point, W = gain / sqrt(C) B^T, and its bias to 0.

        If the layer leads from the stream of the points to z, the feedback then starts out as the gradient that
        backpropagation through this layer would give. The columns of B are measured on the device.

        Args:
            linear: A layer of C inputs and n_inputs outputs, or its name in the model.

        Raises:
            AttributeError: The model has no layer of that name.
            RuntimeError: The sizes are unknown, because neither `shape` nor the model was called.
            ValueError: The layer has another shape, or the point's positions have outputs of their own.
        """
        part = self._sized()[-1]
        wanted = (self._n_inputs, part.channels)
        layer = self.model.get_submodule(linear) if isinstance(linear, str) else linear
        weight, bias = (getattr(layer, name, None) for name in ("weight", "bias"))
        if not isinstance(weight, Tensor) or tuple(weight.shape) != wanted or part.positions > 1:
            found = f"weights of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else "no weights"
            raise ValueError(
                f"linear has {found}, the feedback of point {part.name!r} needs "
                f"{wanted} and spread = 'broadcast'; give the layer between the last point and error_at"
            )
        columns = self._projector(weight.device).columns(self._n_inputs)[:, part.offset : part.end]
        with torch.no_grad():
            weight.copy_(columns * (self.gain / part.channels**0.5))
            if isinstance(bias, Tensor):
                bias.zero_()
        self._started = True

    def control(self, optimizer: torch.optim.Optimizer, *, batches: int = BATCHES) -> Control:
        """Return a copy without feedback that follows the first batches, and warns if feedback is worse than none.

        Its `follow` takes a batch before the optimizer's step and reads no device.

        Args:
            optimizer: The optimizer of the model's parameters, before its first step.
            batches: Batches until the comparison, at least 16.

        Example:
            >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
            >>> model = FeedbackAlignment(net)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> control = model.control(optimizer)
            >>> x, y = torch.randn(5, 4), torch.randn(5, 2)
            >>> loss = nn.functional.mse_loss(model(x), y)
            >>> loss.backward()
            >>> control.follow(lambda model: nn.functional.mse_loss(model(x), y), loss)
            >>> optimizer.step()
        """
        return Control(self, optimizer, batches=batches)

    def diagnose(self, loss: Callable[[], Tensor]) -> Diagnosis:
        """Compare the feedback with backpropagation on one batch; parameters, gradients and buffers stay as they are.

        Args:
            loss: Runs the model on the batch and returns the loss; called twice, with the same random numbers.

        Raises:
            ValueError: The loss does not come from a forward pass of this model, or gain = 0 sends no feedback.
        """
        if not self.gain:
            raise ValueError(
                "gain = 0 sends no feedback that could be compared; diagnose with a gain above 0"
            )
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        step, self._observed = self._step, []
        try:
            # 1. Which parameters the block of each call has, and the gradients with feedback.
            value, calls = self._ran(loss)
            blocks = [[False] * len(parameters) for _ in calls]
            for block, (_, h) in zip(blocks, calls, strict=True):
                if h.requires_grad:
                    zeros = torch.zeros_like(h)
                    graph = torch.autograd.grad(h, parameters, zeros, retain_graph=True, allow_unused=True)
                    block[:] = [gradient is not None for gradient in graph]
            found = torch.autograd.grad(value, parameters, allow_unused=True)
            if not self._observed:
                raise ValueError(_NO_PASS)
            seen = self._observed[-1]
            # 2. Those by backpropagation.
            with self.backpropagating():
                value, again = self._ran(loss)
                learning = [h for _, h in again if h.requires_grad]
                gradients = torch.autograd.grad(value, [*learning, *parameters], allow_unused=True)
            signals = iter(gradients)
            true = [next(signals) if h.requires_grad else None for _, h in again]
        finally:
            self._observed, self._kept, self._error, self._step = None, [], None, step
            put_back(self.model, buffers)
        projection = self._projector(seen.rows.device)
        return compared(
            calls,
            blocks,
            found,
            true,
            list(signals),
            seen=seen,
            projection=projection,
            slices=self._slices,
            start=self.unstarted,
        )

    def start_readout(self) -> LearntReadout:
        """Return the learnt read-out of the device's outputs; a new one is plain feedback.

        Its `state_dict` belongs into a checkpoint with the model's; `fit_readout` starts it by itself.

        Raises:
            RuntimeError: The sizes are unknown, because neither `shape` nor the model was called.
        """
        if self.readout is None:
            slices, device = self._sized(), self._noisy_device
            outputs = self._shape.n_outputs if device is None else device.n_outputs
            self.readout = LearntReadout(slices, outputs, next(self.model.parameters()).device)
        return self.readout

    def fit_readout(self, loss: Callable[[], Tensor], *, plain: float = 1.0) -> None:
        """Fit the read-out to one batch that is backpropagated; see `opusim.training.feedback.layout`.

        It takes a forward and a backward pass and a reading of the device; parameters, gradients and buffers stay as
        they are. Call it on one batch in about 100, and more often in the first steps. Outputs of the device beyond the
        points' own are read as well, which averages its noise.

        Args:
            loss: Runs the model on the batch and returns the loss.
            plain: Plain feedback that the points receive, over the learnt part, at least 0; 0 for none.

        Raises:
            RuntimeError: A private loop trains the model.
            ValueError: plain is out of range, or the loss does not come from a forward pass of this model.
        """
        if self.private_loops:
            raise RuntimeError(
                "fit_readout: a private loop trains the model, and a read-out that learns from its records would not "
                "be private; fit it to public records before make_private"
            )
        checks.non_negative(plain=plain)
        # 1. Backpropagate to the error's place and to the points.
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        step, self._observed = self._step, []
        try:
            with self.backpropagating():
                value, calls = self._ran(loss)
            if not calls or self._error is None:
                raise ValueError(_NO_PASS)
            outputs = [h for _, h in calls]
            gradient, *true = torch.autograd.grad(value, [self._error, *outputs])
        finally:
            self._observed, self._kept, self._error, self._step = None, [], None, step
            put_back(self.model, buffers)
        # 2. Read the device, under a number that no step of training has.
        if not self._slices:
            self._lay_out(gradient, calls)
        readout = self.start_readout()
        at = _READOUT_STEP + readout.updates
        if self._noisy_device is not None:
            self._noisy_device.seek(at)
        error, rows = self._view.rows(gradient.float()), self._rows
        shown = error.sum(dim=1) if rows == "sum" else error.flatten(0, 1)
        reading = self._read(shown, self._projector(error.device), at)
        # 3. Fit the matrix of each call to scaled readings and true gradients, row by row.
        for number, (part, h, own) in enumerate(zip(self._slices, outputs, true, strict=True)):
            stream, wanted = self._view.rows(h.detach().float()), self._view.rows(own.float())
            point = Extent(*stream.shape)
            std = row_std(stream) if self._normalised else torch.ones_like(stream[..., :1])
            if one_to_one(Extent(*error.shape), point, "sum" if rows == "sum" else "each"):
                scale = self.gain / part.channels**0.5
                readout.fit(number, reading * (scale / std.reshape(-1, 1)), wanted.flatten(0, 1), plain=plain)
            else:
                total = reading.view(len(error), -1, reading.shape[1]).sum(dim=1)
                scale = self.gain / (part.channels * point.positions) ** 0.5
                wanted = wanted.flatten(1) if part.positions > 1 else wanted.mean(dim=1)
                readout.fit(number, total * (scale / std.mean(dim=1)), wanted, plain=plain)
        readout.add_update()

    def _ran(self, loss: Callable[[], Tensor]) -> tuple[Tensor, list[tuple[str, Tensor]]]:
        """Return the loss and the calls of points that it came from."""
        with torch.random.fork_rng(), torch.enable_grad():
            value = loss()
        return value, self._kept

    # A pass forward and back

    @torch._disable_dynamo
    def _begin(self, module: nn.Module, *, compiled: bool) -> None:
        """See PointHooks; an error of torch.compile with fullgraph=True names this method."""
        if module is not self.model:
            raise ValueError(
                "the model runs as a replica of nn.DataParallel, whose threads would mix up their feedback; use "
                "nn.parallel.DistributedDataParallel"
            )
        self._calls, self._connected = [], False
        self._learning = self._state == "learning" and torch.is_grad_enabled()
        decides = self._normalised is None and self._state != "backpropagating" and torch.is_grad_enabled()
        compiled = compiled or any(  # a submodule by itself, by `compile` or by torch.compile
            part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in module.modules()
        )
        if decides and not compiled:
            self._followed = Followed()

    @override
    def _project(self, gradient: Tensor, points: Sequence[Tensor]) -> list[Tensor | None]:
        step, self._step = self._step, self._step + 1
        if not self.gain:
            return [torch.zeros(h.shape, dtype=h.dtype, device=gradient.device) for h in points]
        projection, before = self._projector(gradient.device), self.usage
        if self._noisy_device is not None:
            self._noisy_device.seek(step)
        error = self._view.rows(gradient.detach().float())
        chosen, drawn = chosen_rows(
            error, self._rows, seed=derive_seed(self._draw_seed, f"positions of step {step}")
        )
        rows = chosen.flatten(0, 1)
        reading = self._read(rows, projection, step).view(*chosen.shape[:2], -1)
        extent = Extent(*error.shape)
        found: list[Tensor] = []
        signals: dict[Any, Tensor] = {}  # points that share outputs and sizes share a signal
        for number, (part, h) in enumerate(zip(self._slices, points, strict=True)):
            point = self._view.extent(h.shape)
            own, key = reading, (part.offset, part.end, point)
            if self.readout is not None:
                own, part, key = (
                    self.readout.apply(number, reading),
                    replace(part, offset=0),
                    (number, 0, point),
                )
            if key not in signals:
                signals[key] = spread(own, part, extent, point, drawn=drawn, rows=self._rows, gain=self.gain)
            signal = signals[key]
            if self._normalised:
                signal = through_layer_norm(signal, self._view.rows(h.detach().float()))
            found.append(self._view.shaped(signal, h.shape).to(h.dtype))
        if self._observed is not None:
            used = self.usage - before
            self._observed.append(
                Reading(rows=rows, reading=reading.flatten(0, 1), feedback=found, used=used)
            )
        return [signal if h.requires_grad else None for signal, h in zip(found, points, strict=True)]

    def read_nothing(self) -> None:
        """Take part in the readings of a step in which this process has no records, if processes share a batch."""
        step, self._step = self._step, self._step + 1
        if self.gain and (self._noisy_device is not None or self._draws_together()):
            projection = self._projector(torch.device("cpu"))
            if self._noisy_device is not None:
                self._noisy_device.seek(step)
            self._read(torch.zeros(0, self._n_inputs), projection, step)

    def number_rows(self, before: Callable[[int], int]) -> None:
        """Make the digital draws of a batch that processes share equal to those of a single process.

        Args:
            before: A collective call: takes this process's number of rows, returns that of the processes before it.
        """
        self._rows_before = before

    def _draws_together(self) -> bool:
        """Return whether processes share a batch whose digital codes are drawn."""
        return self._noisy_device is None and self._rows_before is not None and self._encoding == "stochastic"

    def _read(self, rows: Tensor, projection: Projection, step: int) -> Tensor:
        """Return B e for rows (n, n_inputs); a row of zeros is not shown, a row that is not finite reads NaN.

        A graphics card that simulates the device reads all rows, since the host would wait to learn which are zeros;
        those read 0. Processes that share the device call it equally often.
        """
        device, largest = self._noisy_device, torch.linalg.vector_norm(rows, ord=torch.inf, dim=1)
        finite = torch.isfinite(largest)
        n_outputs = self._shape.n_outputs if device is None else device.n_outputs
        reading = rows.new_zeros(len(rows), n_outputs)
        shown: Tensor | None = None
        if rows.device.type != "cpu" and (device is None or device.description.is_simulated):
            rows = finite_rows(rows, finite)
        else:
            shown = torch.nonzero(finite & (largest > 0)).squeeze(1)
        count = len(rows if shown is None else shown)
        before, most = 0, count
        if device is not None:
            before, most = device.agree(count)
        elif self._draws_together():
            before = self._rows_before(count) if self._rows_before else 0
        projection.seek(step, before=before)
        at_once = self._rows_at_once(n_outputs)
        for start in range(0, max(most, 1), at_once):
            part = slice(start, start + at_once) if shown is None else shown[start : start + at_once]
            reading[part] = projection.read(rows[part])
        return reading.masked_fill_(~finite[:, None], torch.nan)

    def _rows_at_once(self, n_outputs: int) -> int:
        """Return how many rows one call of the device shows."""
        return max(1, _NUMBERS_AT_ONCE // max(self._n_inputs, n_outputs))

    def _encoding_of(self, name: EncodingName) -> Encoding | None:
        return make_encoding(name, threshold=self._threshold, planes=self._planes, seed=self._draw_seed)

    def _projector(self, place: torch.device) -> Projection:
        """Return the projection through the device, or the digital one on a torch device."""
        if self._projection is None or (self._noisy_device is None and self._place != place):
            name = self._encoding or ("real" if self._noisy_device is None else "stochastic")
            encoding = self._encoding_of(name)
            if self._noisy_device is None:
                self._place = place
                matrix = Medium(*self._shape, self._seed).dense().to(place)
                self._projection = DenseProjection(matrix, encoding=encoding)
            elif encoding is None:
                raise ValueError(
                    "encoding = 'real' cannot be shown to a device; use 'ternary', 'stochastic', 'planes' or 'sign'"
                )
            else:
                self._projection = projection = DeviceProjection(
                    self._noisy_device, encoding=encoding, n_inputs=self._n_inputs, ones=self.column_sum
                )
                self.column_sum = projection.ones
        return self._projection


def _require_device(device: object) -> None:
    remedy = "open one by its name: opusim.open_device('gaussian', n_inputs=..., n_outputs=...)"
    if isinstance(device, torch.device):
        remedy = f"move the model by .to({str(device)!r})"
    checks.instance(NoisyDevice, device=device, remedy=remedy)
