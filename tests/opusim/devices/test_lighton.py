"""LightOn's OPU through lightonml: its own simulated device for real, and every failure by its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opusim.devices.lighton import translated
from opusim.devices.registry import open_device
from opusim.errors import (
    CapabilityMissing,
    ConfigError,
    DeviceBusy,
    DeviceFault,
    DeviceTimeout,
    DeviceUnavailable,
    NoiseUnknown,
)

pytest.importorskip("lightonml")

X = torch.randint(-1, 2, (4, 12), generator=torch.Generator().manual_seed(2))


def simulated(**options: Any) -> Any:
    return open_device("lightonml_simulated", n_inputs=12, n_outputs=40, **options)


def test_without_noise_it_is_the_product_with_its_matrix() -> None:
    with simulated(noise={"sigma": 0.0}) as device:
        torch.testing.assert_close(device.project(X), X.float() @ device.matrix().T, rtol=1e-5, atol=1e-5)


def test_its_matrix_is_lightonml_s_own_of_our_seed_with_unit_entries() -> None:
    with simulated(medium={"seed": 5 + 2**32}) as device:
        matrix = device.matrix().numpy()
    std = 1 / np.sqrt(12)
    expected = np.random.RandomState([5, 1]).normal(loc=0.0, scale=std, size=(12, 40)).astype(
        np.float32
    ).T * np.sqrt(12)
    np.testing.assert_allclose(matrix, expected, rtol=1e-6)
    with simulated(medium={"seed": 6}) as other:
        assert not np.array_equal(other.matrix().numpy(), matrix)


def test_minus_one_is_not_255() -> None:
    with simulated(noise={"sigma": 0.0}) as device:
        x = torch.zeros(1, 12)
        x[0, 3] = -1
        torch.testing.assert_close(device.project(x)[0], -device.matrix()[:, 3], rtol=1e-5, atol=1e-6)


def test_it_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with simulated() as device:
        device.project(X)
    assert capfd.readouterr() == ("", "")


def test_one_fitted_object_serves_all_readings() -> None:
    with simulated() as device:
        first = device._opu, device._opu._runner
        device.project(X)
        device.project(X[:1])
        assert (device._opu, device._opu._runner) == first


def test_it_imports_without_pkg_resources() -> None:
    code = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pkg_resources":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "pkg_resources" else real(name, *rest)
from opusim import open_device
import torch
with open_device("lightonml_simulated", n_inputs=3, n_outputs=4) as device:
    print(tuple(device.project(torch.ones(2, 3)).shape))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(2, 4)\n"


def test_a_missing_library_is_named_each_time() -> None:
    """The stand-in for pkg_resources that the first try leaves behind does not trip the second one."""
    code = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pkg_resources", "lightonml"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
import importlib.util
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\nTrue\n"


def test_hardware_without_its_driver_is_one_clear_line() -> None:
    with pytest.raises(
        DeviceUnavailable, match="needs LightOn's driver lightonopu.*take the device lightonml_simulated"
    ):
        open_device("lighton_appliance", n_inputs=12, n_outputs=40)


def test_hardware_states_no_law_that_nobody_measured() -> None:
    from opusim.description.schema import load_description
    from opusim.devices.lighton import LightonDevice

    device = LightonDevice(load_description("lighton_appliance"), n_inputs=12, n_outputs=40)
    with pytest.raises(
        NoiseUnknown, match="measure it by `opusim device calibrate`, or assume a noise.sigma"
    ):
        _ = device.noise
    with pytest.raises(CapabilityMissing, match="lacks the capability 'matrix'"):
        device.matrix()


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
        (
            AttributeError("no attribute 'x'"),
            DeviceFault,
            "AttributeError.* check that lightonopu belongs to",
        ),
    ],
)
def test_every_failure_becomes_one_of_ours(raised: BaseException, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words), translated("opu"):
        raise raised


def test_ctrl_c_passes() -> None:
    with pytest.raises(KeyboardInterrupt), translated("opu"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), ("{", "is not JSON"), ("[]", "must be a JSON table")],
)
def test_a_broken_configuration_of_the_appliance_is_named(
    tmp_path: Path, content: str | None, words: str
) -> None:
    file = tmp_path / "opu.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DeviceUnavailable, match=f"lighton.config_file = '{file}' {words}"):
        open_device("lighton_appliance", n_inputs=12, n_outputs=40, lighton={"config_file": str(file)})
