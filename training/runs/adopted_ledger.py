"""A finished run under a ledger that pays for more than the run itself, such as for the choice among several runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from accounting.journal import head_file, read_position
from training.runs.checkpoints import list_checkpoints, reseal_checkpoint
from training.runs.folder import RunFolder
from training.runs.seal import read_header
from training.runs.storage import write_file


def adopt_ledger(folder: RunFolder, source: Path) -> None:
    """Put another ledger in the place of a finished run's own, and have checkpoint and summary know it.

    Args:
        folder: Of the run; its own ledger is lost.
        source: The other ledger, whose head stands beside it; copied.

    Raises:
        LedgerCorrupt: The other ledger was changed, cut or reordered.
        RunFolderError: The run is not done, or its checkpoint or summary is damaged.
    """
    position, summary = read_position(source), folder.require_summary()
    write_file(folder.ledger_file, source.read_bytes())
    write_file(head_file(folder.ledger_file), head_file(source).read_bytes())
    newest = list_checkpoints(folder.checkpoints)[-1]
    seal = read_header(newest).seal
    if seal is not None:
        reseal_checkpoint(newest, replace(seal, ledger=position))
    folder.finish(summary, position)
