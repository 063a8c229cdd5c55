"""Let the processes of a run exchange numbers, tensors, results and errors.

A sum of tensors is computed once, in the order of ranks, and sent to all, so every process holds the same bits,
whatever the backend. Exchanges use a process group of their own, so they cannot mix with those of
DistributedDataParallel. Tensors on the host go by gloo; tensors on cards go by NCCL if the default process group has it
(never tried), else by gloo through the host.

Every exchange begins with `Ranks.meet`, at which a process that failed hands its error to the others. If a process dies
or hangs, the others raise `ProcessLost`: at once, or after the time-out.
"""

from __future__ import annotations

import atexit
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opusim import checks
from opusim.errors import ProcessLost
from opusim.files import OwnProcess
from opusim.processes import environment_number, launched_processes

Result = TypeVar("Result")
TIMEOUT_VARIABLE = "OPUSIM_PROCESS_TIMEOUT_S"
_TIMEOUT_S, _LONGEST_S = 1800.0, 31_557_600.0
_WITH_NCCL = "cpu:gloo,cuda:nccl"
_PRESENT, _FAILED, _LEAVING, _FAILED_AND_LEAVING = range(4)
_groups: dict[float, tuple[Any, Any]] = {}
"""From each time-out to (the default process group, the group made next to it)."""


class Ranks:
    """The processes of a run; one by default.

    All processes must call every method that exchanges something, in the same order.

    Attributes:
        rank: Number of this process, from 0.
        world: Number of processes.

    Args:
        timeout_s: Seconds that a process waits for another one at each exchange, above 0; None takes the environment
            variable OPUSIM_PROCESS_TIMEOUT_S (at most a year), or half an hour.
    """

    def __init__(self, *, timeout_s: float | None = None) -> None:
        wanted = _default_timeout_s() if timeout_s is None else timeout_s
        checks.positive(timeout_s=wanted)
        self._timeout_s = float(wanted)
        self._handed: BaseException | None = None
        """The last error that the other processes also have, or that cannot reach them."""
        self.rank, self.world = 0, 1
        self._process = OwnProcess()
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()

    @classmethod
    def one(cls) -> Self:
        """Return ranks of this process alone, even within a process group."""
        found = cls()
        found.rank, found.world = 0, 1
        return found

    @property
    def is_first(self) -> bool:
        """Whether this is the process of rank 0."""
        return self.rank == 0

    # Who takes which records

    def share(self, records: Tensor) -> Tensor:
        """Return the positions in a batch of the records whose number is congruent to this rank, shape (share,)."""
        return torch.nonzero(records % self.world == self.rank).reshape(-1)

    def part(self, count: int) -> slice:
        """Return this process's slice of a batch; slices differ by one record at most, and the first is the longest."""
        first, end = (-(-count * rank // self.world) for rank in (self.rank, self.rank + 1))
        return slice(first, end)

    # Meeting

    def meet(self, error: BaseException | None = None) -> None:
        """Wait for all processes at the same point, and raise on each the error of the lowest rank that has one.

        The own `error` is handed to the others and not raised here. ProcessLost: another process left, died or did not
        come in time; RuntimeError: this process is a fork of a process that takes part.
        """
        if self.world > 1:
            self._process.require(f"rank {self.rank}")
            self._handed = error
            self._meet(_PRESENT if error is None else _FAILED, error)

    @contextmanager
    def handing_errors(self) -> Iterator[None]:
        """Hand an error raised within the block to the other processes, which raise it in their next exchange.

        An error that an exchange raised is not handed on: the other processes have it.
        """
        try:
            yield
        except Exception as error:
            if error is not self._handed:
                with suppress(ProcessLost):  # the error of the block is the one to report
                    self.meet(error)
            raise

    @contextmanager
    def session(self) -> Iterator[None]:
        """End the work within the block on all processes together; an error of one reaches all."""
        try:
            yield
        except BaseException as error:
            with suppress(ProcessLost):  # the error that ended the work is the one to report
                self._leave(error)
            raise
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        """Meet until all processes leave; processes still at work learn of the error."""
        code = _LEAVING if error is None else _FAILED_AND_LEAVING
        while self.world > 1 and min(self._meet(code, error)) < _LEAVING:
            pass

    def _meet(self, code: int, error: BaseException | None) -> list[int]:
        """Return the codes of all processes; raise another one's error unless this process leaves or has its own."""
        codes = [int(row[0]) for row in self._all([code])]
        failed = [rank for rank, found in enumerate(codes) if found in (_FAILED, _FAILED_AND_LEAVING)]
        if failed:
            with self._exchanging() as group:
                sent: list[Any] = [_portable(error, self.rank) if self.rank == failed[0] else None]
                dist.broadcast_object_list(sent, src=failed[0], group=group)
            if error is None:
                self._handed = sent[0]
                raise sent[0]
        if code == _PRESENT and max(codes) >= _LEAVING:
            self._handed = ProcessLost(
                f"process {self.rank} of {self.world} waits for others, and one of them has ended its work; call the "
                "same functions in the same order on every process"
            )
            raise self._handed
        return codes

    def require_same(self, facts: Mapping[str, Any], kind: type[Exception] = ValueError) -> None:
        """Raise an error on every process if one was started with other facts; its message shows no tuples."""
        wrong: Exception | None = None
        for name, theirs in self.on_first(lambda: dict(facts)).items():
            if facts[name] != theirs and wrong is None:
                ours, who = facts[name], f"process {self.rank} of {self.world} was given"
                shown = f"{name}: {who} another one than process 0"
                if not isinstance(ours, tuple):
                    shown = f"{name} = {ours!r}: {who} this, and process 0 {theirs!r}"
                wrong = kind(f"{shown}; make the same call on every process, with the whole data set")
        self.meet(wrong)
        if wrong is not None:
            raise wrong

    def on_first(self, act: Callable[[], Result]) -> Result:
        """Return on every process what the first one computes (picklable), or raise its error on every process."""
        if self.world == 1:
            return act()
        found: list[Any] = [None]
        if self.is_first:
            try:
                found[0] = act()
            except Exception as error:
                self.meet(error)
                raise
        self.meet()
        with self._exchanging() as group:
            dist.broadcast_object_list(found, src=0, group=group)
        result: Result = found[0]
        return result

    # Numbers

    def rows(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the whole numbers of every process, in the order of ranks; each of magnitude below 2^63."""
        if self.world == 1:
            return [list(numbers)]
        self.meet()
        return self._all(numbers)

    def before(self, number: int) -> int:
        """Return the sum of a whole number over the processes of lower ranks."""
        return sum(found for (found,) in self.rows([number])[: self.rank])

    def totals(self, values: Sequence[float]) -> list[float]:
        """Return sums over all processes, the same to the bit on each."""
        if self.world == 1:
            return list(values)
        self.meet()
        mine = torch.tensor(values, dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        with self._exchanging() as group:
            dist.all_gather(parts, mine, group=group)
        return [math.fsum(column) for column in zip(*(part.tolist() for part in parts), strict=True)]

    def broadcast(self, values: Sequence[float]) -> list[float]:
        """Return the first process's values on all processes."""
        received = torch.tensor(values, dtype=torch.float64)
        self.broadcast_tensors([received])
        return [float(value) for value in received.tolist()]

    # Tensors

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first process's tensors to all processes, bit by bit."""
        wanted = list(tensors)
        if self.world == 1 or not wanted:
            return
        self.meet()
        for alike in _by(_place_of, wanted):
            flat = torch.cat([_bytes_of(tensor) for tensor in alike])
            with self._exchanging() as group:
                dist.broadcast(flat, src=0, group=group)
            if not self.is_first:
                parts = flat.split([tensor.numel() * tensor.element_size() for tensor in alike])
                _copy(alike, [part.clone().view(t.dtype) for t, part in zip(alike, parts, strict=True)])

    def sum_on_first(self, tensors: Iterable[Tensor]) -> None:
        """Add the tensors of all processes, in the order of ranks, into the first one's; the others' stay."""
        wanted = [tensor.detach() for tensor in tensors]
        if self.world == 1 or not wanted:
            return
        self.meet()
        for alike, flat in _by_dtype(wanted):
            with self._exchanging() as group:
                if self.is_first:
                    received = torch.empty_like(flat)
                    for rank in range(1, self.world):
                        dist.recv(received, src=rank, group=group)
                        flat += received
                else:
                    dist.send(flat, dst=0, group=group)
            if self.is_first:
                _copy(alike, flat.split([tensor.numel() for tensor in alike]))

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their sums over all processes, added in the order of ranks, the same to the bit on each.

        Each of the K processes adds one part of the numbers for all, so it sends and receives 2 (K - 1) / K of their
        bytes.
        """
        wanted = [tensor.detach() for tensor in tensors]
        if self.world == 1 or not wanted:
            return
        self.meet()
        for alike, numbers in _by_dtype(wanted):
            part = -(-len(numbers) // self.world)
            flat = nn.functional.pad(numbers, (0, self.world * part - len(numbers)))
            received = torch.empty_like(flat)
            with self._exchanging() as group:
                dist.all_to_all_single(received, flat, group=group)
                mine, *others = received.split(part)
                for other in others:
                    mine += other
                dist.all_gather(list(flat.split(part)), mine, group=group)
            _copy(alike, flat[: len(numbers)].split([tensor.numel() for tensor in alike]))

    def gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the gradients of parameters that have one on any process; a process without one gets zeros."""
        wanted = list(parameters)
        flags = self.rows([parameter.grad is not None for parameter in wanted])
        for parameter, found in zip(wanted, map(any, zip(*flags, strict=True)), strict=True):
            if found and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in wanted if parameter.grad is not None]

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return on the first process the rows of all (on the CPU), in the order of ranks; on others their own rows."""
        if self.world == 1:
            return rows
        self.meet()
        parts = [rows]
        with self._exchanging() as group:
            if not self.is_first and len(rows):
                dist.send(rows.contiguous(), dst=0, group=group)
            for rank in range(1, self.world if self.is_first else 0):
                parts.append(rows.new_empty(counts[rank], *rows.shape[1:]))
                if counts[rank]:
                    dist.recv(parts[-1], src=rank, group=group)
        return torch.cat(parts) if self.is_first else rows

    def scatter(self, rows: Tensor | None, mine: Tensor, counts: Sequence[int]) -> Tensor:
        """Undo `gather`: return this process's rows, which `mine` receives, from those on the first process."""
        if self.world == 1 and rows is not None:
            return rows
        self.meet()
        with self._exchanging() as group:
            if rows is None:
                if len(mine):
                    dist.recv(mine, src=0, group=group)
                return mine
            parts = rows.split(list(counts))
            for rank in range(1, self.world):
                if counts[rank]:
                    dist.send(parts[rank].contiguous(), dst=rank, group=group)
        return parts[0]

    # For the methods above

    def _all(self, numbers: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        with self._exchanging() as group:
            dist.all_gather(parts, mine, group=group)
        return [[int(number) for number in part] for part in parts]

    @contextmanager
    def _exchanging(self) -> Iterator[Any]:
        """Give the group of the exchange; a failed exchange raises one line that names the process."""
        try:
            yield self._group()
        except RuntimeError as error:  # torch has no narrower class for a lost connection or a time-out
            self._handed = ProcessLost(
                f"process {self.rank} of {self.world}: another process ended, or did not answer within "
                f"{self._timeout_s:g} s; see its own error, and resume the run"
            )
            raise self._handed from error

    def _group(self) -> Any:
        """Return the group of these processes, made at the first exchange, in which all take part."""
        made = _groups.get(self._timeout_s)
        if made is None or made[0] is not dist.group.WORLD:
            timeout = timedelta(seconds=self._timeout_s)
            made = dist.group.WORLD, dist.new_group(backend=exchange_backend(), timeout=timeout)
            _groups[self._timeout_s] = made
        return made[1]


def init_process_group() -> None:
    """Join the processes that torchrun started, unless this was done already or there is only one."""
    if launched_processes() < 2 or not dist.is_available() or dist.is_initialized():
        return
    backend = launch_backend()
    if "nccl" in backend:  # so that "cuda" is another card in each process of a machine
        local = environment_number(
            "LOCAL_RANK", 0, least=0, most=2**20, whole=True, what="processes before this one"
        )
        torch.cuda.set_device(int(local))
    dist.init_process_group(backend, timeout=timedelta(seconds=_default_timeout_s()))
    atexit.register(_leave_process_group)  # its threads would abort a process that ends with them


def _leave_process_group() -> None:
    _groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _default_timeout_s() -> float:
    """Return the seconds that the environment asks for."""
    return environment_number(TIMEOUT_VARIABLE, _TIMEOUT_S, least=1e-3, most=_LONGEST_S, what="seconds")


def _portable(error: BaseException | None, rank: int) -> BaseException:
    """Return the error, or ProcessLost with its text if it cannot be pickled."""
    try:
        found: BaseException = pickle.loads(pickle.dumps(error))  # nosec B301  # its own bytes
    except Exception:
        return ProcessLost(f"process {rank} failed: {type(error).__name__}: {error}")
    return found


def launch_backend() -> str:
    """Return the backend for the processes that torchrun started: gloo, with NCCL if each has a card of its own.

    All machines of a run must get the same backend.
    """
    local = environment_number(
        "LOCAL_WORLD_SIZE", launched_processes(), least=1, most=2**20, whole=True, what="processes"
    )
    cards = torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0
    return _WITH_NCCL if cards >= local else "gloo"


def exchange_backend() -> str:
    """Return the backend of exchanges: gloo, with NCCL for tensors on cards if the default process group has it."""
    return _WITH_NCCL if "nccl" in dist.get_backend_config() else "gloo"


def _place_of(tensor: Tensor) -> torch.device:
    """Return where a tensor is exchanged: on its card, or on the host."""
    on_card = tensor.device.type == "cuda" and exchange_backend() == _WITH_NCCL
    return tensor.device if on_card else torch.device("cpu")


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().to(_place_of(tensor)).contiguous().reshape(-1).view(torch.uint8)


def _by(key: Callable[[Tensor], Any], tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors of one key after the other, in the order in which keys first occur."""
    keys = [key(tensor) for tensor in tensors]
    for wanted in dict.fromkeys(keys):
        yield [tensor for tensor, own in zip(tensors, keys, strict=True) if own == wanted]


def _by_dtype(tensors: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield the tensors of each type and place, with their numbers in one row at the place of exchange."""
    for alike in _by(lambda tensor: (tensor.dtype, _place_of(tensor)), tensors):
        yield alike, torch.cat([tensor.reshape(-1).to(_place_of(tensor)) for tensor in alike])


def _copy(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.detach().copy_(value.view(tensor.shape))
