"""The crossbar of docs/extending.md: it passes the contract and may not claim privacy for its noise."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from opusim.accounting import NoGuarantee
from opusim.accounting.mechanisms.readings import DeviceReadings, device_readings_guarantee
from opusim.crossbar.conversion import convert
from opusim.description.schema import load_description
from opusim.devices import kinds
from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_device
from opusim.errors import ConfigError
from opusim.noise import SignalGaussianNoise
from opusim.testing.contract import DeviceContract
from opusim.training.protections.base import creditable_law

PACKAGE = Path(__file__).parents[2] / "support" / "third_party_crossbar"
FILE = PACKAGE / "lab_crossbar.toml"
sys.path.insert(0, str(PACKAGE))
from lab_crossbar import LabCrossbar  # noqa: E402

sys.path.remove(str(PACKAGE))


class TestLabCrossbar(DeviceContract):
    def open_window(self, **options: Any) -> NoisyDevice:
        return LabCrossbar(load_description(FILE), n_inputs=12, n_outputs=40, **options).open()


class Forgetful(LabCrossbar):
    """Goes on with the matrix that it had before the wait."""

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        self._now = self._programmed
        return super()._multiply(x)


class Quiet(LabCrossbar):
    """States the noise of a blank input for all inputs."""

    @property
    def described_noise(self) -> SignalGaussianNoise:
        low = super().described_noise.std_low
        return SignalGaussianNoise(std_low=low, std_high=low, n_outputs=self.n_outputs)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Forgetful, "test_time_changes_the_told_matrix_and_nothing_else"),
        (Quiet, "test_products_are_those_of_the_told_matrix"),
        (Quiet, "test_the_noise_of_readings_is_the_reported_one"),
    ],
)
def test_a_broken_one_is_found(broken: type[LabCrossbar], test: str) -> None:
    class Contract(DeviceContract):
        def open_window(self, **options: Any) -> NoisyDevice:
            return broken(load_description(FILE), n_inputs=12, n_outputs=40, **options).open()

    with pytest.raises(AssertionError):
        getattr(Contract(), test)()


def test_it_is_told_what_it_may_not_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_registered", {"lab_crossbar": LabCrossbar})
    with open_device(FILE, n_inputs=12, n_outputs=40) as device:
        with pytest.raises(ConfigError, match=r"noise of device 'lab_crossbar' \(Gaussian"):
            creditable_law(device)
        with pytest.raises(NoGuarantee, match="noise law 'signal_gaussian': no theorem"):
            device_readings_guarantee(DeviceReadings(noise=device.noise, readings=1, distance=1.0), 1e-5)


def test_a_network_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_registered", {"lab_crossbar": LabCrossbar})
    torch.manual_seed(1)
    layer = torch.nn.Linear(20, 30)
    with convert(layer, FILE) as analog:
        analog.wait(3600.0)
        x = torch.randn(400, 20)
        found, expected = analog(x).detach(), layer(x).detach()
        assert float((found - expected).abs().mean()) < 0.5 * float(expected.abs().mean())
