"""Make a data set of user-supplied arrays; every array is checked before anything is computed with it."""

from __future__ import annotations

import numpy as np
import torch

from opusim import checks
from opusim.randomness.streams import derive_seed
from training.config.sections import SplitRule
from training.data.dataset import Dataset, Split, Standardisation
from training.data.splits import Ids, split_by_content, split_by_id, split_by_index

Array = np.ndarray | torch.Tensor


def from_arrays(
    x: Array,
    y: Array,
    *,
    n_classes: int | None = None,
    validation_fraction: float,
    split_seed: int,
    split: SplitRule = "index",
    ids: Ids | None = None,
    test: tuple[Array, Array] | None = None,
    standardise: Standardisation | None = None,
    name: str = "arrays",
) -> Dataset:
    """Make a data set of features and labels.

    Labels never decide which records are held out for validation. The arrays are copied.

    - ``split="index"`` holds out the first ``round(validation_fraction * n)`` positions of a seeded permutation and
      trains on the others in its order. Use it if n is fixed: for replace-one, zero-out and label guarantees.
    - ``split="content"`` holds a record out with probability `validation_fraction`, by a keyed hash of its features.
      Adding a record then changes one part by that record and no other.
    - ``split="id"`` does the same by a keyed hash of the record's ID.

    Args:
        x: Features, shape (n, d), real and finite.
        y: Labels, shape (n,), whole numbers from 0 to ``n_classes - 1``.
        n_classes: Number of classes, at least 2. ``None`` takes one more than the largest label of `y`. That number
            depends on the records, so state `n_classes` if you ask for a guarantee.
        validation_fraction: Share of the records to hold out, in [0, 1).
        split_seed: Chooses the validation records, in [0, 2^64); public.
        split: Rule that chooses the validation records, see the table.
        ids: One ID per record, whole numbers or strings, shape (n,); required by ``split="id"`` only.
        test: Test features and labels, with the same requirements as `x` and `y`.
        standardise: Constants to apply to all features, or ``None`` to use the features as they are. A run with a
            guarantee refuses constants of `Standardisation.from_data`, which are not public.
        name: Name of the data set in reports.

    Returns:
        The data set; features are float32, labels int64, both on the CPU.

    Raises:
        TypeError: An argument is not an array, features are complex or labels are not whole numbers.
        ValueError: A shape, a value or a range is wrong.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(100, 5))
        >>> data = from_arrays(x, x[:, 0] > 0, validation_fraction=0.1, split_seed=0)
        >>> len(data.train), len(data.validation), data.n_classes
        (90, 10, 2)
    """
    checks.integer(split_seed=split_seed, minimum=0, maximum=2**64 - 1)
    features, labels = checked_features(x, "x"), checked_labels(y, "y")
    check_lengths(features, labels, "x", "y")
    classes = _number_of_classes(labels, n_classes)
    standardisation = standardise or Standardisation.identity()
    test_split = None
    if test is not None:
        test_split = _test_split(test, features.shape[1], classes, standardisation)
    kept, held_out = _split(features, ids, split, validation_fraction, split_seed)
    features = standardisation.apply(features)
    return Dataset(
        name=name,
        n_classes=classes,
        train=Split(features[kept], labels[kept]),
        validation=Split(features[held_out], labels[held_out]),
        test=test_split,
        standardisation=standardisation,
        split=split,
    )


def _split(
    features: torch.Tensor, ids: Ids | None, split: SplitRule, fraction: float, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of training and validation records under a rule.

    Raises:
        ValueError: The rule is unknown, IDs are missing, superfluous or too few, or no record is left to train on.
    """
    checks.choice(("index", "content", "id"), split=split)
    if (ids is not None) != (split == "id"):
        raise ValueError(
            f"split = {split!r} with{'out' if ids is None else ''} ids: split = 'id' needs ids, and only it takes them"
        )
    if split == "index":
        return split_by_index(len(features), fraction, derive_seed(seed, "validation"))
    if ids is None:
        kept, held_out = split_by_content(features, fraction, seed)
    else:
        if len(ids) != len(features):
            raise ValueError(
                f"x has {len(features)} records and ids {len(ids)} entries; give one ID per record"
            )
        kept, held_out = split_by_id(ids, fraction, seed)
    if not len(kept):
        raise ValueError(
            f"validation_fraction = {fraction:g} leaves no record for training under split = {split!r}; lower it, or "
            "change split_seed"
        )
    return kept, held_out


def _test_split(
    test: tuple[Array, Array], n_features: int, n_classes: int, standardisation: Standardisation
) -> Split:
    """Return the checked and standardised test records."""
    if not isinstance(test, tuple) or len(test) != 2:
        raise TypeError(f"test must be a pair (features, labels), got {type(test).__name__}")
    features, labels = checked_features(test[0], "test[0]"), checked_labels(test[1], "test[1]")
    check_lengths(features, labels, "test[0]", "test[1]")
    if features.shape[1] != n_features:
        raise ValueError(f"test[0] has {features.shape[1]} features and x has {n_features}; they must agree")
    check_range(labels, n_classes, "test[1]")
    return Split(standardisation.apply(features), labels)


def checked_features(values: Array, name: str) -> torch.Tensor:
    """Check features and return them as float32, shape (n, d).

    Raises:
        TypeError: They are no array, or complex.
        ValueError: The shape is wrong, there is no record, or a number is not finite as float32.
    """
    tensor = _tensor(values, name)
    if tensor.ndim > 2:
        raise ValueError(
            f"{name} must have shape (n, d), got {tuple(tensor.shape)}: flatten each record with "
            f"{name}.reshape(len({name}), -1)"
        )
    if tensor.ndim != 2 or tensor.shape[1] == 0:
        raise ValueError(f"{name} must have shape (n, d) with d at least 1, got {tuple(tensor.shape)}")
    if len(tensor) == 0:
        raise ValueError(f"{name} is empty: it has shape {tuple(tensor.shape)} and needs at least one record")
    if tensor.is_complex():
        raise TypeError(f"{name} must be real, got {tensor.dtype}: give real and imaginary parts as features")
    features = tensor.to(torch.float32)
    finite = torch.isfinite(features).all(dim=1)
    if not bool(finite.all()):
        bad = torch.nonzero(~finite).reshape(-1)
        raise ValueError(
            f"{name} must be finite as float32, but {len(bad)} of {len(features)} records hold NaN, an "
            f"infinity or a number too large, the first at position {int(bad[0])}: remove or fill them"
        )
    return features


def checked_labels(values: Array, name: str) -> torch.Tensor:
    """Check labels and return them as int64, shape (n,).

    Raises:
        TypeError: They are no array of whole numbers.
        ValueError: The shape is wrong.
    """
    tensor = _tensor(values, name)
    if tensor.ndim != 1:
        raise ValueError(
            f"{name} must have shape (n,), got {tuple(tensor.shape)}: use {name}.reshape(-1) for a column, "
            f"{name}.argmax(1) for one-hot labels"
        )
    if tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(
            f"{name} must hold whole numbers, got {tensor.dtype}: for a numpy array of whole numbers use "
            f"{name}.astype('int64'), for a torch tensor {name}.long()"
        )
    return tensor.to(torch.int64, copy=True)


def _tensor(values: Array, name: str) -> torch.Tensor:
    """Return the array as a CPU tensor."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu()
    if not isinstance(values, np.ndarray):
        raise TypeError(
            f"{name} must be a numpy array or a torch tensor, got {type(values).__name__}: "
            f"use numpy.asarray({name})"
        )
    if values.dtype.kind not in "biufc":
        raise TypeError(f"{name} must hold numbers, got dtype {values.dtype}: encode them as numbers first")
    if values.dtype == np.longdouble or values.dtype == np.clongdouble:
        raise TypeError(f"{name} has dtype {values.dtype}, which torch lacks: use {name}.astype('float64')")
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("="), order="C"))  # a copy


def check_lengths(features: torch.Tensor, labels: torch.Tensor, x_name: str, y_name: str) -> None:
    """Refuse features and labels of different lengths."""
    if len(features) != len(labels):
        raise ValueError(
            f"{x_name} has {len(features)} records and {y_name} {len(labels)} labels; give one label per record"
        )


def _number_of_classes(labels: torch.Tensor, n_classes: int | None) -> int:
    """Return the stated number of classes, or one more than the largest label."""
    least = int(labels.min())
    if n_classes is None and least > 0:
        raise ValueError(
            f"y must hold labels from 0, got {least} to {int(labels.max())}: subtract {least} from y, or "
            "state n_classes if the lower classes have no record"
        )
    classes = int(labels.max()) + 1 if n_classes is None else n_classes
    checks.integer(n_classes=classes, minimum=2, remedy="it counts all classes, also those without a record")
    check_range(labels, classes, "y")
    return classes


def check_range(labels: torch.Tensor, n_classes: int, name: str) -> None:
    """Refuse labels outside 0 .. n_classes - 1."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= n_classes:
        raise ValueError(
            f"{name} must hold labels from 0 to {n_classes - 1}, got {low} to {high}: number the classes from 0, "
            "or state n_classes"
        )
