"""Make a data set of a text file: windows of bytes or tokens, each to be predicted from those before it.

The last part of a text is held out as one piece. Windows drawn at random would have neighbours of the same sentences in
the training set, and the figures on held-out records would be too good.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opusim.files import open_to_read
from opusim.training.data.dataset import Dataset, Split, Standardisation
from opusim.training.data.formats import required_library
from opusim.training.errors import DataError

TEXT_LIMIT = 2**28
"""Bytes of a text file, at most; in memory each token takes 8 bytes."""
_TOKENIZER_LIMIT = 2**26
_BYTE_VALUES = 256
_PIECE = 2**20
"""Characters after which a text is cut at the next line's end, and each piece encoded separately."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """How a text becomes tokens: as its bytes, or by a tokenizer of the library `tokenizers`.

    Attributes:
        vocabulary: Number of token values.
        tokenizer: The tokenizer, or None if tokens are bytes.
        digest: BLAKE2b of the tokenizer's file, or None if tokens are bytes.
    """

    vocabulary: int = _BYTE_VALUES
    tokenizer: Any = None
    digest: str | None = None

    @classmethod
    def from_file(cls, path: Path) -> Encoder:
        """Read a tokenizer.json.

        Raises:
            DataError: The file cannot be read, is too long or holds no tokenizer.
            ModuleNotFoundError: The library `tokenizers` is missing.
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
        """Return the tokens of a text, shape (n,), int64.

        Raises:
            DataError: A tokenizer is given text that is not UTF-8.
        """
        if self.tokenizer is None:
            return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).astype(np.int64))
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8 text ({error.reason}); leave data.tokenizer out to take it as bytes"
            ) from error
        encode = self.tokenizer.encode
        ids = [np.array(encode(piece, add_special_tokens=False).ids, np.int64) for piece in _pieces(text)]
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
    """Make a data set of windows of a text: T tokens x and the T tokens y that follow each of them.

    The text is cut into windows of T + 1 tokens that do not overlap; x is a window without its last token, y without
    its first. A last, shorter window is left out. The last ``validation_fraction`` of the bytes is held out, rounded to
    the start of a UTF-8 character, and encoded separately; `Dataset.origin` has the bytes and tokens of each part.

    Args:
        path: The file, of at most `TEXT_LIMIT` bytes; any content is text.
        context: T, at least 1.
        tokenizer: A tokenizer.json, for UTF-8 text; None takes bytes, of which there are 256.
        validation_fraction: Share of the text to hold out, in [0, 1).
        test: A file of test records, encoded in the same way.
        name: Name of the data set in reports; None takes ``text:PATH``.

    Raises:
        DataError: A file cannot be read, is too long, too short for one window, or not UTF-8 for a tokenizer.
        ModuleNotFoundError: A tokenizer is given, and the library `tokenizers` is missing.
    """
    encoder = Encoder() if tokenizer is None else Encoder.from_file(tokenizer)
    content = _read(path, TEXT_LIMIT, "text")
    cut = _character_start(content, len(content) - round(validation_fraction * len(content)))
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


def _character_start(content: bytes, position: int) -> int:
    """Return the first position from here on, by at most 3 bytes, at which no UTF-8 character continues."""
    near = range(position, min(position + 4, len(content)))
    return next((place for place in near if content[place] >> 6 != 0b10), position)


def _pieces(text: str) -> Iterator[str]:
    """Cut a text at line ends into pieces of about `_PIECE` characters."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE) + 1 or len(text)
        yield text[start:end]
        start = end
