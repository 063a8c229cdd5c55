"""The language model and the texts that a configuration names; a run that goes on loads them again."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from opusim.errors import ConfigError
from training.config.language import LanguageConfig
from training.config.run import RunConfig
from training.zo.language import Lora, PromptClassifier, load_classifier
from training.zo.plan import zo_options
from training.zo.prompts import Prompt, encode, read_texts


def configured_language(config: RunConfig) -> tuple[RunConfig, tuple[Tensor, Tensor], PromptClassifier]:
    """The configuration with its number of classes; encoded texts (n, length) and labels (n,); the model.

    Args:
        config: A zo run with trainer.language.model. The initial factors of LoRA come from its seed.

    Raises:
        ConfigError: trainer.language.text is missing, or data.n_classes is another number than that of the words.
        DataError: The file of texts cannot be read, or holds something else.
        ModuleNotFoundError: transformers or peft is missing.
        ValueError: The model cannot be loaded, or the prompt does not fit its tokenizer.
    """
    options = zo_options(config).language
    config = _with_classes(config, len(options.classes))
    if options.text is None:
        raise ConfigError(
            "configuration",
            "trainer.language.text",
            "is missing: the model learns from a file of lines, text, tab, class number; give its path",
        )
    texts, labels = read_texts(Path(options.text))
    prompt = Prompt(template=options.prompt, classes=options.classes, max_tokens=options.max_tokens)
    model, tokenizer = load_classifier(
        str(options.model), prompt, lora=_lora(options, config.seed), dtype=options.dtype
    )
    return config, (encode(tokenizer, texts, prompt), labels), model


def _lora(options: LanguageConfig, seed: int) -> Lora | None:
    if options.lora_rank is None:
        return None
    return Lora(rank=options.lora_rank, alpha=options.lora_alpha, targets=options.lora_targets, seed=seed)


def _with_classes(config: RunConfig, n_classes: int) -> RunConfig:
    """The configuration with the number of classes that the words tell."""
    if config.data.n_classes not in (None, n_classes):
        raise ConfigError(
            "configuration",
            "data.n_classes",
            f"{config.data.n_classes} is not the number of trainer.language.classes, {n_classes}; leave it out",
        )
    return config.model_copy(update={"data": config.data.model_copy(update={"n_classes": n_classes})})
