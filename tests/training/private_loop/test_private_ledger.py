"""The ledger of a private loop: paid before it is handed out, stopped by the budget, resumed, forked and killed.

Other accountants stand next to ours as a claim, and a large delta is told at the start.
"""

import json
import math
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from typer.testing import CliRunner

import opusim
from opusim.accounting.explanation import LARGE_DELTA, Statement
from opusim.accounting.guarantee import LedgerCorrupt, NoGuarantee, Status
from opusim.accounting.ledger import Ledger, read_ledger
from opusim.training.cli.app import app
from opusim.training.engine.steps import STEPS_PAID_AT_ONCE
from opusim.training.errors import FolderBusy
from opusim.training.private_loop.folder import enforcement, read_save, stated_loop
from opusim.training.private_loop.loader import PrivateLoader
from tests.support.forked import in_forked_process
from tests.support.killing import skip_syncs, start_child
from tests.support.packages import install
from tests.support.private_loops import Parts, parts, private_loop, rewritten, run_epoch, unrecorded


def steps_paid(folder: Path) -> int:
    return sum(payment.steps for payment in opusim.read_ledger(folder).payments)


def test_every_batch_is_paid_for_before_it_is_handed_out(tmp_path: Path) -> None:
    private = private_loop(tmp_path)
    for _ in range(2):
        for x, y in private.data_loader:
            assert steps_paid(tmp_path) >= private.step
            private.criterion(private.module(x), y).backward()
    assert steps_paid(tmp_path) == private.step == 10


def test_a_spent_budget_ends_the_loop(tmp_path: Path) -> None:
    options: dict[str, Any] = {"noise_multiplier": None, "target_epsilon": 4.0, "epochs": 2}
    private = private_loop(tmp_path, **options)
    run_epoch(private)
    run_epoch(private)
    assert private.step == 10
    assert 3.99 < private.epsilon <= 4.0
    with pytest.warns(UserWarning, match=r"more than epsilon 4 .* the loop ended after step 10$"):
        assert run_epoch(private) == 0
    with pytest.raises(opusim.BudgetExceeded, match="the loop ended after step 10"):
        run_epoch(private)
    assert steps_paid(tmp_path) == 10
    assert private.epsilon <= 4.0


def test_a_budget_ends_a_loop_within_an_epoch(tmp_path: Path) -> None:
    private = private_loop(tmp_path, target_epsilon=3.0)
    with pytest.warns(UserWarning, match="the loop ended after step"):
        run_epoch(private)
    assert 0 < private.step < 5
    assert private.epsilon <= 3.0


def with_dropout(*, feedback: bool) -> Parts:
    """A network with dropout, which may learn through a noisy device, and an optimizer with a state."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    if feedback:
        model = opusim.FeedbackAlignment(model, ["1"])
        model.noisy_device = opusim.open_device(
            "gaussian", **model.shape(torch.zeros(2, 8))._asdict(), seed=4
        )
    _, _, criterion, loader = parts(model)
    return model, torch.optim.Adam(model.parameters(), lr=0.01), criterion, loader


def final(private: opusim.PrivateTraining) -> Tensor:
    return parameters_to_vector(private.module.parameters()).detach()


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("limit", [None, 4])
def test_a_resumed_experiment_repeats_a_whole_one(tmp_path: Path, feedback: bool, limit: int | None) -> None:
    def loop(name: str, **options: Any) -> opusim.PrivateTraining:
        given = with_dropout(feedback=feedback)
        return private_loop(tmp_path / name, given, max_physical_batch_size=limit, **options)

    whole = loop("whole")
    for _ in range(3):
        run_epoch(whole)
    killed = loop("killed")
    run_epoch(killed)
    run_epoch(killed, steps=2)
    killed.save({"note": [1, 2.0], "tensor": torch.ones(2)})
    run_epoch(killed, steps=2)  # paid for, then lost
    killed.close()
    torch.manual_seed(99)
    resumed = loop("killed", resume=True, seed=None)
    assert (resumed.step, resumed.epoch, resumed.extra["note"]) == (7, 1, [1, 2.0])
    while resumed.epoch < 3:
        run_epoch(resumed)
    assert torch.equal(final(whole), final(resumed))
    assert steps_paid(tmp_path / "killed") == 15
    assert resumed.epsilon == whole.epsilon
    assert "unwitnessed" not in resumed.statement().warnings


RELEASE: dict[str, Any] = {"mode": "release", "seed": None}


def test_steps_of_a_release_are_paid_again(tmp_path: Path) -> None:
    with private_loop(tmp_path, **RELEASE) as private:
        run_epoch(private, steps=2)
        private.save()
        run_epoch(private, steps=2)
    assert steps_paid(tmp_path) == 4  # the step that was reserved and not taken is returned
    with private_loop(tmp_path, resume=True, **RELEASE) as resumed:
        run_epoch(resumed)
        assert resumed.step == 5
    assert steps_paid(tmp_path) == 4 + 3
    assert '"seed": null' in (tmp_path / "private.json").read_text()
    assert read_save(tmp_path)[0]["generators"] is None
    assert (tmp_path.stat().st_mode & 0o777) == 0o700


def test_every_command_names_missing_settings_and_a_loop_that_paid_nothing(tmp_path: Path) -> None:
    with private_loop(tmp_path / "unpaid") as private, pytest.raises(NoGuarantee, match="no step was paid"):
        private.statement()
    with private_loop(tmp_path / "cut") as private:
        run_epoch(private, steps=1)
        private.save()
    (tmp_path / "cut" / "private.json").unlink()
    for name, message in (
        ("unpaid", "unpaid: no step was paid for yet; train first"),
        ("cut", "private.json is missing, the settings of the private loop in this folder; restore it"),
    ):
        for command in (["account", "run"], ["dossier"], ["report"], ["audit"]):
            found = CliRunner().invoke(app, [*command, str(tmp_path / name)])
            assert found.exit_code
            assert message in " ".join(f"{found.output} {found.exception}".split()), command
    with pytest.raises(opusim.RunFolderError, match=r"private\.json is missing"):
        private_loop(tmp_path / "cut", resume=True)


def test_a_copied_release_folder_does_not_resume(tmp_path: Path) -> None:
    with private_loop(tmp_path / "first", **RELEASE) as private:
        run_epoch(private)
        private.save()
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    with pytest.raises(opusim.RunFolderError, match="is a copy"):
        private_loop(tmp_path / "second", resume=True, **RELEASE)


def test_folders_are_not_mixed_up(tmp_path: Path) -> None:
    with pytest.raises(opusim.RunFolderError, match="holds no private loop to resume"):
        private_loop(tmp_path, resume=True)
    with private_loop(tmp_path) as private:
        with pytest.raises(opusim.RunFolderError, match="is being written by"):
            private_loop(tmp_path)
        run_epoch(private)
    with pytest.raises(opusim.RunFolderError, match="has no save to resume from"):
        private_loop(tmp_path, resume=True)
    with pytest.raises(opusim.RunFolderError, match="holds a private loop already; give resume=True"):
        private_loop(tmp_path)
    with pytest.raises(opusim.RunFolderError, match="holds a private loop .*`opusim account run"):
        opusim.load_run(tmp_path)


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in (folder / "ledger.jsonl", folder / "ledger.head")}


def test_an_older_ledger_is_refused(tmp_path: Path) -> None:
    with private_loop(tmp_path) as private:
        run_epoch(private, steps=1)
        older = contents(tmp_path)
        run_epoch(private)
        run_epoch(private)
        private.save()
    for file, content in older.items():
        file.write_bytes(content)
    with pytest.raises(opusim.accounting.LedgerCorrupt, match="this is an older ledger"):
        private_loop(tmp_path, resume=True)


# Kills


class PaysLate(PrivateLoader):
    """A planted fault: every third batch is handed out before it is paid for, and never paid if the process dies."""

    def _hand_out(self, *, until: int) -> bool:
        if self._steps.step % 3:
            return super()._hand_out(until=until)
        self._module.begin(self._steps.step, *self._last)
        self._steps.step += 1
        return True


def in_mode(folder: Path, mode: str, given: Parts | None = None, **options: Any) -> opusim.PrivateTraining:
    return private_loop(folder, given, mode=mode, seed=None if mode == "release" else 3, **options)


def endless(folder: Path, log: Path, mode: str) -> None:
    """Resume and train until killed; note every batch before it is used."""
    skip_syncs()
    private = in_mode(folder, mode, resume=True)
    model, optimizer, criterion, loader = private
    with log.open("ab", buffering=0) as file:
        while True:
            for x, y in loader:
                file.write(f"{private.step - 1}\n".encode())
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
                if private.step % 4 == 0:
                    private.save()


def kill_at_random(folder: Path, mode: str, kills: int) -> tuple[list[int], list[int]]:
    """Kill the loop at random moments; return the steps that were used and those paid for, after each kill."""
    with in_mode(folder / "run", mode) as private:
        private.save()
    log, draw, used, paid = folder / "log", random.Random(5), list[int](), list[int]()
    log.touch()
    lines: list[str] = []
    for _ in range(kills):
        child = start_child(lambda: endless(folder / "run", log, mode))
        while len(log.read_text().splitlines()) <= len(lines):
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the loop ended by itself"
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.3))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        lines = log.read_text().splitlines()
        used.append(len(lines) if mode == "release" else len(set(lines)))
        paid.append(steps_paid(folder / "run"))
    return used, paid


NIGHTLY = [pytest.param(mode, 20, marks=pytest.mark.slow) for mode in ("release", "experiment")]


@pytest.mark.parametrize(("mode", "kills"), [("release", 3), *NIGHTLY])
def test_a_killed_loop_never_used_more_than_it_paid(tmp_path: Path, mode: str, kills: int) -> None:
    used, paid = kill_at_random(tmp_path, mode, kills)
    assert used[0] > 0
    assert all(took <= covered for took, covered in zip(used, paid, strict=True)), (used, paid)


def test_a_loop_that_pays_late_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opusim.training.private_loop.session.PrivateLoader", PaysLate)
    monkeypatch.setitem(STEPS_PAID_AT_ONCE, "release", 1)
    for attempt in range(6):  # until a kill falls behind a batch that nothing paid for
        used, paid = kill_at_random(tmp_path / str(attempt), "release", 1)
        if any(took > covered for took, covered in zip(used, paid, strict=True)):
            return
    pytest.fail("the planted fault was not found")


# Forks: the child neither trains, pays nor saves, and the loop is as if it were not there


MODES = pytest.mark.parametrize("mode", ["experiment", "release"])
OTHER = "RuntimeError: the private loop belongs to process"


@MODES
def test_parent_and_child_do_not_take_the_same_step(tmp_path: Path, mode: str) -> None:
    private = in_mode(tmp_path, mode)
    batches = iter(private.data_loader)
    for _ in range(2):
        assert in_forked_process(lambda: next(batches)).startswith(OTHER)
        x, y = next(batches)
        private.criterion(private.module(x), y).backward()
    private.close()


def test_a_child_does_not_release_the_batch_at_hand_again(tmp_path: Path) -> None:
    private = in_mode(tmp_path, "release")
    module, optimizer, criterion, loader = private
    for number, (x, y) in enumerate(loader):
        loss = criterion(module(x), y)

        def backward(loss: Tensor = loss) -> object:
            loss.backward()
            return [p.grad for p in module.parameters()]

        if number < 2:
            assert in_forked_process(backward).startswith(OTHER)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert private.step == len(loader)
    private.close()
    assert steps_paid(tmp_path) == len(loader)


def test_a_child_that_saves_or_closes_leaves_the_loop_as_it_is(tmp_path: Path) -> None:
    private = in_mode(tmp_path, "experiment")
    run_epoch(private, steps=2)
    private.save("parent")
    kept = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    works: list[Callable[[], object]] = [lambda: private.save("child"), lambda: run_epoch(private)]
    for work in works:
        assert in_forked_process(work).startswith(OTHER)
    assert in_forked_process(lambda: (private.epsilon, private.close())[1]) == "None"
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == kept
    with pytest.raises(FolderBusy, match="close what holds it"):
        in_mode(tmp_path, "experiment")
    run_epoch(private)
    private.close()
    assert steps_paid(tmp_path) == 5


@pytest.mark.slow
@MODES
def test_workers_of_the_loader_may_be_forked(tmp_path: Path, mode: str) -> None:
    given = parts(num_workers=2, multiprocessing_context="fork")
    with in_mode(tmp_path, mode, given) as private:
        run_epoch(private)
        run_epoch(private)
        assert private.step == 10


# What a folder says that its loop checked


def checked(statement: Statement) -> set[str]:
    return {one.text for each in statement.guarantees for one in each.assumptions if one.holds}


def test_a_folder_states_what_its_loop_states(tmp_path: Path) -> None:
    for name, given, more in (
        ("records", None, {}),
        ("users", parts(batch_size=5), {"user_ids": [n % 20 for n in range(60)], "records_per_user": 2}),
    ):
        with private_loop(tmp_path / name, given, **more) as private:
            run_epoch(private, steps=2)
            unsaved = private.statement()
            assert unsaved.ledger.checked_against == ("the program's own record",)
            assert "in the program's own record" in " ".join(str(unsaved).split())
            assert "unwitnessed" not in unsaved.warnings  # the program holds the ledger
            assert "unwitnessed" in stated_loop(tmp_path / name).warnings
            private.save()
            own = private.statement()
        for place in (tmp_path / name, tmp_path / name / "ledger.jsonl"):
            shown = CliRunner().invoke(app, ["account", "run", str(place), "--json"])
            assert json.loads(shown.output) == json.loads(json.dumps(own.to_json()))
        page = Path(CliRunner().invoke(app, ["report", str(tmp_path / name)]).output.strip()).read_text()
        for text in (f"{own.guarantees[0].epsilon:.3f}", "steps paid for", "max_grad_norm", "zero_out"):
            assert text in page, text
        assert "Repeat this run" not in page
        assert len(checked(own)) >= 7
        assert own.ledger.enforced_by == (f"make_private of opusim {version('opusim')}",)
        assert "repeats no check" in own.ledger.record
        assert own.ledger.checked_against == ("private.pt",)
        assert "unwitnessed" not in own.warnings
        lines = len((tmp_path / name / "ledger.jsonl").read_text().splitlines())
        with private_loop(tmp_path / name, given, resume=True, **more):
            pass  # says what the last line says, and writes none
        assert len((tmp_path / name / "ledger.jsonl").read_text().splitlines()) == lines


def test_an_older_folder_and_one_whose_record_comes_late_have_no_checks(tmp_path: Path) -> None:
    with private_loop(tmp_path) as private:
        run_epoch(private, steps=2)
        kept = checked(private.statement())
        trusted = {one.text for one in private.statement().guarantees[0].assumptions} - kept
    rewritten(tmp_path, unrecorded)
    older = stated_loop(tmp_path)
    assert not checked(older)
    assert {one.text for one in older.guarantees[0].assumptions} == kept | trusted
    assert not older.ledger.enforced_by
    assert "on record" not in older.text()
    late = enforcement(private.settings, processes=1)
    Ledger(tmp_path / "ledger.jsonl", mode="experiment", delta=1e-5, enforcement=late).close()
    assert not checked(stated_loop(tmp_path))


def test_a_path_of_a_script_without_utf8_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.py")
    Path(script).touch()
    monkeypatch.setattr(sys.modules["__main__"], "__file__", script, raising=False)
    with private_loop(tmp_path / "loop"):
        pass
    (found,) = read_ledger(tmp_path / "loop").enforcements
    assert found is not None
    assert found.program is not None
    assert found.program.script == f"{tmp_path}/\\xff.py"


def test_a_forged_record_is_refused_or_not_counted(tmp_path: Path) -> None:
    with private_loop(tmp_path) as private:
        run_epoch(private, steps=2)
        kept = checked(private.statement())
        trusted = private.statement().guarantees[0].assumptions[-1].text
        private.save()
    file, whole = tmp_path / "ledger.jsonl", contents(tmp_path)

    def claims_more(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        entries[0]["enforcement"]["hypotheses"].append(trusted)
        return entries

    text = file.read_text()
    file.write_text(text.replace("make_private of opusim", "make_private of Opusim", 1))
    with pytest.raises(LedgerCorrupt, match="line 1: its digest does not fit"):
        stated_loop(tmp_path)
    for path, content in whole.items():
        path.write_bytes(content)
    rewritten(tmp_path, claims_more)
    with pytest.raises(LedgerCorrupt, match=r"is not the line that private\.pt names"):
        stated_loop(tmp_path)
    (tmp_path / "private.pt").unlink()
    assert trusted in read_ledger(tmp_path).checked  # what the planted line claims
    assert checked(stated_loop(tmp_path)) == kept
    for path, content in whole.items():
        path.write_bytes(content)
    assert checked(stated_loop(tmp_path)) == kept


def test_noise_and_batches_of_a_release_come_from_the_system(tmp_path: Path) -> None:
    found = []
    for name in "ab":
        with private_loop(tmp_path / name, **RELEASE) as private:
            torch.manual_seed(0)
            run_epoch(private)
            found.append(final(private))
    assert not torch.equal(*found)


# Accountants


PACKAGE = Path(__file__).parents[2] / "support" / "third_party_accountant"
GROUP = "opusim.accountants"


@pytest.mark.parametrize("relation", [pytest.param("zero_out", marks=pytest.mark.slow), "add_or_remove_one"])
def test_a_documented_accountant_agrees(
    relation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dp_accounting")
    monkeypatch.syspath_prepend(str(PACKAGE))
    options = {"relation": relation, "sample_rate": 0.2, "noise_multiplier": 1.3}
    with private_loop(tmp_path, accountant="lab_pld", **options) as loop:
        run_epoch(loop)
        ours, theirs = loop.statement().guarantees
        assert (ours.status, theirs.status) == (Status.PROVEN, Status.CLAIMED)
        assert theirs.epsilon == pytest.approx(ours.epsilon, rel=1e-3)
        assert theirs.source == "accountant lab_pld of package lab-pld"
        assert (theirs.delta, theirs.adjacency, theirs.unit) == (ours.delta, ours.adjacency, ours.unit)
        assert theirs.assumptions[0].holds is True
        assert loop.epsilon == ours.epsilon
        document = loop.statement().to_json()
        assert Statement.from_json(document) == loop.statement()
        assert document["guarantees"][1]["theorem"] is None


SOURCE = """
import math

class Halved:
    def epsilon(self, mechanisms, *, delta):
        (one,) = mechanisms
        assert one["kind"] == "record_central" and one["steps"] == 5 and delta == 1e-5
        return 1e-3

class Endless:
    epsilon = lambda self, mechanisms, *, delta: math.inf

class Negative:
    epsilon = lambda self, mechanisms, *, delta: -1.0

class Broken:
    epsilon = lambda self, mechanisms, *, delta: {}["no such kind"]

class Unbuilt(Halved):
    def __init__(self):
        raise OSError("no licence")

class Empty:
    pass
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("Halved", "Endless", "Negative", "Broken", "Unbuilt", "Empty")
    names = {name.lower(): f"other_lab:{name}" for name in kinds}
    install(monkeypatch, tmp_path / "packages", "other_lab", GROUP, names, SOURCE)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "epsilon", "holds"), [("halved", 1e-3, False), ("endless", math.inf, True)])
def test_a_wrong_claim_stays_a_claim(tmp_path: Path, name: str, epsilon: float, holds: bool) -> None:
    """One that is below our lower bound says so; a budget counts neither."""
    with private_loop(tmp_path, accountant=name, target_epsilon=8.0) as loop:
        run_epoch(loop)
        ours, theirs = loop.statement().guarantees
        assert (theirs.epsilon, theirs.status) == (epsilon, Status.CLAIMED)
        assert theirs.assumptions[0].holds is holds
        assert loop.epsilon == ours.epsilon > 1e-3


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "runs", "message"),
    [
        ("negative", True, "accountant = 'negative' of package 'other_lab': epsilon = -1.0"),
        ("broken", True, "KeyError: 'no such kind'; repair that package, or leave accountant out"),
        ("prv", False, "must be one of broken, empty, .*; install the package that brings it"),
        ("empty", False, "is no class with a method epsilon"),
        ("unbuilt", False, "accountant = 'unbuilt' of package 'other_lab': OSError: no licence"),
    ],
)
def test_an_accountant_that_fails_is_named(tmp_path: Path, name: str, runs: bool, message: str) -> None:
    """Before the loop if it can be told."""
    with ExitStack() as stack:
        if runs:
            loop = stack.enter_context(private_loop(tmp_path / "loop", accountant=name))
            run_epoch(loop, steps=1)
            assert loop.epsilon > 0
        with pytest.raises(ValueError, match=message) as caught:
            loop.statement() if runs else private_loop(tmp_path / "loop", accountant=name)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "loop").exists() is runs


# Warnings of delta


FILL, BUDGET = "batches never fill", "rules out next to nothing"
HIDDEN: dict[str, Any] = {"relation": "add_or_remove_one"}


@pytest.mark.parametrize(
    ("about", "options", "told"),
    [
        (LARGE_DELTA, {"target_delta": 0.1 / 40}, None),
        (LARGE_DELTA, {"target_delta": 0.1}, "delta = 0.1 with 40 records (0.1 / records is 0.0025): "),
        # 10 / 0.1, not the hidden number 40
        (LARGE_DELTA, {**HIDDEN, "target_delta": 0.1, "sample_rate": 0.1}, "delta = 0.1 with 100 records (0.1 "),
        (FILL, {"sample_rate": 0.12}, "4.8 are expected in one and its sum is divided by 10"),
        (FILL, {"sample_rate": 0.13}, None),
        (FILL, {**HIDDEN, "sample_rate": 0.12}, None),
        (BUDGET, {"target_epsilon": 200.0}, "target_epsilon = 200: Epsilon is above 10"),
        (BUDGET, {"target_epsilon": 10.0}, None),
    ],
)  # fmt: skip
def test_a_loop_warns_once(tmp_path: Path, about: str, options: dict[str, Any], told: str | None) -> None:
    """40 records in batches of 10."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        private_loop(tmp_path, parts(count=40, batch_size=10), **options).close()
    lines = [str(one.message) for one in caught if about in str(one.message)]
    assert len(lines) == (told is not None)
    assert all(str(told) in line for line in lines)


POISSON = {"scheme": "poisson"}


@pytest.mark.parametrize(
    ("about", "protection", "sampler", "count"),
    [
        (LARGE_DELTA, {"delta": 0.1}, POISSON, 1),
        (LARGE_DELTA, {"delta": 1e-5}, POISSON, 0),
        (FILL, {"divisor": 1000.0}, {"sampling_probability": 0.3}, 1),  # 388 of 1,294
        (FILL, {"divisor": 1000.0}, {"sampling_probability": 0.5}, 0),
        ("protection.epsilon = 200: Epsilon is above 10", {"epsilon": 200.0}, POISSON, 1),
    ],
)
def test_a_run_warns_once(tmp_path: Path, about: str, protection: Any, sampler: Any, count: int) -> None:
    own = {"kind": "record", "noise_multiplier": 1.0, **protection}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opusim.train({"epochs": 1, "protection": own, "sampler": sampler}, folder=tmp_path / "run")
    assert sum(about in str(one.message) for one in caught) == count
