"""Command-line options from the typed fields of the configuration, and the list of its keys by topic."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from opusim.description.section import default_of, described_fields, meant_by, merged, nested
from opusim.errors import ConfigError
from opusim.files import quoted
from opusim.training.config.kinds import KINDS, PROTECTIONS, TrainerSection
from opusim.training.config.run import RunConfig, load_config, named_trainer
from opusim.training.config.sections import MODEL_NAMES

Config = Annotated[
    Path | None, typer.Option(help="Run configuration: a TOML file, or the config.json of a run.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the configuration; repeatable."),
]
Out = Annotated[Path | None, typer.Option(help="The run folder; a new one under ./runs by default.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", help="No progress bar and no table; print only the run folder.")
]
Callbacks = Annotated[
    list[str] | None,
    typer.Option(
        "--callback",
        metavar="MODULE:FUNCTION",
        help="A function of yours that returns an opusim.Callback, such as a logger; repeatable.",
    ),
]
TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        help="Execute the user-supplied model or loss that the run names; its file and digest are shown.",
    ),
]
PRIVACY = "Privacy"


@dataclass(frozen=True, eq=False)
class KeyOption:
    """An option that sets one key of the configuration.

    Attributes:
        name: The option without its dashes.
        key: The dotted key.
        annotation: Type of the value.
        help: Its help text.
        panel: Heading under which help lists it, or None for the first.
        words: The values that it takes, with the keys that each sets; or None if it takes any value.
        also: Other keys that it sets.
        many: Whether the value is a list, separated by commas.
        constant: Value that a switch sets, or None for an option with a value.
    """

    name: str
    key: str
    annotation: Any
    help: str
    panel: str | None = None
    words: Mapping[str, Mapping[str, str]] | None = None
    also: Mapping[str, str] = dataclasses.field(default_factory=dict)
    many: bool = False
    constant: str | None = None

    @property
    def parameter(self) -> str:
        """Name of the command's parameter."""
        return self.name.replace("-", "_")

    @property
    def option(self) -> Any:
        """The annotation that typer reads."""
        is_pair = self.annotation is bool and self.constant is None
        dashed = f"--{self.name}/--no-{self.name}" if is_pair else f"--{self.name}"
        described = typer.Option(dashed, help=self.help.replace("[", r"\["), rich_help_panel=self.panel)
        return Annotated[self.annotation | None, described]

    def change(self, value: Any) -> dict[str, Any]:
        """The nested mapping that sets the key."""
        if self.words is not None:
            return {}
        if self.many:
            value = str(value).split(",")
        return nested(self.key, value if self.constant is None else self.constant)

    def implied(self, value: Any) -> Mapping[str, str]:
        """The other keys that a value sets; raise ValueError unless it is one of the option's words."""
        if self.words is None:
            return self.also
        if value not in self.words:
            raise ValueError(f"--{self.name} {value}: must be one of {', '.join(self.words)}")
        return self.words[value]


DATA = KeyOption(
    "data",
    "data.name",
    str,
    "digits (embedded), mnist or fashion-mnist (from $OPUSIM_DATA, else downloaded), cifar-10 ($OPUSIM_DATA); "
    "csv:PATH or parquet:PATH with --label; npz:PATH with arrays x and y; folder:PATH with images in a folder for each "
    "class; text:PATH; or package.module:function, which returns (x, y), a data set of torch or a DataFrame.",
)
LABEL = KeyOption("label", "data.label", str, "Column to predict, for --data csv:PATH or parquet:PATH.")
USER = KeyOption(
    "user",
    "data.user",
    str,
    "Column with the ID of each record's user, for --set protection.unit=user; it is no feature.",
)
MODEL = KeyOption(
    "model",
    "model.name",
    str,
    f"Network: {', '.join(MODEL_NAMES)}; or the import path package.module:factory of a class or function; "
    "--set model.options.KEY=VALUE sets its options.",
)
EPOCHS = KeyOption("epochs", "epochs", int, "Passes over the training records.")
SEED = KeyOption("seed", "seed", int, "Seed of initialisation, batches and simulated noise.")
DEVICE = KeyOption(
    "device",
    "device.name",
    str,
    "Device: a name of `opusim device list`, a TOML file, or remote://HOST:PORT.",
)
EPSILON = KeyOption(
    "epsilon",
    "protection.epsilon",
    float,
    "Privacy budget at delta. Sets the noise multiplier unless you give one. Training stops before the step that would "
    "exceed it.",
    PRIVACY,
)
DELTA = KeyOption("delta", "protection.delta", float, "delta of every guarantee (1e-5 by default).", PRIVACY)
NOISE_MULTIPLIER = KeyOption(
    "noise-multiplier",
    "protection.noise_multiplier",
    float,
    "Standard deviation of the central noise over the clip norm.",
    PRIVACY,
)
RELEASE = KeyOption(
    "release",
    "mode",
    bool,
    "Draw from the system's entropy; store no seed and no private figure.",
    PRIVACY,
    constant="release",
)
_RESERVED = {"model", "config", "set", "settings", "out", "quiet", "help", "debug", "device", "protect"}


def say(*texts: str | None, err: bool = True) -> None:
    """Write paragraphs as wide as the output, on the error stream if `err`; None is left out."""
    from opusim.tables import wrapped

    for text in texts:
        if text is not None:
            typer.echo(wrapped(text), err=err)


def say_trusted(facts: Mapping[str, Any]) -> None:
    """Print the user-supplied code that a run is about to execute."""
    from opusim.training.networks.user_code import described_code

    for line in described_code(facts):
        typer.echo(f"user-supplied code: {line}", err=True)


def trainer_options(kind: str, section: type[TrainerSection]) -> list[KeyOption]:
    """The options of `opusim train KIND`: the shared ones, then its flags and one for each field of its section."""
    shared = [DATA, LABEL, USER, *([MODEL] if section.any_module else []), EPOCHS, SEED]
    if section.device_keys is not None:
        shared.append(replace(DEVICE, also=section.device_keys))
    taken = [name for name in protections_of(kind, section) if name != "none"]
    text = f"What is protected: {', '.join(taken)}; `opusim train options NAME` explains each."
    protect = KeyOption("protect", "protection.kind", str, text, PRIVACY)
    shared += [protect, EPSILON, DELTA, NOISE_MULTIPLIER, RELEASE]
    fields, panel = dict(_fields(section, "trainer.")), f"Options of {kind}"
    own = []
    for flag in section.flags:
        field = fields.pop(flag.key, None)
        annotation = str if flag.words is not None else float if field is None else _type(field)
        meaning = flag.help or ("" if field is None else _short(field))
        own.append(KeyOption(flag.name, flag.key, annotation, meaning, panel, words=flag.words))
    names = _RESERVED | {option.name for option in [*shared, *own]}
    for key, field in fields.items():
        name = key.rpartition(".")[2].replace("_", "-")
        if name not in names and key != "trainer.kind":
            many = typing.get_origin(_plain(field.annotation)) is tuple
            own.append(KeyOption(name, key, _type(field), _short(field), panel, many=many))
            names.add(name)
    return [*shared, *own]


def protections_of(kind: str, section: type[TrainerSection]) -> list[str]:
    """The values of protection.kind that a trainer takes."""
    others = [name for name, protection in PROTECTIONS.every().items() if kind in protection.trainers]
    return list(dict.fromkeys([*section.protections, *others]))


def changes_of(options: Sequence[KeyOption], values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, as a nested mapping over the configuration.

    An implied key of the section protection is set only if a budget or a noise multiplier was given.
    """
    given = {option: value for option in options if (value := values.get(option.parameter)) is not None}
    given = {option: value for option, value in given.items() if value or option.constant is None}
    changes: dict[str, Any] = {}
    for option, value in given.items():
        changes = merged(changes, option.change(value))
    protects = {"epsilon", "noise_multiplier"} & set(changes.get("protection", {}))
    for option, value in given.items():
        for key, implied in option.implied(value).items():
            if protects or not key.startswith("protection."):
                changes = merged(nested(key, implied), changes)
    return changes


def resolved(kind: str, config: Path | None, settings: Sequence[str], changes: dict[str, Any]) -> RunConfig:
    """The configuration of a command for one kind of trainer: its file, options and settings; may raise ConfigError."""
    named = None if config is None else named_trainer(config)
    if named not in (None, kind):
        raise ConfigError(
            str(config),
            "trainer.kind",
            f"{named!r} contradicts the command; use: opusim train {named} --config {quoted(str(config))}",
        )
    found = load_config(config, settings, merged({"trainer": {"kind": kind}}, changes))
    if found.trainer.kind != kind:
        reason = f"{found.trainer.kind!r} contradicts the command; use: opusim train {found.trainer.kind}"
        raise ConfigError("--set", "trainer.kind", reason)
    return found


def with_signature(
    command: Callable[..., None], options: Sequence[KeyOption], more: Mapping[str, tuple[Any, Any]] = {}
) -> Callable[..., None]:
    """A command `(..., **values)` with the parameters that typer shows and reads in place of `values`.

    These are its own parameters, then config, settings, those of the options, more (annotations and defaults), out and
    quiet.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    shown = {p.name: (hints[p.name], p.default) for p in own}
    shown |= {"config": (Config, None), "settings": (Settings, None)}
    shown |= {option.parameter: (option.option, None) for option in options} | dict(more)
    shown = {**shown, "out": shown.get("out", (Out, None)), "quiet": (Quiet, False)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword, annotation=annotation, default=default)
        for name, (annotation, default) in shown.items()
    ]
    command.__annotations__ = {name: annotation for name, (annotation, _) in shown.items()}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    return command


def _fields(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Every key of a section and of the sections in it, with its field."""
    for name, field in described_fields(section).items():
        inner = _plain(field.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _fields(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _plain(annotation: Any) -> Any:
    """An annotation without `| None`."""
    parts = [part for part in typing.get_args(annotation) if part is not types.NoneType]
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return parts[0] if is_union and len(parts) == 1 else annotation


def _type(field: FieldInfo) -> Any:
    """The type of an option's value; words and lists are read from text."""
    plain = _plain(field.annotation)
    return plain if plain in (bool, int, float) else str


def _short(field: FieldInfo) -> str:
    """The first sentence of a field's description, with its choices and its default."""
    text = _meaning(field)
    first = re.split(r"(?<!eq)(?<!\be\.g)[.;] ", text, maxsplit=1)[0].rstrip(".")
    plain = _plain(field.annotation)
    choices = typing.get_args(plain) if typing.get_origin(plain) is Literal else ()
    if choices:
        words = f"{', '.join(map(str, choices[:-1]))} or {choices[-1]}"
        told = all(re.search(rf"\b{re.escape(str(choice))}\b", first) for choice in choices)
        first = first if told else f"{first} ({words})"
    default = default_of(field)
    if default is None or default == () or isinstance(default, bool) or "by default" in first:
        return f"{first}."
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    shown = repr(shown) if " " in shown else shown
    return f"{first}; {shown} by default."


def _meaning(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


KeyRow = tuple[str, str, str]
"""Dotted key, default, meaning."""


def topics() -> dict[str, str]:
    """The topics under which keys are listed, each with a line: sections, trainers, protections."""
    found = {"run": "Mode, seed, epochs, loss and torch device."}
    for name, field in RunConfig.model_fields.items():
        cls = _section(field)
        if cls is not None and name not in KINDS:
            found[name] = (cls.__doc__ or "").strip().splitlines()[0]
    for kinds in KINDS.values():
        found |= {name: section.summary for name, section in kinds.every().items()}
    return found


def key_rows(topic: str | None = None, *, search: str | None = None) -> list[KeyRow]:
    """The keys of a topic, or all; with `search` those that hold the word in their key or meaning.

    If all topics are listed, each key of a trainer or protection names its kinds in brackets. Raises ValueError for
    another topic.
    """
    if topic is not None and topic not in topics():
        hint = f", or write --search {topic}" if key_rows(search=topic) else ""
        raise ValueError(f"TOPIC: {topic!r} is no topic; take one of {', '.join(topics())}{hint}")
    rows = _topic_rows("run" if topic is None else topic)
    for name, field in RunConfig.model_fields.items() if topic is None else ():
        kinds: dict[KeyRow, list[str]] = {}
        for kind in KINDS[name].every() if name in KINDS else ():
            for row in _topic_rows(kind):
                kinds.setdefault(row, []).append(kind)
        rows += [(key, default, f"[{', '.join(of)}] {text}") for (key, default, text), of in kinds.items()]
        if name not in KINDS and _section(field) is not None:
            rows += _topic_rows(name)
    word = (search or "").lower()
    return [row for row in rows if word in row[0].lower() or word in row[2].lower()]


def keys_called(name: str, kind: str, *, roughly: bool = False) -> list[str]:
    """Return a trainer's keys that end in a name of the command line, or the key `name` of a section with that name.

    `roughly` also accepts other tools' words for a key.
    """
    others = [other for other in KINDS["trainer"].every() if other != kind]
    keys = [key for topic in topics() if topic not in others for key, _, _ in _topic_rows(topic)]
    word = name.replace("-", "_")
    called = {key.rpartition(".")[2] for key in keys}
    if word not in called:
        meant = meant_by(word, called) if roughly else None
        word = f"{word}.name" if f"{word}.name" in keys else meant or word
    return list(dict.fromkeys(key for key in keys if f".{key}".endswith(f".{word}")))


def _topic_rows(topic: str) -> list[KeyRow]:
    if topic == "run":
        plain = {key: field for key, field in described_fields(RunConfig).items() if _section(field) is None}
        return [_row(key, field) for key, field in plain.items()]
    for name, kinds in KINDS.items():
        if topic in kinds.names():
            return [_row(key, field) for key, field in _fields(kinds.find(topic), f"{name}.")]
    section = _section(RunConfig.model_fields[topic])
    return [] if section is None else [_row(key, field) for key, field in _fields(section, f"{topic}.")]


def _row(key: str, field: FieldInfo) -> KeyRow:
    return key, json.dumps(default_of(field)), _meaning(field)


def _section(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
