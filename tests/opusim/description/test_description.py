"""Descriptions of devices; errors of any configuration become one line that names the key."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, BeforeValidator, Field, SerializeAsAny, ValidationError, model_validator

from opusim.description.schema import load_description, packaged_names, parse_description
from opusim.description.section import (
    BadKey,
    Section,
    StrictSection,
    described_fields,
    first_problem,
    flat,
    meant_by,
    merged,
    nested,
)
from opusim.errors import ConfigError
from tests.opusim.common import refuses

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
    unsourced = {"schema", "medium.seed", "medium.dense_limit_mib"}
    assert set(description.provenance) == set(description.numbers()) - unsourced


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


def test_overrides_are_laid_deep_and_noted_and_sigma_replaces_the_law() -> None:
    description = load_description("gaussian", {"noise": {"sigma": 0.27}, "medium": {"seed": 3}})
    assert description.noise.sigma == 0.27
    assert description.medium.seed == 3
    assert description.medium.dense_limit_mib == 1024
    assert description.provenance["noise.sigma"].status == "override"
    assert description.provenance["frames.power_w"].status == "datasheet"
    assert load_description("gaussian").noise.sigma == 0.1
    description = load_description("gaussian_temperature", {"noise": {"sigma": 0.27}})
    assert description.noise.temperature_law is None
    warmer = load_description("gaussian_temperature", {"noise": {"temperature_law": {"temperature_c": 60.0}}})
    assert warmer.noise.value() > load_description("gaussian_temperature").noise.value()


PLACES = ("noise.temperature_law", "camera.light", "bench", "lighton")
EXPOSURES = " or ".join(f"'{place}.exposure_us'" for place in PLACES)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"noise": {"sigm": 0.1}}, "gaussian: noise.sigm: unknown key; did you mean 'sigma'?"),
        ({"nois": {"sigma": 0.1}}, "gaussian: nois: unknown key; did you mean 'noise'?"),
        (
            {"read_noise_e": 5.0},
            "gaussian: read_noise_e: unknown key; did you mean 'camera.sensor.read_noise_e'?",
        ),
        ({"exposure_us": 50.0}, f"gaussian: exposure_us: unknown key; did you mean {EXPOSURES}?"),
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
    refuses(ConfigError, "gausian: name: no such device; .*; did you mean", load_description, "gausian")
    refuses(ConfigError, r"none.toml: path: cannot be read \(No such file", load_description, "none.toml")
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
        refuses(ConfigError, bits, load_description, name, {section: {part: {bits: wrong}}})


class Round(Section):
    kind: Literal["round", "ball"] = "round"
    radius: float = 1.0


class Square(Section):
    kind: Literal["square"] = "square"
    width: float = 1.0


class Needs(Section):
    kind: Literal["needs"] = "needs"
    low: float
    high: float


def registered(value: Any) -> Any:
    """What a field of registered sections does: the class of its kind validates the value."""
    return Round.model_validate(value) if isinstance(value, dict) else value


class Whole(Section):
    shape: Annotated[Round | Square | Needs, Field(discriminator="kind")] = Round()
    added: Annotated[SerializeAsAny[Section], BeforeValidator(registered)] = Round()
    inner: Square = Square()
    count: int = 1

    @model_validator(mode="after")
    def _rules(self) -> "Whole":
        if self.count == 13:
            raise BadKey("inner.width", "1.0: is no width for 13; take another")
        if self.count == 14:
            raise ValueError("shape.kind = 'round': does not fit 14")
        if self.count == 15:
            raise ValueError("15 is odd: choose another")
        return self


def problem(content: Any, model: type[BaseModel] = Whole) -> str:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(content)
    found = first_problem(caught.value, model, "x.toml", sections={"added": Round})
    assert isinstance(found, ConfigError)
    return str(found)


GIVE = "give its keys instead"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"coun": 1}, "x.toml: coun: unknown key; did you mean 'count'?"),
        ({"zzz": 1}, "x.toml: zzz: unknown key; the keys here are shape, added, inner, count"),
        ({"inner": {"widht": 1}}, "x.toml: inner.widht: unknown key; did you mean 'width'?"),
        ({"shape": {"kind": "ball", "radus": 1}}, "x.toml: shape.radus: unknown key; did you mean 'radius'?"),
        ({"added": {"radus": 1}}, "x.toml: added.radus: unknown key; did you mean 'radius'?"),
        ({"shape": {"kind": "cube"}}, "x.toml: shape.kind: 'cube' is no shape; take one of 'round'"),
        ({"shape": {"kind": "needs"}}, "x.toml: shape.low, shape.high: missing; add them"),
        ({"count": {"a": 1}}, "x.toml: count: is one value, not a section; give a value"),
        ({"inner": 3}, f"x.toml: inner: is a section, not one value; {GIVE} of 3, such as width = 3"),
        ({"inner": object()}, f"x.toml: inner: is a section, not one value; {GIVE} of a object, such"),
        ({"count": "many"}, "x.toml: count: must be a valid integer"),
        ({"count": 13}, "x.toml: inner.width: 1.0: is no width for 13"),
        ({"count": 14}, "x.toml: shape.kind: 'round': does not fit 14"),
        ({"count": 15}, "x.toml: configuration: 15 is odd"),
    ],
)
def test_the_first_problem_names_its_key(content: Any, message: str) -> None:
    assert problem(content).startswith(message)


class Documented(Section):  # a section
    width: int = 3
    """Number of pixels,
    at least 1."""
    depth: int = 2
    name: str = Field("a", description="Own words.")
    """Not these."""


class Derived(Documented):  # inherits keys, and documents one again
    depth: int = 4
    """Number of layers."""


def test_the_docstring_below_a_key_is_its_description() -> None:
    found = described_fields(Derived)
    assert found["width"].description == "Number of pixels,\nat least 1."
    assert found["depth"].description == "Number of layers."
    assert found["name"].description == "Own words."
    assert described_fields(Documented)["depth"].description is None
    assert Derived(width=7).depth == 4
    local = type("Local", (Documented,), {"__module__": "nowhere"})  # without a source
    assert described_fields(local)["width"].description is not None


def test_a_strict_section_converts_nothing() -> None:
    class Strict(StrictSection):
        number: float
        count: int = Field(alias="n")

    assert problem({"number": "1", "n": 1}, Strict).startswith("x.toml: number: must be a valid number")
    assert problem({"number": 1.0, "n": 1.0}, Strict).startswith("x.toml: n: must be a valid integer")
    assert Strict(number=1e30, count=2).number == 1e30


def test_mappings_are_merged_nested_and_flattened() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": 3}
    assert merged(base, {"a": {"b": 5}, "d": {"e": 6}}) == {"a": {"b": 5, "c": 2}, "d": {"e": 6}}
    assert base == {"a": {"b": 1, "c": 2}, "d": 3}
    assert nested("a.b.c", 1) == {"a": {"b": {"c": 1}}}
    assert flat({"a": {"b": 1, "c.d": 2}}) == {"a.b": 1, "a.c.d": 2}
    refuses(ConfigError, "more than 64 parts", nested, ".".join("a" * 65), 1)


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("PDFA", ("pdfa", "bp"), "pdfa"),
        ("dp-sgd", ("record", "none"), "record"),
        ("Learning-Rate", ("lr", "momentum"), "lr"),
        ("batchsize", ("batch_size", "scheme"), "batch_size"),
        ("sgd", ("sgd", "adam"), "sgd"),  # the word itself stands here
        ("noise", ("device", "data"), "device.noise"),
        ("noise", ("noise", "device"), "noise"),
        ("learning_rate", ("momentum",), None),
        ("whatever", ("lr", "momentum"), None),
    ],
)
def test_words_of_other_tools_are_understood(word: str, known: tuple[str, ...], meant: str | None) -> None:
    assert meant_by(word, known) == meant
