"""Putting a run together: data, network, device, sampler, folder, engine."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accounting.ledger import Ledger
from opusim.description import load_description, parse_description
from opusim.description_schema import DeviceDescription
from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_described
from opusim.errors import ConfigError
from opusim.randomness import derive_seed, noise_stream
from training.config import RunConfig, load_config
from training.data import Dataset, Split, from_arrays
from training.data.components import PrincipalComponents, reduced
from training.data.records import OWN_ARRAYS, chosen_constants, configured_dataset
from training.data.samplers import Sampler, make_sampler
from training.engine import Engine, Watcher
from training.errors import RunFolderError
from training.feedback.trainer import FeedbackTrainer
from training.networks.network import FullyConnected, LayerShape, build_model
from training.optimizers import make_optimizer
from training.protections.choice import make_noisy_labels, make_protection, pay_at_start
from training.protections.plan import budget_of, require_covered, step_mechanisms, with_noise
from training.runs.folder import RunFolder, facts_equal, versions
from training.runs.run import Run, load_run
from training.runs.storage import read_array, write_array
from training.trainer import Trainer

_STEPS_PAID_AT_ONCE = {"experiment": 64, "release": 16}
"""Steps that one synced line of the ledger reserves."""

Arrays = tuple[np.ndarray | Tensor, np.ndarray | Tensor]


def train(
    config: RunConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    data: Arrays | Dataset | None = None,
    model: nn.Sequential | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    settings: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> Run:
    """Train a network with the hardware in the loop, and return the run.

    Args:
        config: A RunConfig, a TOML file, a mapping, or None for the defaults (PDFA on digits).
        data: (x, y) with x of shape (n, d) and class numbers y of shape (n,), numpy or torch; or a
            Dataset; None loads the data set that the configuration names.
        model: An nn.Sequential of nn.Linear and activations, trained in place; None builds the network of the
            configuration.
        folder: The run folder; None takes a new one under ./runs.
        resume: Go on with the unfinished run in `folder`, under its own configuration; data and model are given
            again if they were given at first.
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
    _check_torch_device(resolved.torch_device)
    if resolved.mode == "release":
        resolved = resolved.model_copy(update={"seed": 0})  # no seed is used, so none is kept
    if data is not None:
        resolved = _with_own_data(resolved)
    run_folder = RunFolder(folder if folder is not None else _new_folder(resolved))
    dataset = _reduced(resolved, _load_data(resolved, data), run_folder if resume else None)
    network = FullyConnected(model if model is not None else _new_model(resolved, dataset))
    _check_fit(resolved, network, dataset, given=model is not None)
    description = _description(resolved, run_folder if resume else None)
    sampler = _sampler(resolved, dataset)
    require_covered(resolved, dataset, sampler)
    resolved = with_noise(resolved, network, sampler)
    with run_folder.writing(new=not resume), _threads(resolved.threads) as threads:
        resolved = resolved.model_copy(update={"threads": threads})
        with _device(resolved, network, description) as device:
            network.model.to(resolved.torch_device)
            trainer = _trainer(resolved, network, dataset, device)
            facts = _facts(resolved, dataset, network, description, device)
            engine = _engine(resolved, trainer, dataset, sampler, run_folder, watcher)
            if resume:
                _check_same(run_folder, facts)
                engine.resume()
            else:
                if resolved.model.initial_output == "feedback":
                    trainer.start_from_feedback()
                engine.checkpoint()  # before the configuration, so that a run once begun can always go on
                if dataset.components is not None:
                    write_array(run_folder.components_file, dataset.components.to_array())
                run_folder.begin(resolved, facts)
            with _ledger(resolved, run_folder) as ledger:
                pay_at_start(resolved, ledger)
                trainer.noisy_labels = make_noisy_labels(
                    resolved, dataset, device, ledger, run_folder, steps=engine.total_steps
                )
                mechanisms = step_mechanisms(resolved, network, sampler, device.noise if device else None)
                engine.run(ledger, mechanisms)
    return load_run(run_folder.path)


def _stored(config: object, settings: Sequence[str], folder: str | Path | None) -> RunConfig:
    """The configuration of the run to go on with."""
    if config is not None or settings:
        raise RunFolderError(
            "resume goes on under the configuration that the folder holds; leave config and settings out, "
            "or start a new folder with them"
        )
    if folder is None:
        raise RunFolderError("resume needs the folder of the run to go on with")
    return RunFolder(folder).read_config()


def _with_own_data(config: RunConfig) -> RunConfig:
    """The configuration as it is for a person's own data: their name, and no constants of a known data set."""
    changes = {"name": OWN_ARRAYS, "standardise": config.data.mean is not None}
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})


def _new_folder(config: RunConfig) -> Path:
    """A folder name that is not taken: runs/pdfa-digits-1, -2, ..."""
    stem = f"{config.trainer.kind}-{config.data.name}"
    number = 1
    while (Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return Path("runs") / f"{stem}-{number}"


def _check_torch_device(name: str) -> None:
    """Refuse a torch device that is not there."""
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise ConfigError(
            "configuration", "torch_device", f"{name!r} is no torch device; use 'cpu' or 'cuda'"
        ) from error
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(kind, False):
        usable = ", ".join(repr(key) for key, there in available.items() if there)
        raise ConfigError(
            "configuration", "torch_device", f"{name!r} is not available here; use one of {usable}"
        )


@contextmanager
def _threads(wanted: int | None) -> Iterator[int]:
    """Set torch's thread count for the run and put it back."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _seed(config: RunConfig, label: str) -> int | None:
    """A seed for one purpose; None in release mode, where nothing is seeded."""
    return derive_seed(config.seed, label) if config.mode == "experiment" else None


def _load_data(config: RunConfig, data: Arrays | Dataset | None) -> Dataset:
    if isinstance(data, Dataset):
        return data
    if data is None:
        return configured_dataset(config.data)
    if not isinstance(data, tuple) or len(data) != 2:
        raise TypeError(
            f"data must be a pair (x, y) or a Dataset, got {type(data).__name__}; give data=(x, y)"
        )
    options = config.data
    return from_arrays(
        *data,
        n_classes=options.n_classes,
        validation_fraction=options.validation_fraction,
        split_seed=options.split_seed,
        standardise=chosen_constants(options),
    )


def _reduced(config: RunConfig, dataset: Dataset, resumed: RunFolder | None) -> Dataset:
    """The data set in its principal components, if it is to be: the stored ones where a run goes on."""
    wanted = config.data.components
    if wanted is None:
        return dataset
    if resumed is not None:
        return reduced(dataset, PrincipalComponents.from_array(read_array(resumed.components_file)))
    return reduced(dataset, PrincipalComponents.of(dataset.train.x, wanted, whitening=config.data.whitening))


def _new_model(config: RunConfig, dataset: Dataset) -> nn.Sequential:
    options = config.model
    layers = [
        LayerShape(
            n_outputs=width,
            activation=options.activation,
            bias=options.bias,
            tau_h_max=options.tau_h_max,
            tau_h_min=options.tau_h_min,
        )
        for width in options.hidden
    ]
    layers.append(
        LayerShape(n_outputs=dataset.n_classes, activation=options.output_activation, bias=options.bias)
    )
    generator = torch.Generator()
    seed = _seed(config, "initialisation")
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return build_model(dataset.n_features, layers, generator=generator, gain=options.initial_gain)


def _check_fit(config: RunConfig, network: FullyConnected, dataset: Dataset, *, given: bool) -> None:
    if config.trainer.kind == "pdfa" and network.depth == 1:
        raise ValueError("model has no hidden layer; pdfa needs one to send the projected error to")
    wanted = (dataset.n_features, dataset.n_classes)
    found = (network.n_inputs, network.widths[-1])
    if given and wanted != found:
        raise ValueError(
            f"model maps {found[0]} inputs to {found[1]} outputs, but the data have {wanted[0]} features and "
            f"{wanted[1]} classes; change its first or last layer"
        )


def _description(config: RunConfig, resumed: RunFolder | None) -> DeviceDescription | None:
    """The device's description: the stored one where a run goes on, so that its file need not be there."""
    if config.trainer.kind != "pdfa":
        if config.device != type(config.device)():
            load_description(
                config.device.name, config.device.overrides
            )  # unknown keys are refused, used or not
        return None
    if resumed is not None:
        return parse_description(str(resumed.config_file), resumed.read_facts()["device"])
    return load_description(config.device.name, config.device.overrides)


@contextmanager
def _device(
    config: RunConfig, network: FullyConnected, description: DeviceDescription | None
) -> Iterator[NoisyDevice | None]:
    """Open the device that the trainer needs, as wide as the network."""
    if description is None:
        yield None
        return
    with open_described(
        description,
        mode=config.mode,
        seed=_seed(config, "device") or 0,
        torch_device=config.torch_device,
        n_inputs=network.widths[-1],
        n_outputs=sum(network.widths[:-1]),
    ) as device:
        yield device


def _facts(
    config: RunConfig,
    dataset: Dataset,
    network: FullyConnected,
    description: DeviceDescription | None,
    device: NoisyDevice | None,
) -> dict[str, Any]:
    """What `config.json` says beside the configuration."""
    data: dict[str, Any] = {
        "name": dataset.name,
        "n_classes": dataset.n_classes,
        "n_train": len(dataset.train),
        "n_validation": len(dataset.validation),
        "n_test": 0 if dataset.test is None else len(dataset.test),
        "standardisation": asdict(dataset.standardisation),
    }
    if config.mode == "experiment":
        data["fingerprint"] = _fingerprint(dataset.train)
    return {
        "network": {"n_inputs": network.n_inputs, "layers": [asdict(layer) for layer in network.layers]},
        "data": data,
        "device": None if description is None else description.dump(),
        "noise": None if device is None else device.noise.to_json(),
        "versions": versions(),
    }


def _fingerprint(split: Split) -> str:
    """BLAKE2b of the records, so that a run is not resumed on other data."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (split.x, split.y):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _check_same(folder: RunFolder, facts: dict[str, Any]) -> None:
    """Refuse to go on with another network, other data or another device."""
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
        dataset=_moved(dataset, config.torch_device),
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


def _trainer(
    config: RunConfig, network: FullyConnected, dataset: Dataset, device: NoisyDevice | None
) -> FeedbackTrainer:
    noise = None
    if config.trainer.sigma:
        noise = noise_stream(config.mode, _seed(config, "noise") or 0, "digital-noise")
    return FeedbackTrainer(
        network,
        make_optimizer(network.parameters, config.optimizer),
        config.trainer,
        loss=config.loss,
        device=device,
        noise=noise,
        protection=make_protection(config, dataset, device),
    )


def _ledger(config: RunConfig, folder: RunFolder) -> Ledger:
    """The run's ledger; a release run loses what is left of a block when it is killed, so its blocks are small."""
    return Ledger(
        folder.ledger_file,
        mode=config.mode,
        delta=config.protection.delta,
        enforced=True,
        block=_STEPS_PAID_AT_ONCE[config.mode],
        budget=budget_of(config),
    )


def _sampler(config: RunConfig, dataset: Dataset) -> Sampler:
    options = config.sampler
    n_records = len(dataset.train)
    if options.batch_size > n_records and options.scheme != "full-batch":
        raise ConfigError(
            "configuration",
            "sampler.batch_size",
            f"{options.batch_size} exceeds the {n_records} training records; "
            f"set sampler.batch_size to at most {n_records}",
        )
    return make_sampler(
        options.scheme,
        n_records,
        None if options.scheme == "full-batch" else options.batch_size,
        _seed(config, "sampler"),
        min_batch_size=options.min_batch_size,
        drop_last=options.drop_last or None,
    )


def _moved(dataset: Dataset, place: str) -> Dataset:
    """The data set on the torch device that trains."""
    if place == "cpu":
        return dataset

    def move(split: Split) -> Split:
        return Split(split.x.to(place), split.y.to(place))

    return Dataset(
        name=dataset.name,
        n_classes=dataset.n_classes,
        train=move(dataset.train),
        validation=move(dataset.validation),
        test=None if dataset.test is None else move(dataset.test),
        standardisation=dataset.standardisation,
        components=dataset.components,
    )
