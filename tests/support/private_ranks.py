"""Private loops of one process and of several: `python -m tests.support.private_ranks FOLDER NAME ...`.

NAME is a loop of two processes, NAME=K one of K processes, and NAME=K+J one that is saved in K processes and resumed in
J. What process R of a loop found is written to FOLDER/NAME.R.pt, the records that it was handed in each step to
FOLDER/NAME.R.steps (see `Numbered`), and what went wrong to FOLDER/NAME.R.error.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import opusim
from opusim.accounting.ledger import Ledger
from opusim.training.engine.steps import PaidSteps
from tests.support.killing import skip_syncs
from tests.support.private_loops import parts, private_loop, records
from tests.support.ranks import preload, run_named
from tests.support.shared_runs import both_draw, own_divisor

N_RECORDS, NOISE = 60, 50.0
"""Number of records, and a noise multiplier at which a step is noise, up to some millionths of its variance."""
EPOCHS = 2
Options = dict[str, Any]


def wide() -> nn.Module:
    """A network whose many parameters show the variance of the noise."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 150), nn.Tanh(), nn.Linear(150, 100), nn.Tanh(), nn.Linear(100, 3))


def differing() -> nn.Module:
    """A network that starts from other parameters on each process."""
    torch.manual_seed(int(os.environ["RANK"]))
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def with_feedback() -> nn.Module:
    """A network that learns through one noisy device, whatever the number of processes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    model = opusim.FeedbackAlignment(net, ["1", "3"])
    shape = model.shape(torch.zeros(2, 8))._asdict()
    model.noisy_device = opusim.open_shared_device("gaussian", **shape, seed=4, timeout_s=60)
    return model


def device_of_one() -> nn.Module:
    """A network whose device was opened before the processes joined."""
    group, dist.group.WORLD = dist.group.WORLD, None
    model = with_feedback()
    dist.group.WORLD = group
    return model


def in_data_parallel() -> nn.Module:
    return nn.parallel.DistributedDataParallel(parts()[0])


def run_loop(private: opusim.PrivateTraining, until: int) -> None:
    """Train until a step."""
    model, optimizer, criterion, loader = private
    while private.step < until and private.stopped is None:
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            if private.step == until:
                break


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One loop: its module, its records, its arguments, and what a process does other than the usual."""

    model: Callable[[], nn.Module] | None = None
    count: int = 30
    batch_size: int = 3
    options: Options = field(default_factory=dict)
    epochs: int = EPOCHS
    prepare: Callable[[int], None] | None = None
    spoil: Callable[[int, Options, DataLoader[Any]], DataLoader[Any]] | None = None
    train: Callable[[opusim.PrivateTraining, int], None] = run_loop


def another_seed(rank: int, options: Options, loader: DataLoader[Any]) -> DataLoader[Any]:
    options["seed"] = rank
    return loader


def own_shard(rank: int, options: Options, loader: DataLoader[Any]) -> DataLoader[Any]:
    return DataLoader(Subset(loader.dataset, range(15 * rank, 15 * rank + 15)), batch_size=3)


def failing_collate(rank: int, options: Options, loader: DataLoader[Any]) -> DataLoader[Any]:
    seen: list[int] = []

    def collate(rows: list[Any]) -> Any:
        seen.append(len(rows))
        if rank and len(seen) > 69:  # the probes before the first step come first
            raise KeyError("a damaged record")
        return torch.utils.data.default_collate(rows)

    return DataLoader(loader.dataset, batch_size=3, collate_fn=collate)


def failing_ledger(rank: int) -> None:
    real = Ledger.pay

    def pay(self: Ledger, step: int, *mechanisms: Any, **options: Any) -> None:
        if step == 4:
            raise OSError(28, "No space left on device")
        real(self, step, *mechanisms, **options)

    Ledger.pay = pay  # type: ignore[method-assign]


def leave_early(private: opusim.PrivateTraining, until: int) -> None:
    """The second process takes fewer batches of the first epoch, and begins the next."""
    run_loop(private, 4 if private.data_loader._steps.ranks.rank else 6)
    run_loop(private, until)


def backward_twice(private: opusim.PrivateTraining, until: int) -> None:
    """The second process calls backward twice."""
    model, _, criterion, loader = private
    for number, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        loss.backward(retain_graph=True)
        if number == 3 and private.data_loader._steps.ranks.rank:
            loss.backward()
        private.optimizer.step()


def wrapped(private: opusim.PrivateTraining, until: int) -> None:
    """The loop wraps the private module; the wrapper sees no gradient that it could average."""
    outer = nn.parallel.DistributedDataParallel(private.module)
    while private.step < until:
        for x, y in private.data_loader:
            private.optimizer.zero_grad()
            private.criterion(outer(x), y).backward()
            private.optimizer.step()


def another_rate(private: opusim.PrivateTraining, until: int) -> None:
    """The second process has a scheduler of its own."""
    private.optimizer.param_groups[0]["lr"] = 0.5 / (1 + private.data_loader._steps.ranks.rank)
    run_loop(private, until)


def end_by_itself(private: opusim.PrivateTraining, until: int) -> None:
    """The second process fails in code of its own."""
    run_loop(private, 4)
    if private.data_loader._steps.ranks.rank:
        raise ZeroDivisionError("of the loop")
    run_loop(private, until)


def own_batches(rank: int) -> None:
    """Each process draws a batch of the stated size from its half of the records, accounted as one from all."""

    def part(self: PaidSteps, step: int, draw: Callable[[int], Tensor]) -> tuple[list[int], int]:
        drawn = {*draw(step).tolist(), *draw(step).tolist()}
        return sorted(n for n in drawn if n % 2 == rank), len(drawn)

    PaidSteps.part = part  # type: ignore[method-assign]


NOISY: Options = {"sample_rate": 1.0, "noise_multiplier": NOISE}
RELEASE: Options = {"mode": "release", "seed": None}

LOOPS: Mapping[str, Loop] = {
    "plain": Loop(),
    "adaptive": Loop(options={"clipping": "adaptive"}),
    "in parts": Loop(batch_size=12, options={"max_physical_batch_size": 2}),
    "fixed": Loop(batch_size=8, options={"fixed_batches": True, "max_physical_batch_size": 4}),
    "users": Loop(
        batch_size=4,
        options={"user_ids": [*range(10)] * 3, "records_per_user": 2, "max_physical_batch_size": 5},
    ),
    "other starts": Loop(model=differing),
    "feedback": Loop(model=with_feedback),
    "feedback in parts": Loop(
        model=with_feedback, batch_size=8, options={"max_physical_batch_size": 2}, epochs=1
    ),
    "budget": Loop(options={"target_epsilon": 4.0}, epochs=100),
    "release": Loop(options=RELEASE),
    "noise": Loop(model=wide, count=N_RECORDS, batch_size=N_RECORDS, options=NOISY, epochs=1),
    "noise in release": Loop(
        model=wide, count=N_RECORDS, batch_size=N_RECORDS, options=NOISY | RELEASE, epochs=1
    ),
    "batches": Loop(count=N_RECORDS, batch_size=6, options=RELEASE, epochs=10),
    "wrapped": Loop(train=wrapped),
    "device of one": Loop(model=device_of_one),
    "seed": Loop(spoil=another_seed),
    "shards": Loop(spoil=own_shard),
    "data parallel": Loop(model=in_data_parallel),
    "damaged record": Loop(spoil=failing_collate),
    "full disk": Loop(prepare=failing_ledger),
    "another loop": Loop(train=leave_early),
    "backward twice": Loop(train=backward_twice),
    "another rate": Loop(train=another_rate),
    "own error": Loop(train=end_by_itself),
}
FAULTS: Mapping[str, Loop] = {
    "noise of both": Loop(**vars(LOOPS["noise"]) | {"prepare": both_draw}),
    "noise over own divisor": Loop(**vars(LOOPS["noise"]) | {"prepare": own_divisor}),
    "own batches": Loop(**vars(LOOPS["batches"]) | {"prepare": own_batches}),
}


class Numbered:
    """A collate function that notes the numbers of the records that it is given."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._numbers = {float(x[0]): n for n, (x, _) in enumerate(dataset)}
        self.last: list[int] = []

    def __call__(self, rows: list[Any]) -> Any:
        self.last = [self._numbers[float(x[0])] for x, _ in rows]
        return torch.utils.data.default_collate(rows)


def opened(loop: Loop, folder: Path, rank: int, *, resume: bool) -> opusim.PrivateTraining:
    """Call `make_private` as one process of a loop does."""
    options = {**loop.options, "resume": resume}
    given = parts(None if loop.model is None else loop.model(), count=loop.count, batch_size=loop.batch_size)
    loader = given[3]
    if loop.spoil is not None:
        loader = loop.spoil(rank, options, loader)
    return private_loop(folder, (*given[:3], loader), **options)


def log_steps(private: opusim.PrivateTraining, file: Path) -> None:
    """Write the records of every step to a file when they are handed out, before they are computed."""
    numbered = Numbered(records(len(private.data_loader.dataset)))  # type: ignore[arg-type]
    collate = private.data_loader._collate
    held = collate.keywords if isinstance(collate, partial) else vars(collate)
    key = "collate" if isinstance(collate, partial) else "_collate"
    user, hand_out = held[key], private.data_loader._hand_out
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    seen: list[int] = []  # users are collated one by one

    def collated(rows: list[Any]) -> Any:
        numbered(rows)
        seen.extend(numbered.last)
        return user(rows)

    def handed(*, until: int) -> bool:
        taken, step = hand_out(until=until), private.step - 1
        if taken:
            os.write(descriptor, (json.dumps([step, seen]) + "\n").encode())
        seen.clear()
        return taken

    held[key] = collated
    private.data_loader._hand_out = handed  # type: ignore[method-assign]


def found(private: opusim.PrivateTraining, start: Tensor) -> dict[str, Any]:
    """What a process can say at the end."""
    return {
        "start": start, "end": vector(private.module), "step": private.step, "stopped": private.stopped,
        "epsilon": private.epsilon, "statement": json.dumps(private.statement().to_json(), sort_keys=True),
    }  # fmt: skip


def vector(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in module.parameters()])


def train(folder: Path, name: str, rank: int, *, resume: bool = False, half: bool = False) -> None:
    """Do the work of one process of a loop."""
    key = name.partition("=")[0]
    loop = LOOPS.get(key) or FAULTS[key]
    if loop.prepare is not None:
        loop.prepare(rank)
    private = opened(loop, folder / name, rank, resume=resume)
    log_steps(private, folder / f"{name}.{rank}.steps")
    start, until = vector(private.module), loop.epochs * len(private.data_loader)
    if half:
        run_loop(private, until // 2 + 1)
        if rank == 0:  # as is usual; the others may call it too
            private.save()
        run_loop(private, until // 2 + 2)
        private.close()
        return
    loop.train(private, until)
    torch.save(found(private, start), folder / f"{name}.{rank}.pt")
    private.close()


def warm_up(folder: Path) -> None:
    """Do once what each process would otherwise do a first time, such as to import what an epsilon needs."""
    with opened(Loop(), folder, 0, resume=False) as private:
        run_loop(private, 2)
        private.statement()


def main(arguments: list[str]) -> None:
    """Do the loops named."""
    preload()
    skip_syncs()
    folder = Path(arguments[0])
    warm_up(folder / "warm-up")
    run_named(folder, arguments[1:], train, halved={"half": True})


if __name__ == "__main__":
    main(sys.argv[1:])
