"""The server: one thread talks to clients, one owns the instrument, and every refusal is one line in the log.

Clients take turns batch by batch, a long call gives way, and one client may have the device alone. `FairQueue` gives
batches out; `Owner` has the threads that do them, one at a time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from opusim import checks
from opusim.devices.baseline import Baseline
from opusim.devices.kinds import CAPABILITIES
from opusim.devices.usage import Usage
from opusim.errors import (
    CapabilityMissing,
    ConfigError,
    DeviceBusy,
    DeviceError,
    DeviceFault,
    DeviceUnavailable,
    NoiseBelowCertificate,
)
from opusim.processes import Abandoned, pausing
from opusim.serving.connections import (
    MIB,
    BadMessage,
    Message,
    ServerSocket,
    SessionLost,
    error_message,
    raw_bytes,
    read_message,
)
from opusim.serving.instrument import Instrument, View, Window, packed_law
from opusim.serving.journal import Entry, Journal
from opusim.serving.keys import Key, Users

TURN_S = 0.5
"""Seconds of work after which another client has its turn."""
READ_BY_ROWS = ("project", "intensities", "multiply", "multiply_transposed")
"""Acts that read a row for each row of their input."""
CHANGING = ("program", "wait")
"""Acts that change what the device holds, and with it its law."""
TELLING = ("law", *CHANGING)
"""Acts whose answer tells the law."""


@dataclass(eq=False)
class Session:
    """A client that has a place.

    Attributes:
        token: its secret name, which its messages carry.
        ticket: the number that the client chose for this opening.
        user: whose key it showed.
        public: that key.
        label: what the client calls its run.
        window: its part of the instrument.
        reserves: whether no other client may read its outputs.
        exclusive: whether the instrument serves no other client meanwhile.
        route: where its last message came from.
        heard: when that was, seconds of the monotonic clock.
        used: when it last made a call or had its answer, likewise.
        view: its part of the instrument, once it is open.
        opened: the answer to its opening, once it is known.
        number: number of its last call.
        digest: of that call's content.
        reply: frames of that call's answer, kept until the client has it.
        running: the call under way.
        has_compared: whether it gave its device's monitor an earlier baseline.
        calls: calls done.
        busy_s: seconds that the instrument's thread worked for it.
        logged: usage, calls and seconds that the journal holds already.
    """

    token: str
    ticket: str
    user: str
    public: str
    label: str
    window: Window
    reserves: bool
    exclusive: bool
    route: bytes
    heard: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.monotonic)
    view: View | None = None
    opened: Message | None = None
    number: int = 0
    digest: bytes = b""
    reply: list[Any] | None = None
    running: Work | None = None
    has_compared: bool = False
    calls: int = 0
    busy_s: float = 0.0
    logged: tuple[Usage, int, float] = (Usage(), 0, 0.0)


class Work:
    """A call ("open", an act, or "close") of a client's session, done batch by batch.

    Attributes:
        begun: whether a part of it is done.
        dropped: whether its client is gone.
        turn_began: when its present turn began, seconds of the performance counter.
    """

    def __init__(self, session: Session, message: Message) -> None:
        self.session, self.message = session, message
        self.is_opening = message.kind == "open"
        self.begun = self.dropped = False
        self.turn_began = 0.0
        self._done: list[np.ndarray] = []
        self._saturated: list[np.ndarray | None] = []
        self._rows = 0
        self._resumed: threading.Event | None = None

    @property
    def is_suspended(self) -> bool:
        """Whether a thread waits amid this call for its next turn."""
        return self._resumed is not None

    def suspend(self) -> None:
        """Note that the thread of this call is about to `wait`."""
        self._resumed = threading.Event()

    def wait(self) -> None:
        """Wait until another thread calls `resume`."""
        if self._resumed is not None:
            self._resumed.wait()
            self._resumed = None

    def resume(self) -> None:
        """Let the thread that waits continue; nothing happens if none does."""
        if self._resumed is not None:
            self._resumed.set()

    def advance(self, instrument: Instrument) -> tuple[np.ndarray, ...] | None:
        """Do the next batch; returns the results once all batches are done."""
        view = self.session.view
        if self.is_opening:
            self.session.view = instrument.view(self.session.window)
            return ()
        if self.message.kind == "close":
            if view is not None:
                view.close()
            return ()
        if view is None:
            raise BadMessage("call: the session is not open")
        act, step = self.message.value("act", str), self.message.value("step", int, None)
        reads = act not in ("program", "programming_std")
        instrument.require_own(view, self.session.user, reads=reads)
        if not self.begun and step is not None:
            instrument.seek(view, step)
        self.begun = True
        if act == "seek":
            return ()
        if act == "law":
            view.look_up_law()
            return ()
        if act == "compare":
            if view.shared:  # its monitor reports to all clients, takes settings from none
                raise CapabilityMissing("compare: the server watches the device itself")
            self.session.has_compared = True
            baseline, device = Baseline.from_array(self._array()), view.device
            view.count(lambda: device.compare_with(baseline))
            return ()
        if act == "programming_std":
            return (view.programming_std(self._array()),)
        if act not in CAPABILITIES:
            raise BadMessage(
                f"call: unknown act {act[:40]!r}; install the same version of opusim on both sides"
            )
        if act not in instrument.can:
            raise CapabilityMissing(
                f"the served device lacks the capability {act!r}; it has {', '.join(instrument.can)}"
            )
        if act in READ_BY_ROWS or (act == "draw" and view.shared):
            return self._read(act, view, instrument)
        if act == "draw":
            return (view.draw(self._shape()),)
        if act == "matrix":
            return (view.matrix(),)
        return (self._changed(act, view, instrument),)

    def _changed(self, act: str, view: View, instrument: Instrument) -> np.ndarray:
        """Program the device, or let time pass; what a shared one holds then is new to all its clients."""
        if view.shared and not self.session.exclusive:
            raise CapabilityMissing(
                f"{act} changes the device for its other clients; have it to yourself: remote://HOST:PORT?exclusive"
            )
        writer = self.session.user if act == "program" else None
        try:
            if writer is None:
                found = view.wait(float(self.message.value("seconds", (int, float))))
            else:
                found = view.program(self._array())
        except (TypeError, ValueError, OverflowError, CapabilityMissing):  # nothing was written
            raise
        except BaseException:
            instrument.note_change(view, writer)
            raise
        instrument.note_change(view, writer)
        return found

    def _read(self, act: str, view: View, instrument: Instrument) -> tuple[np.ndarray, ...] | None:
        """Read a batch; a simulation, whose noise belongs to the call as a whole, reads the call in one.

        After products come the rows that met a converter's bound, if the device tells them.
        """
        x = None if act == "draw" else self._array()
        rows = view.readings(self._shape()) if x is None else len(x)
        stop = rows
        if view.shared:
            stop = min(rows, self._rows + instrument.rows_within(TURN_S, act))
        began = time.perf_counter()
        if x is None:
            self._done.append(view.draw_readings(stop - self._rows))
        else:
            self._done.append(view.read(act, x[self._rows : stop]))
        if view.shared and stop > self._rows:
            instrument.row_s[act] = (time.perf_counter() - began) / (stop - self._rows)
        self._saturated.append(view.saturated if act == "multiply" else None)
        self._rows = stop
        if stop < rows:
            return None
        saturated = [part for part in self._saturated if part is not None]
        told = (saturated,) if len(saturated) == len(self._done) else ()
        found = tuple(parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in (self._done, *told))
        return found if x is not None else (view.shaped(found[0], self._shape()),)

    def _shape(self) -> tuple[int, ...]:
        return tuple(self.message.value("shape", list))

    def _array(self) -> np.ndarray:
        if len(self.message.arrays) != 1:
            raise BadMessage(f"call: {len(self.message.arrays)} arrays came, one belongs to it")
        return self.message.arrays[0]


def require_room(message: Message, window: Window, *, shared: int | None, most: int) -> None:
    """Refuse (ValueError) a call whose answer, or the reading it is cut from, exceeds `most` bytes, before it is read.

    `shared` is the number of outputs of a device that several clients use. It is None if the client has its own device,
    with all outputs up to its window's last.
    """
    act, arrays = message.value("act", str), message.arrays
    own = window.first + window.n_outputs if shared is None else window.n_outputs
    numbers = window.n_inputs * own if act in ("matrix", *CHANGING) else 0
    if act in READ_BY_ROWS and arrays and arrays[0].ndim:
        width = max(own, window.n_inputs) if act == "multiply_transposed" else own
        numbers = len(arrays[0]) * width
    if act == "draw":
        lengths = message.value("shape", list)
        checks.instance(int, **{f"shape[{index}]": length for index, length in enumerate(lengths)})
        readings = -(-abs(math.prod(lengths)) // window.n_outputs)
        numbers = readings * (own if shared is None else shared)
    if 4 * numbers > most:
        raise ValueError(
            f"the answer, or the reading it is cut from, would have {4 * numbers / MIB:,.4g} MiB, the server takes "
            f"{most / MIB:,.4g} at most; ask for less at once"
        )


def content_digest(message: Message) -> bytes:
    """Return BLAKE2b of a message's values and arrays, which tells a repeated call from a new one."""
    digest = hashlib.blake2b(json.dumps(message.values, sort_keys=True).encode(), digest_size=16)
    for array in message.arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(raw_bytes(array))
    return digest.digest()


class Places:
    """The clients that have a place, and those that wait for one, at most so many in all and of one user.

    Waiting clients ask again and again; one that has not asked for `patience_s` seconds loses its turn.
    """

    def __init__(self, most: int, *, most_of_user: int, patience_s: float) -> None:
        self._most, self._most_of_user = most, most_of_user
        self._patience_s = patience_s
        self._sessions: dict[str, Session] = {}
        self._tickets: dict[tuple[str, str], float] = {}
        """When those who wait asked last, by user and ticket."""

    def __iter__(self) -> Any:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, token: str, public: str) -> Session | None:
        """Return the session of a token, if it was opened under this key."""
        session = self._sessions.get(token)
        return session if session is not None and session.public == public else None

    def add(self, session: Session) -> None:
        """Give a client its place."""
        self._sessions[session.token] = session

    def remove(self, session: Session) -> None:
        """Take a client's place away."""
        self._sessions.pop(session.token, None)

    def queued(self, user: str, ticket: str, obstacle: str | None, *, waits: bool) -> int:
        """Return how many clients get in before this one; 0 if it gets in now.

        DeviceBusy if an obstacle keeps it out and it does not wait, or the user has as many clients as it may.
        """
        now, mine = time.monotonic(), (user, ticket)
        self._tickets = {
            each: heard for each, heard in self._tickets.items() if now - heard <= self._patience_s
        }
        of_user = sum(each.user == user for each in self) + sum(
            each[0] == user for each in self._tickets if each != mine
        )
        if of_user >= self._most_of_user:
            raise DeviceBusy(
                f"{user} has {of_user} clients here, the most that a user may; close one of them"
            )
        before = list(self._tickets).index(mine) if mine in self._tickets else len(self._tickets)
        if obstacle is None and before == 0:
            self._tickets.pop(mine, None)
            return 0
        if not waits:
            raise DeviceBusy(
                f"{obstacle or f'{before} clients wait for it'}; wait for it with --wait SECONDS or OPUSIM_WAIT"
            )
        self._tickets[mine] = now
        return before + 1

    def forget(self, user: str, ticket: str) -> None:
        """Remove a client that gave up from the queue."""
        self._tickets.pop((user, ticket), None)

    def obstacle(self, window: Window, *, reserves: bool) -> str | None:
        """Return what keeps a client out, or None."""
        for session in self:
            if session.exclusive:
                return f"{session.user} has the device to itself"
            first, stop = session.window.first, session.window.first + session.window.n_outputs
            shares_outputs = window.first < stop and first < window.first + window.n_outputs
            if (reserves or session.reserves) and shares_outputs:
                return f"{session.user} reads outputs {first} to {stop - 1}"
        if len(self._sessions) >= self._most:
            return f"it serves {self._most} clients, the most that it takes"
        return None


class FairQueue:
    """Batches of work of several clients, by name, given out round robin over the clients.

    A client with many batches waiting delays another one by at most one batch. While a client holds the queue, only its
    batches are given out. Safe for threads.

    Attributes:
        holder: the client that has the device to itself, or None.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Work]] = {}
        """Batches by client; the order of the keys is the order of turns."""
        self.holder: str | None = None
        self._changed = threading.Condition()
        self._closed = False

    def put(self, client: str, batch: Work) -> bool:
        """Add a batch after the client's others, and return whether the queue took it: a closed one does not."""
        with self._changed:
            if self._closed:
                return False
            self._waiting.setdefault(client, deque()).append(batch)
            self._changed.notify_all()
            return True

    def take(self) -> tuple[str, Work] | None:
        """Wait for the next batch and return it with its client, who goes to the end of the turns; None if closed."""
        with self._changed:
            while True:
                if self._closed:
                    return None
                client = self._next()
                if client is not None:
                    break
                self._changed.wait()
            batches = self._waiting.pop(client)
            batch = batches.popleft()
            if batches:
                self._waiting[client] = batches  # after all others
            return client, batch

    def position(self, client: str) -> int | None:
        """Return how many clients have their turn before this one; None if it has no batch waiting."""
        with self._changed:
            if client not in self._waiting:
                return None
            held = self.holder is not None and self.holder != client
            return list(self._waiting).index(client) + int(held and self.holder not in self._waiting)

    def hold(self, client: str) -> None:
        """Give out this client's batches only, until `drop`."""
        with self._changed:
            self.holder = client
            self._changed.notify_all()

    def drop(self, client: str) -> list[Work]:
        """Forget a client; returns its batches that were not given out."""
        with self._changed:
            if self.holder == client:
                self.holder = None
            found = list(self._waiting.pop(client, ()))
            self._changed.notify_all()
            return found

    @property
    def has_next(self) -> bool:
        """Whether `take` would return a batch at once."""
        with self._changed:
            return not self._closed and self._next() is not None

    def close(self) -> list[Work]:
        """Let `take` return None from now on; returns the batches that were not given out."""
        with self._changed:
            self._closed = True
            left = [batch for batches in self._waiting.values() for batch in batches]
            self._waiting.clear()
            self._changed.notify_all()
            return left

    def _next(self) -> str | None:
        if self.holder is not None:
            return self.holder if self.holder in self._waiting else None
        return next(iter(self._waiting), None)


class Owner:
    """Does the work of all clients, a batch at a time, in the order that a queue gives it out.

    A client's own simulation cannot be read in batches, because its noise belongs to the call as a whole. Such a call
    is suspended at a pause of its computation (`opusim.processes.pause`) once its turn is over and another client
    waits: it goes back into the queue, its thread waits, and a new thread takes the next batch. The thread that takes a
    suspended call from the queue ends, and the call's own thread continues. So exactly one thread works at any time.

    Args:
        queue: gives out batches of work; closed by `stop`.
        act: does a batch, and returns None if more of the call is left.
        bell: called in each thread; returns a context manager whose value tells by ``send(b"")`` that work is done.

    Attributes:
        done: work that is done, with its result or error; another thread takes it from there.
        working: what is being done, or None.
    """

    def __init__(self, queue: FairQueue, act: Callable[[Work], Any], bell: Callable[[], Any]) -> None:
        self._queue, self._act, self._bell = queue, act, bell
        self._threads: list[threading.Thread] = []
        self._is_stopping = False
        self.done: deque[tuple[Work, Any]] = deque()
        self.working: Work | None = None

    def start(self) -> None:
        """Let a new thread work."""
        thread = threading.Thread(target=self._run, name="opusim-instrument", daemon=True)
        thread.start()
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]

    def stop(self, most_s: float) -> bool:
        """End all threads at their next pause or after their batch; return whether they ended in `most_s` seconds."""
        self._is_stopping = True
        for work in self._queue.close():
            work.resume()
        until = time.monotonic() + most_s
        while alive := [thread for thread in self._threads if thread.is_alive()]:
            if time.monotonic() > until:
                return False
            alive[0].join(until - time.monotonic())
        return True

    def _run(self) -> None:
        """Do batch after batch until the queue is closed, or a suspended call continues in its own thread."""
        with self._bell() as bell:
            while (taken := self._queue.take()) is not None:
                client, work = taken
                if work.is_suspended:
                    work.resume()
                    return
                found: Any = None
                if not work.dropped:
                    self._begin_turn(work)
                    try:
                        with pausing(partial(self._pause, client, work)):
                            found = self._act(work)
                    except BaseException as error:  # handed to the client
                        found = error
                    finally:
                        self._end_turn(work)
                if found is None and not work.dropped and self._queue.put(client, work):
                    continue
                self.done.append((work, found))
                bell.send(b"")

    def _begin_turn(self, work: Work) -> None:
        self.working, work.turn_began = work, time.perf_counter()

    def _end_turn(self, work: Work) -> None:
        work.session.busy_s += time.perf_counter() - work.turn_began
        self.working = None

    def _pause(self, client: str, work: Work) -> None:
        """Abandon a call whose client has left; let another client have its turn if this one's is over."""
        if self._is_stopping or work.dropped:
            raise Abandoned
        if time.perf_counter() - work.turn_began < TURN_S or not self._queue.has_next:
            return
        self._end_turn(work)
        work.suspend()
        if self._queue.put(client, work):
            self.start()
            work.wait()
        self._begin_turn(work)
        if self._is_stopping or work.dropped:
            raise Abandoned


_LOG = logging.getLogger("opusim.serving")
_TICK_MS = 200
_JOURNAL_EVERY_S = 60.0
_LAST_CALL_S = 2.0
"""Seconds that a server that stops waits for the call under way."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a server.

    Attributes:
        clients: clients at once, at least 1.
        clients_per_user: clients of one user at once, those who wait included, at least 1.
        request_mib: size of a message from a client, MiB, above 0.
        reply_mib: size of a reading, MiB, above 0.
        silence_s: seconds after which a client that was not heard loses its place, above 0.
        idle_s: seconds without a call after which a client that keeps others out loses its place, above 0.
    """

    clients: int = 256
    clients_per_user: int = 64
    request_mib: float = 64.0
    reply_mib: float = 256.0
    silence_s: float = 20.0
    idle_s: float = 3600.0

    def __post_init__(self) -> None:
        checks.integer(clients=self.clients, clients_per_user=self.clients_per_user, minimum=1)
        checks.positive(request_mib=self.request_mib, reply_mib=self.reply_mib)
        checks.positive(silence_s=self.silence_s, idle_s=self.idle_s)


class Server:
    """Serves an instrument to users, within limits, until it is stopped; from `run` on its own thread alone uses it.

    `bind` says where to listen, such as ``tcp://*:5555``; ``tcp://127.0.0.1:*`` takes a free port, which `endpoint`
    tells. Usage is written into the journal.
    """

    def __init__(
        self,
        instrument: Instrument,
        users: Users,
        *,
        bind: str,
        journal: Journal,
        limits: Limits | None = None,
    ) -> None:
        self._instrument, self._users, self._journal = instrument, users, journal
        self._limits = limits or Limits()
        self._request_limit = int(self._limits.request_mib * MIB)
        self._queue = FairQueue()
        self._places = Places(
            self._limits.clients,
            most_of_user=self._limits.clients_per_user,
            patience_s=self._limits.silence_s,
        )
        self._leaving: set[Session] = set()
        """Clients that lost their place, and whose call has not ended or device is not closed yet."""
        self._failed: DeviceError | None = None
        self._socket = ServerSocket(
            users, bind, largest=2 * self._request_limit + MIB, silence_s=self._limits.silence_s
        )
        self._owner = Owner(self._queue, self._advance, self._socket.bell)
        self.endpoint = self._socket.endpoint

    # Running

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set; the call under way ends at its next pause, and its client is told.

        A call of the hardware that does not end within 2 s is left behind; the device is not closed then.
        """
        self._owner.start()
        has_ended = False
        try:
            self._serve(stop)
        finally:
            has_ended = self._owner.stop(_LAST_CALL_S)
            # Tell clients, close devices that no thread uses any more, and write the journal.
            for session in self._places:
                if session.running is not None:
                    request = session.running.message.value("request", str, "")[:64]
                    error = DeviceUnavailable("the server was stopped; start it, and resume")
                    self._send(session.route, error_message(error, request=request))
            for session in (*self._places, *self._leaving):
                if session.running is not None:
                    session.calls += int(session.running.begun)
                if session.view is not None and has_ended:
                    session.view.close()
            self._write_journal()
            if not has_ended:
                _LOG.warning(
                    "a call of the device did not end within %g s; the process ends without closing the device",
                    _LAST_CALL_S,
                )
            self._socket.close(all_ended=has_ended)
            if has_ended:
                self._instrument.close()

    def _serve(self, stop: threading.Event) -> None:
        written = time.monotonic()
        while not stop.is_set():
            messages = self._socket.wait(_TICK_MS)
            while self._owner.done:
                self._finish(*self._owner.done.popleft())
            for route, user, frames in messages:
                self._take_message(route, user, frames)
            now = time.monotonic()
            for session in self._places:
                keeps_others_out = (session.exclusive or session.reserves) and session.running is None
                if now - session.heard > self._limits.silence_s:
                    self._end(session, f"was silent for {self._limits.silence_s:g} s")
                elif keeps_others_out and now - session.used > self._limits.idle_s:
                    self._end(session, f"made no call for {self._limits.idle_s:g} s while it kept others out")
                elif not self._users.admits(session.public):
                    self._end(session, "has no valid key any more")
            if now - written > _JOURNAL_EVERY_S:
                self._write_journal()
                written = now

    def _advance(self, work: Work) -> tuple[np.ndarray, ...] | None:
        """Do a batch; what the monitor of a shared device finds, and noise below the law, stops all clients.

        A client that gave its own device's monitor an earlier baseline, which it may have made up, stops only itself.
        """
        if self._failed is not None and work.message.kind != "close":
            raise type(self._failed)(str(self._failed))
        try:
            return work.advance(self._instrument)
        except (NoiseBelowCertificate, DeviceFault) as error:
            found_by_monitor = self._instrument.shared and work.message.kind == "call" and not work.begun
            law_is_broken = isinstance(error, NoiseBelowCertificate) and not work.session.has_compared
            if found_by_monitor or law_is_broken:
                self._failed = error
                _LOG.error("stopped for all clients until the server is restarted: %s", error)
            raise

    # Messages

    def _take_message(self, route: bytes, user: Key | None, frames: list[Any]) -> None:
        """Let a message's handler answer, if its user's key is known and has not expired; else refuse it."""
        name, request = "a removed key" if user is None else user.name, ""
        try:
            message = read_message(frames, limit=self._request_limit)
            request = str(message.value("request", str, ""))[:64]
            if user is None:
                raise DeviceUnavailable("this key is not known any more; ask for a new one")
            if user.has_expired:
                raise DeviceUnavailable(
                    f"the key of {name!r} expired on {user.expires}; have a new one accepted"
                )
            handlers = {
                "describe": self._describe,
                "open": self._open,
                "call": self._call,
                "alive": self._alive,
                "close": self._close,
            }
            handler = handlers.get(message.kind)
            if handler is None:
                raise BadMessage(
                    f"unknown kind {message.kind[:40]!r}; install the same version of opusim on both sides"
                )
            handler(route, user, request, message)
        except SessionLost as error:
            if request:  # a sign of life waits for no answer
                self._send(route, error_message(error, request=request))
        except (DeviceError, ConfigError, BadMessage, ValueError, TypeError, OverflowError) as error:
            self._refuse(route, name, request, error)
        except Exception as error:  # one client's message must not end the server
            if self._socket.refusals.may_tell(name):
                _LOG.exception("a message of %s failed", name)
            self._refuse(route, name, request, error)

    def _describe(self, route: bytes, user: Key, request: str, message: Message) -> None:
        served = self._instrument
        values = {
            **self._identity(user.name),
            "description": served.description.dump(),
            "can": served.can,
            "about": served.about(user.name),
            "n_inputs": served.n_inputs,
            "n_outputs": served.n_outputs,
        }
        self._send(route, Message(kind="described", values={"request": request, **values}))

    def _open(self, route: bytes, user: Key, request: str, message: Message) -> None:
        """Give a client a place, let it wait, or refuse it; the same ticket leads to the same place."""
        ticket = message.value("ticket", str)[:64]
        of_opening = (each for each in self._places if (each.ticket, each.public) == (ticket, user.public))
        session = next(of_opening, None)
        if session is not None:
            session.route, session.heard = route, time.monotonic()
            opened = session.opened
            self._send(
                route,
                self._state(session, request)
                if opened is None
                else replace(opened, values={**opened.values, "request": request}),
            )
            return
        window = Window(
            n_inputs=message.value("n_inputs", int, self._instrument.n_inputs),
            first=message.value("outputs_from", int, 0),
            n_outputs=message.value("n_outputs", int, self._instrument.n_outputs),
            mode=message.value("mode", str),
            seed=message.value("seed", int, 0),
        )
        self._instrument.check(window)
        reserves, exclusive = message.value("reserves", bool, False), message.value("exclusive", bool, False)
        obstacle = self._places.obstacle(window, reserves=reserves)
        waits = message.value("waits", bool, False)
        position = self._places.queued(user.name, ticket, obstacle, waits=waits)
        if position:
            values = {"request": request, "position": position, "reason": obstacle or "others wait"}
            self._send(route, Message(kind="waiting", values=values))
            return
        label = "".join(c for c in message.value("run", str, "") if c.isprintable())[:100]
        session = Session(
            token=secrets.token_hex(16),
            ticket=ticket,
            user=user.name,
            public=user.public,
            label=label,
            window=window,
            reserves=reserves,
            exclusive=exclusive,
            route=route,
        )
        self._places.add(session)
        if exclusive:
            self._queue.hold(session.token)
        session.running = Work(session, message)
        self._queue.put(session.token, session.running)

    def _call(self, route: bytes, user: Key, request: str, message: Message) -> None:
        """Take a call, or answer a repeated one with the answer that it had."""
        session = self._session(message, user)
        session.route, session.heard = route, time.monotonic()
        session.used = session.heard
        number, digest = message.value("number", int), content_digest(message)
        if number < session.number or (number == session.number and digest != session.digest):
            raise BadMessage(
                f"replayed: call {number} of this session was made before; open the device again"
            )
        if number == session.number:
            if session.reply is not None:
                self._socket.send(route, session.reply)
            return
        shared = self._instrument.n_outputs if self._instrument.shared else None
        require_room(message, session.window, shared=shared, most=int(self._limits.reply_mib * MIB))
        if session.running is not None:
            raise DeviceUnavailable("the session's earlier call is not finished; wait for it")
        session.number, session.digest, session.reply = number, digest, None
        session.running = Work(session, message)
        self._queue.put(session.token, session.running)

    def _alive(self, route: bytes, user: Key, request: str, message: Message) -> None:
        session = self._session(message, user)
        session.heard = time.monotonic()
        if message.value("has", int, 0) >= session.number:
            session.reply = None
        if request:
            session.route = route
            self._send(route, self._state(session, request))

    def _state(self, session: Session, request: str) -> Message:
        """Return how many clients have their turn before this one, and how far its last call is."""
        position, holder = self._queue.position(session.token), self._queue.holder
        others = (other.user for other in self._places if other.token == holder and other is not session)
        values = {
            "request": request,
            "position": 0 if position is None else position + int(self._owner.working is not None),
            "number": session.number,
            "answered": session.reply is not None,
            "held_by": next(others, ""),
        }
        return Message(kind="state", values=values)

    def _close(self, route: bytes, user: Key, request: str, message: Message) -> None:
        session = self._places.find(message.value("session", str), user.public)
        if session is not None:
            self._end(session, "closed the device")
        self._places.forget(user.name, message.value("ticket", str, "")[:64])
        self._send(route, Message(kind="closed", values={"request": request}))

    def _session(self, message: Message, user: Key) -> Session:
        session = self._places.find(message.value("session", str), user.public)
        if session is None:
            raise SessionLost("the server does not know this session; open the device again")
        return session

    # Answers

    def _finish(self, work: Work, found: Any) -> None:
        """Answer a call that is done."""
        session = work.session
        if session.running is work:
            session.running, session.used = None, time.monotonic()
        if work.message.kind == "close":
            self._leaving.discard(session)
            self._write(session)
            return
        if work.dropped:
            session.calls += int(work.begun)
            self._close_view(session)
            return
        request = work.message.value("request", str, "")[:64]
        try:
            if isinstance(found, BaseException):
                foreseen = isinstance(found, (DeviceError, ConfigError, ValueError, TypeError))
                if not foreseen and self._socket.refusals.may_tell(session.user):
                    _LOG.error("a call of %s failed", session.user, exc_info=found)
                message = error_message(found, request=request)
            elif work.is_opening:
                message = self._opened(session, request)
            else:
                view, arrays = session.view, found
                values = {"request": request, "usage": None if view is None else view.usage.to_json()}
                if view is not None and work.message.values.get("act") in TELLING:
                    values["law"], more = packed_law(view.law)
                    arrays += tuple(more)
                message = Message(kind="answer", values=values, arrays=arrays)
            frames = message.frames()
        except (ValueError, TypeError) as error:  # numbers of another package that JSON does not hold
            message = error_message(DeviceFault(f"the answer cannot be sent: {error}"), request=request)
            frames = message.frames()
        if work.is_opening:
            session.opened = message
            if message.kind == "error":
                self._end(session, "could not open the device")
        else:
            session.calls += 1
            session.reply = frames
        self._socket.send(session.route, frames)

    def _opened(self, session: Session, request: str) -> Message:
        view = session.view
        if view is None:
            raise BadMessage("open: the session has no view")
        law, arrays = packed_law(view.law)
        baseline = view.baseline
        values = {
            **self._identity(session.user),
            "request": request,
            "session": session.token,
            "law": law,
            "usage": view.usage.to_json(),
            "repeats": not view.shared,
            "request_mib": self._limits.request_mib,
            "silence_s": self._limits.silence_s,
            "monitored": baseline is not None,
            "converter": view.converter,
        }
        _LOG.info("%s opened %d outputs (%s)", session.user, session.window.n_outputs, session.label)
        return Message(
            kind="opened",
            values=values,
            arrays=(*arrays, *([] if baseline is None else [baseline.to_array()])),
        )

    def _identity(self, user: str) -> dict[str, Any]:
        return {"digest": self._instrument.digest, "fingerprint": self._instrument.fingerprint_for(user)}

    def _refuse(self, route: bytes, user: str, request: str, error: BaseException) -> None:
        """Answer with an error and log one line."""
        message = error_message(error, request=request)
        self._socket.refusals.tell(user, " ".join(str(error).split())[:300])
        self._send(route, message)

    def _send(self, route: bytes, message: Message) -> None:
        self._socket.send(route, message.frames())

    # Ends

    def _end(self, session: Session, why: str) -> None:
        """Take a client's place away; its device is closed by the thread that owns it, after a call under way."""
        self._places.remove(session)
        self._leaving.add(session)
        _LOG.info("%s %s (%s)", session.user, why, session.label)
        running = session.running
        if running is not None:
            running.dropped = True
        waiting = self._queue.drop(session.token)
        if running is None or (running in waiting and not running.is_suspended):
            self._close_view(session)
        elif running in waiting:  # its thread abandons it at its next turn, and `_finish` closes the device
            self._queue.put(session.token, running)

    def _close_view(self, session: Session) -> None:
        """Have a client's device closed by the thread that owns it; the journal is written after that."""
        self._queue.put(session.token, Work(session, Message(kind="close")))

    def _write_journal(self) -> None:
        for session in (*self._places, *self._leaving):
            self._write(session)

    def _write(self, session: Session) -> None:
        """Write what a client has used since the last entry, if anything; a full disk stops no reading."""
        usage = Usage() if session.view is None else session.view.usage
        before, calls, busy_s = session.logged
        if session.calls == calls and usage == before:
            return
        session.logged = usage, session.calls, session.busy_s
        entry = Entry(
            device=self._instrument.description.name,
            user=session.user,
            run=session.label,
            calls=session.calls - calls,
            used=usage - before,
            busy_s=round(session.busy_s - busy_s, 6),
        )
        try:
            self._journal.write(entry)
        except OSError as error:
            _LOG.error("the journal %s cannot be written: %s; lost: %s", self._journal.path, error, entry)
