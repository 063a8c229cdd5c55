"""Chips of light keep to the contract, and larger matrices are put on several chips."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_device
from opusim.testing.contract import DeviceContract

EXACT = {"converter": {"dac_bits": None, "adc_bits": None, "adc_bound": None}}


class TestMesh(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device("mzi_mesh", n_inputs=12, n_outputs=40, **options)


class TestRings(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device("microring", n_inputs=12, n_outputs=40, **options)


class TestSeveralMeshes(DeviceContract):
    """12 x 40 on chips of 8 ports, without converters."""

    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device("small_mesh.toml", **options)
