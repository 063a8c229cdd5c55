"""Classification as a language model sees it: a text in a prompt, and one word for each class.

The DP-ZO paper's prompt for SST-2 (Table 14) is "<text> It was terrible/great": the scores of the classes are the
logits of their words behind "It was", or in the place of the mask. Token numbers travel as float32 features, which hold
whole numbers up to 2^24 exactly; -1 stands where a shorter text has no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opusim.files import read_text
from training.data.dataset import DataError

PAD = -1.0
_TEXTS_LIMIT = 2**30
"""Bytes of a file of texts, at most."""
TEXT, MASK = "{text}", "{mask}"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """How a text becomes a question, and classes become words.

    Attributes:
        template: Holds {text} once; for a masked model {mask} once too. What follows the text is never cut off.
        classes: The word of each class, in the order of the labels; each must be one token behind the template.
        max_tokens: Longest prompt; longer texts lose their end.
    """

    template: str = "{text} It was"
    classes: tuple[str, ...] = ("terrible", "great")
    max_tokens: int = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(self.classes))
        if self.template.count(TEXT) != 1 or self.template.count(MASK) > 1:
            raise ValueError(f"template = {self.template!r}: must hold {TEXT} once, and {MASK} at most once")
        if len(self.classes) < 2 or len(set(self.classes)) != len(self.classes):
            raise ValueError(f"classes = {list(self.classes)}: must be at least two different words")
        if self.max_tokens < 8:
            raise ValueError(f"max_tokens = {self.max_tokens}: must be at least 8")

    @property
    def masked(self) -> bool:
        """Whether the class word stands in a mask, not at the end."""
        return MASK in self.template

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"classes": list(self.classes)}


def encode(tokenizer: Any, texts: Sequence[str], prompt: Prompt) -> Tensor:  # (n, L)
    """Token numbers of texts in their prompts, padded with -1: on the left, behind a mask template on the right.

    All are max_tokens wide, whatever the texts: the longest one's length would tell of a private record.

    Args:
        tokenizer: Of transformers.
        texts: At least one.
        prompt: The template; its end is kept whole.

    Raises:
        ValueError: The template alone is longer than max_tokens, or has a mask and the tokenizer has none.
    """
    before, after = _template_parts(tokenizer, prompt)
    room = prompt.max_tokens - len(after) - len(before) - len(_special(tokenizer))
    if room < 1:
        raise ValueError(
            f"max_tokens = {prompt.max_tokens}: leaves no room for a text in {prompt.template!r}"
        )
    encoded = torch.full((len(texts), prompt.max_tokens), PAD)
    for number, text in enumerate(texts):
        middle = tokenizer(text, add_special_tokens=False)["input_ids"][:room]
        row = _with_special(tokenizer, [*before, *middle, *after], masked=prompt.masked)
        place = slice(0, len(row)) if prompt.masked else slice(prompt.max_tokens - len(row), None)
        encoded[number, place] = torch.tensor(row, dtype=torch.float32)
    return encoded


def class_tokens(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The token of each class's word as it stands behind a space.

    Raises:
        ValueError: A word takes more than one token, or two share one.
    """
    tokens = []
    for word in prompt.classes:
        found = tokenizer(word if prompt.masked else f" {word}", add_special_tokens=False)["input_ids"]
        unknown = getattr(tokenizer, "unk_token_id", None)
        if len(found) != 1 or found[0] == unknown:
            raise ValueError(
                f"classes: {word!r} is {len(found)} tokens, or unknown, to this tokenizer; choose a word that is one"
            )
        tokens.append(int(found[0]))
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"classes = {list(prompt.classes)}: two are the same token; choose other words")
    return tokens


def read_texts(path: Path) -> tuple[list[str], Tensor]:
    """Texts and labels of a file with a line for each: text, tab, class number.

    Raises:
        DataError: It cannot be read, or a line is something else.
    """
    try:
        lines = read_text(path, at_most=_TEXTS_LIMIT).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); give a file of lines: text, tab, label"
        ) from error
    texts, labels = [], []
    for number, line in enumerate(lines, start=1):
        text, tab, label = line.rpartition("\t")
        if not tab or not label.strip().isdigit():
            raise DataError(f"{path}: line {number} is not: text, tab, class number from 0")
        texts.append(text)
        labels.append(int(label))
    if not texts:
        raise DataError(f"{path}: is empty; give a line for each text: text, tab, label")
    return texts, torch.tensor(labels)


def _template_parts(tokenizer: Any, prompt: Prompt) -> tuple[list[int], list[int]]:
    """Tokens before and behind the text."""
    before, after = prompt.template.split(TEXT)
    if prompt.masked:
        if getattr(tokenizer, "mask_token", None) is None:
            raise ValueError(
                f"template = {prompt.template!r}: this tokenizer has no mask; end it with the words alone"
            )
        before, after = (part.replace(MASK, tokenizer.mask_token) for part in (before, after))
    return tuple(  # type: ignore[return-value]
        list(tokenizer(part, add_special_tokens=False)["input_ids"]) if part.strip() else []
        for part in (before, after)
    )


def _special(tokenizer: Any) -> list[int]:
    """What the tokenizer puts around a text by itself."""
    return list(tokenizer("", add_special_tokens=True)["input_ids"])


def _with_special(tokenizer: Any, tokens: list[int], *, masked: bool) -> list[int]:
    """The tokens between the tokenizer's own; nothing behind a prompt whose end is asked for."""
    around = _special(tokenizer)
    if masked and len(around) == 2:
        return [around[0], *tokens, around[1]]
    return [*around[:1], *tokens] if around else tokens
