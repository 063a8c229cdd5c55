"""Training from a configuration to a run folder: checks, assembly, payment, the engine."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from accounting.guarantee import Adjacency
from accounting.ledger.ledger import Ledger
from opusim.description.loading import load_description, parse_description
from opusim.description.schema import DeviceDescription
from opusim.devices.base import NoisyDevice
from opusim.devices.baseline import Baseline
from training.config.reading import flat, load_config
from training.config.run import RunConfig
from training.data import Dataset
from training.data.catalogue import OWN_ARRAYS
from training.data.samplers import Sampler
from training.engine.algorithm import TrainerFamily, family_of
from training.engine.assembly import (
    Arrays,
    check_torch_device,
    configured_sampler,
    fingerprint,
    in_components,
    load_data,
    moved,
    opened_device,
    torch_threads,
)
from training.engine.loop import Engine, Watcher, deferred_interrupt
from training.engine.trainer import Trainer
from training.errors import RunFolderError
from training.networks.base import Network
from training.protections.planning import budget_of
from training.runs.folder import RunFolder, facts_equal, own_folder, versions
from training.runs.run import Run, load_run
from training.runs.storage import read_array, write_array

_STEPS_PAID_AT_ONCE = {"experiment": 64, "release": 16}
"""Steps that one synced line of the ledger reserves."""


def train(
    config: RunConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    data: Arrays | Dataset | None = None,
    model: nn.Module | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    moved: bool = False,
    settings: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> Run:
    """Train a network with the hardware in the loop, and return the run.

    Args:
        config: A RunConfig, a TOML file, a mapping, or None for the defaults (PDFA on digits).
        data: (x, y) with x of shape (n, d) and class numbers y of shape (n,), numpy or torch; (x, y, ids) with an ID
            of each record, by which data.split = 'id' holds records out; or a Dataset, whose parts are taken as they
            are; None loads the data set that the configuration names.
        model: A module to train in place, of a kind that the trainer takes (feedbacks: an nn.Sequential of nn.Linear
            and activations; ulr: an nn.Sequential of any modules); None builds the network of the configuration.
        folder: The run folder; None takes a new one under ./runs.
        resume: Resume the unfinished run in `folder`, under its own configuration; data and model are given
            again if they were given at first.
        moved: Confirms, if a release run is resumed from a folder that was moved or restored by copying, that no
            other copy was or will be resumed: no ledger counts what two copies release.
        settings: Lines "key=value" over the configuration.
        watcher: Who is told of progress.

    Raises:
        ConfigError: The configuration or the device description is wrong.
        ValueError, TypeError: The data or the model cannot be used.
        RunFolderError: The folder holds another run, or is being written.
        DeviceError: The device cannot be opened or fails.
        TrainingDiverged: A batch's error is not finite.
    """
    resolved = _stored(config, settings, folder) if resume else load_config(config, settings)
    resolved = _ready(resolved)
    if data is None and model is None:
        resolved, data, model = family_of(resolved.trainer.kind).own_parts(resolved)
    if data is not None:
        resolved = _with_own_data(resolved, data)
    run_folder = None if folder is None else RunFolder(own_folder(Path(folder)))
    records = load_data(resolved, data)
    return train_on(resolved, records, run_folder, model=model, resume=resume, moved=moved, watcher=watcher)


def train_on(
    config: RunConfig,
    records: Dataset,
    folder: RunFolder | None,
    *,
    model: nn.Module | None = None,
    resume: bool = False,
    moved: bool = False,
    watcher: Watcher | None = None,
) -> Run:
    """Train under a resolved configuration on records that are in memory already; see `train`.

    Args:
        config: The configuration; where a run goes on, the one that its folder holds.
        records: The data set that it names.
        folder: The run folder; None takes a new one under ./runs.
        model: See `train`.
        resume: See `train`.
        moved: See `train`.
        watcher: See `train`.
    """
    resolved = _ready(config)
    private = resolved.mode == "release"
    if resume:
        if folder is None:
            raise RunFolderError(_NO_FOLDER)
        with folder.writing(new=False, private=private):
            folder.require_resumable(moved=moved)
            _check_keys(folder, resolved)
            _train_in(folder, _parts(resolved, records, folder, model), watcher, resume=True, moved=moved)
    else:
        parts = _parts(resolved, records, None, model)
        folder = folder or _new_folder(resolved)
        with folder.writing(new=True, private=private):
            _train_in(folder, parts, watcher, resume=False, moved=False)
    return load_run(folder.path, model=model)


_NO_FOLDER = "resume needs folder, that of the run to resume"


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What a run is made of before its folder is touched."""

    config: RunConfig
    family: TrainerFamily[Any]
    dataset: Dataset
    network: Network
    description: DeviceDescription | None
    sampler: Sampler


def _parts(config: RunConfig, records: Dataset, resumed: RunFolder | None, model: nn.Module | None) -> _Parts:
    """Build and check the parts of a run; those that a resumed run's folder holds are read from there."""
    dataset = in_components(config, records, resumed)
    family = family_of(config.trainer.kind)
    network = family.network(config, dataset, model)
    description = _description(config, resumed)
    sampler = configured_sampler(config, dataset)
    family.require_covered(config, dataset, sampler)
    return _Parts(
        config=family.with_noise(config, network, sampler),
        family=family,
        dataset=dataset,
        network=network,
        description=description,
        sampler=sampler,
    )


def _train_in(
    folder: RunFolder, parts: _Parts, watcher: Watcher | None, *, resume: bool, moved: bool
) -> None:
    """Train in a folder whose lock is held."""
    config, family, network, dataset = parts.config, parts.family, parts.network, parts.dataset
    with torch_threads(config.threads) as threads:
        config = config.model_copy(update={"threads": threads})
        with opened_device(config, family.device_shape(config, network), parts.description) as device:
            network.model.to(config.torch_device)
            trainer = family.trainer(config, network, dataset, device)
            facts = _facts(config, dataset, network, parts.description, device)
            engine = _engine(config, trainer, dataset, parts.sampler, folder, watcher)
            resumed_from = None
            if resume:
                _check_same(folder, facts)
                resumed_from = engine.resume(moved=moved)
                if device is not None and folder.baseline_file.exists():
                    device.compare_with(Baseline.from_array(read_array(folder.baseline_file)))
            else:
                family.begin(config, trainer)
                _begin(folder, engine, dataset, device, folder.configuration(config, facts))
            with deferred_interrupt() as interrupted, _ledger(config, folder, resumed_from) as ledger:
                family.pay_at_start(
                    config, trainer, dataset, device, ledger, folder, steps=engine.total_steps
                )
                noise = None if device is None else device.stated_noise
                mechanisms = family.step_mechanisms(config, network, parts.sampler, noise)
                engine.run(ledger, mechanisms, interrupted)


def _begin(
    folder: RunFolder, engine: Engine, dataset: Dataset, device: NoisyDevice | None, configuration: bytes
) -> None:
    """Write what a new run begins with; the configuration last, so that a run once begun can always be resumed."""
    if dataset.components is not None:
        write_array(folder.components_file, dataset.components.to_array())
    if device is not None and device.baseline is not None:
        write_array(folder.baseline_file, device.baseline.to_array())
    engine.begin(configuration)
    folder.begin(configuration)


def _stored(config: object, settings: Sequence[str], folder: str | Path | None) -> RunConfig:
    """The configuration of the run to resume."""
    if config is not None or settings:
        raise RunFolderError(
            "resume goes on under the configuration that the folder holds; leave config and settings out, "
            "or start a new folder with them"
        )
    if folder is None:
        raise RunFolderError(_NO_FOLDER)
    run_folder = RunFolder(own_folder(Path(folder)))
    run_folder.read_facts()
    run_folder.require_sealed()
    return run_folder.read_config()


def _ready(config: RunConfig) -> RunConfig:
    """The configuration for a torch device that is there, without the seed that a release run does not use or keep."""
    check_torch_device(config.torch_device)
    return config.model_copy(update={"seed": 0}) if config.mode == "release" else config


def _with_own_data(config: RunConfig, data: Arrays | Dataset) -> RunConfig:
    """The configuration as it is for a person's own data: their name, and no constants of a known data set."""
    changes: dict[str, Any] = {"name": OWN_ARRAYS, "standardise": config.data.mean is not None}
    if isinstance(data, tuple) and len(data) == 3 and config.data.split is None:
        changes["split"] = "id"
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})


def _new_folder(config: RunConfig) -> RunFolder:
    """A new folder of a name that no other process has: runs/pdfa-digits-1, -2, ..."""
    stem = f"{config.trainer.kind}-{config.data.name}"
    for number in itertools.count(1):
        folder = RunFolder.claimed(own_folder(Path("runs") / f"{stem}-{number}"))
        if folder is not None:
            return folder
    raise AssertionError("itertools.count ended")


def _description(config: RunConfig, resumed: RunFolder | None) -> DeviceDescription | None:
    """The device's description: the stored one where a run goes on, so that its file need not be there."""
    if not config.uses_device:
        if config.device != type(config.device)():
            load_description(
                config.device.name, config.device.overrides
            )  # unknown keys are refused, used or not
        return None
    if resumed is not None:
        return parse_description(str(resumed.config_file), resumed.read_facts()["device"])
    return load_description(config.device.name, config.device.overrides)


def _facts(
    config: RunConfig,
    dataset: Dataset,
    network: Network,
    description: DeviceDescription | None,
    device: NoisyDevice | None,
) -> dict[str, Any]:
    """What `config.json` says beside the configuration."""
    noise = None if device is None else device.stated_noise
    return {
        "network": network.facts,
        "data": _facts_of_data(config, dataset),
        "device": None if description is None else description.dump(),
        "noise": None if noise is None else noise.summary(),
        "versions": versions(),
    }


def _facts_of_data(config: RunConfig, dataset: Dataset) -> dict[str, Any]:
    """What `config.json` says of the data: in release mode no number of records that the relation hides."""
    facts: dict[str, Any] = {"name": dataset.name, "n_classes": dataset.n_classes, "split": dataset.split}
    if config.mode == "experiment" or config.relation is not Adjacency.ADD_OR_REMOVE_ONE:
        facts |= {
            "n_train": len(dataset.train),
            "n_validation": len(dataset.validation),
            "n_test": 0 if dataset.test is None else len(dataset.test),
        }
    facts["standardisation"] = asdict(dataset.standardisation)
    if config.mode == "experiment":
        facts["fingerprint"] = fingerprint(dataset.train)
    return facts


def _check_keys(folder: RunFolder, config: RunConfig) -> None:
    """Refuse to resume a run whose stored configuration lacks keys that this version requires."""
    stored = folder.read_facts()
    new = sorted(flat(config.model_dump(mode="json")).keys() - flat(stored["config"]).keys() - {"seed"})
    if new:  # a release run stores no seed
        raise RunFolderError(
            f"run folder {folder.path} was begun by opusim {stored['versions'].get('opusim')}, whose configuration had "
            f"no {', '.join(new)}; resume it with the opusim that began it (this is {versions()['opusim']}), or start "
            "a new folder"
        )


def _check_same(folder: RunFolder, facts: dict[str, Any]) -> None:
    """Refuse to resume with another network, other data or another device."""
    stored = folder.read_facts()
    for part in ("network", "data", "device"):
        if not facts_equal(stored[part], facts[part]):
            raise RunFolderError(
                f"run folder {folder.path} was begun with another {part}; resume it with the same one, "
                "or start a new folder"
            )
    changed = [name for name, version in facts["versions"].items() if stored["versions"].get(name) != version]
    if changed:
        warnings.warn(
            f"run folder {folder.path} was begun with other versions of {', '.join(changed)}; "
            "the resumed run may differ in its last bits from an uninterrupted one",
            stacklevel=3,
        )


def _engine(
    config: RunConfig,
    trainer: Trainer,
    dataset: Dataset,
    sampler: Sampler,
    folder: RunFolder,
    watcher: Watcher | None,
) -> Engine:
    return Engine(
        trainer=trainer,
        dataset=moved(dataset, config.torch_device),
        sampler=sampler,
        folder=folder,
        epochs=config.epochs,
        loss=config.loss,
        optimizer=config.optimizer,
        checkpoint_every=config.checkpoint.every_steps,
        keep=config.checkpoint.keep,
        private=config.mode == "release",
        identity=config.digest(),
        watcher=watcher,
    )


def _ledger(config: RunConfig, folder: RunFolder, resumed_from: str | None) -> Ledger:
    """The run's ledger; a release run loses what is left of a block when it is killed, so its blocks are small."""
    return Ledger(
        folder.ledger_file,
        mode=config.mode,
        delta=config.protection.delta,
        enforced=True,
        block=_STEPS_PAID_AT_ONCE[config.mode],
        budget=budget_of(config),
        witnesses=folder.witnesses(),
        resumed_from=resumed_from,
    )
