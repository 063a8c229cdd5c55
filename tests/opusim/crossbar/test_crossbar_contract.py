"""Crossbars, ours and that of docs/extending.md, keep to the contract; their noise is worth no privacy."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opusim import ConfigError, NoGuarantee, NoisyDevice, convert, load_description, open_device
from opusim.accounting.mechanisms.readings import DeviceReadings, device_readings_guarantee
from opusim.crossbar.device import CrossbarDevice
from opusim.devices import kinds
from opusim.noise import ConverterLatticeNoise, NoiseModel, SignalGaussianNoise
from opusim.testing.contract import DeviceContract
from opusim.training.protections.base import creditable_law
from tests.opusim.common import EXACT, changed, refuses

PACKAGE = Path(__file__).parents[2] / "support" / "third_party_crossbar"
FILE = PACKAGE / "lab_crossbar.toml"
sys.path.insert(0, str(PACKAGE))
from lab_crossbar import LabCrossbar  # noqa: E402

sys.path.remove(str(PACKAGE))


WINDOW = {"n_inputs": 12, "n_outputs": 40}
SMALL = load_description(FILE, {"n_inputs": 8, "n_outputs": 16})
OPENED = {
    "exact": lambda **options: open_device(
        "reram", **WINDOW, crossbar={"converter": EXACT["converter"], "relaxation": None}, **options
    ),
    "lab": lambda **options: LabCrossbar(load_description(FILE), **WINDOW, **options).open(),
    "six lab chips": lambda **options: LabCrossbar.for_window(SMALL, **WINDOW, **options).open(),
}
"""A matrix without converters and programming noise; another package's crossbar, which drifts; six small ones."""


class TestCrossbars(DeviceContract):
    @pytest.fixture(autouse=True, params=OPENED)
    def _opened(self, request: pytest.FixtureRequest) -> None:
        self.open_window = OPENED[request.param]


def without_drift(self: Any, elapsed_s: float) -> torch.Tensor:
    product = self._forward()
    weights = CrossbarDevice._wait(self, elapsed_s)
    self._product = product
    return weights


def before_the_wait(self: Any, x: torch.Tensor) -> torch.Tensor:
    self._now = self._programmed
    return LabCrossbar._multiply(self, x)


def blank_noise(self: Any) -> SignalGaussianNoise:
    low = LabCrossbar.described_noise.fget(self).std_low
    return SignalGaussianNoise(std_low=low, std_high=low, n_outputs=self.n_outputs)


HALF_NOISE = {"programming_std": lambda self, matrix: CrossbarDevice.programming_std(self, matrix) / 2}
BLANK = {"reading_variance": lambda self, x: CrossbarDevice.reading_variance(self, torch.zeros_like(x))}
FINE = {"converter": property(lambda self: type(self._converter)())}
FLIPPED = {"_multiply_transposed": lambda self, x: CrossbarDevice._multiply_transposed(self, x.flip(1))}
QUIET = {"described_noise": property(blank_noise)}
PRODUCTS = "test_products_are_those_of_the_told_matrix"
TIME = "test_time_changes_the_told_matrix_and_nothing_else"


@pytest.mark.parametrize(
    ("base", "changes", "converter", "test"),
    [
        (CrossbarDevice, HALF_NOISE, {}, "test_a_programmed_matrix_is_told_as_realised"),
        (CrossbarDevice, BLANK, {}, "test_the_noise_of_a_product_is_the_one_told_for_its_input"),
        (CrossbarDevice, FINE, {"dac_bits": 3}, PRODUCTS),  # states a finer converter than it has
        (CrossbarDevice, {"_wait": without_drift}, {}, TIME),
        (CrossbarDevice, FLIPPED, {}, "test_transposed_products_are_those_of_the_told_matrix"),
        (LabCrossbar, {"_multiply": before_the_wait}, {}, TIME),
        (LabCrossbar, QUIET, {}, PRODUCTS),
        (LabCrossbar, QUIET, {}, "test_the_noise_of_readings_is_the_reported_one"),
    ],
)
def test_a_broken_crossbar_is_found(base: type, changes: dict, converter: dict, test: str) -> None:
    class Contract(DeviceContract):
        def open_window(self, **options: Any) -> NoisyDevice:
            source = FILE if base is LabCrossbar else "pcm"
            described = load_description(source, {"crossbar": {"converter": converter}} if converter else {})
            return changed(base, **changes)(described, **WINDOW, **options).open()

    with pytest.raises(AssertionError):
        getattr(Contract(), test)()


def test_a_chip_holds_its_matrix_until_it_is_programmed_again() -> None:
    for mode in ("experiment", "release"):
        with open_device("pcm", n_inputs=20, n_outputs=30, mode=mode, seed=1) as one:
            with open_device("pcm", n_inputs=20, n_outputs=30, mode=mode, seed=2) as other:
                assert torch.equal(one.matrix(), other.matrix())
                assert torch.equal(one.wait(3600.0), other.wait(3600.0))
            with open_device("pcm", n_inputs=20, n_outputs=30, medium={"seed": 5}) as another:
                assert not torch.equal(one.matrix(), another.matrix())
    matrix = torch.linspace(-1, 1, 600).reshape(30, 20)
    with open_device("pcm", n_inputs=20, n_outputs=30) as device:
        first = device.program(matrix)
        device.wait(60.0)
        assert device.elapsed_s == 60.0
        second = device.program(matrix)
        assert device.elapsed_s == 0.0
        assert not torch.equal(first, second)
        assert device.usage.programmings == 2


def test_usage_counts_programmings_products_and_their_cost() -> None:
    with open_device("pcm", n_inputs=20, n_outputs=30) as device:
        device.program(torch.zeros(30, 20))
        written = device.usage
        assert (written.programmings, written.frames) == (1, 0)
        assert written.seconds == pytest.approx(20 * 100e-6)
        assert written.joules == pytest.approx(2 * 600 * 10e-9)
        device.multiply(np.zeros((7, 20)))
        device.require("multiply_transposed").multiply_transposed(torch.zeros(5, 30))
        spent = device.usage - written
        assert (spent.programmings, spent.frames) == (0, 12)
        assert spent.seconds == pytest.approx(12 * 0.133e-6)
        assert device.usage.from_json(device.usage.to_json()) == device.usage


def test_ternary_products_do_not_depend_on_the_batch() -> None:
    """Their sums are exact, so that not even a code at a rounding edge moves."""
    x = torch.randint(-1, 2, (64, 700), generator=torch.Generator().manual_seed(1)).float()
    quiet = {"product": {"output_std": 0.0, "current_std": 0.0, "ir_drop": 0.0}}
    with open_device("pcm", n_inputs=700, n_outputs=90, crossbar=quiet) as device:
        together = device.project(x)
        assert torch.equal(together, torch.cat([device.project(part) for part in x.split(7)]))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"tile_inputs": 513}, "crossbar.tile_inputs: .*512"),
        ({"converter": {"adc_bound": None}}, "adc_bits and adc_bound belong together"),
        ({"product": {"ir_drop_conductance_ratio": None}}, "missing; ir_drop needs it"),
        ({"programming_us": [-1.0]}, "is below 0 for some g"),
        ({"drift": None}, "needs drift, whose t0_s"),
        ({"relaxation": {"times_s": [1.0], "polynomials_us": [[1.0]]}}, "give one of them"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(section: dict[str, Any], message: str) -> None:
    refuses(ValueError, message, load_description, "pcm", {"crossbar": section})


def test_another_packages_crossbar_runs_and_may_not_claim_privacy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_registered", {"lab_crossbar": LabCrossbar})
    with open_device(FILE, n_inputs=12, n_outputs=40) as device:
        refuses(ConfigError, r"noise of device 'lab_crossbar' \(Gaussian", creditable_law, device)
        with pytest.raises(NoGuarantee, match="noise law 'signal_gaussian': no theorem"):
            device_readings_guarantee(DeviceReadings(noise=device.noise, readings=1, distance=1.0), 1e-5)
    torch.manual_seed(1)
    layer = torch.nn.Linear(20, 30)
    with convert(layer, FILE) as analog:
        analog.wait(3600.0)
        x = torch.randn(400, 20)
        found, expected = analog(x).detach(), layer(x).detach()
        assert float((found - expected).abs().mean()) < 0.5 * float(expected.abs().mean())


LAWS = [
    SignalGaussianNoise(std_low=0.04, std_high=0.09, n_outputs=5),
    SignalGaussianNoise(std_low=0.04, std_high=0.04, n_outputs=5, beta=1e-6),
    ConverterLatticeNoise(step=0.1, std_low=0.04, std_high=0.09, conversions=3, clips=False, n_outputs=5),
    ConverterLatticeNoise(step=0.1, std_low=0.04, std_high=0.09, conversions=3, clips=True, n_outputs=5),
]


@pytest.mark.parametrize("law", LAWS)
def test_an_accountant_refuses_the_law_by_name(law: NoiseModel) -> None:
    with pytest.raises(NoGuarantee, match=f"noise law {law.law!r}: no theorem"):
        device_readings_guarantee(DeviceReadings(noise=law, readings=1, distance=1.0), 1e-5)


@pytest.mark.parametrize("name", ["pcm", "microring_bank"])
def test_a_protection_does_not_credit_a_crossbar(name: str) -> None:
    with open_device(name, n_inputs=4, n_outputs=6) as device:
        refuses(ConfigError, f"noise of device '{name}' .*takes a Gaussian law", creditable_law, device)


def test_bounds_are_those_of_the_spread_and_of_the_lattice() -> None:
    low, high = LAWS[0].variance_bounds()
    assert (float(low), float(high)) == pytest.approx((0.04**2, 0.09**2))
    assert float(LAWS[3].variance_bounds()[0]) == 0.0
    low, high = LAWS[2].variance_bounds()
    assert 3 * 0.04**2 < float(low) < 3 * (0.04**2 + 0.1**2 / 12)  # on a code, rounding adds less
    assert float(high) == pytest.approx(3 * (0.09**2 + 0.1**2 / 12), rel=1e-3)
    small = {"std_low": 0.0, "std_high": 0.001, "conversions": 1, "clips": False, "n_outputs": 5}
    quiet = ConverterLatticeNoise(step=0.1, **small)
    assert [float(bound) for bound in quiet.variance_bounds()] == [0.0, pytest.approx(0.1**2 / 4)]
