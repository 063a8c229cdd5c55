"""The result of a self-test, as data and as text of at most 80 columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from pydantic import computed_field

from opusim.p_values import bonferroni, chi_squared_p_value, cosine_p_value, doubt, normal_p_value
from opusim.tables import wrapped
from opusim.training.runs.storage import record_from_json, record_json

SCHEMA_VERSION = 1
_WIDTH = 80
_ROW = "{:<31}{:>10}{:>9}{:>11}{:>9}  {}"


@dataclass(frozen=True)
class Check:
    """One statistic of what runs released, compared with its law under the accounted mechanism.

    Attributes:
        name: The statistic, such as "noise: variance".
        observed: Its value; for several comparisons in one check, the least likely value.
        expected: Its mean under the accounted mechanism.
        standard_error: Its standard deviation under the accounted mechanism.
        p_value: Probability of a value at least as far away, in [0, 1], corrected for the number of comparisons.
        finds: The faults that raise this alarm.
        level: The check raises an alarm if its p-value is below this; NaN until the number of checks is known.
    """

    name: str
    observed: float
    expected: float
    standard_error: float
    p_value: float
    finds: str
    level: float = math.nan

    @classmethod
    def normal(
        cls, name: str, observed: float, expected: float, error: float, finds: str, *, comparisons: int = 1
    ) -> Self:
        """Return the check of a value whose law is normal.

        Args:
            name: The statistic.
            observed: Its value, the least likely one of several.
            expected: Its mean.
            error: Its standard deviation; with 0 any value is an alarm.
            finds: The faults that raise this alarm.
            comparisons: Number of values, for which the p-value is corrected.
        """
        p = normal_p_value((observed - expected) / error) if error else 0.0
        return cls(name, observed, expected, error, bonferroni(p, comparisons), finds)

    @classmethod
    def variance(cls, name: str, parts: Sequence[np.ndarray], finds: str) -> Self:
        """Return the check of the least likely variance of several arrays of independent N(0, 1); empty ones agree."""
        found = []
        for part in parts:
            total = float(np.sum(np.square(part)))
            found.append((chi_squared_p_value(total, part.size) if part.size else 1.0, total, part.size))
        p, total, size = min(found, key=lambda each: doubt(each[0]))
        observed, error = (total / size, math.sqrt(2 / size)) if size else (1.0, math.inf)
        return cls(name, observed, 1.0, error, bonferroni(p, len(parts)), finds)

    @classmethod
    def correlation(cls, name: str, found: Sequence[tuple[float, int]], finds: str) -> Self:
        """Return the check of the least likely cosine; of each the value and the dimension, means known to be 0."""
        p, (r, dimension) = min(
            ((float(cosine_p_value(*each)), each) for each in found), key=lambda pair: doubt(pair[0])
        )
        return cls(name, r, 0.0, 1 / math.sqrt(dimension), bonferroni(p, len(found)), finds)

    @property
    def alarm(self) -> bool:
        """Whether the accounted mechanism cannot explain the value."""
        return not self.p_value >= self.level  # NaN is an alarm


@dataclass(frozen=True, kw_only=True)
class MechanismAudit:
    """The self-test of one mechanism.

    Attributes:
        kind: The trainer.
        protection: The protection (protection.kind).
        mode: "experiment" or "release".
        accounted: The mechanism in the runs' ledgers, as text.
        runs: Number of runs that were compared.
        steps: Steps of each run; the number of records if each label is read once.
        records: Records of each run.
        coordinates: Released numbers of a step (or record) that hold only noise.
        seed: Seed that repeats the runs; None in release mode.
        level: Probability of any alarm under the accounted mechanism.
        cpu_s: Processor time, seconds.
        checks: All checks.
        one_look: Whether the labels are read or randomized once, so that there are no steps.
        quiet_device: Whether records were protected and the noise of the device's readings was kept small.
        model: What was trained, as `audit_mechanism` names it.
        single_records: Whether further runs had records that differ, in small batches.
    """

    kind: str
    protection: str
    mode: str
    accounted: str
    runs: int
    steps: int
    records: int
    coordinates: int
    seed: int | None
    level: float
    cpu_s: float
    checks: tuple[Check, ...]
    one_look: bool = False
    quiet_device: bool = False
    model: str = "mlp"
    single_records: bool = False

    @property
    def alarms(self) -> tuple[Check, ...]:
        """The checks that raised an alarm."""
        return tuple(check for check in self.checks if check.alarm)

    @computed_field  # type: ignore[prop-decorator]  # mypy does not know decorated properties
    @property
    def holds(self) -> bool:
        """Whether no check raised an alarm."""
        return not self.alarms

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with the schema version."""
        return record_json(self, SCHEMA_VERSION)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> MechanismAudit:
        """Return the self-test that `to_json` converted.

        Raises:
            ValueError: The content is of another schema version, or is not a self-test.
        """
        return record_from_json(cls, content, SCHEMA_VERSION)


def report_text(found: MechanismAudit) -> str:
    """Return the settings, a table of the checks, the result, and what the checks cannot detect."""
    header = _ROW.format("check", "observed", "expected", "std. error", "p-value", "verdict")
    rows = []
    for check in found.checks:
        observed, expected = (f"{value:.3g}" for value in (check.observed, check.expected))
        error, p = (f"{value:.2g}" for value in (check.standard_error, check.p_value))
        verdict = "ALARM" if check.alarm else "agrees"
        rows.append(_ROW.format(check.name, observed, expected, error, p, verdict))
    # a value several standard errors away may agree
    how_to_read = (
        "A check of several comparisons, such as any two steps, shows the least likely one; its p-value is corrected "
        f"for their number. A check raises an alarm if its p-value is below {found.checks[0].level:.2g}."
    )
    texts = (how_to_read, _result(found), _limits(found))
    shown = "\n\n".join(wrapped(text, widest=_WIDTH) for text in texts)
    settings = wrapped(_settings(found), widest=_WIDTH)
    return "\n".join([settings, "", header, "-" * len(header), *rows, "", shown])


def _settings(found: MechanismAudit) -> str:
    seeds = "nothing seeded" if found.seed is None else f"seed {found.seed}"
    trained = "" if found.model == "mlp" else f" on model = {found.model!r}"
    length = "labels read once" if found.one_look else f"{found.steps} steps"
    return (
        f"Self-test of {found.kind}{trained} with protection.kind = {found.protection} in {found.mode} mode: "
        f"{found.runs} runs, {length}, {found.records:,} identical records, {seeds}, {found.cpu_s:.1f} CPU s. "
        f"Accounted per step: {found.accounted}. Noise is in units of its accounted standard deviation, contributions "
        "in units of the clip."
    )


def _result(found: MechanismAudit) -> str:
    if found.holds:
        return (
            "No alarm: the released numbers agree with the accounted mechanism. If the mechanism is correct, one "
            f"self-test in {1 / found.level:,.0f} raises an alarm by chance."
        )
    worst = min(found.alarms, key=lambda check: check.p_value)
    named = "; ".join(f"{check.name} (possible cause: {check.finds})" for check in found.alarms)
    return (
        "ALARM: the runs did not release what was accounted, so their guarantee does not hold. Checks that failed: "
        f"{named}. A correct mechanism shows a value as unlikely as that of {worst.name!r} with probability at most "
        f"{worst.p_value:.1g}."
    )


def _limits(found: MechanismAudit) -> str:
    """Say what an agreeing self-test does not prove."""
    text = "Not tested: faults that appear only with other data, settings or run lengths"
    if not found.single_records:
        text += " (the records are identical, so only the number of records in a batch is visible)"
    text += (
        "; noise whose seed an attacker could guess; attacks on the rounding of floating-point numbers; noise along a "
        "record's contribution in a single parameter, and so all noise of a parameter with one number"
    )
    if found.quiet_device:
        text += "; a device's noise in its readings, which is kept small here"
    return f"{text}. Agreement does not prove privacy."
