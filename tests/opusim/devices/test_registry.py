from pathlib import Path

import pytest
import torch

from opusim.description.loading import packaged_names
from opusim.devices import registry
from opusim.devices.registry import device_kinds, list_devices, open_device, register_device
from opusim.devices.simulated import IdealDevice
from opusim.errors import ConfigError, DeviceUnavailable


class MirrorDevice(IdealDevice):
    """A third party's device."""

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        return -super()._project(x)


class BrokenEntryPoint:
    name = "broken"

    def load(self) -> object:
        raise ImportError("no driver")


def mirror_file(folder: Path, kind: str) -> Path:
    import hw_configs

    text = Path(hw_configs.__file__).with_name("ideal.toml").read_text(encoding="utf-8")
    path = folder / "mirror.toml"
    path.write_text(text.replace('kind = "ideal"', f'kind = "{kind}"'), encoding="utf-8")
    return path


def test_packaged_devices_are_listed() -> None:
    assert [entry.name for entry in list_devices()] == list(packaged_names())
    assert {"gaussian", "ideal"} <= set(device_kinds())


def test_a_registered_kind_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    path = mirror_file(tmp_path, "mirror")
    with pytest.raises(ConfigError, match="kind: unknown kind 'mirror'; known are camera, gaussian, ideal"):
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


def test_a_broken_package_is_a_device_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda **_: [BrokenEntryPoint()])
    with pytest.raises(
        DeviceUnavailable, match="the package of device kind 'broken' does not import: no driver"
    ):
        open_device(mirror_file(tmp_path, "broken"))


def test_windows_and_sections_are_checked() -> None:
    with pytest.raises(
        ConfigError, match="gaussian: n_inputs: a window of 10000000 is wanted, the device has 1000000"
    ):
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
