"""Canaries: planted records whose membership a fair coin decides and the model's losses reveal.

Canaries differ from all other records and from each other, so that a model can only know one from that one. The coins
are independent; halves of fixed size would not be. The score is the decrease of a canary's loss by training. The DP-ZO
paper's Table 6 shows the area under the curve of all scores. A lower bound on epsilon (`opusim.accounting.audit`) needs
independent scores: take one canary from each of many runs, since scores within a run are dependent.
Source: Tang et al., Table 6; Panda et al. 2024; Steinke et al. 2023 for the coins.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from opusim import checks
from opusim.accounting.audit import area_under_curve
from opusim.randomness.streams import derive_seed
from opusim.training.config.run import LossName
from opusim.training.networks.functions import LOSSES


@dataclass(frozen=True, kw_only=True)
class Scores:
    """An attack's scores of trials in two worlds."""

    first: np.ndarray
    second: np.ndarray

    @property
    def auc(self) -> float:
        """Probability that a score of the first world exceeds one of the second, ties counted half; NaN for none."""
        return area_under_curve(self.first, self.second)


@dataclass(frozen=True, kw_only=True)
class Canaries:
    """Planted records and their coins."""

    x: Tensor
    y: Tensor
    inside: Tensor  # whether each is trained on, bool

    def joined(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Training records with the canaries whose coins say so."""
        return torch.cat([x, self.x[self.inside]]), torch.cat([y, self.y[self.inside]])

    def scores(self, before: Tensor, after: Tensor) -> Scores:
        """How much each canary's loss fell from before to after training, by coin."""
        fell = (before - after).double().numpy()
        inside = self.inside.numpy()
        return Scores(first=fell[inside], second=fell[~inside])


def own_features(n_features: int, count: int, *, size: float, n_classes: int, seed: int) -> Canaries:
    """Canaries with a feature of their own each, which no other record has: a word that stands in one text only.

    Other records have n_features, canaries n_features + count, all 0 but their own, which is `size`. Labels are
    uniform.
    """
    checks.integer(n_features=n_features, count=count, minimum=1)
    checks.positive(size=size)
    generator = np.random.default_rng(derive_seed(seed, "canaries"))
    x = torch.zeros(count, n_features + count)
    x[torch.arange(count), n_features + torch.arange(count)] = size
    return Canaries(
        x=x,
        y=torch.from_numpy(generator.integers(n_classes, size=count)),
        inside=torch.from_numpy(generator.random(count) < 0.5),
    )


def record_losses(model: nn.Module, x: Tensor, y: Tensor, *, loss: LossName = "cross-entropy") -> Tensor:
    """Each record's loss, shape (n,)."""
    with torch.no_grad():
        return LOSSES[loss](model(x), y).per_record


def pooled(parts: list[Scores]) -> Scores:
    """The scores of several runs as one."""
    return Scores(
        first=np.concatenate([part.first for part in parts]),
        second=np.concatenate([part.second for part in parts]),
    )


def auc_error(scores: Scores) -> float:
    """Standard error of the area under the curve where it is 1/2: sqrt((n + m + 1) / (12 n m)) (Mann-Whitney)."""
    n, m = len(scores.first), len(scores.second)
    return float(np.sqrt((n + m + 1) / (12 * n * m)))
