"""A device of opusim as a detector of ophyd-async, so that plans of Bluesky trigger it, read it and scan its numbers.

ophyd-async is imported when `ophyd_detector` is called; it comes with ``pip install 'opusim[bluesky]'``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opusim.description.section import merged, nested
from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_device
from opusim.errors import DeviceUnavailable
from opusim.plugins import Deferred
from opusim.tables import unit_of

core = Deferred("ophyd_async.core")


def ophyd_detector(
    name_or_path: str | Path,
    read: Callable[[NoisyDevice], torch.Tensor],
    *,
    scanned: Mapping[str, float] | None = None,
    name: str = "",
    **options: Any,
) -> Any:
    """Return a `StandardDetector` whose events hold readings of a device.

    The device opens at the first trigger and closes when a plan unstages the detector. A scanned key is a signal of the
    detector, named by the key's last word, which a plan moves like a motor; a new value opens the device again. Trigger
    n of the detector is step n of the device, so that a simulated one repeats no noise. Events hold ``NAME-readings``,
    the numbers that were read, ``NAME-std``, their standard deviation, and the scanned numbers.

    Args:
        name_or_path: as for `opusim.devices.open_device`.
        read: takes readings of the open device, such as ``lambda device: device.project(x)``.
        scanned: keys of the description that plans set, such as ``camera.light.exposure_us``, and their first values.
        name: of the detector; its data begin with it. ``init_devices`` of ophyd-async names it like its variable.
        **options: for `open_device`.

    Raises:
        DeviceUnavailable: ophyd-async is not installed.
        ValueError: two scanned keys end in the same word, or in the name of a method of the detector.
    """
    try:
        detector, signals = core.StandardDetector(), {}
    except ImportError as error:
        text = f"ophyd-async does not import ({error}); pip install 'opusim[bluesky]'"
        raise DeviceUnavailable(text) from error
    for key, value in (scanned or {}).items():
        last = key.rpartition(".")[2]
        if hasattr(detector, last):
            raise ValueError(f"scanned: {key!r} ends in a name that is taken, {last!r}; scan one of them")
        signals[key] = core.soft_signal_rw(float, float(value), units=unit_of(key) or None)
        setattr(detector, last, signals[key])
    detector.readings, write_readings = core.soft_signal_r_and_setter(np.ndarray)
    detector.std, write_std = core.soft_signal_r_and_setter(float)

    acquire_logic: Any = core.DetectorAcquireLogic
    data_logic: Any = core.DetectorDataLogic

    class Acquisition(acquire_logic):
        """Takes readings in a thread, so that plans continue meanwhile."""

        device = _ScannedDevice(name_or_path, read, options)

        async def start_acquiring(self) -> None:
            self.device.start({key: await signal.get_value() for key, signal in signals.items()})

        async def wait_for_idle(self) -> None:
            readings = await asyncio.wrap_future(self.device.taken)
            write_readings(readings)
            write_std(float(readings.std()))

        async def ensure_stopped(self) -> None:
            await asyncio.wrap_future(self.device.stop())

    class Data(data_logic):
        """Puts a signal into events."""

        def __init__(self, signal: Any, *, is_hinted: bool) -> None:
            self._signal, self._is_hinted = signal, is_hinted

        async def prepare_single(self, datakey_name: str) -> Any:
            return core.SignalDataProvider(self._signal)

        def get_hinted_fields(self, datakey_name: str) -> list[str]:
            return [self._signal.name] if self._is_hinted else []

    kept = (Data(signal, is_hinted=False) for signal in (detector.readings, *signals.values()))
    detector.add_detector_logics(Acquisition(), Data(detector.std, is_hinted=True), *kept)
    detector.set_name(name)
    return detector


class _ScannedDevice:
    """A device in a thread of its own, which is opened again when a scanned number changes."""

    def __init__(
        self,
        name_or_path: str | Path,
        read: Callable[[NoisyDevice], torch.Tensor],
        options: Mapping[str, Any],
    ) -> None:
        self._opened: tuple[Mapping[str, float], NoisyDevice] | None = None
        self._name_or_path, self._read, self._options, self._step = name_or_path, read, options, 0
        self._thread = ThreadPoolExecutor(1, "opusim detector")
        self.taken: Future[np.ndarray] = Future()

    def start(self, values: Mapping[str, float]) -> None:
        """Begin to take readings at these values of scanned keys; `taken` will hold them."""
        self.taken = self._thread.submit(self._take, values)

    def stop(self) -> Future[None]:
        """Close the device after the reading that runs."""
        return self._thread.submit(self._close)

    def _take(self, values: Mapping[str, float]) -> np.ndarray:
        if self._opened is None or self._opened[0] != values:
            self._close()
            sections = (nested(key, value) for key, value in values.items())
            self._opened = values, open_device(self._name_or_path, **reduce(merged, sections, self._options))
        device = self._opened[1]
        device.seek(self._step)
        self._step += 1
        return np.array(self._read(device).cpu())

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[1].close()
