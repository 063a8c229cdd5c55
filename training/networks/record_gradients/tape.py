"""Measure, clip and sum the gradients of single records in an ordinary training step of any module.

`RecordTape` watches one forward and one backward pass. For every use of a parameter it keeps the input h and the
gradient delta at the output, from which it computes the norm of each record's gradient and the clipped sum; a second
backward pass is not needed (Bu et al., "Differentially private optimization on large model at small cost", 2023, call
this book-keeping). Gradients may come from backpropagation or from feedback points: each use takes the gradient that
reached it.

Uses are found by catching torch functions, not modules, so bare parameters, functional calls, shared weights and
attention need no module of their own. A parameter that is used several times gets one gradient per record, the sum over
its uses, before any norm is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from opusim import checks
from opusim.training.networks.clipping import bounded_factors
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.networks.contributions.uses import Use
from opusim.training.networks.record_gradients.calls import (
    Form,
    Kinds,
    Rows,
    require_inputs_kept,
    split_records,
)
from opusim.training.networks.record_gradients.probe import UNSEEN, invented_rows, probe
from opusim.training.networks.record_gradients.recorder import Recorder
from opusim.training.networks.record_gradients.uses import FunctionUse
from opusim.training.networks.record_independence import preserved_generators


class RecordTape:
    """Gradients of single records, for any module that processes records independently.

    A record is whatever has one index in the batch: features, an image, a sequence. The loss of a step must be a sum
    over records, so that the gradient at a use belongs to the record.

    Let f_i be factors computed from `squared_norms`. For all finite numbers, and in float32 arithmetic, a record's part
    of the sum that `set_gradients` writes has at most f_i (1 + 1e-6) times the measured norm
    (opusim.training.networks.clipping); a record whose norm is not finite adds exactly 0. Products of several uses of a
    weight may cancel, so they are summed in float64; those of one use at several positions count at least 1/128 of
    their magnitudes in the norm.

    Attributes:
        several_uses: Whether a parameter is used several times in a forward pass.
        layers: Groups of parameters that are measured together, in the order of the model: a weight and its bias, or
            everything that shares a use. Their number is depth.
        names: Names of the parameters of each layer.

    Args:
        model: The module, in the mode in which it will be trained. Parameters that do not require gradients are
            constants.
        *args: Arguments of the model for at least one record, as a probe; tensors of the same first size as the first
            tensor hold records. The model runs a few times on batches of 6 and 37 records, or 6 and 7 if it is large.
        **kwargs: Keyword arguments, likewise.

    Raises:
        ValueError: The model mixes records, has parameters that are not float32, or no parameters to train.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> tape, x = RecordTape(net, torch.randn(2, 3)), torch.randn(6, 3)
        >>> with tape.recording(len(x)):
        ...     net(x).square().sum().backward()
        >>> tape.squared_norms().shape
        torch.Size([2, 6])
        >>> tape.clip(1.0)
        0
    """

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        named = trained_parameters(model)
        self.model = model
        self._named = named
        self._records: int | None = None
        self._begun, self._group = 0, 1
        self._uses: list[list[Use]] = []
        self._contributions: Contributions | None = None
        self._kinds, given = Kinds(), Rows.of((args, kwargs))
        members, self.several_uses = probe(model, named, given, self._kinds)
        self._members = members
        self._followed = {self._signature(given)}
        self.layers: list[list[nn.Parameter]] = [[named[n][1] for n in group] for group in members]
        self.names: list[list[str]] = [[named[n][0] for n in group] for group in members]
        self._layer_of = {n: number for number, group in enumerate(members) for n in group}

    def has_followed(self, args: Any, kwargs: Any) -> bool:
        """Return whether `follow`, or the constructor, has seen arguments of these shapes."""
        return self._signature(Rows.of((args, kwargs))) in self._followed

    def follow(self, args: Any, kwargs: Any) -> None:
        """Locate the records in arguments of new shapes, on invented ones; only types and shapes are read.

        Raises ValueError if the model mixes records of these shapes, or uses its parameters in another way.
        """
        given = Rows.of((args, kwargs))
        signature = self._signature(given)
        if signature in self._followed:
            return
        rows = invented_rows(self.model, given)
        args, kwargs = rows.values
        # Switch recording off: a loop that records calls would take these for a training pass.
        caught, self.model._compiled_call_impl = self.model._compiled_call_impl, None
        try:
            with preserved_generators(rows.tensors[0].device), torch.no_grad():
                self.model(*args, **kwargs)  # the model may fill caches for this shape
            members, several = probe(self.model, self._named, rows, self._kinds)
        finally:
            self.model._compiled_call_impl = caught
        self.several_uses = self.several_uses or several
        if members != self._members:
            raise ValueError(
                "model: records of this shape use other parameters than those that it was prepared with; use all "
                "parameters in every batch"
            )
        self._followed.add(signature)

    def _signature(self, given: Rows) -> tuple[Any, ...]:
        """Return what can change which operators run: types, and shapes without the number of records."""
        place = self._named[0][1].device.type
        facts: list[Any] = [given.spec, torch.is_autocast_enabled(place), torch.get_autocast_dtype(place)]
        for leaf, held in zip(given.leaves, given.held, strict=True):
            if isinstance(leaf, Tensor):
                facts.append((held, leaf.dtype, leaf.device, tuple(leaf.shape[1:] if held else leaf.shape)))
            else:
                facts.append(leaf if isinstance(leaf, (bool, int, str, type(None))) else type(leaf))
        return tuple(facts)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @contextmanager
    def recording(self, records: int, group: int = 1) -> Iterator[None]:
        """Watch the forward passes and the backward pass of one batch; the parameters' gradients are discarded.

        The model may run several times on the same records, 0 or more, or groups of them (see `begin`); their gradients
        add up. Recomputed activations (torch.utils.checkpoint) and torch.autograd.grad are not supported; call
        `backward`. Raises ValueError if the model uses a parameter in another way than in the probe.
        """
        checks.integer(records=records, minimum=0)
        for _, parameter in self._named:
            parameter.grad = None
        recorder = self.begin(records, group)
        with recorder:
            yield
        self.end(recorder)

    def begin(self, records: int, group: int = 1) -> Recorder:
        """Return the context for the forward passes of a batch; `recording` is `begin`, that context and `end`.

        A training loop whose backward pass happens elsewhere calls `begin` and `end` itself. The parameters must have
        no gradients when the backward pass starts. A `group` of neighbouring rows, such as those of a user, counts as
        one record: norms, factors and sums are then those of groups.
        """
        self._records, self._uses, self._contributions = None, [], None
        self._begun, self._group = records, group
        return Recorder(self._named, self._kinds)

    def end(self, recorder: Recorder) -> None:
        """Collect the uses that the passes of a batch recorded since `begin` returned the recorder.

        Raises ValueError if the model uses a parameter in another way than in the probe.
        """
        seen = [name for name, parameter in self._named if parameter.grad is not None]
        if seen:
            raise ValueError(f"model: parameter {seen[0]!r} {UNSEEN}")
        self._records = records = self._begun
        self._uses = [[] for _ in self.layers]
        calls = [call for call in recorder.calls if records and any(call.deltas)]  # which a gradient reached
        require_inputs_kept(calls)
        forms = [(call, call.site.made.h) for call in calls if isinstance(call.site.made, Form)]
        for call in calls:
            call.group = self._group
        apart = split_records(records, ((call, 0) for call, _ in forms), forms)
        pairs = zip(apart[: len(forms)], apart[len(forms) :], strict=True)
        for call in calls:
            made = call.site.made or FunctionUse
            use = made.of(*next(pairs)) if isinstance(made, Form) else made(call, records)
            self._uses[self._layer_of[min(call.site.roots)]].append(use)
        # longer records than the probe's may use a parameter again
        if any(len(uses) > 1 for uses in self._uses):
            self.several_uses = True

    @property
    def contributions(self) -> Contributions:
        """What the recorded batch adds to the parameters' gradients; raise RuntimeError if no batch is recorded."""
        if self._records is None:
            raise RuntimeError("no batch is recorded; run a forward and a backward pass in tape.recording(n)")
        if self._contributions is None:
            layers = list(zip(self.layers, self._uses or [[] for _ in self.layers], strict=True))
            self._contributions = Contributions(layers, self._records, several_uses=self.several_uses)
            self._uses = []
        return self._contributions

    def squared_norms(self) -> Tensor:
        """Return the squared norm of each record's gradient by layer; see Contributions.squared_norms."""
        return self.contributions.squared_norms()

    def set_gradients(self, factors: Tensor, divisor: float = 1.0) -> None:
        """Write (1/divisor) sum_i f_i g_i into the gradients of all parameters.

        Factors f_i lie in [0, 2^60], float64, shape (depth, records); 0 removes a record.
        """
        for parameter, total in self.contributions.totals(factors):
            parameter.grad = total.div_(divisor).float()

    def clip(self, bound: float, divisor: float = 1.0) -> int:
        """Write (1/divisor) sum_i min(1, C / norm(g_i)) g_i into the gradients, g_i over all parameters.

        Returns the number of records left out because their gradients are not finite. It depends on private records.
        """
        checks.positive(bound=bound, divisor=divisor)
        norms = self.squared_norms().sum(dim=0).sqrt()
        self.set_gradients(bounded_factors(norms, bound).expand(self.depth, -1), divisor)
        return int((~torch.isfinite(norms)).sum())

    def record_gradients(self) -> dict[str, Tensor]:
        """Return the gradient of every record by name of parameter, shapes (records, *shape).

        `squared_norms` and `clip` avoid forming them, so use it for small models, diagnoses and tests only.
        """
        found = {}
        layers = zip(self.names, self.layers, self.contributions.record_gradients(), strict=True)
        for names, parameters, joined in layers:
            for name, parameter, rows in zip(names, parameters, joined, strict=True):
                found[name] = rows.view(len(rows), *parameter.shape)
        return found


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are trained, by name; raise ValueError if there are none, or one is not float32."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("model has no parameter to train; set requires_grad of some")
    for name, parameter in named:
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"model: parameter {name!r} has dtype {parameter.dtype}; train in torch.float32 (model.float())"
            )
    return named
