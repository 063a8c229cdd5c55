"""Replace features by a public map of them, which was fixed without the records; and draw random copies of images.

Features are computed in blocks in half precision, and cached in a folder of the user if the records may come again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from opusim.description.schema import DeviceDescription, load_description, parse_description
from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_described
from opusim.devices.usage import DeviceWork, Usage
from opusim.encodings import binarize
from opusim.errors import ConfigError
from opusim.processes import require_memory
from opusim.training.config.sections import DataConfig
from opusim.training.data.dataset import (
    Dataset,
    PrincipalComponents,
    Split,
    Standardisation,
    in_single_precision,
    with_parts,
)
from opusim.training.data.formats import required_library, unnamed_until_whole

CACHE_VARIABLE = "OPUSIM_CACHE"
RECORDS_AT_ONCE = 1000
"""Records that are mapped at once; part of the law of a noisy map, whose noise is drawn block by block."""


@dataclass(frozen=True, kw_only=True)
class PublicMap(ABC):
    """A map x -> f(x) of each record that depends on no other record, so that its outputs are public features.

    Attributes:
        record_shape: Shape of one record before; `PublicMap.n_inputs` numbers.
        groups: Number of groups of neighbouring features, each of which is shifted and scaled to mean 0 and variance 1
            within its record (torch.nn.functional.group_norm, which adds 1e-5 to the variance); None leaves features
            as they are.
    """

    kind: ClassVar[str]
    record_shape: tuple[int, ...]
    groups: int | None = None

    def __post_init__(self) -> None:
        channels, asked = self.mapped_shape[0], self.groups
        if asked is None or (channels % asked == 0 and asked < self.n_features):
            return
        whole = (n for n in range(1, channels + 1) if channels % n == 0 and n < self.n_features)
        near = sorted(sorted(whole, key=lambda n: abs(n - asked))[:3])
        raise ConfigError(
            "configuration",
            "data.features_groups",
            f"{asked} does not divide the {channels} channels of data.features; take "
            f"{', '.join(map(str, near))}, or leave it out",
        )

    @property
    @abstractmethod
    def mapped_shape(self) -> tuple[int, ...]:
        """Shape of one record after the map: (c, h, w) for images."""

    @property
    def own_facts(self) -> dict[str, Any]:
        """What else `config.json` needs to rebuild the map: JSON values."""
        own = (each.name for each in fields(self) if each.name not in ("record_shape", "groups"))
        return {name: getattr(self, name) for name in own}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Rebuild the map from `facts`."""
        own = {each.name: facts[each.name] for each in fields(cls)}
        return cls(**own | {"record_shape": tuple(facts["record_shape"])})

    @abstractmethod
    def opened(self) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        """Return a context whose function maps records, shape (n, *record_shape), to features (n, *mapped_shape)."""

    @property
    def depends_on_order(self) -> bool:
        """Whether adding or removing a record changes the features of others, because noise repeats from a seed."""
        return False

    @property
    def joins_records(self) -> bool:
        """Whether the features of a record may contain the reading of another."""
        return False

    @property
    def n_inputs(self) -> int:
        """Number of features of a record before the map."""
        return math.prod(self.record_shape)

    @property
    def n_features(self) -> int:
        """Number of features of a record after the map."""
        return math.prod(self.mapped_shape)

    @property
    def facts(self) -> dict[str, Any]:
        """What `config.json` says of the map: JSON values."""
        return {
            "map": self.kind,
            "public": True,
            "record_shape": list(self.record_shape),
            "groups": self.groups,
            "n_inputs": self.n_inputs,
            "n_features": self.n_features,
            **self.own_facts,
        }

    def blocks(self, x: Tensor) -> Iterator[np.ndarray]:
        """Yield the features of standardised records, float16, shape (n, n_features), some records at a time.

        Raises ConfigError if a feature does not fit half precision.
        """
        with self.opened() as read, torch.no_grad():
            for start in range(0, len(x), RECORDS_AT_ONCE):
                records = in_single_precision(x[start : start + RECORDS_AT_ONCE]).cpu()
                found = read(records.reshape(-1, *self.record_shape)).reshape(len(records), -1)
                if self.groups is not None:
                    found = functional.group_norm(found.unsqueeze(-1), self.groups).squeeze(-1)
                half = found.half()
                if not torch.isfinite(half).all():
                    reason = (
                        "a feature of a record exceeds 65504, the largest in half precision; lower data.std"
                    )
                    raise ConfigError("configuration", "data.features", reason)
                yield half.numpy()

    def require_room(self, records: int) -> None:
        """Refuse (ValueError) a map to more features than fit into memory, before a device is opened for it."""
        require_memory(
            2 * records * self.n_features,
            why="features in half precision",
            remedy="lower data.n_features, or give fewer records",
            data__features=self.kind,
            n_features=self.n_features,
            records=records,
        )

    def apply(self, x: Tensor) -> Tensor:
        """Return the features of standardised records, float16, shape (records, n_features), on x's torch device."""
        self.require_room(len(x))
        found = torch.empty(len(x), self.n_features, dtype=torch.float16)
        start = 0
        for block in self.blocks(x):
            found[start : start + len(block)] = torch.from_numpy(block)
            start += len(block)
        return found.to(x.device)


def with_public_features(dataset: Dataset, public: PublicMap, *, cached: bool) -> Dataset:
    """Replace every record's standardised features by those of a map; take them from the user's cache if `cached`."""
    public.require_room(len(dataset.train))

    def mapped(split: Split) -> Split:
        return Split(public_features(public, split.x, cached=cached), split.y)

    return with_parts(dataset, mapped, record_shape=public.mapped_shape, public_map=public.facts)


def public_features(public: PublicMap, x: Tensor, *, cached: bool) -> Tensor:
    """Return the features of standardised records, float16; from the cache, or kept there, if `cached`."""
    if not cached:
        return public.apply(x)
    file = cached_file(json.dumps(public.facts, sort_keys=True), x, ".npy")
    shape = len(x), public.n_features
    with suppress(OSError, ValueError):
        return _from_cache(file, shape).to(x.device)
    try:
        with unnamed_until_whole(file) as stream:
            header = {"descr": "<f2", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(stream, header)
            for block in public.blocks(x):
                stream.write(np.ascontiguousarray(block, dtype="<f2").data)
        return _from_cache(file, shape).to(x.device)
    except (OSError, ValueError):  # a full or read-only disk costs time, not the run
        return public.apply(x)


def _from_cache(file: Path, shape: tuple[int, int]) -> Tensor:
    """Return kept features, mapped into memory; raise OSError or ValueError if there are none or they were cut."""
    found = np.load(file, allow_pickle=False, mmap_mode="c" if shape[0] else None)
    if found.shape != shape or found.dtype != np.float16:
        raise ValueError(f"{file} holds {found.dtype} of shape {found.shape}")
    return torch.from_numpy(found)


def cached_file(facts: str, x: Tensor, suffix: str) -> Path:
    """Return where it is kept what is computed of records under some facts."""
    digest = hashlib.blake2b(facts.encode(), digest_size=16)
    digest.update(x.cpu().contiguous().numpy().view(np.uint8).data)
    folder = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "opusim") / "features"
    return folder / f"{digest.hexdigest()}{suffix}"


ANGLES, ORIENTATIONS = 8, 9
GRID = 4
"""Means of random convolutions are taken over GRID x GRID parts of an image."""
_CELL, _CELLS, _FILTER, _FILTER_SEED = 4, 2, 5, 20260102
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

    @contextmanager
    def opened(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Build the wavelets for one size of images."""
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
        """Import the library."""
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

    @contextmanager
    def opened(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Draw the filters."""
        channels = self.record_shape[0]
        generator = torch.Generator().manual_seed(_FILTER_SEED)
        filters = torch.randn(self.filters, channels, _FILTER, _FILTER, generator=generator)
        filters /= math.sqrt(channels * _FILTER**2)

        def read(x: Tensor) -> Tensor:
            found = functional.conv2d(x, filters)
            both = torch.cat([found.clamp(min=0), found.neg_().clamp(min=0)], dim=1)
            return functional.adaptive_avg_pool2d(both, GRID)

        yield read


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random copies of images, drawn from torch's own generator, independently for each image.

    Attributes:
        copies: Copies of each image, at least 1.
        mirror: Whether left and right are exchanged with probability 1/2.
        shift: Largest shift in pixels, in each direction; uniform on -shift to shift.
    """

    copies: int
    mirror: bool
    shift: int

    def copy_of(self, images: Tensor) -> Tensor:
        """Return one random copy of each image, shape (n, c, h, w), both sides above `shift`.

        Pixels beyond the border are those reflected at it, without the border itself.
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


_TRIALS = 256
_DEVICE_SEED = 20260101


@dataclass(frozen=True, kw_only=True)
class OpticalMap(PublicMap):
    """x -> (|R 1[x > threshold]|^2 - centre) / spread, read from a device once for each record.

    The map depends on no record, so that a guarantee holds for its outputs as for any other public features. centre and
    spread are the mean and the standard deviation of its readings of 256 public frames, in which each mirror is on with
    probability 1/2. The device's noise has a fixed seed, so that the same records in the same order have the same
    features; another record changes the noise of those after it (`depends_on_order`).

    Attributes:
        description: The device.
        components: Outputs of the device that are read.
        threshold: In units of the standardised features.
        centre: See above, in units of the device's intensities.
        spread: See above, above 0.
    """

    kind: ClassVar[str] = "optical"
    description: DeviceDescription
    components: int
    threshold: float
    centre: float = 0.0
    spread: float = 1.0

    @classmethod
    def named(cls, options: DataConfig, record_shape: tuple[int, ...]) -> Self:
        """Return the map that data.features names, once the device has shown the public frames.

        Raises ConfigError for no such device or one too small, CapabilityMissing if it gives no intensities, and
        DeviceError.
        """
        description = load_description(options.features_argument)
        form: dict[str, Any] = {
            "record_shape": record_shape,
            "groups": options.features_groups,
            "description": description,
            "components": options.n_features,
            "threshold": options.features_threshold,
        }
        bare = cls(**form)
        with bare.device() as device:
            numbers = device.intensities(bare.public_frames).double()
        spread = float(numbers.std())
        if not spread > 0:
            reason = (
                f"the intensities of {description.name!r} do not vary; take more light, or another device"
            )
            raise ConfigError("configuration", "data.features", reason)
        return cls(**form, centre=float(numbers.mean()), spread=spread)

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Rebuild the map from `facts`."""
        numbers = {name: facts[name] for name in ("groups", "threshold", "centre", "spread")}
        return cls(
            record_shape=tuple(facts["record_shape"]),
            description=parse_description("config.json", facts["device"]),
            components=facts["n_features"],
            **numbers,
        )

    @property
    def mapped_shape(self) -> tuple[int, ...]:
        """(n_features,)."""
        return (self.components,)

    @property
    def own_facts(self) -> dict[str, Any]:
        """The device, and the numbers of the formula."""
        return {
            "device": self.description.dump(),
            "threshold": self.threshold,
            "centre": self.centre,
            "spread": self.spread,
        }

    @property
    def public_frames(self) -> Tensor:
        """Frames in which each mirror is on with probability 1/2, shape (256, n_inputs)."""
        generator = torch.Generator().manual_seed(_DEVICE_SEED)
        return torch.randint(2, (_TRIALS, self.n_inputs), generator=generator, dtype=torch.uint8)

    @property
    @override
    def depends_on_order(self) -> bool:
        # true of a simulation with noise, not of hardware, whose noise is fresh
        found, frames = [], self.public_frames[:3]
        with self.device() as device:
            for first in (0, 0, 1):
                device.seek(0)
                found.append(device.intensities(frames[first:]))
        repeats = torch.equal(found[0], found[1])
        return repeats and not torch.equal(found[0][1:], found[2])

    @property
    @override
    def joins_records(self) -> bool:
        # true of a camera that repeats frames
        return self.description.joins_readings

    def device(self) -> NoisyDevice:
        """Return the device, open."""
        return open_described(
            self.description, n_inputs=self.n_inputs, n_outputs=self.components, seed=_DEVICE_SEED
        )

    @contextmanager
    def opened(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Hold the device open; its noise begins anew."""
        with self.device() as device:
            device.seek(0)

            def read(x: Tensor) -> Tensor:
                frames = binarize(x.flatten(1), self.threshold).to(torch.uint8)
                return device.intensities(frames).float().sub_(self.centre).div_(self.spread)

            yield read


def expected_usage(options: DataConfig, dataset: Dataset) -> Usage | None:
    """Return the device usage of a data set's features, or None without a device: a frame a record, and public ones.

    A run whose features are cached reads the public frames only. Opening the device is not counted.
    """
    if options.features_kind != OpticalMap.kind:
        return None
    work = DeviceWork(frames=_TRIALS, calls=1)
    for split in (dataset.train, dataset.validation, dataset.test):
        records = 0 if split is None else len(split)
        work += DeviceWork(frames=records, calls=math.ceil(records / RECORDS_AT_ONCE))
    told = dataset.public_map
    named = options.features_argument
    device = load_description(named) if told is None else parse_description(named, told["device"])
    return work.usage(device.frames, n_outputs=options.n_features)


_OF_A_FILTER = 2 * GRID**2


def named_map(options: DataConfig, dataset: Dataset) -> PublicMap:
    """Return the map that data.features names, for the records of a data set.

    Raises ConfigError if it does not fit them, else as `OpticalMap.named`.
    """
    if dataset.holds_tokens:
        reason = f"{options.features!r} is for quantities, and these records hold tokens; leave it out"
        raise ConfigError("configuration", "data.features", reason)
    shape, groups = dataset.record_shape, options.features_groups
    if options.features_kind == "optical":
        return OpticalMap.named(options, shape)
    if options.features_kind == "scattering":
        scale = int(options.features_argument or 2)
        return ScatteringMap(record_shape=shape, groups=groups, scale=scale)
    if options.features_kind == "hog":
        return HogMap(record_shape=shape, groups=groups)
    if options.n_features % _OF_A_FILTER:
        reason = f"{options.n_features} is no multiple of {_OF_A_FILTER}, the features of a random filter"
        raise ConfigError("configuration", "data.n_features", reason)
    filters = options.n_features // _OF_A_FILTER
    return RandomConvolutionMap(record_shape=shape, groups=groups, filters=filters)


def map_from_facts(facts: Mapping[str, Any]) -> PublicMap:
    """Rebuild a map from its `facts`."""
    kinds: tuple[type[PublicMap], ...] = (OpticalMap, ScatteringMap, HogMap, RandomConvolutionMap)
    return next(kind for kind in kinds if kind.kind == facts["map"]).from_facts(facts)


_IMAGE_SEED, _COUNT = 20261122, 3000
_IN_THE_MIDDLE, _ALL_OVER = (6, 0.12), (30, 0.35)
"""Number of shapes of an image, and the standard deviation of their centres, in sides of the image."""
_RADII = (0.06, 0.4)
_PRESENT = 0.7


def synthetic_components(
    dataset: Dataset, n_components: int, *, whitening: float, mirrored: bool = False, cached: bool
) -> PrincipalComponents:
    """Return principal components of invented images of a data set's shape: standardised like its own, and mapped.

    With f(x) the features of an image and f(x') those of its mirror image, `mirrored` takes the components of (f(x) +
    f(x')) / 2. If mirroring permutes features, f(x') = P f(x), every axis v has P v = v, so that f(x) v = f(x') v: a
    model of the components answers the same for both images. No record of the data set is read. Raises ConfigError if
    its records are no images, and ValueError if more than 2999 components are wanted.
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
    """Return the components, which a process computes once for equal arguments."""

    def features(images: Tensor) -> Tensor:
        x = standardisation.apply(images.flatten(1))
        return x if facts is None else public_features(map_from_facts(json.loads(facts)), x, cached=cached)

    images = random_shapes(shape, _COUNT)
    x = features(images)
    if mirrored:
        x = (x.float() + features(images.flip(-1))) / 2
    return PrincipalComponents.fit(x, n_components, whitening=whitening, public=True)


def random_shapes(shape: tuple[int, ...], count: int) -> Tensor:
    """Return `count` images of a shape (c, h, w) in [0, 1]: ellipses and rectangles in front of each other, on black.

    Every other image has up to 6 shapes near its middle, the others up to 30 all over. Each shape is there with
    probability 0.7. Its centre is normal with standard deviation 0.12 or 0.35 in each direction, in sides of the image,
    its half axes are 0.06 + 0.34 u^1.5, its angle is uniform, and so is its colour: 0.6 u of all channels and 0.4 u of
    each, with independent u uniform on [0, 1].
    """
    generator = torch.Generator().manual_seed(_IMAGE_SEED)

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
