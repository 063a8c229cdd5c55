"""The command as a person types it, and `opusim doctor`: output, exit codes, one-line errors."""

import importlib.metadata
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from opusim.training.cli import app, doctor
from opusim.training.cli.train import Announced, small_batch, unused_records
from opusim.training.config.run import RunConfig
from opusim.training.data.formats import IMAGE_FILES
from tests.support.command import COMMAND, ROOT, opusim, opusim_process
from tests.support.packages import install

SMALL = ["--epochs", "2", "--set", "model.hidden=[16]", "--set", "threads=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    result = opusim("train", "pdfa", *SMALL, "--sigma", "0.2", "--out", "run", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "test accuracy" in result.stdout
    assert "not for release" in result.stdout
    return folder / "run"


def test_a_released_run_keeps_no_private_figure(tmp_path: Path) -> None:
    line = "--protect record --noise-multiplier 1.0 --release --set sampler.batch_size=64"
    result = opusim("train", "pdfa", *SMALL, *line.split(), "--out", "run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "proven" in result.stdout
    assert "not for release" not in result.stdout
    (row,) = [line for line in result.stdout.splitlines() if "pdfa on digits" in line]
    assert row.count("–") == 8  # nothing that was withheld is shown as 0
    run = tmp_path / "run"
    for record in (run / "metrics.jsonl").read_text().splitlines():
        assert set(json.loads(record)) == {"schema_version", "epoch", "step"}
    assert set(json.loads((run / "summary.json").read_text())) == {"schema_version", "steps", "seal"}
    assert not (run / "timing.jsonl").exists()
    assert "fingerprint" not in (run / "config.json").read_text()
    audited = opusim("audit", "run", "--trials", "40", "--out", "audit", cwd=tmp_path)
    assert "Not for release: this audit holds figures of private records" in audited.stderr
    assert (tmp_path / "audit" / "audit.json").exists()
    assert not (run / "audit.json").exists()


def test_evaluate_gives_the_figure_of_the_run(run: Path) -> None:
    result = opusim("evaluate", str(run), "--json", cwd=run.parent)
    figures = json.loads(result.stdout)
    summary = json.loads((run / "summary.json").read_text())
    assert figures["accuracy"] == summary["test_accuracy"]
    assert "accuracy" in opusim("evaluate", str(run), cwd=run.parent).stdout


def test_a_finished_run_without_checkpoints_is_not_sent_in_a_circle(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "checkpoints")
    result = opusim("evaluate", "copy", cwd=tmp_path)
    assert result.returncode == 2
    assert "holds a finished run without its checkpoints" in result.stderr


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    command = f"{sys.executable} -m opusim audit --help | true"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert found.stderr == ""


def test_evaluate_takes_a_persons_file(run: Path) -> None:
    np.savez(run.parent / "mine.npz", x=np.zeros((10, 64)), y=np.arange(10))
    result = opusim("evaluate", str(run), "--data", "npz:mine.npz", cwd=run.parent)
    assert "10 records of mine.npz" in result.stdout
    assert "accuracy 10.00 % (no better than guessing: 10 %)" in result.stdout


@pytest.mark.slow
def test_a_missing_package_is_one_line(tmp_path: Path) -> None:
    """`python -c` puts the working folder first, so that this module stands for a package that cannot be found."""
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('no transformers here')\n")
    (tmp_path / "texts.tsv").write_text("a film\t0\nanother\t1\n")
    call = ["train", "zo", "--language-model", "nowhere", "--text", "texts.tsv"]
    result = opusim_process(*call, cwd=tmp_path)
    assert result.returncode == 2
    assert "\nopusim: transformers is missing; language models need it" in f"\n{result.stderr}"
    assert "Traceback" not in result.stderr


def test_the_configuration_of_a_run_redoes_it(run: Path) -> None:
    call = ("train", "pdfa", "--config", run / "config.json", "--quiet", "--out", "again")
    result = opusim(*call, cwd=run.parent)
    assert result.returncode == 0, result.stderr
    assert (run.parent / "again" / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(("line", "message"), [
    ("train pdfa --data mnits", "--data 'mnits': must be one of"),
    ("train pdfa --protect record --epsilon 3 --delta 0", "infinite at delta = 0 whatever the noise"),
    ("train pdfa --config nowhere.toml", "nowhere.toml.*cannot be read"),
    ("train pdfa --device nowhere.toml", "nowhere.toml"),
    ("evaluate nowhere", "holds no run"),
    ("audit nowhere", "holds no run"),
    ("evaluate nowhere --chip 1", "--chip 1: only a device.*--device"),
    ("evaluate nowhere --after 1d", "--after 1d: only a device.*--device"),
    ("train resume nowhere", "holds no run"),
    ("report nowhere", "holds no run"),
    ("train bp --data mnist", "OPUSIM_DATA"),
    ("train pdfa --set trainer.kind=bp", "contradicts the command"),
    ("train pdfa --out /dev/null/run", "cannot be used.*choose another folder"),
    ("tune convex --epsilon 3 --trials 0 --out search", "--trials 0.0: must be .*above 0"),
    ("device calibrate gaussian --out /dev/null/x", "/dev/null/x.*choose another"),
    ("device record camera --out /dev/null/x", "/dev/null/x.*choose another"),
    ("device temperature camera_low_light --figure none/x.png", "none/x.png.*cannot be written"),
    ("account device camera_low_light --figure none/x.png", "none/x.png.*cannot be written"),
    ("account device camera_low_light --figure x.txt", "x.txt.*[.]png"),
    ("audit --mechanism dfa --out /dev/null/x.json", "/dev/null/x.json.*cannot be written"),
])  # fmt: skip
def test_bad_input_is_one_line_and_an_exit_code(tmp_path: Path, line: str, message: str) -> None:
    result = opusim(*line.split(), cwd=tmp_path, OPUSIM_DATA=str(tmp_path))
    assert result.returncode == 2, result.stderr
    (told,) = result.stderr.strip().splitlines()
    assert told.startswith("opusim: ")
    assert re.search(message, told)
    assert not list(tmp_path.iterdir())  # nothing is left behind


def test_what_a_kill_costs_is_said_when_training_begins_and_not_before_a_refusal(tmp_path: Path) -> None:
    private = ["--protect", "record", "--epsilon", "3", "--release", "--quiet", *SMALL, "--out", "run"]
    trained = opusim("train", "bp", *private, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert trained.stderr.startswith("release mode: stop it with Ctrl-C only; a kill")
    refused = opusim("train", "resume", "run", cwd=tmp_path)
    assert refused.returncode == 2
    (line,) = refused.stderr.strip().splitlines()
    assert "holds a finished run" in line


def test_a_disk_without_room_is_named_and_the_run_goes_on_later(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the full disk: the kernel refuses the checkpoint's write."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))

    arguments = [*COMMAND, "train", "pdfa", "--epochs", "2", "--set", "threads=1", "--out", "run", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_DISABLE_JIT": "0"}
    result = subprocess.run(
        arguments, capture_output=True, text=True, cwd=tmp_path, env=environment, preexec_fn=limit
    )
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    told = r"File too large; it keeps its old content, free some space and resume.*step-\d+.safetensors"
    assert re.search(told, lines[0])
    assert not (tmp_path / "run" / "config.json").exists()
    assert opusim("train", "pdfa", "--epochs", "1", "--quiet", "--out", "run", cwd=tmp_path).returncode == 0


def test_devices_can_be_looked_at(tmp_path: Path) -> None:
    assert "gaussian" in opusim("device", "list", cwd=tmp_path).stdout
    shown = opusim("device", "show", "gaussian", cwd=tmp_path).stdout
    assert "noise.sigma" in shown
    assert "assumed" in shown


def test_several_runs_share_a_report(run: Path) -> None:
    other = opusim("train", "bp", *SMALL, "--quiet", "--out", "bp", cwd=run.parent)
    assert other.stdout.strip() == "bp"
    result = opusim("report", "run", "bp", "--out", "both.html", cwd=run.parent)
    assert result.returncode == 0, result.stderr
    page = (run.parent / "both.html").read_text()
    assert "bp on digits" in page
    assert "pdfa on digits" in page


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = opusim("evaluate", "nowhere", "--debug", cwd=tmp_path)
    assert "Traceback" in result.stderr


def test_a_program_error_is_no_alarm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def broken() -> None:
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(app, "_take_wait", broken)
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == app.BROKEN
    assert "shape mismatch" in capsys.readouterr().err


def test_a_small_batch_under_record_is_said_before_training() -> None:
    record = {"protection": {"kind": "record", "epsilon": 3.0}, "trainer": {"kind": "bp"}}
    for size, config, said in (
        (64, record, True),
        (200, record, False),
        (8, {"trainer": {"kind": "bp"}}, False),
    ):
        config = RunConfig.model_validate({**config, "sampler": {"batch_size": size}})
        assert (small_batch(config) is not None) is said
    users = {"kind": "record", "unit": "user", "records_per_user": 5, "epsilon": 3.0}
    config = RunConfig.model_validate({**record, "protection": users, "sampler": {"batch_size": 64}})
    assert "batch_size = 64 users" in str(small_batch(config))


def test_what_is_said_before_training_is_as_wide_as_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    Announced("several hundred records and fewer steps learn more; " * 4).on_start(step=0, total_steps=1)
    assert 60 < max(map(len, capsys.readouterr().err.splitlines())) <= 80


@pytest.mark.parametrize(
    ("mode", "held_out", "said"), [("release", 0.1, True), ("release", 0, False), ("experiment", 0.1, False)]
)
def test_a_release_says_that_held_out_records_serve_nothing(mode: str, held_out: float, said: bool) -> None:
    values = {"mode": mode, "data": {"validation_fraction": held_out}, "trainer": {"kind": "bp"}}
    config = RunConfig.model_validate({**values, "protection": {"kind": "record", "epsilon": 3.0}})
    assert ("validation_fraction = 0.1" in str(unused_records(config))) is said


Patch = pytest.MonkeyPatch


def test_a_sound_installation_is_described_without_its_folders(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("OPUSIM_DATA", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "secret-word")
    for file in IMAGE_FILES:
        place = tmp_path / "MNIST" / "raw" / f"{file}.gz"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(bytes(512))
    result = opusim("doctor", "--json", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    content = json.loads(result.stdout)
    assert (content["schema"], content["version"], content["broken"]) == ("opusim-doctor", 1, [])
    found = {t: {one["what"]: one["found"] for one in facts} for t, facts in content["sections"].items()}
    assert found["Versions"]["opusim"] == importlib.metadata.version("opusim")
    assert {"torch", "numpy", "numba"} <= set(found["Versions"])
    assert found["Devices"]["gaussian"] == "can be opened"
    assert found["Kernels"]["test projection"].endswith("as it must")
    assert (found["Data"]["mnist"], found["Data"]["cifar-10"]) == ("found, 2.0 KiB", "not in OPUSIM_DATA")
    assert all(part not in result.stdout for part in (str(tmp_path), str(Path.home()) + "/", "secret-word"))


def missing_library(tmp_path: Path, patch: Patch) -> None:
    needed = ["numpy>=999", "no-such-library>=2", 'no-such-extra; extra == "llm"']
    patch.setattr(importlib.metadata, "requires", lambda name: needed)


def broken_package(tmp_path: Path, patch: Patch) -> None:
    patch.setattr(Path, "home", lambda: tmp_path)
    source = f"raise RuntimeError('no licence in {tmp_path}/key')"
    install(patch, tmp_path, "lab_broken", "opusim.devices", {"lab_bench": "lab_broken:Bench"}, source)


def incomplete_data(tmp_path: Path, patch: Patch) -> None:
    patch.setenv("OPUSIM_DATA", str(tmp_path))
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / "MNIST" / "raw" / IMAGE_FILES[0]).touch()


@pytest.mark.parametrize(("section", "plant", "found"), [
    ("Versions", missing_library, {"numpy": "; opusim needs numpy>=999", "no-such-library": "missing; opusim"}),
    ("Entry points", broken_package, {"opusim.devices lab_bench": "(RuntimeError: no licence in ~/key)"}),
    ("Kernels", lambda _, patch: patch.setattr(doctor, "PROJECTION", "0"), {"test projection": "results are wrong"}),
    ("Kernels", lambda _, patch: patch.setitem(sys.modules, "numba", None), {"failed": "ModuleNotFoundError"}),
    ("Data", incomplete_data, {"mnist": "incomplete: MNIST/raw/train-labels"}),
    ("Data", lambda _, patch: patch.setenv("OPUSIM_DATA", "/gone"), {"failed": "$OPUSIM_DATA, which is not a folder"}),
])  # fmt: skip
def test_a_planted_fault_is_found(
    tmp_path: Path, monkeypatch: Patch, section: str, plant: Callable[[Path, Patch], None], found: dict[str, str],
) -> None:  # fmt: skip
    look = doctor._SECTIONS[section]
    assert not [fact for fact in doctor._looked_at(look) if fact.broken]
    plant(tmp_path, monkeypatch)
    broken = {fact.what: fact.found for fact in doctor._looked_at(look) if fact.broken}
    assert list(broken) == list(found)
    assert all(words in broken[what] for what, words in found.items())


def test_a_device_of_another_package_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    broken_package(tmp_path, monkeypatch)
    found = {fact.what: fact.found for fact in doctor._looked_at(doctor._SECTIONS["Devices"])}
    assert found["kind lab_bench of lab_broken"] == "cannot be used, see Entry points"


def test_an_extra_that_is_not_installed_is_not_broken(monkeypatch: Patch) -> None:
    needed = ['numpy>=999; extra == "lighton"', 'no-such-library; extra == "lighton"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needed)
    assert not any(fact.broken for fact in doctor._versions())
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needed[:1])
    assert any(fact.broken for fact in doctor._versions())
