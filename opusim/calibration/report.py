"""Write a calibration as one self-contained HTML page with its curves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy.special import ndtr, ndtri

from opusim.calibration.calibrate import Calibration
from opusim.calibration.frames import COUNT
from opusim.calibration.photon_transfer import PhotonTransfer
from opusim.devices.certificate import Certificate, GaussianLaw, Limits
from opusim.p_values import FAMILY_ALARM
from opusim.tables import data_url, html_page, png_bytes, print_table, unit_of, wrapped
from opusim.temperature import TemperatureLaw


def transfer_figure(certificate: Certificate, transfer: PhotonTransfer) -> Figure:
    """Draw photon transfer, response, its residuals and dark current."""
    figure = Figure(figsize=(10, 8), layout="constrained")
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
    rows = [(key, *_shown(key, estimate)) for key, estimate in found.certificate.estimates.items()]
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
            {"constant": _WORDS[key], "value": _number(value), "unit": unit_of(key), "key": key}
            for key, value in law.items()
            if key != "law"
        ],
        constants=[
            {
                "constant": _WORDS.get(key, key),
                **dict(zip(("estimate", "limits", "described", "unit"), _shown(key, found), strict=True)),
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
                "holds": "holds" if test.holds else "does not hold",
                "for the law": "needed" if test.needed else "not needed",
            }
            for test in certificate.tests
        ],
        failed=[n for n, test in enumerate(certificate.tests) if test.needed and not test.holds],
        readings_figure=data_url(png_bytes(readings_figure(calibration.readings))),
    )
    path.write_text(page, encoding="utf-8")


def _shown(key: str, found: Limits) -> tuple[str, str, str, str]:
    """Return an estimate, its limits, what the description says, and the unit with what sets the limits apart."""
    return (
        f"{found.value:.5g}",
        f"{found.low:.5g} to {found.high:.5g}",
        "-" if found.described is None else f"{found.described:.5g}",
        unit_of(key) + (", limits as certified" if key == "light_noise" else ""),  # at a share of its beta
    )


def _number(value: float | str) -> str:
    """Return a number of a law, or the name of one, such as that of a light's power."""
    return value.replace("_", "-") if isinstance(value, str) else f"{value:.6g}"
