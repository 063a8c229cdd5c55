"""The commands on runs: evaluate, report, dossier, audit, zo replay, runs list and rm, account run and device."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opusim.training.cli.options import TrustCode, say, say_trusted

if TYPE_CHECKING:
    from opusim.training.attacks.findings import Audit

zo_app = typer.Typer(no_args_is_help=True)
runs_app = typer.Typer(no_args_is_help=True)


@zo_app.callback()
def zo() -> None:
    """Replay a zeroth-order run from its step log."""


_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "y": 31_557_600.0}
_FIGURES = {
    "accuracy": "accuracy {:.2f} %",
    "bits_per_byte": "bits per byte {:.4f}",
    "bits_per_token": "bits per token {:.4f}",
    "rmse": "RMSE {:.4f}",
    "r2": "R^2 {:.4f}",
    "loss": "loss {:.4f}",
}


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="Evaluate on the test records of this known data set, or on all records of csv:PATH, parquet:PATH, "
            "npz:PATH, folder:PATH, text:PATH or package.module:function, those of the training too, instead of the "
            "run's own test records."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Run the model's products on this programmable device, such as pcm, mzi_mesh or a .toml file."
        ),
    ] = None,
    after: Annotated[
        str, typer.Option(help="Time since the device was programmed, such as 1s, 30min, 1h, 1d or 1y.")
    ] = "0s",
    chip: Annotated[int, typer.Option(help="Seed of the device: which chips and which noise.", min=0)] = 0,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """Measure loss and accuracy of a run's model on test records."""
    from opusim.training.runs.drawing import beside_guessing
    from opusim.training.runs.folder import RunFolder
    from opusim.training.runs.run import evaluate_run

    # a duration such as 1h or 30min, in seconds
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", after.strip())
    if found is None or found[2] not in _UNITS_S:
        raise typer.BadParameter(f"{after!r}: must be like 1s, 30min, 1h, 1d or 1y", param_hint="--after")
    after_s = float(found[1]) * _UNITS_S[found[2]]
    if device is None and (chip or after_s):
        given = f"--chip {chip}" if chip else f"--after {after}"
        raise ValueError(
            f"{given}: only a device has chips and drifts; name one with --device, or leave it out"
        )
    if trust_code:
        say_trusted(RunFolder(run).read_facts())
    figures = evaluate_run(
        run,
        data=data,
        trust_code=trust_code,
        device=device,
        after_s=after_s,
        seed=chip,
    )
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        where = "" if device is None else f" on {device}, {after} after programming"
        shown = {**figures, "accuracy": 100 * figures["accuracy"]} if "accuracy" in figures else figures
        told = {name: text.format(shown[name]) for name, text in _FIGURES.items() if name in shown}
        known = RunFolder(run).read_facts()["data"]
        if "accuracy" in told and known.get("target", "class") == "class":
            told["accuracy"] += beside_guessing(shown["accuracy"], 100 / known["n_classes"])
        typer.echo(
            f"{figures.pop('records'):,} records of {figures.pop('data')}{where}: {', '.join(told.values())}"
        )
        if digital := figures.get("digital"):
            typer.echo(f"No device takes {', '.join(digital)}: digital in this figure.")


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
    from opusim.training.private_loop.folder import PrivacySettings
    from opusim.training.reports.audit_page import write_loop_report
    from opusim.training.reports.run_report import run_name, shown_audits, write_comparison, write_report
    from opusim.training.runs.checkpoints import require_checkpoints
    from opusim.training.runs.folder import read_run
    from opusim.training.runs.storage import kind_of

    _require_once(runs)
    if out is not None:
        require_writable(out, "--out", (".html",))
    if len(runs) == 1 and out is None and kind_of(runs[0]) == "private loop":
        say(*shown_audits(runs[0], PrivacySettings.stored(runs[0]).mode)[1])
        typer.echo(write_loop_report(runs[0]))
        return
    loaded = [read_run(path) for path in runs]
    for run in loaded:
        require_checkpoints(run.folder)
        say(*shown_audits(run.folder.path, run.config.mode)[1])
    if len(loaded) == 1 and out is None:
        typer.echo(write_report(loaded[0]))
        return
    names = [f"{path.name}: {run_name(run)}" for path, run in zip(runs, loaded, strict=True)]
    typer.echo(write_comparison(loaded, out or Path("report.html"), title="Runs compared", names=names))


def _require_once(runs: Sequence[Path]) -> None:
    """Refuse a folder that is given twice."""
    twice = [
        path for number, path in enumerate(runs) if path.resolve() in {p.resolve() for p in runs[:number]}
    ]
    if twice:
        raise ValueError(f"RUN {twice[0]}: is given twice; name each run once")


def dossier(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Folders of runs, of searches or of private loops, on one page."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The HTML file, with PDF and JSON next to it; by default dossier.html in the run folder, for several "
            "runs in this one. With audits whose figures must not be published: private-dossier.html in the first "
            "folder of --audits that holds such, or in a new folder RUN-private."
        ),
    ] = None,
    audits: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="A folder of audits or self-tests that is not the run's own, or a JSON file, as `opusim audit --out` "
            "wrote it; repeatable.",
        ),
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of the document.")] = False,
) -> None:
    """Write all that a privacy reviewer asks of a run: HTML, PDF and JSON."""
    from opusim.files import require_writable
    from opusim.training.reports.dossier import dossier_schema, write_dossier

    if schema:
        typer.echo(json.dumps(dossier_schema(), indent=2))
        return
    if not runs:
        raise ValueError("RUN is missing: give the folder of a run, of a search or of a private loop")
    _require_once(runs)
    if out is not None:
        require_writable(out, "--out", (".html",))
    page, document, data = write_dossier(runs, out=out, audits=audits or ())
    works = json.loads(data.read_bytes())["works"]
    notes = [lead for work in works for lead in work["leads"]]
    if out is None and page.name == "private-dossier.html":
        notes.append(
            f"The dossier is in {page.parent}, outside the run's folder: it shows figures of audits, which must not be "
            "published."
        )
    older = [Path(work["folder"]) / "dossier.html" for work in works if len(works) == 1]
    notes += [
        f"{each} is older and was not replaced: it lacks what this dossier says. Write it again without --audits and "
        "--out, or delete it."
        for each in older
        if each.exists() and each.resolve() != page.resolve()
    ]
    say(*dict.fromkeys(notes))
    typer.echo(f"{page}\n{document}\n{data}")


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
    """List runs and private loops of a folder: trainer, model, data, day, state, epsilon, accuracy or RMSE, size."""
    from opusim.accounting.explanation import print_rows
    from opusim.training.runs.listing import SCHEMA, VERSION, list_runs

    entries = list_runs(folder, _loop_facts)
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
        say(
            "`opusim account run RUN` states an epsilon in full: delta, relation, release, hypotheses. An experiment's "
            "epsilon holds for the same run in release mode.",
            err=False,
        )
    if not entries:
        typer.echo(f"no runs in {folder}")


def _loop_facts(folder: Path) -> dict[str, Any]:
    """Return what `list_runs` shows of a private loop; see `stated_loop` for the errors."""
    from opusim.accounting.guarantee import NoGuarantee
    from opusim.training.private_loop.folder import PrivacySettings, stated_loop  # torch, which no run needs
    from opusim.training.runs.listing import strongest_of

    settings = PrivacySettings.stored(folder)
    found: dict[str, Any] = {"mode": settings.mode, "steps": settings.total_steps}
    with suppress(NoGuarantee):  # no step was paid for
        statement = stated_loop(folder)
        found |= {"step": statement.ledger.steps_paid, "guarantee": strongest_of(statement.guarantees)}
    return found


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
    from opusim.accounting.ledger import LEDGER_FILE
    from opusim.tables import wrapped
    from opusim.training.errors import RunFolderError
    from opusim.training.runs.folder import RunFolder, StoredRun, stated
    from opusim.training.runs.storage import kind_of

    folder = path if path.is_dir() else path.parent
    if kind_of(folder) == "private loop" and path in (folder, folder / LEDGER_FILE):
        from opusim.training.private_loop.folder import stated_loop  # torch, which no run's statement needs

        statement = stated_loop(folder, delta=delta)
    else:
        statement = stated(path, delta=delta)
    if as_json:
        typer.echo(json.dumps(statement.to_json(), indent=2, allow_nan=False))
        return
    if "unwitnessed" in statement.warnings:
        typer.echo(WARNINGS["unwitnessed"], err=True)
    typer.echo(statement.text(without=["unwitnessed"]))
    if statement.run is not None and statement.ledger.checked_against:
        kept = (
            "only what checkpoint and summary note of the ledger was compared, not the checkpoints' tensors"
        )
        text = f"Of the run folder {kept} and not config.json; `opusim dossier RUN` compares them all."
        typer.echo(wrapped(text, indent="  "))
    with suppress(RunFolderError):  # a damaged configuration
        note = StoredRun(RunFolder(folder), 0).device_note if RunFolder(folder).started else None
        if note is not None:
            typer.echo(wrapped(note, indent="  "))


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
    typer.Option(help="The device's certificate; its limits and beta replace the description's."),
]
KeptOfLabels = Annotated[
    str,
    typer.Option(
        help="What is kept when a camera reads each label: reading (a projection), counts (of one frame) or argmax."
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
    from opusim import checks
    from opusim.accounting.explanation import print_rows
    from opusim.description.schema import load_description
    from opusim.devices.certificate import load_certificate
    from opusim.files import FIGURES, require_writable
    from opusim.training.reports.device_privacy import device_levels, level_rows

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
        from opusim.progress import Progress
        from opusim.training.reports.device_privacy import evaluations, label_counts, print_account

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
            say(text, err=False)
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
    say(text, err=False)
    print_rows(level_rows(levels))


RunArgument = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", help="A run folder, or that of make_private, whose constants are audited."),
]
KindOption = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="Instead of a run: test the sampler, clip and noise of a trainer (pdfa, dfa, tdfa, bp, ulr, zo, "
        "convex) or of a private-loop on records of the audit's choice.",
    ),
]
Trials = Annotated[
    int | None,
    typer.Option(
        help="Trials on the run; by default enough to detect half of the noise with probability 0.9, and up to 100 for "
        "each control; 20,000 for games on labels or the last model. With --final-model: trainings, 400 by default."
    ),
]
OneRun = Annotated[
    bool,
    typer.Option(
        "--one-run",
        help="Train once more as the run was trained, with canaries that coins put in or leave out, and bound epsilon "
        "of all steps together.",
    ),
]
FinalModel = Annotated[
    bool,
    typer.Option(
        "--final-model",
        help="Train many times as the run was trained, with a crafted record or without it, from initial weights of "
        "the attacker's choice, and attack the final models. The same command resumes a stopped audit.",
    ),
]
AuditJobs = Annotated[int | None, typer.Option(help="With --final-model: trainings at a time, 1 by default.")]
AuditCluster = Annotated[
    str | None,
    typer.Option(help="With --final-model: address of a Dask scheduler whose workers train."),
]
CanaryCount = Annotated[
    int | None,
    typer.Option(
        help="With --one-run, or of a private loop: number of canaries, by default enough to detect half of the noise."
    ),
]
AuditSeed = Annotated[
    int | None,
    typer.Option(
        help="Seed that repeats an audit, of a release run its coins only; drawn and stored by default."
    ),
]
AuditDelta = Annotated[float | None, typer.Option(help="delta of the bounds; the run's by default.")]
OwnArrays = Annotated[
    str | None,
    typer.Option(
        metavar="npz:FILE",
        help="The arrays x and y (and ids) that the run was trained on, if it was on arrays.",
    ),
]
AuditOut = Annotated[
    Path | None,
    typer.Option(
        help="A folder for audit.json (or one-run.json), pages and PDF, by default the run folder; a release run needs "
        "one outside it. With --mechanism: a JSON file."
    ),
]
Mode = Annotated[str | None, typer.Option(help="With --mechanism: experiment (default) or release.")]
Steps = Annotated[
    int | None,
    typer.Option(help="With --mechanism: steps of each of its two runs, at least 40, by default 60."),
]
MechanismSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="With --mechanism: a key of the configuration; repeatable."
    ),
]
AuditedModel = Annotated[
    str | None,
    typer.Option(
        help="With --mechanism: mlp (default), or for pdfa, dfa, tdfa and bp convolution or attention."
    ),
]
Level = Annotated[
    float | None,
    typer.Option(help="With --mechanism: probability of any false alarm, 1e-4 by default."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def audit(
    run: RunArgument = None,
    mechanism: KindOption = None,
    model: AuditedModel = None,
    trials: Trials = None,
    one_run: OneRun = False,
    canaries: CanaryCount = None,
    final_model: FinalModel = False,
    jobs: AuditJobs = None,
    cluster: AuditCluster = None,
    seed: AuditSeed = None,
    delta: AuditDelta = None,
    data: OwnArrays = None,
    out: AuditOut = None,
    mode: Mode = None,
    steps: Steps = None,
    settings: MechanismSettings = None,
    level: Level = None,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """Attack a run: can an attacker who sees its updates tell which records were used? Or test a mechanism."""
    of_final_models = {"--final-model": final_model or None, "--jobs": jobs, "--cluster": cluster}
    of_one_run = {"--one-run": one_run or None, "--canaries": canaries}
    of_runs: dict[str, object] = {"RUN": run, "--trials": trials, "--delta": delta, "--data": data}
    of_runs |= {"--trust-code": trust_code or None, **of_one_run, **of_final_models}
    if mechanism is not None:
        _require_absent(of_runs, "is for the audit of a run, not for --mechanism")
        asked = {"model": model, "mode": mode, "steps": steps, "settings": settings, "level": level}
        _audit_mechanism(mechanism, asked, seed=seed, out=out, as_json=as_json)
        return
    of_mechanisms = {"--model": model, "--mode": mode, "--steps": steps, "--set": settings, "--level": level}
    _require_absent(of_mechanisms, "goes with --mechanism KIND only")
    if run is None:
        raise ValueError("RUN is missing: give a run folder to attack, or --mechanism KIND to test a trainer")
    from opusim.training.runs.folder import RunFolder
    from opusim.training.runs.storage import kind_of

    if kind_of(run) == "private loop":
        others = {"--trials": trials, "--data": data, **of_final_models}
        _require_absent(others, "is for the audit of a run, not of a private loop")
        _audit_loop(run, out, {"canaries": canaries, "seed": seed, "delta": delta}, as_json=as_json)
        return
    if final_model:
        _require_absent(of_one_run, "is another audit")
    else:
        _require_absent(of_final_models, "goes with --final-model only")
        if one_run:
            _require_absent({"--trials": trials}, "is for the game of single steps, not for --one-run")
        else:
            _require_absent({"--canaries": canaries}, "goes with --one-run only")
    if trust_code:
        say_trusted(RunFolder(run).read_facts())
    shared: dict[str, Any] = {
        "data": None if data is None else _own_arrays(data),
        "trust_code": trust_code,
        "out": out,
        "seed": seed,
        "delta": delta,
    }
    if final_model:
        from opusim import checks
        from opusim.accounting.one_run import FEWEST_CANARIES
        from opusim.training.attacks.one_run.final_model import audit_final_model

        named: dict[str, Any] = {} if trials is None else {"--trials": trials}
        checks.integer(minimum=FEWEST_CANARIES, **named)
        options = {"trainings": trials, "jobs": jobs, "cluster": cluster}
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        found = audit_final_model(run, **shared, **given, progress="lines")
    elif one_run:
        from opusim.training.attacks.one_run.audit import audit_one_training

        found = audit_one_training(run, **shared, canaries=canaries, on_forecast=say, progress="lines")
    else:
        from opusim.training.attacks.run_audit import audit_run

        found = audit_run(run, **shared, trials=trials, on_forecast=say, progress="lines")
    _show(run, found, out, as_json=as_json)


def _own_arrays(data: str) -> tuple[Any, ...]:
    """Read the arrays that `--data` names."""
    from opusim.training.data.formats import read_npz

    kind, _, file = data.partition(":")
    if kind != "npz" or not file:
        raise ValueError(f"--data {data}: must be npz:FILE; the run itself reads any other data again")
    return read_npz(Path(file))


def _audit_loop(folder: Path, out: Path | None, asked: Mapping[str, Any], *, as_json: bool) -> None:
    """Audit a private loop with the constants of a folder, and show what was found; exits as `_print`."""
    from opusim.training.attacks.one_run.audit import audit_private_folder
    from opusim.training.reports.audit_page import Audited, write_audit_page, write_loop_report

    given = {name: value for name, value in asked.items() if value is not None}
    found = audit_private_folder(folder, out=out, **given, on_forecast=say, progress="lines")
    if out is None:
        shown = write_loop_report(folder)
    else:
        name = folder.resolve().name
        shown, _ = write_audit_page(Audited(f"private loop {name}", name, "experiment", {}), found, out)
    _print(found, [f"kept in {(out or folder) / found.played.file}, shown in {shown}"], as_json=as_json)


def _require_absent(options: Mapping[str, object], rule: str) -> None:
    """Refuse options of the other kind of audit."""
    for name, value in options.items():
        if value is not None and value != []:
            raise ValueError(f"{name} {rule}; leave it out")


def _show(run: Path, found: Audit, out: Path | None, *, as_json: bool) -> None:
    """Write report and pages of what was found, and print the findings and what they mean; exits as `_print`."""
    from opusim.training.reports.audit_page import write_audit_page
    from opusim.training.reports.run_report import NOT_FOR_RELEASE, write_report
    from opusim.training.runs.folder import read_run

    loaded, place = read_run(run), out or run
    report_file = write_report(loaded, audit=found, folder=out)
    page, document = write_audit_page(loaded, found, place)
    if loaded.config.mode == "release" and found.holds_private_records:
        typer.echo(NOT_FOR_RELEASE, err=True)
    places = f"kept in {place / found.played.file}, shown in {report_file}"
    _print(found, [places, f"for a reviewer: {page} and {document}"], as_json=as_json)


def _print(found: Audit, places: Sequence[str], *, as_json: bool) -> None:
    """Print the findings and where they are kept; exit with 1 if the claim is refuted, 3 if a control failed."""
    from opusim.training.attacks.findings import headline

    if as_json:
        if not found.controls_hold:
            say(headline(found))
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        typer.echo(f"{found}\n\n" + "\n".join(places))
    if found.refuted or not found.controls_hold:
        raise typer.Exit(1 if found.refuted else 3)


def _audit_mechanism(
    kind: str, asked: dict[str, Any], *, seed: int | None, out: Path | None, as_json: bool
) -> None:
    """Run the self-test with a progress line, print it and store it; exit with 1 if a check raised an alarm."""
    from opusim.files import require_writable
    from opusim.training.attacks.mechanism.audit import audit_mechanism
    from opusim.training.attacks.mechanism.checks import report_text

    if out is not None:
        require_writable(out, "--out")
    given = {name: value for name, value in asked.items() if value is not None}
    found = audit_mechanism(kind, **given, seed=seed, progress="lines")
    if out is not None:
        found.keep(out)
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else report_text(found))
    if not found.holds:
        raise typer.Exit(1)
