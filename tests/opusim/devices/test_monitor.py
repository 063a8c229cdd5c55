"""The monitor: healthy devices pass, every fault is found within its rate, and data frames are never looked at."""

from typing import Any

import numpy as np
import pytest
import torch

from opusim import NoisyDevice, load_description, open_device
from opusim.camera.diagnosis import _shared
from opusim.devices.baseline import Baseline
from opusim.devices.camera import CameraDevice
from opusim.errors import ConfigError, DeviceFault, NoiseBelowCertificate
from opusim.testing.faults import KIND, Fault, faulty_device
from tests.opusim.common import refuses

CHANGES = {
    "light lost": (Fault.LIGHT_CHANGED, lambda size: 1 - size),
    "correlation": (Fault.DECORRELATED, lambda size: size),
    "silent outputs": (Fault.DEAD_OUTPUTS, lambda size: size),
    "variance gained": (Fault.HOTTER, lambda size: (1 + size) ** 0.5),
    "variance lost": (Fault.NOISE_HALVED, lambda size: (1 - size) ** 0.5),
}
POWER = {"law": "log_normal", "rms": 0.05}
SLOW = {"light": {"power": POWER | {"correlation_us": 2e6}}}
NAMES = {
    Fault.FROZEN: (DeviceFault, "frozen"),
    Fault.SATURATED: (DeviceFault, "saturated"),
    Fault.DARK: (DeviceFault, "is dark"),
    Fault.NOISE_HALVED: (NoiseBelowCertificate, "scatter 0.5"),
    Fault.HOTTER: (DeviceFault, "times the noise variance"),
    Fault.SWAPPED: (DeviceFault, "decorrelated or was swapped"),
}


@pytest.mark.parametrize("fault", list(NAMES))
@pytest.mark.parametrize("n_outputs", [64, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_fault_is_found_and_named_within_the_rate(fault: Fault, n_outputs: int) -> None:
    kind, words = NAMES[fault]
    with faulty("gaussian", fault, at_step=7, every=5, n_outputs=n_outputs, noise={"sigma": 0.5}) as device:
        for step in range(10):
            device.seek(step)
        refuses(kind, words, device.seek, 10)


def test_the_monitor_reads_blank_and_reference_vectors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_device("gaussian", n_inputs=10, n_outputs=64, monitor={"every_steps": 2}) as device:
        seen: list[torch.Tensor] = []
        real, before = type(device)._project, device.usage.frames
        monkeypatch.setattr(type(device), "_project", lambda self, x: seen.append(x) or real(self, x))
        device.seek(1)
        assert not seen
        assert device.usage.frames == before
        device.seek(2)
        vectors = {tuple(row.tolist()) for x in seen for row in x}
        seen.clear()
        device.seek(4)
        assert {tuple(row.tolist()) for x in seen for row in x} == vectors
        data = torch.ones(3, 10)
        data[:, 0] = -1
        assert all(tuple(row.tolist()) not in vectors for row in data)
        assert device.usage.frames > before


def test_a_device_that_was_swapped_between_two_openings_is_found() -> None:
    window: dict[str, Any] = {"n_inputs": 10, "n_outputs": 64, "monitor": {}}
    with open_device("gaussian", **window) as device:
        kept = device.monitor.baseline.to_array()
    with open_device("gaussian", seed=3, **window) as device:
        device.compare_with(Baseline.from_array(kept))
        device.seek(0)
    with open_device("gaussian", medium={"seed": 1}, **window) as other:
        refuses(DeviceFault, "was swapped", other.compare_with, Baseline.from_array(kept))


def test_a_baseline_is_kept_whole_and_one_of_another_shape_refused() -> None:
    with open_device("gaussian", n_inputs=10, n_outputs=64, monitor={}) as device:
        found = device.monitor.baseline
    again = Baseline.from_array(found.to_array())
    for name in ("reference", "weights", "variance", "reference_variance"):
        np.testing.assert_array_equal(getattr(again, name), getattr(found, name))
    assert (again.power, again.spread, again.repeat) == (found.power, found.spread, found.repeat)
    with open_device("gaussian", n_inputs=10, n_outputs=64, monitor={}) as device:
        refuses(ValueError, "another version", Baseline.from_array, device.monitor.baseline.to_array()[:5])
        kept = Baseline.from_array(device.monitor.baseline.to_array()[1:])
        refuses(ValueError, "vectors where monitor.reference_vectors = 8", device.compare_with, kept)


def test_a_saturated_camera_is_found() -> None:
    window: dict[str, Any] = {"n_inputs": 10, "n_outputs": 256, "monitor": {"every_steps": 1}}
    with open_device("camera", **window) as device:
        device.seek(0)
    bright = {"light": {"exposure_us": 490.0}, "sensor": {"gain_dn_per_e": 1.0}}
    with open_device("camera", camera=bright | {"anchor": {"most_saturated": 1.0}}, **window) as device:
        refuses(DeviceFault, "% of its pixels saturated in a frame; shorten the exposure", device.seek, 0)


def faulty(
    name: str, fault: Fault, at_step: int = 1, every: int = 1, amount: Any = None, **other: Any
) -> Any:
    """A packaged device with 256 outputs that breaks at a step and is checked at every step."""
    window = {"n_inputs": 10, "n_outputs": 256}
    window |= {key: other.pop(key) for key in ("n_outputs", "seed") if key in other}
    description = load_description(name, {"monitor": {"every_steps": every}, **other})
    options = {"kind": description.kind, "fault": fault.value, "at_step": at_step}
    options |= {} if amount is None else {"amount": amount}
    return faulty_device(description.model_copy(update={"kind": KIND, "options": options}), **window).open()


def checks_until_stop(device: NoisyDevice, most: int) -> tuple[int, str] | None:
    """How many checks after the fault the device is stopped, and why; None if it is not by then."""
    with device:
        device.seek(0)
        for check in range(1, most + 1):
            try:
                device.seek(check)
            except (DeviceFault, NoiseBelowCertificate) as error:
                return check, str(error)
    return None


SMALL_FAULTS = {
    (Fault.LIGHT_CHANGED, 0.9): "times what it read at the beginning: its light changed",
    (Fault.LIGHT_CHANGED, 0.5): "times what it read at the beginning: its light changed",
    (Fault.DEAD_OUTPUTS, 0.05): "% of its outputs silent or stuck",
    (Fault.HOT_OUTPUTS, 0.015): "% of its outputs silent or stuck",
    (Fault.DECORRELATED, 0.8): "its medium decorrelated or was swapped",
}


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["gaussian", "camera", "camera_low_light"])
@pytest.mark.parametrize(("fault", "amount"), list(SMALL_FAULTS))
def test_small_changes_are_found_and_named(name: str, fault: Fault, amount: float, seed: int) -> None:
    overrides = {"noise": {"sigma": 0.5}} if name == "gaussian" else {}
    found = checks_until_stop(faulty(name, fault, amount=amount, seed=seed, **overrides), 3)
    assert SMALL_FAULTS[fault, amount] in found[1]


def test_small_changes_add_up_and_moving_outputs_are_no_other_light(seed: int) -> None:
    """Noise as large as the signal: one check shows nothing, a hundred do."""
    options = {"seed": seed, "noise": {"sigma": 3.0}}
    broken = [faulty("gaussian", Fault.LIGHT_CHANGED, amount=a, **options) for a in (0.8, 1.0)]
    dim, same = (checks_until_stop(device, 100) for device in broken)
    assert dim[0] > 1
    assert same is None
    # At a correlation of 0.986, above the least, single outputs lose more than 5 %
    device = faulty("gaussian", Fault.DECORRELATED, amount=0.986, seed=seed, noise={"sigma": 0.05})
    assert "the medium moved" in checks_until_stop(device, 5)[1]


@pytest.mark.compiled
@pytest.mark.parametrize("change", CHANGES)
def test_the_stated_smallest_change_is_found_in_time(change: str, seed: int) -> None:
    """Of 12 trials at probability 0.99, 9 or fewer succeed with a probability below 3e-4."""
    fault, amount_of = CHANGES[change]
    with open_device("gaussian", n_inputs=10, n_outputs=256, monitor={}, noise={"sigma": 0.5}) as device:
        size = device.smallest_changes(8)[change]
    assert 0 < size < 1
    found = 0
    for k in range(12):
        device = faulty("gaussian", fault, amount=amount_of(size), seed=seed + k, noise={"sigma": 0.5})
        found += checks_until_stop(device, 8) is not None
    assert found >= 10


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "window", "overrides"),
    [
        ("gaussian", (10, 64), {"noise": {"sigma": 30.0}}),
        ("gaussian", (2, 3), {"noise": {"sigma": 0.5}}),
        ("gaussian", (10, 256), {"noise": {"sigma": 3.0}}),
        ("gaussian", (10, 256), {"noise": {"sigma": 0.01}}),
        ("ideal", (10, 64), {}),
        ("camera", (10, 8), {}),
        pytest.param("camera", (10, 256), {}, marks=pytest.mark.slow),
        pytest.param("camera_low_light", (10, 64), {}, marks=pytest.mark.slow),
        ("camera_low_light", (10, 256), {"camera": {"light": {"power": POWER}}}),
        pytest.param("camera_low_light", (10, 256), {"camera": SLOW}, marks=pytest.mark.slow),
        ("camera_holography", (10, 64), {"camera": {"vibration": {"phase_rms_rad": 0.3}}}),
    ],
)
def test_no_false_alarm_in_checks(name: str, window: tuple[int, int], overrides: dict, seed: int) -> None:
    """Five runs of 60 checks, each at a level of 0.009 for 100 checks: two alarms have a probability of 8e-4."""
    assert alarms_of_five(name, window, overrides, seed) <= 1


def alarms_of_five(name: str, window: tuple[int, int], overrides: dict[str, Any], seed: int) -> int:
    watch = {"every_steps": 1, "false_alarm_per_run": 0.009, "checks": 100}
    settings, alarms = {"n_inputs": window[0], "n_outputs": window[1], "monitor": watch, **overrides}, 0
    for k in range(5):
        with open_device(name, seed=seed + k, **settings) as device:
            try:
                for step in range(60):
                    device.seek(step)
            except (DeviceFault, NoiseBelowCertificate):
                alarms += 1
    return alarms


@pytest.mark.slow
@pytest.mark.compiled
def test_shared_noise_would_give_false_alarms_as_independent_noise(seed: int, monkeypatch: Any) -> None:
    shaky = {"camera": {"light": {"power": POWER | {"rms": 0.1}}}}
    assert alarms_of_five("camera_low_light", (10, 256), shaky, seed) <= 1
    monkeypatch.setattr("opusim.camera.diagnosis._shared", lambda values, own: 0.0)
    assert alarms_of_five("camera_low_light", (10, 256), shaky, seed) >= 3


def test_the_smallest_change_grows_with_the_noise_that_outputs_share() -> None:
    window: dict[str, Any] = {"n_inputs": 10, "n_outputs": 256, "monitor": {}}
    found = []
    for rms in (0.0, 0.02, 0.05):
        camera = {"light": {"power": POWER | {"rms": rms}}}
        with open_device("camera_low_light", camera=camera, **window) as device:
            found.append(device.smallest_changes(5))
    for change in ("light lost", "variance gained"):
        assert found[0][change] < found[1][change] < found[2][change]
    assert found[1]["variance lost"] < 1
    assert np.isnan(found[2]["variance lost"])


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "camera", "words"),
    [
        ("camera_low_light", {"light": {"power": POWER}}, "all its outputs .*, as the laser's power"),
        ("camera_low_light", {"vibration": {"pointing_rms_pixels": 0.1}}, "all its outputs"),
        ("camera_holography", {"vibration": {"phase_rms_rad": 0.4}}, "fluctuates: the noise of all its"),
        ("camera_low_light", {"light": {"ambient_flux_per_s": 150.0}}, "ambient light or the sensor's temp"),
        ("camera_low_light", {"dark": {"temperature_c": 45.0}}, "ambient light or the sensor's temp"),
        ("camera_low_light", {"mirrors": {"stuck_on": 0.1, "stuck_off": 0.1}}, "mirrors (are )?stuck"),
        ("camera_low_light", {"mirrors": {"stuck_off": 0.2}}, "mirrors stuck that were shown singly"),
        ("camera_low_light", {"mirrors": {"contrast": 5.0}}, "the contrast of its mirrors"),
        ("camera_low_light", {"pixels": {"crosstalk": 0.05}}, "at each of its neighbours: cross-talk"),
        ("camera_low_light", {"pixels": {"dead_share": 0.05}}, "outputs silent or stuck"),
        ("camera_low_light", {"transfer": {"dropped": 0.02}}, "loses or repeats frames"),
        ("camera_low_light", {"transfer": {"repeated": 0.02}}, "loses or repeats frames"),
        ("camera_low_light", {"pixels": {"hot_share": 0.15, "hot_factor": 30}}, "outputs noisier"),
        ("camera_holography", {"reference_beam": {"step_error": 0.1}}, "its medium decorrelated"),
    ],
)
def test_a_fault_is_named_as_itself(name: str, camera: dict[str, Any], words: str, seed: int) -> None:
    """A camera that became so since its run began."""
    refuses(DeviceFault, words, changed_since, name, camera, seed)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("camera", "words"),
    [
        ({"light": {"ambient_flux_per_s": 150.0}}, "ambient"),
        ({"mirrors": {"contrast": 5.0}}, "contrast"),
        ({"pixels": {"crosstalk": 0.1}}, "cross-talk"),
        ({"mirrors": {"stuck_on": 0.2}}, "mirrors"),
    ],
)
def test_without_frames_these_names_are_lost(camera: dict, words: str, seed: int, monkeypatch: Any) -> None:
    """Planted: a camera that shows the monitor no frames."""
    monkeypatch.setattr(CameraDevice, "_pattern_frames", lambda self, patterns: None)
    assert words not in refuses(DeviceFault, "device", changed_since, "camera_low_light", camera, seed)


@pytest.mark.compiled
def test_frames_are_taken_at_the_opening_and_after_an_alarm_only(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    real = CameraDevice._pattern_frames

    def counted(self: CameraDevice, patterns: torch.Tensor) -> np.ndarray:
        shown.append(2 * len(patterns))
        return real(self, patterns)

    monkeypatch.setattr(CameraDevice, "_pattern_frames", counted)
    with open_device("camera_low_light", n_inputs=12, n_outputs=200, monitor={"every_steps": 1}) as device:
        assert sum(shown) == 32 * 2 * (1 + 4 + 12)
        device.seek(1)
        device.seek(2)
        assert sum(shown) == 32 * 2 * (1 + 4 + 12)
        again = Baseline.from_array(device.monitor.baseline.to_array())
    np.testing.assert_array_equal(again.frames.mean, device.monitor.baseline.frames.mean)
    np.testing.assert_array_equal(again.reference, device.monitor.baseline.reference)


def changed_since(name: str, camera: dict[str, Any], seed: int) -> None:
    """Compare a camera that is opened with a fault with the sound one, in 40 checks."""
    window: dict[str, Any] = {"n_inputs": 12, "n_outputs": 200, "seed": seed, "monitor": {"every_steps": 1}}
    with open_device(name, **window) as sound:
        baseline = sound.monitor.baseline
    with open_device(name, camera=camera, **window) as device:
        device.compare_with(baseline)
        for step in range(40):
            device.seek(step)


@pytest.mark.parametrize("looks", [32, 128])
def test_shared_scatter_is_an_upper_limit_and_0_of_independent_looks(looks: int, seed: int) -> None:
    """Of 200 sets each: own scatter only is called shared in 1 % of them at most; the limit holds in 9 of 10."""
    random, called, held = np.random.default_rng(seed), 0, 0
    for _ in range(200):
        called += _shared(random.normal(size=looks), 1.0) > 0
        held += _shared(random.normal(size=looks) + 1.5 * random.normal(size=looks), 1.0) >= 1.5
    assert called <= 200 * 0.01 + 5 * (200 * 0.01) ** 0.5
    assert held >= 200 * 0.9 - 5 * (200 * 0.09) ** 0.5
    following = [np.repeat(random.normal(size=looks // 4), 4) * 2 for _ in range(200)]  # some look alike
    assert sum(_shared(follows, 1.0) > 2 * 1.2 for follows in following) > 100


@pytest.mark.compiled
def test_every_frame_of_a_projection_is_looked_at() -> None:
    """The dimmest frames are dark, complements and the anchor are full."""
    bright = {"light": {"anchor_flux_per_s": 6e7}, "anchor": {"most_saturated": 1.0}}
    vectors = torch.zeros(1, 10)
    vectors[0, 0] = 1
    with open_device("camera", n_inputs=10, n_outputs=256, camera=bright) as device:
        opened = device.usage.frames
        share = device._saturated_share(vectors)
        assert device.usage.frames - opened == 4 + 1
        anchor = np.mean(device.anchor_frames(1) >= 254.5)
        dim = float((device.intensities(vectors.abs()) >= 254.5).float().mean())
    assert share >= anchor - 0.02 > 0.3
    assert dim < 0.05


@pytest.mark.parametrize(
    ("name", "camera"),
    [
        ("camera_low_light", {"sensor": {"adc_bits": 8}}),
        ("camera_low_light", {"light": {"exposure_us": 200_000.0, "anchor_flux_per_s": 8000.0}}),
        ("camera", {"sensor": {"full_well_e": 3000.0}}),
    ],
)
def test_a_configuration_that_saturates_does_not_open(name: str, camera: dict[str, Any]) -> None:
    window = {"n_inputs": 10, "n_outputs": 400}
    refuses(ConfigError, "% of the outputs are full", open_device, name, camera=camera, **window)
    camera = {**camera, "anchor": {"most_saturated": 1.0}}
    with open_device(name, camera=camera, **window) as device:
        assert device.is_open


WITHIN = [(Fault.LIGHT_CHANGED, 1.029), (Fault.LIGHT_CHANGED, 0.971), (Fault.DEAD_OUTPUTS, 2 / 256)]


@pytest.mark.parametrize(("fault", "amount"), WITHIN)
def test_changes_within_the_tolerances_pass(fault: Fault, amount: float, seed: int) -> None:
    """In little noise."""
    device = faulty("gaussian", fault, amount=amount, seed=seed, noise={"sigma": 0.05})
    assert checks_until_stop(device, 40) is None
