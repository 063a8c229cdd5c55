"""What an audit found: one record for all audits, as data and as a table; `words` has it as text.

A finding is one attack on one subject: the audited run, or a control. It holds bounds on epsilon, either from trials in
two worlds or from scores of canaries (or of trainings).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BeforeValidator, PlainSerializer, computed_field

from opusim.accounting.anytime import AnytimeResult
from opusim.accounting.audit import (
    AuditPlan,
    AuditResult,
    Estimate,
    Estimator,
    Verdict,
    area_under_curve,
    clopper_pearson_upper,
)
from opusim.accounting.explanation import number
from opusim.accounting.guarantee import Guarantee, Status
from opusim.accounting.ledger import LEDGER_FILE, read_ledger
from opusim.accounting.one_run import NOT_NORMAL, Law, Method, OneRunBound, OneRunResult, guesses_bound
from opusim.tables import Shown, html_table, output_width, table_text, wrapped
from opusim.training.errors import RunFolderError
from opusim.training.runs.folder import AUDIT_FILE, FINAL_MODEL_FILE, ONE_RUN_FILE, RunFolder
from opusim.training.runs.storage import (
    StoredGuarantee,
    kind_of,
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
PLANNED_POWER, WEAK = 0.9, 0.5
"""The power that is wanted, and that below which an audit is called weak."""
_SURE = 0.95
"""Power from which half of the noise should have been found."""
_CURVE_POINTS = 200
SYSTEM_NOISE = (
    "The noise comes from the operating system, as in the run: the seed repeats the coins only, and further trials are "
    "new games."
)
"""What an audit says whose trials no seed repeats."""
WITHOUT_CANARIES = (
    "Audits without canaries are that of single steps (opusim audit RUN) and, of a private loop, the self-test on 60 "
    "steps of its own (opusim audit --mechanism private-loop)."
)
_OTHER_NUMBER = f"Ask for no number of canaries, so that the likeliest is taken. {WITHOUT_CANARIES}"
_NEW_GAMES = "Repeat it with another seed only, since games of the same coins are dependent; choose none by its outcome"


class Role(StrEnum):
    """The subject of an attack."""

    RUN = "this run"
    NULL = "null control"
    PROTECTED = "protected control"
    BROKEN = "broken control"
    ARRIVAL = "arrival control"

    @property
    def error(self) -> float:
        """Probability that any bound on the subject is too high, which they share.

        A control that must find nothing is read at a thousandth, so that it does not fail by chance.
        """
        return 1e-3 if self in (Role.NULL, Role.PROTECTED) else 0.05


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
        anytime: What the same scores say game by game; None if they are no games in which a coin is fair given the past
            (canaries of one run at a delta above 0), or were not read so.
        beside: The same scores read as those of one run's canaries; None if they are that already, or were not.
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
    anytime: AnytimeResult | None = None
    beside: OneRunResult | None = None

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
        """Return the finding of an attack from the scores of both worlds, shapes (n,) and (m,), and their bounds.

        `figure` writes a score in words; the facts are the other attributes.
        """
        first, second = scores
        if isinstance(result, OneRunResult):
            facts["power"] = result.plan.power_of_all
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
        """Whether a bound exceeds the claimed epsilon of the game, or the bets against it have won."""
        if self.anytime is not None and self.anytime.refuted_at is not None:
            return True
        if isinstance(self.result, OneRunResult):
            return bool(self.result.refuting)
        return self.claim is not None and self.result.verdict(self.claim) is Verdict.REFUTED

    @property
    def by_chance(self) -> bool:
        """Whether it is a control of canaries that is mostly missed, so that its outcome tells nothing."""
        likely = self.power is None or self.power >= WEAK
        return not likely and self.role is Role.BROKEN and isinstance(self.result, OneRunResult)

    @property
    def estimates(self) -> tuple[float, ...]:
        """What its scores say of epsilon without the margin of a bound."""
        read = [one for one in (self.result, self.beside) if isinstance(one, OneRunResult)]
        normal = [bound.epsilon for one in read for bound in one.bounds if not bound.method.is_bound]
        return (*([] if self.estimate is None else [self.estimate.epsilon]), *normal)

    @computed_field  # type: ignore[prop-decorator]  # mypy does not know decorated properties
    @property
    def says(self) -> str:
        """The finding in a few words; for a control, whether it behaved as required."""
        result, found, bound = self.result, self.result.epsilon_lower > 0, self.claim
        if self.role is Role.NULL:
            return "a false alarm: see the text" if found else "nothing found, as required"
        if self.role is Role.BROKEN:
            if self.by_chance:
                return f"left to chance: power {self.power:.2f}"
            if isinstance(result, OneRunResult):
                return "found, as required" if self.refutes else _missed(result, self.power)
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
            LOW: "–",
        }
        if self.curve is not None:  # true positives at few false ones, or at as few as the trials can tell
            choosing = result.n_out / 2 if isinstance(result, OneRunResult) else result.n_out
            caught, fresh = 100 * self.curve.low_true_positive, 100 * self.curve.low_false_positive
            low, high = (100 * limit for limit in self.curve.low_limits)
            seen = f"{caught:.2f} % ({low:.2f} to {high:.2f} %), with {fresh:.2f} % false"
            few = choosing * LOW_RATE < 1
            row[LOW] = f"too few trials: {seen}" if few else f"{seen} on fresh trials"
        if isinstance(result, AuditResult):
            estimate = "" if self.estimate is None else f" (estimate {self.estimate.epsilon:.2f})"
            drawn = result.plan.estimator is Estimator.DRAWN_NOISE
            return [
                {
                    **row,
                    "read as": result.plan.estimator.value,
                    "evidence": f"{result.false_negatives:,} missed, {result.false_positives:,} false",
                    "epsilon": f"at least {result.epsilon_lower:.2f}{estimate}",
                    # what a perfect attack would have shown; noise that was drawn could have shown any epsilon
                    "ceiling": "any" if drawn else f"{result.ceiling:.2f}",
                    "power": "–" if self.power is None else f"{self.power:.2f}",
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
                    "power": "–" if bound.power is None else f"{bound.power:.2f}",
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
_NARROW = ("read as", "trials", "members", "others", "AUC", "evidence", "power", LOW)
"""Those that a narrow page leaves out."""
_WIDE_PAGE = 140
"""Columns of text from which the table of an audit has all but one of its columns; the pages always have them."""


def _reading(result: OneRunResult, bound: OneRunBound) -> str:
    """Return what a bound from scores of canaries says, in a few words."""
    if not bound.method.guesses and result.normality < NOT_NORMAL:
        return "scores are not normal: does not count"
    if not bound.method.is_bound:
        return "an estimate"
    if result.exceeds(bound):
        return "REFUTED"
    if bound.ceiling > 0 and bound.epsilon >= 0.8 * bound.ceiling:
        return "near what ideal scores show"
    return "not refuted" if bound.epsilon > 0 else "nothing found, which proves nothing"


def _missed(result: OneRunResult, power: float | None) -> str:
    """Return why scores of canaries do not show half of the noise, in a few words."""
    reasons = []
    if power is not None and power < _SURE:
        reasons.append(f"missed by chance with probability {1 - power:.2f}")
    if Method.NORMAL_BOUND in result.plan.methods:
        refused = result.normality < NOT_NORMAL
        reasons.append("scores are not normal" if refused else "normal scores stay below the claim")
    return ": ".join(text for text in ("not found by this attack", ", and ".join(reasons)) if text)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """The arrival control: whether what canaries contribute is in the sums of the steps that drew them.

    A drawn canary adds its sign, in units of C. If the run drops its rows, an audit finds nothing, whatever else is
    wrong.

    Attributes:
        share: Mean of what arrived over what a sound clip leaves, 1 if all arrives; 0 without draws.
        error: Its standard error.
        draws: Times that a step drew a canary.
        expected: Expected number of draws.
    """

    share: float
    error: float
    draws: int
    expected: float
    role: Literal[Role.ARRIVAL] = Role.ARRIVAL

    @computed_field  # type: ignore[prop-decorator]
    @property
    def holds(self) -> bool:
        """Whether half of it arrives, within five standard errors; and some is drawn if ten draws are expected."""
        if not self.draws:
            return self.expected < 10
        return self.share + 5 * self.error >= 0.5

    @computed_field  # type: ignore[prop-decorator]
    @property
    def says(self) -> str:
        """The control in a few words."""
        if self.holds:
            arrives = self.draws and self.share > 5 * self.error
            return "canaries arrive, as required" if arrives else "too few draws are expected to tell"
        return f"the run drops rows: {self.share:.2f} of what its canaries contribute arrives"

    def row(self) -> dict[str, str]:
        """Return its row of the table of an audit."""
        empty = dict.fromkeys(_COLUMNS, "–")
        drawn = {
            "trials": f"{self.draws:,} draws",
            "evidence": f"{self.expected:,.0f} expected, {self.share:.2f} of each arrives",
        }
        return {**empty, **drawn, "subject": self.role.value, "finding": self.says}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The run or private loop that was audited.

    Attributes:
        folder: Name of its folder.
        mode: experiment or release.
        lines: Lines of its ledger when it was audited.
        digest: Of the last one of them, which depends on all lines before it.
        kind: `trainer.kind` of a run, or "private loop"; empty if an older version kept it.
    """

    folder: str
    mode: str
    lines: int
    digest: str
    kind: str = ""

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Return that of a folder with a ledger; raise LedgerCorrupt if it was changed, cut or reordered."""
        content, is_run = read_ledger(folder / LEDGER_FILE), kind_of(folder) == "run"
        return cls(
            folder=folder.resolve().name,
            mode=content.mode,
            lines=content.position.lines,
            digest=content.position.digest,
            kind=RunFolder(folder).read_config().trainer.kind if is_run else "private loop",
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Audit(Shown):
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
        arrival: Whether crafted gradients reached the sums; None if none were crafted.
        note: What the reader must know besides, such as a mechanism whose randomness no seed repeats.
        differs: In which numbers the audited mechanism differs from that of the run it speaks for; empty if in none.
        stand_in: Whether records, module and loop were the auditor's own.
        origin: What was audited; None if an older version kept it, or it is the loop in the same folder.
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
    arrival: Arrival | None = None
    note: str = ""
    differs: str = ""
    stand_in: bool = False
    origin: Origin | None = None

    def __post_init__(self) -> None:
        if not self.of(Role.RUN):
            raise ValueError("findings: none is on the run itself")

    def of(self, role: Role) -> list[Finding]:
        """Return the findings on a subject."""
        return [finding for finding in self.findings if finding.role is role]

    def scores(self, role: Role = Role.RUN) -> dict[str, OneRunResult]:
        """Return the bounds from scores of canaries, by attack; empty if trials were played."""
        return {one.attack: one.result for one in self.of(role) if isinstance(one.result, OneRunResult)}

    def _shown(self) -> dict[str, object]:
        best = self.strongest
        return {
            "epsilon": f"at least {self.largest[0]:.4g}",
            "attack": repr(self.largest[1]),
            "confidence": f"{self.confidence:.4g}",
            "claim": None if best.claim is None else number(best.claim.epsilon),
            "refuted": self.refuted,
            "played": repr(self.played.value),
            "trials": self.trials,
            "failed_controls": len(self.failed_controls) or None,
            "differs": repr(self.differs) if self.differs else None,
            "seed": self.seed,
        }

    def __str__(self) -> str:
        """Return the table and the paragraphs, as `opusim audit` prints them; `to_json` has every fact."""
        rows = audit_rows(self)
        narrow = output_width() < _WIDE_PAGE
        columns = [key for key in rows[0] if key not in (_NARROW if narrow else (LOW,))]
        if narrow:  # one attack may be read in several ways, a row each
            for row in rows:
                row["attack"] = ", ".join(
                    row[key] for key in ("attack", "read as") if row[key] not in ("", "–")
                )
        table = table_text(columns, [[row[key] for key in columns] for row in rows])
        above = f"{wrapped(headline(self))}\n" if headline(self) else ""
        return above + "\n".join([table, *(f"{wrapped(text)}\n" for text in paragraphs(self))]).rstrip("\n")

    def _repr_html_(self) -> str:
        """Return the table of the bounds on the run and of the controls, for a notebook."""
        rows = audit_rows(self)
        return html_table(list(rows[0]), [list(row.values()) for row in rows])

    @property
    def strongest(self) -> Finding:
        """The finding on the run with the largest bound."""
        return max(self.of(Role.RUN), key=lambda finding: finding.result.epsilon_lower)

    @property
    def largest(self) -> tuple[float, str, str]:
        """The largest bound on the run that counts: epsilon, the attack, and how its scores were read.

        Bounds count that may refute the claim: neither estimates, nor normal scores that fail the test of normality,
        nor `beside`.
        """
        found = []
        for one in self.of(Role.RUN):
            if isinstance(one.result, OneRunResult):
                found += [
                    (bound.epsilon, one.attack, bound.method.value.removesuffix(", bound"))
                    for bound in one.result.bounds
                    if bound.method.is_bound and (bound.method.guesses or one.result.normality >= NOT_NORMAL)
                ]
            else:
                found.append((one.result.epsilon_lower, one.attack, one.result.plan.estimator.value))
            if one.anytime is not None:
                found.append((one.anytime.epsilon_lower, one.attack, _ANYTIME))
        return max(found, key=lambda each: each[0])

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
    def power(self) -> float | None:
        """That of the strongest attack, or the largest of all scores; None if not known."""
        found = self.of(Role.RUN) if self.scores() else [self.strongest]
        return max((one.power for one in found if one.power is not None), default=None)

    @property
    def holds_private_records(self) -> bool:
        """Whether it holds figures of the run's records, not of the auditor's own."""
        return self.played is not Played.PROTECTION and not self.stand_in

    @property
    def failed_controls(self) -> list[Finding | Arrival]:
        """The findings of controls that did not behave as required."""
        broken = self.of(Role.BROKEN)
        lost = [] if self.arrival is None or self.arrival.holds else [self.arrival]
        # what does not arrive is not found; what is found by chance counts as missed, unless the run itself is refuted
        found = any(one.refutes and not one.by_chance for one in broken)
        missed = [] if lost or found or (self.refuted and any(one.by_chance for one in broken)) else broken
        false = [one for one in self.of(Role.NULL) if one.result.epsilon_lower > 0]
        return [*lost, *missed, *false, *(one for one in self.of(Role.PROTECTED) if one.refutes)]

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
        """Return the audit that `to_json` converted, of this version or the one before; raise ValueError for others."""
        if isinstance(content, Mapping) and content.get("schema_version") == 1:
            try:
                content = _of_version_1(content)
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"not an audit: {error!r}") from error
        return record_from_json(cls, content, SCHEMA_VERSION)

    def keep(self, folder: Path) -> None:
        """Write the audit into a folder; figures of private records are for its owner only (`write_file`)."""
        write_record(folder / self.played.file, self, SCHEMA_VERSION, private=self.holds_private_records)


def read_audit(path: Path) -> Audit:
    """Read the audit in a file; raise RunFolderError if it is none."""
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
    rows = [{key: row[key] for key in _COLUMNS} for finding in audit.findings for row in finding.rows()]
    if audit.differs:
        for row in rows:
            row["subject"] = row["subject"].replace(Role.RUN.value, "audited run")
            row["finding"] = row["finding"].replace("the run's", "the audited run's")
    return rows if audit.arrival is None else [*rows, audit.arrival.row()]


_ANYTIME = "at any time"


def paragraphs(audit: Audit) -> list[str]:
    """Return the audit as text: the game, the result, what it means for each statement, and the controls."""
    who = [f"Adversary {one.attack!r} {one.adversary}." for one in audit.of(Role.RUN)]
    texts = [
        f"{_other_numbers(audit)}." if audit.differs else "",
        _game(audit),
        *who,
        _result(audit),
        *_statements(audit),
        _anytime(audit),
        _beside(audit),
        _above_the_claim(audit),
        f"{power_text(audit)} {_weakness(audit)}".strip(),
    ]
    return [text for text in (*texts, _controls(audit), audit.note) if text]


def verdict(audit: Audit) -> str:
    """Return the result in one or two sentences."""
    best, claim, ceiling = audit.strongest, audit.strongest.claim, audit.strongest.result.ceiling
    bound, attack, read = audit.largest
    together, confidence = ("at any time ", 0.95) if read == _ANYTIME else ("", audit.confidence)
    found = (
        f"The largest bound that counts is an epsilon of at least {bound:.2f} (attack {attack!r}, {read}); all bounds "
        f"{together}together hold with {100 * confidence:.0f} % confidence"
    )
    whose = "one step" if best.scope == "step" else _whole(audit)
    start = f"{_other_numbers(audit)}. " if audit.differs else ""
    if audit.refuted:
        says = _refutation(audit)
        if claim is not None and bound > claim.epsilon:
            says = says or f"That is above the {claim.status.value} {number(claim.epsilon)} of {whose}."
        return " ".join(text for text in (f"{start}REFUTED. {found}.", says, _won(audit)) if text)
    if claim is None or math.isinf(claim.epsilon):
        return f"{start}{found}. No theorem gives a finite epsilon to compare it with."
    share = bound / claim.epsilon if claim.epsilon else 1.0
    weak = _weakness(audit)
    if not audit.scores() and ceiling <= claim.epsilon:
        weak = f"By errors alone, so few trials cannot show more than {ceiling:.2f}."
    ideal = ""
    if isinstance(best.result, OneRunResult):
        most = max((one for one in best.result.bounds if one.method.is_bound), key=lambda one: one.ceiling)
        ideal = f"; ideal scores would typically show {most.ceiling:.2f} by {_named(most)}"
    return (
        f"{start}Not refuted. {found}. That is {100 * share:.0f} % of the {claim.status.value} {number(claim.epsilon)} "
        f"of {whose}{ideal}.{weak and ' '}{weak} An audit never proves privacy; a better attack may exist."
    )


def _other_numbers(audit: Audit) -> str:
    return f"This is an audit of like code with other numbers: {audit.differs}"


def _whole(audit: Audit) -> str:
    """Return whose claim an audit of more than a step tests."""
    return "the audited run" if audit.differs else "the run"


def _game(audit: Audit) -> str:
    result = audit.strongest.result
    plan = result.plan
    if audit.scores():
        own = "like" if audit.differs else "the run's own"
        parts = f"{own} sampler, clip, noise, optimizer and ledger ({audit.game})"
        played = (
            f"one training of {audit.steps} steps with {parts}, and {audit.trials} canaries with crafted "
            f"{audit.crafted}. A fair coin put each canary in or left it out, independently. Each adversary scores "
            "every canary."
        )
        if audit.played is Played.FINAL_MODELS:
            played = (
                f"{audit.trials} trainings of {audit.steps} steps each, with {parts}. A fair coin put one crafted "
                "record in or left it out of each training, independently, and the adversary scores every final model."
            )
        text = (
            f"Game: {played} Each bound holds with confidence {plan.confidence:.4g}, so that all of them hold with "
            f"confidence {audit.confidence:.4g}. The ceiling is what ideal scores would typically give at the claimed "
            "epsilon with as many scores; a number near it says that no better attack would have shown more."
        )
        if audit.looks == 1:
            return text
        return (
            f"{text} The scores were read {audit.looks} times, with other numbers of trainings or at other deltas, and "
            f"stopping once the outcome pleases errs more often; {audit.confidence:.4g} counts the bounds of all "
            f"{audit.looks} times."
        )
    if not isinstance(plan, AuditPlan):
        raise TypeError("findings: must all be from trials, or all from scores")
    how, most = (
        "Half of the trials choose the attacker's threshold; the other half, as counted, give the bound.",
        f" By errors alone, a perfect attack would have shown {result.ceiling:.2f} in as many trials.",
    )
    if plan.estimator is Estimator.DRAWN_NOISE:
        how = "What a trial shows without noise is known, so the noise that was drawn gives the bound."
        most = ""
    trials = (
        f"{audit.game}. {audit.trials:,} independent trials, half of them in each of two worlds: {plan.pair}."
        if audit.game
        else f"{audit.trials} times, the run's own trainer made one step from step {audit.steps} of the run. A coin "
        f"toss chose one of two worlds: {plan.pair}. Each adversary guesses the outcome."
    )
    return (
        f"Game: {trials} {how} Each row states a lower bound on epsilon at delta {plan.delta:g} with confidence "
        f"{plan.confidence:g} ({plan.estimator.value}), 0.95 for all rows of the run together.{most}"
    )


def _result(audit: Audit) -> str:
    best, result = audit.strongest, audit.strongest.result
    if not isinstance(result, AuditResult):
        return _refutation(audit)
    if result.epsilon_lower == 0:
        bound, attack, read = audit.largest
        found = f"epsilon at least {bound:.2f}, by attack {attack!r} {read}" if bound > 0 else "nothing"
        return f"Found: {found}. A better attack may exist; an audit never proves privacy."
    run = audit.played is Played.PROTECTION
    what, member, other, whose = (
        ("the protected value", "trials of the first world", "of the second for the first", _whole(audit))
        if run
        else ("membership", "members", "others for members", "a single step")
    )
    if best.claim is not None and not best.refutes:
        what = "no more than is proven"
    return (
        f"Found: {what}. The {best.attack} attack missed {result.false_negatives} of {result.n_in} {member} and took "
        f"{result.false_positives} of {result.n_out} {other}, so {whose} costs at least epsilon "
        f"{result.epsilon_lower:.2f}."
    )


def _refutation(audit: Audit) -> str:
    """Return in a sentence whether the claim is refuted by scores, and by what; empty for trials."""
    if not audit.scores():
        return ""
    epsilon = next(iter(audit.scores().values())).plan.claimed
    if epsilon is None:
        return "No finite epsilon is claimed, so there is nothing to refute."
    found = []
    for attack, result in audit.scores().items():
        for bound in result.refuting:
            # a bound at most the claim's own epsilon is above the claim at another delta
            strictest, shown = result.at_strictest(bound), f"{bound.epsilon:.2f}"
            if strictest is not None and bound.epsilon <= epsilon:
                shown = f"{strictest[2]:.2f} at delta {strictest[0]:g}, where {strictest[1]:.2f} is claimed"
            found.append(f"{attack!r} by {bound.method.value}: at least {shown}")
    if found:
        return f"The claimed epsilon {number(epsilon)} is REFUTED ({'; '.join(found)})."
    if won := _won(audit):
        return won
    return f"The claimed epsilon {number(epsilon)} is not refuted, which does not prove it."


def _won(audit: Audit) -> str:
    """Return a sentence on the attacks whose bets refuted the claim; empty if none did."""
    bets = [(one.attack, one.anytime) for one in audit.of(Role.RUN) if one.anytime is not None]
    found = [f"{attack!r} after {read.refuted_at:,} games" for attack, read in bets if read.refuted_at]
    return f"The bets against the claim REFUTE it: {', '.join(found)}." if found else ""


def _statements(audit: Audit) -> list[str]:
    best = audit.strongest
    result, claim = best.result, best.claim
    if not isinstance(result, AuditResult):
        held = [one.at_strictest(bound) for one in audit.scores().values() for bound in one.bounds]
        return [
            f"Bounds in the table are at delta {result.plan.delta:g}. Normal scores are compared with the claim at "
            f"delta {delta:g} (epsilon {claimed:.2f}), because it allows least there: at large deltas sampled steps "
            "cost less than the Gaussian mechanism with the same epsilon."
            for delta, claimed, _ in [one for one in held if one is not None][:1]
        ]
    texts = []
    if claim is not None and audit.game:
        says = (
            "It is REFUTED: the mechanism does not do what the theorem assumes."
            if best.refutes
            else f"The bound reaches {result.epsilon_lower / claim.epsilon:.2f} of it and does not contradict it."
        )
        texts.append(
            f"{_whole(audit).capitalize()}'s {claim.status.value} epsilon is {number(claim.epsilon)}. {says}"
        )
    elif claim is not None:
        says = (
            "It is REFUTED: the step does not do what the theorem assumes. The guarantee of the run rests on that "
            "step, so it does not hold either."
            if best.refutes
            else "The bound stays below it. The guarantee of the run rests on that step and on secret batches; in this "
            "game the batches are not secret. The audit does not contradict the guarantee."
        )
        texts.append(
            "The theorem for one step, against an attacker who knows which step the "
            f"{claim.unit.value} may take part in, gives epsilon {number(claim.epsilon)}. {says}"
        )
    return texts + [_statement(result, one) for one in audit.guarantees if not one.is_proven]


def _anytime(audit: Audit) -> str:
    """Return what the bets say, or why there are none."""
    found = [(one.attack, one.anytime) for one in audit.of(Role.RUN) if one.anytime is not None]
    if not found:
        return _one_run_is_no_game(audit) if audit.played is Played.TRAINING else ""
    texts = []
    for attack, read in found:
        claim = ""
        if read.e_value is not None:
            needed = 1 / (1 - read.plan.confidence)
            when = (
                f"refuted after {read.refuted_at:,}" if read.refuted_at else f"{needed:.3g} would refute it"
            )
            claim = f"e-value {number(read.e_value)} against the claim ({when}); "
        assumed = ", by the Gaussian law that a theorem gives" if read.plan.law is Law.GAUSSIAN else ""
        texts.append(
            f"{attack}: {claim}epsilon at least {read.epsilon_lower:.2f} after {read.games:,} games{assumed}"
        )
    single, counted = audit.played is Played.TRAINING, audit.played.counted
    more = "" if single else f"; more {counted} of the same seed continue the same games"
    more = f". {_NEW_GAMES}; " if audit.note == SYSTEM_NOISE else f"{more}, and "
    return (
        f"At any time: {'. '.join(texts)}. These bounds hold with 95 % confidence together, however often they are "
        f"read and wherever the audit stops{more}e-values of audits with other seeds may be multiplied. The "
        f"fixed bounds above are for one number of {counted}, chosen beforehand; either kind errs with probability at "
        "most 5 %."
    )


def _one_run_is_no_game(audit: Audit) -> str:
    """Return why one run must not be read early, and its e-value."""
    found = [one.e_value for one in audit.scores().values() if one.e_value is not None]
    mean = sum(found) / max(len(found), 1)
    own = f" (of this run {number(mean)}, the mean over its adversaries)" if found else ""
    return (
        "At any time: not this audit, whose number of canaries must be chosen beforehand. At a delta above 0, "
        "earlier canaries of a run may tell something of the coins of later ones, so they are no separate games. "
        "E-values of independent runs may be "
        f"multiplied{own}, and 20 refutes the claim."
    )


def _beside(audit: Audit) -> str:
    """Return what the same scores say if they are read as those of one run's canaries."""
    texts = []
    for attack, result in ((one.attack, one.beside) for one in audit.of(Role.RUN)):
        for bound in () if result is None else result.bounds:
            least = "at least " if bound.method.is_bound else ""
            assumed = bound.method.assumes
            texts.append(f"{attack}, {bound.method.value} ({assumed}): {least}{bound.epsilon:.2f}")
    if not texts:
        return ""
    return (
        f"The same scores read as one run's canaries, each bound with 95 % confidence: {'; '.join(texts)}. What "
        "assumes normal scores is an estimate, no proof."
    )


def _above_the_claim(audit: Audit) -> str:
    """Return a sentence on estimates above a claim that no bound refutes; empty if there is none."""
    above = [
        f"{estimate:.2f} ({one.attack}, {one.role.value}) over {number(one.claim.epsilon)}"
        for one in audit.findings
        if one.claim is not None and one.role in (Role.RUN, Role.PROTECTED) and not one.refutes
        for estimate in one.estimates
        if estimate > one.claim.epsilon
    ]
    if not above:
        return ""
    return (
        f"Estimates above the claim: {'; '.join(above)}. An estimate may exceed the true epsilon by chance; the lower "
        "bound, at its stated confidence, decides."
    )


def _statement(result: AuditResult, guarantee: Guarantee) -> str:
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
    says = _verdict(result, replace(guarantee, epsilon=value, reason=reason))
    return f"{text} The paper's formula, if its hypotheses held, gives {number(value)} for the whole run: {says}."


def _verdict(result: AuditResult, guarantee: Guarantee) -> str:
    if result.verdict(guarantee) is Verdict.REFUTED:
        return "is REFUTED, since a single step already costs more"
    if guarantee.epsilon > result.ceiling:
        return (
            f"exceeds what so many trials can show ({result.ceiling:.2f}), so the audit neither refutes nor "
            "supports it"
        )
    return "is not contradicted"


def _weakness(audit: Audit) -> str:
    """Return a sentence about an audit that would mostly miss half of the noise; empty if its control says so."""
    power = audit.power
    if power is None or power >= WEAK or any(one.by_chance for one in audit.of(Role.BROKEN)):
        return ""
    training = " and, for most trainers, an audit of one training" if audit.strongest.scope == "step" else ""
    return (
        f"This audit is weak: it would find half of the noise missing with probability {power:.2f}; more "
        f"{audit.played.counted}{training} find smaller faults."
    )


def power_text(audit: Audit) -> str:
    """Return the probability with which the audit finds half of the noise missing, and by what; empty if not known."""
    power = audit.power
    if power is None:
        return ""
    text = (
        "Power: if the mechanism had half of its noise, the best attack that its theorem then allows would refute the "
        f"claim with probability {power:.2f} in as many {audit.played.counted}"
    )
    return f"{text}, by {_refuting(audit)}."


def _named(bound: OneRunBound) -> str:
    return bound.method.value.removesuffix(", bound")


def _refuting(audit: Audit) -> str:
    """Return the bounds that the power is about: the likeliest of the scores', or those of trials."""
    bounds = [(bound, one.plan) for one in audit.scores().values() for bound in one.bounds]
    if bounds:
        likeliest, read = max(bounds, key=lambda each: each[0].power or 0.0)
        is_counted = likeliest.method.guesses or read.weaker_normality is not None
        return _named(likeliest) + ("" if is_counted else " if they pass the test of normality then")
    plan, games = audit.strongest.result.plan, audit.strongest.anytime
    drawn = isinstance(plan, AuditPlan) and plan.estimator is Estimator.DRAWN_NOISE
    alone = "the noise that was drawn" if drawn else "errors alone"
    by_bets = games is not None and games.plan.law is Law.GAUSSIAN and games.plan.claimed is not None
    return f"the e-value or by {alone} (the likelier of the two)" if by_bets else alone


_COINS = "in the null control the same scores are read with coins that no training followed, and all bounds must be 0."
_CONTROLS = {
    Played.STEP: "in the null control, the attacker is asked about records that were in no batch, and must find "
    "nothing. In the protected control, the run's records are protected by known noise, and no bound may exceed the "
    "theorem. In the broken control that noise and the device's are left out, and an attack must find it.",
    Played.PROTECTION: "in the null control both worlds are the first one, and nothing must be found. In the broken "
    "control the same code runs with a quarter of the noise or four times the epsilon, and the attack must find it.",
    Played.TRAINING: f"{_COINS} In the broken control half of the noise is taken away from the same readings, which "
    "the auditor, who knows the coins and the batches, can tell from the canaries, and it must be found.",
    Played.FINAL_MODELS: _COINS,
}


def _controls(audit: Audit) -> str:
    if all(finding.role is Role.RUN for finding in audit.findings):  # as older versions kept it
        return ""
    text = f"Controls: {_CONTROLS[audit.played]}"
    if audit.arrival is not None:
        text += " In the arrival control, what canaries contribute must be in the sums of the steps that drew them."
    chance = f"A control that must find nothing fails by chance with probability at most {Role.NULL.error:g}."
    return f"{text} {chance} {headline(audit) or 'All controls behaved as required.'}"


def headline(audit: Audit) -> str:
    """Return the line that stands above an audit whose controls failed; empty if none did."""
    if not audit.failed_controls:
        return ""
    says = {one.role.value: "did not behave as required" for one in audit.failed_controls}
    remedy = f"Repeat it with more {audit.played.counted} and another seed."
    if audit.played is Played.TRAINING:
        remedy += f" The largest weight matrix holds one canary for each weight. {WITHOUT_CANARIES}"
    for one in audit.failed_controls:
        if isinstance(one, Finding) and one.role is Role.BROKEN and isinstance(one.result, OneRunResult):
            remedy = _few_draws(one.result) or (_OTHER_NUMBER if one.by_chance else remedy)
            if one.by_chance:
                says[one.role.value] = (
                    f"passes or fails by chance: half of the noise is found with probability {one.power:.2f}"
                )
            else:
                remedy = f"Half of the noise was {one.says}. {remedy}"
    if audit.arrival is not None and not audit.arrival.holds:
        remedy = f"It can find nothing, since {audit.arrival.says}. Repair that, then repeat it."
    told = " and ".join(f"the {role} {text}" for role, text in sorted(says.items()))
    return f"DO NOT RELY ON THIS AUDIT: {told}. {remedy}"


def _few_draws(result: OneRunResult) -> str:
    """Return why normal scores do not count, and the remedy; empty if they should be normal, or it is not known."""
    plan = result.plan
    seen = Method.NORMAL_BOUND in plan.methods and result.normality < NOT_NORMAL
    if plan.draws is None or not (plan.refused or seen):
        return ""
    power = max((bound.power or 0.0 for bound in result.bounds if bound.method.guesses), default=0.0)
    return (
        f"A canary is drawn q T = {plan.draws:.3g} times; its scores follow no normal law, which more canaries only "
        f"show better. Guesses decide, whose power is {power:.2f}. {WITHOUT_CANARIES}"
    )


def perfect_guesses(result: OneRunResult) -> str:
    """Return the largest epsilon that as many scores could have shown by guesses, one for each way to read them."""
    plan = result.plan
    shown = []
    for bound in result.bounds:
        if bound.method.guesses:
            every = guesses_bound(
                bound.method,
                plan.canaries,
                bound.guesses,
                bound.guesses,
                delta=plan.delta,
                confidence=plan.confidence,
            )
            shown.append(f"epsilon {every:.2f} by {bound.method.value}")
    return "; ".join(shown)
