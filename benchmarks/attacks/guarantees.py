"""What is proven of every mechanism, what an audit found, and what a paper claims, side by side.

    python -m benchmarks.attacks.guarantees measure [ROW ...]     (resumes; some 30 minutes of one core)
    python -m benchmarks.attacks.guarantees games                 (10,000 games on the last iterate; resumes)
    python -m benchmarks.attacks.guarantees show

Each row plays a two-world game on the product's own code, crafted so that the proven epsilon is nearly reached, next to
a game with nothing to find and one with much less noise. A new row is a function in `ROWS` that returns a game; a row
that another benchmark measured is saved under the same keys by `save_row`. A mechanism without a row is listed as not
audited.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import torch

from accounting.audit import Method, audit
from accounting.guarantee import Guarantee, Status
from benchmarks.attacks import final_model, one_run
from benchmarks.attacks.scalars import ScalarsGame
from benchmarks.attacks.selection import selection
from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import commit, load_results, save_results
from opusim.tables import print_table
from training.attacks.games.base import TwoWorlds, crafted, played
from training.attacks.games.last_iterate import LEAN, LastIterateGame
from training.attacks.games.look import LookGame
from training.attacks.games.released_model import ReleasedModelGame
from training.attacks.games.steps import AmplifiedGame, BudgetGame
from training.config import load_config
from training.engine.plan import RunPlan

MODULE, NAME, GAMES_NAME = "benchmarks.attacks.guarantees", "guarantees_audited", "last_iterate_games"
FAULT_CELLS = ("none", "noise_halved")
_PRICED_ONLY = "**not audited**: `opusim account` prices it, and no run of opusim releases it"
_NOTHING_PROVEN = "nothing is proven"
REASONS = {
    "gaussian": _PRICED_ONLY,
    "poisson_gaussian": _PRICED_ONLY,
    "poisson_laplace": _PRICED_ONLY,
    "rejection_gaussian": _PRICED_ONLY,
    "record_replaced": "as `record_central`, with canaries that push the other way if they are out "
    "(tests/training/attacks/test_one_run_audit.py)",
    "pdfa_published": f"{_NOTHING_PROVEN}; `opusim audit RUN --one-run` refutes the claim from the updates",
    "pdfa_without_formula": _NOTHING_PROVEN,
    "ulr_published": f"{_NOTHING_PROVEN} of whole records; `opusim audit RUN --one-run` refutes the claim from the "
    "updates",
    "unprotected": _NOTHING_PROVEN,
}
"""Mechanisms without a row of their own."""
COLUMN_NAMES = (
    *("mechanism", "release and adversary", "proven", "audited: any mechanism", "audited: Gaussian law"),
    *("share of the proven", "most that the trials can show", "less noise", "nothing to find", "claimed"),
)
EPSILON, DELTA, SEED = 4.0, 1e-5, 20261122
GAMES, GAME_TRIALS = 10_000, 1024
CONTROL_TRIALS = 10_000
"""Fewest trials of a control: a tenth of them shows at most 4.2, and hardly exceeds a proven 4 whatever the noise."""
_LOOKS, _OUTPUTS = 10, 64
"""Labels that are looked at, and a device's outputs: with 32, no light tells the argmax much more than at epsilon 4."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table.

    Attributes:
        game: Makes the game.
        trials: Trials of both worlds together.
        required: Share of the proven epsilon that is required of the audit.
        gaussian: Whether the bound under the Gaussian law may reach it.
        delta: Of the statement and of all bounds.
    """

    game: Callable[[], TwoWorlds]
    trials: int
    required: float
    gaussian: bool = False
    delta: float = DELTA

    @property
    def control_trials(self) -> int:
        """Trials of each control: a tenth, and so many that a perfect attack would show an epsilon above 6."""
        return max(self.trials // 10, CONTROL_TRIALS)


def plan_of(protection: Mapping[str, Any], *, classes: int, **sections: Any) -> RunPlan:
    """Return a small run with a protection; its records are replaced by the game's."""
    config = load_config(
        {
            "threads": 1,
            "epochs": 1,
            "data": {
                "name": "arrays",
                "n_classes": classes,
                "standardise": False,
                "validation_fraction": 0.0,
            },
            "sampler": {"batch_size": 10},
            "protection": {"epsilon": EPSILON, "delta": DELTA, **protection},
            **sections,
        }
    )
    labels = torch.arange(100) % classes
    return RunPlan.resolve(config, crafted(torch.eye(100)[:, :3], labels, n_classes=classes))


def look(
    noise: str | None = None, kind: str = "label-readout", device: Mapping[str, Any] | None = None
) -> LookGame:
    """Return the game of ten labels that are looked at once."""
    protection = {"kind": kind} if noise is None else {"kind": kind, "noise": noise}
    trainer = {"kind": "dfa" if device is None else "pdfa"}
    sections = {} if device is None else {"device": device}
    return LookGame(
        plan_of(protection, classes=_LOOKS, trainer=trainer, model={"hidden": [_OUTPUTS]}, **sections)
    )


def camera() -> dict[str, Any]:
    """Return the low-light camera without read noise, which the theorem of counts does not credit."""
    return {"name": "camera_low_light", "camera": {"sensor": {"read_noise_e": 0.0}}}


def budget() -> BudgetGame:
    """Return the game of a label budget that four visits spend in full."""
    protection = {"kind": "label-budget", "noise_multiplier": 1.0, "floor": 1e-3}
    plan = plan_of(protection, classes=2, trainer={"kind": "dfa"}, model={"hidden": [8]})
    visits = 4
    distance = math.sqrt(2.0 * visits / (1 + 1e-3)) * (1 + 1e-6)
    return BudgetGame(
        plan.replaced(protection={"noise_multiplier": distance / plan.protection.budget.budget_mu})
    )


def amplified() -> AmplifiedGame:
    """Return the game of eight secret batches, q = 1/4."""
    return AmplifiedGame(
        plan_of(
            {"kind": "label-amplified"},
            classes=2,
            trainer={"kind": "dfa"},
            model={"hidden": [8]},
            sampler={"batch_size": 25},
            epochs=2,
        )
    )


def released_model() -> ReleasedModelGame:
    """Return the game of one noisy linear model; every record has the weight 1, so that no leverage is lowered."""
    protection = {"kind": "label-release", "rounds": 0}
    return ReleasedModelGame(plan_of(protection, classes=3, trainer={"kind": "ridge"}, sampler={}))


def scalars(
    law: str, batch_size: int, *, directions: int = 2, epochs: int = 2, delta: float = DELTA
) -> ScalarsGame:
    """Return the game of zeroth-order steps on batches out of 100 records."""
    return ScalarsGame(
        plan_of(
            {"kind": "record", "delta": delta},
            classes=2,
            trainer={"kind": "zo", "law": law, "directions": directions},
            optimizer={"lr": 0.01, "momentum": 0.0},
            model={"hidden": [4]},
            sampler={"scheme": "poisson", "batch_size": batch_size},
            epochs=epochs,
        )
    )


def convex(batches: int = 5, epochs: int = 4, lean: float = LEAN, **changes: Any) -> LastIterateGame:
    """Return the game of the last iterate on its linear instance."""
    config = {
        "trainer": {"kind": "convex", **changes.pop("trainer", {})},
        "optimizer": {"lr": 0.5, "momentum": 0.0, **changes.pop("optimizer", {})},
        "sampler": {"scheme": "disjoint-cyclic", "batch_size": 100 // batches},
    }
    plan = plan_of({"kind": "last-iterate", **changes}, classes=2, epochs=epochs, **config)
    return LastIterateGame(plan, lean=lean)


def strongly_convex() -> LastIterateGame:
    """Return the same with a regularised squared loss."""
    return convex(trainer={"objective": "squared", "regularisation": 0.1, "clip": 0.5})


ROWS: dict[str, Row] = {
    "label, randomized response": Row(
        game=lambda: look(kind="label-randomized-response"), trials=400_000, required=0.85
    ),
    "label, readout, digital noise": Row(game=look, trials=2_000_000, required=0.45),
    "label, readout, gaussian device": Row(
        game=lambda: look("device", device={"name": "gaussian"}), trials=2_000_000, required=0.45
    ),
    "label, photon counts": Row(
        game=lambda: look("counts", device=camera()), trials=1_000_000, required=0.45
    ),
    "label, argmax of counts": Row(
        game=lambda: look("argmax", device=camera()), trials=100_000, required=0.85
    ),
    "label, one linear model": Row(game=released_model, trials=600_000, required=0.85, gaussian=True),
    "label, budget": Row(game=budget, trials=600_000, required=0.45),
    "label, amplified": Row(game=amplified, trials=2_000_000, required=0.6),
    "zeroth order, Gaussian scalars": Row(
        game=lambda: scalars("gaussian", 100), trials=10_000, required=0.6, gaussian=True
    ),
    "zeroth order, Laplace scalars": Row(
        game=lambda: scalars("laplace", 50, epochs=1), trials=20_000, required=0.6
    ),
    "zeroth order, Laplace scalars, pure epsilon": Row(
        game=lambda: scalars("laplace", 50, directions=1, epochs=1, delta=0.0),
        trials=20_000,
        required=0.6,
        delta=0.0,
    ),
    "private selection, 3 trials expected": Row(
        game=lambda: selection(3.0, EPSILON, DELTA), trials=60_000, required=0.3
    ),
    "convex, last iterate": Row(game=convex, trials=200_000, required=0.6, gaussian=True),
    "convex, last iterate, strongly convex": Row(
        game=strongly_convex, trials=200_000, required=0.6, gaussian=True
    ),
}
"""The games, by the names of their rows."""


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
        "ceiling": best.bound.ceiling,
        "true_positives_at_0.1_percent": best.curve.low_true_positive,
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
    """Return a paper's figure for the mechanism, or None if no paper claims one."""
    return claimed_figure(type(game.mechanism).guarantees([game.mechanism], delta=delta, enforced=True))


def claimed_figure(guarantees: list[Guarantee]) -> float | None:
    """Return the formula's value of the claimed statement among some, or None without one."""
    values = [one.formula_value for one in guarantees if one.status is Status.CLAIMED]
    return next((value for value in values if value is not None and math.isfinite(value)), None)


def save_row(name: str, line: Mapping[str, Any]) -> None:
    """Save a line under its name; other benchmarks may add theirs."""
    rows = {**load_results(NAME).get("rows", {}), name: dict(line)}
    save_results(NAME, {"delta": DELTA, "rows": rows})


def measure(names: list[str]) -> None:
    """Measure the rows that are missing, or those named."""
    torch.set_num_threads(1)
    for name in names or [name for name in ROWS if name not in load_results(NAME).get("rows", {})]:
        save_row(name, measured(ROWS[name]))
        print(name, load_results(NAME)["rows"][name], flush=True)


def measure_controls() -> None:
    """Measure the broken control of the rows that lack it; their other numbers stay, with the commit that gave them."""
    torch.set_num_threads(1)
    for name, line in load_results(NAME).get("rows", {}).items():
        if line["less_noise"] is None:
            added = broken(ROWS[name], ROWS[name].game())
            save_row(name, {**line, **added, "less_noise_commit": commit()})
            print(name, added, flush=True)
        elif "less_noise_epsilon" not in line:
            weak = ROWS[name].game().weakened()
            save_row(name, {**line, "less_noise_epsilon": weak.true_epsilon(ROWS[name].delta)})


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


def play_games() -> None:
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
    plan = found.best.plan
    strict = replace(plan, confidence=1 - (1 - plan.confidence) / GAMES)
    return found.best.epsilon_lower, audit(found.first, found.second, strict).epsilon_lower


# The page


def table_rows(rows: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line for each row, then one for each mechanism without a row, with the reason."""
    lines = [_line(name, row) for name, row in rows.items()] + _lines_of_trainings()
    touched = {row["kind"] for row in rows.values()} | (
        {"record_central"} if _lines_of_trainings() else set()
    )
    missing = sorted(packaged_kinds() - touched)
    blank = ("–",) * (len(COLUMN_NAMES) - 2)
    return lines + [(f"`{kind}`", REASONS.get(kind, "**not measured yet**"), *blank) for kind in missing]


def readme_table() -> str:
    """Return what is claimed, proven and audited of every mechanism that was attacked, two a line, for the README."""
    found: dict[str, tuple[str, ...]] = {}
    for line in table_rows(load_results(NAME).get("rows", {})):
        bounds = [float(value) for value in line[3:5] if value != "–"]
        if bounds:
            name, kind = line[0].rstrip("`)").split(" (`")
            release = ", final model" if line[1].startswith("only the final model") else ""
            numbers = (line[9], line[2], f"{max(bounds):.2f}")
            found.setdefault(kind + release, (f"{name.partition(', digital')[0]}{release}", *numbers))
    rows = list(found.values())
    half = -(-len(rows) // 2)
    second = [*rows[half:], *[("",) * 4] * (2 * half - len(rows))]
    names = ("mechanism", "claimed", "proven", "audited")
    return markdown((*names, *names), [left + right for left, right in zip(rows[:half], second, strict=True)])


def packaged_kinds() -> set[str]:
    """Return the kinds of the mechanisms that come with opusim."""
    packaged = entry_points(group="opusim.mechanisms")
    return {each.name for each in packaged if each.value.startswith("accounting.")}


def _runs_of(cells: Mapping[str, Any], fault: str) -> list[dict[str, Any]]:
    """Return the audits of one training with a fault, of the trainers that were audited often."""
    kept = [cells.get(f"{fault}, {trainer}", {}) for trainer in one_run.OFTEN]
    return [run for cell in kept for run in cell.get("runs", [])]


def _lines_of_trainings() -> list[tuple[str, ...]]:
    """Return the lines of the audits of whole trainings, whose results have pages of their own."""
    found, bound = [], Method.NORMAL_BOUND.name
    cells = load_results(one_run.NAME).get("cells", {})
    sound, halved = (_runs_of(cells, fault) for fault in FAULT_CELLS)
    if sound:
        updates = [run["epsilon"]["all updates"] for run in sound]
        any_mechanism, gaussian = (
            float(np.median([run[method.name] for run in updates]))
            for method in (Method.ANY_MECHANISM, Method.NORMAL_BOUND)
        )
        less = float(np.median([run["epsilon"]["all updates"][bound] for run in halved])) if halved else None
        found.append(
            (
                "records, pdfa and bp (`record_central`)",
                f"every update; crafted gradients, {len(sound)} audits of one training, medians",
                *(f"{value:.2f}" for value in (one_run.EPSILON, any_mechanism, gaussian)),
                f"{gaussian / one_run.EPSILON:.2f}",
                f"{one_run.normal_ceiling():.2f}",
                _number(less) + " (half the noise)",
                "–",
                "–",
            )
        )
    for games in final_model.sound_games():
        first = games[0]
        any_mechanism, gaussian, null = (
            float(np.median(values))
            for values in zip(
                *(
                    (row["epsilon"][Method.ANY_MECHANISM.name], row["epsilon"][bound], row["null"])
                    for row in games
                ),
                strict=True,
            )
        )
        weights = "worst-case" if first["worst_case"] else "drawn"
        trainings = f"{len(first['scores'])} trainings"
        found.append(
            (
                f"records, {first['trainer']} (`record_central`)",
                f"only the final model, {weights} initial weights; "
                + (trainings if len(games) == 1 else f"{len(games)} games of {trainings}, medians"),
                *(f"{value:.2f}" for value in (first["proven"], any_mechanism, gaussian)),
                f"{gaussian / first['proven']:.2f}",
                f"{first['ceiling'][bound]:.2f}",
                "–",
                f"{null:.2f}",
                "–",
            )
        )
    return found


def _line(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    reached = max(row["any_mechanism"], row["gaussian_law"] or 0.0) / row["proven"]
    return (
        f"{name} (`{row['kind']}`)",
        f"{row['release']}; {row['adversary'].partition(':')[0]}, {row['trials']:,} trials",
        f"{row['proven']:.2f}",
        f"{row['any_mechanism']:.2f}",
        _number(row["gaussian_law"]),
        f"{reached:.2f}",
        f"{row['ceiling']:.2f}",
        _less_noise(row),
        f"{row['null']:.2f}",
        _number(row["claimed"]),
    )


def _less_noise(row: Mapping[str, Any]) -> str:
    """Return the bound of the broken control and what it really costs, and say if the audit did not find it."""
    if row["less_noise"] is None:
        return "–"
    missed = " (not found)" if row["less_noise"] <= row["proven"] else ""
    return f"{row['less_noise']:.2f} of {_number(row.get('less_noise_epsilon'))}{missed}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    results = load_results(NAME)
    if not results:
        return ""
    text = (
        f"Epsilon at delta {results['delta']:g} ({results['date']}, {command(MODULE, 'measure')}). *Proven* is what "
        "`opusim account` states. *Audited* are lower bounds with 95 % confidence for the row, by Clopper-Pearson "
        "limits (any mechanism) and, for a release that a theorem makes Gaussian, by the trade-off of that law. *Less "
        "noise* is the bound of the same audit on the same code with a quarter of the noise or four times the epsilon, "
        "of the epsilon that this really has: the bound must exceed *proven*; – says that it was not measured. "
        "*Nothing to find* is its bound if both worlds are one, and is above 0 in one of 20 rows by chance. *Claimed* "
        "is a paper's formula. A mechanism that is not audited says so in its statement (`opusim account run`): only "
        "its proof and the tests of its code speak for it. Zeroth-order steps and searches are played on crafted "
        "models, through the run's own trainer, sampler, noise and choice."
    )
    return section(
        "Proven, audited, claimed",
        text,
        markdown(COLUMN_NAMES, table_rows(results.get("rows", {}))),
        _games_text(),
    )


def _games_text() -> str:
    games = load_results(GAMES_NAME)
    if not games:
        return ""
    return (
        f"Last iterate under attack ({command(MODULE, 'games')}): {games['games']:,} random runs (objective, rates, "
        f"schedule, batches, noise, residuals at and within their bound), {games['trials']:,} trials each. Refuted at "
        f"95 % confidence for all games together: {games['refuted']}. Above the proven epsilon at 95 % for each game: "
        f"{games['above_at_95_percent']} (chance allows 5 % if the theorem is tight). Membership found: "
        f"{games['found']:,}. Largest exact mu of a linear instance over the proven: "
        f"{games['largest_exact_share']:.4f}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["measure", "controls", "games", "show"], nargs="?", default="show")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="only these rows")
    given = parser.parse_args()
    if given.what == "measure":
        measure(given.rows)
    if given.what == "controls":
        measure_controls()
    if given.what == "games":
        play_games()
    print_table("Proven, audited, claimed", COLUMN_NAMES, table_rows(load_results(NAME).get("rows", {})))


if __name__ == "__main__":
    main()
