"""Kills a small run at every moment at which it touches the disk, resumes it, and compares with an unbroken run.

Run as a program: `python kill_harness.py FOLDER [TRAINER]`, TRAINER one of CONFIGS. Each attempt is a forked child of
this one warm process, so it costs a fraction of a second. Prints one line per moment that fails and a closing count;
exits with 1 if any failed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import training
from training.runs.checkpoints import list_checkpoints, read_checkpoint
from training.runs.folder import RunFolder
from training.zeroth_order.replay import replay

TOUCHES = ("write", "fsync", "replace", "ftruncate")
CONFIG: dict[str, Any] = {
    "epochs": 2,
    "threads": 1,
    "seed": 3,
    "sampler": {"batch_size": 10},
    "checkpoint": {"every_steps": 2, "keep": 1},
    "device": {"name": "gaussian", "noise": {"sigma": 0.5}},
}

CONFIGS: dict[str, dict[str, Any]] = {
    "pdfa": {  # with components and labels kept in the folder
        **CONFIG,
        "data": {"n_classes": 3, "components": 6},
        "protection": {"kind": "label-readout", "epsilon": 2.0},
    },
    "ulr": {
        **CONFIG,
        "optimizer": {"name": "adam"},
        "sampler": {"scheme": "poisson", "batch_size": 10},
        "data": {"n_classes": 3},
        "trainer": {"kind": "ulr", "copies": 2, "noise": "device"},
        "protection": {"kind": "record", "noise_multiplier": 2.0},
    },
    "zo": {
        **CONFIG,
        "epochs": 1,
        "sampler": {"scheme": "poisson", "batch_size": 10},
        "data": {"n_classes": 3},
        "trainer": {"kind": "zo", "directions": 2},
        "protection": {"kind": "record", "noise_multiplier": 1.0},
        "device": {},
    },
}


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(40, 6)), np.arange(40) % 3


def train(folder: Path, trainer: str) -> None:
    """Begin the run or go on with it; a person's own module starts from other weights when the run goes on."""
    resume = RunFolder(folder).started
    torch.manual_seed(2 if resume else 1)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    training.train(
        None if resume else CONFIGS[trainer], data=data(), model=model, folder=folder, resume=resume
    )


class Killer:
    """Counts the calls that touch the disk and kills this process around one of them."""

    def __init__(self, target: int | None, when: str) -> None:
        self.count = 0
        self.target, self.when = target, when
        for name in TOUCHES:
            setattr(os, name, self.wrapped(name, getattr(os, name)))

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            mine = self.count == self.target
            self.count += 1
            if mine and self.when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            if mine and self.when == "within" and name == "write":
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments)
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call


def in_child(work: Callable[[], int]) -> int:
    """Run work in a forked child; returns its exit status as os.waitpid gives it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def attempt(folder: Path, trainer: str, target: int | None, when: str = "before") -> int:
    def work() -> int:
        killer = Killer(target, when)
        train(folder, trainer)
        (folder / "touches").write_text(str(killer.count))
        return 0

    return in_child(work)


def outcome(folder: Path) -> tuple[object, ...]:
    """Metrics, summary, step log and the last checkpoint's tensors, to the bit; a replay of the log must agree."""
    last = list_checkpoints(folder / "checkpoints")[-1]
    tensors = {name: tensor.numpy().tobytes() for name, tensor in read_checkpoint(last).tensors.items()}
    names = ["metrics.jsonl", "summary.json"]
    if (folder / "steps.zo").exists():
        names += ["steps.zo", "steps.mark.json"]
        rebuilt = {f"model.{name}": t.numpy().tobytes() for name, t in replay(folder).tensors.items()}
        tensors |= {f"replayed {name}": content for name, content in rebuilt.items()}
        if any(tensors[name] != content for name, content in rebuilt.items()):
            return ("the replay differs from the checkpoint",)
    return *((folder / name).read_bytes() for name in names), tensors


def main() -> int:
    root, trainer = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "pdfa"
    torch.set_num_threads(1)
    train(root / "warm", trainer)  # imports and compiles in the parent, once for all children
    if attempt(root / "unbroken", trainer, None) != 0:
        print("the unbroken run failed")
        return 1
    expected = outcome(root / "unbroken")
    touches = int((root / "unbroken" / "touches").read_text())
    failures = 0
    attempts = [(target, when) for target in range(touches) for when in ("before", "within", "after")]
    for target, when in attempts:
        folder = root / f"{target}-{when}"
        killed = attempt(folder, trainer, target, when)
        if not os.WIFSIGNALED(killed):
            print(f"touch {target} ({when}): the child was not killed (status {killed})")
            failures += 1
            continue
        finished = RunFolder(folder).finished  # the last touches come after the summary is in place
        status = 0 if finished else attempt(folder, trainer, None)
        if status != 0 or outcome(folder) != expected:
            print(f"touch {target} ({when}): the resumed run differs (status {status})")
            failures += 1
    print(f"{len(attempts)} moments, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
