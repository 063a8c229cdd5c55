"""Names of a camera's faults, against frames that are drawn here from their laws."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from opusim.camera.diagnosis import FrameLook, diagnose, look_of, patterns_of

INPUTS, REFERENCE, OUTPUTS, REPEATS = 24, 24, 256, 32
DARK_E, LEVEL_DN, FLUX = 6.0, 100.0, 2.0
Light = Callable[..., np.ndarray]


class Instrument:
    """Frames of a sensor of gain 1 behind a random medium, and one fault.

    Of mirrors: leak (amplitude of those that are off), stuck_on, stuck_off. Of light: light, rms (of its power from
    frame to frame), ambient_e, talk (share to each neighbour), moved (share of the field that is of another medium).
    Shares of frames: dropped (black), repeated. Shares of outputs: dead, hot (30 times the dark charge).
    """

    def __init__(self, seed: int, **fault: Any) -> None:
        self._fault = fault
        self._random = np.random.default_rng((seed, len(str(fault))))
        medium = np.random.default_rng(seed)
        parts = medium.normal(size=(4, INPUTS + REFERENCE, OUTPUTS))
        moved = fault.get("moved", 0.0)
        field = parts[0::2] + 1j * parts[1::2]
        self._r = np.sqrt(1 - moved) * field[0] + np.sqrt(moved) * field[1]
        self._place = np.linspace(0, 1, OUTPUTS, endpoint=False)

    def look(self) -> FrameLook:
        fault, random = self._fault, self._random
        patterns = patterns_of(INPUTS).numpy()
        data = np.hstack([patterns, np.zeros((len(patterns), REFERENCE))])
        mirrors = np.stack([data, 1 - data], axis=1).reshape(-1, INPUTS + REFERENCE)
        mirrors[:, list(fault.get("stuck_on", ()))] = 1
        mirrors[:, list(fault.get("stuck_off", ()))] = 0
        leak = fault.get("leak", 0.0)
        light = fault.get("light", 1.0) * FLUX * np.abs((leak + (1 - leak) * mirrors) @ self._r) ** 2
        c = fault.get("talk", 0.0)
        beside = np.roll(light, 1, axis=1) + np.roll(light, -1, axis=1)
        light = (1 - 2 * c) * light + c * beside
        alive = self._place >= fault.get("dead", 0.0)
        dark = np.where(self._place > 1 - fault.get("hot", 0.0), 30 * DARK_E, DARK_E)
        shape = (REPEATS, *light.shape)
        power = np.maximum(1 + fault.get("rms", 0.0) * random.normal(size=shape[:2]), 0)[:, :, None]
        rates = alive * (power * light + dark + fault.get("ambient_e", 0.0))
        frames = LEVEL_DN + random.poisson(rates)
        flat = frames.reshape(-1, OUTPUTS)
        flat[random.random(len(flat)) < fault.get("dropped", 0.0)] = 0
        for frame in np.flatnonzero(random.random(len(flat)) < fault.get("repeated", 0.0)):
            flat[frame] = flat[max(frame - 1, 0)]
        return look_of(flat.reshape(shape).astype(np.float64))


def name_of(seed: int, **fault: Any) -> str:
    found = diagnose(Instrument(seed).look(), Instrument(seed, **fault).look(), tolerated=0.01)
    return "" if found is None else found[0]


HIDDEN = sorted(set(range(INPUTS)) - set(np.flatnonzero(patterns_of(INPUTS)[5:].sum(dim=0)).tolist()))
"""Data mirrors that no pattern shows singly."""
FAULTS: dict[str, list[dict[str, Any]]] = {
    "ambient light or the sensor's temperature": [{"ambient_e": 20.0}, {"ambient_e": 100.0}],
    "contrast of its mirrors": [{"leak": 0.15}, {"leak": 0.7}],
    "in speckle: some mirrors are stuck": [{"stuck_on": (3, 40)}, {"stuck_on": range(0, 48, 4)}],
    "mirrors stuck that were shown singly": [{"stuck_off": range(0, INPUTS, 4)}],
    "as much of its correlation": [{"stuck_off": (*HIDDEN, *range(INPUTS, INPUTS + 8))}],
    "mirrors of the anchor are stuck": [{"stuck_off": (30, 40)}, {"stuck_off": range(24, 48, 3)}],
    "cross-talk": [{"talk": 0.02}, {"talk": 0.15}],
    "loses or repeats": [{"dropped": 0.02}, {"dropped": 0.5}, {"repeated": 0.02}, {"repeated": 0.5}],
    "as the laser's power does": [{"rms": 0.03}, {"rms": 0.3}],
    "silent or stuck": [{"dead": 0.03}, {"dead": 0.3}],
    "medium decorrelated": [{"moved": 0.03}, {"moved": 0.3}, {"moved": 1.0}],
    "": [{}, {"light": 0.7}, {"light": 1.3}, {"hot": 0.1}],
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_every_fault_is_named_as_itself(name: str, seed: int) -> None:
    """At five standard errors, four instruments of each size are named without an error."""
    for fault in FAULTS[name]:
        found = [name_of(seed + k, **fault) for k in range(4)]
        assert all(name in each if name else not each for each in found), (fault, found)


def test_a_sound_camera_has_no_fault_and_a_look_is_kept_whole(seed: int) -> None:
    assert [name_of(seed + k) for k in range(20)] == [""] * 20
    look = Instrument(seed, dropped=0.02).look()
    again = FrameLook.of_numbers(np.append(look.to_numbers(), np.zeros(7)), OUTPUTS)
    for key in ("mean", "variance", "constant"):
        np.testing.assert_array_equal(getattr(again, key), getattr(look, key))
    assert (again.repeats, again.shared) == (look.repeats, look.shared)


def changed(look: FrameLook, **values: Any) -> FrameLook:
    return FrameLook(**{**vars(look), **values})


def test_names_are_lost_without_what_they_rest_on(seed: int) -> None:
    """Planted: outputs in another order, so that neighbours are none; a medium that moves instead of the mirrors."""
    order = np.random.default_rng(seed).permutation(OUTPUTS)
    first, now = Instrument(seed).look(), Instrument(seed, talk=0.15).look()
    mixed = [changed(a, mean=a.mean[:, order], variance=a.variance[:, order]) for a in (first, now)]
    found = diagnose(mixed[0], mixed[1], tolerated=0.01)
    assert found is None or "cross-talk" not in found[0]
    assert "stuck" not in name_of(seed, moved=0.1)
    leak = Instrument(seed, leak=0.3).look()
    blank = leak.mean.copy()
    blank[0] = blank[0][order]
    found = diagnose(first, changed(leak, mean=blank), tolerated=0.01)
    assert "contrast" not in found[0]


@pytest.mark.parametrize(("inputs", "singles"), [(1, 1), (10, 10), (1024, 16), (1025, 0)])
def test_single_mirrors_are_shown_in_narrow_windows(inputs: int, singles: int) -> None:
    patterns = patterns_of(inputs)
    assert patterns.shape == (5 + singles, inputs)
    assert int(patterns[0].sum()) == 0
    assert all(int(row.sum()) == 1 for row in patterns[5:])
