"""Records of other forms than (n, d) with classes: images, tokens, real numbers, sets of labels, own test records.

Records that are mapped from a file stay on disk, and give what the same records in memory give.
"""

import re
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
from opusim.errors import ConfigError
from opusim.training.data import Dataset, Split, from_arrays, load_dataset
from opusim.training.data import dataset as disk
from opusim.training.data.dataset import Standardisation, standardised_by_records
from opusim.training.engine.plan import fingerprint
from opusim.training.errors import DataError

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(20, 3, 4, 5)).astype("float32")
TOKENS = RNG.integers(0, 7, size=(20, 6))
CLASSES = np.arange(20) % 4
CONFIG = {"trainer": {"kind": "bp"}, "model": {"hidden": [8]}, "epochs": 1, "sampler": {"batch_size": 5}}


def _load(x: Any, y: Any, **changes: Any) -> Dataset:
    return from_arrays(x, y, **({"validation_fraction": 0.25, "split_seed": 1} | changes))


class TestShapes:
    def test_an_image_keeps_its_shape_and_its_row(self) -> None:
        data, flat = _load(IMAGES, CLASSES), _load(IMAGES.reshape(20, -1), CLASSES)
        assert (data.record_shape, flat.record_shape) == ((3, 4, 5), (60,))
        assert (data.target, data.vocabulary) == ("class", None)
        assert fingerprint(data.train) == fingerprint(flat.train)
        images = data.train.x.reshape(-1, *data.record_shape)
        assert any(torch.equal(images[0], torch.from_numpy(image)) for image in IMAGES)

    def test_a_sequence_of_vectors_keeps_its_shape(self) -> None:
        assert _load(IMAGES[:, 0], CLASSES).record_shape == (4, 5)

    def test_content_of_an_image_decides_as_that_of_its_row(self) -> None:
        one, other = (_load(x, CLASSES, split="content").train.x for x in (IMAGES, IMAGES.reshape(20, -1)))
        assert torch.equal(one, other)

    def test_known_images_have_a_shape(self) -> None:
        assert load_dataset("digits", split_seed=0).record_shape == (1, 8, 8)

    def test_a_shape_that_does_not_hold_a_record_is_refused(self) -> None:
        data = _load(IMAGES, CLASSES)
        with pytest.raises(ValueError, match="does not hold the 60 numbers"):
            Dataset(**{**vars(data), "record_shape": (3, 4, 4)})


class TestTokens:
    def test_the_next_token_is_the_default_target(self) -> None:
        data = _load(TOKENS, None, validation_fraction=0.0)
        assert (data.target, data.n_classes, data.vocabulary, data.record_shape) == ("tokens", 7, 7, (5,))
        assert (data.train.x.dtype, data.train.y.dtype) == (torch.int64, torch.int64)
        assert torch.equal(data.train.x[:, 1:], data.train.y[:, :-1])
        assert data.standardisation == Standardisation.identity()

    @pytest.mark.parametrize("y", [TOKENS[:, ::-1].copy(), TOKENS])
    def test_whole_numbers_of_the_same_shape_are_tokens(self, y: np.ndarray) -> None:
        data = _load(TOKENS, y, n_classes=9)
        assert (data.target, data.n_classes, data.vocabulary) == ("tokens", 9, 9)

    def test_padding_is_no_token(self) -> None:
        y = TOKENS.copy()
        y[:, 4:] = -100
        data = _load(TOKENS, y, test=(TOKENS, y))
        assert data.n_classes == 7
        assert int(data.train.y.min()) == -100
        with pytest.raises(ValueError, match=r"y must hold tokens from 0 to 6, got -99"):
            _load(TOKENS, np.where(y == -100, -99, y))
        with pytest.raises(ValueError, match="y holds no token but padding"):
            _load(TOKENS, np.full_like(y, -100))

    def test_whole_numbers_with_classes_stay_features(self) -> None:
        data = _load(TOKENS, CLASSES)
        assert (data.target, data.train.x.dtype, data.vocabulary) == ("class", torch.float32, None)

    def test_tokens_may_have_a_class(self) -> None:
        data = _load(TOKENS.astype("uint8"), CLASSES, inputs="tokens", vocabulary=100)
        assert (data.target, data.n_classes, data.vocabulary) == ("class", 4, 100)
        assert data.train.x.dtype == torch.int64


class TestNumbersAndLabels:
    def test_real_numbers_become_columns(self) -> None:
        data = _load(IMAGES, np.arange(20) / 3, target="real", validation_fraction=0.0)
        assert (data.target, data.n_classes, data.train.y.shape) == ("real", 1, (20, 1))
        assert sorted(data.train.y[:, 0].tolist()) == (np.arange(20) / 3).astype("float32").tolist()

    @pytest.mark.parametrize("dtype", ["bool", "float64", "int64"])
    def test_labels_are_zeros_and_ones(self, dtype: str) -> None:
        data = _load(IMAGES, (np.eye(4)[CLASSES] + np.eye(4)[0] > 0).astype(dtype), target="labels")
        assert (data.target, data.n_classes, data.train.y.dtype) == ("labels", 4, torch.float32)


@pytest.mark.parametrize(("x", "y", "changes", "message"), [
    (IMAGES, np.arange(20) / 3, {}, "set data.target = 'real'"),
    (IMAGES, np.eye(4)[CLASSES], {}, "set data.target = 'real' or 'labels'"),
    (IMAGES, None, {}, "x must hold tokens, which are whole numbers, got torch.float32"),
    (TOKENS, None, {"target": "real"}, "y is missing, which data.target = 'real' needs"),
    (TOKENS, TOKENS[:, :3], {"target": "tokens"}, "y has 3 tokens per record and x 6"),
    (TOKENS[:, :1], None, {}, "x has one token per record"),
    (TOKENS, None, {"n_classes": 5}, "x must hold tokens from 0 to 4, got 0 to 6"),
    (TOKENS - 1, None, {}, "got -1 to 5: number them from 0"),
    (TOKENS, None, {"n_classes": 8, "vocabulary": 9}, "are the same number if tokens are predicted"),
    (TOKENS, None, {"standardise": Standardisation(mean=0, std=1, source="")}, "x holds tokens"),
    (TOKENS, TOKENS, {"inputs": "features"}, "has no next token"),
    (IMAGES, CLASSES, {"vocabulary": 9}, "data.vocabulary = 9 is for tokens"),
    (IMAGES, np.full(20, np.nan), {"target": "real"}, "y must be finite"),
    (IMAGES, np.full((20, 2), 0.5), {"target": "labels"}, "y must hold zeros and ones"),
    (IMAGES, np.zeros((20, 2)), {"target": "real", "n_classes": 3}, "differs from the 2 numbers"),
    (IMAGES, np.zeros((20, 2, 2)), {"target": "real"}, "of shape (n,) or (n, k)"),
    (IMAGES, np.zeros((20, 2)), {"target": "real", "test": (IMAGES, CLASSES / 1)}, "test[1] has 1 numbers per rec"),
    (TOKENS, None, {"n_classes": 7, "test": (TOKENS + 1, None)}, "test[0] must hold tokens from 0 to 6"),
    (TOKENS, None, {"test": (TOKENS[:, :3], None)}, "test[0] has 2 tokens per record"),
])  # fmt: skip
def test_what_does_not_fit_is_named(x: Any, y: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        _load(x, y, **changes)


@pytest.mark.parametrize(("changes", "message"), [
    ({"y": torch.zeros(4, 3)}, "target = 'class' takes y"),
    ({"x": torch.zeros(4, 2, dtype=torch.int64)}, "vocabulary = None with x of torch.int64"),
])  # fmt: skip
def test_a_dataset_of_contradictory_parts_is_refused(changes: dict[str, Any], message: str) -> None:
    part = Split(**{"x": torch.zeros(4, 2), "y": torch.zeros(4, dtype=torch.int64)} | changes)
    identity = Standardisation.identity()
    with pytest.raises(ValueError, match=message):
        Dataset(name="x", n_classes=3, train=part, validation=part, test=None, standardisation=identity)


class TestRuns:
    def test_images_train_predict_and_evaluate_like_their_rows(self, tmp_path: Path) -> None:
        rows = IMAGES.reshape(20, -1)
        runs = [
            opusim.train(CONFIG, data=(x, CLASSES), test=(x, CLASSES), folder=tmp_path / str(x.ndim))
            for x in (IMAGES, rows)
        ]
        for x in (IMAGES, rows):
            assert np.array_equal(runs[0].predict(x), runs[1].predict(rows))
            assert runs[0].evaluate(x, CLASSES) == runs[1].evaluate(rows, CLASSES)
        facts = runs[0].facts["data"]
        assert (facts["record_shape"], facts["target"], facts["n_test"]) == ([3, 4, 5], "class", 20)
        assert runs[0].summary is not None
        assert runs[0].summary["test_accuracy"] == runs[0].evaluate(rows, CLASSES)["accuracy"]

    def test_test_records_go_with_arrays_only(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"goes with data=\(x, y\)"):
            opusim.train(CONFIG, test=(IMAGES, CLASSES), folder=tmp_path / "run")

    @pytest.mark.parametrize(("kind", "changes", "data", "message"), [
        ("ulr", {"target": "real"}, (IMAGES, CLASSES), "data.target: 'real' is not what trainer.kind ="),
        ("convex", {}, (TOKENS, None), "data.target: 'tokens' is not what trainer.kind = 'convex'"),
        ("zo", {"inputs": "tokens"}, (TOKENS, CLASSES), "data.inputs: 'tokens' is not what"),
    ])  # fmt: skip
    def test_a_trainer_of_classes_refuses_other_targets(
        self, kind: str, changes: dict[str, Any], data: Any, message: str, tmp_path: Path
    ) -> None:
        config = {"trainer": {"kind": kind}, "data": changes}
        with pytest.raises(ConfigError, match=re.escape(message)):
            opusim.train(config, data=data, folder=tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_a_known_data_set_has_its_own_target(self) -> None:
        with pytest.raises(ConfigError, match="data.target: 'real' is for user-supplied data"):
            opusim.train({"data": {"target": "real"}})

    def test_a_dataset_is_what_it_is(self, tmp_path: Path) -> None:
        data = _load(IMAGES, CLASSES)
        for key, value in (("target", "labels"), ("n_classes", 5), ("vocabulary", 9)):
            with pytest.raises(ConfigError, match=f"data.{key}: .* is not that of the given Dataset"):
                opusim.train(CONFIG | {"data": {key: value}}, data=data, folder=tmp_path / "run")


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
def test_they_give_what_records_in_memory_give(tmp_path: Path, kind: str, split: Any, seed: int) -> None:
    x, y = records(seed)
    x = np.abs(x).astype(kind)
    constants = Standardisation(mean=tuple(np.linspace(0, 1, 12).tolist()), std=2.0, source="the test")
    settings: dict[str, Any] = {
        "n_classes": 3, "validation_fraction": 0.2, "split_seed": 1, "split": split, "standardise": constants,
    }  # fmt: skip
    memory = from_arrays(x, y, test=(x[:50], y[:50]), **settings)
    for form in (lambda values: values, lambda values: np.asarray(values), lambda values: values[:]):
        test = form(mapped(tmp_path, x[:50])), y[:50]
        found = from_arrays(form(mapped(tmp_path, x)), y, test=test, **settings)
        assert all(torch.equal(a, b) for a, b in zip(parts(found), parts(memory), strict=True))
        assert found.record_shape == memory.record_shape == (3, 4)
        assert [found.train.on_disk, found.validation.on_disk] == [True, True]
    assert not memory.train.on_disk


@pytest.mark.usefixtures("small_blocks")
def test_they_are_standardised_alike(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = records(seed)
    options: dict[str, Any] = {"validation_fraction": 0.2, "split_seed": 1}
    found = standardised_by_records(from_arrays(mapped(tmp_path, x), y, **options))
    monkeypatch.setattr(disk, "NUMBERS_AT_ONCE", 2**22)
    memory = standardised_by_records(from_arrays(x, y, **options))
    assert found.train.on_disk
    for a, b in zip(parts(found), parts(memory), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    values, constants = from_arrays(x, y, **options).train.x.double().numpy(), memory.standardisation
    assert constants.mean == tuple(values.mean(axis=0).tolist())  # to the last digit, as numpy has it
    assert constants.std == tuple(values.std(axis=0).tolist())


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
    empty = mapped(tmp_path, tokens.astype(float))[:0]
    with pytest.raises(ValueError, match="x is empty"):
        from_arrays(empty, np.zeros(0), validation_fraction=0.0, split_seed=0)


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
