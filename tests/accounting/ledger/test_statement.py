"""`opusim account run --json`: one versioned document that says what the text says, and reads back to itself."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, create_model

from opusim.accounting.explanation import WARNINGS, LedgerFacts, RunFacts, Statement, number
from opusim.accounting.guarantee import Release
from opusim.accounting.ledger import Ledger, read_ledger
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.records import PoissonGaussian, RecordCentral, Unprotected
from tests.support.command import WIDTH, opusim
from tests.support.run_folders import made

STEP = RecordCentral(noise_multiplier=2.0, sampling_probability=0.1, clip_norm=1.0, divisor=100)


def part(extra: Literal["allow", "forbid"] = "forbid", **types: Any) -> type[BaseModel]:
    """A part of the document as docs/privacy.md describes it: every key is there, and no other."""
    keys: Any = {key: (each, ...) for key, each in types.items()}
    return create_model("Part", __config__=ConfigDict(extra=extra, strict=True), **keys)


Infinite = float | Literal["inf"]
Mode = Literal["experiment", "release"]
Warned = part(
    code=Literal["experiment", "unfinished", "unwitnessed", "unaudited", "large-delta", "large-epsilon"],
    text=str,
)
Hypothesis = part(text=str, holds=bool | None)
Cited = part(**dict.fromkeys(("name", "title", "statement", "reference", "code", "page"), str))
Stated = part(
    epsilon=Infinite,
    delta=float,
    unit=Literal["record", "label"],
    adjacency=Literal["add_or_remove_one", "zero_out", "replace_one"],
    release=Literal["every update", "every reading", "last iterate"],
    status=Literal["proven", "proven under a device model", "claimed", "none"],
    **dict.fromkeys(("mechanism", "source"), str),
    **{"assumptions": list[Hypothesis], "epsilon_lower": float | None, "formula_value": Infinite | None},
    **{"reason": str | None, "theorem": Cited | None},
)
Paid = part("allow", kind=str, schema_version=Literal[1], steps=int, description=str)  # and its parameters
Paying = part(
    **dict.fromkeys(("lines", "payments", "steps_paid"), int),
    **{"digest": str, "delta": float, "enforced": bool},
    **dict.fromkeys(("releases_paid", "checked_against", "enforced_by"), list[str]),
)
Certified = part(
    **dict.fromkeys(("digest", "device", "date", "law"), str),
    **{"age_days": int, "every_steps": int, "beta": float, "finds": float, "remarks": list[str]},
)
Alarmed = part(step=int, since=int, found=str, covered=bool)
Ran = part(finished=bool, step=int | None, versions=dict[str, str], records=int | None)
Document: Any = part(
    schema_name=Literal["opusim-guarantee"], version=Literal[1], mode=Mode, seed_stored=bool,
    warnings=list[Warned], guarantees=list[Stated], mechanisms=list[Paid], certificates=list[Certified],
    alarms=list[Alarmed], ledger=Paying, run=Ran | None, versions=dict[str, str],
)  # fmt: skip


def validated(content: dict[str, Any]) -> Any:
    """The document, validated; `schema` is renamed because pydantic has a method of that name."""
    assert list(content) == ["schema", *list(Document.model_fields)[1:]]
    return Document.model_validate({"schema_name" if k == "schema" else k: content[k] for k in content})


def stated(folder: Path, mode: str, *mechanisms: Mechanism, steps: int = 3) -> dict[str, Any]:
    with Ledger(folder / "ledger.jsonl", mode=mode, delta=1e-5, enforced=True) as ledger:
        for step in range(steps):
            ledger.pay(step, *mechanisms)
    return json.loads(opusim("account", "run", folder, "--json", cwd=folder).stdout)


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_the_document_says_what_texts_do(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", WIDTH)  # that of the command
    content = stated(tmp_path, mode, STEP)
    found = validated(content)
    (guarantee,) = found.guarantees
    text = " ".join(opusim("account", "run", tmp_path, cwd=tmp_path).stdout.split())
    assert number(guarantee.epsilon) in text
    assert all(hypothesis.text in text for hypothesis in guarantee.assumptions)
    assert {None, True} == {hypothesis.holds for hypothesis in guarantee.assumptions}
    assert f"theorem {guarantee.theorem.name} (" in guarantee.source
    first = found.mechanisms[0]
    assert (first.kind, first.steps, found.ledger.steps_paid) == ("record_central", 3, 3)
    warned = {warning.code for warning in found.warnings}
    assert ("experiment" in warned) is ("This run stored its seed" in text) is (mode == "experiment")
    assert "unwitnessed" in warned
    assert opusim("account", "run", tmp_path, cwd=tmp_path).stderr.strip() == WARNINGS["unwitnessed"]
    assert text.startswith(f"mode: {mode} (")
    printed = " ".join(str(Statement.from_json(content)).split())
    assert printed == f"{text} {WARNINGS['unwitnessed']}"
    assert found.ledger.digest == json.loads((tmp_path / "ledger.head").read_text())["digest"]


def test_a_document_reads_back_to_itself_and_is_not_believed(tmp_path: Path) -> None:
    content = stated(tmp_path, "experiment", STEP)
    assert Statement.from_json(content).to_json() == content
    silenced = {**content, "warnings": [], "seed_stored": False}
    assert Statement.from_json(silenced).to_json() == content
    for change, message in (
        ({"version": 2}, "schema, version = .*: must be"),
        ({"mode": "public"}, "mode = 'public': must be"),
        ({"ledger": {}}, "lines"),
        ({"guarantees": None}, "a key is missing or holds another type"),
        ({"run": {"step": 1}}, "finished"),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            Statement.from_json({**content, **change})
        assert "\n" not in str(refused.value)


def test_numbers_that_are_nan_are_refused(tmp_path: Path) -> None:
    content = stated(tmp_path, "release", STEP)
    (guarantee,) = content["guarantees"]
    for part, key in ((content["ledger"], "delta"), (guarantee, "epsilon"), (guarantee, "formula_value")):
        kept, part[key] = part[key], math.nan
        with pytest.raises(ValueError, match=f"{key} = nan: must be a number; restore the document"):
            Statement.from_json(content)
        part[key] = kept


def test_no_protection_is_none_with_its_reason(tmp_path: Path) -> None:
    found = validated(stated(tmp_path, "release", Unprotected(what="bp without protection")))
    assert (found.guarantees[0].status, found.guarantees[0].epsilon) == ("none", "inf")
    assert found.guarantees[0].reason
    assert math.inf == Statement.from_json(stated(tmp_path, "release", steps=0)).guarantees[0].epsilon


def test_an_unfinished_last_iterate_covers_no_checkpoint(tmp_path: Path) -> None:
    stated(tmp_path, "release", STEP)
    content = read_ledger(tmp_path)
    guarantee = replace(content.guarantees()[0], release=Release.LAST_ITERATE)
    for finished in (True, False):
        statement = Statement(
            mode="release", guarantees=(guarantee,), mechanisms=tuple(content.mechanisms),
            ledger=LedgerFacts.of(content, ["summary.json"]),
            run=RunFacts(finished=finished, step=3, versions={}), versions={},
        )  # fmt: skip
        assert statement.warnings == (() if finished else ("unfinished",))


def test_a_run_folder_is_named_and_bears_witness(tmp_path: Path) -> None:
    content = json.loads(opusim("account", "run", made(tmp_path / "run"), "--json", cwd=tmp_path).stdout)
    found = validated(content)
    assert (found.run.finished, found.run.step) == (True, 6)
    assert found.ledger.checked_against == ["checkpoint step-0000000006", "summary.json"]
    assert [warning.code for warning in found.warnings] == ["experiment", "unaudited"]
    assert str(tmp_path) not in json.dumps(content)
    older = made(tmp_path / "older", finished=False, steps=2)
    for name in ("ledger.jsonl", "ledger.head"):
        (tmp_path / "run" / name).write_bytes((older / name).read_bytes())
    refused = opusim("account", "run", tmp_path / "run", "--json", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "is not the line that checkpoint step-0000000006 names" in refused.stderr


def test_a_tampered_ledger_gives_the_refusal_of_the_text(tmp_path: Path) -> None:
    stated(tmp_path, "release", STEP)
    file = tmp_path / "ledger.jsonl"
    file.write_text(file.read_text().replace('"noise_multiplier":2.0', '"noise_multiplier":9.0', 1))
    as_text, as_json = (opusim("account", "run", tmp_path, *more, cwd=tmp_path) for more in ((), ("--json",)))
    assert as_text == as_json
    assert (as_json.returncode, as_json.stdout) == (2, "")
    assert "its digest does not fit: it was changed" in as_json.stderr


def test_a_mechanism_that_no_audit_attacks_says_so(tmp_path: Path) -> None:
    priced = PoissonGaussian(noise_multiplier=2.0, sampling_probability=0.1)
    codes = {}
    for name, step in (("priced", priced), ("run", STEP)):
        (tmp_path / name).mkdir()
        found = validated(stated(tmp_path / name, "release", step))
        codes[name] = [warning.code for warning in found.warnings]
    assert codes == {"priced": ["unwitnessed", "unaudited"], "run": ["unwitnessed"]}
