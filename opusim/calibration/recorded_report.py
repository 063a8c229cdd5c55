"""Show what recorded frames say of a camera: a table, JSON, a picture, and a description with measured numbers."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from opusim.calibration.calibrate import WORDS, described_constants, shown
from opusim.calibration.frames import Estimate, jackknife
from opusim.calibration.recorded_transfer import RecordedTransfer
from opusim.description.schema import DeviceDescription, copied, packaged_names, parse_description
from opusim.description.section import merged, nested
from opusim.devices.certificate import Limits
from opusim.tables import blank_figure, table_text, unit_of, wrapped

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

    Dark frames of one exposure hold the dark charge d of that exposure, of which they say nothing. The base's d is
    taken away then: black level - K d in DN, read noise sqrt(r^2 - d) in electrons, at least 0.

    Args:
        report: the measurement.
        base: the description that gives the numbers which frames do not tell.
        name: of the new description.
        title: of the new description; None for the base's, with a word on the frames.
        temperature_c: the sensor's temperature, degrees Celsius; None for that of the base.

    A quantum efficiency above 1 whose lower limit is at most 1 becomes 1.

    Raises:
        ConfigError: a measured number is out of a description's range.
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
