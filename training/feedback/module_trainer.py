"""Train any torch module by backpropagation, or by feedback alignment at its feedback points.

One step: a forward pass in training mode, the mean of the records' losses, `loss.backward()` through the points of
`training.feedback.points.FeedbackAlignment`, and the optimizer's update. Under a protection of records a tape watches
the passes of the losses' sum, and the clipped and noised gradients take the place of autograd's. If several processes
share the batch, the gradients of all are added before the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from opusim.devices.usage import Usage
from opusim.errors import ConfigError
from opusim.processes.ranks import Ranks
from opusim.randomness import derive_seed
from training.data import Dataset
from training.data.image_maps import Augmentation
from training.engine.trainer import StepRecord, Trainer
from training.errors import TrainingDiverged
from training.feedback.config import BpConfig, FeedbackConfig
from training.feedback.diagnosis import Control
from training.feedback.points import FeedbackAlignment
from training.networks.any_module import AnyModule
from training.networks.base import Network, seeded_torch
from training.networks.memory import preserved_state
from training.networks.objectives import Objective
from training.networks.record_gradients.separation import restore_buffers
from training.networks.record_gradients.tape import RecordTape
from training.protections.base import SoftLabels, WrappedGradients
from training.protections.record import RecordGradients


@dataclass(frozen=True, kw_only=True)
class PrivateRecords:
    """What clips and noises the gradients of a module's records.

    Attributes:
        tape: Records the passes of the module.
        writer: Writes the private gradients.
    """

    tape: RecordTape
    writer: RecordGradients | WrappedGradients


class ModuleTrainer(Trainer):
    """Trains a module by autograd, with feedback points or without.

    What a module draws in a step, such as dropout, is keyed by the step, so that a resumed run draws the same.

    Args:
        network: The module; its parameters are updated in place.
        optimizer: Any torch optimizer over the network's parameters.
        objective: The loss and the kind of target.
        kind: Name of the trainer.
        feedback: The feedback points; None backpropagates.
        seed: Of what the module draws, such as dropout; None takes a seed of the operating system in each step.
        labels: What training knows of the labels in their place; None if it sees the labels themselves.
        private: Clips and noises the records' gradients; None takes their mean.
        augmentation: Copies of the images of a step, over which a record's loss is the mean; None for the images.
        ranks: The processes that share each batch; None for one.
        control_batches: First batches that a `training.feedback.diagnosis.Control` follows; 0 for none. It prints what
            depends on the records.
    """

    def __init__(
        self,
        network: AnyModule,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        *,
        kind: str,
        feedback: FeedbackAlignment | None = None,
        seed: int | None = None,
        labels: SoftLabels | None = None,
        private: PrivateRecords | None = None,
        augmentation: Augmentation | None = None,
        ranks: Ranks | None = None,
        control_batches: int = 0,
    ) -> None:
        self._control_batches = control_batches
        self._control: Control | None = None
        self._augmentation = augmentation
        self.kind = kind
        self.model = network.model
        self.optimizer = optimizer
        self._network, self._objective, self._feedback = network, objective, feedback
        self._seed, self._labels, self._private = seed, labels, private
        self._ranks = ranks or Ranks.one()
        if feedback is not None and self._ranks.world > 1:
            feedback.number_rows(self._ranks.before)
        device = None if feedback is None else feedback.noisy_device
        self._column_sum = (
            None if device is None else torch.zeros(device.n_outputs)
        )  # zeros until it is measured

    def step(
        self, x: Tensor, y: Tensor, *, step: int, observe: bool, records: Tensor | None = None
    ) -> StepRecord:
        """See Trainer.step; the diagnostics are those of `opusim.FeedbackAlignment.diagnose`, a value per point.

        A batch without records has no gradient and no reading; momentum still moves the parameters. Under protection
        it takes its noise, no value of a record raises an error, and buffers stay as they are.
        """
        if self._private is not None:
            self._private.writer.seek(step)
            if self._feedback is not None and self._feedback.noisy_device is not None:
                self._feedback.noisy_device.seek(step)  # its noise may be drawn without a reading
        batch_size = self._ranks.total(len(x))
        if not batch_size:
            return self._empty_step(y)
        self._recall_column_sum()
        if not len(x):
            return self._step_without_records(y, step)
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        losses = partial(self._losses, x, y, step=step, records=records)
        self.model.train()
        try:
            with seeded_torch(self._seed_of(step), x.device):
                self._begin_control(step)
                diagnostics = self._diagnosed(lambda: losses()[1].mean(), step) if observe else {}
                share = len(x) / batch_size
                output, loss_sum = self._learn(losses, len(x), step, share=share, records=records)
        except Exception:  # the device failed: the parameters are those before, and so must the buffers be
            restore_buffers(self.model, buffers)
            raise
        finally:
            self.model.eval()
        self._follow(x, y, loss_sum / len(x), step)
        self._update()
        correct, judged = self._objective.correct(output, y)
        return StepRecord(
            loss_sum=loss_sum, n_correct=correct, n_records=len(x), n_judged=judged, diagnostics=diagnostics
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """See Network.tensors."""
        return self._network.tensors

    @property
    def state(self) -> dict[str, Tensor]:
        """See Trainer.state: that of the protection, and B 1, which a resumed run does not measure again."""
        self._keep_column_sum()
        own = {} if self._column_sum is None else {"column_sum": self._column_sum}
        return own if self._private is None else own | self._private.writer.state

    @property
    def usage(self) -> Usage:
        """See Trainer.usage."""
        return Usage() if self._feedback is None else self._feedback.usage

    def start_from_feedback(self, records: Tensor) -> None:
        """Set the layer that the model names to the feedback of the last point, and its bias to zero.

        Args:
            records: Two records, shape (2, n_inputs), from which the points' sizes are read.

        Raises:
            ValueError: The model names no such layer, or it has other sizes than the feedback.
        """
        if self._feedback is not None:
            self._feedback.shape(self._network.shaped(records))
            self._feedback.start_from_feedback(feedback_start(self._network))

    def measure_feedback(self, records: Tensor) -> None:
        """Measure now what the feedback's encoding needs of the device, so that no record says when.

        Args:
            records: Two records, shape (2, n_inputs), from which the points' sizes are read.
        """
        self._recall_column_sum()
        if self._feedback is not None:
            self._feedback.measure(self._network.shaped(records))

    def close(self) -> None:
        """See Trainer.close."""
        if self._feedback is not None:
            self._feedback.remove()

    def _losses(self, x: Tensor, y: Tensor, *, step: int, records: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs and the loss of each record; with copies of it, their mean outputs and losses."""
        shaped, augmentation = self._network.shaped(x), self._augmentation
        outputs: list[Tensor]
        if augmentation is None:
            outputs = [self._outputs(shaped)]
        else:
            outputs = [self._outputs(augmentation.copy_of(shaped)) for _ in range(augmentation.copies)]
        output = (
            outputs[0] if len(outputs) == 1 else torch.stack([one.detach() for one in outputs]).mean(dim=0)
        )
        if self._labels is not None:
            if records is None:
                raise ValueError("records is missing; noisy labels are looked up by the records' numbers")
            y = self._labels.targets(output.detach(), records, step)
        losses = [self._objective.per_record(one, y) for one in outputs]
        return output, losses[0] if len(losses) == 1 else torch.stack(losses).mean(dim=0)

    def _outputs(self, shaped: Tensor) -> Tensor:
        """Return the module's outputs; a pass on protected records leaves nothing in buffers and attributes."""
        with nullcontext() if self._private is None else preserved_state(self.model):
            outputs: Tensor = self.model(shaped)
        return outputs

    def _learn(
        self,
        losses: Callable[[], tuple[Tensor, Tensor]],
        n_records: int,
        step: int,
        *,
        share: float,
        records: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Write the gradients of a batch; return its outputs, and the sum of its losses.

        Args:
            losses: Returns the outputs and the loss of each record.
            n_records: Records of this process.
            step: The step's number.
            share: Share of the batch that this process has.
            records: Numbers of its records.

        Raises:
            TrainingDiverged: Without protection, the loss or a gradient is not finite.
        """
        if self._feedback is not None:
            self._feedback.seek(step)
        if self._private is None:
            output, per_record = losses()
            self._backward(per_record.mean() * share, step)
        else:
            with self._private.tape.recording(n_records):
                output, per_record = losses()
                with preserved_state(self.model):  # hooks on tensors may keep what the backward pass brings
                    per_record.sum().backward()
            self._private.writer.set_gradients([self._private.tape.contributions], records=records)
        return output.detach(), per_record.detach().sum(dtype=torch.float64)

    def _backward(self, loss: Tensor, step: int) -> None:
        """Write the gradients of this process's share of the mean loss.

        Raises:
            TrainingDiverged: The loss or a gradient is not finite.
        """
        _require_finite(loss.detach(), step)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        gradients = [parameter.grad for parameter in self._network.parameters]
        sums = [gradient.sum(dtype=torch.float64) for gradient in gradients if gradient is not None]
        if sums:
            _require_finite(torch.stack(sums).sum(), step)

    def _begin_control(self, step: int) -> None:
        """Copy the model before the first step of a run."""
        if step or self._feedback is None or not self._control_batches:
            return
        with suppress(TypeError, RuntimeError):  # not every module can be copied
            self._control = Control(self._feedback, self.optimizer, batches=self._control_batches)

    def _follow(self, x: Tensor, y: Tensor, found: Tensor, step: int) -> None:
        """Train the control on a batch of the first steps, with the same draws."""
        if self._control is None or not self._control.running:
            self._control = None
            return

        def loss(model: nn.Module) -> Tensor:
            with seeded_torch(self._seed_of(step), x.device):
                return self._objective.per_record(model(self._network.shaped(x)), y).mean()

        self._control.follow(loss, found)

    def _update(self) -> None:
        """Add the gradients of all processes and move the parameters; buffers become those of the first process."""
        if self._ranks.world > 1 and self._private is None:  # its writer has added them
            self._ranks.sum(self._ranks.gradients(self._network.parameters))
            self._ranks.broadcast_tensors(self._network.buffers.values())
        self.optimizer.step()

    def _step_without_records(self, y: Tensor, step: int) -> StepRecord:
        """Take part in a step of which other processes have all records."""
        self.optimizer.zero_grad(set_to_none=True)
        if self._feedback is not None:
            self._feedback.seek(step)
            self._feedback.read_nothing()
        if self._private is not None:
            self._write_noise(self._private)
        self._update()
        return _nothing(y)

    def _recall_column_sum(self) -> None:
        """Give the feedback what a checkpoint holds."""
        feedback, kept = self._feedback, self._column_sum
        if feedback is not None and feedback.column_sum is None and kept is not None and bool(kept.any()):
            feedback.column_sum = kept.clone()

    def _keep_column_sum(self) -> None:
        """Keep what the feedback has measured for the next checkpoint."""
        measured = None if self._feedback is None else self._feedback.column_sum
        if measured is not None and self._column_sum is not None:
            self._column_sum.copy_(measured)

    def _empty_step(self, y: Tensor) -> StepRecord:
        if self._private is None:
            for parameter in self._network.parameters:
                parameter.grad = torch.zeros_like(parameter)
        else:
            self._write_noise(self._private)
        self.optimizer.step()
        return _nothing(y)

    def _write_noise(self, private: PrivateRecords) -> None:
        """Write the private gradients of no records."""
        with private.tape.recording(0):
            pass
        private.writer.set_gradients([private.tape.contributions])

    def _diagnosed(self, loss: Callable[[], Tensor], step: int) -> dict[str, list[float]]:
        """Return the alignment at each point; it takes another forward and backward pass through the points."""
        if self._feedback is None or not self._feedback.gain:
            return {}
        self._feedback.seek(step)
        found = self._feedback.diagnose(loss)
        figures = {
            "alignment": [point.update_alignment for point in found.points],
            "signal_alignment": [point.signal_alignment for point in found.points],
            "shown": [found.shown],
        }
        if all(math.isfinite(point.signal_to_noise) for point in found.points):
            figures["signal_to_noise"] = [point.signal_to_noise for point in found.points]
        return {name: [0.0 if math.isnan(v) else v for v in values] for name, values in figures.items()}

    def _seed_of(self, step: int) -> int | None:
        process = f", process {self._ranks.rank}" if self._ranks.rank else ""
        return None if self._seed is None else derive_seed(self._seed, f"step {step}{process}")


def feedback_start(network: AnyModule) -> nn.Linear:
    """Return the linear layer of a model that can start as the feedback matrix.

    Raises:
        ValueError: The model names none by an attribute `feedback_start`.
    """
    name = getattr(network.model, "feedback_start", None)
    layer = network.model.get_submodule(name) if isinstance(name, str) else None
    if not isinstance(layer, nn.Linear):
        raise ValueError(
            f"model.initial_output = 'feedback' needs a layer to start, and {type(network.model).__name__} names none; "
            "use 'random', or give it an attribute feedback_start with the name of its last linear layer"
        )
    return layer


def augmentation_of(options: FeedbackConfig, network: Network, dataset: Dataset) -> Augmentation | None:
    """Return what makes copies of the images of a step, or None for the images themselves.

    Args:
        options: The section `trainer`.
        network: What it trains.
        dataset: The records.

    Raises:
        ConfigError: The records are no images of such a size, or the network is fully connected.
    """
    if not isinstance(options, BpConfig) or not options.augmented_copies:
        return None
    shape, key = dataset.record_shape, "trainer.augmented_copies"
    if not isinstance(network, AnyModule):
        reason = "is for modules; take a model.name other than 'mlp', or leave it out"
        raise ConfigError("configuration", key, reason)
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


def _nothing(y: Tensor) -> StepRecord:
    """Return what a step without records measured."""
    zero = torch.zeros((), dtype=torch.float64, device=y.device)
    return StepRecord(loss_sum=zero, n_correct=zero.long(), n_records=0, n_judged=0)


def _require_finite(value: Tensor, step: int) -> None:
    if not math.isfinite(float(value)):
        raise TrainingDiverged(
            f"step {step}: training diverged, because the loss or a gradient is NaN or infinite; "
            "start a new run with a lower optimizer.lr or less noise, or check the inputs"
        )
