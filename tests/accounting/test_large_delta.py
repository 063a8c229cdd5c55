"""A delta above 0.1 / records: who is warned, by which number, and who is not."""

from __future__ import annotations

import json

import pytest

from opusim.accounting.composition import guarantees
from opusim.accounting.explanation import LARGE_DELTA, WARNINGS, LedgerFacts, RunFacts, Statement, large_delta
from opusim.accounting.guarantee import Adjacency
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.labels import LabelReadout
from opusim.accounting.mechanisms.records import PoissonGaussian, RecordCentral
from opusim.accounting.mechanisms.zeroth_order import ZoGaussian

N = 1294
RECORDS = RecordCentral(
    noise_multiplier=1.1, sampling_probability=64 / N, clip_norm=1.0, divisor=64, relation=Adjacency.ZERO_OUT
)


def statement(mechanism: Mechanism, delta: float, records: int | None = None) -> Statement:
    return Statement(
        mode="release",
        guarantees=tuple(guarantees([mechanism], delta=delta)),
        mechanisms=(mechanism,),
        ledger=LedgerFacts(
            lines=2,
            digest="0" * 64,
            delta=delta,
            enforced=True,
            payments=1,
            steps_paid=1,
            releases_paid=(),
            checked_against=("checkpoint",),
        ),
        run=RunFacts(finished=True, step=1, versions={}, records=records),
        versions={},
    )


@pytest.mark.parametrize(
    ("delta", "warned"), [(0.1, True), (1 / N, True), (0.101 / N, True), (0.1 / N, False), (1e-5, False)]
)
def test_the_rule_begins_above_a_tenth_of_one_over_n(delta: float, warned: bool) -> None:
    line = large_delta(delta, [RECORDS])
    assert (line is not None) is warned
    if line is not None:
        assert line.startswith(
            f"delta = {delta:g} with 1,294 records (0.1 / records is 7.7e-05): {LARGE_DELTA}"
        )
        assert "\n" not in line
    assert ("large-delta" in statement(RECORDS, delta).warnings) is warned


def test_n_is_what_public_constants_tell() -> None:
    added = RecordCentral(noise_multiplier=1.1, sampling_probability=0.01, clip_norm=1.0, divisor=20)
    zo = ZoGaussian(noise_multiplier=1.1, sampling_probability=0.01, clip_norm=1.0, divisor=20, directions=3)
    for mechanism in (added, zo):
        assert mechanism.public_records == pytest.approx(2000)
        assert large_delta(0.1 / 2001, [mechanism]) is None
        assert large_delta(0.1 / 1999, [mechanism]) is not None
    smaller = RecordCentral(noise_multiplier=1.1, sampling_probability=0.1, clip_norm=1.0, divisor=20)
    assert large_delta(0.1 / 1000, [added, smaller]) is None  # the least n of several: 200
    assert large_delta(0.1 / 199, [added, smaller]) is not None


def test_without_a_public_number_there_is_no_warning_but_with_one() -> None:
    for mechanism in (PoissonGaussian(noise_multiplier=1.0, sampling_probability=0.1), LabelReadout(mu=1.0)):
        assert large_delta(0.1, [mechanism]) is None
        assert large_delta(0.01, [mechanism], records=10) is None
        assert large_delta(0.01, [mechanism], records=11) is not None
    labels = LabelReadout(mu=1.0)
    assert "large-delta" not in statement(labels, 0.01).warnings
    assert "large-delta" in statement(labels, 0.01, records=100).warnings


def test_the_statement_says_so_in_text_and_json_and_reads_it_back() -> None:
    stated = statement(RECORDS, 0.1)
    assert " ".join(WARNINGS["large-delta"].split()) in " ".join(stated.text().split())
    document = json.loads(json.dumps(stated.to_json()))
    assert {"code": "large-delta", "text": WARNINGS["large-delta"]} in document["warnings"]
    document["warnings"] = []
    assert "large-delta" in Statement.from_json(document).warnings
    del document["run"]["records"]  # of a document of the version before
    assert Statement.from_json(document).run is not None


@pytest.mark.parametrize(("noise", "warned"), [(0.3, True), (5.0, False)])
def test_an_epsilon_above_ten_is_warned_about(noise: float, warned: bool) -> None:
    weak = RecordCentral(noise_multiplier=noise, sampling_probability=1.0, clip_norm=1.0, divisor=N, steps=4)
    stated = statement(weak, 1e-6)
    assert (stated.guarantees[0].epsilon > 10) is warned
    assert ("large-epsilon" in stated.warnings) is warned
