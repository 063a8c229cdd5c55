from pathlib import Path

import pytest
from typer.testing import CliRunner

from opusim.cli import app
from opusim.errors import ConfigError, NoiseBelowCertificate

pytestmark = pytest.mark.compiled

RUNNER = CliRunner(env={"COLUMNS": "160"})
SMALL = ["--outputs", "600", "--inputs", "8", "--frames", "12", "--readings", "60"]


def test_a_camera_is_calibrated_and_checked(tmp_path: Path) -> None:
    result = RUNNER.invoke(
        app, ["calibrate", "camera_low_light", "--out", str(tmp_path), *SMALL, "--warm-c", "40"]
    )
    assert result.exit_code == 0, result.output
    assert all(
        word in result.stdout
        for word in ("gain_dn_per_e", "DN/e⁻", "doubling_k", "certified noise: photon count")
    )
    assert (tmp_path / "report.html").stat().st_size > 20_000
    certificate = tmp_path / "camera_low_light.certificate.toml"
    checked = RUNNER.invoke(
        app, ["check", "camera_low_light", str(certificate), "--frames", "12", "--readings", "60"]
    )
    assert checked.exit_code == 0, checked.output
    assert "the certified noise is there" in checked.stdout
    other = RUNNER.invoke(app, ["check", "camera", str(certificate)])
    assert isinstance(other.exception, ConfigError)


def test_a_calibration_that_certifies_no_law_ends_with_3(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["calibrate", "ideal", "--out", str(tmp_path), *SMALL])
    assert result.exit_code == 3, result.output
    assert "this does not hold: each output is Gaussian (constant outputs)" in result.stdout
    assert (tmp_path / "ideal.certificate.toml").exists()


def test_a_check_fails_where_the_noise_is_gone(tmp_path: Path) -> None:
    RUNNER.invoke(app, ["calibrate", "gaussian", "--out", str(tmp_path), *SMALL])
    certificate = tmp_path / "gaussian.certificate.toml"
    text = certificate.read_text()
    line = next(line for line in text.splitlines() if line.startswith("std = "))
    certificate.write_text(text.replace(line, "std = 0.3"))
    result = RUNNER.invoke(app, ["check", "gaussian", str(certificate), "--readings", "60"])
    assert isinstance(result.exception, NoiseBelowCertificate)


def test_frames_are_recorded(tmp_path: Path) -> None:
    out = tmp_path / "frames"
    result = RUNNER.invoke(app, ["record", "camera", "--out", str(out), "--outputs", "400", "--steps", "5"])
    assert result.exit_code == 0, result.output
    assert ": 52 images of 20 x 20 pixels, 8 bits" in result.stdout.replace("\n", "")
    assert len(list((out / "images").iterdir())) == 52
    refused = RUNNER.invoke(app, ["record", "gaussian", "--out", str(tmp_path / "none")])
    assert isinstance(refused.exception, ConfigError)


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


@pytest.mark.parametrize("name", ["camera", "camera_low_light"])
def test_show_prints_what_each_stage_makes_of_the_variance(name: str) -> None:
    shown = RUNNER.invoke(app, ["show", name]).stdout
    assert all(
        word in shown
        for word in ("photon shot noise", "dark current", "read noise", "rounding", "e⁻ of light")
    )
