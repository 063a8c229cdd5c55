"""Remedies for convolutions that change the network, for `images.py`: heads at every stage, and vector units."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.networks.models import ResNet

KERNEL = 3


class LocalHeads(nn.Module):
    """A ResNet whose every stage learns from a linear head of its own by backpropagation inside the stage.

    Block-local backpropagation with local losses (Belilovsky et al. 2019; Noekland and Eidnes 2019). It takes no
    feedback from the output.

    Args:
        model: The network; only its last head gives scores.
        widths: Channels of its stages.
        n_outputs: Number of scores.
    """

    def __init__(self, model: ResNet, widths: Sequence[int], n_outputs: int) -> None:
        super().__init__()
        self.model = model
        self.heads = nn.ModuleList(nn.Linear(width, n_outputs) for width in widths[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the last head."""
        scores: Tensor = self.model(x)
        return scores

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum of all heads' mean cross-entropies; no gradient passes from a stage to the one before."""
        stream, total = self.model.stem(x), x.new_zeros(())
        for block, head in zip(self.model.blocks, (*self.heads, self.model.head), strict=True):
            stream = block(stream)
            total = total + functional.cross_entropy(head(stream.mean(dim=(2, 3))), y)
            stream = stream.detach()
        return total


class VectorisedNetwork(nn.Module):
    """A network of vector units, which a global error broadcast can train.

    Clark et al. 2021, "Credit assignment through broadcasting a global error vector", sections 2 and 3. A unit holds K
    numbers, one for each class, and a weight between two units is one number for all K. A unit's K numbers pass if
    their sum with fixed signs is not negative. All weights but the first layer's stay non-negative, and units come in
    pairs of opposite sign (ON and OFF). Then every unit may take the error itself, K numbers, in place of its gradient.

    Args:
        record_shape: (c, h, w).
        n_outputs: K.
        widths: Units of the convolutions, even numbers: the first of stride 2, the others behind a mean over 2 x 2.
        hidden: Units of the fully connected layer, an even number.
        broadcast: Whether the error is broadcast; otherwise gradients are backpropagated.
    """

    def __init__(
        self,
        record_shape: Sequence[int],
        n_outputs: int,
        *,
        widths: Sequence[int] = (8, 16, 32),
        hidden: int = 64,
        broadcast: bool,
    ) -> None:
        super().__init__()
        channels, height, breadth = record_shape
        self.n_outputs, self.broadcast = n_outputs, broadcast
        for _ in widths:
            height, breadth = math.ceil(height / 2), math.ceil(breadth / 2)
        self.first = nn.Conv2d(channels, n_outputs * widths[0], KERNEL, stride=2, padding=1)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, KERNEL, padding=1) for before, after in itertools.pairwise(widths)
        )
        self.hidden = nn.Linear(widths[-1] * height * breadth, hidden)
        self.last = nn.Linear(hidden, 1)
        self.signs = nn.ParameterList(
            nn.Parameter(_paired_signs(n_outputs, width), requires_grad=False) for width in (*widths, hidden)
        )
        self._start(widths)

    def _start(self, widths: Sequence[int]) -> None:
        """Draw weights in ON and OFF pairs, of variance 1 / fan-in for a pair (section 3.3 of the paper)."""
        with torch.no_grad():
            kernels = self.first.weight.view(self.n_outputs, widths[0], -1)
            kernels.normal_(std=kernels.shape[2] ** -0.5)
            kernels[:, 1::2] = -kernels[:, ::2]
            for layer in self._later():
                units = widths[-1] if layer is self.hidden else layer.weight.shape[1]
                _start_in_pairs(layer.weight.view(len(layer.weight), units, -1))
            for bias in (self.first.bias, *(layer.bias for layer in self._later())):
                if bias is not None:
                    bias.zero_()

    def _later(self) -> list[nn.Conv2d | nn.Linear]:
        """Return the layers whose weights stay non-negative."""
        return [*self.convolutions, self.hidden, self.last]

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (batch, K) of images (batch, c, h, w)."""
        hidden = []

        def gated(z: Tensor, signs: Tensor) -> Tensor:
            vectors = z.view(-1, self.n_outputs, *z.shape[1:])
            signs = signs.view(*signs.shape, *[1] * (z.ndim - 2))
            passes = ((vectors.detach() * signs).sum(dim=1, keepdim=True) >= 0).to(z.dtype)
            hidden.append((vectors * passes).view_as(z))
            return hidden[-1].detach() if self.broadcast else hidden[-1]

        z = self.first(x)
        h = gated(z.reshape(len(x) * self.n_outputs, -1, *z.shape[2:]), self.signs[0])
        for kernel, signs in zip(self.convolutions, self.signs[1:], strict=False):
            h = gated(kernel(functional.avg_pool2d(h, 2, ceil_mode=True)), signs)
        h = gated(self.hidden(h.flatten(1)), self.signs[-1])
        scores: Tensor = self.last(h).view(-1, self.n_outputs)
        return _Broadcast.apply(scores, *hidden) if self.broadcast else scores

    @torch.no_grad()
    def keep_signs(self) -> None:
        """Make weights non-negative again after a step, w -> abs(w), as the paper's code does."""
        for layer in self._later():
            layer.weight.abs_()


class _Broadcast(torch.autograd.Function):
    """Scores, unchanged; backward gives every unit of every layer the error, over the root of the layer's size."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, *hidden: Tensor) -> Tensor:
        ctx.shapes = [h.shape for h in hidden]
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> Any:
        vectors = error.reshape(-1)
        return error, *(
            (vectors.view(-1, *[1] * (len(shape) - 1)) / math.prod(shape[1:]) ** 0.5).expand(shape)
            for shape in ctx.shapes
        )


def _paired_signs(n_outputs: int, width: int) -> Tensor:
    """Return fixed signs (K, width); neighbouring units have opposite ones."""
    signs = torch.randint(2, (n_outputs, width // 2)).mul(2.0).sub(1.0)
    return torch.stack((signs, -signs), dim=2).flatten(1)


def _start_in_pairs(weights: Tensor) -> None:
    """Draw non-negative weights (outputs, units, entries) that act like normal ones on ON and OFF pairs.

    A normal draw W becomes max(W, 0) from ON to ON and from OFF to OFF, and max(-W, 0) between ON and OFF.
    """
    outputs, units, entries = weights.shape
    draw = torch.randn(max(outputs // 2, 1), units // 2, entries) / math.sqrt(0.25 * units * entries)
    weights[::2, ::2], weights[::2, 1::2] = draw.relu(), (-draw).relu()
    if outputs > 1:
        weights[1::2, 1::2], weights[1::2, ::2] = draw.relu(), (-draw).relu()
