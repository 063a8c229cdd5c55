"""Adapters that make instruments of laboratory libraries `Patterns` and `Grabber`.

Each class takes an object that its library has opened: serial numbers, vendors' files and gains are set through the
library itself. None of the libraries is imported here, nor required by opusim.

Without a trigger cable the mirrors call the camera's `pulse` once a pattern is shown, and the camera then takes a frame
(`SteppedCamera`); a pattern takes as long as the modulator settles and the camera delivers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from typing_extensions import override

from opusim.camera.from_description import camera_sections, dark_charge_e, sensor_of
from opusim.camera.stages import fill_numbers
from opusim.description.schema import DeviceDescription
from opusim.devices.bench.instruments import Roi

_BUFFERS = 512
"""Frames that a camera's driver holds."""
_PATIENCE_S = 2.0
"""Longest wait for a missing frame."""
_SIDES = "SensorHeight", "SensorWidth"


class SteppedCamera(ABC):
    """A camera without a trigger line: it takes a frame whenever `pulse` is called."""

    def __init__(self) -> None:
        self._frames: list[np.ndarray] = []
        self._taken, self._waits = 0, True

    @abstractmethod
    def _set(self, exposure_us: float, roi: Roi, binning: int) -> float:
        """Set the camera; see `Grabber.configure`."""

    @abstractmethod
    def _take(self) -> np.ndarray:
        """Take a frame: unsigned integers, shape (rows, columns)."""

    def configure(self, *, exposure_us: float, roi: Roi, binning: int, trigger: bool) -> float:
        """See `Grabber.configure`."""
        self._frames, self._waits = [], trigger
        return self._set(exposure_us, roi, binning)

    def pulse(self) -> None:
        """Take a frame now."""
        self._frames.append(self._take())
        self._taken += 1

    def grab(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Grabber.grab`; frames are numbered here, since none can be lost on a line."""
        for _ in range(0 if self._waits else n):
            self.pulse()
        frames, self._frames = self._frames, []
        return np.array(frames), np.arange(self._taken - len(frames), self._taken)


class SlmsuiteCamera(SteppedCamera):
    """A camera of slmsuite (`slmsuite.hardware.cameras`)."""

    def __init__(self, camera: Any) -> None:
        super().__init__()
        self.camera, self.bits = camera, int(camera.bitdepth)
        camera.set_woi(None)
        self.shape = (int(camera.shape[0]), int(camera.shape[1]))

    @override
    def _set(self, exposure_us: float, roi: Roi, binning: int) -> float:
        row, column, rows, columns = roi
        self.camera.set_binning(binning, update_woi=False)
        self.camera.set_woi((column, columns, row, rows))
        exposure_s = float(self.camera.set_exposure(1e-6 * exposure_us))
        self.camera.flush()
        return 1e6 * exposure_s

    @override
    def _take(self) -> np.ndarray:
        return np.array(self.camera.get_image(averaging=False, hdr=False))

    def close(self) -> None:
        """See `Grabber.close`."""
        self.camera.close()


class SlmsuitePatterns:
    """A phase modulator of slmsuite (`slmsuite.hardware.slms`) as an array of mirrors.

    A mirror that is on shows the phase 0. One that is off shows a checkerboard of the phases 0 and pi, whose light
    leaves at the corners of the far field, so that ``bench.macro_pixel`` must be even.

    Args:
        slm: the open modulator.
        pulse: called when a pattern is shown, such as `SlmsuiteCamera.pulse`.
    """

    def __init__(self, slm: Any, pulse: Callable[[], None]) -> None:
        self.slm, self.shape, self._pulse = slm, (int(slm.shape[0]), int(slm.shape[1])), pulse
        self._off = np.pi * (np.indices(self.shape).sum(axis=0) % 2)
        self._bits: np.ndarray = np.zeros((0, *self.shape), dtype=np.uint8)

    def load(self, bits: np.ndarray) -> None:
        """See `Patterns.load`."""
        self._bits = bits

    def run(self, period_us: float) -> None:
        """Show the patterns, each until the modulator has settled; the period is the camera's."""
        for bits in self._bits:
            self.slm.set_phase(np.where(bits, 0.0, self._off), settle=True)
            self._pulse()

    def close(self) -> None:
        """See `Patterns.close`."""
        self.slm.close()


class SlmsuiteNoise:
    """opusim's sensor as the ``noise`` of slmsuite's simulated camera, which has no shot noise of its own.

    The simulation's counts, image times exposure times gain, are taken as mean numbers above the black level, so that
    light is counts / gain_dn_per_e electrons. The description adds the dark charge of the exposure, Poisson counts,
    full well, read noise, gain, black level and converter. Pixels are alike: prnu and dsnu_e are left out.

    Args:
        description: one with ``[camera]``; its bits are those of the simulated camera.
        seed: of the noise.
    """

    def __init__(self, description: DeviceDescription, seed: int = 0) -> None:
        self._camera, _ = camera_sections(description)
        self._sensor = sensor_of(self._camera, description.frames)
        self._random = np.random.default_rng(seed)

    def apply(self, image: np.ndarray, exposure_s: float, levels: int) -> np.ndarray:
        """Return digital numbers of a frame.

        Args:
            image: counts without noise.
            exposure_s: of the frame, seconds.
            levels: numbers of the simulated camera's converter.

        Raises:
            ValueError: the converter's bits are not the described ones.
        """
        if self._sensor.top_dn != levels - 1:
            raise ValueError(
                f"bitdepth: the simulated camera has {levels} levels, and the description {self._sensor.top_dn + 1:g}; "
                "set bitdepth to camera.sensor.adc_bits"
            )
        light = np.asarray(image, dtype=np.float64).ravel() / self._sensor.gain_dn_per_e
        rates = np.maximum(light, 0.0) + dark_charge_e(self._camera, 1e6 * exposure_s)
        shot, read = self._random.standard_normal((2, rates.size), dtype=np.float32)
        numbers = np.empty(rates.size)
        fill_numbers(numbers, rates, np.zeros(rates.size), shot, read, self._sensor.numbers)
        return numbers.reshape(image.shape)


class Alp4Patterns:
    """A Vialux array of ALP4lib: ``ALP4(...)`` after `Initialize`, one pulse at its trigger output for each pattern."""

    def __init__(self, dmd: Any) -> None:
        self.dmd, self.shape = dmd, (int(dmd.nSizeY), int(dmd.nSizeX))
        self._is_loaded = False

    def load(self, bits: np.ndarray) -> None:
        """See `Patterns.load`."""
        if self._is_loaded:
            self.dmd.Halt()
            self.dmd.FreeSeq()
        self.dmd.SeqAlloc(nbImg=len(bits), bitDepth=1)
        self._is_loaded = True
        self.dmd.SeqPut(imgData=(255 * bits).ravel())

    def run(self, period_us: float) -> None:
        """See `Patterns.run`."""
        self.dmd.SetTiming(pictureTime=int(period_us))
        self.dmd.Run(loop=False)

    def close(self) -> None:
        """See `Patterns.close`."""
        self.dmd.Halt()
        self.dmd.Free()


class PylablibCamera:
    """A camera of pylablib with regions and binning, such as ``DCAM.DCAMCamera()``.

    Args:
        camera: the open camera.
        bits: of its numbers, as set.
    """

    def __init__(self, camera: Any, bits: int) -> None:
        self.camera, self.bits = camera, bits
        columns, rows = camera.get_detector_size()
        self.shape = (int(rows), int(columns))

    def configure(self, *, exposure_us: float, roi: Roi, binning: int, trigger: bool) -> float:
        """See `Grabber.configure`."""
        row, column, rows, columns = roi
        self.camera.clear_acquisition()
        self.camera.set_trigger_mode("ext" if trigger else "int")
        self.camera.set_roi(column, column + columns, row, row + rows, binning, binning)
        exposure_s = float(self.camera.set_exposure(1e-6 * exposure_us))
        self.camera.setup_acquisition(mode="sequence", nframes=_BUFFERS)
        self.camera.start_acquisition()
        return 1e6 * exposure_s

    def grab(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Grabber.grab`."""
        with suppress(self.camera.TimeoutError):  # opusim sees how many frames are missing
            self.camera.wait_for_frame(nframes=n, timeout=_PATIENCE_S)
        frames, infos = self.camera.read_multiple_images(return_info=True)
        return np.asarray(frames), np.array([getattr(info, "framestamp", info.frame_index) for info in infos])

    def close(self) -> None:
        """See `Grabber.close`."""
        self.camera.close()


class _GenicamCamera(ABC):
    """A camera by the names of GenICam's Standard Feature Naming Convention.

    Args:
        nodes: the camera's features.
        value: name of a feature's value.
        line: ``TriggerSource`` at which pulses arrive.
    """

    def __init__(self, nodes: Any, value: str, line: str) -> None:
        self._nodes, self._value, self._line = nodes, value, line
        digits = "".join(filter(str.isdigit, str(self._get("PixelFormat"))))
        self.bits = int(digits or 0)  # Mono8, Mono12; refused above 16
        sides = [name if self._has(name) else name.removeprefix("Sensor") for name in _SIDES]
        self.shape = (int(self._get(sides[0])), int(self._get(sides[1])))

    def _has(self, name: str) -> bool:
        return getattr(self._nodes, name, None) is not None

    def _get(self, name: str) -> Any:
        return getattr(getattr(self._nodes, name), self._value)

    def _set(self, name: str, value: Any, default: Any = None) -> None:
        """Set a feature; for one that the camera lacks only the default is accepted."""
        if self._has(name):
            setattr(getattr(self._nodes, name), self._value, value)
        elif value != default:
            raise ValueError(
                f"the camera has no feature {name}, and {value!r} is asked for; use another camera"
            )

    @abstractmethod
    def _stop(self) -> None:
        """Stop taking frames, and forget those that were not grabbed."""

    @abstractmethod
    def _start(self) -> None:
        """Wait for pulses, or run freely."""

    @abstractmethod
    def _fetch(self) -> tuple[np.ndarray, int] | None:
        """Return a copy of the next frame and its number; None if none comes."""

    def configure(self, *, exposure_us: float, roi: Roi, binning: int, trigger: bool) -> float:
        """See `Grabber.configure`."""
        row, column, rows, columns = (length // binning for length in roi)
        self._stop()
        self._set("ExposureTime", float(exposure_us))
        for axis, start, length in (("X", column, columns), ("Y", row, rows)):
            self._set("BinningHorizontal" if axis == "X" else "BinningVertical", binning, 1)
            self._set(f"Offset{axis}", 0, 0)
            self._set("Width" if axis == "X" else "Height", length)
            self._set(f"Offset{axis}", start, 0)
        self._set("TriggerSelector", "FrameStart", "FrameStart")
        self._set("TriggerMode", "On" if trigger else "Off", "Off")
        if trigger:
            self._set("TriggerSource", self._line)
        self._start()
        return float(self._get("ExposureTime"))

    def grab(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Grabber.grab`."""
        taken: list[tuple[np.ndarray, int]] = []
        while len(taken) < n and (found := self._fetch()) is not None:
            taken.append(found)
        return np.array([frame for frame, _ in taken]), np.array(
            [number for _, number in taken], dtype=np.int64
        )


class PylonCamera(_GenicamCamera):
    """A Basler camera of pypylon: an open ``pylon.InstantCamera``; arguments as for GenICam's cameras."""

    def __init__(self, camera: Any, line: str = "Line1") -> None:
        super().__init__(camera, "Value", line)
        self.camera = camera
        camera.MaxNumBuffer.Value = _BUFFERS

    @override
    def _stop(self) -> None:
        self.camera.StopGrabbing()

    @override
    def _start(self) -> None:
        self.camera.StartGrabbing()

    def pulse(self) -> None:
        """Take a frame now, if `line` is ``Software``."""
        self.camera.WaitForFrameTriggerReady(int(1000 * _PATIENCE_S), 0)  # 0: return if it is not ready
        self.camera.ExecuteSoftwareTrigger()

    @override
    def _fetch(self) -> tuple[np.ndarray, int] | None:
        result = self.camera.RetrieveResult(int(1000 * _PATIENCE_S), 0)  # 0: return if none comes
        if result is None or not result.IsValid():
            return None
        with result:
            return (np.array(result.Array), int(result.BlockID)) if result.GrabSucceeded() else None

    def close(self) -> None:
        """See `Grabber.close`."""
        self.camera.Close()


class HarvestersCamera(_GenicamCamera):
    """A camera of any GenTL producer: an ``ImageAcquirer`` of harvesters.

    Args:
        acquirer: what ``Harvester.create`` returned.
        line: ``TriggerSource`` at which pulses arrive.
    """

    def __init__(self, acquirer: Any, line: str = "Line1") -> None:
        super().__init__(acquirer.remote_device.node_map, "value", line)
        self.acquirer = acquirer

    @override
    def _stop(self) -> None:
        self.acquirer.stop()

    @override
    def _start(self) -> None:
        self.acquirer.num_buffers = _BUFFERS
        self.acquirer.start()

    @override
    def _fetch(self) -> tuple[np.ndarray, int] | None:
        buffer = self.acquirer.try_fetch(timeout=_PATIENCE_S)
        if buffer is None:
            return None
        with buffer:
            image = buffer.payload.components[0]
            return image.data.reshape(image.height, image.width).copy(), int(buffer.module.frame_id)

    def close(self) -> None:
        """See `Grabber.close`."""
        self.acquirer.destroy()


class MicroManagerCamera:
    """The camera of a Micro-Manager core (pymmcore, pymmcore-plus).

    Args:
        core: with the camera loaded and initialised.
        wait_for_pulses: sets the camera's own properties by which it waits for pulses (True) or runs freely (False).
    """

    def __init__(self, core: Any, wait_for_pulses: Callable[[bool], None]) -> None:
        self.core, self._wait_for_pulses = core, wait_for_pulses
        self._set_binning(1)
        core.clearROI()
        self.bits = int(core.getImageBitDepth())
        self.shape = (int(core.getImageHeight()), int(core.getImageWidth()))

    def _stop(self) -> None:
        if self.core.isSequenceRunning():
            self.core.stopSequenceAcquisition()

    def _set_binning(self, binning: int) -> None:
        camera = self.core.getCameraDevice()
        if self.core.hasProperty(camera, "Binning"):
            self.core.setProperty(camera, "Binning", str(binning))
        elif binning != 1:
            raise ValueError(
                f"binning = {binning}: camera {camera!r} has no property Binning; set bench.binning = 1"
            )

    def configure(self, *, exposure_us: float, roi: Roi, binning: int, trigger: bool) -> float:
        """See `Grabber.configure`."""
        row, column, rows, columns = (length // binning for length in roi)
        self._stop()
        self._set_binning(binning)
        self.core.setROI(column, row, columns, rows)
        self.core.setExposure(1e-3 * exposure_us)
        self._wait_for_pulses(trigger)
        self.core.clearCircularBuffer()
        self.core.startContinuousSequenceAcquisition(0)
        return 1e3 * float(self.core.getExposure())

    def grab(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Grabber.grab`."""
        until = time.monotonic() + _PATIENCE_S
        while (waiting := self.core.getRemainingImageCount()) < n and time.monotonic() < until:
            time.sleep(1e-3)
        taken = [self.core.popNextImageAndMD() for _ in range(min(n, waiting))]
        return np.array([frame for frame, _ in taken]), np.array(
            [int(tags["ImageNumber"]) for _, tags in taken]
        )

    def close(self) -> None:
        """See `Grabber.close`."""
        self._stop()
        self.core.reset()
