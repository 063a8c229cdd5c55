"""The public map of a device: its optical random features."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from opusim.description.loading import load_description, parse_description
from opusim.description.schema import DeviceDescription
from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_described
from opusim.devices.usage import DeviceWork, Usage
from opusim.encodings import binarize
from opusim.errors import ConfigError
from training.config.sections import DataConfig
from training.data.dataset import Dataset
from training.data.public_map import RECORDS_AT_ONCE, PublicMap

_TRIALS = 256
_SEED = 20260101


@dataclass(frozen=True, kw_only=True)
class OpticalMap(PublicMap):
    """x -> (|R 1[x > threshold]|^2 - centre) / spread, read from a device once for each record.

    No record enters the map, so that a guarantee holds for its outputs as for any other public features. centre and
    spread are the mean and the standard deviation of its readings of 256 public frames, of which each mirror is on with
    probability 1/2. The device's noise has a fixed seed, so that the same records in the same order have the same
    features; one record more gives the others other noise (`depends_on_order`).

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

        Raises:
            ConfigError: There is no such device, or it is too small.
            CapabilityMissing: It gives no intensities.
            DeviceError: It cannot be opened.
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
        """Frames of which each mirror is on with probability 1/2, shape (256, n_inputs)."""
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randint(2, (_TRIALS, self.n_inputs), generator=generator, dtype=torch.uint8)

    @property
    def depends_on_order(self) -> bool:
        """See PublicMap.depends_on_order: true of a simulation with noise, not of hardware, whose noise is fresh."""
        found, frames = [], self.public_frames[:3]
        with self.device() as device:
            for first in (0, 0, 1):
                device.seek(0)
                found.append(device.intensities(frames[first:]))
        repeats = torch.equal(found[0], found[1])
        return repeats and not torch.equal(found[0][1:], found[2])

    @property
    def joins_records(self) -> bool:
        """See PublicMap.joins_records: true of a camera that repeats frames."""
        return self.description.joins_readings

    def device(self) -> NoisyDevice:
        """Return the device, open."""
        return open_described(self.description, n_inputs=self.n_inputs, n_outputs=self.components, seed=_SEED)

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
    """Return what the features of a data set will take of their device: one frame for each record, and the public ones.

    A run whose features are kept from an earlier one reads the public frames only. What opening the device takes is
    not counted.

    Args:
        options: The section ``data``.
        dataset: The records, before the map or behind it.

    Returns:
        The usage, or None if the features are not a device's.
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
