import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusim.temperature.law import TemperatureLaw
from opusim.usage import Usage, UsageMeter

LAW = TemperatureLaw(
    sigma_0=0.03,
    variance_per_e=2.7e-4,
    exposure_us=1e5,
    dark_current_ref_e_per_s=125.0,
    temperature_ref_c=25.0,
    doubling_k=7.3,
    temperature_min_c=-30.0,
    temperature_max_c=70.0,
)


def test_the_law_at_and_above_its_reference() -> None:
    reference = 2.7e-4 * 0.1 * 125.0
    assert LAW.sigma(25.0) == pytest.approx(math.sqrt(0.03**2 + reference), rel=1e-14)
    assert LAW.sigma(25.0 + 7.3) == pytest.approx(math.sqrt(0.03**2 + 2 * reference), rel=1e-14)
    assert LAW.dark_share(25.0) == pytest.approx(reference / (0.03**2 + reference), rel=1e-14)


@given(temperature_c=st.floats(-30, 70))
def test_the_inverse_returns(temperature_c: float) -> None:
    assert LAW.temperature(LAW.sigma(temperature_c)) == pytest.approx(temperature_c, abs=1e-6)


@pytest.mark.parametrize("sigma", [0.01, 0.03, 0.5])
def test_an_unreachable_sigma_is_named_with_what_else_helps(sigma: float) -> None:
    with pytest.raises(
        ValueError, match=r"cannot be reached by temperature, -30 to 70 .* change the exposure"
    ):
        LAW.temperature(sigma)


def test_no_dark_current_means_no_control() -> None:
    cold = replace(LAW, dark_current_ref_e_per_s=0.0)
    assert cold.sigma(-30) == cold.sigma(70) == 0.03
    assert replace(cold, sigma_0=0.0).dark_share(20.0) == 0.0
    with pytest.raises(ValueError, match="cannot be reached by temperature"):
        cold.temperature(0.03)


def test_at_microseconds_an_ordinary_sensor_hardly_feels_the_temperature() -> None:
    sensor = replace(
        LAW, exposure_us=400.0, sigma_0=13 * math.sqrt(2.7e-4), doubling_k=8.0
    )  # 13 electrons read noise
    assert sensor.sigma(70.0) / sensor.sigma(-30.0) < 1.01


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="doubling_k = 0"):
        replace(LAW, doubling_k=0.0)
    with pytest.raises(ValueError, match=r"temperature_max_c = -40.0: must lie in \[-30, inf\]"):
        replace(LAW, temperature_max_c=-40.0)
    with pytest.raises(ValueError, match=r"temperature_c = 71: must lie in \[-30, 70\]"):
        LAW.sigma(71)


def test_the_meter_counts_seconds_and_joules() -> None:
    meter = UsageMeter(frame_period_us=270.0, power_w=30.0)
    meter.count(1000)
    before = meter.snapshot()
    meter.count(1000)
    assert (before.frames, before.seconds, before.joules) == pytest.approx((1000, 0.27, 8.1), rel=1e-12)
    assert meter.snapshot() - before == before
    assert before + before == meter.snapshot()
    assert Usage.from_json(json.loads(json.dumps(before.to_json()))) == before
    with pytest.raises(ValueError, match="frames = -1"):
        meter.count(-1)
