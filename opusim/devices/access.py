"""Reach a device that may fail: time-outs, retries with growing waits, and one holder at a time.

`held` is a lock that names its holder: one process at a time uses a device, or writes a folder. The kernel releases it
when its holder dies. filelock (4.2.11 and later) opens the lock file without following symbolic links and never
truncates it. The holder's name is written only into a regular file that has a single name and is empty or holds an
earlier holder's name, so that a link in a shared folder cannot redirect the write to another file.

`require_present` tells whether a device can be opened on this machine at all, before anything heavy is imported.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import logging
import os
import queue
import re
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from opusim.description.schema import AccessSettings, DeviceDescription, LightonSettings
from opusim.errors import DeviceBusy, DeviceError, DeviceTimeout, DeviceUnavailable
from opusim.files import open_to_read, parse_json, read_bytes
from opusim.processes import Abandoned, environment_number, pausing

FOLDER_VARIABLE = "OPUSIM_LOCKS"
WAIT_VARIABLE = "OPUSIM_WAIT"
_LOG = logging.getLogger("opusim")
_ASK_AGAIN_S = 0.5
_NAME_LIMIT = 4096
_MARK = b"process "
"""What a holder's name begins with; a file with other content is not a lock."""


class LockHeld(Exception):  # a state that callers turn into their own error
    """Another process, or another caller in this one, holds the lock; `holder` says which."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock file, which names this process meanwhile; LockHeld if another process or caller holds it."""
    lock = FileLock(
        path,
        mode=path.parent.stat().st_mode & 0o666 | 0o600,  # as open as its folder, which users may share
        blocking=False,
        thread_local=False,
        fallback_to_soft=False,
        on_acquired=_write_holder,
    )
    try:
        lock.acquire()
    except Timeout:
        text = ""  # who holds it, as far as its file tells
        with suppress(OSError), os.fdopen(open_to_read(path), "rb") as file:
            text = file.read(_NAME_LIMIT).decode(errors="replace")
        raise LockHeld(" ".join(text.split()) or "another process") from None
    try:
        yield
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Whether some process holds a lock file.

    The check writes nothing, but holds the file for an instant; a process that wants the lock just then is refused.
    """
    try:
        descriptor = open_to_read(path)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _write_holder(descriptor: int) -> None:
    """Replace the content of a lock file by this process's name; OSError if it is no lock file."""
    facts = os.fstat(descriptor)
    content = os.pread(descriptor, _NAME_LIMIT, 0) if stat.S_ISREG(facts.st_mode) else b""
    is_lock = stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1
    if not is_lock or (content and not content.startswith(_MARK)):
        raise OSError(errno.EINVAL, "the file there is no lock file")
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {started}\n".encode(), 0)


def patience_s(setting: float | None) -> float:
    """Return for how many seconds to wait for a device that is in use: a setting, else OPUSIM_WAIT, else 0."""
    if setting is not None:
        return setting
    return environment_number(WAIT_VARIABLE, 0.0, least=0.0, what="seconds")


class ExclusiveUse:
    """The right to use a device of a name, for this process only.

    The lock is a file in the folder that OPUSIM_LOCKS names, else in a private folder (`lock_folder`). If several users
    share a device, all must set OPUSIM_LOCKS to one folder that all can write. The kernel gives the lock back when its
    holder dies.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock: AbstractContextManager[None] | None = None

    def acquire(self, *, wait_s: float = 0.0) -> None:
        """Acquire the device unless this object holds it; the log names the holder for which it waits.

        DeviceBusy: another process has it, or another object of this one. DeviceUnavailable: no lock can be written.
        """
        until, told, path = time.monotonic() + wait_s, "", lock_file(self._name)
        while self._lock is None:
            lock = held(path)
            try:
                if os.environ.get(FOLDER_VARIABLE):
                    path.parent.mkdir(parents=True, exist_ok=True)
                else:  # a private folder, closed to other users
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                    if not _is_own(path.parent):
                        raise PermissionError(
                            errno.EPERM, "its folder is a link, or other users may enter it"
                        )
                lock.__enter__()
                self._lock = lock
            except LockHeld as error:
                text = f"device {self._name!r} is held by {error.holder}"
                if time.monotonic() >= until:
                    raise DeviceBusy(f"{text}; wait for it with --wait SECONDS, or end it") from error
                if text != told:
                    _LOG.warning("opusim: %s; waiting for up to %g s", text, wait_s)
                told = text
                time.sleep(_ASK_AGAIN_S)
            except OSError as error:
                raise DeviceUnavailable(
                    f"device {self._name!r}: its lock {path} cannot be written ({error.strerror}); "
                    f"set {FOLDER_VARIABLE} to a folder that all its users can write"
                ) from error

    def release(self) -> None:
        """Release the device."""
        if self._lock is not None:
            self._lock.__exit__(None, None, None)
            self._lock = None


def lock_file(name: str) -> Path:
    """Return where the lock of a device is."""
    return lock_folder() / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.lock"


def lock_folder() -> Path:
    """Where locks are: $OPUSIM_LOCKS; else in $XDG_RUNTIME_DIR; else in a private folder of the temporary folder.

    $XDG_RUNTIME_DIR is taken only if it belongs to this user and no other user may enter it.
    """
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and _is_own(Path(runtime)):
        return Path(runtime) / "opusim-locks"
    return Path(tempfile.gettempdir()) / f"opusim-locks-{os.geteuid()}"


def _is_own(folder: Path) -> bool:
    """Return whether a path is a folder, not a link, that belongs to this user and that no other user may enter."""
    try:
        facts = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077


Result = TypeVar("Result")
TRANSIENT = (DeviceTimeout, DeviceUnavailable, DeviceBusy)
"""Failures that may pass; a fault (impossible readings, weak noise) is reported at once."""
_LONGEST_WAIT_S = 86_400.0


class Access:
    """Calls a device with time-outs and retries.

    Attributes:
        call: makes a call, and makes it again after a failure that may pass; the device is reconnected in between.
        timeout_s: longest time of one call, or None.

    Args:
        settings: the time-out, the number of attempts and the waits between them.
        name: the device's name, for messages and the lock.
        reconnect: closes the device in any state and opens it again.
    """

    def __init__(self, settings: AccessSettings, name: str, reconnect: Callable[[], None]) -> None:
        self._settings, self.timeout_s = settings, settings.timeout_s
        self._name = name
        self._reconnect = reconnect
        self._caller: _Caller | None = None
        self._use = ExclusiveUse(name)
        self._runs_on = False  # the last call, after its time-out
        self.call = self.once if settings.attempts == 1 else self._repeated

    def acquire(self) -> None:
        """Acquire the device if its description allows one holder only; errors as `ExclusiveUse.acquire`."""
        if self._settings.exclusive:
            self._use.acquire(wait_s=patience_s(self._settings.wait_s))

    def release(self) -> None:
        """Release the device."""
        if self._caller is not None:
            self._caller.stop()
            self._caller = None
        self._use.release()

    def _repeated(self, act: Callable[[], Result]) -> Result:
        return self.repeated(lambda: self.once(act), self._reconnect)

    def repeated(
        self, act: Callable[[], Result], recover: Callable[[], None], *, may_run_on: bool = True
    ) -> Result:
        """Return the result of an act, which calls `once`, repeated after a failure that may pass and `recover`.

        An act that still runs after its time-out is begun again if it `may_run_on`. The last failure is raised.
        """
        attempts = Retrying(
            retry=retry_if_exception(
                lambda error: isinstance(error, TRANSIENT) and (may_run_on or not self._runs_on)
            ),
            stop=stop_after_attempt(self._settings.attempts),
            wait=wait_exponential(multiplier=self._settings.backoff_s, max=_LONGEST_WAIT_S),
            reraise=True,
        )
        tried = 0
        try:
            for attempt in attempts:
                with attempt:
                    tried += 1
                    if tried > 1:
                        recover()
                    return act()
        except TRANSIENT as error:
            if tried == 1:
                raise
            raise type(error)(f"{error} (tried {tried} times)") from error
        raise AssertionError("an attempt returns or raises")

    def once(self, act: Callable[[], Result], *, undo: Callable[[], None] | None = None) -> Result:
        """Return the result of one call.

        One that takes longer than `timeout_s` is abandoned (DeviceTimeout), with `undo` in its own thread once it ends.
        An OSError of the driver is a DeviceUnavailable, which a run survives.
        """
        timeout, self._runs_on = self.timeout_s, False
        try:
            if timeout is None:
                return act()
            if self._caller is None:
                self._caller = _Caller()
            result: Result = self._caller.call(act, timeout, undo)
            return result
        except queue.Empty:
            if self._caller is not None:
                self._caller.stop()  # its thread hangs in the call; a new one serves the next
                self._caller, self._runs_on = None, True
            raise DeviceTimeout(
                f"device {self._name!r} did not answer within {timeout:g} s; check its cables and power, or "
                "raise access.timeout_s if it needs longer"
            ) from None
        except DeviceError:
            raise
        except TimeoutError as error:
            raise DeviceTimeout(
                f"device {self._name!r} did not answer in time ({error}); check its cables, or raise access.attempts "
                "if it may pass"
            ) from error
        except OSError as error:
            raise DeviceUnavailable(
                f"device {self._name!r} failed ({error}); check its cables, power and driver, or "
                "raise access.attempts if it may pass"
            ) from error


class _Caller:
    """A thread that makes calls one by one, so that a caller can stop waiting."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[], None] | None] | None] = (
            queue.SimpleQueue()
        )
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._is_stopped = False
        threading.Thread(target=self._work, daemon=True, name="opusim-device").start()

    def call(self, act: Callable[[], Any], timeout_s: float, undo: Callable[[], None] | None = None) -> Any:
        """Return the call's result or raise its error; raise queue.Empty after `timeout_s`."""
        self._calls.put((act, undo))
        result, error = self._answers.get(timeout=timeout_s)
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        """End the thread after its last call; a simulated call ends at its next pause."""
        self._is_stopped = True
        self._calls.put(None)

    def _work(self) -> None:
        def require_wanted() -> None:
            if self._is_stopped:
                raise Abandoned

        with pausing(require_wanted):
            while (call := self._calls.get()) is not None:
                act, undo = call
                answer: tuple[Any, BaseException | None]
                try:
                    answer = (act(), None)
                except BaseException as error:  # handed to the caller unchanged
                    answer = (None, error)
                if self._is_stopped and undo is not None:
                    with suppress(Exception):  # the caller has already raised its time-out
                        undo()
                self._answers.put(answer)


INSTALL_LIGHTONML = "pip install 'opusim[lighton]', and then pip install --no-deps lightonml==1.4.3"


def require_present(description: DeviceDescription) -> None:
    """Refuse a device whose driver is missing, or that another process holds; the device itself is not touched."""
    if description.lighton is not None:
        require_lighton(description.name, description.lighton)
    if description.access is not None and description.access.exclusive:
        use = ExclusiveUse(description.name)
        use.acquire(wait_s=patience_s(description.access.wait_s))
        use.release()


def require_lighton(name: str, settings: LightonSettings) -> None:
    """Refuse a device behind lightonml if lightonml, its driver or its own configuration is missing."""
    file = settings.config_file
    if file and not file.startswith("http"):  # an address is left to lightonml
        text = f"device {name!r}: lighton.config_file = {file!r}"
        try:
            content = parse_json(read_bytes(file))
        except OSError as error:
            raise DeviceUnavailable(f"{text} cannot be read ({error.strerror}); check the path") from error
        except ValueError as error:
            raise DeviceUnavailable(f"{text} is not JSON ({error}); correct it") from error
        if not isinstance(content, dict) or not file.startswith("/"):
            raise DeviceUnavailable(f"{text} must be a JSON table at a path from /; correct it")
    if importlib.util.find_spec("lightonml") is None:
        raise DeviceUnavailable(
            f"device {name!r} needs lightonml, which is not installed: {INSTALL_LIGHTONML}"
        )
    if not settings.simulated and importlib.util.find_spec("lightonopu") is None:
        raise DeviceUnavailable(
            f"device {name!r} needs LightOn's driver lightonopu, which comes with the appliance and is not "
            "here; run on the appliance, or take the device lightonml_simulated"
        )
