"""The stages of a camera, in the order in which light meets them; each can be switched off.

Source of the chain: EMVA 1288 release 3.1 (linear camera). Order:
light -> photo-electrons, with bias light and dark current (one Poisson count of the summed rate) -> full well ->
fixed offset and read noise -> gain and black level -> rounding and clipping.

**Moments of a digital number** (`Sensor.moments`), exact through every stage: DN = clip(round(X), 0, top), X = b + K
min(N, well) + s z with N ~ Poisson(rate), z ~ N(0, 1). Where neither end is met, the rounding error e = X - round(X) is
a sawtooth of X, and with phi(t) = E exp(i t X) (Fourier series of e and e^2)
    E[e]   = sum over k >= 1 of (-1)^(k+1) / (pi k) Im phi(2 pi k),
    E[e^2] = 1/12 + sum over k of (-1)^k / (pi k)^2 Re phi(2 pi k),
    E[X e] = sum over k of (-1)^(k+1) / (pi k) Im(-i phi'(2 pi k)).
phi falls as exp(-2 pi^2 k^2 s^2), so that a few terms suffice. Elsewhere the masses of the counts are added up. Given a
count, X is Gaussian; its series gives the moments of round(X), and clipping at 0 adds to the first two, about some o,
    sum over d <= 0 of P(X < d - 1/2)    and    sum over d <= 0 of 2 (d - 1/2 - o) P(X < d - 1/2).
From s = 1 DN on the Euler-Maclaurin series of midpoints gives these sums, and every j-th count stands for j of them,
j <= 0.8 (1 / rate + 1 / r^2)^(-1/2): by Poisson summation that errs as exp(-(2 pi / j)^2 / (2 / rate + 2 / r^2)), some
e^-30. So wide noise costs some 30 counts, narrow noise 18 sqrt(rate) + 50. All keep the mean within 1e-6 DN and the
variance within 1e-6 DN^2. Source of the series: Widrow and Kollar, Quantization Noise (2008), chapter 4.

**Law of a digital number** (`number_law`): the masses of every code, given the expected electrons. The read-out
f(n) = n (1 - q min(n / saturation, 1)) stands in place of n; b holds the pixel's offset. Given N, the code d has the
mass Phi((d + 1/2 - c) / s) - Phi((d - 1/2 - c) / s), c = b + K f(min(N, well)), s = K r; masses of codes beyond an end
of the converter lie on the end.

**Sums of a group.** On the lattice frequencies t in [-pi, pi] the characteristic function of one number is the sum over
integers k of sinc(u / 2) exp(-s^2 u^2 / 2 + i b u + rate (e^{i K u} - 1)) with u = t + 2 pi k (Poisson summation). The
product of the terms k = 0 over the n pixels of a group depends on the sum of their rates only; if K is a whole number,
each rate enters every term by the factor exp(rate (e^{i K t} - 1)), and all terms depend on the sum only. Otherwise the
terms k != 0 are at most beta(t) = 2 sum over k >= 1 of exp(-s^2 (2 pi k - |t|)^2 / 2) together, so that the total rate
tells the mass of the group's sum at each place up to the largest n beta (exp(-s^2 t^2 / 2) + beta)^(n - 1)
(`spread_error`), if no number lies at an end of the converter or of the well.

**Kernels** take complex fields to digital numbers, or to recovered projections. Fields are in mirror units (|u|^2 of
one mirror has mean 2); `gain_e` takes |u|^2 to expected photo-electrons. Every pixel is computed separately, so results
depend neither on how rows are split over threads nor on the processor's order. tests/oracles/naive_camera.py has a slow
plain twin.

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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numba
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy.special import gammaln, ndtr, pdtrc, xlogy, zeta

from opusim import checks
from opusim.medium.transmission import Medium
from opusim.plugins import Deferred
from opusim.randomness.streams import NoiseStream

signal = Deferred("scipy.signal")

_LEAST_STD_DN = 0.05  # of the Gaussian part; below it the series is long
_TERM = 1e-9
_FAR = 8.5  # standard deviations from an end at which it is never met
_ROOT_HALF = math.sqrt(0.5)
_TINY = 1e-18
"""Masses below it are left out of moments."""
_SERIES_FROM = 0.3
"""Gaussian noise, DN, from which the moments of a rounded Gaussian come from the series; below, its codes are few."""
_DAMPED = -math.log(_TERM)
_WIDE = 1.0
"""Gaussian noise, DN, from which the Euler-Maclaurin series stands for the codes beyond an end."""
_STEP = 0.8
"""Step from count to count under such noise, in units of (1 / rate + 1 / r^2)^(-1/2)."""
_EDGES = np.array(
    [2 * (-1) ** k * (1 - 2.0 ** (1 - 2 * k)) * zeta(2 * k) / math.tau ** (2 * k) for k in range(1, 11)]
)
"""Its coefficients B_2k(1/2) / (2 k)!."""
_NO_MASS = 1e-22
"""Masses at the ends of a sum's law that are dropped: at most 1e-17 over all its places."""
_MORE_ELECTRONS = 30
_FREQUENCIES = 20_001
"""Frequencies at which characteristic functions are bounded."""
_LEAST_LOG = -745.0
"""Logarithm of the smallest double, for codes without mass."""


def _terms(std: float) -> int:
    """Return how many terms of the series exceed `_TERM`."""
    return math.ceil(math.sqrt(-math.log(_TERM) / 2) / (math.pi * std))


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
        first, last, step, counted = 0, 0, 1, shot
        if shot:
            full = well if top < 0 else min(well, (top + 1.0 + 9.0 * std - bases[i]) / gain)
            least, most = rate - 9.0 * math.sqrt(rate) - 20.0, rate + 9.0 * math.sqrt(rate) + 30.0
            counted = least < full  # else every count fills the pixel
            if counted:
                first, last = int(max(0.0, least)), int(most) + 1
                if std >= _WIDE and most + 1.0 < well:
                    step = max(1, int(_STEP / math.sqrt(1.0 / rate + (gain / std) ** 2))) if rate > 0 else 1
        origin = bases[i] + gain * min(rate, well)
        total = one = two = 0.0
        for n in range(first, last + 1, step):
            mass, electrons = 1.0, rate
            if counted:
                mass = (
                    math.exp(-rate + n * math.log(rate) - math.lgamma(n + 1.0))
                    if rate > 0
                    else (1.0 if n == 0 else 0.0)
                )
                electrons = float(n)
            if mass < _TINY:
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
    """First two moments, about an origin, of clip(round(centre + std z), 0, top); see the module."""
    if std <= 0:
        value = min(max(np.rint(centre), 0.0), top) - origin
        return value, value * value
    if std < _SERIES_FROM:  # add up the codes
        low = min(max(np.rint(centre - _FAR * std), 0.0), top)
        high = min(max(np.rint(centre + _FAR * std), 0.0), top)
        below = one = two = 0.0
        for step in range(int(high - low) + 1):
            number = low + step
            up_to = 1.0 if number >= high else _below((number + 0.5 - centre) / std)
            value = number - origin
            one += (up_to - below) * value
            two += (up_to - below) * value * value
            below = up_to
        return one, two
    # 1. of round(centre + std z), by the series of its rounding error
    error, square, product = 0.0, 1 / 12, 0.0
    turn, damping = 2 * math.pi * (centre - np.rint(centre)), 2 * (math.pi * std) ** 2
    for k in range(1, int(math.sqrt(_DAMPED / damping)) + 2):
        sign, size = 1.0 if k % 2 else -1.0, math.exp(-damping * k * k)
        error += sign * size / (math.pi * k) * math.sin(turn * k)
        square -= sign * size / (math.pi * k) ** 2 * math.cos(turn * k)
        product += sign * size * 2 * std * std * math.cos(turn * k)
    away = centre - origin
    one, two = away - error, away * away + std * std + square - 2 * (away * error + product)
    # 2. what clipping adds at each end
    first, second = _beyond(centre, std, origin)
    one, two = one + first, two + second
    first, second = _beyond(top - centre, std, top - origin)
    return one - first, two + second


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _below(y: float) -> float:
    """Phi(y)."""
    return 0.5 * math.erfc(-y * _ROOT_HALF)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _beyond(centre: float, std: float, origin: float) -> tuple[float, float]:
    """What clipping at 0 adds to the first two moments, about an origin, of round(centre + std z)."""
    y = -centre / std
    if y < -9.0:
        return 0.0, 0.0
    first = second = 0.0
    if std < _WIDE:  # add up the codes
        for code in range(int(9.0 * std - centre) + 1):
            mass = _below((-code - 0.5 - centre) / std)
            first += mass
            second -= 2 * (code + 0.5 + origin) * mass
        return first, second
    below, density = _below(y), math.exp(-0.5 * y * y) / math.sqrt(2 * math.pi)
    first = std * (y * below + density)
    second = 2 * (centre - origin) * first + std * std * ((y * y - 1) * below + y * density)
    scale, before, hermite = 1 / std, 0.0, density  # He_(n-1) and He_n times the density, n even
    odd = below
    for k in range(_EDGES.size):
        n = 2 * k
        if abs(_EDGES[k]) * scale < 1e-16:
            break
        first += _EDGES[k] * scale * hermite
        second += _EDGES[k] * 2 * ((n + 1) * odd - origin * scale * hermite)
        before = y * hermite - n * before  # He_(n+1)
        hermite = y * before - (n + 1) * hermite  # He_(n+2)
        scale /= std * std
        odd = -before * scale * std
    return first, second


def pixel_normals(seed: int, plane: int, pixels: np.ndarray) -> np.ndarray:
    """Return a normal number of each pixel, by increasing number, cut at 4.3 standard deviations, float64."""
    first, stop = int(pixels[0]), int(pixels[-1]) + 1
    row = Medium(1, stop, seed, plane=plane).tile(range(first, stop), range(1))
    return row[0].numpy().astype(np.float64)[pixels - first]


def frame_normals(frames: int, correlation: float, stream: NoiseStream) -> np.ndarray:
    """Return normal numbers of frames in turn, float64; those k apart correlate by rho^k. Takes one reading."""
    g: np.ndarray = stream.normal((frames,)).double().numpy()
    if correlation > 0:
        g[1:] *= math.sqrt(1 - correlation**2)
        g = signal.lfilter([1.0], [1.0, -correlation], g)
    return g


@dataclass(frozen=True, kw_only=True)
class Sensor:
    """From expected electrons to digital numbers.

    DN = clip(round(black_level + K (min(N, full_well) + offset + read_noise z))), N ~ Poisson(rate), z ~ N(0, 1).
    Unsaturated, with the converter's steps below the noise, the variance is K^2 (rate + read_noise^2) + 1/12
    (EMVA 1288 release 3.1, eq. 9).

    Attributes:
        gain_dn_per_e: K, DN per electron (the inverse of astronomers' gain), above 0.
        shot_noise: whether N is a count; False: N is the rate itself.
        full_well_e: electrons that a pixel holds; None is off.
        read_noise_e: standard deviation, electrons; 0 is off.
        black_level_dn: DN without any charge, at least 0; at least -1/2 with a converter (`sent_in`).
        adc_bits: bits of the converter, 1 to 24; None is off: DN are neither rounded nor clipped.
    """

    gain_dn_per_e: float
    shot_noise: bool = False
    full_well_e: float | None = None
    read_noise_e: float = 0.0
    black_level_dn: float = 0.0
    adc_bits: int | None = None

    def __post_init__(self) -> None:
        checks.positive(gain_dn_per_e=self.gain_dn_per_e)
        checks.non_negative(read_noise_e=self.read_noise_e)
        if self.full_well_e is not None:
            checks.positive(full_well_e=self.full_well_e)
        if self.adc_bits is None:
            checks.non_negative(black_level_dn=self.black_level_dn)
        else:
            checks.integer(adc_bits=self.adc_bits, minimum=1, maximum=24)
            checks.in_range(-0.5, 2**self.adc_bits - 1, black_level_dn=self.black_level_dn)

    def sent_in(self, bits: int) -> Sensor:
        """Return the sensor whose numbers are these without the lowest bits, for a link that sends fewer bits.

        With d = adc_bits - bits above 0, floor(round(v) / 2^d) = round((v + 1/2) / 2^d - 1/2) for every v except ties
        of the rounding, and clipping commutes with it: the numbers that arrive are those of a converter of `bits` bits
        with the gain K / 2^d and the black level (black_level + 1/2) / 2^d - 1/2, so all laws of numbers hold for them.
        They are a function of the finer numbers, so no guarantee changes. A nonlinear read-out saturates where the
        arriving numbers do.
        """
        checks.integer(bits=bits, minimum=1)
        if self.adc_bits is None:
            raise ValueError(f"bits = {bits}: numbers without a converter have no bits; give adc_bits")
        if bits >= self.adc_bits:
            return self
        step = 2.0 ** (self.adc_bits - bits)
        return replace(
            self,
            gain_dn_per_e=self.gain_dn_per_e / step,
            black_level_dn=(self.black_level_dn + 0.5) / step - 0.5,
            adc_bits=bits,
        )

    @cached_property
    def top_dn(self) -> float:
        """Highest digital number; infinite without a converter."""
        return math.inf if self.adc_bits is None else float(2**self.adc_bits - 1)

    @property
    def saturation_e(self) -> float:
        """Electrons at which the full well or the converter ends, whichever is first; may be infinite."""
        well = math.inf if self.full_well_e is None else self.full_well_e
        return min(well, (self.top_dn - self.black_level_dn) / self.gain_dn_per_e)

    @cached_property
    def numbers(self) -> tuple[float, float, float, float, float, float]:
        """The stages as the kernels take them."""
        well = math.inf if self.full_well_e is None else float(self.full_well_e)
        top = -1.0 if self.adc_bits is None else self.top_dn
        shot = 1.0 if self.shot_noise else 0.0
        read_e, gain, black = float(self.read_noise_e), float(self.gain_dn_per_e), float(self.black_level_dn)
        return shot, well, read_e, gain, black, top

    def moments(
        self, rate_e: np.ndarray | float, offset_e: np.ndarray | float = 0.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean [DN] and variance [DN^2] of a digital number, exact; see `opusim.camera.stages`."""
        checks.non_negative(rate_e=rate_e)
        base_dn = self.black_level_dn + self.gain_dn_per_e * np.asarray(offset_e, dtype=np.float64)
        parts = np.broadcast_arrays(np.atleast_1d(np.asarray(rate_e, dtype=np.float64)), base_dn)
        rate, base = (np.array(part, dtype=float, order="C") for part in parts)
        scalar = np.ndim(rate_e) == 0 and np.ndim(base_dn) == 0
        shot, well, read_e, gain, _, top = self.numbers
        std = gain * read_e
        mean, variance = base + gain * rate, np.full(rate.shape, std**2) + (gain**2 * rate if shot else 0.0)
        reach = _FAR * np.sqrt(variance) + (20 * gain if shot else 0.0)  # 20 electrons: a Poisson law is skew
        ends = rate + (_FAR * np.sqrt(rate) + 20 if shot else 0.0) >= well
        if top >= 0:
            ends |= (mean - reach < -0.5) | (mean + reach > top + 0.5)
            if std >= _LEAST_STD_DN:
                # E[e], and Var[e] - 2 Cov[X, e], by the series
                inside = ~ends
                part, start = rate[inside], base[inside]
                counts = part if shot else np.zeros_like(part)
                start = start if shot else start + gain * part
                start = start - np.rint(start + gain * counts)  # whole numbers shift both X and its rounding
                first, second, product = np.zeros_like(part), np.full_like(part, 1 / 12), np.zeros_like(part)
                for k in range(1, _terms(std) + 1):
                    t, sign = 2 * math.pi * k, 1.0 if k % 2 else -1.0
                    turn = np.exp(1j * gain * t)
                    value = np.exp(1j * t * start + counts * (turn - 1) - 0.5 * (std * t) ** 2)
                    slope = value * (gain * counts * (turn - 1) + 1j * std**2 * t)  # of X less its mean
                    first += sign / (math.pi * k) * value.imag
                    second -= sign / (math.pi * k) ** 2 * value.real
                    product += sign / (math.pi * k) * slope.imag
                mean[inside] -= first
                variance[inside] += second - first**2 - 2 * product
            else:
                ends[:] = True
        if np.any(ends):
            found = np.empty((2, int(ends.sum())))
            _add_up(found, rate[ends], base[ends], shot > 0, well, std, gain, top)
            mean[ends], variance[ends] = found
        return (mean[0], variance[0]) if scalar else (mean, variance)

    def variance_dn2(self, rate_e: np.ndarray | float) -> np.ndarray:
        """K^2 (rate + read_noise^2) + 1/12, DN squared, elementwise; terms that are off are left out.

        An approximation if noise is below 0.4 DN, since rounding then correlates with the signal, and if the full well
        or an end of the converter is met; `moments` is exact, `rounding_limit_dn2` tells how far off this is.
        """
        electrons = np.asarray(rate_e, dtype=np.float64) * float(self.shot_noise) + self.read_noise_e**2
        rounding = 0.0 if self.adc_bits is None else 1.0 / 12.0
        return np.asarray(self.gain_dn_per_e**2 * electrons + rounding)

    def rounding_limit_dn2(self, rate_e: np.ndarray | float) -> np.ndarray:
        """Return how far `variance_dn2` may be off by rounding at this rate and above, for every offset, DN squared.

        Adds the magnitudes of the series' terms; valid if no end is met. 0 without a converter, at most a quarter.
        """
        shot, _, read_e, gain, _, top = self.numbers
        std, rate = gain * read_e, np.asarray(rate_e, dtype=np.float64)
        if top < 0:
            return np.zeros_like(rate)
        if std < _LEAST_STD_DN:
            return np.full_like(rate, 0.25)
        first, second, product = np.zeros_like(rate), np.zeros_like(rate), np.zeros_like(rate)
        for k in range(1, _terms(std) + 1):
            t, damping = 2 * math.pi * k, math.exp(-0.5 * (std * 2 * math.pi * k) ** 2)
            fall = 1 - math.cos(gain * t) if shot else 0.0
            size = damping * np.exp(-fall * rate)
            peak = np.maximum(rate, 1 / fall) if fall > 0 else rate  # rate exp(-fall rate) is largest there
            counts = (
                damping * gain * peak * np.exp(-fall * peak) * 2 * abs(math.sin(gain * t / 2))
                if shot
                else 0.0
            )
            first += size / (math.pi * k)
            second += size / (math.pi * k) ** 2
            product += (counts + size * std**2 * t) / (math.pi * k)
        return np.minimum(second + first**2 + 2 * product, 0.25)


# Law of a number


@dataclass(frozen=True, kw_only=True, eq=False)
class NumberLaw:
    """Masses of the codes of some pixels under some inputs.

    Attributes:
        first: Code of the first mass.
        masses: Shape (inputs, pixels, codes), rows of sum 1 up to rounding.
    """

    first: int
    masses: np.ndarray

    def log_likelihood(self, numbers: np.ndarray) -> np.ndarray:  # (frames, pixels) -> (frames, inputs)
        """Return log P(numbers | input), summed over pixels; a code without mass counts as the smallest double."""
        inputs, pixels, codes = self.masses.shape
        checks.shape((None, pixels), numbers=numbers)
        with np.errstate(divide="ignore"):
            logs = np.maximum(np.log(self.masses), _LEAST_LOG)
        places = np.clip(np.rint(numbers).astype(np.int64) - self.first, 0, codes - 1)
        total = np.zeros((len(places), inputs))
        for pixel in range(pixels):
            total += logs[:, pixel, :].T[places[:, pixel]]
        return total

    def sums(self, groups: Sequence[np.ndarray]) -> np.ndarray:  # (inputs, groups, sums)
        """Return the masses of the sum of the codes of each group of equally many pixels, from `first` on."""
        inputs, _, codes = self.masses.shape
        found = np.zeros((inputs, len(groups), len(groups[0]) * (codes - 1) + 1))
        for group, pixels in enumerate(groups):
            for row, own in enumerate(self.masses[:, pixels]):
                start, total = _with_mass(own[0])
                for part in own[1:]:
                    shift, more = _with_mass(part)
                    cut, total = _with_mass(np.convolve(total, more))
                    start += shift + cut
                found[row, group, start : start + total.size] = total
        return found


def _with_mass(masses: np.ndarray) -> tuple[int, np.ndarray]:
    """Return the first place with mass, and the masses from there to the last one; those at the ends are lost."""
    places = np.flatnonzero(masses > _NO_MASS)
    return int(places[0]), masses[places[0] : places[-1] + 1]


def number_law(
    rates: np.ndarray, offset_e: np.ndarray, sensor: Sensor, nonlinearity: float = 0.0
) -> NumberLaw:
    """Return the law of the digital numbers of pixels with expected electrons (inputs, pixels) and an offset each.

    The nonlinearity q lies in [0, 0.25], so that numbers rise with the count. ValueError: the sensor has no shot noise,
    or no converter that makes numbers discrete.
    """
    checks.shape((None, None), rates=rates)
    checks.non_negative(rates=rates)
    checks.in_range(0, 0.25, nonlinearity=nonlinearity)
    if not sensor.shot_noise or sensor.adc_bits is None:
        raise ValueError(
            "sensor: needs shot noise and a converter (sensor.adc_bits), whose codes have masses"
        )
    black, gain, std = sensor.black_level_dn, sensor.gain_dn_per_e, sensor.gain_dn_per_e * sensor.read_noise_e
    well = math.inf if sensor.full_well_e is None else sensor.full_well_e
    base = black + gain * np.asarray(offset_e, dtype=float)
    slope = gain * (1 - nonlinearity)  # least mean slope, at saturation
    # more electrons change no code
    full = math.ceil(min(well, (sensor.top_dn + 1 + _FAR * std - float(base.min())) / slope))
    least = min(_electrons(float(np.min(rates)), -1), full)
    most = min(_electrons(float(np.max(rates)), 1), full)
    low = float(base.min()) + slope * min(least, well) - _FAR * std
    high = float(base.max()) + gain * min(most, well) + _FAR * std
    first, last = (int(np.clip(np.rint(end), 0, sensor.top_dn)) for end in (low, high))
    electrons = np.arange(least, most + 1)
    centres = np.minimum(electrons, well).astype(float)
    if nonlinearity:
        centres *= 1 - nonlinearity * np.minimum(centres / sensor.saturation_e, 1)
    centres *= gain
    masses = np.empty((*np.shape(rates), last - first + 1))
    for pixel in range(np.shape(rates)[1]):
        rate = np.asarray(rates)[:, pixel, None]
        # Poisson, (inputs, electrons)
        counts = np.exp(xlogy(electrons, rate) - gammaln(electrons + 1) - rate)
        counts[:, -1] += pdtrc(most, rate[:, 0])
        codes = _code_masses(base[pixel] + centres, std, first, last)
        masses[:, pixel] = counts @ codes
    return NumberLaw(first=first, masses=masses)


def spread_error(sensor: Sensor, offset_e: np.ndarray, most: float, nonlinearity: float = 0.0) -> float:
    """Bound how much the law of a group's sum depends on how its total rate is spread over its pixels.

    See the module's "Sums of a group". The distance in total variation is that between any two spreads of one total, up
    to `most` electrons of a pixel; infinite if the read-out bends, or a number may lie at an end of the converter or of
    the full well.
    """
    gain, std, n = sensor.gain_dn_per_e, sensor.gain_dn_per_e * sensor.read_noise_e, np.size(offset_e)
    base = sensor.black_level_dn + gain * np.asarray(offset_e, dtype=float)
    highest = _electrons(most, 1)
    ends = float(base.min()) - _FAR * std, float(base.max()) + gain * highest + _FAR * std
    if (
        nonlinearity
        or sensor.adc_bits is None
        or ends[0] < 1
        or ends[1] > sensor.top_dn - 1
        or highest >= (math.inf if sensor.full_well_e is None else sensor.full_well_e)
    ):
        return math.inf
    beyond = 4e-17 * n  # masses that lie farther than `_FAR` at the ends
    if float(gain).is_integer() or n == 1:
        return beyond
    t = np.linspace(0.0, math.pi, _FREQUENCIES)
    others = 2.01 * sum(np.exp(-np.square(std * (2 * math.pi * k - t)) / 2) for k in range(1, 10))
    height = n * others * (np.exp(-np.square(std * t) / 2) + others) ** (n - 1)
    between = math.exp(std**2 * (n + 1) * math.pi**2 / (2 * _FREQUENCIES - 2))  # frequencies off the grid
    places = n * (ends[1] - ends[0] + 1)
    return float(beyond + places * np.max(height) * between)


def _electrons(rate: float, side: int) -> int:
    """Return the count below (side -1) or above (1) which a mass of 1e-17 lies."""
    return max(0, math.floor(rate + side * (_FAR * math.sqrt(rate) + _MORE_ELECTRONS)))


def _code_masses(centres: np.ndarray, std: float, first: int, last: int) -> np.ndarray:
    """Masses of clip(round(centre + std z), first, last), shape (centres, codes)."""
    codes = np.arange(first, last + 1)
    if std <= 0:
        return (np.clip(np.rint(centres), first, last)[:, None] == codes).astype(float)
    steps = centres[0] + np.arange(centres.size)
    if codes.size < 3 or np.any(np.abs(centres - steps) > 4 * np.spacing(np.abs(steps))):
        below = ndtr((codes[:-1] + 0.5 - centres[:, None]) / std)
        return np.diff(below, axis=1, prepend=0.0, append=1.0)
    # one digital number an electron: masses depend on the code less the electrons only
    edges = ndtr((codes[0] + 0.5 - steps[-1] + np.arange(centres.size + codes.size - 2)) / std)
    masses = np.empty((centres.size, codes.size))
    masses[:, 0] = edges[centres.size - 1 :: -1]
    masses[:, 1:-1] = sliding_window_view(np.diff(edges), codes.size - 2)[::-1]
    masses[:, -1] = 1 - edges[: codes.size - 3 : -1]
    return masses


SUM_BELOW = 700.0
"""Rates up to which masses may be added up: exp(-rate) is still a normal number."""
_EXPAND_FROM = 12.0
_MOST_STEPS = 1100  # 15 standard deviations above 700, 300 above 12


@numba.njit(cache=True, nogil=True, error_model="numpy")
def fill_counts(counts: np.ndarray, rates: np.ndarray, w: np.ndarray) -> None:
    """Overwrite counts, float64, by Poisson counts of rates, float64, and standard normal numbers w, float32."""
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
    if some:  # the smallest n with P(N <= n) >= Phi(w), by adding up masses
        for i in range(counts.size):
            if counts[i] < 0.0:
                target = 0.5 * math.erfc(-np.float64(w[i]) * _ROOT_HALF)
                mass = below = math.exp(-rates[i])
                n = 0
                while below < target and n < _MOST_STEPS:
                    n += 1
                    mass *= rates[i] / n
                    below += mass
                counts[i] = n


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
        numbers: float64, one axis, is overwritten, DN; rates and offsets, float64, are electrons.
        rates: of light, bias and dark current.
        offset_e: fixed offset of each pixel.
        shot: float32, N(0, 1) that decide the counts; like `read`, of length 0 if it is off.
        read: float32, N(0, 1) of the read noise.
        sensor: shot noise (1: on, 0: off), full well [e-] (inf: off), read noise [e-] (0: off), gain [DN/e-], black
            level [DN] and highest number of the converter [DN] (below 0: neither rounded nor clipped).
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


@numba.njit(cache=True, nogil=True, error_model="numpy")
def expose_fields(
    numbers: np.ndarray, field: np.ndarray, pixel: np.ndarray, noise: np.ndarray, sensor: _Sensor
) -> None:
    """Overwrite numbers (rows, pixels), float32, by frames of given fields (2, rows, pixels): real and imaginary part.

    `pixel` has gain_e, dark_e and offset_e of each pixel, float64; `noise` the N(0, 1) for counts and for read noise,
    (2, rows, pixels), length 0 on the last axis where both are off.
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

    `y`, float32, (rows, pixels), is overwritten. `field`, (4, rows, pixels), has the real and imaginary part of the
    positive frames' fields, then of the negative frames'; `anchor`, (2, pixels), the anchor's. `decode`, (2, pixels),
    has scale [1/DN] and offset of each pixel; `shift`, (rows,), the share of the anchor that a vector holds, sum(x) /
    mirrors; `noise`, (8, rows, pixels), a pair for each of the four frames. All else is as for `expose_fields`.
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
                else:  # of the complements' fields, gain_e |u_a - u|^2 + dark_e
                    for i in range(rate.size):
                        a, b = (
                            np.float64(anchor[0, start + i] - re[i]),
                            np.float64(anchor[1, start + i] - im[i]),
                        )
                        rate[i] = gain_e[i] * (a * a + b * b) + dark_e[i]
                shot, read = noise[2 * frame, row, start:stop], noise[2 * frame + 1, row, start:stop]
                fill_numbers(got, rate, offset_e, shot, read, sensor)
                sign = 1.0 if frame in (0, 3) else -1.0
                for i in range(got.size):
                    signed[i] += sign * got[i]
            for i in range(got.size):
                y[row, start + i] = decode[0, start + i] * signed[i] - shift[row] * decode[1, start + i]
