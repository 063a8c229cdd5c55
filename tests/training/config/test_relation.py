"""The neighbouring relation of a run: what it asks for, what it hides, what it refuses."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from opusim import training
from opusim.accounting.explanation import explain
from opusim.accounting.guarantee import Adjacency, NoGuarantee
from opusim.accounting.ledger import read_ledger
from opusim.accounting.theorems import NUMBER_IS_PUBLIC, NUMBER_IS_UNUSED
from opusim.description.section import merged
from opusim.errors import ConfigError
from opusim.training.attacks.run_audit import audit_run
from opusim.training.config.run import load_config
from opusim.training.data import Dataset, Split, from_arrays
from opusim.training.data.dataset import Standardisation
from opusim.training.data.formats import read_npz
from opusim.training.data.samplers import PoissonSampler
from opusim.training.engine.plan import RunPlan, build_sampler, load_data, with_own_inputs
from opusim.training.errors import RunFolderError, RunInterrupted
from opusim.training.reports.run_report import write_report
from opusim.training.runs.run import load_run
from opusim.training.sweeps.execution import run_point
from opusim.training.zeroth_order.step_log import read_header

ADDED = {
    "epochs": 2, "threads": 1, "mode": "release", "model": {"hidden": [6]},
    "data": {"n_classes": 3, "validation_fraction": 0.2},
    "sampler": {"scheme": "poisson", "sampling_probability": 0.25},
    "protection": {"kind": "record", "epsilon": 3.0, "relation": "add_or_remove_one", "divisor": 12.0},
}  # fmt: skip
"""A run whose number of records is private."""
NULL = merged(
    {key: value for key, value in ADDED.items() if key not in ("sampler", "protection")},
    {"sampler": {"scheme": "poisson", "batch_size": 12}, "protection": {"kind": "record", "epsilon": 3.0}},
)
"""The same with a public number of records, which is the default."""
SHORT = {"epochs": 1, "protection": {"noise_multiplier": 1.3, "epsilon": None}}
TRAINERS = ("bp", "pdfa", "ulr", "zo", "convex")


def arrays(n: int) -> tuple[np.ndarray, np.ndarray]:
    """The first n of the same records; the labels' largest comes first."""
    return np.random.default_rng(3).normal(size=(200, 4))[:n], (2 - np.arange(200) % 3)[:n]


def of_trainer(config: dict[str, Any], kind: str) -> dict[str, Any]:
    own = {key: value for key, value in config.items() if kind != "convex" or key != "model"}
    return {**own, "trainer": {"kind": kind}}


def appended_in_training() -> tuple[int, int]:
    """Numbers of records n and n + 1 of which the content split keeps the last one for training."""
    for n in range(60, 100):
        old, new = (load_data(load_config(ADDED), arrays(m)) for m in (n, n + 1))
        if len(new.train) == len(old.train) + 1:
            return n, n + 1
    raise AssertionError("no appended record entered the training set")


def published(folder: Path) -> dict[str, Any]:
    """Every file of a run folder, without what is in its tensors and scalars."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {}).get("opusim", "{}"))
                for name_of_numbers in ("digest", "tensors"):
                    facts.pop(name_of_numbers, None)
                facts.get("seal", {}).pop("inode", None)
                shapes = {key: list(file.get_tensor(key).shape) for key in file.keys()}  # noqa: SIM118
            found[name] = (facts, shapes)
        elif name == "steps.zo":  # its root is random, and each step is of one size
            header, start = read_header(path)
            found[name] = (replace(header, root=0, base=""), path.stat().st_size - start)
        elif name == "steps.mark.json":
            found[name] = json.loads(path.read_text())["steps"]
        elif name != "lock":  # the time and the process
            found[name] = path.read_bytes()
    return found


def told_by_a_run(config: dict[str, Any], n: int, place: Path) -> dict[str, Any]:
    """What the folder of a run on n records tells; it is moved away, so that the next one has the same path."""
    run = training.train(config, data=arrays(n), folder=place / "run")
    if config["trainer"]["kind"] == "bp":  # reports of all trainers are written alike
        write_report(run)
    files = published(place / "run")
    shutil.move(place / "run", place / str(n))
    return files


@pytest.mark.parametrize(
    "kind", ["bp", *(pytest.param(kind, marks=pytest.mark.slow) for kind in TRAINERS if kind != "bp")]
)
def test_a_release_run_tells_nothing_of_the_number_of_records(tmp_path: Path, kind: str) -> None:
    """One record more: the ledgers are equal byte by byte, and so is every public file but for the model's numbers."""
    sizes = appended_in_training()
    old, new = (told_by_a_run(of_trainer(ADDED, kind), n, tmp_path) for n in sizes)
    assert {"config.json", "ledger.jsonl", "ledger.head", "summary.json"} <= set(old)
    assert old["ledger.jsonl"] == new["ledger.jsonl"]
    assert old == new
    assert not re.search(rb"n_train|n_validation|n_test|fingerprint|accuracy", new["config.json"])
    assert kind != "bp" or b"the numbers of records are private" in new["report.html"]
    assert not re.search(rb"accuracy|loss", new["metrics.jsonl"] + new["summary.json"])
    assert read_ledger(tmp_path / str(sizes[1])).guarantees()[0].adjacency is Adjacency.ADD_OR_REMOVE_ONE


def test_a_run_of_a_public_number_tells_it(tmp_path: Path) -> None:
    """Planted fault of the test above: constants that come from the number of records show in every file."""
    old, new = (told_by_a_run(of_trainer(NULL, "bp"), n, tmp_path) for n in (60, 61))
    assert old["ledger.jsonl"] != new["ledger.jsonl"]
    assert old["config.json"] != new["config.json"]
    assert b'"n_train": 48' in old["config.json"]


@pytest.mark.parametrize(("kind", "relation", "stated"), [
    ("bp", None, "zero_out"),
    ("bp", "replace_one", "replace_one"),
    ("ulr", None, "zero_out"),
    ("ulr", "replace_one", "replace_one"),
    ("zo", None, "zero_out"),
    ("convex", None, "replace_one"),
    ("convex", "zero_out", "zero_out"),
])  # fmt: skip
def test_a_statement_has_its_relation(tmp_path: Path, kind: str, relation: str | None, stated: str) -> None:
    config = of_trainer(NULL, kind)
    if relation is not None:
        config = merged(config, {"protection": {"relation": relation}})
    run = training.train(config, data=arrays(60), folder=tmp_path / "run")
    (guarantee,) = run.guarantees
    assert (guarantee.adjacency, guarantee.is_proven) == (stated, True)
    assert 2.99 < guarantee.epsilon <= 3.0
    named = NUMBER_IS_PUBLIC in {a.text for a in guarantee.assumptions if a.holds is None}
    assert named is (stated == "zero_out")
    assert (NUMBER_IS_PUBLIC in explain(guarantee)) is named
    assert read_ledger(run.folder.path).guarantees() == [guarantee]


def test_replacing_a_record_takes_more_noise() -> None:
    """A replaced record moves the sum twice as far: the noise is calibrated for it."""
    found = {}
    for relation in ("zero_out", "replace_one"):
        config = load_config(merged(of_trainer(NULL, "bp"), {"protection": {"relation": relation}}))
        config = with_own_inputs(config, arrays(60))
        plan = RunPlan.resolve(config, load_data(config, arrays(60)))
        found[relation] = plan.config.protection.noise_multiplier or 0.0
    assert found["replace_one"] > 1.3 * found["zero_out"]


def test_constants_of_add_or_remove_are_checked_by_the_code(tmp_path: Path) -> None:
    run = training.train(of_trainer(ADDED, "bp"), data=arrays(70), folder=tmp_path / "run")
    (guarantee,) = run.guarantees
    assert [a.holds for a in guarantee.assumptions if a.text == NUMBER_IS_UNUSED] == [True]
    assert run.facts["data"]["split"] == "content"


def test_a_typed_probability_is_the_sampler_whatever_the_number() -> None:
    config = load_config(merged(ADDED, {"sampler": {"batch_size": 4096}}))
    for n in (40, 150):
        sampler = build_sampler(config, load_data(config, arrays(n)))
        assert isinstance(sampler, PoissonSampler)
        assert (sampler.sampling_probability, sampler.steps_per_epoch) == (0.25, 4)


def test_a_release_run_that_hides_its_number_goes_on(tmp_path: Path, ctrl_c_at: type) -> None:
    config = merged(of_trainer(ADDED, "bp"), {"protection": {"noise_multiplier": 1.3, "epsilon": None}})
    with pytest.raises(RunInterrupted):
        training.train(config, data=arrays(70), folder=tmp_path, watcher=ctrl_c_at(5))
    run = training.train(data=arrays(70), folder=tmp_path, resume=True)
    assert run.summary is not None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sampler": {"sampling_probability": None}}, "'add_or_remove_one' needs sampler.sampling_probability"),
    (
        {"sampler": {"sampling_probability": None}, "protection": {"divisor": None}},
        r"needs sampler.sampling_probability and protection.divisor \(or sampler.batch_size\)",
    ),
    ({"protection": {"divisor": None}}, r"needs protection.divisor \(or sampler.batch_size\)"),
    ({"protection": {"divisor": None, "relation": None}}, "sampler.sampling_probability: 0.25"),
    ({"sampler": {"scheme": "full-batch"}}, "sampling_probability: 0.25 does nothing here"),
    ({"data": {"split": "index"}}, "data.split: 'index' does not fit the relation 'add_or_remove_one'"),
    ({"protection": {"relation": "zero_out"}, "data": {"split": "content"}}, "use 'index' or 'id'"),
    ({"protection": {"relation": "replace_one"}, "data": {"split": "id"}}, "use 'index'"),
    ({"trainer": {"kind": "zo"}, "protection": {"relation": "replace_one"}}, "not for trainer.kind = 'zo'; take one"),
    ({"protection": {"kind": "label-amplified"}}, "'label-amplified': its theorem is about replacing a label"),
    ({"protection": {"kind": "last-iterate"}, "trainer": {"kind": "convex"}}, "about replacing a record; leave it"),
    ({"protection": {"kind": "none", "epsilon": None}}, "does nothing here: it needs protection.kind"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_no_relation_allows_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        load_config(merged(ADDED, change))
    assert "\n" not in str(refused.value)


def split_before(rule: str, **changes: Any) -> Dataset:
    options: dict[str, Any] = {"n_classes": 3, "validation_fraction": 0.2, "split_seed": 0}
    ids = range(60) if rule == "id" else None
    return from_arrays(*arrays(60), **(options | changes), split=rule, ids=ids)


def test_a_data_set_that_was_split_before_must_fit_too(tmp_path: Path) -> None:
    with pytest.raises(NoGuarantee, match="data.split = 'index' does not fit the relation"):
        training.train(of_trainer(ADDED, "bp"), data=split_before("index"), folder=tmp_path / "a")
    with pytest.raises(NoGuarantee, match="data.split = 'content' does not fit the relation 'zero_out'"):
        training.train(of_trainer(NULL, "bp"), data=split_before("content"), folder=tmp_path / "b")
    assert not list(tmp_path.iterdir())
    known = merged(of_trainer(ADDED, "bp"), SHORT)
    for number, data in enumerate((split_before("content"), split_before("id"))):
        training.train(known, data=data, folder=tmp_path / f"right{number}")
    with pytest.raises(RunFolderError, match="held records out by id, and these are held out by content"):
        audit_run(tmp_path / "right1", data=arrays(60), out=tmp_path / "audit", trials=40)
    x, y = (torch.from_numpy(part) for part in arrays(60))
    train, none = Split(x.float(), y), Split(x[:0].float(), y[:0])
    plain = {"name": "own", "n_classes": 3, "test": None, "standardisation": Standardisation.identity()}
    given = Dataset(train=train, validation=none, **plain)  # no record was held out
    run = training.train(known, data=given, folder=tmp_path / "given")
    assert run.facts["data"]["split"] == "given"
    with pytest.raises(ConfigError, match=r"'content' is not that of the given Dataset \(given\)"):
        load_data(load_config(merged(ADDED, {"data": {"split": "content"}})), given)


def test_labels_may_be_split_by_any_rule(tmp_path: Path) -> None:
    """Their features are public, so no rule about features tells of a label."""
    config = {"epochs": 1, "model": {"hidden": [4]}, "data": {"n_classes": 3, "split": "content"}}
    config |= {"trainer": {"kind": "bp"}, "sampler": {"batch_size": 8}}
    config |= {"protection": {"kind": "label-randomized-response", "epsilon": 2.0}}
    run = training.train(config, data=arrays(60), folder=tmp_path)
    assert (run.facts["data"]["split"], run.guarantees[0].adjacency) == ("content", "replace_one")


def test_ids_that_come_with_the_arrays_decide(tmp_path: Path) -> None:
    x, y = arrays(60)
    ids = np.array([f"p{number % 30}" for number in range(60)])  # two records a person
    config = merged(of_trainer(ADDED, "bp"), {"mode": "experiment"})
    run = training.train(config, data=(x, y, ids), folder=tmp_path / "run")
    data = load_data(run.config, (x, y, ids))
    assert (data.split, run.facts["data"]["split"]) == ("id", "id")
    assert (len(data.train) % 2, len(data.train)) == (0, run.facts["data"]["n_train"])
    assert run.config.data.split == "id"
    np.savez(tmp_path / "records.npz", x=x, y=y, ids=ids)
    found = audit_run(tmp_path / "run", data=read_npz(tmp_path / "records.npz"), trials=40)
    assert found.guarantees[0].adjacency is Adjacency.ADD_OR_REMOVE_ONE
    with pytest.raises(ConfigError, match="'id' needs IDs, and none were given"):
        audit_run(tmp_path / "run", data=(x, y), trials=40)
    with pytest.raises(ConfigError, match=r"'id' is not that of the given Dataset \(content\)"):
        audit_run(tmp_path / "run", data=split_before("content"), trials=40)
    with pytest.raises(ConfigError, match="'content' ignores IDs, and some were given; use 'id'"):
        load_data(load_config(merged(ADDED, {"data": {"split": "content"}})), (x, y, ids))
    with pytest.raises(ConfigError, match="'id' needs IDs, and none were given"):
        load_data(load_config(merged(ADDED, {"data": {"split": "id"}})), (x, y))
    with pytest.raises(ConfigError, match="'id' is for arrays that are given with IDs"):
        load_data(load_config({"data": {"split": "id"}}), None)


def test_a_sweep_holds_records_out_as_each_point_says(tmp_path: Path) -> None:
    """The data set of the last point is kept for the next, but not where its split is another."""
    added = merged(
        merged(of_trainer(ADDED, "bp"), SHORT),
        {"data": {"name": "digits", "n_classes": None}, "mode": "experiment"},
    )
    null = merged(added, {"protection": {"relation": "zero_out"}})
    for name, config, split in (("a", added, "content"), ("b", null, "index"), ("c", added, "content")):
        run_point(load_config(config), tmp_path / name, tmp_path / f"{name}.json")
        assert load_run(tmp_path / name).facts["data"]["split"] == split
