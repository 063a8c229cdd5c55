"""The public maps that data.features names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opusim.errors import ConfigError
from training.config.sections import DataConfig
from training.data.dataset import Dataset
from training.data.image_maps import GRID, HogMap, RandomConvolutionMap, ScatteringMap
from training.data.optical_map import OpticalMap
from training.data.public_map import PublicMap

_OF_A_FILTER = 2 * GRID**2


def named_map(options: DataConfig, dataset: Dataset) -> PublicMap:
    """Return the map that data.features names, for the records of a data set.

    Raises:
        ConfigError: It does not fit them.
        CapabilityMissing, DeviceError: A device gives no intensities, or cannot be opened.
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
    shape = tuple(facts["record_shape"])
    if facts["map"] == OpticalMap.kind:
        return OpticalMap.from_facts(facts)
    if facts["map"] == ScatteringMap.kind:
        return ScatteringMap(record_shape=shape, groups=facts["groups"], scale=facts["scale"])
    if facts["map"] == HogMap.kind:
        return HogMap(record_shape=shape, groups=facts["groups"])
    return RandomConvolutionMap(record_shape=shape, groups=facts["groups"], filters=facts["filters"])
