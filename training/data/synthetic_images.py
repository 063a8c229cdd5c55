"""Invented images, whose principal components can be taken for private ones: no record enters them."""

from __future__ import annotations

import functools
import json
import math

import torch
from opusim.training.data.public_maps import map_from_facts, public_features
from torch import Tensor

from opusim.errors import ConfigError
from opusim.training.data.dataset import Dataset, PrincipalComponents, Standardisation

_SEED, _COUNT = 20261122, 3000
_IN_THE_MIDDLE, _ALL_OVER = (6, 0.12), (30, 0.35)
"""Number of shapes of an image, and the standard deviation of their centres, in sides of the image."""
_RADII = (0.06, 0.4)
_PRESENT = 0.7


def synthetic_components(
    dataset: Dataset, n_components: int, *, whitening: float, mirrored: bool = False, cached: bool
) -> PrincipalComponents:
    """Return principal components of invented images of a data set's shape: standardised like its own, and mapped.

    With f(x) the features of an image and f(x') those of its mirror image, `mirrored` takes the components of
    (f(x) + f(x')) / 2. If mirroring permutes features, f(x') = P f(x), every axis v has P v = v, so that f(x) v =
    f(x') v: a model of the components answers the same for both images.

    Args:
        dataset: Images (c, h, w), standardised, behind a public map or not. No record of it is read.
        n_components: At most 2999.
        whitening: See `PrincipalComponents.fit`.
        mirrored: Whether features are averaged with those of the mirror image, left and right exchanged.
        cached: See `opusim.training.data.public_map.with_public_features`.

    Raises:
        ConfigError: Its records are no images.
        ValueError: There are too few components.
    """
    public = None if dataset.public_map is None else map_from_facts(dataset.public_map)
    shape = dataset.record_shape if public is None else public.record_shape
    if len(shape) != 3 or dataset.holds_tokens:
        reason = (
            f"'synthetic' is for images (c, h, w), and records have the shape {tuple(shape)}; leave it out"
        )
        raise ConfigError("configuration", "data.components_from", reason)
    facts = None if public is None else json.dumps(public.facts, sort_keys=True)
    return _fitted(shape, dataset.standardisation, facts, n_components, whitening, mirrored, cached)


@functools.lru_cache(maxsize=2)
def _fitted(
    shape: tuple[int, ...],
    standardisation: Standardisation,
    facts: str | None,
    n_components: int,
    whitening: float,
    mirrored: bool,
    cached: bool,
) -> PrincipalComponents:
    """Return the components once for all runs of a process that ask for the same."""

    def features(images: Tensor) -> Tensor:
        x = standardisation.apply(images.flatten(1))
        return x if facts is None else public_features(map_from_facts(json.loads(facts)), x, cached=cached)

    images = random_shapes(shape, _COUNT)
    x = features(images)
    if mirrored:
        x = (x.float() + features(images.flip(-1))) / 2
    return PrincipalComponents.fit(x, n_components, whitening=whitening, public=True)


def random_shapes(shape: tuple[int, ...], count: int, *, seed: int = _SEED) -> Tensor:
    """Return images of ellipses and rectangles in front of each other, on black.

    Every other image has up to 6 shapes near its middle, the others up to 30 all over. Each shape is there with
    probability 0.7. Its centre is normal with standard deviation 0.12 or 0.35 in each direction, in sides of the image,
    its half axes are 0.06 + 0.34 u^1.5, its angle is uniform, and so is its colour: 0.6 u of all channels and 0.4 u of
    each, with independent u uniform on [0, 1].

    Args:
        shape: Of an image: (c, h, w).
        count: Number of images.
        seed: Public.

    Returns:
        Values in [0, 1], shape (count, c, h, w).
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*size: int) -> Tensor:
        return torch.rand(count, *size, generator=generator)

    channels, height, width = shape
    rows = ((torch.arange(height) + 0.5) / height - 0.5)[None, :, None]
    columns = ((torch.arange(width) + 0.5) / width - 0.5)[None, None, :]
    images = torch.zeros(count, channels, height, width)
    middle = torch.arange(count) % 2 == 0
    for number in range(_ALL_OVER[0]):
        present = (uniform() < _PRESENT) & (~middle | (number < _IN_THE_MIDDLE[0]))
        spread = torch.where(middle, _IN_THE_MIDDLE[1], _ALL_OVER[1])
        centre = torch.randn(2, count, 1, 1, generator=generator) * spread[:, None, None]
        axes = _RADII[0] + (_RADII[1] - _RADII[0]) * uniform(2, 1, 1) ** 1.5
        angle = math.pi * uniform(1, 1)
        x, y = columns - centre[0], rows - centre[1]
        u = (x * angle.cos() + y * angle.sin()) / axes[:, 0]
        v = (y * angle.cos() - x * angle.sin()) / axes[:, 1]
        inside = torch.where(
            uniform(1, 1) < 0.5, u.square() + v.square() < 1, torch.maximum(u.abs(), v.abs()) < 0.88
        )
        colour = 0.6 * uniform(1) + 0.4 * uniform(channels)
        images = torch.where((inside & present[:, None, None])[:, None], colour[:, :, None, None], images)
    return images
