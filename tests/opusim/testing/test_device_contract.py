"""Every packaged device keeps to the published contract, and the contract finds devices that do not."""

from typing import Any

import numpy as np
import pytest
import torch

from opusim import NoisyDevice, checks, open_device
from opusim.description.schema import DeviceDescription, load_description
from opusim.devices.camera import CameraDevice
from opusim.devices.simulated import GaussianDevice
from opusim.errors import NoiseUnknown
from opusim.noise import GaussianNoise
from opusim.testing.contract import DeviceContract, scatter_fits
from tests.opusim.common import changed

WINDOW = {"n_inputs": 12, "n_outputs": 40}
PACKAGED = ["ideal", "gaussian", "camera", "camera_low_light", "camera_holography", "lightonml_simulated"]
PACKAGED += ["pcm", "mzi_mesh", "microring_bank"]  # the last one takes two chips for 12 inputs


class TestPackaged(DeviceContract):
    @pytest.fixture(autouse=True, params=PACKAGED)
    def _name(self, request: pytest.FixtureRequest) -> None:
        self.name = request.param
        if self.name == "lightonml_simulated":
            pytest.importorskip("lightonml")

    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device(self.name, **WINDOW, **options)


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
        return self._product(x)

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return self._stream.add_to(x @ self._weights.T, self._std)


class Lawless(GaussianDevice):  # hardware without a stated law of noise
    @property
    def described_noise(self) -> GaussianNoise:
        raise NoiseUnknown(f"device {self.name!r} states no law")


@pytest.mark.parametrize("kind", [Crossbar, Lawless])
class TestOwn(DeviceContract):
    @pytest.fixture(autouse=True)
    def _kind(self, kind: type[NoisyDevice]) -> None:
        self.kind = kind

    def open_window(self, **options: Any) -> NoisyDevice:
        return self.kind(load_description("gaussian"), **WINDOW, **options).open()


def quieter(self: Any, shape: tuple[int, ...]) -> torch.Tensor:
    return 0.95 * GaussianDevice._draw(self, shape)


def flipped(self: Any) -> torch.Tensor:
    return GaussianDevice.matrix(self).flip(0)


def incoherent(self: Any, x: torch.Tensor) -> torch.Tensor:
    return CameraDevice._intensities(self, x) * (1 + x.sum(1, keepdim=True) ** 2)


def repeating(self: Any, x: torch.Tensor) -> torch.Tensor:
    self._stream.seek(0)
    return GaussianDevice._project(self, x)


def by_its_batch(self: Any, x: torch.Tensor) -> torch.Tensor:
    found = GaussianDevice._project(self, x)
    return found / (1 + found.std(dim=0).mean())


def restless(self: Any) -> None:
    type(self).opened += 1


def wishful(self: Any, matrix: torch.Tensor) -> torch.Tensor:
    Crossbar.program(self, matrix)
    return matrix


def stale(self: Any, x: torch.Tensor) -> torch.Tensor:
    checks.in_range(-1, 1, x=x)
    return self._stream.add_to(x @ self.medium.dense(torch.device("cpu")), self._std)


def reading(change: Any) -> dict[str, Any]:
    """Readings that are changed by a function of a device and its reading."""
    return {"_project": lambda self, x: change(self, GaussianDevice._project(self, x))}


LINEAR, FRESH = "test_readings_are_linear_and_of_unit_entries", "test_every_reading_has_fresh_noise"
PRODUCTS, SEEK = "test_products_are_those_of_the_told_matrix", "test_seek_repeats_a_step_in_experiment"
BATCH, DRAWN = "test_a_reading_does_not_depend_on_its_batch", "test_the_noise_drawn_is_the_reported_one"
NOISY = "test_the_noise_of_readings_is_the_reported_one"
STAYS = "test_the_matrix_stays_over_opening_and_closing"
ROLLED = reading(lambda self, y: y.roll(self.opened, dims=1))
MATRIX, REALISED = "test_the_matrix_is_that_of_the_readings", "test_a_programmed_matrix_is_told_as_realised"
FIELD = "test_intensities_are_those_of_one_field"
DECLARES = "test_it_can_do_what_it_declares_and_names_what_it_lacks"
BROKEN: dict[str, tuple[type[NoisyDevice], dict[str, Any], str]] = {
    "5 % less noise than it says": (GaussianDevice, {"_draw": quieter}, DRAWN),
    "the same noise in every reading": (GaussianDevice, {"_project": repeating}, FRESH),
    "entries too large": (GaussianDevice, reading(lambda self, y: 1.5 * y), LINEAR),
    "more noise than it says": (GaussianDevice, reading(lambda self, y: 1.5 * y), NOISY),
    "units of its own": (Lawless, reading(lambda self, y: 0.26 * y), LINEAR),
    "pixels taken for fields": (Lawless, reading(lambda self, y: y.square()), LINEAR),
    "its shutter closed": (Lawless, reading(lambda self, y: self._draw(y.shape)), LINEAR),
    "every reading scaled by its batch": (Lawless, {"_project": by_its_batch}, BATCH),
    "another matrix at each opening": (Lawless, {"opened": 0, "_open": restless, **ROLLED}, STAYS),
    "not going back to a step": (GaussianDevice, {"_seek": lambda self, step: None}, SEEK),
    "declaring what it has not": (GaussianDevice, {"can": GaussianDevice.can | {"multiply"}}, DECLARES),
    "telling the matrix of another device": (GaussianDevice, {"matrix": flipped}, MATRIX),
    "telling the matrix that was wanted": (Crossbar, {"program": wishful}, REALISED),
    "products without noise": (Crossbar, {"_product": lambda self, x: x @ self._weights.T}, PRODUCTS),
    "multiplying by the matrix that it had": (Crossbar, {"multiply": stale}, PRODUCTS),
    "adding light that does not interfere": (CameraDevice, {"_intensities": incoherent}, FIELD),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_device_that_breaks_the_contract_is_found(fault: str) -> None:
    base, changes, test = BROKEN[fault]

    class Contract(DeviceContract):
        def open_window(self, **options: Any) -> NoisyDevice:
            description = load_description("camera" if base is CameraDevice else "gaussian")
            return broken(description, **WINDOW, **options).open()

    broken = changed(base, **changes)
    with pytest.raises(AttributeError if test == DECLARES else AssertionError):
        getattr(Contract(), test)()


def test_scatter_is_judged_on_both_sides() -> None:
    noise, ones = np.random.default_rng(1).normal(size=(500, 40)), np.ones(40)
    assert scatter_fits(noise, ones, ones)
    assert scatter_fits(noise, 0.5 * ones, 2 * ones)
    assert not scatter_fits(noise, 1.1 * ones, 2 * ones)
    assert not scatter_fits(noise, 0.5 * ones, 0.9 * ones)
