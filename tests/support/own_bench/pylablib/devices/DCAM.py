"""A double of pylablib's Hamamatsu cameras: the published calls, on the bench of `optical_bench`."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import optical_bench

TFrameInfo = namedtuple("TFrameInfo", ["frame_index", "framestamp", "timestamp_us"])


class DCAMError(RuntimeError):
    """Any failure."""


class DCAMTimeoutError(DCAMError):
    """No frame came."""


class DCAMCamera:
    """Takes a frame at every pulse, or by itself."""

    TimeoutError = DCAMTimeoutError

    def __init__(self, idx: int = 0) -> None:
        bench = optical_bench.current()
        if not bench.camera_opens:
            raise DCAMError("camera index 0 is not available (0 cameras exist)")
        self._bench, self._link = bench, optical_bench.CameraLink(bench)
        self._link.roi = (0, 0, *bench.sensor)
        bench.opened.add("camera")

    def get_detector_size(self) -> tuple[int, int]:
        rows, columns = self._bench.sensor
        return columns, rows

    def set_trigger_mode(self, mode: str) -> str:
        self._link.external = mode == "ext"
        return mode

    def set_exposure(self, exposure: float) -> float:
        us = max(int(exposure * 1e6 / self._bench.shortest_us + 1e-6), 1) * self._bench.shortest_us
        self._link.exposure_us = us
        return us * 1e-6

    def set_roi(
        self,
        hstart: int = 0,
        hend: Any = None,
        vstart: int = 0,
        vend: Any = None,
        hbin: int = 1,
        vbin: int = 1,
    ) -> None:
        rows, columns = self._bench.sensor
        hend, vend = hend or columns, vend or rows
        self._link.roi = (vstart, hstart, vend - vstart, hend - hstart)
        self._link.binning = hbin

    def setup_acquisition(self, mode: str = "sequence", nframes: int = 100) -> None:
        """Allocate the buffer."""

    def start_acquisition(self) -> None:
        self._link.arm()

    def clear_acquisition(self) -> None:
        self._link.is_armed = False

    def wait_for_frame(self, since: str = "lastread", nframes: int = 1, timeout: float = 20.0) -> None:
        self._link.pump(nframes)
        if len(self._link.frames) < nframes:
            raise DCAMTimeoutError("no frame within the time-out")

    def read_multiple_images(self, return_info: bool = False) -> Any:
        taken = list(self._link.frames)
        self._link.frames.clear()
        frames = [np.array(numbers) for _, numbers in taken]
        infos = [TFrameInfo(number, number, 0) for number, _ in taken]
        return (frames, infos) if return_info else frames

    def close(self) -> None:
        self._bench.opened.discard("camera")
