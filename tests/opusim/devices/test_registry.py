"""Kinds of devices by name, what a device was used for, and certificates with laws of other packages."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from opusim import NoiseModel, list_devices, open_device
from opusim.description.schema import FrameSettings, load_description, packaged_names
from opusim.devices import kinds
from opusim.devices.certificate import Certificate, GaussianLaw, OtherLaw, digest_of, load_certificate
from opusim.devices.kinds import capabilities_of, device_kinds, devices_that, register_device
from opusim.devices.simulated import GaussianDevice, IdealDevice
from opusim.devices.usage import Usage, UsageMeter
from opusim.errors import CapabilityMissing, ConfigError
from tests.opusim.common import refuses, spent_by
from tests.support.certificates import certificate_of
from tests.support.discrete_noise import DiscreteNoise


class MirrorDevice(IdealDevice):  # a third party's device
    def _project(self, x: torch.Tensor) -> torch.Tensor:
        return -super()._project(x)


def mirror_file(folder: Path, kind: str) -> Path:
    from opusim import hw_configs

    text = Path(hw_configs.__file__).with_name("ideal.toml").read_text(encoding="utf-8")
    path = folder / "mirror.toml"
    path.write_text(text.replace('kind = "ideal"', f'kind = "{kind}"'), encoding="utf-8")
    return path


def test_devices_are_listed_and_tell_what_they_can_do_before_they_are_opened() -> None:
    assert [entry.name for entry in list_devices()] == list(packaged_names())
    assert {"gaussian", "ideal"} <= set(device_kinds())
    can = {entry.name: capabilities_of(entry) for entry in list_devices()}
    assert can["gaussian"] == ("project", "draw", "intensities", "matrix")
    assert can["camera"] == ("project", "draw", "intensities", "matrix")
    assert can["lighton_appliance"] == ("project", "draw", "intensities")
    assert can["lightonml_simulated"] == ("project", "draw", "intensities", "matrix")
    assert "lighton_appliance" not in devices_that("matrix")
    assert devices_that("program") == ("hermes", "microring_bank", "mzi_mesh", "pcm", "reram")
    assert can["pcm"] == ("project", "draw", "matrix", "program", "multiply", "multiply_transposed", "wait")


def test_a_registered_kind_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_registered", {})
    path = mirror_file(tmp_path, "mirror")
    refuses(ConfigError, "kind 'mirror'; known are bench", open_device, path, n_inputs=2, n_outputs=3)
    register_device("mirror", MirrorDevice)
    register_device("mirror", MirrorDevice)
    x = torch.ones(1, 2)
    sizes = {"n_inputs": 2, "n_outputs": 3}
    with open_device(path, **sizes) as mirror, open_device("ideal", **sizes) as ideal:
        assert torch.equal(mirror.project(x), -ideal.project(x))
    refuses(ValueError, "kind = 'mirror': is taken", register_device, "mirror", IdealDevice)
    refuses(ValueError, "kind = 'ideal': is taken", register_device, "ideal", MirrorDevice)
    refuses(TypeError, "must be callable", register_device, "other", None)


def test_missing_capabilities_and_wrong_windows_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    with open_device("gaussian", n_inputs=2, n_outputs=3) as device:
        assert torch.equal(device.require("matrix").matrix(), device.matrix())
        refuses(CapabilityMissing, "'gaussian' .* lacks the capability", device.require, "program")
        refuses(ValueError, "capability = 'fly': must be one of 'project', 'draw'", device.require, "fly")

    class Blind(IdealDevice):
        can = frozenset({"project"})

    monkeypatch.setattr(kinds, "_registered", {"blind": Blind})
    with open_device(mirror_file(tmp_path, "blind"), n_inputs=2, n_outputs=3) as device:
        refuses(CapabilityMissing, "capability 'draw'; camera, camera_fitted,", device.draw, (1, 3))
    refuses(ConfigError, "n_inputs: a window of 10000000", open_device, "gaussian", n_inputs=10_000_000)
    refuses(ValueError, "n_outputs = 0", open_device, "gaussian", n_outputs=0)
    refuses(ConfigError, "noise: the kind 'ideal' has none", open_device, "ideal", noise={"sigma": 0.1})
    refuses(ConfigError, "gaussian: noise: missing", open_device, "gaussian", noise=None)
    refuses(ConfigError, "gaussian: medium: missing", open_device, "gaussian", medium=None)
    refuses(ConfigError, "options.gain_db: .* no options", open_device, "gaussian", options={"gain_db": 2.0})
    refuses(ValueError, "mode = 'live'", open_device, "gaussian", mode="live")
    refuses(TypeError, "name_or_path = 3: must be str or Path", open_device, 3)


def test_the_meter_counts_seconds_and_joules_of_calls() -> None:
    meter = UsageMeter(FrameSettings(frame_period_us=270.0, power_w=30.0), 1)
    meter.count(1000)
    before = meter.snapshot()
    meter.count(1000)
    assert (before.frames, before.seconds, before.joules) == pytest.approx((1000, 0.27, 8.1), rel=1e-12)
    assert meter.snapshot() - before == before
    assert before + before == meter.snapshot()
    assert Usage.from_json(json.loads(json.dumps(before.to_json()))) == before
    refuses(ValueError, "frames = -1", meter.count, -1)
    # 4.27 to 4.40 s on a real OPU, for widths from 100 to 32,000 (opu-kernel-experiments, opu_time.npy).
    for name in ("camera", "camera_fitted"):
        with open_device(name, n_inputs=100, n_outputs=100) as device:
            spent = spent_by(device, device.intensities, np.ones((1000, 100), dtype=np.uint8))
        assert spent.seconds == pytest.approx(0.5)
        assert 4.33 / 2 < spent.seconds + spent.host_seconds < 4.33 * 2
        assert spent.host_seconds > 0


@pytest.mark.parametrize("overhead", [{}, {"host_us_per_frame": 0.0}, {"frame_period_us": 5000.0}])
@pytest.mark.parametrize("name", ["camera", "camera_fitted", "lighton_appliance"])
def test_descriptions_predict_the_measured_call_to_a_factor_of_two(name: str, overhead: dict) -> None:
    description = load_description(name, {"frames": overhead})
    is_right = 4.33 / 2 < description.frames.call_seconds(1000) < 4.33 * 2
    assert is_right is not bool(overhead)
    source = load_description(name).dump()["provenance"]["frames.host_us_per_frame"]
    assert source["status"] == "measured"
    assert "opu_time.npy" in source["source"]


def test_the_host_and_wide_windows_take_their_time() -> None:
    host = {"host_us_per_frame": 10.0, "host_us_per_call": 500.0}
    settings = FrameSettings(frame_period_us=100.0, power_w=1.0, **host)
    meter = UsageMeter(settings, 1)
    meter.count(20)
    meter.count(0)
    assert meter.snapshot().host_seconds == pytest.approx(20 * 10e-6 + 2 * 500e-6)
    assert meter.snapshot().seconds == pytest.approx(2e-3)
    frames = {"readout_us_per_output": 0.5}
    seconds = []
    for outputs in (100, 20_000):
        with open_device("camera", n_inputs=4, n_outputs=outputs, frames=frames) as device:
            before = device.usage
            device.intensities(np.ones((10, 4), dtype=np.uint8))
            seconds.append((device.usage - before).seconds)
    assert seconds == pytest.approx([10 * 500e-6, 10 * 10_000e-6])


@dataclass(frozen=True, kw_only=True, eq=False)
class Laplace(NoiseModel):
    law: ClassVar[str] = "test-laplace"
    scale: np.ndarray
    beta: float = 0.0

    def variance_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        variance = 2 * np.square(self.scale)
        return variance, variance

    def describe(self) -> str:
        return "Laplace"


class LaplaceDevice(GaussianDevice):
    @property
    def described_noise(self) -> Laplace:
        return Laplace(scale=np.full(3, 0.1))


DESCRIPTION = load_description("gaussian")
BETA = 1e-6


def certificate(noise: NoiseModel) -> Certificate:
    law = OtherLaw(**noise.to_json())
    return certificate_of(DESCRIPTION, law, n_inputs=2, n_outputs=3, beta=BETA)


def test_laws_of_other_packages_come_back_from_files_or_are_one_line(tmp_path: Path) -> None:
    law = Laplace(scale=np.array([0.09, 0.1, 0.11]), beta=BETA)
    path = tmp_path / "certificate.toml"
    certificate(law).write(path)
    device = LaplaceDevice(DESCRIPTION, n_inputs=2, n_outputs=3)
    device.attach_certificate(load_certificate(path))
    assert device.noise == law
    unknown = certificate(Laplace(scale=np.ones(3), beta=BETA)).model_dump()
    for law, message in (
        ({"law": "unheard-of"}, "law = 'unheard-of': must be one of .*install the package"),
        ({"law": "test-laplace", "width": 1.0}, "unexpected keyword argument 'width'"),
    ):
        made = Certificate.model_validate(unknown | {"noise": law})
        device = LaplaceDevice(DESCRIPTION, n_inputs=2, n_outputs=3)
        refuses(ConfigError, message, device.attach_certificate, made)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (Laplace(scale=np.ones(3), beta=0.0), "certifies the law 'test-laplace' at beta = 0, the device has"),
        (DiscreteNoise(values=np.array([-1.0, 1.0]), log_masses=np.log([0.5, 0.5])), "certifies the law"),
    ],
)
def test_a_law_that_is_not_the_devices_is_refused(noise: NoiseModel, message: str) -> None:
    device = LaplaceDevice(DESCRIPTION, n_inputs=2, n_outputs=3)
    refuses(ConfigError, message, device.attach_certificate, certificate(noise))


def test_noise_of_hardware_is_that_of_one_width_of_its_window() -> None:
    """lightonml's readings grow with the root of the inputs; a simulation states its law for any window."""
    hardware = DESCRIPTION.model_copy(update={"medium": None})
    for description, is_refused in ((DESCRIPTION, False), (hardware, True)):
        changes = {"noise": GaussianLaw(std=0.1), "description_digest": digest_of(description)}
        made = certificate(Laplace(scale=np.ones(3), beta=BETA)).model_copy(update=changes)
        for n_inputs in (None, 2):
            made.check_device(description, n_outputs=3, n_inputs=n_inputs)
        refused = pytest.raises(ConfigError, match="--inputs 8") if is_refused else nullcontext()
        with refused:
            made.check_device(description, n_outputs=3, n_inputs=8)
