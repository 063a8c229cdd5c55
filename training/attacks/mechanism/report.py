"""What a self-test of the mechanism found, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

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
