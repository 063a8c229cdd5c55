"""Unified likelihood ratio training as published, and the sampled Gaussian mechanism with rejection that it builds on.

The paper, "Forward Learning with Differential Privacy" (DP-ULR), claims with symbols q sampling rate, N lower limit of
the data set's size, N_B smallest batch that is accepted, sigma_0 the noise's standard deviation over the clip norm C

    gamma(alpha) = T q p(N_B - 1; N, q) / (1 - P(N_B - 1; N, q)) + 2 T q^2 alpha / sigma_0^2    (eq. 11),

p and P being mass and distribution function of Bin(N, q), at orders with A = ln(1 + 1 / (q (alpha - 1))),

    1 < alpha <= sigma_0^2 A / 2 - 2 ln sigma_0,
    alpha <= (sigma_0^2 A^2 / 2 - ln 5 - 2 ln sigma_0) / (A + ln(q alpha) + 1 / (2 sigma_0^2)).

epsilon = gamma + ln(1 / delta) / (alpha - 1), the paper's Proposition 1. Theorem rejection-sampling states what is
proven of rejection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Self

import numpy as np
from typing_extensions import Doc

from opusim import checks
from opusim.accounting import numerics
from opusim.accounting.guarantee import Adjacency, Assumption, EpsilonBounds, Guarantee, Release, Status, Unit
from opusim.accounting.mechanism import Count, Mechanism, Positive, SamplingProbability, counted, described
from opusim.accounting.theorems import Theorem

_ORDERS = tuple((1.0 + np.logspace(-2.0, 3.0, 800)).tolist())
_SOURCE = "DP-ULR paper, Theorem 2 (eq. 11), converted by its Proposition 1"
_GAPS = (
    "the estimate is Gaussian (clipped averages are bounded, and no number of copies gives a finite Renyi divergence)",
    "a new record leaves the covariance of the noise as it is (it adds its own; with a loss above the others' the "
    "divergence exceeds eq. 11 by orders of magnitude)",
    "sigma does not depend on the private batch (the controller of eq. 8 and the completing noise do)",
)

BATCH_NOISE = Theorem(
    name="ulr-batch-noise",
    title="the estimate's noise is made of the batch's own losses and inputs",
    statement="The noise of a DP-ULR step as published is a function of the losses and inputs of the batch's own "
    "records, so its support and covariance tell who is in the batch: for whole records there is no finite "
    "guarantee over all data.",
    proof="A record with a loss above the others', or with an input that the others lack, changes the covariance of "
    "the noise without bound; clipped averages lie on a sphere, so a record that is the only one in some "
    "direction shows with the probability that it is in the batch.",
    code="opusim.accounting.mechanisms.ulr.PublishedUlr",
    page="forward-only.md, As published",
)
REJECTION_SAMPLING = Theorem(
    name="rejection-sampling",
    title="Poisson sampling with rejection as a mixture of two sampled Gaussians",
    statement="D has N records, D' one more. Batches are drawn with probability q a record and redrawn below L "
    "records; X ~ Bin(N, q). A step that adds N(0, (z C)^2) to the sum of contributions of norm at most C "
    "is dominated, in each direction, by (1 - rho) SGM(qt, z) + rho SGM(qt, z / 2), SGM being the "
    "Poisson-sampled Gaussian mechanism, with qt = q P(X >= L - 1) / (q P(X >= L - 1) + (1 - q) P(X >= L)) "
    "and rho = E[X | X >= L] - E[X | X >= L - 1]. qt and rho fall as N grows, so N may be a lower limit of "
    "the data set's size.",
    proof="A batch of D' without the new record has the law of a batch of D; with it, with probability qt, the others"
    " are a batch J' of D of size at least L - 1. Binomial laws are log-concave, so J' can be coupled to an "
    "accepted batch J of D as J itself, or as J without one uniform element, the latter with probability rho: "
    "f(J) and f(J' and the new record) then differ by at most C, or 2 C. Divergences are jointly convex, and "
    "the mixture's hockey-stick divergences are the mixture of both, so it composes as a privacy loss "
    "distribution.",
    code="opusim.accounting.mechanisms.ulr.mixture_of",
    page="forward-only.md, Rejection of small batches",
    checked_by_code=(
        "each record's contribution is clipped to norm C before the sum, across all layers together",
        "every record enters a batch independently with probability q, and the batch is redrawn below N_B records",
        "the sum is divided by a public constant, never by the batch's own size",
        "the noise of every step is fresh and isotropic",
    ),
    trusted=(
        "batches stay secret, and so does how often one was redrawn",
        "the data set has at least n_records records, a public number",
        "neither the noise nor the seed that it came from is ever revealed",
    ),
)


@dataclass(frozen=True, kw_only=True)
class PublishedUlr(Mechanism):
    """Algorithm 1 of the DP-ULR paper with the constants of its eq. 11."""

    target_std: Annotated[Positive, Doc("sigma_0 > 0.")]
    sampling_probability: Annotated[SamplingProbability, Doc("q in (0, 1], before rejection.")]
    n_records: Annotated[Count, Doc("N >= 1, the data set's lower limit.")]
    min_batch_size: Annotated[Count, Doc("N_B >= 1.")]
    modules: Annotated[Count, Doc("Modules that are clipped and released separately, at least 1.")]
    largest_module: Annotated[Count, Doc("Parameters of the largest of them, at least 1.")]
    sampled: Annotated[
        bool,
        Doc(
            "Whether batches were sampled independently and redrawn below N_B, as the theorem requires (the paper's "
            "own runs take shuffled batches)."
        ),
    ] = False

    kind: ClassVar[str] = "ulr_published"
    theorem = BATCH_NOISE
    adjacency = Adjacency.ADD_OR_REMOVE_ONE
    refuted = (
        "no noise level bounds it over all data: the noise is made of the batch's own losses and inputs, so a record "
        "with a loss or an input that the others lack shows; use trainer.form = 'proven' and --protect record"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(target_std_squared=self.target_std * self.target_std)
        _require_possible_batch(self.n_records, self.min_batch_size)

    def describe(self) -> str:
        """Return what ran, in a few words."""
        return (
            f"DP-ULR as published, sigma_0 {self.target_std:g}, q = {self.sampling_probability:g}, batches of at least "
            f"{self.min_batch_size}, {counted(self.modules, 'module')}, {counted(self.steps, 'step')}"
        )

    @classmethod
    def guarantees(cls, mechanisms: Sequence[Self], *, delta: float, enforced: bool) -> list[Guarantee]:
        """Return status none for whole records, then the paper's claim.

        `enforced` changes nothing: all checkable hypotheses are checked against the run's own constants.
        """
        whole = super().guarantees(mechanisms, delta=delta, enforced=enforced)
        return [*whole, published_guarantee(mechanisms, delta)]


@dataclass(frozen=True, kw_only=True)
class RejectionGaussian(Mechanism):
    """Sum over a Poisson batch, redrawn below N_B records, of vectors of norm at most C, plus N(0, (z C)^2)."""

    noise_multiplier: Annotated[Positive, Doc("z > 0.")]
    sampling_probability: Annotated[SamplingProbability, Doc("q in (0, 1], before rejection.")]
    n_records: Annotated[Count, Doc("N >= 1, a public lower limit of the data set's size.")]
    min_batch_size: Annotated[Count, Doc("N_B >= 1, at most N.")]

    kind: ClassVar[str] = "rejection_gaussian"
    noise_field: ClassVar[str | None] = "noise_multiplier"
    theorem = REJECTION_SAMPLING
    adjacency = Adjacency.ADD_OR_REMOVE_ONE

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_possible_batch(self.n_records, self.min_batch_size)

    def describe(self) -> str:
        """Return what ran, in a few words."""
        return (
            f"Gaussian noise, multiplier {self.noise_multiplier:g}, on Poisson batches "
            f"(q = {self.sampling_probability:g}) redrawn below {self.min_batch_size} of {self.n_records:,}, "
            f"{counted(self.steps, 'step')}"
        )

    def as_mixture(self) -> numerics.GaussianMixture:
        """Return the dominating mixture in numbers."""
        probability, share = mixture_of(self.sampling_probability, self.n_records, self.min_batch_size)
        return numerics.GaussianMixture(
            noise=self.noise_multiplier, probability=probability, share=share, steps=self.steps
        )

    @classmethod
    def bounds(cls, mechanisms: Sequence[Self], adjacency: Adjacency, delta: float) -> EpsilonBounds:
        """Return epsilon of all steps together, both directions."""
        return numerics.mixture_bounds([one.as_mixture() for one in mechanisms], delta)


def _require_possible_batch(n_records: int, min_batch_size: int) -> None:
    if min_batch_size > n_records:
        raise ValueError(f"min_batch_size = {min_batch_size}: must be at most n_records = {n_records}")


def mixture_of(sampling_probability: float, n_records: int, min_batch_size: int) -> tuple[float, float]:
    """Return qt and rho of theorem rejection-sampling at q, N = `n_records` and L = `min_batch_size`."""
    q, n, least = sampling_probability, n_records, min_batch_size
    if q == 1:
        return 1.0, 0.0
    law = numerics.binomial(n, q)
    below, from_least = law.logsf(least - 2), law.logsf(least - 1)
    if not math.isfinite(from_least):  # the probability underflows: take the worst possible pair
        return 1.0, 1.0
    probability = 1 / (1 + (1 - q) / q * math.exp(min(from_least - below, 0.0)))
    # E[X | X >= L] - E[X | X >= L - 1] = p (E[X | X >= L] - (L - 1)), p = P(X = L - 1 | X >= L - 1)
    # E[X 1(X >= L)] = N q P(Bin(N-1) >= L-1)
    mean = n * q * math.exp(numerics.binomial(n - 1, q).logsf(least - 2) - from_least)
    share = math.exp(law.logpmf(least - 1) - below) * (mean - (least - 1))
    return probability, min(max(share, 0.0), 1.0)


def published_rdp(run: PublishedUlr, order: float) -> float:
    """Return eq. 11 at one order, hypotheses taken as given."""
    return run.steps * (_rejection_term(run) + 2 * run.sampling_probability**2 * order / run.target_std**2)


@lru_cache(maxsize=64)
def _rejection_term(run: PublishedUlr) -> float:
    """Return the first term of eq. 11 for a step, q Pr(|B| = N_B - 1) / Pr(|B| >= N_B), the same at all orders."""
    law = numerics.binomial(run.n_records, run.sampling_probability)
    least = run.min_batch_size
    return float(run.sampling_probability * math.exp(law.logpmf(least - 1) - law.logsf(least - 1)))


def admissible(run: PublishedUlr, order: float) -> bool:
    """Return whether both conditions on alpha hold."""
    variance = run.target_std**2
    a = math.log1p(1 / (run.sampling_probability * (order - 1)))
    logarithm = math.log(run.target_std)
    if not 1 < order <= variance * a / 2 - 2 * logarithm:
        return False
    denominator = a + math.log(run.sampling_probability * order) + 1 / (2 * variance)
    return denominator <= 0 or order <= (variance * a**2 / 2 - math.log(5) - 2 * logarithm) / denominator


def published_value(runs: Sequence[PublishedUlr], delta: float, *, checked: bool) -> float:
    """Return epsilon of the composed eq. 11 over a grid of orders; infinite at delta 0 or if none is left.

    `checked` takes only the orders that both conditions on alpha allow in every run.
    """
    checks.in_unit_interval(closed="left", delta=delta)
    if delta == 0:
        return math.inf
    orders = [o for o in _ORDERS if not checked or all(admissible(run, o) for run in runs)]
    values = [sum(published_rdp(run, o) for run in runs) - math.log(delta) / (o - 1) for o in orders]
    return min(values, default=math.inf)


def published_guarantee(runs: Sequence[PublishedUlr], delta: float) -> Guarantee:
    """Return what the paper claims: infinite if a condition of its theorem fails; `formula_value` ignores them."""
    # the conditions of Theorem 2, each checked against its run, and what Algorithm 1 does not provide
    checked: list[Assumption] = []
    missing: list[Assumption] = []
    for run in runs:
        q, least, n = run.sampling_probability, run.min_batch_size, run.n_records
        conditions = (
            (f"q <= 1/5 (q = {q:g})", q <= 0.2),
            (f"sigma_0 >= 4 (sigma_0 = {run.target_std:g})", run.target_std >= 4),
            (f"1 <= N_B <= q N (N_B = {least}, q N = {q * n:g})", least <= q * n * (1 + 1e-12)),
            (
                "both conditions on alpha hold at some order",
                run.target_std > 0 and any(admissible(run, order) for order in _ORDERS),
            ),
            ("batches are sampled independently and drawn again below N_B", run.sampled),
            ("N, q and N_B are public constants, the same for both data sets", None),
        )
        real = math.sqrt(q * n / run.largest_module)
        gaps = (
            (
                "the clipped estimate's noise has standard deviation sigma_0 C in every direction (clipping bounds it "
                f"by C sqrt(batch / parameters) = {real:.3g} C in the largest module)",
                real >= run.target_std,
            ),
            (
                f"one module is released (each of {run.modules} is clipped to C separately, so a record moves them by "
                f"{math.sqrt(run.modules):.3g} C together)",
                run.modules == 1,
            ),
            *((text, False) for text in _GAPS),
        )
        for kept, found in ((checked, conditions), (missing, gaps)):
            kept += (Assumption(text=text, holds=None if ok is None else bool(ok)) for text, ok in found)
    checked = list(dict.fromkeys(checked))
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
        mechanism=described(runs),
        source=_SOURCE,
        assumptions=(*checked, *dict.fromkeys(missing)),
        formula_value=published_value(runs, delta, checked=False),
        reason=reason,
    )
