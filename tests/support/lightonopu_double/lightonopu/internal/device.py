"""The appliance: mirrors, a scattering medium and an 8-bit camera, for one process at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from lightonml.internal.types import AcqState, OutputRoiStrategy

MIRRORS = (32, 32)
_MEAN_DN, _GAIN_DN_PER_E, _READ_NOISE_E, _BLACK_DN = 24.0, 0.02, 13.0, 2.0


class OpuAlreadyUsedException(Exception):
    """Another process has the appliance."""


class OpuDevice:
    """What lightonml holds as `OPU.device`."""

    opened: int = 0
    """Devices of this process that are open."""
    made: int = 0
    """Devices that this process made, each with noise of its own."""

    def __init__(
        self, kind: str, frametime_us: int, exposure_us: int, prelim: int, _: Any, verbose: int, name: str
    ):
        self.frametime_us, self.exposure_us, self.active = frametime_us, exposure_us, False
        self.acq_state, self.output_dtype = AcqState.stopped, np.uint8
        self.output_roi_strategy, self.input_shape = OutputRoiStrategy.mid_width, MIRRORS
        self.output_shape_max, self.output_roi = (2048, 1088), ((0, 0), (2048, 1))
        self.gain_dB = 0.0
        folder = Path(os.environ.get("LIGHTONOPU_DOUBLE_FOLDER", "/tmp"))
        self._pid_file = folder / f"lighton-{name}-{os.geteuid()}.pid"
        OpuDevice.made += 1
        self._noise = np.random.default_rng([12, OpuDevice.made])
        self._speed = float(os.environ.get("LIGHTONOPU_DOUBLE_SPEED", "inf"))
        self._medium: np.ndarray | None = None

    @property
    def output_shape(self) -> tuple[int, int]:
        """Width and height of the camera's window."""
        return self.output_roi[1]

    @property
    def output_readout_us(self) -> int:
        """A row of the camera takes 2.7 us."""
        return int(2.7 * self.output_roi[1][1])

    def open(self) -> None:
        """Take the appliance; the file of a process that died is removed."""
        with suppress(FileNotFoundError, ValueError, ProcessLookupError):
            holder = int(self._pid_file.read_text())
            os.kill(holder, 0)
            if holder != os.getpid() or self.active:
                raise OpuAlreadyUsedException(f"pid {holder}")
        self._pid_file.write_text(str(os.getpid()))
        self.active = True
        OpuDevice.opened += 1

    def close(self) -> None:
        """Give the appliance back."""
        if self.active:
            OpuDevice.opened -= 1
            self.active = False
            self._pid_file.unlink(missing_ok=True)

    def reserve(self, n_images: int) -> None:
        """Take memory for so many images."""

    @contextmanager
    def acquiring(self, n_images: int = 0, online: bool = False) -> Iterator[None]:
        """Run mirrors and camera together."""
        self.acq_state = AcqState.online if online else AcqState.batch
        try:
            yield
        finally:
            self.acq_state = AcqState.stopped

    def transform2(self, mirrors: np.ndarray, output: np.ndarray, batch_index: int) -> None:
        """Show frames of packed mirrors, and write what the camera reads into an output of uint8."""
        if not self.active:
            raise OSError("the appliance is closed")
        time.sleep(len(output) * self.frametime_us * 1e-6 / self._speed)
        n_outputs = output.shape[1]
        if self._medium is None or self._medium.shape[1] < n_outputs:
            medium = np.random.default_rng(11)  # the same after each opening, and for each window
            shape, outputs = (int(np.prod(MIRRORS)), 2), max(n_outputs, 2048)
            self._medium = np.stack(
                [medium.standard_normal(shape, np.float32).view(np.complex64)[:, 0] for _ in range(outputs)],
                axis=1,
            )
        shown = np.unpackbits(mirrors[: len(output)], axis=1).astype(np.float32)
        field = shown @ self._medium[:, :n_outputs]
        light = np.square(np.abs(field)) * (_MEAN_DN / (2 * shown.shape[1]))
        electrons = self._noise.poisson(light * (self.exposure_us / 400) / _GAIN_DN_PER_E)
        electrons = electrons + _READ_NOISE_E * self._noise.standard_normal(electrons.shape)
        output[...] = np.clip(np.rint(_BLACK_DN + _GAIN_DN_PER_E * electrons), 0, 255)

    def versions(self) -> str:
        """What is inside."""
        return "a double of the appliance"
