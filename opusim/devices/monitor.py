"""Detect whether a device has changed since it was opened, from blank and reference frames only.

A monitor never looks at frames of data: a stop that they trigger would reveal something about the data that no
guarantee covers. It looks at readings of nothing, whose scatter is the noise; at readings of a few fixed vectors, whose
size and pattern show the light and the medium; and, at a camera, at every frame that a linear projection of these
vectors shows, the anchor included.

| test | statistic of a look | tolerance |
| --- | --- | --- |
| frozen | successive blank readings that agree at every output | what chance explains |
| saturation | largest share of full outputs in any frame, or of outputs at one extreme reading | `saturated_outputs` |
| light | slope of the reference readings on their first ones | `gain_tolerance`; below also 1 - `least_correlation` |
| medium | mean square difference from the first readings over the signal, 2 (1 - correlation) | `least_correlation` |
| outputs | slope of each output; how many lost more than light and medium may | `silent_outputs` |
| law | blank variance over the least that the law states, from below, in the mean over outputs | nothing |
| output | the same of each single output, under a certificate, whose law holds at every output | nothing |
| noise | blank variance over its first value; fresh looks then tell single outputs (hot pixels) | `noise_tolerance` |

The law's test is left out if hardware's law is only assumed and no guarantee rests on it: the noise test then
compares the instrument with itself.

Once a test fails, fresh frames of fixed patterns name the fault (`opusim.camera.diagnosis`) if the device shows any.
If not, a few readings that are far off mean lost frames, and scatter over fresh looks that outputs share means that the
power or the bench is unsteady.

The last six tests are sequential (`opusim.devices.baseline`): small changes add up over checks. A device is within its
tolerances if each output, except for `silent_outputs` of them, keeps a slope of 1 - `gain_tolerance` - (1 -
`least_correlation`). A medium at `least_correlation` moves single slopes by more, by sqrt(2 (1 - `least_correlation`) /
`reference_vectors`) or 7 % rms at the defaults: if noise is low, the outputs' test stops it before the medium's does.

Noise that outputs share, such as a laser's power noise, gives a mean over outputs the error of few numbers. The first
look measures how much its means scatter beyond independent outputs (`Baseline.shared_blank` and its two companions),
and every error includes that; so the statement below holds under a power whose values at different checks are
independent, and the smallest changes grow with it.

All tests together stop a device that stays within its tolerances with probability `false_alarm_per_run` at most in its
first `checks` checks after an opening. The smallest change that a test finds in m checks with probability 0.99 is, with
e and f the standard errors of a check and of the first look and L = log(checks tests / false_alarm_per_run), the
tolerance + 6 f + 1.2 e min over t of (L / (m t) + t / 2) + 2.3 hypot(1.2 e / sqrt m, f);
`Monitor.smallest_changes` computes it, docs/devices.md has measured figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from typing_extensions import override

from opusim import checks as check_arguments
from opusim.camera.diagnosis import ShowsFrames, diagnose, look_at_frames, shared_scatter
from opusim.description.schema import MonitorSettings
from opusim.devices.baseline import (
    SURE,
    Baseline,
    Readings,
    ResponseTest,
    ShiftTest,
    SingleOutputTest,
    blank_readings,
    measure_baseline,
    noise_variance,
    output_weights,
    over_law,
    reference_vectors,
    relative_error,
    spread_of_squares,
)
from opusim.devices.usage import DeviceWork
from opusim.errors import DeviceError, DeviceFault, DeviceUnavailable, NoiseBelowCertificate
from opusim.noise import FluctuatingCountNoise, NoiseModel
from opusim.plugins import Deferred

special = Deferred("scipy.special")

_DARK = 0.05
"""Share of the first light below which a device is dark."""
_LEAST_TIED = 3
"""Outputs at one extreme value below which no output counts as saturated."""
_NUMBERS = 2**12
"""Fewest numbers in the blank readings of a check."""
_NUMBERS_IF_CERTIFIED = 2**15
"""The same under a certificate: one check then finds a tenth less variance than certified with probability 0.99."""
_READINGS_IF_CERTIFIED = 32
"""Fewest blank readings in a check under a certificate: one check then shows an output without noise."""
_CONFIRMING = 2**10
"""Blank readings that tell, after an alarm under a certificate, whether each output is as noisy as certified."""
_LOOKS_AFTER_AN_ALARM, _BLANKS_AFTER_AN_ALARM = 24, 16
"""Fresh looks at the reference vectors, and at a check's blank vectors, that tell whether outputs share the noise."""
_MOST_READINGS_OF_A_CHECK = 2**12
"""Windows of fewer than 8 outputs would take more; `Monitor.smallest_changes` says what fewer find."""
_FAR_OFF = 3.0
"""Multiple of the tolerated difference beyond which a reading has lost a frame."""
_SURELY = 0.2
"""Share of the noise in the difference that is allowed to a reading that lost no frame."""
BEFORE_ALL = -1
"""Stands for the step of a check before the first step."""
RESERVED_STEPS = 2**63
"""Steps from here on are no steps of training: they key the noise of readings that a run takes before."""
_TESTS = 8
"""Tests that share the probability of a false alarm: seven sequential ones, and one for repeated blank readings."""


class Unmonitored:
    """The monitor of a device whose description has no section ``[monitor]``: it checks nothing.

    Attributes:
        baseline: the first look, made at opening, that checks compare with; None without a monitor.
        changed: whether the last check gave an alarm.
        work: the device's work for one check without an alarm.
    """

    changed = False
    work = DeviceWork()

    def __init__(self, name: str, baseline: Baseline | None = None) -> None:
        self._name, self.baseline = name, baseline

    @property
    def doubtful_from(self) -> int | None:
        """After an alarm: the first step whose noise may have been weaker than the law.

        That is the step of the last check before those that the alarming test of the law sums; of the last check but
        one if another test gave the alarm. None if the noise was found as strong as the law at every output.
        """
        return None

    @property
    def vouched(self) -> int:
        """The step of the last check that confirmed the noise of all steps before it; `BEFORE_ALL` if there is none.

        After an alarm it is `doubtful_from`. A check does not confirm them if a test of the law is past half the level
        of an alarm, nor do the checks in which it rose there.
        """
        return BEFORE_ALL

    def due(self, step: int) -> bool:
        """Return whether a check is due before this step."""
        return False

    def checks_between(self, first: int, end: int) -> int:
        """Return how many checks are due from step `first` on, before step `end`."""
        return 0

    def check(self, step: int = BEFORE_ALL) -> None:
        """Look at fresh blank and reference readings; `step` is the one that follows.

        NoiseBelowCertificate: the noise is weaker than the law that a privacy statement rests on. DeviceFault: readings
        repeat, saturate, are dark, have another size, another noise or another medium.
        """

    def smallest_changes(self, checks: int) -> dict[str, float]:
        """Return the smallest change that each sequential test finds within some checks, with probability 0.99.

        Relative loss and gain of light, correlation of the medium, share of silent outputs, and relative loss and gain
        of the noise's variance: in the mean over outputs, and of one output below a certified law. NaN: none is found.
        """
        raise DeviceUnavailable(f"device {self._name!r} is not monitored; give it a section [monitor]")


class Monitor(Unmonitored):
    """Compares a device with its baseline and with the law that it states.

    Args:
        settings: the section ``[monitor]``.
        name: the device's name.
        n_inputs: its width.
        read: takes readings.
        law: tells the law that the device states now, or None if it states none.
        judges_law: tells whether noise below that law is a fault; not if hardware's law is assumed and nothing rests on
            it.
        saturated: tells the largest share of saturated outputs in any frame of the projection of some vectors, or None
            if the device shows no frames.
        show: takes frames of fixed patterns, or tells that the device has none.
        baseline: the device as it was when a run began, or None to measure it now.
        certified: whether the law is a certificate's; each check then takes more blank readings.
    """

    baseline: Baseline

    def __init__(
        self,
        settings: MonitorSettings,
        name: str,
        *,
        n_inputs: int,
        read: Readings,
        law: Callable[[], NoiseModel | None],
        judges_law: Callable[[], bool],
        saturated: Callable[[torch.Tensor], float | None],
        show: ShowsFrames,
        baseline: Baseline | None = None,
        certified: bool = False,
    ) -> None:
        self._settings = settings
        self._read = read
        self._law, self._judges_law = law, judges_law
        self._saturated, self._show = saturated, show
        self._vectors = reference_vectors(settings.reference_vectors, n_inputs)
        self._last: np.ndarray | None = None
        self._checked: list[int] = []
        self._is_below, self._certified = True, certified
        if baseline is None:
            baseline = measure_baseline(read, show, self._vectors, settings.baseline_readings)
        if len(baseline.reference) != settings.reference_vectors:
            raise ValueError(
                f"baseline holds {len(baseline.reference)} reference vectors where monitor.reference_vectors = "
                f"{settings.reference_vectors}; restore the setting, or begin a new run"
            )
        super().__init__(name, baseline)
        numbers = _NUMBERS_IF_CERTIFIED if certified else _NUMBERS
        enough = min(-(-numbers // baseline.weights.size), _MOST_READINGS_OF_A_CHECK)
        enough = max(enough, _READINGS_IF_CERTIFIED if certified else 0)
        self._blank = torch.zeros(max(settings.blank_readings, enough), n_inputs)
        self.work = DeviceWork(projections=len(self._blank) + len(self._vectors), calls=2)
        # At log(checks tests / p) all tests give a false alarm with probability at most p in all checks.
        self._level = math.log(settings.checks) + math.log(_TESTS) - math.log(settings.false_alarm_per_run)
        self._make_light_tests()
        self._make_noise_tests()

    def _make_light_tests(self) -> None:
        """Make the tests of the reference readings: light from above and below, medium, outputs."""
        settings, first = self._settings, self.baseline
        readings, size = settings.baseline_readings, first.reference.size
        power, noise = first.power, first.reference_variance
        weight = np.sum(np.square(first.reference), axis=0)  # (n_outputs,)
        slope = math.sqrt(float(np.sum(weight * noise))) / (size * power)
        law = self._law()  # relative standard deviation of a frame's light, an upper limit of the slope's
        spread = float(law.power_rms) if isinstance(law, FluctuatingCountNoise) else 0.0
        slope = math.hypot(slope, max(spread, first.shared_slope))
        mean_noise, noise_share = float(noise.mean()), float(noise.mean()) / power
        first_slope = math.hypot(slope / math.sqrt(readings), noise_share / readings * math.sqrt(2 / size))
        pattern, level = 1 - settings.least_correlation, self._level
        self._brighter = ShiftTest(settings.gain_tolerance, slope, first_slope, level)
        self._dimmer = ShiftTest(settings.gain_tolerance + pattern, slope, first_slope, level)
        squares = float(np.mean(2 * np.square(noise) + 8 * pattern * power * noise)) / (power**2 * size)
        found = relative_error(math.sqrt(2), (readings - 1, size)) + math.sqrt(2 / size) / readings
        other, shared = 2 * pattern + noise_share * settings.noise_tolerance, first.shared_difference
        error = math.hypot(math.sqrt(squares), shared)
        numbers = size if shared == 0 else min(size, len(first.reference) * error**2 / shared**2)
        first_other = math.hypot(noise_share * found, shared / math.sqrt(readings))
        self._other = ShiftTest(other, error, first_other, level, numbers=numbers)
        self._expected_difference = mean_noise * (1 + 1 / readings)
        with np.errstate(divide="ignore"):
            each = np.where(weight > 0, np.sqrt(noise / np.where(weight > 0, weight, 1.0)), np.inf)
        allowed = self._dimmer.tolerance + SURE * each / math.sqrt(readings)
        self._responses = ResponseTest(each, allowed, int(settings.silent_outputs * weight.size), level)
        self._weight = np.where(weight > 0, weight, 1.0)

    def _make_noise_tests(self) -> None:
        """Make the tests of the blank readings: the law from below, change from above and below."""
        first, level, outputs = self.baseline, self._level, self.baseline.weights.size
        degrees, half = len(self._blank) - 1, blank_readings(self._settings.baseline_readings, outputs) // 2
        own, shared_part = relative_error(first.spread, (degrees, outputs)), first.shared_blank / degrees**0.5
        error = math.hypot(own, shared_part)
        first_error = math.hypot(
            relative_error(first.spread, (half - 1, outputs)), first.shared_blank / (half - 1) ** 0.5
        )
        # Effective number of squares in a mean square if outputs share noise of few degrees of freedom: the cumulants
        # of both parts add up; with b the shared part of the error, a tilt t is a tilt of b t for it.
        error2 = max(own**2 + shared_part**2, 1e-24)
        numbers = 2 / error2 if shared_part == 0 else min(2 / error2, degrees * error2 / shared_part**2)
        let_pass = self._settings.noise_tolerance
        shared = level + (math.log(2) if self._certified else 0.0)  # two tests of the law share its part
        self._weaker = ShiftTest(0.0, error, 0.0, shared, numbers)
        judged = outputs if self._certified else 0
        self._single = SingleOutputTest(judged, len(self._blank), first.spread, shared)
        self._louder = ShiftTest(let_pass, error, first_error, level, numbers)
        self._quieter = ShiftTest(let_pass, error, first_error, level, numbers)

    @override
    def checks_between(self, first: int, end: int) -> int:
        every = self._settings.every_steps
        return max(-(-end // every) - -(-first // every), 0)

    @override
    def due(self, step: int) -> bool:
        return step < RESERVED_STEPS and step % self._settings.every_steps == 0

    @property
    @override
    def doubtful_from(self) -> int | None:
        if not self._is_below:
            return None
        return self._last_before(max(self._weaker.looks, self._single.suspect_looks, 1))

    @property
    @override
    def vouched(self) -> int:
        if self.changed and self._is_below:
            return self._last_before(max(self._weaker.looks, self._single.suspect_looks, 1))
        return self._last_before(max(self._weaker.suspect_looks, self._single.suspect_looks))

    def _last_before(self, looks: int) -> int:
        """Return the step of the last check before the latest `looks` ones."""
        before = self._checked[: len(self._checked) - looks]
        return before[-1] if before else BEFORE_ALL

    @override
    def check(self, step: int = BEFORE_ALL) -> None:
        self._checked.append(step)
        self._is_below, self.changed = True, True  # until the end of this check
        try:
            blank, reference = (self._read(vectors) for vectors in (self._blank, self._vectors))
            law = self._law()
            noisy = law is None or bool(np.any(law.variance_bounds()[1] > 0))
            self._check_extremes(reference)
            if noisy:
                self._check_frozen(blank)
            self._check_reference(reference)
            if noisy:
                variance = noise_variance(blank)
                if law is not None and self._judges_law():
                    self._check_law(variance, law)
                self._check_change(variance, blank, law)
        except DeviceError as error:
            error.alarm, error.covered = True, not self._is_below
            raise
        self.changed = False

    @override
    def smallest_changes(self, checks: int) -> dict[str, float]:
        check_arguments.integer(minimum=1, checks=checks)
        single = self._single.smallest(checks) if self._certified else math.nan
        found = {
            "light lost": self._dimmer.smallest(checks),
            "light gained": self._brighter.smallest(checks),
            "correlation": 1 - self._other.smallest(checks) / 2,
            "silent outputs": self._responses.smallest(checks),
            "variance below the law": self._weaker.smallest(checks),
            "variance of one output below the law": single,
            "variance lost": self._quieter.smallest(checks),
            "variance gained": self._louder.smallest(checks),
        }
        losses = {key for key in found if not key.endswith(("gained", "correlation"))}
        return {key: math.nan if key in losses and not value < 1 else value for key, value in found.items()}

    def _check_frozen(self, blank: np.ndarray) -> None:
        """Refuse readings that repeat more often than chance allows."""
        rows = blank if self._last is None else np.vstack([self._last, blank])
        self._last = blank[-1:]
        pairs, repeats = len(rows) - 1, int(np.sum(np.all(rows[1:] == rows[:-1], axis=1)))
        if repeats == 0 or self.baseline.repeat == 0:
            return
        chance = repeats * (math.log(pairs) + self.baseline.repeat) - math.lgamma(repeats + 1)
        if repeats == pairs or chance < -self._level:
            raise self._seen() or self._fault("repeats its readings: the camera is frozen", "restart it")

    def _check_extremes(self, reference: np.ndarray) -> None:
        remedy = "shorten the exposure, dim the laser or lower the gain"
        share = self._saturated(self._vectors)
        if share is not None and share > self._settings.saturated_outputs:
            raise self._fault(f"has {100 * share:.0f} % of its pixels saturated in a frame", remedy)
        for row in reference:
            tied = max(int(np.sum(row == row.max())), int(np.sum(row == row.min())))
            least = max(_LEAST_TIED, math.ceil(self._settings.saturated_outputs * row.size))
            if tied >= least and row.max() > row.min():
                raise self._seen() or self._fault(
                    f"is saturated: {tied} of {row.size} outputs read one extreme value", remedy
                )

    def _check_reference(self, reference: np.ndarray) -> None:
        """Test light, medium and outputs by the readings of the reference vectors."""
        first = self.baseline
        product = reference * first.reference
        slope = float(product.mean()) / first.power
        differences = np.mean(np.square(reference - first.reference), axis=1) - self._expected_difference
        alarms = [
            self._brighter.observe(slope - 1),
            self._dimmer.observe(1 - slope),
            self._other.observe(float(differences.mean()) / first.power),
            self._responses.observe(product.sum(axis=0) / self._weight),
        ]
        if any(alarms):
            if seen := self._seen():
                raise seen
            # If some readings are far off and most are as before, frames did not arrive.
            pattern = 1 - self._settings.least_correlation
            allowed = 2 * pattern * first.power + _SURELY * float(first.reference_variance.mean())
            if np.any(differences > _FAR_OFF * allowed) and np.median(differences) < allowed:
                raise self._lost_frames()
            if self._fluctuates():
                raise self._unsteady()
            raise self._light_fault(reference, *alarms)

    def _seen(self) -> DeviceFault | None:
        """Return the fault that fresh frames of fixed patterns show, if any."""
        try:
            now = look_at_frames(self._show, self._vectors.shape[1]) if self.baseline.frames else None
        except DeviceError:  # the alarm is the error to report
            return None
        found = diagnose(self.baseline.frames, now, tolerated=self._settings.silent_outputs)
        return self._fault(*found) if found else None

    def _lost_frames(self) -> DeviceFault:
        return self._fault(
            "loses or repeats frames: single readings are wholly off, others are not",
            "check the camera's link and its driver",
        )

    def _unsteady(self) -> DeviceFault:
        return self._fault(
            "fluctuates: the noise of all its outputs rises and falls together",
            "steady the laser's power and the bench, or calibrate it again",
        )

    def _fluctuates(self) -> bool:
        """Return whether the scatter that outputs share is above 1.5 times its value in the first look."""
        first = self.baseline
        try:
            taken = np.stack([self._read(self._vectors) for _ in range(_LOOKS_AFTER_AN_ALARM)])
            blank = np.vstack([self._read(self._blank) for _ in range(_BLANKS_AFTER_AN_ALARM)])
        except DeviceError:  # the alarm is the error to report
            return False
        kept = ~self._responses.silent  # stuck outputs may all read one number
        if not np.any(kept):
            return False
        weights, judged = output_weights(blank[::2, kept]), blank[1::2, kept]
        spread = spread_of_squares(judged, weights)  # as they are now: a fault changes outputs unequally
        found = shared_scatter(taken[:, :, kept], judged, weights, spread, first.power)
        return any(now > 1.5 * max(getattr(first, f"shared_{key}"), own) for key, (now, own) in found.items())

    def _light_fault(
        self, reference: np.ndarray, brighter: bool, dimmer: bool, other: bool, silent: bool
    ) -> DeviceFault:
        """Return the fault that explains the alarms: darkness, another medium, silent outputs, or another light."""
        size = max(1 + self._brighter.mean if brighter else 1 - self._dimmer.mean, 0.0)
        power = size**2 + max(self._other.mean - (1 - size) ** 2, 0.0)  # of the signal, relative to the first
        if dimmer and power < _DARK + self._other.error:
            return self._fault("is dark: reference frames carry no signal", "check the laser and the shutter")
        correlation = size / math.sqrt(power) if power > 0 else 0.0
        share = 0.0
        if silent:  # of the judged outputs
            share = float(self._responses.silent.sum() / max(int(self._responses.judged.sum()), 1))
        least = self._settings.least_correlation
        others = self.baseline.correlation(reference, ~self._responses.silent)
        if share > self._settings.silent_outputs and others > least - 0.05:
            return self._fault(
                f"has about {100 * share:.1f} % of its outputs silent or stuck",
                "mask them, or have it repaired",
            )
        # another medium loses as much of the slope as of the correlation; less light loses the slope alone
        if other and correlation < least and 1 - correlation > 0.5 * (1 - size):
            return self._fault(
                f"reads its reference vectors with a correlation of {correlation:.2f} to their first readings: "
                "its medium decorrelated or was swapped",
                "begin a new run with it, or bring the medium back",
            )
        return self._fault(
            f"reads {size:.3g} times what it read at the beginning: its light changed, or single outputs "
            "respond less: some stopped, or the medium moved",
            "bring laser and exposure back, or calibrate it again",
        )

    def _check_law(self, variance: np.ndarray, law: NoiseModel) -> None:
        """Compare the noise with the smallest variance that the law admits: the mean over outputs, then each output."""
        ratio = over_law(variance, law)
        judged = ratio[np.isfinite(ratio)]
        if judged.size and self._weaker.observe(1 - float(judged.mean())):
            raise NoiseBelowCertificate(
                f"device {self._name!r}: blank frames scatter {math.sqrt(max(1 - self._weaker.mean, 0)):.3g} times as "
                f"much as its law states; {'stop private work and ' if self._certified else ''}calibrate it again"
            )
        if self._certified and self._single.observe(ratio):
            output = self._single.output
            raise NoiseBelowCertificate(
                f"device {self._name!r}: output {output} scatters {math.sqrt(ratio[output]):.3g} times as much in "
                "blank frames as its law states; stop private work and calibrate it again"
            )

    def _as_strong(self, law: NoiseModel | None) -> bool:
        """Return whether fresh blank readings show noise above the law's at every output.

        Each output's lower confidence limit for its variance, of the chi-squared law, must exceed the law's. All limits
        hold together with probability 1 - `false_alarm_per_run` (Bonferroni).
        """
        if law is None or not self._certified:
            return False
        blocks = -(-_CONFIRMING // len(self._blank))
        variance = self._fresh_variance(blocks)
        if variance is None:
            return False
        ratio = over_law(variance, law)
        degrees = blocks * (len(self._blank) - 1)
        power = min(1.0, 2 / self.baseline.spread**2)  # squares that scatter more count as fewer
        limit = special.chdtri(power * degrees, self._settings.false_alarm_per_run / ratio.size) / (
            power * degrees
        )
        return bool(np.all(ratio > limit))

    def _check_change(self, variance: np.ndarray, blank: np.ndarray, law: NoiseModel | None) -> None:
        """Compare the noise with its first value; this needs no law."""
        # means over the outputs, weighed by what an independent half of the first look found, so that bright outputs do
        # not hide the others
        weights, before = self.baseline.weights, self.baseline.variance
        if not np.any(weights * before):
            return
        ratio = float((variance * weights).mean() / (before * weights).mean())
        louder, quieter = self._louder.observe(ratio - 1), self._quieter.observe(1 - ratio)
        distances = np.mean(np.square(blank - np.median(blank, axis=0)), axis=1)
        # some are far off, most are not
        if louder and np.max(distances) > _FAR_OFF**2 * np.median(distances):
            raise self._seen() or self._lost_frames()
        if louder or quieter:
            self._is_below = not self._as_strong(law)
            if seen := self._seen():
                raise seen
            if louder and self._fluctuates():
                raise self._unsteady()
            fresh = self._fresh_variance(_BLANKS_AFTER_AN_ALARM) if louder else None
            if fresh is not None and (share := self.baseline.hot_share(fresh)):
                raise self._fault(
                    f"has about {100 * share:.1f} % of its outputs noisier than at the beginning, the others as before",
                    "pixels became hot: mask them, or cool the sensor",
                )
            found = 1 + self._louder.mean if louder else 1 - self._quieter.mean
            raise self._fault(
                f"has {found:.3g} times the noise variance that it had at the beginning",
                "check the sensor's temperature and the light, or calibrate it again",
            )

    def _fresh_variance(self, blocks: int) -> np.ndarray | None:
        """Return the variance of fresh blank readings, or None if the device fails: then the alarm is reported."""
        try:
            found = [noise_variance(self._read(self._blank)) for _ in range(blocks)]
        except DeviceError:
            return None
        return np.asarray(np.mean(found, axis=0))

    def _fault(self, what: str, remedy: str) -> DeviceFault:
        return DeviceFault(f"device {self._name!r} {what}; {remedy}")
