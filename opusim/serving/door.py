"""The door of a server: an encrypted socket that says whose key each message came under.

libzmq asks who may come in by ZAP (rfc.zeromq.org/spec/27), which is answered here, in the thread that reads messages.
pyzmq's own authenticator is a thread with an event loop; a server that ends would wait for it.
"""

from __future__ import annotations

import logging
import resource
import time
from typing import Any

from opusim.errors import ConfigError
from opusim.serving.keys import Key, Users
from opusim.serving.zeromq import notice_dead_peers, require_zmq, zmq

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
        _allow_many_connections()
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


def _allow_many_connections() -> None:
    """Raise this process's limit of open files to what the system lets it have; each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
