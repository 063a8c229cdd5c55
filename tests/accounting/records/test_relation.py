"""Adding or removing a record, and a record against an empty place: what is stated, and why the numbers agree."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from opusim.accounting import Gaussian, PoissonGaussian, PoissonLaplace, RecordCentral, RecordReplaced
from opusim.accounting.composition import guarantees
from opusim.accounting.explanation import explain, guarantee_rows
from opusim.accounting.guarantee import Adjacency, Guarantee, Unit
from opusim.accounting.journal import Journal
from opusim.accounting.ledger import read_ledger
from opusim.accounting.mechanism import Mechanism, mechanism_from_json
from opusim.accounting.mechanisms.zeroth_order import ZoGaussian, ZoLaplace
from opusim.accounting.theorems import NUMBER_IS_PUBLIC, NUMBER_IS_UNUSED

ADDED, NULL, REPLACED = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE
DELTA = 1e-5
CONSTANTS = {"sampling_probability": 0.05, "clip_norm": 0.7, "divisor": 500, "steps": 40}


def record(relation: str) -> RecordCentral:
    return RecordCentral(noise_multiplier=1.1, relation=Adjacency(relation), **CONSTANTS)


def gaussian(relation: str) -> ZoGaussian:
    return ZoGaussian(noise_multiplier=1.1, directions=3, relation=Adjacency(relation), **CONSTANTS)


def laplace(relation: str) -> ZoLaplace:
    return ZoLaplace(scale=2.0, relation=Adjacency(relation), **CONSTANTS)


MAKERS = (record, gaussian, laplace)
Maker = Callable[[str], Mechanism]


def only(mechanism: Mechanism, *, enforced: bool = False) -> Guarantee:
    (guarantee,) = guarantees([mechanism], delta=DELTA, enforced=enforced)
    return guarantee


def holds(guarantee: Guarantee, text: str) -> list[bool | None]:
    return [assumption.holds for assumption in guarantee.assumptions if assumption.text == text]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_both_relations_have_one_number_and_each_names_what_it_rests_on(make: Maker) -> None:
    added, null = only(make(ADDED), enforced=True), only(make(NULL), enforced=True)
    assert (added.epsilon, added.epsilon_lower) == (null.epsilon, null.epsilon_lower)
    assert (added.adjacency, null.adjacency) == (ADDED, NULL)
    assert (holds(added, NUMBER_IS_UNUSED), holds(added, NUMBER_IS_PUBLIC)) == ([True], [])
    assert (holds(null, NUMBER_IS_UNUSED), holds(null, NUMBER_IS_PUBLIC)) == ([], [None])
    assert holds(only(make(ADDED)), NUMBER_IS_UNUSED) == [None]  # parameters alone: nobody checked
    assert Guarantee.from_json(json.loads(json.dumps(null.to_json()))) == null


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_the_printed_statement_names_the_public_number(make: Maker) -> None:
    text = explain(only(make(NULL), enforced=True))
    assert "or its place was empty" in text
    trusted = text.partition("Taken on trust, not checked:")[2].partition("Checked by the code")[0]
    assert NUMBER_IS_PUBLIC in trusted
    assert "or its place was empty" not in explain(only(make(ADDED)))
    (row,) = guarantee_rows([only(make(NULL))])
    assert row["protects"] == "record, zero_out"
    assert row["notes"] == "at a public number of records"
    (row,) = guarantee_rows([replace(only(make(NULL)), unit=Unit.USER)], count=3000.0)
    assert row["protects"] == "user, zero_out (3,000 users)"


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_steps_of_both_relations_together_are_zero_out(make: Maker) -> None:
    mixed = guarantees([make(ADDED), make(NULL)], delta=DELTA)[0]
    both = only(make(NULL).repeated(80))
    assert (mixed.adjacency, mixed.epsilon) == (NULL, pytest.approx(both.epsilon, rel=1e-3))


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_replacing_a_record_is_no_relation_of_these(make: Maker) -> None:
    with pytest.raises(ValueError, match="relation = 'replace_one': must be 'add_or_remove_one'"):
        make(REPLACED)


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_ledger_line_without_a_relation_is_read_as_zero_out(tmp_path: Path, make: Maker) -> None:
    """Runs of earlier versions took q, the steps and the noise from the number of records."""
    content = make(ADDED).repeated(1).to_json()
    assert content.pop("relation") == ADDED
    assert mechanism_from_json(content) == make(NULL).repeated(1)
    path = tmp_path / "ledger.jsonl"
    journal = Journal(path)
    journal.append({"mode": "release", "delta": DELTA, "enforced": True})
    journal.append({"first_step": 0, "steps": 40, "mechanisms": [content]})
    journal.close()
    (guarantee,) = read_ledger(path).guarantees()
    assert (guarantee.adjacency, guarantee.epsilon) == (NULL, only(make(NULL)).epsilon)
    assert holds(guarantee, NUMBER_IS_PUBLIC) == [None]


def test_replaced_records_have_no_relation_to_choose() -> None:
    replaced = RecordReplaced(noise_multiplier=1.1, **CONSTANTS)
    assert "relation" not in replaced.to_json()
    assert only(replaced).adjacency is REPLACED
    assert only(replaced).epsilon > only(record(NULL)).epsilon


@pytest.mark.parametrize("mechanism", [
    lambda r: PoissonGaussian(noise_multiplier=1.1, sampling_probability=0.05, steps=40, adjacency=r),
    lambda relation: Gaussian(noise_multiplier=4.0, steps=3, adjacency=relation),
    lambda relation: PoissonLaplace(scale=2.0, sampling_probability=0.05, steps=9, adjacency=relation),
])  # fmt: skip
def test_standard_mechanisms_take_zero_out_too(mechanism: Callable[[Adjacency], Mechanism]) -> None:
    added, null = only(mechanism(ADDED)), only(mechanism(NULL))
    assert (added.epsilon, null.adjacency) == (null.epsilon, NULL)
    assert holds(null, NUMBER_IS_PUBLIC) == [None]


# What docs/privacy-records.md, section 2, says of relations, on a mechanism small enough to be written down whole.

REACH = 6
KS = np.exp(np.linspace(-4, 4, 41)).tolist()
NOISE = binom.pmf(np.arange(13), 12, 0.5)


def output_law(values: tuple[int, ...], q: float) -> np.ndarray:
    """The law of sum(Poisson batch) + binomial noise, every batch enumerated; place 0 stands for -REACH."""
    law = np.zeros(2 * REACH + len(NOISE))
    for coins in itertools.product((0, 1), repeat=len(values)):
        chance = math.prod(q if coin else 1 - q for coin in coins)
        place = REACH + sum(coin * value for coin, value in zip(coins, values, strict=True))
        law[place : place + len(NOISE)] += chance * NOISE
    return law


def hockey_stick(p: np.ndarray, q: np.ndarray, k: float) -> float:
    return float(np.maximum(p - k * q, 0).sum())


def excess(first: np.ndarray, second: np.ndarray, q: float) -> float:
    """The largest excess over (1 - q) P_0 + q P_1 against P_0, P_s the noise moved by s, in both orders."""
    without = np.append(NOISE, 0.0)
    mixed = (1 - q) * without + q * np.append(0.0, NOISE)
    return max(
        max(
            hockey_stick(first, second, k) - hockey_stick(mixed, without, k),
            hockey_stick(second, first, k) - hockey_stick(without, mixed, k),
        )
        for k in KS
    )


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_null_record_is_the_pair_of_the_sampled_mechanism(n: int) -> None:
    """With q = 1.2 / n of the public n no pair of data sets exceeds the pair of the accountant, and one reaches it."""
    q = 1.2 / n
    worst = max(
        excess(output_law(values, q), output_law((*values[:-1], 0), q), q)
        for values in itertools.product((-1, 0, 1), repeat=n)
    )
    assert abs(worst) < 1e-12


@pytest.mark.parametrize("n", [3, 5])
def test_a_record_more_or_less_is_not_where_q_comes_from_the_number(n: int) -> None:
    """Planted fault: q = b / n as before this was mended. A constant q stays within the pair."""
    q, others = 1.2 / n, (1,) * (n - 1)
    whole = output_law((*others, -1), q)
    assert excess(whole, output_law(others, q), q) < 1e-12
    assert excess(whole, output_law(others, 1.2 / (n - 1)), q) > 0.01
