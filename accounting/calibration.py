"""The least noise for a target epsilon; the answer errs toward more privacy and is checked again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from opusim import checks
from opusim.accounting import numerics
from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Guarantee, NoGuarantee
from opusim.accounting.mechanism import Mechanism

_MOST_NOISE = 1e6
_LEAST_NOISE = 1e-2
_RELATIVE = 1e-4

M = TypeVar("M", bound=Mechanism)


def calibrate_noise(mechanism: M, *, target_epsilon: float, delta: float) -> tuple[M, Guarantee]:
    """Return the mechanism with the least noise whose proven epsilon is at most the target.

    Args:
        mechanism: All other parameters; the search begins at its own noise.
        target_epsilon: Above 0, finite.
        delta: In [0, 1).

    Returns:
        The mechanism with its noise set (within 0.02 % above the least), and its guarantee, whose epsilon is at most
        the target.

    Raises:
        NoGuarantee: No noise reaches the target, or the mechanism has no noise to set.
    """
    checks.positive(target_epsilon=target_epsilon)

    def gap(log_noise: float) -> float:
        noisy = mechanism.with_noise(math.exp(log_noise))
        return min(_proven(noisy, delta).epsilon, 1e9) - target_epsilon

    low, high = _bracket(gap, math.log(mechanism.noise), target_epsilon, delta, mechanism)
    noise = math.exp(numerics.find_root(gap, low, high, xtol=_RELATIVE) if low < high else high)
    for _ in range(4):
        answer = mechanism.with_noise(noise)
        guarantee = _proven(answer, delta)
        if guarantee.epsilon <= target_epsilon:
            return answer, guarantee
        noise *= 1 + _RELATIVE
    answer = mechanism.with_noise(math.exp(high))
    return answer, _proven(answer, delta)


def _bracket(
    gap: Callable[[float], float], start: float, target: float, delta: float, mechanism: Mechanism
) -> tuple[float, float]:
    """Logarithms of noise between which the target lies, or equal ones if even the least noise reaches it."""
    low = high = min(max(start, math.log(_LEAST_NOISE)), math.log(_MOST_NOISE))
    if gap(high) > 0:
        while gap(high) > 0:
            if high >= math.log(_MOST_NOISE):
                remedy = "allow more epsilon or delta, fewer steps, smaller batches"
                if delta == 0 and math.isinf(_proven(mechanism.with_noise(_MOST_NOISE), delta).epsilon):
                    remedy = (
                        "its epsilon is infinite at delta = 0 whatever the noise; allow a delta, such as 1e-5"
                    )
                raise NoGuarantee(
                    f"target_epsilon = {target:g}: {mechanism.kind.replace('_', '-')} with noise up to {_MOST_NOISE:g} "
                    f"does not reach it at delta = {delta:g}; {remedy}"
                )
            low, high = high, min(high + math.log(2), math.log(_MOST_NOISE))
        return low, high
    while gap(low) <= 0:
        if low <= math.log(_LEAST_NOISE):
            return low, low
        low, high = max(low - math.log(2), math.log(_LEAST_NOISE)), low
    return low, high


def _proven(mechanism: Mechanism, delta: float) -> Guarantee:
    """The strongest proven guarantee, or the first one, which says why there is none."""
    stated = guarantees([mechanism], delta=delta)
    proven = [guarantee for guarantee in stated if guarantee.is_proven]
    return min(proven, key=lambda guarantee: guarantee.epsilon) if proven else stated[0]
