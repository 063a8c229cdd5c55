"""Which keys of a configuration have an effect, so that one without any is refused and not passed over in silence."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from training.config.run import RunConfig

OWN_ARRAYS = "arrays"
"""What data.name says of a run on user-supplied arrays or on texts."""


class UnusedKey(ValueError):
    """A key does nothing in this configuration.

    Attributes:
        key: The dotted key.
        reason: Its value, and what it needs to have an effect.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key} = {reason}")
        self.key, self.reason = key, reason


@dataclass(frozen=True, kw_only=True)
class Effect:
    """When keys have an effect.

    Attributes:
        keys: Dotted keys, or whole sections.
        needs: The condition, in words, after "it needs".
        holds: The condition.
    """

    keys: tuple[str, ...]
    needs: str
    holds: Callable[[RunConfig], bool]


def _trainer(config: RunConfig, key: str) -> Any:
    return getattr(config.trainer, key, None)


def _kinds(*kinds: str) -> Callable[[RunConfig], bool]:
    return lambda config: config.trainer.kind in kinds


def _protections(*kinds: str) -> Callable[[RunConfig], bool]:
    return lambda config: config.protection.kind in kinds


def _language(config: RunConfig) -> Any:
    return getattr(config.trainer, "language", None)


def _sizes_divide(config: RunConfig) -> bool:
    """Whether sampler.batch_size counts: in batches, or as the divisor of full ones."""
    if config.sampler.scheme != "full-batch":
        return True
    divides = config.trainer.kind == "zo" or config.protection.kind in ("record", "label-amplified")
    return divides and config.trainer.kind != "convex" and config.protection.divisor is None


_PLAIN = ("zo", "convex")
EFFECTS = (
    Effect(
        keys=("trainer.threshold",),
        needs="trainer.kind = 'tdfa', or 'pdfa' with trainer.encoding = 'ternary'",
        holds=lambda c: (
            c.trainer.kind == "tdfa" or (c.trainer.kind == "pdfa" and _trainer(c, "encoding") == "ternary")
        ),
    ),
    Effect(keys=("trainer.encoding",), needs="trainer.kind = 'pdfa'", holds=_kinds("pdfa")),
    Effect(
        keys=("trainer.planes",),
        needs="trainer.kind = 'pdfa' with trainer.encoding = 'planes'",
        holds=lambda c: c.trainer.kind == "pdfa" and _trainer(c, "encoding") == "planes",
    ),
    Effect(
        keys=("trainer.gain",),
        needs="trainer.kind = 'dfa', 'tdfa' or 'pdfa'",
        holds=_kinds("dfa", "tdfa", "pdfa"),
    ),
    Effect(
        keys=("trainer.feedback_seed",),
        needs="trainer.kind = 'dfa' or 'tdfa' (the matrix of pdfa is the device's)",
        holds=_kinds("dfa", "tdfa"),
    ),
    Effect(
        keys=("trainer.sigma",),
        needs="a trainer other than 'pdfa', whose noise is the device's (device.noise.sigma)",
        holds=lambda c: c.trainer.kind != "pdfa",
    ),
    Effect(keys=("trainer.scale",), needs="trainer.tau_b", holds=lambda c: _trainer(c, "tau_b") is not None),
    Effect(
        keys=("trainer.tau_h_min", "trainer.clip_width"),
        needs="trainer.tau_h_max",
        holds=lambda c: _trainer(c, "tau_h_max") is not None,
    ),
    Effect(
        keys=("trainer.clipped_layers",),
        needs="trainer.tau_h_max",
        holds=lambda c: _trainer(c, "tau_h_max") is not None or _trainer(c, "clipped_layers") == "none",
    ),
    Effect(
        keys=("trainer.target_std", "trainer.clip_norm", "trainer.remedy"),
        needs="trainer.form = 'published'",
        holds=lambda c: _trainer(c, "form") == "published",
    ),
    Effect(
        keys=("trainer.clip",),
        needs="protection.kind = 'record' (ulr)",
        holds=lambda c: c.trainer.kind != "ulr" or c.protection.kind == "record",
    ),
    Effect(
        keys=("trainer.law",), needs="protection.kind = 'record'", holds=lambda c: c.protection.kind != "none"
    ),
    Effect(
        keys=("trainer.final_noise",), needs="protection.kind", holds=lambda c: c.protection.kind != "none"
    ),
    Effect(
        keys=("trainer.gate_readings",),
        needs="trainer.gates = 'device'",
        holds=lambda c: _trainer(c, "gates") == "device",
    ),
    Effect(
        keys=("trainer.language",),
        needs="trainer.language.model (--language-model)",
        holds=lambda c: _language(c).model is not None,
    ),
    Effect(
        keys=("trainer.language.lora_alpha", "trainer.language.lora_targets"),
        needs="trainer.language.lora_rank",
        holds=lambda c: _language(c).lora_rank is not None,
    ),
    Effect(
        keys=("model", "data.name"),
        needs="a run without trainer.language.model, which brings its own network and data",
        holds=lambda c: _language(c) is None or _language(c).model is None or c.data.name == OWN_ARRAYS,
    ),
    Effect(
        keys=("model.initial_output",),
        needs="a feedback matrix (trainer.kind = 'dfa', 'tdfa' or 'pdfa')",
        holds=_kinds("dfa", "tdfa", "pdfa"),
    ),
    Effect(keys=("model.tau_h_min",), needs="model.tau_h_max", holds=lambda c: c.model.tau_h_max is not None),
    Effect(keys=("data.whitening",), needs="data.components", holds=lambda c: c.data.components is not None),
    Effect(
        keys=("optimizer.momentum",),
        needs="optimizer.name = 'sgd'",
        holds=lambda c: c.optimizer.name == "sgd" or c.trainer.kind in _PLAIN,  # which refuse it themselves
    ),
    Effect(
        keys=("optimizer.nesterov",),
        needs="optimizer.name = 'sgd' with a momentum",
        holds=lambda c: c.optimizer.name == "sgd" and c.optimizer.momentum > 0,
    ),
    Effect(
        keys=("optimizer.beta1", "optimizer.beta2"),
        needs="an optimizer.name of the Adam family",
        holds=lambda c: c.optimizer.name != "sgd",
    ),
    Effect(
        keys=("optimizer.step_size", "optimizer.gamma"),
        needs="optimizer.schedule = 'step'",
        holds=lambda c: c.optimizer.schedule == "step",
    ),
    Effect(
        keys=("sampler.sampling_probability",),
        needs="sampler.scheme = 'poisson'",
        holds=lambda c: c.sampler.scheme == "poisson",
    ),
    Effect(
        keys=("sampler.min_batch_size",),
        needs="sampler.scheme = 'poisson-min-batch'",
        holds=lambda c: c.sampler.scheme == "poisson-min-batch",
    ),
    Effect(
        keys=("sampler.drop_last",),
        needs="sampler.scheme = 'shuffled-epochs'",
        holds=lambda c: c.sampler.scheme == "shuffled-epochs",
    ),
    Effect(
        keys=("sampler.batch_size",), needs="a sampler.scheme other than 'full-batch'", holds=_sizes_divide
    ),
    Effect(
        keys=("protection.epsilon", "protection.relation"),
        needs="protection.kind",
        holds=lambda c: c.protection.kind != "none",
    ),
    Effect(
        keys=("protection.noise_multiplier",),
        needs="protection.kind = 'record', 'last-iterate', 'label' or 'label-amplified'",
        holds=_protections("record", "last-iterate", "label", "label-amplified"),
    ),
    Effect(
        keys=("protection.clip_norm",),
        needs="protection.kind = 'record', 'label' or 'label-amplified'",
        holds=lambda c: (
            c.trainer.kind == "convex"  # which says what to use instead
            or c.protection.kind in ("record", "label", "label-amplified")
        ),
    ),
    Effect(
        keys=("protection.divisor",),
        needs="protection.kind = 'record' or 'label-amplified', or trainer.kind = 'zo' or 'convex'",
        holds=lambda c: c.trainer.kind in _PLAIN or c.protection.kind in ("record", "label-amplified"),
    ),
    Effect(
        keys=("protection.noise",),
        needs="a protection.kind with noise: all but 'none' and 'label-response'",
        holds=lambda c: c.protection.kind not in ("none", "label-response"),
    ),
    Effect(
        keys=("protection.floor",),
        needs="protection.kind = 'label' or 'label-amplified'",
        holds=_protections("label", "label-amplified"),
    ),
    Effect(
        keys=("protection.reference_size", "protection.equalise"),
        needs="protection.kind = 'label-amplified'",
        holds=_protections("label-amplified"),
    ),
    Effect(
        keys=("protection.flat_prior",),
        needs="protection.kind = 'label-once' or 'label-response'",
        holds=_protections("label-once", "label-response"),
    ),
    Effect(
        keys=("device",),
        needs="a run that opens a device: trainer.kind = 'pdfa', trainer.noise (ulr), trainer.gates (convex) or "
        "protection.noise = 'device'",
        holds=lambda c: c.uses_device,
    ),
    Effect(
        keys=("seed",),
        needs="mode = 'experiment'; a release run draws from the system and keeps no seed",
        holds=lambda c: c.mode == "experiment",
    ),
)
"""When a key has an effect; a key that is not named here always has one."""


def unused(config: RunConfig) -> dict[str, str]:
    """The keys and sections that do nothing in a configuration, each with what it needs."""
    return {
        key: effect.needs
        for effect in EFFECTS
        for key in effect.keys
        if _at(config, key) is not None and not effect.holds(config)
    }


def require_used(config: RunConfig, given: Collection[str] = ()) -> None:
    """Refuse a key that does nothing and was given, or that differs from its default.

    A resolved configuration names every key. Those that do nothing stand there at their defaults.

    Args:
        config: The configuration.
        given: Dotted keys that the user gave.

    Raises:
        UnusedKey: There is such a key.
    """
    for key, needs in unused(config).items():
        named = [name for name in given if f"{name}.".startswith(f"{key}.")]
        found = named or _changed(key, _at(config, key), _default(config, key))
        if found:
            value = _at(config, found[0])
            raise UnusedKey(found[0], f"{value!r} does nothing here: it needs {needs}; leave it out")


def _changed(key: str, value: Any, default: Any) -> list[str]:
    """The dotted keys at and below one that differ from their defaults."""
    if not isinstance(value, BaseModel | dict):
        return [] if value == default else [key]
    parts, standard = (dict(part) if part else {} for part in (value, default))
    return [
        name for part, own in parts.items() for name in _changed(f"{key}.{part}", own, standard.get(part))
    ]


def _at(config: BaseModel, key: str) -> Any:
    """The value of a dotted key; None if this configuration has no such key."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value


def _default(config: BaseModel, key: str) -> Any:
    section, _, name = key.rpartition(".")
    home = _at(config, section) if section else config
    return type(home).model_fields[name].get_default(call_default_factory=True)
