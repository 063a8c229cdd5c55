"""What an audit found: one record for all audits, as data and as a table; `words` has it as text.

A finding is one attack on one subject: the audited run, or a control. It holds bounds on epsilon, either from trials in
two worlds or from scores of canaries (or of trainings).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BeforeValidator, PlainSerializer, computed_field

from opusim.accounting.audit import (
    AuditPlan,
    AuditResult,
    Estimate,
    Estimator,
    Verdict,
    area_under_curve,
    clopper_pearson_upper,
)
from opusim.accounting.guarantee import Status
from opusim.accounting.one_run import NOT_NORMAL, OneRunBound, OneRunResult
from opusim.training.errors import RunFolderError
from opusim.training.runs.folder import AUDIT_FILE, FINAL_MODEL_FILE, ONE_RUN_FILE
from opusim.training.runs.storage import (
    StoredGuarantee,
    read_json,
    record_from_json,
    record_json,
    require_unchanged,
    write_record,
)

SCHEMA_VERSION = 2
_REMEDY = "run opusim audit again, or delete it"

NullableFloat = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: None if math.isnan(value) else value),
]
"""A number that may be NaN, which JSON writes as null."""


LOW_RATE = 1e-3
"""The rate of false positives at which an attack's true positives are told."""
_SURE = 0.95
"""Power from which too few canaries do not explain that an audit misses half of the noise."""
_CURVE_POINTS = 200


class Role(StrEnum):
    """The subject of an attack."""

    RUN = "this run"
    NULL = "null control"
    PROTECTED = "protected control"
    BROKEN = "broken control"


class Played(StrEnum):
    """What an audit plays, again and again or once."""

    STEP = "one step"
    PROTECTION = "the run's protection"
    TRAINING = "one training"
    FINAL_MODELS = "final models"

    @property
    def file(self) -> str:
        """Name of the file that keeps such an audit."""
        return {Played.TRAINING: ONE_RUN_FILE, Played.FINAL_MODELS: FINAL_MODEL_FILE}.get(self, AUDIT_FILE)

    @property
    def counted(self) -> str:
        """What is counted."""
        return {Played.TRAINING: "canaries", Played.FINAL_MODELS: "trainings"}.get(self, "trials")


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
        result: The bounds on epsilon, from trials in two worlds or from scores of canaries.
        auc: Probability that a member scores higher than a non-member, in [0, 1]; NaN without scores.
        members: Median score of the first world, as text.
        others: Median score of the second world, as text.
        claim: A theorem's guarantee for this very game, or None if none gives a finite epsilon.
        scope: What the claim covers: one step, or the whole run.
        curve: Its true and false positives at every threshold, or None if an older version kept none.
        actual: Of a broken control the finite epsilon that its code really has; None if it is not known.
        estimate: What the trials say at face value, or None if it was not made.
        power: Probability of refuting the claim at half of the noise, with as many trials or with ideal scores; None if
            not known.
    """

    role: Role
    attack: str
    result: AuditResult | OneRunResult
    auc: NullableFloat
    members: str = ""
    others: str = ""
    claim: StoredGuarantee | None = None
    scope: Literal["step", "run"] = "step"
    curve: Curve | None = None
    actual: float | None = None
    estimate: Estimate | None = None
    power: float | None = None

    @classmethod
    def of(
        cls,
        role: Role,
        attack: str,
        scores: tuple[np.ndarray, np.ndarray],
        result: AuditResult | OneRunResult,
        *,
        figure: Callable[[float], str] = lambda score: f"{score:.3g}",
        **facts: Any,
    ) -> Self:
        """Return the finding of an attack.

        Args:
            role: The subject.
            attack: Name of the attack.
            scores: Those of the first and of the second world, shapes (n,) and (m,).
            result: The bounds from them.
            figure: Writes a score in words.
            **facts: The other attributes.
        """
        first, second = scores
        if isinstance(result, OneRunResult):
            facts["power"] = _largest_power(result.bounds)
        return cls(
            role=role,
            attack=attack,
            result=result,
            auc=area_under_curve(first, second),
            members=figure(float(np.median(first))),
            others=figure(float(np.median(second))),
            curve=Curve.of(first, second),
            **facts,
        )

    @property
    def adversary(self) -> str:
        """What the attacker sees and knows."""
        plan = self.result.plan
        return plan.threat_model if isinstance(plan, AuditPlan) else plan.adversary

    @property
    def refutes(self) -> bool:
        """Whether a bound exceeds the claimed epsilon of the game."""
        if isinstance(self.result, OneRunResult):
            return bool(self.result.refuting)
        return self.claim is not None and self.result.verdict(self.claim) is Verdict.REFUTED

    @computed_field  # type: ignore[prop-decorator]  # mypy does not know decorated properties
    @property
    def says(self) -> str:
        """The finding in a few words; for a control, whether it behaved as required."""
        result, found, bound = self.result, self.result.epsilon_lower > 0, self.claim
        if self.role is Role.NULL:
            return "a false alarm: see the text" if found else "nothing found, as required"
        if self.role is Role.BROKEN:
            if isinstance(result, OneRunResult):
                few = "" if self.expected else ": too few canaries for guesses, and scores not normal"
                missed = "not found" if few else "not found by this attack"
                return "found, as required" if self.refutes else missed + few
            if bound is not None and result.ceiling <= bound.epsilon:
                return f"too few trials to exceed {bound.epsilon:.3g}"
            really = "" if self.actual is None else f": it really costs {self.actual:.3g}"
            return ("found, as required" if self.refutes else "not found by this attack") + really
        if isinstance(result, OneRunResult):
            return _reading(result, result.strongest)
        if bound is None:
            word = "membership" if self.scope == "step" else "the world"
            return f"{word} found" if found else "nothing found, which proves nothing"
        texts = {
            Verdict.REFUTED: f"the {self.scope}'s proven {bound.epsilon:.3g} is refuted",
            Verdict.CONSISTENT: f"agrees with the {self.scope}'s proven {bound.epsilon:.3g}",
            Verdict.PROVES_NOTHING: f"below the {self.scope}'s proven {bound.epsilon:.3g}",
        }
        return texts[result.verdict(bound)]

    @property
    def expected(self) -> bool:
        """Whether a broken control must be found: not if there are too few canaries for guesses."""
        if isinstance(self.result, AuditResult):
            return True
        return (_largest_power(one for one in self.result.bounds if one.method.guesses) or 0.0) >= _SURE

    def rows(self) -> list[dict[str, str]]:
        """Return a table row for each bound on the run, or one row of a control."""
        result = self.result
        row = {
            "subject": self.role.value,
            "attack": self.attack,
            "trials": f"{result.n_in:,} + {result.n_out:,}",
            "members": self.members,
            "others": self.others,
            "AUC": f"{self.auc:.3f}",
            LOW: _low_rate(
                self.curve, result.n_out if isinstance(result, OneRunResult) else 2 * result.n_out
            ),
        }
        if isinstance(result, AuditResult):
            estimate = "" if self.estimate is None else f" (estimate {self.estimate.epsilon:.2f})"
            return [
                {
                    **row,
                    "read as": result.plan.estimator.value,
                    "evidence": f"{result.false_negatives:,} missed, {result.false_positives:,} false",
                    "epsilon": f"at least {result.epsilon_lower:.2f}{estimate}",
                    "ceiling": _ceiling(result),
                    "power": _probability(self.power),
                    "finding": self.says,
                }
            ]
        on_run = self.role is Role.RUN
        rows: list[dict[str, str]] = []
        for bound in result.bounds if on_run else (result.strongest,):
            interval = bound.interval
            ends = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"
            evidence = f"{bound.correct} of {bound.guesses} right"
            rows.append(
                {
                    **(row if not rows else dict.fromkeys(row, "")),
                    "read as": bound.method.value,
                    "evidence": evidence if bound.guesses else f"normality p {result.normality:.2g}",
                    "epsilon": f"{'at least ' if bound.method.is_bound else ''}{bound.epsilon:.2f}{ends}",
                    "ceiling": f"{bound.ceiling:.2f}",
                    "power": _probability(bound.power),
                    "finding": _reading(result, bound) if on_run else self.says,
                }
            )
        return rows


LOW = f"true positives at {100 * LOW_RATE:g} % false"
_COLUMNS = (
    *("subject", "attack", "read as", "trials", "members", "others", "AUC", "evidence"),
    *("epsilon", "ceiling", "power", LOW, "finding"),
)
"""The columns of the table of an audit."""
NARROW = ("read as", "trials", "members", "others", "AUC", "evidence", "power", LOW)
"""Those that a narrow page leaves out."""


def _reading(result: OneRunResult, bound: OneRunBound) -> str:
    """Return what a bound from scores of canaries says, in a few words."""
    normal = result.normality >= NOT_NORMAL
    if not bound.method.is_bound:
        return "an estimate" if normal else "scores are not normal: not to be relied on"
    if result.exceeds(bound):
        return "REFUTED" if bound in result.refuting else "scores are not normal: not to be relied on"
    if bound.ceiling > 0 and bound.epsilon >= 0.8 * bound.ceiling:
        return "near the ceiling"
    return "not refuted" if bound.epsilon > 0 else "nothing found, which proves nothing"


def _largest_power(bounds: Iterable[OneRunBound]) -> float | None:
    return max((bound.power for bound in bounds if bound.power is not None), default=None)


def _probability(power: float | None) -> str:
    return "–" if power is None else f"{power:.2f}"


def _ceiling(result: AuditResult) -> str:
    """Return what a perfect attack would have shown; noise that was drawn could have shown any epsilon."""
    return "any" if result.plan.estimator is Estimator.DRAWN_NOISE else f"{result.ceiling:.2f}"


def _low_rate(curve: Curve | None, others: int) -> str:
    """Return the true positives at few false ones, or at as few as the trials can tell, with their limits.

    Args:
        curve: Of the attack, or None.
        others: Scores of the second world, of which half choose the threshold.
    """
    if curve is None:
        return "–"
    low, high = (100 * limit for limit in curve.low_limits)
    found = f"{100 * curve.low_true_positive:.2f} % ({low:.2f} to {high:.2f} %)"
    fresh = f"{100 * curve.low_false_positive:.2f} % false"
    if others / 2 * LOW_RATE < 1:
        return f"too few trials: {found}, with {fresh}"
    return f"{found}, with {fresh} on fresh trials"


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The audit of a run.

    Attributes:
        findings: Findings on the run, then on the controls.
        guarantees: The run's guarantees at the audit's delta, or those of the audited training.
        played: What was played.
        game: The code that was played, in a few words; empty for the run's own step.
        trials: Trials on the run, canaries, or trainings.
        control_trials: Trials on each control.
        steps: Steps that the run had done when its step was audited, or steps of an audited training.
        crafted: What the auditor chose of each canary: "gradients" or "records"; empty without canaries.
        seed: Repeats the audit.
        looks: How often the scores were read, with other numbers of trainings or at other deltas, this time included.
        cpu_s: Processor seconds of the trainings.
        note: What the reader must know besides, such as a mechanism whose randomness no seed repeats.
    """

    findings: tuple[Finding, ...]
    guarantees: tuple[StoredGuarantee, ...]
    played: Played
    trials: int
    steps: int
    seed: int
    game: str = ""
    control_trials: int = 0
    crafted: str = ""
    looks: int = 1
    cpu_s: float = 0.0
    note: str = ""

    def __post_init__(self) -> None:
        if not self.of(Role.RUN):
            raise ValueError("findings: none is on the run itself")

    def of(self, role: Role) -> list[Finding]:
        """Return the findings on a subject."""
        return [finding for finding in self.findings if finding.role is role]

    def scores(self, role: Role = Role.RUN) -> dict[str, OneRunResult]:
        """Return the bounds from scores of canaries, by attack; empty if trials were played."""
        return {one.attack: one.result for one in self.of(role) if isinstance(one.result, OneRunResult)}

    @property
    def strongest(self) -> Finding:
        """The finding on the run with the largest bound."""
        return max(self.of(Role.RUN), key=lambda finding: finding.result.epsilon_lower)

    @property
    def confidence(self) -> float:
        """That of all bounds on the run together, at every look: the sum of their errors bounds the error, up to 1."""
        plans = [result.plan for result in self.scores().values()]
        error = sum((1 - plan.confidence) * sum(method.is_bound for method in plan.methods) for plan in plans)
        return max(0.0, 1 - self.looks * error) if plans else 0.95

    @property
    def refuted(self) -> bool:
        """Whether a bound on the run exceeds the claim."""
        return any(finding.refutes for finding in self.of(Role.RUN))

    @property
    def holds_private_records(self) -> bool:
        """Whether it holds figures of the run's records; those of a game on a protection are the auditor's own."""
        return self.played is not Played.PROTECTION

    @property
    def failed_controls(self) -> list[Finding]:
        """The findings of controls that did not behave as required."""
        broken = self.of(Role.BROKEN)
        missed = [] if any(one.refutes for one in broken) else [one for one in broken if one.expected]
        false = [one for one in self.of(Role.NULL) if one.result.epsilon_lower > 0]
        return [*missed, *false, *(one for one in self.of(Role.PROTECTED) if one.refutes)]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def controls_hold(self) -> bool:
        """Whether every control behaved as required."""
        return not self.failed_controls

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with the schema version."""
        return record_json(self, SCHEMA_VERSION)

    @classmethod
    def from_json(cls, content: Any) -> Audit:
        """Return the audit that `to_json` converted, of this version or of the one before.

        Raises:
            ValueError: The content is of another schema version, or is not an audit.
        """
        if isinstance(content, Mapping) and content.get("schema_version") == 1:
            try:
                content = _of_version_1(content)
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"not an audit: {error!r}") from error
        return record_from_json(cls, content, SCHEMA_VERSION)

    def keep(self, folder: Path) -> None:
        """Write the audit into a folder."""
        write_record(folder / self.played.file, self, SCHEMA_VERSION)


def read_audit(path: Path) -> Audit:
    """Read the audit in a file.

    Raises:
        RunFolderError: The file is not an audit.
    """
    try:
        content = read_json(path)
        found = Audit.from_json(content)
    except ValueError as error:
        raise RunFolderError(f"{path}: is not an audit ({error}); {_REMEDY}") from error
    require_unchanged(path, content, remedy=_REMEDY)
    return found


def _of_version_1(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return an audit of schema version 1, in which trials and scores of canaries had schemas of their own."""
    if "readings" not in content:
        played = Played.PROTECTION if content.get("game") else Played.STEP
        return {**content, "schema_version": SCHEMA_VERSION, "played": played, "steps": content["step"]}
    proven = [one for one in content["guarantees"] if one["status"] == Status.PROVEN]
    trainings, findings = content.get("trainings", 1), []
    for role, key in ((Role.RUN, "readings"), (Role.NULL, "null"), (Role.BROKEN, "broken")):
        for one in content.get(key, ()):
            result = one["result"]
            powers = [bound["power"] for bound in result["bounds"] if bound.get("power") is not None]
            facts = {"attack": one["adversary"], "result": result, "curve": one.get("curve")}
            facts |= {"auc": result["auc"], "power": max(powers, default=None), "scope": "run"}
            findings.append({"role": role, **facts, "claim": proven[0] if proven else None})
    kept = {key: content[key] for key in ("guarantees", "steps", "seed", "cpu_s", "crafted")}
    return {
        **kept,
        "schema_version": SCHEMA_VERSION,
        "findings": findings,
        "played": Played.TRAINING if trainings == 1 else Played.FINAL_MODELS,
        "game": content["accounted"],
        "trials": content["canaries"],
        "looks": content.get("looks", 1),
    }


def audit_rows(audit: Audit) -> list[dict[str, str]]:
    """Return the table of an audit: each bound on the run, then each control."""
    return [{key: row[key] for key in _COLUMNS} for finding in audit.findings for row in finding.rows()]
