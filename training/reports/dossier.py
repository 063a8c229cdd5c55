"""The dossier of a run for a privacy reviewer: one HTML page, the same as PDF, and as JSON with a schema.

It claims nothing beyond the run's statement (`opusim.accounting.explanation`): proofs are the texts of the theorems
that the statement cites, audits are those in the folder, and what neither covers is named. Failed audits come first.
`opusim/templates/dossier.toml` holds texts and their variants, among them the headings of two public documents.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import pydantic
from matplotlib.backends.backend_pdf import PdfPages

from opusim.accounting.explanation import (
    LARGEST_EXPOSED,
    WARNINGS,
    Statement,
    explain,
    explain_theorem,
    guarantee_rows,
    number,
)
from opusim.accounting.guarantee import Adjacency, Guarantee, LedgerCorrupt, Release, Unit, to_json
from opusim.accounting.journal import Position, Witness
from opusim.accounting.ledger import LEDGER_FILE, Mode, Program, read_ledger
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.records import OWN_READING, ClippedRecords
from opusim.accounting.theorems import Theorem, known_theorems, printed
from opusim.files import quoted, write_file
from opusim.tables import html_page
from opusim.training.attacks.findings import (
    Audit,
    Origin,
    audit_rows,
    headline,
    paragraphs,
    power_text,
    read_audit,
    verdict,
)
from opusim.training.attacks.mechanism.checks import (
    MechanismAudit,
    kept_self_tests,
    limits_text,
    result_text,
    settings_text,
)
from opusim.training.config.sections import OWN_ARRAYS
from opusim.training.data.catalogue import CATALOGUE
from opusim.training.data.samplers import PhysicalBatches
from opusim.training.errors import RunFolderError
from opusim.training.networks.user_code import described_code
from opusim.training.private_loop.folder import (
    CHECKPOINT_FILE,
    SETTINGS_FILE,
    PrivacySettings,
    stated_loop,
)
from opusim.training.private_loop.session import PrivateTraining
from opusim.training.protections.clipping import FLAT
from opusim.training.reports.audit_page import AUDIT_COLUMNS, Block, Page
from opusim.training.reports.run_report import (
    command_of,
    kept_audits,
    run_name,
    shown_values,
)
from opusim.training.runs.checkpoints import require_checkpoints
from opusim.training.runs.drawing import main_figure
from opusim.training.runs.folder import StoredRun, read_run, stated, versions
from opusim.training.runs.storage import json_content, kind_of, list_checkpoints
from opusim.training.sweeps.tuning import SearchState

State = Literal["answered", "in part", "not covered"]
Source = str | Path | StoredRun | PrivateTraining
"""A folder of `opusim train`, of `opusim tune` or of `make_private`, or what they return."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A question of a reviewer, and the answer."""

    question: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A hypothesis of a guarantee.

    Attributes:
        text: The hypothesis, as a sentence.
        holds: True if the code that ran checked it, False if it fails, None if it is on trust.
        checked: Where this document has that from: the program that trained and wrote it, or the record that this
            program left in the folder; None without a check.
    """

    text: str
    holds: bool | None
    checked: Literal["program", "record"] | None


@dataclass(frozen=True, kw_only=True)
class KeptAudit:
    """An audit that was found.

    Attributes:
        file: Name of its file.
        played: What it attacked.
        attacked: "this run", or which other one.
        controls_hold: Whether every control behaved as required; if not, the audit shows nothing.
        refuted: Whether it contradicts a statement.
        verdict: Its result in a sentence or two, after the line on failed controls.
        bounds: A row for each bound and each control.
        paragraphs: The game, the result and the controls in words.
        document: The whole of the file (docs/release.md).
    """

    file: str
    played: str
    attacked: str
    controls_hold: bool
    refuted: bool
    verdict: str
    bounds: list[dict[str, str]]
    paragraphs: list[str]
    document: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class KeptSelfTest:
    """A self-test of the mechanism that was found.

    Attributes:
        file: Name of its file.
        accounted: The mechanism of a step as its ledgers named it.
        holds: Whether no check raised an alarm.
        paragraphs: What ran, the result, and what the checks cannot detect.
        document: The whole of the file (docs/audits.md).
    """

    file: str
    accounted: str
    holds: bool
    paragraphs: list[str]
    document: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Party:
    """A party or part of the system, whether the guarantee trusts it, and why."""

    party: str
    trusted: Literal["yes", "in part", "no", "not used"]
    why: str


@dataclass(frozen=True, kw_only=True)
class Channel:
    """A side channel, and whether the guarantee covers it."""

    channel: str
    state: Literal["covered", "on trust", "not covered"]
    why: str


@dataclass(frozen=True, kw_only=True)
class Heading:
    """A heading of a public text, where it stands, and what this dossier says to it."""

    heading: str
    section: str
    state: State
    answer: str


@dataclass(frozen=True, kw_only=True)
class Standard:
    """A public text that asks questions of a privacy claim."""

    title: str
    source: str
    headings: list[Heading]


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of the folder.

    Attributes:
        name: Its name.
        bytes: Its size.
        sha256: Digest of its content.
        holds: What it holds.
        publish: Whether it may be published.
    """

    name: str
    bytes: int
    sha256: str
    holds: str
    publish: str


@dataclass(frozen=True, kw_only=True)
class Work:
    """A run or a private loop.

    Attributes:
        name: What it is.
        folder: Its folder, as it was given.
        kind: What made it.
        leads: What a reader must know before all else; failed audits come first.
        answers: Questions of a reviewer.
        statement: The document of docs/privacy.md.
        hypotheses: What they rest on.
        mechanisms: What ran, with every parameter.
        proofs: The theorems that they cite, and those that these cite: statement, proof, hypotheses, reference.
        audits: Those in the folder, and those that were given.
        self_tests: Self-tests of the mechanism that were given.
        data: The data set and the unit, name and value.
        tuning: What the choice of settings cost.
        trust: Who is trusted.
        side_channels: What an attacker may look at besides the release.
        standards: The headings of public texts.
        versions: The packages that it was started with.
        files: The files of the folder that the statement rests on, and those that hold a model.
        command: How to repeat it.
    """

    name: str
    folder: str
    kind: Literal["run", "search", "private loop"]
    leads: list[str]
    answers: list[Answer]
    statement: dict[str, Any]
    hypotheses: list[Hypothesis]
    mechanisms: list[dict[str, str]]
    proofs: list[str]
    audits: list[KeptAudit]
    self_tests: list[KeptSelfTest]
    data: dict[str, str]
    tuning: str
    trust: list[Party]
    side_channels: list[Channel]
    standards: list[Standard]
    versions: dict[str, str]
    files: list[StoredFile]
    command: str


@dataclass(frozen=True, kw_only=True)
class Dossier:
    """What the page, the PDF and the JSON document say.

    Attributes:
        schema: Name of the document.
        schema_version: It changes if a key is removed or changes its meaning.
        title: Heading.
        date: Day on which it was written.
        written_by: Versions of Python and of the opusim that wrote it.
        works: The runs and private loops, in the order given.
    """

    schema: Literal["opusim-dossier"] = "opusim-dossier"
    schema_version: Literal[1] = 1
    title: str
    date: str
    written_by: dict[str, str]
    works: list[Work]


def dossier_schema() -> dict[str, Any]:
    """Return the JSON schema of the document."""
    return pydantic.TypeAdapter(Dossier).json_schema(mode="serialization")


def write_dossier(
    runs: Source | Sequence[Source],
    *,
    out: str | Path | None = None,
    audits: str | Path | Sequence[str | Path] = (),
) -> tuple[Path, Path, Path]:
    """Write the dossier of a run, or of several on one page.

    Args:
        runs: Folders, or what `opusim.train`, `opusim.load_run` and `opusim.make_private` return. Of a folder the page
            says that checks are on its record; a private loop in the program that trains says that it checked.
        out: The HTML file; None takes `dossier.html` in the folder, for several runs in this one, and
            `private-dossier.html`, outside every run's folder, if figures of a release's audits forbid that it is
            published: in the first folder of `audits` that holds such figures, else in a new `NAME-private` next to the
            run's folder. PDF and JSON stand next to it. With figures of private records their mode is 0600.
        audits: Folders of audits and of self-tests that are not in the run's own, or their JSON files, as those of a
            release run; for one run only.

    Returns:
        The paths of HTML, PDF and JSON.

    Raises:
        RunFolderError: A folder holds no such work, or was changed; an audit or a self-test is of another mechanism;
            the dossier there has more hypotheses of the same work that code checked; or `out` is in a run's folder, and
            the dossier must not be published.
        LedgerCorrupt: A ledger was changed, cut or reordered.
        TypeError: `audits` holds something else than paths, such as what `opusim.audit_run` returns.
        ValueError: `audits` is given for several runs, or one of them holds no audit.
        OSError: A file cannot be written.
    """
    sources = [runs] if isinstance(runs, Source) else list(runs)
    if not sources:
        raise ValueError("runs is empty; give at least one run folder")
    places = _audit_paths(audits)
    if places and len(sources) > 1:
        raise ValueError(f"audits: {len(sources)} runs are given; give the audits of one run at a time")
    facts = [_facts(source, places) for source in sources]
    common = tomllib.loads(files("opusim").joinpath("templates/dossier.toml").read_text("utf-8"))
    works = _with_copies([_work(each, common) for each in facts])
    names = works[0].name if len(works) == 1 else f"{len(works)} runs"
    here = {name: version for name, version in versions().items() if name in ("python", "opusim")}
    found = Dossier(
        title=f"Privacy dossier: {names}", date=time.strftime("%Y-%m-%d"), written_by=here, works=works
    )
    own = facts[0].path / "dossier.html" if len(facts) == 1 else Path("dossier.html")
    secret = next((each.private_page for each in facts if each.private_page is not None), None)
    page = (secret or own) if out is None else Path(out)
    if secret is not None and (around := _work_around(page.parent)) is not None:
        raise RunFolderError(
            f"out = {page}: is in {around}, the folder of a run, and this dossier must not be published: it shows "
            "figures of private records; name a file in a folder outside it"
        )
    private = any(one.holds_private_records for each in facts for one in each.audits.values())
    document, data = page.with_suffix(".pdf"), page.with_suffix(".json")
    _require_no_better(found, page, data)
    several = common["several"].format(count=len(works)) if len(works) > 1 else ""
    sections = list(_sections(found, several))
    html = html_page("dossier.html", title=found.title, sections=sections)
    write_file(page, html.encode(), private=private)
    write_file(document, _pdf(found.title, sections), private=private)
    write_file(data, json_content(to_json(found)), private=private)
    return page, document, data


def _with_copies(works: Sequence[Work]) -> list[Work]:
    """Return the works, with a line on each whose ledger an earlier one has, unless their models differ.

    Runs with equal settings have equal ledgers, so the ledger alone does not tell a copy from a second run.
    """
    found = list[Work]()
    for work in works:
        digest, lead = work.statement["ledger"]["digest"], list[str]()
        for place, other in enumerate(found, 1):
            models = [
                {one.sha256 for one in each.files if one.name.endswith(_MODEL_FILES)}
                for each in (work, other)
            ]
            if other.statement["ledger"]["digest"] == digest and (not all(models) or models[0] & models[1]):
                lead = [
                    f"{work.folder} has the same ledger as run {place}, {other.folder} (digest {digest[:16]}), and no "
                    "model tells them apart: if one is a copy, they are one run, and its epsilon counts once."
                ]
                break
        found.append(replace(work, leads=[*lead, *work.leads]))
    return found


def _audit_paths(audits: object) -> list[Path]:
    """Return the folders and files of audits; raise TypeError for something else."""
    given = list(audits) if isinstance(audits, Iterable) and not isinstance(audits, str) else [audits]
    found = list[Path]()
    for one in given:
        if not isinstance(one, str | os.PathLike):
            raise TypeError(
                f"audits: got {type(one).__name__}; give folders that `opusim audit --out` (from Python out=...) "
                "wrote, or their JSON files"
            )
        found.append(Path(one))
    return found


def _require_no_better(found: Dossier, page: Path, data: Path) -> None:
    """Refuse (RunFolderError) to replace a dossier that has more checked hypotheses of the same work."""
    try:
        before = json.loads(data.read_bytes())
        kept = {
            str(work["name"]): sum(one["holds"] is True for one in work["hypotheses"])
            for work in before["works"]
        }
    except (OSError, ValueError, KeyError, TypeError):  # none, or none of ours
        return
    for work in found.works:
        checked = sum(one.holds is True for one in work.hypotheses)
        if kept.get(work.name, 0) > checked:
            raise RunFolderError(
                f"{page}: the dossier of {work.name} there has {kept[work.name]} checked hypotheses, this one would "
                f"have {checked}; write elsewhere (--out), or write it in the program that trains: "
                "write_dossier(private, audits=[...])"
            )


# What is known of a run


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What the texts are made from."""

    path: Path
    kind: Literal["run", "search", "private loop"]
    name: str
    statement: Statement
    audits: Mapping[str, Audit]
    others: Mapping[str, str]  # of audits of another run, by file, which one
    origins: Mapping[str, Origin | None]  # what each audit attacked, by file; None if it does not say
    self_tests: Mapping[str, MechanismAudit]
    run: StoredRun | None
    settings: PrivacySettings | None
    programs: Sequence[Program]
    from_folder: bool
    places: Mapping[str, Path]  # of audits, by file, the folder

    @property
    def checks(self) -> Literal["program", "record"] | None:
        """What says that hypotheses were checked; None if none was."""
        if not any(one.holds for each in self.statement.guarantees for one in each.assumptions):
            return None
        return "record" if self.from_folder else "program"

    @property
    def first(self) -> Guarantee:
        """Return the guarantee that the answers are about: a proven one, if there is one."""
        return next((one for one in self.statement.guarantees if one.is_proven), self.statement.guarantees[0])

    @property
    def private_page(self) -> Path | None:
        """Where a dossier stands that must not be published: with such an audit, but outside every run's folder."""
        private = [self.places[file] for file, one in self.audits.items() if one.holds_private_records]
        if self.statement.mode != "release" or not private:
            return None
        outside = next((place for place in private if _work_around(place) is None), None)
        if outside is None:
            path, around = self.path.resolve(), _work_around(self.path) or self.path.resolve()
            outside = around.parent / f"{'-'.join(path.relative_to(around.parent).parts)}-private"
        return outside / "private-dossier.html"

    def attacked(self, file: str) -> str:
        """Return what an audit attacked."""
        return (
            f"{self.audits[file].played} ({file}{', of ' + self.others[file] if file in self.others else ''})"
        )

    @property
    def per_user(self) -> int | None:
        """Return k, or None if no users are protected."""
        found = [getattr(one, "records_per_user", None) for one in self.statement.mechanisms]
        return next((k for k in found if k is not None), None)


def _work_around(folder: Path) -> Path | None:
    """Return the outermost folder of a run, loop, search or sweep that holds a folder or is it, or None."""
    place = folder.resolve()
    works = (
        each
        for each in reversed((place, *place.parents))
        if (each / LEDGER_FILE).exists() or kind_of(each) in ("search", "sweep")
    )
    return next(works, None)


def _facts(source: Source, elsewhere: Sequence[Path]) -> _Facts:
    """Read a folder, or what a program holds of it."""
    if isinstance(source, PrivateTraining):
        path = source.folder
    else:
        path = source.folder.path if isinstance(source, StoredRun) else Path(source)
    kind = kind_of(path)
    if kind == "search":
        path = path / "best"
        if not path.exists():
            raise RunFolderError(f"search folder {path.parent} has no best run; finish the search first")
    if kind in ("sweep", "audit"):
        what = "an audit" if kind == "audit" else "a sweep"
        raise RunFolderError(f"{path} holds {what}; give the folder of a run")
    run, settings, programs = None, None, list[Program]()
    if kind == "private loop":
        settings, name = PrivacySettings.stored(path), f"private loop {path.resolve().name}"
    else:
        run = read_run(path)
        require_checkpoints(run.folder)
        name = run_name(run)
    if isinstance(source, PrivateTraining):
        statement = source.statement()
    else:
        statement = stated(path) if settings is None else stated_loop(path)
    if settings is not None:
        enforcements = read_ledger(path).enforcements
        programs = [each.program for each in enforcements if each is not None and each.program is not None]
    audits: dict[str, Audit] = dict(kept_audits(path))
    places, own = dict.fromkeys(audits, path), {(path / name).resolve() for name in audits}
    self_tests = {str(at): found for at, found in kept_self_tests(path).items()}
    for given in elsewhere:
        kept, tested = _kept_in(given)
        for at, audit in kept.items():
            if at.resolve() in own:
                continue
            # a bare name is that of a file in the run's folder
            label = str(at) if at.name != str(at) else f"./{at}"
            places[label], audits[label] = at.parent, audit
        self_tests |= {str(at): found for at, found in tested.items()}
    for file, test in self_tests.items():
        _require_like(test, file, statement, run)
    origins = {file: _origin(audit, places[file]) for file, audit in audits.items()}
    others = {file: _another(origin, places[file], path) for file, origin in origins.items()}
    ours = "private loop" if run is None else run.config.trainer.kind
    audits = {file: _about_this(audit, statement, file, path, ours) for file, audit in audits.items()}
    return _Facts(
        path=path,
        kind="private loop" if settings is not None else "search" if kind == "search" else "run",
        name=name,
        statement=statement,
        audits=audits,
        others={file: text for file, text in others.items() if text},
        origins=origins,
        self_tests=self_tests,
        run=run,
        settings=settings,
        programs=programs,
        from_folder=not isinstance(source, PrivateTraining),
        places=places,
    )


def _kept_in(given: Path) -> tuple[dict[Path, Audit], dict[Path, MechanismAudit]]:
    """Return the audits and the self-tests in a folder, or the one in a JSON file, by file.

    Raises RunFolderError for a changed or other file, and ValueError for a folder that holds none.
    """
    tested = kept_self_tests(given)
    if given.is_file():
        return {} if tested else {given: read_audit(given)}, tested
    kept = {given / name: audit for name, audit in kept_audits(given).items()}
    if not kept and not tested:
        raise ValueError(
            f"audits: {given} holds neither audit nor self-test; give a folder that `opusim audit --out` wrote, or a "
            "JSON file in it"
        )
    return kept, tested


def _about_this(audit: Audit, statement: Statement, file: str, path: Path, kind: str) -> Audit:
    """Return an audit that says in which numbers what it attacked differs from what a ledger states.

    The descriptions of two mechanisms are compared, which name unit, clip, noise multiplier, rate, steps and divisor.
    Raises RunFolderError if it attacked another kind of training, unit, relation or mechanism.
    """
    attacked_kind = "" if audit.origin is None else audit.origin.kind
    if attacked_kind not in ("", kind):
        raise RunFolderError(
            f"audits: {file} is no audit of {path}: it attacked training by {attacked_kind}, and this is {kind}; leave "
            f"it out, or audit this folder: opusim audit {quoted(path)}"
        )
    trials = {getattr(each, "rests_on", "") for each in statement.mechanisms} - {""}  # of a search
    like = [
        (theirs, ours)
        for theirs in audit.guarantees
        for ours in statement.guarantees
        if (theirs.unit, theirs.adjacency) == (ours.unit, ours.adjacency)
        and (_form(theirs.mechanism) == _form(ours.mechanism) or theirs.theorem in trials)
    ]
    if not like:
        attacked = _claims(audit.guarantees) or "no stated guarantee"
        raise RunFolderError(
            f"audits: {file} is no audit of {path}: it attacked {attacked}; the ledger states "
            f"{_claims(statement.guarantees)}; leave it out, or audit this folder: opusim audit {quoted(path)}"
        )
    if any(theirs.mechanism == ours.mechanism for theirs, ours in like):
        return replace(audit, differs="")
    theirs, ours = like[0]
    return replace(audit, differs=f"{theirs.mechanism}, in place of {ours.mechanism}")


def _origin(audit: Audit, place: Path) -> Origin | None:
    """Return what an audit in a folder attacked, or None if neither it nor a ledger there says so."""
    if audit.origin is None and (place / LEDGER_FILE).exists():
        return Origin.of(place)
    return audit.origin


def _another(origin: Origin | None, place: Path, path: Path) -> str:
    """Return which run an audit attacked if that is not the one in a folder; empty if it is.

    It is the same run if its ledger begins with the lines that the audited ledger had.
    """
    if origin is None:
        return "a run that it does not name"
    begun = Witness(name=str(place), position=Position(lines=origin.lines, digest=origin.digest))
    try:
        read_ledger(path / LEDGER_FILE, witnesses=[begun])
    except LedgerCorrupt:
        return f"another run ({origin.mode}, folder {origin.folder}, ledger digest {origin.digest[:16]})"
    return ""


def _require_like(test: MechanismAudit, file: str, statement: Statement, run: StoredRun | None) -> None:
    """Require (RunFolderError) that a self-test concerns trainer, protection, unit and mode of what is stated."""
    # a loop's steps are those of zo if its mechanism has directions
    by_losses = any(hasattr(one, "directions") for one in statement.mechanisms)
    kind = run.config.trainer.kind if run is not None else "zo" if by_losses else "private-loop"
    protection = "record" if run is None else run.config.protection.kind
    users = any(one.unit is Unit.USER for one in statement.guarantees)
    ours = kind, protection, "users" if users else "no users", statement.mode
    theirs = test.kind, test.protection, "users" if "user" in test.accounted else "no users", test.mode
    if ours != theirs:
        unit = " --set protection.unit=user" if users else ""
        raise RunFolderError(
            f"audits: {file} tests {theirs[0]} with protection.kind = {theirs[1]} ({theirs[2]}) in {theirs[3]} mode, "
            f"and this is {ours[0]} with {ours[1]} ({ours[2]}) in {ours[3]} mode; leave it out, or test this one: "
            f"opusim audit --mechanism {kind} --mode {statement.mode} --set protection.kind={protection}{unit}"
        )


def _form(description: str) -> str:
    """Return the description of a mechanism without its numbers, and without what plurals depend on them."""
    return re.sub(r"s\b", "", re.sub(r"\d[\d,.]*(e[+-]?\d+)?", "#", description))


def _claims(guarantees: Sequence[Guarantee]) -> str:
    """Return the units, relations and mechanisms of guarantees."""
    found = (f"{one.mechanism} (unit {one.unit.value}, {one.adjacency.value})" for one in guarantees)
    return "; ".join(dict.fromkeys(found))


def _work(facts: _Facts, common: Mapping[str, Any]) -> Work:
    """Return the parts of a dossier that are about one run."""
    statement, texts = facts.statement, _texts(facts, common)
    without_device = facts.settings is not None and facts.settings.device is False
    assumed = dict.fromkeys(
        (one.text, one.holds) for each in statement.guarantees for one in each.assumptions
    )
    return Work(
        name=facts.name,
        folder=str(facts.path),
        kind=facts.kind,
        leads=_leads(facts, common["absent"]),
        answers=[Answer(**_filled(each, texts)) for each in common["questions"]],
        statement=statement.to_json(),
        hypotheses=[
            Hypothesis(text=text, holds=holds, checked=facts.checks if holds else None)
            for text, holds in assumed
        ],
        mechanisms=[{"what ran": each.describe(), **_parameters(each)} for each in statement.mechanisms],
        proofs=[
            text.replace(f"\n- {OWN_READING}", "") if without_device else text
            for text in map(explain_theorem, _cited(statement))
        ],
        audits=[
            _kept(file, audit, facts.others.get(file, "this run")) for file, audit in facts.audits.items()
        ],
        self_tests=[
            KeptSelfTest(
                file=file,
                accounted=test.accounted,
                holds=test.holds,
                paragraphs=[settings_text(test), result_text(test), limits_text(test)],
                document=test.to_json(),
            )
            for file, test in facts.self_tests.items()
        ],
        data=_data(facts, texts["unit"]),
        tuning=texts["tuning"],
        trust=[Party(**each) for each in _trust(common, texts)],
        side_channels=[Channel(**_filled(each, texts)) for each in common["channels"]],
        standards=[
            Standard(
                title=each["title"],
                source=each["source"],
                headings=[Heading(**_filled(heading, texts)) for heading in each["headings"]],
            )
            for each in common["standards"]
        ],
        versions=(_versions(facts) or [{}])[0],
        files=list(_files(facts, common["files"])),
        command=_command(facts),
    )


def _trust(common: Mapping[str, Any], texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return who is trusted; a device that took no part in a loop is left out."""
    rows = [_filled(each, texts) for each in common["trust"]]
    return [each for each in rows if each["party"]]


def _parameters(mechanism: Mechanism) -> dict[str, str]:
    """Return what the ledger holds of a mechanism, without what is empty."""
    return {
        key: value for key, value in shown_values(mechanism.to_json()) if value and key != "schema_version"
    }


def _filled(texts: Mapping[str, str], values: Mapping[str, str]) -> dict[str, Any]:
    """Fill in the names in braces."""
    return {key: text.format(**values) for key, text in texts.items()}


_AUDITED = "Audit of"
_TESTED = "Self-test of the mechanism"


def _leads(facts: _Facts, common: Mapping[str, str]) -> list[str]:
    """Return what stands above all else: failed audits, then what limits the statement."""
    statement, audits = facts.statement, facts.audits.items()
    leads = [
        f"{_AUDITED} {facts.attacked(file)}: {said}"
        for file, audit in audits
        for said in (headline(audit), verdict(audit) if audit.refuted else "")
        if said
    ]
    leads += [
        f"{_TESTED} ({file}): {result_text(test)}"
        for file, test in facts.self_tests.items()
        if not test.holds
    ]
    leads += _foreign(facts)
    leads += [
        f"Status {each.status.value!r}: {_meaning(each)}"
        for each in statement.guarantees
        if not each.is_proven
    ]
    leads += [f"{WARNINGS[code][0].upper()}{WARNINGS[code][1:]}" for code in statement.warnings]
    leads += [] if audits or facts.self_tests else [common["audits"]]
    if statement.mode == "release" and any(audit.holds_private_records for _, audit in audits):
        leads.append(common["private_audit"])
    if facts.kind == "private loop" and facts.checks is None:
        leads.append(common["checks"])
    return leads


def _foreign(facts: _Facts) -> Iterator[str]:
    """Yield a sentence on each audit that attacked another run, other numbers or another mode than what is stated."""
    for file, audit in facts.audits.items():
        which, origin = facts.others.get(file, ""), facts.origins[file]
        if not which and not audit.differs:
            continue
        text = f"The audit in {file} is of {which or 'this run with other numbers'}, not of the run as stated here."
        if audit.differs:
            text += f" It attacked other numbers: {audit.differs}."
        if origin is not None and origin.mode != facts.statement.mode:
            noise = {"experiment": "a stored seed", "release": "the operating system"}
            text += (
                f" That run is in {origin.mode} mode: noise from {noise[origin.mode]} was attacked, not that from "
                f"{noise[facts.statement.mode]}, which this run has."
            )
        yield text


def _meaning(guarantee: Guarantee) -> str:
    """Return what a guarantee says in words, without its status."""
    return explain(guarantee).splitlines()[0].partition(": ")[2]


def _cited(statement: Statement) -> Iterator[Theorem]:
    """Yield the theorems that guarantees cite, then those that these name, each once."""
    known = {each.name: each for each in known_theorems()}
    waiting = [each.theorem for each in statement.guarantees if each.theorem is not None]
    waiting += [getattr(each, "rests_on", "") for each in statement.mechanisms]
    done = set[str]()
    while waiting:
        name = waiting.pop(0)
        if name in known and name not in done:
            done.add(name)
            yield known[name]
            waiting += re.findall(r"theorem ([a-z][a-z-]*)", f"{known[name].statement} {known[name].proof}")


def _kept(file: str, audit: Audit, attacked: str) -> KeptAudit:
    return KeptAudit(
        file=file,
        played=audit.played.value,
        attacked=attacked,
        controls_hold=audit.controls_hold,
        refuted=audit.refuted,
        verdict=" ".join(filter(None, [headline(audit), verdict(audit)])),
        bounds=audit_rows(audit),
        paragraphs=paragraphs(audit),
        document=audit.to_json(),
    )


# The texts


def _texts(facts: _Facts, common: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts that answers are made from, by name: the variants that fit, with what they name."""
    statement, first, k = facts.statement, facts.first, facts.per_user
    noun = "user" if first.unit is Unit.USER else "record"
    checkers = " and ".join(statement.ledger.enforced_by)
    code = [] if facts.run is None else _own_code(facts.run)
    device = None if facts.run is None else facts.run.facts["device"]
    features = None if facts.run is None else facts.run.facts["data"].get("features", {}).get("device")
    searches = [each.describe() for each in statement.mechanisms if each.kind == "private_selection"]
    loop = facts.kind == "private loop"
    kind_of_device = "unearned" if device else "features" if features else "absent"
    if facts.settings is not None and facts.settings.device is not False:
        kind_of_device = "loop" if facts.settings.device is None else "unearned"
    device = device or features
    if any(each.credits_device for each in statement.mechanisms):
        kind_of_device = "certified" if statement.certificates else "assumed"
    variants: dict[str, str] = {
        "unit": common["unit"][first.unit.value],
        "relation": common["relation"][first.adjacency.value],
        **common["mode"][statement.mode],
        **common["code"]["loop" if loop else "own" if code else "opusim"],
        **common["device"][kind_of_device],
        **common["tuning"]["search" if searches else "absent"],
    }
    if statement.mode == "release" and "here_release" in variants:
        variants |= {"here": variants["here_release"], "seed_state": variants["seed_release"]}
        variants["randomness"] = variants["randomness_release"]
    named = {
        "noun": noun,
        "k": k,
        "own": "; ".join(code),
        "device_name": "the device" if device is None else repr(device["name"]),
        "search": "; ".join(searches),
        "fresh_noise": ""
        if facts.run is None or facts.run.fresh_noise_note is None
        else f" {facts.run.fresh_noise_note}",
    }
    texts = {key: text.format(**named) for key, text in variants.items()}
    released = common["released"][first.release.value]
    others = "all features and all other labels" if first.unit is Unit.LABEL else f"all other {noun}s"
    checked, on_trust, failed = (
        [each.text for each in first.assumptions if each.holds is holds] for holds in (True, None, False)
    )
    audited = [
        " ".join(
            text
            for text in (
                f"{_AUDITED} {facts.attacked(file)}: {headline(each) or verdict(each)}",
                power_text(each),
                each.note,
            )
            if text
        )
        for file, each in facts.audits.items()
    ]
    audited += [
        f"{_TESTED} ({file}; {test.accounted}): {result_text(test)}"
        for file, test in facts.self_tests.items()
    ]
    terms = {key: text.format(noun=noun) for key, text in common["terms"].items()}
    sampled = any(isinstance(each, ClippedRecords) for each in statement.mechanisms)
    texts |= {
        "noun": noun,
        "released": released,
        "adversary": f"The attacker sees {released}, knows {others}, all settings and the code, and has unlimited "
        f"computing power. The attacker does not see the noise, its seed, or which {noun}s a step drew.",
        "epsilon": " ".join(_about_epsilon(facts, noun, terms["epsilon"])),
        "epsilon_state": "answered" if first.is_proven else "not covered",
        "proof_state": "in part" if first.is_proven else "not covered",
        "mechanism": f"What ran: {'; '.join(each.describe() for each in statement.mechanisms)}. "
        f"{terms['sampled'] if sampled else ''} Proven by: {first.source}. "
        f"{terms['interval'] if 'interval' in first.source else ''}",
        "checked": f"Of {len(first.assumptions)} hypotheses the code that ran checked {len(checked)}; "
        f"{len(on_trust)} are taken on trust, and {len(failed)} fail.",
        "evidence": {
            None: "",
            "record": f" {statement.ledger.record}",
            "program": f" {common['program']}",
        }[facts.checks],
        "failing": "".join(f" Fails: {text}." for text in failed),
        "versions": " ".join(
            f"{'Resumed' if place else 'Started'} with {', '.join(' '.join(each) for each in one.items())}."
            for place, one in enumerate(_versions(facts))
        )
        or (checkers and f"Trained with {checkers}. The folder keeps no other versions.")
        or "The folder keeps no versions of packages.",
        "repeated": common["repeated"]["loop" if loop else "run"].format(programs=_programs(facts)),
        "code_checks": f"{len(checked)} of {len(first.assumptions)}",
        "identifiers": "" if k is None else "That party also gives all records of a user one ID.",
        "ended": "" if statement.run is None or statement.run.finished else " The run has not ended.",
        "audited": " ".join(audited) or common["absent"]["audits"],
        "audit_state": "in part"
        if any(each.controls_hold for each in facts.audits.values())
        else "not covered",
        "padding": common["padding"][{True: "yes", False: "no", None: "unknown"}[_is_padded(facts)]].format(
            noun=noun
        ),
        "data": "; ".join(f"{name}: {value}" for name, value in _data(facts).items()),
        **_about_rounding(first, common["absent"]),
        **_about_utility(facts, common["absent"]),
    }
    saves = ", ".join(path.name for path in _saves(facts))
    texts["saves"] = common["saves"]["some" if saves else "none"].format(names=saves)
    texts |= _filled(common["proof"]["proven" if first.is_proven else "none"], texts)
    parties, channels = _trust(common, texts), [_filled(each, texts) for each in common["channels"]]
    open_ones = [each for each in channels if each["state"] != "covered"]
    return texts | {
        "parties": _grouped(parties, "trusted", "party", common["trusted"]),
        "open_channels": _grouped(open_ones, "state", "channel", {}),
    }


def _versions(facts: _Facts) -> list[dict[str, str]]:
    """Return the versions of the packages that the work was started with, then of those it was resumed with."""
    if facts.run is not None:
        return [dict(facts.run.facts["versions"])]
    found = [one.versions for one in facts.programs]
    return [one for place, one in enumerate(found) if one not in found[:place]]


def _programs(facts: _Facts) -> str:
    """Return the programs that ran a loop, as far as its folder names them."""
    found = dict.fromkeys(
        (f"{one.script} (SHA-256 {one.sha256})" if one.script else "an interactive session")
        + "".join(f", with {file} (SHA-256 {digest})" for file, digest in one.files.items())
        for one in facts.programs
    )
    return "; then ".join(found) or "not named in the folder"


def _grouped(rows: Sequence[Mapping[str, str]], state: str, name: str, words: Mapping[str, str]) -> str:
    """Return the names of rows after the words for their states."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(words.get(row[state], row[state]), []).append(row[name])
    return " ".join(f"{key.capitalize()}: {'; '.join(names)}." for key, names in found.items())


def _own_code(run: StoredRun) -> list[str]:
    """Return what the user supplied of model, loss and data."""
    network, found = run.facts["network"], described_code(run.facts)
    if "layers" not in network and "recipe" not in network:
        found.append(f"a module {network.get('module', 'without a name')}, which the program gave")
    if run.config.data.name == OWN_ARRAYS:
        found.append("records, which the program gave as arrays")
    return found


def _about_epsilon(facts: _Facts, noun: str, terms: str) -> Iterator[str]:
    """Yield what each guarantee says, what experiment mode takes away, and what delta means for so many records."""
    first, count = facts.first, facts.statement.public_number
    for each in facts.statement.guarantees:
        status = each.status.value.capitalize()
        yield f"{status}: epsilon {number(each.epsilon)} at delta {each.delta:g}."
        if each is first:
            yield terms
        yield f"In words: {_meaning(each)}"
    if first.is_proven and facts.statement.mode == "experiment":
        yield "This holds for the same run in release mode only."
    if first.is_proven and count is not None:
        yield f"Delta times the {count:,.0f} {noun}s is {first.delta * count:.2g}; keep it below {LARGEST_EXPOSED:g}."


def _about_rounding(first: Guarantee, absent: Mapping[str, str]) -> dict[str, str]:
    """Return what hypotheses say about rounding, in their own words."""
    about = [each for each in first.assumptions if "round" in each.text]
    if not any("exactly rounded" in each.text for each in about):
        return {"rounding_state": "not covered", "rounding": absent["rounding"]}
    said = dict.fromkeys(f"{'Checked' if each.holds else 'On trust'}: {each.text}." for each in about)
    state = "covered" if all(each.holds for each in about) else "on trust"
    return {"rounding_state": state, "rounding": " ".join(said)}


def _about_utility(facts: _Facts, absent: Mapping[str, str]) -> dict[str, str]:
    """Return the figure on test records, which an experiment keeps."""
    if facts.statement.mode == "release":
        return {"utility_state": "not covered", "utility": absent["release_utility"]}
    figures = {} if facts.run is None else facts.run.summary or {}
    figure = None if facts.run is None else main_figure(facts.run)
    value = None if figure is None else figures.get(f"test_{figure.key}")
    if figure is None or value is None:
        return {"utility_state": "not covered", "utility": absent["utility"]}
    said = f"{figure.label.capitalize()} on test records: {figure.shown(value)}. No guarantee covers this figure."
    return {"utility_state": "in part", "utility": said}


def _is_padded(facts: _Facts) -> bool | None:
    """Return whether every batch was filled up to a fixed number of rows; None if the folder does not say."""
    if facts.run is None:
        said = {one.fixed_batches for one in facts.programs}
        return False if False in said else True if said == {True} else None
    config, count = facts.run.config, facts.statement.public_number
    if (
        not hasattr(config.protection, "fixed_batches")
        or not config.trainer.implementing_class().fills_batches
    ):
        return False
    rate = next(
        (one.sampling_probability for one in facts.statement.mechanisms if isinstance(one, ClippedRecords)), 0
    )
    expected = config.sampler.batch_size if count is None else count * rate
    on_card, fixed = config.torch_device != "cpu", getattr(config.protection, "fixed_batches", None)
    batches = PhysicalBatches.of_steps(expected, records=None, processes=1, on_card=on_card, fixed=fixed)
    return batches.count is not None


def _data(facts: _Facts, unit: str = "") -> dict[str, str]:
    """Return the data set and the unit, by name; numbers of records only if they are public."""
    found = {"unit": unit} if unit else {}
    hidden = facts.first.adjacency is Adjacency.ADD_OR_REMOVE_ONE
    if facts.run is not None:
        data, constants = facts.run.facts["data"], facts.run.facts["data"]["standardisation"]
        parts = {"n_train": "training", "n_validation": "validation", "n_test": "test"}
        counts = ", ".join(f"{data[key]:,} {part}" for key, part in parts.items() if data.get(key))
        found["data set"] = str(data["name"])
        source = facts.run.config.data
        columns = {"column of labels": ", ".join(source.label), "column of user IDs": source.user}
        found |= {name: column for name, column in columns.items() if column}
        found["records"] = "their number is private" if hidden or not counts else counts
        kind = "public" if constants["public"] else "data-dependent"
        found["digest of the records"] = _data_digest(data, facts.statement.mode)
        found["standardised with"] = f"{kind} constants ({constants['source']})"
        if constants["source"] in {one.standardisation.source for one in CATALOGUE.values()}:
            found["standardised with"] += (
                ", statistics of the published data, of which the protected records are a part; they are treated as "
                "public"
            )
        if constants["mean"] == 0 and constants["std"] == 1:
            found["standardised with"] = "nothing: features are used as they are given"
    else:
        found["data set"] = "that of the program, which the folder does not name"
        found["digest of the records"] = _data_digest({}, facts.statement.mode)
        count = facts.statement.public_number
        if facts.per_user is None:
            told = "their number is private" if hidden else "their number is not known here"
            found["records"] = told if count is None else f"{count:,.0f} (divisor over probability)"
    mechanism = facts.statement.mechanisms[0]
    if facts.per_user is not None:
        users = facts.statement.public_number
        found["users"] = "their number is private" if users is None else f"{users:,.0f}"
        found["records of a user in a step (k)"] = f"at most {facts.per_user}"
        if facts.run is None:
            found["records"] = (
                "not published, since each user's number is private; nor is the share of users with more than k"
            )
    if (probability := getattr(mechanism, "sampling_probability", None)) is not None:
        found["drawn in a step with probability"] = f"{probability:g}"
    if steps := facts.statement.ledger.steps_paid:
        found["steps paid for"] = f"{steps:,}"
    return found


def _data_digest(data: Mapping[str, Any], mode: Mode) -> str:
    """Say which digest of the records a folder keeps, or why it keeps none."""
    if mode == "experiment":
        return "in config.json, which stays private" if "fingerprint" in data else "none is kept"
    why = "a digest of private values confirms a guess of them, and no guarantee covers it"
    if features := data.get("features_fingerprint"):
        return f"{features} (BLAKE2b of the features, which are public); none of the labels: {why}"
    return f"a release keeps none: {why}"


_MODEL_FILES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".onnx", ".pkl")


def _saves(facts: _Facts) -> list[Path]:
    """Return the files that hold a model: all checkpoints, and those of the folder itself."""
    checkpoints = [] if facts.run is None else list_checkpoints(facts.run.folder.checkpoints)
    own = [path for path in sorted(facts.path.iterdir()) if path.suffix in _MODEL_FILES]
    return [path for path in (*checkpoints, *own) if path.is_file()]


def _files(facts: _Facts, texts: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[StoredFile]:
    """Yield the files that the statement rests on, and those that hold a model."""
    first, kinds = facts.first, texts[facts.statement.mode]
    kept = {"config.json": "settings", SETTINGS_FILE: "settings", LEDGER_FILE: "ledger"}
    kept |= {"ledger.head": "ledger", "summary.json": "summary"}
    paths = [(facts.path / name, kind) for name, kind in kept.items()]
    for path in _saves(facts):
        own = "save" if facts.kind == "private loop" and path.name == CHECKPOINT_FILE else "other"
        paths.append((path, own if path.parent == facts.path else "checkpoint"))
    paths += [
        (
            facts.path / file if Path(file).name == file else Path(file),
            "private_audit" if audit.holds_private_records else "audit",
        )
        for file, audit in facts.audits.items()
    ]
    paths += [(Path(file), "self_test") for file in facts.self_tests]
    model = "yes" if first.is_proven else "no: no proof covers it"
    if first.is_proven and first.release is Release.LAST_ITERATE:
        model = "yes, of a finished run the last one only"
    for path, kind in paths:
        if path.is_file():
            holds, publish = kinds[kind]
            content = path.read_bytes()
            yield StoredFile(
                name=path.name,
                bytes=len(content),
                sha256=hashlib.sha256(content).hexdigest(),
                holds=holds,
                publish=publish.format(model=model),
            )


def _command(facts: _Facts) -> str:
    if facts.run is not None:
        search = SearchState.read(facts.path.parent) if facts.kind == "search" else None
        if search is None:
            return command_of(facts.run)
        chosen = [f"--choose {key}={','.join(values)}" for key, values in search.asked["choices"].items()]
        kind = facts.run.config.trainer.kind
        return f"opusim tune {kind} {' '.join(chosen)} --trials {search.asked['mean']:g} ...  # other options as before"
    # What only the program holds has no value, and the digest of its users is no argument.
    names = ["module", "optimizer", "criterion", "data_loader", "folder"]
    own = [f"{name}=..." for name in names + (["user_ids"] if facts.per_user is not None else [])]
    given = {} if facts.settings is None else to_json(facts.settings)
    for name in ("batch_size", "users", "clipping", "device"):
        given.pop(name, None)
    if given.get("target_epsilon") is not None:
        given.pop("noise_multiplier")
    if facts.settings is not None and facts.settings.clipping != FLAT:
        rule = facts.settings.clipping
        if rule.layer_norms is not None:
            given["max_grad_norm"] = list(rule.layer_norms)
        own.append(f"clipping=opusim.training.{replace(rule, layer_norms=None)!r}")
    values = [f"{key}={value!r}" for key, value in given.items() if value is not None]
    of = dict.fromkeys(
        ", ".join(filter(None, [one.module, one.optimizer, one.criterion])) for one in facts.programs
    )
    told = ["; then ".join(of)] if of else []
    comment = "; ".join(["Python", *told, "the program is not kept"])
    return f"opusim.make_private({', '.join([*own, *values])})  # {comment}"


# The page and the PDF


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with what stands under it; the page and the PDF show the same."""

    title: str
    blocks: list[Block]


def _sections(dossier: Dossier, several: str) -> Iterator[Section]:
    """Yield the sections on each run; what must not be overlooked of any of them stands above all."""
    starts = [f"{place}. {work.name}: " if several else "" for place, work in enumerate(dossier.works, 1)]
    leads = [
        (each.startswith(_AUDITED), f"{start}{each}")
        for start, work in zip(starts, dossier.works, strict=True)
        for each in work.leads
    ]
    leads = [*((False, text) for text in [several] if text), *leads]
    if leads:
        blocks: list[Block] = [("note", text) for _, text in sorted(leads, key=lambda lead: not lead[0])]
        yield Section(title="Read this first", blocks=blocks)
    for start, work in zip(starts, dossier.works, strict=True):
        for section in _of_work(work):
            yield Section(title=f"{start}{section.title}", blocks=section.blocks)
    versions_ = ", ".join(f"{name} {version}" for name, version in dossier.written_by.items())
    yield Section(
        title="This document",
        blocks=[("text", f"Written on {dossier.date} by opusim.training.reports ({versions_}).")],
    )


def _of_work(work: Work) -> Iterator[Section]:
    """Yield the sections on one run."""
    states = {None: "taken on trust", False: "does not hold"}
    checks = {
        "program": "checked by the program that wrote this",
        "record": "recorded as checked",
    }
    yield Section(
        title="Questions and answers",
        blocks=[("pairs", [(each.question, each.answer) for each in work.answers])],
    )
    statement = Statement.from_json(work.statement)
    rows = guarantee_rows(
        statement.guarantees, seed_stored=statement.mode == "experiment", count=statement.public_number
    )
    yield Section(
        title="Statement", blocks=[("pairs", [pair for pair in row.items() if pair[1]]) for row in rows]
    )
    hidden = {"what ran"} if len(work.mechanisms) == 1 else set[str]()  # question 5 says it
    mechanisms = [[pair for pair in each.items() if pair[0] not in hidden] for each in work.mechanisms]
    yield Section(title="Mechanism, as the ledger names it", blocks=[("pairs", each) for each in mechanisms])
    hypotheses = [
        {
            "state": states[each.holds] if each.checked is None else checks[each.checked],
            "hypothesis": printed(each.text),
        }
        for each in sorted(work.hypotheses, key=lambda each: (False, None, True).index(each.holds))
    ]
    if hypotheses:
        yield Section(title="Hypotheses", blocks=[("table", hypotheses)])
    yield Section(
        title="Proof",
        blocks=[("list", _without(text.splitlines(), work.hypotheses)) for text in work.proofs]
        or [("text", "No theorem is cited: nothing is proven.")],
    )
    blocks: list[Block] = []
    for audit in work.audits:
        said = f"{audit.file}: {audit.played} of {audit.attacked}. Question 8 has the result and the power."
        blocks.append(("text", said))
        rows = [{name: row[key] for key, name in AUDIT_COLUMNS.items()} for row in audit.bounds]
        note = audit.document.get("note")
        more = [text for text in audit.paragraphs if not text.startswith("Power: ") and text != note]
        blocks += [("table", rows), *(("text", text) for text in more)]
    for test in work.self_tests:
        rows = [
            {
                "check": each["name"],
                "observed": f"{float(each['observed']):.3g}",
                "p-value": f"{each['p_value']:.2g}",
                "finds": each["finds"],
            }
            for each in test.document["checks"]
        ]
        settings, _, limits = test.paragraphs  # question 8 has the result
        blocks += [("text", f"{test.file}: {settings}"), ("table", rows), ("text", limits)]
    yield Section(title="Audits", blocks=blocks or [("text", "None was found.")])
    yield Section(title="Who is trusted", blocks=[("table", _rows(work.trust))])
    yield Section(title="Side channels", blocks=[("table", _rows(work.side_channels))])
    for standard in work.standards:
        rows = _rows(standard.headings)
        shown = [{key: cell for key, cell in row.items() if any(each[key] for each in rows)} for row in rows]
        yield Section(title=standard.title, blocks=[("text", standard.source), ("table", shown)])
    yield Section(
        title="To repeat and to check it",
        blocks=[
            ("code", work.command),
            ("code", f"opusim account run {quoted(work.folder)}"),
            ("table", _rows(work.files)),
        ],
    )


def _without(lines: list[str], hypotheses: Sequence[Hypothesis]) -> list[str]:
    """Return a theorem's lines without the hypotheses that stand in a table, and without lists that are then empty."""
    told = {f"- {printed(one.text)}" for one in hypotheses}
    kept = "\n".join(line for line in lines if line not in told)
    return re.sub(r"Hypotheses [^\n]*\n(?!- )", "", kept).splitlines()


def _rows(records: Iterable[Any]) -> list[dict[str, str]]:
    """Return records as rows of a table, a column for each field."""
    return [{key: str(value) for key, value in to_json(each).items()} for each in records]


def _pdf(title: str, sections: Sequence[Section]) -> bytes:
    """Return the sections as A4 pages, after a list of them with their pages."""
    _, pages = _laid_out(title, sections, [0] * len(sections))
    page, _ = _laid_out(title, sections, pages)
    buffer = io.BytesIO()
    with PdfPages(buffer, metadata={"Title": title, "CreationDate": None}) as document:
        for place, figure in enumerate(page.figures, 1):
            said = f"{place} of {len(page.figures)}"
            figure.text(0.93, 0.012, said, fontsize=7, ha="right", color="#4a525b")
            document.savefig(figure)
    return buffer.getvalue()


def _laid_out(title: str, sections: Sequence[Section], pages: Sequence[int]) -> tuple[Page, list[int]]:
    """Return the pages, and the number of the page of each section."""
    page, found = Page(8.0, flowing=True), list[int]()
    page.text(title, size=14.0, fontweight="bold")
    for section, number_ in zip(sections, pages, strict=True):
        page.text(f"{section.title}, page {number_}")
    for section in sections:
        page.heading(section.title)
        found.append(len(page.figures))
        for kind, content in section.blocks:
            page.block(kind, content)
    return page, found
