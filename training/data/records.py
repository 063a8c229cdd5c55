"""The data set that a configuration names."""

from __future__ import annotations

from opusim.errors import ConfigError
from training.config.data import DataConfig, SplitRule
from training.config.effect import OWN_ARRAYS as OWN_ARRAYS
from training.data import Dataset, load_dataset
from training.data.standardisation import Standardisation


def chosen_constants(options: DataConfig) -> Standardisation | None:
    """The constants that a configuration gives itself, or None."""
    if options.mean is None or options.std is None:
        return None
    return Standardisation(
        mean=options.mean, std=options.std, source="data.mean and data.std of the configuration"
    )


def configured_dataset(options: DataConfig, split: SplitRule | None = None) -> Dataset:
    """Load a known data set as a configuration asks for it.

    Args:
        options: Its section `data`.
        split: The rule by which records are held out (`RunConfig.split`); None takes data.split, or else index.

    Raises:
        DataError: It cannot be read.
        ConfigError: The name stands for a person's own arrays, or an option does not apply to a known data set.
        ValueError: The name is not known.
    """
    if options.name == OWN_ARRAYS:
        raise ConfigError(
            "configuration",
            "data.name",
            "stands for user-supplied arrays, which no file holds; give them again: "
            "training.train(..., data=(x, y)), with folder=... and resume=True to resume a run",
        )
    if options.n_classes is not None:
        reason = f"{options.n_classes} is for user-supplied arrays; leave it out for {options.name}"
        raise ConfigError("configuration", "data.n_classes", reason)
    rule = split or options.split or "index"
    if rule == "id":
        reason = f"'id' is for arrays that are given with IDs; use 'index' or 'content' for {options.name}"
        raise ConfigError("configuration", "data.split", reason)
    return load_dataset(
        options.name,
        validation_fraction=options.validation_fraction,
        split_seed=options.split_seed,
        split=rule,
        standardise=chosen_constants(options) or options.standardise,
    )
