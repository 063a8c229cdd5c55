"""Unified likelihood ratio training as the algorithm of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.ulr import PublishedUlr
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.noise import NoiseModel
from opusim.randomness.streams import NoiseStream, noise_stream
from opusim.training.config.run import RunConfig
from opusim.training.data import Dataset
from opusim.training.engine.algorithm import Algorithm, DeviceShape
from opusim.training.errors import RunFolderError
from opusim.training.networks.base import require_class_scores
from opusim.training.networks.network import FullyConnected, build_model
from opusim.training.networks.optimizers import make_optimizer
from opusim.training.networks.record_gradients.probe import require_separate_outputs
from opusim.training.networks.record_independence import invented_records
from opusim.training.protections.base import DeviceNormals, SoftLabels
from opusim.training.ulr.config import UlrConfig
from opusim.training.ulr.estimator import (
    Estimator,
    ModuleSequence,
    Outputs,
    coordinates_of,
    draw_sizes,
    needed_copies,
    parts_of_records,
)
from opusim.training.ulr.trainer import PlainUpdate, PublishedUpdate, UlrTrainer, Update

_WIDEST_READING = 65_536
"""Most outputs with which a device is opened; more noise than that takes further readings."""


class UlrAlgorithm(Algorithm[UlrConfig, ModuleSequence, UlrTrainer]):
    """ulr."""

    applies = frozenset({"gradients"})
    uses_public_randomness = True
    record_options: ClassVar[Mapping[str, Any]] = {"form": "proven", "noise": "digital"}

    @classmethod
    def build_network(cls, config: RunConfig, dataset: Dataset, model: nn.Module | None) -> ModuleSequence:
        """See Algorithm.build_network; a user-supplied module is an nn.Sequential of any modules.

        Raises:
            ValueError: Records are protected and the module mixes them.
            ConfigError: `trainer.module_copies` is for another number of modules.
        """
        network = ModuleSequence(model or build_model(config, dataset), n_inputs=dataset.n_features)
        config.trainer_as(UlrConfig).copies_of(network.depth)
        if model is None:
            return network
        place = network.parameters[0].device
        require_class_scores(model, torch.zeros(2, network.n_inputs, device=place), dataset.n_classes)
        if config.protection.protects == "records":
            require_separate_outputs(model, invented_records(dataset, place)[0])
        return network

    @classmethod
    def rebuild_network(cls, facts: dict[str, Any], model: nn.Module | None) -> ModuleSequence:
        """See Algorithm.rebuild_network."""
        if "layers" in facts:
            model = FullyConnected.from_facts(facts).model
        if model is None:
            raise RunFolderError(
                "the run trained a user-supplied module, which its folder does not hold; give it again: "
                "opusim.load_run(path, model=model)"
            )
        return ModuleSequence(model, n_inputs=facts["n_inputs"])

    @property
    def device_shape(self) -> DeviceShape:
        """A reading holds the noise of every output of one record."""
        outputs = sum(value.numel() for value in _blank_outputs(self.network, 1).values)
        return DeviceShape(n_inputs=1, n_outputs=min(outputs, _WIDEST_READING))

    def work_of_step(self, records: float, n_outputs: int, *, observed: bool) -> DeviceWork:
        """See Algorithm.work_of_step; each copy of a module's noise is a draw, and so is what the protection adds."""
        own = self.protection.work_of_step(records, n_outputs)
        if self.options.noise != "device":
            return own
        return sum((DeviceWork.of_noise(size, n_outputs) for size in self._draws(records)), own)

    def _draws(self, records: float) -> list[float]:
        """Return how many numbers each draw of noise for the estimate has."""
        network, options = self.network, self.options
        if options.form == "published" and options.remedy == "parameters":
            sizes = [
                sum(p.numel() for p in network.layer_parameters(layer)) for layer in range(network.depth)
            ]
            parts = [parts_of_records(size, records) for size in sizes]
            draws = [size * part for size, found in zip(sizes, parts, strict=True) for part in found]
            return draws * options.copies
        blank, matched = _blank_outputs(network, 1), options.shape == "matched"
        coordinates = [
            coordinates_of(jacobian, value, h, matched=matched)
            for jacobian, value, h in zip(network.jacobians, blank.values, blank.inputs, strict=True)
        ]
        counts = [
            needed_copies(copies, value.numel(), options.directions, options.variance_reduction)
            for copies, value in zip(options.copies_of(network.depth), blank.values, strict=True)
        ]
        return [
            numbers
            for one, count in zip(coordinates, counts, strict=True)
            for numbers in draw_sizes(math.prod(one.shape), records, count, options.directions)
        ]

    def trainer(self, device: NoisyDevice | None, labels: SoftLabels | None = None) -> UlrTrainer:
        """See Algorithm.trainer."""
        config = self.config
        return UlrTrainer(
            self.network,
            make_optimizer(self.network.parameters, config.optimizer),
            self._update(device),
            loss=config.loss,
            device=device,
            reports=config.mode == "experiment" or config.protection.protects == "nothing",
            protected=config.protection.protects == "records",
        )

    @property
    def clips_by_layer(self) -> bool:
        """See Algorithm.clips_by_layer."""
        return self.options.clip == "module"

    def released(self, noise: NoiseModel | None) -> tuple[Mechanism, ...]:
        """See Algorithm.released; the published form states the paper's formula."""
        if self.options.form == "published":
            return (self._published_step(),)
        return super().released(noise)

    @property
    def noiseless(self) -> Mapping[str, Any] | None:
        """See Algorithm.noiseless; the published form's noise is that of its probes, and a device's is unknown."""
        return None if self.options.form == "published" or self.options.noise == "device" else {}

    def _published_step(self) -> PublishedUlr:
        """Return one step of the published form, with the constants of the paper's eq. 11."""
        network, sampler, config = self.network, self.plan.sampler, self.config.sampler
        sizes = [sum(p.numel() for p in network.layer_parameters(layer)) for layer in range(network.depth)]
        return PublishedUlr(
            target_std=self.options.target_std,
            sampling_probability=sampler.sampling_probability
            or min(config.batch_size / sampler.n_records, 1.0),
            n_records=sampler.n_records,
            min_batch_size=config.min_batch_size or config.batch_size,
            modules=network.depth,
            largest_module=max(sizes),
            sampled=sampler.scheme == "poisson-min-batch",
        )

    def _update(self, device: NoisyDevice | None) -> Update:
        config, options = self.config, self.options
        noise = self._output_noise(device)
        if options.form == "published":
            extra = noise_stream(config.mode, config.seed_for("extra-noise"), "extra-noise")
            divisor = float(config.sampler.min_batch_size or config.sampler.batch_size)
            return PublishedUpdate(self.network, options, divisor, noise=noise, extra=extra)
        estimator = Estimator(
            copies=options.copies_of(self.network.depth),
            reduction=options.variance_reduction,
            rows_per_pass=options.rows_per_pass,
            directions=options.directions,
            matched=options.shape == "matched",
        )
        return PlainUpdate(
            self.network,
            estimator,
            sigma=options.sigma,
            noise=noise,
            protection=self.gradients(device),
        )

    def _output_noise(self, device: NoisyDevice | None) -> NoiseStream:
        """Return the source of the noise on the modules' outputs.

        Raises:
            ConfigError: The device's law is not Gaussian.
        """
        config = self.config
        if self.options.noise == "device" and device is not None:
            return DeviceNormals(device, key="trainer.noise")
        return noise_stream(config.mode, config.seed_for("output-noise"), "output-noise")


def _blank_outputs(network: ModuleSequence, n: int) -> Outputs:
    """Return what the modules make of records of zeros."""
    return network.forward(torch.zeros(n, network.n_inputs, device=network.parameters[0].device))
