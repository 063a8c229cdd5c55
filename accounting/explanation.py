"""Guarantees and theorems in plain words: who is protected from whom, what epsilon means, and what it rests on.

`Statement` is one versioned JSON document for a reviewer (docs/privacy.md lists its keys): the guarantees that `opusim
account run RUN` prints, unrounded, and its warnings. Every command and statement uses `large_delta` to warn of a delta
that is too large for the number of records.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from opusim import checks
from opusim.accounting.guarantee import Adjacency, Guarantee, Release, Status, Unit, from_json, to_json
from opusim.accounting.mechanism import Mechanism, mechanism_from_json
from opusim.accounting.theorems import Theorem, known_theorems, printed
from opusim.plugins import Deferred
from opusim.tables import Shown, print_table, table_text, wrapped

if TYPE_CHECKING:
    from opusim.accounting.ledger import Alarm, CertificateFacts, LedgerContent, Mode

ledger = Deferred("opusim.accounting.ledger")

CHECKED_HEADING = (
    "Hypotheses that opusim train checks (a private loop says in its statement which it checks):"
)
"""What stands above the hypotheses of a theorem that code can check."""
LARGEST_EXPOSED = 0.1
"""Largest delta x records that no line warns of."""
LARGE_DELTA = (
    "delta is above 0.1 / records; a mechanism that publishes each whole record with probability delta has the same "
    "delta at an epsilon of 0; choose a delta below 0.1 / records"
)

SEED_REBUILDS = "batches and noise drawn in software can be rebuilt from the seed"
"""Why an experiment is not for release; true whether its device is simulated or hardware."""


def explain(guarantee: Guarantee, *, seed_stored: bool = False) -> str:
    """Return a paragraph for a reader new to differential privacy, and a list of the guarantee's assumptions.

    The run keeps its seed in experiment mode (`seed_stored`).
    """
    text = f"{guarantee.status.value.capitalize()}: {_meaning(guarantee)}"
    if seed_stored and guarantee.is_proven:
        text += (
            f" This run stored its seed, and {SEED_REBUILDS}: the number holds for the same run in release mode, not "
            "for this one."
        )
    lines = [text]
    for holds, heading in (
        (False, "Not true here:"),
        (None, "Taken on trust, not checked:"),
        (True, "Checked by the code that ran:"),
    ):
        lines += _listed(heading, [each.text for each in guarantee.assumptions if each.holds is holds])
    return "\n".join([*lines, f"Source: {guarantee.source}."])


def guarantees_text(
    guarantees: Sequence[Guarantee], *, seed_stored: bool = False, count: float | None = None
) -> str:
    """Return guarantees as a table with a paragraph for each, as wide as the output; see `explain`."""
    rows = [
        {key: cell for key, cell in row.items() if key != "notes"}
        for row in guarantee_rows(guarantees, seed_stored=seed_stored, count=count)
    ]
    parts = [table_text(list(rows[0]), [list(row.values()) for row in rows])]
    for guarantee in guarantees:
        lines = explain(guarantee, seed_stored=seed_stored).splitlines()
        parts.append("\n".join(wrapped(line, indent="  ") for line in lines) + "\n")
    if any(guarantee.theorem is not None for guarantee in guarantees):
        parts.append("`opusim explain THEOREM` states a theorem, its hypotheses and its proof.\n")
    return "\n".join(parts).rstrip("\n")


def explain_theorem(theorem: Theorem) -> str:
    """Return a theorem as paragraphs: statement, proof, hypotheses, reference, and the code that computes it."""
    parts = [
        f"{theorem.name}: {theorem.title}",
        f"Theorem. {theorem.statement}",
        f"Proof. {theorem.proof}",
        *_listed(CHECKED_HEADING, theorem.checked_by_code),
        *_listed("Hypotheses taken on trust:", theorem.trusted),
        f"Reference: {theorem.reference}." if theorem.reference else "",
        f"Computed by: {theorem.code}.",
        f"More in the documentation: {theorem.page}." if theorem.page else "",
    ]
    return "\n".join(part for part in parts if part)


def most_hits(epsilon: float, delta: float, false_alarms: float) -> float:
    """Return the largest true positive rate of any attack at a false positive rate f in [0, 1].

    min(1, e^eps f + delta, 1 - e^-eps (1 - f - delta)).
    """
    if epsilon > 700:  # e^epsilon overflows doubles
        return 1.0
    first = math.exp(epsilon) * false_alarms + delta
    return min(1.0, first, 1 - math.exp(-epsilon) * max(1 - false_alarms - delta, 0.0))


def _meaning(guarantee: Guarantee) -> str:
    is_label = guarantee.unit is Unit.LABEL
    noun = "user" if guarantee.unit is Unit.USER else "record"
    protected = "a record's label" if is_label else f"a whole {noun}"
    if guarantee.status is Status.CLAIMED:
        said = (
            f"gives epsilon {number(guarantee.epsilon)} at delta {guarantee.delta:g}"
            if math.isfinite(guarantee.epsilon)
            else "gives no finite epsilon here, because what it needs does not hold"
        )
        formula = ""
        if guarantee.formula_value is not None:
            formula = f" (its formula only, hypotheses taken as given: {number(guarantee.formula_value)})"
        return (
            f"a paper's formula for {protected} {said}{formula}. No proof covers what ran: this is the paper's claim, "
            "not a protection to rely on."
        )
    if math.isinf(guarantee.epsilon):
        return (
            f"no finite number bounds what can be learnt about {protected}. The reason: {guarantee.reason}."
        )
    # what the attacker sees and asks
    seen = "all that is released (of a training run: the model after every update)"
    if guarantee.release is Release.LAST_ITERATE:
        seen = "the trained model, and nothing of its training"
    question = f"whether any one {noun} was among the training data"
    if is_label:
        question = "which of two labels a record had, though all features are public"
    elif guarantee.adjacency is Adjacency.REPLACE_ONE:
        question = "which of two values a record had"
    elif guarantee.adjacency is Adjacency.ZERO_OUT:
        question += " or its place was empty (zero_out: the number of places is public)"
    # how well the best attack answers
    share = 100 * most_hits(guarantee.epsilon, guarantee.delta, 0.01)
    hits, what = (
        f"at most {share:.3g} %" if share < 99.95 else "possibly all",
        "label" if is_label else "value",
    )
    attack = (
        f"an attack that reports one {what} for 1 % of the records with the other {what} also reports it for {hits} of "
        f"the records that have it"
    )
    if not is_label and guarantee.adjacency is not Adjacency.REPLACE_ONE:
        attack = (
            f"an attack that wrongly flags 1 % of the {noun}s outside the training data flags {hits} of those "
            "inside it"
        )
    return (
        f"an attacker sees {seen}, knows all other {noun}s, and asks {question}. With epsilon "
        f"{number(guarantee.epsilon)} at delta {guarantee.delta:g}, {attack} (blind guessing: 1 %)."
    )


def _listed(heading: str, texts: Sequence[str]) -> list[str]:
    return [heading, *(f"- {printed(text)}" for text in texts)] if texts else []


def large_delta(delta: float, mechanisms: Sequence[Mechanism], *, records: float | None = None) -> str | None:
    """Return one line that warns of a delta above 0.1 / n, or None.

    A mechanism that publishes each record in full with probability delta is (0, delta)-differentially private, and
    expects to publish n delta of n records. Above delta = 0.1 / n, a statement therefore allows that some record is
    published with a probability of nearly 0.1 or more. n, of users if these are protected, is `records` or the least
    `public_records`.
    """
    told = [one.public_records for one in mechanisms] if records is None else [records]
    n = min((float(number) for number in told if number is not None), default=None)
    if n is None or delta * n <= LARGEST_EXPOSED * (1 + 1e-9):
        return None
    warning = (
        f"delta = {delta:g} with {n:,.6g} records (0.1 / records is {LARGEST_EXPOSED / n:.2g}): {LARGE_DELTA}"
    )
    of_users = any(one.unit is Unit.USER for one in mechanisms)
    return warning.replace("record", "user") if of_users else warning


def guarantee_rows(
    guarantees: Iterable[Guarantee], *, seed_stored: bool = False, count: float | None = None
) -> list[dict[str, str]]:
    """Return one row per guarantee: status, epsilon, delta, protects, released, mechanism, notes.

    A stored seed (experiment mode) forbids a finite epsilon. `count` is the number of records or users, None if it is
    private.
    """
    rows = []
    for guarantee in guarantees:
        notes = [guarantee.reason] if guarantee.reason else []
        number_of = "" if count is None else f" ({count:,.0f} {_plural(guarantee)})"
        if guarantee.adjacency is Adjacency.ZERO_OUT:
            notes.append(f"at a public number of {_plural(guarantee)}")
        if seed_stored and math.isfinite(guarantee.epsilon):
            notes.append("holds for the same run in release mode: here the seed is stored")
        notes += [f"does not hold: {assumption.text}" for assumption in guarantee.failed_assumptions]
        if guarantee.formula_value is not None:
            notes.append(f"the paper's formula, its hypotheses taken as given: {guarantee.formula_value:.3g}")
        rows.append(
            {
                "status": guarantee.status.value,
                "epsilon": number(guarantee.epsilon),
                "delta": f"{guarantee.delta:g}",
                "protects": f"{guarantee.unit.value}, {guarantee.adjacency.value}{number_of}",
                "released": guarantee.release.value,
                "mechanism": guarantee.mechanism,
                "notes": "; ".join(notes),
            }
        )
    return rows


def _plural(guarantee: Guarantee) -> str:
    return "users" if guarantee.unit is Unit.USER else "records"


def number(epsilon: float) -> str:
    """Return an epsilon as text: three decimals, whole numbers from 1,000 on, three digits below 0.01 or from 10^6."""
    if math.isinf(epsilon):
        return "infinite"
    if 1e3 <= epsilon < 1e6:
        return f"{epsilon:,.0f}"
    return f"{epsilon:.3f}" if 0.01 <= epsilon < 1e3 or epsilon == 0 else f"{epsilon:.3g}"


def print_rows(rows: Sequence[dict[str, str]], *, without: Sequence[str] = ()) -> None:
    """Print at least one row as a table that breaks no word, without some of their equal keys."""
    columns = [key for key in rows[0] if key not in without]
    print_table("", columns, [[row[key] for key in columns] for row in rows])


SCHEMA = "opusim-guarantee"
VERSION = 1

WarningCode = Literal["experiment", "unfinished", "unwitnessed", "unaudited", "large-delta", "large-epsilon"]
_LARGE_EPSILON = 10.0
WARNINGS: dict[WarningCode, str] = {
    "experiment": (
        f"Experiment mode, not for release: this run stored its seed, and {SEED_REBUILDS}. A proven number holds for "
        "the same run in release mode, not for this one."
    ),
    "unfinished": (
        "Run unfinished. This guarantee covers only the final model, not the checkpoints in this folder."
    ),
    "unwitnessed": (
        "This ledger may be an older copy, or altered: no checkpoint, save or summary next to it says how long it was."
    ),
    "unaudited": (
        "Not audited: no audit of opusim attacks the code behind one of these mechanisms. Only the proof and the tests "
        "of that code speak for the number."
    ),
    "large-delta": f"{LARGE_DELTA[0].upper()}{LARGE_DELTA[1:]}.",
    "large-epsilon": (
        "Epsilon is above 10, which rules out next to nothing: an attack that wrongly flags one in 20,000 people "
        "outside the data may flag nearly all inside it. Take a smaller epsilon if people rely on it."
    ),
}
"""Limits of every guarantee of a document."""


def large_epsilon(name: str, epsilon: float | None) -> str | None:
    """Return one line that warns of a budget, under the name of its key, above epsilon 10, or None."""
    if epsilon is None or not _LARGE_EPSILON < epsilon < math.inf:
        return None
    return f"{name} = {epsilon:g}: {WARNINGS['large-epsilon']}"


_MODES: dict[Mode, str] = {
    "experiment": (
        "not for release: the seed is stored, and the numbers hold for the same run in release mode"
    ),
    "release": "no seed is stored",
}


@dataclass(frozen=True, kw_only=True)
class LedgerFacts:
    """The ledger that a document speaks of.

    Attributes:
        lines: Number of its lines.
        digest: SHA-256 of the last line, which depends on all lines before it.
        delta: At which the run states its guarantees.
        enforced: Whether the code that ran checked the hypotheses that code can check.
        payments: Lines that pay.
        steps_paid: Steps paid for; in release mode a repeated step counts again.
        releases_paid: Names of the releases that happen once.
        checked_against: Whose record of a length and a digest fits the ledger: files of the run, or the program that
            wrote it.
        enforced_by: The code that says in the ledger which hypotheses it checked, if it says so by name.

    Raises:
        ValueError: Delta is outside of [0, 1).
    """

    lines: int
    digest: str
    delta: float
    enforced: bool
    payments: int
    steps_paid: int
    releases_paid: tuple[str, ...]
    checked_against: tuple[str, ...]
    enforced_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks.in_unit_interval(closed="left", delta=self.delta)

    @classmethod
    def of(cls, content: LedgerContent, checked_against: Sequence[str]) -> Self:
        """Return the facts of a ledger that was read with the witnesses of these names."""
        once = [payment.name for payment in content.payments if payment.name is not None]
        steps = [payment.steps for payment in content.payments if payment.name is None]
        return cls(
            lines=content.position.lines,
            digest=content.position.digest,
            delta=content.delta,
            enforced=content.enforced,
            payments=len(content.payments),
            steps_paid=sum(steps),
            releases_paid=tuple(once),
            checked_against=tuple(checked_against),
            enforced_by=tuple(dict.fromkeys(one.by for one in content.enforcements if one is not None)),
        )

    @property
    def record(self) -> str:
        """What says that hypotheses were checked, and what a reading of the ledger tests of that."""
        by = " and ".join(self.enforced_by) or "the code that ran"
        noted = " and ".join(self.checked_against)
        fits = f" and fits the length and the digest in {noted}" if noted else ""
        return (
            f"The checks are on record: {by} noted them in the ledger (digest {self.digest[:12]}) as it ran. Reading "
            f"the ledger shows that it is whole{fits}; it repeats no check."
        )


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The run folder around a ledger.

    Attributes:
        finished: Whether the run ended.
        step: Steps in its newest checkpoint, or None if there is no checkpoint.
        versions: The packages that it was started with, and their versions.
        records: Number of training records, if it is public and records are protected; else None.
    """

    finished: bool
    step: int | None
    versions: Mapping[str, str]
    records: int | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Statement(Shown):
    """The guarantees of a ledger, and everything that they rest on.

    Attributes:
        mode: Experiment or release.
        guarantees: The stated guarantees, at least one.
        mechanisms: Mechanisms that are paid for, equal ones merged; their `steps` count how often each ran.
        certificates: The certificates that mechanisms rest on.
        alarms: Alarms with which the device's monitor stopped the run.
        ledger: The ledger.
        run: The run folder, or None if only a ledger was read.
        versions: Python and the opusim that states the guarantees.
    """

    mode: Mode
    guarantees: tuple[Guarantee, ...]
    mechanisms: tuple[Mechanism, ...]
    certificates: tuple[CertificateFacts, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    ledger: LedgerFacts
    run: RunFacts | None
    versions: Mapping[str, str]

    def _shown(self) -> dict[str, object]:
        stated = [f"{one.epsilon:.4g} at delta {one.delta:g} ({one.status.value})" for one in self.guarantees]
        return {
            "epsilon": ", ".join(stated),
            "mode": self.mode,
            "steps": sum(mechanism.steps for mechanism in self.mechanisms),
            "warnings": " ".join(self.warnings) or None,
        }

    @property
    def public_number(self) -> float | None:
        """The number of records, of users if these are protected; None if it is private or not known."""
        first = next((one for one in self.guarantees if one.is_proven), self.guarantees[0])
        if first.adjacency is Adjacency.ADD_OR_REMOVE_ONE:
            return None
        told = None if self.run is None else self.run.records
        return self.mechanisms[0].public_records if told is None and self.mechanisms else told

    @property
    def warnings(self) -> tuple[WarningCode, ...]:
        """Codes of the limits of every guarantee here; `WARNINGS` has the sentences."""
        records = None if self.run is None else self.run.records
        last_only = any(guarantee.release is Release.LAST_ITERATE for guarantee in self.guarantees)
        found: dict[WarningCode, bool] = {
            "experiment": self.mode == "experiment",
            "unfinished": last_only and self.run is not None and not self.run.finished,
            "unwitnessed": not self.ledger.checked_against,
            "unaudited": any(guarantee.is_proven for guarantee in self.guarantees)
            and not all(mechanism.audited for mechanism in self.mechanisms),
            "large-delta": any(
                large_delta(one.delta, self.mechanisms, records=records) is not None
                for one in self.guarantees
                if one.is_proven
            ),
            "large-epsilon": any(
                one.is_proven and _LARGE_EPSILON < one.epsilon < math.inf for one in self.guarantees
            ),
        }
        return tuple(code for code, holds in found.items() if holds)

    def text(self, *, without: Sequence[WarningCode] = ()) -> str:
        """Return the guarantees as a table and paragraphs, as `opusim account run` prints them, with the warnings.

        Some may be left out: the paragraphs already say what experiment mode limits.
        """
        stated = guarantees_text(
            self.guarantees, seed_stored="experiment" in self.warnings, count=self.public_number
        )
        shown = [code for code in self.warnings if code not in ("experiment", *without)]
        mode = wrapped(f"mode: {self.mode} ({_MODES[self.mode]})", indent="  ")
        checked = any(one.holds for each in self.guarantees for one in each.assumptions)
        notes = [*([self.ledger.record] if checked else []), *(WARNINGS[code] for code in shown)]
        return "\n".join([mode, stated, *(wrapped(note, indent="  ") for note in notes)])

    def __str__(self) -> str:
        """Return `text()`; `to_json` has every fact."""
        return self.text()

    def to_json(self) -> dict[str, Any]:
        """Return the document as plain JSON values, keys in a fixed order; infinity becomes the string "inf".

        A guarantee has the theorem that its source cites, or None if it cites no known one.
        """
        shown = ("name", "title", "statement", "reference", "code", "page")
        theorems = {one.name: {key: getattr(one, key) for key in shown} for one in known_theorems()}
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "mode": self.mode,
            "seed_stored": self.mode == "experiment",
            "warnings": [{"code": code, "text": WARNINGS[code]} for code in self.warnings],
            "guarantees": [
                {**one.to_json(), "theorem": theorems.get(one.theorem or "")} for one in self.guarantees
            ],
            "mechanisms": [
                {**mechanism.to_json(), "description": mechanism.describe()} for mechanism in self.mechanisms
            ],
            "certificates": [to_json(certificate) for certificate in self.certificates],
            "alarms": [to_json(alarm) for alarm in self.alarms],
            "ledger": to_json(self.ledger),
            "run": None if self.run is None else to_json(self.run),
            "versions": dict(self.versions),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Read back what `to_json` returned; raise ValueError, in a line, for anything else.

        Warnings, theorems and descriptions are computed again from the rest, never believed.
        """
        found = (content.get("schema"), content.get("version"))
        if found != (SCHEMA, VERSION):
            raise ValueError(
                f"schema, version = {reprlib.repr(found)}: must be {(SCHEMA, VERSION)!r}; read it with the opusim that "
                "wrote it"
            )
        if content.get("mode") not in tuple(_MODES):  # a tuple: it may be unhashable
            raise ValueError(f"mode = {reprlib.repr(content.get('mode'))}: must be 'experiment' or 'release'")
        try:
            mechanisms = [dict(mechanism) for mechanism in content["mechanisms"]]
            for mechanism in mechanisms:
                del mechanism["description"]
            return cls(
                mode=content["mode"],
                guarantees=tuple(Guarantee.from_json(guarantee) for guarantee in content["guarantees"]),
                mechanisms=tuple(mechanism_from_json(mechanism) for mechanism in mechanisms),
                certificates=tuple(
                    from_json(ledger.CertificateFacts, one) for one in content.get("certificates", ())
                ),
                alarms=tuple(from_json(ledger.Alarm, one) for one in content.get("alarms", ())),
                ledger=from_json(LedgerFacts, content["ledger"]),
                run=None if content["run"] is None else from_json(RunFacts, content["run"]),
                versions=dict(content["versions"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"a key is missing or holds another type ({error}); restore the document"
            ) from error
