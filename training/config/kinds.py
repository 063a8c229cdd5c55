"""The sections of trainers and protections, one class for each kind, found through entry points.

A package adds a kind without touching this one: it declares, in the group `opusim.trainers` or `opusim.protections`,
an entry point of the kind's name whose object is a subclass of TrainerSection or ProtectionSection. The class should
be light, because reading a configuration and `--help` import it; it names its implementation as "module:Class".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from opusim import plugins
from opusim.accounting.guarantee import Adjacency
from opusim.description.section import BadKey, did_you_mean, merged
from opusim.training.config.sections import (
    CheckpointConfig,
    Given,
    OptimizerConfig,
    Relation,
    SamplerConfig,
    Section,
)


class KindSection(Section):
    """A section chosen by its `kind`; a third party's class is found through an entry point.

    A subclass declares `kind: Literal["name"] = "name"`, its own keys as typed fields with attribute docstrings, and
    the class variables below. The docstrings become the command line's help.
    """

    summary: ClassVar[str] = ""
    """One line for help pages."""
    instead: ClassVar[Mapping[str, str]] = {}
    """Keys of other kinds that this kind lacks for a reason: what to do instead."""
    implementation: ClassVar[str] = ""
    """The class that implements this kind, as "module:Class": an `Algorithm` for a trainer, a `Protection` for a
    protection. Reading a configuration and `--help` import neither it nor torch."""
    dropped: ClassVar[Mapping[str, Mapping[Any, str]]] = {}
    """Values that stored runs may have and new ones may not: by key and value, what to take instead."""

    kind: str
    """Name of the kind."""

    @classmethod
    def defaults(cls, given: Given) -> dict[str, dict[str, Any]]:
        """Return defaults of other sections that follow from this kind and the given keys, which override them."""
        return {}

    def implementing_class(self) -> Any:
        """Import the class that `implementation` names."""
        if not (isinstance(self.implementation, str) and self.implementation):
            raise TypeError(f"{type(self).__name__}.implementation must name a class, as 'module:Class'")
        return resolve_name(self.implementation)

    def check(self, run: Any) -> None:
        """Raise ValueError, "key = value: ...", for a RunConfig whose other sections do not fit this one."""
        return


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A command-line option in addition to those of the trainer's own fields.

    Attributes:
        name: The option without its dashes.
        key: The dotted key of the run that it sets; empty for an option with words.
        help: Its help; empty takes the key's own description.
        words: The values that the option takes, with the keys that each sets. A key of the section protection is set
            only if the command protects something.
    """

    name: str
    key: str = ""
    help: str = ""
    words: Mapping[str, Mapping[str, str]] | None = None


class ProtectionSection(KindSection):
    """What is protected and how strongly; the base of every `protection.kind`.

    Code outside the configuration reads the properties below and never compares kinds. Every kind has `epsilon`,
    `noise_multiplier`, `noise`, `clip_norm`, `divisor`, `bands` and `correlation`; one without such a field has None,
    digital noise, and 1 band.
    """

    protects: ClassVar[Literal["nothing", "records", "labels"]] = "records"
    """What the guarantee is about."""
    poisson: ClassVar[bool] = False
    """Whether every step is paid for and draws a secret Poisson batch."""
    last_iterate: ClassVar[bool] = False
    """Whether only the final model is published."""
    labels_read_once: ClassVar[bool] = False
    """Whether the labels are read or randomized once, before training."""
    default_clip: ClassVar[float] = 1.0
    """Norm to which contributions are clipped if clip_norm is None."""
    cost_of_a_kill: ClassVar[str | None] = None
    """What a kill of a release run under a budget costs, as text after "Ctrl-C only; "; None if it costs nothing."""
    tested_with: ClassVar[Mapping[str, Any]] = {"noise_multiplier": 1.0}
    """Keys that `opusim audit --mechanism` sets unless they are given."""
    tested_records: ClassVar[int] = 400
    """Number of records of such a test."""
    trainers: ClassVar[tuple[str, ...]] = ()
    """Trainers that take this protection although their sections do not list it."""

    delta: float = Field(1e-5, ge=0.0, lt=1.0)
    """delta of every guarantee that this run prints; 0 asks for pure privacy, which only Laplace noise (zo) and
    randomized response give."""

    if TYPE_CHECKING:  # fields of most kinds; `__pydantic_init_subclass__` completes the others

        @property
        def epsilon(self) -> float | None:
            """Budget, or None."""

        @property
        def noise_multiplier(self) -> float | None:
            """z, or None."""

        @property
        def noise(self) -> Literal["digital", "device", "counts", "argmax"]:
            """Source of the credited noise."""

        @property
        def clip_norm(self) -> float | None:
            """The clip if it was given."""

        @property
        def divisor(self) -> float | None:
            """The divisor if it was given."""

        @property
        def bands(self) -> int:
            """Number of steps over which the noise is correlated, and of subsets of records; 1 for neither."""

        @property
        def correlation(self) -> tuple[float, ...] | None:
            """Coefficients of such noise if they are known."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Set the common values on a kind that has neither such a field nor such a property."""
        if not cls.model_fields["kind"].is_required():
            own = cls.__mro__[: cls.__mro__.index(ProtectionSection)]
            for name, value in _COMMON.items():
                if name not in cls.model_fields and not any(name in vars(base) for base in own):
                    setattr(cls, name, value)

    @property
    def credits_device(self) -> bool:
        """Whether the guarantee rests on the noise of the run's device."""
        return self.noise != "digital"

    @property
    def clip(self) -> float:
        """clip_norm, or its default for this kind."""
        return self.default_clip if self.clip_norm is None else self.clip_norm

    def relation_of(self, trainer: TrainerSection) -> Adjacency | None:
        """Which data sets the guarantee calls neighbours, or None without protection."""
        return Adjacency.REPLACE_ONE


_COMMON: Mapping[str, Any] = {
    "epsilon": None,
    "noise_multiplier": None,
    "noise": "digital",
    "clip_norm": None,
    "divisor": None,
    "bands": 1,
    "correlation": None,
}


class TrainerSection(KindSection):
    """The options of a trainer; the base of every `trainer.kind`."""

    protections: ClassVar[tuple[str, ...]] = ("none",)
    """Values of protection.kind that this trainer takes; its `Algorithm.applies` says how it applies them."""
    relations: ClassVar[tuple[Relation, ...]] = ("zero_out", "add_or_remove_one", "replace_one")
    """Values of protection.relation that this trainer takes; the first is the default."""
    any_module: ClassVar[bool] = False
    """Whether it trains any torch module, and not only fully connected networks."""
    feedback_matrix: ClassVar[bool] = False
    """Whether the error is projected by a fixed feedback matrix."""
    plain_descent: ClassVar[bool] = False
    """Whether the update is plain gradient descent, without momentum or moments."""
    device_keys: ClassVar[Mapping[str, str] | None] = None
    """Keys that the option --device sets in addition to device.name; None without that option. A key of the
    section protection is set only if the command protects something."""
    flags: ClassVar[tuple[Flag, ...]] = ()
    """Options of the command in addition to one for each own field."""
    examples: ClassVar[tuple[str, ...]] = (
        "--data digits --epochs 30",
        "--data fashion-mnist --set optimizer.lr=0.01 --set model.hidden=[512,512]",
        "--config run.toml --seed 3 --out runs/third",
    )
    """Arguments of the command that its help shows."""

    @classmethod
    def default_protection(cls, given: Given) -> str:
        """The protection.kind of a run that gives none."""
        return "none"

    @property
    def update_clipping(self) -> dict[str, Any]:
        """Arguments of `ActivationClipping` for the activations that enter an update."""
        return {}

    def uses_device(self, protection: ProtectionSection) -> bool:
        """Whether the run opens its device."""
        return False

    def divides_by_batch_size(self, protection: ProtectionSection) -> bool:
        """Whether a full batch's sum is divided by sampler.batch_size unless protection.divisor is given."""
        return protection.poisson


SectionT = TypeVar("SectionT", bound=KindSection)


@dataclass(frozen=True, kw_only=True)
class Kinds(Generic[SectionT]):
    """The kinds, all of one base, of a section; `find` accepts those that only stored runs have, lists do not."""

    section: str
    base: type[SectionT]
    stored: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """The entry-point group."""
        return f"opusim.{self.section}s"

    def names(self) -> list[str]:
        """The kinds that are installed, in alphabetical order."""
        return [name for name in plugins.names(self.group) if name not in self.stored]

    def find(self, kind: Any) -> type[SectionT]:
        """The section class of a kind; raise BadKey if there is none, or its package cannot be used."""
        names = self.names()
        if kind not in (*names, *self.stored):
            known = f"; known are {', '.join(map(repr, names))}"
            reason = f"{kind!r} is no {self.section}{did_you_mean(str(kind), names, otherwise=known)}"
            raise BadKey(f"{self.section}.kind", reason)
        try:
            return self._loaded(kind)
        except plugins.PluginError as error:
            raise BadKey(f"{self.section}.kind", str(error)) from error

    def every(self) -> dict[str, type[SectionT]]:
        """The section classes of all kinds; one whose package cannot be used is left out, with a warning."""
        found = plugins.load_all(self.group, self._loaded)
        return {name: section for name, section in found.items() if name not in self.stored}

    def validated(self, value: Any) -> Any:
        """The section that a mapping describes, validated as its kind; any other value is returned unchanged.

        Raises BadKey for an unknown kind or a key of another kind, and ValidationError for what the kind refuses.
        """
        if not isinstance(value, Mapping):
            return value
        cls, given = self.find(value.get("kind")), dict(value)
        for key, own in value.items():
            if key in cls.model_fields:
                continue
            others = [f"{name!r}" for name, other in self.every().items() if key in other.model_fields]
            if others and own is None:  # another kind's key without a value
                del given[key]
            elif others and key in cls.instead:
                kind = cls.model_fields["kind"].default
                reason = f"{own!r} does nothing under {self.section}.kind = {kind!r}: {cls.instead[key]}"
                raise BadKey(f"{self.section}.{key}", reason)
            elif others:
                known = " or ".join([", ".join(others[:-1]), others[-1]] if others[1:] else others)
                reason = (
                    f"{own!r} does nothing here: it needs {self.section}.kind = {known}; set {self.section}.kind, "
                    "or leave it out"
                )
                raise BadKey(f"{self.section}.{key}", reason)
        return cls.model_validate(given)

    def _loaded(self, kind: str) -> type[SectionT]:
        def problem(found: Any) -> str | None:
            if not (isinstance(found, type) and issubclass(found, self.base)):
                return f"is no {self.base.__name__}"
            own = found.model_fields["kind"].default
            return None if own == kind else f"has the kind {own!r}"

        section: type[SectionT] = plugins.load(self.group, kind, accept=problem)
        return section


TRAINERS: Kinds[TrainerSection] = Kinds(section="trainer", base=TrainerSection)
PROTECTIONS: Kinds[ProtectionSection] = Kinds(
    section="protection", base=ProtectionSection, stored=("label-budget",)
)
KINDS: Mapping[str, Kinds[Any]] = {"trainer": TRAINERS, "protection": PROTECTIONS}
"""The sections that are chosen by kind."""
DEFAULT_TRAINER = "pdfa"
DEFAULT_EPOCHS = 15


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run with the defaults that follow from its kinds; a key that is given keeps its value.

    Python, TOML and the command line share it. Defaults of the protection win over those of the trainer. The source of
    noise is never inferred: a device that no key asks for is refused.
    """
    found = _with_defaults(values)
    if found is None:
        return dict(values)  # of a wrong type, which validation reports
    sections, defaults = found
    return {
        **_default_loss(values),
        **defaults.get("run", {}),
        **values,
        **{name: section for name, section in sections.items() if section or name in values},
    }


def without_derived(resolved: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a resolved run without those that follow from keys that `changes` changes.

    A default of a kind is left out if the changed run has another one, and so is a noise multiplier if its epsilon, its
    delta or its protection changes: it is calibrated anew.
    """
    values = {name: dict(value) if isinstance(value, Mapping) else value for name, value in resolved.items()}
    before, after = (_with_defaults(every) for every in (resolved, merged(resolved, changes)))
    if before is None or after is None:
        return values
    (_, old), (_, new) = before, after
    for name in sorted(old.keys() | new.keys()):
        given, own = (changes, values) if name == "run" else (changes.get(name) or {}, values.get(name, {}))
        for key in old.get(name, {}).keys() | new.get(name, {}).keys():
            was, becomes = ({**_PLAIN.get(name, {}), **found.get(name, {})}.get(key) for found in (old, new))
            if was != becomes and own.get(key) == was and key not in given:
                own.pop(key, None)
    was, becomes = (_default_loss(every) for every in (resolved, merged(resolved, changes)))
    if was != becomes and values.get("loss") == was.get("loss", _PLAIN_LOSS) and "loss" not in changes:
        values.pop("loss", None)
    protection, given = values.get("protection", {}), changes.get("protection") or {}
    strength = any(key in given and given[key] != protection.get(key) for key in ("kind", "epsilon", "delta"))
    if strength and protection.get("epsilon") is not None and "noise_multiplier" not in given:
        protection.pop("noise_multiplier", None)
    return values


def _with_defaults(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The sections that kinds complete, and the defaults that the kinds give; None if a section is of a wrong type."""
    given = {name: given_keys(value) for name, value in values.items()}
    if any(section is None for name, section in given.items() if name in _COMPLETED):
        return None
    sections = {name: dict(given.get(name) or {}) for name in _COMPLETED}
    sections["run"] = {name: value for name, value in values.items() if name not in _COMPLETED}
    trainer = TRAINERS.find(sections["trainer"].setdefault("kind", DEFAULT_TRAINER))
    sections["protection"].setdefault("kind", trainer.default_protection(sections))
    protection = PROTECTIONS.find(sections["protection"]["kind"])
    every: dict[str, Any] = {}
    for kind in (protection, trainer):
        for name, defaults in kind.defaults(sections).items():
            every[name] = {**defaults, **every.get(name, {})}
            sections[name] = {**defaults, **sections[name]}
    del sections["run"]
    return sections, every


def _default_loss(values: Mapping[str, Any]) -> dict[str, str]:
    """The loss that follows from data.target under a trainer of any module, if it is not the plain default."""
    data, trainer = given_keys(values.get("data")) or {}, given_keys(values.get("trainer")) or {}
    loss = _LOSS_OF_TARGET.get(str(data.get("target")))
    kind = trainer.get("kind", DEFAULT_TRAINER)
    return {"loss": loss} if loss and TRAINERS.find(kind).any_module else {}


_LOSS_OF_TARGET: Mapping[str, str] = {"real": "squared-error", "labels": "binary-cross-entropy"}
_PLAIN_LOSS = "cross-entropy"
_COMPLETED = ("trainer", "protection", "optimizer", "sampler", "checkpoint")
"""Sections for which a kind may set defaults."""
_PLAIN: Mapping[str, Mapping[str, Any]] = {
    "run": {"epochs": DEFAULT_EPOCHS},
    **{
        name: {key: field.get_default() for key, field in section.model_fields.items()}
        for name, section in (
            ("optimizer", OptimizerConfig),
            ("sampler", SamplerConfig),
            ("checkpoint", CheckpointConfig),
        )
    },
}
"""Defaults of the run and its sections that are the same for all kinds."""


def given_keys(section: Any) -> dict[str, Any] | None:
    """The keys that a section was given, with its kind if it has one; None if the value is no section."""
    if isinstance(section, Mapping):
        return dict(section)
    if isinstance(section, BaseModel):
        kind = {"kind": section.kind} if isinstance(section, KindSection) else {}
        given = {name: getattr(section, name) for name in section.model_fields_set}
        return {**kind, **given, **(section.model_extra or {})}
    return None
