"""A calibration from frames alone: what is taken, what is concluded, and the certificate that says so."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from opusim import checks
from opusim.calibration.certificate import (
    Certificate,
    GaussianLaw,
    Limits,
    PhotonCountLaw,
    TestedProperty,
    digest_of,
)
from opusim.calibration.code_noise import dark_noise_dn
from opusim.calibration.drift import decorrelation_time, sparse_patterns
from opusim.calibration.jackknife import Estimate
from opusim.calibration.photon_transfer import PhotonTransfer
from opusim.calibration.plan import Plan, take_photon_transfer
from opusim.calibration.reading_noise import ReadingNoise, evaluate_readings
from opusim.devices.base import NoisyDevice
from opusim.devices.camera import CameraDevice
from opusim.noise import GaussianNoise

_ANCHOR_FRAMES = 100
_PARTS_OF_BETA = 6  # two limits of the gain, the mean anchor and the dark charge


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """What a calibration took and found.

    Attributes:
        certificate: the summary that is kept.
        readings: readings of one constant input, shape (readings, n_outputs).
        reading_noise: their evaluation.
        transfer: the flat series of a camera; None for other devices.
    """

    certificate: Certificate
    readings: np.ndarray
    reading_noise: ReadingNoise
    transfer: PhotonTransfer | None = None


def calibrate(
    device: NoisyDevice,
    *,
    plan: Plan | None = None,
    readings: int = 500,
    confidence: float = 0.95,
    beta: float = 1e-6,
) -> Calibration:
    """Calibrates an open device.

    A camera's constants come from frames under uniform light (`photon_transfer`), its law is that of counts; a device
    whose noise is described as Gaussian is certified by its readings, if no test speaks against it.

    Args:
        device: open; a window of a few thousand outputs is enough.
        plan: how many flat frames; None for the default.
        readings: of one constant input, at least 30.
        confidence: of each interval by itself, in (0, 1).
        beta: probability that the certified law's numbers are wrong, in (0, 1).

    Raises:
        ValueError: a number out of range, or frames that cannot be evaluated.
        DeviceError: the device fails.
    """
    checks.in_range(1e-12, 0.5, beta=beta)
    opened = device.usage.frames
    samples = _constant_readings(device, readings)
    noise = evaluate_readings(samples, beta=beta)
    if isinstance(device, CameraDevice):
        transfer = _transfer(device, plan or Plan())
        dark, doubt = _dark_noise(device, transfer, confidence)
        estimates = transfer.estimates(confidence) | dark | _drift(device, confidence)
        law: Any = _photon_count_law(device, transfer, beta)
        remarks = [*doubt, _BIAS, _STUDENT, _SIMULATED]
    else:
        transfer, estimates, remarks = None, {}, [_SIMULATED]
        described = isinstance(device.described_noise, GaussianNoise)
        sound = described and noise.is_gaussian and noise.smallest_std_low > 0
        law = GaussianLaw(std=noise.smallest_std_low) if sound else None
    certificate = Certificate(
        device=device.name,
        description_digest=digest_of(device.description),
        date=time.strftime("%Y-%m-%d"),
        n_inputs=device.n_inputs,
        n_outputs=device.n_outputs,
        frames=device.usage.frames - opened,
        confidence=confidence,
        beta=beta,
        noise=law,
        estimates={key: Limits(**vars(value)) for key, value in estimates.items()},
        tests=[
            TestedProperty(
                text=t.text, standard_errors=float(np.clip(t.standard_errors, -999, 999)), holds=t.holds
            )
            for t in noise.tests
        ],
        remarks=remarks,
    )
    return Calibration(certificate=certificate, readings=samples, reading_noise=noise, transfer=transfer)


_BIAS = "bias light, where there is any, counts as dark current: both are counts that no data change"
_STUDENT = "limits rest on Student's law of the grouped jackknife, tested at 90 %, not in its far tails"
_SIMULATED = "a certificate of a simulation says that the simulation does what its description says"


def _constant_readings(device: NoisyDevice, readings: int) -> np.ndarray:
    """Readings of one ternary vector that no data touched: plus and minus one in turn."""
    checks.integer(readings=readings, minimum=30)
    x = torch.ones((1, device.n_inputs))
    x[:, 1::2] = -1
    return device.project(x.expand(readings, -1).contiguous()).double().cpu().numpy()


def _transfer(device: CameraDevice, plan: Plan) -> PhotonTransfer:
    camera = device.description.camera
    if camera is None:
        raise TypeError("a camera device without a section [camera]")
    return take_photon_transfer(
        device.flat_frames,
        plan,
        exposure_us=camera.light.exposure_us,
        is_rounded=camera.sensor.adc_bits is not None,
    )


def _photon_count_law(device: CameraDevice, transfer: PhotonTransfer, beta: float) -> PhotonCountLaw:
    """Limits that hold together with probability 1 - beta (Bonferroni over one-sided limits)."""
    from scipy.stats import t

    share = beta / _PARTS_OF_BETA
    found = transfer.estimates(1 - 2 * share)
    seconds = transfer.exposure_us * 1e-6
    frames = device.anchor_frames(_ANCHOR_FRAMES).astype(np.float64).mean(axis=1)
    blank = device.flat_frames(_ANCHOR_FRAMES).astype(np.float64).mean(axis=1)
    lit = frames - blank
    margin = t.isf(share, lit.size - 1) * lit.std(ddof=1) / lit.size**0.5
    described = float(np.mean(device.exposure.gain_e * np.sum(np.square(device.speckle.anchor), axis=0)))
    dark, gain = found["dark_current_e_per_s"], found["gain_dn_per_e"]
    if gain.low <= 0:
        raise ValueError(f"beta = {beta:g}: is too small for these frames; take more frames or pixels")
    return PhotonCountLaw(
        dark_e_low=max(0.0, dark.low * seconds),
        dark_e_high=max(0.0, dark.high * seconds),
        light_ratio_low=float(max(0.0, lit.mean() - margin) / gain.high / described),
        light_ratio_high=float((lit.mean() + margin) / gain.low / described),
    )


def _dark_noise(
    device: CameraDevice, transfer: PhotonTransfer, confidence: float
) -> tuple[dict[str, Estimate], list[str]]:
    """The noise of blank frames, or a remark on why they do not tell it."""
    frames = device.flat_frames(_ANCHOR_FRAMES)
    try:
        found = dark_noise_dn(frames, confidence=confidence, is_rounded=transfer.is_rounded)
    except ValueError as error:
        return {}, [f"no dark_noise_dn: {error}"]
    return {"dark_noise_dn": found}, []


def _drift(device: CameraDevice, confidence: float) -> dict[str, Estimate]:
    """The decorrelation time, where the medium drifts."""
    settings = None if device.description.camera is None else device.description.camera.drift
    if settings is None:
        return {}
    rows = min(64, 2 * device.n_inputs)
    patterns = sparse_patterns(device.n_inputs, rows)
    elapsed_s = settings.decorrelation_s / 3
    device.drift_to(0.0)
    first, again = (device.intensities(patterns).numpy() for _ in range(2))
    device.drift_to(elapsed_s)
    later = device.intensities(patterns).numpy()
    device.drift_to(0.0)
    return {
        "decorrelation_s": decorrelation_time(first, again, later, elapsed_s=elapsed_s, confidence=confidence)
    }
