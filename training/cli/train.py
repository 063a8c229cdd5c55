"""`opusim train KIND`, `opusim train resume` and `opusim train options`.

Each kind of trainer has a command, whose options are the fields of its section.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import override

from opusim.files import quoted, read_text
from opusim.processes import launched_rank
from opusim.progress import Progress
from opusim.training.cli.app import LazyGroup, built
from opusim.training.cli.options import (
    EPSILON,
    Callbacks,
    Quiet,
    TrustCode,
    changes_of,
    key_rows,
    protections_of,
    resolved,
    say,
    say_trusted,
    topics,
    trainer_options,
    with_signature,
)
from opusim.training.config.kinds import TRAINERS, TrainerSection
from opusim.training.config.run import RunConfig
from opusim.training.engine.callbacks import Callback

if TYPE_CHECKING:
    from opusim.devices.usage import Usage
    from opusim.training.runs.run import Run
    from opusim.training.sweeps.execution import SweepForecast

_EPILOG = (
    "[bold]--set[/bold] changes any key of the configuration; `opusim train options {kind}` explains those of {kind}, "
    "and `opusim train options` lists all. A run is a folder: `opusim report RUN` draws it, `opusim evaluate RUN` "
    "measures it, `opusim train resume RUN` resumes it after a stop."
)


class TrainGroup(LazyGroup):
    """A command for each kind of trainer, and the commands for all of them."""

    @override
    def fill(self) -> None:
        for kind, section in TRAINERS.every().items():
            self.later(kind, section.summary, partial(_command, kind, section), panel="Trainers")
        for name, command in (("resume", resume), ("options", options)):
            summary = (command.__doc__ or "").strip().splitlines()[0]
            self.later(name, summary, partial(built, name, command), panel="Other commands")


app = typer.Typer(cls=TrainGroup, no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def train() -> None:
    """Train a network by one of these trainers, resume a run, or list the keys of the configuration."""


def _command(kind: str, section: type[TrainerSection]) -> Any:
    """The command that trains one kind."""
    options = trainer_options(kind, section)

    def command(**values: Any) -> None:
        changes = changes_of(options, values)
        config = resolved(kind, values["config"], values["settings"] or (), changes)
        # refuse a missing driver before anything else begins
        if config.uses_device and not _follows(config):
            from opusim.description.schema import load_description
            from opusim.devices.access import require_present

            require_present(load_description(config.device.name, config.device.overrides))
        from opusim.training.engine.session import train

        folder = values["out"]
        own = values["callbacks"]
        hints = small_batch(config), unused_records(config)  # a run that is resumed cannot take them
        watched(config, values["quiet"], lambda **shown: train(config, folder=folder, **shown), own, hints)

    lines = [f"opusim train {kind} {arguments}".replace("[", r"\[") for arguments in section.examples]
    epilog = "\n\n".join(["[bold]Examples[/bold]", *lines, _EPILOG.format(kind=kind)])
    shown = with_signature(command, options, {"callbacks": (Callbacks, None)})
    return built(kind, shown, help=section.summary, epilog=epilog)


def _callbacks(paths: Sequence[str] | None) -> list[Callback]:
    """Return what the functions of --callback return; raise ConfigError for anything but callbacks."""
    if not paths:
        return []
    from opusim.errors import ConfigError
    from opusim.training.networks.user_code import load_object

    found = [load_object(path, key="callback")() for path in paths]
    for path, each in zip(paths, found, strict=True):
        if not isinstance(each, Callback):
            reason = f"{path!r} returned a {type(each).__name__}; return an opusim.Callback"
            raise ConfigError("configuration", "callback", reason)
    return found


def _follows(config: RunConfig) -> bool:
    """Whether this process follows another one in the run; without torchrun, torch is not imported."""
    if launched_rank() == 0:
        return False
    from opusim.training.engine.session import follows

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
    callbacks: Callbacks = None,
) -> None:
    """Resume a run that was stopped or killed, from its newest checkpoint."""
    from opusim.description.schema import parse_description
    from opusim.devices.access import require_present
    from opusim.training.engine.session import train
    from opusim.training.networks.user_code import require_trusted
    from opusim.training.runs.folder import RunFolder

    folder = RunFolder(run)
    facts = folder.read_facts()
    device = facts["device"]
    folder.require_sealed()
    require_trusted(facts, trust_code=trust_code)
    say_trusted(facts)
    config = folder.read_config()
    if device is not None and not _follows(config):
        require_present(parse_description(str(folder.config_file), device))

    def work(**shown: Any) -> Run:
        return train(folder=run, resume=True, moved=moved, trust_code=trust_code, **shown)

    watched(config, quiet, work, callbacks)


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
    from opusim.description.schema import DeviceDescription
    from opusim.description.section import nested_keys
    from opusim.tables import print_table

    rows = key_rows(topic, search=search)
    of_device = dict.fromkeys(key for key in nested_keys(DeviceDescription) if search and search in key)
    if not rows and not of_device:
        raise ValueError(f"--search {search}: no key has this word; leave --search or the topic out")
    if of_device and topic is None:
        named = ", ".join(f"device.{key}" for key in of_device)
        say(f"Keys of a device's description (`opusim device show NAME` has values): {named}.", err=False)
    if not rows:
        return
    print_table("Keys for --set and for TOML files", ("key", "default", "meaning"), rows)
    if topic is None:
        say(f"Topics: {', '.join(topics())}.", err=False)


def caution(config: RunConfig) -> str | None:
    """Say what a kill of a release run under a budget would cost; returns None if it costs nothing."""
    protection = config.protection
    if config.mode != "release" or protection.epsilon is None or protection.cost_of_a_kill is None:
        return None
    return f"release mode: stop it with Ctrl-C only; {protection.cost_of_a_kill}"


_ENOUGH = 200
"""Expected records, or users, of a batch from which no hint is given."""


def small_batch(config: RunConfig) -> str | None:
    """Say that batches are small for the noise of a protected step; returns None if they are not."""
    sampler, protection = config.sampler, config.protection
    pays_by_step = (
        protection.protects == "records" and protection.poisson and sampler.sampling_probability is None
    )
    if not pays_by_step or sampler.batch_size >= _ENOUGH:
        return None
    counted = "users" if config.of_users else "records"
    return (
        f"hint: sampler.batch_size = {sampler.batch_size} {counted} is small under this protection, because a step's "
        f"noise does not shrink with its batch; several hundred {counted} and fewer steps often learn more at the same "
        "epsilon"
    )


def unused_records(config: RunConfig) -> str | None:
    """Say that a release run holds records out of training to no use; returns None if it holds none out."""
    held_out = config.data.validation_fraction
    if config.mode != "release" or not held_out:
        return None
    return (
        f"hint: data.validation_fraction = {held_out:g} of the records are held out of training, and a release run "
        "keeps no figure of them; train on all records with --set data.validation_fraction=0"
    )


def watched(
    config: RunConfig,
    quiet: bool,
    work: Callable[..., Run],
    own: Sequence[str] | None,
    hints: Sequence[str | None] = (),
) -> None:
    """Train with a progress bar, then print the table and write the report; `own` names functions of callbacks.

    The cost of a kill is printed when training begins, quiet or not, the hints unless quiet. A process that follows
    another one prints nothing.
    """
    from opusim.training.engine.cards import place_text
    from opusim.training.reports.run_report import write_report

    if _follows(config):
        work()
        return
    told = () if quiet else (place_text(config.torch_device), *hints)
    lines = [line for line in (caution(config), *told) if line is not None]
    callbacks: list[Callback] = [*_callbacks(own), *(Announced(line) for line in lines)]
    if not quiet:
        callbacks.append(AnnouncedUsage())
    run = work(callbacks=callbacks, progress=False if quiet else "lines")
    report_file = write_report(run)
    if quiet:
        typer.echo(run.folder.path)
    else:
        print_run(run, report_file)


def usage_line(expected: Usage, what_for: str, *, is_mean: bool, more: str = "") -> str:
    """Say what a device's work takes by its description, in human units, as wide as the output."""
    from opusim.tables import wrapped

    mean = ", on average (batch sizes are random)" if is_mean else ""
    work = work_text(expected, f" in {what_for}")
    return wrapped(f"device, by its description: about {work}{mean}{more}")


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
    from opusim.accounting.explanation import SEED_REBUILDS, print_rows
    from opusim.training.reports.run_report import RELEASE_DASHES, run_name, stated_rows, summary_row

    print_rows([summary_row(run, run_name(run))])
    release = run.config.mode == "release"
    say(RELEASE_DASHES if release else None, err=False)
    print_rows(stated_rows(run))
    typer.echo(f"run folder: {run.folder.path}\nreport:     {report_file}")
    typer.echo(f"assumptions: opusim account run {quoted(run.folder.path)}")
    mode = None if release else f"experiment mode: not for release, since {SEED_REBUILDS}"
    say(run.device_note, run.advice, mode, run.fresh_noise_note, err=False)


class Announced(Callback):
    """Prints a paragraph when training begins; a refused run prints none.

    Args:
        text: The paragraph.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    @override
    def on_start(self, *, step: int, total_steps: int) -> None:
        say(self._text)


class AnnouncedUsage(Callback):
    """Prints the notes of a run, and the expected usage of its device and of optical features."""

    @override
    def on_note(self, text: str) -> None:
        say(text)

    @override
    def on_features(self, expected: Usage) -> None:
        say(
            f"device of the features, by its description: about {work_text(expected)}, unless they are kept from an "
            "earlier run"
        )

    @override
    def on_usage(self, expected: Usage, *, steps: int, is_mean: bool) -> None:
        typer.echo(usage_line(expected, f"{steps:,} steps", is_mean=is_mean), err=True)


curve_app = typer.Typer(rich_markup_mode="rich", add_completion=False)

SearchOut = Annotated[Path, typer.Option(help="The folder of the search.")]
SearchEpsilon = Annotated[float, typer.Option(help="Budget of the whole search, the choice included.")]
Choose = Annotated[
    list[str] | None,
    typer.Option(
        "--choose", metavar="KEY=VALUE,VALUE,...", help="Values of a key to choose from; repeatable."
    ),
]
Trials = Annotated[float, typer.Option(help="Expected number of trials; the number itself is Poisson.")]
_CHOICES: dict[str, tuple[str, ...]] = {
    "convex": ("trainer.clip=0.35,0.5,0.7", "optimizer.schedule=constant,linear")
}
_COMPUTED = ("epsilon", "noise-multiplier")
"""Options of `opusim train KIND` that a search gives another meaning, or computes."""
_EPILOG_OF_TUNE = """[bold]Example[/bold]

opusim tune {kind} --data mnist --epsilon 3 --trials 5 --choose {choice} --out runs/search

The same command resumes a search that was stopped."""


class TuneGroup(LazyGroup):
    """A command for each kind of trainer that has a protection."""

    @override
    def fill(self) -> None:
        for kind, section in TRAINERS.every().items():
            if _protections(kind, section):
                self.later(kind, section.summary, partial(_tune_command, kind, section))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse (ValueError) a command line without a trainer, which earlier versions accepted."""
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            raise ValueError(
                f"opusim tune {args[0]}: names no trainer; write `opusim tune convex {args[0]} ...`, or another of "
                f"{', '.join(self.commands)}"
            )
        return list(super().parse_args(ctx, args))


tune_app = typer.Typer(cls=TuneGroup, no_args_is_help=True, rich_markup_mode="rich", add_completion=False)


@tune_app.callback()
def tune() -> None:
    """Choose a run's settings privately: the best of a Poisson number of trials, and its epsilon."""


def _protections(kind: str, section: type[TrainerSection]) -> list[str]:
    """The protections that a trainer takes, its most usual one for a search first."""
    taken = [name for name in protections_of(kind, section) if name != "none"]
    usual = [name for name in ("last-iterate", "record") if name in taken]
    return list(dict.fromkeys([*usual, *taken]))


def _tune_command(kind: str, section: type[TrainerSection]) -> Any:
    """The command that searches settings of one kind."""
    options = [option for option in trainer_options(kind, section) if option.name not in _COMPUTED]
    protection = _protections(kind, section)[0]

    def command(
        out: SearchOut,
        epsilon: SearchEpsilon,
        trials: Trials = 5.0,
        choose: Choose = None,
        **values: Any,
    ) -> None:
        file, settings = values["config"], values["settings"] or ()
        if file is None and not any(line.startswith("protection.kind") for line in settings):
            values["protect"] = values["protect"] or protection
        changes = changes_of([*options, EPSILON], {**values, "epsilon": epsilon})
        config = resolved(kind, file, settings, changes)
        _search(config, [*(choose or _CHOICES.get(kind, ()))], out=out, trials=trials, quiet=values["quiet"])

    choice = "trainer.clip=0.35,0.5 --choose epochs=5,10" if kind == "convex" else "optimizer.lr=1,2,4"
    return built(
        kind,
        with_signature(command, options),
        help=f"{section.summary} Settings are chosen privately; --protect is {protection} by default.",
        epilog=_EPILOG_OF_TUNE.format(kind=kind, choice=choice),
    )


def _search(config: RunConfig, choose: Sequence[str], *, out: Path, trials: float, quiet: bool) -> None:
    """Search, or resume, and print what was found at which epsilon."""
    from opusim import checks
    from opusim.training.sweeps.tuning import Search, parse_choices

    checks.positive(trials=trials, remedy="take a number such as 5")
    if not choose:
        raise ValueError(
            "--choose is missing: name a key and its values, such as --choose optimizer.lr=1,2,4"
        )
    search, release = Search(config, parse_choices(choose), mean=trials, folder=out), config.mode == "release"
    if quiet:
        search.run()
        typer.echo(out)
        return
    if release:
        typer.echo("the number of trials below is private: do not publish it", err=True)
    with Progress("tune", "trials") as progress:

        def tell(done: int, of: int) -> None:
            if done:
                progress.advance(done=done)
            else:
                progress.start(of, at_once=True)

        found = search.run(tell)
    from opusim.accounting.explanation import guarantee_rows, print_rows

    print_rows(guarantee_rows([found.guarantee], seed_stored=not release))
    if found.searches > 1:
        typer.echo(f"{found.searches} searches were paid for in this folder; this epsilon covers all of them")
    if found.run is None:
        typer.echo("no trial was drawn: the search found nothing, and searching again costs again")
        return
    typer.echo(f"best: {', '.join(found.settings)}; score {100 * (found.score or 0):.2f} % (noised)")
    typer.echo(f"run folder: {found.run.folder.path}")


_EPILOG_OF_CURVE = """[bold]A spec[/bold] is a TOML file: a title, \\[config] with keys of every run, \\[axes] with \
lists of values, and any number of \\[\\[series]], each with a name, config and axes of its own. Runs take all \
combinations. Ready ones are in benchmarks/curves.

The same command resumes a sweep that was stopped or killed; no finished run is made twice. The exit code is 1 if \
a run failed; the others are in the report."""


SpecArgument = Annotated[Path, typer.Argument(metavar="SPEC", help="The sweep, a TOML file.")]
SweepOut = Annotated[
    Path | None, typer.Option(help="The sweep's folder; runs/ and the spec's name by default.")
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of parallel runs; one for each processor core by default, and one on a physical device.",
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="A Dask scheduler, such as tcp://10.0.0.5:8786, whose workers see the folder.",
    ),
]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Try failed runs again.")]
DrawOnly = Annotated[
    bool, typer.Option("--draw-only", help="Only draw the existing runs, such as after an audit.")
]


@curve_app.command("curve", epilog=_EPILOG_OF_CURVE)
def curve(
    spec: SpecArgument,
    out: SweepOut = None,
    jobs: Jobs = None,
    cluster: Cluster = None,
    retry_failed: RetryFailed = False,
    draw_only: DrawOnly = False,
) -> None:
    """Train a table of runs, draw accuracy and epsilon against noise, and write one report."""
    from opusim.training.sweeps.sweep import one_at_a_time, points_of, read_spec

    if draw_only and (jobs is not None or cluster is not None or retry_failed):
        raise ValueError("--draw-only trains nothing; leave --jobs, --cluster and --retry-failed out")
    if cluster is not None and jobs is not None:
        raise ValueError(
            f"--jobs = {jobs} does nothing with --cluster, whose workers decide; leave one of them out"
        )
    read, origin = read_spec(spec)
    text, points = read_text(spec), points_of(read, origin)
    from opusim.accounting.explanation import print_rows
    from opusim.accounting.mechanism import counted
    from opusim.training.reports.sweep_report import setting_rows, write_sweep
    from opusim.training.sweeps.execution import run_sweep
    from opusim.training.sweeps.sweep import SweepFolder, SweepResult

    folder = SweepFolder(out or Path("runs") / spec.stem)
    if draw_only:
        rows = folder.rows(points)
    else:
        rows = run_sweep(
            points,
            folder,
            jobs=1 if one_at_a_time(points) else jobs or os.cpu_count() or 1,
            cluster=cluster,
            retry_failed=retry_failed,
            progress="lines",
            on_forecast=_foretell,
        )
    result = SweepResult(spec=read, points=points, rows=rows, folder=folder)
    report_file = write_sweep(result, text)
    print_rows(setting_rows(result), without=("device energy", "device time"))
    for reason, count in Counter(row.reason for row in rows.values() if row.status == "failed").items():
        typer.echo(f"failed: {counted(count, 'run')}: {reason}")
    typer.echo(f"sweep folder: {folder.path}\nreport:       {report_file}")
    if any(row.status == "failed" for row in rows.values()):
        raise typer.Exit(code=1)


def _foretell(found: SweepForecast) -> None:
    """Print the expected device usage of the runs, if any has a device."""
    from opusim.accounting.mechanism import counted

    silent = f"{counted(found.silent, 'run')} on a device" if found.silent else ""
    if found.runs:
        more = silent and f"; without {silent}, whose usage is not known yet"
        line = usage_line(found.usage, counted(found.runs, "run"), is_mean=found.is_mean, more=more)
        typer.echo(line, err=True)
    elif silent:
        typer.echo(f"device: the usage of {silent} is not known before they start", err=True)
