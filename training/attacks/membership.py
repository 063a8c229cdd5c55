"""The membership game, which asks whether a record is in the batch of a step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from accounting.guarantee import Adjacency
from opusim.randomness.streams import derive_seed
from training.attacks.base import Candidates, Game, Observation, Trial
from training.attacks.replay import ReplayedStep

_DRAWN = 4  # candidate, replacement, and two strangers


class MembershipGame(Game):
    """One step of the run's trainer, with a record in its batch or without.

    Each trial draws four records, and a batch by the run's own sampling scheme. It takes the four out of the batch and
    puts the candidate in (first world), or the replacement or no record (second world). The run's trainer does the step
    from the same state, and the attacker sees consecutive weights.

    An attacker who sees every update learns from each step what this game tells, except whether the sampler drew the
    record. A run whose guarantee rests on secret batches promises more than this game's theorem does; no bound found
    here can refute that part.

    Args:
        step: The run's step.
        adjacency: Whether the candidate is replaced or left out in the second world.
        seed: Of batches and candidates, in [0, 2^64).

    Raises:
        ValueError: Fewer than six training records.
    """

    released = "the weights after every step"

    def __init__(self, step: ReplayedStep, *, adjacency: Adjacency, seed: int) -> None:
        self._step, self._seed = step, seed
        self._replaces = adjacency is Adjacency.REPLACE_ONE
        self._n = len(step.dataset.train)
        if self._n < _DRAWN + 2:
            raise ValueError(
                f"training records = {self._n}: the game needs at least {_DRAWN + 2}; audit more"
            )
        end = "another record in its place" if self._replaces else "the same batch without it"
        self.pair = f"a record in the step's batch, against {end}"

    def play(self, trial: int, *, first_world: bool) -> Trial:
        """See Game.play."""
        others, drawn = self._draw(trial)
        chosen = drawn[:1] if first_world else drawn[1:2] if self._replaces else drawn[:0]
        batch = torch.cat([others, chosen])
        step = self._step
        return Trial(
            observation=Observation(
                weights=step.weights_after(batch, trial),
                step=step.step_of(trial),
                optimizer=step.plan.config.optimizer,
                rate=step.rate,
                others=step.records(others),
                batch_size=len(others) + 1,
            ),
            candidates=self._pair(drawn[:2]),
            strangers=self._pair(drawn[2:]),
        )

    def _draw(self, trial: int) -> tuple[Tensor, Tensor]:
        """The batch's other records, and the four that the trial is about."""
        seed = derive_seed(self._seed, "trial", trial)
        generator = np.random.default_rng(seed)
        drawn = generator.choice(self._n, _DRAWN, replace=False)
        sampler = self._step.plan.replaced(seed=seed, mode="experiment").sampler
        batch = sampler.indices(0).numpy()
        others = batch[~np.isin(batch, drawn)]
        if sampler.sampling_probability is None:  # a batch of fixed size has room for the candidate
            others = others[: max(len(batch) - 1, 0)]
        place = self._step.dataset.train.x.device
        return torch.from_numpy(others).to(place), torch.from_numpy(drawn).to(place)

    def _pair(self, drawn: Tensor) -> Candidates:
        return Candidates(
            member=self._step.records(drawn[:1]),
            replacement=self._step.records(drawn[1:]) if self._replaces else None,
        )
