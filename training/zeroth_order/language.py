"""Fine-tune language models of transformers and peft on texts; needs the extra `llm`.

To classify, a text stands in a prompt, and one word stands for each class: the scores of the classes are the logits of
their words after the prompt, or at its mask. The DP-ZO paper's prompt for SST-2 (Table 14) is "<text> It was
terrible/great". To model language, the loss of a text is that of its next tokens. Token numbers travel as float32
features, which hold whole numbers up to 2^24 exactly; -1 pads shorter texts. The whole model is trained, or low-rank
updates of it (LoRA, Hu et al. 2022), or a prefix (Li and Liang 2021).
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import reprlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from opusim.errors import ConfigError
from opusim.files import read_text
from opusim.tables import data_size
from opusim.training.config.run import RunConfig
from opusim.training.config.sections import DataConfig
from opusim.training.data.formats import required_library
from opusim.training.data.tables import read_frame
from opusim.training.errors import DataError
from opusim.training.networks.base import DescribedModule, SharedRows
from opusim.training.zeroth_order.config import ZoConfig, table_kind

PAD = -1.0
_INVENTED, _LONGEST = 9, 16
"""Invented prompts, and the tokens of the longest, which a model with few positions takes."""
_TEXTS_LIMIT = 2**30
"""Largest number of bytes of a file of texts."""
_CLASS_NUMBER = re.compile("[0-9]{1,9}")
TEXT, MASK = "{text}", "{mask}"
_PACKAGE, _GGUF = "package:", ".gguf"
_LOGITS_AT_ONCE = 2**26
"""Scores of words of the vocabulary that stand in memory at once: 256 MiB in float32."""
_LEAST_LOSS = 1e-6
"""A loss of a text below it counts as it, so that its score is finite."""
_ROW = 512
"""Tokens of a row that several prompts share, if none is longer."""
_LEAST = 16
"""Tokens of a row at least: libraries round a product of fewer rows in another way."""
_ALIKE = 0.1
"""How far roundings may bring the scores of a prompt apart that shares its row, over one plus the score."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A template around a text, and a word for each class.

    Attributes:
        template: Holds {text} once, and for a masked model {mask} once. The part after the text is never truncated.
        classes: The word of each class, in the order of the labels; each must be one token after the template.
        max_tokens: Length of the longest prompt; longer texts lose their end.
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
        """Whether the class word replaces a mask instead of following the prompt."""
        return MASK in self.template


def encode(tokenizer: Any, texts: Sequence[str], prompt: Prompt) -> Tensor:  # (n, L)
    """Return the token numbers of texts in their prompts, padded with -1 on the left, or on the right for a mask.

    All rows are max_tokens wide, because the length of the longest text would reveal something about a private record.
    The template's end is kept whole; "{text}" alone encodes texts for a `TextModel`. Raises ValueError if it leaves no
    room, or has a mask and the tokenizer has none.
    """
    return _encoded(tokenizer, texts, prompt)[0]


def _encoded(tokenizer: Any, texts: Sequence[str], prompt: Prompt) -> tuple[Tensor, int]:
    """Return what `encode` does, and how many texts lost their end."""
    # 1. The tokens before and after the text, and the special ones that the tokenizer puts around it.
    parts = prompt.template.split(TEXT)
    if prompt.masked:
        if getattr(tokenizer, "mask_token", None) is None:
            raise ValueError(f"template = {prompt.template!r}: this tokenizer has no mask; leave {MASK} out")
        parts = [part.replace(MASK, tokenizer.mask_token) for part in parts]
    before, after = (
        list(tokenizer(part, add_special_tokens=False)["input_ids"]) if part.strip() else [] for part in parts
    )
    special = list(tokenizer("", add_special_tokens=True)["input_ids"])
    room = prompt.max_tokens - len(after) - len(before) - len(special)
    if room < 1:
        raise ValueError(
            f"max_tokens = {prompt.max_tokens}: leaves no room for a text in {prompt.template!r}"
        )
    # 2. A row for each text; no special token stands behind a prompt that the class word follows.
    encoded, shortened = torch.full((len(texts), prompt.max_tokens), PAD), 0
    for number, text in enumerate(texts):
        middle = tokenizer(text, add_special_tokens=False)["input_ids"]
        shortened += len(middle) > room
        last = special[1:] if prompt.masked and len(special) == 2 else []
        row = [*special[:1], *before, *middle[:room], *after, *last]
        place = slice(0, len(row)) if prompt.masked else slice(prompt.max_tokens - len(row), None)
        encoded[number, place] = torch.tensor(row, dtype=torch.float32)
    return encoded, shortened


def class_tokens(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Return the token of each class's word after a space; raise ValueError unless each has one of its own."""
    tokens = []
    for word in prompt.classes:
        found = tokenizer(word if prompt.masked else f" {word}", add_special_tokens=False)["input_ids"]
        unknown = getattr(tokenizer, "unk_token_id", None)
        if len(found) != 1 or found[0] == unknown:
            raise ValueError(
                f"classes: {word!r} is {len(found)} tokens or unknown to this tokenizer; choose a word of one token"
            )
        tokens.append(int(found[0]))
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"classes = {list(prompt.classes)}: two words share a token; choose other words")
    return tokens


def read_texts(
    path: Path,
    *,
    columns: Sequence[str] = ("text", "label"),
    classes: Sequence[str] = (),
    labelled: bool = True,
) -> tuple[list[str], Tensor]:
    """Read texts and labels from a table (CSV or Parquet), or from a file of lines: text, tab, label.

    A file that ends in .csv, .csv.gz or .parquet is a table with a header and these columns. Classes are words that may
    stand for the numbers 0, 1, ...; without labels a line is a text, and all labels are 0. Raises DataError if the file
    cannot be read, lacks a column, or a line has another form, and ModuleNotFoundError if a library is missing.
    """
    kind = table_kind(path)
    if kind is None:
        rows = _lines(path, labelled=labelled)
    else:
        frame: Any = read_frame(path, DataConfig(name=f"{kind}:{path}"))
        rows = _cells(frame, columns if labelled else columns[:1], path)
    if not rows:
        raise DataError(f"{path}: is empty; give at least one text")
    labels = []
    for number, row in enumerate(rows, start=1):
        label = row[1].strip() if labelled else "0"
        if label not in classes and not _CLASS_NUMBER.fullmatch(label):
            words = f", nor one of {', '.join(classes)}" if classes else ""
            raise DataError(f"{path}: label {number} is {reprlib.repr(label)}, no class number from 0{words}")
        labels.append(classes.index(label) if label in classes else int(label))
    return [row[0] for row in rows], torch.tensor(labels)


def _cells(frame: Any, columns: Sequence[str], path: Path) -> list[tuple[str, ...]]:
    """Return some columns of a table as text, a row each."""
    found = [str(column) for column in frame.columns]
    for column in columns:
        if found.count(column) != 1:
            raise DataError(
                f"{path} has {found.count(column)} columns {column!r} among {', '.join(found)}; name the one of texts "
                "and the one of labels in trainer.language.columns"
            )
        missing = frame[column].isna().to_numpy().nonzero()[0]
        if len(missing):
            raise DataError(
                f"{path}: row {missing[0] + 1} has no {column!r}: an empty cell, or a word that tables take for one, "
                "such as NA; leave the row out"
            )
    return list(zip(*(frame[column].astype(str) for column in columns), strict=True))


def _lines(path: Path, *, labelled: bool) -> list[tuple[str, ...]]:
    """Read a file of lines: a text, and a tab and a label if there are labels."""
    form = "text, tab, label" if labelled else "a text on each"
    try:
        lines = read_text(path, at_most=_TEXTS_LIMIT).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); give a CSV or Parquet table, or a file of lines: {form}"
        ) from error
    rows = [tuple(line.rsplit("\t", 1)) if labelled else (line,) for line in lines]
    for number, row in enumerate(rows, start=1):
        if labelled and len(row) == 1:
            raise DataError(
                f"{path}: line {number} is not: text, tab, class number from 0; the name of a table with a header ends "
                "in .csv or .parquet"
            )
    return rows


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank updates of some layers' weights; all other parameters are frozen.

    Attributes:
        rank: r, at least 1 (8 in the DP-ZO paper).
        alpha: The update is multiplied by alpha / r.
        targets: Names of the modules that get an update; if empty, those that peft knows for the architecture.
        seed: Seed of the initial factors.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Keys and values of tokens before the text, in each layer; all other parameters are frozen.

    Attributes:
        tokens: Number of tokens, at least 1 (5 in the DP-ZO paper).
        seed: Seed of the random tokens whose keys and values the prefix begins with.
    """

    tokens: int = 5
    seed: int = 0


class _LanguageModel(DescribedModule):
    """A language model on encoded texts.

    Args:
        model: A model of transformers, possibly wrapped by peft.
        words: Tokens from which invented records are made.
        mask_token: Number of the mask token for a masked model, else None.
        description: How to load the model again, stored in `config.json`; empty if no name loads it.
    """

    def __init__(
        self,
        model: nn.Module,
        words: Sequence[int],
        *,
        mask_token: int | None = None,
        description: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.description = dict(description or {})
        self._mask_token = mask_token
        self._tokens = list(words)
        self._shortens = True
        self._separates: bool | None = None  # prompts that share a row; None if that is not known yet
        self._attends_alone = False  # each prompt of a row, in all layers
        self._accepted = _accepted(model)

    def invented_records(self, n_inputs: int) -> Tensor:
        """See DescribedModule: prompts of several lengths that hold the words, in several orders."""
        x = torch.full((_INVENTED, n_inputs), PAD)
        for number, row in enumerate(x):
            length = min(n_inputs, _LONGEST - number % 4)
            words = [self._tokens[(number + k * (k + number)) % len(self._tokens)] for k in range(length)]
            if self._mask_token is not None:
                words[number % length] = self._mask_token
            place = slice(n_inputs - length, None) if self._mask_token is None else slice(0, length)
            row[place] = torch.tensor(words, dtype=torch.float32)
        return x

    @contextmanager
    def whole_records(self) -> Iterator[None]:
        """See DescribedModule: the columns kept are those of invented records, and all records run at once."""
        self._shortens = False
        try:
            yield
        finally:
            self._shortens = True

    def _logits(self, x: Tensor, *, last: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return token numbers and where there is one, shape (batch, T), and scores (batch, T, vocabulary).

        Columns that no record uses are left out. `last` asks for the scores after the last token only; their T may then
        be 1.
        """
        present = x != PAD
        used: Tensor | slice = present.any(dim=0)  # columns with a token of some record
        if self.alike:
            used = slice(None)
        elif not self._shortens:
            used = slice(-_LONGEST, None) if self._mask_token is None else slice(_LONGEST)
        x, present = x[:, used], present[:, used]
        ids, mask = torch.where(present, x, 0.0).long(), present.long()
        options: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if "position_ids" in self._accepted and self._mask_token is None:
            options["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
        if last and "logits_to_keep" in self._accepted:
            options["logits_to_keep"] = 1
        return ids, present, self._run(**options)

    def _run(self, **options: Any) -> Tensor:
        """Return the scores of the model's words."""
        if "use_cache" in self._accepted:
            options["use_cache"] = False
        scores: Tensor = self.model(**options).logits
        return scores


class PromptClassifier(_LanguageModel):
    """A language model whose class scores are the logits of the classes' words; arguments as `_LanguageModel`.

    The words are those of the classes, in their order. The model is masked if the prompt has a mask, else causal. An
    output layer that is frozen computes the scores of these words only, in float32.
    """

    def forward(self, x: Tensor) -> Tensor:  # (batch, L) -> (batch, n_classes)
        """Return class scores of encoded prompts."""
        with self._class_words() as words:
            packs = self.packs and self._shortens and (len(x) > 1 or self.alike)
            if packs and not torch.is_grad_enabled() and self._separate(x.shape[1], words):
                scores = self._packed(x, words)
                if self._attends_alone or bool(torch.isfinite(scores).all()):
                    return scores  # else 0 times infinity would reach the prompts of the row
            ids, _, logits = self._logits(x, last=self._mask_token is None)
            if self._mask_token is None:
                return logits[:, -1, words]
            place = (ids == self._mask_token).long().argmax(dim=1)
            return logits[torch.arange(len(ids), device=ids.device), place][:, words]

    def in_shared_rows(self, x: Tensor) -> SharedRows | None:
        """See DescribedModule: rows that several prompts share, each of which attends to itself only."""
        with self._class_words() as words:
            if not self._separate(x.shape[1], words) or not self._attends_alone:
                return None
        rows = _Rows(x)

        def scores(*rows_of_tensors: Tensor) -> Tensor:  # (rows, kept columns, classes)
            with self._class_words() as words:
                return self._scores_of(rows, *rows_of_tensors)[..., words].float()

        return SharedRows(
            function=scores,
            batch=(rows.ids, rows.places, rows.mask(_unwrapped(self.model).dtype)),  # type: ignore[arg-type]
            outputs=lambda found: found[rows.ends[:, 0], rows.column],
        )

    def _separate(self, n_inputs: int, words: list[int] | slice) -> bool:
        """Return whether prompts that share a row have their own scores, to the bit, whatever stands in the others.

        A layer that takes no mask, such as a recurrent one, would mix them. Scores in the company of fewer prompts, in
        another order, may be rounded otherwise, unless all must be `alike`. This is found out once.
        """
        if self._mask_token is not None or not {"position_ids", "logits_to_keep"} <= self._accepted:
            return False
        if self._separates is not None:
            return self._separates
        x = self.invented_records(n_inputs).to(next(self.parameters()).device)
        order = sorted(range(len(x)), key=lambda n: -int((x[n] != PAD).sum()))
        changed = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        changed[[order[0], order[-2]]] = True  # the first and the last of a row
        others = torch.where(changed[:, None] & (x != PAD), x.max(), x)
        some = torch.arange(len(x) - 1, 0, -2)
        with torch.no_grad():
            _, _, logits = self._logits(x, last=True)
            alone, scores, found = logits[:, -1, words], self._packed(x, words), self._packed(others, words)
            alike = not self.alike or torch.equal(self._packed(x[some], words), scores[some])
        near = torch.allclose(scores.float(), alone.float(), rtol=_ALIKE, atol=_ALIKE)
        self._separates = near and alike and torch.equal(found[~changed], scores[~changed])
        return self._separates

    @contextmanager
    def _class_words(self) -> Iterator[list[int] | slice]:
        """Let a frozen output layer compute the scores of the class words only; yield where they stand in the scores.

        It has a word of the vocabulary in each row: 49,152 of 576 numbers in SmolLM2, a fifth of a short prompt's pass.
        """
        get = getattr(_unwrapped(self.model), "get_output_embeddings", None)
        layer = get() if callable(get) else None
        if type(layer) is not nn.Linear or any(p.requires_grad for p in layer.parameters()):
            yield self._tokens
            return
        weight, held = layer.weight[self._tokens].float(), layer.bias
        bias = None if held is None else held[self._tokens].float()

        def scores(hidden: Tensor) -> Tensor:
            with torch.autocast(hidden.device.type, enabled=False):
                return functional.linear(hidden.float(), weight, bias)

        vars(layer)["forward"] = scores
        try:
            yield slice(None)
        finally:
            del vars(layer)["forward"]

    def _packed(self, x: Tensor, words: list[int] | slice) -> Tensor:
        """Return class scores from rows that several prompts share, each token of which sees its own prompt only.

        A batch of short prompts then has little padding.
        """
        rows = _Rows(x)
        mask = rows.mask(_unwrapped(self.model).dtype)  # type: ignore[arg-type]  # of transformers
        return self._scores_of(rows, rows.ids, rows.places, mask)[rows.ends[:, 0], rows.column][:, words]

    def _scores_of(self, rows: _Rows, ids: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        """Return scores behind the last tokens of prompts, for rows or for several copies of them."""
        with _OwnAttention(rows) as attention:
            scores = self._run(
                input_ids=ids, attention_mask=mask, position_ids=places, logits_to_keep=rows.kept
            )
        self._attends_alone = attention.used
        return scores


class _Rows:
    """Prompts in rows that several share, the longest first, each in the first row with room.

    Attributes:
        ids: Tokens, shape (rows, columns).
        places: Their places in their prompts.
        parts: Row, first column and column behind the last one of each prompt.
        ends: Row and last column of each prompt, in their order, shape (n, 2).
        kept: Columns in which prompts end.
        column: Where each prompt's end is among them, shape (n,).

    Args:
        x: Encoded prompts, shape (n, L).
    """

    def __init__(self, x: Tensor) -> None:
        present = x != PAD
        lengths: list[int] = present.sum(dim=1).tolist()
        # 1. The rows.
        room, rows, used = max(_ROW, *lengths), list[list[int]](), list[int]()
        for number in sorted(range(len(x)), key=lambda n: -lengths[n]):
            row = next((n for n, taken in enumerate(used) if taken + lengths[number] <= room), len(rows))
            if row == len(rows):
                rows.append([])
                used.append(0)
            rows[row].append(number)
            used[row] += lengths[number]
        # 2. Tokens, their places in their prompts, and whose they are: -1 where a row is filled up.
        shape = len(rows), max(_LEAST, *used)
        ids, places, owners = (torch.full(shape, value, dtype=torch.long) for value in (0, 0, -1))
        ends, tokens = torch.zeros(len(x), 2, dtype=torch.long), x.cpu()
        self.parts = list[tuple[int, int, int]]()
        for row, numbers in enumerate(rows):
            start = 0
            for number in numbers:
                end = start + lengths[number]
                ids[row, start:end] = tokens[number][tokens[number] != PAD].long()
                places[row, start:end], owners[row, start:end] = torch.arange(end - start), number
                self.parts.append((row, start, end))
                ends[number], start = torch.tensor((row, end - 1)), end
        self.ids, self.places, self._owners, self.ends = (
            each.to(x.device) for each in (ids, places, owners, ends)
        )
        self.kept, self.column = self.ends[:, 1].unique(return_inverse=True)

    def mask(self, dtype: torch.dtype) -> Tensor:  # (rows, 1, columns, columns)
        """Return what is added to the scores of attention: 0 where a token sees another, else the least number."""
        sees = (self._owners[:, :, None] == self._owners[:, None, :]).tril_()[:, None]
        mask = torch.zeros(sees.shape, device=sees.device)
        return mask.masked_fill_(~sees, torch.finfo(torch.float32).min).to(dtype)


class _OwnAttention(TorchFunctionMode):
    """Within this context each prompt of a row attends to its own keys, and to those of a prefix.

    Elsewhere the mask forbids it anyway. But sums over a row's columns would round otherwise in other company, which
    half precision turns into differences as large as those that a step measures.

    Attributes:
        used: Whether any attention was evaluated so.

    Args:
        rows: The rows; a pass may hold several copies of them.
    """

    def __init__(self, rows: _Rows) -> None:
        super().__init__()
        self._rows, self.used = rows, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Evaluate attention prompt by prompt, and all other functions as they are."""
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        count, columns = self._rows.ids.shape
        if attn_mask is None or query.shape[2] != columns:  # (rows, heads, columns, width)
            return functional.scaled_dot_product_attention(query, key, value, attn_mask, **options)
        self.used, prefix, found = True, key.shape[2] - columns, torch.zeros_like(query)

        def seen(each: Tensor, start: int, end: int) -> Tensor:
            own = each[:, :, prefix + start : prefix + end]
            return torch.cat([each[:, :, :prefix], own], dim=2) if prefix else own

        for row, start, end in self._rows.parts:
            found[row::count, :, start:end] = functional.scaled_dot_product_attention(
                query[row::count, :, start:end],
                seen(key[row::count], start, end),
                seen(value[row::count], start, end),
                seen(attn_mask[row::count, :, start:end].mT, start, end).mT,
                **options,
            )
        return found


class TextModel(_LanguageModel):
    """A causal model that scores whole texts as a classifier of two classes: 0, this text, and 1, any other.

    Let L be the mean negative log-likelihood of a text's tokens, each given those before it. The scores are 0 and
    log(e^L - 1), so that the cross-entropy of class 0, of probability e^-L, is L: the loss of language modelling, for a
    trainer of classifiers, with no more than `_LOGITS_AT_ONCE` scores of the vocabulary in memory.
    """

    def forward(self, x: Tensor) -> Tensor:  # (batch, L) -> (batch, 2)
        """Return the scores of encoded texts."""
        at_once = max(1, _LOGITS_AT_ONCE // (_vocabulary_of(self.model) * x.shape[1]))
        parts = x.split(at_once) if self._shortens else [x]
        loss = torch.cat([self._losses(part) for part in parts]).clamp(min=_LEAST_LOSS)
        return torch.stack([torch.zeros_like(loss), loss + torch.log(-torch.expm1(-loss))], dim=1)

    def _losses(self, x: Tensor) -> Tensor:
        """Return the mean loss of each text's tokens after its first one, shape (batch,)."""
        ids, present, logits = self._logits(x, last=False)
        logits, wanted, there = logits[:, :-1].float(), ids[:, 1:], (present[:, :-1] & present[:, 1:]).float()
        chosen = logits.gather(2, wanted.unsqueeze(2)).squeeze(2)
        losses = (torch.logsumexp(logits, dim=2) - chosen) * there
        return losses.sum(dim=1) / there.sum(dim=1).clamp(min=1)


def load_classifier(
    name: str | Path,
    prompt: Prompt | None,
    *,
    lora: Lora | None = None,
    prefix: Prefix | None = None,
    dtype: str = "float32",
    local_only: bool = False,
) -> tuple[PromptClassifier | TextModel, Any]:
    """Load a language model, and its tokenizer, from a local folder, a file `.gguf`, the hub or "package:NAME".

    The prompt's template decides between a causal and a masked model; None scores whole texts (`TextModel`). With
    `lora` or `prefix` only these are trained, in float32. A `.gguf` file is dequantised to the `dtype` of the model's
    parameters, "float32", "bfloat16" or "float16". `local_only` forbids downloads. Raises ModuleNotFoundError if
    transformers, peft or gguf is missing, and ValueError if there is no such model, its tokenizer does not match the
    prompt, or it takes no prefix.
    """
    transformers = _library("transformers")
    masked = prompt is not None and prompt.masked
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    place, file = _place_of(str(name))
    where: dict[str, Any] = {"local_files_only": local_only} | ({} if file is None else {"gguf_file": file})
    packed = getattr(transformers, "GgufConfig", None)  # which versions have that may leave weights in blocks
    unpacking = {} if file is None or packed is None else {"quantization_config": packed(dequantize=True)}
    try:
        if file is None:  # a file tells its kind when it is loaded
            config = transformers.AutoConfig.from_pretrained(place, **where)
            is_masked = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
            if is_masked and not getattr(config, "is_decoder", False) and not masked:
                raise ValueError(  # it was not trained to predict the next word
                    f"a model of type {config.model_type!r} predicts a masked word; put {MASK} in the place of the "
                    "class word of the prompt"
                )
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **where)
        model = auto.from_pretrained(place, **where, **unpacking, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise ValueError(f"language model {name}: cannot be loaded ({str(error).splitlines()[0]})") from error
    if lora is not None:
        model = with_lora(model, lora)
    if prefix is not None:
        if not {"past_key_values", "position_ids"} <= _accepted(model):
            raise ValueError(
                f"prefix_tokens = {prefix.tokens}: {type(model).__name__} takes no prefix at given positions; use "
                "lora_rank"
            )
        # It begins as keys and values of random tokens, as random numbers would undo the pretraining.
        generator = torch.Generator().manual_seed(prefix.seed)
        tokens = torch.randint(_vocabulary_of(model), (1, prefix.tokens), generator=generator)
        with torch.no_grad():
            found = model.eval()(input_ids=tokens, use_cache=True).past_key_values
        model = PrefixedModel(model, torch.stack([torch.cat([keys, values]) for keys, values, *_ in found]))
    description = {
        "name": str(name),
        "prompt": None if prompt is None else asdict(prompt) | {"classes": list(prompt.classes)},
        "lora": None if lora is None else asdict(lora),
        "dtype": dtype,
        **({} if prefix is None else {"prefix": asdict(prefix)}),
    }
    loaded: PromptClassifier | TextModel
    if prompt is None:
        loaded = TextModel(model, range(_LONGEST), description=description)
    else:
        loaded = PromptClassifier(
            model,
            class_tokens(tokenizer, prompt),
            mask_token=tokenizer.mask_token_id if masked else None,
            description=description,
        )
    parameters = list(model.parameters())
    size = data_size(sum(p.numel() * p.element_size() for p in parameters))
    total, trained = (
        sum(p.numel() for p in own) for own in (parameters, [p for p in parameters if p.requires_grad])
    )
    kinds = " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))
    loaded.notes = (
        f"language model {name}: {total:,} parameters in {kinds} take {size} of memory; {trained:,} are trained",
    )
    return loaded.eval(), tokenizer


def _place_of(name: str) -> tuple[str, str | None]:
    """Return the folder or the hub's name to load from, and the `.gguf` file in it, or None.

    Raises ValueError if there is no such file or package, or it does not hold one model, and ModuleNotFoundError.
    """
    path = Path(name)
    if name.startswith(_PACKAGE):
        package = name.removeprefix(_PACKAGE)
        found = importlib.util.find_spec(package) if package.isidentifier() else None
        if found is None or found.origin is None:
            raise ValueError(
                f"language model {name}: there is no installed package {package!r}; install it with pip"
            )
        folder = Path(found.origin).parent
        files = sorted(folder.glob(f"*{_GGUF}"))
        if len(files) != 1 and not (folder / "config.json").is_file():
            raise ValueError(
                f"language model {name}: the package holds {len(files)} files {_GGUF}, and no config.json; give the "
                "path of the model"
            )
        path = files[0] if len(files) == 1 else folder
    elif path.suffix != _GGUF:
        return name, None
    if path.is_dir():
        return str(path), None
    if not path.is_file():
        raise ValueError(f"language model {name}: there is no such file; check the path")
    required_library(
        "gguf", f"gguf is missing; the language model {name} needs it: pip install 'opusim[language]'"
    )
    return str(path.parent), path.name


def described_classifier(description: dict[str, Any]) -> PromptClassifier | TextModel:
    """Load the model that a run folder describes, with trained parameters to be filled in."""
    lora, prefix, prompt = (description.get(key) for key in ("lora", "prefix", "prompt"))
    return load_classifier(
        description["name"],
        None if prompt is None else Prompt(**prompt),
        lora=None if lora is None else Lora(**{**lora, "targets": tuple(lora["targets"])}),
        prefix=None if prefix is None else Prefix(**prefix),
        dtype=description["dtype"],
    )[0]


def with_lora(model: nn.Module, lora: Lora) -> nn.Module:
    """Add low-rank updates, float32 and from a separate generator; only they require a gradient afterwards.

    Raises ValueError if peft does not know which modules of the model to update.
    """
    peft = _library("peft")
    transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())  # GPT-2's linear layers
    options: dict[str, Any] = {
        "fan_in_fan_out": transposed,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
    }
    if lora.targets:
        options["target_modules"] = list(lora.targets)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses deprecated names of transformers
        torch.manual_seed(lora.seed)
        wrapped: nn.Module = peft.get_peft_model(model, peft.LoraConfig(**options))
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return wrapped


class PrefixedModel(nn.Module):
    """A causal model with a prefix; peft's own prefix drops the positions, which padding on the left needs.

    The model is frozen; each layer's keys and values, (layers, 2, heads, tokens, width), are trained in float32.
    """

    def __init__(self, model: nn.Module, prefix: Tensor) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.prefix = nn.Parameter(prefix.float())
        self.config = model.config

    def get_base_model(self) -> nn.Module:
        """Return the model without its prefix, by the name that peft's wrappers have."""
        return self.model

    def forward(self, *, attention_mask: Tensor, position_ids: Tensor, **options: Any) -> Any:
        """Return what the model returns for the tokens after the prefix."""
        tokens = self.prefix.shape[3]
        cache = _library("transformers").DynamicCache()
        for layer, pair in enumerate(self.prefix.to(self.model.dtype)):  # type: ignore[arg-type]  # of transformers
            keys, values = pair.unsqueeze(1).expand(-1, len(position_ids), -1, -1, -1)
            cache.update(keys, values, layer)
        is_added = attention_mask.ndim == 4  # to the scores of attention: 0 where a token is seen
        mask = functional.pad(attention_mask, (tokens, 0), value=0 if is_added else 1)
        return self.model(
            attention_mask=mask, position_ids=position_ids + tokens, past_key_values=cache, **options
        )


def _vocabulary_of(model: nn.Module) -> int:
    return int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]  # of transformers


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return a model without peft's wrapper."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def _accepted(model: nn.Module) -> set[str]:
    """Return the names of the arguments of a model's forward."""
    return set(inspect.signature(_unwrapped(model).forward).parameters)


def _library(name: str) -> Any:
    return required_library(name, f"{name} is missing; language models need it: pip install opusim[llm]")


def build_language(
    config: RunConfig,
) -> tuple[RunConfig, tuple[Tensor, Tensor], PromptClassifier | TextModel]:
    """Load the language model and the texts that a zo configuration names; a resumed run loads them again.

    Its seed fixes the initial factors of LoRA. Returns the configuration with its number of classes, encoded texts (n,
    length) and labels (n,), and the model. Raises ConfigError if trainer.language.text is missing, or data.n_classes
    differs from the number of words, else as `read_texts` and `load_classifier`.
    """
    options = config.trainer_as(ZoConfig).language
    classifies = options.task == "classify"
    words, stated = len(options.classes) if classifies else 2, config.data.n_classes
    if stated not in (None, words):
        raise ConfigError(
            "configuration",
            "data.n_classes",
            f"{stated} differs from the number of trainer.language.classes, {words}; leave it out",
        )
    if options.text is None:
        raise ConfigError(
            "configuration",
            "trainer.language.text",
            "is missing: give the path of a CSV or Parquet table, or of a file of lines: text, tab, class number",
        )
    texts, labels = read_texts(
        Path(options.text), columns=options.columns, classes=options.classes, labelled=classifies
    )
    prompt = Prompt(template=TEXT, max_tokens=options.max_tokens)
    if classifies:
        prompt = Prompt(template=options.prompt, classes=options.classes, max_tokens=options.max_tokens)
    rank, targets, tokens = options.lora_rank, options.lora_targets, options.prefix_tokens
    lora = prefix = None
    if rank is not None:
        lora = Lora(rank=rank, alpha=options.lora_alpha, targets=targets, seed=config.seed)
    if tokens is not None:
        prefix = Prefix(tokens=tokens, seed=config.seed)
    model, tokenizer = load_classifier(
        str(options.model), prompt if classifies else None, lora=lora, prefix=prefix, dtype=options.dtype
    )
    x, shortened = _encoded(tokenizer, texts, prompt)
    found = "their number is not reported, because it depends on the records"
    if config.mode == "experiment":
        padded = int((x == PAD).any(dim=1).sum())
        found = f"{shortened:,} of {len(texts):,} did, and {padded:,} shorter ones are padded"
    model.notes += (
        f"texts: beyond {options.max_tokens} tokens, the prompt's included, they lose their end; {found}",
    )
    return config.unchecked(data={"n_classes": words}), (x, labels), model
