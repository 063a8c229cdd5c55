"""Write a calibration as one self-contained HTML page with its curves."""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import ndtr, ndtri

from opusim.calibration.calibrate import Calibration
from opusim.calibration.flat_series import COUNT
from opusim.calibration.photon_transfer import PhotonTransfer
from opusim.devices.certificate import Certificate, GaussianLaw, Limits
from opusim.p_values import FAMILY_ALARM
from opusim.tables import print_table, unit_of, wrapped
from opusim.temperature import TemperatureLaw


def transfer_figure(calibration: Calibration) -> Figure | None:
    """Photon transfer, response, its residuals and dark current; None if the device has no flat frames."""
    transfer = calibration.transfer
    if transfer is None:
        return None
    figure = Figure(figsize=(10, 8), layout="constrained")
    figure.get_layout_engine().set(hspace=0.08, wspace=0.05)  # type: ignore[union-attr, call-arg]
    axes = figure.subplots(2, 2)
    found = calibration.certificate.estimates
    gain, black = found["gain_dn_per_e"].value, found["black_level_dn"].value
    _photon_transfer(axes[0, 0], transfer, gain)
    _response(axes[0, 1], transfer, gain * found["quantum_efficiency"].value, black)
    _residuals(axes[1, 0], transfer)
    _dark(axes[1, 1], transfer)
    return figure


def readings_figure(calibration: Calibration) -> Figure:
    """Plot quantiles of standardised readings against the Gaussian's, and the standard deviations of the outputs."""
    samples = calibration.readings
    centred = samples - samples.mean(axis=0)
    std = centred.std(axis=0, ddof=1)
    values = np.sort((centred / np.where(std > 0, std, 1)).ravel())
    ranks = np.unique((ndtr(np.linspace(-6, 6, 1000)) * (values.size - 1)).astype(int))
    figure = Figure(figsize=(10, 3.8), layout="constrained")
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


def temperature_figure(law: TemperatureLaw, name: str) -> Figure:
    """Return the noise of a reading and the dark current's share of its variance against the temperature."""
    temperatures = np.linspace(law.dark.temperature_min_c, law.dark.temperature_max_c, 200)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    share = axes.twinx()
    axes.plot(temperatures, [law.std(t) for t in temperatures], color="C0")
    share.plot(temperatures, [100 * law.dark_share(t) for t in temperatures], color="C1", linestyle="--")
    axes.set(xlabel="sensor temperature, °C", title=f"{name}: noise of a reading")
    axes.set_ylabel("standard deviation, projection units", color="C0")
    axes.set_ylim(bottom=0)
    share.set_ylabel("dark current's share of the variance, %", color="C1")
    share.set_ylim(0, 100)
    return figure


def _photon_transfer(axes: Axes, transfer: PhotonTransfer, gain: float) -> None:
    means, variances, used = transfer.light.means(), transfer.light.variances(), transfer.used()
    axes.plot(means, variances, "o", color="0.7", label="left out: rounding or saturation")
    axes.plot(means[used], variances[used], "o", color="C0", label="used")
    line = np.linspace(means[0], means[used].max(), 2)
    start = float(np.mean(variances[used] - gain * means[used]))
    axes.plot(line, start + gain * line, "k--", linewidth=0.8, label=f"slope K = {gain:.5g} DN/e⁻")
    axes.set(xlabel="mean, DN", ylabel="temporal variance, DN²", title="Photon transfer")
    axes.legend()


def _response(axes: Axes, transfer: PhotonTransfer, response: float, black: float) -> None:
    photons, means = transfer.photons()[:-1], transfer.light.means()[:-1]
    axes.plot(photons, means, "o")
    axes.plot(photons, black + response * photons, "k--", linewidth=0.8, label=f"{response:.5g} DN/photon")
    axes.set(xlabel="photons on a pixel", ylabel="mean, DN", title="Response")
    axes.legend()


def _residuals(axes: Axes, transfer: PhotonTransfer) -> None:
    used = transfer.used()
    photons, means = transfer.photons()[used], transfer.light.means()[used]
    line = np.polyval(np.polyfit(photons, means, 1), photons)
    axes.axhline(0, color="k", linewidth=0.8)
    samples = transfer.light.frames * transfer.light.sums[:, used, COUNT].sum(axis=0)
    errors = np.sqrt(transfer.light.variances()[used] / samples)
    axes.errorbar(photons, means - line, yerr=errors, fmt="o", capsize=3)
    axes.set(
        xlabel="photons on a pixel", ylabel="mean minus line, DN", title="Linearity, with standard errors"
    )


def _dark(axes: Axes, transfer: PhotonTransfer) -> None:
    for series, label in ((transfer.dark, "operating temperature"), (transfer.warm, "warm")):
        if series is not None:
            seconds = [float(level.exposure_us or 0) * 1e-6 for level in series.levels]
            axes.plot(seconds, series.means(), "o-", label=label)
    axes.set(xlabel="exposure, s", ylabel="mean under constant light, DN", title="Dark current")
    axes.legend()


_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:66em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .9em;border-bottom:1px solid #ddd;text-align:left}"
    "img{max-width:100%}.against{color:#a00}"
)


_CAP = 37.0  # of a p-value that double precision can hold
_LAWS = {
    "gaussian": "Gaussian readings",
    "photon_count": "Poisson counts",
    "fluctuating_photon_count": "Poisson counts under light that fluctuates",
}
_WORDS = {
    "std": "smallest standard deviation of a reading, lower limit",
    "dark_e_low": "dark charge of a frame, lower limit",
    "dark_e_high": "dark charge of a frame, upper limit",
    "dark_mean_e_low": "its mean over all outputs, lower limit",
    "dark_mean_e_high": "its mean over all outputs, upper limit",
    "dark_deviation_e": "an output's deviation from that mean, limit; of a group's mean, over the root of its outputs",
    "light_ratio_low": "light over the described, lower limit",
    "light_ratio_high": "light over the described, upper limit",
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
    "dark_noise_dn": "noise of a blank frame",
    "light_noise": "light, standard deviation from frame to frame",
    "entry_std": "standard deviation of B's entries, which this project takes to be 1",
    "decorrelation_s": "decorrelation time of the medium",
}
"""What the keys of certificates mean, for people."""


def print_calibration(found: Calibration) -> None:
    """Print constants, tests and the certified law as tables."""
    rows = [
        (key, f"{v.value:.5g}", f"{v.low:.5g} to {v.high:.5g}", _described(v), _unit(key))
        for key, v in found.certificate.estimates.items()
    ]
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
            print(f"  {test.text}: {'holds' if test.holds else 'does not hold'}")
    for remark in found.certificate.remarks:
        if "law" in remark or "by the description" in remark:
            print(wrapped(remark))
    for entry in found.certificate.trust:
        print(wrapped(entry.line))
    if law is None:
        failed = "; ".join(test.text for test in needed if not test.holds)
        print(
            wrapped(
                f"certified noise: none; this does not hold: {failed}" if failed else "certified noise: none"
            )
        )
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


def print_temperatures(law: TemperatureLaw, name: str, n_inputs: int, steps: int) -> None:
    """Print how temperature sets the noise, at some temperatures over the sensor's range."""
    rows = [
        (
            f"{t:.1f}",
            f"{law.dark.current_e_per_s(t):.4g}",
            f"{law.dark_e(t):.4g}",
            f"{law.std(t):.4g}",
            f"{law.dark_share(t):.2%}",
            f"{law.temperature_c(law.std(t)):.1f}",
        )
        for t in np.linspace(law.dark.temperature_min_c, law.dark.temperature_max_c, steps)
    ]
    columns = ("°C", "dark current, e⁻/s", "dark charge, e⁻", "noise of a reading", "dark share", "back, °C")
    print_table(f"{name}: random ternary vectors, {n_inputs} inputs", columns, rows)


def write_report(calibration: Calibration, path: Path) -> None:
    """Write the page; everything it shows is inside it."""
    certificate = calibration.certificate
    parts = [
        f"<h1>Calibration of {escape(certificate.device)}</h1>",
        f"<p>{escape(certificate.date)}, {certificate.frames:,} frames, window of {certificate.n_inputs:,} inputs and "
        f"{certificate.n_outputs:,} outputs.</p>",
        _law(certificate),
        _estimates(calibration),
        _image(transfer_figure(calibration), "photon transfer, response, linearity and dark current"),
        _readings(calibration),
        _image(readings_figure(calibration), "law of a reading and noise of the outputs"),
        "<h2>Remarks</h2><ul>"
        + "".join(f"<li>{escape(text)}</li>" for text in certificate.assumptions)
        + "</ul>",
    ]
    title = f"Calibration of {escape(certificate.device)}"
    head = f"<head><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style></head>"
    page = f"<!doctype html><html lang='en'>{head}<body>" + "\n".join(parts) + "</body></html>\n"
    path.write_text(page, encoding="utf-8")


def _described(limits: Limits) -> str:
    """Return what the description says of a constant."""
    return "-" if limits.described is None else f"{limits.described:.5g}"


def _unit(key: str) -> str:
    """Return a constant's unit, and whether its limits are those of the certified law, at a share of its beta."""
    return unit_of(key) + (", limits as certified" if key == "light_noise" else "")


def _number(value: float | str) -> str:
    """Return a number of a law, or the name of one, such as that of a light's power."""
    return value.replace("_", "-") if isinstance(value, str) else f"{value:.6g}"


def _law(certificate: Certificate) -> str:
    """Return what is certified."""
    if certificate.noise is None:
        return "<h2>Certified noise</h2><p class='against'>None: a test speaks against the described law.</p>"
    numbers = certificate.noise.model_dump(exclude_none=True)
    rows = "".join(
        f"<tr><td>{escape(_WORDS[key])}</td><td>{_number(value)}</td><td>{escape(unit_of(key))}</td><td><code>{key}</code></td></tr>"
        for key, value in numbers.items()
        if key != "law"
    )
    return (
        f"<h2>Certified noise: {escape(_LAWS[numbers['law']])}</h2><p>Limits that hold together but for a "
        f"probability of {certificate.beta:g}.</p><table>{rows}</table>"
    )


def _estimates(calibration: Calibration) -> str:
    """Return the constants with their limits."""
    certificate = calibration.certificate
    if not certificate.estimates:
        return ""
    rows = "".join(
        f"<tr><td>{escape(_WORDS.get(key, key))}</td><td>{v.value:.5g}</td><td>{v.low:.5g} to {v.high:.5g}</td>"
        f"<td>{_described(v)}</td><td>{escape(_unit(key))}</td><td><code>{escape(key)}</code></td></tr>"
        for key, v in certificate.estimates.items()
    )
    error = (
        ""
        if calibration.transfer is None
        else (f"<p>Linearity error, largest: {calibration.transfer.linearity_error():.3%}.</p>")
    )
    return (
        f"<h2>Constants from frames</h2><p>Each single interval at {certificate.confidence:.0%}.</p><table><tr>"
        f"<th>constant</th><th>estimate</th><th>limits</th><th>described</th><th>unit</th><th>key</th></tr>{rows}</table>{error}"
    )


def _readings(calibration: Calibration) -> str:
    """Return the noise of readings and the tests."""
    noise, tests = calibration.reading_noise, calibration.certificate.tests
    rows = "".join(
        f"<tr class='{'against' if t.needed and not t.holds else ''}'><td>{escape(t.text)}</td>"
        f"<td>{_errors(t.standard_errors)}</td><td>{'holds' if t.holds else 'does not hold'}</td>"
        f"<td>{'needed' if t.needed else 'not needed'}</td></tr>"
        for t in tests
    )
    return (
        f"<h2>Readings of constant inputs</h2><p>{noise.readings:,} readings of {noise.n_outputs:,} outputs at each of "
        f"{noise.inputs} inputs: standard deviation {noise.mean_std:.5g} (root mean square) and "
        f"{noise.smallest_std:.5g} at the quietest output, projection units; correlation of successive readings "
        f"{noise.successive:.5f}.</p><h2>Tests</h2><p>What the law needs, and what Gaussian readings would need "
        f"besides. A sound device fails any of them with probability {FAMILY_ALARM:g}.</p><table>{rows}</table>"
    )


def _errors(value: float) -> str:
    return f"{value:.2f} standard errors" if value < _CAP else f"above {_CAP:g} standard errors"


def _image(figure: Figure | None, text: str) -> str:
    if figure is None:
        return ""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f"<img alt='{escape(text)}' src='data:image/png;base64,{data}'>"
