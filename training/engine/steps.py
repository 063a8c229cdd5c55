"""The steps of a run or of a private loop: each is paid for in the ledger before it is taken, and counted.

`train` takes the steps with a trainer (`opusim.training.engine.loop`), `make_private` with a user's loop
(`opusim.training.private_loop.session`). Several processes that train together either follow the first one
(`opusim.training.engine.session`) or all run the same loop. In a loop they compare what they are about to do, so that
loops that differ end in an error instead of in mixed-up exchanges.
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from opusim.accounting.journal import Position
from opusim.accounting.ledger import Ledger, LedgerContent
from opusim.accounting.mechanism import Mechanism
from opusim.files import OwnProcess
from opusim.processes.ranks import Ranks

Result = TypeVar("Result")
Act = Literal[
    "opens the loop",
    "iterates over the loader",
    "asks for the batch",
    "receives the batch",
    "calls backward on the batch",
]
"""What all processes of a loop do together."""
_ACTS: tuple[Act, ...] = get_args(Act)
STEPS_PAID_AT_ONCE = {"experiment": 64, "release": 16}
"""Steps that one synced line of the ledger reserves; a killed release run loses what is left of them."""
STEPS_TO_MOVE = 16
"""Steps of a private trainer within which each trained tensor should move."""
_MOST_NAMED = 4
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PaidSteps:
    """The steps of a run or of a private loop, and the ledger in which the first process pays for them.

    Attributes:
        step: Steps taken, which is the number of the next one.
        ranks: The processes that make the same calls in the same order.
        stopped: Why the budget ended the steps, or None.

    Args:
        ranks: See above.
        name: Owner of the steps, for messages, such as "the private loop".
    """

    def __init__(self, ranks: Ranks, name: object) -> None:
        self.ranks, self.step = ranks, 0
        self.stopped: str | None = None
        self._name, self._closed = name, False
        self.require_own: Callable[[], None] = partial(OwnProcess().require, name)
        """Refuse a process that was forked from the one that takes the steps, by a RuntimeError."""
        self._ledger: Ledger | None = None  # of the first process
        self._content: LedgerContent | None = None

    def require_open(self) -> None:
        """Refuse (RuntimeError) a forked process, and steps after `close`."""
        self.require_own()
        if self._closed:
            raise RuntimeError(f"{self._name} is closed; resume it from its folder, with resume=True")

    # The ledger

    def open(self, ledger: Callable[[], Ledger], *, covered: bool = True) -> None:
        """Open the ledger on the first process; every process learns what was paid for.

        Raises LedgerCorrupt if `covered`, each step is paid for by itself, and the ledger does not cover those taken.
        """

        def opened() -> LedgerContent | None:
            self._ledger = ledger()
            if covered and self.step:
                self._ledger.require_covers(self.step)
            return self._ledger.content if self.ranks.world > 1 else None

        self._content = self.on_first("opens the loop", opened)

    @property
    def ledger(self) -> Ledger:
        """The open ledger, on the first process."""
        if self._ledger is None:
            raise RuntimeError(f"the ledger of {self._name} is not open")
        return self._ledger

    @property
    def content(self) -> LedgerContent:
        """What was paid for so far, on every process."""
        if self._ledger is not None or self._content is None:
            return self.ledger.content
        return self._content

    @property
    def position(self) -> Position:
        """How far the ledger reaches, on every process."""
        if self._ledger is not None:
            return self._ledger.position
        return Position() if self._content is None else self._content.position

    def pay(self, *mechanisms: Mechanism, until: int) -> None:
        """Ensure that the mechanisms of the next step are paid for; then every process may take it.

        No line of the ledger reserves step `until`. Raises BudgetExceeded, OSError if the ledger cannot be written, and
        RuntimeError as `require_open`.
        """
        if self.ranks.world == 1:
            self._pay(mechanisms, until)
            return
        added = self.on_first("receives the batch", lambda: self._pay(mechanisms, until))
        if added is not None and self._content is not None:
            self._content = replace(added, payments=self._content.payments + added.payments)

    def _pay(self, mechanisms: tuple[Mechanism, ...], until: int) -> LedgerContent | None:
        """Pay, and return what other processes lack, with the new payments only."""
        if self._closed:
            self.require_open()  # the ledger refuses a forked process
        self.ledger.pay(self.step, *mechanisms, until=until)
        known = self._content
        if known is None or self.position == known.position:
            return None
        content = self.ledger.content
        return replace(content, payments=content.payments[len(known.payments) :])

    @property
    def lost(self) -> str:
        """What the message of a spent budget says of paid steps that were lost; empty if none was."""
        paid = sum(payment.steps for payment in self.content.payments if payment.name is None)
        if paid <= self.step:
            return ""
        return f"; {paid - self.step:,} steps that are paid for were lost when the program stopped"

    def return_unused(self) -> None:
        """Return steps that were reserved and not taken; if the disk is full, they stay paid for."""
        if self._ledger is not None:
            with suppress(OSError):
                self._ledger.return_unused()

    def close(self) -> None:
        """Close the ledger; `content` stays."""
        self._closed = True
        if self._ledger is not None:
            self._content = self._ledger.content
            self._ledger.close()
            self._ledger = None

    # Processes that run the same loop

    def agree(self, act: Act, number: int = 0, *, step: int | None = None) -> list[int]:
        """Check that all processes do the same at a step, by default the next; return each one's number, by rank.

        Raises RuntimeError, on each of them, if they do different things.
        """
        rank = self.ranks.rank
        if self.ranks.world == 1:
            return [number]
        found = self.ranks.rows([_ACTS.index(act), self.step if step is None else step, number])
        for other, theirs in enumerate(found):
            if theirs[:2] != found[rank][:2]:
                raise RuntimeError(
                    f"process {rank} {act} of step {found[rank][1]}, and process {other} {_ACTS[theirs[0]]} of step "
                    f"{theirs[1]}; run the same loop on every process, which leaves an epoch at the same batch"
                )
        return [row[2] for row in found]

    def on_first(self, act: Act, work: Callable[[], Result], *, step: int | None = None) -> Result:
        """Return on every process what the first one computes, once all do the same; see `agree`."""
        if self.ranks.world == 1:
            return work()
        self.agree(act, step=step)
        return self.ranks.on_first(work)

    def part(self, step: int, draw: Callable[[int], Tensor]) -> tuple[list[int], int]:
        """Return this process's part of the batch that `draw` gives on the first one, and the largest part's size."""
        if self.ranks.world == 1:
            indices: list[int] = draw(step).tolist()
            return indices, len(indices)
        indices = self.on_first("asks for the batch", lambda: draw(step).tolist(), step=step)
        return indices[self.ranks.part(len(indices))], -(-len(indices) // self.ranks.world)


class Movement:
    """Warns of trained tensors that a private trainer has not moved, although noise alone would move each.

    It compares only parameters that anyone may see under the guarantee, so that the warning costs no privacy.

    Args:
        module: The trained module, before the first step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._before = module, _sums_of_bits(module)

    def tell(self, steps: int) -> None:
        """Warn in one line of the tensors that have not changed in this many steps, if there are any."""
        now = _sums_of_bits(self._module)
        still = [name for name, found in self._before.items() if now.get(name, found) == found]
        if not still:
            return
        more = f" and {len(still) - _MOST_NAMED} more" if len(still) > _MOST_NAMED else ""
        warnings.warn(
            f"after {steps} steps, {len(still)} of {len(now)} trained tensors have not moved: "
            f"{', '.join(still[:_MOST_NAMED])}{more}; give them to the optimizer at a rate above 0, or freeze them "
            "(requires_grad = False)",
            stacklevel=2,
        )


def _sums_of_bits(module: nn.Module) -> dict[str, int]:
    """Return the sum of each trained tensor's entries, read as whole numbers: equal if no bit has changed."""
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.numel():
            values = parameter.detach()
            values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
            found[name] = int(values.view(_BITS[values.element_size()]).sum(dtype=torch.int64))
    return found


def share_state(ranks: Ranks, tensors: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Give every process the first one's tensors, such as parameters, to the bit, and its optimizer's state."""
    if ranks.world == 1:
        return
    ranks.broadcast_tensors(tensors)
    state = ranks.on_first(lambda: tree_map_only(Tensor, Tensor.cpu, optimizer.state_dict()))
    if not ranks.is_first:
        optimizer.load_state_dict(state)


@contextmanager
def torch_threads(wanted: int | None) -> Iterator[int]:
    """Set torch's thread count, unless None, for the run and put it back."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into an event that is checked between steps; a second one acts at once.

    Enter it before the ledger is opened, so that the first Ctrl-C always ends in a clean stop.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = signal.getsignal(signal.SIGINT)

    def remember(number: int, frame: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, remember)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
