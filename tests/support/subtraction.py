"""An attack on float32 noise: subtract a guess of the sum, and see whether what is left can be noise (Mironov 2012)."""

import numpy as np


def neighbour(x: np.ndarray, steps: int) -> np.ndarray:
    """The float32 number so many steps away on the line of all of them."""
    line = x.view(np.int32).astype(np.int64)
    line = np.where(line < 0, -(line & 0x7FFFFFFF), line) + steps
    return np.where(line < 0, (-line) | 0x80000000, line).astype(np.uint32).view(np.float32)


def explained(released: np.ndarray, guess: np.ndarray, std: float) -> float:
    """The share of entries that are guess + fl(std z) in float32 for some float32 z: an attacker's subtraction."""
    scale, fits = np.float32(std), np.zeros(len(released), bool)
    left = (released.astype(np.float64) - guess.astype(np.float64)).astype(np.float32)
    for k in range(-3, 4):
        noise = neighbour(left, k)
        sums = guess + noise == released
        z = (noise.astype(np.float64) / float(scale)).astype(np.float32)
        for j in (-1, 0, 1):
            fits |= sums & (scale * neighbour(z, j) == noise)
    return float(fits.mean())
