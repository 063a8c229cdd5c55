"""Runs of one process and of several that share their steps: `python -m tests.support.shared_runs FOLDER NAME ...`.

NAME is a run of two processes, NAME=K one of K processes, and NAME=K+J one that is interrupted in K processes and
resumed in J. Each is forked from this process, which imports libraries once. What went wrong in process R of a run is
written to FOLDER/NAME.R.error, and the records that it computed in each step to FOLDER/NAME.R.steps, a line of JSON a
step.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opusim import training
from opusim.errors import DeviceFault
from opusim.training.engine import loop
from opusim.training.engine.callbacks import Callback
from opusim.training.protections.record import RecordGradients
from tests.support.killing import skip_syncs
from tests.support.ranks import preload, run_named

N_RECORDS, N_FEATURES, N_CLASSES = 60, 6, 3
NOISE = 50.0  # noise multiplier at which a step is noise, up to some millionths of its variance
WIDTHS = (150, 100)

Config = dict[str, Any]


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    y = np.arange(N_RECORDS) % N_CLASSES
    return generator.normal(size=(N_RECORDS, N_FEATURES)) + 2 * np.eye(N_FEATURES)[y], y


def module() -> nn.Module:
    """A module without a closed form."""
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Linear(N_FEATURES, 8), nn.LayerNorm(8), nn.Tanh()),
        *(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, N_CLASSES)),
    )


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(N_FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, N_CLASSES))


def config_of(trainer: Config, **changes: Any) -> Config:
    """Return a configuration; with `own`, one for a module."""
    config: Config = {
        "seed": 3, "epochs": 2, "threads": 1, "model": {"hidden": [8]},
        "data": {"n_classes": N_CLASSES, "validation_fraction": 0.0},
        "sampler": {"scheme": "fixed-size", "batch_size": 15}, "trainer": trainer,
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.5},
    }  # fmt: skip
    config |= changes
    if "own" in changes:
        del config["own"], config["model"]
    if config.get("mode") == "release":
        del config["seed"]
    return config


RECORD = {
    "protection": {"kind": "record", "clip_norm": 1.0, "noise_multiplier": 0.5},
    "sampler": {"scheme": "poisson", "batch_size": 2},
    "epochs": 1,
}
"""Batches of two on average: some have no records, and some leave a process without any."""
BANDED = {
    "protection": {"kind": "record", "clip_norm": 1.0, "noise_multiplier": 0.5, "bands": 4},
    "sampler": {"scheme": "poisson", "batch_size": 6},
    "epochs": 1,
}
NOISY = {
    "protection": {"kind": "record", "clip_norm": 1.0, "noise_multiplier": NOISE},
    "sampler": {"scheme": "poisson", "batch_size": N_RECORDS}, "model": {"hidden": list(WIDTHS)},
    "optimizer": {"name": "sgd", "lr": 1.0, "momentum": 0.0}, "checkpoint": {"keep": 2}, "epochs": 1,
}  # fmt: skip
"""One step whose update is the noise over the divisor."""
MANY = {
    "protection": {"kind": "record", "clip_norm": 1.0, "noise_multiplier": 1.0},
    "sampler": {"scheme": "poisson", "batch_size": 6}, "checkpoint": {"every_steps": 1000}, "epochs": 24,
    "mode": "release",
}  # fmt: skip
POINTS = {"points": ["2", "5"], "slices": "shared"}
DEVICE = {"device": {"noise": {"sigma": 0.3}}}


@dataclass(frozen=True)
class Run:
    """One run: its configuration, its module if it has one, and what is changed in its processes before it starts."""

    config: Config
    model: Callable[[], nn.Module] | None = None
    prepare: Callable[[int], None] | None = None
    spoil: Callable[[np.ndarray], None] | None = None


def both_draw(rank: int) -> None:
    """Each process adds noise."""

    steps = torch.Generator().manual_seed(rank)

    def finish(self: RecordGradients, total: Tensor, *, error: float, count: Tensor | None = None) -> None:
        total += torch.randn(total.shape, generator=steps) * (self._noise_std * (1 + error))
        self._ranks.sum([total.div_(self._divisor)])

    RecordGradients._finish = finish  # type: ignore[method-assign]


def mean_of_ranks(rank: int) -> None:
    """The sum and its noise are divided by the number of processes, as by an average of gradients."""
    real = RecordGradients._finish

    def finish(self: RecordGradients, total: Tensor, *, error: float, count: Tensor | None = None) -> None:
        real(self, total, error=error, count=count)
        total /= self._ranks.world

    RecordGradients._finish = finish  # type: ignore[method-assign]


def own_divisor(rank: int) -> None:
    """Each process divides by what it has of the expected batch."""
    real = RecordGradients.__init__

    def initialise(self: RecordGradients, **options: Any) -> None:
        real(self, **options | {"divisor": options["divisor"] / options["ranks"].world})

    RecordGradients.__init__ = initialise  # type: ignore[method-assign]


def fail_in_second_step(rank: int) -> None:
    """The device of the run fails in its second step."""
    from opusim.devices.simulated import GaussianDevice

    real = GaussianDevice._seek

    def seek(self: GaussianDevice, step: int) -> None:
        if step == 1:
            raise DeviceFault("device 'gaussian': the laser is off")
        real(self, step)

    GaussianDevice._seek = seek  # type: ignore[method-assign]


def one_nan(x: np.ndarray) -> None:
    x[:, 0] = np.where(np.arange(len(x)) == len(x) - 1, 1e38, x[:, 0])


RUNS: Mapping[str, Run] = {
    "bp": Run(config_of({"kind": "bp"})),
    "dfa": Run(config_of({"kind": "dfa"})),
    "pdfa": Run(config_of({"kind": "pdfa"}, **DEVICE)),
    "pdfa published": Run(config_of({"kind": "pdfa", "order": "published", "tau_b": 1.0}, **DEVICE)),
    "bp noisy": Run(config_of({"kind": "bp", "sigma": 0.1, "tau_b": 1.0})),
    "bp module": Run(config_of({"kind": "bp"}, own=True), module),
    "tdfa module": Run(config_of({"kind": "tdfa", **POINTS}, own=True), module),
    "pdfa module": Run(config_of({"kind": "pdfa", **POINTS}, **DEVICE, own=True), module),
    "pdfa module small batches": Run(
        config_of({"kind": "pdfa", **POINTS}, **DEVICE | {"sampler": RECORD["sampler"]}, own=True), module
    ),
    "bp banded": Run(config_of({"kind": "bp"}, **BANDED)),
    "bp record": Run(config_of({"kind": "bp"}, **RECORD)),
    "pdfa record": Run(config_of({"kind": "pdfa"}, **DEVICE, **RECORD)),
    "bp module record": Run(config_of({"kind": "bp"}, **RECORD, own=True), module),
    "pdfa module record": Run(config_of({"kind": "pdfa", **POINTS}, **DEVICE, **RECORD, own=True), module),
    "noise": Run(config_of({"kind": "bp"}, **NOISY)),
    "noise in release": Run(config_of({"kind": "bp"}, mode="release", **NOISY)),
    "noise of both": Run(config_of({"kind": "bp"}, **NOISY), prepare=both_draw),
    "noise averaged": Run(config_of({"kind": "bp"}, **NOISY), prepare=mean_of_ranks),
    "noise over own divisor": Run(config_of({"kind": "bp"}, **NOISY), prepare=own_divisor),
    "batches": Run(config_of({"kind": "bp"}, **MANY)),
    "budget": Run(
        config_of({"kind": "bp"}, **RECORD | {"protection": RECORD["protection"] | {"epsilon": 6.0}})
    ),
    "device fault": Run(config_of({"kind": "pdfa"}, **DEVICE), prepare=fail_in_second_step),
    "diverged": Run(config_of({"kind": "bp"}, own=True), module, spoil=one_nan),
    "ulr": Run(config_of({"kind": "ulr"})),
    "convex": Run(config_of({"kind": "convex"})),
    "amplified labels": Run(
        config_of(
            {"kind": "bp"}, protection={"kind": "label-amplified", "epsilon": 3.0}, sampler=RECORD["sampler"]
        )
    ),
    "device noise": Run(
        config_of({"kind": "pdfa"}, **RECORD | {"protection": RECORD["protection"] | {"noise": "device"}})
    ),
    "batch norm": Run(config_of({"kind": "bp"}, own=True), batch_norm),
    "other data": Run(config_of({"kind": "bp"})),
}


def log_steps(file: Path) -> None:
    """Write the records of every step to a file before they are computed."""
    real, descriptor = loop._do, os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def do(order: Any, trainer: Any, split: Any, ranks: Any, *more: Any) -> Any:
        mine = order.records[ranks.part(len(order.records))].tolist()
        os.write(descriptor, (json.dumps([order.step, mine]) + "\n").encode())
        return real(order, trainer, split, ranks, *more)

    loop._do = do


def train(folder: Path, name: str, rank: int, *, resume: bool = False, watcher: Any = None) -> None:
    """Do the work of one process of a run."""
    run = RUNS[name.partition("=")[0]]
    x, y = data()
    if run.spoil is not None:
        run.spoil(x)
    if name.startswith("other data") and rank:
        x = x + 1
    if run.prepare is not None:
        run.prepare(rank)
    log_steps(folder / f"{name}.{rank}.steps")
    model = None if run.model is None else run.model()
    config = None if resume else run.config
    training.train(config, data=(x, y), model=model, folder=folder / name, resume=resume, watcher=watcher)


class Interrupting(Callback):
    """Stops the first process as Ctrl-C does once some steps are done; a watcher."""

    def on_start(self, *, step: int, total_steps: int) -> None:
        self._until = total_steps // 2

    def on_step(self, *, step: int) -> None:
        if step == self._until:
            os.kill(os.getpid(), signal.SIGINT)


def main(arguments: list[str]) -> None:
    """Do the runs named."""
    preload()
    skip_syncs()
    folder = Path(arguments[0])
    # what is imported here is imported in no process
    training.train(RUNS["pdfa record"].config, data=data(), folder=folder / "warm-up")
    run_named(folder, arguments[1:], train, halved={"watcher": Interrupting()})


if __name__ == "__main__":
    main(sys.argv[1:])
