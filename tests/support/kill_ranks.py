"""Kill one of two processes again and again: `python -m tests.support.kill_ranks FOLDER SEED KILLS run`.

It is a process of a release run, or with `loop` in place of `run` one of a private loop in release mode.
FOLDER/kills.json says of each kill which process was hit and what became of the other one. What each process computed
stands in FOLDER/ATTEMPT.RANK.steps, a line a step, written before the step is computed.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from opusim import training
from opusim.processes.ranks import TIMEOUT_VARIABLE
from tests.support.killing import skip_syncs
from tests.support.private_loops import private_loop
from tests.support.private_ranks import log_steps as log_batches
from tests.support.ranks import preload, start_ranks
from tests.support.shared_runs import config_of, data, log_steps

TIMEOUT_S = 20.0
"""For how long a process waits for another one that has not joined it or does not answer."""
LIMIT_S = 3 * TIMEOUT_S
"""How long the other process may take to end: it may wait to join, and once for an exchange."""
STEPS = 4000
CONFIG = config_of(
    {"kind": "bp"}, mode="release", protection={"kind": "record", "clip_norm": 1.0, "noise_multiplier": 4.0},
    sampler={"scheme": "poisson", "batch_size": 6}, epochs=STEPS // 10, checkpoint={"every_steps": 7},
)  # fmt: skip


def computed(folder: Path, attempt: int) -> dict[int, int]:
    """Return how often each step was computed in an attempt, by the process that did it most often."""
    counts: dict[int, int] = {}
    for file in folder.glob(f"{attempt}.*.steps"):
        own: dict[int, int] = {}
        for line in file.read_text().splitlines():
            step = json.loads(line)[0]
            own[step] = own.get(step, 0) + 1
        counts = {step: max(counts.get(step, 0), own.get(step, 0)) for step in counts | own}
    return counts


def attempt_run(folder: Path, attempt: int, rank: int) -> None:
    """Start the run, or resume it."""
    log_steps(folder / f"{attempt}.{rank}.steps")
    started = (folder / "run" / "config.json").exists()
    training.train(None if started else CONFIG, data=data(), folder=folder / "run", resume=started)


def attempt_loop(folder: Path, attempt: int, rank: int) -> None:
    """Resume the private loop, and save now and then."""
    private = private_loop(folder / "run", mode="release", seed=None, resume=True)
    log_batches(private, folder / f"{attempt}.{rank}.steps")
    while private.step < STEPS:
        for x, y in private.data_loader:
            private.optimizer.zero_grad()
            private.criterion(private.module(x), y).backward()
            private.optimizer.step()
            if private.step % 7 == 0:
                private.save()


def begin_loop(folder: Path) -> None:
    """Start the private loop in one process, for the others to resume."""
    with private_loop(folder / "run", mode="release", seed=None) as private:
        private.save()


ATTEMPTS = {"run": attempt_run, "loop": attempt_loop}


def lines(folder: Path, attempt: int) -> int:
    return sum(file.read_bytes().count(b"\n") for file in folder.glob(f"{attempt}.*.steps"))


def kill_once(folder: Path, what: str, attempt: int, chance: random.Random) -> dict[str, Any]:
    """Start two processes, kill one at a random moment, and wait for the other."""
    children = start_ranks(lambda rank: ATTEMPTS[what](folder, attempt, rank), 2)
    after, delay, hit = chance.randrange(0, 60), chance.uniform(0.0, 0.01), chance.randrange(2)
    start = time.monotonic()
    while lines(folder, attempt) < after and time.monotonic() - start < LIMIT_S:
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(children[hit], signal.SIGKILL)
    killed = time.monotonic()
    os.waitpid(children[hit], 0)
    other, status = children[1 - hit], (0, 0)
    while status[0] == 0 and time.monotonic() - killed < LIMIT_S:
        status = os.waitpid(other, os.WNOHANG)
        time.sleep(0.01)
    if status[0] == 0:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    seconds = time.monotonic() - killed
    return {"hit": hit, "after": after, "ended": status[0] != 0, "status": status[1], "seconds": seconds}


def main(folder: Path, seed: int, kills: int, what: str) -> None:
    os.environ[TIMEOUT_VARIABLE] = str(TIMEOUT_S)
    preload()
    skip_syncs()
    if what == "loop":
        begin_loop(folder)
    chance = random.Random(seed)
    found = [kill_once(folder, what, attempt, chance) for attempt in range(kills)]
    (folder / "kills.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
