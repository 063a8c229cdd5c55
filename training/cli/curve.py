"""`opusim curve`: noise against privacy against accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def mount(app: typer.Typer) -> None:
    """Add the command to `opusim`."""
    app.command(epilog=_EPILOG)(curve)


_EPILOG = """[bold]A spec[/bold] is a TOML file: a title, \\[config] with keys of every run, \\[axes] with lists \
of values, and any number of \\[\\[series]], each with a name, config and axes of its own. Runs take all combinations. \
Ready ones stand in benchmarks/curves.

The same command resumes a sweep that was stopped or killed; no finished run is made twice. The exit code is 1 if \
a run failed; the others are in the report."""


def curve(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The sweep, a TOML file.")],
    out: Annotated[
        Path | None, typer.Option(help="The sweep's folder; runs/ and the spec's name by default.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs side by side; one a processor core by default. Runs on one physical device go one by one.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="A Dask scheduler, such as tcp://10.0.0.5:8786, whose workers see the folder.",
        ),
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try failed runs again.")] = False,
    draw_only: Annotated[
        bool, typer.Option("--draw-only", help="Draw what is there, such as after an audit; train nothing.")
    ] = False,
) -> None:
    """Make a table of runs, draw accuracy and epsilon against noise, and write one report."""
    from training.sweeps.spec import one_at_a_time, points_of, read_spec

    _check_flags(jobs, cluster, retry_failed=retry_failed, draw_only=draw_only)
    read, text = read_spec(spec)
    points = points_of(read, text)
    import os

    from accounting.tables import print_rows
    from training.cli.progress import SweepProgress
    from training.reports.sweep_report import setting_rows, write_sweep
    from training.sweeps.curves import SweepResult
    from training.sweeps.execution import run_sweep
    from training.sweeps.rows import SweepFolder

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


def _check_flags(jobs: int | None, cluster: str | None, *, retry_failed: bool, draw_only: bool) -> None:
    """Refuse flags that would do nothing beside the others."""
    if draw_only and (jobs is not None or cluster is not None or retry_failed):
        raise ValueError("--draw-only trains nothing; leave --jobs, --cluster and --retry-failed out")
    if cluster is not None and jobs is not None:
        raise ValueError(
            f"--jobs = {jobs} does nothing with --cluster, whose workers decide; leave one of them out"
        )
