"""One device for several processes against one process with the whole batch; locks never write through a link."""

import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from opusim import NoisyDevice, RunFolderError, open_device, open_shared_device
from opusim.devices.access import (
    FOLDER_VARIABLE,
    ExclusiveUse,
    LockHeld,
    held,
    is_held,
    lock_file,
    lock_folder,
)
from opusim.errors import DeviceUnavailable, NoiseUnknown
from opusim.noise import GaussianNoise
from opusim.testing.contract import N_INPUTS, N_OUTPUTS, DeviceContract
from opusim.training.runs.storage import LOCK_FILE, only_writer
from tests.opusim.common import refuses
from tests.support.shared_device_ranks import ENCODINGS, PARTS, SHARES, rank_tensors

ROOT = Path(__file__).parents[3]
TRAINED = [f"{encoding} {parts}" for encoding in ENCODINGS for parts in PARTS]


class TestOneProcess(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        return open_shared_device("gaussian", n_inputs=N_INPUTS, n_outputs=N_OUTPUTS, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes and one found; see tests.support.shared_device_ranks."""
    path = tmp_path_factory.mktemp("shared")
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-m", "tests.support.shared_device_ranks", str(path)]
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT, env=settings, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def found(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(folder / f"{name}.pt", weights_only=False)
    return content


def distance(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("case", TRAINED)
def test_data_parallel_training_is_that_of_one_process(folder: Path, case: str) -> None:
    """The same noise and the same drawn codes reach each record, so that the parameters differ by rounding only."""
    parameters, usage = found(folder, "train.single")[case.split()[0]]
    both = [found(folder, f"train.{rank}")[case] for rank in (0, 1)]
    assert distance(both[0][0], both[1][0]) == 0
    assert distance(both[0][0], parameters) < 1e-6
    assert both[0][1] == both[1][1] == usage


def test_other_noise_would_be_seen_and_a_lost_process_ends_the_call_of_the_others(folder: Path) -> None:
    """The planted fault: codes or noise of other rows move the parameters by far more than rounding."""
    single = found(folder, "train.single")
    assert distance(single["ternary"][0], single["stochastic"][0]) > 1e-3
    for name, limit in (("hang.0", 6.0), ("first dies.1", 30.0), ("second dies.0", 30.0)):
        end = found(folder, name)
        assert end["error"][0] == "ProcessLost"
        assert end["seconds"] < limit


def test_readings_are_those_of_one_process_in_the_order_of_ranks(folder: Path) -> None:
    one, (first, second) = (found(folder, "read.single"), (found(folder, f"read.{rank}") for rank in (0, 1)))
    for kind in ("readings", "drawn"):
        for step in range(len(SHARES)):
            assert torch.equal(torch.cat([first[kind][step], second[kind][step]]), one[kind][step])
    assert torch.equal(first["for all"], one["for all"])
    assert torch.equal(second["for all"], one["for all"])
    assert {key: first[key] for key in ("law", "frames")} == {key: one[key] for key in ("law", "frames")}
    assert (first["law"], first["frames"]) == (second["law"], second["frames"])
    assert (first["holds"], second["holds"]) == (True, False)


def test_an_error_of_one_process_is_raised_in_both(folder: Path) -> None:
    both = [found(folder, f"errors.{rank}") for rank in (0, 1)]
    assert both[0] == both[1]
    kinds = {name: error[0] for name, error in both[0].items() if name != "shape"}
    assert kinds == {
        "opening": "ConfigError",
        "fault": "DeviceFault",
        "after the fault": "none",
        "rows of rank 1": "ValueError",
        "shape of rank 1": "DeviceError",
        "steps": "DeviceError",
        "after all": "none",
        "in a backward pass": "DeviceError",
    }
    assert "made different calls; seek the same step" in both[0]["steps"][1]
    assert "x holds 2" in both[0]["rows of rank 1"][1]


@pytest.mark.parametrize("case", [*PARTS, "no records", "nothing"])
def test_private_gradients_from_a_tape_are_those_of_one_process(folder: Path, case: str) -> None:
    """Each process clips its records; the first adds the noise to the sum of all, with records or without."""
    single = found(folder, "private.single")["nothing" if case == "nothing" else "all"]
    both = [found(folder, f"private.{rank}")[case] for rank in (0, 1)]
    assert distance(both[0], both[1]) == 0
    assert distance(both[0], single) < 1e-6
    assert max(float(gradient.abs().max()) for gradient in single) > 0.01


def test_sums_are_in_the_order_of_ranks_and_a_session_ends_with_one_error(folder: Path) -> None:
    every = [found(folder, f"exchange.{rank}") for rank in range(3)]
    first, second, third = (rank_tensors(rank) for rank in range(3))
    for number, (a, b, c) in enumerate(zip(first, second, third, strict=True)):
        for one in every:
            assert torch.equal(one["sums"][number], a + b + c)
    for one in every:
        assert [gradient.tolist() for gradient in one["gradients"]] == [[2.0, 2.0], [1.0, 1.0]]
        assert one["total"] == [pytest.approx(0.3)]
    for count in range(8):
        parts = [one["part"][count] for one in every]
        assert [n for part in parts for n in range(count)[part]] == list(range(count))
        assert count == 0 or len(range(count)[parts[0]]) > 0
    every = [found(folder, f"exchange.{rank}") for rank in range(3)]
    for one in every:
        assert one["first_computes"] == ("ZeroDivisionError", "division by zero")
        assert one["last_fails_early"] == ("KeyError", "'a file of process 2'")
        assert one["all_end"] == ("none", "")
    assert "one of them has ended its work" in every[0]["last_leaves_early"][1]
    assert {one["last_leaves_early"][0] for one in every} == {"ProcessLost"}


def test_it_states_the_law_of_the_held_device_and_monitors_only_that() -> None:
    with open_shared_device("gaussian", n_inputs=2, n_outputs=3, noise={"sigma": 0.5}) as device:
        assert isinstance(device.noise, GaussianNoise)
        device._law = None
        assert device.stated_noise is None
        refuses(NoiseUnknown, "states no law", lambda: device.noise)
    window: dict[str, Any] = {"n_inputs": 8, "n_outputs": 32, "monitor": {"every_steps": 1}}
    with open_device("gaussian", **window) as device, open_shared_device("gaussian", **window) as shared:
        for each in (device, shared):
            each.seek(0)
            each.project(torch.ones(1, 8))
        assert shared.usage == device.usage
        assert shared.monitor is shared.held.monitor
        assert shared.monitor.vouched == 0


VICTIM = "process 7 on elsewhere since noon\n"  # as a lock file's own content


def other_file(path: Path, victim: Path) -> None:
    victim.write_text("three pages of notes")
    victim.rename(path)
    victim.symlink_to(path)  # so that the test reads it under its old name


TRAPS = [Path.symlink_to, Path.hardlink_to, lambda path, victim: os.mkfifo(path), other_file]


@pytest.mark.parametrize("trap", TRAPS)
def test_locks_of_devices_and_runs_write_into_none(tmp_path: Path, trap: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    run, victims = tmp_path / "run", [tmp_path / "first", tmp_path / "second"]
    run.mkdir()
    for lock, victim in zip([lock_file("gaussian"), run / LOCK_FILE], victims, strict=True):
        victim.write_text(VICTIM)
        trap(lock, victim)
    before = [victim.read_text() for victim in victims]
    refuses(DeviceUnavailable, rf"cannot be written .*{FOLDER_VARIABLE}", ExclusiveUse("gaussian").acquire)
    with pytest.raises(RunFolderError, match="cannot be used"), only_writer(run, "run folder"):
        pass
    assert [victim.read_text() for victim in victims] == before


def test_a_lock_names_its_holder_and_asking_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "device.lock"
    for _ in range(2):
        with held(path):
            told = f"process {os.getpid()} on {socket.gethostname()}"
            with pytest.raises(LockHeld, match=told), held(path):
                pass
            assert path.read_text().startswith(f"process {os.getpid()} on")
    other = tmp_path / "other.lock"
    with held(path), held(other):
        pass
    path = tmp_path / "lock"
    assert not is_held(path)
    assert not path.exists()
    with held(path):
        before = path.read_bytes()
        assert is_held(path)
        assert path.read_bytes() == before
    assert not is_held(path)
    with held(path):  # asking took nothing away
        pass
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert not is_held(pipe)


def test_locks_are_in_a_folder_of_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    runtime, shared = tmp_path / "runtime", tmp_path / "shared"
    runtime.mkdir(mode=0o700)
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert lock_folder() == runtime / "opusim-locks"
    runtime.chmod(0o755)  # others may enter: not what the specification of that folder promises
    assert lock_folder() == shared / f"opusim-locks-{os.geteuid()}"
    use = ExclusiveUse("gaussian")
    use.acquire()
    use.release()
    assert stat.S_IMODE(lock_folder().stat().st_mode) == 0o700
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    lock_folder().symlink_to(elsewhere)
    refuses(DeviceUnavailable, "folder is a link, or other users may enter", ExclusiveUse("gaussian").acquire)
    lock_folder().unlink()
    lock_folder().mkdir()
    lock_folder().chmod(0o777)
    refuses(DeviceUnavailable, "folder is a link, or other users may enter", ExclusiveUse("gaussian").acquire)
    assert not list(elsewhere.iterdir())
