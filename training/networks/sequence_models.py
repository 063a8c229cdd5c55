"""Small models for sequences, and the blocks of transformers: a language model, an encoder, a recurrent network.

Each takes the keywords `record_shape` and `n_outputs` and its own options. Feedback points lie on the residual stream.
A stream without normalisation grows from block to block, so blocks normalise after the residual sum (`norm = "post"`)
unless `norm = "pre"` is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from opusim import checks

NormPlace = Literal["post", "pre"]


class BlockModel(nn.Module):
    """A model whose feedback points are all its `blocks` except the last, which learns from the true gradient.

    Attributes:
        blocks: At least two.
        feedback_points: Names of the submodules that `points = "blocks"` stands for.
        error_at: Name of the submodule whose output carries the projected error; None for the model's own output.
        feedback_start: Name of the linear layer that starts as the feedback matrix (`model.initial_output`).
    """

    embedding: Any
    blocks: nn.Sequential
    norm: nn.Module
    head: nn.Module
    error_at: str | None = None
    feedback_start = "head"

    @property
    def feedback_points(self) -> tuple[str, ...]:
        """See the class."""
        return tuple(f"blocks.{number}" for number in range(len(self.blocks) - 1))

    def stack(self, depth: int, block: Callable[[], nn.Module], width: int, norm: NormPlace) -> None:
        """Make the blocks of a stream of vectors, and the norm that ends one of "pre" blocks."""
        checks.integer(depth=depth, minimum=2)
        self.blocks = nn.Sequential(*(block() for _ in range(depth)))
        self.norm = nn.LayerNorm(width) if norm == "pre" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (batch, n_outputs) of images (batch, c, h, w) or tokens (batch, T): of the mean vector."""
        scores: Tensor = self.head(self.norm(self.blocks(self.embedding(x))).mean(dim=1))
        return scores


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017, section 3.2) on (batch, T, width).

    Args:
        width: Entries of a vector, a multiple of `heads`.
        heads: Number of heads.
        causal: Whether a position sees only itself and earlier ones.
        dropout: Probability of dropping an attention weight in training.
    """

    def __init__(self, width: int, heads: int, *, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        checks.integer(width=width, minimum=1)
        checks.integer(heads=heads, minimum=1)
        if width % heads:
            raise ValueError(f"width = {width} is no multiple of heads = {heads}; change one of them")
        self._heads, self._causal, self._dropout = heads, causal, dropout
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return softmax(q k^T / sqrt(width / heads)) v, mixed by a linear map."""
        heads = self.inputs(x).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)  # each (batch, heads, T, width / heads)
        dropout = self._dropout if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=self._causal
        )
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class ResidualBlock(nn.Module):
    """Two maps on a residual stream, each with its own layer norm.

    post: x <- norm(x + f(x)) (Vaswani et al. 2017). pre: x <- x + f(norm(x)) (Xiong et al. 2020).

    Args:
        first: Maps (batch, T, width) to the same shape, such as attention.
        second: Likewise, such as the feed-forward network.
        width: Entries of a vector.
        norm: Place of the norms.
        dropout: Probability of dropping an entry of either map's output in training.
    """

    def __init__(
        self, first: nn.Module, second: nn.Module, width: int, *, norm: NormPlace, dropout: float = 0.0
    ) -> None:
        super().__init__()
        checks.choice(("post", "pre"), norm=norm)
        self._post = norm == "post"
        self.first, self.second = first, second
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after both maps."""
        if self._post:
            x = self.norm1(x + self.dropout(self.first(x)))
            x = self.norm2(x + self.dropout(self.second(x)))
            return x
        x = x + self.dropout(self.first(self.norm1(x)))
        return x + self.dropout(self.second(self.norm2(x)))


def feed_forward(width: int, hidden: int) -> nn.Sequential:
    """Return two linear maps with a GELU between them, applied to every position."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def encoder_block(
    width: int,
    heads: int,
    expansion: int,
    *,
    norm: NormPlace,
    dropout: float = 0.0,
    causal: bool = False,
) -> ResidualBlock:
    """Return a transformer's block: attention, then a feed-forward network."""
    attention = Attention(width, heads, causal=causal, dropout=dropout)
    return ResidualBlock(attention, feed_forward(width, expansion * width), width, norm=norm, dropout=dropout)


class TransformerLM(BlockModel):
    """Transformer decoder that predicts the next token (Vaswani et al. 2017; GPT, Radford et al. 2018).

    A linear transform stands before the vocabulary layer, as in BERT's prediction head (Devlin et al. 2019). The error
    is taken at the transform, before the vocabulary layer (Launay et al. 2020): its rows have `width` entries instead
    of one for each token of the vocabulary, and the vocabulary layer learns from the true gradient.

    Args:
        record_shape: (T,), the longest context.
        n_outputs: Number of tokens in the vocabulary; 256 for bytes.
        width: Entries of a position's vector.
        depth: Number of blocks, at least 2.
        heads: Attention heads.
        expansion: Hidden width of the feed-forward network over `width`.
        norm: See ResidualBlock.
        dropout: See ResidualBlock.
        tied: Whether the vocabulary layer shares its matrix with the embedding (Press and Wolf 2017).
    """

    error_at = "transform"
    feedback_start = "transform"

    def __init__(
        self,
        record_shape: Sequence[int],
        n_outputs: int,
        *,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        expansion: int = 4,
        norm: NormPlace = "post",
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(record_shape, n_outputs, width, dropout=dropout)
        block = partial(encoder_block, width, heads, expansion, norm=norm, dropout=dropout, causal=True)
        self.stack(depth, block, width, norm)
        self.transform = nn.Linear(width, width)
        self.vocabulary = nn.Linear(width, n_outputs, bias=not tied)
        if tied:
            self.vocabulary.weight = self.embedding.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, T, n_outputs) of the next token after every position of tokens (batch, T)."""
        stream = self.norm(self.blocks(self.embedding(tokens)))
        logits: Tensor = self.vocabulary(self.transform(stream))
        return logits


class TransformerEncoder(BlockModel):
    """Transformer encoder that classifies sequences of tokens by the mean over positions (Vaswani et al. 2017).

    Args:
        record_shape: (T,).
        n_outputs: Number of scores.
        vocabulary: Number of tokens; 256 for bytes.
        width: Entries of a position's vector.
        depth: Number of blocks, at least 2.
        heads: Attention heads.
        expansion: Hidden width of the feed-forward network over `width`.
        norm: See ResidualBlock.
        dropout: See ResidualBlock.
    """

    def __init__(
        self,
        record_shape: Sequence[int],
        n_outputs: int,
        *,
        vocabulary: int = 256,
        width: int = 64,
        depth: int = 3,
        heads: int = 4,
        expansion: int = 2,
        norm: NormPlace = "post",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(record_shape, vocabulary, width, dropout=dropout)
        block = partial(encoder_block, width, heads, expansion, norm=norm, dropout=dropout)
        self.stack(depth, block, width, norm)
        self.head = nn.Linear(width, n_outputs)


class TokenEmbedding(nn.Module):
    """A learned vector for each token plus one for each position, normalised (BERT, Devlin et al. 2019).

    Args:
        record_shape: (T,), the longest sequence.
        vocabulary: Number of tokens.
        width: Entries of a vector.
        dropout: Probability of dropping an entry in training.

    Raises:
        ValueError: The records are no sequences of tokens.
    """

    def __init__(
        self, record_shape: Sequence[int], vocabulary: int, width: int, *, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if len(record_shape) != 1:
            raise ValueError(
                f"record_shape = {tuple(record_shape)}: this model takes sequences of tokens, shape (T,); take text "
                "data, or another model"
            )
        checks.integer(vocabulary=vocabulary, minimum=2)
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(record_shape[0], width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (batch, T, width) for tokens (batch, T), T at most the longest."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        vectors: Tensor = self.dropout(self.norm(self.tokens(tokens) + self.positions(places)))
        return vectors


class _GruLayer(nn.Module):
    """A GRU whose outputs at all positions are normalised."""

    def __init__(self, n_inputs: int, width: int) -> None:
        super().__init__()
        self.gru, self.norm = nn.GRU(n_inputs, width, batch_first=True), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.norm(self.gru(x)[0])
        return outputs


class Gru(BlockModel):
    """Gated recurrent units (Cho et al. 2014) in layers, and a linear classifier on the last position.

    The points are the layers' outputs at all positions. Within a layer, the error goes back through time exactly.

    Args:
        record_shape: (T,) for tokens or single numbers, or (c, h, w): an image is read row by row.
        n_outputs: Number of scores.
        vocabulary: Number of tokens; None reads numbers instead.
        width: Entries of a layer's state.
        depth: Number of layers, at least 2.
    """

    def __init__(
        self,
        record_shape: Sequence[int],
        n_outputs: int,
        *,
        vocabulary: int | None = None,
        width: int = 64,
        depth: int = 2,
    ) -> None:
        super().__init__()
        checks.integer(depth=depth, minimum=2)
        self.embedding = None if vocabulary is None else nn.Embedding(vocabulary, width)
        n_inputs = width if vocabulary else record_shape[0] * record_shape[2] if len(record_shape) == 3 else 1
        self.blocks = nn.Sequential(*(_GruLayer(width if n else n_inputs, width) for n in range(depth)))
        self.head = nn.Linear(width, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (batch, n_outputs) of records (batch, *record_shape)."""
        if self.embedding is not None:
            steps = self.embedding(x)
        elif x.ndim == 4:
            steps = x.transpose(1, 2).flatten(2)  # (batch, h, c w)
        else:
            steps = x.unsqueeze(-1)
        scores: Tensor = self.head(self.blocks(steps)[:, -1])
        return scores
