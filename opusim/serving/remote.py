"""The kind ``remote``: a device of another process or host, used like any device.

Its name is an address, ``remote://HOST:PORT``; what `RemoteOptions` lists may follow it, as in
``remote://opu.lab:5555?exclusive&wait_s=600``. The description is the server's, without what only the server needs.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import torch
from pydantic import Field, ValidationError

from opusim.crossbar.converter import Converter
from opusim.description.schema import DeviceDescription
from opusim.description.section import StrictSection, first_problem, flat
from opusim.devices.access import patience_s
from opusim.devices.baseline import Baseline
from opusim.devices.certificate import Certificate
from opusim.devices.monitor import BEFORE_ALL
from opusim.devices.usage import Usage
from opusim.errors import ConfigError, DeviceBusy, DeviceFault, NoiseUnknown
from opusim.noise import NoiseModel
from opusim.serving.instrument import same_medium
from opusim.serving.keys import own_key, server_key
from opusim.serving.link import Heartbeat, Link, beat_s
from opusim.serving.messages import MIB, Message, told_error
from opusim.serving.products import RemoteProducts
from opusim.serving.views import unpacked_law

KIND = SCHEME = "remote"
_LOG = logging.getLogger("opusim")
_ASK_AGAIN_S = 1.0
_TELL_EVERY_S = 30.0
_CONNECT_S = 5.0
_SESSION_LOST = "SessionLost"


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


_OF_ADDRESS = ("outputs_from", "exclusive", "wait_s", "run", "key", "silence_s", "timeout_s")
_WHOLE = ("outputs_from",)
_NUMBERS = ("wait_s", "silence_s", "timeout_s")


def describe(address: str) -> dict[str, Any]:
    """Return the description of a served device, as a file would hold it; asks its server.

    Args:
        address: ``remote://HOST:PORT``, with options behind a question mark.

    Raises:
        ConfigError: it is no such address, or a key is missing.
        DeviceUnavailable: the server does not answer, or refuses the key.
    """
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
    present, numbers = flat(content), {f"options.{key}" for key in options}
    given = {"status": "override", "source": "given with the address"}
    sources = {key: entry for key, entry in told.get("provenance", {}).items() if key in present}
    numbered = [f"options.{key}" for key in (*_WHOLE, *_NUMBERS) if f"options.{key}" in numbers]
    content["provenance"] = sources | dict.fromkeys(numbered, given)
    return content


def about(address: str) -> list[str]:
    """Return what the server of a device tells of it: window, sharing, noise, certificate, medium; a line each.

    Args:
        address: as for `describe`.

    Raises:
        ConfigError, DeviceUnavailable: as for `describe`.
    """
    told = _described(address)[0].value("about", list, [])
    lines = [line for text in told for line in str(text).splitlines()]
    return ["".join(c for c in line if c.isprintable()) for line in lines]


def _described(address: str) -> tuple[Message, str, dict[str, Any]]:
    """Ask a server what it serves; returns its answer, HOST:PORT, and the options of the address."""
    host, port, options = _parsed(address)
    silence_s = float(options.get("silence_s", _CONNECT_S))
    link = _linked(host, port, options.get("key"), address, silence_s if silence_s > 0 else _CONNECT_S)
    try:
        answer = link.ask(Message(kind="describe", values={"request": link.new_request()}))
    finally:
        link.close()
    if answer.kind != "described":
        raise told_error(answer)
    return answer, f"{host}:{port}", options


def _parsed(address: str) -> tuple[str, int, dict[str, Any]]:
    """Return host, port and options of an address."""
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
        options[key] = _option(address, key, text)
    return host, port, options


def _option(address: str, key: str, text: str) -> Any:
    """Return the value of an option in an address."""
    try:
        if key == "exclusive":
            return {"": True, "true": True, "false": False}[text]
        return int(text) if key in _WHOLE else float(text) if key in _NUMBERS else text
    except (ValueError, KeyError):
        raise ConfigError(address, key, f"{text!r} is no value for it; correct it") from None


def _linked(host: str, port: int, key: str | None, name: str, silence_s: float) -> Link:
    return Link(host, port, own_key(key), server_key(host, port), name=name, silence_s=silence_s)


class RemoteDevice(RemoteProducts):
    """A device that a server shares (`opusim device serve`).

    Readings, noise, usage and errors are the server's. In ``experiment``, readings of a simulation are those of the
    same device opened locally with the same mode and seed, bit for bit: its columns from `outputs_from` on. If the
    server is restarted between two steps, a run continues; amid a step of a simulation in ``experiment`` the device
    fails, and the step is done again when the run resumes.

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
        self._link: Link | None = None
        self._heartbeat: Heartbeat | None = None
        self._session = ""
        self._told: Usage = Usage()
        self._earlier = Usage()
        self._first_look: Baseline | None = None
        self._compared: Baseline | None = None
        self._number = 0
        self._pending: Message | None = None
        self._sought: int | None = None
        self._readings = 0
        self._repeats = False
        self._request_mib = self._beat_s = 0.0

    @classmethod
    def capabilities_of(cls, description: DeviceDescription) -> frozenset[Any]:
        """See NoisyDevice.capabilities_of: what the server offers."""
        return frozenset(str(description.options.get("can", "")).split())

    @property
    def identity(self) -> tuple[str, str]:
        """See NoisyDevice.identity: those of the served device, whose server may take the certificate."""
        return self.name.removesuffix(f" at {self._options.address}"), self._options.digest

    @property
    def described_noise(self) -> NoiseModel:
        """See NoisyDevice.described_noise: the law that the server states, a certificate's if it has one."""
        if self._law is None and "program" in self.capabilities:
            self._require_open()
            self._take_law(self._call("law"), arrays_before=0)
        if self._law is None:
            raise NoiseUnknown(f"device {self.name!r} states no law for its noise; calibrate it")
        return self._law

    def attach_certificate(self, certificate: Certificate) -> None:
        """Refuse a certificate: it belongs to the server, which tells its law to every client.

        Raises:
            ConfigError: always.
        """
        reason = (
            "belongs to the server of the device; start it with: opusim device serve NAME --certificate FILE"
        )
        raise ConfigError(self.name, "certificate", reason)

    @property
    def repeats_noise(self) -> bool:
        """See NoisyDevice.repeats_noise: what the server says of the device that it serves."""
        return self.mode == "experiment" and self._repeats

    @property
    def usage(self) -> Usage:
        """See NoisyDevice.usage: what the server counted for this device, up to its last answer."""
        return self._earlier + self._told

    @property
    def baseline(self) -> Baseline | None:
        """See NoisyDevice.baseline; None if the server watches one device for all its clients."""
        return self._first_look

    def compare_with(self, baseline: Baseline, step: int = BEFORE_ALL) -> None:
        """See NoisyDevice.compare_with; nothing happens if the server watches one device for all its clients.

        The server takes no step: a run under a certificate, which needs it, opens its device itself.
        """
        self._require_open()
        if self._first_look is not None:
            self._first_look = self._compared = baseline
            self._call("compare", baseline.to_array())

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
        self._link = self._connected()
        self._earlier, self._told = self.usage, Usage()
        self._readings = 0
        try:
            self._enter()
        except BaseException:
            self._link.close()
            self._link = None
            raise
        self._heartbeat = Heartbeat(self._beat, self._beat_s)

    def _close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
        if self._link is not None:
            self._link.tell(Message(kind="close", values={"session": self._session}))
            self._link.close()
            self._link = None

    def _reconnect(self) -> None:
        """See NoisyDevice._reconnect: a new connection, under which the session and a call under way stay."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._link is not None:
            self._link.close()
        self._link = self._connected()
        self._heartbeat = Heartbeat(self._beat, self._beat_s)

    def _connected(self) -> Link:
        host, _, port = self._options.address.rpartition(":")
        return _linked(host, int(port), self._options.key, self.name, self._options.silence_s)

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
        values = self._wanted() | {"ticket": secrets.token_hex(8), "waits": patience > 0}
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
        self._take_opened(answer)

    def _wanted(self) -> dict[str, Any]:
        options = self._options
        return {
            "n_inputs": self.n_inputs,
            "n_outputs": self.n_outputs,
            "outputs_from": options.outputs_from or 0,
            "reserves": options.outputs_from is not None,
            "exclusive": options.exclusive,
            "mode": self.mode,
            "seed": self._seed if self.mode == "experiment" else 0,
            "run": options.run or f"{socket.gethostname()}:{os.getpid()}",
        }

    def _take_opened(self, answer: Message) -> None:
        self._session = answer.value("session", str)
        self._require_same(answer)
        self._law = unpacked_law(answer.value("law", (dict, type(None))), answer.arrays)
        converter = answer.value("converter", (dict, type(None)), None)
        self._converter = Converter() if converter is None else Converter(**converter)
        self._told = Usage.from_json(answer.value("usage", dict))
        self._repeats = answer.value("repeats", bool)
        self._request_mib = float(answer.value("request_mib", (int, float)))
        self._beat_s = beat_s(self._options.silence_s, float(answer.value("silence_s", (int, float))))
        self._number, self._pending, self._is_changed = 0, None, False
        if answer.value("monitored", bool):
            self._first_look = Baseline.from_array(np.array(answer.arrays[-1], dtype=np.float64))

    def _require_same(self, answer: Message) -> None:
        """Refuse a server that serves another description or another medium than this one's description says."""
        known = self._options
        if answer.value("digest", str) != known.digest:
            what = "its server has another description now"
        elif not same_medium(answer.value("fingerprint", str), known.fingerprint):
            what = "its medium is another one now"
        else:
            return
        if self._link is not None:
            self._link.tell(Message(kind="close", values={"session": self._session}))
        raise DeviceFault(f"device {self.name!r}: {what}; bring the earlier one back, or begin a new run")

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
        """Make a call; one that is repeated after a failure has its number again, and so the same reading."""
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
            message = self._numbered(wanted, arrays)
            answer = self._connection.ask(
                message,
                probe=self._alive(message.value("request", str)),
                on_state=partial(self._on_state, message.value("number", int)),
                timeout_s=self._options.timeout_s,
            )
            self._pending = None
            if answer.kind != "error":
                break
            if answer.values.get("class") != _SESSION_LOST:
                raise told_error(answer)
            self._enter_again(act)
        self._sought = None
        self._readings += 1
        self._told = Usage.from_json(answer.value("usage", dict))
        return answer

    def _numbered(self, wanted: Mapping[str, Any], arrays: tuple[np.ndarray, ...]) -> Message:
        """Return the message of a call: the pending one if it is the same call, else one with the next number."""
        pending = self._pending
        if pending is not None:
            same = all(np.array_equal(*pair) for pair in zip(pending.arrays, arrays, strict=False))
            if same and len(arrays) == len(pending.arrays) and wanted.items() <= pending.values.items():
                return pending
        self._number += 1
        values = {**wanted, "number": self._number, "session": self._session, "request": f"c{self._number}"}
        self._pending = Message(kind="call", values=values, arrays=arrays)
        return self._pending

    def _alive(self, request: str) -> Message:
        values = {"session": self._session, "has": self._number - int(self._pending is not None)}
        return Message(kind="alive", values=values | ({"request": request} if request else {}))

    def _beat(self) -> None:
        if self._link is not None:
            self._link.beat(self._alive(""))

    def _on_state(self, number: int, state: Message) -> bool:
        """Tell the user who has the device; return whether the call, or its answer, was lost on its way.

        An answer that was sent comes before a state that was sent after it, unless a connection broke in between.
        """
        holder = state.value("held_by", str, "")
        if holder:
            _LOG.warning("opusim: device %r is reserved by %s; waiting", self.name, holder)
        return bool(state.value("number", int, 0) < number or state.value("answered", bool, False))
