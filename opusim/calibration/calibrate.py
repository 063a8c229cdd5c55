"""Calibrate a device from its frames, and compare a device with its certificate.

`calibrate` takes readings of constant inputs and, at a camera, frames under uniform light. It tests what the device's
law needs, and writes limits of its constants and of its noise into a `Certificate`. `take_photon_transfer` first finds
suitable light levels and exposures from a few pilot frames, which are not used again. `compare` and `require_noise`
check a device against an earlier certificate.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2, norm

from opusim import checks
from opusim.calibration.count_law import certify_counts, readings_without_power
from opusim.calibration.frames import (
    GROUPS,
    Estimate,
    FlatSeries,
    Level,
    TakeFrames,
    dark_noise_dn,
    decorrelation_time,
    root_mean,
    sparse_patterns,
    take_series,
)
from opusim.calibration.photon_transfer import LEAST_VARIANCE_DN2, PhotonTransfer
from opusim.calibration.reading_noise import ReadingNoise, evaluate_readings
from opusim.camera.from_description import camera_sections
from opusim.description.camera import CameraSettings
from opusim.devices.base import NoisyDevice
from opusim.devices.baseline import reference_vectors
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import (
    Certificate,
    FluctuatingCountLaw,
    GaussianLaw,
    Limits,
    PhotonCountLaw,
    TestedProperty,
)
from opusim.errors import ConfigError, NoiseBelowCertificate
from opusim.noise import FluctuatingCountNoise, GaussianNoise, PhotonCountNoise
from opusim.p_values import FAMILY_ALARM

_PILOT_FRAMES = 4
_MOST_DOUBLINGS = 60
_CLEAR = 40.0  # standard errors of a pilot's mean by which light must show before its rise is judged
_LONGEST_US = 6e7


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much a calibration takes.

    Attributes:
        frames: frames of a level, at least 2.
        light_levels: levels of rising light below saturation, at least 6.
        dark_levels: exposures of the dark series, at least 3.
        groups: groups of pixels of the jackknife, at least 10.
        temperatures_c: none, or two temperatures between which the dark current's doubling is measured; the first is
            that of all other measurements.
    """

    frames: int = 32
    light_levels: int = 12
    dark_levels: int = 6
    groups: int = 40
    temperatures_c: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        checks.integer(frames=self.frames, minimum=2)
        checks.integer(light_levels=self.light_levels, minimum=6)
        checks.integer(dark_levels=self.dark_levels, minimum=3)
        checks.integer(groups=self.groups, minimum=10)


def take_photon_transfer(
    take: TakeFrames, plan: Plan, *, exposure_us: float, is_rounded: bool = True
) -> PhotonTransfer:
    """Find the saturating light and an exposure long enough for dark current, then take the series.

    Args:
        take: see `opusim.calibration.flat_series.TakeFrames`.
        plan: how much.
        exposure_us: the operating exposure.
        is_rounded: whether numbers come from a converter.

    Raises:
        ValueError: no light saturates the sensor.
    """
    cold, hot = plan.temperatures_c or (None, None)
    # The saturating light, by doubling it until the rise of the mean no longer doubles.
    blank = take(_PILOT_FRAMES, photons=0.0)
    dark, photons = float(np.mean(blank)), 1.0
    before, error = dark, float(np.mean(np.var(blank, axis=0, ddof=1)) / blank.size) ** 0.5
    for _ in range(_MOST_DOUBLINGS):
        mean = float(np.mean(take(_PILOT_FRAMES, photons=photons)))
        if before - dark > max(4.0, _CLEAR * error) and mean - before < 0.75 * (before - dark):
            break
        photons, before = 2 * photons, mean
    else:
        raise ValueError(f"photons = {photons:g}: do not saturate the sensor; does the device see the light?")
    if mean <= dark:
        raise ValueError(f"photons = {photons:g}: frames are as dark as without light; are frames lost?")
    saturating = 0.5 * photons * (mean - dark) / (before - dark)
    # The least light of the dark series, from none in steps of two, whose noise smooths the converter's steps.
    lit = 0.0
    while is_rounded and lit < saturating / 4:
        dn = take(4 * _PILOT_FRAMES, photons=lit)
        if float(np.mean(np.var(dn, axis=0, ddof=1))) > 1.2 * LEAST_VARIANCE_DN2:
            break
        lit = max(2 * lit, saturating / 4096)
    steps = np.linspace(0, 0.65, plan.light_levels) * saturating
    light = [
        Level(photons=float(p), exposure_us=exposure_us, temperature_c=cold)
        for p in [*steps, 20 * saturating]
    ]
    series = _dark_series(take, plan, lit, cold, exposure_us)
    return PhotonTransfer(
        light=take_series(take, light, frames=plan.frames, groups=plan.groups),
        dark=series,
        exposure_us=exposure_us,
        is_rounded=is_rounded,
        warm=None if hot is None else _dark_series(take, plan, lit, hot, exposure_us),
    )


def _dark_series(
    take: TakeFrames, plan: Plan, photons: float, temperature_c: float | None, exposure_us: float
) -> FlatSeries:
    """Return exposures under constant light, up to one at which the dark charge shows, at most a minute.

    There it moves the mean by 3 standard deviations of a pixel.
    """
    first = take(_PILOT_FRAMES, photons=photons, temperature_c=temperature_c)
    spread, longest = float(np.sqrt(np.mean(np.var(first, axis=0, ddof=1)))), exposure_us
    while longest < _LONGEST_US:
        pilot = take(_PILOT_FRAMES, photons=photons, exposure_us=longest, temperature_c=temperature_c)
        if float(np.mean(pilot)) - float(np.mean(first)) > 3 * max(spread, 0.3):
            break
        longest = min(4 * longest, _LONGEST_US)
    exposures = np.linspace(min(exposure_us, longest / 4), longest, plan.dark_levels)
    levels = [Level(photons=photons, exposure_us=float(t), temperature_c=temperature_c) for t in exposures]
    return take_series(take, levels, frames=plan.frames, groups=plan.groups)


_BLANK_FRAMES = 100
_OTHER_FRAMES = 500  # of a camera besides its series: pilots, the anchor and blanks, about
_STANDARD_ERRORS = 5.0  # of a difference from an older number, or from the description, that counts
_UNLIKE = 0.05  # relative difference from the description that no remark mentions


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """What a calibration took and found.

    Attributes:
        certificate: the summary that is kept.
        readings: readings of the first constant input, shape (readings, n_outputs).
        reading_noise: evaluation of the readings of all inputs.
        transfer: the flat series of a camera; None if the device is no camera.
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
    """Calibrate an open device.

    A camera's constants come from frames under uniform light (`photon_transfer`), its law is that of counts; a device
    whose noise is described as Gaussian is certified by its readings of several inputs. No law is certified if a test
    speaks against a property that it needs.

    Args:
        device: open; a window of a few thousand outputs is enough.
        plan: how many flat frames; None for the default.
        readings: of each of the constant inputs (`constant_inputs`), at least 30.
        confidence: of each single interval, in (0, 1).
        beta: probability that the certified law's numbers are wrong, in [1e-11, 0.5].

    Raises:
        ValueError: a number out of range, or frames that cannot be evaluated.
        ConfigError: the device is served by another machine, and its law is one of counts.
        DeviceError: the device fails.
    """
    checks.in_range(1e-11, 0.5, beta=beta)
    checks.integer(readings=readings, minimum=30)
    counts = isinstance(device.stated_noise, PhotonCountNoise | FluctuatingCountNoise)
    if counts and device.identity[0] != device.name:
        raise ConfigError(
            device.name,
            "kind",
            "is served, and a law of counts needs frames, which only its own machine takes; calibrate it there "
            "before it is served, and start its server with --certificate",
        )
    opened = device.usage.frames
    inputs = constant_inputs(device.n_inputs)
    # successive readings of one vector, of the number type that the device gives
    samples = np.stack([device.project(x.expand(readings, -1).contiguous()).cpu().numpy() for x in inputs])
    taken = samples[0]
    transfer, described = None, {}
    if isinstance(device, CameraDevice):
        transfer, noise, content = _of_camera(device, inputs, samples, plan or Plan(), confidence, beta)
        described = _described_constants(device)
    else:
        noise, content = _of_readings(device, inputs, samples, confidence, beta)
    estimates: dict[str, Estimate] = content.pop("estimates")
    known = {key: each for key, each in estimates.items() if np.all(np.isfinite([*vars(each).values()]))}
    name, digest = device.identity
    certificate = Certificate(
        device=name,
        description_digest=digest,
        date=time.strftime("%Y-%m-%d"),
        n_inputs=device.n_inputs,
        n_outputs=device.n_outputs,
        frames=device.usage.frames - opened,
        confidence=confidence,
        beta=beta,
        estimates={key: Limits(**vars(each), described=described.get(key)) for key, each in known.items()},
        tests=[
            TestedProperty(
                text=test.text,
                standard_errors=min(_MOST_DEVIATE, test.standard_errors),  # also of a statistic that is NaN
                holds=test.holds,
                needed=test.needed,
            )
            for test in content.pop("tests")
        ],
        remarks=[*content.pop("remarks"), *_remarks_on(estimates, known, described, confidence)],
        **content,
    )
    return Calibration(certificate=certificate, readings=taken, reading_noise=noise, transfer=transfer)


def _of_camera(
    device: CameraDevice,
    inputs: torch.Tensor,
    samples: np.ndarray,
    plan: Plan,
    confidence: float,
    beta: float,
) -> tuple[PhotonTransfer, ReadingNoise, dict[str, Any]]:
    """Evaluate readings of a camera and its frames under uniform light; return what its certificate states."""
    camera = _settings_of(device)
    if camera.light.power is not None:
        samples = readings_without_power(device, inputs, samples)
    noise = evaluate_readings(samples, beta=beta, alarm=FAMILY_ALARM / 2, gaussian=False)
    transfer = take_photon_transfer(
        device.flat_frames,
        plan,
        exposure_us=camera.light.exposure_us,
        is_rounded=camera.sensor.adc_bits is not None,
    )
    found = certify_counts(device, transfer, beta, inputs, samples)
    estimates, remarks = transfer.estimates(confidence), [*found.remarks]
    blank = device.flat_frames(_BLANK_FRAMES)
    try:
        estimates["dark_noise_dn"] = dark_noise_dn(
            blank, confidence=confidence, is_rounded=transfer.is_rounded
        )
    except ValueError as error:
        remarks.append(f"no dark_noise_dn: {error}")
    if camera.drift is not None:  # the decorrelation time, from frames of one pattern at two times
        patterns = sparse_patterns(device.n_inputs, min(64, 2 * device.n_inputs))
        elapsed_s = camera.drift.decorrelation_s / 3
        device.drift_to(0.0)
        first, again = (device.intensities(patterns) for _ in range(2))
        device.drift_to(elapsed_s)
        later = device.intensities(patterns)
        device.drift_to(0.0)
        estimates["decorrelation_s"] = decorrelation_time(
            first, again, later, elapsed_s=elapsed_s, confidence=confidence
        )
    return (
        transfer,
        noise,
        {
            "noise": found.law if noise.is_sound else None,
            "estimates": estimates | {"light_noise": found.light_noise},
            "tests": (*found.tests, *noise.tests),
            "remarks": [*remarks, _BIAS, _STUDENT, _SIMULATED],
            "trust": [*found.trust, *noise.trust(gaussian=False)],
        },
    )


def _of_readings(
    device: NoisyDevice, inputs: torch.Tensor, samples: np.ndarray, confidence: float, beta: float
) -> tuple[ReadingNoise, dict[str, Any]]:
    """Evaluate readings of a device that shows no frames; return what its certificate states."""
    noise, stated = evaluate_readings(samples, beta=beta), device.stated_noise
    gaussian = stated is None or isinstance(stated, GaussianNoise)
    certified = gaussian and noise.is_gaussian and noise.smallest_std_low > 0
    estimates: dict[str, Estimate] = {}
    # The spread of B's entries, from the mean readings of the dense random input less those of nothing: their mean
    # square over outputs is |x|^2 times the entries' variance plus the noise of two means.
    nothing, dense = samples[1].astype(np.float64), samples[2].astype(np.float64)
    if dense.shape[1] >= GROUPS:
        own = (nothing.var(axis=0, ddof=1) + dense.var(axis=0, ddof=1)) / len(dense)
        squares = np.square(dense.mean(axis=0) - nothing.mean(axis=0)) - own
        estimates["entry_std"] = root_mean(squares / float(inputs[2].square().sum()), confidence)
    return noise, {
        "noise": GaussianLaw(std=noise.smallest_std_low) if certified else None,
        "estimates": estimates,
        "tests": noise.tests,
        "remarks": [*noise.assumptions, *([_NO_LAW] if stated is None else []), _SCALE, _SIMULATED],
        "trust": [*noise.trust(gaussian=True)],
    }


def _remarks_on(
    estimates: dict[str, Estimate], known: dict[str, Estimate], described: dict[str, float], confidence: float
) -> list[str]:
    """Return remarks on constants that differ from the described ones, and on those that frames do not tell."""
    remarks, width = [], 2 * float(norm.isf((1 - confidence) / 2))
    for key, found in estimates.items():
        if key not in known:
            remarks.append(f"no {key}: frames do not tell it")
        elif key in described:
            off = abs(found.value - described[key])
            error = (found.high - found.low) / width
            if off > max(_STANDARD_ERRORS * error, _UNLIKE * abs(described[key])):
                remarks.append(
                    f"{key} is {found.value:.5g} by these frames and {described[key]:.5g} by the description; find out "
                    "why, or put the measured number there and calibrate again"
                )
    return remarks


def _described_constants(device: CameraDevice) -> dict[str, float]:
    """Return the description's constants under the keys of the estimates; infinite ones are left out."""
    exposure, camera = device.exposure, _settings_of(device)
    sensor, seconds = exposure.sensor, exposure.light.exposure_us * 1e-6
    found = {
        "quantum_efficiency": exposure.light.quantum_efficiency,
        "gain_dn_per_e": sensor.gain_dn_per_e,
        "black_level_dn": sensor.black_level_dn,
        "read_noise_e": sensor.read_noise_e,
        "dark_current_e_per_s": exposure.dark_current_e / seconds,
        "saturation_e": sensor.saturation_e,
        "prnu": camera.sensor.prnu,
        "dsnu_e": camera.sensor.dsnu_e,
    }
    if camera.drift is not None:
        found["decorrelation_s"] = camera.drift.decorrelation_s
    return {key: value for key, value in found.items() if math.isfinite(value)}


def _settings_of(device: CameraDevice) -> CameraSettings:
    """Return the section [camera] of a camera's description."""
    return camera_sections(device.description)[0]


def frames_of(plan: Plan, device: NoisyDevice, readings: int) -> int:
    """Return about how many frames a calibration takes: readings of constant inputs, a camera's series and pilots."""
    taken = len(constant_inputs(device.n_inputs)) * readings * device.description.frames.frames_per_projection
    if device.description.camera is None:
        return taken
    dark_series = 1 if plan.temperatures_c is None else 2
    return taken + plan.frames * (plan.light_levels + 1 + dark_series * plan.dark_levels) + _OTHER_FRAMES


_COUNTS = PhotonCountLaw, FluctuatingCountLaw
_MOST_DEVIATE = 999.0
"""Standard errors that stand for all larger ones, infinite ones included, and for a statistic that frames leave
open."""
_BIAS = "bias light, if there is any, counts as dark current: both are counts that no data change"
_STUDENT = "limits rest on Student's law of the grouped jackknife, tested at 90 %, not in its far tails"
_NO_LAW = "the device's description states no law: only the tests support the Gaussian one"
_SCALE = (
    "the law bounds noise in units of the reading, not the distance of two inputs' noise-free readings: that grows "
    "with entry_std, 1 where entries of B have the variance 1 that this project takes for granted"
)
_SIMULATED = "a certificate of a simulated device validates the simulation only"


def constant_inputs(n_inputs: int) -> torch.Tensor:
    """Return the inputs at which noise is measured, ternary, shape (5, n_inputs); they do not depend on data.

    Plus and minus one in turn; nothing, the darkest; a random vector without a zero; a random vector with one entry in
    ten; ones, the brightest.
    """
    turns = torch.ones(n_inputs)
    turns[1::2] = -1
    dense, sparse = reference_vectors(2, n_inputs)
    sparse[torch.arange(n_inputs) % 10 != 0] = 0
    return torch.stack([turns, torch.zeros(n_inputs), dense, sparse, torch.ones(n_inputs)])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One number of a certificate together with a new measurement.

    Attributes:
        name: of the number.
        certified: its certified value.
        measured: its new value.
        standard_errors: their difference in joint standard errors.
    """

    name: str
    certified: float
    measured: float
    standard_errors: float

    @property
    def agrees(self) -> bool:
        """Whether the difference is below five standard errors."""
        return abs(self.standard_errors) < _STANDARD_ERRORS


def compare(certificate: Certificate, measured: Calibration) -> tuple[Comparison, ...]:
    """Compare every estimate of a certificate with the new one."""
    found, rows = measured.certificate.estimates, []
    for name, old in certificate.estimates.items():
        if name not in found:
            continue
        new = found[name]
        widths = (old.high - old.low) / norm.isf((1 - certificate.confidence) / 2) / 2
        new_width = (new.high - new.low) / norm.isf((1 - measured.certificate.confidence) / 2) / 2
        error = max((widths**2 + new_width**2) ** 0.5, 1e-300)
        rows.append(
            Comparison(
                name=name,
                certified=old.value,
                measured=new.value,
                standard_errors=float(min(max((new.value - old.value) / error, -999.0), 999.0)),
            )
        )
    return tuple(rows)


def require_noise(certificate: Certificate, measured: Calibration) -> None:
    """Refuse a device whose noise is weaker than certified, beyond what chance allows at the new measurement's beta.

    Raises:
        NoiseBelowCertificate: the certificate's noise law cannot be relied on any more.
        ConfigError: the certificate has no law, or that of another kind of device.
    """
    law, noise, fresh = certificate.noise, measured.reading_noise, measured.certificate.noise
    if law is None:
        raise ConfigError(certificate.device, "certificate", "certifies no law, so there is nothing to check")
    if failed := [test.text for test in measured.certificate.tests if test.needed and not test.holds]:
        raise NoiseBelowCertificate(
            f"{certificate.device}: tests now speak against the certified law: {'; '.join(failed)}; calibrate again"
        )
    refused = [text for text in measured.certificate.remarks if text.startswith("no law is certified")]
    if fresh is None and refused:
        raise NoiseBelowCertificate(f"{certificate.device}: {refused[0]}")
    if isinstance(law, GaussianLaw):
        # an upper limit of the smallest standard deviation, from the output with the smallest sample variance
        n = noise.readings - 1
        beyond = chi2.ppf(noise.beta / (noise.inputs * noise.n_outputs), n)
        high = float(noise.smallest_std * (n / beyond) ** 0.5)
        if high < law.std:
            raise NoiseBelowCertificate(
                f"{certificate.device}: the smallest standard deviation is at most {high:.6g}, certified is "
                f"{law.std:.6g}; stop private work and calibrate again"
            )
    elif isinstance(law, _COUNTS) and isinstance(fresh, _COUNTS) and type(law) is type(fresh):
        if fresh.dark_e_high < law.dark_e_low:
            raise NoiseBelowCertificate(
                f"{certificate.device}: the dark charge is at most {fresh.dark_e_high:.6g} electrons, certified is "
                f"{law.dark_e_low:.6g}; warm the sensor to its temperature, or calibrate again"
            )
        if fresh.light_ratio_low > law.light_ratio_high:
            raise NoiseBelowCertificate(
                f"{certificate.device}: the light is at least {fresh.light_ratio_low:.6g} of the described, certified "
                f"is at most {law.light_ratio_high:.6g}; dim the laser, or calibrate again"
            )
        # frames would be brighter than certified more often than beta allows
        if (
            isinstance(law, FluctuatingCountLaw)
            and isinstance(fresh, FluctuatingCountLaw)
            and (fresh.power_law != law.power_law or fresh.power_rms_low > law.power_rms_high)
        ):
            raise NoiseBelowCertificate(
                f"{certificate.device}: the light's power is {fresh.power_law} of at least "
                f"{fresh.power_rms_low:.4g} rms, certified is {law.power_law} of at most {law.power_rms_high:.4g}; "
                "steady the laser, or calibrate again"
            )
    else:
        raise ConfigError(
            certificate.device, "certificate", f"certifies the law {law.law!r}, which this device cannot show"
        )
