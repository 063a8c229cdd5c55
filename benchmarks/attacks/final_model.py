"""How much of a proven epsilon of 10 does an attacker find who sees only the final model?

    OPUSIM_DATA=... python -m benchmarks.attacks.final_model measure     (resumes; some minutes of one core)

The game of `opusim audit RUN --final-model`: 400 trainings on 1,000 records of MNIST, each with a crafted record or
without it by a fair coin.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from benchmarks.options import program
from benchmarks.results_file import load_results, save_results
from opusim.randomness.streams import derive_seed
from opusim.training.attacks.findings import Role
from opusim.training.attacks.one_run.final_model import FinalModelGame, play, read_scores
from opusim.training.config.run import load_config
from opusim.training.data.catalogue import build_dataset
from opusim.training.data.tables import own_dataset
from opusim.training.engine.plan import RunPlan, with_own_inputs

MODULE, NAME = "benchmarks.attacks.final_model", "final_model_audited"
RECORDS, EPSILON, DELTA, TRAININGS, STEPS, SEED = 1000, 10.0, 1e-5, 400, 30, 20261122


class Cell(NamedTuple):
    """What is attacked."""

    trainer: str
    worst_case: bool
    less_noise: float = 1.0
    repeats: int = 0

    @property
    def key(self) -> str:
        weights = "worst-case" if self.worst_case else "drawn"
        broken = "" if self.less_noise == 1 else f", noise divided by {self.less_noise:g}"
        again = f", repeated with seed {self.repeats}" if self.repeats else ""
        return f"{self.trainer}, {weights}{broken}{again}"


CELLS = (
    Cell("bp", True),
    Cell("bp", False),
    Cell("bp", False, repeats=777001),
    Cell("bp", False, repeats=777002),
    Cell("pdfa", True),
    Cell("bp", True, 4.0),
)
"""What is measured. The first row with drawn weights raised an alarm, so it was repeated, with two seeds of its own."""


def run_plan(trainer: str) -> RunPlan:
    """Return a run of 30 full batches whose proven epsilon is 10."""
    known = build_dataset(load_config({"data": {"name": "mnist"}}).data, None).train
    data = (known.x[:RECORDS].flatten(1).numpy(), known.y[:RECORDS].numpy())
    options: dict[str, Any] = {
        "seed": SEED,
        "threads": 1,
        "epochs": STEPS,
        "data": {"n_classes": 10, "validation_fraction": 0.0, "standardise": False},
        "sampler": {"scheme": "poisson", "batch_size": RECORDS},
        "model": {"hidden": [32]},
        "optimizer": {"lr": 0.1, "momentum": 0.0},
        "trainer": {"kind": trainer},
        "protection": {"kind": "record", "epsilon": EPSILON, "delta": DELTA},
    }
    config = with_own_inputs(load_config(options), data)
    return RunPlan.resolve(config, own_dataset(config.data, config.split, data, None))


def game_of(cell: Cell) -> FinalModelGame:
    """Return the game of a cell; less noise is not what the mechanism says."""
    plan = run_plan(cell.trainer)
    seed = cell.repeats or derive_seed(SEED, cell.key) >> 1
    game = FinalModelGame.of(plan, seed=seed, worst_case=cell.worst_case)
    if cell.less_noise == 1:
        return game
    changes = {"epsilon": None, "noise_multiplier": plan.protection.noise_multiplier / cell.less_noise}
    present, absent = (one.unchecked(protection=changes) for one in (game.present, game.absent))
    return replace(game, present=present, absent=absent)


def measure() -> None:
    """Play what is missing; the cells take turns of 20 trainings, the first cell first."""
    torch.set_num_threads(1)
    for cell in CELLS:
        game = game_of(cell)
        most = TRAININGS if cell.less_noise == 1 else TRAININGS // 4
        while True:
            cells = load_results(NAME).get("cells", {})
            kept = cells.get(cell.key, {"scores": [], "cpu_s": 0.0})
            scores = list(kept["scores"])
            if len(scores) >= most:
                break
            started = time.process_time()
            play(game, min(len(scores) + 20, most), scores)
            cells[cell.key] = {
                **cell._asdict(),
                "scores": scores,
                "cpu_s": kept["cpu_s"] + time.process_time() - started,
                **_summary(game, scores),
            }
            save_results(NAME, {"epsilon": EPSILON, "delta": DELTA, "steps": STEPS, "cells": cells})


def _summary(game: FinalModelGame, scores: list[float]) -> dict[str, Any]:
    """Return what the scores say, and what they say with coins that no training followed."""
    found = read_scores(game, scores, delta=DELTA)
    (result,) = found.scores().values()
    return {
        "proven": found.guarantees[0].epsilon,
        "epsilon": {bound.method.name: bound.epsilon for bound in result.bounds},
        "interval": next(bound.interval for bound in result.bounds if bound.interval is not None),
        "ceiling": {bound.method.name: bound.ceiling for bound in result.bounds},
        "normality": result.normality,
        "refuted": found.refuted,
        "null": max(null.epsilon_lower for null in found.scores(Role.NULL).values()),
    }


def sound_games() -> list[list[dict[str, Any]]]:
    """Return the finished rows without a fault, those that repeat a game together with it."""
    cells = load_results(NAME).get("cells", {})
    games: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for cell in CELLS:
        if cell.less_noise == 1 and len(cells.get(cell.key, {"scores": ()})["scores"]) == TRAININGS:
            games.setdefault((cell.trainer, cell.worst_case), []).append(cells[cell.key])
    return list(games.values())


def alarms(cells: dict[str, Any]) -> str:
    """Return how many of the rows without a fault exceed the proven epsilon."""
    sound = [cells[cell.key] for cell in CELLS if cell.less_noise == 1 and cell.key in cells]
    return f"{sum(row['refuted'] for row in sound)} of {len(sound)}"


if __name__ == "__main__":
    program(measure)
