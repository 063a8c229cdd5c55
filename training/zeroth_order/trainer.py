"""Zeroth-order training: Algorithm 1 of the DP-ZO paper on any module, in place.

One step: for each of n directions two forward passes, one on each side; each record's loss difference clipped to C;
s_j = (sum_i clip(l_i^+ - l_i^-) + noise_j) / (2 phi B) with the stated batch size B; then one move along each
direction. Neither gradients nor a second copy of the parameters exist, and the scalars are all that the data leave.

What the data say about a direction: each record's loss on its two sides, clipped.

Noise on a step's scalars, from a stream that shares nothing with the directions'.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opusim.devices.base import NoisyDevice
from opusim.randomness.philox import derive_seed
from opusim.randomness.streams import NoiseStream
from opusim.usage import Usage
from training.config.run import LossName
from training.config.sections import OptimizerConfig
from training.engine.trainer import StepRecord, Trainer
from training.networks.base import Network
from training.networks.losses import LOSS_VALUES
from training.zeroth_order.config import ZoConfig
from training.zeroth_order.distributed import Ranks
from training.zeroth_order.perturbation import Walk
from training.zeroth_order.step_log import StepEntry, StepLog


@dataclass(frozen=True, kw_only=True)
class Differences:
    """A batch's loss differences along one direction.

    Attributes:
        values: l_i^+ - l_i^-, clipped to [-C, C] where there is a C, float64, shape (batch,).
        non_finite: Records with a loss that is no number, or infinite, on either side.
        clipped: Records whose difference lay outside [-C, C].
    """

    values: Tensor
    non_finite: int
    clipped: int


def loss_differences(plus: Tensor, minus: Tensor, clip: float | None) -> Differences:
    """clip(l_i^+ - l_i^-, -C, C), each record by itself.

    A loss that is NaN or infinite counts as the worst: on the plus side the difference is C, on the minus side -C, on
    both 0. Without a C such a record counts as 0. So |value| <= C whatever the model does.

    Args:
        plus: Losses at theta + phi z, shape (batch,).
        minus: Losses at theta - phi z, shape (batch,).
        clip: C > 0, or None.
    """
    bad_plus, bad_minus = ~torch.isfinite(plus), ~torch.isfinite(minus)
    bad = bad_plus | bad_minus
    values = torch.where(bad, 0.0, plus.double() - minus.double())
    outside = 0
    if clip is not None:
        outside = int((values.abs() > clip).sum())
        values = values.clamp(-clip, clip)
        values = values + clip * (bad_plus.double() - bad_minus.double())
    return Differences(values=values, non_finite=int(bad.sum()), clipped=outside)


class ScalarNoise(ABC):
    """Independent numbers of one law, in units of its scale.

    Args:
        stream: Independent N(0, 1): digital (seeded, or the system's under release), or a device's.
    """

    def __init__(self, stream: NoiseStream) -> None:
        self._stream = stream

    def draw(self, step: int, count: int) -> list[float]:
        """Fresh noise for a step's scalars; in experiment mode the same step repeats it.

        Args:
            step: The step's number.
            count: How many scalars.
        """
        self._stream.seek(step)
        return self._numbers(count)

    @abstractmethod
    def _numbers(self, count: int) -> list[float]:
        """Numbers of the law."""


class GaussianScalars(ScalarNoise):
    """N(0, 1)."""

    def _numbers(self, count: int) -> list[float]:
        return [float(number) for number in self._stream.normal((count,)).double()]


class LaplaceScalars(ScalarNoise):
    """Laplace of scale 1: (a^2 + b^2 - c^2 - d^2) / 2 of independent normals, a difference of two exponentials.

    Exact for exact normals. The stream makes normals in pairs, whose squared radius over 2 is an exponential number cut
    at log 2^65 = 45.1 in release mode, which the exact law exceeds with probability 2^-65 = 2.7e-20 (log 2^41 = 28.4
    and 2^-41 = 4.5e-13 in experiment mode). Four pairs make one Laplace number, so it differs from an exact one by more
    than rounding with probability at most 2^-63 = 1.1e-19, and its magnitude is at most 90.1. What this adds to
    delta = 0: accounting.zeroth_order.mechanisms.cut_delta.
    """

    def _numbers(self, count: int) -> list[float]:
        squares = self._stream.normal((count, 4)).double().square()
        return [float(a + b - c - d) / 2 for a, b, c, d in squares]


@dataclass(frozen=True, kw_only=True)
class ScalarRelease:
    """How a step's scalars leave the data.

    Attributes:
        clip: C > 0; None clips nothing.
        divisor: B > 0, the stated batch size.
        scale: Of the noise, in units of a loss: z C or b C; 0 for none.
        noise: Its source; None where there is none.
    """

    clip: float | None
    divisor: float
    scale: float = 0.0
    noise: ScalarNoise | None = None


class ZoTrainer(Trainer):
    """Trains a network's tensors by forward passes.

    Guarantees, for every batch whatever it holds:
        - adding or removing one record changes each scalar's sum by at most C, up to float64 rounding;
        - a loss that is not finite moves it by at most C, and stops nothing;
        - an empty batch takes the same noisy step.

    Attributes:
        non_finite: Records so far whose loss was not finite on some side, one count for each time.
        ranks: The processes that share the batches.
        walk: What moves the parameters.
        log: Where steps are written; set before the first step of a run, None for no log.

    Args:
        network: Its model is put into evaluation mode (no dropout, so that both sides see one function).
        config: Directions and their length.
        optimizer: Learning rate and weight decay.
        release: Clip, batch size, noise.
        loss: Of each record.
        root: Seed from which the directions' seeds are derived, in [0, 2^64); public.
        ranks: The processes that share the batches.
        device: The device that the noise comes from, if it does.
        private: Count nothing that depends on the data (release mode).
    """

    def __init__(
        self,
        network: Network,
        config: ZoConfig,
        optimizer: OptimizerConfig,
        release: ScalarRelease,
        *,
        loss: LossName = "cross-entropy",
        root: int,
        ranks: Ranks | None = None,
        device: NoisyDevice | None = None,
        private: bool = False,
    ) -> None:
        self.kind = config.kind
        self.model = network.model.eval()
        self.root = root
        self.log: StepLog | None = None
        self._network = network
        self._tensors = network.tensors
        self.walk = Walk(
            list(self._tensors.values()),
            perturbation=config.perturbation,
            weight_decay=optimizer.weight_decay,
        )
        self.optimizer = torch.optim.SGD(self._tensors.values(), lr=optimizer.lr)  # carries the rate alone
        self._config, self._release = config, release
        self._loss = LOSS_VALUES[loss]
        self.ranks = ranks or Ranks()
        self._device = device
        self._private = private
        self._counts = torch.zeros(2, dtype=torch.int64)  # steps done, losses that were not finite

    def step(
        self, x: Tensor, y: Tensor, *, step: int, observe: bool = False, records: Tensor | None = None
    ) -> StepRecord:
        """See Trainer.step; the diagnostics are clipped and non_finite: shares of the batch, one for each direction."""
        n_records = len(x)
        if self.ranks.world > 1:
            mine = self.ranks.share(_numbers(records, n_records))
            x, y = x[mine], y[mine]
        seeds = tuple(derive_seed(self.root, "direction", step, j) for j in range(self._config.directions))
        # the noise before anything moves: a device that fails leaves the parameters as they are
        noise = self._noise(step)
        self.intact = False
        self.walk.go_on()
        seen = _Seen()
        try:
            self._look(seeds, x, y, seen)
            entry = self._entry(seeds, seen, noise)
            if self.log is not None:
                self.log.append(entry)
        except BaseException:
            self.walk.come_back()
            raise
        self._finish(entry, seen)
        self.intact = True
        return seen.record(n_records, place=y.device, observe=observe)

    def _finish(self, entry: StepEntry, seen: _Seen) -> None:
        """Move the parameters, and count."""
        self.walk.finish(entry)
        self._counts[0] += 1
        if self.steps % self._config.settle_every == 0:
            self.walk.settle()
        if not self._private:
            self._counts[1] += int(sum(seen.bad))

    @property
    def steps(self) -> int:
        """Steps done."""
        return int(self._counts[0])

    @property
    def non_finite(self) -> int:
        """See the class."""
        return int(self._counts[1])

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The trained parameters."""
        return self._network.tensors

    @property
    def state(self) -> dict[str, Tensor]:
        """Steps done and losses that were not finite; what the walk keeps of parameters in half precision."""
        names, kept = list(self._tensors), {"float32": self.walk.copies, "drifted": self.walk.drifted}
        return {"zo.counts": self._counts} | {
            f"zo.{kind}.{names[number]}": tensor
            for kind, tensors in kept.items()
            for number, tensor in tensors.items()
        }

    @property
    def usage(self) -> Usage:
        """Usage of the device."""
        return self._device.usage if self._device is not None else Usage()

    def before_checkpoint(self) -> None:
        """Settle parameters in half precision until the next step, and have the log on disk up to here."""
        self.walk.settle_for_a_while()
        if self.log is not None:
            self.log.mark(self._tensors)

    def _look(self, seeds: Sequence[int], x: Tensor, y: Tensor, seen: _Seen) -> None:
        """What all processes see along the directions; ends on the minus side of the last."""
        for seed in seeds[:-1]:
            self._probe(seed, x, y, seen)
            self.walk.back(seed)
        self._probe(seeds[-1], x, y, seen)
        seen.take(self.ranks.totals(seen.numbers()))

    def _probe(self, seed: int, x: Tensor, y: Tensor, seen: _Seen) -> None:
        """Look at the losses on both sides of a direction; ends on its minus side."""
        self.walk.to_plus(seed)
        plus, right = self._losses(x, y)
        self.walk.to_minus(seed)
        minus, _ = self._losses(x, y)
        seen.add(plus, right, loss_differences(plus, minus, self._release.clip))

    def _losses(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Each record's loss, and whether it was told right, shapes (batch,); an empty batch is not looked at."""
        if not len(x):
            return torch.zeros(0, device=y.device), y == y
        with torch.no_grad():
            output = self.model(x).float()
            return self._loss(output, y), output.argmax(dim=1) == y

    def _noise(self, step: int) -> list[float]:
        """Noise on each direction's sum, in units of a loss; zeros where there is none, or another process draws it."""
        if self._device is not None:
            self._device.seek(step)
        release, count = self._release, self._config.directions
        if release.noise is None or self.ranks.rank:
            return [0.0] * count
        return [release.scale * number for number in release.noise.draw(step, count)]

    def _entry(self, seeds: tuple[int, ...], seen: _Seen, noise: Sequence[float]) -> StepEntry:
        """The step as the log has it: the sums, noised, over batch size and 2 phi."""
        divisor = 2 * self._config.perturbation * self._release.divisor
        scalars = [(total + number) / divisor for total, number in zip(seen.sums, noise, strict=True)]
        rate = float(self.optimizer.param_groups[0]["lr"])
        return StepEntry.rounded(rate=rate, seeds=seeds, scalars=tuple(self.ranks.of_first(scalars)))


class _Seen:
    """What the forward passes of one step saw: sums over the batch."""

    def __init__(self) -> None:
        self.sums: list[float] = []
        self.clipped: list[float] = []
        self.bad: list[float] = []
        self.loss, self.correct = 0.0, 0.0

    def add(self, plus: Tensor, right: Tensor, differences: Differences) -> None:
        """Take in one direction; the first look at the batch is what metrics report."""
        if not self.sums:
            self.loss = float(torch.where(torch.isfinite(plus), plus, 0.0).sum(dtype=torch.float64))
            self.correct = float(right.sum())
        self.sums.append(float(differences.values.sum()))
        self.clipped.append(differences.clipped)
        self.bad.append(differences.non_finite)

    def numbers(self) -> list[float]:
        """All sums in one row, as processes exchange them."""
        return [*self.sums, *self.clipped, *self.bad, self.loss, self.correct]

    def take(self, numbers: Sequence[float]) -> None:
        """Replace the sums by those of such a row."""
        n = len(self.sums)
        self.sums, self.clipped, self.bad = (list(numbers[k * n : (k + 1) * n]) for k in range(3))
        self.loss, self.correct = numbers[-2:]

    def record(self, n_records: int, *, place: torch.device, observe: bool) -> StepRecord:
        """What the engine's metrics are made of."""
        shares = {"clipped": self.clipped, "non_finite": self.bad}
        return StepRecord(
            loss_sum=torch.tensor(self.loss, dtype=torch.float64, device=place),
            n_correct=torch.tensor(int(self.correct), device=place),
            n_records=n_records,
            diagnostics={
                name: [count / max(n_records, 1) for count in counts] for name, counts in shares.items()
            }
            if observe
            else {},
        )


def _numbers(records: Tensor | None, n_records: int) -> Tensor:
    """The records' numbers, or their places where nobody says."""
    return torch.arange(n_records) if records is None else records
