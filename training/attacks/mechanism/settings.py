"""The configuration of a self-test's runs: what the caller may change, and what the statistics need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accounting.errors import NoGuarantee
from opusim.description.loading import load_description
from opusim.description.schema import DeviceDescription
from opusim.description.section import BadKey
from opusim.errors import ConfigError
from training.attacks.mechanism.single_records import STEPS, small_batches
from training.attacks.mechanism.subjects import MODULES, SINGLE_RECORDS, SUBJECTS, Subject
from training.config.kinds import PROTECTIONS
from training.config.reading import flat, load_config, merged, parse_setting
from training.config.run import RunConfig
from training.config.sections import ProtectionSection
from training.zeroth_order.config import ZoConfig

MIN_FREE = 40
"""Smallest number of components of a step that no record touches."""
_BATCH = 40
_LABEL_CLASSES = 10
_QUIET_SIGMA, _LARGEST_SIGMA = 1e-3, 0.01
"""Noise in a simulated device's readings: the default, and the largest at which a contribution's direction is known (at
0.01 a contribution loses 5e-5 of its length along it)."""
_COUNTED: dict[str, dict[str, Any]] = {
    noise: {
        "device": {"name": "camera_low_light"},
        "model": {"hidden": [40]},
        "protection": {"epsilon": epsilon},
    }
    for noise, epsilon in (("counts", 20.0), ("argmax", 2.0))
}
"""What a look by a camera is tested with: outputs for ten labels, and enough light that 20 % more of it is seen."""
_OWN = (
    *("schema_version", "mode", "seed", "epochs", "loss", "torch_device", "data.", "model.", "optimizer."),
    *("sampler.scheme", "sampler.min_batch_size", "sampler.drop_last", "checkpoint.", "trainer.kind"),
    *("trainer.sigma:feedback", "trainer.tau_h_max", "trainer.tau_h_min", "trainer.centre"),
    *("trainer.gates", "trainer.final_noise", "trainer.regularisation", "trainer.language."),
)
"""Keys that the self-test sets, or whose value would invalidate its statistics."""


def configured(
    kind: str, model: str, mode: str, steps: int, settings: Sequence[str]
) -> tuple[Subject, RunConfig, RunConfig | None]:
    """Return the subject, the configuration of its runs, and that of runs with small batches if there are such.

    Raises:
        ConfigError: A setting is wrong, or the protection is not for modules.
    """
    subject = MODULES.get(model, SUBJECTS[kind])
    asked: dict[str, Any] = {}
    for setting in settings:
        asked = merged(asked, parse_setting(setting))
    _require_free(kind, asked)
    options = merged({"protection": {"kind": "record"}}, asked)
    protection = _protection(options["protection"]["kind"])
    _require_steps(kind, protection)
    if model != "mlp" and protection.protects != "records":
        reason = (
            f"{options['protection']['kind']!r} is tested on model = 'mlp' only; take 'record' with {model!r}"
        )
        raise ConfigError("--set", "protection.kind", reason)
    defaults = _defaults(subject, protection, options["protection"])
    if options["protection"].get("noise") in _COUNTED:
        defaults = merged(defaults, _COUNTED[options["protection"]["noise"]])
    elif "device" not in asked and kind == "pdfa":
        defaults = merged(defaults, {"device": {"noise": {"sigma": _QUIET_SIGMA}}})
    values = merged(merged(_common(kind, mode, protection, subject), defaults), options)
    config = load_config(values)
    _require_quiet(config)
    _require_contrasts(config)
    if protection.labels_read_once:
        return subject, config, None
    descent = _descent(config, subject, steps, config.protection.tested_records)
    found = load_config(values, changes=descent)
    if not _has_small_batches(subject, config):
        return subject, found, None
    few = load_config(small_batches(values, single=config.protection.protects == "records"))
    changes = _descent(few, subject, STEPS, SINGLE_RECORDS)
    return subject, found, load_config(few, changes=changes)


def _has_small_batches(subject: Subject, config: RunConfig) -> bool:
    """Whether runs with small batches can be read: of records that differ, or of labels in secret batches."""
    protection = config.protection
    if not protection.poisson or protection.bands > 1:
        return False
    single = subject.single_rows is not None and "noise_multiplier" in type(protection).model_fields
    return single if protection.protects == "records" else True


def _protection(kind: object) -> type[ProtectionSection]:
    try:
        return PROTECTIONS.find(kind)
    except BadKey as error:
        raise ConfigError("--set", error.key, error.reason) from error


def _common(kind: str, mode: str, protection: type[ProtectionSection], subject: Subject) -> dict[str, Any]:
    """Return the keys that all runs of a self-test set."""
    once = protection.labels_read_once
    values: dict[str, Any] = {
        "mode": mode,
        "threads": 1,
        "epochs": 1,
        "data": {
            "validation_fraction": 0.0,
            "n_classes": _LABEL_CLASSES if once else subject.n_classes,
            "standardise": False,
        },
        "sampler": {"batch_size": protection.tested_records if once else _BATCH},
        "trainer": {"kind": kind},
    }
    if subject.vocabulary is not None:
        values["data"] |= {"inputs": "tokens", "vocabulary": subject.vocabulary}
    if subject.points and kind != "bp":
        values["trainer"] |= {"points": list(subject.points)}
    if subject.points and kind == "pdfa":
        values["trainer"] |= {"encoding": "ternary"}
    if protection.poisson:
        values["sampler"]["scheme"] = "poisson"
    return values | ({"model": {"hidden": [8]}} if once else {})


def _defaults(
    subject: Subject, protection: type[ProtectionSection], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the subject's keys and the strength at which the protection is tested, if its section has those keys.

    A noise multiplier is left to the calibration if only an epsilon is asked for.
    """
    strength = dict(protection.tested_with)
    if "epsilon" in asked and "epsilon" not in strength:
        strength.pop("noise_multiplier", None)
    found = merged(subject.defaults, {"protection": strength})
    found["protection"] = {
        key: value for key, value in found["protection"].items() if key in protection.model_fields
    }
    return found


def _descent(config: RunConfig, subject: Subject, steps: int, records: int) -> dict[str, Any]:
    """Set epochs, learning rate and a checkpoint after every step.

    Raises:
        ConfigError: The batch size does not fit the records.
    """
    size = config.sampler.batch_size
    if size > records // 4 or records % size:
        raise ConfigError(
            "--set",
            "sampler.batch_size",
            f"{size} must divide the {records} records of the self-test and be at most a quarter of them",
        )
    per_epoch = records // size
    epochs = -(-steps // per_epoch)
    found: dict[str, Any] = {
        "epochs": epochs,
        "optimizer": {"name": "sgd", "lr": subject.rate / clip_of(config, subject), "momentum": 0.0},
    }
    if not config.protection.last_iterate:
        found["checkpoint"] = {"every_steps": 1, "keep": epochs * per_epoch + 1}
    return found


def _require_free(kind: str, asked: Mapping[str, Any]) -> None:
    """Refuse settings that the self-test chooses."""
    for key in flat(asked):
        own = [name for name in _OWN if key == name or (name.endswith(".") and key.startswith(name))]
        if key == "trainer.sigma" and kind != "ulr":
            own = [key]
        if own:
            raise ConfigError(
                "--set",
                key,
                "is reserved: the self-test chooses data, model and optimizer; leave it out",
            )


def _require_steps(kind: str, protection: type[ProtectionSection]) -> None:
    """Refuse a protection without protected steps.

    Raises:
        NoGuarantee: Nothing is protected.
    """
    name = protection.model_fields["kind"].default
    if protection.protects == "nothing":
        raise NoGuarantee(
            f"protection.kind = {name!r}: no guarantee covers the steps of {kind}, so there is nothing to test; use "
            "protection.kind=record"
        )


def _require_quiet(config: RunConfig) -> None:
    """Refuse a device that makes the direction of a contribution unknown.

    Raises:
        ConfigError: It is not simulated, it is too noisy, or labels are read through it.
    """
    if not config.uses_device:
        return
    description = load_description(config.device.name, config.device.overrides)
    noise = getattr(config.protection, "noise", "digital")
    if noise in _COUNTED:
        _require_exact_light(config, description)
        return
    if config.protection.labels_read_once and noise == "device":
        reason = "'device' reads labels through a matrix, which the self-test does not undo; use 'digital'"
        raise ConfigError("--set", "protection.noise", reason)
    if description.kind not in ("ideal", "gaussian"):
        raise ConfigError(
            "--set",
            "device.name",
            f"{config.device.name!r} is of kind {description.kind!r}, whose readings the self-test cannot predict; "
            "use 'ideal' or 'gaussian'",
        )
    sigma = 0.0 if description.noise is None else description.noise.value()
    if config.trainer.kind == "pdfa" and sigma > _LARGEST_SIGMA:
        raise ConfigError(
            "--set",
            "device.noise.sigma",
            f"{sigma:g} changes the direction of each contribution; use at most {_LARGEST_SIGMA:g}",
        )


def _require_exact_light(config: RunConfig, description: DeviceDescription) -> None:
    """Refuse a camera of whose light only limits are accounted for: its law is not the accounted one.

    Raises:
        ConfigError: It has a certificate, or light that fluctuates.
    """
    power = None if description.camera is None else description.camera.light.power
    for key, given in (
        ("device.certificate", config.device.certificate),
        ("device.camera.light.power", power),
    ):
        if given is not None:
            reason = "leaves only limits of the light, and the self-test compares laws; leave it out"
            raise ConfigError("--set", key, reason)


def _require_contrasts(config: RunConfig) -> None:
    """Refuse zeroth-order training with too few directions or without Gaussian noise.

    Raises:
        ConfigError: It has one of the two.
    """
    options = config.trainer
    if not isinstance(options, ZoConfig):
        return
    if options.directions <= MIN_FREE:
        raise ConfigError(
            "--set",
            "trainer.directions",
            f"{options.directions} leaves {options.directions - 1} noise-only components per step, and the self-test "
            f"needs {MIN_FREE}; use at least {MIN_FREE + 1}",
        )
    if options.law != "gaussian":
        raise ConfigError(
            "--set",
            "trainer.law",
            f"the self-test has no exact checks for {options.law!r} noise; use 'gaussian'",
        )


def clip_of(config: RunConfig, subject: Subject) -> float:
    """Return C, the largest norm of a record's contribution."""
    return float(config.trainer.implementation().clip_norm(config, subject.n_classes))
