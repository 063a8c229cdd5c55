"""How backpropagation and direct feedback alignment, digital or photonic, take part in a run."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from accounting.ledger import Ledger
from accounting.mechanisms import Mechanism
from accounting.record_mechanisms import Unprotected
from opusim.devices.base import NoisyDevice
from opusim.noise import NoiseModel
from opusim.randomness import noise_stream
from training.config.run import RunConfig
from training.data import Dataset
from training.data.samplers import Sampler
from training.family import DeviceShape, TrainerFamily
from training.feedback.options import feedback_options
from training.feedback.published import published_mechanism
from training.feedback.trainer import FeedbackTrainer
from training.networks.configured import fitting_network
from training.networks.network import FullyConnected
from training.optimizers import make_optimizer
from training.protections.choice import make_noisy_labels, make_protection, pay_for_budget
from training.protections.label_plan import label_noise
from training.protections.plan import sampled_step, with_multiplier, with_sampled_noise
from training.runs.folder import RunFolder
from training.seeds import seed_for
from training.trainer import Trainer


class FeedbackFamily(TrainerFamily[FullyConnected]):
    """bp, dfa, tdfa and pdfa."""

    protections = ("none", "record", "label", "label-amplified", "label-once", "label-response")

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
        if options.sigma:
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
        if protection.kind == "label" and protection.noise_multiplier is None:
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
        silent = config.model_copy(update={"trainer": config.trainer.model_copy(update={"sigma": 0.0})})
        return super().without_noise(silent)
