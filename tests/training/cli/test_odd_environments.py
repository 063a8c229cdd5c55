"""Commands under odd names, variables and streams, and with code that calls `exit()`: one line, before any work."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from opusim.errors import ConfigError
from opusim.files import output_folder, quoted, require_writable, require_writable_folder
from opusim.processes.ranks import Ranks
from opusim.training.cli import app
from opusim.training.errors import RunFolderError
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import GrowingFile, Prefix, append_line, digest_of, only_writer
from tests.support import run_folders
from tests.support.command import ROOT, opusim

NOT_UTF8 = os.fsdecode(b"run\xff")


@pytest.mark.parametrize(("variable", "value", "line"), [
    ("WORLD_SIZE", "abc", "must be a whole number of processes, in [1, 1,048,576]"),
    ("WORLD_SIZE", "0", "must be a whole number of processes, in [1, 1,048,576]"),
    ("WORLD_SIZE", "1.5", "must be a whole number of processes, in [1, 1,048,576]"),
    ("OPUSIM_WAIT", "nan", "must be a number of seconds, at least 0"),
    ("OPUSIM_WAIT", "inf", "must be a number of seconds, at least 0"),
    ("OPUSIM_WAIT", "-1", "must be a number of seconds, at least 0"),
])  # fmt: skip
def test_a_variable_that_is_no_number(tmp_path: Path, variable: str, value: str, line: str) -> None:
    result = opusim("device", "list", cwd=tmp_path, **{variable: value})
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"opusim: {variable} = {value!r}: {line}; correct or unset it\n"


def test_rank_and_time_out_are_checked_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = opusim("train", "bp", cwd=tmp_path, WORLD_SIZE="2", RANK="2")
    assert "RANK = '2': must be a whole number of processes before this one, in [0, 1]" in result.stderr
    for value in ("nan", "1e300", "0"):
        monkeypatch.setenv("OPUSIM_PROCESS_TIMEOUT_S", value)
        with pytest.raises(ValueError, match=rf"PROCESS_TIMEOUT_S = '{value}': must be a number of seconds"):
            Ranks()
    result = opusim("--wait", "\N{SUPERSCRIPT TWO}", "device", "list", cwd=tmp_path)
    assert result.stderr.startswith("opusim: --wait ")


def test_a_name_that_is_not_utf8_is_refused_before_any_work(tmp_path: Path) -> None:
    result = opusim("train", "bp", "--out", NOT_UTF8, cwd=tmp_path)
    assert result.returncode == 2
    said = "opusim: command line: run\\xff: is not UTF-8; choose another name, or rename it\n"
    assert result.stderr == said
    path = tmp_path / NOT_UTF8
    with pytest.raises(RunFolderError, match="is not UTF-8"), only_writer(path, "run folder"):
        pass
    with pytest.raises(ConfigError, match="is not UTF-8"), output_folder(path):
        pass
    with pytest.raises(ConfigError, match="is not UTF-8"):
        require_writable(path, "--out")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        require_writable_folder(tmp_path / "file" / "out")
    require_writable_folder(tmp_path / "a" / "b")
    require_writable_folder(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]

    def read_only(*_: Any, **__: Any) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("opusim.files.tempfile.TemporaryFile", read_only)
    for check in (require_writable_folder, lambda path: require_writable(path / "x.json", "--out")):
        with pytest.raises(ConfigError, match=r"cannot be written \(Read-only file system\)"):
            check(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def work(*_: Any, **__: Any) -> Any:
    raise AssertionError("it worked before it checked")


@pytest.mark.parametrize("kind", [[], ["--one-run"], ["--final-model"]])
def test_an_audit_checks_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: list[str]) -> None:
    run = run_folders.made(tmp_path / "run")
    (tmp_path / "file").write_text("")
    for module in ("run_audit", "one_run.audit", "one_run.final_model"):
        monkeypatch.setattr(f"opusim.training.attacks.{module}.read_run", work, raising=False)
        monkeypatch.setattr(f"opusim.training.attacks.{module}.RunPlan.stored", work, raising=False)
    result = opusim("audit", run, *kind, "--out", "file/audit", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    said = "opusim: --out: file/audit: cannot be written (file is no folder); choose another folder"
    assert result.stderr.strip() == said


def test_training_checks_first_that_it_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opusim.training.engine.session.load_data", work)
    (tmp_path / "file").write_text("")
    result = opusim("train", "bp", "--out", "file/run", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    said = "opusim: run folder file/run cannot be used (file is no folder); choose another folder"
    assert result.stderr.strip() == said


def test_zo_replay_checks_first_that_it_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opusim.training.zeroth_order.step_log.replay", work)
    result = opusim("zo", "replay", "run", "--out", "missing/final.safetensors", cwd=tmp_path)
    assert (result.returncode, "cannot be written" in result.stderr) == (2, True)


@pytest.mark.parametrize("name", ["my run", "a;b", "it's", "-run", "plain"])
def test_a_printed_command_can_be_copied_into_a_shell(tmp_path: Path, name: str) -> None:
    *words, last = shlex.split(RunFolder(tmp_path / name).resume_command)
    assert (words, last) == (["opusim", "train", "resume"], str(tmp_path / name))
    assert Path(shlex.split(quoted(name))[0]) == Path(name)
    assert not quoted(name).startswith("-")


def test_two_spaces_in_a_name_stay_in_an_error(tmp_path: Path) -> None:
    result = opusim("account", "run", "a  b", cwd=tmp_path)
    assert "a  b" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("code", ["import sys\nsys.exit()", "exit(3)"])
@pytest.mark.parametrize("where", ["import", "call"])
def test_code_of_a_user_that_exits_ends_no_command_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, where: str
) -> None:
    module = f"leaving_{where}_{len(code)}"
    body = code if where == "import" else "def factory(**_):\n    " + code.replace("\n", "\n    ")
    (tmp_path / f"{module}.py").write_text(body + "\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    result = opusim("train", "bp", "--epochs", "1", "--model", f"{module}:factory", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert ("SystemExit" if where == "import" else f"{module}.py:") in result.stderr


STREAMS = """
import os, sys
from opusim.training.cli import app
for number in (0, 2):
    os.close(number)
sys.stdin = sys.stderr = None
sys.argv = ["opusim", "lst"]
app._mend_streams()
assert os.open("ledger", os.O_CREAT | os.O_RDWR) > 2
print("4.3 \N{MICRO SIGN}s")
app.main()
"""


def test_closed_and_ascii_streams_are_no_obstacle(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", STREAMS], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "4.3 \\xb5s\n", "")
    assert (tmp_path / "ledger").read_bytes() == b""


def test_a_completion_still_ends_by_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_OPUSIM_COMPLETE", "complete_bash")
    with pytest.raises(SystemExit):
        app._without_exit(sys.exit)


@pytest.mark.parametrize("value", ["-1", "NaN", "Infinity"])
def test_a_wall_time_that_no_clock_measures_is_refused(tmp_path: Path, value: str) -> None:
    folder = RunFolder(run_folders.made(tmp_path / "run"))
    folder.append_timing({"wall_s": 1.0})
    number = len(folder.read_timing()) + 1
    with folder.timing_file.open("a") as file:
        file.write(f'{{"wall_s": {value}}}\n')
    with pytest.raises(RunFolderError, match=rf"line {number}: wall_s = \S+: must be finite and at least 0"):
        folder.read_timing()


def test_a_seal_reads_only_what_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "metrics.jsonl", list[int]()
    file = GrowingFile(path)
    assert file.prefix() == Prefix(bytes=0, digest=digest_of(b""))
    original = Path.read_bytes

    def counted(name: Path, *, at_most: int, start: int = 0) -> bytes:
        content = original(name)[start:]
        read.append(len(content))
        return content

    monkeypatch.setattr("opusim.training.runs.storage.read_bytes", counted)
    for epoch in range(50):
        append_line(path, {"epoch": epoch})
        found, content = file.prefix(), original(path)
        assert found == Prefix(bytes=len(content), digest=digest_of(content))
        assert read[-1] == len(json.dumps({"epoch": epoch})) + 1
    path.write_bytes(original(path)[:20])
    assert file.prefix() == Prefix(bytes=20, digest=digest_of(original(path)))


def test_a_device_of_the_program_resumes_by_the_program(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    by_program = f"opusim.train(folder={str(tmp_path)!r}, resume=True)"
    for kind, words in (("my_kind", by_program), ("camera", "opusim train")):
        folder.config_file.write_text(json.dumps({"device": {"kind": kind}}))
        assert folder.resume_command.startswith(words)
