"""From a target epsilon to a descent: the least noise, the least regularisation, or the most epochs that reach it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from accounting import numerics
from accounting.calibration import calibrate_noise
from accounting.convex.constants import smoothness
from accounting.convex.mechanisms import ConvexLastIterate, learning_rates, proven_mu
from accounting.errors import NoGuarantee
from opusim import checks


@dataclass(frozen=True, kw_only=True)
class PricedDescent:
    """A descent that reaches an epsilon, with what it costs and how noisy it is.

    Attributes:
        mechanism: The descent with its noise.
        epsilon: Its cost, at most the target.
        weight_noise: Standard deviation of all noise on a weight at lambda = 0, in units of C / records: the most that
            a test record's logit can move. It ranks descents of one learning rate, batch and length by utility.
    """

    mechanism: ConvexLastIterate
    epsilon: float
    weight_noise: float


def priced_descents(
    mechanism: ConvexLastIterate, *, target_epsilon: float, delta: float, epochs: tuple[int, ...]
) -> list[PricedDescent]:
    """Return the least noise at each number of epochs; fewer epochs need less noise.

    Args:
        mechanism: All other parameters.
        target_epsilon: Above 0.
        delta: In (0, 1).
        epochs: Numbers to try.
    """
    found = []
    for number in epochs:
        one, guarantee = calibrate_noise(
            replace(mechanism, epochs=number), target_epsilon=target_epsilon, delta=delta
        )
        rates = learning_rates(one)
        shares = math.hypot(math.sqrt(float(rates @ rates)), one.final_noise * one.learning_rate)
        noise = shares * one.noise_multiplier * one.batches
        found.append(PricedDescent(mechanism=one, epsilon=guarantee.epsilon, weight_noise=noise))
    return found


def least_regularisation(
    mechanism: ConvexLastIterate, *, target_epsilon: float, delta: float
) -> ConvexLastIterate:
    """Return the least lambda with which this noise reaches the target, as the paper does.

    Args:
        mechanism: All other parameters; its own lambda is ignored.
        target_epsilon: Above 0.
        delta: In (0, 1).

    Raises:
        NoGuarantee: No lambda reaches it.
    """
    checks.positive(target_epsilon=target_epsilon)

    def costs(regularisation: float) -> float:
        return _epsilon(replace(mechanism, regularisation=regularisation), delta)

    # beyond 1 / eta - beta / 2 the steepest direction overshoots, and c grows again
    low, high = 0.0, 1 / mechanism.learning_rate - smoothness(mechanism.objective) / 2
    if high <= 0 or costs(high) > target_epsilon:
        raise NoGuarantee(
            f"target_epsilon = {target_epsilon:g}: no regularisation up to {max(high, 0.0):g} reaches it with "
            f"noise_multiplier = {mechanism.noise_multiplier:g}; use more noise or fewer epochs"
        )
    if costs(low) <= target_epsilon:
        return replace(mechanism, regularisation=low)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2 if low else high / 2
        low, high = (middle, high) if costs(middle) > target_epsilon else (low, middle)
        if high < 1e-12:
            break
    return replace(mechanism, regularisation=high)


def most_epochs(mechanism: ConvexLastIterate, *, target_epsilon: float, delta: float) -> ConvexLastIterate:
    """Return the most epochs that this noise allows within the target, up to 2^20 steps.

    Args:
        mechanism: All other parameters.
        target_epsilon: Above 0.
        delta: In (0, 1).

    Raises:
        NoGuarantee: A single epoch exceeds the target.
    """
    checks.positive(target_epsilon=target_epsilon)

    def fits(epochs: int) -> bool:
        return _epsilon(replace(mechanism, epochs=epochs), delta) <= target_epsilon

    if not fits(1):
        raise NoGuarantee(
            f"target_epsilon = {target_epsilon:g}: one epoch with noise_multiplier = {mechanism.noise_multiplier:g} "
            "costs more; use more noise"
        )
    largest = max(2**20 // mechanism.batches, 1)
    return replace(mechanism, epochs=_last(fits, largest))


def _last(fits: Callable[[int], bool], largest: int) -> int:
    """The largest number up to `largest` that fits; 1 does."""
    low = high = 1
    while high < largest and fits(min(2 * high, largest)):
        low = high = min(2 * high, largest)
    high = min(2 * high, largest + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _epsilon(mechanism: ConvexLastIterate, delta: float) -> float:
    return numerics.gaussian_bounds(proven_mu(mechanism), delta).upper
