"""Device noise turned into a guarantee by its law; a law without a theorem is refused by name.

| law | readings |
| --- | --- |
| Gaussian | mu = Delta sqrt(readings) / sigma_min |
| photon counts | exact Poisson Renyi divergence over boxes of rates; 0 where total variation is at most delta |
| discrete | refused: masses at one offset are no guarantee |

Source: docs/privacy.md, section 9.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from accounting.devices.photon_counts import (
    box_rdp,
    box_variation,
    epsilon_of_divergence,
    pattern_rdp,
    pattern_variation,
)
from accounting.errors import NoGuarantee
from accounting.guarantee import Adjacency, Assumption, Guarantee, Release, Unit
from accounting.mechanisms import counted
from accounting.standard import gaussian_bounds
from accounting.statement import proven_status
from opusim import checks
from opusim.noise import GaussianNoise, NoiseModel, PhotonCountNoise


@dataclass(frozen=True, kw_only=True)
class DeviceReadings:
    """Readings of private inputs, released as they are, protected by the device's own noise alone.

    Attributes:
        noise: The law; for photon counts its boxes hold every pixel and frame of one reading. The probability beta
            that its certificate is wrong is taken off delta.
        readings: How many readings of one record (or label) leave in all, at least 1.
        distance: Delta >= 0, the largest distance of two inputs' noise-free readings, in units of the reading;
            needed for the Gaussian law, None for photon counts, whose boxes say it.
        unit: Whether an input is a record or a label.
    """

    noise: NoiseModel
    readings: int
    distance: float | None = None
    unit: Unit = Unit.RECORD

    def __post_init__(self) -> None:
        checks.integer(minimum=1, readings=self.readings)
        if self.distance is not None:
            checks.non_negative(distance=self.distance)
        if isinstance(self.noise, GaussianNoise) and self.distance is None:
            raise ValueError(
                "distance = None: the Gaussian law needs the largest distance of two inputs' readings"
            )

    @property
    def beta(self) -> float:
        """Probability that the certificate of the law's numbers is wrong."""
        return self.noise.beta if isinstance(self.noise, (GaussianNoise, PhotonCountNoise)) else 0.0


def device_readings_guarantee(readings: DeviceReadings, delta: float) -> Guarantee:
    """The guarantee of the readings, `proven under a device model`, replace_one.

    Args:
        readings: What was read.
        delta: In (beta, 1); beta is taken off before anything is converted.

    Raises:
        NoGuarantee: The law has no theorem, or delta does not exceed beta.
    """
    checks.in_unit_interval(closed="neither", delta=delta)
    if delta <= readings.beta:
        raise NoGuarantee(f"delta = {delta}: must exceed beta = {readings.beta}, the certificate's own error")
    noise, left = readings.noise, delta - readings.beta
    if isinstance(noise, GaussianNoise):
        mu = gaussian_mu(readings)
        variation = math.erf(mu / math.sqrt(8))  # 2 Phi(mu / 2) - 1
        epsilon = gaussian_bounds(mu, left).upper if variation > left * (1 - 1e-9) else 0.0
        law = "the noise is Gaussian, independent between readings and outputs, of one law for every input"
        source, reason = (
            f"docs/privacy.md, section 9: Gaussian readings, mu = {mu:.6g}",
            "the device adds no noise at some output, or too little for doubles to follow",
        )
    elif isinstance(noise, PhotonCountNoise):
        epsilon = 0.0
        if box_variation(noise, readings.readings) > left:
            epsilon = epsilon_of_divergence(lambda order: readings.readings * box_rdp(noise, order), left)
        law = "counts are independent Poisson counts, and every rate lies in its box"
        source, reason = (
            "docs/privacy.md, section 9: exact Poisson Renyi divergence over boxes of rates, or total variation",
            "a rate may be 0 in its box",
        )
    else:
        raise NoGuarantee(
            f"noise law {noise.law!r}: no theorem turns readings of it into a guarantee (masses at one offset prove "
            "nothing); use a Gaussian or a photon_count law"
        )
    return _guarantee(
        epsilon,
        delta,
        readings.unit,
        mechanism=f"{counted(readings.readings, 'reading')} with the device's own noise: {noise.describe()}",
        source=source,
        law=law,
        beta=readings.beta,
        reason=reason,
    )


def known_counts_guarantee(
    rates: np.ndarray, *, delta: float, beta: float = 0.0, unit: Unit = Unit.LABEL
) -> Guarantee:
    """One reading by photon counts of inputs whose expected counts are known: sharper than boxes around them.

    Args:
        rates: Expected counts of each possible input at every pixel and frame, shape (inputs, pixels).
        delta: In (beta, 1); beta is taken off before anything is converted.
        beta: Probability that a rate is wrong, in [0, 1).
        unit: Whether an input is a record or a label.

    Raises:
        NoGuarantee: delta does not exceed beta.
    """
    checks.in_unit_interval(closed="neither", delta=delta)
    checks.in_unit_interval(closed="left", beta=beta)
    if delta <= beta:
        raise NoGuarantee(f"delta = {delta}: must exceed beta = {beta}, the certificate's own error")
    epsilon, left = 0.0, delta - beta
    if pattern_variation(rates) > left:
        epsilon = epsilon_of_divergence(lambda order: pattern_rdp(rates, order), left)
    return _guarantee(
        epsilon,
        delta,
        unit,
        mechanism=f"one reading of {len(rates)} possible inputs by {rates.shape[1]:,} photon counts",
        source="docs/privacy.md, section 9: exact Poisson Renyi divergence between known rates, or total variation",
        law="counts are independent Poisson counts, and every input's rates are known",
        beta=beta,
        reason="a rate may be 0 for one input and not for another",
    )


def _guarantee(
    epsilon: float,
    delta: float,
    unit: Unit,
    *,
    mechanism: str,
    source: str,
    law: str,
    beta: float,
    reason: str,
) -> Guarantee:
    """A statement about released readings; the reason stands where epsilon is infinite."""
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        unit=unit,
        adjacency=Adjacency.REPLACE_ONE,
        release=Release.EVERY_READING,
        status=proven_status(epsilon, device_model=True),
        mechanism=mechanism,
        source=source,
        assumptions=(
            Assumption(text=law),
            Assumption(text=f"the law's numbers are right, but for a probability of {beta:g}"),
            Assumption(text="what is released is a function of the readings"),
        ),
        reason=reason if math.isinf(epsilon) else None,
    )


def gaussian_mu(readings: DeviceReadings) -> float:
    """Delta sqrt(readings) / sigma_min; infinite where sigma_min is 0 and Delta is not.

    Raises:
        NoGuarantee: The law is not Gaussian.
    """
    if not isinstance(readings.noise, GaussianNoise):
        raise NoGuarantee(f"noise law {readings.noise.law!r}: mu needs a Gaussian law")
    shift = (readings.distance or 0.0) * math.sqrt(readings.readings)
    if shift == 0:
        return 0.0
    return shift / readings.noise.min_std if readings.noise.min_std > 0 else math.inf
