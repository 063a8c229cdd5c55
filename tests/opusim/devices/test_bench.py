"""A bench of one's own: an optical bench in software behind doubles of two vendors' libraries, and its faults."""

import html
import importlib
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import opusim
from opusim import ConfigError, open_device, write_report
from opusim.devices import open_bench
from opusim.devices.baseline import reference_vectors
from opusim.devices.bench import (
    BenchDevice,
    Sequencer,
    grain_spacing,
    look_at_light,
    measure_setup,
    mirror_layout,
)
from opusim.errors import CapabilityMissing, DeviceFault, DeviceTimeout, DeviceUnavailable, NoiseUnknown
from opusim.noise import MeasuredNoise
from opusim.testing.contract import N_INPUTS, N_OUTPUTS, DeviceContract
from tests.opusim.common import changed, device_refuses, refuses, run_device

OWN = Path(__file__).parents[2] / "support" / "own_bench"
MODULES = ("optical_bench", "ALP4", "pylablib", "pylablib.devices", "pylablib.devices.DCAM", "my_bench")
SIZES: dict[str, Any] = {"mirrors": (24, 32), "sensor": (32, 32), "pupil": (0.32, 0.32)}
Modules = dict[str, ModuleType]
WINDOW: dict[str, Any] = {"n_inputs": N_INPUTS, "n_outputs": N_OUTPUTS}
SETTINGS: dict[str, Any] = {"frame_period_us": 1000.0, "macro_pixel": 4, "region_step": 4}


@pytest.fixture(scope="module")
def modules() -> Iterator[Modules]:
    """The optical bench, the doubles of the libraries, and the laboratory's own code; they leave with the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(OWN))
        for name in MODULES:
            patch.setitem(sys.modules, name, None)
            del sys.modules[name]
        yield {name: importlib.import_module(name) for name in ("optical_bench", "my_bench")}


@pytest.fixture(scope="module")
def sound(modules: Modules) -> Any:
    """One medium for all tests."""
    return modules["optical_bench"].use(modules["optical_bench"].OpticalBench(**SIZES))


@pytest.fixture
def optics(sound: Any) -> Iterator[Any]:
    """The optical bench, without faults and nothing open; faults that a test plants go with it.

    Its noise begins anew, so that no test depends on those before it.
    """
    sound._noise = np.random.default_rng(sound.seed + 1000)
    fresh = {name: type(value)(value) for name, value in vars(sound).items() if name[0] != "_"}
    yield sound
    left = set(sound.opened)
    vars(sound).update(fresh)
    sound.forget()
    assert not left, f"{left} stay open"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the setup of the sound bench is kept."""
    return tmp_path_factory.mktemp("setup")


Opener = Callable[..., BenchDevice]


@pytest.fixture
def opener(optics: Any, modules: Modules, folder: Path) -> Opener:
    """Opens the bench with the setup that it had when it was sound."""

    def opened(**options: Any) -> BenchDevice:
        mine = modules["my_bench"]
        given = {**WINDOW, "setup": str(folder), **SETTINGS, **options}
        return open_bench(given.pop("patterns", mine.Mirrors), given.pop("grabber", mine.Camera), **given)

    if not list(folder.iterdir()):
        with opened() as device:
            device.measure_matrix(40)
        optics._noise = np.random.default_rng(optics.seed + 1000)
    return opened


class TestBench(DeviceContract):  # a device like any other
    replayable = False

    @pytest.fixture(autouse=True)
    def _opener(self, opener: Opener) -> None:
        self.opener = opener

    def open_window(self, **options: Any) -> BenchDevice:
        return self.opener(**options)

    @pytest.mark.slow
    def test_readings_are_linear_and_of_unit_entries(self) -> None:
        super().test_readings_are_linear_and_of_unit_entries()

    @pytest.mark.slow
    def test_a_reading_does_not_depend_on_its_batch(self) -> None:
        super().test_a_reading_does_not_depend_on_its_batch()


def projected(device: BenchDevice, x: torch.Tensor, b: torch.Tensor) -> float:
    """Root mean square of readings less B x, over what noise explains."""
    noise = device.noise.variance_bounds()[1].mean()
    return float((device.project(x) - x @ b.T).square().mean() / noise)


FAULTS = {
    "dropped_frames": "jumps by 2 at frame [0-9]+: its pulse came, and the frame was lost .* the host's buffer, lower "
    "bench.frames_per_sequence, or lengthen frames.frame_period_us = 1000$",
    "missed_pulses": "1 frames are missing, without a gap .*: lengthen frames.frame_period_us = 1000, .* cable$",
    "doubled_frames": "stands still.*; let Grabber.grab return each frame once",
    "extra_pulses": "1 frames too many came; .*the trigger's polarity, and reflections on its cable$",
    "stale_frames": "are equal, and their patterns differ; let Grabber.grab copy each frame [^;]*$",
}


@pytest.mark.parametrize(("fault", "told"), FAULTS.items())
def test_frames_that_do_not_match_are_taken_again(fault: str, told: str, optics: Any, opener: Opener) -> None:
    x = reference_vectors(12, N_INPUTS)
    with opener() as device:
        b = device.measure_matrix(2).clone()
        assert projected(device, x, b) < 1.5
        assert device.repeated_sequences == 0
        getattr(optics, fault).add(optics.pulses + 23)
        assert projected(device, x, b) < 1.5
        assert device.repeated_sequences == 1
        assert projected(device, x, b) < 1.5
        getattr(optics, fault).update(range(optics.pulses + 5, optics.pulses + 5000, 41))  # in every try
        refuses(DeviceFault, f"3 of 3 tries: .*{told}", device.project, x)


def test_marks_see_a_missed_and_an_extra_pulse(optics: Any, opener: Opener, monkeypatch: Any) -> None:
    """Counters and numbers of frames are right then, and the frames between the two are shifted."""
    x = reference_vectors(30, N_INPUTS)
    with opener() as device:
        b = device.measure_matrix(2).clone()
        for first, second in (("missed_pulses", "extra_pulses"), ("extra_pulses", "missed_pulses")):
            repeated = device.repeated_sequences
            getattr(optics, first).add(optics.pulses + 23)
            getattr(optics, second).add(optics.pulses + 90)  # the mark at 66 lies between
            assert projected(device, x, b) < 1.5
            assert device.repeated_sequences == repeated + 1
        monkeypatch.setattr(Sequencer, "_check_marks", lambda *_: None)
        optics.missed_pulses.add(optics.pulses + 23)
        optics.extra_pulses.add(optics.pulses + 90)
        assert projected(device, x, b) > 10, "shifted frames pass for readings"


TOO_MUCH = "there is too much light; dim the laser, or cover"
FAR = {
    "six times": ({"power": 6.0}, {}, f"the anchor that marks .*[0-9]: {TOO_MUCH}"),
    "six times, wide range": ({"power": 6.0}, {"range_share": 0.45}, f"at full scale, .*: {TOO_MUCH}"),
    "all full": ({"power": 1e6}, {}, f"shows 409.*, saturated at full scale, and not .*: {TOO_MUCH}"),
    "ambient": ({"ambient_e_per_us": 10.0}, {}, "there is light that no mirror .*; cover the bench"),
    "gone": ({"power": 0.0}, {}, "frames are shifted, or the light is gone; check laser and shutter"),
}


@pytest.mark.parametrize(("faults", "options", "told"), FAR.values(), ids=FAR)
def test_light_that_changes_far_is_told(
    faults: dict, options: dict, told: str, optics: Any, opener: Opener
) -> None:
    x = reference_vectors(4, N_INPUTS)
    with opener(**{"setup": None, **options} if options else {}) as device:
        for power in (0.93, 1.07):  # a drift that passes
            optics.power = power
            device.project(x)
        assert device.repeated_sequences == 0
        vars(optics).update(faults)
        refuses(DeviceFault, f"{told}[^;]*$", device.project, x)


NEW: dict[str, Any] = {"setup": None}
INVERTED = "the blank frame is brighter than the anchor: .* invert the bits"
SATURATED, DARK = "saturation; dim the laser", "no light of the mirrors .* lengthen"
CURVED = "readings do not add up: .* switch gamma, .* off, .* largest number$"
LIGHT = "the light changed to 0.4 times since the setup of .* up, set .* gain and bit depth as they "
DEAD = "the light changed to .* times since .*, it is gone: check laser and shutter, that the"
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # a new setup
    "saturation": ({"power": 40.0, "shortest_us": 100.0}, NEW | {"shortest_exposure_us": 100.0}, SATURATED),
    "saturation as set": ({"power": 40.0}, NEW | {"exposure_us": 400.0}, f"{SATURATED}, or lower bench.expo"),
    "dark": ({"power": 0.0}, NEW, f"{DARK} frames.frame_period_us if the exposure"),
    "dark as set": ({"power": 0.0}, NEW | {"exposure_us": 9.0}, f"{DARK} bench.exposure_us if the"),
    "inverted": ({"inverted": True}, NEW, INVERTED),
    "inverted and bright": ({"inverted": True, "power": 5.0}, NEW, INVERTED),
    "ambient": ({"ambient_e_per_us": 100.0}, NEW, "light reaches the camera that no mirror switches"),
    "incoherent": ({"coherent": False}, NEW, "light of data and reference mirrors does not interfere"),
    "bent": ({"gamma": 0.5}, NEW, r"readings do not add up: .* switch gamma, automatic exposure"),
    "drift": ({"drift_per_frame": 4e-4}, NEW, "drift: the medium moves"),
    "few": ({}, NEW | {"n_outputs": 5000}, "of 5000: speckle is independent every 2 rows and 2 columns"),
    # the setup that is kept
    "light": ({"power": 0.4}, {}, f"{LIGHT}were, or .*remove its file.$"),
    "gamma": ({"gamma": 0.45}, {}, CURVED),  # 2.5 times the light
    "dark gamma": ({"gamma": 2.2}, {}, CURVED),
    "quarter": ({"electrons_per_us": 3.1}, {}, r"0.26 times .*, about 2\^-2, .* had 10 bits instead of 12:"),
    "sixteenth": ({"electrons_per_us": 0.77}, {}, r"about 2\^-4, .* had 8 bits instead of 12: set its bit"),
    "8 bits": ({"bits": 8, "black_dn": 1.25}, {}, r"end at 255 = 2\^8 - 1, and bits = 12; .* 12 bits$"),
    "medium": ({"angle": 1.2}, {}, "the medium is another: frames of the anchor correlate by"),
    "full well": ({"full_well_e": 2500.0}, {}, "add up: .* lower bench.range_share if its pixels are full"),
    "period": ({"readout_us": 2000.0}, {}, "missed pulses: lengthen frames.frame_period_us = 1000"),
    "cable": ({"cable": False}, {}, "no frame came; .* delivers when it runs freely, .*: check the trigger"),
    "gone": ({"power": 0.0}, {}, DEAD),
}
SLOW = [pytest.param(name, marks=[pytest.mark.slow] if name == "drift" else []) for name in REFUSED]


@pytest.mark.parametrize("cause", SLOW)
def test_a_bench_that_cannot_be_used_is_refused_with_the_cause(cause: str, optics: Any, opener: Any) -> None:
    faults, options, told = REFUSED[cause]
    vars(optics).update(faults)
    optics.forget()
    assert len(refuses(DeviceFault, told, opener, **options)) < 400


def test_frames_that_come_late_are_named_before_grains_are_measured(
    optics: Any, opener: Opener, modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[np.ndarray] = []

    def one_late(f: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first = late[-1] if late and late[-1].shape == f[:1].shape else f[:1] ^ 1
        late.append(f[-1:].copy())
        return np.concatenate([first, f[:-1]]), c

    camera = changed(modules["my_bench"].Camera, grab=grabbed(one_late))
    with pytest.raises(
        DeviceFault, match=r"marks pattern 0 shows .*: frames are shifted; check the pulses, and"
    ):
        opener(grabber=camera, setup=None)
    monkeypatch.setattr(Sequencer, "_check_marks", lambda *_: None)
    with pytest.raises(DeviceFault) as caught:  # what their neighbours in the setup say
        opener(grabber=camera, setup=None)
    assert "shifted" not in str(caught.value)


def test_correlations_are_told_within_their_range() -> None:
    rng = np.random.default_rng(1)
    first = rng.exponential(size=(32, 24, 24))
    for second in (2 * first.mean(axis=0) - first, rng.exponential(size=first.shape)):
        with pytest.raises(DeviceFault, match="frames of one pattern correlate by") as caught:
            grain_spacing(first, second, name="bench")
        told = re.search(r"correlate by (-?[0-9.]+);", str(caught.value))
        assert told
        assert -1 <= float(told[1]) < 0.05
    one = np.linspace(0.5, 1.5, 24)[None, :, None] * np.ones((1, 24, 24))
    sloped = 1 + np.linspace(-0.5, 0.5, 32)[:, None, None] * (one - 1)
    with pytest.raises(DeviceFault, match=r"still correlates by (0\.\d\d|1\.00) over"):
        grain_spacing(sloped, sloped, name="bench")


def test_more_bits_than_the_camera_has_are_named(optics: Any, opener: Opener, modules: Modules) -> None:
    wide = changed(modules["my_bench"].Camera, bits=fixed(16))
    for exposure_us in (None, 165.0):  # many pixels are full, and few
        options = {"setup": None, "grabber": wide, "exposure_us": exposure_us}
        refuses(DeviceFault, r"end at 4095 = 2\^12 - 1, and bits = 16; set bits = 12, or", opener, **options)
    refuses(ConfigError, "camera of bits = 12, and it now has bits = 16; set bits", opener, grabber=wide)
    optics.bits, optics.black_dn = 8, 4.0
    refuses(DeviceFault, r"end at 255 = 2\^8 - 1, and bits = 12; set bits = 8, or let", opener, setup=None)


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ({"power": 0.8}, "the light changed to 0.8 times during the opening: .* let it warm up$"),
        ({"angle": 1.2}, "the medium moves: .* during the opening, .*; let it settle, .* vibration away$"),
    ],
    ids=["light", "medium"],
)
def test_changes_after_a_setup_without_a_file(
    faults: dict, told: str, optics: Any, opener: Any, monkeypatch: Any
) -> None:
    def measured(*arguments: Any, **options: Any) -> Any:
        found = measure_setup(*arguments, **options)
        vars(optics).update(faults)
        optics.forget()
        return found

    device = opener(setup=None)
    device.close()
    monkeypatch.setattr("opusim.devices.bench.device.measure_setup", measured)
    refuses(DeviceFault, told, opener, setup=None)
    optics.power = 0.4
    refuses(DeviceFault, "since the setup of [^()]*$", device.open)


def test_outputs_that_are_full_now_are_refused(optics: Any, opener: Opener, tmp_path: Path) -> None:
    options = {"range_share": 0.4, "setup": str(tmp_path)}
    opener(**options).close()
    optics.power = 1.49
    refuses(DeviceFault, "saturation: .* of the outputs are full in frames of the anchor", opener, **options)


def scaled_to_one_mean(light: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Automatic gain: each frame gets the same mean."""

    def exposed(*given: Any) -> np.ndarray:
        numbers = light(*given) - 20.0
        means = np.maximum(numbers.mean(axis=(1, 2), keepdims=True), 0.5)
        return np.clip(np.rint(20 + 700 / means * numbers), 0, 4095).astype(np.uint16)

    return exposed


def with_all_mirrors_on(light: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda patterns, *given: light(np.ones_like(patterns), *given)


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        (scaled_to_one_mean, {}),
        (with_all_mirrors_on, {}),
        (lambda light: light, {"power": 0.0, "ambient_e_per_us": 10.0}),
    ],
    ids=["automatic gain", "mirrors", "ambient"],
)
@pytest.mark.parametrize("options", [{}, {"setup": None}, {"setup": None, "exposure_us": 120.0}])
def test_light_that_does_not_follow_the_patterns_is_not_called_missing(
    change: Callable[..., Any], faults: dict, options: dict, optics: Any, opener: Opener, monkeypatch: Any
) -> None:
    vars(optics).update(faults)
    monkeypatch.setattr(optics, "expose", change(optics.expose))
    told = "light arrives, but does not follow the patterns; switch .* gain .* away, and check that the mirrors switch"
    refuses(DeviceFault, told, opener, **options)


@pytest.mark.parametrize(
    ("spread", "options", "told"),
    [
        (0.3, {}, r"the light fluctuates by [234].% from frame to frame \(the light changed"),
        (0.3, {"setup": None}, "the anchor that marks .*: the light fluctuates by [123].% .*; stab"),
        (0.1, {"setup": None}, "readings do not add up: .*; the light fluctuates by .*: stabilise the las"),
    ],
)
def test_light_that_fluctuates_is_not_told_to_warm_up(
    spread: float, options: dict, told: str, optics: Any, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    expose, draw = optics.expose, np.random.default_rng(0)

    def fluctuating(patterns: np.ndarray, *given: Any) -> np.ndarray:
        frames = []
        for pattern in patterns:
            optics.power = max(0.0, 1 + spread * draw.standard_normal())
            frames.append(expose(pattern[None], *given))
        return np.concatenate(frames)

    monkeypatch.setattr(optics, "expose", fluctuating)
    refuses(DeviceFault, told, opener, **options)


def test_weak_light_is_told_with_the_level_wanted(optics: Any, opener: Opener, caplog: Any) -> None:
    optics.power = 0.04
    opener(setup=None).close()
    told = "weak light: .* exposure, 950 us, the anchor shows 1.. DN, and bench.range_share asks for 61.;"
    assert len(re.findall(told, caplog.text)) == 1
    caplog.clear()
    opener(setup=None, exposure_us=150.0).close()  # as chosen
    optics.power = 1.0
    opener(setup=None).close()
    assert "weak light" not in caplog.text


def grabbed(change: Callable[[np.ndarray, np.ndarray], Any]) -> Callable[[Any, int], Any]:
    """A method `grab` that changes what the camera returned."""

    def grab(self: Any, n: int) -> Any:
        return change(*super(type(self), self).grab(n))

    return grab


def fixed(value: Any) -> property:
    """An attribute that keeps its value, whatever is assigned."""
    return property(lambda self: value, lambda self, other: None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"grab": grabbed(lambda f, c: (f.astype(float), c))}, "dtype float64; return unsigned integers"),
        ({"grab": grabbed(lambda f, c: (f.astype(np.uint8), c))}, "uint8, which cannot hold bits = 12; ret"),
        ({"grab": grabbed(lambda f, c: (f[:, 0], c))}, r"frames of shape .* and the region has \(20, 20\)"),
        ({"grab": grabbed(lambda f, c: (f, 2 * c))}, "counter jumps by 2 at frame 1, and 36 frames came"),
        ({"grab": grabbed(lambda f, c: (f, c[::-1]))}, "the camera's counter goes back by 1 at frame 1"),
        ({"grab": grabbed(lambda f, c: (f, c[1:]))}, "counters of shape .* return one integer for each"),
        ({"bits": fixed(8)}, "and bits = 8 end at 255; set bits, or unpack the numbers"),
        ({"grab": grabbed(lambda f, c: (f << 4, c))}, "12 end at 4095; shift the numbers right by 4 bits"),
        ({"bits": fixed(24)}, "has bits = 24; give the bits of its numbers, an integer from 1 to 16"),
        ({"shape": fixed((40,))}, r"has shape = \(40,\); give rows and columns"),
        ({"grab": None}, "lacks grab"),
        ({"configure": lambda self, **given: None}, "it returned None, not the exposure that was set"),
        ({"grab": grabbed(lambda f, c: f)}, "it returned a ndarray, not the frames and their numbers"),
        ({"configure": lambda self, **given: 0.0}, "configure returned 0.0; return the exposure that was"),
        ({"grab": lambda self, n: 1 / 0}, "Grabber.grab raised ZeroDivisionError: division by zero;"),
    ],
)
def test_a_camera_that_breaks_its_protocol(
    changes: dict, told: str, optics: Any, opener: Any, modules: Any
) -> None:
    options = {"setup": None} if "bits" in changes else {}
    refuses(DeviceFault, told, opener, grabber=changed(modules["my_bench"].Camera, **changes), **options)


def test_what_does_not_open_leaves_no_mirrors_behind(optics: Any, opener: Opener, modules: Modules) -> None:
    optics.camera_opens = False
    refuses(DeviceFault, "grabber raised DCAMError: camera index 0 is not available", opener)
    assert optics.opened == set()
    refuses(TypeError, "grabber = 3: must open an instrument when it is called", opener, grabber=3)


def test_a_lost_link_passes_with_another_attempt(optics: Any, opener: Opener, modules: Modules) -> None:
    failures: list[str] = []

    def run(self: Any, period_us: float) -> None:
        if failures:
            raise OSError(failures.pop())
        super(type(self), self).run(period_us)

    options = {"patterns": changed(modules["my_bench"].Mirrors, run=run)}
    x = torch.ones(1, N_INPUTS)
    with opener(**options) as device:
        failures.append("the link is down")
        refuses(DeviceUnavailable, "Patterns.run failed .the link is down.", device.project, x)
    with opener(**options, setup=None, access={"attempts": 2, "backoff_s": 0.0}) as device:
        setup = device.setup
        failures.append("the link is down")
        assert device.project(x).shape == (1, N_OUTPUTS)
        assert device.setup is setup, "the matrix changed with the link"


@pytest.mark.parametrize("method", ["__init__", "configure", "grab"])
def test_an_opening_survives_a_lost_link_and_counts(
    method: str, optics: Any, opener: Any, modules: Any
) -> None:
    camera, left = modules["my_bench"].Camera, [3]

    def failing(self: Any, *given: Any, **named: Any) -> Any:
        found = getattr(camera, method)(self, *given, **named)
        left[0] -= 1
        if left[0] >= 0:
            raise OSError("the link is down")
        return found

    def closing_itself(self: Any) -> None:
        try:
            failing(self)
        except OSError:
            self.close()
            raise

    changes = {method: closing_itself if method == "__init__" else failing}
    options = {"grabber": changed(camera, **changes), "access": {"attempts": 4, "backoff_s": 0.0}}
    optics.pulses = 0
    with opener(**options) as device:
        assert device.usage.frames == optics.pulses
        assert device.project(torch.ones(1, N_INPUTS)).shape == (1, N_OUTPUTS)
    left[0] = 4
    refuses(DeviceUnavailable, r"the link is down.* \(tried 4 times\)$", opener, **options)


def test_a_camera_that_hangs_is_left_in_time_and_all_is_closed(optics: Any, opener: Opener) -> None:
    with opener(access={"timeout_s": 30.0}) as device:
        device._access.timeout_s = 0.2
        optics.hang_s = 0.6
        refuses(DeviceTimeout, "did not answer within 0.2 s", device.project, torch.ones(1, N_INPUTS))


def test_dead_columns_and_hot_pixels_are_no_outputs(optics: Any, opener: Opener) -> None:
    def taken() -> list[tuple[int, int]]:
        with opener(setup=None) as device:
            row, column, _, columns = device.setup.roi
            places = [divmod(int(place), columns) for place in device.setup.outputs]
        return [(row + r, column + c) for r, c in places]

    first = taken()
    dead = {column for _, column in first[::5]}
    hot = sorted({(row, column) for row, column in first if column not in dead})[:12]
    optics.dead_columns, optics.hot_pixels = tuple(sorted(dead)), tuple(hot)
    found = taken()
    assert not {column for _, column in found} & dead
    assert not set(found) & set(hot)


def test_the_matrix_is_kept_and_forgotten_with_its_setup(optics: Any, opener: Opener, tmp_path: Path) -> None:
    with opener(setup=str(tmp_path)) as device:
        with pytest.raises(CapabilityMissing):
            device.require("matrix")
        b = device.measure_matrix(3)
        assert (b.shape, b.dtype) == ((N_OUTPUTS, N_INPUTS), torch.float32)
        x = reference_vectors(400, N_INPUTS)
        x[:, 1::3] = 0
        left = device.project(x) - x @ b.T
        shown = float(x.square().sum(1).mean())
        error = float(device.noise.variance_at(shown).mean()) + float(  # of the reading, and of the matrix
            device.noise.variance_at(N_INPUTS).mean()
        ) * shown / (3 * 16)
        assert abs(float(left.square().mean()) / error - 1) < 0.25
    with opener(setup=str(tmp_path)) as device:
        assert "matrix" in device.capabilities
        assert torch.equal(device.require("matrix").matrix(), b)
    (tmp_path / f"{N_INPUTS}x{N_OUTPUTS}.npz").unlink()
    with opener(setup=str(tmp_path)) as device:
        assert "matrix" not in device.capabilities


def test_entries_are_those_of_the_medium(optics: Any, opener: Opener) -> None:
    """B_ji = Re(conj(U_j) (field of input i less their mean)), from the optical bench itself."""
    with opener() as device:
        b = device.measure_matrix(8).double().numpy()
        setup, layout = device.setup, device.setup.layout
    medium = optics._medium_at(setup.roi)[:, setup.outputs]
    switched = layout.mirrors(layout.data(np.eye(N_INPUTS))).reshape(N_INPUTS, -1).astype(float)
    anchor = layout.mirrors(layout.anchor()).ravel().astype(float)
    fields = (1 - optics.leak) * switched @ medium  # (inputs, outputs)
    whole = ((1 - optics.leak) * anchor + 2 * optics.leak) @ medium
    error = math.sqrt(float(device.noise.variance_bounds()[1].mean()) / (8 * 16))

    def apart(centre: float) -> float:
        """Root mean square of B less the optical bench's, scaled to its size."""
        expected = (np.real(whole.conj() * fields) - centre * np.abs(whole) ** 2).T / np.abs(whole)[:, None]
        return float(np.sqrt(np.mean((b - expected * (b.std() / expected.std())) ** 2)))

    assert apart(1 / layout.mirrors_of_anchor) < error + 0.08  # 10 grains a side tell the light to 10 %
    assert apart(0.0) > error + 0.16
    assert abs(float(np.mean(b**2)) - 1) < 5 * math.sqrt(2 / b.size)


def test_entries_of_a_row_correlate_as_their_sum_with_the_reference_asks(optics: Any, opener: Opener) -> None:
    """By -1 / (M - 1)."""
    with opener(n_outputs=200, setup=None) as device:
        b, m = device.measure_matrix(8).double(), device.setup.layout.mirrors_of_anchor
    pairs = (b.sum(1) ** 2 - (b**2).sum(1)) / (N_INPUTS * (N_INPUTS - 1) * b.square().mean())
    error = float(pairs.std()) / len(pairs) ** 0.5
    assert abs(float(pairs.mean()) + 1 / (m - 1)) < 5 * error
    for planted in (0.0, -1 / (N_INPUTS - 1)):  # independent; a row's sum is zero without the reference
        assert abs(float(pairs.mean()) - planted) > 5 * error


def test_the_transmission_matrix_foretells_intensities(optics: Any, opener: Opener) -> None:
    draw = torch.Generator().manual_seed(5)
    frames = torch.randint(0, 2, (60, N_INPUTS), generator=draw)
    with opener() as device:
        t, sine = device.measure_transmission(4)
        shown = device.intensities(frames) - device.intensities(torch.zeros_like(frames)).mean(0)
    assert (t.shape, t.dtype) == ((N_OUTPUTS, N_INPUTS), torch.complex64)
    known = sine > 0.3
    assert float(known.float().mean()) > 0.5
    told = (frames.to(t.dtype) @ t.T).abs().square()[:, known]
    measured = shown[:, known]
    assert float((told - measured).square().mean() / measured.square().mean()) < 0.04
    real = (frames.to(t.dtype) @ t.real.to(t.dtype).T).abs().square()[:, known]  # without the second anchor
    assert float((real - measured).square().mean() / measured.square().mean()) > 0.1


def test_phase_retrieval_foretells_the_light_of_every_output(optics: Any, opener: Opener) -> None:
    frames = torch.randint(0, 2, (60, N_INPUTS), generator=torch.Generator().manual_seed(5))
    with opener() as device:
        t, unexplained = device.retrieve_transmission()
        blank = torch.zeros(60, N_INPUTS, dtype=torch.uint8)
        measured = device.intensities(frames) - device.intensities(blank).mean(0)
        refuses(ValueError, "frames_per_input = 3: must be at least 6", device.retrieve_transmission, 3)
    assert (t.shape, t.dtype) == ((N_OUTPUTS, N_INPUTS), torch.complex64)

    def missed(told: torch.Tensor) -> torch.Tensor:
        return (told - measured).square().mean(0) / measured.square().mean(0)

    fields = frames.to(t.dtype)
    assert float(missed((fields @ t.T).abs().square()).median()) < 0.01
    assert float((missed((fields @ t.T).abs().square()) < 0.05).float().mean()) > 0.95
    assert float(unexplained.median()) < 0.01
    real = missed((fields @ t.real.to(t.dtype).T).abs().square())  # planted: phases left out
    assert float(real.median()) > 0.1


def test_the_noise_is_measured_and_credits_nothing(optics: Any, opener: Opener) -> None:
    with opener() as device:
        assert isinstance(device.noise, MeasuredNoise)
        assert not device.noise.variance_bounds()[0].any()
        y = device.draw((400, N_OUTPUTS)).double().numpy()
        assert abs(y.var(axis=0, ddof=1).mean() / device.noise.variance_at(0).mean() - 1) < 0.2
        told = "'bench'. computes no reading_variance .* device.described_noise"
        refuses(CapabilityMissing, told, device.reading_variance, torch.zeros(1, N_INPUTS))
    mine = BenchDevice(device.description, patterns=object, grabber=object)
    refuses(NoiseUnknown, r"its noise is measured when it opens; call open\(\)", lambda: mine.noise)


def test_steps_that_nothing_watches_are_told_once(optics: Any, opener: Opener, caplog: Any) -> None:
    told = "nothing watches the bench, .* add .monitor. .*every_steps=10., or give open_bench monitor="
    with opener() as device:
        device.project(torch.ones(1, N_INPUTS))
        assert "nothing watches" not in caplog.text
        for step in range(3):
            device.seek(step)
    assert len(re.findall(told, caplog.text)) == 1
    caplog.clear()
    with opener(monitor={"every_steps": 5, "baseline_readings": 8}) as device:
        device.seek(1)
    assert "nothing watches" not in caplog.text


@pytest.mark.parametrize(("power", "told"), [(0.7, "light"), (2.5, "saturated in a frame")])
def test_the_monitor_compares_two_of_its_looks(power: float, told: str, optics: Any, opener: Opener) -> None:
    def checked(steps: range) -> None:
        for step in steps:
            device.seek(step)

    with opener(monitor={"every_steps": 1, "baseline_readings": 8}) as device:
        checked(range(3))
        optics.power = power
        device.project(reference_vectors(4, N_INPUTS))  # which looks at no light
        refuses(DeviceFault, told, checked, range(3, 20))


def test_every_pattern_shown_is_counted_and_a_pulse_too_many_is_seen(optics: Any, opener: Opener) -> None:
    optics.pulses = 0
    with opener() as device:
        assert device.usage.frames == optics.pulses
        optics.stale_frames.add(optics.pulses + 23)  # the sequence is shown again
        device.project(reference_vectors(12, N_INPUTS))
        assert device.repeated_sequences == 1
        assert device.usage.frames == optics.pulses
    with opener() as device:
        device.project(reference_vectors(1, N_INPUTS))
        device._source._last -= 1  # type: ignore[union-attr,operator]  # a frame without a pulse
        device.project(reference_vectors(1, N_INPUTS))
        assert device.repeated_sequences == 1


def test_grains_are_found_along_both_axes() -> None:
    """Speckle of a rectangular pupil: |mu|^2 = sinc^2, below 0.05 from 0.8 of its first zero on."""
    draw = np.random.default_rng(3)
    rows, columns, half = 96, 80, (8, 5)  # of the pupil, in steps of 1 / 96 and 1 / 80 cycles per pixel
    spectrum = np.zeros((24, rows, columns), dtype=complex)
    parts = draw.standard_normal((2, 24, 2 * half[0], 2 * half[1]))
    spectrum[:, : 2 * half[0], : 2 * half[1]] = parts[0] + 1j * parts[1]
    frames = np.abs(np.fft.ifft2(spectrum)) ** 2
    frames *= 200 / frames.mean()
    first, second = (draw.poisson(frames) for _ in range(2))
    assert grain_spacing(first, second, name="x") == (5, 7)
    same = draw.poisson(100.0, (2, 24, 40, 40))
    refuses(DeviceFault, "frames do not depend on the patterns", grain_spacing, *same, name="x")


def test_mirrors_are_assigned_evenly() -> None:
    layout = mirror_layout((100, 90), 10, macro_pixel=8, reference_share=0.5, name="x", window=(64, None))
    counts = np.bincount(layout.owner[layout.owner >= 0])
    assert (layout.owner.shape, layout.corner) == ((8, 11), (18, 1))
    assert counts.tolist() == [4] * 10 + [40]
    assert layout.mirrors_of_anchor == 20
    x = np.array([[1, -1, 0, 0, 0, 0, 0, 0, 0, 1]])
    p, rest, n, others = layout.mirrors(layout.ternary(x)).astype(int)
    anchor = layout.mirrors(layout.anchor())[0]
    assert (p + rest).tolist() == anchor.tolist() == (n + others).tolist()
    assert (p.sum(), n.sum(), anchor.sum()) == (8 * 64, 4 * 64, 80 * 64)
    assert not anchor[:18].any()
    settings = {"macro_pixel": 8, "reference_share": 0.5, "name": "x"}
    refuses(ConfigError, "macro_pixel: is 8: .* 132 blocks, 66 of", mirror_layout, (100, 90), 200, **settings)


def test_cameras_of_fewer_bits_are_read(optics: Any, opener: Opener, modules: Modules) -> None:
    optics.bits, optics.black_dn = 8, 4.0
    with opener(setup=None, grabber=changed(modules["my_bench"].Camera, bits=fixed(8))) as device:
        assert device.setup.levels_dn[1] == pytest.approx(0.15 * 2**8, rel=0.25)
        b = device.measure_matrix(2).clone()
        assert projected(device, reference_vectors(40, N_INPUTS), b) < 1.5


def test_a_binned_camera_is_read(opener: Opener) -> None:
    with opener(setup=None, binning=2, n_outputs=20) as device:
        rows, columns = device.setup.roi[2:]
        assert max(device.setup.outputs) < rows * columns / 4
        assert device.project(torch.ones(1, N_INPUTS)).shape == (1, 20)


def test_a_setup_that_is_lost_is_told(optics: Any, opener: Opener, caplog: pytest.LogCaptureFixture) -> None:
    opener().close()
    assert "not kept" not in caplog.text
    opener(setup=None).close()
    assert "its setup is not kept, so its matrix is another one in the next process" in caplog.text


def test_a_setup_and_its_parts_are_shown_in_one_line(optics: Any, opener: Opener) -> None:
    with opener() as device:
        setup, look = device.setup, look_at_light(device._source, device.setup.outputs)
    sizes = f"inputs={N_INPUTS}, outputs={N_OUTPUTS}"
    for value, told in (
        (setup, rf"{sizes}, exposure=165 us, roi=\(.*, levels=2.\.. to 5..\.. DN\)"),
        (
            setup.layout,
            rf"inputs={N_INPUTS}, blocks=6 x 8, macro_pixel=4, corner=\(0, 0\), mirrors=24 x 32\)",
        ),
        (look, rf"outputs={N_OUTPUTS}, anchor=.* DN, full=0.00%, interference=0\.[0-9]+\)"),
    ):
        assert re.fullmatch(rf"{type(value).__name__}\(.*{told}", repr(value)), repr(value)
        assert len(repr(value)) < 200


TEXT = (OWN / "my_bench.toml").read_text()


@pytest.fixture
def described(optics: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The description of the page, beside the laboratory's code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_bench.toml").write_text(TEXT)
    monkeypatch.setenv("OPUSIM_LOCKS", str(tmp_path / "locks"))
    return tmp_path


def test_a_description_opens_what_it_names(described: Path) -> None:
    options = {**WINDOW, "bench": {"region_step": 4}}
    with open_device("my_bench.toml", **options) as device:
        assert isinstance(device, BenchDevice)
        first = device.setup
    assert [file.name for file in (described / "my_bench_setup").iterdir()] == [f"{N_INPUTS}x{N_OUTPUTS}.npz"]
    with open_device("my_bench.toml", **options) as device:
        assert np.array_equal(device.setup.scale, first.scale)  # type: ignore[attr-defined]
    other = options | {"bench": {"region_step": 4, "macro_pixel": 4}}
    told = "bench.setup: .* was measured with other mirrors, .* anew, or give another bench.setup"
    refuses(ConfigError, told, open_device, "my_bench.toml", **other)
    kept = described / "my_bench_setup" / f"{N_INPUTS}x{N_OUTPUTS}.npz"
    kept.write_bytes(kept.read_bytes()[:1000])
    refuses(ConfigError, "is no setup of this version .* remove it", open_device, "my_bench.toml", **options)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"bench": {"grabber": "nowhere:Camera"}}, "does not import .* run where nowhere.py lies"),
        ({"bench": {"grabber": "my_bench:Kamera"}}, "'my_bench' has no function or class 'Kamera'"),
        ({"bench": {"grabber": "my_bench"}}, "'my_bench' names no factory; write module:name"),
        ({"bench": {"grabber": ""}}, "patterns and grabber belong together"),
        ({"bench": {"grabber": "lab_of_mine:Camera"}}, "'no_such_driver'.*; install no_such_driver"),
        ({"bench": {"patterns": "", "grabber": ""}}, "bench.patterns: names no instrument"),
        ({"bench": {"macro_pixel": 20}}, "bench.macro_pixel: is 20: the window has 1 blocks, 0 of them"),
        ({"bench": {"window_rows": 2000}}, "bench.window_rows: is 2000, the array has 24; make it smaller"),
        ({"bench": {"readout_us": 1000.0}}, "bench.readout_us: is 1000 us, which leaves no exposure"),
        ({"frames": {"frames_per_projection": 2}}, "frames.frames_per_projection: 2: a bench shows 4"),
        (
            {"noise": {"sigma": 3.0}},
            "does nothing: .* bench.exposure_us changes it; leave noise .--sigma. out",
        ),
        ({"medium": {"seed": 1}}, "medium: is a simulation's, and the kind 'bench' drives hardware"),
    ],
)
def test_an_unusable_description_says_what_to_write(changes: dict, told: str, described: Path) -> None:
    (described / "lab_of_mine.py").write_text("import no_such_driver\n")
    refuses(ConfigError, told, open_device, "my_bench.toml", **WINDOW, **changes)


def test_two_functions_without_triggers_or_frame_numbers_make_a_bench(optics: Any, monkeypatch: Any) -> None:
    lab: Any = ModuleType("lab")
    lab.show = lambda pattern: setattr(lab, "shown", pattern)
    lab.read_frame = lambda: optics.expose(lab.shown[None], (0, 0, *optics.sensor), 150.0)[0]
    monkeypatch.setitem(sys.modules, "lab", lab)
    monkeypatch.setitem(sys.modules, "two_functions", None)
    del sys.modules["two_functions"]
    mine = importlib.import_module("two_functions")
    sizes = {**WINDOW, "exposure_us": 150.0}
    with open_bench(mine.Mirrors, mine.Camera, **sizes, **SETTINGS) as device:
        matrix = device.measure_matrix(16)
        x = torch.eye(N_INPUTS)[:4]
        read = torch.stack([device.project(x) for _ in range(16)]).mean(dim=0)
        error = read - matrix[:, :4].T
        assert device.repeated_sequences == 0
    assert error.square().mean() < 0.1 * read.square().mean()
    lines = Path(mine.__file__).read_text().splitlines()
    assert sum(1 for line in lines if line) <= 20


PDFA = {"epochs": 1, "data": {"name": "digits"}, "model": {"hidden": [16]}, "trainer": {"kind": "pdfa"}}


def test_a_network_trains_from_the_description_of_a_bench_that_is_large_enough(
    described: Path, optics: Any
) -> None:
    device = {"name": "my_bench.toml", "bench": {"region_step": 4}}
    run = opusim.train({**PDFA, "device": device}, folder=described / "run")
    assert run.summary["test_accuracy"] > 0.1  # type: ignore[index]
    assert run.facts["noise_repeats"] is False
    note = run.fresh_noise_note
    assert re.fullmatch("The noise of device 'my_bench' comes from no seed, so a repetition .*", note)
    page = write_report(run).read_text()
    assert note in html.unescape(page)
    assert "A simulation" not in page
    before, device = optics.pulses, {"name": "my_bench.toml", "n_outputs": 15}
    told = "n_outputs: is 15, and this run's network needs 16; make the network smaller, .*model.hidden"
    refuses(ConfigError, told, opusim.train, {**PDFA, "device": device}, folder=described / "small")
    assert optics.pulses == before


def test_a_calibration_without_a_law_says_that_training_needs_none(described: Path) -> None:
    text = TEXT.replace("macro_pixel", "region_step = 4\nmacro_pixel")
    (described / "my_bench.toml").write_text(text)
    words = ["calibrate", "my_bench.toml", "--inputs", "8", "--outputs", "16", "--readings", "40"]
    told = run_device(*words, "--out", "certificate", code=3)
    for each in ("certified noise: none\n", "training needs no law", "does not hold ("):
        assert each in told


def test_commands_for_simulations_open_no_instrument(described: Path, optics: Any) -> None:
    before, told = optics.pulses, "is hardware, whose temperature is set at the instrument"
    words = ("record", "my_bench.toml", "--out", "frames")
    device_refuses(ConfigError, "record with your camera's own software", *words)
    device_refuses(ConfigError, told, "temperature", "my_bench.toml")
    assert optics.pulses == before
