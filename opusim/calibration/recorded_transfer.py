r"""Photon transfer of recorded frames: a camera's constants with limits, whatever light a laboratory has.

The linear camera of EMVA 1288 (release 4, linear), with t the exposure, p the photons on a pixel, F the frames:
    mean      m = b + d t + R p,             d = K dark current,  R = K eta         [DN]
    variance  v = v_0 + K (m - b),           v_0 = K^2 read_noise^2 + 1/12          [DN^2]
    of each pixel's mean, variance over pixels: K^2 dsnu^2 + prnu^2 (R p)^2 + (K dark_spread t)^2 + v / F.
Dark frames at several exposures give b and d; the variances of dark and flat levels on their means give K and v_0
(`photon_transfer.TransferLine`), which needs no knowledge of the light. Light of known photons gives eta. Photons in
proportion to exposure, as under a steady lamp, suffice for the linearity error. What all pixels of a frame share, such
as a lamp's flicker, is taken out before variances are formed; a quadratic surface, as lamps and lenses leave it, is
taken out of each level's mean before its variance over pixels. Offset, dark current and sensitivity are taken to be
independent over pixels.

Rounding moves the mean of pixels that vary by s (over frames and pixels) by up to exp(-2 pi^2 s^2) / pi. If that may
exceed `_COARSE_DN` in the dark, the line of flat levels tells b too, as far as their light is known. Rounding also
leaves exp(-4 pi^2 s^2) / (2 pi^2) in the variance over pixels, s now over frames only, which is taken out. A pattern
that is narrow against a code is not seen in dark frames, and those are left out of the fit: rounding changes its
variance by up to 4 exp(-2 pi^2 s^2), relative, with the first s.

Limits are those of the grouped jackknife over pixels (`frames.jackknife`). The lamp's flicker moves all pixels alike,
so that the jackknife does not see it; the limits of linearity error and quantum efficiency allow for it.

**Faults.** Frames are refused if numbers changed after the converter: by a curve (the variance leaves its line), by
compression or interpolation (neighbouring pixels share noise), by noise reduction (successive frames share noise), by
scaling (codes that never occur). They are refused, too, if the black level is clipped, flat frames drift, frames are
repeated, or levels are saturated. A light that changed between levels bends the response and not the variance: that
costs the linearity error and the quantum efficiency only, and a remark says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.stats import norm

from opusim.calibration.frames import COUNT, GROUPS, MEAN, MEAN_SQUARE, VARIANCE, Estimate, jackknife, sums_of
from opusim.calibration.photon_transfer import (
    LEAST_VARIANCE_DN2,
    LightNoise,
    TransferLine,
    line_weights,
    weighted_line,
)
from opusim.calibration.recorded import RecordedFrames, RecordedLevel
from opusim.progress import Progress, Show

_BLOCK = 2**22  # numbers of a block
_SURFACE = 6  # coefficients of a quadratic surface
_COARSE_DN = 0.005  # shift of a mean by rounding that is too much for the black level
_COARSE_SPREAD_DN = 0.0016  # the same at which rounding may change the variance over pixels by 2 %
FULL = 0.97  # share of the range from which a level may be saturated
_LINEAR = (0.05, 0.95)  # shares of the saturation between which linearity is evaluated, as in the standard
HIGHEST = 0.7  # share of the saturation up to which photon transfer is evaluated, as in the standard
LEAST_LEVELS = 4
MOST_CLIPPED = 0.005  # share of numbers at an end of the converter, as in the standard
_MOST_CURVED = (
    0.03  # rms deviation of the response from a line, beyond which the light or its photons are doubted
)
_MOST_BENT = 0.1  # relative deviation of a variance from the line
_LEAST_RISE = 0.2  # of the variance over the levels, relative to that without light
_MOST_SHARED = 0.05  # correlation of noise
_MOST_DRIFT = 0.01  # relative, over a level
_CLEAR = 6.0  # standard errors by which a fault must show
_ROOTS = {
    "read_noise_e": "read_noise_e2",
    "prnu": "prnu2",
    "dsnu_e": "dsnu_e2",
    "dark_spread_e_per_s": "dark_spread2",
    "linearity_error": "linearity2",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class ReducedLevel:
    """One level's sums, and signs that its numbers are not the sensor's own.

    Attributes:
        level: its setting.
        frames: F.
        sums: see `frames.FlatSeries.sums`, of frames without the quadratic surface, shape (groups, 4).
        frame_means: of each frame, DN.
        at_top: share of the numbers that are the recording's largest.
        at_zero: share of the numbers that are 0.
        neighbours: correlation of the temporal noise of pixels side by side, in a row and in a column.
        over_edges: the same at the edges of blocks of 8 columns.
        successive: correlation of the noise of successive frames, or None if there are fewer than four.
        missing: share of the codes between the quartiles that never occur; 0 if too few numbers tell.
        repeated: the first frame that equals the one before, or None.
    """

    level: RecordedLevel
    frames: int
    sums: np.ndarray
    frame_means: np.ndarray
    at_top: float
    at_zero: float
    neighbours: float
    over_edges: float
    successive: float | None
    missing: float
    repeated: int | None


def reduced(frames: RecordedFrames, *, progress: Show = True) -> RecordedTransfer:
    """Reduce every level to sums; ConfigError if there are too few pixels, or no dark or no flat frames."""
    found = []
    with Progress("calibrate", "levels", show=progress) as bar:
        bar.start(len(frames.levels))
        for level in frames.levels:
            dn = frames.frames_of(level)
            if dn[0].size < 10 * GROUPS:
                reason = f"have {dn[0].size} pixels; record a region of {10 * GROUPS} or more"
                raise frames.refused("images", reason)
            found.append(_reduced(level, dn, frames.largest))
            bar.advance()
    for kind, is_dark in (("dark", True), ("flat", False)):
        if not any(each.level.is_dark == is_dark for each in found):
            raise frames.refused(kind, f"has no frames; record {kind} frames at the exposures of the others")
    return RecordedTransfer(frames=frames, levels=tuple(found))


def _reduced(level: RecordedLevel, dn: np.ndarray, largest: int) -> ReducedLevel:
    """Reduce a level's frames, shape (frames, rows, columns), in blocks of rows that fit the memory."""
    count, rows, columns = dn.shape
    mean = dn.mean(axis=0)
    y, x = (axis.ravel() for axis in np.mgrid[-1 : 1 : rows * 1j, -1 : 1 : columns * 1j])
    terms = np.stack([np.ones_like(x), x, y, x * x, x * y, y * y])
    surface = np.linalg.solve(terms @ terms.T + 1e-9 * np.eye(_SURFACE), terms @ mean.ravel()) @ terms
    uneven = (surface - surface.mean()).reshape(rows, columns)
    sums, power = np.zeros((GROUPS, 4)), 0.0
    shared = {"across": 0.0, "down": 0.0, "edges": 0.0, "frames": 0.0}
    numbers = dict.fromkeys(shared, 0)
    height = max(2, -(-10 * GROUPS // columns), _BLOCK // (count * columns))
    starts = range(0, max(rows - height, 0) + 1, height)
    for start in starts:
        # the last block takes the rows that are left
        end = rows if start == starts[-1] else start + height
        flat = (dn[:, start:end] - uneven[start:end]).reshape(count, -1)
        sums += sums_of(flat, np.arange(flat.shape[1]), GROUPS)
        # temporal noise: frames without what they share and without the pixels' means
        noise = flat - flat.mean(axis=1, keepdims=True) - flat.mean(axis=0) + flat.mean()
        noise = noise.reshape(count, end - start, columns)
        power += float(np.sum(np.square(noise)))
        across = noise[:, :, 1:] * noise[:, :, :-1]
        products = {
            "across": across,
            "down": noise[:, 1:] * noise[:, :-1],
            "edges": across[:, :, 7::8],
            "frames": noise[1:] * noise[:-1],
        }
        for key, each in products.items():
            shared[key] += float(each.sum())
            numbers[key] += each.size
    own = max(power / dn.size, 1e-300)
    correlation = {key: shared[key] / numbers[key] / own if numbers[key] else 0.0 for key in shared}
    # codes between the quartiles, of which some may never occur
    some = dn.ravel()[:: max(1, dn.size // _BLOCK)]
    low, high = (int(each) for each in np.percentile(some, (25, 75)))
    inside, codes = some[(some >= low) & (some <= high)], high - low + 1
    same = np.flatnonzero([np.array_equal(dn[i], dn[i + 1]) for i in range(count - 1)])
    return ReducedLevel(
        level=level,
        frames=count,
        sums=sums,
        frame_means=dn.mean(axis=(1, 2)),
        at_top=float(np.mean(dn == largest)),
        at_zero=float(np.mean(dn == 0)),
        neighbours=max(correlation["across"], correlation["down"], key=abs),
        over_edges=correlation["edges"],
        # deviations from a mean of F frames correlate by -1 / (F - 1) if the frames do not
        successive=correlation["frames"] + 1 / (count - 1) if count >= 4 else None,
        missing=1 - np.unique(inside).size / codes if codes >= 4 and inside.size >= 30 * codes else 0.0,
        repeated=int(same[0]) + 1 if same.size else None,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedTransfer:
    """Sums of recorded levels, and what they say of the camera.

    Attributes:
        frames: the recording.
        levels: one entry for each of its levels, dark ones first.
    """

    frames: RecordedFrames
    levels: tuple[ReducedLevel, ...]

    @cached_property
    def dark(self) -> np.ndarray:
        """Which levels are dark, shape (levels,)."""
        return np.array([each.level.is_dark for each in self.levels])

    @cached_property
    def seconds(self) -> np.ndarray:
        """Exposures, seconds, shape (levels,)."""
        return np.array([each.level.exposure_us * 1e-6 for each in self.levels])

    @cached_property
    def counts(self) -> np.ndarray:
        """Frames of each level, shape (levels,)."""
        return np.array([float(each.frames) for each in self.levels])

    @cached_property
    def total(self) -> np.ndarray:
        """Sums over all pixels, shape (levels, 4)."""
        return np.stack([each.sums.sum(axis=0) for each in self.levels])

    @cached_property
    def means(self) -> np.ndarray:
        """Mean of each level, DN, shape (levels,)."""
        return np.asarray(self.total[:, MEAN] / self.total[:, COUNT])

    @cached_property
    def variances(self) -> np.ndarray:
        """Temporal variance of each level, DN^2, shape (levels,)."""
        return np.asarray(self.total[:, VARIANCE] / self.total[:, COUNT])

    @cached_property
    def variance_errors(self) -> np.ndarray:
        """Standard errors of the variances, DN^2, from the jackknife over pixels, shape (levels,)."""
        parts = np.stack([each.sums for each in self.levels], axis=1)
        without = self.total - parts
        each = without[..., VARIANCE] / without[..., COUNT]
        spread = np.sqrt((len(each) - 1) / len(each) * np.sum(np.square(each - each.mean(axis=0)), axis=0))
        return np.asarray(spread)

    @cached_property
    def light(self) -> np.ndarray | None:
        """Photons of each level, or exposures of lit levels in their place; None if the light is not known."""
        photons = [each.level.photons for each in self.levels]
        if all(each is not None for each in photons):
            return np.array(photons, dtype=np.float64)
        lit = np.unique(self.seconds[~self.dark])
        one_each = lit.size == np.count_nonzero(~self.dark)
        return np.where(self.dark, 0.0, self.seconds) if one_each and lit.size >= LEAST_LEVELS else None

    @cached_property
    def has_photons(self) -> bool:
        """Whether the photons of every level are known."""
        return all(each.level.photons is not None for each in self.levels)

    @cached_property
    def saturated(self) -> np.ndarray:
        """Which levels lie at the end of the range and vary less than light does, or at the largest number."""
        lowest = self.means[self.dark].min()
        top = self.means >= lowest + FULL * (self.means.max() - lowest)
        clipped = np.array([each.at_top for each in self.levels]) > MOST_CLIPPED
        quiet = self.variances < 0.5 * self.variances[~self.dark].max()
        return np.asarray(~self.dark & top & (clipped | quiet))

    @property
    def ends_at_converter(self) -> bool:
        """Whether light reaches the converter's end before the full well."""
        top = self.levels[int(np.argmax(np.where(self.saturated, self.means, -np.inf)))]
        return (
            bool(self.saturated.any()) and top.at_top > 0.5 and self.frames.largest == 2**self.frames.bits - 1
        )

    @cached_property
    def used(self) -> np.ndarray:
        """Flat levels for photon transfer: above rounding, and below 0.7 of the saturation; indices."""
        lowest = self.means[self.dark].min()
        share = HIGHEST if self.saturated.any() else 1.0
        below = self.means <= lowest + share * (self.means.max() - lowest)
        free = np.array([each.at_top for each in self.levels]) < MOST_CLIPPED / 5
        return np.flatnonzero(
            ~self.dark & ~self.saturated & below & free & (self.variances > LEAST_VARIANCE_DN2)
        )

    @cached_property
    def on_line(self) -> np.ndarray:
        """Levels whose variances lie on the photon-transfer line: used ones, and dark ones above rounding; indices."""
        return np.union1d(np.flatnonzero(self.dark & (self.variances > LEAST_VARIANCE_DN2)), self.used)

    @cached_property
    def has_dark_slope(self) -> bool:
        """Whether dark frames have two or more exposures."""
        return np.unique(self.seconds[self.dark]).size > 1

    @cached_property
    def rounding_dn(self) -> np.ndarray:
        """Largest shift of each level's mean by rounding, DN, shape (levels,)."""
        square = self.total[:, MEAN_SQUARE] / self.total[:, COUNT] - np.square(self.means)
        spread = np.maximum(self.variances - 1 / 12, 0) + np.maximum(square - self.variances / self.counts, 0)
        return np.asarray(np.exp(-2 * math.pi**2 * spread) / math.pi)

    @cached_property
    def is_coarse(self) -> bool:
        """Whether rounding may move the dark means."""
        return bool(self.rounding_dn[self.dark].max() > _COARSE_DN)

    @cached_property
    def tells_dark_current(self) -> bool:
        """Whether dark means rise with the exposure, by much more than rounding may hide."""
        rise = float(np.ptp(self.means[self.dark]))
        return self.has_dark_slope and (not self.is_coarse or rise > 200 * self.rounding_dn[self.dark].max())

    @cached_property
    def patterned(self) -> np.ndarray:
        """Dark levels whose variance over pixels rounding does not change; indices."""
        return np.flatnonzero(self.dark & (self.rounding_dn < _COARSE_SPREAD_DN))

    @cached_property
    def tells_dark_spread(self) -> bool:
        """Whether the spread of dark currents shows apart from that of offsets."""
        return self.tells_dark_current and np.unique(self.seconds[self.patterned]).size > 1

    def estimates(self, confidence: float) -> dict[str, Estimate]:
        """Return the constants that the frames tell, each with limits that hold separately with the given confidence.

        Keys: gain_dn_per_e, black_level_dn, read_noise_e, dark_current_e_per_s, dark_spread_e_per_s, prnu, dsnu_e,
        saturation_e, quantum_efficiency [e-/photon], linearity_error (rms deviation of the response from a line,
        relative) and light_noise (relative standard deviation of the light from frame to frame).
        """
        sums = np.stack([each.sums for each in self.levels], axis=1)
        found = jackknife(sums, self._statistic, confidence=confidence)
        tail = (1 - confidence) / 2
        lamp = self.light_noise()
        if lamp is not None:
            low, high = lamp.lower(tail), lamp.upper(tail)
            found["light_noise"] = Estimate(value=lamp.estimate, low=low, high=high)
            if "linearity2" in found:
                # a lamp's flicker r leaves r^2 / F in the squared deviation of a level's mean
                part = float(np.mean(1 / self.counts[self.linear]))
                each = found["linearity2"]
                found["linearity2"] = replace(
                    each, value=each.value - part * lamp.estimate**2, low=each.low - part * high**2
                )
            if "quantum_efficiency" in found:
                each = found["quantum_efficiency"]
                # the relative error of the response's slope under a lamp of that flicker
                which, light = self.linear, np.asarray(self.light)[self.linear]
                weights = 1 / np.square(self.lit[which])
                scatter = self.lit[which] / np.sqrt(self.counts[which])
                slope = weighted_line(light, self.lit[which], weights)[1]
                spread = float(high * np.linalg.norm(line_weights(light, weights)[1] * scatter))
                deviate = float(norm.isf(tail)) * spread / slope
                margin = math.hypot((each.high - each.low) / 2, deviate * each.value)
                found["quantum_efficiency"] = Estimate(
                    value=each.value, low=each.value - margin, high=each.value + margin
                )
        roots = {name: found[square].root() for name, square in _ROOTS.items() if square in found}
        return {name: value for name, value in found.items() if name not in _ROOTS.values()} | roots

    def light_noise(self) -> LightNoise | None:
        """Return what the means of frames say of light that varies from frame to frame; None if no level tells."""
        levels = [self.levels[i] for i in self.used]
        if not levels:
            return None
        return LightNoise(
            frame_variances=np.array([each.frame_means.var(ddof=1) for each in levels]),
            freedom=self.counts[self.used] - 1,
            own=self.variances[self.used] / self.total[self.used, COUNT],
            light=self.lit[self.used],
        )

    @cached_property
    def lit(self) -> np.ndarray:
        """Each level's mean above the dark mean of its exposure, DN, over all pixels; shape (levels,)."""
        return self.lit_dn(self.total)

    def lit_dn(self, total: np.ndarray) -> np.ndarray:
        """Return each level's mean above the dark mean of its exposure, DN, shape (levels,)."""
        black, dark = self.dark_line(total)
        return np.asarray(total[:, MEAN] / total[:, COUNT] - black - dark * self.seconds)

    def dark_line(self, total: np.ndarray) -> tuple[float, float]:
        """Return the black level, DN, and the rise of the dark mean, DN/s; 0 if frames do not tell it."""
        black, rise = self._dark_weights @ (total[:, MEAN] / total[:, COUNT])
        return float(black), float(rise)

    @cached_property
    def _dark_weights(self) -> np.ndarray:
        """Weights of the levels' means in black level and rise, by weighted least squares; shape (2, levels)."""
        which, columns = np.flatnonzero(self.dark), [np.ones_like(self.seconds)]
        errors2 = self.variances / self.counts / self.total[:, COUNT]
        if self.is_coarse and self.light is not None:
            # black, rise and response from dark and flat levels; each dark mean may be off by its rounding
            which = np.union1d(which, self.used)
            errors2 = errors2 + np.square(self.rounding_dn)
            columns.append(self.light)
        columns += [self.seconds] if self.tells_dark_current else []
        design = np.stack(columns, axis=1)[which]
        scales, roots = np.abs(design).max(axis=0), 1 / np.sqrt(errors2[which])
        inverse = np.linalg.pinv(design / scales * roots[:, None]) * roots / scales[:, None]
        found = np.zeros((2, self.dark.size))
        found[0, which] = inverse[0]
        found[1, which] = inverse[-1] if self.tells_dark_current else 0.0
        return found

    @cached_property
    def linear(self) -> np.ndarray:
        """Flat levels between 5 and 95 % of the saturation, or of the brightest level; indices."""
        share = self.lit / self.lit[~self.dark].max()
        low, high = _LINEAR
        inside = (share >= low) & ((share <= high) | (not self.saturated.any()))
        return np.flatnonzero(~self.dark & ~self.saturated & inside)

    def response(self, total: np.ndarray) -> tuple[float, float, np.ndarray]:
        """Return start and slope of the response, DN and DN per unit of light, and relative deviations from it.

        The line has the standard's weights, which make deviations relative.
        """
        if self.light is None:
            return math.nan, math.nan, np.zeros(0)
        lit, light = self.lit_dn(total)[self.linear], self.light[self.linear]
        start, slope = weighted_line(light, lit, 1 / np.square(self.lit[self.linear]))
        return start, slope, lit / (start + slope * light) - 1

    def line(self, total: np.ndarray) -> TransferLine:
        """Return photon transfer from summed pixels, shape (levels, 4); its zero is the black level."""
        which, black = self.on_line, self.dark_line(total)[0]
        return TransferLine.of(
            total[which, MEAN] / total[which, COUNT] - black,
            total[which, VARIANCE] / total[which, COUNT],
            (self.counts[which] - 1) / np.square(self.variances[which]),
        )

    def spatial_dn2(self, total: np.ndarray) -> np.ndarray:
        """Return the variance over pixels of each level's mean, DN^2, without frames' noise and rounding's share."""
        count, mean = total[:, COUNT], total[:, MEAN] / total[:, COUNT]
        variance = total[:, VARIANCE] / count
        raw = (total[:, MEAN_SQUARE] / count - np.square(mean)) * count / (count - _SURFACE)
        rounding = np.exp(-4 * math.pi**2 * np.maximum(variance - 1 / 12, 0)) / (2 * math.pi**2)
        return np.asarray(raw - variance / self.counts - rounding)

    @cached_property
    def _spread(self) -> tuple[np.ndarray, np.ndarray]:
        """Levels whose variance over pixels is evaluated, indices, and one over it with frames' noise, DN^-2."""
        which = np.union1d(self.patterned, self.used)
        spread2 = self.spatial_dn2(self.total) + self.variances / self.counts
        return which, 1 / np.maximum(spread2, 1e-12)[which]

    def _statistic(self, total: np.ndarray) -> dict[str, float]:
        """Return all constants from summed pixels, shape (levels, 4)."""
        (black, dark), line = self.dark_line(total), self.line(total)
        lit, gain = self.lit_dn(total), line.gain
        # variance over pixels on 1, the light's square and the exposure's square
        which, roots = self._spread
        columns = [np.ones(which.size), np.square(lit[which])]
        columns += [np.square(self.seconds[which])] if self.tells_dark_spread else []
        scales = np.array([column.max() for column in columns])
        design, spread2 = np.stack(columns, axis=1) / scales, self.spatial_dn2(total)[which]
        fitted = np.linalg.lstsq(design * roots[:, None], spread2 * roots, rcond=None)[0] / scales
        found = {"gain_dn_per_e": gain, "prnu2": fitted[1], "dsnu_e2": fitted[0] / gain**2}
        if not self.is_coarse or self.light is not None:
            found |= {"black_level_dn": black, "read_noise_e2": line.noise_e2(is_rounded=True)}
        if self.tells_dark_current:
            found["dark_current_e_per_s"] = dark / gain
        if self.tells_dark_spread:
            found["dark_spread2"] = fitted[2] / gain**2
        if self.saturated.any():
            top = int(np.argmax(np.where(self.saturated, self.means, -np.inf)))
            found["saturation_e"] = (total[top, MEAN] / total[top, COUNT] - black) / gain
        if self.light is not None and self.linear.size >= 3:
            _, slope, deviations = self.response(total)
            if self.is_light_steady:
                found["linearity2"] = float(np.mean(np.square(deviations)))
                found |= {"quantum_efficiency": slope / gain} if self.has_photons else {}
        return {name: float(value) for name, value in found.items()}

    @cached_property
    def is_light_steady(self) -> bool:
        """Whether means rise with the light in a straight line."""
        deviations = self.response(self.total)[2]
        return bool(deviations.size < 3 or np.sqrt(np.mean(np.square(deviations))) < _MOST_CURVED)


# Faults of recorded frames


def require_lawful(transfer: RecordedTransfer) -> tuple[str, ...]:
    """Refuse frames that no photon transfer can be read from, for a cause of the module's list.

    Returns remarks on what frames do not tell, one line each.
    """
    refused = transfer.frames.refused
    for each, saturated, variance in zip(
        transfer.levels, transfer.saturated, transfer.variances, strict=True
    ):
        if each.repeated is not None and not saturated and variance > LEAST_VARIANCE_DN2:
            reason = f"frame {each.repeated + 1} repeats the one before; the driver delivered it twice, record again"
            raise refused(each.level.name, reason)
        if each.level.is_dark and each.at_zero > MOST_CLIPPED:
            reason = f"{each.at_zero:.1%} of the numbers are 0: the black level is cut off; raise the camera's offset"
            raise refused(each.level.name, reason)
    lit = np.unique(transfer.seconds[~transfer.dark])
    if not transfer.has_dark_slope and not np.array_equal(lit, np.unique(transfer.seconds[transfer.dark])):
        raise refused(
            "dark", "has one exposure, and flat frames others; record dark frames at two or more of theirs"
        )
    _require_levels(transfer)
    _require_raw(transfer)
    _require_steady(transfer)
    _require_line(transfer)
    missing = max((transfer.levels[i] for i in transfer.used), key=lambda each: each.missing)
    if missing.missing > 0.05:
        raise refused(
            missing.level.name,
            f"{missing.missing:.0%} of the codes never occur: numbers were scaled after the converter; switch off "
            "digital gain and corrections, or name the packing",
        )
    return _remarks(transfer)


def _require_levels(transfer: RecordedTransfer) -> None:
    """Refuse fewer than four levels of light between rounding and saturation."""
    means, flat = transfer.means[transfer.used], int(np.count_nonzero(~transfer.dark))
    span = transfer.means.max() - transfer.means[transfer.dark].min()
    apart = 1 + int(np.count_nonzero(np.diff(np.sort(means)) > 0.01 * span)) if means.size else 0
    if apart >= LEAST_LEVELS:
        return
    at_top = transfer.means > transfer.means.max() - (1 - FULL) * span
    full = int(np.count_nonzero((transfer.saturated | at_top) & ~transfer.dark))
    quiet = int(np.count_nonzero(~transfer.dark & (transfer.variances <= LEAST_VARIANCE_DN2) & ~at_top))
    if quiet > full:
        cause = f"{quiet} have less noise than the converter's steps show; raise the camera's analog gain"
    elif full > 1:
        cause = (
            f"{full} lie at the end of the range: they are saturated; record less light or shorter exposures"
        )
    else:
        cause = "record more levels between dark and two thirds of the saturation"
    raise transfer.frames.refused(
        "flat",
        f"{apart} of {flat} levels of light differ and lie below {HIGHEST:g} of the saturation, "
        f"{LEAST_LEVELS} are needed; {cause}",
    )


def _require_raw(transfer: RecordedTransfer) -> None:
    """Refuse numbers that were compressed, interpolated or averaged."""
    levels = [transfer.levels[i] for i in transfer.used]
    numbers = sum(each.sums[:, COUNT].sum() * each.frames for each in levels)
    least = max(_MOST_SHARED, _CLEAR / math.sqrt(numbers))
    weights = np.array([each.frames for each in levels], dtype=np.float64)
    shared, edges = (
        float(weights @ np.array([getattr(each, key) for each in levels]) / weights.sum())
        for key in ("neighbours", "over_edges")
    )
    if abs(shared) > least:
        cause = "were interpolated, smoothed or compressed"
        if abs(edges) < 0.5 * abs(shared):
            cause = "were compressed in blocks of 8 x 8, as JPEG does"
        raise transfer.frames.refused(
            "flat",
            f"noise of neighbouring pixels correlates by {shared:.2f}: frames {cause}; record raw frames",
        )
    successive = [each.successive for each in levels if each.successive is not None]
    if successive and abs(np.mean(successive)) > least:
        raise transfer.frames.refused(
            "flat",
            f"noise of successive frames correlates by {np.mean(successive):.2f}: the camera averages over frames; "
            "switch off its temporal noise reduction",
        )


def _require_steady(transfer: RecordedTransfer) -> None:
    """Refuse flat frames whose mean drifts from the first frame of a level to the last."""
    changes = []
    for i in transfer.used:
        each, lit = transfer.levels[i], transfer.lit[i]
        frame = np.arange(each.frames) - (each.frames - 1) / 2
        slope = float(frame @ each.frame_means / (frame @ frame))
        changes.append(slope * (each.frames - 1) / lit)
    largest = int(np.argmax(np.abs(changes)))
    mean, spread = float(np.mean(changes)), float(np.std(changes, ddof=1)) / math.sqrt(len(changes))
    # a lamp that flickers changes levels by both signs, a drift by one
    if abs(mean) > _MOST_DRIFT and abs(mean) > _CLEAR * spread:
        each = transfer.levels[transfer.used[largest]]
        raise transfer.frames.refused(
            each.level.name,
            f"flat frames {'rise' if changes[largest] > 0 else 'fall'} by {abs(changes[largest]):.1%} over its "
            f"{each.frames} frames, by {abs(mean):.1%} over those of all levels: they drift; let lamp and camera "
            "warm up",
        )


def _require_line(transfer: RecordedTransfer) -> None:
    """Refuse variances that do not rise in a straight line with the mean."""
    which, line = transfer.on_line, transfer.line(transfer.total)
    above = transfer.means[which] - transfer.dark_line(transfer.total)[0]
    expected = np.maximum(line.floor + line.gain * above, 1e-12)
    ratio = transfer.variances[which] / expected
    clear = np.abs(ratio - 1) > np.maximum(_MOST_BENT, _CLEAR * transfer.variance_errors[which] / expected)
    rises = line.gain * above.max() > _LEAST_RISE * abs(line.floor)
    if rises and not clear.any():
        return
    worst = int(np.argmax(np.abs(ratio - 1)))
    found = f"the variance is {ratio[worst]:.2f} of what a straight line in the mean gives"
    cause = (
        "the camera changes numbers after the converter; switch off gamma, tone curve, noise reduction and "
        "compression"
    )
    flat = ~transfer.dark[which]
    if not rises:
        found = "the variance does not rise with the light"
    if transfer.light is not None and not transfer.is_light_steady:
        light, lit = transfer.light[transfer.used], transfer.lit[transfer.used]
        exponent = np.polyfit(np.log(light), np.log(lit), 1)[0]
        found += f" and means rise as the {exponent:.2f}th power of the light"
    elif rises and transfer.light is not None:
        # do the flat ones lie within a tenth of their own line, of weights that make deviations relative?
        mean, variance = above[flat], transfer.variances[which][flat]
        fitted = np.polyval(np.polyfit(mean, variance, 1, w=1 / variance), mean)
        if np.abs(fitted / variance - 1).max() < _MOST_BENT:
            cause = (
                "flat frames without the dark ones lie on one, so they were averaged, or dark frames had another gain; "
                "record both raw, with the same settings"
            )
    raise transfer.frames.refused(transfer.levels[which[worst]].level.name, f"{found}: {cause}")


def _remarks(transfer: RecordedTransfer) -> tuple[str, ...]:
    """Return what the frames do not tell, and why."""
    found = []
    if not transfer.has_dark_slope:
        found.append(
            "no dark_current_e_per_s: dark frames have one exposure, whose dark charge is that of the description; "
            "record dark frames at several exposures"
        )
    elif not transfer.tells_dark_current:
        found.append(
            "no dark_current_e_per_s: dark frames rise by less than rounding may hide; record longer dark exposures"
        )
    if transfer.is_coarse and transfer.light is None:
        found.append(
            "no read_noise_e and black_level_dn: dark frames vary by less than a code, and the light is not known; "
            "name the photons, or raise the camera's analog gain"
        )
    if transfer.patterned.size == 0:
        found.append(
            "dsnu_e comes from flat frames: in the dark, pixels differ by less than rounding may hide"
        )
    if not transfer.saturated.any():
        found.append("no saturation_e: no level is saturated; record one beyond the full well")
    if transfer.light is None:
        found.append(
            "no linearity_error: the light is not known; name photons, or vary the exposure under one lamp"
        )
    elif not transfer.is_light_steady:
        deviation = float(np.sqrt(np.mean(np.square(transfer.response(transfer.total)[2]))))
        found.append(
            f"no linearity_error and quantum_efficiency: means leave the line in the light by {deviation:.1%} rms, and "
            "variances lie on their line, so it is the light that changed between levels, not the camera"
        )
    if transfer.light is not None and not transfer.has_photons:
        found.append(
            "no quantum_efficiency: photons are not known; the lamp is taken to be steady over all exposures"
        )
    times = [each.level.times_s for each in transfer.levels if each.level.times_s is not None]
    steps = np.concatenate([np.diff(each) for each in times]) if times else np.zeros(0)
    if steps.size and (lost := int(np.count_nonzero(steps > 1.5 * np.median(steps)))):
        found.append(
            f"{lost} of {steps.size} steps of time are longer than 1.5 times the usual one: frames were lost"
        )
    return tuple(found)
