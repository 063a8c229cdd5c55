"""An audit for a privacy reviewer: an HTML page, and the same as a PDF of one A4 page.

Both hold the statement that was attacked, who attacked it, every bound with the largest that the trials could have
shown, the power, the true positive rate at few false positives, the curve on logarithmic axes, the controls, seeds and
versions. Audits of single steps, of one training and of final models have the same page.
"""

from __future__ import annotations

import io
import math
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accounting.guarantee import Guarantee
from accounting.tables import number
from opusim.files import write_file
from opusim.tables import data_url, html_page, png_bytes
from training.attacks.findings import (
    LOW_RATE,
    Curve,
    Finding,
    Role,
    RunAudit,
    ceiling_text,
    paragraphs,
    weakness_of_trials,
)
from training.attacks.one_run.report import (
    OneRunAudit,
    Reading,
    one_run_paragraphs,
    perfect_guesses,
    refutation,
    says,
    says_of_control,
    weakness_of_scores,
)
from training.reports.drawing import new_figure, style
from training.reports.run_report import NOT_FOR_RELEASE, run_name
from training.runs.folder import AUDIT_FILE, FINAL_MODEL_FILE, ONE_RUN_FILE
from training.runs.stored_run import StoredRun

_A4 = (8.27, 11.69)
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.07, 0.93, 0.965, 0.025
_FEWEST_FALSE = 1e-5
_MOST = "most these trials can show"
_POWER = "finds half the noise with probability"
_LOW = f"true positives at {100 * LOW_RATE:g} % false"
_NULL, _BROKEN = (
    "null control: coins that no training followed",
    "broken control: half of the noise taken away",
)
_BAD_CONTROL = "A control did not behave as required: do not rely on this audit. Repeat it with more trials."

Table = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """What the page and the PDF say.

    Attributes:
        title: Heading.
        verdict: The result in one or two sentences.
        warnings: What must not be overlooked.
        statement: What was claimed before the audit, key and value.
        adversaries: Who attacked.
        bounds: A row for each bound on the run.
        bound_shares: Widths of its columns, which sum to 1.
        controls: A row for each control; none if an older version kept none.
        control_shares: Widths of its columns.
        paragraphs: The game, the result and the controls in words.
        facts: Trials, seed, step, date, versions, key and value.
        curves: True against false positives of each adversary, by name.
        limit: The claim that bounds every curve, or None.
    """

    title: str
    verdict: str
    warnings: list[str]
    statement: list[tuple[str, str]]
    adversaries: Table
    bounds: Table
    bound_shares: tuple[float, ...]
    controls: Table
    control_shares: tuple[float, ...]
    paragraphs: list[str]
    facts: list[tuple[str, str]]
    curves: list[tuple[str, Curve]]
    limit: Guarantee | None


def write_audit_page(run: StoredRun, audit: RunAudit | OneRunAudit, folder: Path) -> tuple[Path, Path]:
    """Write the page and the PDF next to the audit's JSON file, such as `audit.html` and `audit.pdf`.

    Args:
        run: The audited run.
        audit: What was found.
        folder: Where they go: for a release run outside its folder, as an audit requires.

    Returns:
        Their paths.

    Raises:
        OSError: The folder is not writable.
    """
    if isinstance(audit, RunAudit):
        sheet, kept = sheet_of_steps(run, audit), AUDIT_FILE
    else:
        sheet, kept = (
            sheet_of_trainings(run, audit),
            ONE_RUN_FILE if audit.trainings == 1 else FINAL_MODEL_FILE,
        )
    page, document = ((folder / kept).with_suffix(suffix) for suffix in (".html", ".pdf"))
    figure, axes = new_figure(5.2, 4.0)
    draw_curves(axes, sheet)
    html = html_page("audit.html", title=sheet.title, sheet=sheet, curve=data_url(png_bytes(figure)))
    write_file(page, html.encode())
    buffer = io.BytesIO()
    draw_sheet(sheet).savefig(buffer, format="pdf", metadata={"Title": sheet.title, "CreationDate": None})
    write_file(document, buffer.getvalue())
    return page, document


def sheet_of_steps(run: StoredRun, audit: RunAudit) -> Sheet:
    """Return what the page of an audit of single steps, or of a game, says."""
    on_run = [finding for finding in audit.findings if finding.role is Role.RUN]
    others = [finding for finding in audit.findings if finding.role is not Role.RUN]
    release = run.config.mode == "release"
    warnings = [NOT_FOR_RELEASE] if release and not audit.game else []  # a game's records are the auditor's
    if not audit.controls_hold:
        warnings.append(_BAD_CONTROL)
    if audit.note:
        warnings.append(audit.note)
    return Sheet(
        title=f"Privacy audit: {run_name(run)}",
        verdict=verdict(audit),
        warnings=warnings,
        statement=_statement(audit),
        adversaries=[{"name": one.attack, "sees and knows": one.result.plan.threat_model} for one in on_run],
        bounds=[_bound_row(one) for one in on_run],
        bound_shares=(0.11, 0.10, 0.13, 0.12, 0.10, 0.07, 0.17, 0.09, 0.11),
        controls=[_control_row(one) for one in others],
        control_shares=(0.16, 0.16, 0.13, 0.17, 0.09, 0.29),
        paragraphs=[text for text in paragraphs(audit) if text != audit.note],  # which is a warning already
        facts=[
            ("trials", f"{audit.trials:,} on the run, at most {audit.control_trials:,} on each control"),
            *_facts(run, audit.seed),
            ("checkpoint", f"step {audit.step}"),
        ],
        curves=[(one.attack, one.curve) for one in on_run if one.curve is not None],
        limit=audit.strongest.claim,
    )


def sheet_of_trainings(run: StoredRun, audit: OneRunAudit) -> Sheet:
    """Return what the page of an audit of one training, or of final models, says."""
    claim = next((one for one in audit.guarantees if one.is_proven), None)
    controls = [
        _control_row_of_scores(name, one, broken=name != _NULL)
        for name, kept in ((_NULL, audit.null), (_BROKEN, audit.broken))
        for one in kept
    ]
    failed = any(
        not one["finding"].endswith("as required") and "too few" not in one["finding"] for one in controls
    )
    played = "one training" if audit.trainings == 1 else "final models"
    counted = f"{audit.canaries:,}, with crafted {audit.crafted}"
    return Sheet(
        title=f"Privacy audit of {played}: {run_name(run)}",
        verdict=verdict_of_scores(audit, claim),
        warnings=[
            *([NOT_FOR_RELEASE] if run.config.mode == "release" else []),
            *([_BAD_CONTROL] if failed else []),
        ],
        statement=_stated(claim or audit.guarantees[0]),
        adversaries=[
            {"name": one.adversary, "sees and knows": one.result.plan.adversary} for one in audit.readings
        ],
        bounds=[row for one in audit.readings for row in _rows_of_scores(one)],
        bound_shares=(0.12, 0.16, 0.15, 0.12, 0.10, 0.07, 0.14, 0.14),
        controls=controls,
        control_shares=(0.33, 0.17, 0.13, 0.09, 0.28),
        paragraphs=[text for text in one_run_paragraphs(audit)[:-1] if not text.startswith("Adversary ")],
        facts=[
            ("canaries", counted) if audit.trainings == 1 else ("trainings", f"{audit.trainings:,}"),
            ("steps", f"{audit.steps:,} in each training"),
            ("at most", f"{perfect_guesses(audit)}, if every guess were right"),
            *_facts(run, audit.seed),
        ],
        curves=[(one.adversary, one.curve) for one in audit.readings if one.curve is not None],
        limit=claim,
    )


def verdict(audit: RunAudit) -> str:
    """Return the result in one or two sentences."""
    best = audit.strongest
    bound, claim = best.result.epsilon_lower, best.claim
    found = f"The strongest attack shows an epsilon of at least {bound:.2f} with 95 % confidence"
    if claim is None or math.isinf(claim.epsilon):
        return f"{found}. No theorem gives a finite epsilon to compare it with."
    whose = "one step" if best.scope == "step" else "the run"
    if best.refutes:
        return f"REFUTED. {found}, above the {claim.status.value} {number(claim.epsilon)} of {whose}."
    share = bound / claim.epsilon if claim.epsilon else 1.0
    weak = weakness_of_trials(audit)
    if best.result.ceiling <= claim.epsilon:
        weak = f"So few trials cannot show more than {best.result.ceiling:.2f}, so they could not refute it."
    return (
        f"Not refuted. {found}: {100 * share:.0f} % of the {claim.status.value} {number(claim.epsilon)} of {whose}."
        f"{weak and ' '}{weak} An audit never proves privacy; a better attack may exist."
    )


def verdict_of_scores(audit: OneRunAudit, claim: Guarantee | None) -> str:
    """Return the result of an audit by scores of canaries in one or two sentences.

    Args:
        audit: What was found.
        claim: What is proven of the training, or None.
    """
    if audit.refuted:
        return f"REFUTED. {refutation(audit)}"
    known = [
        (bound.epsilon, bound, one)
        for one in audit.readings
        for bound in one.result.bounds
        if bound.method.is_bound
    ]
    found, bound, one = max(known, key=lambda each: each[0])
    text = (
        f"The highest bound shows an epsilon of at least {found:.2f} ({one.adversary}, {bound.method.value}); all hold "
        f"together with {100 * audit.confidence:.0f} % confidence"
    )
    if claim is None:
        return f"{text}. No theorem gives a finite epsilon to compare it with."
    weak = weakness_of_scores(audit)
    return (
        f"Not refuted. {text}. That is {100 * found / claim.epsilon:.0f} % of the {claim.status.value} "
        f"{number(claim.epsilon)}; ideal scores would show {bound.ceiling:.2f}.{weak and ' '}{weak} An audit never "
        "proves privacy; a better attack may exist."
    )


def _statement(audit: RunAudit) -> list[tuple[str, str]]:
    claim = audit.strongest.claim or audit.guarantees[0]
    attacked = _stated(claim)
    if audit.strongest.claim not in (None, *audit.guarantees):
        whole = audit.guarantees[0]
        attacked.append(
            ("whole run", f"epsilon {number(whole.epsilon)} at delta {whole.delta:g}, {whole.status.value}")
        )
    return [*attacked, ("two worlds", audit.strongest.result.plan.pair)]


def _stated(claim: Guarantee) -> list[tuple[str, str]]:
    return [
        ("attacked", f"epsilon {number(claim.epsilon)} at delta {claim.delta:g}, {claim.status.value}"),
        ("protects", f"{claim.unit.value}, {claim.adjacency.value}"),
        ("released", claim.release.value),
        ("mechanism", claim.mechanism),
        ("source", claim.source),
    ]


def _low_rate(curve: Curve | None, trials: float) -> str:
    """Return the true positives at few false ones, or at as few as the trials can tell, with their limits.

    Args:
        curve: Of the attack, or None.
        trials: Of the second world, of which half choose the threshold.
    """
    if curve is None:
        return "–"
    low, high = (100 * limit for limit in curve.low_limits)
    found = f"{100 * curve.low_true_positive:.2f} % ({low:.2f} to {high:.2f} %)"
    fresh = f"{100 * curve.low_false_positive:.2f} % false"
    if trials / 2 * LOW_RATE < 1:
        return f"too few trials: {found}, with {fresh}"
    return f"{found}, with {fresh} on fresh trials"


def _power(power: float | None) -> str:
    return "–" if power is None else f"{power:.2f}"


def _bound_row(finding: Finding) -> dict[str, str]:
    result, estimate = finding.result, finding.estimate
    return {
        "attack": finding.attack,
        "epsilon at least": f"{result.epsilon_lower:.2f}"
        + ("" if estimate is None else f" (estimate {estimate.epsilon:.2f})"),
        _MOST: ceiling_text(result),
        "estimator": result.plan.estimator.value,
        _POWER: _power(finding.power),
        "AUC": f"{finding.auc:.3f}",
        _LOW: _low_rate(finding.curve, 2 * result.n_out),
        "trials": f"{result.n_in:,} + {result.n_out:,}",
        "finding": finding.says,
    }


def _rows_of_scores(reading: Reading) -> Table:
    """Return a row for each way to read an adversary's scores."""
    result = reading.result
    rows = []
    for place, bound in enumerate(result.bounds):
        found = f"at least {bound.epsilon:.2f}"
        if bound.interval is not None:
            found = f"{bound.epsilon:.2f} ({bound.interval[0]:.2f} to {bound.interval[1]:.2f})"
        rows.append(
            {
                "adversary": "" if place else reading.adversary,
                "scores read as": bound.method.value,
                "epsilon": found,
                "ideal scores would show": f"{bound.ceiling:.2f}",
                _POWER: _power(bound.power),
                "AUC": "" if place else f"{result.auc:.3f}",
                _LOW: "" if place else _low_rate(reading.curve, result.plan.canaries / 2),
                "finding": says(result, bound.method),
            }
        )
    return rows


def _control_row_of_scores(name: str, reading: Reading, *, broken: bool) -> dict[str, str]:
    best = max(
        (bound for bound in reading.result.bounds if bound.method.is_bound), key=lambda bound: bound.epsilon
    )
    return {
        "control": name,
        "adversary": reading.adversary,
        "epsilon at least": f"{best.epsilon:.2f}",
        "AUC": f"{reading.result.auc:.3f}",
        "finding": says_of_control(reading.result, broken=broken),
    }


def _control_row(finding: Finding) -> dict[str, str]:
    return {
        "control": finding.role.value,
        "attack": finding.attack,
        "epsilon at least": f"{finding.result.epsilon_lower:.2f}",
        _MOST: f"{finding.result.ceiling:.2f}",
        "AUC": f"{finding.auc:.3f}",
        "finding": finding.says,
    }


def _facts(run: StoredRun, seed: int) -> list[tuple[str, str]]:
    repeatable = (
        "repeats the audit" if run.config.mode == "experiment" else "of what does not come from the system"
    )
    return [
        ("seed", f"{seed} ({repeatable})"),
        ("run", f"{run.config.mode} mode, {run.folder.path.name}"),
        ("date", time.strftime("%Y-%m-%d")),
        ("versions", ", ".join(f"{name} {version}" for name, version in run.facts["versions"].items())),
    ]


# Figures


def draw_curves(axes: Axes, sheet: Sheet) -> None:
    """Draw the true positives against the false ones of each adversary, both axes logarithmic.

    The lines of the proven epsilon bound what any attack may reach: e^epsilon FPR + delta.
    """
    least = 0.1
    for count, (name, curve) in enumerate(sheet.curves):
        points = [
            (false, true)
            for false, true in zip(curve.false_positive, curve.true_positive, strict=True)
            if false > 0 and true > 0
        ]
        if not points:
            continue
        least = min(least, points[0][0])
        look = {**style(count), "marker": ""}
        axes.plot(*zip(*points, strict=True), label=name, **look)
    least = max(min(least, LOW_RATE / 2), _FEWEST_FALSE)
    rates = [least * (1 / least) ** (step / 200) for step in range(201)]
    claim = sheet.limit
    if claim is not None and math.isfinite(claim.epsilon) and claim.epsilon < 700:
        allowed = [min(1.0, math.exp(claim.epsilon) * rate + claim.delta) for rate in rates]
        axes.plot(
            rates,
            allowed,
            color="#4a525b",
            linestyle=":",
            linewidth=1.4,
            label=f"limit of epsilon {number(claim.epsilon)}",
        )
    axes.plot(rates, rates, color="#9aa3ad", linewidth=1.0, label="guessing")
    axes.axvline(LOW_RATE, color="#9aa3ad", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.1))
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.legend(frameon=False, fontsize=8, loc="lower right")


class _Page:
    """Writes lines of text from the top of a page downwards."""

    def __init__(self, size: float) -> None:
        self.figure = Figure(figsize=_A4)
        self.size, self.y = size, _TOP

    def text(
        self, text: str, *, x: float = _LEFT, right: float = _RIGHT, size: float | None = None, **look: Any
    ) -> None:
        """Write a paragraph between two edges."""
        own = self.size if size is None else size
        wide = 0.64 if look.get("fontweight") == "bold" else 0.55  # of the type size, a letter of DejaVu Sans
        letters = int((right - x) * _A4[0] * 72 / (own * wide))
        for line in textwrap.wrap(text, max(letters, 12)) or [""]:
            self.figure.text(x, self.y, line, fontsize=own, va="top", **look)
            self.y -= own * 1.28 / 72 / _A4[1]

    def heading(self, text: str) -> None:
        """Write a heading with a line below."""
        self.y -= 0.006
        self.text(text, size=self.size + 1.5, fontweight="bold", color="#0b3d5c")
        self.y -= 0.002

    def pairs(self, rows: Sequence[tuple[str, str]], *, right: float = _RIGHT) -> None:
        """Write names and values."""
        for name, value in rows:
            top = self.y
            self.text(name, right=_LEFT + 0.1, color="#4a525b")
            self.y = top
            self.text(value, x=_LEFT + 0.1, right=right)

    def table(self, rows: Table, shares: Sequence[float]) -> None:
        """Write a table whose columns take these shares of the width."""
        starts = [_LEFT + (_RIGHT - _LEFT) * sum(shares[:column]) for column in range(len(shares) + 1)]
        for number_, cells in enumerate([list(rows[0]), *(list(row.values()) for row in rows)]):
            top = lowest = self.y
            for column, cell in enumerate(cells):
                self.y = top
                look = {"fontweight": "bold", "color": "#4a525b"} if number_ == 0 else {}
                self.text(
                    cell, x=starts[column], right=starts[column + 1] - 0.008, size=self.size - 0.5, **look
                )
                lowest = min(lowest, self.y)
            self.y = lowest - 0.002


def draw_sheet(sheet: Sheet, size: float = 8.0) -> Figure:
    """Return the A4 page with type of one size, smaller until all of it fits; long texts are wrapped."""
    page = _Page(size)
    page.text(sheet.title, size=size + 6, fontweight="bold")
    page.text(
        sheet.verdict,
        size=size + 1.5,
        fontweight="bold",
        color="#8a1c1c" if sheet.verdict.startswith("REF") else "#1b1f24",
    )
    for warning in sheet.warnings:
        page.text(warning, color="#8a1c1c")
    page.heading("Statement and adversaries")
    top = page.y
    page.pairs(
        [*sheet.statement, *((one["name"], one["sees and knows"]) for one in sheet.adversaries)], right=0.53
    )
    bottom = page.y
    height = 0.235
    axes = page.figure.add_axes((0.60, top - height, _RIGHT - 0.60, height - 0.005))
    draw_curves(axes, sheet)
    axes.tick_params(labelsize=size - 1)
    axes.xaxis.label.set_fontsize(size)
    axes.yaxis.label.set_fontsize(size)
    axes.legend(frameon=False, fontsize=size - 1.5, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    page.y = min(bottom, top - height - 0.035)
    page.heading("Lower bounds on epsilon of this run")
    page.table(sheet.bounds, sheet.bound_shares)
    if sheet.controls:
        page.heading("Controls")
        page.table(sheet.controls, sheet.control_shares)
    page.heading("How to read this")
    for paragraph in sheet.paragraphs:
        page.text(paragraph)
        page.y -= 0.003
    page.heading("To repeat it")
    page.pairs(sheet.facts)
    return page.figure if page.y >= _BOTTOM or size <= 5.0 else draw_sheet(sheet, size - 0.5)
