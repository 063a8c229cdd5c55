"""Games of a private search: one held-out record differs, or one training record.

**A held-out record.** Held-out records score a trial. In the first world one more of them is classified rightly by
every trial's model, which moves each score by 1 / n: with noise N(0, (1 / (n mu))^2) that is mu-GDP, and the worst case
of the theorem's premise. The number of trials, the noise of their scores and the choice are the code of `opusim tune`.
In units of the noise the best score y of K ~ Poisson(m) trials of law Q has the density m e^(-m (1 - Q(y))) q(y), so
that the attacker's likelihood ratio is exact. A search without a trial tells nothing.

**A training record** (theorem selection-of-noisy-sums). Every trial makes all steps of a run under record protection,
through its sampler, clip and noise, and the best trial's updates are released. The auditor owns the held-out records,
so that a trial's accuracy grows with the likelihood ratio of its updates, and the noise of the scores is too small to
change their order.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from opusim.accounting import numerics
from opusim.accounting.composition import calibrate_noise
from opusim.accounting.guarantee import Adjacency, Release
from opusim.accounting.mechanisms.selection import NoisyTrial, PrivateSelection
from opusim.randomness.streams import derive_seed
from opusim.training.attacks.base import Adversary
from opusim.training.attacks.games import (
    LARGE,
    OPPOSITE,
    RECORDS,
    TwoWorlds,
    in_passes,
    on_one_layer,
    writer_of,
    written,
)
from opusim.training.attacks.one_run.observers import log_ratio
from opusim.training.engine.plan import RunPlan
from opusim.training.sweeps.tuning import best_of, draw_trials, noisy_score

_HELD_OUT = 1000
_MANY_HELD_OUT = 10**12
"""So many that the noise of a score does not change the order of trials."""
_SCORE_MU = 0.1
"""mu of a trial's score, with which the scores cost far less than the models."""
_CHOICES = {"optimizer.lr": ["0.1", "0.2"]}


class SelectionGame(TwoWorlds):
    """A held-out record is classified rightly by every trial, or wrongly.

    Args:
        mean: m, expected number of trials.
        mu: Of one trial, as the search is accounted.
        noise_share: Share of the noise that the scores get; below 1 breaks the guarantee.
    """

    title = "the best of a Poisson number of trials"
    pair = "one held-out record is classified rightly, or wrongly"
    adversaries = (
        Adversary(
            name="likelihood ratio",
            sees="the best trial's score",
            knows="all other records, the trials' models and the law of their number and noise",
        ),
    )

    def __init__(self, mean: float, mu: float, *, noise_share: float = 1.0) -> None:
        self._mean, self._mu, self._share = mean, mu, noise_share

    @property
    def mechanism(self) -> PrivateSelection:
        return PrivateSelection(mean=self._mean, mu=self._mu)

    @property
    def actual(self) -> PrivateSelection:
        return PrivateSelection(mean=self._mean, mu=self._mu / self._share)

    def scores(self, count: int, *, first: bool, seed: int) -> np.ndarray:
        found = [
            self._search(derive_seed(seed, "search", number) >> 1, first=first) for number in range(count)
        ]
        return np.array(found)[None]

    def weakened(self) -> SelectionGame:
        """See TwoWorlds.weakened: a quarter of the noise."""
        return SelectionGame(self._mean, self._mu, noise_share=self._share / 4)

    def _search(self, seed: int, *, first: bool) -> float:
        """Return the log-likelihood ratio of one search."""
        trials = draw_trials(_CHOICES, self._mean, seed=seed).trials
        if not trials:
            return 0.0
        right, mu = int(first), self._mu / self._share
        scores = {
            number: noisy_score(
                right, _HELD_OUT, mu, mode="experiment", seed=derive_seed(seed, "trial", number) >> 1
            )
            for number in range(len(trials))
        }
        y = scores[best_of(scores)] * _HELD_OUT * self._mu
        above, above_first = (float(numerics.normal_cdf(shift - y)) for shift in (0.0, self._mu))
        return self._mean * (above - above_first) + self._mu * y - self._mu**2 / 2


def selection(mean: float, epsilon: float, delta: float) -> SelectionGame:
    """Return the game of a search within an epsilon."""
    start = PrivateSelection(mean=mean, mu=0.5)
    return SelectionGame(mean, calibrate_noise(start, target_epsilon=epsilon, delta=delta)[0].mu)


class SelectedModelGame(TwoWorlds):
    """A training record is in every trial, or in none.

    Args:
        plan: A run under record protection on secret batches, whose writer of gradients is played on the auditor's
            layer; a trial is such a run.
        mean: m, expected number of trials.
        accounted: What the search is accounted as; None takes the plan's own noise.
    """

    title = "the best model of a Poisson number of trials"
    pair = "a record is in the training set, or left out"
    together = 20_000
    adversaries = (
        Adversary(
            name="likelihood ratio",
            sees="every update of the best trial",
            knows="all other records, the law of the trials' number, batches and noise; it chose the held-out records",
        ),
    )

    def __init__(self, plan: RunPlan, mean: float, accounted: PrivateSelection | None = None) -> None:
        self._plan, self._mean = plan, mean
        self._accounted = self.actual if accounted is None else accounted

    @property
    def mechanism(self) -> PrivateSelection:
        return self._accounted

    @property
    def actual(self) -> PrivateSelection:
        (step,) = self._plan.mechanisms
        return PrivateSelection(
            mean=self._mean,
            mu=_SCORE_MU,
            trials=(NoisyTrial.of(step.repeated(self._plan.total_steps)),),
            adjacency=Adjacency.ADD_OR_REMOVE_ONE,
            release=Release.EVERY_UPDATE,
        )

    def scores(self, count: int, *, first: bool, seed: int) -> np.ndarray:
        searches = [
            len(draw_trials(_CHOICES, self._mean, seed=derive_seed(seed, "search", number) >> 1).trials)
            for number in range(count)
        ]
        ratios = in_passes(sum(searches), RECORDS, lambda own: self._pass(own, first=first), seed=seed)[0]
        starts = np.cumsum([0, *searches])
        found = [
            self._best(ratios[start:end], derive_seed(seed, "scores", number) >> 1)
            for number, (start, end) in enumerate(pairwise(starts))
        ]
        return np.array(found)[None]

    def weakened(self) -> SelectedModelGame:
        """See TwoWorlds.weakened: a quarter of the noise at every step of every trial."""
        quarter = self._plan.protection.noise_multiplier / 4
        return SelectedModelGame(
            self._plan.unchecked(protection={"noise_multiplier": quarter}), self._mean, self._accounted
        )

    def _best(self, ratios: np.ndarray, seed: int) -> float:
        """Return the likelihood ratio of the best trial's updates; 0 without a trial."""
        scores = {
            number: noisy_score(
                round(float(numerics.logistic(ratio)) * _MANY_HELD_OUT),
                _MANY_HELD_OUT,
                _SCORE_MU,
                mode="experiment",
                seed=seed + number,
            )
            for number, ratio in enumerate(ratios)
        }
        return float(ratios[best_of(scores)]) if scores else 0.0

    def _pass(self, seed: int, *, first: bool) -> np.ndarray:
        """Return the log-likelihood ratios of `RECORDS` trials, each of a record and a layer's column of its own."""
        (accounted,) = self._accounted.trials
        q, z = accounted.probability, accounted.scale
        plan = on_one_layer(self._plan, seed, {"scheme": "poisson", "sampling_probability": q})
        plan = plan.unchecked(protection={"divisor": 1.0})
        found = np.zeros(RECORDS)
        with writer_of(plan) as writer:
            for step in range(accounted.steps):
                batch = plan.sampler.indices(step)
                batch = batch if first else batch[:0]
                signals = LARGE * OPPOSITE.repeat(len(batch), 1)
                y = written(writer, plan, step, signals, batch) / plan.config.protection.clip
                found += log_ratio(y, q=q, z=z, replaces=False)
        return found[None]


def selected_model(plan: RunPlan, mean: float, epsilon: float, delta: float) -> SelectedModelGame:
    """Return the game of a search between runs whose models cost an epsilon."""
    start = SelectedModelGame(plan, mean).mechanism
    noise = calibrate_noise(start, target_epsilon=epsilon, delta=delta)[0].noise
    return SelectedModelGame(plan.unchecked(protection={"noise_multiplier": noise}), mean)
