"""What an audit found: one finding for each attack on each subject, as data, as a table and as text.

The text is for readers who do not know differential privacy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, PlainSerializer, computed_field

from accounting.audit import AuditResult, Estimate, Estimator, Verdict, clopper_pearson_upper
from accounting.guarantee import Guarantee, Status
from accounting.tables import number
from training.runs.storage import StoredGuarantee, read_record, record_from_json, record_json

SCHEMA_VERSION = 1
_REMEDY = "run opusim audit again, or delete it"

NullableFloat = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: None if math.isnan(value) else value),
]
"""A number that may be NaN, which JSON writes as null."""


LOW_RATE = 1e-3
"""The rate of false positives at which an attack's true positives are told."""
_WEAK = 0.5
"""The power below which an audit is called weak."""
_CURVE_POINTS = 200


class Role(StrEnum):
    """The subject of an attack."""

    RUN = "this run"
    NULL = "null control"
    PROTECTED = "protected control"
    BROKEN = "broken control"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What an attack's scores say at every threshold.

    Attributes:
        false_positive: Shares of the second world's scores at or above each threshold, falling thresholds.
        true_positive: The same of the first world's.
        low_true_positive: Share of the first world's scores above a threshold that was chosen on the other half of the
            trials to give `LOW_RATE` false positives.
        low_limits: Its Clopper-Pearson limits, 95 % confidence.
        low_false_positive: The share of false positives that this threshold gave.
    """

    false_positive: tuple[float, ...]
    true_positive: tuple[float, ...]
    low_true_positive: float
    low_limits: tuple[float, float]
    low_false_positive: float

    @classmethod
    def of(cls, first: np.ndarray, second: np.ndarray) -> Curve:
        """Return the curve of the scores of both worlds, shapes (n,) and (m,)."""
        thresholds = np.unique(np.concatenate([first, second]))[::-1]
        alarms = 1 - np.searchsorted(np.sort(second), thresholds) / len(second)
        hits = 1 - np.searchsorted(np.sort(first), thresholds) / len(first)
        wanted = np.geomspace(0.5 / len(second), 1.0, _CURVE_POINTS)
        kept = np.unique(
            np.append(np.searchsorted(alarms, wanted, side="right").clip(1) - 1, len(alarms) - 1)
        )
        half = len(second) // 2
        choosing, using = second[:half], second[half:]
        threshold = np.sort(choosing)[::-1][math.floor(LOW_RATE * half)]
        caught = int(np.sum(first > threshold))
        low = 1 - clopper_pearson_upper(len(first) - caught, len(first), 0.025)
        return cls(
            false_positive=tuple(alarms[kept].tolist()),
            true_positive=tuple(hits[kept].tolist()),
            low_true_positive=caught / len(first),
            low_limits=(low, clopper_pearson_upper(caught, len(first), 0.025)),
            low_false_positive=float(np.mean(using > threshold)),
        )


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One attack on one subject.

    Attributes:
        role: The subject.
        attack: Name of the attack.
        members: Median score of the first world, as text.
        others: Median score of the second world, as text.
        auc: Probability that a member scores higher than a non-member, in [0, 1]; NaN without scores.
        result: The lower bound on epsilon.
        claim: A theorem's guarantee for this very game, or None if none gives a finite epsilon.
        scope: What the claim covers: one step, or the whole run.
        curve: Its true and false positives at every threshold, or None if an older version kept none.
        actual: Of a broken control the finite epsilon that its code really has; None if it is not known.
        estimate: What the scores say at face value, or None if it was not made.
        power: Probability with which as many trials would refute the claim at half of the noise; None if not known.
    """

    role: Role
    attack: str
    members: str
    others: str
    auc: NullableFloat
    result: AuditResult
    claim: StoredGuarantee | None = None
    scope: Literal["step", "run"] = "step"
    curve: Curve | None = None
    actual: float | None = None
    estimate: Estimate | None = None
    power: float | None = None

    @property
    def refutes(self) -> bool:
        """Whether the bound exceeds the claimed epsilon of the game."""
        return self.claim is not None and self.result.verdict(self.claim) is Verdict.REFUTED

    @computed_field  # type: ignore[prop-decorator]  # mypy does not know decorated properties
    @property
    def says(self) -> str:
        """The finding in a few words; for a control, whether it behaved as required."""
        found, bound = self.result.epsilon_lower > 0, self.claim
        if self.role is Role.NULL:
            return "a false alarm: see the text" if found else "nothing found, as required"
        if self.role is Role.BROKEN:
            if bound is not None and self.result.ceiling <= bound.epsilon:
                return f"too few trials to exceed {bound.epsilon:.3g}"
            really = "" if self.actual is None else f": it really costs {self.actual:.3g}"
            return ("found, as required" if self.refutes else "not found by this attack") + really
        if bound is None:
            word = "membership" if self.scope == "step" else "the world"
            return f"{word} found" if found else "nothing found, which proves nothing"
        texts = {
            Verdict.REFUTED: f"the {self.scope}'s proven {bound.epsilon:.3g} is refuted",
            Verdict.CONSISTENT: f"agrees with the {self.scope}'s proven {bound.epsilon:.3g}",
            Verdict.PROVES_NOTHING: f"below the {self.scope}'s proven {bound.epsilon:.3g}",
        }
        return texts[self.result.verdict(bound)]


@dataclass(frozen=True, kw_only=True)
class RunAudit:
    """The audit of a run.

    Attributes:
        findings: Findings on the run, then on the controls.
        guarantees: The run's guarantees at the audit's delta.
        trials: Trials of the game on the run.
        control_trials: Trials of the game on each control.
        seed: Seed that repeats the whole audit.
        step: Steps that the run had done when the audit began.
        release: What the attacker saw.
        game: The game in a sentence, if it is about the whole run and not about one of its steps.
        note: What the reader must know besides, such as a mechanism whose randomness no seed repeats.
    """

    findings: tuple[Finding, ...]
    guarantees: tuple[StoredGuarantee, ...]
    trials: int
    control_trials: int
    seed: int
    step: int
    release: str
    game: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if all(finding.role is not Role.RUN for finding in self.findings):
            raise ValueError("findings: none is on the run itself")

    @property
    def strongest(self) -> Finding:
        """The finding on the run with the largest bound."""
        return max(
            (finding for finding in self.findings if finding.role is Role.RUN),
            key=lambda finding: finding.result.epsilon_lower,
        )

    @computed_field  # type: ignore[prop-decorator]
    @property
    def controls_hold(self) -> bool:
        """Whether every control behaved as required."""
        return not _failed_controls(self)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with the schema version."""
        return record_json(self, SCHEMA_VERSION)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RunAudit:
        """Return the audit that `to_json` converted.

        Raises:
            ValueError: The content is of another schema version, or is not an audit.
        """
        return record_from_json(cls, content, SCHEMA_VERSION)


def read_audit(path: Path) -> RunAudit:
    """Read the audit in a file.

    Raises:
        RunFolderError: The file is not an audit.
    """
    return read_record(path, RunAudit, SCHEMA_VERSION, what="an audit", remedy=_REMEDY)


def _failed_controls(audit: RunAudit) -> list[Finding]:
    """Return the findings of controls that did not behave as required."""
    broken = [finding for finding in audit.findings if finding.role is Role.BROKEN]
    missed = [] if any(finding.refutes for finding in broken) else broken
    return missed + [
        finding
        for finding in audit.findings
        if (finding.role is Role.NULL and finding.result.epsilon_lower > 0)
        or (finding.role is Role.PROTECTED and finding.refutes)
    ]


def finding_rows(audit: RunAudit) -> list[dict[str, str]]:
    """Return a table row for each finding: subject, attack, median scores, and the bound with its ceiling."""
    return [
        {
            "subject": finding.role.value,
            "attack": finding.attack,
            "trials": f"{finding.result.n_in} + {finding.result.n_out}",
            "members": finding.members,
            "others": finding.others,
            "AUC": f"{finding.auc:.3f}",
            "missed + false": f"{finding.result.false_negatives} + {finding.result.false_positives}",
            "epsilon at least": f"{finding.result.epsilon_lower:.2f}",
            "ceiling": ceiling_text(finding.result),
            "finding": finding.says,
        }
        for finding in audit.findings
    ]


def paragraphs(audit: RunAudit) -> list[str]:
    """Return the audit as text: the game, the result, what it means for each statement, and the controls."""
    texts = [_game(audit), _result(audit), *_statements(audit), _power(audit), _controls(audit), audit.note]
    return [text for text in texts if text]


def ceiling_text(result: AuditResult) -> str:
    """Return what a perfect attack would have shown; noise that was drawn could have shown any epsilon."""
    return "any" if result.plan.estimator is Estimator.DRAWN_NOISE else f"{result.ceiling:.2f}"


def _game(audit: RunAudit) -> str:
    plan = audit.strongest.result.plan
    if audit.game:
        how = (
            "Half of the trials choose the attacker's threshold; the other half, as counted, give the bound."
        )
        most = (
            f" With as many trials, a perfect attack would have shown {audit.strongest.result.ceiling:.2f}."
        )
        if plan.estimator is Estimator.DRAWN_NOISE:
            how, most = (
                "What a trial shows without noise is known, so the noise that was drawn gives the bound.",
                "",
            )
        return (
            f"Game: {audit.game}. {audit.trials:,} independent trials, half of them in each of two worlds: "
            f"{plan.pair}. The attacker {plan.threat_model}. {how} Each row states a lower bound on epsilon at delta "
            f"{plan.delta:g} with confidence {plan.confidence:g} ({plan.estimator.value}), 0.95 for all rows of the "
            f"run together.{most}"
        )
    return (
        f"Game: {audit.trials} times, the run's own trainer made one step from step {audit.step} of the run. A coin "
        f"toss chose one of two worlds: {plan.pair}. The attacker {plan.threat_model}, and guesses the outcome. Half "
        "of the trials choose the attacker's threshold; the other half, counted in the table, give the bound. Each row "
        f"states a lower bound on epsilon at delta {plan.delta:g} with confidence {plan.confidence:g} "
        f"({plan.estimator.value}), 0.95 for all rows of the run together. With as many trials, a perfect attack would "
        f"have shown {audit.strongest.result.ceiling:.2f}."
    )


def _result(audit: RunAudit) -> str:
    best = audit.strongest
    result = best.result
    if result.epsilon_lower == 0:
        return "Found: nothing. A better attack may exist; an audit never proves privacy."
    allowed = best.claim is not None and not best.refutes
    if audit.game:
        return (
            f"Found: {'no more than is proven' if allowed else 'the protected value'}. The {best.attack} attack missed "
            f"{result.false_negatives} of {result.n_in} trials of the first world and took {result.false_positives} of "
            f"{result.n_out} of the second for the first, so the run costs at least epsilon {result.epsilon_lower:.2f}."
        )
    return (
        f"Found: {'no more than is proven' if allowed else 'membership'}. The {best.attack} attack missed "
        f"{result.false_negatives} of {result.n_in} members and took {result.false_positives} of {result.n_out} others "
        f"for members, so a single step costs at least epsilon {result.epsilon_lower:.2f}."
    )


def _statements(audit: RunAudit) -> list[str]:
    claim = audit.strongest.claim
    about = _statement_on_the_game if audit.game else _statement_on_the_step
    texts = [] if claim is None else [about(audit.strongest, claim)]
    result = audit.strongest.result
    unproven = [guarantee for guarantee in audit.guarantees if not guarantee.is_proven]
    return texts + [_statement_on_the_run(result, guarantee) for guarantee in unproven]


def _statement_on_the_step(finding: Finding, claim: Guarantee) -> str:
    text = (
        "The theorem for one step, against an attacker who knows which step the record may take part in, gives epsilon "
        f"{number(claim.epsilon)}. "
    )
    if finding.refutes:
        return text + (
            "It is REFUTED: the step does not do what the theorem assumes. The guarantee of the run rests on that "
            "step, so it does not hold either."
        )
    return text + (
        "The bound stays below it. The guarantee of the run rests on that step and on secret batches, which this game "
        "does not keep secret; it is not contradicted."
    )


def _statement_on_the_game(finding: Finding, claim: Guarantee) -> str:
    text = f"The run's {claim.status.value} epsilon is {number(claim.epsilon)}. "
    if finding.refutes:
        return f"{text}It is REFUTED: the mechanism does not do what the theorem assumes."
    share = finding.result.epsilon_lower / claim.epsilon
    return f"{text}The bound reaches {share:.2f} of it and does not contradict it."


def _statement_on_the_run(result: AuditResult, guarantee: Guarantee) -> str:
    """Say what the bound means for an unproven statement about the run."""
    name = f"The statement {guarantee.status.value!r}"
    if math.isinf(guarantee.epsilon):
        text = f"{name} gives no finite epsilon, so there is nothing to refute."
    else:
        text = f"{name}: epsilon {number(guarantee.epsilon)} {_verdict(result, guarantee)}."
    value = guarantee.formula_value
    if guarantee.status is not Status.CLAIMED or value is None:
        return text
    reason = "the formula is infinite" if math.isinf(value) else None
    verdict = _verdict(result, replace(guarantee, epsilon=value, reason=reason))
    return f"{text} The paper's formula, if its hypotheses held, gives {number(value)} for the whole run: {verdict}."


def _verdict(result: AuditResult, guarantee: Guarantee) -> str:
    if result.verdict(guarantee) is Verdict.REFUTED:
        return "is REFUTED, since a single step already costs more"
    if guarantee.epsilon > result.ceiling:
        return (
            f"exceeds what so many trials can show ({result.ceiling:.2f}), so the audit neither refutes nor "
            "supports it"
        )
    return "is not contradicted"


def weakness(power: float | None, stronger: str) -> str:
    """Return a sentence about an audit that would probably miss half of the noise; empty if it would not.

    Args:
        power: Probability with which it would refute the claim at half of the noise; None if not known.
        stronger: What finds smaller faults, as the end of the sentence.
    """
    if power is None or power >= _WEAK:
        return ""
    return f"This audit is weak: it would find half of the noise missing with probability {power:.2f}; {stronger}."


def weakness_of_trials(audit: RunAudit) -> str:
    """Return `weakness` of an audit of single steps, or of a game."""
    best = audit.strongest
    training = " and, for most trainers, an audit of one training" if best.scope == "step" else ""
    return weakness(best.power, f"more trials{training} find smaller faults")


def _power(audit: RunAudit) -> str:
    best = audit.strongest
    if best.power is None:
        return ""
    text = (
        "Power: if the mechanism had half of its noise, the best attack that its theorem then allows would refute the "
        f"claim with probability {best.power:.2f} in as many trials."
    )
    return f"{text} {weakness_of_trials(audit)}".rstrip()


def _controls(audit: RunAudit) -> str:
    if audit.game:
        return _verdict_on_controls(
            audit,
            "Controls: in the null control both worlds are the first one, and nothing must be found (by chance, one "
            "such bound in twenty exceeds 0). In the broken control the same code runs with a quarter of the noise or "
            "four times the epsilon, and the attack must find it. ",
        )
    return _verdict_on_controls(
        audit,
        "Controls: in the null control, the attacker is asked about records that were in no batch, and must find "
        "nothing (by chance, one such bound in twenty exceeds 0). In the protected control, the run's records are "
        "protected by known noise, and no bound may exceed the theorem. In the broken control that noise is left out, "
        "and an attack must find it. ",
    )


def _verdict_on_controls(audit: RunAudit, text: str) -> str:
    failed = sorted({finding.role.value for finding in _failed_controls(audit)})
    if not failed:
        return text + "All controls behaved as required."
    return (
        f"{text}These controls did NOT behave as required: {', '.join(failed)}. Repeat the audit with more trials and "
        "another seed before you rely on it."
    )
