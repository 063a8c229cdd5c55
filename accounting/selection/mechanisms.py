"""Choosing the best of a random number of trials, each mu-GDP in its output and score together.

With Q the density of a trial's (output, score) and a(y) = Q(score > y), a search over K ~ Poisson(m) trials releases
the density A(y) = m e^(-m a(y)) Q(y). Of three bounds on its hockey-stick divergence the least counts (theorem
private-selection).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Self

import numpy as np
from typing_extensions import Doc

from accounting import numerics
from accounting.guarantee import Adjacency, EpsilonBounds, Guarantee, Release
from accounting.mechanisms import (
    CertifiedMechanism,
    Positive,
    certificate_errors,
    proven_guarantee,
    spend_certificates,
)
from accounting.theorems import Theorem

PRIVATE_SELECTION = Theorem(
    name="private-selection",
    title="private selection with a Poisson number of trials",
    statement="The best of K ~ Poisson(m) trials, each mu-GDP in output and score, is (epsilon, delta)-DP for the "
    "least of three epsilons. (1) epsilon^ + m delta(0) with m delta(epsilon^) = delta, delta(.) being that"
    " of mu-GDP. (2) Refined: the epsilon at which m E_Q'[sup_a e^(-m a) (r - e^(epsilon - m g(a)))_+] = "
    "delta, r = dQ/dQ', g(a) = Phi(mu + Phi^-1(a)) - a. (3) The Renyi divergence of a trial plus m "
    "delta(log(1 + 1/(lambda - 1))) + log(m) / (lambda - 1). Several searches add their epsilons at equal "
    "shares of delta.",
    proof="(1) is Theorem 5.1 at e1 = 0, always its best choice. (2) mu-GDP bounds the other world's tail pointwise "
    "by a + g(a); what remains is a convex function of r, so the Gaussian pair dominates it; it is summed over "
    "a grid, each cell at its worst corner. (3) is Theorem 6 of Papernot and Steinke.",
    reference="Koskela, Redberg and Wang 2024; Papernot and Steinke 2022",
    code="accounting.selection.mechanisms.selection_bounds",
    page="convex.md, section 4",
    checked_by_code=(
        "the number of trials is Poisson, drawn once, before any trial and independent of the data",
        "every trial draws its settings independently from the same law, which does not depend on the data",
        "a trial's score is part of what makes it mu-GDP: Gaussian noise hides the held-out records in it",
        "only the best trial's model and score are released; with no trial, nothing is",
    ),
    trusted=("the search is not repeated after seeing its outcome",),
)


@dataclass(frozen=True, kw_only=True)
class PrivateSelection(CertifiedMechanism):
    """The best of K ~ Poisson(m) trials, each mu-GDP with its score; a step counts whole searches."""

    mean: Annotated[Positive, Doc("m > 0, expected number of trials.")]
    mu: Annotated[Positive, Doc("mu > 0 of one trial, for replacing a record.")]
    device_noise: Annotated[bool, Doc("Whether the trials' noise is a device's, of Gaussian law.")] = False

    kind: ClassVar[str] = "private_selection"
    audited: ClassVar[bool] = True
    noise_field: ClassVar[str | None] = "mu"
    noise_is_inverse: ClassVar[bool] = True

    def describe(self) -> str:
        """Return what ran, in a few words."""
        searches = "" if self.steps == 1 else f", {self.steps:,} searches"
        return (
            f"the best of a Poisson number of trials (mean {self.mean:g}), each {self.mu:.4g}-GDP{searches}"
        )

    @classmethod
    def guarantees(cls, mechanisms: Sequence[Self], *, delta: float, enforced: bool) -> list[Guarantee]:
        """Return the sum of all searches' least bounds at equal shares of delta."""
        bounds, reason = spend_certificates(
            delta, certificate_errors(mechanisms), lambda left: _searches(mechanisms, left)
        )
        return [
            proven_guarantee(
                mechanisms,
                theorem=PRIVATE_SELECTION,
                bounds=bounds,
                delta=delta,
                adjacency=Adjacency.REPLACE_ONE,
                assumptions=PRIVATE_SELECTION.assumptions(enforced=enforced),
                device_model=any(mechanism.device_noise for mechanism in mechanisms),
                reason=reason,
                release=Release.LAST_ITERATE,
            )
        ]


def _searches(mechanisms: Sequence[PrivateSelection], delta: float) -> EpsilonBounds:
    """Return the sum of all searches' least bounds at equal shares of delta."""
    share = delta / sum(mechanism.steps for mechanism in mechanisms)
    found = [(one.steps, selection_bounds(one.mu, one.mean, share)) for one in mechanisms]
    epsilon = math.fsum(steps * bounds.upper for steps, bounds in found)
    lower = 0.0 if math.isfinite(epsilon) else math.inf
    return EpsilonBounds(lower=lower, upper=epsilon, method=found[0][1].method)


def selection_bounds(mu: float, mean: float, delta: float) -> EpsilonBounds:
    """Return the least epsilon of the three bounds.

    Args:
        mu: Above 0.
        mean: m > 0.
        delta: In [0, 1).
    """
    if delta == 0 or mu > 25:  # e^(loss) leaves the doubles
        return EpsilonBounds(lower=math.inf, upper=math.inf, method="no numbers")
    candidates = {
        "Theorem 5.1": theorem_epsilon(mu, mean, delta),
        "refined bound": refined_epsilon(mu, mean, delta),
        "Renyi divergence": renyi_epsilon(mu, mean, delta),
    }
    method = min(candidates, key=lambda name: candidates[name])
    return EpsilonBounds(lower=0.0, upper=candidates[method], method=method)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return delta(epsilon) of mu-GDP: Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)."""
    first = float(numerics.normal_cdf(mu / 2 - epsilon / mu))
    return max(
        first - math.exp(min(epsilon + float(numerics.log_normal_cdf(-mu / 2 - epsilon / mu)), 0.0)), 0.0
    )


def theorem_epsilon(mu: float, mean: float, delta: float) -> float:
    """Return Theorem 5.1 at its best, e1 = 0: epsilon^ + m delta(0), where m delta(epsilon^) = delta."""
    inner = (
        numerics.gaussian_bounds(mu, delta / mean).upper if delta < mean * gaussian_delta(mu, 0.0) else 0.0
    )
    return inner + mean * gaussian_delta(mu, 0.0)


def renyi_epsilon(mu: float, mean: float, delta: float) -> float:
    """Return Papernot and Steinke 2022, Theorem 6, converted to epsilon by dp_accounting.

    A trial's Renyi divergence lambda mu^2 / 2 grows by m delta(log(1 + 1 / (lambda - 1))) + log(m) / (lambda - 1).
    """
    orders = 1 + np.logspace(-1.5, 2.5, 400)
    spent = [
        order * mu**2 / 2
        + mean * gaussian_delta(mu, math.log1p(1 / (order - 1)))
        + max(math.log(mean), 0.0) / (order - 1)
        for order in orders.tolist()
    ]
    return numerics.renyi_to_epsilon(orders, np.array(spent), delta)


def refined_epsilon(mu: float, mean: float, delta: float) -> float:
    """Return the refined bound solved for epsilon, by bisection from above."""
    low, high = 0.0, theorem_epsilon(mu, mean, delta)
    if refined_delta(mu, mean, high) > delta:
        return math.inf  # for large mu the cells cost more than the refinement gains
    while high - low > 1e-4 * max(high, 1e-2):
        middle = (low + high) / 2
        low, high = (middle, high) if refined_delta(mu, mean, middle) > delta else (low, middle)
    return high


def refined_delta(mu: float, mean: float, epsilon: float) -> float:
    """Return the refined bound m E[sup_a e^(-m a) (r - e^(epsilon - m g(a)))_+], grid cells at their worst corners."""
    slopes, levels, turns = _lines(mu, mean)
    x = np.linspace(-mu - 9, mu + 9, 8001)
    scale = math.exp(min(epsilon, 600.0))
    ratio = np.exp(mu * x - mu**2 / 2)[1:] / scale  # at each cell's right end: what follows rises with r
    best = np.searchsorted(turns, ratio)
    worst = np.maximum(scale * slopes[best] * (ratio - levels[best]), 0.0)
    # the smaller of both tails: in doubles Phi is 1 from 8.3 on, where r is largest
    masses = np.where(x[:-1] > 0, -np.diff(numerics.normal_cdf(-x)), np.diff(numerics.normal_cdf(x)))
    inside = float(np.sum(masses * worst)) + float(numerics.normal_cdf(x[0]) * worst[0])
    return mean * (
        inside + float(numerics.normal_cdf(mu - x[-1]))
    )  # beyond the grid the sum is at most E[r; x large]


@lru_cache
def _lines(mu: float, mean: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The upper envelope of the lines e^(-m a) (u - e^(-m g(a))) of u: slopes, levels, and where neighbours cross.

    Every line stands for a cell of a, at its worst corner; the cells cover [0, 1].
    """
    a = np.concatenate([[0.0], numerics.normal_cdf(np.linspace(-9, 9, 8001)), [1.0]])
    with np.errstate(divide="ignore"):
        other = np.concatenate([[0.0], numerics.normal_cdf(np.linspace(-9, 9, 8001) + mu), [1.0]])
    slopes, levels = np.exp(-mean * a[:-1]), np.exp(-mean * (other[1:] - a[:-1]))
    highest: list[tuple[float, float]] = []  # slopes rise from left to right
    turns: list[float] = []
    for slope, level in sorted(
        zip(slopes.tolist(), levels.tolist(), strict=True), key=lambda line: (line[0], -line[1])
    ):
        if highest and slope - highest[-1][0] < 1e-15:  # one line above both
            level = min(level, highest.pop()[1])
            turns = turns[: max(len(highest) - 1, 0)]
        while highest:
            turn = (slope * level - highest[-1][0] * highest[-1][1]) / (slope - highest[-1][0])
            if not turns or turn > turns[-1]:
                turns.append(turn)
                break
            highest.pop()
            turns.pop()
        highest.append((slope, level))
    return np.array([s for s, _ in highest]), np.array([level for _, level in highest]), np.array(turns)
