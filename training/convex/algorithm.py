"""The convex trainer as the algorithm of a run."""

from __future__ import annotations

from typing import Any

from torch import nn

from accounting.mechanisms import Mechanism
from opusim.devices.base import NoisyDevice
from training.config.run import RunConfig
from training.config.seeds import generator_for
from training.convex.config import ConvexConfig
from training.convex.gated import GatedNetwork, GatedRelu, seeded_hyperplanes
from training.convex.planning import (
    final_noise,
    largest_gradient,
    last_iterate,
    mean_batch,
    require_contraction,
    require_last_iterate_scheme,
    require_plain_descent,
)
from training.convex.trainer import ConvexTrainer, Descent, Objective
from training.data import Dataset
from training.engine.algorithm import Algorithm, DeviceShape
from training.networks.optimizers import make_optimizer
from training.protections.base import SoftLabels, central_noise, noise_std
from training.protections.planning import total_steps


class ConvexAlgorithm(Algorithm[ConvexConfig, GatedNetwork, ConvexTrainer]):
    """convex."""

    @classmethod
    def build_network(cls, config: RunConfig, dataset: Dataset, model: nn.Module | None) -> GatedNetwork:
        """See Algorithm.build_network; `initialise` reads a device's hyperplanes, and a checkpoint holds them."""
        options = config.trainer_as(ConvexConfig)
        if model is None:
            generator = generator_for(config, "hyperplanes")
            hyperplanes = seeded_hyperplanes(options.hyperplanes, dataset.n_features, generator)
            return GatedNetwork(
                GatedRelu(dataset.n_features, dataset.n_classes, hyperplanes, centre=options.centre)
            )
        if not isinstance(model, GatedRelu):
            raise TypeError(
                f"model must be a training.convex.gated.GatedRelu, got {type(model).__name__}; leave it out"
            )
        found = (model.n_inputs, model.n_classes, len(model.hyperplanes), model.centre)
        wanted = (dataset.n_features, dataset.n_classes, options.hyperplanes, options.centre)
        if found != wanted:
            raise ValueError(
                f"model has (features, classes, hyperplanes, centre) = {found}: must be {wanted}, as the data and "
                "the section trainer say"
            )
        return GatedNetwork(model)

    @classmethod
    def rebuild_network(cls, facts: dict[str, Any], model: nn.Module | None) -> GatedNetwork:
        """See Algorithm.rebuild_network."""
        return GatedNetwork.from_facts(facts)

    @property
    def device_shape(self) -> DeviceShape:
        """A record's features go in, its hyperplanes' projections come out."""
        network = self.network
        return DeviceShape(n_inputs=network.n_inputs, n_outputs=len(network.model.hyperplanes))

    def trainer(self, device: NoisyDevice | None, labels: SoftLabels | None = None) -> ConvexTrainer:
        """See Algorithm.trainer."""
        plan, config, options = self.plan, self.plan.config, self.options
        bound, b = largest_gradient(options, plan.dataset.n_classes), mean_batch(plan)
        multiplier = config.protection.noise_multiplier or 0.0
        descent = Descent(
            regularisation=options.regularisation,
            divisor=b,
            noise_std=noise_std(clip_norm=bound, noise_multiplier=multiplier, divisor=b),
            final_std=final_noise(plan, options) * config.optimizer.lr * multiplier * bound / b,
            total_steps=total_steps(plan),
        )
        return ConvexTrainer(
            self.network,
            make_optimizer([self.network.model.weight], config.optimizer),
            Objective.from_config(options),
            descent,
            loss=config.loss,
            noise=central_noise(plan, device) if multiplier else None,
            device=device,
        )

    def initialise(self, trainer: ConvexTrainer) -> None:
        """See Algorithm.initialise."""
        if self.options.gates == "device":
            trainer.recover_hyperplanes(self.options.gate_readings)

    def require_covered(self) -> None:
        """See Algorithm.require_covered; also momentum, other optimizers and rates that no theorem covers."""
        super().require_covered()
        require_plain_descent(self.plan.config)
        if self.plan.config.protection.last_iterate:
            require_last_iterate_scheme(self.plan.sampler.scheme)
            require_contraction(self.plan.config, self.options, self.plan.dataset.n_classes)

    @classmethod
    def clip_norm(cls, config: RunConfig, n_classes: int) -> float:
        """See Algorithm.clip_norm; a bound on the residual bounds the gradient."""
        return largest_gradient(config.trainer_as(ConvexConfig), n_classes)

    def mechanism(self, noise_multiplier: float) -> Mechanism:
        """See Algorithm.mechanism."""
        if self.plan.config.protection.last_iterate:
            return last_iterate(self.plan, self.options, noise_multiplier)
        return self.clipped_records(noise_multiplier, divisor=mean_batch(self.plan))
