"""Kill a protected run wherever it touches the disk or computes, and compare what it computed with what it paid for.

Run as a program: `python -m tests.support.ledger_kill_harness FOLDER [SEED]`. Every run is a forked child of this one
warm process. How often a step was computed is counted in memory that the child shares with this process, so that a kill
loses none. Prints one line for each state that fails and a closing count; exits with 1 if any failed.

Without a seed the states are enumerated: of the folder and of the steps that were computed, and within every write;
also in a release run that Ctrl-C stops after its first step, which returns what it reserved, and that is resumed. Then
an engine that pays after the step, and a clean stop that returns a computed step, must be noticed. With a seed they are
100 moments of a clock.
"""

import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from opusim import training
from opusim.accounting.ledger import Ledger, read_ledger
from opusim.training.engine.callbacks import Callback
from opusim.training.engine.loop import Engine
from opusim.training.engine.steps import STEPS_PAID_AT_ONCE
from opusim.training.errors import RunInterrupted
from opusim.training.feedback.trainer import FeedbackTrainer
from opusim.training.runs.folder import RunFolder
from tests.support.killing import Killer, Moment, read_moments, skip_syncs, start_child, status_of
from tests.support.shared_runs import config_of

BLOCK = 2  # steps to a line of the ledger, so that a short run has several lines
STEPS, EVERY = 3, 2
LONG = 60  # epochs of a run that a clock kills
MODES = ("experiment", "release")


def config(mode: str, epochs: int = 1) -> dict[str, Any]:
    options = {"mode": mode, "epochs": epochs, "checkpoint": {"every_steps": EVERY, "keep": 1}, "own": True}
    record = {"protection": {"kind": "record", "noise_multiplier": 1.0}}
    sampler = {"scheme": "poisson", "batch_size": 8}
    return config_of({"kind": "dfa"}, **options, **record, sampler=sampler)


def data() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(0).normal(size=(8 * STEPS, 4)), np.arange(8 * STEPS) % 3


class PressesCtrlC(Callback):
    """A watcher who presses Ctrl-C after the first step."""

    def on_step(self, *, step: int) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)


def train(folder: Path, mode: str, epochs: int = 1, watcher: PressesCtrlC | None = None) -> None:
    """Start the run, or resume it."""
    resume = RunFolder(folder).started
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    settings = None if resume else config(mode, epochs)
    training.train(settings, data=data(), model=model, folder=folder, resume=resume, watcher=watcher)


def train_with_a_stop(folder: Path, mode: str) -> None:
    """Start the run, stop it cleanly after its first step, and resume it."""
    try:
        train(folder, mode, watcher=PressesCtrlC())
    except RunInterrupted:
        train(folder, mode)


class Counts:
    """How often each step was computed: memory shared with forked children."""

    def __init__(self, steps: int) -> None:
        self._shared = mmap.mmap(-1, steps)

    @property
    def total(self) -> int:
        """Steps that were computed, repetitions counted."""
        return sum(self._shared[:])

    def each(self) -> list[int]:
        """How often each step was computed, in the order of the steps."""
        return list(self._shared[:])

    def clear(self) -> None:
        """Begin at zero."""
        self._shared[:] = bytes(len(self._shared))

    def watch(self) -> None:
        """Count from here on; a step counts as soon as it begins."""
        step = FeedbackTrainer.step

        def counted(trainer: FeedbackTrainer, *arguments: Any, **options: Any) -> Any:
            self._shared[options["step"]] += 1
            return step(trainer, *arguments, **options)

        FeedbackTrainer.step = counted  # type: ignore[method-assign]

    def unpaid(self, folder: Path, mode: str) -> list[str]:
        """Steps that were computed more often than they were paid for (in experiment mode: without being paid)."""
        paid = [0] * len(self._shared)
        if (folder / "ledger.jsonl").exists() and (folder / "ledger.jsonl").stat().st_size:
            for payment in read_payments(folder):
                for step in range(payment.first_step, payment.first_step + payment.steps):
                    paid[step] += 1
        computed = [min(count, 1) if mode == "experiment" else count for count in self._shared[:]]
        return [
            f"step {step} computed {c} times, paid for {p} times"
            for step, (c, p) in enumerate(zip(computed, paid, strict=True))
            if c > p
        ]


def read_payments(folder: Path) -> list[Any]:
    """What a reader finds in the ledger as the kill left it; a first line that was cut pays for nothing."""
    content = (folder / "ledger.jsonl").read_bytes()
    return [] if b"\n" not in content else list(read_ledger(folder).payments)


def killer_of(folder: Path, counts: Counts, moment: Moment | None = None) -> Killer:
    """Return a killer to which a step is a touch too, and the counts of computed steps are part of a state."""
    killer = Killer(folder, moment, memory=counts.each)
    FeedbackTrainer.step = killer.watched("step", FeedbackTrainer.step)  # type: ignore[method-assign]
    return killer


def enumerated(
    root: Path,
    mode: str,
    counts: Counts,
    *,
    only: tuple[str, ...] = (),
    work: Callable[[Path, str], None] = train,
) -> Iterator[tuple[str, str]]:
    """Kill a run at every state, or at calls of `only` some kinds, and say what went wrong there ("" for nothing)."""

    def unbroken() -> None:
        killer = killer_of(root / "unbroken", counts)
        work(root / "unbroken", mode)
        killer.save(root / "states.json")

    root.mkdir()
    counts.clear()
    if status_of(unbroken) != 0:
        yield "unbroken", "the unbroken run failed"
        return
    steps = sum(payment.steps for payment in read_payments(root / "unbroken"))
    yield "unbroken", "" if steps == counts.total == STEPS else f"{steps} paid for, {counts.total} computed"
    for kind, moment in read_moments(root / "states.json")[1]:
        if only and kind not in only:
            continue
        name = f"{moment[0]}-{moment[1]}"
        folder = root / name
        counts.clear()

        def killed(folder: Path = folder, moment: Moment = moment) -> None:
            killer_of(folder, counts, moment)
            work(folder, mode)

        if not os.WIFSIGNALED(status_of(killed)):
            yield f"{root.name}, {name}", "the child was not killed"
            continue
        yield f"{root.name}, {name}", problems(folder, mode, counts)


def problems(folder: Path, mode: str, counts: Counts, epochs: int = 1) -> str:
    """What is wrong with a killed run: unpaid steps, before or after it was resumed, or that it cannot be resumed."""
    found = counts.unpaid(folder, mode)
    if not RunFolder(folder).finished:
        try:
            train(folder, mode, epochs)  # in this process: a fork costs more than the run
            found += counts.unpaid(folder, mode)
        except Exception as error:
            found.append(f"resuming failed: {error!r}")
    if not found and mode == "experiment":
        steps = sum(payment.steps for payment in read_payments(folder))
        found += [f"{steps} steps paid for, not {STEPS * epochs}"] if steps != STEPS * epochs else []
    return "; ".join(found)


def at_random(
    root: Path, mode: str, counts: Counts, kills: int, moments: random.Random
) -> Iterator[tuple[str, str]]:
    """Kills by a clock, each of the run that the one before left, or of a new one where that is done."""
    started = time.perf_counter()
    status_of(lambda: train(root / "unbroken", mode, LONG))
    duration = time.perf_counter() - started
    folder = root / "0"
    for number in range(kills):
        if number == 0 or RunFolder(folder).finished:
            folder = root / str(number)
            counts.clear()
        child = start_child(lambda folder=folder: train(folder, mode, LONG))
        time.sleep(moments.uniform(0, duration))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        yield f"{mode}, kill {number}", "; ".join(counts.unpaid(folder, mode))
    yield f"{mode}, at last", problems(folder, mode, counts, LONG)


def pay_after_the_step() -> None:
    """The fault that this program is there to find."""
    advance = Engine._advance

    def compute_then_pay(engine: Engine) -> None:
        step = engine.step
        advance(engine)
        engine.steps.ledger.pay(step, *engine.mechanisms, until=engine.total_steps)

    Engine._pay, Engine._advance = lambda engine: None, compute_then_pay  # type: ignore[method-assign]


def return_one_step_too_many() -> None:
    """Another fault: the step that was computed last is returned with those that were not."""
    return_unused = Ledger.return_unused

    def too_much(ledger: Ledger) -> None:
        start, end, held = ledger._credit
        ledger._credit = (start - (start < end), end, held)
        return_unused(ledger)

    Ledger.return_unused = too_much  # type: ignore[method-assign]


def main() -> int:
    root, seed = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    torch.set_num_threads(1)
    if seed is None:
        skip_syncs()
    STEPS_PAID_AT_ONCE.update(dict.fromkeys(MODES, BLOCK))
    train(root / "warm", "release")  # imports and compiles in the parent, once for all children
    counts = Counts(STEPS * LONG)
    counts.watch()
    attempts = failures = 0
    stopped = enumerated(root / "stopped", "release", counts, work=train_with_a_stop)
    for mode in (*MODES, "stopped") if seed is None else MODES:
        if seed is None:
            results = stopped if mode == "stopped" else enumerated(root / mode, mode, counts)
        else:
            results = at_random(root / mode, mode, counts, 50, random.Random(f"{seed} {mode}"))
        for name, problem in results:
            attempts += 1
            failures += bool(problem)
            if problem:
                print(f"{name}: {problem}")
    if seed is None:
        return_one_step_too_many()
        if not next(enumerated(root / "generous", "release", counts, work=train_with_a_stop))[1]:
            print("a clean stop that returns a computed step was not noticed")
            failures += 1
        pay_after_the_step()
        if not any(problem for _, problem in enumerated(root / "planted", "release", counts, only=("step",))):
            print("an engine that pays after the step was not noticed")
            failures += 1
    print(f"{attempts} moments, {failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
