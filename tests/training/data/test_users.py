"""Users from the IDs of records: who is one user, and which records of a user a step takes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from opusim.training.data.tables import table_of
from opusim.training.data.users import Users


def users(ids: Any, most: int = 2, seed: int | None = 5) -> Users:
    found = Users.of(ids, count=len(ids), most=most, name="user_ids")
    return Users(found.records, found.most, seed)


@pytest.mark.parametrize(
    "ids",
    [
        ["a", "b", " a", "b\n", "a"],
        [7, 8, "7 ", "8", np.int32(7)],
        np.array([7, 8, 7, 8, 7]),
        torch.tensor([7, 8, 7, 8, 7]),
    ],
    ids=["blanks", "numbers and texts", "an array", "a tensor"],
)
def test_one_user_has_one_id_however_it_is_written(ids: Any) -> None:
    assert [own.tolist() for own in users(ids).records] == [[0, 2, 4], [1, 3]]


def test_a_record_without_an_id_is_a_user_of_its_own() -> None:
    found = users(["a", None, "", None, "  ", "a", pd.NA, pd.NaT])
    assert [own.tolist() for own in found.records] == [[0, 5], [1], [2], [3], [4], [6], [7]]


@pytest.mark.parametrize("value", [True, ("a", "b"), b"a", object(), 7.0, math.nan, np.float64("nan")])
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
    with pytest.raises(ValueError, match="user_ids: write one number in two ways"):
        users(["a", *ids])


def test_texts_that_write_different_numbers_are_users() -> None:
    assert (
        len(users(["07", "8", "0x7", "1e1", "10", "7a", 12345678901234567890, "12345678901234567891"])) == 8
    )


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
