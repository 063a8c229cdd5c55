"""An audit for a privacy reviewer: an HTML page, and the same as a PDF of one A4 page.

Both hold the statement that was attacked, who attacked it, every bound with the largest that the trials could have
shown, the true positive rate at few false positives, the curve on logarithmic axes, the controls, seeds and versions.
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
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from accounting.tables import number
from opusim.files import write_file
from training.attacks.findings import LOW_RATE, Finding, Role, RunAudit, paragraphs
from training.reports.drawing import new_figure, png_bytes, style
from training.reports.run_report import NOT_FOR_RELEASE, data_url, render, run_name
from training.runs.stored_run import StoredRun

HTML_NAME, PDF_NAME = "audit.html", "audit.pdf"
_A4 = (8.27, 11.69)
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.07, 0.93, 0.965, 0.025
_FEWEST_FALSE = 1e-5

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
        bounds: A row for each attack on the run.
        controls: A row for each attack on a control.
        paragraphs: The game, the result and the controls in words.
        facts: Trials, seed, step, date, versions, key and value.
    """

    title: str
    verdict: str
    warnings: list[str]
    statement: list[tuple[str, str]]
    adversaries: Table
    bounds: Table
    controls: Table
    paragraphs: list[str]
    facts: list[tuple[str, str]]


def write_audit_page(run: StoredRun, audit: RunAudit, folder: Path) -> tuple[Path, Path]:
    """Write `audit.html` and `audit.pdf`; returns their paths.

    Args:
        run: The audited run.
        audit: What was found.
        folder: Where they go: for a release run outside its folder, as `audit_run` requires.

    Raises:
        OSError: The folder is not writable.
    """
    sheet = sheet_of(run, audit)
    figure, axes = new_figure(5.2, 4.0)
    draw_curves(axes, audit)
    html = render("audit.html", title=sheet.title, sheet=sheet, curve=data_url(png_bytes(figure)))
    write_file(folder / HTML_NAME, html.encode())
    buffer = io.BytesIO()
    draw_sheet(sheet, audit).savefig(
        buffer, format="pdf", metadata={"Title": sheet.title, "CreationDate": None}
    )
    write_file(folder / PDF_NAME, buffer.getvalue())
    return folder / HTML_NAME, folder / PDF_NAME


def sheet_of(run: StoredRun, audit: RunAudit) -> Sheet:
    """Return what the page of an audit says."""
    on_run = [finding for finding in audit.findings if finding.role is Role.RUN]
    others = [finding for finding in audit.findings if finding.role is not Role.RUN]
    release = run.config.mode == "release"
    warnings = [NOT_FOR_RELEASE] if release and not audit.game else []  # a game's records are the auditor's
    if not audit.controls_hold:
        warnings.append(
            "A control did not behave as required: do not rely on this audit. Repeat it with more trials."
        )
    if audit.note:
        warnings.append(audit.note)
    return Sheet(
        title=f"Privacy audit: {run_name(run)}",
        verdict=verdict(audit),
        warnings=warnings,
        statement=_statement(audit),
        adversaries=[{"name": one.attack, "sees and knows": one.result.plan.threat_model} for one in on_run],
        bounds=[_bound_row(one) for one in on_run],
        controls=[_control_row(one) for one in others],
        paragraphs=[text for text in paragraphs(audit) if text != audit.note],  # which is a warning already
        facts=_facts(run, audit),
    )


def verdict(audit: RunAudit) -> str:
    """Return the result in one or two sentences."""
    best = audit.strongest
    bound, claim = best.result.epsilon_lower, best.claim
    found = f"The strongest attack shows an epsilon of at least {bound:.2f} with 95 % confidence"
    if claim is None:
        return f"{found}. No theorem gives a finite epsilon to compare it with."
    whose = "one step" if best.scope == "step" else "the run"
    if best.refutes:
        return f"REFUTED. {found}, above the {claim.status.value} {number(claim.epsilon)} of {whose}."
    share = bound / claim.epsilon if claim.epsilon else 1.0
    power = (
        ""
        if best.result.ceiling > claim.epsilon
        else (f" So few trials cannot show more than {best.result.ceiling:.2f}, so they could not refute it.")
    )
    return (
        f"Not refuted. {found}: {share:.0%} of the {claim.status.value} {number(claim.epsilon)} of {whose}.{power} An "
        "audit never proves privacy; a better attack may exist."
    )


def _statement(audit: RunAudit) -> list[tuple[str, str]]:
    claim = audit.strongest.claim or audit.guarantees[0]
    attacked = [
        ("attacked", f"epsilon {number(claim.epsilon)} at delta {claim.delta:g}, {claim.status.value}"),
        ("protects", f"{claim.unit.value}, {claim.adjacency.value.replace('_', ' ')}"),
        ("released", claim.release.value),
        ("mechanism", claim.mechanism),
        ("source", claim.source),
    ]
    if audit.strongest.claim not in (None, *audit.guarantees):
        whole = audit.guarantees[0]
        attacked.append(
            ("whole run", f"epsilon {number(whole.epsilon)} at delta {whole.delta:g}, {whole.status.value}")
        )
    return [*attacked, ("two worlds", audit.strongest.result.plan.pair)]


def _bound_row(finding: Finding) -> dict[str, str]:
    result, curve = finding.result, finding.curve
    low = "–"
    if curve is not None:
        low = f"{curve.low_true_positive:.2%} ({curve.low_limits[0]:.2%} to {curve.low_limits[1]:.2%})"
        low = f"{low}, with {curve.low_false_positive:.2%} false on fresh trials"
    return {
        "attack": finding.attack,
        "epsilon at least": f"{result.epsilon_lower:.2f}",
        "most these trials can show": f"{result.ceiling:.2f}",
        "estimator": result.plan.estimator.value,
        "AUC": f"{finding.auc:.3f}",
        f"true positives at {LOW_RATE:.1%} false": low,
        "trials": f"{result.n_in:,} + {result.n_out:,}",
        "finding": finding.says,
    }


def _control_row(finding: Finding) -> dict[str, str]:
    return {
        "control": finding.role.value,
        "attack": finding.attack,
        "epsilon at least": f"{finding.result.epsilon_lower:.2f}",
        "most these trials can show": f"{finding.result.ceiling:.2f}",
        "AUC": f"{finding.auc:.3f}",
        "finding": finding.says,
    }


def _facts(run: StoredRun, audit: RunAudit) -> list[tuple[str, str]]:
    repeatable = (
        "repeats the audit" if run.config.mode == "experiment" else "of what does not come from the system"
    )
    return [
        ("trials", f"{audit.trials:,} on the run, at most {audit.control_trials:,} on each control"),
        ("seed", f"{audit.seed} ({repeatable})"),
        ("checkpoint", f"step {audit.step}"),
        ("run", f"{run.config.mode} mode, {run.folder.path.name}"),
        ("date", time.strftime("%Y-%m-%d")),
        ("versions", ", ".join(f"{name} {version}" for name, version in run.facts["versions"].items())),
    ]


# Figures


def draw_curves(axes: Axes, audit: RunAudit) -> None:
    """Draw the true positives against the false ones of each attack on the run, both axes logarithmic.

    The lines of the proven epsilon bound what any attack may reach: e^epsilon FPR + delta.
    """
    shown = [one for one in audit.findings if one.role is Role.RUN and one.curve is not None]
    least = 0.1
    for count, one in enumerate(shown):
        if one.curve is None:
            continue
        points = [
            (false, true)
            for false, true in zip(one.curve.false_positive, one.curve.true_positive, strict=True)
            if false > 0 and true > 0
        ]
        if not points:
            continue
        least = min(least, points[0][0])
        look = {**style(count), "marker": ""}
        axes.plot(*zip(*points, strict=True), label=one.attack, **look)
    least = max(min(least, LOW_RATE / 2), _FEWEST_FALSE)
    rates = [least * (1 / least) ** (step / 200) for step in range(201)]
    claim = audit.strongest.claim
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


def draw_sheet(sheet: Sheet, audit: RunAudit) -> Figure:
    """Return the A4 page; long texts are wrapped, and the type shrinks until all of it fits."""
    for size in (8.0, 7.5, 7.0, 6.5, 6.0, 5.5, 5.0):
        figure, used = _drawn(sheet, audit, size)
        if used >= _BOTTOM:
            break
    return figure


class _Page:
    """Writes lines of text from the top of a page downwards."""

    def __init__(self, size: float) -> None:
        self.figure = Figure(figsize=_A4)
        FigureCanvasAgg(self.figure)
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


def _drawn(sheet: Sheet, audit: RunAudit, size: float) -> tuple[Figure, float]:
    """Return the page with type of one size, and how far down it reaches."""
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
    draw_curves(axes, audit)
    axes.tick_params(labelsize=size - 1)
    axes.xaxis.label.set_fontsize(size)
    axes.yaxis.label.set_fontsize(size)
    axes.legend(frameon=False, fontsize=size - 1.5, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    page.y = min(bottom, top - height - 0.035)
    page.heading("Lower bounds on epsilon of this run")
    page.table(sheet.bounds, (0.11, 0.10, 0.14, 0.13, 0.07, 0.20, 0.12, 0.13))
    page.heading("Controls")
    page.table(sheet.controls, (0.16, 0.16, 0.13, 0.17, 0.09, 0.29))
    page.heading("How to read this")
    for paragraph in sheet.paragraphs:
        page.text(paragraph)
        page.y -= 0.003
    page.heading("To repeat it")
    page.pairs(sheet.facts)
    return page.figure, page.y
