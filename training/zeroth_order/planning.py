"""What one step of zeroth-order training releases, as a mechanism that the ledger records."""

from __future__ import annotations

import math

from accounting.calibration import calibrate
from accounting.errors import NoGuarantee
from accounting.guarantee import Adjacency
from accounting.zeroth_order.mechanisms import ZoGaussian, ZoLaplace
from training.config.run import RunConfig
from training.data.samplers import Sampler
from training.protections.planning import divisor_of, total_steps, with_multiplier
from training.zeroth_order.config import ZoConfig

CLIP = 0.05
"""C where the configuration gives none: the DP-ZO paper's, found best of four in its Table 15."""


def zo_options(config: RunConfig) -> ZoConfig:
    """The section `trainer`, where it is that of zeroth-order training.

    Raises:
        TypeError: It is another family's.
    """
    options = config.trainer
    if not isinstance(options, ZoConfig):
        raise TypeError(f"trainer.kind = {options.kind!r} is not zo")
    return options


def clip_of(config: RunConfig) -> float:
    """C of a protected run."""
    return config.protection.clip_norm or CLIP


def step_mechanism(config: RunConfig, sampler: Sampler, *, noise_multiplier: float) -> ZoGaussian | ZoLaplace:
    """One step of a protected run: all its directions, on one Poisson batch.

    Args:
        config: The run.
        sampler: Its sampler.
        noise_multiplier: z, or the Laplace scale b, over C.

    Raises:
        NoGuarantee: The sampler has no sampling probability.
    """
    probability = sampler.sampling_probability
    if probability is None:
        raise NoGuarantee(f"sampler.scheme = {sampler.scheme!r} has no sampling probability; use 'poisson'")
    options, clip, divisor = zo_options(config), clip_of(config), divisor_of(config)
    relation = config.relation or Adjacency.ZERO_OUT
    if options.law == "laplace":
        return ZoLaplace(
            scale=noise_multiplier,
            sampling_probability=probability,
            clip_norm=clip,
            divisor=divisor,
            directions=options.directions,
            relation=relation,
        )
    return ZoGaussian(
        noise_multiplier=noise_multiplier,
        sampling_probability=probability,
        clip_norm=clip,
        divisor=divisor,
        directions=options.directions,
        relation=relation,
        device_noise=config.protection.noise == "device",
    )


def with_scalar_noise(config: RunConfig, sampler: Sampler) -> RunConfig:
    """The configuration with the noise at which all steps stay within epsilon, where none was given.

    Raises:
        NoGuarantee: No noise reaches epsilon.
    """
    options = config.protection
    if options.kind != "record" or options.noise_multiplier is not None or options.epsilon is None:
        return config
    start = math.sqrt(total_steps(config, sampler)) * (sampler.sampling_probability or 1.0) / options.epsilon
    one = step_mechanism(config, sampler, noise_multiplier=max(start, 0.1))
    run = one.repeated(total_steps(config, sampler))
    found, _ = calibrate(run, target_epsilon=options.epsilon, delta=options.delta)
    return with_multiplier(config, found.noise)
