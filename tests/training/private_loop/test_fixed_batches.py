"""Fixed physical batches: the same rows in every step, weight zero for those that only fill, nothing else changed.

A batch without records holds nothing of any record, whatever the collate function builds.
"""

from collections import UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

import opusim
from opusim.training.data import samplers as batches
from opusim.training.data.samplers import OVERFLOW, PhysicalBatches, most_records
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.private_loop import loader as private_loader
from tests.support.private_loops import Parts, parts, private_loop

TINY = 1e-9


Trained = tuple[Tensor, list[int], list[float]]


def trained(folder: Path, given: Parts | None = None, **options: Any) -> Trained:
    """The parameters after an epoch, the rows of each batch, and the losses shown."""
    with private_loop(folder, given or parts(), noise_multiplier=TINY, **options) as private:
        model, optimizer, criterion, loader = private
        rows, shown = [], []
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            rows.append(len(x))
            shown.append(float(loss.detach()))
        return parameters_to_vector(model.parameters()).detach(), rows, shown


@pytest.mark.parametrize("limit", [None, 7])
def test_training_is_the_same_and_batches_have_one_size(tmp_path: Path, limit: int | None) -> None:
    options = {"max_physical_batch_size": limit, "sample_rate": 0.2}
    plain, drawn, shown = trained(tmp_path / "plain", **options)
    fixed, rows, again = trained(tmp_path / "fixed", fixed_batches=True, **options)
    torch.testing.assert_close(fixed, plain, rtol=1e-5, atol=1e-6)
    assert again == pytest.approx(shown, rel=1e-5)
    most = int(stats.binom(60, 0.2).isf(OVERFLOW))
    assert len(set(drawn)) > 1
    assert set(rows) == {most if limit is None else -(-most // -(-most // 7)) * -(-most // 7)}


def test_more_rows_run_if_more_records_are_drawn(tmp_path: Path) -> None:
    plain, drawn, _ = trained(tmp_path / "plain")
    with patch.object(batches, "OVERFLOW", 0.7):
        fixed, rows, _ = trained(tmp_path / "fixed", fixed_batches=True)
    torch.testing.assert_close(fixed, plain, rtol=1e-5, atol=1e-6)
    size = min(rows)
    assert set(rows) == {size, 2 * size}
    assert all(size * (1 + (n > size)) == row for n, row in zip(drawn, rows, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_what_fills_a_batch_adds_nothing(value: float, tmp_path: Path) -> None:
    """The first record, which fills batches without records, and is in others, cannot be held by float32."""

    def given() -> Parts:
        found = parts(batch_size=2)
        found[3].dataset.tensors[0][:4] = value  # type: ignore[attr-defined]
        return found

    plain, drawn, _ = trained(tmp_path / "plain", given())
    fixed, _, _ = trained(tmp_path / "fixed", given(), fixed_batches=True)
    assert 0 in drawn
    torch.testing.assert_close(fixed, plain, rtol=1e-5, atol=1e-6)


class Lengths:
    """Records of several lengths; those that are looked at beforehand have one."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(60, 8, generator=generator)
        self.y = torch.randint(0, 3, (60,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index, : 8 if index < 40 else 4 + index % 4].clone(), "y": self.y[index]}


def stacked(records: list[dict[str, Any]]) -> tuple[Tensor, Tensor, list[int]]:
    x = torch.stack([nn.functional.pad(record["x"], (0, 8 - len(record["x"]))) for record in records])
    return x, torch.tensor([record["y"] for record in records]), [len(record["x"]) for record in records]


def longest_first(records: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    return stacked(sorted(records, key=lambda record: -len(record["x"])))[:2]


def of_lengths(collate: Any) -> Parts:
    module, optimizer, criterion, _ = parts()
    return module, optimizer, criterion, DataLoader(Lengths(), batch_size=12, collate_fn=collate)  # type: ignore[arg-type]


def test_a_collate_function_may_sort_what_it_collates(tmp_path: Path) -> None:
    """Were rows filled before, copies of a record would count as others."""
    plain, _, _ = trained(tmp_path / "plain", of_lengths(longest_first))
    fixed, _, _ = trained(tmp_path / "fixed", of_lengths(longest_first), fixed_batches=True)
    torch.testing.assert_close(fixed, plain, rtol=1e-5, atol=1e-6)


def test_a_loop_that_sorts_a_filled_batch_is_refused(tmp_path: Path) -> None:
    given = of_lengths(stacked)
    with private_loop(tmp_path, given, noise_multiplier=TINY, fixed_batches=True) as private:
        model, _, criterion, loader = private
        for x, y, lengths in loader:
            order = torch.tensor(lengths).argsort(descending=True, stable=True)
            if torch.equal(order, torch.arange(len(order))):
                criterion(model(x), y).backward()
                continue
            with pytest.raises(ValueError, match="in another order, which says which of them"):
                model(x[order])
            criterion(model(x.clone()), y).backward()
            return
    raise AssertionError("no batch had another order")


def test_texts_and_what_rows_cannot_be_told_of(tmp_path: Path) -> None:
    def textual(records: list[Any]) -> dict[str, Any]:
        x, y = (torch.stack(list(each)) for each in zip(*records, strict=True))
        return {"x": x, "y": y, "texts": [str(int(label)) for label in y], "by time": x.T, "kind": "text"}

    options = {"fixed_batches": True, "example_inputs": [torch.randn(3, 8)]}
    with private_loop(tmp_path / "a", parts(collate_fn=textual), **options) as private:
        rows = private.physical_batches.size
        for batch in private.data_loader:
            assert len(batch["x"]) == len(batch["y"]) == len(batch["texts"]) == rows
            assert batch["texts"] == [str(int(label)) for label in batch["y"]]
            assert torch.equal(batch["by time"].T, batch["x"])
            private.criterion(private.module(batch["x"]), batch["y"]).backward()
    with pytest.raises(ValueError, match=r"puts a object into batches \(batch\['x'\]\), whose rows cannot"):
        private_loop(tmp_path / "b", parts(collate_fn=lambda records: {"x": object()}), **options)


def test_rows_that_fill_would_be_seen(tmp_path: Path) -> None:
    """Planted fault: rows that fill a batch count like records."""
    plain, _, _ = trained(tmp_path / "plain")
    with patch.object(Contributions, "leave_out", lambda self, padding: None):
        faulty, _, _ = trained(tmp_path / "faulty", fixed_batches=True)
    assert float((faulty - plain).abs().max()) > 0.1


@pytest.mark.filterwarnings("ignore:sample_rate. batches never fill")
def test_feedback_noise_on_rows_that_fill_is_left_out(tmp_path: Path) -> None:
    """An empty batch moves nothing, although the device adds noise to the feedback of each row."""
    options = {"sample_rate": 1e-6, "target_delta": 1e-9, "fixed_batches": True}
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    device = opusim.open_device("gaussian", n_inputs=3, n_outputs=16, seed=1)
    opusim.FeedbackAlignment(model, ["1"], device=device)
    with private_loop(tmp_path, parts(model), noise_multiplier=TINY, **options) as private:
        x, y = next(iter(private.data_loader))
        private.criterion(model(x), y).backward()
        assert len(x) > 0
        assert max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None) < 1e-7


@pytest.mark.parametrize(("expected", "records"), [(1.0, 4), (12.0, 60), (256.0, 60_000), (1024.0, 1024)])
def test_rows_hold_what_is_drawn_but_for_a_stated_chance(expected: float, records: int) -> None:
    law = stats.binom(records, expected / records)
    known = most_records(expected, records=records, processes=1)
    private = most_records(expected, records=None, processes=1)
    assert law.sf(known) <= OVERFLOW
    assert known == 1 or law.sf(known - 1) > OVERFLOW  # no row too many
    assert private >= known
    assert most_records(expected, records=records, processes=3) == -(-known // 3)


def test_the_number_of_rows_tells_nothing_of_a_private_number_of_records(tmp_path: Path) -> None:
    rows = []
    for count in (60, 61):
        options = {"relation": "add_or_remove_one", "sample_rate": 0.2, "fixed_batches": True}
        with private_loop(tmp_path / str(count), parts(count=count), **options) as private:
            rows.append(private.physical_batches)
    assert rows[0] == rows[1] == PhysicalBatches(size=int(stats.poisson(12).isf(OVERFLOW)), count=1)


# Empty batches


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


def collated(collate: Any) -> Parts:
    loader: DataLoader[Any] = DataLoader(records(20), batch_size=1, collate_fn=collate)  # type: ignore[arg-type]
    return (*parts(nn.Linear(4, 4))[:3], loader)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_emptied_is_refused(case: str, tmp_path: Path) -> None:
    build, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        private_loop(tmp_path, collated(build), example_inputs=[torch.randn(3, 4)])
    assert "\n" not in str(caught.value)


def test_a_loop_over_texts_and_tensors_meets_empty_batches(tmp_path: Path) -> None:
    sizes = []
    with private_loop(tmp_path, collated(TAKEN["texts"])) as loop:
        model, optimizer, criterion, loader = loop
        for x, y, names in loader:
            optimizer.zero_grad()
            criterion(model(x), y - 1).backward()
            optimizer.step()
            assert len(x) == len(y) == len(names)
            assert names == [f"record {int(row[0]) - 1}" for row in x]
            sizes.append(len(names))
    assert min(sizes) == 0 < max(sizes)
