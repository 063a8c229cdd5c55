"""Labels that are looked at once: what the self-test reads off the one look that a run keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import scipy.stats

from accounting.ledger.ledger import read_ledger
from opusim.p_values import bonferroni, normal_p_value
from training.attacks.mechanism.checks import LAGS, shared
from training.attacks.mechanism.observations import Released
from training.attacks.mechanism.report import Check
from training.data import Dataset
from training.runs.folder import RunFolder
from training.runs.storage import read_array


def noisy_readings(folder: RunFolder, dataset: Dataset) -> Released:
    """Readings of one-hot labels plus N(0, 2 / mu^2): their contrasts over the classes, whitened, a row a record.

    The folder keeps r_a / sigma^2 - 1 / (2 sigma^2) of each class a, up to a constant of each record, r being the
    reading. A reflection takes (1, .., 1) to the first axis; the other axes hold contrasts, free of that constant.
    """
    mechanism: Any = read_ledger(folder.ledger_file).mechanisms[0]
    sigma = math.sqrt(2) / float(mechanism.mu)
    kept = read_array(folder.labels_file).astype(np.float64)
    k = dataset.n_classes
    readings = kept * sigma**2 - np.eye(k)[dataset.train.y.numpy()]
    unit = np.full(k, k**-0.5)
    unit[0] -= 1.0
    turned = readings - 2 * np.outer(readings @ unit, unit) / float(unit @ unit)
    return Released(
        noise=turned[:, 1:] / sigma, sums=None, batch=None, accounted=mechanism.repeated(1).describe()
    )


def responses(folder: RunFolder, dataset: Dataset) -> tuple[np.ndarray, Any]:
    """Which class each record answered, as a shift from its own, shape (n,); and the mechanism that was paid for."""
    observed = np.argmax(read_array(folder.labels_file), axis=1)
    mechanism = read_ledger(folder.ledger_file).mechanisms[0]
    return (observed - dataset.train.y.numpy()) % dataset.n_classes, mechanism


def response_checks(shifts: Sequence[np.ndarray], mechanism: Any, level: float) -> tuple[Check, ...]:
    """Checks of randomized response: each label stays with probability p, and moves to each other class alike.

    Args:
        shifts: Of each run, shape (records,).
        mechanism: The accounted response.
        level: Of the family.
    """
    k = int(mechanism.n_classes)
    stays = 1 / (1 + (k - 1) * math.exp(-float(mechanism.step_epsilon)))
    runs = np.stack(shifts)
    kept = runs == 0
    return shared([_kept(kept, stays), _others(runs, k), *_repeats(kept, runs, stays, k)], level)


def _kept(kept: np.ndarray, stays: float) -> Check:
    found = scipy.stats.binomtest(int(kept.sum()), kept.size, stays)
    return Check(
        name="response: share of labels kept",
        observed=float(kept.mean()),
        expected=stays,
        standard_error=math.sqrt(stays * (1 - stays) / kept.size),
        p_value=float(found.pvalue),
        level=math.nan,
        finds="labels that stay more often than accounted",
    )


def _others(runs: np.ndarray, k: int) -> Check:
    """Pearson's chi-squared of the classes that labels moved to."""
    counts = np.bincount(runs[runs > 0], minlength=k)[1:]
    expected = max(float(counts.sum()) / (k - 1), 1e-300)
    total, degrees = float(np.sum(np.square(counts - expected)) / expected), k - 2
    return Check(
        name="response: classes moved to",
        observed=total,
        expected=float(degrees),
        standard_error=math.sqrt(2 * degrees),
        p_value=1.0 if not degrees else float(scipy.stats.chi2.sf(total, degrees)),
        level=math.nan,
        finds="moves that depend on the label",
    )


def _repeats(kept: np.ndarray, runs: np.ndarray, stays: float, k: int) -> list[Check]:
    """Records up to four apart that are kept together, and equal answers in two runs: normal approximations."""
    n = kept.shape[1]
    values = (kept - kept.mean()) / math.sqrt(stays * (1 - stays))
    lagged = [(float(np.sum(values[:, :-lag] * values[:, lag:])), len(kept) * (n - lag)) for lag in LAGS]
    total, pairs = max(lagged, key=lambda found: abs(found[0]) / math.sqrt(found[1]))
    same = stays**2 + (1 - stays) ** 2 / (k - 1)
    error = math.sqrt(same * (1 - same) / n)
    equal = max(
        (float(np.mean(a == b)) for a, b in combinations(runs, 2)), key=lambda found: abs(found - same)
    )
    n_pairs = len(runs) * (len(runs) - 1) // 2
    return [
        Check(
            name="response: records apart",
            observed=total / pairs,
            expected=0.0,
            standard_error=1 / math.sqrt(pairs),
            p_value=bonferroni(normal_p_value(total / math.sqrt(pairs)), len(LAGS)),
            level=math.nan,
            finds="one draw for several records",
        ),
        Check(
            name="response: equal in two runs",
            observed=equal,
            expected=same,
            standard_error=error,
            p_value=bonferroni(normal_p_value((equal - same) / error), n_pairs),
            level=math.nan,
            finds="answers that do not change from run to run",
        ),
    ]
