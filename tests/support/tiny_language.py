"""Tiny language models with random weights, made on the spot and saved to a folder."""

from pathlib import Path

import pytest
import torch

WORDS = ["terrible", "great", "it", "was", "good", "bad", "film"]
WORDS += ["a", "the", "very", "dull", "bright", "plot"]
SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]"]


def make(folder: Path, kind: str = "gpt2") -> Path:
    """Save a model of two layers and its tokenizer of single words."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.normalizer = tokenizers.normalizers.Lowercase()
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if kind == "bert":
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="[UNK]", pad_token="[PAD]",
        mask_token="[MASK]", cls_token="[CLS]", sep_token="[SEP]",
    )  # fmt: skip
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    configs = {
        "gpt2": lambda: transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, n_positions=64, vocab_size=18
        ),
        "opt": lambda: transformers.OPTConfig(
            **sizes, ffn_dim=32, max_position_embeddings=64, vocab_size=18, word_embed_proj_dim=16
        ),
        "bert": lambda: transformers.BertConfig(
            **sizes, intermediate_size=32, max_position_embeddings=64, vocab_size=18
        ),
    }
    classes = {"gpt2": "GPT2LMHeadModel", "opt": "OPTForCausalLM", "bert": "BertForMaskedLM"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, classes[kind])(configs[kind]())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


TEXTS = [
    "a very good film", "the plot was bad", "bright", "dull dull plot", "good good", "a bad film it was very dull",
] * 6  # fmt: skip
LABELS = [1, 0, 1, 0, 1, 0] * 6
