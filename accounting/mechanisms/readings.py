"""Guarantees from a device's own noise, by its law; a law without a theorem is refused by name.

The divergences of photon counts are summed over pixels and frames. Whatever happens to counts later (gain, read noise,
full well, rounding, linear recovery) is post-processing. A discrete law is refused: masses at one offset are no
guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from opusim import checks
from opusim.accounting import numerics
from opusim.accounting.guarantee import (
    Adjacency,
    Assumption,
    EpsilonBounds,
    Guarantee,
    NoGuarantee,
    Release,
    Unit,
)
from opusim.accounting.mechanism import counted, proven_status
from opusim.accounting.theorems import Theorem
from opusim.noise import FluctuatingCountNoise, GaussianNoise, NoiseModel, PhotonCountNoise

_ROUNDING_UP = 1 + 1e-9  # above the rounding of sums of doubles
ORDERS = tuple(float(order) for order in 1 + np.logspace(-2, 4, 200))

GAUSSIAN_READINGS = Theorem(
    name="gaussian-readings",
    title="Gaussian readings of a device",
    statement="n readings whose noise is Gaussian with a covariance V that does not depend on the input are mu-GDP "
    "with mu = Delta sqrt(n) / sigma, Delta the largest distance of two inputs' noise-free readings, "
    "sigma^2 the smallest eigenvalue of V.",
    proof="V >= sigma^2 I, so the reading is a post-processing of one with covariance sigma^2 I. A variance without "
    "the law proves nothing: laws of one variance give delta(epsilon = 3) of 0.75 and 3e-10.",
    reference="Dong, Roth and Su 2019",
    code="opusim.accounting.mechanisms.readings.mu_of_readings",
    page="privacy-labels.md, section 6",
    trusted=("the noise is Gaussian, independent between readings and outputs, of one law for every input",),
)
PHOTON_COUNTS = Theorem(
    name="photon-counts",
    title="exact Poisson Renyi divergence, or total variation",
    statement="D_alpha(Poisson(a) || Poisson(b)) = (a^alpha b^(1-alpha) - alpha a + (alpha - 1) b) / (alpha - 1), "
    "summed over independent pixels and frames. Over boxes of rates it is largest at a corner. If the total"
    " variation, at most min(sqrt(1 - exp(-sum (sqrt a - sqrt b)^2)), 1 - exp(-sum |a - b|)), is at most "
    "delta, epsilon is 0.",
    proof="The divergence is a sum over counts and jointly convex in (a, b); it is homogeneous, so more light is less"
    " private, and infinite at b = 0 < a, which dark or bias light prevents. Total variation is bounded by "
    "Bhattacharyya's coefficient and by coupling the counts. Gain, read noise, full well, rounding and linear "
    "recovery are post-processing.",
    code="opusim.accounting.mechanisms.readings.poisson_divergence",
    page="privacy-labels.md, section 7",
    trusted=("counts are independent Poisson counts, and every rate lies in its box",),
)
FLUCTUATING_LIGHT = Theorem(
    name="fluctuating-light",
    title="photon counts under light that varies in common",
    statement="Let W >= 0 have any joint law over frames, pixels, records and steps whose conditional law given the "
    "past release does not depend on the data; given W = w let counts be independent Poisson(w lambda(x) + d), with d "
    "of at least d_min and independent of the data. Let F be the frames whose pattern depends on a record, and P(max "
    "of W over F > w_max) <= beta. Then H_k is at most that of the product of Poisson(w_max lambda + d_min) over F, "
    "plus beta, even if W and all dark and anchor frames are released.",
    proof="Condition on W, whose law is the same for both data sets: H_k is jointly convex, so it is at most its mean "
    "over W; powers above w_max cost at most beta. At w <= w_max, thin Poisson(w_max lambda + d_min) by w / w_max and "
    "add independent Poisson(d - d_min w / w_max), a rate of at least 0: Poisson(w lambda + d), a post-processing "
    "without the data. Homogeneity is not enough, since dark light does not scale with W. delta is that of steady "
    "counts plus beta of the use plus beta of the certificate; conversions to epsilon come after the convexity.",
    code="opusim.accounting.mechanisms.readings.least_epsilon",
    page="privacy-labels.md, section 9",
    trusted=(
        "given the light's power, counts are independent Poisson counts, and every rate lies in its box",
        "the power has the stated law in every frame and depends neither on patterns (heated mirrors, back reflection) "
        "nor on data; no gain or exposure is set automatically; calibration and use have one law",
    ),
)


@dataclass(frozen=True, kw_only=True)
class DeviceReadings:
    """Readings of private inputs, released as they are, protected only by the device's own noise.

    Attributes:
        noise: The law; for photon counts its boxes hold every pixel and frame of one reading. The probability beta
            that its certificate is wrong is taken off delta.
        readings: Number of released readings of one record (or label), at least 1.
        distance: Delta >= 0, the largest distance of two inputs' noise-free readings, in units of the reading;
            needed for the Gaussian law; None for photon counts, whose boxes contain it.
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


def device_readings_guarantee(readings: DeviceReadings, delta: float) -> Guarantee:
    """Return the guarantee of the readings, `proven under a device model`, replace_one.

    beta is taken off delta before anything is converted. Raises NoGuarantee if the law has no theorem, or delta does
    not exceed beta.
    """
    checks.in_unit_interval(closed="neither", delta=delta)
    if delta <= readings.noise.beta:
        raise NoGuarantee(
            f"delta = {delta}: must exceed beta = {readings.noise.beta}, the certificate's own error"
        )
    noise, left = readings.noise, delta - readings.noise.beta
    also: tuple[str, ...] = ()
    reason = "a rate may be 0 in its box"
    if isinstance(noise, GaussianNoise):
        mu = mu_of_readings(readings)
        variation = math.erf(mu / math.sqrt(8))  # 2 Phi(mu / 2) - 1
        epsilon = numerics.gaussian_bounds(mu, left).upper if variation > left * (1 - 1e-9) else 0.0
        theorem, case = GAUSSIAN_READINGS, f"mu = {mu:.6g}"
        reason = "the device adds no noise at some output, or too little for doubles to follow"
    elif isinstance(noise, FluctuatingCountNoise):
        least = least_epsilon(noise, readings.readings, left)
        epsilon, theorem = least.epsilon, FLUCTUATING_LIGHT
        case = f"over boxes of rates up to {least.brightest:.6g} of the mean light"
        also = (
            FLUCTUATING_LIGHT.trusted[1],
            f"delta holds beta of use = {least.beta:.3g}: the probability that a frame is brighter than that",
        )
    elif isinstance(noise, PhotonCountNoise):
        epsilon, theorem = _box_epsilon(noise, readings.readings, left), PHOTON_COUNTS
        case = "over boxes of rates"
    else:
        raise NoGuarantee(
            f"noise law {noise.law!r}: no theorem turns readings of it into a guarantee (masses at one offset prove "
            "nothing); use a Gaussian, a photon_count or a fluctuating_photon_count law"
        )
    stated = readings_guarantee(
        EpsilonBounds(lower=0.0, upper=epsilon, method=case),
        theorem,
        delta=delta,
        beta=readings.noise.beta,
        unit=readings.unit,
        mechanism=f"{counted(readings.readings, 'reading')} with the device's own noise: {noise.describe()}",
        also=also,
        reason=reason,
    )
    return replace(stated, epsilon_lower=None)  # none is computed


def readings_guarantee(
    bounds: EpsilonBounds,
    theorem: Theorem,
    *,
    delta: float,
    beta: float,
    unit: Unit,
    mechanism: str,
    also: tuple[str, ...],
    reason: str,
) -> Guarantee:
    """Return the statement of a theorem about readings with a device's own noise.

    The bounds hold at what beta leaves of delta. The first of the theorem's trusted hypotheses is the law of the noise,
    `also` follow it. `mechanism` says in a few words what was read, `reason` why epsilon is infinite, if it is.
    """
    infinite = math.isinf(bounds.upper)
    texts = (
        theorem.trusted[0],
        *also,
        f"the law's numbers are right, but for a probability of {beta:g}",
        "what is released is a function of the readings",
    )
    return Guarantee(
        epsilon=bounds.upper,
        delta=delta,
        unit=unit,
        adjacency=Adjacency.REPLACE_ONE,
        release=Release.EVERY_READING,
        status=proven_status(bounds.upper, device_model=True),
        mechanism=mechanism,
        source=f"{theorem.citation}; {bounds.method}",
        assumptions=tuple(Assumption(text=text) for text in texts),
        epsilon_lower=None if infinite else bounds.lower,
        reason=reason if infinite else None,
    )


def _box_epsilon(boxes: PhotonCountNoise, times: int, delta: float) -> float:
    """Return epsilon of several readings of steady counts; 0 if their total variation is at most delta."""
    if box_variation(boxes, times) <= delta:
        return 0.0
    return epsilon_of_divergence(lambda order: times * box_rdp(boxes, order), delta)


@dataclass(frozen=True, kw_only=True)
class BrightestLight:
    """The brightest light that an epsilon covers.

    Attributes:
        epsilon: Epsilon of all readings.
        beta: Probability that any frame is brighter, taken off delta.
        brightest: w_max, relative to the mean power.
    """

    epsilon: float
    beta: float
    brightest: float


def least_epsilon(noise: FluctuatingCountNoise, readings: int, delta: float) -> BrightestLight:
    """Return the least epsilon over how delta is shared between beta of use and the counts; theorem fluctuating-light.

    Every share gives a valid epsilon, so a coarse search is enough: shares delta / 2^(k/2). Each of the readings takes
    `noise.frames` frames; the certificate's beta is off delta already.
    """
    frames = readings * noise.frames

    def found(beta: float) -> BrightestLight:
        return BrightestLight(
            epsilon=_box_epsilon(noise.at_most(frames, beta), readings, delta - beta),
            beta=beta,
            brightest=noise.power.limit(beta / frames) if beta else 1.0,
        )

    if noise.power_rms == 0:
        return found(0.0)
    best = found(delta * 2**-0.5)
    for k in range(2, 31):
        other = found(delta * 2.0 ** (-0.5 * k))
        if other.epsilon > 1.02 * best.epsilon:
            break
        best = other if other.epsilon < best.epsilon else best
    return best


def mu_of_readings(readings: DeviceReadings) -> float:
    """Return Delta sqrt(readings) / sigma_min, infinite for sigma_min 0; raise NoGuarantee for other laws."""
    if not isinstance(readings.noise, GaussianNoise):
        raise NoGuarantee(f"noise law {readings.noise.law!r}: mu needs a Gaussian law")
    shift = (readings.distance or 0.0) * math.sqrt(readings.readings)
    if shift == 0:
        return 0.0
    return shift / readings.noise.min_std if readings.noise.min_std > 0 else math.inf


def poisson_divergence(a: np.ndarray | float, b: np.ndarray | float, order: float) -> np.ndarray:
    """Return b (expm1(alpha t) - alpha expm1(t)) / (alpha - 1) with t = log(a/b), rounded up; elementwise."""
    checks.non_negative(a=a, b=b)
    checks.positive(order_above_1=order - 1)
    a, b = np.broadcast_arrays(np.asarray(a, dtype=float), np.asarray(b, dtype=float))
    safe = np.where(b > 0, b, 1.0)
    with np.errstate(over="ignore", divide="ignore"):
        t = np.log1p((a - safe) / safe)
        up, once = np.expm1(order * t), np.expm1(t)
        slack = 8 * np.finfo(float).eps * order * (np.abs(up) + np.abs(once) + 2)
        value = safe * (up - order * once + np.where(a == safe, 0.0, slack)) / (order - 1)
    value = np.where(np.isfinite(value), np.maximum(value, 0.0), np.inf)
    return np.where(b > 0, value, np.where(a > 0, np.inf, 0.0))


def box_rdp(noise: PhotonCountNoise, order: float) -> float:
    """Return the sum over pixels and frames of the largest divergence between two rates of the same box.

    It is attained at a corner, (low, high) or (high, low); equal rates give 0.
    """
    low, high = np.asarray(noise.rate_low), np.asarray(noise.rate_high)
    worst = np.maximum(poisson_divergence(high, low, order), poisson_divergence(low, high, order))
    return float(np.sum(worst))


def box_variation(noise: PhotonCountNoise, readings: int = 1) -> float:
    """Return an upper limit of the total variation distance of any two points of the boxes, over several readings.

    min( sqrt(1 - exp(-root_distance)), 1 - exp(-distance) ), rounded up, where root_distance = sum (sqrt a - sqrt b)^2
    and distance = sum |a - b| over pixels and frames. The first is sqrt(1 - BC^2) with the Bhattacharyya coefficient
    BC = exp(-root_distance / 2); the second couples the counts, b = a + Poisson(b - a), which differ with that
    probability. If it is at most delta, (0, delta) holds, which no Renyi curve proves.
    """
    low, high = np.asarray(noise.rate_low), np.asarray(noise.rate_high)
    root_distance = readings * float(np.sum(np.square(np.sqrt(high) - np.sqrt(low)))) * _ROUNDING_UP
    distance = readings * float(np.sum(high - low)) * _ROUNDING_UP
    limit = min(math.sqrt(-math.expm1(-root_distance)), -math.expm1(-distance))
    return min(1.0, limit * _ROUNDING_UP)


def epsilon_of_divergence(divergence: Callable[[float], float], delta: float) -> float:
    """Return dp_accounting's conversion of a Renyi divergence over `ORDERS`; infinite if no order is finite.

    Divergences rise with the order, and a conversion takes at most log(a / (a - 1)) + log(a) / (a - 1) < 6 off them at
    orders a >= 1.01: once one exceeds the best epsilon so far by 6, higher orders are left out. Leaving out orders is
    always sound.
    """
    checks.in_unit_interval(closed="neither", delta=delta)
    pairs, best = [], math.inf
    for order in ORDERS:
        value = divergence(order)
        if math.isfinite(value):
            pairs.append((order, value))
        if value > best + 6:
            break
        if math.isfinite(value):
            best = min(best, numerics.renyi_to_epsilon([order], [value], delta))
    if not pairs:
        return math.inf
    orders, values = zip(*pairs, strict=True)
    epsilon = numerics.renyi_to_epsilon(orders, values, delta)
    return epsilon if epsilon >= 0 else math.inf
