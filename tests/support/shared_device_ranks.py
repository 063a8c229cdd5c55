"""What two processes see that share one device: `python -m tests.support.shared_device_ranks FOLDER`.

Each scenario forks two processes. What process R found is written to FOLDER/SCENARIO.R.pt; what one process finds that
has the whole batch and the device for itself, to FOLDER/SCENARIO.single.pt.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opusim import FeedbackAlignment, NoisyDevice, open_device, open_shared_device
from opusim.description.schema import load_description
from opusim.devices.registry import SharedDevice, open_described
from opusim.errors import DeviceFault
from opusim.processes.ranks import Ranks
from opusim.randomness.streams import SeededStream
from opusim.training.networks.record_gradients.tape import RecordTape
from opusim.training.protections.record import RecordGradients
from tests.support.ranks import preload, run_ranks

WINDOW: dict[str, Any] = {"n_inputs": 3, "n_outputs": 6, "seed": 4, "noise": {"sigma": 0.5}}
ENCODINGS = ("ternary", "stochastic")
STEPS = 3
PROCESSES = 2
PARTS = {"even": (slice(0, 6), slice(6, 12)), "uneven": (slice(0, 10), slice(10, 12))}
"""Records of a batch of 12 that each process takes."""


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 8, generator=generator), torch.randint(0, 3, (12,), generator=generator)


def new_model(device: NoisyDevice, encoding: str) -> FeedbackAlignment:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    return FeedbackAlignment(net, device=device, encoding=encoding)


def trained(
    model: FeedbackAlignment, wrapped: nn.Module, records: slice, scale: float
) -> tuple[list[Tensor], dict[str, float]]:
    """Return the parameters after some steps on part of each batch, with the loss's sum over records / 12 * scale."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = (tensor[records] for tensor in batch(step))
        optimizer.zero_grad()
        (nn.functional.cross_entropy(wrapped(x), y, reduction="sum") * (scale / 12)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()], {"frames": model.usage.frames}


def train_shared(rank: int) -> dict[str, Any]:
    found = {}
    for encoding in ENCODINGS:
        for name, parts in PARTS.items():
            with open_shared_device("gaussian", **WINDOW) as device:
                model = new_model(device, encoding)
                wrapped = nn.parallel.DistributedDataParallel(model)  # averages, so that each counts double
                found[f"{encoding} {name}"] = trained(model, wrapped, parts[rank], PROCESSES)
    return found


def train_single() -> dict[str, Any]:
    found = {}
    for encoding in ENCODINGS:
        with open_device("gaussian", **WINDOW) as device:
            model = new_model(device, encoding)
            found[encoding] = trained(model, model, slice(0, 12), 1)
    return found


ROWS = torch.randint(-1, 2, (5, 3), generator=torch.Generator().manual_seed(1)).float()
SHARES = ((0, 3, 5), (0, 0, 5), (0, 5, 5), (0, 0, 0))


def read_shared(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"readings": [], "drawn": []}
    with open_shared_device("gaussian", **WINDOW) as device:
        for step, bounds in enumerate(SHARES):
            device.seek(2**63 + step)
            rows = slice(bounds[rank], bounds[rank + 1])
            found["readings"].append(device.project(ROWS[rows]))
            found["drawn"].append(device.draw((rows.stop - rows.start, 6)))
        found["for all"] = device.project_for_all(ROWS)
        found["law"], found["frames"] = device.noise.describe(), device.usage.frames
        found["holds"] = device.held is not None
    return found


def read_single() -> dict[str, Any]:
    found: dict[str, Any] = {"readings": [], "drawn": []}
    with open_device("gaussian", **WINDOW) as device:
        for step, bounds in enumerate(SHARES):
            device.seek(2**63 + step)
            found["readings"].append(device.project(ROWS[: bounds[-1]]))
            found["drawn"].append(device.draw((bounds[-1], 6)))
        found["for all"] = device.project(ROWS)
        found["law"], found["frames"] = device.noise.describe(), device.usage.frames
    return found


def error_of(act: Callable[[], object]) -> tuple[str, str]:
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def broken() -> NoisyDevice:
    """A device that fails at its second projection."""
    options = {key: value for key, value in WINDOW.items() if key != "noise"}
    device = open_described(load_description("gaussian", {"noise": WINDOW["noise"]}), **options)
    real, calls = device._project, []

    def project(x: Tensor) -> Tensor:
        calls.append(len(x))
        if len(calls) == 2:
            raise DeviceFault("device 'gaussian': the laser is off")
        return real(x)

    device._project = project  # type: ignore[method-assign]
    return device


def errors_shared(rank: int) -> dict[str, Any]:
    """Errors of the opening, of the device, of one process's rows, of calls that differ; and what follows them."""
    found = {"opening": error_of(lambda: open_shared_device("gaussian", n_inputs=10**9))}
    device = SharedDevice(broken, Ranks(timeout_s=20))
    fine = device.project(ROWS)
    found["fault"] = error_of(lambda: device.project(ROWS))
    found["after the fault"] = error_of(lambda: device.project(ROWS))
    found["rows of rank 1"] = error_of(lambda: device.project(ROWS * (1 + rank)))
    found["shape of rank 1"] = error_of(lambda: device.draw((2, 6 + rank)))
    device.seek(rank)
    found["steps"] = error_of(lambda: device.project(ROWS))
    device.seek(7)
    found["after all"] = error_of(lambda: device.project(ROWS))
    model = new_model(device, "ternary")
    real, device.held = device.held, None  # nothing holds it any more
    loss = nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1])
    found["in a backward pass"] = error_of(loss.backward)
    device.held = real
    return found | {"shape": tuple(fine.shape)}


def rank_tensors(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(5, 7, generator=generator).t(),
        torch.randn(3, generator=generator, dtype=torch.float64),
        torch.tensor(rank + 1),
        torch.randn(4, generator=generator).bfloat16(),
    ]


def exchange(rank: int) -> dict[str, Any]:
    """Sums, gradients that one process lacks, and errors in a session of three processes."""
    ranks, found = Ranks(timeout_s=20), {}
    ranks.sum(tensors := rank_tensors(rank))
    found["sums"] = tensors
    parameters = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    parameters[rank % 2].grad = torch.full((2,), float(rank))
    gradients = ranks.gradients(parameters)
    ranks.sum(gradients)
    found["gradients"] = gradients
    found["part"] = [ranks.part(count) for count in range(8)]

    def first_computes() -> None:
        with ranks.session():
            ranks.on_first(lambda: 1 / 0)

    def last_fails_early() -> None:
        with ranks.session():
            if rank == 2:
                raise KeyError("a file of process 2")
            ranks.totals([1.0])
            ranks.totals([2.0])

    def last_leaves_early() -> None:
        with ranks.session():
            for _ in range(1 if rank == 2 else 2):
                ranks.totals([1.0])

    def all_end() -> None:
        with ranks.session():
            found["total"] = ranks.totals([0.1])

    for act in (first_computes, last_fails_early, last_leaves_early, all_end):
        found[act.__name__] = error_of(act)
    return found


def tape_gradients(ranks: Ranks, records: slice) -> list[Tensor]:
    """Return private gradients of part of a batch, written from a tape with the noise of its third step."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3))
    writer = RecordGradients(
        clip_norm=0.5, noise_multiplier=0.7, divisor=12.0, noise=SeededStream(9, "test"), ranks=ranks
    )
    tape, (x, y) = RecordTape(net, torch.randn(2, 8)), batch(0)
    with tape.recording(len(x[records])):
        if len(x[records]):
            nn.functional.cross_entropy(net(x[records]), y[records], reduction="sum").backward()
    writer.seek(2)
    writer.set_gradients([tape.contributions])
    return [p.grad for p in net.parameters()]


def write_private(rank: int) -> dict[str, Any]:
    parts = PARTS | {"no records": (slice(0, 12), slice(12, 12)), "nothing": (slice(0, 0), slice(0, 0))}
    return {name: tape_gradients(Ranks(timeout_s=20), records[rank]) for name, records in parts.items()}


def write_single() -> dict[str, Any]:
    return {key: tape_gradients(Ranks.one(), slice(0, n)) for key, n in (("all", 12), ("nothing", 0))}


def timed(act: Callable[[], object]) -> dict[str, Any]:
    start = time.monotonic()
    return {"error": error_of(act), "seconds": time.monotonic() - start}


def hang_shared(rank: int) -> dict[str, Any]:
    """One process stays away for longer than the time-out."""
    dist.barrier()  # one process may have been started much later
    device = open_shared_device("gaussian", timeout_s=2, **WINDOW)
    device.project(ROWS)
    if rank:
        time.sleep(6)
        return {}
    return timed(lambda: device.project(ROWS))


def die_shared(rank: int, dying: int) -> dict[str, Any]:
    """One process dies within a step."""
    device = open_shared_device("gaussian", timeout_s=60, **WINDOW)
    device.project(ROWS)
    if rank == dying:
        os.kill(os.getpid(), 9)
    return timed(lambda: device.project(ROWS))


SCENARIOS: dict[str, Callable[[int], dict[str, Any]]] = {
    "train": train_shared,
    "read": read_shared,
    "errors": errors_shared,
    "exchange": exchange,
    "private": write_private,
    "hang": hang_shared,
    "first dies": lambda rank: die_shared(rank, 0),
    "second dies": lambda rank: die_shared(rank, 1),
}


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0])
    preload()
    torch.save(train_single(), folder / "train.single.pt")  # compiles for the forked processes too
    torch.save(write_single(), folder / "private.single.pt")
    torch.save(read_single(), folder / "read.single.pt")
    for name, scenario in SCENARIOS.items():

        def work(rank: int, name: str = name, scenario: Callable[[int], Any] = scenario) -> None:
            torch.save(scenario(rank), folder / f"{name}.{rank}.pt")
            if "dies" not in name and name != "hang":
                dist.destroy_process_group()

        processes = 3 if name == "exchange" else PROCESSES
        codes = run_ranks(work, processes)
        expected = {"first dies": [-9, 0], "second dies": [0, -9]}.get(name, [0] * processes)
        if codes != expected:
            raise RuntimeError(f"{name}: the processes ended with {codes}")


if __name__ == "__main__":
    main(sys.argv[1:])
