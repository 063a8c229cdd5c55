"""Every run pays for what it releases, before it is computed, and what it paid can be replayed."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opusim import training
from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import BudgetExceeded, LedgerCorrupt, NoGuarantee
from opusim.accounting.ledger import Ledger, read_ledger
from opusim.accounting.mechanism import mechanism_from_json
from opusim.training.engine.callbacks import Callback
from opusim.training.engine.loop import Engine
from opusim.training.engine.steps import STEPS_PAID_AT_ONCE
from opusim.training.feedback.trainer import FeedbackTrainer
from opusim.training.reports.run_report import write_report
from tests.support.command import opusim

ROOT = Path(__file__).parents[3]
EPOCHS, STEPS = 2, 8
BASE: dict[str, Any] = {
    "epochs": EPOCHS, "threads": 1, "model": {"hidden": [8]}, "data": {"n_classes": 3, "validation_fraction": 0.0},
    "sampler": {"batch_size": 16}, "device": {"name": "gaussian", "noise": {"sigma": 0.3}},
    "checkpoint": {"every_steps": 2},
}  # fmt: skip
DIGITAL = {key: value for key, value in BASE.items() if key != "device"}
POISSON = {"sampler": {"scheme": "poisson", "batch_size": 16}}
RECORD = {**BASE, **POISSON, "protection": {"kind": "record", "noise_multiplier": 1.3}}


def protected(kind: str, **options: Any) -> dict[str, Any]:
    return {**BASE, "protection": {"kind": kind, "epsilon": 2.0, **options}}


DATA = np.random.default_rng(1).normal(size=(64, 5)), np.arange(64) % 3


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["entry"] for line in (folder / "ledger.jsonl").read_text().splitlines()]


def paid_steps(folder: Path) -> int:
    return sum(entry.get("steps", 0) for entry in entries(folder))


KINDS = {
    "bp": ({**DIGITAL, "trainer": {"kind": "bp"}}, ["none"], STEPS),
    "dfa": ({**DIGITAL, "trainer": {"kind": "dfa"}}, ["none"], STEPS),
    "tdfa": ({**DIGITAL, "trainer": {"kind": "tdfa"}}, ["none"], STEPS),
    "pdfa": (BASE, ["none"], STEPS),
    "published": (
        {**BASE, "trainer": {"order": "published", "tau_b": 1.0, "tau_h_max": 1.0}}, ["none", "claimed"], STEPS,
    ),
    "record": (RECORD, ["proven"], STEPS),
    "record, device": (
        {**RECORD, "protection": {**RECORD["protection"], "noise": "device"}}, ["proven under a device model"], STEPS,
    ),
    "amplified": ({**protected("label-amplified"), **POISSON}, ["proven"], STEPS),
    "amplified, device": (
        {**protected("label-amplified", noise="device"), **POISSON}, ["proven under a device model"], STEPS,
    ),
    "once, device": (protected("label-readout", noise="device"), ["proven under a device model"], None),
    "response": (protected("label-randomized-response"), ["proven"], None),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["experiment", "release"])
@pytest.mark.parametrize("name", list(KINDS))
def test_every_run_has_a_ledger_that_replays_to_its_guarantees(tmp_path: Path, name: str, mode: str) -> None:
    """Without the ledger's own reader: each step, or the one look at the labels, is paid for once."""
    config, statuses, steps = KINDS[name]
    run = training.train({**config, "mode": mode}, data=DATA, folder=tmp_path)
    opening, *payments = entries(tmp_path)
    assert opening == {"mode": mode, "delta": 1e-5, "enforced": True}
    paid = [{**content, "steps": each.get("steps", 1)} for each in payments for content in each["mechanisms"]]
    if steps is None:
        assert [set(payment) for payment in payments] == [{"name", "mechanisms"}]
    else:
        covered = [s for p in payments for s in range(p["first_step"], p["first_step"] + p["steps"])]
        assert covered == list(range(steps))
    replayed = guarantees(map(mechanism_from_json, paid), delta=1e-5, enforced=True)
    assert replayed == run.guarantees == training.load_run(tmp_path).guarantees
    assert [guarantee.status for guarantee in replayed] == statuses
    for guarantee in replayed:
        limit = 2.0 if config.get("protection", {}).get("epsilon") else 100.0
        assert (guarantee.epsilon <= limit) == ("proven" in guarantee.status)
        assert guarantee.epsilon <= limit or guarantee.epsilon == float("inf")
        by_device = guarantee.status == "proven under a device model"
        assert not by_device or any("device" in assumption.text for assumption in guarantee.assumptions)
    stored = json.loads((tmp_path / "config.json").read_text())["config"]
    assert ("seed" in stored) == (mode == "experiment")


@pytest.mark.parametrize("kind", ["record", "label-amplified"])
@pytest.mark.parametrize("target", [0.7, 3.0])
def test_a_target_is_reached_from_below_by_kept_noise(tmp_path: Path, kind: str, target: float) -> None:
    config = {**BASE, **POISSON, "protection": {"kind": kind, "epsilon": target}}
    run = training.train(config, data=DATA, folder=tmp_path)
    (guarantee,) = run.guarantees
    assert 0.99 * target <= guarantee.epsilon <= target
    z = json.loads((tmp_path / "config.json").read_text())["config"]["protection"]["noise_multiplier"]
    assert z is not None
    assert all(m["noise_multiplier"] == z for entry in entries(tmp_path)[1:] for m in entry["mechanisms"])
    less = config | {"protection": {"kind": kind, "noise_multiplier": 0.99 * z}}
    again = training.train(less, data=DATA, folder=tmp_path / "less")
    assert again.guarantees[0].epsilon > target  # no noise is wasted


SMALL_BUDGET = {"kind": "record", "noise_multiplier": 1.3, "epsilon": 3.0}


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_a_budget_stops_before_it_would_be_exceeded(tmp_path: Path, mode: str, monkeypatch: Any) -> None:
    recorder = Recorder(monkeypatch)
    config = {**RECORD, "protection": SMALL_BUDGET, "mode": mode}
    with pytest.raises(BudgetExceeded, match=r"more than epsilon 3.*training ended after step \d of 8"):
        training.train(config, data=DATA, folder=tmp_path)
    run = training.load_run(tmp_path)
    assert 0 < run.step == len(recorder.steps) == paid_steps(tmp_path) < STEPS
    assert run.summary["steps"] == run.step
    assert "would cost more than epsilon 3" in run.summary["stopped"]
    assert set(run.summary) == {"schema_version", "steps", "stopped"} or mode == "experiment"
    (guarantee,) = run.guarantees
    assert guarantee.epsilon <= 3.0
    one_more = [mechanism.repeated(run.step + 1) for mechanism in read_ledger(tmp_path).mechanisms]
    assert guarantees(one_more, delta=1e-5)[0].epsilon > 3.0
    assert set(run.predict(DATA[0]).tolist()) <= {0, 1, 2}
    assert write_report(run).exists()
    with pytest.raises(training.errors.RunFolderError, match="nothing to resume"):
        training.train(data=DATA, folder=tmp_path, resume=True)


def test_a_spent_budget_is_one_line_and_exit_code_4(tmp_path: Path) -> None:
    line = "train dfa --protect record --epsilon 3.5 --noise-multiplier 1 --epochs 2 --quiet --out run"
    told = opusim(*line.split(), "--set", "threads=1", "--set", "model.hidden=[8]", cwd=tmp_path)
    (error,) = told.stderr.strip().splitlines()
    assert told.returncode == 4
    assert error.startswith("opusim: budget: the next step would cost more than epsilon 3.5")
    assert training.load_run(tmp_path / "run").step > 0


def test_a_budget_below_one_step_leaves_a_run_that_released_nothing(tmp_path: Path) -> None:
    config = {**RECORD, "protection": {**SMALL_BUDGET, "epsilon": 1.0}}
    with pytest.raises(BudgetExceeded, match="spent 0.*training ended after step 0 of 8"):
        training.train(config, data=DATA, folder=tmp_path)
    run = training.load_run(tmp_path)
    assert run.step == paid_steps(tmp_path) == 0
    with pytest.raises(NoGuarantee, match="no step was paid for yet; train first"):
        _ = run.guarantees


# Order: write, sync, compute


class Recorder:
    """What a run does to its ledger and when it computes, as one list of events.

    ("write", bytes) and ("sync", "ledger") of the ledger's own file, ("head", lines) once a new head stands in its
    place, ("step", number) as a step begins.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, Any]] = []
        real = {name: getattr(os, name) for name in ("write", "fsync", "replace")}
        step = FeedbackTrainer.step

        def is_ledger(descriptor: int) -> bool:
            return os.readlink(f"/proc/self/fd/{descriptor}").endswith("ledger.jsonl")

        def write(descriptor: int, content: Any) -> int:
            done: int = real["write"](descriptor, content)
            if is_ledger(descriptor):
                self.events.append(("write", bytes(content)[:done]))
            return done

        def fsync(descriptor: int) -> None:
            real["fsync"](descriptor)
            if is_ledger(descriptor):
                self.events.append(("sync", "ledger"))

        def replace(source: Any, target: Any) -> None:
            real["replace"](source, target)
            if str(target).endswith("ledger.head"):
                self.events.append(("head", json.loads(Path(target).read_bytes())["lines"]))

        def compute(trainer: FeedbackTrainer, *arguments: Any, **options: Any) -> Any:
            self.events.append(("step", options["step"]))
            return step(trainer, *arguments, **options)

        for name, function in (("write", write), ("fsync", fsync), ("replace", replace)):
            monkeypatch.setattr(os, name, function)
        monkeypatch.setattr(FeedbackTrainer, "step", compute)

    @property
    def steps(self) -> list[int]:
        return [value for kind, value in self.events if kind == "step"]


def unpaid(events: list[tuple[str, Any]], *, mode: str) -> list[int]:
    """Steps that began before a line that pays for them was written, synced, and counted by the head, in this order.

    In release mode every computation needs a payment of its own.
    """
    written, synced, promised = b"", b"", 0
    computed: dict[int, int] = {}
    missing = []
    for kind, value in events:
        if kind == "write":
            written += value
        elif kind == "sync":
            synced = written
        elif kind == "head":
            promised = value
        else:
            computed[value] = computed.get(value, 0) + 1
            lines = synced.split(b"\n")[:-1][:promised]
            payments = [entry for entry in (json.loads(line)["entry"] for line in lines) if "steps" in entry]
            paid = sum(p["first_step"] <= value < p["first_step"] + p["steps"] for p in payments)
            if paid < (computed[value] if mode == "release" else 1):
                missing.append(value)
    return missing


def stop_and_resume(config: dict[str, Any], folder: Path, watcher: Callback) -> training.Run:
    with pytest.raises(KeyboardInterrupt):
        training.train(config, data=DATA, folder=folder, watcher=watcher)
    return training.train(data=DATA, folder=folder, resume=True)


@pytest.mark.parametrize("block", [1, 3, 64])
@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_steps_are_synced_first(
    tmp_path: Path, mode: str, block: int, monkeypatch: Any, stop_at: type
) -> None:
    monkeypatch.setitem(STEPS_PAID_AT_ONCE, mode, block)
    recorder = Recorder(monkeypatch)
    stop_and_resume({**RECORD, "mode": mode}, tmp_path, stop_at(5))
    assert recorder.steps == [0, 1, 2, 3, 4, 4, 5, 6, 7]  # 4 stood behind the checkpoint and was done again
    assert sum(kind == "write" for kind, _ in recorder.events) == len(entries(tmp_path))
    assert unpaid(recorder.events, mode=mode) == []


def _pay_late(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Engine._advance

    def compute_then_pay(engine: Engine) -> None:
        step = engine.step
        advance(engine)
        engine.steps.ledger.pay(step, *engine.mechanisms, until=engine.total_steps)

    monkeypatch.setattr(Engine, "_pay", lambda self: None)
    monkeypatch.setattr(Engine, "_advance", compute_then_pay)


def _never_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def skip_the_ledger(descriptor: int) -> None:
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith("ledger.jsonl"):
            fsync(descriptor)

    monkeypatch.setattr("opusim.accounting.journal.os.fsync", skip_the_ledger)


def _pay_once_for_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release run whose ledger takes it for an experiment."""
    reserve = Ledger._reserve

    def wrong(ledger: Ledger, step: int, mechanisms: Any, until: int | None) -> None:
        if ledger._coverage.find(step) is None:
            reserve(ledger, step, mechanisms, until)

    monkeypatch.setattr(Ledger, "_reserve", wrong)


@pytest.mark.parametrize("fault", [_pay_late, _never_sync, _pay_once_for_repeats])
def test_planted_faults_of_order_are_found(
    tmp_path: Path, fault: Any, monkeypatch: Any, stop_at: type
) -> None:
    monkeypatch.setitem(STEPS_PAID_AT_ONCE, "release", 1)
    recorder = Recorder(monkeypatch)
    fault(monkeypatch)
    stop_and_resume({**RECORD, "mode": "release"}, tmp_path, stop_at(5))
    assert unpaid(recorder.events, mode="release")


@pytest.mark.parametrize(("mode", "total"), [("experiment", STEPS), ("release", STEPS + 4)])
def test_a_release_run_that_goes_on_pays_again(tmp_path: Path, mode: str, total: int, stop_at: type) -> None:
    """Killed after step 5, checkpoint at 4: steps 4 to 7, paid for in a block before, are drawn and charged afresh."""
    config = {**RECORD, "mode": mode}
    unbroken = training.train(config, data=DATA, folder=tmp_path / "unbroken")
    run = stop_and_resume(config, tmp_path / "broken", stop_at(5))
    assert paid_steps(tmp_path / "broken") == total
    (exact,), (found,) = unbroken.guarantees, run.guarantees
    assert (found.epsilon > exact.epsilon) == (mode == "release")


def test_a_release_run_may_run_out_of_budget_by_being_killed(tmp_path: Path, stop_at: type) -> None:
    config = {**RECORD, "protection": {"kind": "record", "epsilon": 2.0}, "mode": "release"}
    lost = "ended after step 4 of 8.*; [1-4] steps that are paid for were lost when"
    with pytest.raises(BudgetExceeded, match=lost):
        stop_and_resume(config, tmp_path, stop_at(5))
    (guarantee,) = training.load_run(tmp_path).guarantees
    assert guarantee.epsilon <= 2.0


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, stop_at: type) -> Path:
    """A run that was stopped after 5 of 8 steps, with a line of the ledger for each pair of them."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(STEPS_PAID_AT_ONCE, "experiment", 2)
        with pytest.raises(KeyboardInterrupt):
            training.train(RECORD, data=DATA, folder=folder, watcher=stop_at(5))
    return folder


def copy_of(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


TAMPERINGS: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "a flipped byte": (
        lambda lines: [
            *lines[:2],
            lines[2].replace(b'"noise_multiplier":1.3', b'"noise_multiplier":1.2'),
            *lines[3:],
        ],
        "ledger.jsonl: line 3: its digest does not fit",
    ),
    "a cut file": (
        lambda lines: [*lines[:-1], lines[-1][: len(lines[-1]) // 2]],
        "ledger.jsonl: line 4: is cut short.*ledger.head counts 4 lines",
    ),
    "a missing line": (lambda lines: lines[:-1], "ledger.jsonl: line 4: is missing"),
    "a reordered line": (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "ledger.jsonl: line 2"),
    "a line taken out": (lambda lines: [lines[0], *lines[2:]], "ledger.jsonl: line 2: says it is line 3"),
    "no ledger": (lambda lines: [], "ledger.jsonl: line 1: is missing"),
}


@pytest.mark.parametrize("name", list(TAMPERINGS))
def test_a_tampered_ledger_is_refused_with_its_place(stopped: Path, tmp_path: Path, name: str) -> None:
    folder = copy_of(stopped, tmp_path)
    change, message = TAMPERINGS[name]
    ledger = folder / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    ledger.write_bytes(b"".join(change(lines)))
    changed = ledger.read_bytes()
    with pytest.raises(LedgerCorrupt, match=message):
        training.train(data=DATA, folder=folder, resume=True)
    assert ledger.read_bytes() == changed  # nothing was repaired
    with pytest.raises(LedgerCorrupt, match=message):
        _ = training.load_run(folder).guarantees
    for command in (["report", folder], ["account", "run", folder]):
        told = opusim(*command, cwd=tmp_path)
        assert (told.returncode, told.stderr.count("\n"), "ledger.jsonl: line" in told.stderr) == (2, 1, True)
    training.load_run(folder).predict(DATA[0])  # the model is still there


def test_a_line_that_the_head_does_not_count_is_what_a_crash_leaves(stopped: Path, tmp_path: Path) -> None:
    folder = copy_of(stopped, tmp_path)
    with (folder / "ledger.jsonl").open("ab") as ledger:
        ledger.write(b'{"schema_version":1,"line":5,')
    training.train(data=DATA, folder=folder, resume=True)
    assert paid_steps(folder) == STEPS


def test_every_flipped_byte_is_found_on_its_line(stopped: Path, tmp_path: Path) -> None:
    folder = copy_of(stopped, tmp_path)
    for name, stride in (("ledger.jsonl", 3), ("ledger.head", 1)):
        file = folder / name
        content = file.read_bytes()
        for place in range(0, len(content) - (name == "ledger.head"), stride):
            changed = bytes([content[place] ^ 1 << place % 8])
            file.write_bytes(content[:place] + changed + content[place + 1 :])
            line = f"ledger.jsonl: line {content[:place].count(10) + 1}: "
            with pytest.raises(LedgerCorrupt, match=line if name == "ledger.jsonl" else "ledger.head|line"):
                read_ledger(folder)
        file.write_bytes(content)


def test_a_run_without_its_ledger_says_so(stopped: Path, tmp_path: Path) -> None:
    folder = copy_of(stopped, tmp_path)
    for file in folder.glob("ledger.*"):
        file.unlink()
    with pytest.raises(LedgerCorrupt, match="ledger.jsonl is missing; restore it from a copy"):
        _ = training.load_run(folder).guarantees
    with pytest.raises(LedgerCorrupt, match="ledger.jsonl: line 1: is missing: checkpoint step-0000000004"):
        training.train(data=DATA, folder=folder, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_random", [False, True])
def test_sigkill_never_leaves_a_computed_step_unpaid(tmp_path: Path, is_random: bool, seed: int) -> None:
    """At every touch of the disk, and at random moments."""
    moments = [str(seed)] if is_random else []
    command = [sys.executable, "-m", "tests.support.ledger_kill_harness", str(tmp_path), *moments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(result.stdout.split()[0]) >= (100 if is_random else 101)
