"""`opusim account device`: what a device's own noise is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def mount(account_app: typer.Typer) -> None:
    """Add the command to `opusim account`."""
    account_app.command("device")(account_device)


def account_device(
    name: Annotated[str, typer.Argument(help="A name of `opusim device list`, or the path of a TOML file.")],
    outputs: Annotated[int, typer.Option(help="Outputs of a reading, at least 1.")] = 1024,
    classes: Annotated[int, typer.Option(help="Number of labels, at least 2.")] = 10,
    target_epsilon: Annotated[
        list[float] | None, typer.Option(help="Say what this epsilon takes; repeatable.")
    ] = None,
    delta: Annotated[float, typer.Option(help="At which epsilon is stated.")] = 1e-5,
    figure: Annotated[
        Path | None, typer.Option(help="Draw a camera's sigma and epsilon against temperature: a PNG file.")
    ] = None,
) -> None:
    """What a device's own noise is worth for labels read once: sigma, temperature and epsilon, both ways."""
    from accounting.tables import print_rows
    from opusim.description.loading import load_description
    from opusim.files import FIGURES, require_writable
    from training.device_privacy.levels import device_levels, level_rows

    if figure is not None:
        require_writable(figure, "--figure", FIGURES)
    targets, description = target_epsilon or [8.0, 3.0, 1.0], load_description(name)
    if description.camera is not None:
        from opusim.progress import Progress
        from training.device_privacy.camera import evaluations, label_counts, print_account

        with Progress("account device", "evaluations") as progress:
            counts = label_counts(
                description,
                n_classes=classes,
                n_outputs=outputs,
                delta=delta,
                on_evaluation=progress.advance,
            )
            progress.start(evaluations(len(targets), figure=figure is not None))
            print_account(counts, targets, figure)
        return
    if figure is not None:
        raise ValueError(
            f"figure: {name!r} counts no photons; leave it out, or take a device of kind 'camera'"
        )
    levels = device_levels(description, n_classes=classes, n_outputs=outputs, targets=targets, delta=delta)
    print_rows(level_rows(levels))
