"""Which share of a camera's outputs is full in the frames of a linear projection."""

from __future__ import annotations

import numpy as np

from opusim.camera.exposure import Exposure

FRAME_SHARES = (0.25, 0.5, 0.75)
"""Shares of the mirrors that are on in the frames looked at, beside the anchor: a vector's frames lie between."""
MOST_SATURATED = 0.01
"""Share of the outputs that may be full in a frame: beyond, entries of B are not N(0, 1)."""
_OUTPUTS_LOOKED_AT = 1024


def saturated_shares(exposure: Exposure, anchor: np.ndarray) -> dict[float, float]:
    """Expected share of outputs whose mean light fills them, for frames with a share f of the mirrors on.

    The anchor's field u_a is known; given it, a frame's field is f u_a plus a circular Gaussian of variance
    2 mirrors f (1 - f), so |u|^2 has a noncentral chi-squared law with two degrees of freedom. No field is computed.

    Args:
        exposure: the camera's stages.
        anchor: field of the anchor, shape (2, n_outputs), mirror units.

    Returns:
        The share at f = 1, the anchor, over all outputs, and at `FRAME_SHARES` over the first 1,024.
    """
    from scipy.stats import ncx2

    room_e = exposure.sensor.saturation_e - exposure.dark_e - exposure.offset_e
    with np.errstate(divide="ignore"):
        full = np.where(exposure.gain_e > 0, room_e / exposure.gain_e, np.inf)  # |u|^2 that fills the pixel
    intensity = np.sum(np.square(anchor), axis=0)
    shares = {1.0: float(np.mean(intensity >= full))}
    some, limit = intensity[:_OUTPUTS_LOOKED_AT], np.maximum(full[:_OUTPUTS_LOOKED_AT], 0.0)
    for f in FRAME_SHARES:
        scale = exposure.mirrors * f * (1 - f)
        shares[f] = float(np.mean(ncx2.sf(limit / scale, 2, f * f * some / scale)))
    return shares
