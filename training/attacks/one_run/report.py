"""What the audit of one training found: as data, as a table and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accounting.audit import (
    NOT_NORMAL,
    Method,
    OneRunBound,
    OneRunPlan,
    OneRunResult,
    audit_one_run,
    guesses_bound,
)
from accounting.tables import number
from training.attacks.findings import Curve, weakness
from training.runs.storage import StoredGuarantee, read_record, record_from_json, record_json

SCHEMA_VERSION = 1
SURE = 0.95
"""Power from which an audit that does not find half of the noise is no matter of too few canaries."""
_REMEDY = "run opusim audit --one-run again, or delete it"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one adversary found.

    Attributes:
        adversary: Its name.
        result: The bounds from its scores.
        curve: Its true and false positives at every threshold, or None if an older version kept none.
    """

    adversary: str
    result: OneRunResult
    curve: Curve | None = None

    @classmethod
    def of(cls, adversary: str, scores: np.ndarray, inside: np.ndarray, plan: OneRunPlan) -> Reading:
        """Return what the scores of an adversary say.

        Args:
            adversary: Its name.
            scores: One for each canary, shape (m,).
            inside: The coins, bool, shape (m,).
            plan: How the scores are read.
        """
        return cls(
            adversary=adversary,
            result=audit_one_run(scores, inside, plan),
            curve=Curve.of(scores[inside], scores[~inside]),
        )


@dataclass(frozen=True, kw_only=True)
class OneRunAudit:
    """The audit of a run in one training.

    Attributes:
        readings: One for each adversary.
        guarantees: Those of the audited training at the audit's delta.
        accounted: What the ledger says that the training released.
        canaries: m.
        crafted: What the adversary chose of each canary: "gradients" or "records".
        steps: Steps of the training.
        seed: Repeats the audit.
        cpu_s: Processor seconds of the training.
        trainings: Trainings, with one crafted record each if there are several.
        looks: How often the scores were read, with other numbers of trainings or at other deltas, this time included.
        null: The same scores read with coins that no training followed, so that there is nothing to find.
        broken: The same readings with half of their noise taken away, which an audit must find.
    """

    readings: tuple[Reading, ...]
    guarantees: tuple[StoredGuarantee, ...]
    accounted: str
    canaries: int
    crafted: str
    steps: int
    seed: int
    cpu_s: float
    trainings: int = 1
    looks: int = 1
    null: tuple[Reading, ...] = ()
    broken: tuple[Reading, ...] = ()

    def reading(self, adversary: str) -> OneRunResult:
        """Return the result of an adversary.

        Raises:
            KeyError: There is none of this name.
        """
        return {reading.adversary: reading.result for reading in self.readings}[adversary]

    @property
    def confidence(self) -> float:
        """That of all bounds together, at every look: the sum of their errors bounds the error, up to 1."""
        plans = [reading.result.plan for reading in self.readings]
        error = sum((1 - plan.confidence) * sum(method.is_bound for method in plan.methods) for plan in plans)
        return max(0.0, 1 - self.looks * error)

    @property
    def refuted(self) -> bool:
        """Whether a bound exceeds the claim."""
        return any(reading.result.refuting for reading in self.readings)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with the schema version."""
        return record_json(self, SCHEMA_VERSION)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> OneRunAudit:
        """Return the audit that `to_json` converted.

        Raises:
            ValueError: The content is of another schema version, or is not such an audit.
        """
        return record_from_json(cls, content, SCHEMA_VERSION)


def read_one_run(path: Path) -> OneRunAudit:
    """Read the audit in a file.

    Raises:
        RunFolderError: The file is not such an audit.
    """
    return read_record(path, OneRunAudit, SCHEMA_VERSION, what="a one-run audit", remedy=_REMEDY)


def one_run_rows(audit: OneRunAudit) -> list[dict[str, str]]:
    """Return a table row for each adversary and method, each number with its ceiling."""
    rows = []
    for reading in audit.readings:
        result = reading.result
        for bound in result.bounds:
            found = f"{bound.epsilon:.2f}"
            if bound.interval is not None:
                found += f" ({bound.interval[0]:.2f} to {bound.interval[1]:.2f})"
            rows.append(
                {
                    "adversary": reading.adversary,
                    "method": bound.method.value,
                    "guesses": f"{bound.correct} of {bound.guesses} right" if bound.guesses else "-",
                    "epsilon": found if not bound.method.is_bound else f"at least {found}",
                    "ceiling": f"{bound.ceiling:.2f}",
                    "power": "-" if bound.power is None else f"{bound.power:.2f}",
                    "claimed": _claim(result),
                    "AUC": f"{result.auc:.3f}",
                    "normality p": "-" if bound.guesses else f"{result.normality:.2g}",
                    "finding": says(result, bound.method),
                }
            )
    return rows


def _claim(result: OneRunResult) -> str:
    return "none" if result.plan.claimed is None else number(result.plan.claimed)


def says(result: OneRunResult, method: Method) -> str:
    """Return what a reading of the scores says, in a few words."""
    bound, claimed = result.bound(method), result.plan.claimed
    normal = result.normality >= NOT_NORMAL
    if method is Method.NORMAL_ESTIMATE:
        return "an estimate" if normal else "scores are not normal: not to be relied on"
    if claimed is not None and result.exceeds(bound):
        return "REFUTED" if bound in result.refuting else "scores are not normal: not to be relied on"
    if bound.ceiling > 0 and bound.epsilon >= 0.8 * bound.ceiling:
        return "near the ceiling"
    return "not refuted" if bound.epsilon > 0 else "nothing found, which proves nothing"


def short_rows(audit: OneRunAudit) -> list[dict[str, str]]:
    """Return a table row for each adversary and method that fits a page of 80 columns; see `one_run_rows`."""
    rows = []
    for reading in audit.readings:
        result = reading.result
        for number_of_bound, bound in enumerate(result.bounds):
            found = f"{bound.epsilon:.2f}"
            if bound.interval is not None:
                found += f" ({bound.interval[0]:.2f}-{bound.interval[1]:.2f})"
            rows.append(
                {
                    "adversary": "" if number_of_bound else reading.adversary,
                    "read as": bound.method.value.replace("guesses, ", "").replace("scores, ", ""),
                    "epsilon": f"{'>= ' if bound.method.is_bound else ''}{found}",
                    "ceiling": f"{bound.ceiling:.2f}",
                    "finding": says(result, bound.method).partition(",")[0].partition(":")[0],
                }
            )
    return rows


def _what_was_played(audit: OneRunAudit) -> str:
    parts = f"the run's own sampler, clip, noise, optimizer and ledger ({audit.accounted})"
    if audit.trainings > 1:
        return (
            f"{audit.trainings} trainings of {audit.steps} steps each, with {parts}. A fair coin put one crafted "
            "record in or left it out of each training, independently, and the adversary scores every final model."
        )
    return (
        f"one training of {audit.steps} steps with {parts}, and {audit.canaries} canaries with crafted "
        f"{audit.crafted}. A fair coin put each canary in or left it out, independently. Each adversary scores every "
        "canary."
    )


def one_run_paragraphs(audit: OneRunAudit) -> list[str]:
    """Return the audit as text: the game, the adversaries, and what the numbers mean."""
    game = (
        f"Game: {_what_was_played(audit)} Each bound holds with confidence "
        f"{audit.readings[0].result.plan.confidence:.4g}, so that all of them hold with confidence "
        f"{audit.confidence:.4g}. The ceiling is what ideal scores would give at the claimed "
        "epsilon with as many scores; a number near it says that no better attack would have shown more."
    )
    if audit.looks > 1:
        game += (
            f" The scores were read {audit.looks} times, with other numbers of trainings or at other deltas, and "
            f"stopping once the outcome pleases errs more often; {audit.confidence:.4g} counts the bounds of all "
            f"{audit.looks} times."
        )
    sights = [f"Adversary {r.adversary!r} {r.result.plan.adversary}." for r in audit.readings]
    controls = _controls(audit)
    if audit.readings[0].result.plan.claimed is None:
        return [game, *sights, *controls, "No finite epsilon is claimed, so there is nothing to refute."]
    return [game, *sights, *_on_other_deltas(audit), *controls, *_power(audit), refutation(audit)]


def refutation(audit: OneRunAudit) -> str:
    """Return in a sentence whether the claim is refuted, and by what."""
    claimed = _claim(audit.readings[0].result)
    refuted = [
        f"{reading.adversary!r} by {bound.method.value}: at least {_found(reading.result, bound)}"
        for reading in audit.readings
        for bound in reading.result.refuting
    ]
    if refuted:
        return f"The claimed epsilon {claimed} is REFUTED ({'; '.join(refuted)})."
    return f"The claimed epsilon {claimed} is not refuted, which does not prove it."


def _found(result: OneRunResult, bound: OneRunBound) -> str:
    """Return a bound above the claim; if it is not above the claim's own epsilon, where it is above the claim."""
    strictest = result.at_strictest(bound)
    if strictest is None or (result.plan.claimed is not None and bound.epsilon > result.plan.claimed):
        return f"{bound.epsilon:.2f}"
    delta, claimed, found = strictest
    return f"{found:.2f} at delta {delta:g}, where {claimed:.2f} is claimed"


def _on_other_deltas(audit: OneRunAudit) -> list[str]:
    """Say at which other delta the bounds of normal scores are held against the claim."""
    for reading in audit.readings:
        for bound in reading.result.bounds:
            strictest = reading.result.at_strictest(bound)
            if strictest is not None:
                delta, claimed, _ = strictest
                return [
                    f"Normal scores are held against the claim at delta {delta:g} (epsilon {claimed:.2f}), where it is "
                    "strictest: sampled steps cost less at large deltas than the Gaussian mechanism with the same "
                    "epsilon does."
                ]
    return []


def power_of(result: OneRunResult, *, guesses: bool | None = None) -> float | None:
    """Return the largest probability with which a bound from ideal scores would refute the claim at half the noise.

    Args:
        result: Of one adversary.
        guesses: True for bounds from guesses only, False for those of normal scores, None for both.

    Returns:
        None if it is not known.
    """
    bounds = [one for one in result.bounds if guesses is None or one.method.guesses == guesses]
    return max((bound.power for bound in bounds if bound.power is not None), default=None)


def _power(audit: OneRunAudit) -> list[str]:
    """Say what as many scores would find."""
    known = {
        guesses: [
            found for one in audit.readings if (found := power_of(one.result, guesses=guesses)) is not None
        ]
        for guesses in (True, False)
    }
    if not known[True]:
        return []
    text = (
        "Power: if the mechanism had half of its noise, ideal scores of as many "
        f"{'trainings' if audit.trainings > 1 else 'canaries'} would refute the claim with probability "
        f"{max(known[True]):.2f} by guesses"
    )
    if known[False]:
        text += f", and {max(known[False]):.2f} by normal scores if they pass the test of normality then"
    return [f"{text}. {weakness_of_scores(audit)}".rstrip()]


def weakness_of_scores(audit: OneRunAudit) -> str:
    """Return `weakness` of an audit by scores of canaries or trainings."""
    powers = [found for one in audit.readings if (found := power_of(one.result)) is not None]
    counted = "trainings" if audit.trainings > 1 else "canaries"
    return weakness(max(powers, default=None), f"more {counted} find smaller faults")


def perfect_guesses(audit: OneRunAudit) -> str:
    """Return the largest epsilon that as many scores could have shown by guesses, one for each way to read them."""
    result = audit.readings[0].result
    plan = result.plan
    shown = {
        bound.method.value: guesses_bound(
            bound.method,
            plan.canaries,
            bound.guesses,
            bound.guesses,
            delta=plan.delta,
            confidence=plan.confidence,
        )
        for bound in result.bounds
        if bound.method.guesses
    }
    return "; ".join(f"epsilon {epsilon:.2f} by {name}" for name, epsilon in shown.items())


def says_of_control(result: OneRunResult, *, broken: bool) -> str:
    """Return whether a control behaved as required.

    Args:
        result: The control's.
        broken: Whether it has half of the noise, and must be found; otherwise there is nothing to find.
    """
    if not broken:
        found = any(bound.epsilon > 0 for bound in result.bounds if bound.method.is_bound)
        return "a false alarm: see the text" if found else "nothing found, as required"
    if result.refuting:
        return "found, as required"
    sure = (power_of(result, guesses=True) or 0.0) >= SURE
    return (
        "not found by this attack"
        if sure
        else "not found: too few canaries for guesses, and scores not normal"
    )


def _controls(audit: OneRunAudit) -> list[str]:
    if not audit.null:
        return []
    null = {says_of_control(reading.result, broken=False) for reading in audit.null}
    text = (
        "Null control: the same scores read with coins that no training followed, for which all bounds must be 0 (by "
        f"chance, one audit in twenty has one above it): {'; '.join(sorted(null))}."
    )
    broken = {says_of_control(reading.result, broken=True) for reading in audit.broken}
    if broken:
        text += (
            " Broken control: the same readings with half of the noise taken away, which the auditor, who knows the "
            f"coins and the batches, can tell from the canaries: {'; '.join(sorted(broken))}."
        )
    return [text]
