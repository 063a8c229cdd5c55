"""The faults of a real instrument: what each does to B, to moments and to the law is what the twin states."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from opusim.devices.camera import CameraDevice
from opusim.devices.registry import open_device
from opusim.errors import ConfigError, NoiseUnknown
from opusim.noise import FluctuatingCountNoise
from tests.opusim.common import (
    SILENT,
    binary_rows,
    boxes_hold,
    moments_agree,
    refuses,
    ternary,
)

POWER = {"law": "log_normal", "rms": 0.02}
AVERAGED = {"law": "gaussian", "rms": 0.15, "correlation_us": 60_000.0, "averages": True}
LINEAR: dict[str, dict[str, Any]] = {
    "stuck on": {"mirrors": {"stuck_on": 0.1}},
    "stuck off": {"mirrors": {"stuck_off": 0.1}},
    "contrast": {"mirrors": {"contrast": 50.0}},
    "all mirrors": {"mirrors": {"stuck_on": 0.05, "stuck_off": 0.05, "contrast": 50.0}},
    "leaks": {"mirrors": {"contrast": 20.0, "leak_speckle": True}},
    "all leaks": {"mirrors": {"stuck_on": 0.1, "stuck_off": 0.1, "contrast": 20.0, "leak_speckle": True}},
    "hot": {"pixels": {"hot_share": 0.05, "hot_factor": 100.0}},
    "dead": {"pixels": {"dead_share": 0.05}},
    "dark currents": {"pixels": {"dcnu": 0.3}},
    "cross-talk": {"pixels": {"crosstalk": 0.05, "dead_share": 0.02}},
    "gains": {"pixels": {"gain_spread": 0.1}},
    "ambient": {"light": {"ambient_flux_per_s": 50.0}},
}
NOISY = {
    "power": {"light": {"power": POWER | {"rms": 0.1}}},
    "gaussian power": {"light": {"power": {"law": "gaussian", "rms": 0.1}}},
    "correlated power": {"light": {"power": POWER | {"rms": 0.1, "correlation_us": 500_000.0}}},
    "averaged power": {"light": {"power": AVERAGED}},
    "nonlinearity": {"pixels": {"nonlinearity": 0.1}},
    "read noises": {"pixels": {"read_noise_spread": 0.8}, "sensor": {"read_noise_e": 12.0}},
    "gains": {"pixels": {"gain_spread": 0.1}},
    "rows and columns": {"pixels": {"row_noise_e": 9.0, "column_noise_e": 6.0}, "sensor": {"row_pixels": 16}},
    "telegraph": {"pixels": {"telegraph_share": 0.2, "telegraph_e": 60.0, "telegraph_us": 200_000.0}},
}


SOME = ["modes", "all mirrors", "all leaks", "hot", "cross-talk", "ambient", *NOISY]
EFFECTS = {"sound": {}, "modes": {"speckle_modes": 2}, **LINEAR, **NOISY}
PLACES = {"n_inputs": 20, "n_outputs": 400, "seed": 3}


def device(camera: dict[str, Any], **window: int) -> CameraDevice:
    return open_device("camera_low_light", camera=camera, **PLACES | window)


@pytest.mark.parametrize("effect", list(LINEAR))
def test_without_noise_readings_are_the_matrix_times_the_vector(effect: str, seed: int) -> None:
    x = ternary(6, 20, seed)
    with device(LINEAR[effect] | {"sensor": SILENT}) as twin, device({"sensor": SILENT}) as sound:
        ideal = x.double() @ twin.matrix().double().T
        torch.testing.assert_close(twin.project(x).double(), ideal, rtol=0, atol=1e-4)
        torch.testing.assert_close(twin.reading_mean(x), ideal, rtol=0, atol=1e-4)
        if effect not in ("hot", "dark currents", "ambient"):
            assert not torch.allclose(twin.matrix(), sound.matrix(), atol=1e-3)


@pytest.mark.compiled
@pytest.mark.parametrize("effect", SOME)
def test_moments_of_readings_are_those_that_the_twin_states(effect: str, seed: int) -> None:
    x = ternary(2, 20, seed)
    with device(EFFECTS[effect], n_outputs=60) as twin:
        mean, variance = twin.reading_mean(x), twin.reading_variance(x)
        assert moments_agree(twin, x, mean, variance)
        assert not moments_agree(twin, x, mean, 1.25 * variance)
        if effect in NOISY:
            with device({}, n_outputs=60) as sound:
                assert not moments_agree(twin, x, sound.reading_mean(x), sound.reading_variance(x))


@pytest.mark.parametrize("effect", EFFECTS)
def test_rates_of_all_frames_lie_in_the_boxes(effect: str) -> None:
    with device(EFFECTS[effect], n_inputs=8, n_outputs=50) as twin:
        rates, high = boxes_hold(twin, binary_rows(8), tight=0.6)
    most = rates[:2].max(axis=1)
    assert np.median(high[:2, 0][most > 0] / most[most > 0]) < (2.5 if effect == "modes" else 1.6)


@pytest.mark.parametrize("effect", [*LINEAR, "power"])
def test_frames_of_the_anchor_and_of_patterns_show_their_expected_electrons(effect: str) -> None:
    with device(EFFECTS[effect]) as twin:
        exposure = twin.exposure
        field = twin.speckle.fields(torch.eye(20)[:1]).double().numpy()[:, 0]
        light = {
            "anchor": (twin.anchor_frames(400), twin.anchor_light_e),
            "one": (twin.intensities(torch.eye(20)[[0] * 400]).numpy(), exposure.light_of((field**2).sum(0))),
        }
        for frames, expected in light.values():
            electrons = (frames.mean(axis=0, dtype=np.float64) - 100) / exposure.gain_dn
            electrons -= exposure.offset_e + exposure.dark_e
            errors = np.sqrt((expected + exposure.dark_e + 1.6**2 + 1 / 12) / 400)
            common = 0.1 / 400**0.5 if effect == "power" else 0.0
            off = (electrons - expected) / np.hypot(errors, common * expected)
            assert np.abs(off).max() < 6 < np.abs(off + 0.3 * expected / errors).max()


def test_ambient_light_earns_no_privacy_and_fluctuating_power_has_no_law() -> None:
    with device(LINEAR["ambient"]) as lit, device({}) as dark:
        np.testing.assert_array_equal(np.asarray(lit.noise.rate_low), np.asarray(dark.noise.rate_low))
        assert np.all(np.asarray(lit.noise.rate_high) > np.asarray(dark.noise.rate_high))
    with device(NOISY["power"]) as twin, pytest.raises(ConfigError, match=r"camera\.light\.power"):
        twin.count_law(torch.eye(20))


@pytest.mark.parametrize("power_law", ["log_normal", "gaussian"])
def test_one_power_scales_all_pixels_of_a_frame(power_law: str) -> None:
    """In frames of the anchor, of uniform light and of binary patterns: variance and correlation of frame means."""
    power = {"law": power_law, "rms": 0.05, "correlation_us": 210_000 / np.log(4)}
    with device({"light": {"power": power}, "pixels": {"nonlinearity": 0.0}}, n_outputs=2000) as twin:
        exposure = twin.exposure
        black = 100 + exposure.offset_e.mean() + exposure.dark_e.mean()
        seen = twin.intensities(torch.ones(2000, 20)).numpy(), twin.speckle.fields(torch.ones(1, 20)).double()
        light = {
            "anchor": (twin.anchor_frames(2000), twin.anchor_light_e.mean()),
            "uniform": (twin.flat_frames(2000, photons=400.0), 320.0),
            "pattern": (seen[0], float(exposure.light_of((seen[1] ** 2).sum(0).numpy()).mean())),
        }
        assert light["anchor"][1] > light["pattern"][1]
        for frames, mean in light.values():
            w = (frames.mean(axis=1, dtype=np.float64) - black) / mean
            own = (mean + 10) / 2000 / mean**2
            # 2,000 values that correlate by a quarter of each other: half the numbers count
            assert abs(w.mean() - 1) < 5 * 0.05 * (5 / 3 / 2000) ** 0.5 + 0.002
            assert abs(w.var() / (0.0025 + own) - 1) < 5 * (2 * 1.2 / 2000) ** 0.5
            assert not abs(w.var() / (0.003 + own) - 1) < 0.1
            lag = np.corrcoef(w[1:], w[:-1])[0, 1]
            assert abs(lag - 0.25 * 0.0025 / (0.0025 + own)) < 5 / 2000**0.5


def test_power_and_drift_are_found_again_by_a_resumed_run(seed: int) -> None:
    drift = {"drift_rms": 0.1, "drift_s": 500.0, "seconds_per_step": 10.0}
    camera = {"light": {"power": POWER | drift}}
    x = ternary(3, 20, seed)
    with device(camera) as first, device(camera) as again:
        first.seek(0)
        start = first.exposure.mean_power
        for step in range(6):
            first.seek(step)
            y = first.project(x)
        again.seek(5)
        assert torch.equal(again.project(x), y)
        assert again.exposure.mean_power != start
        first.seek(10_000)
        assert not torch.equal(first.project(x), y)
        later = first.matrix() / again.matrix()
        ratio = first.exposure.mean_power / again.exposure.mean_power
        assert torch.allclose(later.median(), torch.tensor(ratio, dtype=torch.float32), rtol=1e-3)


def test_the_drift_of_the_power_is_stationary() -> None:
    drift = {"drift_rms": 0.1, "drift_s": 20.0, "seconds_per_step": 10.0}
    with device({"light": {"power": POWER | drift}}, n_outputs=10) as twin:
        means = []
        for step in range(0, 12_000, 10):  # five correlation times apart
            twin.seek(step)
            means.append(np.log(twin.exposure.mean_power))
        s = np.sqrt(np.log1p(0.01))
        z = (np.array(means) + s * s / 2) / s
        assert abs(z.mean()) < 5 / z.size**0.5
        assert abs(z.var() - 1) < 5 * (2 / z.size) ** 0.5
        assert not abs((1.3 * z).var() - 1) < 5 * (2 / z.size) ** 0.5
        law = twin.noise
        assert isinstance(law, FluctuatingCountNoise)
        assert law.power_rms == pytest.approx(((1.0004 * 1.01) - 1) ** 0.5)


def test_dropped_and_repeated_frames_are_as_frequent_as_stated_and_leave_no_law() -> None:
    camera = {"transfer": {"dropped": 0.1, "repeated": 0.2}}
    with device(camera) as twin:
        frames = twin.flat_frames(4000, photons=400.0)
        again = np.all(frames[1:] == frames[:-1], axis=1)
        black = np.all(frames == 0, axis=1)
        assert abs(black.mean() - 0.1) < 5 * (0.1 * 0.9 * 1.5 / 4000) ** 0.5
        repeats = (again & ~black[1:]).mean()
        assert abs(repeats - 0.2 * 0.9) < 5 * (0.18 * 0.82 * 1.5 / 4000) ** 0.5
        for ask in (lambda: twin.noise, lambda: twin.reading_variance(torch.ones(1, 20))):
            refuses(NoiseUnknown, r"camera\.transfer drops or repeats", ask)
    with device({}) as sound:
        assert not np.any(np.all(sound.flat_frames(50, photons=400.0) == 0, axis=1))


def test_the_anchor_is_measured_again_on_schedule_also_by_a_resumed_run(seed: int) -> None:
    x = ternary(40, 20, seed)
    drift = {"decorrelation_s": 300.0, "seconds_per_step": 1.0}
    kept = {"drift": drift | {"reanchor_steps": 100}}
    with device(kept) as first, device(kept) as again, device({"drift": drift}) as never:
        for twin, steps in ((first, (0, 50, 100, 199, 250)), (again, (250,)), (never, (250,))):
            for step in steps:
                twin.seek(step)
        y = first.project(x)
        assert torch.equal(y, again.project(x))
        now = [twin.speckle.anchor for twin in (first, never)]
        assert np.array_equal(*now)
        errors = [float((twin.recovery.anchor_dn - twin.anchor_light_e).std()) for twin in (first, never)]
        assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize(
    ("camera", "message"),
    [
        ({"light": {"power": {"law": "gaussian", "rms": 0.3}}}, "take log_normal"),
        ({"light": {"power": {"law": "uniform", "rms": 0.1}}}, "law"),
        ({"light": {"power": POWER | {"drift_rms": 0.1}}}, "belong together"),
        ({"pixels": {"hot_share": 0.1}}, "hot_share and hot_factor belong together"),
        ({"mirrors": {"stuck_on": 0.7}}, "stuck_on"),
        ({"transfer": {"dropped": 0.1, "repeatd": 0.1}}, "did you mean 'repeated'"),
        ({"dark": None, "pixels": {"dcnu": 0.1}}, r"give a section \[camera\.dark\]"),
        ({"pixels": {"telegraph_share": 0.1}}, "telegraph_share and telegraph_e belong together"),
        ({"pixels": {"telegraph_us": 5.0}}, "telegraph_us is given without telegraph_share"),
        ({"pixels": {"row_noise_e": -1.0}}, "row_noise_e: must be more than 0, got -1.0"),
        ({"light": {"power": POWER | {"averages": True, "correlation_us": 5.0}}}, "averages = true"),
        ({"light": {"power": {"law": "gaussian", "rms": 0.1, "averages": True}}}, "averages = true"),
        ({"light": {"shortest_exposure_us": 300_000.0}}, "camera.light: exposure_us = 200000"),
        ({"mirrors": {"leak_speckle": True}}, "leak_speckle = true: mirrors of infinite contrast"),
    ],
)
def test_bad_settings_are_named(camera: dict[str, Any], message: str) -> None:
    refuses(ConfigError, message, device, camera)


@pytest.mark.compiled
def test_a_vibrating_image_moves_all_pixels_together_by_its_law(seed: int) -> None:
    """Frames of the anchor: (1 - |D|) L_j + |D| L_(j +- 1), one D for a frame, correlated from frame to frame."""
    rms, frames, rho = 0.1, 4000, 0.6
    vibration = {"pointing_rms_pixels": rms, "correlation_us": 210_000 / np.log(1 / rho)}
    with device({"vibration": vibration, "sensor": SILENT}, n_outputs=50) as twin:
        exposure = twin.exposure
        field = np.sum(np.square(twin.speckle.anchor), axis=0)
        here, left, right = (exposure.gain_e * field[place] for place in exposure.places)
        shown = twin.anchor_frames(frames) - 100 - exposure.offset_e - exposure.dark_e
        sides = np.stack([left - here, right - here])
        size = np.linalg.lstsq(sides.T, (shown - here).T, rcond=None)[0]  # (2, frames): one of the two is 0
        assert np.abs(sides.T @ size - (shown - here).T).max() < 1e-2
        assert np.abs(np.min(np.abs(size), axis=0)).max() < 1e-3
        d = size[1] - size[0]
        effective = frames * (1 - rho**2) / (1 + rho**2)
        assert abs(np.mean(d**2) / rms**2 - 1) < 5 * (2 / effective) ** 0.5
        assert abs(np.mean(d**2) / (1.4 * rms) ** 2 - 1) > 5 * (2 / effective) ** 0.5
        follows = np.mean(d[1:] * d[:-1]) / np.mean(d**2)
        assert abs(follows - rho) < 5 * ((1 - rho**2) / frames) ** 0.5
        assert abs(follows) > 5 * frames**-0.5


@pytest.mark.compiled
def test_readings_of_a_vibrating_image_are_on_average_those_of_its_matrix(seed: int) -> None:
    count, x = 3000, ternary(1, 20, seed)
    vibration = {"vibration": {"pointing_rms_pixels": 0.2}, "anchor": {"frames": 0}}
    with device(vibration, n_outputs=60) as twin, device({"anchor": {"frames": 0}}, n_outputs=60) as still:
        y = twin.project(x.expand(count, -1).contiguous()).double()
        errors = y.std(0) / count**0.5
        limit = float(chi2.isf(6e-7 / 60, 1) ** 0.5)
        assert float(((y.mean(0) - (x @ twin.matrix().T)[0]) / errors).abs().max()) < limit
        assert float(((y.mean(0) - (x @ still.matrix().T)[0]) / errors).abs().max()) > limit
        refuses(NoiseUnknown, "camera.vibration moves the light of all outputs", twin.reading_variance, x)


def test_pixels_share_the_noise_of_their_row_and_column_and_jump_between_two_levels(seed: int) -> None:
    pixels = {"row_noise_e": 3.0, "column_noise_e": 2.0, "telegraph_share": 0.1, "telegraph_e": 40.0}
    camera = {
        "sensor": {"row_pixels": 20, "adc_bits": None, "shot_noise": False, "read_noise_e": 1.0},
        "pixels": pixels | {"telegraph_us": 210_000.0, "read_noise_spread": 0.5},
    }
    frames = 4000
    with device(camera, n_outputs=400, seed=seed) as twin:
        uneven = twin.exposure.uneven
        row, column, jumps = twin.pixels // 20, twin.pixels % 20, uneven.levels_e > 0
        shown = twin.flat_frames(frames).astype(np.float64)
    shown -= shown.mean(axis=0)
    still, pairs = np.flatnonzero(~jumps)[:150], np.triu_indices(150, 1)
    covariance = np.cov(shown[:, still].T)[pairs]
    one, other = still[pairs[0]], still[pairs[1]]
    # covariances in a frame: 9 of a row, 4 of a column; their errors by groups of frames
    error = 14 / np.sqrt(frames)  # of one pair; pairs share rows, so a class is no better than a few of them
    for found, expected in (
        (covariance[row[one] == row[other]], 9.0),
        (covariance[column[one] == column[other]], 4.0),
        (covariance[(row[one] != row[other]) & (column[one] != column[other])], 0.0),
    ):
        assert abs(found.mean() - expected) < 5 * error / 2 < abs(found.mean() - (expected + 3.0))
    # read noises over pixels: log-normal, with the stated root mean square
    own = shown[:, still].var(axis=0) - 13
    assert np.ptp(uneven.read_scale) > 0.5
    assert np.abs(own - uneven.read_scale[still] ** 2).max() < 6 * 14 * np.sqrt(2 / frames)
    # levels: share of the pixels, distance, and correlation by e^-1 from frame to frame
    assert abs(jumps.mean() - 0.1) < 5 * np.sqrt(0.09 / 400)
    levels = np.sign(shown[:, jumps])  # 40 electrons apart, noise below 5
    assert abs(np.abs(shown[:, jumps]).mean() - 20) < 0.2
    lag = (levels[1:] * levels[:-1]).mean()
    error = np.sqrt((1 + 1) / levels.size)
    assert abs(lag - np.exp(-1)) < 5 * error + 1e-3 < abs(lag - np.exp(-1.2))


@pytest.mark.parametrize("unlike", ["gain_spread", "prnu"])
def test_unlike_gains_show_in_variance_over_mean_and_sensitivities_do_not(unlike: str, seed: int) -> None:
    sensor: dict[str, Any] = dict.fromkeys(("read_noise_e", "dsnu_e", "prnu"), 0.0)
    sensor |= {"adc_bits": None, "gain_dn_per_e": 0.7}
    camera: dict[str, Any] = {"sensor": sensor}
    if unlike == "prnu":
        sensor["prnu"] = 0.1
    else:
        camera["pixels"] = {"gain_spread": 0.1}
    frames, outputs = 4000, 400
    with device(camera, n_outputs=outputs, seed=seed) as twin:
        shown = twin.flat_frames(frames, photons=1000.0).astype(np.float64) - 100
    mean, variance = shown.mean(axis=0), shown.var(axis=0, ddof=1)
    error = np.sqrt(2 / frames)  # of a variance, relative
    gains = variance / mean / 0.7
    spread = np.var(gains, ddof=1) - error**2
    expected = 0.01 if unlike == "gain_spread" else 0.0
    assert abs(spread - expected) < 5 * (expected + error**2) * np.sqrt(2 / outputs)
    assert abs(np.var(mean / mean.mean(), ddof=1) - 0.01) < 5 * 0.01 * np.sqrt(2 / outputs) + 1e-4


def test_read_noises_have_their_root_mean_square_and_too_short_exposures_are_refused() -> None:
    faults = {"pixels": {"read_noise_spread": 0.5}}
    with device(faults, n_outputs=20_000, n_inputs=4) as twin:
        scale = twin.exposure.uneven.read_scale
    error = np.std(scale**2) / np.sqrt(scale.size)
    assert abs(np.mean(scale**2) - 1) < 5 * error
    spread = np.log1p(0.25)
    assert abs(np.var(np.log(scale)) - spread) < 5 * spread * np.sqrt(2 / scale.size)
    with device({"light": {"shortest_exposure_us": 1000.0}}) as twin:
        assert twin.flat_frames(2, exposure_us=1000.0).shape == (2, 400)
        refuses(ValueError, "exposure_us = 900: .* shortest_exposure", twin.flat_frames, 2, exposure_us=900.0)


@pytest.mark.parametrize("tau_us", [20.0, 300.0, 4e4])
def test_an_exposure_averages_the_power_of_the_laser(tau_us: float, seed: int) -> None:
    """Against steps of 1/100 of an exposure of an Ornstein-Uhlenbeck process; frames of 400 us, 500 us apart."""
    power = {"law": "gaussian", "rms": 0.1, "correlation_us": tau_us, "averages": True}
    with open_device("camera", n_inputs=20, n_outputs=20, camera={"light": {"power": power}}) as twin:
        laser = twin._laser
        got = (np.stack([laser.powers(4, twin._stream) for _ in range(3000)]) - 1) / 0.1
        stated, half = laser.covariance(4) / 0.01, laser.exposed(0.5).power.rms / 0.1
    random, rho = np.random.default_rng(seed), np.exp(-4.0 / tau_us)
    x = random.standard_normal(3000)
    means = np.zeros((3000, 4))
    for step in range(4 * 125):  # of 4 us
        after = rho * x + np.sqrt(1 - rho**2) * random.standard_normal(x.size)
        if step % 125 < 100:
            means[:, step // 125] += (x + after) / 200
        x = after
    found, oracle = np.cov(got.T), np.cov(means.T)
    spread = np.sqrt(np.outer(np.diag(oracle), np.diag(oracle)) + oracle**2)
    assert np.all(np.abs(found - stated) < 5 * spread / np.sqrt(len(got)))
    error = spread * np.hypot(len(got) ** -0.5, len(means) ** -0.5)
    assert np.all(np.abs(found - oracle) < 5 * error)
    assert not np.all(np.abs(found - 1.4 * oracle) < 5 * error)
    a = 200.0 / tau_us  # half the exposure sees more of the power's noise
    assert half == pytest.approx(np.sqrt(2 * (a - 1 + np.exp(-a)) / a**2), rel=1e-6)


def test_leaked_light_has_a_speckle_of_its_own(seed: int) -> None:
    """The blank frame of leaks is as bright as that of weak reflections, and unlike the anchor."""
    like, bright = {}, {}
    for own in (True, None):
        mirrors = {"contrast": 50.0, "leak_speckle": own}
        with device({"mirrors": mirrors}, n_outputs=4000, n_inputs=40) as twin:
            blank, anchor = twin.speckle.blank, twin.speckle.anchor
        like[own] = np.sum(blank * anchor) / np.sqrt(np.sum(blank**2) * np.sum(anchor**2))
        bright[own] = np.mean(np.sum(blank**2, axis=0)) / (2 * 80)
    assert abs(like[True]) < 5 / np.sqrt(8000)
    assert like[None] == pytest.approx(1)
    assert abs(50 * bright[True] - 1) < 5 / np.sqrt(4000)
