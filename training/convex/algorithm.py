"""How the convex trainer takes part in a run."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from accounting.ledger.ledger import Ledger
from accounting.mechanisms import Mechanism
from accounting.records.mechanisms import Unprotected
from opusim.devices.base import NoisyDevice
from opusim.noise import NoiseModel
from opusim.randomness.streams import NoiseStream, noise_stream
from training.config.run import RunConfig
from training.config.seeds import generator_for, seed_for
from training.convex.gated import GatedNetwork, GatedRelu, seeded_hyperplanes
from training.convex.planning import (
    LAST_ITERATE,
    convex_options,
    divisor,
    final_noise,
    largest_gradient,
    released,
    require_contraction,
    require_last_iterate_scheme,
    require_plain_descent,
    with_calibrated_noise,
)
from training.convex.trainer import ConvexTrainer, Descent, Objective
from training.data import Dataset
from training.data.samplers import Sampler
from training.engine.algorithm import DeviceShape, TrainerFamily
from training.engine.assembly import configured_sampler
from training.engine.optimizers import make_optimizer
from training.engine.trainer import Trainer
from training.protections.base import DeviceNormals, noise_std
from training.protections.planning import total_steps
from training.runs.folder import RunFolder


class ConvexFamily(TrainerFamily[GatedNetwork]):
    """convex."""

    protections = ("none", "record", "last-iterate")

    def network(self, config: RunConfig, dataset: Dataset, model: nn.Module | None) -> GatedNetwork:
        """See TrainerFamily.network; hyperplanes from a device are read by `begin`, or come with a checkpoint."""
        options = convex_options(config)
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

    def rebuilt(self, facts: dict[str, Any], model: nn.Module | None) -> GatedNetwork:
        """See TrainerFamily.rebuilt."""
        return GatedNetwork.from_facts(facts)

    def device_shape(self, config: RunConfig, network: GatedNetwork) -> DeviceShape:
        """A record's features go in, its hyperplanes' projections come out."""
        return DeviceShape(n_inputs=network.n_inputs, n_outputs=len(network.model.hyperplanes))

    def trainer(
        self, config: RunConfig, network: GatedNetwork, dataset: Dataset, device: NoisyDevice | None
    ) -> ConvexTrainer:
        """See TrainerFamily.trainer."""
        options, sampler = convex_options(config), configured_sampler(config, dataset)
        bound, b = largest_gradient(config, dataset.n_classes), divisor(config, sampler)
        multiplier = config.protection.noise_multiplier or 0.0
        descent = Descent(
            regularisation=options.regularisation,
            divisor=b,
            noise_std=noise_std(clip_norm=bound, noise_multiplier=multiplier, divisor=b),
            final_std=final_noise(config, sampler) * config.optimizer.lr * multiplier * bound / b,
            total_steps=total_steps(config, sampler),
        )
        return ConvexTrainer(
            network,
            make_optimizer([network.model.weight], config.optimizer),
            Objective.from_config(options),
            descent,
            loss=config.loss,
            noise=self._noise(config, device) if multiplier else None,
            device=device,
        )

    def step_mechanisms(
        self, config: RunConfig, network: GatedNetwork, sampler: Sampler, noise: NoiseModel | None
    ) -> tuple[Mechanism, ...]:
        """See TrainerFamily.step_mechanisms; the last iterate is paid for at the start."""
        protection = config.protection
        if protection.kind == "last-iterate":
            return ()
        if protection.kind == "record":
            z = protection.noise_multiplier or math.nan
            return (released(config, network, sampler, noise_multiplier=z, steps=1),)
        return (Unprotected(what="convex without protection"),)

    def require_covered(self, config: RunConfig, dataset: Dataset, sampler: Sampler) -> None:
        """See TrainerFamily.require_covered; also momentum, other optimizers and rates that no theorem covers."""
        super().require_covered(config, dataset, sampler)
        require_plain_descent(config)
        if config.protection.kind == "last-iterate":
            require_last_iterate_scheme(sampler.scheme)
            require_contraction(config, dataset.n_classes)

    def with_noise(self, config: RunConfig, network: GatedNetwork, sampler: Sampler) -> RunConfig:
        """See TrainerFamily.with_noise; a release run of the last iterate keeps one checkpoint alone."""
        config = with_calibrated_noise(config, network, sampler)
        if config.protection.kind == "last-iterate" and config.mode == "release":
            newest_alone = config.checkpoint.model_copy(update={"keep": 1})
            config = config.model_copy(update={"checkpoint": newest_alone})
        return config

    def begin(self, config: RunConfig, trainer: Trainer) -> None:
        """See TrainerFamily.begin."""
        options = convex_options(config)
        if options.gates == "device" and isinstance(trainer, ConvexTrainer):
            trainer.recover_hyperplanes(options.gate_readings)

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
        """Pay for the last iterate, once: a run that was killed and goes on releases one all the same."""
        if config.protection.kind != "last-iterate":
            return
        if all(payment.name != LAST_ITERATE for payment in ledger.content.payments):
            sampler, z = configured_sampler(config, dataset), config.protection.noise_multiplier or math.nan
            network = GatedNetwork(trainer.model)  # type: ignore[arg-type]  # this family's own trainer
            ledger.pay_once(LAST_ITERATE, released(config, network, sampler, noise_multiplier=z, steps=steps))

    def _noise(self, config: RunConfig, device: NoisyDevice | None) -> NoiseStream:
        if config.protection.noise == "device" and device is not None:
            return DeviceNormals(device)
        return noise_stream(config.mode, seed_for(config, "central-noise"), "central-noise")
