"""A medium that moves within a call: all frames follow one exact Ornstein-Uhlenbeck process."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import poisson

from opusim.camera.speckle import (
    PARTS_OF_A_STEP,
    STEPS_PER_TAU,
    Motion,
    bridge,
    grid_point,
    medium_weights,
    motion,
)
from opusim.devices.camera import CameraDevice
from opusim.devices.registry import open_device
from opusim.errors import ConfigError, NoiseUnknown
from opusim.randomness.streams import SeededStream
from tests.opusim.common import (
    SILENT,
    covariance_of_media,
    refuses,
    ternary,
)

FRAME_S = 0.21


def moving(tau: float, seed: int, *, n_outputs: int = 1500, frames: int = 0, **camera: Any) -> CameraDevice:
    drift = {"decorrelation_s": tau, "seconds_per_step": 1.0, "within_call": True}
    projection = {"frames_per_projection": 2 * camera.get("reference_beam", {"steps": 2})["steps"]}
    settings = {"sensor": SILENT, "anchor": {"frames": frames}, "drift": drift} | camera
    window = {"n_inputs": 10, "n_outputs": n_outputs, "seed": seed, "medium": {"seed": seed}}
    return open_device("camera_low_light", frames=projection, camera=settings, **window)


def rows_of(rows: int, seed: int) -> torch.Tensor:
    return ternary(rows, 10, seed)


@pytest.mark.parametrize("end", [1e-6, 0.3, 5.0, 900.0])
def test_the_bridge_is_the_process_conditioned_on_both_ends(end: float) -> None:
    times = end * np.array([0.0, 0.1, 0.35, 0.9, 1.0])
    every = np.concatenate([[0.0, end], times])
    with np.errstate(under="ignore"):
        joint = np.exp(-np.abs(np.subtract.outer(every, every)))
    mean = joint[2:, :2] @ np.linalg.inv(joint[:2, :2])
    weights, covariance = bridge(times, end)
    np.testing.assert_allclose(weights.T, mean, atol=1e-9)
    np.testing.assert_allclose(covariance, joint[2:, 2:] - mean @ joint[:2, 2:], rtol=0, atol=1e-10)
    kept, after = motion(times)
    np.testing.assert_allclose(kept, joint[2:, 0], rtol=1e-12)
    np.testing.assert_allclose(after, joint[2:, 2:] - np.outer(joint[2:, 0], joint[2:, 0]), 0, 1e-12)


def test_points_of_the_finer_grid_move_by_the_law(seed: int) -> None:
    random = np.random.default_rng(seed)
    for time in random.uniform(0, 40, 20):
        one = grid_point(float(time), PARTS_OF_A_STEP)
        assert len(medium_weights(one)) <= 30
        assert covariance_of_media(one, one) == pytest.approx(1, abs=1e-9)
        for steps in (1 / PARTS_OF_A_STEP, 0.01, 3.7):
            other = one + round(steps * PARTS_OF_A_STEP) / PARTS_OF_A_STEP
            moved = -math.expm1(-(other - one) / STEPS_PER_TAU)
            assert 1 - covariance_of_media(one, other) == pytest.approx(moved, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("frame", [1e-6, 0.2])
def test_frames_of_successive_calls_follow_one_process(frame: float, seed: int) -> None:
    """Pairs of frames within a block, over a block's end and over calls; of one pattern and of different ones."""
    calls, random = (150, 30, 200), np.random.default_rng(seed)
    patterns = torch.from_numpy(random.integers(0, 2, (6, 10))).float()
    rows = random.integers(0, 6, sum(calls))
    flip = random.integers(0, 2, rows.size) > 0
    pairs = np.array([(0, 1), (5, 60), (100, 140), (149, 150), (140, 175), (20, 300), (181, 379)])
    rows[pairs[:4]], flip[pairs[:4]] = rows[pairs[:4, :1]], flip[pairs[:4, :1]]  # these show the same
    with moving(1.0, seed, n_outputs=1000) as device:
        speckle, clock, stream = device.speckle, Motion(frame), SeededStream(seed, "test")
        clock.move_to(speckle, 3.3)
        entries = speckle.fields(torch.eye(10)).double()  # of the beginning
        reference = speckle.anchor - entries.sum(1).numpy()
        parts, done = [], 0
        for count in calls:
            some = slice(done, done + count)
            parts.append(clock.fields(speckle, patterns, rows[some], flip[some], stream))
            done += count
        fields = torch.cat(parts, dim=1).double().numpy()
    # mirrors' amplitudes by hand: the reference counts as one mirror of amplitude sqrt(10)
    shown = patterns.numpy()[rows]
    shown = np.where(flip[:, None], 1 - shown, shown)
    amplitudes = np.concatenate([shown, math.sqrt(10) * flip[:, None]], axis=1)
    start = np.concatenate([entries.numpy(), reference[:, None] / math.sqrt(10)], axis=1)
    first = np.einsum("ki,cij->ckj", amplitudes[:1], start)
    np.testing.assert_allclose(fields[:, :1], first, atol=1e-4)  # the first frame sees the medium of its time

    def deviates(rate: float) -> np.ndarray:
        found = []
        for k, l in pairs:  # noqa: E741
            rho = math.exp(-rate * frame * (l - k))
            a, b = amplitudes[k], amplitudes[l]
            difference = fields[:, l] - fields[:, k]
            expected = a @ a + b @ b - 2 * rho * (a @ b)
            found.append((np.mean(difference**2) / expected - 1) / math.sqrt(2 / difference.size))
        return np.array(found)

    assert np.all(np.abs(deviates(1.0)) < 5), deviates(1.0)
    assert np.abs(deviates(1.3)).max() > 5


def simulated(device: CameraDevice, x: torch.Tensor, rhos: Sequence[float], random: Any) -> np.ndarray:
    """Noise that a reading gets from a medium that keeps rhos from frame to frame, DN: each mirror, in own numpy."""
    entries = device.speckle.fields(torch.eye(10)).double().numpy()
    reference = (device.speckle.anchor - entries.sum(1)) / math.sqrt(10)
    medium = np.concatenate([entries, reference[:, None]], axis=1)  # (2, mirrors, outputs)
    plus, minus = (x[0] > 0).double().numpy(), (x[0] < 0).double().numpy()
    pairs = ((plus, 0), (1 - plus, 10**0.5), (minus, 0), (1 - minus, 10**0.5))
    frames = [np.append(shown, root) for shown, root in pairs]
    signed = (1, -1, -1, 1)
    pairs = zip(signed, frames, strict=True)
    resting = sum(s * np.square(np.einsum("i,cij->cj", f, medium)).sum(0) for s, f in pairs)
    total: Any = 0.0
    for sign, frame, rho in zip(signed, frames, [*rhos, 1.0], strict=True):
        total = total + sign * np.square(np.einsum("i,cij->cj", frame, medium)).sum(0)
        medium = rho * medium + math.sqrt(1 - rho**2) * random.standard_normal(medium.shape)
    exposure = device.exposure
    return np.asarray((total - resting) * exposure.gain_e * exposure.sensor.gain_dn_per_e)


@pytest.mark.parametrize("tau", [100.0, 1e3, 1e4])
def test_readings_move_as_an_exact_simulation_does(tau: float, seed: int) -> None:
    random, x = np.random.default_rng(seed), rows_of(1, 5)
    found: list[np.ndarray] = []
    simulations: dict[float, list[np.ndarray]] = {FRAME_S: [], FRAME_S / 2: []}
    with moving(tau, seed, n_outputs=1000) as device:
        for number in range(4):
            device.drift_to(1.7 * tau * number)
            device.measure_anchor()
            scale, _ = device.recovery.decode()
            ideal = (x.double() @ device.matrix().double().T)[0].numpy()
            for frame_s, each in simulations.items():
                each.append(scale * simulated(device, x, [math.exp(-frame_s / tau)] * 3, random))
            found.append(device.project(x)[0].double().numpy() - ideal)
    got = np.square(found)

    def standard_errors(frame_s: float) -> float:
        expected = np.square(simulations[frame_s])
        error = math.hypot(got.std(), expected.std()) / math.sqrt(got.size)
        return float(abs(got.mean() - expected.mean()) / error)

    assert standard_errors(FRAME_S) < 5 < standard_errors(FRAME_S / 2)
    assert math.sqrt(got.mean()) == pytest.approx(0.5 * (100 / tau) ** 0.5, rel=0.2)  # 0.489 in another


HOPS = {"decorrelation_s": 1e6, "seconds_per_step": 1.0, "hop_pm": 10.0, "spectral_width_pm": 300.0}


def test_a_hopping_laser_decorrelates_the_medium_by_a_poisson_number_of_hops(seed: int) -> None:
    """Correlations of successive times are rho^n of whole numbers n, and n is Poisson of the rate's mean."""
    rho, mean, hops = 0.5, 1.3, []
    drift = HOPS | {"hop_pm": 300 * 3**0.5, "hops_per_s": 0.1, "within_call": False}
    with moving(1.0, seed, n_outputs=60, drift=drift) as device:
        last = device.speckle.fields(torch.eye(10)).double().numpy()
        for number in range(1, 101):
            device.drift_to(number * mean / 0.1)
            fields = device.speckle.fields(torch.eye(10)).double().numpy()
            error, correlation = (2 / last.size) ** 0.5, float(np.mean(fields * last))
            hops.append(round(math.log(max(correlation, error)) / math.log(rho)))
            assert abs(correlation - rho ** hops[-1]) < 5 * error
            last = fields
    some = min(4, max(hops))  # beyond them rho^n is less than the error

    def deviates(rate: float) -> float:
        law = poisson.pmf(np.arange(some), rate)
        found = np.array([hops.count(n) for n in range(some)]) / len(hops)
        return float(np.abs((found - law) / np.sqrt(law * (1 - law) / len(hops))).max())

    assert deviates(mean) < 5 < deviates(2 * mean)


def test_readings_hop_as_an_exact_simulation_does(seed: int) -> None:
    random, x, per_s = np.random.default_rng(seed), rows_of(1, 5), 20.0
    found: list[float] = []
    simulations: dict[float, list[float]] = {per_s: [], per_s / 2: []}
    with moving(1.0, seed, n_outputs=60, drift=HOPS | {"hops_per_s": per_s, "within_call": True}) as device:
        for number in range(30):
            device.drift_to(50.0 * number)
            device.measure_anchor()
            scale, _ = device.recovery.decode()
            for rate, each in simulations.items():
                rhos = (1 + 1 / 900) ** (-0.5 * random.poisson(rate * FRAME_S, 3))
                each.append(float(np.mean(np.square(scale * simulated(device, x, rhos, random)))))
            ideal = (x.double() @ device.matrix().double().T)[0].numpy()
            found.append(float(np.mean(np.square(device.project(x)[0].double().numpy() - ideal))))

    def standard_errors(rate: float) -> float:
        error = math.hypot(np.std(found), np.std(simulations[rate])) / math.sqrt(len(found))
        return float(abs(np.mean(found) - np.mean(simulations[rate])) / error)

    assert standard_errors(per_s) < 5 < standard_errors(per_s / 2)


CASES: dict[str, dict[str, Any]] = {
    "sound": {},
    "hops": {"drift": HOPS | {"hops_per_s": 20.0, "within_call": True}},
    "faulty mirrors": {"mirrors": {"stuck_on": 0.1, "stuck_off": 0.1, "contrast": 30.0}},
    "leaks": {"mirrors": {"stuck_on": 0.1, "stuck_off": 0.1, "contrast": 5.0, "leak_speckle": True}},
    "holography": {"reference_beam": {"flux_per_s": 5000.0, "steps": 4}},
    "power": {"light": {"power": {"law": "log_normal", "rms": 0.02}}},
    "noise": {"sensor": {"adc_bits": None}},
    "modes": {"speckle_modes": 3},
    "grains": {"grain_pixels": 2, "sensor": SILENT | {"row_pixels": 64}},
}


@pytest.mark.parametrize("case", list(CASES))
def test_readings_have_the_moments_that_the_twin_states(case: str, seed: int) -> None:
    squares, means = [], []
    with moving(100.0, seed, frames=2, **CASES[case]) as device:
        for number in range(3):
            device.drift_to(300.0 * number)
            x = rows_of(1, number)
            mean, variance = device.reading_mean(x), device.reading_variance(x)
            z = ((device.project(x).double() - mean) / variance.sqrt()).numpy()
            squares.append(z**2)
            means.append(z)
    ratio, error = np.mean(squares), np.std(squares) / math.sqrt(np.size(squares))
    common = {"power": 0.02, "grains": error * 5}.get(case, 0.0)  # outputs share it
    assert abs(ratio - 1) < 5 * error + common < abs(ratio - 1.2)
    assert abs(np.mean(means)) < 5 / math.sqrt(np.size(means)) + 5 * common


def test_steps_are_found_again_and_calls_share_the_time(seed: int) -> None:
    x = rows_of(6, 1)
    anchored = {"decorrelation_s": 100.0, "seconds_per_step": 200.0, "within_call": True, "reanchor_steps": 2}
    with moving(100.0, seed, n_outputs=50, frames=3, drift=anchored) as device:
        kept = {}
        for step in range(5):
            device.seek(step)
            kept[step] = device.project(x)
            if step == 2:
                device.seek(step)  # a step that is carried out again
                assert torch.equal(device.project(x), kept[step])
    for step in (4, 3, 2):
        with moving(100.0, seed, n_outputs=50, frames=3, drift=anchored) as later:
            later.seek(step)
            assert torch.equal(later.project(x), kept[step])
    with moving(100.0, seed, n_outputs=50) as device:
        device.project(x)
        point = device.speckle.point / STEPS_PER_TAU
        assert point == pytest.approx(24 * FRAME_S / 100, abs=1e-6)
        device.drift_to(0.0)
        device.project(x[:2])
        device.flat_frames(4)
        device.intensities(x[:3].abs())
        assert device.speckle.point / STEPS_PER_TAU == pytest.approx(15 * FRAME_S / 100, abs=1e-6)
        before = device.usage.frames
        device.seek(0)
        device.anchor_frames(2)
        device.dimmed_frames(x[:3].abs(), 0.5)
        assert device._pattern_frames(x[:2].abs()).shape == (4, 50)  # the monitor's frames move, too
        device._saturated_share(x[:1])
        shown = device.usage.frames - before
        assert shown == 2 + 3 + 4 + 5
        assert device.speckle.point / STEPS_PER_TAU == pytest.approx(shown * FRAME_S / 100, abs=1e-6)


def test_a_moving_medium_states_no_law_behind_cross_talk_and_impossible_hops_are_refused(seed: int) -> None:
    with moving(100.0, seed, n_outputs=40, pixels={"crosstalk": 0.02}) as device:
        assert device.stated_noise is None
        refuses(NoiseUnknown, "its medium drifts", lambda: device.described_noise)
        refuses(NoiseUnknown, "pixels.crosstalk mixes over pixels", device.reading_variance, rows_of(1, 0))
        assert device.project(rows_of(2, 0)).shape == (2, 40)
    with pytest.raises(ConfigError, match="drift.within_call: must be a valid boolean, got 3"):
        moving(1.0, seed, drift={"decorrelation_s": 1.0, "seconds_per_step": 1.0, "within_call": 3})
    refuses(ConfigError, "hop_pm and spectral_width_pm belong together", moving, 1.0, seed, drift=HOPS)
    hops, beam = HOPS | {"hops_per_s": 1.0}, {"flux_per_s": 5000.0, "steps": 4}
    refuses(ConfigError, "a hop turns the phase", moving, 1.0, seed, drift=hops, reference_beam=beam)
    with moving(1.0, seed, n_outputs=20, drift=hops) as device:
        refuses(ValueError, r"some 2e\+07 hops come before.* lower drift.hops_per_s", device.drift_to, 2e7)
