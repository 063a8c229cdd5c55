"""How soon do bets on each game find halved noise, and how often do they raise a false alarm wherever they are read?

    python -m benchmarks.attacks.anytime measure     (ten minutes of one core)
    python -m benchmarks.attacks.anytime show

Ideal scores of a Gaussian mechanism are played against its claim, with the noise that the claim names and with half of
it. Beside the bets stands what is fixed beforehand: a test of the guesses of power 0.9, at the best threshold, which
it is told. The planted fault reads that test after every game.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom, norm

from benchmarks.markdown import command, markdown, section, verdict
from benchmarks.results_file import load_results, save_results
from opusim.accounting.anytime import AnytimeAudit, AnytimePlan, strength_of
from opusim.accounting.one_run import Law
from opusim.randomness.streams import derive_seed
from opusim.tables import print_table

MODULE, NAME = "benchmarks.attacks.anytime", "anytime_audits"
EPSILONS, DELTA, RUNS, NULL_RUNS, LEVEL, POWER = (1.0, 3.0), 1e-5, 300, 1000, 0.05, 0.9
MOST = {1.0: 3000, 3.0: 500}
"""Games of a run, at most."""
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
BEST_RATIO, LAST_PEEK, FIRST_PEEK = 0.8, 500, 20
COLUMN_NAMES = (
    *(
        "claim",
        "games of a fixed test of power 0.9",
        "games of the bets: median",
        "ratio",
        "three quarters within",
    ),
    *("at most 0.8", "false alarms, read after every game", "false alarms of the fixed test, read so"),
)


def games(mu: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ideal scores of a Gaussian mechanism, and the coins.

    Args:
        mu: Distance of the two worlds over the noise's deviation.
        count: Number of games.
        seed: Of coins and scores.
    """
    generator = np.random.default_rng(seed)
    coins = generator.random(count) < 0.5
    return np.where(coins, mu / 2, -mu / 2) + generator.standard_normal(count), coins


def fixed_test(mu: float) -> tuple[int, float, float]:
    """Return the fewest games in which a fixed test of guesses finds half of the noise with power 0.9.

    The share of games that is guessed is the best one, at its known threshold. Under a mu of the claim no attacker who
    guesses a share s of the games is right in more than min over epsilon of (e^epsilon s + delta) / (1 + e^epsilon).

    Args:
        mu: That of the claim.

    Returns:
        The games, the threshold, and the largest share of right guesses under the claim.
    """
    found = []
    slopes = mu * np.linspace(0.0, 3.0, 61)
    deltas = norm.cdf(mu / 2 - slopes / mu) - np.exp(slopes) * norm.cdf(-mu / 2 - slopes / mu)
    for share in SHARES:
        threshold = 0.0
        if share < 1:
            threshold = brentq(lambda t, s=share: norm.sf(t - mu) + norm.cdf(-t - mu) - s, 0.0, 20.0)
        right = norm.sf(threshold - mu) / share
        allowed = float(np.min((np.exp(slopes) * share + deltas) / (1 + np.exp(slopes)))) / share
        for count in range(5, 3000):
            guesses = round(count * share)
            if binom.sf(binom.isf(LEVEL, guesses, allowed), guesses, right) >= POWER:
                found.append((count, threshold, allowed))
                break
    return min(found)


def measured(epsilon: float) -> dict[str, Any]:
    """Play all runs against one claim."""
    mu, most = strength_of(Law.GAUSSIAN, epsilon, DELTA), MOST[epsilon]
    plan = AnytimePlan(delta=DELTA, claimed=epsilon, law=Law.GAUSSIAN, centre=0.0, confidence=1 - LEVEL)
    fixed, _, _ = fixed_test(mu)
    whole = (
        2 * norm.cdf(mu / 2) - 1
    )  # the largest excess of right over wrong guesses, if every game is guessed
    found: dict[str, list[Any]] = {"weaker": [], "null": []}
    peeking = 0
    for name, actual, runs in (("weaker", 2 * mu, RUNS), ("null", mu, NULL_RUNS)):
        for run in range(runs):
            scores, coins = games(actual, most, derive_seed(run, f"{name} {epsilon:g}"))
            game = AnytimeAudit(plan, bounds=False)
            game.add(scores, coins)
            found[name].append(game.result.refuted_at)
            if name == "null":
                right = np.cumsum((scores > 0) == coins)[:LAST_PEEK]
                tails = binom.sf(right - 1, np.arange(1, LAST_PEEK + 1), (1 + whole) / 2)
                peeking += bool((tails[FIRST_PEEK - 1 :] <= LEVEL).any())
    return {"epsilon": epsilon, "fixed": fixed, "most": most, "peeking_alarms": peeking, **found}


def measure() -> None:
    rows = [measured(epsilon) for epsilon in EPSILONS]
    save_results(NAME, {"delta": DELTA, "runs": RUNS, "null_runs": NULL_RUNS, "level": LEVEL, "rows": rows})


def table_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a line for each claim."""
    lines = []
    for row in results.get("rows", ()):
        found = np.array([np.inf if one is None else one for one in row["weaker"]])
        middle, late = np.quantile(found, [0.5, 0.75], method="inverted_cdf")
        alarms, ratio = sum(one is not None for one in row["null"]), middle / row["fixed"]
        lines.append(
            (
                f"epsilon {row['epsilon']:g}",
                f"{row['fixed']}",
                f"{middle:.0f}",
                f"{ratio:.2f}",
                f"{late:.0f}",
                verdict(bool(ratio <= BEST_RATIO)),
                f"{alarms} of {len(row['null'])} ({100 * alarms / len(row['null']):.1f} %)",
                f"{row['peeking_alarms']} of {len(row['null'])}",
            )
        )
    return lines


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    results = load_results(NAME)
    if not results:
        return ""
    text = (
        f"Ideal scores of a Gaussian mechanism, {results['runs']} runs with half of the noise and "
        f"{results['null_runs']:,} without a fault at each claim at delta {results['delta']:g} "
        f"({results['date']}, {command(MODULE, 'measure')}). Half of the noise is found once the wealth of the bets "
        "reaches 20; the fixed test guesses with a threshold that it is told, and counts all games. False alarms are "
        "those of runs whose noise is what is claimed: the bets are read after every game up to "
        + " and ".join(f"{row['most']:,} (epsilon {row['epsilon']:g})" for row in results["rows"])
        + ", and at most 5 % may alarm, up to the error of the count. The last column is the planted fault: a fixed "
        f"test that is read after each of {FIRST_PEEK} to {LAST_PEEK} games."
    )
    return section("Audits that may stop at any time", text, markdown(COLUMN_NAMES, table_rows(results)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["measure", "show"], nargs="?", default="show")
    if parser.parse_args().what == "measure":
        measure()
    print_table("Audits that may stop at any time", COLUMN_NAMES, table_rows(load_results(NAME)))


if __name__ == "__main__":
    main()
