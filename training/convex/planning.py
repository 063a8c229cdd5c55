"""What a convex run's configuration releases, and which runs no theorem covers."""

from __future__ import annotations

import math

import numpy as np

from accounting.calibration import calibrate
from accounting.convex.constants import log_expansion, residual_bound
from accounting.convex.mechanisms import ConvexLastIterate
from accounting.errors import NoGuarantee
from accounting.records.mechanisms import RecordCentral, RecordReplaced
from opusim.errors import ConfigError
from training.config.run import RunConfig
from training.config.sections import ModelConfig
from training.convex.config import ConvexConfig
from training.convex.gated import GatedNetwork
from training.data.samplers import Sampler
from training.protections.planning import clipped_records, divisor_of, total_steps, with_multiplier

LAST_ITERATE = "last iterate"
"""What a ledger calls the one model that a run of the last iterate releases."""
LAST_ITERATE_SCHEMES = ("disjoint-cyclic", "full-batch")


def convex_options(config: RunConfig) -> ConvexConfig:
    """The section `trainer`, where it is that of the convex trainer.

    Raises:
        TypeError: It is another family's.
    """
    options = config.trainer
    if not isinstance(options, ConvexConfig):
        raise TypeError(f"trainer.kind = {options.kind!r} is not convex; take trainer.kind = 'convex'")
    return options


def largest_gradient(config: RunConfig, n_classes: int) -> float:
    """C, the largest norm of a record's gradient."""
    options = convex_options(config)
    return residual_bound(options.objective, options.residual_clip, n_classes)


def final_noise(config: RunConfig, sampler: Sampler) -> float:
    """The last step's extra noise in units of a step's at the first rate."""
    options = convex_options(config)
    if options.final_noise is not None:
        return options.final_noise
    return math.sqrt(sampler.steps_per_epoch - 1) if config.protection.kind == "last-iterate" else 0.0


def divisor(config: RunConfig, sampler: Sampler) -> float:
    """b: the mean batch, a constant that the data do not change."""
    return config.protection.divisor or (
        float(sampler.n_records) if sampler.scheme == "full-batch" else divisor_of(config)
    )


def released(
    config: RunConfig, network: GatedNetwork, sampler: Sampler, *, noise_multiplier: float, steps: int
) -> ConvexLastIterate | RecordCentral | RecordReplaced:
    """What a protected run releases: its last iterate, or so many updates on secret batches."""
    options, device = convex_options(config), config.protection.noise == "device"
    n_classes = network.model.n_classes
    if config.protection.kind == "last-iterate":
        return ConvexLastIterate(
            objective=options.objective,
            clip=options.residual_clip,
            n_classes=n_classes,
            learning_rate=config.optimizer.lr,
            schedule=config.optimizer.schedule,
            regularisation=options.regularisation,
            batches=sampler.steps_per_epoch,
            epochs=config.epochs,
            noise_multiplier=noise_multiplier,
            final_noise=final_noise(config, sampler),
            hyperplanes=options.hyperplanes,
            device_noise=device,
        )
    return clipped_records(
        config,
        noise_multiplier=noise_multiplier,
        sampling_probability=sampler.sampling_probability or math.nan,
        clip_norm=largest_gradient(config, n_classes),
        divisor=divisor(config, sampler),
        device_noise=device,
        steps=steps,
    )


def with_calibrated_noise(config: RunConfig, network: GatedNetwork, sampler: Sampler) -> RunConfig:
    """The configuration with the least noise multiplier that keeps the whole run within epsilon."""
    options = config.protection
    if options.kind == "none" or options.noise_multiplier is not None or options.epsilon is None:
        return config
    whole = released(config, network, sampler, noise_multiplier=1.0, steps=total_steps(config, sampler))
    found, _ = calibrate(whole, target_epsilon=options.epsilon, delta=options.delta)
    return with_multiplier(config, found.noise_multiplier)


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
            optimizer.averaged_tail > 0 and protection.kind == "last-iterate",
            "a mean of iterates is not the last iterate; set it to 0",
        ),
        "protection.divisor": (
            protection.divisor,
            protection.divisor is not None and protection.kind == "last-iterate",
            "the theorem divides by the batch size; leave it out",
        ),
    }
    for key, (value, is_wrong, remedy) in wrong.items():
        if is_wrong:
            raise ConfigError("configuration", key, f"{value!r} is not for trainer.kind = 'convex': {remedy}")


def require_last_iterate_scheme(scheme: str) -> None:
    """Refuse random batches where the last iterate alone is to be private."""
    if scheme not in LAST_ITERATE_SCHEMES:
        raise NoGuarantee(
            f"sampling scheme = {scheme!r}: the last iterate's theorem needs fixed disjoint batches in a fixed order; "
            f"use {' or '.join(repr(name) for name in LAST_ITERATE_SCHEMES)}, or protection.kind = 'record' with "
            "'poisson'"
        )


def require_contraction(config: RunConfig, n_classes: int) -> None:
    """Refuse a learning rate at which steps push two models apart without a bound.

    Raises:
        NoGuarantee: eta >= 2 / (beta + lambda), or clipped softmax beyond its own limit.
    """
    options = convex_options(config)
    rate = np.array([config.optimizer.lr])
    log_expansion(options.objective, options.residual_clip, n_classes, rate, options.regularisation)
