"""The stages of a camera, in the order in which light meets them; each can be switched off.

Source of the chain: EMVA 1288 release 3.1 (linear camera). Order:
light -> photo-electrons, with bias light and dark current (one Poisson count of the summed rate) -> full well ->
fixed offset and read noise -> gain and black level -> rounding and clipping.

**Moments of a digital number** (`number_moments`), exact through every stage: DN = clip(round(X), 0, top), X = b + K
min(N, well) + s z with N ~ Poisson(rate), z ~ N(0, 1). Where neither end is met, the rounding error e = X - round(X) is
a sawtooth of X, and with phi(t) = E exp(i t X) (Fourier series of e and e^2)
    E[e]   = sum over k >= 1 of (-1)^(k+1) / (pi k) Im phi(2 pi k),
    E[e^2] = 1/12 + sum over k of (-1)^k / (pi k)^2 Re phi(2 pi k),
    E[X e] = sum over k of (-1)^(k+1) / (pi k) Im(-i phi'(2 pi k)).
phi falls as exp(-2 pi^2 k^2 s^2), so that a few terms do. Elsewhere the law's masses are added up. Both keep the mean
within 1e-6 DN and the variance within 1e-6 DN^2.
Source of the series: Widrow and Kollar, Quantization Noise (2008), chapter 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numba
import numpy as np

from opusim import checks
from opusim.medium.transmission import Medium

_LEAST_STD_DN = 0.05  # of the Gaussian part; below it the series is long
_TERM = 1e-9
_FAR = 8.5  # standard deviations from an end at which it is never met
_ROOT_HALF = math.sqrt(0.5)


def number_moments(
    rate_e: np.ndarray, base_dn: np.ndarray, sensor: tuple[float, float, float, float, float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and variance of digital numbers.

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
    """Return how far rounding may move a number's variance from K^2 (rate + read_noise^2) + 1/12, for every offset.

    A limit for every rate from the given one on, by the magnitudes of the series' terms; valid if no end is met.

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


_PRNU_PLANE, _DSNU_PLANE = 16, 17  # counter words that no medium uses
MAX_PRNU = 0.2
"""Above, a pixel 4.3 standard deviations dark would have no sensitivity left."""


@dataclass(frozen=True, kw_only=True)
class Light:
    """Photons on a pixel and the electrons they free: rate = quantum_efficiency flux exposure.

    Attributes:
        anchor_flux_per_s: photons per second, averaged over pixels, while every mirror of the window is on.
        bias_flux_per_s: photons per second on every pixel of every frame, incoherent and uniform; 0 is off. Its shot
            noise does not depend on the data.
        ambient_flux_per_s: the same of light that no key controls; 0 is off. No law credits it.
        quantum_efficiency: electrons per photon, in (0, 1].
        exposure_us: exposure of a frame, microseconds.
    """

    anchor_flux_per_s: float
    bias_flux_per_s: float = 0.0
    ambient_flux_per_s: float = 0.0
    quantum_efficiency: float
    exposure_us: float

    def __post_init__(self) -> None:
        checks.positive(anchor_flux_per_s=self.anchor_flux_per_s, exposure_us=self.exposure_us)
        checks.non_negative(bias_flux_per_s=self.bias_flux_per_s, ambient_flux_per_s=self.ambient_flux_per_s)
        checks.positive(quantum_efficiency=self.quantum_efficiency)
        checks.in_range(0, 1, quantum_efficiency=self.quantum_efficiency)

    @cached_property
    def anchor_e(self) -> float:
        """Photo-electrons of the anchor frame, averaged over pixels."""
        return self.quantum_efficiency * self.anchor_flux_per_s * self.exposure_us * 1e-6

    @cached_property
    def bias_e(self) -> float:
        """Electrons of the bias light in a frame."""
        return self.quantum_efficiency * self.bias_flux_per_s * self.exposure_us * 1e-6

    @cached_property
    def ambient_e(self) -> float:
        """Electrons of the ambient light in a frame."""
        return self.quantum_efficiency * self.ambient_flux_per_s * self.exposure_us * 1e-6


@dataclass(frozen=True, kw_only=True)
class FixedPattern:
    """What differs from pixel to pixel and stays from frame to frame; no randomness of a reading.

    Both are normal numbers cut at 4.3 standard deviations, computed from the seed and the pixel's number. The offset
    is added behind the full well, as EMVA 1288 measures it in dark frames; within the Poisson rate,
    as some write it, rates would have to be negative at some pixels.

    Attributes:
        prnu: photo response non-uniformity, standard deviation relative to the mean, in [0, 0.2]; 0 is off.
        dsnu_e: dark signal non-uniformity, standard deviation, electrons, at least 0; 0 is off.
        seed: which sensor this is, in [0, 2^64).
    """

    prnu: float = 0.0
    dsnu_e: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks.in_range(0, MAX_PRNU, prnu=self.prnu)
        checks.non_negative(dsnu_e=self.dsnu_e)

    def response(self, first: int, stop: int) -> np.ndarray:
        """1 + PRNU of the pixels first to stop - 1, float64."""
        return 1.0 + self.prnu * self._normal(_PRNU_PLANE, first, stop)

    def offset_e(self, first: int, stop: int) -> np.ndarray:
        """Return the offsets of the pixels first to stop - 1, electrons, float64."""
        return self.dsnu_e * self._normal(_DSNU_PLANE, first, stop)

    def _normal(self, plane: int, first: int, stop: int) -> np.ndarray:
        return pixel_normals(self.seed, plane, np.arange(first, stop))


def pixel_normals(seed: int, plane: int, pixels: np.ndarray) -> np.ndarray:
    """Return a normal number of each pixel, cut at 4.3 standard deviations, float64.

    Args:
        seed: in [0, 2^64).
        plane: counter word that keeps the numbers apart from others of the seed.
        pixels: numbers of the pixels, int64, increasing, at least one.
    """
    first, stop = int(pixels[0]), int(pixels[-1]) + 1
    row = Medium(1, stop, seed, plane=plane).tile(range(first, stop), range(1))
    return row[0].numpy().astype(np.float64)[pixels - first]


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
        """Return the sensor whose numbers are these without the lowest bits, where a link sends fewer than there are.

        With d = adc_bits - bits above 0, floor(round(v) / 2^d) = round((v + 1/2) / 2^d - 1/2) for every v but ties of
        the rounding, and clipping commutes with it: the numbers that arrive are those of a converter of so many bits
        with the gain K / 2^d and the black level (black_level + 1/2) / 2^d - 1/2. All laws of numbers hold for them.
        They are a function of the finer numbers, so no guarantee changes. A nonlinear read-out's saturation is that of
        the numbers that arrive.

        Args:
            bits: of a number on the link, at least 1; as many as the converter's or more change nothing.

        Raises:
            ValueError: there is no converter, or bits is below 1.
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
    def is_noisy(self) -> bool:
        """Whether two exposures of one pixel may differ."""
        return self.shot_noise or self.read_noise_e > 0

    @cached_property
    def top_dn(self) -> float:
        """Highest digital number; infinite without a converter."""
        return math.inf if self.adc_bits is None else float(2**self.adc_bits - 1)

    @property
    def saturation_e(self) -> float:
        """Electrons at which the full well or the converter ends, whichever is first; may be infinite."""
        well = math.inf if self.full_well_e is None else self.full_well_e
        return min(well, (self.top_dn - self.black_level_dn) / self.gain_dn_per_e)

    def numbers(self) -> tuple[float, float, float, float, float, float]:
        """Return the stages as the kernels of `opusim.camera.kernels` take them."""
        well = math.inf if self.full_well_e is None else float(self.full_well_e)
        top = -1.0 if self.adc_bits is None else self.top_dn
        shot = 1.0 if self.shot_noise else 0.0
        return (
            shot,
            well,
            float(self.read_noise_e),
            float(self.gain_dn_per_e),
            float(self.black_level_dn),
            top,
        )

    def moments(
        self, rate_e: np.ndarray | float, offset_e: np.ndarray | float = 0.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean [DN] and variance [DN squared] of a digital number, exact; see `opusim.camera.stages`.

        Args:
            rate_e: expected electrons, at least 0, any shape.
            offset_e: fixed offset of the pixel, electrons; broadcasts with the rates.
        """
        checks.non_negative(rate_e=rate_e)
        base = self.black_level_dn + self.gain_dn_per_e * np.asarray(offset_e, dtype=np.float64)
        return number_moments(np.asarray(rate_e, dtype=np.float64), base, self.numbers())

    def variance_dn2(self, rate_e: np.ndarray | float) -> np.ndarray:
        """K^2 (rate + read_noise^2) + 1/12, DN squared, elementwise; terms that are off are left out.

        An approximation if noise is below 0.4 DN, for rounding then correlates with the signal, and if the full
        well or an end of the converter is met; `moments` is exact, `rounding_limit_dn2` tells how far off this is.
        """
        electrons = np.asarray(rate_e, dtype=np.float64) * float(self.shot_noise) + self.read_noise_e**2
        rounding = 0.0 if self.adc_bits is None else 1.0 / 12.0
        return np.asarray(self.gain_dn_per_e**2 * electrons + rounding)

    def rounding_limit_dn2(self, rate_e: np.ndarray | float) -> np.ndarray:
        """How far `variance_dn2` may be off by rounding at this rate and above, for every offset, DN squared."""
        return rounding_limit(np.asarray(rate_e, dtype=np.float64), self.numbers())
