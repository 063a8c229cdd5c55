"""How zeroth-order training takes part in a run."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from typing import Any

from torch import nn

from accounting.errors import NoGuarantee
from accounting.ledger.ledger import Ledger
from accounting.mechanisms import Mechanism
from accounting.records.mechanisms import Unprotected
from opusim.devices.base import NoisyDevice
from opusim.errors import ConfigError
from opusim.noise import NoiseModel
from opusim.randomness.philox import derive_seed
from opusim.randomness.streams import NoiseStream, noise_stream
from training.config.run import RunConfig
from training.config.seeds import seed_for
from training.data import Dataset
from training.data.samplers import Sampler
from training.engine.algorithm import Arrays, DeviceShape, TrainerFamily
from training.engine.trainer import Trainer
from training.errors import RunFolderError
from training.networks.base import (
    ModuleNetwork,
    Network,
    build_module_network,
    parameters_digest,
    tensor_facts,
)
from training.networks.network import FullyConnected, build_network
from training.networks.record_independence import probe_records, require_independent_records
from training.protections.base import DeviceNormals
from training.protections.planning import divisor_of
from training.runs.checkpoints import write_tensors
from training.runs.folder import RunFolder
from training.zeroth_order.distributed import Ranks, init_process_group
from training.zeroth_order.language import build_language, described_classifier
from training.zeroth_order.planning import clip_of, step_mechanism, with_scalar_noise, zo_options
from training.zeroth_order.step_log import (
    BASE_FILE,
    LOG_FILE,
    LogHeader,
    StepLog,
    read_header,
)
from training.zeroth_order.trainer import GaussianScalars, LaplaceScalars, ScalarRelease, ZoTrainer


class ZoFamily(TrainerFamily[Network]):
    """zo."""

    draws_in_public = True

    def own_parts(self, config: RunConfig) -> tuple[RunConfig, Arrays | None, nn.Module | None]:
        """See TrainerFamily.own_parts: the language model and the texts of trainer.language."""
        if zo_options(config).language.model is None:
            return config, None, None
        return build_language(config)

    def network(self, config: RunConfig, dataset: Dataset, model: nn.Module | None) -> Network:
        """See TrainerFamily.network; any module that gives class scores will do.

        Raises:
            ValueError: Records are protected and the module mixes them.
        """
        if model is None:
            return build_network(config, dataset, None)
        network: Network
        try:
            network = build_network(config, dataset, model)
        except (TypeError, ValueError):  # not fully connected, or in part frozen
            network = build_module_network(model, dataset)
        if config.protection.kind == "record":
            place = next(iter(network.tensors.values())).device
            require_independent_records(network.model.eval(), probe_records(dataset, place))
        return network

    def rebuilt(self, facts: dict[str, Any], model: nn.Module | None) -> Network:
        """See TrainerFamily.rebuilt."""
        if "layers" in facts:
            return FullyConnected.from_facts(facts)
        if model is None and "language" in facts:
            model = described_classifier(facts["language"])
        if model is None:
            raise RunFolderError(
                f"the run trained a user-supplied {facts['module']}, which its folder cannot describe; give one "
                "like it: training.load_run(path, model=...)"
            )
        return ModuleNetwork(model, facts["n_inputs"])

    def device_shape(self, config: RunConfig, network: Network) -> DeviceShape:
        """One number for each direction comes out; nothing goes in."""
        return DeviceShape(n_inputs=1, n_outputs=zo_options(config).directions)

    def trainer(
        self, config: RunConfig, network: Network, dataset: Dataset, device: NoisyDevice | None
    ) -> ZoTrainer:
        """See TrainerFamily.trainer; processes that torchrun launched together share the batches."""
        init_process_group()
        ranks = Ranks()
        root = derive_seed(config.seed, "directions")
        if config.mode == "release":  # public, but nobody's choice
            root = int(ranks.broadcast([float(secrets.randbits(53))])[0])
        return ZoTrainer(
            network,
            zo_options(config),
            config.optimizer,
            _release(config, device),
            loss=config.loss,
            root=root,
            ranks=ranks,
            device=device,
            private=config.mode == "release",
        )

    def step_mechanisms(
        self, config: RunConfig, network: Network, sampler: Sampler, noise: NoiseModel | None
    ) -> tuple[Mechanism, ...]:
        """See TrainerFamily.step_mechanisms."""
        if config.protection.kind == "none":
            return (Unprotected(what="zo without protection"),)
        return (
            step_mechanism(config, sampler, noise_multiplier=config.protection.noise_multiplier or math.nan),
        )

    def require_covered(self, config: RunConfig, dataset: Dataset, sampler: Sampler) -> None:
        """See TrainerFamily.require_covered."""
        super().require_covered(config, dataset, sampler)
        options = zo_options(config)
        if config.optimizer.averaged_tail:
            raise ConfigError(
                "configuration",
                "optimizer.averaged_tail",
                f"{config.optimizer.averaged_tail} needs a second copy of the parameters, and the step log leads to "
                "the last ones; leave it out for zo",
            )
        for key, value, given in (
            ("name", config.optimizer.name, config.optimizer.name != "sgd"),
            ("momentum", config.optimizer.momentum, config.optimizer.momentum > 0),
        ):
            if given:
                raise ConfigError(
                    "configuration",
                    f"optimizer.{key}",
                    f"{value!r} is not for trainer.kind = 'zo', whose update has neither momentum nor moments; "
                    "leave it out",
                )
        if config.protection.kind == "none":
            return
        if options.law == "laplace" and config.protection.noise == "device":
            raise ConfigError(
                "configuration",
                "trainer.law",
                "'laplace' cannot come from a device, whose credited noise is Gaussian; use law = 'gaussian', or "
                "protection.noise = 'digital'",
            )
        if options.law == "gaussian" and config.protection.delta == 0:
            raise NoGuarantee(
                "protection.delta = 0: Gaussian noise has no pure guarantee; use trainer.law = 'laplace', or a delta"
            )

    def with_noise(self, config: RunConfig, network: Network, sampler: Sampler) -> RunConfig:
        """See TrainerFamily.with_noise."""
        return with_scalar_noise(config, sampler)

    def begin(self, config: RunConfig, trainer: Trainer) -> None:
        """See TrainerFamily.begin."""
        if isinstance(trainer, ZoTrainer):
            trainer.ranks.broadcast_tensors(trainer.tensors.values())
            trainer.perturbation.reset_copies()

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
        """Nothing is paid for here; the step log is opened, and the first parameters are kept beside it."""
        if isinstance(trainer, ZoTrainer):
            _open_log(config, trainer, folder)

    def record_protected(self, config: RunConfig, noise_multiplier: float) -> RunConfig:
        """See TrainerFamily.record_protected; the guarantee of several directions is that of one."""
        options = zo_options(config)
        grown = options.directions if options.law == "laplace" else math.sqrt(options.directions)
        control = super().record_protected(config, noise_multiplier * grown)
        clip = {"clip_norm": clip_of(config)}
        return control.model_copy(update={"protection": control.protection.model_copy(update=clip)})


def _release(config: RunConfig, device: NoisyDevice | None) -> ScalarRelease:
    """Clip, batch size and noise of a run.

    Raises:
        ConfigError: The device's noise cannot be credited.
    """
    multiplier = config.protection.noise_multiplier
    if config.protection.kind == "none" or multiplier is None:
        return ScalarRelease(clip=None, divisor=divisor_of(config))
    clip = clip_of(config)
    stream: NoiseStream = noise_stream(config.mode, seed_for(config, "scalar-noise"), "scalar-noise")
    if device is not None:
        stream = DeviceNormals(device)
    law = LaplaceScalars if zo_options(config).law == "laplace" else GaussianScalars
    return ScalarRelease(clip=clip, divisor=divisor_of(config), scale=multiplier * clip, noise=law(stream))


def _open_log(config: RunConfig, trainer: ZoTrainer, folder: RunFolder) -> None:
    """Begin the step log of a new run, or continue that of a resumed one.

    Raises:
        StepLogCorrupt: The log is not that of the steps done.
    """
    trainer.ranks.require_equal(trainer.steps, "steps done")
    path, options = folder.path / LOG_FILE, zo_options(config)
    tensors = trainer.tensors
    header = LogHeader(
        root=trainer.root,
        perturbation=options.perturbation,
        directions=options.directions,
        weight_decay=config.optimizer.weight_decay,
        settle_every=options.settle_every,
        tensors=tensor_facts(tensors),
        base=parameters_digest(tensors),
    )
    if trainer.steps:
        kept, _ = read_header(path)
        header = replace(header, base=kept.base, root=kept.root if config.mode == "release" else header.root)
        trainer.root = header.root
    elif options.keep_base:
        write_tensors(folder.path / BASE_FILE, tensors)
    trainer.log = StepLog(path, header, steps=trainer.steps)
    trainer.log.mark(tensors)
