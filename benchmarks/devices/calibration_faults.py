"""What is the smallest fault that a calibration of the default size finds?

Readings: five inputs, 500 readings, 4,000 outputs. Frames: 64 of each level and 100 of the anchor, 4,000 pixels of
camera_low_light. Each fault is planted at the strength that docs/calibrate.md states and at half of it; kept is the
share of runs in which its own test fails at the family's alarm level. An argument selects the faults whose name
contains it.

`--attempts` lets devices of 128 outputs with broken noise ask for a certificate, at beta = 0.05 and with 200 readings
of an input, so many times each: copied outputs, a mixed law of the stated variance, a fine grid, a common mode and a
drift; and sound devices, as a control.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import typer

from benchmarks.results_file import load_results, save_results
from opusim.calibration.calibrate import calibrate
from opusim.calibration.photon_transfer import LightNoise
from opusim.calibration.reading_noise import independence_p_values, shape_p_values
from opusim.description.schema import load_description
from opusim.devices.certificate import Certificate, GaussianLaw
from opusim.devices.simulated import GaussianDevice
from opusim.p_values import FAMILY_ALARM

INPUTS, READINGS, OUTPUTS, LIGHT_RUNS = 5, 500, 4000, 400
PROPERTIES, CAMERA_PROPERTIES = 8, 32
"""Properties that share the family's alarm level; a camera's sixteen have half of it."""
Random = np.random.Generator
Plant = Callable[[Random, np.ndarray, float], np.ndarray]
OUT, TIME = "outputs do not correlate", "readings do not repeat or follow from earlier ones"
SIZE = "sizes of the outputs' noises do not correlate"
LAW, GRID, SAME = "each output is Gaussian", "readings lie on no grid", "noise is the same at every input"
LIGHT = "light varies from frame to frame, standard deviation"


def with_common(random: Random, z: np.ndarray, share: float, signs: Any = 1.0) -> np.ndarray:
    """A share of the variance is common to all outputs, with signs that stay."""
    common = random.standard_normal((*z.shape[:-1], 1))
    return np.asarray((1 - share) ** 0.5 * z + share**0.5 * common * signs)


def signs_of(random: Random, z: np.ndarray) -> np.ndarray:
    """A sign for each output."""
    return random.choice([-1.0, 1.0], z.shape[-1])


def repeating(random: Random, z: np.ndarray, correlation: float, *, first: Any, later: Any) -> np.ndarray:
    """Some readings correlate with others."""
    z[later] = correlation * z[first] + (1 - correlation**2) ** 0.5 * z[later]
    return z


def following(random: Random, z: np.ndarray, strength: Any, *, lag: int) -> np.ndarray:
    """Each reading follows an earlier one."""
    for i in range(lag, z.shape[1]):
        z[:, i] += strength * z[:, i - lag]
    return z


def neighbours(random: Random, z: np.ndarray, correlation: float) -> np.ndarray:
    z[..., 1:] += correlation * z[..., :-1]
    return z


def one_uniform(random: Random, z: np.ndarray, share: float) -> np.ndarray:
    uniform = 3**0.5 * random.uniform(-1, 1, z.shape[:2])
    z[..., 5] = np.where(random.random(z.shape[:2]) < share, uniform, z[..., 5])
    return z


def larger(random: Random, z: np.ndarray, share: float, *, where: Any) -> np.ndarray:
    z[where] *= 1 + share
    return z


FAULTS: dict[str, tuple[str, Plant, float]] = {
    "grid, standard deviations": (GRID, lambda random, z, step: np.round(z / step) * step, 1e-6),
    "noise of one input is larger by": (SAME, partial(larger, where=2), 4e-3),
    "noise of one output at one input is larger by": (SAME, partial(larger, where=np.s_[2, :, 7]), 0.4),
    "excess of the fourth moment of all outputs": (  # a scale of its own for each reading
        LAW,
        lambda random, z, excess: z * np.sqrt(1 + (excess / 3) ** 0.5 * random.choice([-1.0, 1.0], z.shape)),
        0.04,
    ),
    "share of uniform readings of one output": (LAW, one_uniform, 1.0),
    "variance common to all outputs, random signs, share": (
        OUT,
        lambda random, z, share: with_common(random, z, share, signs_of(random, z)),
        1.2e-3,
    ),
    "variance common to all outputs, one sign, share": (OUT, with_common, 5e-5),
    "correlation of two outputs": (OUT, partial(repeating, first=np.s_[..., 0], later=np.s_[..., -1]), 0.25),
    "correlation of neighbouring outputs": (OUT, neighbours, 4e-3),
    "correlation at lag 3, random signs": (
        TIME,
        lambda random, z, strength: following(random, z, strength * signs_of(random, z), lag=3),
        0.03,
    ),
    "correlation at lag 2, one sign": (TIME, partial(following, lag=2), 4e-3),
    "correlation of one reading with an earlier one": (
        TIME,
        partial(repeating, first=(0, 0), later=(-1, -1)),
        0.2,
    ),
    "common factor of all noise, relative spread": (
        SIZE,
        lambda random, z, spread: z * (1 + spread * random.standard_normal((*z.shape[:2], 1))),
        0.01,
    ),
}


def is_found(name: str, strength: float, number: int) -> bool:
    """Whether one run of readings with the fault fails the fault's own test."""
    text, plant, _ = FAULTS[name]
    random = np.random.default_rng([20261124, number])
    readings = list(plant(random, random.standard_normal((INPUTS, READINGS, OUTPUTS)), strength))
    tests = shape_p_values if text in (LAW, GRID, SAME) else independence_p_values
    p_values = tests(readings)[text]
    return len(p_values) * min(p_values.values()) < FAMILY_ALARM / PROPERTIES


def is_light_found(spread: float, number: int) -> bool:
    """Means of frames at 12 levels and of the anchor, drawn from their law."""
    random = np.random.default_rng([20261125, number])
    light, freedom = np.append(np.linspace(0, 2590, 12), 200.0), np.append(np.full(12, 63), 99)
    own = (light + 8.65) / OUTPUTS
    variances = random.chisquare(freedom) / freedom * (own + np.square(spread * light))
    noise = LightNoise(frame_variances=variances, freedom=freedom, own=own, light=light)
    return noise.p_value < FAMILY_ALARM / CAMERA_PROPERTIES


Broken = Callable[[Random, np.ndarray, np.ndarray], np.ndarray]
"""Returns what is made of standard normal noise, shape (readings, outputs), and of the readings' numbers."""
BROKEN: dict[str, Broken | None] = {
    "sound": None,
    "copies": lambda random, z, time: np.hstack([z[:, : z.shape[1] // 2]] * 2),
    # one reading of an output in 20 has twice the deviation of the others; the variance is the stated one
    "mixed laws": lambda random, z, time: z * np.where(random.random(z.shape) < 0.05, 2, 1) / 1.15**0.5,
    "fine grid": lambda random, z, time: np.round(z / 0.01) * 0.01,
    "common mode": lambda random, z, time: with_common(
        random, z, 0.1, np.where(np.arange(z.shape[1]) % 3 == 0, -1.0, 1.0)
    ),
    "drift": lambda random, z, time: z + time[:, None] / 400,  # half a deviation in 200 readings
}


def silent_at(every: int) -> Broken:
    """One reading in so many has no noise at any output."""
    return lambda random, z, time: np.where(time[:, None] % every == every - 1, 0.0, z)


def pink(random: Random, z: np.ndarray, time: np.ndarray) -> np.ndarray:
    """1 % of the variance is 1/f noise, of each output by itself."""
    frequencies = np.arange(1, len(z) // 2 + 1)[:, None]
    shape = (len(frequencies), z.shape[1])
    slow = (random.standard_normal(shape) + 1j * random.standard_normal(shape)) / np.sqrt(frequencies)
    wave = np.fft.irfft(np.vstack([np.zeros((1, z.shape[1])), slow]), n=len(z), axis=0)
    return 0.99**0.5 * z + 0.1 * wave / wave.std(axis=0)


def repeats(random: Random, z: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Noise repeats after 3,000 readings."""
    pool = np.random.default_rng([20261128, z.shape[1]]).standard_normal((3000, z.shape[1]))
    return pool[time % 3000]


RARE: dict[str, tuple[Broken | None, float]] = {
    "every 1,000th reading without noise": (silent_at(1000), 1.0),
    "one number in 1,000 without noise": (
        lambda random, z, time: np.where(random.random(z.shape) < 1e-3, 0.0, z),
        1.0,
    ),
    "a tenth of the noise at bright inputs": (None, 0.1),
    "1 % of 1/f noise": (pink, 1.0),
    "tails cut at 3.2 standard deviations": (lambda random, z, time: np.clip(z, -3.2, 3.2), 1.0),
}
"""Faults that the default number of readings shows: what is made of the noise, and its factor at bright inputs."""
TRUSTED: dict[str, tuple[Broken, str]] = {
    "every 10,000th reading without noise": (silent_at(10_000), "noise is missing at all outputs"),
    "repeats after 3,000 readings": (repeats, "noise does not repeat"),
}
"""Faults that it cannot show, and the beginning of the trusted property under which a certificate names them."""
SIGMA, BETA, _AT_ONCE = 0.5, 0.05, 20


class BrokenDevice(GaussianDevice):
    """A device whose description states N(0, sigma^2) and whose noise is something else.

    Args:
        broken: what it makes of standard normal noise, shape (readings, n_outputs), and of the readings' numbers.
        number: which device this is.
        bright: factor on the noise of inputs of which more than half are 1 on balance.
    """

    def __init__(self, broken: Broken | None, number: int, bright: float = 1.0) -> None:
        description = load_description("gaussian", {"noise": {"sigma": SIGMA}})
        super().__init__(description, n_inputs=10, n_outputs=128)
        self._broken, self._random, self._taken = broken, np.random.default_rng([20261127, number]), 0
        self._bright = bright

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        z = self._random.standard_normal((len(x), self.n_outputs))
        if self._broken is not None:
            z = self._broken(self._random, z, self._taken + np.arange(len(x)))
        self._taken += len(x)
        z = np.where(x.sum(1).numpy()[:, None] > self.n_inputs / 2, self._bright, 1.0) * z
        return (self.medium.project(x).double() + torch.from_numpy(SIGMA * z)).float()


def asked(broken: Broken | None, number: int, *, bright: float = 1.0, readings: int = 200) -> Certificate:
    """Return the certificate that a device of such noise gets."""
    with BrokenDevice(broken, number, bright).open() as device:
        return calibrate(device, readings=readings, beta=BETA).certificate


def attempt(broken: Broken | None, number: int) -> str:
    """Ask for a certificate: holds, fails (its limit exceeds sigma), or refused."""
    law = asked(broken, number).noise
    if not isinstance(law, GaussianLaw):
        return "refused"
    return "holds" if law.std <= SIGMA else "fails"


def attempt_all(number: int) -> None:
    """Count how the attempts of each noise end, and save after every few."""
    found: dict[str, Any] = load_results("broken_noises").get("noises", {})
    for name, broken in BROKEN.items():
        entry = found.get(name, {"attempts": 0, "outcomes": {}})
        for start in range(entry["attempts"], number, _AT_ONCE):
            stop = min(start + _AT_ONCE, number)
            for each in range(start, stop):
                ended = attempt(broken, each)
                entry["outcomes"][ended] = entry["outcomes"].get(ended, 0) + 1
            entry["attempts"], found[name] = stop, entry
            save_results("broken_noises", {"outputs": 128, "beta": BETA, "noises": found})
        print(name, found[name], flush=True)


def main(part: str = typer.Argument(""), runs: int = 4, attempts: int = 0) -> None:
    """Measure the faults whose name contains a part, or how attempts of broken devices end."""
    if attempts:
        attempt_all(attempts)
        return
    rows: list[dict[str, Any]] = []
    for name, (_, _, strength) in FAULTS.items():
        if part in name:
            row = {"fault": name, "strength": strength}
            for key, size in (("found", strength), ("half", strength / 2)):
                row[key] = float(np.mean([is_found(name, size, number) for number in range(runs)]))
            rows.append(row)
            print(rows[-1], flush=True)
    for spread in (4e-4, 3e-4, 2e-4) if part in LIGHT else ():
        share = float(np.mean([is_light_found(spread, number) for number in range(LIGHT_RUNS)]))
        rows.append({"fault": LIGHT, "strength": spread, "found": share})
        print(rows[-1], flush=True)
    if not part:
        save_results("calibration_faults", {"runs": runs, "light_runs": LIGHT_RUNS, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
