"""Train any module by zeroth-order steps in place: Algorithm 1 of the DP-ZO paper.

One step: for each of n directions, a forward pass on each side; each record's loss difference is clipped to C, and
rounded toward zero so that its sum is exact; then s_j = r_j / (2 phi B) with r_j the exactly rounded sum_i clip(l_i^+ -
l_i^-) + noise_j and the stated batch size B, and one move along each direction.
There are neither gradients nor a second copy of the parameters. The scalars s_j are all that a step releases of the
data; their noise comes from a stream that is independent of the directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opusim.devices.base import NoisyDevice
from opusim.processes.ranks import Ranks
from opusim.randomness.rounded import Law, RoundedNoise, toward_zero
from opusim.randomness.streams import NoiseStream, derive_seed
from training.config.run import LossName
from training.config.sections import OptimizerConfig
from training.engine.algorithm import StepRecord, Trainer
from training.networks.base import Network
from training.networks.functions import LOSS_VALUES
from training.networks.memory import preserved_state
from training.zeroth_order.config import ZoConfig
from training.zeroth_order.perturbation import InPlacePerturbation, StepEntry
from training.zeroth_order.step_log import StepLog

LARGEST_DIFFERENCE = 1e100
"""Bound on a difference before a joint clip, beyond float32: a loss that is not finite counts as it, and 1,024 of its
squares have a finite sum in float64."""
_MOST_RECORDS = 2**22
"""Records of a batch up to which sums of clipped differences are exact."""
_BELOW = 1 - 2.0**-40
"""Factor of the bound of a joint clip: more than float64 errs in a norm and a scaling of 1,024 numbers."""


@dataclass(frozen=True, kw_only=True)
class Differences:
    """A batch's loss differences along one direction.

    Attributes:
        values: l_i^+ - l_i^-, clipped to [-C, C] if there is a C, float64, shape (batch,).
        non_finite: Number of records with a loss that is NaN or infinite on either side.
        clipped: Number of records whose difference was outside [-C, C].
    """

    values: Tensor
    non_finite: int
    clipped: int


def loss_differences(plus: Tensor, minus: Tensor, clip: float | None) -> Differences:
    """Return clip(l_i^+ - l_i^-, -C, C) of each record.

    A loss that is NaN or infinite counts as the worst one: the difference is C if it is on the plus side, -C on the
    minus side, and 0 on both. Without a C the difference is then 0. So |value| <= C whatever the model returns.

    Args:
        plus: Losses at theta + phi z, shape (batch,).
        minus: Losses at theta - phi z, shape (batch,).
        clip: C > 0, or None if there is no clip.
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


def jointly_clipped(found: Sequence[Differences], clip: float) -> list[Differences]:
    """Scale each record's differences along all directions to Euclidean norm at most C.

    Args:
        found: The differences along each direction, bounded by `LARGEST_DIFFERENCE`.
        clip: C > 0.
    """
    values = torch.stack([differences.values for differences in found])
    norms = torch.linalg.vector_norm(values, dim=0)
    scaled = values * (clip * _BELOW / norms.clamp_min(clip))
    outside = int((norms > clip).sum())
    return [replace(each, values=row, clipped=outside) for each, row in zip(found, scaled, strict=True)]


@dataclass(frozen=True, kw_only=True)
class ScalarRelease:
    """Clip, batch size and noise with which a step releases its scalars.

    Attributes:
        clip: C > 0, or None if there is no clip.
        divisor: B > 0, the stated batch size.
        scale: Scale of the noise in units of a loss: z C or b C; 0 for no noise.
        noise: Source of the noise, independent of the directions, or None.
        law: Of the noise.
        joint: Whether C bounds the norm of a record's differences along all directions, rather than each of them.
    """

    clip: float | None
    divisor: float
    scale: float = 0.0
    noise: NoiseStream | None = None
    law: Law = "gaussian"
    joint: bool = False


class ZoTrainer(Trainer):
    """Trains a network's tensors by forward passes.

    Guarantees for every batch, whatever it holds:
        - a record's loss difference adds at most C to each scalar's sum, as computed, and with a joint clip a vector of
          norm at most C to a step's sums, for batches of up to 2^22 records. The loss differences of the others stay as
          they are only if the machine computes them alike in batches of other sizes, which is taken on trust;
        - a loss that is not finite changes the sum by at most C and does not stop the step;
        - an empty batch takes the same noisy step.

    Attributes:
        non_finite: Number of records so far with a loss that was not finite on either side, counted each time.
        ranks: The processes that share the batches.
        perturbation: Moves the parameters.
        log: Records the steps; set before the first step of a run, or None for no log.

    Args:
        network: The network. Its model is put into evaluation mode (no dropout, so that both sides use one function).
        config: Directions and perturbation.
        optimizer: Learning rate and weight decay.
        release: Clip, batch size and noise.
        loss: "cross-entropy" or "squared-error".
        root: Seed from which the directions' seeds derive, in [0, 2^64); public.
        ranks: The processes that share the batches.
        device: The open device that supplies noise, or None.
        private: Whether to count nothing that depends on the data (release mode).
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
        self.network, self.device = network, device
        network.model.eval()
        self.root = root
        self.log: StepLog | None = None
        self._tensors = network.tensors
        self.perturbation = InPlacePerturbation(
            list(self._tensors.values()),
            perturbation=config.perturbation,
            weight_decay=optimizer.weight_decay,
        )
        self.optimizer = torch.optim.SGD(self._tensors.values(), lr=optimizer.lr)  # only holds the rate
        self._config, self._release = config, release
        self._loss = LOSS_VALUES[loss]
        self.ranks = ranks or Ranks()
        self._private = private
        self._counts = torch.zeros(2, dtype=torch.int64)  # steps done, losses that were not finite

    def step(
        self, x: Tensor, y: Tensor, *, step: int, observe: bool = False, records: Tensor | None = None
    ) -> StepRecord:
        """See Trainer.step; the diagnostics clipped and non_finite are shares of the batch, one per direction."""
        n_records = len(x)
        if self.ranks.world > 1:
            mine = self.ranks.share(_numbers(records, n_records))
            x, y = x[mine], y[mine]
        seeds = tuple(derive_seed(self.root, "direction", step, j) for j in range(self._config.directions))
        # noise first: a device that fails leaves the parameters as they are
        noise = self._noise(step)
        self.intact = False
        self.perturbation.undo_settling()
        totals = _Totals()
        try:
            self._measure(seeds, x, y, totals)
            entry = self._entry(seeds, totals, noise)
            if self.log is not None:
                self.log.append(entry)
        except BaseException:
            self.perturbation.restore()
            raise
        self._finish(entry, totals)
        self.intact = True
        return totals.record(n_records, place=y.device, observe=observe)

    def _finish(self, entry: StepEntry, totals: _Totals) -> None:
        """Update the parameters and the counts."""
        self.perturbation.update(entry)
        self._counts[0] += 1
        if self.steps % self._config.settle_every == 0:
            self.perturbation.settle()
        if not self._private:
            self._counts[1] += int(sum(totals.bad))

    def keep_log(self, log: StepLog, *, root: int) -> None:
        """Write every step to a log from here on, and draw directions from the root that the log names.

        Args:
            log: Where steps are written.
            root: The seed from which the directions' seeds are derived.
        """
        self.log, self.root = log, root
        log.mark(self._tensors)

    @property
    def steps(self) -> int:
        """Number of steps done."""
        return int(self._counts[0])

    @property
    def non_finite(self) -> int:
        """See the class."""
        return int(self._counts[1])

    @property
    def state(self) -> dict[str, Tensor]:
        """See Trainer.state: counts of steps and non-finite losses, and copies of half-precision parameters."""
        names, kept = (
            list(self._tensors),
            {"float32": self.perturbation.copies, "drifted": self.perturbation.drifted},
        )
        return {"zo.counts": self._counts} | {
            f"zo.{kind}.{names[number]}": tensor
            for kind, tensors in kept.items()
            for number, tensor in tensors.items()
        }

    def before_checkpoint(self) -> None:
        """Settle half-precision parameters until the next step, and sync the log."""
        self.perturbation.settle_temporarily()
        if self.log is not None:
            self.log.mark(self._tensors)

    def _measure(self, seeds: Sequence[int], x: Tensor, y: Tensor, totals: _Totals) -> None:
        """Add up the losses of all processes along the directions; end on the minus side of the last."""
        found = []
        for seed in seeds[:-1]:
            found.append(self._differences(seed, x, y, totals))
            self.perturbation.move_back(seed)
        found.append(self._differences(seeds[-1], x, y, totals))
        clip = self._release.clip
        if self._release.joint and clip is not None:
            found = jointly_clipped(found, clip)
        if clip is not None:  # the bounds hold for the sums as computed
            found = [
                replace(each, values=toward_zero(each.values, bound=clip, count=_MOST_RECORDS))
                for each in found
            ]
        totals.add(found)
        totals.replace(self.ranks.totals(totals.numbers()))

    def _differences(self, seed: int, x: Tensor, y: Tensor, totals: _Totals) -> Differences:
        """Evaluate the losses on both sides of a direction; end on its minus side."""
        self.perturbation.move_to_plus(seed)
        plus, right = self._losses(x, y)
        totals.observe(plus, right)
        self.perturbation.move_to_minus(seed)
        minus, _ = self._losses(x, y)
        return loss_differences(
            plus, minus, LARGEST_DIFFERENCE if self._release.joint else self._release.clip
        )

    def _losses(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return each record's loss and whether its class is right, shapes (batch,); no pass for an empty batch."""
        if not len(x):
            return torch.zeros(0, device=y.device), y == y
        protected = self._release.clip is not None
        with torch.no_grad(), preserved_state(self.model) if protected else nullcontext():
            output = self.model(x).float()
            return self._loss(output, y), output.argmax(dim=1) == y

    def _noise(self, step: int) -> RoundedNoise | None:
        """Draw the noise on the directions' sums, in units of a loss; None unless this process draws it."""
        if self.device is not None:
            self.device.seek(step)
        release = self._release
        if release.noise is None or not release.scale or self.ranks.rank:
            return None
        release.noise.seek(step)
        return release.noise.rounded(self._config.directions, release.scale, release.law)

    def _entry(self, seeds: tuple[int, ...], totals: _Totals, noise: RoundedNoise | None) -> StepEntry:
        """Return the step for the log: the noised sums over batch size and 2 phi."""
        divisor = 2 * self._config.perturbation * self._release.divisor
        sums = torch.tensor(totals.sums, dtype=torch.float64)
        released = sums if noise is None else noise.added_to(sums)
        scalars = [scalar / divisor for scalar in released.tolist()]
        rate = float(self.optimizer.param_groups[0]["lr"])
        return StepEntry.rounded(rate=rate, seeds=seeds, scalars=tuple(self.ranks.broadcast(scalars)))


class _Totals:
    """Sums over the batch from the forward passes of one step."""

    def __init__(self) -> None:
        self.sums: list[float] = []
        self.clipped: list[float] = []
        self.bad: list[float] = []
        self.loss, self.correct = 0.0, 0.0
        self._observed = False

    def observe(self, plus: Tensor, right: Tensor) -> None:
        """Keep what metrics report, of the first forward pass only."""
        if not self._observed:
            self.loss = float(torch.where(torch.isfinite(plus), plus, 0.0).sum(dtype=torch.float64))
            self.correct = float(right.sum())
            self._observed = True

    def add(self, found: Sequence[Differences]) -> None:
        """Add up the differences along each direction."""
        self.sums = [float(differences.values.sum()) for differences in found]
        self.clipped = [differences.clipped for differences in found]
        self.bad = [differences.non_finite for differences in found]

    def numbers(self) -> list[float]:
        """Return all sums in one row, as processes exchange them."""
        return [*self.sums, *self.clipped, *self.bad, self.loss, self.correct]

    def replace(self, numbers: Sequence[float]) -> None:
        """Replace all sums by those of such a row."""
        n = len(self.sums)
        self.sums, self.clipped, self.bad = (list(numbers[k * n : (k + 1) * n]) for k in range(3))
        self.loss, self.correct = numbers[-2:]

    def record(self, n_records: int, *, place: torch.device, observe: bool) -> StepRecord:
        """Return the step's record for the engine's metrics."""
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
    """Return the records' numbers, or their positions in the batch if none are given."""
    return torch.arange(n_records) if records is None else records
