"""Lower bounds on epsilon that hold after every game of an audit, whenever it stops: bets against a claim.

In each game a fair coin chooses one of two worlds, and an attacker who knows the earlier games guesses which, or
abstains. If the mechanism is (epsilon, delta)-DP, then given the past P(right) <= e^epsilon P(wrong) + delta, so that

    X = 1 + (1[right] - e^epsilon 1[wrong] - delta) / (e^epsilon + delta)

is at least 0 and has mean at most 1. A wealth E starts at 1 and is divided before each game among such X and cash. It
is a supermartingale: under a true claim, E ever reaches 1 / alpha with probability at most alpha (Ville). E is the
e-value of the claim; e-values of independent audits may be multiplied. The lower bound after any number of games is the
largest epsilon that is refuted together with all smaller ones: a confidence sequence.

Here the X differ in the share of games that the attacker guesses (those with the most extreme scores so far) and, under
a Gaussian law, in the point (epsilon, delta) of its curve. The division maximises growth over the games so far and 100
invented games of a mechanism with half the noise. It affects power, never validity.
At delta > 0 the games must come from independent runs, since only then is P(right) bounded given the past. At delta = 0
the canaries of one run may be revealed one by one.
Sources: González, Dulce-Rubio, Ramdas and Ribero 2025 (arXiv 2509.07055); the best division: Cover 1984.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from typing_extensions import Doc

from opusim import checks
from opusim.accounting import numerics
from opusim.accounting.audit import gaussian_mu
from opusim.accounting.guarantee import NoGuarantee
from opusim.accounting.one_run import Law

_SHARES = np.array([1.0, 0.8, 0.6, 0.4, 0.25, 0.15, 0.08, 0.04, 0.02])
"""Shares of the games that are guessed."""
_SLOPES = (0.0, 0.5, 1.0, 2.0)
"""epsilon over mu of the statements of a Gaussian law."""
_INVENTED = 100.0
_FIRST, _LATER = 1000, 8
"""Iterations that compute the first division, and each later one."""
_SURPRISE = 1e-3
"""Share of the invented games whose outcome is uniform, so that no game costs all wealth."""
_KEPT = 0.98
"""Weight of the last division where the next search starts; the first one has the rest, so that no bet stays at 0."""
_LARGEST_E = 1e300
_POWER, _REPEATS = 0.9, 400
"""Power that audits are planned for, and invented audits that estimate it."""
_LEAST_ALTERNATIVE = 1.0
"""Least mu or epsilon that a first division is optimised for."""


@dataclass(frozen=True, kw_only=True)
class AnytimePlan:
    """What is fixed before the first game."""

    delta: Annotated[float, Doc("Of the bounds, in [0, 1).")]
    claimed: Annotated[float | None, Doc("The epsilon to refute, above 0, or None.")] = None
    confidence: Annotated[float, Doc("1 - alpha of the bound at all times together, in (0, 1).")] = 0.95
    law: Annotated[Law, Doc("Gaussian if a theorem says so, which needs a delta above 0.")] = Law.ANY
    centre: Annotated[
        float | None,
        Doc(
            "The score above which the first world is guessed, such as a log-likelihood ratio of 0; by default the "
            "median of the earlier games."
        ),
    ] = None

    def __post_init__(self) -> None:
        checks.in_unit_interval(closed="left", delta=self.delta)
        checks.in_unit_interval(closed="neither", confidence=self.confidence)
        if self.claimed is not None:
            checks.positive(claimed=self.claimed)
        if self.law is Law.GAUSSIAN and self.delta == 0:
            raise NoGuarantee("law = 'gaussian': no Gaussian mechanism has delta = 0; give a delta above 0")


@dataclass(frozen=True, kw_only=True)
class AnytimeResult:
    """The bound after some games, and whether they refute the claim; never a guarantee.

    Attributes:
        plan: The plan of the games.
        games: Number of games played.
        e_value: E-value of the claim, at most 1e300; None without a claim.
        epsilon_lower: The bound, at least 0.
        refuted_at: The game after which the claim was refuted, or None.
        sequence: Pairs (number of games, bound after them).
    """

    plan: AnytimePlan
    games: int
    e_value: float | None
    epsilon_lower: float
    refuted_at: int | None
    sequence: tuple[tuple[int, float], ...]


class _Wealth:
    """The wealth of bets against several hypotheses in one audit, or against one hypothesis in many audits.

    Args:
        law: What is known of the mechanism.
        delta: Delta of a hypothesis that is an epsilon.
        hypotheses: Epsilons, or mus under a Gaussian law.
        aims: The strength that each one's first division is best against, on the same scale.
        repeats: Number of audits; above 1 only with a single hypothesis.
    """

    def __init__(
        self,
        law: Law,
        delta: float,
        hypotheses: tuple[float, ...],
        aims: tuple[float, ...],
        *,
        repeats: int = 1,
    ) -> None:
        self._returns, self._planned, self._first = _bets(law, delta, hypotheses, aims)
        count = max(len(hypotheses), repeats)
        self._division, self._seen = self._first, np.zeros((count, 2 * len(_SHARES)))
        self.logarithm = np.zeros(count)

    def play(self, outcomes: np.ndarray) -> np.ndarray:
        """Play games with one division, and return the logarithm of the wealth after each.

        Outcomes, shape (repeats, games), are the band of a score, plus the number of bands if the guess is wrong.
        """
        held = np.log((self._division[:, None] @ self._returns)[:, 0])
        shape = (len(self._seen), outcomes.shape[1])
        held = np.broadcast_to(held, self._seen.shape)
        gained = np.take_along_axis(held, np.broadcast_to(outcomes, shape), axis=1)
        path: np.ndarray = self.logarithm[:, None] + np.cumsum(gained, axis=1)
        self.logarithm = path[:, -1]
        self._seen = self._seen + (outcomes[:, :, None] == np.arange(self._seen.shape[1])).sum(axis=1)
        return path

    def divide(self) -> None:
        """Divide the wealth anew, by the outcomes so far."""
        start = _KEPT * self._division + (1 - _KEPT) * self._first
        self._division = _divided(self._returns, self._seen + _INVENTED * self._planned, start, _LATER)


@functools.lru_cache(maxsize=32)
def _bets(
    law: Law, delta: float, hypotheses: tuple[float, ...], aims: tuple[float, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the factor of each bet in each outcome, the shares of the invented outcomes, and the first division."""
    statements = np.array([_statements(law, one, delta) for one in hypotheses])
    slope, deltas = np.exp(statements[..., 0])[..., None, None], statements[..., 1][..., None, None]
    bands = len(_SHARES)
    guessed = np.arange(bands)[None, :] >= np.arange(bands)[:, None]  # by share, of a score in each band
    none = np.zeros_like(guessed)
    right, wrong = np.concatenate([guessed, none], 1), np.concatenate([none, guessed], 1)
    bets = 1 + (right - slope * wrong - deltas) / (slope + deltas)
    cash = np.ones((len(bets), 1, 2 * bands))
    returns = np.concatenate([cash, bets.reshape(len(bets), -1, 2 * bands)], axis=1)
    planned = np.stack([_outcomes_of(law, aim) for aim in aims])
    planned = (1 - _SURPRISE) * planned + _SURPRISE / (2 * bands)
    return returns, planned, _divided(returns, planned, np.ones(returns.shape[:2]), _FIRST)


def _divided(returns: np.ndarray, weights: np.ndarray, start: np.ndarray, steps: int) -> np.ndarray:
    """Return a division of the wealth with a larger growth, by some iterations of Cover's algorithm.

    `returns` has the factor of each bet in each outcome, shape (n or 1, bets, outcomes), `weights` those of the
    outcomes.
    """
    shares = weights / weights.sum(axis=-1, keepdims=True)
    division = start / start.sum(axis=-1, keepdims=True)
    for _ in range(steps):
        held = (division[:, None] @ returns)[:, 0]
        division = division * (returns @ (shares / held)[..., None])[..., 0]
    return division


def _statements(law: Law, hypothesis: float, delta: float) -> list[tuple[float, float]]:
    """Return the pairs (epsilon, delta) of a hypothesis: one for an epsilon, points of the curve for a mu."""
    if law is Law.ANY:
        return [(hypothesis, delta)]
    if hypothesis == 0:
        return [(0.0, 0.0)] * len(_SLOPES)
    deltas = _delta_of(hypothesis, np.array(_SLOPES))
    return [(slope * hypothesis, float(delta)) for slope, delta in zip(_SLOPES, deltas, strict=True)]


def _delta_of(mu: float | np.ndarray, slope: np.ndarray) -> np.ndarray:
    """Return delta of a Gaussian mechanism at epsilon = slope mu."""
    outside = np.exp(slope * mu + numerics.log_normal_cdf(-mu / 2 - slope))
    return np.asarray(numerics.normal_cdf(mu / 2 - slope) - outside).clip(min=0.0)


def _outcomes_of(law: Law, strength: float) -> np.ndarray:
    """Return the probability of each outcome for ideal scores of a Gaussian mu or a pure epsilon."""
    if law is Law.ANY:
        widths = -np.diff(np.append(_SHARES, 0.0))
        right = float(numerics.logistic(strength))
        return np.concatenate([widths * right, widths * (1 - right)])
    # |Y| of Y ~ N(mu / 2, 1), where Y > 0 is a right guess
    points = np.linspace(0.0, strength / 2 + 10, 4001)
    right, wrong = (numerics.normal_cdf(sign * strength / 2 - points) for sign in (1, -1))
    edges = np.interp(-_SHARES, -(right + wrong), points)
    above = [np.append(numerics.normal_cdf(sign * strength / 2 - edges), 0.0) for sign in (1, -1)]
    return np.concatenate([-np.diff(each) for each in above])


def _rebalanced(games: int) -> int:
    """Return the number of games at the division that follows one after `games`."""
    return games + max(1, games // 16)


class AnytimeAudit:
    """Plays game by game against a claim and against a grid of epsilons; may be read after any game.

    Args:
        plan: The plan of the games.
        bounds: Whether to bet against the grid too; without it only the claim is tested, in less time.

    Raises:
        ValueError: Neither a claim nor a grid.
    """

    def __init__(self, plan: AnytimePlan, *, bounds: bool = True) -> None:
        if plan.claimed is None and not bounds:
            raise ValueError("plan.claimed is missing: without bounds there must be a claim to bet against")
        self.plan = plan
        self._grid, self._epsilons = _grid(plan.law, plan.delta) if bounds else ((), ())
        hypotheses = list(self._grid)
        aims = [max(2 * one, _LEAST_ALTERNATIVE) for one in hypotheses]
        if plan.claimed is not None:
            claim = strength_of(plan.law, plan.claimed, plan.delta)
            hypotheses, aims = [claim, *hypotheses], [2 * claim, *aims]
        self._wealth = _Wealth(plan.law, plan.delta, tuple(hypotheses), tuple(aims))
        self._highest = np.zeros(len(hypotheses))
        self._past, self._centre, self._ordered = np.zeros(0), plan.centre or 0.0, np.zeros(0)
        self._divide_at = 1
        self._refuted_at: int | None = None
        self._sequence: list[tuple[int, float]] = []

    def add(self, scores: np.ndarray, inside: np.ndarray) -> None:
        """Play games, one after another, of scores, higher if the first world seems played, and coins, shape (n,)."""
        checks.shape((len(inside),), scores=scores)
        checks.finite(scores=scores)
        scores, inside = np.asarray(scores, dtype=float), np.asarray(inside, dtype=bool)
        start = 0
        while start < len(scores):
            stop = min(len(scores), start + self._divide_at - len(self._past))
            self._play(scores[start:stop], inside[start:stop])
            start = stop

    def _play(self, scores: np.ndarray, inside: np.ndarray) -> None:
        """Play games with one division of the wealth and the thresholds of the games before them."""
        done = len(self._past)
        away = scores - self._centre
        larger = len(self._ordered) - np.searchsorted(self._ordered, np.abs(away))
        share = (1 + larger) / (len(self._ordered) + 1)
        band = np.searchsorted(-_SHARES, -share, side="right") - 1
        right = (away > 0) == inside
        path = self._wealth.play(np.where(right, band, band + len(_SHARES))[None])
        self._highest = np.maximum(self._highest, path.max(axis=1))
        if self.plan.claimed is not None and self._refuted_at is None:
            reached = np.flatnonzero(path[0] >= self._needed)
            self._refuted_at = done + 1 + int(reached[0]) if len(reached) else None
        self._past = np.append(self._past, scores)
        if len(self._past) == self._divide_at:
            self._wealth.divide()
            if self.plan.centre is None:
                self._centre = float(np.median(self._past))
            self._ordered = np.sort(np.abs(self._past - self._centre))
            self._divide_at = _rebalanced(self._divide_at)
            self._sequence.append((len(self._past), self._bound()))

    @property
    def _needed(self) -> float:
        """The logarithm of the wealth that refutes."""
        return -math.log(1 - self.plan.confidence)

    def _bound(self) -> float:
        """Return the largest epsilon that is refuted along with all smaller ones."""
        reached = self._highest[-len(self._epsilons) :] >= self._needed if self._epsilons else np.zeros(0)
        count = int(np.argmin(np.append(reached, False)))
        return self._epsilons[count - 1] if count else 0.0

    @property
    def result(self) -> AnytimeResult:
        """The result of the games so far."""
        games, claimed = len(self._past), self.plan.claimed
        kept = [one for one in self._sequence if one[0] < games]
        return AnytimeResult(
            plan=self.plan,
            games=games,
            e_value=None
            if claimed is None
            else min(math.exp(min(self._wealth.logarithm[0], 700.0)), _LARGEST_E),
            epsilon_lower=self._bound(),
            refuted_at=self._refuted_at,
            sequence=(*kept, (games, self._bound())),
        )


def audit_anytime(scores: np.ndarray, inside: np.ndarray, plan: AnytimePlan) -> AnytimeResult:
    """Return the result of games in this order, from their scores and coins, shape (n,)."""
    game = AnytimeAudit(plan)
    game.add(scores, inside)
    return game.result


def in_coin_order(first: np.ndarray, second: np.ndarray, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores and coins of fair games between two worlds, until one world's scores are used up.

    More independent scores of the same worlds continue the same games; the seed is that of the coins.
    """
    coins = np.random.default_rng(seed).random(len(first) + len(second)) < 0.5
    heads, tails = np.cumsum(coins), np.cumsum(~coins)
    games = int(np.sum((heads <= len(first)) & (tails <= len(second))))
    coins = coins[:games]
    scores = np.empty(games)
    scores[coins], scores[~coins] = first[: coins.sum()], second[: (~coins).sum()]
    return scores, coins


def strength_of(law: Law, epsilon: float, delta: float) -> float:
    """Return the mu of an epsilon at delta under a Gaussian law, else the epsilon itself."""
    return gaussian_mu(epsilon, delta) if law is Law.GAUSSIAN else epsilon


@functools.lru_cache(maxsize=16)
def _grid(law: Law, delta: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the hypotheses that are bet against, ascending, and the epsilon of each."""
    if law is Law.ANY:
        grid = tuple(np.round(np.linspace(0.0, 10.0, 101), 1).tolist())
        return grid, grid
    mus = np.geomspace(0.05, 12.0, 99)
    low, high = np.zeros(len(mus)), np.full(len(mus), 700.0)
    for _ in range(60):  # bisect for each mu's epsilon at this delta; `low` stays at or below it
        middle = (low + high) / 2
        small = _delta_of(mus, middle / mus) > delta
        low, high = np.where(small, middle, low), np.where(small, high, middle)
    return (0.0, *mus.tolist()), (0.0, *low.tolist())


@functools.lru_cache(maxsize=256)
def _refutations(plan: AnytimePlan, ratio: float, most: int) -> tuple[int, ...]:
    """Return, in ascending order, the games that each invented audit with ideal scores needs to refute, or `most` + 1.

    All audits stop once 90 % have refuted.
    """
    if plan.claimed is None:
        raise ValueError("plan.claimed is missing: only a claim can be refuted")
    claim = strength_of(plan.law, plan.claimed, plan.delta)
    wealth = _Wealth(plan.law, plan.delta, (claim,), (2 * claim,), repeats=_REPEATS)
    law, found = _outcomes_of(plan.law, ratio * claim), np.full(_REPEATS, most + 1)
    generator, done, stop = np.random.default_rng(0), 0, 1
    while done < most and np.mean(found <= most) <= _POWER:
        outcomes = generator.choice(len(law), size=(_REPEATS, stop - done), p=law / law.sum())
        reached = wealth.play(outcomes) >= -math.log(1 - plan.confidence)
        first = done + 1 + np.argmax(reached, axis=1)
        found = np.where((found > most) & reached.any(axis=1), first, found)
        wealth.divide()
        done, stop = stop, min(_rebalanced(stop), most)
    return tuple(np.sort(found).tolist())


def games_needed(plan: AnytimePlan, ratio: float, *, most: int) -> int:
    """Return the number of games that refute a weaker mechanism with power 0.9, if scores are ideal.

    `ratio` > 1 is the claim's noise over its noise under a Gaussian law, else its epsilon over the claim's. The search
    ends after `most` games with a larger number if they do not suffice.
    """
    return _refutations(plan, ratio, most)[math.ceil(_POWER * _REPEATS) - 1]


def power_within(plan: AnytimePlan, ratio: float, games: int) -> float:
    """Return the probability of refuting a weaker mechanism within some games, to 0.02; see `games_needed`.

    The search stops a little above 0.9 and returns no larger probability.
    """
    return float(np.mean(np.array(_refutations(plan, ratio, games)) <= games))


def smallest_ratio(plan: AnytimePlan, games: int) -> float | None:
    """Return the least ratio of `games_needed`, to a tenth, that these games refute; None if 16 is too small."""
    low, high = 10, 161  # tenths: `low` is too small, `high` suffices
    while high - low > 1:
        middle = (low + high) // 2
        enough = games_needed(plan, middle / 10, most=games) <= games
        low, high = (low, middle) if enough else (middle, high)
    return high / 10 if high <= 160 else None
