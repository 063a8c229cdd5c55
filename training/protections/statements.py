"""What a run's configuration lets be said about its privacy, before and after it ran."""

from __future__ import annotations

from accounting.composition import guarantees
from accounting.errors import NoGuarantee
from accounting.guarantee import Guarantee
from accounting.mechanisms import Mechanism
from accounting.pdfa_mechanisms import PdfaWithoutFormula, PublishedLayer, PublishedPdfa
from accounting.record_mechanisms import RecordCentral, Unprotected
from opusim.errors import ConfigError
from opusim.noise import GaussianNoise, NoiseModel
from training.config import RunConfig
from training.data import Dataset
from training.data.records import OWN_ARRAYS
from training.data.samplers import Sampler
from training.networks.activations import ACTIVATIONS
from training.networks.network import FullyConnected


def require_covered(config: RunConfig, dataset: Dataset, sampler: Sampler) -> None:
    """Refuse a protected run that no theorem covers, before anything is computed.

    Raises:
        NoGuarantee: The sampling scheme, the standardisation or the number of classes leaks what is protected.
    """
    if config.protection.kind == "none":
        return
    if sampler.sampling_probability is None or sampler.scheme not in ("poisson", "full-batch"):
        raise NoGuarantee(
            f"sampler.scheme = {sampler.scheme!r}: no theorem covers protection.kind = 'record' under it; "
            "set sampler.scheme=poisson"
        )
    if not dataset.standardisation.public:
        raise NoGuarantee(
            "the features were standardised by statistics of the data, which no guarantee covers; "
            "use public constants (data.mean and data.std)"
        )
    if config.data.name == OWN_ARRAYS and config.data.n_classes is None:
        raise NoGuarantee(
            "data.n_classes is missing: the number of classes would be read off the private labels; state it"
        )


def run_guarantees(
    config: RunConfig, network: FullyConnected, sampler: Sampler, noise: NoiseModel | None
) -> list[Guarantee]:
    """Every statement about a run, the strongest first.

    Args:
        config: The run.
        network: Its network.
        sampler: Its sampler.
        noise: The device's noise, None for a trainer without a device.
    """
    whole = step_mechanism(config, network, sampler, noise).repeated(config.epochs * sampler.steps_per_epoch)
    return guarantees([whole], delta=config.protection.delta, enforced=True)


def step_mechanism(
    config: RunConfig, network: FullyConnected, sampler: Sampler, noise: NoiseModel | None
) -> Mechanism:
    """What one step of a run releases, as a description for the ledger.

    Takes the arguments of `run_guarantees`.
    """
    if config.protection.kind == "record":
        return _record(config, sampler)
    if config.trainer.kind == "pdfa" and noise is not None:
        return _published(config, network, noise)
    return Unprotected(what=f"{config.trainer.kind} without protection")


def divisor_of(config: RunConfig) -> float:
    """The constant that a protected run divides its noisy sums by."""
    return config.protection.divisor or float(config.sampler.batch_size)


def _record(config: RunConfig, sampler: Sampler) -> Mechanism:
    protection = config.protection
    if protection.noise_multiplier is None or sampler.sampling_probability is None:
        raise ConfigError("configuration", "protection.noise_multiplier", "is missing; give a number above 0")
    return RecordCentral(
        noise_multiplier=protection.noise_multiplier,
        sampling_probability=sampler.sampling_probability,
        clip_norm=protection.clip_norm,
        divisor=divisor_of(config),
    )


def _published(config: RunConfig, network: FullyConnected, noise: NoiseModel) -> Mechanism:
    """The paper's constants, or which of them the run lacks."""
    trainer = config.trainer
    tau_h_max = trainer.tau_h_max or config.model.tau_h_max
    sigma = noise.min_std if isinstance(noise, GaussianNoise) else 0.0
    if trainer.tau_b is None or tau_h_max is None or not sigma:
        lacks = {
            "a clip of the projected error (trainer.tau_b)": trainer.tau_b is None,
            "a bound on activations (trainer.tau_h_max)": tau_h_max is None,
            "Gaussian noise at every output of the device": not sigma,
        }
        return PdfaWithoutFormula(missing=" and ".join(text for text, lacking in lacks.items() if lacking))
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
