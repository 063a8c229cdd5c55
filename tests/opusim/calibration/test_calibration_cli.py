import json
import re
from pathlib import Path

import numpy as np
import pytest

from opusim import load_description, open_device
from opusim.calibration.reading_noise import independence_p_values, shape_p_values
from opusim.calibration.recorded import read_frames
from opusim.calibration.recorded_transfer import reduced
from opusim.calibration.report import _CAUSES
from opusim.errors import ConfigError, NoiseBelowCertificate
from tests.opusim.common import device_refuses, run_device
from tests.oracles.sensor_frames import Pixels, Sensor, recording

pytestmark = pytest.mark.compiled

SMALL = ["--outputs", "600", "--inputs", "8", "--frames", "12", "--readings", "60"]


def test_a_camera_is_calibrated_and_checked(tmp_path: Path) -> None:
    told = run_device("calibrate", "camera_low_light", "--out", tmp_path, *SMALL, "--warm-c", "40")
    words = ("gain_dn_per_e", "DN/e⁻", "doubling_k", "certified noise: photon count")
    assert all(word in told for word in words)
    assert (tmp_path / "report.html").stat().st_size > 20_000
    certificate = tmp_path / "camera_low_light.certificate.toml"
    told = run_device("check", "camera_low_light", certificate, "--frames", "12", "--readings", "60")
    assert "the certified noise is there" in told
    device_refuses(ConfigError, "is that of 'camera_low_light'", "check", "camera", certificate)


def test_a_calibration_without_a_law_ends_with_3_and_a_check_finds_lost_noise(tmp_path: Path) -> None:
    found = run_device("calibrate", "ideal", "--out", tmp_path, *SMALL, code=3)
    told = "each output is Gaussian (constant outputs): does not hold (few electrons, rare jumps, clipping"
    assert found.count("each output is Gaussian") == 1
    assert told in found
    assert "training needs no law" not in found
    assert (tmp_path / "ideal.certificate.toml").exists()
    run_device("calibrate", "gaussian", "--out", tmp_path, *SMALL)
    certificate = tmp_path / "gaussian.certificate.toml"
    certificate.write_text(re.sub("^std = .*", "std = 0.3", certificate.read_text(), flags=re.MULTILINE))
    words = ("check", "gaussian", certificate, "--readings", "60")
    device_refuses(NoiseBelowCertificate, "standard deviation is at most", *words)


def test_every_test_of_readings_has_its_cause() -> None:
    parts = list(np.random.default_rng(1).standard_normal((2, 60, 40)))
    texts = [*independence_p_values(parts), *shape_p_values(parts)]
    found = [[part for part in _CAUSES if part in text] for text in texts]
    assert sorted(found) == sorted([part] for part in _CAUSES)


def test_frames_are_recorded(tmp_path: Path) -> None:
    out = tmp_path / "frames"
    told = run_device("record", "camera", "--out", out, "--outputs", "400", "--steps", "5")
    assert ": 52 images of 20 x 20 pixels, 8 bits" in told.replace("\n", "")
    assert len(list((out / "images").iterdir())) == 52
    device_refuses(ConfigError, "gaussian", "record", "gaussian", "--out", tmp_path / "none")


def test_recorded_frames_become_a_description_in_use(tmp_path: Path) -> None:
    np.savez(tmp_path / "frames.npz", **recording(Sensor(), np.random.default_rng(3), shape=(24, 40)))
    out = tmp_path / "bench"
    words = ("calibrate", "camera_low_light", "--recorded", tmp_path / "frames.npz", "--out", out)
    told = " ".join(run_device(*words, "--temperature-c", "30", "--title", "My bench").split())
    assert ".npz file of arrays, 120 frames of 960 pixels at 20 levels, 12 bits" in told
    assert "gain_dn_per_e" in (out / "camera.txt").read_text()
    assert (out / "camera.png").stat().st_size > 20_000
    content = json.loads((out / "camera.json").read_text())
    read_noise = content["constants"]["read_noise_e"]
    assert read_noise["low"] < read_noise["value"] < read_noise["high"]
    assert (read_noise["described"], read_noise["unit"]) == (1.6, "e⁻")
    assert sum(level["is_saturated"] for level in content["levels"]) == 1

    path = out / "camera_low_light_measured.toml"
    found = load_description(path)
    assert found.title == "My bench"
    assert found.camera.sensor.read_noise_e == float(f"{read_noise['value']:.6g}")
    assert abs(found.camera.dark.doubling.dark_current_ref_e_per_s - 30) < 2
    assert found.camera.dark.temperature_c == found.camera.dark.doubling.temperature_ref_c == 30
    assert 0.1 < found.camera.pixels.dcnu < 0.3
    entry = found.provenance["camera.sensor.read_noise_e"]
    assert entry.status == "measured"
    assert entry.source.startswith(f"{content['date']}, frames in frames.npz, limits at 95% ")
    kept = found.provenance["camera.light.exposure_us"]
    assert (kept.status, kept.source[:35]) == ("assumed", "copied from camera_low_light (assum")
    with open_device(str(path), n_inputs=4, n_outputs=20) as device:
        assert device.exposure.sensor.read_noise_e == found.camera.sensor.read_noise_e

    # measured again, the bench's own description keeps its sources
    run_device("calibrate", path, "--recorded", tmp_path / "frames.npz", "--out", out)
    twice = load_description(out / "camera_low_light_measured_measured.toml")
    assert twice.provenance["camera.light.exposure_us"] == kept


@pytest.mark.parametrize(("widths", "is_used"), [(0.5, True), (2.0, False)])
def test_a_quantum_efficiency_with_1_in_its_limits_is_1(widths: float, is_used: bool, tmp_path: Path) -> None:
    """Photons are scaled so that the estimate lies above 1 by half of, or twice, the distance to its lower limit."""
    arrays, frames = recording(Sensor(), np.random.default_rng(3), shape=(24, 40)), tmp_path / "frames.npz"
    np.savez(frames, **arrays)
    found = reduced(read_frames(frames)).estimates(0.95)["quantum_efficiency"]
    wanted = 1 + widths * (found.value - found.low) / found.value
    np.savez(frames, **arrays | {"flat_photons": arrays["flat_photons"] * found.value / wanted})
    words = ("calibrate", "camera_low_light", "--recorded", frames, "--out", tmp_path)
    if is_used:
        run_device(*words)
        description = load_description(tmp_path / "camera_low_light_measured.toml")
        assert description.camera.light.quantum_efficiency == 1
    else:
        told = "camera.light.quantum_efficiency: must be more than 0 and at most 1"
        device_refuses(ConfigError, told, *words)
    remarks = json.loads((tmp_path / "camera.json").read_text())["remarks"]
    assert any(remark.endswith("a description takes 1") for remark in remarks) is is_used


def test_the_described_dark_charge_is_not_counted_twice(tmp_path: Path) -> None:
    # 20 s of exposure at 30 electrons a second: 600 electrons in every dark frame
    rng, sensor = np.random.default_rng(5), Sensor(read=5.0, dark_spread=1e-3)
    pixels, light = Pixels(sensor, rng, (60, 80)), np.linspace(200, 4000, 8)
    dark = pixels.take(0.0, 20.0, 8)[None]
    flat = np.stack([pixels.take(photons, 20.0, 8) for photons in light])
    exposures = {"dark_exposure_us": np.array([2e7]), "flat_exposure_us": np.full(8, 2e7)}
    np.savez(tmp_path / "frames.npz", dark=dark, flat=flat, flat_photons=light, bits=12, **exposures)
    run_device("calibrate", "camera_low_light", "--recorded", tmp_path / "frames.npz", "--out", tmp_path)
    found = load_description(tmp_path / "camera_low_light_measured.toml")
    limits = json.loads((tmp_path / "camera.json").read_text())["constants"]
    width = limits["black_level_dn"]["high"] - limits["black_level_dn"]["low"]
    charge = 600 * (limits["gain_dn_per_e"]["high"] - limits["gain_dn_per_e"]["low"])
    assert abs(found.camera.sensor.black_level_dn - sensor.black) < 2 * (width + charge)
    assert abs(found.camera.sensor.read_noise_e**2 - sensor.read**2) < 30
    source = found.provenance["camera.sensor.black_level_dn"].source
    assert "less the 600 e⁻ that camera_low_light describes" in source


def test_a_recorded_folder_is_calibrated_without_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "frames"
    run_device("record", "camera_low_light", "--out", folder, "--outputs", "1600", "--steps", "10")
    told = " ".join(run_device("calibrate", "--recorded", folder, "--out", tmp_path / "out").split())
    assert "EMVA 1288 folder, 72 frames of 1,600 pixels at 21 levels, 12 bits" in told
    assert "to write a description, name the camera" in told
    gain = json.loads((tmp_path / "out" / "camera.json").read_text())["constants"]["gain_dn_per_e"]
    assert abs(gain["value"] - 1.0) < gain["high"] - gain["low"] < 0.2
    assert not list((tmp_path / "out").glob("*.toml"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "^NAME: --recorded: is missing too; name a device, or give frames in files"),
        (
            ["camera", "--bits", "8"],
            "^--bits: --recorded: is missing, and this option is for frames in files",
        ),
        (["--recorded", "x", "--warm-c", "40"], "^--warm-c: --recorded: is given, .* option is for a device"),
        (["gaussian", "--recorded", "x"], "^gaussian: kind: 'gaussian' has no camera; name a camera, or"),
        (["camera", "--recorded", "none"], "^none: --recorded: is not there"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(words: list[str], told: str, tmp_path: Path) -> None:
    device_refuses(ConfigError, told, "calibrate", *words, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_temperature_is_shown_against_noise_and_back(tmp_path: Path) -> None:
    words, figure = ("--outputs", "300", "--std"), tmp_path / "curve.png"
    assert "needs" in run_device("temperature", "camera_low_light", *words, "0.6", "--figure", figure)
    assert figure.stat().st_size > 5000
    device_refuses(ValueError, "cannot be reached by temperature", "temperature", "camera", *words, "9")
