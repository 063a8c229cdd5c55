"""Mirrors that are stuck or leak: fields of frames as such an array shows them.

A mirror that is off leaks the amplitude e = 1 / sqrt(contrast) of one that is on; a stuck one keeps its state in every
frame. The field of a frame x is then affine in x,
    u_x = v + (1 - e) sum over free mirrors of R_i x_i,      v = u_0, the field of the blank frame,
and a frame and its complement add up to the same field t = u_a + v for every x. So the recovery stays linear:
    |u_x|^2 - |u_(a-x)|^2 = |v|^2 - |u_a|^2 + 2 (1 - e) sum_i Re(conj(t) R_i) x_i.
Which mirrors are stuck is computed from the medium's seed and the mirror's number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy.special import ndtr

from opusim import checks
from opusim.camera.speckle import Speckle, SpeckleLaw
from opusim.camera.stages import pixel_normals
from opusim.medium.transmission import IMAGINARY_PLANE, REAL_PLANE

_STUCK_PLANE = 20  # a counter word that no medium uses
_MIRRORS_AT_ONCE = 2048


@dataclass(frozen=True, kw_only=True)
class MirrorFaults:
    """What is wrong with a mirror array.

    Attributes:
        stuck_on: share of the mirrors that are always on, in [0, 0.5].
        stuck_off: share that are always off, in [0, 0.5].
        leak: amplitude of a mirror that is off, relative to one that is on, in [0, 1).
        seed: which array this is, in [0, 2^64).
    """

    stuck_on: float = 0.0
    stuck_off: float = 0.0
    leak: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks.in_range(0, 0.5, stuck_on=self.stuck_on, stuck_off=self.stuck_off)
        checks.in_range(0, 0.999, leak=self.leak)

    def amplitudes(self, mirrors: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the amplitude of every mirror in the blank frame and in the anchor, float64, shape (mirrors,) each."""
        place = ndtr(pixel_normals(self.seed, _STUCK_PLANE, np.arange(mirrors)))
        on, off = place < self.stuck_on, place > 1 - self.stuck_off
        return np.where(on, 1.0, self.leak), np.where(off, self.leak, 1.0)


class FaultyMirrors(Speckle):
    """The medium as a camera sees it behind a faulty mirror array; see `opusim.camera.mirrors`.

    The map of usable pixels is that of the sound array: faults came later.

    Args:
        law: as for `Speckle`.
        faults: what is wrong.
        n_outputs: as for `Speckle`.
        file: as for `Speckle`.
        pixels: as for `Speckle`.
    """

    def __init__(
        self,
        law: SpeckleLaw,
        faults: MirrorFaults,
        n_outputs: int,
        file: str,
        pixels: np.ndarray | None = None,
    ) -> None:
        super().__init__(law, n_outputs, file, pixels)
        self._blank, self._lit = faults.amplitudes(law.mirrors)
        self._free = torch.from_numpy(self._blank != self._lit)[: law.n_inputs].float()
        self._swing = 1.0 - faults.leak

    @cached_property
    def _ends(self) -> np.ndarray:
        """Fields of the blank frame, the anchor, and all free data mirrors: float64, shape (3, 2, n_outputs)."""
        free = np.zeros(self.law.mirrors)
        free[: self.law.n_inputs] = self._swing * self._free.numpy()
        return self._weighted([self._blank, self._lit, free])

    @property
    def blank(self) -> np.ndarray:
        """v, the field of the frame in which every mirror is off: float64, shape (2, n_outputs)."""
        return self._ends[0]

    @property
    def anchor(self) -> np.ndarray:
        """u_a, the field of the frame in which every mirror is on: float64, shape (2, n_outputs)."""
        return self._ends[1]

    def fields(self, frames: torch.Tensor) -> torch.Tensor:
        """Return fields of binary frames; see `Speckle.fields`. Exact but for the rounding of the blank frame's."""
        shown = super().fields(frames * self._free.to(frames.device))
        return shown.mul_(self._swing).add_(torch.from_numpy(self.blank).float()[:, None, :])

    def responses(self, plane: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return how the field answers to each input: (1 - e) R_i, 0 for a stuck mirror; see `Speckle.responses`."""
        return super().responses(plane, device) * (self._swing * self._free.to(device))[:, None]

    def largest_fields(self) -> np.ndarray:
        """Upper limits as `Speckle.largest_fields`: by the triangle inequality from the sound array's.

        |u_x| <= |v| + (1 - e) L and |u_(a-x)| <= |u_a - z_1| + (1 - e) L, with L the sound array's limit over data
        mirrors and z_1 the field of all free data mirrors, since frames of free mirrors are frames of all mirrors.
        """
        limit = self._swing * super().largest_fields()[0]
        blank, anchor, data = self._ends
        return np.stack([np.hypot(*blank) + limit, np.hypot(*(anchor - data)) + limit])

    def _forget(self) -> None:
        super()._forget()
        self.__dict__.pop("_ends", None)

    def _weighted(self, weights: Sequence[np.ndarray]) -> np.ndarray:
        """Sums over mirrors of weights times entries, float64, shape (weightings, 2, n_outputs)."""
        table = torch.from_numpy(np.stack(weights))  # (weightings, mirrors)
        found = np.zeros((len(weights), 2, self.n_outputs))
        for outputs in self._output_blocks():
            for start in range(0, self.law.mirrors, _MIRRORS_AT_ONCE):
                rows = range(start, min(start + _MIRRORS_AT_ONCE, self.law.mirrors))
                for part, plane in enumerate((REAL_PLANE, IMAGINARY_PLANE)):
                    tile = self._tile(plane, outputs, rows).double()
                    found[:, part, outputs.start : outputs.stop] += (
                        table[:, rows.start : rows.stop] @ tile
                    ).numpy()
        return found
