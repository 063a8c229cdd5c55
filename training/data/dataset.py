"""What a trainer is given: records with labels, in parts that never mix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from training.data.standardisation import Standardisation

if TYPE_CHECKING:
    from training.data.components import PrincipalComponents


@dataclass(frozen=True)
class Split:
    """Some records of a data set, in a fixed order.

    Attributes:
        x: Features, shape (n, d), float32.
        y: Labels, shape (n,), int64, counted from 0.
    """

    x: torch.Tensor
    y: torch.Tensor

    def __post_init__(self) -> None:
        if self.x.ndim != 2 or self.x.dtype != torch.float32:
            raise ValueError(
                f"x must be float32 of shape (n, d), got {self.x.dtype} of shape {tuple(self.x.shape)}"
            )
        if self.y.shape != self.x.shape[:1] or self.y.dtype != torch.int64:
            raise ValueError(
                f"y must be int64 of shape ({len(self.x)},), got {self.y.dtype} of shape "
                f"{tuple(self.y.shape)}"
            )

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set, ready to train on.

    Attributes:
        name: How reports call it.
        n_classes: Number of classes; every label is below it.
        train: The records that a guarantee is about.
        validation: Records held out of the training set; empty if none were.
        test: Records that were never in the training set; ``None`` if there are none.
        standardisation: What was already applied to all parts alike.
        components: What replaced the standardised features by fewer ones; None where nothing did.
        split: The rule that parted train from validation: index, content or id (see `from_arrays`); given where the
            two were handed over as they are, so that a guarantee is about the records of `train` alone.
    """

    name: str
    n_classes: int
    train: Split
    validation: Split
    test: Split | None
    standardisation: Standardisation
    components: PrincipalComponents | None = None
    split: Literal["index", "content", "id", "given"] = "given"

    @property
    def n_features(self) -> int:
        """Number of features of a record."""
        return self.train.x.shape[1]
