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
from opusim.calibration.property_tests import FAMILY_ALARM
from opusim.units import unit_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:66em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .9em;border-bottom:1px solid #ddd;text-align:left}"
    "img{max-width:100%}.against{color:#a00}"
)


_CAP = 37.0  # of a p-value that double precision can hold
_LAWS = {"gaussian": "Gaussian readings", "photon_count": "Poisson counts"}
_WORDS = {
    "std": "smallest standard deviation of a reading, lower limit",
    "dark_e_low": "dark charge of a frame, lower limit",
    "dark_e_high": "dark charge of a frame, upper limit",
    "light_ratio_low": "light over the described, lower limit",
    "light_ratio_high": "light over the described, upper limit",
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
        return "<h2>Certified noise</h2><p class='against'>None: a test speaks against the described law.</p>"
    numbers = certificate.noise.model_dump()
    rows = "".join(
        f"<tr><td>{escape(_WORDS[key])}</td><td>{value:.6g}</td><td>{escape(unit_of(key))}</td><td><code>{key}</code></td></tr>"
        for key, value in numbers.items()
        if key != "law"
    )
    return (
        f"<h2>Certified noise: {escape(_LAWS[numbers['law']])}</h2><p>Limits that hold together but for a "
        f"probability of {certificate.beta:g}.</p><table>{rows}</table>"
    )


def _estimates(calibration: Calibration) -> str:
    """Constants with their limits."""
    certificate = calibration.certificate
    if not certificate.estimates:
        return ""
    rows = "".join(
        f"<tr><td>{escape(_WORDS.get(key, key))}</td><td>{v.value:.5g}</td><td>{v.low:.5g} to {v.high:.5g}</td>"
        f"<td>{escape(unit_of(key))}</td><td><code>{escape(key)}</code></td></tr>"
        for key, v in certificate.estimates.items()
    )
    error = (
        ""
        if calibration.transfer is None
        else (f"<p>Linearity error, largest: {calibration.transfer.linearity_error():.3%}.</p>")
    )
    return (
        f"<h2>Constants from frames</h2><p>Each interval by itself at {certificate.confidence:.0%}.</p><table><tr>"
        f"<th>constant</th><th>estimate</th><th>limits</th><th>unit</th><th>key</th></tr>{rows}</table>{error}"
    )


def _readings(calibration: Calibration) -> str:
    """The noise of readings and the tests."""
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
