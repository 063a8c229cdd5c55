"""Which game audits a run: one for each protection whose guarantee is about labels or about the last model only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from accounting.guarantee import Guarantee
from opusim.randomness.streams import derive_seed
from training.attacks.base import Scores
from training.attacks.controls import power_of, with_half_the_noise
from training.attacks.findings import Finding, Role
from training.attacks.games.base import Played, TwoWorlds, played
from training.attacks.games.look import LookGame, StagedLookGame
from training.attacks.games.released_model import LastIterateGame, ReleasedModelGame
from training.attacks.games.steps import AmplifiedGame
from training.engine.plan import RunPlan
from training.protections.amplified_labels import AmplifiedLabelProtection
from training.protections.noisy_labels import OneLookProtection, StagedResponseProtection
from training.protections.record import LastIterateProtection
from training.protections.released_model import LabelReleaseProtection

GAME_TRIALS = 20_000
"""Trials of a game by default; its controls take as many."""
_GAMES: tuple[tuple[type, Callable[[RunPlan], TwoWorlds]], ...] = (
    (LabelReleaseProtection, ReleasedModelGame),
    (StagedResponseProtection, StagedLookGame),
    (OneLookProtection, LookGame),
    (AmplifiedLabelProtection, AmplifiedGame),
    (LastIterateProtection, LastIterateGame),
)


def game_of(plan: RunPlan) -> TwoWorlds | None:
    """Return the game that audits a run's guarantee, or None if its steps are attacked instead."""
    for protection, game in _GAMES:
        if isinstance(plan.protection, protection):
            return game(plan)
    return None


def findings_of(
    game: TwoWorlds,
    stated: Sequence[Guarantee],
    *,
    trials: int,
    seed: int,
    delta: float,
    on_trials: Callable[[int], None],
) -> list[Finding]:
    """Play a run's game, the same with nothing to find, and the same with much less noise.

    Args:
        game: What is played.
        stated: The run's guarantees; the first one that is proven is put to the test.
        trials: Trials of each of the three, at least 40.
        seed: Repeats them, in [0, 2^63).
        delta: Of the bounds.
        on_trials: Called with the number of trials done since the last call.
    """
    claim = next((guarantee for guarantee in stated if guarantee.is_proven), None)
    weaker = with_half_the_noise([game.mechanism], delta)
    subjects = ((Role.RUN, game, False), (Role.NULL, game, True), (Role.BROKEN, game.weakened(), False))
    found = []
    for role, subject, null in subjects:
        own = derive_seed(seed, "audit", role.value) >> 1
        results = played(subject, trials=trials, seed=own, delta=delta, null=null, on_trials=on_trials)
        actual = subject.true_epsilon(delta) if role is Role.BROKEN else math.inf
        found += [
            replace(
                _finding(role, one, None if null else claim, actual),
                power=power_of(one.best, claim, weaker) if role is Role.RUN else None,
            )
            for one in results
        ]
    return found


def _finding(role: Role, one: Played, claim: Guarantee | None, actual: float) -> Finding:
    return Finding(
        role=role,
        attack=one.adversary.name,
        members=f"{np.median(one.first):.3g}",
        others=f"{np.median(one.second):.3g}",
        auc=Scores(first=one.first, second=one.second).auc,
        result=one.best,
        claim=claim,
        scope="run",
        curve=one.curve,
        actual=actual if math.isfinite(actual) else None,
        estimate=one.estimate,
    )
