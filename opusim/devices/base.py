"""The base of all devices: the interface that trainers, calibrations and audits use."""

from __future__ import annotations

import contextlib
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, overload

import numpy as np
import torch

from opusim import checks
from opusim.description.schema import AccessSettings, DeviceDescription
from opusim.devices.access import Access
from opusim.devices.baseline import Baseline
from opusim.devices.certificate import Certificate, GaussianLaw, digest_of
from opusim.devices.inputs import (
    Array,
    BinaryFrames,
    check_reading,
    drawn_shape,
    like_input,
    new_intensities,
    ternary_batch,
    write_intensities,
)
from opusim.devices.kinds import CAPABILITIES, Capability, WorksWithMatrices, devices_that
from opusim.devices.monitor import BEFORE_ALL, Monitor, Unmonitored
from opusim.devices.usage import DeviceWork, Usage, UsageMeter
from opusim.errors import CapabilityMissing, ConfigError, DeviceUnavailable, NoiseUnknown
from opusim.noise import GaussianNoise, MeasuredNoise, NoiseModel
from opusim.processes import pause
from opusim.randomness.streams import MODES
from opusim.tables import Shown

_INTENSITIES_AT_ONCE = 2**21
"""Intensities computed at once: 8 MiB, and a few times that for fields and noise, near the size of the cache."""
_FRAMES_AT_ONCE = 256
"""Frames at once that make matrix products fast; the widest devices show fewer, `_MOST_INTENSITIES` in all."""
_MOST_INTENSITIES = 2**24


class NoisyDevice(Shown, ABC):
    """A matrix B that physics applies: B x + noise, with fresh noise for every reading.

    Entries of B are N(0, 1) in projection units on every device; B is fixed for the device's life unless its
    description says that it drifts. Trainers choose their own gain. A subclass implements `described_noise`, `_project`
    and `_seek`, which get checked input, and `_draw` unless blank readings are the device's noise.

    Use it as a context manager, or call `open` and `close`; both may be called twice. Do not use one device from
    several threads at once.

    Attributes:
        description: the frozen description that it was made from.
        name: the device's name.
        kind: which class runs it.
        n_inputs: width of the open window.
        n_outputs: number of its outputs.
        mode: ``experiment`` or ``release``.
        is_open: whether the device can be used.
        certificate: the certificate that `noise` rests on, or None if `noise` is the description's.
        world: number of processes that share the device (`SharedDevice`), or None if it belongs to this one.

    Args:
        description: the device's description.
        n_inputs: width of the window to open, at most the description's, or None for all.
        n_outputs: number of outputs to open, likewise.
        mode: ``experiment`` (replayable noise) or ``release`` (noise from the operating system's entropy).
        seed: seed of the noise in ``experiment``, in [0, 2^64).
        torch_device: where a simulation computes; inputs may be on another one.

    Raises:
        TypeError, ValueError: an argument out of range.
        ConfigError: a window larger than the device.
    """

    def __init__(
        self,
        description: DeviceDescription,
        *,
        n_inputs: int | None = None,
        n_outputs: int | None = None,
        mode: str = "experiment",
        seed: int = 0,
        torch_device: torch.device | str = "cpu",
    ) -> None:
        if mode not in MODES:
            checks.choice(MODES, mode=mode)
        if description.noise is not None and not self.reads_noise:
            remedy = (
                "its noise is measured when it opens, and bench.exposure_us changes it; leave noise (--sigma) out"
                if description.kind == "bench"
                else "set the noise in the section that the kind reads, such as options (--set "
                "device.options.KEY=VALUE), and leave noise out"
            )
            raise ConfigError(
                description.name,
                "noise",
                f"does nothing: the kind {description.kind!r} does not read this section; {remedy}",
            )
        self.description, self.name, self.kind = description, description.name, description.kind
        self.n_inputs = _window(description, "n_inputs", n_inputs, description.n_inputs)
        self.n_outputs = _window(description, "n_outputs", n_outputs, description.n_outputs)
        self.mode, self.is_open = mode, False
        self.certificate: Certificate | None = None
        self._seed = seed
        self._torch_device = torch.device(torch_device)
        self._meter = UsageMeter(description.frames, self.n_outputs)
        self._certified: NoiseModel | None = None
        self._access = Access(description.access or AccessSettings(), description.name, self._reconnect)
        self._monitor = Unmonitored(description.name)
        self._last_sought: int | None = None
        self._is_credited = False
        self.opened_parts = contextlib.ExitStack()
        self._actual_frame_us, self._openings = 0.0, 0

    can: ClassVar[frozenset[Capability]] = frozenset({"project", "draw"})
    """What devices of this class can do (`opusim.devices.kinds`); a subclass declares what it adds or lacks."""

    reads_noise: ClassVar[bool] = False
    """Whether the class reads the section ``[noise]``; a description with one is refused otherwise."""

    _counts_shown: ClassVar[bool] = False
    """Whether the class counts itself what it shows, with frames that are shown besides the readings' own."""

    world: int | None = None

    @classmethod
    def capabilities_of(cls, description: DeviceDescription) -> frozenset[Capability]:
        """Return what a device of this description can do; override it if that depends on the description."""
        return cls.can

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What this device can do."""
        return self.capabilities_of(self.description)

    @overload
    def require(self, capability: Literal["project", "draw", "intensities"]) -> Self: ...
    @overload
    def require(
        self, capability: Literal["matrix", "program", "multiply", "multiply_transposed", "wait"]
    ) -> WorksWithMatrices: ...
    def require(self, capability: Capability) -> Any:
        """Return this device as one that has a capability, as in ``device.require("matrix").matrix()``.

        Raises:
            ValueError: there is no such capability.
            CapabilityMissing: this device lacks it; the message says which devices have it.
        """
        checks.choice(CAPABILITIES, capability=capability)
        if capability in self.capabilities:
            return self
        others = ", ".join(devices_that(capability)) or "no packaged device"
        raise CapabilityMissing(
            f"device {self.name!r} (kind {self.kind!r}) lacks the capability {capability!r}; {others} can"
        )

    # Properties

    def _shown(self) -> dict[str, object]:
        law = None if self._certified is None else self._certified.law
        return {
            "name": repr(self.name),
            "n_inputs": self.n_inputs,
            "n_outputs": self.n_outputs,
            "can": " ".join(sorted(self.capabilities)),
            "mode": self.mode,
            "frames": self.usage.frames,
            "certified_law": law,
            "state": None if self.is_open else "closed",
        }

    @property
    def identity(self) -> tuple[str, str]:
        """Name and digest of the description, by which certificates know the device."""
        return self.name, digest_of(self.description)

    @property
    def repeats_noise(self) -> bool:
        """Whether a re-executed training step repeats its noise: in ``experiment``, and not on hardware."""
        return self.mode == "experiment" and self.description.is_simulated

    @property
    def usage(self) -> Usage:
        """Frames, seconds and joules of this device so far, and the host's seconds; stays readable after `close`."""
        return self._meter.snapshot()

    @property
    def noise(self) -> NoiseModel:
        """The law of the noise of one reading: the description's, or a certificate's once one is attached."""
        return self._described_law() if self._certified is None else self._certified

    @property
    def stated_noise(self) -> NoiseModel | None:
        """`noise`, or None if it is not known yet."""
        try:
            return self.noise
        except NoiseUnknown:
            return None

    def _law_as_decoded(self) -> NoiseModel | None:
        """Return the law that this opening's readings follow, in its own units, for the monitor."""
        return self.stated_noise

    @property
    @abstractmethod
    def described_noise(self) -> NoiseModel:
        """The law as the description gives it, in projection units; raise `NoiseUnknown` if it is not known."""

    def _described_law(self) -> NoiseModel:
        """Return `described_noise`.

        Raises:
            TypeError: the subclass returns something else than a law.
        """
        found: object = self.described_noise
        if not isinstance(found, NoiseModel):
            raise TypeError(
                f"{type(self).__name__}.described_noise = {found!r}: must be a law of the noise; return one such as "
                "GaussianNoise, or raise NoiseUnknown if the law is not known"
            )
        return found

    def reading_variance(self, x: torch.Tensor) -> torch.Tensor:  # (batch, n_inputs) -> (batch, n_outputs)
        """Return the variance of readings of x, float64; for devices that compute it from a law of each number.

        Raises:
            CapabilityMissing: this device does not.
        """
        raise CapabilityMissing(
            f"device {self.name!r} (kind {self.kind!r}) computes no reading_variance for a given x, as simulations do; "
            "read the variances that device.described_noise states"
        )

    def attach_certificate(self, certificate: Certificate) -> None:
        """Make `noise` state the limits that a calibration found, and their beta; readings stay the same.

        A device that states no law, or only measured variances, takes the law of a Gaussian certificate, which the
        certificate's tests support.

        Raises:
            ConfigError: the certificate is another device's, or certifies another law.
        """
        certificate.check_device(self.description, n_outputs=self.n_outputs, n_inputs=self.n_inputs)
        described: NoiseModel = GaussianNoise(std=0.0, n_outputs=self.n_outputs)
        try:
            law = self._described_law()
            described = described if isinstance(law, MeasuredNoise) else law
        except NoiseUnknown:
            if not isinstance(certificate.noise, GaussianLaw):
                raise
        self._certified, self.certificate = certificate.certified(described), certificate

    def credit_noise(self) -> None:
        """Declare that a guarantee rests on `noise`: the monitor then compares hardware even with an assumed law.

        It always compares with a certified law and with a simulation's.
        """
        self._is_credited = True

    # Opening and closing

    def open(self) -> Self:
        """Open the device; nothing happens if it is open.

        If the description has a section ``[monitor]``, it also measures a baseline for later checks.

        Raises:
            DeviceError: the device cannot be opened; `DeviceBusy` if another process holds an exclusive one.
        """
        if self.is_open:
            return self
        for name, value in vars(self).items():
            if callable(getattr(NoisyDevice, name, None)) and not callable(value):
                raise TypeError(
                    f"{type(self).__name__} sets self.{name}, which hides a method of NoisyDevice; rename the attribute"
                )
        self._access.acquire()
        try:
            self._access.repeated(self._open_all, self._give_back, may_run_on=False)
            self.is_open = True
            self._begin_monitor(None)
            if self._certified is not None:
                self.monitor.check()
        except BaseException:
            self.is_open = False
            self._give_back()
            self._access.release()
            raise
        return self

    def close(self) -> None:
        """Close the device; nothing happens if it is closed."""
        if self.is_open:
            self.is_open = False
            try:
                self._close_all()
            finally:
                self._access.release()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __sklearn_clone__(self) -> Self:
        """Return the device itself, so that clones of a scikit-learn estimator that holds it read the same one."""
        return self

    # Reading

    def project(self, x: Array) -> Array:  # (batch, n_inputs) -> (batch, n_outputs)
        """B x + fresh noise, a row for each row of x.

        Args:
            x: torch tensor on any torch device, or numpy array; shape (batch, n_inputs), any real or
                integer dtype, entries in {-1, 0, 1}. Encode real values first (`opusim.encodings`).

        Returns:
            float32, shape (batch, n_outputs), in projection units; numpy for numpy, a tensor on x's torch
            device for a tensor. It carries no gradient.

        Raises:
            TypeError, ValueError: another type, shape or entry; the message says what to do.
            DeviceUnavailable: the device is closed.
        """
        self._require_open()
        return like_input(
            self._read_in_calls(self._project, ternary_batch(x, self.n_inputs, self._torch_device)), x
        )

    def intensities(
        self, x: Array, *, packed: bool = False, out: np.ndarray | torch.Tensor | None = None
    ) -> Array:  # (frames, n_inputs) -> (frames, n_outputs)
        """Return |R x|^2 with fresh noise, one frame for each binary vector: optical random features.

        R is the complex medium; simulated devices without a camera draw it independently of B. There its entries have
        mean 0 and E|R_ji|^2 = 1, so that an intensity has the mean ||x||^2, and noise of the device's law is added to
        it. Devices with a camera give its digital numbers, DN.

        Args:
            x: torch tensor on any torch device, or numpy array; shape (frames, n_inputs), any real, integer or boolean
                dtype, entries 0 and 1. Encode real values first (`opusim.features`, `opusim.encodings`).
            packed: whether x holds eight mirrors in a byte, as `numpy.packbits(x, axis=1)` gives it: uint8, shape
                (frames, ceil(n_inputs / 8)).
            out: where the result is written, such as a memory map: shape (frames, n_outputs), float32, or uint8 for
                digital numbers of at most 8 bits. Memory beyond it does not grow with the number of frames.

        Returns:
            float32, shape (frames, n_outputs), or `out`; numpy for numpy, a tensor on x's torch device for a tensor.

        Raises:
            CapabilityMissing: the device cannot.
            TypeError, ValueError: another type, shape or entry; the message says what to do.
            DeviceUnavailable: the device is closed.
        """
        self._require_open()
        self.require("intensities")
        frames = BinaryFrames(x, self.n_inputs, packed=packed)
        wanted = max(_INTENSITIES_AT_ONCE // self.n_outputs, _FRAMES_AT_ONCE)
        at_once = max(1, min(wanted, _MOST_INTENSITIES // self.n_outputs))
        if out is None and 0 < len(frames) <= at_once:
            return like_input(self._read_intensities(frames, 0, at_once), x)
        found = new_intensities(x, (len(frames), self.n_outputs), out)
        for start in range(0, len(frames), at_once):
            pause()
            write_intensities(found, start, self._read_intensities(frames, start, start + at_once))
        result: Array = found
        return result

    def draw(self, shape: Sequence[int]) -> torch.Tensor:
        """Return fresh noise only, of the law that `project` adds, from blank or reference frames.

        Args:
            shape: (batch, n_outputs): one reading for each row, or any leading lengths. Where the law is
                Gaussian with one standard deviation for all outputs, any shape at all: readings are taken
                until it is filled.

        Returns:
            float32, of that shape, in projection units, on the device's torch device.

        Raises:
            TypeError, ValueError: another shape.
            DeviceUnavailable: the device is closed.
        """
        self._require_open()
        self.require("draw")
        lengths = drawn_shape(shape, self.n_outputs, self.stated_noise)
        readings, at_once = -(-math.prod(lengths) // self.n_outputs), self._readings_at_once()
        if readings <= at_once:
            return self._read(lambda: self._draw(lengths), lengths)
        parts = [min(at_once, readings - first) for first in range(0, readings, at_once)]
        drawn = [
            self._read(partial(self._draw, shape), shape)
            for shape in ((part, self.n_outputs) for part in parts)
        ]
        return torch.cat(drawn).flatten()[: math.prod(lengths)].reshape(lengths)

    def project_for_all(self, x: torch.Tensor) -> torch.Tensor:
        """Return `project` of x, the same reading on all processes that share the device (`SharedDevice`)."""
        return self.project(x)

    def agree(self, rows: int) -> tuple[int, int]:
        """Return how many rows the lower ranks are about to project, and the most rows of any process.

        Args:
            rows: Number of this process's rows.
        """
        return 0, rows

    def seek(self, step: int) -> None:
        """Tell the device that a training step begins.

        In ``experiment`` mode the noise is keyed by step and reading, so a re-executed step repeats its
        noise. In ``release`` mode, and on hardware, nothing is repeated. A monitored device is checked at every
        ``monitor.every_steps``-th step, only once if the same step is sought several times in succession. Steps from
        2^63 on key the noise of readings before training; no check is made at them.

        Args:
            step: in [0, 2^64).

        Raises:
            TypeError, ValueError: not such a number.
            DeviceUnavailable: the device is closed.
            DeviceFault, NoiseBelowCertificate: the monitor found the device changed.
        """
        self._require_open()
        if not (type(step) is int and 0 <= step < 2**64):
            checks.integer(step=step, minimum=0, maximum=2**64 - 1)
        self._seek(step)
        if self.description.monitor is not None and step != self._last_sought and self._monitor.due(step):
            self._monitor.check(step)
        self._last_sought = step

    # Monitoring

    @property
    def monitor(self) -> Unmonitored:
        """The monitor, which compares the device with its state at opening (`opusim.devices.monitor`)."""
        return self._monitor

    def smallest_changes(self, checks: int) -> dict[str, float]:
        """Return the smallest changes that the monitor finds within some checks; see `opusim.devices.monitor.Monitor`.

        Raises:
            DeviceUnavailable: the device is closed, or its description has no section [monitor].
        """
        self._require_open()
        return self.monitor.smallest_changes(checks)

    def upkeep(self, first: int, end: int, *, inspections: int = 0) -> DeviceWork:
        """Return the device's work in a run's steps besides the run's own readings: the monitor's checks.

        Args:
            first: the first of these steps.
            end: the step after the last one.
            inspections: further checks in between.
        """
        if self.description.monitor is None:
            return DeviceWork()
        each = self.monitor.work + self._saturation_work
        return each.times(self.monitor.checks_between(first, end) + inspections)

    def compare_with(self, baseline: Baseline, step: int = BEFORE_ALL) -> None:
        """Compare with an earlier baseline, such as a resumed run's, in place of this opening's.

        Args:
            baseline: the earlier one.
            step: the step that follows.

        Raises:
            DeviceFault, NoiseBelowCertificate: the device has changed since.
            DeviceUnavailable: the device is closed.
        """
        self._require_open()
        self._begin_monitor(baseline)
        self.monitor.check(step)

    # For subclasses

    def _saturated_share(self, vectors: torch.Tensor) -> float | None:
        """Largest share of saturated outputs in any frame of these vectors' projections, or None without frames.

        Args:
            vectors: reference vectors of the monitor, ternary, shape (vectors, n_inputs).
        """
        return None

    def _pattern_frames(self, patterns: torch.Tensor) -> np.ndarray | None:
        """Frames of binary patterns, each followed by its complement in the anchor, or None without frames.

        Args:
            patterns: the monitor's fixed patterns, entries 0 and 1, shape (patterns, n_inputs).
        """
        return None

    @property
    def _saturation_work(self) -> DeviceWork:
        """The device's work for `_saturated_share` in one check."""
        return DeviceWork()

    def _open(self) -> None:  # optional hook
        """Connect to the device; a simulation needs nothing.

        An instrument of several parts registers each one as soon as it is open, as in
        ``self.opened_parts.callback(camera.close)``. They are closed after `_close`, in reverse order, also if a later
        part fails to open.
        """

    def _close(self) -> None:  # optional hook
        """Disconnect from the device; a simulation needs nothing.

        It is also called if `_open` failed, and must release what was taken by then.
        """

    @abstractmethod
    def _project(self, x: torch.Tensor) -> torch.Tensor:
        """B x + noise for a checked float32 batch on the device's torch device."""

    def _intensities(self, x: torch.Tensor) -> torch.Tensor:
        """|R x|^2 + noise for a checked float32 batch of zeros and ones; for the capability `intensities`."""
        raise NotImplementedError(
            f"{type(self).__name__} declares the capability 'intensities' and does not override _intensities"
        )

    def _read_intensities(self, frames: BinaryFrames, start: int, stop: int) -> torch.Tensor:
        """Return a checked reading of some frames."""
        part = frames.rows(start, stop, self._torch_device)
        return self._read_in_calls(self._intensities, part, frames_per_reading=1)

    def _draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return fresh noise of a checked shape; by default blank readings, as many as fill the shape."""
        numbers = math.prod(shape)
        blank = torch.zeros((-(-numbers // self.n_outputs), self.n_inputs), device=self._torch_device)
        return self._project(blank).flatten()[:numbers].reshape(shape)

    @abstractmethod
    def _seek(self, step: int) -> None:
        """Position the noise at a checked step."""

    def _readings_at_once(self, frames_per_reading: int | None = None) -> int:
        """Return how many readings hardware takes in half the time that a call may last; at least 1.

        A simulation has no such limit.
        """
        timeout_s, frames = self._access.timeout_s, self.description.frames
        if timeout_s is None or self.description.is_simulated:
            return sys.maxsize
        each_us = max(frames.period_us(self.n_outputs), self._actual_frame_us) + (
            frames.host_us_per_frame or 0.0
        )
        each_us *= frames_per_reading or frames.frames_per_projection
        return max(1, int(0.5 * 1e6 * timeout_s / each_us))

    def _read_in_calls(
        self,
        act: Callable[[torch.Tensor], torch.Tensor],
        rows: torch.Tensor,
        *,
        width: int | None = None,
        frames_per_reading: int | None = None,
    ) -> torch.Tensor:
        """Return a checked reading of each row, in as many calls as the time-out requires.

        Args:
            act: reads rows.
            rows: vectors to show, one reading each.
            width: numbers of a reading, or None for n_outputs.
            frames_per_reading: as for `_read`.
        """
        shape, at_once = (rows.shape[0], width or self.n_outputs), sys.maxsize
        if self._access.timeout_s is not None:
            at_once = self._readings_at_once(frames_per_reading)
        if shape[0] <= at_once:
            return self._read(
                lambda: act(rows), shape, frames_per_reading=frames_per_reading, readings=shape[0]
            )
        parts = rows.split(at_once)
        return torch.cat(
            [
                self._read_in_calls(act, part, width=width, frames_per_reading=frames_per_reading)
                for part in parts
            ]
        )

    def _read(
        self,
        act: Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        *,
        frames_per_reading: int | None = None,
        readings: int | None = None,
    ) -> torch.Tensor:
        """Return a checked reading, with the retries that the description asks for, and count its frames.

        Args:
            act: reads.
            shape: of the reading.
            frames_per_reading: or None for the description's frames_per_projection.
            readings: number of readings in it, or None for one per n_outputs numbers.
        """
        with torch.no_grad(), torch.autocast(self._torch_device.type, enabled=False):
            y = self._access.call(act)
        check_reading(y, shape, self.name)
        if readings is None:
            readings = -(-math.prod(shape) // self.n_outputs)
        frames = readings * (frames_per_reading or self.description.frames.frames_per_projection)
        if not self._counts_shown:
            self._meter.count(frames, self._actual_frame_us)
        return y

    def _open_all(self) -> None:
        """Open all parts; if opening ends only after its time-out, all are closed then."""
        self._openings += 1
        mine = self._openings

        def undo() -> None:
            if self._openings == mine:  # the device was not opened again since
                self._close_all()

        self._access.once(self._open, undo=undo)

    def _close_all(self) -> None:
        """Close the device and the parts that `_open` registered."""
        try:
            self._close()
        finally:
            self.opened_parts.close()

    def _give_back(self) -> None:
        """Close the device in any state; a driver's error here is dropped, so that it hides no other."""
        with contextlib.suppress(Exception):
            self._access.once(self._close_all)

    def _reconnect(self) -> None:
        """Close the device in any state and open it again; the lock stays."""
        self._give_back()
        self._open_all()

    def _begin_monitor(self, baseline: Baseline | None) -> None:
        settings, self._last_sought = self.description.monitor, None
        if settings is None:
            return
        self._monitor = Monitor(
            settings,
            self.name,
            n_inputs=self.n_inputs,
            read=lambda vectors: (
                self._read_in_calls(self._project, vectors.to(self._torch_device)).cpu().double().numpy()
            ),
            law=self._law_as_decoded,
            judges_law=lambda: (
                self._is_credited or self._certified is not None or self.description.is_simulated
            ),
            saturated=self._saturated_share,
            show=self._pattern_frames,
            baseline=baseline,
            certified=self._certified is not None,
        )

    def _require_open(self) -> None:
        if not self.is_open:
            raise DeviceUnavailable(
                f"device {self.name!r} is closed; call open(), or work inside `with device:`"
            )


def _window(description: DeviceDescription, key: str, wanted: int | None, largest: int) -> int:
    """Return the checked size of a window of the device."""
    if wanted is None:
        return largest
    if not (type(wanted) is int and wanted >= 1):
        named: dict[str, Any] = {key: wanted}
        checks.integer(minimum=1, **named)
    if wanted > largest:
        reason = f"a window of {wanted} is wanted, the device has {largest}; open a smaller one"
        raise ConfigError(description.name, key, reason)
    return int(wanted)
