"""What every packaged device keeps to; a new device joins by its name in the fixture `open_any`."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_device
from opusim.errors import DeviceUnavailable
from opusim.noise import GaussianNoise

OpenAny = Callable[..., NoisyDevice]
X = torch.randint(-1, 2, (5, 12), generator=torch.Generator().manual_seed(2))


def test_it_tells_what_it_is(open_any: OpenAny) -> None:
    with open_any() as device:
        assert (device.n_inputs, device.n_outputs) == (12, 40)
        assert device.name == device.description.name
        assert device.kind == device.description.kind
        assert device.noise.n_outputs == 40
        assert device.matrix().shape == (40, 12)
        assert device.is_open
    assert not device.is_open


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int8, torch.int64])
def test_each_dtype_gives_the_same_reading(open_any: OpenAny, dtype: torch.dtype) -> None:
    with open_any() as device:
        expected = device.project(X.float())
        device.seek(0)
        assert torch.equal(device.project(X.to(dtype)), expected)
        assert expected.shape == (5, 40)
        assert expected.dtype == torch.float32


def test_numpy_in_gives_numpy_out(open_any: OpenAny) -> None:
    with open_any() as device:
        expected = device.project(X).numpy()
        device.seek(0)
        got = device.project(X.numpy().astype(np.int8))
        assert isinstance(got, np.ndarray)
        np.testing.assert_array_equal(got, expected)
        locked = X.numpy().astype(np.float32)
        locked.flags.writeable = False
        assert device.project(locked).shape == (5, 40)
        assert device.project(np.zeros((0, 12))).shape == (0, 40)


def test_input_is_left_alone(open_any: OpenAny) -> None:
    x = X.float()
    with open_any() as device:
        y = device.project(x)
        y.zero_()
        assert torch.equal(x, X.float())
        assert not torch.equal(device.matrix(), torch.zeros(40, 12))


def test_seek_repeats_a_step_in_experiment(open_any: OpenAny) -> None:
    with open_any() as device:
        device.seek(3)
        first = device.project(X), device.draw((2, 40)), device.project(X)
        device.seek(4)
        device.project(X)
        device.seek(3)
        again = device.project(X), device.draw((2, 40)), device.project(X)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_usage_counts_the_frames_of_each_vector_and_survives_closing(open_any: OpenAny) -> None:
    with open_any() as device:
        opened = device.usage
        device.project(X)
        device.draw((3, 40))
        device.draw((2, 40))
        if isinstance(device.noise, GaussianNoise):
            device.draw((41,))
    vectors = 5 + 3 + 2 + 2 * isinstance(device.noise, GaussianNoise)
    frames, spent = device.description.frames, device.usage - opened
    assert spent.frames == frames.frames_per_projection * vectors
    assert spent.seconds == pytest.approx(spent.frames * frames.frame_period_us * 1e-6)
    assert spent.joules == pytest.approx(spent.seconds * frames.power_w)


def test_a_closed_device_says_what_to_do(open_any: OpenAny) -> None:
    device = open_any()
    device.close()
    device.close()
    for use in (lambda: device.project(X), lambda: device.draw((1, 40)), lambda: device.seek(0)):
        with pytest.raises(DeviceUnavailable, match=r"is closed; call open\(\)"):
            use()
    assert device.open().open().project(X).shape == (5, 40)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (
            torch.full((1, 12), 0.5),
            ValueError,
            "x holds 0.5: a device shows -1, 0 or 1; encode real values first",
        ),
        (torch.full((1, 12), torch.nan), ValueError, "x holds NaN"),
        (torch.full((1, 12), 255, dtype=torch.uint8), ValueError, "unsigned integers wrap -1"),
        (np.full((1, 12), 2), ValueError, "x holds 2"),
        (torch.zeros(12), ValueError, r"x has shape \(12,\): must be \(any, 12\)"),
        (torch.zeros(1, 13), ValueError, r"x has shape \(1, 13\): must be \(any, 12\)"),
        (torch.zeros(1, 12, requires_grad=True), ValueError, r"x requires a gradient.*pass x.detach\(\)"),
        (torch.zeros(1, 12, dtype=torch.complex64), TypeError, "x has dtype torch.complex64: must be real"),
        (np.zeros((1, 12), dtype=complex), TypeError, "x has dtype complex128: must be real"),
        ([[0] * 12], TypeError, "must be Tensor or ndarray, not list"),
    ],
)
def test_bad_input_is_refused_by_name(
    open_any: OpenAny, x: object, error: type[Exception], message: str
) -> None:
    with open_any() as device:
        opened = device.usage.frames
        with pytest.raises(error, match=message):
            device.project(x)
        assert device.usage.frames == opened


def test_bad_steps_and_shapes_are_refused(open_any: OpenAny) -> None:
    with open_any() as device:
        with pytest.raises(ValueError, match="step = -1"):
            device.seek(-1)
        with pytest.raises(TypeError, match=r"length = 2.5: must be an integer"):
            device.draw((2.5,))


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
    before = torch.get_num_threads()
    readings = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with open_any(n_outputs=30_000) as device:
                readings.append(device.project(X))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(readings[0], readings[1])


@pytest.mark.parametrize("name", ["gaussian", "camera"])
def test_release_noise_is_not_repeated_by_seek(name: str) -> None:
    with open_device(name, mode="release", n_inputs=12, n_outputs=40) as device:
        first = device.project(X)
        device.seek(0)
        assert not torch.equal(device.project(X), first)


def test_noise_seed_changes_noise_but_not_the_medium() -> None:
    with (
        open_device("gaussian", n_inputs=12, n_outputs=40, seed=1) as one,
        open_device("gaussian", n_inputs=12, n_outputs=40, seed=2) as two,
    ):
        assert torch.equal(one.matrix(), two.matrix())
        assert not torch.equal(one.project(X), two.project(X))


def test_noise_scales_with_sigma() -> None:
    with (
        open_device("gaussian", n_inputs=12, n_outputs=40, noise={"sigma": 1.0}) as one,
        open_device("gaussian", n_inputs=12, n_outputs=40, noise={"sigma": 2.7}) as two,
    ):
        torch.testing.assert_close(two.draw((3, 40)), one.draw((3, 40)) * 2.7, rtol=1e-6, atol=0)


def test_zero_sigma_is_the_ideal_device() -> None:
    with (
        open_device("ideal", n_inputs=12, n_outputs=40) as ideal,
        open_device("gaussian", n_inputs=12, n_outputs=40, noise={"sigma": 0.0}) as silent,
    ):
        assert torch.equal(ideal.project(X), silent.project(X))
        assert torch.equal(ideal.project(X), X.float() @ ideal.matrix().T)
        assert not ideal.draw((3, 40)).any()
