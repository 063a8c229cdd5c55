"""Photonic DFA as its paper states it: the run in the paper's symbols, Proposition 3, and what its proof leaves out.

Symbols: m batch size, n width of the updated layer, gmin <= |phi'| <= gmax, tmin and tmax the paper's bounds on
activations, tB the radius of the ball that a projected error is scaled to; lo = (gmin tmin)^2, hi = (gmax tmax)^2.
The paper: Ohana et al., "Photonic Differential Privacy with Direct Feedback Alignment", 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from typing_extensions import Doc

from opusim import checks
from opusim.accounting.guarantee import Adjacency, Assumption, Guarantee, Release, Status, Unit
from opusim.accounting.mechanism import (
    Count,
    Mechanism,
    NonNegative,
    Positive,
    counted,
    described,
    require_text,
)
from opusim.accounting.theorems import Theorem

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

ROW_SPACE = Theorem(
    name="pdfa-row-space",
    title="the update's noise has the batch's own inputs as its row space",
    statement="Row j of a photonic DFA update has noise of covariance (sigma / m)^2 sum_i phi'_ij^2 h_i h_i^T, of "
    "rank at most the batch size m. For whole records there is therefore no finite guarantee at any noise "
    "level.",
    proof="With m below the fan-in and the width at least m, the update's row space is the span of the batch's "
    "inputs, whatever sigma: the part of an input outside it is 0 for a member and not for an outsider. With m "
    "above the fan-in the covariances of neighbours still differ by a rank-one term that scales with sigma.",
    code="opusim.accounting.mechanisms.pdfa.PublishedPdfa",
    page="privacy-records.md, section 4",
)


@dataclass(frozen=True, kw_only=True)
class PublishedLayer:
    """The constants of eq. 17 for one layer.

    Attributes:
        fan_in: n_(l-1), the columns of the update; one more if a bias is trained.
        width: n_l, the rows.
        gamma_min: gmin >= 0, the infimum of |phi'| over the real line (0 for tanh and ReLU).
        gamma_max: gmax > 0, its supremum.
        inputs_bounded_below: Whether every entry of the (offset, clipped) input is at least tmin / sqrt(n) in
            absolute value; true for an offset of inputs that are never negative, false for a signed activation.
        noised: Whether the layer's signal carries noise; the published output layer's does not.
    """

    fan_in: int
    width: int
    gamma_min: float
    gamma_max: float
    inputs_bounded_below: bool
    noised: bool = True

    def __post_init__(self) -> None:
        checks.integer(minimum=1, fan_in=self.fan_in, width=self.width)
        checks.non_negative(gamma_min=self.gamma_min)
        checks.positive(gamma_max=self.gamma_max)
        if self.gamma_min > self.gamma_max:
            raise ValueError(f"gamma_min = {self.gamma_min}: must not exceed gamma_max = {self.gamma_max}")

    @classmethod
    def from_text(cls, text: str) -> PublishedLayer:
        """Return the layer that FAN_IN,WIDTH,GMIN,GMAX[,positive][,silent] names.

        Raises:
            ValueError: The text has another form.
        """
        numbers, words = text.split(",")[:4], text.split(",")[4:]
        if len(numbers) < 4 or not set(words) <= {"positive", "silent"}:
            raise ValueError(f"--layer {text}: must be FAN_IN,WIDTH,GMIN,GMAX[,positive][,silent]")
        try:
            fan_in, width, low, high = int(numbers[0]), int(numbers[1]), float(numbers[2]), float(numbers[3])
        except ValueError as error:
            raise ValueError(
                f"--layer {text}: FAN_IN and WIDTH must be integers, GMIN, GMAX numbers"
            ) from error
        return cls(
            fan_in=fan_in,
            width=width,
            gamma_min=low,
            gamma_max=high,
            inputs_bounded_below="positive" in words,
            noised="silent" not in words,
        )


class PdfaRun(Mechanism):
    """A run of photonic DFA, with or without the constants that the paper's formula needs."""

    theorem = ROW_SPACE
    refuted = (
        "the noise of an update lies in the span of the batch's inputs, so membership shows at every sigma"
    )

    @classmethod
    def guarantees(cls, mechanisms: Sequence[Self], *, delta: float, enforced: bool) -> list[Guarantee]:
        """Return status none for whole records, and the paper's claim if all mechanisms have its constants.

        `enforced` changes nothing: all checkable hypotheses are checked against the run's own constants.
        """
        whole = super().guarantees(mechanisms, delta=delta, enforced=enforced)
        published = [mechanism for mechanism in mechanisms if isinstance(mechanism, PublishedPdfa)]
        return [*whole, published_guarantee(published, delta)] if len(published) == len(mechanisms) else whole


@dataclass(frozen=True, kw_only=True)
class PublishedPdfa(PdfaRun):
    """A PDFA run with all the constants of the paper's Proposition 3."""

    layers: Annotated[
        tuple[PublishedLayer, ...],
        Doc(
            "FAN_IN,WIDTH,GMIN,GMAX and optionally ,positive and ,silent: one for each trained layer, the output "
            "layer last. GMIN and GMAX bound the slope |phi'|; positive: every input entry is bounded away from 0; "
            "silent: no noise on its signal. Such as 785,512,0,1"
        ),
    ]
    batch_size: Annotated[Count, Doc("m >= 1.")]
    sigma: Annotated[
        Positive, Doc("Standard deviation of the noise on each output of the projection, above 0.")
    ]
    tau_b: Annotated[Positive, Doc("tB > 0.")]
    tau_h_min: Annotated[NonNegative, Doc("tmin >= 0.")]
    tau_h_max: Annotated[Positive, Doc("tmax >= tmin, above 0.")]
    order: Annotated[float | None, Doc("One Renyi order alpha > 1, or none for the best of a grid.")] = None

    kind: ClassVar[str] = "pdfa_published"

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers = (): must name at least one layer")
        super().__post_init__()
        if self.tau_h_min > self.tau_h_max:
            raise ValueError(f"tau_h_min = {self.tau_h_min}: must not exceed tau_h_max = {self.tau_h_max}")
        if self.order is not None and not (math.isfinite(self.order) and self.order > 1):
            raise ValueError(f"order = {self.order}: must be finite and above 1")
        for layer in self.layers:
            largest = layer.gamma_max * self.tau_h_max
            squares: Any = {"(gamma_max tau_h_max)^2": largest * largest}  # eq. 17 is made of these
            checks.positive(**squares)

    def squares(self, layer: PublishedLayer) -> tuple[float, float]:
        """Return (gmin tmin)^2 and (gmax tmax)^2 of a layer: lo and hi."""
        return (layer.gamma_min * self.tau_h_min) ** 2, (layer.gamma_max * self.tau_h_max) ** 2

    def describe(self) -> str:
        """Return what ran, in a few words."""
        return (
            f"PDFA as published, {len(self.layers)} layers, {counted(self.steps, 'step')} of {self.batch_size}, "
            f"sigma {self.sigma:g}"
        )


@dataclass(frozen=True, kw_only=True)
class PdfaWithoutFormula(PdfaRun):
    """A PDFA run whose device or clips do not give the paper's formula its constants."""

    missing: Annotated[
        str,
        Doc("What is missing, such as 'the clip of the projected error, trainer.tau_b'."),
        require_text("must say which constant of the paper's formula is missing"),
    ]

    kind: ClassVar[str] = "pdfa_without_formula"
    priced: ClassVar[bool] = False

    def describe(self) -> str:
        """Return what ran, in a few words."""
        return f"PDFA, {counted(self.steps, 'step')}; the paper's formula lacks {self.missing}"


def column_bound_published(
    order: float, *, batch_size: int, width: int, lo: float, hi: float, signal: float
) -> float:
    """Return eq. 17: 2 alpha hi s^2 / (m lo) + n alpha / (2 (alpha - 1)) log[m lo / ((m + 1) lo - hi)].

    lo = (gmin tmin)^2, hi = (gmax tmax)^2, s = tB / sigma, m is the batch size and n the width. It bounds one column,
    and only the direction in which the entering record is the larger one; a bound on columns is no bound on the matrix,
    whose columns share their noise. Infinite if the logarithm is undefined.
    """
    checks.positive(order_above_1=order - 1, lo=lo, hi=hi)
    checks.non_negative(signal=signal)
    checks.integer(minimum=1, batch_size=batch_size, width=width)
    if hi < lo:
        raise ValueError(f"hi = {hi}: must be at least lo = {lo}")
    m = batch_size
    denominator = (m + 1) * lo - hi
    if denominator <= 0:
        return math.inf
    first = 2 * order * hi * signal**2 / (m * lo)
    return first + width * order / (2 * (order - 1)) * math.log(m * lo / denominator)


def published_rdp(run: PublishedPdfa, order: float, *, noised_only: bool = False) -> float:
    """Return T sum over layers of fan_in eps_l(alpha), hypotheses taken as given; infinite if undefined.

    A layer with lo = 0 contradicts the hypotheses, which need some lo in (0, hi]. Eq. 17 falls in lo, so lo = hi is
    used: the least value of the formula. `noised_only` leaves out layers that carry no noise; the paper counts all.
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
) -> float:
    """Return epsilon of the composed eq. 17, hypotheses taken as given, by the paper's conversion, Theorem 2.

    It is the least sum + log(1/delta) / (alpha - 1) over the runs' common orders or those given.
    """
    checks.in_unit_interval(closed="left", delta=delta)
    tried = common_orders(runs) if orders is None else orders
    curve = [
        (order, sum(published_rdp(run, order, noised_only=noised_only) for run in runs)) for order in tried
    ]
    if delta == 0:
        return math.inf
    values = [value - math.log(delta) / (order - 1) for order, value in curve if math.isfinite(value)]
    return float(min(values, default=math.inf))


def common_orders(runs: Sequence[PublishedPdfa]) -> tuple[float, ...]:
    """Return the Renyi orders common to all runs: the stated one, else a grid; none if two stated orders differ."""
    fixed = {run.order for run in runs if run.order is not None}
    if len(fixed) > 1:
        return ()
    return tuple(fixed) or _ORDERS


def hypotheses(run: PublishedPdfa) -> tuple[Assumption, ...]:
    """Return Proposition 3's hypotheses for each layer that carries noise, each checked against the run.

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


def published_guarantee(runs: Sequence[PublishedPdfa], delta: float) -> Guarantee:
    """Return what the paper claims: status `claimed`, infinite if a hypothesis of Proposition 3 fails.

    epsilon uses the orders at which the proposition's matrix is positive definite, formula_value all orders. Both sum
    over every layer, as the paper does. The gaps of the proof stand among the assumptions.
    """
    formula = published_value(runs, delta)
    noised = published_value(runs, delta, noised_only=True)
    checked = tuple(dict.fromkeys(item for run in runs for item in hypotheses(run)))
    failed = [item.text for item in checked if item.holds is False]
    admissible = [
        order
        for order in common_orders(runs)
        if all(
            run.batch_size * lo > (order - 1) * (hi - lo)
            for run in runs
            for lo, hi in (run.squares(layer) for layer in run.layers if layer.noised)
        )
    ]
    epsilon = math.inf if failed else published_value(runs, delta, orders=admissible)
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
        mechanism=f"{described(runs)} (formula over the noised layers only: {noised:.6g})",
        source=_SOURCE,
        assumptions=(*checked, *_GAPS, outputs),
        formula_value=formula,
        reason=reason,
    )
