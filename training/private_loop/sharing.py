"""Share the steps of a private loop between processes, which make the same calls in the same order.

The first process draws each batch over the whole data set and pays for it; every process takes its part of the batch:
neighbours, so that all parts in the order of ranks are the batch. Before each of these acts the processes compare what
they are about to do, so that loops that differ end in an error instead of in mixed-up exchanges.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from opusim.devices.shared import SharedDevice
from opusim.processes.ranks import Ranks
from training.feedback.points import FeedbackAlignment
from training.networks.record_independence import preserved_generators

Result = TypeVar("Result")
_PROBES = 5
"""Records by which the data sets of the processes are compared."""
_DRIFT = 1e-3
"""By how much of its norm a parameter may differ between processes at the start of an epoch: rounding is far below."""


class Act(IntEnum):
    """What all processes do together."""

    OPEN = 0
    BEGIN_EPOCH = 1
    DRAW = 2
    PAY = 3
    WRITE = 4

    @property
    def words(self) -> str:
        """What the act is, for messages."""
        return {
            Act.OPEN: "opens the loop",
            Act.BEGIN_EPOCH: "iterates over the loader",
            Act.DRAW: "asks for the batch",
            Act.PAY: "receives the batch",
            Act.WRITE: "calls backward on the batch",
        }[self]


class SharedSteps:
    """The processes of a private loop.

    Args:
        ranks: The processes; None for one.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks.one()

    @property
    def several(self) -> bool:
        """Whether there are several processes."""
        return self.ranks.world > 1

    def handing_errors(self) -> AbstractContextManager[None]:
        """See Ranks.handing_errors."""
        return self.ranks.handing_errors()

    def agree(self, act: Act, step: int, number: int = 0) -> list[int]:
        """Return a number of each process, in the order of ranks, once all of them do the same.

        Args:
            act: What this process is about to do.
            step: With which step.
            number: What the others receive of this process.

        Raises:
            RuntimeError: The processes do different things; on each of them.
        """
        found = self.ranks.rows([act, step, number])
        ours, others = found[self.ranks.rank][:2], [row[:2] for row in found]
        for rank, theirs in enumerate(others):
            if theirs != ours:
                raise RuntimeError(
                    f"process {self.ranks.rank} {Act(act).words} of step {step}, and process {rank} "
                    f"{Act(theirs[0]).words} of step {theirs[1]}; run the same loop on every process, which leaves an "
                    "epoch at the same batch"
                )
        return [row[2] for row in found]

    def on_first(self, act: Act, step: int, work: Callable[[], Result]) -> Result:
        """Return on every process what the first one computes for an act of all."""
        if not self.several:
            return work()
        self.agree(act, step)
        return self.ranks.on_first(work)

    def part(self, step: int, draw: Callable[[int], Tensor]) -> list[int]:
        """Return this process's part of the batch that the first one draws.

        Args:
            step: The number of the step.
            draw: Draws its batch over the whole data set; called on the first process.
        """
        indices: list[int] = self.on_first(Act.DRAW, step, lambda: draw(step).tolist())
        return indices[self.ranks.part(len(indices))]

    def require_same_call(self, given: Mapping[str, Any]) -> None:
        """Refuse processes that call `make_private` with other arguments than the first.

        Args:
            given: Numbers and texts by name, or descriptions of an argument.

        Raises:
            ValueError: One does; on every process.
        """
        if not self.several:
            return
        rank, world = self.ranks.rank, self.ranks.world
        for name, theirs in self.ranks.differing(given).items():
            ours = given[name]
            if isinstance(ours, tuple) or isinstance(theirs, tuple):
                wrong = f"{name}: process {rank} of {world} was given another one than process 0"
            else:
                wrong = (
                    f"{name} = {ours!r}: process {rank} of {world} was given this, and process 0 {theirs!r}"
                )
            raise ValueError(f"{wrong}; make the same call on every process, with the whole data set")
        self.ranks.meet()

    def require_devices_of_all(self, module: nn.Module) -> None:
        """Refuse shared devices that these processes cannot read together.

        Raises:
            ValueError: Feedback points read a shared device of other processes, or several, whose calls could not be
                kept in order.
        """
        if not self.several:
            return
        devices = [
            points.noisy_device
            for points in feedback_of(module)
            if isinstance(points.noisy_device, SharedDevice)
        ]
        if len(devices) > 1:
            raise ValueError(
                "module has several FeedbackAlignment with shared devices, whose readings several processes cannot "
                "keep in order; take one FeedbackAlignment, or train in one process"
            )
        if devices and devices[0].world != self.ranks.world:
            raise ValueError(
                f"device {devices[0].name!r} is shared by {devices[0].world} processes, and {self.ranks.world} train "
                "together; call init_process_group before open_shared_device"
            )

    def share_state(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Give every process the parameters, the buffers and the optimizer's state of the first."""
        if not self.several:
            return
        self.ranks.broadcast_tensors([*module.parameters(), *module.buffers()])
        state = self.ranks.on_first(optimizer.state_dict)
        if not self.ranks.is_first:
            optimizer.load_state_dict(state)

    def begin_epoch(self, step: int, module: nn.Module) -> None:
        """Refuse to train with other processes, or with other parameters, than before.

        Raises:
            RuntimeError: The process group, or a parameter, is not that of the others.
        """
        if Ranks().world != self.ranks.world:
            raise RuntimeError(
                f"{Ranks().world} processes train together, and make_private was called in a group of "
                f"{self.ranks.world}; call init_process_group before make_private, and keep the group"
            )
        if not self.several:
            return
        self.agree(Act.BEGIN_EPOCH, step)
        named = list(module.named_parameters())
        norms = [float(p.detach().norm()) for _, p in named]
        for (name, _), ours, theirs in zip(named, norms, self.ranks.broadcast(norms), strict=True):
            if abs(ours - theirs) > _DRIFT * abs(theirs):
                raise RuntimeError(
                    f"parameter {name!r} has norm {ours:g} on process {self.ranks.rank} and {theirs:g} on process 0; "
                    "change parameters and learning rates on every process alike"
                )
        self.ranks.meet()

    def read_nothing(self, module: nn.Module, times: int) -> None:
        """Take part in readings of a shared device that other processes need and this one does not."""
        for points in feedback_of(module):
            for _ in range(times if isinstance(points.noisy_device, SharedDevice) else 0):
                points.read_nothing()


def feedback_of(module: nn.Module) -> list[FeedbackAlignment]:
    """Return the feedback points in a module or on it."""
    found: dict[int, FeedbackAlignment] = {}
    for inner in module.modules():
        owners = [getattr(hook, "__self__", None) for hook in inner._forward_pre_hooks.values()]
        found |= {id(owner): owner for owner in (inner, *owners) if isinstance(owner, FeedbackAlignment)}
    return list(found.values())


def module_facts(module: nn.Module) -> tuple[Any, ...]:
    """Return what the modules of all processes have in common."""
    parameters = [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()
    ]
    return type(module).__qualname__, *parameters, *(name for name, _ in module.named_buffers())


def optimizer_facts(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Return what the optimizers of all processes have in common."""
    groups = [
        (len(group["params"]), *((name, repr(value)) for name, value in group.items() if name != "params"))
        for group in optimizer.param_groups
    ]
    return type(optimizer).__qualname__, *groups


def loader_facts(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Return what the loaders of all processes have in common: workers, number of records, and some of these.

    A data set that draws numbers is compared by the number of its records only.
    """
    dataset: Any = loader.dataset
    count = len(dataset)
    places = sorted({place * (count - 1) // (_PROBES - 1) for place in range(_PROBES)})
    with preserved_generators(torch.device("cpu")):
        first, again = (_digest([loader.collate_fn([dataset[n]]) for n in places]) for _ in range(2))
    return count, loader.num_workers, loader.prefetch_factor, first if first == again else ""


def _digest(records: list[Any]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(records):
        if isinstance(leaf, Tensor):
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, str | int | float):
            found.update(repr(leaf).encode())
    return found.hexdigest()
