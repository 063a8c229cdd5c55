"""The kind ``remote``: a device of another process or host, used like any device.

Its name is an address, ``remote://HOST:PORT``; options of `RemoteOptions` may follow it, as in
``remote://opu.lab:5555?exclusive&wait_s=600``. The description is the server's, without what only the server needs.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import torch
from pydantic import Field, ValidationError
from typing_extensions import override

from opusim import checks
from opusim.crossbar.programmable import Converter
from opusim.description.schema import DeviceDescription
from opusim.description.section import StrictSection, first_problem, flat
from opusim.devices.access import patience_s
from opusim.devices.base import NoisyDevice
from opusim.devices.baseline import Baseline
from opusim.devices.certificate import Certificate
from opusim.devices.inputs import Array, like_input, matrix_to_program, real_batch
from opusim.devices.monitor import BEFORE_ALL
from opusim.devices.usage import Usage
from opusim.errors import ConfigError, DeviceBusy, DeviceFault, NoiseUnknown
from opusim.noise import NoiseModel
from opusim.serving.connections import MIB, Link, Message, SessionLost, beat_s, told_error
from opusim.serving.instrument import same_medium, unpacked_law
from opusim.serving.keys import own_key, server_key

KIND = SCHEME = "remote"
_LOG = logging.getLogger("opusim")
_ASK_AGAIN_S = 1.0
_TELL_EVERY_S = 30.0
_CONNECT_S = 5.0


class RemoteOptions(StrictSection):
    """The section ``[options]`` of a remote device.

    Attributes:
        address: HOST:PORT of the server.
        serves: kind of the device that it serves.
        can: what clients may do with it, words with spaces between.
        digest: of the served description.
        fingerprint: of its medium (`opusim.serving.instrument`).
        outputs_from: first output of the window, which no other client may read then; None opens the first outputs,
            which others may read too.
        exclusive: whether no other client is served meanwhile, as for a calibration.
        wait_s: seconds to wait for a place; None takes OPUSIM_WAIT, or 0.
        run: what the server's journal calls this run; None for host and process.
        key: path or name of the user's key; None for OPUSIM_KEY or the only one.
        silence_s: seconds without a sign of the server after which it counts as lost.
        timeout_s: seconds that a call may take, not counted while other clients have their turn.
    """

    address: str
    serves: str
    can: str
    digest: str
    fingerprint: str
    outputs_from: int | None = Field(default=None, ge=0)
    exclusive: bool = False
    wait_s: float | None = Field(default=None, ge=0)
    run: str | None = None
    key: str | None = None
    silence_s: float = Field(default=15.0, gt=0)
    timeout_s: float = Field(default=600.0, gt=0)


_OF_ADDRESS: dict[str, Callable[[str], Any]] = {
    "outputs_from": int,
    "exclusive": {"": True, "true": True, "false": False}.__getitem__,
    **dict.fromkeys(("wait_s", "silence_s", "timeout_s"), float),
    **dict.fromkeys(("run", "key"), str),
}
"""Options that an address may have, and how their text is read."""


def describe(address: str) -> dict[str, Any]:
    """Return the description of the device at ``remote://HOST:PORT``, as a file would hold it; asks its server."""
    answer, name, options = _described(address)
    told = answer.value("description", dict)
    content = {
        key: value for key, value in told.items() if key in ("schema", "title", "frames", "provenance")
    }
    content |= {
        "name": f"{told.get('name')} at {name}",
        "kind": KIND,
        "n_inputs": answer.value("n_inputs", int),
        "n_outputs": answer.value("n_outputs", int),
        "options": {
            "address": name,
            "serves": str(told.get("kind")),
            "can": " ".join(answer.value("can", list)),
            "digest": answer.value("digest", str),
            "fingerprint": answer.value("fingerprint", str),
            **options,
        },
    }
    present, given = flat(content), {"status": "override", "source": "given with the address"}
    sources = {key: entry for key, entry in told.get("provenance", {}).items() if key in present}
    numbered = [f"options.{key}" for key in options if _OF_ADDRESS[key] in (int, float)]
    content["provenance"] = sources | dict.fromkeys(numbered, given)
    return content


def about(address: str) -> list[str]:
    """Return what a server tells about its device: window, sharing, noise, certificate, medium; a line each."""
    told = _described(address)[0].value("about", list, [])
    lines = [line for text in told for line in str(text).splitlines()]
    return ["".join(c for c in line if c.isprintable()) for line in lines]


def _described(address: str) -> tuple[Message, str, dict[str, Any]]:
    """Ask a server what it serves; returns its answer, HOST:PORT, and the options of the address."""
    parts = urlsplit(address)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != SCHEME or not host or not port or parts.path not in ("", "/"):
        raise ConfigError(address, "name", "is no address; write remote://HOST:PORT")
    options: dict[str, Any] = {}
    for key, text in parse_qsl(parts.query, keep_blank_values=True):
        if key not in _OF_ADDRESS:
            raise ConfigError(address, key, f"is no option; known are {', '.join(_OF_ADDRESS)}")
        try:
            options[key] = _OF_ADDRESS[key](text)
        except (ValueError, KeyError):
            raise ConfigError(address, key, f"{text!r} is no value for it; correct it") from None
    place, silence_s = f"{host}:{port}", float(options.get("silence_s", _CONNECT_S))
    link = _linked(place, options.get("key"), address, silence_s if silence_s > 0 else _CONNECT_S)
    try:
        answer = link.ask(Message(kind="describe", values={"request": link.new_request()}))
    finally:
        link.close()
    if answer.kind != "described":
        raise told_error(answer)
    return answer, place, options


def _linked(place: str, key: str | None, name: str, silence_s: float) -> Link:
    host, _, port = place.rpartition(":")
    return Link(host, int(port), own_key(key), server_key(host, int(port)), name=name, silence_s=silence_s)


class RemoteDevice(NoisyDevice):
    """A device that a server shares (`opusim device serve`).

    Readings, noise, usage and errors are the server's. In ``experiment``, readings of a simulation are those of the
    same device opened locally with the same mode and seed, bit for bit: its columns from `outputs_from` on. If the
    server is restarted between two steps, a run continues; amid a step of a simulation in ``experiment`` the device
    fails, and the step is done again when the run resumes.

    `program` and `wait` of a simulation change the client's own device. Only a client that has a shared device to
    itself can change it; the others must then open it again. If the server is restarted, what was programmed is lost,
    and readings fail until it is programmed again.

    Attributes:
        converter: bits and bounds of inputs and outputs, as the server states them; exact if it states none.
        saturated: which rows of the last `multiply` met a converter's bound, shape (batch,); None if the server tells
            nothing. Clients that share a device are told of all its outputs.

    Args:
        description: of kind ``remote``, as `describe` makes it.
        **window: as for `NoisyDevice`.

    Raises:
        ConfigError: an option is wrong.
    """

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        try:
            self._options = RemoteOptions.model_validate(description.options)
        except ValidationError as error:
            found = first_problem(error, RemoteOptions, description.name, whole="options")
            raise ConfigError(description.name, f"options.{found.key}", found.reason) from None
        self.converter = Converter()
        self.saturated: torch.Tensor | None = None
        self._law: NoiseModel | None = None
        self._link: Link | None = None
        self._session = ""
        self._told = self._earlier = Usage()
        self._compared: Baseline | None = None
        self._number = self._readings = 0
        self._pending: Message | None = None
        self._sought: int | None = None
        self._repeats = self._is_changed = False
        self._request_mib = self._beat_s = 0.0

    # Answered by the server

    @classmethod
    @override
    def capabilities_of(cls, description: DeviceDescription) -> frozenset[Any]:
        return frozenset(str(description.options.get("can", "")).split())

    @property
    @override
    def identity(self) -> tuple[str, str]:
        return self.name.removesuffix(f" at {self._options.address}"), self._options.digest

    @property
    @override
    def described_noise(self) -> NoiseModel:
        """The law that the server states, a certificate's if it has one."""
        if self._law is None and "program" in self.capabilities:
            self._require_open()
            self._take_law(self._call("law"), arrays_before=0)
        if self._law is None:
            raise NoiseUnknown(f"device {self.name!r} states no law for its noise; calibrate it")
        return self._law

    @override
    def attach_certificate(self, certificate: Certificate) -> None:
        """Refuse a certificate: it belongs to the server, which tells its law to every client."""
        reason = (
            "belongs to the server of the device; start it with: opusim device serve NAME --certificate FILE"
        )
        raise ConfigError(self.name, "certificate", reason)

    @property
    @override
    def repeats_noise(self) -> bool:
        return self.mode == "experiment" and self._repeats

    @property
    @override
    def usage(self) -> Usage:
        """What the server counted for this device, up to its last answer."""
        return self._earlier + self._told

    @override
    def compare_with(self, baseline: Baseline, step: int = BEFORE_ALL) -> None:
        """Compare on the server; nothing happens if it monitors one device for all its clients.

        The server takes no `step`: a run under a certificate needs it, and opens its device itself.
        """
        self._require_open()
        if self.monitor.baseline is not None:
            self.monitor.baseline = self._compared = baseline
            self._call("compare", baseline.to_array())

    # What works with matrices

    def matrix(self) -> torch.Tensor:  # (n_outputs, n_inputs)
        """Return the served device's matrix, float32; CapabilityMissing if the server does not offer it."""
        self._require_open()
        self.require("matrix")
        return self._tensor(self._call("matrix"))

    def program(self, matrix: torch.Tensor) -> torch.Tensor:
        """Write a matrix and return the realised one; CapabilityMissing also if the device is shared, not reserved."""
        self._require_open()
        self.require("program")
        return self._changed("program", self._checked(matrix))

    def programming_std(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the standard deviation of the realised matrix about the programmed one, as the server states it."""
        self._require_open()
        self.require("program")
        return self._tensor(self._call("programming_std", self._checked(matrix)))

    def multiply(self, x: Array) -> Array:  # (batch, n_inputs) -> (batch, n_outputs)
        """W x + fresh noise, a row for each row of x, entries in [-1, 1]."""
        return self._product("multiply", x, self.n_inputs, self.n_outputs)

    def multiply_transposed(self, x: Array) -> Array:  # (batch, n_outputs) -> (batch, n_inputs)
        """Return x W + fresh noise, a row for each row of x, entries in [-1, 1]."""
        return self._product("multiply_transposed", x, self.n_outputs, self.n_inputs)

    def wait(self, seconds: float) -> torch.Tensor:
        """Let time pass and return the matrix of readings from now on; CapabilityMissing as for `program`."""
        self._require_open()
        self.require("wait")
        checks.non_negative(seconds=seconds)
        return self._changed("wait", seconds=float(seconds))

    def _product(
        self, act: Literal["multiply", "multiply_transposed"], x: Array, width: int, outputs: int
    ) -> Array:
        self._require_open()
        self.require(act)
        batch = real_batch(x, width, torch.device("cpu"))

        def read() -> torch.Tensor:
            answer = self._call(act, batch.numpy())
            if act == "multiply":  # the saturated rows come after the reading
                told = [rows for rows in answer.arrays[1:] if rows.shape == (len(batch),)]
                self.saturated = torch.from_numpy(told[0] != 0) if told else None
            return self._tensor(answer)

        return like_input(self._read(read, (len(batch), outputs), readings=len(batch)), x)

    def _checked(self, matrix: torch.Tensor) -> np.ndarray:
        shape = self.n_outputs, self.n_inputs
        return np.asarray(matrix_to_program(matrix, shape, torch.device("cpu")).numpy())

    def _changed(self, act: str, array: np.ndarray | None = None, **values: Any) -> torch.Tensor:
        """Make a call that changes what the device holds; its answer tells the law from then on."""
        answer = self._call(act, array, **values)
        self._is_changed = True
        self._take_law(answer, arrays_before=1)
        return self._tensor(answer)

    def _take_law(self, answer: Message, *, arrays_before: int) -> None:
        """Take the law of an answer, whose arrays come after `arrays_before` others."""
        self._law = unpacked_law(answer.value("law", (dict, type(None))), answer.arrays[arrays_before:])

    def _tensor(self, answer: Message) -> torch.Tensor:
        """Return the reading of an answer, its first array."""
        if not answer.arrays:
            raise DeviceFault(f"device {self.name!r}: its server answered without a reading; restart it")
        found = np.asarray(answer.arrays[0], dtype=np.float32)
        if not (found.flags.writeable and found.flags.aligned):  # else the message's own memory serves
            found = found.copy()
        return torch.from_numpy(found).to(self._torch_device)

    # The interface of NoisyDevice

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        return self._tensor(self._call("project", x.to("cpu", torch.int8).numpy()))

    def _intensities(self, x: torch.Tensor) -> torch.Tensor:
        return self._tensor(self._call("intensities", x.to("cpu", torch.uint8).numpy()))

    def _draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._tensor(self._call("draw", shape=list(shape)))

    def _seek(self, step: int) -> None:
        """Note the step; it goes to the server with the next call."""
        self._sought, self._readings = step, 0

    def _open(self) -> None:
        self._link = self._new_link()
        self._earlier, self._told = self.usage, Usage()
        self._readings = 0
        try:
            self._enter()
        except BaseException:
            self._link.close()
            self._link = None
            raise
        self._link.beat(partial(self._alive, ""), self._beat_s)

    def _new_link(self) -> Link:
        return _linked(self._options.address, self._options.key, self.name, self._options.silence_s)

    def _close(self) -> None:
        if self._link is not None:
            self._link.tell(Message(kind="close", values={"session": self._session}))
            self._link.close()
            self._link = None

    @override
    def _reconnect(self) -> None:
        """Connect anew; the session and a call under way stay."""
        if self._link is not None:
            self._link.close()
        self._link = self._new_link()
        self._link.beat(partial(self._alive, ""), self._beat_s)

    @property
    def _connection(self) -> Link:
        if self._link is None:
            self._require_open()
            raise DeviceFault(f"device {self.name!r} has no connection; open it again")
        return self._link

    # Its place on the server

    def _enter(self) -> None:
        """Get a place on the server, and check that it serves what the description says."""
        link, patience = self._connection, patience_s(self._options.wait_s)
        until, told = time.monotonic() + patience, -_TELL_EVERY_S
        options = self._options
        values = {
            "n_inputs": self.n_inputs,
            "n_outputs": self.n_outputs,
            "outputs_from": options.outputs_from or 0,
            "reserves": options.outputs_from is not None,
            "exclusive": options.exclusive,
            "mode": self.mode,
            "seed": self._seed if self.mode == "experiment" else 0,
            "run": options.run or f"{socket.gethostname()}:{os.getpid()}",
            "ticket": secrets.token_hex(8),
            "waits": patience > 0,
        }
        while True:
            answer = link.ask(Message(kind="open", values={**values, "request": link.new_request()}))
            if answer.kind == "opened":
                break
            if answer.kind != "waiting":
                raise told_error(answer)
            position, reason = answer.value("position", int), answer.value("reason", str)
            if time.monotonic() > until:
                link.tell(Message(kind="close", values={"session": "", "ticket": values["ticket"]}))
                raise DeviceBusy(
                    f"device {self.name!r}: {reason}; waited {patience:g} s, position {position}"
                )
            if time.monotonic() - told > _TELL_EVERY_S:
                told = time.monotonic()
                _LOG.warning("opusim: waiting for device %r, position %d: %s", self.name, position, reason)
            time.sleep(_ASK_AGAIN_S)
        self._session = answer.value("session", str)
        what = ""
        if answer.value("digest", str) != options.digest:
            what = "its server has another description now"
        elif not same_medium(answer.value("fingerprint", str), options.fingerprint):
            what = "its medium is another one now"
        if what:
            link.tell(Message(kind="close", values={"session": self._session}))
            raise DeviceFault(f"device {self.name!r}: {what}; bring the earlier one back, or begin a new run")
        self._take_law(answer, arrays_before=0)
        converter = answer.value("converter", (dict, type(None)), None)
        self.converter = Converter() if converter is None else Converter(**converter)
        self._told = Usage.from_json(answer.value("usage", dict))
        self._repeats = answer.value("repeats", bool)
        self._request_mib = float(answer.value("request_mib", (int, float)))
        self._beat_s = beat_s(self._options.silence_s, float(answer.value("silence_s", (int, float))))
        self._number, self._pending, self._is_changed = 0, None, False
        if answer.value("monitored", bool):
            self.monitor.baseline = Baseline.from_array(np.array(answer.arrays[-1], dtype=np.float64))

    def _enter_again(self, act: str) -> None:
        """Get a new place after the server lost the earlier one, unless a step or a programmed matrix would change."""
        if self._is_changed and act != "program":
            raise DeviceFault(
                f"device {self.name!r}: its server was restarted, or dropped this client, and holds another "
                "matrix; program it again"
            )
        if self._repeats and self.mode == "experiment" and self._sought is None and self._readings:
            raise DeviceFault(
                f"device {self.name!r}: its server was restarted, or dropped this client, amid a step; resume the run"
            )
        self._earlier, self._told = self.usage, Usage()
        self._enter()
        if self._compared is not None:
            self.compare_with(self._compared)

    # Calls

    def _call(self, act: str, array: np.ndarray | None = None, **values: Any) -> Message:
        """Make a call; one that is repeated after a failure keeps its number, and so gets the same reading."""
        arrays = () if array is None else (array,)
        if array is not None and array.nbytes > self._request_mib * MIB:
            raise ValueError(
                f"x has {array.nbytes / MIB:,.4g} MiB, the server of device {self.name!r} takes {self._request_mib:g} "
                "at once; give fewer vectors"
            )
        if self._sought is not None:
            values["step"] = self._sought
        wanted = {"act": act, **values}
        while True:
            pending = self._pending
            # the pending call if it is the same one, else one with the next number
            if (
                pending is None
                or len(arrays) != len(pending.arrays)
                or not wanted.items() <= pending.values.items()
                or not all(np.array_equal(*pair) for pair in zip(pending.arrays, arrays, strict=True))
            ):
                self._number += 1
                request = f"c{self._number}"
                values = {**wanted, "number": self._number, "session": self._session, "request": request}
                pending = self._pending = Message(kind="call", values=values, arrays=arrays)
            answer = self._connection.ask(
                pending,
                probe=self._alive(pending.value("request", str)),
                on_state=partial(self._on_state, pending.value("number", int)),
                timeout_s=self._options.timeout_s,
            )
            self._pending = None
            if answer.kind != "error":
                break
            error = told_error(answer)
            if not isinstance(error, SessionLost):
                raise error
            self._enter_again(act)
        self._sought = None
        self._readings += 1
        self._told = Usage.from_json(answer.value("usage", dict))
        return answer

    def _alive(self, request: str) -> Message:
        values = {"session": self._session, "has": self._number - int(self._pending is not None)}
        return Message(kind="alive", values=values | ({"request": request} if request else {}))

    def _on_state(self, number: int, state: Message) -> bool:
        """Tell the user who has the device; return whether the call, or its answer, was lost on its way.

        An answer that was sent comes before a state that was sent after it, unless a connection broke in between.
        """
        holder = state.value("held_by", str, "")
        if holder:
            _LOG.warning("opusim: device %r is reserved by %s; waiting", self.name, holder)
        return bool(state.value("number", int, 0) < number or state.value("answered", bool, False))
