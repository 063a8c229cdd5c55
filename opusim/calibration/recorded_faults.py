"""Refuse recorded frames that no photon transfer can be read from, and name the cause.

Frames are refused if numbers were changed after the converter: by a curve (the variance leaves its line), by
compression or interpolation (neighbouring pixels share noise), by noise reduction (successive frames share noise), by
scaling (codes that never occur). They are refused, too, if the black level is clipped, flat frames drift, frames are
repeated, or levels are saturated. A light that changed between levels bends the response and not the variance: that
costs the linearity error and the quantum efficiency only, and a remark says so.
"""

from __future__ import annotations

import math

import numpy as np

from opusim.calibration.frames import COUNT
from opusim.calibration.photon_transfer import LEAST_VARIANCE_DN2
from opusim.calibration.recorded_transfer import FULL, HIGHEST, LEAST_LEVELS, MOST_CLIPPED, RecordedTransfer

_MOST_BENT = 0.1  # relative deviation of a variance from the line
_LEAST_RISE = 0.2  # of the variance over the levels, relative to that without light
_MOST_SHARED = 0.05  # correlation of noise
_MOST_DRIFT = 0.01  # relative, over a level
_CLEAR = 6.0  # standard errors by which a fault must show


def require_lawful(transfer: RecordedTransfer) -> tuple[str, ...]:
    """Refuse frames that no photon transfer can be read from, and name the cause.

    Returns:
        Remarks on what frames do not tell, one line each.

    Raises:
        ConfigError: a cause of the module's list, with the level that shows it best.
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
    elif rises and transfer.light is not None and _is_straight(above[flat], transfer.variances[which][flat]):
        cause = (
            "flat frames without the dark ones lie on one, so they were averaged, or dark frames had another gain; "
            "record both raw, with the same settings"
        )
    raise transfer.frames.refused(transfer.levels[which[worst]].level.name, f"{found}: {cause}")


def _is_straight(mean: np.ndarray, variance: np.ndarray) -> bool:
    """Whether variances lie within a tenth of their own line in the mean, of weights that make deviations relative."""
    fitted = np.polyval(np.polyfit(mean, variance, 1, w=1 / variance), mean)
    return bool(np.abs(fitted / variance - 1).max() < _MOST_BENT)


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
