"""A person's own arrays and module, runs read back, errors."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from opusim import training
from opusim.errors import ConfigError
from opusim.training.config.run import load_config
from opusim.training.data import from_arrays
from opusim.training.engine.session import train_on
from opusim.training.errors import DataError, RunFolderError, TrainingDiverged
from opusim.training.runs.run import evaluate_run

CONFIG = {"epochs": 2, "threads": 1, "model": {"hidden": [8]}, "sampler": {"batch_size": 16}}
Y = np.arange(60) % 3
DATA = np.random.default_rng(1).normal(size=(60, 5)) + 2.0 * Y[:, None], Y


def own_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("model", [
    own_model(),
    nn.Sequential(nn.Linear(5, 4), nn.Identity(), nn.Linear(4, 3)),
    nn.Sequential(OrderedDict(fc1=nn.Linear(5, 4), act=nn.GELU(), fc2=nn.Linear(4, 3, bias=False))),
], ids=["plain", "identity", "own names"])  # fmt: skip
def test_a_persons_module_is_trained_in_place_and_comes_back(tmp_path: Path, model: nn.Sequential) -> None:
    before, *_ = (parameter.detach().clone() for parameter in model.parameters())
    run = training.train(CONFIG, data=DATA, model=model, folder=tmp_path)
    assert not torch.equal(before, next(model.parameters()))
    back = training.load_run(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), back.model.parameters(), strict=True))
    x, y = DATA
    assert back.evaluate(x, y) == run.evaluate(x, y)
    classes = run.predict(x)
    assert (type(classes), classes.shape) == (np.ndarray, (60,))
    assert torch.equal(run.predict(torch.from_numpy(x)), torch.from_numpy(classes))


def test_frozen_and_shared_layers_are_left_to_autograd(tmp_path: Path) -> None:
    frozen = own_model()
    frozen[0].requires_grad_(False)
    shared = nn.Linear(5, 5)
    twice = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(5, 3))
    config = {key: value for key, value in CONFIG.items() if key != "model"}  # keys of the built network
    for number, model in enumerate((frozen, twice)):
        before = [parameter.clone() for parameter in model.parameters()]
        training.train(config, data=DATA, model=model, folder=tmp_path / str(number))
        for old, new in zip(before, model.parameters(), strict=True):
            assert torch.equal(old, new) != new.requires_grad


def test_a_known_data_set_is_evaluated_under_the_runs_own_constants(tmp_path: Path) -> None:
    config = {**CONFIG, "epochs": 5, "data": {"name": "digits", "mean": 0.1, "std": 0.2}}
    run = training.train(config, folder=tmp_path)
    assert evaluate_run(tmp_path)["accuracy"] == run.summary["test_accuracy"]


def test_the_folder_holds_what_the_run_was(tmp_path: Path) -> None:
    config = {**CONFIG, "data": {"mean": 2.0, "std": 3.0}}
    run = training.train(config, data=DATA, folder=tmp_path, settings=["device.noise.sigma=0.25"])
    assert (run.facts["device"]["noise"]["sigma"], run.facts["noise"]["law"]) == (0.25, "gaussian")
    assert "standard deviation 0.25" in run.facts["noise"]["description"]
    assert (run.config.threads, run.config.data.name) == (1, "arrays")
    assert run.facts["data"]["standardisation"]["mean"] == 2.0
    assert [record["epoch"] for record in run.metrics] == [1, 2]
    assert len(run.metrics[0]["alignment"]) == 2
    assert run.summary["frames"] == 2 * 2 * 54  # positive and negative frames, two epochs, 54 records
    with pytest.raises(DataError, match="user-supplied arrays.*--data npz:FILE"):
        evaluate_run(tmp_path)


def test_global_state_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    before, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    threads = torch.get_num_threads()
    training.train(CONFIG, data=DATA, folder=tmp_path)
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(before_numpy, np.random.get_state()[1])
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"device": {"name": "gausian"}}, ConfigError, "gausian"),
    ({"device": {"name": "gaussian", "noise": {"sigma": -1.0}}}, ConfigError, "sigma"),
    ({"device": {"name": "gaussian", "noise": {"sgma": 1.0}}}, ConfigError, "sgma"),
    ({"model": {"hidden": []}}, ValueError, "no hidden layer"),
    ({"device": {"name": "gaussian", "seed": 5}}, ConfigError, "seed"),
    ({"trainer": {"kind": "bp"}, "device": {"name": "gaussian", "nosie": 5}}, ConfigError, "device.*does nothing"),
    ({"sampler": {"batch_size": 256}}, ConfigError, "sampler.batch_size.*exceeds the 54 records that are trained on"),
    ({"torch_device": "cuda:99" if torch.cuda.is_available() else "cuda"}, ConfigError, "torch_device"),
    ({"torch_device": "abacus"}, ConfigError, "no torch device"),
    ({"device": {"name": "gaussian", "noise": {"sigma": 1e30}}}, ConfigError, "exceeds 1e.12"),
    (
        {"optimizer": {"lr": 9e3}, "model": {"hidden": [8, 8, 8], "activation": "relu"}}, TrainingDiverged,
        "start a new run with a lower optimizer.lr",
    ),
])  # fmt: skip
def test_bad_input_is_one_line(tmp_path: Path, change: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        training.train({**CONFIG, **change}, data=DATA, folder=tmp_path / "run")
    assert "\n" not in str(caught.value)
    if not issubclass(error, TrainingDiverged):
        good = training.train(CONFIG, data=DATA, folder=tmp_path / "run")  # the folder was not burnt
        assert good.summary is not None


def test_wrong_records_are_refused_by_a_run(tmp_path: Path) -> None:
    run = training.train(CONFIG, data=DATA, folder=tmp_path)
    x, y = DATA
    for use, given, error, message in (
        (run.predict, [x[:, :4]], ValueError, "4 features per record; the training records have 5"),
        (run.predict, [np.full((2, 5), np.nan)], ValueError, "NaN"),
        (run.evaluate, [x, y + 1], ValueError, "labels from 0 to 2"),
        (run.evaluate, [x, y + 0.5], TypeError, "whole numbers"),
        (run.evaluate, [x, y[1:]], ValueError, "60 records and y 59 labels"),
    ):
        with pytest.raises(error, match=message):
            use(*given)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="maps 6 inputs to 3 outputs.*5 features and 3 classes"):
        training.train(CONFIG, data=DATA, model=model, folder=tmp_path / "6")


def test_folders_without_a_run_are_named(tmp_path: Path) -> None:
    for ask in (training.load_run, lambda folder: training.train(folder=folder, resume=True)):
        with pytest.raises(RunFolderError, match="holds no run"):
            ask(tmp_path)


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path, reseal: Callable[[Path], None]) -> None:
    for name, width in (("small", 8), ("large", 9)):
        training.train({**CONFIG, "model": {"hidden": [width]}}, data=DATA, folder=tmp_path / name)
    files = (tmp_path.glob(f"{name}/checkpoints/*8.safetensors") for name in ("large", "small"))
    source, target = map(next, files)
    target.write_bytes(source.read_bytes())
    with pytest.raises(RunFolderError, match="or the checkpoint is of another run"):
        training.load_run(tmp_path / "small")
    reseal(tmp_path / "small")
    with pytest.raises(RunFolderError, match="another network: layer1.bias has shape .9. there and .8. here"):
        training.load_run(tmp_path / "small")


def test_records_are_not_priced_under_another_name() -> None:
    """Records named digits would pass for data whose number of classes is public."""
    protection = {"kind": "record", "epsilon": 3.0}
    config = load_config({"trainer": {"kind": "bp"}, "protection": protection, "sampler": {"batch_size": 8}})
    records = from_arrays(np.zeros((40, 4)), np.arange(40) % 2, validation_fraction=0.1, split_seed=0)
    with pytest.raises(ConfigError, match="data.name: 'digits' is not the name of the given data set"):
        train_on(config, records, None)
