"""Media, devices and noise on an NVIDIA GPU against the CPU."""

import math
from typing import Any

import pytest
import torch

from opusim import open_device
from opusim.medium.transmission import Medium
from opusim.randomness.streams import noise_stream, philox_torch
from tests.opusim.common import ternary

COUNT = 2**20


@pytest.mark.parametrize("dense_limit_mib", [1024, 0])
def test_a_medium_and_its_projections_are_the_cpus(gpu: Any, dense_limit_mib: float, seed: int) -> None:
    medium = Medium(3001, 2055, 7, dense_limit_mib=dense_limit_mib)
    window = (range(13, 1901), range(5, 2990))
    assert torch.equal(medium.tile(*window, gpu).cpu(), medium.tile(*window))
    x = ternary(9, 3001, seed)
    assert torch.equal(medium.project(x.to(gpu)).cpu(), medium.project(x))


def test_philox_gives_the_cpus_words(gpu: torch.device) -> None:
    counters = torch.arange(2**32 - 5, 2**32, dtype=torch.int64)
    both = (philox_torch(each, 3, 2**32 - 1, 9, 2**64 - 1) for each in (counters.to(gpu), counters))
    for found, expected in zip(*both, strict=True):
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_noise_is_standard_normal_and_readings_share_none(gpu: torch.device, mode: str, seed: int) -> None:
    """Mean, variance, fourth moment and the correlation of two readings, each at five standard errors."""
    stream = noise_stream(mode, seed, "test")
    stream.seek(3)
    first, second = (stream.normal((COUNT,), device=gpu) for _ in range(2))
    assert first.device == gpu
    assert moments_are_normal(first)
    assert are_independent(first, second)
    stream.seek(4)
    assert are_independent(first, stream.normal((COUNT,), device=gpu))
    stream.seek(3)
    again = stream.normal((COUNT,), device=gpu)
    assert torch.equal(again, first) == (mode == "experiment")


def test_planted_fault_noise_that_is_too_small_or_repeated_is_found(gpu: torch.device, seed: int) -> None:
    stream = noise_stream("experiment", seed, "test")
    first = stream.normal((COUNT,), device=gpu)
    assert not moments_are_normal(0.99 * first)
    stream.seek(0)
    assert not are_independent(first, stream.normal((COUNT,), device=gpu))


def moments_are_normal(z: torch.Tensor) -> bool:
    """Whether the first, second and fourth moment are those of N(0, 1); the variances of z, z^2, z^4 are 1, 2, 96."""
    z = z.double()
    moments = ((z.mean(), 0.0, 1.0), ((z**2).mean(), 1.0, 2.0), ((z**4).mean(), 3.0, 96.0))
    return all(abs(float(found) - exact) < 5 * math.sqrt(var / len(z)) for found, exact, var in moments)


def are_independent(a: torch.Tensor, b: torch.Tensor) -> bool:
    return abs(float((a.double() * b.double()).mean())) < 5 / math.sqrt(len(a))


@pytest.mark.parametrize(
    "name", ["ideal", "gaussian", "camera", "camera_low_light", "camera_holography", "pcm"]
)
def test_a_device_reads_on_the_gpu_what_it_reads_on_the_cpu(gpu: torch.device, name: str, seed: int) -> None:
    """The mean of many readings is that of the CPU's device, at five standard errors of their difference."""
    readings, x = 400, ternary(4, 12, seed)
    with open_device(name, n_inputs=12, n_outputs=40, seed=5) as device:
        found = device.project(x.repeat(readings, 1).to(gpu))
        expected = device.project(x.repeat(readings, 1))
    assert found.device == gpu
    assert found.dtype == torch.float32
    rows = found.cpu().double().view(readings, 4, 40), expected.double().view(readings, 4, 40)
    spread = sum(part.var(dim=0) for part in rows) / readings
    difference = (rows[0] - rows[1]).mean(dim=0)
    if name == "ideal":
        assert torch.equal(*rows)
    else:
        assert (difference.abs() < 5 * spread.sqrt()).all()
        ratio = rows[0].var(dim=0).mean() / rows[1].var(dim=0).mean()
        assert abs(float(ratio) - 1) < 5 * math.sqrt(4 / (readings * 160))


@pytest.mark.parametrize("name", ["gaussian", "camera"])
def test_a_device_opened_on_the_gpu_has_its_matrix_there(gpu: torch.device, name: str) -> None:
    window = {"n_inputs": 12, "n_outputs": 40, "seed": 5}
    with open_device(name, torch_device=str(gpu), **window) as there, open_device(name, **window) as here:
        assert there.matrix().device == gpu
        torch.testing.assert_close(there.matrix().cpu(), here.matrix(), rtol=1e-5, atol=1e-5)
