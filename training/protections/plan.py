"""What a run's configuration releases, as mechanisms that a ledger records; and which runs no theorem covers."""

from __future__ import annotations

import math

from accounting.budget import Budget
from accounting.calibration import calibrate
from accounting.errors import NoGuarantee
from accounting.label_mechanisms import LabelAmplified, LabelBudget, LabelOnce
from accounting.mechanisms import Mechanism, RandomizedResponse
from accounting.pdfa_mechanisms import PdfaWithoutFormula, PublishedLayer, PublishedPdfa
from accounting.record_mechanisms import RecordCentral, Unprotected
from accounting.schemes import require_scheme
from opusim.noise import GaussianNoise, NoiseModel
from training.config import RunConfig
from training.data import Dataset
from training.data.records import OWN_ARRAYS
from training.data.samplers import Sampler
from training.networks.activations import ACTIVATIONS
from training.networks.network import FullyConnected

_SPENDING = 0.8
"""Share of a label budget that an average record is meant to spend; the rest is for records of high leverage."""


def require_covered(config: RunConfig, dataset: Dataset, sampler: Sampler) -> None:
    """Refuse a protected run that no theorem covers, before anything is computed.

    Raises:
        NoGuarantee: The sampling scheme, the standardisation or the number of classes leaks what is protected.
    """
    kind = config.protection.kind
    if kind == "none":
        return
    if kind in ("record", "label-amplified"):
        require_scheme(sampler.scheme, theorem=f"protection.kind = {kind!r}")
    if kind == "record" and not dataset.standardisation.public:
        raise NoGuarantee(
            "the features were standardised by statistics of the data, which no guarantee covers; "
            "use public constants (data.mean and data.std)"
        )
    if kind == "record" and dataset.components is not None:
        raise NoGuarantee(
            f"data.components = {config.data.components}: principal components are computed from the private records, "
            "which no guarantee covers; leave it out"
        )
    if config.data.name == OWN_ARRAYS and config.data.n_classes is None:
        raise NoGuarantee(
            "data.n_classes is missing: the number of classes would be read off the private labels; state it"
        )


def with_noise(config: RunConfig, network: FullyConnected, sampler: Sampler) -> RunConfig:
    """The configuration with the noise multiplier that its epsilon asks for, where none was given.

    Raises:
        NoGuarantee: No noise reaches epsilon.
    """
    options = config.protection
    if options.noise_multiplier is not None or options.epsilon is None:
        return config
    if options.kind == "label":
        noise = _label_noise(config, network, sampler)
    elif options.kind in ("record", "label-amplified"):
        steps = _sampled(config, sampler, noise_multiplier=1.0).repeated(_steps(config, sampler))
        found, _ = calibrate(steps, target_epsilon=options.epsilon, delta=options.delta)
        noise = found.noise_multiplier
    else:
        return config
    return config.model_copy(
        update={"protection": options.model_copy(update={"noise_multiplier": float(noise)})}
    )


def budget_of(config: RunConfig) -> Budget | None:
    """What the run may spend at most."""
    options = config.protection
    return None if options.epsilon is None else Budget(epsilon=options.epsilon, delta=options.delta)


def divisor_of(config: RunConfig) -> float:
    """The constant that a protected run divides its noisy sums by."""
    return config.protection.divisor or float(config.sampler.batch_size)


def step_mechanisms(
    config: RunConfig, network: FullyConnected, sampler: Sampler, noise: NoiseModel | None
) -> tuple[Mechanism, ...]:
    """What one step releases; empty where everything is paid for at the beginning.

    Args:
        config: The run, with its noise multiplier.
        network: Its network.
        sampler: Its sampler.
        noise: The device's noise, None for a trainer without a device.
    """
    options = config.protection
    if options.kind in ("record", "label-amplified"):
        return (_sampled(config, sampler, noise_multiplier=options.noise_multiplier or math.nan),)
    if options.kind != "none":
        return ()
    if config.trainer.kind == "pdfa" and noise is not None:
        return (_published(config, network, noise),)
    return (Unprotected(what=f"{config.trainer.kind} without protection"),)


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
        LabelOnce(mu=1.0), target_epsilon=config.protection.epsilon or math.nan, delta=config.protection.delta
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


def _steps(config: RunConfig, sampler: Sampler) -> int:
    return config.epochs * sampler.steps_per_epoch


def _sampled(
    config: RunConfig, sampler: Sampler, *, noise_multiplier: float
) -> RecordCentral | LabelAmplified:
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
    return RecordCentral(
        noise_multiplier=noise_multiplier,
        sampling_probability=probability,
        clip_norm=options.clip,
        divisor=divisor_of(config),
        device_noise=device_noise,
    )


def _label_noise(config: RunConfig, network: FullyConnected, sampler: Sampler) -> float:
    """Z at which a record of average leverage spends a stated share of its budget by the end.

    The mean leverage in a batch of m is at most (fan_in + 1) / m, and mu^2 = 4 lev / z^2 for each layer and step.
    """
    batch = sampler.expected_batch_size
    fan_ins = [linear.in_features + (linear.bias is not None) for linear in network.linears]
    leverage = sum(min(1.0, fan_in / batch) for fan_in in fan_ins)
    visits = _steps(config, sampler) * batch / sampler.n_records
    return 2 * math.sqrt(visits * leverage / _SPENDING) / label_budget(config).budget_mu


def _published(config: RunConfig, network: FullyConnected, noise: NoiseModel) -> Mechanism:
    """The paper's formula, where the run has the constants that it asks for."""
    trainer = config.trainer
    tau_h_max = trainer.tau_h_max or config.model.tau_h_max
    sigma = noise.min_std if isinstance(noise, GaussianNoise) else 0.0
    missing = {
        "the ball of the projected error (trainer.tau_b)": trainer.tau_b is None,
        "the clip of the activations (trainer.tau_h_max)": tau_h_max is None,
        "Gaussian noise of the device": not sigma,
    }
    if trainer.tau_b is None or tau_h_max is None or not sigma:
        return PdfaWithoutFormula(missing=", ".join(name for name, lacks in missing.items() if lacks))
    layers = tuple(
        PublishedLayer(
            fan_in=linear.in_features + (linear.bias is not None),
            width=linear.out_features,
            gamma_min=ACTIVATIONS[phi.name].slope_bounds[0],
            gamma_max=ACTIVATIONS[phi.name].slope_bounds[1],
            inputs_bounded_below=False,
            noised=number < network.depth - 1,
        )
        for number, (linear, phi) in enumerate(zip(network.linears, network.activations, strict=True))
    )
    return PublishedPdfa(
        layers=layers,
        batch_size=config.sampler.batch_size,
        sigma=sigma,
        tau_b=trainer.tau_b,
        tau_h_min=trainer.tau_h_min or config.model.tau_h_min,
        tau_h_max=tau_h_max,
    )
