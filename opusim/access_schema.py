"""How a device is used: how long it may take, who else may have it, and how it is watched."""

from __future__ import annotations

from pydantic import Field

from opusim.settings import Section


class AccessSettings(Section):
    """Patience with a device; the defaults are those of a simulation, which never fails.

    Attributes:
        timeout_s: longest time of one call, seconds; None waits for ever.
        attempts: how often a call is tried, reconnecting in between, before its failure is reported.
        backoff_s: wait before the second try, seconds; it doubles from try to try.
        exclusive: whether only one process on this machine may have the device open.
    """

    timeout_s: float | None = Field(default=None, gt=0)
    attempts: int = Field(default=1, ge=1, le=100)
    backoff_s: float = Field(default=0.5, ge=0)
    exclusive: bool = False


class MonitorSettings(Section):
    """Blank and reference frames between the data, which show whether the device is still what it was.

    Attributes:
        every_steps: steps from one check to the next.
        blank_readings: readings of nothing in a check, at least 2; narrow windows take more, to hold 4,096 numbers.
        reference_vectors: fixed ternary vectors that a check projects.
        baseline_readings: readings of each reference vector that the first look, at opening, averages, at least 8, and
            half the least number of blank ones; narrow windows take more of these, to hold 65,536 numbers.
        false_alarm_per_run: probability that a device within its tolerances is stopped in its first `checks` checks.
        checks: how many checks of one opening that probability covers.
        least_correlation: of the reference readings with their first ones, noise taken out.
        gain_tolerance: tolerated relative change of the readings' size.
        noise_tolerance: tolerated relative change of the noise's variance.
        silent_outputs: share of the outputs that may stop responding, or lose more than `gain_tolerance` and
            1 - `least_correlation` together.
        saturated_outputs: share of the outputs that may be saturated in a frame, or read one extreme value.
    """

    every_steps: int = Field(default=10, ge=1)
    blank_readings: int = Field(default=4, ge=2)
    reference_vectors: int = Field(default=8, ge=1)
    baseline_readings: int = Field(default=32, ge=8)
    false_alarm_per_run: float = Field(default=1e-6, gt=0, lt=0.01)
    checks: int = Field(default=100_000, ge=1)
    least_correlation: float = Field(default=0.98, gt=0, lt=1)
    gain_tolerance: float = Field(default=0.03, gt=0)
    noise_tolerance: float = Field(default=0.05, gt=0)
    silent_outputs: float = Field(default=0.01, ge=0, lt=1)
    saturated_outputs: float = Field(default=0.02, gt=0, lt=1)
