"""The parts of a run, each built from its configuration: data, device, sampler."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from opusim.description.schema import DeviceDescription
from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_described
from opusim.errors import ConfigError
from training.config.run import RunConfig
from training.config.seeds import seed_for
from training.data import Dataset, Split, from_arrays
from training.data.catalogue import build_dataset, standardisation_of
from training.data.dataset import PrincipalComponents, reduced
from training.data.samplers import PoissonSampler, Sampler, make_sampler
from training.engine.algorithm import Arrays, DeviceShape
from training.runs.folder import RunFolder
from training.runs.storage import read_array


def check_torch_device(name: str) -> None:
    """Refuse a torch device that is not there."""
    try:
        place = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            "configuration", "torch_device", f"{name!r} is no torch device; use 'cpu' or 'cuda'"
        ) from error
    cuda, mps = torch.cuda.device_count(), int(torch.backends.mps.is_available())
    available = {"cpu": 1, "cuda": cuda if torch.cuda.is_available() else 0, "mps": mps}
    if (place.index or 0) >= available.get(place.type, 0):
        usable = ", ".join(repr(kind) for kind, count in available.items() if count)
        raise ConfigError(
            "configuration", "torch_device", f"{name!r} is not available here; use one of {usable}"
        )


@contextmanager
def torch_threads(wanted: int | None) -> Iterator[int]:
    """Set torch's thread count for the run and put it back."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def load_data(config: RunConfig, data: Arrays | Dataset | None) -> Dataset:
    """The records to train on: those given, or the data set that the configuration names.

    Raises:
        TypeError: `data` is something else.
        ConfigError: data.split does not fit what was given: IDs, or a Dataset that was split before.
    """
    if isinstance(data, Dataset):
        if config.data.split not in (None, data.split):
            reason = (
                f"{config.data.split!r} is not how the given Dataset was split ({data.split}); leave it out"
            )
            raise ConfigError("configuration", "data.split", reason)
        return data
    if data is None:
        return build_dataset(config.data, config.split)
    if not isinstance(data, tuple) or len(data) not in (2, 3):
        raise TypeError(
            f"data must be (x, y), (x, y, ids) or a Dataset, got {type(data).__name__}; give data=(x, y)"
        )
    options, ids = config.data, data[2] if len(data) == 3 else None
    split = "id" if ids is not None and options.split is None else config.split
    if (ids is not None) != (split == "id"):
        reason = f"{split!r} does not look at IDs, and some were given; use 'id'"
        if ids is None:
            reason = "'id' needs IDs, and none were given; give data=(x, y, ids)"
        raise ConfigError("configuration", "data.split", reason)
    return from_arrays(
        data[0],
        data[1],
        n_classes=options.n_classes,
        validation_fraction=options.validation_fraction,
        split_seed=options.split_seed,
        split=split,
        ids=ids,
        standardise=standardisation_of(options),
    )


def in_components(config: RunConfig, dataset: Dataset, resumed: RunFolder | None) -> Dataset:
    """The data set in its principal components, if it is to be: the stored ones where a run goes on."""
    wanted = config.data.components
    if wanted is None:
        return dataset
    if resumed is not None:
        return reduced(dataset, PrincipalComponents.from_array(read_array(resumed.components_file)))
    return reduced(dataset, PrincipalComponents.fit(dataset.train.x, wanted, whitening=config.data.whitening))


@contextmanager
def opened_device(
    config: RunConfig, shape: DeviceShape, description: DeviceDescription | None
) -> Iterator[NoisyDevice | None]:
    """Open the device that the trainer needs; None where the run has none."""
    if description is None:
        yield None
        return
    with open_described(
        description,
        mode=config.mode,
        seed=seed_for(config, "device") or 0,
        torch_device=config.torch_device,
        n_inputs=shape.n_inputs,
        n_outputs=shape.n_outputs,
    ) as device:
        yield device


def fingerprint(split: Split) -> str:
    """BLAKE2b of the records, so that a run is not resumed on other data."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (split.x, split.y):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def configured_sampler(config: RunConfig, dataset: Dataset) -> Sampler:
    """The sampler of the configuration over the training records."""
    options = config.sampler
    n_records = len(dataset.train)
    if options.sampling_probability is not None:
        return PoissonSampler(
            n_records, sampling_probability=options.sampling_probability, seed=seed_for(config, "sampler")
        )
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
        seed_for(config, "sampler"),
        min_batch_size=options.min_batch_size,
        drop_last=options.drop_last or None,
    )


def moved(dataset: Dataset, place: str) -> Dataset:
    """The data set on the torch device that trains."""
    if place == "cpu":
        return dataset

    def move(split: Split) -> Split:
        return Split(split.x.to(place), split.y.to(place))

    return replace(
        dataset,
        train=move(dataset.train),
        validation=move(dataset.validation),
        test=None if dataset.test is None else move(dataset.test),
    )
