"""A device that breaks during training: the run stops with the reason, keeps what it did, and goes on."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.devices.faults import EVERY_STEPS, description_file, inject, train, undisturbed
from opusim.devices.kinds import register_device
from opusim.testing.faults import KIND, Fault, FaultyDevice, faulty_device
from opusim.training.reports.run_report import write_report

NOTICED_AT_ONCE = (Fault.UNPLUGGED, Fault.TIMEOUT, Fault.BUSY, Fault.WRONG_SHAPE, Fault.NOT_A_NUMBER)
SMALL = (Fault.LIGHT_CHANGED, Fault.DEAD_OUTPUTS, Fault.HOT_OUTPUTS, Fault.DECORRELATED)
"""Changes that may take up to four checks in a window of 64 outputs."""


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    register_device(KIND, faulty_device)
    yield
    FaultyDevice.repaired = False


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return undisturbed(tmp_path_factory.mktemp("wanted"))


@pytest.mark.parametrize("fault", list(Fault))
def test_every_fault_is_named_and_survived(fault: Fault, tmp_path: Path, wanted: dict[str, Any]) -> None:
    row = inject(fault, tmp_path, wanted)
    kinds = "DeviceUnavailable DeviceTimeout DeviceBusy DeviceFault NoiseBelowCertificate"
    assert row["error"] in kinds.split()
    checks = 0 if fault in NOTICED_AT_ONCE else 4 if fault in SMALL else 1
    assert 0 <= row["steps_until_stop"] <= checks * EVERY_STEPS
    assert row["steps_done"] == 63
    if fault in NOTICED_AT_ONCE:
        assert row["as_undisturbed"]


def test_a_fault_that_passes_leaves_no_trace(tmp_path: Path, wanted: dict[str, Any]) -> None:
    row = inject(Fault.UNPLUGGED, tmp_path, wanted, lasts_calls=2)
    assert row["error"] == "none: survived by reconnecting"
    assert row["as_undisturbed"]


def test_a_monitored_run_keeps_its_first_look_and_reports(tmp_path: Path) -> None:
    run = train(tmp_path / "run", description_file(tmp_path, None))
    assert run.folder.baseline_file.exists()
    assert write_report(run).exists()


def test_missing_hardware_is_named_without_loading_torch(tmp_path: Path) -> None:
    code = """
import sys
sys.argv = ["opusim", "train", "pdfa", "--device", "lighton_appliance"]
from opusim.training.cli import main
try:
    main()
except SystemExit as stop:
    print(stop.code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "3 False\n"
    assert "needs" in done.stderr
    assert len(done.stderr.splitlines()) == 1
