"""A private loop at work: what it hands out, pays for, states, saves and refuses."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accounting.errors import BudgetExceeded, NoGuarantee
from accounting.ledger.content import LedgerContent
from accounting.ledger.journal import Witness
from accounting.ledger.ledger import LEDGER_FILE, Ledger
from accounting.ledger.statement import LedgerFacts, Statement
from opusim.files import OwnProcess
from opusim.randomness.streams import derive_seed
from training.data.samplers import PoissonSampler
from training.private_loop.accountants import NamedAccountant
from training.private_loop.criterion import PrivateCriterion
from training.private_loop.inputs import require_own_parameters
from training.private_loop.loader import PrivateLoader
from training.private_loop.module import PrivateModule
from training.private_loop.saves import (
    CHECKPOINT_FILE,
    generator_states,
    read_save,
    set_generator_states,
    write_save,
)
from training.private_loop.settings import PrivacySettings, as_enforced
from training.private_loop.sharing import Act, SharedSteps, feedback_of
from training.runs.folder import versions

_STEPS_PAID_AT_ONCE = {"experiment": 64, "release": 16}
"""Steps that one synced line of the ledger reserves; a killed release run loses what is left of them."""


class PrivateTraining:
    """A private loop: unpack it as `model, optimizer, criterion, data_loader`; it keeps the ledger of what they do.

    Attributes:
        module: The module given; it learns from private gradients only, until `close`.
        optimizer: The optimizer given.
        criterion: Stands for the criterion given.
        data_loader: Stands for the loader given.
        settings: Every constant of the guarantee.
        step: Number of the next step.
        stopped: Why the budget ended the iteration, or None.
        extra: What the `save` that was resumed from was given besides, or None.
    """

    def __init__(
        self,
        *,
        private: PrivateModule,
        optimizer: torch.optim.Optimizer,
        criterion: Callable[..., Tensor],
        data_loader: DataLoader[Any],
        settings: PrivacySettings,
        folder: Path,
        stack: ExitStack,
        shared: SharedSteps,
        accountant: NamedAccountant | None = None,
    ) -> None:
        """Put the pieces together; `make_private` describes them. The stack holds what `close` ends."""
        self.module, self.optimizer, self.settings, self.folder = private.module, optimizer, settings, folder
        self.criterion = PrivateCriterion(criterion, private)
        seed = settings.seed
        sampler = PoissonSampler(
            len(data_loader.dataset),  # type: ignore[arg-type]
            settings.sample_rate,
            seed=None if seed is None else derive_seed(seed, "private-loop", "batches"),
        )
        self._shared, self._accountant = shared, accountant
        self.data_loader = PrivateLoader(
            data_loader,
            sampler,
            self,
            seed=lambda epoch: _loader_seed(seed, epoch, shared.ranks.rank),
            shared=shared,
            release=settings.mode == "release",
        )
        self.step = 0
        self.stopped: str | None = None
        self.extra: Any = None
        self._private, self._stack, self._witnesses = private, stack, list[Witness]()
        self._ledger: Ledger | None = None  # of the first process, which pays
        self._content: LedgerContent | None = None
        self._closed = False
        self._process = OwnProcess()

    def open(self, *, resume: bool) -> None:
        """Open the ledger, of a new private loop or of the one in the folder, and watch the optimizer."""
        if resume:
            self._restore()
        self._content = self._shared.on_first(Act.OPEN, self.step, lambda: self._opened(resume=resume))
        self._shared.share_state(self.module, self.optimizer)
        for handle in (
            self.optimizer.register_step_pre_hook(self.before_step),
            self.optimizer.register_step_post_hook(self.after_step),
        ):
            self._stack.callback(handle.remove)
        self._stack = self._stack.pop_all()  # from here on `close` ends it, and no longer the caller

    def _opened(self, *, resume: bool) -> LedgerContent:
        """Open the ledger, and return what was paid for."""
        if not resume:
            self.settings.begin(self.folder)
        settings, budget = self.settings, self.settings.budget
        if budget is not None and settings.total_steps is not None:
            budget.would_exceed([], [settings.mechanism.repeated(settings.total_steps)])  # known from then on
        self._ledger = Ledger(
            self.folder / LEDGER_FILE,
            mode=settings.mode,
            delta=settings.target_delta,
            block=_STEPS_PAID_AT_ONCE[settings.mode],
            budget=budget,
            witnesses=self._witnesses,
        )
        self._stack.callback(self._ledger.close)
        self._ledger.require_covers(self.step)
        return self._ledger.content

    def __iter__(self) -> Iterator[Any]:
        """Yield model, optimizer, criterion and data loader."""
        return iter((self.module, self.optimizer, self.criterion, self.data_loader))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the plain module back, return steps that were reserved and not taken, and close the ledger.

        Of several processes the first returns steps; the others go on to count the steps that were reserved.
        """
        if self._ledger is not None:
            with suppress(OSError):  # the steps then stay paid for
                self._ledger.return_unused()
            self._content, self._ledger = self._ledger.content, None
        self._closed = True
        self._stack.close()

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self.step // len(self.data_loader)

    @property
    def epsilon(self) -> float:
        """What has been paid for so far, at `target_delta`; 0 before the first step.

        Steps are paid for in blocks that end with the epoch, so that within an epoch this may include steps to come.
        """
        return self.get_epsilon(self.settings.target_delta)

    def get_epsilon(self, delta: float) -> float:
        """Return what has been paid for so far, at a delta in [0, 1)."""
        content = self._paid
        if not content.payments:
            return 0.0
        return max(guarantee.epsilon for guarantee in content.guarantees(delta=delta))

    def statement(self) -> Statement:
        """Return the guarantee with everything that it rests on; printed, it reads as `opusim account run` shows it.

        Its `to_json` gives the document for a reviewer.

        If `make_private` was given an accountant, a second guarantee has its epsilon, with the status claimed.

        Raises:
            NoGuarantee: Nothing was paid for yet.
            ValueError: The accountant given raises an error, or returns no epsilon.
        """
        content, several = self._paid, self._shared.several
        if not content.payments:
            raise NoGuarantee(
                "statement: no step was paid for yet; train on a batch of the private loader first"
            )
        stated = [as_enforced(guarantee, several=several) for guarantee in content.guarantees()]
        if self._accountant is not None:
            stated += [self._accountant.claimed(content.mechanisms, ours) for ours in stated]
        return Statement(
            mode=content.mode,
            guarantees=tuple(stated),
            mechanisms=tuple(content.mechanisms),
            ledger=LedgerFacts.of(content, [witness.name for witness in self._witnesses]),
            run=None,
            versions={name: version for name, version in versions().items() if name in ("python", "opusim")},
        )

    def save(self, extra: Any = None) -> Path:
        """Save module, optimizer and step, for `make_private(..., resume=True)`; replaces the last save.

        In experiment mode a resumed loop repeats an uninterrupted one bit for bit, if the data set does. In release
        mode steps after the save are drawn and paid for again. Of several processes the first one writes the file; it
        does not matter whether the others call this too.

        Args:
            extra: What else the loop needs, such as a scheduler's state dict: tensors, arrays, numbers (of Python or
                numpy), texts, lists and mappings. The resumed loop finds it in `extra`.

        Returns:
            The file, in the folder.

        Raises:
            RuntimeError: A batch is at hand whose step was not taken.
            TypeError: A value could not be read back, such as a path or an object of a class; the last save is kept.
            OSError: The file could not be written; the last save is kept.
        """
        if not self._private.trained or self._private.unused_gradients:
            raise RuntimeError(
                f"save: step {self.step - 1} is under way; save after optimizer.step() and before the next batch"
            )
        self._require_open()
        position = self._paid.position
        if self._shared.ranks.is_first:
            state = {
                "step": self.step,
                "factor": self._private.factor,
                "module": self.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "columns": [feedback.column_sum for feedback in feedback_of(self.module)],
                "generators": generator_states() if self.settings.mode == "experiment" else None,
                "extra": extra,
            }
            write_save(self.folder, state, ledger=position, bound=self.settings.mode == "release")
        self._witnesses = [Witness(name=CHECKPOINT_FILE, position=position)]
        return self.folder / CHECKPOINT_FILE

    @property
    def _paid(self) -> LedgerContent:
        if self._content is None:
            self._require_open()
            raise RuntimeError("the private loop is not open yet")
        return self._content if self._ledger is None else self._ledger.content

    def _require_open(self) -> None:
        self._process.require("the private loop")
        if self._closed:
            raise RuntimeError("the private loop is closed; resume it by make_private(..., resume=True)")

    # What the loader asks for

    @property
    def left(self) -> bool:
        """See training.private_loop.loader.Steps."""
        return not self._private.trained

    def open_epoch(self) -> None:
        """See training.private_loop.loader.Steps."""
        self._require_open()
        if self.stopped is not None:
            raise BudgetExceeded(self.stopped)
        with self._shared.handing_errors():
            self._shared.begin_epoch(self.step, self.module)
        if not self.left:
            self._private.drop()

    def hand_out(self, records: int) -> bool:
        """See training.private_loop.loader.Steps."""
        self._process.require("the private loop")
        self.stopped, paid = self._shared.on_first(Act.PAY, self.step, self._pay)
        if self._content is not None and paid is not None and self._ledger is None:
            self._content = replace(
                self._content, payments=self._content.payments + paid.payments, position=paid.position
            )
        if self.stopped is not None:
            warnings.warn(self.stopped, stacklevel=3)
            return False
        self._private.begin(self.step, records)
        self.step += 1
        return True

    def hand_out_again(self, records: int) -> None:
        """See training.private_loop.loader.Steps."""
        self._private.begin(self.step - 1, records)

    def _pay(self) -> tuple[str | None, LedgerContent | None]:
        """Pay for the next step; return why the loop ends or None, and the ledger's new lines or None."""
        self._require_open()
        if self._ledger is None or self._content is None:
            raise RuntimeError("the ledger is not open")
        end_of_epoch = (self.epoch + 1) * len(self.data_loader)
        try:
            self._private.paid_on_processor = exact = self._private.on_processor
            self._ledger.pay(
                self.step, replace(self.settings.mechanism, exactly_rounded=exact), until=end_of_epoch
            )
        except BudgetExceeded as error:
            return f"{error}; the loop ended after step {self.step}", None
        if self._ledger.position == self._content.position:
            return None, None
        before, self._content = self._content, self._ledger.content
        return None, replace(self._content, payments=self._content.payments[len(before.payments) :])

    def require_trained(self) -> None:
        """See training.private_loop.loader.Steps."""
        self._process.require("the private loop")
        if not self._private.trained:
            raise RuntimeError(
                f"step {self.step - 1}: its batch was left without a backward pass, and which batches are left out "
                "may tell of their records; call backward on the loss of every batch, also of an empty one, before the "
                "next is drawn (a framework that accumulates gradients may draw ahead: give max_physical_batch_size "
                "instead)"
            )

    # The optimizer

    def before_step(self, *_: Any) -> None:
        """Refuse an optimizer that would move what is not private; called before each step of the optimizer."""
        self._private.require_same_parts()
        require_own_parameters(self.optimizer, self.module)

    def after_step(self, *_: Any) -> None:
        """Refuse a step without new private gradients; called after it, for a closure writes them within the step."""
        written, self._private.unused_gradients = self._private.unused_gradients, 0
        if not written:
            raise RuntimeError(
                "optimizer.step() without a new backward pass: call loss.backward() first, on the loss of the "
                "criterion that make_private returned"
            )

    # The folder

    def _restore(self) -> None:
        """Take module, optimizer and step from the last save, which the first process reads."""
        state, position = self._shared.on_first(Act.OPEN, 0, lambda: read_save(self.folder))
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        for feedback, columns in zip(feedback_of(self.module), state["columns"], strict=True):
            feedback.column_sum = columns
        self.step, self.extra, self._private.factor = state["step"], state["extra"], state["factor"]
        self._witnesses = [Witness(name=CHECKPOINT_FILE, position=position)]
        if state["generators"] is not None and self._shared.ranks.is_first:
            set_generator_states(state["generators"])


def _loader_seed(seed: int | None, epoch: int, rank: int) -> int:
    """Return the seed of a process's workers, which draw other numbers than those of the first."""
    if seed is None:
        return int.from_bytes(os.urandom(7), "little")
    return derive_seed(seed, "private-loop", "workers", epoch, *((rank,) if rank else ())) >> 1
