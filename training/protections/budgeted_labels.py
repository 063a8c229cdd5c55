"""Labels with a budget for each record: noise on every layer's signal, accounted by leverages and a filter.

The features are public, the labels are protected. The signal delta_li of record i at layer l, slopes included, is
shortened to norm tau. Then noise is added to it, and to every weight:

    U_l = sum_i (delta_li + g_li) h_li^T + sqrt(lambda) sigma Xi_l,  g ~ N(0, sigma^2), sigma = z tau,

Another label of record i shifts U_l by at most Delta_l h_i, with Delta_l = 2 tau, and at the output also at most the
largest distance of two errors. Every row of U_l has covariance sigma^2 (H^T H + lambda I), so
mu_i^2 = sum_l Delta_l^2 lev_li / sigma^2. Before the step is computed, the filter charges mu_i^2 to each record. A
record that cannot pay keeps its noise and loses its signal, and so does a signal that is not finite.
Source: docs/privacy-labels.md, sections 1 and 2 (leverage scores, a budget for each record).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from accounting.labels.budget import PerRecordBudget, step_mu_bound
from accounting.labels.mechanisms import LabelBudget
from accounting.ledger.ledger import Ledger
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.randomness.streams import NoiseStream
from training.networks.clipping import scale_to_ball
from training.networks.contributions.sums import Contributions
from training.protections.base import (
    PrivateGradients,
    Protection,
    calibrated_once,
    linear_uses,
    noise_std,
    with_constant,
    write_gradient,
)
from training.protections.metric import batch_leverages
from training.protections.planning import epsilon_of
from training.runs.folder import RunFolder

_ERROR_DISTANCE = 2**0.5
"""Largest distance of two errors h - y of one record, before the output's slope."""
_PAYMENT = "label budget"
"""What a ledger calls the payment for every record's budget."""
_SPENDING = 0.8
"""Share of a label budget that an average record is meant to spend; the rest is for records of high leverage."""


class LabelBudgetProtection(Protection):
    """Labels: noise on every layer's signal, and a budget for each record, which is paid for once."""

    def calibrated(self) -> float | None:
        """See Protection.calibrated: a record of average leverage spends a stated share of its budget by the end.

        The mean leverage in a batch of m is at most (fan_in + 1) / m, and mu^2 = 4 lev / z^2 for each layer and step.
        """
        if self.options.noise_multiplier is not None:
            return self.options.noise_multiplier
        sampler = self.plan.sampler
        batch = sampler.expected_batch_size
        fan_ins = [linear.in_features + (linear.bias is not None) for linear in self.plan.network.linears]
        leverage = sum(min(1.0, fan_in / batch) for fan_in in fan_ins)
        visits = self.plan.total_steps * batch / sampler.n_records
        return 2 * math.sqrt(visits * leverage / _SPENDING) / self.budget.budget_mu

    def pay_upfront(self, ledger: Ledger, device: NoisyDevice | None, folder: RunFolder) -> None:
        """Pay for a budget that covers the whole run; a release run that was killed spends it again.

        The checkpoint holds what each record has spent (`BudgetedLabels.state`), so a run that stopped cleanly resumes
        under the same budget.
        """
        ledger.pay_once(_PAYMENT, self.budget, whole_run=True)

    def gradients(self, device: NoisyDevice | None) -> BudgetedLabels:
        """See Protection.gradients."""
        options = self.options
        return BudgetedLabels(
            budget_mu=self.budget.budget_mu,
            n_records=len(self.dataset.train),
            clip_norm=options.clip,
            noise_multiplier=self.noise_multiplier,
            floor=options.floor,
            noise=self.central_noise(device),
            output_gain=self.algorithm.updates.output_gain
            * self.plan.network.activations[-1].slope_bounds[1],
        )

    def work_of_step(self, records: float, n_outputs: int) -> DeviceWork:
        """See Protection.work_of_step; each layer's signals have noise, and its sum, its bias included."""
        sizes = [
            size
            for linear in self.plan.network.linears
            for size in (
                records * linear.out_features,
                linear.out_features * (linear.in_features + (linear.bias is not None)),
            )
        ]
        return self.noise_work(sizes, n_outputs)

    def whole_run(self) -> LabelBudget:
        """See Protection.whole_run."""
        return self.budget

    @property
    def budget(self) -> LabelBudget:
        """The budget of every record's label in the whole run."""
        options = self.options
        start = LabelBudget(budget_mu=1.0, device_noise=options.noise == "device", **self.plan.credit)
        return calibrated_once(start, epsilon=epsilon_of(options), delta=options.delta)


class BudgetedLabels(PrivateGradients):
    """Writes noised gradients that protect labels, and charges every record's budget.

    Args:
        budget_mu: B > 0; the whole run is B-GDP for labels.
        n_records: Records of the training set.
        clip_norm: tau, the ball of each layer's signal, in [1e-12, 1e12].
        noise_multiplier: z > 0.
        floor: lambda over the mean of the diagonal of H^T H, > 0.
        noise: Source of independent N(0, 1).
        output_gain: By how much the feedback and the slope of the output layer may stretch the distance of two errors
            on their way to its signal, >= 0; infinity if nothing bounds it.
    """

    def __init__(
        self,
        *,
        budget_mu: float,
        n_records: int,
        clip_norm: float,
        noise_multiplier: float,
        floor: float,
        noise: NoiseStream,
        output_gain: float = 1.0,
    ) -> None:
        super().__init__(noise)
        self._output_distance = _ERROR_DISTANCE * output_gain
        self._filter = PerRecordBudget(budget_mu=budget_mu, n_records=n_records)
        self._spent = torch.zeros(n_records, dtype=torch.float64)
        self._clip_norm = clip_norm
        self._noise_std = noise_std(clip_norm=clip_norm, noise_multiplier=noise_multiplier)
        self._floor = floor

    @property
    def state(self) -> dict[str, Tensor]:
        """What each record has spent, which is public."""
        return {"label_spending": self._spent}

    def _write(
        self,
        parts: Iterable[Contributions],
        *,
        records: Tensor | None = None,
        public_inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """See PrivateGradients._write."""
        if records is None:
            raise ValueError("records is missing; the filter must know whose budget a batch spends")
        (found,) = parts
        uses = linear_uses(found)
        rows = [with_constant(use.h[:, 0], bias=use.bias is not None) for use in uses]
        scores, ridges = self._leverages(rows)
        keeps = self._charge(records, scores)[:, None]
        divisor = max(len(records), 1)
        for use, row, ridge in zip(uses, rows, ridges, strict=True):
            delta = use.delta[:, 0]
            finite = torch.isfinite(delta).all(dim=1, keepdim=True)  # a label must not decide what overflows
            signal = torch.where(keeps & finite, scale_to_ball(delta, self._clip_norm), 0.0)
            noisy = self._noise.add_rounded(signal, self._noise_std)
            total = noisy.t() @ row  # (n_l, n_(l-1) + 1)
            noisy = self._noise.add_rounded(total, ridge**0.5 * self._noise_std)
            write_gradient(use, noisy.div_(divisor))

    def _leverages(self, rows: Sequence[Tensor]) -> tuple[list[np.ndarray], list[float]]:
        """Return the leverages of every layer, shapes (batch, 1), and lambda."""
        if not len(rows[0]):
            return [np.zeros((0, 1)) for _ in rows], [self._floor for _ in rows]
        pairs = [batch_leverages(row, floor=self._floor) for row in rows]
        return [scores.cpu().numpy()[:, None] for scores, _ in pairs], [ridge for _, ridge in pairs]

    def _charge(self, records: Tensor, scores: Sequence[np.ndarray]) -> Tensor:
        """Return which records can pay, shape (batch,), bool."""
        distances = [2 * self._clip_norm] * len(scores)
        distances[-1] = min(distances[-1], self._output_distance)
        mu = step_mu_bound(distances, scores, [self._noise_std] * len(scores))
        self._filter.restore(self._spent.numpy())
        keeps = self._filter.charge(records.cpu().numpy(), mu)
        self._spent.copy_(torch.from_numpy(self._filter.spent))
        return torch.from_numpy(keeps).to(records.device)
