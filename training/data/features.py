"""Replace the features of records by a public map: the optical random features of a device."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from opusim.description.loading import load_description, parse_description
from opusim.description.schema import DeviceDescription
from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_described
from opusim.encodings import binarize
from opusim.errors import ConfigError
from opusim.files import make_folder, write_file
from training.config.data import DataConfig
from training.data.dataset import Dataset, Split

CACHE_VARIABLE = "OPUSIM_CACHE"
_TRIALS = 256
_SEED = 20260101


@dataclass(frozen=True, kw_only=True)
class OpticalMap:
    """x -> (|R 1[x > threshold]|^2 - centre) / spread, read from a device once for each record.

    No record enters the map, so that a guarantee holds for its outputs as for any other public features. centre and
    spread are the mean and the standard deviation of its readings of 256 public frames, of which each mirror is on with
    probability 1/2. The device's noise has a fixed seed, so that the same records have the same features.

    Attributes:
        description: The device.
        n_inputs: Features of a record before.
        n_features: Features of a record behind the map.
        threshold: In units of the standardised features.
        centre: See above, in units of the device's intensities.
        spread: See above, above 0.
    """

    description: DeviceDescription
    n_inputs: int
    n_features: int
    threshold: float
    centre: float
    spread: float

    @classmethod
    def named(cls, options: DataConfig, n_inputs: int) -> Self:
        """Return the map that data.features names, once the device has shown the public frames.

        Raises:
            ConfigError: There is no such device, or it is too small.
            CapabilityMissing: It gives no intensities.
            DeviceError: It cannot be opened.
        """
        description = load_description(options.features_device)
        form: dict[str, Any] = {
            "description": description,
            "n_inputs": n_inputs,
            "n_features": options.n_features,
            "threshold": options.features_threshold,
        }
        generator = torch.Generator().manual_seed(_SEED)
        frames = torch.randint(2, (_TRIALS, n_inputs), generator=generator, dtype=torch.uint8)
        with cls(**form, centre=0.0, spread=1.0).opened() as device:
            numbers = device.intensities(frames).double()
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
        numbers = {name: facts[name] for name in ("n_inputs", "n_features", "threshold", "centre", "spread")}
        return cls(description=parse_description("config.json", facts["device"]), **numbers)

    @property
    def facts(self) -> dict[str, Any]:
        """What `config.json` says of the map: JSON values."""
        return {
            "map": "optical",
            "public": True,
            "device": self.description.dump(),
            "n_inputs": self.n_inputs,
            "n_features": self.n_features,
            "threshold": self.threshold,
            "centre": self.centre,
            "spread": self.spread,
        }

    def opened(self) -> NoisyDevice:
        """Return the device, open."""
        return open_described(self.description, n_inputs=self.n_inputs, n_outputs=self.n_features, seed=_SEED)

    def apply(self, x: Tensor) -> Tensor:
        """Return the features of records, float32, shape (n, n_features).

        Args:
            x: Standardised features, shape (n, n_inputs).
        """
        found = np.empty((len(x), self.n_features), dtype=np.float32)
        with self.opened() as device:
            device.seek(0)
            device.intensities(binarize(x, self.threshold).to(torch.uint8).cpu().numpy(), out=found)
        found -= np.float32(self.centre)
        found /= np.float32(self.spread)
        return torch.from_numpy(found).to(x.device)


def with_optical_features(dataset: Dataset, optical: OpticalMap, *, cached: bool) -> Dataset:
    """Return the data set with every record's features replaced by those of a map.

    Args:
        dataset: Standardised features.
        optical: The map.
        cached: Whether features are kept in a folder of the user (`OPUSIM_CACHE`, else ~/.cache/opusim), and taken from
            there if the same map saw the same records.

    Raises:
        ConfigError: The records hold tokens.
    """
    if dataset.holds_tokens:
        reason = "optical features are for quantities, and these records hold tokens; leave it out"
        raise ConfigError("configuration", "data.features", reason)

    def mapped(split: Split) -> Split:
        return Split(_kept(optical, split.x) if cached else optical.apply(split.x), split.y)

    return replace(
        dataset,
        train=mapped(dataset.train),
        validation=mapped(dataset.validation),
        test=None if dataset.test is None else mapped(dataset.test),
        record_shape=(),
        optical=optical.facts,
    )


def _kept(optical: OpticalMap, x: Tensor) -> Tensor:
    """Return the features of records from the cache, or compute and keep them."""
    digest = hashlib.blake2b(json.dumps(optical.facts, sort_keys=True).encode(), digest_size=16)
    digest.update(x.cpu().contiguous().numpy().tobytes())
    file = cache_folder() / f"{digest.hexdigest()}.npy"
    with suppress(OSError, ValueError):
        return torch.from_numpy(np.load(file, allow_pickle=False)).to(x.device)
    found = optical.apply(x)
    content = io.BytesIO()
    np.save(content, found.cpu().numpy())
    with suppress(OSError):  # a full or read-only disk costs time, not the run
        make_folder(file.parent)
        write_file(file, content.getvalue())
    return found


def cache_folder() -> Path:
    """Return where computed features are kept."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named or Path.home() / ".cache" / "opusim") / "features"
