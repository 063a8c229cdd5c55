"""The device of a server: one piece of hardware that its clients share, or a simulation with noise of its own for each.

| the description | what a client gets | noise |
| --- | --- | --- |
| has ``[medium]``, is not exclusive | a device with the client's own mode, seed and window | that of the local device |
| any other | outputs of the one device that the server holds | the device's; never repeated, never shared |

A view is the part of the instrument that one client sees: its first `n_inputs` inputs, and `n_outputs` outputs from
`first` on. Its readings are those columns of the readings of the whole.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opusim import checks
from opusim.camera.from_description import noise_line
from opusim.crossbar.programmable import Converter
from opusim.description.schema import AccessSettings, DeviceDescription
from opusim.devices.access import Access
from opusim.devices.base import NoisyDevice
from opusim.devices.baseline import Baseline, reference_vectors
from opusim.devices.certificate import digest_of, load_certificate
from opusim.devices.inputs import drawn_shape
from opusim.devices.kinds import capabilities_of
from opusim.devices.registry import open_described
from opusim.devices.usage import Usage
from opusim.errors import ConfigError, DeviceUnavailable
from opusim.noise import (
    ConverterLatticeNoise,
    FluctuatingCountNoise,
    GaussianNoise,
    NoiseModel,
    PhotonCountNoise,
    SignalGaussianNoise,
)

_CUT = GaussianNoise, PhotonCountNoise, FluctuatingCountNoise, SignalGaussianNoise, ConverterLatticeNoise
"""Laws whose numbers can be cut to some outputs."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The part of an instrument that a client opens.

    Attributes:
        n_inputs: inputs, from the first on.
        first: first output.
        n_outputs: outputs.
        mode: ``experiment`` or ``release``.
        seed: seed of the noise of a simulation in ``experiment``.
    """

    n_inputs: int
    first: int
    n_outputs: int
    mode: str
    seed: int


class View:
    """What one client sees in its window; used by the thread that owns the instrument.

    A device that other views share is not closed, and steps are not the client's. `once` calls it, with a time-out.
    """

    def __init__(
        self, device: NoisyDevice, window: Window, *, shared: bool, once: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self._once, self.window, self.shared, self.device = once, window, shared, device
        self._columns = slice(window.first, window.first + window.n_outputs)
        self._whole = (window.first, window.n_outputs) == (0, device.n_outputs)
        # The law of a programmable device depends on its matrix, which is not written before a client asks for it.
        self.law = None if "program" in device.capabilities else self._found_law()
        self.usage = Usage() if shared else device.usage
        """What this client has used."""
        self.held = 0
        """How often the device had been changed when the client opened it, or changed it."""

    def look_up_law(self) -> None:
        """Set `law` to the law for the matrix that a programmable device holds."""
        self.law = self.count(self._found_law)

    def _found_law(self) -> NoiseModel | None:
        """Return the law of the view's outputs, or None if it is unknown."""
        law = self.device.stated_noise
        if law is None or self._whole:
            return law
        return law_of_outputs(law, self._columns)

    @property
    def converter(self) -> dict[str, Any] | None:
        """The converter that a programmable device states, as JSON values; None for other devices."""
        found = getattr(self.device, "converter", None)
        return asdict(found) if isinstance(found, Converter) else None

    @property
    def baseline(self) -> Baseline | None:
        """The monitor's baseline if the client has a device of its own; the server monitors a shared one."""
        return None if self.shared or not self._whole else self.device.monitor.baseline

    def count(self, act: Callable[[], Any]) -> Any:
        """Return the result of an act, and count the device's work in it for this client."""
        before = self.device.usage
        try:
            return self._once(act)
        finally:
            self.usage += self.device.usage - before

    def read(self, act: str, x: np.ndarray) -> np.ndarray:
        """Return `project`, `intensities`, `multiply` or `multiply_transposed` of the view, a row for each row of x.

        Inputs and outputs of the device that are not the view's stay dark.
        """
        device, inputs = self.device, slice(0, self.window.n_inputs)
        taken, given = (inputs, self._columns), (device.n_inputs, device.n_outputs)
        if act == "multiply_transposed":
            taken, given = taken[::-1], given[::-1]
        width = taken[0].stop - taken[0].start
        checks.shape((None, width), x=x)
        if width != given[0]:
            whole = np.zeros((len(x), given[0]), dtype=x.dtype)
            whole[:, taken[0]] = x
            x = whole
        shown = x if act in ("project", "intensities") else torch.from_numpy(x)
        y = self.count(lambda: getattr(device, act)(shown))
        return np.asarray(y if isinstance(y, np.ndarray) else y.cpu().numpy())[:, taken[1]]

    def draw(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return `NoisyDevice.draw` of the view: numbers of its outputs only, in whole readings."""
        if self._whole:
            drawn: np.ndarray = self.count(lambda: self.device.draw(shape).cpu().numpy())
            return drawn
        return self.shaped(self.draw_readings(self.readings(shape)), shape)

    def readings(self, shape: tuple[int, ...]) -> int:
        """Return how many readings of the view fill a drawn shape."""
        lengths = drawn_shape(shape, self.window.n_outputs, self.device.stated_noise)
        return -(-math.prod(lengths) // self.window.n_outputs)

    def draw_readings(self, count: int) -> np.ndarray:  # (count, n_outputs)
        """Return some readings of noise only."""
        drawn: np.ndarray = self.count(lambda: self.device.draw((count, self.device.n_outputs)).cpu().numpy())
        return drawn[:, self._columns]

    def shaped(self, drawn: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return the numbers of whole readings in a drawn shape."""
        return drawn.reshape(-1)[: math.prod(shape)].reshape(shape)

    def matrix(self) -> np.ndarray:  # (n_outputs, n_inputs)
        """Return the view's part of the device's matrix."""
        return self._part(self.device.require("matrix").matrix())

    @property
    def saturated(self) -> np.ndarray | None:
        """Which rows of the last `multiply` met a converter's bound at any output of the device, uint8, or None."""
        found = getattr(self.device, "saturated", None)
        return None if found is None else found.cpu().numpy().astype(np.uint8)

    def program(self, matrix: np.ndarray) -> np.ndarray:  # (n_outputs, n_inputs)
        """Program the device and return the realised matrix; the view must cover the whole device."""
        device = self.device.require("program")
        if not self._whole or self.window.n_inputs != self.device.n_inputs:
            raise ValueError(
                f"program: the device is written as a whole, {self.device.n_inputs} inputs and "
                f"{self.device.n_outputs} outputs; open that window"
            )
        realised = self._part(self.count(lambda: device.program(torch.from_numpy(matrix.copy()))))
        self.look_up_law()
        return realised

    def wait(self, seconds: float) -> np.ndarray:  # (n_outputs, n_inputs)
        """Let time pass and return the view's part of the matrix at its end."""
        device = self.device.require("wait")
        matrix = self._part(self.count(lambda: device.wait(seconds)))
        self.look_up_law()
        return matrix

    def _part(self, matrix: torch.Tensor) -> np.ndarray:
        return np.asarray(matrix.cpu().numpy()[self._columns, : self.window.n_inputs])

    def programming_std(self, matrix: np.ndarray) -> np.ndarray:
        """Return the spread of programming that the device states for a matrix, of its shape; 0 without one."""
        told = getattr(self.device, "programming_std", None)
        if told is None:
            return np.zeros_like(matrix)
        return np.asarray(told(torch.from_numpy(matrix.copy())).cpu().numpy(), dtype=np.float32)

    def close(self) -> None:
        """Close the client's own device; a shared one stays open."""
        if not self.shared:
            self.device.close()


def law_of_outputs(law: NoiseModel, outputs: slice) -> NoiseModel | None:
    """Return the law of some outputs, or None if it is unknown how the law depends on outputs.

    Numbers that are told for each output are cut; numbers for all outputs stay, and so does beta: limits that hold for
    all outputs hold for some. The power of fluctuating light is common to a frame, so that some of its pixels see it
    with the same law.
    """
    if not isinstance(law, _CUT):
        return None
    numbers: dict[str, Any] = {}
    for field in fields(law):
        value = getattr(law, field.name)
        is_cut = isinstance(value, np.ndarray) and value.ndim > 0 and value.shape[-1] == law.n_outputs
        numbers[field.name] = value[..., outputs] if is_cut else value
    if "n_outputs" in numbers:
        numbers["n_outputs"] = outputs.stop - outputs.start
    return type(law)(**numbers)


def packed_law(law: NoiseModel | None) -> tuple[dict[str, Any] | None, list[np.ndarray]]:
    """Return a law as JSON values, and the arrays that they name as ``{"array": position}``."""
    if law is None:
        return None, []
    arrays: list[np.ndarray] = []
    values: dict[str, Any] = {}
    for name, value in law.to_json().items():
        if isinstance(value, list):
            arrays.append(np.asarray(value, dtype=np.float64))
            value = {"array": len(arrays) - 1}
        values[name] = value
    return values, arrays


def unpacked_law(values: dict[str, Any] | None, arrays: Sequence[np.ndarray]) -> NoiseModel | None:
    """Return the law that `packed_law` packed; LookupError, TypeError or ValueError if it is none."""
    if values is None:
        return None
    plain = {
        name: arrays[value["array"]].tolist() if isinstance(value, dict) else value
        for name, value in values.items()
    }
    return NoiseModel.from_json(plain)


_FINGERPRINT = 8, 32, 64
"""Reference vectors, outputs, and readings of each vector, in a fingerprint."""
MOST_ROWS = 1000
"""Most rows of a call that a shared device reads before another client has its turn."""
SAME_MEDIUM = 0.25
"""Share of a fingerprint's bits in which two readings of one medium differ at most; two media differ in one half."""


class Instrument:
    """A device as a server holds it, used by one thread.

    Args:
        description: the device's; clients may open `n_inputs` and `n_outputs` of it, None for all.
        n_inputs: see above.
        n_outputs: see above.
        certificate: path of the certificate whose limits every client is told as the noise; None for the description's.
        torch_device: on which a simulation computes.
        call_timeout_s: seconds after which a call of a shared device is abandoned if its description sets no time-out,
            so that a call that hangs does not keep all clients waiting.

    Attributes:
        row_s: seconds for each row of an act, in its last batch.
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
        self.can = capabilities_of(description)
        self.n_inputs = min(n_inputs or description.n_inputs, description.n_inputs)
        self.n_outputs = min(n_outputs or description.n_outputs, description.n_outputs)
        access = description.access
        self.shared = not description.is_simulated or (access is not None and access.exclusive)
        watched = self.shared and (access is None or access.timeout_s is None)
        patience = AccessSettings(timeout_s=float(call_timeout_s) if watched else None)
        self._access = Access(patience, description.name, lambda: None)
        self._certificate = None if certificate is None else load_certificate(certificate)
        self._torch_device = torch_device
        self.row_s: dict[str, float] = {}
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
        """Refuse a window that is no part of the instrument."""
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
        view.count(lambda: view.device.seek(step))

    def rows_within(self, seconds: float, act: str) -> int:
        """Return how many rows an act reads within some seconds: at least 1, at most `MOST_ROWS`.

        An act that was not read yet is taken to be as fast as the slowest of the others.
        """
        each = self.row_s.get(act, max(self.row_s.values(), default=math.inf))
        return max(1, MOST_ROWS if each * MOST_ROWS <= seconds else int(seconds / each))

    def note_change(self, view: View, writer: str | None) -> None:
        """Note that a user (None: only time) changed the device; a shared device's fingerprint then changes."""
        if not view.shared:
            return
        self._changes += 1
        view.held = self._changes
        if writer is not None:
            self._writer, self._other_medium = writer, secrets.token_hex(len(self.fingerprint) // 2)
        self.fingerprint = self._fingerprint()

    def fingerprint_for(self, user: str) -> str:
        """Return the fingerprint of what a user may read; random bits if another user programmed it."""
        return self.fingerprint if self._writer in (None, user) else self._other_medium

    def require_own(self, view: View, user: str, *, reads: bool) -> None:
        """Refuse a shared device that another client changed since this one opened it.

        A call that `reads` shows the programmed matrix, which must then not be another user's.
        """
        name = self.description.name
        if view.shared and view.held != self._changes:
            raise DeviceUnavailable(
                f"device {name!r} was programmed by another client; open it again to use what it holds"
            )
        if reads and self._writer not in (None, user):
            raise DeviceUnavailable(
                f"device {name!r} holds what another user programmed; program it yourself: "
                "remote://HOST:PORT?exclusive"
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
            self.row_s["project"] = (time.perf_counter() - began) / len(repeated)
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
