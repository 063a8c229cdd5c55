"""An audit in words: a table, and a paragraph for a reader who knows no differential privacy.

What an audit found, as data: one finding for each attack on each subject, and what that says of a claim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from accounting.audit import AuditPlan, AuditResult, Estimator, Verdict
from accounting.guarantee import Guarantee, Status
from accounting.tables import number
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


def finding_rows(audit: RunAudit) -> list[dict[str, str]]:
    """One row a finding: what was attacked, how, the median scores, and the bound with its ceiling."""
    return [
        {
            "attacked": finding.role.value,
            "attack": finding.attack,
            "trials": f"{finding.result.n_in} + {finding.result.n_out}",
            "members": finding.members,
            "others": finding.others,
            "AUC": f"{finding.auc:.3f}",
            "missed + false": f"{finding.result.false_negatives} + {finding.result.false_positives}",
            "epsilon at least": f"{finding.result.epsilon_lower:.2f}",
            "of at most": f"{finding.result.ceiling:.2f}",
            "says": finding.says,
        }
        for finding in audit.findings
    ]


def paragraphs(audit: RunAudit) -> list[str]:
    """What was played, what was found of the run, what that says of each statement, and whether to believe it."""
    return [_played(audit), _found(audit), *_statements(audit), _controls(audit)]


def _played(audit: RunAudit) -> str:
    plan = audit.strongest.result.plan
    return (
        f"What was played: {audit.trials} times, from step {audit.step} of the run, its own trainer made one step with "
        f"{plan.pair}, by the toss of a coin. The attacker {plan.threat_model}, and says which it was. Half of the "
        "trials choose its threshold, the other half, counted in the table, give the bound: epsilon is at least so "
        f"much with confidence {plan.confidence:g} a row at delta {plan.delta:g} ({plan.estimator.value}), 0.95 for "
        "all rows of the run; a perfect attack "
        f"would have shown {audit.strongest.result.ceiling:.2f} with as many trials."
    )


def _found(audit: RunAudit) -> str:
    best = audit.strongest
    result = best.result
    if result.epsilon_lower == 0:
        return "Found: nothing. A better attack may exist; an audit never proves privacy."
    rate = f"{result.false_negatives} of {result.n_in} members missed, "
    rate += f"{result.false_positives} of {result.n_out} others"
    allowed = best.claim is not None and not best.refutes
    return (
        f"Found: {'no more than is proven' if allowed else 'membership'}. By the {best.attack} attack ({rate} taken "
        "for members) one step alone costs at least "
        f"epsilon {result.epsilon_lower:.2f}."
    )


def _statements(audit: RunAudit) -> list[str]:
    texts = []
    claim = audit.strongest.claim
    if claim is not None:
        texts.append(_of_the_game(audit.strongest, claim))
    return texts + [text for guarantee in audit.guarantees for text in _of_a_guarantee(audit, guarantee)]


def _of_the_game(finding: Finding, claim: Guarantee) -> str:
    text = (
        f"A step's theorem, for an attacker who knows that it was the record's turn, gives epsilon "
        f"{number(claim.epsilon)}. "
    )
    if finding.refutes:
        return text + (
            "It is REFUTED: the step does not do what the theorem assumes, so the guarantee of the run, which rests on "
            "it, does not hold either."
        )
    return text + (
        "The bound stays below it. The guarantee of the run, which rests on that step and on secret batches that this "
        "game does not keep secret, is not contradicted."
    )


def _of_a_guarantee(audit: RunAudit, guarantee: Guarantee) -> list[str]:
    """What the bound says of a statement about the run without secret batches."""
    name, result = f"The statement {guarantee.status.value!r}", audit.strongest.result
    if guarantee.is_proven:
        return []
    texts = [
        f"{name} gives no finite epsilon, so there is nothing to refute."
        if math.isinf(guarantee.epsilon)
        else f"{name}: epsilon {number(guarantee.epsilon)} {_verdict(result, guarantee)}."
    ]
    if guarantee.status is Status.CLAIMED and guarantee.formula_value is not None:
        formula = replace(guarantee, epsilon=guarantee.formula_value, reason=_reason(guarantee.formula_value))
        texts.append(
            f"The paper's formula with its hypotheses taken as given, {number(guarantee.formula_value)} for the whole "
            f"run, {_verdict(result, formula)}."
        )
    return [" ".join(texts)]


def _verdict(result: AuditResult, guarantee: Guarantee) -> str:
    if result.verdict(guarantee) is Verdict.REFUTED:
        return "is REFUTED: one step alone costs more"
    if guarantee.epsilon > result.ceiling:
        return f"is above what so many trials can show ({result.ceiling:.2f}), so this neither refutes nor supports it"
    return "is not contradicted"


def _reason(epsilon: float) -> str | None:
    return "the formula is infinite" if math.isinf(epsilon) else None


def _controls(audit: RunAudit) -> str:
    text = (
        "Controls: the null control asks the attacker about records that were in no batch (it must find nothing; one "
        "such bound in twenty may be above 0 by chance); the protected control plays the run with records protected by "
        "a known noise (no bound may exceed its theorem); in the broken control that noise is left out (an attack must "
        "find it). "
    )
    if audit.controls_hold:
        return text + "All came out as they must."
    failed = sorted({finding.role.value for finding in _failing(audit)})
    return (
        f"{text}NOT all came out as they must ({', '.join(failed)}): repeat the audit with more trials and another "
        "seed before believing it."
    )


def _failing(audit: RunAudit) -> list[Finding]:
    broken = [finding for finding in audit.findings if finding.role is Role.BROKEN]
    missed = [] if any(finding.refutes for finding in broken) else broken
    return missed + [
        finding
        for finding in audit.findings
        if (finding.role is Role.NULL and finding.result.epsilon_lower > 0)
        or (finding.role is Role.PROTECTED and finding.refutes)
    ]
