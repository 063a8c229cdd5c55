"""Every packaged device keeps to the published contract, and the contract finds devices that do not."""

from typing import Any

import numpy as np
import pytest
import torch

from opusim import checks
from opusim.description.schema import DeviceDescription, load_description
from opusim.devices.base import NoisyDevice
from opusim.devices.camera import CameraDevice
from opusim.devices.registry import open_device
from opusim.devices.simulated import GaussianDevice
from opusim.errors import NoiseUnknown
from opusim.noise import GaussianNoise
from opusim.testing.contract import DeviceContract, scatter_fits


class TestIdeal(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device("ideal", n_inputs=12, n_outputs=40, **options)


class TestGaussian(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device("gaussian", n_inputs=12, n_outputs=40, **options)


class TestCamera(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device("camera", n_inputs=12, n_outputs=40, **options)


class TestCameraLowLight(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device("camera_low_light", n_inputs=12, n_outputs=40, **options)


class TestCameraHolography(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device("camera_holography", n_inputs=12, n_outputs=40, **options)


class TestLightonmlSimulated(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        pytest.importorskip("lightonml")
        return open_device("lightonml_simulated", n_inputs=12, n_outputs=40, **options)


class Crossbar(GaussianDevice):
    """An analog crossbar: 33 levels of conductance for each weight, and the device's noise at its outputs."""

    can = GaussianDevice.can | {"program", "multiply"}
    levels = 16

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        self._weights = self.medium.dense(torch.device("cpu")).T.clone()

    def program(self, matrix: torch.Tensor) -> torch.Tensor:
        checks.shape((self.n_outputs, self.n_inputs), matrix=matrix)
        checks.in_range(-1, 1, matrix=matrix)
        self._weights = matrix.mul(self.levels).round().div(self.levels)
        return self._weights

    def matrix(self) -> torch.Tensor:
        return self._weights

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        checks.in_range(-1, 1, x=x)
        return self._stream.add_to(x @ self._weights.T, self._std)

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        return self._stream.add_to(x @ self._weights.T, self._std)


class WishfulCrossbar(Crossbar):
    """Tells the matrix that was wanted, and uses another."""

    def program(self, matrix: torch.Tensor) -> torch.Tensor:
        super().program(matrix)
        return matrix


class BareCrossbar(Crossbar):
    """Multiplies without its noise."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        checks.in_range(-1, 1, x=x)
        return x @ self._weights.T


class StaleCrossbar(Crossbar):
    """Goes on with the matrix that it had."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        checks.in_range(-1, 1, x=x)
        return self._stream.add_to(x @ self.medium.dense(torch.device("cpu")), self._std)


class Boastful(GaussianDevice):
    """Declares what it has not."""

    can = GaussianDevice.can | {"multiply"}


class OtherMatrix(GaussianDevice):
    """Tells the matrix of another device."""

    def matrix(self) -> torch.Tensor:
        return super().matrix().flip(0)


class TestCrossbar(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        return Crossbar(load_description("gaussian"), n_inputs=12, n_outputs=40, **options).open()


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


class Lawless(GaussianDevice):
    """Hardware without a stated law of noise, whose readings are scaled by a factor."""

    factor = 1.0

    @property
    def described_noise(self) -> GaussianNoise:
        raise NoiseUnknown(f"device {self.name!r} states no law")

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        return super()._project(x) * self.factor


class Unscaled(Lawless):
    factor = 0.26


class Intensities(Lawless):
    """A camera whose pixels are taken for fields."""

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        return super()._project(x).square()


class Dark(Lawless):
    """Its shutter is closed."""

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        return self._draw((len(x), self.n_outputs))


class Batchwise(Lawless):
    """Every reading is scaled by its batch."""

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        found = super()._project(x)
        return found / (1 + found.std(dim=0).mean())


class Restless(Lawless):
    """Another matrix each time it is opened."""

    opened = 0

    def _open(self) -> None:
        type(self).opened += 1

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        return super()._project(x).roll(type(self).opened, dims=1)


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
        (Unscaled, "test_readings_are_linear_and_of_unit_entries"),
        (Intensities, "test_readings_are_linear_and_of_unit_entries"),
        (Dark, "test_readings_are_linear_and_of_unit_entries"),
        (Batchwise, "test_a_reading_does_not_depend_on_its_batch"),
        (Restless, "test_the_matrix_stays_over_opening_and_closing"),
        (Forgetful, "test_seek_repeats_a_step_in_experiment"),
        (Boastful, "test_it_can_do_what_it_declares_and_names_what_it_lacks"),
        (OtherMatrix, "test_the_matrix_is_that_of_the_readings"),
        (WishfulCrossbar, "test_a_programmed_matrix_is_told_as_realised"),
        (BareCrossbar, "test_products_are_those_of_the_told_matrix"),
        (StaleCrossbar, "test_products_are_those_of_the_told_matrix"),
    ],
)
def test_a_device_that_breaks_the_contract_is_found(broken: type[NoisyDevice], test: str) -> None:
    class Contract(DeviceContract):
        def open_window(self, **options: Any) -> NoisyDevice:
            return broken(load_description("gaussian"), n_inputs=12, n_outputs=40, **options).open()

    with pytest.raises((AssertionError, AttributeError)):
        getattr(Contract(), test)()


class TestLawless(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        return Lawless(load_description("gaussian"), n_inputs=12, n_outputs=40, **options).open()


class Incoherent(CameraDevice):
    """Adds intensities at some outputs as if light did not interfere, and more than that."""

    def _intensities(self, x: torch.Tensor) -> torch.Tensor:
        return super()._intensities(x) * (1 + x.sum(1, keepdim=True) ** 2)


def test_a_camera_whose_fields_do_not_add_is_found_and_scatter_judged_on_both_sides() -> None:
    class Contract(DeviceContract):
        def open_window(self, **options: Any) -> NoisyDevice:
            return Incoherent(load_description("camera"), n_inputs=12, n_outputs=40, **options).open()

    with pytest.raises(AssertionError):
        Contract().test_intensities_are_those_of_one_field()
    noise = np.random.default_rng(1).normal(size=(500, 40))
    ones = np.ones(40)
    assert scatter_fits(noise, ones, ones)
    assert scatter_fits(noise, 0.5 * ones, 2 * ones)
    assert not scatter_fits(noise, 1.1 * ones, 2 * ones)
    assert not scatter_fits(noise, 0.5 * ones, 0.9 * ones)
