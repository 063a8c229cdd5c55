"""Runs that share one served device under faults: `python -m tests.support.served_runs FOLDER SECONDS`.

Forked processes: a server, which is killed again and again; Alice and Bob, who train, Bob behind a slow network that
breaks; two ranks that train on one device; a calibration that wants the device to itself; a victim, who is killed; and
a vandal with wrong keys, expired keys, garbage, replayed and oversized messages. Faults last for SECONDS. FOLDER then
holds what each training left, next to the same trainings on local devices.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import opusim
from opusim.description.loading import load_description
from opusim.devices.simulated import GaussianDevice
from opusim.errors import DeviceError, OpusimError
from opusim.serving.instrument import Instrument
from opusim.serving.journal import Journal
from opusim.serving.keys import Users
from opusim.serving.server import Limits, Server
from tests.support.killing import start_child
from tests.support.ranks import preload, run_ranks
from tests.support.served import Laboratory, free_port, new_laboratory
from tests.support.slow_network import slow_network

PACE_S = 0.05
"""Seconds of a reading, so that faults meet runs."""
SEEDS = {"alice": 1, "bob": 2, "ranks": 3}
EPOCHS = 3
_TRIES = 200


class PacedDevice(GaussianDevice):
    """A Gaussian device that takes its time, if it is a server's."""

    pace_s = 0.0

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pace_s)
        return super()._project(x)


def description_file(folder: Path) -> Path:
    """Write the description of the device, of the kind "paced"."""
    text = (Path(opusim.__file__).parents[1] / "hw_configs" / "gaussian.toml").read_text()
    path = folder / "paced.toml"
    path.write_text(text.replace('"gaussian"', '"paced"'))
    return path


def configuration(device: object, seed: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "epochs": EPOCHS,
        "threads": 1,
        "model": {"hidden": [32]},
        "sampler": {"batch_size": 64},
        "device": {"name": str(device)},
    }


def train_until_done(folder: Path, device: object, seed: int) -> None:
    """Train; resume after every fault of the device. FOLDER.faults holds a line for each."""
    notes = folder.with_suffix(".faults")
    notes.write_text("")
    for _ in range(_TRIES):
        try:
            if (folder / "config.json").exists():
                opusim.train(folder=folder, resume=True)
            else:
                opusim.train(configuration(device, seed), folder=folder)
            return
        except DeviceError as error:
            with notes.open("a") as file:
                file.write(f"{type(error).__name__}: {error}\n")
            time.sleep(0.2)
    raise RuntimeError("the run does not end")


def serve(lab: Laboratory, port: int) -> None:
    PacedDevice.pace_s = PACE_S
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    instrument = Instrument(load_description(lab.folder / "paced.toml"))
    limits = Limits(silence_s=6.0, request_mib=1.0)
    bind = f"tcp://127.0.0.1:{port}"
    Server(instrument, Users(lab.keys), bind=bind, journal=Journal(lab.journal), limits=limits).run(stop)


def calibrate(address: str, folder: Path) -> None:
    """Have the device to itself for some readings, again and again, until SIGTERM."""
    done = 0
    while True:
        with (
            contextlib.suppress(DeviceError),
            opusim.open_device(address, n_inputs=10, n_outputs=32) as device,
        ):
            for _ in range(3):
                device.draw((4, 32))
            done += 1
            (folder / "calibrations").write_text(str(done))
        time.sleep(1.0)


def be_a_victim(address: str) -> None:
    with opusim.open_device(address, n_inputs=10, n_outputs=32) as device:
        while True:
            device.draw((4, 32))


def vandalise(lab: Laboratory, address: str) -> None:
    """Do what a server must refuse, again and again, until SIGTERM."""
    from tests.opusim.serving import test_refusals as refusals

    host, _, port = address.removeprefix("remote://").partition("?")[0].partition(":")
    while True:
        for user in ("eve", "old"):
            os.environ["XDG_CONFIG_HOME"] = str(lab.config_of(user))
            with contextlib.suppress(OpusimError):
                opusim.open_device(address, n_inputs=10, n_outputs=32).close()
        os.environ["XDG_CONFIG_HOME"] = str(lab.config_of("bob"))
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as wire:
            wire.sendall(os.urandom(500))
        with contextlib.suppress(Exception), refusals.raw_socket(f"remote://{host}:{port}") as dealer:
            dealer.setsockopt(refusals.zmq.RCVTIMEO, 3000)
            session = refusals.opened_session(dealer, n_inputs=12, n_outputs=40).values["session"]
            for message in (
                refusals.call(session, 2),
                refusals.call(session, 1),
                refusals.call(session, 2, step=3),
            ):
                refusals.answer(dealer, message.frames())
            refusals.answer(dealer, [b'{"schema": 1}', bytes(2 * 2**20)])
        time.sleep(1.0)


class Play:
    """The processes of a play.

    Args:
        lab: Keys and folder.
        port: Of the server.
    """

    def __init__(self, lab: Laboratory, port: int) -> None:
        self._lab, self._port = lab, port
        self.address = f"remote://127.0.0.1:{port}?silence_s=3&wait_s=60"
        self._server = 0

    def start(self, work: Callable[[], object], user: str) -> int:
        """Fork a process that works as a user."""

        def act() -> None:
            os.environ["XDG_CONFIG_HOME"] = str(self._lab.config_of(user))
            torch.set_num_threads(1)
            work()

        return start_child(act)

    def restart_server(self) -> None:
        """Kill the server, if there is one, and start another."""
        if self._server:
            os.kill(self._server, signal.SIGKILL)
            os.waitpid(self._server, 0)
        self._server = self.start(lambda: serve(self._lab, self._port), "alice")

    def end(self, *children: int) -> None:
        """Kill processes, and the server."""
        for child in (*children, self._server):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def behind_a_bad_network(play: Play, folder: Path) -> None:
    """Train as Bob; the connection is broken now and then."""
    base, _, options = play.address.partition("?")
    with slow_network(base, 0.002) as (network, far):
        chance = random.Random(1)

        def cut() -> None:
            while True:
                time.sleep(chance.uniform(0.3, 1.5))
                network.cut()

        threading.Thread(target=cut, daemon=True).start()
        train_until_done(folder / "bob", f"{far}?{options}", SEEDS["bob"])


def run_as_ranks(folder: Path, device: object) -> None:
    """Train in two processes, of which the first reads for both."""
    whole = configuration(device, SEEDS["ranks"])
    codes = run_ranks(lambda rank: opusim.train(whole, folder=folder), 2)
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")


def main(folder: Path, seconds: float) -> None:
    preload()
    opusim.register_device("paced", PacedDevice)
    lab = new_laboratory(folder / "lab", "alice", "bob", "old")
    lab.add_user("eve", known=False)
    expired = (lab.keys / "old.pub").read_text().splitlines()
    (lab.keys / "old.pub").write_text(
        "\n".join(["expires = 2020-01-01" if "expires" in each else each for each in expired])
    )
    local = description_file(lab.folder)
    play = Play(lab, free_port())
    for name in ("alice", "bob"):
        child = play.start(partial(train_until_done, folder / f"{name}-local", local, SEEDS[name]), "alice")
        assert os.waitpid(child, 0)[1] == 0
    play.restart_server()
    for place, device in (("ranks-local", local), ("ranks", play.address)):
        child = play.start(partial(run_as_ranks, folder / place, device), "alice")
        assert os.waitpid(child, 0)[1] == 0
    trainings = [
        play.start(lambda: train_until_done(folder / "alice", play.address, SEEDS["alice"]), "alice"),
        play.start(lambda: behind_a_bad_network(play, folder), "bob"),
    ]
    calibration = play.start(lambda: calibrate(f"{play.address}&exclusive", folder), "alice")
    vandal = play.start(lambda: vandalise(lab, play.address), "bob")
    victim = play.start(lambda: be_a_victim(play.address), "bob")
    chance, until = random.Random(7), time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(chance.uniform(2.0, 6.0))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        play.restart_server()
        victim = play.start(lambda: be_a_victim(play.address), "bob")
    codes = [os.waitpid(child, 0)[1] for child in trainings]
    play.end(calibration, vandal, victim)
    sys.exit(max(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
