"""Which keys does a device description have, which a run, and which commands? Pages written from the code itself."""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from opusim.accounting.explanation import CHECKED_HEADING
from opusim.accounting.mechanism import mechanism_classes
from opusim.accounting.theorems import known_theorems
from opusim.description.schema import DeviceDescription
from opusim.description.section import flat, variants_of
from opusim.training.cli.app import LazyGroup, app
from opusim.training.cli.options import key_rows, topics, trainer_options
from opusim.training.config.kinds import TRAINERS
from opusim.training.config.run import load_config

_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def cell(text: str) -> str:
    """Return a text as a cell of a Markdown table: one line, with bars, dollars and angle brackets escaped."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.replace("``", "`").split()))
    plain = [part if part.startswith("`") else re.sub(r"([$<>*\[\]])", r"\\\1", part) for part in parts]
    return "".join(plain).replace("|", r"\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table; cells are Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def attributes(cls: type) -> dict[str, str]:
    """Return what the docstrings of a class, of its bases and of the laws that they name say of each attribute."""
    found = {}
    for each in (*_named_classes(cls), *reversed(cls.__mro__)):
        _, _, listed = inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")
        entries = re.findall(r"^ {4}(\w+): (.+(?:\n {8,}.+)*)", listed, re.MULTILINE)
        found |= {name: " ".join(text.split()) for name, text in entries}
    return found


def _named_classes(cls: type) -> list[type]:
    """Return the classes of opusim that the docstrings of a section name, such as `opusim.camera.stages.Light`."""
    found: list[type] = []
    for word in re.findall(r"`([\w.]+)`", " ".join(each.__doc__ or "" for each in reversed(cls.__mro__))):
        try:
            named = pkgutil.resolve_name(word if "." in word else f"{found[-1].__module__}.{word}")
        except (AttributeError, ImportError, IndexError, ValueError):
            continue
        found += [named] if isinstance(named, type) and named.__module__.startswith("opusim") else []
    return found


def kind_of(field: FieldInfo) -> str:
    """Return type and range of a field in words, such as "number, above 0"."""
    bounds = [
        f"{words} {getattr(rule, name):,}"
        for rule in field.metadata
        for name, words in _BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    return ", ".join([_type_words(field.annotation), *bounds])


def _type_words(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(annotation))
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
        return " or ".join(map(_type_words, parts))
    if typing.get_origin(annotation) in (list, tuple):
        inner = [part for part in typing.get_args(annotation) if part is not Ellipsis]
        return f"list of {', '.join(dict.fromkeys(map(_plural, inner)))}"
    if typing.get_origin(annotation) is dict:
        return "table"
    words = {float: "number", int: "whole number", str: "text", bool: "true or false"}
    return words.get(annotation, "section")


def _plural(annotation: Any) -> str:
    words = _type_words(annotation)
    return f"{words}s" if words in ("number", "whole number", "text") else words


def description_sections(section: type[BaseModel], name: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield a section of a device description and those in it, each with its dotted name."""
    yield name, section
    for key, field in section.model_fields.items():
        if key != "provenance":
            for inner in variants_of(field.annotation):
                yield from description_sections(inner, f"{name}.{key}".lstrip("."))


def _key_row(section: type[BaseModel], name: str, field: FieldInfo) -> tuple[str, ...]:
    meaning = attributes(section).get(name) or field.description or ""
    default = "required"
    if not field.is_required():
        value = field.get_default(call_default_factory=True, validated_data={})
        default = "–" if value is None or isinstance(value, BaseModel | dict) else f"`{json.dumps(value)}`"
    return f"`{field.alias or name}`", kind_of(field), default, cell(meaning)


def device_description_page() -> str:
    """Return the reference of device descriptions: every section and key of the schema."""
    parts = [
        "# Keys of a device description",
        "A device is described in a TOML file; [Extending opusim](../extending.md) has a complete one. "
        "Unknown keys are refused, and every number of the device needs an entry in `[provenance]`. This page "
        "is written from the schema.",
    ]
    for name, section in description_sections(DeviceDescription):
        summary = inspect.cleandoc(section.__doc__ or "").split("\n\nAttributes:")[0]
        parts += [
            f"## `[{name}]`" if name else "## The file",
            summary.replace("``", "`"),
            table(
                ("key", "type and range", "default", "meaning"),
                [_key_row(section, key, field) for key, field in section.model_fields.items()],
            ),
        ]
    parts += [
        "## `[provenance]`",
        "One entry for each number, under its dotted key in quotes: "
        '`"noise.sigma" = { status = "measured", source = "photon transfer of 3 March, page 7" }`. '
        "A status is `measured`, `datasheet`, `fitted` (to named data), `assumed` or `override` (by the caller).",
    ]
    return "\n\n".join(parts) + "\n"


def configuration_page() -> str:
    """Return the reference of run configurations: every key of every topic."""
    parts = [
        "# Keys of a run configuration",
        "A key means the same in a TOML file, in `opusim.train(config)` and after `--set`. "
        "A key that has no effect in a run is refused. "
        "`opusim train options TOPIC` prints the same; `--search WORD` finds keys.",
    ]
    for topic, summary in topics().items():
        rows = [(f"`{key}`", f"`{default}`", cell(meaning)) for key, default, meaning in key_rows(topic)]
        parts += [
            f"## {topic}",
            cell(summary),
            table(("key", "default", "meaning"), rows) if rows else "No keys.",
        ]
    return "\n\n".join(parts) + "\n"


def commands(command: Any, words: str = "opusim") -> Iterator[tuple[str, Any]]:
    """Yield every command that does something, with the words that call it."""
    if isinstance(command, LazyGroup):
        inner = {name: command.loaded(name) for name in command.commands}
    else:
        inner = dict(getattr(command, "commands", {}))
    if not inner:
        yield words, command
    for name, each in inner.items():
        yield from commands(each, f"{words} {name}")


def _defaults(words: str) -> dict[str, str]:
    """Return what options of `opusim train KIND` and `opusim tune KIND` are if they are left out, as JSON."""
    *_, group, kind = words.split()
    if group not in ("train", "tune") or kind not in TRAINERS.every():
        return {}
    values = flat(load_config({"trainer": {"kind": kind}}).model_dump(mode="json"))
    options = trainer_options(kind, TRAINERS.find(kind))
    plain = [each for each in options if each.words is None and each.constant is None]
    return {
        each.parameter: json.dumps(values[each.key])
        for each in plain
        if values.get(each.key) not in (None, [])
    }


def _option_row(parameter: Any, defaults: Mapping[str, str]) -> tuple[str, ...]:
    name = ", ".join(f"`{option}`" for option in parameter.opts)
    is_option = parameter.opts[0].startswith("-")
    if not is_option:
        name = f"`{parameter.metavar or parameter.name.upper()}`"
    elif parameter.metavar:
        name += f" `{parameter.metavar}`"
    default = parameter.default
    shown = "required" if parameter.required else "–"
    if default not in (None, False, ()) and not callable(default):
        shown = f"`{default}`"
    elif parameter.name in defaults:
        shown = f"`{defaults[parameter.name]}`"
    return name, shown, cell(re.sub(r"\\\[", "[", parameter.help or ""))


def commands_pages() -> dict[str, str]:
    """Return the reference of the command line by page: an index, and a page for each first word and each trainer."""
    pages: dict[str, list[tuple[str, Any]]] = {}
    for words, command in commands(typer.main.get_command(app)):
        _, first, *rest = words.split()
        subject = rest[0] if first in ("train", "tune") and rest[0] in TRAINERS.every() else first
        pages.setdefault(f"commands-{subject}", []).append((words, command))
    index, texts = [], {}
    for name, listed in pages.items():
        titles = [words for words, _ in listed]
        firsts = {" ".join(words.split()[:2]) for words in titles}
        parts = ["# " + ", ".join(firsts if len(firsts) == 1 else titles)] if len(titles) > 1 else []
        for words, command in listed:
            defaults, about = _defaults(words), cell((command.help or "").replace("\b", ""))
            anchor = re.sub(r"\W+", "-", words)
            index.append((f"[`{words}`]({name}.md#{anchor})", about.split(". ")[0].rstrip(".")))
            rows = [_option_row(parameter, defaults) for parameter in command.params if not parameter.hidden]
            parts += [f"{'#' if len(titles) == 1 else '##'} {words}", about]
            parts += [table(("option", "default", "meaning"), rows)] if rows else []
        texts[name] = "\n\n".join(parts) + "\n"
    head = (
        "Any command takes `--help`, `--debug`, which shows the traceback of an error, and `--wait SECONDS`, "
        "to wait for a device that is in use. "
        "[Getting started](../getting-started.md#exit-codes) lists the exit codes."
    )
    listing = table(("command", "what it does"), index)
    return {"commands": "\n\n".join(("# Commands", head, listing)) + toctree(texts)} | texts


def toctree(pages: Iterable[str]) -> str:
    """Return a hidden table of the pages below an index."""
    return "\n".join(("", "", "```{toctree}", ":hidden:", "", *pages, "```", ""))


def api_sections(text: str) -> dict[str, str]:
    """Return the sections of the page of public names, each as a page."""
    found = re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE)
    return {f"api-{re.sub(r'[^a-z]+', '-', title.lower())}": f"# {title}\n{body}" for title, body in found}


def theorems_page() -> str:
    """Return the reference of theorems: what `opusim explain` prints of each, with links to the pages that use them."""
    mechanism_classes()  # import what defines theorems
    rows, parts = [], []
    for one in known_theorems():
        page = re.sub(r"^([\w-]+\.md)", r"[\1](../\1)", cell(one.page))
        rows.append((f"[`{one.name}`](#{one.name})", cell(one.title), page))
        parts += [f"## {one.name}", f"**Theorem.** {cell(one.statement)}", f"**Proof.** {cell(one.proof)}"]
        for heading, texts in (
            (
                CHECKED_HEADING,
                one.checked_by_code,
            ),
            ("Hypotheses taken on trust:", one.trusted),
        ):
            parts += ["\n".join([heading, "", *(f"- {cell(text)}" for text in texts)])] if texts else []
        reference = f" {cell(one.reference)}." if one.reference else ""
        parts.append(f"Computed by `{one.code}`. More in {page}.{reference}")
    head = "A statement cites its theorem by name. `opusim explain THEOREM` prints one."
    return "\n\n".join(["# Theorems", head, table(("theorem", "about", "page"), rows), *parts]) + "\n"


PAGES: dict[str, tuple[Callable[[], str], str]] = {
    "device-description": (device_description_page, "opusim/description/schema.py"),
    "configuration": (configuration_page, "training/config/run.py"),
    "commands": (lambda: commands_pages()["commands"], "training/cli/app.py"),
    "theorems": (theorems_page, "accounting/theorems.py"),
}
"""Pages by name, each with the file of the repository that a link to it names."""


def write_reference(folder: Path) -> None:
    """Write the pages into a folder."""
    texts = {name: page() for name, (page, _) in PAGES.items()} | commands_pages()
    for name, text in texts.items():
        (folder / f"{name}.md").write_text(text)
