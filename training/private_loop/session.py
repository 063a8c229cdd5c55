"""A running private loop: its payments, statement, saves and refusals; and the loss of single records.

A loss over a batch may mix records: with `ignore_index`, a mean over tokens divides by the number of counted tokens of
all records, and contrastive losses compare records. A clip then bounds nothing. Here record i has the loss

    l_i = mean of criterion(outputs of record i, targets of record i),

both with a first dimension of 1, so that l_i depends on no other record, whatever the criterion computes. torch.vmap
calls it for all records at once; a criterion that vmap cannot map is called in a loop.

The statement also gives another accountant's epsilon if an installed package brings one, by an entry point:

    [project.entry-points."opusim.accountants"]
    my_accountant = "my_package:MyAccountant"

    class MyAccountant:
        def epsilon(self, mechanisms, *, delta): ...

`mechanisms` lists what was paid for as plain values: kind, parameters, and `steps`, how often it ran. What the method
returns is stated as claimed, never as proven, and no budget counts it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from opusim import plugins
from opusim.accounting.explanation import Statement
from opusim.accounting.guarantee import Assumption, Guarantee, NoGuarantee, Status
from opusim.accounting.journal import Witness
from opusim.accounting.ledger import LEDGER_FILE, Ledger, Program
from opusim.accounting.mechanism import Mechanism
from opusim.tables import Shown
from opusim.training.data.samplers import PhysicalBatches
from opusim.training.data.users import Users
from opusim.training.engine.steps import STEPS_PAID_AT_ONCE, STEPS_TO_MOVE, Movement, PaidSteps, share_state
from opusim.training.errors import RunFolderError
from opusim.training.feedback.hooks import points_in
from opusim.training.private_loop.folder import (
    CHECKPOINT_FILE,
    TAKES_NO_GRADIENTS,
    PrivacySettings,
    enforcement,
    generator_states,
    loop_statement,
    optimizer_settings,
    program_of,
    read_save,
    set_generator_states,
    write_save,
)
from opusim.training.private_loop.inputs import (
    NO_NUMBERS,
    is_number,
    require_own_parameters,
    require_own_rows,
)
from opusim.training.private_loop.loader import PrivateLoader
from opusim.training.private_loop.module import USES_PARAMETERS, MeasuredModule, PrivateModule
from opusim.training.protections.base import PrivateGradients

ENTRY_POINT_GROUP = "opusim.accountants"


@dataclass(frozen=True, kw_only=True)
class NamedAccountant:
    """An accountant that a package brings by an entry point, an object that has the method above."""

    name: str
    package: str
    accountant: Any

    @classmethod
    def load(cls, name: str) -> Self:
        """Return the accountant of a name; raise ValueError if no package brings it, or its class cannot be used."""
        known = plugins.names(ENTRY_POINT_GROUP)
        if name not in known:
            listed = f"must be one of {', '.join(known)}" if known else "none is installed"
            raise ValueError(
                f"accountant = {name!r}: {listed}; install the package that brings it, or leave it out: epsilon of "
                "opusim's own accountant is always stated"
            )

        def problem(found: Any) -> str | None:
            fits = isinstance(found, type) and callable(getattr(found, "epsilon", None))
            return None if fits else "is no class with a method epsilon(mechanisms, *, delta)"

        found = plugins.load(ENTRY_POINT_GROUP, name, accept=problem)
        package = plugins.package(ENTRY_POINT_GROUP, name)
        try:
            return cls(name=name, package=package, accountant=found())
        except plugins.FOREIGN_ERRORS as error:
            raise _unusable(name, package, error) from error

    def claimed(self, mechanisms: Sequence[Mechanism], proven: Guarantee) -> Guarantee:
        """Return the accountant's epsilon as a claimed guarantee for the paid mechanisms of a proven one.

        Raises ValueError if the accountant raises an error, or returns no epsilon.
        """
        try:
            epsilon = float(
                self.accountant.epsilon([one.to_json() for one in mechanisms], delta=proven.delta)
            )
        except plugins.FOREIGN_ERRORS as error:
            raise _unusable(self.name, self.package, error) from error
        if not epsilon >= 0:
            raise _unusable(self.name, self.package, f"epsilon = {epsilon}, which must be at least 0")
        lower = proven.epsilon_lower
        checked = Assumption(
            text="this epsilon is at least the lower bound that opusim found for the same mechanisms",
            holds=None if lower is None else epsilon >= lower,
        )
        trusted = Assumption(text=f"accountant {self.name} of package {self.package} is right about them")
        return Guarantee(
            epsilon=epsilon,
            delta=proven.delta,
            unit=proven.unit,
            adjacency=proven.adjacency,
            release=proven.release,
            status=Status.CLAIMED,
            mechanism=proven.mechanism,
            source=f"accountant {self.name} of package {self.package}",
            assumptions=(checked, trusted, *proven.assumptions),
            reason=None if math.isfinite(epsilon) else f"accountant {self.name} gives no finite epsilon",
        )


def _unusable(name: str, package: str, problem: object) -> plugins.PluginError:
    reason = f"{type(problem).__name__}: {problem}" if isinstance(problem, Exception) else str(problem)
    return plugins.PluginError(
        f"accountant = {name!r} of package {package!r}: {' '.join(reason.split())}; repair that package, or leave "
        "accountant out"
    )


Criterion = Callable[..., Tensor]


class PrivateCriterion(nn.Module):
    """Stands for the user's criterion in a private loop.

    On outputs of the private module's training pass it returns the mean of the records' losses; `backward` on it, once,
    writes the private gradients. Within `ZerothOrder.measure` it returns the loss of each record. On anything else,
    such as outputs in evaluation mode, it is the criterion itself.

    Args:
        criterion: Maps outputs and targets to a loss; any reduction. Without parameters that learn.
        module: The private module.

    Raises:
        TypeError: The criterion cannot be called.
        ValueError: It has parameters that learn.
    """

    def __init__(self, criterion: Criterion, module: PrivateModule | MeasuredModule) -> None:
        super().__init__()
        if not callable(criterion):
            raise TypeError(
                f"criterion = {criterion!r}: must be a function or a module that returns a loss; give one, such as "
                "nn.CrossEntropyLoss()"
            )
        if isinstance(criterion, nn.Module) and any(p.requires_grad for p in criterion.parameters()):
            raise ValueError(
                "criterion has parameters that learn, whose gradients would not be private; move them into module"
            )
        self.criterion = criterion
        self._private = module
        self._vmap, self._checked = True, False

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean loss of the batch's records.

        Args:
            *args: The criterion's arguments: outputs exactly as the module returned them, and targets. Every tensor has
                one row per record. Truth values and texts reach the criterion as they are; numbers are refused.
            **kwargs: Its keyword arguments, likewise.

        Raises:
            ValueError: Outputs were changed on the way, a tensor has no row per record, an argument is a number or
                holds tensors that cannot be told apart by record, or module and criterion were given rows in different
                orders.
        """
        leaves, spec = tree_flatten((args, kwargs))
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        outputs = self._private.outputs(leaves)
        if not outputs:
            loss: Tensor = self.criterion(*args, **kwargs)
            return loss
        self._require_records(leaves, outputs.values())
        free = {n: output.detach().requires_grad_() for n, output in outputs.items()}
        rows = [free.get(n, leaves[n]) for n in places]

        def one(*record: Tensor) -> Tensor:
            values = list(leaves)
            for n, row in zip(places, record, strict=True):
                values[n] = row.unsqueeze(0)
            own_args, own_kwargs = tree_unflatten(values, spec)
            loss = self.criterion(*own_args, **own_kwargs)
            if not isinstance(loss, Tensor):
                raise TypeError(
                    f"criterion returned {type(loss).__name__}: must return a tensor; return the loss only"
                )
            return loss.float().mean()

        if isinstance(self._private, MeasuredModule):
            # The mode that evaluates directions at once has no part in the criterion.
            with torch._C.DisableTorchFunction(), torch.enable_grad():  # the graph shows uses of parameters
                return self._private.losses(self._losses(one, [leaves[n] for n in places]))
        if not self._private.records:
            return self._private.loss(torch.zeros((), device=rows[0].device), [])
        with torch.enable_grad():
            losses = self._losses(one, rows)
            if (
                not self._checked
            ):  # the first batch; the gradient of a penalty on the parameters would be left out
                self._checked, trained = True, self._private.trained_parameters
                own = torch.autograd.grad(losses.sum(), trained, retain_graph=True, allow_unused=True)
                if any(gradient is not None for gradient in own):
                    raise ValueError(USES_PARAMETERS)
            found = torch.autograd.grad(losses.sum(), list(free.values()), allow_unused=True)
        gradients = [
            (output, gradient)
            for output, gradient in zip(outputs.values(), found, strict=True)
            if gradient is not None
        ]
        shown, padding = losses.detach(), self._private.padding
        if padding is not None:
            drawn = (~padding).sum().clamp_min(1)
            return self._private.loss(torch.where(padding, 0.0, shown).sum() / drawn, gradients)
        return self._private.loss(shown.mean(), gradients)

    def _losses(self, one: Callable[..., Tensor], rows: Sequence[Tensor]) -> Tensor:
        """Return the loss of each record, shape (records,); a loop reports what is wrong with the arguments."""
        if self._vmap:
            try:
                losses: Tensor = torch.vmap(one, randomness="different")(*rows)
                return losses
            except (RuntimeError, ValueError, TypeError, NotImplementedError, UserWarning):
                self._vmap = False
        try:
            return torch.stack([one(*record) for record in zip(*rows, strict=True)])
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            raise ValueError(
                "criterion: uses a tensor that it kept from an earlier call, which may come from other records; "
                "compute each loss from the criterion's arguments alone"
            ) from error

    def _require_records(self, leaves: Sequence[Any], outputs: Collection[Tensor]) -> None:
        """Refuse arguments that may come from all records, and outputs that were changed on the way.

        A number may, and a tensor without a row for each record; a tensor in a container would not be cut by record.
        """
        records = self._private.records
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                continue
            if is_number(leaf):
                raise ValueError(
                    f"criterion: an argument is the number {leaf!r}, {NO_NUMBERS} criterion (functools.partial)"
                )
            if isinstance(leaf, Mapping | np.ndarray):
                raise ValueError(
                    f"criterion: an argument is a {type(leaf).__name__}, whose rows cannot be told apart; give the "
                    "tensors in it, such as batch['labels']"
                )
        for tensor in (leaf for leaf in leaves if isinstance(leaf, Tensor)):
            if not tensor.ndim or len(tensor) != records:
                raise ValueError(
                    f"criterion: an argument of shape {tuple(tensor.shape)} has no row for each of the {records} "
                    "records of the batch; give the module's outputs and the targets of the same records, and build "
                    "constants such as class weights into the criterion"
                )
            if tensor.requires_grad and not any(tensor is output for output in outputs):
                raise ValueError(
                    "criterion: takes the module's outputs exactly as they were returned; move what comes between, "
                    "such as a reshape, into the criterion, which is called on one record at a time"
                )
        if handed := self._private.handed:
            given = [leaf for leaf in leaves if not any(leaf is output for output in outputs)]
            given += [leaf for each in outputs for leaf in self._private.arguments.get(id(each), ())]
            require_own_rows(given, handed)


_OWN_RECORD = "the program's own record"
"""What the ledger of a new loop fits before a save stands next to it."""


class PrivateTraining(Shown):
    """A private loop: unpack it as `model, optimizer, criterion, data_loader`; it keeps the ledger of what they do.

    Attributes:
        module: The module given; it learns from private gradients only, until `close`.
        optimizer: The optimizer given.
        criterion: Stands for the criterion given.
        data_loader: Stands for the loader given.
        settings: Every constant of the guarantee.
        physical_batches: How the records of a step run.
        extra: The `extra` of the save that was resumed from, or None.
    """

    def __init__(
        self,
        private: PrivateModule | MeasuredModule,
        optimizer: torch.optim.Optimizer,
        criterion: Callable[..., Tensor],
        data_loader: DataLoader[Any],
        *,
        users: Users | None,
        settings: PrivacySettings,
        folder: Path,
        physical: PhysicalBatches,
        steps: PaidSteps,
        stack: ExitStack,
        accountant: NamedAccountant | None,
        resume: bool,
    ) -> None:
        """Open the ledger, of a new private loop or of the one in the folder, and watch the optimizer.

        `make_private` describes the arguments; the stack holds the contexts that `close` ends.
        """
        self.module, self.optimizer, self.settings, self.folder = private.module, optimizer, settings, folder
        self.criterion = PrivateCriterion(criterion, private)
        self.physical_batches = physical
        self.data_loader = PrivateLoader(
            data_loader, settings, private, steps, users=users, physical=physical
        )
        self.extra: Any = None
        self._private, self._steps, self._accountant = private, steps, accountant
        self._witnesses = list[Witness]()
        if resume:
            self._restore()
        stack.callback(steps.close)
        others = (criterion, data_loader.dataset, data_loader.collate_fn)
        program = program_of(self.module, optimizer, *others, fixed_batches=physical.count is not None)
        steps.open(partial(self._opened, program, resume=resume))
        share_state(steps.ranks, [*self.module.parameters(), *self.module.buffers()], optimizer)
        self._movement, self._until_look = Movement(self.module), STEPS_TO_MOVE
        stack.callback(optimizer.register_step_pre_hook(self.before_step).remove)
        stack.callback(optimizer.register_step_post_hook(self.after_step).remove)
        self._stack = stack.pop_all()  # from here on `close` ends it, not the caller

    def _opened(self, program: Program, *, resume: bool) -> Ledger:
        """Return the open ledger, in the folder of a new private loop or of one that resumes."""
        settings, budget = self.settings, self.settings.budget
        if not resume:
            settings.begin(self.folder)
        if budget is not None and settings.total_steps is not None:
            budget.would_exceed([], [settings.mechanism.repeated(settings.total_steps)])  # known from then on
        return Ledger(
            self.folder / LEDGER_FILE,
            mode=settings.mode,
            delta=settings.target_delta,
            block=STEPS_PAID_AT_ONCE[settings.mode],
            budget=budget,
            witnesses=self._witnesses,
            enforcement=enforcement(settings, processes=self._steps.ranks.world, program=program),
        )

    def _shown(self) -> dict[str, object]:
        settings = self.settings
        return {
            "folder": repr(str(self.folder)),
            "mode": settings.mode,
            "step": self._steps.step,
            "steps_per_epoch": len(self.data_loader),
            "batch_size": settings.batch_size,
            "noise_multiplier": f"{settings.noise_multiplier:.4g}",
            "max_grad_norm": f"{settings.max_grad_norm:g}",
            "relation": settings.relation.value,
            "records_per_user": settings.records_per_user,
        }

    def __iter__(self) -> Iterator[Any]:
        """Yield model, optimizer, criterion and data loader."""
        return iter((self.module, self.optimizer, self.criterion, self.data_loader))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the plain module back, return steps that were reserved and not taken, and close the ledger.

        Of several processes only the first returns steps; the others still count the reserved ones.
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
        """Epsilon of all steps that were paid for, at `target_delta`; 0 before the first step.

        Steps are paid for in blocks that end with the epoch, so that within an epoch this may include steps to come.
        """
        return self.get_epsilon(self.settings.target_delta)

    def get_epsilon(self, delta: float) -> float:
        """Return epsilon of all steps that were paid for, at a delta in [0, 1)."""
        content = self._steps.content
        if not content.payments:
            return 0.0
        return max(guarantee.epsilon for guarantee in content.guarantees(delta=delta))

    def statement(self) -> Statement:
        """Return the guarantee with everything that it rests on; printed, it reads as `opusim account run` shows it.

        Its `to_json` returns the document for a reviewer as plain values; `json.dump` writes them.

        If `make_private` was given an accountant, a second guarantee has its epsilon, with the status claimed.

        Raises:
            NoGuarantee: Nothing was paid for yet.
            ValueError: The accountant given raises an error, or returns no epsilon.
        """
        content = self._steps.content
        if not content.payments:
            raise NoGuarantee(
                "statement: no step was paid for yet; train on a batch of the private loader first"
            )
        witnesses = [witness.name for witness in self._witnesses] or [_OWN_RECORD]
        found = loop_statement(content, self.settings, witnesses)
        if self._accountant is None:
            return found
        claimed = [self._accountant.claimed(content.mechanisms, ours) for ours in found.guarantees]
        return replace(found, guarantees=(*found.guarantees, *claimed))

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
                "optimizer_class": type(self.optimizer).__qualname__,
                "columns": [feedback.column_sum for feedback in points_in(self.module)],
                "writer": dict(self._private.state),
                "generators": generator_states() if self.settings.mode == "experiment" else None,
                "extra": extra,
            }
            write_save(self.folder, state, ledger=position, bound=self.settings.mode == "release")
        self._witnesses = [Witness(name=CHECKPOINT_FILE, position=position)]
        return self.folder / CHECKPOINT_FILE

    # The optimizer

    def before_step(self, *_: Any) -> None:
        """Refuse an optimizer that would move other parameters than private ones; called before each of its steps."""
        self._private.probed.require_same()
        require_own_parameters(self.optimizer, self.module)

    def after_step(self, *_: Any) -> None:
        """Refuse a step without new private gradients; called after it, since a closure writes them within the step."""
        written, self._private.unused_gradients = self._private.unused_gradients, 0
        if not written:
            raise RuntimeError(
                "optimizer.step() without a new backward pass, or a measured batch: call loss.backward() first, on the "
                "loss of the criterion that make_private returned"
            )
        self._until_look -= 1
        if not self._until_look and self._steps.ranks.is_first:
            self._movement.tell(STEPS_TO_MOVE)

    @property
    def padding(self) -> Tensor | None:
        """See `PrivateModule.padding`, which an audit reads."""
        return self._private.padding

    def wrap_writer(self, wrap: Callable[[PrivateGradients], PrivateGradients]) -> None:
        """Wrap the loop's gradient writer, as an audit does to see or change what it is given.

        Args:
            wrap: Returns a writer around the loop's own.

        Raises:
            TypeError: The loop takes no gradients.
        """
        if isinstance(self._private, MeasuredModule):
            raise TypeError(f"private: {TAKES_NO_GRADIENTS}")
        self._private.gradients = wrap(self._private.gradients)

    # The folder

    def _restore(self) -> None:
        """Take module, optimizer and step from the last save, which the first process reads."""
        state, position = self._steps.on_first("opens the loop", lambda: read_save(self.folder))
        self._require_same_parts(state)
        self.module.load_state_dict(state["module"])
        given = optimizer_settings(self.optimizer)
        self.optimizer.load_state_dict(state["optimizer"])
        if self._steps.ranks.is_first:
            self._warn_of_settings(given)
        for feedback, columns in zip(points_in(self.module), state["columns"], strict=True):
            feedback.column_sum = columns
        for name, tensor in self._private.state.items():
            tensor.copy_(state["writer"][name])
        self._steps.step, self.extra, self._private.factor = state["step"], state["extra"], state["factor"]
        self._witnesses = [Witness(name=CHECKPOINT_FILE, position=position)]
        if state["generators"] is not None and self._steps.ranks.is_first:
            set_generator_states(state["generators"])

    def _warn_of_settings(self, given: Sequence[Mapping[str, str | None]]) -> None:
        """Warn of settings of the optimizer in whose place the save has others."""
        groups = zip(given, optimizer_settings(self.optimizer), strict=True)
        changed = [
            f"{name} = {value} (saved: {saved[name]})"
            for ours, saved in groups
            for name, value in ours.items()
            if name in saved and saved[name] != value
        ]
        if changed:
            warnings.warn(
                f"optimizer: was given {', '.join(dict.fromkeys(changed))}, and a resumed loop takes the saved values; "
                "to use the given ones, set them in optimizer.param_groups after make_private",
                stacklevel=5,
            )

    def _require_same_parts(self, state: Mapping[str, Any]) -> None:
        """Refuse (RunFolderError) a module or an optimizer that the save is not of, before anything of it is loaded."""

        def parts(module: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
            shapes = {
                f"module, the shape of {name!r}": tuple(value.shape)
                for name, value in module.items()
                if isinstance(value, Tensor)
            }
            groups = [len(group["params"]) for group in optimizer["param_groups"]]
            return {"optimizer, parameters by group": groups, **shapes}

        points, kind = "module, the number of its FeedbackAlignment", type(self.optimizer).__qualname__
        ours = {"optimizer": kind, points: len(points_in(self.module))}
        ours |= parts(self.module.state_dict(), self.optimizer.state_dict())
        # earlier versions kept no class
        theirs = {"optimizer": state.get("optimizer_class", kind), points: len(state["columns"])}
        theirs |= parts(state["module"], state["optimizer"])
        for name in (*ours, *theirs):
            found, kept = (each.get(name, "missing") for each in (ours, theirs))
            if found != kept:
                raise RunFolderError(
                    f"{name} = {found}: the save in {self.folder} has {kept}; resume it with the same module and "
                    "optimizer, or start a new folder"
                )
