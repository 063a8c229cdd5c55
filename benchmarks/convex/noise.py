"""What noise does the last iterate take at one epsilon, by batches and epochs, and what does choosing settings cost?

Noise: 60,000 records, eta 1.9, lambda 0, delta 1e-5; the least multiplier by the proven theorem with the noise of all
steps alike and with one larger noise at the end, and what each puts on a weight in all (in units of C / n). Choosing:
epsilon of the best of a Poisson number of trials, by three theorems, at the paper's base epsilons.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from dp_accounting import get_sigma_gaussian

from benchmarks.results_file import save_results
from opusim.accounting.composition import calibrate_noise
from opusim.accounting.mechanisms.convex import ConvexLastIterate
from opusim.accounting.mechanisms.selection import refined_epsilon, renyi_epsilon, theorem_epsilon

MODULE, NAME = "benchmarks.convex.noise", "convex_accounting"
DELTA, EPSILONS, RATE, RECORDS = 1e-5, (4.76, 1.33), 1.9, 60_000
SCHEDULES = ((60, 400), (60, 40), (60, 20), (240, 20), (480, 10), (960, 5), (1, 40))
MEANS = (5, 10, 20)


def noise_row(epsilon: float, batches: int, epochs: int) -> dict[str, Any]:
    """Multipliers and total noise for one epsilon and schedule."""
    plain = ConvexLastIterate(
        objective="margin", clip=0.5, learning_rate=RATE, batches=batches, epochs=epochs, noise_multiplier=1.0
    )
    row: dict[str, Any] = {"epsilon": epsilon, "batches": batches, "epochs": epochs}
    for name, final in (("without", 0.0), ("with", math.sqrt(batches - 1))):
        found, _ = calibrate_noise(replace(plain, final_noise=final), target_epsilon=epsilon, delta=DELTA)
        step = RATE * found.noise_multiplier * batches  # eta z C / b in units of C / n
        row[name] = {
            "noise_multiplier": found.noise_multiplier,
            "total": step * math.sqrt(batches * epochs + final**2),
        }
    return row


def main() -> None:
    """Compute, print and save both tables."""
    noise = [noise_row(epsilon, *schedule) for epsilon in EPSILONS for schedule in SCHEDULES]
    for row in noise:
        print(row)
    tuning = []
    for epsilon in EPSILONS:
        mu = 1 / get_sigma_gaussian(epsilon, DELTA)
        for mean in MEANS:
            bounds = {"theorem": theorem_epsilon, "refined": refined_epsilon, "renyi": renyi_epsilon}
            tuning.append(
                {"epsilon": epsilon, "mu": mu, "mean": mean}
                | {name: bound(mu, mean, DELTA) for name, bound in bounds.items()}
            )
            print(tuning[-1])
    save_results(NAME, {"delta": DELTA, "noise": noise, "tuning": tuning})


if __name__ == "__main__":
    main()
