"""The game of zeroth-order steps: one record is in the data or not, and every step's scalars are released.

The auditor owns the model and the record: two logits w_0 x and w_1 x with x so large that the record's losses on the
two sides of any direction differ by more than the clip. So its clipped difference is C times a sign, which the public
direction tells, and a step's scalars in units of C, with their signs, are

    y_j = s B + noise_j,    j = 1 .. n,    B ~ Bernoulli(q) if the record is in, 0 if not,

with s = 1, or 1 / sqrt(n) if all differences of a record are clipped jointly, and with one B for all n directions. A
trial is a whole run through the trainer's own steps, the run's sampler and its noise. The attacker sees the step log
and takes the likelihood ratio. The learning rate, which the theorem leaves free, is so small that the weights stay at
0, so that a long run, every step of which has a batch and noise of its own, is many runs one after the other.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from opusim.accounting.mechanisms.zeroth_order import ZoGaussian, ZoLaplace
from opusim.medium.transmission import Direction
from opusim.training.attacks.base import Adversary, crafted
from opusim.training.attacks.games import TwoWorlds, in_passes
from opusim.training.engine.plan import RunPlan
from opusim.training.networks.network import FullyConnected
from opusim.training.zeroth_order.config import ZoConfig
from opusim.training.zeroth_order.perturbation import StepEntry
from opusim.training.zeroth_order.step_log import StepLog
from opusim.training.zeroth_order.trainer import ZoTrainer

_LARGE = 1e12
"""x."""
_RATE = 1e-30
"""Learning rate."""
RUNS = 100
"""Runs of a pass."""


class ScalarsGame(TwoWorlds):
    """One record is among the data or left out.

    Args:
        plan: A run of zeroth-order training under record protection; its records and model are the auditor's.
        accounted: What one step is accounted as; None takes the plan's own mechanism.
    """

    title = "zeroth-order steps with secret batches"
    pair = "a record is in the data, or left out"
    together = RUNS
    adversaries = (
        Adversary(
            name="likelihood ratio",
            sees="the step log: every step's scalars and the seeds of its directions",
            knows="all other records, the model and the law of batches and noise",
        ),
    )

    def __init__(self, plan: RunPlan, accounted: ZoGaussian | ZoLaplace | None = None) -> None:
        algorithm = plan.algorithm
        if not isinstance(algorithm, ZoTrainer):
            raise TypeError(f"plan: trainer.kind = {plan.config.trainer.kind!r} releases no scalars")
        self._step = algorithm.mechanism(plan.protection.noise_multiplier) if accounted is None else accounted
        layer = torch.nn.Linear(1, 2, bias=False)
        torch.nn.init.zeros_(layer.weight)
        dataset = crafted(torch.full((1, 1), _LARGE), torch.zeros(1, dtype=torch.int64), n_classes=2)
        steps = plan.total_steps
        options = {"scheme": "poisson", "sampling_probability": self._step.sampling_probability}
        plan = replace(plan, dataset=dataset, network=FullyConnected(torch.nn.Sequential(layer)))
        divisor = self._step.divisor
        self._plan = plan.unchecked(sampler=options, optimizer={"lr": _RATE}, protection={"divisor": divisor})
        self._steps = steps
        self.is_gaussian = isinstance(self._step, ZoGaussian) and self._step.sampling_probability == 1

    @property
    def mechanism(self) -> ZoGaussian | ZoLaplace:
        return self._step.repeated(self._steps)

    @property
    def actual(self) -> ZoGaussian | ZoLaplace:
        field = str(self._step.noise_field)
        weaker = replace(self._step, **{field: self._plan.protection.noise_multiplier})
        return weaker.repeated(self._steps)

    def scores(self, count: int, *, first: bool, seed: int) -> np.ndarray:
        """See TwoWorlds.scores; a pass is a long run, cut into `RUNS`."""
        return in_passes(count, RUNS, lambda own: self._pass(own, first=first), seed=seed)

    def weakened(self) -> ScalarsGame:
        """See TwoWorlds.weakened: a quarter of the noise at every step."""
        found = ScalarsGame(self._plan, self._step)
        found._steps = self._steps
        quarter = self._plan.protection.noise_multiplier / 4
        found._plan = self._plan.unchecked(protection={"noise_multiplier": quarter})
        return found

    def _pass(self, seed: int, *, first: bool) -> np.ndarray:
        plan = self._plan.unchecked(seed=seed)
        train, options = plan.dataset.train, plan.config.trainer_as(ZoConfig)
        unit = 2 * options.perturbation * self._step.divisor / self._step.clip_norm
        ratios = []
        with plan.opened_device() as device:
            trainer = plan.algorithm.trainer(device)
            seen = _Seen()
            trainer.log = seen
            for step in range(RUNS * self._steps):
                batch = plan.sampler.indices(step)
                batch = batch if first else batch[:0]
                trainer.step(train.x[batch], train.y[batch], step=step, records=batch)
                entry = seen.entries[-1]
                y = unit * np.array(entry.scalars) * np.array([_sign(own) for own in entry.seeds])
                ratios.append(self._log_ratio(y))
        return np.array(ratios).reshape(RUNS, self._steps).sum(axis=1)[None]

    def _log_ratio(self, y: np.ndarray) -> float:
        """Return log of (1 - q) + q p(y - s) / p(y) for the law p of the scalars' noise."""
        own = self._step
        if isinstance(own, ZoLaplace):
            shift = float(np.sum(np.abs(y) - np.abs(y - 1))) / own.scale
        else:
            s = own.spread / math.sqrt(own.directions)
            shift = float(np.sum(2 * s * y - s * s)) / (2 * own.noise_multiplier**2)
        q = own.sampling_probability
        return float(np.logaddexp(math.log1p(-q) if q < 1 else -math.inf, math.log(q) + shift))


class _Seen(StepLog):
    """A step log in memory."""

    def __init__(self) -> None:  # no file
        self.entries: list[StepEntry] = []

    def append(self, entry: StepEntry) -> None:
        self.entries.append(entry)


def _sign(seed: int) -> float:
    """Return the sign of the record's loss difference along a direction: label 0 loses where w_1 grows more."""
    move = torch.zeros(2, 1)
    Direction(seed).add_to(move, 0, 1.0)
    return 1.0 if float(move[1] - move[0]) > 0 else -1.0
