"""Make a data set of user-supplied arrays, and hold records out without looking at labels: by index, content or ID.

Every array is checked before anything is computed with it. By index, the split also depends on the number of records:
adding a record can move another one to the other part. By content or ID, a record's part depends only on that record
and a public key, so adding a record changes one part by that record and no other.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import torch

from opusim import checks
from opusim.randomness.streams import derive_seed
from opusim.training.config.sections import SplitRule
from opusim.training.data.dataset import (
    PADDING,
    Dataset,
    Split,
    Standardisation,
    Target,
    is_mapped,
    is_text,
    numbered,
    numbers_and_names,
    on_disk,
    row_blocks,
)
from opusim.training.data.users import keys_of

Ids = np.ndarray | torch.Tensor | Sequence[str] | Sequence[int] | Sequence[str | None]
"""An ID for each record: whole numbers or strings; None if a record has no ID."""


def seeded_permutation(n: int, seed: int) -> torch.Tensor:
    """Return a uniformly random order of ``0 .. n - 1``, int64, shape (n,).

    The order sorts raw 64-bit words of PCG64. NumPy never changes the stream of a bit generator, but may change that of
    ``Generator.permutation``, so this split is the same in all versions. Two equal words keep their order; the
    probability of any is below n^2 / 2^65.
    """
    words = np.random.PCG64(seed).random_raw(n)
    return torch.from_numpy(np.argsort(words, kind="stable"))


def split_by_index(n: int, fraction: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split ``0 .. n - 1`` at random into a kept part and ``round(fraction * n)`` held-out positions, both int64.

    The split depends only on the number of records and the seed. It is not stratified: with equal shares of classes, a
    label would decide which part another record falls into, which no label guarantee covers. Both parts are in random
    order, so consecutive blocks of the kept part are random batches. Raises ValueError for a fraction outside [0, 1) or
    an empty part.
    """
    _check_fraction(fraction)
    n_out = round(fraction * n)
    if n_out == n or (fraction > 0 and n_out == 0):
        raise ValueError(
            f"validation_fraction={fraction} of {n} records holds out {n_out} and leaves {n - n_out}; "
            "use 0 for no validation, or another fraction"
        )
    order = seeded_permutation(n, seed)
    return order[n_out:], order[:n_out]


def split_by_content(features: torch.Tensor, fraction: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split records, shape (n, d), by a keyed hash of each one's features; return the kept and held-out positions.

    A record is held out if BLAKE2b-64 of its features as little-endian float32, under the key ``derive_seed(seed,
    "split by content")``, is below ``fraction * 2^64``. -0.0 counts as 0.0, and all NaN as one. Equal records fall into
    the same part, and either part may be empty. Raises ValueError for a fraction outside [0, 1).
    """
    rows = features.detach().cpu().numpy().astype("<f4")  # a copy
    rows[np.isnan(rows)] = np.nan
    rows[rows == 0] = 0.0
    return _split_by_hash((row.tobytes() for row in rows), fraction, derive_seed(seed, "split by content"))


def split_by_id(ids: Ids, fraction: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split records by a keyed hash of each one's ID; otherwise like `split_by_content`, with a key of its own.

    A whole number is hashed as ``i`` and its decimal digits, a string as ``s`` and its UTF-8 bytes. Records that share
    an ID fall into the same part. A record without an ID, None, is kept. Raises TypeError for an ID that is neither a
    whole number nor a string, and ValueError if IDs write one number in two ways.
    """
    keys = keys_of(ids, count=len(ids), name="ids")
    marks = ("i" if key and _WHOLE.fullmatch(key) else "s" for key in keys)
    contents = (None if k is None else f"{mark}{k}".encode() for mark, k in zip(marks, keys, strict=True))
    return _split_by_hash(contents, fraction, derive_seed(seed, "split by ID"))


def split_records(
    features: torch.Tensor, ids: Ids | None, split: SplitRule, fraction: float, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of training and validation records under a rule.

    Raises ValueError for an unknown rule, IDs that are missing, superfluous or too few, or no record left to train on.
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


_MANY_CLASSES = 10**6
"""Labels from this number on count as codes: no network has that many outputs."""
_WHOLE = re.compile("0|-?[1-9][0-9]*")


def _split_by_hash(
    contents: Iterable[bytes | None], fraction: float, key: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions whose keyed hash is at least the fraction of 2^64, and the others."""
    _check_fraction(fraction)
    threshold = int(Fraction(fraction) * 2**64)  # exact: a double below 1 has at most 53 digits
    public = key.to_bytes(8, "little")
    held_out = [
        content is not None
        and int.from_bytes(hashlib.blake2b(content, digest_size=8, key=public).digest(), "little") < threshold
        for content in contents
    ]
    marks = torch.tensor(held_out, dtype=torch.bool)
    return torch.nonzero(~marks).reshape(-1), torch.nonzero(marks).reshape(-1)


def _check_fraction(fraction: float) -> None:
    if not 0 <= fraction < 1:
        raise ValueError(f"validation_fraction must be at least 0 and below 1, got {fraction}")


Array = np.ndarray | torch.Tensor
Pair = tuple[Array, Array | None]
"""Records and what to predict of them; None predicts the next token."""
AskedTarget = Literal["auto", "class", "tokens", "real", "labels"]
AskedInputs = Literal["auto", "features", "tokens"]


def from_arrays(
    x: Array,
    y: Array | None,
    *,
    n_classes: int | None = None,
    validation_fraction: float,
    split_seed: int,
    split: SplitRule = "index",
    ids: Ids | None = None,
    test: Pair | None = None,
    standardise: Standardisation | None = None,
    name: str = "arrays",
    target: AskedTarget = "auto",
    inputs: AskedInputs = "auto",
    vocabulary: int | None = None,
    classes: Sequence[str] = (),
) -> Dataset:
    """Make a data set of records and what to predict of them.

    Labels never decide which records are held out for validation. The arrays are copied; features that are mapped from
    a file (``numpy.load(file, mmap_mode="r")``) are copied to a temporary file, a block at a time, and stay there.

    - ``split="index"`` holds out the first ``round(validation_fraction * n)`` positions of a seeded permutation and
      trains on the others in its order. Use it if n is fixed: for replace-one, zero-out and label guarantees.
    - ``split="content"`` holds a record out with probability `validation_fraction`, by a keyed hash of its features.
      Adding a record then changes one part by that record and no other.
    - ``split="id"`` does the same by a keyed hash of the record's ID.

    Args:
        x: Features, real and finite, shape (n, d) or (n, ...) such as images (n, c, h, w), whose shape
            `Dataset.record_shape` keeps; or tokens, whole numbers, shape (n, T).
        y: What to predict, by `target`. For tokens, None predicts the next token: x (n, T + 1) gives records of its
            first T tokens, and its last T tokens are y.
        n_classes: Number of classes, at least 2. ``None`` takes the number k of different labels, which must then be 0
            to k - 1. That number depends on the records, so state `n_classes` if you ask for a guarantee.
        validation_fraction: Share of the records to hold out, in [0, 1).
        split_seed: Chooses the validation records, in [0, 2^64); public.
        split: Rule that chooses the validation records, see the table.
        ids: One ID per record, whole numbers or strings, shape (n,); required by ``split="id"`` only. A record without
            one, None, is never held out. If users are protected, they are the users' IDs (`Dataset.owners`).
        test: Test records and what to predict of them, with the same requirements as `x` and `y`.
        standardise: Constants to apply to all features, or ``None`` to use the features as they are. A run with a
            guarantee refuses constants of `Standardisation.from_data`, which are not public.
        name: Name of the data set in reports.
        target: ``"class"``, y (n,) of whole numbers from 0 to ``n_classes - 1``; ``"tokens"``, y (n, T) of whole
            numbers; ``"real"``, y (n,) or (n, k); ``"labels"``, y (n, k) of zeros and ones. ``"auto"`` takes tokens if
            `y` is None, or if x and y are int64 of one shape (n, T), else class.
        inputs: Whether x holds features or tokens; ``"auto"`` takes tokens only if tokens are predicted.
        vocabulary: Number of token values in x. ``None`` takes `n_classes` if tokens are predicted, else one more than
            the largest token.
        classes: Names of the classes for `y` of strings, in the order of their numbers; empty takes the names in y,
            sorted.

    Returns:
        The data set on the CPU; features are float32, tokens and classes int64, real numbers and labels float32.

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
    kind = _target_of(x, y, target)
    y, names = numbers_and_names(y, classes, kind)
    if kind == "tokens" and inputs == "features":
        raise ValueError(
            "data.inputs = 'features' has no next token; use 'tokens', or another data.target than 'tokens'"
        )
    tokens = "tokens" in (inputs, kind)
    if tokens and standardise is not None:
        raise ValueError("data.mean and data.std are for features, and x holds tokens; leave them out")
    features, labels, record_shape = _checked(x, y, kind, tokens=tokens, names=("x", "y"))
    vocabulary = _vocabulary(features, labels, kind, vocabulary, n_classes, tokens=tokens)
    form = RecordForm(
        target=kind,
        n_classes=_number_of_outputs(labels, kind, vocabulary if kind == "tokens" else n_classes, names),
        n_features=features.shape[1],
        vocabulary=vocabulary,
        classes=names,
    )
    standardisation = standardise or Standardisation.identity()
    standardisation.require_fitting(features)
    test_split = None
    if test is not None:
        if not isinstance(test, tuple) or len(test) != 2:
            raise TypeError(f"test must be a pair (features, labels), got {type(test).__name__}")
        records = form.records(*test, names=("test[0]", "test[1]"))
        test_split = _chosen(records, slice(None), standardisation)
    kept, held_out = split_records(features, ids, split, validation_fraction, split_seed)
    owners: tuple[str | None, ...] = ()
    if ids is not None:
        keys = keys_of(ids, count=len(features), name="ids")
        owners = tuple(keys[n] for n in kept.tolist())
    whole = Split(features, labels, on_disk=is_mapped(x) and not tokens)
    return Dataset(
        name=name,
        n_classes=form.n_classes,
        train=_chosen(whole, kept, standardisation),
        validation=_chosen(whole, held_out, standardisation),
        test=test_split,
        standardisation=standardisation,
        split=split,
        record_shape=record_shape,
        target=kind,
        vocabulary=vocabulary,
        classes=form.classes,
        owners=owners,
    )


@dataclass(frozen=True, kw_only=True)
class RecordForm:
    """The form of a data set's records, see `Dataset`, by which further records are checked."""

    target: Target
    n_classes: int
    n_features: int
    vocabulary: int | None = None
    classes: tuple[str, ...] = ()

    def features(self, x: Array, name: str) -> torch.Tensor:
        """Return checked records, flat: float32 (n, d), or int64 (n, T) for tokens; not standardised.

        Raises:
            TypeError, ValueError: They are of another form.
        """
        if self.vocabulary is None:
            return self._fitting(checked_features(x, name), name)
        tokens = self._fitting(checked_tokens(x, name), name)
        _check_tokens(tokens, self.vocabulary, name)
        return tokens

    def records(self, x: Array, y: Array | None, *, names: tuple[str, str] = ("x", "y")) -> Split:
        """Return checked records and what to predict of them, not standardised; y None predicts the next tokens.

        Raises TypeError or ValueError, which has their names, if they are of another form, or of different lengths.
        """
        holds_tokens = self.vocabulary is not None
        if self.classes and is_text(y):
            y = numbered(y, self.classes, names[1])
        features, labels, _ = _checked(x, y, self.target, tokens=holds_tokens, names=names)
        self._fitting(features, names[0])
        if self.vocabulary is not None:
            _check_tokens(features, self.vocabulary, names[0])
            if self.target == "tokens":
                _check_tokens(labels[labels != PADDING], self.vocabulary, names[1])
        if self.target == "class":
            check_range(labels, self.n_classes, names[1])
        elif self.target != "tokens" and labels.shape[1] != self.n_classes:
            raise ValueError(
                f"{names[1]} has {labels.shape[1]} numbers per record, and {self.n_classes} are predicted; they must "
                "agree"
            )
        return Split(features, labels, on_disk=is_mapped(x) and not holds_tokens)

    def _fitting(self, features: torch.Tensor, name: str) -> torch.Tensor:
        if features.shape[1] != self.n_features:
            what = "features" if self.vocabulary is None else "tokens"
            raise ValueError(
                f"{name} has {features.shape[1]} {what} per record; the training records have {self.n_features}"
            )
        return features


def standardised(x: torch.Tensor, constants: Standardisation) -> torch.Tensor:
    """Return standardised features; tokens stay as they are."""
    return x if x.dtype == torch.int64 else constants.apply(x)


def _chosen(whole: Split, records: torch.Tensor | slice, constants: Standardisation) -> Split:
    """Return some records, standardised, a block of them at a time; those on disk stay there."""
    numbers = torch.arange(len(whole))[records]
    parts = list(row_blocks((len(numbers), whole.x.shape[1])))
    if whole.on_disk:
        rows = (constants.apply(whole.x[numbers[part]]) for part in parts)
        return Split(on_disk(rows), whole.y[numbers], on_disk=True)
    x = whole.x.new_empty(len(numbers), whole.x.shape[1])
    for part in parts:
        x[part] = standardised(whole.x[numbers[part]], constants)
    return Split(x, whole.y[numbers])


def _target_of(x: Array, y: Array | None, asked: AskedTarget) -> Target:
    """Return what is predicted: what was asked for, or what the arrays look like."""
    if y is None and asked not in ("auto", "tokens"):
        raise ValueError(
            f"y is missing, which data.target = {asked!r} needs; only 'tokens' predicts x itself"
        )
    if asked != "auto":
        checks.choice(("class", "tokens", "real", "labels"), target=asked)
        return asked
    if y is None:
        return "tokens"
    arrays = [value for value in (x, y) if isinstance(value, np.ndarray | torch.Tensor)]
    whole = [str(value.dtype).removeprefix("torch.") == "int64" and value.ndim == 2 for value in arrays]
    return "tokens" if whole == [True, True] and arrays[0].shape == arrays[1].shape else "class"


def _checked(
    x: Array, y: Array | None, target: Target, *, tokens: bool, names: tuple[str, str]
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Return records and what to predict of them, of the same length, and the shape of one record."""
    features = checked_tokens(x, names[0]) if tokens else checked_features(x, names[0])
    if y is None:
        if features.shape[1] < 2:
            raise ValueError(f"{names[0]} has one token per record; the next token needs at least 2")
        return features[:, :-1], features[:, 1:], (features.shape[1] - 1,)
    labels = checked_target(y, target, names[1])
    if len(features) != len(labels):
        raise ValueError(
            f"{names[0]} has {len(features)} records and {names[1]} {len(labels)} labels; give one label per record"
        )
    if target == "tokens" and labels.shape != features.shape:
        raise ValueError(
            f"{names[1]} has {labels.shape[1]} tokens per record and {names[0]} {features.shape[1]}; give one for each "
            "position"
        )
    return features, labels, tuple(x.shape[1:])


def checked_features(values: Array, name: str) -> torch.Tensor:
    """Check features and return them as float32, shape (n, d); a record of another shape is laid out in C order.

    Raises TypeError or ValueError for a wrong type or shape, no record, or a number that is not finite as float32.
    """
    if is_mapped(values) and values.ndim > 1 and values.size:
        return on_disk(_block(values, part, name) for part in row_blocks(values.shape))
    tensor = _tensor(values, name)
    if tensor.ndim < 2 or 0 in tensor.shape[1:]:
        raise ValueError(f"{name} must have shape (n, d) with d at least 1, got {tuple(tensor.shape)}")
    if len(tensor) == 0:
        raise ValueError(f"{name} is empty: it has shape {tuple(tensor.shape)} and needs at least one record")
    if tensor.is_complex():
        raise TypeError(f"{name} must be real, got {tensor.dtype}: give real and imaginary parts as features")
    features = tensor.to(torch.float32).reshape(len(tensor), -1)
    parts = row_blocks(tuple(features.shape))
    finite = torch.cat([torch.isfinite(features[part]).all(dim=1) for part in parts])
    if not bool(finite.all()):
        bad = torch.nonzero(~finite).reshape(-1)
        raise ValueError(
            f"{name} must be finite as float32, but {len(bad)} of {len(features)} records hold NaN, an "
            f"infinity or a number too large, the first at position {int(bad[0])}: remove or fill them"
        )
    return features


def _block(values: np.ndarray, part: slice, name: str) -> torch.Tensor:
    """Return checked features of some records of a mapped array; an error names their positions."""
    try:
        return checked_features(np.array(values[part]), name)
    except ValueError as error:
        raise ValueError(f"{error} (of the records from position {part.start} on)") from error


def checked_tokens(values: Array, name: str) -> torch.Tensor:
    """Check tokens and return them as int64, shape (n, T); may raise TypeError or ValueError."""
    tensor = _tensor(values, name)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(
            f"{name} must hold tokens, which are whole numbers, got {tensor.dtype}: number them from 0"
        )
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise ValueError(
            f"{name} must have shape (n, T) with n and T at least 1, got {tuple(tensor.shape)}: give one row of tokens "
            "per record"
        )
    return tensor.to(torch.int64, copy=True)


def checked_target(values: Array, target: Target, name: str) -> torch.Tensor:
    """Check what is to be predicted, and return it in the shape and type of its target (see `Split`).

    Raises TypeError or ValueError for a wrong type, shape or number, such as other labels than 0 and 1.
    """
    if target == "class":
        return checked_labels(values, name)
    if target == "tokens":
        return checked_tokens(values, name)
    tensor = _tensor(values, name)
    if tensor.ndim not in (1, 2) or 0 in tensor.shape[1:] or tensor.is_complex():
        raise ValueError(
            f"{name} must hold real numbers of shape (n,) or (n, k) for data.target = {target!r}, got {tensor.dtype} "
            f"of shape {tuple(tensor.shape)}"
        )
    numbers = tensor.to(torch.float32, copy=True).reshape(len(tensor), -1)
    if not bool(torch.isfinite(numbers).all()):
        raise ValueError(f"{name} must be finite as float32: remove or fill records with NaN or an infinity")
    if target == "labels" and not bool(((numbers == 0) | (numbers == 1)).all()):
        raise ValueError(
            f"{name} must hold zeros and ones for data.target = 'labels', one column per label; use 'real' for other "
            "numbers"
        )
    return numbers


def checked_labels(values: Array, name: str) -> torch.Tensor:
    """Check labels and return them as int64, shape (n,); raise TypeError or ValueError for others."""
    tensor = _tensor(values, name)
    if tensor.ndim != 1:
        raise ValueError(
            f"{name} must have shape (n,), got {tuple(tensor.shape)}: use {name}.reshape(-1) for a column, "
            f"{name}.argmax(1) for one-hot labels, or set data.target = 'real' or 'labels' to predict several numbers"
        )
    if tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(
            f"{name} must hold whole numbers, got {tensor.dtype}: for a numpy array of whole numbers use "
            f"{name}.astype('int64'), for a torch tensor {name}.long(); to predict numbers set data.target = 'real'"
        )
    return tensor.to(torch.int64, copy=True)


def _tensor(values: Array, name: str) -> torch.Tensor:
    """Return the array as a CPU tensor."""
    checks.complete(**{name: values})
    if isinstance(values, torch.Tensor):
        return values.detach().cpu()
    if not isinstance(values, np.ndarray):
        is_like = isinstance(values, Sequence) or hasattr(values, "__array__")
        remedy = f"numpy.asarray({name})" if is_like else "an array of the records"
        remedy = f"{name}.toarray()" if hasattr(values, "toarray") else remedy
        raise TypeError(
            f"{name} must be a numpy array or a torch tensor, got {type(values).__name__}: use {remedy}"
        )
    if values.dtype.kind not in "biufc":
        raise TypeError(f"{name} must hold numbers, got dtype {values.dtype}: encode them as numbers first")
    if values.dtype == np.longdouble or values.dtype == np.clongdouble:
        raise TypeError(f"{name} has dtype {values.dtype}, which torch lacks: use {name}.astype('float64')")
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("="), order="C"))  # a copy


def _number_of_outputs(
    labels: torch.Tensor, target: Target, n_classes: int | None, classes: Sequence[str]
) -> int:
    """Return the number of classes, token values or numbers to predict, which `n_classes` may state."""
    if target == "tokens" and n_classes is not None:
        return n_classes
    if classes:
        if n_classes not in (None, len(classes)):
            raise ValueError(
                f"data.n_classes = {n_classes} differs from the {len(classes)} named classes; leave it out"
            )
        return len(classes)
    if target == "class":
        found = _distinct(labels) if n_classes is None else n_classes
        checks.integer(
            n_classes=found, minimum=2, remedy="it counts all classes, also those without a record"
        )
        check_range(labels, found, "y")
        return found
    columns = labels.shape[1]
    if n_classes not in (None, columns):
        raise ValueError(
            f"data.n_classes = {n_classes} differs from the {columns} numbers per record of y; leave it out for "
            f"data.target = {target!r}"
        )
    return columns


def _distinct(labels: torch.Tensor) -> int:
    """Return k, the number of different labels; raise ValueError unless they are 0 to k - 1."""
    least, most = int(labels.min()), int(labels.max())
    if least >= 0 and most < len(labels) and bool(torch.bincount(labels).all()):
        return most + 1
    found = len(torch.unique(labels))
    if least > 0 and found == most - least + 1:
        raise ValueError(
            f"y must hold labels from 0, got {least} to {most}: subtract {least} from y, or state n_classes if the "
            "lower classes have no record"
        )
    remedy = f", or state n_classes = {most + 1} if the other classes have no record"
    remedy = remedy if least >= 0 and most < _MANY_CLASSES else ""  # codes such as 10^9 count nothing
    raise ValueError(
        f"y holds {found} different labels from {least} to {most}: classes are numbered from 0 and leave none out; "
        "number them by numpy.unique(y, return_inverse=True)[1], name those of a table's column in data.classes"
        f"{remedy}"
    )


def _vocabulary(
    x: torch.Tensor,
    y: torch.Tensor,
    target: Target,
    stated: int | None,
    n_classes: int | None,
    *,
    tokens: bool,
) -> int | None:
    """Return the stated number of token values, or one more than the largest, or None if x holds features."""
    if not tokens:
        if stated is not None:
            raise ValueError(
                f"data.vocabulary = {stated} is for tokens; set data.inputs = 'tokens', or leave it out"
            )
        return None
    seen = [x, y[y != PADDING]] if target == "tokens" else [x]
    if target == "tokens" and None not in (stated, n_classes) and stated != n_classes:
        raise ValueError(
            f"data.vocabulary = {stated} and data.n_classes = {n_classes} are the same number if tokens are predicted; "
            "give one of them"
        )
    if stated is None and target == "tokens":
        stated = n_classes
    size = 1 + max(int(values.max()) for values in seen if len(values)) if stated is None else stated
    checks.integer(vocabulary=size, minimum=2, remedy="it counts all tokens, also those that do not occur")
    for values, name in zip(seen, ("x", "y"), strict=False):
        _check_tokens(values, size, name)
    return size


def _check_tokens(tokens: torch.Tensor, vocabulary: int, name: str) -> None:
    """Refuse tokens outside 0 .. vocabulary - 1."""
    if not len(tokens):
        raise ValueError(
            f"{name} holds no token but padding ({PADDING}); give records with something to predict"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"{name} must hold tokens from 0 to {vocabulary - 1}, got {low} to {high}: number them from 0, or state "
            "data.vocabulary"
        )


def check_range(labels: torch.Tensor, n_classes: int, name: str) -> None:
    """Refuse labels outside 0 .. n_classes - 1."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= n_classes:
        raise ValueError(
            f"{name} must hold labels from 0 to {n_classes - 1}, got {low} to {high}: number the classes from 0, "
            "or state n_classes"
        )
