"""Conductances of differential pairs: programming, relaxation, drift and accumulated 1/f noise.

A weight w in [-1, 1] is held by two devices with the targets g+ = max(w, 0) and g- = max(-w, 0), relative to g_max. For
each device, in the order in which the effects act:

1. programming: g_p = max(g + sigma_p(g) z_1 / g_max, 0); or relaxation, the same with a sigma_p(g, t) that is linear in
   ln t between the times of the description and constant outside;
2. drift: g_d = g_p ((t0 + t) / t0)^-nu with nu = |mean(g) + std(g) z_2|;
3. 1/f noise accumulated since programming: g_f = max(g_d (1 + q(g_p) sqrt(ln((t0 + t + t_read) / (2 t_read))) z_3), 0).

t is the time since programming. z_1 and z_2 are drawn once for each programmed device, z_3 at each time that is looked
at: two looks share no 1/f noise, which they would if they lay close together. q is taken at the programmed conductance,
as in aihwkit's code (its documentation takes the target; aihwkit issue 436).

Sources: Nandakumar et al., ICECS 2019 (PCM); Le Gallo et al., Nature Electronics 2023 (HERMES); Wan et al., Nature 2022
(ReRAM); forms and constants as in aihwkit, src/aihwkit/inference/noise.
"""

from __future__ import annotations

import math

import torch

from opusim.description.crossbar import CrossbarSettings, LowFrequencySettings, PiecewiseSettings
from opusim.randomness.streams import SeededStream

_LEAST_G = 1e-7
"""Relative conductance below which logarithms and powers are held constant."""
_WEIGHTS_AT_ONCE = 2**20
_EXACT = 2.0**14
"""Realised weights are multiples of 1 / _EXACT, so that sums over ternary inputs of a tile are exact in float32."""


class Pairs:
    """The devices of one programming; `weights` tells what they hold at a time.

    Args:
        wanted: the matrix W, float32, entries in [-1, 1], shape (n_outputs, n_inputs).
        settings: laws and constants.
        chip: seed of the chip, in [0, 2^64).
        number: which programming of the chip this is, from 0.
    """

    def __init__(self, wanted: torch.Tensor, settings: CrossbarSettings, *, chip: int, number: int) -> None:
        self._wanted, self._settings, self._chip, self._number = wanted, settings, chip, number

    def weights(self, seconds: float, look: int) -> torch.Tensor:
        """Return w = g+ - g- at a time, float32, of the wanted matrix's shape.

        Args:
            seconds: since programming, at least 0.
            look: how often the matrix was looked at since programming; each look has 1/f noise of its own.
        """
        fixed = SeededStream(self._chip, "crossbar programming")
        fixed.seek(self._number)
        passing = SeededStream(self._chip, f"crossbar 1/f noise of programming {self._number}")
        passing.seek(look)
        found = torch.empty_like(self._wanted)
        rows = max(1, _WEIGHTS_AT_ONCE // self._wanted.shape[1])
        for wanted, part in zip(self._wanted.split(rows), found.split(rows), strict=True):
            plus, minus = (self._at(side, seconds, fixed, passing) for side in (wanted, -wanted))
            part.copy_(plus.sub_(minus).mul_(_EXACT).round_().div_(_EXACT))
        return found

    def _at(
        self, side: torch.Tensor, seconds: float, fixed: SeededStream, passing: SeededStream
    ) -> torch.Tensor:
        """Return the relative conductances of one side of the pairs."""
        settings, target = self._settings, side.clamp(min=0)
        g = target
        if settings.spreads_us():
            g = target.addcmul(spread(target, seconds, settings), _normal(fixed, target)).clamp_(min=0)
        if settings.drift is None:
            return g.clone()
        nu = piecewise(target, settings.drift.mean)
        nu.addcmul_(piecewise(target, settings.drift.std), _normal(fixed, target)).abs_()
        t0 = settings.drift.t0_s
        drifted = g * torch.exp(nu * -math.log((t0 + seconds) / t0))
        law = settings.low_frequency
        if law is None:
            return drifted
        relative = low_frequency(g, law).mul_(accumulated(t0 + seconds, law.t_read_s))
        return drifted.mul_(relative.mul_(_normal(passing, target)).add_(1)).clamp_(min=0)


def spread(g: torch.Tensor, seconds: float, settings: CrossbarSettings) -> torch.Tensor:
    """Return the standard deviation of the programmed conductance, relative to g_max; 0 for exact programming.

    Args:
        g: targets in [0, 1].
        seconds: since programming; only a relaxation depends on it.
        settings: laws and constants.
    """
    polynomials = settings.spreads_us()
    if not polynomials:
        return torch.zeros_like(g)
    if settings.relaxation is None:
        return evaluate(polynomials[0], g).div_(settings.g_max_us)
    times = settings.relaxation.times_s
    late = next((index for index, time in enumerate(times) if time >= seconds), len(times) - 1)
    early = max(0, late - 1)
    share = 1.0
    if late > early and seconds > times[early]:
        share = min(1.0, math.log(seconds / times[early]) / math.log(times[late] / times[early]))
    before, after = evaluate(polynomials[early], g), evaluate(polynomials[late], g)
    return before.lerp_(after, share).div_(settings.g_max_us)


def moments(g: torch.Tensor, seconds: float, settings: CrossbarSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance of a conductance, relative to g_max, float32, of the targets' shape.

    With s = sigma_p(g, t), u = g / s, L = ln((t0 + t) / t0), nu ~ N(m, tau^2), q = q(g), a the accumulated 1/f noise,
    mean = E[g_p] E[k] and second moment = E[g_p^2] E[k^2] (1 + q^2 a^2), where

        E[g_p] = g Phi(u) + s phi(u),        E[g_p^2] = (g^2 + s^2) Phi(u) + g s phi(u),
        E[k] = exp(-m L + tau^2 L^2 / 2),    E[k^2] = exp(-2 m L + 2 tau^2 L^2).

    Left out: that nu and the conductance with 1/f noise are not negative, and that q is taken at g_p.

    Args:
        g: targets in [0, 1].
        seconds: since programming, at least 0.
        settings: laws and constants.
    """
    std = spread(g, seconds, settings)
    ratio = g / std.clamp(min=_LEAST_G)
    density = ratio.square().mul_(-0.5).exp_().mul_(std / math.sqrt(2 * math.pi))
    below = torch.special.ndtr(ratio)
    mean, second = g * below + density, (g.square() + std.square()) * below + g * density
    if settings.drift is None:
        return mean, second.sub_(mean.square()).clamp_(min=0)
    decay = math.log((settings.drift.t0_s + seconds) / settings.drift.t0_s)
    nu, tau = piecewise(g, settings.drift.mean).mul_(decay), piecewise(g, settings.drift.std).mul_(decay)
    variance = tau.square_()
    second *= torch.exp(2 * (variance - nu))
    mean *= torch.exp(variance / 2 - nu)
    law = settings.low_frequency
    if law is not None:
        passing = low_frequency(g, law).mul_(accumulated(settings.drift.t0_s + seconds, law.t_read_s))
        second *= passing.square_().add_(1)
    return mean, second.sub_(mean.square()).clamp_(min=0)


def piecewise(g: torch.Tensor, law: PiecewiseSettings) -> torch.Tensor:
    """Return `PiecewiseSettings` at relative conductances, a new tensor."""
    below = g.clamp(min=_LEAST_G).log_().mul_(law.slope).add_(law.offset).clamp_(law.lowest, law.highest)
    if law.branch is None or law.polynomial is None:
        return below
    return torch.where(g < law.branch, below, evaluate(law.polynomial, g))


def low_frequency(g: torch.Tensor, law: LowFrequencySettings) -> torch.Tensor:
    """Return q(g) of the accumulated 1/f noise, a new tensor."""
    if law.power is not None:
        powers = g.clamp(min=_LEAST_G).pow_(law.power.exponent)
        return powers.mul_(law.power.coefficient).clamp_(max=law.power.highest)
    return torch.zeros_like(g) if law.pieces is None else piecewise(g, law.pieces)


def accumulated(seconds: float, t_read_s: float) -> float:
    """Return sqrt(ln((t + t_read) / (2 t_read))), 0 for times below t_read."""
    return math.sqrt(max(0.0, math.log((seconds + t_read_s) / (2 * t_read_s))))


def evaluate(coefficients: list[float], g: torch.Tensor) -> torch.Tensor:
    """Return sum_k coefficients[k] g^k by Horner's rule, a new tensor."""
    value = torch.full_like(g, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value.mul_(g).add_(coefficient)
    return value


def _normal(stream: SeededStream, like: torch.Tensor) -> torch.Tensor:
    return stream.normal(like.shape).to(like.device)
