"""Train by backpropagation or by direct feedback alignment, digital or photonic.

One step: the gradients of a batch from their source, which is a closed form for fully connected networks
(`training.feedback.closed_form`) and autograd for every other module (`training.feedback.modules`); under a protection
its writer turns what the records contribute into private gradients; then the optimizer's update.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opusim.devices.base import NoisyDevice
from opusim.processes.ranks import Ranks
from opusim.randomness.streams import NoiseStream
from training.engine.algorithm import StepRecord, Trainer
from training.errors import TrainingDiverged
from training.feedback.points import FeedbackAlignment
from training.networks.any_module import AnyModule
from training.networks.contributions.sums import Contributions
from training.networks.network import FullyConnected
from training.networks.objectives import Objective
from training.protections.base import PrivateGradients, SoftLabels


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The records of a step that this process has.

    Attributes:
        x: Inputs, shape (batch, n_inputs).
        y: Targets.
        records: Their numbers in the training set, shape (batch,), or None.
        step: The step's number.
        size: Records of the step on all processes.
        before: Those of them that processes of lower rank have.
        rank: The rank of this process.
        observe: Whether to measure diagnostics.
        protection: What writes the gradients from the records' contributions; None for nothing.
        labels: What training knows of the labels in their place; None if it sees the labels themselves.
    """

    x: Tensor
    y: Tensor
    records: Tensor | None
    step: int
    size: int
    before: int
    rank: int
    observe: bool
    protection: PrivateGradients | None
    labels: SoftLabels | None

    def targets(self, output: Tensor) -> Tensor:
        """Return what the loss compares the outputs with: the targets, or soft labels."""
        if self.labels is None:
            return self.y
        if self.records is None:
            raise ValueError("records is missing; noisy labels are looked up by the records' numbers")
        return self.labels.targets(output, self.records, self.step)


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a batch taught.

    Attributes:
        output: The model's outputs, detached; None if the batch has no records here and the model did not run.
        loss_sum: Sum of the records' losses, float64.
        contributions: What its records add to the gradients, for a protection; None if the gradients are written.
        public_inputs: Layer inputs of the protection's reference records, if it has any.
        diagnose: Returns the diagnostics, once the gradients are written.
    """

    output: Tensor | None
    loss_sum: Tensor
    contributions: Contributions | None = None
    public_inputs: list[Tensor] | None = None
    diagnose: Callable[[], dict[str, list[float]]] = dict


class GradientSource(ABC):
    """Computes the gradients of a network on a batch.

    Attributes:
        network: The network.
        objective: The loss and the kind of target.
        device: The open device that is read, or None.
        noises: What is positioned at the start of each step.
    """

    network: FullyConnected | AnyModule
    objective: Objective
    device: NoisyDevice | None
    noises: tuple[NoisyDevice | NoiseStream | FeedbackAlignment | None, ...]

    @property
    def state(self) -> dict[str, Tensor]:
        """See Trainer.state."""
        return {}

    @abstractmethod
    def learn(self, batch: Batch) -> Learned:
        """Return what a batch contributes to a protection, or write this process's share of its mean gradient.

        A batch without records contributes nothing and gets no reading, unless other processes have records.

        Raises:
            TrainingDiverged: Without protection, the loss or a gradient is not finite.
        """

    @abstractmethod
    def start_from_feedback(self, records: Tensor) -> None:
        """Set a layer's weights to the feedback that the layer below receives, and its bias to zero.

        Args:
            records: Two records, shape (2, n_inputs), from which sizes may be read.

        Raises:
            ValueError: There is no such layer, or it has other sizes than the feedback.
        """

    def measure(self, records: Tensor) -> None:  # noqa: B027  # optional hook
        """Measure now what the feedback needs of the device, so that no record says when; see `start_from_feedback`."""

    def close(self) -> None:  # noqa: B027  # optional hook
        """See Trainer.close."""


class FeedbackTrainer(Trainer):
    """Trains a network by one of the four feedbacks.

    Args:
        source: Computes the gradients of its network, whose parameters are updated in place.
        optimizer: Any torch optimizer over the network's parameters.
        protection: Clips and noises the records' contributions; None averages over the batch.
        labels: What training knows of the labels in their place; None if it sees the labels themselves.
        ranks: The processes that share each batch; None for one.
    """

    def __init__(
        self,
        source: GradientSource,
        optimizer: torch.optim.Optimizer,
        *,
        protection: PrivateGradients | None = None,
        labels: SoftLabels | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.source, self.optimizer = source, optimizer
        self.network, self.device = source.network, source.device
        self._protection, self._labels, self._ranks = protection, labels, ranks or Ranks.one()

    def step(
        self, x: Tensor, y: Tensor, *, step: int, observe: bool = False, records: Tensor | None = None
    ) -> StepRecord:
        """See Trainer.step; the diagnostics are those of the source.

        A batch without records has no gradient; momentum still moves the parameters. Under protection it takes its
        noise, and no value of a record raises an error.
        """
        source, protection, ranks = self.source, self._protection, self._ranks
        for noise in (*source.noises, protection):
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
            protection=protection,
            labels=self._labels,
        )
        learned = source.learn(batch)
        if protection is not None:
            if learned.contributions is None:
                raise TypeError(f"source: {type(source).__name__} measures no records; give it a tape")
            protection.set_gradients(
                [learned.contributions], records=records, public_inputs=learned.public_inputs
            )
        elif ranks.world > 1:
            ranks.sum(ranks.gradients(source.network.parameters))
            ranks.broadcast_tensors(source.network.buffers.values())
        diagnostics = learned.diagnose() if batch.observe else {}
        self.optimizer.step()
        correct, judged = torch.zeros((), dtype=torch.int64, device=y.device), 0
        if learned.output is not None:
            correct, judged = source.objective.correct(learned.output, y)
        return StepRecord(
            loss_sum=learned.loss_sum,
            n_correct=correct,
            n_records=len(x),
            n_judged=judged,
            diagnostics=diagnostics,
        )

    @property
    def state(self) -> dict[str, Tensor]:
        """See Trainer.state: that of the source, and that of the protection."""
        return self.source.state | ({} if self._protection is None else self._protection.state)

    def close(self) -> None:
        """See Trainer.close."""
        self.source.close()


def require_finite(value: Tensor, step: int) -> None:
    """Stop before an update that is not finite.

    Raises:
        TrainingDiverged: The value is NaN or infinite.
    """
    if not math.isfinite(float(value)):
        raise TrainingDiverged(
            f"step {step}: training diverged, because the loss or a gradient is NaN or infinite; "
            "start a new run with a lower optimizer.lr or less noise, or check the inputs"
        )
