"""The `opusim` command: mounts each layer's commands and turns errors into one line and an exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting.cli import app as account_app
from opusim.cli import app as device_app
from opusim.errors import ConfigError, DeviceError, OpusimError

if TYPE_CHECKING:
    from training.runs.run import Run

app = typer.Typer(
    name="opusim",
    help="Train neural networks on a simulated or real optical processing unit (OPU), and see what its noise does.",
    epilog="Start with:  opusim train pdfa --data digits\n\nAny command takes --debug, which shows the traceback of an "
    "error. Exit codes: 2 for bad input, 3 for a device fault, 4 for a spent privacy budget, 130 for Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
train_app = typer.Typer(
    help="Train a network: pdfa (through the device), dfa, tdfa (digital), bp (backpropagation).",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(device_app, name="device")
app.add_typer(train_app, name="train")
app.add_typer(account_app, name="account")


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"opusim {installed('opusim')}")
        raise typer.Exit


_EXAMPLES = """[bold]Examples[/bold]

opusim train {kind} --data digits --epochs 30

opusim train {kind} --data fashion-mnist --set optimizer.lr=0.01 --set model.hidden=[512,512]

opusim train {kind} --config run.toml --seed 3 --out runs/third

[bold]--set[/bold] changes any key of the configuration; `opusim train options` lists them all with their meaning
and default. A run is a folder; `opusim report RUN` draws it, `opusim evaluate RUN` measures it,
`opusim train resume RUN` goes on with one that was stopped or killed."""

Config = Annotated[
    Path | None, typer.Option(help="Run configuration: a TOML file, or the config.json of a run.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the configuration; repeatable."),
]
Data = Annotated[
    str | None,
    typer.Option(help="digits (embedded), mnist or fashion-mnist (from $OPUSIM_DATA, else downloaded)."),
]
Epochs = Annotated[int | None, typer.Option(help="Passes over the training records.")]
Seed = Annotated[int | None, typer.Option(help="Seed of initialisation, batches and simulated noise.")]
Out = Annotated[Path | None, typer.Option(help="The run folder; a new one under ./runs by default.")]
Device = Annotated[
    str | None,
    typer.Option(help="Device description: a name of `opusim device list`, or the path of a TOML file."),
]
Sigma = Annotated[
    float | None,
    typer.Option(help="Standard deviation of the noise, in units of the projection (short for --set)."),
]
Protect = Annotated[
    str | None,
    typer.Option(
        help="What is protected: record (whole records; Poisson batches), label, label-amplified (Poisson batches), "
        "label-once or label-response (labels alone, features public). Needs --epsilon, or for record and "
        "label-amplified --noise-multiplier."
    ),
]
Epsilon = Annotated[
    float | None,
    typer.Option(
        help="Privacy budget: sets the noise where none is given; training stops before it is exceeded."
    ),
]
Delta = Annotated[float | None, typer.Option(help="delta of every guarantee (1e-5 by default).")]
NoiseMultiplier = Annotated[
    float | None, typer.Option(help="Standard deviation of the central noise over the clip norm.")
]
ReleaseMode = Annotated[
    bool,
    typer.Option("--release", help="Draw from the system's entropy, store no seed and no private figure."),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", help="No progress bar, no table; prints the run folder alone.")
]


@train_app.command("pdfa", epilog=_EXAMPLES.format(kind="pdfa"))
def train_pdfa(
    config: Config = None,
    settings: Settings = None,
    data: Data = None,
    device: Device = None,
    sigma: Sigma = None,
    epochs: Epochs = None,
    seed: Seed = None,
    out: Out = None,
    protect: Protect = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    noise_multiplier: NoiseMultiplier = None,
    release: ReleaseMode = False,
    quiet: Quiet = False,
) -> None:
    """Photonic direct feedback alignment: the ternarized error goes through the device once per step."""
    changes = _changes("pdfa", data, epochs, seed)
    changes["device"] = {
        **({"name": device} if device is not None else {}),
        **({"noise": {"sigma": sigma}} if sigma is not None else {}),
    }
    changes |= _private_changes(protect, epsilon, delta, noise_multiplier, release)
    _train(config, settings, changes, out, quiet)


def _digital_command(kind: str, description: str) -> None:
    """Mount the command of a trainer without a device; the three differ in their name alone."""

    def command(
        config: Config = None,
        settings: Settings = None,
        data: Data = None,
        sigma: Sigma = None,
        epochs: Epochs = None,
        seed: Seed = None,
        out: Out = None,
        protect: Protect = None,
        epsilon: Epsilon = None,
        delta: Delta = None,
        noise_multiplier: NoiseMultiplier = None,
        release: ReleaseMode = False,
        quiet: Quiet = False,
    ) -> None:
        changes = _changes(kind, data, epochs, seed)
        if sigma is not None:
            changes["trainer"] |= {"sigma": sigma, "order": "published"}
        changes |= _private_changes(protect, epsilon, delta, noise_multiplier, release)
        _train(config, settings, changes, out, quiet)

    train_app.command(kind, help=description, epilog=_EXAMPLES.format(kind=kind))(command)


_digital_command("dfa", "Direct feedback alignment: a digital random projection of the error (no device).")
_digital_command(
    "tdfa",
    "Ternarized direct feedback alignment: a digital projection of the error in {-1, 0, 1} (no device).",
)
_digital_command("bp", "Backpropagation, as the reference (no device).")


@train_app.command("resume")
def train_resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder that was stopped or killed.")],
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was stopped or killed, from its newest checkpoint."""
    from training.runs.folder import RunFolder
    from training.session import train

    kind = RunFolder(run).read_config().trainer.kind
    _watched(kind, quiet, lambda watcher: train(folder=run, resume=True, watcher=watcher))


@train_app.command("options")
def train_options() -> None:
    """List every key of the configuration, with its default and its meaning."""
    from rich.console import Console
    from rich.table import Table

    from training.config import option_rows

    table = Table("key", "default", "meaning", title="Keys for --set and for TOML files")
    for key, default, meaning in option_rows():
        table.add_row(key, default, meaning)
    Console().print(table)


@app.command()
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


@app.command()
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


@account_app.command("device")
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
    from opusim.description import load_description
    from training.device_privacy import device_levels, level_rows

    targets, description = target_epsilon or [8.0, 3.0, 1.0], load_description(name)
    if description.camera is not None:
        from training.camera_privacy import label_counts, print_account

        counts = label_counts(description, n_classes=classes, n_outputs=outputs, delta=delta)
        print_account(counts, targets, figure)
        return
    if figure is not None:
        raise ValueError(
            f"figure: {name!r} counts no photons; leave it out, or take a device of kind 'camera'"
        )
    levels = device_levels(description, n_classes=classes, n_outputs=outputs, targets=targets, delta=delta)
    print_rows(level_rows(levels))


@app.command()
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

    from training.attacks.run_audit import audit_run
    from training.runs.progress import CountingBar
    from training.runs.report import write_report
    from training.runs.run import load_run
    from training.runs.run_evaluation import read_npz

    data = None if arrays is None else read_npz(arrays)
    with CountingBar("audit") as bar:
        found = audit_run(
            run, data=data, trials=trials, seed=seed, delta=delta, on_start=bar.start, on_trial=bar.advance
        )
    report_file = write_report(load_run(run))
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    from textwrap import fill

    from accounting.tables import print_rows
    from training.attacks.words import finding_rows, paragraphs

    print_rows(finding_rows(found))
    for text in paragraphs(found):
        typer.echo("\n" + fill(text, width=120))
    typer.echo(f"\nkept in {run / 'audit.json'} and shown in {report_file}")


def main() -> None:
    """Run the command; exit codes: 2 for bad input, 3 for a device fault, 4 for a spent budget, 130 for Ctrl-C."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except (OpusimError, ValueError, TypeError, OSError) as error:
        if debug:
            raise
        message = " ".join(str(error).split())
        typer.echo(f"opusim: {message}", err=True)
        raise SystemExit(_exit_code(error)) from error


def _exit_code(error: BaseException) -> int:
    from accounting.errors import BudgetExceeded
    from training.errors import RunInterrupted

    if isinstance(error, RunInterrupted):
        return 130
    if isinstance(error, BudgetExceeded):
        return 4
    return 3 if isinstance(error, DeviceError) else 2


def _changes(kind: str, data: str | None, epochs: int | None, seed: int | None) -> dict[str, Any]:
    """The flags as a nested mapping over the configuration."""
    changes: dict[str, Any] = {"trainer": {"kind": kind}}
    if data is not None:
        changes["data"] = {"name": data}
    if epochs is not None:
        changes["epochs"] = epochs
    if seed is not None:
        changes["seed"] = seed
    return changes


def _private_changes(
    protect: str | None,
    epsilon: float | None,
    delta: float | None,
    noise_multiplier: float | None,
    release: bool,
) -> dict[str, Any]:
    """The privacy flags as a nested mapping; protections by secret batches take Poisson batches."""
    flags = {"kind": protect, "epsilon": epsilon, "delta": delta, "noise_multiplier": noise_multiplier}
    changes: dict[str, Any] = {"mode": "release"} if release else {}
    changes["protection"] = {key: value for key, value in flags.items() if value is not None}
    if protect in ("record", "label-amplified"):
        changes["sampler"] = {"scheme": "poisson"}
    return changes


def _train(
    config: Path | None, settings: list[str] | None, changes: dict[str, Any], out: Path | None, quiet: bool
) -> None:
    from training.config import load_config

    resolved = load_config(config, settings or (), changes)
    kind = changes["trainer"]["kind"]
    if resolved.trainer.kind != kind:
        reason = (
            f"{resolved.trainer.kind!r} contradicts the command; use: opusim train {resolved.trainer.kind}"
        )
        raise ConfigError("--set", "trainer.kind", reason)

    from training.session import train

    _watched(resolved.trainer.kind, quiet, lambda watcher: train(resolved, folder=out, watcher=watcher))


def _watched(kind: str, quiet: bool, work: Any) -> None:
    """Train behind a progress bar, then print the table and write the report."""
    from training.runs.report import write_report

    if quiet:
        run = work(None)
    else:
        from training.runs.progress import ProgressBar

        with ProgressBar(kind) as bar:
            run = work(bar)
    report_file = write_report(run)
    if quiet:
        typer.echo(run.folder.path)
    else:
        _print_run(run, report_file)


def _print_run(run: Run, report_file: Path) -> None:
    from accounting.tables import guarantee_rows, print_rows
    from training.runs.report import run_name, summary_row

    print_rows([summary_row(run, run_name(run))])
    print_rows(guarantee_rows(run.guarantees, seed_stored=run.config.mode == "experiment"))
    typer.echo(f"run folder: {run.folder.path}\nreport:     {report_file}")
    if run.config.mode == "experiment":
        typer.echo("experiment mode: not for release, the noise can be reconstructed from the seed")
