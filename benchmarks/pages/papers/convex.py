"""The tables and figures of the paper on convex ReLU networks."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

from benchmarks.convex import accuracy, curves, hyperplanes, tuned
from benchmarks.convex.accountants import EPOCHS
from benchmarks.markdown import with_error
from benchmarks.pages.papers.item import SEE_RESULTS, Item, blocks, compared, table
from benchmarks.private_accuracy import records
from benchmarks.results_file import load_results

INTRODUCTION = (
    "All figures: [results](../convex/README.md). "
    "Epsilon is for replacing a record. The last iterate is the paper's NoisyCGD on the convex model, of which only "
    "the last model is released; DP-SGD releases every update. The paper has five seeds."
)
NETWORK, LOGISTIC = "ReLU network, DP-SGD", "logistic regression, DP-SGD"
ROWS = (accuracy.LAST_ITERATE, "convex, Poisson DP-SGD", NETWORK)
PAPER = {
    "mnist": {1.33: (92.7, 92.9, 91.6), 4.76: (94.4, 94.9, 94.4)},
    "cifar-10": {1.33: (41.6, 41.7, 42.7), 4.76: (45.5, 45.9, 47.1)},
}
"""Tables 1 and 2 of the paper, by data set and epsilon of one training, in the order of `ROWS`."""
_MEASURED = ("convex.accuracy search", "convex.accuracy measure")
_JPEG = "a JPEG copy of CIFAR-10"
_SEARCHES = (
    "the clip is searched, not rate and P, of the last iterate only; three searches on nine tenths of the "
    "records; P = 64; the trainings differ as in Figure 2"
)


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
    shown = []
    for name, pair in pairs.items():
        ahead, behind = _compared(*pair)
        shown.append(
            f"{name.replace(', ', ' is, against ')}, ahead at epsilon {ahead} and behind at {behind}"
        )
    return f"*The paper* {conclusion}. *Here*, by more than two standard errors, {'; '.join(shown)}."


def _compared(ours: dict[float, list[float]], other: dict[float, list[float]]) -> tuple[str, str]:
    """Return the epsilons at which a mean is more than two standard errors of the difference ahead, and behind."""
    signs = {epsilon: compared(ours[epsilon], other.get(epsilon, [])) for epsilon in sorted(ours)}
    ahead, behind = (", ".join(f"{e:g}" for e in signs if signs[e] == sign) or "none" for sign in (1, -1))
    return ahead, behind


def public_features() -> str:
    """Return what DP-SGD reaches on public features of CIFAR-10; empty without results."""
    row = "cifar-10, linear on mirrored components, DP-SGD"
    tests = [run["test"] for run in load_results(records.NAME).get("runs", []) if run["row"] == row]
    text = (
        "For comparison, a linear model on public scattering features under DP-SGD has "
        f"{with_error(tests, '.1f')} % at 3, for zeroing a record, or about twice that for replacing one "
        "([by epsilon](../curves/README.md))."
    )
    return text if tests else ""


def ends(*noises: float) -> str:
    """Return what the curves of some noise levels show at their end; empty without results."""
    found = hyperplanes.cells(hyperplanes.EPOCHS)
    known = any((noise, p) in found for noise in noises for p in (*hyperplanes.COUNTS, None))
    note = _by_hyperplanes() if 0.0 in noises else _rise(*noises)
    return (note or SEE_RESULTS) if known else ""


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


def _rise(*noises: float) -> str:
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
    return text


def shuffled() -> str:
    """Return what the bounds of shuffled batches say."""
    return (
        "*The paper finds* shuffling worse than the Gaussian for its trainings of 50 or 60 batches an epoch, and "
        "shows 1,000 as the better case. *Here* that holds for 60 at all but the smallest epsilons. For 1,000 "
        "shuffling is the better one down to deltas of about 1e-11."
    )


def _item_by_epsilon(number: int, data: str, shows: str, conclusion: str, differs: str) -> Item:
    option = "" if data == curves.DATA else f" --data {data}"
    return Item(
        name=f"Figure {number}",
        shows=f"{shows}, accuracy by epsilon",
        differs=differs,
        state="smaller",
        figures=lambda: blocks(by_epsilon(data, conclusion), public_features() if data == "cifar-10" else ""),
        run=(f"convex.curves{option}",),
        results=(curves.name_of(data),),
        left=lambda: curves.left(data),
        picture=("convex.png", "Accuracy by epsilon of four ways to train on MNIST")
        if data == curves.DATA
        else (),
    )


def _table_of_searches(number: int, data: str, run: tuple[str, ...], differs: str) -> Item:
    return Item(
        name=f"Table {number}",
        shows=f"{'MNIST' if data == 'mnist' else 'CIFAR-10'} after private tuning",
        differs=differs,
        state="smaller",
        figures=lambda: searches(data),
        run=(*run, *_MEASURED),
        results=("convex_tuned", "convex"),
        left=lambda: tuned.left(data) + accuracy.left(data),
    )


ITEMS = (
    Item(
        name="Figure 1",
        shows="epsilon by epochs, Theorem 2.8 and DP-SGD",
        differs=(
            "nothing; the hypotheses of Theorem 2.8 do not hold for the paper's runs "
            "([why](../../docs/convex.md#2-constants))"
        ),
        state="repeated",
        figures=lambda: accountants("by_epochs"),
        picture=("convex_accountants.png", "Three panels: the bounds of Figures 1, 6 and 8"),
        run=("convex.accountants",),
        results=("convex_accountants",),
    ),
    _table_of_searches(
        1,
        "mnist",
        ("convex.tuned", "convex.tuned --trials 10"),
        f"5 or 10 expected trials, where the paper has 20; {_SEARCHES}",
    ),
    _table_of_searches(
        2,
        "cifar-10",
        ("convex.tuned --data cifar-10 --trials 10",),
        f"{_JPEG}; 10 expected trials, where the paper has 20; {_SEARCHES}",
    ),
    _item_by_epsilon(
        2,
        "mnist",
        "MNIST",
        "finds the convex model, by both ways to train it, ahead of the network, and ahead of logistic "
        "regression, up to epsilon 4.76",
        "our convex model has the margin loss with clipped residuals, records centred and scaled to norm 1, P = 64, "
        "lambda = 0, and a larger noise in the last step, where the paper has cross-entropy and searches P and the "
        "rate; a training of its own for each epsilon, where the paper follows two noise levels through 400 epochs "
        "of batches of 1,000, up to 1.33 and 4.76: the last iterate 10 epochs of 125, the convex model under DP-SGD "
        "20 of 500 or 40 of 1,000, the networks under DP-SGD 20 of 1,000 with momentum 0.9 and width 200; settings "
        "were searched at 1.33 and 4.76, and each epsilon takes those of the nearer one; three seeds, the paper five",
    ),
    _item_by_epsilon(
        3,
        "cifar-10",
        "CIFAR-10",
        "finds the convex model ahead of logistic regression, which it calls similar to the network",
        f"{_JPEG}; else as in Figure 2",
    ),
    Item(
        name="Figure 4",
        shows="MNIST without noise, accuracy by epochs and hyperplanes",
        differs=(
            "records of the convex model centred and scaled to norm 1; its rate is chosen at P = 64 for all P, where "
            "the paper chooses one for each; 20 epochs; the curves are held-out accuracy; three seeds"
        ),
        state="smaller",
        figures=lambda: ends(0.0),
        picture=(
            "convex_hyperplanes.png",
            "Accuracy by epoch for 16 to 512 hyperplanes and a network, at three noises",
        ),
        run=("convex.hyperplanes --noise 0",),
        results=("convex_hyperplanes",),
        left=lambda: hyperplanes.left(0.0),
    ),
    Item(
        name="Figure 5",
        shows="MNIST with noise, accuracy by epochs and hyperplanes",
        differs="as in Figure 4; gradients are clipped to norm 1, as the paper names no clip",
        state="smaller",
        figures=lambda: ends(5.0, 15.0),
        run=("convex.hyperplanes --noise 5,15",),
        results=("convex_hyperplanes",),
        left=lambda: hyperplanes.left(5.0, 15.0),
    ),
    Item(
        name="Figure 6",
        shows="accountants, sampling without replacement",
        differs="delta, the steps and a sensitivity of 1 are ours, as the caption names none",
        state="repeated",
        figures=lambda: accountants("without_replacement"),
        run=("convex.accountants",),
        results=("convex_accountants",),
    ),
    _item_by_epsilon(
        7,
        "fashion-mnist",
        "FashionMNIST",
        "states no order on this data set",
        "as in Figure 2",
    ),
    Item(
        name="Figure 8",
        shows="bound for shuffled batches",
        differs=(
            "a sensitivity of 2, that of replacing a record, is ours, as the caption names none; so is the curve of 60 "
            "batches"
        ),
        state="repeated",
        figures=shuffled,
        run=("convex.accountants",),
        results=("convex_accountants",),
    ),
)
