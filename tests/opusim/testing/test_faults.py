"""Faults in cameras, and cameras of other kinds."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opusim import hw_configs, load_description, open_device, register_device
from opusim.devices import kinds
from opusim.devices.camera import CameraDevice
from opusim.errors import ConfigError, DeviceFault, DeviceUnavailable
from opusim.testing.faults import KIND, Fault, FaultyDevice, faulty_device
from tests.opusim.common import refuses

pytestmark = pytest.mark.compiled

WINDOW = {"n_inputs": 12, "n_outputs": 200}
X = torch.ones(1, 12)


class BenchCamera(CameraDevice):  # a third party's camera, with an option of its own
    def _project(self, x: torch.Tensor) -> torch.Tensor:
        return super()._project(x) * float(self.description.options.get("factor", 1.0))


def file(folder: Path, kind: str, options: str = "", numbers: tuple[str, ...] = ()) -> Path:
    """The packaged camera under another kind."""
    text = Path(hw_configs.__file__).with_name("camera.toml").read_text(encoding="utf-8")
    rows = "".join(f'"{key}" = {{ status = "assumed", source = "a test" }}\n' for key in numbers)
    text = text.replace('kind = "camera"', f'kind = "{kind}"')
    path = folder / f"{kind}.toml"
    path.write_text(text.replace("[provenance]\n", f"{options}[provenance]\n{rows}"), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_registered", {})
    monkeypatch.setattr(FaultyDevice, "repaired", False)


def broken(fault: Fault, **options: Any) -> CameraDevice:
    """An open camera that breaks at step 1."""
    changes = {"kind": "camera", "fault": fault.value, "at_step": 1, **options}
    description = load_description("camera").model_copy(update={"kind": KIND, "options": changes})
    device = faulty_device(description, **WINDOW).open()
    return device


def test_subclasses_of_the_camera_have_a_kind_and_faults_of_their_own(tmp_path: Path) -> None:
    register_device("bench_camera", BenchCamera)
    options = "[options]\nfactor = -1.0\n"
    with open_device(file(tmp_path, "bench_camera", options, ("options.factor",)), **WINDOW) as device:
        assert isinstance(device, BenchCamera)
        assert device.kind == "bench_camera"
        assert device.flat_frames(1).shape == (1, 200)
        mean = device.project(X.repeat(300, 1)).mean(0)
        expected = -(X @ device.matrix().T)[0]
        assert float(torch.corrcoef(torch.stack([mean, expected]))[0, 1]) > 0.99
    register_device("bench_camera", BenchCamera)
    register_device(KIND, faulty_device)
    options = '[options]\nkind = "bench_camera"\nfault = "unplugged"\nat_step = 1\nfactor = -1.0\n'
    path = file(tmp_path, KIND, options, ("options.at_step", "options.factor"))
    with open_device(path, **WINDOW) as device:
        assert isinstance(device, BenchCamera)
        device.seek(1)
        refuses(DeviceUnavailable, "is unplugged", device.project, X)
        FaultyDevice.repaired = True
        assert device.project(X).shape == (1, 200)


def test_kinds_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file(tmp_path, "camera", "[options]\nfactor = 2.0\n", ("options.factor",))
    refuses(ConfigError, r"options.factor: the kind 'camera' takes no options", open_device, path, **WINDOW)
    refuses(ConfigError, "both or neither, or the kind", open_device, file(tmp_path, "gaussian"), **WINDOW)
    description = load_description("camera")
    options = {"kind": "camera", "fault": "unplugged", "at_step": 0}
    with pytest.raises(ConfigError, match="is a camera; open it by `faulty_device`"):
        FaultyDevice(description.model_copy(update={"kind": KIND, "options": options}), **WINDOW)
    with pytest.raises(ConfigError, match="give kind, fault and at_step"):
        faulty_device(description.model_copy(update={"options": {"kind": "camera"}}))


def test_a_faulty_camera_from_a_file_is_a_camera(tmp_path: Path) -> None:
    register_device(KIND, faulty_device)
    options = '[options]\nkind = "camera"\nfault = "light changed"\nat_step = 1\namount = 0.5\n'
    path = file(tmp_path, KIND, options, ("options.at_step", "options.amount"))
    with open_device(path, **WINDOW) as device:
        assert isinstance(device, CameraDevice)
        assert device.kind == KIND
        device.seek(0)
        before = device.intensities(torch.ones(400, 12)).double().mean()
        device.seek(1)
        after = device.intensities(torch.ones(400, 12)).double().mean()
        black = 4.0
        assert float((after - black) / (before - black)) == pytest.approx(0.5, abs=0.02)
        assert device.description.options["fault"] == "light changed"


def slope(device: CameraDevice, step: int, b: torch.Tensor) -> np.ndarray:
    """Mean readings over the sound ones, output by output."""
    device.seek(step)
    x = torch.randint(0, 2, (300, 12), generator=torch.Generator().manual_seed(1)).mul(2).sub(1).float()
    signal = x @ b.T
    found: np.ndarray = ((device.project(x) * signal).sum(0) / (signal**2).sum(0)).numpy()
    return found


@pytest.mark.parametrize(
    ("fault", "amount", "expected"),
    [
        (Fault.LIGHT_CHANGED, 0.9, 0.9),
        (Fault.DECORRELATED, 0.8, 0.64),
        (Fault.SWAPPED, 1.0, 0.0),
        (Fault.DARK, 1.0, 0.0),
    ],
)
def test_frame_faults_change_the_signal_by_their_amount(fault: Fault, amount: float, expected: float) -> None:
    with broken(fault, amount=amount) as device:
        b = device.matrix()
        assert np.mean(slope(device, 0, b)) == pytest.approx(1, abs=0.02)
        # another medium correlates with this one by 1 / sqrt(entries) in the mean over outputs
        assert np.mean(slope(device, 1, b)) == pytest.approx(expected, abs=0.02 + 5 / math.sqrt(12 * 200))
        assert np.mean(slope(device, 0, b)) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("fault", [Fault.DEAD_OUTPUTS, Fault.HOT_OUTPUTS])
def test_a_share_of_the_outputs_stops_to_respond(fault: Fault) -> None:
    with broken(fault, amount=0.1) as device:
        b = device.matrix()
        silent = np.abs(slope(device, 1, b)) < 0.5
        frame = device.intensities(torch.ones(1, 12))[0].numpy()
    assert silent.sum() == 20
    assert np.all(frame[silent] == 255 if fault is Fault.HOT_OUTPUTS else frame[silent] < 10)


def test_faulty_frames_are_counted_once_and_long_exposures_take_their_time() -> None:
    with broken(Fault.FROZEN) as device:
        opened = device.usage.frames
        assert opened == 200  # anchor and blank frames
        device.project(X.repeat(3, 1))
        assert device.usage.frames - opened == 12
    with open_device("camera", **WINDOW) as device:
        opened = device.usage
        device.flat_frames(10)
        device.flat_frames(10, exposure_us=4000.0)
        spent = device.usage - opened
    assert spent.frames == 20
    assert spent.seconds == pytest.approx(10 * 500e-6 + 10 * 4000e-6)
    assert spent.joules == pytest.approx(30 * spent.seconds)


def test_noise_faults_and_frozen_frames_are_in_readings() -> None:
    for fault, factor in ((Fault.NOISE_HALVED, 0.5), (Fault.HOTTER, 1.5)):
        with broken(fault) as device:
            device.seek(1)
            found = device.draw((1000, 200)).double().numpy().var(axis=0)
            ratio = found / device.reading_variance(torch.zeros(1, 12)).numpy()[0]
        assert float(ratio.mean()) == pytest.approx(factor**2, rel=0.05)
    with broken(Fault.FROZEN) as device:
        device.seek(1)
        y = device.project(X.repeat(3, 1))
        assert torch.equal(y[0], y[2])


@pytest.mark.parametrize("fault", [Fault.WRONG_SHAPE, Fault.NOT_A_NUMBER])
def test_impossible_readings_of_a_camera_are_refused(fault: Fault) -> None:
    with broken(fault) as device:
        device.seek(1)
        with pytest.raises(DeviceFault):
            device.project(X)
