"""Noise models and their JSON; a law of another package is read back by its name and credited by no theorem."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import opusim
from opusim import NoisyDevice, register_device
from opusim.noise import (
    ConverterLatticeNoise,
    FluctuatingCountNoise,
    GaussianNoise,
    NoiseModel,
    PhotonCountNoise,
    SignalGaussianNoise,
)
from tests.opusim.common import refuses
from tests.support.discrete_noise import DiscreteNoise

ONES = np.ones((2, 3))
HALF = np.log([0.25, 0.5, 0.25])
MODELS = [
    GaussianNoise(std=0.1, n_outputs=5),
    GaussianNoise(std=np.array([0.1, 0.2, 1 / 3]), n_outputs=3),
    PhotonCountNoise(rate_low=np.array([[0.5, 1.0]]), rate_high=np.array([[2.7, 1.0]])),
    DiscreteNoise(values=np.array([-2.7, 0.0, 2.7]), log_masses=HALF),
    PhotonCountNoise(rate_low=ONES, rate_high=2.7 * ONES, weight=0.5 * ONES, added_variance=0.1, beta=0.01),
    FluctuatingCountNoise(
        rate_low=ONES, rate_high=2 * ONES, power_law="gaussian", power_rms=0.1, weight=ONES
    ),
    SignalGaussianNoise(std_low=0.04, std_high=0.04, n_outputs=5, beta=1e-6),
    ConverterLatticeNoise(step=0.1, std_low=0.04, std_high=0.09, conversions=3, clips=False, n_outputs=5),
    ConverterLatticeNoise(step=0.1, std_low=0.04, std_high=0.09, conversions=3, clips=True, n_outputs=5),
]
FLAT = {"rate_high": np.full(3, 2.0), "rate_low": np.ones(3), "weight": np.ones(3)}
LATTICE, FLUCTUATING = MODELS[-1].to_json(), MODELS[5].to_json()


@pytest.mark.parametrize("model", MODELS)
def test_json_round_trip_keeps_every_bit(model: NoiseModel) -> None:
    again = NoiseModel.from_json(json.loads(json.dumps(model.to_json())))
    assert again == model
    assert hash(again) == hash(model)
    assert again.describe() == model.describe()


def test_models_differ_by_law_and_number_and_laws_by_class_and_name() -> None:
    assert len(set(MODELS)) == len({model.summary()["digest"] for model in MODELS}) == len(MODELS)
    assert GaussianNoise(std=0.1, n_outputs=5) != GaussianNoise(std=0.1, n_outputs=6)
    assert GaussianNoise(std=0.1, n_outputs=5) != GaussianNoise(std=0.1000001, n_outputs=5)
    refuses(TypeError, "Wider: a law is a subclass", type, "Wider", (GaussianNoise,), {"law": "wider"})
    refuses(TypeError, "Nameless: names no law", type, "Nameless", (NoiseModel,), {})
    refuses(TypeError, "law = 'gaussian' is taken", type, "Gaussian", (NoiseModel,), {"law": "gaussian"})


def test_a_gaussian_law_scales_and_cannot_be_changed() -> None:
    noise = GaussianNoise(std=np.array([0.3, 0.1, 0.2]), n_outputs=3)
    assert noise.min_std == 0.1
    assert not noise.is_uniform
    np.testing.assert_array_equal(noise.scaled(-2.7).std, noise.std * 2.7)
    np.testing.assert_allclose(noise.scaled(2.7).variance(), noise.variance() * 2.7**2, rtol=1e-15)
    refuses(ValueError, "a gain is a finite constant other than 0", noise.scaled, 0.0)
    source = np.array([0.1, 0.2])
    noise = GaussianNoise(std=source, n_outputs=2)
    source[0] = 9.0
    assert noise.min_std == 0.1
    with pytest.raises(ValueError, match="read-only"):
        noise.std[0] = 9.0
    refuses(AttributeError, "cannot assign", setattr, noise, "std", 9.0)


def test_variances_are_those_of_the_law() -> None:
    low, high = MODELS[2].variance_bounds()
    np.testing.assert_array_equal(low, [[0.5, 1.0]])
    np.testing.assert_array_equal(high, [[2.7, 1.0]])
    low, high = MODELS[4].variance_bounds()
    np.testing.assert_allclose(low, 2 * 0.25 + 0.1)
    np.testing.assert_allclose(high, 2 * 0.25 * 2.7 + 0.1)
    assert float(MODELS[3].variance()) == pytest.approx(2.7**2 / 2, rel=1e-15)
    assert MODELS[3].mean() == 0.0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GaussianNoise(std=-0.1, n_outputs=1), "std = -0.1: must be finite and at least 0"),
        (lambda: GaussianNoise(std=np.ones(2), n_outputs=3), r"std has shape \(2,\): must be \(3\)"),
        (lambda: GaussianNoise(std=1.0, n_outputs=0), "n_outputs = 0: must be at least 1"),
        (lambda: PhotonCountNoise(rate_low=2.0, rate_high=1.0), "rate_high: must be at least rate_low"),
        (lambda: PhotonCountNoise(rate_low=np.ones(2), rate_high=1.0), "need one shape"),
        (lambda: DiscreteNoise(values=np.array([0.0, 0.0]), log_masses=np.log([0.5, 0.5])), "increasing"),
        (lambda: DiscreteNoise(values=np.array([0.0, 1.0]), log_masses=np.log([0.5, 0.4])), "sum to"),
        (lambda: DiscreteNoise(values=np.array([0.0, 1.0]), log_masses=np.array([0.0, -np.inf])), "mass 0"),
        (lambda: NoiseModel.from_json({**FLUCTUATING, **FLAT}), "frames from pixels"),
        (lambda: NoiseModel.from_json({"law": "laplace", "scale": 1.0}), "law = 'laplace': must be one of"),
    ],
)
def test_bad_numbers_are_named(build: object, message: str) -> None:
    refuses(ValueError, message, build)


BAD = [*zip([LATTICE] * 4, ("std_high", "std_low", "step", "conversions"), (0.01, -1.0, 0.0, 0), strict=True)]
BAD += [(FLUCTUATING, "power_law", "uniform"), *((FLUCTUATING, "power_rms", rms) for rms in (-0.1, 0.3))]
BAD += [(LATTICE, "beta", 1.0), (FLUCTUATING, "beta", 1.0), (FLUCTUATING, "rate_high", np.full((2, 3), 0.5))]


@pytest.mark.parametrize(("stored", "key", "value"), BAD)
def test_bad_numbers_of_a_stored_law_are_named(stored: dict[str, Any], key: str, value: Any) -> None:
    refuses(ValueError, f"^{key}", NoiseModel.from_json, {**stored, key: value})


ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests" / "support" / "third_party_noise_law"
BENCH = ROOT / "tests" / "support" / "third_party_device" / "bench.toml"
SCALE = 0.3
GENERATOR = np.random.default_rng(2)
CONFIG: dict[str, Any] = {"epochs": 1, "threads": 1, "model": {"hidden": [8]}, "sampler": {"batch_size": 32}}


class BurstBench(NoisyDevice):  # a device that states the law
    @property
    def described_noise(self) -> NoiseModel:
        return importlib.import_module("lab_laws").LaplaceNoise(scale=SCALE)

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        matrix = torch.randn(self.n_outputs, self.n_inputs, generator=torch.Generator().manual_seed(1))
        return x @ matrix.T + self._draw((len(x), self.n_outputs))

    def _draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.as_tensor(GENERATOR.laplace(scale=SCALE, size=shape), dtype=torch.float32)

    def _seek(self, step: int) -> None:
        """Noise of another reading each time, as hardware has it."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the description of the device, with the law's package on the path."""
    monkeypatch.syspath_prepend(PACKAGE)
    register_device("burst_bench", BurstBench)
    path = tmp_path / "burst.toml"
    path.write_text(BENCH.read_text().replace('"lab_bench"', '"burst_bench"'))
    return path


def records() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    y = np.arange(96) % 3
    return generator.random((96, 4)) + y[:, None], y


def test_a_law_of_another_package_is_read_back_trains_and_is_credited_by_no_theorem(
    device: Path, tmp_path: Path
) -> None:
    with opusim.open_device(str(device), n_inputs=4, n_outputs=6) as opened:
        written = json.dumps(opened.noise.to_json())
    code = "import sys; from opusim import NoiseModel; import json\n"
    code += "print(NoiseModel.from_json(json.loads(sys.argv[1])).describe())"
    paths = os.pathsep.join([str(PACKAGE), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-c", code, written]
    read = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert read.stdout == "Laplace of scale 0.3\n", read.stderr
    config = {**CONFIG, "device": {"name": str(device)}}
    run = opusim.train(config, data=records(), folder=tmp_path / "run")
    assert run.summary is not None
    assert "Laplace of scale 0.3" in run.folder.config_file.read_text()
    protection = {"kind": "record", "noise_multiplier": 1.0, "noise": "device"}
    config = {**CONFIG, "device": {"name": str(device)}, "data": {"n_classes": 3}, "protection": protection}
    told, options = (
        r"\(Laplace of scale 0.3\), but that takes",
        {"data": records(), "folder": tmp_path / "refused"},
    )
    refuses(opusim.ConfigError, told, opusim.train, config, **options)
