"""The grid of a private search, and the trials drawn from it before any data are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from opusim.errors import ConfigError
from opusim.randomness.streams import derive_seed
from training.config.reading import parse_setting

_TUNABLE = ("trainer", "optimizer", "sampler", "epochs")


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The trials of a search.

    Attributes:
        trials: Settings "key=value" of each trial; their number is Poisson, and may be 0.
        seed: Source of the trials' seeds in experiment mode; None in release mode.
    """

    trials: tuple[tuple[str, ...], ...]
    seed: int | None


def parse_choices(lines: Sequence[str]) -> dict[str, list[str]]:
    """Turn lines such as "trainer.clip=0.35,0.5" into values by key.

    Raises:
        ConfigError: A line has no key or no values, a key is given twice, or it is not a key of training.
    """
    choices: dict[str, list[str]] = {}
    for line in lines:
        key, _, text = line.partition("=")
        key, values = key.strip(), [value.strip() for value in text.split(",") if value.strip()]
        if not key or not values or key in choices:
            raise ConfigError("--choose", line, "must be KEY=VALUE,VALUE,... with each key once")
        if key.split(".")[0] not in _TUNABLE or key == "trainer.kind":
            raise ConfigError(
                "--choose", key, f"cannot be chosen by a search; choose keys of {', '.join(_TUNABLE)}"
            )
        for value in values:
            parse_setting(f"{key}={value}")
        choices[key] = values
    return choices


def draw_trials(choices: Mapping[str, Sequence[str]], mean: float, *, seed: int | None) -> Draw:
    """Draw K ~ Poisson(mean) trials, each with every key's value drawn uniformly and independently.

    Args:
        choices: Values to choose from, by key.
        mean: Expected number of trials, above 0.
        seed: Seed of the draw; None uses the system's entropy.
    """
    generator = np.random.default_rng(None if seed is None else derive_seed(seed, "tuning"))
    count = int(generator.poisson(mean))
    trials = tuple(
        tuple(f"{key}={values[int(generator.integers(len(values)))]}" for key, values in choices.items())
        for _ in range(count)
    )
    return Draw(trials=trials, seed=seed)
