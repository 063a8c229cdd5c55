import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opusim.camera.from_description import cautions
from opusim.cli import app
from opusim.description.schema import load_description, packaged_names
from opusim.errors import ConfigError
from opusim.files import to_toml

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
    assert all(word in line for word in ("6.24e+09", "e⁻/s", "assumed", "1 nA"))
    line = next(line for line in result.stdout.splitlines() if "exposure_us" in line)
    assert all(word in line for word in ("400", "µs", "measured"))
    assert "can: project, draw, intensities, matrix" in result.stdout
    shown = " ".join(result.stdout.split())
    assert "1,000 vectors 500 ms; frame times only, the host's own is not known" in shown
    assert "1,000 vectors 4.3 s" in RUNNER.invoke(app, ["show", "camera"]).stdout
    assert "at 25 °C the dark current makes 14.821% of its variance" in result.stdout
    result = RUNNER.invoke(app, ["show", "gaussian", "--json"])
    assert json.loads(result.stdout) == load_description("gaussian").dump()


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_show_refuses_what_its_class_would_refuse(tmp_path: Path, options: list[str]) -> None:
    content = load_description("gaussian").dump()
    del content["medium"]
    file = tmp_path / "bare.toml"
    file.write_text(to_toml(content))
    refused = RUNNER.invoke(app, ["show", str(file), *options]).exception
    assert "medium: missing; a simulated device needs [medium] with a seed" in str(refused)


def test_packaged_cameras_need_no_caution() -> None:
    assert [cautions(load_description(name)) for name in packaged_names()] == [[]] * len(packaged_names())


@pytest.mark.parametrize(
    ("settings", "told", "remedies"),
    [
        (
            ["adc_bits=12"],
            "camera.sensor.gain_dn_per_e = 0.0189 puts full well at 259 of 4,095 DN; set it to 0.303,",
            ["gain_dn_per_e=0.303", "black_level_dn=12"],
        ),
        (
            ["read_noise_e=500"],
            "read_noise_e = 500 is 9.45 DN, and dark frames lie at 4 DN: noise is cut at code 0, and entries of B "
            "are not N(0, 1); set camera.sensor.black_level_dn to 29",
            ["black_level_dn=29"],
        ),
    ],
)
def test_copy_and_show_caution_against_a_forgotten_gain_and_noise_below_code_0(
    settings: list[str], told: str, remedies: list[str], tmp_path: Path
) -> None:
    def shown(name: str, settings: list[str]) -> list[str]:
        """What copy and show say, each as one line."""
        words = [word for setting in settings for word in ("--set", f"camera.sensor.{setting}")]
        out = str(tmp_path / f"{name}.toml")
        results = [
            RUNNER.invoke(app, [*line]) for line in (["copy", "camera", "--out", out, *words], ["show", out])
        ]
        assert [result.exit_code for result in results] == [0, 0]
        return [" ".join(result.stdout.split()) for result in results]

    for text in shown("forgotten", settings):
        assert told in text
        assert all(remedy.split("=")[1] in text.split("caution:", 1)[1] for remedy in remedies)
    for text in shown("mended", [*settings, *remedies]):
        assert "caution:" not in text


def test_copy_writes_a_description_with_changed_keys(tmp_path: Path) -> None:
    out = tmp_path / "warm.toml"
    words = ["copy", "camera_low_light", "--set", "camera.dark.temperature_c=45", "--out", str(out)]
    assert RUNNER.invoke(app, words).exit_code == 0
    found, source = load_description(out), load_description("camera_low_light")
    assert found.name == "warm"
    assert found.camera.dark.temperature_c == 45
    assert found.provenance["camera.dark.temperature_c"].status == "override"
    same = source.dump() | {"name": "warm"}
    changed = {key for key in same if same[key] != found.dump()[key]}
    assert changed == {"camera", "provenance", "title"}
    assert found.title == f"copy of camera_low_light: {source.title}"
    again = RUNNER.invoke(app, words)
    assert isinstance(again.exception, ConfigError)
    assert "exists already" in str(again.exception)


def test_a_copy_claims_no_measurement_of_the_original(tmp_path: Path) -> None:
    out, again = tmp_path / "bench.toml", tmp_path / "second.toml"
    words = ["copy", "camera", "--set", "camera.sensor.read_noise_e=9.5", "--out", str(out)]
    told = ["--title", "Bench 3", "--source", "bench 3, 2026-11-28"]
    assert RUNNER.invoke(app, [*words, *told]).exit_code == 0
    found, original = load_description(out), load_description("camera")
    assert found.title == "Bench 3"
    assert found.provenance["camera.sensor.read_noise_e"].source == "bench 3, 2026-11-28"
    assert {key: entry.status for key, entry in found.provenance.items() if entry.status != "assumed"} == {
        "camera.sensor.read_noise_e": "override"
    }
    key = "camera.light.exposure_us"
    assert original.provenance[key].status == "measured"
    assert found.provenance[key].source == f"copied from camera (measured): {original.provenance[key].source}"
    # a title among the keys that are set is a title too
    words = ["copy", str(out), "--set", "title=Bench 4", "--out", str(again)]
    assert RUNNER.invoke(app, words).exit_code == 0
    assert load_description(again).title == "Bench 4"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("camera.dark.temprature_c=45", "did you mean 'temperature_c'"),
        ("camera.dark.temperature_c=145", "must lie in"),
        ("temperature", "is not of the form key=value"),
    ],
)
def test_copy_refuses_a_wrong_key_and_writes_nothing(setting: str, words: str, tmp_path: Path) -> None:
    out = tmp_path / "warm.toml"
    result = RUNNER.invoke(app, ["copy", "camera_low_light", "--set", setting, "--out", str(out)])
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)
    assert not out.exists()
