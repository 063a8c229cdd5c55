"""Games of released models: one noisy linear model of public features, and the last iterate of convex training.

The linear model: a record's label is a or b, and the attacker sees the model.

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

import math
from dataclasses import replace

import numpy as np
import torch

from opusim.accounting.mechanisms.convex import ConvexLastIterate, learning_rates, proven_mu
from opusim.accounting.mechanisms.labels import LabelRelease
from opusim.training.attacks.base import Adversary, crafted
from opusim.training.attacks.games import TwoWorlds, in_passes
from opusim.training.convex.trainer import ConvexTrainer, GatedNetwork, GatedRelu
from opusim.training.engine.plan import RunPlan
from opusim.training.networks.optimizers import set_learning_rate
from opusim.training.protections.released_model import LabelReleaseProtection

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
    mechanism: LabelRelease
    actual: LabelRelease
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
        self.mechanism = protection.mechanism if accounted is None else accounted
        self._mu = louder * protection.mechanism.mu
        self.actual = replace(self.mechanism, mu=self._mu)
        self._louder = louder
        x = torch.cat([_LENGTH * torch.eye(RECORDS), torch.zeros(RECORDS, RECORDS)])
        dataset = crafted(x, torch.arange(len(x)) % 2, n_classes=plan.dataset.n_classes)
        self._plan = replace(plan, dataset=dataset)
        self._design = protection.design(x)
        whitened = self._design.metric.whiten(torch.cat([x, torch.ones(len(x), 1)], dim=1).double())
        self._shares = self._design.weights[:RECORDS, None] * whitened[:RECORDS]  # g_i, shape (RECORDS, d)
        left, _, right = torch.linalg.svd(self._shares, full_matrices=False)
        self._directions = left @ right  # (G G^T)^(-1/2) G
        others = self._shares @ self._directions.t()  # what record i adds to the reading of j
        self._from_others = others.sum(dim=0) - others.diagonal()

    def scores(self, count: int, *, first: bool, seed: int) -> np.ndarray:
        """See TwoWorlds.scores; a pass is one model."""
        return in_passes(count, RECORDS, lambda own: self._pass(own, first=first), seed=seed)

    def weakened(self) -> ReleasedModelGame:
        """See TwoWorlds.weakened: a quarter of the noise."""
        return ReleasedModelGame(self._plan, self.mechanism, louder=4 * self._louder)

    def _pass(self, seed: int, *, first: bool) -> np.ndarray:
        plan = self._plan.unchecked(seed=seed)
        x, y = plan.dataset.train.x, plan.dataset.train.y.clone()
        y[:RECORDS] = 0 if first else 1
        protection = plan.protection
        if not isinstance(protection, LabelReleaseProtection):
            raise TypeError("plan: releases no linear model")
        with plan.opened_device() as device:
            noisy, _ = protection.drawn(self._design, x, y, mu=self._mu, device=device)
        seen = (noisy[0] - noisy[1]) @ self._directions.t()  # difference of two columns along each direction
        known = self._from_others if first else -self._from_others
        return np.asarray((seen - known).numpy())[None]


# The last iterate

TRIALS = 256
"""Records of a batch, each a trial. The bound does not depend on their number."""
LEAN = 50.0
"""Logit that the second feature gives a record, far beyond every residual's bound."""
_SHARE = 1e-3
"""s, the share of a record's features that tells which residual it has."""


class LastIterateGame(TwoWorlds):
    """One record of a fixed batch is one of two with opposite residuals, in every epoch.

    The auditor owns the records. Trial i has two features of its own, e_i and f_i. Its record is c e_i + s f_i with
    label 1 or c e_i - s f_i with label 0, s small, and the public initial weights of f_i are so large that the two
    records' residuals are opposite, and at their bound from the first step to the last. Then the weights of e_i
    follow the linear recursion that the theorem's bound is made of: v <- (1 - eta lambda) v -+ (eta / b) c C +
    noise. All other records of the run have another feature. The attacker sees the last weights. It also knows the
    noise that was drawn before the record was first used: the theorem holds for any weights at that step, and so
    counts no noise before it. Without this knowledge noise that the theorem does not count would hide that later
    noise is missing.

    Runs without noise tell the score of each world, so the noise that was drawn is known of every trial.

    Args:
        plan: A run of convex training that releases its last model only.
        accounted: What the run is accounted as; None takes the plan's own mechanism.
        position: The batch that the record is in, from 0; None takes the one that tells most.
        lean: Logit that the second feature gives a record. A small one leaves the residuals within their bound, where
            they depend on the model.
    """

    title = "last iterate of noisy gradient descent with fixed batches"
    pair = "a record is x with label 1, or x' next to it with label 0, whose residuals are opposite"
    is_gaussian = True
    together = TRIALS
    mechanism: ConvexLastIterate
    actual: ConvexLastIterate
    adversaries = (
        Adversary(
            name="last weights",
            sees="the last model only",
            knows="all other records, the batches, all constants, the initial weights, and the noise that was drawn "
            "before the record was first used",
        ),
    )

    def __init__(
        self,
        plan: RunPlan,
        accounted: ConvexLastIterate | None = None,
        *,
        position: int | None = None,
        lean: float = LEAN,
    ) -> None:
        self._plan, self._lean = plan, lean
        algorithm = plan.algorithm
        if not isinstance(algorithm, ConvexTrainer):
            raise TypeError(f"plan: trainer.kind = {plan.config.trainer.kind!r} has no last iterate")
        self.actual = algorithm.last_iterate(plan.protection.noise_multiplier)
        self.mechanism = self.actual if accounted is None else accounted
        self._position = int(np.argmax(self.exact_mus())) if position is None else position
        self._values: tuple[float, float] | None = None

    def exact_mus(self) -> np.ndarray:
        """Return mu of the linear instance for each batch that the record may be in, shape (batches,).

        It is the distance of the two means over the standard deviation of the noise from the record's first use on,
        both in closed form.
        """
        own = self.actual
        rates = learning_rates(own)
        kept = np.append(
            np.cumprod((1 - rates * own.regularisation)[::-1])[::-1][1:], 1.0
        )  # from a step to the end
        noises = rates * own.noise_multiplier
        noises[-1] = math.hypot(noises[-1], own.final_noise * own.learning_rate * own.noise_multiplier)
        distance = (2 * rates * kept).reshape(own.epochs, own.batches).sum(axis=0)
        later = np.cumsum(((noises * kept) ** 2)[::-1])[::-1][: own.batches]  # from a step on
        return np.asarray(distance / np.sqrt(later))

    @property
    def exact_share(self) -> float:
        """Mu of the linear instance over what is proven, at most 1."""
        return float(self.exact_mus()[self._position] / proven_mu(self.actual))

    def scores(self, count: int, *, first: bool, seed: int) -> np.ndarray:
        """See TwoWorlds.scores; a pass is a whole run on `TRIALS` trials."""
        return in_passes(count, TRIALS, lambda own: self._pass(own, first=first), seed=seed)

    def values(self) -> tuple[float, float] | None:
        """See TwoWorlds.values; residuals that depend on the model make trials differ."""
        if self._lean < LEAN:
            return None
        if self._values is None:
            first, second = (float(self._pass(0, first=world, noisy=False).mean()) for world in (True, False))
            self._values = first, second
        return self._values

    def weakened(self) -> LastIterateGame:
        """See TwoWorlds.weakened: a quarter of the noise at every step."""
        quarter = self._plan.protection.noise_multiplier / 4
        plan = self._plan.unchecked(protection={"noise_multiplier": quarter})
        return LastIterateGame(plan, self.mechanism, position=self._position, lean=self._lean)

    def _pass(self, seed: int, *, first: bool, noisy: bool = True) -> np.ndarray:
        plan = self._crafted(seed, first=first)
        if not noisy:
            plan = plan.unchecked(protection={"noise_multiplier": 0.0, "noise": "digital"})
        train = plan.dataset.train
        with self._plan.unchecked(seed=seed).opened_device() as device:
            trainer = plan.algorithm.trainer(device)
            weights = plan.network.tensors["weight"]  # of e_i: rows below TRIALS
            for step in range(plan.total_steps):
                if step == self._position:
                    drawn_before = _difference(weights)
                set_learning_rate(trainer.optimizer, plan.config.optimizer, step / plan.total_steps)
                batch = plan.sampler.indices(step)
                trainer.step(train.x[batch], train.y[batch], step=step)
        later = learning_rates(self.actual)[self._position :]
        kept = float(np.prod(1 - later * self.actual.regularisation))
        return np.asarray(_difference(weights) - kept * drawn_before)[None]

    def _crafted(self, seed: int, *, first: bool) -> RunPlan:
        """Return the run on the auditor's records and initial weights."""
        k, classes = self.actual.batches, self._plan.dataset.n_classes
        x = torch.zeros(k * TRIALS, 2 * TRIALS + 1)
        x[:, -1] = 1.0
        mine = torch.arange(TRIALS) + self._position * TRIALS  # the sampler takes records in their order
        side = 1.0 if first else -1.0
        x[mine] = torch.cat(
            [
                math.sqrt(1 - _SHARE**2) * torch.eye(TRIALS),
                side * _SHARE * torch.eye(TRIALS),
                torch.zeros(TRIALS, 1),
            ],
            dim=1,
        )
        y = torch.zeros(len(x), dtype=torch.int64)
        y[mine] = 1 if first else 0
        model = GatedRelu(x.shape[1], classes, torch.zeros(1, x.shape[1]), centre=False)
        decay = float(np.prod(1 - learning_rates(self.actual) * self.actual.regularisation))
        start = self._lean / _SHARE / max(abs(decay), 1e-6)
        model.weight.data[TRIALS : 2 * TRIALS, 0, 0] = start
        model.weight.data[TRIALS : 2 * TRIALS, 0, 1] = -start
        plan = replace(self._plan, dataset=crafted(x, y, n_classes=classes), network=GatedNetwork(model))
        return plan.unchecked(
            seed=seed,
            trainer={"hyperplanes": 1, "centre": False, "gates": "seed"},
            sampler={"scheme": "disjoint-cyclic", "batch_size": TRIALS},
        )


def _difference(weights: torch.Tensor) -> np.ndarray:
    """Return the weights of each e_i for class 1 less those for class 0, float64, shape (TRIALS,)."""
    found = weights.detach()[:TRIALS, 0].double().numpy()
    return np.asarray(found[:, 1] - found[:, 0])
