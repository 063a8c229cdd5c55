"""Checks of labels that a camera counts, or that answer in stages: what is kept has the law that the ledger pays for.

Kept counts are stored as the log-likelihood of every class. For identical records of label a, the losses
log p(counts | a) - log p(counts | b) over the other labels b are sums over independent pixels, whose exact mean and
covariance follow from the law of the digital numbers. An answer of the argmax is a randomized response. One in stages
is standardised by the law that its own set gives it; the sum of many is normal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import scipy.stats

from accounting.mechanisms.counts import LabelArgmax, LabelCounts
from accounting.mechanisms.labels import RandomizedResponse, StagedResponse
from opusim.errors import ConfigError
from training.attacks.mechanism.checks import LAGS, shared
from training.attacks.mechanism.report import Check
from training.data import Dataset
from training.engine.plan import RunPlan
from training.protections.argmax_labels import LabelFrames
from training.protections.counted_labels import equidistant_pixels
from training.runs.folder import RunFolder
from training.runs.storage import read_array

_SAME = 1e-6
"""Relative difference of rates, paid for against the device's, that is rounding."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossLaw:
    """The accounted law of a label's losses.

    Attributes:
        mean: Mean loss against each other label, shape (k - 1,).
        covariance: Their covariance, shape (k - 1, k - 1).
        rates_off: Largest relative difference of the rates that were paid for from those of the device.
    """

    mean: np.ndarray
    covariance: np.ndarray
    rates_off: float

    @classmethod
    def of(cls, folder: RunFolder, dataset: Dataset, mechanism: LabelCounts) -> LossLaw:
        """Return the law of a run's device at the light that its ledger names."""
        label, k = int(dataset.train.y[0]), dataset.n_classes
        with RunPlan.checked(folder.read_config(), dataset).opened_device() as device:
            if device is None:
                raise ConfigError("configuration", "device", "is missing; labels are counted by a camera")
            frames = LabelFrames.of(device, k)
            pixels = equidistant_pixels(frames.light)
            paid = np.asarray(mechanism.light)
            own = frames.light[:, pixels]
            off = math.inf if paid.shape != own.shape else float(np.max(np.abs(paid - own) / np.max(own)))
            law = frames.numbers(frames.rates(mechanism.brightest), pixels)
        with np.errstate(divide="ignore", invalid="ignore"):
            loss = np.log(law.masses[label]) - np.log(np.delete(law.masses, label, axis=0))
        loss, masses = np.where(np.isfinite(loss), loss, 0.0), law.masses[label]  # (k - 1, pixels, codes)
        means = np.einsum("pc,bpc->bp", masses, loss)
        second = np.einsum("pc,apc,bpc->ab", masses, loss, loss, optimize=True)
        return cls(mean=means.sum(axis=1), covariance=second - means @ means.T, rates_off=off)

    def whitened(self, scores: np.ndarray, label: int) -> np.ndarray:
        """Return each record's losses with mean 0 and covariance I under the law, shape (records, k - 1)."""
        losses = scores[:, [label]] - np.delete(scores, label, axis=1)
        root = np.linalg.cholesky(self.covariance)
        return np.asarray(np.linalg.solve(root, (losses - self.mean).T).T)


def count_checks(
    folders: Sequence[RunFolder], dataset: Dataset, mechanism: LabelCounts, level: float
) -> tuple[Check, ...]:
    """Check kept counts of identical records: rates, mean and spread of the losses, independence (normal limits).

    Args:
        folders: Of the finished runs.
        dataset: Their records.
        mechanism: What a ledger accounts for.
        level: Probability of any alarm under the accounted mechanism, in (0, 1).
    """
    law = LossLaw.of(folders[0], dataset, mechanism)
    label = int(dataset.train.y[0])
    runs = np.stack(
        [law.whitened(read_array(folder.labels_file).astype(np.float64), label) for folder in folders]
    )
    records, freedom = runs.shape[0] * runs.shape[1], runs.shape[2]
    total = records * float(np.sum(np.square(runs.mean(axis=(0, 1)))))
    squares = np.mean(np.square(runs), axis=2).ravel()
    spread = float(squares.std(ddof=1) / math.sqrt(squares.size))
    # one frame for several records: products of records up to four apart, of which the largest counts
    lagged = [np.mean(runs[:, :-lag] * runs[:, lag:], axis=2) for lag in LAGS]
    apart = max(lagged, key=lambda products: abs(products.sum()) / math.sqrt(products.size))
    products = np.mean(runs[0] * runs[1], axis=1)
    found = [
        Check(
            name="counts: rates paid for",
            observed=law.rates_off,
            expected=0.0,
            standard_error=_SAME,
            p_value=1.0 if law.rates_off <= _SAME else 0.0,
            finds="light or pixels other than those accounted for",
        ),
        Check(
            name="counts: mean losses",
            observed=total,
            expected=float(freedom),
            standard_error=math.sqrt(2 * freedom),
            p_value=float(2 * min(scipy.stats.chi2.sf(total, freedom), 0.5)),
            finds="more light than accounted",
        ),
        Check.normal(
            "counts: spread of losses", float(squares.mean()), 1.0, spread, "noise weaker than accounted"
        ),
        Check.normal(
            "counts: records apart",
            float(apart.mean()),
            0.0,
            1 / math.sqrt(apart.size * freedom),
            "one frame for several records",
            comparisons=len(LAGS),
        ),
        Check.normal(
            "counts: the same in two runs",
            float(products.mean()),
            0.0,
            1 / math.sqrt(products.size * freedom),
            "frames that do not change from run to run",
        ),
    ]
    return shared(found, level)


def answer_checks(
    folders: Sequence[RunFolder],
    shifts: Sequence[np.ndarray],
    mechanism: LabelArgmax,
    level: float,
) -> tuple[Check, ...]:
    """Check answers of the argmax: a randomized response, and nothing of the counts besides it.

    Args:
        folders: Of the finished runs.
        shifts: Shift of each record's class, shape (records,), for each run.
        mechanism: What a ledger accounts for.
        level: Probability of any alarm under the accounted mechanism, in (0, 1).
    """
    values = max(len(np.unique(read_array(folder.labels_file))) for folder in folders)
    discarded = Check(
        name="argmax: values kept of the labels",
        observed=float(values),
        expected=2.0,
        standard_error=0.0,
        p_value=1.0 if values <= 2 else 0.0,
        finds="counts that are not discarded",
    )
    return shared([discarded, *response_checks(shifts, mechanism, level)], level)


def staged_checks(
    scores: Sequence[np.ndarray], labels: np.ndarray, mechanism: StagedResponse, level: float
) -> tuple[Check, ...]:
    """Check responses in stages: every answer has the law that its set and the accounted epsilon give it.

    Args:
        scores: The log-likelihoods that a run keeps, shape (records, k), for each of two runs.
        labels: The true classes, shape (records,).
        mechanism: The accounted mechanism.
        level: Probability of any alarm under the accounted mechanism, in (0, 1).
    """
    first, second = (_Answers(each, labels, mechanism.step_epsilon) for each in scores)
    kept = np.stack([first.kept, second.kept])
    neighbours = kept[:, :-1] * kept[:, 1:]
    same = np.sum(first.law * second.law, axis=1)
    free = (same > 0) & (same < 1)
    equal = ((first.observed == second.observed) - same)[free] / np.sqrt((same * (1 - same))[free])
    moved = np.concatenate([first.moved, second.moved])
    parts = (
        ("response: share of labels kept", kept[kept != 0], "labels that stay more often than accounted"),
        ("response: classes moved to", moved, "moves that depend on the label"),
        ("response: records apart", neighbours[neighbours != 0], "one draw for several records"),
        ("response: equal in two runs", equal, "answers that do not change from run to run"),
    )
    # many independent numbers of variance 1, of mean 0
    means = [
        (name, float(values.mean()) if len(values) else 0.0, 0.0, 1 / math.sqrt(max(len(values), 1)), finds)
        for name, values, finds in parts
    ]
    return shared([Check.normal(*each) for each in means], level)


class _Answers:
    """Answers of one run, read off its log-likelihoods: the answer has the largest, the others of its set the least.

    Attributes:
        observed: The answers, shape (n,).
        law: Accounted probability of every answer under the true label, shape (n, k).
        kept: (kept - p) / sqrt(p (1 - p)) of labels inside their set, 0 for the others, shape (n,).
        moved: Places of answers among the classes of their set that a label moved to, standardised.
    """

    def __init__(self, scores: np.ndarray, labels: np.ndarray, epsilon: float) -> None:
        rows, own = np.arange(len(labels)), np.eye(scores.shape[1], dtype=bool)[labels]
        self.observed = np.argmax(scores, axis=1)
        among = scores == scores.min(axis=1, keepdims=True)
        among[rows, self.observed] = True
        sizes, inside = among.sum(axis=1), among[rows, labels]
        stays = 1 / (1 + (sizes - 1) * math.exp(-epsilon))
        answers = np.where(own, stays[:, None], stays[:, None] * math.exp(-epsilon))
        self.law = among * np.where(inside[:, None], answers, 1 / sizes[:, None])
        stayed = self.observed == labels
        self.kept = np.where(inside, (stayed - stays) / np.sqrt(stays * (1 - stays)), 0.0)
        choices = sizes - inside
        place = np.cumsum(among & ~own, axis=1)[rows, self.observed] - 1
        free = ~stayed & (choices > 1)
        self.moved = ((place - (choices - 1) / 2)[free]) / np.sqrt((choices[free] ** 2 - 1) / 12)


# Randomized responses


def response_checks(
    shifts: Sequence[np.ndarray], mechanism: RandomizedResponse | LabelArgmax, level: float
) -> tuple[Check, ...]:
    """Check randomized response: each label is kept with probability p, else replaced uniformly by another class.

    Args:
        shifts: Shift of each record's class, shape (records,), for each run.
        mechanism: The accounted mechanism.
        level: Probability of any alarm under the accounted mechanism, in (0, 1).
    """
    k = int(mechanism.n_classes)
    stays = 1 / (1 + (k - 1) * math.exp(-float(mechanism.step_epsilon)))
    runs = np.stack(shifts)
    kept = runs == 0
    exact = scipy.stats.binomtest(int(kept.sum()), kept.size, stays)
    # the classes of replaced labels by Pearson's chi-squared
    counts = np.bincount(runs[runs > 0], minlength=k)[1:]
    each = max(float(counts.sum()) / (k - 1), 1e-300)
    total, degrees = float(np.sum(np.square(counts - each)) / each), k - 2
    # labels kept in records up to four apart, and equal answers in two runs (normal approximations)
    n = kept.shape[1]
    values = (kept - kept.mean()) / math.sqrt(stays * (1 - stays))
    lagged = [(float(np.sum(values[:, :-lag] * values[:, lag:])), len(kept) * (n - lag)) for lag in LAGS]
    apart, pairs = max(lagged, key=lambda found: abs(found[0]) / math.sqrt(found[1]))
    same = stays**2 + (1 - stays) ** 2 / (k - 1)
    equal = max(
        (float(np.mean(a == b)) for a, b in combinations(runs, 2)), key=lambda found: abs(found - same)
    )
    found = [
        Check(
            name="response: share of labels kept",
            observed=float(kept.mean()),
            expected=stays,
            standard_error=math.sqrt(stays * (1 - stays) / kept.size),
            p_value=float(exact.pvalue),
            finds="labels that stay more often than accounted",
        ),
        Check(
            name="response: classes moved to",
            observed=total,
            expected=float(degrees),
            standard_error=math.sqrt(2 * degrees),
            p_value=1.0 if not degrees else float(scipy.stats.chi2.sf(total, degrees)),
            finds="moves that depend on the label",
        ),
        Check.normal(
            "response: records apart",
            apart / pairs,
            0.0,
            1 / math.sqrt(pairs),
            "one draw for several records",
            comparisons=len(LAGS),
        ),
        Check.normal(
            "response: equal in two runs",
            equal,
            same,
            math.sqrt(same * (1 - same) / n),
            "answers that do not change from run to run",
            comparisons=len(runs) * (len(runs) - 1) // 2,
        ),
    ]
    return shared(found, level)
