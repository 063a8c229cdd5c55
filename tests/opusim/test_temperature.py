"""Temperature to noise and back on every kind of device, and dark current's laws."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opusim import ConfigError, load_description, open_device
from opusim.camera.exposure import OperatingPoint
from opusim.crossbar.device import Pairs, TiledProduct, moments
from opusim.crossbar.programmable import Converter
from opusim.description.crossbar import CrossbarSettings, ProductSettings
from opusim.randomness.streams import SeededStream
from opusim.temperature import (
    ArrheniusDarkCurrent,
    DoublingDarkCurrent,
    TableDarkCurrent,
    TemperatureLaw,
    TemperatureTable,
    thermal_charge_e2_per_k,
)
from tests.opusim.common import refuses

WINDOW = {"n_inputs": 10, "n_outputs": 500}
X = torch.randint(-1, 2, (6, 10), generator=torch.Generator().manual_seed(3)).float()
RANGE = {"temperature_ref_c": 25.0, "temperature_min_c": -30.0}
DOUBLING = DoublingDarkCurrent(dark_current_ref_e_per_s=30.0, doubling_k=6.5, temperature_max_c=60.0, **RANGE)
ARRHENIUS = ArrheniusDarkCurrent(
    dark_current_ref_e_per_s=30, activation_ev=0.63, temperature_max_c=60, **RANGE
)
BOLTZMANN, CHARGE = 1.380649e-23, 1.602176634e-19  # SI of 2019, written out again
TABLE = TableDarkCurrent(temperatures_c=(-20.0, 10.0, 50.0), dark_currents_e_per_s=(0.27, 2.7, 81.0))

DARK = replace(DOUBLING, dark_current_ref_e_per_s=125.0, doubling_k=7.3, temperature_max_c=70.0)
GAUSSIAN = TemperatureLaw(floor_variance=0.03**2, variance_per_e=2.7e-4, exposure_us=1e5, dark=DARK)


def test_the_laws_are_what_they_say_at_and_above_their_reference() -> None:
    reference = 2.7e-4 * 0.1 * 125.0
    assert GAUSSIAN.std(25.0) == pytest.approx(math.sqrt(0.03**2 + reference), rel=1e-14)
    assert GAUSSIAN.std(25.0 + 7.3) == pytest.approx(math.sqrt(0.03**2 + 2 * reference), rel=1e-14)
    assert GAUSSIAN.dark_share(25.0) == pytest.approx(reference / (0.03**2 + reference), rel=1e-14)
    cold = replace(GAUSSIAN, dark=replace(GAUSSIAN.dark, dark_current_ref_e_per_s=0.0))
    assert cold.std(-30) == cold.std(70) == 0.03
    assert replace(cold, floor_variance=0.0).dark_share(20.0) == 0.0
    refuses(ValueError, "cannot be reached by temperature", cold.temperature_c, 0.03)
    assert DOUBLING.current_e_per_s(25.0 + 6.5) == pytest.approx(60.0)
    assert TABLE.current_e_per_s(-5.0) == pytest.approx(0.27 * 10**0.5)
    with pytest.raises(ValueError, match="strictly increasing"):
        TableDarkCurrent(temperatures_c=(0.0, 0.0), dark_currents_e_per_s=(1.0, 2.0))
    with pytest.raises(ValueError, match="one for each of the 2 temperatures_c"):
        TableDarkCurrent(temperatures_c=(0.0, 1.0), dark_currents_e_per_s=(1.0, 2.0, 3.0))
    for t in (-30.0, 25.0, 60.0):
        exponent = 0.63 * CHARGE / BOLTZMANN * (1 / (t + 273.15) - 1 / 298.15)
        assert ARRHENIUS.current_e_per_s(t) == pytest.approx(30.0 * math.exp(-exponent), rel=1e-12)
    assert ARRHENIUS.credited() is ARRHENIUS
    refuses(ValueError, "temperature_min_c = -273.15: .* zero", replace, ARRHENIUS, temperature_min_c=-273.15)
    refuses(ValueError, "doublings = .*smaller activation_ev", replace, ARRHENIUS, activation_ev=30.0)


@pytest.mark.parametrize("temperature_c", [-30.0, 25.0, 70.0])
def test_the_packaged_law_is_that_of_a_photodiode_and_a_resistor(temperature_c: float) -> None:
    """sigma^2 = sigma_0^2 + k_e t^2 / q^2 (2 q I + 4 k T / R) / (2 t): noise currents in the bandwidth 1 / (2 t)."""
    noise = load_description("gaussian_temperature", {"temperature_c": temperature_c}).noise
    law, kelvin, seconds = noise.temperature_law, temperature_c + 273.15, 400e-6
    amperes = 6.24e9 * CHARGE * math.exp(0.63 * CHARGE / BOLTZMANN * (1 / 298.15 - 1 / kelvin))
    density = 2 * CHARGE * amperes + 4 * BOLTZMANN * kelvin / 1e7  # A^2 / Hz
    charges = density / (2 * seconds) * seconds**2 / CHARGE**2  # electrons^2
    assert noise.value() == pytest.approx(math.sqrt(0.03**2 + law.variance_per_e * charges), rel=1e-12)


@pytest.mark.parametrize("kind", ["gaussian_temperature", "camera_low_light"])
def test_readings_have_the_noise_of_their_temperature(kind: str, seed: int) -> None:
    """Five standard errors of a mean variance of 500 outputs, at both ends of the range."""
    x = X[:1].expand(400, -1)
    for t in (-30.0, 60.0):
        with open_device(kind, temperature_c=t, seed=seed, **WINDOW) as device:
            wanted = device.reading_variance(X[:1]).numpy()[0]
            found = device.project(x).double().numpy().var(axis=0, ddof=1)
        ratio = found / wanted
        assert abs(ratio.mean() - 1) < 5 * ratio.std() / ratio.size**0.5
        assert abs(1.1 * ratio.mean() - 1) > 5 * ratio.std() / ratio.size**0.5  # planted: 10 % more variance


def test_thermal_noise_is_johnsons_and_bad_numbers_are_named() -> None:
    refuses(ValueError, "doubling_k = 0", replace, GAUSSIAN.dark, doubling_k=0.0)
    refuses(ValueError, "temperature_max_c = -40.0: must", replace, GAUSSIAN.dark, temperature_max_c=-40.0)
    refuses(ValueError, r"temperature_c = 71: must lie in \[-30, 70\]", GAUSSIAN.std, 71)
    with pytest.raises(ConfigError, match=r"noise.temperature_law: doublings = .*larger doubling_k"):
        load_description("gaussian_temperature", {"noise": {"temperature_law": {"doubling_k": 0.5}}})
    # The charge of a voltage noise sqrt(4 k T R / (2 t)) across R in a time t, in electrons
    ohm, us, kelvin = 2e6, 50.0, 310.0
    volts = math.sqrt(4 * BOLTZMANN * kelvin * ohm / (2 * us * 1e-6))
    electrons = volts / ohm * us * 1e-6 / CHARGE
    assert thermal_charge_e2_per_k(ohm, us) * kelvin == pytest.approx(electrons**2, rel=1e-12)


@pytest.mark.parametrize("law", [DOUBLING, ARRHENIUS, TABLE])
def test_each_law_inverts_itself(law: DoublingDarkCurrent | ArrheniusDarkCurrent | TableDarkCurrent) -> None:
    for t in np.linspace(law.temperature_min_c, law.temperature_max_c, 7):
        assert law.temperature_c(law.current_e_per_s(t)) == pytest.approx(t, abs=1e-9)
    refuses(ValueError, "cannot be reached by temperature, .* change the exposure", law.temperature_c, 1e9)
    refuses(ValueError, "temperature_c = 99", law.current_e_per_s, 99.0)


def test_a_table_replaces_the_doubling_law_and_what_temperature_cannot_set_is_refused() -> None:
    table = {"temperatures_c": [0.0, 50.0], "dark_currents_e_per_s": [2.7, 270.0]}
    with open_device("camera_low_light", camera={"dark": {"table": table}}, **WINDOW) as device:
        assert device.exposure.dark_current_e == pytest.approx(0.2 * 27.0)
        assert device.description.provenance["camera.dark.table.temperatures_c"].status == "override"
    with open_device("camera", camera={"dark": None}, **WINDOW) as device:
        refuses(ConfigError, "camera.dark: is off", device.temperature_law, X)
    with open_device("camera", camera={"sensor": {"shot_noise": False}}, **WINDOW) as device:
        refuses(ConfigError, "dark current makes no noise", device.temperature_law, X)


def test_noise_at_another_temperature_is_that_of_a_device_at_it_and_gives_it_back() -> None:
    with open_device("camera_low_light", camera={"anchor": {"frames": 0}}, **WINDOW) as device:
        law = device.temperature_law(X)
    for t in (-30.0, 25.0, 60.0):
        settings = {"anchor": {"frames": 0}, "dark": {"temperature_c": t}}
        with open_device("camera_low_light", camera=settings, **WINDOW) as warm:
            assert law.std(t) ** 2 == pytest.approx(float(warm.reading_variance(X).mean()), rel=1e-9)
    assert law.std(60.0) > 1.5 * law.std(-30.0)  # temperature visibly matters on this preset
    with open_device("camera_low_light", **WINDOW) as device:
        camera = device.temperature_law(X)
    thermal = load_description("gaussian_temperature").noise.temperature_law.law()
    for law in (GAUSSIAN, thermal, camera):
        for t in (-30.0, 0.0, 41.5, 60.0):
            assert law.temperature_c(law.std(t)) == pytest.approx(t, abs=1e-6)
            assert 0 < law.dark_share(t) + law.thermal_share(t) < 1
        for std in (1e-3, 100.0):
            refuses(ValueError, "cannot be reached by temperature, .* change", law.temperature_c, std)
    assert GAUSSIAN.thermal_share(25.0) == 0.0


@given(temperature_c=st.floats(-30, 60))
def test_no_more_is_credited_than_either_law_gives(temperature_c: float) -> None:
    """The ratio of the doubling rule to the Arrhenius law of its slope is 2^((T - T_ref)^2 / (T T_d))."""
    credited, rule = (law.current_e_per_s(temperature_c) for law in (DOUBLING.credited(), DOUBLING))
    excess = 2 ** ((temperature_c - 25.0) ** 2 / ((temperature_c + 273.15) * 6.5))
    assert credited <= rule * (1 + 1e-12)
    assert rule / credited == pytest.approx(excess, rel=1e-10)


def test_the_excess_of_the_doubling_rule_is_not_credited() -> None:
    """48 % at 60 degrees: no box of counts, no rate that a guarantee rests on and no Gaussian sigma holds it."""
    rule = load_description("camera_low_light").camera.dark.law()
    excess = rule.current_e_per_s(60.0) / rule.credited().current_e_per_s(60.0)
    assert excess == pytest.approx(1.48, abs=0.01)
    with open_device("camera_low_light", temperature_c=60.0, **WINDOW) as device:
        law, point = device.count_law(X), OperatingPoint()
        dark = law.rates(point) - law.credited_rates(point)
        assert np.allclose(dark, law.dark_e(point) * (1 - 1 / excess), rtol=1e-9)
        assert np.allclose(device.noise.rate_low, law.dark_e(point) / excess, rtol=1e-9)
        assert np.all(device.noise.rate_high >= device.exposure.dark_e)
    with open_device("camera_low_light", **WINDOW) as device:  # at the reference nothing is taken off
        assert np.array_equal(device.noise.rate_low, np.broadcast_to(device.exposure.dark_e, (4, 500)))
    rules = {"doubling_k": 8.0, "load_ohm": None}
    warm = {"temperature_c": 70.0, "noise": {"temperature_law": rules}}
    noise = load_description("gaussian_temperature", warm).noise
    law = noise.temperature_law
    current = law.dark_current_ref_e_per_s * 2 ** (45 / 8.0 * 298.15 / 343.15)
    wanted = law.sigma_0**2 + law.variance_per_e * 400e-6 * current
    assert noise.value() == pytest.approx(math.sqrt(wanted), rel=1e-10)


def test_one_key_sets_the_temperature_of_every_description() -> None:
    arrhenius = dict(vars(ARRHENIUS))
    product = {"read_v": 0.2, "bandwidth_hz": 3.8e6}
    for name, changes, key in (
        ("camera_low_light", {}, "camera.dark.temperature_c"),
        ("camera", {"camera": {"dark": {"arrhenius": arrhenius}}}, "camera.dark.temperature_c"),
        ("gaussian_temperature", {}, "noise.temperature_law.temperature_c"),
        ("pcm", {"crossbar": {"temperature": product}}, "crossbar.temperature.temperature_c"),
        ("hermes", {}, "crossbar.temperature.temperature_c"),
        ("mzi_mesh", {}, "mesh.temperature_c"),
        ("microring_bank", {}, "rings.temperature_c"),
    ):
        found = load_description(name, {"temperature_c": 50.0, **changes})
        assert found.numbers()[key] == 50.0
        assert found.provenance[key].status == "override"
        if name == "pcm":
            assert found.crossbar.temperature.temperature_c == 50.0
    with pytest.raises(ConfigError, match="must lie between temperature_min_c = -40 and temperature_max_c"):
        load_description("pcm", {"temperature_c": 90.0, "crossbar": {"temperature": product}})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("ideal", {}, "the kind 'ideal' has no noise; leave it out"),
        ("lighton_appliance", {}, "an instrument has the temperature of its room"),
        ("gaussian", {}, "give noise.temperature_law instead of noise.sigma"),
        ("camera", {"camera": {"dark": None}}, "without dark current nothing depends on it; give some"),
        ("camera", {"camera": {"dark": {"temperature_c": 3.0}}}, "camera.dark.temperature_c is given too"),
    ],
)
def test_a_temperature_that_nothing_takes_is_refused(name: str, changes: dict, message: str) -> None:
    refuses(ConfigError, message, load_description, name, {"temperature_c": 50.0, **changes})


@pytest.mark.parametrize("name", ["pcm", "hermes", "reram"])
def test_a_temperature_gives_a_crossbar_the_thermal_noise_of_its_read_out(name: str) -> None:
    """4 k T / (2 t) / (g_max 0.2 V^2) for sum |w| = 1, in a frame of t; stated as assumed."""
    found = load_description(name, {"temperature_c": 60.0})
    wanted = 4 * BOLTZMANN * 333.15 / (2 * 0.133e-6) / (found.crossbar.g_max_us * 1e-6 * 0.2**2)
    assert found.crossbar.thermal_variance == pytest.approx(wanted, rel=1e-12)
    assert load_description(name).crossbar.thermal_variance == 0.0
    for key in ("read_v", "bandwidth_hz"):
        assert found.provenance[f"crossbar.temperature.{key}"].status == "assumed"
    law = {"temperature": {"activation_ev": [0.1]}}
    own = load_description(name, {"temperature_c": 60.0, "crossbar": law})
    assert own.crossbar.thermal_variance == 0.0  # laws of one's own stay alone


W = torch.linspace(-1, 1, 4 * 30).view(4, 30)


def test_thermal_noise_of_a_crossbar_is_that_of_its_conductances(seed: int) -> None:
    """Var = output_std^2 + 4 k T bandwidth sum G / (g_max read_v)^2 with G = |w| g_max, in units of w x."""
    law = {"temperature_c": 60.0, "read_v": 0.01, "bandwidth_hz": 1e9}
    settings = CrossbarSettings(g_max_us=25.0, temperature=law)
    siemens = W.double().abs() * 25e-6
    current = 4 * BOLTZMANN * 333.15 * 1e9 * siemens.sum(1)
    for product in (ProductSettings(output_std=0.01), ProductSettings(output_std=0.01, current_std=0.05)):
        tiled = TiledProduct(W, Converter(tile_inputs=13), product, settings.thermal_variance)
        x = torch.ones(20_000, 30)
        wanted = current / 25e-8**2 + 3 * 0.01**2 + product.current_std**2 * W.double().abs().sum(1)
        assert torch.allclose(tiled.variance(x[:1])[0], wanted, rtol=1e-6)
        found = tiled.read(x, SeededStream(seed, "t")).double().var(dim=0)
        assert torch.all((found / wanted - 1).abs() < 5 * (2 / 20_000) ** 0.5)
        assert tiled.std_limits()[0] == 0.01  # nothing of it is credited
        planted = wanted - current / (25e-6 * 0.01) ** 2 * 60 / 333.15  # Celsius steps taken for kelvin
        assert torch.any((found / planted - 1).abs() > 5 * (2 / 20_000) ** 0.5)


def test_conductances_follow_their_activation() -> None:
    """g exp(-(E(g) / k) (1 / T - 1 / T_ref)), E a polynomial of g; at the reference nothing changes."""
    law = {"temperature_c": 60.0, "activation_ev": [0.1, -0.08]}
    warm = CrossbarSettings(g_max_us=25.0, temperature=law)
    pairs = Pairs(W, warm, chip=3, number=0)
    g = W.double().abs()
    factor = torch.exp(-(0.1 - 0.08 * g) * CHARGE / BOLTZMANN * (1 / 333.15 - 1 / 298.15))
    assert torch.allclose(pairs.weights(0.0, 0).double(), W.double() * factor, atol=2**-14)
    mean, variance = moments(W.abs(), 0.0, warm)
    assert torch.allclose(mean.double(), g * factor, rtol=1e-5)
    assert float(variance.abs().max()) < 1e-6
    pcm = load_description("pcm").crossbar
    cool = warm.temperature.model_copy(update={"temperature_c": 25.0})
    at_reference = pcm.model_copy(update={"temperature": cool})
    held = [Pairs(W, each, chip=3, number=0).weights(9.0, 1) for each in (pcm, at_reference)]
    assert torch.equal(*held)


def test_a_crossbar_tells_how_temperature_sets_its_readings() -> None:
    keys = {"temperature_c": 60.0, "read_v": 0.01, "bandwidth_hz": 1e8, "activation_ev": [0.01]}
    with open_device("pcm", crossbar={"temperature": keys}, **WINDOW) as device:
        law = device.temperature_law(X)
        at_60 = float(device.reading_variance(X).mean()) ** 0.5, float(device.matrix().square().mean()) ** 0.5
    assert law.temperatures_c == (-40.0, 85.0)
    assert law.std(60.0) == pytest.approx(at_60[0], rel=1e-3)  # between two temperatures of the table
    assert law.size(60.0) == pytest.approx(at_60[1], rel=1e-3)
    assert law.temperature_c(law.std(60.0)) == pytest.approx(60.0, abs=1e-6)
    flat = TemperatureTable(temperatures=(0.0, 1.0), stds=(1.0, 1.0), sizes=(1.0, 1.0))
    refuses(ValueError, "cannot be reached by temperature", flat.temperature_c, 1.0)
