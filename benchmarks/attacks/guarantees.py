"""What is proven of every mechanism, what an audit found, and what a paper claims, side by side.

    python -m benchmarks.attacks.guarantees measure [ROW ...]     (resumes; some 30 minutes of one core)
    python -m benchmarks.attacks.guarantees games                 (10,000 games on the last iterate; resumes)

Each row plays a two-world game on the product's own code, crafted so that the proven epsilon is nearly reached, next to
a game with nothing to find and one with much less noise (`benchmarks.attacks.crafted`). A mechanism without a row is
listed as not audited.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import entry_points
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.attacks import final_model, one_run
from benchmarks.attacks.crafted import DELTA, ROWS, Row, convex
from benchmarks.options import program
from benchmarks.results_file import commit, load_results, save_results
from opusim.accounting.audit import audit, audit_drawn_noise
from opusim.accounting.guarantee import Status
from opusim.accounting.one_run import Method
from opusim.training.attacks.findings import Curve
from opusim.training.attacks.games import LEAN, LastIterateGame, TwoWorlds, played

MODULE, NAME, GAMES_NAME = "benchmarks.attacks.guarantees", "guarantees_audited", "last_iterate_games"
FAULT_CELLS = ("none", "noise_halved")
_PRICED_ONLY = "`opusim account` prices it, and no run of opusim releases it"
_NOTHING_PROVEN = "nothing is proven"
REASONS = {
    "gaussian": _PRICED_ONLY,
    "poisson_gaussian": _PRICED_ONLY,
    "poisson_laplace": _PRICED_ONLY,
    "rejection_gaussian": _PRICED_ONLY,
    "pdfa_published": f"{_NOTHING_PROVEN}; `opusim audit RUN --one-run` refutes the claim from the updates",
    "pdfa_without_formula": _NOTHING_PROVEN,
    "ulr_published": f"{_NOTHING_PROVEN} of whole records; `opusim audit RUN --one-run` refutes the claim from the "
    "updates",
    "label_budget": "stands in ledgers of earlier versions only",
    "unprotected": _NOTHING_PROVEN,
}
"""Mechanisms without a row of their own."""
SEED = 20261122
GAMES, GAME_TRIALS = 10_000, 1024


def measured(row: Row) -> dict[str, Any]:
    """Play a row's game and its controls; returns the line of the results."""
    started = time.process_time()
    game = row.game()
    stated = game.guarantee(row.delta)
    found = played(game, trials=row.trials, seed=SEED, delta=row.delta)
    null = played(game, trials=row.control_trials, seed=SEED + 1, delta=row.delta, null=True)
    best = max(found, key=lambda one: one.bound.epsilon_lower)
    gaussian = [one.gaussian.epsilon_lower for one in found if one.gaussian is not None]
    return {
        "kind": game.mechanism.kind,
        "commit": commit(),
        "statement": str(stated.status),
        "unit": str(stated.unit),
        "release": str(stated.release),
        "adversary": f"{best.adversary.name}: sees {best.adversary.sees}; knows {best.adversary.knows}",
        "pair": game.pair,
        "proven": stated.epsilon,
        "claimed": claimed_of(game, row.delta),
        "delta": row.delta,
        "trials": row.trials,
        "any_mechanism": best.bound.epsilon_lower,
        "gaussian_law": max(gaussian) if gaussian else None,
        "estimate": asdict(max(found, key=lambda one: one.best.epsilon_lower).estimate),
        "ceiling": best.bound.ceiling,
        "true_positives_at_0.1_percent": Curve.of(best.first, best.second).low_true_positive,
        **broken(row, game),
        "null": max(one.best.epsilon_lower for one in null),
        "required": row.required,
        "cpu_s": round(time.process_time() - started, 1),
    }


def broken(row: Row, game: TwoWorlds) -> dict[str, float]:
    """Play a row's game with much less noise; returns the bound, and the epsilon that the faulty code really has."""
    weak = game.weakened()
    found = played(weak, trials=row.control_trials, seed=SEED + 2, delta=row.delta)
    return {
        "less_noise": max(one.best.epsilon_lower for one in found),
        "less_noise_epsilon": weak.true_epsilon(row.delta),
    }


def claimed_of(game: TwoWorlds, delta: float) -> float | None:
    """Return the value of a paper's formula for the mechanism, or None if no paper claims one."""
    found = type(game.mechanism).guarantees([game.mechanism], delta=delta, enforced=True)
    values = [one.formula_value for one in found if one.status is Status.CLAIMED]
    return next((value for value in values if value is not None and math.isfinite(value)), None)


def measure(names: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Measure the rows that are missing or lack an estimate, or those named."""
    torch.set_num_threads(1)
    rows = load_results(NAME).get("rows", {})
    for name in names or [name for name in ROWS if "estimate" not in rows.get(name, {})]:
        rows[name] = measured(ROWS[name])
        save_results(NAME, {"delta": DELTA, "rows": rows})
        print(name, rows[name], flush=True)


# Ten thousand games on the last iterate


def random_game(number: int) -> LastIterateGame:
    """Return a game on a random run: objective, schedule, rates, batches, noise, position of the record."""
    draw = np.random.default_rng([SEED, number])
    objective = str(draw.choice(["squared", "margin", "softmax", "one-against-rest"]))
    regularisation = float(draw.choice([0.0, 0.01, 0.3]))
    batches, epochs = int(draw.integers(1, 6)), int(draw.integers(1, 7))
    lean = float(draw.choice([LEAN, 1.0, 0.0]))  # far, near and within the residual's bound
    return convex(
        batches,
        epochs,
        lean,
        epsilon=None,
        noise_multiplier=float(np.exp(draw.uniform(np.log(0.7), np.log(4.0)))),
        trainer={
            "objective": objective,
            "regularisation": regularisation,
            "final_noise": None if draw.random() < 0.5 else float(draw.choice([0.0, 0.5, 2.0])),
            **({"clip": float(draw.choice([0.05, 0.5, 2.0]))} if objective in ("squared", "margin") else {}),
        },
        optimizer={
            "lr": float(draw.uniform(0.05, 1.0)) * (1.5 if objective in ("squared", "margin") else 2.0),
            "schedule": str(draw.choice(["constant", "linear", "cosine"])),
        },
    )


def games() -> None:
    """Play the games that are missing, a hundred at a time."""
    torch.set_num_threads(1)
    while (done := load_results(GAMES_NAME).get("games", 0)) < GAMES:
        kept = load_results(GAMES_NAME)
        sums = {key: kept.get(key, 0) for key in ("games", "refuted", "above_at_95_percent", "found")}
        largest = kept.get("largest_exact_share", 0.0)
        for number in range(done, done + 100):
            game = random_game(number)
            proven = game.guarantee(DELTA).epsilon
            single, family = _bounds(game, number)
            sums["games"] += 1
            sums["refuted"] += family > proven
            sums["above_at_95_percent"] += single > proven
            sums["found"] += single > 0
            largest = max(largest, game.exact_share)
        save_results(GAMES_NAME, {**sums, "trials": GAME_TRIALS, "largest_exact_share": largest})


def _bounds(game: LastIterateGame, number: int) -> tuple[float, float]:
    """Return the larger bound at 95 % confidence for this game, and at 95 % for all games together."""
    (found,) = played(game, trials=GAME_TRIALS, seed=number, delta=DELTA)
    strict = [
        replace(each.plan, confidence=1 - (1 - each.plan.confidence) / GAMES)
        for each in (found.bound, found.gaussian)
        if each is not None
    ]
    bounds = [audit(found.first, found.second, plan).epsilon_lower for plan in strict]
    values = game.values()
    if found.drawn is not None and values is not None:
        plan = replace(found.drawn.plan, confidence=1 - (1 - found.drawn.plan.confidence) / GAMES)
        bounds.append(audit_drawn_noise(found.first, found.second, values, plan).epsilon_lower)
    return found.best.epsilon_lower, max(bounds)


# The page


def table_rows(rows: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line for each row, then for each audit of whole trainings, whose results have pages of their own."""
    cells = load_results(one_run.NAME).get("cells", {})
    groups = {
        "records, pdfa and bp": one_run.OFTEN,
        **{f"records, {name}": (name,) for name in one_run.VARIANTS},
    }
    found = [_line_of_updates(name, cells, trainers) for name, trainers in groups.items()]
    return [
        *(_line(name, row) for name, row in rows.items()),
        *(line for line in found if line),
        *(_line_of_final_models(games) for games in final_model.sound_games()),
    ]


def unaudited(lines: Sequence[tuple[str, ...]]) -> str:
    """Say which mechanisms no line is about, and why."""
    missing = sorted(kind for kind in packaged_kinds() if not any(f"(`{kind}`)" in line[0] for line in lines))
    reasons: dict[str, list[str]] = {}
    for kind in missing:
        reasons.setdefault(REASONS.get(kind, "**not measured yet**"), []).append(f"`{kind}`")
    return "; ".join(f"{', '.join(kinds)} ({reason})" for reason, kinds in reasons.items())


def packaged_kinds() -> set[str]:
    """Return the kinds of the mechanisms that come with opusim."""
    packaged = entry_points(group="opusim.mechanisms")
    return {each.name for each in packaged if each.value.startswith("opusim.accounting.")}


def _runs_of(cells: Mapping[str, Any], fault: str, trainers: Sequence[str]) -> list[dict[str, Any]]:
    """Return the audits of one training with a fault, of some trainers."""
    kept = [cells.get(f"{fault}, {trainer}", {}) for trainer in trainers]
    return [run for cell in kept for run in cell.get("runs", [])]


def _line_of_updates(name: str, cells: Mapping[str, Any], trainers: Sequence[str]) -> tuple[str, ...]:
    """Return the line of the audits of one training, medians over some trainers; empty without results."""
    sound, halved = (_runs_of(cells, fault, trainers) for fault in FAULT_CELLS)
    if not sound:
        return ()
    any_mechanism, gaussian, estimate = (
        float(np.median([run["epsilon"]["all updates"][method.name] for run in sound]))
        for method in (Method.ANY_MECHANISM, Method.NORMAL_BOUND, Method.NORMAL_ESTIMATE)
    )
    less = [run["epsilon"]["all updates"][Method.NORMAL_BOUND.name] for run in halved]
    kind = "record_replaced" if "replacing" in name else "record_central"
    return (
        f"{name} (`{kind}`)",
        f"every update; crafted gradients, {len(sound)} audits of one training, medians",
        *(f"{value:.2f}" for value in (one_run.EPSILON, any_mechanism, gaussian, estimate)),
        f"{gaussian / one_run.EPSILON:.2f}",
        f"{one_run.normal_ceiling():.2f}",
        f"{np.median(less):.2f} (half the noise)" if less else "–",
        f"{np.median([run['null'] for run in sound]):.2f}",
        "–",
    )


def _line_of_final_models(games: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the line of games of the final model that differ in their seeds."""
    first, bound = games[0], Method.NORMAL_BOUND.name
    any_mechanism, gaussian, estimate = (
        float(np.median([row["epsilon"][key] for row in games]))
        for key in (Method.ANY_MECHANISM.name, bound, Method.NORMAL_ESTIMATE.name)
    )
    weights = "worst-case" if first["worst_case"] else "drawn"
    trainings = f"{len(first['scores'])} trainings"
    return (
        f"records, {first['trainer']} (`record_central`)",
        f"only the final model, {weights} initial weights; "
        + (trainings if len(games) == 1 else f"{len(games)} games of {trainings}, medians"),
        *(f"{value:.2f}" for value in (first["proven"], any_mechanism, gaussian, estimate)),
        f"{gaussian / first['proven']:.2f}",
        f"{first['ceiling'][bound]:.2f}",
        "–",
        f"{np.median([row['null'] for row in games]):.2f}",
        "–",
    )


def _line(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    reached = max(row["any_mechanism"], row["gaussian_law"] or 0.0) / row["proven"]
    taken, missed = row["estimate"], " (not found)" if row["less_noise"] <= row["proven"] else ""
    high = "∞" if taken["high"] is None else f"{taken['high']:.2f}"
    return (
        f"{name} (`{row['kind']}`)",
        f"{row['release']}; {row['adversary'].partition(':')[0]}, {row['trials']:,} trials",
        f"{row['proven']:.2f}",
        f"{row['any_mechanism']:.2f}",
        _number(row["gaussian_law"]),
        f"{taken['epsilon']:.2f} ({taken['low']:.2f} to {high})",
        f"{reached:.2f}",
        f"{row['ceiling']:.2f}",
        f"{row['less_noise']:.2f} of {row['less_noise_epsilon']:.2f}{missed}",
        f"{row['null']:.2f}",
        _number(row["claimed"]),
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    program(measure, games)
