"""How a camera sees labels: one binary frame of each one-hot vector, with the laser dimmed; its light may fluctuate."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from opusim.camera.exposure import CountLaw, OperatingPoint
from opusim.camera.stages import NumberLaw, number_law
from opusim.devices.base import NoisyDevice
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import FluctuatingCountLaw, PhotonCountLaw
from opusim.errors import ConfigError
from opusim.noise import FluctuatingCountNoise, LightPower, PhotonCountNoise

FRAMES_AT_ONCE = 4096
POWER_SHARE = 0.1
"""Share of the delta that certificates leave, at which a frame of light that fluctuates may be too bright."""
_NODES = 7
"""Powers over which a likelihood under light that fluctuates is averaged."""
KEY = "protection.noise"


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelFrames:
    """How a camera sees the labels: one frame of each one-hot vector.

    Attributes:
        device: The open camera.
        law: Of its counts; the first frame of a reading is the one-hot vector's own.
        dark: Least expected electrons without light that are credited at each pixel, shape (pixels,).
        certified: Limits of the device's certificate, or None without one.
        power: Law of the laser's power in a frame, of the largest spread that the certificate allows; None if it is
            constant.
        beta: Probability that these are wrong, 0 without one.
        certificate: Digest of the certificate, or empty.
    """

    device: CameraDevice
    law: CountLaw
    dark: np.ndarray
    certified: PhotonCountLaw | FluctuatingCountLaw | None = None
    power: LightPower | None = None
    beta: float = 0.0
    certificate: str = ""

    @classmethod
    def of(cls, device: NoisyDevice, n_classes: int) -> LabelFrames:
        """Return how an open device sees the labels, within the limits of its certificate if it has one.

        Raises:
            ConfigError: It is no simulated camera, reads holograms, its light drifts slowly, or it states no law of its
                counts.
        """
        if not isinstance(device, CameraDevice) or device.stated_noise is None:
            reason = (
                f"device {device.name!r} counts no photons at rates that are known; use a camera without drift and "
                "lost frames, or 'digital'"
            )
            raise ConfigError("configuration", KEY, reason)
        if device.is_holographic:
            reason = (
                f"device {device.name!r} reads holograms, and counts are kept of frames without a reference beam; "
                "remove camera.reference_beam, or use 'digital'"
            )
            raise ConfigError("configuration", KEY, reason)
        _require_steady_mean(device)
        law = device.count_law(torch.eye(n_classes), at_mean_power=True)
        stated, certificate = device.noise, device.certificate
        if not isinstance(stated, PhotonCountNoise | FluctuatingCountNoise):
            raise ConfigError(
                "configuration", KEY, f"{stated.law!r} is no law of photon counts; use 'digital'"
            )
        power = stated.power if isinstance(stated, FluctuatingCountNoise) else None
        found = cls(device=device, law=law, dark=np.asarray(stated.rate_low)[0], power=power)
        if certificate is None or not isinstance(certificate.noise, PhotonCountLaw | FluctuatingCountLaw):
            return found
        return replace(
            found, certified=certificate.noise, beta=certificate.beta, certificate=certificate.digest
        )

    @cached_property
    def fingerprint(self) -> bytes:
        """Tells whether two openings of a camera see the labels alike: a digest of all but the device."""
        parts = self.law, self.dark, self.certified, self.power, self.beta, self.certificate
        return hashlib.blake2b(pickle.dumps(parts)).digest()

    @property
    def excess(self) -> float:
        """Most mean light, as a multiple of the law's, that the certificate allows; 1 without one."""
        return 1.0 if self.certified is None else self.certified.light_ratio_high

    def power_error(self, delta: float) -> float:
        """Return the share of a delta with which a frame may be brighter than accounted for; 0 of constant light.

        Each label is shown in one frame, so the union bound over the frames of a record has one term.
        """
        if self.power is None or self.power.rms == 0:
            return 0.0
        return POWER_SHARE * max(delta - self.beta, 0.0)

    def brightest(self, power_error: float) -> float:
        """Return w_max: the relative power that a frame exceeds with at most this probability; 1 of constant light."""
        return 1.0 if self.power is None else self.power.limit(power_error)

    @cached_property
    def powers(self) -> tuple[np.ndarray, np.ndarray]:
        """Relative powers of a frame as described and their probabilities, by Gauss-Hermite quadrature."""
        if self.law.power is None:
            return np.ones(1), np.ones(1)
        normals, weights = np.polynomial.hermite_e.hermegauss(_NODES)
        return self.law.power.of_normal(normals), weights / weights.sum()

    @cached_property
    def light(self) -> np.ndarray:
        """Expected electrons of light of each label's frame as described, shape (labels, pixels)."""
        return self.law.light_e[0]

    def rates(self, light: float) -> np.ndarray:
        """Return the expected electrons of each label's frame as described, shape (labels, pixels)."""
        return self.law.rates(OperatingPoint(light=light))[0]

    def numbers(self, rates: np.ndarray, pixels: np.ndarray) -> NumberLaw:
        """Return the law of the digital numbers of some pixels at rates of all."""
        law = self.law
        return number_law(rates[:, pixels], law.offset_e[pixels], law.sensor, law.nonlinearity)

    def taken(self, labels: Tensor, light: float) -> np.ndarray:
        """Take a frame of each label, digital numbers, shape (n, pixels)."""
        return self.device.dimmed_frames(torch.eye(self.device.n_inputs)[labels], light)


def _require_steady_mean(device: CameraDevice) -> None:
    """Refuse light whose mean drifts: the drift is that of training steps, and labels are shown outside them."""
    camera = device.description.camera
    if camera is not None and camera.light.power is not None and camera.light.power.drift_rms is not None:
        reason = (
            "drifts from training step to training step, and labels are shown before the first one; steady the laser "
            f"and leave drift_rms out, or use {KEY} = 'digital'"
        )
        raise ConfigError(device.name, "camera.light.power.drift_rms", reason)
