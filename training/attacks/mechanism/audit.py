"""The self-test of a mechanism: make real runs on chosen records, and check everything that they released."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accounting.devices.counts import LabelArgmax, LabelCounts
from accounting.errors import NoGuarantee
from accounting.labels.mechanisms import RandomizedResponse, StagedResponse
from accounting.ledger.ledger import read_ledger
from opusim import checks
from opusim.description.loading import load_description
from opusim.description.schema import DeviceDescription
from opusim.description.section import BadKey
from opusim.errors import ConfigError
from opusim.randomness.streams import MODES, derive_seed
from training.attacks.mechanism.checks import Released, checked, response_checks
from training.attacks.mechanism.counted import answer_checks, count_checks, staged_checks
from training.attacks.mechanism.readings import kept_scores, noisy_readings, released_steps, responses
from training.attacks.mechanism.report import Check, MechanismAudit
from training.attacks.mechanism.subjects import MODULES, SUBJECTS, Subject
from training.config.kinds import PROTECTIONS
from training.config.reading import flat, load_config, merged, parse_setting
from training.config.run import RunConfig
from training.config.sections import ProtectionSection
from training.data import Dataset
from training.engine.session import train
from training.runs.folder import RunFolder
from training.zeroth_order.config import ZoConfig

RUNS = 2
MIN_STEPS = 40
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


def audit_mechanism(
    kind: str = "pdfa",
    *,
    model: str = "mlp",
    mode: str = "experiment",
    steps: int = 60,
    settings: Sequence[str] = (),
    seed: int | None = None,
    level: float = 1e-4,
    on_start: Callable[[int], None] = lambda total: None,
    on_step: Callable[[], None] = lambda: None,
) -> MechanismAudit:
    """Test whether a trainer releases what its ledger accounts for.

    The self-test makes two runs of `opusim.train` on identical records. Their gradient is longer than the clip in
    every layer and touches few weights. The components that no record touches must be N(0, (z C)^2), independent across
    steps, runs and coordinates. The components along a record's contribution must show batches of binomial size and
    contributions of norm C. z, C, q and the divisor are read from the runs' ledgers.

    Args:
        kind: pdfa, dfa, tdfa, bp, ulr, zo or convex.
        model: What is trained: "mlp" (of ulr, zo and convex a small model of their own), or for pdfa, dfa, tdfa and bp
            under protection.kind = 'record' also "convolution" (with a group norm) or "attention" (with an embedding).
        mode: "experiment" (seeded noise) or "release" (noise from the operating system's entropy).
        steps: Steps of each run, at least 40.
        settings: Lines "key=value" over the configuration, such as "protection.kind=label-budget" (record by default),
            "protection.noise_multiplier=2" (1 by default), "sampler.batch_size=20", "trainer.clip=module".
        seed: Seed of the runs in experiment mode, in [0, 2^63); None draws one, which the result states.
        level: Probability of any alarm if the mechanism is as accounted, in (0, 1).
        on_start: Called with the total number of steps.
        on_step: Called after each step.

    Raises:
        ConfigError: A setting is reserved for the self-test, or is wrong.
        NoGuarantee: No guarantee covers single steps: there is no protection, or only the last iterate is released.
        ValueError: A number is out of range, or the records do not exceed the clip.

    Example:
        >>> found = audit_mechanism("dfa", steps=40, seed=1, level=1e-6)
        >>> found.holds, len(found.checks)
        (True, 15)
    """
    checks.choice(tuple(SUBJECTS), kind=kind)
    checks.choice(("mlp", *MODULES) if SUBJECTS[kind] is SUBJECTS["pdfa"] else ("mlp",), model=model)
    checks.choice(MODES, mode=mode)
    checks.integer(steps=steps, minimum=MIN_STEPS)
    checks.in_range(0, 1, level=level)
    checks.positive(level=level)
    if mode == "release" and seed is not None:
        raise ValueError(
            f"seed = {seed}: requires mode = 'experiment'; release mode has no seeds, leave it out"
        )
    if mode == "experiment":
        seed = secrets.randbits(63) if seed is None else seed
        checks.integer(seed=seed, minimum=0, maximum=2**63 - 1)
    started = time.process_time()
    subject, config = _configured(kind, model, mode, steps, settings)
    dataset = _dataset(subject, config)
    on_start(RUNS * _total_steps(config))
    with tempfile.TemporaryDirectory(prefix="opusim-mechanism-") as scratch:
        folders = [
            _trained(config, subject, dataset, RunFolder(Path(scratch) / str(number)), seed, on_step)
            for number in range(RUNS)
        ]
        found, shape, accounted = _compared(folders, subject, dataset, level)
    return MechanismAudit(
        kind=kind,
        model=model,
        protection=config.protection.kind,
        mode=mode,
        accounted=accounted,
        runs=RUNS,
        steps=shape[0],
        records=len(dataset.train),
        coordinates=shape[1],
        seed=seed,
        level=level,
        cpu_s=time.process_time() - started,
        checks=found,
        one_look=config.protection.labels_read_once,
        quiet_device=config.trainer.kind == "pdfa" and config.protection.protects == "records",
    )


def _trained(
    config: RunConfig,
    subject: Subject,
    dataset: Dataset,
    folder: RunFolder,
    seed: int | None,
    on_step: Callable[[], None],
) -> RunFolder:
    """Make one run in its folder; the folder's name keys its seed."""
    own = 0 if seed is None else derive_seed(seed, "mechanism", int(folder.path.name)) >> 33
    train(
        config.replaced(seed=own),
        data=dataset,
        model=None if config.protection.labels_read_once else subject.model(_clip(config, subject)),
        folder=folder.path,
        watcher=_Steps(on_step),
    )
    return folder


def _compared(
    folders: Sequence[RunFolder], subject: Subject, dataset: Dataset, level: float
) -> tuple[tuple[Check, ...], tuple[int, int], str]:
    """Return the checks of finished runs, their steps (or records) and noise-only components, and the mechanism."""
    mechanism = read_ledger(folders[0].ledger_file).mechanisms[0]
    if isinstance(mechanism, RandomizedResponse):
        shifts = [responses(folder, dataset) for folder in folders]
        accounted = mechanism.repeated(1).describe()
        return response_checks(shifts, mechanism, level), (len(dataset.train), 1), accounted
    if isinstance(mechanism, StagedResponse):
        scores = [kept_scores(folder, dataset) for folder in folders]
        staged = staged_checks(scores, dataset.train.y.numpy(), mechanism, level)
        return staged, (len(dataset.train), 1), mechanism.repeated(1).describe()
    if isinstance(mechanism, LabelArgmax):
        shifts = [responses(folder, dataset) for folder in folders]
        answers = answer_checks(folders, shifts, mechanism, level)
        return answers, (len(dataset.train), 1), mechanism.repeated(1).describe()
    if isinstance(mechanism, LabelCounts):
        counts = count_checks(folders, dataset, mechanism, level)
        return counts, (len(dataset.train), dataset.n_classes - 1), mechanism.repeated(1).describe()
    released = [_released(folder, subject, dataset) for folder in folders]
    steps, free = released[0].noise.shape
    return checked(released, level), (steps, free), released[0].accounted


def _released(folder: RunFolder, subject: Subject, dataset: Dataset) -> Released:
    config = folder.read_config()
    if config.protection.labels_read_once:
        return noisy_readings(folder, dataset)
    return released_steps(folder, config, subject, dataset)


def _configured(
    kind: str, model: str, mode: str, steps: int, settings: Sequence[str]
) -> tuple[Subject, RunConfig]:
    """Return the subject and the configuration of its runs.

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
        return subject, config
    return subject, load_config(values, changes=_descent(config, subject, steps))


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


def _descent(config: RunConfig, subject: Subject, steps: int) -> dict[str, Any]:
    """Set epochs, learning rate and a checkpoint after every step.

    Raises:
        ConfigError: The batch size does not fit the records.
    """
    size, records = config.sampler.batch_size, config.protection.tested_records
    if size > records // 4 or records % size:
        raise ConfigError(
            "--set",
            "sampler.batch_size",
            f"{size} must divide the {records} records of the self-test and be at most a quarter of them",
        )
    per_epoch = records // size
    epochs = -(-steps // per_epoch)
    return {
        "epochs": epochs,
        "optimizer": {"name": "sgd", "lr": subject.rate / _clip(config, subject), "momentum": 0.0},
        "checkpoint": {"every_steps": 1, "keep": epochs * per_epoch + 1},
    }


def _dataset(subject: Subject, config: RunConfig) -> Dataset:
    perturbation = float(getattr(config.trainer, "perturbation", 0.0))
    dataset = subject.dataset(
        config.protection.tested_records, clip=_clip(config, subject), perturbation=perturbation
    )
    return replace(dataset, n_classes=config.data.n_classes or subject.n_classes)


def _clip(config: RunConfig, subject: Subject) -> float:
    """Return C, the largest norm of a record's contribution."""
    return float(config.trainer.implementation().clip_norm(config, subject.n_classes))


def _total_steps(config: RunConfig) -> int:
    return config.epochs * max(1, round(config.protection.tested_records / config.sampler.batch_size))


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
        NoGuarantee: Nothing is protected, or only the last iterate is released.
    """
    name = protection.model_fields["kind"].default
    if protection.last_iterate:
        raise NoGuarantee(
            f"protection.kind = {name!r} releases only the last model, so there is no step to test; test the same "
            "noise and clip with protection.kind=record"
        )
    if protection.protects == "nothing":
        raise NoGuarantee(
            f"protection.kind = {name!r}: no guarantee covers the steps of {kind}, so there is nothing to test; use "
            "protection.kind=record"
        )


def _require_quiet(config: RunConfig) -> None:
    """Refuse a device that makes the direction of a contribution unknown.

    Raises:
        ConfigError: It is not simulated, or it is too noisy.
    """
    if not config.uses_device:
        return
    description = load_description(config.device.name, config.device.overrides)
    if getattr(config.protection, "noise", "digital") in _COUNTED:
        _require_exact_light(config, description)
        return
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


class _Steps:
    """A watcher that reports every step."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step

    def on_start(self, *, step: int, total_steps: int) -> None:
        """See Watcher."""

    def on_step(self, *, step: int) -> None:
        """See Watcher."""
        self._on_step()

    def on_epoch(self, record: dict[str, Any]) -> None:
        """See Watcher."""
