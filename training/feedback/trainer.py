"""Train by backpropagation or by direct feedback alignment, digital or photonic.

One step: the gradients of a batch from their source, which is a closed form for fully connected networks
(`opusim.training.feedback.closed_form`) and autograd for every other module (`ModuleGradients`); under a protection its
writer turns what the records contribute into private gradients; then the optimizer's update.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from opusim.accounting.guarantee import NoGuarantee
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.pdfa import PdfaWithoutFormula, PublishedLayer, PublishedPdfa
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.errors import ConfigError
from opusim.noise import GaussianNoise, NoiseModel
from opusim.processes.ranks import Ranks
from opusim.randomness.seeds import derive_seed
from opusim.randomness.streams import noise_stream
from opusim.training.config.run import RunConfig
from opusim.training.data import Dataset
from opusim.training.data.public_maps import Augmentation
from opusim.training.data.samplers import PhysicalBatches
from opusim.training.engine.algorithm import Algorithm, DeviceShape, StepRecord, Trainer
from opusim.training.feedback.choice import OUTPUT, tell
from opusim.training.feedback.closed_form import (
    Batch,
    ClosedForm,
    Learned,
    closed_form_encoding,
    require_finite,
)
from opusim.training.feedback.config import BpConfig, EncodedConfig, FeedbackConfig, PdfaConfig, PointsConfig
from opusim.training.feedback.diagnosis import BATCHES, Control
from opusim.training.feedback.hooks import refuse_second
from opusim.training.feedback.layout import fits_at
from opusim.training.feedback.points import FeedbackAlignment
from opusim.training.feedback.projection import calibration_work
from opusim.training.networks.any_module import AnyModule, build_any_module
from opusim.training.networks.base import seeded_torch
from opusim.training.networks.clipping import widest
from opusim.training.networks.functions import ACTIVATIONS, LOSSES, Objective
from opusim.training.networks.models import MODELS
from opusim.training.networks.network import FullyConnected, build_network
from opusim.training.networks.optimizers import make_optimizer
from opusim.training.networks.record_gradients.separation import require_separate_steps
from opusim.training.networks.record_gradients.tape import RecordTape
from opusim.training.networks.record_independence import (
    batch_statistics,
    invented_records,
    preserved_state,
    put_back,
    two_records,
)
from opusim.training.protections.base import SoftLabels
from opusim.training.protections.config import RecordConfig
from opusim.training.protections.record import RecordProtection, require_counted_sums
from opusim.training.runs.folder import RunFolder


class ModuleGradients:
    """Differentiates a module by autograd, with feedback points or without.

    The backward pass is that of the mean of the records' losses, or, under a protection of records, of their sum, whose
    uses of parameters a tape records.

    The module's draws in a step, such as dropout, are keyed by the step, so that a resumed run repeats them. The
    diagnostics are those of `opusim.FeedbackAlignment.diagnose`, a value per point. Private batches leave buffers as
    they are.

    Args:
        network: The module.
        objective: The loss and the kind of target.
        feedback: The feedback points; None backpropagates.
        seed: Seed of the module's draws, such as dropout; None takes a seed of the operating system in each step.
        tape: Records the passes of private batches; None if there are none.
        augmentation: Copies of the images of a step, over which a record's loss is the mean; None for the images.
        readout_every: Steps from one fit of a learnt read-out to the next; 0 for none.
        new_control: Makes, in the first step, the control without feedback that follows the first batches; None for no
            control. A control prints losses, which depend on the records.
    """

    def __init__(
        self,
        network: AnyModule,
        objective: Objective,
        *,
        feedback: FeedbackAlignment | None = None,
        seed: int | None = None,
        tape: RecordTape | None = None,
        augmentation: Augmentation | None = None,
        readout_every: int = 0,
        new_control: Callable[[], Control] | None = None,
    ) -> None:
        self.network, self.objective = network, objective
        self.device = None if feedback is None else feedback.noisy_device
        self.noises = (self.device, feedback)
        self._feedback, self._seed, self._tape = feedback, seed, tape
        self._augmentation, self._new_control = augmentation, new_control
        self._control: Control | None = None
        self._readout_every = readout_every
        # zeros until it is measured
        self._column_sum = None if self.device is None else torch.zeros(self.device.n_outputs)

    @property
    def state(self) -> dict[str, Tensor]:
        """See Trainer.state: B 1, which a resumed run does not measure again, and the learnt read-out."""
        found: dict[str, Tensor] = {}
        if self._column_sum is not None:
            if self._feedback is not None and self._feedback.column_sum is not None:
                self._column_sum.copy_(self._feedback.column_sum)
            found["column_sum"] = self._column_sum
        if self._feedback is not None and self._readout_every:
            readout = self._feedback.start_readout()
            found |= {f"readout {name}": tensor for name, tensor in readout.state.items()}
        return found

    def learn(self, batch: Batch) -> Learned:
        """See ClosedForm.learn."""
        self._recall_column_sum()
        model, tape, feedback = self.network.model, self._tape, self._feedback
        if not len(batch.x):  # other processes may have records of the step
            if batch.size and feedback is not None:
                feedback.read_nothing()
            for parameter in self.network.parameters:
                parameter.grad = None if batch.size else torch.zeros_like(parameter)
            with nullcontext() if tape is None else tape.recording(0):
                zero = torch.zeros((), dtype=widest(batch.y.device), device=batch.y.device)
            return Learned(
                output=None, loss_sum=zero, contributions=None if tape is None else tape.contributions
            )
        process = f", process {batch.rank}" if batch.rank else ""
        seed = None if self._seed is None else derive_seed(self._seed, f"step {batch.step}{process}")
        # 1. Write the gradients, or record the uses of parameters; a control is copied before the first step.
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.train()
        try:
            with seeded_torch(seed, batch.x.device):
                if self._new_control is not None and 0 < batch.step < BATCHES:
                    tell("no control without feedback in a resumed run", unusual=True)
                elif self._new_control is not None and batch.step == 0:
                    with suppress(TypeError, RuntimeError):  # not every module can be copied
                        self._control = self._new_control()
                self._new_control = None
                figures = dict[str, list[float]]()
                if batch.observe and self._feedback is not None and self._feedback.gain:
                    # another forward and backward pass through the points
                    found = self._feedback.diagnose(lambda: self._losses(batch)[1].mean())
                    figures = {
                        "alignment": [point.update_alignment for point in found.points],
                        "signal_alignment": [point.signal_alignment for point in found.points],
                        "shown": [found.shown],
                        "signal_to_noise": [point.signal_to_noise for point in found.points],
                    }
                    if not all(map(math.isfinite, figures["signal_to_noise"])):
                        del figures["signal_to_noise"]
                if self._feedback is not None and fits_at(batch.step, self._readout_every):
                    self._feedback.fit_readout(lambda: self._losses(batch)[1].mean())
                output, losses = self._differentiate(batch)
        except Exception:  # the device failed: the parameters are those before, and so must the buffers be
            put_back(model, buffers)
            raise
        finally:
            model.eval()
        shown = losses.detach() if batch.padding is None else torch.where(batch.padding, 0.0, losses.detach())
        loss_sum = shown.sum(dtype=widest(shown.device))
        # 2. Train the control on the batch, with the same draws.
        if self._control is not None and not self._control.running:
            self._control = None
        if self._control is not None:

            def loss(copied: nn.Module) -> Tensor:
                with seeded_torch(seed, batch.x.device):
                    return self.objective.per_record(copied(self.network.shaped(batch.x)), batch.y).mean()

            self._control.follow(loss, loss_sum / len(batch.x))
        return Learned(
            output=output.detach(),
            loss_sum=loss_sum,
            contributions=None if tape is None else tape.contributions,
            diagnose=lambda: {k: [0.0 if math.isnan(v) else v for v in own] for k, own in figures.items()},
        )

    def start_from_feedback(self, records: Tensor) -> None:
        """See ClosedForm.start_from_feedback; the model names the layer."""
        if self._feedback is not None:
            self._feedback.shape(self.network.shaped(records))
            self._feedback.start_from_feedback(feedback_start(self.network))

    def measure(self, records: Tensor) -> None:
        """Measure B 1 before any record is read."""
        self._recall_column_sum()
        if self._feedback is not None:
            self._feedback.measure(self.network.shaped(records))

    def close(self) -> None:
        """See Trainer.close."""
        if self._feedback is not None:
            self._feedback.remove()

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the outputs and the loss of each record; with copies of it, their mean outputs and losses."""
        shaped, augmentation = self.network.shaped(batch.x), self._augmentation
        outputs: list[Tensor] = []
        for _ in range(1 if augmentation is None else augmentation.copies):
            images = shaped if augmentation is None else augmentation.copy_of(shaped)
            # A pass on protected records leaves nothing in buffers and attributes.
            with nullcontext() if self._tape is None else preserved_state(self.network.model):
                outputs.append(self.network.model(images))
        output = (
            outputs[0] if len(outputs) == 1 else torch.stack([one.detach() for one in outputs]).mean(dim=0)
        )
        y = batch.targets(output.detach())
        losses = [self.objective.per_record(one, y) for one in outputs]
        return output, losses[0] if len(losses) == 1 else torch.stack(losses).mean(dim=0)

    def _differentiate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Write the gradients of a batch, or record its uses of parameters; return outputs and losses."""
        model = self.network.model
        if self._tape is not None:
            with self._tape.recording(len(batch.x) // batch.group, batch.group):
                output, losses = self._losses(batch)
                with preserved_state(model):  # hooks on tensors may keep what the backward pass brings
                    batch.weighted(losses).sum().backward()
            return output, losses
        output, losses = self._losses(batch)
        loss = losses.mean() * (len(batch.x) / batch.size)
        require_finite(loss.detach(), batch.step)
        model.zero_grad(set_to_none=True)
        loss.backward()
        gradients = [parameter.grad for parameter in self.network.parameters]
        sums = [gradient.sum(dtype=widest(gradient.device)) for gradient in gradients if gradient is not None]
        if sums:
            require_finite(torch.stack(sums).sum(), batch.step)
        return output, losses

    def _recall_column_sum(self) -> None:
        """Give the feedback the B 1 of a checkpoint."""
        feedback, kept = self._feedback, self._column_sum
        if feedback is not None and feedback.column_sum is None and kept is not None and bool(kept.any()):
            feedback.column_sum = kept.clone()


def feedback_start(network: AnyModule) -> nn.Linear:
    """Return the linear layer that a model's attribute `feedback_start` names, or raise ValueError."""
    name = getattr(network.model, "feedback_start", None)
    layer = network.model.get_submodule(name) if isinstance(name, str) else None
    if not isinstance(layer, nn.Linear):
        raise ValueError(
            f"model.initial_output = 'feedback' needs a layer to start, and {type(network.model).__name__} names none; "
            "use 'random', or give it an attribute feedback_start with the name of its last linear layer"
        )
    return layer


def augmentation_of(options: FeedbackConfig, dataset: Dataset) -> Augmentation | None:
    """Return the augmentation of a step's images, or None; raise ConfigError if records are no such images."""
    if not isinstance(options, BpConfig) or not options.augmented_copies:
        return None
    shape, key = dataset.record_shape, "trainer.augmented_copies"
    if len(shape) != 3 or dataset.public_map is not None:
        reason = f"is for images (c, h, w) without data.features, not for records of shape {tuple(shape)}; leave it out"
        raise ConfigError("configuration", key, reason)
    if options.augment_shift >= min(shape[1:]):
        reason = (
            f"{options.augment_shift} must be below the side of an image, here {min(shape[1:])}; lower it"
        )
        raise ConfigError("configuration", "trainer.augment_shift", reason)
    return Augmentation(
        copies=options.augmented_copies, mirror=options.augment_mirror, shift=options.augment_shift
    )


def feedback_points(
    network: AnyModule,
    options: FeedbackConfig,
    device: NoisyDevice | None = None,
    *,
    draw_seed: int | None = None,
    chooses: bool = False,
) -> FeedbackAlignment | None:
    """Return the feedback points of a module, or None for backpropagation.

    Hooks are put on the module, which `FeedbackAlignment.remove` takes off. The encoding draws by `draw_seed`, or one
    from the system. Unless the place of the error may be chosen, an error_at of None is the place that the model
    declares, else its output: folders of earlier versions name no other. Raises ValueError if there are no such
    submodules.
    """
    if not isinstance(options, PointsConfig):
        return None
    points, error_at = options.points, options.error_at
    if error_at is None and not chooses:
        error_at = getattr(network.model, "error_at", None) or OUTPUT
    return FeedbackAlignment(
        network.model,
        points[0] if points is not None and len(points) == 1 else points,
        device=device,
        error_at=error_at,
        rows=options.rows,
        spread=options.spread,
        slices=options.slices or "shared",
        normalised=options.normalised,
        gain=getattr(options, "gain", None),
        draw_seed=secrets.randbits(64) if draw_seed is None else draw_seed,
        **options.projected,
    )


@contextmanager
def points_on(network: AnyModule, options: FeedbackConfig, **how: Any) -> Iterator[FeedbackAlignment | None]:
    """Put feedback points on a module for as long as the block runs; arguments as `feedback_points` takes them."""
    points = feedback_points(network, options, **how)
    try:
        yield points
    finally:
        if points is not None:
            points.remove()


def _mixes_by_default(config: RunConfig) -> bool:
    """Return whether a built-in model drops its default batch norm, because it would mix protected records."""
    has_norm = config.model.name in ("conv-small", "resnet-small") and "norm" not in config.model.options
    return has_norm and isinstance(config.protection, RecordConfig)


class FeedbackTrainer(Algorithm[FeedbackConfig, FullyConnected | AnyModule, "FeedbackTrainer"], Trainer):
    """bp, dfa, tdfa and pdfa.

    A fully connected network on class numbers takes the closed form of `opusim.training.feedback.closed_form`, and
    every other module autograd with feedback points.

    Attributes:
        source: Computes the gradients of the network, whose parameters are updated in place.
        labels: Noisy labels in place of the labels; None if training sees the labels themselves.
        ranks: The processes that share each batch.
    """

    targets = ("class", "tokens", "real", "labels")
    applies = frozenset({"gradients", "soft labels"})
    processes = "steps"
    layer_signals = "exact"
    fills_batches = True
    network: FullyConnected | AnyModule
    source: ClosedForm | ModuleGradients
    labels: SoftLabels | None
    ranks: Ranks
    _physical = PhysicalBatches()
    _group = 1
    _filling: tuple[Tensor, ...] | None = None

    @classmethod
    def build_network(
        cls, config: RunConfig, dataset: Dataset, model: nn.Module | None
    ) -> FullyConnected | AnyModule:
        """See Algorithm.build_network; a fully connected network of pdfa needs a hidden layer."""
        if isinstance(model, FeedbackAlignment):
            raise TypeError(
                "model is a FeedbackAlignment; give the plain module (model.remove()), a run puts the points on it"
            )
        if model is not None:
            refuse_second(model)
        closed = dataset.target == "class" and not dataset.holds_tokens and config.loss in LOSSES
        closed = closed and not config.of_users  # whose rows the tape of a module groups
        if model is not None and closed:
            try:
                FullyConnected(model)
            except (TypeError, ValueError):  # other modules, or in part frozen
                closed = False
        if not closed or (model is None and config.model.name != "mlp"):
            if _mixes_by_default(config):
                config = config.unchecked(model={"options": {"norm": "group", **config.model.options}})
            return build_any_module(config, dataset, model)
        network = build_network(config, dataset, model)  # its gradients have a closed form
        if config.uses_device and network.depth == 1:
            raise ValueError("model has no hidden layer; pdfa needs one to send the projected error to")
        return network

    @classmethod
    @override
    def rebuild_network(cls, facts: dict[str, Any], model: nn.Module | None) -> FullyConnected | AnyModule:
        return FullyConnected.from_facts(facts) if "layers" in facts else AnyModule.from_facts(facts, model)

    def chosen(self) -> dict[str, Any]:
        """See Algorithm.chosen; where feedback enters a module."""
        network, options = self.network, self.options
        if not isinstance(network, AnyModule):
            return {}
        with points_on(network, options, chooses=True) as points:
            if points is None:
                return {}
            points.shape(network.shaped(self._two_records))
            points.tell_choices(started=self.config.model.initial_output == "feedback")
            found = {name: bool(v) if name == "normalised" else v for name, v in points.chosen.items()}
        return {name: value for name, value in found.items() if getattr(options, name) is None}

    def require_covered(self) -> None:
        """See Algorithm.require_covered; also refuse keys that the network does not take, and unknown points."""
        network, config = self.network, self.config
        self.options.require_keys(closed_form=isinstance(network, FullyConnected))
        if isinstance(network, AnyModule):
            self._require_bounded(network)
            for name, module in network.model.named_modules() if Ranks().world > 1 else ():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    reason = (
                        f"{type(network.model).__name__} has a batch norm, {name!r}, whose statistics would be those "
                        "of one process's part of the batch; take nn.GroupNorm, or start it without torchrun"
                    )
                    raise ConfigError("configuration", "model.name", reason)
            if config.model.initial_output == "feedback":
                feedback_start(network)
            _ = self.device_shape
            if self._readout_every and (config.protection.protects != "nothing" or Ranks().world > 1):
                reason = (
                    f"{self._readout_every} fits the read-out to gradients of records, which protection.kind = "
                    f"{config.protection.kind!r} does not cover; leave it out"
                    if config.protection.protects != "nothing"
                    else f"{self._readout_every} would fit another read-out in each process; leave it out, or start "
                    "one process"
                )
                raise ConfigError("configuration", "trainer.readout_every", reason)
            augmentation_of(self.options, self.dataset)
        super().require_covered()
        if not isinstance(network, AnyModule) or not self._clips_records:
            return
        if _mixes_by_default(config):
            tell(
                f"model.options.norm = group (chosen for {config.model.name}: the default, batch, would mix records, "
                "which protection.kind = 'record' must tell apart)",
                unusual=True,
            )
        # Refuse a module or a loss in which one record would change what others add.
        if config.model.name in MODELS and (found := batch_statistics(network.model)):
            reason = (
                f"'batch' is {found}, which mixes the records of a batch, and protection.kind = 'record' bounds what "
                "each one adds; take 'group'"
            )
            raise ConfigError("configuration", "model.options.norm", reason)
        x, y = invented_records(self.dataset, network.parameters[0].device)
        # No draw goes by the order of rows.
        real = {"encoding": "real"} if isinstance(self.options, EncodedConfig) else {}
        loss = Objective.named(config.loss, self.dataset.target).per_record
        with points_on(network, self.options.model_copy(update=real), draw_seed=0) as points:
            seek = (lambda: None) if points is None else partial(points.seek, 0)
            require_separate_steps(network.model, loss, network.shaped(x), y, seek=seek)

    @property
    def device_shape(self) -> DeviceShape:
        """The error goes in; the signals of all hidden layers or points come out."""
        network = self.network
        if isinstance(network, FullyConnected):
            widths = network.widths
            return DeviceShape(n_inputs=widths[-1], n_outputs=sum(widths[:-1]))
        with points_on(network, self.options) as points:
            shape = (1, 1) if points is None else points.shape(network.shaped(self._two_records))
        return DeviceShape(n_inputs=shape[0], n_outputs=shape[1])

    def work_before(self) -> DeviceWork:
        """See Algorithm.work_before; B 1 and the columns of B are measured, if the run needs them."""
        work, network = super().work_before(), self.network
        if not self.config.uses_device:
            return work
        if isinstance(network, AnyModule):
            with points_on(network, self.options) as points:
                if points is not None:
                    fits = sum(fits_at(step, self._readout_every) for step in range(self.plan.total_steps))
                    batch = self.config.sampler.batch_size / 2
                    work += points.work_before
                    work += points.work(network.shaped(self._two_records), times=batch, fits=True).times(fits)
        starts = self.config.model.initial_output == "feedback"
        return work + (calibration_work(self.device_shape.n_inputs) if starts else DeviceWork())

    def work_of_step(self, records: float, n_outputs: int, *, observed: bool) -> DeviceWork:
        """See Algorithm.work_of_step; the error of each record is read, by modules once more in an observed step."""
        own = self.protection.work_of_step(records, n_outputs)
        network, options = self.network, self.options
        if isinstance(self.protection, RecordProtection):
            records = self.protection.physical_batches.expected_rows(records) * self.config.group
        if not isinstance(options, PdfaConfig):
            return own
        if isinstance(network, FullyConnected):
            read = DeviceWork(projections=records * closed_form_encoding(options).frames_per_row, calls=1)
            drawn = DeviceWork(projections=records, calls=1)
            return own + read + (drawn if options.order == "published" else DeviceWork())
        with points_on(network, options) as points:
            read = DeviceWork()
            if points is not None:
                read = points.work(network.shaped(self._two_records), times=records / 2)
        return own + read.times(2 if observed else 1)

    @property
    def _readout_every(self) -> int:
        return self.options.readout_every if isinstance(self.options, PointsConfig) else 0

    @property
    def _two_records(self) -> Tensor:
        """Two invented records if records are protected, else the first one twice; only shapes are read."""
        return two_records(self.dataset, self.network.parameters[0].device, invented=self._clips_records)

    @property
    def _clips_records(self) -> bool:
        return isinstance(self.protection, RecordProtection)

    def _require_bounded(self, network: AnyModule) -> None:
        """Refuse (NoGuarantee) a protection that writes gradients but does not protect a module's records."""
        kind, needs = self.config.protection.kind, self.protection.needs
        if not needs or "soft labels" in needs or self._clips_records:
            return
        raise NoGuarantee(
            f"protection.kind = {kind!r} noises the signal of each layer in the geometry of its public inputs, and its "
            f"theorem is about a fully connected network, not {type(network.model).__name__}; take 'record', "
            "'label-randomized-response' or with a device 'label-readout', or model.name = 'mlp'"
        )

    @override
    def open(self, device: NoisyDevice | None, labels: SoftLabels | None) -> None:
        network, config, dataset = self.network, self.config, self.dataset
        self.labels, self.ranks, self._group = labels, Ranks(), self.config.group
        if isinstance(self.protection, RecordProtection):
            self._physical = self.protection.physical_batches
        self.optimizer = make_optimizer(network.parameters, config.optimizer)
        if isinstance(network, FullyConnected):
            self.protection.clipping.require_layers(network.depth)
            self.gradients(device)
            noise = None
            if self.options.digital_sigma:
                noise = noise_stream(config.mode, config.seed_for("noise"), "digital-noise")
            self.source = ClosedForm(network, self.options, loss=config.loss, device=device, noise=noise)
            self.device = self.source.device
            return
        # 1. The writer of private gradients, and the feedback points.
        self._require_bounded(network)
        private = self.gradients(device) is not None
        feedback = feedback_points(network, self.options, device, draw_seed=config.seed_for("codes"))
        # 2. The tape that measures a module's records, once the points are in place.
        tape, control = None, None
        try:
            if private:
                x, _ = invented_records(dataset, network.parameters[0].device)
                network.model.train()
                try:
                    tape = RecordTape(network.model, network.shaped(x))
                    size, divisor = "sampler.batch_size", float(config.divisor) * config.group
                    require_counted_sums(tape, divisor, processes=self.ranks.world, name=size)
                    self.protection.clipping.require_layers(tape.depth, tape.names)
                finally:
                    network.model.eval()
            if feedback is not None and self.ranks.world > 1:
                feedback.number_rows(self.ranks.before)
            if feedback is not None and (self.ranks.world > 1 or self._readout_every):
                feedback.shape(
                    network.shaped(self._two_records)
                )  # for a process without records, and a read-out
        except Exception:
            if feedback is not None:
                feedback.remove()
            raise
        # 3. A control without feedback for the first batches.
        # None if anything is protected, because it reports losses; on several processes; for a module with a device of
        # its own, whose readings would count twice; or in a run that ends before good feedback need be ahead.
        private_run = config.protection.protects != "nothing" or config.mode == "release"
        if feedback is not None and feedback.gain and not (private_run or self.ranks.world > 1):
            held = (value for part in feedback.model.modules() for value in vars(part).values())
            if self.plan.total_steps < BATCHES:
                tell(
                    f"no control without feedback, which takes {BATCHES} steps, and the run has "
                    f"{self.plan.total_steps}; compare it with one of trainer.gain = 0",
                    unusual=True,
                )
            elif not any(isinstance(value, NoisyDevice) for value in held):
                control = partial(feedback.control, self.optimizer, batches=BATCHES)
        self.source = ModuleGradients(
            network,
            Objective.named(config.loss, dataset.target),
            feedback=feedback,
            seed=config.seed_for("module"),
            tape=tape,
            augmentation=augmentation_of(self.options, dataset),
            readout_every=self._readout_every,
            new_control=control,
        )
        self.device = self.source.device

    @override
    def initialise(self, trainer: FeedbackTrainer) -> None:
        if self.config.model.initial_output == "feedback":
            trainer.source.start_from_feedback(self._two_records)

    def prepare(self, trainer: FeedbackTrainer, folder: RunFolder) -> None:
        """See Algorithm.prepare; protected feedback is calibrated before the first record is read."""
        if self._clips_records:
            trainer.source.measure(self._two_records)

    def step(
        self,
        x: Tensor,
        y: Tensor,
        *,
        step: int,
        observe: bool = False,
        records: Tensor | None = None,
        filled: Tensor | None = None,
    ) -> StepRecord:
        """See Trainer.step; the diagnostics are those of the source.

        A batch without records has no gradient; momentum still moves the parameters. Under protection it takes its
        noise, and no value of a record raises an error; rows of weight zero fill it up to the fixed number of rows.
        """
        source, writer, ranks, group = self.source, self.writer, self.ranks, self._group
        drawn, shown, padding = len(x), y, filled
        if self._physical.count is not None:
            x, y, more = self._filled(x, y)
            if filled is None or more is None:
                padding = filled if more is None else more
            else:
                padding = torch.cat([filled, more[drawn:]])
        for noise in (*source.noises, writer):
            if noise is not None:
                noise.seek(step)
        counts = [len(x)] if ranks.world == 1 else [found for (found,) in ranks.rows([len(x)])]
        batch = Batch(
            x=x,
            y=y,
            records=records,
            step=step,
            size=sum(counts),
            before=sum(counts[: ranks.rank]),
            rank=ranks.rank,
            observe=observe and len(x) > 0,
            protection=writer,
            labels=self.labels,
            padding=padding,
            group=group,
        )
        learned = source.learn(batch)
        if writer is not None:
            if learned.contributions is None:
                raise TypeError(f"source: {type(source).__name__} measures no records; give it a tape")
            if padding is not None:
                learned.contributions.leave_out(padding if group == 1 else padding.view(-1, group).all(dim=1))
            writer.set_gradients(
                [learned.contributions], records=records, public_inputs=learned.public_inputs
            )
        elif ranks.world > 1:
            ranks.sum(ranks.gradients(source.network.parameters))
            ranks.broadcast_tensors(source.network.buffers.values())
        diagnostics = learned.diagnose() if batch.observe else {}
        self.optimizer.step()
        correct: Tensor = torch.zeros((), dtype=torch.int64, device=y.device)
        judged: int | Tensor = 0
        if learned.output is not None:
            output = learned.output[:drawn]
            if filled is not None:
                output, shown = output[~filled], shown[~filled]
            correct, judged = source.objective.correct(output, shown)
        return StepRecord(
            loss_sum=learned.loss_sum,
            n_correct=correct,
            n_records=drawn if filled is None else (~filled).sum(),
            n_judged=judged,
            diagnostics=diagnostics,
        )

    def _filled(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Fill a batch up to the fixed number of rows by an invented record; also return a mask of these rows."""
        group = self._group
        rows = self._physical.rows(len(x) // group) * group
        if rows == len(x):
            return x, y, None
        if self._filling is None:
            self._filling = tuple(part[:1] for part in invented_records(self.dataset, x.device))
        (a, b), missing = self._filling, rows - len(x)
        padding = torch.arange(rows, device=x.device) >= len(x)
        return (
            torch.cat([x, a.to(x.dtype).expand(missing, *x.shape[1:])]),
            torch.cat([y, b.to(y.dtype).expand(missing, *y.shape[1:])]),
            padding,
        )

    @property
    def state(self) -> dict[str, Tensor]:
        """See Trainer.state: that of the source, and that of the protection."""
        return self.source.state | ({} if self.writer is None else self.writer.state)

    @override
    def close(self) -> None:
        self.source.close()

    def released(self, noise: NoiseModel | None) -> tuple[Mechanism, ...]:
        """See Algorithm.released; a photonic run without protection states the paper's formula.

        A run that lacks constants of the formula names them instead.
        """
        config, options, network = self.config, self.options, self.network
        paid_for = config.protection.protects != "nothing"
        if paid_for or not config.uses_device or not isinstance(network, FullyConnected):
            return super().released(noise)
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
            named = ", ".join(name for name, lacks in missing.items() if lacks)
            return (PdfaWithoutFormula(missing=named),)
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
        published = PublishedPdfa(
            layers=layers,
            batch_size=config.sampler.batch_size,
            sigma=sigma,
            tau_b=options.tau_b,
            tau_h_min=tau_h_min,
            tau_h_max=tau_h_max,
        )
        return (published,)

    @property
    @override
    def needs_float64(self) -> str | None:
        return None if self.options.tau_b is None else "trainer.tau_b"

    @property
    @override
    def noiseless(self) -> Mapping[str, Any]:
        return {"sigma": 0.0} if self.options.digital_sigma else {}

    @property
    @override
    def noises_signals(self) -> bool:
        options = self.options
        if isinstance(options, PdfaConfig):
            return options.encoding == "ternary"
        return options.feedback_matrix and options.digital_sigma > 0
