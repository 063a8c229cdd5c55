"""The tables and figures of the paper on convex ReLU networks."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

from benchmarks.convex import accuracy, curves, hyperplanes, tuned
from benchmarks.convex.accountants import EPOCHS, SHUFFLE_EPSILONS
from benchmarks.markdown import with_error
from benchmarks.pages.papers.item import blocks, compared, table
from benchmarks.results_file import load_results

NETWORK, LOGISTIC = "ReLU network, DP-SGD", "logistic regression, DP-SGD"
ROWS = (accuracy.LAST_ITERATE, "convex, Poisson DP-SGD", NETWORK)
PAPER = {
    "mnist": {1.33: (92.7, 92.9, 91.6), 4.76: (94.4, 94.9, 94.4)},
    "cifar-10": {1.33: (41.6, 41.7, 42.7), 4.76: (45.5, 45.9, 47.1)},
}
"""Tables 1 and 2 of the paper, by data set and epsilon of one training, in the order of `ROWS`."""


def searches(data: str) -> str:
    """Return what private searches on a data set find, and settings that no epsilon pays for; empty without results.

    Args:
        data: The data set.
    """
    rows = [*_searched(data), *_measured(data)]
    paper = [
        (
            f"{name}, searched, the paper",
            *(
                text
                for epsilon, values in PAPER[data].items()
                for text in (f"{accuracy.TUNED[epsilon]:g}", f"{values[k]:.1f}")
            ),
        )
        for k, name in enumerate(ROWS)
    ]
    text = (
        "Test accuracy [%] at the paper's two noise levels. *Searched*: epsilon pays for the whole search. *One "
        "training*: epsilon pays for the training, not for the choice of its settings:"
    )
    header = ("trained by", "first epsilon", "test [%]", "second epsilon", "test [%]")
    note = (
        f"{_on_par(data)} The paper's searches cost more than it states: an exact instance is among the privacy claims "
        "below."
    )
    return blocks(text, table(header, [*rows, *paper]), note) if rows else ""


def _on_par(data: str) -> str:
    """Say how far the last iterate is from the network at the epsilons of one training, ours and the paper's."""
    parts = []
    for epsilon, values in PAPER[data].items():
        ours, network = (accuracy.tests(row, data, epsilon) for row in (ROWS[0], NETWORK))
        if not ours or not network:
            return ""
        apart = statistics.fmean(ours) - statistics.fmean(network)
        words = "" if compared(ours, network) else ", within two standard errors of zero"
        parts.append(f"{apart:+.1f} ({values[0] - values[2]:+.1f}) at {epsilon:g}{words}")
    return (
        "*The paper finds* the convex models on par with the network. *Here* the last iterate of one training less the "
        f"network is (in the paper's table) {' and '.join(parts)}."
    )


def _searched(data: str) -> Iterator[tuple[str, ...]]:
    for mean in (mean for name, mean in tuned.PLANNED if name == data):
        found = [
            rows
            for (name, _, trials), rows in sorted(tuned.cells().items())
            if (name, trials) == (data, mean)
        ]
        shown = [
            text
            for rows in found
            for text in (
                f"{max(row['epsilon'] for row in rows):.2f}",
                with_error([row["test"] for row in rows if row["test"] is not None], ".1f"),
            )
        ]
        if shown:
            yield f"{ROWS[0]}, searched, {mean:g} trials expected", *shown


def _measured(data: str) -> Iterator[tuple[str, ...]]:
    for row in ROWS:
        tests = {epsilon: accuracy.tests(row, data, epsilon) for epsilon in accuracy.TUNED}
        if all(tests.values()):
            shown = [text for e, part in tests.items() for text in (f"{e:g}", with_error(part, ".1f"))]
            yield f"{row}, one training", *shown


def by_epsilon(data: str, conclusion: str) -> str:
    """Return the accuracies by epsilon, and where the convex model is ahead; empty without results.

    Args:
        data: The data set.
        conclusion: What the paper finds.
    """
    found = curves.accuracies(data)
    if not found:
        return ""
    last, sampled, network, logistic = (found.get(row, {}) for row in (*ROWS, LOGISTIC))
    pairs = {
        "the last iterate, the network": (last, network),
        "the convex model under DP-SGD, the network": (sampled, network),
        "the last iterate, logistic regression": (last, logistic),
        "the network, logistic regression": (network, logistic),
    }
    rows = [(*name.split(", "), *_compared(*pair)) for name, pair in pairs.items()]
    return blocks(
        "Test accuracy [%] by epsilon:",
        curves.table(data),
        f"*The paper* {conclusion}. *Here*, counting differences of more than two standard errors:",
        table(("is", "against", "ahead at epsilon", "behind at epsilon"), rows),
    )


def _compared(ours: dict[float, list[float]], other: dict[float, list[float]]) -> tuple[str, str]:
    """Return the epsilons at which a mean is more than two standard errors of the difference ahead, and behind."""
    signs = {epsilon: compared(ours[epsilon], other.get(epsilon, [])) for epsilon in sorted(ours)}
    ahead, behind = (", ".join(f"{e:g}" for e in signs if signs[e] == sign) or "none" for sign in (1, -1))
    return ahead, behind


def ends(noises: list[float]) -> str:
    """Return the test accuracies at the end of the curves of some noise levels; empty without results."""
    found = hyperplanes.cells(hyperplanes.EPOCHS)
    rows = [
        (
            "the network" if p is None else f"P = {p}",
            *(with_error([curve["test"] for curve in found.get((noise, p), [])]) for noise in noises),
        )
        for p in (*hyperplanes.COUNTS, None)
        if any((noise, p) in found for noise in noises)
    ]
    header = ("", *(f"sigma = {noise:g}" if noise else "test [%]" for noise in noises))
    text = f"Test accuracy [%] after {hyperplanes.EPOCHS} epochs:"
    note = _by_hyperplanes() if 0.0 in noises else _rise(noises)
    return blocks(text, table(header, rows), note) if rows else ""


def _by_hyperplanes() -> str:
    """Say at how many doublings of the hyperplanes the accuracy without noise rises."""
    found = hyperplanes.cells(hyperplanes.EPOCHS)
    means = [
        statistics.fmean(curve["test"] for curve in found[0.0, p])
        for p in hyperplanes.COUNTS
        if (0.0, p) in found
    ]
    rises = [more > fewer for fewer, more in itertools.pairwise(means)]
    of = f"{sum(rises)} of {len(rises)} doublings"
    return f"*The paper finds* that the accuracy rises with P. *Here* it does at {of}."


def _rise(noises: list[float]) -> str:
    """Say how much more than the paper's best number of hyperplanes the largest number gives."""
    found = hyperplanes.cells(hyperplanes.EPOCHS)
    rises = []
    for noise in noises:
        most, best = ([curve["test"] for curve in found.get((noise, p), [])] for p in (512, 128))
        if most and best:
            rises.append(f"{statistics.fmean(most) - statistics.fmean(best):+.1f} at sigma = {noise:g}")
    text = (
        "*The paper finds* P = 128 near the best, as noise harms more hyperplanes. *Here* the accuracy from there to P "
        f"= 512 changes by {' and '.join(rises)}."
    )
    return text if rises else ""


def accountants(part: str) -> str:
    """Return what the bounds of a figure say at its end."""
    found = load_results("convex_accountants")[part]
    end = {"by_epochs": "after 400 epochs", "without_replacement": "after 10,000 steps"}[part]
    text = ""
    if part == "by_epochs":
        *products, sampled = found.values()
        first, *others = (
            (sum(values[at] < sampled[at] for values in products), EPOCHS[at]) for at in (-1, -3, -4)
        )
        text = (
            f"*The paper finds* all {len(products)} products tighter than DP-SGD. *Here* {first[0]} are after "
            f"{first[1]} epochs, {' and '.join(f'{count} after {epochs}' for count, epochs in others)}; at the end the "
            f"loosest has {max(values[-1] for values in products) / sampled[-1]:.3f} times DP-SGD's epsilon."
        )
    else:
        renyi, numerical = found.values()
        tighter = sum(value < other for value, other in zip(numerical, renyi, strict=True))
        text = (
            "*The paper finds* the numerical bound, of the dominating pair, generally tighter. *Here* it is at "
            f"{tighter} of {len(renyi)} numbers of steps."
        )
    rows = [(name, f"{values[-1]:.2f}") for name, values in found.items()]
    return blocks(
        f"Epsilon at delta 1e-5 {end}:",
        table(("bound", "epsilon"), rows),
        text,
    )


def shuffled() -> str:
    """Return the bounds of shuffled batches at epsilon 1, and from where on they are worse than no amplification."""
    found = load_results("convex_accountants")["shuffled"]
    at, plain = SHUFFLE_EPSILONS.index(1.0), list(found.values())[-1]
    rows = []
    for name, values in found.items():
        worse = [
            f"epsilon {e:g}, where the Gaussian has {other:.1e}"
            for e, mine, other in zip(SHUFFLE_EPSILONS, values, plain, strict=True)
            if mine > other
        ]
        rows.append((name, f"{values[at]:.1e}", next(iter(worse), "")))
    return blocks(
        "Delta of one epoch at sigma = 5 ([all curves](../../docs/convex_accountants.png)):",
        table(("bound", "delta at epsilon 1", "above the Gaussian's delta from"), rows),
        "*The paper finds* shuffling worse than the Gaussian for its trainings of 50 or 60 batches an epoch, and "
        "shows 1,000 as the better case. *Here* that holds for 60 at all but the smallest epsilons. For 1,000 "
        "shuffling is the better one down to deltas of about 1e-11.",
    )
