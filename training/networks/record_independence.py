"""A probe for modules that mix the records of a batch: change one record, and see whether another's output moves.

A guarantee for records clips what each record contributes. If a module lets one record change another's output, as
batch statistics do, one record changes all contributions and no clip bounds their sum. The probe runs the module in the
mode that it is in, on a few records, and

- replaces the first or the last record by another, by one a thousand times as large, and by NaN;
- leaves the first or the last record out, since a record's output must not depend on how many others there are.

NaN finds what values may hide: it passes through weights of 0 and through saturated activations. Parameters are
perturbed as well, so that a branch whose weights begin at 0 does not pass unseen. The module's parameters, buffers and
the generators of torch, numpy and Python are as before afterwards; other state of the module is its own affair.

No finite probe proves that a module treats all records apart; the statement keeps it among its assumptions.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from opusim.errors import DeviceError
from training.data import Dataset

_BATCH_SIZES = (4, 33)
"""Batches that are tried: a few records, and more than a block of some batch-wise kernels."""
_FULL_PROBE_LIMIT = 2**24
"""Parameters up to which a model is probed with all of them perturbed, at both sizes; a larger one, which costs a copy
and time, with those that are constant (fresh scales, zeroed branches, LoRA's second factors), at the first size."""
_SETTINGS = 3
_REMEDY = (
    "no guarantee for records covers it; use modules that treat records apart, such as nn.GroupNorm or nn.LayerNorm "
    "for batch statistics, or protection.kind = 'none'"
)


class _Change(NamedTuple):
    """Records after a change, and where unchanged ones stand in them and stood before.

    Odd ones hold numbers that a module may refuse.
    """

    rows: Tensor
    now: slice
    before: slice
    resized: bool = False
    odd: bool = False


def require_independent_records(model: nn.Module, records: Tensor) -> None:
    """Refuse a module in which one record of a batch moves another's output; see the top of this file.

    Args:
        model: Takes records (batch, ...), gives a tensor (batch, ...); in the mode in which it will be trained.
        records: Some records that it can take, on its device, shape (n, ...), n at least 1.

    Raises:
        ValueError: A module takes statistics of the batch in training mode, or another record's output moved.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ValueError(f"model: {_called(name, module)} mixes the records of a batch: {_REMEDY}")
    small = sum(parameter.numel() for parameter in model.parameters()) <= _FULL_PROBE_LIMIT
    settings, sizes = (_SETTINGS, _BATCH_SIZES) if small else (_SETTINGS - 1, _BATCH_SIZES[:1])
    with _own_randomness(records.device), torch.no_grad():
        for setting in range(settings):
            state = _state(model, everything=small, setting=setting)
            for count in sizes:
                _probe(model, state, _some(records, count))


def probe_records(dataset: Dataset, place: torch.device) -> Tensor:
    """Records to probe a model with, shape (33 at most, n_features)."""
    return dataset.train.x[: max(_BATCH_SIZES)].to(place)


def _probe(model: nn.Module, state: dict[str, Tensor], rows: Tensor) -> None:
    """One batch under one setting of the parameters."""
    clean, again = _output(model, state, rows), _output(model, state, rows)
    steady = not _differs(clean, again, steady=True)
    if not steady:
        warnings.warn(
            f"model: {type(model).__name__} gives other outputs for the same records each time; whether it mixes the "
            "records of a batch was only tried with NaN",
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
            continue  # a quantiser may turn other roundings of one batch size into a step
        culprit = _culprit(model, state, rows, change, steady=steady)
        what = "outputs depend on how many there are" if change.resized else "one moves the output of another"
        raise ValueError(f"model: {culprit} mixes the records of a batch ({what}): {_REMEDY}")


def _changes(rows: Tensor) -> Iterator[_Change]:
    """What is done to the first or to the last record."""
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
    """Records to put in the place of one: another of the batch, then odd ones.

    Whole numbers may be indices, which a GPU must not look up out of range.
    """
    yield rows[len(rows) // 2]
    whole = bool((rows == rows.round()).all())
    if not rows.is_floating_point() or (whole and rows.device.type != "cpu"):
        return
    yield torch.randn(rows[place].shape).to(rows)
    yield 1000 * rows[place] + 1000
    yield torch.full_like(rows[place], torch.nan)


def _differs(before: Tensor, after: Tensor, *, steady: bool) -> bool:
    """Whether outputs of unchanged records moved by more than rounding; NaN only where outputs vary by themselves."""
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
    """The output under this state, always with the same random numbers; buffers that a call changes are copies."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    output: Tensor = torch.func.functional_call(model, state | buffers, (rows.clone(),))
    return output


def _state(model: nn.Module, *, everything: bool, setting: int) -> dict[str, Tensor]:
    """Parameters for a setting: the first as they are, the others moved by as much as they are large."""
    generator = torch.Generator().manual_seed(setting)
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if setting and value.is_floating_point() and value.numel() and (everything or _constant(value)):
            size = float(value.double().square().mean().sqrt()) or value[..., :1].numel() ** -0.5
            move = torch.randn(value.shape, generator=generator).mul_(0.5 * size)
            state[name] = value + move.to(value)
    return state


def _constant(value: Tensor) -> bool:
    return bool(value.min() == value.max())


def _some(records: Tensor, count: int) -> Tensor:
    """So many records, the given ones over again if there are fewer."""
    return records[torch.arange(count, device=records.device) % len(records)].clone()


def _culprit(
    model: nn.Module, state: dict[str, Tensor], rows: Tensor, change: _Change, *, steady: bool
) -> str:
    """The first module to finish with an unchanged record's output moved, if it can be told, else the model."""
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
            return _called(name, modules[name])
    return type(model).__name__


def _called(name: str, module: nn.Module) -> str:
    return f"{type(module).__name__} {name!r}" if name else type(module).__name__


@contextmanager
def _own_randomness(place: torch.device) -> Iterator[None]:
    """The global generators as they were, afterwards."""
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    devices = [place] if place.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)
