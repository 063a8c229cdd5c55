"""How small a change does the monitor find, and after how many checks? Faults of growing size in a healthy camera.

For each change the size comes from `Monitor.smallest_changes`, which promises to find it within so many checks with
probability 0.99; `found` tells in how many of the trials it was found by then.

`named` tells from which size on each fault of a real instrument is found: sizes fall until one is missed in a trial, on
instruments with noise of their own. `confusion` tells what the monitor calls each of them at some sizes, on instruments
with a medium, sensor and noise of their own; it resumes where it stopped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import typer

from benchmarks.results_file import load_results, save_results
from opusim.description.schema import load_description
from opusim.devices.base import NoisyDevice
from opusim.devices.camera import CameraDevice
from opusim.devices.registry import open_described, open_device
from opusim.errors import ConfigError, DeviceFault, NoiseBelowCertificate
from opusim.testing.faults import Fault, faulty_device

NAME = "monitor"
WINDOW = {"n_inputs": 10, "n_outputs": 256}
CHECKS = (1, 5, 20, 60)
_CHANGES = {
    "light lost": (Fault.LIGHT_CHANGED, lambda size: 1 - size),
    "correlation": (Fault.DECORRELATED, lambda size: size),
    "silent outputs": (Fault.DEAD_OUTPUTS, lambda size: size),
    "variance gained": (Fault.HOTTER, lambda size: math.sqrt(1 + size)),
    "variance lost": (Fault.NOISE_HALVED, lambda size: math.sqrt(1 - size)),
}

INSTRUMENT, STEP, WITHIN = "camera_low_light", 1000, 10
"""The step after which the medium has moved by the stated share of its time, and checks after a fault came."""
SIZES = tuple(digit * 10.0**power for power in (-1, -2, -3, -4) for digit in (5, 2, 1))


def same(size: float) -> float:
    """Return the size itself."""
    return size


NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "laser power": ("rms", {"light": {"power": {"law": "log_normal", "rms": same}}}),
    "ambient light": (
        "of the anchor's light",
        {"light": {"ambient_flux_per_s": lambda size: size * _anchor()}},
    ),
    "warmer sensor": (
        "more dark charge",
        {"dark": {"temperature_c": lambda size: 25.0 + 6.5 * math.log2(1 + size)}},
    ),
    "stuck mirrors": ("on, as many off", {"mirrors": {"stuck_on": same, "stuck_off": same}}),
    "mirrors stuck off": ("of all", {"mirrors": {"stuck_off": same}}),
    "hot pixels": ("of 30 times the dark current", {"pixels": {"hot_share": same, "hot_factor": 30.0}}),
    "dead pixels": ("of all", {"pixels": {"dead_share": same}}),
    "uneven dark current": ("rms", {"pixels": {"dcnu": same}}),
    "cross-talk": ("to each neighbour", {"pixels": {"crosstalk": same}}),
    "nonlinearity": ("at saturation", {"pixels": {"nonlinearity": same}}),
    "mirror contrast": ("of the light leaks", {"mirrors": {"contrast": lambda size: 1 / size}}),
    "vibration, pointing": ("pixels rms", {"vibration": {"pointing_rms_pixels": same}}),
    "dropped frames": ("of all", {"transfer": {"dropped": same}}),
    "repeated frames": ("of all", {"transfer": {"repeated": same}}),
    "moving medium": (
        "of its time",
        {"drift": {"decorrelation_s": lambda size: 1 / size, "seconds_per_step": 1.0 / STEP}},
    ),
}
"""What the size of a fault is, and the keys under [camera] that set it, with functions of the size."""
CONFUSED: dict[str, tuple[float, ...]] = {
    "laser power": (0.01, 0.05, 0.2),
    "vibration, pointing": (0.05, 0.2),
    "ambient light": (0.1, 0.5),
    "warmer sensor": (2.0, 9.0),
    "stuck mirrors": (0.05, 0.2),
    "mirrors stuck off": (0.1, 0.3),
    "mirror contrast": (0.001, 0.1, 0.5),
    "cross-talk": (0.01, 0.05, 0.2),
    "dropped frames": (0.01, 0.2),
    "repeated frames": (0.01, 0.2),
    "moving medium": (0.05, 0.5),
    "hot pixels": (0.02, 0.1, 0.2),
    "dead pixels": (0.03, 0.1),
    "uneven dark current": (0.1, 0.5),
    "nonlinearity": (0.02, 0.2),
}
"""Sizes at which names are counted: that of docs/devices.md, or the smallest one found, and larger ones."""
NARROW, WIDE = 32, 3000
"""Inputs: few, so that single mirrors are shown, but enough for each share to leave some stuck; and too many."""
WIDE_CONFUSED = {"stuck mirrors": (0.05,), "mirrors stuck off": (0.1, 0.3)}
"""Sizes at which names are counted in the wide window, too."""
CALLED = {
    "loses or repeats frames": "lost frames",
    "as the laser's power": "laser power",
    "as if the image moves": "moving image",
    "ambient light or": "ambient light or temperature",
    "contrast of its mirrors": "mirror contrast",
    "mirrors are stuck": "stuck mirrors",
    "anchor are stuck": "stuck mirrors",
    "mirrors stuck": "stuck mirrors",
    "cross-talk": "cross-talk",
    "silent or stuck": "silent outputs",
    "noisier than": "hot pixels",
    "decorrelated or was swapped": "another medium",
    "times the noise variance": "more noise",
    "its light changed": "light",
}
"""What a message calls the fault."""


def _anchor() -> float:
    camera = load_description(INSTRUMENT).camera
    assert camera is not None
    return camera.light.anchor_flux_per_s


def set_to(keys: dict[str, Any], size: float) -> dict[str, Any]:
    """Return keys of the camera for a size."""
    return {
        key: set_to(value, size) if isinstance(value, dict) else value(size) if callable(value) else value
        for key, value in keys.items()
    }


def monitored(camera: dict[str, Any], **options: Any) -> str:
    """Return what the monitor says within `WITHIN` checks after a fault came; nothing if it finds nothing.

    Args:
        camera: Keys under ``[camera]`` that set the fault.
        **options: Of `opusim.open_device`; the healthy and the faulty device get them.
    """

    def opened(**changes: Any) -> CameraDevice:
        watch = {"every_steps": 1, "false_alarm_per_run": 1e-6}
        device = open_device(INSTRUMENT, **{**WINDOW, **changes, **options}, monitor=watch)
        assert isinstance(device, CameraDevice)
        return device

    try:
        with opened() as device:
            baseline = device.monitor.baseline
        with opened(camera=camera) as device:
            if baseline is not None:
                device.compare_with(baseline)
            for step in range(STEP + 1, STEP + 1 + WITHIN):
                device.seek(step)
    except (DeviceFault, NoiseBelowCertificate) as error:
        return str(error).partition("' ")[2].partition(";")[0]
    return ""


def named(trials: int) -> list[dict[str, Any]]:
    """Return a row for each fault: the smallest size found in all trials.

    A size that the description does not admit counts as none.
    """
    rows = []
    for name, (unit, keys) in NAMED.items():
        smallest: float | None = None
        largest = 0.0
        for each in SIZES:
            try:
                found = [monitored(set_to(keys, each), seed=seed) for seed in range(1, trials + 1)]
            except ConfigError:
                continue
            largest = max(largest, each)
            if not all(found):
                break
            smallest = each
        sizes = {"smallest": smallest, "largest": largest}
        rows.append({"fault": name, "unit": unit, **sizes, "trials": trials})
        print(rows[-1], flush=True)
    return rows


def called(said: str) -> str:
    """Return what a message of the monitor calls the fault."""
    names = (name for words, name in CALLED.items() if words in said)
    return next(names, "something else") if said else "nothing"


def confusion(trials: int, known: list[dict[str, Any]], keep: Callable[[list[dict[str, Any]]], None]) -> None:
    """Count names for each fault and size that is not known yet, and keep all rows after each."""
    rows = [row for row in known if row["trials"] == trials]
    cells = [
        (inputs, name, each)
        for inputs, confused in ((NARROW, CONFUSED), (WIDE, WIDE_CONFUSED))
        for name, sizes in confused.items()
        for each in sizes
    ]
    for cell in cells:
        if any(cell == (row["inputs"], row["fault"], row["size"]) for row in rows):
            continue
        inputs, name, each = cell
        unit, keys = NAMED[name]
        found = Counter(
            called(monitored(set_to(keys, each), seed=seed, n_inputs=inputs, medium={"seed": seed}))
            for seed in range(1, trials + 1)
        )
        said = {"called": dict(found), "trials": trials}
        rows.append({"inputs": inputs, "fault": name, "size": each, "unit": unit, **said})
        print(rows[-1], flush=True)
        rows.sort(key=lambda row: cells.index((row["inputs"], row["fault"], row["size"])))
        keep(rows)


def broken(fault: Fault, amount: float, seed: int) -> NoisyDevice:
    """An open device that breaks at step 1 and is checked at every step."""
    description = load_description(INSTRUMENT, {"monitor": {"every_steps": 1}})
    options = {"kind": description.kind, "fault": fault.value, "at_step": 1, "amount": amount}
    changed = description.model_copy(update={"kind": "faulty", "options": options})
    return faulty_device(changed, seed=seed, **WINDOW).open()


def is_found(device: NoisyDevice, most: int) -> bool:
    """Return whether the monitor stops the device within `most` checks after the change."""
    with device:
        device.seek(0)
        try:
            for check in range(1, most + 1):
                device.seek(check)
        except (DeviceFault, NoiseBelowCertificate):
            return True
    return False


def changes(trials: int) -> list[dict[str, Any]]:
    """Return a row for each change and number of checks."""
    rows = []
    with open_described(load_description(INSTRUMENT, {"monitor": {}}), **WINDOW) as device:
        promised = {checks: device.smallest_changes(checks) for checks in CHECKS}
    for (change, (fault, amount_of)), checks in product(_CHANGES.items(), CHECKS):
        least = promised[checks][change]
        if math.isnan(least):
            continue
        found = [is_found(broken(fault, amount_of(least), seed), checks) for seed in range(trials)]
        row = {"device": INSTRUMENT, "change": change, "checks": checks, "smallest": round(least, 4)}
        rows.append(row | {"found": sum(found), "trials": trials})
        print(rows[-1], flush=True)
    return rows


def size(value: float, unit: str) -> str:
    """Return a fault's size as text."""
    return f"{value:g} {unit}" if unit.startswith("pixels") else f"{100 * value:g} % {unit}"


def main(trials: int = 20, parts: str = "changes named confusion") -> None:
    """Measure some parts and save each."""
    torch.set_num_threads(1)
    results = load_results(NAME)
    found = {key: results.get(key, []) for key in ("changes", "named", "confusion")}

    def keep(part: str, rows: list[dict[str, Any]]) -> None:
        found[part] = rows
        save_results(NAME, {"window": WINDOW, **found})

    for part in parts.split():
        if part == "confusion":
            confusion(trials, found[part], partial(keep, part))
        else:
            keep(part, {"changes": changes, "named": named}[part](trials))


if __name__ == "__main__":
    typer.run(main)
