"""Callbacks get what metrics.jsonl gets, and a release run sends no figure of its data."""

import io
import runpy
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opusim
from opusim import training
from opusim.errors import ConfigError
from opusim.training.engine.callbacks import Callback
from tests.support.command import opusim as told

ROOT = Path(__file__).parents[3]
CONFIG: dict[str, Any] = {
    "threads": 1, "epochs": 2, "trainer": {"kind": "bp"}, "sampler": {"batch_size": 12}, "data": {"n_classes": 3},
    "model": {"hidden": [4]},
}  # fmt: skip
DATA = np.random.default_rng(3).normal(size=(60, 5)), np.arange(60) % 3


class Heard(Callback):
    def __init__(self) -> None:
        self.epochs: list[dict[str, Any]] = []
        self.ends: list[Any] = []

    def on_epoch(self, record: dict[str, Any]) -> None:
        self.epochs.append(record)

    def on_end(self, summary: Any) -> None:
        self.ends.append(summary)


def test_callbacks_hear_of_epochs_and_of_the_end(tmp_path: Path, stop_at: Any) -> None:
    heard = Heard()
    run = training.train(CONFIG, data=DATA, folder=tmp_path / "a", callbacks=[heard])
    assert [record["epoch"] for record in heard.epochs] == [1, 2]
    assert heard.ends == [run.summary]
    with pytest.raises(KeyboardInterrupt):
        training.train(CONFIG, data=DATA, folder=tmp_path / "b", watcher=stop_at(3), callbacks=[heard])
    assert heard.ends[1:] == [None]


@pytest.mark.parametrize(("is_terminal", "progress"), [(True, True), (True, False), (False, True)])
def test_a_terminal_shows_a_bar(is_terminal: bool, progress: bool, tmp_path: Path, monkeypatch: Any) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr("sys.stderr", stream)
    training.train(CONFIG, data=DATA, folder=tmp_path / "run", progress=progress)
    shown = stream.getvalue()
    assert ("train bp" in shown and "10/10" in shown) == bool(shown) == (is_terminal and progress)


def test_keys_of_the_configuration_may_be_arguments(tmp_path: Path) -> None:
    run = training.train(CONFIG, data=DATA, folder=tmp_path / "run", epochs=1, optimizer={"lr": 0.5})
    assert (run.config.epochs, run.config.optimizer.lr, run.config.model.hidden) == (1, 0.5, (4,))
    with pytest.raises(ConfigError, match=r"epoch: .*epochs"):
        training.train(CONFIG, data=DATA, folder=tmp_path / "other", epoch=1)
    with pytest.raises(TypeError, match=r"model = {'hidden': \[8\]}: is a section .* opusim.train\({'model'"):
        training.train(CONFIG, data=DATA, folder=tmp_path / "other", model={"hidden": [8]})  # type: ignore[arg-type]
    with pytest.raises(opusim.RunFolderError, match="resumes under the configuration in its folder"):
        training.train(data=DATA, folder=tmp_path / "run", resume=True, epochs=3)


def test_every_callback_is_told_the_end(tmp_path: Path) -> None:
    """A logger whose server is gone must not leave the files of the others open."""

    class Failing(Callback):
        def on_end(self, summary: Any) -> None:
            raise OSError("no server")

    heard = Heard()
    with pytest.raises(OSError, match="no server"):
        training.train(CONFIG, data=DATA, folder=tmp_path, callbacks=[Failing(), heard])
    assert len(heard.ends) == 1


def test_a_release_run_sends_no_figure_of_its_data(tmp_path: Path) -> None:
    heard = Heard()
    protection = {"kind": "record", "noise_multiplier": 1.0}
    config = {**CONFIG, "mode": "release", "protection": protection}
    training.train(config, data=DATA, folder=tmp_path, callbacks=[heard])
    assert all(record.keys() == {"epoch", "step"} for record in heard.epochs)
    assert heard.ends[0].keys() == {"steps", "schema_version"} or heard.ends[0].keys() == {"steps"}


def test_the_example_of_a_logger_shows_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    example = runpy.run_path(str(ROOT / "examples" / "tensorboard_logger.py"))
    main, logger = itemgetter("main", "logger")(example)
    monkeypatch.chdir(tmp_path)
    assert isinstance(logger(), Callback)  # as --callback tensorboard_logger:logger calls it
    assert (tmp_path / "logs").is_dir()
    run = main(str(tmp_path / "shown"), folder=tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "shown")).Reload()
    for name in ("train_loss", "validation_accuracy", "alignment/1"):
        scalars = events.Scalars(name)
        assert [scalar.step for scalar in scalars] == [record["step"] for record in run.metrics]
        expected = [np.ravel(record[name.partition("/")[0]])[0] for record in run.metrics]
        assert [scalar.value for scalar in scalars] == pytest.approx(expected)


def test_commands_take_callbacks_by_their_import_path(tmp_path: Path) -> None:
    (tmp_path / "own_logger.py").write_text(
        "import opusim\nclass Logger(opusim.Callback):\n"
        "    def on_epoch(self, record):\n        print('logged', record['epoch'])\n"
    )
    command = ["train", "bp", "--epochs", "2", "--quiet", "--out", "run", "--callback"]
    for path, code, shown in (
        ("own_logger:Logger", 0, "logged 1\nlogged 2\nrun\n"),
        ("own_logger:print", 2, "--callback: 'own_logger:print' names nothing"),
        ("builtins:list", 2, "'builtins:list' returned a list; return an opusim.Callback"),
    ):
        found = told(*command, path, cwd=tmp_path)
        assert (found.returncode, shown in found.stdout + found.stderr) == (code, True), found


def test_former_loggers_name_the_example() -> None:
    with pytest.raises(AttributeError, match="write an opusim.Callback, as examples/tensorboard_logger.py"):
        opusim.WandbLogger  # noqa: B018
