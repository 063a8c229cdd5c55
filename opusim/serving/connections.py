"""The two ends of a connection: `Door`, at which a server hears its users, and `Link`, by which a client asks it.

Both sockets are encrypted; the door says whose key each message came under. libzmq asks who may come in by ZAP
(rfc.zeromq.org/spec/27), which is answered here, in the thread that reads messages. pyzmq's own authenticator is a
thread with an event loop; a server that ends would wait for it. A client asks one thing at a time, and neither side is
silent for longer than a stated time.
"""

from __future__ import annotations

import itertools
import logging
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from opusim.errors import ConfigError, DeviceTimeout, DeviceUnavailable
from opusim.serving.connections import BadMessage, Message, read_message
from opusim.serving.keys import Key, Users, notice_dead_peers, require_zmq
from opusim.serving.zeromq import zmq

_LOG = logging.getLogger("opusim.serving")
_HANDSHAKE_MS = 10_000
_BELL = "inproc://bell"
_ZAP, _ZAP_VERSION = "inproc://zeromq.zap.01", b"1.0"
_DOMAIN = "opusim"
_MESSAGES_AT_ONCE = 256
_ANSWERS_WAITING = 8
"""Messages that wait for a client that does not read; it asks again for what is dropped."""
_LINGER_MS = 1000
_LINES = 60
"""Lines about one cause that the log gets in each `_LINES_S` seconds; a number stands for the others."""
_LINES_S = 60.0
BEAT_S = 2.0
"""Seconds between the signs of life that a client sends, at most."""
_BEATS = 5
"""Signs of life, at least, within a time of silence after which one side takes the other for lost."""
_RECONNECT_MS = 100, 2000
_ANSWER_LIMIT = 2**40


class Refusals:
    """Writes one line for each refusal into the log, and a number if one cause has too many.

    Args:
        every_s: seconds after which a cause has its lines again.
    """

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


class Door:
    """Listens for users whose keys are known; used by one thread.

    Args:
        users: who they are.
        bind: where to listen, such as ``tcp://*:5555``; ``tcp://127.0.0.1:*`` takes a free port.
        largest: bytes of a frame beyond which libzmq hangs up before it takes memory.
        silence_s: seconds without a sign of life of its host after which a connection is closed.

    Attributes:
        endpoint: where it listens, with the port.
        refusals: writes refusals into the log.

    Raises:
        DeviceUnavailable: pyzmq is missing.
        ConfigError: the address cannot be bound.
    """

    def __init__(self, users: Users, bind: str, *, largest: int, silence_s: float) -> None:
        require_zmq()
        soft, hard = resource.getrlimit(
            resource.RLIMIT_NOFILE
        )  # each connection is an open file of this process
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
        self._events = self._configured(largest, silence_s)
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

    def _configured(self, largest: int, silence_s: float) -> Any:
        """Set the socket's options and return its events."""
        router, key = self._router, self._users.own
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
        return router.get_monitor_socket(failures | zmq.EVENT_HANDSHAKE_FAILED_AUTH)

    def wait(self, most_ms: int) -> list[tuple[bytes, Key | None, list[memoryview]]]:
        """Wait for messages, or for the bell, and return what came.

        Args:
            most_ms: milliseconds to wait at most.

        Returns:
            For each message its route, the user (None if the key was removed meanwhile) and its frames.
        """
        ready = dict(self._poller.poll(most_ms))
        if self._zap in ready:
            self._admit()
        if self._bell in ready:
            self._bell.recv()
        if self._events in ready:
            event = zmq.utils.monitor.recv_monitor_message(self._events)["event"]
            known = (
                "its key is not known" if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH else "it spoke no CURVE"
            )
            self.refusals.tell("a connection", known)
        self.refusals.sum_up()
        return self._messages() if self._router in ready else []

    def _admit(self) -> None:
        """Answer libzmq's question whether a connection may come in: only CURVE, and only a key that is known."""
        version, request, domain, _, _, mechanism, *credentials = self._zap.recv_multipart()
        public, known = b"", False
        if (version, domain, mechanism) == (_ZAP_VERSION, _DOMAIN.encode(), b"CURVE") and len(
            credentials
        ) == 1:
            public = zmq.utils.z85.encode(credentials[0])
            known = self._users.find(public.decode()) is not None
        status = [b"200", b"OK", public] if known else [b"400", b"unknown key", b""]
        self._zap.send_multipart([_ZAP_VERSION, request, *status, b""])

    def _messages(self) -> list[tuple[bytes, Key | None, list[memoryview]]]:
        found: list[tuple[bytes, Key | None, list[memoryview]]] = []
        size = 0
        while len(found) < _MESSAGES_AT_ONCE and size < self._largest:
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
        """Send what is under way for up to a second, and close.

        Args:
            all_ended: whether every thread has closed its `bell`; the context would wait for it.
        """
        self._router.disable_monitor()
        self._events.close(linger=0)
        self._bell.close(linger=0)
        self._router.close()
        self._zap.close(linger=0)
        if all_ended:
            self._context.term()


def beat_s(*silences_s: float) -> float:
    """Return the seconds between signs of life for which no side takes the other for lost: `_BEATS` in each time."""
    return min(BEAT_S, *(each / _BEATS for each in silences_s))


class Link:
    """An encrypted connection, which libzmq restores by itself if it breaks.

    A request is answered, refused, or given up after `silence_s` seconds in which nothing came from the server. Safe
    for threads: a heartbeat is left out while a request is under way, which sends its own.

    Args:
        host: name or address of the server.
        port: its port.
        key: the user's pair.
        server: the server's public key.
        name: the device's name, for messages.
        silence_s: as above, seconds.

    Raises:
        DeviceUnavailable: pyzmq is missing.
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
        """Send a request and return its answer.

        Args:
            message: the request; its value "request" names it.
            probe: what is sent after every `beat_s` seconds without an answer; None sends the request again, which the
                server must not mind.
            on_state: called with each message of kind "state" and returns whether to send the request again.
            timeout_s: seconds that the request may take, not counted while other clients have their turn; None for no
                limit.

        Raises:
            DeviceUnavailable: the server is silent, or refuses the key.
            DeviceTimeout: the request takes longer than `timeout_s`.
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
        """Send a sign of life, which nothing answers, every so many seconds; none while a request is under way."""

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
