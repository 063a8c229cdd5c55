"""The game of a private search: one held-out record differs, and the best trial's score is released.

Held-out records score a trial. In the first world one more of them is classified rightly by every trial's model, which
moves each score by 1 / n: with noise N(0, (1 / (n mu))^2) that is mu-GDP, and the worst case of the theorem's premise.
The number of trials, the noise of their scores and the choice are the code of `opusim tune`. In units of the noise the
best score y of K ~ Poisson(m) trials of law Q has the density m e^(-m (1 - Q(y))) q(y), so that the attacker's
likelihood ratio is exact. A search without a trial tells nothing.
"""

from __future__ import annotations

import numpy as np

from accounting import numerics
from accounting.calibration import calibrate_noise
from accounting.selection.mechanisms import PrivateSelection
from opusim.randomness.streams import derive_seed
from training.attacks.games.base import Adversary, TwoWorlds
from training.tuning import best_of, draw_trials, noisy_score

_HELD_OUT = 1000
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
        """See TwoWorlds.mechanism."""
        return PrivateSelection(mean=self._mean, mu=self._mu)

    @property
    def actual(self) -> PrivateSelection:
        """See TwoWorlds.actual."""
        return PrivateSelection(mean=self._mean, mu=self._mu / self._share)

    def scores(self, count: int, *, first: bool, seed: int) -> np.ndarray:
        """See TwoWorlds.scores."""
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
        accuracy, mu = float(first) / _HELD_OUT, self._mu / self._share
        scores = {
            number: noisy_score(
                accuracy, _HELD_OUT, mu, mode="experiment", seed=derive_seed(seed, "trial", number) >> 1
            )
            for number in range(len(trials))
        }
        y = scores[best_of(scores)] * _HELD_OUT * self._mu
        above, above_first = (float(numerics.normal_cdf(shift - y)) for shift in (0.0, self._mu))
        return self._mean * (above - above_first) + self._mu * y - self._mu**2 / 2


def selection(mean: float, epsilon: float, delta: float) -> SelectionGame:
    """Return the game of a search within an epsilon.

    Args:
        mean: m.
        epsilon: Of the whole search.
        delta: Of the whole search.
    """
    start = PrivateSelection(mean=mean, mu=0.5)
    return SelectionGame(mean, calibrate_noise(start, target_epsilon=epsilon, delta=delta)[0].mu)
