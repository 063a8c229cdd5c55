"""A self-test of the mechanism in words, at most 80 columns wide.

What a self-test of the mechanism found, as data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from opusim.tables import wrapped

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Check:
    """One statistic of what runs released, held against its law under the accounted mechanism.

    Attributes:
        name: What is compared, such as "noise: variance".
        observed: Its value; of several comparisons in one check, the least likely.
        expected: Its mean under the accounted mechanism.
        standard_error: Its standard deviation under the accounted mechanism.
        p_value: Probability, in [0, 1], of a value at least as far away, the number of comparisons allowed for.
        level: p-value below which the check raises an alarm.
        finds: The faults that this check is for.
    """

    name: str
    observed: float
    expected: float
    standard_error: float
    p_value: float
    level: float
    finds: str

    @property
    def alarm(self) -> bool:
        """Whether the accounted mechanism cannot explain the value."""
        return not self.p_value >= self.level  # NaN is an alarm


@dataclass(frozen=True, kw_only=True)
class MechanismAudit:
    """The self-test of one mechanism.

    Attributes:
        kind: The trainer.
        protection: What is protected (protection.kind).
        mode: "experiment" or "release".
        accounted: What the runs' ledgers say was released, in words.
        runs: Runs that were compared.
        steps: Steps of each run; for labels that are read once, the records of each run.
        records: Records of each run.
        coordinates: Released numbers of a step (or record) that hold noise only.
        seed: From which the runs are repeated; None in release mode.
        level: Probability of any alarm under the accounted mechanism.
        cpu_s: Processor time.
        checks: All checks.
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

    @property
    def alarms(self) -> tuple[Check, ...]:
        """The checks that raised an alarm."""
        return tuple(check for check in self.checks if check.alarm)

    @property
    def holds(self) -> bool:
        """Whether no check raised an alarm."""
        return not self.alarms

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with the schema version."""
        return {"schema_version": SCHEMA_VERSION, "holds": self.holds, **asdict(self)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> MechanismAudit:
        """The self-test that `to_json` wrote.

        Raises:
            ValueError: Another schema version.
        """
        values = dict(content)
        version = values.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"schema_version {version!r} of the self-test is not {SCHEMA_VERSION}; repeat the self-test"
            )
        values.pop("holds", None)
        values["checks"] = tuple(Check(**check) for check in values["checks"])
        return cls(**values)


_WIDTH = 80
_ROW = "{:<31}{:>10}{:>9}{:>11}{:>9}  {}"


def report_text(found: MechanismAudit) -> str:
    """What ran, a table of the checks, the result, and what no check can see."""
    header = _ROW.format("check", "observed", "expected", "std. error", "p-value", "verdict")
    rows = [_row(check) for check in found.checks]
    return "\n".join(
        [
            wrapped(_what_ran(found), widest=_WIDTH),
            "",
            header,
            "-" * len(header),
            *rows,
            "",
            *(
                wrapped(text, widest=_WIDTH) + "\n"
                for text in (_how_to_read(found), _result(found), _blind_spots(found))
            ),
        ]
    ).rstrip("\n")


def _row(check: Check) -> str:
    observed, expected = (f"{value:.3g}" for value in (check.observed, check.expected))
    error, p = (f"{value:.2g}" for value in (check.standard_error, check.p_value))
    return _ROW.format(check.name, observed, expected, error, p, "ALARM" if check.alarm else "agrees")


def _what_ran(found: MechanismAudit) -> str:
    seeds = "nothing seeded" if found.seed is None else f"seed {found.seed}"
    once = found.protection in ("label-readout", "label-randomized-response")
    length = "the labels read once" if once else f"{found.steps} steps"
    return (
        f"Self-test of {found.kind}, protection.kind = {found.protection}, {found.mode} mode: {found.runs} runs, "
        f"{length}, {found.records:,} identical records, {seeds}, {found.cpu_s:.1f} CPU s. Accounted a step: "
        f"{found.accounted}. Noise is in units of its accounted standard deviation, contributions in units of the clip."
    )


def _how_to_read(found: MechanismAudit) -> str:
    """Why a value several standard errors away may agree."""
    return (
        "A check of several comparisons, such as any two steps, shows the least likely one. Its p-value allows for "
        f"their number. A check raises an alarm at a p-value below {found.checks[0].level:.2g}."
    )


def _result(found: MechanismAudit) -> str:
    if found.holds:
        return (
            "No alarm: the released numbers agree with what was accounted. If the mechanism is right, one self-test "
            f"in {1 / found.level:,.0f} raises an alarm by chance."
        )
    worst = min(found.alarms, key=lambda check: check.p_value)
    named = "; ".join(f"{check.name} (may be: {check.finds})" for check in found.alarms)
    return (
        f"ALARM: the runs did not release what was accounted, so their guarantee does not hold. {named}. A correct "
        f"mechanism shows a value as unlikely as that of {worst.name!r} with probability {worst.p_value:.1g} at most."
    )


def _blind_spots(found: MechanismAudit) -> str:
    """What an agreeing self-test leaves open."""
    text = (
        "Not seen: faults that only other data, settings or lengths of run bring out (batches are drawn from identical "
        "records: which records enter is seen by number only); noise whose seed an attacker could guess; attacks on "
        "the rounding of floating-point numbers; a last iterate, which shows no steps; noise along a record's "
        "contribution in a single parameter, and so all noise of a parameter of one number"
    )
    if found.protection == "record" and found.kind == "pdfa":
        text += "; a device's noise inside readings, which is kept small here"
    return f"{text}. Agreement is no proof of privacy."
