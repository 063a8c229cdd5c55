"""Tests of a bench at its opening, which name what is wrong.

| test | refuses |
| --- | --- |
| outputs that are full in frames of the anchor | saturation |
| the anchor's frame now and at the setup, and before and after the other tests | another medium, one that moves, |
| | light that changed |
| data and reference mirrors interfere: I(a) - I(data) - I(reference) + I(0) | light that is not coherent, a reference |
| | that no light reaches: not an anchor |
| B (v + w) = B v + B w for vectors that share no entry | anything else that makes readings nonlinear |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from opusim.description.camera import BenchSettings
from opusim.devices.bench.instruments import MOST_FLICKER, STABILISE, Sequencer
from opusim.errors import DeviceFault
from opusim.processes import pause
from opusim.tables import Shown

_FRAMES = 8
"""Frames of each pattern in a look at the light."""
_MOST_LIGHT = 1.5
"""Factor by which the light may have changed since the setup."""
_NEAR_POWER = 0.05
"""Relative distance from a power of two within which a change of the light looks like a change of bits."""
_MOST_LIGHT_NOW = 1.1
"""Factor by which it may change during the tests."""
_LEAST_LIGHT = 0.2
"""Share of the light below which frames of the anchor tell nothing of the medium."""
LEAST_KNOWN = 0.05
"""Share of the light below which it counts as gone."""
_BRIGHT = 0.06
"""Share of the camera's range above which a blank frame is bright; light that is below this share of it is no light."""
_LEAST_INTERFERENCE = 0.03
"""Least mean square of the interference of data and reference, as for fringes of 25 %; coherent light has 1/2."""
_PAIRS = 16
"""Pairs of vectors that the linearity test adds up."""
_SEED = 20261130
_SURE = 5.0  # standard errors


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LightLook(Shown):
    """Frames of the anchor, of its parts and of the blank pattern, at the outputs.

    Attributes:
        anchor_dn: anchor less blank at each output, DN.
        full: share of the outputs that are full in a frame of the anchor, mean over frames.
        interference: mean square of cos(phase) between the fields of data and reference.
        bits: of the camera's numbers.
        blank_dn: mean of the blank frames, DN.
        flicker: standard deviation of the anchor's light from frame to frame, over its mean.
    """

    anchor_dn: np.ndarray
    full: float
    interference: float
    bits: int
    blank_dn: float
    flicker: float

    def _shown(self) -> dict[str, object]:
        return {
            "outputs": self.anchor_dn.size,
            "anchor": f"{self.anchor_dn.mean():.1f} DN",
            "full": f"{self.full:.2%}",
            "interference": f"{self.interference:.2f}",
        }

    def correlation(self, anchor_dn: np.ndarray) -> float:
        """Return the correlation over outputs with another frame of the anchor."""
        one, other = (values - values.mean() for values in (self.anchor_dn, anchor_dn))
        return float(np.sum(one * other) / max(np.sqrt(np.sum(one**2) * np.sum(other**2)), 1e-30))

    def light(self, anchor_dn: np.ndarray) -> float:
        """Return the light over that of another frame of the anchor."""
        return float(self.anchor_dn.sum() / anchor_dn.sum())


def look_at_light(source: Sequencer, outputs: np.ndarray | None = None) -> LightLook:
    """Show anchor, data mirrors, reference mirrors and nothing, and look at the outputs (None: the whole region)."""
    anchor, reference = source.layout.anchor(), source.layout.reference()
    shown = np.concatenate([anchor, ~reference, reference, ~anchor])
    frames = source.show(shown.repeat(_FRAMES, axis=0), outputs)
    means = frames.reshape(len(shown), _FRAMES, -1).mean(axis=1)
    whole, data, other = means[:3] - means[3]
    anchors = frames[:_FRAMES].reshape(_FRAMES, -1).mean(axis=1) - means[3].mean()
    mixed = np.sum(np.square(whole - data - other))
    return LightLook(
        anchor_dn=whole,
        full=float(np.mean(frames[:_FRAMES] >= source.top_dn)),
        interference=float(mixed / max(np.sum(4 * data.clip(0) * other.clip(0)), 1e-30)),
        bits=source.bits,
        blank_dn=float(means[3].mean()),
        flicker=float(anchors.std(ddof=1) / max(anchors.mean(), 1e-9)),
    )


def nonlinearity(read: Callable[[torch.Tensor], torch.Tensor], n_inputs: int) -> tuple[float, float]:
    """Return the root mean square of r over that of y, and what noise alone exceeds once in 10^6 (5 standard errors).

    With v and w of disjoint entries, r = y(v + w) - y(v) - y(w) is noise on a linear device. Each vector is read twice,
    and r r' of the two readings over y(v + w) y'(v + w) has no part in noise.
    """
    generator = torch.Generator().manual_seed(_SEED)
    signs = torch.randint(0, 2, (_PAIRS, n_inputs), generator=generator).mul_(2).sub_(1).float()
    first = torch.rand((_PAIRS, n_inputs), generator=generator).argsort(dim=1) < n_inputs // 2
    vectors = torch.stack([signs, signs * first, signs * ~first])
    taken = read(vectors.repeat(2, 1, 1).flatten(0, 1)).cpu().double().numpy().reshape(2, 3, _PAIRS, -1)
    left = taken[:, 0] - taken[:, 1] - taken[:, 2]
    power = max(float(np.mean(taken[0, 0] * taken[1, 0])), 1e-30)
    products = left[0] * left[1]
    error = float(products.std()) / products.size**0.5
    found = max(float(products.mean()), 0.0) / power
    return found**0.5, (_SURE * error / power) ** 0.5


def require_light(
    look: LightLook, before_dn: np.ndarray, settings: BenchSettings, name: str, *, setup_of: str | None
) -> None:
    """Refuse a bench whose light is not that of its setup, or changed since an earlier look of this opening.

    `before_dn` is the anchor's frame before, of the setup of a date, or of this opening if `setup_of` is None.
    """
    told = f"device {name!r}:"
    again = ", or measure the setup anew (remove its file)" if settings.setup is not None else ""
    if look.full > settings.most_saturated:
        raise DeviceFault(
            f"{told} saturation: {look.full:.1%} of the outputs are full in frames of the anchor, and "
            f"bench.most_saturated is {settings.most_saturated:.1%}; shorten the exposure or dim the laser{again}"
        )
    correlation, light = look.correlation(before_dn), look.light(before_dn)
    when = "during the opening" if setup_of is None else f"since the setup of {setup_of}"
    if correlation < settings.least_correlation and light > _LEAST_LIGHT:
        what = "drift: the medium moves" if setup_of is None else "the medium is another"
        settle = "let it settle, and keep air and vibration away"
        remedy = settle if setup_of is None else f"put plate, camera and mirrors back{again}"
        raise DeviceFault(
            f"{told} {what}: frames of the anchor correlate by {correlation:.2f} {when}, and bench.least_correlation "
            f"is {settings.least_correlation:g}; {remedy}"
        )
    most = _MOST_LIGHT_NOW if setup_of is None else _MOST_LIGHT
    if not 1 / most <= light <= most:
        raise DeviceFault(f"{told} {_other_light(look, light, when, again, within=setup_of is None)}")
    require_interference(look, name)


def light_is_unswitched(light: float, blank: float, top: int) -> str:
    """Return cause and remedy of a bright blank frame to which the anchor adds hardly any light; empty otherwise."""
    if blank < _BRIGHT * top or light > _BRIGHT * blank:
        return ""
    return (
        f"the blank frame shows {blank:.0f} of {top} DN, and the anchor as much: light arrives, but does not follow "
        "the patterns; switch the camera's automatic gain and exposure off, keep ambient light away, and check "
        "that the mirrors switch and that the laser lights them"
    )


def _other_light(look: LightLook, light: float, when: str, again: str, *, within: bool) -> str:
    """Return the likeliest cause of a change of the light, by the factor `light`, `when` it was, and the remedy."""
    changed = f"the light changed to {max(light, 0.0):.2g} times {when}"
    if light < LEAST_KNOWN:
        unswitched = light_is_unswitched(float(look.anchor_dn.mean()), look.blank_dn, 2**look.bits - 1)
        return unswitched or (
            f"{changed}, it is gone: check laser and shutter, that the mirrors switch, and that the camera "
            "waits for their pulses"
        )
    if abs(np.log(light)) < _SURE * look.flicker * (2 / _FRAMES) ** 0.5:
        return f"the light fluctuates by {look.flicker:.0%} from frame to frame ({changed}); {STABILISE}"
    if within:
        return f"{changed}: bring the laser to its power and let it warm up"
    shift = round(np.log2(light))
    if 2 <= abs(shift) < look.bits and abs(light / 2.0**shift - 1) < _NEAR_POWER:
        was, now = look.bits - max(shift, 0), look.bits + min(shift, 0)
        return (
            f"{changed}, about 2^{shift}, as if the camera's numbers had {now} bits instead of {was}: set its bit "
            f"depth and bit shift as they were, or the laser's power{again}"
        )
    return (
        f"{changed}: bring the laser to its power and let it warm up, set the camera's gain and bit depth as they "
        f"were{again}"
    )


def require_interference(look: LightLook, name: str) -> None:
    """Refuse a bench on which data and reference do not interfere: mean cos^2(phase) is far below 1/2."""
    if look.interference < _LEAST_INTERFERENCE:
        raise DeviceFault(
            f"device {name!r}: not an anchor: light of data and reference mirrors does not interfere (mean square of "
            f"the interference {look.interference:.2f}, coherent light has 0.5); use a laser whose coherence length "
            "exceeds the medium's spread of paths, and light all mirrors of the window"
        )


def require_bits(source: Sequencer, name: str) -> None:
    """Refuse a camera whose numbers end at 2^k - 1 with k below its bits."""
    largest, bits = source.largest_dn, source.largest_dn.bit_length()
    if source.is_cut and largest < source.top_dn and largest == 2**bits - 1:
        raise DeviceFault(
            f"device {name!r}: the camera's numbers end at {largest} = 2^{bits} - 1, and bits = {source.bits}; set "
            f"bits = {bits}, or let the camera deliver {source.bits} bits"
        )


def require_linear(
    found: tuple[float, float], look: LightLook, source: Sequencer, settings: BenchSettings, name: str
) -> None:
    """Refuse a bench whose readings, by `nonlinearity`, do not add up, after `require_light` excluded other causes."""
    require_bits(source, name)
    nonlinear, noise = found
    if nonlinear > (settings.most_nonlinear**2 + noise**2) ** 0.5:
        cause = (
            "numbers are not proportional to light: switch gamma, automatic exposure, automatic gain and defect "
            "correction of the camera off, and lower bench.range_share if its pixels are full below its largest number"
        )
        if look.flicker > max(MOST_FLICKER, nonlinear / _SURE):
            cause = f"the light fluctuates by {look.flicker:.0%} from frame to frame: {STABILISE}"
        raise DeviceFault(
            f"device {name!r}: readings do not add up: B (v + w) differs from B v + B w by {nonlinear:.1%} rms, and "
            f"bench.most_nonlinear is {settings.most_nonlinear:.1%}; {cause}"
        )


_ROUNDS, _STARTS = 300, 8
"""Rounds of alternating projections, and most random starts of an output that does not come near its light."""
_EXPLAINED = 3.0
"""An output's start is kept if its unexplained light is at most this multiple of the median."""


def retrieved(
    shown: np.ndarray, light: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Find T with abs(T x)^2 nearest to the light of patterns x, up to a phase and a conjugation at each output.

    Alternating projections (Gerchberg and Saxton, Optik 35, 237, 1972): fields take the measured amplitudes, then the T
    of least squares. Each output starts at random; one whose unexplained light shows a local minimum starts again.
    Patterns (frames, inputs) have the rank inputs, light is that above a blank frame's. The second value is
    sum (abs(T x) - a)^2 / sum a^2 of each output, with the measured amplitudes a.
    """
    rows, amplitudes = shown.astype(np.float64), np.sqrt(np.maximum(light, 0.0))
    solve, power = np.linalg.pinv(rows), np.maximum(np.square(amplitudes).sum(axis=0), 1e-300)
    found = np.zeros((rows.shape[1], light.shape[1]), dtype=np.complex128)
    left = np.full(light.shape[1], np.inf)
    again = np.arange(light.shape[1])
    for _ in range(_STARTS):
        wanted, shape = amplitudes[:, again], (rows.shape[1], len(again))
        columns = rng.normal(size=shape) + 1j * rng.normal(size=shape)
        for _ in range(_ROUNDS):
            pause()
            columns = solve @ (wanted * np.exp(1j * np.angle(rows @ columns)))
        error = np.square(np.abs(rows @ columns) - wanted).sum(axis=0) / power[again]
        better = error < left[again]
        found[:, again[better]], left[again[better]] = columns[:, better], error[better]
        again = np.flatnonzero(left > _EXPLAINED * np.median(left))
        if not len(again):
            break
    return found.T, left
