"""A calibration from frames alone: what is taken, what is concluded, and the certificate that says so."""

from __future__ import annotations

import time
from dataclasses import dataclass

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
from opusim.calibration.count_certificate import certify_counts
from opusim.calibration.drift import decorrelation_time, sparse_patterns
from opusim.calibration.jackknife import Estimate, jackknife
from opusim.calibration.photon_transfer import PhotonTransfer
from opusim.calibration.plan import Plan, take_photon_transfer
from opusim.calibration.property_tests import FAMILY_ALARM, PropertyTest
from opusim.calibration.reading_noise import ReadingNoise, evaluate_readings
from opusim.devices.base import NoisyDevice
from opusim.devices.baseline import reference_vectors
from opusim.devices.camera import CameraDevice
from opusim.noise import GaussianNoise

_BLANK_FRAMES = 100
_GROUPS = 40  # of outputs, for a jackknife


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """What a calibration took and found.

    Attributes:
        certificate: the summary that is kept.
        readings: readings of the first constant input, shape (readings, n_outputs).
        reading_noise: evaluation of the readings of all inputs.
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
    whose noise is described as Gaussian is certified by its readings of several inputs. No law is certified if a test
    speaks against a property that it needs.

    Args:
        device: open; a window of a few thousand outputs is enough.
        plan: how many flat frames; None for the default.
        readings: of each of the constant inputs (`constant_inputs`), at least 30.
        confidence: of each interval by itself, in (0, 1).
        beta: probability that the certified law's numbers are wrong, in [1e-11, 0.5].

    Raises:
        ValueError: a number out of range, or frames that cannot be evaluated.
        DeviceError: the device fails.
    """
    checks.in_range(1e-11, 0.5, beta=beta)
    checks.integer(readings=readings, minimum=30)
    opened = device.usage.frames
    inputs = constant_inputs(device.n_inputs)
    samples = np.stack([_readings_of(x, device, readings) for x in inputs])
    transfer: PhotonTransfer | None = None
    estimates: dict[str, Estimate] = {}
    law: GaussianLaw | PhotonCountLaw | None = None
    if isinstance(device, CameraDevice):
        noise = evaluate_readings(samples, beta=beta, alarm=FAMILY_ALARM / 2, gaussian=False)
        transfer = _transfer(device, plan or Plan())
        found = certify_counts(device, transfer, beta)
        dark, doubt = _dark_noise(device, transfer, confidence)
        light = {"light_noise": found.light_noise}
        estimates = transfer.estimates(confidence) | dark | _drift(device, confidence) | light
        tests = (*found.tests, *noise.tests)
        law = found.law if noise.is_sound else None
        remarks = [*found.remarks, *doubt, _BIAS, _STUDENT, _SIMULATED]
    else:
        noise = evaluate_readings(samples, beta=beta)
        described = isinstance(device.described_noise, GaussianNoise)
        if described and noise.is_gaussian and noise.smallest_std_low > 0:
            law = GaussianLaw(std=noise.smallest_std_low)
        estimates = _entry_std(inputs, samples, confidence)
        tests, remarks = noise.tests, [*noise.assumptions, _SCALE, _SIMULATED]
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
        tests=[_certified(test) for test in tests],
        remarks=remarks,
    )
    return Calibration(certificate=certificate, readings=samples[0], reading_noise=noise, transfer=transfer)


_MOST_DEVIATE = 999.0
"""Standard errors that stand for all larger ones, infinite ones included."""
_BIAS = "bias light, where there is any, counts as dark current: both are counts that no data change"
_STUDENT = "limits rest on Student's law of the grouped jackknife, tested at 90 %, not in its far tails"
_SCALE = (
    "the law bounds noise in units of the reading, not the distance of two inputs' noise-free readings: that grows "
    "with entry_std, 1 where entries of B have the variance 1 that this project takes for granted"
)
_SIMULATED = "a certificate of a simulated device validates the simulation only"


def constant_inputs(n_inputs: int) -> torch.Tensor:
    """Inputs at which noise is looked at, ternary, shape (4, n_inputs); no data touched them.

    Plus and minus one in turn; nothing; a random vector without a zero; a random vector with one entry in ten.
    """
    turns = torch.ones(n_inputs)
    turns[1::2] = -1
    dense, sparse = reference_vectors(2, n_inputs)
    sparse[torch.arange(n_inputs) % 10 != 0] = 0
    return torch.stack([turns, torch.zeros(n_inputs), dense, sparse])


def _certified(test: PropertyTest) -> TestedProperty:
    """A test as a certificate holds it."""
    return TestedProperty(
        text=test.text,
        standard_errors=min(test.standard_errors, _MOST_DEVIATE),
        holds=test.holds,
        needed=test.needed,
    )


def _readings_of(x: torch.Tensor, device: NoisyDevice, readings: int) -> np.ndarray:
    """Successive readings of one vector, of the number type that the device gives, shape (readings, n_outputs)."""
    return device.project(x.expand(readings, -1).contiguous()).cpu().numpy()


def _entry_std(inputs: torch.Tensor, samples: np.ndarray, confidence: float) -> dict[str, Estimate]:
    """Standard deviation of B's entries, from the mean readings of the dense random input less those of nothing.

    Their mean square over outputs is |x|^2 times the entries' variance plus the noise of two means. None of fewer than
    40 outputs.
    """
    nothing, dense = samples[1].astype(np.float64), samples[2].astype(np.float64)
    if dense.shape[1] < _GROUPS:
        return {}
    noise = (nothing.var(axis=0, ddof=1) + dense.var(axis=0, ddof=1)) / len(dense)
    squares = (np.square(dense.mean(axis=0) - nothing.mean(axis=0)) - noise) / float(inputs[2].square().sum())
    sums = np.stack([[squares[g::_GROUPS].sum(), squares[g::_GROUPS].size] for g in range(_GROUPS)])
    found = jackknife(sums, lambda total: {"square": float(total[0] / total[1])}, confidence=confidence)
    return {"entry_std": found["square"].root()}


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


def _dark_noise(
    device: CameraDevice, transfer: PhotonTransfer, confidence: float
) -> tuple[dict[str, Estimate], list[str]]:
    """The noise of blank frames, or a remark on why they do not tell it."""
    frames = device.flat_frames(_BLANK_FRAMES)
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
