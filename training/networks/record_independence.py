"""Parts of the checks that a module keeps the records of a batch apart, and remembers none.

A guarantee for records clips each record's contribution. If one record changes another's output, as with batch
statistics, it changes all contributions and no clip bounds their sum. Where the records stand follows from the
operators that run (`opusim.training.networks.record_gradients.probe`); this file has what every check needs: invented
records, generators that are put back, parameters that are perturbed, and tensors that no pass may change.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from opusim.training.data import Dataset
from opusim.training.data.dataset import PADDING

_RECORDS = 9
"""Invented records."""
MIXES_REMEDY = (
    "no guarantee for records covers it; use modules that process records independently, such as nn.GroupNorm or "
    "nn.LayerNorm instead of batch statistics, or train without protection"
)


def scaled(records: Tensor, index: Tensor, factor: float) -> Tensor:
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
    for rows in (scaled(x, torch.arange(len(x)), 3.0), x):
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


@contextmanager
def perturbed(model: nn.Module) -> Iterator[None]:
    """Perturb the parameters within the block, so that branches with zero weights show their gradients."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    named, generator = dict(model.named_parameters()), torch.Generator().manual_seed(1)
    try:
        with torch.no_grad():
            for name, value in before.items():
                if value.is_floating_point() and value.numel():
                    size = float(value.double().square().mean().sqrt())
                    size = size or torch.atleast_1d(value)[..., :1].numel() ** -0.5
                    move = torch.randn(value.shape, generator=generator).mul_(0.5 * size)
                    named[name].add_(move.to(value))
        yield
    finally:
        with torch.no_grad():
            for name, value in before.items():
                named[name].copy_(value)


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
