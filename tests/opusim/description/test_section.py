"""Errors of a configuration become one line that names the key; nested mappings are merged and flattened."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, BeforeValidator, Field, SerializeAsAny, ValidationError, model_validator

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
        (
            {"inner": 3},
            "x.toml: inner: is a section, not one value; give its keys instead of 3, such as width = 3",
        ),
        (
            {"inner": object()},
            "x.toml: inner: is a section, not one value; give its keys instead of a object, such",
        ),
        ({"count": "many"}, "x.toml: count: must be a valid integer"),
        ({"count": 13}, "x.toml: inner.width: 1.0: is no width for 13"),
        ({"count": 14}, "x.toml: shape.kind: 'round': does not fit 14"),
        ({"count": 15}, "x.toml: configuration: 15 is odd"),
    ],
)
def test_the_first_problem_names_its_key(content: Any, message: str) -> None:
    assert problem(content).startswith(message)


class Documented(Section):
    """A section."""

    width: int = 3
    """Number of pixels,
    at least 1."""
    depth: int = 2
    name: str = Field("a", description="Own words.")
    """Not these."""


class Derived(Documented):
    """Inherits keys, and documents one again."""

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
    with pytest.raises(ConfigError, match="more than 64 parts"):
        nested(".".join("a" * 65), 1)


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
