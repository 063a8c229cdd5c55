"""DP-ULR as its paper states it: eq. 11, the conditions of Theorems 1 and 2, and what they leave out.

    gamma(alpha) = T q p(N_B - 1; N, q) / (1 - P(N_B - 1; N, q)) + 2 T q^2 alpha / sigma_0^2,

p and P being mass and distribution function of Bin(N, q), at orders with A = ln(1 + 1 / (q (alpha - 1))),

    1 < alpha <= sigma_0^2 A / 2 - 2 ln sigma_0,
    alpha <= (sigma_0^2 A^2 / 2 - ln 5 - 2 ln sigma_0) / (A + ln(q alpha) + 1 / (2 sigma_0^2)).

epsilon = gamma + ln(1 / delta) / (alpha - 1), the paper's Proposition 1. Symbols as in `accounting.ulr.mechanisms`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import binom

from accounting.guarantee import Adjacency, Assumption, Guarantee, Release, Status, Unit
from accounting.ulr.mechanisms import PublishedUlr
from opusim import checks

_ORDERS = tuple((1.0 + np.logspace(-2.0, 3.0, 800)).tolist())
_SOURCE = "DP-ULR paper, Theorem 2 (eq. 11), converted by its Proposition 1"
_GAPS = (
    "the estimate is Gaussian (clipped averages are bounded, and no number of copies gives a finite Renyi divergence)",
    "a new record leaves the covariance of the noise as it is (it adds its own; with a loss above the others' the "
    "divergence exceeds eq. 11 by orders of magnitude)",
    "sigma does not depend on the private batch (the controller of eq. 8 and the completing noise do)",
)


def published_rdp(run: PublishedUlr, order: float) -> float:
    """Eq. 11 at one order, hypotheses taken as given."""
    law = binom(run.n_records, run.sampling_probability)
    least = run.min_batch_size
    rejection = run.sampling_probability * math.exp(law.logpmf(least - 1) - law.logsf(least - 1))
    return run.steps * (rejection + 2 * run.sampling_probability**2 * order / run.target_std**2)


def admissible(run: PublishedUlr, order: float) -> bool:
    """Whether both conditions on alpha hold."""
    variance = run.target_std**2
    a = math.log1p(1 / (run.sampling_probability * (order - 1)))
    logarithm = math.log(run.target_std)
    if not 1 < order <= variance * a / 2 - 2 * logarithm:
        return False
    denominator = a + math.log(run.sampling_probability * order) + 1 / (2 * variance)
    return denominator <= 0 or order <= (variance * a**2 / 2 - math.log(5) - 2 * logarithm) / denominator


def published_value(runs: Sequence[PublishedUlr], delta: float, *, checked: bool) -> float:
    """Epsilon of the composed eq. 11 over a grid of orders, infinite where none is left.

    Args:
        runs: At least one.
        delta: In [0, 1); infinite at 0.
        checked: Keep to the orders that both conditions on alpha allow in every run.
    """
    checks.in_unit_interval(closed="left", delta=delta)
    if delta == 0:
        return math.inf
    orders = [o for o in _ORDERS if not checked or all(admissible(run, o) for run in runs)]
    values = [sum(published_rdp(run, o) for run in runs) - math.log(delta) / (o - 1) for o in orders]
    return min(values, default=math.inf)


def hypotheses(run: PublishedUlr) -> tuple[Assumption, ...]:
    """The conditions of Theorem 2, each checked against the run."""
    q, least, n = run.sampling_probability, run.min_batch_size, run.n_records
    statements = (
        (f"q <= 1/5 (q = {q:g})", q <= 0.2),
        (f"sigma_0 >= 4 (sigma_0 = {run.target_std:g})", run.target_std >= 4),
        (f"1 <= N_B <= q N (N_B = {least}, q N = {q * n:g})", least <= q * n * (1 + 1e-12)),
        (
            "both conditions on alpha hold at some order",
            run.target_std > 0 and any(admissible(run, order) for order in _ORDERS),
        ),
        ("batches are sampled independently and drawn again below N_B", run.sampled),
    )
    public = Assumption(text="N, q and N_B are public constants, the same for both data sets")
    return (*(Assumption(text=text, holds=bool(ok)) for text, ok in statements), public)


def gaps(run: PublishedUlr) -> tuple[Assumption, ...]:
    """What Theorem 2 takes for granted and Algorithm 1 does not give."""
    batch = run.sampling_probability * run.n_records
    real = math.sqrt(batch / run.largest_module)
    covered = Assumption(
        text=f"the clipped estimate's noise has standard deviation sigma_0 C in every direction (clipping bounds it by "
        f"C sqrt(batch / parameters) = {real:.3g} C in the largest module)",
        holds=real >= run.target_std,
    )
    apart = Assumption(
        text=f"one module is released (each of {run.modules} is clipped to C apart, so that a record moves them by "
        f"{math.sqrt(run.modules):.3g} C together)",
        holds=run.modules == 1,
    )
    return (covered, apart, *(Assumption(text=text, holds=False) for text in _GAPS))


def guarantees(
    mechanisms: Sequence[PublishedUlr], *, delta: float, enforced: bool = False
) -> list[Guarantee]:
    """Whole records: status none, and beside it what the paper claims.

    Args:
        mechanisms: At least one.
        delta: In [0, 1).
        enforced: Changes nothing: every hypothesis that can be checked is, against the description.
    """
    return [whole_record_guarantee(mechanisms, delta), published_guarantee(mechanisms, delta)]


def published_guarantee(runs: Sequence[PublishedUlr], delta: float) -> Guarantee:
    """What the paper claims: infinite where a condition of its theorem fails, `formula_value` without them."""
    checked = tuple(dict.fromkeys(item for run in runs for item in hypotheses(run)))
    failed = [item.text for item in checked if item.holds is False]
    epsilon = math.inf if failed else published_value(runs, delta, checked=True)
    reason = None
    if math.isinf(epsilon):
        reason = "Theorem 2 does not apply: " + ("; ".join(failed) or "no order satisfies its conditions")
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        unit=Unit.RECORD,
        adjacency=Adjacency.ADD_OR_REMOVE_ONE,
        release=Release.EVERY_UPDATE,
        status=Status.CLAIMED,
        mechanism="; ".join(run.describe() for run in runs),
        source=_SOURCE,
        assumptions=(*checked, *dict.fromkeys(item for run in runs for item in gaps(run))),
        formula_value=published_value(runs, delta, checked=False),
        reason=reason,
    )


def whole_record_guarantee(runs: Sequence[PublishedUlr], delta: float) -> Guarantee:
    """Whole records under DP-ULR as published: no finite guarantee.

    The noise of a step is made of the batch's own losses and inputs, so its support and covariance tell who is in it.
    """
    return Guarantee(
        epsilon=math.inf,
        delta=delta,
        unit=Unit.RECORD,
        adjacency=Adjacency.ADD_OR_REMOVE_ONE,
        release=Release.EVERY_UPDATE,
        status=Status.NONE,
        mechanism="; ".join(run.describe() for run in runs),
        source="docs/ulr.md, section 4: the estimate's noise is made of the batch's own losses and inputs",
        reason="no noise level bounds it over all data: the noise is made of the batch's own losses and inputs, so a "
        "record with a loss or an input that the others lack shows; use trainer.form = 'proven' and --protect record",
    )
