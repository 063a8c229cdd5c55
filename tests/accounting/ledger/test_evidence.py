"""Certificates and alarms in a ledger: a certificate costs its beta once, and an alarm divides a run."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from opusim.accounting.composition import guarantees
from opusim.accounting.explanation import LedgerFacts, Statement
from opusim.accounting.guarantee import Guarantee, LedgerCorrupt, Release, Status
from opusim.accounting.ledger import Alarm, CertificateFacts, Ledger, read_ledger
from opusim.accounting.mechanism import CertifiedMechanism, mechanism_from_json
from opusim.accounting.mechanisms.convex import ConvexLastIterate
from opusim.accounting.mechanisms.labels import LabelAmplified, LabelBudget, LabelReadout, LabelRelease
from opusim.accounting.mechanisms.records import RecordCentral, RecordReplaced
from opusim.accounting.mechanisms.selection import PrivateSelection
from opusim.accounting.mechanisms.zeroth_order import ZoGaussian

BETA, DELTA = 1e-6, 1e-5
CERTIFICATE = CertificateFacts(
    digest="a" * 32, device="mine", date="2026-11-20", age_days=2, beta=BETA,
    law="Gaussian, standard deviation 0.09 at each of 64 outputs", remarks=("outputs are independent",),
    every_steps=10, finds=0.1,
)  # fmt: skip
CLIPPED = {"noise_multiplier": 1.3, "sampling_probability": 0.1, "clip_norm": 1.0, "divisor": 64.0}
RECORD = RecordCentral(**CLIPPED, device_noise=True, beta=BETA, certificate=CERTIFICATE.digest)
NAMED = {"device_noise": True, "beta": BETA, "certificate": CERTIFICATE.digest}
EVERY: tuple[CertifiedMechanism, ...] = (
    RECORD,
    RecordReplaced(**CLIPPED, **NAMED),
    LabelAmplified(noise_multiplier=2.0, sampling_probability=0.2, **NAMED),
    LabelBudget(budget_mu=0.7, **NAMED),
    LabelReadout(mu=0.7, device_law=True, beta=BETA, certificate=CERTIFICATE.digest),
    LabelRelease(mu=0.7, **NAMED),
    ZoGaussian(noise_multiplier=1.3, sampling_probability=0.1, clip_norm=0.1, divisor=64, **NAMED),
    ConvexLastIterate(
        objective="margin", clip=0.5, learning_rate=1.9, batches=6, epochs=3, noise_multiplier=8.0,
        regularisation=0.01, **NAMED,
    ),
    PrivateSelection(mean=3.0, mu=0.4, **NAMED),
)  # fmt: skip


def epsilon(mechanisms: Sequence[CertifiedMechanism], delta: float = DELTA) -> float:
    return guarantees(mechanisms, delta=delta)[0].epsilon


@pytest.mark.parametrize("mechanism", EVERY, ids=lambda one: one.kind)
def test_a_certificate_costs_its_beta_once_for_all_steps_and_kinds(mechanism: CertifiedMechanism) -> None:
    plain = replace(mechanism, beta=0.0, certificate="")
    steps = [replace(mechanism, steps=3), replace(mechanism, steps=2)]
    without = [replace(plain, steps=5)]
    found = epsilon(steps)
    assert found == pytest.approx(epsilon(without, DELTA - BETA), rel=1e-9)
    assert found > epsilon(without)  # a beta that is ignored would give this
    other = replace(mechanism, certificate="b" * 32, beta=2 * BETA)
    wanted = epsilon([replace(plain, steps=2)], DELTA - 3 * BETA)
    assert epsilon([mechanism, other]) == pytest.approx(wanted, rel=1e-9)
    useless = guarantees([replace(mechanism, beta=DELTA)], delta=DELTA)[0]
    assert (useless.status, useless.epsilon) == (Status.NONE, math.inf)
    assert "must exceed beta" in str(useless.reason)


@pytest.mark.parametrize("mechanism", EVERY, ids=lambda one: one.kind)
def test_a_mechanism_names_its_certificate_in_json(mechanism: CertifiedMechanism) -> None:
    content = mechanism.to_json()
    assert mechanism_from_json(content) == mechanism
    for key in ("beta", "certificate"):
        del content[key]
    assert mechanism_from_json(content) == replace(mechanism, beta=0.0, certificate="")
    with pytest.raises(ValueError, match="needs its beta, above 0"):
        replace(mechanism, beta=0.0)


def ledger_with(folder: Path, *alarms: Alarm, steps: int = 40, mode: str = "experiment") -> list[Guarantee]:
    with Ledger(folder / "ledger.jsonl", mode=mode, delta=DELTA, enforced=True, block=5) as ledger:
        ledger.note_certificate(CERTIFICATE)
        ledger.note_certificate(replace(CERTIFICATE, age_days=5))  # of a resumed run: known already
        for step in range(steps):
            ledger.pay(step, RECORD, until=steps)
        for alarm in alarms:
            ledger.note_alarm(alarm)
    content = read_ledger(folder)
    assert content.certificates == (CERTIFICATE,)
    return content.guarantees()


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_a_statement_says_what_the_certificate_is_and_how_old(tmp_path: Path, mode: str) -> None:
    (found,) = ledger_with(tmp_path, mode=mode)
    assert found.status is Status.PROVEN_UNDER_DEVICE_MODEL
    assert found.epsilon == epsilon([replace(RECORD, steps=40)])
    texts = [assumption.text for assumption in found.assumptions if assumption.holds is None]
    assert (
        "certificate aaaaaaaaaaaa of device 'mine', dated 2026-11-20, 2 days old when first used: Gaussian, standard "
        "deviation 0.09 at each of 64 outputs; it is wrong with probability 1e-06, which delta includes once"
    ) in texts
    assert "outputs are independent" in texts
    content = read_ledger(tmp_path)
    statement = Statement(
        mode=content.mode, guarantees=(found,), mechanisms=tuple(content.mechanisms),
        certificates=content.certificates, alarms=content.alarms, ledger=LedgerFacts.of(content, ()),
        run=None, versions={},
    )  # fmt: skip
    document = json.loads(json.dumps(statement.to_json()))
    assert document["certificates"][0]["digest"] == CERTIFICATE.digest
    assert Statement.from_json(document) == statement


def test_after_an_alarm_only_what_came_before_is_covered(tmp_path: Path) -> None:
    alarm = Alarm(step=30, since=20, found="blank frames scatter 0.9 times as much", covered=False)
    rest, early = ledger_with(tmp_path, alarm)
    assert early.status is Status.PROVEN_UNDER_DEVICE_MODEL
    assert early.epsilon == epsilon([replace(RECORD, steps=20)]) < epsilon([replace(RECORD, steps=40)])
    assert early.mechanism.startswith("released before step 20: ")
    assert (rest.status, rest.epsilon) == (Status.NONE, math.inf)
    assert "before step 30: blank frames scatter 0.9 times as much; from step 20 on" in str(rest.reason)


@pytest.mark.parametrize("alarm", [
    Alarm(step=30, since=30, found="it is warmer", covered=True),
    Alarm(step=30, since=30, found="no step was done since the last check", covered=False),
])  # fmt: skip
def test_an_alarm_at_sound_noise_leaves_the_guarantee(tmp_path: Path, alarm: Alarm) -> None:
    (found,) = ledger_with(tmp_path, alarm)
    assert found.epsilon == epsilon([replace(RECORD, steps=40)])
    assert (alarm.text in [assumption.text for assumption in found.assumptions]) == alarm.covered


@pytest.mark.parametrize(("since", "covered"), [(0, True), (7, True), (-1, False)])
def test_labels_read_before_a_check_in_order_stay_covered(tmp_path: Path, since: int, covered: bool) -> None:
    readout = LabelReadout(mu=0.7, device_law=True, beta=BETA, certificate=CERTIFICATE.digest)
    with Ledger(tmp_path / "ledger.jsonl", mode="release", delta=DELTA) as ledger:
        ledger.note_certificate(CERTIFICATE)
        ledger.pay_once("labels", readout)
        ledger.note_alarm(Alarm(step=9, since=since, found="weaker", covered=False))
        assert bool(ledger.content.doubts) != covered
        (found,) = ledger.guarantees()
    assert (found.status is Status.PROVEN_UNDER_DEVICE_MODEL) == covered


def test_a_last_iterate_has_no_covered_part(tmp_path: Path) -> None:
    (last,) = (one for one in EVERY if one.kind == "convex")
    with Ledger(tmp_path / "ledger.jsonl", mode="release", delta=DELTA) as ledger:
        ledger.note_certificate(CERTIFICATE)
        ledger.pay_once("last iterate", last)
        ledger.note_alarm(Alarm(step=9, since=5, found="weaker", covered=False))
        found = ledger.guarantees()
    assert [one.status for one in found] == [Status.NONE, Status.CLAIMED]
    assert found[0].release is Release.LAST_ITERATE


def test_a_ledger_whose_mechanism_hides_its_certificates_error_is_refused(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl", mode="experiment", delta=DELTA) as ledger:
        with pytest.raises(ValueError, match="no line before describes it"):
            ledger.pay(0, RECORD)
        ledger.note_certificate(CERTIFICATE)
        with pytest.raises(ValueError, match="less than that of the certificate, 1e-06"):
            ledger.pay(0, replace(RECORD, beta=BETA / 10))
        ledger.pay(0, RECORD)
    assert read_ledger(tmp_path).guarantees()


def test_a_planted_line_that_hides_an_error_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        monkeypatch.context() as planted,
        Ledger(tmp_path / "ledger.jsonl", mode="experiment", delta=DELTA) as ledger,
    ):
        planted.setattr("opusim.accounting.ledger.require_certified", lambda *_: None)
        ledger.pay(0, RECORD)
    with pytest.raises(LedgerCorrupt, match="line 2: certificate = 'a+': no line before describes it"):
        read_ledger(tmp_path)


def test_wrong_facts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"beta = 0.0: must lie in \(0, 1\)"):
        replace(CERTIFICATE, beta=0.0)
    with pytest.raises(ValueError, match="age_days = -1"):
        replace(CERTIFICATE, age_days=-1)
    with pytest.raises(ValueError, match="step = 3"):
        Alarm(step=3, since=5, found="", covered=False)
