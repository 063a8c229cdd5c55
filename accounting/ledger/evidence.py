"""What a ledger holds of the device whose noise is credited: its certificates, and the alarms of its monitor.

A statement that rests on a certificate lists it among its assumptions. An alarm that speaks against the certified noise
divides a run: what was released before the last check in order keeps its guarantee, and nothing covers what came after,
since later steps build on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from accounting.guarantee import Assumption, Guarantee, Release, Status, from_json, to_json
from opusim import checks

_SHOWN = 12
"""Digits of a digest that a sentence shows."""


@dataclass(frozen=True, kw_only=True)
class CertificateFacts:
    """A certificate of a device's noise, as a statement needs it.

    Attributes:
        digest: Of the whole certificate; mechanisms name it.
        device: Name of the device.
        date: Day of its frames, ISO 8601.
        age_days: Its age in days when the run first used it.
        beta: Probability that its numbers are wrong, in (0, 1).
        law: The certified law in one line.
        remarks: What it takes on trust and does not cover.
        every_steps: Steps from one check of the monitor to the next.
        finds: Loss of the noise's variance against the certified one, as a share, that a single check finds with
            probability 0.99, in the mean over the outputs.
        finds_output: The same for a single output whose others lose nothing; None if a check finds none, or if
            a ledger of an earlier version does not say.
    """

    digest: str
    device: str
    date: str
    age_days: int
    beta: float
    law: str
    remarks: tuple[str, ...]
    every_steps: int
    finds: float
    finds_output: float | None = None

    def __post_init__(self) -> None:
        checks.in_unit_interval(closed="neither", beta=self.beta)
        checks.integer(minimum=0, age_days=self.age_days)
        checks.integer(minimum=1, every_steps=self.every_steps)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What a statement that rests on it takes on trust."""
        age = f"{self.age_days} day{'' if self.age_days == 1 else 's'} old when first used"
        looks = "every step" if self.every_steps == 1 else f"every {self.every_steps}th step"
        single = (
            "no loss at a single output"
            if self.finds_output is None
            else f"{100 * self.finds_output:.2g} % less at a single output"
        )
        texts = (
            f"certificate {self.digest[:_SHOWN]} of device {self.device!r}, dated {self.date}, {age}: {self.law}; it "
            f"is wrong with probability {self.beta:g}, which delta includes once",
            "the noise stayed at least as strong as certified from the calibration to the last step; the monitor "
            f"looked before {looks}, and with probability 0.99 one look finds {100 * self.finds:.2g} % less variance "
            f"in the mean over the outputs, and {single}",
            *self.remarks,
        )
        return tuple(Assumption(text=text) for text in texts)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return to_json(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Read back what `to_json` returned; raises ValueError."""
        return from_json(cls, content)


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """What a device's monitor stopped a run for.

    Attributes:
        step: The step before which it stopped; that step was not done.
        since: First step whose noise may have been weaker than certified, at most `step`; -1 also doubts what was read
            before the first step.
        found: What the monitor found, as text.
        covered: Whether the noise that it found was still as strong as certified.
    """

    step: int
    since: int
    found: str
    covered: bool

    def __post_init__(self) -> None:
        checks.integer(minimum=-1, since=self.since)
        checks.integer(minimum=max(self.since, 0), step=self.step)

    @property
    def text(self) -> str:
        """What a statement says of it."""
        if self.covered:
            return f"the monitor stopped the run before step {self.step}, at noise as strong as certified: {self.found}"
        begin = "what was read at the start" if self.since < 0 else f"step {self.since}"
        return (
            f"the monitor stopped the run before step {self.step}: {self.found}; from {begin} on, noise may have been "
            "weaker than certified"
        )

    @property
    def doubts(self) -> bool:
        """Whether something was released under noise that may have been too weak."""
        return not self.covered and self.since < self.step

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return to_json(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Read back what `to_json` returned; raises ValueError."""
        return from_json(cls, content)


def stated(
    guarantees: Callable[[float, int | None], list[Guarantee]],
    *,
    certificates: Sequence[CertificateFacts],
    alarms: Sequence[Alarm],
    doubts: Sequence[Alarm],
    delta: float,
) -> list[Guarantee]:
    """Return the guarantees of a ledger with what they owe to its certificates and alarms.

    Args:
        guarantees: Returns those of everything paid for (None), or of what was released before a step, at a delta.
        certificates: The ledger's.
        alarms: The ledger's.
        doubts: Those of them after which something was released under noise that may have been too weak.
        delta: In [0, 1).
    """
    whole = guarantees(delta, None)
    if not doubts:
        return [_with_certificates(one, certificates, alarms) for one in whole]
    first = min(doubts, key=lambda alarm: alarm.since)
    early = [
        replace(
            _with_certificates(one, certificates, alarms),
            mechanism=f"released before step {first.since}: {one.mechanism}",
        )
        for one in guarantees(delta, first.since)
        if one.status is Status.PROVEN_UNDER_DEVICE_MODEL and one.release is not Release.LAST_ITERATE
    ]
    return [_uncovered(one, first) if one.is_proven else one for one in whole] + early


def _with_certificates(
    guarantee: Guarantee, certificates: Sequence[CertificateFacts], alarms: Sequence[Alarm]
) -> Guarantee:
    """Return a guarantee under a device model with the certificates among its assumptions."""
    if guarantee.status is not Status.PROVEN_UNDER_DEVICE_MODEL:
        return guarantee
    texts = [assumption for certificate in certificates for assumption in certificate.assumptions]
    texts += [Assumption(text=alarm.text) for alarm in alarms if alarm.covered]
    return replace(guarantee, assumptions=(*guarantee.assumptions, *texts))


def _uncovered(guarantee: Guarantee, alarm: Alarm) -> Guarantee:
    """Return that nothing covers what was released from a step on."""
    return replace(
        guarantee,
        epsilon=math.inf,
        epsilon_lower=None,
        status=Status.NONE,
        reason=f"{alarm.text}, and nothing covers what was released since",
    )
