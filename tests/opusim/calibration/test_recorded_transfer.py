"""Constants of recorded frames against sensors of an independent generator, and frames that break the law."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opusim.calibration.frames import COUNT, VARIANCE, Estimate
from opusim.calibration.recorded import inspected, levels_of
from opusim.calibration.recorded_transfer import RecordedTransfer, reduced, require_lawful
from opusim.errors import ConfigError
from tests.opusim.common import refuses
from tests.oracles.sensor_frames import SENSORS, Pixels, Sensor, recording

CONFIDENCE = 0.95
REQUIRED = ("gain_dn_per_e", "read_noise_e", "dark_current_e_per_s", "saturation_e")
KEYS = (*REQUIRED, "black_level_dn", "prnu", "dsnu_e", "dark_spread_e_per_s", "quantum_efficiency")
SMALL = {"frames": 4, "levels": 8, "shape": (24, 40)}
Arrays = dict[str, np.ndarray]
Estimator = Callable[[RecordedTransfer], dict[str, Estimate]]


def transfer_of(arrays: Arrays) -> RecordedTransfer:
    levels, bits = levels_of(Path("frames.npz"), arrays)
    return reduced(inspected(Path("frames.npz"), "arrays", levels, bits))


def evaluated(transfer: RecordedTransfer) -> dict[str, Estimate]:
    require_lawful(transfer)
    return transfer.estimates(CONFIDENCE)


def pixel_spread_left_in_the_variance(transfer: RecordedTransfer) -> dict[str, Estimate]:
    """A planted fault: variances are taken over frames and pixels together."""
    levels = []
    for each, spread in zip(transfer.levels, transfer.spatial_dn2(transfer.total), strict=True):
        sums = each.sums.copy()
        sums[:, VARIANCE] += spread * sums[:, COUNT]
        levels.append(replace(each, sums=sums))
    return replace(transfer, levels=tuple(levels)).estimates(CONFIDENCE)


def rounding_left_in_the_read_noise(transfer: RecordedTransfer) -> dict[str, Estimate]:
    """A planted fault: the converter's 1/12 counts as read noise."""
    found = transfer.estimates(CONFIDENCE)
    more = 1 / 12 / found["gain_dn_per_e"].value ** 2
    moved = {key: (value**2 + more) ** 0.5 for key, value in vars(found["read_noise_e"]).items()}
    return found | {"read_noise_e": Estimate(**moved)}


def hits(sensor: Sensor, seed: int, draws: int, estimate: Estimator = evaluated, **size: object) -> Arrays:
    """Whether the limits of each constant held the truth, for each draw of a specimen and its frames."""
    found: dict[str, list[bool]] = {key: [] for key in KEYS}
    own = [*SENSORS.values()].index(sensor)
    for draw in range(draws):
        estimates = estimate(transfer_of(recording(sensor, np.random.default_rng([seed, own, draw]), **size)))
        for key in KEYS:
            found[key].append(estimates[key].covers(sensor.truth()[key]))
    return {key: np.array(each) for key, each in found.items()}


def rate_fits(held: np.ndarray) -> bool:
    """Two-sided, five standard errors of the binomial."""
    return bool(abs(held.mean() - CONFIDENCE) <= 5 * (CONFIDENCE * (1 - CONFIDENCE) / held.size) ** 0.5)


@pytest.mark.slow
def test_limits_hold_95_of_100_times_on_twelve_sensors(seed: int) -> None:
    found = {name: hits(sensor, seed, 100) for name, sensor in SENSORS.items()}
    for name, held in found.items():
        print(name, {key: float(each.mean()) for key, each in held.items()})
    for key in KEYS:
        for name, held in found.items():
            assert rate_fits(held[key]), (name, key, held[key].mean())
        assert rate_fits(np.concatenate([held[key] for held in found.values()])), key


def test_limits_hold_on_twelve_sensors_and_pairs_of_frames_are_enough(seed: int) -> None:
    found = [hits(sensor, seed, 1, **SMALL) for sensor in SENSORS.values()]
    for key in KEYS:
        assert rate_fits(np.concatenate([held[key] for held in found])), key
    arrays = recording(Sensor(), np.random.default_rng(seed), frames=2, levels=10, shape=(40, 50))
    found, truth = evaluated(transfer_of(arrays)), Sensor().truth()
    for key in KEYS:
        assert abs(found[key].value - truth[key]) < 2 * (found[key].high - found[key].low), key


@pytest.mark.parametrize(
    ("name", "estimate", "key"),
    [
        ("uneven, 12 bits", pixel_spread_left_in_the_variance, "gain_dn_per_e"),
        ("noise below a code, 8 bits", rounding_left_in_the_read_noise, "read_noise_e"),
    ],
)
def test_a_planted_fault_of_an_estimate_is_found(name: str, estimate: Estimator, key: str, seed: int) -> None:
    assert not rate_fits(hits(SENSORS[name], seed, 4, estimate, **SMALL)[key])


def test_a_linear_sensor_shows_no_linearity_error_and_a_bent_one_does(seed: int) -> None:
    arrays = recording(Sensor(), np.random.default_rng(seed))
    found = evaluated(transfer_of(arrays))["linearity_error"]
    assert found.low == 0
    assert found.high < 1e-3
    # 2 % less at the full well, so that the line's residuals are of the parabola 0.02 x (1 - x)
    lit = arrays["flat"] - 100.0
    arrays["flat"] = np.rint(100 + lit * (1 - 0.02 * lit / 3500)).astype(np.uint16)
    found = evaluated(transfer_of(arrays))["linearity_error"]
    assert 5e-4 < found.low < found.high < 0.01


def test_a_dark_pattern_narrower_than_a_code_is_not_taken_for_none(seed: int) -> None:
    sensor = Sensor(bits=8, gain=0.019, black=4.0, read=13.0, dark=125.0, well=13_300, dsnu=10.0)
    size = {"frames": 4, "levels": 20, "shape": (60, 80), "longest_s": 0.004}
    arrays = recording(sensor, np.random.default_rng(seed), **size)
    transfer = transfer_of(arrays)
    found, remarks = transfer.estimates(CONFIDENCE), require_lawful(transfer)
    assert abs(found["dsnu_e"].value - 10) < 2 * (found["dsnu_e"].high - found["dsnu_e"].low)
    assert found["dsnu_e"].low > 5
    assert "dark_current_e_per_s" not in found
    assert any("rise by less than rounding may hide" in remark for remark in remarks)


def test_what_frames_do_not_tell_is_left_out_and_said(seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = recording(Sensor(), rng, **SMALL)
    unlit = {key: each for key, each in arrays.items() if key != "flat_photons"}
    one = unlit | {key: arrays[key][:1] for key in ("dark", "dark_exposure_us")}
    one["flat"] = arrays["flat"][:-1]
    one["flat_exposure_us"] = np.full(7, arrays["dark_exposure_us"][0])
    transfer = transfer_of(one)
    remarks = require_lawful(transfer)
    missing = ("dark_current_e_per_s", "saturation_e", "linearity_error")
    assert {text.partition(":")[0] for text in remarks} == {f"no {key}" for key in missing}
    assert not {*missing, "quantum_efficiency"} & set(transfer.estimates(CONFIDENCE))
    assert "lamp is taken to be steady" in " ".join(require_lawful(transfer_of(unlit)))


def test_light_that_changed_between_levels_is_not_blamed_on_the_camera(seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = recording(Sensor(), rng, **SMALL)
    pixels, seconds = Pixels(Sensor(), rng, SMALL["shape"]), arrays["flat_exposure_us"] * 1e-6
    lamp = arrays["flat_photons"] * np.tile([0.8, 1.2], 4)
    flat = np.stack([pixels.take(p, t, 4) for p, t in zip(lamp, seconds, strict=True)])
    dark = np.stack([pixels.take(0.0, t, 4) for t in seconds])
    transfer = transfer_of(arrays | {"flat": flat, "dark": dark})
    assert "it is the light that changed between levels, not the camera" in " ".join(require_lawful(transfer))
    found = transfer.estimates(CONFIDENCE)
    assert abs(found["gain_dn_per_e"].value - 1) < found["gain_dn_per_e"].high - found["gain_dn_per_e"].low
    assert "quantum_efficiency" not in found


def curve(exponent: float, top: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda dn: np.rint(top * (dn / 4095.0) ** exponent).astype(np.uint16)


def drift(dn: np.ndarray) -> np.ndarray:
    """Fall by 3 % from the first frame of a level to the last."""
    factors = 1 - 0.03 * np.arange(dn.shape[1]) / (dn.shape[1] - 1)
    return np.rint(dn * factors[None, :, None, None]).astype(np.uint16)


def averaged(dn: np.ndarray) -> np.ndarray:
    """A camera's recursive noise reduction."""
    found = dn.astype(float)
    for frame in range(1, dn.shape[1]):
        found[:, frame] = (found[:, frame - 1] + found[:, frame]) / 2
    return np.rint(found).astype(np.uint16)


def quieter(dn: np.ndarray) -> np.ndarray:
    """Whole numbers whose noise is half as large, as of frames that were averaged and rounded."""
    mean = dn.mean(axis=1, keepdims=True)
    return np.rint(mean + (dn - mean) / 2).astype(np.uint16)


def interpolated(dn: np.ndarray) -> np.ndarray:
    return ((dn.astype(int) + np.roll(dn, 1, axis=-1)) // 2).astype(np.uint16)


def compressed(dn: np.ndarray) -> np.ndarray:
    """Each frame to 8 bits and through JPEG."""
    found = np.empty(dn.shape, np.uint8)
    for place in np.ndindex(dn.shape[:2]):
        file = io.BytesIO()
        Image.fromarray((dn[place] >> 4).astype(np.uint8)).save(file, "JPEG", quality=90)
        found[place] = np.asarray(Image.open(file))
    return found


def repeated(dn: np.ndarray) -> np.ndarray:
    found = dn.copy()
    found[2, 2] = found[2, 1]
    return found


BOTH, FLAT = ("dark", "flat"), ("flat",)
BROKEN = {
    "gamma": (BOTH, curve(1 / 2.2, 4095), 12, r"\d of what a straight line .*switch off gamma"),
    "a square root": (BOTH, curve(0.5, 4095), 12, "the variance does not rise|of what a straight line"),
    "gamma, 8 bits": (BOTH, curve(1 / 2.2, 255), 8, "means rise as the 0.[67].th power of the light"),
    "tone curve, 8 bits": (BOTH, curve(0.8, 255), 8, "the camera changes numbers after the converter"),
    "drift": (FLAT, drift, 12, r"flat frames fall by \d\.\d% over its 4 frames.*they drift"),
    "noise reduction": (BOTH, averaged, 12, "switch off its temporal noise reduction"),
    "interpolation": (BOTH, interpolated, 12, "neighbouring pixels correlates by 0.5.*were interpolated"),
    "JPEG": (BOTH, compressed, 8, "were compressed in blocks of 8 x 8, as JPEG does"),
    "digital gain": (BOTH, lambda dn: dn * 3, 14, r"6\d% of the codes never occur: numbers were scaled"),
    "black level": (BOTH, lambda dn: np.maximum(dn, 100) - 100, 12, "the black level is cut off"),
    "a frame twice": (FLAT, repeated, 12, "frame 3 repeats the one before"),
    "one frame": (FLAT, lambda dn: dn[:, :1], 12, "1 frame; the noise needs two or more at each level"),
    "averages": (BOTH, lambda dn: dn / 2 + 0.25, 12, "holds fractions, so frames were averaged"),
    "averaged and rounded flats": (
        FLAT,
        quieter,
        12,
        "flat frames without the dark ones lie on one, so they were averaged",
    ),
    "saturation": (FLAT, lambda dn: np.broadcast_to(dn[-1:], dn.shape), 12, "8 lie at the end of the range"),
}


@pytest.fixture(scope="module")
def sound() -> Arrays:
    return recording(Sensor(), np.random.default_rng(20261128), **SMALL)


@pytest.mark.parametrize("fault", list(BROKEN))
def test_frames_that_break_the_law_are_refused_by_their_cause(fault: str, sound: Arrays) -> None:
    which, change, bits, words = BROKEN[fault]
    broken = sound | {key: change(sound[key]) for key in which} | {"bits": np.array(bits)}
    refuses(ConfigError, words, lambda: require_lawful(transfer_of(broken)))


def test_sound_frames_are_taken_and_dark_ones_at_one_exposure_not(sound: Arrays) -> None:
    assert require_lawful(transfer_of(sound)) == ()
    one = {"dark": sound["dark"][:1], "dark_exposure_us": sound["dark_exposure_us"][:1]}
    refuses(ConfigError, "has one exposure, and flat frames others", require_lawful, transfer_of(sound | one))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dark": np.zeros((1, 2, 9, 9), np.uint8)}, "dark_exposure_us: must hold 1 numbers"),
        ({"dark": np.zeros((0, 2, 9, 9), np.uint8), "dark_exposure_us": np.zeros(0)}, "dark: has no frames"),
    ],
)
def test_recordings_without_what_they_need_are_refused(change: Arrays, words: str, sound: Arrays) -> None:
    refuses(ConfigError, words, transfer_of, sound | change)
