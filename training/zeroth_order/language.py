"""Fine-tune language models of transformers and peft as classifiers of texts; needs the extra `llm`.

A text stands in a prompt, and one word stands for each class: the scores of the classes are the logits of their words
after the prompt, or at its mask. The DP-ZO paper's prompt for SST-2 (Table 14) is "<text> It was terrible/great". Token
numbers travel as float32 features, which hold whole numbers up to 2^24 exactly; -1 pads shorter texts. The whole model
is trained, or low-rank updates of it (LoRA, Hu et al. 2022).
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opusim.errors import ConfigError
from opusim.files import read_text
from opusim.training.config.run import RunConfig
from opusim.training.data.formats import required_library
from opusim.training.errors import DataError
from opusim.training.networks.base import DescribedModule
from opusim.training.zeroth_order.config import ZoConfig

PAD = -1.0
_INVENTED, _LONGEST = 9, 16
"""Invented prompts, and the tokens of the longest, which a model with few positions takes."""
_TEXTS_LIMIT = 2**30
"""Largest number of bytes of a file of texts."""
_CLASS_NUMBER = re.compile("[0-9]{1,9}")
TEXT, MASK = "{text}", "{mask}"


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

    Args:
        tokenizer: A tokenizer of transformers.
        texts: At least one text.
        prompt: The template; its end is kept whole.

    Raises:
        ValueError: The template leaves no room within max_tokens, or has a mask and the tokenizer has none.
    """
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
    encoded = torch.full((len(texts), prompt.max_tokens), PAD)
    for number, text in enumerate(texts):
        middle = tokenizer(text, add_special_tokens=False)["input_ids"][:room]
        last = special[1:] if prompt.masked and len(special) == 2 else []
        row = [*special[:1], *before, *middle, *after, *last]
        place = slice(0, len(row)) if prompt.masked else slice(prompt.max_tokens - len(row), None)
        encoded[number, place] = torch.tensor(row, dtype=torch.float32)
    return encoded


def class_tokens(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Return the token of each class's word after a space.

    Raises:
        ValueError: A word takes more than one token, or two words share one.
    """
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


def read_texts(path: Path) -> tuple[list[str], Tensor]:
    """Read texts and labels from a file of lines: text, tab, class number.

    Raises:
        DataError: The file cannot be read, or a line has another form.
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
        if not tab or not _CLASS_NUMBER.fullmatch(label.strip()):
            raise DataError(f"{path}: line {number} is not: text, tab, class number from 0")
        texts.append(text)
        labels.append(int(label))
    if not texts:
        raise DataError(f"{path}: is empty; give lines: text, tab, label")
    return texts, torch.tensor(labels)


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


class PromptClassifier(DescribedModule):
    """A language model whose class scores are the logits of the classes' words.

    Args:
        model: A model of transformers, possibly wrapped by peft; masked if the prompt has a mask, else causal.
        tokens: The token of each class's word.
        mask_token: Number of the mask token for a masked model, else None.
        description: How to load the model again, stored in `config.json`; empty if no name loads it.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: Sequence[int],
        *,
        mask_token: int | None = None,
        description: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.description = dict(description or {})
        self._mask_token = mask_token
        self._tokens = list(tokens)
        self._shortens = True
        accepted = _accepted(model)
        self._takes_positions = "position_ids" in accepted and mask_token is None
        self._keeps_last = "logits_to_keep" in accepted and mask_token is None

    def invented_records(self, n_inputs: int) -> Tensor:
        """See DescribedModule: prompts of several lengths that hold the classes' words, in several orders."""
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
        """See DescribedModule: the columns kept are those of invented records, whatever the batch holds."""
        self._shortens = False
        try:
            yield
        finally:
            self._shortens = True

    def forward(self, x: Tensor) -> Tensor:  # (batch, L) -> (batch, n_classes)
        """Return class scores of encoded prompts."""
        present = x != PAD
        used: Tensor | slice = present.any(dim=0)  # columns with a token of some record
        if not self._shortens:
            used = slice(-_LONGEST, None) if self._mask_token is None else slice(_LONGEST)
        x, present = x[:, used], present[:, used]
        ids, mask = torch.where(present, x, 0.0).long(), present.long()
        options: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if self._takes_positions:
            options["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
        if self._keeps_last:
            options["logits_to_keep"] = 1
        if "use_cache" in _accepted(self.model):
            options["use_cache"] = False
        logits = self.model(**options).logits
        if self._mask_token is None:
            return logits[:, -1, self._tokens]
        place = (ids == self._mask_token).long().argmax(dim=1)
        return logits[torch.arange(len(ids), device=ids.device), place][:, self._tokens]


def load_classifier(
    name: str | Path,
    prompt: Prompt,
    *,
    lora: Lora | None = None,
    dtype: str = "float32",
    local_only: bool = False,
) -> tuple[PromptClassifier, Any]:
    """Load a language model as a classifier, and its tokenizer.

    Args:
        name: A local folder, or a name on the hub.
        prompt: Its template decides between a causal and a masked model.
        lora: Updates to train instead of the whole model.
        dtype: "float32", "bfloat16" or "float16" for the model's parameters; LoRA's factors are float32.
        local_only: Whether to forbid downloads.

    Raises:
        ModuleNotFoundError: transformers or peft is missing.
        ValueError: There is no such model, or its tokenizer does not match the prompt.
    """
    transformers = _library("transformers")
    auto = transformers.AutoModelForMaskedLM if prompt.masked else transformers.AutoModelForCausalLM
    try:
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=local_only)
        is_masked = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
        if is_masked and not getattr(config, "is_decoder", False) and not prompt.masked:
            raise ValueError(  # it was not trained to predict the next word
                f"prompt = {prompt.template!r}: a model of type {config.model_type!r} predicts a masked word; put "
                "{mask} in the place of the class word"
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, local_files_only=local_only)
        model = auto.from_pretrained(name, local_files_only=local_only, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise ValueError(f"language model {name}: cannot be loaded ({str(error).splitlines()[0]})") from error
    if lora is not None:
        model = with_lora(model, lora)
    description = {
        "name": str(name),
        "prompt": asdict(prompt) | {"classes": list(prompt.classes)},
        "lora": None if lora is None else asdict(lora),
        "dtype": dtype,
    }
    classifier = PromptClassifier(
        model,
        class_tokens(tokenizer, prompt),
        mask_token=tokenizer.mask_token_id if prompt.masked else None,
        description=description,
    )
    return classifier.eval(), tokenizer


def described_classifier(description: dict[str, Any]) -> PromptClassifier:
    """Load the classifier that a run folder describes, with trained parameters to be filled in."""
    lora = description["lora"]
    if lora is not None:
        lora = Lora(**{**lora, "targets": tuple(lora["targets"])})
    prompt = Prompt(**description["prompt"])
    return load_classifier(description["name"], prompt, lora=lora, dtype=description["dtype"])[0]


def with_lora(model: nn.Module, lora: Lora) -> nn.Module:
    """Add low-rank updates, float32 and from a separate generator; only they require a gradient afterwards."""
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


def _accepted(model: nn.Module) -> set[str]:
    """Return the names of the arguments of a model's forward, without peft's wrapper."""
    unwrap = getattr(model, "get_base_model", None)
    inner: nn.Module = unwrap() if callable(unwrap) else model
    return set(inspect.signature(inner.forward).parameters)


def _library(name: str) -> Any:
    return required_library(name, f"{name} is missing; language models need it: pip install opusim[llm]")


def build_language(config: RunConfig) -> tuple[RunConfig, tuple[Tensor, Tensor], PromptClassifier]:
    """Load the language model and the texts that a configuration names; a resumed run loads them again.

    Args:
        config: A zo run with trainer.language.model. Its seed fixes the initial factors of LoRA.

    Returns:
        The configuration with its number of classes; encoded texts (n, length) and labels (n,); the model.

    Raises:
        ConfigError: trainer.language.text is missing, or data.n_classes differs from the number of words.
        DataError: The file of texts cannot be read, or a line has another form.
        ModuleNotFoundError: transformers or peft is missing.
        ValueError: The model cannot be loaded, or its tokenizer does not match the prompt.
    """
    options = config.trainer_as(ZoConfig).language
    words, stated = len(options.classes), config.data.n_classes
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
            "is missing: give the path of a file of lines: text, tab, class number",
        )
    texts, labels = read_texts(Path(options.text))
    prompt = Prompt(template=options.prompt, classes=options.classes, max_tokens=options.max_tokens)
    rank, targets = options.lora_rank, options.lora_targets
    lora = None
    if rank is not None:
        lora = Lora(rank=rank, alpha=options.lora_alpha, targets=targets, seed=config.seed)
    model, tokenizer = load_classifier(str(options.model), prompt, lora=lora, dtype=options.dtype)
    inputs = encode(tokenizer, texts, prompt), labels
    return config.unchecked(data={"n_classes": words}), inputs, model
