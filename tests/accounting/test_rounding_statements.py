"""What statements say about rounding: checked for exact noise, on trust for devices and for ledgers of opusim 0.2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Adjacency
from opusim.accounting.mechanism import Mechanism, mechanism_from_json
from opusim.accounting.mechanisms.labels import LabelAmplified, LabelReadout, LabelRelease
from opusim.accounting.mechanisms.records import RecordCentral, RecordReplaced
from opusim.accounting.mechanisms.selection import PrivateSelection
from opusim.accounting.mechanisms.zeroth_order import ZoGaussian, ZoLaplace

_ZO: dict[str, Any] = {"sampling_probability": 0.1, "clip_norm": 0.05, "divisor": 10}
_SUM: dict[str, Any] = {"noise_multiplier": 2.0, "exactly_rounded": True}
EXACT: tuple[Mechanism, ...] = (
    ZoGaussian(noise_multiplier=2.0, **_ZO),
    ZoLaplace(scale=2.0, **_ZO),
    LabelRelease(mu=0.7),
    LabelReadout(mu=0.7),
    RecordCentral(**_ZO, **_SUM),
    RecordReplaced(**_ZO, **_SUM),
    LabelAmplified(sampling_probability=0.1, **_SUM),
    PrivateSelection(mean=3.0, mu=0.4, rests_on="convex-last-iterate"),
)
OF_DEVICES: tuple[Mechanism, ...] = (
    ZoGaussian(noise_multiplier=2.0, device_noise=True, **_ZO),
    LabelRelease(mu=0.7, device_noise=True),
    LabelReadout(mu=0.7, device_law=True),
    RecordCentral(device_noise=True, **_ZO, **_SUM),
    RecordReplaced(device_noise=True, **_ZO, **_SUM),
    LabelAmplified(sampling_probability=0.1, device_noise=True, **_SUM),
)
TRUSTED = "the rounding of floating-point numbers is not attacked"
ALIKE = "alike"


def rounding(*mechanisms: Mechanism, enforced: bool = True) -> list[tuple[bool | None, str]]:
    """The assumptions about rounding, each with whether code checked it."""
    (stated,) = guarantees(list(mechanisms), delta=1e-5, enforced=enforced)
    return [
        (each.holds, each.text)
        for each in stated.assumptions
        if each.text == TRUSTED or "exactly rounded number" in each.text
    ]


@pytest.mark.parametrize("mechanism", EXACT, ids=lambda one: type(one).__name__)
def test_exact_rounding_is_checked_and_older_ledgers_keep_it_on_trust(mechanism: Mechanism) -> None:
    ((holds, text),) = rounding(mechanism)
    assert holds is True
    assert text != TRUSTED
    assert rounding(mechanism, enforced=False) == [(None, text)]
    content = mechanism.to_json()
    del content["exactly_rounded"]
    old = mechanism_from_json(content)
    assert rounding(old) == [(None, TRUSTED)]
    assert rounding(mechanism, old) == rounding(old, mechanism) == [(None, TRUSTED)]


@pytest.mark.parametrize("mechanism", OF_DEVICES, ids=lambda one: type(one).__name__)
def test_noise_of_a_device_has_digits_of_its_own(mechanism: Mechanism) -> None:
    exact = next(one for one in EXACT if type(one) is type(mechanism))
    assert rounding(mechanism) == rounding(exact, mechanism) == [(None, TRUSTED)]


def test_a_search_rounds_its_scores_and_says_nothing_of_its_trials_models() -> None:
    """A trial's float32 noise stays on the trust of its own theorem, which the statement names."""
    ((_, text),) = rounding(EXACT[-1])
    assert text.startswith("every score is released")
    (stated,) = guarantees([EXACT[-1]], delta=1e-5, enforced=True)
    assert any(
        "of theorem convex-last-iterate" in each.text and each.holds is None for each in stated.assumptions
    )


def test_a_number_of_rows_that_a_record_changes_is_on_trust() -> None:
    """A matrix product may round other records' rows differently if a batch has one row more."""

    def trusted(mechanism: Mechanism) -> bool:
        (stated,) = guarantees([mechanism], delta=1e-5, enforced=True)
        return any(ALIKE in each.text and each.holds is None for each in stated.assumptions)

    search = EXACT[-1]
    assert isinstance(search, PrivateSelection)
    assert not trusted(search)  # the number is public
    assert trusted(replace(search, adjacency=Adjacency.ADD_OR_REMOVE_ONE))
    assert trusted(EXACT[0])
    assert trusted(EXACT[1])
    assert not trusted(EXACT[2])  # features, and so the rows, are public
    record = RecordCentral(noise_multiplier=1.0, **_ZO)
    assert not trusted(record)
    assert rounding(record) == [(None, TRUSTED)]  # unless the code that ran says that it rounds


@pytest.mark.parametrize(
    "mechanism", [one for one in EXACT if getattr(one, "clip", None) or hasattr(one, "bands")]
)
def test_the_rounding_of_sums_themselves_is_counted_or_on_trust(mechanism: Mechanism) -> None:
    def about_sums(*mechanisms: Mechanism, enforced: bool = True) -> list[tuple[str, bool | None]]:
        (stated,) = guarantees(list(mechanisms), delta=1e-5, enforced=enforced)
        words = {
            "for every batch": "counted",
            "is not counted": "uncounted",
            "contributions of other": "others",
        }
        found = [
            (name, each.holds)
            for each in stated.assumptions
            for word, name in words.items()
            if word in each.text
        ]
        return sorted(found)

    not_counted = [("others", None), ("uncounted", None)]
    assert about_sums(mechanism) == not_counted
    counting = replace(mechanism, counts_sums=True)
    assert about_sums(counting) == [("counted", True), ("others", None)]
    assert about_sums(counting, enforced=False) == [("counted", None), ("others", None)]
    assert about_sums(counting, mechanism) == not_counted
    content = counting.to_json()
    assert mechanism_from_json(content) == counting
    del content["counts_sums"]  # as in former ledgers
    assert mechanism_from_json(content) == mechanism
    assert about_sums(replace(counting, exactly_rounded=False)) == []  # the wider trust covers it


def test_correlated_noise_is_rounded_before_it_is_added() -> None:
    banded = RecordCentral(correlation=(0.8, 0.6), **_ZO, **_SUM)
    assert rounding(banded) == [(None, TRUSTED)]
