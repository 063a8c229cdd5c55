"""Whether a device is still what it was when it was opened, from blank and reference frames alone.

A monitor never looks at frames of data: a stop that they trigger would tell something about them, which no guarantee
covers. It looks at readings of nothing, whose scatter is the noise, and at readings of a few fixed vectors, whose
size and pattern are the light and the medium. Each test has a stated probability of a false alarm
(`MonitorSettings.false_alarm`), and a healthy device passes all of them but for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from opusim.access_schema import MonitorSettings
from opusim.devices.baseline import Baseline, measure_baseline, noise_variance, reference_vectors
from opusim.errors import DeviceFault, NoiseBelowCertificate
from opusim.noise import NoiseModel

_DARK = 0.05
"""Share of the first light below which a device is dark."""
_TIED = 0.01
"""Share of pixels at their end, or of outputs at one extreme value, from which a device is saturated."""
_NUMBERS = 4096
"""Numbers that the blank readings of a check hold at least: a change of 25 % in their variance then stands out."""


class Readings(Protocol):
    """What a monitor asks a device for; never data."""

    def __call__(self, vectors: torch.Tensor) -> np.ndarray:
        """Readings of these ternary vectors, float64, a row each."""


class Monitor:
    """Compares a device with itself as it was opened, and with the law that it states.

    Args:
        settings: how often, how much, and how sure.
        name: the device's name.
        n_inputs: its width.
        read: takes readings.
        law: tells the law that the device states now; None where it states none.
        saturated: tells the share of saturated pixels, where a camera can.
        baseline: the device as it was when a run began; None measures it now.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        name: str,
        *,
        n_inputs: int,
        read: Readings,
        law: Callable[[], NoiseModel | None],
        saturated: Callable[[], float | None],
        baseline: Baseline | None = None,
    ) -> None:
        self._settings = settings
        self._name = name
        self._read = read
        self._law = law
        self._saturated = saturated
        self._vectors = reference_vectors(settings.reference_vectors, n_inputs)
        self._last: np.ndarray | None = None
        if baseline is None:
            baseline = measure_baseline(read, self._vectors, settings.baseline_readings)
        self.baseline = baseline
        enough = -(-_NUMBERS // baseline.weights.size)
        self._blank = torch.zeros(max(settings.blank_readings, enough), n_inputs)

    def due(self, step: int) -> bool:
        """Whether a check belongs before this step."""
        return step % self._settings.every_steps == 0

    def check(self) -> None:
        """Looks at fresh blank and reference readings.

        Raises:
            NoiseBelowCertificate: the noise is weaker than the law that a privacy statement rests on.
            DeviceFault: the readings repeat, saturate, are dark, have another size, another noise or another medium.
        """
        blank, reference = self._read(self._blank), self._read(self._vectors)
        law = self._law()
        noisy = law is None or bool(np.any(law.variance_bounds()[1] > 0))
        self._check_extremes(reference)
        if noisy:
            self._check_frozen(blank)
        variance = noise_variance(blank)
        self._check_light(reference, variance)
        if noisy:
            if law is not None:
                self._check_law(variance, law)
            self._check_change(variance)
        self._check_medium(reference, variance)

    def _check_frozen(self, blank: np.ndarray) -> None:
        """Readings with noise never repeat, not even once."""
        rows = blank if self._last is None else np.vstack([self._last, blank])
        self._last = blank[-1:]
        if np.any(np.all(rows[1:] == rows[:-1], axis=1)):
            raise self._fault("repeats its readings: the camera is frozen", "restart it")

    def _check_extremes(self, reference: np.ndarray) -> None:
        share = self._saturated()
        if share is not None and share > _TIED:
            raise self._fault(
                f"has {100 * share:.0f} % of its pixels saturated",
                "shorten the exposure or dim the laser",
            )
        for row in reference:
            tied = max(int(np.sum(row == row.max())), int(np.sum(row == row.min())))
            if tied >= max(3, math.ceil(_TIED * row.size)) and row.max() > row.min():
                raise self._fault(
                    f"is saturated: {tied} of {row.size} outputs read one extreme value",
                    "shorten the exposure or dim the laser",
                )

    def _check_light(self, reference: np.ndarray, variance: np.ndarray) -> None:
        """The readings' size: none is darkness, another one is a change of light."""
        power, error = self._signal_power(reference, variance)
        ratio = power / self.baseline.power
        slack = self._sure * error / self.baseline.power
        if ratio < _DARK + slack:
            raise self._fault("is dark: reference frames carry no signal", "check the laser and the shutter")
        size = math.sqrt(ratio)
        if abs(size - 1) > self._settings.gain_tolerance + slack / (2 * size):
            raise self._fault(
                f"reads {size:.2f} times what it read at the beginning: its light changed",
                "bring laser and exposure back, or calibrate it again",
            )

    def _check_law(self, variance: np.ndarray, law: NoiseModel) -> None:
        """The noise against the smallest variance that the law admits, by the mean over outputs."""
        low = np.broadcast_to(law.variance_bounds()[0], variance.shape)
        ratio = variance[low > 0] / low[low > 0]
        if not ratio.size:
            return
        expected_error = math.sqrt(2 / (self._blank.shape[0] - 1) / ratio.size)  # of Gaussian readings
        found = float(ratio.mean())
        if found < 1 - self._sure * expected_error:
            raise NoiseBelowCertificate(
                f"device {self._name!r}: blank frames scatter {math.sqrt(max(found, 0)):.2f} times as much as its law "
                "states; stop private work and calibrate it again"
            )

    def _check_change(self, variance: np.ndarray) -> None:
        """The noise against what it was, whatever its law: two means over outputs, with their own scatter."""
        ratio, error = self.baseline.noise_ratio(variance)
        if abs(ratio - 1) > self._settings.gain_tolerance + self._sure * error:
            raise self._fault(
                f"has {ratio:.2f} times the noise variance that it had at the beginning",
                "check the sensor's temperature and the light, or calibrate it again",
            )

    def _check_medium(self, reference: np.ndarray, variance: np.ndarray) -> None:
        """The reference readings against their first ones; noise lowers a correlation, and is taken out."""
        power, _ = self._signal_power(reference, variance)
        correlation = float(np.mean(reference * self.baseline.reference)) / math.sqrt(
            power * self.baseline.power
        )
        noise = float(variance.mean()) / power
        error = math.sqrt((1 + noise) * (1 + noise + correlation**2) / reference.size)
        if correlation < self._settings.least_correlation - self._sure * error:
            raise self._fault(
                f"reads its reference vectors with a correlation of {max(correlation, 0):.2f} to their first readings: "
                "its medium decorrelated or was swapped",
                "begin a new run with it, or bring the medium back",
            )

    def _signal_power(self, reference: np.ndarray, variance: np.ndarray) -> tuple[float, float]:
        """Mean square of the reference readings without their noise, and its standard error by the noise."""
        noise = float(variance.mean())
        power = float(np.mean(reference**2)) - noise
        error = math.sqrt((4 * max(power, 0.0) * noise + 2 * noise**2) / reference.size)
        return max(power, 1e-30), error

    @property
    def _sure(self) -> float:
        """Standard errors that chance exceeds with the probability of a false alarm, on both sides together."""
        from scipy.stats import norm

        return float(norm.isf(self._settings.false_alarm / 2))

    def _fault(self, what: str, remedy: str) -> DeviceFault:
        return DeviceFault(f"device {self._name!r} {what}; {remedy}")
