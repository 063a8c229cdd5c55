"""What every training command does: flags to a configuration, training behind a progress bar, the table at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from opusim.description.loading import load_description
from opusim.devices.access import require_present
from opusim.errors import ConfigError

if TYPE_CHECKING:
    from training.config.run import RunConfig
    from training.engine.loop import Watcher
    from training.runs.run import Run

EXAMPLES = """[bold]Examples[/bold]

opusim train {kind} --data digits --epochs 30

opusim train {kind} --data fashion-mnist --set optimizer.lr=0.01 --set model.hidden=[512,512]

opusim train {kind} --config run.toml --seed 3 --out runs/third

[bold]--set[/bold] changes any key of the configuration; `opusim train options` lists them all with their meaning \
and default. A run is a folder; `opusim report RUN` draws it, `opusim evaluate RUN` measures it, \
`opusim train resume RUN` resumes one that was stopped or killed."""


def flag_changes(kind: str, data: str | None, epochs: int | None, seed: int | None) -> dict[str, Any]:
    """The flags as a nested mapping over the configuration."""
    changes: dict[str, Any] = {"trainer": {"kind": kind}}
    if data is not None:
        changes["data"] = {"name": data}
    if epochs is not None:
        changes["epochs"] = epochs
    if seed is not None:
        changes["seed"] = seed
    return changes


def private_changes(
    protect: str | None,
    epsilon: float | None,
    delta: float | None,
    noise_multiplier: float | None,
    release: bool,
) -> dict[str, Any]:
    """The privacy flags as a nested mapping."""
    flags = {"kind": protect, "epsilon": epsilon, "delta": delta, "noise_multiplier": noise_multiplier}
    changes: dict[str, Any] = {"mode": "release"} if release else {}
    changes["protection"] = {key: value for key, value in flags.items() if value is not None}
    return changes


def train_configured(
    config: Path | None,
    settings: list[str] | None,
    changes: dict[str, Any],
    out: Path | None,
    quiet: bool,
) -> None:
    """Train under the file, the flags and the settings; they must name the trainer of the command.

    Args:
        config: The file.
        settings: The settings.
        changes: The flags.
        out: The run folder.
        quiet: Whether to print the run folder alone.

    Raises:
        ConfigError: They name another, or are wrong.
    """
    from training.config.reading import load_config, named_trainer

    kind, named = changes["trainer"]["kind"], None if config is None else named_trainer(config)
    if named not in (None, kind):
        raise ConfigError(
            str(config),
            "trainer.kind",
            f"{named!r} contradicts the command; use: opusim train {named} --config {config}",
        )
    resolved = load_config(config, settings or (), changes)
    if resolved.trainer.kind != kind:
        reason = (
            f"{resolved.trainer.kind!r} contradicts the command; use: opusim train {resolved.trainer.kind}"
        )
        raise ConfigError("--set", "trainer.kind", reason)

    if resolved.uses_device:
        require_present(load_description(resolved.device.name, resolved.device.overrides))
    from training.engine.session import train

    watched(resolved, quiet, lambda watcher: train(resolved, folder=out, watcher=watcher))


def caution(config: RunConfig) -> str | None:
    """What a kill of a release run under a budget would cost; None for any other run."""
    options = config.protection
    if config.mode != "release" or options.epsilon is None or options.kind not in _COSTS_OF_A_KILL:
        return None
    return f"release mode: stop it with Ctrl-C only; {_COSTS_OF_A_KILL[options.kind]}"


_STEPS_LOST = (
    "a kill or a power cut makes it pay again for the steps since its last checkpoint, and for up to 15 that it "
    "reserved, so that its budget may end before its last epoch"
)
_COSTS_OF_A_KILL = {
    "record": _STEPS_LOST,
    "label-amplified": _STEPS_LOST,
    "label": "a kill or a power cut ends it, because its label budget would be spent a second time",
}


def watched(config: RunConfig, quiet: bool, work: Callable[[Watcher | None], Run]) -> None:
    """Train behind a progress bar, then print the table and write the report.

    What a kill would cost is said when training begins, quiet or not.
    """
    from training.cli.progress import Announced, RunProgress
    from training.reports.run_report import write_report

    warning = caution(config)

    def warned(watcher: Watcher | None) -> Watcher | None:
        return watcher if warning is None else Announced(warning, watcher)

    if quiet:
        run = work(warned(None))
    else:
        with RunProgress(f"train {config.trainer.kind}") as progress:
            run = work(warned(progress))
    report_file = write_report(run)
    if quiet:
        typer.echo(run.folder.path)
    else:
        _print_run(run, report_file)


def _print_run(run: Run, report_file: Path) -> None:
    from accounting.tables import guarantee_rows, print_rows
    from opusim.tables import wrapped
    from training.reports.run_report import RELEASE_DASHES, run_name, summary_row

    print_rows([summary_row(run, run_name(run))])
    if run.config.mode == "release":
        typer.echo(wrapped(RELEASE_DASHES))
    print_rows(guarantee_rows(run.guarantees, seed_stored=run.config.mode == "experiment"))
    typer.echo(f"run folder: {run.folder.path}\nreport:     {report_file}")
    if run.config.mode == "experiment":
        typer.echo("experiment mode: not for release, the noise can be reconstructed from the seed")
