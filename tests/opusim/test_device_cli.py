import json

import pytest
from typer.testing import CliRunner

from opusim.cli import app
from opusim.description.loading import load_description, packaged_names
from opusim.errors import ConfigError

RUNNER = CliRunner(env={"COLUMNS": "200"})


def test_list_names_every_packaged_device() -> None:
    result = RUNNER.invoke(app, ["list"])
    assert result.exit_code == 0
    assert all(name in result.stdout for name in packaged_names())
    listed = json.loads(RUNNER.invoke(app, ["list", "--json"]).stdout)
    assert [entry["name"] for entry in listed] == list(packaged_names())
    assert [entry["name"] for entry in listed if "matrix" not in entry["can"]] == ["lighton_appliance"]


def test_show_gives_each_number_its_unit_status_and_source() -> None:
    result = RUNNER.invoke(app, ["show", "gaussian_temperature"])
    assert result.exit_code == 0
    line = next(line for line in result.stdout.splitlines() if "dark_current" in line)
    assert all(word in line for word in ("125", "e⁻/s", "assumed", "CMV2000"))
    line = next(line for line in result.stdout.splitlines() if "exposure_us" in line)
    assert all(word in line for word in ("400", "µs", "measured"))
    assert "can: project, draw, intensities, matrix" in result.stdout
    shown = " ".join(result.stdout.split())
    assert "1,000 vectors 500 ms; frame times only, the host's own is not known" in shown
    assert "1,000 vectors 4.3 s" in RUNNER.invoke(app, ["show", "camera"]).stdout
    assert "at 25 °C the dark current makes 0.030% of its variance" in result.stdout


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ideal", "noise: none"),
        ("gaussian", "noise: Gaussian, standard deviation 0.1 projection units"),
        ("reram", "standard deviation depends on input and weights, then rounded by the converter"),
    ],
)
def test_show_says_what_the_noise_is(name: str, line: str) -> None:
    assert line in RUNNER.invoke(app, ["show", name]).stdout


def test_show_json_is_the_description() -> None:
    result = RUNNER.invoke(app, ["show", "gaussian", "--json"])
    assert json.loads(result.stdout) == load_description("gaussian").dump()


def test_an_unknown_device_is_left_to_the_commands_top() -> None:
    result = RUNNER.invoke(app, ["show", "gausian"])
    assert isinstance(result.exception, ConfigError)
