"""Training: from a configuration to a plan, from the plan to a run folder."""

from __future__ import annotations

import itertools
import reprlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from opusim.accounting.explanation import large_delta, large_epsilon
from opusim.accounting.guarantee import Adjacency, BudgetExceeded
from opusim.accounting.ledger import Ledger
from opusim.camera.from_description import cautions
from opusim.description.section import flat
from opusim.devices.base import NoisyDevice
from opusim.devices.baseline import Baseline
from opusim.devices.kinds import ENTRY_POINT_GROUP as DEVICE_KINDS
from opusim.devices.usage import Usage
from opusim.errors import ConfigError
from opusim.files import quoted
from opusim.noise import ENTRY_POINT_GROUP as NOISE_LAWS
from opusim.processes import launched_rank
from opusim.processes.ranks import Ranks, exchange_backend, init_process_group
from opusim.progress import Show
from opusim.training.config.kinds import KINDS
from opusim.training.config.run import RunConfig, load_config
from opusim.training.config.sections import is_import_path
from opusim.training.data import Dataset
from opusim.training.data.dataset import Standardisation, features_named_as_identifiers, wide_feature
from opusim.training.data.public_maps import expected_usage as features_usage
from opusim.training.data.samplers import never_filled
from opusim.training.data.tables import OwnData, OwnTest
from opusim.training.data.users import id_warnings
from opusim.training.engine.algorithm import Trainer
from opusim.training.engine.callbacks import Callback, RunProgress, Watchers
from opusim.training.engine.cards import to_device
from opusim.training.engine.loop import Engine, follow
from opusim.training.engine.plan import (
    Forecast,
    RunPlan,
    default_inputs,
    facts_of,
    fingerprint,
    for_this_machine,
    load_data,
    noted_alarms,
    with_own_inputs,
)
from opusim.training.engine.steps import STEPS_PAID_AT_ONCE, deferred_interrupt, share_state, torch_threads
from opusim.training.errors import RunFolderError
from opusim.training.networks.base import DescribedModule
from opusim.training.networks.record_independence import system_generators
from opusim.training.networks.user_code import code_facts, require_importable, require_trusted
from opusim.training.runs.checkpoints import held_by_devices, hold_on_devices
from opusim.training.runs.folder import RunFolder, facts_equal, own_folder, versions
from opusim.training.runs.run import Run, load_run
from opusim.training.runs.storage import read_array, write_array

_NO_FOLDER = "resume needs folder, that of the run to resume"


def train(
    config: RunConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    data: OwnData | Dataset | None = None,
    test: OwnTest | None = None,
    label: str | Sequence[str] | None = None,
    model: nn.Module | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    moved: bool = False,
    settings: Sequence[str] = (),
    watcher: Callback | None = None,
    callbacks: Sequence[Callback] = (),
    progress: Show = True,
    trust_code: bool = False,
    **keys: Any,
) -> Run:
    """Train a network with the hardware in the loop, and return the run.

    Args:
        config: A RunConfig, a TOML file, the name of a trainer such as "pdfa", a mapping, or None for the defaults
            (PDFA on digits).
        data: (x, y) with x of shape (n, d) or of images (n, c, h, w) and class numbers y of shape (n,), numpy or torch
            (or the values of another data.target); (x, y, ids) with an ID of each record, by which data.split =
            'id' holds records out; a data set of torch with a length, whose records (x, y) are read once; a DataFrame,
            with `label`; or a Dataset of opusim, whose parts are taken as they are. None loads the data set or the file
            that the configuration names. Labels may be strings, which are numbered in sorted order.
        test: Test records that go with user-supplied data, in the same form.
        label: The column of a DataFrame to predict, or several for data.target = 'real' or 'labels'; the others are
            features. None takes data.label.
        model: A module to train in place (feedback trainers and zo: any module; ulr: an nn.Sequential of any modules);
            None builds the configuration's network.
        folder: The run folder; None takes a new one under ./runs.
        resume: Resume the unfinished run in `folder`, under its own configuration; data and model are given
            again if they were given at first, and so is test.
        moved: Confirms that no other copy of the folder was or will be resumed. A release run needs it if its folder
            was moved or restored by copying: no ledger counts what two copies release.
        settings: Lines "key=value" over the configuration.
        watcher: Receives the progress.
        callbacks: Receive the progress and the end, such as the logger of examples/tensorboard_logger.py.
        progress: Whether to show a bar, on a terminal and in a notebook; "lines" also writes a line now and then
            elsewhere, as `opusim train` does.
        trust_code: Whether a resumed run may execute the user-supplied code that its folder names by import path.
        **keys: Keys of the configuration over it, such as ``epochs=3`` or ``device={"name": "camera"}``.

    Raises:
        ConfigError: The configuration or the device description is wrong.
        ValueError, TypeError: The data or the model cannot be used.
        RunFolderError: The folder holds another run, or is being written.
        DeviceError: The device cannot be opened or fails.
        TrainingDiverged: A batch's error is not finite.
    """
    for name, given, taken in (("data", data, "records"), ("model", model, "a module")):
        if isinstance(given, Mapping):
            raise TypeError(
                f"{name} = {reprlib.repr(given)}: is a section of the configuration, and {name} takes {taken}; write "
                f"opusim.train({{{name!r}: {{...}}}}, ...)"
            )
    init_process_group()
    ranks = Ranks()
    with ranks.session():
        stated = _stored(config or keys, settings, folder) if resume else load_config(config, settings, keys)
        resolved = for_this_machine(stated)
        is_led = not ranks.is_first and leads_steps(resolved)
        require_shareable(resolved, ranks)
        resolved, data, model = default_inputs(resolved, data, model)
        resolved = with_own_inputs(resolved, data, label, model)
        named = None if folder is None else Path(folder)
        run_folder = None if named is None else RunFolder(named if is_led else own_folder(named))
        if run_folder is not None and not resume and not is_led:
            run_folder.require_writable()
        reading = resolved
        if resume and run_folder is not None:
            require_trusted(facts := run_folder.read_facts(), trust_code=trust_code)
            require_importable(facts)
            reading = _as_found(resolved, facts)
        records = load_data(reading, data, test)
        if is_led:
            return _follow(resolved, records, run_folder, model=model, resume=resume, ranks=ranks)
        show = progress if ranks.is_first else False
        with RunProgress(f"train {resolved.trainer.kind}", "steps", show=show) as bar:
            heard = [*([watcher] if watcher else []), *callbacks, *([bar] if bar.is_shown else [])]
            with Watchers(heard) as watchers:
                run = train_on(
                    resolved, records, run_folder, model=model, resume=resume, moved=moved, watcher=watchers
                )
                watchers.summary = run.summary
        return run


def train_on(
    config: RunConfig,
    records: Dataset,
    folder: RunFolder | None,
    *,
    model: nn.Module | None = None,
    resume: bool = False,
    moved: bool = False,
    watcher: Callback | None = None,
) -> Run:
    """Train under a resolved configuration on records that are already in memory; see `train`.

    Without a folder it takes a new one under ./runs.
    """
    private = config.mode == "release"
    if watcher is not None and isinstance(model, DescribedModule):
        for note in model.notes:
            watcher.on_note(note)
    if not resume:
        features = _features_usage(config, records)
        if features is not None and watcher is not None:
            watcher.on_features(features)
        plan = RunPlan.resolve(config, records, model=model)
        if folder is None:  # a name that no other process has: runs/pdfa-digits-1, -2, ...
            paths = (f"{config.trainer.kind}-{config.data.short_name}-{n}" for n in itertools.count(1))
            claimed = (RunFolder.claimed(own_folder(Path("runs") / path)) for path in paths)
            folder = next(found for found in claimed if found is not None)
        train_planned(plan, folder, watcher=watcher)
        return load_run(folder.path, model=model, trust_code=True)  # its code was executed here
    if folder is None:
        raise RunFolderError(_NO_FOLDER)
    with folder.writing(new=False, private=private):
        folder.require_resumable(moved=moved)
        stored = folder.read_facts()
        keys = flat(for_this_machine(config).model_dump(mode="json")).keys()
        new = sorted(keys - flat(stored["config"]).keys() - {"seed"})  # a release run stores no seed
        if new:
            raise RunFolderError(
                f"run folder {folder.path} was started by opusim {stored['versions'].get('opusim')}, whose "
                f"configuration had no {', '.join(new)}; resume it with the opusim that started it (this is "
                f"{versions()['opusim']}), or start a new folder"
            )
        plan = RunPlan.resolve(config, records, model=model, folder=folder)
        _train_in(folder, plan, watcher, resume=True)
    return load_run(folder.path, model=model, trust_code=True)  # its code was executed here


def train_planned(plan: RunPlan, folder: RunFolder, *, watcher: Callback | None = None) -> None:
    """Train a resolved run in a new folder; a watcher receives the progress. See `train`."""
    with folder.writing(new=True, private=plan.config.mode == "release"):
        _train_in(folder, plan, watcher, resume=False)


def _follow(
    config: RunConfig,
    records: Dataset,
    folder: RunFolder | None,
    *,
    model: nn.Module | None,
    resume: bool,
    ranks: Ranks,
) -> Run:
    """Do this process's part of a run that the first process leads, and return the run from its folder."""
    plan = RunPlan.resolve(config, records, model=model, folder=folder if resume else None)
    require_same_plan(plan, ranks)
    with torch_threads(plan.config.threads) as threads, plan.opened_device(ranks) as device:
        plan = plan.started(threads=threads, device=device)
        plan.network.model.to(plan.config.torch_device)
        trainer = plan.algorithm.trainer(device)
        with closing(trainer), deferred_interrupt():  # the first process decides when Ctrl-C ends the run
            if not resume:
                plan.algorithm.initialise(trainer)
            share_trainer(trainer, ranks)
            folder = RunFolder(ranks.on_first(Path))
            plan.algorithm.prepare(trainer, folder)
            dataset = to_device(plan.dataset, plan.config.torch_device)
            release = plan.config.mode == "release"
            with system_generators(dataset.train.place) if release else nullcontext():
                follow(trainer, dataset.train, ranks, plan.users)
    return load_run(folder.path, model=model, trust_code=True)  # its code was executed here


def _train_in(folder: RunFolder, plan: RunPlan, watcher: Callback | None, *, resume: bool) -> None:
    """Train in a folder whose lock is held."""
    ranks = Ranks()
    if ranks.world > 1:
        ranks = ranks if leads_steps(plan.config) else Ranks.one()
        require_same_plan(plan, ranks)
    ledger_of = partial(_ledger, plan.config, folder)
    notes = nullcontext() if plan.certificate is None else noted_alarms(folder, ledger_of)
    with notes, torch_threads(plan.config.threads) as threads, plan.opened_device(ranks) as device:
        plan = plan.started(threads=threads, device=device)
        plan.network.model.to(plan.config.torch_device)
        algorithm, protection = plan.algorithm, plan.protection
        forecast = Forecast.of(plan, device)
        trainer = algorithm.protected_trainer(device, folder)
        with closing(trainer):  # whatever fails from here on, a user-supplied module loses its hooks
            facts = _facts(plan, forecast, device)
            engine = Engine(plan, trainer, folder, watcher, ranks=ranks, device=device)
            if resume:
                _check_same(folder, facts)
                if plan.certificate is not None and folder.ledger_file.exists():
                    for alarm in folder.read_ledger().doubts:
                        raise RunFolderError(
                            f"run folder {folder.path} cannot be resumed under its guarantee: {alarm.text}; begin a "
                            f"new run, and see what is covered with: opusim account run {quoted(folder.path)}"
                        )
                engine.resume()
                if device is not None and folder.baseline_file.exists():
                    device.compare_with(Baseline.from_array(read_array(folder.baseline_file)), engine.step)
            if forecast is not None:
                engine.tell(forecast.usage(engine.step), is_mean=forecast.is_mean)
            if not resume:
                for hint in _hints(plan):
                    warnings.warn(hint, stacklevel=3)
                algorithm.initialise(trainer)
                _begin(folder, engine, plan, device, folder.configuration(plan.config, facts))
            share_trainer(trainer, ranks)
            ranks.on_first(folder.path.resolve)
            with deferred_interrupt() as interrupted, closing(engine.steps) as steps:
                steps.open(partial(ledger_of, device), covered=bool(engine.mechanisms))
                if plan.certificate is not None and device is not None:
                    steps.ledger.note_certificate(facts_of(plan.certificate, device))
                try:
                    protection.pay_upfront(steps.ledger, device, folder)
                except BudgetExceeded as error:
                    if not (resume and engine.mechanisms):
                        raise
                    raise engine.ended_by(error) from error
                algorithm.prepare(trainer, folder)
                engine.run(interrupted)
    ranks.on_first(lambda: None)  # no further step for those who follow


def _hints(plan: RunPlan) -> Iterator[str]:
    """Yield warnings before a new run: of the camera, features, IDs, a large delta or epsilon, and empty batches."""
    config, data = plan.config, plan.config.data
    if plan.description is not None:
        yield from cautions(plan.description)
    public = config.protection.protects != "records"
    if (hint := features_named_as_identifiers(plan.dataset.columns)) is not None:
        yield hint
    # Only the configuration decides, since the records are private.
    as_read = plan.dataset.standardisation == Standardisation.identity() and not plan.dataset.holds_tokens
    if not public and as_read and (plan.dataset.columns or data.file_kind == "npz"):
        yield (
            "features are used as they are, and a protected run does not look at their scale: unless each has a mean "
            "near 0 and a deviation near 1, give public constants data.mean and data.std, one number or one for each "
            "feature (0 and 1 keep features as they are)"
        )
    if public and data.is_own and data.features is None and (hint := wide_feature(plan.dataset)) is not None:
        yield hint
    if config.of_users:
        yield from id_warnings(plan.dataset.owners, count=len(plan.dataset.train), name="data.user")
    if config.protection.protects != "nothing":  # a private number of records is never printed
        records = len(plan.dataset.train) if config.counts_are_public else None
        warning = large_delta(config.protection.delta, plan.mechanisms, records=records)
        if warning is not None:
            yield warning
        if (warning := large_epsilon("protection.epsilon", config.protection.epsilon)) is not None:
            yield warning
    if config.sampler.sampling_probability is not None and config.relation is Adjacency.ZERO_OUT:
        names = {
            "rate": "sampler.sampling_probability",
            "constant": "protection.divisor (or sampler.batch_size)",
        }
        warning = never_filled(plan.sampler.expected_batch_size, config.divisor, **names)
        if warning is not None:
            yield warning


def _features_usage(config: RunConfig, records: Dataset) -> Usage | None:
    """Return the device usage of optical features; None without them, or if it would reveal the number of records."""
    return features_usage(config.data, records) if config.tells_records else None


def _begin(
    folder: RunFolder, engine: Engine, plan: RunPlan, device: NoisyDevice | None, configuration: bytes
) -> None:
    """Write the first files of a new run; the configuration last, so that a run that has one can be resumed."""
    if plan.dataset.components is not None:
        write_array(folder.components_file, plan.dataset.components.to_array())
    if device is not None and (baseline := device.monitor.baseline) is not None:
        write_array(folder.baseline_file, baseline.to_array())
    engine.begin(configuration)
    folder.begin(configuration)


def _stored(config: object, settings: Sequence[str], folder: str | Path | None) -> RunConfig:
    """Return the configuration of the run to resume."""
    if config or settings:
        raise RunFolderError(
            "a run resumes under the configuration in its folder; leave config and settings out, or start a new folder "
            "with them"
        )
    if folder is None:
        raise RunFolderError(_NO_FOLDER)
    own = own_folder(Path(folder))  # of a run that each process keeps itself
    run_folder = RunFolder(own if own.exists() else Path(folder))
    run_folder.read_facts()
    run_folder.require_sealed()
    return run_folder.read_config()


def _facts(plan: RunPlan, forecast: Forecast | None, device: NoisyDevice | None) -> dict[str, Any]:
    """Return the facts that `config.json` holds next to the configuration."""
    config, dataset = plan.config, plan.dataset
    # The data; in release mode no number of records that the relation hides.
    data: dict[str, Any] = {
        "name": dataset.name,
        "n_classes": dataset.n_classes,
        "split": dataset.split,
        "target": dataset.target,
        "record_shape": list(dataset.record_shape),
        "vocabulary": dataset.vocabulary,
        "classes": list(dataset.classes),
        "columns": list(dataset.columns),
    }
    if config.tells_records:
        data |= {
            "n_train": len(dataset.train),
            "n_validation": len(dataset.validation),
            "n_test": 0 if dataset.test is None else len(dataset.test),
        }
        if dataset.origin:
            data["origin"] = dict(dataset.origin)
    elif config.of_users and config.relation is Adjacency.ZERO_OUT:
        # the relation makes the number of users public
        data["n_users"] = plan.sampler.n_records
    data["standardisation"] = asdict(dataset.standardisation)
    if dataset.public_map is not None:
        data["features"] = dict(dataset.public_map)
    if config.mode == "experiment":
        data["fingerprint"] = fingerprint(dataset.train, owners=dataset.owners if config.of_users else ())
        if dataset.test is not None:
            data["test_fingerprint"] = fingerprint(dataset.test)
    elif config.protection.protects == "labels":  # features are public, and budgets go by records' numbers
        data["features_fingerprint"] = fingerprint(dataset.train, labels=False)
    built = "recipe" in plan.network.facts  # else the module was user-supplied
    names = [config.model.name if built else "", config.data.factory or "", config.loss]
    code = [code_facts(name) for name in names if is_import_path(name)]
    features = _features_usage(config, dataset)
    # The kinds that the run uses, which other packages may bring, each with its entry-point group.
    used = [(kinds.group, getattr(config, name).kind) for name, kinds in KINDS.items()]
    if plan.description is not None:
        used.append((DEVICE_KINDS, plan.description.kind))
    if plan.noise is not None:
        used.append((NOISE_LAWS, plan.noise.law))
    return {
        "network": plan.network.facts,
        "data": data,
        "device": None if plan.description is None else plan.description.dump(),
        "noise": None if plan.noise is None else plan.noise.summary(),
        "versions": versions(used),
        **({} if _repeats_noise(config, device) else {"noise_repeats": False}),
        **({} if plan.certificate is None else {"certificate": plan.certificate.dump()}),
        **({"code": code} if code else {}),
        **({} if forecast is None else {"expected": forecast.usage().to_json()}),
        **({} if features is None else {"expected_of_features": features.to_json()}),
    }


def _as_found(config: RunConfig, facts: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with which a resumed run reads its records: with the number of classes that it counted.

    Earlier versions counted one more than the largest label, also if labels left numbers out.
    """
    data = facts["data"]
    counts = data.get("target", "class") == "class" and not data.get("classes")
    if not config.data.is_own or not counts or config.data.n_classes:
        return config
    counted = config.data.model_copy(update={"n_classes": data["n_classes"]})
    return config.model_copy(update={"data": counted})


def _check_same(folder: RunFolder, facts: dict[str, Any]) -> None:
    """Refuse to resume with another network, other data or another device."""
    stored = folder.read_facts()
    moved = [[{**code, "file": ""} for code in each.get("code", [])] for each in (stored, facts)]
    same = {"code": facts_equal(*moved)}
    same |= {part: facts_equal(stored[part], facts[part]) for part in ("network", "data", "device")}
    for part, equal in same.items():
        if not equal:
            other = "other data, or another number of users" if part == "data" else f"another {part}"
            raise RunFolderError(
                f"run folder {folder.path} was started with {other}; resume it with the same, or start a new folder"
            )
    changed = [name for name, version in facts["versions"].items() if stored["versions"].get(name) != version]
    if changed:
        warnings.warn(
            f"run folder {folder.path} was started with other versions of {', '.join(changed)}; "
            "the resumed run may differ in its last bits from an uninterrupted one",
            stacklevel=3,
        )


def _repeats_noise(config: RunConfig, device: NoisyDevice | None) -> bool:
    """Whether an experiment's device repeats its noise; true of release runs, which are charged by other rules."""
    return device is None or device.repeats_noise or config.mode == "release"


def _ledger(config: RunConfig, folder: RunFolder, device: NoisyDevice | None = None) -> Ledger:
    """Return the run's ledger; steps are reserved one by one if an experiment's device repeats no noise."""
    repeatable = _repeats_noise(config, device)
    return Ledger(
        folder.ledger_file,
        mode=config.mode,
        delta=config.protection.delta,
        enforced=True,
        block=STEPS_PAID_AT_ONCE[config.mode] if repeatable else 1,
        repeatable=repeatable,
        budget=config.budget,
        witnesses=folder.witnesses(),
    )


def leads_steps(config: RunConfig) -> bool:
    """Whether the first of several processes leads the steps of such a run; else each process runs the engine."""
    return bool(config.trainer.implementing_class().processes == "steps")


def follows(config: RunConfig) -> bool:
    """Whether this process, as torchrun started it, follows another one in such a run and writes no folder."""
    return launched_rank() > 0 and leads_steps(config)


def require_shareable(config: RunConfig, ranks: Ranks) -> None:
    """Refuse (ConfigError) what runs in one process only, before anything is written."""
    if ranks.world == 1:
        return
    kind, protection = config.trainer.kind, config.protection
    if torch.device(config.torch_device).index is not None and exchange_backend() != "gloo":
        reason = f"{config.torch_device!r} is one card for {ranks.world} processes; take 'cuda', one for each"
        raise ConfigError("configuration", "torch_device", reason)
    remedy = f"start it without torchrun (there are {ranks.world} processes)"
    if config.trainer.implementing_class().processes == "none":
        reason = f"{kind!r} trains in one process; take 'bp', 'dfa', 'tdfa', 'pdfa' or 'zo', or {remedy}"
        raise ConfigError("configuration", "trainer.kind", reason)
    if not protection.implementing_class().shared:
        reason = f"{protection.kind!r} holds in one process; take 'none' or 'record', or {remedy}"
        raise ConfigError("configuration", "protection.kind", reason)
    if leads_steps(config) and protection.protects == "records" and protection.noise == "device":
        reason = f"'device' is read by one process; take 'digital', or {remedy}"
        raise ConfigError("configuration", "protection.noise", reason)


def require_same_plan(plan: RunPlan, ranks: Ranks) -> None:
    """Refuse (RunFolderError) processes that were started with another configuration or other data than the first."""
    if ranks.world > 1:
        mine = {
            "configuration": (plan.config.digest(),),
            "data": (fingerprint(plan.dataset.train, owners=plan.dataset.owners),),
        }
        ranks.require_same(mine, RunFolderError)


def share_trainer(trainer: Trainer, ranks: Ranks) -> None:
    """Give every process the first one's parameters, optimizer, trainer's state, and state of its devices.

    Of the trainer's state, only what another process has too is sent: earlier noise stays with the process that draws
    it.
    """
    if ranks.world == 1:
        return
    names = ranks.on_first(lambda: list(trainer.state))
    others = ranks.rows([name in trainer.state for name in names])[1:] if names else []
    shared = [name for name, found in zip(names, zip(*others, strict=True), strict=True) if any(found)]
    tensors = [*trainer.tensors.values(), *(trainer.state[name] for name in shared)]
    share_state(ranks, tensors, trainer.optimizer)
    held = ranks.on_first(lambda: tree_map(Tensor.cpu, held_by_devices(trainer.model)))
    if not ranks.is_first:
        hold_on_devices(trainer.model, held)
