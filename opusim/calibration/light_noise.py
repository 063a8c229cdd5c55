"""Light that varies from frame to frame: what the means of frames say of it.

Over F frames of one setting, the mean over P pixels has variance v / P + r^2 m^2, with v the pixels' own variance, m
the mean light and r the relative standard deviation of the power. For a Gaussian power, (F - 1) s^2 over that variance
is chi-squared with F - 1 degrees of freedom; settings add up. A test of r = 0 and an upper limit of r follow exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from opusim.p_values import chi_squared_p_value

_MOST = 10.0  # relative standard deviation beyond which nothing is searched


@dataclass(frozen=True, kw_only=True, eq=False)
class LightNoise:
    """Variances of frame means at settings of light, shape (settings,) each.

    Attributes:
        frame_variances: sample variance over frames of the mean over pixels, s^2, DN^2.
        freedom: frames less one.
        own: variance of the mean from the pixels' independent noise, v / P, DN^2, above 0.
        light: mean light, DN, black level and dark charge taken off.
    """

    frame_variances: np.ndarray
    freedom: np.ndarray
    own: np.ndarray
    light: np.ndarray

    def and_frames(self, frames: np.ndarray, blank_dn: float) -> LightNoise:
        """With frames of one more setting, shape (frames, pixels), DN, whose blank frames have the given mean."""
        dn = frames.astype(np.float64)
        means = dn.mean(axis=1)
        own = float(np.mean((dn - means[:, None]).var(axis=0, ddof=1))) / (dn.shape[1] - 1)
        return LightNoise(
            frame_variances=np.append(self.frame_variances, means.var(ddof=1)),
            freedom=np.append(self.freedom, len(means) - 1),
            own=np.append(self.own, max(own, 1e-300)),
            light=np.append(self.light, means.mean() - blank_dn),
        )

    @property
    def estimate(self) -> float:
        """The r at which the sum of all settings has its mean."""
        return self._solve(float(self.freedom.sum()))

    @property
    def p_value(self) -> float:
        """Two-sided, of frame means that vary by the pixels' own noise only."""
        return chi_squared_p_value(self._energy(0.0), int(self.freedom.sum()))

    def upper(self, beta: float) -> float:
        """The limit that r exceeds with probability at most beta, for a Gaussian power."""
        from scipy.stats import chi2

        return self._solve(float(chi2.ppf(beta, int(self.freedom.sum()))))

    def _solve(self, energy: float) -> float:
        """The r at which the settings add up to energy: 0 if r = 0 is below it already, at most 10."""
        from scipy.optimize import brentq

        if self._energy(0.0) <= energy:
            return 0.0
        if self._energy(_MOST) >= energy:
            return _MOST
        return float(brentq(lambda r: self._energy(r) - energy, 0.0, _MOST, xtol=1e-12))

    def _energy(self, r: float) -> float:
        return float(np.sum(self.freedom * self.frame_variances / (self.own + np.square(r * self.light))))
