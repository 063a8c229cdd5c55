"""A double of ALP4lib (Vialux mirror arrays): the published calls, on the bench of `optical_bench`."""

from __future__ import annotations

from typing import Any

import numpy as np
import optical_bench


class ALP4:
    """Holds a sequence and shows it; pulses go to the camera."""

    def __init__(self, version: str = "4.3", libDir: str | None = None) -> None:
        self._patterns: np.ndarray | None = None
        self._period_us = 0.0
        self._bench = optical_bench.current()

    def Initialize(self, DeviceNum: int | None = None) -> None:
        if "mirrors" in self._bench.opened:
            raise OSError("the specified ALP is already allocated")
        self._bench.opened.add("mirrors")
        self.nSizeY, self.nSizeX = self._bench.mirrors

    def SeqAlloc(self, nbImg: int = 1, bitDepth: int = 1) -> int:
        if self._patterns is not None:
            raise MemoryError("a sequence is allocated; call FreeSeq")
        self._patterns = np.zeros((nbImg, self.nSizeY, self.nSizeX), dtype=np.uint8)
        return 1

    def SeqPut(self, imgData: np.ndarray, SequenceId: int | None = None, **options: Any) -> None:
        assert self._patterns is not None
        self._patterns[:] = (np.asarray(imgData).reshape(self._patterns.shape) >= 128).astype(np.uint8)

    def SetTiming(self, SequenceId: int | None = None, pictureTime: int | None = None, **rest: Any) -> None:
        self._period_us = float(pictureTime or 0)

    def Run(self, SequenceId: int | None = None, loop: bool = True) -> None:
        assert self._patterns is not None
        self._bench.pending.extend((pattern, self._period_us) for pattern in self._patterns)

    def Halt(self) -> None:
        """Stop showing."""

    def FreeSeq(self, SequenceId: int | None = None) -> None:
        self._patterns = None

    def Free(self) -> None:
        self._bench.opened.discard("mirrors")
