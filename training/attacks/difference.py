"""The difference attack: compute the update of both worlds, and look which one the released update is nearer to.

With g the released gradient of a group of parameters, g_0 and g_1 those of the second and the first world without the
credited noise and d = g_1 - g_0, the likelihood ratio of Gaussian noise of variance v in every direction is

    log L = sum over groups of (<g - g_0, d> - ||d||^2 / 2) / v.

Layers differ in their noise (that of a device is in the hidden layers alone), so the attacker learns each group's v
from steps that it simulates: the mean of <g - g_0, d>^2 / ||d||^2 in the second world. Whatever else a step draws
(directions, the probes of a likelihood ratio) is taken for public: no guarantee rests on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.attacks.base import Attack, Candidates, Records, Sight, Trial
from training.attacks.stage import Shadow

_LEAST = 1e-30
_CERTAIN = 30.0
"""No number of trials tells larger ratios apart, and where there is no noise the ratio is one of rounding."""


class DifferenceAttack(Attack):
    """The likelihood ratio of an update with the candidate against one without.

    Args:
        shadow: Computes updates without the credited noise.
        groups: Names of the parameters that are looked at, in groups of one noise each: those whose noise does not
            drown the others'.
    """

    name = "difference"
    knows = "all other records of the batch, the candidate, the weights, the device's matrix and every public seed"

    def __init__(self, shadow: Shadow[Any], *, groups: Sequence[Sequence[str]]) -> None:
        self._shadow, self._groups = shadow, groups
        self._learnt: list[np.ndarray] = []
        self._seen: tuple[Sight, list[Tensor], list[Tensor]] | None = None

    def learn(self, trial: Trial) -> None:
        """See Attack.learn: the groups' noise."""
        along, squared = self._projections(trial.sight, trial.candidates)
        self._learnt.append(along**2 / np.maximum(squared, _LEAST))

    def score(self, sight: Sight, candidates: Candidates) -> float:
        """See Attack.score."""
        along, squared = self._projections(sight, candidates)
        ratio = float(np.sum((along - squared / 2) / self._variances()))
        return min(max(ratio, -_CERTAIN), _CERTAIN)

    def figure(self, score: float) -> str:
        """The ratio."""
        return f"log ratio {score:.2g}"

    def _variances(self) -> np.ndarray:
        """Of each group, equal ones before anything was learnt."""
        if not self._learnt:
            return np.ones(len(self._groups))
        return np.maximum(np.mean(self._learnt, axis=0), _LEAST)

    def _projections(self, sight: Sight, candidates: Candidates) -> tuple[np.ndarray, np.ndarray]:
        """<g - g_0, d> and ||d||^2 of each group."""
        first, second = candidates.batches(sight.others)
        released, alone = self._known(sight)
        present = self._update(sight, first)
        absent = alone if candidates.rival is None else self._update(sight, second)
        found = [_projection(*group) for group in zip(released, present, absent, strict=True)]
        return np.array([along for along, _ in found]), np.array([squared for _, squared in found])

    def _known(self, sight: Sight) -> tuple[list[Tensor], list[Tensor]]:
        """What was released and the others' update, the same for every candidate of a trial."""
        if self._seen is None or self._seen[0] is not sight:
            self._seen = sight, self._grouped(sight.gradients()), self._update(sight, sight.others)
        return self._seen[1:]

    def _update(self, sight: Sight, records: Records) -> list[Tensor]:
        return self._grouped(self._shadow.gradients(sight.weights[-2], records, step=sight.step))

    def _grouped(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """One vector a group."""
        return [torch.cat([gradients[name].flatten() for name in names]) for names in self._groups]


def _projection(released: Tensor, present: Tensor, absent: Tensor) -> tuple[float, float]:
    direction = present - absent
    return float((released - absent) @ direction), float(direction.square().sum())
