"""The games of `benchmarks.attacks.guarantees`: crafted so that the proven epsilon is nearly reached.

Each plays the product's own code. A new row of the table is an entry of `ROWS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.attacks.scalars import ScalarsGame
from benchmarks.attacks.selection import SelectedModelGame, selected_model, selection
from opusim.training.attacks.base import crafted
from opusim.training.attacks.games import (
    LEAN,
    AmplifiedGame,
    LastIterateGame,
    LookGame,
    ReleasedModelGame,
    StagedLookGame,
    TwoWorlds,
)
from opusim.training.config import load_config
from opusim.training.engine.plan import RunPlan

EPSILON, DELTA = 4.0, 1e-5
CONTROL_TRIALS = 10_000
"""Fewest trials of a control: with a tenth of them, no noise shows more than 4.2, too little to refute a proven 4."""
_LOOKS, _OUTPUTS = 10, 64
"""Labels that are looked at, and a device's outputs: with 32, no light tells the argmax much more than at epsilon 4."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table.

    Attributes:
        game: Makes the game.
        trials: Trials of both worlds together.
        required: Share of the proven epsilon that is required of the audit.
        gaussian: Whether the bound under the Gaussian law may reach it.
        delta: Of the statement and of all bounds.
    """

    game: Callable[[], TwoWorlds]
    trials: int
    required: float
    gaussian: bool = False
    delta: float = DELTA

    @property
    def control_trials(self) -> int:
        """Trials of each control: a tenth, and so many that a perfect attack would show an epsilon above 6."""
        return max(self.trials // 10, CONTROL_TRIALS)


def plan_of(protection: Mapping[str, Any], *, classes: int, **sections: Any) -> RunPlan:
    """Return a small run with a protection; its records are replaced by the game's."""
    data = {"name": "arrays", "n_classes": classes, "standardise": False, "validation_fraction": 0.0}
    usual = {"threads": 1, "epochs": 1, "data": data, "sampler": {"batch_size": 10}}
    protection = {"epsilon": EPSILON, "delta": DELTA, **protection}
    config = load_config({**usual, "protection": protection, **sections})
    labels = torch.arange(100) % classes
    return RunPlan.resolve(config, crafted(torch.eye(100)[:, :3], labels, n_classes=classes))


def look(noise: str | None = None, device: Mapping[str, Any] | None = None) -> LookGame:
    """Return the game of ten labels that are read through a device, or randomized without one."""
    protection = {"kind": "label-readout", "noise": noise}
    if device is None:
        protection = {"kind": "label-randomized-response"}
    trainer = {"kind": "dfa" if device is None else "pdfa"}
    sections = {} if device is None else {"device": device}
    model = {"hidden": [_OUTPUTS]}
    return LookGame(plan_of(protection, classes=_LOOKS, trainer=trainer, model=model, **sections))


def staged(stages: int = 3) -> StagedLookGame:
    """Return the game of ten labels that are randomized in stages."""
    protection = {"kind": "label-randomized-response", "stages": stages}
    trainer, model = {"kind": "dfa"}, {"hidden": [_OUTPUTS]}
    return StagedLookGame(plan_of(protection, classes=_LOOKS, trainer=trainer, model=model))


def camera() -> dict[str, Any]:
    """Return the low-light camera without read noise, which the theorem of counts does not credit."""
    return {"name": "camera_low_light", "camera": {"sensor": {"read_noise_e": 0.0}}}


def amplified() -> AmplifiedGame:
    """Return the game of eight secret batches, q = 1/4."""
    sections = {"trainer": {"kind": "dfa"}, "model": {"hidden": [8]}, "sampler": {"batch_size": 25}}
    return AmplifiedGame(plan_of({"kind": "label-amplified"}, classes=2, epochs=2, **sections))


def released_model() -> ReleasedModelGame:
    """Return the game of one noisy linear model; every record has the weight 1, so that no leverage is lowered."""
    protection = {"kind": "label-release", "rounds": 0}
    return ReleasedModelGame(plan_of(protection, classes=3, trainer={"kind": "ridge"}, sampler={}))


def scalars(
    law: str, batch_size: int, *, directions: int = 2, epochs: int = 2, delta: float = DELTA, **trainer: Any
) -> ScalarsGame:
    """Return the game of zeroth-order steps on batches out of 100 records."""
    sections = {
        "trainer": {"kind": "zo", "law": law, "directions": directions, **trainer},
        "optimizer": {"lr": 0.01, "momentum": 0.0},
        "model": {"hidden": [4]},
        "sampler": {"scheme": "poisson", "batch_size": batch_size},
    }
    return ScalarsGame(plan_of({"kind": "record", "delta": delta}, classes=2, epochs=epochs, **sections))


def convex(batches: int = 5, epochs: int = 4, lean: float = LEAN, **changes: Any) -> LastIterateGame:
    """Return the game of the last iterate on its linear instance."""
    config = {
        "trainer": {"kind": "convex", **changes.pop("trainer", {})},
        "optimizer": {"lr": 0.5, "momentum": 0.0, **changes.pop("optimizer", {})},
        "sampler": {"scheme": "disjoint-cyclic", "batch_size": 100 // batches},
    }
    plan = plan_of({"kind": "last-iterate", **changes}, classes=2, epochs=epochs, **config)
    return LastIterateGame(plan, lean=lean)


def strongly_convex() -> LastIterateGame:
    """Return the same with a regularised squared loss."""
    return convex(trainer={"objective": "squared", "regularisation": 0.1, "clip": 0.5})


def selected() -> SelectedModelGame:
    """Return the game of the best model of 3 trials expected, each with eight secret batches, q = 1/4."""
    plan = plan_of(
        {"kind": "record", "epsilon": None, "noise_multiplier": 1.0, "relation": "add_or_remove_one"},
        classes=2,
        trainer={"kind": "bp"},
        model={"hidden": [4]},
        sampler={"scheme": "poisson", "batch_size": 25, "sampling_probability": 0.25},
        epochs=2,
    )
    return selected_model(plan, 3.0, EPSILON, DELTA)


ROWS: dict[str, Row] = {
    "label, randomized response": Row(game=look, trials=400_000, required=0.85),
    "label, randomized response in stages": Row(game=staged, trials=400_000, required=0.85),
    "label, readout, gaussian device": Row(
        game=lambda: look("device", device={"name": "gaussian"}), trials=2_000_000, required=0.45
    ),
    "label, photon counts": Row(
        game=lambda: look("counts", device=camera()), trials=1_000_000, required=0.45
    ),
    "label, argmax of counts": Row(
        game=lambda: look("argmax", device=camera()), trials=100_000, required=0.85
    ),
    "label, one linear model": Row(game=released_model, trials=600_000, required=0.85, gaussian=True),
    "label, amplified": Row(game=amplified, trials=2_000_000, required=0.6),
    "zeroth order, Gaussian scalars": Row(
        game=lambda: scalars("gaussian", 100), trials=10_000, required=0.6, gaussian=True
    ),
    "zeroth order, Gaussian scalars, joint clip": Row(
        game=lambda: scalars("gaussian", 100, clip="joint"), trials=10_000, required=0.6, gaussian=True
    ),
    "zeroth order, Laplace scalars": Row(
        game=lambda: scalars("laplace", 50, epochs=1), trials=20_000, required=0.6
    ),
    "zeroth order, Laplace scalars, pure epsilon": Row(
        game=lambda: scalars("laplace", 50, directions=1, epochs=1, delta=0.0),
        trials=20_000,
        required=0.6,
        delta=0.0,
    ),
    "private selection, 3 trials expected": Row(
        game=lambda: selection(3.0, EPSILON, DELTA), trials=60_000, required=0.3
    ),
    "private selection, models of 3 trials expected": Row(game=selected, trials=60_000, required=0.3),
    "convex, last iterate": Row(game=convex, trials=200_000, required=0.6, gaussian=True),
    "convex, last iterate, strongly convex": Row(
        game=strongly_convex, trials=200_000, required=0.6, gaussian=True
    ),
}
"""The games, by the names of their rows."""
