"""What simulated devices keep to beyond the contract: they know their matrix and the variance of each reading."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_device

OpenAny = Callable[..., NoisyDevice]
X = torch.randint(-1, 2, (5, 12), generator=torch.Generator().manual_seed(2))


def test_the_matrix_has_the_window_s_shape_and_is_no_view_of_a_reading(open_any: OpenAny) -> None:
    with open_any() as device:
        device.project(X).zero_()
        assert device.matrix().shape == (40, 12)
        assert not torch.equal(device.matrix(), torch.zeros(40, 12))


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
