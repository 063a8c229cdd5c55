"""Kill a small run at every state of its folder, resume it, and compare it with an unbroken run.

Run as a program: `python -m tests.support.kill_harness FOLDER [TRAINER]`, TRAINER one of CONFIGS. Each attempt is a
forked child of this one warm process, so it costs a fraction of a second. Prints one line for each state that fails and
a closing count; exits with 1 if any failed.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from opusim import training
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint
from opusim.training.runs.folder import RunFolder
from opusim.training.zeroth_order.step_log import replay
from tests.support.killing import Killer, Moment, read_moments, skip_syncs, status_of

CONFIG: dict[str, Any] = {
    "epochs": 2, "threads": 1, "seed": 3, "sampler": {"batch_size": 10},
    "checkpoint": {"every_steps": 2, "keep": 1}, "device": {"name": "gaussian", "noise": {"sigma": 0.5}},
}  # fmt: skip

POISSON: dict[str, Any] = {
    **CONFIG,
    "sampler": {"scheme": "poisson", "batch_size": 10},
    "data": {"n_classes": 3},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "pdfa": {  # with components and labels kept in the folder
        **CONFIG, "data": {"n_classes": 3, "components": 6},
        "protection": {"kind": "label-randomized-response", "epsilon": 2.0},
    },
    "ulr": {
        **POISSON, "optimizer": {"name": "adam"}, "trainer": {"kind": "ulr", "copies": 2, "noise": "device"},
        "protection": {"kind": "record", "noise_multiplier": 2.0},
    },
    "zo": {
        **POISSON, "epochs": 1, "trainer": {"kind": "zo", "directions": 2}, "device": {},
        "protection": {"kind": "record", "noise_multiplier": 1.0},
    },
}  # fmt: skip


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(40, 6)), np.arange(40) % 3


def train(folder: Path, trainer: str) -> None:
    """Start the run or resume it; the user-supplied module has other weights when it resumes."""
    resume = RunFolder(folder).started
    torch.manual_seed(2 if resume else 1)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    config = None if resume else CONFIGS[trainer]
    training.train(config, data=data(), model=model, folder=folder, resume=resume)


def attempt(folder: Path, trainer: str, moment: Moment | None) -> int:
    """Train in a forked child that is killed at a moment, or that records all its states; return its status."""

    def work() -> None:
        killer = Killer(folder, moment)
        train(folder, trainer)
        killer.save(folder.with_suffix(".json"))

    return status_of(work)


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
    skip_syncs()
    train(root / "warm", trainer)  # imports and compiles in the parent, once for all children
    if attempt(root / "unbroken", trainer, None) != 0:
        print("the unbroken run failed")
        return 1
    expected = outcome(root / "unbroken")
    count, moments = read_moments(root / "unbroken.json")
    failures = 0
    for _, (target, when) in moments:
        folder = root / f"{target}-{when}"
        if not os.WIFSIGNALED(attempt(folder, trainer, (target, when))):
            print(f"touch {target} ({when}): the child was not killed")
            failures += 1
            continue
        if not RunFolder(folder).finished:  # the last touches come after the summary is in place
            train(folder, trainer)
        if outcome(folder) != expected:
            print(f"touch {target} ({when}): the resumed run differs")
            failures += 1
    print(f"{count} moments, {len(moments)} states, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
