"""Which accountant is tightest: the convex paper's Figures 1, 6 and 8, from formulas only?

Figure 1: epsilon by epochs of the last iterate by the paper's Theorem 2.8 (claimed: its constants do not cover its
runs, docs/convex.md), for three products eta lambda, and of Poisson DP-SGD; 60,000 records, batches of 1,000, sigma =
15. Figure 6: epsilon by steps of batches sampled without replacement, sigma = 5, batch over records 0.01: the Renyi
bound of Wang et al. (2019, theorem 9) and the dominating pair of Zhu et al. (2022, proposition 30), composed
numerically. A step has sensitivity 1 there, under replacing a record. Figure 8: delta by epsilon of one epoch of 1,000
shuffled batches (and of 60, as the paper trains), sigma = 5, sensitivity 2: the numerical bound of Feldman et al.
(2021, theorem 3.8) against the Gaussian mechanism without amplification. Draws docs/convex_accountants.png.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
from dp_accounting import get_epsilon_gaussian, rdp
from dp_accounting.pld import pld_pmf
from scipy.stats import binom, norm

from benchmarks.results_file import save_results
from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Adjacency
from opusim.accounting.mechanisms.convex import cyclic_descent_mu
from opusim.accounting.mechanisms.records import PoissonGaussian
from opusim.training.runs.drawing import save_figure, style

MODULE, NAME = "benchmarks.convex.accountants", "convex_accountants"
DELTA = 1e-5
PRODUCTS, SIGMA, BATCHES, EPOCHS = (5.4e-5, 1e-4, 2e-4), 15.0, 60, (1, 5, 10, 25, 50, 100, 200, 300, 400)
WOR_SIGMA, WOR_RATE, WOR_STEPS = 5.0, 0.01, (100, 300, 1_000, 3_000, 10_000)
WOR_GRID, WOR_LIMIT = 2e-5, 0.06
SHUFFLED, SHUFFLE_MU = (1_000, 60), 2 / 5.0
SHUFFLE_EPSILONS = tuple(np.round(np.linspace(0.2, 3.0, 15), 2).tolist())
PICTURE = Path(__file__).parents[2] / "docs" / "convex_accountants.png"


def last_iterate(product: float, epochs: int) -> float:
    """Return epsilon by Theorem 2.8: each step moves by 2 in units of the clip, the noise is sigma of them."""
    mu = cyclic_descent_mu(2 / SIGMA, BATCHES, epochs, math.log1p(-product))
    return float(get_epsilon_gaussian(1 / mu, DELTA))


def dp_sgd(epochs: int) -> float:
    """Return epsilon of Poisson batches of the same noise, for replacing a record."""
    run = PoissonGaussian(
        noise_multiplier=SIGMA,
        sampling_probability=1 / BATCHES,
        steps=epochs * BATCHES,
        adjacency=Adjacency.REPLACE_ONE,
    )
    return guarantees([run], delta=DELTA)[0].epsilon


def renyi_without_replacement(steps: int) -> float:
    """Return epsilon by the Renyi bound of Wang et al."""
    accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    step = dp.SampledWithoutReplacementDpEvent(round(1 / WOR_RATE) * 100, 100, dp.GaussianDpEvent(WOR_SIGMA))
    return float(accountant.compose(step, steps).get_epsilon(DELTA))


def profile(epsilon: np.ndarray) -> np.ndarray:
    """Return delta of one step without replacement at epsilon of either sign (Zhu et al., proposition 30).

    With base pair (P, Q): H_a((1 - q) Q + q P, Q) for a >= 1, H_a(P, (1 - q) P + q Q) for a < 1.
    """
    q, a = WOR_RATE, np.exp(epsilon)
    weight = np.where(a >= 1, q, 1 - a * (1 - q))
    inner = np.where(a >= 1, 1 + (a - 1) / q, a * q / np.where(a >= 1, 1.0, weight))
    return np.asarray(weight * gaussian_profile(np.log(inner), 1 / WOR_SIGMA))


def gaussian_profile(epsilon: Any, mu: float) -> Any:
    """Return delta of the Gaussian mechanism of sensitivity mu, noise 1."""
    return norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


def numerical_without_replacement(steps: int) -> float:
    """Return epsilon of the composed dominating pair, rounded to the pessimistic side."""
    bins = np.arange(-round(WOR_LIMIT / WOR_GRID), round(WOR_LIMIT / WOR_GRID) + 1)
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots(WOR_GRID, bins, profile(bins * WOR_GRID))
    return float(pmf.self_compose(steps).get_epsilon_for_delta(DELTA))


def shuffled_delta(epsilon: float, n: int) -> float:
    """Return delta of one epoch of shuffled batches: the least over the local epsilon_0 of Feldman et al.

    An (epsilon_0, delta_0) local step gives H(epsilon; clones) + (e^epsilon + 1) (1 + e^-epsilon_0 / 2) n delta_0.
    """

    def bound(local: float) -> float:
        missed = float(gaussian_profile(local, SHUFFLE_MU))
        return clones(epsilon, local, n) + (math.exp(epsilon) + 1) * (1 + math.exp(-local) / 2) * n * missed

    return min(1.0, min(bound(local) for local in np.linspace(1.0, 8.0, 71)))


def clones(epsilon: float, local: float, n: int) -> float:
    """Return H_(e^epsilon)(P, Q) of P = (A + D, C - A + 1 - D), Q with 1 - D (theorem 3.1 there).

    C is Bin(n - 1, e^-local), A is Bin(C, 1/2), and D is 1 with probability e^local / (e^local + 1).
    """
    p = 1 / (1 + math.exp(-local))
    low, high = binom.ppf([1e-14, 1 - 1e-14], n - 1, math.exp(-local))
    total = float(1 - binom.cdf(high, n - 1, math.exp(-local)) + binom.cdf(low - 1, n - 1, math.exp(-local)))
    for c in range(int(low), int(high) + 1):
        a = np.arange(c + 2)
        with_one, without = binom.pmf(a - 1, c, 0.5), binom.pmf(a, c, 0.5)
        difference = p * with_one + (1 - p) * without - math.exp(epsilon) * ((1 - p) * with_one + p * without)
        total += float(binom.pmf(c, n - 1, math.exp(-local)) * np.maximum(difference, 0.0).sum())
    return total


def draw(found: dict[str, Any]) -> None:
    """Three panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    for number, (name, values) in enumerate(found["by_epochs"].items()):
        first.plot(EPOCHS, values, label=name, **style(number))
    first.set(title="Figure 1: the last iterate", xlabel="epochs", ylabel="epsilon at delta 1e-5")
    for number, (name, values) in enumerate(found["without_replacement"].items()):
        second.plot(WOR_STEPS, values, label=name, **style(number))
    second.set(title="Figure 6: without replacement", xlabel="steps", ylabel="epsilon at delta 1e-5")
    second.set_xscale("log")
    for number, (name, values) in enumerate(found["shuffled"].items()):
        third.plot(SHUFFLE_EPSILONS, values, label=name, **style(number))
    third.set(title="Figure 8: one shuffled epoch", xlabel="epsilon", ylabel="delta")
    third.set_yscale("log")
    for axes in (first, second, third):
        axes.legend(frameon=False, fontsize=8)
    save_figure(figure, PICTURE)


def below(found: dict[str, list[float]], at: int) -> int:
    """Return how many of some curves are below the last one at a place."""
    *others, last = found.values()
    return sum(values[at] < last[at] for values in others)


def above(values: list[float], found: dict[str, list[float]]) -> str:
    """Say from which epsilon on a curve of deltas is above the last one; empty if it never is."""
    for epsilon, mine, other in zip(SHUFFLE_EPSILONS, values, list(found.values())[-1], strict=True):
        if mine > other:
            return f"epsilon {epsilon:g}, where the Gaussian has {other:.1e}"
    return ""


def main() -> None:
    found: dict[str, Any] = {
        "by_epochs": {
            **{
                f"Theorem 2.8, eta lambda = {product:g}": [last_iterate(product, epochs) for epochs in EPOCHS]
                for product in PRODUCTS
            },
            "Poisson DP-SGD": [dp_sgd(epochs) for epochs in EPOCHS],
        },
        "without_replacement": {
            "Renyi, Wang et al.": [renyi_without_replacement(steps) for steps in WOR_STEPS],
            "dominating pair, Zhu et al.": [numerical_without_replacement(steps) for steps in WOR_STEPS],
        },
        "shuffled": {
            **{
                f"{n} batches, Feldman et al.": [shuffled_delta(epsilon, n) for epsilon in SHUFFLE_EPSILONS]
                for n in SHUFFLED
            },
            "Gaussian, not amplified": [
                float(gaussian_profile(epsilon, SHUFFLE_MU)) for epsilon in SHUFFLE_EPSILONS
            ],
        },
    }
    save_results(NAME, found)
    draw(found)


if __name__ == "__main__":
    main()
