"""The linear projection from intensities: anchor and complement frames, centring, and what it does to the noise.

With the anchor a (every mirror of the window on), u = R z and I = |u|^2 in any units,
    (I_a + I_x - I_(a-x)) / (2 sqrt I_a) = Re(conj(u_a) u_x) / |u_a|,
exactly, for every binary x: a real linear projection from intensities alone. Source:
"Linear Optical Random Projections Without Holography" (arXiv 2305.12988). A ternary x = p - n takes four frames,
    y = (I_p - I_(a-p) - I_n + I_(a-n)) / (2 sqrt I_a) - s sqrt I_a,   s = sum(x) / mirrors,
in which the anchor's own intensity and the black level cancel. The last term takes away the mean |u_a| / mirrors that
every entry of a row has. Multiplied by c = sqrt(2 mirrors / (K N_a)) sqrt(mirrors / (mirrors - 1)), with N_a the mean
photo-electrons of the anchor and K the gain, entries of B are N(0, 1): the phase of u_a and the part of a row that is
orthogonal to the anchor are independent of |u_a|, so masking dark or bright pixels changes no law. (PRNU, at 1 %,
scales a row by 0.5 %.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from opusim import checks

FRAMES_PER_TERNARY = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Recovery:
    """How digital numbers become projections.

    Attributes:
        mirrors: mirrors of the anchor, at least 2.
        anchor_dn: measured intensity of the anchor at each output, black level and dark charge taken off, DN, shape
            (n_outputs,), above 0.
        unit_dn: K N_a, the anchor's mean intensity over pixels, DN, above 0.
    """

    mirrors: int
    anchor_dn: np.ndarray
    unit_dn: float

    def __post_init__(self) -> None:
        checks.integer(mirrors=self.mirrors, minimum=2)
        checks.positive(unit_dn=self.unit_dn)
        checks.positive(anchor_dn=self.anchor_dn)

    @property
    def column_norm(self) -> float:
        """c: projection units for each square root of a DN."""
        return math.sqrt(2 * self.mirrors / self.unit_dn * self.mirrors / (self.mirrors - 1))

    def decode(self) -> np.ndarray:
        """Scale [projection units per DN] and offset of each output, float64, shape (2, n_outputs)."""
        root = np.sqrt(np.asarray(self.anchor_dn, dtype=np.float64))
        return np.stack([0.5 * self.column_norm / root, self.column_norm * root])

    def shift(self, sums: np.ndarray) -> np.ndarray:
        """The share s of vectors with these sums, float64."""
        return np.asarray(sums, dtype=np.float64) / self.mirrors

    def variance(self, frame_variances_dn2: np.ndarray) -> np.ndarray:
        """Var[y] = scale^2 times the sum of the four frames' variances.

        The anchor counts as known: its error is the same for every reading, a bias and no noise.

        Args:
            frame_variances_dn2: DN squared, shape (4, ..., n_outputs).

        Returns:
            Squared projection units, shape (..., n_outputs).
        """
        return np.asarray(np.square(self.decode()[0]) * np.sum(frame_variances_dn2, axis=0))
