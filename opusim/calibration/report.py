"""Show what a calibration or recorded frames say of a device: tables, figures, pages, and a measured description."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.special import ndtr, ndtri

from opusim.calibration.calibrate import Calibration, described_constants
from opusim.calibration.frames import COUNT, Estimate, jackknife
from opusim.calibration.photon_transfer import PhotonTransfer
from opusim.calibration.recorded_transfer import RecordedTransfer
from opusim.description.schema import DeviceDescription, copied, packaged_names, parse_description
from opusim.description.section import merged, nested
from opusim.devices.certificate import Certificate, GaussianLaw, Limits, TestedProperty
from opusim.p_values import FAMILY_ALARM
from opusim.tables import (
    blank_figure,
    data_url,
    html_page,
    png_bytes,
    print_table,
    table_text,
    unit_of,
    wrapped,
)
from opusim.temperature import TemperatureLaw, TemperatureTable


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


_FIRST_TIME_S = 1e9  # seconds since 1970 that a date may have
_SENSOR = ("gain_dn_per_e", "black_level_dn", "read_noise_e", "prnu", "dsnu_e")
"""Constants whose key in a description's [camera.sensor] is their own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CameraReport:
    """Constants from recorded frames.

    Attributes:
        transfer: the frames' sums.
        confidence: of each single interval.
        constants: estimates with their limits and the described number, if there is a description.
        remarks: what frames do not tell, one line each.
        date: on which frames were taken, or read if they tell no date, as YYYY-MM-DD.
    """

    transfer: RecordedTransfer
    confidence: float
    constants: dict[str, Limits]
    remarks: tuple[str, ...]
    date: str

    @classmethod
    def of(
        cls,
        transfer: RecordedTransfer,
        remarks: tuple[str, ...],
        confidence: float,
        description: DeviceDescription | None,
    ) -> CameraReport:
        """Evaluate frames that `recorded_transfer.require_lawful` has accepted."""
        described = {} if description is None else described_constants(description)
        found = transfer.estimates(confidence)
        times = [each.level.times_s for each in transfer.levels if each.level.times_s is not None]
        first = min((float(each.min()) for each in times), default=0.0)
        if (
            efficiency := found.get("quantum_efficiency")
        ) is not None and efficiency.low <= 1 < efficiency.value:
            remarks = (
                *remarks,
                f"the quantum efficiency's estimate {efficiency.value:.5g} is above 1, and its limits hold 1: a "
                "description takes 1",
            )
        return cls(
            transfer=transfer,
            confidence=confidence,
            constants={
                key: Limits(**vars(found[key]), described=described.get(key)) for key in WORDS if key in found
            },
            remarks=remarks,
            date=time.strftime("%Y-%m-%d", time.gmtime(first if first > _FIRST_TIME_S else None)),
        )

    @property
    def images(self) -> int:
        """Frames of all levels."""
        return int(self.transfer.counts.sum())

    @property
    def limits(self) -> str:
        """The heading of limits in tables."""
        return f"limits at {self.confidence:.0%}"

    def summary(self) -> str:
        """Return what was read, in a line."""
        frames, pixels = self.transfer.frames, int(self.transfer.total[0, 0])
        shifted = f", shifted down by {frames.shift}" if frames.shift else ""
        return (
            f"{frames.path}: {frames.layout}, {self.images:,} frames of {pixels:,} pixels at "
            f"{len(self.transfer.levels)} levels, {frames.bits} bits{shifted}"
        )

    def text(self) -> str:
        """Return the table of constants and the remarks, as wide as the output."""
        columns = ("constant", "meaning", "estimate", self.limits, "described", "unit")
        rows = [
            (key, WORDS[key], *shown(key, each)[:3], unit_of(key)) for key, each in self.constants.items()
        ]
        table = table_text(columns, rows)
        return "\n".join([wrapped(self.summary()), table.rstrip(), *map(wrapped, self.remarks)])

    def to_json(self) -> dict[str, Any]:
        """Return everything that was found as plain JSON values."""
        transfer, frames = self.transfer, self.transfer.frames
        used = set(transfer.used.tolist())
        levels = [
            {
                "name": each.level.name,
                "exposure_us": each.level.exposure_us,
                "photons": each.level.photons,
                "frames": each.frames,
                "mean_dn": float(transfer.means[i]),
                "variance_dn2": float(transfer.variances[i]),
                "spatial_variance_dn2": float(transfer.spatial_dn2(transfer.total)[i]),
                "is_used": i in used,
                "is_saturated": bool(transfer.saturated[i]),
            }
            for i, each in enumerate(transfer.levels)
        ]
        return {
            "frames": str(frames.path),
            "layout": frames.layout,
            "date": self.date,
            "bits": frames.bits,
            "shift": frames.shift,
            "images": self.images,
            "pixels": int(transfer.total[0, 0]),
            "confidence": self.confidence,
            "constants": {
                key: {**each.model_dump(exclude_none=True), "unit": unit_of(key)}
                for key, each in self.constants.items()
            },
            "levels": levels,
            "remarks": list(self.remarks),
        }

    def figure(self) -> Figure:
        """Draw photon transfer with its limits, the response, the dark mean, and the variance over pixels."""
        figure = blank_figure(10, 8)
        figure.get_layout_engine().set(hspace=0.08, wspace=0.05)  # type: ignore[union-attr, call-arg]
        (transfer, response), (dark, spatial) = figure.subplots(2, 2)
        found, own = self.transfer, self.transfer.dark
        # variances with their limits, and the line with its limits
        x = found.means - found.dark_line(found.total)[0]
        rest = np.setdiff1d(np.arange(x.size), found.on_line)
        transfer.plot(
            x[rest], found.variances[rest], "o", color="0.7", label="left out: rounding or saturation"
        )
        errors = 2 * found.variance_errors[found.on_line]
        transfer.errorbar(
            x[found.on_line],
            found.variances[found.on_line],
            yerr=errors,
            fmt="o",
            color="C0",
            capsize=3,
            label="used, with two standard errors",
        )
        grid = np.linspace(0, x[found.on_line].max(), 30)
        sums = np.stack([each.sums for each in found.levels], axis=1)

        def heights(total: np.ndarray) -> dict[str, float]:
            line = found.line(total)
            return {str(n): line.floor + line.gain * point for n, point in enumerate(grid.tolist())}

        band: list[Estimate] = list(jackknife(sums, heights, confidence=self.confidence).values())
        gain = self.constants["gain_dn_per_e"]
        label = f"K = {gain.value:.4g} ({gain.low:.4g} to {gain.high:.4g}) DN/e⁻"
        transfer.plot(grid, [each.value for each in band], "k--", linewidth=0.8, label=label)
        limits = [each.low for each in band], [each.high for each in band]
        transfer.fill_between(grid, *limits, color="0.8", label=self.limits)
        transfer.set(xlabel="mean above black, DN", ylabel="temporal variance, DN²", title="Photon transfer")
        transfer.set_ylim(top=1.45 * float(found.variances.max()))  # room for the legend
        transfer.legend(loc="upper left")
        response.set_title("Linearity")
        if found.light is None:
            response.text(0.5, 0.5, "the light is not known", ha="center", transform=response.transAxes)
            response.set_axis_off()
        else:
            response.axhline(0, color="k", linewidth=0.8)
            response.plot(found.light[found.linear], 100 * found.response(found.total)[2], "o")
            unit = "photons on a pixel" if found.has_photons else "exposure under a steady lamp, s"
            response.set(xlabel=unit, ylabel="mean relative to the line, %")
        black, rise = found.dark_line(found.total)
        dark.plot(found.seconds[own], found.means[own], "o", label="dark frames")
        times = np.array([0.0, found.seconds[own].max()])
        label = f"{black:.5g} DN + {rise:.4g} DN/s" if rise else f"{black:.5g} DN"
        dark.plot(times, black + rise * times, "k--", linewidth=0.8, label=label)
        dark.set(xlabel="exposure, s", ylabel="mean, DN", title="Dark current")
        dark.legend()
        signal2, spread = np.square(found.lit), found.spatial_dn2(found.total)
        spatial.plot(signal2[own], spread[own], "s", color="C1", label="dark")
        spatial.plot(signal2[found.used], spread[found.used], "o", color="C0", label="flat")
        spatial.set(
            xlabel="signal², DN²", ylabel="variance over pixels, DN²", title="Non-uniformity (PRNU, DSNU)"
        )
        spatial.legend()
        return figure


def measured_description(
    report: CameraReport,
    base: DeviceDescription,
    name: str,
    *,
    title: str | None = None,
    temperature_c: float | None = None,
) -> tuple[DeviceDescription, tuple[str, ...]]:
    """Return a camera's description with the measured numbers, and remarks on those that it cannot hold.

    Dark frames of one exposure hold the dark charge d of that exposure, of which they say nothing. The base's d, at
    the sensor's temperature, is taken away then: black level - K d in DN, read noise sqrt(r^2 - d) in electrons, at
    least 0. A quantum efficiency above 1 whose lower limit is at most 1 becomes 1; others out of range are refused.
    """
    # 1. The constant of each measured key below `camera`, and the temperatures of the dark current.
    found = report.constants
    measured = {f"sensor.{key}": key for key in _SENSOR if key in found}
    if "quantum_efficiency" in found:
        measured["light.quantum_efficiency"] = "quantum_efficiency"
    if "saturation_e" in found and not report.transfer.ends_at_converter:
        measured["sensor.full_well_e"] = "saturation_e"
    dark = None if base.camera is None else base.camera.dark
    law = next((each for each in ("doubling", "arrhenius") if dark is not None and getattr(dark, each)), None)
    assumed: dict[str, float] = {}
    remarks: tuple[str, ...] = ()
    if "dark_current_e_per_s" in found and dark is not None and law is not None:
        measured[f"dark.{law}.dark_current_ref_e_per_s"] = "dark_current_e_per_s"
        at_c = dark.temperature_c if temperature_c is None else temperature_c
        assumed = {"dark.temperature_c": at_c, f"dark.{law}.temperature_ref_c": at_c}
        spread = found.get("dark_spread_e_per_s")
        if spread is not None and spread.low > 0 and found["dark_current_e_per_s"].low > 0:
            measured["pixels.dcnu"] = "dark_spread_e_per_s"
    elif "dark_current_e_per_s" in found:
        remarks = (f"{base.name} has no law of dark current that takes one number; it keeps its own",)
    # 2. Their values and sources.
    source = f"{report.date}, frames in {report.transfer.frames.path.resolve().name}"
    where = "temperature of the frames" if temperature_c is not None else "at the description's temperature"
    provenance: dict[str, Any] = {
        key: {"status": "assumed" if temperature_c is None else "measured", "source": f"{source}, {where}"}
        for key in assumed
    }
    for key, constant in measured.items():
        each = found[constant]
        limits = f"{report.limits} {each.low:.5g} to {each.high:.5g}"
        provenance[key] = {"status": "measured", "source": f"{source}, {limits}"}
    provenance["sensor.adc_bits"] = {"status": "measured", "source": f"{source}, numbers of the frames"}
    values = {key: found[constant].value for key, constant in measured.items()}
    if "light.quantum_efficiency" in values and found["quantum_efficiency"].low <= 1:
        values["light.quantum_efficiency"] = min(values["light.quantum_efficiency"], 1.0)
    charge_e = _dark_charge_e(report.transfer, base, temperature_c)
    if charge_e:
        share = f", less the {charge_e:.4g} e⁻ that {base.name} describes in the dark"
        if "sensor.black_level_dn" in values:
            values["sensor.black_level_dn"] -= charge_e * values["sensor.gain_dn_per_e"]
            provenance["sensor.black_level_dn"]["source"] += share
        if "sensor.read_noise_e" in values:
            values["sensor.read_noise_e"] = math.sqrt(max(values["sensor.read_noise_e"] ** 2 - charge_e, 0))
            provenance["sensor.read_noise_e"]["source"] += share
    if "pixels.dcnu" in values:
        # the description holds the spread relative to the mean, at most 2
        values["pixels.dcnu"] = min(values["pixels.dcnu"] / found["dark_current_e_per_s"].value, 2.0)
    rounded = {key: float(f"{max(value, 0.0):.6g}") for key, value in values.items()}
    bits = {"sensor.adc_bits": report.transfer.frames.bits, "sensor.shot_noise": True}
    changes: dict[str, Any] = {}
    for key, value in {**rounded, **assumed, **bits}.items():
        changes = merged(changes, nested(f"camera.{key}", value))
    # 3. The description. A packaged one's sources do not hold for this device; a user's own file keeps its sources.
    kept = copied(base, base, None, None) if base.name in packaged_names() else base
    sources = {f"camera.{key}": entry for key, entry in provenance.items()}
    content = merged(kept.dump(), changes | {"name": name, "provenance": sources})
    content["title"] = title or f"{base.title}; sensor measured from frames"
    if report.transfer.ends_at_converter:
        # the converter ends first, so that frames do not tell the full well
        content["camera"]["sensor"].pop("full_well_e", None)
        content["provenance"].pop("camera.sensor.full_well_e", None)
    return parse_description(name, content), remarks


def _dark_charge_e(transfer: RecordedTransfer, base: DeviceDescription, temperature_c: float | None) -> float:
    """Return the dark charge, electrons, that the base describes in dark frames of one exposure; else 0."""
    camera = base.camera
    law = None if camera is None else camera.dark_law()
    if camera is None or camera.dark is None or law is None or transfer.has_dark_slope:
        return 0.0
    at_c = camera.dark.temperature_c if temperature_c is None else temperature_c
    return float(law.current_e_per_s(at_c) * transfer.seconds[transfer.dark][0])
