"""The difference attack: compute the update of both worlds, and look which one the released update is nearer to.

With g the released gradient of a group of parameters, g_0 and g_1 those of the second and the first world without the
credited noise and d = g_1 - g_0, the likelihood ratio of Gaussian noise of variance v in every direction is

    log L = sum over groups of (<g - k g_0, k d> - ||k d||^2 / 2) / v.

Layers differ in their noise (that of a device is in the hidden layers alone), so the attacker learns each group's v
and k from steps of the second world that it simulates: k = sum <g, g_0> / sum ||g_0||^2, below 1 where a device's noise
lengthens what is clipped, and v the mean of <g - k g_0, d>^2 / ||d||^2. Whatever else a step draws (directions, the
probes of a likelihood ratio) is taken for public: no guarantee rests on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.attacks.base import Attack, Candidates, Observation, Records, Trial
from training.attacks.replay import NoiselessStep

_LEAST = 1e-30
_CERTAIN = 30.0
"""No number of trials tells larger ratios apart, and where there is no noise the ratio is one of rounding."""


@dataclass(frozen=True, kw_only=True)
class Products:
    """What a step's vectors have in common, a number a group each.

    Attributes:
        released_step: <g, d>.
        others_step: <g_0, d>.
        step: ||d||^2.
        released_others: <g, g_0>.
        others: ||g_0||^2.
    """

    released_step: np.ndarray
    others_step: np.ndarray
    step: np.ndarray
    released_others: np.ndarray
    others: np.ndarray


class DifferenceAttack(Attack):
    """The likelihood ratio of an update with the candidate against one without.

    Args:
        noiseless: Computes updates without the credited noise.
        groups: Names of the parameters that are looked at, in groups of one noise each: those whose noise does not
            drown the others'.
    """

    name = "difference"
    knows = "all other records of the batch, the candidate, the weights, the device's matrix and every public seed"

    def __init__(self, noiseless: NoiselessStep[Any], *, groups: Sequence[Sequence[str]]) -> None:
        self._noiseless, self._groups = noiseless, groups
        self._learnt: list[Products] = []
        self._seen: tuple[Observation, list[Tensor], list[Tensor]] | None = None

    def learn(self, trial: Trial) -> None:
        """See Attack.learn: the groups' noise and shrinking."""
        self._learnt.append(self._products(trial.observation, trial.candidates))

    def score(self, observation: Observation, candidates: Candidates) -> float:
        """See Attack.score."""
        seen, k = self._products(observation, candidates), self._share()
        along = k * (seen.released_step - k * seen.others_step)
        ratio = float(np.sum((along - k**2 * seen.step / 2) / self._variance(k)))
        return min(max(ratio, -_CERTAIN), _CERTAIN)

    def figure(self, score: float) -> str:
        """The ratio."""
        return f"log ratio {score:.2g}"

    def _share(self) -> np.ndarray:
        """Each group's k, 1 before anything was learnt."""
        if not self._learnt:
            return np.ones(len(self._groups))
        along = np.sum([seen.released_others for seen in self._learnt], axis=0)
        whole = np.sum([seen.others for seen in self._learnt], axis=0)
        return np.clip(along / np.maximum(whole, _LEAST), 0.0, 1.0)

    def _variance(self, k: np.ndarray) -> np.ndarray:
        """Each group's v, 1 before anything was learnt."""
        if not self._learnt:
            return np.ones(len(self._groups))
        squares = [
            (seen.released_step - k * seen.others_step) ** 2 / np.maximum(seen.step, _LEAST)
            for seen in self._learnt
        ]
        return np.maximum(np.mean(squares, axis=0), _LEAST)

    def _products(self, observation: Observation, candidates: Candidates) -> Products:
        first, second = candidates.batches(observation.others)
        released, alone = self._known(observation)
        present = self._update(observation, first)
        absent = alone if candidates.replacement is None else self._update(observation, second)
        steps = [one - other for one, other in zip(present, absent, strict=True)]
        return Products(
            released_step=_dots(released, steps),
            others_step=_dots(absent, steps),
            step=_dots(steps, steps),
            released_others=_dots(released, absent),
            others=_dots(absent, absent),
        )

    def _known(self, observation: Observation) -> tuple[list[Tensor], list[Tensor]]:
        """What was released and the others' update, the same for every candidate of a trial."""
        if self._seen is None or self._seen[0] is not observation:
            self._seen = (
                observation,
                self._grouped(observation.gradients()),
                self._update(observation, observation.others),
            )
        return self._seen[1:]

    def _update(self, observation: Observation, records: Records) -> list[Tensor]:
        return self._grouped(
            self._noiseless.gradients(observation.weights[-2], records, step=observation.step)
        )

    def _grouped(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """One vector a group."""
        return [torch.cat([gradients[name].flatten() for name in names]) for names in self._groups]


def _dots(first: Sequence[Tensor], second: Sequence[Tensor]) -> np.ndarray:
    """The groups' inner products."""
    return np.array([float(one @ other) for one, other in zip(first, second, strict=True)])
