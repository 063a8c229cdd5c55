"""Guarantees of the standard mechanisms: sampled Gaussian and Laplace noise, Gaussian noise, randomized response.

| mechanism | delta = 0 | delta > 0 |
| --- | --- | --- |
| Gaussian, no sampling | none | exact: mu^2 = sum of (k / z)^2, epsilon of mu-GDP |
| Poisson-sampled Gaussian | none | privacy loss distribution, both directions; Renyi where that grows too large |
| Poisson-sampled Laplace | closed form | the smaller of closed form and privacy loss distribution |
| randomized response | closed form | exact: the loss has three values, a multiple of epsilon each |

k is 1 where a record is added, removed or made null, 2 where one is replaced (its sum moves by 2 C). Closed forms for
Laplace, T log(1 + q (e^(1/b) - 1)) for add_or_remove_one and zero_out: the ratio of the sampled densities is at most
1 - q + q e^(1/b) when the record leaves, and its inverse at most 1 / (1 - q + q e^(-1/b)), which is less. For
replace_one both sums contain the record with probability q, so a step costs
log((1 - q + q e^(1/b)) / (1 - q + q e^(-1/b))).

Whatever cannot be computed raises `NoGuarantee` or gives infinity with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from accounting.errors import NoGuarantee
from accounting.guarantee import Adjacency, Assumption, Guarantee
from accounting.mechanisms import Gaussian, Mechanism, PoissonGaussian, PoissonLaplace, RandomizedResponse
from accounting.numerics.loss_bounds import ROUNDING, EpsilonBounds
from accounting.numerics.sampled_noise import sampled_noise_bounds
from accounting.statement import about_relation, proven_guarantee, stated
from opusim import checks

Noise = PoissonGaussian | PoissonLaplace | Gaussian


def guarantees(mechanisms: Sequence[Mechanism], *, delta: float, enforced: bool = False) -> list[Guarantee]:
    """The guarantee of all mechanisms together, each with fresh noise, every output released.

    Args:
        mechanisms: At least one, all about the same unit and relation; any order gives the same.
        delta: In [0, 1).
        enforced: Whether the code that ran them checked the assumptions (else they are taken on trust).

    Returns:
        One guarantee; its epsilon is infinite where nothing finite holds, with the reason.

    Raises:
        NoGuarantee: The mechanisms cannot be composed in one statement.
    """
    checks.in_unit_interval(closed="left", delta=delta)
    first, adjacency = _common(mechanisms)
    if isinstance(first, RandomizedResponse):
        bounds = _response_bounds(mechanisms, delta)
    else:
        bounds = noise_bounds(mechanisms, adjacency, delta)
    return [
        proven_guarantee(
            mechanisms,
            bounds=bounds,
            delta=delta,
            adjacency=adjacency,
            source=_theorem(mechanisms),
            assumptions=_assumptions(mechanisms, adjacency, enforced),
        )
    ]


def _common(mechanisms: Sequence[Mechanism]) -> tuple[Mechanism, Adjacency]:
    if not mechanisms:
        raise NoGuarantee("mechanisms: none was given; name at least one")
    labels = [isinstance(mechanism, RandomizedResponse) for mechanism in mechanisms]
    relations = {getattr(mechanism, "adjacency", Adjacency.REPLACE_ONE) for mechanism in mechanisms}
    if len(set(labels)) != 1 or len(relations) != 1:
        kinds = ", ".join(sorted({f"{m.kind} ({getattr(m, 'adjacency', 'label')})" for m in mechanisms}))
        raise NoGuarantee(f"mechanisms {kinds}: protect different units or relations; state each apart")
    return mechanisms[0], relations.pop()


def noise_bounds(mechanisms: Sequence[Mechanism], adjacency: Adjacency, delta: float) -> EpsilonBounds:
    """Bounds on epsilon(delta) of Gaussian and Laplace noise, sampled or not, all of one relation.

    Args:
        mechanisms: At least one `PoissonGaussian`, `Gaussian` or `PoissonLaplace`.
        adjacency: Their relation.
        delta: In [0, 1).

    Raises:
        NoGuarantee: The numerics have no answer.
    """
    shift = 2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    if delta > 0 and all(_never_samples(mechanism) for mechanism in mechanisms):
        mu = math.hypot(*(math.sqrt(mechanism.steps) * shift / mechanism.noise for mechanism in mechanisms))
        return gaussian_bounds(mu, delta)
    pure = sum(_laplace_epsilon(mechanism) for mechanism in mechanisms)
    if delta == 0:
        return EpsilonBounds(lower=pure, upper=pure, method="closed form")
    try:
        bounds = sampled_noise_bounds(mechanisms, delta)
    except NoGuarantee:
        if math.isinf(pure):
            raise
        return EpsilonBounds(lower=0.0, upper=pure, method="closed form for delta = 0")
    if bounds.upper <= pure:
        return bounds
    return EpsilonBounds(lower=min(bounds.lower, pure), upper=pure, method="closed form for delta = 0")


def gaussian_bounds(mu: float, delta: float) -> EpsilonBounds:
    """Epsilon of mu-GDP (exact up to the root search).

    Args:
        mu: At least 0; from 1e8 on, where doubles fail, the answer is infinite; below 1e-9 the bound of 1e-9 stands in.
        delta: In [0, 1); infinite at 0.
    """
    from dp_accounting import get_epsilon_gaussian

    checks.in_unit_interval(closed="left", delta=delta)
    if delta == 0 or not mu < 1e8:
        return EpsilonBounds(lower=math.inf, upper=math.inf, method="exact Gaussian trade-off")
    with np.errstate(all="ignore"):  # dp_accounting takes the logarithm of 0 where delta exceeds mu
        epsilon = float(get_epsilon_gaussian(1.0 / max(mu, 1e-9), delta))
    lower = epsilon if mu >= 1e-9 else 0.0
    return EpsilonBounds(lower=lower, upper=epsilon * (1 + 1e-9) + 1e-9, method="exact Gaussian trade-off")


def _never_samples(mechanism: Mechanism) -> bool:
    whole = isinstance(mechanism, PoissonGaussian) and mechanism.sampling_probability == 1
    return whole or isinstance(mechanism, Gaussian)


def _laplace_epsilon(mechanism: Mechanism) -> float:
    """Pure epsilon of all steps of a sampled Laplace mechanism; infinite for any other."""
    if not isinstance(mechanism, PoissonLaplace):
        return math.inf
    q, exponent = mechanism.sampling_probability, 1 / mechanism.scale
    # log(1 - q + q e^t) without overflow and with small values kept
    up = math.log1p(q * math.expm1(exponent)) if exponent < 500 else exponent + math.log(q)
    if mechanism.adjacency is Adjacency.REPLACE_ONE:
        up -= math.log1p(q * math.expm1(-exponent)) if q < 1 else -exponent
    return mechanism.steps * up


def _response_bounds(mechanisms: Sequence[Mechanism], delta: float) -> EpsilonBounds:
    """Randomized response, n times on one label; the count is composed here."""
    responses = [mechanism for mechanism in mechanisms if isinstance(mechanism, RandomizedResponse)]
    pure = math.fsum(response.steps * response.step_epsilon for response in responses)
    kinds = {(response.keep_probability, response.n_classes) for response in responses}
    steps = sum(response.steps for response in responses)
    # different responses have no common grid of losses, and a transform of many rounds a small delta away
    if delta == 0 or len(kinds) > 1 or not ROUNDING * steps <= delta / 2:
        return EpsilonBounds(lower=pure if delta == 0 else 0.0, upper=pure, method="closed form")
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    one = responses[0]
    other = (1 - one.keep_probability) / (one.n_classes - 1)
    masses = {1: one.keep_probability, 0: (one.n_classes - 2) * other, -1: other}
    loss = PrivacyLossDistribution.create_from_rounded_probability(masses, 0.0, one.step_epsilon)
    composed = loss if steps == 1 else loss.self_compose(steps)
    slack = ROUNDING * steps if steps > 1 else 0.0
    epsilon = min(float(composed.get_epsilon_for_delta(delta - slack)) * (1 + 1e-9), pure)
    lower = min(float(composed.get_epsilon_for_delta(delta + slack)) * (1 - 1e-6), epsilon)
    return EpsilonBounds(lower=lower, upper=epsilon, method="exact distribution of the loss")


def _theorem(mechanisms: Sequence[Mechanism]) -> str:
    kinds = {type(mechanism) for mechanism in mechanisms}
    if kinds == {RandomizedResponse}:
        return "randomized response (Warner 1965)"
    if PoissonLaplace in kinds:
        return "Poisson-sampled Laplace mechanism (DP-ZO, Propositions A.1, A.2; Zhu et al. 2022)"
    if kinds == {Gaussian}:
        return "Gaussian mechanism (Balle and Wang 2018; Dong et al. 2019)"
    return "Poisson-sampled Gaussian mechanism (Zhu et al. 2022; Doroshenko et al. 2022)"


def _assumptions(
    mechanisms: Sequence[Mechanism], adjacency: Adjacency, enforced: bool
) -> tuple[Assumption, ...]:
    checked = ["the noise of every step is fresh"]
    trusted = ["neither the noise nor the seed that it came from is ever revealed"]
    if any(isinstance(mechanism, RandomizedResponse) for mechanism in mechanisms):
        checked.append("labels are used through the randomized ones only")
    else:
        checked.append(
            "each record's contribution is clipped to norm C before the sum, across all layers together"
        )
        checked.append("the sum is divided by a public constant, never by the batch's own size")
    if any(isinstance(mechanism, PoissonGaussian | PoissonLaplace) for mechanism in mechanisms):
        checked.append("every record enters every batch independently with probability q")
        trusted.append("batches stay secret")
    return (*stated(checked, trusted, enforced=enforced), *about_relation(adjacency, enforced=enforced))
