"""Data parallel training in which the processes exchange scalars alone.

Every process holds the whole model and sees its share of a batch: the records whose number is congruent to its rank.
Poisson sampling takes each record independently, so processes may draw their shares with generators of their own
(release mode) or all from one (experiment mode). Partial sums are gathered and added in the order of ranks, and the
first process alone draws the noise and tells the noised scalar, so that all processes log the same step to the bit.
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
    """The processes of a run; one of them by default.

    Attributes:
        rank: This process, from 0.
        world: How many there are.
    """

    def __init__(self) -> None:
        self.rank, self.world = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def share(self, records: Tensor) -> Tensor:
        """Places in a batch of the records that this process looks at, shape (share,).

        Args:
            records: Numbers of the batch's records in the training set, shape (batch,).
        """
        return torch.nonzero(records % self.world == self.rank).reshape(-1)

    def totals(self, values: Sequence[float]) -> list[float]:
        """Sums over all processes, the same to the bit on each."""
        if self.world == 1:
            return list(values)
        mine = torch.tensor(values, dtype=torch.float64, device=_place())
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        return [math.fsum(column) for column in zip(*(part.tolist() for part in parts), strict=True)]

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Give all processes the first one's parameters, once, before the first step."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def require_equal(self, value: float, what: str) -> None:
        """Refuse processes that do not stand at the same place.

        Raises:
            RunFolderError: They do not.
        """
        if self.totals([value])[0] != self.world * value:
            raise RunFolderError(
                f"{what} = {value:g} here, but another of the {self.world} processes has another; go on with run "
                "folders of one run, and delete newer checkpoints that not all of them have"
            )

    def broadcast(self, values: Sequence[float]) -> list[float]:
        """What the first process has, on all."""
        if self.world == 1:
            return list(values)
        told = torch.tensor(values, dtype=torch.float64, device=_place())
        dist.broadcast(told, src=0)
        return [float(value) for value in told.tolist()]


def init_process_group() -> None:
    """Join the processes that torchrun launched together, unless that is done or there is but one."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or not dist.is_available() or dist.is_initialized():
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def _place() -> torch.device:
    """Where the backend exchanges tensors."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
