"""A game of two worlds that differ in one label or record, played through a mechanism's own code, many trials at once.

The auditor crafts the data: they are as bad as the theorem allows, so that a sound and tight theorem is nearly reached.
A trial is one record's part in the release. Trials of a pass share nothing but public numbers: no record's label, coin
or noise reaches the numbers that another record's score is made of, so they are independent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from accounting.audit import AuditPlan, AuditResult, Estimate, Estimator, audit, audit_drawn_noise, estimated
from accounting.composition import guarantees
from accounting.guarantee import Guarantee
from accounting.mechanism import Mechanism
from opusim import checks
from opusim.randomness.streams import derive_seed
from training.data import Dataset, Split
from training.data.dataset import Standardisation

PARTS = 20
"""Parts in which the trials of a world are played, so that a progress bar moves."""


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """Who attacks.

    Attributes:
        name: In a word or two.
        sees: What is released to it.
        knows: What it knows besides.
    """

    name: str
    sees: str
    knows: str


@dataclass(frozen=True, kw_only=True)
class Played:
    """What one adversary reached.

    Attributes:
        adversary: Who.
        first: Its scores of trials of the first world, shape (n,).
        second: Those of the second world, shape (n,).
        bound: The lower bound on epsilon that holds for any mechanism.
        gaussian: The lower bound under the Gaussian law that a theorem gives, or None without one.
        drawn: The lower bound from the noise that was drawn, or None if scores without noise are not known.
    """

    adversary: Adversary
    first: np.ndarray
    second: np.ndarray
    bound: AuditResult
    gaussian: AuditResult | None
    drawn: AuditResult | None = None

    @property
    def best(self) -> AuditResult:
        """The largest of the bounds."""
        found = [each for each in (self.bound, self.gaussian, self.drawn) if each is not None]
        return max(found, key=lambda result: result.epsilon_lower)

    @property
    def estimate(self) -> Estimate:
        """What the scores say at face value, under the Gaussian law if there is one."""
        return estimated(self.first, self.second, self.gaussian or self.bound)


class TwoWorlds(ABC):
    """A game: a mechanism with its proven guarantee, two neighbouring worlds, and adversaries.

    Attributes:
        title: The mechanism in a few words.
        pair: The two worlds.
        mechanism: What the run is accounted as.
        actual: What the game's code releases: `mechanism`, or one with much less noise after `weakened`.
        adversaries: Who looks at each trial.
        is_gaussian: Whether a theorem says that the release is mu-GDP.
        together: Trials that one pass plays.
    """

    title: str
    pair: str
    mechanism: Mechanism
    actual: Mechanism
    adversaries: tuple[Adversary, ...]
    is_gaussian: bool = False
    together: int = 1

    @abstractmethod
    def scores(self, count: int, *, first: bool, seed: int) -> np.ndarray:
        """Play trials in one world; return each adversary's scores, shape (adversaries, count).

        Args:
            count: Number of trials, at least 1.
            first: Which world.
            seed: In [0, 2^63); games of different seeds share no randomness. A release run's mechanism ignores it.
        """

    def values(self) -> tuple[float, float] | None:
        """Return the score of each world without noise, if all trials of a world have one and Gaussian noise is added.

        The noise that was drawn is then known, and shows its deviation; None for any other game, and for several
        adversaries.
        """
        return None

    @abstractmethod
    def weakened(self) -> TwoWorlds:
        """Return the same game on the same code with much less noise, which the guarantee no longer covers."""

    def guarantee(self, delta: float) -> Guarantee:
        """Return the proven guarantee of the mechanism."""
        return guarantees([self.mechanism], delta=delta)[0]

    def true_epsilon(self, delta: float) -> float:
        """Return the proven epsilon of what the game's code releases, which a weakened game exceeds `guarantee` by."""
        return guarantees([self.actual], delta=delta)[0].epsilon


def played(
    game: TwoWorlds,
    *,
    trials: int,
    seed: int,
    delta: float,
    error: float = 0.05,
    null: bool = False,
    on_trials: Callable[[int], None] = lambda count: None,
) -> list[Played]:
    """Play a game; return what each adversary reached.

    Args:
        game: What is played.
        trials: Trials of both worlds together, at least 40.
        seed: Repeats the game, in [0, 2^63), if its mechanism takes seeds.
        delta: Of the bounds, in [0, 1).
        error: Probability that any of the bounds is too high; all adversaries and estimators share it.
        null: Whether the second world is the first one again, so that there is nothing to find.
        on_trials: Called with the number of trials done since the last call.
    """
    checks.integer(minimum=40, trials=trials)
    worlds = [
        _world(
            game,
            trials // 2,
            first=first or null,
            seed=derive_seed(seed, "world", int(first)),
            on_trials=on_trials,
        )
        for first in (True, False)
    ]
    with_law = game.is_gaussian and delta > 0
    values = game.values() if with_law else None
    estimators = [Estimator.CLOPPER_PEARSON]
    if with_law:
        estimators.append(Estimator.GAUSSIAN)
    if values is not None:
        values = (values[0], values[0]) if null else values
        estimators.append(Estimator.DRAWN_NOISE)
    confidence = 1 - error / (len(game.adversaries) * len(estimators))
    found = []
    for adversary, first, second in zip(game.adversaries, *worlds, strict=True):
        plans = [
            AuditPlan(
                threat_model=f"sees {adversary.sees}, knows {adversary.knows}",
                pair=game.pair,
                delta=delta,
                confidence=confidence,
                estimator=estimator,
                mechanism_law="gaussian" if game.is_gaussian else None,
                seed=derive_seed(seed, "halves") >> 1,
            )
            for estimator in estimators
        ]
        results = [audit(first, second, plan) for plan in plans[: 1 + with_law]]
        found.append(
            Played(
                adversary=adversary,
                first=first,
                second=second,
                bound=results[0],
                gaussian=results[1] if with_law else None,
                drawn=None if values is None else audit_drawn_noise(first, second, values, plans[-1]),
            )
        )
    return found


def _world(
    game: TwoWorlds, count: int, *, first: bool, seed: int, on_trials: Callable[[int], None]
) -> np.ndarray:
    found = []
    share = -(-count // PARTS // game.together) * game.together  # whole passes
    share = max(game.together, share)
    sizes = [min(share, count - start) for start in range(0, count, share)]
    for number, size in enumerate(sizes):
        found.append(game.scores(size, first=first, seed=derive_seed(seed, "part", number) >> 1))
        on_trials(size)
    return np.concatenate(found, axis=1)


def in_passes(count: int, size: int, play: Callable[[int], np.ndarray], *, seed: int) -> np.ndarray:
    """Return the scores of passes of `size` trials each, cut to `count`, shape (adversaries, count).

    Args:
        count: Trials wanted.
        size: Trials of a pass.
        play: Plays a pass of a seed.
        seed: Of all passes together.
    """
    passes = -(-count // size)
    scores = [play(derive_seed(seed, "pass", number) >> 1) for number in range(passes)]
    return np.concatenate(scores, axis=1)[:, :count]


def crafted(x: Tensor, y: Tensor, *, n_classes: int, record_shape: Sequence[int] = ()) -> Dataset:
    """Return a data set of the auditor's own records, all of them protected.

    Args:
        x: Features, float32, shape (n, d).
        y: Class numbers, shape (n,).
        n_classes: Number of classes.
        record_shape: Shape of one record; empty for (d,).
    """
    empty = Split(x[:0], y[:0])
    return Dataset(
        name="arrays",
        n_classes=n_classes,
        train=Split(x.float(), y),
        validation=empty,
        test=None,
        standardisation=Standardisation.identity(),
        record_shape=tuple(record_shape),
    )


def same_labels(count: int, label: int) -> Tensor:
    """Return one label for all records, shape (count,)."""
    return torch.full((count,), label)
