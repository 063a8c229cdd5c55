"""The commands on finished runs: evaluate, report, audit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def mount(app: typer.Typer) -> None:
    """Add the commands to `opusim`."""
    for command in (evaluate, report, audit):
        app.command()(command)


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    data: Annotated[
        str | None,
        typer.Option(help="A known data set instead of the run's own; its test records are taken."),
    ] = None,
    arrays: Annotated[
        Path | None,
        typer.Option(help="An .npz file with arrays x (n, d) and y (n,), features as given to training."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Loss and accuracy of a run's model on test records."""
    import json

    from training.runs.run_evaluation import evaluate_run

    figures = evaluate_run(run, data=data, arrays=arrays)
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        typer.echo(
            f"{figures['records']:,} records of {figures['data']}: "
            f"accuracy {100 * figures['accuracy']:.2f} %, loss {figures['loss']:.4f}"
        )


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="One run folder, or several to compare.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The HTML file; by default report.html in the run folder, for several runs in this one."
        ),
    ] = None,
) -> None:
    """Draw a run's pictures and write its self-contained HTML report (several runs: one page for all)."""
    from training.runs.report import run_name, write_comparison, write_report
    from training.runs.run import load_run

    loaded = [load_run(path) for path in runs]
    if len(loaded) == 1 and out is None:
        typer.echo(write_report(loaded[0]))
        return
    names = [f"{path.name}: {run_name(run)}" for path, run in zip(runs, loaded, strict=True)]
    typer.echo(write_comparison(loaded, out or Path("report.html"), title="Runs compared", names=names))


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    trials: Annotated[
        int, typer.Option(help="Coin tosses on the run; the controls take up to 200 each.")
    ] = 400,
    seed: Annotated[int | None, typer.Option(help="Repeats an audit; drawn and kept by default.")] = None,
    delta: Annotated[float | None, typer.Option(help="Of the bounds; the run's by default.")] = None,
    arrays: Annotated[
        Path | None,
        typer.Option(
            help="An .npz file with the arrays x and y that the run was trained on, if it was on arrays."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Attack a run: can whoever sees its updates tell which records were used? Beside a null and a broken control."""
    import json

    from opusim.progress import Progress
    from training.attacks.run_audit import audit_run
    from training.runs.report import write_report
    from training.runs.run import load_run
    from training.runs.run_evaluation import read_npz

    data = None if arrays is None else read_npz(arrays)
    with Progress("audit", "trials") as progress:
        found = audit_run(
            run,
            data=data,
            trials=trials,
            seed=seed,
            delta=delta,
            on_start=progress.start,
            on_trial=progress.advance,
        )
    loaded = load_run(run)
    report_file = write_report(loaded)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    from accounting.tables import print_rows
    from opusim.tables import wrapped
    from training.attacks.words import finding_rows, paragraphs

    print_rows(finding_rows(found))
    for text in paragraphs(found):
        typer.echo("\n" + wrapped(text))
    typer.echo(f"\nkept in {run / 'audit.json'} and shown in {report_file}")
    if loaded.config.mode == "release":
        typer.echo("not for release: these two hold figures of private records, which no guarantee covers")
