"""Mean and variance of a digital number, exact through every stage: count, full well, noise, rounding and clipping.

DN = clip(round(X), 0, top), X = b + K min(N, well) + s z with N ~ Poisson(rate), z ~ N(0, 1). Where neither end is met,
the rounding error e = X - round(X) is a sawtooth of X, and with phi(t) = E exp(i t X) (Fourier series of e and e^2)
    E[e]   = sum over k >= 1 of (-1)^(k+1) / (pi k) Im phi(2 pi k),
    E[e^2] = 1/12 + sum over k of (-1)^k / (pi k)^2 Re phi(2 pi k),
    E[X e] = sum over k of (-1)^(k+1) / (pi k) Im(-i phi'(2 pi k)).
phi falls as exp(-2 pi^2 k^2 s^2), so that a few terms do. Elsewhere the law's masses are added up. Both keep the mean
within 1e-6 DN and the variance within 1e-6 DN^2.
Source of the series: Widrow and Kollar, Quantization Noise (2008), chapter 4.
"""

from __future__ import annotations

import math

import numba
import numpy as np

_LEAST_STD_DN = 0.05  # of the Gaussian part; below it the series is long
_TERM = 1e-9
_FAR = 8.5  # standard deviations from an end at which it is never met
_ROOT_HALF = math.sqrt(0.5)


def number_moments(
    rate_e: np.ndarray, base_dn: np.ndarray, sensor: tuple[float, float, float, float, float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of digital numbers.

    Args:
        rate_e: expected electrons, at least 0, any shape.
        base_dn: black level plus the pixel's offset, DN; broadcasts with the rates.
        sensor: as `opusim.camera.stages.Sensor.numbers` gives it.

    Returns:
        DN and DN squared, float64, of the broadcast shape.
    """
    shot, well, read_e, gain, _, top = sensor
    rate, base = (np.array(part, dtype=float, order="C") for part in np.broadcast_arrays(rate_e, base_dn))
    if rate.ndim == 0:
        mean, variance = number_moments(rate[None], base[None], sensor)
        return mean[0], variance[0]
    std = gain * read_e
    mean, variance = base + gain * rate, np.full(rate.shape, std**2) + (gain**2 * rate if shot else 0.0)
    reach = _FAR * np.sqrt(variance) + (20 * gain if shot else 0.0)  # 20 electrons: a Poisson law is skew
    ends = rate + (_FAR * np.sqrt(rate) + 20 if shot else 0.0) >= well
    if top >= 0:
        ends |= (mean - reach < -0.5) | (mean + reach > top + 0.5)
        if std >= _LEAST_STD_DN:
            inside = ~ends
            shift, factor = _rounding(rate[inside], base[inside], std, gain, shot > 0)
            mean[inside] -= shift
            variance[inside] += factor
        else:
            ends[:] = True
    if np.any(ends):
        found = np.empty((2, int(ends.sum())))
        _add_up(found, rate[ends], base[ends], shot > 0, well, std, gain, top)
        mean[ends], variance[ends] = found
    return mean, variance


def _rounding(
    rate: np.ndarray, base: np.ndarray, std: float, gain: float, shot: bool
) -> tuple[np.ndarray, np.ndarray]:
    """E[e], and Var[e] - 2 Cov[X, e], by the series."""
    counts = rate if shot else np.zeros_like(rate)
    start = base if shot else base + gain * rate
    centre = start + gain * counts
    start = start - np.rint(centre)  # whole numbers shift both X and its rounding
    first, second, product = np.zeros_like(rate), np.full_like(rate, 1 / 12), np.zeros_like(rate)
    for k in range(1, math.ceil(math.sqrt(-math.log(_TERM) / 2) / (math.pi * std)) + 1):
        t, sign = 2 * math.pi * k, 1.0 if k % 2 else -1.0
        turn = np.exp(1j * gain * t)
        value = np.exp(1j * t * start + counts * (turn - 1) - 0.5 * (std * t) ** 2)
        slope = value * (gain * counts * (turn - 1) + 1j * std**2 * t)  # of X less its mean
        first += sign / (math.pi * k) * value.imag
        second -= sign / (math.pi * k) ** 2 * value.real
        product += sign / (math.pi * k) * slope.imag
    return first, second - first**2 - 2 * product


def rounding_limit(rate_e: np.ndarray, sensor: tuple[float, float, float, float, float, float]) -> np.ndarray:
    """How far rounding may move a number's variance from K^2 (rate + read_noise^2) + 1/12, whatever the offset.

    A limit for every rate from the given one on, by the magnitudes of the series' terms; valid where no end is met.

    Args:
        rate_e: least expected electrons, any shape.
        sensor: as for `number_moments`.

    Returns:
        DN squared, of the rates' shape; 0 without a converter, at most a quarter.
    """
    shot, _, read_e, gain, _, top = sensor
    std, rate = gain * read_e, np.asarray(rate_e, dtype=float)
    if top < 0:
        return np.zeros_like(rate)
    if std < _LEAST_STD_DN:
        return np.full_like(rate, 0.25)
    first, second, product = np.zeros_like(rate), np.zeros_like(rate), np.zeros_like(rate)
    for k in range(1, math.ceil(math.sqrt(-math.log(_TERM) / 2) / (math.pi * std)) + 1):
        t, damping = 2 * math.pi * k, math.exp(-0.5 * (std * 2 * math.pi * k) ** 2)
        fall = 1 - math.cos(gain * t) if shot else 0.0
        size = damping * np.exp(-fall * rate)
        peak = np.maximum(rate, 1 / fall) if fall > 0 else rate  # rate exp(-fall rate) is largest there
        counts = (
            damping * gain * peak * np.exp(-fall * peak) * 2 * abs(math.sin(gain * t / 2)) if shot else 0.0
        )
        first += size / (math.pi * k)
        second += size / (math.pi * k) ** 2
        product += (counts + size * std**2 * t) / (math.pi * k)
    return np.minimum(second + first**2 + 2 * product, 0.25)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _add_up(
    found: np.ndarray,
    rates: np.ndarray,
    bases: np.ndarray,
    shot: bool,
    well: float,
    std: float,
    gain: float,
    top: float,
) -> None:
    """Mean and variance by adding up the masses of counts and numbers; found has shape (2, rates)."""
    for i in range(rates.size):
        rate = rates[i]
        first, last, counted = 0, 0, shot
        if shot:
            full = well if top < 0 else min(well, (top + 1.0 + 9.0 * std - bases[i]) / gain)
            least, most = rate - 9.0 * math.sqrt(rate) - 20.0, rate + 9.0 * math.sqrt(rate) + 30.0
            counted = least < full  # else every count fills the pixel
            if counted:
                first, last = int(max(0.0, least)), int(most) + 1
        origin = bases[i] + gain * min(rate, well)
        total = one = two = 0.0
        for n in range(first, last + 1):
            mass, electrons = 1.0, rate
            if counted:
                mass = (
                    math.exp(-rate + n * math.log(rate) - math.lgamma(n + 1.0))
                    if rate > 0
                    else (1.0 if n == 0 else 0.0)
                )
                electrons = float(n)
            if mass < 1e-18:
                continue
            centre = bases[i] + gain * min(electrons, well)
            if top < 0:
                a, b = centre - origin, (centre - origin) ** 2 + std * std
            else:
                a, b = _numbers(centre, std, top, origin)
            total += mass
            one += mass * a
            two += mass * b
        found[0, i] = origin + one / total
        found[1, i] = max(two / total - (one / total) ** 2, 0.0)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _numbers(centre: float, std: float, top: float, origin: float) -> tuple[float, float]:
    """First two moments, about an origin, of clip(round(centre + std z), 0, top)."""
    if std <= 0:
        value = min(max(np.rint(centre), 0.0), top) - origin
        return value, value * value
    low = min(max(np.rint(centre - 8.5 * std), 0.0), top)
    high = min(max(np.rint(centre + 8.5 * std), 0.0), top)
    below = one = two = 0.0
    for step in range(int(high - low) + 1):
        number = low + step
        up_to = 1.0 if number >= high else 0.5 * math.erfc(-(number + 0.5 - centre) / std * _ROOT_HALF)
        value = number - origin
        one += (up_to - below) * value
        two += (up_to - below) * value * value
        below = up_to
    return one, two
