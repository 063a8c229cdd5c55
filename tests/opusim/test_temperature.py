"""Temperature to noise and back, and dark current's two laws."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opusim.description.schema import load_description
from opusim.devices.registry import open_device
from opusim.errors import ConfigError
from opusim.temperature import DoublingDarkCurrent, TableDarkCurrent, TemperatureLaw

WINDOW = {"n_inputs": 10, "n_outputs": 500}
X = torch.randint(-1, 2, (6, 10), generator=torch.Generator().manual_seed(3)).float()
DOUBLING = DoublingDarkCurrent(
    dark_current_ref_e_per_s=30.0,
    temperature_ref_c=25.0,
    doubling_k=6.5,
    temperature_min_c=-30.0,
    temperature_max_c=60.0,
)
TABLE = TableDarkCurrent(temperatures_c=(-20.0, 10.0, 50.0), dark_currents_e_per_s=(0.27, 2.7, 81.0))

GAUSSIAN = TemperatureLaw(
    floor_variance=0.03**2,
    variance_per_e=2.7e-4,
    exposure_us=1e5,
    dark=DoublingDarkCurrent(
        dark_current_ref_e_per_s=125.0,
        temperature_ref_c=25.0,
        doubling_k=7.3,
        temperature_min_c=-30.0,
        temperature_max_c=70.0,
    ),
)


def test_the_law_at_and_above_its_reference() -> None:
    reference = 2.7e-4 * 0.1 * 125.0
    assert GAUSSIAN.std(25.0) == pytest.approx(math.sqrt(0.03**2 + reference), rel=1e-14)
    assert GAUSSIAN.std(25.0 + 7.3) == pytest.approx(math.sqrt(0.03**2 + 2 * reference), rel=1e-14)
    assert GAUSSIAN.dark_share(25.0) == pytest.approx(reference / (0.03**2 + reference), rel=1e-14)


def test_the_packaged_law_keeps_its_bits() -> None:
    """Stored noise streams are scaled by this number: sqrt(sigma_0^2 + k t I_ref 2^doublings), in this order."""
    noise = load_description("gaussian_temperature").noise
    law = noise.temperature_law
    doublings = (law.temperature_c - law.temperature_ref_c) / law.doubling_k
    current = law.dark_current_ref_e_per_s * 2**doublings
    assert noise.value() == math.sqrt(law.sigma_0**2 + law.variance_per_e * law.exposure_us * 1e-6 * current)


@given(temperature_c=st.floats(-30, 70))
def test_the_inverse_returns(temperature_c: float) -> None:
    assert GAUSSIAN.temperature_c(GAUSSIAN.std(temperature_c)) == pytest.approx(temperature_c, abs=1e-6)


@pytest.mark.parametrize("std", [0.01, 0.03, 0.5])
def test_an_unreachable_noise_is_named_with_what_else_helps(std: float) -> None:
    with pytest.raises(
        ValueError, match=r"cannot be reached by temperature, -30 to 70 .* change the exposure"
    ):
        GAUSSIAN.temperature_c(std)


def test_no_dark_current_means_no_control() -> None:
    cold = replace(GAUSSIAN, dark=replace(GAUSSIAN.dark, dark_current_ref_e_per_s=0.0))
    assert cold.std(-30) == cold.std(70) == 0.03
    assert replace(cold, floor_variance=0.0).dark_share(20.0) == 0.0
    with pytest.raises(ValueError, match="cannot be reached by temperature"):
        cold.temperature_c(0.03)


def test_at_microseconds_temperature_changes_an_ordinary_sensor_by_less_than_a_percent() -> None:
    dark = replace(GAUSSIAN.dark, doubling_k=8.0)
    sensor = replace(GAUSSIAN, exposure_us=400.0, floor_variance=13**2 * 2.7e-4, dark=dark)  # 13 e read noise
    assert sensor.std(70.0) / sensor.std(-30.0) < 1.01


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="doubling_k = 0"):
        replace(GAUSSIAN.dark, doubling_k=0.0)
    with pytest.raises(ValueError, match=r"temperature_max_c = -40.0: must lie in \[-30, inf\]"):
        replace(GAUSSIAN.dark, temperature_max_c=-40.0)
    with pytest.raises(ValueError, match=r"temperature_c = 71: must lie in \[-30, 70\]"):
        GAUSSIAN.std(71)
    with pytest.raises(ConfigError, match=r"noise.temperature_law: doublings = .*larger doubling_k"):
        load_description("gaussian_temperature", {"noise": {"temperature_law": {"doubling_k": 0.5}}})


@pytest.mark.parametrize("law", [DOUBLING, TABLE])
def test_each_law_inverts_itself(law: DoublingDarkCurrent | TableDarkCurrent) -> None:
    for t in np.linspace(law.temperature_min_c, law.temperature_max_c, 7):
        assert law.temperature_c(law.current_e_per_s(t)) == pytest.approx(t, abs=1e-9)
    with pytest.raises(
        ValueError, match="cannot be reached by temperature, .* change the exposure or the bias light"
    ):
        law.temperature_c(1e9)
    with pytest.raises(ValueError, match="temperature_c = 99"):
        law.current_e_per_s(99.0)


def test_the_laws_are_what_they_say() -> None:
    assert DOUBLING.current_e_per_s(25.0 + 6.5) == pytest.approx(60.0)
    assert TABLE.current_e_per_s(-5.0) == pytest.approx(0.27 * 10**0.5)
    with pytest.raises(ValueError, match="strictly increasing"):
        TableDarkCurrent(temperatures_c=(0.0, 0.0), dark_currents_e_per_s=(1.0, 2.0))
    with pytest.raises(ValueError, match="one for each of the 2 temperatures_c"):
        TableDarkCurrent(temperatures_c=(0.0, 1.0), dark_currents_e_per_s=(1.0, 2.0, 3.0))


def test_a_table_replaces_the_doubling_law_in_a_description() -> None:
    table = {"temperatures_c": [0.0, 50.0], "dark_currents_e_per_s": [2.7, 270.0]}
    with open_device("camera_low_light", camera={"dark": {"table": table}}, **WINDOW) as device:
        assert device.exposure.dark_current_e == pytest.approx(0.2 * 27.0)
        assert device.description.provenance["camera.dark.table.temperatures_c"].status == "override"


def test_noise_at_another_temperature_is_that_of_a_device_at_it() -> None:
    with open_device("camera_low_light", camera={"anchor": {"frames": 0}}, **WINDOW) as device:
        law = device.temperature_law(X)
    for t in (-30.0, 25.0, 60.0):
        settings = {"anchor": {"frames": 0}, "dark": {"temperature_c": t}}
        with open_device("camera_low_light", camera=settings, **WINDOW) as warm:
            assert law.std(t) ** 2 == pytest.approx(float(warm.reading_variance(X).mean()), rel=1e-9)
    assert law.std(60.0) > 1.5 * law.std(-30.0)  # temperature visibly matters on this preset


def test_temperature_comes_back_from_the_noise() -> None:
    with open_device("camera_low_light", **WINDOW) as device:
        law = device.temperature_law(X)
    for t in (-30.0, 0.0, 41.5, 60.0):
        assert law.temperature_c(law.std(t)) == pytest.approx(t, abs=1e-4)
        assert 0 < law.dark_share(t) < 1
    with pytest.raises(ValueError, match="cannot be reached by temperature"):
        law.temperature_c(100.0)


def test_what_temperature_cannot_set_is_refused() -> None:
    with (
        open_device("camera", camera={"dark": None}, **WINDOW) as device,
        pytest.raises(ConfigError, match="camera.dark: is off"),
    ):
        device.temperature_law(X)
    with (
        open_device("camera", camera={"sensor": {"shot_noise": False}}, **WINDOW) as device,
        pytest.raises(ConfigError, match="dark current makes no noise"),
    ):
        device.temperature_law(X)
