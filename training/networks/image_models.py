"""Small models for images: a vision transformer, an MLP-Mixer, a residual network, a convolutional network.

Each takes the keywords `record_shape` = (c, h, w) and `n_outputs` and its own options. At the defaults, an image of
1x28x28 or 3x32x32 takes at most 5 million multiply-adds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from opusim import checks
from training.networks.sequence_models import (
    BlockModel,
    NormPlace,
    ResidualBlock,
    encoder_block,
    feed_forward,
)

ImageNorm = Literal["batch", "group"]
_MOST_PATCHES = 8
"""Most patches along a side of an image, unless `patch` is given."""


class PatchEmbedding(nn.Module):
    """Cut images into square patches and map each one linearly to a vector.

    From (batch, c, h, w) to (batch, patches, width).

    Args:
        record_shape: (c, h, w).
        width: Entries of a vector.
        patch: Side of a patch in pixels, a divisor of h and w; None takes the least that is at least 2 and leaves at
            most 8 patches along a side.

    Raises:
        ValueError: The records are no images, or no such patch fits.
    """

    def __init__(self, record_shape: Sequence[int], width: int, patch: int | None) -> None:
        super().__init__()
        channels, height, breadth = _image(record_shape)
        side = _patch(height, breadth) if patch is None else patch
        checks.integer(patch=side, minimum=1)
        if height % side or breadth % side:
            raise ValueError(f"patch = {side} does not divide images of {height}x{breadth}; choose a divisor")
        self.n_patches = (height // side) * (breadth // side)
        self.projection = nn.Conv2d(channels, width, side, stride=side)

    def forward(self, x: Tensor) -> Tensor:
        """Return the patches' vectors, row by row."""
        patches: Tensor = self.projection(x)
        return patches.flatten(2).transpose(1, 2)


class VisionTransformer(BlockModel):
    """ViT (Dosovitskiy et al. 2021): patches, a transformer encoder, the mean over patches, a linear classifier.

    The mean replaces the paper's class token (its appendix D.3 finds no difference). Default size: at most 5 million
    multiply-adds for an image of 3x32x32.

    Args:
        record_shape: (c, h, w).
        n_outputs: Number of scores.
        width: Entries of a patch's vector.
        depth: Number of blocks, the feedback points.
        heads: Attention heads.
        expansion: Hidden width of the feed-forward network over `width`.
        patch: See PatchEmbedding.
        norm: See ResidualBlock; the paper has "pre".
        dropout: See ResidualBlock.
    """

    def __init__(
        self,
        record_shape: Sequence[int],
        n_outputs: int,
        *,
        width: int = 48,
        depth: int = 3,
        heads: int = 4,
        expansion: int = 2,
        patch: int | None = None,
        norm: NormPlace = "post",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        checks.integer(depth=depth, minimum=1)
        self.embedding = PatchEmbedding(record_shape, width, patch)
        self.positions = nn.Parameter(torch.empty(self.embedding.n_patches, width).normal_(std=0.02))
        self.blocks = nn.Sequential(
            *(encoder_block(width, heads, expansion, norm=norm, dropout=dropout) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width) if norm == "pre" else nn.Identity()
        self.head = nn.Linear(width, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (batch, n_outputs) of images (batch, c, h, w)."""
        stream = self.blocks(self.embedding(x) + self.positions)
        scores: Tensor = self.head(self.norm(stream).mean(dim=1))
        return scores


class _OverPatches(nn.Module):
    """Apply a map to every column of (batch, patches, width)."""

    def __init__(self, n_patches: int, hidden: int) -> None:
        super().__init__()
        self.map = feed_forward(n_patches, hidden)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.map(x.transpose(1, 2))
        return mixed.transpose(1, 2)


class Mixer(BlockModel):
    """MLP-Mixer (Tolstikhin et al. 2021): feed-forward networks over patches and over channels in turn.

    Args:
        record_shape: (c, h, w).
        n_outputs: Number of scores.
        width: Entries of a patch's vector.
        depth: Number of blocks, the feedback points.
        over_patches: Hidden width of the map over patches.
        over_channels: Hidden width of the map over channels.
        patch: See PatchEmbedding.
        norm: See ResidualBlock; the paper has "pre".
        dropout: See ResidualBlock.
    """

    def __init__(
        self,
        record_shape: Sequence[int],
        n_outputs: int,
        *,
        width: int = 64,
        depth: int = 3,
        over_patches: int = 32,
        over_channels: int = 128,
        patch: int | None = None,
        norm: NormPlace = "post",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        checks.integer(depth=depth, minimum=1)
        self.embedding = PatchEmbedding(record_shape, width, patch)
        self.blocks = nn.Sequential(
            *(
                ResidualBlock(
                    _OverPatches(self.embedding.n_patches, over_patches),
                    feed_forward(width, over_channels),
                    width,
                    norm=norm,
                    dropout=dropout,
                )
                for _ in range(depth)
            )
        )
        self.norm = nn.LayerNorm(width) if norm == "pre" else nn.Identity()
        self.head = nn.Linear(width, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (batch, n_outputs) of images (batch, c, h, w)."""
        scores: Tensor = self.head(self.norm(self.blocks(self.embedding(x))).mean(dim=1))
        return scores


class _ConvolutionBlock(nn.Module):
    """ReLU(x + f(x)) with two convolutions of 3x3 (He et al. 2016, Figure 2); a projection if the shape changes."""

    def __init__(self, channels: int, width: int, stride: int, norm: ImageNorm) -> None:
        super().__init__()
        self.first = _convolution(channels, width, stride, norm)
        self.second = nn.Sequential(
            *list(_convolution(width, width, 1, norm))[:-1]
        )  # the ReLU follows the sum
        changes = stride != 1 or channels != width
        self.shortcut = nn.Conv2d(channels, width, 1, stride=stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.shortcut(x) + self.second(self.first(x)))


class ResNet(BlockModel):
    """The residual network of He et al. 2016 for small images (their section 4.2), with 6 n + 2 layers.

    Three stages of n blocks; each later stage halves the image and doubles the channels. DFA trains convolutions badly
    (Refinetti et al. 2021); one point for each stage, `points = ("blocks.0", ...)` with n = 1, hurts less than one for
    each layer.

    Args:
        record_shape: (c, h, w).
        n_outputs: Number of scores.
        width: Channels of the first stage (16 in the paper).
        blocks_per_stage: n.
        norm: "batch" (the paper), or "group" of 4 groups, which mixes no records.
    """

    def __init__(
        self,
        record_shape: Sequence[int],
        n_outputs: int,
        *,
        width: int = 8,
        blocks_per_stage: int = 1,
        norm: ImageNorm = "batch",
    ) -> None:
        super().__init__()
        channels, _, _ = _image(record_shape)
        checks.integer(blocks_per_stage=blocks_per_stage, minimum=1)
        self.stem = _convolution(channels, width, 1, norm)
        widths = [width * 2**stage for stage in range(3) for _ in range(blocks_per_stage)]
        blocks, before = [], width
        for number, after in enumerate(widths):
            halves = number > 0 and number % blocks_per_stage == 0
            blocks.append(_ConvolutionBlock(before, after, 2 if halves else 1, norm))
            before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (batch, n_outputs) of images (batch, c, h, w)."""
        scores: Tensor = self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))
        return scores


class ConvolutionalNetwork(BlockModel):
    """Three convolutions of 3x3, each followed by a norm, ReLU and a pool of 2x2; then a linear classifier.

    Args:
        record_shape: (c, h, w), h and w at least 8.
        n_outputs: Number of scores.
        width: Channels of the first convolution; the others have twice as many.
        norm: See ResNet.
    """

    def __init__(
        self,
        record_shape: Sequence[int],
        n_outputs: int,
        *,
        width: int = 16,
        norm: ImageNorm = "batch",
    ) -> None:
        super().__init__()
        channels, height, breadth = _image(record_shape)
        widths = (width, 2 * width, 2 * width)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(*_convolution(before, after, 1, norm), nn.MaxPool2d(2))
                for before, after in zip((channels, *widths), widths, strict=False)
            )
        )
        self.head = nn.Linear(widths[-1] * (height // 8) * (breadth // 8), n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (batch, n_outputs) of images (batch, c, h, w)."""
        scores: Tensor = self.head(self.blocks(x).flatten(1))
        return scores


def _convolution(channels: int, width: int, stride: int, norm: ImageNorm) -> nn.Sequential:
    checks.choice(("batch", "group"), norm=norm)
    normalise = nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(math.gcd(4, width), width)
    convolution = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, normalise, nn.ReLU())


def _image(record_shape: Sequence[int]) -> tuple[int, int, int]:
    """Return channels, height and width of image records.

    Raises:
        ValueError: The records are no images.
    """
    if len(record_shape) != 3:
        raise ValueError(
            f"record_shape = {tuple(record_shape)}: this model takes images of shape (channels, height, width); take "
            "image data, or another model"
        )
    channels, height, breadth = record_shape
    return channels, height, breadth


def _patch(height: int, breadth: int) -> int:
    """Return the least common divisor of both sides that is at least 2 and leaves at most 8 patches a side."""
    longest, common = max(height, breadth), math.gcd(height, breadth)
    fitting = [
        side for side in range(2, common + 1) if common % side == 0 and longest <= side * _MOST_PATCHES
    ]
    return fitting[0] if fitting else 1
