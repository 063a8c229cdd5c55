"""Load the data sets that a configuration names: digits, MNIST, Fashion-MNIST, CIFAR-10, or a text file.

Standardisation constants of known data sets are statistics of published benchmarks that everyone has, and only for that
reason count as public. User-supplied data need constants that were chosen without looking at the data (see
`Standardisation`).

A text is windows of bytes or tokens, each to be predicted from those before it. Its last part is held out as one piece:
windows drawn at random would have neighbours of the same sentences in the training set, and the figures on held-out
records would be too good.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError

import numpy as np
import torch
from torch import Tensor

from opusim.description.section import meant_by
from opusim.errors import ConfigError
from opusim.files import open_to_read
from opusim.training.config.sections import FILE_KINDS, OWN_ARRAYS, DataConfig, SplitRule
from opusim.training.data.arrays import from_arrays, split_by_index
from opusim.training.data.dataset import Dataset, Split, Standardisation
from opusim.training.data.formats import (
    ARCHIVE,
    IMAGE_FILES,
    VARIABLE,
    Parts,
    named_file,
    read_cifar10,
    read_labelled_images,
    required_library,
)
from opusim.training.data.tables import file_dataset, standardisation_of
from opusim.training.errors import DataError

TEXT_LIMIT = 2**28
"""Bytes of a text file, at most; in memory each token takes 8 bytes."""
_TOKENIZER_LIMIT = 2**26
_BYTE_VALUES = 256
_PIECE = 2**20
"""Characters after which a text is cut at the next line's end; each piece is encoded separately."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """How a text becomes tokens: as its bytes, or by a tokenizer of the library `tokenizers` and its file's digest."""

    vocabulary: int = _BYTE_VALUES
    tokenizer: Any = None
    digest: str | None = None

    @classmethod
    def from_file(cls, path: Path) -> Encoder:
        """Read a tokenizer.json.

        Raises DataError if it holds no tokenizer or is too long, and ModuleNotFoundError without the library
        `tokenizers`.
        """
        library = required_library(
            "tokenizers",
            f"data.tokenizer = {str(path)!r} needs the library tokenizers, which is missing: pip install 'opusim[llm]'",
        )
        content = _read(path, _TOKENIZER_LIMIT, "tokenizer")
        try:
            tokenizer = library.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            reason = str(error).partition("\n")[0]
            raise DataError(
                f"{path} is no tokenizer.json of the library tokenizers ({reason}); write one with Tokenizer.save"
            ) from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        return cls(vocabulary=largest + 1, tokenizer=tokenizer, digest=digest)

    def tokens(self, content: bytes, path: Path) -> Tensor:
        """Return the tokens of a text, shape (n,), int64; a tokenizer refuses (DataError) what is not UTF-8."""
        if self.tokenizer is None:
            return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).astype(np.int64))
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8 text ({error.reason}); leave data.tokenizer out to take it as bytes"
            ) from error
        ids, start = [], 0
        while start < len(text):  # pieces of about `_PIECE` characters, cut at line ends
            end = text.find("\n", start + _PIECE) + 1 or len(text)
            found = self.tokenizer.encode(text[start:end], add_special_tokens=False)
            ids.append(np.array(found.ids, np.int64))
            start = end
        return torch.from_numpy(np.concatenate(ids)) if ids else torch.zeros(0, dtype=torch.int64)


def load_text(
    path: Path,
    *,
    context: int = 128,
    tokenizer: Path | None = None,
    validation_fraction: float = 0.1,
    test: Path | None = None,
    name: str | None = None,
) -> Dataset:
    """Make a data set of windows of a text: T = `context` tokens x and the T tokens y that follow each of them.

    The text, of at most `TEXT_LIMIT` bytes and any content, is cut into windows of T + 1 tokens that do not overlap; x
    is a window without its last token, y without its first. A last, shorter window is left out. The last
    ``validation_fraction`` of the bytes is held out, rounded to the start of a UTF-8 character, and encoded separately,
    as is a file of test records; `Dataset.origin` has the bytes and tokens of each part. Without a tokenizer.json, for
    UTF-8 text, the tokens are bytes.

    Raises DataError for a file that cannot be read, is too long, too short for one window, or not UTF-8 for a
    tokenizer, and ModuleNotFoundError if the library `tokenizers` is missing.
    """
    encoder = Encoder() if tokenizer is None else Encoder.from_file(tokenizer)
    content = _read(path, TEXT_LIMIT, "text")
    cut = len(content) - round(validation_fraction * len(content))
    # move the cut by at most 3 bytes, to the start of a UTF-8 character
    near = range(cut, min(cut + 4, len(content)))
    cut = next((place for place in near if content[place] >> 6 != 0b10), cut)
    parts = {"train": content[:cut]} | ({"validation": content[cut:]} if validation_fraction else {})
    files = dict.fromkeys(parts, path)
    if test is not None:
        parts["test"], files["test"] = _read(test, TEXT_LIMIT, "text"), test
    tokens = {part: encoder.tokens(held, files[part]) for part, held in parts.items()}
    splits = {part: _windows(held, context, f"{files[part]} ({part})") for part, held in tokens.items()}
    none = Split(splits["train"].x[:0], splits["train"].y[:0])
    return Dataset(
        name=name or f"text:{path}",
        n_classes=encoder.vocabulary,
        train=splits["train"],
        validation=splits.get("validation", none),
        test=splits.get("test"),
        standardisation=Standardisation.identity(),
        split="tail",
        target="tokens",
        vocabulary=encoder.vocabulary,
        origin={
            "bytes": {part: len(held) for part, held in parts.items()},
            "tokens": {part: len(held) for part, held in tokens.items()},
            "bytes_per_token": {part: len(parts[part]) / len(held) for part, held in tokens.items()},
            "tokenizer": encoder.digest,
        },
    )


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Return a mean cross-entropy per token, in nats, as bits per byte of text: loss / (ln 2 x bytes per token)."""
    return loss / (math.log(2) * bytes_per_token)


def _windows(tokens: Tensor, context: int, where: str) -> Split:
    """Cut tokens into windows of context + 1; x and y share their memory."""
    count = len(tokens) // (context + 1)
    if not count:
        raise DataError(
            f"{where} has {len(tokens)} tokens, and one window takes data.context + 1 = {context + 1}; lower "
            "data.context, or give a longer text"
        )
    windows = tokens[: count * (context + 1)].reshape(count, context + 1)
    return Split(windows[:, :-1], windows[:, 1:])


def _read(path: Path, limit: int, what: str) -> bytes:
    try:
        with os.fdopen(open_to_read(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(limit + 1) if size <= limit else b""
    except OSError as error:
        raise DataError(f"{what} {path} cannot be read ({error.strerror}); check the path") from error
    if max(size, len(content)) > limit:
        raise DataError(
            f"{what} {path} has {size:,} bytes, more than the limit of {limit:,}; give a part of it"
        )
    return content


@dataclass(frozen=True, kw_only=True)
class OpenmlSource:
    """A data set on openml.org, by its number there; the first records are for training, the last for testing."""

    data_id: int
    name: str
    n_train: int
    n_test: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One known data set.

    Attributes:
        full_scale: Value of a white pixel in the files; features are pixels divided by it, in [0, 1].
        standardisation: Public constants for features in [0, 1].
        read: Returns the pixels and labels.
        channels: Colours of a pixel.
        files: Files that it is read from, in the folder of OPUSIM_DATA; each may end in ``.gz``.
    """

    full_scale: float
    standardisation: Standardisation
    read: Callable[[], Parts]
    channels: int = 1
    files: tuple[str, ...] = ()

    def images(self, pixels: np.ndarray) -> torch.Tensor:
        """Return pixels (n, d) in [0, 1], shape (n, channels, side, side); (n, d) if they are not square images."""
        scaled = torch.from_numpy(pixels.astype(np.float32)) / self.full_scale
        side = math.isqrt(scaled.shape[1] // self.channels)
        shape = (self.channels, side, side)
        return scaled.reshape(-1, *shape) if math.prod(shape) == scaled.shape[1] else scaled


def build_dataset(options: DataConfig, split: SplitRule | None = None) -> Dataset:
    """Load the known data set, or the file, that section `data` of a configuration names.

    Records are held out by `split` (`RunConfig.split`), else by data.split or by index. Raises DataError if it cannot
    be read, ConfigError if the name stands for user-supplied arrays or an option does not apply, ModuleNotFoundError if
    a library is missing, and ValueError for an unknown name.
    """
    if options.name == OWN_ARRAYS:
        raise ConfigError(
            "configuration",
            "data.name",
            "stands for user-supplied arrays, which no file holds; give them again: "
            "opusim.train(..., data=(x, y)), with folder=... and resume=True to resume a run",
        )
    if options.file_kind == "text":
        return load_text(
            options.file,
            context=options.context,
            tokenizer=None if options.tokenizer is None else Path(options.tokenizer),
            validation_fraction=options.validation_fraction,
            test=None if options.test is None else Path(options.test),
            name=options.name,
        )
    rule = split or options.split or "index"
    if options.file_kind is not None:
        return file_dataset(options, rule)
    if options.name not in CATALOGUE:
        raise unknown_name(options.name)
    if options.standardise == "records":
        reason = f"'records' is for user-supplied data; leave it out for {options.name}, whose constants are published"
        raise ConfigError("configuration", "data.standardise", reason)
    for key in ("n_classes", "target", "inputs", "vocabulary", "label", "classes"):
        value = getattr(options, key)
        if value not in (None, "auto", ()):
            reason = f"{value!r} is for user-supplied data; leave it out for {options.name}"
            raise ConfigError("configuration", f"data.{key}", reason)
    if rule == "id":
        reason = f"'id' is for arrays that are given with IDs; use 'index' or 'content' for {options.name}"
        raise ConfigError("configuration", "data.split", reason)
    return load_dataset(
        options.name,
        validation_fraction=options.validation_fraction,
        split_seed=options.split_seed,
        split=rule,
        standardise=standardisation_of(options) or options.standardise,
    )


def unknown_name(name: str) -> ValueError:
    """Return the error of an unknown data.name, with the name that was probably meant."""
    meant = named_file(str(name)) or meant_by(str(name), CATALOGUE)
    hint = f"; did you mean {meant!r}?" if meant else ""
    files = ", ".join(f"{known}:PATH" for known in FILE_KINDS)
    return ValueError(
        f"data.name = {name!r}: must be one of {', '.join(CATALOGUE)}, {files}, or package.module:function{hint}"
    )


def load_dataset(
    name: str,
    *,
    validation_fraction: float = 0.1,
    split_seed: int,
    split: Literal["index", "content"] = "index",
    standardise: bool | Standardisation = True,
) -> Dataset:
    """Load a known data set and hold out part of its training records for validation.

    Features are pixels scaled to [0, 1], then standardised with the constants published for the data set; none are
    computed from the records. The choice of validation records never looks at labels (see `from_arrays`).

    - ``digits``: 1,797 images of 8 x 8 pixels, shipped with scikit-learn. They come without a test set, so a fixed
      fifth (359 records, the same for every `split_seed`) serves as one.
    - ``mnist``, ``fashion-mnist``: 60,000 training and 10,000 test images of 28 x 28 pixels, from the folder that the
      environment variable ``OPUSIM_DATA`` names (``MNIST/raw/train-images-idx3-ubyte.gz`` and so on, compressed or
      not), or downloaded from openml.org if it is not set.
    - ``cifar-10``: 50,000 training and 10,000 test images of 3 x 32 x 32 pixels, channels first, from JPEG files in
      ``CIFAR10-jpeg/cifar10-jpeg.tar.xz`` of that folder. They are decoded once and cached next to the archive if that
      folder is writable.

    Args:
        name: ``"digits"``, ``"mnist"``, ``"fashion-mnist"`` or ``"cifar-10"``.
        validation_fraction: Share of the training records to hold out, in [0, 1).
        split_seed: Chooses the validation records, in [0, 2^64).
        split: Rule that chooses them, see `from_arrays`.
        standardise: Whether to subtract the published mean and divide by the published standard deviation; or other
            constants to use instead, for features in [0, 1].

    Returns:
        The data set, with ten classes and a test split.

    Raises:
        ValueError: The name is unknown, or an argument is out of range.
        DataError: A file is missing or damaged, or the download failed.

    Example:
        >>> digits = load_dataset("digits", split_seed=0)
        >>> len(digits.train), len(digits.validation), len(digits.test), digits.n_features
        (1294, 144, 359, 64)
    """
    if name not in CATALOGUE:
        raise unknown_name(name)
    entry = CATALOGUE[name]
    published = entry.standardisation if standardise else None
    constants = standardise if isinstance(standardise, Standardisation) else published
    parts = {part: (entry.images(x), y) for part, (x, y) in entry.read().items()}
    return from_arrays(
        *parts["train"],
        name=name,
        n_classes=10,
        validation_fraction=validation_fraction,
        split_seed=split_seed,
        split=split,
        test=parts["test"],
        standardise=constants,
    )


def download_labelled_images(source: OpenmlSource) -> Parts:
    """Download a data set from openml.org through scikit-learn, which keeps a copy: pixels float32 from 0 to 255.

    scikit-learn's parser in plain Python reads the file: it needs no pandas, and is slow for 70,000 images. Raises
    DataError if the download failed, or does not hold what `source` says.
    """
    from sklearn.datasets import fetch_openml

    try:
        pixels, labels = fetch_openml(
            data_id=source.data_id, as_frame=False, parser="liac-arff", return_X_y=True
        )
    except (OSError, HTTPException, ValueError) as error:  # no network, a broken answer, a wrong checksum
        if isinstance(error, HTTPError):
            error.close()  # it holds the connection
        raise DataError(
            f"{source.name} could not be downloaded from openml.org ({error}); check the network and try "
            f"again, or set {VARIABLE} to a folder that holds the data in the layout that torchvision writes"
        ) from error
    if len(pixels) != source.n_train + source.n_test:
        raise DataError(
            f"{source.name} from openml.org holds {len(pixels)} records, not "
            f"{source.n_train + source.n_test}; delete scikit-learn's copy "
            "(sklearn.datasets.get_data_home() says where it is) and try again"
        )
    x, y = pixels.astype(np.float32), labels.astype(np.int64)
    n = source.n_train
    return {"train": (x[:n], y[:n]), "test": (x[n:], y[n:])}


def _read_digits() -> Parts:
    """Return the digits of scikit-learn; the test part is a fifth, chosen by the fixed seed 0.

    The file is read directly, because importing sklearn takes longer than an epoch.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError(
            "data.name = 'digits' comes with scikit-learn, which is missing; install scikit-learn"
        )
    rows = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    pixels, labels = rows[:, :-1], rows[:, -1].astype(np.int64)
    train, test = (positions.numpy() for positions in split_by_index(len(pixels), 0.2, seed=0))
    return {"train": (pixels[train], labels[train]), "test": (pixels[test], labels[test])}


def _read_images(folder: str, source: OpenmlSource) -> Parts:
    """Read images from the folder of OPUSIM_DATA, or download them if that is not set."""
    path = _data_folder(f"{folder}/raw/")
    return download_labelled_images(source) if path is None else read_labelled_images(path, folder)


def _read_cifar10() -> Parts:
    """Read images from the folder of OPUSIM_DATA; there is no download."""
    path = _data_folder(ARCHIVE)
    if path is None:
        raise DataError(f"{VARIABLE} is not set: set it to the folder that holds {ARCHIVE}")
    return read_cifar10(path)


def file_sizes(name: str) -> dict[str, int | None]:
    """Return the bytes of each file of a known data set in the folder of OPUSIM_DATA, or None if it is missing.

    Nothing is listed if OPUSIM_DATA is not set, or if the data set comes with a library.
    """
    files = CATALOGUE[name].files
    root = _data_folder("the data") if files else None
    if root is None:
        return {}
    found = {file: next(filter(Path.is_file, (root / f"{file}.gz", root / file)), None) for file in files}
    return {file: None if path is None else path.stat().st_size for file, path in found.items()}


def _data_folder(content: str) -> Path | None:
    """Return the folder that OPUSIM_DATA names, or None if it is not set; raise DataError if it does not exist."""
    root = os.environ.get(VARIABLE)
    if not root:
        return None
    path = Path(root).expanduser()
    if not path.is_dir():
        raise DataError(
            f"{VARIABLE} is {root}, which is not a folder: set it to the folder that holds {content}, or "
            "unset it to download the data from openml.org"
        )
    return path


_MNIST = OpenmlSource(data_id=554, name="mnist_784", n_train=60_000, n_test=10_000)
_FASHION_MNIST = OpenmlSource(data_id=40996, name="Fashion-MNIST", n_train=60_000, n_test=10_000)

CATALOGUE: dict[str, Entry] = {
    "digits": Entry(
        full_scale=16,
        standardisation=Standardisation(
            mean=0.3053,
            std=0.3760,
            source="all 1,797 published records of the UCI optdigits test set, pixels / 16, to four digits",
        ),
        read=_read_digits,
    ),
    "mnist": Entry(
        full_scale=255,
        standardisation=Standardisation(
            mean=0.1307,
            std=0.3081,
            source="the 60,000 published training images, pixels / 255: as in PyTorch's MNIST example",
        ),
        read=partial(_read_images, "MNIST", _MNIST),
        files=tuple(f"MNIST/raw/{file}" for file in IMAGE_FILES),
    ),
    "fashion-mnist": Entry(
        full_scale=255,
        standardisation=Standardisation(
            mean=0.2860,
            std=0.3530,
            source="the 60,000 published training images, pixels / 255",
        ),
        read=partial(_read_images, "FashionMNIST", _FASHION_MNIST),
        files=tuple(f"FashionMNIST/raw/{file}" for file in IMAGE_FILES),
    ),
    "cifar-10": Entry(
        full_scale=255,
        standardisation=Standardisation(
            mean=0.4734,
            std=0.2516,
            source="over all channels, from those of each over the 50,000 published training images, pixels / 255",
        ),
        read=_read_cifar10,
        channels=3,
        files=(ARCHIVE,),
    ),
}
"""Every known data set by name."""
