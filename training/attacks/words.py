"""An audit in words: a table, and a paragraph for a reader who knows no differential privacy."""

from __future__ import annotations

import math
from dataclasses import replace

from accounting.audit import AuditResult, Verdict
from accounting.guarantee import Guarantee, Status
from accounting.tables import number
from training.attacks.findings import Finding, Role, RunAudit


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
