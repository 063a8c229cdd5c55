"""Numba kernels from expected electrons to digital numbers: one standard normal number decides each count.

A Poisson count is the quantile F^-1(Phi(w)) of its law at a standard normal w, which takes one number a count
whatever the rate: the same w and a slightly different rate give nearly always the same count, so noise stays comparable
between runs whose light differs a little.

The quantile is floor(x) of the expansion of the continuous quantile (Cornish and Fisher; Temme 1979; Giles 2016, ACM
TOMS 42(1) 6, eq. 16) to order 1/rate,
    x = r + sqrt(r) w + (2 + w^2)/6 - (2 w + w^3)/(72 sqrt r) + (3 w^4 + 7 w^2 - 16)/(810 r).
Where x lies so near a whole number that its error could matter, within (0.03 + 0.0035 |w|^5) / r^1.5, and where the
expansion is poor (r below 12, or |w| above sqrt(r)/2), the law's masses are added up instead. So counts are exact up to
the rounding of w to float32 (total variation below 1e-6; tests compute it); above 700 electrons, where the
expansion's own error is below 1e-7, nothing is added up.

The slow twin stands in tests/opusim/naive_camera.py.
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
    """The smallest n with P(N <= n) >= Phi(w), by adding up masses; rate below `SUM_BELOW`."""
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
        read: float32, N(0, 1) of the read noise; may have length 0 where it is off.
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
