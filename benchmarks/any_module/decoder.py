"""Decoder that predicts the next byte, for `language_model.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017, section 3.2).

    Args:
        width: Entries of a position's vector, a multiple of `heads`.
        heads: Number of heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, positions, width)."""
        parts = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)  # each (batch, heads, positions, width / heads)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    """Attention, then a feed-forward network, each followed by a layer norm of the residual sum (post-norm).

    Args:
        width: Entries of a position's vector.
        heads: Number of attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.activation = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU())
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, positions, width)."""
        x = self.norm_1(x + self.attention(x))
        mapped: Tensor = self.norm_2(x + self.down(self.activation(x)))
        return mapped


class Decoder(nn.Module):
    """Embedding, blocks, a linear transform and the vocabulary layer.

    The transform stands before the vocabulary layer, as in BERT's prediction head (Devlin et al. 2019).

    Args:
        context: Longest sequence.
        width: Entries of a position's vector.
        heads: Number of attention heads.
        depth: Number of blocks.
        vocabulary: Number of tokens.
    """

    def __init__(self, context: int, *, width: int, heads: int, depth: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.transform = nn.Linear(width, width)
        self.vocabulary = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, positions, vocabulary) of the byte behind each of tokens (batch, positions)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.vocabulary(self.transform(x))
        return logits
