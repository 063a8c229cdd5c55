"""Central noise out of a device: its law, and which devices may give it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm

from opusim import open_device, training
from opusim.errors import ConfigError
from opusim.noise import GaussianNoise
from opusim.training.protections.base import DeviceNormals
from tests.support.discrete_noise import DiscreteNoise

N_OUTPUTS, SIZE = 50, 40_000
LIMIT = float(norm.isf(norm.sf(5.0) / 3))


def normals_of(seed: int, sigma: float) -> DeviceNormals:
    options = {"n_inputs": 3, "n_outputs": N_OUTPUTS, "seed": seed, "noise": {"sigma": sigma}}
    return DeviceNormals(open_device("gaussian", **options))


def deviation(numbers: torch.Tensor) -> float:
    """Of mean, variance and shape from N(0, 1), in standard errors (the shape: as the same tail probability)."""
    values = numbers.double().numpy().ravel()
    of_mean = abs(values.mean()) * len(values) ** 0.5
    of_variance = abs(values.var() - 1) / (2 / len(values)) ** 0.5
    return float(max(of_mean, of_variance, norm.isf(max(kstest(values, "norm").pvalue, 1e-300) / 2)))


@pytest.mark.parametrize("sigma", [0.01, 2.7, 300.0])
def test_numbers_are_standard_normal_whatever_the_devices_noise(sigma: float, seed: int) -> None:
    numbers = normals_of(seed, sigma).normal((SIZE // 7, 7))
    assert numbers.shape == (SIZE // 7, 7)
    assert numbers.dtype == torch.float32
    assert deviation(numbers) < LIMIT
    assert deviation(1.06 * numbers) > LIMIT  # planted: a device less noisy than it says
    assert deviation(numbers + 0.06) > LIMIT  # planted: blank frames that are not blank
    assert deviation(torch.sign(numbers)) > LIMIT  # planted: the right variance, another law


def test_added_noise_is_scaled_and_no_reading_is_used_twice(seed: int) -> None:
    normals = normals_of(seed, 0.3)
    noise = normals.add_to(torch.zeros(SIZE), 2.7)
    assert deviation(noise / 2.7) < LIMIT
    again = normals.add_to(torch.zeros(SIZE), 2.7)
    assert abs(float(np.corrcoef(noise.numpy(), again.numpy())[0, 1])) * SIZE**0.5 < 5


@pytest.mark.parametrize("shape", [(0,), (1,), (N_OUTPUTS,), (N_OUTPUTS + 1,), (3, 0), (2, 3, 5)])
def test_any_shape_is_filled(shape: tuple[int, ...]) -> None:
    assert normals_of(1, 0.3).normal(shape).shape == shape


def test_outputs_of_different_noise_are_each_brought_to_one(seed: int) -> None:
    """Divided output by output: by the smallest alone the variance would be that of no output."""
    stds = np.linspace(0.5, 3.0, N_OUTPUTS)
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, int]) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * torch.from_numpy(stds).float()

    noise = GaussianNoise(std=stds, n_outputs=N_OUTPUTS)
    device: Any = SimpleNamespace(noise=noise, n_outputs=N_OUTPUTS, draw=draw, credit_noise=lambda: None)
    numbers = DeviceNormals(device).normal((SIZE,))
    assert deviation(numbers) < LIMIT
    per_output = numbers.view(-1, N_OUTPUTS).double().var(dim=0).numpy()
    error = (2 * N_OUTPUTS / SIZE) ** 0.5
    assert np.max(np.abs(per_output - 1)) / error < norm.isf(norm.sf(5.0) / N_OUTPUTS)


def test_devices_without_a_gaussian_law_are_refused() -> None:
    noise = DiscreteNoise(values=np.array([-1.0, 1.0]), log_masses=np.log([0.5, 0.5]))
    discrete: Any = SimpleNamespace(name="coin", noise=noise, credit_noise=lambda: None)
    for device, message in (
        (open_device("ideal", n_inputs=3, n_outputs=5), "'ideal' .*standard deviation 0"),
        (discrete, "'coin' .*discrete"),
        (open_device("camera", n_inputs=3, n_outputs=5), "'camera' .*Poisson counts"),
    ):
        told = f"protection.noise.*{message}.*Gaussian law above 0; use 'digital'"
        with pytest.raises(ConfigError, match=told):
            DeviceNormals(device)  # fmt: skip


@pytest.mark.parametrize("kind", ["record", "label-amplified", "label-readout"])
def test_a_run_on_a_noiseless_device_is_refused(tmp_path: Path, kind: str) -> None:
    config = {
        "data": {"n_classes": 3}, "device": {"name": "ideal"}, "sampler": {"batch_size": 16},
        "protection": {"kind": kind, "epsilon": 3.0, "noise": "device"},
    }  # fmt: skip
    if kind != "label-readout":
        config["sampler"]["scheme"] = "poisson"
    data = np.random.default_rng(1).normal(size=(60, 5)), np.arange(60) % 3
    with pytest.raises(ConfigError, match="use 'digital'"):
        training.train(config, data=data, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
