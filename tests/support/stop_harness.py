"""Stop release runs under a budget by Ctrl-C or SIGKILL, and resume them.

Run as a program: `python -m tests.support.stop_harness FOLDER`.

Every process of a run is a forked child of this one warm process. A child says through a pipe which step begins, and
waits for an answer, before which a signal is sent; so a kill loses none, and a signal comes in its step. Prints one
JSON object: for each story the exit code of each process (negative: the signal that killed it) and the steps that
began, in order. The folder of a story bears its name.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opusim import training
from opusim.accounting.guarantee import BudgetExceeded
from opusim.training.errors import RunInterrupted
from opusim.training.feedback.trainer import FeedbackTrainer
from opusim.training.runs.folder import RunFolder
from tests.support.shared_runs import config_of

STEPS = 24
Stop = tuple[int, signal.Signals] | None
"""In which step of a process, counted from 1, which signal is sent; None for a process that is left alone."""
STORIES: dict[str, list[Stop]] = {
    "record-ctrl-c": [(3, signal.SIGINT), (7, signal.SIGINT), None],
    "record-kill": [(3, signal.SIGINT), (4, signal.SIGKILL), (2, signal.SIGINT), None],
}
RECORD: dict[str, Any] = {"protection": {"kind": "record", "epsilon": 2.0}}
RECORD["sampler"] = {"scheme": "poisson", "batch_size": 16}
CONFIG = config_of(
    {"kind": "dfa"}, mode="release", epochs=STEPS // 4, checkpoint={"every_steps": 5}, **RECORD
)


def train(folder: Path) -> int:
    """Start the run, or resume it; return the exit code that the command would have."""
    begun = RunFolder(folder).started
    data = np.random.default_rng(1).normal(size=(64, 5)), np.arange(64) % 3
    try:
        training.train(None if begun else CONFIG, data=data, folder=folder, resume=begun)
    except RunInterrupted:
        return 130
    except BudgetExceeded:
        return 4
    return 0


def child(folder: Path, telling: int, answer: int) -> None:
    step = FeedbackTrainer.step

    def told(self: FeedbackTrainer, *arguments: Any, **options: Any) -> Any:
        os.write(telling, f"{options['step']}\n".encode())
        os.read(answer, 1)
        return step(self, *arguments, **options)

    FeedbackTrainer.step = told  # type: ignore[method-assign]
    code = 1
    try:
        code = train(folder)
    finally:
        os._exit(code)


def stopped(folder: Path, stop: Stop) -> tuple[int, list[int]]:
    """One process: its exit code, and the steps that it began."""
    (reading, telling), (answer, answering) = os.pipe(), os.pipe()
    number = os.fork()
    if not number:
        os.close(reading)
        os.close(answering)
        child(folder, telling, answer)
    os.close(telling)
    os.close(answer)
    begun: list[int] = []
    with os.fdopen(reading) as lines:
        for line in lines:
            begun.append(int(line))
            if stop is not None and len(begun) == stop[0]:
                os.kill(number, stop[1])
            if stop is None or stop[1] is not signal.SIGKILL or len(begun) != stop[0]:
                os.write(answering, b".")
    os.close(answering)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), begun


def main() -> int:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    train(root / "warm")  # imports and compiles in the parent, once for all children
    told: dict[str, Any] = {}
    for name, stops in STORIES.items():
        processes = [stopped(root / name, stop) for stop in stops]
        begun = [step for _, steps in processes for step in steps]
        told[name] = {"codes": [code for code, _ in processes], "begun": begun}
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
