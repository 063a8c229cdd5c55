"""A noise law of another package: stated by its device, read back by its name, credited by no theorem of ours."""

from __future__ import annotations

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
from opusim.devices.base import NoisyDevice
from opusim.devices.kinds import register_device
from opusim.noise import NoiseModel

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests" / "support" / "third_party_noise_law"
BENCH = ROOT / "tests" / "support" / "third_party_device" / "bench.toml"
SCALE = 0.3
GENERATOR = np.random.default_rng(2)
CONFIG: dict[str, Any] = {"epochs": 1, "threads": 1, "model": {"hidden": [8]}, "sampler": {"batch_size": 32}}


class BurstBench(NoisyDevice):
    """A device that states the law."""

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


def test_it_is_read_back_by_its_name(device: Path) -> None:
    with opusim.open_device(str(device), n_inputs=4, n_outputs=6) as opened:
        written = json.dumps(opened.noise.to_json())
    code = "import sys; from opusim import NoiseModel; import json\n"
    code += "print(NoiseModel.from_json(json.loads(sys.argv[1])).describe())"
    paths = os.pathsep.join([str(PACKAGE), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-c", code, written]
    read = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert read.stdout == "Laplace of scale 0.3\n", read.stderr


def test_a_device_of_that_law_trains(device: Path, tmp_path: Path) -> None:
    config = {**CONFIG, "device": {"name": str(device)}}
    run = opusim.train(config, data=records(), folder=tmp_path / "run")
    assert run.summary is not None
    assert "Laplace of scale 0.3" in run.folder.config_file.read_text()


def test_no_theorem_of_ours_credits_it(device: Path, tmp_path: Path) -> None:
    protection = {"kind": "record", "noise_multiplier": 1.0, "noise": "device"}
    config = {**CONFIG, "device": {"name": str(device)}, "data": {"n_classes": 3}, "protection": protection}
    with pytest.raises(opusim.ConfigError, match=r"\(Laplace of scale 0.3\), but that takes a Gaussian law"):
        opusim.train(config, data=records(), folder=tmp_path / "run")
