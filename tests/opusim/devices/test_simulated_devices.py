"""Simulated devices beyond the contract: matrix, variances, single outputs against a certified law, |R x|^2."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from opusim import NoisyDevice, open_device
from opusim.devices import base
from opusim.devices.baseline import SingleOutputTest
from opusim.errors import CapabilityMissing, DeviceUnavailable
from opusim.medium.transmission import IMAGINARY_PLANE, REAL_PLANE, Medium
from tests.opusim.common import refuses, ternary, with_threads

SIZES = {"n_inputs": 12, "n_outputs": 40}
OpenAny = Callable[..., NoisyDevice]
X = ternary(5, 12, 2)


def readings_have_the_law(excess: np.ndarray, std: float) -> bool:
    """Mean 0 and the stated variance at five standard errors."""
    n = excess.size
    mean_fits = abs(excess.mean()) <= 5 * std / np.sqrt(n)
    return bool(mean_fits and abs(np.mean(excess**2) - std**2) <= 5 * std**2 * np.sqrt(2 / n))


def test_realised_noise_is_the_reported_one(open_any: OpenAny, seed: int) -> None:
    n = 20_000
    with open_any(seed=seed) as device:
        x = X[:1].repeat(n // 40, 1)
        std, blank_std = (device.reading_variance(v).sqrt().numpy() for v in (X[:1], torch.zeros(1, 12)))
        device.project(x).zero_()  # the matrix is no view of a reading
        added = (device.project(x) - x.float() @ device.matrix().T).double().numpy()
        drawn = device.draw((n // 40, 40)).double().numpy()
        low, high = (np.sqrt(bound) for bound in device.noise.variance_bounds())
    assert np.all((low <= std * 1.1) & (std <= high * 1.1))  # the anchor's own error is in one of them
    if not std.any():
        assert not added.any()
        assert not drawn.any()
        return
    added, drawn = added / std, drawn / blank_std
    assert readings_have_the_law(added, 1.0)
    assert readings_have_the_law(drawn, 1.0)
    ratio = np.sqrt(1 + 10 * np.sqrt(2 / n))  # ten standard errors of the variance
    assert not readings_have_the_law(drawn * ratio, 1.0)
    assert not readings_have_the_law(drawn / ratio, 1.0)
    assert abs(np.corrcoef(added.ravel(), drawn.ravel())[0, 1]) < 5 / np.sqrt(n)


@pytest.mark.compiled
def test_threads_do_not_change_a_reading(open_any: OpenAny) -> None:
    def reading() -> torch.Tensor:
        with open_any(n_outputs=30_000) as device:
            return device.project(X)

    assert torch.equal(*with_threads(reading, 1, 3))


def test_noise_follows_seed_and_sigma_and_the_medium_neither() -> None:
    with open_device("gaussian", seed=1, **SIZES) as one, open_device("gaussian", seed=2, **SIZES) as two:
        assert torch.equal(one.matrix(), two.matrix())
        assert not torch.equal(one.project(X), two.project(X))
    one, two = (open_device("gaussian", noise={"sigma": sigma}, **SIZES) for sigma in (1.0, 2.7))
    with one, two:
        torch.testing.assert_close(two.draw((3, 40)), one.draw((3, 40)) * 2.7, rtol=1e-6, atol=0)
    none = {"noise": {"sigma": 0.0}}
    with open_device("ideal", **SIZES) as ideal, open_device("gaussian", **none, **SIZES) as silent:
        assert torch.equal(ideal.project(X), silent.project(X))
        assert torch.equal(ideal.project(X), X.float() @ ideal.matrix().T)
        assert not ideal.draw((3, 40)).any()


GAUSSIAN = math.sqrt(2)


def variances(rng: np.random.Generator, readings: int, true: np.ndarray) -> np.ndarray:
    return true * rng.chisquare(readings - 1, true.size) / (readings - 1)


@pytest.mark.parametrize(("readings", "outputs"), [(512, 64), (32, 1000)])
def test_an_output_without_noise_is_named_in_one_look(readings: int, outputs: int, seed: int) -> None:
    rng, true = np.random.default_rng(seed), np.ones(outputs)
    true[5] = 0.0
    test = SingleOutputTest(outputs, readings, GAUSSIAN, math.log(1e12))
    assert not test.observe(variances(rng, readings, np.ones(outputs)))
    assert test.observe(variances(rng, readings, true))
    assert test.output == 5
    assert test.suspect_looks == 1


def test_false_alarms_are_as_rare_as_stated_and_few_readings_find_nothing(seed: int) -> None:
    """At p = 0.05 in 50 looks, 200 trials alarm at most 10 + 5 standard errors (15) times; weaker noise always does."""
    rng, alarms = np.random.default_rng(seed), {1.0: 0, 0.7: 0}
    for true in alarms:
        for _ in range(200):
            test = SingleOutputTest(16, 32, GAUSSIAN, math.log(50 / 0.05))
            alarms[true] += any(test.observe(variances(rng, 32, np.full(16, true))) for _ in range(50))
    assert alarms[1.0] <= 10 + 5 * math.sqrt(200 * 0.05 * 0.95)
    assert alarms[0.7] == 200
    assert math.isnan(SingleOutputTest(1000, 4, 4.0, math.log(1e12)).smallest(1))


@pytest.mark.parametrize("looks", [1, 8])
def test_the_stated_smallest_loss_is_found(looks: int, seed: int) -> None:
    """Found with probability 0.99: of 300 trials 297 +- 5 standard errors; a third of that loss is not."""
    rng, level = np.random.default_rng(seed), math.log(1e12)
    loss = SingleOutputTest(64, 512, GAUSSIAN, level).smallest(looks)
    assert 0 < loss < 0.6
    found = {}
    for share in (loss, loss / 3):
        true = np.ones(64)
        true[7] = 1 - share
        tests = [SingleOutputTest(64, 512, GAUSSIAN, level) for _ in range(300)]
        found[share] = sum(any(t.observe(variances(rng, 512, true)) for _ in range(looks)) for t in tests)
    assert found[loss] >= 297 - 5 * math.sqrt(300 * 0.01 * 0.99)
    assert found[loss / 3] < 150


N_INPUTS, N_OUTPUTS = 37, 50
SIMULATED = ("ideal", "gaussian", "camera", "lightonml_simulated")


def frames(rows: int = 6) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 2, size=(rows, N_INPUTS), dtype=np.uint8)


def test_intensities_are_squares_of_a_complex_medium_with_their_mean() -> None:
    x = torch.from_numpy(frames()).float()
    with open_device("ideal", n_inputs=N_INPUTS, n_outputs=N_OUTPUTS) as device:
        found = device.intensities(x)
        medium = device.description.medium
    p, q = (Medium(N_INPUTS, N_OUTPUTS, medium.seed, plane=n).dense() for n in (REAL_PLANE, IMAGINARY_PLANE))
    field = torch.complex(x @ p, x @ q) / 2**0.5
    torch.testing.assert_close(found, field.abs().square(), rtol=1e-6, atol=1e-6)
    x = np.ones((1, N_INPUTS), dtype=np.uint8)
    with open_device("ideal", n_inputs=N_INPUTS, n_outputs=20_000) as device:
        numbers = device.intensities(x)[0].astype(np.float64) / N_INPUTS
    error = 5 * numbers.std() / len(numbers) ** 0.5
    assert abs(numbers.mean() - 1) < error < abs(numbers.mean() - 1.1)
    assert abs(numbers.var() - 1) < 5 * np.sqrt(8 / len(numbers))  # of an exponential law: kurtosis 9


@pytest.mark.parametrize("sigma", [0.5, pytest.param(0.47, marks=pytest.mark.xfail(strict=True))])
def test_the_gaussian_device_adds_noise_of_its_law(sigma: float) -> None:
    x = frames(400)
    window, noise = {"n_inputs": N_INPUTS, "n_outputs": N_OUTPUTS}, {"sigma": sigma}
    with open_device("ideal", **window) as clean, open_device("gaussian", noise=noise, **window) as noisy:
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
        codes = np.memmap(tmp_path / "codes", mode="w+", dtype=np.uint8, shape=(11, N_OUTPUTS))
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
    with open_device("ideal", n_inputs=N_INPUTS, n_outputs=N_OUTPUTS) as device:
        refuses(ValueError, message, device.intensities, x)


def test_other_misuse_is_refused_by_name() -> None:
    x = frames()
    with open_device("ideal", n_inputs=N_INPUTS, n_outputs=N_OUTPUTS) as device:
        wide, floats, integers = np.zeros((2, 5)), np.empty((6, 49), np.float32), np.empty((6, 50), np.int64)
        refuses(
            TypeError, "dtype torch.float64: packed frames are uint8", device.intensities, wide, packed=True
        )
        refuses(ValueError, r"out has shape \(6, 49\): must be \(6, 50\)", device.intensities, x, out=floats)
        refuses(TypeError, "out has dtype int64: must be float32, or", device.intensities, x, out=integers)
        codes = np.empty((6, 50), np.uint8)
        refuses(ValueError, "out has dtype uint8, and the .* not whole", device.intensities, x, out=codes)
    refuses(DeviceUnavailable, "is closed", device.intensities, x)


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
    with Bench(description, n_inputs=4, n_outputs=4) as bench:
        refuses(CapabilityMissing, "lacks .*'intensities'; camera", bench.intensities, np.zeros((1, 4)))
    refuses(TypeError, "described_noise = None: must be a law .* raise NoiseUnknown", lambda: bench.noise)
