"""The language model and the texts that a configuration names; a run that goes on loads them again.

Language models of transformers and peft as classifiers that zeroth-order training can take.

Whole models or LoRA (Hu et al. 2022); from a local folder or by their name on a hub. Needs the extra `llm`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opusim.errors import ConfigError
from training.config.run import RunConfig
from training.zeroth_order.config import LanguageConfig, ZoConfig
from training.zeroth_order.prompts import PAD, Prompt, class_tokens, encode, read_texts


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank updates of some layers' weights; everything else stays.

    Attributes:
        rank: r, at least 1 (8 in the DP-ZO paper).
        alpha: The update is multiplied by alpha / r.
        targets: Names of the modules that get one; none takes those that peft knows for the architecture.
        seed: Of the initial factors.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()
    seed: int = 0


class PromptClassifier(nn.Module):
    """Scores of classes: the logits of their words where the prompt asks for one.

    Args:
        model: Of transformers, maybe wrapped by peft; causal, or masked where the prompt has a mask.
        tokens: The token of each class's word.
        mask_token: Number of the mask for a masked model, else None.
        description: How to load the same again, as `config.json` keeps it; empty for a model that no name loads.
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
        accepted = _accepted(model)
        self._takes_positions = "position_ids" in accepted and mask_token is None
        self._keeps_last = "logits_to_keep" in accepted and mask_token is None

    def forward(self, x: Tensor) -> Tensor:  # (batch, L) -> (batch, n_classes)
        """Class scores of encoded prompts."""
        present = x != PAD
        used = present.any(dim=0)  # columns in which some record has a token
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
    """A language model as a classifier, and its tokenizer.

    Args:
        name: A local folder, or a name on the hub.
        prompt: Its template tells a causal model from a masked one.
        lora: What is trained instead of the whole model.
        dtype: "float32", "bfloat16" or "float16" for what stays as it is; LoRA's factors are float32.
        local_only: Never ask the network.

    Raises:
        ModuleNotFoundError: transformers or peft is missing.
        ValueError: No model there, or the prompt does not fit its tokenizer.
    """
    transformers = _library("transformers")
    auto = transformers.AutoModelForMaskedLM if prompt.masked else transformers.AutoModelForCausalLM
    try:
        _require_mask(
            transformers,
            transformers.AutoConfig.from_pretrained(str(name), local_files_only=local_only),
            prompt,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(name), local_files_only=local_only)
        model = auto.from_pretrained(str(name), local_files_only=local_only, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise ValueError(f"language model {name}: cannot be loaded ({str(error).splitlines()[0]})") from error
    if lora is not None:
        model = with_lora(model, lora)
    description = {
        "name": str(name),
        "prompt": prompt.to_json(),
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
    """The classifier that a run folder describes, its trained parameters yet to be filled in."""
    lora = description["lora"]
    if lora is not None:
        lora = Lora(**{**lora, "targets": tuple(lora["targets"])})
    prompt = Prompt(**description["prompt"])
    return load_classifier(description["name"], prompt, lora=lora, dtype=description["dtype"])[0]


def _require_mask(transformers: Any, config: Any, prompt: Prompt) -> None:
    """Refuse to ask a masked model for the word behind a prompt, which it was not trained to give."""
    is_masked = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(
        config, "is_decoder", False
    )
    if is_masked and not prompt.masked:
        raise ValueError(
            f"prompt = {prompt.template!r}: a model of type {config.model_type!r} fills in a masked word; put "
            "{mask} where the class word stands"
        )


def with_lora(model: nn.Module, lora: Lora) -> nn.Module:
    """The model with low-rank updates, which alone require a gradient; float32, from a generator of their own."""
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
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by names that are to go
        torch.manual_seed(lora.seed)
        wrapped: nn.Module = peft.get_peft_model(model, peft.LoraConfig(**options))
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return wrapped


def _accepted(model: nn.Module) -> set[str]:
    """Names of the arguments that a model's forward takes, looked up behind peft."""
    unwrap = getattr(model, "get_base_model", None)
    inner: nn.Module = unwrap() if callable(unwrap) else model
    return set(inspect.signature(inner.forward).parameters)


def _library(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{name} is missing; language models need it: pip install opusim[llm]"
        ) from error


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
    options = config.trainer_as(ZoConfig).language
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
    return config.replaced(data={"n_classes": n_classes})
