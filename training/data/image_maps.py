"""Maps of images: public ones (scattering, oriented gradients, random convolutions), and random copies to train on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from opusim.training.data.public_maps import PublicMap
from torch import Tensor
from torch.nn import functional

from opusim.errors import ConfigError
from opusim.training.data.formats import required_library

ANGLES, ORIENTATIONS = 8, 9
GRID = 4
"""Means of random convolutions are taken over GRID x GRID parts of an image."""
_CELL, _CELLS, _FILTER, _SEED = 4, 2, 5, 20260102
_SCATTERED_AT_ONCE = 100
"""Images that are scattered at once: 100 of 3 x 32 x 32 pixels take 3.7 ms each, 1,000 take 6.4 ms; the features are
the same bit for bit."""


@dataclass(frozen=True, kw_only=True)
class ImageMap(PublicMap):
    """A map of images (c, h, w) to images."""

    def __post_init__(self) -> None:
        if len(self.record_shape) != 3 or min(self.record_shape[1:]) < self.least_side:
            raise ConfigError(
                "configuration",
                "data.features",
                f"{self.kind!r} is for images of at least {self.least_side} x {self.least_side} pixels, and records "
                f"have the shape {self.record_shape}; take optical:DEVICE, or leave it out",
            )
        super().__post_init__()

    @property
    def least_side(self) -> int:
        """Pixels of the shorter side, at least."""
        return _CELL * _CELLS

    @property
    def own_facts(self) -> dict[str, Any]:
        """Nothing else."""
        return {}


@dataclass(frozen=True, kw_only=True)
class ScatteringMap(ImageMap):
    """Wavelet scattering of order 2 with 8 angles (Oyallon and Mallat, CVPR 2015), computed by kymatio.

    A channel of h x w pixels gives 1 + 8 J + 32 J (J - 1) channels of h / 2^J x w / 2^J.

    Attributes:
        scale: J, from 1; 2^J pixels are averaged over.
    """

    kind: ClassVar[str] = "scattering"
    scale: int

    @property
    def least_side(self) -> int:
        """2^J."""
        return int(2**self.scale)

    @property
    def mapped_shape(self) -> tuple[int, ...]:
        """(c (1 + 8 J + 32 J (J - 1)), h / 2^J, w / 2^J)."""
        (channels, *sides), j = self.record_shape, self.scale
        first_and_second = ANGLES * j + ANGLES**2 * j * (j - 1) // 2
        return (channels * (1 + first_and_second), *(side // 2**j for side in sides))

    @property
    def own_facts(self) -> dict[str, Any]:
        """J."""
        return {"scale": self.scale}

    @contextmanager
    def opened(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Hold the wavelets of one size of images."""
        frontend = required_library(
            "kymatio.scattering2d.frontend.torch_frontend",
            "data.features = 'scattering' needs the library kymatio, which is missing: pip install 'opusim[features]'",
        )
        scatter = frontend.ScatteringTorch2D(J=self.scale, shape=self.record_shape[1:], L=ANGLES)

        def read(x: Tensor) -> Tensor:
            return torch.cat([scatter(some) for some in x.contiguous().split(_SCATTERED_AT_ONCE)])

        yield read


@dataclass(frozen=True, kw_only=True)
class HogMap(ImageMap):
    """Histograms of oriented gradients (Dalal and Triggs, CVPR 2005), computed by scikit-image.

    9 orientations in cells of 4 x 4 pixels, normalised over 2 x 2 cells; of several channels the one with the largest
    gradient counts at each pixel.
    """

    kind: ClassVar[str] = "hog"

    @property
    def mapped_shape(self) -> tuple[int, ...]:
        """(36, h / 4 - 1, w / 4 - 1)."""
        return (ORIENTATIONS * _CELLS**2, *(side // _CELL - _CELLS + 1 for side in self.record_shape[1:]))

    @contextmanager
    def opened(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Hold nothing."""
        library = required_library(
            "skimage.feature",
            "data.features = 'hog' needs the library scikit-image, which is missing: pip install 'opusim[features]'",
        )

        def histograms(image: np.ndarray) -> np.ndarray:
            found = library.hog(
                image,
                orientations=ORIENTATIONS,
                pixels_per_cell=(_CELL, _CELL),
                cells_per_block=(_CELLS, _CELLS),
                feature_vector=False,
                channel_axis=0,
            )
            return np.asarray(found).reshape(*self.mapped_shape[1:], -1).transpose(2, 0, 1)

        def read(x: Tensor) -> Tensor:
            return torch.from_numpy(np.stack([histograms(image) for image in x.numpy()]))

        yield read


@dataclass(frozen=True, kw_only=True)
class RandomConvolutionMap(ImageMap):
    """Means over 4 x 4 parts of an image of max(0, F * x) and max(0, -F * x), for random filters F of 5 x 5 pixels.

    Entries of F are independent N(0, 1 / (25 c)) with a fixed seed (Coates, Lee and Ng, AISTATS 2011, with random
    filters in place of learnt ones).

    Attributes:
        filters: Number of filters; 32 features each.
    """

    kind: ClassVar[str] = "convolutions"
    filters: int

    @property
    def mapped_shape(self) -> tuple[int, ...]:
        """(2 filters, 4, 4)."""
        return (2 * self.filters, GRID, GRID)

    @property
    def own_facts(self) -> dict[str, Any]:
        """The number of filters."""
        return {"filters": self.filters}

    @contextmanager
    def opened(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Hold the filters."""
        channels = self.record_shape[0]
        generator = torch.Generator().manual_seed(_SEED)
        filters = torch.randn(self.filters, channels, _FILTER, _FILTER, generator=generator)
        filters /= math.sqrt(channels * _FILTER**2)

        def read(x: Tensor) -> Tensor:
            found = functional.conv2d(x, filters)
            both = torch.cat([found.clamp(min=0), found.neg_().clamp(min=0)], dim=1)
            return functional.adaptive_avg_pool2d(both, GRID)

        yield read


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random copies of images, drawn from torch's own generator, one image apart from the others.

    Attributes:
        copies: Copies of each image, at least 1.
        mirror: Whether left and right are exchanged with probability 1/2.
        shift: Largest shift in pixels, in each direction; uniform on -shift to shift.
    """

    copies: int
    mirror: bool
    shift: int

    def copy_of(self, images: Tensor) -> Tensor:
        """Return one random copy of each image.

        Pixels beyond the border are those reflected at it, without the border itself.

        Args:
            images: Shape (n, c, h, w), both sides above `shift`.
        """
        n, place = len(images), images.device
        moves = torch.randint(-self.shift, self.shift + 1, (2, n, 1), device=place)
        rows, columns = (
            _reflected(torch.arange(side, device=place) + move, side)  # (n, side)
            for side, move in zip(images.shape[-2:], moves, strict=True)
        )
        if self.mirror:
            turned = torch.rand(n, 1, device=place) < 0.5
            columns = torch.where(turned, columns.flip(-1), columns)
        picked = images.gather(2, rows[:, None, :, None].expand_as(images))
        return picked.gather(3, columns[:, None, None, :].expand_as(images))


def _reflected(places: Tensor, side: int) -> Tensor:
    """Return places beyond 0 and side - 1 reflected there."""
    return (side - 1) - ((side - 1) - places.abs()).abs()
