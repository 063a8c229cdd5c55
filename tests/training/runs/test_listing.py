"""`opusim runs list` shows what is there, and `opusim runs rm` removes what a run wrote, and nothing else."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opusim.accounting.explanation import number
from opusim.accounting.guarantee import LedgerCorrupt
from opusim.training.cli.runs import _loop_facts
from opusim.training.reports.dossier import write_dossier
from opusim.training.runs import listing
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.listing import WRITTEN, list_runs
from opusim.training.runs.storage import only_writer
from opusim.training.zeroth_order.step_log import BASE_FILE, LOG_FILE, mark_file
from tests.support.command import Finished, opusim
from tests.support.private_loops import private_loop, run_epoch
from tests.support.run_folders import made


def files(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_a_list_is_a_table_of_80_columns_and_tolerates_damage(tmp_path: Path) -> None:
    made(tmp_path / "runs" / "convex-fashion-mnist-1")
    made(tmp_path / "runs" / "released", mode="release")
    made(tmp_path / "runs" / "stopped", finished=False)
    busy = made(tmp_path / "runs" / "busy", finished=False)
    for name, file in (("cut", "config.json"), ("edited", "summary.json"), ("shortened", "ledger.jsonl")):
        cut = made(tmp_path / "runs" / name) / file
        cut.write_bytes(cut.read_bytes()[:-30])
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "mine.txt").write_text("no run")
    with only_writer(busy, "run folder"):
        shown = opusim("runs", "list", cwd=tmp_path, COLUMNS="80")
        read = json.loads(opusim("runs", "list", "runs", "--json", cwd=tmp_path).stdout)
    assert (shown.returncode, shown.stderr, shown.stdout.count("damaged: ")) == (0, "", 3)
    rows = {Path(row["path"]).name: row for row in read["runs"]}
    assert (read["schema"], read["version"]) == ("opusim-runs", 1)
    damaged = dict.fromkeys(("cut", "edited", "shortened"), "damaged")
    finished = dict.fromkeys(("convex-fashion-mnist-1", "released"), "finished")
    others = {"busy": "being written", "stopped": "unfinished"}
    assert {name: row["state"] for name, row in rows.items()} == damaged | finished | others
    assert (rows["stopped"]["step"], rows["stopped"]["steps"]) == (6, 8)
    assert rows["released"]["accuracy"] is None
    assert rows["released"]["guarantee"]["status"] == "proven"
    assert rows["released"]["guarantee"]["epsilon"] > 0
    assert rows["stopped"]["bytes"] == sum(map(len, files(tmp_path / "runs" / "stopped").values()))
    alone = json.loads(opusim("runs", "list", "runs/stopped", "--json", cwd=tmp_path).stdout)
    assert [row["step"] for row in alone["runs"]] == [6]


def test_a_private_loop_has_the_epsilon_of_its_statement_and_its_damage(tmp_path: Path) -> None:
    for name in ("edited", "new", "older", "sound"):
        with private_loop(tmp_path / name, epochs=2) as private:
            if name == "new":
                continue
            run_epoch(private)
            if name == "older":
                early = {path.name: path.read_bytes() for path in (tmp_path / name).glob("ledger.*")}
                run_epoch(private)
                private.save()
            stated = private.statement().guarantees[0]
    ledger = tmp_path / "edited" / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"steps":', b'"steps": '))
    for name, content in early.items():
        (tmp_path / "older" / name).write_bytes(content)
    entries = {entry.path.name: entry for entry in list_runs(tmp_path, _loop_facts)}
    assert {entry.kind for entry in entries.values()} == {"private loop"}
    sound, new = entries["sound"], entries["new"]
    assert (sound.step, sound.steps, new.step, new.guarantee, new.state) == (5, 10, None, None, None)
    assert sound.guarantee is not None
    assert (sound.guarantee.epsilon, sound.guarantee.delta) == (stated.epsilon, stated.delta)
    assert sound.to_row()["epsilon"] == f"{number(stated.epsilon)} at delta 1e-05, record, proven"
    for name in ("edited", "older"):
        with pytest.raises(LedgerCorrupt) as refused:
            write_dossier(tmp_path / name, out=tmp_path / "dossier.html")
        assert (entries[name].state, entries[name].problem) == ("damaged", str(refused.value))


def test_a_folder_that_is_closed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "runs" / "private")
    made(tmp_path / "runs" / "sound")
    real = listing.kind_of

    def guarded(folder: Path) -> str | None:
        if folder.name == "private":
            raise PermissionError(13, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(listing, "kind_of", guarded)
    found = opusim("runs", "list", cwd=tmp_path)
    assert found.returncode == 0
    assert "runs/private: damaged: [Errno 13] Permission denied" in found.stdout
    assert "sound: bp on digits" in found.stdout


def test_a_missing_folder_is_one_line_and_an_empty_one_is_said(tmp_path: Path) -> None:
    refused = opusim("runs", "list", cwd=tmp_path)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "folder runs does not exist" in refused.stderr
    (tmp_path / "runs").mkdir()
    assert opusim("runs", "list", cwd=tmp_path).stdout == "no runs in runs\n"


def test_runs_are_removed_and_nothing_else(tmp_path: Path) -> None:
    finished, stopped = made(tmp_path / "one"), made(tmp_path / "two", finished=False)
    (finished / "figures").mkdir()
    (finished / "figures" / "learning.svg").write_bytes(b"")
    released, kept = made(tmp_path / "released", mode="release"), made(tmp_path / "kept")
    result = opusim("runs", "rm", "one", "two", "one/", "released", "--yes", "--lose-ledger", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == ["removed one", "removed two", "removed released"]
    assert [run.name for run in (finished, stopped, released) if run.exists()] == []
    assert files(kept)


def link(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))
    run.symlink_to(run.with_name("elsewhere"))


def foreign(run: Path) -> None:
    """Another program's model, whose files have the names of ours."""
    for file in (run / "ledger.jsonl", *run.glob("checkpoints/*")):
        file.unlink()
    (run / "config.json").write_text('{"model_type": "bert"}')


def linked_folder(run: Path) -> None:
    (run / "checkpoints").rename(run.with_name("scratch"))
    (run / "checkpoints").symlink_to(run.with_name("scratch"))


@pytest.mark.parametrize(("spoil", "mode", "message"), [
    (link, "experiment", "run folder run is a link; name the folder"),

    (foreign, "experiment", "run is not a run folder of opusim"),
    (linked_folder, "experiment", "holds what no run wrote (checkpoints); move or remove that first"),
    (lambda run: (run / "thesis.tex").touch(), "experiment", "no run wrote (thesis.tex)"),
    (lambda run: (run / "figures" / "mine").mkdir(parents=True), "experiment", "no run wrote (figures/mine)"),
    (lambda run: (run / "config.json").unlink(), "release", "confirm with --lose-ledger"),
    (lambda run: (run / "ledger.head").unlink(), "experiment", "confirm with --lose-ledger"),
    (lambda run: None, "release", "the only account of what a release run revealed of private data"),
])  # fmt: skip
def test_what_must_stay_is_refused(tmp_path: Path, spoil: Callable, mode: str, message: str) -> None:
    spoil(made(tmp_path / "run", mode=mode))
    made(tmp_path / "other")
    before = files(tmp_path)
    result = opusim("runs", "rm", "other", "run", "--yes", cwd=tmp_path)
    assert (result.returncode, message in result.stderr, result.stderr.count("\n")) == (2, True, 1)
    assert files(tmp_path) == before


def test_a_run_that_is_being_written_stays(tmp_path: Path) -> None:
    run, _ = made(tmp_path / "run", finished=False), made(tmp_path / "other")
    with only_writer(run, "run folder"):
        result = opusim("runs", "rm", "other", "run", "--yes", cwd=tmp_path)
    assert result.returncode == 2
    assert "run folder run is being written by process" in result.stderr
    assert files(run)
    assert files(tmp_path / "other")


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [("y\n", 0, "removed run"), ("n\n", 1, "nothing was removed"), ("", 2, "--yes is")],
)
def test_a_question_is_asked(tmp_path: Path, monkeypatch: Any, answer: str, code: int, said: str) -> None:
    run = made(tmp_path / "run")
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    result: Finished = opusim("runs", "rm", "run", cwd=tmp_path)
    assert result.returncode == code
    assert "Remove run? [y/N]" in result.stderr
    assert said in result.stdout + result.stderr
    assert run.exists() is (code != 0)


def test_every_file_of_a_run_may_be_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    own = {path.name for path in vars(folder).values() if isinstance(path, Path)} - {tmp_path.name}
    assert own - {"checkpoints", "figures"} <= WRITTEN
    assert {LOG_FILE, BASE_FILE, mark_file(Path(LOG_FILE)).name} <= WRITTEN
