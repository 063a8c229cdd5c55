"""What the network learns from."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from training.config.section import Section

SplitRule = Literal["index", "content", "id"]


class DataConfig(Section):
    """What the network learns from."""

    name: str = "digits"
    """digits, mnist, fashion-mnist, cifar-10; "arrays" where training.train was given user-supplied ones."""
    validation_fraction: float = Field(0.1, ge=0.0, lt=1.0)
    """Share of the training records held out for validation (0.1 in the PDFA paper)."""
    split_seed: int = Field(0, ge=0)
    """Public seed of the rule that picks the validation records; it never looks at labels."""
    split: SplitRule | None = None
    """What decides whether a record is held out. index: its place among all n, by a seeded permutation. content: a
    keyed hash of its own features. id: a keyed hash of the ID that was given with it. None: id where IDs were given,
    else content for protection.relation = 'add_or_remove_one', else index."""
    n_classes: int | None = Field(None, ge=2)
    """Number of classes of user-supplied arrays; None reads it off the labels (one more than the largest)."""
    standardise: bool = True
    """Subtract and divide by public constants of the data set."""
    mean: float | None = None
    """Another public constant to subtract instead, for features in [0, 1]; together with std."""
    std: float | None = Field(None, gt=0.0)
    """Another public constant to divide by instead; together with mean."""
    components: int | None = Field(None, ge=1)
    """Replace the features by so many principal components of the training records; for public features only."""
    whitening: float = Field(0.5, ge=0.0, le=1.0)
    """How far the components are brought to one variance: 0 not at all, 1 completely."""

    @model_validator(mode="after")
    def _check_constants(self) -> Self:
        if (self.mean is None) != (self.std is None):
            raise ValueError(f"mean = {self.mean} and std = {self.std} go together; give both or neither")
        return self
