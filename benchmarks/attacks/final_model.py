"""How much of a proven epsilon of 10 does an attacker find who sees only the final model?

    OPUSIM_DATA=... python -m benchmarks.attacks.final_model measure     (resumes; some minutes of one core)
    python -m benchmarks.attacks.final_model show

The game of `opusim audit RUN --final-model`: 400 trainings on 1,000 records of MNIST, each with a crafted record or
without it by a fair coin.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from accounting.audit import Method
from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from opusim.randomness.streams import derive_seed
from opusim.tables import print_table
from training.attacks.findings import Role
from training.attacks.one_run.final_model import DRAWN, FinalModelGame, play, read_scores
from training.config.run import load_config
from training.data.catalogue import build_dataset
from training.data.tables import own_dataset
from training.engine.plan import RunPlan, with_own_inputs

MODULE, NAME = "benchmarks.attacks.final_model", "final_model_audited"
RECORDS, EPSILON, DELTA, TRAININGS, STEPS, SEED = 1000, 10.0, 1e-5, 400, 30, 20261122
ANCHOR = 4.914
"""What crafted records reach at epsilon 10 on MNIST with 1,000 records: arXiv 2412.01756 (4.385 for its baseline)."""
COLUMN_NAMES = (
    *("trainer", "initial weights", "trainings", "proven", "estimate of GDP, with its interval"),
    *(
        "any mechanism",
        "Gaussian trade-off",
        "normal bound",
        "ceilings",
        "normality p",
        "nothing to find",
        "CPU s each",
    ),
)


class Cell(NamedTuple):
    """What is attacked."""

    trainer: str
    worst_case: bool
    less_noise: float = 1.0
    repeats: int = 0

    @property
    def key(self) -> str:
        """Its name in the results."""
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


def table_rows(cells: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a line for each cell that was measured."""
    return [_line(cells[cell.key]) for cell in CELLS if cell.key in cells]


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    epsilon, (low, high) = row["epsilon"], row["interval"]
    bounds = [method.name for method in Method if method.is_bound]
    broken = "" if row["less_noise"] == 1 else f", noise divided by {row['less_noise']:g}"
    return (
        f"{row['trainer']}{broken}",
        ("worst-case" if row["worst_case"] else "drawn, known")
        + (", repeated" if row.get("repeats") else ""),
        str(len(row["scores"])),
        f"{row['proven']:.2f}",
        f"{epsilon[Method.NORMAL_ESTIMATE.name]:.2f} ({low:.2f} to {high:.2f})",
        *(f"{epsilon[name]:.2f}" for name in bounds),
        ", ".join(f"{row['ceiling'][name]:.2f}" for name in bounds),
        f"{row['normality']:.2g}",
        f"{row['null']:.2f}",
        f"{row['cpu_s'] / len(row['scores']):.1f}" if "cpu_s" in row else "–",
    )


def sound_games() -> list[list[dict[str, Any]]]:
    """Return the finished rows without a fault, those that repeat a game together with it."""
    cells = load_results(NAME).get("cells", {})
    games: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for cell in CELLS:
        if cell.less_noise == 1 and len(cells.get(cell.key, {"scores": ()})["scores"]) == TRAININGS:
            games.setdefault((cell.trainer, cell.worst_case), []).append(cells[cell.key])
    return list(games.values())


def _alarms(cells: dict[str, Any]) -> str:
    """Say what alarms without a fault mean; empty without any."""
    sound = [cells[cell.key] for cell in CELLS if cell.less_noise == 1 and cell.key in cells]
    alarms = sum(row["refuted"] for row in sound)
    if not alarms:
        return ""
    return (
        f"**Alarms:** {alarms} of {len(sound)} rows without a fault exceed the proven epsilon. Chance makes at "
        "most one in 20 do so; the rows that repeat the game with new seeds tell chance from a fault. "
    )


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    results = load_results(NAME)
    if not results:
        return ""
    text = (
        f"Trainings of {results['steps']} full batches on {RECORDS:,} records of MNIST, 784-32-10, at a proven epsilon "
        f"of {results['epsilon']:g} and delta {results['delta']:g} ({results['date']}, {command(MODULE, 'measure')}; "
        f"planned: {TRAININGS} trainings a row). A fair coin for each training puts one crafted record in or leaves "
        f"it out. The attacker sees {DRAWN.sees} and knows {DRAWN.knows}; in rows with worst-case initial weights it "
        "chose them. The estimate is that under normal scores with the ends of its interval; the three bounds hold "
        "together with 95 % confidence, and their ceilings are what ideal scores would give. *Nothing to find* is the "
        f"largest bound from coins that no training followed. {_alarms(results['cells'])}"
        f"arXiv 2412.01756 reports {ANCHOR:g} of 10 for crafted records with the final model only. The time of the "
        "repeated rows was not kept; they play the same trainings as the row above them."
    )
    return section(
        "What the final model gives away", text, markdown(COLUMN_NAMES, table_rows(results["cells"]))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["measure", "show"], nargs="?", default="show")
    if parser.parse_args().what == "measure":
        measure()
    print_table("Final model only", COLUMN_NAMES, table_rows(load_results(NAME).get("cells", {})))


if __name__ == "__main__":
    main()
