"""What a server serves: one piece of hardware that its clients share, or a simulation of which each has its own noise.

| the description | what a client gets | noise |
| --- | --- | --- |
| has ``[medium]``, is not exclusive | a device with the client's own mode, seed and window | that of the local device |
| any other | outputs of the one device that the server holds | the device's; never repeated, never shared |
"""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from opusim import checks
from opusim.camera.from_description import noise_line
from opusim.description.schema import AccessSettings, DeviceDescription
from opusim.devices.access import Access
from opusim.devices.base import NoisyDevice
from opusim.devices.baseline import reference_vectors
from opusim.devices.certificate import digest_of, load_certificate
from opusim.devices.kinds import Capability, capabilities_of
from opusim.devices.registry import open_described
from opusim.errors import CapabilityMissing, ConfigError, DeviceUnavailable
from opusim.serving.instrument import View, Window

SERVED: tuple[Capability, ...] = get_args(Capability)
"""What a client may use; a shared device is programmed by a client that has it to itself."""
_FINGERPRINT = 8, 32, 64
"""Reference vectors, outputs and readings of each of a fingerprint."""
MOST_ROWS = 1000
"""Rows of a call that a shared device reads at most before another client has its turn."""
SAME_MEDIUM = 0.25
"""Share of a fingerprint's bits in which two readings of one medium differ at most; two media differ in one half."""


class Pace:
    """How fast a device reads, by which a call is read in batches of a stated time."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        """Seconds for each row of an act, in its last batch."""

    def note(self, act: str, rows: int, seconds: float) -> None:
        """Note how long a batch took."""
        if rows:
            self._seconds[act] = seconds / rows

    def rows_within(self, seconds: float, act: str) -> int:
        """Return how many rows an act reads within some seconds: at least 1, at most `MOST_ROWS`.

        An act that was not seen yet is taken to be as fast as the slowest of the others.
        """
        each = self._seconds.get(act, max(self._seconds.values(), default=math.inf))
        return max(1, MOST_ROWS if each * MOST_ROWS <= seconds else int(seconds / each))


class Instrument:
    """A device as a server holds it, used by one thread.

    Args:
        description: the device's.
        n_inputs: inputs that clients may open, None for all.
        n_outputs: outputs that clients may open, likewise.
        certificate: path of the certificate whose limits every client is told as the noise; None for the description's.
        torch_device: on which a simulation computes.
        call_timeout_s: seconds after which a call of a shared device is abandoned, unless its description says so, so
            that one that hangs does not keep all clients waiting.

    Raises:
        ConfigError, DeviceError: as `opusim.open_device`.
    """

    def __init__(
        self,
        description: DeviceDescription,
        *,
        n_inputs: int | None = None,
        n_outputs: int | None = None,
        certificate: str | Path | None = None,
        torch_device: str = "cpu",
        call_timeout_s: float = 60.0,
    ) -> None:
        checks.positive(call_timeout_s=call_timeout_s)
        self.description = description
        self.digest = digest_of(description)
        self.can = [each for each in capabilities_of(description) if each in SERVED]
        self.n_inputs = min(n_inputs or description.n_inputs, description.n_inputs)
        self.n_outputs = min(n_outputs or description.n_outputs, description.n_outputs)
        access = description.access
        self.shared = description.medium is None or (access is not None and access.exclusive)
        watched = self.shared and (access is None or access.timeout_s is None)
        patience = AccessSettings(timeout_s=float(call_timeout_s) if watched else None)
        self._access = Access(patience, description.name, lambda: None)
        self._certificate = None if certificate is None else load_certificate(certificate)
        self._torch_device = torch_device
        self.pace = Pace()
        self._seeks = self._changes = 0
        self._writer: str | None = None
        self._other_medium = ""
        self._device: NoisyDevice | None = None
        if self.shared:
            self._device = self._opened(
                Window(n_inputs=self.n_inputs, first=0, n_outputs=self.n_outputs, mode="release", seed=0)
            )
        self._law = ""
        try:
            self.fingerprint = self._fingerprint()
        except BaseException:
            self.close()
            raise

    def about(self, user: str) -> list[str]:
        """Return what a user is told of the device, a line each: window, who shares it, noise, certificate, medium."""
        told, certificate = self.description, self._certificate
        shared = "clients share the one device" if self.shared else "each client has a simulation of its own"
        lines = [
            f"serves {told.name!r} of kind {told.kind!r}: {self.n_inputs:,} of {told.n_inputs:,} inputs, "
            f"{self.n_outputs:,} of {told.n_outputs:,} outputs; {shared}",
            noise_line(told) if told.noise is not None or told.camera is not None else f"noise: {self._law}",
        ]
        if certificate is None:
            lines.append("certificate: none; the noise is what the description says")
        else:
            lines.append(
                f"certificate: {certificate.digest} of {certificate.date}, beta = {certificate.beta:g}, by which the "
                f"noise is {self._law}"
            )
        seed = "the hardware's" if told.medium is None else f"simulated, seed {told.medium.seed}"
        return [*lines, f"medium: {seed}; its fingerprint begins with {self.fingerprint_for(user)[:16]}"]

    def check(self, window: Window) -> None:
        """Refuse a window that is no part of the instrument.

        Raises:
            TypeError, ValueError, ConfigError: it is not.
        """
        checks.integer(n_inputs=window.n_inputs, n_outputs=window.n_outputs, minimum=1)
        checks.integer(outputs_from=window.first, minimum=0)
        checks.integer(seed=window.seed, minimum=0, maximum=2**64 - 1)
        checks.choice(("experiment", "release"), mode=window.mode)
        for key, wanted, most in (
            ("n_inputs", window.n_inputs, self.n_inputs),
            ("n_outputs", window.first + window.n_outputs, self.n_outputs),
        ):
            if wanted > most:
                reason = f"a window up to {wanted} is wanted, {most} are served; open a smaller one"
                raise ConfigError(self.description.name, key, reason)

    def view(self, window: Window) -> View:
        """Open the part of the instrument that a client asks for."""
        if self._device is not None:
            view = View(self._device, window, shared=True, once=self._access.once)
            view.held = self._changes
            return view
        whole = replace(window, first=0, n_outputs=window.first + window.n_outputs)
        return View(self._opened(whole), window, shared=False, once=self._access.once)

    def seek(self, view: View, step: int) -> None:
        """Begin a client's step; on a shared device the steps of all clients count, for its monitor."""
        if view.shared:
            step, self._seeks = self._seeks, self._seeks + 1
        view.seek(step)

    def note_change(self, view: View, writer: str | None) -> None:
        """Note that a client changed what the device holds; the fingerprint of a shared one is another one then.

        Args:
            view: the client's.
            writer: the user who programmed it; None if only time passed.
        """
        if not view.shared:
            return
        self._changes += 1
        view.held = self._changes
        if writer is not None:
            self._writer, self._other_medium = writer, secrets.token_hex(len(self.fingerprint) // 2)
        self.fingerprint = self._fingerprint()

    def fingerprint_for(self, user: str) -> str:
        """Return the fingerprint of what a user may read; random bits for what another one programmed."""
        return self.fingerprint if self._writer in (None, user) else self._other_medium

    def require_readable(self, user: str) -> None:
        """Refuse to show what another user programmed into a shared device.

        Raises:
            DeviceUnavailable: that is what it holds.
        """
        if self._writer not in (None, user):
            raise DeviceUnavailable(
                f"device {self.description.name!r} holds what another user programmed; program it yourself: "
                "remote://HOST:PORT?exclusive"
            )

    def require_unchanged(self, view: View) -> None:
        """Refuse a client whose shared device another client programmed.

        Raises:
            DeviceUnavailable: that happened since it was opened.
        """
        if view.shared and view.held != self._changes:
            raise DeviceUnavailable(
                f"device {self.description.name!r} was programmed by another client; open it again to use what it holds"
            )

    def close(self) -> None:
        """Close the device that clients share."""
        self._access.release()
        if self._device is not None:
            self._device.close()

    def _opened(self, window: Window) -> NoisyDevice:
        device = open_described(
            self.description,
            mode=window.mode,
            seed=window.seed,
            torch_device=self._torch_device,
            n_inputs=window.n_inputs,
            n_outputs=window.n_outputs,
        )
        if self._certificate is not None:
            try:
                device.attach_certificate(self._certificate)
            except BaseException:
                device.close()
                raise
        return device

    def _fingerprint(self) -> str:
        """Return the signs of mean readings of fixed vectors, 256 bits in hexadecimal; no data is shown.

        Noise turns the sign of an output whose mean signal is small; another medium turns every second one.
        """
        vectors, outputs, readings = _FINGERPRINT
        window = Window(
            n_inputs=min(64, self.n_inputs),
            first=0,
            n_outputs=min(outputs, self.n_outputs),
            mode="experiment",
            seed=0,
        )
        view = self.view(window)
        try:
            law = view.law if self._device is None else self._device.stated_noise
            self._law = "not known; calibrate the device" if law is None else law.describe()
            shown = reference_vectors(vectors, window.n_inputs).to(torch.int8).numpy()
            repeated, began = np.repeat(shown, readings, axis=0), time.perf_counter()
            means = view.read("project", repeated).reshape(vectors, readings, -1).mean(axis=1)
            self.pace.note("project", len(repeated), time.perf_counter() - began)
        finally:
            view.close()
        return np.packbits(means > 0).tobytes().hex()


def same_medium(one: str, other: str) -> bool:
    """Whether two fingerprints are of one medium: at most `SAME_MEDIUM` of their bits differ.

    Two media of 256 bits agree so well with probability 1e-15 or less.
    """
    try:
        first, second = (np.frombuffer(bytes.fromhex(text), dtype=np.uint8) for text in (one, other))
    except ValueError:
        return False
    if first.size != second.size or not first.size:
        return False
    return float(np.unpackbits(first ^ second).mean()) <= SAME_MEDIUM


def require_capability(can: list[Capability], capability: str) -> None:
    """Refuse what the instrument cannot do, or does not offer to clients."""
    if capability not in can:
        raise CapabilityMissing(
            f"the served device lacks the capability {capability!r}; it has {', '.join(can)}"
        )
