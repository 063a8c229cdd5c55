"""The section `data` of a run's configuration: its records, how they are split, and what replaces their features."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from opusim.training.config.sections import Effect, Section

SplitRule = Literal["index", "content", "id"]
FileKind = Literal["csv", "parquet", "text"]
FILE_KINDS: tuple[FileKind, ...] = get_args(FileKind)
"""What data.name may begin with, followed by a colon and a path, to take records from a file."""
OWN_ARRAYS = "arrays"
"""The data.name of a run on user-supplied arrays or on texts."""


def _entries(constants: Any) -> Sequence[Any]:
    return constants if isinstance(constants, list | tuple) else (constants,)


def _finite_numbers(value: object) -> object:
    entries = _entries(value)
    if not entries or not all(isinstance(entry, Real) and math.isfinite(entry) for entry in entries):
        raise ValueError(f"must be a finite number, or one for each feature, got {value!r}")
    return value


Constants = Annotated[float | tuple[float, ...], BeforeValidator(_finite_numbers)]
"""A number for all features, or one for each."""


class DataConfig(Section):
    """Data set, split and standardisation."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            keys=("data.whitening", "data.components_from"),
            needs="data.components",
            holds=lambda run: run.data.components is not None,
        ),
        Effect(
            keys=("data.components_mirrored",),
            needs="data.components with data.components_from = 'synthetic'",
            holds=lambda run: run.data.components is not None and run.data.components_from == "synthetic",
        ),
        Effect(
            keys=("data.features_groups",),
            needs="data.features",
            holds=lambda run: run.data.features is not None,
        ),
        Effect(
            keys=("data.features_threshold",),
            needs="data.features = 'optical:DEVICE'",
            holds=lambda run: run.data.features_kind == "optical",
        ),
        Effect(
            keys=("data.n_features",),
            needs="data.features = 'optical:DEVICE' or 'convolutions'",
            holds=lambda run: run.data.features_kind in ("optical", "convolutions"),
        ),
        Effect(
            keys=("data.context", "data.tokenizer"),
            needs="data.name = 'text:PATH'",
            holds=lambda run: run.data.file_kind == "text",
        ),
        Effect(
            keys=(
                *(
                    "data.split",
                    "data.split_seed",
                    "data.mean",
                    "data.std",
                    "data.standardise",
                    "data.components",
                    "data.features",
                ),
                *(
                    "data.n_classes",
                    "data.target",
                    "data.inputs",
                    "data.vocabulary",
                    "data.label",
                    "data.classes",
                ),
            ),
            needs="data other than text:PATH, which says it itself",
            holds=lambda run: run.data.file_kind != "text",
        ),
        Effect(
            keys=("data.test",),
            needs="a data.name that begins with csv:, parquet: or text:",
            holds=lambda run: run.data.file_kind is not None,
        ),
    )

    name: str = "digits"
    """digits, mnist, fashion-mnist or cifar-10; csv:PATH or parquet:PATH for a table with a column data.label;
    text:PATH for windows of a text file; "arrays" if `opusim.train` was given the records."""
    validation_fraction: float = Field(0.1, ge=0.0, lt=1.0)
    """Share of the training records held out for validation (0.1 in the PDFA paper)."""
    split_seed: int = Field(0, ge=0)
    """Public seed of the rule that picks the validation records; the rule never looks at labels."""
    split: SplitRule | None = None
    """What decides whether a record is held out. index: its position among all n, by a seeded permutation. content: a
    keyed hash of its own features. id: a keyed hash of the ID given with it. None: id if IDs were given, else content
    for protection.relation = 'add_or_remove_one', else index."""
    target: Literal["auto", "class", "tokens", "real", "labels"] = "auto"
    """What to predict of user-supplied records. class: one of n_classes, whole numbers y (n,). tokens: the token at
    each position, whole numbers y (n, T). real: numbers, y (n,) or (n, k). labels: which of k labels hold, zeros and
    ones y (n, k). auto: tokens if y is missing or has the shape of x, both int64; else class."""
    inputs: Literal["auto", "features", "tokens"] = "auto"
    """What user-supplied x holds: quantities (features) or numbers of tokens (tokens). auto: tokens only for tokens to
    predict."""
    n_classes: int | None = Field(None, ge=2)
    """Number of classes of user-supplied records, or of token values to predict. None counts the different labels,
    which must then be 0, 1, 2, ... without gaps; for tokens it takes one more than the largest."""
    vocabulary: int | None = Field(None, ge=2)
    """Number of token values in user-supplied x; None takes n_classes for tokens to predict, else reads it off x (one
    more than the largest)."""
    standardise: bool | Literal["records"] = True
    """Subtract and divide by public constants of the data set. records: by the mean and the standard deviation of each
    feature over user-supplied training records, which no guarantee for records covers."""
    mean: Constants | None = None
    """Another public constant to subtract instead, or one for each feature; for images, of pixels in [0, 1]. Requires
    std."""
    std: Constants | None = None
    """Another public constant to divide by instead, or one for each feature; requires mean."""
    features: str | None = None
    """Replace the features by a public map of them. optical:DEVICE: |R x|^2 of a device (`opusim device list`, or a
    TOML file), where x is 1 for each feature above data.features_threshold, else 0. For images: scattering
    (scattering:J for another scale than 2), hog, convolutions (random ones)."""
    n_features: int = Field(1000, ge=1)
    """Number of features behind data.features = optical:DEVICE or convolutions (a multiple of 32); the other maps have
    their own."""
    features_threshold: float = 0.0
    """What a standardised feature must exceed to be shown by data.features = optical:DEVICE; a public number."""
    features_groups: int | None = Field(None, ge=1)
    """Give each of this many groups of neighbouring channels behind data.features the mean 0 and the variance 1 within
    its record."""
    components: int | None = Field(None, ge=1)
    """Replace the features by this many principal components of data.components_from."""
    components_from: Literal["records", "synthetic"] = "records"
    """records: the training records, so only for public features. synthetic: invented images of their shape, behind
    data.features, into which no record enters; at most 2999 components."""
    components_mirrored: bool = False
    """Average the features of each invented image with those of its mirror image (left and right) before its components
    are computed, so that a record and its mirror image have the same components, as far as data.features commutes with
    mirroring."""
    whitening: float = Field(0.5, ge=0.0, le=1.0)
    """How far the variances of the components are equalised: 0 not at all, 1 completely."""
    label: Annotated[
        tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
    ] = ()
    """Column of a table that holds what to predict; several for data.target = 'real' or 'labels'. The others are
    features."""
    classes: tuple[str, ...] = ()
    """Names of the classes, if labels are strings, in the order of their numbers; empty reads them off the labels,
    sorted."""
    context: int = Field(128, ge=1)
    """Tokens of a record of text:PATH: the text is cut into windows of one more, each token to be predicted from those
    before it. The end of the text is held out, not windows drawn at random."""
    tokenizer: str | None = None
    """A tokenizer.json of the library tokenizers, for text:PATH in UTF-8; None takes the bytes of the file."""
    test: str | None = None
    """A file of test records of the same kind as that of data.name."""

    @property
    def file_kind(self) -> FileKind | None:
        """The kind of the file that data.name names, or None if it names none."""
        kind = self.name.partition(":")[0]
        return next((known for known in FILE_KINDS if known == kind and ":" in self.name), None)

    @property
    def is_own(self) -> bool:
        """Whether records are user-supplied, so that whatever is read off their labels depends on private records."""
        return self.name == OWN_ARRAYS or self.file_kind in ("csv", "parquet")

    @property
    def file(self) -> Path:
        """The file that data.name names.

        Raises:
            ValueError: It names none.
        """
        if self.file_kind is None:
            raise ValueError(f"data.name = {self.name!r} names no file; see file_kind")
        return Path(self.name.partition(":")[2])

    @property
    def short_name(self) -> str:
        """data.name in the name of a folder: that of a file without folders and ending."""
        return self.name if self.file_kind is None else re.sub(r"[^\w.-]+", "-", self.file.stem)

    @property
    def features_kind(self) -> str:
        """The map that data.features names; empty without one."""
        return (self.features or "").partition(":")[0]

    @property
    def features_argument(self) -> str:
        """What follows the colon of data.features: a device, or the scale of scattering."""
        return (self.features or "").partition(":")[2]

    @model_validator(mode="after")
    def _check_features(self) -> Self:
        argument, kind = self.features_argument, self.features_kind
        fits = {
            "": self.features is None,
            "optical": bool(argument),
            "scattering": argument in ("1", "2", "3", "4") or self.features == kind,
            "hog": self.features == kind,
            "convolutions": self.features == kind,
        }
        if not fits.get(kind, False):
            raise ValueError(
                f"features = {self.features!r}: must be optical:DEVICE (such as optical:ideal), scattering, "
                "scattering:J with J from 1 to 4, hog or convolutions"
            )
        return self

    @model_validator(mode="after")
    def _check_file(self) -> Self:
        if self.file_kind is not None and not self.file.name:
            raise ValueError(f"name = {self.name!r} lacks the path of the file; give {self.file_kind}:PATH")
        return self

    @model_validator(mode="after")
    def _check_constants(self) -> Self:
        if self.standardise == "records" and self.mean is not None:
            raise ValueError(
                f"standardise = 'records' computes what mean = {self.mean} states; give one of them"
            )
        if (self.mean is None) != (self.std is None):
            raise ValueError(f"mean = {self.mean} and std = {self.std} go together; give both or neither")
        if self.std is not None and min(_entries(self.std)) <= 0:
            raise ValueError(
                f"std = {self.std} must be above 0 everywhere; use 1 for a feature that never changes"
            )
        return self
