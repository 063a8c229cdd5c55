"""The curves of a calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from opusim.calibration.calibrate import Calibration
from opusim.calibration.flat_series import COUNT
from opusim.calibration.photon_transfer import PhotonTransfer
from opusim.camera.temperature_noise import TemperatureNoise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def transfer_figure(calibration: Calibration) -> Figure | None:
    """Photon transfer, response, its residuals and dark current; None for a device without flat frames."""
    from matplotlib.figure import Figure

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
    """Quantiles of standardised readings against the Gaussian's, and the standard deviations of the outputs."""
    from matplotlib.figure import Figure
    from scipy.special import ndtr, ndtri

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


def temperature_figure(law: TemperatureNoise, name: str) -> Figure:
    """The noise of a reading and the dark current's share of its variance against the temperature."""
    from matplotlib.figure import Figure

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
