"""Zeroth-order training as the algorithm of a run."""

from __future__ import annotations

import math
import secrets
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from opusim.accounting.guarantee import Adjacency, NoGuarantee
from opusim.accounting.mechanisms.zeroth_order import ZoGaussian, ZoLaplace
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.errors import ConfigError
from opusim.processes.ranks import Ranks
from opusim.randomness.streams import NoiseStream, derive_seed, noise_stream
from opusim.training.config.run import RunConfig
from opusim.training.data import Dataset
from opusim.training.engine.algorithm import Algorithm, Arrays, DeviceShape
from opusim.training.errors import RunFolderError
from opusim.training.networks.any_module import AnyModule
from opusim.training.networks.base import (
    DescribedModule,
    Network,
    parameters_digest,
    require_class_scores,
    tensor_facts,
)
from opusim.training.networks.network import FullyConnected, build_network
from opusim.training.networks.record_gradients.probe import require_separate_outputs
from opusim.training.networks.record_independence import invented_records
from opusim.training.protections.base import DeviceNormals, SoftLabels
from opusim.training.runs.checkpoints import write_tensors
from opusim.training.runs.folder import RunFolder
from opusim.training.zeroth_order.config import ZoConfig
from opusim.training.zeroth_order.language import build_language, described_classifier
from opusim.training.zeroth_order.step_log import (
    BASE_FILE,
    LOG_FILE,
    LogHeader,
    StepLog,
    read_header,
)
from opusim.training.zeroth_order.trainer import ScalarRelease, ZoTrainer

CLIP = 0.05
"""C if the configuration gives none: the DP-ZO paper's, found best of four in its Table 15."""


class ZoAlgorithm(Algorithm[ZoConfig, Network, ZoTrainer]):
    """zo."""

    applies = frozenset({"own noise"})
    uses_public_randomness = True
    processes = "replicas"

    @classmethod
    def default_inputs(cls, config: RunConfig) -> tuple[RunConfig, Arrays | None, nn.Module | None]:
        """See Algorithm.default_inputs: the language model and the texts of trainer.language."""
        if config.trainer_as(ZoConfig).language.model is None:
            return config, None, None
        return build_language(config)

    @classmethod
    def build_network(cls, config: RunConfig, dataset: Dataset, model: nn.Module | None) -> Network:
        """See Algorithm.build_network; any module that gives class scores will do.

        Raises:
            ValueError: Records are protected and the module mixes them.
        """
        if model is None:
            return build_network(config, dataset, None)
        network: Network
        protected = config.protection.protects == "records"
        records = _invented(model, dataset) if protected else dataset.train.batch(slice(2))[0]
        try:
            network = build_network(config, dataset, model)
        except (TypeError, ValueError):  # not fully connected, or in part frozen
            network = viewed = AnyModule(model, n_inputs=dataset.n_features)
            require_class_scores(model, records.to(viewed.parameters[0].device), dataset.n_classes)
        if protected:
            place = next(iter(network.tensors.values())).device
            with model.whole_records() if isinstance(model, DescribedModule) else nullcontext():
                require_separate_outputs(network.model.eval(), records.to(place))
        return network

    @classmethod
    def rebuild_network(cls, facts: dict[str, Any], model: nn.Module | None) -> Network:
        """See Algorithm.rebuild_network."""
        if "layers" in facts:
            return FullyConnected.from_facts(facts)
        if model is None and "language" in facts:
            model = described_classifier(facts["language"])
        return AnyModule.from_facts(facts, model)

    @property
    def device_shape(self) -> DeviceShape:
        """One number for each direction comes out; nothing goes in."""
        return DeviceShape(n_inputs=1, n_outputs=self.options.directions)

    def work_of_step(self, records: float, n_outputs: int, *, observed: bool) -> DeviceWork:
        """See Algorithm.work_of_step; one number of noise for each direction."""
        return self.protection.noise_work([self.options.directions], n_outputs)

    def trainer(self, device: NoisyDevice | None, labels: SoftLabels | None = None) -> ZoTrainer:
        """See Algorithm.trainer; processes that torchrun launched together share the batches."""
        config, ranks = self.config, Ranks()
        root = derive_seed(config.seed, "directions")
        if config.mode == "release":  # public, but chosen by no one
            root = int(ranks.broadcast([float(secrets.randbits(53))])[0])
        return ZoTrainer(
            self.network,
            self.options,
            config.optimizer,
            self._release(device),
            loss=config.loss,
            root=root,
            ranks=ranks,
            device=device,
            private=config.mode == "release",
        )

    def initialise(self, trainer: ZoTrainer) -> None:
        """See Algorithm.initialise."""
        trainer.ranks.broadcast_tensors(trainer.tensors.values())
        trainer.perturbation.reset_copies()

    def prepare(self, trainer: ZoTrainer, folder: RunFolder) -> None:
        """Start the step log of a new run with the initial parameters, or continue that of a resumed one.

        Raises:
            StepLogCorrupt: The log is not that of the steps done.
        """
        _require_same_steps(trainer)
        path, options, tensors = folder.path / LOG_FILE, self.options, trainer.tensors
        header = LogHeader(
            root=trainer.root,
            perturbation=options.perturbation,
            directions=options.directions,
            weight_decay=self.config.optimizer.weight_decay,
            settle_every=options.settle_every,
            tensors=tensor_facts(tensors),
            base=parameters_digest(tensors),
        )
        if trainer.steps:
            kept, _ = read_header(path)
            released = self.config.mode == "release"
            header = replace(header, base=kept.base, root=kept.root if released else header.root)
        elif options.keep_base:
            write_tensors(folder.path / BASE_FILE, tensors)
        trainer.keep_log(StepLog(path, header, steps=trainer.steps), root=header.root)

    def require_covered(self) -> None:
        """See Algorithm.require_covered; also keys without a meaning for zo, and noise that is not its law's."""
        super().require_covered()
        config = self.config
        tail = config.optimizer.averaged_tail
        if tail:
            reason = f"{tail} needs a second copy of the parameters, and the step log leads to the last ones"
            raise ConfigError("configuration", "optimizer.averaged_tail", f"{reason}; leave it out for zo")
        for key, plain in (("name", "sgd"), ("momentum", 0.0)):
            value = getattr(config.optimizer, key)
            if value != plain:
                reason = (
                    f"{value!r} is not for trainer.kind = 'zo', whose update has neither momentum nor moments"
                )
                raise ConfigError("configuration", f"optimizer.{key}", f"{reason}; leave it out")
        if config.protection.protects == "nothing":
            return
        if self.options.law == "laplace" and config.protection.noise == "device":
            raise ConfigError(
                "configuration",
                "trainer.law",
                "'laplace' cannot come from a device, whose credited noise is Gaussian; use law = 'gaussian', or "
                "protection.noise = 'digital'",
            )
        if self.options.law == "gaussian" and config.protection.delta == 0:
            raise NoGuarantee(
                "protection.delta = 0: Gaussian noise has no pure guarantee; use trainer.law = 'laplace', or a delta"
            )

    @classmethod
    def clip_norm(cls, config: RunConfig, n_classes: int) -> float:
        """See Algorithm.clip_norm; that of a loss difference."""
        return config.protection.clip_norm or CLIP

    @property
    def noise_guess(self) -> float:
        """See Algorithm.noise_guess."""
        epsilon = self.config.protection.epsilon or math.inf
        steps, probability = self.plan.total_steps, self.plan.sampler.sampling_probability or 1.0
        return max(math.sqrt(steps) * probability / epsilon, 0.1)

    def mechanism(self, noise_multiplier: float) -> ZoGaussian | ZoLaplace:
        """Return one step: all its directions, on one Poisson batch.

        Args:
            noise_multiplier: z, or the Laplace scale b, over C.

        Raises:
            NoGuarantee: The sampler has no sampling probability.
        """
        config = self.config
        parameters: dict[str, Any] = {
            "sampling_probability": self.plan.sampling_probability,
            "clip_norm": config.protection.clip_norm or CLIP,
            "divisor": config.divisor,
            "directions": self.options.directions,
            "relation": config.relation or Adjacency.ZERO_OUT,
        }
        if self.options.law == "laplace":
            return ZoLaplace(scale=noise_multiplier, **parameters)
        parameters |= {"joint_clip": self._joint, "device_noise": config.protection.noise == "device"}
        parameters |= self.plan.credit
        return ZoGaussian(noise_multiplier=noise_multiplier, **parameters)

    def equivalent_noise(self, noise_multiplier: float) -> float:
        """See Algorithm.equivalent_noise; n directions cost as much as one with less noise, unless clipped jointly."""
        directions = 1 if self._joint else self.options.directions
        return noise_multiplier * (directions if self.options.law == "laplace" else math.sqrt(directions))

    @property
    def _joint(self) -> bool:
        """Whether a record's differences along all directions are clipped jointly."""
        return self.options.clip == "joint" and self.options.directions > 1

    def _release(self, device: NoisyDevice | None) -> ScalarRelease:
        """Return clip, batch size and noise of the run.

        Raises:
            ConfigError: The device's noise cannot be credited.
        """
        config = self.config
        if config.protection.protects == "nothing":
            return ScalarRelease(clip=None, divisor=config.divisor)
        clip = self.clip_norm(config, self.dataset.n_classes)
        stream: NoiseStream = noise_stream(config.mode, config.seed_for("scalar-noise"), "scalar-noise")
        if device is not None:
            stream = DeviceNormals(device, credit=self.plan.credit)
        return ScalarRelease(
            clip=clip,
            divisor=config.divisor,
            scale=self.protection.noise_multiplier * clip,
            noise=stream,
            law=self.options.law,
            joint=self._joint,
        )


def _invented(model: nn.Module, dataset: Dataset) -> Tensor:
    """Return invented records that a user-supplied module takes, shape (n, n_features)."""
    if isinstance(model, DescribedModule):
        return model.invented_records(dataset.n_features)
    return invented_records(dataset, torch.device("cpu"))[0]


def _require_same_steps(trainer: ZoTrainer) -> None:
    """Refuse processes that resume from different steps.

    Raises:
        RunFolderError: They do.
    """
    ranks = trainer.ranks
    if len({found for (found,) in ranks.rows([trainer.steps])}) > 1:
        raise RunFolderError(
            f"steps done = {trainer.steps} here, but another of the {ranks.world} processes has a different number; "
            "resume from folders of one run, and delete newer checkpoints that not all of them have"
        )
