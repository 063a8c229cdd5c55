"""Numba kernels of the camera: from complex fields to digital numbers, or to recovered projections.

Fields are in mirror units (|u|^2 of one mirror has mean 2); `gain_e` takes |u|^2 to expected photo-electrons. Every
pixel is computed separately, so results depend neither on how rows are split over threads nor on the processor's order.

**Counts.** A Poisson count is the quantile F^-1(Phi(w)) of its law at a standard normal w, so each count takes one
number at every rate: the same w and a slightly different rate give nearly always the same count, so noise stays
comparable between runs whose light differs a little.

The quantile is floor(x) of the expansion of the continuous quantile (Cornish and Fisher; Temme 1979; Giles 2016, ACM
TOMS 42(1) 6, eq. 16) to order 1/rate,
    x = r + sqrt(r) w + (2 + w^2)/6 - (2 w + w^3)/(72 sqrt r) + (3 w^4 + 7 w^2 - 16)/(810 r).
If x lies so near a whole number that its error could matter, within (0.03 + 0.0035 |w|^5) / r^1.5, or if the
expansion is poor (r below 12, or |w| above sqrt(r)/2), the law's masses are added up instead. So counts are exact up to
the rounding of w to float32 (total variation below 1e-6; tests compute it); above 700 electrons, where the
error of the expansion is below 1e-7, nothing is added up.

tests/oracles/naive_camera.py has a slow plain twin.
"""

from __future__ import annotations

import math

import numba
import numpy as np

SUM_BELOW = 700.0
"""Rates up to which masses may be added up: exp(-rate) is still a normal number."""
_EXPAND_FROM = 12.0
_MOST_STEPS = 1100  # 15 standard deviations above 700, 300 above 12
_ROOT_HALF = math.sqrt(0.5)


@numba.njit(nogil=True, error_model="numpy")
def _small_count(rate: float, w: float) -> float:
    """Return the smallest n with P(N <= n) >= Phi(w), by adding up masses; rate below `SUM_BELOW`."""
    target = 0.5 * math.erfc(-w * _ROOT_HALF)
    mass = math.exp(-rate)
    below = mass
    n = 0
    while below < target and n < _MOST_STEPS:
        n += 1
        mass *= rate / n
        below += mass
    return float(n)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def fill_counts(counts: np.ndarray, rates: np.ndarray, w: np.ndarray) -> None:
    """Poisson counts from rates and standard normal numbers.

    Args:
        counts: float64, one axis, is overwritten by whole numbers.
        rates: float64, same length, electrons, at least 0.
        w: float32, same length.
    """
    some = False
    for i in range(counts.size):
        r, v = max(rates[i], 1.0), np.float64(w[i])
        root, square, size = math.sqrt(r), v * v, abs(v)
        x = r + root * v + (2.0 + square) * (1.0 / 6.0) - v * (2.0 + square) / (72.0 * root)
        x += (square * (3.0 * square + 7.0) - 16.0) / (810.0 * r)
        off = abs(x - np.rint(x)) * (r * root)
        near = (
            (off < 0.03 + 0.0035 * size * square * square) | (square > 0.25 * r) | (rates[i] < _EXPAND_FROM)
        )
        sum_up = near & (rates[i] < SUM_BELOW)
        counts[i] = -1.0 if sum_up else math.floor(x)
        some |= sum_up
    if some:
        for i in range(counts.size):
            if counts[i] < 0.0:
                counts[i] = _small_count(rates[i], np.float64(w[i]))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def fill_numbers(
    numbers: np.ndarray,
    rates: np.ndarray,
    offset_e: np.ndarray,
    shot: np.ndarray,
    read: np.ndarray,
    sensor: tuple[float, float, float, float, float, float],
) -> None:
    """Digital numbers of one exposure of some pixels: counts, full well, read noise, gain, black level, converter.

    Args:
        numbers: float64, one axis, is overwritten, DN.
        rates: float64, same length: expected electrons of light, bias and dark current.
        offset_e: float64, same length: fixed offset of each pixel, electrons.
        shot: float32, N(0, 1) that decide the counts; may have length 0 where shot noise is off.
        read: float32, N(0, 1) of the read noise; may have length 0 if it is off.
        sensor: shot noise (1: on, 0: off), full well [e-] (inf: off), read noise [e-] (0: off), gain [DN/e-], black
            level [DN] and highest number of the converter [DN] (below 0: no converter, numbers are neither rounded
            nor clipped).
    """
    shot_noise, full_well, read_e, gain, black, top = sensor
    if shot_noise > 0:
        fill_counts(numbers, rates, shot)
    else:
        numbers[:] = rates
    for i in range(numbers.size):
        numbers[i] = min(numbers[i], full_well) + offset_e[i]
    if read_e > 0:
        for i in range(numbers.size):
            numbers[i] += read_e * read[i]
    for i in range(numbers.size):
        numbers[i] = black + gain * numbers[i]
    if top >= 0:
        for i in range(numbers.size):
            numbers[i] = min(max(np.rint(numbers[i]), 0.0), top)


_PIXELS_AT_ONCE = 1024  # scratch rows of 8 kB stay in the first-level cache
_Sensor = tuple[float, float, float, float, float, float]


@numba.njit(nogil=True, error_model="numpy")
def _fill_rates(
    rates: np.ndarray, re: np.ndarray, im: np.ndarray, gain_e: np.ndarray, dark_e: np.ndarray
) -> None:
    """Expected electrons of fields: gain_e |u|^2 + dark_e."""
    for i in range(rates.size):
        a, b = np.float64(re[i]), np.float64(im[i])
        rates[i] = gain_e[i] * (a * a + b * b) + dark_e[i]


@numba.njit(nogil=True, error_model="numpy")
def _fill_complement_rates(
    rates: np.ndarray,
    re: np.ndarray,
    im: np.ndarray,
    anchor: np.ndarray,
    gain_e: np.ndarray,
    dark_e: np.ndarray,
) -> None:
    """Expected electrons of the complements' fields: gain_e |u_a - u|^2 + dark_e."""
    for i in range(rates.size):
        a, b = np.float64(anchor[0, i] - re[i]), np.float64(anchor[1, i] - im[i])
        rates[i] = gain_e[i] * (a * a + b * b) + dark_e[i]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def expose_fields(
    numbers: np.ndarray, field: np.ndarray, pixel: np.ndarray, noise: np.ndarray, sensor: _Sensor
) -> None:
    """Frames of given fields.

    Args:
        numbers: float32, shape (rows, pixels), is overwritten, DN.
        field: float32, shape (2, rows, pixels): real and imaginary part.
        pixel: float64, shape (3, pixels): gain_e, dark_e and offset_e of each pixel.
        noise: float32, shape (2, rows, pixels): N(0, 1) for counts and for read noise; length 0 on the last axis
            where both are off.
        sensor: as for `opusim.camera.kernels.fill_numbers`.
    """
    scratch, rates = np.empty(_PIXELS_AT_ONCE), np.empty(_PIXELS_AT_ONCE)
    for row in range(numbers.shape[0]):
        for start in range(0, numbers.shape[1], _PIXELS_AT_ONCE):
            stop = min(start + _PIXELS_AT_ONCE, numbers.shape[1])
            got, rate = scratch[: stop - start], rates[: stop - start]
            _fill_rates(
                rate,
                field[0, row, start:stop],
                field[1, row, start:stop],
                pixel[0, start:stop],
                pixel[1, start:stop],
            )
            fill_numbers(
                got, rate, pixel[2, start:stop], noise[0, row, start:stop], noise[1, row, start:stop], sensor
            )
            numbers[row, start:stop] = got


@numba.njit(cache=True, nogil=True, error_model="numpy")
def recover_rows(
    y: np.ndarray,
    field: np.ndarray,
    anchor: np.ndarray,
    pixel: np.ndarray,
    decode: np.ndarray,
    shift: np.ndarray,
    noise: np.ndarray,
    sensor: _Sensor,
) -> None:
    """Projections of ternary vectors from four frames each: y = scale (I_p - I_{a-p} - I_n + I_{a-n}) - shift offset.

    Args:
        y: float32, shape (rows, pixels), is overwritten, projection units.
        field: float32, shape (4, rows, pixels): real and imaginary part of the positive frames' fields, then of the
            negative frames'.
        anchor: float32, shape (2, pixels): the anchor's field.
        pixel: float64, shape (3, pixels), as for `expose_fields`.
        decode: float64, shape (2, pixels): scale [1/DN] and offset of each pixel.
        shift: float64, shape (rows,): share of the anchor that each vector holds, sum(x) / mirrors.
        noise: float32, shape (8, rows, pixels): for each of the four frames the numbers of counts and of read noise;
            length 0 on the last axis where both are off.
        sensor: as for `opusim.camera.kernels.fill_numbers`.
    """
    scratch, rates, total = np.empty(_PIXELS_AT_ONCE), np.empty(_PIXELS_AT_ONCE), np.empty(_PIXELS_AT_ONCE)
    for row in range(y.shape[0]):
        for start in range(0, y.shape[1], _PIXELS_AT_ONCE):
            stop = min(start + _PIXELS_AT_ONCE, y.shape[1])
            got, rate, signed = scratch[: stop - start], rates[: stop - start], total[: stop - start]
            gain_e, dark_e, offset_e = pixel[0, start:stop], pixel[1, start:stop], pixel[2, start:stop]
            signed[:] = 0.0
            for frame in range(4):
                half = 2 * (frame // 2)
                re, im = field[half, row, start:stop], field[half + 1, row, start:stop]
                if frame % 2 == 0:
                    _fill_rates(rate, re, im, gain_e, dark_e)
                else:
                    _fill_complement_rates(rate, re, im, anchor[:, start:stop], gain_e, dark_e)
                shot, read = noise[2 * frame, row, start:stop], noise[2 * frame + 1, row, start:stop]
                fill_numbers(got, rate, offset_e, shot, read, sensor)
                sign = 1.0 if frame in (0, 3) else -1.0
                for i in range(got.size):
                    signed[i] += sign * got[i]
            for i in range(got.size):
                y[row, start + i] = decode[0, start + i] * signed[i] - shift[row] * decode[1, start + i]
