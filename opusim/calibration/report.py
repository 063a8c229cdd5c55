"""A calibration as one self-contained HTML page."""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from opusim.calibration.calibrate import Calibration
from opusim.calibration.certificate import Certificate
from opusim.calibration.figures import readings_figure, transfer_figure
from opusim.units import unit_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:66em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .9em;border-bottom:1px solid #ddd;text-align:left}"
    "img{max-width:100%}.against{color:#a00}"
)


def write_report(calibration: Calibration, path: Path) -> None:
    """Writes the page; everything it shows is inside it."""
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
        + "".join(f"<li>{escape(text)}</li>" for text in certificate.remarks)
        + "</ul>",
    ]
    title = f"Calibration of {escape(certificate.device)}"
    head = f"<head><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style></head>"
    page = f"<!doctype html><html lang='en'>{head}<body>" + "\n".join(parts) + "</body></html>\n"
    path.write_text(page, encoding="utf-8")


def _law(certificate: Certificate) -> str:
    """What is certified."""
    if certificate.noise is None:
        return "<h2>Certified noise</h2><p class='against'>None: the readings speak against the described law.</p>"
    numbers = certificate.noise.model_dump()
    rows = "".join(
        f"<tr><td>{escape(key)}</td><td>{value:.6g}</td></tr>"
        for key, value in numbers.items()
        if key != "law"
    )
    return (
        f"<h2>Certified noise: {escape(numbers['law'].replace('_', ' '))}</h2><p>Limits that hold together but for a "
        f"probability of {certificate.beta:g}.</p><table>{rows}</table>"
    )


def _estimates(calibration: Calibration) -> str:
    """Constants with their limits."""
    certificate = calibration.certificate
    if not certificate.estimates:
        return ""
    rows = "".join(
        f"<tr><td>{escape(key)}</td><td>{v.value:.5g}</td><td>{v.low:.5g} to {v.high:.5g}</td>"
        f"<td>{escape(unit_of(key))}</td></tr>"
        for key, v in certificate.estimates.items()
    )
    error = (
        ""
        if calibration.transfer is None
        else (f"<p>Linearity error, largest: {calibration.transfer.linearity_error():.3%}.</p>")
    )
    return (
        f"<h2>Constants from frames</h2><p>Each interval by itself at {certificate.confidence:.0%}.</p><table><tr>"
        f"<th>constant</th><th>estimate</th><th>limits</th><th>unit</th></tr>{rows}</table>{error}"
    )


def _readings(calibration: Calibration) -> str:
    """The noise of readings and the tests."""
    noise = calibration.reading_noise
    rows = "".join(
        f"<tr class='{'' if t.holds else 'against'}'><td>{escape(t.text)}</td>"
        f"<td>{t.standard_errors:.2f} standard errors</td><td>{'holds' if t.holds else 'does not hold'}</td></tr>"
        for t in noise.tests
    )
    return (
        f"<h2>Readings of one input</h2><p>{noise.readings:,} readings of {noise.n_outputs:,} outputs: standard "
        f"deviation {noise.mean_std:.5g} (root mean square) and {noise.smallest_std:.5g} at the quietest output, "
        f"projection units; correlation of successive readings {noise.successive:.5f}. What Gaussian readings "
        f"would need:</p>"
        f"<table>{rows}</table>"
    )


def _image(figure: Figure | None, text: str) -> str:
    if figure is None:
        return ""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f"<img alt='{escape(text)}' src='data:image/png;base64,{data}'>"
