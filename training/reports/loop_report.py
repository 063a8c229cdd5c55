"""The pages of a private loop, from its folder: its guarantee, its settings and its audits."""

from __future__ import annotations

import shlex
from pathlib import Path

from opusim.accounting.explanation import guarantee_rows
from opusim.accounting.guarantee import to_json
from opusim.accounting.ledger import LEDGER_FILE, read_ledger
from opusim.files import write_file
from opusim.tables import html_page
from opusim.training.attacks.findings import audit_rows, paragraphs
from opusim.training.private_loop.folder import PrivacySettings
from opusim.training.reports.audit_page import Audited, write_audit_page
from opusim.training.reports.run_report import kept_audits, shown_values
from opusim.training.runs.folder import RunFolder


def write_loop_report(path: Path) -> Path:
    """Write `report.html` of a private loop, and the pages of the audits in its folder.

    Args:
        path: The folder that `make_private` wrote.

    Returns:
        The HTML file.

    Raises:
        RunFolderError: The settings or an audit were changed, or are something else.
        LedgerCorrupt: The ledger was changed, cut or reordered.
        OSError: The folder is not writable.
    """
    settings, ledger, folder = PrivacySettings.stored(path), read_ledger(path / LEDGER_FILE), RunFolder(path)
    name, audits = f"private loop {path.resolve().name}", kept_audits(folder, settings.mode)
    steps = sum(payment.steps for payment in ledger.payments)
    stated = guarantee_rows(ledger.guarantees(), seed_stored=settings.mode == "experiment")
    absent = dict.fromkeys(
        ("pictures", "devices", "takes", "data_sets", "device_notes", "commands", "versions"), ()
    )
    page = html_page(
        "report.html",
        **absent,
        title=name,
        rows=[{"loop": name, "steps paid for": f"{steps:,}", "planned": str(settings.total_steps or "–")}],
        guarantees=[{"run": name, **row} for row in stated],
        folders=[shlex.quote(str(path))],
        audits=[(f"{name}, {each.played}", audit_rows(each), paragraphs(each)) for each in audits.values()],
        modes=[settings.mode],
        dashes="A private loop keeps no accuracies or times: they depend on the private records.",
        configurations=[(name, shown_values(to_json(settings)))],
    )
    write_file(folder.report_file, page.encode())
    for each in audits.values():
        write_audit_page(Audited(name, path.resolve().name, settings.mode, {}), each, path)
    return folder.report_file
