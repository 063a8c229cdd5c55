"""Records that are mapped from a file stay on disk, and give what the same records in memory give."""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import opusim
from opusim.training.data import dataset as disk
from opusim.training.data import from_arrays
from opusim.training.data.dataset import Dataset, Standardisation, standardised_by_records
from opusim.training.errors import DataError


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of some records, so that small arrays have several."""
    monkeypatch.setattr(disk, "NUMBERS_AT_ONCE", 64)


def mapped(folder: Path, values: np.ndarray) -> np.ndarray:
    file = folder / f"records-{len(list(folder.iterdir()))}.npy"
    np.save(file, values)
    return np.load(file, mmap_mode="r")


def records(seed: int, shape: tuple[int, ...] = (203, 3, 4)) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(2.0, 3.0, shape), generator.integers(0, 3, shape[0])


def parts(dataset: Dataset) -> list[torch.Tensor]:
    splits = [dataset.train, dataset.validation, *([] if dataset.test is None else [dataset.test])]
    return [tensor for split in splits for tensor in (split.x, split.y)]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["<f4", ">f4", "<f8", "<f2", "u1"])
@pytest.mark.parametrize("split", ["index", "content"])
def test_they_give_the_data_set_of_records_in_memory(
    tmp_path: Path, kind: str, split: Any, seed: int
) -> None:
    x, y = records(seed)
    x = np.abs(x).astype(kind)
    constants = Standardisation(mean=tuple(np.linspace(0, 1, 12).tolist()), std=2.0, source="the test")
    settings: dict[str, Any] = {
        "n_classes": 3, "validation_fraction": 0.2, "split_seed": 1, "split": split, "standardise": constants,
    }  # fmt: skip
    memory = from_arrays(x, y, test=(x[:50], y[:50]), **settings)
    for form in (lambda values: values, lambda values: np.asarray(values), lambda values: values[:]):
        found = from_arrays(
            form(mapped(tmp_path, x)), y, test=(form(mapped(tmp_path, x[:50])), y[:50]), **settings
        )
        assert all(torch.equal(a, b) for a, b in zip(parts(found), parts(memory), strict=True))
        assert found.record_shape == memory.record_shape == (3, 4)
        assert [found.train.on_disk, found.validation.on_disk] == [True, True]
    assert not memory.train.on_disk


@pytest.mark.usefixtures("small_blocks")
def test_they_are_standardised_as_in_memory(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = records(seed)
    found = standardised_by_records(
        from_arrays(mapped(tmp_path, x), y, validation_fraction=0.2, split_seed=1)
    )
    monkeypatch.setattr(disk, "NUMBERS_AT_ONCE", 2**22)
    memory = standardised_by_records(from_arrays(x, y, validation_fraction=0.2, split_seed=1))
    assert found.train.on_disk
    for a, b in zip(parts(found), parts(memory), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    values = from_arrays(x, y, validation_fraction=0.2, split_seed=1).train.x.double().numpy()
    assert memory.standardisation.mean == tuple(
        values.mean(axis=0).tolist()
    )  # to the last digit, as numpy has it
    assert memory.standardisation.std == tuple(values.std(axis=0).tolist())


@pytest.mark.usefixtures("small_blocks")
def test_a_run_on_them_equals_that_in_memory(tmp_path: Path, seed: int) -> None:
    x, y = records(seed, (300, 12))
    config = {"epochs": 2, "seed": 3, "sampler": {"batch_size": 32}, "data": {"n_classes": 3}}
    (tmp_path / "data").mkdir()
    one, other = (
        opusim.train(config, data=(values, y), folder=tmp_path / name)
        for name, values in (("mapped", mapped(tmp_path / "data", x)), ("memory", x))
    )
    assert one.metrics == other.metrics
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert one.evaluate(mapped(tmp_path / "data", x), y) == other.evaluate(x, y)


@pytest.mark.usefixtures("small_blocks")
def test_a_bad_number_is_named_with_its_place(tmp_path: Path, seed: int) -> None:
    x, y = records(seed, (100, 8))
    x[37, 2] = np.nan
    with pytest.raises(ValueError, match=r"first at position 5: .* \(of the records from position 32 on\)"):
        from_arrays(mapped(tmp_path, x), y, validation_fraction=0.1, split_seed=0)


def test_tokens_and_empty_arrays_are_read_as_before(tmp_path: Path) -> None:
    tokens = np.arange(60).reshape(6, 10)
    found = from_arrays(mapped(tmp_path, tokens), None, validation_fraction=0.0, split_seed=0)
    assert found.holds_tokens
    assert not found.train.on_disk
    with pytest.raises(ValueError, match="x is empty"):
        from_arrays(
            mapped(tmp_path, tokens.astype(float))[:0], np.zeros(0), validation_fraction=0.0, split_seed=0
        )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_clear_line(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = records(seed, (100, 8))
    monkeypatch.setattr(tempfile, "TemporaryFile", partial(open, "/dev/full", "wb"))
    with pytest.raises(DataError, match="do not fit into the temporary folder .* TMPDIR"):
        from_arrays(mapped(tmp_path, x), y, validation_fraction=0.1, split_seed=0)


MEMORY = """
import sys, threading, time
from pathlib import Path
import numpy as np, torch
from opusim.training.data import from_arrays

def anonymous():
    (line,) = [l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("RssAnon")]
    return int(line.split()[1]) / 1024

x = np.load(sys.argv[1], mmap_mode="r" if sys.argv[2] == "mapped" else None)
y = np.arange(len(x)) % 2
from_arrays(np.array(x[:100]), y[:100], validation_fraction=0.1, split_seed=0)
peak, before, done = [0.0], anonymous(), False

def watch():
    while not done:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
data = from_arrays(x, y, validation_fraction=0.1, split_seed=0)
total = sum(float(data.train.batch(torch.arange(i, 180_000, 20))[0].sum()) for i in range(20))
done = True
thread.join()
print(peak[0] - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_their_memory_does_not_grow_with_them(tmp_path: Path) -> None:
    file = tmp_path / "large.npy"
    np.save(file, np.random.default_rng(0).normal(size=(200_000, 250)).astype(np.float32))  # 191 MiB
    grown = {
        kind: float(subprocess.check_output([sys.executable, "-c", MEMORY, str(file), kind], text=True))
        for kind in ("mapped", "memory")
    }
    assert grown["mapped"] < 100
    assert grown["memory"] > 150  # the same records in memory: the planted fault
