"""Clients, servers and networks that fail: nothing is lost, nothing hangs, and no reading changes."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from opusim import NoisyDevice, load_description, open_device, register_device
from opusim.devices.simulated import GaussianDevice
from opusim.errors import DeviceBusy, DeviceFault, DeviceTimeout, DeviceUnavailable, NoiseBelowCertificate
from opusim.serving.instrument import MOST_ROWS, Instrument
from opusim.serving.journal import read_journal
from opusim.serving.server import TURN_S, Limits, Work
from opusim.testing.faults import KIND, FaultyDevice, faulty_device
from tests.opusim.common import changed, refuses, ternary
from tests.support.killing import start_child
from tests.support.patience import eventually, patient
from tests.support.served import ForkedServer, Laboratory, clients, served_and_local, serving
from tests.support.slow_network import slow_network

X = ternary(16, 12, 5)
WINDOW: dict[str, Any] = {"n_inputs": 12, "n_outputs": 40, "seed": 9}


def local_readings(steps: int, calls: int) -> list[list[torch.Tensor]]:
    with open_device("gaussian", **WINDOW) as device:
        found = []
        for step in range(steps):
            device.seek(step)
            found.append([device.project(X) for _ in range(calls)])
        return found


def reads(device: NoisyDevice, expected: list[torch.Tensor]) -> bool:
    """Whether the next readings are the expected ones."""
    return all(torch.equal(device.project(X), each) for each in expected)


SHARED: dict[str, Any] = {"access": {"exclusive": True}, "n_inputs": 12, "n_outputs": 40}
FOUR = {**WINDOW, "n_outputs": 4}


def broken(fault: str, at_step: int, **more: Any) -> dict[str, Any]:
    """A description of a Gaussian device that breaks at a step."""
    return {"kind": KIND, "options": {"kind": "gaussian", "fault": fault, "at_step": at_step}, **more}


def journal_of(lab: Laboratory) -> list[Any]:
    return list(read_journal(lab.journal)) if lab.journal.exists() else []


@pytest.fixture
def faulty() -> Iterator[None]:
    register_device(KIND, faulty_device)
    FaultyDevice.repaired = False
    yield
    FaultyDevice.repaired = False


def train(steps: int, *devices: NoisyDevice) -> None:
    """Read at every step, each by the next device."""
    for step in range(steps):
        device = devices[step % len(devices)]
        device.seek(step)
        device.project(X)


def test_a_killed_server_stops_a_step_and_a_restarted_one_repeats_it(lab: Laboratory) -> None:
    expected = local_readings(4, 2)
    with ForkedServer(lab) as server, open_device(f"{server.address}?silence_s=5", **WINDOW) as device:
        device.seek(0)
        assert reads(device, expected[0])
        before = device.usage
        server.kill()
        with ForkedServer(lab, port=server.port) as second:
            device.seek(1)  # between steps, the device is found again
            assert torch.equal(device.project(X), expected[1][0])
            second.kill()
            refuses(DeviceUnavailable, "no answer from its server for 5 s", device.project, X)
            with ForkedServer(lab, port=server.port):
                refuses(DeviceFault, "its server was restarted, or dropped this client", device.project, X)
                device.seek(1)  # as a resumed run does
                assert reads(device, expected[1])
                assert device.usage.frames == before.frames + 2 * 3 * len(X)


def hold_a_place(address: str) -> None:
    open_device(address, n_inputs=12, n_outputs=40).draw((1, 40))
    time.sleep(600)


@patient
def test_a_killed_client_leaves_its_place_to_waiting_ones(lab: Laboratory, caplog: Any, pace: float) -> None:
    caplog.clear()
    caplog.set_level("INFO")
    with serving(lab, limits=Limits(silence_s=2.0 * pace)) as address:
        client = start_child(lambda: hold_a_place(f"{address}?outputs_from=0&run=doomed"))
        try:
            assert eventually(lambda: "alice opened 40 outputs (doomed)" in caplog.messages, 60)
            told = "alice reads outputs 0 to 39; waited 0.1 s, position 1"
            refuses(DeviceBusy, told, open_device, f"{address}?wait_s=0.1", **WINDOW)
        finally:
            os.kill(client, signal.SIGKILL)
            os.waitpid(client, 0)
        with open_device(f"{address}?wait_s=60", **WINDOW) as device:
            assert torch.equal(device.project(X), local_readings(1, 1)[0][0])
    assert f"alice was silent for {2 * pace:g} s (doomed)" in caplog.messages
    assert any("waiting for device" in line and "position 1" in line for line in caplog.messages)


@patient
def test_a_living_client_keeps_its_place_while_it_computes(lab: Laboratory, pace: float) -> None:
    """Its signs of life come as often as the server wants them, which is told when it opens the device."""
    with serving(lab, limits=Limits(silence_s=pace)) as address, open_device(address, **WINDOW) as device:
        expected = local_readings(1, 2)[0]
        device.seek(0)
        assert torch.equal(device.project(X), expected[0])
        time.sleep(2.5 * pace)
        assert torch.equal(device.project(X), expected[1])


def test_a_client_may_have_the_device_to_itself(lab: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lab) as address, open_device(address, **WINDOW) as device:
        found: list[torch.Tensor] = []
        with open_device(f"{address}?exclusive", **WINDOW) as calibrating:
            reading = threading.Thread(target=lambda: found.append(device.project(X)))
            reading.start()
            for _ in range(10):
                calibrating.project(X)
            refuses(DeviceBusy, "alice has the device to itself", open_device, address, **WINDOW)
            reading.join(1.0)
            assert reading.is_alive()
            monkeypatch.setenv("OPUSIM_WAIT", "300")
            late = threading.Thread(target=lambda: open_device(address, **WINDOW).close())
            late.start()
        reading.join(300)
        late.join(300)
        assert not late.is_alive()
        assert torch.equal(found[0], local_readings(1, 1)[0][0])


def test_clients_take_turns_on_a_shared_device(lab: Laboratory) -> None:
    """Three calls of one client go between the batches of another one's call, which lasts until they are done."""
    begun, done, read = threading.Event(), threading.Event(), list[tuple[bool, int]]()

    def project(self: Any, x: torch.Tensor) -> torch.Tensor:
        read.append((bool(x.any()), len(x)))
        if not x.any():
            begun.set()
            done.wait(0.1)
        return GaussianDevice._project(self, x)

    register_device("noted", changed(GaussianDevice, _project=project))
    served = SHARED | {"kind": "noted", "n_outputs": 4}
    with clients(lab, served, {}, {}) as (greedy, modest):
        read.clear()
        long_call = threading.Thread(target=lambda: greedy.project(torch.zeros(200 * MOST_ROWS, 12)))
        long_call.start()
        assert begun.wait(60)
        for _ in range(3):
            modest.project(X)
        done.set()
        long_call.join()
    batches = [rows for is_call, rows in read if not is_call]
    calls = [number for number, (is_call, _) in enumerate(read) if is_call]
    assert (sum(batches), max(batches), len(calls)) == (200 * MOST_ROWS, MOST_ROWS, 3)
    assert calls[-1] < len(read) - 1


@patient
def test_slow_hardware_is_read_in_batches_of_half_a_second(lab: Laboratory, pace: float) -> None:
    """1 ms a vector; noise drawn alone takes as long, and a client that leaves pays for what was read."""
    read = list[int]()

    def slowly(rows: int) -> None:
        read.append(rows)
        time.sleep(0.001 * rows)

    project, draw = GaussianDevice._project, GaussianDevice._draw
    changes = {"_project": lambda self, x: (slowly(len(x)), project(self, x))[1]}
    changes["_draw"] = lambda self, shape: (slowly(shape[0]), draw(self, shape))[1]
    register_device("hardware", changed(GaussianDevice, **changes))
    before = len(journal_of(lab))
    with serving(lab, "gaussian", SHARED | {"kind": "hardware", "n_outputs": 4}) as address:
        read.clear()
        with open_device(f"{address}?timeout_s={0.3 * pace}&silence_s={pace}&run=gone", **FOUR) as device:
            assert device.draw((5,)).shape == (5,)
            refuses(DeviceTimeout, "within", device.draw, (100_000, 4))
        began = time.monotonic()
        with open_device(f"{address}?run=next", **FOUR) as device:
            device.project(X)
        assert time.monotonic() - began < 4 * TURN_S * pace
    assert read[0] == 2
    assert max(read) <= 1000 * TURN_S, read
    used = {entry.run: entry.used.frames for entry in journal_of(lab)[before:]}
    assert used == {"gone": 2 * sum(read[:-1]), "next": 2 * len(X)}


def test_a_suspended_call_reads_as_a_local_one(lab: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation is read in one; other clients have their turn between the tiles of its medium."""
    monkeypatch.setattr("opusim.serving.server.TURN_S", 0.005)
    medium, window = {"dense_limit_mib": 0}, {"n_inputs": 20_000, "n_outputs": 2048, "seed": 9}
    x = ternary(3, 20_000, 5)
    with open_device("gaussian", medium=medium, **window) as device:
        expected = [device.project(x), device.project(x)]
    resumed = list[int]()
    monkeypatch.setattr(Work, "wait", lambda work, wait=Work.wait: (wait(work), resumed.append(1)))
    with (
        serving(lab, "gaussian", {"medium": medium}) as address,
        open_device(address, **window) as greedy,
        open_device(address, **window) as other,
        open_device(address, **WINDOW) as modest,
    ):
        found: dict[str, list[torch.Tensor]] = {"greedy": [], "other": []}

        def read(name: str, device: NoisyDevice) -> None:
            found[name] += [device.project(x), device.project(x)]

        jobs = [threading.Thread(target=read, args=each) for each in (("greedy", greedy), ("other", other))]
        for thread in jobs:
            thread.start()
        modest.seek(0)
        small = [modest.project(X) for _ in range(20)]
        for thread in jobs:
            thread.join(60)
        usage = greedy.usage.frames, other.usage.frames, modest.usage.frames
    assert len(resumed) >= 4
    pairs = (found["greedy"], expected), (found["other"], expected), (small, local_readings(1, 20)[0])
    for readings, wanted in pairs:
        assert all(torch.equal(*pair) for pair in zip(readings, wanted, strict=True))
    assert usage == (12, 12, 2 * 20 * len(X))


@patient
def test_a_huge_call_delays_others_by_a_turn_and_ends_with_client_or_server(
    lab: Laboratory, monkeypatch: Any, pace: float
) -> None:
    """10^6 inputs at 2 * 10^5 outputs take minutes."""
    suspended = threading.Event()
    monkeypatch.setattr(Work, "suspend", lambda work, suspend=Work.suspend: (suspend(work), suspended.set()))
    huge: dict[str, Any] = {"n_inputs": 1_000_000, "n_outputs": 200_000}
    x = torch.ones((10, 1_000_000), dtype=torch.int8)
    failures = list[Exception]()

    def read(device: NoisyDevice) -> None:
        try:
            device.project(x)
        except DeviceUnavailable as error:
            failures.append(error)

    before = len(journal_of(lab))
    with serving(lab) as address, open_device(address, **WINDOW) as modest:
        modest.project(X)
        with open_device(f"{address}?timeout_s={0.1 * pace}&silence_s={pace}&run=huge", **huge) as device:
            began = time.monotonic()
            late = threading.Timer(0.05, modest.project, [X])
            late.start()
            refuses(DeviceTimeout, "within", device.project, x)
        late.join()
        assert time.monotonic() - began < 4 * TURN_S * pace
        began = time.monotonic()
        modest.project(X)
        assert time.monotonic() - began < 2 * TURN_S * pace
        device = open_device(f"{address}?run=last", **huge).open()
        last = threading.Thread(target=read, args=[device])
        suspended.clear()
        last.start()
        while not suspended.is_set():
            modest.project(X)
        began = time.monotonic()
    assert time.monotonic() - began < 4 * TURN_S * pace
    last.join(10)
    assert [str(each) for each in failures] == ["the server was stopped; start it, and resume"]
    device.close()
    used = {entry.run: (entry.calls, entry.used.frames) for entry in journal_of(lab)[before:]}
    assert (used["huge"], used["last"]) == ((1, 0), (1, 0))


def test_a_slow_network_only_takes_longer(lab: Laboratory) -> None:
    with serving(lab) as address, slow_network(address, 0.1) as (network, far):
        with open_device(far, **WINDOW) as device:
            for step, expected in enumerate(local_readings(2, 2)):
                device.seek(step)
                assert reads(device, expected)
        assert network.carried >= 1


def test_a_call_repeated_after_a_broken_connection_has_its_own_reading(lab: Laboratory) -> None:
    expected = local_readings(4, 2)
    with serving(lab) as address, slow_network(address, 0.05) as (network, far):
        far = f"{far}?silence_s=3"
        with open_device(far, **WINDOW) as device, open_device(address, **{**WINDOW, "seed": 10}) as other:
            for step in range(4):
                device.seek(step)
                cut = threading.Timer(0.03 * step, network.cut)
                cut.start()
                assert reads(device, expected[step])
                assert not torch.equal(other.project(X), expected[step][0])
                cut.join()
            assert device.usage.frames == 4 * 2 * 2 * len(X)  # each reading counts once
        assert network.carried >= 3


@patient
def test_a_call_that_takes_too_long_is_given_up(lab: Laboratory, pace: float) -> None:
    def project(self: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.0 if len(x) > 100 else pace)
        return GaussianDevice._project(self, x)

    register_device("slow", changed(GaussianDevice, _project=project))
    told = f"did not finish a call within {0.3 * pace:g} s"
    limits = f"timeout_s={0.3 * pace:g}&silence_s={pace:g}"
    with serving(lab, "gaussian", {"kind": "slow"}) as address:
        device = open_device(f"{address}?{limits}", **WINDOW)
        with device:
            refuses(DeviceTimeout, told, device.project, X)


@pytest.mark.slow
def test_an_abandoned_call_does_not_block_the_next(lab: Laboratory) -> None:
    """`access.timeout_s` leaves a thread behind in its call, under whose connection the device is opened again."""
    expected = local_readings(1, 1)[0][0]
    with (
        serving(lab) as address,
        slow_network(address, 0.01) as (network, far),
        open_device(far, access={"timeout_s": 3.0, "attempts": 30, "backoff_s": 0.0}, **WINDOW) as device,
    ):
        device.seek(0)
        network.delay_s = 5.0
        threading.Timer(6.0, lambda: setattr(network, "delay_s", 0.01)).start()
        assert torch.equal(device.project(X), expected)
        assert device.usage.frames == 2 * len(X)


def test_an_instrument_that_cannot_be_read_is_closed() -> None:
    held = list[int]()

    def project(self: Any, x: torch.Tensor) -> torch.Tensor:
        raise DeviceFault("it shows nothing")

    parts = {"_open": lambda self: held.append(1), "_close": lambda self: held.pop(), "_project": project}
    register_device("dead", changed(GaussianDevice, **parts))
    served = load_description("gaussian", SHARED | {"kind": "dead", "n_outputs": 4})
    refuses(DeviceFault, "it shows nothing", Instrument, served)
    assert not held


def test_noise_below_the_law_stops_every_client_or_one_with_a_baseline(lab: Laboratory, faulty: None) -> None:
    served, other_window = broken("noise halved", 3, monitor={"every_steps": 1}), {**WINDOW, "seed": 1}
    weak = (NoiseBelowCertificate, "blank frames scatter")
    with serving(lab, "gaussian", served) as address:
        with open_device(address, **WINDOW) as one, open_device(address, **other_window) as other:
            other.seek(1)
            other.project(X)
            refuses(*weak, train, 60, one)
            refuses(*weak, other.project, X)
        refuses(NoiseBelowCertificate, ".", open_device, address, **WINDOW)
    with clients(lab, served, WINDOW, other_window) as (one, other):
        one.compare_with(one.monitor.baseline)  # which it may have made up
        refuses(*weak, train, 60, one)
        other.seek(1)
        assert other.project(X).shape == (16, 40)


def test_a_fault_of_a_shared_device_stops_all_and_a_bad_reading_one_step(
    lab: Laboratory, faulty: None
) -> None:
    changes = SHARED | {"n_outputs": 256, "noise": {"sigma": 0.1}, "monitor": {"every_steps": 1}}
    served = broken("medium swapped", 5, **changes)
    with clients(lab, served, {}, {}) as (one, other):
        assert one.monitor.baseline is None
        refuses(DeviceFault, "medium decorrelated or was swapped", train, 30, one, other)
        for device in (one, other):
            refuses(DeviceFault, "medium decorrelated or was swapped", device.project, X)
    with clients(lab, broken("NaN", 0, **SHARED), {}, {}) as (one, other):
        one.seek(0)
        refuses(DeviceFault, "returned NaN or infinity", one.project, X)
        FaultyDevice.repaired = True
        assert one.project(X).shape == other.project(X).shape == (16, 40)


@patient
def test_a_shared_device_that_hangs_leaves_its_server_up(lab: Laboratory, faulty: None, pace: float) -> None:
    FaultyDevice.repaired, limit = False, 0.5 * pace
    with clients(lab, broken("time-out", 0, **SHARED), {}, {}, call_timeout_s=limit) as (one, other):
        one.seek(0)
        refuses(DeviceTimeout, f"did not answer within {limit:g} s; check its cables", one.project, X)
        FaultyDevice.repaired = True
        assert other.project(X).shape == (16, 40)


def test_the_monitor_of_a_simulation_is_that_of_the_local_device(lab: Laboratory) -> None:
    monitor = {"monitor": {"every_steps": 2}}
    with served_and_local(lab, "gaussian", monitor, **WINDOW) as (remote, local):
        assert np.array_equal(remote.monitor.baseline.to_array(), local.monitor.baseline.to_array())
        for device in (remote, local):
            device.compare_with(local.monitor.baseline)
        for step in range(4):
            remote.seek(step)
            local.seek(step)
            assert torch.equal(remote.project(X), local.project(X))
        assert remote.usage == local.usage
