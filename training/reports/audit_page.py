"""An audit for a privacy reviewer: an HTML page, and the same as a PDF of one A4 page.

Both hold the statement that was attacked, who attacked it, every bound with the largest that the trials could have
shown, the power, the true positive rate at few false positives, the curve on logarithmic axes, the controls, seeds and
versions. Audits of single steps, of one training and of final models have the same page.
"""

from __future__ import annotations

import io
import math
import shlex
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from opusim.accounting.audit import AuditPlan
from opusim.accounting.explanation import SEED_REBUILDS, guarantee_rows, number
from opusim.accounting.guarantee import Guarantee, to_json
from opusim.files import write_file
from opusim.tables import data_url, html_page, png_bytes
from opusim.training.attacks.findings import (
    LOW,
    LOW_RATE,
    Audit,
    Curve,
    Played,
    Role,
    audit_rows,
    headline,
    paragraphs,
    perfect_guesses,
    verdict,
)
from opusim.training.private_loop.folder import PrivacySettings, stated_loop
from opusim.training.reports.run_report import NOT_FOR_RELEASE, run_name, shown_audits, shown_values
from opusim.training.runs.drawing import new_figure, style
from opusim.training.runs.folder import RunFolder, StoredRun

_A4 = (8.27, 11.69)
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.07, 0.93, 0.965, 0.025
_LINE = 1.28 / 72 / _A4[1]
"""Height of a line, of the page's, for each point of its type."""
_FEWEST_FALSE = 1e-5
_BOUNDS = {
    **{"attack": ("attack", 0.11), "read as": ("read as", 0.10), "epsilon": ("epsilon", 0.12)},
    **{"ceiling": ("typical of ideal scores", 0.11), "AUC": ("AUC", 0.06)},
    **{"power": ("finds half the noise with probability", 0.11)},
    **{LOW: (LOW, 0.17), "trials": ("trials", 0.10), "finding": ("finding", 0.12)},
}
"""The columns of the bounds by the key of `audit_rows`: heading, and share of the page's width."""
AUDIT_COLUMNS = {
    **{"subject": "subject", "attack": "attack", "read as": "read as", "epsilon": "epsilon"},
    **{"evidence": "evidence", "ceiling": "typical of ideal scores", "finding": "finding"},
}
"""The columns of a dossier by the key of `audit_rows`."""
_CONTROLS = {
    **{"subject": ("control", 0.15), "attack": ("attack", 0.20), "epsilon": ("epsilon", 0.14)},
    **{"ceiling": ("typical of ideal scores", 0.16), "AUC": ("AUC", 0.08), "finding": ("finding", 0.27)},
}
"""The same of the controls."""

Table = list[dict[str, str]]
Block = tuple[Literal["text", "note", "pairs", "table", "list", "code"], Any]
"""A part of a text, and its kind."""
_LOOKS: dict[str, dict[str, Any]] = {"note": {"color": "#8a1c1c"}, "code": {"family": "monospace"}}
_SHARES = {
    2: (0.28, 0.72),
    3: (0.26, 0.14, 0.6),
    4: (0.22, 0.08, 0.12, 0.58),
    5: (0.17, 0.07, 0.26, 0.3, 0.2),
}
"""Shares of the page's width that the columns of a block's table take, by their number; others take equal ones."""


class Audited(NamedTuple):
    """What was audited: its name, its folder's name, mode and package versions."""

    name: str
    folder: str
    mode: str
    versions: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """What the page and the PDF say.

    Attributes:
        title: Heading.
        verdict: The result in one or two sentences.
        warnings: What must not be overlooked.
        statement: What was claimed before the audit, key and value.
        adversaries: Who attacked, name and what it sees and knows.
        bounds: A row for each bound on the run.
        controls: A row for each control; none if an older version kept none.
        paragraphs: The game, the result and the controls in words.
        facts: Trials, seed, step, date, versions, key and value.
        curves: True against false positives of each adversary, by name.
        limit: The claim that bounds every curve, or None.
    """

    title: str
    verdict: str
    warnings: list[str]
    statement: list[tuple[str, str]]
    adversaries: list[tuple[str, str]]
    bounds: Table
    controls: Table
    paragraphs: list[str]
    facts: list[tuple[str, str]]
    curves: list[tuple[str, Curve]]
    limit: Guarantee | None


def write_audit_page(run: StoredRun | Audited, audit: Audit, folder: Path) -> tuple[Path, Path]:
    """Write the page and the PDF next to the audit's JSON file, such as `audit.html` and `audit.pdf`; return them.

    For a release run the folder lies outside the run's, as an audit requires.
    """
    if isinstance(run, StoredRun):
        run = Audited(run_name(run), run.folder.path.name, run.config.mode, run.facts["versions"])
    sheet = sheet_of(run, audit)
    page, document = ((folder / audit.played.file).with_suffix(suffix) for suffix in (".html", ".pdf"))
    figure, axes = new_figure(5.2, 4.0)
    draw_curves(axes, sheet)
    html = html_page("audit.html", title=sheet.title, sheet=sheet, curve=data_url(png_bytes(figure)))
    write_file(page, html.encode(), private=audit.holds_private_records)
    buffer = io.BytesIO()
    draw_sheet(sheet).savefig(buffer, format="pdf", metadata={"Title": sheet.title, "CreationDate": None})
    write_file(document, buffer.getvalue(), private=audit.holds_private_records)
    return page, document


def sheet_of(run: Audited, audit: Audit) -> Sheet:
    """Return what the page of an audit says."""
    release = run.mode == "release"
    warnings = [NOT_FOR_RELEASE] if release and audit.holds_private_records else []
    warnings += [] if audit.controls_hold else [headline(audit)]
    warnings += [audit.note] if audit.note else []
    on_run, rows = audit.of(Role.RUN), audit_rows(audit)
    claim, whole = audit.strongest.claim or audit.guarantees[0], audit.guarantees[0]
    statement = [
        ("attacked", f"epsilon {number(claim.epsilon)} at delta {claim.delta:g}, {claim.status.value}"),
        ("protects", f"{claim.unit.value}, {claim.adjacency.value}"),
        ("released", claim.release.value),
        ("mechanism", claim.mechanism),
        ("source", claim.source),
    ]
    if claim not in audit.guarantees:
        text = f"epsilon {number(whole.epsilon)} at delta {whole.delta:g}, {whole.status.value}"
        statement.append(("whole run", text))
    plan, counted = audit.strongest.result.plan, f"{audit.trials:,}"
    if isinstance(plan, AuditPlan):
        statement.append(("two worlds", plan.pair))
        counted += f" on the run, at most {audit.control_trials:,} on each control"
    if audit.played is Played.TRAINING:
        counted += f", with crafted {audit.crafted}"
    ideal = [
        ("at most", f"{perfect_guesses(one)}, if every guess were right")
        for one in list(audit.scores().values())[:1]
    ]
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    controls = [row for row in rows if row["subject"] not in ("", Role.RUN)]
    return Sheet(
        title=f"Privacy audit of {audit.played}: {run.name}",
        verdict=verdict(audit),
        warnings=warnings,
        statement=statement,
        adversaries=[(one.attack, one.adversary) for one in on_run],
        bounds=[
            {name: row[key] for key, (name, _) in _BOUNDS.items()}
            for row in rows
            if row["subject"] in ("", Role.RUN)
        ],
        controls=[{name: row[key] for key, (name, _) in _CONTROLS.items()} for row in controls],
        paragraphs=[
            text for text in paragraphs(audit) if text != audit.note and not text.startswith("Adversary ")
        ],  # which stand above
        facts=[
            (audit.played.counted, counted),
            *ideal,
            ("steps", f"{audit.steps:,}"),
            ("seed", f"{audit.seed} (repeats all that is drawn from a seed)"),
            ("run", f"{run.mode} mode, {run.folder}"),
            ("date", time.strftime("%Y-%m-%d")),
            *([("versions", versions)] if versions else []),
        ],
        curves=[(one.attack, one.curve) for one in on_run if one.curve is not None],
        limit=audit.strongest.claim,
    )


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


class Page:
    """Writes lines of text from the top of an A4 page downwards; a full one is followed by another if `flowing`."""

    def __init__(self, size: float, *, flowing: bool = False) -> None:
        self.size, self._flowing = size, flowing
        self.figures: list[Figure] = []
        self._turn()

    def _turn(self) -> None:
        self.figures.append(Figure(figsize=_A4))
        self.y = _TOP

    def _make_room(self, lines: int, size: float) -> None:
        """Turn the page if so many lines do not fit below, and more do on a new one."""
        if self._flowing and self.y < _TOP and self.y - lines * size * _LINE < _BOTTOM:
            self._turn()

    def text(
        self, text: str, *, x: float = _LEFT, right: float = _RIGHT, size: float | None = None, **look: Any
    ) -> None:
        """Write a paragraph between two edges."""
        own = self.size if size is None else size
        for line in self._wrapped(text, right - x, own, look):
            self._make_room(1, own)
            self.figures[-1].text(x, self.y, line, fontsize=own, va="top", **look)
            self.y -= own * _LINE

    def _wrapped(self, text: str, width: float, size: float, look: Mapping[str, Any]) -> list[str]:
        """Return the lines of a paragraph in a share of the page's width."""
        # of the type size, a letter of DejaVu Sans, bold or in typewriter type
        wide = 0.64 if look.get("fontweight") == "bold" else 0.61 if look.get("family") else 0.55
        return textwrap.wrap(text, max(int(width * _A4[0] * 72 / (size * wide)), 12)) or [""]

    def heading(self, text: str) -> None:
        """Write a heading with a line below."""
        self._make_room(6, self.size)
        self.y -= 0.006
        self.text(text, size=self.size + 1.5, fontweight="bold", color="#0b3d5c")
        self.y -= 0.002

    def pairs(self, rows: Sequence[tuple[str, str]], *, right: float = _RIGHT, names: float = 0.1) -> None:
        """Write names and values; the names take a share of the page's width."""
        edges = [_LEFT, _LEFT + names, right]
        for row in rows:
            self._row(row, edges, self.size, [{"color": "#4a525b"}, {}])
            self.y -= 0.002 if self._flowing else 0.0

    def table(self, rows: Table, shares: Sequence[float]) -> None:
        """Write a table whose columns take these shares of the width."""
        edges = [_LEFT + (_RIGHT - _LEFT) * sum(shares[:column]) for column in range(len(shares) + 1)]
        for number_, cells in enumerate([list(rows[0]), *(list(row.values()) for row in rows)]):
            look = {"fontweight": "bold", "color": "#4a525b"} if number_ == 0 else {}
            self._row(cells, edges, self.size - 0.5, [look] * len(shares))
            self.y -= 0.002

    def block(self, kind: str, content: Any) -> None:
        """Write a block of a text; the first line of a list is its heading."""
        if kind == "pairs":
            self.pairs(content, names=0.2)
        elif kind == "table":
            columns = len(content[0])
            self.table(content, _SHARES.get(columns, (1 / columns,) * columns))
        else:
            for line, text in enumerate(content if kind == "list" else [content]):
                look: dict[str, Any] = {"fontweight": "bold"} if kind == "list" and not line else {}
                self.text(text, **_LOOKS.get(kind, look))
                self.y -= 0.003

    def _row(
        self, cells: Sequence[str], edges: Sequence[float], size: float, looks: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write cells next to each other, on one page if they fit."""
        gap = 0.008
        places = list(zip(cells, edges, edges[1:], looks, strict=False))
        self._make_room(
            max(
                len(self._wrapped(cell, right - left - gap, size, look)) for cell, left, right, look in places
            ),
            size,
        )
        top = lowest = self.y
        for cell, left, right, look in places:
            self.y = top
            self.text(cell, x=left, right=right - gap, size=size, **look)
            lowest = min(lowest, self.y)
        self.y = lowest


def draw_sheet(sheet: Sheet, size: float = 8.0) -> Figure:
    """Return the A4 page with type of one size, smaller until all of it fits; long texts are wrapped."""
    page = Page(size)
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
    page.pairs([*sheet.statement, *sheet.adversaries], right=0.53)
    bottom = page.y
    height = 0.235
    axes = page.figures[0].add_axes((0.60, top - height, _RIGHT - 0.60, height - 0.005))
    draw_curves(axes, sheet)
    axes.tick_params(labelsize=size - 1)
    axes.xaxis.label.set_fontsize(size)
    axes.yaxis.label.set_fontsize(size)
    axes.legend(frameon=False, fontsize=size - 1.5, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    page.y = min(bottom, top - height - 0.035)
    page.heading("Lower bounds on epsilon of this run")
    page.table(sheet.bounds, [share for _, share in _BOUNDS.values()])
    if sheet.controls:
        page.heading("Controls")
        page.table(sheet.controls, [share for _, share in _CONTROLS.values()])
    page.heading("How to read this")
    for paragraph in sheet.paragraphs:
        page.text(paragraph)
        page.y -= 0.003
    page.heading("To repeat it")
    page.pairs(sheet.facts)
    return page.figures[0] if page.y >= _BOTTOM or size <= 5.0 else draw_sheet(sheet, size - 0.5)


def write_loop_report(path: Path) -> Path:
    """Write `report.html` of a private loop, and the pages of the audits in its folder; return the HTML file.

    Raises RunFolderError or LedgerCorrupt if the settings, an audit or the ledger was changed, and OSError.
    """
    settings, statement, folder = PrivacySettings.stored(path), stated_loop(path), RunFolder(path)
    name, (audits, left_out) = f"private loop {path.resolve().name}", shown_audits(path, settings.mode)
    stated = guarantee_rows(
        statement.guarantees, seed_stored=settings.mode == "experiment", count=statement.public_number
    )
    absent = dict.fromkeys(
        ("pictures", "devices", "takes", "data_sets", "device_notes", "fresh_noise", "commands", "versions"),
        (),
    )
    page = html_page(
        "report.html",
        **absent,
        title=name,
        rows=[
            {
                "loop": name,
                "steps paid for": f"{statement.ledger.steps_paid:,}",
                "planned": str(settings.total_steps or "–"),
            }
        ],
        guarantees=[{"run": name, **row} for row in stated],
        folders=[shlex.quote(str(path))],
        audits=[(f"{name}, {each.played}", audit_rows(each), paragraphs(each)) for each in audits.values()],
        left_out=left_out,
        modes=[settings.mode],
        rebuilds=SEED_REBUILDS,
        dashes="A private loop keeps no accuracies or times: they depend on the private records.",
        configurations=[(name, shown_values(to_json(settings)))],
    )
    private = any(each.holds_private_records for each in audits.values())
    write_file(folder.report_file, page.encode(), private=private)
    for each in audits.values():
        write_audit_page(Audited(name, path.resolve().name, settings.mode, {}), each, path)
    return folder.report_file
