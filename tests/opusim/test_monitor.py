"""The monitor: healthy devices pass, every fault is found within its rate, and data frames are never looked at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from opusim.description import load_description
from opusim.devices.base import NoisyDevice
from opusim.devices.baseline import Baseline
from opusim.devices.registry import open_device, register_device
from opusim.errors import DeviceFault, NoiseBelowCertificate
from opusim.testing.faults import KIND, Fault, FaultyDevice, faulty_device

EVERY = 5
NAMES = {
    Fault.FROZEN: (DeviceFault, "frozen"),
    Fault.SATURATED: (DeviceFault, "saturated"),
    Fault.DARK: (DeviceFault, "is dark"),
    Fault.NOISE_HALVED: (NoiseBelowCertificate, "scatter 0.5"),
    Fault.HOTTER: (DeviceFault, "times the noise variance"),
    Fault.SWAPPED: (DeviceFault, "decorrelated or was swapped"),
}


def broken(fault: Fault, at_step: int, **window: Any) -> NoisyDevice:
    description = load_description("gaussian", {"monitor": {"every_steps": EVERY}, "noise": {"sigma": 0.5}})
    options = {"kind": "gaussian", "fault": fault.value, "at_step": at_step}
    description = description.model_copy(update={"kind": KIND, "options": options})
    return FaultyDevice(description, **{"n_inputs": 10, "n_outputs": 64, **window}).open()


@pytest.mark.parametrize("fault", list(NAMES))
@pytest.mark.parametrize("n_outputs", [64, 1024])
def test_a_fault_is_found_and_named_within_the_rate(fault: Fault, n_outputs: int) -> None:
    kind, words = NAMES[fault]
    with broken(fault, 7, n_outputs=n_outputs) as device:
        for step in range(10):
            device.seek(step)
        with pytest.raises(kind, match=words):
            device.seek(10)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gaussian", {"noise": {"sigma": 3.0}}),
        ("gaussian", {"noise": {"sigma": 0.01}}),
        ("ideal", {}),
        ("camera", {}),
        ("camera_low_light", {}),
    ],
)
def test_a_healthy_device_passes(name: str, options: dict[str, Any], seed: int) -> None:
    with open_device(
        name, n_inputs=10, n_outputs=256, seed=seed, monitor={"every_steps": 1}, **options
    ) as device:
        for step in range(60):
            device.seek(step)


def test_the_monitor_reads_blank_and_reference_vectors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_device("gaussian", n_inputs=10, n_outputs=64, monitor={"every_steps": 2}) as device:
        seen: list[torch.Tensor] = []
        real = type(device)._project
        monkeypatch.setattr(type(device), "_project", lambda self, x: seen.append(x) or real(self, x))
        device.seek(1)
        assert not seen
        device.seek(2)
        vectors = {tuple(row.tolist()) for x in seen for row in x}
        seen.clear()
        device.seek(4)
        assert {tuple(row.tolist()) for x in seen for row in x} == vectors
        data = torch.ones(3, 10)
        data[:, 0] = -1
        assert all(tuple(row.tolist()) not in vectors for row in data)
        assert device.usage.frames > 0


def test_its_frames_are_counted() -> None:
    with open_device("gaussian", n_inputs=10, n_outputs=64, monitor={"every_steps": 2}) as device:
        before = device.usage.frames
        device.seek(1)
        assert device.usage.frames == before
        device.seek(2)
        assert device.usage.frames > before


def test_a_device_that_was_swapped_between_two_openings_is_found() -> None:
    window: dict[str, Any] = {"n_inputs": 10, "n_outputs": 64, "monitor": {}}
    with open_device("gaussian", **window) as device:
        assert device.baseline is not None
        kept = device.baseline.to_array()
    with open_device("gaussian", seed=3, **window) as device:
        device.compare_with(Baseline.from_array(kept))
        device.seek(0)
    with (
        open_device("gaussian", medium={"seed": 1}, **window) as other,
        pytest.raises(DeviceFault, match="was swapped"),
    ):
        other.compare_with(Baseline.from_array(kept))


def test_a_baseline_is_kept_whole() -> None:
    with open_device("gaussian", n_inputs=10, n_outputs=64, monitor={}) as device:
        found = device.baseline
        assert found is not None
    again = Baseline.from_array(found.to_array())
    for name in ("reference", "weights", "variance"):
        np.testing.assert_array_equal(getattr(again, name), getattr(found, name))
    assert again.power == found.power


def test_a_saturated_camera_is_found() -> None:
    with open_device("camera", n_inputs=10, n_outputs=256, monitor={"every_steps": 1}) as device:
        device.seek(0)
    bright = {
        "light": {"exposure_us": 490.0},
        "sensor": {"gain_dn_per_e": 1.0},
        "anchor": {"most_saturated": 1.0},
    }
    with (
        open_device(
            "camera", n_inputs=10, n_outputs=256, monitor={"every_steps": 1}, camera=bright
        ) as device,
        pytest.raises(DeviceFault, match=r"% of its pixels saturated in a frame; shorten the exposure"),
    ):
        device.seek(0)


def test_the_wrapper_is_a_kind_that_can_be_registered() -> None:
    register_device(KIND, faulty_device)
    register_device(KIND, faulty_device)
