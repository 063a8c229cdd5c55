"""What a convex run's configuration releases, and which runs no theorem covers."""

from __future__ import annotations

import math

import numpy as np

from accounting.convex.constants import log_expansion, residual_bound
from accounting.convex.mechanisms import ConvexLastIterate
from accounting.errors import NoGuarantee
from opusim.errors import ConfigError
from training.config.run import RunConfig
from training.config.sections import ModelConfig
from training.convex.config import ConvexConfig
from training.protections.planning import Plan, divisor_of

LAST_ITERATE_SCHEMES = ("disjoint-cyclic", "full-batch")


def largest_gradient(options: ConvexConfig, n_classes: int) -> float:
    """Return C, the largest norm of a record's gradient."""
    return residual_bound(options.objective, options.residual_clip, n_classes)


def final_noise(plan: Plan, options: ConvexConfig) -> float:
    """Return the last step's extra noise, in units of a step's noise at the first learning rate."""
    if options.final_noise is not None:
        return options.final_noise
    return math.sqrt(plan.sampler.steps_per_epoch - 1) if plan.config.protection.last_iterate else 0.0


def mean_batch(plan: Plan) -> float:
    """Return b, the divisor of a batch's sum: a constant that the data do not change."""
    full = plan.sampler.scheme == "full-batch"
    return plan.config.protection.divisor or (
        float(plan.sampler.n_records) if full else divisor_of(plan.config)
    )


def last_iterate(plan: Plan, options: ConvexConfig, noise_multiplier: float) -> ConvexLastIterate:
    """Return the release of only the last iterate.

    Args:
        plan: The run.
        options: Its section `trainer`.
        noise_multiplier: z, the noise's standard deviation over C.
    """
    config = plan.config
    return ConvexLastIterate(
        objective=options.objective,
        clip=options.residual_clip,
        n_classes=plan.dataset.n_classes,
        learning_rate=config.optimizer.lr,
        schedule=config.optimizer.schedule,
        regularisation=options.regularisation,
        batches=plan.sampler.steps_per_epoch,
        epochs=config.epochs,
        noise_multiplier=noise_multiplier,
        final_noise=final_noise(plan, options),
        hyperplanes=options.hyperplanes,
        device_noise=config.protection.noise == "device",
    )


def require_plain_descent(config: RunConfig) -> None:
    """Refuse what no theorem about this descent covers, and keys that would do nothing.

    Raises:
        ConfigError: Momentum, weight decay, another optimizer, a clip in the wrong section, an average of weights.
        NoGuarantee: A last iterate under a sampler with random batches.
    """
    optimizer, protection = config.optimizer, config.protection
    wrong: dict[str, tuple[object, bool, str]] = {
        "model": (
            "this section",
            config.model != ModelConfig(),
            "its network has no such layers, set trainer.hyperplanes",
        ),
        "optimizer.name": (optimizer.name, optimizer.name != "sgd", "use 'sgd'"),
        "optimizer.momentum": (optimizer.momentum, optimizer.momentum > 0, "set it to 0"),
        "optimizer.weight_decay": (
            optimizer.weight_decay,
            optimizer.weight_decay > 0,
            "use trainer.regularisation",
        ),
        "protection.clip_norm": (protection.clip_norm, protection.clip_norm is not None, "use trainer.clip"),
        "optimizer.averaged_tail": (
            optimizer.averaged_tail,
            optimizer.averaged_tail > 0 and protection.last_iterate,
            "a mean of iterates is not the last iterate; set it to 0",
        ),
        "protection.divisor": (
            protection.divisor,
            protection.divisor is not None and protection.last_iterate,
            "the theorem divides by the batch size; leave it out",
        ),
    }
    for key, (value, is_wrong, remedy) in wrong.items():
        if is_wrong:
            raise ConfigError("configuration", key, f"{value!r} is not for trainer.kind = 'convex': {remedy}")


def require_last_iterate_scheme(scheme: str) -> None:
    """Refuse random batches if only the last iterate is to be private."""
    if scheme not in LAST_ITERATE_SCHEMES:
        raise NoGuarantee(
            f"sampling scheme = {scheme!r}: the last iterate's theorem needs fixed disjoint batches in a fixed order; "
            f"use {' or '.join(repr(name) for name in LAST_ITERATE_SCHEMES)}, or protection.kind = 'record' with "
            "'poisson'"
        )


def require_contraction(config: RunConfig, options: ConvexConfig, n_classes: int) -> None:
    """Refuse a learning rate at which steps push two models apart without a bound.

    Raises:
        NoGuarantee: eta >= 2 / (beta + lambda), or clipped softmax beyond its own limit.
    """
    rate = np.array([config.optimizer.lr])
    log_expansion(options.objective, options.residual_clip, n_classes, rate, options.regularisation)
