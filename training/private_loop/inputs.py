"""Refuse modules, optimizers and loaders that a private loop cannot take; probe the module before the first batch."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from opusim.training.feedback.points import FeedbackAlignment
from opusim.training.networks.base import require_not_of_opacus
from opusim.training.networks.record_gradients.calls import Rows
from opusim.training.networks.record_gradients.layers import PACKED
from opusim.training.networks.record_gradients.probe import invented_rows
from opusim.training.networks.record_gradients.separation import require_no_hooks, require_steady_gradients
from opusim.training.networks.record_gradients.tape import RecordTape, trained_parameters
from opusim.training.networks.record_independence import (
    HOOKS,
    MIXES_REMEDY,
    changes,
    copies,
    fixed_parameters,
    preserved_attributes,
    preserved_generators,
    put_back,
    same,
)

_EXAMPLES = 7
"""Records that are read once to probe the module and the loader."""
_COUNTS = (7, 5)
"""Batch sizes of a probe; primes, so that few other dimensions have such a factor."""
_DISTINCT = 8
"""Least number of distinct rows that tell an order; fewer, such as a few classes, may have it by chance."""
_REFUSALS = (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError)
"""Errors that a module may raise for records that it does not take."""
_DISTRIBUTED = ("torch.nn.parallel.", "torch.distributed.")
"""Packages of torch's classes that share a module between processes, devices or threads."""


def require_plain_parts(module: nn.Module, optimizer: object, loader: object) -> None:
    """Refuse (ValueError) parts that Opacus has prepared: they would clip and draw a second time."""
    require_not_of_opacus(module, "module")
    remedies = {
        "optimizer": (optimizer, "optimizers", "give the plain one, optimizer.original_optimizer"),
        "data_loader": (loader, "data_loader", "give the loader from before PrivacyEngine"),
    }
    for name, (given, package, remedy) in remedies.items():
        kind = type(given)
        if kind.__module__.startswith(f"opacus.{package}"):
            raise ValueError(f"{name} is a {kind.__name__} of Opacus, which make_private replaces; {remedy}")


def require_own_parameters(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Refuse (ValueError) an optimizer that moves other parameters than the module's."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "optimizer is LBFGS, which runs the module several times in a step; take another one, such as SGD or Adam"
        )
    own = {id(parameter) for parameter in module.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        if any(id(parameter) not in own for parameter in group["params"]):
            raise ValueError(
                f"optimizer: group {number} has parameters that are not the module's, whose gradients would not be "
                "private; give it parameters of module only"
            )


def warn_of_parameters_left_out(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Warn about parameters that require gradients but are not in the optimizer: the clip counts them, too."""
    moved = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    learning = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    left_out = [(name, p) for name, p in learning if id(p) not in moved]
    if left_out:
        share = sum(p.numel() for _, p in left_out) / sum(p.numel() for _, p in learning)
        warnings.warn(
            f"optimizer: leaves out {len(left_out)} of the {len(learning)} parameters of module that require gradients "
            f"({left_out[0][0]!r}; {share:.0%} of their numbers); each record is clipped over all of them, so the "
            "others move less at the same noise: call requires_grad_(False) on those that no optimizer trains, before "
            "make_private",
            stacklevel=3,
        )


def require_no_hidden_points(module: nn.Module, found: Sequence[FeedbackAlignment]) -> None:
    """Refuse (TypeError) feedback that reaches parameters of a module from a part that the module does not register.

    The settings of a private loop, such as secret draws, would not reach that part.
    """
    own = {id(parameter) for parameter in module.parameters()}
    for points in FeedbackAlignment.attached:
        hidden = not any(points is each for each in found)
        if hidden and any(id(parameter) in own for parameter in points.model.parameters()):
            raise TypeError(
                f"module: holds parameters of a FeedbackAlignment on {type(points.model).__name__}, which is no "
                "submodule of it; register it as one, or give that model itself"
            )


def require_own_readings(points: Sequence[FeedbackAlignment], processes: int) -> None:
    """Refuse (ValueError) feedback devices that the processes cannot read, or that may return another's frame.

    A description may say that frames repeat, a shared device belong to other processes, or calls of several shared
    devices have no order.
    """
    devices = [each.noisy_device for each in points if each.noisy_device is not None]
    shared = [device for device in devices if device.world is not None]
    if processes > 1 and len(shared) > 1:
        raise ValueError(
            "module has several FeedbackAlignment with shared devices, whose readings several processes cannot "
            "keep in order; take one FeedbackAlignment, or train in one process"
        )
    if processes > 1 and shared and shared[0].world != processes:
        raise ValueError(
            f"device {shared[0].name!r} is shared by {shared[0].world} processes, and {processes} train together; call "
            "init_process_group before open_shared_device"
        )
    for device in devices:
        if device.description.joins_readings:
            raise ValueError(
                f"module: device {device.name!r} repeats frames (camera.transfer.repeated), so that one record "
                "would change the feedback of the next; mend the transfer, or take another device"
            )


def require_recordable(module: nn.Module) -> None:
    """Refuse (ValueError) modules whose per-record gradients cannot be computed here; the tape refuses others."""
    if not module.training:
        raise ValueError("module is in evaluation mode; call module.train() before make_private")
    trained_parameters(module)
    for name, inner in module.named_modules():
        if any(kind.__module__.startswith(_DISTRIBUTED) for kind in type(inner).__mro__):
            raise ValueError(
                f"module {name or type(inner).__name__!r} is a {type(inner).__name__}, which would average or shard "
                "gradients before they are private; give the plain module, whose clipped gradients make_private adds "
                "over all processes"
            )
        if inner._compiled_call_impl is not None or isinstance(inner, torch._dynamo.OptimizedModule):
            raise ValueError(
                f"module {name or type(inner).__name__!r} is compiled, or in a private loop already; give the plain "
                "one, which close() of the other private loop gives back"
            )
        if isinstance(inner, nn.modules.batchnorm._BatchNorm) and inner.training:
            raise ValueError(
                f"module: {type(inner).__name__} {name!r} mixes the records of a batch: {MIXES_REMEDY}"
            )
        if getattr(inner, "sparse", False):
            raise ValueError(f"module {name!r} has sparse gradients; build it with sparse=False")
    require_no_hooks(module)


def first_records(loader: DataLoader[Any]) -> list[Any]:
    """Return the first records of a loader's data set."""
    dataset: Any = loader.dataset
    return [dataset[index] for index in range(min(_EXAMPLES, len(dataset)))]


def arguments_for(
    module: nn.Module, loader: DataLoader[Any], given: Sequence[Any] | Mapping[str, Any] | None
) -> Rows:
    """Return arguments of a module for a few records, after its first pass, which takes invented ones.

    The module may keep initial values from that pass. No finding about the module, and no refusal, depends on a record
    of the data set. Without public or invented arguments, a sequence or a mapping by name, the loader's first records
    give their shapes. Raises ValueError if the module does not take them, one of them holds no records, or its
    gradients of single records cannot be taken (`require_recordable`).
    """
    # 1. Take the shapes from the first entry of a batch, or from all but the labels of a mapping.
    example: Any = given
    if example is None:
        example = batch = loader.collate_fn(first_records(loader))
        if not isinstance(batch, Tensor | Mapping | Sequence):
            raise ValueError(
                f"data_loader: its collate function returns a {type(batch).__name__}, whose rows cannot be told apart; "
                "return a tensor, a tuple, a mapping or a typing.NamedTuple, whose fields are attributes too"
            )
        if isinstance(batch, Mapping):
            labels = ("label", "labels", "label_ids")
            example = {key: value for key, value in batch.items() if key not in labels}
        elif isinstance(batch, Sequence):
            example = batch if isinstance(batch, PackedSequence) else batch[:1]
    if isinstance(example, Tensor | PackedSequence):
        example = (example,)
    place = next(module.parameters()).device
    moved = tree_map(lambda leaf: leaf.to(place) if isinstance(leaf, Tensor) else leaf, example)
    args, kwargs = ((), dict(moved)) if isinstance(moved, Mapping) else (tuple(moved), {})
    if any(isinstance(each, PackedSequence) for each in (*args, *kwargs.values())):
        raise ValueError(f"module: an argument is a packed sequence, {PACKED}")
    # 2. Refuse what the module does not take by its signature, and what belongs to no record.
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"module does not take what the loader's batches begin with ({error}); give example_inputs, the "
            "arguments that the loop gives the module, for a few records"
        ) from error
    require_recordable(module)
    leaves = tree_leaves((args, kwargs))
    require_rows(leaves, rows_of(leaves) or 0)
    # 3. Run it on invented records of these shapes; if example_inputs are given, it may refuse them.
    own = Rows.of((args, kwargs))
    rows = invented_rows(module, own)
    with preserved_generators(place), torch.no_grad():
        if given is not None:
            with suppress(*_REFUSALS):
                _seeded(module, rows)
            return own
        try:
            _seeded(module, rows)
        except (ArithmeticError, AssertionError, IndexError, KeyError, RuntimeError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                "module does not take invented records of the shapes of the loader's (real numbers N(0, 1), small "
                f"whole numbers, true): {type(error).__name__}: {reason}; give example_inputs, a few public or "
                "invented records"
            ) from error
    return rows


def template_of(module: nn.Module, given: Rows) -> Any:
    """Return the module's outputs for some records, and refuse parameters and buffers that a training pass changes.

    A first pass may fill buffers, such as caches, but not with what depends on the records. The module runs on batches
    of two sizes, to tell the dimension of records from one that only happens to have the size of a batch. ValueError is
    also raised if no output has a row per record, or one that varies with their number does not have the rows in its
    first dimension.
    """
    many, few = given.repeated(*_COUNTS)
    place = next(module.parameters()).device
    with preserved_generators(place), preserved_attributes(module), torch.no_grad():
        start = copies(module)
        try:
            _seeded(module, many)  # some modules fill caches in their first pass
            first = copies(module)
            _require_kept(module, first | {name: start[name] for name, _ in module.named_parameters()})
            with fixed_parameters(module):
                output = _seeded(module, many)
            _require_kept(module, first)
            one = given.take(torch.zeros(_COUNTS[0], dtype=torch.int64))
            turned = many.mapped(lambda leaf: leaf.flip(tuple(range(1, leaf.ndim))))

            def scaled(rows: Rows, factor: float) -> Rows:
                return rows.mapped(lambda leaf: factor * leaf if leaf.is_floating_point() else leaf)

            for others in (scaled(turned, 0.5), scaled(many, 3.0), one):
                put_back(module, start)
                try:
                    _seeded(module, others)
                except _REFUSALS:
                    continue
                _require_kept(module, first)
            put_back(module, start)
            fewer = _seeded(module, few)
        finally:
            put_back(module, start)
    # Outputs must have a row for each record, as their shapes in batches of two sizes show.
    shapes, fewer_shapes = (
        [tuple(leaf.shape) for leaf in tree_leaves(each) if isinstance(leaf, Tensor)]
        for each in (output, fewer)
    )
    if len(shapes) != len(fewer_shapes):
        raise ValueError(
            f"module returns {len(shapes)} tensors for {_COUNTS[0]} records and {len(fewer_shapes)} for {_COUNTS[1]}; "
            "return tensors with a row for each record"
        )
    pairs = list(zip(shapes, fewer_shapes, strict=True))
    rows = [(a[:1], b[:1]) == ((_COUNTS[0],), (_COUNTS[1],)) for a, b in pairs]
    if not any(rows):
        raise ValueError("module returns no tensor with a row for each record; return outputs, not a loss")
    for (a, b), has_rows in zip(pairs, rows, strict=True):
        if a != b and not (has_rows and a[1:] == b[1:]):
            raise ValueError(
                f"module returns a tensor of shape {a} for {_COUNTS[0]} records and {b} for {_COUNTS[1]}: records must "
                "come first, with one row each; transpose or reshape it in the module"
            )
    return output


def _require_kept(module: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Refuse a changed parameter or buffer."""
    for name in changes(module, before):
        kind = "parameter" if name in dict(module.named_parameters()) else "buffer"
        raise ValueError(
            f"module: a training pass changes {kind} {name!r}, which reveals the records or their number and which no "
            "noise protects; switch that off, such as track_running_stats=False, or use modules that keep nothing"
        )


def cut_rows(values: Any, *, records: int, part: slice) -> Any:
    """Return the rows of some records of all tensors that have a row for each record."""
    return tree_map(
        lambda leaf: leaf[part] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == records else leaf,
        values,
    )


def rows_of(leaves: Sequence[Any]) -> int | None:
    """Return the first size of the first tensor, or None if there is none."""
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), None)


def require_rows(leaves: Sequence[Any], records: int) -> None:
    """Refuse (ValueError) arguments of a module in training that do not belong to single records.

    A number, or a tensor without a row for each record, may be a statistic of the batch, such as its size or its mean.
    """
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.ndim and len(leaf) == records:
                continue
            raise ValueError(
                f"module: an argument of shape {tuple(leaf.shape)} has no row for each of the {records} records, so "
                "that it may come from all of them; build constants into the module, such as by register_buffer"
            )
        if is_number(leaf):
            raise ValueError(f"module: an argument is the number {leaf!r}, {NO_NUMBERS} module")


FILLED = (
    "which says which of them only fill it, with weight zero; keep their order, sort in the module or in the collate "
    "function, or give fixed_batches=False"
)
OF_USERS = "which says whose they are; keep their order, or sort in the module"
"""Why the rows of a batch must keep their order, and what to do."""


def require_order(leaves: Sequence[Any], handed: Sequence[Any], why: str) -> None:
    """Refuse (ValueError) tensors of the batch with their rows in another order, such as sorted by length.

    `leaves` are arguments of the module, `handed` those of the batch as the loop received it, `why` is `FILLED` or
    `OF_USERS`.
    """
    known = [leaf for leaf in handed if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or any(leaf is one for one in known):
            continue
        like = [one for one in known if (one.shape, one.dtype) == (leaf.shape, leaf.dtype)]
        ours = leaf.detach().cpu()
        theirs = [one.cpu() for one in like]
        if any(same(ours, one) for one in theirs):
            continue
        # sorted, the rows do not depend on their order
        rows = (each.reshape(len(each), -1) for each in (ours, *theirs))
        first, *others = (flat[flat.double().sum(dim=1).argsort(stable=True)] for flat in rows)
        if any(same(first, other) for other in others):
            raise ValueError(
                f"module: an argument has the rows of the loader's batch in another order, {why}"
            )


def require_own_rows(leaves: Sequence[Any], handed: Sequence[Any]) -> None:
    """Refuse (ValueError) arguments whose rows stand in different orders: a loss would join two records.

    They are those of the module, and of the criterion but the module's outputs. An order is read off a tensor that has
    the rows of one of the batch, as the loop received it, if these differ enough that no function of single records
    would give them by chance. All of them may have one other order.
    """
    known = [leaf for leaf in handed if isinstance(leaf, Tensor) and leaf.ndim]
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if all(any(leaf is one for one in known) for leaf in found):
        return
    # 1. Find the tensors of the batch that have the same rows, by the hashes of these.
    columns: list[tuple[list[int], list[list[int]]]] = []
    for leaf in found:
        like = [
            one
            for one in known
            if (len(one), one.numel(), one.dtype) == (len(leaf), leaf.numel(), leaf.dtype)
        ]
        rows, others = _hashes(leaf), [_hashes(one) for one in like]
        if rows in others:
            columns.append((rows, [rows]))
            continue
        is_real = leaf.is_floating_point() and leaf.numel() >= 4 * len(leaf)
        if is_real:
            is_real = bool((leaf.detach() != leaf.detach().round()).any())
        enough = len(set(rows)) >= (2 if is_real else _DISTINCT)
        if enough and (moved := [other for other in others if sorted(other) == sorted(rows)]):
            columns.append((rows, moved))
    # 2. Compare what stands in one row of all of them.
    ours = Counter(zip(*(rows for rows, _ in columns), strict=True))
    choices = itertools.product(*(others for _, others in columns))
    if not any(Counter(zip(*choice, strict=True)) == ours for choice in choices):
        raise ValueError(
            "criterion: the module's arguments and the targets have the rows of the loader's batch in different "
            "orders, so that the loss of one record joins two and no clip bounds what a record adds; give both in the "
            "loader's order"
        )


def _hashes(leaf: Tensor) -> list[int]:
    """Return a hash of each row of a tensor; none of one without numbers, or that is sparse."""
    if not leaf.numel() or leaf.layout is not torch.strided:
        return []
    flat = leaf.detach().cpu().resolve_conj().reshape(len(leaf), -1).contiguous()
    return [hash(row.tobytes()) for row in flat.view(torch.uint8).numpy()]


NO_NUMBERS = (
    "which may come from all records of a batch; give a tensor with a row for each record, or build it into"
)
"""Why numbers are refused as arguments."""


def is_number(value: Any) -> bool:
    """Return whether a value is a bare number; truth values and texts are options instead."""
    return isinstance(value, int | float | complex | np.generic) and not isinstance(value, bool | np.bool_)


def _seeded(module: nn.Module, records: Rows) -> Any:
    torch.manual_seed(0)
    args, kwargs = records.values
    return module._call_impl(*args, **kwargs)


def require_steady(
    tape: RecordTape, args: tuple[Any, ...], kwargs: Mapping[str, Any], points: Sequence[FeedbackAlignment]
) -> None:
    """Refuse gradients that depend on earlier batches; feedback points project exactly meanwhile."""

    def seek() -> None:
        for feedback in points:
            feedback.seek(0)

    with ExitStack() as stack:
        for feedback in points:
            stack.enter_context(feedback.exactly())
        require_steady_gradients(tape, args, dict(kwargs), seek=seek)


class ProbedParts:
    """Refuses any module but the one that was probed.

    Args:
        module: The module as it was probed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = {id(p) for p in module.parameters() if p.requires_grad}
        self._parts = dict(module.named_modules())
        self._modes = {name: part.training for name, part in self._parts.items()}
        self._runs = {name: (type(part), vars(part).get("forward")) for name, part in self._parts.items()}
        owners: list[tuple[Any, str]] = [(part, name) for part in module.modules() for name in HOOKS]
        self._owners = [*owners, *((torch_module, f"_global{name}") for name in HOOKS)]
        # Kept alive, so that no later hook has the id of one of these.
        self._hooks = {
            (id(owner), id(hook)): hook for owner, name in self._owners for hook in vars(owner)[name].values()
        }

    def require_same(self) -> None:
        """Refuse (RuntimeError) other learning parameters, parts or code, and further hooks; hooks may be removed."""
        if {id(p) for p in self._module.parameters() if p.requires_grad} != self._parameters:
            raise RuntimeError(
                "module: its parameters that learn changed since make_private; freeze, unfreeze or add parameters "
                "before it, or close the private loop and start another one"
            )
        for name, part in self._module.named_modules():
            if self._parts.get(name) is not part:
                raise RuntimeError(
                    f"module: part {name!r} ({type(part).__name__}) is new since make_private, which has not probed "
                    "whether it mixes records; exchange parts before make_private"
                )
            kind, forward = self._runs[name]
            if type(part) is not kind or vars(part).get("forward") is not forward:
                raise RuntimeError(
                    f"module: part {name!r} has another class or forward function since make_private, which has not "
                    "probed whether it mixes records; change it before make_private"
                )
        if any(
            (id(owner), id(hook)) not in self._hooks
            for owner, name in self._owners
            for hook in vars(owner)[name].values()
        ):
            raise RuntimeError(
                "module: a hook was added since make_private, which has not probed whether it mixes records; "
                "register hooks before make_private, or remove them before the next batch"
            )
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and parameter._backward_hooks:
                raise RuntimeError(
                    f"module: parameter {name!r} has a gradient hook, which would not run; remove it, and change "
                    "gradients after backward"
                )

    def require_same_modes(self) -> None:
        """Refuse (RuntimeError) a training pass in modes not probed, such as with frozen batch statistics."""
        for name, each in self._module.named_modules():
            if self._modes.get(name) != each.training:
                now = "training" if each.training else "evaluation"
                raise RuntimeError(
                    f"module: {name!r} ({type(each).__name__}) is in {now} mode now, and was not when make_private "
                    "probed whether it mixes records; put it back after module.train(), such as by .eval() on frozen "
                    "batch normalisation"
                )
