"""Adapters of libraries, against the libraries' own simulators or, for ALP4lib and pylablib, their own signatures.

They run in an environment of their own (`make adapters`).
"""

import importlib
import inspect
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from opusim import NoisyDevice, load_description, open_device
from opusim.devices.bench import HarvestersCamera, MicroManagerCamera, PylonCamera, ophyd_detector
from opusim.errors import DeviceFault
from tests.opusim.common import refuses
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
    pair.record("frames.npz")
    arguments = ("camera_low_light", "--recorded", "frames.npz", "--out", "calibrated")
    calibrated = opusim("device", "calibrate", *arguments, cwd=Path.cwd())
    assert calibrated.returncode == 0, calibrated.stderr
    found = load_description("calibrated/camera_low_light_measured.toml").camera
    for key, error in (("gain_dn_per_e", 0.0028), ("read_noise_e", 0.0073)):  # standard errors of the table
        assert getattr(found.sensor, key) == pytest.approx(getattr(SENSOR.sensor, key), abs=5 * error)


def test_a_network_trains_through_slmsuites_pair(pair: ModuleType) -> None:
    """`benchmarks.devices.own_bench --slmsuite` compares 15 epochs with the camera twin."""
    settings = "train pdfa --data digits --epochs 1 --set model.hidden=[16] --out run --device"
    run = opusim(*settings.split(), OWN / "slmsuite_bench.toml", cwd=Path.cwd())
    assert run.returncode == 0, run.stderr
    assert json.loads(Path("run", "summary.json").read_text())["test_accuracy"] > 0.1


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
        settings = {"exposure_us": 500.0, "roi": (16, 32, 64, 48), "trigger": True}
        assert grabber.configure(binning=binning, **settings) == 500.0
        frames, numbers = grabber.grab(5)
        assert (frames.shape, frames.dtype) == ((5, 64 // binning, 48 // binning), np.uint16)
        assert np.diff([*numbers, *grabber.grab(2)[1]]).tolist() == [1] * 6
    assert waits == [True, True]
    grabber.close()


def documents_of(detector: Any, plan: Any) -> dict[str, list[dict[str, Any]]]:
    """What a plan of Bluesky tells of a device of opusim, by the name of the document."""
    found: dict[str, list[dict[str, Any]]] = {}
    engine = importlib.import_module("bluesky").RunEngine()
    engine.subscribe(lambda name, document: found.setdefault(name, []).append(document))
    with importlib.import_module("ophyd_async.core").init_devices():
        opu = detector()
    engine(plan(opu))
    return found


def test_plans_of_bluesky_scan_the_temperature_of_a_device() -> None:
    plans = importlib.import_module("bluesky.plans")
    temperatures_c, opened = [0.0, 25.0, 60.0], []

    def read(device: NoisyDevice) -> torch.Tensor:
        opened.append(device)
        return device.project(torch.zeros(200, 10))

    def detector() -> Any:
        scanned = {"temperature_c": 25.0}
        return ophyd_detector("camera_low_light", read, scanned=scanned, n_inputs=10, n_outputs=64)

    def plan(opu: Any) -> Any:
        return plans.list_scan([opu], opu.temperature_c, temperatures_c)

    told = documents_of(detector, plan)
    data = [event["data"] for event in told["event"]]
    assert [each["opu-temperature_c"] for each in data] == temperatures_c
    (descriptor,) = told["descriptor"]
    assert descriptor["data_keys"]["opu-readings"]["shape"] == [200, 64]
    assert descriptor["data_keys"]["opu-temperature_c"]["units"] == "°C"
    assert descriptor["hints"]["opu"]["fields"] == ["opu-std"]
    variances = []
    for temperature_c, each in zip(temperatures_c, data, strict=True):
        with open_device(
            "camera_low_light", n_inputs=10, n_outputs=64, temperature_c=temperature_c
        ) as device:
            variances.append(float(device.reading_variance(torch.zeros(1, 10)).mean()))
        squares = np.square(np.asarray(each["opu-readings"], dtype=float))
        assert abs(squares.mean() - variances[-1]) < 5 * squares.std() / squares.size**0.5
        assert each["opu-std"] == pytest.approx(squares.mean() ** 0.5, rel=0.02)
    assert variances[2] > 1.5 * variances[1] > 1.5 * variances[0]
    assert len(set(map(id, opened))) == 3
    assert not any(device.is_open for device in opened)


def test_plans_of_bluesky_count_readings_and_close_a_device_that_fails() -> None:
    plans = importlib.import_module("bluesky.plans")
    opened: list[NoisyDevice] = []

    def read(device: NoisyDevice) -> torch.Tensor:
        opened.append(device)
        if len(opened) == 4:
            raise DeviceFault("the laser is off")
        return device.draw((2, device.n_outputs))

    def detector() -> Any:
        return ophyd_detector("gaussian", read, n_inputs=4, n_outputs=6)

    told = documents_of(detector, lambda opu: plans.count([opu], 3))
    taken = [np.asarray(event["data"]["opu-readings"]) for event in told["event"]]
    assert len(taken) == 3
    assert not np.array_equal(taken[0], taken[1])
    assert len(set(map(id, opened))) == 1
    refuses(Exception, "the laser is off", documents_of, detector, lambda opu: plans.count([opu]))
    assert not any(device.is_open for device in opened)
    told, scanned = "'camera.name' ends in a name that is taken, 'name'", {"camera.name": 1.0}
    refuses(ValueError, told, ophyd_detector, "camera", read, scanned=scanned)


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
