"""The script that serves LightOn's OPU without opusim, beside the double of the driver, to a client of opusim."""

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from opusim import open_device
from opusim.devices.baseline import reference_vectors
from opusim.errors import CapabilityMissing, DeviceBusy, DeviceUnavailable, NoiseUnknown
from opusim.serving.instrument import same_medium
from tests.opusim.common import refuses
from tests.support.appliance import CONFIG_FILE, DOUBLE
from tests.support.command import ROOT
from tests.support.served import Laboratory, new_laboratory

pytest.importorskip("zmq")
pytest.importorskip("lightonml")

SCRIPT = ROOT / "examples" / "serving" / "lighton_server.py"
PYTHON = os.environ.get("OPUSIM_OLD_PYTHON", sys.executable)
"""Python 3.6 to 3.9 with lightonml and pyzmq, if one is at hand."""
N_INPUTS, N_OUTPUTS = 20, 64


@contextmanager
def served(lab: Laboratory, bind: str = "tcp://127.0.0.1:*") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yields the address and the process."""
    command = [PYTHON, str(SCRIPT), "--bind", bind, "--keys", str(lab.keys), "--config-file", CONFIG_FILE]
    window = ["--inputs", str(N_INPUTS), "--outputs", str(N_OUTPUTS)]
    settings = {**os.environ, "PYTHONPATH": str(DOUBLE), "LIGHTONOPU_DOUBLE_FOLDER": str(lab.folder)}

    def take_interrupts() -> None:  # a program in the background ignores them, and so do its children
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    options = {"stdout": subprocess.PIPE, "text": True, "env": settings, "preexec_fn": take_interrupts}
    with subprocess.Popen([*command, *window], **options) as process:
        try:
            lines = iter(process.stdout.readline, "")
            line = next(line for line in lines if line.startswith("serving on "))
            yield line.split()[-1].replace("tcp://", "remote://"), process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return new_laboratory(tmp_path_factory.mktemp("laboratory"), "alice", "bob")


def test_it_speaks_the_python_of_the_driver() -> None:
    text = SCRIPT.read_text()
    tree = ast.parse(text, feature_version=(3, 6))
    taken = {each.module for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
    taken |= {name.name for each in ast.walk(tree) if isinstance(each, ast.Import) for name in each.names}
    assert not [name for name in taken if name and name.startswith("opusim")]
    assert "__future__" not in taken  # its annotations are of Python 3.7


def test_a_client_reads_the_appliance_through_it(lab: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.become("alice", monkeypatch)
    with served(lab) as (address, _):
        with open_device(address, n_inputs=N_INPUTS, n_outputs=N_OUTPUTS) as device:
            x = reference_vectors(40, N_INPUTS)
            y = device.project(x.repeat(20, 1)).reshape(20, 40, -1)
            signal_std, noise = y.mean(0).std(), y.std(0).mean()
            # entries of B have variance 1, up to the double's calibration
            assert 0.5 < signal_std / x.square().sum(1).mean().sqrt() < 2
            assert noise < signal_std
            assert device.usage.frames == 4 * 800
            assert device.intensities((x > 0).float()).max() > 3
            drawn = device.draw((3, N_OUTPUTS))
            assert drawn.shape == (3, N_OUTPUTS)
            assert drawn.std() < signal_std
            refuses(NoiseUnknown, "calibrate it", lambda: device.noise)
            with pytest.raises(CapabilityMissing):
                device.require("matrix")
            fingerprint = device.description.options["fingerprint"]
            lab.become("bob", monkeypatch)
            refuses(DeviceBusy, "alice has the device to", open_device, address, n_inputs=2, n_outputs=3)
        with open_device(f"{address}?wait_s=5&outputs_from=8", n_inputs=4, n_outputs=6) as device:
            assert device.project(torch.eye(4)).shape == (4, 6)
            assert same_medium(str(device.description.options["fingerprint"]), str(fingerprint))


def test_a_run_survives_a_server_killed_between_two_calls(lab: Laboratory, monkeypatch: Any) -> None:
    lab.become("alice", monkeypatch)
    with served(lab) as (address, process):
        device = open_device(address, n_inputs=N_INPUTS, n_outputs=N_OUTPUTS)
        before = device.project(torch.eye(N_INPUTS).repeat(30, 1)).reshape(30, N_INPUTS, -1).mean(0)
        process.kill()
        process.wait()
    with served(lab, address.replace("remote://", "tcp://")):
        after = device.project(torch.eye(N_INPUTS).repeat(30, 1)).reshape(30, N_INPUTS, -1).mean(0)
    assert torch.corrcoef(torch.stack([before.flatten(), after.flatten()]))[0, 1] > 0.9
    device.close()


def test_a_stranger_is_not_let_in(lab: Laboratory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.add_user("eve", known=False)
    lab.become("eve", monkeypatch)
    with served(lab) as (address, _):
        window = {"n_inputs": 2, "n_outputs": 3}
        refuses(DeviceUnavailable, "the key of 'eve'", open_device, f"{address}?silence_s=3", **window)
