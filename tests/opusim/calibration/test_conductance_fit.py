"""Fits of memory devices to measurements: constants, limits, faults that must be noticed, and the command."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from opusim import ConfigError, open_device
from opusim.calibration.conductance_fit import ConductanceFit, Measurements, Shape, fit, read_measurements
from tests.opusim.common import refuses
from tests.support.command import opusim

SURE = 5.0
TIMES_S = (20.0, 3600.0, 86_400.0)
NU, TAU, OUTPUT = 0.06, 0.012, 0.01
DRIFT = Shape(degree=2, time="drift")


def spread(g: np.ndarray) -> np.ndarray:
    """That of phase-change memory, relative to 25 microsiemens (Nandakumar 2019)."""
    return (0.26348 + 1.9650 * g - 1.1731 * g**2) / 25


def devices(lines: int, seed: int, *, scale: float = 1.0, kind: str = "power") -> Measurements:
    """Conductances of devices of their own, at one of three times each."""
    generator = np.random.default_rng(seed)
    g, time_s = generator.uniform(0.1, 1.0, lines), np.resize(TIMES_S, lines)
    value = np.maximum(g + scale * spread(g) * generator.standard_normal(lines), 0)
    if kind == "power":
        value = value * (time_s / TIMES_S[0]) ** -(NU + TAU * generator.standard_normal(lines))
    elif kind == "exponential":
        value = value * np.exp(-0.7 * time_s / TIMES_S[-1])
    elif kind == "stuck":
        value = np.where(generator.random(lines) < 0.05, 0.1, value)
    return Measurements(target=g, value=value, time_s=time_s, factor=None, device=np.arange(lines))


def products(lines: int, seed: int, least: float = 0.0) -> Measurements:
    """Inputs and weights between `least` and 1 in magnitude."""
    generator = np.random.default_rng(seed)
    x, w = generator.uniform(-1, 1, (2, lines))
    x, w = (np.sign(each) * (least + (1 - least) * abs(each)) for each in (x, w))
    time_s = np.resize(TIMES_S, lines)

    def side(g: np.ndarray) -> np.ndarray:
        exponent = NU + TAU * generator.standard_normal(lines)
        held = np.maximum(g + spread(g) * generator.standard_normal(lines), 0)
        return np.asarray(held * (time_s / TIMES_S[0]) ** -exponent)

    value = x * (side(np.maximum(w, 0)) - side(np.maximum(-w, 0))) + OUTPUT * generator.standard_normal(lines)
    return Measurements(target=w, value=value, time_s=time_s, factor=x, device=np.arange(lines))


def error_of(found: ConductanceFit, name: str) -> float:
    low, high = found.limits[name]
    return (high - low) / (2 * 1.96)


@pytest.fixture(scope="module")
def large() -> ConductanceFit:
    return fit(devices(600, 1), shape=DRIFT, replicates=40)


def test_constants_are_found_within_their_errors(large: ConductanceFit) -> None:
    for name, value in (("nu_offset", NU), ("nu_std", TAU)):
        assert abs(large.law.numbers()[name] - value) <= SURE * error_of(large, name)
        assert abs(large.law.numbers()[name] - 1.5 * value) > SURE * error_of(large, name)
    g = np.linspace(0.1, 1.0, 91)
    ratio = float(np.mean((large.law.spread(g) / spread(g)) ** 2))
    tolerance = SURE * math.sqrt(2 / 200)  # 200 lines at the earliest time
    assert abs(ratio - 1) <= tolerance
    louder = fit(devices(600, 1, scale=1.5), shape=DRIFT, replicates=20)
    assert float(np.mean((louder.law.spread(g) / spread(g)) ** 2)) - 1 > tolerance
    assert large.p_value > 0.01


@pytest.mark.slow
def test_products_give_the_same_constants_and_the_noise_of_outputs() -> None:
    found = fit(products(500, 2), shape=Shape(degree=1, time="drift"), replicates=30)
    for name, value in (("nu_offset", NU), ("output_std", OUTPUT)):
        assert abs(found.law.numbers()[name] - value) <= SURE * error_of(found, name)
        assert abs(found.law.numbers()[name] - 1.6 * value) > SURE * error_of(found, name)


@pytest.mark.parametrize(
    ("kind", "time"), [pytest.param("power", "drift", marks=pytest.mark.slow), ("none", "none")]
)
def test_the_law_of_time_is_chosen(kind: str, time: str) -> None:
    found = fit(devices(120, 4, kind=kind), replicates=20)
    assert found.law.shape.time == time


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_twenty_products_show_drift(seed: int) -> None:
    found = fit(products(20, seed, least=0.5), replicates=20)
    assert found.law.shape.time == "drift"
    assert abs(found.law.nu_offset - NU) <= SURE * error_of(found, "nu_offset")
    assert found.limits["nu_std"][0] >= 0
    assert found.limits["programming[0]"][0] >= 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exponential", "stuck"])
def test_measurements_of_another_law_are_noticed(kind: str) -> None:
    shape = Shape(degree=1, time="drift")
    assert fit(devices(200, 3, kind=kind), shape=shape, replicates=60).p_value < 0.02


@pytest.mark.slow
def test_limits_cover_the_constants() -> None:
    """95 % limits of nu from 45 lines, over 100 sets of measurements; limits half as wide must fail."""
    sets, covered, halved = 100, 0, 0
    for seed in range(sets):
        found = fit(devices(45, seed), shape=Shape(degree=1, time="drift"), replicates=50, seed=seed)
        low, high = found.limits["nu_offset"]
        centre, width = (low + high) / 2, (high - low) / 2
        covered += abs(NU - centre) <= width
        halved += abs(NU - centre) <= width / 2
    least = 0.95 - SURE * math.sqrt(0.95 * 0.05 / sets)
    assert covered / sets >= least
    assert halved / sets < least


def written(path: Path, data: Measurements) -> Path:
    lines = ["device,conductance_us,programmed_us,time_s"]
    columns = data.device, data.target, data.value, data.time_s
    lines += [f"d{d},{25 * g:.5f},{25 * v:.5f},{t:g}" for d, g, v, t in zip(*columns, strict=True)]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
def test_the_command_writes_a_description_that_runs(tmp_path: Path) -> None:
    readings = written(tmp_path / "readings.csv", devices(90, 5))
    out, figure = tmp_path / "lab.toml", tmp_path / "lab.png"
    given = ("device", "fit", str(readings), "--out", str(out), "--figure", str(figure), "--g-max-us", "25")
    result = opusim(*given, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "law of time: drift" in result.stdout
    assert figure.stat().st_size > 10_000
    with open_device(out, n_inputs=40, n_outputs=500) as device:
        assert device.description.provenance["crossbar.drift.mean.offset"].status == "fitted"
        assert "limits" in device.description.provenance["crossbar.drift.mean.offset"].source
        realised = device.require("program").program(torch.full((500, 40), 0.5))
        ratio = float(realised.std()) / float(spread(np.array(0.5)))
        assert 0.6 < ratio < 1.6  # 30 lines tell a spread to 13 %, and both devices of a pair add to it
        later = device.require("wait").wait(86_380.0)
        assert abs(float(later.mean() / realised.mean()) - (86_400 / 20) ** -NU) < 0.05
    shown = opusim("device", "show", str(out), cwd=tmp_path)
    assert "µS" in shown.stdout
    assert "crossbar.programming_us" in shown.stdout


def test_the_command_writes_no_description_of_another_law(tmp_path: Path) -> None:
    readings = written(tmp_path / "readings.csv", devices(60, 3, kind="exponential"))
    out = tmp_path / "lab.toml"
    result = opusim("device", "fit", str(readings), "--out", str(out), cwd=tmp_path)
    assert result.returncode == 3
    assert "do not describe these measurements" in result.stderr
    assert not out.exists()


@pytest.mark.slow
def test_a_description_of_another_law_is_written_by_force(tmp_path: Path) -> None:
    readings = written(tmp_path / "readings.csv", devices(60, 3, kind="exponential"))
    command = ("device", "fit", str(readings), "--out", str(tmp_path / "lab.toml"), "--force")
    assert opusim(*command, cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", r"columns: a, b; name them conductance_us, programmed_us, time_s or input, weight"),
        ("", r"columns: none; name them"),
        ("conductance_us,programmed_us,time_us\n1,1,1\n", r"columns: .*time_us; name them .* time_s or"),
        ("conductance_s,programmed_s,time_s\n1,1,1\n", "columns: conductance_s"),
        ("conductance;programmed;time\n1;1,5;2\n", "programmed_us, line 2: '1,5' is no number"),
        ("conductance;programmed;time\n1;2\n", r"time_s, line 2: '' is no number"),
        ("conductance\tprogrammed\ttime\n1\tx\t1\n", r"programmed_us, line 2: 'x' is no number"),
        ("conductance,programmed,time\n" + "1,1,1\n" * 19, r"19 lines: a fit takes at least 20"),
        ("conductance,programmed,time\n" + "1,1,0\n" * 20, r"time_s, line 2: '0' must be above 0"),
        ("conductance,programmed,time\n" + "1,-1,1\n" * 20, "programmed_us, line 2: '-1' must be at least 0"),
        ("conductance,programmed,time\n" + "0,1,1\n" * 20, r"no target is above 0"),
        ("input,weight,time,reading\n" + "2,1,1,2\n" * 20, r"input, line 2: '2' must be in \[-1, 1\]"),
        ("input,weight,time,reading\n" + "1,1,1,2\n" + "nan,1,1,2\n" * 20, "input, line 3: 'nan'"),
        ("conductance,programmed,time\n" + "1,1,1\n" + "1,inf,1\n" * 20, "programmed_us, line 3: 'inf'"),
    ],
)
def test_what_is_no_measurement_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "readings.csv"
    path.write_text(text)
    refuses(ConfigError, message, read_measurements, path)


def test_targets_above_the_largest_and_readings_in_other_units_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "readings.csv"
    path.write_text("conductance,programmed,time\n" + "5,5,1\n" * 20)
    refuses(ConfigError, "conductance_us: 5 .* g_max_us = 4; raise g_max_us", read_measurements, path, 4.0)
    data = devices(30, 6)
    other = replace(data, value=25 * data.value)
    refuses(ConfigError, r"are 2[3-7]\.?\d* times the targets", fit, other, replicates=20)
    refuses(ConfigError, "cannot be read", read_measurements, tmp_path / "none.csv")
