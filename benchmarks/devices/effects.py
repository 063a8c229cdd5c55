"""What does each fault of a real instrument do, and do certificates hold under it?

`table` measures the table of `opusim device effects camera_low_light`. `coverage` calibrates 400 simulated instruments
for each effect (128 outputs, 64 frames of a level, 200 readings, beta = 0.05; another medium, sensor and noise each),
and counts refusals, and certificates whose limits do not contain the described law: rates at least, light at most,
spread of the power, dark charge of the mean and of groups. Beside the certificate it counts single limits at 5 % each
(gain, dark current, start of the line of means), of which 20 +- 4.4 in 400 miss if a limit is exact; Bonferroni's
shares leave a certificate fewer. It resumes where it stopped; an argument selects the effects whose name contains it.
`time` measures how long calibrations take, at the size of these, at the command's default, and at that of
docs/camera.md's sequence.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from benchmarks.markdown import markdown
from benchmarks.results_file import load_results, save_results
from opusim.calibration.calibrate import Plan, calibrate
from opusim.calibration.photon_transfer import PhotonTransfer
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import Certificate, FluctuatingCountLaw, PhotonCountLaw
from opusim.devices.registry import open_device
from opusim.noise import FluctuatingCountNoise, NoiseModel, PhotonCountNoise
from training.device_privacy.effects import Effect, EffectRow, EffectTable, calibration_of, refusal_of

DEVICE, OUTPUTS, BETA, INSTRUMENTS = "camera_low_light", 128, 0.05, 400
SIZES = ((64, 200), (64, 500), (256, 500))
"""Frames of a level and readings of an input: of `coverage`, by default, and of the sequence of docs/camera.md."""
TIMED = ("camera_low_light", "camera_fluctuating", "camera", "gaussian")
_AT_ONCE, _GROUP = 20, 12
SLIGHT = Effect(name="slightly uneven dark current", size="2 % rms", camera={"pixels": {"dcnu": 0.02}})
"""An effect that is certified, so that its limits are tested; the table's is refused."""
_SCHEMA = Certificate.model_fields["schema_version"].default
"""Counts of certificates of another schema are no counts of these."""


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


def missed_limits(device: CameraDevice, transfer: PhotonTransfer) -> list[str]:
    """Return which 95 % intervals of a certificate's constants miss what the description says.

    Bias and ambient light count as dark charge, and the line of means starts at the black level and all of that.
    """
    found, exposure = transfer.unbent(0.95), device.exposure
    gain, dark_e = exposure.sensor.gain_dn_per_e, float(np.mean(exposure.dark_e))
    zero = exposure.sensor.black_level_dn + gain * (dark_e + float(np.mean(exposure.offset_e)))
    true = {
        "gain_dn_per_e": gain,
        "dark_current_e_per_s": dark_e / (exposure.light.exposure_us * 1e-6),
        "zero_dn": zero,
    }
    return [key for key, value in true.items() if not found[key].low <= value <= found[key].high]


def outcome(effect: Effect, number: int) -> tuple[str, list[str]]:
    """Calibrate one instrument: holds, fails, or the test that refuses it; and its single limits that miss."""
    overrides = effect.changes | {"medium": {"seed": number}}
    device = open_device(DEVICE, n_inputs=10, n_outputs=OUTPUTS, seed=number, **overrides)
    with device:
        if not isinstance(device, CameraDevice):
            raise TypeError("no camera")
        found = calibration_of(device, BETA)
        if isinstance(found, str):
            return "refused: frames cannot be evaluated", []
        certificate, transfer = found.certificate, found.transfer
        missed = [] if transfer is None else missed_limits(device, transfer)
        if certificate.noise is None:
            return f"refused: {refusal_of(certificate).partition(' (')[0]}", missed
        law = device.stated_noise
        if law is None:
            return "refused: the device states no law", missed
        held = contains(certificate.certified(law), law)
        if isinstance(certificate.noise, PhotonCountLaw | FluctuatingCountLaw):
            held &= holds_groups(certificate.noise, np.asarray(device.exposure.dark_e), nominal_e())
        return "holds" if held else "fails", missed


@cache
def nominal_e() -> float:
    """Return the dark charge of a frame of the device as described, electrons."""
    with open_device(DEVICE, n_inputs=10, n_outputs=OUTPUTS) as device:
        if not isinstance(device, CameraDevice):
            raise TypeError("no camera")
        return float(np.mean(device.exposure.dark_e))


def coverage(part: str, instruments: int) -> None:
    """Calibrate instruments of the effects whose name contains a part, and save after every few."""
    before = load_results("effects_coverage")
    found: dict[str, Any] = before.get("effects", {}) if before.get("certificate_schema") == _SCHEMA else {}
    for effect in (*EffectTable(DEVICE, n_outputs=OUTPUTS).effects, SLIGHT):
        if part not in effect.name:
            continue
        entry = found.get(effect.name, {"instruments": 0, "outcomes": {}, "missed": {}})
        if entry.get("size", effect.size) != effect.size:
            entry = {"instruments": 0, "outcomes": {}, "missed": {}}
        outcomes, missed = Counter(entry["outcomes"]), Counter(entry["missed"])
        for start in range(entry["instruments"], instruments, _AT_ONCE):
            stop = min(start + _AT_ONCE, instruments)
            for number in range(start, stop):
                ended, limits = outcome(effect, 1000 + number)
                outcomes[ended] += 1
                missed.update(limits)
            found[effect.name] = {
                "size": effect.size,
                "instruments": stop,
                "outcomes": dict(outcomes),
                "missed": dict(missed),
            }
            facts = {"device": DEVICE, "outputs": OUTPUTS, "beta": BETA, "certificate_schema": _SCHEMA}
            save_results("effects_coverage", facts | {"effects": found})
        print(effect.name, found[effect.name], flush=True)


def seconds_of(name: str, plan: Plan, readings: int, **overrides: Any) -> tuple[float, int]:
    """Return the median time of five calibrations of one device, opening not included, and the frames of one."""
    taken, frames = [], 0
    for seed in range(1, 6):
        with open_device(name, n_inputs=10, n_outputs=OUTPUTS, seed=seed, **overrides) as device:
            start = time.perf_counter()
            found = calibrate(device, plan=plan, readings=readings, beta=BETA)
            taken.append(time.perf_counter() - start)
            frames = found.certificate.frames
    return statistics.median(taken), frames


def times() -> None:
    """Measure how long calibrations of a window of 128 outputs take; the first of all is not counted."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    seconds_of(DEVICE, Plan(), 30)
    for frames, readings in SIZES:
        plan = Plan(frames=frames)
        for name in TIMED:
            seconds, taken = seconds_of(name, plan, readings)
            rows.append(
                {"device": name, "frames": frames, "readings": readings, "taken": taken, "seconds": seconds}
            )
            print(rows[-1], flush=True)
    faults: dict[str, float] = {}
    for effect in EffectTable(DEVICE, n_outputs=OUTPUTS).effects:
        try:
            faults[effect.name], _ = seconds_of(DEVICE, Plan(frames=64), 200, **effect.changes)
        except ValueError as error:
            print(f"{effect.name}: {error}", flush=True)
            continue
        print(effect.name, faults[effect.name], flush=True)
    save_results("calibration_time", {"outputs": OUTPUTS, "rows": rows, "effects": faults})


def time_table() -> str:
    """Return the table of docs/camera.md on the time of calibrations."""
    rows = []
    results = load_results("calibration_time")
    name, slowest = max(results["effects"].items(), key=itemgetter(1))
    for frames, readings in SIZES:
        found = [row for row in results["rows"] if (row["frames"], row["readings"]) == (frames, readings)]
        fault = f"{name}, {slowest:.2f} s" if (frames, readings) == SIZES[0] else ""
        seconds = (f"{row['seconds']:.2f} s" for row in found)
        rows.append((str(frames), str(readings), f"{found[0]['taken']:,}", *seconds, fault))
    devices = (f"`{name}`" for name in TIMED)
    header = ("frames of a level", "readings of an input", "frames in all", *devices, "slowest fault")
    return markdown(header, rows)


def table() -> None:
    """Measure and save the table."""
    rows = []
    for row in EffectTable(DEVICE, n_outputs=OUTPUTS).rows():
        rows.append(vars(row))
        print(row, flush=True)
    save_results("device_effects", {"device": DEVICE, "outputs": OUTPUTS, "rows": rows})


def docs_table() -> str:
    """Return the table of docs/camera.md, from what was saved."""
    content, held = load_results("device_effects"), load_results("effects_coverage").get("effects", {})
    lines = [
        "| effect | correlation | noise | learning | epsilon | certified | calibrations | monitor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for values in content["rows"]:
        row = EffectRow(**values)
        name = "none" if not row.size else f"{row.effect}, {row.size}"
        epsilon = "no law" if row.epsilon is None else f"{row.epsilon:.2f}"
        certified = f"refused: {row.refusal}" if row.certified is None else f"{row.certified:.2f}"
        cells = [f"{row.correlation:.4f}", f"{row.noise:.3f}", f"{row.learning:.3f}", epsilon, certified]
        lines.append(
            f"| {name} | {' | '.join(cells)} | {_counted(held.get(row.effect))} | {row.monitor or '-'} |"
        )
    slight = _counted(held.get(SLIGHT.name))
    return "\n".join([*lines, f"| {SLIGHT.name}, {SLIGHT.size} | | | | | | {slight} | |"])


def _counted(entry: dict[str, Any] | None) -> str:
    """Return how calibrations of an effect ended."""
    if entry is None:
        return "not run"
    outcomes, number = entry["outcomes"], entry["instruments"]
    refused = sum(count for name, count in outcomes.items() if name.startswith("refused"))
    return f"{outcomes.get('fails', 0)} missed, {refused} refused of {number}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("table", "coverage", "time", "docs"))
    parser.add_argument("part", nargs="?", default="")
    parser.add_argument("--instruments", type=int, default=INSTRUMENTS)
    options = parser.parse_args()
    if options.what == "table":
        table()
    elif options.what == "coverage":
        coverage(options.part, options.instruments)
    elif options.what == "time":
        times()
    else:
        print(docs_table())


if __name__ == "__main__":
    main()
