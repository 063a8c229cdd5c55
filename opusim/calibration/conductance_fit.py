"""Programming noise, drift and relaxation of memory devices, fitted to measurements by the published forms.

g = G / g_max is a relative conductance, t the time since programming, t_1 the earliest time of the measurements. For a
target g and independent standard normal z_1, z_2 of each programmed device:

- programming: g_p = max(g + s(g) z_1, 0), s a polynomial of degree 0 to 3;
- and one of three laws of time: none; drift, g_p (t / t_1)^-nu with nu = slope ln g + offset + tau z_2; or relaxation,
  where s is linear in ln t between a polynomial at t_1 and one at the latest time.

A conductance is a reading of one device, with the likelihood of a normal number that is limited to at least 0. The
reading of a product x w is x (g+ - g-) + s_0 z_3, where a pair of devices holds w; its likelihood is that of a normal
number with its mean and variance under the same laws.

Degree and law of time are chosen by Akaike's information criterion, corrected for few lines, with at most one constant
for eight lines, or three, besides the noise of outputs. Limits come from a parametric bootstrap that draws whole
devices, so that several readings of one device count as such: an estimate e with the bootstrap quantiles q_low, q_high
has the limits 2 e - q_high and 2 e - q_low, cut at 0 for a standard deviation. They hold for the chosen form. The same
bootstrap says how often data that obey the fitted law deviate from it as much as the measurements do, by residuals in
groups of conductance and time.

Sources of the forms: Nandakumar et al., ICECS 2019; Le Gallo et al., Nature Electronics 2023; Wan et al., Nature 2022.
"""

from __future__ import annotations

import csv
import datetime
import hashlib
import io
import math
import reprlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import minimize
from scipy.special import log_ndtr, ndtr

from opusim import checks
from opusim.description.schema import DeviceDescription, load_description, parse_description
from opusim.description.section import flat
from opusim.errors import ConfigError
from opusim.files import read_text
from opusim.tables import blank_figure

TimeLaw = Literal["none", "drift", "relaxation"]
LEAST_LINES = 20
LEAST_P_VALUE = 0.01
"""Measurements whose `p_value` is smaller contradict the fitted form."""
_LINES_PER_CONSTANT = 8
_LEAST_SPREAD, _LEAST_G = 1e-6, 1e-3
_GAIN_TOLERANCE = 0.25
_DEVIATIONS = ("programming[0]", "relaxed[0]", "nu_std", "output_std")
"""Constants that are standard deviations; a coefficient [0] is the one at a target of 0."""
_RIDGE = 1e-3
_LARGEST_LOG, _LARGEST_LOSS = 10.0, 50.0
"""Limits of exponents in the search, far beyond what measurements give."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Measurements:
    """Lines of a file; all arrays have shape (lines,).

    Attributes:
        target: wanted conductance over the largest one, in [0, 1]; of products the wanted weight, in [-1, 1].
        value: conductance that was found over the largest one, at least 0; of products the reading.
        time_s: seconds since programming, above 0.
        factor: input of a product, in [-1, 1], or None for conductances.
        device: number of the programmed device of each line.
    """

    target: np.ndarray
    value: np.ndarray
    time_s: np.ndarray
    factor: np.ndarray | None
    device: np.ndarray

    def __post_init__(self) -> None:
        lines = len(self.target)
        if lines < LEAST_LINES:
            raise ValueError(f"{lines} lines: a fit takes at least {LEAST_LINES}; measure more")
        checks.positive(time_s=self.time_s, remedy="count from the end of programming")
        low = 0.0 if self.factor is None else -1.0
        checks.in_range(low, 1.0, target=self.target, remedy="divide by the largest")
        checks.finite(value=self.value)
        if self.factor is None:
            checks.non_negative(value=self.value, remedy="a conductance is not negative")
        else:
            checks.in_range(-1, 1, factor=self.factor, remedy="divide by the largest")

    @property
    def elapsed(self) -> np.ndarray:
        """ln(t / t_1)."""
        return np.asarray(np.log(self.time_s / self.time_s.min()))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The form that is fitted.

    Attributes:
        degree: of the polynomial of programming.
        time: the law of time.
        slope: whether nu depends on g.
    """

    degree: int
    time: TimeLaw
    slope: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedLaw:
    """Constants of a form, relative to g_max; units of w x for `output_std`.

    Attributes:
        shape: the form.
        programming: coefficients of s(g), lowest power first.
        relaxed: those at the latest time, or None without relaxation.
        nu_slope: of nu in ln g.
        nu_offset: nu at g = 1.
        nu_std: tau.
        output_std: s_0, 0 for conductances.
        parameters: the search's parameters, see `_law`.
    """

    shape: Shape
    programming: tuple[float, ...]
    relaxed: tuple[float, ...] | None = None
    nu_slope: float = 0.0
    nu_offset: float = 0.0
    nu_std: float = 0.0
    output_std: float = 0.0
    parameters: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def numbers(self) -> dict[str, float]:
        """Return every fitted constant by its name."""
        found = {f"programming[{k}]": c for k, c in enumerate(self.programming)}
        found |= {f"relaxed[{k}]": c for k, c in enumerate(self.relaxed or ())}
        if self.shape.time == "drift":
            found |= {"nu_offset": self.nu_offset, "nu_std": self.nu_std}
            found |= {"nu_slope": self.nu_slope} if self.shape.slope else {}
        return found | ({"output_std": self.output_std} if self.output_std else {})

    def spread(self, g: np.ndarray, late: np.ndarray | float = 0.0) -> np.ndarray:
        """Return s(g), `late` = ln(t / t_1) over its largest value; at least 1e-6."""
        early = np.polynomial.polynomial.polyval(g, self.programming)
        if self.relaxed is not None:
            early = early + late * (np.polynomial.polynomial.polyval(g, self.relaxed) - early)
        return np.maximum(early, _LEAST_SPREAD)

    def nu(self, g: np.ndarray) -> np.ndarray:
        """Return the mean of nu at targets."""
        return self.nu_offset + self.nu_slope * np.log(np.maximum(g, _LEAST_G))


@dataclass(frozen=True, kw_only=True, eq=False)
class ConductanceFit:
    """What `fit` found.

    Attributes:
        law: the constants.
        limits: for each of `law.numbers()` a lower and an upper limit.
        confidence: of each limit pair.
        p_value: how often data of the fitted law deviate as much; small values speak against the form.
        residuals: of each line, in standard deviations.
        lines: number of lines.
    """

    law: FittedLaw
    limits: dict[str, tuple[float, float]]
    confidence: float
    p_value: float
    residuals: np.ndarray
    lines: int


def fit(
    data: Measurements,
    *,
    shape: Shape | None = None,
    confidence: float = 0.95,
    replicates: int = 200,
    seed: int = 0,
) -> ConductanceFit:
    """Fit the published forms (`shape`, or None to choose it) by maximum likelihood, with limits of a bootstrap."""
    checks.in_unit_interval(confidence=confidence)
    checks.integer(minimum=20, replicates=replicates)
    # 1. Refuse values in other units than their targets, judged at the earliest times, since drift lowers later ones.
    expected = data.target * (1.0 if data.factor is None else data.factor)
    early = data.time_s <= np.quantile(data.time_s, 0.25)
    size = float((expected[early] ** 2).sum())
    if not size:
        raise ConfigError("readings", "targets", "are all 0 at the earliest times; measure larger ones")
    gain = float((expected[early] * data.value[early]).sum()) / size
    if abs(gain - 1) > _GAIN_TOLERANCE:
        wanted = "the targets" if data.factor is None else "input * weight"
        raise ConfigError(
            "readings",
            "values",
            f"are {gain:.3g} times {wanted} at the earliest times; bring them to the same unit (divide them by a gain)",
        )
    # 2. The forms with at most one constant for eight lines, or three; products add the noise of outputs.
    lines, laws = len(data.target), list[tuple[TimeLaw, bool]]([("none", False)])
    if data.elapsed.max() > 0:
        laws += [("drift", False), ("drift", True), ("relaxation", False)]
    degrees = range(min(4, len(np.unique(abs(data.target)))))
    most = max(3, lines // _LINES_PER_CONSTANT) + (data.factor is not None)
    possible = [Shape(degree=k, time=time, slope=slope) for k in degrees for time, slope in laws]
    shapes = (
        [each for each in possible if len(_first_guess(data, each)) <= most] if shape is None else [shape]
    )

    def criterion(found: FittedLaw) -> float:  # Akaike's, with its correction for few lines
        constants = len(found.numbers())
        return 2 * _loss(found, data) + 2 * constants * lines / max(1, lines - constants - 1)

    # 3. The best one, and a parametric bootstrap of whole devices.
    law = min((_fitted(data, each) for each in shapes), key=criterion)
    generator = np.random.default_rng(seed)
    estimates = law.numbers()
    drawn, deviations = [], []
    for _ in range(replicates):
        again = replace(data, value=_drawn(law, data, generator))
        refitted = _fitted(again, law.shape, start=law.parameters)
        drawn.append([refitted.numbers()[name] for name in estimates])
        deviations.append(_deviation(_residuals(refitted, again), data))
    tails = np.quantile(drawn, [0.5 - confidence / 2, 0.5 + confidence / 2], axis=0)
    limits = {
        name: (max(2 * value - high, 0.0 if name in _DEVIATIONS else -math.inf), 2 * value - low)
        for (name, value), low, high in zip(estimates.items(), *tails.tolist(), strict=True)
    }
    residuals = _residuals(law, data)
    found = _deviation(residuals, data)
    p_value = (1 + sum(each >= found for each in deviations)) / (1 + replicates)
    return ConductanceFit(
        law=law, limits=limits, confidence=confidence, p_value=p_value, residuals=residuals, lines=lines
    )


def _fitted(data: Measurements, shape: Shape, start: np.ndarray | None = None) -> FittedLaw:
    """Return the law of a form with the largest likelihood, searched from the parameters of another law or a guess."""
    first = _first_guess(data, shape) if start is None else start

    def loss(parameters: np.ndarray) -> float:
        law = _law(parameters, shape, data)
        return _loss(law, data) + _RIDGE * float(((parameters - first) ** 2).sum())

    return _law(minimize(loss, first, method="L-BFGS-B", options={"maxiter": 200}).x, shape, data)


def _first_guess(data: Measurements, shape: Shape) -> np.ndarray:
    """Return parameters to start from: the deviation of the earliest lines at all conductances, and little drift."""
    inputs = np.ones_like(data.target) if data.factor is None else data.factor
    deviation = float(np.sqrt(np.mean((data.value - inputs * data.target)[data.elapsed == 0] ** 2)))
    spreads = (shape.degree + 1) * (2 if shape.time == "relaxation" else 1)
    drift = [0.2, math.log(0.02), 0.0][: 2 + shape.slope] if shape.time == "drift" else []
    output = [] if data.factor is None else [math.log(max(0.5 * deviation, 1e-4))]
    return np.array([math.log(max(deviation, 1e-4))] * spreads + drift + output)


def _law(parameters: np.ndarray, shape: Shape, data: Measurements) -> FittedLaw:
    """Return the law of parameters: logarithms of positive constants, spreads at equidistant conductances, 10 nu."""
    knots, rest = np.linspace(0.0, 1.0, shape.degree + 1), list(parameters)
    powers = np.vander(knots, increasing=True)

    def polynomial() -> tuple[float, ...]:
        values = np.exp(np.clip([rest.pop(0) for _ in knots], -_LARGEST_LOG, _LARGEST_LOG))
        return tuple(map(float, np.linalg.solve(powers, values)))

    programming = polynomial()
    relaxed = polynomial() if shape.time == "relaxation" else None
    drifts = shape.time == "drift"
    offset = rest.pop(0) / 10 if drifts else 0.0
    std = math.exp(min(rest.pop(0), _LARGEST_LOG)) if drifts else 0.0
    slope = rest.pop(0) / 10 if drifts and shape.slope else 0.0
    return FittedLaw(
        shape=shape,
        programming=programming,
        relaxed=relaxed,
        nu_slope=float(slope),
        nu_offset=float(offset),
        nu_std=std,
        output_std=0.0 if data.factor is None else math.exp(min(rest.pop(0), _LARGEST_LOG)),
        parameters=parameters,
    )


def expected_moments(law: FittedLaw, data: Measurements) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of every line; of conductances before they are limited to at least 0."""
    elapsed = data.elapsed
    late = elapsed / max(float(elapsed.max()), 1e-30)
    if data.factor is None:
        mean, variance = data.target, law.spread(data.target, late) ** 2
    else:
        mean = variance = np.zeros(len(data.target))
        for sign in (1, -1):  # mean and variance of max(g + spread z, 0) on each side
            g = np.maximum(sign * data.target, 0.0)
            spread = law.spread(g, late)
            density, share = np.exp(-((g / spread) ** 2) / 2) / math.sqrt(2 * math.pi), ndtr(g / spread)
            own = g * share + spread * density
            squares = (g**2 + spread**2) * share + g * spread * density
            mean, variance = mean + sign * own, variance + np.maximum(squares - own**2, 0.0)
    if law.shape.time == "drift":
        loss = np.exp(-np.clip(law.nu(abs(data.target)) * elapsed, -_LARGEST_LOSS, _LARGEST_LOSS))
        mean, variance = mean * loss, loss**2 * (variance + (mean * law.nu_std * elapsed) ** 2)
    if data.factor is not None:
        mean, variance = data.factor * mean, data.factor**2 * variance + law.output_std**2
    return mean, np.sqrt(variance)


def _loss(law: FittedLaw, data: Measurements) -> float:
    """Return minus the logarithm of the likelihood, plus a penalty where a polynomial is below 0."""
    mean, std = expected_moments(law, data)
    z = (data.value - mean) / std
    terms = z**2 / 2 + np.log(std) + 0.5 * math.log(2 * math.pi)
    if data.factor is None:
        terms = np.where(data.value > 0, terms, -log_ndtr(-mean / std))
    grid = np.linspace(0.0, 1.0, 21)
    below = sum(
        float(np.minimum(np.polynomial.polynomial.polyval(grid, each), 0.0).sum())
        for each in (law.programming, law.relaxed)
        if each is not None
    )
    return float(terms.sum()) - 1e4 * below


def _residuals(law: FittedLaw, data: Measurements) -> np.ndarray:
    mean, std = expected_moments(law, data)
    return np.asarray((data.value - mean) / std)


def _deviation(residuals: np.ndarray, data: Measurements) -> float:
    """Return the largest mean or mean square of residuals in groups of conductance and time, in standard errors."""
    size, elapsed = abs(data.target), data.elapsed
    high = size > np.median(size)
    times = np.digitize(elapsed, np.unique(np.quantile(elapsed, [1 / 3, 2 / 3])), right=True)
    groups = [np.ones(len(size), bool), high, ~high, *(times == k for k in np.unique(times))]
    groups += [side & (times == k) for side in (high, ~high) for k in np.unique(times)]
    found = 0.0
    for group in groups:
        count = int(group.sum())
        if count >= 3:
            part = residuals[group]
            found = max(found, abs(part.sum()) / count**0.5, abs((part**2 - 1).sum()) / (2 * count) ** 0.5)
    return float(found)


def _drawn(law: FittedLaw, data: Measurements, generator: np.random.Generator) -> np.ndarray:
    """Return values that obey the law; lines of one device share its draws."""
    devices = int(data.device.max()) + 1
    elapsed = data.elapsed
    late = elapsed / max(float(elapsed.max()), 1e-30)

    def side(g: np.ndarray) -> np.ndarray:
        first, second = (generator.standard_normal(devices)[data.device] for _ in range(2))
        held = np.maximum(g + law.spread(g, late) * first, 0.0)
        if law.shape.time == "drift":
            held = held * np.exp(-(law.nu(g) + law.nu_std * second) * elapsed)
        return held

    if data.factor is None:
        return side(data.target)
    weights = side(np.maximum(data.target, 0.0)) - side(np.maximum(-data.target, 0.0))
    return np.asarray(data.factor * weights + law.output_std * generator.standard_normal(len(weights)))


CONDUCTANCES = ("conductance_us", "programmed_us", "time_s")
PRODUCTS = ("input", "weight", "time_s", "reading")
_UNITS = ("_us", "_s")
_DEVICE = "device"
_LEAST_INPUT = 0.3
"""Smaller inputs show the outputs' noise more than the weights' noise."""
_FITTED_SECTIONS = ("programming_us", "relaxation", "drift", "low_frequency")


def read_measurements(path: str | Path, g_max_us: float | None = None) -> tuple[Measurements, float | None]:
    """Read a table with a header: conductance_us, programmed_us, time_s or input, weight, time_s, reading.

    Units may be left out of the names. A column `device` names the programmed device of each line; without it every
    line is another device. Other columns are ignored. Conductances determine g_max, the conductance of a weight of 1,
    by the largest target unless it is given; it is the second value. ConfigError names a line that is at fault.
    """
    name = str(path)
    try:
        text = read_text(path)
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        rows = list(csv.reader(io.StringIO(text), delimiter=delimiter))
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
        names = ("weight", "reading") if wanted == PRODUCTS else CONDUCTANCES[:2]
        target, value = (columns[key] for key in names)
        if wanted == CONDUCTANCES:
            g_max_us = float(target.max()) if g_max_us is None else g_max_us
            if g_max_us <= 0:
                raise ValueError("conductance_us: no target is above 0; measure larger ones")
            if target.max() > g_max_us:
                raise ValueError(
                    f"conductance_us: {target.max():g} exceeds g_max_us = {g_max_us:g}; raise g_max_us"
                )
            target, value = target / g_max_us, value / g_max_us
        return Measurements(
            target=target, value=value, time_s=columns["time_s"], factor=columns.get("input"), device=device
        ), g_max_us
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
    earlier = content.pop("provenance")
    present = flat(content)
    content["provenance"] = {key: value for key, value in earlier.items() if key in present} | sources
    return parse_description(name, content)


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
    """Return the limits of a key of the description, as text for its source."""
    prefixes = {
        "programming_us": ("programming",),
        "relaxation.polynomials_us": ("programming", "relaxed"),
        "drift.mean.slope": ("nu_slope",),
        "drift.mean.offset": ("nu_offset",),
        "drift.std.offset": ("nu_std",),
        "product.output_std": ("output_std",),
    }
    if key not in prefixes:
        return ""
    names = [name for name in found.limits if name.startswith(prefixes[key])]
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
    figure = blank_figure(11, 7.5)
    values, spreads, losses, residuals = figure.subplots(2, 2).flat
    mean, _ = expected_moments(found.law, data)
    elapsed, sizes = data.elapsed, abs(data.target)
    points = values.scatter(mean, data.value, c=data.time_s, norm="log", s=14, cmap="viridis")
    figure.colorbar(points, ax=values, label="seconds since programming")
    ends = [float(min(mean.min(), data.value.min())), float(max(mean.max(), data.value.max()))]
    values.plot(ends, ends, "k--", linewidth=0.8)
    unit = "conductance / largest" if data.factor is None else "reading, units of weight × input"
    values.set(xlabel=f"expected {unit}", ylabel=f"measured {unit}", title="Measured against expected")
    # the fitted spread after programming, and the deviations of single lines at the earliest time
    g, inputs = np.linspace(0, 1, 101), np.ones_like(data.target) if data.factor is None else abs(data.factor)
    first = (elapsed == 0) & (inputs > _LEAST_INPUT)
    deviations = abs(data.value - mean)[first] / inputs[first]
    spreads.plot(sizes[first], deviations, ".", alpha=0.6, label="deviations of single lines")
    spreads.plot(g, found.law.spread(g), "k", label="fitted standard deviation")
    if found.law.relaxed is not None:
        spreads.plot(g, found.law.spread(g, 1.0), "k--", label="at the latest time")
    top = 1.2 * max(float(np.max(deviations, initial=0)), float(found.law.spread(g).max()))
    spreads.set(xlabel="wanted conductance / largest", ylabel="spread / largest conductance", ylim=(0, top))
    spreads.set_title("After programming")
    spreads.legend()
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


def _place(name: str, header: list[str]) -> list[int]:
    """Return where a header has a column, with its unit or without one; another unit is another column."""
    plain = name
    for unit in _UNITS:
        plain = plain.removesuffix(unit)
    return [place for place, cell in enumerate(header) if cell in (name, plain)]


def _numbers(path: str, lines: list[list[str]], column: int, name: str) -> np.ndarray:
    """Return a column's numbers; ConfigError names the line of a cell that is no number in its range."""
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
