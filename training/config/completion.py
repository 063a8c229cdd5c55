"""Defaults that follow from other keys, the same from a TOML file, from Python and from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

PLAIN_DESCENTS = {"zo": {"lr": 0.002, "momentum": 0.0}, "convex": {"lr": 1.9, "momentum": 0.0}}
"""Defaults of trainers that have no momentum: a random direction's slope is larger than the gradient's share along it,
so zo diverges at other trainers' rate; 1.9 is below the 2 / beta that the convex trainer's guarantee asks for."""
CONVEX_BATCH = 250
"""Default batch size of the convex trainer."""
_SECTIONS = ("trainer", "optimizer", "sampler", "protection", "checkpoint")
_SECRET_BATCHES = ("record", "label-amplified")


def completed(values: Mapping[str, Any], default_kind: str) -> dict[str, Any]:
    """The values of a run with the defaults that follow from them; a key that is given keeps its value.

    - zo and convex have learning rates of their own, and no momentum;
    - convex: protection.kind follows from a budget or a noise multiplier ('record' with Poisson batches, else
      'last-iterate'); batches are disjoint and cyclic, or Poisson under 'record', and hold 250 records;
    - protection.kind = 'record' and 'label-amplified' take Poisson batches;
    - a released last iterate keeps one checkpoint.

    Where noise comes from is never inferred: a device that no key asks for is refused (training.config.effect).

    Args:
        values: The keys of a run, sections as mappings or as models.
        default_kind: trainer.kind if it is not given.
    """
    given = {name: _given(values.get(name, {})) for name in _SECTIONS}
    if any(section is None for section in given.values()):
        return dict(values)  # of a wrong type, which validation reports
    sections: dict[str, dict[str, Any]] = {name: section or {} for name, section in given.items()}
    own_kind = getattr(values.get("trainer"), "kind", default_kind)  # of a section that is a model
    kind = sections["trainer"].setdefault("kind", own_kind)
    sections["optimizer"] = {**PLAIN_DESCENTS.get(str(kind), {}), **sections["optimizer"]}
    _complete_protection(kind, sections)
    _complete_sampler(kind, sections)
    if sections["protection"].get("kind") == "last-iterate" and values.get("mode") == "release":
        sections["checkpoint"].setdefault("keep", 1)
    return {**values, **{name: section for name, section in sections.items() if section or name in values}}


def _complete_protection(kind: Any, sections: dict[str, dict[str, Any]]) -> None:
    protection = sections["protection"]
    strength = (protection.get("epsilon"), protection.get("noise_multiplier"))
    if kind == "convex" and strength != (None, None):
        poisson = sections["sampler"].get("scheme") == "poisson"
        protection.setdefault("kind", "record" if poisson else "last-iterate")


def _complete_sampler(kind: Any, sections: dict[str, dict[str, Any]]) -> None:
    sampler, protected = sections["sampler"], sections["protection"].get("kind", "none")
    if protected in _SECRET_BATCHES:
        sampler.setdefault("scheme", "poisson")
    elif kind == "convex":
        sampler.setdefault("scheme", "disjoint-cyclic")
    if kind == "convex" and sampler["scheme"] != "full-batch":
        sampler.setdefault("batch_size", CONVEX_BATCH)


def _given(section: Any) -> dict[str, Any] | None:
    """The keys that a section was given; None if it is no section."""
    if isinstance(section, Mapping):
        return dict(section)
    if isinstance(section, BaseModel):
        return {name: getattr(section, name) for name in section.model_fields_set}
    return None
