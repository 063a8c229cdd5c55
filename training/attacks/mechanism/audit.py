"""The self-test of a mechanism: make real runs on chosen records, and check everything that they released."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opusim import checks
from opusim.accounting.ledger import read_ledger
from opusim.accounting.mechanisms.counts import LabelArgmax, LabelCounts
from opusim.accounting.mechanisms.labels import RandomizedResponse, StagedResponse
from opusim.description.section import BadKey, merged, parse_setting
from opusim.errors import ConfigError
from opusim.randomness.streams import MODES, derive_seed
from opusim.training.attacks.mechanism.audit import count_checks, response_checks, staged_checks
from opusim.training.attacks.mechanism.checks import Check, MechanismAudit, Released, checked, shared
from opusim.training.attacks.mechanism.counted import answer_checks
from opusim.training.attacks.mechanism.readings import (
    STEPS,
    Weights,
    kept_scores,
    kept_states,
    read_amounts,
    released_steps,
    responses,
    single_record_checks,
    small_batches,
)
from opusim.training.attacks.mechanism.subjects import (
    COUNTED,
    MODULES,
    PRIVATE_LOOP,
    QUIET_SIGMA,
    SINGLE_RECORDS,
    SUBJECTS,
    Subject,
    require_free,
    require_known_laws,
    require_steps,
)
from opusim.training.config.kinds import PROTECTIONS, ProtectionSection
from opusim.training.config.run import RunConfig, load_config
from opusim.training.data import Dataset
from opusim.training.engine.callbacks import Callback
from opusim.training.engine.session import train
from opusim.training.private_loop.start import make_private
from opusim.training.runs.folder import RunFolder

RUNS = 2
MIN_STEPS = 40


def audit_mechanism(
    kind: str = "pdfa",
    *,
    model: str = "mlp",
    mode: str = "experiment",
    steps: int = 60,
    settings: Sequence[str] = (),
    seed: int | None = None,
    level: float = 1e-4,
    single_records: bool = True,
    on_start: Callable[[int], None] = lambda total: None,
    on_step: Callable[[], None] = lambda: None,
) -> MechanismAudit:
    """Test whether a trainer releases what its ledger accounts for.

    The self-test makes two runs of `opusim.train` on identical records. Their gradient is longer than the clip in
    every layer and touches few weights. The components that no record touches must be N(0, (z C)^2), independent across
    steps, runs and coordinates. The components along a record's contribution must show batches of binomial size and
    contributions of norm C. z, C, q and the divisor are read from the runs' ledgers.

    Where whole records are protected on Poisson batches, two more runs have records that differ and batches of two,
    which show each record's coins, its own clip, and the noise of batches that hold one record or none. Amplified
    labels have two more runs with such batches of identical records.

    Args:
        kind: pdfa, dfa, tdfa, bp, ulr, zo or convex; or private-loop, for a loop that `make_private` made private.
        model: What is trained: "mlp" (of ulr, zo and convex a small model of their own), or for pdfa, dfa, tdfa and bp
            under protection.kind = 'record' also "convolution" (with a group norm) or "attention" (with an embedding).
        mode: "experiment" (seeded noise) or "release" (noise from the operating system's entropy).
        steps: Steps of each run, at least 40.
        settings: Lines "key=value" over the configuration, such as "protection.kind=label-amplified" (record by
            default), "protection.noise_multiplier=2" (1 by default), "sampler.batch_size=20", "trainer.clip=module".
        seed: Seed of the runs in experiment mode, in [0, 2^63); None draws one, which the result states.
        level: Probability of any alarm if the mechanism is as accounted, in (0, 1).
        single_records: Whether to make the runs with small batches; False saves their time.
        on_start: Called with the total number of steps.
        on_step: Called after each step.

    Raises:
        ConfigError: A setting is reserved for the self-test, or is wrong.
        NoGuarantee: No guarantee covers the steps, as there is no protection.
        ValueError: A number is out of range, or the records do not exceed the clip.

    Example:
        >>> found = audit_mechanism("dfa", steps=40, seed=1, level=1e-6, single_records=False)
        >>> found.holds, len(found.checks)
        (True, 17)
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
    subject, config, small = _configured(kind, model, mode, steps, settings)
    small = small if single_records else None
    dataset = _dataset(subject, config)
    few = 0 if small is None else _total_steps(small, SINGLE_RECORDS)
    on_start(RUNS * (_total_steps(config, config.protection.tested_records) + few))
    with tempfile.TemporaryDirectory(prefix="opusim-mechanism-") as scratch:
        folders = [RunFolder(Path(scratch) / str(number)) for number in range(2 * RUNS)]
        runs = [_trained(config, subject, dataset, folder, seed, on_step) for folder in folders[:RUNS]]
        found, shape, accounted = _compared(runs, subject, dataset, level)
        if small is not None:
            more = _small_batches(small, subject, folders[RUNS:], seed, on_step)
            found = shared([*found, *more], level)
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
        single_records=small is not None and config.protection.protects == "records",
        quiet_device=config.trainer.kind == "pdfa" and config.protection.protects == "records",
    )


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A finished run.

    Attributes:
        folder: Its folder.
        config: Its configuration.
        states: The parameters before the first step and after each step; empty if labels are read once.
    """

    folder: RunFolder
    config: RunConfig
    states: Sequence[Weights]


def _trained(
    config: RunConfig,
    subject: Subject,
    dataset: Dataset,
    folder: RunFolder,
    seed: int | None,
    on_step: Callable[[], None],
    *,
    single: bool = False,
) -> _Made:
    """Make one run in its folder; the folder's name keys its seed.

    A run that releases the last model only keeps no other, so its models are read while it trains.
    """
    own = 0 if seed is None else derive_seed(seed, "mechanism", int(folder.path.name)) >> 33
    model = None
    if not config.protection.labels_read_once:
        model = subject.new_model(_clip(config, subject), single=single)
    if subject is SUBJECTS[PRIVATE_LOOP]:
        states = _private_loop(config, model, dataset, folder, own, on_step)
        config = config.unchecked(data={"name": dataset.name})
        return _Made(folder=folder, config=config, states=states)
    watcher = _Steps(on_step, model if config.protection.last_iterate else None)
    train(config.replaced(seed=own), data=dataset, model=model, folder=folder.path, watcher=watcher)
    states = watcher.states or kept_states(folder)
    return _Made(folder=folder, config=folder.read_config(), states=states)


def _private_loop(
    config: RunConfig,
    model: nn.Module | None,
    dataset: Dataset,
    folder: RunFolder,
    seed: int,
    on_step: Callable[[], None],
) -> list[dict[str, Tensor]]:
    """Make one run as a private loop; return its parameters before the first step and after each step."""
    if model is None:
        raise TypeError("protection: a private loop protects whole records only")
    train_split, states = dataset.train, []

    def keep() -> None:
        """Keep the parameters, by the names that a trainer gives them."""
        linears = [part for part in model.modules() if isinstance(part, nn.Linear)]
        states.append(
            {
                f"layer{number}.{name}": parameter.detach().clone()
                for number, linear in enumerate(linears, start=1)
                for name, parameter in linear.named_parameters()
            }
        )

    private = make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=config.optimizer.lr),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(
            TensorDataset(train_split.x, train_split.y), batch_size=int(config.sampler.batch_size)
        ),
        max_grad_norm=config.protection.clip,
        target_delta=config.protection.delta,
        folder=folder.path,
        noise_multiplier=config.protection.noise_multiplier,
        mode=config.mode,
        seed=seed if config.mode == "experiment" else None,
    )
    with private:
        module, optimizer, criterion, loader = private
        keep()
        for _ in range(config.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                criterion(module(x), y).backward()
                optimizer.step()
                keep()
                on_step()
    return states


def _small_batches(
    config: RunConfig,
    subject: Subject,
    folders: Sequence[RunFolder],
    seed: int | None,
    on_step: Callable[[], None],
) -> list[Check]:
    """Make runs with small batches, and check each record, or if labels are protected the noise of each step."""
    single = config.protection.protects == "records"
    dataset = _dataset(subject, config, few=True, single=single)
    runs = [_trained(config, subject, dataset, folder, seed, on_step, single=single) for folder in folders]
    if single:
        amounts = [read_amounts(run.folder, run.config, subject, dataset, run.states) for run in runs]
        return single_record_checks(amounts)
    found = [_released(run, subject, dataset) for run in runs]
    parts = [
        run.noise if run.signal_noise is None else np.hstack([run.noise, run.signal_noise]) for run in found
    ]
    finds = "batches without records that get no noise"
    return [Check.variance("small batches: noise of a step", list(np.concatenate(parts)), finds)]


def _compared(
    runs: Sequence[_Made], subject: Subject, dataset: Dataset, level: float
) -> tuple[tuple[Check, ...], tuple[int, int], str]:
    """Return the checks of finished runs, their steps (or records) and noise-only components, and the mechanism."""
    folders, records = [run.folder for run in runs], len(dataset.train)
    mechanism = read_ledger(folders[0].ledger_file).mechanisms[0]
    shape = (records, 1)
    if isinstance(mechanism, RandomizedResponse):
        found = response_checks([responses(folder, dataset) for folder in folders], mechanism, level)
    elif isinstance(mechanism, StagedResponse):
        scores = [kept_scores(folder, dataset) for folder in folders]
        found = staged_checks(scores, dataset.train.y.numpy(), mechanism, level)
    elif isinstance(mechanism, LabelArgmax):
        shifts = [responses(folder, dataset) for folder in folders]
        found = answer_checks(folders, shifts, mechanism, level)
    elif isinstance(mechanism, LabelCounts):
        found = count_checks(folders, dataset, mechanism, level)
        shape = (records, dataset.n_classes - 1)
    else:
        released = [_released(run, subject, dataset) for run in runs]
        found, shape = checked(released, level), released[0].noise.shape
    return found, shape, mechanism.repeated(1).describe()


def _released(run: _Made, subject: Subject, dataset: Dataset) -> Released:
    return released_steps(run.folder, run.config, subject, dataset, run.states)


def _dataset(subject: Subject, config: RunConfig, *, few: bool = False, single: bool = False) -> Dataset:
    perturbation = float(getattr(config.trainer, "perturbation", 0.0))
    clip, count = _clip(config, subject), SINGLE_RECORDS if few else config.protection.tested_records
    if single:
        dataset = subject.single_records(clip=clip, perturbation=perturbation)
    else:
        dataset = subject.dataset(count, clip=clip, perturbation=perturbation)
    return replace(dataset, n_classes=config.data.n_classes or subject.n_classes)


def _total_steps(config: RunConfig, records: int) -> int:
    return config.epochs * max(1, round(records / config.sampler.batch_size))


class _Steps(Callback):
    """A watcher that reports every step.

    Attributes:
        states: Parameters of the model before the first step and after each step; empty without a model.

    Args:
        on_step: Called after each step.
        model: The model that is trained in place, or None.
    """

    def __init__(self, on_step: Callable[[], None], model: nn.Module | None) -> None:
        self._on_step, self._model = on_step, model
        self.states: list[dict[str, Tensor]] = []

    def on_start(self, *, step: int, total_steps: int) -> None:
        """See Callback."""
        self._keep()

    def on_step(self, *, step: int) -> None:
        """See Callback."""
        self._keep()
        self._on_step()

    def _keep(self) -> None:
        if self._model is not None:
            self.states.append({name: p.detach().clone() for name, p in self._model.named_parameters()})


# Configuration

_BATCH = 40
_LABEL_CLASSES = 10


def _configured(
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
    require_free(kind, asked)
    options = merged({"protection": {"kind": "record"}}, asked)
    try:
        protection = PROTECTIONS.find(options["protection"]["kind"])
    except BadKey as error:
        raise ConfigError("--set", error.key, error.reason) from error
    require_steps(kind, protection)
    if model != "mlp" and protection.protects != "records":
        reason = (
            f"{options['protection']['kind']!r} is tested on model = 'mlp' only; take 'record' with {model!r}"
        )
        raise ConfigError("--set", "protection.kind", reason)
    defaults = _defaults(subject, protection, options["protection"])
    if options["protection"].get("noise") in COUNTED:
        defaults = merged(defaults, COUNTED[options["protection"]["noise"]])
    elif "device" not in asked and kind == "pdfa":
        defaults = merged(defaults, {"device": {"noise": {"sigma": QUIET_SIGMA}}})
    trainer = "bp" if kind == PRIVATE_LOOP else kind
    values = merged(merged(_common(trainer, mode, protection, subject), defaults), options)
    config = load_config(values)
    require_known_laws(config)
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
        "optimizer": {"name": "sgd", "lr": subject.rate / _clip(config, subject), "momentum": 0.0},
    }
    if not config.protection.last_iterate:
        found["checkpoint"] = {"every_steps": 1, "keep": epochs * per_epoch + 1}
    return found


def _clip(config: RunConfig, subject: Subject) -> float:
    """Return C, the largest norm of a record's contribution."""
    return float(config.trainer.implementing_class().clip_norm(config, subject.n_classes))
