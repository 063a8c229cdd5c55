"""Train any module by zeroth-order steps in place: Algorithm 1 of the DP-ZO paper.

One step: for each of n directions, a forward pass on each side; each record's loss difference is clipped to C, and
rounded toward zero so that its sum is exact; then s_j = r_j / (2 phi B) with r_j the exactly rounded sum_i clip(l_i^+ -
l_i^-) + noise_j and the stated batch size B, and one move along each direction.
There are neither gradients nor a second copy of the parameters. The scalars s_j are all that a step releases of the
data; their noise comes from a stream that is independent of the directions.
"""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from opusim.accounting.guarantee import Adjacency, NoGuarantee
from opusim.accounting.mechanisms.zeroth_order import ZoGaussian, ZoLaplace
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.errors import ConfigError
from opusim.processes.ranks import Ranks
from opusim.randomness.rounded import Law, RoundedNoise, toward_zero
from opusim.randomness.streams import NoiseStream, derive_seed, noise_stream
from opusim.training.config.run import RunConfig
from opusim.training.data import Dataset
from opusim.training.engine.algorithm import Algorithm, Arrays, DeviceShape, StepRecord, Trainer
from opusim.training.errors import RunFolderError
from opusim.training.networks.any_module import AnyModule, shape_taken
from opusim.training.networks.base import (
    DescribedModule,
    Network,
    parameters_digest,
    tensor_facts,
)
from opusim.training.networks.functions import LOSS_VALUES
from opusim.training.networks.network import FullyConnected, build_network
from opusim.training.networks.record_gradients.probe import require_separate_outputs
from opusim.training.networks.record_independence import invented_records, preserved_state
from opusim.training.protections.base import DeviceNormals, SoftLabels
from opusim.training.runs.checkpoints import write_tensors
from opusim.training.runs.folder import RunFolder
from opusim.training.zeroth_order.at_once import TwoSides
from opusim.training.zeroth_order.config import ZoConfig
from opusim.training.zeroth_order.language import build_language, described_classifier
from opusim.training.zeroth_order.perturbation import InPlacePerturbation, StepEntry, UnreadEntry
from opusim.training.zeroth_order.step_log import BASE_FILE, LOG_FILE, LogHeader, StepLog, read_header

LARGEST_DIFFERENCE = 1e100
"""Bound on a difference before a joint clip, beyond float32: it replaces a loss that is not finite, and 1,024 of its
squares have a finite sum in float64."""
CLIP = 0.05
"""C if the configuration gives none: the DP-ZO paper's, found best of four in its Table 15."""
_MOST_RECORDS = 2**22
"""Records of a batch up to which sums of clipped differences are exact."""
_MOST_UNREAD = 64
"""Steps whose scalars may stay on a card before they are read for the log."""
_BELOW = 1 - 2.0**-40
"""Factor on the bound of a joint clip; its margin exceeds float64's error in a norm and a scaling of 1,024 numbers."""


@dataclass(frozen=True, kw_only=True)
class Differences:
    """A batch's loss differences along one direction.

    Attributes:
        values: l_i^+ - l_i^-, clipped to [-C, C] if there is a C, float64, shape (batch,).
        non_finite: Number of records with a loss that is NaN or infinite on either side, scalar.
        clipped: Number of records whose difference was outside [-C, C], scalar.
    """

    values: Tensor
    non_finite: Tensor
    clipped: Tensor


def loss_differences(plus: Tensor, minus: Tensor, clip: float | None) -> Differences:
    """Return clip(l_i^+ - l_i^-, -C, C) of each record, at theta + phi z and theta - phi z.

    A loss that is NaN or infinite counts as the worst one: the difference is C if it is on the plus side, -C on the
    minus side, and 0 on both. Without a C the difference is then 0. So |value| <= C whatever the model returns.
    """
    bad_plus, bad_minus = ~torch.isfinite(plus), ~torch.isfinite(minus)
    bad = bad_plus | bad_minus
    values = torch.where(bad, 0.0, plus.double() - minus.double())
    outside = torch.zeros((), dtype=torch.int64, device=values.device)
    if clip is not None:
        outside = (values.abs() > clip).sum()
        values = values.clamp(-clip, clip)
        values = values + clip * (bad_plus.double() - bad_minus.double())
    return Differences(values=values, non_finite=bad.sum(), clipped=outside)


def jointly_clipped(found: Sequence[Differences], clip: float) -> list[Differences]:
    """Scale each record's differences, at most `LARGEST_DIFFERENCE`, along all directions to norm at most C > 0."""
    values = torch.stack([differences.values for differences in found])
    norms = torch.linalg.vector_norm(values, dim=0)
    scaled = values * (clip * _BELOW / norms.clamp_min(clip))
    outside = (norms > clip).sum()
    return [replace(each, values=row, clipped=outside) for each, row in zip(found, scaled, strict=True)]


@dataclass(frozen=True, kw_only=True)
class ScalarRelease:
    """Clip, batch size and noise with which a step releases its scalars.

    Attributes:
        clip: C > 0, or None if there is no clip.
        divisor: B > 0, the stated batch size.
        scale: Scale of the noise in units of a loss: z C or b C; 0 for no noise.
        noise: Source of the noise, independent of the directions, or None.
        law: Law of the noise.
        joint: Whether C bounds the norm of a record's differences along all directions, rather than each of them.
    """

    clip: float | None
    divisor: float
    scale: float = 0.0
    noise: NoiseStream | None = None
    law: Law = "gaussian"
    joint: bool = False

    def sums(
        self, losses: Iterable[tuple[Tensor, Tensor]], *, keep: Tensor | None = None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return sums over records of their clipped loss differences along each of n directions, float64.

        Losses, shapes (batch,), are those on the plus side and on the minus side of each direction; `keep`, bool, marks
        the records that count. With the sums come the numbers of clipped records and of losses that are not finite, n
        tensors each.
        """
        found = [loss_differences(*each, LARGEST_DIFFERENCE if self.joint else self.clip) for each in losses]
        if self.joint and self.clip is not None:
            found = jointly_clipped(found, self.clip)
        values = [each.values if keep is None else torch.where(keep, each.values, 0.0) for each in found]
        if self.clip is not None:  # the bounds hold for the sums as computed
            values = [toward_zero(value, bound=self.clip, count=_MOST_RECORDS) for value in values]
        return (
            [value.sum() for value in values],
            [each.clipped for each in found],
            [each.non_finite for each in found],
        )

    def drawn(self, directions: int, step: int) -> RoundedNoise | None:
        """Return the noise of a step's sums, or None if there is none."""
        if self.noise is None or not self.scale:
            return None
        self.noise.seek(step)
        return self.noise.rounded(directions, self.scale, self.law)


class ZoTrainer(Algorithm[ZoConfig, Network, "ZoTrainer"], Trainer):
    """Trains a network's tensors by forward passes.

    Guarantees for every batch, whatever it holds:
        - a record's loss difference adds at most C to each scalar's sum, as computed, and with a joint clip a vector of
          norm at most C to a step's sums, for batches of up to 2^22 records. The loss differences of the others stay as
          they are only if the machine computes them alike in batches of other sizes, which is taken on trust;
        - a loss that is not finite changes the sum by at most C and does not stop the step;
        - an empty batch takes the same noisy step.

    Attributes:
        release: Clip, batch size and noise.
        root: Seed from which the directions' seeds derive, in [0, 2^64); public.
        ranks: The processes that share the batches.
        perturbation: Moves the parameters.
        sides: Evaluates the records on both sides of the directions.
        log: Records the steps; set before the first step of a run, or None for no log.
    """

    applies = frozenset({"own noise"})
    uses_public_randomness = True
    processes = "replicas"
    release: ScalarRelease
    root: int
    ranks: Ranks
    perturbation: InPlacePerturbation
    sides: TwoSides
    log: StepLog | None = None

    @classmethod
    def default_inputs(cls, config: RunConfig) -> tuple[RunConfig, Arrays | None, nn.Module | None]:
        """See Algorithm.default_inputs: the language model and the texts of trainer.language."""
        if config.trainer_as(ZoConfig).language.model is None:
            return config, None, None
        return build_language(config)

    @classmethod
    def build_network(cls, config: RunConfig, dataset: Dataset, model: nn.Module | None) -> Network:
        """See Algorithm.build_network; any module that gives class scores, and mixes no protected records, will do."""
        if model is None:
            return build_network(config, dataset, None)
        network: Network
        protected = config.protection.protects == "records"
        records = dataset.train.batch(slice(2))[0]
        if protected and isinstance(model, DescribedModule):
            records = model.invented_records(dataset.n_features)
        elif protected:
            records = invented_records(dataset, torch.device("cpu"))[0]
        try:
            network = build_network(config, dataset, model)
        except (TypeError, ValueError):  # not fully connected, or in part frozen
            network = AnyModule(model, n_inputs=dataset.n_features, only_trained=True)
            shown, shapes = (
                records.to(network.parameters[0].device),
                [(dataset.n_features,), dataset.record_shape],
            )
            network.record_shape = shape_taken(model, dataset, shown[:2], shapes)
        if protected:
            place = next(iter(network.tensors.values())).device
            with model.whole_records() if isinstance(model, DescribedModule) else nullcontext():
                require_separate_outputs(network.model.eval(), network.shaped(records.to(place)))
        return network

    @classmethod
    @override
    def rebuild_network(cls, facts: dict[str, Any], model: nn.Module | None) -> Network:
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

    @override
    def open(self, device: NoisyDevice | None, labels: SoftLabels | None) -> None:
        config, ranks = self.config, Ranks()
        release = ScalarRelease(clip=None, divisor=config.divisor)
        if config.protection.protects != "nothing":
            clip = self.own_clip
            noise: NoiseStream = noise_stream(config.mode, config.seed_for("scalar-noise"), "scalar-noise")
            if device is not None:
                noise = DeviceNormals(device, credit=self.plan.credit)
            release = ScalarRelease(
                clip=clip,
                divisor=config.divisor,
                scale=self.protection.noise_multiplier * clip,
                noise=noise,
                law=self.options.law,
                joint=self._joint,
            )
        root = derive_seed(config.seed, "directions")
        if config.mode == "release":  # public, but chosen by no one
            root = int(ranks.broadcast([float(secrets.randbits(53))])[0])
        self.start(release, root=root, ranks=ranks, device=device)

    def start(
        self, release: ScalarRelease, *, root: int, ranks: Ranks, device: NoisyDevice | None = None
    ) -> None:
        """Prepare for steps; arguments as the attributes.

        The model is put into evaluation mode (no dropout), so that both sides use one function.
        """
        self.release, self.root, self.ranks, self.device = release, root, ranks, device
        self.network.model.eval()
        self._tensors, optimizer = self.network.tensors, self.config.optimizer
        self.perturbation = InPlacePerturbation(
            list(self._tensors.values()),
            perturbation=self.options.perturbation,
            weight_decay=optimizer.weight_decay,
            rank=self.options.rank,
        )
        model, protected = self.network.model, release.clip is not None
        half = any(p.dtype.itemsize < 4 and p.is_floating_point() for p in model.parameters())
        if isinstance(model, DescribedModule):
            model.packs, model.alike = False, protected and half
        self.sides = self._sides()
        if isinstance(model, DescribedModule):
            model.packs = not self.sides.at_once  # which has shared rows of its own
        if protected and half:
            self._require_alike()
        self.optimizer = torch.optim.SGD(self._tensors.values(), lr=optimizer.lr)  # only holds the rate
        self._counts = torch.zeros(2, dtype=torch.int64)  # steps done, losses that were not finite
        self._unread: list[tuple[UnreadEntry, Tensor]] = []  # with the number of losses that were not finite

    def _sides(self) -> TwoSides:
        """Return the evaluation of both sides of directions, after passes on invented records."""
        model, protected, rank = self.network.model, self.release.clip is not None, self.options.rank
        around = partial(preserved_state, model) if protected else nullcontext
        sides = TwoSides(model, self.perturbation, rows=self.options.rows_at_once, around=around)
        if rank is None:
            return sides
        whole: AbstractContextManager[None] = nullcontext()
        records = torch.zeros(3, self.network.n_inputs)
        if isinstance(model, DescribedModule):
            records, whole = model.invented_records(self.network.n_inputs), model.whole_records()
        records = records.to(self.perturbation.tensors[0].device)
        with whole:
            try:
                if not protected:  # else the model was looked at before
                    require_separate_outputs(model, self.network.shaped(records))
                sides.probe(self._outputs, (records,))
            except ValueError as error:
                sides.reason = str(error)
        if sides.reason:
            warnings.warn(
                f"trainer.rank = {rank}: directions are evaluated one after another, which takes longer: "
                f"{sides.reason}",
                stacklevel=2,
            )
        return sides

    @torch.no_grad()
    def _require_alike(self) -> None:
        """Refuse (ValueError) a half-precision model that gives an invented record another output in another batch.

        Half precision may turn a rounding in the last digit of float32 into a difference as large as a clip.
        """
        model, generator = self.network.model, torch.Generator().manual_seed(0)
        records = torch.randint(0, 2, (9, self.network.n_inputs), generator=generator).float()
        if isinstance(model, DescribedModule):
            records = model.invented_records(self.network.n_inputs)
        records = records.to(self.perturbation.tensors[0].device)
        some = torch.arange(len(records) - 1, 0, -2)

        def outputs(rows: Tensor) -> Tensor:
            if not self.sides.at_once:
                with preserved_state(model):
                    return self._outputs(rows)
            return torch.cat(next(self._pairs([0], rows)), dim=1)

        zeros = [tensor for tensor in self.perturbation.tensors if not tensor.any()]
        try:
            for tensor in zeros:  # second factors of LoRA, which would hide the first ones
                tensor.copy_(0.02 * torch.randn(tensor.shape, generator=generator))
            whole, part = outputs(records), outputs(records[some])
        finally:
            for tensor in zeros:
                tensor.zero_()
        if not torch.equal(whole[some], part):
            raise ValueError(
                f"model: in half precision a record's output changes by up to {(whole[some] - part).abs().max():.1g} "
                "with the other records of its batch on this machine, which no clip bounds; take float32 "
                "(--dtype float32)"
            )

    @override
    def initialise(self, trainer: ZoTrainer) -> None:
        trainer.ranks.broadcast_tensors(trainer.tensors.values())
        trainer.perturbation.reset_copies()

    def prepare(self, trainer: ZoTrainer, folder: RunFolder) -> None:
        """Start the step log of a new run with the initial parameters, or continue that of a resumed one.

        Raises RunFolderError if the processes resume from different steps, and StepLogCorrupt for another log.
        """
        ranks = trainer.ranks
        if len({found for (found,) in ranks.rows([trainer.steps])}) > 1:
            raise RunFolderError(
                f"steps done = {trainer.steps} here, but another of the {ranks.world} processes has a different "
                "number; resume from folders of one run, and delete newer checkpoints that not all of them have"
            )
        path, options, tensors = folder.path / LOG_FILE, self.options, trainer.tensors
        header = LogHeader(
            root=trainer.root,
            perturbation=options.perturbation,
            directions=options.directions,
            weight_decay=self.config.optimizer.weight_decay,
            settle_every=options.settle_every,
            tensors=tensor_facts(tensors),
            base=parameters_digest(tensors),
            rank=options.rank,
            at_once=trainer.sides.at_once,
        )
        if trainer.steps:
            kept, _ = read_header(path)
            if kept.at_once and not trainer.sides.at_once:
                raise RunFolderError(
                    f"{path}: its directions were evaluated at once, which this model no longer allows: "
                    f"{trainer.sides.reason}; resume with the versions of the libraries that the run began with"
                )
            trainer.sides.at_once = kept.at_once
            header = replace(header, at_once=kept.at_once)
            released = self.config.mode == "release"
            header = replace(header, base=kept.base, root=kept.root if released else header.root)
        elif options.keep_base:
            write_tensors(folder.path / BASE_FILE, tensors)
        trainer.log, trainer.root = StepLog(path, header, steps=trainer.steps), header.root
        trainer.log.mark(tensors)

    def step(
        self, x: Tensor, y: Tensor, *, step: int, observe: bool = False, records: Tensor | None = None
    ) -> StepRecord:
        """See Trainer.step; the diagnostics clipped and non_finite are shares of the batch, one per direction."""
        ranks, release, n, n_records = self.ranks, self.release, self.options.directions, len(x)
        if ranks.world > 1:
            mine = ranks.share(torch.arange(n_records) if records is None else records)
            x, y = x[mine], y[mine]
        seeds = tuple(derive_seed(self.root, "direction", step, j) for j in range(n))
        # 1. Noise, by the first process: a device that fails leaves the parameters as they are.
        noise: RoundedNoise | None = None
        if self.device is not None:
            self.device.seek(step)
        if not ranks.rank:
            noise = release.drawn(n, step)
        # 2. The losses of all processes along the directions, and one move along each of them.
        self.intact = False
        self.perturbation.undo_settling()
        try:
            found, entry = self._measured(seeds, x, y), None
            if self._reads_late(found):
                rate, scalars = float(self.optimizer.param_groups[0]["lr"]), found[:n] / self._divisor
                unread = UnreadEntry.rounded(rate=rate, seeds=seeds, scalars=scalars)
                self._unread.append((unread, found[2 * n : 3 * n].sum()))
            else:
                found = torch.tensor(ranks.totals(found.tolist()), dtype=torch.float64)
                entry = self._entry(seeds, found[:n], noise)
                if self.log is not None:
                    self.log.append(entry)
        except BaseException:
            self.perturbation.restore()
            raise
        self.perturbation.update(self._unread[-1][0] if entry is None else entry)
        # 3. The counts.
        clipped, bad, (loss, correct) = found[n : 2 * n], found[2 * n : 3 * n], found[3 * n :]
        self._counts[0] += 1
        if self.steps % self.options.settle_every == 0:
            self.perturbation.settle()
        if entry is None:
            if len(self._unread) >= _MOST_UNREAD:
                self._log_unread()
        elif self.config.mode != "release":  # which counts nothing that depends on the data
            self._counts[1] += int(bad.sum())
        self.intact = True
        shares = {"clipped": clipped, "non_finite": bad} if observe else {}
        return StepRecord(
            loss_sum=loss,
            n_correct=correct.long(),
            n_records=n_records,
            diagnostics={name: (own / max(n_records, 1)).tolist() for name, own in shares.items()},
        )

    def _reads_late(self, found: Tensor) -> bool:
        """Return whether a step's scalars stay on the card that computed them: no other process or noise needs them."""
        return found.device.type != "cpu" and self.ranks.world == 1 and self.release.noise is None

    def _log_unread(self) -> None:
        """Log the steps whose scalars stayed on a card, which is read once for all of them."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        scalars = torch.stack([entry.scalars for entry, _ in unread]).tolist()
        for (entry, _), own in zip(unread, scalars, strict=True):
            if self.log is not None:
                self.log.append(entry.read(own))
        if self.config.mode != "release":
            self._counts[1] += int(torch.stack([bad for _, bad in unread]).sum())

    def _measured(self, seeds: Sequence[int], x: Tensor, y: Tensor) -> Tensor:
        """Evaluate the losses on both sides of each direction; end on the minus side of the last.

        Returns this process's sums, float64: of the differences along each direction, of clipped ones, of losses that
        are not finite, and the loss and the number of correct records on the plus side of the first direction.
        """
        figures = list[Tensor]()

        def losses() -> Iterator[tuple[Tensor, Tensor]]:
            for outputs in self._pairs(seeds, x):
                if not len(y):
                    plus, minus, right = (torch.zeros(0, device=y.device) for _ in range(3))
                else:
                    plus, minus = (LOSS_VALUES[self.config.loss](each, y) for each in outputs)
                    right = outputs[0].argmax(dim=1) == y
                if not figures:
                    loss = torch.where(torch.isfinite(plus), plus, 0.0).sum(dtype=torch.float64)
                    figures.extend((loss, right.sum()))
                yield plus, minus

        sums, clipped, non_finite = self.release.sums(losses())
        return torch.stack([one.double() for one in (*sums, *clipped, *non_finite, *figures)])

    def _pairs(self, seeds: Sequence[int], x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the outputs on both sides of each direction; short records share rows if directions share passes."""
        model, shared = self.network.model, None
        if self.sides.at_once and len(x) and isinstance(model, DescribedModule):
            shared = model.in_shared_rows(x)
        if shared is None:
            yield from self.sides.pairs(seeds, self._outputs, (x,))
            return
        for plus, minus in self.sides.pairs(seeds, shared.function, shared.batch, records=len(x)):
            yield shared.outputs(plus), shared.outputs(minus)

    def _outputs(self, x: Tensor) -> Tensor:
        """Return the model's outputs, shape (batch, n_classes); no pass for an empty batch."""
        return self.network.outputs(x).float() if len(x) else x

    def _entry(self, seeds: tuple[int, ...], sums: Tensor, noise: RoundedNoise | None) -> StepEntry:
        """Return the step for the log: the noised sums over batch size and 2 phi."""
        released = sums if noise is None else noise.added_to(sums)
        scalars = [scalar / self._divisor for scalar in released.tolist()]
        rate = float(self.optimizer.param_groups[0]["lr"])
        return StepEntry.rounded(rate=rate, seeds=seeds, scalars=tuple(self.ranks.broadcast(scalars)))

    @property
    def _divisor(self) -> float:
        return 2 * self.options.perturbation * self.release.divisor

    @property
    def steps(self) -> int:
        """Number of steps done."""
        return int(self._counts[0])

    @property
    def non_finite(self) -> int:
        """Number of records so far with a loss that was not finite on either side, counted each time."""
        self._log_unread()
        return int(self._counts[1])

    @property
    def state(self) -> dict[str, Tensor]:
        """See Trainer.state: counts of steps and non-finite losses, and copies of half-precision parameters."""
        names = list(self._tensors)
        kept = {"float32": self.perturbation.copies, "drifted": self.perturbation.drifted}
        return {"zo.counts": self._counts} | {
            f"zo.{kind}.{names[number]}": tensor
            for kind, tensors in kept.items()
            for number, tensor in tensors.items()
        }

    def before_checkpoint(self) -> None:
        """Settle half-precision parameters until the next step, and sync the log."""
        self._log_unread()
        self.perturbation.settle_temporarily()
        if self.log is not None:
            self.log.mark(self._tensors)

    def require_covered(self) -> None:
        """See Algorithm.require_covered; also refuse keys that zo does not use, and device noise of another law."""
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
    @override
    def noise_guess(self) -> float:
        epsilon = self.config.protection.epsilon or math.inf
        steps, probability = self.plan.total_steps, self.plan.sampler.sampling_probability or 1.0
        return max(math.sqrt(steps) * probability / epsilon, 0.1)

    def mechanism(self, noise_multiplier: float) -> ZoGaussian | ZoLaplace:
        """Return one step at z, or the Laplace scale b, over C: all its directions, on one Poisson batch."""
        config = self.config
        parameters: dict[str, Any] = {
            "sampling_probability": self.plan.sampling_probability,
            "clip_norm": self.own_clip,
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
