"""Find a camera's constants from the means and variances of frames: photon transfer as in EMVA 1288.

With p photons on a pixel, below saturation (EMVA 1288 release 3.1, sections 2 to 4 and 6 to 8):
    mean      m(p) = m_0 + R p,         R = K eta            [DN]
    variance  v(m) = v_0 + K (m - m_0)                       [DN^2], v_0 = K^2 (N_dark + read_noise^2) + 1/12
    so the gain K is the slope of the variance on the measured mean, quantum efficiency eta = R / K;
    dark current from dark means against exposure: slope / K;
    of each pixel's mean, variance over pixels: K^2 dsnu^2 + prnu^2 (R p)^2 (without the frames' noise).
If the noise of a level is below 0.6 DN, rounding bends both lines (by up to exp(-2 pi^2 0.36) / pi DN at 0.6); such
levels are left out, and dark quantities come from the lines' values at p = 0 and from dark frames under a little
constant light.

Light whose power varies from frame to frame by r (standard deviation over mean) adds r^2 (m - m_0)^2 to the variance,
and a straight line through that overstates K and understates photons. What all pixels of a frame share is therefore
subtracted before variances are formed (`frames`), which leaves the straight line, and the means of frames tell r.
Fluctuations that pixels do not share, and a response that is not linear, bend the line: v = v_0 + K (m - m_0) +
c (m - m_0)^2 is fitted too. c is tested, and the limits of a certified law come from the parabola's K, which c does
not bias. So the read noise of an 8-bit camera is found even at a quarter of a DN, which no variance of a single level
shows; the codes' probabilities do (`opusim.calibration.frames`).

**Varying light** (`LightNoise`). Over F frames of one setting, the mean over P pixels has variance v / P + r^2 m^2,
with v the pixels' own variance, m the mean light and r the relative standard deviation of the power. For a Gaussian
power, (F - 1) s^2 over that variance is chi-squared with F - 1 degrees of freedom; settings add up. A test of r = 0 and
an upper limit of r follow exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, t

from opusim import checks
from opusim.calibration.frames import (
    COUNT,
    MEAN,
    MEAN_SQUARE,
    VARIANCE,
    Estimate,
    FlatSeries,
    Level,
    TakeFrames,
    jackknife,
    sums_of,
    take_series,
)
from opusim.calibration.reading_noise import largest_deviate_p_value
from opusim.p_values import chi_squared_p_value

_MOST = 10.0  # relative standard deviation beyond which no root is searched


@dataclass(frozen=True, kw_only=True, eq=False)
class LightNoise:
    """Variances of frame means at settings of light, shape (settings,) each.

    Attributes:
        frame_variances: sample variance over frames of the mean over pixels, s^2, DN^2.
        freedom: frames less one.
        own: variance of the mean from the pixels' independent noise, v / P, DN^2, above 0.
        light: mean light, DN, without black level and dark charge.
    """

    frame_variances: np.ndarray
    freedom: np.ndarray
    own: np.ndarray
    light: np.ndarray

    def and_frames(self, frames: np.ndarray, blank_dn: float, steady: np.ndarray) -> LightNoise:
        """Return these settings and one more, of frames (frames, pixels), DN.

        `steady` are the same frames at mean power, from which the pixels' own noise is taken.
        """
        means = frames.mean(axis=1, dtype=np.float64)
        dn = steady.astype(np.float64)
        common = dn.mean(axis=1, keepdims=True)
        own = float(np.mean((dn - common).var(axis=0, ddof=1))) / (dn.shape[1] - 1)
        return LightNoise(
            frame_variances=np.append(self.frame_variances, means.var(ddof=1)),
            freedom=np.append(self.freedom, len(means) - 1),
            own=np.append(self.own, max(own, 1e-300)),
            light=np.append(self.light, means.mean() - blank_dn),
        )

    @property
    def common(self) -> float:
        """Variance of frame means beyond the pixels' own noise, DN^2, at least 0: without light, the black level's."""
        excess = float(self.freedom @ (self.frame_variances - self.own))
        return max(excess, 0.0) / max(float(self.freedom.sum()), 1.0)

    @property
    def excess_p_value(self) -> float:
        """P-value of frame means that vary by no more than the pixels' own noise; 1 without any setting."""
        freedom = float(self.freedom.sum())
        return float(chi2.sf(self._energy(0.0), freedom)) if freedom > 0 else 1.0

    def beside(self, common: float) -> LightNoise:
        """Return the noise of light if frame means also have the variance `common` at every light, DN^2."""
        return replace(self, own=self.own + common)

    @property
    def estimate(self) -> float:
        """The r at which the sum of all settings has its mean."""
        return self._solve(float(self.freedom.sum()))

    @property
    def p_value(self) -> float:
        """Two-sided p-value of frame means that vary by the pixels' own noise only."""
        return chi_squared_p_value(self._energy(0.0), int(self.freedom.sum()))

    def upper(self, beta: float) -> float:
        """Return the limit that r exceeds with probability at most beta, for a Gaussian power."""
        return self._solve(float(chi2.ppf(beta, int(self.freedom.sum()))))

    def lower(self, beta: float) -> float:
        """Return the limit that r falls below with probability at most beta, for a Gaussian power."""
        return self._solve(float(chi2.isf(beta, int(self.freedom.sum()))))

    def _solve(self, energy: float) -> float:
        """Return the r at which the settings add up to energy: 0 if r = 0 is below it already, at most 10."""
        if self._energy(0.0) <= energy:
            return 0.0
        if self._energy(_MOST) >= energy:
            return _MOST
        return float(brentq(lambda r: self._energy(r) - energy, 0.0, _MOST, xtol=1e-12))

    def _energy(self, r: float) -> float:
        return float(np.sum(self.freedom * self.frame_variances / (self.own + np.square(r * self.light))))


_HALF = 0.5  # confidence at which limits tell a standard error
LEAST_VARIANCE_DN2 = 0.36
"""Rounding bends a level below this variance."""
_ROUNDING = 1.0 / 12.0
_LEAST_TOGGLING = 30.0  # DN^2, of the sum over pixels
_SQUARES = {"read_noise_e": "read_noise_e2", "prnu": "prnu2", "dsnu_e": "dsnu_e2"}
_TESTED = ("unbent_gain", "unbent_dark", "zero_dn", "bend", "dark_spread2")
_PILOT_FRAMES = 4
_MOST_DOUBLINGS = 60
_CLEAR = 40.0  # standard errors of a pilot's mean by which light must show before its rise is judged
_LONGEST_US = 6e7


@dataclass(frozen=True, kw_only=True)
class TransferLine:
    """Photon transfer: the line v = floor + gain m through variances, and a parabola.

    Attributes:
        floor: variance at m = 0, DN^2.
        gain: K, DN/e-.
        unbent_gain: slope at m = 0 of the parabola v = v_0 + K m + c m^2, DN/e-.
        bend: its c, per electron.
    """

    floor: float
    gain: float
    unbent_gain: float
    bend: float

    @classmethod
    def of(cls, mean: np.ndarray, variance: np.ndarray, weights: np.ndarray) -> TransferLine:
        """Fit both by weighted least squares to each level's mean, DN, and temporal variance, DN^2."""
        floor, gain = weighted_line(mean, variance, weights)
        unit = float(np.max(np.abs(mean)))
        columns = np.stack([np.ones_like(mean), mean / unit, np.square(mean / unit)], axis=1)
        roots = np.sqrt(weights)
        bent = np.linalg.lstsq(columns * roots[:, None], variance * roots, rcond=None)[0]
        return cls(floor=floor, gain=gain, unbent_gain=float(bent[1] / unit), bend=float(bent[2] / unit**2))

    def noise_e2(self, is_rounded: bool) -> float:
        """Return the variance at m = 0 without rounding's, electrons^2; negative by chance only."""
        return (self.floor - _ROUNDING * is_rounded) / self.gain**2


@dataclass(frozen=True, kw_only=True, eq=False)
class PhotonTransfer:
    """Series of flat frames, and the camera's constants from them.

    Attributes:
        light: levels of rising light at one exposure; the last lies far beyond saturation.
        dark: levels of one light, each with its exposure.
        exposure_us: the light series' exposure.
        is_rounded: whether numbers come from a converter.
        warm: like dark, at another temperature, or None if the temperature cannot be set.
    """

    light: FlatSeries
    dark: FlatSeries
    exposure_us: float
    is_rounded: bool = True
    warm: FlatSeries | None = None

    def used(self) -> np.ndarray:
        """Return the light levels between rounding and saturation: means of at most 0.7 of the saturated one."""
        means, variances = self.light.means(), self.light.variances()
        below = means[0] + 0.7 * (means[-1] - means[0])
        least = LEAST_VARIANCE_DN2 if self.is_rounded else 0.0
        used = np.flatnonzero((means < below) & (variances > least))
        if used.size < 4:
            raise ValueError(
                f"light has {used.size} levels between rounding and saturation: at least 4 are needed; add levels"
            )
        return used

    def estimates(self, confidence: float) -> dict[str, Estimate]:
        """Return the camera's constants, each with limits that hold separately with the given confidence.

        Keys: quantum_efficiency [e-/photon], gain_dn_per_e, black_level_dn, read_noise_e, dark_current_e_per_s,
        prnu, dsnu_e, saturation_e, and doubling_k if there is a warm series.
        """
        found = self._jackknife(confidence)
        roots = {name: found[square].root() for name, square in _SQUARES.items()}
        left_out = {*_SQUARES.values(), *_TESTED}
        return {name: value for name, value in found.items() if name not in left_out} | roots

    def _jackknife(self, confidence: float) -> dict[str, Estimate]:
        series = [self.light, self.dark, *([] if self.warm is None else [self.warm])]
        sums = np.concatenate([part.sums for part in series], axis=1)
        return jackknife(sums, partial(self._statistic, used=self.used()), confidence=confidence)

    def unbent(self, confidence: float) -> dict[str, Estimate]:
        """Return limits that a curved photon transfer does not bias, for a certified law.

        Keys: gain_dn_per_e, dark_current_e_per_s, and zero_dn, where the line of means starts. Blank frames may read
        more than that: rounding biases them, and a black level below the converter's end is clipped.
        """
        found = self._jackknife(confidence)
        keys = {"gain_dn_per_e": "unbent_gain", "dark_current_e_per_s": "unbent_dark", "zero_dn": "zero_dn"}
        return {key: found[name] for key, name in keys.items()}

    def light_noise(self) -> LightNoise:
        """Return the variation of the light from frame to frame, by the frames' means."""
        used = self.used()
        means, variances = self.light.means()[used], self.light.variances()[used]
        return LightNoise(
            frame_variances=self.light.frame_means[used].var(axis=1, ddof=1),
            freedom=np.full(used.size, self.light.frames - 1),
            own=variances / self.light.pixels,
            light=means - self.zero(),
        )

    def black_noise(self, blank: np.ndarray) -> LightNoise:
        """Return the variation of the black level by the means of frames without light, the series' and more, DN."""
        # the sum of few codes that change has no chi-squared variance
        least = _LEAST_TOGGLING * self.is_rounded
        dark = [
            (part, i)
            for part in (self.light, self.dark)
            for i, level in enumerate(part.levels)
            if level.photons == 0 and part.variances()[i] * part.pixels > least
        ]
        found = LightNoise(
            frame_variances=np.array([part.frame_means[i].var(ddof=1) for part, i in dark]),
            freedom=np.array([part.frames - 1 for part, _ in dark]),
            own=np.array([part.variances()[i] / part.pixels for part, i in dark]),
            light=np.zeros(len(dark)),
        )
        shown = float(blank.var(axis=0, ddof=1, dtype=np.float64).sum()) > least
        return found.and_frames(blank, float(blank.mean(dtype=np.float64)), blank) if shown else found

    def property_p_values(self) -> dict[str, dict[str, float]]:
        """Return P-values of the constants' two premises: a straight photon transfer and a straight dark series."""
        residuals, freedom, found = 0.0, 0, self._jackknife(_HALF)
        for series in (self.dark, *([] if self.warm is None else [self.warm])):
            errors2 = series.variances() / (series.pixels * series.frames)
            seconds, means = series.seconds(), series.means()
            start, slope = weighted_line(seconds, means, 1 / errors2)
            residuals += float(np.sum(np.square(means - start - slope * seconds) / errors2))
            freedom += len(means) - 2
        slopes, variance = _at_pixels(self.dark, self.dark.seconds(), slice(None))[1]
        return {
            "the variance is a straight line in the mean": {"curvature": self._p_value(found["bend"])},
            "the dark mean is a straight line in the exposure": {
                "residuals": float(chi2.sf(residuals, freedom))
            },
            "dark current is the same at all pixels": {
                "spread over pixels": self._p_value(found["dark_spread2"]),
                "largest of a pixel": largest_deviate_p_value(
                    np.abs((slopes - slopes.mean()) / np.sqrt(variance))
                ),
            },
        }

    def _p_value(self, found: Estimate) -> float:
        """Return the two-sided p-value of a number that is truly 0, by Student's law; its limits are at `_HALF`."""
        error, freedom = self.error_of(found)
        return 2 * float(t.sf(abs(found.value) / max(error, 1e-300), freedom))

    def dark_spread_limit(self, beta: float) -> float:
        """Return the limit, DN/s, that the standard deviation of the pixels' dark slopes exceeds with probability beta.

        For normal slopes, the sum of their squared deviations over s^2 + v is chi-squared, with v the error variance of
        a measured slope.
        """
        slopes, variance = _at_pixels(self.dark, self.dark.seconds(), slice(None))[1]
        most = float(np.sum(np.square(slopes - slopes.mean())) / chi2.ppf(beta, slopes.size - 1))
        return max(most - variance, 0.0) ** 0.5

    def starts(self) -> tuple[np.ndarray, float]:
        """Return the start of each looked-at pixel's line of means, DN, shape (pixels,), and its error variance."""
        return _at_pixels(self.light, self.photons(), self.used())[0]

    def variance_at(self, light_dn: np.ndarray) -> np.ndarray:
        """Return the straight line's temporal variance, DN squared, at `light_dn` above the dark mean.

        It is at least the dark frames' variance, also if the line falls.
        """
        _, floor, gain = self._straight(self.light.sums.sum(0))
        least = max(floor, _ROUNDING * self.is_rounded, 1e-300)
        return np.asarray(least + np.maximum(gain * light_dn, 0.0))

    def sums_of_line(self, weights: np.ndarray) -> list[Estimate]:
        """Return sums of the line's start and slope, weighted by (sums, 2), with limits at a confidence of a half."""

        def sums(total: np.ndarray) -> dict[str, float]:
            values = weights @ np.array(self._straight(total)[1:])
            return {str(i): float(value) for i, value in enumerate(values)}

        return list(jackknife(self.light.sums, sums, confidence=_HALF).values())

    def error_of(self, found: Estimate) -> tuple[float, int]:
        """Return the standard error of an estimate whose limits are those at `_HALF`, and its degrees of freedom."""
        freedom = len(self.light.sums) - 1
        return (found.high - found.low) / 2 / float(t.isf((1 - _HALF) / 2, freedom)), freedom

    def excess_p_value(self, frames: np.ndarray, kept: np.ndarray) -> float:
        """Return the two-sided p-value of frames at some of the pixels, for a variance on the straight line."""

        def excess(total: np.ndarray) -> dict[str, float]:
            zero, floor, gain = self._straight(total[:-1])
            count, mean, variance, _ = total[-1]
            return {"excess": variance / count - floor - gain * (mean / count - zero)}

        more = sums_of(frames, kept, len(self.light.sums))
        sums = np.concatenate([self.light.sums, more[:, None]], axis=1)
        return self._p_value(jackknife(sums, excess, confidence=_HALF)["excess"])

    def _straight(self, total: np.ndarray) -> tuple[float, float, float]:
        """Return mean [DN] and variance [DN^2] without light, and gain, from summed pixels of the light series."""
        used = self.used()
        guide, levels = self.light.variances()[used], total[used]
        mean, variance = levels[:, MEAN] / levels[:, COUNT], levels[:, VARIANCE] / levels[:, COUNT]
        zero = weighted_line(self.photons()[used], mean, 1.0 / guide)[0]
        floor, gain = weighted_line(mean - zero, variance, 1.0 / np.square(guide))
        return zero, floor, gain

    def power_errors(self, rms: float) -> dict[str, float]:
        """Return the errors that a power of spread `rms` leaves in limits; pixels share them and do not show them.

        Keys: zero_dn, where the line of means starts, DN; dark_current_e_per_s, from exposures under a little light.
        """
        used, frames = self.used(), self.light.frames
        starts = line_weights(self.photons()[used], 1.0 / self.light.variances()[used])[0]
        light = np.maximum(self.light.means()[used] - self.zero(), 0.0)
        slopes = line_weights(self.dark.seconds(), 1.0 / self.dark.variances())[1]
        response = light[-1] / self.photons()[used][-1]  # DN for a photon
        lit = response * np.array([level.photons for level in self.dark.levels])
        gain = self._straight(self.light.sums.sum(0))[2]
        return {
            "zero_dn": rms * float(np.linalg.norm(starts * light)) / frames**0.5,
            "dark_current_e_per_s": rms * float(np.linalg.norm(slopes * lit)) / self.dark.frames**0.5 / gain,
        }

    def zero(self) -> float:
        """Return the mean without light, DN: where the line of means starts."""
        return self._straight(self.light.sums.sum(0))[0]

    def linearity_error(self) -> float:
        """Return the largest deviation of a used level's mean from the line, relative to the line's rise from dark."""
        used = self.used()
        photons, means = self.photons()[used], self.light.means()[used]
        start, slope = weighted_line(photons, means, 1.0 / self.light.variances()[used])
        rise = slope * photons
        return float(np.max(np.abs(means - start - rise)[rise > 0] / rise[rise > 0]))

    def photons(self) -> np.ndarray:
        """Return the photons of the light series' levels."""
        return np.array([level.photons for level in self.light.levels])

    def _statistic(self, total: np.ndarray, used: np.ndarray) -> dict[str, float]:
        """Return all constants from summed pixels, shape (levels, 4)."""
        count, mean = total[:, COUNT], total[:, MEAN] / total[:, COUNT]
        variance, square = total[:, VARIANCE] / count, total[:, MEAN_SQUARE] / count
        spatial = (square - np.square(mean)) * count / (count - 1)
        n, photons, guide = len(self.light.levels), self.photons()[used], self.light.variances()[used]
        zero, response = weighted_line(photons, mean[used], 1.0 / guide)
        lit = mean[used] - zero
        line = TransferLine.of(lit, variance[used], 1.0 / np.square(guide))
        gain, unbent_gain = line.gain, line.unbent_gain
        # DN per second of exposure
        own = slice(n, n + len(self.dark.levels))
        dark_dn = weighted_line(self.dark.seconds(), mean[own], 1.0 / self.dark.variances())[1]
        dark = dark_dn / gain
        dark_e = dark * self.exposure_us * 1e-6
        rise, spread = np.square(response * photons), spatial[used] - variance[used] / self.light.frames
        guess = np.square(guide / self.light.frames + 1e-4 * rise)
        offset2, prnu2 = weighted_line(rise, spread, 1.0 / guess)
        black = zero - gain * dark_e
        # variance over pixels of the dark current, (DN/s)^2; that of pixels' means grows as the exposure's square
        dark_own = spatial[own] - variance[own] / self.dark.frames
        dark_spread2 = weighted_line(
            np.square(self.dark.seconds()), dark_own, 1.0 / np.square(self.dark.variances())
        )[1]
        found = {
            "quantum_efficiency": response / gain,
            "gain_dn_per_e": gain,
            "black_level_dn": black,
            "read_noise_e2": line.noise_e2(self.is_rounded) - dark_e,
            "dark_current_e_per_s": dark,
            "prnu2": prnu2,
            "dsnu_e2": offset2 / gain**2,
            "saturation_e": (mean[n - 1] - black) / gain,
            "unbent_gain": unbent_gain,
            "unbent_dark": dark_dn / unbent_gain,
            "zero_dn": zero,
            "bend": line.bend,
            "dark_spread2": dark_spread2,
        }
        if self.warm is not None:
            warm = weighted_line(self.warm.seconds(), mean[own.stop :], 1.0 / self.warm.variances())[1] / gain
            step = float(self.warm.levels[0].temperature_c or 0) - float(
                self.dark.levels[0].temperature_c or 0
            )
            ratio = warm / dark if dark > 0 and warm > 0 else np.nan
            found["doubling_k"] = step / np.log2(ratio)
        return {name: float(value) for name, value in found.items()}


def _at_pixels(
    series: FlatSeries, x: np.ndarray, levels: slice | np.ndarray
) -> tuple[tuple[np.ndarray, float], tuple[np.ndarray, float]]:
    """Return start and slope of each looked-at pixel's line of means, each with its error variance."""
    variances = series.variances()[levels]
    means = series.looked_at[levels].mean(axis=1, dtype=np.float64)  # (levels, pixels)
    weights = line_weights(x[levels], 1 / variances)
    found = [(row @ means, float(np.square(row) @ variances) / series.frames) for row in weights]
    return found[0], found[1]


def weighted_line(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Return the start and slope of the weighted least-squares line."""
    total = weights.sum()
    x_mean, y_mean = weights @ x / total, weights @ y / total
    slope = float((weights * (x - x_mean)) @ y / ((weights * (x - x_mean)) @ x))
    return float(y_mean - slope * x_mean), slope


def line_weights(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weights of y in that line's start and slope, both linear in y; shape (2, len(x))."""
    return np.array([weighted_line(x, one, weights) for one in np.eye(len(x))]).T


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The size of a calibration.

    Attributes:
        frames: frames of a level, at least 2.
        light_levels: levels of rising light below saturation, at least 6.
        dark_levels: exposures of the dark series, at least 3.
        groups: groups of pixels of the jackknife, at least 10.
        temperatures_c: none, or two temperatures between which the dark current's doubling is measured; all other
            measurements are taken at the first.
    """

    frames: int = 32
    light_levels: int = 12
    dark_levels: int = 6
    groups: int = 40
    temperatures_c: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        checks.integer(frames=self.frames, minimum=2)
        checks.integer(light_levels=self.light_levels, minimum=6)
        checks.integer(dark_levels=self.dark_levels, minimum=3)
        checks.integer(groups=self.groups, minimum=10)


def take_photon_transfer(
    take: TakeFrames, plan: Plan, *, exposure_us: float, is_rounded: bool = True
) -> PhotonTransfer:
    """Find the saturating light (or ValueError) and an exposure long enough for dark current, then take the series."""
    cold, hot = plan.temperatures_c or (None, None)
    # The saturating light, by doubling it until the rise of the mean no longer doubles.
    blank = take(_PILOT_FRAMES, photons=0.0)
    dark, photons = float(np.mean(blank)), 1.0
    before, error = dark, float(np.mean(np.var(blank, axis=0, ddof=1)) / blank.size) ** 0.5
    for _ in range(_MOST_DOUBLINGS):
        mean = float(np.mean(take(_PILOT_FRAMES, photons=photons)))
        if before - dark > max(4.0, _CLEAR * error) and mean - before < 0.75 * (before - dark):
            break
        photons, before = 2 * photons, mean
    else:
        raise ValueError(f"photons = {photons:g}: do not saturate the sensor; does the device see the light?")
    if mean <= dark:
        raise ValueError(f"photons = {photons:g}: frames are as dark as without light; are frames lost?")
    saturating = 0.5 * photons * (mean - dark) / (before - dark)
    # The least light of the dark series, from none in steps of two, whose noise smooths the converter's steps.
    lit = 0.0
    while is_rounded and lit < saturating / 4:
        dn = take(4 * _PILOT_FRAMES, photons=lit)
        if float(np.mean(np.var(dn, axis=0, ddof=1))) > 1.2 * LEAST_VARIANCE_DN2:
            break
        lit = max(2 * lit, saturating / 4096)
    steps = np.linspace(0, 0.65, plan.light_levels) * saturating
    light = [
        Level(photons=float(p), exposure_us=exposure_us, temperature_c=cold)
        for p in [*steps, 20 * saturating]
    ]
    series = _dark_series(take, plan, lit, cold, exposure_us)
    return PhotonTransfer(
        light=take_series(take, light, frames=plan.frames, groups=plan.groups),
        dark=series,
        exposure_us=exposure_us,
        is_rounded=is_rounded,
        warm=None if hot is None else _dark_series(take, plan, lit, hot, exposure_us),
    )


def _dark_series(
    take: TakeFrames, plan: Plan, photons: float, temperature_c: float | None, exposure_us: float
) -> FlatSeries:
    """Take exposures under constant light, up to a minute or until dark charge moves the mean by 3 pixel deviations."""
    first = take(_PILOT_FRAMES, photons=photons, temperature_c=temperature_c)
    spread, longest = float(np.sqrt(np.mean(np.var(first, axis=0, ddof=1)))), exposure_us
    while longest < _LONGEST_US:
        pilot = take(_PILOT_FRAMES, photons=photons, exposure_us=longest, temperature_c=temperature_c)
        if float(np.mean(pilot)) - float(np.mean(first)) > 3 * max(spread, 0.3):
            break
        longest = min(4 * longest, _LONGEST_US)
    exposures = np.linspace(min(exposure_us, longest / 4), longest, plan.dark_levels)
    levels = [Level(photons=photons, exposure_us=float(t), temperature_c=temperature_c) for t in exposures]
    return take_series(take, levels, frames=plan.frames, groups=plan.groups)
