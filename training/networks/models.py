"""Small, well-known models by name, as `opusim train pdfa --model vit-small` takes them.

A factory takes the keywords `record_shape` and `n_outputs` and its own options. It returns a module that maps records
(batch, *record_shape) to outputs (batch, n_outputs), a language model to (batch, T, n_outputs). The module states where
feedback enters (`opusim.training.networks.sequence_models.BlockModel`).

The image models are a vision transformer, an MLP-Mixer, a residual network and a convolutional network; their
`record_shape` is (c, h, w). At the defaults, an image of 1x28x28 or 3x32x32 takes at most 5 million multiply-adds.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from opusim import checks
from opusim.description.section import did_you_mean
from opusim.processes import is_exhausted, require_memory
from opusim.training.networks.base import BYTES_PER_PARAMETER, seeded_torch
from opusim.training.networks.sequence_models import (
    BlockModel,
    Gru,
    NormPlace,
    ResidualBlock,
    TransformerEncoder,
    TransformerLM,
    encoder_block,
    feed_forward,
)

ImageNorm = Literal["batch", "group"]
_POSITION_STD = 0.5
"""Initial size of a patch's position, about that of an embedded patch of standardised pixels. With 0.02, as is common,
short runs on small images learn the positions late: 67 % instead of 88 % by dfa on digits, 5 epochs, one seed."""
_MOST_PATCHES = 8
"""Most patches along a side of an image, unless `patch` is given."""


class PatchEmbedding(nn.Module):
    """Cut images into square patches and map each one linearly to a vector.

    From (batch, c, h, w) to (batch, patches, width).

    Args:
        record_shape: (c, h, w).
        width: Entries of a vector.
        patch: Side of a patch in pixels, a divisor of h and w; None takes the least divisor of at least 2 that leaves
            at most 8 patches along a side.

    Raises:
        ValueError: The records are no images, or no such patch fits.
    """

    def __init__(self, record_shape: Sequence[int], width: int, patch: int | None) -> None:
        super().__init__()
        channels, height, breadth = _image(record_shape)
        # the least common divisor of both sides that is at least 2 and leaves at most 8 patches a side
        longest, common = max(height, breadth), math.gcd(height, breadth)
        fitting = [n for n in range(2, common + 1) if common % n == 0 and longest <= n * _MOST_PATCHES]
        side = (fitting[0] if fitting else 1) if patch is None else patch
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
        depth: Number of blocks, at least 2.
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
        self.embedding = embedding = PatchEmbedding(record_shape, width, patch)
        self.positions = nn.Parameter(torch.empty(embedding.n_patches, width).normal_(std=_POSITION_STD))
        block = partial(encoder_block, width, heads, expansion, norm=norm, dropout=dropout)
        self.stack(depth, block, width, norm)
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
        depth: Number of blocks, at least 2.
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
        over_channels: int = 64,
        patch: int | None = None,
        norm: NormPlace = "post",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = embedding = PatchEmbedding(record_shape, width, patch)

        def block() -> nn.Module:
            first = _OverPatches(embedding.n_patches, over_patches)
            return ResidualBlock(first, feed_forward(width, over_channels), width, norm=norm, dropout=dropout)

        self.stack(depth, block, width, norm)
        self.head = nn.Linear(width, n_outputs)


class PoolShortcut(nn.Module):
    """Shortcut without parameters: a mean over stride x stride positions, and zeros for new channels.

    Option A of He et al. 2016 (section 4.1) with a mean in place of subsampling. The mean over all positions after the
    last stage then depends on every stage directly, so that one broadcast error is nearly the gradient of each stage.

    Args:
        channels: Channels of the input.
        width: Channels of the output, at least `channels`.
        stride: 1 or 2.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.new_channels, self.stride = width - channels, stride

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, h, w) to (batch, width, h / stride, w / stride), rounded up."""
        pooled = nn.functional.avg_pool2d(x, self.stride, ceil_mode=True) if self.stride > 1 else x
        return nn.functional.pad(pooled, (0, 0, 0, 0, 0, self.new_channels))


class ConvolutionBlock(nn.Module):
    """ReLU(shortcut(x) + f(x)) with two normalised convolutions of 3x3 (He et al. 2016, Figure 2).

    Args:
        channels: Channels of the input.
        width: Channels of the output, at least `channels`.
        stride: 1 or 2, of the first convolution.
        norm: See ResNet.
    """

    def __init__(self, channels: int, width: int, stride: int, norm: ImageNorm) -> None:
        super().__init__()
        self.first = _convolution(channels, width, stride, norm)
        # the ReLU follows the sum
        self.second = nn.Sequential(*list(_convolution(width, width, 1, norm))[:-1])
        self.shortcut = PoolShortcut(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, h, w) to (batch, width, h / stride, w / stride), rounded up."""
        return torch.relu(self.shortcut(x) + self.second(self.first(x)))


class ResNet(BlockModel):
    """The residual network of He et al. 2016 for small images (their section 4.2), with 6 n + 2 layers.

    A convolution of stride 2, then stages of n blocks; each later stage halves the image. DFA trains convolutions badly
    (Refinetti et al. 2021).

    Args:
        record_shape: (c, h, w).
        n_outputs: Number of scores.
        widths: Channels of the stages, each at least those of the one before.
        blocks_per_stage: n.
        stem_stride: Stride of the first convolution, 1 or 2 (1 in the paper).
        norm: "batch" (the paper), or "group" of 4 groups, which mixes no records.
    """

    def __init__(
        self,
        record_shape: Sequence[int],
        n_outputs: int,
        *,
        widths: Sequence[int] = (16, 32, 64),
        blocks_per_stage: int = 1,
        stem_stride: int = 2,
        norm: ImageNorm = "batch",
    ) -> None:
        super().__init__()
        channels, _, _ = _image(record_shape)
        checks.integer(blocks_per_stage=blocks_per_stage, minimum=1)
        if list(widths) != sorted(widths) or len(widths) < 2:
            raise ValueError(f"widths = {list(widths)}: must be at least two numbers that do not fall")
        self.stem = _convolution(channels, widths[0], stem_stride, norm)
        blocks, before = [], widths[0]
        for number, width in enumerate(each for each in widths for _ in range(blocks_per_stage)):
            halves = number > 0 and number % blocks_per_stage == 0
            blocks.append(ConvolutionBlock(before, width, 2 if halves else 1, norm))
            before = width
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
    convolution = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
    checks.choice(("batch", "group"), norm=norm)
    scale = nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(math.gcd(4, width), width)
    return nn.Sequential(convolution, scale, nn.ReLU())


def _image(record_shape: Sequence[int]) -> tuple[int, int, int]:
    """Return channels, height and width of image records; raise ValueError for others."""
    if len(record_shape) != 3:
        raise ValueError(
            f"record_shape = {tuple(record_shape)}: this model takes images of shape (channels, height, width); take "
            "image data, or another model"
        )
    channels, height, breadth = record_shape
    return channels, height, breadth


MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "vit-small": VisionTransformer,
    "mixer-small": Mixer,
    "resnet-small": ResNet,
    "conv-small": ConvolutionalNetwork,
    "transformer-lm": TransformerLM,
    "transformer-encoder": TransformerEncoder,
    "gru": Gru,
}
"""The built-in models by name; `opusim.training.config.sections.MODEL_NAMES` lists the same names."""


def build_model(
    factory: Callable[..., nn.Module],
    options: Mapping[str, Any],
    *,
    record_shape: Sequence[int],
    n_outputs: int,
    seed: int | None,
    name: str,
    vocabulary: int | None = None,
) -> nn.Module:
    """Return a new module, whose initial parameters come from a seed, or from the system for None.

    torch's global random state is seeded for the call and then put back, so it is neither read nor changed. The factory
    gets its options, and those of `record_shape`, `n_outputs` and `vocabulary` that it takes as keywords. Raises
    TypeError if it takes no such option or returns no module, and ValueError if it refuses an option or the records.
    """
    taken = inspect.signature(factory).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    facts: dict[str, Any] = {"record_shape": tuple(record_shape), "n_outputs": n_outputs}
    facts |= {} if vocabulary is None else {"vocabulary": vocabulary}
    if not takes_any:
        facts = {key: value for key, value in facts.items() if key in taken}
        for option in options:
            if option not in taken or option in facts:
                known = [key for key in taken if key not in facts]
                raise TypeError(
                    f"model.options.{option}: {name} has no such option{did_you_mean(option, known)}; it takes "
                    f"{', '.join(known) or 'none'}"
                )
    if factory in MODELS.values():
        # refuse weights and gradients that need more memory than is free
        try:
            with torch.device("meta"):
                size: float = sum(p.numel() for p in factory(**facts, **options).parameters())
        except RuntimeError as error:
            if not is_exhausted(error):
                raise
            size = 2.0**61  # more than torch can count
        require_memory(
            BYTES_PER_PARAMETER * size,
            why=f"weights and gradients of {name}",
            remedy="lower them",
            model__options=dict(options),
            **facts,
        )
    with seeded_torch(seed):
        model = factory(**facts, **options)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model.name = {name!r} returns a {type(model).__name__}; it must return a torch.nn.Module"
        )
    return model
