"""pyzmq, which only served devices need (the extra ``served``)."""

from __future__ import annotations

import math
from typing import Any

from opusim.errors import DeviceUnavailable

try:
    import zmq
    import zmq.utils.monitor
    import zmq.utils.z85
except ModuleNotFoundError:  # an extra; `require_zmq` says so when it is needed
    zmq = None  # type: ignore[assignment]


def require_zmq() -> None:
    """Refuse to go further without pyzmq.

    Raises:
        DeviceUnavailable: it is not installed, or its libzmq has no encryption.
    """
    if zmq is None:
        raise DeviceUnavailable(
            "served devices need pyzmq, which is not installed: pip install 'opusim[served]'"
        )
    if not zmq.has("curve"):
        raise DeviceUnavailable(
            "this libzmq has no CURVE encryption; install pyzmq's own wheel: pip install pyzmq"
        )


def notice_dead_peers(socket: Any, silence_s: float) -> None:
    """Have the kernel close connections whose peer's host is gone, after about `silence_s` seconds.

    libzmq's own heartbeats must stay off: if a peer hangs up while its messages fill the queue of this side, the next
    heartbeat meets the assertion ``!_io_error`` of stream_engine_base.cpp (4.3.5), which aborts the process.

    Args:
        socket: a socket, before it binds or connects.
        silence_s: above 0.
    """
    probes = 3
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, probes)
    for option in (zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL):
        socket.setsockopt(option, max(1, math.ceil(silence_s / (probes + 1))))


__all__ = ["notice_dead_peers", "require_zmq", "zmq"]
