"""Zeroth-order steps in a user's training loop: an optimizer that takes losses instead of gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from typing_extensions import override

from opusim import checks
from opusim.processes.ranks import Ranks
from opusim.randomness.streams import derive_seed
from opusim.training.networks.base import preserved_modes
from opusim.training.zeroth_order.at_once import TwoSides
from opusim.training.zeroth_order.perturbation import InPlacePerturbation, StepEntry
from opusim.training.zeroth_order.trainer import ScalarRelease

_ALIKE, _ALIKE_IN_HALF = 1e-3, 0.1
"""Largest difference that rounding makes in a record's loss between batches of two sizes, over one plus the loss."""
_PLAIN = ScalarRelease(clip=None, divisor=1.0)
"""Sums without a clip."""


class ZerothOrder(torch.optim.Optimizer):
    """Train a module by forward passes only, in a loop of your own.

    A step draws K directions z_j and moves theta by -lr / K sum_j s_j z_j, s_j the mean over all records since the last
    step of (l_i(theta + phi z_j) - l_i(theta - phi z_j)) / (2 phi): the estimator of `opusim train zo`. There is no
    graph, and no copy of the parameters but float32 copies of bfloat16 and float16 ones in a memory-mapped file. Only
    parameters that require a gradient move: freeze the others, which may be quantised.

        >>> import torch
        >>> from opusim.training import ZerothOrder
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = ZerothOrder(model, lr=0.1, directions=16, rank=1)
        >>> x, y = torch.ones(8, 4), torch.ones(8, dtype=torch.int64)
        >>> def losses(x, y):
        ...     return torch.nn.functional.cross_entropy(model(x), y, reduction="none")
        >>> before = optimizer.step(losses, x, y)
        >>> bool(optimizer.step(losses, x, y) < before)
        True

    `measure` takes the place of a backward pass, so a step over several batches is one `measure` for each and a `step`
    without arguments. Learning-rate schedulers of torch work. The module is evaluated in evaluation mode, without
    dropout.

    By itself it is not private: the loop's batches are not drawn secretly, nothing is clipped, noised or paid for in a
    ledger. `opusim.make_private` takes it as its optimizer and does all that.

    Args:
        module: At least one parameter requires a gradient.
        lr: Learning rate, at least 0.
        perturbation: phi, above 0.
        directions: K, from 1 to 1,024.
        rank: Rank of the directions in matrices, from 1 to 8; many of them then share a forward pass. None takes full
            directions, one after another.
        weight_decay: lambda, at least 0: a step multiplies the parameters by 1 - lr lambda first.
        seed: Seed of the directions, in [0, 2^64); public, and in a private loop not chosen by the records.
        rows_at_once: Most rows of a forward pass that evaluates several directions, two for each record and direction.

    Raises:
        TypeError, ValueError: An argument is wrong.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        lr: float,
        perturbation: float = 1e-3,
        directions: int = 1,
        rank: int | None = None,
        weight_decay: float = 0.0,
        seed: int = 0,
        rows_at_once: int = 256,
    ) -> None:
        checks.instance(nn.Module, module=module)
        checks.non_negative(lr=lr, weight_decay=weight_decay)
        checks.positive(perturbation=perturbation)
        checks.integer(minimum=1, maximum=1024, directions=directions)
        checks.integer(minimum=2, rows_at_once=rows_at_once)
        checks.integer(minimum=0, maximum=2**64 - 1, seed=seed)
        if rank is not None:
            checks.integer(minimum=1, maximum=8, rank=rank)
        if Ranks().world > 1:
            raise ValueError(
                "module: ZerothOrder runs in one process, and this one is in a group; use opusim train zo, which "
                "shares its batches among processes"
            )
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not trained:
            raise ValueError(
                "module has no parameter that requires a gradient; call requires_grad_(True) on some"
            )
        super().__init__(trained, {"lr": lr, "seed": seed, "steps": 0})
        self.module, self.directions = module, directions
        """The module that it trains, and K."""
        self.settings: dict[str, float | None] = {
            "perturbation": perturbation,
            "directions": directions,
            "rank": rank,
            "weight_decay": weight_decay,
        }
        """The arguments that no parameter group holds, by name."""
        self._perturbation = InPlacePerturbation(
            trained, perturbation=perturbation, weight_decay=weight_decay, rank=rank
        )
        self._sides = TwoSides(module, self._perturbation, rows=rows_at_once, around=self._passing)
        self._probed = rank is None
        self._sums, self._records = torch.zeros(directions, dtype=torch.float64), 0.0
        self.private: Callable[[Callable[..., Tensor], tuple[Any, ...]], Tensor] | None = None
        """Takes the place of `measure` in a private loop."""
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Makes a context around each pass of the module, such as one that puts back what the pass changed."""

    def __repr__(self) -> str:
        (group,) = self.param_groups
        given = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{type(self).__name__}(lr={group['lr']:g}, {given}, seed={group['seed']}, steps={group['steps']})"

    @property
    def at_once(self) -> bool:
        """Whether a pass evaluates several directions, without moving the parameters."""
        return self._sides.at_once

    @torch.no_grad()
    def measure(self, losses: Callable[..., Tensor], *batch: Any) -> Tensor:
        """Evaluate a batch on both sides of the next step's directions; batches add up until `step`.

        Args:
            losses: Returns the loss of each record, shape (records,), by calling the module. A record's loss depends on
                its own rows only.
            *batch: Its arguments: tensors whose first axis is that of the records, or lists, tuples and mappings of
                such. Without any, `losses` supplies its batch, and directions are evaluated one after another.

        Returns:
            The mean loss on the plus side of the first direction.

        Raises:
            ValueError: `losses` does not return a loss for each record.
        """
        if self.private is not None:
            return self.private(losses, batch)
        if not self._probed:  # find out, once, whether directions can be evaluated at once
            self._probed, self._sides.reason = True, "" if batch else "losses are called without a batch"
            if batch:
                half = any(p.dtype.itemsize < 4 and p.is_floating_point() for p in self.module.parameters())
                tolerance = _ALIKE_IN_HALF if half else _ALIKE
                first = tree_map(lambda v: v[:1] if isinstance(v, Tensor) and v.ndim else v, batch)
                with self.evaluation_mode():
                    among, alone = _checked(losses(*batch))[:1], _checked(losses(*first))
                if torch.allclose(among, alone, rtol=tolerance, atol=tolerance, equal_nan=True):
                    self._sides.probe(losses, batch)
                else:
                    self._sides.reason = "the loss of a record depends on other records of its batch"
            self._warn(stacklevel=4)
        elif self._sides.at_once and not batch:
            raise ValueError(
                "batch: must be given to each call if it was to the first; give the arguments of losses"
            )
        sums, first = self.sums(_PLAIN, losses, batch)
        self.add(sums, len(first))
        return first.mean()

    @torch.no_grad()
    def sums(
        self,
        release: ScalarRelease,
        losses: Callable[..., Tensor],
        batch: tuple[Any, ...],
        *,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return what a batch adds to the next step, which is not taken yet.

        Args:
            release: How loss differences are clipped.
            losses: See `measure`.
            batch: See `measure`.
            keep: Marks the records that count, bool, shape (records,); None for all.

        Returns:
            The sums of the differences along each direction, float64 on the processor, shape (K,); the losses on the
            plus side of the first direction, shape (records,).
        """
        try:
            found = list(self._sides.pairs(self._seeds, losses, batch))
        finally:
            if not self._sides.at_once:
                self._perturbation.restore()
        sums, _, _ = release.sums(((_checked(plus), minus) for plus, minus in found), keep=keep)
        return torch.stack(sums).cpu(), found[0][0]

    def add(self, sums: Tensor, records: float) -> None:
        """Add sums of loss differences to the next step.

        Args:
            sums: The sum along each direction, float64, shape (K,).
            records: The number of records that they are divided by.
        """
        self._sums += sums
        self._records += records

    def prepare(self, function: Callable[..., Tensor], batch: tuple[Any, ...]) -> None:
        """Find out on invented records whether directions can be evaluated at once.

        Args:
            function: Runs the module; see `measure`.
            batch: Invented records.
        """
        self._probed = True
        with self.evaluation_mode():
            self._sides.probe(function, batch)
        self._warn(stacklevel=4)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[..., Any] | None = None, *batch: Any) -> Any:
        """Take a step along the directions; see `measure`, which it calls first if it is given losses.

        Args:
            closure: `losses` of `measure`, or None to use what was measured since the last step.
            *batch: See `measure`.

        Returns:
            What `measure` returns, or None.

        Raises:
            RuntimeError: Nothing was measured.
        """
        loss = None if closure is None else self.measure(closure, *batch)
        if not self._records:
            raise RuntimeError("step: nothing was measured; give losses and a batch, or call measure first")
        (group,) = self.param_groups
        scalars = self._sums / (2 * self._perturbation.phi * self._records)
        entry = StepEntry.rounded(rate=float(group["lr"]), seeds=self._seeds, scalars=tuple(scalars.tolist()))
        copied = self._perturbation.copies
        whole = [number for number in range(len(self._perturbation.tensors)) if number not in copied]
        self._perturbation.update(entry, whole)
        if copied:
            self._perturbation.settle()
        group["steps"] += 1
        self._sums, self._records = torch.zeros_like(self._sums), 0.0
        return loss

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what was measured since the last step."""
        self._sums, self._records = torch.zeros_like(self._sums), 0.0

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the directions of a saved optimizer; load the module's parameters before.

        Float32 copies of half-precision parameters start anew from these.
        """
        super().load_state_dict(state_dict)
        self._perturbation.reset_copies()

    @property
    def _seeds(self) -> tuple[int, ...]:
        """Seeds of the next step's directions; they depend on the seed and the number of steps only."""
        (group,) = self.param_groups
        root = derive_seed(group["seed"], "directions")
        return tuple(derive_seed(root, "direction", group["steps"], j) for j in range(self.directions))

    def _warn(self, *, stacklevel: int) -> None:
        """Warn if directions are evaluated one after another, although a rank was given."""
        if self._sides.reason:
            warnings.warn(
                f"rank = {self._perturbation.rank}: directions are evaluated one after another, which takes longer: "
                f"{self._sides.reason}",
                stacklevel=stacklevel,
            )

    @contextmanager
    def _passing(self) -> Iterator[None]:
        with self.evaluation_mode(), self.around():
            yield

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Put the module into evaluation mode within the block."""
        with preserved_modes(self.module):
            self.module.eval()
            yield


def _checked(losses: Any) -> Tensor:
    """Return losses, one for each record; raise ValueError for another type or shape."""
    if not isinstance(losses, Tensor) or losses.ndim != 1:
        found = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"losses: must return the loss of each record, shape (records,), not {found}; take reduction='none' and "
            "the mean over a record's tokens"
        )
    return losses
