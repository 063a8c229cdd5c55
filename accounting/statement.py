"""The guarantee that a theorem's number makes: which status it may carry, and what is said where it is infinite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from accounting.guarantee import Adjacency, Assumption, Guarantee, Release, Status
from accounting.mechanisms import Mechanism
from accounting.numerics.loss_bounds import EpsilonBounds

NUMBER_IS_PUBLIC = (
    "the number of records is public and the same for both data sets: in one of them a record is replaced by a null "
    "record that contributes nothing; the sampling probability, the number of steps, the noise and the divisor may "
    "come from that number"
)
NUMBER_IS_UNUSED = (
    "the sampling probability, the number of steps, the noise and the divisor are constants that do not come from the "
    "data, and whether a record is held out does not depend on the others"
)


def proven_guarantee(
    mechanisms: Sequence[Mechanism],
    *,
    bounds: EpsilonBounds,
    delta: float,
    adjacency: Adjacency,
    source: str,
    assumptions: tuple[Assumption, ...],
    device_model: bool = False,
    reason: str | None = None,
    release: Release = Release.EVERY_UPDATE,
) -> Guarantee:
    """The statement about all mechanisms together.

    Args:
        mechanisms: What ran, at least one, all of the same unit.
        bounds: Epsilon at this delta, maybe infinite.
        delta: In [0, 1).
        adjacency: The relation that the bounds are about.
        source: The theorem; the numerical method is added to it.
        assumptions: Hypotheses of the theorem.
        device_model: Whether a stated law of a device's noise is among them.
        reason: Why epsilon is infinite, where it is; by default that delta is 0 or the noise too small.
        release: What the adversary sees.
    """
    infinite = math.isinf(bounds.upper)
    return Guarantee(
        epsilon=bounds.upper,
        delta=delta,
        unit=mechanisms[0].unit,
        adjacency=adjacency,
        release=release,
        status=proven_status(bounds.upper, device_model=device_model),
        mechanism="; ".join(mechanism.describe() for mechanism in mechanisms),
        source=source if infinite else f"{source}; {bounds.method}",
        assumptions=assumptions,
        epsilon_lower=None if infinite or bounds.lower == bounds.upper else bounds.lower,
        reason=(reason or _infinite_reason(delta)) if infinite else None,
    )


def proven_status(epsilon: float, *, device_model: bool) -> Status:
    """`none` for an infinite epsilon; else `proven`, under a device model where the noise is a device's.

    Args:
        epsilon: What the theorem gives, at least 0, maybe infinite.
        device_model: Whether a stated law of a device's noise is among the assumptions.
    """
    if math.isinf(epsilon):
        return Status.NONE
    return Status.PROVEN_UNDER_DEVICE_MODEL if device_model else Status.PROVEN


def spend_certificates(
    delta: float, betas: Sequence[float], bounds: Callable[[float], EpsilonBounds]
) -> tuple[EpsilonBounds, str | None]:
    """Bounds at what is left of delta once the device's certificates may fail, and why there is nothing left.

    Args:
        delta: In [0, 1).
        betas: The certificates' probabilities of error, added up.
        bounds: Bounds on epsilon at a delta.

    Returns:
        The bounds, and a reason where they are infinite because of the certificates.
    """
    beta = math.fsum(betas)
    if beta == 0 or delta > beta:
        return bounds(delta - beta), None
    nothing = EpsilonBounds(lower=0.0, upper=math.inf, method="no numbers")
    return nothing, f"delta = {delta:g} must exceed beta = {beta:g}, the certificates' own error"


def stated(checked: Sequence[str], trusted: Sequence[str] = (), *, enforced: bool) -> tuple[Assumption, ...]:
    """Hypotheses: those that a training code can check hold where it does, the others are taken on trust.

    Args:
        checked: What code that ran a mechanism checks or enforces.
        trusted: What no code can check.
        enforced: Whether such code ran it.
    """
    holds = True if enforced else None
    return (
        *(Assumption(text=text, holds=holds) for text in checked),
        *(Assumption(text=text) for text in trusted),
    )


def weaker(relations: Iterable[Adjacency]) -> Adjacency:
    """What holds for all of several relations of leaving a record out: zero_out, unless all are add_or_remove_one.

    A mechanism whose constants do not come from the data runs with a null record as it would without that record, so
    that its guarantee for add_or_remove_one is one for zero_out.
    """
    return Adjacency.ZERO_OUT if Adjacency.ZERO_OUT in set(relations) else Adjacency.ADD_OR_REMOVE_ONE


def about_relation(relation: Adjacency, *, enforced: bool) -> tuple[Assumption, ...]:
    """What a statement about a relation takes for granted about the number of records.

    Args:
        relation: Of the statement.
        enforced: Whether the code that ran refuses constants that come from the data.
    """
    if relation is Adjacency.ZERO_OUT:
        return (Assumption(text=NUMBER_IS_PUBLIC),)
    if relation is Adjacency.ADD_OR_REMOVE_ONE:
        return stated((NUMBER_IS_UNUSED,), enforced=enforced)
    return ()


def _infinite_reason(delta: float) -> str:
    if delta == 0:
        return "Gaussian noise has no finite epsilon at delta = 0; state a delta above 0"
    return f"no finite epsilon at delta = {delta:g} was found; use more noise or a larger delta"
