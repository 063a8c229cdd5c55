import json
from pathlib import Path

import pytest

from opusim.camera.from_description import cautions
from opusim.description.schema import load_description, packaged_names
from opusim.errors import ConfigError
from opusim.files import to_toml
from tests.opusim.common import device_refuses, run_device


def test_list_names_every_packaged_device() -> None:
    told = run_device("list")
    assert all(name in told for name in packaged_names())
    listed = json.loads(run_device("list", "--json"))
    assert [entry["name"] for entry in listed] == list(packaged_names())
    assert [entry["name"] for entry in listed if "matrix" not in entry["can"]] == ["lighton_appliance"]


def test_show_gives_each_number_its_unit_status_and_source() -> None:
    told = run_device("show", "gaussian_temperature")
    line = next(line for line in told.splitlines() if "dark_current" in line)
    assert all(word in line for word in ("6.24e+09", "e⁻/s", "assumed", "1 nA"))
    line = next(line for line in told.splitlines() if "exposure_us" in line)
    assert all(word in line for word in ("400", "µs", "measured"))
    assert "can: project, draw, intensities, matrix" in told
    assert "1,000 vectors 500 ms; frame times only, the host's own is not known" in " ".join(told.split())
    assert "1,000 vectors 4.3 s" in run_device("show", "camera")
    assert "at 25 °C the dark current makes 14.821% of its variance" in told
    assert json.loads(run_device("show", "gaussian", "--json")) == load_description("gaussian").dump()


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_show_refuses_what_its_class_would_refuse(tmp_path: Path, options: list[str]) -> None:
    content = load_description("gaussian").dump()
    del content["medium"]
    file = tmp_path / "bare.toml"
    file.write_text(to_toml(content))
    told = r"medium: missing; a simulated device needs \[medium\] with a seed"
    device_refuses(ConfigError, told, "show", file, *options)


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
        return [
            " ".join(run_device(*line).split())
            for line in (["copy", "camera", "--out", out, *words], ["show", out])
        ]

    for text in shown("forgotten", settings):
        assert told in text
        assert all(remedy.split("=")[1] in text.split("caution:", 1)[1] for remedy in remedies)
    for text in shown("mended", [*settings, *remedies]):
        assert "caution:" not in text


def test_copy_writes_a_description_with_changed_keys(tmp_path: Path) -> None:
    out = tmp_path / "warm.toml"
    words = ["copy", "camera_low_light", "--set", "camera.dark.temperature_c=45", "--out", str(out)]
    run_device(*words)
    found, source = load_description(out), load_description("camera_low_light")
    assert found.name == "warm"
    assert found.camera.dark.temperature_c == 45
    assert found.provenance["camera.dark.temperature_c"].status == "override"
    same = source.dump() | {"name": "warm"}
    changed = {key for key in same if same[key] != found.dump()[key]}
    assert changed == {"camera", "provenance", "title"}
    assert found.title == f"copy of camera_low_light: {source.title}"
    device_refuses(ConfigError, "exists already", *words)


def test_a_copy_claims_no_measurement_of_the_original(tmp_path: Path) -> None:
    out, again = tmp_path / "bench.toml", tmp_path / "second.toml"
    words = ["copy", "camera", "--set", "camera.sensor.read_noise_e=9.5", "--out", str(out)]
    told = ["--title", "Bench 3", "--source", "bench 3, 2026-11-28"]
    run_device(*words, *told)
    found, original = load_description(out), load_description("camera")
    assert found.title == "Bench 3"
    assert found.provenance["camera.sensor.read_noise_e"].source == "bench 3, 2026-11-28"
    known = {key: entry.status for key, entry in found.provenance.items() if entry.status != "assumed"}
    assert known == {"camera.sensor.read_noise_e": "override"}
    key = "camera.light.exposure_us"
    assert original.provenance[key].status == "measured"
    assert found.provenance[key].source == f"copied from camera (measured): {original.provenance[key].source}"
    # a title among the keys that are set is a title too
    run_device("copy", out, "--set", "title=Bench 4", "--out", again)
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
    device_refuses(ConfigError, words, "copy", "camera_low_light", "--set", setting, "--out", out)
    assert not out.exists()
