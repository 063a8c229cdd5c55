"""What an audit found, as data: one finding for each attack on each subject, and what that says of a claim."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from accounting.audit import AuditPlan, AuditResult, Estimator, Verdict
from accounting.guarantee import Guarantee
from training.errors import RunFolderError
from training.runs.storage import read_json

SCHEMA_VERSION = 1


class Role(StrEnum):
    """What was attacked."""

    RUN = "this run"
    NULL = "null control"
    PROTECTED = "protected control"
    BROKEN = "broken control"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One attack on one subject.

    Attributes:
        role: What was attacked.
        attack: The attack's name.
        members: The median score of the first world, in the attack's words.
        others: That of the second.
        auc: Probability that a member scores higher than another.
        result: The bound.
        claim: What a theorem says of this very game; None where none says anything finite.
    """

    role: Role
    attack: str
    members: str
    others: str
    auc: float
    result: AuditResult
    claim: Guarantee | None = None

    @property
    def refutes(self) -> bool:
        """Whether the bound exceeds what was said of the game."""
        return self.claim is not None and self.result.verdict(self.claim) is Verdict.REFUTED

    @property
    def says(self) -> str:
        """The finding in a few words, a control's with whether it came out as it must."""
        found, bound = self.result.epsilon_lower > 0, self.claim
        if self.role is Role.NULL:
            return "a false alarm: see the text" if found else "nothing, as it must"
        if self.role is Role.BROKEN:
            if bound is not None and self.result.ceiling <= bound.epsilon:
                return f"too few trials to exceed {bound.epsilon:.3g}"
            return "found, as it must be" if self.refutes else "not found by this attack"
        if bound is None:
            return "membership found" if found else "nothing found, which proves nothing"
        words = {
            Verdict.REFUTED: f"the step's proven {bound.epsilon:.3g} is refuted",
            Verdict.CONSISTENT: f"agrees with the step's proven {bound.epsilon:.3g}",
            Verdict.PROVES_NOTHING: f"below the step's proven {bound.epsilon:.3g}",
        }
        return words[self.result.verdict(bound)]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        result = asdict(self.result)
        result["plan"]["estimator"] = self.result.plan.estimator.value
        return {
            "role": self.role.value,
            "attack": self.attack,
            "members": self.members,
            "others": self.others,
            "auc": None if math.isnan(self.auc) else self.auc,
            "result": result,
            "claim": None if self.claim is None else self.claim.to_json(),
            "says": self.says,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Finding:
        """The finding that `to_json` wrote."""
        values = {key: value for key, value in content.items() if key != "says"}
        result = dict(values["result"])
        plan = dict(result["plan"])
        plan["estimator"] = Estimator(plan["estimator"])
        result["plan"] = AuditPlan(**plan)
        values["result"] = AuditResult(**result)
        values["role"] = Role(values["role"])
        values["auc"] = float("nan") if values["auc"] is None else values["auc"]
        if values["claim"] is not None:
            values["claim"] = Guarantee.from_json(values["claim"])
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class RunAudit:
    """The audit of a run.

    Attributes:
        findings: Of the run first, then of the controls.
        guarantees: What is said of the run, at the audit's delta.
        trials: Trials of the game on the run.
        control_trials: Trials of the games on the controls.
        seed: From which the whole audit can be repeated.
        step: Steps that the run had done where the audit began.
        release: What the attacker saw.
    """

    findings: tuple[Finding, ...]
    guarantees: tuple[Guarantee, ...]
    trials: int
    control_trials: int
    seed: int
    step: int
    release: str

    @property
    def strongest(self) -> Finding:
        """The finding on the run with the largest bound."""
        return max(
            (finding for finding in self.findings if finding.role is Role.RUN),
            key=lambda finding: finding.result.epsilon_lower,
        )

    @property
    def controls_hold(self) -> bool:
        """Whether every control came out as it must."""
        quiet = all(f.result.epsilon_lower == 0 for f in self.findings if f.role is Role.NULL)
        kept = not any(f.refutes for f in self.findings if f.role is Role.PROTECTED)
        return quiet and kept and any(f.refutes for f in self.findings if f.role is Role.BROKEN)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with the schema version."""
        return {
            "schema_version": SCHEMA_VERSION,
            "trials": self.trials,
            "control_trials": self.control_trials,
            "seed": self.seed,
            "step": self.step,
            "release": self.release,
            "controls_hold": self.controls_hold,
            "findings": [finding.to_json() for finding in self.findings],
            "guarantees": [guarantee.to_json() for guarantee in self.guarantees],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RunAudit:
        """The audit that `to_json` wrote.

        Raises:
            ValueError: Another schema version.
        """
        if content.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"audit.json: schema_version {content.get('schema_version')!r} is not {SCHEMA_VERSION}; "
                "audit the run anew"
            )
        return cls(
            findings=tuple(Finding.from_json(part) for part in content["findings"]),
            guarantees=tuple(Guarantee.from_json(part) for part in content["guarantees"]),
            **{key: content[key] for key in ("trials", "control_trials", "seed", "step", "release")},
        )


def read_audit(path: Path) -> RunAudit:
    """What an audit kept.

    Raises:
        RunFolderError: The file is no audit.
    """
    content = read_json(path)
    try:
        return RunAudit.from_json(content)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise RunFolderError(
            f"{path}: is no audit ({error!r}); run opusim audit again, or delete it"
        ) from error
