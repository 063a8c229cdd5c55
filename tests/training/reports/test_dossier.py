"""The dossier for a privacy reviewer: what it leads with, what it claims, and that its parts agree."""

import hashlib
import json
import re
import runpy
import shutil
import sys
import tomllib
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import opusim
from opusim import training
from opusim.accounting.audit import AuditResult
from opusim.accounting.explanation import Statement, explain_theorem
from opusim.accounting.guarantee import LedgerCorrupt
from opusim.accounting.journal import read_positioned
from opusim.accounting.ledger import Program, read_ledger
from opusim.accounting.mechanisms.records import OWN_READING, STANDARDISED
from opusim.accounting.one_run import Law, OneRunPlan, audit_one_run
from opusim.accounting.theorems import theorem
from opusim.training.attacks import run_audit
from opusim.training.attacks.findings import read_audit
from opusim.training.attacks.mechanism.checks import Check, MechanismAudit, shared
from opusim.training.attacks.one_run.audit import audit_private_folder
from opusim.training.cli.app import app
from opusim.training.errors import RunFolderError
from opusim.training.private_loop.folder import program_of
from opusim.training.reports import dossier
from opusim.training.reports.dossier import dossier_schema, write_dossier
from opusim.training.runs.folder import ONE_RUN_FILE, stated
from opusim.training.runs.run import Run
from opusim.training.runs.storage import list_checkpoints
from tests.support.private_loops import network, parts, private_loop, rewritten, run_epoch, unrecorded

SMALL: dict[str, Any] = {
    **{"threads": 1, "data": {"name": "digits"}, "model": {"hidden": [8]}, "epochs": 1, "seed": 1},
    **{"trainer": {"kind": "bp"}, "optimizer": {"name": "sgd"}, "sampler": {"scheme": "poisson"}},
}
PROTECTION = {"kind": "record", "noise_multiplier": 2.0}

GUARANTEE = "1. Which guarantee is proven: epsilon, delta, unit?"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = {**SMALL, "protection": PROTECTION}
    return training.train(config, folder=tmp_path_factory.mktemp("record") / "run")


@pytest.fixture(scope="module")
def audit(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an audit of that run."""
    folder = tmp_path_factory.mktemp("of_run") / "audit"
    training.audit_run(run.folder.path, trials=40, seed=1, out=folder)
    return folder


def released(folder: Path) -> Path:
    """The folder of a release run with the constants of `run`."""
    config = {**SMALL, "mode": "release", "protection": PROTECTION}
    del config["seed"]
    return training.train(config, folder=folder).folder.path


@pytest.fixture(autouse=True)
def without_pdf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds; the first test does it."""
    monkeypatch.setattr(dossier, "_pdf", lambda title, sections: b"")


def written(works: Any, **options: Any) -> tuple[str, dict[str, Any]]:
    """The page as text, and the document, which its schema accepts."""
    page, _, data = write_dossier(works, **options)
    content = json.loads(data.read_bytes())
    jsonschema.validate(content, dossier_schema())
    return page.read_text(), content


def test_a_dossier_states_what_the_statement_does(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    page, content = written(run)
    assert (run.folder.path / "dossier.pdf").read_bytes().startswith(b"%PDF")
    (work,) = content["works"]
    statement = stated(run.folder.path)
    assert Statement.from_json(work["statement"]).to_json() == statement.to_json()
    (guarantee,) = statement.guarantees
    followed = "no layer, hook or loss mixes the records of a batch (before it trains, opusim follows the"
    assert followed in page
    assert followed in " ".join(str(statement).split())
    assert work["data"]["digest of the records"] == "in config.json, which stays private"
    assert {one["text"]: one["holds"] for one in work["hypotheses"]} == {
        one.text: one.holds for one in guarantee.assumptions
    }
    answers = {one["question"]: one["answer"] for one in work["answers"]}
    assert f"epsilon {guarantee.epsilon:.3f} at delta 1e-05" in answers[GUARANTEE]
    assert "One record, features and label together" in answers[GUARANTEE]
    assert answers["4. Does it hold for the training in this folder?"].startswith("No.")
    assert "standard deviation of the noise" in answers["5. Which mechanism, and who proves it?"]
    assert "of which the protected records are a part" in answers["9. Which data, and how many records?"]
    assert answers["11. Who is trusted?"].startswith("Trusted: Who collects the records")
    assert "Not covered: Choice of settings" in answers["12. Which side channels are open?"]
    assert "torch" in answers["13. Which code, versions and files?"]
    assert [question.split(".")[0] for question in answers] == [str(n) for n in range(1, 15)]
    # no other epsilon stands anywhere in the text, so none can claim more
    told = json.dumps({key: value for key, value in work.items() if key not in ("statement", "proofs")})
    assert set(re.findall(r"epsilon (\d+\.\d+)", told)) == {f"{guarantee.epsilon:.3f}"}
    assert [text.split(":")[0] for text in work["proofs"]] == ["clipped-records", "sampled-gaussian"]
    assert "connect the dots" in page
    common = tomllib.loads(files("opusim").joinpath("templates/dossier.toml").read_text("utf-8"))
    for standard, text in zip(work["standards"], common["standards"], strict=True):
        assert [h["heading"] for h in standard["headings"]] == [h["heading"] for h in text["headings"]]
        assert all(one["answer"] for one in standard["headings"])
        assert "not read" in standard["source"]
    names = {one["name"] for one in work["files"]}
    assert {"config.json", "ledger.jsonl", "summary.json"} <= names
    assert not {"report.html", "metrics.jsonl"} & names
    checkpoints = {path.name for path in run.folder.checkpoints.glob("*.safetensors")}
    assert len(checkpoints) > 1
    assert checkpoints == {name for name in names if name.endswith(".safetensors")}
    for name in (*checkpoints, "report.html", "metrics.jsonl", "settings, ledger and summary"):
        assert name in answers["7. What may be released?"]


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_a_run_that_protects_nothing_claims_nothing(tmp_path: Path, mode: str) -> None:
    config = {key: value for key, value in SMALL.items() if key != "seed"}
    page, content = written(training.train({**config, "mode": mode}, folder=tmp_path / "run"))
    (work,) = content["works"]
    assert work["leads"][0].startswith("Status 'none': no finite number")
    answers = {one["question"]: one["answer"] for one in work["answers"]}
    assert "Nothing is protected" in answers[GUARANTEE]
    assert answers["7. What may be released?"] == "No proof covers any release."
    assert "holds for the same run in release mode only" not in page
    states = [one["state"] for one in work["side_channels"]]
    assert "covered" not in states


def test_what_the_program_gave_and_a_device_of_features_take_part(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(90, 8)), np.arange(90) % 3
    model = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    config = {**SMALL, "data": {"n_classes": 3}}
    del config["model"]
    own = training.train(config, data=(x, y), model=model, folder=tmp_path / "own")
    optical = {**SMALL, "data": {"name": "digits", "features": "optical:gaussian", "n_features": 20}}
    for run, party, said in (
        (own, "Your own code: model, loss, data, loop", "as arrays"),
        (training.train(optical, folder=tmp_path / "optical"), "The optical device", "computed the features"),
    ):
        _, content = written(run)
        (row,) = [one for one in content["works"][0]["trust"] if one["party"] == party]
        assert row["trusted"] == "in part"
        assert said in row["why"]


def told_twice(page: str) -> set[str]:
    """The cells and paragraphs of more than 60 letters that stand twice on a page."""
    blocks = re.findall(r"<(?:p|td)[^>]*>([^<]{60,})</(?:p|td)>", page)
    return {text for text in blocks if blocks.count(text) > 1}


def test_the_page_lists_its_contents_and_says_nothing_twice(run: Run, audit: Path, tmp_path: Path) -> None:
    page, content = written(run, out=tmp_path / "d.html", audits=[audit])
    links = re.findall(r'<li><a href="#(s\d+)">([^<]*)</a>', page)
    assert links == re.findall(r'<h2 id="(s\d+)">([^<]*)</h2>', page)
    assert page.index(links[0][1]) < page.index("<h2")
    reasons = {text for text in told_twice(page) if text.startswith("no: ")}  # of each checkpoint
    assert told_twice(page) == reasons
    answer = content["works"][0]["answers"][0]["answer"]
    assert told_twice(f"{page}<p>{answer}</p>") == {answer} | reasons  # the planted fault
    assert "another run" not in page
    assert content["works"][0]["audits"][0]["attacked"] == "this run"
    # tables of prose stand cell under cell on a narrow page
    assert page.count("<table") == page.count('<table class="stacked">') + page.count("<table><tr><th style")


def test_an_audit_of_a_rehearsal_leaves_the_public_dossier(run: Run, audit: Path, tmp_path: Path) -> None:
    folder = released(tmp_path / "released")
    written(folder)
    kept = (folder / "dossier.json").read_bytes()
    page, content = written(folder, audits=[audit])
    assert (folder / "dossier.json").read_bytes() == kept
    assert (audit / "private-dossier.html").read_text() == page
    (work,) = content["works"]
    assert any(lead.startswith("Do not publish this dossier") for lead in work["leads"])
    (named,) = [lead for lead in work["leads"] if "is of another run (experiment," in lead]
    assert "noise from a stored seed was attacked, not that from the operating system" in named
    (own,) = written(run, out=tmp_path / "own.html", audits=[audit])[1]["works"]
    assert not any("not of the run as stated" in lead for lead in own["leads"])
    digest = run.folder.read_ledger().position.digest[:16]
    another = f"another run (experiment, folder run, ledger digest {digest})"
    assert work["audits"][0]["attacked"] == another
    assert f"audit.json, of {another}): " in work["answers"][7]["answer"]
    assert f"audit.json: one step of {another}." in page


def self_test(**changes: Any) -> MechanismAudit:
    """A self-test of the mechanism of `run`."""
    checks = shared([Check.normal("noise: mean", 0.1, 0.0, 1.0, "a bias")], 1e-4)
    facts: dict[str, Any] = {
        **{"kind": "bp", "protection": "record", "mode": "experiment", "accounted": "records clipped to 1"},
        **{"runs": 2, "steps": 40, "records": 20, "coordinates": 9, "seed": 1, "level": 1e-4, "cpu_s": 1.0},
    }
    return MechanismAudit(**{**facts, "checks": checks, **changes})


def test_self_tests_stand_in_question_8_and_those_of_others_are_refused(run: Run, tmp_path: Path) -> None:
    self_test().keep(tmp_path / "mechanism.json")
    page, content = written(run, out=tmp_path / "d.html", audits=[tmp_path])
    _, of_file = written(run, out=tmp_path / "d.html", audits=[tmp_path / "mechanism.json"])
    assert of_file["works"] == content["works"]
    (work,) = content["works"]
    assert "mechanism.json; records clipped to 1): No alarm" in work["answers"][7]["answer"]
    assert not any("No audit was found" in lead for lead in work["leads"])
    assert [(t["file"], t["holds"]) for t in work["self_tests"]] == [(str(tmp_path / "mechanism.json"), True)]
    assert MechanismAudit.from_json(work["self_tests"][0]["document"]) == self_test()
    assert "noise: mean" in page
    assert "mechanism.json" in [one["name"] for one in work["files"]]
    alarm = shared([Check.normal("noise: mean", 9.0, 0.0, 1.0, "a bias")], 1e-4)
    self_test(checks=alarm).keep(tmp_path / "mechanism.json")
    (work,) = written(run, out=tmp_path / "d.html", audits=[tmp_path])[1]["works"]
    assert "ALARM: the runs did not release" in work["leads"][0]
    for changes, told in (
        ({"kind": "pdfa"}, "tests pdfa with"),
        ({"mode": "release", "seed": None}, "in release mode, and this is bp with record"),
        ({"protection": "label-amplified"}, "protection.kind = label-amplified"),
        ({"accounted": "users clipped to 1"}, "(users)"),
    ):
        self_test(**changes).keep(tmp_path / "mechanism.json")
        with pytest.raises(RunFolderError, match=re.escape(told)):
            written(run, out=tmp_path / "d.html", audits=[tmp_path])
    content = json.loads((tmp_path / "mechanism.json").read_bytes()) | {"steps": 41}
    (tmp_path / "mechanism.json").write_text(json.dumps(content))
    with pytest.raises(RunFolderError, match=r"mechanism\.json"):
        written(run, out=tmp_path / "d.html", audits=[tmp_path])


def test_each_audit_file_is_judged_by_itself_and_the_first_folder_of_private_records_has_a_private_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)  # else all below it is private
    with private_loop(tmp_path / "loop", mode="release", seed=None) as private:
        run_epoch(private, steps=2)
    audit_private_folder(tmp_path / "loop", out=tmp_path / "invented", canaries=20, seed=1)
    found = read_audit(tmp_path / "invented" / ONE_RUN_FILE)
    assert found.stand_in
    for name in ("first", "second"):  # as opusim.audit_private_loop writes them, on the program's own records
        replace(found, stand_in=False).keep(tmp_path / name)
    files = {name: tmp_path / name / ONE_RUN_FILE for name in ("invented", "first", "second")}

    def publish(*names: str, place: str) -> list[str]:
        page, _, data = write_dossier(tmp_path / "loop", audits=[files[name] for name in names])
        assert page.parent == tmp_path / place
        (work,) = json.loads(data.read_bytes())["works"]
        return [one["publish"] for one in work["files"] if one["name"] == ONE_RUN_FILE]

    never = "no: figures of private records"
    assert publish("invented", place="loop") == ["yes"]
    assert publish("invented", "first", "second", place="first") == ["yes", never, never]
    assert publish("second", "first", "invented", place="second") == [never, never, "yes"]
    monkeypatch.chdir(tmp_path / "first")  # a bare name is not one of the run's folder
    page, content = written(tmp_path / "loop", audits=ONE_RUN_FILE)
    for ending in ("json", "html", "pdf"):
        assert files["first"].with_name(f"private-dossier.{ending}").stat().st_mode & 0o077 == 0
    assert files["first"].stat().st_mode & 0o077 == files["first"].parent.stat().st_mode & 0o077 == 0
    assert files["invented"].stat().st_mode & 0o077
    (row,) = [one for one in content["works"][0]["files"] if one["name"] == ONE_RUN_FILE]
    assert row["sha256"] == hashlib.sha256(files["first"].read_bytes()).hexdigest()
    assert "private loop loop" in page


def test_audits_in_a_releases_folder_are_judged_and_no_private_page_lands_there(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    loop = tmp_path / "loop"
    with private_loop(loop, mode="release", seed=None) as private:
        run_epoch(private, steps=2)
    audit_private_folder(loop, out=tmp_path / "audit", canaries=20, seed=1)
    found = replace(read_audit(tmp_path / "audit" / ONE_RUN_FILE), stand_in=False)
    assert found.origin is not None
    replace(found, origin=replace(found.origin, folder="elsewhere", digest="0" * 64)).keep(loop)
    self_test(kind="private-loop", mode="release", seed=None).keep(loop / "mechanism.json")
    for audits in ([], [loop]):
        page, _, data = write_dossier(loop, audits=audits)
        assert page == tmp_path / "loop-private" / "private-dossier.html"
        assert (page.parent.stat().st_mode | page.stat().st_mode | data.stat().st_mode) & 0o077 == 0
        (work,) = json.loads(data.read_bytes())["works"]
        assert [one["file"] for one in work["audits"]] == [ONE_RUN_FILE]
        assert any("is of another run (release, folder elsewhere" in lead for lead in work["leads"])
        assert any("Do not publish" in lead for lead in work["leads"])
        assert [Path(one["file"]).name for one in work["self_tests"]] == ["mechanism.json"]
    assert "AES-256 in counter mode under keys from os.urandom" in json.dumps(work["trust"])
    assert "a release keeps none: a digest of private values" in work["data"]["digest of the records"]
    for out in (loop / "dossier.html", loop / "below" / "dossier.html"):
        with pytest.raises(RunFolderError, match=r"is in .*loop, the folder of a run, and this dossier must"):
            write_dossier(loop, out=out)
    assert not [path for path in loop.rglob("*") if "dossier" in path.name]
    told = CliRunner().invoke(app, ["report", str(loop)], env={"COLUMNS": "80"})
    assert "one-run.json is not shown: it holds figures of private" in " ".join(told.output.split())
    assert "one-run.json is not shown" in (loop / "report.html").read_text()


def test_a_copy_of_a_run_is_told_from_a_second_run(tmp_path: Path) -> None:
    for name, seed in (("loop", 3), ("second", 4)):
        with private_loop(tmp_path / name, seed=seed) as private:
            run_epoch(private, steps=1)
            private.save()
    shutil.copytree(tmp_path / "loop", tmp_path / "copy")
    folders = [tmp_path / name for name in ("loop", "second", "copy")]
    page, content = written(folders, out=tmp_path / "all.html")
    assert len({work["statement"]["ledger"]["digest"] for work in content["works"]}) == 1
    said = [any("its epsilon counts once" in lead for lead in work["leads"]) for work in content["works"]]
    assert said == [False, False, True]
    assert f"has the same ledger as run 1, {folders[0]}" in page


def test_a_model_that_the_run_did_not_save_is_refused(run: Run, tmp_path: Path) -> None:
    """A changed tensor is found, and a checkpoint of another run before the newest one."""
    folder = Path(shutil.copytree(run.folder.path, tmp_path / "run"))
    file = list_checkpoints(folder / "checkpoints")[-1]
    with safe_open(file, framework="pt") as saved:
        tensors = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118 - not a mapping
        header = saved.metadata()
    large = {**SMALL, "sampler": {"scheme": "poisson", "batch_size": 400}, "protection": PROTECTION}
    other = training.train(large, folder=tmp_path / "other")
    alien = list_checkpoints(other.folder.checkpoints)[-1]
    assert alien.name < file.name
    shutil.copy(alien, file.parent)
    with pytest.raises(LedgerCorrupt):
        write_dossier([folder], out=tmp_path / "dossier.html")
    (file.parent / alien.name).unlink()
    tensors[next(name for name in tensors if name.startswith("model."))].view(torch.uint8).view(-1)[0] ^= 1
    save_file(tensors, file, metadata=header)
    with pytest.raises(RunFolderError, match="tensors do not match their digest"):
        write_dossier([folder], out=tmp_path / "dossier.html")
    shown = CliRunner().invoke(app, ["report", str(folder)])
    assert "tensors do not match their digest" in str(shown.exception)
    told = " ".join(CliRunner().invoke(app, ["account", "run", str(folder)]).output.split())
    assert "of the ledger was compared, not the checkpoints' tensors and not config.json" in told


def test_audits_are_paths_and_files_of_audits(run: Run, tmp_path: Path) -> None:
    for given in ([self_test()], self_test(), [3]):
        with pytest.raises(TypeError, match=r"^audits: got (MechanismAudit|int); give folders that `opusim"):
            write_dossier(run, audits=given)  # type: ignore[arg-type]
    with pytest.raises(RunFolderError, match=r"config\.json: is not an audit"):
        write_dossier(run, audits=[run.folder.config_file])
    with pytest.raises(ValueError, match=r"none\.json holds neither audit nor self-test; .* or a JSON file"):
        write_dossier(run, audits=[tmp_path / "none.json"])


def test_question_8_quotes_the_largest_bound_that_counts(run: Run, audit: Path, tmp_path: Path) -> None:
    kept = read_audit(audit / "audit.json")
    found = kept.strongest
    assert isinstance(found.result, AuditResult)
    assert found.anytime is not None
    nothing = replace(found.result, epsilon_lower=0.0)
    attack = f"attack '{found.attack}', at any time"
    for bound, told in ((1.25, f"at least 1.25 ({attack})"), (0.0, "at least 0.00 (attack")):
        bets = replace(found.anytime, epsilon_lower=bound, refuted_at=None)
        replace(kept, findings=(replace(found, result=nothing, anytime=bets),)).keep(tmp_path)
        (work,) = written(run, out=tmp_path / "d.html", audits=[tmp_path])[1]["works"]
        assert told in work["answers"][7]["answer"]
        assert ("Found: nothing" in " ".join(work["audits"][-1]["paragraphs"])) is (bound == 0)
    # of scores of canaries, an estimate never counts, and normal scores if they pass the test of normality
    inside, generator = np.arange(40) % 2 == 0, np.random.default_rng(1)
    plan = OneRunPlan(adversary="sees all", canaries=40, delta=1e-5, claimed=9.0, law=Law.GAUSSIAN)
    scores = audit_one_run(generator.normal(size=40) + 4 * inside, inside, plan)
    for normality, read in ((0.5, "normal scores"), (0.0, "guesses, Gaussian trade-off")):
        one = replace(found, result=replace(scores, normality=normality), anytime=None)
        assert replace(kept, findings=(one,)).largest[2] == read


def test_a_failed_audit_leads(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the broken control keeps its noise, so that no attack can find it."""
    monkeypatch.setattr(run_audit, "without_noise", lambda plan: plan)
    training.audit_run(run.folder.path, trials=40, seed=1, out=tmp_path / "audit")
    page, content = written(run, out=tmp_path / "d.html", audits=[tmp_path / "audit"])
    (work,) = content["works"]
    assert "DO NOT RELY ON THIS AUDIT" in work["leads"][0]
    assert page.index("DO NOT RELY") < page.index("Questions and answers</h2>")
    (kept,) = work["audits"]
    assert not kept["controls_hold"]
    testing = [one for one in work["standards"][1]["headings"] if "membership" in one["heading"]]
    assert [one["state"] for one in testing] == ["not covered"]


def test_an_audit_of_another_kind_of_training_is_refused(run: Run, audit: Path, tmp_path: Path) -> None:
    found = read_audit(audit / "audit.json")
    assert found.origin is not None
    assert found.origin.kind == "bp"
    for kind in ("pdfa", "private loop"):
        replace(found, origin=replace(found.origin, kind=kind)).keep(tmp_path)
        with pytest.raises(RunFolderError, match=f"attacked training by {kind}, and this is bp"):
            written(run, out=tmp_path / "d.html", audits=[tmp_path / "audit.json"])
    replace(found, origin=replace(found.origin, kind="")).keep(tmp_path)  # as older versions kept it
    written(run, out=tmp_path / "d.html", audits=[tmp_path / "audit.json"])


def test_an_audit_of_another_mechanism_is_refused_and_other_numbers_are_named(tmp_path: Path) -> None:
    users = {"user_ids": [f"user {n % 20}" for n in range(60)], "records_per_user": 2}
    for name, batch, given in (
        ("users", 5, users),
        ("records", 12, {}),
        ("other", 12, {"noise_multiplier": 2.0}),
    ):
        with private_loop(tmp_path / name, parts(batch_size=batch), **given) as private:
            run_epoch(private, steps=2)
    for name in ("records", "other"):
        audit_private_folder(tmp_path / name, out=tmp_path / f"of {name}", canaries=20, seed=1)
    with pytest.raises(RunFolderError, match=r"attacked records clipped.*unit record.*states users.*unit"):
        written(tmp_path / "users", audits=[tmp_path / "of records"])
    (tmp_path / "users" / "one-run.json").write_bytes((tmp_path / "of records" / "one-run.json").read_bytes())
    with pytest.raises(RunFolderError, match="is no audit of"):
        written(tmp_path / "users")
    (work,) = written(tmp_path / "records", audits=[tmp_path / "of records"])[1]["works"]
    assert [one["publish"] for one in work["files"] if one["name"] == "one-run.json"] == ["yes"]
    assert "stand-ins of the auditor" in work["answers"][7]["answer"]
    (own,) = work["audits"]
    assert "of the run; ideal" in own["verdict"]
    assert own["document"]["differs"] == ""
    (other,) = written(tmp_path / "records", audits=[tmp_path / "of other"])[1]["works"][0]["audits"]
    leads = {
        name: written(tmp_path / "records", audits=[tmp_path / f"of {name}"])[1]["works"][0]["leads"]
        for name in ("records", "other")
    }
    named = {name: [t for t in found if "not of the run as stated" in t] for name, found in leads.items()}
    assert not named["records"]
    assert "another run (experiment, folder other" in named["other"][0]
    assert "multiplier 2," in named["other"][0]
    assert "like code with other numbers" in other["verdict"]
    assert "multiplier 2," in other["document"]["differs"]
    texts = [json.dumps({**one, "document": ""}) for one in (own, other)]
    for claimed in ("of the run;", "the run's own", '"this run"'):
        assert [claimed in text for text in texts] == [True, False], claimed


def test_a_loop_says_who_checked_and_an_older_folder_has_no_checks(tmp_path: Path) -> None:
    given = {"user_ids": [f"user {n % 20}" for n in range(60)], "records_per_user": 2}
    with private_loop(tmp_path / "loop", parts(batch_size=5), **given) as private:
        run_epoch(private, steps=1)
        _, inside = written(private)
    page, outside = written(tmp_path / "loop", out=tmp_path / "d.html")
    rewritten(tmp_path / "loop", unrecorded)
    kept = (tmp_path / "loop" / "dossier.json").read_bytes()
    with pytest.raises(RunFolderError, match=r"checked hypotheses, this one would have 0; .*--out.*audits="):
        written(tmp_path / "loop")
    assert (tmp_path / "loop" / "dossier.json").read_bytes() == kept
    _, older = written(tmp_path / "loop", out=tmp_path / "older.html")
    checked = []
    for content, said, told in (
        (inside, "program", "The program that trained checked them"),
        (outside, "record", f"on record: make_private of opusim {version('opusim')} noted them in the ledger"),
        (older, None, "checked 0;"),
    ):  # fmt: skip
        (work,) = content["works"]
        found = [one for one in work["hypotheses"] if one["holds"]]
        checked.append(len(found))
        assert {one["checked"] for one in work["hypotheses"]} == {None, said}
        (row,) = [one for one in work["trust"] if one["party"] == "The code of opusim"]
        assert row["trusted"] == "yes"
        assert f"it checked {len(found)} of" in row["why"]
        assert told in work["answers"][5]["answer"]
        assert any("no record of what the loop checked" in lead for lead in work["leads"]) is (said is None)
    assert checked[0] == checked[1] > checked[2] == 0
    assert page.count("recorded as checked") == checked[1]
    assert "at most 2 records of a user" in page
    assert outside["works"][0]["data"]["users"] == "20"
    standing = {one["text"]: one["holds"] for one in outside["works"][0]["hypotheses"]}
    assert standing[STANDARDISED] is None
    listed = explain_theorem(theorem("clipped-users")).partition(STANDARDISED)[0]
    assert "opusim train checks (a private loop says in its statement" in listed.rpartition("Hypotheses ")[2]
    assert outside["works"][0]["data"]["records"].startswith("not published")
    assert "records_per_user=2" in outside["works"][0]["command"]


@pytest.mark.usefixtures("without_pdf")
def test_a_dossier_names_the_columns_of_a_table(tmp_path: Path) -> None:
    lines = [f"{n % 2},{n % 20},{n / 60},{n % 7}" for n in range(60)]
    (tmp_path / "table.csv").write_text("\n".join(["sold,customer,age,rooms", *lines]) + "\n")
    data = {
        "name": f"csv:{tmp_path / 'table.csv'}",
        "label": "sold",
        "user": "customer",
        "n_classes": 2,
        "mean": 0,
        "std": 1,
    }
    protection = {**PROTECTION, "unit": "user", "records_per_user": 2}
    sampler = {"scheme": "poisson", "batch_size": 5}
    config = SMALL | {"data": data, "protection": protection, "sampler": sampler}
    opusim.train(config, folder=tmp_path / "run", progress=False)
    (work,) = written(tmp_path / "run")[1]["works"]
    assert (work["data"]["column of labels"], work["data"]["column of user IDs"]) == ("sold", "customer")


def programs(folder: Path) -> list[Program | None]:
    """The programs that a ledger names, in the order of its lines."""
    return [one and one.program for one in read_ledger(folder).enforcements]


def unnamed(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries without the programs that took the steps."""
    for entry in entries:
        entry.get("enforcement", {}).pop("program", None)
    return entries


def test_a_loop_names_its_program_and_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("first")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    own = tmp_path / "parts" / "own_loss.py"
    own.parent.mkdir()
    own.write_text("import torch\nclass Loss(torch.nn.CrossEntropyLoss): pass\n")
    monkeypatch.syspath_prepend(str(own.parent))
    module, optimizer, _, loader = parts()
    criterion = import_module("own_loss").Loss()
    x, y = loader.dataset.tensors  # type: ignore[attr-defined]
    other = DataLoader(TensorDataset(x[:48] + 9.0, y[:48]), batch_size=12)
    for name, data in (("loop", loader), ("other", other)):
        with private_loop(tmp_path / name, (module, optimizer, criterion, data)) as private:
            run_epoch(private, steps=1)
            private.save()
    told, others = (read_positioned(tmp_path / name / "ledger.jsonl")[0] for name in ("loop", "other"))
    assert told[0] == others[0]
    digest = hashlib.sha256(b"first").hexdigest()
    (start,) = programs(tmp_path / "loop")
    assert (start.script, start.sha256) == (str(script), digest)
    assert (start.module, start.optimizer) == ("Sequential(Linear, Tanh, Linear)", "SGD(lr=0.5)")
    (work,) = written(tmp_path / "loop")[1]["works"]
    answers = [one["answer"] for one in work["answers"]]
    assert f"torch {torch.__version__}" in answers[12]
    assert work["versions"] == start.versions
    assert answers[13].startswith("Not from this document")
    # torch's classes stand in an installed package
    assert start.files == {"parts/own_loss.py": hashlib.sha256(own.read_bytes()).hexdigest()}
    told = f"with parts/own_loss.py (SHA-256 {start.files['parts/own_loss.py']})"
    assert f"{script} (SHA-256 {digest}), {told}" in answers[13]
    assert "Sequential(Linear, Tanh, Linear), SGD(lr=0.5)" in work["command"]
    script.write_text("second")
    for _ in range(2):
        with private_loop(tmp_path / "loop", (module, optimizer, criterion, loader), resume=True):
            pass
    first, second = programs(tmp_path / "loop")
    assert first == start
    assert second.sha256 == hashlib.sha256(b"second").hexdigest()
    (tmp_path / "loop" / "private.pt").unlink()
    rewritten(tmp_path / "loop", unnamed)  # as a version that noted no program left it
    (work,) = written(tmp_path / "loop")[1]["works"]
    assert "The folder keeps no other versions" in work["answers"][12]["answer"]
    assert "not named in the folder" in work["answers"][13]["answer"]


def test_the_command_names_each_program_of_a_loop_once(tmp_path: Path) -> None:
    module, _, _, loader = parts()
    losses = (nn.CrossEntropyLoss(), nn.functional.cross_entropy, nn.CrossEntropyLoss())
    for turn, criterion in enumerate(losses):
        given = (module, torch.optim.SGD(module.parameters(), lr=0.5), criterion, loader)
        with private_loop(tmp_path / "loop", given, resume=turn > 0) as private:
            run_epoch(private, steps=1)
            private.save()
    (work,) = written(tmp_path / "loop")[1]["works"]
    assert "SGD(lr=0.5), CrossEntropyLoss; then Sequential(" in work["command"]
    assert work["command"].endswith("SGD(lr=0.5), cross_entropy; the program is not kept")


def test_a_loop_names_the_settings_of_its_optimizer_that_are_not_defaults() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))

    class Own(torch.optim.SGD):
        def __init__(self, params: Any, **given: Any) -> None:
            super().__init__(params, **given)

    groups = [{"params": module[0].parameters(), "momentum": 0.5}, {"params": module[1].parameters()}]
    for optimizer, told in (
        (torch.optim.SGD(groups, lr=1.0), "SGD(lr=1, momentum=0.5 and 0)"),
        (torch.optim.SGD(module.parameters(), 1.0, 0.9, nesterov=True), "SGD(lr=1, momentum=0.9, nesterov=True)"),
        (torch.optim.AdamW(module.parameters(), betas=(0.8, 0.99)), "AdamW(lr=0.001, betas=(0.8, 0.99))"),
        (Own(module.parameters(), lr=0.1, weight_decay=1e-4), "Own(lr=0.1, weight_decay=0.0001)"),
        (training.ZerothOrder(module, lr=0.1, directions=4, rank=1), "ZerothOrder(lr=0.1, directions=4, rank=1)"),
    ):  # fmt: skip
        assert program_of(module, optimizer).optimizer == told


def channel(content: dict[str, Any], start: str) -> str:
    """Why a side channel is open."""
    return next(c["why"] for c in content["works"][0]["side_channels"] if c["channel"].startswith(start))


@pytest.mark.parametrize("fixed", [False, True, None])
def test_a_dossier_says_if_batches_are_padded(run: Run, tmp_path: Path, fixed: bool | None) -> None:
    padded = "Batches are padded to a fixed number of rows"
    with private_loop(tmp_path / "loop", fixed_batches=fixed) as private:
        run_epoch(private, steps=1)
    _, loop = written(tmp_path / "loop")
    assert channel(loop, "Batch sizes").startswith(padded) is (fixed is True)  # 12 records are expected
    assert "60 (divisor" in loop["works"][0]["data"]["records"]
    protection = run.config.protection.model_copy(update={"fixed_batches": fixed})
    changed: Any = SimpleNamespace(config=run.config.model_copy(update={"protection": protection}))
    facts = replace(dossier._facts(run, []), run=changed)
    assert dossier._is_padded(facts) is (fixed is True)
    rewritten(tmp_path / "loop", unnamed)
    assert "does not say if these are padded" in channel(written(tmp_path / "loop")[1], "Batch sizes")


@pytest.mark.parametrize("device", [False, True])
def test_a_loop_without_a_device_says_nothing_of_one(tmp_path: Path, device: bool) -> None:
    module = network()
    if device:
        opened = opusim.open_device("gaussian", n_inputs=3, n_outputs=6, seed=1)
        opusim.FeedbackAlignment(module, ["1"], device=opened)
    with private_loop(tmp_path / "loop", parts(module)) as private:
        run_epoch(private, steps=1)
    page, content = written(tmp_path / "loop")
    parties = [one["party"] for one in content["works"][0]["trust"]]
    assert ("The optical device" in parties) is device
    assert ("step times, frames, energy" in page) is device
    assert (OWN_READING in page.replace("&#x27;", "'").replace("&#39;", "'")) is device
    statement = content["works"][0]["statement"]
    assert (OWN_READING in json.dumps(statement)) is device
    settings = tmp_path / "loop" / "private.json"
    assert json.loads(settings.read_bytes())["device"] is device


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_the_saves_of_a_loop_are_named_with_digest_and_content(tmp_path: Path, mode: str) -> None:
    seed = {"seed": None} if mode == "release" else {}
    with private_loop(tmp_path / "loop", mode=mode, **seed) as private:
        run_epoch(private, steps=1)
        _, before = written(private)
        file = private.save()
        (tmp_path / "loop" / "model.pth").write_bytes(b"weights")
        _, after = written(private)
    told = [
        next(one["answer"] for one in content["works"][0]["answers"] if one["question"].startswith("7."))
        for content in (before, after)
    ]
    assert "The folder holds no model." in told[0]
    assert "Models in the folder: model.pth, private.pt." in told[1]
    rows = {one["name"]: one for one in after["works"][0]["files"]}
    assert rows["private.pt"]["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert "optimizer" in rows["private.pt"]["holds"]
    assert ("generators" in rows["private.pt"]["holds"]) is (mode == "experiment")
    assert rows["private.pt"]["publish"].startswith("no")
    assert rows["model.pth"]["publish"] == "not covered"
    assert rows["private.json"]["publish"].startswith("no" if mode == "experiment" else "yes")


def test_the_command_writes_runs_on_one_page_and_refuses_other_folders(run: Run, tmp_path: Path) -> None:
    other = released(tmp_path / "released")

    def call(*arguments: str | Path) -> tuple[int, str]:
        found = CliRunner().invoke(app, ["dossier", *map(str, arguments)], env={"COLUMNS": "80"})
        return found.exit_code, found.output + str(found.exception or "")

    code, text = call(run.folder.path, other, "--out", tmp_path / "both.html")
    assert code == 0, text
    content = json.loads((tmp_path / "both.json").read_bytes())
    jsonschema.validate(content, dossier_schema())
    assert [work["statement"]["mode"] for work in content["works"]] == ["experiment", "release"]
    first = (tmp_path / "both.html").read_text().partition("Questions and answers</h2>")[0]
    assert "add up" in first
    assert "1. bp on digits: Experiment mode" in first
    assert "2. bp on digits: No audit was found" in first
    assert json.loads(call("--schema")[1]) == dossier_schema()
    for place in ("first", "second"):
        training.audit_run(run.folder.path, trials=40, seed=1, out=tmp_path / place)
    given = (other, "--audits", tmp_path / "first", "--audits", tmp_path / "second")
    for older in (False, True):
        code, text = call(*given)
        assert code == 0, text
        assert "private-dossier.html" in text
        told = " ".join(text.split())
        assert "first, outside the run's folder: it shows figures" in told
        assert ("dossier.html is older and was not replaced" in told) is older
        assert call(other)[0] == 0
    for arguments, message in (
        ([], "RUN is missing"),
        ([other, other], "is given twice"),
        ([tmp_path], "holds no run"),
        ([other, "--audits", tmp_path], "holds neither audit nor self-test"),
        ([other, run.folder.path, "--audits", tmp_path], "one run at a time"),
    ):
        code, text = call(*arguments)
        assert code, text
        assert message in " ".join(text.split())


def test_sacro_ml_is_given_probabilities_and_the_statement(run: Run, tmp_path: Path) -> None:
    """Its `Target.load` reads YAML, of which JSON is a part, and files of numbers with commas."""
    script = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "sacro_ml.py"))
    script["write_target"](run.folder.path, tmp_path / "target")
    target = json.loads((tmp_path / "target" / "target.yaml").read_text())
    (check,) = target["safemodel"]
    statement = Statement.from_json(json.loads(check["statement.json"]))
    assert statement.to_json() == stated(run.folder.path).to_json()
    data = run.facts["data"]
    for name in ("train", "test"):
        found = np.loadtxt(tmp_path / "target" / target[f"proba_{name}_path"], delimiter=",")
        assert found.shape == (data[f"n_{name}"], 10)
        assert np.allclose(found.sum(axis=1), 1, atol=1e-5)
