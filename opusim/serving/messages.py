"""What client and server exchange: a JSON header and raw little-endian arrays, each in a frame of its own.

The first frame is ``{"schema": 1, "kind": ..., "values": {...}, "arrays": [[dtype, shape], ...]}``; frame n + 1 holds
array n, C order. Nothing is executed or constructed by name, and every size is compared with what the frame holds
before an array is made. Schema 1 never changes its meaning; a new fact gets a new kind or value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opusim import errors
from opusim.errors import ConfigError, DeviceFault, OpusimError
from opusim.files import parse_json

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
        """Return the frames to send."""
        arrays = [_little_endian(array) for array in self.arrays]
        header = {
            "schema": SCHEMA,
            "kind": self.kind,
            "values": self.values,
            "arrays": [[array.dtype.str, list(array.shape)] for array in arrays],
        }
        return [
            json.dumps(header, allow_nan=False).encode(),
            *(raw_bytes(array) for array in arrays),
        ]

    def value(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """Return a value of a stated type.

        Args:
            name: of the value.
            kind: its type; a bool passes for no int.
            default: what is returned if it is missing; it must be there by default.

        Raises:
            BadMessage: it is missing or of another type.
        """
        found = self.values.get(name, default)
        if found is default and default is not ...:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
            raise BadMessage(f"{self.kind}: {name} is missing or of another type")
        return found


def read_message(frames: Sequence[Any], *, limit: int) -> Message:
    """Return the message that some frames hold.

    Args:
        frames: buffers, the header first.
        limit: bytes of all frames together, at most.

    Raises:
        BadMessage: they hold none, or more than they may.
    """
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
    """Return the array of a frame, once its announced size is that of the frame."""
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
    """Return the bytes of an array in C order, without a copy if it lies so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _little_endian(array: np.ndarray) -> np.ndarray:
    found = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    if found.dtype.str not in _DTYPES:
        raise TypeError(f"array has dtype {array.dtype}: must be int8, uint8, float32 or float64")
    return found


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
