"""`opusim account run`: what the ledger of a run has paid for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from accounting.ledger.ledger import LedgerContent
    from training.runs.folder import RunFolder


def mount(account_app: typer.Typer) -> None:
    """Add the command to `opusim account`."""
    account_app.command("run")(account_run)


def account_run(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or its ledger.jsonl.")],
    delta: Annotated[
        float | None, typer.Option(help="State the guarantees at another delta than the run's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every assumption.")] = False,
) -> None:
    """State anew what the ledger of a run has paid for; a ledger that is not the run's newest is refused."""
    from accounting.cli import show
    from accounting.guarantee import Release
    from training.runs.folder import RunFolder

    folder = RunFolder(path if path.is_dir() else path.parent)
    content = _content(path, folder)
    found = content.guarantees(delta=delta)
    show(found, content.mechanisms, as_json=as_json, seed_stored=content.mode == "experiment")
    last_only = any(guarantee.release is Release.LAST_ITERATE for guarantee in found)
    if last_only and path.is_dir() and not folder.finished and not as_json:
        typer.echo(
            "Run unfinished. This guarantee covers only the final model, not the checkpoints in this folder."
        )


def _content(path: Path, folder: RunFolder) -> LedgerContent:
    """The ledger, checked against the run's checkpoint and summary if it stands in a run folder."""
    from accounting.ledger.ledger import read_ledger

    if not folder.started or path not in (folder.path, folder.ledger_file):
        return read_ledger(path)
    if not folder.witnesses():
        typer.echo(
            f"not checked: no checkpoint and no summary in {folder.path} says how long its ledger was, so an older or "
            "altered one would go unnoticed",
            err=True,
        )
    return folder.read_ledger()
