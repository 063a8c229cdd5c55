"""Kills a protected run wherever it touches the disk or computes, and compares what it computed with what it paid for.

Run as a program: `python ledger_kill_harness.py FOLDER [SEED]`. Every run is a forked child of
this one warm process. How often a step was computed is counted in memory that the child shares with this process, so
that a kill loses none. Prints one line per moment that fails and a closing count; exits with 1 if any failed.

Without a seed the moments are enumerated: before every call that touches the disk, within every write, before and after
every step; also in a release run that Ctrl-C stops after its first step, which returns what it reserved, and that is
resumed. Then an engine that pays after the step, and a clean stop that returns a computed step, must be noticed. With a
seed they are 100 moments of a clock.
"""

from __future__ import annotations

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

import training
from accounting.ledger.ledger import Ledger, read_ledger
from training.engine import session
from training.engine.loop import Engine
from training.errors import RunInterrupted
from training.feedback.trainer import FeedbackTrainer
from training.runs.folder import RunFolder

TOUCHES = ("write", "fsync", "replace", "ftruncate")
BLOCK = 2  # steps to a line of the ledger, so that a short run has several lines
STEPS, EVERY = 3, 2
LONG = 60  # epochs of a run that a clock kills
MODES = ("experiment", "release")


def config(mode: str, epochs: int = 1) -> dict[str, Any]:
    return {
        "mode": mode,
        "epochs": epochs,
        "threads": 1,
        "data": {"n_classes": 3, "validation_fraction": 0.0},
        "sampler": {"scheme": "poisson", "batch_size": 8},
        "checkpoint": {"every_steps": EVERY, "keep": 1},
        "trainer": {"kind": "dfa"},
        "protection": {"kind": "record", "noise_multiplier": 1.0},
    }


def data() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(0).normal(size=(8 * STEPS, 4)), np.arange(8 * STEPS) % 3


class PressesCtrlC:
    """A watcher who presses Ctrl-C after the first step."""

    def on_start(self, *, step: int, total_steps: int) -> None:
        pass

    def on_step(self, *, step: int) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    def on_epoch(self, record: dict[str, Any]) -> None:
        pass


def train(folder: Path, mode: str, epochs: int = 1, watcher: PressesCtrlC | None = None) -> None:
    """Begin the run, or go on with it."""
    resume = RunFolder(folder).started
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    settings = None if resume else config(mode, epochs)
    training.train(settings, data=data(), model=model, folder=folder, resume=resume, watcher=watcher)


def train_with_a_stop(folder: Path, mode: str) -> None:
    """Begin the run, stop it cleanly after its first step, and go on with it."""
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

    def clear(self) -> None:
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


class Killer:
    """Counts the calls that touch the disk, and the steps, and kills this process at one of them."""

    def __init__(self, target: int | None, when: str) -> None:
        self.count, self.kinds = 0, ""
        self._target, self._when = target, when
        for name in TOUCHES:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        FeedbackTrainer.step = self._wrapped("step", FeedbackTrainer.step)  # type: ignore[method-assign]

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            mine = self.count == self._target
            self.count += 1
            self.kinds += "w" if name == "write" else "s" if name == "step" else "."
            if mine and self._when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            if mine and self._when == "within":
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **options)
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call


def child_of(work: Callable[[], None]) -> int:
    """The process number of a forked child that does some work."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def status_of(work: Callable[[], None]) -> int:
    return os.waitpid(child_of(work), 0)[1]


def enumerated(
    root: Path,
    mode: str,
    counts: Counts,
    *,
    only: str = "w.s",
    work: Callable[[Path, str], None] = train,
) -> Iterator[tuple[str, str]]:
    """Every moment of a run, and what went wrong there ("" for nothing)."""

    def unbroken() -> None:
        killer = Killer(None, "")
        work(root / "unbroken", mode)
        (root / "touches").write_text(killer.kinds)

    root.mkdir()
    counts.clear()
    if status_of(unbroken) != 0:
        yield "unbroken", "the unbroken run failed"
        return
    steps = sum(payment.steps for payment in read_payments(root / "unbroken"))
    yield "unbroken", "" if steps == counts.total == STEPS else f"{steps} paid for, {counts.total} computed"
    kinds = (root / "touches").read_text()
    moments = [(n, "before") for n in range(len(kinds))] + [(len(kinds) - 1, "after")]
    moments += [(n, "within") for n, kind in enumerate(kinds) if kind == "w"]
    moments += [(n, "after") for n, kind in enumerate(kinds) if kind == "s"]
    for target, when in moments:
        if kinds[target] not in only:
            continue
        folder = root / f"{target}-{when}"
        counts.clear()

        def killed(folder: Path = folder, target: int = target, when: str = when) -> None:
            Killer(target, when)
            work(folder, mode)

        name = f"{root.name}, moment {target} ({when})"
        if not os.WIFSIGNALED(status_of(killed)):
            yield name, "the child was not killed"
            continue
        yield name, problems(folder, mode, counts)


def problems(folder: Path, mode: str, counts: Counts, epochs: int = 1) -> str:
    """What is wrong with a killed run: unpaid steps, before or after it went on, or that it does not go on."""
    found = counts.unpaid(folder, mode)
    if not RunFolder(folder).finished:
        status = status_of(lambda: train(folder, mode, epochs))
        found += [f"going on failed with status {status}"] if status else counts.unpaid(folder, mode)
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
        child = child_of(lambda folder=folder: train(folder, mode, LONG))
        time.sleep(moments.uniform(0, duration))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        yield f"{mode}, kill {number}", "; ".join(counts.unpaid(folder, mode))
    yield f"{mode}, at last", problems(folder, mode, counts, LONG)


def pay_after_the_step() -> None:
    """The fault that this program is there to find."""
    advance = Engine._advance
    later: list[tuple[Ledger, Any]] = []

    def remember(engine: Engine, ledger: Ledger, mechanisms: Any) -> None:
        later.append((ledger, mechanisms))

    def compute_then_pay(engine: Engine) -> None:
        step = engine._step
        advance(engine)
        ledger, mechanisms = later.pop()
        ledger.pay(step, *mechanisms, until=engine.total_steps)

    Engine._pay, Engine._advance = remember, compute_then_pay  # type: ignore[method-assign]


def return_one_step_too_many() -> None:
    """Another fault: the step that was computed last is returned with those that were not."""
    give_back = Ledger.give_back

    def too_much(ledger: Ledger) -> None:
        start, end, held = ledger._credit
        ledger._credit = (start - (start < end), end, held)
        give_back(ledger)

    Ledger.give_back = too_much  # type: ignore[method-assign]


def main() -> int:
    root, seed = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    torch.set_num_threads(1)
    session._STEPS_PAID_AT_ONCE = dict.fromkeys(MODES, BLOCK)
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
        if not any(problem for _, problem in enumerated(root / "planted", "release", counts, only="s")):
            print("an engine that pays after the step was not noticed")
            failures += 1
    print(f"{attempts} moments, {failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
