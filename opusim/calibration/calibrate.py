"""Calibrate a device from its frames, and compare a device with its certificate.

`calibrate` takes readings of constant inputs and, at a camera, frames under uniform light. It tests what the device's
law needs, and writes limits of its constants and of its noise into a `Certificate`. `compare` and `require_noise` check
a device against an earlier certificate; `print_calibration` and `write_report` show a calibration.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.special import ndtr, ndtri
from scipy.stats import chi2, norm

from opusim import checks
from opusim.calibration.count_law import certify_counts, readings_without_power
from opusim.calibration.frames import (
    COUNT,
    GROUPS,
    Estimate,
    dark_noise_dn,
    decorrelation_time,
    root_mean,
    sparse_patterns,
)
from opusim.calibration.photon_transfer import PhotonTransfer, Plan, take_photon_transfer
from opusim.calibration.reading_noise import ReadingNoise, evaluate_readings
from opusim.camera.from_description import camera_sections, dark_charge_e, sensor_of
from opusim.description.schema import DeviceDescription
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
from opusim.noise import FluctuatingCountNoise, GaussianNoise, MeasuredNoise, PhotonCountNoise
from opusim.p_values import FAMILY_ALARM
from opusim.progress import Progress, Show
from opusim.tables import Shown, blank_figure, data_url, html_page, png_bytes, print_table, unit_of, wrapped
from opusim.temperature import TemperatureLaw, TemperatureTable

_BLANK_FRAMES = 100
_OTHER_FRAMES = 500  # frames of a camera besides its series, about: pilots, the anchor and blanks
_STANDARD_ERRORS = 5.0  # by which a number must differ from an older one, or from the description
_UNLIKE = 0.05  # largest relative difference from the description without a remark


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Calibration(Shown):
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

    def _shown(self) -> dict[str, object]:
        return {"certificate": self.certificate, "readings": f"{self.readings.shape[0]} of each input"}


def calibrate(
    device: NoisyDevice,
    *,
    plan: Plan | None = None,
    readings: int = 500,
    confidence: float = 0.95,
    beta: float = 1e-6,
    progress: Show = True,
) -> Calibration:
    """Calibrate an open device.

    A camera's constants come from frames under uniform light (`photon_transfer`), and its law is a count law; a device
    whose noise is described as Gaussian is certified by its readings of several inputs. No law is certified if a test
    speaks against a property that it needs.

    Args:
        device: open; a window of a few thousand outputs is enough.
        plan: how many flat frames; None for the default.
        readings: of each of the constant inputs (`constant_inputs`), at least 30.
        confidence: of each single interval, in (0, 1).
        beta: probability that the certified law's numbers are wrong, in [1e-11, 0.5].
        progress: whether to show a bar of the frames; see `opusim.progress.Show`.

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
    opened, plan = device.usage.frames, plan or Plan()
    inputs = constant_inputs(device.n_inputs)
    transfer, described = None, {}
    with Progress("calibrate", "frames", show=progress) as bar:
        bar.follow(frames_of(plan, device, readings), lambda: device.usage.frames - opened)
        # successive readings of one vector, of the number type that the device gives
        samples = np.stack(
            [device.project(x.expand(readings, -1).contiguous()).cpu().numpy() for x in inputs]
        )
        if isinstance(device, CameraDevice):
            transfer, noise, content = _of_camera(device, inputs, samples, plan, confidence, beta)
            described = described_constants(device.description)
        else:
            noise, content = _of_readings(device, inputs, samples, confidence, beta)
    taken = samples[0]
    estimates: dict[str, Estimate] = content.pop("estimates")
    known = {key: each for key, each in estimates.items() if np.all(np.isfinite([*vars(each).values()]))}
    # constants that differ from the described ones, and those that frames do not tell
    remarks, width = content.pop("remarks"), 2 * float(norm.isf((1 - confidence) / 2))
    for key, each in estimates.items():
        stated = described.get(key, each.value)
        error = (each.high - each.low) / width
        if key not in known:
            remarks.append(f"no {key}: frames do not tell it")
        elif abs(each.value - stated) > max(_STANDARD_ERRORS * error, _UNLIKE * abs(stated)):
            remarks.append(
                f"{key} is {each.value:.5g} by these frames and {stated:.5g} by the description; find out why, or put "
                "the measured number there and calibrate again"
            )
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
        remarks=remarks,
        **content,
    )
    return Calibration(certificate=certificate, readings=taken, reading_noise=noise, transfer=transfer)


def described_constants(description: DeviceDescription) -> dict[str, float]:
    """Return a camera description's constants under the keys of the estimates; those that are off are left out."""
    camera = camera_sections(description)[0]
    sensor, seconds = sensor_of(camera, description.frames), camera.light.exposure_us * 1e-6
    described = {
        "quantum_efficiency": camera.light.quantum_efficiency,
        "gain_dn_per_e": sensor.gain_dn_per_e,
        "black_level_dn": sensor.black_level_dn,
        "read_noise_e": sensor.read_noise_e,
        "dark_current_e_per_s": dark_charge_e(camera, camera.light.exposure_us) / seconds,
        "saturation_e": sensor.saturation_e,
        "prnu": camera.sensor.prnu,
        "dsnu_e": camera.sensor.dsnu_e,
        "decorrelation_s": math.inf if camera.drift is None else camera.drift.decorrelation_s,
    }
    if camera.pixels is not None and camera.pixels.dcnu:
        described["dark_spread_e_per_s"] = camera.pixels.dcnu * described["dark_current_e_per_s"]
    return {key: value for key, value in described.items() if math.isfinite(value)}


def _of_camera(
    device: CameraDevice,
    inputs: torch.Tensor,
    samples: np.ndarray,
    plan: Plan,
    confidence: float,
    beta: float,
) -> tuple[PhotonTransfer, ReadingNoise, dict[str, Any]]:
    """Evaluate readings of a camera and its frames under uniform light; return what its certificate states."""
    camera = camera_sections(device.description)[0]
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
    if camera.drift is not None and camera.drift.hops_per_s:
        remarks.append("no decorrelation_s: the laser hops between modes (camera.drift.hops_per_s)")
    elif camera.drift is not None:  # the decorrelation time, from frames of one pattern at two times
        patterns = sparse_patterns(device.n_inputs, min(64, 2 * device.n_inputs))
        elapsed_s, call_s = camera.drift.decorrelation_s / 3, 0.0
        if camera.drift.within_call:  # the frames of `again` are later than the first by the time of a call
            call_s = device.description.frames.period_us(device.n_outputs) * 1e-6 * len(patterns)
        device.drift_to(0.0)
        first, again = (device.intensities(patterns) for _ in range(2))
        device.drift_to(elapsed_s + call_s)
        later = device.intensities(patterns)
        device.drift_to(0.0)
        estimates["decorrelation_s"] = decorrelation_time(
            first, again, later, elapsed_s=elapsed_s, confidence=confidence
        )
    simulated = [_SIMULATED] if device.description.is_simulated else []
    content = {
        "noise": found.law if all(test.holds for test in noise.tests if test.needed) else None,
        "estimates": estimates | {"light_noise": found.light_noise},
        "tests": (*found.tests, *noise.tests),
        "remarks": [*remarks, _BIAS, _STUDENT, *simulated],
        "trust": [*found.trust, *noise.trust(gaussian=False)],
    }
    return transfer, noise, content


def _of_readings(
    device: NoisyDevice, inputs: torch.Tensor, samples: np.ndarray, confidence: float, beta: float
) -> tuple[ReadingNoise, dict[str, Any]]:
    """Evaluate readings of a device that shows no frames; return what its certificate states."""
    noise, stated = evaluate_readings(samples, beta=beta), device.stated_noise
    if isinstance(stated, MeasuredNoise):  # variances only; the tests decide on the law
        stated = None
    gaussian = stated is None or isinstance(stated, GaussianNoise)
    certified = gaussian and noise.is_gaussian and noise.smallest_std_low > 0
    remarks = [*noise.assumptions, *([_NO_LAW] if stated is None else []), _SCALE]
    remarks += [_SIMULATED] if device.description.is_simulated else []
    estimates: dict[str, Estimate] = {}
    # The spread of B's entries, from the mean readings of the dense random input minus the blank ones: their mean
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
        "remarks": remarks,
        "trust": [*noise.trust(gaussian=True)],
    }


def frames_of(plan: Plan, device: NoisyDevice, readings: int) -> int:
    """Return about how many frames a calibration takes: readings of constant inputs, a camera's series and pilots."""
    taken = len(constant_inputs(device.n_inputs)) * readings * device.description.frames.frames_per_projection
    if device.description.camera is None:
        return taken
    dark_series = 1 if plan.temperatures_c is None else 2
    return taken + plan.frames * (plan.light_levels + 1 + dark_series * plan.dark_levels) + _OTHER_FRAMES


_COUNTS = PhotonCountLaw, FluctuatingCountLaw
_MOST_DEVIATE = 999.0
"""Most standard errors that are written; they also stand for infinity and NaN."""
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

    Plus and minus one in turn; zeros, the darkest; a random vector without a zero; a random vector with one entry in
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
                standard_errors=float(
                    np.clip((new.value - old.value) / error, -_MOST_DEVIATE, _MOST_DEVIATE)
                ),
            )
        )
    return tuple(rows)


def require_noise(certificate: Certificate, measured: Calibration) -> None:
    """Refuse a device whose noise is weaker than certified, beyond what chance allows at the new measurement's beta.

    Raises:
        NoiseBelowCertificate: the certificate's noise law cannot be relied on any more.
        ConfigError: the certificate has no law, or the law of another kind of device.
    """
    law, noise, fresh = certificate.noise, measured.reading_noise, measured.certificate.noise
    if law is None:
        raise ConfigError(certificate.device, "certificate", "certifies no law, so there is nothing to check")
    failed = [test.text for test in measured.certificate.tests if test.needed and not test.holds]
    refused = [text for text in measured.certificate.remarks if text.startswith("no law is certified")]
    reason = ""
    if failed:
        reason = f"tests now speak against the certified law: {'; '.join(failed)}; calibrate again"
    elif fresh is None and refused:
        reason = refused[0]
    elif isinstance(law, GaussianLaw):
        # an upper limit of the smallest standard deviation, from the output with the smallest sample variance
        n = noise.readings - 1
        beyond = chi2.ppf(noise.beta / (noise.inputs * noise.n_outputs), n)
        high = float(noise.smallest_std * (n / beyond) ** 0.5)
        if high < law.std:
            reason = (
                f"the smallest standard deviation is at most {high:.6g}, certified is {law.std:.6g}; stop private work "
                "and calibrate again"
            )
    elif isinstance(law, _COUNTS) and isinstance(fresh, _COUNTS) and type(law) is type(fresh):
        if fresh.dark_e_high < law.dark_e_low:
            reason = (
                f"the dark charge is at most {fresh.dark_e_high:.6g} electrons, certified is {law.dark_e_low:.6g}; "
                "warm the sensor to its temperature"
            )
        elif fresh.light_spread and not law.light_spread:
            reason = (
                "light is spread over the outputs in another way than certified; bring medium and camera back"
            )
        elif fresh.light_ratio_low > law.light_ratio_high:
            reason = (
                f"the light is at least {fresh.light_ratio_low:.6g} of the described, certified is at most "
                f"{law.light_ratio_high:.6g}; dim the laser"
            )
        # frames would be brighter than certified more often than beta allows
        elif (
            isinstance(law, FluctuatingCountLaw)
            and isinstance(fresh, FluctuatingCountLaw)
            and (fresh.power_law != law.power_law or fresh.power_rms_low > law.power_rms_high)
        ):
            reason = (
                f"the light's power is {fresh.power_law} of at least {fresh.power_rms_low:.4g} rms, certified is "
                f"{law.power_law} of at most {law.power_rms_high:.4g}; steady the laser"
            )
        reason += ", or calibrate again" if reason else ""
    else:
        raise ConfigError(
            certificate.device, "certificate", f"certifies the law {law.law!r}, which this device cannot show"
        )
    if reason:
        raise NoiseBelowCertificate(f"{certificate.device}: {reason}")


def transfer_figure(certificate: Certificate, transfer: PhotonTransfer) -> Figure:
    """Draw photon transfer, response, its residuals and dark current."""
    figure = blank_figure(10, 8)
    figure.get_layout_engine().set(hspace=0.08, wspace=0.05)  # type: ignore[union-attr, call-arg]
    (variance, response), (residuals, dark) = figure.subplots(2, 2)
    found, used = certificate.estimates, transfer.used()
    gain, black = found["gain_dn_per_e"].value, found["black_level_dn"].value
    photons, means, variances = transfer.photons(), transfer.light.means(), transfer.light.variances()

    variance.plot(means, variances, "o", color="0.7", label="left out: rounding or saturation")
    variance.plot(means[used], variances[used], "o", color="C0", label="used")
    line = np.linspace(means[0], means[used].max(), 2)
    start = float(np.mean(variances[used] - gain * means[used]))
    variance.plot(line, start + gain * line, "k--", linewidth=0.8, label=f"slope K = {gain:.5g} DN/e⁻")
    variance.set(xlabel="mean, DN", ylabel="temporal variance, DN²", title="Photon transfer")
    variance.legend()

    slope = gain * found["quantum_efficiency"].value
    response.plot(photons[:-1], means[:-1], "o")
    response.plot(
        photons[:-1], black + slope * photons[:-1], "k--", linewidth=0.8, label=f"{slope:.5g} DN/photon"
    )
    response.set(xlabel="photons on a pixel", ylabel="mean, DN", title="Response")
    response.legend()

    photons, means = photons[used], means[used]
    rest = means - np.polyval(np.polyfit(photons, means, 1), photons)
    samples = transfer.light.frames * transfer.light.sums[:, used, COUNT].sum(axis=0)
    residuals.axhline(0, color="k", linewidth=0.8)
    residuals.errorbar(photons, rest, yerr=np.sqrt(variances[used] / samples), fmt="o", capsize=3)
    residuals.set(
        xlabel="photons on a pixel", ylabel="mean minus line, DN", title="Linearity, with standard errors"
    )

    for series, label in ((transfer.dark, "operating temperature"), (transfer.warm, "warm")):
        if series is not None:
            dark.plot(series.seconds(), series.means(), "o-", label=label)
    dark.set(xlabel="exposure, s", ylabel="mean under constant light, DN", title="Dark current")
    dark.legend()
    return figure


def readings_figure(samples: np.ndarray) -> Figure:
    """Plot quantiles of standardised readings against the Gaussian's, and the standard deviations of the outputs."""
    centred = samples - samples.mean(axis=0)
    std = centred.std(axis=0, ddof=1)
    values = np.sort((centred / np.where(std > 0, std, 1)).ravel())
    ranks = np.unique((ndtr(np.linspace(-6, 6, 1000)) * (values.size - 1)).astype(int))
    figure = blank_figure(10, 3.8)
    left, right = figure.subplots(1, 2)
    expected = ndtri((ranks + 0.5) / values.size)
    left.plot(expected, values[ranks], ".", markersize=3)
    left.plot(expected[[0, -1]], expected[[0, -1]], "k--", linewidth=0.8)
    left.set(
        xlabel="quantile of a Gaussian",
        ylabel="quantile of the readings, standardised",
        title="Law of a reading",
    )
    right.hist(std, bins=60)
    right.set(xlabel="standard deviation, projection units", ylabel="outputs", title="Noise of the outputs")
    return figure


def temperature_figure(law: TemperatureLaw | TemperatureTable, name: str) -> Figure:
    """Return the noise of a reading against temperature, with the shares of its variance or the matrix's size."""
    temperatures = np.linspace(*law.temperatures_c, 200)
    figure = blank_figure(7, 4.2)
    axes = figure.subplots()
    share = axes.twinx()
    axes.plot(temperatures, [law.std(t) for t in temperatures], color="C0")
    axes.set(xlabel="temperature, °C", title=f"{name}: noise of a reading")
    axes.set_ylabel("standard deviation, projection units", color="C0")
    axes.set_ylim(bottom=0)
    if isinstance(law, TemperatureTable):
        share.plot(temperatures, [law.size(t) for t in temperatures], color="C1", linestyle="--")
        share.set_ylabel("root mean square of the matrix's entries", color="C1")
        share.set_ylim(bottom=0)
        return figure
    share.plot(temperatures, [100 * law.dark_share(t) for t in temperatures], color="C1", linestyle="--")
    share.set_ylabel("dark current's share of the variance, %", color="C1")
    share.set_ylim(0, 100)
    return figure


_CAP = 37.0  # largest deviate whose p-value double precision holds
_LAWS = {
    "gaussian": "Gaussian readings",
    "photon_count": "Poisson counts",
    "fluctuating_photon_count": "Poisson counts under light that fluctuates",
}
WORDS = {
    "std": "smallest standard deviation of a reading, lower limit",
    "dark_e_low": "dark charge of a frame, lower limit",
    "dark_e_high": "dark charge of a frame, upper limit",
    "dark_mean_e_low": "its mean over all outputs, lower limit",
    "dark_mean_e_high": "its mean over all outputs, upper limit",
    "dark_deviation_e": "an output's deviation from that mean, limit; of a group's mean, over the root of its outputs",
    "light_ratio_low": "light over the described, lower limit",
    "light_ratio_high": "light over the described, upper limit",
    "frame_ratio_high": "light of a frame over the mean of frames, upper limit",
    "gain_dn_per_e_low": "gain, lower limit",
    "gain_dn_per_e_high": "gain, upper limit",
    "light_spread": "light of single outputs",
    "power_law": "law of the light's power in a frame, assumed",
    "power_rms_low": "relative standard deviation of that power, lower limit",
    "power_rms_high": "relative standard deviation of that power, upper limit",
    "quantum_efficiency": "quantum efficiency",
    "gain_dn_per_e": "gain",
    "black_level_dn": "black level",
    "dark_current_e_per_s": "dark current",
    "saturation_e": "saturation",
    "doubling_k": "dark current doubles every",
    "read_noise_e": "read noise",
    "prnu": "response, standard deviation over pixels",
    "dsnu_e": "offset, standard deviation over pixels",
    "dark_spread_e_per_s": "dark current, standard deviation over pixels",
    "linearity_error": "response, rms deviation from a line",
    "dark_noise_dn": "noise of a blank frame",
    "light_noise": "light, standard deviation from frame to frame",
    "entry_std": "standard deviation of B's entries, which this project takes to be 1",
    "decorrelation_s": "decorrelation time of the medium",
}
"""Readable names of the certificates' keys."""


_CAUSES = {
    "outputs do not correlate": "noise that outputs share, such as the laser's power",
    "do not repeat or follow from earlier ones": "drift, vibration, or readings that were delivered twice",
    "sizes of the outputs' noises do not correlate": "the noise of all outputs grows and falls together",
    "sizes of noise do not follow from earlier ones": "the noise grows or falls with time",
    "noise is missing in no block of readings": "readings without noise, such as stored ones",
    "each output is Gaussian": "few electrons, rare jumps, clipping, or no noise",
    "readings lie on no grid": "steps of the converter that are not small against the noise",
    "noise is the same at every input": "noise that depends on the light, such as shot noise",
}
"""Usual causes by a part of the failed property; remarks of a law of counts give the remedies of its other tests."""


def _outcome(test: TestedProperty) -> str:
    """Return whether a property holds, and the usual cause if it does not."""
    if test.holds:
        return "holds"
    cause = next((cause for part, cause in _CAUSES.items() if part in test.text), "")
    return f"does not hold ({cause})" if cause else "does not hold"


def print_calibration(found: Calibration) -> None:
    """Print constants, tests and the certified law as tables."""
    rows = [(key, *shown(key, estimate)) for key, estimate in found.certificate.estimates.items()]
    if rows:
        limits = f"limits at {found.certificate.confidence:.0%}"
        print_table("Constants from frames", ("constant", "estimate", limits, "described", "unit"), rows)
    noise, law = found.reading_noise, found.certificate.noise
    print(
        f"readings: standard deviation {noise.mean_std:.5g} (root mean square), {noise.smallest_std:.5g} at the "
        "quietest output, projection units"
    )
    needed = [test for test in found.certificate.tests if test.needed]
    others = [test for test in found.certificate.tests if not test.needed]
    for heading, tests in (
        ("what the law needs:", needed),
        ("what Gaussian readings would also need (the certified counts need none of it):", others),
    ):
        if tests:
            print(heading)
        for test in tests:
            print(f"  {test.text}: {_outcome(test)}")
    for remark in found.certificate.remarks:
        if "law" in remark or "by the description" in remark:
            print(wrapped(remark))
    for entry in found.certificate.trust:
        print(wrapped(entry.line))
    if law is None:
        print("certified noise: none")
        return
    numbered = law.model_dump(exclude_none=True)
    numbers = ", ".join(f"{key} {_number(value)}" for key, value in numbered.items() if key != "law")
    stated = f"certified noise: {law.law.replace('_', ' ')}, {numbers}"
    print(wrapped(f"{stated}; wrong with probability {found.certificate.beta:g}"))
    if isinstance(law, GaussianLaw):
        print(
            f"it is a lower limit; more --readings than {noise.readings} bring it closer to {noise.smallest_std:.5g}, "
            "the noise of the quietest output"
        )


def print_temperatures(law: TemperatureLaw | TemperatureTable, name: str, n_inputs: int, steps: int) -> None:
    """Print how temperature sets the noise, at some temperatures over the working range."""
    temperatures = np.linspace(*law.temperatures_c, steps).tolist()
    columns: tuple[str, ...] = ("°C", "noise of a reading", "entries of the matrix, rms")
    if isinstance(law, TemperatureTable):
        rows = [(f"{t:.1f}", f"{law.std(t):.5g}", f"{law.size(t):.5g}") for t in temperatures]
    else:
        thermal = law.thermal_e2_per_k > 0
        columns = ("°C", "dark current, e⁻/s", "dark charge, e⁻", "noise of a reading", "dark share")
        columns = (*columns, *(("thermal share",) if thermal else ()), "back, °C")
        rows = [
            (
                f"{t:.1f}",
                f"{law.dark.current_e_per_s(t):.4g}",
                f"{law.dark_e(t):.4g}",
                f"{law.std(t):.4g}",
                f"{law.dark_share(t):.2%}",
                *((f"{law.thermal_share(t):.2%}",) if thermal else ()),
                f"{law.temperature_c(law.std(t)):.1f}",
            )
            for t in temperatures
        ]
    print_table(f"{name}: random ternary vectors, {n_inputs} inputs", columns, rows)


def write_report(calibration: Calibration, path: Path) -> None:
    """Write the report, a self-contained HTML page."""
    certificate, transfer = calibration.certificate, calibration.transfer
    law = {} if certificate.noise is None else certificate.noise.model_dump(exclude_none=True)
    page = html_page(
        "calibration.html",
        title=f"Calibration of {certificate.device}",
        certificate=certificate,
        transfer=transfer,
        noise=calibration.reading_noise,
        alarm=FAMILY_ALARM,
        law=_LAWS[law["law"]] if law else None,
        numbers=[
            {"constant": WORDS[key], "value": _number(value), "unit": unit_of(key), "key": key}
            for key, value in law.items()
            if key != "law"
        ],
        constants=[
            {
                "constant": WORDS.get(key, key),
                **dict(zip(("estimate", "limits", "described", "unit"), shown(key, found), strict=True)),
                "key": key,
            }
            for key, found in certificate.estimates.items()
        ],
        transfer_figure=None
        if transfer is None
        else data_url(png_bytes(transfer_figure(certificate, transfer))),
        tests=[
            {
                "property": test.text,
                "distance from it": f"{test.standard_errors:.2f} standard errors"
                if test.standard_errors < _CAP
                else f"above {_CAP:g} standard errors",
                "holds": _outcome(test),
                "for the law": "needed" if test.needed else "not needed",
            }
            for test in certificate.tests
        ],
        failed=[n for n, test in enumerate(certificate.tests) if test.needed and not test.holds],
        readings_figure=data_url(png_bytes(readings_figure(calibration.readings))),
    )
    path.write_text(page, encoding="utf-8")


def shown(key: str, found: Limits) -> tuple[str, str, str, str]:
    """Return an estimate, its limits, the described number, and the unit with a note on unusual limits."""
    return (
        f"{found.value:.5g}",
        f"{found.low:.5g} to {found.high:.5g}",
        "-" if found.described is None else f"{found.described:.5g}",
        unit_of(key) + (", limits as certified" if key == "light_noise" else ""),  # at a share of its beta
    )


def _number(value: float | str) -> str:
    """Return a number as text, or the name of a law, such as the light power's, in words."""
    return value.replace("_", "-") if isinstance(value, str) else f"{value:.6g}"
