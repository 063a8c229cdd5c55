"""Hold a data set: records with labels in parts that never mix, and the maps applied to their features.

A map is public if it was fixed without the records that it is applied to. `Standardisation` says whether it is;
`PrincipalComponents` are computed from the training records and need features that are public. Records that were mapped
from a file stay on disk, a block of them in memory at a time.
"""

from __future__ import annotations

import math
import mmap
import re
import reprlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeGuard

import numpy as np
import torch
from torch import Tensor

from opusim import checks
from opusim.tables import Shown
from opusim.training.errors import DataError

NUMBERS_AT_ONCE = 2**20
"""Numbers of a block of records."""


def is_mapped(values: object) -> TypeGuard[np.ndarray]:
    """Return whether an array's numbers lie in a file, as those of ``numpy.load(file, mmap_mode="r")`` do."""
    base = values
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap)


def row_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield slices of consecutive records, each of about a million numbers; one, if there is no record."""
    n, width = shape[0], int(np.prod(shape[1:]))
    size = max(1, NUMBERS_AT_ONCE // max(width, 1))
    for start in range(0, max(n, 1), size):
        yield slice(start, min(start + size, n))


def on_disk(blocks: Iterable[Tensor]) -> Tensor:
    """Return blocks of rows as one float32 tensor, mapped from an unnamed file that disappears with its last user.

    Raises DataError if the folder of temporary files has too little room.
    """
    n, width = 0, 0
    try:
        with tempfile.TemporaryFile() as file:
            for block in blocks:
                file.write(block.contiguous().numpy().astype("=f4", copy=False).data)
                n, width = n + len(block), block.shape[1]
            file.flush()
            if not n * width:
                return torch.empty(n, width)
            return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=(n, width)))
    except OSError as error:
        raise DataError(
            f"the records do not fit into the temporary folder {tempfile.gettempdir()} ({error.strerror}); name "
            "another by the environment variable TMPDIR"
        ) from error


Target = Literal["class", "tokens", "real", "labels"]
"""What a model predicts of a record: one class, a token at each position, real numbers, or a set of labels."""
PADDING = -100
"""A token of y that is not predicted, at the end of a record that is shorter than others."""
_BLOCK = 4096
"""Records whose components are computed at once."""


@dataclass(frozen=True, kw_only=True)
class Standardisation:
    """The affine map ``(x - mean) / std``, the same for every record.

    A mean and a standard deviation computed from the training records depend on each of them, and every model releases
    them without noise: no guarantee covers that. Constants that were published before, or chosen without looking at the
    records, cost nothing. `public` tells the two apart, and a run with a guarantee refuses ``public=False``.

    Attributes:
        mean: Subtracted from the features, in their units: one number, or one per feature.
        std: Divides the features, in their units, above 0: one number, or one per feature.
        source: Where the two come from, for the run's report.
        public: Whether they were fixed without the records that they are applied to.
    """

    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]
    source: str
    public: bool = True

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            if not np.all(np.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")
        if not np.all(np.asarray(self.std) > 0):
            raise ValueError(
                f"std must be above 0 everywhere, got {self.std}; use std = 1 for a feature that never changes"
            )
        if len({len(v) for v in (self.mean, self.std) if isinstance(v, tuple)}) > 1:
            raise ValueError("mean and std must be single numbers or have one entry per feature")

    @classmethod
    def identity(cls) -> Self:
        """Return the map that leaves features as they are."""
        return cls(mean=0.0, std=1.0, source="none: features are used as they are")

    @classmethod
    def from_data(cls, x: np.ndarray | torch.Tensor, *, on_disk: bool = False) -> Self:
        """Compute each feature's mean and deviation over x, shape (n, d), by blocks if `on_disk`; not public.

        A feature that is constant in `x` gets std 1, so that it becomes 0 and is not divided by 0. Raises ValueError if
        `x` is not two-dimensional, is empty or is not finite.
        """
        checks.complete(x=x)
        records = torch.as_tensor(x).cpu()
        if records.ndim != 2 or len(records) == 0:
            raise ValueError(f"x must have shape (n, d) with n at least 1, got {tuple(records.shape)}")
        mean, deviation, constant = _moments(records, on_disk=on_disk)
        return cls(
            mean=tuple(mean.tolist()),
            std=tuple(np.where(constant, 1.0, deviation).tolist()),
            source=f"each feature's mean and standard deviation over {len(records)} records of the data",
            public=False,
        )

    def require_fitting(self, x: torch.Tensor) -> None:
        """Refuse (ValueError) records with another number of features than there are constants."""
        for constants in (self.mean, self.std):
            if isinstance(constants, tuple) and (x.ndim != 2 or len(constants) != x.shape[1]):
                raise ValueError(
                    f"the constants ({self.source}) are for {len(constants)} features, x has shape {tuple(x.shape)}; "
                    "give one number, or one for each feature"
                )

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``(x - mean) / std``, a new float32 tensor; raise ValueError if the constants do not fit x."""
        self.require_fitting(x)
        mean = torch.tensor(self.mean, dtype=torch.float32, device=x.device)
        std = torch.tensor(self.std, dtype=torch.float32, device=x.device)
        return (x.to(torch.float32) - mean) / std


_LARGE = 2**26
"""Largest number of values that are copied to float64 at once, 512 MiB."""


def _moments(records: Tensor, *, on_disk: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean and deviation of each feature in float64, and whether it is constant; sums have a fixed order."""

    def blocks() -> Iterator[np.ndarray]:
        in_blocks = on_disk or records.numel() > _LARGE
        parts = row_blocks(tuple(records.shape)) if in_blocks else [slice(None)]
        return (records[part].double().numpy() for part in parts)

    mean = sum(values.sum(axis=0) for values in blocks()) / len(records)
    square = sum(np.square(values - mean).sum(axis=0) for values in blocks()) / len(records)
    least, most = np.full_like(mean, np.inf), np.full_like(mean, -np.inf)
    for values in blocks():
        least, most = np.minimum(least, values.min(axis=0)), np.maximum(most, values.max(axis=0))
    return mean, np.sqrt(square), least == most


@dataclass(frozen=True)
class Split:
    """Some records of a data set, in a fixed order.

    Attributes:
        x: Features, shape (n, d), float32, or float16 after a public map, which halves their memory (`batch` gives
            float32); or tokens, shape (n, T), int64, counted from 0.
        y: What to predict: classes, shape (n,), int64, counted from 0; tokens, shape (n, T), int64, some of them
            `PADDING`; real numbers or labels 0 and 1, shape (n, k), float32.
        on_disk: Whether x is mapped from a file, because it may be larger than memory.
    """

    x: torch.Tensor
    y: torch.Tensor
    on_disk: bool = False

    def __post_init__(self) -> None:
        x, y = self.x, self.y
        if x.ndim != 2 or x.dtype not in (torch.float32, torch.float16, torch.int64):
            raise ValueError(
                f"x must be float32 or float16 of shape (n, d), or int64 for tokens, got {x.dtype} of shape "
                f"{tuple(x.shape)}"
            )
        if y.ndim == 2 and (y.dtype == torch.float32 or y.dtype == x.dtype) and len(y) == len(x):
            return
        if y.shape != x.shape[:1] or y.dtype != torch.int64:
            raise ValueError(
                f"y must be int64 of shape ({len(x)},), or float32 of shape ({len(x)}, k), got {y.dtype} of shape "
                f"{tuple(y.shape)}"
            )

    def __len__(self) -> int:
        return len(self.x)

    @property
    def place(self) -> torch.device:
        """The torch device of batches."""
        return self.x.device

    def batch(self, records: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return x, float32 or int64, and y of records by number, given on the host or on the batches' device."""
        if isinstance(records, Tensor) and records.device != self.x.device:
            records = records.to(self.x.device, non_blocking=True)
        return in_single_precision(self.x[records]), self.y[records]


@dataclass(frozen=True)
class HostSplit(Split):
    """Records that stay on the host, since a card has no room for them; batches are copied while the card computes.

    Attributes:
        torch_device: The card.
    """

    torch_device: str = "cpu"

    @property
    def place(self) -> torch.device:
        """See Split.place."""
        return torch.device(self.torch_device)

    def batch(self, records: Tensor | slice) -> tuple[Tensor, Tensor]:
        """See Split.batch; the records' numbers are best on the host."""
        numbers = records.cpu() if isinstance(records, Tensor) else records
        return in_single_precision(self._moved(self.x[numbers])), self._moved(self.y[numbers])

    def _moved(self, part: Tensor) -> Tensor:
        """Return a part on the card, through pinned memory, from which CUDA copies while it computes."""
        pinned = part.pin_memory() if self.place.type == "cuda" else part
        return pinned.to(self.place, non_blocking=True)


def in_single_precision(x: Tensor) -> Tensor:
    """Return features in float32, and tokens as they are."""
    return x.float() if x.is_floating_point() else x


@dataclass(frozen=True, kw_only=True, repr=False)
class Dataset(Shown):
    """A data set that is ready to train on.

    Attributes:
        name: Its name in reports.
        n_classes: Number of outputs that a model of it has: classes, token values, real numbers or labels. Every class
            and every token of y is below it.
        train: The records that a guarantee protects.
        validation: Records held out of the training set; empty if none were.
        test: Records that were never in the training set, or None if there are none.
        standardisation: The map already applied to all parts.
        components: The map that replaced the standardised features by fewer ones, or None if there was none.
        public_map: What `config.json` says of the public map that replaced the standardised features
            (`opusim.training.data.public_maps`), or None if there was none.
        split: The rule that separated train from validation: index, content or id (see `from_arrays`); tail if
            validation is the last part of a text; given if the caller supplied both parts, so that a guarantee covers
            only the records of `train`.
        record_shape: Shape of one record, whose numbers are a row of x in C order: (d,) for features, (c, h, w) for
            images, (T,) for tokens. Empty stands for (d,).
        target: What a model predicts of a record; it decides the shape of y (see `Split`).
        vocabulary: Number of token values, each below it, if x holds tokens; else None.
        classes: Names of the classes in the order of their numbers, if labels were given as strings.
        columns: Names of the features, if records were given as a table.
        owners: The user's ID of each training record, None if a record has no ID; empty if no IDs were given.
        origin: What `config.json` says of the file that the records were read from: JSON values.
    """

    name: str
    n_classes: int
    train: Split
    validation: Split
    test: Split | None
    standardisation: Standardisation
    components: PrincipalComponents | None = None
    public_map: Mapping[str, Any] | None = None
    split: Literal["index", "content", "id", "tail", "given"] = "given"
    record_shape: tuple[int, ...] = ()
    target: Target = "class"
    vocabulary: int | None = None
    classes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    owners: tuple[str | None, ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.record_shape:
            object.__setattr__(self, "record_shape", (self.n_features,))
        if math.prod(self.record_shape) != self.n_features:
            raise ValueError(
                f"record_shape = {self.record_shape} does not hold the {self.n_features} numbers of a record; give the "
                "shape of one record"
            )
        if self.holds_tokens != (self.vocabulary is not None):
            raise ValueError(
                f"vocabulary = {self.vocabulary} with x of {self.train.x.dtype}; give the number of token values for "
                "int64 x, and none with float32 x"
            )
        dtype = torch.int64 if self.target in ("class", "tokens") else torch.float32
        for part in (self.train, self.validation, self.test):
            if part is None:
                continue
            n, y = len(part), part.y
            shape = {"class": (n,), "tokens": tuple(part.x.shape)}.get(self.target, (n, self.n_classes))
            if tuple(y.shape) != shape or y.dtype != dtype:
                raise ValueError(
                    f"target = {self.target!r} takes y of {dtype} and shape {shape}, got {y.dtype} of shape "
                    f"{tuple(y.shape)}"
                )

    def _shown(self) -> dict[str, object]:
        return {
            "name": repr(self.name),
            "target": repr(self.target),
            "train": len(self.train),
            "validation": len(self.validation),
            "test": None if self.test is None else len(self.test),
            "record_shape": self.record_shape,
            "n_classes": self.n_classes,
        }

    @property
    def n_features(self) -> int:
        """Number of features of a record, or of its tokens."""
        return self.train.x.shape[1]

    @property
    def holds_tokens(self) -> bool:
        """Whether x holds tokens instead of features."""
        return self.train.x.dtype == torch.int64


def is_text(y: object) -> TypeGuard[np.ndarray]:
    """Return whether labels are an array of strings."""
    if not isinstance(y, np.ndarray) or y.ndim != 1:
        return False
    return y.dtype.kind in "UT" or (y.dtype.kind == "O" and all(isinstance(name, str) for name in y))


def numbered(y: np.ndarray, classes: Sequence[str], name: str) -> np.ndarray:
    """Return the numbers of named classes, shape (n,), int64; raise ValueError for another name."""
    checks.complete(**{name: y})
    numbers = {known: number for number, known in enumerate(classes)}
    texts = [str(value) for value in y]
    unknown = next((text for text in texts if text not in numbers), None)
    if unknown is not None:
        raise ValueError(
            f"{name} holds {reprlib.repr(unknown)}, which is none of the {len(classes)} classes {some_names(classes)}; "
            "remove such records, or name it in data.classes"
        )
    return np.array([numbers[text] for text in texts], dtype=np.int64)


def some_names(names: Sequence[str]) -> str:
    """Return at most eight names, cut if they are long, for a message."""
    shown = (name if name.isprintable() and len(name) <= 40 else reprlib.repr(name) for name in names[:8])
    return ", ".join(shown) + (f" and {len(names) - 8} more" if names[8:] else "")


def numbers_and_names(y: Any, classes: Sequence[str], target: Target) -> tuple[Any, tuple[str, ...]]:
    """Return the numbers of classes given as strings, and their names; other labels are returned unchanged.

    The names are in the order of their numbers; without any, those in y are sorted. Raises ValueError for fewer than 2
    names, one that comes twice, or names with numbers.
    """
    if target != "class" or not is_text(y):
        if classes:
            raise ValueError(
                "data.classes names classes that y gives as strings, and y holds none; leave it out"
            )
        return y, ()
    checks.complete(y=y)
    names = tuple(classes) or tuple(sorted({str(name) for name in y}))
    if len(set(names)) < max(2, len(names)):
        raise ValueError(
            f"data.classes = {some_names(names)}: must be at least 2 different names; name also those without a record"
        )
    return numbered(y, names, "y"), names


@dataclass(frozen=True, kw_only=True)
class PrincipalComponents:
    """The affine map x -> (x - mean) axes.

    Components of the training records are computed without noise, so a guarantee admits them only if the records'
    features are public.

    Attributes:
        mean: Shape (d,), float64.
        axes: Orthogonal columns, each scaled, shape (d, k), float64.
        public: Whether they were computed without the records that they are applied to.
    """

    mean: np.ndarray
    axes: np.ndarray
    public: bool = False

    @classmethod
    def fit(
        cls, x: Tensor, n_components: int, *, whitening: float, public: bool = False
    ) -> PrincipalComponents:
        """Compute the leading k principal components of records x, shape (n, d), public if x holds none of the map's.

        Component j of standard deviation s_j is scaled to a standard deviation proportional to s_j^(1 - whitening), so
        that the mean of the variances is 1. The sign of an axis makes its largest entry positive. Raises ValueError if
        k exceeds the number of features, or of components with a variance above 0.
        """
        values = x.double().cpu().numpy()
        if n_components > values.shape[1]:
            raise ValueError(
                f"data.components = {n_components} exceeds the {values.shape[1]} features; lower it"
            )
        mean = values.mean(axis=0)
        values = values - mean
        few = len(values) < values.shape[1]  # then the smaller of two matrices has the same components
        variances, vectors = np.linalg.eigh((values @ values.T if few else values.T @ values) / len(values))
        largest = np.argsort(variances)[::-1][:n_components]
        stds, vectors = np.sqrt(np.maximum(variances[largest], 0.0)), vectors[:, largest]
        if not stds[-1] > 1e-6 * stds[0]:
            raise ValueError(
                f"data.components = {n_components}: the records vary only in {int(np.sum(stds > 1e-6 * stds[0]))} "
                "directions; lower it"
            )
        if few:
            vectors = values.T @ (vectors / (np.sqrt(len(values)) * stds))
        signs = np.sign(vectors[np.argmax(np.abs(vectors), axis=0), np.arange(n_components)])
        scaled = stds ** (1 - whitening)
        axes = vectors * signs * stds**-whitening / np.sqrt(np.mean(scaled**2))
        return cls(mean=mean, axes=axes, public=public)

    @classmethod
    def from_array(cls, rows: np.ndarray, *, public: bool = False) -> PrincipalComponents:
        """Rebuild the map from what `to_array` returned."""
        return cls(mean=rows[0], axes=rows[1:].T, public=public)

    def to_array(self) -> np.ndarray:
        """Return the mean and then the axes as rows, shape (k + 1, d)."""
        return np.vstack([self.mean, self.axes.T])

    @property
    def n_features(self) -> int:
        """Number d of original features."""
        return len(self.mean)

    def apply(self, x: Tensor) -> Tensor:
        """Return the components of records (n, d), float32, shape (n, k); of half-precision ones in float32."""
        dtype = torch.float32 if x.dtype == torch.float16 else torch.float64
        mean, axes = (torch.from_numpy(part).to(x.device, dtype) for part in (self.mean, self.axes))
        found = torch.empty(len(x), axes.shape[1], device=x.device)
        for start in range(0, len(x), _BLOCK):
            found[start : start + _BLOCK] = (x[start : start + _BLOCK].to(dtype) - mean) @ axes
        return found


def reduced(dataset: Dataset, components: PrincipalComponents) -> Dataset:
    """Return the data set with every record's features replaced by their components.

    Public components of features that are private components themselves are not public.
    """
    before = dataset.components
    if before is not None and not before.public:
        components = replace(components, public=False)
    return replace(_mapped(dataset, components.apply), components=components)


def standardised_by_records(dataset: Dataset) -> Dataset:
    """Standardise features by each one's mean and deviation over the training records; raise ValueError for tokens."""
    if dataset.holds_tokens:
        raise ValueError("data.standardise = 'records' is for features, and x holds tokens; leave it out")
    constants = Standardisation.from_data(dataset.train.x, on_disk=dataset.train.on_disk)
    shape = dataset.record_shape
    return replace(_mapped(dataset, constants.apply), standardisation=constants, record_shape=shape)


_WIDE = 30.0
"""Standard deviation of a feature above which a network's first layer, made for about 1, learns badly."""


def wide_feature(dataset: Dataset) -> str | None:
    """Return a warning that names the feature that varies most; None for tokens, or if a network can learn from it.

    The text depends on the training records: do not show it if they are private.
    """
    if dataset.holds_tokens or len(dataset.train) < 2:
        return None
    deviations = _moments(dataset.train.x.cpu(), on_disk=dataset.train.on_disk)[1]
    widest = int(deviations.argmax())
    if not deviations[widest] > _WIDE:
        return None
    name = repr(dataset.columns[widest]) if dataset.columns else f"number {widest}"
    return (
        f"feature {name} has a standard deviation of {deviations[widest]:.3g} over the training records, where "
        "networks expect about 1; set data.standardise = 'records', or constants data.mean and data.std"
    )


_IDENTIFIER = re.compile(
    r"(.*[\W\d_]|.*[a-z](?=[A-Z]))?(?i:id|u?uid|guid|mrn|ssn)|(?i:(patient|user|subject|person|participant)(id)?)"
)


def features_named_as_identifiers(columns: Sequence[str]) -> str | None:
    """Return a warning that names features which look like identifiers of records or users; None without any.

    That is a column whose last word is id, uid, uuid, guid, mrn or ssn, where a capital after a small letter begins a
    word, or whose whole name is patient, user, subject, person or participant, also with "id". Values are not read.
    """
    found = [name for name in columns if _IDENTIFIER.fullmatch(name.strip())]
    if not found:
        return None
    return f"columns named like identifiers are trained on: {some_names(found)}; {drop_or_user(found[0])}"


def drop_or_user(column: str) -> str:
    """Return what to do about a column of IDs, for a message."""
    return (
        "drop the column; if it is the ID of each record's user, set protection.kind = 'record', protection.unit = "
        f"'user' and data.user = {column!r} (--user)"
    )


def _mapped(dataset: Dataset, change: Callable[[Tensor], Tensor]) -> Dataset:
    """Return the data set with a map applied to the features of every record, which become flat."""

    def mapped(split: Split) -> Split:
        if split.on_disk:
            return replace(
                split, x=on_disk(change(split.x[part]) for part in row_blocks(tuple(split.x.shape)))
            )
        return Split(change(split.x), split.y)

    return with_parts(dataset, mapped, record_shape=())


def with_parts(dataset: Dataset, change: Callable[[Split], Split], **changes: Any) -> Dataset:
    """Return the data set with a function applied to each part, and other fields replaced."""
    test = None if dataset.test is None else change(dataset.test)
    return replace(
        dataset, train=change(dataset.train), validation=change(dataset.validation), test=test, **changes
    )
