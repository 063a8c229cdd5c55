from pathlib import Path

import pytest
import torch

from opusim.description.schema import packaged_names
from opusim.devices import kinds
from opusim.devices.kinds import capabilities_of, device_kinds, devices_that, register_device
from opusim.devices.registry import list_devices, open_device
from opusim.devices.simulated import IdealDevice
from opusim.errors import CapabilityMissing, ConfigError


class MirrorDevice(IdealDevice):
    """A third party's device."""

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        return -super()._project(x)


def mirror_file(folder: Path, kind: str) -> Path:
    from opusim import hw_configs

    text = Path(hw_configs.__file__).with_name("ideal.toml").read_text(encoding="utf-8")
    path = folder / "mirror.toml"
    path.write_text(text.replace('kind = "ideal"', f'kind = "{kind}"'), encoding="utf-8")
    return path


def test_packaged_devices_are_listed() -> None:
    assert [entry.name for entry in list_devices()] == list(packaged_names())
    assert {"gaussian", "ideal"} <= set(device_kinds())


def test_a_registered_kind_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_registered", {})
    path = mirror_file(tmp_path, "mirror")
    with pytest.raises(ConfigError, match="kind: unknown kind 'mirror'; known are bench"):
        open_device(path, n_inputs=2, n_outputs=3)
    register_device("mirror", MirrorDevice)
    register_device("mirror", MirrorDevice)
    x = torch.ones(1, 2)
    with (
        open_device(path, n_inputs=2, n_outputs=3) as mirror,
        open_device("ideal", n_inputs=2, n_outputs=3) as ideal,
    ):
        assert torch.equal(mirror.project(x), -ideal.project(x))
    with pytest.raises(ValueError, match="kind = 'mirror': is taken"):
        register_device("mirror", IdealDevice)
    with pytest.raises(ValueError, match="kind = 'ideal': is taken"):
        register_device("ideal", MirrorDevice)
    with pytest.raises(TypeError, match="must be callable"):
        register_device("other", None)


def test_devices_tell_what_they_can_do_before_they_are_opened() -> None:
    can = {entry.name: capabilities_of(entry) for entry in list_devices()}
    assert can["gaussian"] == ("project", "draw", "intensities", "matrix")
    assert can["camera"] == ("project", "draw", "intensities", "matrix")
    assert can["lighton_appliance"] == ("project", "draw", "intensities")
    assert can["lightonml_simulated"] == ("project", "draw", "intensities", "matrix")
    assert "lighton_appliance" not in devices_that("matrix")
    assert devices_that("program") == ("hermes", "microring_bank", "mzi_mesh", "pcm", "reram")
    assert can["pcm"] == (
        *("project", "draw", "matrix", "program", "multiply", "multiply_transposed", "wait"),
    )


def test_a_capability_that_is_missing_is_refused_by_name() -> None:
    with open_device("gaussian", n_inputs=2, n_outputs=3) as device:
        assert torch.equal(device.require("matrix").matrix(), device.matrix())
        with pytest.raises(CapabilityMissing, match=r"'gaussian' \(kind 'gaussian'\) lacks the capability"):
            device.require("program")
        with pytest.raises(ValueError, match="capability = 'fly': must be one of 'project', 'draw'"):
            device.require("fly")


def test_a_device_without_noise_readings_does_not_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Blind(IdealDevice):
        can = frozenset({"project"})

    monkeypatch.setattr(kinds, "_registered", {"blind": Blind})
    with (
        open_device(mirror_file(tmp_path, "blind"), n_inputs=2, n_outputs=3) as device,
        pytest.raises(
            CapabilityMissing,
            match="lacks the capability 'draw'; camera, camera_fitted, camera_fluctuating, camera_",
        ),
    ):
        device.draw((1, 3))


def test_windows_and_sections_are_checked() -> None:
    with pytest.raises(ConfigError, match="gaussian: n_inputs: a window of 10000000 is wanted"):
        open_device("gaussian", n_inputs=10_000_000)
    with pytest.raises(ValueError, match="n_outputs = 0"):
        open_device("gaussian", n_outputs=0)
    with pytest.raises(ConfigError, match="ideal: noise: the kind 'ideal' has none"):
        open_device("ideal", noise={"sigma": 0.1})
    with pytest.raises(ConfigError, match="gaussian: noise: missing"):
        open_device("gaussian", noise=None)
    with pytest.raises(ConfigError, match="gaussian: medium: missing"):
        open_device("gaussian", medium=None)
    with pytest.raises(ConfigError, match=r"gaussian: options.gain_db: the kind 'gaussian' takes no options"):
        open_device("gaussian", options={"gain_db": 2.0})
    with pytest.raises(ValueError, match="mode = 'live'"):
        open_device("gaussian", mode="live")
    with pytest.raises(TypeError, match="name_or_path = 3: must be str or Path"):
        open_device(3)
