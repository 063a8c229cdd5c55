"""A loss that belongs to single records: the user's criterion, called on one record at a time.

A loss over a batch may mix records: with `ignore_index`, a mean over tokens divides by the number of counted tokens of
all records, and contrastive losses compare records. A clip then bounds nothing. Here record i has the loss

    l_i = mean of criterion(outputs of record i, targets of record i),

both with a first dimension of 1, so that l_i depends on no other record, whatever the criterion computes. torch.vmap
calls it for all records at once; a criterion that vmap cannot map is called in a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from opusim.training.private_loop.inputs import NO_NUMBERS, is_number
from opusim.training.private_loop.module import PrivateModule

Criterion = Callable[..., Tensor]


class PrivateCriterion(nn.Module):
    """Stands for the user's criterion in a private loop.

    On outputs of the private module's training pass it returns the mean of the records' losses; `backward` on it, once,
    writes the private gradients. On anything else, such as outputs in evaluation mode, it is the criterion itself.

    Args:
        criterion: Maps outputs and targets to a loss; any reduction. Without parameters that learn.
        module: The private module.

    Raises:
        TypeError: The criterion cannot be called.
        ValueError: It has parameters that learn.
    """

    def __init__(self, criterion: Criterion, module: PrivateModule) -> None:
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
            ValueError: Outputs were changed on the way, a tensor has no row per record, an argument is a number, or it
                holds tensors that cannot be told apart by record.
        """
        leaves, spec = tree_flatten((args, kwargs))
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        outputs = {n: leaves[n] for n in places if self._private.is_output(leaves[n])}
        if not outputs:
            loss: Tensor = self.criterion(*args, **kwargs)
            return loss
        self._require_plain(leaves)
        self._require_rows([leaves[n] for n in places])
        free = {n: output.detach().requires_grad_() for n, output in outputs.items()}
        rows = [free.get(n, leaves[n]) for n in places]

        def one(*record: Tensor) -> Tensor:
            values = list(leaves)
            for n, row in zip(places, record, strict=True):
                values[n] = row.unsqueeze(0)
            own_args, own_kwargs = tree_unflatten(values, spec)
            return self._scalar(self.criterion(*own_args, **own_kwargs))

        if not self._private.records:
            return self._private.loss(torch.zeros((), device=rows[0].device), [])
        with torch.enable_grad():
            losses = self._losses(one, rows)
            self._refuse_parameters(losses)
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
        """Return the loss of each record, shape (records,)."""
        if self._vmap:
            try:
                mapped: Tensor = torch.vmap(one, randomness="different")(*rows)
                return mapped
            except (RuntimeError, ValueError, TypeError, NotImplementedError, UserWarning):
                self._vmap = False  # a loop reports what is wrong with the arguments, if anything is
        return torch.stack([one(*record) for record in zip(*rows, strict=True)])

    def _refuse_parameters(self, losses: Tensor) -> None:
        """Refuse a criterion, at its first batch, that uses the module's parameters: their gradient is left out."""
        if self._checked:
            return
        self._checked = True
        found = torch.autograd.grad(
            losses.sum(), self._private.trained_parameters, retain_graph=True, allow_unused=True
        )
        if any(gradient is not None for gradient in found):
            raise ValueError(
                "criterion: uses parameters of the module, such as a penalty on them, and that gradient would be left "
                "out; use the optimizer's weight_decay, or compute what it needs in the module"
            )

    @staticmethod
    def _scalar(loss: Any) -> Tensor:
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"criterion returned {type(loss).__name__}: must return a tensor; return the loss only"
            )
        return loss.float().mean()

    @staticmethod
    def _require_plain(leaves: Sequence[Any]) -> None:
        """Refuse numbers, and containers whose tensors would reach the criterion whole, with all records."""
        for leaf in leaves:
            if is_number(leaf):
                raise ValueError(
                    f"criterion: an argument is the number {leaf!r}, {NO_NUMBERS} criterion (functools.partial)"
                )
            if isinstance(leaf, Mapping | np.ndarray):
                raise ValueError(
                    f"criterion: an argument is a {type(leaf).__name__}, whose rows cannot be told apart; give the "
                    "tensors in it, such as batch['labels']"
                )

    def _require_rows(self, tensors: Sequence[Tensor]) -> None:
        records = self._private.records
        for tensor in tensors:
            if not tensor.ndim or len(tensor) != records:
                raise ValueError(
                    f"criterion: an argument of shape {tuple(tensor.shape)} has no row for each of the {records} "
                    "records of the batch; give the module's outputs and the targets of the same records, and build "
                    "constants such as class weights into the criterion"
                )
            if tensor.requires_grad and not self._private.is_output(tensor):
                raise ValueError(_CHANGED)


_CHANGED = (
    "criterion: takes the module's outputs exactly as they were returned; move what comes between, such as a reshape, "
    "into the criterion, which is called on one record at a time"
)
