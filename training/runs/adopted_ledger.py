"""A finished run under a ledger that pays for more than the run itself, such as for the choice among several runs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from accounting.journal import head_file, read_position
from training.runs.checkpoints import list_checkpoints, reseal_checkpoint
from training.runs.folder import RunFolder
from training.runs.seal import read_header


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
    shutil.copyfile(source, folder.ledger_file)
    shutil.copyfile(head_file(source), head_file(folder.ledger_file))
    newest = list_checkpoints(folder.checkpoints)[-1]
    seal = read_header(newest).seal
    if seal is not None:
        reseal_checkpoint(newest, replace(seal, ledger=position))
    folder.finish(summary, position)
