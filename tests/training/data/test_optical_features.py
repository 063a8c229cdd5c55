"""Optical features and public maps of images as a stage of a run."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opusim
from opusim import open_device, training
from opusim.accounting.guarantee import NoGuarantee
from opusim.description.schema import load_description
from opusim.errors import ConfigError
from opusim.files import to_toml
from opusim.training.config.run import load_config
from opusim.training.data import load_dataset, public_maps
from opusim.training.data.public_maps import (
    HogMap,
    OpticalMap,
    PublicMap,
    RandomConvolutionMap,
    ScatteringMap,
    map_from_facts,
)
from opusim.training.engine.plan import RunPlan, load_data, with_own_inputs
from tests.support.private_loops import private_loop
from tests.support.run_folders import require_resumed_alike

CONFIG: dict[str, Any] = {
    "trainer": {"kind": "bp"}, "model": {"hidden": []}, "data": {"features": "optical:ideal", "n_features": 300},
    "optimizer": {"name": "adam", "lr": 0.01}, "epochs": 6,
}  # fmt: skip
PRIVATE: dict[str, Any] = {
    "protection": {"kind": "record", "epsilon": 8.0, "clip_norm": 1.0},
    "sampler": {"scheme": "poisson", "batch_size": 64},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(public_maps.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


def test_a_run_trains_on_the_devices_intensities(tmp_path: Path) -> None:
    run = training.train(CONFIG, folder=tmp_path / "run")
    facts = run.facts["data"]["features"]
    assert facts["public"]
    assert (facts["n_inputs"], facts["n_features"]) == (64, 300)
    assert run.n_features == 64
    test = load_dataset("digits", validation_fraction=0.1, split_seed=0).test
    with open_device("ideal", n_inputs=64, n_outputs=300) as device:
        wanted = device.intensities((test.x > 0).to(torch.uint8))
    mapped = OpticalMap.from_facts(facts).apply(test.x).float()
    torch.testing.assert_close(mapped * facts["spread"] + facts["centre"], wanted, rtol=2e-3, atol=0.1)
    found = training.load_run(tmp_path / "run").evaluate(*raw_digits())
    assert found["accuracy"] == pytest.approx(run.summary["test_accuracy"], abs=1e-9)
    plain = training.train({**CONFIG, "data": {}}, folder=tmp_path / "plain")
    assert plain.summary is not None
    assert run.summary["test_accuracy"] > 0.8


def raw_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the test digits as they are before standardisation."""
    data = load_dataset("digits", validation_fraction=0.1, split_seed=0)
    scale = data.standardisation
    return (data.test.x * scale.std + scale.mean).numpy(), data.test.y.numpy()


def test_same_records_are_mapped_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = training.train(CONFIG, folder=tmp_path / "first")
    files = sorted(cache.iterdir())
    assert len(files) == 3
    monkeypatch.setattr(OpticalMap, "blocks", lambda self, x: pytest.fail("mapped again"))
    second = training.train(CONFIG, folder=tmp_path / "second")
    assert second.summary == first.summary
    files[0].write_bytes(b"cut")
    monkeypatch.undo()
    monkeypatch.setenv(public_maps.CACHE_VARIABLE, str(cache.parent))
    third = training.train(CONFIG, folder=tmp_path / "third")
    assert third.summary == first.summary


def test_own_records_leave_no_copy(tmp_path: Path, cache: Path) -> None:
    x, y = raw_digits()
    training.train({**CONFIG, "epochs": 1}, data=(x, y), folder=tmp_path / "run")
    assert not cache.exists()


@pytest.mark.parametrize("device", ["gaussian", "camera"])
def test_a_resumed_run_has_the_noise_of_a_whole_one(device: str, tmp_path: Path, stop_at: type) -> None:
    config = {**CONFIG, "data": {"features": f"optical:{device}", "n_features": 50}, "epochs": 2}
    whole, resumed = require_resumed_alike(tmp_path, config, None, stop_at(5))
    assert resumed.summary == whole.summary


def test_a_private_run_on_public_features_is_proven(tmp_path: Path) -> None:
    run = training.train({**CONFIG, **PRIVATE, "epochs": 1}, folder=tmp_path / "run")
    proven = [guarantee for guarantee in run.guarantees if guarantee.status == "proven"]
    assert proven
    assert proven[0].epsilon <= 8.0 + 1e-6
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"]["features"]["public"]


@pytest.mark.parametrize(("data", "message"), [
    ({"features": "ideal"}, r"must be optical:DEVICE \(such as optical:ideal\)"),
    ({"features": "optical:"}, "must be optical:DEVICE"),
    ({"features": "optical:camra"}, "camra"),
    ({"n_features": 20}, "it needs data.features = 'optical:DEVICE'"),
    ({"features": "scattering:9"}, "scattering:J with J from 1 to 4"),
    ({"features": "hog:3"}, "hog or convolutions"),
    ({"features": "scattering:4"}, "images of at least 16 x 16 pixels"),
    ({"features": "convolutions", "n_features": 100}, "no multiple of 32"),
    ({"features": "scattering:1", "features_groups": 4}, "does not divide the 9 channels.*3, 9"),
    ({"features": "hog", "n_features": 20}, "'optical:DEVICE' or 'convolutions'"),
    ({"features": "hog", "features_threshold": 0.5}, "it needs data.features = 'optical:DEVICE'"),
    ({"features_groups": 4}, "it needs data.features"),
])  # fmt: skip
def test_wrong_keys_are_refused(data: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        training.train({**CONFIG, "data": data}, folder=tmp_path / "run")


@pytest.mark.parametrize("device", ["camera", "camera_fluctuating", "ideal"])
def test_no_record_changes_the_features_of_its_neighbours(device: str) -> None:
    """Noise of a fixed seed goes by places, which an added record moves and a changed one does not."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=(60, 9))

    def features(relation: str, rows: np.ndarray) -> torch.Tensor:
        facts = {
            "n_classes": 2, "features": f"optical:{device}", "n_features": 16, "validation_fraction": 0.0,
        }  # fmt: skip
        protection = {"kind": "record", "epsilon": 3.0, "relation": relation, "divisor": 20.0}
        stated = {"data": facts, "sampler": {"sampling_probability": 0.1}, "protection": protection}
        config = load_config({"trainer": {"kind": "bp"}, **stated})
        data = rows, np.arange(len(rows)) % 2
        config = with_own_inputs(config, data)
        return RunPlan.checked(config, load_data(config, data)).dataset.train.x

    before, after = (features("zero_out", np.vstack([row, x[1:]])) for row in (x[:1], np.full((1, 9), 9.0)))
    assert int((before != after).any(dim=1).sum()) == 1
    if device == "ideal":
        added = features("add_or_remove_one", np.vstack([x[:1] + 1, x]))
        assert torch.equal(added[1:], features("add_or_remove_one", x))
        return
    with pytest.raises(NoGuarantee, match="changes the features of all others"):
        features("add_or_remove_one", x)


def test_a_device_that_repeats_frames_joins_records(tmp_path: Path) -> None:
    """A record's features may then be those of the record before, whose clip does not bound that."""
    description = load_description("camera", {"camera": {"transfer": {"repeated": 0.2}}})
    file = tmp_path / "repeating.toml"
    file.write_text(to_toml(description.dump()))
    stated = {"features": f"optical:{file}", "n_features": 16, "n_classes": 2}
    x, y = np.random.default_rng(3).normal(size=(60, 9)), np.arange(60) % 2
    for protection in ({"kind": "record", "epsilon": 3.0}, {"kind": "label-release", "epsilon": 3.0}):
        kind = "bp" if protection["kind"] == "record" else "ridge"
        sampler = {"sampler": {"batch_size": 20}} if kind == "bp" else {}
        sections = {"trainer": {"kind": kind}, "data": stated, "protection": protection, **sampler}
        config = with_own_inputs(load_config(sections), (x, y))
        refused = pytest.raises(NoGuarantee, match="repeats frames") if kind == "bp" else nullcontext()
        with refused:
            RunPlan.checked(config, load_data(config, (x, y)))


def test_make_private_refuses_feedback_by_a_device_that_repeats_frames(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(torch.randn(40, 9), torch.arange(40) % 3), batch_size=10)
    net = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))
    camera = {"transfer": {"repeated": 0.2}}
    with open_device("camera", n_inputs=3, n_outputs=8, camera=camera) as device:
        model = opusim.FeedbackAlignment(net, points=["1"], device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="repeats frames"):
            private_loop(tmp_path / "loop", (model, optimizer, nn.CrossEntropyLoss(), loader))


IMAGE_CONFIG: dict[str, Any] = {**CONFIG, "data": {}, "epochs": 4}
KINDS: dict[str, dict[str, Any]] = {
    "scattering:1": {"features_groups": 9},
    "hog": {},
    "convolutions": {"n_features": 320, "features_groups": 4},
}


def test_a_constant_image_has_only_its_mean_in_scattering() -> None:
    """Wavelets have the mean 0, so that every channel but the first is 0; the first is the constant."""
    public = ScatteringMap(record_shape=(1, 16, 16), scale=2)
    found = public.apply(torch.full((3, 256), 2.0)).float().reshape(3, *public.mapped_shape)
    assert public.mapped_shape == (81, 4, 4)
    torch.testing.assert_close(found[:, 0], torch.full((3, 4, 4), 2.0), rtol=1e-3, atol=0)
    assert found[:, 1:].abs().max() < 1e-3


def test_random_convolutions_are_the_formula() -> None:
    public = RandomConvolutionMap(record_shape=(2, 8, 8), filters=3)
    with public.opened() as read:
        x = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(1))
        found, opposite = read(x), read(-x)
    assert found.shape == (2, *public.mapped_shape)
    assert found.min() >= 0
    torch.testing.assert_close(found[:, :3], opposite[:, 3:])
    # the filters of the seed that is fixed for good: features that are kept from earlier runs have them
    filters = torch.randn(3, 2, 5, 5, generator=torch.Generator().manual_seed(20260102)) / 50**0.5
    means = torch.nn.functional.adaptive_avg_pool2d(torch.nn.functional.conv2d(x, filters).clamp(min=0), 4)
    torch.testing.assert_close(found[:, :3], means)


def test_a_horizontal_gradient_falls_into_one_orientation() -> None:
    """The first bin holds gradients along a row."""
    public = HogMap(record_shape=(1, 16, 16))
    ramp = torch.arange(16.0).repeat(16, 1).reshape(1, -1)
    found = public.apply(ramp).float().reshape(*public.mapped_shape)
    by_bin = found.reshape(2, 2, 9, 3, 3).sum(dim=(0, 1, 3, 4))
    assert by_bin[0] > 0.99 * by_bin.sum()


@pytest.mark.parametrize("public", [
    ScatteringMap(record_shape=(3, 16, 16), scale=1, groups=9),
    HogMap(record_shape=(1, 16, 12), groups=6),
    RandomConvolutionMap(record_shape=(3, 12, 12), filters=8, groups=4),
])  # fmt: skip
def test_a_map_reads_each_record_apart(public: PublicMap) -> None:
    """The features of a record are the same whatever the other records are, and a group has mean 0 and variance 1."""
    x = 20 * torch.rand(1003, public.n_inputs, generator=torch.Generator().manual_seed(0))
    whole = public.apply(x)
    assert whole.dtype == torch.float16
    torch.testing.assert_close(public.apply(x[1001:])[0], whole[1001], rtol=1e-3, atol=1e-3)
    assert public.groups is not None
    grouped = whole.double().reshape(1003, public.groups, -1)
    assert grouped.mean(dim=2).abs().max() < 2e-3
    assert (grouped.var(dim=2, correction=0) - 1).abs().max() < 2e-2
    other = map_from_facts(public.facts)
    assert other == public
    assert torch.equal(other.apply(x[:5]), public.apply(x[:5]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_a_map_learns_and_evaluates_as_it_trained(kind: str, tmp_path: Path, cache: Path) -> None:
    config = {**IMAGE_CONFIG, "data": {"features": kind, **KINDS[kind]}}
    run = training.train(config, folder=tmp_path / "run")
    assert run.summary["test_accuracy"] > (0.5 if kind == "hog" else 0.85)  # 36 numbers of an 8 x 8 image
    found = training.load_run(tmp_path / "run").evaluate(*raw_digits())
    assert found["accuracy"] == pytest.approx(run.summary["test_accuracy"], abs=2e-3)
    assert len(list(cache.iterdir())) == 3
    again = training.train(config, folder=tmp_path / "again")
    assert again.summary == run.summary


def test_a_full_disk_costs_the_cache(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**IMAGE_CONFIG, "data": {"features": "convolutions", "n_features": 64}, "epochs": 1}
    whole = training.train(config, folder=tmp_path / "whole")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for file in cache.iterdir():
        file.unlink()
    monkeypatch.setattr(np.lib.format, "write_array_header_1_0", full)
    cut = training.train(config, folder=tmp_path / "cut")
    assert cut.summary == whole.summary
    assert not list(cache.iterdir())


def test_a_hidden_layer_trains_through_the_device_on_features(tmp_path: Path) -> None:
    network = {"trainer": {"kind": "pdfa"}, "device": {"name": "ideal"}, "model": {"hidden": [32]}}
    config = {**IMAGE_CONFIG, **PRIVATE, **network, "data": {"features": "hog"}}
    run = training.train(config, folder=tmp_path / "run")
    assert [guarantee.status for guarantee in run.guarantees].count("proven")


def test_features_beyond_half_precision_are_refused() -> None:
    x = np.zeros((40, 64), dtype=np.float32)
    x[3] = 1e9
    public = ScatteringMap(record_shape=(1, 8, 8), scale=1)
    with pytest.raises(ConfigError, match="exceeds 65504"):
        public.apply(torch.from_numpy(x))
