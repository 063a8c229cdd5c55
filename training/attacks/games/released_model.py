"""The game of one noisy linear model: a record's label is a or b, and the attacker sees the model.

The auditor owns the features: record i is R e_i, and as many records again are 0, half of them
with either label, so that they add nothing to the difference of two columns. The model is a function of the noisy sums
and public numbers, and they are one of the model, so the attacker sees them. A label moves them along g_i = w_i L^-1
h_i, and the noise is independent N(0, sigma^2) in every direction. The likelihood ratio of the two labels is a function
of the sum along g_i in the column of a less that in the column of b.

The g_i of different records share the constant feature and are almost orthogonal. The attacker reads along the
orthonormal directions that are nearest to them, the rows of (G G^T)^(-1/2) G, and subtracts what the labels of all
other records add, which it knows. So trials of one model are independent, and each loses less than 1e-6 of its signal.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from accounting.labels.linear_model import LabelRelease
from training.attacks.games.base import Adversary, TwoWorlds, crafted, in_passes
from training.engine.plan import RunPlan
from training.protections.released_model import LabelReleaseProtection, public_design, released

RECORDS = 128
"""Records whose labels are attacked in one model."""
_LENGTH = 1e3
"""R: so long that the constant feature, which all records share, is next to nothing."""


class ReleasedModelGame(TwoWorlds):
    """One record's label is 0 or 1, and the noisy linear model of all labels is released.

    Args:
        plan: A run that releases one noisy linear model; its records are replaced by the auditor's.
        accounted: What the run is accounted as; None takes the plan's own mechanism.
        louder: By how much the noise is divided, at least 1.
    """

    title = "one noisy linear model of public features"
    pair = "a record's label is 0 or 1"
    is_gaussian = True
    together = RECORDS
    adversaries = (
        Adversary(
            name="likelihood ratio",
            sees="the released model",
            knows="all features, the weights and the factor of the design, and all other labels",
        ),
    )

    def __init__(self, plan: RunPlan, accounted: LabelRelease | None = None, *, louder: float = 1.0) -> None:
        protection = plan.protection
        if not isinstance(protection, LabelReleaseProtection):
            raise TypeError(
                f"plan: protection.kind = {plan.config.protection.kind!r} releases no linear model"
            )
        self._accounted = protection.mechanism if accounted is None else accounted
        self._mu = louder * protection.mechanism.mu
        self._louder = louder
        x = torch.cat([_LENGTH * torch.eye(RECORDS), torch.zeros(RECORDS, RECORDS)])
        dataset = crafted(x, torch.arange(len(x)) % 2, n_classes=plan.dataset.n_classes)
        self._plan = replace(plan, dataset=dataset)
        self._design = public_design(self._plan, x)
        whitened = self._design.metric.whiten(torch.cat([x, torch.ones(len(x), 1)], dim=1).double())
        self._shares = self._design.weights[:RECORDS, None] * whitened[:RECORDS]  # g_i, shape (RECORDS, d)
        left, _, right = torch.linalg.svd(self._shares, full_matrices=False)
        self._directions = left @ right  # (G G^T)^(-1/2) G
        others = self._shares @ self._directions.t()  # what record i adds to the reading of j
        self._from_others = others.sum(dim=0) - others.diagonal()

    @property
    def mechanism(self) -> LabelRelease:
        """See TwoWorlds.mechanism."""
        return self._accounted

    @property
    def actual(self) -> LabelRelease:
        """See TwoWorlds.actual."""
        return replace(self._accounted, mu=self._mu)

    def scores(self, count: int, *, first: bool, seed: int) -> np.ndarray:
        """See TwoWorlds.scores; a pass is one model."""
        return in_passes(count, RECORDS, lambda own: self._pass(own, first=first), seed=seed)

    def weakened(self) -> ReleasedModelGame:
        """See TwoWorlds.weakened: a quarter of the noise."""
        return ReleasedModelGame(self._plan, self._accounted, louder=4 * self._louder)

    def _pass(self, seed: int, *, first: bool) -> np.ndarray:
        plan = self._plan.unchecked(seed=seed)
        x, y = plan.dataset.train.x, plan.dataset.train.y.clone()
        y[:RECORDS] = 0 if first else 1
        with plan.opened_device() as device:
            noisy, _ = released(plan, self._design, x, y, mu=self._mu, device=device)
        seen = self._along(noisy[:2])
        known = self._from_others if first else -self._from_others
        return np.asarray((seen - known).numpy())[None]

    def _along(self, rows: Tensor) -> Tensor:
        """Return the difference of two columns along each direction, shape (RECORDS,)."""
        return (rows[0] - rows[1]) @ self._directions.t()
