"""What benchmarks.convex.accuracy trains: the rows of its table, and what is searched for each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from opusim.description.section import merged

Point = dict[str, Any]
EPSILONS, DATA, SEEDS = (4.76, 1.33), ("mnist", "fashion-mnist", "cifar-10"), (0, 1, 2)
CELLS = tuple(itertools.product(DATA, EPSILONS))
LAST_ITERATE = "convex, last iterate"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A way to train, and what is searched for it.

    Attributes:
        config: What all its runs share.
        grid: Points that are tried, as keys of the configuration and their values.
        measured: Changes of the point that are measured against each other, by name; the search uses the first.
    """

    config: dict[str, Any]
    grid: tuple[Point, ...]
    measured: dict[str, Point]


def points_of(**values: tuple[Any, ...]) -> tuple[Point, ...]:
    """Every combination; `a__b` stands for the key a.b."""
    keys = [key.replace("__", ".") for key in values]
    return tuple(
        dict(zip(keys, combination, strict=True)) for combination in itertools.product(*values.values())
    )


def widths(*counts: int) -> dict[str, Point]:
    """Cases by their number of hyperplanes."""
    return {f"P = {p}": {"trainer.hyperplanes": p} for p in counts}


BASE: dict[str, Any] = {"threads": 1, "optimizer": {"name": "sgd"}}
CONVEX: dict[str, Any] = {"optimizer": {"lr": 1.9, "momentum": 0.0}, "trainer": {"kind": "convex"}}
CYCLIC = merged(
    CONVEX,
    {
        "epochs": 10,
        "sampler": {"scheme": "disjoint-cyclic", "batch_size": 125},
        "protection": {"kind": "last-iterate"},
    },
)
SAMPLED: dict[str, Any] = {
    "epochs": 20,
    "sampler": {"scheme": "poisson", "batch_size": 1000},
    "protection": {"kind": "record"},
}
NETWORK = merged(
    SAMPLED, {"trainer": {"kind": "bp"}, "optimizer": {"momentum": 0.9}, "model": {"activation": "relu"}}
)
CLIPS = (0.18, 0.25, 0.35, 0.5, 0.7, 1.0)
"""Clips that searches try for the last iterate."""
ROWS = {
    LAST_ITERATE: Row(
        config=CYCLIC,
        grid=(
            *points_of(trainer__clip=CLIPS, optimizer__schedule=("constant",)),
            {"trainer.clip": 0.5, "optimizer.schedule": "linear"},
        ),
        measured=widths(64, 128, 256),
    ),
    "convex, Poisson DP-SGD": Row(
        config=merged(CONVEX, SAMPLED),
        grid=(
            {"sampler.batch_size": 500, "trainer.clip": 0.35},
            {"sampler.batch_size": 500, "trainer.clip": 0.7},
            {"sampler.batch_size": 1000, "trainer.clip": 0.7, "epochs": 40},
            {"sampler.batch_size": 500, "trainer.clip": 0.7, "optimizer.schedule": "linear"},
        ),
        measured=widths(64),
    ),
    "ReLU network, DP-SGD": Row(
        config=merged(NETWORK, {"model": {"hidden": [200]}}),
        grid=points_of(optimizer__lr=(0.01, 0.03, 0.1, 0.3, 1.0)),
        measured={"width 200": {}},
    ),
    "logistic regression, DP-SGD": Row(
        config=merged(NETWORK, {"model": {"hidden": []}}),
        grid=points_of(optimizer__lr=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0)),
        measured={"": {}},
    ),
}
