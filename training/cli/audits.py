"""The command `opusim audit`: attack a run, or test a mechanism."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opusim.training.cli.options import TrustCode, say_trusted

if TYPE_CHECKING:
    from opusim.training.attacks.findings import Audit

RunArgument = Annotated[Path | None, typer.Argument(metavar="RUN", help="A run folder.")]
KindOption = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="Instead of a run: test the sampler, clip and noise of a trainer (pdfa, dfa, tdfa, bp, ulr, zo, "
        "convex) or of a private-loop on records of the audit's choice. Exit code 1 means an alarm.",
    ),
]
Trials = Annotated[
    int | None,
    typer.Option(
        help="Trials on the run, 400 by default, the controls up to 100 each; of games on labels or the last model "
        "20,000 each. With --final-model: trainings, 400 by default."
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
CanaryCount = Annotated[int | None, typer.Option(help="With --one-run: how many canaries, 1,000 by default.")]
AuditSeed = Annotated[
    int | None, typer.Option(help="Seed that repeats an audit; drawn and stored by default.")
]
AuditDelta = Annotated[float | None, typer.Option(help="delta of the bounds; the run's by default.")]
OwnArrays = Annotated[
    Path | None,
    typer.Option(
        help="An .npz file with the arrays x and y (and ids) that the run was trained on, if it was on arrays."
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
    int | None, typer.Option(help="With --mechanism: steps of each of its two runs, 60 by default.")
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
    arrays: OwnArrays = None,
    out: AuditOut = None,
    mode: Mode = None,
    steps: Steps = None,
    settings: MechanismSettings = None,
    level: Level = None,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """Attack a run: can an attacker who sees its updates tell which records were used? Or test a mechanism."""
    of_runs: dict[str, object] = {"RUN": run, "--trials": trials, "--delta": delta, "--arrays": arrays}
    of_runs["--trust-code"] = trust_code or None
    of_runs |= {"--one-run": one_run or None, "--canaries": canaries}
    of_final_models = {"--final-model": final_model or None, "--jobs": jobs, "--cluster": cluster}
    of_runs |= of_final_models
    of_mechanisms = {"--model": model, "--mode": mode, "--steps": steps, "--set": settings, "--level": level}
    if mechanism is None:
        _require_absent(of_mechanisms, "goes with --mechanism KIND only")
        if run is None:
            raise ValueError(
                "RUN is missing: give a run folder to attack, or --mechanism KIND to test a trainer"
            )
        asked = _Asked(
            run=run, seed=seed, delta=delta, arrays=arrays, out=out, as_json=as_json, trust_code=trust_code
        )
        if final_model:
            _require_absent({"--one-run": one_run or None, "--canaries": canaries}, "is another audit")
            _show(asked, _play_final_model(asked, trials, jobs, cluster))
            return
        _require_absent(of_final_models, "goes with --final-model only")
        if one_run:
            _require_absent({"--trials": trials}, "is for the game of single steps, not for --one-run")
        else:
            _require_absent({"--canaries": canaries}, "goes with --one-run only")
        _show(asked, _play(asked, trials, canaries, one_run=one_run))
        return
    _require_absent(of_runs, "is for the audit of a run, not for --mechanism")
    _audit_mechanism(
        mechanism,
        model=model or "mlp",
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


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What every audit of a run is told."""

    run: Path
    seed: int | None
    delta: float | None
    arrays: Path | None
    out: Path | None
    as_json: bool
    trust_code: bool

    @property
    def place(self) -> Path:
        """The folder for what is found."""
        return self.out or self.run

    def options(self) -> dict[str, Any]:
        """Return the arguments that all audits of a run take, and print the user-supplied code they execute."""
        from opusim.training.runs.folder import RunFolder
        from opusim.training.runs.run import read_npz

        if self.trust_code:
            say_trusted(RunFolder(self.run).read_facts())
        data = None if self.arrays is None else read_npz(self.arrays)
        return {
            "data": data,
            "trust_code": self.trust_code,
            "out": self.out,
            "seed": self.seed,
            "delta": self.delta,
        }


def _play(asked: _Asked, trials: int | None, canaries: int | None, *, one_run: bool) -> Audit:
    """Attack a run's steps or play the game of its protection; or train once with canaries."""
    from opusim.progress import Progress
    from opusim.training.attacks.one_run.audit import DEFAULT_CANARIES, audit_one_training
    from opusim.training.attacks.run_audit import audit_run

    if one_run:
        with Progress("audit of one training", "steps") as progress:
            return audit_one_training(
                asked.run,
                **asked.options(),
                canaries=DEFAULT_CANARIES if canaries is None else canaries,
                on_start=progress.start,
                on_step=progress.advance,
            )
    with Progress("audit", "trials") as progress:
        return audit_run(
            asked.run,
            **asked.options(),
            trials=trials,
            on_start=progress.start,
            on_trial=lambda done: progress.advance(done=done),
        )


def _play_final_model(asked: _Asked, trainings: int | None, jobs: int | None, cluster: str | None) -> Audit:
    """Train many times with a crafted record or without it."""
    from opusim import checks
    from opusim.accounting.audit import FEWEST_CANARIES
    from opusim.progress import Progress
    from opusim.training.attacks.one_run.final_model import DEFAULT_TRAININGS, audit_final_model

    if trainings is not None:
        given: dict[str, Any] = {"--trials": trainings}
        checks.integer(minimum=FEWEST_CANARIES, **given)
    with Progress("audit of final models", "trainings") as progress:
        return audit_final_model(
            asked.run,
            **asked.options(),
            trainings=DEFAULT_TRAININGS if trainings is None else trainings,
            jobs=1 if jobs is None else jobs,
            cluster=cluster,
            on_start=lambda total, done: progress.start(total, done=done, at_once=True),
            on_training=lambda done: progress.advance(done=done),
        )


_WIDE_PAGE = 140
"""Columns from which the table of an audit has all its columns; the pages always have them."""


def _show(asked: _Asked, found: Audit) -> None:
    """Write report and pages of what was found, and print the findings and what they mean."""
    from opusim.accounting.explanation import print_rows
    from opusim.tables import output_width, wrapped
    from opusim.training.attacks.findings import LOW, NARROW, audit_rows, paragraphs
    from opusim.training.reports.audit_page import write_audit_page
    from opusim.training.reports.run_report import NOT_FOR_RELEASE, write_report
    from opusim.training.runs.folder import read_run

    loaded = read_run(asked.run)
    report_file = write_report(loaded, audit=found, folder=asked.out)
    page, document = write_audit_page(loaded, found, asked.place)
    if loaded.config.mode == "release" and found.holds_private_records:
        typer.echo(NOT_FOR_RELEASE, err=True)
    if asked.as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    print_rows(audit_rows(found), without=NARROW if output_width() < _WIDE_PAGE else (LOW,))
    for text in paragraphs(found):
        typer.echo("\n" + wrapped(text))
    typer.echo(f"\nkept in {asked.place / found.played.file}, shown in {report_file}")
    typer.echo(f"for a reviewer: {page} and {document}")


def _audit_mechanism(
    kind: str,
    *,
    model: str,
    mode: str,
    steps: int,
    settings: Sequence[str],
    seed: int | None,
    level: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run the self-test with a progress line, print it and store it.

    Raises:
        typer.Exit: With code 1, if a check raised an alarm.
    """
    from opusim.files import require_writable
    from opusim.progress import Progress
    from opusim.training.attacks.mechanism.audit import audit_mechanism
    from opusim.training.attacks.mechanism.checks import report_text
    from opusim.training.runs.storage import write_json

    if out is not None:
        require_writable(out, "--out")
    with Progress(f"self-test of {kind}", "steps") as progress:
        found = audit_mechanism(
            kind,
            model=model,
            mode=mode,
            steps=steps,
            settings=settings,
            seed=seed,
            level=level,
            on_start=progress.start,
            on_step=progress.advance,
        )
    if out is not None:
        write_json(out, found.to_json())
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else report_text(found))
    if not found.holds:
        raise typer.Exit(1)
