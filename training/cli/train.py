"""`opusim train KIND`, `opusim train resume` and `opusim train options`.

Each kind of trainer has a command, whose options are the fields of its section.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self, TextIO

import typer

from opusim.files import quoted
from opusim.processes import launched_rank
from opusim.progress import Progress
from training.cli.groups import LazyGroup, built
from training.cli.options import (
    Quiet,
    TrustCode,
    changes_of,
    key_rows,
    resolved,
    say_trusted,
    topics,
    trainer_options,
    with_signature,
)
from training.config.kinds import TRAINERS, TrainerSection
from training.config.run import RunConfig
from training.engine.callbacks import Callback, Watchers

if TYPE_CHECKING:
    from opusim.devices.usage import Usage
    from training.runs.run import Run

_EPILOG = (
    "[bold]--set[/bold] changes any key of the configuration; `opusim train options {kind}` explains those of {kind}, "
    "and `opusim train options` lists all. A run is a folder: `opusim report RUN` draws it, `opusim evaluate RUN` "
    "measures it, `opusim train resume RUN` resumes it after a stop."
)


class TrainGroup(LazyGroup):
    """A command for each kind of trainer, and the commands for all of them."""

    def fill(self) -> None:
        """See LazyGroup.fill."""
        for kind, section in TRAINERS.every().items():
            self.later(kind, section.summary, partial(_command, kind, section), panel="Trainers")
        for name, command in (("resume", resume), ("options", options)):
            self.later(name, _first_line(command), partial(built, name, command), panel="Other commands")


app = typer.Typer(
    cls=TrainGroup,
    help="Train a network by one of these trainers, resume a run, or list the keys of the configuration.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.callback()
def train() -> None:
    """Train a network by one of these trainers, resume a run, or list the keys of the configuration."""


def _command(kind: str, section: type[TrainerSection]) -> Any:
    """The command that trains one kind."""
    options = trainer_options(kind, section)

    def command(**values: Any) -> None:
        changes = changes_of(options, values)
        config = resolved(kind, values["config"], values["settings"] or (), changes)
        _train(config, values["out"], values["quiet"])

    lines = [f"opusim train {kind} {arguments}".replace("[", r"\[") for arguments in section.examples]
    epilog = "\n\n".join(["[bold]Examples[/bold]", *lines, _EPILOG.format(kind=kind)])
    return built(kind, with_signature(command, options), help=section.summary, epilog=epilog)


def _train(config: RunConfig, out: Path | None, quiet: bool) -> None:
    """Train under a configuration; a device's driver must be there before anything else begins."""
    if config.uses_device and not _follows(config):
        from opusim.description.loading import load_description
        from opusim.devices.access import require_present

        require_present(load_description(config.device.name, config.device.overrides))
    from training.engine.session import train

    watched(config, quiet, lambda watcher: train(config, folder=out, watcher=watcher))


def _follows(config: RunConfig) -> bool:
    """Whether this process follows another one in such a run; torch is not loaded without torchrun."""
    if launched_rank() == 0:
        return False
    from training.engine.session import follows

    return follows(config)


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder that was stopped or killed.")],
    quiet: Quiet = False,
    moved: Annotated[
        bool,
        typer.Option(
            "--moved",
            help="Confirm that a release run's folder was moved by copying it, and that no other copy is resumed.",
        ),
    ] = False,
    trust_code: TrustCode = False,
) -> None:
    """Resume a run that was stopped or killed, from its newest checkpoint."""
    from opusim.description.loading import parse_description
    from opusim.devices.access import require_present
    from training.engine.session import train
    from training.networks.user_code import require_trusted
    from training.runs.folder import RunFolder

    folder = RunFolder(run)
    facts = folder.read_facts()
    device = facts["device"]
    folder.require_sealed()
    require_trusted(facts, trust_code=trust_code)
    say_trusted(facts)
    config = folder.read_config()
    if device is not None and not _follows(config):
        require_present(parse_description(str(folder.config_file), device))

    def work(watcher: Callback | None) -> Run:
        return train(folder=run, resume=True, moved=moved, watcher=watcher, trust_code=trust_code)

    watched(config, quiet, work)


def options(
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="TOPIC",
            help="A section (run, data, optimizer, ...), a trainer (zo, ...) or a protection (record, ...).",
        ),
    ] = None,
    search: Annotated[
        str | None, typer.Option(metavar="WORD", help="Only keys with this word in their name or meaning.")
    ] = None,
) -> None:
    """List the keys of the configuration, with defaults and meanings: all, those of a topic, or of a search."""
    from opusim.tables import print_table, wrapped

    rows = key_rows(topic, search=search)
    if not rows:
        raise ValueError(f"--search {search}: no key has this word; leave --search or the topic out")
    print_table("Keys for --set and for TOML files", ("key", "default", "meaning"), rows)
    if topic is None:
        typer.echo(wrapped(f"Topics: {', '.join(topics())}."))


def _first_line(command: Callable[..., None]) -> str:
    return (command.__doc__ or "").strip().splitlines()[0]


def caution(config: RunConfig) -> str | None:
    """Say what a kill of a release run under a budget would cost; returns None if it costs nothing."""
    protection = config.protection
    if config.mode != "release" or protection.epsilon is None or protection.cost_of_a_kill is None:
        return None
    return f"release mode: stop it with Ctrl-C only; {protection.cost_of_a_kill}"


_ENOUGH_RECORDS = 200
"""Expected records of a batch from which no hint is given."""


def small_batch(config: RunConfig) -> str | None:
    """Say that batches are small for the noise of a protected step; returns None if they are not."""
    sampler, protection = config.sampler, config.protection
    pays_by_step = (
        protection.protects == "records" and protection.poisson and sampler.sampling_probability is None
    )
    if not pays_by_step or sampler.batch_size >= _ENOUGH_RECORDS:
        return None
    return (
        f"hint: sampler.batch_size = {sampler.batch_size} is small under this protection, because a step's noise does "
        "not shrink with its batch; several hundred records and fewer steps often learn more at the same epsilon"
    )


def watched(config: RunConfig, quiet: bool, work: Callable[[Callback | None], Run]) -> None:
    """Train with a progress bar, then print the table and write the report.

    The cost of a kill is printed when training begins, quiet or not. A process that follows another one prints nothing.
    """
    from training.reports.run_report import write_report

    if _follows(config):
        work(None)
        return
    lines = [line for line in (caution(config), None if quiet else small_batch(config)) if line is not None]
    watchers: list[Callback] = [Announced(line) for line in lines]
    if quiet:
        run = work(Watchers(watchers))
    else:
        with RunProgress(f"train {config.trainer.kind}") as progress:
            run = work(Watchers([*watchers, AnnouncedUsage(), progress]))
    report_file = write_report(run)
    if quiet:
        typer.echo(run.folder.path)
    else:
        print_run(run, report_file)


def usage_line(expected: Usage, what_for: str, *, is_mean: bool, more: str = "") -> str:
    """Say what a device's work for something will take, in human units, as wide as the output."""
    from opusim.tables import wrapped

    mean = ", on average (batch sizes are random)" if is_mean else ""
    work = work_text(expected, f" in {what_for}")
    return wrapped(f"device: about {work}{mean}; a simulation takes its own time{more}")


def work_text(expected: Usage, what_for: str = "") -> str:
    """Return frames, what they are for, time and energy in human units."""
    from opusim.tables import duration, energy

    host = (
        f", {duration(expected.seconds + expected.host_seconds)} with its host"
        if expected.host_seconds
        else ""
    )
    return (
        f"{expected.frames:,} frames{what_for}, {duration(expected.seconds)}{host}, {energy(expected.joules)}"
    )


def print_run(run: Run, report_file: Path) -> None:
    """Print a run's figures, its guarantees and its folder."""
    from accounting.tables import guarantee_rows, print_rows
    from opusim.tables import wrapped
    from training.reports.run_report import RELEASE_DASHES, run_name, summary_row

    print_rows([summary_row(run, run_name(run))])
    if run.config.mode == "release":
        typer.echo(wrapped(RELEASE_DASHES))
    print_rows(guarantee_rows(run.guarantees, seed_stored=run.config.mode == "experiment"))
    typer.echo(f"run folder: {run.folder.path}\nreport:     {report_file}")
    typer.echo(f"assumptions: opusim account run {quoted(run.folder.path)}")
    if run.device_note is not None:
        typer.echo(wrapped(run.device_note))
    if run.advice is not None:
        typer.echo(wrapped(run.advice))
    if run.config.mode == "experiment":
        typer.echo("experiment mode: not for release, the noise can be reconstructed from the seed")


class RunProgress(Callback):
    """Shows steps done, the time left and the newest accuracies.

    Args:
        label: Name of the command.
        stream: Where to write; None takes standard error.
    """

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._progress = Progress(label, "steps", stream=stream)
        self._news = ""

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def on_start(self, *, step: int, total_steps: int) -> None:
        """See Callback.on_start."""
        self._progress.start(total_steps, done=step)

    def on_step(self, *, step: int) -> None:
        """See Callback.on_step."""
        self._progress.advance(done=step, news=self._news)

    def on_epoch(self, record: dict[str, Any]) -> None:
        """See Callback.on_epoch."""
        parts = [f"epoch {record['epoch']}"]
        for name in ("train", "validation"):
            accuracy = record.get(f"{name}_accuracy")
            if accuracy is not None:
                parts.append(f"{name} {100 * accuracy:.1f} %")
        words = {"bits_per_byte": "bits per byte", "bits_per_token": "bits per token", "rmse": "RMSE"}
        for key in [key for key in words if f"validation_{key}" in record][:1]:
            parts.append(f"{record[f'validation_{key}']:.4g} {words[key]}")
        if record.get("validation_r2", 0.0) < 0:
            parts.append("R^2 below 0")
        self._news = ", ".join(parts)


class Announced(Callback):
    """Prints a line when training begins, which a refused run never does.

    Args:
        text: The line.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def on_start(self, *, step: int, total_steps: int) -> None:
        """See Callback.on_start."""
        print(self._text, file=sys.stderr, flush=True)


class AnnouncedUsage(Callback):
    """Prints what the run will take of its device, and optical features of theirs."""

    def on_features(self, expected: Usage) -> None:
        """See Callback.on_features."""
        from opusim.tables import wrapped

        text = (
            f"device of the features: about {work_text(expected)}, unless they are kept from an earlier run"
        )
        print(wrapped(text), file=sys.stderr, flush=True)

    def on_usage(self, expected: Usage, *, steps: int, is_mean: bool) -> None:
        """See Callback.on_usage."""
        print(usage_line(expected, f"{steps:,} steps", is_mean=is_mean), file=sys.stderr, flush=True)
