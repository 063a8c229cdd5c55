"""Which planted faults does the audit of one training find, how often, and how often does it raise a false alarm?

    python -m benchmarks.attacks.one_run measure     (resumes; a quarter of an hour of one core)

Every fault of `tests.support.faults` that reaches a trainer under record protection is planted in it, in one training
with 2,000 canaries at a proven epsilon of 4. A fault counts as found if a bound of an adversary exceeds that epsilon.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.options import program
from benchmarks.results_file import load_results, save_results
from opusim.accounting.one_run import Method, ceiling
from opusim.randomness.streams import derive_seed
from opusim.training.attacks.findings import Audit, Role
from opusim.training.attacks.one_run.audit import CONFIDENCE, play_one_run
from opusim.training.config.run import load_config
from opusim.training.data.tables import own_dataset
from opusim.training.engine.plan import RunPlan, with_own_inputs
from tests.support.faults import FAULTS, OF_ONE_RUN

MODULE, NAME = "benchmarks.attacks.one_run", "one_run_audit"
CANARIES, EPSILON, N, FEATURES = 2000, 4.0, 400, 32
TRAINERS = ("pdfa", "bp", "dfa", "tdfa", "ulr")
OFTEN, ATTEMPTS, NULLS = ("pdfa", "bp"), 20, 50
REPEATED = {"sampled_too_often": 5}
"""Attempts with faults that are found by a narrow margin."""
BANDED = "bp, noise correlated over 4 steps"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    BANDED: ("bp", {"bands": 4}),
    "bp, for replacing a record": ("bp", {"relation": "replace_one"}),
}
"""Other releases of a trainer: the trainer, and keys of its protection; halved noise and no fault are attempted."""
VARIANT_ATTEMPTS = 10
_NO_FAULT = "none"
_NOISE: dict[str, float] = {}
"""The calibrated noise multiplier of each trainer."""
UNSEEN = {
    "fixed_size_batches": "leaves each canary's law in a step as it is; the self-test tests the batch sizes",
    "fixed_size_batches_on_release": "acts in release mode only, and these runs are experiments",
    "batches_reused": "shows few canaries very often and the others never, where the score adds up steps",
    "batches_repeat_every_epoch": "shows each canary as often as the law does",
    "divided_by_realised_size": "tells the size of a batch, which no single canary moves visibly",
    "all_subsets_sampled": "draws a record at more steps than its subset's, which this score does not look at",
    "noise_same_in_every_run": "is seen in two runs, and this audit makes one",
    "noise_shared_by_coordinates": "adds the same noise to all canaries of a step, which leaves its law for each",
    "noise_shared_by_parameters": "adds the same noise to canaries of two layers, which leaves its law for each",
    "biases_without_noise": "reaches biases, where a clipped canary leaves a thousandth of its gradient",
    "bias_unclipped": "reaches biases, where a clipped canary leaves a thousandth of its gradient",
}
"""Why a fault is not found here; each has another audit that finds it (the self-test of the mechanism)."""


class Cell(NamedTuple):
    """What is attempted, and how often."""

    fault: str
    trainer: str
    attempts: int

    @property
    def key(self) -> str:
        return f"{self.fault}, {self.trainer}"


def cells() -> list[Cell]:
    """In the order in which they are measured: halved noise, runs without a fault, then every other fault."""
    found = []
    for trainer in TRAINERS:
        often = trainer in OFTEN
        found.append(Cell(_NO_FAULT, trainer, NULLS if often else 1))
        for fault in (*OF_ONE_RUN, *FAULTS):
            if fault.applies(trainer=trainer, mode="experiment") and not fault.settings:
                attempts = REPEATED.get(fault.name, 1)
                if fault.name == "noise_halved" and often:
                    attempts = ATTEMPTS
                found.append(Cell(fault.name, trainer, attempts))
    found += [
        Cell(fault, name, VARIANT_ATTEMPTS) for name in VARIANTS for fault in (_NO_FAULT, "noise_halved")
    ]
    found += [Cell(fault.name, BANDED, 1) for fault in FAULTS if "protection.bands" in str(fault.settings)]
    order = {"noise_halved": 0, _NO_FAULT: 1}
    return sorted(found, key=lambda cell: (cell.attempts == 1, order.get(cell.fault, 2)))


def jobs() -> Iterator[tuple[Cell, int]]:
    """Each attempt with its number; the trainers of one fault take turns."""
    for _, group in itertools.groupby(cells(), key=lambda cell: (cell.attempts, cell.fault)):
        turns = list(group)
        for number in range(turns[0].attempts):
            yield from ((cell, number) for cell in turns)


def seed_of(cell: Cell, number: int) -> int:
    """Return the seed of an attempt, which no other attempt of any cell has: all runs are independent."""
    return derive_seed(number, f"one run, {cell.key}") >> 1


def run_plan(name: str, seed: int) -> RunPlan:
    """Return a run of 200 steps on 400 records of noise, whose proven epsilon is 4."""
    trainer, protection = VARIANTS.get(name, (name, {}))
    generator = np.random.default_rng(1)
    data = (generator.standard_normal((N, FEATURES)).astype(np.float32), np.arange(N) % 3)
    options: dict[str, Any] = {
        "seed": seed,
        "threads": 1,
        "epochs": 20,
        "data": {"n_classes": 3, "validation_fraction": 0.0},
        "sampler": {"scheme": "poisson", "batch_size": N // 10},
        "model": {"hidden": [64, 64]},
        "trainer": {"kind": trainer},
        "protection": {"kind": "record", "epsilon": EPSILON, **protection},
    }
    config = with_own_inputs(load_config(options), data)
    dataset = own_dataset(config.data, config.split, data, None)
    if name not in _NOISE:  # the same at every seed
        _NOISE[name] = RunPlan.resolve(config, dataset).protection.noise_multiplier
    return RunPlan.resolve(config.replaced(protection={"noise_multiplier": _NOISE[name]}), dataset)


def attempt(cell: Cell, number: int) -> dict[str, Any]:
    """One audit with the fault planted."""
    faults = {fault.name: fault for fault in (*FAULTS, *OF_ONE_RUN)}
    seed = seed_of(cell, number)
    plan = run_plan(cell.trainer, seed)
    with contextlib.ExitStack() as stack:
        if cell.fault != _NO_FAULT:
            stack.enter_context(faults[cell.fault].planted())
        found = play_one_run(plan, CANARIES, seed=seed)
    return {"seed": seed, **summary(found)}


def summary(found: Audit) -> dict[str, Any]:
    """Return an audit's numbers by adversary and method, and which of them refuted."""
    return {
        "cpu_s": round(found.cpu_s, 2),
        "epsilon": {
            attack: {bound.method.name: round(bound.epsilon, 3) for bound in result.bounds}
            for attack, result in found.scores().items()
        },
        "refuting": {
            attack: [bound.method.name for bound in result.refuting]
            for attack, result in found.scores().items()
        },
        "normality": {attack: result.normality for attack, result in found.scores().items()},
        "power": {one.attack: one.power for one in found.of(Role.RUN)},
        "null": max(result.epsilon_lower for result in found.scores(Role.NULL).values()),
        "broken_found": all(one.refutes for one in found.of(Role.BROKEN)),
    }


def normal_ceiling() -> float:
    """Return the most that the normal bound of an audit can show, of seven bounds that share an error."""
    return ceiling(Method.NORMAL_BOUND, CANARIES, EPSILON, 1e-5, confidence=1 - (1 - CONFIDENCE) / 7)


def measure() -> None:
    torch.set_num_threads(1)
    results = load_results(NAME).get("cells", {})
    for cell, number in jobs():
        kept = results.setdefault(cell.key, {**cell._asdict(), "runs": []})
        if len(kept["runs"]) <= number:
            kept["runs"].append(attempt(cell, number))
            save_results(
                NAME, {"canaries": CANARIES, "epsilon": EPSILON, "confidence": CONFIDENCE, "cells": results}
            )


def table_rows(cells: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a line for each fault and number of attempts: the trainers, and what was found in all of them."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cell in sorted(cells.values(), key=lambda cell: (cell["fault"] == _NO_FAULT, cell["fault"])):
        groups.setdefault((cell["fault"], len(cell["runs"])), []).append(cell)
    return [_line(fault, found) for (fault, _), found in groups.items()]


def _line(fault: str, cells: list[dict[str, Any]]) -> tuple[str, ...]:
    runs = [run for cell in cells for run in cell["runs"]]
    seen = sorted({name for run in runs for name, found in run["refuting"].items() if found})
    by_method = [
        share(runs, lambda run, name=method.name: any(name in found for found in run["refuting"].values()))
        for method in (Method.ANY_MECHANISM, Method.GAUSSIAN_TRADE_OFF, Method.NORMAL_BOUND)
    ]
    return (
        fault,
        "; ".join(cell["trainer"] for cell in cells),
        share(runs, lambda run: any(run["refuting"].values())),
        *by_method,
        ", ".join(seen) or UNSEEN.get(fault, "–"),
        f"{np.median([run['epsilon']['all updates'][Method.NORMAL_ESTIMATE.name] for run in runs]):.2f}",
    )


def share(runs: list[dict[str, Any]], holds: Callable[[dict[str, Any]], bool]) -> str:
    """Say in how many runs something holds."""
    return f"{sum(holds(run) for run in runs)} of {len(runs)}"


def at_its_delta(cells: dict[str, Any]) -> str:
    """Return in how many runs the normal bound exceeds epsilon at the claim's own delta if sampling is too frequent."""
    runs = [run for cell in cells.values() if cell["fault"] == "sampled_too_often" for run in cell["runs"]]
    bound = Method.NORMAL_BOUND.name
    return share(runs, lambda run: max(found.get(bound, 0.0) for found in run["epsilon"].values()) > EPSILON)


def null_text(cells: dict[str, Any]) -> str:
    """Say what runs without a fault showed: alarms, how tight the readings are, and the controls."""
    runs = [run for cell in cells.values() if cell["fault"] == _NO_FAULT for run in cell["runs"]]
    alarms = sum(any(run["refuting"].values()) for run in runs)
    medians = {
        method: float(np.median([run["epsilon"]["all updates"][method.name] for run in runs]))
        for method in Method
    }
    shown = ", ".join(
        f"{method.value} {value:.2f} ({value / EPSILON:.2f})" for method, value in medians.items()
    )
    false = sum(run["null"] > 0 for run in runs)
    found = sum(run["broken_found"] for run in runs)
    power = min(run["power"]["all updates"] for run in runs)
    return (
        f"Without a fault: {alarms} alarms of any bound in {len(runs)} runs. Medians from all updates, with their "
        f"share of the proven epsilon: {shown}. Controls of these runs: a bound above 0 from coins that no training "
        f"followed in {false}, half of the noise taken away found in {found} (power {power:.2f})."
    )


if __name__ == "__main__":
    program(measure)
