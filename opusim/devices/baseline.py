"""The baseline that a monitor compares a device with, and sequential tests of whether the device has changed.

The tests have a stated probability of a false alarm over a whole run. Both keep e-values: numbers at least 0 whose
conditional mean, as long as the device stays within its tolerance, is at most 1. The product of e-values from any check
on exceeds 1/p with probability at most p (Ville), and a test that begins at most K such products in K looks gives a
false alarm with probability at most p when it waits for K/p. The e-values are those of Gaussian statistics whose
standard errors are known to within 20 % and whose first look errs by less than six standard errors; the test suite
counts false alarms of whole devices. Source: Shin, Ramdas and Rinaldo, "E-detectors" (arXiv 2203.03532); the sum of
products and the CUSUM are theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from opusim.camera.diagnosis import FrameLook, ShowsFrames, look_at_frames, shared_scatter
from opusim.noise import MeasuredNoise, NoiseModel
from opusim.plugins import Deferred

special = Deferred("scipy.special")

_FLOOR = 1e-6
"""Least standard error: rounding of float32."""
_SEED = 20261121
"""Seed of the reference vectors, which are the same for every device and run."""
_LEAST_NUMBERS = 2**16
"""Fewest numbers in the blank readings of a first look, so that its error stays below a check's."""
_MOST_READINGS = 4096
_NUMBERS = ("power", "spread", "repeat", "shared_blank", "shared_slope", "shared_difference")
_ROWS = ("weights", "variance", "reference_variance")
"""Fields of a baseline, in the order of the rows of its array."""


Readings = Callable[[torch.Tensor], np.ndarray]
"""How a monitor takes readings of a device, float64, a row for each of some ternary vectors; never of data."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Means over the first look at a device; they never depend on data.

    Attributes:
        reference: mean readings of the reference vectors, shape (vectors, n_outputs).
        power: mean square of the reference signal, without noise.
        weights: one over the noise variance of each output, from one half of the blank readings; zeros without noise.
        variance: noise variance of each output, from the other half.
        reference_variance: noise variance of each output in readings of the reference vectors, averaged over them.
        spread: standard deviation of the square of one blank reading over its mean, outputs weighed by `weights`;
            sqrt 2 for Gaussian noise of one variance, larger if outputs or tails differ.
        shared_blank: relative standard deviation of a blank reading's mean square over outputs, as far as noise that
            outputs share causes it, such as a fluctuating power's; 0 if the scatter is no larger than that of
            independent outputs. An upper limit; correlated successive readings raise it.
        shared_slope: likewise for the slope of a look's reference readings on their mean.
        shared_difference: likewise for a look's mean square difference from the mean, over `power`.
        frames: frames of fixed patterns, or None if the device shows none.
        repeat: logarithm of the probability that two blank readings agree at every output; far below 0 except for
            narrow windows of coarse converters; 0 without noise.
    """

    reference: np.ndarray
    power: float
    weights: np.ndarray
    variance: np.ndarray
    reference_variance: np.ndarray
    spread: float
    repeat: float
    shared_blank: float
    shared_slope: float
    shared_difference: float
    frames: FrameLook | None = None

    def correlation(self, reference: np.ndarray, kept: np.ndarray) -> float:
        """Return the correlation of one reading of each vector with the first ones at some outputs, without noise."""
        if not np.any(kept):
            return 0.0
        before, now, noise = self.reference[:, kept], reference[:, kept], self.reference_variance[kept]
        powers = [float(np.mean(values**2 - share * noise)) for values, share in ((before, 0.0), (now, 1.0))]
        return float(np.mean(before * now)) / math.sqrt(max(powers[0] * powers[1], 1e-300))

    def hot_share(self, variance: np.ndarray) -> float:
        """Return the share of outputs whose noise variance at least doubled; 0 if the noise of the others rose too.

        It did if the median output gained 25 % or more, or if the doubled ones hold at most half of the total gain.
        """
        gained = variance[self.variance > 0] / self.variance[self.variance > 0] - 1
        hot = gained > 1
        few = np.median(gained) < 0.25 and 2 * np.sum(gained[hot]) > np.sum(gained)
        return float(np.mean(hot)) if few else 0.0

    def to_array(self) -> np.ndarray:
        """Return everything as one array, float64, shape (vectors + 10, n_outputs): to be kept with a run.

        With frames, rows that hold them come first.
        """
        packed = np.zeros(0) if self.frames is None else self.frames.to_numbers()
        columns = self.weights.size
        first = np.zeros((-(-packed.size // columns), columns))
        first.flat[: packed.size] = packed
        numbers = [np.full(columns, getattr(self, key)) for key in _NUMBERS]
        rows = [getattr(self, key) for key in _ROWS]
        return np.vstack([first, self.reference, *numbers, np.full(columns, float(len(first))), *rows])

    @classmethod
    def from_array(cls, array: np.ndarray) -> Baseline:
        """Return the baseline of an array from `to_array`; ValueError if it has too few rows, as earlier versions'."""
        packed = int(array[-4, 0]) if len(array) > 10 else 0
        if len(array) < 11 + packed:
            raise ValueError(
                f"baseline has {len(array)} rows: must have at least {11 + packed}; another version kept it, begin a "
                "new run"
            )
        values: dict[str, Any] = dict(zip(_ROWS, array[-3:], strict=True))
        values |= {key: float(row[0]) for key, row in zip(_NUMBERS, array[-10:-4], strict=True)}
        frames = FrameLook.of_numbers(array[:packed].ravel(), array.shape[1]) if packed else None
        return cls(reference=np.array(array[packed:-10]), frames=frames, **values)


def measure_baseline(read: Readings, show: ShowsFrames, vectors: torch.Tensor, readings: int) -> Baseline:
    """Take the first look, with ternary reference vectors and binary patterns, a row each.

    At least twice as many blank readings are taken as of each vector, up to 4,096 by a narrow window.
    """
    taken = np.stack([read(vectors) for _ in range(readings)])  # (readings, vectors, n_outputs)
    reference, outputs = taken.mean(axis=0), taken.shape[2]
    reference_variance = taken.var(axis=0, ddof=1).mean(axis=0)
    half = blank_readings(readings, outputs) // 2
    blank = read(torch.zeros(2 * half, vectors.shape[1]))
    first, second = blank[:half], blank[half:]
    weights = output_weights(first)
    power = max(float(np.mean(reference**2)) - float(reference_variance.mean()) / readings, 1e-30)
    spread = spread_of_squares(second, weights)
    shared = {key: found for key, (found, _) in shared_scatter(taken, second, weights, spread, power).items()}
    # Successive readings of an output agree with this probability, at least one over their number.
    agreeing = np.maximum(np.mean(second[1:] == second[:-1], axis=0), 1 / len(second))
    return Baseline(
        reference=reference,
        power=power,
        weights=weights,
        variance=noise_variance(second),
        reference_variance=reference_variance,
        spread=spread,
        repeat=max(float(np.sum(np.log(agreeing))), -1e3),
        **{f"shared_{key}": found for key, found in shared.items()},
        frames=look_at_frames(show, vectors.shape[1]),
    )


def measure_noise(
    read: Callable[[torch.Tensor], torch.Tensor], n_inputs: int, readings: int = 64
) -> MeasuredNoise:
    """Measure what a device that states no law needs for training: variances of blank and of repeated frames."""
    dense = reference_vectors(1, n_inputs)[0]
    levels = sorted({0, -(-n_inputs // 2), n_inputs})
    shown = torch.stack([torch.where(torch.arange(n_inputs) < level, dense, 0.0) for level in levels])
    taken = read(shown.repeat(readings, 1)).cpu().double().numpy().reshape(readings, len(levels), -1)
    return MeasuredNoise(levels=np.array(levels), variances=taken.var(axis=0, ddof=1), readings=readings)


def output_weights(blank: np.ndarray) -> np.ndarray:
    """Return one over the noise variance of each output, zero without noise; see `Baseline`."""
    variance = noise_variance(blank)
    return np.divide(1.0, variance, out=np.zeros_like(variance), where=variance > 0)


def spread_of_squares(blank: np.ndarray, weights: np.ndarray) -> float:
    """Return the standard deviation of a squared blank reading over its mean, at least sqrt 2; see `Baseline`."""
    squares = weights * np.square(blank - blank.mean(axis=0))
    mean = float(squares.mean())
    return math.sqrt(2) if mean <= 0 else max(math.sqrt(2), float(squares.std()) / mean)


def blank_readings(readings: int, n_outputs: int) -> int:
    """Return how many blank readings the first look takes: twice a reference vector's, or enough for 65,536 numbers."""
    return 2 * max(readings, min(-(-_LEAST_NUMBERS // (2 * n_outputs)), _MOST_READINGS // 2))


def noise_variance(readings: np.ndarray) -> np.ndarray:
    """Return the unbiased variance of each output over readings of one vector, shape (readings, n_outputs)."""
    variance: np.ndarray = readings.var(axis=0, ddof=1)
    return variance


def reference_vectors(count: int, n_inputs: int) -> torch.Tensor:
    """Return fixed ternary vectors without a zero, shape (count, n_inputs)."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(0, 2, (count, n_inputs), generator=generator).mul_(2).sub_(1).float()


TILTS = (0.25, 0.5, 1.0, 2.0, 4.0, 7.0)
"""Changes beyond the tolerance, in standard errors of a look; a CUSUM is tuned for each."""
BLOCKS = (1, 8, 64)
"""Looks over which the responses of single outputs are added up."""
_INFLATION = 1.2
"""Factor on every standard error, to allow for its own error and for tails that are not Gaussian."""
_TAIL = 0.35
"""Largest tilt over the square root of the numbers in a mean square: up to there its e-value has mean at most 1."""
_FOUND = 0.99
"""Probability with which a test finds its smallest change."""
SURE = 6.0
"""Standard errors of the first look that are allowed on top of a tolerance."""
SHRUNK = (0.95, 0.8, 0.5, 0.1, 0.01)
"""Variances over the law's; a CUSUM of every single output is tuned for each."""
_MOST_TILT = 3.0
_LEAST_ROOM = 0.25


class ShiftTest:
    """Whether a statistic exceeds its tolerance: CUSUMs of log e = t z - t^2 / 2 for the tilts t.

    z = (statistic - tolerance - 6 first_error) / (1.2 error). A CUSUM restarts at 0 from below, and alarms at `level`.

    Args:
        tolerance: largest mean of the statistic that is tolerated.
        error: standard error of the statistic in one look.
        first_error: standard error that the first look adds to the statistic of every later look.
        level: log(K tests / p); the logarithm of the number of tilts is added here.
        numbers: number of independent squares whose mean the statistic is; None if it is linear in the readings.
    """

    def __init__(
        self, tolerance: float, error: float, first_error: float, level: float, numbers: float | None = None
    ) -> None:
        self.tolerance = tolerance + SURE * first_error
        self.error = _INFLATION * max(error, _FLOOR)
        self._first_error = first_error
        largest = math.inf if numbers is None else _TAIL * math.sqrt(numbers)
        self._tilts = np.array([tilt for tilt in TILTS if tilt <= largest] or TILTS[:1])
        self._level = level + math.log(len(TILTS))
        self._sums = np.zeros(self._tilts.size)
        self._totals = np.zeros(self._tilts.size)
        self._looks = np.zeros(self._tilts.size)

    def observe(self, value: float) -> bool:
        """Take the statistic of a check; return whether it gives an alarm."""
        z = (value - self.tolerance) / self.error
        fresh = self._sums <= 0
        self._sums = np.where(fresh, 0.0, self._sums) + self._tilts * z - 0.5 * self._tilts**2
        self._totals = np.where(fresh, 0.0, self._totals) + value
        self._looks = np.where(fresh, 0, self._looks) + 1
        return bool(np.max(self._sums) >= self._level)

    @property
    def mean(self) -> float:
        """Mean of the statistic over the checks summed by the largest CUSUM."""
        best = int(np.argmax(self._sums))
        return float(self._totals[best] / max(self._looks[best], 1))

    @property
    def looks(self) -> int:
        """Checks summed by the largest CUSUM; 0 if none is above 0."""
        best = int(np.argmax(self._sums))
        return int(self._looks[best]) if self._sums[best] > 0 else 0

    @property
    def suspect_looks(self) -> int:
        """The same, but 0 if no CUSUM is past half the level of an alarm."""
        return self.looks if np.max(self._sums) >= 0.5 * self._level else 0

    def smallest(self, looks: int) -> float:
        """Return the smallest statistic that is found within `looks` checks after the change, with probability 0.99."""
        needed = np.min(self._level / (looks * self._tilts) + 0.5 * self._tilts)
        missed = -special.ndtri(1 - _FOUND) * math.hypot(self.error / math.sqrt(looks), self._first_error)
        return float(self.tolerance + self.error * needed + missed)


class ResponseTest:
    """Whether more outputs than a tolerated number have stopped responding.

    Each output's response g_j is the slope of its reference readings on its first ones. With
    log e_j = t (1 - a_j - g_j) / s_j - t^2 / 2, added up over a block of looks, the e-value is the product over outputs
    of 1 - w + w e_j without its largest factors, one for each output that may stop. It is an e-value whichever outputs
    stop, as long as all others respond by 1 - a_j or more.

    Args:
        error: standard error of each output's response in a look, shape (n_outputs,), finite.
        tolerance: a_j, the loss that is tolerated, errors of the first look included, of the same shape. Outputs whose
            tolerance exceeds 0.75 are left out: their noise hides their response.
        tolerated: outputs that may stop.
        level: as for `ShiftTest`.
    """

    def __init__(self, error: np.ndarray, tolerance: np.ndarray, tolerated: int, level: float) -> None:
        self.judged = tolerance <= 1 - _LEAST_ROOM
        self._error = _INFLATION * np.maximum(error[self.judged], _FLOOR)
        self._tolerance = tolerance[self.judged]
        self._tilt = np.minimum((1 - self._tolerance) / self._error, _MOST_TILT)
        self._tolerated = tolerated
        size = int(self.judged.sum())
        self._share = min(0.05, 4 / max(size, 1))
        self._level = level + math.log(len(BLOCKS))
        self._logs = np.zeros((len(BLOCKS), size))
        self._totals = np.zeros((len(BLOCKS), size))
        self._looks = np.zeros(len(BLOCKS), dtype=int)
        self._loudest = 0

    def observe(self, responses: np.ndarray) -> bool:
        """Take every output's response in a look, shape (n_outputs,); return whether it gives an alarm."""
        if not np.any(self.judged):
            return False
        found = responses[self.judged]
        z = (1 - self._tolerance - found) / self._error
        over = self._looks >= BLOCKS
        self._looks = np.where(over, 0, self._looks) + 1
        fresh = over[:, None]
        self._logs = np.where(fresh, 0.0, self._logs) + self._tilt * z - 0.5 * self._tilt**2
        self._totals = np.where(fresh, 0.0, self._totals) + found
        values = [-math.inf] * len(BLOCKS)  # logarithms of the e-values
        kept = self._tilt.size - self._tolerated  # the largest factors are left out
        if kept > 0:
            values = [
                float(np.sum(np.partition(self._factors(logs), kept - 1)[:kept])) for logs in self._logs
            ]
        self._loudest = int(np.argmax(values))
        return max(values) >= self._level

    @property
    def silent(self) -> np.ndarray:
        """Which outputs respond by less than a half, over the loudest block so far, shape (n_outputs,).

        The half is of their median where that is a quarter or more: light that falls to a half silences none.
        """
        responses = self._totals[self._loudest] / max(int(self._looks[self._loudest]), 1)
        common = float(np.median(responses)) if responses.size else 1.0
        silent = self.judged.copy()
        silent[self.judged] = responses < 0.5 * (min(common, 1.0) if common > 0.25 else 1.0)
        return silent

    def smallest(self, looks: int) -> float:
        """Return the smallest share of silent outputs that is found within `looks` looks; NaN if none is.

        Each output counts with the factor of the lowest tenth, since the largest factors are removed, and with readings
        that err by 2.3 standard errors the other way. It holds for outputs that stop at the beginning of a block of
        looks; others may take a block longer.
        """
        size = self._tilt.size
        within = max((block for block in BLOCKS if block <= looks), default=1)
        sure_z = within * (1 - self._tolerance) / self._error + special.ndtri(1 - _FOUND) * math.sqrt(within)
        gain = self._tilt * sure_z - 0.5 * within * self._tilt**2
        factor = float(np.quantile(self._factors(gain), 0.1)) if size else 0.0
        if factor <= 0:
            return math.nan
        count = self._tolerated + (self._level - size * math.log1p(-self._share)) / factor
        return (math.floor(count) + 1) / size if count < size else math.nan

    def _factors(self, logs: np.ndarray) -> np.ndarray:
        """Return the logarithms of 1 - w + w e_j."""
        return np.logaddexp(math.log1p(-self._share), math.log(self._share) + np.minimum(logs, 500.0))


class SingleOutputTest:
    """Whether a single output's variance is below the law's: CUSUMs of log e for each output and each ratio c.

    With S_j the sum of squares of output j's readings about their mean over the law's variance, and df one less than
    their number, log e = k (-df log c - S_j (1/c - 1)) / 2: for k = 1 the likelihood ratio of c times the variance.
    k = 2 / spread^2, at most 1, allows for squares that scatter more than Gaussian ones; E e^k <= (E e)^k. A CUSUM
    restarts at 0 from below, and gives an alarm at `level`, to which the logarithm of the number of outputs and ratios
    is added here.

    Args:
        n_outputs: Outputs that are tested.
        readings: Readings of each output in a look, at least 2.
        spread: See `Baseline`.
        level: As for `ShiftTest`.
    """

    def __init__(self, n_outputs: int, readings: int, spread: float, level: float) -> None:
        self._ratios = np.array(SHRUNK)[:, None]
        self._degrees, self._power = readings - 1, min(1.0, 2 / spread**2)
        self._level = level + math.log(len(SHRUNK) * max(n_outputs, 1))
        self._sums = np.zeros((len(SHRUNK), n_outputs))
        self._looks = np.zeros((len(SHRUNK), n_outputs), dtype=int)

    def observe(self, ratio: np.ndarray) -> bool:
        """Take each variance over the law's in a look, shape (n_outputs,); return whether it gives an alarm."""
        gain = -np.log(self._ratios) - ratio * (1 / self._ratios - 1)
        fresh = self._sums <= 0
        self._sums = np.where(fresh, 0.0, self._sums) + 0.5 * self._power * self._degrees * gain
        self._looks = np.where(fresh, 0, self._looks) + 1
        return bool(self._sums.size) and float(self._sums.max()) >= self._level

    @property
    def output(self) -> int:
        """The output with the largest CUSUM."""
        return int(np.argmax(self._sums.max(axis=0)))

    @property
    def suspect_looks(self) -> int:
        """Checks summed by the largest CUSUM if it is past half the level of an alarm, else 0."""
        best = np.unravel_index(int(np.argmax(self._sums)), self._sums.shape) if self._sums.size else None
        return 0 if best is None or self._sums[best] < 0.5 * self._level else int(self._looks[best])

    def smallest(self, looks: int) -> float:
        """Return the smallest loss of one output's variance that is found, with probability 0.99; NaN: none is.

        The loss is relative to the law's variance, and the readings are Gaussian or of the spread that was measured.
        """
        degrees = looks * self._degrees
        most = float(special.chdtri(max(degrees * self._power, 1.0), 1 - _FOUND)) / self._power
        found = (-degrees * np.log(self._ratios) - 2 * self._level / self._power) / (1 / self._ratios - 1)
        largest = float(np.max(found)) / most
        return 1 - largest if largest > 0 else math.nan


def relative_error(spread: float, numbers: Sequence[int]) -> float:
    """Return the relative error of a mean square: the relative spread of one square over the root of their number."""
    return spread / math.sqrt(max(math.prod(numbers), 1))


def over_law(variance: np.ndarray, law: NoiseModel) -> np.ndarray:
    """Return each output's variance over the least that the law states; infinite where the law states none."""
    low = np.broadcast_to(law.variance_bounds()[0], variance.shape)
    return np.divide(variance, low, out=np.full(variance.shape, np.inf), where=low > 0)
