"""Runs that share one served device under faults: `python -m tests.support.served_runs FOLDER SECONDS`.

Forked processes: a server, which is killed, stopped and frozen again and again; Alice and Bob, who train one run after
the other, Alice killed now and then, Bob behind a slow network that breaks; two ranks that train on one device; a
calibration that has the device to itself; a victim, who is killed; and a vandal with wrong keys, expired keys, garbage,
replayed and oversized messages. Faults last for SECONDS. FOLDER/notes.jsonl then holds a line for each fault, each run
and each calibration, compared with the same on local devices, and FOLDER/lab/server.log what the server said.
"""

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import opusim
from opusim.calibration.calibrate import calibrate as calibrated
from opusim.calibration.photon_transfer import Plan
from opusim.description.schema import load_description
from opusim.devices.simulated import GaussianDevice
from opusim.errors import DeviceError, OpusimError
from opusim.serving.connections import told_error
from opusim.serving.instrument import Instrument
from opusim.serving.journal import Journal
from opusim.serving.keys import Users
from opusim.serving.server import Limits, Server
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint
from tests.support.killing import start_child
from tests.support.ports import free_port
from tests.support.ranks import preload, run_ranks
from tests.support.served import Laboratory, expire, new_laboratory
from tests.support.slow_network import slow_network
from tests.support.wire import answer, call, opened_session, raw_socket

PACE_S = 0.05
"""Seconds of a reading, so that faults meet runs."""
SEEDS = {"alice": 1, "bob": 2, "ranks": 3}
EPOCHS = 3
WINDOW: dict[str, Any] = {"n_inputs": 10, "n_outputs": 32}
REQUEST_MIB = 1.0
_TRIES = 2000


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


class Notes:
    """What happened, a line of JSON each, from several processes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "notes.jsonl"

    def add(self, what: str, **values: Any) -> None:
        """Note something."""
        line = json.dumps({"what": what, "time": round(time.time(), 1), **values}) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def read(self) -> list[dict[str, Any]]:
        """Return all notes."""
        return [json.loads(line) for line in self._path.read_text().splitlines()]


def configuration(device: object, seed: int) -> dict[str, Any]:
    return {
        "seed": seed, "epochs": EPOCHS, "threads": 1, "model": {"hidden": [32]},
        "sampler": {"batch_size": 64}, "device": {"name": str(device)},
    }  # fmt: skip


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """Return what the last checkpoint of a run holds."""
    return dict(read_checkpoint(list_checkpoints(run / "checkpoints")[-1]).tensors)


def differences(run: Path, local: Path) -> list[str]:
    """Return in what a run differs from the same one on a local device: tensors, and what it used of the device."""
    wanted, found = tensors(local), tensors(run)
    different = [
        key
        for key in wanted.keys() | found.keys()
        if key not in wanted or key not in found or not torch.equal(wanted[key], found[key])
    ]
    one, other = (json.loads((each / "summary.json").read_text()) for each in (local, run))
    counted = ("steps", "frames", "seconds", "joules")
    return sorted(different) + [key for key in counted if one[key] != other[key]]


def train_until_done(folder: Path, device: object, seed: int, notes: Notes) -> None:
    """Train; resume after every fault of the device, each of which is noted; nothing happens to a finished run."""
    for _ in range(_TRIES):
        if (folder / "summary.json").exists():  # this process was killed before it noted the run
            return
        try:
            if (folder / "config.json").exists():
                opusim.train(folder=folder, resume=True)
            else:
                opusim.train(configuration(device, seed), folder=folder)
            return
        except DeviceError as error:
            notes.add("stop", run=folder.name, error=type(error).__name__, text=str(error))
            time.sleep(0.2)
    raise RuntimeError("the run does not end")


def train_again_and_again(folder: Path, user: str, device: object, until: float, notes: Notes) -> None:
    """Train one run after the other until a time of the monotonic clock, and compare each with the local one."""
    done = [note for note in notes.read() if note["what"] == "run" and note["user"] == user]
    while not done or time.monotonic() < until:
        run = folder / f"{user}-{len(done)}"
        train_until_done(run, device, SEEDS[user], notes)
        found = differences(run, folder / f"{user}-local")
        done.append({})
        notes.add("run", user=user, different=found)
        if not found:
            shutil.rmtree(run)


def calibrate_again_and_again(address: str, law: str, notes: Notes) -> None:
    """Calibrate the device, with the device to itself, until SIGTERM; compare with the law that was found locally."""
    while True:
        try:
            found = calibration(address)
            notes.add("calibration", different=[] if found == law else [found])
        except DeviceError as error:
            notes.add("stop", run="calibration", error=type(error).__name__, text=str(error))
        time.sleep(5.0)


def calibration(device: object) -> str:
    """Return the law that a calibration finds."""
    with opusim.open_device(str(device), **WINDOW) as opened:
        found = calibrated(opened, plan=Plan(frames=8), readings=40)
    return repr(found.certificate.noise)


def serve(lab: Laboratory, port: int) -> None:
    PacedDevice.pace_s = PACE_S
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    logging.basicConfig(filename=lab.folder / "server.log", format="%(asctime)s %(message)s", level="INFO")
    instrument = Instrument(load_description(lab.folder / "paced.toml"))
    limits = Limits(silence_s=6.0, request_mib=REQUEST_MIB)
    bind = f"tcp://127.0.0.1:{port}"
    Server(instrument, Users(lab.keys), bind=bind, journal=Journal(lab.journal), limits=limits).run(stop)


def be_a_victim(address: str, first: torch.Tensor, notes: Notes) -> None:
    """Read, until killed; the first reading of a connection is compared with the local one."""
    while True:
        try:
            with opusim.open_device(address, **WINDOW) as device:
                notes.add("victim", different=[] if torch.equal(device.draw((4, 32)), first) else ["reading"])
                while True:
                    device.draw((4, 32))
        except DeviceError as error:
            notes.add("stop", run="victim", error=type(error).__name__, text=str(error))


def vandalise(lab: Laboratory, address: str, notes: Notes) -> None:
    """Do what a server must refuse, again and again, until SIGTERM; each refusal is noted."""
    host, _, port = address.removeprefix("remote://").partition("?")[0].partition(":")
    while True:
        for user, fault in (("eve", "wrong key"), ("old", "expired key")):
            os.environ["XDG_CONFIG_HOME"] = str(lab.config_of(user))
            refused(fault, partial(opusim.open_device, address, **WINDOW), notes)
        os.environ["XDG_CONFIG_HOME"] = str(lab.config_of("bob"))
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as wire:
            wire.sendall(os.urandom(500))
            notes.add("attack", fault="garbage", answer="", text="")
        with contextlib.suppress(Exception), raw_socket(f"remote://{host}:{port}") as dealer:
            dealer.rcvtimeo = 3000
            for fault, text in attacks(dealer):
                notes.add("attack", fault=fault, answer=text.partition(":")[0], text=text)
        time.sleep(1.0)


def refused(fault: str, act: Callable[[], Any], notes: Notes) -> None:
    """Note how an attack is refused; one that is let in is noted as such."""
    try:
        act().close()
        notes.add("attack", fault=fault, answer="let in", text="let in")
    except OpusimError as error:
        notes.add("attack", fault=fault, answer=type(error).__name__, text=str(error))


def attacks(dealer: Any) -> Iterator[tuple[str, str]]:
    """Send replayed and oversized messages; yields what they are and how they are refused."""
    session = opened_session(dealer, n_inputs=12, n_outputs=40).values["session"]
    answer(dealer, call(session, 2).frames())
    for message in (call(session, 1), call(session, 2, step=3)):
        yield "replayed", str(told_error(answer(dealer, message.frames())))
    oversized = [b'{"schema": 1}', bytes(int(1.5 * REQUEST_MIB * 2**20))]
    yield "oversized", str(told_error(answer(dealer, oversized)))
    dealer.send_multipart([b'{"schema": 1}', bytes(int(20 * REQUEST_MIB * 2**20))])
    yield "flood", ""


class Play:
    """The processes of a play, and the address of their server."""

    def __init__(self, lab: Laboratory, notes: Notes, port: int) -> None:
        self.lab, self._port, self.notes = lab, port, notes
        self.address = f"remote://127.0.0.1:{port}?silence_s=3&wait_s=60"
        self.children: dict[str, int] = {}

    def start(self, name: str, user: str, work: Callable[[], object]) -> int:
        """Fork a process that works as a user."""

        def act() -> None:
            os.environ["XDG_CONFIG_HOME"] = str(self.lab.config_of(user))
            torch.set_num_threads(1)
            try:
                work()
            except Exception as error:
                self.notes.add("crash", process=name, text=f"{type(error).__name__}: {error}")
                raise

        self.children[name] = start_child(act)
        return self.children[name]

    def wait(self, name: str) -> int:
        """Return the status with which a process ends."""
        return os.waitpid(self.children.pop(name), 0)[1]

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """End a process; one that ended by a fault before is noted as a crash."""
        if self.runs(name):
            os.kill(self.children[name], number)
            self.wait(name)
        elif status := self.wait(name):
            self.notes.add("crash", process=name, text=f"{name} ended with status {status}")

    def runs(self, name: str) -> bool:
        """Whether a process has not ended."""
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return name in self.children and os.waitid(os.P_PID, self.children[name], look) is None

    def serve(self) -> None:
        """Start the server."""
        self.start("server", "alice", partial(serve, self.lab, self._port))

    def do_in_a_process(self, user: str, work: Callable[[], object]) -> None:
        """Fork a process and wait for it."""
        self.start("work", user, work)
        if self.wait("work"):
            raise RuntimeError("a process without faults failed")

    def end(self) -> None:
        """Kill all processes."""
        for name in list(self.children):
            self.kill(name)


class Faults:
    """Faults of the server and of clients, at moments that a seed draws; `alice` and `victim` start these again."""

    def __init__(self, play: Play, alice: Callable[[], object], victim: Callable[[], object]) -> None:
        self._play, self._alice, self._victim = play, alice, victim
        self._chance = random.Random(7)

    def inject(self, until: float) -> None:
        """Let faults happen until a time of the monotonic clock, at least one of each kind."""
        kinds = [self.killed_run, self.killed_server, self.killed_client]
        kinds += [self.stopped_server, self.frozen_server]
        often = [2, 2, 4, 1, 1]
        turns = list(kinds)
        while turns or time.monotonic() < until:
            time.sleep(self._chance.uniform(1.0, 6.0))
            act = turns.pop(0) if turns else self._chance.choices(kinds, often)[0]
            if act == self.killed_run and not self._play.runs("alice"):
                continue
            act()
            self._play.notes.add("fault", fault=act.__name__.replace("_", " "))

    def killed_server(self) -> None:
        self._play.kill("server")
        time.sleep(self._chance.choice((0.0, 0.5, 5.0)))
        self._play.serve()

    def stopped_server(self) -> None:
        self._play.kill("server", signal.SIGTERM)
        self._play.serve()

    def frozen_server(self) -> None:
        server = self._play.children["server"]
        os.kill(server, signal.SIGSTOP)
        time.sleep(self._chance.choice((1.0, 8.0)))
        os.kill(server, signal.SIGCONT)

    def killed_client(self) -> None:
        self._play.kill("victim")
        self._victim()

    def killed_run(self) -> None:
        self._play.kill("alice")
        self._alice()


def behind_a_bad_network(play: Play, folder: Path, until: float) -> None:
    """Train as Bob; the connection is slow, and is broken now and then."""
    base, _, options = play.address.partition("?")
    with slow_network(base, 0.002) as (network, far):
        chance = random.Random(1)

        def cut() -> None:
            while True:
                time.sleep(chance.uniform(0.3, 3.0))
                network.delay_s = chance.choice((0.0, 0.002, 0.05, 0.5))
                network.cut()
                play.notes.add("fault", fault="broken connection")

        threading.Thread(target=cut, daemon=True).start()
        train_again_and_again(folder, "bob", f"{far}?{options}", until, play.notes)


def run_as_ranks(folder: Path, device: object) -> None:
    """Train in two processes, of which the first reads for both."""
    whole = configuration(device, SEEDS["ranks"])
    codes = run_ranks(lambda rank: opusim.train(whole, folder=folder), 2)
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")


def prepared(folder: Path) -> tuple[Play, Path]:
    """Make a laboratory; returns its processes and the description of the local device."""
    preload()
    opusim.register_device("paced", PacedDevice)
    lab = new_laboratory(folder / "lab", "alice", "bob", "old")
    lab.add_user("eve", known=False)
    expire(lab.keys / "old.pub")
    notes = Notes(folder)
    notes.add("begin")
    return Play(lab, notes, free_port()), description_file(lab.folder)


def main(folder: Path, seconds: float) -> None:
    """Play."""
    play, local = prepared(folder)
    notes, law = play.notes, calibration(local)
    with opusim.open_device(str(local), **WINDOW) as device:
        first = device.draw((4, 32))
    for name in ("alice", "bob"):
        work = partial(train_until_done, folder / f"{name}-local", local, SEEDS[name], notes)
        play.do_in_a_process("alice", work)
    play.serve()
    for place, device_name in (("ranks-local", local), ("ranks", play.address)):
        play.do_in_a_process("alice", partial(run_as_ranks, folder / place, device_name))
    notes.add("run", user="ranks", different=differences(folder / "ranks", folder / "ranks-local"))
    until = time.monotonic() + seconds
    alice = partial(train_again_and_again, folder, "alice", play.address, until, notes)
    starts = {
        "alice": partial(play.start, "alice", "alice", alice),
        "bob": partial(play.start, "bob", "bob", partial(behind_a_bad_network, play, folder, until)),
        "victim": partial(play.start, "victim", "bob", partial(be_a_victim, play.address, first, notes)),
        "calibration": partial(
            play.start, "calibration", "alice",
            partial(calibrate_again_and_again, f"{play.address}&exclusive&run=calibration", law, notes),
        ),
        "vandal": partial(play.start, "vandal", "bob", partial(vandalise, play.lab, play.address, notes)),
    }  # fmt: skip
    for start in starts.values():
        start()
    Faults(play, starts["alice"], starts["victim"]).inject(until)
    codes = [play.wait(name) for name in ("alice", "bob")]
    play.end()
    notes.add("end", codes=codes)
    sys.exit(int(any(codes)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
