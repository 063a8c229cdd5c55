"""What a private search draws before it looks at any data: how many trials, and the settings of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opusim.errors import ConfigError
from opusim.randomness.streams import derive_seed
from training.config.reading import parse_setting

_TUNABLE = ("trainer", "optimizer", "sampler", "epochs")


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What was drawn.

    Attributes:
        trials: Lines key=value of each trial; as many as the Poisson number says, maybe none.
        seed: Of the trials' own seeds in experiment mode; None in release mode.
    """

    trials: tuple[tuple[str, ...], ...]
    seed: int | None


def parse_choices(lines: Sequence[str]) -> dict[str, list[str]]:
    """Turn lines such as "trainer.clip=0.35,0.5" into key and values.

    Raises:
        ConfigError: A line has no key or no values, a key comes twice, or changes more than how the model is trained.
    """
    choices: dict[str, list[str]] = {}
    for line in lines:
        key, _, text = line.partition("=")
        key, values = key.strip(), [value.strip() for value in text.split(",") if value.strip()]
        if not key or not values or key in choices:
            raise ConfigError("--choose", line, "must be KEY=VALUE,VALUE,... with each key once")
        if key.split(".")[0] not in _TUNABLE or key == "trainer.kind":
            raise ConfigError("--choose", key, f"is not to be chosen; choose keys of {', '.join(_TUNABLE)}")
        for value in values:
            parse_setting(f"{key}={value}")
        choices[key] = values
    return choices


def draw_trials(choices: Mapping[str, Sequence[str]], mean: float, *, seed: int | None) -> Draw:
    """K ~ Poisson(mean) trials, each with every key's value drawn uniformly and independently.

    Args:
        choices: Values to choose from, by key.
        mean: m.
        seed: Fixes the draw; None takes the system's entropy.
    """
    generator = np.random.default_rng(None if seed is None else derive_seed(seed, "tuning"))
    count = int(generator.poisson(mean))
    trials = tuple(
        tuple(f"{key}={values[int(generator.integers(len(values)))]}" for key, values in choices.items())
        for _ in range(count)
    )
    return Draw(trials=trials, seed=seed)


def draw_to_json(draw: Draw) -> dict[str, Any]:
    """Plain JSON values."""
    return {"trials": [list(trial) for trial in draw.trials], "seed": draw.seed}


def draw_from_json(content: Mapping[str, Any]) -> Draw:
    """The draw that `draw_to_json` wrote."""
    return Draw(trials=tuple(tuple(trial) for trial in content["trials"]), seed=content["seed"])
