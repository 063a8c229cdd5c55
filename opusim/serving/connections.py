"""The two ends of a connection: `ServerSocket`, which receives requests, and `Link`, by which a client asks.

Both sockets are encrypted; the server says whose key each message came under. libzmq asks by ZAP
(rfc.zeromq.org/spec/27) whose connections to accept, and the thread that reads messages answers. pyzmq's own
authenticator is a thread with an event loop; a server that ends would wait for it. A client asks one thing at a time,
and neither side is silent for longer than a stated time.

A message is a JSON header and raw little-endian arrays, each in a frame of its own. The first frame is ``{"schema": 1,
"kind": ..., "values": {...}, "arrays": [[dtype, shape], ...]}``; frame n + 1 holds array n, C order. Nothing is
executed or constructed by name, and every size is compared with what the frame holds before an array is made. Schema 1
never changes its meaning; a new fact gets a new kind or value.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import resource
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opusim import errors
from opusim.errors import ConfigError, DeviceFault, DeviceTimeout, DeviceUnavailable, OpusimError
from opusim.files import parse_json
from opusim.serving.keys import Key, Users, notice_dead_peers, require_zmq, zmq

SCHEMA = 1
HEADER_LIMIT = 2**16
ARRAYS_LIMIT = 16
MIB = 2**20
_DTYPES = ("|i1", "|u1", "<f4", "<f8")
_LENGTH_LIMIT = 2**40
_TEXT_LIMIT = 2000


class SessionLost(errors.DeviceUnavailable):
    """The server does not know the session of a call: it was restarted, or dropped the client."""


_SENT = {
    kind.__name__: kind
    for kind in (
        SessionLost,
        *(errors.DeviceUnavailable, errors.DeviceBusy, errors.DeviceTimeout, errors.DeviceFault),
        *(errors.CapabilityMissing, errors.NoiseBelowCertificate, errors.NoiseUnknown, errors.DeviceError),
        *(ValueError, TypeError),
    )
}
"""Errors that cross the network under their own name."""


class BadMessage(OpusimError, ValueError):
    """Bytes that are no message of this schema; the text is one line."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message.

    Attributes:
        kind: what it asks for or tells.
        values: plain JSON values.
        arrays: int8, uint8, float32 or float64; those of a received message share its memory and cannot be written.
    """

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    arrays: tuple[np.ndarray, ...] = ()

    def frames(self) -> list[Any]:
        """Return the frames to send; TypeError if an array has a dtype that no message may hold."""
        arrays = []
        for array in self.arrays:
            arrays.append(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")))
            if arrays[-1].dtype.str not in _DTYPES:
                raise TypeError(f"array has dtype {array.dtype}: must be int8, uint8, float32 or float64")
        header = {
            "schema": SCHEMA,
            "kind": self.kind,
            "values": self.values,
            "arrays": [[array.dtype.str, list(array.shape)] for array in arrays],
        }
        return [json.dumps(header, allow_nan=False).encode(), *(raw_bytes(array) for array in arrays)]

    def value(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """Return a value of a type (a bool is no int), or BadMessage; one without a default must be there."""
        found = self.values.get(name, default)
        if found is default and default is not ...:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
            raise BadMessage(f"{self.kind}: {name} is missing or of another type")
        return found


def read_message(frames: Sequence[Any], *, limit: int) -> Message:
    """Return the message that some frames hold, the header first; BadMessage if they are none, or exceed the limit."""
    views = [memoryview(frame) for frame in frames]
    size = sum(view.nbytes for view in views)
    if size > limit:
        raise BadMessage(f"oversized: {size:,} bytes, at most {limit:,}; send fewer vectors at once")
    if not 1 <= len(views) <= 1 + ARRAYS_LIMIT or views[0].nbytes > HEADER_LIMIT:
        raise BadMessage("garbage: no header")
    try:
        header = parse_json(bytes(views[0]))
    except ValueError:
        raise BadMessage("garbage: the header is not JSON") from None
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise BadMessage(f"schema: this side speaks {SCHEMA}; install the same version of opusim on both")
    kind, values, told = header.get("kind"), header.get("values"), header.get("arrays")
    if not isinstance(kind, str) or not isinstance(values, dict) or not isinstance(told, list):
        raise BadMessage("garbage: the header lacks kind, values or arrays")
    if len(told) != len(views) - 1:
        raise BadMessage(f"garbage: {len(told)} arrays are announced, {len(views) - 1} came")
    arrays = tuple(_array(entry, view) for entry, view in zip(told, views[1:], strict=True))
    return Message(kind=kind, values=values, arrays=arrays)


def _array(entry: Any, view: memoryview) -> np.ndarray:
    """Return the array of a frame; refuse an announced size other than the frame's."""
    if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list)):
        raise BadMessage("garbage: an array is announced without dtype and shape")
    name, shape = entry
    if name not in _DTYPES or len(shape) > 8:
        raise BadMessage("garbage: an array of an unknown dtype")
    if not all(type(length) is int and 0 <= length <= _LENGTH_LIMIT for length in shape):
        raise BadMessage("garbage: an array with an impossible shape")
    dtype = np.dtype(name)
    if math.prod(shape) * dtype.itemsize != view.nbytes:
        raise BadMessage(
            f"garbage: an array of {view.nbytes:,} bytes is announced with the shape {tuple(shape)}"
        )
    return np.frombuffer(view, dtype=dtype).reshape(shape)


def raw_bytes(array: np.ndarray) -> memoryview:
    """Return the bytes of an array in C order, without a copy if it is stored so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def error_message(error: BaseException, **values: Any) -> Message:
    """Return the message that tells an error; one of an unknown class becomes a fault of the device."""
    text = " ".join(str(error).split())[:_TEXT_LIMIT]
    if isinstance(error, ConfigError):
        told = {"class": "ConfigError", "parts": [error.file, error.key, error.reason]}
    else:
        name = next((kind.__name__ for kind in type(error).__mro__ if _SENT.get(kind.__name__) is kind), "")
        told = {"class": name or "DeviceFault", "parts": [text if name else f"the server failed: {text}"]}
    return Message(kind="error", values={**values, **told})


def told_error(message: Message) -> BaseException:
    """Return the error that a message tells, of the class that the server raised."""
    parts = [str(part) for part in message.value("parts", list)]
    name = message.value("class", str)
    if name == "ConfigError" and len(parts) == 3:
        return ConfigError(*parts)
    return _SENT.get(name, DeviceFault)(" ".join(parts))


_LOG = logging.getLogger("opusim.serving")
_HANDSHAKE_MS = 10_000
_BELL = "inproc://bell"
_ZAP, _ZAP_VERSION = "inproc://zeromq.zap.01", b"1.0"
_DOMAIN = "opusim"
_MESSAGES_AT_ONCE = 256
_ANSWERS_WAITING = 8
"""Most messages that wait for a client that does not read; the client asks again for dropped ones."""
_LINGER_MS = 1000
_LINES = 60
"""Most lines about one cause in the log in `_LINES_S` seconds; the others are counted."""
_LINES_S = 60.0
BEAT_S = 2.0
"""Seconds between the signs of life that a client sends, at most."""
_BEATS = 5
"""Fewest signs of life within a silence after which one side takes the other for lost."""
_RECONNECT_MS = 100, 2000
_ANSWER_LIMIT = 2**40


class Refusals:
    """Logs one line for each refusal, and counts those of a cause that has too many within `every_s` seconds."""

    def __init__(self, every_s: float = _LINES_S) -> None:
        self._every_s = every_s
        self._told: dict[str, tuple[float, int]] = {}
        """When the lines of each cause began, and how many there were, those that were left out included."""

    def may_tell(self, cause: str) -> bool:
        """Count a line of a cause, such as a user, and return whether it is to be written."""
        self.sum_up()
        began, lines = self._told.get(cause, (time.monotonic(), 0))
        self._told[cause] = began, lines + 1
        return lines < _LINES

    def tell(self, cause: str, text: str) -> None:
        """Write a line, unless its cause had too many."""
        if self.may_tell(cause):
            _LOG.warning("refused %s: %s", cause, text)

    def sum_up(self) -> None:
        """Write how many lines were left out, for each cause whose time is over."""
        now = time.monotonic()
        for cause, (began, lines) in list(self._told.items()):
            if now - began > self._every_s:
                del self._told[cause]
                if lines > _LINES:
                    _LOG.warning("refused %s: %d more within %.0f s", cause, lines - _LINES, now - began)


class ServerSocket:
    """Listens, at ``tcp://*:5555`` or the like, for users whose keys are known; used by one thread.

    Args:
        users: who they are.
        bind: where to listen; ``tcp://127.0.0.1:*`` takes a free port, which `endpoint` tells.
        largest: bytes of a frame beyond which libzmq hangs up before it takes memory.
        silence_s: seconds without a sign of life of its host after which a connection is closed.
    """

    def __init__(self, users: Users, bind: str, *, largest: int, silence_s: float) -> None:
        require_zmq()
        # each connection is an open file of this process
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._users, self._largest = users, largest
        self.refusals = Refusals()
        self._context = zmq.Context()
        self._zap: Any = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)  # of this context, which no other server of the process has
        self._router: Any = self._context.socket(zmq.ROUTER)
        self._bell: Any = self._context.socket(zmq.PULL)
        self._bell.bind(_BELL)
        router, key = self._router, users.own
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = key.public.encode(), (key.secret or "").encode()
        router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        router.setsockopt(zmq.MAXMSGSIZE, largest)
        router.setsockopt(zmq.RCVHWM, 8)  # messages of each client
        router.setsockopt(zmq.SNDHWM, _ANSWERS_WAITING)
        # Before it binds: a connection keeps the linger of that moment. If it breaks while the socket closes, it waits
        # that long for its queue to empty, by libzmq's default for ever (zeromq/libzmq#2733).
        router.setsockopt(zmq.LINGER, _LINGER_MS)
        router.setsockopt(zmq.BACKLOG, 4096)
        router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        notice_dead_peers(router, silence_s)
        failures = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        self._events = router.get_monitor_socket(failures | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            reason = f"cannot be bound ({error.strerror}); give tcp://HOST:PORT"
            raise ConfigError("--bind", bind, reason) from error
        self.endpoint: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        for socket in (self._router, self._bell, self._events, self._zap):
            self._poller.register(socket, zmq.POLLIN)

    def wait(self, most_ms: int) -> list[tuple[bytes, Key | None, list[memoryview]]]:
        """Wait for messages or the bell; return of each its route, user (None: key removed meanwhile) and frames."""
        ready = dict(self._poller.poll(most_ms))
        if self._zap in ready:
            # libzmq asks whether a connection may come in: only CURVE, and only a key that is known
            version, asked, domain, _, _, mechanism, *credentials = self._zap.recv_multipart()
            public, known = b"", False
            is_curve = (version, domain, mechanism) == (_ZAP_VERSION, _DOMAIN.encode(), b"CURVE")
            if is_curve and len(credentials) == 1:
                public = zmq.utils.z85.encode(credentials[0])
                known = self._users.find(public.decode()) is not None
            status = [b"200", b"OK", public] if known else [b"400", b"unknown key", b""]
            self._zap.send_multipart([_ZAP_VERSION, asked, *status, b""])
        if self._bell in ready:
            self._bell.recv()
        if self._events in ready:
            event = zmq.utils.monitor.recv_monitor_message(self._events)["event"]
            is_unknown = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            self.refusals.tell("a connection", "its key is not known" if is_unknown else "it spoke no CURVE")
        self.refusals.sum_up()
        found: list[tuple[bytes, Key | None, list[memoryview]]] = []
        size = 0
        while self._router in ready and len(found) < _MESSAGES_AT_ONCE and size < self._largest:
            try:
                route, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            if frames:
                user = self._users.find(str(frames[-1].get("User-Id")))
                found.append((route.bytes, user, [frame.buffer for frame in frames]))
                size += sum(len(frame) for frame in frames)
        return found

    def bell(self) -> Any:
        """Return a socket for another thread, which ends `wait` by sending on it, and closes it in the end."""
        bell = self._context.socket(zmq.PUSH)
        bell.setsockopt(zmq.LINGER, 0)
        bell.connect(_BELL)
        return bell

    def send(self, route: bytes, frames: list[Any]) -> None:
        """Send a message; nothing happens if its route is gone."""
        self._router.send_multipart([route, *frames], copy=False)

    def close(self, *, all_ended: bool = True) -> None:
        """Send what is under way for up to a second, and close; the context would wait for threads not `all_ended`."""
        self._router.disable_monitor()
        self._events.close(linger=0)
        self._bell.close(linger=0)
        self._router.close()
        self._zap.close(linger=0)
        if all_ended:
            self._context.term()


def beat_s(*silences_s: float) -> float:
    """Return the seconds between signs of life: at most `BEAT_S`, and at least `_BEATS` signs in each silence."""
    return min(BEAT_S, *(each / _BEATS for each in silences_s))


class Link:
    """An encrypted connection of a user's pair to a server's key, which libzmq restores by itself if it breaks.

    A request is answered, refused, or given up after `silence_s` seconds in which nothing came from the server. Safe
    for threads: a heartbeat is left out while a request is under way, which sends its own.
    """

    def __init__(self, host: str, port: int, key: Key, server: Key, *, name: str, silence_s: float) -> None:
        require_zmq()
        self._name, self._user, self._silence_s = name, key.name, silence_s
        self._beat_s = beat_s(silence_s)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._handshakes_failed = self._has_met = False
        self._closing = threading.Event()
        socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self._socket = socket
        socket.curve_serverkey = server.public.encode()
        socket.curve_publickey, socket.curve_secretkey = key.public.encode(), (key.secret or "").encode()
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])
        notice_dead_peers(socket, silence_s)
        socket.setsockopt(zmq.IPV6, 1)
        failures = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        handshakes = failures | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._events = socket.get_monitor_socket(handshakes)
        try:
            socket.connect(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise DeviceUnavailable(
                f"device {name!r}: {host}:{port} is no address ({error.strerror})"
            ) from error

    def new_request(self) -> str:
        """Return a name that no earlier request of this connection has."""
        return f"r{next(self._numbers)}"

    def ask(
        self,
        message: Message,
        *,
        probe: Message | None = None,
        on_state: Callable[[Message], bool] | None = None,
        timeout_s: float | None = None,
    ) -> Message:
        """Send a request and return its answer; DeviceUnavailable or DeviceTimeout if there is none.

        Args:
            message: the request; its value "request" names it.
            probe: message sent after every `beat_s` seconds without an answer; None sends the request again.
            on_state: called with each message of kind "state" and returns whether to send the request again.
            timeout_s: not counted while other clients have their turn; None for no limit.
        """
        request, frames = message.value("request", str), message.frames()
        with self._lock:
            with suppress(zmq.Again):  # answers that came too late
                while True:
                    self._socket.recv_multipart(zmq.NOBLOCK)
            heard = begun = time.monotonic()
            self._send(frames)
            beat = heard + self._beat_s
            while True:
                answer = self._receive(request, until=beat)
                now = time.monotonic()
                if self._closing.is_set():
                    raise DeviceUnavailable(f"device {self._name!r}: its connection was closed during a call")
                if answer is not None:
                    heard = now
                    if answer.kind != "state":
                        return answer
                    if answer.value("position", int, 0) > 0:
                        begun = now
                    if on_state is not None and on_state(answer):
                        self._send(frames)
                if now - heard > self._silence_s:
                    cause = "check that it runs and that the network lets you through"
                    if self._handshakes_failed and not self._has_met:
                        cause = "what listens there has another key than the server.pub here, or is no opusim server"
                    raise DeviceUnavailable(
                        f"device {self._name!r}: no answer from its server for {self._silence_s:g} s; {cause}"
                    )
                if timeout_s is not None and now - begun > timeout_s:
                    raise DeviceTimeout(f"device {self._name!r} did not finish a call within {timeout_s:g} s")
                if now >= beat:
                    self._send(frames if probe is None else probe.frames())
                    beat = now + self._beat_s

    def beat(self, sign: Callable[[], Message], every_s: float) -> None:
        """Send a sign of life, which nothing answers, every `every_s` seconds; none while a request is under way."""

        def work() -> None:
            while not self._closing.wait(every_s):
                if self._lock.acquire(blocking=False):
                    try:
                        if not self._closing.is_set():
                            self._send(sign().frames())
                    finally:
                        self._lock.release()

        threading.Thread(target=work, name="opusim-heartbeat", daemon=True).start()

    def tell(self, message: Message) -> None:
        """Send what needs no answer, and give it a moment to leave."""
        with self._lock:
            self._socket.setsockopt(zmq.LINGER, 300)
            self._send(message.frames())

    def close(self) -> None:
        """Close the connection; a call of another thread ends within `BEAT_S` seconds."""
        self._closing.set()
        with self._lock:
            self._socket.disable_monitor()
            self._events.close(linger=0)
            self._socket.close()

    def _send(self, frames: list[Any]) -> None:
        with suppress(zmq.Again):  # too much waits for a connection already; the silence is reported in time
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def _receive(self, request: str, *, until: float) -> Message | None:
        """Return the next answer to a request, or None once the time is over."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        while (left := until - time.monotonic()) > 0:
            ready = dict(poller.poll(max(1, int(1000 * left))))
            if self._events in ready:
                event = zmq.utils.monitor.recv_monitor_message(self._events)["event"]
                self._has_met |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                self._handshakes_failed |= event != zmq.EVENT_HANDSHAKE_SUCCEEDED
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    raise DeviceUnavailable(
                        f"device {self._name!r}: the server does not know the key of {self._user!r}; have its .pub "
                        "file put into the server's folder of keys"
                    )
            if self._socket in ready:
                frames = self._socket.recv_multipart(copy=False)
                try:
                    message = read_message([frame.buffer for frame in frames], limit=_ANSWER_LIMIT)
                except BadMessage as error:
                    raise DeviceUnavailable(
                        f"device {self._name!r}: its server sent no message: {error}"
                    ) from error
                if message.values.get("request") in (request, ""):
                    return message
        return None
