"""Backpropagation and direct feedback alignment, digital or photonic, as algorithms of a run."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from accounting.errors import NoGuarantee
from accounting.mechanisms import Mechanism
from accounting.pdfa.mechanisms import PdfaWithoutFormula, PublishedLayer, PublishedPdfa
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.errors import ConfigError
from opusim.noise import GaussianNoise, NoiseModel
from opusim.processes.ranks import Ranks
from opusim.randomness.streams import noise_stream
from training.config.run import RunConfig
from training.data import Dataset
from training.engine.algorithm import Algorithm, DeviceShape
from training.feedback.config import (
    DfaConfig,
    EncodedConfig,
    FeedbackConfig,
    PdfaConfig,
    PointsConfig,
    TdfaConfig,
)
from training.feedback.diagnosis import BATCHES
from training.feedback.marking import OUTPUT
from training.feedback.module_trainer import ModuleTrainer, PrivateRecords, augmentation_of, feedback_start
from training.feedback.points import FeedbackAlignment
from training.feedback.projection import calibration_work
from training.feedback.trainer import FeedbackTrainer, closed_form_encoding
from training.networks.any_module import AnyModule, build_any_module
from training.networks.functions import ACTIVATIONS, LOSSES
from training.networks.models import MODELS
from training.networks.network import FullyConnected, build_network
from training.networks.objectives import Objective
from training.networks.optimizers import make_optimizer
from training.networks.record_gradients.separation import require_separate_steps
from training.networks.record_gradients.tape import RecordTape
from training.networks.record_independence import batch_statistics, invented_records, two_records
from training.protections.base import SoftLabels, WrappedGradients
from training.protections.planning import Updates
from training.protections.record import RecordGradients, RecordProtection, require_counted_sums
from training.runs.folder import RunFolder

_STEPS_WITH_CONTROL = 4 * BATCHES
"""Steps of the shortest run that compares feedback with none."""
_OF_CLOSED_FORM = {
    **dict.fromkeys(
        (
            *("order", "signal_gain", "tau_b", "scale", "tau_h_max", "tau_h_min", "clipped_layers"),
            *("clip_width", "through_clip", "sigma"),
        ),
        "only fully connected networks on class numbers have it; leave it out",
    ),
    "threshold": "other modules than fully connected networks take trainer.relative_threshold; leave it out",
}
_OF_MODULES = {
    **dict.fromkeys(
        ("points", "error_at", "rows", "spread", "normalised"),
        "a fully connected network receives the error of its output at its hidden layers; leave it out",
    ),
    "slices": "each hidden layer of a fully connected network has its own outputs; take 'own', or leave it out",
    "relative_threshold": "a fully connected network takes trainer.threshold; leave it out",
}


class FeedbackAlgorithm(
    Algorithm[FeedbackConfig, FullyConnected | AnyModule, FeedbackTrainer | ModuleTrainer]
):
    """bp, dfa, tdfa and pdfa.

    A fully connected network on class numbers takes the closed form of `training.feedback.trainer`, and every other
    module autograd with feedback points.
    """

    targets = ("class", "tokens", "real", "labels")
    applies = frozenset({"gradients", "soft labels"})
    processes = "steps"

    @classmethod
    def build_network(
        cls, config: RunConfig, dataset: Dataset, model: nn.Module | None
    ) -> FullyConnected | AnyModule:
        """See Algorithm.build_network; a fully connected network of pdfa needs a hidden layer."""
        if isinstance(model, FeedbackAlignment):
            raise TypeError(
                "model is a FeedbackAlignment; give the plain module (model.remove()), a run puts the points on it"
            )
        network = _closed_form(config, dataset, model)
        if network is None:
            return build_any_module(config, dataset, model)
        if config.uses_device and network.depth == 1:
            raise ValueError("model has no hidden layer; pdfa needs one to send the projected error to")
        return network

    @classmethod
    def rebuild_network(cls, facts: dict[str, Any], model: nn.Module | None) -> FullyConnected | AnyModule:
        """See Algorithm.rebuild_network."""
        return FullyConnected.from_facts(facts) if "layers" in facts else AnyModule.from_facts(facts, model)

    def chosen(self) -> dict[str, Any]:
        """See Algorithm.chosen; where feedback enters a module."""
        network, options = self.network, self.options
        if not isinstance(network, AnyModule):
            return {}
        feedback = feedback_points(network, options, chooses=True)
        if feedback is None:
            return {}
        try:
            feedback.shape(network.shaped(self._two_records))
            feedback.tell_choices()
            found = {name: bool(v) if name == "normalised" else v for name, v in feedback.chosen.items()}
        finally:
            feedback.remove()
        return {name: value for name, value in found.items() if getattr(options, name) is None}

    def require_covered(self) -> None:
        """See Algorithm.require_covered; also keys that the network does not take, and points that do not exist."""
        network, config = self.network, self.plan.config
        require_keys(config, self.options, closed_form=isinstance(network, FullyConnected))
        if isinstance(network, AnyModule):
            self._require_bounded(network)
            if Ranks().world > 1:
                _require_same_buffers(network)
            if config.model.initial_output == "feedback":
                feedback_start(network)
            _ = self.device_shape
        augmentation_of(self.options, network, self.plan.dataset)
        super().require_covered()
        if isinstance(network, AnyModule) and self._clips_records:
            self._require_separate(network)

    @property
    def device_shape(self) -> DeviceShape:
        """The error goes in; the signals of all hidden layers or points come out."""
        network = self.network
        if isinstance(network, FullyConnected):
            widths = network.widths
            return DeviceShape(n_inputs=widths[-1], n_outputs=sum(widths[:-1]))
        feedback = feedback_points(network, self.options)
        if feedback is None:
            return DeviceShape(n_inputs=1, n_outputs=1)
        try:
            shape = feedback.shape(network.shaped(self._two_records))
        finally:
            feedback.remove()
        return DeviceShape(n_inputs=shape.n_inputs, n_outputs=shape.n_outputs)

    def work_before(self) -> DeviceWork:
        """See Algorithm.work_before; B 1 and the columns of B are measured, if the run needs them."""
        work, network = super().work_before(), self.network
        if not isinstance(self.options, PdfaConfig):
            return work
        if isinstance(network, FullyConnected):
            work += calibration_work(1) if closed_form_encoding(self.options).has_offset else DeviceWork()
            inputs = network.widths[-1]
        else:
            with self._points(network) as points:
                work += points.work_before
                inputs = points.shape(network.shaped(self._two_records)).n_inputs
        starts = self.plan.config.model.initial_output == "feedback"
        return work + (calibration_work(inputs) if starts else DeviceWork())

    def work_of_step(self, records: float, n_outputs: int, *, observed: bool) -> DeviceWork:
        """See Algorithm.work_of_step; the error of each record is read, by modules once more in an observed step."""
        own = self.protection.work_of_step(records, n_outputs)
        network, options = self.network, self.options
        if not isinstance(options, PdfaConfig):
            return own
        if isinstance(network, FullyConnected):
            read = DeviceWork(projections=records * closed_form_encoding(options).frames_per_row, calls=1)
            drawn = DeviceWork(projections=records, calls=1)
            return own + read + (drawn if options.order == "published" else DeviceWork())
        with self._points(network) as points:
            read = points.work(network.shaped(self._two_records), times=records / 2)
        return own + read.times(2 if observed else 1)

    @contextmanager
    def _points(self, network: AnyModule) -> Iterator[FeedbackAlignment]:
        """Put feedback points of pdfa on a module for as long as the block runs."""
        points = feedback_points(network, self.options)
        if points is None:
            raise TypeError(f"trainer.kind = {self.options.kind!r} has no feedback points")
        try:
            yield points
        finally:
            points.remove()

    @property
    def _two_records(self) -> Tensor:
        """Two invented records if records are protected, else the first one twice; only shapes are read."""
        return two_records(self.plan.dataset, self.network.parameters[0].device, invented=self._clips_records)

    @property
    def _clips_records(self) -> bool:
        return isinstance(self.protection, RecordProtection)

    def _require_bounded(self, network: AnyModule) -> None:
        """Refuse a protection that writes gradients and is not about a module's records.

        Raises:
            NoGuarantee: It is one of labels, whose noise has the geometry of a layer's inputs.
        """
        kind, needs = self.plan.config.protection.kind, self.protection.needs
        if not needs or "soft labels" in needs or self._clips_records:
            return
        raise NoGuarantee(
            f"protection.kind = {kind!r} noises the signal of each layer in the geometry of its public inputs, and its "
            f"theorem is about a fully connected network, not {type(network.model).__name__}; take 'record', "
            "'label-readout' or 'label-randomized-response', or model.name = 'mlp'"
        )

    def _require_separate(self, network: AnyModule) -> None:
        """Refuse a module or a loss in which one record would change what others add; see `require_separate_steps`."""
        config, dataset = self.plan.config, self.plan.dataset
        if config.model.name in MODELS and (found := batch_statistics(network.model)):
            reason = (
                f"'batch' is {found}, which mixes the records of a batch, and protection.kind = 'record' bounds what "
                "each one adds; take 'group'"
            )
            raise ConfigError("configuration", "model.options.norm", reason)
        x, y = invented_records(dataset, network.parameters[0].device)
        real = (
            {"encoding": "real"} if isinstance(self.options, EncodedConfig) else {}
        )  # no draw by the order of rows
        feedback = feedback_points(network, self.options.model_copy(update=real), draw_seed=0)
        loss = Objective.named(config.loss, dataset.target).per_record
        try:
            require_separate_steps(
                network.model,
                loss,
                network.shaped(x),
                y,
                seek=(lambda: None) if feedback is None else partial(feedback.seek, 0),
            )
        finally:
            if feedback is not None:
                feedback.remove()

    def _private_records(self, network: AnyModule, device: NoisyDevice | None) -> PrivateRecords | None:
        """Return what clips and noises a module's records, or None if nothing does; its points are in place."""
        self._require_bounded(network)
        writer = self.gradients(device)
        if not isinstance(writer, RecordGradients | WrappedGradients):
            return None
        x, _ = invented_records(self.plan.dataset, network.parameters[0].device)
        network.model.train()
        try:
            tape = RecordTape(network.model, network.shaped(x))
            divisor = float(self.plan.config.divisor)
            require_counted_sums(tape, divisor, processes=Ranks().world, name="sampler.batch_size")
            return PrivateRecords(tape=tape, writer=writer)
        finally:
            network.model.eval()

    def trainer(
        self, device: NoisyDevice | None, labels: SoftLabels | None = None
    ) -> FeedbackTrainer | ModuleTrainer:
        """See Algorithm.trainer."""
        config, options, network = self.plan.config, self.options, self.network
        optimizer = make_optimizer(network.parameters, config.optimizer)
        if isinstance(network, AnyModule):
            ranks = Ranks()
            objective = Objective.named(config.loss, self.plan.dataset.target)
            feedback = feedback_points(network, options, device, draw_seed=config.seed_for("codes"))
            try:
                private = self._private_records(network, device)
                if ranks.world > 1 and feedback is not None:  # a process without records needs the sizes too
                    feedback.shape(network.shaped(self._two_records))
            except Exception:
                if feedback is not None:
                    feedback.remove()
                raise
            return ModuleTrainer(
                network,
                optimizer,
                objective,
                kind=options.kind,
                feedback=feedback,
                seed=config.seed_for("module"),
                labels=labels,
                private=private,
                augmentation=augmentation_of(options, network, self.plan.dataset),
                ranks=ranks,
                control_batches=0 if feedback is None else self._control_batches(feedback),
            )
        noise = None
        if options.digital_sigma:
            noise = noise_stream(config.mode, config.seed_for("noise"), "digital-noise")
        return FeedbackTrainer(
            network,
            optimizer,
            options,
            loss=config.loss,
            device=device,
            noise=noise,
            protection=self.gradients(device),
            labels=labels,
            ranks=Ranks(),
        )

    def _control_batches(self, feedback: FeedbackAlignment) -> int:
        """Return how many batches a control without feedback follows at the start of a run; 0 for no control.

        There is none if anything is protected, because it tells losses; none on several processes; none for a module
        with a device of its own, whose readings would count twice; and none in a run so short that it would cost much.
        """
        private = self.plan.config.protection.protects != "nothing" or self.plan.config.mode == "release"
        reads = any(
            isinstance(value, NoisyDevice)
            for part in feedback.model.modules()
            for value in vars(part).values()
        )
        short = self.plan.total_steps < _STEPS_WITH_CONTROL
        return 0 if private or reads or short or not feedback.gain or Ranks().world > 1 else BATCHES

    @property
    def updates(self) -> Updates:
        """See Algorithm.updates; backpropagation may stretch the error on its way to the output layer."""
        options = self.options
        if options.kind != "bp":
            return Updates()
        unbounded = options.scale == "sphere"  # a ball (eq. 9) stretches nothing
        return Updates(output_gain=math.inf if unbounded else options.signal_gain)

    def initialise(self, trainer: FeedbackTrainer | ModuleTrainer) -> None:
        """See Algorithm.initialise."""
        if self.plan.config.model.initial_output == "random":
            return
        if isinstance(trainer, ModuleTrainer):
            trainer.start_from_feedback(self._two_records)
        else:
            trainer.start_from_feedback()

    def prepare(self, trainer: FeedbackTrainer | ModuleTrainer, folder: RunFolder) -> None:
        """See Algorithm.prepare; a protected module's feedback is calibrated before the first record is seen."""
        if isinstance(trainer, ModuleTrainer) and self._clips_records:
            trainer.measure_feedback(self._two_records)

    def released(self, noise: NoiseModel | None) -> tuple[Mechanism, ...]:
        """See Algorithm.released; a photonic run without protection states the paper's formula."""
        config, network = self.plan.config, self.network
        paid_for = config.protection.protects != "nothing"
        if not paid_for and config.uses_device and isinstance(network, FullyConnected):
            return (published_mechanism(config, self.options, network, noise),)
        return super().released(noise)

    @property
    def noiseless(self) -> Mapping[str, Any]:
        """See Algorithm.noiseless."""
        return {"sigma": 0.0} if self.options.digital_sigma else {}


def require_keys(config: RunConfig, options: FeedbackConfig, *, closed_form: bool) -> None:
    """Refuse keys of the other kind of network.

    Args:
        config: The run.
        options: Its section `trainer`.
        closed_form: Whether its network is a fully connected one, whose gradients have a closed form.

    Raises:
        ConfigError: A key differs from its default and would do nothing.
    """
    encoding = options.encoding if isinstance(options, EncodedConfig) else "ternary"
    if closed_form and encoding not in ("ternary", "planes"):
        reason = f"{encoding!r} is for other modules than fully connected networks; use 'ternary' or 'planes'"
        raise ConfigError("configuration", "trainer.encoding", reason)
    if closed_form and getattr(options, "gain", 1.0) == 0:
        reason = "0 leaves a fully connected network without feedback; give a gain above 0 (modules take 0)"
        raise ConfigError("configuration", "trainer.gain", reason)
    for name, reason in (_OF_MODULES if closed_form else _OF_CLOSED_FORM).items():
        field, value = type(options).model_fields.get(name), getattr(options, name, None)
        if field is None or value == field.default or (name == "slices" and value == "own"):
            continue
        raise ConfigError(
            "configuration", f"trainer.{name}", f"{value!r} does nothing for this model: {reason}"
        )


def _require_same_buffers(network: AnyModule) -> None:
    """Refuse statistics of batches, of which each process sees only a part.

    Raises:
        ConfigError: The module has a batch norm.
    """
    for name, module in network.model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            reason = (
                f"{type(network.model).__name__} has a batch norm, {name!r}, whose statistics would be those of one "
                "process's part of the batch; take nn.GroupNorm, or start it without torchrun"
            )
            raise ConfigError("configuration", "model.name", reason)


def feedback_points(
    network: AnyModule,
    options: FeedbackConfig,
    device: NoisyDevice | None = None,
    *,
    draw_seed: int | None = None,
    chooses: bool = False,
) -> FeedbackAlignment | None:
    """Return the feedback points of a module, or None for backpropagation.

    Args:
        network: The module; hooks are put on it, which `FeedbackAlignment.remove` takes off.
        options: The section `trainer`.
        device: The open device of pdfa.
        draw_seed: Seed of what the encoding draws; None draws one from the system.
        chooses: Whether the place of the error may be chosen. If not, an error_at of None is the place that the model
            declares, else its output: folders of earlier versions name no other.

    Raises:
        ValueError: There are no such submodules.
    """
    if not isinstance(options, PointsConfig):
        return None
    given: dict[str, Any] = {"encoding": "real"}
    if isinstance(options, EncodedConfig):
        given = {
            "encoding": options.encoding,
            "threshold": options.relative_threshold,
            "planes": options.planes,
        }
    if isinstance(options, DfaConfig | TdfaConfig):
        given |= {"seed": options.feedback_seed, "projection": options.projection}
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
        **given,
    )


def _closed_form(config: RunConfig, dataset: Dataset, model: nn.Module | None) -> FullyConnected | None:
    """Return the network as one whose gradients have a closed form, or None if it or the loss has none.

    Raises:
        ValueError: Its widths do not fit the data.
    """
    if dataset.target != "class" or dataset.holds_tokens or config.loss not in LOSSES:
        return None
    if model is None and config.model.name != "mlp":
        return None
    if model is not None:
        try:
            FullyConnected(model)
        except (TypeError, ValueError):  # other modules, or in part frozen
            return None
    return build_network(config, dataset, model)


def published_mechanism(
    config: RunConfig, options: FeedbackConfig, network: FullyConnected, noise: NoiseModel | None
) -> Mechanism:
    """Return the mechanism of the paper's formula, or one that names the constants that the run lacks for it.

    Args:
        config: The run.
        options: Its section `trainer`.
        network: Its network.
        noise: The law of its device's noise, or None if it is unknown.
    """
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
