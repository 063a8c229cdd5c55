"""The anchor's light: its size over the description's, and whether each output has its described share.

A certified count law scales the described light of every output by one ratio, so light that is spread over the outputs
in another way would exceed it somewhere. With a_j the mean of output j over F_a frames of the anchor, z_j where its
line of means under uniform light starts (its own offset and response drop out), K the gain, r the ratio and L_j its
described light,
    a_j - z_j = K r L_j + noise of variance v_j / F_a + (variance of z_j),
whose squares add up to chi-squared. The temporal variance v_j lies on the flat frames' straight line v(m): other values
show a gain that has changed, or light that varies at each output by itself, as that of a medium that moves does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from opusim.calibration.flat_series import PIXELS_LOOKED_AT
from opusim.calibration.independence import largest_deviate_p_value
from opusim.calibration.photon_transfer import PhotonTransfer
from opusim.p_values import gamma_p_value

_FULL = 0.7
"""Share of the saturation above which an output's described anchor is left out, since it may be clipped."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AnchorLight:
    """Frames of the anchor at the outputs whose described anchor lies well below saturation.

    Attributes:
        frames: DN, shape (frames, n_outputs), of all outputs.
        described_e: described light of each output, electrons, shape (n_outputs,).
        kept: outputs that are looked at, indices.
    """

    frames: np.ndarray
    described_e: np.ndarray
    kept: np.ndarray

    @classmethod
    def of(cls, frames: np.ndarray, described_e: np.ndarray, saturation_e: float) -> AnchorLight:
        """Leaves out the outputs that may be clipped.

        Raises:
            ValueError: fewer than 30 outputs are left.
        """
        kept = np.flatnonzero(described_e < _FULL * saturation_e)
        if kept.size < 30:
            raise ValueError(
                f"the anchor of {kept.size} outputs lies below {_FULL:.0%} of saturation: at least 30 are needed; dim "
                "the light, or open more outputs"
            )
        return cls(frames=frames, described_e=described_e, kept=kept)

    @property
    def means(self) -> np.ndarray:
        """Mean of each frame over the kept outputs, DN, shape (frames,)."""
        return np.asarray(self.frames[:, self.kept].mean(axis=1, dtype=np.float64))

    @property
    def described(self) -> float:
        """Mean described light of the kept outputs, electrons."""
        return float(self.described_e[self.kept].mean())

    def property_p_values(self, transfer: PhotonTransfer) -> dict[str, dict[str, float]]:
        """P-values of light that is spread over the outputs as described, and of its variance."""
        looked_at = self.kept[self.kept < PIXELS_LOOKED_AT]
        start, start_variance = transfer.starts()
        lit = self.frames[:, looked_at].mean(axis=0, dtype=np.float64) - start[looked_at]
        described = self.described_e[looked_at]
        ratio = float(lit.mean() / described.mean())
        own = transfer.variance_at(np.maximum(ratio, 0.0) * described) / len(self.frames)
        deviates = (lit - ratio * described) / np.sqrt(own + start_variance)
        freedom = looked_at.size - 1
        return {
            "the anchor's light is spread over the outputs as described": {
                "squared differences": gamma_p_value(
                    float(np.sum(np.square(deviates))), freedom, 2 * freedom
                ),
                "largest of an output": largest_deviate_p_value(np.abs(deviates)),
            },
            "the anchor's variance lies on the line of flat frames": {
                "excess": transfer.excess_p_value(self.frames, self.kept)
            },
        }
