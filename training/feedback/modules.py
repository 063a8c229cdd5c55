"""The gradients of any torch module by autograd: backpropagation, or feedback alignment at its feedback points.

A forward pass in training mode, and a backward pass through the points of
`opusim.training.feedback.points.FeedbackAlignment`: of the mean of the records' losses, or, under a protection of
records, of their sum, whose uses of parameters a tape records.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from opusim.devices.base import NoisyDevice
from opusim.errors import ConfigError
from opusim.randomness.seeds import derive_seed
from opusim.training.data import Dataset
from opusim.training.data.public_maps import Augmentation
from opusim.training.feedback.choice import OUTPUT
from opusim.training.feedback.closed_form import Batch, Learned, require_finite
from opusim.training.feedback.config import BpConfig, FeedbackConfig, PointsConfig
from opusim.training.feedback.diagnosis import Control
from opusim.training.feedback.layout import fits_at
from opusim.training.feedback.points import FeedbackAlignment
from opusim.training.networks.any_module import AnyModule
from opusim.training.networks.base import seeded_torch
from opusim.training.networks.clipping import widest
from opusim.training.networks.functions import Objective
from opusim.training.networks.record_gradients.tape import RecordTape
from opusim.training.networks.record_independence import preserved_state, put_back


class ModuleGradients:
    """Differentiates a module, with feedback points or without.

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
                if batch.step == 0 and self._new_control is not None:
                    with suppress(TypeError, RuntimeError):  # not every module can be copied
                        self._control = self._new_control()
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
