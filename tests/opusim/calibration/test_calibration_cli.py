import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from opusim.calibration.reading_noise import independence_p_values, shape_p_values
from opusim.calibration.recorded import read_frames
from opusim.calibration.recorded_transfer import reduced
from opusim.calibration.report import _CAUSES
from opusim.cli import app
from opusim.description.schema import load_description
from opusim.devices.registry import open_device
from opusim.errors import ConfigError, NoiseBelowCertificate
from tests.oracles.sensor_frames import Pixels, Sensor, recording

pytestmark = pytest.mark.compiled

RUNNER = CliRunner(env={"COLUMNS": "160"})
SMALL = ["--outputs", "600", "--inputs", "8", "--frames", "12", "--readings", "60"]


def test_a_camera_is_calibrated_and_checked(tmp_path: Path) -> None:
    words = ["calibrate", "camera_low_light", "--out", str(tmp_path), *SMALL, "--warm-c", "40"]
    result = RUNNER.invoke(app, words)
    assert result.exit_code == 0, result.output
    words = ("gain_dn_per_e", "DN/e⁻", "doubling_k", "certified noise: photon count")
    assert all(word in result.stdout for word in words)
    assert (tmp_path / "report.html").stat().st_size > 20_000
    certificate = tmp_path / "camera_low_light.certificate.toml"
    words = ["check", "camera_low_light", str(certificate), "--frames", "12", "--readings", "60"]
    checked = RUNNER.invoke(app, words)
    assert checked.exit_code == 0, checked.output
    assert "the certified noise is there" in checked.stdout
    other = RUNNER.invoke(app, ["check", "camera", str(certificate)])
    assert isinstance(other.exception, ConfigError)


def test_a_calibration_without_a_law_ends_with_3_and_a_check_fails_where_noise_is_gone(
    tmp_path: Path,
) -> None:
    result = RUNNER.invoke(app, ["calibrate", "ideal", "--out", str(tmp_path), *SMALL])
    assert result.exit_code == 3, result.output
    told = "each output is Gaussian (constant outputs): does not hold (few electrons, rare jumps, clipping"
    assert result.stdout.count("each output is Gaussian") == 1
    assert told in result.stdout
    assert "training needs no law" not in result.stdout
    assert (tmp_path / "ideal.certificate.toml").exists()
    RUNNER.invoke(app, ["calibrate", "gaussian", "--out", str(tmp_path), *SMALL])
    certificate = tmp_path / "gaussian.certificate.toml"
    text = certificate.read_text()
    line = next(line for line in text.splitlines() if line.startswith("std = "))
    certificate.write_text(text.replace(line, "std = 0.3"))
    result = RUNNER.invoke(app, ["check", "gaussian", str(certificate), "--readings", "60"])
    assert isinstance(result.exception, NoiseBelowCertificate)


def test_every_test_of_readings_has_its_cause() -> None:
    parts = list(np.random.default_rng(1).standard_normal((2, 60, 40)))
    texts = [*independence_p_values(parts), *shape_p_values(parts)]
    found = [[part for part in _CAUSES if part in text] for text in texts]
    assert sorted(found) == sorted([part] for part in _CAUSES)


def test_frames_are_recorded(tmp_path: Path) -> None:
    out = tmp_path / "frames"
    result = RUNNER.invoke(app, ["record", "camera", "--out", str(out), "--outputs", "400", "--steps", "5"])
    assert result.exit_code == 0, result.output
    assert ": 52 images of 20 x 20 pixels, 8 bits" in result.stdout.replace("\n", "")
    assert len(list((out / "images").iterdir())) == 52
    refused = RUNNER.invoke(app, ["record", "gaussian", "--out", str(tmp_path / "none")])
    assert isinstance(refused.exception, ConfigError)


def test_recorded_frames_become_a_description_in_use(tmp_path: Path) -> None:
    np.savez(tmp_path / "frames.npz", **recording(Sensor(), np.random.default_rng(3), shape=(24, 40)))
    out = tmp_path / "bench"
    words = ["calibrate", "camera_low_light", "--recorded", str(tmp_path / "frames.npz"), "--out", str(out)]
    result = RUNNER.invoke(app, [*words, "--temperature-c", "30", "--title", "My bench"])
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
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
    again = ["calibrate", str(path), "--recorded", str(tmp_path / "frames.npz"), "--out", str(out)]
    assert RUNNER.invoke(app, again).exit_code == 0
    twice = load_description(out / "camera_low_light_measured_measured.toml")
    assert twice.provenance["camera.light.exposure_us"] == kept


@pytest.mark.parametrize(("widths", "is_used"), [(0.5, True), (2.0, False)])
def test_a_quantum_efficiency_whose_limits_hold_1_becomes_1(
    widths: float, is_used: bool, tmp_path: Path
) -> None:
    """Photons are scaled so that the estimate lies above 1 by half of, or twice, the distance to its lower limit."""
    arrays, frames = recording(Sensor(), np.random.default_rng(3), shape=(24, 40)), tmp_path / "frames.npz"
    np.savez(frames, **arrays)
    found = reduced(read_frames(frames)).estimates(0.95)["quantum_efficiency"]
    wanted = 1 + widths * (found.value - found.low) / found.value
    np.savez(frames, **arrays | {"flat_photons": arrays["flat_photons"] * found.value / wanted})
    words = ["calibrate", "camera_low_light", "--recorded", str(frames), "--out", str(tmp_path)]
    result = RUNNER.invoke(app, words)
    if is_used:
        assert result.exit_code == 0, result.output
        description = load_description(tmp_path / "camera_low_light_measured.toml")
        assert description.camera.light.quantum_efficiency == 1
    else:
        assert isinstance(result.exception, ConfigError)
        assert "camera.light.quantum_efficiency: must be more than 0 and at most 1" in str(result.exception)
    remarks = json.loads((tmp_path / "camera.json").read_text())["remarks"]
    assert any(remark.endswith("a description takes 1") for remark in remarks) is is_used


def test_the_described_dark_charge_is_not_counted_twice(tmp_path: Path) -> None:
    # 20 s of exposure at 30 electrons a second: 600 electrons in every dark frame
    rng, sensor = np.random.default_rng(5), Sensor(read=5.0, dark_spread=1e-3)
    pixels, light = Pixels(sensor, rng, (60, 80)), np.linspace(200, 4000, 8)
    arrays = {
        "dark": pixels.take(0.0, 20.0, 8)[None],
        "flat": np.stack([pixels.take(photons, 20.0, 8) for photons in light]),
        "dark_exposure_us": np.array([2e7]),
        "flat_exposure_us": np.full(8, 2e7),
        "flat_photons": light,
        "bits": np.array(12),
    }
    np.savez(tmp_path / "frames.npz", **arrays)
    words = ["calibrate", "camera_low_light", "--recorded", str(tmp_path / "frames.npz")]
    result = RUNNER.invoke(app, [*words, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
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
    recorded = ["record", "camera_low_light", "--out", str(folder), "--outputs", "1600", "--steps", "10"]
    assert RUNNER.invoke(app, recorded).exit_code == 0
    result = RUNNER.invoke(app, ["calibrate", "--recorded", str(folder), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
    assert "EMVA 1288 folder, 72 frames of 1,600 pixels at 21 levels, 12 bits" in told
    assert "to write a description, name the camera" in result.stdout
    gain = json.loads((tmp_path / "out" / "camera.json").read_text())["constants"]["gain_dn_per_e"]
    assert abs(gain["value"] - 1.0) < gain["high"] - gain["low"] < 0.2
    assert not list((tmp_path / "out").glob("*.toml"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "NAME: --recorded: is missing too; name a device, or give frames in files"),
        (["camera", "--bits", "8"], "--bits: --recorded: is missing, and this option is for frames in files"),
        (
            ["--recorded", "x", "--warm-c", "40"],
            "--warm-c: --recorded: is given, and this option is for a device",
        ),
        (
            ["gaussian", "--recorded", "x"],
            "gaussian: kind: 'gaussian' has no camera; name a camera, or nothing",
        ),
        (["camera", "--recorded", "none"], "none: --recorded: is not there"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(words: list[str], told: str, tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["calibrate", *words, "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(told)
    assert not (tmp_path / "out").exists()


def test_temperature_is_shown_against_noise_and_back(tmp_path: Path) -> None:
    figure = tmp_path / "curve.png"
    call = ["temperature", "camera_low_light", "--outputs", "300", "--std", "0.6", "--figure", str(figure)]
    result = RUNNER.invoke(app, call)
    assert result.exit_code == 0, result.output
    assert "needs" in result.stdout
    assert figure.stat().st_size > 5000
    refused = RUNNER.invoke(app, ["temperature", "camera", "--outputs", "300", "--std", "9"])
    assert isinstance(refused.exception, ValueError)
    assert "cannot be reached by temperature" in str(refused.exception)
