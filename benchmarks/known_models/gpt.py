"""The GPT of nanoGPT in plain torch: pre-norm blocks without biases, tied embeddings, its initial values and schedule.

Source: github.com/karpathy/nanoGPT, model.py and config/train_shakespeare_char.py; written anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model and how it is trained."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    steps: int
    dropout: float
    causal: bool = True


SMALL = Setting(layers=4, heads=4, width=128, context=64, batch=12, steps=2000, dropout=0.0)
"""nanoGPT's setting for a processor; its README reports a validation loss of 1.88."""
FULL = Setting(layers=6, heads=6, width=384, context=256, batch=64, steps=5000, dropout=0.2)
"""nanoGPT's setting for a card; its README reports 1.4697."""
RATE, LEAST_RATE, WARM_UP, BETAS, DECAY, MOST_NORM = 1e-3, 0.1, 100, (0.9, 0.99), 0.1, 1.0


class Attention(nn.Module):
    """Attention of several heads."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = setting.heads, setting.dropout, setting.causal
        self.qkv = nn.Linear(setting.width, 3 * setting.width, bias=False)
        self.out = nn.Linear(setting.width, setting.width, bias=False)
        self.drop = nn.Dropout(setting.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map a stream to what is added to it, shape (records, context, width)."""
        n, length, width = x.shape
        q, k, v = (
            each.view(n, length, self.heads, width // self.heads).transpose(1, 2)
            for each in self.qkv(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        found: Tensor = self.drop(self.out(y.transpose(1, 2).reshape(n, length, width)))
        return found


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        width = setting.width
        self.norm_1, self.attention = nn.LayerNorm(width, bias=False), Attention(setting)
        self.norm_2 = nn.LayerNorm(width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
            nn.Dropout(setting.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream behind the block, shape (records, context, width)."""
        x = x + self.attention(self.norm_1(x))
        found: Tensor = x + self.mlp(self.norm_2(x))
        return found


class GPT(nn.Module):
    """Scores of the next character at every position, shape (records, context, characters)."""

    def __init__(self, setting: Setting, characters: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, setting.width)
        self.positions = nn.Embedding(setting.context, setting.width)
        self.drop = nn.Dropout(setting.dropout)
        self.blocks = nn.ModuleList(Block(setting) for _ in range(setting.layers))
        self.norm = nn.LayerNorm(setting.width, bias=False)
        self.head = nn.Linear(setting.width, characters, bias=False)
        initialise(self, setting)
        self.tokens.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        """Score the next character of stretches, int64, shape (records, context)."""
        h = self.drop(self.tokens(x) + self.positions.weight[: x.shape[1]])
        for block in self.blocks:
            h = block(h)
        scores: Tensor = self.head(self.norm(h))
        return scores


def initialise(model: nn.Module, setting: Setting) -> None:
    """Draw nanoGPT's initial values; what writes into the stream gets less, so that it does not grow with the depth."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            inwards = name.endswith(("out.weight", "mlp.2.weight"))
            nn.init.normal_(parameter, 0.0, 0.02 / (math.sqrt(2 * setting.layers) if inwards else 1.0))


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Return nanoGPT's AdamW: weights decay, gains of norms do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS)


def rate(step: int, steps: int, *, highest: float = RATE) -> float:
    """Return the learning rate of a step: a linear rise, then half a cosine down to a tenth."""
    if step < WARM_UP:
        return highest * (step + 1) / (WARM_UP + 1)
    share = (step - WARM_UP) / (steps - WARM_UP)
    return highest * (LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * share)))
