"""How unified likelihood ratio training takes part in a run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from accounting.mechanisms import Mechanism
from accounting.records.mechanisms import Unprotected
from accounting.ulr.mechanisms import PublishedUlr
from opusim.devices.base import NoisyDevice
from opusim.errors import ConfigError
from opusim.noise import NoiseModel
from opusim.randomness.streams import NoiseStream, noise_stream
from training.config.run import RunConfig
from training.config.seeds import seed_for
from training.data import Dataset
from training.data.samplers import Sampler
from training.engine.algorithm import DeviceShape, TrainerFamily
from training.engine.optimizers import make_optimizer
from training.errors import RunFolderError
from training.networks.base import require_class_scores
from training.networks.network import FullyConnected, build_model
from training.networks.record_independence import probe_records, require_independent_records
from training.protections.base import DeviceNormals
from training.protections.build import make_record_protection
from training.protections.planning import sampled_step
from training.ulr.config import UlrConfig
from training.ulr.estimator import Estimator
from training.ulr.network import ModuleSequence, Outputs
from training.ulr.published import PublishedUpdate
from training.ulr.trainer import PlainUpdate, UlrTrainer, Update

_WIDEST_READING = 65_536
"""Outputs with which a device is opened at most: more noise than that takes further readings."""


class UlrFamily(TrainerFamily[ModuleSequence]):
    """ulr."""

    draws_in_public = True

    def network(self, config: RunConfig, dataset: Dataset, model: nn.Module | None) -> ModuleSequence:
        """See TrainerFamily.network; a user-supplied module is an nn.Sequential of any modules.

        Raises:
            ValueError: Records are protected and the module mixes them.
        """
        if model is None:
            return ModuleSequence(build_model(config, dataset), n_inputs=dataset.n_features)
        network = ModuleSequence(model, n_inputs=dataset.n_features)
        place = network.parameters[0].device
        require_class_scores(model, torch.zeros(2, network.n_inputs, device=place), dataset.n_classes)
        if config.protection.kind == "record":
            require_independent_records(model, probe_records(dataset, place))
        return network

    def rebuilt(self, facts: dict[str, Any], model: nn.Module | None) -> ModuleSequence:
        """See TrainerFamily.rebuilt."""
        if "layers" in facts:
            model = FullyConnected.from_facts(facts).model
        if model is None:
            raise RunFolderError(
                "the run was given a module of its own, which its folder does not hold; give it again: "
                "training.load_run(path, model=model)"
            )
        return ModuleSequence(model, n_inputs=facts["n_inputs"])

    def device_shape(self, config: RunConfig, network: ModuleSequence) -> DeviceShape:
        """A reading holds the noise of every output of one record."""
        outputs = sum(value.numel() for value in _blank_outputs(network, 1).values)
        return DeviceShape(n_inputs=1, n_outputs=min(outputs, _WIDEST_READING))

    def trainer(
        self, config: RunConfig, network: ModuleSequence, dataset: Dataset, device: NoisyDevice | None
    ) -> UlrTrainer:
        """See TrainerFamily.trainer."""
        return UlrTrainer(
            network,
            make_optimizer(network.parameters, config.optimizer),
            _update(config, network, device),
            loss=config.loss,
            device=device,
            reports=config.mode == "experiment" or config.protection.kind == "none",
        )

    def step_mechanisms(
        self, config: RunConfig, network: ModuleSequence, sampler: Sampler, noise: NoiseModel | None
    ) -> tuple[Mechanism, ...]:
        """See TrainerFamily.step_mechanisms."""
        if config.protection.kind == "record":
            multiplier = config.protection.noise_multiplier or math.nan
            return (sampled_step(config, sampler, noise_multiplier=multiplier),)
        if ulr_options(config).form == "published":
            return (_published_step(config, network, sampler),)
        return (Unprotected(what="ulr without protection"),)

    def require_covered(self, config: RunConfig, dataset: Dataset, sampler: Sampler) -> None:
        """See TrainerFamily.require_covered."""
        if ulr_options(config).form == "published" and config.protection.kind != "none":
            raise ConfigError(
                "configuration",
                "protection.kind",
                f"{config.protection.kind!r} is not for trainer.form = 'published', which brings its own noise; "
                "use 'none', or trainer.form = 'proven'",
            )
        super().require_covered(config, dataset, sampler)

    def record_protected(self, config: RunConfig, noise_multiplier: float) -> RunConfig:
        """See TrainerFamily.record_protected; in the proven form, its probes from a digital generator."""
        control = super().record_protected(config, noise_multiplier)
        proven = {"form": "proven", "noise": "digital"}
        return control.model_copy(update={"trainer": control.trainer.model_copy(update=proven)})

    def without_noise(self, config: RunConfig) -> RunConfig | None:
        """See TrainerFamily.without_noise; the published form's noise is that of its probes, and a device's unknown."""
        options = ulr_options(config)
        if options.form == "published" or options.noise == "device":
            return None
        return super().without_noise(config)


def ulr_options(config: RunConfig) -> UlrConfig:
    """The section `trainer`, where it is that of ulr.

    Raises:
        TypeError: It is another family's.
    """
    options = config.trainer
    if not isinstance(options, UlrConfig):
        raise TypeError(f"trainer.kind = {options.kind!r} is not ulr")
    return options


def _blank_outputs(network: ModuleSequence, n: int) -> Outputs:
    """What the modules make of records of zeros."""
    return network.forward(torch.zeros(n, network.n_inputs, device=network.parameters[0].device))


def _published_step(config: RunConfig, network: ModuleSequence, sampler: Sampler) -> PublishedUlr:
    """One step of the published form, with the constants of the paper's eq. 11."""
    options, least = config.sampler, config.sampler.min_batch_size or config.sampler.batch_size
    sizes = [sum(p.numel() for p in network.layer_parameters(layer)) for layer in range(network.depth)]
    return PublishedUlr(
        target_std=ulr_options(config).target_std,
        sampling_probability=sampler.sampling_probability or min(options.batch_size / sampler.n_records, 1.0),
        n_records=sampler.n_records,
        min_batch_size=least,
        modules=network.depth,
        largest_module=max(sizes),
        sampled=sampler.scheme == "poisson-min-batch",
    )


def _update(config: RunConfig, network: ModuleSequence, device: NoisyDevice | None) -> Update:
    options = ulr_options(config)
    noise = _output_noise(config, options, device)
    if options.form == "published":
        extra = noise_stream(config.mode, seed_for(config, "extra-noise"), "extra-noise")
        divisor = float(config.sampler.min_batch_size or config.sampler.batch_size)
        return PublishedUpdate(network, options, divisor, noise=noise, extra=extra)
    estimator = Estimator(
        copies=options.copies,
        reduction=options.variance_reduction,
        rows_per_pass=options.rows_per_pass,
    )
    return PlainUpdate(
        network,
        estimator,
        sigma=options.sigma,
        noise=noise,
        protection=make_record_protection(config, device, by_layer=options.clip == "module"),
    )


def _output_noise(config: RunConfig, options: UlrConfig, device: NoisyDevice | None) -> NoiseStream:
    """Where the noise on the modules' outputs comes from.

    Raises:
        ConfigError: The device's law is not Gaussian.
    """
    if options.noise == "device" and device is not None:
        return DeviceNormals(device, key="trainer.noise")
    return noise_stream(config.mode, seed_for(config, "output-noise"), "output-noise")
