"""Tables and named classes as data: DataFrames, CSV and Parquet files, strings, TensorDatasets, errors by column."""

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import opusim
from opusim.accounting.guarantee import NoGuarantee
from opusim.errors import ConfigError
from opusim.training.config import load_config
from opusim.training.config.sections import DataConfig
from opusim.training.data import Dataset, from_arrays
from opusim.training.data import arrays as arrays_module
from opusim.training.data import formats as formats_module
from opusim.training.data import tables as tables_module
from opusim.training.data.catalogue import build_dataset
from opusim.training.data.dataset import features_named_as_identifiers
from opusim.training.engine.plan import RunPlan, fingerprint, load_data, with_own_inputs
from opusim.training.errors import DataError, RunFolderError
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.run import evaluate_run
from tests.support.command import opusim as command

pandas = pytest.importorskip("pandas")
pil = pytest.importorskip("PIL.Image")
RNG = np.random.default_rng(0)
SPECIES = np.array(["setosa", "virginica", "versicolor"])[np.arange(40) % 3]
FRAME = pandas.DataFrame(
    {"length": RNG.normal(size=40), "species": SPECIES, "count": np.arange(40), "wild": np.arange(40) % 2 == 0}
)  # fmt: skip
CONFIG = {"trainer": {"kind": "bp"}, "model": {"hidden": [8]}, "epochs": 1, "sampler": {"batch_size": 5}}


def _load(data: Any, test: Any = None, label: Any = "species", **keys: Any) -> Dataset:
    config = with_own_inputs(load_config({"data": keys}), data, label)
    return load_data(config, data, test)


def _told(folder: Path, *arguments: object) -> str:
    """What a command prints, which succeeds."""
    result = command(*arguments, cwd=folder)
    assert result.returncode == 0, result
    return result.stdout


class _Pairs(torch.utils.data.Dataset[Any]):
    """Records of a list, with fresh noise each time they are asked for if there is any."""

    def __init__(self, pairs: Any, noise: float = 0.0) -> None:
        self._pairs, self._noise = pairs, noise

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Any:
        record = self._pairs[index]
        return (record[0] + self._noise * torch.randn(record[0].shape), record[1]) if self._noise else record


class _Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def _saved(folder: Path) -> Path:
    np.savez(folder / "saved.npz", x=np.eye(4), y=np.arange(4) % 2)
    return folder / "saved.npz"


class TestFrames:
    def test_a_frame_is_its_columns_in_their_order(self) -> None:
        data = _load(FRAME)
        x = FRAME[["length", "count", "wild"]].to_numpy(dtype="float64")
        y = np.unique(SPECIES, return_inverse=True)[1]
        same = from_arrays(x, y, validation_fraction=0.1, split_seed=0)
        assert fingerprint(data.train) == fingerprint(same.train)
        assert data.columns == ("length", "count", "wild")
        assert data.classes == ("setosa", "versicolor", "virginica")
        assert (data.n_classes, data.record_shape, data.name) == (3, (3,), "arrays")

    def test_test_columns_are_found_by_name(self) -> None:
        mixed = FRAME[["wild", "species", "count", "length"]]
        data, same = _load(FRAME, test=mixed), _load(FRAME, test=FRAME)
        assert data.test is not None
        assert same.test is not None
        assert torch.equal(data.test.x, same.test.x)

    @pytest.mark.parametrize("dtype", ["category", "object", "string"])
    def test_text_of_any_type_names_classes(self, dtype: str) -> None:
        data = _load(FRAME.assign(species=FRAME["species"].astype(dtype)))
        assert fingerprint(data.train) == fingerprint(_load(FRAME).train)

    @pytest.mark.parametrize("dtype", ["int8", "Int64", "category", "bool"])
    def test_numbers_of_any_type_are_classes(self, dtype: str) -> None:
        data = _load(FRAME.assign(species=pandas.Series(np.arange(40) % 2).astype(dtype)))
        assert (data.classes, data.n_classes) == ((), 2)

    def test_stated_classes_have_their_order(self) -> None:
        data = _load(FRAME, classes=["virginica", "versicolor", "setosa", "none"])
        assert (data.n_classes, data.classes[0]) == (4, "virginica")
        numbers = _load(FRAME.assign(species=np.arange(40) % 2 + 5), classes=["5", "6"])
        assert (numbers.n_classes, sorted(set(numbers.train.y.tolist()))) == (2, [0, 1])

    def test_a_numbered_column_is_named_by_its_number(self) -> None:
        frame = FRAME.drop(columns="species").set_axis([0, 1, 2], axis=1)
        assert _load(frame, label=2).columns == ("0", "1")
        assert _load(frame, label=[0, np.int64(1)], target="real").columns == ("2",)

    def test_several_columns_are_numbers_or_labels(self) -> None:
        real = _load(FRAME.drop(columns="species"), label=["length", "count"], target="real")
        assert (real.target, real.n_classes, real.columns) == ("real", 2, ("wild",))
        labels = _load(FRAME.drop(columns="species"), label="wild", target="labels")
        assert (labels.target, labels.n_classes) == ("labels", 1)

    @pytest.mark.parametrize(("frame", "test", "label", "message"), [
        (FRAME, None, None, "data.label is missing: name the column of data to predict, one of length"),
        (FRAME, None, "specie", "'specie' is no column of data, which has length, species, count, wild"),
        (FRAME.assign(city="x"), None, "species", "column 'city' of data holds 'x' in row 0 counted"),
        (FRAME.assign(city="x"), None, "species", "pandas.get_dummies(frame, columns=['city'])"),
        (FRAME.assign(who=[f"P{n}" for n in range(40)]), None, "species", "data.user = 'who' (--user)"),
        (FRAME.assign(day=pandas.Timestamp(0)), None, "species", "column 'day' of data holds datetime64"),
        (
            FRAME.assign(length=FRAME["length"].where(FRAME.index != 7)), None, "species",
            "column 'length' of data lacks 1 of 40 values, the first in row 7 counted from 0",
        ),
        (
            FRAME.assign(species=FRAME["species"].where(FRAME.index > 1)), None, "species",
            "column 'species' of data lacks 2 of 40 values",
        ),
        (FRAME, None, "length", "column 'species' of data holds 'setosa' in row 0"),
        (FRAME.drop(columns="species"), None, "length", "set data.target = 'real'"),
        (FRAME, FRAME.drop(columns="wild"), "species", "test has no column 'wild'"),
        (FRAME, FRAME.assign(z=1), "species", "test has a column 'z', which the training records lack"),
        (FRAME, FRAME.assign(species="rosa"), "species", "test[1] holds 'rosa', which is none of the 3"),
        (FRAME, (np.zeros((4, 3)), np.zeros(4, int)), "species", "must both be DataFrames, or neither"),
        (FRAME[["species"]], None, "species", "has no column besides the labels"),
        (pandas.concat([FRAME, FRAME], axis=1), None, "species", "several columns of the name 'count'"),
    ])  # fmt: skip
    def test_what_is_wrong_names_its_column(self, frame: Any, test: Any, label: Any, message: str) -> None:
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            _load(frame, test, label)


class TestOtherForms:
    @pytest.mark.parametrize("index", [None, "reset"])
    def test_an_index_is_no_feature(self, tmp_path: Path, index: str | None) -> None:
        """A file sorted by label would be learnt from its order."""
        frame = FRAME.sort_values("species", ignore_index=True)
        if index is None:
            frame.to_csv(tmp_path / "rows.csv")
        else:
            frame.reset_index().to_csv(tmp_path / "rows.csv", index=False)
        column = "Unnamed: 0" if index is None else "index"
        name = f"csv:{tmp_path / 'rows.csv'}"
        with pytest.raises(ValueError, match=rf"column '{column}' of .*rows.csv .* no feature.*index=False"):
            load_data(load_config({"data": {"name": name, "label": "species"}}), None, None)
        read = pandas.read_csv(tmp_path / "rows.csv")
        with pytest.raises(ValueError, match=f"column '{column}' of data"):
            _load(read)
        assert _load(read.drop(columns=column)).columns == ("length", "count", "wild")
        assert _load(read.rename(columns={column: "place"})).columns[0] == "place"
        measured = read.assign(index=read["length"]).drop(columns=column if index is None else [])
        assert "index" in _load(measured).columns
        held = tables_module.table_of(read, ["species"], "test", columns=[column, "length", "count", "wild"])
        assert held.columns[0] == column  # of a run that was trained with it

    def test_named_classes_of_arrays(self) -> None:
        x = np.zeros((40, 2))
        for y in (SPECIES, SPECIES.astype(object)):
            assert _load((x, y), label=None).classes == ("setosa", "versicolor", "virginica")
        named = {"classes": ["a", "b"]}
        for y, keys, message in (
            (np.full(40, "a"), {}, "must be at least 2 different names"),
            (np.arange(40) % 2, named, "data.classes names classes that y gives as strings"),
            (np.arange(40) / 2, named | {"target": "real"}, "data.classes names classes"),
            (SPECIES, {"target": "real"}, "y must hold numbers"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                _load((x, y), label=None, **keys)

    def test_a_tensor_dataset_is_its_tensors(self) -> None:
        x, y = torch.randn(20, 1, 4, 4), torch.arange(20) % 3
        data = _load(TensorDataset(x, y), TensorDataset(x, y), label=None)
        assert fingerprint(data.train) == fingerprint(_load((x, y), label=None).train)
        assert data.record_shape == (1, 4, 4)

    def test_a_data_set_of_torch_is_read_once(self) -> None:
        x, y = torch.randn(20, 1, 4, 4), torch.arange(20) % 3
        pairs = [(image, int(label)) for image, label in zip(x, y, strict=True)]
        whole = fingerprint(_load((x, y), label=None).train)
        for data in (
            _Pairs(pairs), Subset(_Pairs([*pairs, pairs[0]]), range(20)), ConcatDataset([_Pairs(pairs)]),
        ):  # fmt: skip
            found = _load(data, _Pairs(pairs), label=None)
            assert (fingerprint(found.train), found.record_shape) == (whole, (1, 4, 4))
            assert found.test is not None
        named = _load(_Pairs([(image.numpy(), "ab"[label % 2]) for image, label in pairs]), label=None)
        assert named.classes == ("a", "b")

    @pytest.mark.parametrize(("data", "message"), [
        (lambda: DataLoader(_Pairs([(torch.ones(2), 1)])), "give data=loader.dataset, and its batch size as samp"),
        (_Stream, "got _Stream; a run draws records by their numbers, which an iterable one lacks"),
        (lambda: _Pairs([]), "data = _Pairs: is empty"),
        (lambda: _Pairs([(torch.ones(2), 0), (torch.ones(3), 1)]), "record 1 has shapes (3,) and (), record 0"),
        (lambda: _Pairs([(object(), 1)]), "data: record 0 is (object, int), and must be (x, y), x a tensor"),
        (lambda: _Pairs([torch.ones(2)]), "data: record 0 is (Tensor), and must be (x, y)"),
        (lambda: _Pairs([(torch.ones(2), 1)] * 3, noise=0.1), "gives another record 0 each time, as a random"),
        (lambda: "flowers.csv", "in the configuration: config={'data': {'name': 'csv:flowers.csv'}}"),
        (lambda: Path(__file__).parent, f"config={{'data': {{'name': 'folder:{Path(__file__).parent}'}}}}"),
        (lambda: [np.ones((3, 2)), np.ones(3)], "got list; give data=(x, y)"),
        (lambda: (FRAME[["count"]], FRAME["count"]), "torch tensor, got DataFrame: use numpy.asarray(x)"),
        (lambda: (sparse.csr_matrix(np.eye(3)), np.arange(3)), "got csr_matrix: use x.toarray()"),
    ])  # fmt: skip
    def test_what_is_no_array_of_records_has_a_remedy(self, data: Any, message: str) -> None:
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            _load(data(), label=None)

    def test_other_forms_are_refused(self) -> None:
        with pytest.raises(TypeError, match=r"data must be \(x, y\), a TensorDataset or another Dataset of"):
            _load([1, 2], label=None)
        with pytest.raises(ConfigError, match="data.label: species names a column of a table"):
            _load((np.zeros((4, 2)), np.arange(4) % 2))


class TestRuns:
    def test_a_run_of_a_frame_resumes_on_the_same_frame_only(self, tmp_path: Path, stop_at: type) -> None:
        given: dict[str, Any] = {"data": FRAME, "test": FRAME}
        whole = opusim.train(CONFIG, **given, label="species", folder=tmp_path / "whole")
        with pytest.raises(KeyboardInterrupt):
            opusim.train(CONFIG, **given, label="species", folder=tmp_path / "run", watcher=stop_at(3))
        for other in ({"data": FRAME.assign(count=1)}, {"test": FRAME.assign(count=1)}):
            with pytest.raises(RunFolderError, match="was started with other data"):
                opusim.train(**(given | other), folder=tmp_path / "run", resume=True)
        resumed = opusim.train(**given, folder=tmp_path / "run", resume=True)
        assert np.array_equal(resumed.predict(FRAME), whole.predict(FRAME))
        assert resumed.summary == whole.summary

    def test_a_run_of_classes_without_records(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Earlier versions took one more than the largest label, also if a number below it was left out."""

        class Stop(opusim.Callback):
            def on_epoch(self, record: dict[str, Any]) -> None:
                raise RuntimeError("stopped")

        x, y = RNG.normal(size=(40, 3)), np.array([0, 1, 3])[np.arange(40) % 3]
        config, folder = CONFIG | {"epochs": 2}, tmp_path / "run"
        with monkeypatch.context() as before:
            before.setattr(arrays_module, "_distinct", lambda labels: int(labels.max()) + 1)
            with pytest.raises(RuntimeError, match="stopped"):
                opusim.train(config, data=(x, y), folder=folder, callbacks=[Stop()])
        resumed = opusim.train(data=(x, y), folder=folder, resume=True)
        assert resumed.form.n_classes == 4
        assert len(resumed.metrics) == 2
        with pytest.raises(ValueError, match="3 different labels from 0 to 3"):
            opusim.train(config, data=(x, y), folder=tmp_path / "new")

    def test_numbered_columns_are_those_of_the_training_records(self, tmp_path: Path) -> None:
        frame = pandas.DataFrame(RNG.normal(size=(40, 3))).assign(species=SPECIES)
        run = opusim.train(CONFIG, data=frame, label="species", folder=tmp_path / "run")
        assert len(run.predict(frame.drop(columns="species"))) == 40

    def test_a_run_of_a_frame_is_measured_on_frames(self, tmp_path: Path) -> None:
        run = opusim.train(CONFIG, data=FRAME, test=FRAME, label="species", folder=tmp_path / "run")
        facts = json.loads((tmp_path / "run/config.json").read_text())
        assert facts["data"]["classes"] == ["setosa", "versicolor", "virginica"]
        assert facts["config"]["data"]["label"] == ["species"]
        shuffled = FRAME[["species", "wild", "length", "count"]]
        assert run.summary is not None
        assert run.evaluate(shuffled)["accuracy"] == run.summary["test_accuracy"]
        names = run.predict(shuffled.drop(columns="species"))
        assert np.mean(names == SPECIES) == run.summary["test_accuracy"]
        features = FRAME[list(run.columns)].to_numpy(dtype="float64")
        numbers = run.predict(torch.from_numpy(features))
        assert np.array_equal(np.array(run.classes)[numbers], names)
        assert np.array_equal(run.predict(features), names)

    @pytest.mark.parametrize("kind", ["csv", "parquet"])
    def test_the_commands_read_files(self, kind: str, tmp_path: Path) -> None:
        if kind == "parquet":
            pytest.importorskip("pyarrow")
        train, test = tmp_path / f"flowers.{kind}", tmp_path / f"test.{kind}"
        for path, frame in ((train, FRAME), (test, FRAME[["wild", "species", "length", "count"]])):
            frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
        settings = ["model.hidden=[8]", "sampler.batch_size=5", f"data.test={test}"]
        lines = [part for line in settings for part in ("--set", line)]
        begin = ("train", "bp", "--data", f"{kind}:{train}", "--label", "species", "--epochs", 1)
        _told(tmp_path, *begin, *lines)
        folder = tmp_path / "runs" / "bp-flowers-1"
        summary = json.loads((folder / "summary.json").read_text())
        own = json.loads(_told(tmp_path, "evaluate", folder, "--json"))
        assert (own["data"], own["records"], own["accuracy"]) == (test.name, 40, summary["test_accuracy"])
        assert evaluate_run(folder, data=f"{kind}:{test}") == own
        if kind == "csv":
            FRAME.assign(count=1).to_csv(train, index=False)
            with pytest.raises(RunFolderError, match="was trained on other data"):
                RunPlan.stored(RunFolder(folder))

    @pytest.mark.parametrize("kind", ["npz", "folder"])
    def test_arrays_and_image_files(self, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pixels = np.random.default_rng(1).integers(0, 256, size=(40, 5, 4, 3), dtype=np.uint8)
        x = pixels.transpose(0, 3, 1, 2).astype(np.float32) / 255
        for name in ("train", "test"):
            if kind == "npz":
                np.savez(tmp_path / f"{name}.npz", x=x, y=SPECIES)
                continue
            for number, (image, species) in enumerate(zip(pixels, SPECIES, strict=True)):
                (tmp_path / name / species).mkdir(parents=True, exist_ok=True)
                pil.fromarray(image).save(tmp_path / name / species / f"{number:02}.png")
        ending = ".npz" if kind == "npz" else ""
        monkeypatch.chdir(tmp_path)
        options = DataConfig(name=f"{kind}:train{ending}", test=f"test{ending}")
        data = build_dataset(options)
        order = np.arange(40) if kind == "npz" else np.argsort(SPECIES, kind="stable")
        same = from_arrays(x[order], SPECIES[order], validation_fraction=0.1, split_seed=0)
        assert fingerprint(data.train) == fingerprint(same.train)
        assert (data.record_shape, data.classes, data.name) == ((3, 5, 4), same.classes, options.name)
        lines = [p for line in ("sampler.batch_size=5", f"data.test=test{ending}") for p in ("--set", line)]
        _told(tmp_path, "train", "bp", "--data", options.name, "--epochs", 1, "--out", "run", *lines)
        summary = json.loads(Path("run/summary.json").read_text())
        own = json.loads(_told(tmp_path, "evaluate", "run", "--json"))
        assert (own["data"], own["records"]) == (f"test{ending}", 40)
        assert own["accuracy"] == summary["test_accuracy"]
        assert evaluate_run(Path("run"), data=f"{kind}:test{ending}") == own
        # a named file is taken literally, all of it, also under another spelling
        for path in (f"train{ending}", f"../{tmp_path.name}/train{ending}"):
            found = evaluate_run(Path("run"), data=f"{kind}:{path}")
            assert (found["data"], found["records"]) == (f"train{ending}, on which the run was trained", 40)
            assert found["accuracy"] == opusim.load_run("run").evaluate(x, SPECIES)["accuracy"]

    def test_private_classes_have_to_be_stated(self, tmp_path: Path) -> None:
        protected = CONFIG | {"protection": {"kind": "record", "noise_multiplier": 1.0}}
        with pytest.raises(NoGuarantee, match="data.classes is missing"):
            opusim.train(protected, data=FRAME, label="species", folder=tmp_path / "run")
        path = tmp_path / "flowers.csv"
        FRAME.assign(species=np.arange(40) % 2).to_csv(path, index=False)
        named = protected | {"data": {"name": f"csv:{path}", "label": "species"}}
        with pytest.raises(NoGuarantee, match="data.n_classes is missing"):
            opusim.train(named, folder=tmp_path / "run")


class TestStandardisation:
    def test_constants_of_the_training_records_only(self, tmp_path: Path) -> None:
        config = CONFIG | {"data": {"standardise": "records"}}
        frame = FRAME.assign(length=FRAME["length"] * 1e6 + 5e7)
        run = opusim.train(config, data=frame, label="species", folder=tmp_path / "run")
        data = _load(frame, standardise="records")
        torch.testing.assert_close(data.train.x.mean(dim=0), torch.zeros(3), atol=1e-4, rtol=0)
        torch.testing.assert_close(data.train.x.std(dim=0, correction=0), torch.ones(3), atol=1e-4, rtol=0)
        assert float(data.validation.x.mean(dim=0).abs().max()) > 0.01
        constants = run.facts["data"]["standardisation"]
        assert (constants["public"], len(constants["mean"])) == (False, 3)
        metrics = run.evaluate(frame)
        assert np.isfinite(metrics["loss"])
        assert run.facts["data"]["fingerprint"] == fingerprint(data.train)

    def test_public_constants_of_each_feature_keep_a_guarantee(self, tmp_path: Path) -> None:
        constants = {"mean": [5.0, 3.0, 1.0], "std": [2.0, 0.5, 4.0]}
        keys = constants | {"classes": sorted(set(SPECIES.tolist()))}
        private = CONFIG | {"protection": {"kind": "record", "noise_multiplier": 1.0}, "data": keys}
        run = opusim.train(private, data=FRAME, label="species", folder=tmp_path / "run")
        assert [statement.is_proven for statement in run.guarantees] == [True]
        assert run.facts["data"]["standardisation"]["mean"] == constants["mean"]
        plain = opusim.load_run(tmp_path / "run").evaluate(FRAME)
        assert plain == run.evaluate(FRAME)

    def test_constants_of_other_features_are_refused(self, tmp_path: Path) -> None:
        for changes, message in (
            ({"mean": [5.0, 3.0], "std": 1.0}, "are for 2 features, x has shape"),
            ({"mean": 0.0, "std": [1.0, 0.0, 1.0]}, "std = .* must be above 0 everywhere"),
            ({"mean": [0.0, 1.0, 2.0]}, "go together"),
            ({"mean": [0.0, float("nan"), 2.0], "std": 1.0}, r"data\.mean.* must be a finite number"),
            ({"mean": "abc", "std": 1.0}, r"data\.mean.* must be a finite number, .* got 'abc'"),
        ):
            with pytest.raises(ValueError, match=message):
                opusim.train(CONFIG | {"data": changes}, data=FRAME, label="species", folder=tmp_path / "run")

    def test_where_it_is_refused(self, tmp_path: Path) -> None:
        wanted = {"data": {"standardise": "records"}}
        private = CONFIG | {"protection": {"kind": "record", "noise_multiplier": 1.0}}
        keys = {"standardise": "records", "classes": sorted(set(SPECIES.tolist()))}
        with pytest.raises(NoGuarantee, match="standardised by statistics of the data"):
            opusim.train(private | {"data": keys}, data=FRAME, label="species", folder=tmp_path / "run")
        with pytest.raises(ConfigError, match="data.standardise: 'records' is for user-supplied data"):
            opusim.train(CONFIG | wanted, folder=tmp_path / "run")
        with pytest.raises(ConfigError, match="a Dataset has its constants"):
            opusim.train(CONFIG | wanted, data=_load(FRAME), folder=tmp_path / "run")
        with pytest.raises(ValueError, match="x holds tokens"):
            _load((np.arange(40).reshape(10, 4), None), label=None, standardise="records")
        with pytest.raises(ConfigError, match="computes what mean = 0.5 states"):
            load_config({"data": {"standardise": "records", "mean": 0.5, "std": 0.5}})


class TestFiles:
    def test_a_file_without_a_table_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("pyarrow")
        path = tmp_path / "a.csv"
        FRAME.to_csv(path, index=False)
        (tmp_path / "empty.csv").touch()
        (tmp_path / "binary.csv").write_bytes(bytes(range(255, 0, -1)))
        refused = {
            "csv:none.csv": "none.csv cannot be read (No such file or directory)",
            "csv:empty.csv": "empty.csv is no csv file with a table",
            "csv:binary.csv": "binary.csv is no text in UTF-8",
            "parquet:a.csv": "a.csv is no parquet file with a table",
        }
        monkeypatch.chdir(tmp_path)
        for name, message in refused.items():
            with pytest.raises(DataError, match=re.escape(message)):
                load_data(load_config({"data": {"name": name, "label": "species"}}), None)
        monkeypatch.setattr(tables_module, "TABLE_LIMIT", 100)
        with pytest.raises(DataError, match="more than the limit of 100"):
            load_data(load_config({"data": {"name": "csv:a.csv", "label": "species"}}), None)

    def test_ids_of_a_file_hold_records_out(self, tmp_path: Path) -> None:
        x, ids = RNG.normal(size=(40, 2)), np.arange(40) // 4
        np.savez(tmp_path / "a.npz", x=x, y=np.arange(40) % 2, ids=ids)
        data = build_dataset(DataConfig(name=f"npz:{tmp_path}/a.npz", validation_fraction=0.5))
        same = _load((x, np.arange(40) % 2, ids), label=None, validation_fraction=0.5)
        assert (data.split, fingerprint(data.train)) == ("id", fingerprint(same.train))

    def test_images_that_do_not_fit_are_named(self, tmp_path: Path) -> None:
        root = tmp_path / "images"

        def refused(message: str) -> None:
            with pytest.raises(DataError, match=message):
                build_dataset(DataConfig(name=f"folder:{root}"))

        refused("images cannot be read .No such file or directory.; check the path")
        (root / "cat").mkdir(parents=True)
        refused(r"holds no images as CLASS/NAME.png; put those of each class into a folder")
        for name, mode in (("a", "L"), ("b", "1")):
            pil.new(mode, (4, 3)).save(root / "cat" / f"{name}.png")
        (root / "dog").mkdir()
        pil.new("L", (4, 3), 255).save(root / "dog" / "a.bmp")
        grey = build_dataset(DataConfig(name=f"folder:{root}", validation_fraction=0))
        assert (grey.record_shape, sorted(grey.train.x[:, 0].tolist())) == ((1, 3, 4), [0.0, 0.0, 1.0])
        pil.new("RGB", (4, 3), (255, 0, 0)).save(root / "dog" / "b.png")
        colour = build_dataset(DataConfig(name=f"folder:{root}", validation_fraction=0))
        assert colour.record_shape == (3, 3, 4)
        pil.new("L", (5, 3)).save(root / "dog" / "c.png")
        refused(r"c.png has 5 x 3 pixels and .*a.png 4 x 3; bring all images to one size")
        pil.new("I;16", (4, 3)).save(root / "dog" / "c.png")
        refused("c.png has pixels of more than 8 bits")
        (root / "dog" / "c.png").write_bytes(b"no image")
        refused("c.png is no readable image")
        with pytest.raises(ValueError, match=f"did you mean 'folder:{root}'"):
            build_dataset(DataConfig(name=str(root)))
        with pytest.raises(ConfigError, match="data.label: y names a column of a table"):
            build_dataset(DataConfig(name=f"npz:{_saved(tmp_path)}", label=("y",)))

    def test_tabs_separate_the_columns_of_a_tsv(self, tmp_path: Path) -> None:
        FRAME.to_csv(tmp_path / "a.tsv", sep="\t", index=False)
        data = load_data(load_config({"data": {"name": f"csv:{tmp_path}/a.tsv", "label": "species"}}), None)
        assert data.columns == ("length", "count", "wild")

    @pytest.mark.parametrize(("name", "separator", "encoding"), [
        ("a.csv", ";", "utf-8-sig"),
        ("a.csv", "|", "utf-8"),
        ("a.csv", "\t", "utf-16"),
        ("a.csv.gz", ",", "utf-8"),
        ("a.csv", ";", "gzip"),
    ])  # fmt: skip
    def test_separator_encoding_and_compression_are_found(
        self, tmp_path: Path, name: str, separator: str, encoding: str
    ) -> None:
        frame = FRAME.rename(columns={"length": "length, in cm|m"})
        text = frame.to_csv(sep=separator, index=False)
        packed = name.endswith(".gz") or encoding == "gzip"
        content = gzip.compress(text.encode()) if packed else text.encode(encoding)
        (tmp_path / name).write_bytes(content)
        data = load_data(load_config({"data": {"name": f"csv:{tmp_path / name}", "label": "species"}}), None)
        assert data.columns == ("length, in cm|m", "count", "wild")
        assert fingerprint(data.train) == fingerprint(_load(FRAME).train)

    def test_labels_that_pandas_holds_as_floats_are_classes(self) -> None:
        numbers = np.arange(40) % 3
        frame = pandas.DataFrame(np.c_[FRAME["length"], numbers, FRAME["count"]])
        data = tables_module.own_dataset(DataConfig(label=("1",)), "index", frame, test=frame[:5])
        assert data.n_classes == 3
        assert sorted(torch.cat([data.train.y, data.validation.y]).tolist()) == sorted(numbers.tolist())
        assert data.test is not None
        assert data.test.y.tolist() == numbers[:5].tolist()
        for label in (2.0 * numbers, numbers + 0.5):  # gaps, and no whole numbers
            with pytest.raises((TypeError, ValueError), match="y must hold whole numbers"):
                tables_module.own_dataset(
                    DataConfig(label=("1",)), "index", frame.assign(**{"1": label}).drop(columns=1)
                )

    @pytest.mark.parametrize(("text", "message"), [
        ("a,a,y\n1,2,0\n3,4,1\n", "has several columns of the name 'a'; rename or drop them"),
        ("a,b,y\n1,2,0\n?,4,1\n", "column 'a' of {} lacks 1 of 2 values, the first in row 1"),
        ("a,b,y\n1,2,0\n3,4,1\nx,6,1\n", "'a' of {} holds 'x' in row 2 counted from 0, and features are"),
        ('a,b,y\n1,2,0\n"1,234.5",4,1\n', "holds '1,234.5' in row 1 counted from 0, and features are"),
        ("a;b;y\n1,5;2;0\n2,25;4;1\n", "holds '1,5' in row 0 counted from 0, and features are numbers"),
        ("a,b,y\n1,2,0\n3,4,1,9\n", "{} has 4 cells in line 3 and 3 in the lines before; give every row"),
        ("a,b,y\n1,2,0,9\n3,4,1,9\n", "{} has more cells in each row than names in its header"),
        ("a,b,y,z\n1,2,0\n3,4,1\n", "{} has 4 names in its header and nothing in the last column, 'z'"),
        ("ä,b,y\n1,2,0\n", "{} is no text in UTF-8"),
        ("a,b,y\n1,2,0\n3,-inf,1\n", "'b' of {} holds -inf in row 1 counted from 0, which float32"),
        ("a,b,y\n1e39,2,0\n3,4,1\n", "'a' of {} holds 1e+39 in row 0 counted from 0, which float32"),
        ("a\0,\0y\0\n\0", "{} is no text in UTF-8, because it holds zero bytes, as UTF-16 without its"),
        ("BZh91AY&SY", "{} is compressed by bzip2; unpack it, or compress it by gzip"),
        ("PK\x03\x04", "{} is a zip archive, as a spreadsheet is; save the table as CSV"),
        ("\x1f\x8b broken", "{} is a damaged gzip file"),
    ])  # fmt: skip
    def test_a_wrong_cell_or_row_is_named_by_place(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "a.csv"
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises((DataError, ValueError), match=re.escape(message.format(path))):
            load_data(load_config({"data": {"name": f"csv:{path}", "label": "y"}}), None)

    def test_unpacking_too_much_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"a,b,y\n" + b"1,2,0\n" * 10_000))
        monkeypatch.setattr(formats_module, "_TEXT_BYTES_ALLOWED", 1000)
        with pytest.raises(DataError, match=r"a.csv.gz unpacks to more than [\d,]+ bytes; give the file"):
            load_data(load_config({"data": {"name": f"csv:{tmp_path}/a.csv.gz", "label": "y"}}), None)

    def test_a_missing_library_names_its_extra(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pandas", None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'opusim\[data\]'"):
            load_data(load_config({"data": {"name": f"csv:{tmp_path}/a.csv", "label": "x"}}), None)


RECORD: dict[str, Any] = {
    "protection": {"kind": "record", "noise_multiplier": 1.0},
    "sampler": {"scheme": "poisson", "batch_size": 9},
}


@pytest.mark.parametrize("changes", [{}, RECORD])
def test_features_named_like_identifiers_are_told(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, changes: dict[str, Any]
) -> None:
    def told(*names: str) -> list[str]:
        frame = pandas.DataFrame(dict.fromkeys(names, FRAME["length"]) | {"y": np.arange(40) % 2})
        config = {**CONFIG, **changes, "data": {"n_classes": 2}}
        recwarn.clear()
        opusim.train(config, data=frame, label="y", folder=tmp_path / names[0])
        return [str(each.message) for each in recwarn if "identifiers" in str(each.message)]

    (text,) = told("patient_id", "age", "visitID")
    assert "trained on: patient_id, visitID; drop the column; if it is the ID of each record's user" in text
    assert "protection.unit = 'user' and data.user = 'patient_id' (--user)" in text
    assert told("humid", "grid") == []


@pytest.mark.parametrize("name", [
    *("id", "ID", "patient_id", "PATIENT_ID", "patientID", "userId", "user id", "record-id", "row2id", "größe_id"),
    *("uuid", "PatientUUID", "guid", "uid", "MRN", "hospital_mrn", "SSN"),
    *("patient", "Subject", "user", "person", "participant", "patientid", "SubjectID"),
])  # fmt: skip
def test_a_name_is_that_of_an_identifier(name: str) -> None:
    assert name in (features_named_as_identifiers(["age", name]) or "").split(": ")[1].split("; ")[0]


def test_other_names_are_not_those_of_identifiers() -> None:
    names = (
        "humid",
        "grid",
        "HUMID",
        "Grid",
        "liquid_fluid",
        "valid",
        "thyroid",
        "unpaid_bill",
        "idle",
        "id_score",
    )
    names += ("user_count", "users", "patients", "subjective", "personal", "num_patients", "0", "", "squid")
    assert features_named_as_identifiers(names) is None


@pytest.mark.parametrize(("data", "changes", "told"), [
    ({}, RECORD, True),
    ({"mean": 0.0, "std": 1.0}, RECORD, False),
    ({"mean": (0.5, 150.0), "std": (0.3, 90.0)}, RECORD, False),
    ({}, {}, False),
])  # fmt: skip
@pytest.mark.parametrize("size", [1.0, 305.0])
def test_a_protected_run_tells_that_features_are_used_as_they_are_whatever_they_are(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, size: float, data: Any, changes: Any, told: bool
) -> None:
    frame = FRAME[["length"]].assign(salary=size * FRAME["length"], y=np.arange(40) % 2)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    np.savez(tmp_path / "rows.npz", x=frame[["length", "salary"]].to_numpy(), y=frame["y"].to_numpy())
    for kind in ("csv", "npz"):
        label = {"label": "y"} if kind == "csv" else {}
        given = {"name": f"{kind}:{tmp_path / 'rows'}.{kind}", "n_classes": 2, **label, **data}
        recwarn.clear()
        opusim.train({**CONFIG, **changes, "data": given}, folder=tmp_path / kind)
        texts = [str(w.message) for w in recwarn if "features are used as they are" in str(w.message)]
        assert len(texts) == told
        assert all("give public constants data.mean and data.std" in text for text in texts)


@pytest.mark.parametrize(("size", "changes", "hinted"), [
    (305.0, {}, True),
    (5.0, {}, False),
    (305.0, {"data": {"standardise": "records"}}, False),
    (305.0, RECORD, False),
])  # fmt: skip
def test_features_in_units_of_their_own_give_a_hint_unless_they_are_private(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, size: float, changes: dict[str, Any], hinted: bool
) -> None:
    frame = FRAME[["length"]].assign(salary=size * FRAME["length"], y=np.arange(40) % 2)
    config = {**CONFIG, **changes}
    config["data"] = {"n_classes": 2, **config.get("data", {})}
    opusim.train(config, data=frame, label="y", folder=tmp_path / "run")
    texts = [str(warning.message) for warning in recwarn]
    assert any("'salary' has a standard deviation of" in text for text in texts) is hinted
