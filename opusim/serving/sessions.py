"""The clients of a server: those with a place, those who wait for one, and the call that each has under way."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opusim import checks
from opusim.devices.baseline import Baseline
from opusim.devices.kinds import CAPABILITIES
from opusim.devices.usage import Usage
from opusim.errors import CapabilityMissing, DeviceBusy
from opusim.serving.connections import MIB, BadMessage, Message, raw_bytes
from opusim.serving.instrument import Instrument, View, Window

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
    """A call of a client, done batch by batch.

    Args:
        session: whose it is.
        message: of kind "open", "call" with an act, or "close".

    Attributes:
        begun: whether a part of it is done.
        dropped: whether its client is gone.
        turn_began: when its present turn began, seconds of the performance counter.
    """

    def __init__(self, session: Session, message: Message) -> None:
        self.session = session
        self.message = message
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
    """Refuse a call whose answer, or the reading it is cut from, exceeds what a server sends, before anything is read.

    Args:
        message: the call.
        window: the client's.
        shared: outputs of the device that clients share; None if the client has a device of its own, which then has
            all outputs up to the window's last.
        most: bytes.

    Raises:
        ValueError: the answer would be too large.
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
    """The clients that have a place, and those that wait for one.

    Waiting clients ask again and again; one that has not asked for `patience_s` seconds loses its turn.

    Args:
        most: clients at once, at least 1.
        most_of_user: clients of one user at once, those who wait included, at least 1.
        patience_s: as above.
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

    def of_ticket(self, ticket: str, public: str) -> Session | None:
        """Return the session that an opening led to, if it did."""
        return next((each for each in self if each.ticket == ticket and each.public == public), None)

    def add(self, session: Session) -> None:
        """Give a client its place."""
        self._sessions[session.token] = session

    def remove(self, session: Session) -> None:
        """Take a client's place away."""
        self._sessions.pop(session.token, None)

    def queued(self, user: str, ticket: str, obstacle: str | None, *, waits: bool) -> int:
        """Return how many clients get in before this one; 0 if it gets in now.

        Args:
            user: whose it is.
            ticket: of the opening.
            obstacle: what keeps it out, or None.
            waits: whether it waits.

        Raises:
            DeviceBusy: it is kept out and does not wait, or the user has as many clients as it may.
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
