"""Do certificates hold under the faults of a real instrument?

Each fault is laid over the description of a camera at one plausible size. `coverage` calibrates 400 simulated
instruments for each (128 outputs, 64 frames of a level, 200 readings, beta = 0.05; another medium, sensor and noise
each), and counts refusals, and certificates whose limits do not contain the described law: rates at least, light at
most, spread of the power, dark charge of the mean and of groups. It resumes where it stopped; an argument
selects the effects whose name contains it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from benchmarks.markdown import markdown
from benchmarks.results_file import load_results, save_results
from opusim.calibration.calibrate import Calibration, calibrate
from opusim.calibration.photon_transfer import Plan
from opusim.description.schema import load_description
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import Certificate, FluctuatingCountLaw, PhotonCountLaw
from opusim.devices.registry import open_device
from opusim.errors import DeviceFault, NoiseBelowCertificate
from opusim.noise import FluctuatingCountNoise, NoiseModel, PhotonCountNoise

DEVICE, OUTPUTS, BETA, INSTRUMENTS = "camera_low_light", 128, 0.05, 400
_AT_ONCE, _GROUP, READINGS = 20, 12, 200
CHECKS = 10
"""Of the monitor, after an effect came."""
_MONITOR = {"every_steps": 1, "false_alarm_per_run": 1e-6}


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A fault at a plausible size.

    Attributes:
        name: what it is.
        size: how much of it, in words.
        camera: the keys under ``[camera]`` that switch it on.
        step: training step at which the device is read, for effects that grow with time.
        frames: the keys under ``[frames]``, likewise.
    """

    name: str
    size: str
    camera: Mapping[str, Any]
    step: int = 0
    frames: Mapping[str, Any] = field(default_factory=dict)

    @property
    def changes(self) -> dict[str, Any]:
        """The description's sections with the keys that switch it on."""
        return {"camera": self.camera, "frames": self.frames}


SLIGHT = Effect(name="slightly uneven dark current", size="2 % rms", camera={"pixels": {"dcnu": 0.02}})
"""An effect that is certified, so that its limits are tested; the table's is refused."""
_SCHEMA = Certificate.model_fields["schema_version"].default
"""Counts of certificates of another schema are no counts of these."""


def effects() -> tuple[Effect, ...]:
    """Return the effects of `DEVICE`, the sound camera first."""
    camera = load_description(DEVICE).camera
    if camera is None:
        raise TypeError("no camera")
    power = {"law": "log_normal", "rms": 0.01}
    slow = power | {"rms": 0.002, "drift_rms": 0.01, "drift_s": 3600.0, "seconds_per_step": 1.0}
    drift = {"decorrelation_s": 1000.0, "seconds_per_step": 1.0}
    ambient = 0.1 * camera.light.anchor_flux_per_s
    found = [
        Effect(name="none", size="", camera={}),
        Effect(name="laser power", size="1 % rms, named log-normal", camera={"light": {"power": power}}),
        Effect(
            name="slow laser drift", size="1 % rms in an hour", camera={"light": {"power": slow}}, step=5000
        ),
        Effect(
            name="ambient light", size="10 % of the anchor", camera={"light": {"ambient_flux_per_s": ambient}}
        ),
        Effect(
            name="stuck mirrors",
            size="5 % on, 5 % off",
            camera={"mirrors": {"stuck_on": 0.05, "stuck_off": 0.05}},
        ),
        Effect(name="mirror contrast", size="1000 : 1", camera={"mirrors": {"contrast": 1000.0}}),
        Effect(name="dead pixels", size="3 %", camera={"pixels": {"dead_share": 0.03}}),
        Effect(name="cross-talk", size="1 % to each neighbour", camera={"pixels": {"crosstalk": 0.01}}),
        Effect(name="nonlinearity", size="2 % at saturation", camera={"pixels": {"nonlinearity": 0.02}}),
        Effect(
            name="vibration, pointing",
            size="0.05 pixels rms",
            camera={"vibration": {"pointing_rms_pixels": 0.05}},
        ),
        Effect(name="dropped frames", size="1 %", camera={"transfer": {"dropped": 0.01}}),
        Effect(name="repeated frames", size="1 %", camera={"transfer": {"repeated": 0.01}}),
        Effect(name="moving medium", size="after 5 % of its time", camera={"drift": drift}, step=50),
        Effect(
            name="re-anchored medium",
            size="every 1 % of its time",
            camera={"drift": drift | {"reanchor_steps": 10}},
            step=50,
        ),
    ]
    if camera.dark is not None:
        hot = {"pixels": {"hot_share": 0.02, "hot_factor": 30.0}}
        found.insert(6, Effect(name="hot pixels", size="2 %, 30 times the dark current", camera=hot))
        found.insert(8, Effect(name="uneven dark current", size="10 % rms", camera={"pixels": {"dcnu": 0.1}}))
    return (*found, *_packings(camera.sensor.adc_bits or 0))


def _packings(bits: int) -> Iterator[Effect]:
    """Yield the links that send fewer bits than the converter has."""
    for packing, sent in (("mono10p", 10), ("mono8", 8)):
        if bits > sent:
            size = f"{packing}: {sent} of {bits} bits"
            yield Effect(name=f"{sent}-bit link", size=size, camera={}, frames={"packing": packing})


def opened(effect: Effect | None, **options: Any) -> CameraDevice:
    """Open the camera with an effect, or without one."""
    changes = {} if effect is None else effect.changes
    device = open_device(DEVICE, **{"n_inputs": 10, **changes, **options})
    if not isinstance(device, CameraDevice):
        raise TypeError("no camera")
    return device


def monitored(effect: Effect, **options: Any) -> str:
    """Return what the monitor says within `CHECKS` checks after the effect came; nothing if it finds nothing.

    Args:
        effect: the effect.
        **options: of `opusim.open_device`; both openings get them.
    """
    try:
        with opened(None, monitor=_MONITOR, **options) as device:
            baseline = device.baseline
        with opened(effect, monitor=_MONITOR, **options) as device:
            if baseline is not None:
                device.compare_with(baseline)
            for step in range(effect.step + 1, effect.step + 1 + CHECKS):
                device.seek(step)
    except (DeviceFault, NoiseBelowCertificate) as error:
        return str(error).partition("' ")[2].partition(";")[0]
    return ""


def calibration_of(device: CameraDevice, beta: float) -> Calibration | str:
    """Return a calibration of some 0.2 s of computing, or why its frames cannot be evaluated."""
    try:
        return calibrate(device, plan=Plan(frames=64), readings=READINGS, beta=beta)
    except ValueError as error:
        return f"frames cannot be evaluated: {error}"


def refusal_of(certificate: Certificate) -> str:
    """Return what speaks against the law of a certificate that has none: the first test or remark that does."""
    failed = [test.text for test in certificate.tests if test.needed and not test.holds]
    remarks = [text for text in certificate.remarks if text.startswith("no law is certified")]
    return [*failed, *(text.partition(": ")[2].partition(". ")[0] for text in remarks), "no law"][0]


def contains(certified: NoiseModel, described: NoiseModel) -> bool:
    """Whether certified boxes hold the described ones: the dark rate from below, the light from above, the power."""
    counts = PhotonCountNoise | FluctuatingCountNoise
    if not isinstance(certified, counts) or not isinstance(described, counts):
        raise TypeError("no law of counts")
    light = [np.asarray(law.rate_high) - np.asarray(law.rate_low) for law in (certified, described)]
    holds = bool(np.all(certified.rate_low <= described.rate_low) and np.all(light[0] >= light[1]))
    if isinstance(certified, FluctuatingCountNoise) and isinstance(described, FluctuatingCountNoise):
        holds &= certified.power_rms >= described.power_rms
    return holds


def holds_groups(law: PhotonCountLaw | FluctuatingCountLaw, dark_e: np.ndarray, nominal_e: float) -> bool:
    """Whether a certificate's limits of the dark charge hold for its mean and for groups of 12 outputs.

    Args:
        law: the certified one.
        dark_e: of each output, electrons.
        nominal_e: its mean over all outputs that such a sensor has.
    """
    low, high, deviation = law.dark_of_groups(_GROUP)
    groups = dark_e[: dark_e.size // _GROUP * _GROUP].reshape(-1, _GROUP).mean(axis=1)
    return bool(low <= nominal_e <= high and np.max(np.abs(groups - nominal_e)) <= deviation + 1e-9)


def outcome(effect: Effect, number: int) -> str:
    """Calibrate one instrument: holds, fails, or the test that refuses it."""
    with opened(effect, n_outputs=OUTPUTS, seed=number, medium={"seed": number}) as device:
        found = calibration_of(device, BETA)
        if isinstance(found, str):
            return "refused: frames cannot be evaluated"
        certificate = found.certificate
        if certificate.noise is None:
            return f"refused: {refusal_of(certificate).partition(' (')[0]}"
        law = device.stated_noise
        if law is None:
            return "refused: the device states no law"
        held = contains(certificate.certified(law), law)
        if isinstance(certificate.noise, PhotonCountLaw | FluctuatingCountLaw):
            held &= holds_groups(certificate.noise, np.asarray(device.exposure.dark_e), nominal_e())
        return "holds" if held else "fails"


@cache
def nominal_e() -> float:
    """Return the dark charge of a frame of the device as described, electrons."""
    with opened(None, n_outputs=OUTPUTS) as device:
        return float(np.mean(device.exposure.dark_e))


def coverage(part: str, instruments: int) -> None:
    """Calibrate instruments of the effects whose name contains a part, and save after every few."""
    before = load_results("effects_coverage")
    found: dict[str, Any] = before.get("effects", {}) if before.get("certificate_schema") == _SCHEMA else {}
    for effect in (*effects(), SLIGHT):
        if part not in effect.name:
            continue
        entry = found.get(effect.name, {})
        if entry.get("size") != effect.size:
            entry = {"instruments": 0, "outcomes": {}}
        outcomes = Counter(entry["outcomes"])
        for start in range(entry["instruments"], instruments, _AT_ONCE):
            stop = min(start + _AT_ONCE, instruments)
            outcomes.update(outcome(effect, 1000 + number) for number in range(start, stop))
            found[effect.name] = {"size": effect.size, "instruments": stop, "outcomes": dict(outcomes)}
            facts = {"device": DEVICE, "outputs": OUTPUTS, "beta": BETA, "certificate_schema": _SCHEMA}
            save_results("effects_coverage", facts | {"effects": found})
        print(effect.name, found[effect.name], flush=True)


def docs_table() -> str:
    """Return the table of docs/devices.md, from what was saved: faults that end alike share a row."""
    held = load_results("effects_coverage").get("effects", {})
    faults: dict[tuple[str, str], list[str]] = {}
    for effect in (*effects(), SLIGHT):
        name = f"{effect.name}, {effect.size}".removesuffix(", ")
        faults.setdefault(_counted(held.get(effect.name)), []).append(name)
    rows: list[tuple[str, ...]] = [("; ".join(names), *counts) for counts, names in faults.items()]
    return markdown(("fault", "missed", "refused"), rows)


def _counted(entry: dict[str, Any] | None) -> tuple[str, str]:
    """Return how many calibrations of an effect missed the law, and how many were refused."""
    if entry is None:
        return "not run", ""
    outcomes, number = entry["outcomes"], entry["instruments"]
    refused = sum(count for name, count in outcomes.items() if name.startswith("refused"))
    return str(outcomes.get("fails", 0)), f"{refused}" + (f" of {number}" if number != INSTRUMENTS else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("coverage",))
    parser.add_argument("part", nargs="?", default="")
    parser.add_argument("--instruments", type=int, default=INSTRUMENTS)
    options = parser.parse_args()
    coverage(options.part, options.instruments)


if __name__ == "__main__":
    main()
