"""Make a user's own training loop private, in the words of Opacus: `make_private`."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accounting.errors import BudgetExceeded, NoGuarantee
from accounting.guarantee import Assumption, Guarantee
from accounting.ledger.journal import Position, Witness
from accounting.ledger.ledger import LEDGER_FILE, Ledger, LedgerContent
from accounting.ledger.statement import LedgerFacts, Statement
from accounting.records.mechanisms import CLIPPED_RECORDS
from opusim import checks
from opusim.files import require_regular, write_file
from opusim.randomness.streams import derive_seed, noise_stream
from training.data.samplers import PoissonSampler
from training.errors import RunFolderError
from training.private_loop.criterion import PrivateCriterion
from training.private_loop.inputs import (
    example_of,
    require_arguments,
    require_one_process,
    require_own_parameters,
)
from training.private_loop.loader import PrivateLoader, batch_size_of
from training.private_loop.module import PrivateModule, feedback_of
from training.private_loop.settings import CHECKPOINT_FILE, PrivacySettings
from training.protections.record import RecordGradients
from training.runs.folder import own_folder, versions
from training.runs.storage import only_writer

_STEPS_PAID_AT_ONCE = {"experiment": 64, "release": 16}
"""Steps that one synced line of the ledger reserves; a killed release run loses what is left of them."""
_VERSION = 1
_STANDARDISED = "the features were standardised with public constants, not with statistics of the data"
_CHECKED = "each record's loss was computed from the outputs and the targets of that record only"
_TRUSTED = (
    "the data set, the collate function and what stands between loader and module treat each record separately, with "
    "constants that do not come from the data",
    "the criterion keeps no memory of other records, and the loss is multiplied by a constant only",
    "only the gradients of the private loop move the parameters, and neither losses nor other figures of the records "
    "are released",
)
"""What the loop of a user may break, and no code here can check."""


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
        self.data_loader = PrivateLoader(
            data_loader, sampler, self, seed=lambda epoch: _loader_seed(seed, epoch)
        )
        self.step = 0
        self.stopped: str | None = None
        self.extra: Any = None
        self._private, self._stack, self._witnesses = private, stack, list[Witness]()
        self._ledger: Ledger | None = None
        self._paid: LedgerContent | None = None

    def open(self, *, resume: bool) -> None:
        """Open the ledger, of a new private loop or of the one in the folder, and watch the optimizer."""
        if resume:
            self._restore()
        else:
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
        for handle in (
            self.optimizer.register_step_pre_hook(self.before_step),
            self.optimizer.register_step_post_hook(self.after_step),
        ):
            self._stack.callback(handle.remove)
        self._stack = self._stack.pop_all()  # from here on `close` ends it, and no longer the caller

    def __iter__(self) -> Iterator[Any]:
        """Yield model, optimizer, criterion and data loader."""
        return iter((self.module, self.optimizer, self.criterion, self.data_loader))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the plain module back, return steps that were reserved and not taken, and close the ledger."""
        if self._ledger is not None:
            with suppress(OSError):  # the steps then stay paid for
                self._ledger.return_unused()
            self._paid, self._ledger = self._ledger.content, None
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
        content = self._content
        if not content.payments:
            return 0.0
        return max(guarantee.epsilon for guarantee in content.guarantees(delta=delta))

    def statement(self) -> Statement:
        """Return the guarantee with everything that it rests on; `to_json` gives the document for a reviewer.

        Raises:
            NoGuarantee: Nothing was paid for yet.
        """
        content = self._content
        if not content.payments:
            raise NoGuarantee(
                "statement: no step was paid for yet; train on a batch of the private loader first"
            )
        return Statement(
            mode=content.mode,
            guarantees=tuple(_with_what_was_checked(guarantee) for guarantee in content.guarantees()),
            mechanisms=tuple(content.mechanisms),
            ledger=LedgerFacts.of(content, [witness.name for witness in self._witnesses]),
            run=None,
            versions={name: version for name, version in versions().items() if name in ("python", "opusim")},
        )

    def save(self, extra: Any = None) -> Path:
        """Save module, optimizer and step, for `make_private(..., resume=True)`; replaces the last save.

        In experiment mode a resumed loop repeats an uninterrupted one bit for bit, if the data set does. In release
        mode steps after the save are drawn and paid for again.

        Args:
            extra: What else the loop needs, such as a scheduler's state dict: tensors, numbers, texts, lists and
                mappings. The resumed loop finds it in `extra`.

        Returns:
            The file, in the folder.

        Raises:
            RuntimeError: A batch is at hand whose step was not taken.
            OSError: The file could not be written; the last save is kept.
        """
        if not self._private.trained or self._private.unused_gradients:
            raise RuntimeError(
                f"save: step {self.step - 1} is under way; save after optimizer.step() and before the next batch"
            )
        state = {
            "version": _VERSION,
            "step": self.step,
            "ledger": self._open_ledger.position.to_json(),
            "inode": self.folder.stat().st_ino if self.settings.mode == "release" else None,
            "factor": self._private.factor,
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "columns": [feedback.column_sum for feedback in feedback_of(self.module)],
            "generators": _generators() if self.settings.mode == "experiment" else None,
            "extra": extra,
        }
        content = io.BytesIO()
        torch.save(state, content)
        file = self.folder / CHECKPOINT_FILE
        write_file(file, content.getvalue())
        self._witnesses = [_witness(state)]
        return file

    @property
    def _content(self) -> LedgerContent:
        return self._open_ledger.content if self._paid is None else self._paid

    @property
    def _open_ledger(self) -> Ledger:
        if self._ledger is None:
            raise RuntimeError("the private loop is closed; resume it by make_private(..., resume=True)")
        return self._ledger

    # What the loader asks for

    def open_epoch(self) -> None:
        """See training.private_loop.loader.Steps."""
        self._open_ledger  # noqa: B018  raises if there is none
        require_one_process()
        if self.stopped is not None:
            raise BudgetExceeded(self.stopped)
        self._private.drop()

    def hand_out(self, records: int) -> bool:
        """See training.private_loop.loader.Steps."""
        end_of_epoch = (self.epoch + 1) * len(self.data_loader)
        try:
            self._open_ledger.pay(self.step, self.settings.mechanism, until=end_of_epoch)
        except BudgetExceeded as error:
            self.stopped = f"{error}; the loop ended after step {self.step}"
            warnings.warn(self.stopped, stacklevel=3)
            return False
        self._private.begin(self.step, records)
        self.step += 1
        return True

    def require_trained(self) -> None:
        """See training.private_loop.loader.Steps."""
        if not self._private.trained:
            self._private.drop()
            raise RuntimeError(
                f"step {self.step - 1}: its batch was left without a backward pass, and which batches are left out may "
                "tell their size; call backward on the loss of every batch, also of an empty one, before the next is "
                "drawn (a framework that accumulates gradients may draw ahead: give max_physical_batch_size instead)"
            )

    # The optimizer

    def before_step(self, *_: Any) -> None:
        """Refuse an optimizer that would move what is not private; called before each step of the optimizer."""
        self._private.require_same_parameters()
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
        file = self.folder / CHECKPOINT_FILE
        if not file.exists():
            raise RunFolderError(f"folder {self.folder} has no save to resume from; start a new folder")
        try:
            require_regular(file)
            state = torch.load(file, map_location="cpu", weights_only=True)
            version = state["version"]
        except Exception as error:  # torch.load has no error of its own
            raise RunFolderError(
                f"{file} is not a readable save ({error}); restore it from a copy"
            ) from error
        if version != _VERSION:
            raise RunFolderError(f"{file} is of another version; resume it with the opusim that wrote it")
        if state["inode"] not in (None, self.folder.stat().st_ino):
            raise RunFolderError(
                f"folder {self.folder} is a copy, and no ledger counts what two copies release; resume in the folder "
                "where the loop was started, or start a new one"
            )
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        for feedback, columns in zip(feedback_of(self.module), state["columns"], strict=True):
            feedback.column_sum = columns
        self.step, self.extra, self._private.factor = state["step"], state["extra"], state["factor"]
        self._witnesses = [_witness(state)]
        if state["generators"] is not None:
            torch.set_rng_state(state["generators"][0])
            if len(state["generators"]) > 1:
                torch.cuda.set_rng_state_all(state["generators"][1:])


def make_private(
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[..., Tensor],
    data_loader: DataLoader[Any],
    max_grad_norm: float,
    target_delta: float,
    folder: str | Path,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    epochs: int | None = None,
    mode: Literal["experiment", "release"] = "experiment",
    seed: int | None = None,
    relation: str = "zero_out",
    sample_rate: float | None = None,
    max_physical_batch_size: int | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    resume: bool = False,
) -> PrivateTraining:
    """Make a training loop private: DP-SGD on whole records, with a ledger that every step is paid in first.

    With b the loader's batch size and n the number of its records, each step draws a secret Poisson batch with
    q = b / n, clips each record's gradient to C, and releases (sum + N(0, (z C)^2)) / b as the gradient of the
    parameters. Module and optimizer stay the objects that they are; the loop itself need not change::

        private = opusim.make_private(module=model, optimizer=optimizer, criterion=criterion, ...)
        model, optimizer, criterion, loader = private
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    The criterion is called on one record at a time, so that the loss of a record depends on no other, and receives the
    module's outputs exactly as they are. A batch may be empty; its backward pass and its step are taken like any other.

    Args:
        module: In training mode, on its device, with parameters in float32. Every record is processed independently.
        optimizer: Over parameters of the module.
        criterion: Maps outputs and targets to a loss, with any reduction.
        data_loader: A loader with batch_size over a data set with a length; its order is replaced.
        max_grad_norm: C, above 0.
        target_delta: Delta of every statement, in [0, 1); well below 1 / n.
        folder: Where ledger and saves stand; new, or of this loop with `resume`.
        noise_multiplier: z, above 0; None for the least noise that keeps `epochs` within `target_epsilon`.
        target_epsilon: Budget; the step that would exceed it is not taken, and the iteration ends with a warning. None
            for no budget.
        epochs: Planned epochs of round(1 / q) steps.
        mode: "experiment" stores a seed from which all noise can be rebuilt; "release" draws noise and batches from the
            operating system.
        seed: Of experiment mode, in [0, 2^64); None draws one.
        relation: "zero_out", under which n is public, or "add_or_remove_one", under which nothing may come from n.
        sample_rate: q, for add_or_remove_one a constant of your choice; None takes b / n.
        max_physical_batch_size: Records in memory at once; larger batches run in parts, whose forward passes run twice.
        example_inputs: Arguments of the module for a few records, a sequence or a mapping by name. None takes the first
            entry of the loader's batches, or all but the labels of a mapping.
        resume: Resume from the last `save` in `folder`, with the same arguments.

    Returns:
        The private loop; unpack it, and ask it for `epsilon`, `statement()` and `save()`.

    Raises:
        TypeError, ValueError: An argument is wrong, or the module mixes records; the message says what to do.
        NoGuarantee: No noise reaches `target_epsilon`.
        RunFolderError: The folder is in use, or holds other work.
    """
    require_one_process()
    checks.instance(nn.Module, module=module)
    checks.instance(torch.optim.Optimizer, optimizer=optimizer)
    if max_physical_batch_size is not None:
        checks.integer(minimum=1, max_physical_batch_size=max_physical_batch_size)
    batch_size = batch_size_of(data_loader)
    require_own_parameters(optimizer, module)
    settings = PrivacySettings.resolve(
        records=len(data_loader.dataset),  # type: ignore[arg-type]
        mode=mode,
        seed=seed,
        relation=relation,
        sample_rate=sample_rate,
        batch_size=batch_size,
        max_grad_norm=max_grad_norm,
        noise_multiplier=noise_multiplier,
        target_delta=target_delta,
        target_epsilon=target_epsilon,
        epochs=epochs,
    )
    place = own_folder(Path(folder))
    with ExitStack() as stack:
        stack.enter_context(only_writer(place, "folder", private=mode == "release"))
        if resume:
            given = {"seed": seed, "noise_multiplier": noise_multiplier}
            settings = settings.require_same(
                place, found=[name for name, value in given.items() if value is None]
            )
        args, kwargs = example_of(data_loader, example_inputs, next(module.parameters()).device)
        require_arguments(module, args, kwargs)
        private = PrivateModule(
            module,
            args,
            kwargs,
            gradients=_gradients(settings),
            max_physical_batch_size=max_physical_batch_size,
        )
        stack.callback(private.close)
        loop = PrivateTraining(
            private=private,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=data_loader,
            settings=settings,
            folder=place,
            stack=stack,
        )
        loop.open(resume=resume)
    return loop


def _gradients(settings: PrivacySettings) -> RecordGradients:
    return RecordGradients(
        clip_norm=settings.max_grad_norm,
        noise_multiplier=settings.noise_multiplier,
        divisor=float(settings.batch_size),
        noise=noise_stream(settings.mode, settings.seed, "private-loop"),
    )


def _with_what_was_checked(guarantee: Guarantee) -> Guarantee:
    """Return a guarantee whose assumptions say what the loop enforced and what it takes on trust."""
    enforced = {text for text in CLIPPED_RECORDS.checked_by_code if text != _STANDARDISED}
    assumptions = [replace(one, holds=True) if one.text in enforced else one for one in guarantee.assumptions]
    ours = (Assumption(text=_CHECKED, holds=True), *(Assumption(text=text) for text in _TRUSTED))
    return replace(guarantee, assumptions=(*assumptions, *ours))


def _loader_seed(seed: int | None, epoch: int) -> int:
    if seed is None:
        return int.from_bytes(os.urandom(7), "little")
    return derive_seed(seed, "private-loop", "workers", epoch) >> 1


def _generators() -> list[Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *cuda]


def _witness(state: Mapping[str, Any]) -> Witness:
    return Witness(name=CHECKPOINT_FILE, position=Position.from_json(state["ledger"]))
