"""Backpropagation and direct feedback alignment, digital or photonic, as algorithms of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from accounting.mechanisms import Mechanism
from accounting.pdfa.mechanisms import PdfaWithoutFormula, PublishedLayer, PublishedPdfa
from opusim.devices.base import NoisyDevice
from opusim.noise import GaussianNoise, NoiseModel
from opusim.randomness.streams import noise_stream
from training.config.run import RunConfig
from training.data import Dataset
from training.engine.algorithm import Algorithm, DeviceShape
from training.feedback.config import FeedbackConfig
from training.feedback.trainer import FeedbackTrainer
from training.networks.functions import ACTIVATIONS
from training.networks.network import FullyConnected, build_network
from training.networks.optimizers import make_optimizer
from training.protections.base import SoftLabels
from training.protections.planning import Updates


class FeedbackAlgorithm(Algorithm[FeedbackConfig, FullyConnected, FeedbackTrainer]):
    """bp, dfa, tdfa and pdfa."""

    applies = frozenset({"gradients", "soft labels"})

    @classmethod
    def build_network(cls, config: RunConfig, dataset: Dataset, model: nn.Module | None) -> FullyConnected:
        """See Algorithm.build_network; pdfa needs a hidden layer."""
        network = build_network(config, dataset, model)
        if config.uses_device and network.depth == 1:
            raise ValueError("model has no hidden layer; pdfa needs one to send the projected error to")
        return network

    @classmethod
    def rebuild_network(cls, facts: dict[str, Any], model: nn.Module | None) -> FullyConnected:
        """See Algorithm.rebuild_network."""
        return FullyConnected.from_facts(facts)

    @property
    def device_shape(self) -> DeviceShape:
        """The error goes in; the signals of all hidden layers come out, side by side."""
        widths = self.network.widths
        return DeviceShape(n_inputs=widths[-1], n_outputs=sum(widths[:-1]))

    def trainer(self, device: NoisyDevice | None, labels: SoftLabels | None = None) -> FeedbackTrainer:
        """See Algorithm.trainer."""
        config, options = self.plan.config, self.options
        noise = None
        if options.digital_sigma:
            noise = noise_stream(config.mode, config.seed_for("noise"), "digital-noise")
        return FeedbackTrainer(
            self.network,
            make_optimizer(self.network.parameters, config.optimizer),
            options,
            loss=config.loss,
            device=device,
            noise=noise,
            protection=self.gradients(device),
            labels=labels,
        )

    @property
    def updates(self) -> Updates:
        """See Algorithm.updates; backpropagation may stretch the error on its way to the output layer."""
        options = self.options
        if options.kind != "bp":
            return Updates()
        unbounded = options.scale == "sphere"  # a ball (eq. 9) stretches nothing
        return Updates(output_gain=math.inf if unbounded else options.signal_gain)

    def initialise(self, trainer: FeedbackTrainer) -> None:
        """See Algorithm.initialise."""
        if self.plan.config.model.initial_output == "feedback":
            trainer.start_from_feedback()

    def released(self, noise: NoiseModel | None) -> tuple[Mechanism, ...]:
        """See Algorithm.released; a photonic run without protection states the paper's formula."""
        config = self.plan.config
        if config.protection.protects == "nothing" and config.uses_device:
            return (published_mechanism(config, self.options, self.network, noise),)
        return super().released(noise)

    @property
    def noiseless(self) -> Mapping[str, Any]:
        """See Algorithm.noiseless."""
        return {"sigma": 0.0} if self.options.digital_sigma else {}


def published_mechanism(
    config: RunConfig, options: FeedbackConfig, network: FullyConnected, noise: NoiseModel | None
) -> Mechanism:
    """Return the mechanism of the paper's formula, or one that names the constants that the run lacks for it.

    Args:
        config: The run.
        options: Its section `trainer`.
        network: Its network.
        noise: The law of its device's noise, or None if it is unknown.
    """
    clips_updates = options.clipped_layers != "none"
    tau_h_max = (options.tau_h_max if clips_updates else None) or config.model.tau_h_max
    tau_h_min = (options.tau_h_min if clips_updates else 0.0) or config.model.tau_h_min
    sigma = noise.min_std if isinstance(noise, GaussianNoise) else 0.0
    missing = {
        "the ball of the projected error (trainer.tau_b)": options.tau_b is None,
        "the clip of the activations (trainer.tau_h_max)": tau_h_max is None,
        "Gaussian noise of the device": not sigma,
    }
    if options.tau_b is None or tau_h_max is None or not sigma:
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
        tau_b=options.tau_b,
        tau_h_min=tau_h_min,
        tau_h_max=tau_h_max,
    )
