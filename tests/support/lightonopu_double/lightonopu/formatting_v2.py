"""Features onto mirrors: each one on a run of neighbouring mirrors of one length, eight mirrors in a byte."""

from __future__ import annotations

import math

import numpy as np


class Formatter:
    """The mapping of a device of one shape."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self._mirrors = math.prod(shape)
        self.lined_factor = 1

    def define_lined_mapping(self, n_features: np.ndarray, size: object, offset: object) -> None:
        """Spread the features over all mirrors."""
        self.lined_factor = self._mirrors // int(np.prod(n_features))

    def apply_format(self, source: np.ndarray, target: np.ndarray, n_features: int, reverse: bool) -> None:
        """Write the mirrors of packed features into a target."""
        bits = np.unpackbits(np.atleast_2d(source), axis=1)[:, : int(n_features)]
        mirrors = np.zeros((len(bits), self._mirrors), np.uint8)
        spread = np.repeat(bits, self.lined_factor, axis=1)
        mirrors[:, : spread.shape[1]] = spread
        target[...] = np.packbits(mirrors, axis=1).reshape(target.shape)
