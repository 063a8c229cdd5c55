"""How backpropagation and direct feedback alignment, digital or photonic, take part in a run.

The feedback options of a run.

What a photonic run without protection claims: the paper's formula, where the run has its constants.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from accounting.ledger.ledger import Ledger
from accounting.mechanisms import Mechanism
from accounting.pdfa.mechanisms import PdfaWithoutFormula, PublishedLayer, PublishedPdfa
from accounting.records.mechanisms import Unprotected
from opusim.devices.base import NoisyDevice
from opusim.noise import GaussianNoise, NoiseModel
from opusim.randomness.streams import noise_stream
from training.config.run import RunConfig
from training.config.seeds import seed_for
from training.data import Dataset
from training.data.samplers import Sampler
from training.engine.algorithm import DeviceShape, TrainerFamily
from training.engine.optimizers import make_optimizer
from training.engine.trainer import Trainer
from training.feedback.config import FeedbackConfig
from training.feedback.trainer import FeedbackTrainer
from training.networks.activations import ACTIVATIONS
from training.networks.network import FullyConnected, fitting_network
from training.protections.build import make_noisy_labels, make_protection, pay_for_budget
from training.protections.planning import label_noise, sampled_step, with_multiplier, with_sampled_noise
from training.runs.folder import RunFolder


def feedback_options(config: RunConfig) -> FeedbackConfig:
    """The section `trainer`, where it is that of a feedback.

    Raises:
        TypeError: It is another family's.
    """
    options = config.trainer
    if not isinstance(options, FeedbackConfig):
        raise TypeError(f"trainer.kind = {options.kind!r} is no feedback; take bp, dfa, tdfa or pdfa")
    return options


def published_mechanism(
    config: RunConfig, options: FeedbackConfig, network: FullyConnected, noise: NoiseModel | None
) -> Mechanism:
    """The paper's formula, where the run has the constants that it asks for."""
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


class FeedbackFamily(TrainerFamily[FullyConnected]):
    """bp, dfa, tdfa and pdfa."""

    protections = (
        "none",
        "record",
        "label-budget",
        "label-amplified",
        "label-readout",
        "label-randomized-response",
    )

    def network(self, config: RunConfig, dataset: Dataset, model: nn.Module | None) -> FullyConnected:
        """See TrainerFamily.network; pdfa needs a hidden layer."""
        network = fitting_network(config, dataset, model)
        if config.uses_device and network.depth == 1:
            raise ValueError("model has no hidden layer; pdfa needs one to send the projected error to")
        return network

    def rebuilt(self, facts: dict[str, Any], model: nn.Module | None) -> FullyConnected:
        """See TrainerFamily.rebuilt."""
        return FullyConnected.from_facts(facts)

    def device_shape(self, config: RunConfig, network: FullyConnected) -> DeviceShape:
        """The error goes in; the signals of all hidden layers come out, side by side."""
        return DeviceShape(n_inputs=network.widths[-1], n_outputs=sum(network.widths[:-1]))

    def trainer(
        self, config: RunConfig, network: FullyConnected, dataset: Dataset, device: NoisyDevice | None
    ) -> FeedbackTrainer:
        """See TrainerFamily.trainer; what is known of the labels is left to `pay_at_start`."""
        options = feedback_options(config)
        noise = None
        if getattr(options, "sigma", 0.0):
            noise = noise_stream(config.mode, seed_for(config, "noise"), "digital-noise")
        return FeedbackTrainer(
            network,
            make_optimizer(network.parameters, config.optimizer),
            options,
            loss=config.loss,
            device=device,
            noise=noise,
            protection=make_protection(config, options, dataset, device),
        )

    def step_mechanisms(
        self, config: RunConfig, network: FullyConnected, sampler: Sampler, noise: NoiseModel | None
    ) -> tuple[Mechanism, ...]:
        """See TrainerFamily.step_mechanisms."""
        protection = config.protection
        if protection.kind in ("record", "label-amplified"):
            return (sampled_step(config, sampler, noise_multiplier=protection.noise_multiplier or math.nan),)
        if protection.kind != "none":
            return ()
        if config.uses_device:
            return (published_mechanism(config, feedback_options(config), network, noise),)
        return (Unprotected(what=f"{config.trainer.kind} without protection"),)

    def with_noise(self, config: RunConfig, network: FullyConnected, sampler: Sampler) -> RunConfig:
        """See TrainerFamily.with_noise."""
        protection = config.protection
        if protection.kind == "label-budget" and protection.noise_multiplier is None:
            return with_multiplier(config, label_noise(config, network, sampler))
        return with_sampled_noise(config, sampler)

    def begin(self, config: RunConfig, trainer: Trainer) -> None:
        """See TrainerFamily.begin."""
        if config.model.initial_output == "feedback" and isinstance(trainer, FeedbackTrainer):
            trainer.start_from_feedback()

    def pay_at_start(
        self,
        config: RunConfig,
        trainer: Trainer,
        dataset: Dataset,
        device: NoisyDevice | None,
        ledger: Ledger,
        folder: RunFolder,
        *,
        steps: int,
    ) -> None:
        """See TrainerFamily.pay_at_start: the budget of every label, or the one look at the labels."""
        pay_for_budget(config, ledger)
        if isinstance(trainer, FeedbackTrainer):
            trainer.noisy_labels = make_noisy_labels(config, dataset, device, ledger, folder, steps=steps)

    def without_noise(self, config: RunConfig) -> RunConfig | None:
        """See TrainerFamily.without_noise; a digital feedback's own noise goes too."""
        if "sigma" in type(config.trainer).model_fields:
            config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"sigma": 0.0})})
        return super().without_noise(config)
