"""Numbers on a link of few bits: which bits arrive, how long they take, and what law they have."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from opusim.calibration.calibrate import calibrate
from opusim.calibration.photon_transfer import Plan
from opusim.camera.from_description import noise_line, number_rows
from opusim.camera.stages import Sensor, number_law
from opusim.description.schema import load_description
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import digest_of
from opusim.devices.registry import open_device
from opusim.errors import ConfigError
from opusim.noise import FluctuatingCountNoise, PhotonCountNoise
from tests.opusim.common import refuses, spent_by

LINK = {"packing": "mono10p", "link_mb_s": 115.0}
BITS = {"mono8": 8, "mono10p": 10, "mono12p": 12, "mono16": 16}
COUNTS = {"shot_noise": True, "full_well_e": 4000.0, "read_noise_e": 1.6, "black_level_dn": 20.0}
SENSOR = Sensor(gain_dn_per_e=2.7, adc_bits=12, **COUNTS)


def device(packing: str | None, camera: dict[str, Any] | None = None, outputs: int = 200) -> CameraDevice:
    frames = {} if packing is None else {"packing": packing}
    name = "camera_low_light"
    return open_device(name, n_inputs=8, n_outputs=outputs, seed=3, camera=camera or {}, frames=frames)


@pytest.mark.parametrize("faults", [{}, {"light": {"power": {"law": "log_normal", "rms": 0.1}}}])
@pytest.mark.parametrize("packing", list(BITS))
def test_a_link_sends_the_highest_bits(packing: str, faults: dict[str, Any]) -> None:
    shown = torch.ones(5, 8, dtype=torch.uint8)
    with device(None, faults) as whole, device(packing, faults) as packed:
        fine, coarse = (np.asarray(each.intensities(shown)) for each in (whole, packed))
    step = 2 ** max(12 - BITS[packing], 0)
    np.testing.assert_array_equal(coarse, np.floor(fine / step))
    assert np.array_equal(coarse, np.rint(fine / step)) == (step == 1)


def test_the_law_of_what_arrives_is_that_of_the_finer_numbers_cut() -> None:
    rates, offsets = np.array([[0.5, 40.0], [300.0, 1600.0]]), np.array([0.3, -0.7])
    for sensor in (SENSOR, replace(SENSOR, black_level_dn=0.0, read_noise_e=0.0)):
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
    assert SENSOR.sent_in(12) is SENSOR
    refuses(ValueError, "give adc_bits", lambda: replace(SENSOR, adc_bits=None).sent_in(8))


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
    with device("mono10p", outputs=300) as twin:
        found = calibrate(twin, plan=Plan(frames=64), readings=30, beta=1e-6, confidence=1 - 1e-6)
    gain = found.certificate.estimates["gain_dn_per_e"]
    assert 0.24 < gain.low <= 0.25 <= gain.high < 0.26
    described = [load_description("camera_low_light", {"frames": {"packing": each}}) for each in BITS]
    digests = {digest_of(each) for each in described}
    assert len(digests) == len(BITS)


@pytest.mark.parametrize(("packing", "size"), zip(BITS, (1001, 1252, 1502, 2002), strict=True))
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
