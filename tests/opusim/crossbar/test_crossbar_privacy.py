"""What a crossbar's noise is worth as privacy: nothing by any theorem of opusim, and it says so by name."""

from __future__ import annotations

import pytest

from opusim.accounting import NoGuarantee
from opusim.accounting.mechanisms.readings import DeviceReadings, device_readings_guarantee
from opusim.devices.registry import open_device
from opusim.errors import ConfigError
from opusim.noise import ConverterLatticeNoise, NoiseModel, SignalGaussianNoise
from opusim.training.protections.base import creditable_law

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
    with (
        open_device(name, n_inputs=4, n_outputs=6) as device,
        pytest.raises(ConfigError, match=f"credits the noise of device '{name}' .*takes a Gaussian law"),
    ):
        creditable_law(device)


def test_bounds_are_those_of_the_spread_and_of_the_lattice() -> None:
    low, high = LAWS[0].variance_bounds()
    assert (float(low), float(high)) == pytest.approx((0.04**2, 0.09**2))
    assert float(LAWS[3].variance_bounds()[0]) == 0.0
    low, high = LAWS[2].variance_bounds()
    assert (
        3 * 0.04**2 < float(low) < 3 * (0.04**2 + 0.1**2 / 12)
    )  # on a code, rounding adds less than half-way
    assert float(high) == pytest.approx(3 * (0.09**2 + 0.1**2 / 12), rel=1e-3)
    quiet = ConverterLatticeNoise(
        step=0.1, std_low=0.0, std_high=0.001, conversions=1, clips=False, n_outputs=5
    )
    assert [float(bound) for bound in quiet.variance_bounds()] == [0.0, pytest.approx(0.1**2 / 4)]
