"""A stand-in for a vendor's library: a linear instrument that shows binary frames and answers in digital numbers."""

from __future__ import annotations

import numpy as np

DN_PER_UNIT, READ_NOISE_DN = 20.0, 2.0


class Instrument:
    """Answers R x in digital numbers with read noise; entries of R have standard deviation 20 DN."""

    def __init__(self) -> None:
        self._noise = np.random.default_rng(1)
        self._response: np.ndarray | None = None

    def connect(self, pixels_in: int, pixels_out: int) -> None:
        """Open the link for a window."""
        entries = np.random.default_rng(2).standard_normal((pixels_out, pixels_in))
        self._response = (DN_PER_UNIT * entries).astype(np.float32)

    def disconnect(self) -> None:
        """Close the link."""
        self._response = None

    def show(self, frames: np.ndarray) -> np.ndarray:  # (n, pixels_in) -> (n, pixels_out)
        """Show binary frames and read each one."""
        if self._response is None:
            raise OSError("the link is down")
        clean = frames.astype(np.float32) @ self._response.T
        return clean + READ_NOISE_DN * self._noise.standard_normal(clean.shape, dtype=np.float32)
