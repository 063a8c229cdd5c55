"""The kind ``microring_bank``: rows of a matrix as banks of rings, a ring for each wavelength, read by photodiodes.

A ring drops the share T of a wavelength whose phase around the ring is p away from resonance (Airy; near resonance a
Lorentzian as wide as the free spectral range over the finesse F):

    T(p) = 1 / (1 + (2 F / pi)^2 sin^2(p / 2)),    (Bogaerts et al., Laser & Photonics Reviews 6, 47, 2012)

A bank has one ring for each channel j, and channels are 2 pi / channels of phase apart. What all rings of the bank
leave of a channel goes through, the rest is dropped, and the balanced photodiodes subtract the two:

    w_j = 1 - 2 prod_k (1 - T(2 pi (j - k) / channels - d_k)),

the weights of Tait et al., Scientific Reports 7, 7430 (2017); powers add, without interference between rings. A
single ring gives w = 2 T - 1. To program w, the ring is detuned by the d_k at which T = (1 + r w) / 2, where r is the
largest r for which -r is reached half way to the next channel. Effects, in the order in which they act on a setting:

1. tuning: d_k is a multiple of pi / channels / (2^bits - 1);
2. thermal cross-talk: a ring's detuning is its setting and `heater_crosstalk` times those of its neighbours;
3. temperature: all rings move by 2 pi shift_ghz_per_k (T - T_calibrated) / free_spectral_range_ghz;
4. channel cross-talk: the product over k, which grows as channels exceed the finesse (Tait et al., IEEE J. Sel. Top.
   Quantum Electron. 22, 5900214, 2016);
5. control: N(0, tuning_std^2) on each weight, drawn once for each programming.

The result is divided by r. Light has no sign: positive and negative inputs are shown one after the other and their
readings subtracted. With the power P of a channel after the loss, a reading of x has the variance

    (2 q R P bandwidth sum_j |x_j| + 2 * 4 k T bandwidth / load) / (R P r)^2,

the shot noise of all light of both frames, and the load's thermal noise in each.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from typing_extensions import override

from opusim.crossbar.device import Light, PhotonicDevice
from opusim.description.crossbar import RingSettings
from opusim.errors import ConfigError
from opusim.randomness.streams import SeededStream


def dropped(phase: np.ndarray, finesse: float) -> np.ndarray:
    """Return T, the share of light that a ring drops, at a phase from resonance, radians."""
    return np.asarray(1 / (1 + (2 * finesse / math.pi * np.sin(phase / 2)) ** 2))


def detuned(share: np.ndarray, finesse: float) -> np.ndarray:
    """Return the phase from resonance, in [0, pi], at which a ring drops a share: the inverse of `dropped`."""
    sine = np.sqrt(np.maximum(1 / share - 1, 0)) * math.pi / (2 * finesse)
    return np.asarray(2 * np.arcsin(np.minimum(sine, 1)))


class RingDevice(PhotonicDevice):
    """A bank of microrings for each output: ``[rings]``, with a channel for each input at least, and ``[medium]``."""

    section = "rings"
    _settings: RingSettings

    @override
    def _require_fitting(self) -> None:
        channels, frames = self._settings.channels, self.description.frames.frames_per_projection
        if self.description.n_inputs > channels:
            reason = f"must be at most rings.channels = {channels}; a larger matrix is put on several chips"
            raise ConfigError(self.name, "n_inputs", reason)
        if frames != 2:
            reason = f"{frames}: positive and negative inputs are shown one after the other; write 2"
            raise ConfigError(self.name, "frames.frames_per_projection", reason)

    @override
    def _light(self, matrix: torch.Tensor, settings: RingSettings, chip: int, number: int) -> Light:
        wanted, spacing = matrix.cpu().double().numpy(), 2 * math.pi / settings.channels
        furthest = spacing / 2
        reach = 1 - 2 * float(dropped(np.asarray(furthest), settings.finesse))
        if reach <= 0:
            reason = (
                f"{settings.finesse:g}: resonances of {settings.channels} channels overlap, so no ring lets half of "
                f"its channel through; give a finesse above {settings.channels}, or fewer channels"
            )
            raise ConfigError(self.name, "rings.finesse", reason)
        detuning = detuned((1 + reach * wanted) / 2, settings.finesse)
        if settings.phase_bits is not None:
            step = furthest / (2**settings.phase_bits - 1)
            detuning = np.round(detuning / step) * step
        if settings.heater_crosstalk:
            beside = np.pad(detuning, ((0, 0), (1, 1)))
            detuning = detuning + settings.heater_crosstalk * (beside[:, :-2] + beside[:, 2:])
        warmer_k = settings.celsius - (25.0 if settings.calibrated_c is None else settings.calibrated_c)
        moved = 2 * math.pi * settings.shift_ghz_per_k * warmer_k / settings.free_spectral_range_ghz
        rings = np.arange(wanted.shape[1])
        through = np.ones_like(wanted)
        for ring in rings:  # each takes its share of every channel of its bank
            phases = spacing * (rings - ring) - detuning[:, ring, None] - moved
            through *= 1 - dropped(phases, settings.finesse)
        stream = SeededStream(chip, "control of rings")
        stream.seek(number)
        control = settings.tuning_std * stream.normal(wanted.shape).double().numpy()
        power = settings.laser_w * 10 ** (-settings.loss_db / 10)
        detector, squared = settings.detector, (settings.detector.responsivity_a_per_w * power * reach) ** 2
        return Light(
            weights=(1 - 2 * through + control) / reach,
            dark=2 * detector.thermal_a2(settings.celsius) / squared,
            by_input=detector.shot_a2(power) / squared,
        )
