"""The commands on runs: evaluate, report, zo replay, runs list, runs rm, account run, account device."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opusim.training.cli.options import TrustCode, say_trusted

if TYPE_CHECKING:
    from opusim.accounting.explanation import Statement
    from opusim.training.runs.folder import RunFolder

app = typer.Typer(add_completion=False, rich_markup_mode="rich")
zo_app = typer.Typer(help="Replay a zeroth-order run from its step log.", no_args_is_help=True)
app.add_typer(zo_app, name="zo")
runs_app = typer.Typer(help="List the runs of a folder, or remove some.", no_args_is_help=True)
app.add_typer(runs_app, name="runs")


@zo_app.callback()
def zo() -> None:
    """Replay a zeroth-order run from its step log."""


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="Evaluate on the test records of this known data set, or on all records of csv:PATH, parquet:PATH or "
            "text:PATH, instead of the run's own test records."
        ),
    ] = None,
    arrays: Annotated[
        Path | None,
        typer.Option(help="An .npz file with arrays x (n, d) and y (n,), features as given to training."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Run the model's products on this programmable device: pcm, hermes, reram or a .toml file."
        ),
    ] = None,
    after: Annotated[
        str, typer.Option(help="Time since the device was programmed, such as 1s, 30min, 1h, 1d or 1y.")
    ] = "0s",
    chip: Annotated[int, typer.Option(help="Seed of the device: which chips and which noise.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Measure loss and accuracy of a run's model on test records."""
    from opusim.training.runs.folder import RunFolder
    from opusim.training.runs.run import evaluate_run

    if device is None and (chip or _seconds(after)):
        given = f"--chip {chip}" if chip else f"--after {after}"
        raise ValueError(
            f"{given}: only a device has chips and drifts; name one with --device, or leave it out"
        )
    if trust_code:
        say_trusted(RunFolder(run).read_facts())
    figures = evaluate_run(
        run,
        data=data,
        arrays=arrays,
        trust_code=trust_code,
        device=device,
        after_s=_seconds(after),
        seed=chip,
    )
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        where = "" if device is None else f" on {device}, {after} after programming"
        typer.echo(
            f"{figures.pop('records'):,} records of {figures.pop('data')}{where}: "
            f"{', '.join(_figure(name, figures[name]) for name in _FIGURES if name in figures)}"
        )
        if digital := figures.get("digital"):
            typer.echo(f"No device takes {', '.join(digital)}: digital in this figure.")


_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "y": 31_557_600.0}


def _seconds(duration: str) -> float:
    """Return a duration such as 1h or 30min in seconds.

    Raises:
        BadParameter: It is no number with a unit.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", duration.strip())
    if found is None or found[2] not in _UNITS_S:
        raise typer.BadParameter(f"{duration!r}: must be like 1s, 30min, 1h, 1d or 1y", param_hint="--after")
    return float(found[1]) * _UNITS_S[found[2]]


_FIGURES = ("accuracy", "bits_per_byte", "bits_per_token", "rmse", "r2", "loss")


def _figure(name: str, value: float) -> str:
    """Return a figure as text."""
    label = {"rmse": "RMSE", "r2": "R^2"}.get(name, name.replace("_", " "))
    return f"{label} {100 * value:.2f} %" if name == "accuracy" else f"{label} {value:.4f}"


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="One run folder, or several to compare.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The HTML file; by default report.html in the run folder, for several runs in this one."
        ),
    ] = None,
) -> None:
    """Draw a run's figures and write its self-contained HTML report; several runs share one page."""
    from opusim.files import require_writable
    from opusim.training.reports.audit_page import write_loop_report
    from opusim.training.reports.run_report import run_name, write_comparison, write_report
    from opusim.training.runs.folder import read_run
    from opusim.training.runs.storage import kind_of

    twice = [
        path for number, path in enumerate(runs) if path.resolve() in {p.resolve() for p in runs[:number]}
    ]
    if twice:
        raise ValueError(f"RUN {twice[0]}: is given twice; name each run once")
    if out is not None:
        require_writable(out, "--out", (".html",))
    if len(runs) == 1 and out is None and kind_of(runs[0]) == "private loop":
        typer.echo(write_loop_report(runs[0]))
        return
    loaded = [read_run(path) for path in runs]
    if len(loaded) == 1 and out is None:
        typer.echo(write_report(loaded[0]))
        return
    names = [f"{path.name}: {run_name(run)}" for path, run in zip(runs, loaded, strict=True)]
    typer.echo(write_comparison(loaded, out or Path("report.html"), title="Runs compared", names=names))


@zo_app.command("replay")
def zo_replay(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="A step log (steps.zo), or its run folder.")],
    base: Annotated[
        Path | None,
        typer.Option(help="The initial parameters, a safetensors file; by default the one next to the log."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the final parameters here, as safetensors.")] = None,
) -> None:
    """Rebuild the final parameters of a zeroth-order run, bit for bit, from the initial ones and its step log."""
    from opusim.files import require_writable
    from opusim.progress import Progress
    from opusim.training.runs.checkpoints import write_tensors
    from opusim.training.zeroth_order.step_log import replay

    if out is not None:
        require_writable(out, "--out")
    with Progress("zo replay", "steps") as progress:

        def follow(done: int, total: int) -> None:
            if done == 1:
                progress.start(total)
            progress.advance()

        found = replay(log, base=base, on_step=follow)
    if out is not None:
        write_tensors(out, found.tensors)
    agreement = (
        "those of the run's newest checkpoint, to the bit" if found.arrived else "not compared: no mark"
    )
    typer.echo(f"{found.steps:,} steps replayed; parameters {found.digest}: {agreement}")
    if out is not None:
        typer.echo(f"written to {out}")


@runs_app.callback()
def runs() -> None:
    """List the runs of a folder, or remove some."""


@runs_app.command("list")
def list_command(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder of run folders.", show_default="./runs")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the runs of a folder: trainer, model, data, day, state, epsilon, accuracy or RMSE, size."""
    from opusim.accounting.explanation import print_rows
    from opusim.tables import wrapped
    from opusim.training.runs.listing import SCHEMA, VERSION, list_runs

    entries = list_runs(folder)
    if as_json:
        content = {"schema": SCHEMA, "version": VERSION, "runs": [entry.to_json() for entry in entries]}
        typer.echo(json.dumps(content, indent=2, allow_nan=False))
        return
    sound = [entry for entry in entries if entry.state != "damaged"]
    if sound:
        print_rows([entry.to_row() for entry in sound])
    for entry in entries:
        if entry.state == "damaged":
            typer.echo(f"{entry.path}: damaged: {entry.problem}")
    if any(entry.guarantee is not None and entry.guarantee.is_proven for entry in sound):
        typer.echo(
            wrapped(
                "`opusim account run RUN` states an epsilon in full: delta, relation, release, hypotheses. That of an "
                "experiment holds for the same run in release mode."
            )
        )
    if not entries:
        typer.echo(f"no runs in {folder}")


@runs_app.command("rm")
def remove_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, finished or not.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    lose_ledger: Annotated[
        bool,
        typer.Option(
            "--lose-ledger",
            help="Also remove a release run that paid for private data, and with it the account of what it revealed.",
        ),
    ] = False,
) -> None:
    """Remove runs after a question; a folder that is being written or holds other files is refused."""
    from opusim.training.runs.listing import remove_runs, require_removable

    folders = list({run.absolute(): run for run in runs}.values())
    for folder in folders:
        require_removable(folder, lose_ledger=lose_ledger)
    if not yes:
        named = ", ".join(map(str, folders))
        try:
            agreed = typer.confirm(f"Remove {named}?", err=True)
        except typer.Abort as error:
            typer.echo(err=True)
            raise ValueError(
                "--yes is missing: there is no answer to read; give it to remove unasked"
            ) from error
        if not agreed:
            typer.echo("nothing was removed")
            raise typer.Exit(1)
    for folder in remove_runs(folders, lose_ledger=lose_ledger):
        typer.echo(f"removed {folder}")


def account_run(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or its ledger.jsonl.")],
    delta: Annotated[
        float | None, typer.Option(help="State the guarantees at another delta than the run's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every assumption.")] = False,
) -> None:
    """State the guarantees of what a run's ledger has paid for; refuse a ledger that is not the run's newest."""
    from opusim.accounting.explanation import WARNINGS
    from opusim.tables import wrapped
    from opusim.training.runs.storage import kind_of

    statement = _stated(path, delta)
    if as_json:
        typer.echo(json.dumps(statement.to_json(), indent=2, allow_nan=False))
        return
    if "unwitnessed" in statement.warnings:
        typer.echo(WARNINGS["unwitnessed"], err=True)
    typer.echo(statement.text(without=["unwitnessed"]))
    folder = path if path.is_dir() else path.parent
    note = _device_note(folder)
    if note is not None:
        typer.echo(wrapped(note, indent="  "))
    if kind_of(folder) == "private loop":
        typer.echo(
            "This is the ledger of a private loop. Print private.statement() in the program that trains: it counts "
            "what the loop checked as checked."
        )


def _stated(path: Path, delta: float | None) -> Statement:
    """Read a ledger and what may be stated of it; in a run folder, check it against the checkpoint and the summary."""
    from opusim.accounting.explanation import LedgerFacts, RunFacts, Statement
    from opusim.accounting.ledger import read_ledger
    from opusim.training.runs.folder import RunFolder, versions

    folder, run, checked_against = RunFolder(path if path.is_dir() else path.parent), None, []
    if folder.started and path in (folder.path, folder.ledger_file):
        header = folder.newest_header()
        run = RunFacts(
            finished=folder.finished,
            step=None if header is None else header.step,
            versions=_versions_of(folder),
            records=_public_records(folder),
        )
        checked_against = [witness.name for witness in folder.witnesses()]
        content = folder.read_ledger()
    else:
        content = read_ledger(path)
    return Statement(
        mode=content.mode,
        guarantees=tuple(content.guarantees(delta=delta)),
        mechanisms=tuple(content.mechanisms),
        certificates=content.certificates,
        alarms=content.alarms,
        ledger=LedgerFacts.of(content, checked_against),
        run=run,
        versions={name: version for name, version in versions().items() if name in ("python", "opusim")},
    )


def _public_records(folder: RunFolder) -> int | None:
    """Return the number of training records, or None if it is private or the configuration is bad."""
    from opusim.errors import ConfigError
    from opusim.training.errors import RunFolderError

    try:
        if folder.read_config().counts_are_public:
            return int(folder.read_facts()["data"]["n_train"])
    except (RunFolderError, ConfigError, KeyError, TypeError, ValueError):
        pass
    return None


def _device_note(path: Path) -> str | None:
    """Return what to know of the device's noise; None if the folder holds no run, or a damaged configuration."""
    from opusim.training.errors import RunFolderError
    from opusim.training.runs.folder import RunFolder, StoredRun

    folder = RunFolder(path)
    try:
        return StoredRun(folder, 0).device_note if folder.started else None
    except RunFolderError:
        return None


def _versions_of(folder: RunFolder) -> dict[str, str]:
    """Return the versions that a run was started with; none if its configuration, which no guarantee needs, is bad."""
    from opusim.training.errors import RunFolderError

    try:
        return {str(name): str(version) for name, version in folder.read_facts()["versions"].items()}
    except (RunFolderError, AttributeError):
        return {}


DeviceArgument = Annotated[
    str, typer.Argument(help="A name of `opusim device list`, or the path of a TOML file.")
]
Outputs = Annotated[
    int | None,
    typer.Option(help="Outputs of a reading, at least 1; those of the certificate by default, else 1,024."),
]
Classes = Annotated[int, typer.Option(help="Number of labels, at least 2.")]
Targets = Annotated[list[float] | None, typer.Option(help="State what this epsilon takes; repeatable.")]
DeviceDelta = Annotated[float, typer.Option(help="delta at which epsilon is stated.")]
CertificateFile = Annotated[
    Path | None,
    typer.Option(
        help="The device's certificate, whose limits and beta then count in place of the description."
    ),
]
KeptOfLabels = Annotated[
    str,
    typer.Option(
        help="What is kept of a camera's look at each label: reading (a projection), counts (of one frame) or argmax."
    ),
]
FigureFile = Annotated[
    Path | None, typer.Option(help="Draw a camera's sigma and epsilon against temperature: a PNG file.")
]


def account_device(
    name: DeviceArgument,
    outputs: Outputs = None,
    classes: Classes = 10,
    target_epsilon: Targets = None,
    delta: DeviceDelta = 1e-5,
    certificate: CertificateFile = None,
    kept: KeptOfLabels = "reading",
    figure: FigureFile = None,
) -> None:
    """State what a device's own noise is worth for labels read once: from sigma or temperature to epsilon and back."""
    from opusim.training.reports.device_privacy import device_levels, level_rows

    from opusim import checks
    from opusim.accounting.explanation import print_rows
    from opusim.description.schema import load_description
    from opusim.devices.certificate import load_certificate
    from opusim.files import FIGURES, require_writable
    from opusim.tables import wrapped

    if figure is not None:
        require_writable(figure, "--figure", FIGURES)
    checks.choice(("reading", "counts", "argmax"), kept=kept)
    targets, description = target_epsilon or [8.0, 3.0, 1.0], load_description(name)
    held = None if certificate is None else load_certificate(certificate)
    if outputs is None:
        outputs = 1024 if held is None else held.n_outputs
    text = (
        f"Each record's label, one of {classes}, is shown to {name!r} once and read at {outputs:,} outputs, at delta "
        f"{delta:g}. Epsilon is about the label only; features are public."
    )
    if description.camera is None:
        text += " A protection of whole records (--protect record) scales the device's noise and needs no such level."
    for target in targets:
        checks.positive(target_epsilon=target)
    if description.camera is not None:
        from opusim.training.reports.device_privacy import evaluations, label_counts, print_account

        from opusim.progress import Progress

        with Progress("account device", "evaluations") as progress:
            counts = label_counts(
                description,
                n_classes=classes,
                n_outputs=outputs,
                delta=delta,
                kept=kept,  # type: ignore[arg-type]  # checked above
                on_evaluation=progress.advance,
                certificate=held,
            )
            typer.echo(wrapped(text))
            progress.start(evaluations(len(targets), figure=figure is not None))
            print_account(counts, targets, figure)
        return
    if kept != "reading":
        raise ValueError(f"kept = {kept!r}: {name!r} counts no photons; leave it out, or take a camera")
    if figure is not None:
        raise ValueError(
            f"figure: {name!r} counts no photons; leave it out, or take a device of kind 'camera'"
        )
    levels = device_levels(
        description,
        n_classes=classes,
        n_outputs=outputs,
        targets=targets,
        delta=delta,
        certificate=held,
    )
    typer.echo(wrapped(text))
    print_rows(level_rows(levels))
