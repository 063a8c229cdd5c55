"""Photonic DFA as its paper states it: Proposition 3, what it assumes, and what it leaves out.

Symbols as in `accounting.pdfa.mechanisms`; lo = (gmin tmin)^2, hi = (gmax tmax)^2.
The paper: Ohana et al., "Photonic Differential Privacy with Direct Feedback Alignment", 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from dp_accounting.rdp import compute_epsilon

from accounting.guarantee import Adjacency, Assumption, Guarantee, Release, Status, Unit
from accounting.mechanisms import Mechanism
from accounting.pdfa.column import column_bound_published
from accounting.pdfa.mechanisms import PdfaWithoutFormula, PublishedPdfa
from opusim import checks

_ORDERS = tuple((1.0 + np.logspace(-5.0, 3.0, 400)).tolist())
_SOURCE = "Ohana et al. 2021, Proposition 3 (eq. 17), composed as its text says, Theorem 2"
_GAPS = (
    Assumption(
        text="both directions of the Renyi divergence are bounded (the proof takes the entering record for the "
        "larger one; inside its hypotheses the other direction exceeds eq. 17)",
        holds=False,
    ),
    Assumption(
        text="the columns of an update have independent noise (they share one realisation, and their covariance "
        "depends on the data: row spaces tell a member from an outsider)",
        holds=False,
    ),
)


@dataclass(frozen=True, kw_only=True)
class PublishedValue:
    """Eq. 17, summed and converted.

    Attributes:
        theorem_2: min over alpha of the sum + log(1/delta) / (alpha - 1), the paper's conversion.
        order: The order that attains it.
        dp_accounting: The same sum through dp_accounting's conversion: sharper at the same order, but it skips orders
            close to 1, which large sums need.
    """

    theorem_2: float
    order: float
    dp_accounting: float


def published_rdp(run: PublishedPdfa, order: float, *, noised_only: bool = False) -> float:
    """T sum over layers of fan_in eps_l(alpha), with the hypotheses taken as given; infinity where undefined.

    A layer with lo = 0 contradicts the hypotheses. Taken as given they leave some lo in (0, hi], and eq. 17
    falls in lo, so lo = hi stands in: the least that the formula can say.

    Args:
        run: The run.
        order: alpha > 1.
        noised_only: Leave out the layers that carry no noise (the paper counts all).
    """
    total = 0.0
    for layer in run.layers:
        if noised_only and not layer.noised:
            continue
        lo, hi = run.squares(layer)
        total += layer.fan_in * column_bound_published(
            order,
            batch_size=run.batch_size,
            width=layer.width,
            lo=lo if lo > 0 else hi,
            hi=hi,
            signal=run.tau_b / run.sigma,
        )
    return run.steps * total


def published_value(
    runs: Sequence[PublishedPdfa],
    delta: float,
    *,
    noised_only: bool = False,
    orders: Sequence[float] | None = None,
) -> PublishedValue:
    """The epsilon of the composed eq. 17 over the runs' common orders (or those given), hypotheses taken as given.

    Raises:
        ValueError: delta outside [0, 1).
    """
    checks.in_unit_interval(closed="left", delta=delta)
    tried = common_orders(runs) if orders is None else orders
    curve = [sum(published_rdp(run, order, noised_only=noised_only) for run in runs) for order in tried]
    finite = [(order, value) for order, value in zip(tried, curve, strict=True) if math.isfinite(value)]
    if not finite or delta == 0:
        return PublishedValue(theorem_2=math.inf, order=math.nan, dp_accounting=math.inf)
    best, order = min((value - math.log(delta) / (order - 1), order) for order, value in finite)
    sharper = float(compute_epsilon([o for o, _ in finite], [v for _, v in finite], delta)[0])
    return PublishedValue(theorem_2=float(best), order=float(order), dp_accounting=sharper)


def common_orders(runs: Sequence[PublishedPdfa]) -> tuple[float, ...]:
    """The Renyi orders that all runs may be taken at: the one that is stated, else a grid; none if two differ."""
    fixed = {run.order for run in runs if run.order is not None}
    if len(fixed) > 1:
        return ()
    return tuple(fixed) or _ORDERS


def hypotheses(run: PublishedPdfa) -> tuple[Assumption, ...]:
    """Proposition 3's hypotheses at each layer that carries noise, each checked against the run.

    gamma_min > 0; the entrywise lower bound that eq. 14 needs; the logarithm's denominator
    (m + 1) lo - hi > 0; and positive definiteness, m lo > (alpha - 1)(hi - lo) at some order that is tried.
    """
    found: list[Assumption] = []
    m = run.batch_size
    for number, layer in enumerate(run.layers, start=1):
        if not layer.noised:
            continue
        lo, hi = run.squares(layer)
        entries = layer.inputs_bounded_below and run.tau_h_min > 0
        definite = any(m * lo > (order - 1) * (hi - lo) for order in common_orders([run])) and lo > 0
        statements = (
            ("gamma_min > 0: |phi'| is bounded away from 0", layer.gamma_min > 0),
            ("entrywise lower bound: every |h_ik| >= tau_h_min / sqrt(n) > 0", entries),
            ("positive log denominator: (m + 1) lo > hi", (m + 1) * lo > hi),
            ("positive definiteness: m lo > (alpha - 1)(hi - lo)", definite),
        )
        found += [Assumption(text=f"layer {number}: {text}", holds=bool(ok)) for text, ok in statements]
    return tuple(found)


def admissible_orders(runs: Sequence[PublishedPdfa]) -> tuple[float, ...]:
    """The orders at which every noised layer of every run is positive definite."""
    return tuple(
        order
        for order in common_orders(runs)
        if all(
            run.batch_size * lo > (order - 1) * (hi - lo)
            for run in runs
            for lo, hi in (run.squares(layer) for layer in run.layers if layer.noised)
        )
    )


def guarantees(
    mechanisms: Sequence[PublishedPdfa | PdfaWithoutFormula], *, delta: float, enforced: bool = False
) -> list[Guarantee]:
    """Whole records: status none, and what the paper claims where all mechanisms have its constants.

    Args:
        mechanisms: At least one.
        delta: In [0, 1).
        enforced: Changes nothing: every hypothesis that can be checked is, against the description.
    """
    published = [mechanism for mechanism in mechanisms if isinstance(mechanism, PublishedPdfa)]
    whole = whole_record_guarantee(mechanisms, delta)
    return [whole, published_guarantee(published, delta)] if len(published) == len(mechanisms) else [whole]


def published_guarantee(runs: Sequence[PublishedPdfa], delta: float) -> Guarantee:
    """What the paper claims of its runs: `claimed`, infinite where a hypothesis of Proposition 3 fails.

    epsilon takes the orders at which the proposition's matrix is positive definite; formula_value all that are
    tried. Both sum every layer, as the paper does. The gaps of the proof stand among the assumptions.

    Raises:
        ValueError: delta outside [0, 1).
    """
    formula = published_value(runs, delta).theorem_2
    noised = published_value(runs, delta, noised_only=True).theorem_2
    checked = tuple(dict.fromkeys(item for run in runs for item in hypotheses(run)))
    failed = [item.text for item in checked if item.holds is False]
    epsilon = math.inf if failed else published_value(runs, delta, orders=admissible_orders(runs)).theorem_2
    reason = None
    if math.isinf(epsilon):
        reason = "Proposition 3 does not apply: " + ("; ".join(failed) or "eq. 17 is undefined here")
    outputs = Assumption(
        text="the output layer's update, which carries e itself, is noised and counted",
        holds=all(layer.noised for run in runs for layer in run.layers),
    )
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        unit=Unit.RECORD,
        adjacency=Adjacency.REPLACE_ONE,
        release=Release.EVERY_UPDATE,
        status=Status.CLAIMED,
        mechanism=f"{_texts(runs)} (formula over the noised layers alone: {noised:.6g})",
        source=_SOURCE,
        assumptions=(*checked, *_GAPS, outputs),
        formula_value=formula,
        reason=reason,
    )


def whole_record_guarantee(
    mechanisms: Sequence[PublishedPdfa | PdfaWithoutFormula], delta: float
) -> Guarantee:
    """Whole records under PDFA as published: no finite guarantee at any noise level.

    Row j of an update has noise covariance (sigma / m)^2 sum_i phi'_ij^2 h_i h_i^T, of rank at most m: below the
    fan-in, the update's row space is the span of the batch's inputs, whatever sigma; above it the covariances of
    neighbours still differ by a rank-one term that scales with sigma.
    """
    return Guarantee(
        epsilon=math.inf,
        delta=delta,
        unit=Unit.RECORD,
        adjacency=Adjacency.REPLACE_ONE,
        release=Release.EVERY_UPDATE,
        status=Status.NONE,
        mechanism=_texts(mechanisms),
        source="docs/privacy.md, section 2: the update's noise has the batch's own inputs as its row space",
        reason="the noise of an update lies in the span of the batch's inputs, so membership shows at every sigma",
    )


def _texts(mechanisms: Sequence[Mechanism]) -> str:
    return "; ".join(mechanism.describe() for mechanism in mechanisms)
