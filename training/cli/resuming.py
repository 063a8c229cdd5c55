"""`opusim train resume` and `opusim train options`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opusim.description.loading import parse_description
from opusim.devices.access import require_present
from training.cli.options import Quiet
from training.cli.training_runs import watched


def mount(train_app: typer.Typer) -> None:
    """Add the commands to `opusim train`."""
    train_app.command("resume")(train_resume)
    train_app.command("options")(train_options)


def train_resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder that was stopped or killed.")],
    quiet: Quiet = False,
    moved: Annotated[
        bool,
        typer.Option(
            "--moved",
            help="Confirm that a release run's folder was moved by copying it, and that no other copy is resumed.",
        ),
    ] = False,
) -> None:
    """Resume a run that was stopped or killed, from its newest checkpoint."""
    from training.engine.session import train
    from training.runs.folder import RunFolder

    folder = RunFolder(run)
    device = folder.read_facts()["device"]
    folder.require_sealed()
    config = folder.read_config()
    if device is not None:
        require_present(parse_description(str(folder.config_file), device))
    watched(
        config,
        quiet,
        lambda watcher: train(folder=run, resume=True, moved=moved, watcher=watcher),
    )


def train_options() -> None:
    """List every key of the configuration, with its default and its meaning."""
    from opusim.tables import print_table
    from training.config.reading import option_rows

    print_table("Keys for --set and for TOML files", ("key", "default", "meaning"), option_rows())
