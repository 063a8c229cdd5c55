"""The kinds of trainers and protections, found through entry points.

A package adds a kind without touching this one: it declares, in the group `opusim.trainers` or `opusim.protections`,
an entry point of the kind's name whose object is a subclass of TrainerSection or ProtectionSection. The class should
be light, because reading a configuration and `--help` import it; it names its implementation as "module:Class".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from opusim import plugins
from opusim.description.section import BadKey, did_you_mean, merged
from opusim.training.config.kinds import KindSection, ProtectionSection, TrainerSection
from opusim.training.config.sections import CheckpointConfig, OptimizerConfig, SamplerConfig

SectionT = TypeVar("SectionT", bound=KindSection)


@dataclass(frozen=True, kw_only=True)
class Kinds(Generic[SectionT]):
    """The kinds of one section of the configuration.

    Attributes:
        section: Name of the section.
        base: Class that every kind extends.
        stored: Kinds of stored runs that new ones may not take; they can be found, and are not listed.
    """

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
        """The section class of a kind.

        Raises:
            BadKey: There is no such kind, or the package that brings it cannot be used.
        """
        if kind not in (*self.names(), *self.stored):
            raise BadKey(f"{self.section}.kind", self._unknown(kind))
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

        Raises:
            BadKey: An unknown kind, or a key of another kind.
            ValidationError: A key or value that the kind refuses.
        """
        if not isinstance(value, Mapping):
            return value
        cls = self.find(value.get("kind"))
        return cls.model_validate({key: v for key, v in value.items() if self._belongs(cls, key, v)})

    def _belongs(self, cls: type[SectionT], key: str, value: Any) -> bool:
        """Whether a key is the kind's own, or unknown to all kinds; False if another kind's key is left at None.

        Raises:
            BadKey: Another kind has the key.
        """
        if key in cls.model_fields:
            return True
        others = [f"{name!r}" for name, other in self.every().items() if key in other.model_fields]
        if others and value is not None:
            if key in cls.instead:
                kind = cls.model_fields["kind"].default
                reason = f"{value!r} does nothing under {self.section}.kind = {kind!r}: {cls.instead[key]}"
            else:
                known = " or ".join([", ".join(others[:-1]), others[-1]] if others[1:] else others)
                reason = (
                    f"{value!r} does nothing here: it needs {self.section}.kind = {known}; set {self.section}.kind, "
                    "or leave it out"
                )
            raise BadKey(f"{self.section}.{key}", reason)
        return not others

    def _loaded(self, kind: str) -> type[SectionT]:
        def problem(found: Any) -> str | None:
            if not (isinstance(found, type) and issubclass(found, self.base)):
                return f"is no {self.base.__name__}"
            own = found.model_fields["kind"].default
            return None if own == kind else f"has the kind {own!r}"

        section: type[SectionT] = plugins.load(self.group, kind, accept=problem)
        return section

    def _unknown(self, kind: Any) -> str:
        for name, section in self.every().items():
            if kind in section.formerly:
                return f"{kind!r} is now {name!r}; use that"
        names = self.names()
        known = f"; known are {', '.join(map(repr, names))}"
        return f"{kind!r} is no {self.section}{did_you_mean(str(kind), names, otherwise=known)}"


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

    The same from Python, TOML and the command line. Defaults of the protection win over those of the trainer. Where
    noise comes from is never inferred: a device that no key asks for is refused.

    Args:
        values: The keys of a run; sections are mappings or models.
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

    Args:
        resolved: The values of a whole run; sections are mappings.
        changes: Keys to be laid over them.
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
    given = {name: _given(value) for name, value in values.items()}
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
    data, trainer = _given(values.get("data")) or {}, _given(values.get("trainer")) or {}
    loss = _LOSS_OF_TARGET.get(str(data.get("target")))
    kind = trainer.get("kind", DEFAULT_TRAINER)
    return {"loss": loss} if loss and TRAINERS.find(kind).any_module else {}


_LOSS_OF_TARGET: Mapping[str, str] = {"real": "squared-error", "labels": "binary-cross-entropy"}
_PLAIN_LOSS = "cross-entropy"
_COMPLETED = ("trainer", "protection", "optimizer", "sampler", "checkpoint")
"""Sections of which a kind may set defaults."""
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


def _given(section: Any) -> dict[str, Any] | None:
    """The keys that a section was given, its kind among them; None if the value is no section."""
    if isinstance(section, Mapping):
        return dict(section)
    if isinstance(section, BaseModel):
        kind = {"kind": section.kind} if isinstance(section, KindSection) else {}
        return {**kind, **{name: getattr(section, name) for name in section.model_fields_set}}
    return None
