"""Optical random features: |R x|^2 of binary vectors on every packaged device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from opusim import open_device
from opusim.devices import base
from opusim.errors import CapabilityMissing, DeviceUnavailable
from opusim.medium.transmission import IMAGINARY_PLANE, REAL_PLANE, Medium

N_INPUTS, N_OUTPUTS = 37, 50
SIMULATED = ("ideal", "gaussian", "camera", "lightonml_simulated")


def frames(rows: int = 6) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 2, size=(rows, N_INPUTS), dtype=np.uint8)


def test_the_ideal_device_gives_the_square_of_its_complex_medium() -> None:
    x = torch.from_numpy(frames()).float()
    with open_device("ideal", n_inputs=N_INPUTS, n_outputs=N_OUTPUTS) as device:
        found = device.intensities(x)
        medium = device.description.medium
    p, q = (Medium(N_INPUTS, N_OUTPUTS, medium.seed, plane=n).dense() for n in (REAL_PLANE, IMAGINARY_PLANE))
    field = torch.complex(x @ p, x @ q) / 2**0.5
    torch.testing.assert_close(found, field.abs().square(), rtol=1e-6, atol=1e-6)


def test_an_intensity_has_the_mean_of_the_squared_norm() -> None:
    x = np.ones((1, N_INPUTS), dtype=np.uint8)
    with open_device("ideal", n_inputs=N_INPUTS, n_outputs=20_000) as device:
        numbers = device.intensities(x)[0].astype(np.float64) / N_INPUTS
    error = 5 * numbers.std() / len(numbers) ** 0.5
    assert abs(numbers.mean() - 1) < error
    assert abs(numbers.mean() - 1.1) > error
    assert abs(numbers.var() - 1) < 5 * np.sqrt(8 / len(numbers))  # of an exponential law: kurtosis 9


@pytest.mark.parametrize("sigma", [0.5, pytest.param(0.47, marks=pytest.mark.xfail(strict=True))])
def test_the_gaussian_device_adds_noise_of_its_law(sigma: float) -> None:
    x = frames(400)
    with (
        open_device("ideal", n_inputs=N_INPUTS, n_outputs=N_OUTPUTS) as clean,
        open_device("gaussian", n_inputs=N_INPUTS, n_outputs=N_OUTPUTS, noise={"sigma": sigma}) as noisy,
    ):
        left = noisy.intensities(x).astype(np.float64) - clean.intensities(x)
    assert abs(left.std() / 0.5 - 1) < 5 / np.sqrt(2 * left.size)
    assert abs(left.mean()) < 5 * 0.5 / np.sqrt(left.size)


@pytest.mark.parametrize("name", SIMULATED)
def test_every_device_counts_one_frame_a_vector_and_takes_packed_bits(name: str) -> None:
    x = frames()
    found = []
    for packed in (False, True):
        with open_device(name, n_inputs=N_INPUTS, n_outputs=N_OUTPUTS) as device:
            device.seek(0)
            before = device.usage.frames
            found.append(device.intensities(np.packbits(x, axis=1) if packed else x, packed=packed))
            assert device.usage.frames - before == len(x)
            assert device.intensities(x[:0]).shape == (0, N_OUTPUTS)
    assert found[0].dtype == np.float32
    np.testing.assert_array_equal(found[0], found[1])


def test_results_may_be_written_into_a_file_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = frames(11)
    with open_device("camera", n_inputs=N_INPUTS, n_outputs=N_OUTPUTS) as device:
        device.seek(0)
        whole = device.intensities(torch.from_numpy(x))
        assert isinstance(whole, torch.Tensor)
        assert whole.shape == (11, N_OUTPUTS)
        codes = np.lib.format.open_memmap(
            tmp_path / "codes.npy", mode="w+", dtype=np.uint8, shape=(11, N_OUTPUTS)
        )
        monkeypatch.setattr(base, "_MOST_INTENSITIES", 3 * N_OUTPUTS)
        assert device.intensities(x, out=codes) is codes
    exact = np.corrcoef(codes.ravel(), whole.numpy().ravel())[0, 1]
    assert exact > 0.9  # each row is that of its own vector
    assert np.corrcoef(codes[::-1].ravel(), whole.numpy().ravel())[0, 1] < exact


def test_the_matrix_of_lightonml_serves_both_its_transforms() -> None:
    x = frames()
    with open_device("lightonml_simulated", n_inputs=N_INPUTS, n_outputs=N_OUTPUTS) as device:
        numbers = device.intensities(x)
        b = device.require("matrix").matrix().double().numpy()
        again = device.intensities(x)
    np.testing.assert_array_equal(numbers, again)
    real = np.square(x @ b.T) / N_INPUTS  # lightonml's entries have variance 1 / n_inputs
    imaginary = numbers - real
    assert imaginary.min() > -1e-5
    assert np.all(imaginary[x.any(axis=1)].max(axis=1) > 0.01)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.full((2, N_INPUTS), 0.5), "x holds 0.5: a frame shows 0 or 1; encode .* such"),
        (np.full((2, N_INPUTS), np.inf, dtype=np.float32), "x holds inf: a frame shows 0 or 1"),
        (np.full((2, N_INPUTS), -1, dtype=np.int8), "x holds -1: a frame shows 0 or 1"),
        (np.full((2, N_INPUTS), np.nan), "x holds NaN: .* fill gaps first"),
        (np.zeros((2, N_INPUTS + 1)), r"x has shape \(2, 38\): must be \(any, 37\)"),
        (np.zeros(N_INPUTS), "takes one row for each vector"),
        (np.full((2, N_INPUTS), 255, dtype=np.uint8), "unsigned integers wrap -1"),
    ],
)
def test_what_is_no_frame_is_refused_in_one_line(x: np.ndarray, message: str) -> None:
    with (
        open_device("ideal", n_inputs=N_INPUTS, n_outputs=N_OUTPUTS) as device,
        pytest.raises(ValueError, match=message) as caught,
    ):
        device.intensities(x)
    assert "\n" not in str(caught.value)


def test_other_misuse_is_refused_by_name() -> None:
    x = frames()
    with open_device("ideal", n_inputs=N_INPUTS, n_outputs=N_OUTPUTS) as device:
        with pytest.raises(TypeError, match="x has dtype torch.float64: packed frames are uint8"):
            device.intensities(np.zeros((2, 5)), packed=True)
        with pytest.raises(ValueError, match=r"out has shape \(6, 49\): must be \(6, 50\)"):
            device.intensities(x, out=np.empty((6, 49), dtype=np.float32))
        with pytest.raises(TypeError, match="out has dtype int64: must be float32, or uint8"):
            device.intensities(x, out=np.empty((6, 50), dtype=np.int64))
        with pytest.raises(ValueError, match="out has dtype uint8, and the intensities are not whole"):
            device.intensities(x, out=np.empty((6, 50), dtype=np.uint8))
    with pytest.raises(DeviceUnavailable, match="is closed"):
        device.intensities(x)


def test_a_device_without_a_complex_medium_says_so() -> None:
    class Bench(base.NoisyDevice):
        described_noise = property(lambda self: None)  # type: ignore[assignment]
        reads_noise = True

        def _project(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def _seek(self, step: int) -> None:
            pass

    with open_device("gaussian") as device:
        description = device.description
    with (
        Bench(description, n_inputs=4, n_outputs=4) as bench,
        pytest.raises(CapabilityMissing, match="lacks the capability 'intensities'; camera, camera_fitted"),
    ):
        bench.intensities(np.zeros((1, 4)))
    with pytest.raises(TypeError, match=r"Bench.described_noise = None: must be a law .* raise NoiseUnknown"):
        _ = bench.noise
