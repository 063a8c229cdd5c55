"""Patience with devices: time-outs, reconnection, one holder, and checks of what they return."""

import contextlib
import io
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from opusim import NoisyDevice, load_description
from opusim.devices.access import FOLDER_VARIABLE, is_held, lock_file
from opusim.devices.lighton import quiet
from opusim.devices.simulated import GaussianDevice
from opusim.errors import DeviceBusy, DeviceError, DeviceFault, DeviceTimeout, DeviceUnavailable
from tests.opusim.common import refuses
from tests.support.patience import eventually, patient

X = torch.randint(-1, 2, (4, 12), generator=torch.Generator().manual_seed(2))


class Scripted(GaussianDevice):
    """Does what the test tells it to when it opens and closes, before it reads and with what it read."""

    opened = 0

    def __init__(self, *arguments: Any, **window: Any) -> None:
        super().__init__(*arguments, **window)
        self.before: Any = lambda: None
        self.on_open: Any = lambda: None
        self.on_close: Any = lambda: None
        self.after: Any = lambda y: y

    def _open(self) -> None:
        self.on_open()
        self.opened += 1

    def _close(self) -> None:
        self.on_close()

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        self.before()
        return self.after(super()._project(x))


def closed(**access: Any) -> Scripted:
    return Scripted(load_description("gaussian", {"access": access}), n_inputs=12, n_outputs=40)


def scripted(**access: Any) -> Scripted:
    return closed(**access).open()


class Failing:  # raises an error the first few times
    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.left = error, times

    def __call__(self) -> None:
        self.left -= 1
        if self.left >= 0:
            raise self.error


@pytest.mark.parametrize("kind", [DeviceTimeout, DeviceUnavailable, DeviceBusy])
def test_a_failure_that_passes_is_survived(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with scripted(attempts=4, backoff_s=0.5) as device, scripted() as healthy:
        device.before = Failing(kind("gone"), 3)
        device.seek(5)
        healthy.seek(5)
        assert torch.equal(device.project(X), healthy.project(X))
        assert device.opened == 4
    assert waits == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError("no frame within 100 ms"), DeviceUnavailable),
        (ConnectionResetError("cable"), DeviceUnavailable),
        (TimeoutError("camera"), DeviceTimeout),
    ],
)
def test_a_drivers_own_error_is_a_devices(error: OSError, kind: type[DeviceError]) -> None:
    with scripted(attempts=2, backoff_s=0.0) as device, scripted() as impatient:
        device.before = Failing(error, 1)
        assert device.project(X).shape == (4, 40)
        impatient.before = Failing(error, 1)
        refuses(kind, rf"'gaussian' .*{error}.* raise access.attempts if it may pass", impatient.project, X)


def test_a_drivers_error_at_opening_is_a_devices_and_hidden_methods_are_named() -> None:
    device = closed()
    device.on_open = Failing(OSError("no such camera"), 1)
    refuses(DeviceUnavailable, "no such camera", device.open)
    device._read = 0.5  # type: ignore[assignment,method-assign]  # planted: read noise, say
    refuses(TypeError, r"Scripted sets self\._read, .*rename the attribute", device.open)


def test_failures_keep_their_kind_and_count_their_tries() -> None:
    with scripted(attempts=3, backoff_s=0.0) as device:
        device.before = Failing(DeviceUnavailable("gone"), 3)
        refuses(DeviceUnavailable, r"gone \(tried 3 times\)", device.project, X)
    with scripted(attempts=3, backoff_s=0.0) as device:
        device.before = Failing(DeviceFault("broken"), 1)
        refuses(DeviceFault, "broken$", device.project, X)
        assert device.opened == 1
    with scripted(timeout_s=30.0) as device:
        device.before = Failing(ValueError("as it was"), 1)
        refuses(ValueError, "as it was", device.project, X)
    with scripted() as device:
        device.after = lambda y: torch.full_like(y, 3e38)  # their sum is infinite, none of them is
        assert device.project(X).max() == torch.tensor(3e38)


@patient
def test_a_call_that_hangs_is_left_behind_and_the_next_is_made(pace: float) -> None:
    release, limit = threading.Event(), 0.2 * pace
    with scripted(timeout_s=limit) as device:
        device.before = release.wait
        refuses(DeviceTimeout, f"'gaussian' did not answer within {limit:g} s", device.project, X)
        device.before = lambda: None
        assert device.project(X).shape == (4, 40)
        release.set()


def test_a_simulation_that_is_left_behind_ends_at_its_next_pause() -> None:
    """Its thread would compute for minutes, and change the device's noise under later calls."""
    description = load_description("gaussian", {"access": {"timeout_s": 0.1}})
    before = threading.enumerate()
    with GaussianDevice(description, n_inputs=1_000_000, n_outputs=100_000) as device:
        with pytest.raises(DeviceTimeout):
            device.project(torch.ones(1, 1_000_000))
        left = [thread for thread in threading.enumerate() if thread not in before]
        for thread in left:
            thread.join(10)
        assert not any(thread.is_alive() for thread in left)


@pytest.mark.parametrize("access", [{}, {"timeout_s": 30.0}])
def test_a_device_that_does_not_open_gives_back_what_it_took(access: dict[str, Any]) -> None:
    held, device = list[int](), closed(**access)

    def opening() -> None:
        held.append(1)
        raise OSError("the mirrors do not answer")

    device.on_open, device.on_close = opening, held.pop
    for _ in range(2):
        refuses(DeviceUnavailable, "the mirrors do not answer", device.open)
        assert not held
    device.on_close = lambda: held.remove(7)  # which fails too, and hides nothing
    refuses(DeviceUnavailable, "the mirrors do not answer", device.open)


@pytest.mark.parametrize("access", [{}, {"timeout_s": 30.0}])
@pytest.mark.parametrize(("error", "kind"), [(OSError, DeviceUnavailable), (TimeoutError, DeviceTimeout)])
def test_an_opening_that_fails_is_repeated_like_a_call_under_the_same_lock(
    access: dict, error: type[OSError], kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    waits, held, failing = list[float](), list[str](), Failing(error("the camera starts"), 3)
    monkeypatch.setattr(time, "sleep", waits.append)
    device = closed(attempts=4, backoff_s=0.5, exclusive=True, **access)

    def opening() -> None:
        assert is_held(lock_file(device.name))
        assert not held, "what an earlier attempt opened is closed"
        held.append("mirrors")
        device.opened_parts.callback(held.remove, "mirrors")
        failing()

    device.on_open = opening
    with device:
        assert (waits, device.opened, held) == ([0.5, 1.0, 2.0], 1, ["mirrors"])
        assert device.usage.frames == 0
        assert device.project(X).shape == (4, 40)
    assert not held
    failing.left = 4
    refuses(kind, r"the camera starts.* \(tried 4 times\)$", device.open)
    assert not held
    assert not is_held(lock_file(device.name))
    failing.error, failing.left = DeviceFault("broken"), 1
    refuses(DeviceFault, "broken$", device.open)


def test_a_quiet_call_left_behind_silences_no_other_thread(capsys: pytest.CaptureFixture[str]) -> None:
    begun, release, filters = threading.Event(), threading.Event(), list(warnings.filters)

    def hang() -> None:
        with quiet():
            print("lightonml's own")
            begun.set()
            release.wait(60)

    before, hanging = sys.stdout, threading.Thread(target=hang)
    hanging.start()
    assert begun.wait(60)
    print("ours")
    with quiet():
        print("lightonml's too")
        release.set()
        hanging.join(60)
        print("lightonml's again")
    print("ours")
    assert (sys.stdout, list(warnings.filters)) == (before, filters)
    assert capsys.readouterr().out == "ours\nours\n"


def test_opening_that_ends_after_its_time_out_is_closed_again() -> None:
    release, events = threading.Event(), list[str]()
    device = closed(timeout_s=0.05, attempts=3, backoff_s=0.0)  # two openings at once would collide

    def opening() -> None:
        release.wait(60)
        device.opened_parts.callback(events.append, "a part is closed")
        events.append("opened")

    device.on_open, device.on_close = opening, lambda: events.append("closed")
    refuses(DeviceTimeout, "raise access.timeout_s if it needs longer$", device.open)
    assert events == ["closed"]
    release.set()
    assert eventually(lambda: len(events) == 4)
    assert events == ["closed", "opened", "closed", "a part is closed"]


def test_parts_that_were_opened_are_closed_if_a_later_one_does_not_open() -> None:
    held, device, shutter = list[str](), closed(), Failing(OSError("the shutter does not answer"), 1)

    def opening() -> None:
        for part in ("mirrors", "camera"):
            held.append(part)
            device.opened_parts.callback(held.remove, part)
        shutter()

    device.on_open, device.on_close = opening, Failing(OSError("the link is down"), 2)
    refuses(DeviceUnavailable, "the shutter does not answer", device.open)
    assert not held
    device.open()
    assert held == ["mirrors", "camera"]
    refuses(OSError, "the link is down", device.close)
    assert not held


@pytest.mark.parametrize("error", [OSError("the link is down"), RuntimeError("handle 0")])
def test_a_lost_device_that_does_not_close_is_reconnected(error: Exception) -> None:
    with scripted(attempts=2, backoff_s=0.0) as device:
        device.on_close = Failing(error, 1)
        device.before = Failing(DeviceTimeout("gone"), 1)
        assert device.project(X).shape == (4, 40)


@pytest.mark.parametrize("act", ["project", "draw"])
def test_calls_are_split_so_that_none_takes_longer_than_the_time_out(act: str) -> None:
    """300 readings of 2 frames of 1 ms take 0.6 s; a call may take 0.2 s."""
    shown = list[int]()

    class Instrument(Scripted):
        def _project(self, x: torch.Tensor) -> torch.Tensor:
            shown.append(len(x))
            time.sleep(2e-3 * len(x))
            return x @ torch.ones(self.n_inputs, self.n_outputs)

        def _draw(self, shape: tuple[int, ...]) -> torch.Tensor:
            return NoisyDevice._draw(self, shape)

    access, frames = {"timeout_s": 0.2}, {"frame_period_us": 1000.0, "frames_per_projection": 2}
    found = load_description("gaussian", {"access": access, "frames": frames})
    device = Instrument(found, n_inputs=12, n_outputs=40)
    device.description = found.model_copy(update={"medium": None})  # hardware
    x = torch.randint(-1, 2, (300, 12), generator=torch.Generator().manual_seed(3))
    with device:
        if act == "project":
            expected = x.sum(dim=1, keepdim=True).float().expand(300, 40)
            assert torch.equal(device.project(x), expected)
        else:
            assert device.draw((3, 100, 40)).shape == (3, 100, 40)
        assert shown == [50] * 6
        assert device.usage.frames == 600


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda y: y[:, :-1], r"returned shape \(4, 39\) instead of \(4, 40\)"),
        (lambda y: y.double(), "returned a tensor of torch.float64, not a float32 tensor"),
        (lambda y: y.numpy(), "returned a ndarray, not a float32 tensor"),
        (lambda y: y.index_fill(0, torch.tensor([1]), torch.nan), "returned NaN or infinity"),
        (lambda y: y.index_fill(0, torch.tensor([1]), -torch.inf), "returned NaN or infinity"),
    ],
)
def test_impossible_readings_are_refused(spoil: Any, message: str) -> None:
    with scripted() as device:
        device.after = spoil
        refuses(DeviceFault, message, device.project, X)


def test_one_holder_whose_name_the_next_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    code = """
import sys
from opusim import open_device
with open_device("gaussian", n_inputs=4, n_outputs=4, access={"exclusive": True}):
    print("open", flush=True)
    sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holder = subprocess.Popen([sys.executable, "-c", code], **pipes)
    try:
        assert holder.stdout.readline() == "open\n"
        refuses(DeviceBusy, f"is held by process {holder.pid} on .* since", scripted, exclusive=True)
        holder.kill()  # the kernel gives the lock back
        holder.wait()
        with scripted(exclusive=True) as device:
            refuses(DeviceBusy, "held by process", scripted, exclusive=True)
            assert device.project(X).shape == (4, 40)
        scripted(exclusive=True).close()
    finally:
        holder.kill()
        holder.communicate()
    assert lock_file("a/b c").name == "a_b_c.lock"


def test_a_quiet_call_that_ends_late_puts_no_closed_stream_back() -> None:
    """A call is abandoned while output goes to a stream that is closed by the time the call ends."""
    begun, release, before = threading.Event(), threading.Event(), sys.stdout

    def hang() -> None:
        with quiet():
            begun.set()
            release.wait(60)

    with io.StringIO() as text:
        with contextlib.redirect_stdout(text):
            hanging = threading.Thread(target=hang)
            hanging.start()
            assert begun.wait(60)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            warnings.warn("ours", stacklevel=1)
        assert [str(one.message) for one in seen] == ["ours"]
    release.set()
    hanging.join(60)
    assert sys.stdout is before
    assert not sys.stdout.closed
