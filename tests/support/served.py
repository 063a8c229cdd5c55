"""A laboratory for tests: keys of a server and its users, and servers in this process or in one of their own."""

import contextlib
import faulthandler
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from opusim.description.schema import load_description
from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_device
from opusim.serving.instrument import Instrument
from opusim.serving.journal import Journal
from opusim.serving.keys import Users, make_key
from opusim.serving.server import Limits, Server
from tests.support.command import COMMAND, ROOT
from tests.support.killing import start_child
from tests.support.ports import free_port

ONE_THREAD = {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Laboratory:
    """Where keys and journals are: `server` holds the server's keys, and each user has a folder of configuration."""

    folder: Path

    @property
    def keys(self) -> Path:
        """The server's folder of keys."""
        return self.folder / "server"

    @property
    def journal(self) -> Path:
        """The server's journal."""
        return self.folder / "usage.jsonl"

    def config_of(self, user: str) -> Path:
        """Return what XDG_CONFIG_HOME is for a user."""
        return self.folder / user

    def add_user(self, user: str, *, days: int = 365, known: bool = True) -> None:
        """Make a user's keys, and give the public ones to both sides."""
        own = self.config_of(user) / "opusim" / "keys"
        make_key(user, own, days=days)
        shutil.copy(self.keys / "server.pub", own)
        if known:
            shutil.copy(own / f"{user}.pub", self.keys)

    def become(self, user: str, patch: pytest.MonkeyPatch) -> None:
        """Let this process be a user's."""
        patch.setenv("XDG_CONFIG_HOME", str(self.config_of(user)))


def new_laboratory(folder: Path, *users: str) -> Laboratory:
    """Make a laboratory with some users."""
    lab = Laboratory(folder)
    make_key("server", lab.keys)
    for user in users:
        lab.add_user(user)
    return lab


def expire(file: Path) -> None:
    """Let a key have expired."""
    lines = file.read_text().splitlines()
    file.write_text("\n".join(["expires = 2020-01-01" if "expires" in line else line for line in lines]))


@contextlib.contextmanager
def serving(
    lab: Laboratory,
    name: str = "gaussian",
    overrides: dict[str, Any] | None = None,
    *,
    bind: str = "tcp://127.0.0.1:*",
    limits: Limits | None = None,
    **options: Any,
) -> Iterator[str]:
    """Serve a device from a thread of this process; yields its address."""
    instrument = Instrument(load_description(name, overrides), **options)
    server = Server(instrument, Users(lab.keys), bind=bind, journal=Journal(lab.journal), limits=limits)
    stop, failures = threading.Event(), []

    def run() -> None:
        try:
            server.run(stop)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield server.endpoint.replace("tcp://", "remote://")
    finally:
        stop.set()
        thread.join(30)
        if thread.is_alive():
            faulthandler.dump_traceback()
        assert not thread.is_alive(), "the server does not end"
        assert not failures, failures


@contextlib.contextmanager
def clients(lab: Laboratory, served: dict[str, Any], *windows: Any, **options: Any) -> Iterator[Any]:
    """Serve a Gaussian device with these overrides; yields clients of it, one for each window."""
    with serving(lab, "gaussian", served, **options) as address, contextlib.ExitStack() as stack:
        yield [stack.enter_context(open_device(address, **window)) for window in windows]


@contextlib.contextmanager
def served_and_local(
    lab: Laboratory, name: str, overrides: dict[str, Any] | None = None, **window: Any
) -> Iterator[tuple[NoisyDevice, NoisyDevice]]:
    """Yields a window of a served device and the same of the local one."""
    with serving(lab, name, overrides) as address, open_device(address, **window) as remote:
        local = open_device(name, **(overrides or {}), **window)
        with local:
            yield remote, local


class ForkedServer:
    """A server in a forked process, which is there in a moment, at `port` or a free one, and may be killed."""

    def __init__(self, lab: Laboratory, name: str = "gaussian", *, port: int = 0) -> None:
        self.port = port or free_port()
        self._child = start_child(lambda: self._serve(lab, name))
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5):
                return
            time.sleep(0.02)
        raise AssertionError("the server does not listen")

    def _serve(self, lab: Laboratory, name: str) -> None:
        torch.set_num_threads(1)  # a forked process lacks the parent's other threads, and would wait for them
        instrument, bind = Instrument(load_description(name)), f"tcp://127.0.0.1:{self.port}"
        Server(instrument, Users(lab.keys), bind=bind, journal=Journal(lab.journal)).run(threading.Event())

    @property
    def address(self) -> str:
        """Its address."""
        return f"remote://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            self._child = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.kill()


class ServerProcess:
    """`opusim device serve` with arguments in a process of its own, at a free port unless bound, with its address."""

    def __init__(self, lab: Laboratory, *arguments: object, bind: str = "tcp://127.0.0.1:*") -> None:
        command = [*COMMAND, "device", "serve", *map(str, arguments), "--bind", bind, "--keys", str(lab.keys)]
        self.log = lab.folder / f"server-{time.monotonic_ns()}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--journal", str(lab.journal)], stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)}, cwd=lab.folder,
            )  # fmt: skip
        out = self.process.stdout
        ready, _, _ = select.select([out], [], [], 90)
        line = out.readline() if ready else ""
        found = re.search(r" at tcp://([\d.]+:\d+)", line)
        if found is None:
            self.kill()
            raise AssertionError(f"the server said {line!r}; {self.log.read_text()}")
        self.address = f"remote://{found[1]}"

    @property
    def bind(self) -> str:
        """Where it listens."""
        return self.address.replace("remote://", "tcp://")

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def terminate(self) -> int:
        """End it as systemd does; returns its exit code."""
        self.process.terminate()
        code = self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.kill()
