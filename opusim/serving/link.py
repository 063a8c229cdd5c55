"""A client's connection to a server: one request at a time, never silent for longer than a stated time."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from opusim.errors import DeviceTimeout, DeviceUnavailable
from opusim.serving.keys import Key
from opusim.serving.messages import MIB, BadMessage, Message, read_message
from opusim.serving.zeromq import notice_dead_peers, require_zmq, zmq

BEAT_S = 2.0
"""Seconds between the signs of life that a client sends, at most."""
_BEATS = 5
"""Signs of life, at least, within a time of silence after which one side takes the other for lost."""
_RECONNECT_MS = 100, 2000
_ANSWER_LIMIT = 2**40


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
        self._handshakes_failed, self._has_met = 0, False
        self._closing = False
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
            self._forget_late_answers()
            heard = begun = time.monotonic()
            self._send(frames)
            beat = heard + self._beat_s
            while True:
                answer = self._receive(request, until=beat)
                now = time.monotonic()
                if self._closing:
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
                    raise self._silence()
                if timeout_s is not None and now - begun > timeout_s:
                    raise DeviceTimeout(f"device {self._name!r} did not finish a call within {timeout_s:g} s")
                if now >= beat:
                    self._send(frames if probe is None else probe.frames())
                    beat = now + self._beat_s

    def beat(self, message: Message) -> None:
        """Send a sign of life that nothing answers, unless a request is under way."""
        if self._lock.acquire(blocking=False):
            try:
                self._send(message.frames())
            finally:
                self._lock.release()

    def tell(self, message: Message) -> None:
        """Send what needs no answer, and give it a moment to leave."""
        with self._lock:
            self._socket.setsockopt(zmq.LINGER, 300)
            self._send(message.frames())

    def close(self) -> None:
        """Close the connection; a call of another thread ends within `BEAT_S` seconds."""
        self._closing = True
        with self._lock:
            self._socket.disable_monitor()
            self._events.close(linger=0)
            self._socket.close()

    def _send(self, frames: list[Any]) -> None:
        with suppress(zmq.Again):  # too much waits for a connection already; the silence is reported in time
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def _forget_late_answers(self) -> None:
        with suppress(zmq.Again):
            while True:
                self._socket.recv_multipart(zmq.NOBLOCK)

    def _receive(self, request: str, *, until: float) -> Message | None:
        """Return the next answer to a request, or None once the time is over."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        while (left := until - time.monotonic()) > 0:
            ready = dict(poller.poll(max(1, int(1000 * left))))
            if self._events in ready:
                self._take_handshake(zmq.utils.monitor.recv_monitor_message(self._events))
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

    def _take_handshake(self, event: Mapping[str, Any]) -> None:
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._has_met = True
            return
        self._handshakes_failed += 1
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise DeviceUnavailable(
                f"device {self._name!r}: the server does not know the key of {self._user!r}; have its .pub file put "
                "into the server's folder of keys"
            )

    def _silence(self) -> DeviceUnavailable:
        cause = "check that it runs and that the network lets you through"
        if self._handshakes_failed and not self._has_met:
            cause = "what listens there has another key than the server.pub here, or is no opusim server"
        return DeviceUnavailable(
            f"device {self._name!r}: no answer from its server for {self._silence_s:g} s; {cause}"
        )


class Heartbeat:
    """A thread that tells a server that its client lives.

    Args:
        send: sends the sign of life.
        every_s: seconds between two signs.
    """

    def __init__(self, send: Callable[[], None], every_s: float) -> None:
        self._send, self._every_s = send, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="opusim-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stop.wait(self._every_s):
            self._send()


__all__ = ["BEAT_S", "MIB", "Heartbeat", "Link", "beat_s"]
