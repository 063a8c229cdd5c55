"""Measurements of memory devices from a file, and the device description, table and figure that a fit gives."""

from __future__ import annotations

import csv
import datetime
import hashlib
import io
import math
import reprlib
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from opusim.calibration.conductance_fit import ConductanceFit, FittedLaw, Measurements, expected_moments
from opusim.description.schema import DeviceDescription, load_description, parse_description
from opusim.description.section import flat
from opusim.errors import ConfigError
from opusim.files import read_text

CONDUCTANCES = ("conductance_us", "programmed_us", "time_s")
PRODUCTS = ("input", "weight", "time_s", "reading")
_UNITS = ("_us", "_s")
_DEVICE = "device"
_LEAST_INPUT = 0.3
"""Smaller inputs show the noise of outputs more than that of weights."""
_FITTED_SECTIONS = ("programming_us", "relaxation", "drift", "low_frequency")


def read_measurements(path: str | Path, g_max_us: float | None = None) -> tuple[Measurements, float | None]:
    """Read a table with a header: conductance_us, programmed_us, time_s or input, weight, time_s, reading.

    Units may be left out of the names. A column `device` names the programmed device of each line; without it every
    line is another one. Other columns are ignored.

    Args:
        path: text with commas, semicolons or tabs between columns.
        g_max_us: conductance of a weight of 1, microsiemens; None takes the largest target.

    Returns:
        The measurements, and g_max of conductances; that of products is as given.

    Raises:
        ConfigError: the file cannot be read, lacks a column, or holds what is no number in its range.
    """
    name = str(path)
    try:
        rows = list(csv.reader(io.StringIO(read_text(path)), delimiter=_delimiter(read_text(path))))
    except OSError as error:
        raise ConfigError(
            name, "path", f"cannot be read ({error.strerror or error}); check the path"
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(name, "content", f"is no table of text: {error}") from None
    lines = [row for row in rows if any(cell.strip() for cell in row)]
    header = [cell.strip().lower().lstrip("\ufeff") for cell in lines[0]] if lines else []
    wanted = next((kind for kind in (CONDUCTANCES, PRODUCTS) if all(_place(c, header) for c in kind)), None)
    if wanted is None:
        found = [cell if cell.isprintable() and len(cell) < 40 else reprlib.repr(cell) for cell in header[:8]]
        raise ConfigError(
            name,
            "columns",
            f"{', '.join(found) or 'none'}; name them {', '.join(CONDUCTANCES)} or "
            f"{', '.join(PRODUCTS)} in the first line",
        )
    columns = {column: _numbers(name, lines, _place(column, header)[0], column) for column in wanted}
    device = np.arange(len(lines) - 1)
    if _DEVICE in header:
        place = header.index(_DEVICE)
        cells = [row[place] if place < len(row) else "" for row in lines[1:]]
        if "" in cells:
            line = cells.index("") + 2
            raise ConfigError(
                name, f"{_DEVICE}, line {line}", "names no device; give one, or remove the line"
            )
        device = np.unique(cells, return_inverse=True)[1]
    try:
        if wanted == PRODUCTS:
            values = (columns[key] for key in ("weight", "reading", "time_s", "input"))
            target, value, time_s, factor = values
            return Measurements(
                target=target, value=value, time_s=time_s, factor=factor, device=device
            ), g_max_us
        target, value, time_s = (columns[key] for key in CONDUCTANCES)
        largest = float(target.max()) if g_max_us is None else g_max_us
        if largest <= 0:
            raise ValueError("conductance_us: no target is above 0; measure larger ones")
        if target.max() > largest:
            raise ValueError(
                f"conductance_us: {target.max():g} exceeds g_max_us = {largest:g}; raise g_max_us"
            )
        return (
            Measurements(
                target=target / largest, value=value / largest, time_s=time_s, factor=None, device=device
            ),
            largest,
        )
    except ValueError as error:
        raise ConfigError(name, "lines", str(error)) from None


def fitted_description(
    found: ConductanceFit,
    data: Measurements,
    readings: Path,
    *,
    name: str,
    like: str | Path,
    g_max_us: float | None,
) -> DeviceDescription:
    """Return a crossbar with the fitted laws, and everything else from another description.

    Each fitted number has the status ``fitted``, and a source with the file, its digest and the number's limits. A fit
    of products replaces converters and noise of products too: single readings do not tell them apart from programming.

    Raises:
        ConfigError: the other description is no crossbar.
    """
    base = load_description(like)
    if base.crossbar is None:
        raise ConfigError(str(like), "kind", f"{base.kind!r} is no crossbar; take pcm, hermes or reram")
    content = base.dump()
    crossbar: dict[str, Any] = {
        key: value for key, value in content["crossbar"].items() if key not in _FITTED_SECTIONS
    }
    scale = crossbar["g_max_us"] if g_max_us is None else g_max_us
    fitted = _sections(found.law, data, scale)
    if data.factor is not None:
        crossbar.pop("converter", None)
        crossbar.pop("product", None)
    if g_max_us is not None:
        fitted["g_max_us"] = g_max_us
    content |= {
        "name": name,
        "kind": "crossbar",
        "title": f"Fitted to {found.lines} lines of {readings.name}; the rest is that of {base.name}",
        "crossbar": crossbar | fitted,
    }
    digest = hashlib.blake2b(readings.read_bytes(), digest_size=8).hexdigest()
    origin = f"{found.lines} lines of {readings.name} (BLAKE2b {digest}), {datetime.date.today().isoformat()}"
    sources = {
        f"crossbar.{key}": {"status": "fitted", "source": origin + _limits_text(found, key, scale)}
        for key in flat(fitted)
    }
    kept = {key: value for key, value in content["provenance"].items() if key in _keys(content)}
    content["provenance"] = kept | sources
    return parse_description(name, content)


def _keys(content: dict[str, Any]) -> set[str]:
    return set(flat({key: value for key, value in content.items() if key != "provenance"}))


def _sections(law: FittedLaw, data: Measurements, g_max_us: float) -> dict[str, Any]:
    """Return the sections of a description that hold the fitted law."""
    first, last = float(data.time_s.min()), float(data.time_s.max())
    programming = [c * g_max_us for c in law.programming]
    found: dict[str, Any] = {}
    if law.relaxed is None:
        found["programming_us"] = programming
    else:
        polynomials = [programming, [c * g_max_us for c in law.relaxed]]
        found["relaxation"] = {"times_s": [first, last], "polynomials_us": polynomials}
    if law.shape.time == "drift":
        sizes = abs(data.target)
        limits = np.maximum(law.nu(np.array([sizes.min(), 1.0])), 0.0)
        found["drift"] = {
            "t0_s": first,
            "mean": {
                "slope": law.nu_slope,
                "offset": law.nu_offset,
                "lowest": float(limits.min()),
                "highest": float(limits.max()),
            },
            "std": {"slope": 0.0, "offset": law.nu_std, "lowest": law.nu_std, "highest": law.nu_std},
        }
    if data.factor is not None:
        found["product"] = {"output_std": law.output_std}
    return found


def _limits_text(found: ConductanceFit, key: str, g_max_us: float) -> str:
    """Return the limits that stand behind a key of the description, for its source."""
    prefixes = {
        "programming_us": "programming",
        "relaxation.polynomials_us": "",
        "drift.mean.slope": "nu_slope",
        "drift.mean.offset": "nu_offset",
        "drift.std.offset": "nu_std",
        "product.output_std": "output_std",
    }
    if key not in prefixes:
        return ""
    names = [name for name in found.limits if name.startswith(prefixes[key])]
    if key == "relaxation.polynomials_us":
        names = [name for name in names if name.startswith(("programming", "relaxed"))]
    scale = g_max_us if key.endswith("_us") else 1.0
    ranges = [f"{found.limits[name][0] * scale:.4g} to {found.limits[name][1] * scale:.4g}" for name in names]
    return f"; {100 * found.confidence:g} % limits {', '.join(ranges)}"


_WORDS = {
    "nu_offset": "drift exponent nu at g = 1",
    "nu_slope": "its slope in ln g",
    "nu_std": "its standard deviation",
    "output_std": "output noise, units of w x",
}


def fit_rows(found: ConductanceFit, g_max_us: float | None) -> list[tuple[str, str, str]]:
    """Return for each constant its name, value and limits, for a table; spreads in microsiemens if g_max is known."""
    rows = []
    for name, value in found.law.numbers().items():
        spread = name.startswith(("programming", "relaxed"))
        scale = (g_max_us or 1.0) if spread else 1.0
        low, high = (scale * limit for limit in found.limits[name])
        unit = "µS" if g_max_us else "of g_max"
        power = name[-2] if spread else ""
        when = "latest time" if name.startswith("relaxed") else "programming"
        label = f"spread, {when}, g^{power} [{unit}]" if spread else _WORDS[name]
        rows.append((label, f"{scale * value:.4g}", f"{low:.4g} to {high:.4g}"))
    return rows


def fit_figure(found: ConductanceFit, data: Measurements) -> Figure:
    """Draw the values with the fitted law, the spread and drift, and the residuals."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    values, spreads, losses, residuals = figure.subplots(2, 2).flat
    mean, _ = expected_moments(found.law, data)
    elapsed, sizes = data.elapsed, abs(data.target)
    points = values.scatter(mean, data.value, c=data.time_s, norm="log", s=14, cmap="viridis")
    figure.colorbar(points, ax=values, label="seconds since programming")
    ends = [float(min(mean.min(), data.value.min())), float(max(mean.max(), data.value.max()))]
    values.plot(ends, ends, "k--", linewidth=0.8)
    unit = "conductance / largest" if data.factor is None else "reading, units of weight × input"
    values.set(xlabel=f"expected {unit}", ylabel=f"measured {unit}", title="Measured against expected")
    _draw_spread(spreads, found, data, mean)
    shown = data.target if data.factor is None else data.target * data.factor  # without loss
    large = abs(shown) > _LEAST_INPUT
    losses.plot(
        data.time_s[large], data.value[large] / shown[large], ".", alpha=0.6, label="measured / wanted"
    )
    times = np.geomspace(data.time_s.min(), data.time_s.max() * 1.0001, 100)
    factor = np.exp(-found.law.nu(np.array(0.5)) * np.log(times / data.time_s.min()))
    losses.plot(
        times, factor, "k--", linewidth=1, label=f"fit at g = 0.5, law of time: {found.law.shape.time}"
    )
    losses.set(
        xscale="log", xlabel="seconds since programming", ylabel="relative size", title="Loss over time"
    )
    losses.legend()
    for side, label in (
        (sizes > np.median(sizes), "larger half"),
        (sizes <= np.median(sizes), "smaller half"),
    ):
        residuals.plot(elapsed[side], found.residuals[side], ".", label=label)
    residuals.axhline(0, color="k", linewidth=0.8)
    for limit in (-2, 2):
        residuals.axhline(limit, color="k", linewidth=0.6, linestyle=":")
    title = f"Residuals; as large in {100 * found.p_value:.3g} % of such data"
    residuals.set(xlabel="ln(time / earliest time)", ylabel="standard deviations", title=title)
    residuals.legend(title="wanted size")
    return figure


def _draw_spread(axes: Any, found: ConductanceFit, data: Measurements, mean: np.ndarray) -> None:
    """Draw the fitted spread after programming and what single lines at the earliest time deviate."""
    g = np.linspace(0, 1, 101)
    factor = np.ones_like(data.target) if data.factor is None else abs(data.factor)
    first = (data.elapsed == 0) & (factor > _LEAST_INPUT)
    deviations = abs(data.value - mean)[first] / factor[first]
    axes.plot(abs(data.target)[first], deviations, ".", alpha=0.6, label="deviations of single lines")
    axes.plot(g, found.law.spread(g), "k", label="fitted standard deviation")
    if found.law.relaxed is not None:
        axes.plot(g, found.law.spread(g, 1.0), "k--", label="at the latest time")
    axes.set(
        xlabel="wanted conductance / largest",
        ylabel="spread / largest conductance",
        title="After programming",
        ylim=(0, 1.2 * max(float(np.max(deviations, initial=0)), float(found.law.spread(g).max()))),
    )
    axes.legend()


def _place(name: str, header: list[str]) -> list[int]:
    """Return where a header has a column, with its unit or without one; another unit is another column."""
    plain = name
    for unit in _UNITS:
        plain = plain.removesuffix(unit)
    return [place for place, cell in enumerate(header) if cell in (name, plain)]


def _delimiter(text: str) -> str:
    head = text.partition("\n")[0]
    return max(",;\t", key=head.count)


def _numbers(path: str, lines: list[list[str]], column: int, name: str) -> np.ndarray:
    """Return a column's numbers.

    Raises:
        ConfigError: a cell holds none in its range; the message names its line.
    """
    found = []
    for number, row in enumerate(lines[1:], start=2):
        cell = row[column].strip() if column < len(row) else ""
        try:
            value = float(cell)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            decimal = "; write a decimal point" if "," in cell else "; give one, or remove the line"
            problem = f"is no number{decimal}"
        elif name in ("input", "weight") and abs(value) > 1:
            problem = "must be in [-1, 1]; divide the column by its largest magnitude"
        elif name == "time_s" and value <= 0:
            problem = "must be above 0; count from the end of programming"
        elif name in CONDUCTANCES and value < 0:
            problem = "must be at least 0; a conductance is not negative"
        else:
            found.append(value)
            continue
        raise ConfigError(path, f"{name}, line {number}", f"{cell!r} {problem}")
    return np.array(found)
