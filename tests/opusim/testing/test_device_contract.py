"""Every packaged device keeps to the published contract, and the contract finds devices that do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from opusim.description.loading import load_description
from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_device
from opusim.devices.simulated import GaussianDevice
from opusim.testing.contract import DeviceContract, scatter_fits


class TestIdeal(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device("ideal", n_inputs=12, n_outputs=40, **options)


class TestGaussian(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device("gaussian", n_inputs=12, n_outputs=40, **options)


class TestGaussianTemperature(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device("gaussian_temperature", n_inputs=12, n_outputs=40, **options)


class TestCamera(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device("camera", n_inputs=12, n_outputs=40, **options)


class TestCameraLowLight(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device("camera_low_light", n_inputs=12, n_outputs=40, **options)


class TestLightonmlSimulated(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        pytest.importorskip("lightonml")
        return open_device("lightonml_simulated", n_inputs=12, n_outputs=40, **options)


class Quieter(GaussianDevice):
    """Has 5 % less noise than it says."""

    def _draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        return super()._draw(shape) * 0.95


class Repeating(GaussianDevice):
    """Gives every reading the same noise."""

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        self._stream.seek(0)
        return super()._project(x)


class Stretched(GaussianDevice):
    """Its entries are too large."""

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        return super()._project(x) * 1.5


class Forgetful(GaussianDevice):
    """Does not go back to a step."""

    def _seek(self, step: int) -> None:
        return


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Quieter, "test_the_noise_drawn_is_the_reported_one"),
        (Repeating, "test_every_reading_has_fresh_noise"),
        (Stretched, "test_readings_are_linear_and_of_unit_entries"),
        (Stretched, "test_the_noise_of_readings_is_the_reported_one"),
        (Forgetful, "test_seek_repeats_a_step_in_experiment"),
    ],
)
def test_a_device_that_breaks_the_contract_is_found(broken: type[NoisyDevice], test: str) -> None:
    class Contract(DeviceContract):
        def open_window(self, **options: Any) -> NoisyDevice:
            return broken(load_description("gaussian"), n_inputs=12, n_outputs=40, **options).open()

    with pytest.raises(AssertionError):
        getattr(Contract(), test)()


def test_scatter_is_judged_on_both_sides() -> None:
    noise = np.random.default_rng(1).normal(size=(500, 40))
    ones = np.ones(40)
    assert scatter_fits(noise, ones, ones)
    assert scatter_fits(noise, 0.5 * ones, 2 * ones)
    assert not scatter_fits(noise, 1.1 * ones, 2 * ones)
    assert not scatter_fits(noise, 0.5 * ones, 0.9 * ones)
