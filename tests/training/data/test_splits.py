"""Splits by content and by ID, where each record's part depends on that record only; and users from IDs of records."""

import math
import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from opusim.training.data import Dataset, from_arrays, load_dataset
from opusim.training.data.arrays import split_by_content, split_by_id
from opusim.training.data.tables import table_of
from opusim.training.data.users import Users

WIDTH = 4
FLOATS = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 30), st.just(WIDTH)), elements=st.floats(width=32, allow_nan=False)
)


def loaded(x: np.ndarray, split: str, ids: Any = None, *, fraction: float = 0.1, seed: int = 0) -> Dataset:
    y = np.zeros(len(x), dtype=np.int64)
    options: dict[str, Any] = {"n_classes": 2, "validation_fraction": fraction, "split_seed": seed}
    return from_arrays(x, y, **options, split=split, ids=ids)


def rows(split: Any) -> list[tuple[float, ...]]:
    return [tuple(row) for row in split.x.tolist()]


def sides(x: np.ndarray, fraction: float = 0.4, seed: int = 0) -> list[bool]:
    """Whether each record is held out."""
    _, held_out = split_by_content(torch.from_numpy(x), fraction, seed)
    found = [False] * len(x)
    for position in held_out.tolist():
        found[position] = True
    return found


@pytest.mark.parametrize("split", ["content", "id"])
def test_an_appended_record_moves_no_other(split: str) -> None:
    """Every n from 1000 to 1100. Split by index, one appended record expels another at eight of these sizes."""
    x = np.random.default_rng(0).random((1101, 5)).astype(np.float32)
    ids = [f"person {number}" for number in range(len(x))]
    before: Dataset | None = None
    entered = 0
    for n in range(1000, 1102):
        now = loaded(x[:n], split, ids[:n] if split == "id" else None)
        if before is not None:
            parts = ("train", "validation")
            old, new = ([rows(getattr(data, part)) for part in parts] for data in (before, now))
            added = tuple(x[n - 1].tolist())
            assert new in ([[*old[0], added], old[1]], [old[0], [*old[1], added]])
            entered += len(new[0]) - len(old[0])
        before = now
    assert 70 < entered < 101  # 101 appended, each kept with probability 0.9: 91 +- 3


def test_split_by_index_replaces_a_record() -> None:
    """Why add_or_remove_one refuses it."""
    x = np.random.default_rng(0).random((1101, 5)).astype(np.float32)
    replaced = 0
    for n in range(1000, 1100):
        old, new = (set(rows(loaded(x[:m], "index").train)) for m in (n, n + 1))
        replaced += (len(old - new), len(new - old)) == (1, 1)
    assert replaced > 0


@settings(max_examples=60, deadline=None)
@given(FLOATS, st.data())
def test_a_side_depends_on_the_record_alone(x: np.ndarray, data: st.DataObject) -> None:
    """A record falls into the same part in any subset and order, with copies or without."""
    all_sides = sides(x)
    order = data.draw(st.permutations(range(len(x))))
    chosen = order[: data.draw(st.integers(1, len(x)))]
    assert sides(x[chosen]) == [all_sides[position] for position in chosen]
    assert sides(np.concatenate([x, x])) == all_sides + all_sides


@settings(max_examples=60, deadline=None)
@given(FLOATS)
def test_equal_numbers_are_equal_records(x: np.ndarray) -> None:
    """-0.0 is 0.0, and the memory's layout and byte order do not matter."""
    negative = np.where(x == 0, np.float32(-0.0), x)
    assert sides(negative) == sides(np.abs(x) * np.sign(x) + np.float32(0)) == sides(x)
    features = torch.from_numpy(x)
    for same in (features.T.contiguous().T, features.clone()):
        kept = split_by_content(same, 0.4, 0)[0]
        assert torch.equal(kept, split_by_content(features, 0.4, 0)[0])


def test_every_nan_is_one() -> None:
    """Records with NaN are refused before; the rule has an answer all the same."""
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FC12345], dtype=np.uint32)
    x = np.zeros((len(bits), WIDTH), dtype=np.float32)
    x[:, 1] = bits.view(np.float32)
    for seed in range(20):
        assert len(set(sides(x, seed=seed))) == 1


def test_labels_have_no_say() -> None:
    x = np.random.default_rng(1).normal(size=(200, 3))
    y = np.random.default_rng(2).integers(0, 2, size=200)
    options: dict[str, Any] = {
        "n_classes": 2, "validation_fraction": 0.3, "split_seed": 1, "split": "content",
    }  # fmt: skip
    one, other = from_arrays(x, y, **options), from_arrays(x, 1 - y, **options)
    assert torch.equal(one.train.x, other.train.x)
    assert torch.equal(one.train.y, 1 - other.train.y)


def test_the_rule_is_the_same_in_every_version() -> None:
    """Frozen: a run that is resumed, or audited, by a later version must find its own split again."""
    x = np.arange(40, dtype=np.float32).reshape(10, WIDTH) / 8
    assert split_by_content(torch.from_numpy(x), 0.5, 7)[1].tolist() == [1, 3, 5, 8]
    assert split_by_id([f"p{number}" for number in range(10)], 0.5, 7)[1].tolist() == [0, 3, 5, 8]
    assert split_by_id(np.arange(10), 0.5, 7)[1].tolist() == [1, 4]


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("rule", ["content", "id"])
def test_the_share_held_out_is_the_fraction(rule: str, fraction: float) -> None:
    """Binomial(n, fraction), within 5 standard errors; another seed is another split."""
    n = 20_000
    x = torch.from_numpy(np.random.default_rng(5).random((n, 2)).astype(np.float32))

    split, keys = {"content": (split_by_content, x), "id": (split_by_id, range(n))}[rule]

    def held_out(seed: int) -> set[int]:
        parts = split(keys, fraction, seed)
        assert sorted(torch.cat(parts).tolist()) == list(range(n))
        return set(parts[1].tolist())

    first, second = held_out(0), held_out(1)
    for size, p in ((len(first), fraction), (len(first & second), fraction**2)):
        assert abs(size - n * p) <= 5 * np.sqrt(n * p * (1 - p))


def test_ids_of_any_spelling() -> None:
    texts = ["7", "8", "Zoë", ""] * 5
    numbers = [7, 8, 2**70, -1] * 5
    for values in (texts, numbers):
        kept, held_out = split_by_id(values, 0.5, 3)
        by_id = {values[p]: {q % 4 for q in range(20) if values[q] == values[p]} for p in kept.tolist()}
        assert not set(by_id) & {values[p] for p in held_out.tolist()}  # records of one ID on one side
    same = [split_by_id(i, 0.5, 3)[0].tolist() for i in (np.arange(50), torch.arange(50), list(range(50)))]
    assert same[0] == same[1] == same[2]
    held_out = [
        split_by_id([form(n) for n in range(50)], 0.5, 3)[1].tolist() for form in (int, str, " {} ".format)
    ]
    assert held_out[0] == held_out[1] == held_out[2]  # one ID, however it is written
    assert split_by_id([" ", ""] * 20, 0.9, 3)[1].tolist() == []  # a blank text is none
    assert split_by_id(np.array(texts), 0.5, 3)[0].tolist() == split_by_id(texts, 0.5, 3)[0].tolist()


def test_a_part_may_be_empty_but_not_the_training_records() -> None:
    x = np.random.default_rng(0).random((3, 2))
    kept = loaded(x, "content", fraction=1e-9)
    assert (len(kept.train), len(kept.validation)) == (3, 0)
    message = "validation_fraction = 1 leaves no record for training under split = 'content'; lower it"
    with pytest.raises(ValueError, match=message):
        loaded(x, "content", fraction=1 - 1e-12)


@pytest.mark.parametrize(("split", "ids", "error", "message"), [
    ("index", [1, 2, 3], ValueError, "split = 'index' with ids: split = 'id' needs ids, and only it"),
    ("content", [1, 2, 3], ValueError, "split = 'content' with ids"),
    ("id", None, ValueError, "split = 'id' without ids"),
    ("id", [1, 2], ValueError, "x has 3 records and ids 2 entries; give one ID per record"),
    ("id", [1.0, 2, 3], TypeError, "ids: an ID has the type float; IDs must be int, str"),
    ("id", [1, True, 3], TypeError, "ids: an ID has the type bool"),
    ("label", None, ValueError, "split = 'label'"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(split: str, ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        loaded(np.zeros((3, 2)), split, ids)


def test_a_known_data_set_splits_by_content_as_well() -> None:
    digits = load_dataset("digits", split_seed=0, split="content")
    index = load_dataset("digits", split_seed=0)
    assert (digits.split, index.split) == ("content", "index")
    assert len(digits.train) + len(digits.validation) == len(index.train) + len(index.validation)
    assert torch.equal(digits.test.x, index.test.x)  # a fixed fifth of a public data set


def users(ids: Any, most: int = 2, seed: int | None = 5) -> Users:
    found = Users.of(ids, count=len(ids), most=most, name="user_ids")
    return Users(found.records, found.most, seed)


@pytest.mark.parametrize("ids", [
    ["a", "b", " a", "b\n", "a"],
    [7, 8, "7 ", "8", np.int32(7)],
    np.array([7, 8, 7, 8, 7]),
    torch.tensor([7, 8, 7, 8, 7]),
], ids=["blanks", "numbers and texts", "an array", "a tensor"])  # fmt: skip
def test_one_user_has_one_id_however_it_is_written(ids: Any) -> None:
    assert [own.tolist() for own in users(ids).records] == [[0, 2, 4], [1, 3]]


def test_a_record_without_an_id_is_a_user_of_its_own() -> None:
    found = users(["a", None, "", None, "  ", "a", pd.NA, pd.NaT, math.nan, np.float64("nan")])
    assert [own.tolist() for own in found.records] == [[0, 5], [1], [2], [3], [4], [6], [7], [8], [9]]


@pytest.mark.parametrize("value", [True, ("a", "b"), b"a", object(), 7.0])
def test_an_id_that_is_neither_a_whole_number_nor_a_text_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="IDs must be int, str, or None"):
        users(["a", value])


def test_whole_numbers_next_to_an_empty_cell_of_a_table_are_ids() -> None:
    frame = pd.DataFrame({"x": [0.1, 0.2, 0.3], "label": [0, 1, 0], "who": [7, None, 7]})
    assert frame["who"].dtype == float
    assert table_of(frame, ("label",), "the table", user="who").ids == ["7", None, "7"]
    frame["who"] = [7.5, None, 7.0]
    with pytest.raises(TypeError, match="data.user = 'who': an ID has the type float"):
        table_of(frame, ("label",), "the table", user="who")


@pytest.mark.parametrize("ids", [["07", 7], ["7.50", "7.5"], ["+7", "7"], ["-0", "0"]])
def test_one_number_written_in_two_ways_is_refused(ids: list[Any]) -> None:
    with pytest.raises(ValueError, match="user_ids: two IDs are one number written in two ways"):
        users(["a", *ids])


def test_texts_that_write_different_numbers_are_users() -> None:
    ids = ["07", "8", "8", "0x7", "1e1", "10", "7a", 12345678901234567890, "12345678901234567891"]
    assert len(users(ids)) == 8


def test_one_id_for_each_record_is_needed() -> None:
    with pytest.raises(ValueError, match="has 2 IDs for 3 records"):
        Users.of(["a", "b"], count=3, most=1, name="user_ids")


def test_at_most_k_records_are_taken_each_as_often_as_another() -> None:
    """The number of steps of 4,000 that take a record is Binomial(4000, 2 / 5); two-sided, five standard errors."""
    found, steps = users(["a"] * 5 + ["b"]), 4000
    taken = np.zeros(6)
    for step in range(steps):
        chosen = found.chosen(0, step)
        assert len(set(chosen)) == 2
        taken[chosen] += 1
    error = math.sqrt(steps * 0.4 * 0.6)
    assert np.all(np.abs(taken[:5] - steps * 0.4) < 5 * error), taken
    always_the_first = np.array([steps, steps, 0, 0, 0])  # the planted fault
    assert not np.all(np.abs(always_the_first - steps * 0.4) < 5 * error)
    assert found.chosen(1, 3) == [5]


def test_no_other_user_moves_which_records_are_taken() -> None:
    """The draw is keyed by the user's own place, which the relation zero_out keeps."""
    few, many = users(["a"] * 9 + ["b"]), users(["a"] * 9 + ["b"] * 30)
    assert [few.chosen(0, step) for step in range(20)] == [many.chosen(0, step) for step in range(20)]
    assert len({tuple(few.chosen(0, step)) for step in range(20)}) > 10
    assert len({tuple(users(["a"] * 30, seed=None).chosen(0, 0)) for _ in range(20)}) > 10
