"""A batch without records holds nothing of any record, whatever the collate function builds."""

from __future__ import annotations

from collections import UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

import opusim
from opusim.training.private_loop import loader as private_loader

Pair = namedtuple("Pair", ("inputs", "labels"))


@dataclass
class Object:
    """A batch that no rule empties."""

    inputs: Tensor


class Named(UserDict[str, Any]):
    """A mapping that only takes its entries by name."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)


def records(count: int) -> list[tuple[Tensor, int, str]]:
    """Features, a class and a text; every value tells which record it comes from."""
    return [(torch.full((4,), 1.0 + n), (n % 3), f"record {n}") for n in range(count)]


def tensors(batch: list[tuple[Tensor, int, str]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _, _ in batch]), torch.tensor([1 + y for _, y, _ in batch])


def texts(batch: list[tuple[Tensor, int, str]]) -> list[str]:
    return [text for _, _, text in batch]


TAKEN = {
    "a mapping of a user's own": lambda b: UserDict(zip(("x", "y"), tensors(b), strict=True)),
    "a mapping with a constructor of its own": lambda b: Named(x=tensors(b)[0]),
    "a mapping that makes entries": lambda b: defaultdict(list, x=tensors(b)[0]),
    "mappings in mappings": lambda b: {"inner": UserDict(x=tensors(b)[0], return_loss=True, nothing=None)},
    "a named tuple": lambda b: Pair(*tensors(b)),
    "texts": lambda b: [*tensors(b), texts(b)],
    "tuples by record": lambda b: tuple(zip(*b, strict=True)),
    "arrays": lambda b: [tensors(b)[0].numpy(), np.array(texts(b))],
    "padding by the longest text": lambda b: torch.zeros(len(b), max(map(len, texts(b)))),
}


def told(value: Any) -> list[Any]:
    """Return every number and text that a batch holds, at any depth."""
    if isinstance(value, Tensor | np.ndarray):
        return value.reshape(-1).tolist() + [size for size in value.shape[1:] if size not in (0, 4)]
    if isinstance(value, UserDict | dict):
        return [each for entry in value.values() for each in told(entry)]
    if isinstance(value, list | tuple):
        return [each for entry in value for each in told(entry)]
    return [] if value is None or value is True else [value]


@pytest.mark.parametrize("case", TAKEN)
def test_an_empty_batch_has_the_form_of_others_and_nothing_of_a_record(case: str) -> None:
    build, data = TAKEN[case], records(12)
    one, two = build(data[:1]), build(data[10:])
    empty = private_loader.empty_batch(one, two)
    assert told(one)
    assert told(empty) == []
    if case != "tuples by record":
        assert type(empty) is (dict if isinstance(one, Named | defaultdict) else type(one))
        assert len(empty) == (0 if isinstance(one, Tensor) else len(one))


def test_planted_fault_only_tensors_are_emptied() -> None:
    """torch's trees do not enter mappings of a user's own, and texts are no tensors."""

    def emptied(one: Any) -> Any:
        return tree_map(lambda leaf: leaf[:0] if isinstance(leaf, Tensor) else leaf, one)

    holding = {case for case, build in TAKEN.items() if told(emptied(build(records(1))))}
    assert {"a mapping of a user's own", "texts", "arrays", "padding by the longest text"} <= holding


REFUSED = {
    "a number": (lambda b: {"x": tensors(b)[0], "longest": max(map(len, texts(b)))}, r"batch\['longest'\]"),
    "a text": (lambda b: [tensors(b)[0], "; ".join(texts(b))], r"puts a str into batches \(batch\[1\]\)"),
    "a truth value that varies": (lambda b: [tensors(b)[0], b[0][2] == "record 0"], r"puts a bool"),
    "a tensor without rows": (lambda b: [tensors(b)[0].sum()], r"puts a Tensor into batches \(batch\[0\]\)"),
    "an object": (lambda b: Object(tensors(b)[0]), r"puts a Object into batches \(batch\)"),
    "keys of records": (lambda b: {text: x for x, _, text in b}, "puts a dict into"),
    "a set": (lambda b: [tensors(b)[0], set(texts(b))], "puts a set into batches"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_emptied_is_refused(case: str, tmp_path: Path) -> None:
    build, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        private(build, tmp_path, example_inputs=[torch.randn(3, 4)])
    assert "\n" not in str(caught.value)


def private(collate: Any, folder: Path, module: nn.Module | None = None, **options: Any) -> Any:
    module = module or nn.Linear(4, 4)
    loader = DataLoader(records(20), batch_size=1, collate_fn=collate)
    return opusim.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        noise_multiplier=1.0,
        target_delta=1e-5,
        max_grad_norm=1.0,
        folder=folder,
        seed=3,
        **options,
    )


def test_a_loop_over_texts_and_tensors_meets_empty_batches(tmp_path: Path) -> None:
    sizes = []
    with private(TAKEN["texts"], tmp_path) as loop:
        model, optimizer, criterion, loader = loop
        for x, y, names in loader:
            optimizer.zero_grad()
            criterion(model(x), y - 1).backward()
            optimizer.step()
            assert len(x) == len(y) == len(names)
            assert names == [f"record {int(row[0]) - 1}" for row in x]
            sizes.append(len(names))
    assert min(sizes) == 0 < max(sizes)
