import json
from pathlib import Path

import pytest

from opusim.description.schema import load_description, packaged_names, parse_description
from opusim.errors import ConfigError

SMALL = """
schema = 1
name = "mine"
kind = "gaussian"
title = "mine"
n_inputs = 3
n_outputs = 4
[medium]
seed = 1
[frames]
frame_period_us = 500.0
power_w = 30.0
[noise]
sigma = 0.1
[provenance]
n_inputs = { status = "measured", source = "counted" }
n_outputs = { status = "measured", source = "counted" }
"frames.frame_period_us" = { status = "datasheet", source = "page 1" }
"frames.power_w" = { status = "datasheet", source = "page 1" }
"frames.frames_per_projection" = { status = "assumed", source = "two binary frames" }
"noise.sigma" = { status = "assumed", source = "a guess" }
"""


def write(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", packaged_names())
def test_packaged_descriptions_load_and_survive_a_dump(name: str) -> None:
    description = load_description(name)
    assert description.name == name
    assert parse_description(name, json.loads(json.dumps(description.dump()))) == description


def test_a_path_loads_and_each_number_has_its_source(tmp_path: Path) -> None:
    description = load_description(write(tmp_path, SMALL))
    assert description.noise.value() == 0.1
    assert description.provenance["noise.sigma"].status == "assumed"
    assert set(description.provenance) == set(description.numbers()) - {
        "schema",
        "medium.seed",
        "medium.dense_limit_mib",
    }


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("power_w = 30.0", "power_W = 30.0", "frames.power_W: unknown key; did you mean 'power_w'?"),
        ("power_w = 30.0", "power_w = -1.0", "frames.power_w: must be at least 0, got -1.0"),
        ("power_w = 30.0", 'power_w = "30"', "frames.power_w: must be a valid number, got '30'"),
        ("power_w = 30.0", "power_w = inf", "frames.power_w: must be a finite number, got inf"),
        ("seed = 1", "", "medium.seed: missing; add it"),
        ("schema = 1", "schema = 2", "schema: must be 1, got 2"),
        ("sigma = 0.1", "", "noise: give exactly one of sigma and temperature_law"),
        ('"noise.sigma" =', '"noise.sigmas" =', "description: no provenance for noise.sigma; add to"),
        ("[noise]\nsigma = 0.1", "", "description: provenance for noise.sigma, which is no number of this"),
        ('"a guess"', '""', "provenance.noise.sigma.source: String should have at least 1 character"),
        ('"assumed", source = "a', '"guessed", source = "a', "provenance.noise.sigma.status: must be"),
        ("schema = 1", "schema =", "syntax: not a TOML file"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(tmp_path: Path, before: str, after: str, message: str) -> None:
    file = write(tmp_path, SMALL.replace(before, after))
    with pytest.raises(ConfigError) as caught:
        load_description(file)
    assert str(caught.value).startswith(f"{file}: {message}")
    assert "\n" not in str(caught.value)


def test_overrides_are_laid_deep_and_noted() -> None:
    description = load_description("gaussian", {"noise": {"sigma": 0.27}, "medium": {"seed": 3}})
    assert description.noise.sigma == 0.27
    assert description.medium.seed == 3
    assert description.medium.dense_limit_mib == 1024
    assert description.provenance["noise.sigma"].status == "override"
    assert description.provenance["frames.power_w"].status == "datasheet"
    assert load_description("gaussian").noise.sigma == 0.1


def test_sigma_replaces_the_temperature_law() -> None:
    description = load_description("gaussian_temperature", {"noise": {"sigma": 0.27}})
    assert description.noise.temperature_law is None
    warmer = load_description("gaussian_temperature", {"noise": {"temperature_law": {"temperature_c": 60.0}}})
    assert warmer.noise.value() > load_description("gaussian_temperature").noise.value()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"noise": {"sigm": 0.1}}, "gaussian: noise.sigm: unknown key; did you mean 'sigma'?"),
        ({"nois": {"sigma": 0.1}}, "gaussian: nois: unknown key; did you mean 'noise'?"),
        (
            {"read_noise_e": 5.0},
            "gaussian: read_noise_e: unknown key; did you mean 'camera.sensor.read_noise_e'?",
        ),
        (
            {"exposure_us": 50.0},
            "gaussian: exposure_us: unknown key; did you mean 'noise.temperature_law.exposure_us' or "
            "'camera.light.exposure_us' or 'bench.exposure_us' or 'lighton.exposure_us'?",
        ),
        ({"name": {"sigma": 0.1}}, "gaussian: name: is one value, not a section"),
        ({"n_inputs": 2.5}, "gaussian: n_inputs: must be a valid integer, got 2.5"),
        ({"frames": None}, "gaussian: frames: missing"),
    ],
)
def test_bad_overrides_are_named(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_description("gaussian", overrides)
    assert str(caught.value).startswith(message)


def test_unknown_names_and_paths_and_temperatures_out_of_range_are_told() -> None:
    with pytest.raises(ConfigError, match="gausian: name: no such device; known are .*; did you mean"):
        load_description("gausian")
    with pytest.raises(ConfigError, match=r"none.toml: path: cannot be read \(No such file"):
        load_description("none.toml")
    with pytest.raises(ConfigError, match=r"noise.temperature_law: temperature_c = 90: must lie between"):
        load_description("gaussian_temperature", {"noise": {"temperature_law": {"temperature_c": 90.0}}})


@pytest.mark.parametrize(
    ("name", "section", "part", "bits", "also"),
    [
        ("camera", "camera", "sensor", "adc_bits", ()),
        ("pcm", "crossbar", "converter", "adc_bits", ("adc_bound",)),
        ("pcm", "crossbar", "converter", "dac_bits", ()),
    ],
)
def test_0_bits_are_no_converter(name: str, section: str, part: str, bits: str, also: tuple) -> None:
    found = load_description(name, {section: {part: {bits: 0}}})
    assert found == load_description(name, {section: {part: dict.fromkeys((bits, *also))}})
    held = getattr(getattr(found, section), part)
    assert [getattr(held, key) for key in (bits, *also)] == [None] * (1 + len(also))
    assert load_description(name) != found
    for wrong in (-1, True, 0.0):
        with pytest.raises(ConfigError, match=bits):
            load_description(name, {section: {part: {bits: wrong}}})
