"""pyzmq, which only served devices need (the extra ``served``)."""

from __future__ import annotations

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


__all__ = ["require_zmq", "zmq"]
