"""LightOn's OPU through lightonml: its own simulated device for real, and every failure by its name."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opusim import NoisyDevice, open_device
from opusim.devices.lighton import translated
from opusim.errors import (
    CapabilityMissing,
    ConfigError,
    DeviceBusy,
    DeviceFault,
    DeviceTimeout,
    DeviceUnavailable,
    NoiseUnknown,
)
from opusim.testing.contract import DeviceContract
from tests.opusim.common import refuses, spent_by
from tests.support.appliance import DOUBLE, connect

pytest.importorskip("lightonml")

ROOT = Path(__file__).parents[3]

X = torch.randint(-1, 2, (4, 12), generator=torch.Generator().manual_seed(2))


def simulated(**options: Any) -> Any:
    return open_device("lightonml_simulated", n_inputs=12, n_outputs=40, **options)


def test_one_fitted_object_serves_all_and_reads_the_product_without_noise() -> None:
    with simulated(noise={"sigma": 0.0}) as device:
        torch.testing.assert_close(device.project(X), X.float() @ device.matrix().T, rtol=1e-5, atol=1e-5)
    with simulated() as device:
        first = device._opu, device._opu._runner
        device.project(X)
        device.project(X[:1])
        assert (device._opu, device._opu._runner) == first


def test_its_matrix_is_lightonml_s_own_of_our_seed_with_unit_entries() -> None:
    with simulated(medium={"seed": 5 + 2**32}) as device:
        matrix = device.matrix().numpy()
    std = 1 / np.sqrt(12)
    drawn = np.random.RandomState([5, 1]).normal(loc=0.0, scale=std, size=(12, 40))
    expected = drawn.astype(np.float32).T * np.sqrt(12)
    np.testing.assert_allclose(matrix, expected, rtol=1e-6)
    with simulated(medium={"seed": 6}) as other:
        assert not np.array_equal(other.matrix().numpy(), matrix)


def test_hardware_without_its_driver_is_one_clear_line_and_states_no_law() -> None:
    refuses(DeviceUnavailable, "needs LightOn's driver lightonopu.*take", open_device, "lighton_appliance")
    from opusim.description.schema import load_description
    from opusim.devices.lighton import LightonDevice

    device = LightonDevice(load_description("lighton_appliance"), n_inputs=12, n_outputs=40)
    refuses(NoiseUnknown, "measure it by `opusim device calibrate`", lambda: device.noise)
    refuses(CapabilityMissing, "lacks the capability 'matrix'", device.matrix)


class OpuAlreadyUsedException(Exception):  # lightonml's name
    pass


class ProcessRunningException(BaseException):  # lightonml's name, and its base
    pass


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (ModuleNotFoundError("No module named 'lightonopu'"), DeviceUnavailable, "needs LightOn's driver"),
        (OpuAlreadyUsedException("pid 7"), DeviceBusy, "used by another program"),
        (ProcessRunningException("pid 7"), DeviceBusy, "used by another program"),
        (TimeoutError("late"), DeviceTimeout, "did not answer in time"),
        (ConnectionError("reset"), DeviceUnavailable, "cannot be reached"),
        (RuntimeError("No configuration files for the OPU"), DeviceUnavailable, "no OPU is configured"),
        (AssertionError("Call fit1d before"), DeviceFault, "reports: Call fit1d before"),
        (AssertionError(), DeviceFault, "reports: AssertionError"),
        (IndexError("n_components is beyond maximum (9)"), ConfigError, "open a smaller window"),
        (ValueError("number of features (3) can't be greater than 2"), ConfigError, "open a smaller window"),
        (ValueError("non-binary"), DeviceFault, "its driver failed .ValueError: non-binary"),
        (KeyError("ones_range"), DeviceFault, "KeyError: 'ones_range'.; check .*lighton.config_file"),
        (AttributeError("no attribute 'x'"), DeviceFault, "AttributeError.* check that lightonopu belongs"),
    ],
)
def test_every_failure_becomes_one_of_ours(raised: BaseException, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words), translated("opu"):
        raise raised


def test_ctrl_c_passes() -> None:
    with pytest.raises(KeyboardInterrupt), translated("opu"):
        raise KeyboardInterrupt


BROKEN = {None: "cannot be read", "{": "is not JSON", "[]": "must be a JSON table"}


@pytest.mark.parametrize(("content", "words"), BROKEN.items())
def test_a_broken_configuration_of_the_appliance_is_named(tmp_path: Path, content: Any, words: str) -> None:
    file = tmp_path / "opu.json"
    if content is not None:
        file.write_text(content)
    refuses(
        DeviceUnavailable, f"lighton.config_file = '{file}' {words}", appliance, {"config_file": str(file)}
    )


def appliance(section: dict[str, Any], *, n_inputs: int = 10, n_outputs: int = 64, **options: Any) -> Any:
    return open_device(
        "lighton_appliance", n_inputs=n_inputs, n_outputs=n_outputs, lighton=section, **options
    )


def test_scale_brings_entries_to_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section, powers = connect(monkeypatch, tmp_path), list[float]()
    for scale in (1.0, 2.0):
        with appliance({**section, "scale": scale}, n_outputs=400) as device:
            assert device.stated_noise is None
            taken = np.asarray(device.project(np.eye(10).repeat(64, axis=0))).reshape(10, 64, -1)
            powers.append(float(np.mean(taken.mean(axis=1) ** 2) - taken.var(axis=1, ddof=1).mean() / 64))
    assert abs(powers[0] - 1) < 5 * np.sqrt(2 / 400)  # the entries of an output share its anchor
    assert powers[1] / powers[0] == pytest.approx(4, rel=0.02)


class TestAppliance(DeviceContract):  # it states no law, and is reached by the published calls
    replayable = False

    @pytest.fixture(autouse=True)
    def _connected(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.section = connect(monkeypatch, tmp_path)

    def open_window(self, **options: Any) -> NoisyDevice:
        return appliance(self.section, n_inputs=12, n_outputs=40, **options)


def test_4096_vectors_do_not_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their frames pass in 0.8 s, at ten times the appliance's speed, and a call may take 0.6 s."""
    section = connect(monkeypatch, tmp_path, speed=10)
    access = {"timeout_s": 0.6, "attempts": 1}
    calls = list[int]()
    with appliance(section, access=access) as device:
        real = device._opu.linear_transform
        device._opu.linear_transform = lambda x: calls.append(len(x)) or real(x)
        x = torch.randint(-1, 2, (4096, 10), generator=torch.Generator().manual_seed(4))
        begun = time.monotonic()
        assert device.project(x).shape == (4096, 64)
        assert time.monotonic() - begun > 0.8
    assert sum(calls) == 2 * 4096
    assert len(calls) > 2


def test_the_driver_is_told_the_time_of_a_frame_and_may_lack_a_call(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    section = connect(monkeypatch, tmp_path)
    with appliance(section, frames={"frame_period_us": 900.0}) as device:
        assert device._opu.device.frametime_us == 900
        used = spent_by(device, device.project, torch.ones(5, 10))
        assert used.seconds == pytest.approx(used.frames * 900e-6)
    assert not caplog.records
    with appliance({**section, "exposure_us": 2000}, frames={"frame_period_us": 900.0}) as device:
        assert device._opu.device.frametime_us == 2050
        used = spent_by(device, device.project, torch.ones(5, 10))
        assert used.seconds == pytest.approx(used.frames * 2050e-6)
    assert "frames.frame_period_us = 900 is shorter than the 2050 us" in caplog.text
    section = connect(monkeypatch, tmp_path)
    with appliance(section) as device:
        from lightonopu.internal.device import OpuDevice

        monkeypatch.delattr(OpuDevice, "transform2")
        refuses(DeviceFault, "AttributeError: .*transform2", device.project, torch.ones(1, 10))
    assert OpuDevice.opened == 0
    refuses(ConfigError, "open a smaller window", appliance, section, n_inputs=2000)
    assert OpuDevice.opened == 0


def test_a_killed_process_leaves_the_appliance_to_the_next_one(tmp_path: Path, monkeypatch: Any) -> None:
    section = connect(monkeypatch, tmp_path)
    code = f"""
import os, signal, torch
from opusim import open_device
device = open_device("lighton_appliance", n_inputs=10, n_outputs=64, lighton={section!r})
device.project(torch.ones(3, 10))
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(DOUBLE), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert done.stdout.strip() in {file.read_text() for file in tmp_path.glob("*.pid")}
    with appliance(section) as device:
        assert device.project(torch.ones(3, 10)).shape == (3, 64)
        with pytest.raises(DeviceBusy):
            appliance(section)


def printed_without(hidden: tuple[str, ...], code: str) -> str:
    """What code prints in a process in which these libraries are hidden."""
    hide = f"""
import importlib.abc, importlib.util, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
"""
    done = subprocess.run([sys.executable, "-c", hide + code], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.slow
def test_a_missing_library_is_named_each_time() -> None:
    """The stand-in for pkg_resources that the first try leaves behind does not trip the second one."""
    code = """
real = importlib.util._find_spec
importlib.util._find_spec = lambda name, path: None if name == "pkg_resources" else real(name, path)
from opusim.devices.lighton import import_lightonml
from opusim.errors import DeviceUnavailable
for attempt in range(2):
    try:
        import_lightonml()
    except DeviceUnavailable as error:
        print("install" in str(error))
"""
    assert printed_without(("pkg_resources", "lightonml"), code) == "True\nTrue\n"


@pytest.mark.slow
def test_it_imports_without_pkg_resources() -> None:
    code = """
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "pkg_resources" else real(name, *rest)
from opusim import open_device
import torch
with open_device("lightonml_simulated", n_inputs=3, n_outputs=4) as device:
    print(tuple(device.project(torch.ones(2, 3)).shape))
"""
    assert printed_without(("pkg_resources",), code) == "(2, 4)\n"
