"""Take user-supplied records in any form: arrays, a data set of torch, a DataFrame, files, a folder of images.

pandas is imported only if a file has to be read; a DataFrame brings it along.
"""

from __future__ import annotations

import os
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset
from typing_extensions import TypeIs

from opusim.description.section import did_you_mean
from opusim.errors import ConfigError
from opusim.files import open_to_read
from opusim.training.config.sections import OWN_ARRAYS, DataConfig, SplitRule
from opusim.training.data.arrays import Array, Ids, Pair, from_arrays
from opusim.training.data.dataset import (
    Dataset,
    Standardisation,
    drop_or_user,
    some_names,
    standardised_by_records,
)
from opusim.training.data.formats import (
    named_file,
    read_csv,
    read_image_folder,
    read_npz,
    required_library,
)
from opusim.training.data.users import keys_of
from opusim.training.errors import DataError

TABLE_LIMIT = 2**30
"""Bytes of a CSV file, or of the columns of a Parquet file, at most."""
_NAME_LENGTH = 200
"""Most characters of a column's name."""
_MOST_CATEGORIES = 30
"""Most different texts of a column that a message proposes to encode."""
_CELL_LIMIT = 2**29
"""Cells of a Parquet file, at most: its columns may repeat a value without taking bytes."""

_UNNAMED = re.compile(r"Unnamed: \d+(_level_\d+)?|__index_level_\d+__|")
_RESET_INDEX = re.compile(r"index|level_\d+")


class Frame(Protocol):
    """A pandas.DataFrame."""

    columns: Any

    def __len__(self) -> int: ...  # number of records

    def isna(self) -> Any:
        """Mark missing values."""


Arrays = tuple[Array, Array | None] | tuple[Array, Array | None, Ids]
"""Records, what to predict of them (None: the next tokens), and for data.split = 'id' an ID of each record."""
OwnData = Arrays | TorchDataset[Any] | Frame
"""Forms of `opusim.train(data=...)`, in addition to a Dataset."""
OwnTest = Pair | TorchDataset[Any] | Frame
"""Forms of `opusim.train(test=...)`."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table as arrays: x, float64, (n, d), y, (n,) or (n, k), features' names, and users' IDs or None."""

    x: np.ndarray
    y: np.ndarray
    columns: tuple[str, ...]
    ids: list[str | None] | None = None


def own_dataset(
    options: DataConfig,
    split: SplitRule,
    data: OwnData,
    test: OwnTest | None = None,
    *,
    name: str = OWN_ARRAYS,
    tables: tuple[str, str] = ("data", "test"),
) -> Dataset:
    """Make a data set of user-supplied records, and test records in any form of these.

    The split decides which records are held out unless IDs do; `tables` names both in messages. Raises TypeError for
    records of no such form, ValueError for an array or column that cannot be used, and ConfigError if data.split does
    not fit the IDs, or data.label or data.user is given with arrays.
    """
    if is_frame(data):
        if split == "id" and options.user is None:
            reason = "is missing: name the column with the ID of each record's user (--user COLUMN)"
            raise ConfigError("configuration", "data.user", reason)
        table = table_of(data, options.label, tables[0], as_text=bool(options.classes), user=options.user)
        pair = None if test is None else _test_pair(test, options, table.columns, tables[1])
        facts: dict[str, Any] = {"ids": table.ids, "columns": table.columns, "name": name}
        return _dataset(options, (table.x, table.y), split=split, test=pair, **facts)
    given = as_arrays(data, "data")
    for key, named in (("label", options.label), ("user", options.user and (options.user,))):
        if named:
            reason = f"{', '.join(named)} names a column of a table; leave it out with arrays"
            raise ConfigError("configuration", f"data.{key}", reason)
    if len(given) not in (2, 3):
        raise TypeError(f"data must be (x, y) or (x, y, ids), got {len(given)} arrays; give data=(x, y)")
    ids = given[2] if len(given) == 3 else None
    split = "id" if ids is not None and options.split is None else split
    if (ids is not None) != (split == "id"):
        reason = f"{split!r} ignores IDs, and some were given; use 'id'"
        if ids is None:
            reason = "'id' needs IDs, and none were given; give data=(x, y, ids)"
        raise ConfigError("configuration", "data.split", reason)
    pair = None if test is None else _test_pair(test, options, (), tables[1])
    return _dataset(options, (given[0], given[1]), split=split, ids=ids, test=pair, name=name)


def file_dataset(options: DataConfig, split: SplitRule) -> Dataset:
    """Make a data set of the file or folder that data.name names, and of data.test if it is set.

    Raises DataError for an unreadable file, ValueError for a column or an array that cannot be used, and
    ModuleNotFoundError if a library that reads the file is missing.
    """
    data = read_records(options.file, options)
    held = None if options.test is None else read_records(Path(options.test), options)
    held = held[:2] if isinstance(held, tuple) else held
    tables = str(options.file), str(options.test)
    return own_dataset(options, split, data, held, name=options.name, tables=tables)


def standardisation_of(options: DataConfig) -> Standardisation | None:
    """Return the constants that a configuration states, or None if it states none."""
    if options.mean is None or options.std is None:
        return None
    return Standardisation(
        mean=options.mean, std=options.std, source="data.mean and data.std of the configuration"
    )


def is_frame(data: object) -> TypeIs[Frame]:
    """Return whether something is a DataFrame, without importing pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(data, pandas.DataFrame)


def read_records(path: Path, options: DataConfig) -> Any:
    """Read a file of the kind that data.name has: a DataFrame, or arrays (x, y) and IDs if the file holds some."""
    if options.file_kind == "npz":
        return read_npz(path)
    return read_image_folder(path) if options.file_kind == "folder" else read_frame(path, options)


def read_frame(path: Path, options: DataConfig) -> Frame:
    """Read a CSV or Parquet file of the kind that data.name has; see `opusim.training.data.formats.read_csv`.

    Raises DataError if it cannot be read, is of another kind, or is larger than `TABLE_LIMIT`, and ModuleNotFoundError.
    """
    kind = str(options.file_kind)

    def library(name: str) -> Any:
        missing = f"{kind}:{path} needs the library {name}, which is missing: pip install 'opusim[data]'"
        return required_library(name, missing)

    pandas = library("pandas")
    try:
        with os.fdopen(open_to_read(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            cells = 0
            if kind == "parquet":
                facts = library("pyarrow.parquet").ParquetFile(file).metadata
                size = sum(facts.row_group(group).total_byte_size for group in range(facts.num_row_groups))
                cells = facts.num_rows * facts.num_columns
            for found, limit, what in ((size, TABLE_LIMIT, "bytes"), (cells, _CELL_LIMIT, "cells")):
                if found > limit:
                    raise DataError(
                        f"{path} holds {found:,} {what}, more than the limit of {limit:,}; give a part of it"
                    )
            frame: Frame = (
                pandas.read_parquet(file, engine="pyarrow")
                if kind == "parquet"
                else read_csv(file, path, pandas)
            )
            return frame
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); check the path") from error
    except (ValueError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path} is no {kind} file with a table ({reason}); write it again") from error


def table_of(
    frame: Frame,
    label: Sequence[str],
    what: str,
    *,
    columns: Sequence[str] | None = None,
    as_text: bool = False,
    user: str | None = None,
) -> Table:
    """Return the features and the labels of a table, named `what` in messages.

    Features are `columns` in their order, or all others than the labels in that of the table. Labels are names of
    classes `as_text`, also if they are numbers. The column `user` has the IDs of the records' users, read if `columns`
    is None. Raises ValueError if a column is missing or superfluous, lacks values, or holds something other than
    numbers.
    """
    renamed = _named(frame, what)
    found = list(renamed.columns)
    if not label:
        raise ValueError(
            f"data.label is missing: name the column of {what} to predict, one of {some_names(found)}"
        )
    for column in label:
        if column not in found:
            hint = did_you_mean(column, found)
            raise ValueError(
                f"data.label = {column!r} is no column of {what}, which has {some_names(found)}{hint}"
            )
    if user is not None and columns is None and user not in found:
        raise ValueError(f"data.user = {user!r} is no column of {what}, which has {some_names(found)}")
    features = [column for column in found if column not in (*label, user)]
    if columns is None:
        _refuse_index(renamed, features, what)
    for column in columns or ():
        if column not in features:
            raise ValueError(f"{what} has no column {column!r}, which the training records have; add it")
    more = [column for column in features if columns is not None and column not in columns]
    if more:
        raise ValueError(f"{what} has a column {more[0]!r}, which the training records lack; drop it")
    features = list(features if columns is None else columns)
    if not features:
        raise ValueError(f"{what} has no column besides the labels; give at least one feature")
    ids = None
    if user is not None and columns is None:
        given = renamed[user].tolist()
        # pandas makes floats of whole numbers next to an empty cell, and NaN of the cell
        floats = {n: value for n, value in enumerate(given) if isinstance(value, float)}
        for n, value in floats.items():
            given[n] = int(value) if value.is_integer() else None if value != value else value
        ids = keys_of(given, count=len(renamed), name=f"data.user = {user!r}")
    return Table(
        x=feature_array(renamed, features, what),
        y=_label_array(renamed, list(label), what, as_text=as_text),
        columns=tuple(features),
        ids=ids,
    )


def feature_array(frame: Any, columns: Sequence[str], what: str) -> np.ndarray:
    """Return the features of a table, shape (n, d), float64; raise ValueError for a column that has no such numbers."""
    frame = _named(frame, what)
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise ValueError(f"{what} has no column {missing[0]!r}, which the training records have; add it")
    for column in columns:
        _require_numbers(frame[column], column, what)
    return np.asarray(frame[list(columns)].to_numpy(dtype="float64"))


_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}([,' \u00a0\u2009\u202f]\d{3})+(\.\d*)?")
_DECIMAL_COMMA = re.compile(r"[+-]?[\d.]*,\d+([eE][+-]?\d+)?")


def _not_a_number(column: Any, name: str) -> str:
    """Say where a text column first holds something other than a number, and what to do about it."""
    values = [str(value) for value in column.tolist()]
    wrong = {row: value for row, value in enumerate(values) if not _is_number(value)}
    if not wrong:
        return f"holds numbers as text; convert them, as by frame[{name!r}].astype(float)"
    row, value = next(iter(wrong.items()))
    remedy = f"drop the column, or encode it, as with pandas.get_dummies(frame, columns=[{name!r}])"
    if len(set(values)) > _MOST_CATEGORIES:
        remedy = drop_or_user(name)
    if all(map(_THOUSANDS.fullmatch, wrong.values())):
        remedy = "write numbers without separators of thousands"
    elif _DECIMAL_COMMA.fullmatch(value):
        remedy = "write decimal points instead of commas"
    elif 2 * len(wrong) < len(values):
        remedy = "correct this cell, or drop its row"
    return f"holds {reprlib.repr(value)} in row {row} counted from 0, and features are numbers; {remedy}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _named(frame: Any, what: str) -> Any:
    """Return a table whose columns have names, each once (ValueError), numbers as names if they are numbered."""
    names = [str(column) for column in frame.columns]
    longest = max(range(len(names)), key=lambda number: len(names[number]), default=None)
    if longest is not None and len(names[longest]) > _NAME_LENGTH:
        raise ValueError(
            f"column {longest + 1} of {what} has a name of {len(names[longest]):,} characters; shorten it to "
            f"{_NAME_LENGTH}"
        )
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"{what} has several columns of the name {twice[0]!r}; rename or drop them")
    return frame if names == list(frame.columns) else frame.set_axis(names, axis=1)


def _label_array(frame: Any, label: list[str], what: str, *, as_text: bool) -> np.ndarray:
    """Return one column of labels, shape (n,), as numbers or as text; or several columns of numbers, shape (n, k)."""
    if len(label) > 1:
        return feature_array(frame, label, what)
    column = frame[label[0]]
    _require_complete(column, label[0], what)
    is_plain = isinstance(column.dtype, np.dtype)  # else an extension type of pandas
    values = column.to_numpy() if is_plain else np.asarray(column.tolist())
    kind = values.dtype.kind
    if kind in "biuf" and not as_text:
        return values
    texts = [str(value) for value in values.tolist()]
    if kind not in "biufOUT":
        raise ValueError(
            f"column {label[0]!r} of {what} holds {column.dtype}, and labels are numbers or text; convert it"
        )
    return np.array(texts)


def _require_numbers(column: Any, name: str, what: str) -> None:
    """Refuse a column of features that holds something other than real numbers, or lacks values."""
    _require_complete(column, name, what)
    kind = getattr(column.dtype, "kind", "O")
    if kind in "OUT":
        raise ValueError(f"column {name!r} of {what} {_not_a_number(column, name)}")
    if kind not in "biuf":
        raise ValueError(
            f"column {name!r} of {what} holds {column.dtype}, and features are numbers; drop it, or convert it to "
            "numbers"
        )
    values = column.to_numpy(dtype="float64")
    large = ~(np.abs(values) <= np.finfo(np.float32).max)
    if large.any():
        row = int(large.argmax())
        raise ValueError(
            f"column {name!r} of {what} holds {values[row]:g} in row {row} counted from 0, which float32 cannot hold; "
            "correct this cell, or drop its row"
        )


def _require_complete(column: Any, name: str, what: str) -> None:
    """Refuse a column that lacks values."""
    lacks = np.asarray(column.isna())
    if lacks.any():
        raise ValueError(
            f"column {name!r} of {what} lacks {int(lacks.sum())} of {len(lacks)} values, the first in row "
            f"{int(lacks.argmax())} counted from 0; drop these rows, or fill them, as with frame[{name!r}].fillna(...)"
        )


def _refuse_index(frame: Any, features: Sequence[str], what: str) -> None:
    """Refuse a column that numbers the rows, as pandas writes one: the order of a file may reveal the label.

    That is a column without a name in a CSV file, which pandas then calls "Unnamed: 0", or one of the names that
    `reset_index` gives, if it counts the rows.
    """
    for column in features:
        reason = "has no name in the file, as the index that to_csv writes"
        if _RESET_INDEX.fullmatch(column) and np.array_equal(frame[column], np.arange(len(frame))):
            reason = "counts the rows, as the column that reset_index makes"
        elif not _UNNAMED.fullmatch(column):
            continue
        raise ValueError(
            f"column {column!r} of {what} {reason}: it is no feature; write the file with to_csv(..., index=False), or "
            f"drop the column, as by frame.drop(columns={column!r}); rename it if it is a feature"
        )


def as_arrays(data: object, name: str) -> tuple[Any, ...]:
    """Return arrays that were given as a tuple, a TensorDataset or another data set of torch; may raise TypeError."""
    if isinstance(data, TensorDataset):
        return tuple(data.tensors)
    if isinstance(data, tuple):
        return data
    remedy = f"give {name}=(x, y)"
    if isinstance(data, DataLoader):
        remedy = f"give {name}=loader.dataset, and its batch size as sampler.batch_size"
    elif isinstance(data, IterableDataset):
        remedy = f"a run draws records by their numbers, which an iterable one lacks; give {name}=(x, y)"
    elif isinstance(data, TorchDataset):
        return _collected(data, name)
    elif isinstance(data, str | Path):
        named = str(data) if ":" in str(data) else named_file(str(data)) or str(data)
        remedy = (
            f"name files and known data sets in the configuration: config={{'data': {{'name': {named!r}}}}}"
        )
    raise TypeError(
        f"{name} must be (x, y), a TensorDataset or another Dataset of torch, a DataFrame or a Dataset of opusim, got "
        f"{type(data).__name__}; {remedy}"
    )


def _collected(data: TorchDataset[Any], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the records (x, y) of a data set of torch as arrays, all read once.

    Raises TypeError if it has no length, or a record is no pair of an array and a number, and ValueError if it is
    empty, its records differ in shape, or it gives another record each time it is asked.
    """
    kind = type(data).__name__
    if not callable(getattr(data, "__len__", None)):
        raise TypeError(f"{name} = {kind}: has no length; give {name}=(x, y)")
    count = len(data)  # type: ignore[arg-type]
    if not count:
        raise ValueError(f"{name} = {kind}: is empty; give at least one record")
    first, *records = (_record(data[number], name, number) for number in (0, *range(count)))
    if any(a.tobytes() != b.tobytes() for a, b in zip(first, records[0], strict=True)):
        raise ValueError(
            f"{name} = {kind}: gives another record 0 each time, as a random transform does, and a run reads each "
            "record once; leave the transform out"
        )
    for number, (x, y) in enumerate(records):
        if x.shape != first[0].shape or y.shape != first[1].shape:
            raise ValueError(
                f"{name} = {kind}: record {number} has shapes {x.shape} and {y.shape}, record 0 {first[0].shape} and "
                f"{first[1].shape}; bring all to one shape"
            )
    xs, ys = zip(*records, strict=True)
    return np.stack(xs), np.stack(ys)


def _record(record: Any, name: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return one record (x, y) as arrays of numbers, or y a name; raise TypeError for something else."""
    parts = tuple(record) if isinstance(record, list | tuple) else (record,)
    arrays = [
        np.asarray(part) for part in parts if isinstance(part, Tensor | np.ndarray | np.generic | Real | str)
    ]
    if len(parts) != 2 or len(arrays) != 2 or arrays[0].dtype.kind not in "biufc":
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise TypeError(
            f"{name}: record {number} is ({kinds}), and must be (x, y), x a tensor or an array and y a number; give "
            "the data set a transform to tensors, such as torchvision.transforms.ToTensor(), or give arrays"
        )
    return arrays[0], arrays[1]


def _test_pair(test: OwnTest, options: DataConfig, columns: tuple[str, ...], what: str) -> Pair:
    """Return test records as arrays; with a table, which has columns, they must be a table too."""
    if is_frame(test) != bool(columns):
        raise TypeError("data and test must both be DataFrames, or neither; give them in the same form")
    if is_frame(test):
        as_text = bool(options.classes)
        table = table_of(test, options.label, what, columns=columns, as_text=as_text, user=options.user)
        return table.x, table.y
    given = as_arrays(test, "test")
    if len(given) != 2:
        raise TypeError(f"test must be a pair (features, labels), got {len(given)} arrays")
    return given[0], given[1]


def _dataset(
    options: DataConfig,
    arrays: Pair,
    *,
    split: SplitRule,
    test: Pair | None,
    ids: Ids | None = None,
    columns: tuple[str, ...] = (),
    name: str = "arrays",
) -> Dataset:
    """Make a data set of arrays under the keys of a configuration."""
    if columns and options.target in ("auto", "class") and _counts_from_zero(arrays[1]):
        arrays, test = _whole(arrays), test and _whole(test)
    dataset = from_arrays(
        *arrays,
        n_classes=options.n_classes,
        validation_fraction=options.validation_fraction,
        split_seed=options.split_seed,
        split=split,
        ids=ids,
        test=test,
        standardise=standardisation_of(options),
        name=name,
        target=options.target,
        inputs=options.inputs,
        vocabulary=options.vocabulary,
        classes=options.classes,
    )
    dataset = replace(dataset, columns=columns)
    return standardised_by_records(dataset) if options.standardise == "records" else dataset


def _counts_from_zero(y: Any) -> bool:
    """Return whether labels are the floats 0.0, 1.0, ... without gaps, which pandas makes of whole numbers."""
    if not isinstance(y, np.ndarray) or y.dtype.kind != "f":
        return False
    found = np.unique(y)
    return np.array_equal(found, np.arange(len(found)))


def _whole(pair: Pair) -> Pair:
    """Return labels that are whole numbers as integers."""
    x, y = pair
    if isinstance(y, np.ndarray) and y.dtype.kind == "f" and np.array_equal(y, np.rint(y)):
        return x, y.astype(np.int64)
    return pair
