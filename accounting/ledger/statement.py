"""What a ledger's run may state, as one versioned JSON document for a reviewer of a privacy claim.

`opusim account run RUN --json` prints it, and docs/statement-json.md lists its keys. It states the guarantees that the
command prints as text, unrounded, and each of the text's warnings; what no ledger shows is not in it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from opusim import checks
from opusim.accounting.explanation import LARGE_DELTA, guarantees_text, large_delta
from opusim.accounting.guarantee import Guarantee, Release, from_json, to_json
from opusim.accounting.ledger import Alarm, CertificateFacts, LedgerContent, Mode
from opusim.accounting.mechanism import Mechanism, mechanism_from_json
from opusim.accounting.theorems import known_theorems
from opusim.tables import wrapped

SCHEMA = "opusim-guarantee"
VERSION = 1

WarningCode = Literal["experiment", "unfinished", "unwitnessed", "unaudited", "large-delta"]
WARNINGS: dict[WarningCode, str] = {
    "experiment": (
        "Experiment mode, not for release: this run stored the seed of its noise, from which the noise can be rebuilt. "
        "A proven number holds for the same run in release mode, not for this one."
    ),
    "unfinished": (
        "Run unfinished. This guarantee covers only the final model, not the checkpoints in this folder."
    ),
    "unwitnessed": (
        "not checked: no checkpoint and no summary says how long this ledger was, so an older or altered one would go "
        "unnoticed"
    ),
    "unaudited": (
        "Not audited: no audit of opusim attacks the code behind one of these mechanisms. Only the proof and the tests "
        "of that code speak for the number."
    ),
    "large-delta": f"{LARGE_DELTA[0].upper()}{LARGE_DELTA[1:]}.",
}
"""What limits every guarantee of a document."""
_MODES: dict[Mode, str] = {
    "experiment": (
        "not for release: the seed of the noise is stored, and the numbers hold for the same run in release mode"
    ),
    "release": "no seed of the noise is stored",
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
        checked_against: Files of the run that name a length and a digest, which the ledger fits.

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

    def __post_init__(self) -> None:
        checks.in_unit_interval(closed="left", delta=self.delta)

    @classmethod
    def of(cls, content: LedgerContent, checked_against: Sequence[str]) -> Self:
        """Return the facts of a ledger that was read.

        Args:
            content: The ledger.
            checked_against: Names of the witnesses that it was read with.
        """
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
        )


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The run folder around a ledger.

    Attributes:
        finished: Whether the run ended.
        step: Steps in its newest checkpoint, or None if there is no checkpoint.
        versions: The packages that it was started with, and their versions.
        records: Of the training set, if the number is public; else None.
    """

    finished: bool
    step: int | None
    versions: Mapping[str, str]
    records: int | None = None


@dataclass(frozen=True, kw_only=True)
class Statement:
    """The guarantees of a ledger, and everything that they rest on.

    Attributes:
        mode: Experiment or release.
        guarantees: What is stated, at least one.
        mechanisms: What was paid for, equal ones merged; their `steps` count how often each ran.
        certificates: The certificates that mechanisms rest on.
        alarms: What the device's monitor stopped the run for.
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

    @property
    def warnings(self) -> tuple[WarningCode, ...]:
        """What limits every guarantee here; `WARNINGS` has the sentences."""
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
        }
        return tuple(code for code, holds in found.items() if holds)

    def text(self, *, without: Sequence[WarningCode] = ()) -> str:
        """Return the guarantees as a table and paragraphs, as `opusim account run` prints them, with the warnings.

        Args:
            without: Warnings to leave out. The paragraphs have what experiment mode limits.
        """
        stated = guarantees_text(self.guarantees, seed_stored="experiment" in self.warnings)
        shown = [code for code in self.warnings if code not in ("experiment", *without)]
        mode = wrapped(f"mode: {self.mode} ({_MODES[self.mode]})", indent="  ")
        return "\n".join([mode, stated, *(wrapped(WARNINGS[code], indent="  ") for code in shown)])

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
        """Read back what `to_json` returned.

        Warnings, theorems and descriptions are computed again from the rest, never believed.

        Raises:
            ValueError: The content is no such document, is of another version, or lacks a key; one line.
        """
        found = (content.get("schema"), content.get("version"))
        if found != (SCHEMA, VERSION):
            raise ValueError(
                f"schema, version = {reprlib.repr(found)}: must be {(SCHEMA, VERSION)!r}; read it with the opusim that "
                "wrote it"
            )
        if content.get("mode") not in get_args(Mode):
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
                    from_json(CertificateFacts, one) for one in content.get("certificates", ())
                ),
                alarms=tuple(from_json(Alarm, one) for one in content.get("alarms", ())),
                ledger=from_json(LedgerFacts, content["ledger"]),
                run=None if content["run"] is None else from_json(RunFacts, content["run"]),
                versions=dict(content["versions"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"a key is missing or holds another type ({error}); restore the document"
            ) from error
