"""Does each privacy claim of the four papers survive an audit? The claims' rows of benchmarks/papers/README.md.

    OPUSIM_DATA=... python -m benchmarks.attacks.claims measure     (resumes; about a minute of one core)

Claims about what opusim runs and proves are audited by the games of `benchmarks.attacks.guarantees`. Here stand the
claims that do not hold: photonic DFA and likelihood ratio training as published, attacked in one training from its
updates, and two formulas that an exact instance refutes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from scipy.integrate import trapezoid

from benchmarks.attacks import guarantees
from benchmarks.markdown import command, table
from benchmarks.options import program
from benchmarks.pdfa import table1
from benchmarks.results_file import load_results, save_results
from benchmarks.ulr import table1 as ulr_table1
from opusim.accounting import numerics
from opusim.accounting.audit import gaussian_mu
from opusim.accounting.guarantee import Status
from opusim.accounting.mechanisms.convex import cyclic_descent_mu
from opusim.accounting.mechanisms.selection import selection_bounds, theorem_epsilon
from opusim.training.attacks.one_run.audit import play_one_run
from opusim.training.config import load_config
from opusim.training.data.catalogue import build_dataset
from opusim.training.data.tables import own_dataset
from opusim.training.engine.plan import RunPlan, with_own_inputs

MODULE, NAME = "benchmarks.attacks.claims", "claims_audited"
DELTA, SEED = 1e-5, 20261122
RECORDS, CANARIES = 2560, 1000
OWN = {"n_classes": 10, "validation_fraction": 0.0, "standardise": False}
MEAN_TRIALS, SEARCHES = 20, ((1.33, 2.88), (4.76, 8.91))
"""Of the convex paper's private tuning: expected number of trials; epsilon of a trial and of the search, as printed."""


# What is measured


def published_run(trainer: Mapping[str, Any], sigma: float, **sections: Any) -> RunPlan:
    """Return one epoch of photonic DFA as published, with the network and batch of its Table 1."""
    base = table1.configuration("pdfa", "0.2", 0)
    device = {"name": "gaussian", "noise": {"sigma": sigma}}
    rule = {**base["trainer"], **trainer}
    return _plan("fashion-mnist", {**base, "epochs": 1, "device": device, "trainer": rule, **sections})


def _plan(name: str, sections: Mapping[str, Any]) -> RunPlan:
    """Return a run on the first training records of a data set."""
    known = build_dataset(load_config({"data": {"name": name}}).data, None).train
    data = (known.x[:RECORDS].flatten(1).numpy(), known.y[:RECORDS].numpy())
    config = with_own_inputs(load_config({**sections, "threads": 1, "data": OWN}), data)
    return RunPlan.resolve(config, own_dataset(config.data, config.split, data, None))


def finite_run() -> RunPlan:
    """Return a run that the paper's formula covers: slopes of 1, and activations clipped from both sides."""
    model = {**table1.BASE["model"], "activation": "identity"}
    trainer = {"tau_h_max": 1.0, "tau_h_min": 1.0, "through_clip": False}
    optimizer = {**table1.BASE["optimizer"], "lr": 1e-4}
    return published_run(trainer, 1e4, model=model, optimizer=optimizer)


def likelihood_ratio_run() -> RunPlan:
    """Return four epochs of DP-ULR as published, with the network, batch and largest sigma_0 of its Table 1.

    SGD stands for Adam, whose moments the attack does not undo; the claim covers any optimizer. Eight copies stand for
    30, and batches are sampled with rejection, as Theorem 2 wants it.
    """
    sections = {
        "epochs": 4,
        "model": ulr_table1.BASE["model"],
        "optimizer": {"name": "sgd", "lr": 1e-3, "momentum": 0.0},
        "sampler": {"scheme": "poisson-min-batch", "batch_size": 64, "min_batch_size": 48},
        "trainer": {"kind": "ulr", "form": "published", "copies": 8, "sigma": 1.0, "target_std": 8.0},
    }
    return _plan("mnist", sections)


RUNS: dict[str, Callable[[], RunPlan]] = {
    "table 1": lambda: published_run({}, 10 * 0.2 / math.sqrt(table1.WIDTH)),
    "finite formula": finite_run,
    "likelihood ratio": likelihood_ratio_run,
}


def measure() -> None:
    """Make the audits that are missing."""
    torch.set_num_threads(1)
    for name, plan in RUNS.items():
        if name in load_results(NAME).get("runs", {}):
            continue
        found = play_one_run(plan(), CANARIES, seed=SEED, delta=DELTA)
        (result,) = found.scores().values()
        (bound,) = result.bounds
        claims = [one for one in found.guarantees if one.status is Status.CLAIMED]
        claim = min(claims, key=lambda one: one.epsilon)
        line = {
            "claimed": claim.epsilon if math.isfinite(claim.epsilon) else None,
            "failed": sorted(set(re.findall(r"layer \d+: (.*?):", claim.reason or ""))),
            "formula": result.plan.claimed,
            "bound": bound.epsilon,
            "ceiling": bound.ceiling,
            "guesses": bound.guesses,
            "correct": bound.correct,
            "auc": result.auc,
            "cpu_s": round(found.cpu_s, 1),
        }
        save_results(NAME, {"delta": DELTA, "runs": {**load_results(NAME).get("runs", {}), name: line}})
        print(name, line, flush=True)


# Exact instances


def search_epsilon(mu: float, mean: float, delta: float) -> float:
    """Return the epsilon of a private search whose score prefers outputs that the other world makes likelier.

    A trial's output is N(0, 1) or N(mu, 1). Outputs below a threshold t have the best scores, and of the others the
    higher ones. An output x >= t is released with the density m e^(-m a(x)) times its own, a(x) = Phi(t) + 1 - Phi(x)
    in the first world: there, more trials beat it. The t that gives the largest epsilon is taken.
    """
    x = np.linspace(-9.0, mu + 9.0, 40_001)

    def excess(threshold: float, epsilon: float) -> float:
        first, second = (_released(x, shift, threshold, mean) for shift in (0.0, mu))
        return float(trapezoid(np.maximum(second - math.exp(epsilon) * first, 0.0), x)) - delta

    def epsilon_of(threshold: float) -> float:
        if excess(threshold, 0.0) <= 0:
            return 0.0
        return float(numerics.find_root(lambda epsilon: excess(threshold, epsilon), 0.0, 100.0))

    return max(epsilon_of(threshold) for threshold in np.linspace(-1.0, 1.0, 21))


def _released(x: np.ndarray, shift: float, threshold: float, mean: float) -> np.ndarray:
    """Return the density of the best trial's output."""
    own = x - shift
    below = float(numerics.normal_cdf(threshold - shift))
    better = np.where(x < threshold, numerics.normal_cdf(own), below + numerics.normal_cdf(-own))
    density = np.exp(-(own**2) / 2) / math.sqrt(2 * math.pi)
    return np.asarray(mean * np.exp(-mean * better) * density)


FOUR_GATES_RATE = 2.05 / 4.5
"""Learning rate of the instance with four gates."""


def four_gates() -> tuple[float, float]:
    """Return mu over mu0, claimed and exact, of an instance of Theorem 2.8 with the paper's constants.

    Four gates are open for x = 1, the only feature; squared loss, lambda = 0.5, two batches, 50 epochs. The Hessian of
    a record is |x|^2 times the matrix of ones, whose eigenvalue along (1, 1, 1, 1) / 2 is 4 |x|^2. Lemma 3.2 has |x|^2.
    """
    gates, eta, lam, batches, epochs = 4, FOUR_GATES_RATE, 0.5, 2, 50
    claimed_c = max(abs(1 - eta * lam), abs(1 - eta * (1 + lam)))
    rho = 1 - eta * (gates + lam)
    steps = batches * epochs
    later = rho ** np.arange(steps - 1, -1, -1.0)
    exact = max(abs(np.sum(later[j::batches])) for j in range(batches)) / math.sqrt(np.sum(later**2))
    return cyclic_descent_mu(1.0, batches, epochs, math.log(claimed_c)), float(exact)


# The rows


def _of_training(name: str) -> tuple[str, str, str, str]:
    """Return the row of an audit of one training; a claim whose hypotheses fail names them."""
    line = load_results(NAME).get("runs", {}).get(name)
    if line is None:
        return "", "", f"not measured ({command(MODULE, 'measure')})", ""
    audit = (
        f"at least {line['bound']:.2f}: from the updates of one training, {line['correct']} of {line['guesses']} "
        f"guesses on {CANARIES:,} planted records are right"
    )
    value, formula = line["claimed"], line["formula"]
    failed = f"infinite (the least that the formula could give: {formula:.2g}); what fails: {', '.join(line['failed'])}"
    claimed = failed if value is None else f"{value:.2g}"
    least = formula if value is None else value
    formula_only = "its formula is " if value is None else ""
    if line["bound"] > least:
        return claimed, "none for records", audit, f"{formula_only}**refuted**"
    return claimed, "none for records", audit, "vacuous: too large for any audit to reach"


def _of_game(name: str, figure: str = "proven") -> tuple[str, str, str, str]:
    """Return the row of a game of `benchmarks.attacks.guarantees`; the claim is one of its figures."""
    line = load_results(guarantees.NAME).get("rows", {}).get(name)
    if line is None:
        return "", "", f"not measured ({command(guarantees.MODULE, 'measure')})", ""
    reached = max(line["any_mechanism"], line["gaussian_law"] or 0.0)
    return (
        f"{line[figure]:.2f}",
        f"{line['proven']:.2f}",
        f"at least {reached:.2f}, with much less noise {line['less_noise']:.2f} ({line['trials']:,} trials)",
        "**refuted**" if reached > line[figure] else "not refuted",
    )


def _of_records() -> tuple[str, str, str, str]:
    lines = (line for line in guarantees.table_rows({}) if "`record_central`" in line[0])
    line = next(lines, ("–",) * 9)
    return line[2], line[2], f"at least {line[4]}, with half the noise {line[8].split()[0]}", "not refuted"


def _of_search() -> tuple[str, str, str, str]:
    mus = [gaussian_mu(base, DELTA) for base, _ in SEARCHES]
    printed = [value for _, value in SEARCHES]
    least, theorem, exact = (
        [bound(mu, MEAN_TRIALS, DELTA) for mu in mus]
        for bound in (lambda *args: selection_bounds(*args).upper, theorem_epsilon, search_epsilon)
    )
    shown = [", ".join(f"{value:.2f}" for value in values) for values in (printed, least, theorem, exact)]
    refuted = all(value > claimed for value, claimed in zip(exact, printed, strict=True))
    return (
        shown[0],
        f"{shown[1]} (Theorem 5.1 itself gives {shown[2]})",
        f"an exact instance has {shown[3]}",
        "**refuted**" if refuted else "not refuted",
    )


def _of_four_gates() -> tuple[str, str, str, str]:
    claimed, exact = (numerics.gaussian_bounds(0.4 * ratio, DELTA) for ratio in four_gates())
    refuted = "**refuted**" if exact.lower > claimed.upper else "not refuted"
    audit = f"an exact instance has {exact.lower:.2f}"
    return f"{claimed.upper:.2f}", "refused: the rate is too high", audit, refuted


KINDS: dict[str, Callable[..., tuple[str, str, str, str]]] = {
    "training": _of_training,
    "game": _of_game,
    "records": _of_records,
    "search": _of_search,
    "four gates": _of_four_gates,
    "unaudited": lambda reason: ("", "", f"not audited: {reason}", ""),
}
"""Make epsilon claimed, epsilon proven, the audit, and what follows, of a row of papers.toml."""


def page_table(claims: Iterable[Mapping[str, Any]]) -> str:
    """Return what benchmarks/papers/README.md shows of a paper's claims in papers.toml."""
    rows = [(claim["text"], claim["in"], *KINDS[claim["audit"][0]](*claim["audit"][1:])) for claim in claims]
    header = "claim | in | epsilon claimed | epsilon proven | audit | so the claim is"
    return f"### Privacy claims\n\n{table(header, rows)}"


if __name__ == "__main__":
    program(measure)
