"""Counts certified for the patterns that are shown: limits of measured rates hold the hidden ones, or the run ends."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from opusim.accounting import numerics
from opusim.accounting.composition import guarantees
from opusim.accounting.mechanisms.counts import LabelCounts, paired_limits
from opusim.camera.exposure import Exposure
from opusim.camera.from_description import exposure_of
from opusim.camera.stages import Sensor
from opusim.description.schema import load_description
from opusim.devices import kinds
from opusim.devices.camera import CameraDevice
from opusim.errors import DeviceFault
from opusim.files import to_toml
from opusim.training.protections.argmax_labels import MeasuredRates
from opusim.training.protections.counted_labels import CountsReadout
from tests.support.command import opusim

K, PIXELS, FRAMES, DELTA, BETA = 4, 24, 500, 1e-3, 1e-6
DARK_E = 6.0


@dataclass
class HiddenCamera:
    """A camera of an independent generator, whose pixels respond unequally; only its frames tell so."""

    seed: int
    prnu: float = 0.005
    power: float = 1.0
    n_inputs: int = K
    n_outputs: int = PIXELS
    gain: float = 0.8
    exposure: Any = field(init=False)

    def __post_init__(self) -> None:
        self.draw = np.random.default_rng(self.seed)
        described = 60 * self.draw.exponential(size=(K, PIXELS))
        self.described = np.minimum(described, 400)
        self.light = self.described * (1 + self.prnu * self.draw.standard_normal(PIXELS))
        sensor = Sensor(gain_dn_per_e=self.gain, shot_noise=True, black_level_dn=100.0, adc_bits=12)
        self.exposure = SimpleNamespace(sensor=sensor)

    def _taken(self, rates: np.ndarray) -> np.ndarray:
        numbers = 100 + self.gain * (self.draw.poisson(rates) + 1.6 * self.draw.standard_normal(rates.shape))
        return np.rint(numbers).astype(np.float32)

    def dimmed_frames(self, x: torch.Tensor, light: float) -> np.ndarray:
        return self._taken(self.power * light * (x.numpy() @ self.light) + DARK_E)

    def flat_frames(self, count: int) -> np.ndarray:
        return self._taken(np.full((count, PIXELS), DARK_E))

    def measured(self) -> MeasuredRates:
        device: Any = self
        return MeasuredRates.of(device, K, count=FRAMES, gain=(0.99 * self.gain, 1.01 * self.gain), beta=BETA)


def epsilon(high: np.ndarray, low: np.ndarray | None = None) -> float:
    """Of counts of these rates of light, or of limits of them, with the laser dimmed to a hundredth."""
    least = None if low is None else 0.01 * low
    mechanism = LabelCounts.of(0.01 * high, np.full(PIXELS, DARK_E), light_low=least)
    return guarantees([mechanism], delta=DELTA)[0].epsilon


def test_limits_hold_the_hidden_rates_of_a_hundred_cameras_and_steady_ones_pass() -> None:
    for seed in range(100):
        camera = HiddenCamera(seed)
        rates = camera.measured()
        low, high = rates.limits()
        assert np.all((low <= camera.light) & (camera.light <= high))
        rates.require_same(camera.measured(), rates.usable, "hidden")


@pytest.mark.parametrize("count", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_the_stated_epsilon_is_at_least_that_of_the_hidden_rates(count: int) -> None:
    stated, exact, estimated, described = [], [], [], []
    for seed in range(count):
        camera = HiddenCamera(seed)
        rates = camera.measured()
        stated.append(epsilon(*rates.limits()[::-1]))
        exact.append(epsilon(camera.light))
        estimated.append(epsilon(np.maximum(rates.light_dn, 0) / camera.gain))
        described.append(epsilon(camera.described))
    assert np.all(np.array(stated) >= exact)
    assert np.mean(np.array(stated) / exact) < 1.35
    if count > 50:  # planted: estimates, or the described responses, in place of limits
        for planted in (estimated, described):
            below = np.count_nonzero(np.array(planted) < exact)
            assert below > count / 2 - 5 * (count / 4) ** 0.5 > 5


def refused(camera: HiddenCamera, rates: MeasuredRates) -> bool:
    with pytest.raises(DeviceFault, match=r"left their limits at \d+ of \d+ pixels .* nothing was kept"):
        rates.require_same(camera.measured(), rates.usable, "hidden")
    return True


@pytest.mark.parametrize("change", [0.9, 1.1])
def test_rates_that_drifted_beyond_their_limits_end_the_run(change: float) -> None:
    camera = HiddenCamera(7)
    rates = camera.measured()
    camera.power = change
    assert refused(camera, rates)


def test_one_pixel_that_drifted_beyond_its_limits_is_found() -> None:
    for seed in range(20):
        camera = HiddenCamera(seed)
        rates = camera.measured()
        camera.light[:, seed] = rates.limits()[1][:, seed] * 1.02
        assert refused(camera, rates)


@pytest.mark.parametrize("left", [0.0, 0.01, 0.5])
def test_a_pixel_that_a_pattern_leaves_in_the_dark_is_found(left: float) -> None:
    """Where nothing is left, the second measurement has no lower limit above 0."""
    for seed in range(5):
        camera = HiddenCamera(seed)
        rates = camera.measured()
        camera.light[0, seed] *= left
        assert refused(camera, rates)


def test_rates_within_limits_tell_no_more_than_their_pairs(seed: int) -> None:
    draw = np.random.default_rng(seed)
    low = draw.uniform(1, 3, (2, 8))
    high = low + draw.uniform(0, 1, (2, 8))
    most = numerics.pattern_upper(paired_limits(low, high, 0, 1), DELTA)
    for _ in range(20):
        inside = low + draw.choice([0.0, 0.5, 1.0], (2, 8)) * (high - low)
        assert numerics.pattern_upper(inside, DELTA) <= most * (1 + 1e-6)
    equal = np.array([[1.0, 2.0]]).repeat(2, axis=0)
    assert paired_limits(equal, equal + 1, 0, 1).tolist() == [[2.0, 3.0, 1.0, 2.0], [1.0, 2.0, 2.0, 3.0]]


def test_lower_limits_above_upper_ones_are_refused() -> None:
    with pytest.raises(ValueError, match="light_low: exceeds light, the upper limits"):
        LabelCounts.of(np.ones((2, 3)), np.ones(3), light_low=2 * np.ones((2, 3)))


TRUTH = load_description("camera_low_light")
RESPONSE = 1 + 0.005 * np.random.default_rng(11).standard_normal(2400)


class Laboratory(CameraDevice):
    """A camera whose frames come from the true sensor, with a PRNU of its own, whatever its description says."""

    @cached_property
    def exposure(self) -> Exposure:
        return super()._exposure_at()

    def _exposure_at(self, *changed: float | None) -> Exposure:
        found = exposure_of(TRUTH, self._law.mirrors, self.pixels, *changed)
        return replace(found, response=RESPONSE[: self.n_outputs])

    @contextmanager
    def _as_it_is(self) -> Iterator[None]:
        described, self.__dict__["exposure"] = self.exposure, self._exposure_at()
        yield
        self.__dict__["exposure"] = described

    def dimmed_frames(self, x: torch.Tensor, light: float) -> np.ndarray:
        with self._as_it_is():
            return super().dimmed_frames(x, light)

    def anchor_frames(self, count: int) -> np.ndarray:
        with self._as_it_is():
            return super().anchor_frames(count)

    def _measure_anchor(self, step: int = 0) -> None:
        with self._as_it_is():
            super()._measure_anchor(step)

    def _read_rows(self, y: torch.Tensor, x: torch.Tensor) -> None:
        with self._as_it_is():
            super()._read_rows(y, x)


@pytest.mark.slow
def test_labels_are_certified_from_frames_of_a_camera(tmp_path: Path, monkeypatch: Any) -> None:
    """Frames, `device calibrate`, description, certificate, `train` with measured rates, statement: all by commands."""
    monkeypatch.setitem(kinds._registered, "laboratory", Laboratory)
    content = TRUTH.dump() | {"kind": "laboratory", "name": "mine"}
    content["camera"]["sensor"] |= {"prnu": 0.0, "gain_dn_per_e": 1.3, "read_noise_e": 3.0}
    (tmp_path / "mine.toml").write_text(to_toml(content))
    readouts: list[CountsReadout] = []
    real = CountsReadout.log_likelihood
    monkeypatch.setattr(
        CountsReadout, "log_likelihood", lambda own, labels: readouts.append(own) or real(own, labels)
    )

    def command(line: str) -> str:
        done = opusim(*line.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    command("device record mine.toml --outputs 2400 --steps 10 --spatial-frames 8 --out frames")
    command("device calibrate mine.toml --recorded frames --out found")
    measured, true = load_description(tmp_path / "found" / "mine_measured.toml").camera, TRUTH.camera
    for key, tolerance in {"prnu": 0.2, "gain_dn_per_e": 0.05, "read_noise_e": 0.2}.items():
        assert getattr(measured.sensor, key) == pytest.approx(getattr(true.sensor, key), rel=tolerance)
    command("device calibrate found/mine_measured.toml --inputs 10 --outputs 128 --readings 200 --out found")
    command(
        "train pdfa --data digits --device found/mine_measured.toml --epochs 2 --out run --set model.hidden=[24] "
        "--set device.certificate=found/mine_measured.certificate.toml --set protection.kind=label-readout "
        "--set protection.noise=counts --set protection.epsilon=3.0 --set protection.rate_frames=1000"
    )
    (stated,) = json.loads(command("account run run --json"))["guarantees"]
    assert stated["status"] == "proven under a device model"
    assert stated["epsilon"] <= 3.0
    assert "theorem measured-rates" in stated["source"]
    lab = Laboratory(load_description(tmp_path / "mine.toml"), n_inputs=10, n_outputs=24)
    readout = readouts[-1]
    dark = lab._exposure_at().dark_e[readout.pixels]
    rates = lab._exposure_at().rates(lab.speckle.fields(torch.eye(10)).numpy())[:, readout.pixels]

    def exact(light: float) -> float:
        return guarantees([LabelCounts.of(light * (rates - dark), dark)], delta=1e-5)[0].epsilon

    assert exact(readout.light) <= stated["epsilon"]
    assert exact(4 * readout.light) > stated["epsilon"]  # planted: a laser that is not dimmed as stated
