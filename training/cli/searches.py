"""`opusim tune` and `opusim curve`: many runs from one command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self, TextIO

import typer

from opusim.progress import Progress
from training.cli.groups import LazyGroup, built
from training.cli.options import (
    EPSILON,
    changes_of,
    protections_of,
    resolved,
    trainer_options,
    with_signature,
)
from training.cli.train import usage_line
from training.config.kinds import TRAINERS, TrainerSection
from training.config.run import RunConfig

if TYPE_CHECKING:
    from training.sweeps.execution import SweepForecast
    from training.sweeps.results import Row

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

    def fill(self) -> None:
        """See LazyGroup.fill."""
        for kind, section in TRAINERS.every().items():
            if _protections(kind, section):
                self.later(kind, section.summary, partial(_tune_command, kind, section))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse a command line that names no trainer, as earlier versions took it.

        Raises:
            ValueError: It begins with an option.
        """
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            raise ValueError(
                f"opusim tune {args[0]}: names no trainer; write `opusim tune convex {args[0]} ...`, or another of "
                f"{', '.join(self.commands)}"
            )
        return list(super().parse_args(ctx, args))


tune_app = typer.Typer(
    cls=TuneGroup,
    help="Choose a run's settings privately: the best of a Poisson number of trials, and its epsilon.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
)


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
    from training.tuning import Search, parse_choices

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
    from accounting.tables import guarantee_rows, print_rows

    print_rows(guarantee_rows([found.guarantee], seed_stored=not release))
    if found.searches > 1:
        typer.echo(
            f"{found.searches} searches were paid for in this folder; this epsilon is that of all of them"
        )
    if found.run is None:
        typer.echo("no trial was drawn: the search found nothing, and searching again costs again")
        return
    typer.echo(f"best: {', '.join(found.settings)}; score {100 * (found.score or 0):.2f} % (noised)")
    typer.echo(f"run folder: {found.run.folder.path}")


_EPILOG = """[bold]A spec[/bold] is a TOML file: a title, \\[config] with keys of every run, \\[axes] with lists \
of values, and any number of \\[\\[series]], each with a name, config and axes of its own. Runs take all combinations. \
Ready ones are in benchmarks/curves.

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


@curve_app.command("curve", epilog=_EPILOG)
def curve(
    spec: SpecArgument,
    out: SweepOut = None,
    jobs: Jobs = None,
    cluster: Cluster = None,
    retry_failed: RetryFailed = False,
    draw_only: DrawOnly = False,
) -> None:
    """Train a table of runs, draw accuracy and epsilon against noise, and write one report."""
    from training.sweeps.spec import one_at_a_time, points_of, read_spec

    if draw_only and (jobs is not None or cluster is not None or retry_failed):
        raise ValueError("--draw-only trains nothing; leave --jobs, --cluster and --retry-failed out")
    if cluster is not None and jobs is not None:
        raise ValueError(
            f"--jobs = {jobs} does nothing with --cluster, whose workers decide; leave one of them out"
        )
    read, text = read_spec(spec)
    points = points_of(read, text)
    from accounting.tables import print_rows
    from training.reports.sweep_report import setting_rows, write_sweep
    from training.sweeps.execution import run_sweep
    from training.sweeps.results import SweepFolder, SweepResult

    folder = SweepFolder(out or Path("runs") / spec.stem)
    if draw_only:
        rows = folder.rows(points)
    else:
        with SweepProgress() as progress:
            rows = run_sweep(
                points,
                folder,
                jobs=1 if one_at_a_time(points) else jobs or os.cpu_count() or 1,
                cluster=cluster,
                retry_failed=retry_failed,
                on_forecast=progress.foretell,
                on_start=progress.start,
                on_row=progress.advance,
            )
    result = SweepResult(spec=read, points=points, rows=rows, folder=folder)
    report_file = write_sweep(result, text.text)
    print_rows(setting_rows(result), without=("device energy", "device time"))
    for row in rows.values():
        if row.status == "failed":
            typer.echo(f"failed: {row.identity}: {row.reason}")
    typer.echo(f"sweep folder: {folder.path}\nreport:       {report_file}")
    if any(row.status == "failed" for row in rows.values()):
        raise typer.Exit(code=1)


class SweepProgress:
    """Shows a sweep on standard error.

    Args:
        stream: Where to write; None takes standard error.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._progress = Progress("curve", "runs", stream=stream)

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def foretell(self, found: SweepForecast) -> None:
        """Say what the runs will take of their devices, if some have one."""
        from accounting.mechanisms import counted

        silent = f"{counted(found.silent, 'run')} on a device" if found.silent else ""
        if found.runs:
            more = silent and f"; without {silent}, not known before"
            line = usage_line(found.usage, counted(found.runs, "run"), is_mean=found.is_mean, more=more)
            self._progress.say(line)
        elif silent:
            self._progress.say(f"device: what {silent} will take is not known before they start")

    def start(self, done: int, total: int) -> None:
        """Show how many of the runs are finished already."""
        self._progress.start(total, done=done, at_once=True)

    def advance(self, row: Row, seconds_left: float | None) -> None:
        """Count one more run, and name it if it failed."""
        if row.status == "failed":
            self._progress.say(f"failed: {row.identity}: {row.reason}")
        self._progress.advance(left_s=seconds_left)
