"""How strong the noise of a label protection is: from the run's epsilon to mu, flips and noise multipliers.

What a run's configuration releases, as mechanisms that a ledger records; and which runs no theorem covers.
"""

from __future__ import annotations

import math
from typing import Any

from accounting.calibration import calibrate
from accounting.composition import Budget
from accounting.errors import NoGuarantee
from accounting.guarantee import Adjacency
from accounting.labels.mechanisms import LabelAmplified, LabelBudget, LabelReadout, RandomizedResponse
from accounting.records.mechanisms import RecordCentral, RecordReplaced
from accounting.theorems import require_scheme
from training.config.run import RunConfig, split_refusal
from training.data import Dataset
from training.data.catalogue import OWN_ARRAYS
from training.data.samplers import Sampler
from training.networks.network import FullyConnected


def require_covered(config: RunConfig, dataset: Dataset, sampler: Sampler) -> None:
    """Refuse a protected run that no theorem covers, before anything is computed.

    Raises:
        NoGuarantee: The sampling scheme, the split, the standardisation or the number of classes leaks what is
            protected.
    """
    kind = config.protection.kind
    if kind == "none":
        return
    if dataset.split != "given" and dataset.split not in config.fitting_splits:
        raise NoGuarantee(split_refusal(config, dataset.split))
    if kind in ("record", "label-amplified"):
        require_scheme(sampler.scheme, theorem=f"protection.kind = {kind!r}")
    whole_records = kind in ("record", "last-iterate")
    if whole_records and not dataset.standardisation.public:
        raise NoGuarantee(
            "the features were standardised by statistics of the data, which no guarantee covers; "
            "use public constants (data.mean and data.std)"
        )
    if whole_records and dataset.components is not None:
        raise NoGuarantee(
            f"data.components = {config.data.components}: principal components are computed from the private records, "
            "which no guarantee covers; leave it out"
        )
    if config.data.name == OWN_ARRAYS and config.data.n_classes is None:
        raise NoGuarantee(
            "data.n_classes is missing: the number of classes would be read off the private labels; state it"
        )


def with_sampled_noise(config: RunConfig, sampler: Sampler) -> RunConfig:
    """The configuration with the noise multiplier at which all steps on secret batches stay within epsilon.

    Left as it is where a multiplier is given, or epsilon is not.

    Raises:
        NoGuarantee: No noise reaches epsilon.
    """
    options = config.protection
    if options.noise_multiplier is not None or options.epsilon is None:
        return config
    if options.kind not in ("record", "label-amplified"):
        return config
    steps = sampled_step(config, sampler, noise_multiplier=1.0).repeated(total_steps(config, sampler))
    found, _ = calibrate(steps, target_epsilon=options.epsilon, delta=options.delta)
    return with_multiplier(config, found.noise_multiplier)


def with_multiplier(config: RunConfig, noise_multiplier: float) -> RunConfig:
    """The configuration with this noise multiplier."""
    changed = config.protection.model_copy(update={"noise_multiplier": float(noise_multiplier)})
    return config.model_copy(update={"protection": changed})


def budget_of(config: RunConfig) -> Budget | None:
    """What the run may spend at most."""
    options = config.protection
    return None if options.epsilon is None else Budget(epsilon=options.epsilon, delta=options.delta)


def divisor_of(config: RunConfig) -> float:
    """The constant that a protected run divides its noisy sums by."""
    return config.protection.divisor or float(config.sampler.batch_size)


def total_steps(config: RunConfig, sampler: Sampler) -> int:
    """Steps of the whole run."""
    return config.epochs * sampler.steps_per_epoch


def sampled_step(
    config: RunConfig, sampler: Sampler, *, noise_multiplier: float
) -> RecordCentral | RecordReplaced | LabelAmplified:
    """One step on a secret Poisson batch."""
    options = config.protection
    probability = sampler.sampling_probability
    if probability is None:
        raise NoGuarantee(f"sampler.scheme = {sampler.scheme!r} has no sampling probability; use 'poisson'")
    device_noise = options.noise == "device"
    if options.kind == "label-amplified":
        return LabelAmplified(
            noise_multiplier=noise_multiplier, sampling_probability=probability, device_noise=device_noise
        )
    return clipped_records(
        config,
        noise_multiplier=noise_multiplier,
        sampling_probability=probability,
        clip_norm=options.clip,
        divisor=divisor_of(config),
        device_noise=device_noise,
    )


def clipped_records(config: RunConfig, **parameters: Any) -> RecordCentral | RecordReplaced:
    """Clipped records and central noise, as the mechanism of the run's relation.

    Args:
        config: The run.
        **parameters: Fields that both mechanisms have.
    """
    if config.relation is Adjacency.REPLACE_ONE:
        return RecordReplaced(**parameters)
    return RecordCentral(relation=config.relation or Adjacency.ZERO_OUT, **parameters)


_SPENDING = 0.8
"""Share of a label budget that an average record is meant to spend; the rest is for records of high leverage."""


def label_budget(config: RunConfig) -> LabelBudget:
    """The budget of every record's label in the whole run."""
    found, _ = calibrate(
        LabelBudget(budget_mu=1.0, device_noise=config.protection.noise == "device"),
        target_epsilon=config.protection.epsilon or math.nan,
        delta=config.protection.delta,
    )
    return found


def label_mu(config: RunConfig) -> float:
    """Mu of one reading of every label."""
    found, _ = calibrate(
        LabelReadout(mu=1.0),
        target_epsilon=config.protection.epsilon or math.nan,
        delta=config.protection.delta,
    )
    return found.mu


def label_response(config: RunConfig, n_classes: int) -> RandomizedResponse:
    """Randomized response at the run's epsilon."""
    found, _ = calibrate(
        RandomizedResponse.from_epsilon(1.0, n_classes),
        target_epsilon=config.protection.epsilon or math.nan,
        delta=config.protection.delta,
    )
    return found


def label_noise(config: RunConfig, network: FullyConnected, sampler: Sampler) -> float:
    """The noise multiplier z at which a record of average leverage spends a stated share of its budget by the end.

    The mean leverage in a batch of m is at most (fan_in + 1) / m, and mu^2 = 4 lev / z^2 for each layer and step.
    """
    batch = sampler.expected_batch_size
    fan_ins = [linear.in_features + (linear.bias is not None) for linear in network.linears]
    leverage = sum(min(1.0, fan_in / batch) for fan_in in fan_ins)
    visits = total_steps(config, sampler) * batch / sampler.n_records
    return 2 * math.sqrt(visits * leverage / _SPENDING) / label_budget(config).budget_mu
