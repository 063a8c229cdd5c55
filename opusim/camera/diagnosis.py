"""Tell faults of a camera apart: by raw frames of a few fixed patterns, and by scatter that outputs share.

Readings are differences of frames, in which offsets cancel, so faults that differ in frames may look alike in readings.
A look shows the blank frame, half of the data mirrors at random, and single mirrors, each followed by its complement in
the anchor; the blank frame's complement is the anchor. After an alarm a later look is compared with the first one. The
light of a frame is what it reads above the blank frame.

| fault | what shows it |
| --- | --- |
| lost frames | frames that repeat the one before exactly, or are constant and darker than before |
| power, moving image | scatter over repeats that outputs share; along the frame's light, or mostly across it |
| ambient light, warmer sensor | blank frames read more, by the same at all outputs |
| mirror contrast | blank frames read more, in proportion to the anchor's light |
| mirrors stuck on | blank frames read more, as speckle does |
| silent outputs | no light in any frame |
| cross-talk | light that follows the earlier light of the neighbouring outputs |
| stuck mirrors | a mirror's readings vanish; only complements change; light and correlation fall alike |
| moving medium | the frames' correlation over outputs falls, and none of the above |

Every statistic must exceed five of its standard errors. Ambient light and dark charge add up to one Poisson rate in
every frame, so frames of one exposure and temperature cannot tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

_SEED = 20261123
"""Seed of the patterns, which are the same for every device and run."""
_HALVES, _SINGLES = 4, 16
_MOST_INPUTS = 1024
"""Most data mirrors with which single ones are shown; with more, noise hides the light of one."""
_MOST_OUTPUTS, LEAST_OUTPUTS = 4096, 32
"""Most outputs of a frame that are looked at, and fewest with which frames tell anything."""
_NUMBERS, _LEAST_REPEATS, _MOST_REPEATS = 2**13, 8, 32
_SURE = 5.0
"""Standard errors."""
_ALL_LOST = 0.9
"""Share of lost frames beyond which a camera is frozen or dark."""
_DARK = 0.05
"""Share of the first light below which frames are dark."""
_SILENT = 0.1
"""Share of a frame's mean light that a silent output never has."""
_LEAST_LEVEL = 0.01
"""Least change of blank frames that is named, relative to the anchor's light."""
_LEAST_SPREAD, _LIKE_THE_ANCHOR = 0.25, 0.8
"""Least squared relative spread of speckle over outputs (0: uniform); least correlation of light like the anchor."""
_LEAST_TALK, _LEAST_LOSS = 0.005, 0.005
"""Least share of light from each neighbour, and least loss of correlation, that are named."""
_ALONG = 0.6
"""Share of the shared scatter along the light: 1 for a power, some 0.3 for an image that moves."""
_MORE_SHARED = 5.0
"""Factor over the first shared scatter, which is a fourth power: 1.5 in standard deviation."""
_LAGS = 4  # of looks that may correlate; at least 8 looks are taken
_SURELY_SHARED = 3.0
_FLOOR = 1e-6
"""Least standard deviation that is shared: rounding of float32."""
_GONE = 0.1
"""Share of a single mirror's mean square reading, below which it is stuck."""


_LIT, _HALF, _COMPLEMENTS = (
    slice(1, 2 + 2 * _HALVES),
    slice(2, 2 + 2 * _HALVES, 2),
    slice(1, 2 + 2 * _HALVES, 2),
)
"""Frames of many mirrors: all of them, of data mirrors only, and the anchor with the complements."""


ShowsFrames = Callable[[torch.Tensor], np.ndarray | None]
"""How a monitor takes frames of binary patterns, never of data: each pattern is followed by its complement in the
anchor; returns DN, shape (2 patterns, n_outputs), or None if the device shows no frames."""


@dataclass(frozen=True, kw_only=True)
class FrameLook:
    """Frames of all patterns, taken several times; they never depend on data.

    Attributes:
        mean: of each frame over repeats, shape (frames, outputs), DN.
        variance: over repeats, of that shape.
        repeats: at least 8.
        shared: see `_shared_squares`.
        along: share of the shared scatter that follows the light.
        lost: frames that repeat the one before exactly; constant ones are in `constant`.
        constant: number of each frame's repeats that read one number at all outputs, and their mean, shape (frames, 2).
    """

    mean: np.ndarray
    variance: np.ndarray
    repeats: int
    shared: float
    along: float = 0.0
    lost: int = 0
    constant: np.ndarray

    def to_numbers(self) -> np.ndarray:
        """Return the look that later ones are compared with, as float64 numbers on one axis."""
        head = [len(self.mean), self.repeats, self.shared]
        return np.concatenate([head, self.constant.ravel(), self.mean.ravel(), self.variance.ravel()])

    @classmethod
    def of_numbers(cls, numbers: np.ndarray, n_outputs: int) -> FrameLook:
        """Return the look of numbers from `to_numbers`, for `n_outputs` outputs; further numbers are ignored."""
        frames, outputs = int(numbers[0]), min(n_outputs, _MOST_OUTPUTS)
        constant, mean, variance = np.split(
            numbers[3 : 3 + frames * (2 + 2 * outputs)], [2 * frames, frames * (2 + outputs)]
        )
        return cls(
            mean=mean.reshape(frames, outputs),
            variance=variance.reshape(frames, outputs),
            constant=constant.reshape(frames, 2),
            repeats=int(numbers[1]),
            shared=float(numbers[2]),
        )

    @property
    def light(self) -> np.ndarray:
        """What frames read above the blank frame, shape (frames, outputs)."""
        return self.mean - self.mean[:1]


def patterns_of(n_inputs: int) -> torch.Tensor:
    """Return the patterns: nothing, half of the data mirrors, single ones of a narrow window; (patterns, n_inputs)."""
    generator = torch.Generator().manual_seed(_SEED)
    halves = torch.randint(0, 2, (_HALVES, n_inputs), generator=generator).float()
    order = torch.randperm(n_inputs, generator=generator)
    singles = order[: _SINGLES if n_inputs <= _MOST_INPUTS else 0]
    shown = torch.zeros(len(singles), n_inputs)
    shown[torch.arange(len(singles)), singles] = 1
    return torch.cat([torch.zeros(1, n_inputs), halves, shown])


def look_at_frames(show: ShowsFrames, n_inputs: int) -> FrameLook | None:
    """Take a look, or return None if the device shows no frames or has fewer than 32 outputs."""
    patterns = patterns_of(n_inputs)
    first = show(patterns)
    if first is None or first.shape[1] < LEAST_OUTPUTS:
        return None
    repeats = min(max(-(-_NUMBERS // first.shape[1]), _LEAST_REPEATS), _MOST_REPEATS)
    kept = [first[:, :_MOST_OUTPUTS]]
    for _ in range(repeats - 1):
        frames = show(patterns)
        if frames is None:
            return None
        kept.append(frames[:, :_MOST_OUTPUTS])
    return look_of(np.stack(kept).astype(np.float64))


def look_of(frames: np.ndarray) -> FrameLook:
    """Return the look of frames in the order in which they were shown, shape (repeats, frames, outputs), DN."""
    mean = frames.mean(axis=0)
    in_turn = frames.reshape(-1, frames.shape[2])
    again = np.append(False, np.all(in_turn[1:] == in_turn[:-1], axis=1)).reshape(frames.shape[:2])
    still = (np.ptp(frames, axis=2) == 0) & ~again
    level = np.sum(frames[:, :, 0] * still, axis=0) / np.maximum(still.sum(axis=0), 1)
    shared, along = _shared_squares(frames[:, 1::2], mean[1::2] - mean[0])
    return FrameLook(
        mean=mean,
        variance=frames.var(axis=0, ddof=1),
        repeats=len(frames),
        shared=shared,
        along=along,
        lost=int(again.sum()),
        constant=np.stack([still.sum(axis=0), level], axis=1),
    )


def _shared_squares(frames: np.ndarray, light: np.ndarray) -> tuple[float, float]:
    """Return how much scatter outputs share, 0 if it is not significant, and which share of it follows the light.

    With E_k the differences of successive repeats of a frame and v_j = Var E_kj, sums G_kl = sum_j E_kj E_lj, k < l,
    of independent outputs have mean 0 and variance V = sum_j v_j^2. The first number is the mean over frames and pairs
    of G_kl^2 / V, minus 1. If outputs share D_k p_j, G_kl^2 has the mean (Var D)^2 |p|^4 more.
    """
    even = len(frames) - len(frames) % 2
    differences = (frames[1:even:2] - frames[0:even:2]).transpose(1, 0, 2)  # (frames, pairs, outputs)
    pairs, outputs = differences.shape[1:]
    variance = np.mean(np.square(differences), axis=1)
    sums = np.square(variance).sum(axis=1) / (1 + 2 / pairs)
    lit = sums > 0
    if not np.any(lit):
        return 0.0, 0.0
    gram = differences @ differences.transpose(0, 2, 1)
    above = np.triu_indices(pairs, 1)
    squares = np.mean(np.square(gram[:, *above]), axis=1)
    found = float(np.mean(squares[lit] / sums[lit])) - 1
    error = math.hypot(
        math.sqrt(2 / (lit.sum() * above[0].size)), math.sqrt(8 / (pairs * outputs * lit.sum()))
    )
    if found <= _SURE * error:
        return 0.0, 0.0
    size = np.maximum(np.square(light).sum(axis=1), 1e-300)
    along = np.mean(np.square(np.einsum("fkj,fj->fk", differences, light)), axis=1)
    own = np.einsum("fj,fj->f", variance, np.square(light))
    share = np.sum((along - own)[lit] / size[lit]) / np.sum(np.sqrt(np.maximum(squares - sums, 0))[lit])
    return found, float(share)


def diagnose(first: FrameLook | None, now: FrameLook | None, *, tolerated: float) -> tuple[str, str] | None:
    """Return the fault that a look shows and its remedy; None if frames show none, are dark or are missing."""
    if first is None or now is None:
        return None
    # Frames that repeat the one before, or are constant and darker than before; not if nearly all are.
    number, level = now.constant.T
    error = np.sqrt(first.variance.sum(axis=1)) / first.mean.shape[1]
    darker = (level < first.mean.mean(axis=1) - _SURE * error) & (first.constant[:, 0] == 0)
    lost, shown = now.lost + int(number[darker].sum()), now.repeats * len(now.mean)
    if 0 < lost < _ALL_LOST * shown:
        return (
            f"loses or repeats frames: {lost} of {shown} frames are black or repeat the one before",
            "check the camera's link and its driver",
        )
    # Scatter that outputs share, significant and above the first one's.
    if now.shared > _MORE_SHARED * first.shared and now.shared != 0:
        along = now.along > _ALONG
        return (
            "fluctuates: the noise of all its outputs rises and falls together, as "
            + ("the laser's power does" if along else "if the image moves"),
            "steady the laser's power, or calibrate it again" if along else "steady the bench and the camera",
        )
    if now.light[1].sum() < _DARK * first.light[1].sum():
        return None
    silent = _silent(now)
    if len(silent) - silent.sum() < LEAST_OUTPUTS:
        return None
    change = _Change(first, now, ~silent)
    newly = float(np.mean(silent & ~_silent(first)))
    found = (
        change.blank_light()
        or (
            (
                f"has about {100 * newly:.1f} % of its outputs silent or stuck",
                "mask them, or have it repaired",
            )
            if newly > tolerated
            else None
        )
        or change.cross_talk()
        or change.stuck_mirrors()
    )
    correlation, moved = (1.0, False) if found else change.correlation(_LIT)
    if not moved:
        return found
    return (
        f"shows its frames with a correlation of {correlation:.2f} to their first ones: its medium decorrelated or "
        "was swapped",
        "begin a new run with it, or bring the medium back",
    )


def _silent(look: FrameLook) -> np.ndarray:
    """Which outputs have no light in any frame of many mirrors: dead ones, and those that are always full."""
    light = look.light[_LIT]
    return np.asarray(np.all(np.abs(light) < _SILENT * light.mean(axis=1, keepdims=True), axis=0))


_STUCK_REMEDY = "have the mirror array repaired, or begin a new run"


class _Change:
    """What differs between two looks at the outputs that are alive, not silent."""

    def __init__(self, first: FrameLook, now: FrameLook, alive: np.ndarray) -> None:
        self._first, self._now, self._alive = first, now, alive
        self._before, self._after = first.light[:, alive], now.light[:, alive]
        self._error_before, self._error_after = (
            ((look.variance + look.variance[:1]) / look.repeats)[:, alive] for look in (first, now)
        )

    def blank_light(self) -> tuple[str, str] | None:
        """Blank frames that read more or less: uniform, like the anchor, or as speckle."""
        first, now, alive = self._first, self._now, self._alive
        more = (now.mean[0] - first.mean[0])[alive]
        noise = float(np.mean((first.variance[0] / first.repeats + now.variance[0] / now.repeats)[alive]))
        level, anchor = float(np.median(more)), self._before[1]
        scatter = max(1.4826 * float(np.median(np.abs(more - level))), math.sqrt(noise))
        least = max(_SURE * 1.2533 * scatter / math.sqrt(more.size), _LEAST_LEVEL * float(anchor.mean()))
        if abs(level) < least:
            return None
        share = 100 * float(more.mean() / anchor.mean())
        what = f"reads {abs(share):.2g} % of the anchor's light {'more' if share > 0 else 'less'} in blank frames"
        spread = float(more.var()) - noise
        if spread < _LEAST_SPREAD * float(more.mean()) ** 2:
            return (
                f"{what}, alike at all outputs: ambient light or the sensor's temperature changed",
                "shut the light out, or bring the temperature back",
            )
        like = float(np.cov(more, anchor)[0, 1]) / math.sqrt(max(spread * float(anchor.var()), 1e-300))
        if like > _LIKE_THE_ANCHOR:
            return (
                f"{what}, in proportion to the anchor: the contrast of its mirrors changed",
                "check the angle of the light on the mirrors",
            )
        return f"{what}, in speckle: some mirrors are stuck", _STUCK_REMEDY

    def cross_talk(self) -> tuple[str, str] | None:
        """Light that follows the neighbours' earlier light: least squares of light on own and neighbours' first light.

        The error is that of sums over outputs, whose frames may depend on each other.
        """
        before, after = _centred(self._first.light[_LIT]), _centred(self._now.light[_LIT])
        around, inner = before[:, :-2] + before[:, 2:], self._alive[1:-1]
        own, beside, light = before[:, 1:-1][:, inner], around[:, inner], after[:, 1:-1][:, inner]
        normal = np.array(
            [[np.sum(own * own), np.sum(own * beside)], [np.sum(own * beside), np.sum(beside * beside)]]
        )
        if np.linalg.det(normal) <= 0:
            return None
        inverse = np.linalg.inv(normal)
        gain, talk = inverse @ np.array([np.sum(own * light), np.sum(beside * light)])
        rest = light - gain * own - talk * beside
        scores = inverse @ np.stack([np.sum(own * rest, axis=0), np.sum(beside * rest, axis=0)])
        error, whole = math.sqrt(float(np.sum(np.square(scores[1])))), max(gain + 2 * talk, 1e-300)
        if talk < _SURE * error or talk < _LEAST_TALK * whole:
            return None
        return (
            f"shows {100 * talk / whole:.2g} % of each output's light at each of its neighbours: cross-talk grew",
            "check the camera's bias and focus, or begin a new run",
        )

    def stuck_mirrors(self) -> tuple[str, str] | None:
        """Mirrors that are stuck although blank frames do not tell."""
        (before, own), (after, noise) = self._singles(self._first), self._singles(self._now)
        gone = tested = 0  # single mirrors that no longer read anything, and those that noise lets test
        if len(before):
            power = np.mean(np.square(before) - own, axis=1)
            now = np.mean(np.square(after) - noise, axis=1)
            error_of_one = np.sqrt(2 * np.mean(np.square(noise), axis=1) / noise.shape[1])
            light = float(self._after[1].sum() / self._before[1].sum())
            least = _GONE * light**2 * power
            told = _SURE * error_of_one < least
            gone, tested = int(np.sum(told & (now < least))), int(told.sum())
        if 0 < gone < tested:
            return f"has {gone} of {tested} mirrors stuck that were shown singly", _STUCK_REMEDY
        _, data_moved = self.correlation(_HALF)
        correlation, moved = self.correlation(_COMPLEMENTS)
        if moved and not data_moved:
            return (
                "shows data mirrors as before and all mirrors as another speckle: mirrors of the anchor are stuck",
                _STUCK_REMEDY,
            )
        lost = (self._before - self._after)[_LIT].sum(axis=0) / self._before[_LIT].sum(axis=0).mean()
        share, error = float(lost.mean()), float(lost.std()) / math.sqrt(lost.size)
        if moved and share > max(_SURE * error, 0.5 * (1 - correlation)):
            return (
                f"lost {100 * share:.2g} % of its light, and as much of its correlation: some mirrors are stuck",
                _STUCK_REMEDY,
            )
        return None

    def _singles(self, look: FrameLook) -> tuple[np.ndarray, np.ndarray]:
        """Return readings of single mirrors, I_e - I_(a-e) - I_0 + I_a, and the variance of their errors."""
        mean, variance = look.mean[:, self._alive], look.variance[:, self._alive] / look.repeats
        one, rest = slice(2 + 2 * _HALVES, None, 2), slice(3 + 2 * _HALVES, None, 2)
        reading = mean[one] - mean[rest] - mean[0] + mean[1]
        return reading, variance[one] + variance[rest] + variance[0] + variance[1]

    def correlation(self, rows: slice) -> tuple[float, bool]:
        """Return the correlation over outputs of some frames with their first ones, noise taken out.

        The second value says whether it is significantly below 1.
        """
        before, after = _centred(self._before[rows]), _centred(self._after[rows])
        own, noise = self._error_before[rows], self._error_after[rows]
        power = max(float(np.sum(np.square(before) - own)), 1e-300)
        slope = float(np.sum(before * after)) / power
        rest = np.sum(np.square(after - slope * before) - noise - slope**2 * own, axis=0)
        size = max(float(np.sum(np.square(after) - noise)), 1e-300)
        loss = min(max(float(rest.sum()) / size, 0.0), 1.0)
        value = math.copysign(math.sqrt(1 - loss), slope)
        error = math.sqrt(rest.size) * float(rest.std()) / size
        return value, loss > _SURE * error and 1 - value > _LEAST_LOSS


def _centred(light: np.ndarray) -> np.ndarray:
    """Return light without each frame's mean over outputs."""
    return light - light.mean(axis=1, keepdims=True)


def shared_scatter(
    taken: np.ndarray, blank: np.ndarray, weights: np.ndarray, spread: float, power: float
) -> dict[str, tuple[float, float]]:
    """Return how much means over outputs scatter from look to look by shared noise, and by independent noise.

    The keys are blank, slope and difference; readings (looks, vectors, n_outputs) are `taken` of the reference vectors,
    `spread` is as for `Baseline`, and `power` is the mean square of the reference signal.
    """
    reference, noise = taken.mean(axis=0), taken.var(axis=0, ddof=1).mean(axis=0)
    squares = np.mean(weights * np.square(blank - blank.mean(axis=0)), axis=1)
    values = {
        "blank": squares / max(float(squares.mean()), 1e-300),
        "slope": np.mean(taken * reference, axis=(1, 2)) / power,
        "difference": np.mean(np.square(taken - reference), axis=(1, 2)) / power,
    }
    own = {
        "blank": spread / math.sqrt(blank.shape[1]),
        "slope": math.sqrt(float(np.mean(np.square(reference) * noise)) / reference.size) / power,
        "difference": math.sqrt(2 * float(np.mean(np.square(noise))) / reference.size) / power,
    }
    return {key: (_shared(values[key], own[key]), own[key]) for key in values}


def _shared(values: np.ndarray, own: float) -> float:
    """Return an upper limit of the standard deviation of successive looks' numbers beyond that of independent noise.

    That is the root of the excess over `own` and two standard errors of the variance, times 1 + 2 (sum of the first
    `_LAGS` autocorrelations) if that is above 1, so that over sqrt n it is the error of a mean of n looks.
    """
    centred = values - values.mean()
    count, variance = len(values), float(values.var(ddof=1))
    if variance <= own**2 * (1 + _SURELY_SHARED * math.sqrt(2 / count)) or variance < _FLOOR**2:
        return 0.0
    upper = variance - own**2 + 2 * float(np.square(centred).std()) / math.sqrt(count)
    products = [float(centred[lag:] @ centred[:-lag]) for lag in range(1, _LAGS + 1)]
    return math.sqrt(upper * max(1.0, 1 + 2 * sum(products) / max(float(centred @ centred), 1e-300)))
