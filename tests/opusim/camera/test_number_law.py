"""Numbers of a camera: their exact laws, moments and likelihoods, and what a link of few bits leaves of them."""

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from scipy.stats import norm, poisson

from opusim import ConfigError, load_description, open_device
from opusim.calibration.calibrate import calibrate
from opusim.calibration.photon_transfer import Plan
from opusim.camera.exposure import Exposure
from opusim.camera.from_description import noise_line, number_rows
from opusim.camera.stages import Sensor, number_law, spread_error
from opusim.description.camera import LightSettings
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import digest_of
from opusim.noise import FluctuatingCountNoise, PhotonCountNoise
from opusim.randomness.streams import SeededStream
from tests.opusim.common import refuses, spent_by, z_of_variance

COUNTS = {"shot_noise": True, "full_well_e": 4000.0, "read_noise_e": 1.6, "black_level_dn": 20.0}
SENSOR = Sensor(gain_dn_per_e=1.0, adc_bits=12, **COUNTS)
SENSORS = [
    *(SENSOR, replace(SENSOR, gain_dn_per_e=0.3), replace(SENSOR, gain_dn_per_e=2.7, black_level_dn=0.0)),
    *(replace(SENSOR, read_noise_e=0.0), replace(SENSOR, full_well_e=12.0, adc_bits=5)),
    replace(SENSOR, black_level_dn=0.0, adc_bits=4),
]
RATES = np.array([[0.0, 0.4, 6.3, 25.0], [3.0, 0.1, 9.1, 30.0]])
OFFSETS = np.array([0.0, -0.7, 1.3, 0.2])


@pytest.mark.parametrize("sensor", SENSORS)
def test_the_masses_have_the_exact_moments(sensor: Sensor) -> None:
    law = number_law(RATES, OFFSETS, sensor)
    codes = law.first + np.arange(law.masses.shape[2])
    mean, variance = sensor.moments(RATES, OFFSETS)
    np.testing.assert_allclose(law.masses.sum(axis=2), 1.0, rtol=1e-9)
    np.testing.assert_allclose(law.masses @ codes, mean, atol=1e-5)
    np.testing.assert_allclose(law.masses @ codes**2 - (law.masses @ codes) ** 2, variance, atol=1e-4)
    assert law.first >= 0
    assert codes[-1] <= sensor.top_dn


@pytest.mark.parametrize("sensor", SENSORS)
def test_drawn_frames_have_the_masses(sensor: Sensor, seed: int) -> None:
    n = 40_000
    light = LightSettings(anchor_flux_per_s=1.0, quantum_efficiency=1.0, exposure_us=1.0)
    fixed = {"dark_current_e": 0.0, "response": np.ones(4), "offset_e": OFFSETS}
    exposure = Exposure(light=light, sensor=sensor, mirrors=2, **fixed)
    field = torch.from_numpy(np.sqrt(RATES[0] / exposure.gain_e).astype(np.float32))
    shown = torch.stack([field, torch.zeros(4)])[:, None, :].expand(2, n, -1)
    numbers = exposure.expose(shown, SeededStream(seed, "frames")).numpy()

    def deviation(rates: np.ndarray) -> float:
        """Largest deviation of a frequent code, in standard errors."""
        law, worst = number_law(rates, OFFSETS, sensor), 0.0
        for pixel in range(4):
            found = np.bincount(numbers[:, pixel].astype(int) - law.first, minlength=law.masses.shape[2])
            p = law.masses[0, pixel]
            common = (p * n > 50) & (p < 1 - 50 / n)
            error = np.sqrt(p * (1 - p) / n)
            worst = max(worst, *(np.abs(found / n - p)[common] / error[common]), 0.0)
        return float(worst)

    limit = norm.isf(norm.sf(5.0) / 400)
    assert deviation(RATES) < limit < deviation(RATES * 1.2)  # planted: 20 % more light


def test_sums_are_convolved_and_likelihoods_added(seed: int) -> None:
    law = number_law(RATES, OFFSETS, SENSOR)
    sums = law.sums([np.array([0, 2]), np.array([1, 3])])
    codes = law.first + np.arange(law.masses.shape[2])
    totals = 2 * law.first + np.arange(sums.shape[2])
    means = law.masses @ codes
    np.testing.assert_allclose(sums @ totals, means[:, :2] + means[:, 2:])
    np.testing.assert_allclose(sums.sum(axis=2), 1.0, rtol=1e-9)
    numbers = np.array([[20.0, 21.0, 27.0, 44.0], [22.0, 20.0, 30.0, 50.0]])
    masses = [[law.masses[i, range(4), row.astype(int) - law.first] for i in range(2)] for row in numbers]
    expected = np.log(masses).sum(2)
    np.testing.assert_allclose(law.log_likelihood(numbers), expected)


def test_numbers_without_masses_are_refused() -> None:
    for sensor in (replace(SENSOR, adc_bits=None), replace(SENSOR, shot_noise=False)):
        refuses(ValueError, "needs shot noise and a converter", number_law, RATES, OFFSETS, sensor)


def distance(sensor: Sensor, offsets: np.ndarray) -> float:
    """Total variation between the laws of a group's sum with its rate spread evenly, and over half of its pixels."""
    even, uneven = np.full((1, offsets.size), 4.0), np.where(np.arange(offsets.size) % 2, 7.5, 0.5)[None]
    law = number_law(np.concatenate([even, uneven]), offsets, sensor)
    first, second = law.sums([np.arange(offsets.size)])[:, 0]
    return float(np.abs(first - second).sum() / 2)


@pytest.mark.parametrize("gain", [1.0, 2.0, 0.7, 1.3])
@pytest.mark.parametrize("read_noise_e", [1.6, 2.5])
def test_the_sum_of_a_group_depends_on_its_total_rate(gain: float, read_noise_e: float) -> None:
    sensor = replace(SENSOR, gain_dn_per_e=gain, read_noise_e=read_noise_e, black_level_dn=100.0)
    offsets = np.array([0.0, -0.7, 1.3, 0.2, 0.9, -1.1])
    assert distance(sensor, offsets) <= spread_error(sensor, offsets, 7.5) + 1e-12


def test_coarse_rounding_and_ends_let_the_spread_over_pixels_show() -> None:
    offsets = np.array([0.0, -0.7, 1.3, 0.2, 0.9, -1.1])
    coarse = replace(SENSOR, gain_dn_per_e=0.3, read_noise_e=0.3, black_level_dn=100.0)
    fine = replace(coarse, read_noise_e=4.0)
    shown = distance(coarse, offsets)
    assert spread_error(fine, offsets, 7.5) < shown <= spread_error(coarse, offsets, 7.5)  # planted: coarse
    for ends in ({"black_level_dn": 0.0}, {"full_well_e": 20.0}, {"adc_bits": 6}):
        ended = replace(SENSOR, **ends)
        assert spread_error(ended, offsets, 7.5) == np.inf
    assert spread_error(replace(SENSOR, black_level_dn=100.0), offsets, 7.5, nonlinearity=0.1) == np.inf


NAMED_SENSORS = {
    "eight bits": Sensor(
        gain_dn_per_e=0.01889, shot_noise=True, read_noise_e=13.0, black_level_dn=4.0, adc_bits=8
    ),
    "no read noise": Sensor(gain_dn_per_e=0.2937, shot_noise=True, black_level_dn=2.0, adc_bits=6),
    "no counts": Sensor(gain_dn_per_e=0.02, read_noise_e=17.0, black_level_dn=4.3, adc_bits=8),
    "clipped below": Sensor(gain_dn_per_e=1.0, shot_noise=True, read_noise_e=1.6, adc_bits=12),
    "full well": Sensor(
        gain_dn_per_e=0.5, shot_noise=True, read_noise_e=1.2, black_level_dn=9.0, adc_bits=8, full_well_e=60.0
    ),
    "no converter": Sensor(gain_dn_per_e=0.5, shot_noise=True, read_noise_e=1.2, full_well_e=60.0),
    "a third of a number": Sensor(
        gain_dn_per_e=0.06, shot_noise=True, read_noise_e=5.0, black_level_dn=0.4, adc_bits=3
    ),
    "most of a number": Sensor(gain_dn_per_e=0.07, shot_noise=True, read_noise_e=14.0, adc_bits=3),
    "one number": Sensor(gain_dn_per_e=0.05, shot_noise=True, read_noise_e=20.0, adc_bits=3),
    "wide": Sensor(
        gain_dn_per_e=0.01889, shot_noise=True, read_noise_e=500.0, black_level_dn=4.0, adc_bits=8
    ),
    "wider than the range": Sensor(gain_dn_per_e=0.3, shot_noise=True, read_noise_e=40.0, adc_bits=3),
    "wide over a full well": Sensor(
        gain_dn_per_e=0.5, shot_noise=True, read_noise_e=8.0, black_level_dn=9.0, adc_bits=6, full_well_e=60.0
    ),
}
MEANS = np.array([0.0, 0.05, 2.7, 31.0, 110.0])
SHIFTS = np.array([0.0, 3.7, -11.3, 20.0])


def by_masses(sensor: Sensor, rate: float, offset: float) -> tuple[float, float]:
    """The naive twin: every count and every number, one after the other."""
    numbers = np.arange(2**sensor.adc_bits) if sensor.adc_bits else None
    mean = square = 0.0
    counts = np.arange(int(rate + 12 * math.sqrt(rate) + 40)) if sensor.shot_noise else np.array([rate])
    masses = poisson.pmf(counts, rate) if sensor.shot_noise else np.ones(1)
    for count, mass in zip(counts.tolist(), masses.tolist(), strict=True):
        well = math.inf if sensor.full_well_e is None else sensor.full_well_e
        centre = sensor.black_level_dn + sensor.gain_dn_per_e * (min(count, well) + offset)
        std = sensor.gain_dn_per_e * sensor.read_noise_e
        if numbers is None:
            mean, square = mean + mass * centre, square + mass * (centre**2 + std**2)
            continue
        if std == 0:
            law = (numbers == np.clip(np.rint(centre), 0, numbers[-1])).astype(float)
        else:
            below = ndtr((numbers[:-1] + 0.5 - centre) / std)
            law = np.diff(np.concatenate([[0.0], below, [1.0]]))
        mean, square = mean + mass * float(law @ numbers), square + mass * float(law @ numbers**2)
    return mean, square - mean**2


@pytest.mark.parametrize("name", NAMED_SENSORS)
def test_moments_are_those_of_the_law(name: str) -> None:
    sensor = NAMED_SENSORS[name]
    mean, variance = sensor.moments(MEANS[:, None], SHIFTS)
    for i, rate in enumerate(MEANS):
        for j, offset in enumerate(SHIFTS):
            expected = by_masses(sensor, float(rate), float(offset))
            assert mean[i, j] == pytest.approx(expected[0], abs=2e-6)
            assert variance[i, j] == pytest.approx(expected[1], abs=2e-6)


@pytest.mark.parametrize("read_noise_e", [60.0, 500.0])
def test_wide_noise_takes_few_counts_and_no_codes(read_noise_e: float) -> None:
    """The law of 2,000 electrons at both ends of the converter, and the time of the frames of 1,000 outputs."""
    sensor = Sensor(gain_dn_per_e=0.02, shot_noise=True, read_noise_e=read_noise_e, adc_bits=6)
    offsets = np.array([-2000.0, 0.0, 1100.0])  # means of 0, 40 and 62 of 63 DN
    law = number_law(np.full((1, 3), 2000.0), offsets, sensor)
    codes = law.first + np.arange(law.masses.shape[2])
    expected = (law.masses @ codes)[0]
    mean, variance = sensor.moments(2000.0, offsets)
    np.testing.assert_allclose(mean, expected, atol=1e-6)
    squares = np.square(codes - expected[:, None])
    np.testing.assert_allclose(variance, np.sum(law.masses[0] * squares, axis=1), atol=1e-6)
    assert np.all(np.abs(variance - sensor.variance_dn2(2000.0))[[0, 2]] > 0.1), "no end is met"
    start = time.process_time()
    sensor.moments(np.full((4, 1000), 2000.0), offsets[0])
    assert time.process_time() - start < 5  # a sum over codes takes a minute at 500 electrons


def test_the_closed_form_and_the_rounding_limit_hold() -> None:
    sensor = Sensor(gain_dn_per_e=1.0, shot_noise=True, read_noise_e=1.6, black_level_dn=100.0, adc_bits=12)
    mean, variance = sensor.moments(MEANS, 0.3)
    np.testing.assert_allclose(mean, 100.3 + MEANS, atol=1e-9)
    np.testing.assert_allclose(variance, sensor.variance_dn2(MEANS), atol=1e-8)
    mean, variance = NAMED_SENSORS["full well"].moments(1e9, 0.0)
    assert mean == pytest.approx(39.0, abs=1e-6)
    assert variance == pytest.approx(NAMED_SENSORS["full well"].moments(1e4, 0.0)[1], abs=1e-9)
    sensor = NAMED_SENSORS["eight bits"]
    rates = np.concatenate([np.linspace(0.05, 300, 400), np.geomspace(300, 5000, 50)])
    offsets = np.linspace(0, 1 / sensor.gain_dn_per_e, 60)
    apart = np.abs(sensor.moments(rates[:, None], offsets)[1] - sensor.variance_dn2(rates)[:, None])
    assert 0.3 * sensor.rounding_limit_dn2(0.05) < apart.max() <= sensor.rounding_limit_dn2(0.05)


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["camera", "camera_low_light"])
@pytest.mark.parametrize("blank", [True, False])
def test_readings_have_the_stated_mean_and_variance(name: str, blank: bool, seed: int) -> None:
    x = torch.zeros(1, 20) if blank else torch.ones(1, 20)
    with open_device(name, n_inputs=20, n_outputs=500, seed=seed) as device:
        y = device.project(x.repeat(800, 1)).double().numpy()
        variance, mean = device.reading_variance(x).numpy()[0], device.reading_mean(x).numpy()[0]
        low, high = device.noise.variance_bounds()
        closed = device.recovery.variance(device.exposure.sensor.variance_dn2(device.frame_rates(x)))[0]
    assert abs(z_of_variance(y, variance)) < 5 < abs(z_of_variance(y, variance * 1.1))
    z = (y.mean(axis=0) - mean) / np.sqrt(variance / len(y))
    assert abs(z.mean()) < 5 / math.sqrt(z.size)
    assert abs(np.mean(z**2) - 1) < 5 * math.sqrt(2 / z.size)
    assert np.all((low <= variance) & (variance <= high))
    if name == "camera" and blank:  # what the closed form said
        assert abs(z_of_variance(y, closed)) > 5


@pytest.mark.compiled
def test_blank_frames_have_the_stated_moments(seed: int) -> None:
    with open_device("camera", n_inputs=4, n_outputs=500, seed=seed) as device:
        frames = device.flat_frames(2000).astype(float)
        exposure = device.exposure
        mean, variance = exposure.sensor.moments(exposure.dark_e, exposure.offset_e)
        sensor = exposure.sensor
        closed = sensor.black_level_dn + sensor.gain_dn_per_e * (exposure.dark_e + exposure.offset_e)
    errors = (frames.mean(axis=0) - mean) / np.sqrt(variance / len(frames))
    assert abs(np.mean(errors**2) - 1) < 5 * math.sqrt(2 / errors.size)
    biased = (frames.mean(axis=0) - closed) / np.sqrt(variance / len(frames))
    assert abs(np.mean(biased**2) - 1) > 5 * math.sqrt(2 / errors.size)


def test_a_clipped_dark_frame_lowers_the_stated_least_variance() -> None:
    camera = {"sensor": {"black_level_dn": 0.0, "dsnu_e": 0.0}}
    with open_device("camera_low_light", n_inputs=4, n_outputs=50, camera=camera) as device:
        low, _ = device.noise.variance_bounds()
        assert np.all(low <= device.reading_variance(torch.zeros(1, 4)).numpy()[0])
        dark = device.exposure.sensor.moments(device.exposure.dark_e)[1].mean()
        assert dark < device.exposure.sensor.variance_dn2(device.exposure.dark_e).mean()


LINK = {"packing": "mono10p", "link_mb_s": 115.0}
BITS = {"mono8": 8, "mono10p": 10, "mono12p": 12, "mono16": 16}
BRIGHT = Sensor(gain_dn_per_e=2.7, adc_bits=12, **COUNTS)


def linked(packing: str | None, camera: dict[str, Any] | None = None, outputs: int = 200) -> CameraDevice:
    frames = {} if packing is None else {"packing": packing}
    name = "camera_low_light"
    return open_device(name, n_inputs=8, n_outputs=outputs, seed=3, camera=camera or {}, frames=frames)


@pytest.mark.parametrize("faults", [{}, {"light": {"power": {"law": "log_normal", "rms": 0.1}}}])
@pytest.mark.parametrize("packing", list(BITS))
def test_a_link_sends_the_highest_bits(packing: str, faults: dict[str, Any]) -> None:
    shown = torch.ones(5, 8, dtype=torch.uint8)
    with linked(None, faults) as whole, linked(packing, faults) as packed:
        fine, coarse = (np.asarray(each.intensities(shown)) for each in (whole, packed))
    step = 2 ** max(12 - BITS[packing], 0)
    np.testing.assert_array_equal(coarse, np.floor(fine / step))
    assert np.array_equal(coarse, np.rint(fine / step)) == (step == 1)


def test_the_law_of_what_arrives_is_that_of_the_finer_numbers_cut() -> None:
    rates, offsets = np.array([[0.5, 40.0], [300.0, 1600.0]]), np.array([0.3, -0.7])
    for sensor in (BRIGHT, replace(BRIGHT, black_level_dn=0.0, read_noise_e=0.0)):
        fine = number_law(rates, offsets, sensor)
        for bits in (8, 10):
            coarse = number_law(rates, offsets, sensor.sent_in(bits))
            places = (fine.first + np.arange(fine.masses.shape[2])) // 2 ** (12 - bits) - coarse.first
            summed = np.zeros_like(coarse.masses)
            kept = (places >= 0) & (places < summed.shape[2])
            np.add.at(summed, (slice(None), slice(None), places[kept]), fine.masses[:, :, kept])
            np.testing.assert_allclose(summed, coarse.masses, atol=1e-12)
            shifted = replace(sensor.sent_in(bits), black_level_dn=sensor.black_level_dn / 2 ** (12 - bits))
            assert not np.allclose(number_law(rates, offsets, shifted).masses, coarse.masses, atol=1e-3)
    assert BRIGHT.sent_in(12) is BRIGHT
    refuses(ValueError, "give adc_bits", lambda: replace(BRIGHT, adc_bits=None).sent_in(8))


@pytest.mark.parametrize("camera", ["camera_low_light", "camera_fluctuating"])
def test_coarse_numbers_keep_the_boxes_and_credit_no_noise_that_rounding_hides(camera: str) -> None:
    every = torch.tensor([[(k >> i) & 1 for i in range(8)] for k in range(0, 256, 5)]).float()
    changes = {"anchor": {"frames": 0}, "light": {"anchor_flux_per_s": 12.0}}
    window = {"n_inputs": 8, "n_outputs": 1000, "seed": 3}
    laws: dict[str, PhotonCountNoise | FluctuatingCountNoise] = {}
    for packing in ("mono12p", "mono10p", "mono8"):
        with open_device(camera, camera=changes, frames={"packing": packing}, **window) as twin:
            law = twin.noise
            laws[packing] = law
            variance = twin.reading_variance(every).numpy()
            least, most = law.variance_bounds()
            assert np.all((least <= variance * (1 + 1e-9)) & (variance <= most * (1 + 1e-9)))
            if packing == "mono8":
                linear = replace(law, weight=laws["mono12p"].weight, added_variance=0.0)
                assert np.any(linear.variance_bounds()[0] > variance)
        for edge in ("rate_low", "rate_high"):
            np.testing.assert_array_equal(getattr(law, edge), getattr(laws["mono12p"], edge))


def test_calibration_finds_the_gain_of_the_numbers_that_arrive() -> None:
    with linked("mono10p", outputs=300) as twin:
        found = calibrate(twin, plan=Plan(frames=64), readings=30, beta=1e-6, confidence=1 - 1e-6)
    gain = found.certificate.estimates["gain_dn_per_e"]
    assert 0.24 < gain.low <= 0.25 <= gain.high < 0.26
    described = [load_description("camera_low_light", {"frames": {"packing": each}}) for each in BITS]
    digests = {digest_of(each) for each in described}
    assert len(digests) == len(BITS)


@pytest.mark.parametrize(("packing", "size"), [*zip(BITS, (1001, 1252, 1502, 2002), strict=True)])
def test_a_frame_takes_at_least_the_time_of_its_bytes(packing: str, size: int) -> None:
    frames = load_description("camera", {"frames": LINK | {"packing": packing}}).frames
    assert frames.frame_bytes(1001) == size
    assert frames.period_us(1001) == 500.0
    assert frames.period_us(1_000_000) == pytest.approx(1e6 * BITS[packing] / 8 / 115)
    assert load_description("camera").frames.period_us(1_000_000) == 500.0


def test_seconds_and_joules_follow_the_link() -> None:
    with open_device("camera", n_inputs=4, n_outputs=100_000, frames=LINK | {"packing": "mono8"}) as twin:
        spent = spent_by(twin, twin.intensities, np.ones((3, 4), dtype=np.uint8))
    assert spent.seconds == pytest.approx(3 * 100_000 / 115e6)
    assert spent.joules == pytest.approx(30 * spent.seconds)
    described = load_description("camera_low_light", {"frames": LINK})
    assert "sent as mono10p: 10 of the converter's 12 bits" in noise_line(described)
    rows = {row[0]: row[1:4] for row in number_rows(described)}
    assert rows["frames.link_mb_s"] == ("115", "MB/s", "override")


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("camera", {"frames": {"link_mb_s": 115.0}}, "frames: link_mb_s = 115: .* give packing"),
        ("camera", {"frames": {"packing": "mono9"}}, "frames.packing: must be 'mono8', 'mono10p'"),
        ("camera", {"frames": LINK | {"link_mb_s": 0.0}}, "frames.link_mb_s: must be more than 0"),
        ("camera", {"frames": LINK, "camera": {"sensor": {"adc_bits": None}}}, "frames.packing: 'mono10p'"),
        ("pcm", {"frames": LINK}, "frames.packing: 'mono10p': a programmable chip has no camera's link"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(name: str, changes: dict[str, Any], line: str) -> None:
    refuses(ConfigError, line, load_description, name, changes)
