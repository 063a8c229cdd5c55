"""Probe whether a module mixes the records of a batch: change one record and compare the outputs of the others.

A guarantee for records clips each record's contribution. If one record changes another's output, as with batch
statistics, it changes all contributions and no clip bounds their sum. The probe runs the module in its current mode on
a few records and

- replaces the first or the last record by another, by one a thousand times as large, and by NaN;
- removes the first or the last record, because an output must not depend on the number of records;
- shows one of two batches, then a third, after which the module's Python attributes must not tell which it was.

NaN reveals what finite values can hide: it passes through weights of 0 and saturated activations. Parameters are
perturbed too, so that a branch with zero weights is not missed. Afterwards the generators of torch, numpy and Python
are unchanged, and so are the module's parameters and buffers, but for what it sets in its first pass. Whatever it keeps
of that pass is used without noise, so runs probe with invented records.

No finite probe proves that a module processes all records independently, so the guarantee lists this as an assumption.
"""

from __future__ import annotations

import random
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from opusim.errors import DeviceError
from training.data import Dataset
from training.data.dataset import PADDING
from training.networks.memory import preserved_attributes, require_forgetful

_BATCH_SIZES = (4, 33)
"""Batch sizes to try: a few records, and more than a block of some batch-wise kernels."""
_FULL_PROBE_LIMIT = 2**24
"""Largest number of parameters for the full probe, which perturbs all of them at both batch sizes. In larger models, it
perturbs only constant tensors (fresh scales, zeroed branches, LoRA's second factors), at the first batch size."""
_SETTINGS = 3
_RECORDS = 9
"""Invented records."""
MIXES_REMEDY = (
    "no guarantee for records covers it; use modules that process records independently, such as nn.GroupNorm or "
    "nn.LayerNorm instead of batch statistics, or train without protection"
)


class _Change(NamedTuple):
    """Records after a change, and the positions of the unchanged records now and before.

    An odd change holds numbers that a module may refuse.
    """

    rows: Tensor
    now: slice
    before: slice
    resized: bool = False
    odd: bool = False


def require_independent_records(model: nn.Module, records: Tensor) -> None:
    """Refuse a module in which one record of a batch changes another's output; see the top of this file.

    Args:
        model: Maps records (batch, ...) to a tensor (batch, ...); in the mode in which it will be trained.
        records: Valid records on the module's device, shape (n, ...), n at least 1.

    Raises:
        ValueError: A module computes batch statistics or changes a parameter or buffer, or another record's output
            changed.
    """
    if found := batch_statistics(model):
        raise ValueError(f"model: {found} mixes the records of a batch: {MIXES_REMEDY}")
    with preserved_generators(records.device):
        require_fixed_tensors(model, records)
        require_forgetful(model, lambda index, factor: seeded_output(model, _scaled(records, index, factor)))
    small = sum(parameter.numel() for parameter in model.parameters()) <= _FULL_PROBE_LIMIT
    settings, sizes = (_SETTINGS, _BATCH_SIZES) if small else (_SETTINGS - 1, _BATCH_SIZES[:1])
    with preserved_generators(records.device), preserved_attributes(model), torch.no_grad():
        for setting in range(settings):
            state = _state(model, everything=small, setting=setting)
            for count in sizes:
                _probe(model, state, _first_records(records, count))


def _scaled(records: Tensor, index: Tensor, factor: float) -> Tensor:
    """Return some records, whole numbers as they are."""
    rows = records[index.to(records.device) % len(records)]
    return rows if bool((rows == rows.round()).all()) else factor * rows


def batch_statistics(model: nn.Module) -> str | None:
    """Name the first module that computes statistics of the batch, or return None if there is none."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return _module_name(name, module)
    return None


def invented_records(dataset: Dataset, place: torch.device) -> tuple[Tensor, Tensor]:
    """Return records and targets of the shapes and ranges of a data set, drawn without a look at its records.

    Features are N(0, 1). Some records end in zeros, as padded sequences do.

    Args:
        dataset: Its record shape, vocabulary and kind of target are read.
        place: Torch device of the result.

    Returns:
        Inputs, shape (9, n_features), and targets.
    """
    generator = torch.Generator().manual_seed(0)
    shape, outputs = (_RECORDS, dataset.n_features), dataset.n_classes
    if dataset.vocabulary is None:
        x = torch.randn(shape, generator=generator)
    else:
        x = torch.randint(0, dataset.vocabulary, shape, generator=generator)
    half = dataset.n_features - dataset.n_features // 2
    x[1::3, half:] = 0
    if dataset.target in ("class", "tokens"):
        y = torch.randint(
            0, outputs, shape if dataset.target == "tokens" else (_RECORDS,), generator=generator
        )
        if dataset.target == "tokens":
            y[1::3, half:] = PADDING
    else:
        y = torch.randn((_RECORDS, outputs), generator=generator)
        y = (y > 0).float() if dataset.target == "labels" else y
    return x.to(place), y.to(place)


def two_records(dataset: Dataset, place: torch.device, *, invented: bool) -> Tensor:
    """Return two records from which shapes are read, shape (2, n_features): invented, or the first one twice."""
    if invented:
        return invented_records(dataset, place)[0][:2]
    return dataset.train.batch(slice(1))[0].to(place).expand(2, -1)


def require_fixed_tensors(model: nn.Module, x: Tensor) -> Tensor:
    """Refuse parameters and buffers that a forward pass changes, and return the output of a later pass.

    The first pass is not checked: some modules fill caches in it, or take initial values from its records, which must
    therefore be invented ones. It sees half of the records, so that rows that only the others' tokens reach, and limits
    that only larger numbers move, still change afterwards.

    Raises:
        ValueError: There is such a tensor.
    """
    seeded_output(model, first_half(x))
    before = {name: tensor.clone() for name, tensor in _tensors(model)}
    for rows in (_scaled(x, torch.arange(len(x)), 3.0), x):
        with fixed_parameters(model):
            found = seeded_output(model, rows)
        for name, tensor in _tensors(model):
            if name not in before or not same(before[name], tensor):
                raise _changes_tensor(name)
    return found


def first_half(x: Tensor) -> Tensor:
    """Return as many records, of which the first half occur twice."""
    return x[torch.arange(len(x), device=x.device) // 2]


@contextmanager
def fixed_parameters(model: nn.Module) -> Iterator[None]:
    """Refuse a pass in the block that writes into a parameter, even if its values stay as they are for these records.

    An embedding with max_norm does: it shortens the rows of the tokens that it is shown.

    Raises:
        ValueError: It does.
    """
    before = {name: parameter._version for name, parameter in model.named_parameters()}
    yield
    for name, parameter in model.named_parameters():
        if before.get(name, parameter._version) != parameter._version:
            raise _changes_tensor(name)


def _changes_tensor(name: str) -> ValueError:
    return ValueError(
        f"model: a forward pass changes {name!r}, which a checkpoint would hold without noise; use modules that keep "
        "no statistics, such as nn.GroupNorm or nn.LayerNorm, and embeddings without max_norm"
    )


def seeded_output(model: nn.Module, x: Tensor) -> Tensor:
    """Return the output for records, with the same random numbers in every call."""
    seed_generators()
    with torch.no_grad():
        output: Tensor = model(x.clone())
    return output


def same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal, NaN to NaN."""
    return first.shape == second.shape and torch.equal(first.nan_to_num(), second.nan_to_num())


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def seed_generators(seed: int = 0) -> None:
    """Seed the global generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def _probe(model: nn.Module, state: dict[str, Tensor], rows: Tensor) -> None:
    """Probe one batch under one setting of the parameters."""
    clean, again = _output(model, state, rows), _output(model, state, rows)
    steady = not _differs(clean, again, steady=True)
    if not steady:
        warnings.warn(
            f"model: {type(model).__name__} gives different outputs for the same records; whether it mixes the records "
            "of a batch was tested with NaN only",
            stacklevel=4,
        )
    resized = 0
    for change in _changes(rows):
        try:
            found = _output(model, state, change.rows)
        except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError) as error:
            if change.odd and not isinstance(error, DeviceError):
                continue
            raise
        if not _differs(clean[change.before], found[change.now], steady=steady):
            continue
        resized += change.resized
        if change.resized and resized < 2:
            continue  # a quantiser may amplify the rounding that belongs to one batch size
        culprit = _culprit(model, state, rows, change, steady=steady)
        what = "outputs depend on their number" if change.resized else "one changes the output of another"
        raise ValueError(f"model: {culprit} mixes the records of a batch ({what}): {MIXES_REMEDY}")


def _changes(rows: Tensor) -> Iterator[_Change]:
    """Yield the batch with the first or the last record replaced or removed."""
    n = len(rows)
    sides = ((0, slice(1, n)), (n - 1, slice(0, n - 1)))
    for place, others in sides:
        for number, value in enumerate(_replacements(rows, place)):
            changed = rows.clone()
            changed[place] = value
            yield _Change(changed, others, others, odd=number > 0)
    for _, others in sides:
        yield _Change(rows[others], slice(None), others, resized=True)


def _replacements(rows: Tensor, place: int) -> Iterator[Tensor]:
    """Yield replacements of one record: another record of the batch, then odd values.

    Whole numbers may be indices; a GPU must not look them up out of range, so they get no odd values there.
    """
    yield rows[len(rows) // 2]
    whole = bool((rows == rows.round()).all())
    if not rows.is_floating_point() or (whole and rows.device.type != "cpu"):
        return
    yield torch.randn(rows[place].shape).to(rows)
    yield 1000 * rows[place] + 1000
    yield torch.full_like(rows[place], torch.nan)


def _differs(before: Tensor, after: Tensor, *, steady: bool) -> bool:
    """Return whether outputs of unchanged records changed by more than rounding; compare only NaN if not steady."""
    if before.shape != after.shape:
        return True
    if bool((before.isnan() != after.isnan()).any()):
        return True
    if not steady or not before.is_floating_point():
        return steady and not torch.equal(before, after)
    finite = before.isfinite() & after.isfinite()
    if bool((before[~finite].nan_to_num() != after[~finite].nan_to_num()).any()):
        return True
    tolerance = min(1000 * torch.finfo(before.dtype).eps, 0.2)
    a, b = before[finite].double(), after[finite].double()
    return bool(len(a)) and float((a - b).abs().max()) > tolerance * float(a.abs().max())


def _output(model: nn.Module, state: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Return the output under this state, with the same random numbers in every call and copies of the buffers."""
    seed_generators()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    output: Tensor = torch.func.functional_call(model, state | buffers, (rows.clone(),))
    return output


def _state(model: nn.Module, *, everything: bool, setting: int) -> dict[str, Tensor]:
    """Return the parameters of a setting: none for the first, else perturbed in proportion to their size."""
    generator = torch.Generator().manual_seed(setting)
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if setting and value.is_floating_point() and value.numel() and (everything or _constant(value)):
            size = (
                float(value.double().square().mean().sqrt())
                or torch.atleast_1d(value)[..., :1].numel() ** -0.5
            )
            move = torch.randn(value.shape, generator=generator).mul_(0.5 * size)
            state[name] = value + move.to(value)
    return state


@contextmanager
def perturbed(model: nn.Module) -> Iterator[None]:
    """Perturb the parameters within the block, so that branches with zero weights show their gradients."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    state = _state(model, everything=True, setting=1)
    named = dict(model.named_parameters())
    try:
        with torch.no_grad():
            for name, value in state.items():
                named[name].copy_(value)
        yield
    finally:
        with torch.no_grad():
            for name, value in before.items():
                named[name].copy_(value)


def _constant(value: Tensor) -> bool:
    return bool(value.min() == value.max())


def _first_records(records: Tensor, count: int) -> Tensor:
    """Return `count` records, repeating the given ones if there are fewer."""
    return records[torch.arange(count, device=records.device) % len(records)].clone()


def _culprit(
    model: nn.Module, state: dict[str, Tensor], rows: Tensor, change: _Change, *, steady: bool
) -> str:
    """Name the first module to finish with a changed output of an unchanged record, or else the model."""
    seen: list[dict[str, Tensor]] = []
    names = {id(module): name for name, module in model.named_modules()}

    def keep(module: nn.Module, _: object, output: object) -> None:
        if isinstance(output, Tensor) and output.ndim and len(output) == size:
            seen[-1].setdefault(names[id(module)], output.detach().clone())

    handles = [module.register_forward_hook(keep) for module in model.modules()]
    try:
        for batch in (rows, change.rows):
            seen.append({})
            size = len(batch)
            _output(model, state, batch)
    finally:
        for handle in handles:
            handle.remove()
    modules = dict(model.named_modules())
    for name, output in seen[0].items():
        other = seen[1].get(name)
        if other is not None and _differs(output[change.before], other[change.now], steady=steady):
            return _module_name(name, modules[name])
    return type(model).__name__


def _module_name(name: str, module: nn.Module) -> str:
    return f"{type(module).__name__} {name!r}" if name else type(module).__name__


@contextmanager
def preserved_generators(place: torch.device) -> Iterator[None]:
    """Restore the global generators of torch, numpy and Python on exit."""
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    devices = [place] if place.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)


@contextmanager
def system_generators(place: torch.device, *, fresh: bool = True) -> Iterator[None]:
    """Seed the global generators from the system within the block, and restore them on exit.

    What a module or a loader draws for a batch goes by the places of its records, which one record more moves. Under a
    known seed the contributions of all others would then change; secret draws have one law for every record.

    Args:
        place: The torch device whose generator is seeded besides the CPU's.
        fresh: Whether to do so (release mode), or nothing.
    """
    if not fresh:
        yield
        return
    with preserved_generators(place):
        torch.manual_seed(secrets.randbits(63))
        np.random.seed(np.frombuffer(secrets.token_bytes(32), dtype=np.uint32))  # noqa: NPY002
        random.seed(secrets.token_bytes(32))
        yield
