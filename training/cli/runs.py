"""The commands on finished runs: evaluate, report, audit."""

from __future__ import annotations

from collections.abc import Mapping
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

    from training.runs.run import evaluate_run

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
    from training.reports.run_report import run_name, write_comparison, write_report
    from training.runs.run import load_run

    loaded = [load_run(path) for path in runs]
    if len(loaded) == 1 and out is None:
        typer.echo(write_report(loaded[0]))
        return
    names = [f"{path.name}: {run_name(run)}" for path, run in zip(runs, loaded, strict=True)]
    typer.echo(write_comparison(loaded, out or Path("report.html"), title="Runs compared", names=names))


def audit(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="A run folder.")] = None,
    mechanism: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Instead of a run: test the sampler, clip and noise of a trainer (pdfa, dfa, tdfa, bp, ulr, zo, "
            "convex) on records of the audit's choice. Exit code 1 means an alarm.",
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(help="Coin tosses on the run, 400 by default; the controls take up to 200 each."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats an audit; drawn and kept by default.")] = None,
    delta: Annotated[float | None, typer.Option(help="Of the bounds; the run's by default.")] = None,
    arrays: Annotated[
        Path | None,
        typer.Option(
            help="An .npz file with the arrays x and y (and ids) that the run was trained on, if it was on arrays."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A folder for audit.json and report.html, by default the run folder; a release run needs one outside "
            "it. With --mechanism: a JSON file."
        ),
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="With --mechanism: experiment (default) or release.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="With --mechanism: steps of each of its two runs, 60 by default.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="With --mechanism: a key of the configuration; repeatable."
        ),
    ] = None,
    level: Annotated[
        float | None,
        typer.Option(help="With --mechanism: probability of any false alarm, 1e-4 by default."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Attack a run: can whoever sees its updates tell which records were used? Or test a mechanism (--mechanism)."""
    of_runs = {"RUN": run, "--trials": trials, "--delta": delta, "--arrays": arrays}
    of_mechanisms = {"--mode": mode, "--steps": steps, "--set": settings, "--level": level}
    if mechanism is None:
        _require_absent(of_mechanisms, "goes with --mechanism KIND only")
        if run is None:
            raise ValueError(
                "RUN is missing: give a run folder to attack, or --mechanism KIND to test a trainer"
            )
        _audit_run(run, 400 if trials is None else trials, seed, delta, arrays, out, as_json)
        return
    _require_absent(of_runs, "is for the audit of a run, not for --mechanism")
    from training.cli.mechanism import audit_mechanism_command

    audit_mechanism_command(
        mechanism,
        mode=mode or "experiment",
        steps=60 if steps is None else steps,
        settings=settings or (),
        seed=seed,
        level=1e-4 if level is None else level,
        out=out,
        as_json=as_json,
    )


def _require_absent(options: Mapping[str, object], rule: str) -> None:
    """Refuse options of the other kind of audit."""
    for name, value in options.items():
        if value is not None and value != []:
            raise ValueError(f"{name} {rule}; leave it out")


def _audit_run(
    run: Path,
    trials: int,
    seed: int | None,
    delta: float | None,
    arrays: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Attack a run, print what was found and write its report."""
    import json

    from opusim.progress import Progress
    from training.attacks.run_audit import audit_run
    from training.reports.run_report import NOT_FOR_RELEASE, write_report
    from training.runs.folder import AUDIT_FILE
    from training.runs.run import load_run, read_npz

    data = None if arrays is None else read_npz(arrays)
    with Progress("audit", "trials") as progress:
        found = audit_run(
            run,
            data=data,
            out=out,
            trials=trials,
            seed=seed,
            delta=delta,
            on_start=progress.start,
            on_trial=progress.advance,
        )
    loaded = load_run(run)
    report_file = write_report(loaded, audit=found, folder=out)
    if loaded.config.mode == "release":
        typer.echo(NOT_FOR_RELEASE, err=True)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    from accounting.tables import print_rows
    from opusim.tables import wrapped
    from training.attacks.findings import finding_rows, paragraphs

    print_rows(finding_rows(found))
    for text in paragraphs(found):
        typer.echo("\n" + wrapped(text))
    typer.echo(f"\nkept in {(out or run) / AUDIT_FILE} and shown in {report_file}")
