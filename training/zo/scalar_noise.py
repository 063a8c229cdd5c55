"""Noise on a step's scalars, from a stream that shares nothing with the directions'."""

from __future__ import annotations

from abc import ABC, abstractmethod

from opusim.randomness import NoiseStream


class ScalarNoise(ABC):
    """Independent numbers of one law, in units of its scale.

    Args:
        stream: Independent N(0, 1): digital (seeded, or the system's under release), or a device's.
    """

    def __init__(self, stream: NoiseStream) -> None:
        self._stream = stream

    def draw(self, step: int, count: int) -> list[float]:
        """Fresh noise for a step's scalars; in experiment mode the same step repeats it.

        Args:
            step: The step's number.
            count: How many scalars.
        """
        self._stream.seek(step)
        return self._numbers(count)

    @abstractmethod
    def _numbers(self, count: int) -> list[float]:
        """Numbers of the law."""


class GaussianScalars(ScalarNoise):
    """N(0, 1)."""

    def _numbers(self, count: int) -> list[float]:
        return [float(number) for number in self._stream.normal((count,)).double()]


class LaplaceScalars(ScalarNoise):
    """Laplace of scale 1: (a^2 + b^2 - c^2 - d^2) / 2 of independent normals, a difference of two exponentials.

    Exact for exact normals. The stream makes normals in pairs, whose squared radius over 2 is an exponential number cut
    at log 2^65 = 45.1 in release mode, which the exact law exceeds with probability 2^-65 = 2.7e-20 (log 2^41 = 28.4
    and 2^-41 = 4.5e-13 in experiment mode). Four pairs make one Laplace number, so it differs from an exact one by more
    than rounding with probability at most 2^-63 = 1.1e-19, and its magnitude is at most 90.1. What this adds to
    delta = 0: accounting.zo.cut_delta.
    """

    def _numbers(self, count: int) -> list[float]:
        squares = self._stream.normal((count, 4)).double().square()
        return [float(a + b - c - d) / 2 for a, b, c, d in squares]
