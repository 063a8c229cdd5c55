"""How small a change does the monitor find, and after how many checks? Faults of growing size in healthy devices.

For each device and each change the size comes from `Monitor.smallest_changes`, which promises to find it within so many
checks with probability 0.99; `found` tells in how many of the trials it was found by then. Healthy devices are watched
for as many checks as the table says, at the default probability of a false alarm.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import typer

from benchmarks.markdown import markdown
from benchmarks.results_file import load_results, save_results
from opusim.description.loading import load_description
from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_described
from opusim.errors import DeviceFault, NoiseBelowCertificate
from opusim.tables import print_table
from opusim.testing.faults import Fault, faulty_device

NAME = "monitor"
WINDOW = {"n_inputs": 10, "n_outputs": 256}
CHECKS = (1, 5, 20, 60)
DEVICES: dict[str, dict[str, Any]] = {
    "gaussian": {"noise": {"sigma": 0.5}},
    "camera": {},
    "camera_low_light": {},
}
_CHANGES = {
    "light lost": (Fault.LIGHT_CHANGED, lambda size: 1 - size),
    "correlation": (Fault.DECORRELATED, lambda size: size),
    "silent outputs": (Fault.DEAD_OUTPUTS, lambda size: size),
    "variance gained": (Fault.HOTTER, lambda size: math.sqrt(1 + size)),
    "variance lost": (Fault.NOISE_HALVED, lambda size: math.sqrt(1 - size)),
}


def broken(name: str, overrides: dict[str, Any], fault: Fault, amount: float, seed: int) -> NoisyDevice:
    """An open device that breaks at step 1 and is checked at every step."""
    description = load_description(name, {**overrides, "monitor": {"every_steps": 1}})
    options = {"kind": description.kind, "fault": fault.value, "at_step": 1, "amount": amount}
    changed = description.model_copy(update={"kind": "faulty", "options": options})
    return faulty_device(changed, seed=seed, **WINDOW).open()


def checks_until_found(device: NoisyDevice, most: int) -> int | None:
    """How many checks after the change the monitor stops the device, or None if it takes more than `most`."""
    with device:
        device.seek(0)
        for check in range(1, most + 1):
            try:
                device.seek(check)
            except (DeviceFault, NoiseBelowCertificate):
                return check
    return None


def changes(trials: int) -> list[dict[str, Any]]:
    """Return a row for each device, change and number of checks."""
    rows = []
    for name, overrides in DEVICES.items():
        with open_described(load_description(name, {**overrides, "monitor": {}}), **WINDOW) as device:
            promised = {checks: device.smallest_changes(checks) for checks in CHECKS}
        for change, (fault, amount_of) in _CHANGES.items():
            for checks in CHECKS:
                size = promised[checks][change]
                if math.isnan(size):
                    continue
                found = [
                    checks_until_found(broken(name, overrides, fault, amount_of(size), seed), checks)
                    for seed in range(trials)
                ]
                rows.append(
                    {
                        "device": name,
                        "change": change,
                        "checks": checks,
                        "smallest": round(size, 4),
                        "found": sum(each is not None for each in found),
                        "trials": trials,
                    }
                )
                print(rows[-1], flush=True)
    return rows


def healthy(checks: int) -> list[dict[str, Any]]:
    """False alarms of undisturbed devices."""
    rows = []
    for name, overrides in DEVICES.items():
        device = broken(name, overrides, Fault.LIGHT_CHANGED, 1.0, seed=1)
        rows.append({"device": name, "checks": checks, "stopped at": checks_until_found(device, checks)})
        print(rows[-1], flush=True)
    return rows


def docs_table() -> str:
    """Return the table of docs/devices.md: the smallest change that each number of checks finds."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for row in load_results(NAME).get("changes", []):
        size = (
            f"{row['smallest']:.3f}" if row["change"] == "correlation" else f"{100 * row['smallest']:.1f} %"
        )
        cell = f"{size} ({row['found']} of {row['trials']})"
        found.setdefault((row["device"], row["change"]), {})[row["checks"]] = cell
    checks = sorted({number for cells in found.values() for number in cells})
    rows = [(*key, *(cells.get(number, "–") for number in checks)) for key, cells in found.items()]
    header = ("device", "change", *(f"in {number} check{'s' * (number > 1)}" for number in checks))
    return markdown(header, rows)


def main(trials: int = 20, healthy_checks: int = 10_000, save: bool = False) -> None:
    """Measure; --save renews benchmarks/results/monitor.json."""
    torch.set_num_threads(1)
    rows, undisturbed = changes(trials), healthy(healthy_checks)
    print_table("Smallest changes", list(rows[0]), [list(map(str, row.values())) for row in rows])
    if save:
        save_results(NAME, {"window": WINDOW, "changes": rows, "healthy": undisturbed})


if __name__ == "__main__":
    typer.run(main)
