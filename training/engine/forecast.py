"""What a run will take of its device, before its first step: frames, time and energy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork, Usage
from opusim.training.engine.plan import RunPlan

OBSERVED_STEPS = 5
"""Steps at the end of each epoch whose diagnostics are averaged; each costs about another step."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a run is going to take of its open device, as the device's description tells.

    Where batches are random, figures are means. Draws of noise whose size follows the batch are rounded up to whole
    readings of a mean batch.

    Attributes:
        plan: The run.
        device: Its open device.
        before: Work of a new run before its first step.
        step: Work of a step.
        observed: Work of a step that fills in its diagnostics.
        is_mean: Whether the work of a step is random, because it follows from a batch whose size is.
    """

    plan: RunPlan
    device: NoisyDevice
    before: DeviceWork
    step: DeviceWork
    observed: DeviceWork
    is_mean: bool

    @classmethod
    def of(cls, plan: RunPlan, device: NoisyDevice | None) -> Self | None:
        """Return the forecast of a run whose trainer is not made yet.

        None without a device, or if the algorithm tells its work only once a step is done.

        Args:
            plan: The run.
            device: Its open device, or None without one.
        """
        if device is None:
            return None
        algorithm, n_outputs, records = plan.algorithm, device.n_outputs, _mean_batch(plan)
        step = algorithm.work_of_step(records, n_outputs, observed=False)
        observed = algorithm.work_of_step(records, n_outputs, observed=True)
        if step is None or observed is None:
            return None
        follows = algorithm.work_of_step(2 * records, n_outputs, observed=False) != step
        return cls(
            plan=plan,
            device=device,
            before=algorithm.work_before(),
            step=step,
            observed=observed,
            is_mean=follows and plan.config.sampler.is_random,
        )

    def usage(self, first: int = 0) -> Usage:
        """Return what the run will take from a step on, and what opening the device took.

        Args:
            first: Steps that are done.
        """
        plan, device = self.plan, self.device
        looks = _observed(plan, plan.total_steps) - _observed(plan, first)
        work = self.step.times(plan.total_steps - first - looks) + self.observed.times(looks)
        work += device.upkeep(first, plan.total_steps, inspections=_inspections(plan, first))
        if not first:
            work += self.before
        return device.usage + work.usage(device.description.frames, n_outputs=device.n_outputs)


def _mean_batch(plan: RunPlan) -> float:
    """Return the mean number of records of a batch; if it must not be told, the public constant that stands for it."""
    return plan.sampler.expected_batch_size if plan.config.tells_records else plan.config.divisor


def _observed(plan: RunPlan, steps: int) -> int:
    """Return how many of the first steps fill in their diagnostics."""
    if plan.config.mode == "release":
        return 0
    epochs, rest = divmod(steps, plan.sampler.steps_per_epoch)
    each = min(OBSERVED_STEPS, plan.sampler.steps_per_epoch)
    return epochs * each + max(rest - (plan.sampler.steps_per_epoch - each), 0)


def _inspections(plan: RunPlan, first: int) -> int:
    """Return how often a certified device is checked at checkpoints and at the end."""
    if plan.certificate is None:
        return 0
    per_epoch = plan.sampler.steps_per_epoch
    every = plan.config.checkpoint.every_steps or per_epoch
    steps = range(first + 1, plan.total_steps + 1)
    return 1 + sum(step % every == 0 or step % per_epoch == 0 for step in steps)
