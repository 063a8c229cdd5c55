"""Share the batches of a run between processes that exchange only scalars (data parallelism).

Every process holds the whole model and evaluates its part of a batch: the records whose number is congruent to its
rank. Poisson sampling takes each record independently, so the processes may sample with separate generators (release
mode) or with a common one (experiment mode). Partial sums are gathered and added in the order of ranks. Only the first
process draws noise; it broadcasts the noised scalar, so all processes log the same step to the bit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from training.errors import RunFolderError


class Ranks:
    """The processes of a run; one by default.

    Attributes:
        rank: Number of this process, from 0.
        world: Number of processes.
    """

    def __init__(self) -> None:
        self.rank, self.world = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def share(self, records: Tensor) -> Tensor:
        """Return the positions in a batch of this process's records, shape (share,).

        Args:
            records: Numbers of the batch's records in the training set, shape (batch,).
        """
        return torch.nonzero(records % self.world == self.rank).reshape(-1)

    def totals(self, values: Sequence[float]) -> list[float]:
        """Return sums over all processes, the same to the bit on each."""
        if self.world == 1:
            return list(values)
        mine = torch.tensor(values, dtype=torch.float64, device=_exchange_device())
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        return [math.fsum(column) for column in zip(*(part.tolist() for part in parts), strict=True)]

    def broadcast(self, values: Sequence[float]) -> list[float]:
        """Return the first process's values on all processes."""
        if self.world == 1:
            return list(values)
        received = torch.tensor(values, dtype=torch.float64, device=_exchange_device())
        dist.broadcast(received, src=0)
        return [float(value) for value in received.tolist()]

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first process's tensors to all processes."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def require_equal(self, value: float, what: str) -> None:
        """Refuse processes whose values differ.

        Raises:
            RunFolderError: They differ.
        """
        if self.totals([value])[0] != self.world * value:
            raise RunFolderError(
                f"{what} = {value:g} here, but another of the {self.world} processes has a different number; resume "
                "from folders of one run, and delete newer checkpoints that not all of them have"
            )


def init_process_group() -> None:
    """Join the processes that torchrun launched, unless this was done already or there is only one."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or not dist.is_available() or dist.is_initialized():
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def _exchange_device() -> torch.device:
    """Return the device on which the backend exchanges tensors."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
