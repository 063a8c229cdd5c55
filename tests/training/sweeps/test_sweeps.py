"""A sweep makes each run once, keeps failures as rows, draws what is there, and resumes after any death."""

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from joblib.externals.loky.process_executor import TerminatedWorkerError
from typer.testing import CliRunner

from opusim.errors import ConfigError
from opusim.training.cli.train import curve_app
from opusim.training.data.catalogue import build_dataset
from opusim.training.engine.session import train_on
from opusim.training.errors import RunFolderError, RunInterrupted, SweepStopped
from opusim.training.reports.sweep_report import write_sweep
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.run import evaluate_run, load_run
from opusim.training.sweeps import execution
from opusim.training.sweeps import sweep as curves
from opusim.training.sweeps.execution import run_point, run_sweep
from opusim.training.sweeps.sweep import (
    Point,
    Row,
    SweepFolder,
    SweepResult,
    SweepSpec,
    failed_row,
    points_of,
    read_row,
    read_spec,
    write_row,
)

SPEC = """\
title = "Digits at three noises"
[config]
epochs = {epochs}
model.hidden = [16]
[axes]
seed = {seeds}
[[series]]
name = "photonic"
[series.axes]
device.noise.sigma = [0.0, 1.0, 20.0]
[[series]]
name = "protected"
[series.config]
trainer.kind = "bp"
sampler.scheme = "poisson"
protection.kind = "record"
[series.axes]
protection.epsilon = [1.0, 8.0]
[[series]]
name = "backpropagation"
reference = true
config = {{ trainer = {{ kind = "bp" }} }}
[[published]]
name = "a method of others"
epsilon = [2.0, 4.0]
accuracy = [70.0, 75.0]
"""
PLAIN = SPEC.partition("[[series]]")[0]


def written(tmp_path: Path, *, epochs: int = 1, seeds: str = "[0, 1]", text: str = SPEC) -> Path:
    file = tmp_path / "spec.toml"
    file.write_text(text.format(epochs=epochs, seeds=seeds))
    return file


def swept(file: Path, folder: SweepFolder) -> tuple[SweepSpec, list[Point], dict[str, Row]]:
    spec, origin = read_spec(file)
    points = points_of(spec, origin)
    return spec, points, run_sweep(points, folder, jobs=1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepResult, Path]:
    path = tmp_path_factory.mktemp("sweep")
    file, folder = written(path), SweepFolder(path / "sweep")
    spec, points, rows = swept(file, folder)
    result = SweepResult(spec=spec, points=points, rows=rows, folder=folder)
    return result, write_sweep(result, file.read_text())


def test_every_run_is_an_ordinary_run_folder_with_a_row(finished: tuple[SweepResult, Path]) -> None:
    result, _ = finished
    assert len(result.rows) == 3 * 2 + 2 * 2 + 2
    for point in result.points:
        row, run = result.rows[point.identity], load_run(result.folder.run_path(point))
        assert row.status == "done"
        assert row.accuracy == run.summary["test_accuracy"]
        stated = point.config.model_copy(update={"protection": run.config.protection})
        assert run.config.digest() == stated.digest()
        assert row.proven_epsilon == min(g.epsilon for g in run.guarantees)


def test_the_curves_are_means_and_standard_errors_of_the_rows(finished: tuple[SweepResult, Path]) -> None:
    result, _ = finished
    (curve,) = curves.accuracy_against_noise(result)
    assert [level.x for level in curve.levels] == [0.0, 1.0, 20.0]
    noisy = [point for point in result.points if point.values.get("device.noise.sigma") == 1.0]
    accuracies = [100 * (result.rows[point.identity].accuracy or math.nan) for point in noisy]
    assert curve.levels[1].mean == pytest.approx(sum(accuracies) / 2)
    assert curve.levels[1].error == pytest.approx(abs(accuracies[0] - accuracies[1]) / 2)
    assert accuracies[0] != accuracies[1]
    (private,) = curves.accuracy_against_epsilon(result)
    assert (private.name, private.kind) == ("protected", "proven")
    assert [level.x for level in private.levels] == pytest.approx([1.0, 8.0], rel=0.01)
    (epsilon,) = curves.epsilon_against_noise(result)
    assert epsilon.kind == "proven"
    assert all(math.isinf(level.mean) for level in epsilon.levels)
    assert [curve.name for curve in curves.references(result)] == ["backpropagation"]


def test_a_finished_run_is_never_made_again(tmp_path: Path) -> None:
    file, folder = written(tmp_path, text=PLAIN, seeds="[0, 1]"), SweepFolder(tmp_path / "sweep")
    _, points, _ = swept(file, folder)
    before = {point.identity: _stamp(folder, point) for point in points}
    more = written(tmp_path, text=PLAIN, seeds="[0, 1, 2]")
    _, points, rows = swept(more, folder)
    assert len(rows) == 3
    assert {p.identity: _stamp(folder, p) for p in points if p.identity in before} == before


def test_a_row_is_made_from_a_run_that_ended_without_one(tmp_path: Path) -> None:
    file, folder = written(tmp_path, text=PLAIN, seeds="[0]"), SweepFolder(tmp_path / "sweep")
    _, (point,), rows = swept(file, folder)
    before = _stamp(folder, point)
    folder.row_path(point).unlink()
    _, _, again = swept(file, folder)
    assert _stamp(folder, point) == before
    assert again[point.identity].figures == rows[point.identity].figures


def test_release_runs_are_measured_on_test_records_alone(tmp_path: Path) -> None:
    text = PLAIN.replace("[config]", '[config]\nmode = "release"')
    file, folder = written(tmp_path, text=text, seeds="[0]"), SweepFolder(tmp_path / "sweep")
    _, (point,), rows = swept(file, folder)
    row = rows[point.identity]
    assert row.accuracy == evaluate_run(folder.run_path(point))["accuracy"]
    assert not {"train_accuracy", "validation_accuracy", "frames"} & set(row.figures)


def test_a_release_run_with_a_seed_in_its_spec_goes_on(tmp_path: Path, ctrl_c_at: type) -> None:
    """Release mode uses no seed and keeps none, so a resumed run must not miss the one that its point names."""
    text = PLAIN.replace("[config]", '[config]\nmode = "release"')
    (point,) = points_of(*read_spec(written(tmp_path, text=text, seeds="[3]")))
    folder = SweepFolder(tmp_path / "sweep")
    run_folder = RunFolder(folder.run_path(point))
    with pytest.raises(RunInterrupted):
        train_on(point.config, build_dataset(point.config.data), run_folder, watcher=ctrl_c_at(1))
    row = run_point(point.config, run_folder.path, folder.row_path(point))
    assert (row.status, row.reason) == ("done", None)


def test_a_failure_is_a_row_with_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    text = PLAIN + "sampler.batch_size = [256, 100_000]\n"
    file, folder = written(tmp_path, text=text, seeds="[0]"), SweepFolder(tmp_path / "sweep")
    spec, points, rows = swept(file, folder)
    good, bad = (rows[point.identity] for point in points)
    assert good.status == "done"
    assert bad.status == "failed"
    assert bad.reason is not None
    assert "exceeds the" in bad.reason
    result = SweepResult(spec=spec, points=points, rows=rows, folder=folder)
    assert "exceeds the" in write_sweep(result, "").read_text()
    assert run_sweep(points, folder, jobs=1)[points[1].identity] == bad  # kept, not tried again
    retried = run_sweep(points[1:], folder, jobs=1, retry_failed=True)[points[1].identity]
    assert retried.status == "failed"


@pytest.mark.parametrize("foretold", [False, True])
def test_a_device_too_small_for_a_network_refuses_the_sweep_before_any_run(
    foretold: bool, tmp_path: Path
) -> None:
    text = SPEC.split("[[series]]")[0].replace(
        "model.hidden = [16]", 'device.n_outputs = 20\ndevice.name = "camera"'
    )
    file, folder = (
        written(tmp_path, text=text + "model.hidden = [[16], [16, 8]]\n"),
        SweepFolder(tmp_path / "sweep"),
    )
    points = points_of(*read_spec(file))
    told: list[Any] = []
    with pytest.raises(
        ConfigError, match="n_outputs: is 20, and this run's network needs 24; make the network"
    ):
        run_sweep(points, folder, jobs=1, on_forecast=told.append if foretold else None)
    assert not told
    assert not any(folder.run_path(point).exists() or folder.row_path(point).exists() for point in points)


def test_equal_failures_are_one_line_with_their_count(tmp_path: Path) -> None:
    text = SPEC.split("[[series]]")[0].replace(
        "[axes]", 'trainer.kind = "bp"\nsampler.batch_size = 100_000\n[axes]'
    )
    words = [str(written(tmp_path, text=text)), "--out", str(tmp_path / "sweep"), "--jobs", "1"]
    result = CliRunner().invoke(curve_app, words)
    assert result.exit_code == 1
    lines = [line for line in result.stdout.splitlines() if line.startswith("failed:")]
    assert len(lines) == 1
    assert re.match(r"failed: 2 runs: .*exceeds the", lines[0])
    assert result.stderr.count("exceeds the") == 1


def test_processes_that_die_early_stop_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing says which run they died over, so no run can be given up: trying again would never end."""
    tries = []

    def dying(*_: object, **__: object) -> Iterator[Row]:
        tries.append(1)
        assert len(tries) < 10, "the sweep never stops"
        raise TerminatedWorkerError
        yield

    monkeypatch.setattr(execution, "_here", dying)
    with pytest.raises(SweepStopped, match="3 processes died before they started a run.*fewer --jobs"):
        swept(written(tmp_path, text=PLAIN, seeds="[0]"), SweepFolder(tmp_path / "sweep"))


def test_the_command_refuses_a_bad_spec_before_anything_runs(tmp_path: Path) -> None:
    file = written(tmp_path, seeds="[]")
    out = tmp_path / "sweep"
    done = subprocess.run(_command(file, out), capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{file}, series 'photonic': axes.seed: is empty" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not out.exists()


def _kill_a_worker(parent: subprocess.Popen[str]) -> None:
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    workers = [pid for pid in children if "loky" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(int(workers[-1]), signal.SIGKILL)
    parent.wait(timeout=240)


def _kill_the_parent(parent: subprocess.Popen[str]) -> None:
    parent.kill()
    parent.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [_kill_a_worker, _kill_the_parent])
def test_a_killed_sweep_repeats_and_mixes_no_runs(tmp_path: Path, kill: Callable) -> None:
    file, out = written(tmp_path, text=PLAIN, seeds=str(list(range(8))), epochs=60), tmp_path / "sweep"
    folder = SweepFolder(out)
    points = points_of(*read_spec(file))
    parent = subprocess.Popen(_command(file, out), text=True, stdout=subprocess.DEVNULL)
    _wait_until(lambda: sum(folder.row_path(point).exists() for point in points) >= 2, parent)
    before = {p.identity: _stamp(folder, p) for p in points if folder.row_path(p).exists()}
    kill(parent)
    subprocess.run(_command(file, out), check=True, capture_output=True)
    unbroken = SweepFolder(tmp_path / "unbroken")
    wanted = run_sweep(points, unbroken, jobs=2)
    rows = folder.rows(points)
    assert {p.identity: _stamp(folder, p) for p in points if p.identity in before} == before
    for point in points:
        assert rows[point.identity].figures == wanted[point.identity].figures
        for name in ("metrics.jsonl", "ledger.jsonl"):
            mine, theirs = (f.run_path(point) / name for f in (folder, unbroken))
            assert len(mine.read_text().splitlines()) == len(theirs.read_text().splitlines())


def _command(file: Path, out: Path) -> list[str]:
    code = "from opusim.training.cli import main; main()"
    return [sys.executable, "-c", code, "curve", str(file), "--out", str(out), "--jobs", "2"]


def _wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert process.poll() is None, "the sweep ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _stamp(folder: SweepFolder, point: Point) -> tuple[int, int]:
    """What changes when a run's summary is written again."""
    status = (folder.run_path(point) / "summary.json").stat()
    return status.st_ino, status.st_mtime_ns


def test_an_edited_row_is_refused_and_an_old_one_warns(tmp_path: Path) -> None:
    file = tmp_path / "rows" / "bp-1.json"
    row = Row(identity="bp-1", status="done", figures={"test_accuracy": 0.5})
    write_row(file, row)
    sound = file.read_text()
    assert read_row(file) == row
    file.write_text(sound.replace("0.5", "0.9"))
    with pytest.raises(RunFolderError, match=r"bp-1\.json was changed since it was written .*; delete it"):
        read_row(file)
    content = json.loads(sound)
    del content["seal"]
    file.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="rows: has no digest"):
        assert read_row(file) == row


def test_figures_and_data_are_there(finished: tuple[SweepResult, Path]) -> None:
    result, report = finished
    assert "http" not in report.read_text().replace("http://www.w3.org", "")  # self-contained
    tables = {}
    for name in ("accuracy-noise", "epsilon-noise", "accuracy-epsilon", "cost"):
        assert (result.folder.figures / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        tables[name] = list(csv.DictReader((result.folder.figures / f"{name}.csv").read_text().splitlines()))
        assert tables[name]
    marks = [row for row in tables["accuracy-epsilon"] if row["kind"] == "published"]
    assert [(float(row["x"]), float(row["mean"])) for row in marks] == [(2.0, 70.0), (4.0, 75.0)]
    table = list(csv.DictReader(result.folder.table_file.read_text().splitlines()))
    assert len(table) == len(result.points) == len(json.loads(result.folder.data_file.read_text())["runs"])
    assert {row["epsilon_proven"] for row in table if row["series"] == "photonic"} == {"inf"}


@pytest.mark.parametrize(("cluster", "left"), [(None, 5.0), ("tcp://127.0.0.1:1", None)])
def test_the_time_left_is_estimated_of_local_processes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str | None, left: float | None
) -> None:
    points = points_of(*read_spec(written(tmp_path, seeds="[0, 1, 2]")))[:2]
    rows = [replace(failed_row(each.identity, "none"), status="finished", wall_s=10.0) for each in points]
    for name in ("_here", "_on_cluster"):
        monkeypatch.setattr(execution, name, lambda *_: (row for row in rows))
    told: list[float | None] = []
    folder = SweepFolder(tmp_path / "sweep")
    run_sweep(points, folder, jobs=2, cluster=cluster, on_row=lambda row, left: told.append(left))
    assert told == [left, None if cluster else 0.0]


def test_a_sweep_tells_what_its_missing_runs_take_of_their_devices(tmp_path: Path) -> None:
    more = '[[series]]\nname = "cannot run"\nconfig = {{ sampler.batch_size = 100_000 }}\n'
    points = points_of(*read_spec(written(tmp_path, seeds="[0]", text=SPEC + more)))
    folder, told = SweepFolder(tmp_path / "sweep"), []
    run_sweep(points, folder, jobs=1, on_forecast=told.append)
    runs = [RunFolder(folder.run_path(p)).read_facts() for p in points if p.series == "photonic"]
    frames = [facts["expected"]["frames"] for facts in runs]
    shutil.rmtree(folder.run_path(points[0]))
    folder.row_path(points[0]).unlink()
    run_sweep(points, folder, jobs=1, on_forecast=told.append)
    found = [(each.usage.frames, each.runs, each.silent) for each in told]
    assert found == [(sum(frames), 3, 1), (frames[0], 1, 0)]
