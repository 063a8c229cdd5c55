"""The stages of a camera, in the order in which light meets them; each can be switched off alone.

Source of the chain: EMVA 1288 release 3.1 (linear camera). Order:
light -> photo-electrons, with bias light and dark current (one Poisson count of the summed rate) -> full well ->
fixed offset and read noise -> gain and black level -> rounding and clipping.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from opusim import checks
from opusim.camera.number_moments import number_moments, rounding_limit
from opusim.medium.transmission import Medium

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
        quantum_efficiency: electrons per photon, in (0, 1].
        exposure_us: exposure of a frame, microseconds.
    """

    anchor_flux_per_s: float
    bias_flux_per_s: float = 0.0
    quantum_efficiency: float
    exposure_us: float

    def __post_init__(self) -> None:
        checks.positive(anchor_flux_per_s=self.anchor_flux_per_s, exposure_us=self.exposure_us)
        checks.non_negative(bias_flux_per_s=self.bias_flux_per_s)
        checks.positive(quantum_efficiency=self.quantum_efficiency)
        checks.in_range(0, 1, quantum_efficiency=self.quantum_efficiency)

    @property
    def anchor_e(self) -> float:
        """Photo-electrons of the anchor frame, averaged over pixels."""
        return self.quantum_efficiency * self.anchor_flux_per_s * self.exposure_us * 1e-6

    @property
    def bias_e(self) -> float:
        """Electrons of the bias light in a frame."""
        return self.quantum_efficiency * self.bias_flux_per_s * self.exposure_us * 1e-6


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
        """Offsets of the pixels first to stop - 1, electrons, float64."""
        return self.dsnu_e * self._normal(_DSNU_PLANE, first, stop)

    def _normal(self, plane: int, first: int, stop: int) -> np.ndarray:
        row = Medium(1, stop, self.seed, plane=plane).tile(range(first, stop), range(1))
        return row[0].numpy().astype(np.float64)


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
        black_level_dn: DN without any charge, at least 0.
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
        checks.non_negative(read_noise_e=self.read_noise_e, black_level_dn=self.black_level_dn)
        if self.full_well_e is not None:
            checks.positive(full_well_e=self.full_well_e)
        if self.adc_bits is not None:
            checks.integer(adc_bits=self.adc_bits, minimum=1, maximum=24)
            checks.in_range(0, 2**self.adc_bits - 1, black_level_dn=self.black_level_dn)

    @property
    def is_noisy(self) -> bool:
        """Whether two exposures of one pixel may differ."""
        return self.shot_noise or self.read_noise_e > 0

    @property
    def top_dn(self) -> float:
        """Highest digital number; infinite without a converter."""
        return math.inf if self.adc_bits is None else float(2**self.adc_bits - 1)

    @property
    def saturation_e(self) -> float:
        """Electrons at which the full well or the converter ends, whichever is first; may be infinite."""
        well = math.inf if self.full_well_e is None else self.full_well_e
        return min(well, (self.top_dn - self.black_level_dn) / self.gain_dn_per_e)

    def numbers(self) -> tuple[float, float, float, float, float, float]:
        """The stages as the kernels of `opusim.camera.kernels` take them."""
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
        """Mean [DN] and variance [DN squared] of a digital number, exact; see `opusim.camera.number_moments`.

        Args:
            rate_e: expected electrons, at least 0, any shape.
            offset_e: fixed offset of the pixel, electrons; broadcasts with the rates.
        """
        checks.non_negative(rate_e=rate_e)
        base = self.black_level_dn + self.gain_dn_per_e * np.asarray(offset_e, dtype=np.float64)
        return number_moments(np.asarray(rate_e, dtype=np.float64), base, self.numbers())

    def variance_dn2(self, rate_e: np.ndarray | float) -> np.ndarray:
        """K^2 (rate + read_noise^2) + 1/12, DN squared, elementwise; terms that are off are left out.

        An approximation where noise is below 0.4 DN, for rounding then correlates with the signal, and where the full
        well or an end of the converter is met; `moments` is exact, `rounding_limit_dn2` tells how far off this is.
        """
        electrons = np.asarray(rate_e, dtype=np.float64) * float(self.shot_noise) + self.read_noise_e**2
        rounding = 0.0 if self.adc_bits is None else 1.0 / 12.0
        return np.asarray(self.gain_dn_per_e**2 * electrons + rounding)

    def rounding_limit_dn2(self, rate_e: np.ndarray | float) -> np.ndarray:
        """How far `variance_dn2` may be off by rounding at this rate and above, whatever the offset, DN squared."""
        return rounding_limit(np.asarray(rate_e, dtype=np.float64), self.numbers())
