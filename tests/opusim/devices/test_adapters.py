"""Adapters of libraries, against the libraries' own simulators or, for ALP4lib and pylablib, their own signatures.

They run in an environment of their own (`make adapters`).
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from opusim import open_device
from opusim.description.schema import load_description
from opusim.devices.bench import HarvestersCamera, MicroManagerCamera, PylonCamera
from tests.support.command import opusim

pytest.importorskip("slmsuite", reason="the libraries of instruments come with `make adapters`")
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

OWN = Path(__file__).parents[2] / "support" / "own_bench"
SENSOR = load_description("camera_low_light").camera


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """slmsuite's simulated pair as a bench, with its own folder to work in."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("slmsuite"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(OWN))
            yield importlib.import_module("slmsuite_bench")
    finally:
        os.chdir(before)


def frames(pair: ModuleType, exposures_us: list[float], electrons_per_us: float) -> np.ndarray:
    """Frames of even light: one point of the modulator is lit."""
    camera, amplitude = pair.simulated, pair.slm.source["amplitude_sim"]
    noise, gain, mean = camera.noise, camera.gain, 1 / (pair.SIDE**2)
    point = np.zeros_like(amplitude)
    point[pair.SIDE // 2, pair.SIDE // 2] = 1
    pair.slm.source["amplitude_sim"], camera.gain = point, 1e6 * electrons_per_us / mean
    taken = []
    for exposure_us in exposures_us:
        camera.set_exposure(1e-6 * exposure_us)
        taken.append([camera.get_image() for _ in range(16)])
    pair.slm.source["amplitude_sim"], camera.gain = amplitude, gain
    assert camera.noise is noise
    return np.array(taken, dtype=np.uint16)


def test_slmsuites_pair_projects_linearly(pair: ModuleType) -> None:
    with open_device(OWN / "slmsuite_bench.toml", bench={"setup": "setup"}) as device:
        b = device.measure_matrix()
        x = torch.randint(-1, 2, (64, 20), generator=torch.Generator().manual_seed(1)).float()
        left = device.project(x) - x @ b.T
        noise = device.described_noise
        assert float(b.std()) == pytest.approx(1.0, abs=5 * 0.05)
        assert float(left.std()) < 1.5 * float(np.sqrt(np.max(noise.variances)))


def test_the_documented_command_calibrates_slmsuites_camera_from_its_frames(pair: ModuleType) -> None:
    assert SENSOR is not None
    flat_us = [2e3, 5e3, 1e4, 1.5e4, 2e4, 2.5e4, 3e4, 3.5e4, 3.9e4, 4.4e4, 5e4]
    dark_us = [1e3, 5e4, 2e5, 1e6, 4e6]
    np.savez(
        "frames.npz",
        flat=frames(pair, flat_us, 0.1),
        dark=frames(pair, dark_us, 0.0),
        flat_exposure_us=flat_us,
        dark_exposure_us=dark_us,
        bits=12,
    )
    arguments = ("camera_low_light", "--recorded", "frames.npz", "--out", "calibrated")
    calibrated = opusim("device", "calibrate", *arguments, cwd=Path.cwd())
    assert calibrated.returncode == 0, calibrated.stderr
    found = load_description("calibrated/camera_low_light_measured.toml").camera
    assert found is not None
    for key, error in (
        ("gain_dn_per_e", 0.0028),
        ("read_noise_e", 0.0073),
    ):  # standard errors, as the table told
        assert getattr(found.sensor, key) == pytest.approx(getattr(SENSOR.sensor, key), abs=5 * error)


@pytest.mark.slow
def test_networks_learn_through_slmsuites_pair_as_through_the_camera(pair: ModuleType) -> None:
    found = {}
    for device in (str(OWN / "slmsuite_bench.toml"), "camera"):
        run = opusim(
            "train",
            "pdfa",
            "--data",
            "digits",
            "--device",
            device,
            "--epochs",
            15,
            "--out",
            "run",
            cwd=Path.cwd(),
        )
        assert run.returncode == 0, run.stderr
        found[device] = json.loads(Path("run", "summary.json").read_text())["test_accuracy"]
        shutil.rmtree("run")
    one, other = found.values()
    assert one == pytest.approx(other, abs=0.02), found


def test_pypylons_emulation_gives_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYLON_CAMEMU", "1")
    pylon = importlib.import_module("pypylon.pylon")
    camera = pylon.InstantCamera(pylon.TlFactory.GetInstance().CreateFirstDevice())
    camera.Open()
    camera.PixelFormat.Value = "Mono12"
    grabber = PylonCamera(camera, "Software")
    assert (grabber.bits, grabber.shape) == (12, (4096, 4096))
    assert grabber.configure(exposure_us=250.0, roi=(16, 32, 64, 48), binning=1, trigger=True) == 250.0
    for _ in range(5):
        grabber.pulse()
    frames, numbers = grabber.grab(5)
    assert (frames.shape, frames.dtype, numbers.tolist()) == ((5, 64, 48), np.uint16, [0, 1, 2, 3, 4])
    assert not len(grabber.grab(1)[0])  # no pulse
    grabber.pulse()
    assert grabber.grab(1)[1].tolist() == [5]
    grabber.configure(exposure_us=250.0, roi=(16, 32, 64, 48), binning=2, trigger=False)
    assert grabber.grab(4)[0].shape == (4, 32, 24)
    grabber.close()


def test_a_genicam_producer_gives_frames_and_lacks_an_exposure() -> None:
    harvesters = importlib.import_module("harvesters.core")
    genicam = importlib.import_module("genicam")
    with harvesters.Harvester() as harvester:
        harvester.add_file(str(Path(genicam.__file__).with_name("viky.cti")))
        harvester.update()
        acquirer = harvester.create(0)
        acquirer.remote_device.node_map.PixelFormat.value = "Mono8"
        grabber = HarvestersCamera(acquirer)
        assert (grabber.bits, grabber.shape) == (8, (400, 400))
        with pytest.raises(ValueError, match="no feature ExposureTime, and 250.0 is asked for"):
            grabber.configure(exposure_us=250.0, roi=(0, 0, 64, 48), binning=1, trigger=False)
        grabber._start()
        frames, numbers = grabber.grab(4)
        assert (frames.shape, frames.dtype, np.diff(numbers).tolist()) == ((4, 400, 400), np.uint8, [1, 1, 1])
        grabber._stop()
        grabber.close()


def test_micro_managers_demo_camera_gives_frames() -> None:
    core = importlib.import_module("pymmcore_plus").CMMCorePlus()
    adapters = importlib.import_module("mm_test_adapters")
    core.setDeviceAdapterSearchPaths([str(adapters.device_adapter_path())])
    core.loadDevice("Camera", "DemoCamera", "DCam")
    core.initializeDevice("Camera")
    core.setCameraDevice("Camera")
    core.setProperty("Camera", "PixelType", "16bit")
    core.setProperty("Camera", "BitDepth", "12")
    waits: list[bool] = []
    grabber = MicroManagerCamera(core, waits.append)
    assert (grabber.bits, grabber.shape) == (12, (512, 512))
    for binning in (1, 2):
        assert (
            grabber.configure(exposure_us=500.0, roi=(16, 32, 64, 48), binning=binning, trigger=True) == 500.0
        )
        frames, numbers = grabber.grab(5)
        assert (frames.shape, frames.dtype) == ((5, 64 // binning, 48 // binning), np.uint16)
        assert np.diff([*numbers, *grabber.grab(2)[1]]).tolist() == [1] * 6
    assert waits == [True, True]
    grabber.close()


CALLS = {
    "ALP4.ALP4": "__init__ Initialize SeqAlloc SeqPut SetTiming Run Halt FreeSeq Free",
    "pylablib.devices.DCAM.DCAMCamera": "get_detector_size set_trigger_mode set_roi set_exposure setup_acquisition "
    "start_acquisition clear_acquisition wait_for_frame read_multiple_images close",
}
"""What the adapters call."""


@pytest.mark.parametrize("name", CALLS)
def test_the_doubles_take_no_argument_that_the_libraries_lack(name: str) -> None:
    module, _, kind = name.rpartition(".")
    real = getattr(importlib.import_module(module), kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(OWN))
        for loaded in [key for key in sys.modules if key.split(".")[0] in ("ALP4", "pylablib")]:
            patch.delitem(sys.modules, loaded)
        double = getattr(importlib.import_module(module), kind)
    assert double is not real
    for call in CALLS[name].split():
        own = inspect.signature(getattr(real, call)).parameters
        wanted = inspect.signature(getattr(double, call)).parameters
        taken = [key for key, each in wanted.items() if each.kind is not each.VAR_KEYWORD]
        assert set(taken) <= set(own), call
