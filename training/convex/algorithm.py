"""The convex trainer as the algorithm of a run.

`ConvexAlgorithm.require_covered` refuses runs that the theorem of the last iterate does not cover.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import nn

from opusim.accounting.guarantee import NoGuarantee
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.convex import ConvexLastIterate, log_expansion, residual_bound
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.errors import ConfigError
from opusim.processes import require_memory
from opusim.training.config.run import RunConfig
from opusim.training.config.sections import ModelConfig
from opusim.training.convex.config import ConvexConfig
from opusim.training.convex.gated import hyperplanes_work, seeded_hyperplanes
from opusim.training.convex.trainer import ConvexTrainer, Descent, GatedNetwork, GatedRelu, Objective
from opusim.training.data import Dataset
from opusim.training.engine.algorithm import Algorithm, DeviceShape
from opusim.training.networks.base import BYTES_PER_PARAMETER, seeded_generator
from opusim.training.networks.optimizers import make_optimizer
from opusim.training.protections.base import SoftLabels, noise_std

LAST_ITERATE_SCHEMES = ("disjoint-cyclic", "full-batch")


def largest_gradient(options: ConvexConfig, n_classes: int) -> float:
    """Return C, the largest norm of a record's gradient."""
    return residual_bound(options.objective, options.residual_clip, n_classes)


def require_plain_descent(config: RunConfig) -> None:
    """Refuse what no theorem about this descent covers, and keys that would do nothing.

    Raises:
        ConfigError: Momentum, weight decay, another optimizer, a clip in the wrong section, an average of weights.
    """
    optimizer, protection = config.optimizer, config.protection
    wrong: dict[str, tuple[object, bool, str]] = {
        "model": (
            "this section",
            config.model != ModelConfig(),
            "its network has no such layers, set trainer.hyperplanes",
        ),
        "optimizer.name": (optimizer.name, optimizer.name != "sgd", "use 'sgd'"),
        "optimizer.momentum": (optimizer.momentum, optimizer.momentum > 0, "set it to 0"),
        "optimizer.weight_decay": (
            optimizer.weight_decay,
            optimizer.weight_decay > 0,
            "use trainer.regularisation",
        ),
        "protection.clip_norm": (protection.clip_norm, protection.clip_norm is not None, "use trainer.clip"),
        "optimizer.averaged_tail": (
            optimizer.averaged_tail,
            optimizer.averaged_tail > 0 and protection.last_iterate,
            "a mean of iterates is not the last iterate; set it to 0",
        ),
        "protection.divisor": (
            protection.divisor,
            protection.divisor is not None and protection.last_iterate,
            "the theorem divides by the batch size; leave it out",
        ),
    }
    for key, (value, is_wrong, remedy) in wrong.items():
        if is_wrong:
            raise ConfigError("configuration", key, f"{value!r} is not for trainer.kind = 'convex': {remedy}")


class ConvexAlgorithm(Algorithm[ConvexConfig, GatedNetwork, ConvexTrainer]):
    """convex."""

    applies = frozenset({"own noise"})
    rounds_own_noise = True

    @classmethod
    def build_network(cls, config: RunConfig, dataset: Dataset, model: nn.Module | None) -> GatedNetwork:
        """See Algorithm.build_network; `initialise` reads a device's hyperplanes, and a checkpoint holds them."""
        options = config.trainer_as(ConvexConfig)
        if model is None:
            require_memory(
                BYTES_PER_PARAMETER * options.hyperplanes * dataset.n_features * dataset.n_classes,
                why="weights and gradients",
                remedy="lower trainer.hyperplanes",
                trainer__hyperplanes=options.hyperplanes,
                features=dataset.n_features,
                classes=dataset.n_classes,
            )
            generator = seeded_generator(config.seed_for("hyperplanes"))
            hyperplanes = seeded_hyperplanes(options.hyperplanes, dataset.n_features, generator)
            return GatedNetwork(
                GatedRelu(dataset.n_features, dataset.n_classes, hyperplanes, centre=options.centre)
            )
        if not isinstance(model, GatedRelu):
            raise TypeError(
                f"model must be a opusim.training.convex.gated.GatedRelu, got {type(model).__name__}; leave it out"
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

    def work_before(self) -> DeviceWork:
        """See Algorithm.work_before; the hyperplanes are read."""
        own = super().work_before()
        if self.options.gates != "device":
            return own
        return own + hyperplanes_work(self.network.n_inputs, readings=self.options.gate_readings)

    def work_of_step(self, records: float, n_outputs: int, *, observed: bool) -> DeviceWork:
        """See Algorithm.work_of_step; the update's noise, of every weight."""
        return self.protection.noise_work([self.network.model.weight.numel()], n_outputs)

    def trainer(self, device: NoisyDevice | None, labels: SoftLabels | None = None) -> ConvexTrainer:
        """See Algorithm.trainer."""
        config, options = self.config, self.options
        bound, b = largest_gradient(options, self.dataset.n_classes), self._divisor
        multiplier = 0.0 if config.protection.protects == "nothing" else self.protection.noise_multiplier
        descent = Descent(
            regularisation=options.regularisation,
            divisor=b,
            noise_std=noise_std(clip_norm=bound, noise_multiplier=multiplier, divisor=b),
            final_std=self._final_noise * config.optimizer.lr * multiplier * bound / b,
            total_steps=self.plan.total_steps,
        )
        return ConvexTrainer(
            self.network,
            make_optimizer([self.network.model.weight], config.optimizer),
            Objective.from_config(options),
            descent,
            loss=config.loss,
            noise=self.protection.central_noise(device) if multiplier else None,
            device=device,
        )

    def initialise(self, trainer: ConvexTrainer) -> None:
        """See Algorithm.initialise."""
        if self.options.gates == "device":
            trainer.recover_hyperplanes(self.options.gate_readings)

    def require_covered(self) -> None:
        """See Algorithm.require_covered; also momentum, other optimizers and rates that no theorem covers."""
        super().require_covered()
        require_plain_descent(self.config)
        if not self.config.protection.last_iterate:
            return
        scheme, options = self.plan.sampler.scheme, self.options
        if scheme not in LAST_ITERATE_SCHEMES:
            raise NoGuarantee(
                f"sampler.scheme = {scheme!r}: the last iterate's theorem needs fixed disjoint batches in a fixed "
                f"order; use {' or '.join(repr(name) for name in LAST_ITERATE_SCHEMES)}, or protection.kind = 'record' "
                "with 'poisson'"
            )
        # raises NoGuarantee if eta >= 2 / (beta + lambda), or beyond the limit of clipped softmax
        rate = np.array([self.config.optimizer.lr])
        log_expansion(
            options.objective, options.residual_clip, self.dataset.n_classes, rate, options.regularisation
        )

    @classmethod
    def clip_norm(cls, config: RunConfig, n_classes: int) -> float:
        """See Algorithm.clip_norm; a bound on the residual bounds the gradient."""
        return largest_gradient(config.trainer_as(ConvexConfig), n_classes)

    def mechanism(self, noise_multiplier: float) -> Mechanism:
        """See Algorithm.mechanism."""
        if self.config.protection.last_iterate:
            return self.last_iterate(noise_multiplier)
        return self.clipped_records(noise_multiplier, divisor=self._divisor)

    def last_iterate(self, noise_multiplier: float) -> ConvexLastIterate:
        """Return the release of only the last iterate.

        Args:
            noise_multiplier: z, the noise's standard deviation over C.
        """
        config, options = self.config, self.options
        return ConvexLastIterate(
            objective=options.objective,
            clip=options.residual_clip,
            n_classes=self.dataset.n_classes,
            learning_rate=config.optimizer.lr,
            schedule=config.optimizer.schedule,
            regularisation=options.regularisation,
            batches=self.plan.sampler.steps_per_epoch,
            epochs=config.epochs,
            noise_multiplier=noise_multiplier,
            final_noise=self._final_noise,
            hyperplanes=options.hyperplanes,
            device_noise=config.protection.noise == "device",
            **self.plan.credit,
        )

    @property
    def _final_noise(self) -> float:
        """The last step's extra noise, in units of a step's noise at the first learning rate."""
        if self.options.final_noise is not None:
            return self.options.final_noise
        return (
            math.sqrt(self.plan.sampler.steps_per_epoch - 1) if self.config.protection.last_iterate else 0.0
        )

    @property
    def _divisor(self) -> float:
        """b, the divisor of a batch's sum: a constant that the data do not change."""
        sampler, config = self.plan.sampler, self.config
        full = sampler.scheme == "full-batch"
        return config.protection.divisor or (float(sampler.n_records) if full else config.divisor)
