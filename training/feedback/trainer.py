"""Train by backpropagation or by direct feedback alignment, digital or photonic.

One step: the gradients of a batch from their source, which is a closed form for fully connected networks
(`opusim.training.feedback.closed_form`) and autograd for every other module (`opusim.training.feedback.modules`); under
a protection its writer turns what the records contribute into private gradients; then the optimizer's update.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from opusim.randomness.streams import noise_stream
from opusim.training.config.run import RunConfig
from opusim.training.data import Dataset
from opusim.training.data.samplers import PhysicalBatches
from opusim.training.engine.algorithm import Algorithm, DeviceShape, StepRecord, Trainer
from opusim.training.feedback.choice import tell
from opusim.training.feedback.closed_form import Batch, ClosedForm, closed_form_encoding
from opusim.training.feedback.config import EncodedConfig, FeedbackConfig, PdfaConfig, PointsConfig
from opusim.training.feedback.diagnosis import BATCHES
from opusim.training.feedback.hooks import refuse_second
from opusim.training.feedback.layout import fits_at
from opusim.training.feedback.modules import (
    ModuleGradients,
    augmentation_of,
    feedback_points,
    feedback_start,
    points_on,
)
from opusim.training.feedback.points import FeedbackAlignment
from opusim.training.feedback.projection import calibration_work
from opusim.training.networks.any_module import AnyModule, build_any_module
from opusim.training.networks.functions import ACTIVATIONS, LOSSES, Objective
from opusim.training.networks.models import MODELS
from opusim.training.networks.network import FullyConnected, build_network
from opusim.training.networks.optimizers import make_optimizer
from opusim.training.networks.record_gradients.separation import require_separate_steps
from opusim.training.networks.record_gradients.tape import RecordTape
from opusim.training.networks.record_independence import batch_statistics, invented_records, two_records
from opusim.training.protections.base import SoftLabels
from opusim.training.protections.config import RecordConfig
from opusim.training.protections.record import RecordProtection, require_counted_sums
from opusim.training.runs.folder import RunFolder


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
