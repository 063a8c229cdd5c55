"""The difference attack: subtract what everybody else contributed, and look along the candidate's contribution.

With S_l the released sum of layer l, S_0l the sum expected of the other records and c_l the candidate's contribution,
t_l = <S_l - S_0l, c_l> / ||c_l||^2 is about 1 for a member and 0 for nobody. Layers differ in their noise (that of a
device is in the hidden layers alone), so the score is their mean weighted by 1 / Var t_l, which the attacker learns
from steps that it simulates. Against central Gaussian noise this is the likelihood ratio's statistic. Where a record
is replaced, c_l is the difference of the two contributions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from training.attacks.base import Attack, Candidates, Records, Sight, Trial
from training.attacks.stage import Shadow

_LEAST_VARIANCE = 1e-12


class DifferenceAttack(Attack):
    """Projects the update, less its expectation, on the candidate's contribution.

    Args:
        shadow: Computes contributions without noise.
        layers: Numbers of the layers to look at, from 0: those whose noise does not drown the others'.
        divisor: The constant that the run divides sums by; None for the batch size.
    """

    name = "difference"
    knows = "all other records of the batch, the candidate, the weights and the device's matrix"

    def __init__(self, shadow: Shadow, *, layers: Sequence[int], divisor: float | None) -> None:
        self._shadow, self._layers, self._divisor = shadow, layers, divisor
        self._learnt: list[np.ndarray] = []
        self._seen: tuple[Sight, list[Tensor]] | None = None

    def learn(self, trial: Trial) -> None:
        """See Attack.learn: the layers' spread without the candidate."""
        self._learnt.append(self._shares(trial.sight, trial.candidates))

    def score(self, sight: Sight, candidates: Candidates) -> float:
        """See Attack.score."""
        return float(np.average(self._shares(sight, candidates), weights=self._weights()))

    def _weights(self) -> np.ndarray:
        """1 / Var t_l, equal ones before anything was learnt."""
        if len(self._learnt) < 2:
            return np.ones(len(self._layers))
        weights = 1 / np.maximum(np.var(self._learnt, axis=0), _LEAST_VARIANCE)
        return np.asarray(weights / weights.max())

    def _shares(self, sight: Sight, candidates: Candidates) -> np.ndarray:
        """t_l of each layer."""
        expected, direction = self._expected(sight), self._sums(sight, candidates.member)
        if candidates.rival is not None:
            rival = self._sums(sight, candidates.rival)
            expected = [a + b for a, b in zip(expected, rival, strict=True)]
            direction = [a - b for a, b in zip(direction, rival, strict=True)]
        divisor = self._divisor or float(sight.batch_size)
        shares = []
        for layer in self._layers:
            left = sight.gradient(layer) * divisor - expected[layer]
            length = float(direction[layer].square().sum())
            shares.append(float((left * direction[layer]).sum()) / length if length else 0.0)
        return np.array(shares)

    def _expected(self, sight: Sight) -> list[Tensor]:
        """The others' sum, the same for every candidate of a trial."""
        if self._seen is None or self._seen[0] is not sight:
            self._seen = sight, self._sums(sight, sight.others)
        return self._seen[1]

    def figure(self, score: float) -> str:
        """The share of the contribution that was found."""
        return f"share {score:.2f}"

    def _sums(self, sight: Sight, records: Records) -> list[Tensor]:
        return self._shadow.sums(sight.weights[-2], records)
