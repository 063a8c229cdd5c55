"""The controls of an audit: a run with its records protected by a known noise, and a run without its noise.

An audit's power is calculated, not played: the probability with which it would refute the same mechanism with half of
its noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from opusim.accounting.audit import AuditResult, detection_probability
from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Adjacency, Guarantee, NoGuarantee
from opusim.accounting.mechanisms import Mechanism
from opusim.training.engine.algorithm import require_applied
from opusim.training.engine.plan import RunPlan
from opusim.training.protections.config import RecordConfig

_SIMULATED = ("ideal", "gaussian")
"""Kinds of devices whose matrix an attacker could know."""


def record_protected(plan: RunPlan, noise_multiplier: float) -> RunPlan:
    """Return the run with whole records protected by a known digital noise on Poisson batches.

    Args:
        plan: The run.
        noise_multiplier: z of one Gaussian release a step. It is doubled if a record is replaced, which moves a sum
            twice as far as leaving the record out.

    Raises:
        NoGuarantee: The algorithm protects no records.
    """
    config, algorithm = plan.config, plan.algorithm
    options, multiplier = config.protection, algorithm.equivalent_noise(noise_multiplier)
    sampler: dict[str, Any] = {"scheme": "poisson", "min_batch_size": None}
    if plan.sampler.scheme == "full-batch":  # which leaves its batch_size unused
        sampler["batch_size"] = plan.sampler.n_records
    control = config.unchecked(
        trainer=algorithm.record_options,
        sampler=sampler,
        protection=RecordConfig(
            relation=getattr(options, "relation", None),
            delta=options.delta,
            noise_multiplier=multiplier,
            clip_norm=algorithm.clip_norm(config, plan.dataset.n_classes),
            divisor=config.divisor,
        ),
    )
    if control.relation is Adjacency.REPLACE_ONE:
        control = control.unchecked(protection={"noise_multiplier": 2 * multiplier})
    protected = plan.configured(control)
    require_applied(protected.algorithm)
    return protected


def without_noise(plan: RunPlan) -> RunPlan | None:
    """Return the run without the digital noise that its guarantee rests on, as if its user had forgotten the noise.

    None if the protective noise cannot be separated from the algorithm's own randomness.
    """
    own = plan.algorithm.noiseless
    if own is None:
        return None
    silent = plan.config.unchecked(trainer=own)
    if silent.protection.protects != "nothing":
        without = {"noise_multiplier": 0.0, "noise": "digital"}
        own_keys = type(silent.protection).model_fields
        silent = silent.unchecked(
            protection={key: value for key, value in without.items() if key in own_keys}
        )
    return plan.configured(silent)


_DELTAS = (1e-4, 1e-3, 1e-2, 0.1, 0.3)
"""Deltas at which a mechanism with half of its noise is stated, besides the audit's."""


def with_half_the_noise(mechanisms: Sequence[Mechanism], delta: float) -> list[tuple[float, float]]:
    """Return what is proven of mechanisms with half of their noise, as (delta, epsilon); empty if nothing is.

    Args:
        mechanisms: Of what is attacked.
        delta: Of the audit's bounds.
    """
    try:
        halved = [one.with_noise(one.noise / 2) for one in mechanisms]
        stated = [(d, guarantees(halved, delta=d)[0]) for d in (delta, *_DELTAS)]
    except (NoGuarantee, ValueError):  # it has no noise, or half of it has no price
        return []
    return [(d, one.epsilon) for d, one in stated if one.is_proven and math.isfinite(one.epsilon)]


def power_of(
    result: AuditResult, claim: Guarantee | None, weaker: Sequence[tuple[float, float]]
) -> float | None:
    """Return the probability with which as many trials would refute a claim at half of the noise; None if not known.

    Args:
        result: The bound from the trials.
        claim: What is claimed, if anything finite is.
        weaker: What `with_half_the_noise` returned.
    """
    if claim is None or not weaker or not math.isfinite(claim.epsilon):
        return None
    return detection_probability(weaker, claim.epsilon, result.n_in, result.n_out, result.plan)


def noiseless_step(plan: RunPlan) -> RunPlan | None:
    """Return the run whose plain descent at learning rate 1 shows a step's gradients without any noise.

    None if the noise, or what else is random, cannot be known to an attacker.
    """
    silent = without_noise(plan)
    if silent is None or (plan.description is not None and plan.description.kind not in _SIMULATED):
        return None
    return plain_descent(silent).with_silent_device()


def plain_descent(plan: RunPlan) -> RunPlan:
    """Return the run with plain gradient descent at learning rate 1."""
    plain = {"lr": 1.0, "schedule": "constant", "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
    return plan.unchecked(optimizer=plain)
