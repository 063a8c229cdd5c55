"""A private loop at work: what it hands out, pays for, states, saves and refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from opusim.training.private_loop.folder import (
    CHECKPOINT_FILE,
    PrivacySettings,
    as_enforced,
    generator_states,
    read_save,
    set_generator_states,
    write_save,
)
from torch import Tensor
from torch.utils.data import DataLoader

from opusim.accounting.explanation import LedgerFacts, Statement
from opusim.accounting.guarantee import NoGuarantee
from opusim.accounting.journal import Witness
from opusim.accounting.ledger import LEDGER_FILE, Ledger
from opusim.training.engine.steps import STEPS_PAID_AT_ONCE, PaidSteps, share_state
from opusim.training.private_loop.inputs import feedback_of, require_own_parameters
from opusim.training.private_loop.loader import PrivateLoader
from opusim.training.private_loop.module import PhysicalBatches, PrivateModule
from opusim.training.private_loop.session import NamedAccountant, PrivateCriterion
from opusim.training.protections.base import PrivateGradients
from opusim.training.runs.folder import versions


class PrivateTraining:
    """A private loop: unpack it as `model, optimizer, criterion, data_loader`; it keeps the ledger of what they do.

    Attributes:
        module: The module given; it learns from private gradients only, until `close`.
        optimizer: The optimizer given.
        criterion: Stands for the criterion given.
        data_loader: Stands for the loader given.
        settings: Every constant of the guarantee.
        physical_batches: How the records of a step run.
        extra: What the `save` that was resumed from was given besides, or None.
    """

    def __init__(
        self,
        private: PrivateModule,
        optimizer: torch.optim.Optimizer,
        criterion: Callable[..., Tensor],
        data_loader: DataLoader[Any],
        *,
        settings: PrivacySettings,
        folder: Path,
        physical: PhysicalBatches,
        steps: PaidSteps,
        stack: ExitStack,
        accountant: NamedAccountant | None,
        resume: bool,
    ) -> None:
        """Open the ledger, of a new private loop or of the one in the folder, and watch the optimizer.

        `make_private` describes the arguments; the stack holds what `close` ends.
        """
        self.module, self.optimizer, self.settings, self.folder = private.module, optimizer, settings, folder
        self.criterion = PrivateCriterion(criterion, private)
        self.physical_batches = physical
        self.data_loader = PrivateLoader(data_loader, settings, private, steps, physical=physical)
        self.extra: Any = None
        self._private, self._steps, self._accountant = private, steps, accountant
        self._witnesses = list[Witness]()
        if resume:
            self._restore()
        stack.callback(steps.close)
        steps.open(partial(self._opened, resume=resume))
        share_state(steps.ranks, [*self.module.parameters(), *self.module.buffers()], optimizer)
        stack.callback(optimizer.register_step_pre_hook(self.before_step).remove)
        stack.callback(optimizer.register_step_post_hook(self.after_step).remove)
        self._stack = stack.pop_all()  # from here on `close` ends it, and no longer the caller

    def _opened(self, *, resume: bool) -> Ledger:
        """Return the open ledger, in the folder of a new private loop or of one that resumes."""
        if not resume:
            self.settings.begin(self.folder)
        settings, budget = self.settings, self.settings.budget
        if budget is not None and settings.total_steps is not None:
            budget.would_exceed([], [settings.mechanism.repeated(settings.total_steps)])  # known from then on
        return Ledger(
            self.folder / LEDGER_FILE,
            mode=settings.mode,
            delta=settings.target_delta,
            block=STEPS_PAID_AT_ONCE[settings.mode],
            budget=budget,
            witnesses=self._witnesses,
        )

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
        self._steps.return_unused()
        self._stack.close()

    @property
    def step(self) -> int:
        """Number of the next step."""
        return self._steps.step

    @property
    def stopped(self) -> str | None:
        """Why the budget ended the iteration, or None."""
        return self._steps.stopped

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
        content = self._steps.content
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
        content, several = self._steps.content, self._steps.ranks.world > 1
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
        self._steps.require_open()
        position = self._steps.position
        if self._steps.ranks.is_first:
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

    def wrap_writer(self, wrap: Callable[[PrivateGradients], PrivateGradients]) -> None:
        """Let another writer see or change what the loop's own one is given, as an audit does.

        Args:
            wrap: Returns a writer around the loop's own.
        """
        self._private.gradients = wrap(self._private.gradients)

    # The folder

    def _restore(self) -> None:
        """Take module, optimizer and step from the last save, which the first process reads."""
        state, position = self._steps.on_first("opens the loop", lambda: read_save(self.folder))
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        for feedback, columns in zip(feedback_of(self.module), state["columns"], strict=True):
            feedback.column_sum = columns
        self._steps.step, self.extra, self._private.factor = state["step"], state["extra"], state["factor"]
        self._witnesses = [Witness(name=CHECKPOINT_FILE, position=position)]
        if state["generators"] is not None and self._steps.ranks.is_first:
            set_generator_states(state["generators"])
