"""The checks of the self-test, each a released number against its law under the accounted mechanism, and their report.

`Released` is what one run released, split into noise that no record touches and the sums along the records. `checked`
turns several of these into checks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import computed_field
from scipy.special import kolmogorov, ndtr

from opusim.p_values import bonferroni, chi_squared_p_value, cosine_p_value, doubt, normal_p_value
from opusim.tables import Shown, wrapped
from opusim.training.runs.storage import (
    read_json,
    read_record,
    record_from_json,
    record_json,
    write_record,
)

SCHEMA_VERSION = 1
_WIDTH = 80
_ROW = "{:<31}{:>10}{:>9}{:>11}{:>9}  {}"


@dataclass(frozen=True)
class Check:
    """One statistic of what runs released, compared with its law under the accounted mechanism.

    Attributes:
        name: The statistic, such as "noise: variance".
        observed: Its value; for several comparisons in one check, the least likely value.
        expected: Its mean under the accounted mechanism.
        standard_error: Its standard deviation under the accounted mechanism.
        p_value: Probability of a value at least as far away, in [0, 1], corrected for the number of comparisons.
        finds: The faults that raise this alarm.
        level: The check raises an alarm if its p-value is below this; NaN until the number of checks is known.
    """

    name: str
    observed: float
    expected: float
    standard_error: float
    p_value: float
    finds: str
    level: float = math.nan

    @classmethod
    def normal(
        cls, name: str, observed: float, expected: float, error: float, finds: str, *, comparisons: int = 1
    ) -> Self:
        """Return the check of a normal value, the least likely of `comparisons`; with error 0 any value is an alarm."""
        p = normal_p_value((observed - expected) / error) if error else 0.0
        return cls(name, observed, expected, error, bonferroni(p, comparisons), finds)

    @classmethod
    def variance(cls, name: str, parts: Sequence[np.ndarray], finds: str) -> Self:
        """Return the check of the least likely variance of several arrays of independent N(0, 1); empty ones agree."""
        found = []
        for part in parts:
            total = float(np.sum(np.square(part)))
            found.append((chi_squared_p_value(total, part.size) if part.size else 1.0, total, part.size))
        p, total, size = min(found, key=lambda each: doubt(each[0]))
        observed, error = (total / size, math.sqrt(2 / size)) if size else (1.0, math.inf)
        return cls(name, observed, 1.0, error, bonferroni(p, len(parts)), finds)

    @classmethod
    def correlation(cls, name: str, found: Sequence[tuple[float, int]], finds: str) -> Self:
        """Return the check of the least likely cosine; of each the value and the dimension, means known to be 0."""
        p, (r, dimension) = min(
            ((float(cosine_p_value(*each)), each) for each in found), key=lambda pair: doubt(pair[0])
        )
        return cls(name, r, 0.0, 1 / math.sqrt(dimension), bonferroni(p, len(found)), finds)

    @property
    def alarm(self) -> bool:
        """Whether the accounted mechanism cannot explain the value."""
        return not self.p_value >= self.level  # NaN is an alarm


@dataclass(frozen=True, kw_only=True, repr=False)
class MechanismAudit(Shown):
    """The self-test of one mechanism.

    Attributes:
        kind: The trainer.
        protection: The protection (protection.kind).
        mode: "experiment" or "release".
        accounted: The mechanism in the runs' ledgers, as text.
        runs: Number of runs that were compared.
        steps: Steps of each run; the number of records if each label is read once.
        records: Records of each run.
        coordinates: Released numbers of a step (or record) that hold only noise.
        seed: Seed that repeats the runs; None in release mode.
        level: Probability of any alarm under the accounted mechanism.
        cpu_s: Processor time, seconds.
        checks: All checks.
        one_look: Whether the labels are read or randomized once, so that there are no steps.
        quiet_device: Whether records were protected and the noise of the device's readings was kept small.
        model: What was trained, as `audit_mechanism` names it.
        single_records: Whether further runs had records that differ, in small batches.
    """

    kind: str
    protection: str
    mode: str
    accounted: str
    runs: int
    steps: int
    records: int
    coordinates: int
    seed: int | None
    level: float
    cpu_s: float
    checks: tuple[Check, ...]
    one_look: bool = False
    quiet_device: bool = False
    model: str = "mlp"
    single_records: bool = False

    def _shown(self) -> dict[str, object]:
        return {
            "kind": repr(self.kind),
            "protection": repr(self.protection),
            "mode": repr(self.mode),
            "accounted": repr(self.accounted),
            "steps": self.steps,
            "checks": len(self.checks),
            "alarms": [check.name for check in self.alarms],
            "seed": self.seed,
        }

    @property
    def alarms(self) -> tuple[Check, ...]:
        """The checks that raised an alarm."""
        return tuple(check for check in self.checks if check.alarm)

    @computed_field  # type: ignore[prop-decorator]  # mypy does not know decorated properties
    @property
    def holds(self) -> bool:
        """Whether no check raised an alarm."""
        return not self.alarms

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with the schema version."""
        return record_json(self, SCHEMA_VERSION)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> MechanismAudit:
        """Return the self-test that `to_json` converted; raise ValueError for anything else."""
        return record_from_json(cls, content, SCHEMA_VERSION)

    def keep(self, file: Path) -> None:
        """Write the self-test into a file."""
        write_record(file, self, SCHEMA_VERSION)


def kept_self_tests(place: Path) -> dict[Path, MechanismAudit]:
    """Read the self-tests in a folder, or that of a file, which `opusim audit --mechanism KIND --out FILE` names.

    Raises RunFolderError if one was changed, or is of another version.
    """
    found = {}
    for file in [place] if place.is_file() else sorted(place.glob("*.json")):
        try:
            content = read_json(file)
        except ValueError:
            continue
        if isinstance(content, Mapping) and {"accounted", "checks", "holds"} <= content.keys():
            found[file] = read_record(
                file, MechanismAudit, SCHEMA_VERSION, what="a self-test", remedy="run opusim audit again"
            )
    return found


def report_text(found: MechanismAudit) -> str:
    """Return the settings, a table of the checks, the result, and what the checks cannot detect."""
    header = _ROW.format("check", "observed", "expected", "std. error", "p-value", "verdict")
    rows = []
    for check in found.checks:
        observed, expected = (f"{value:.3g}" for value in (check.observed, check.expected))
        error, p = (f"{value:.2g}" for value in (check.standard_error, check.p_value))
        verdict = "ALARM" if check.alarm else "agrees"
        rows.append(_ROW.format(check.name, observed, expected, error, p, verdict))
    # a value several standard errors away may agree
    how_to_read = (
        "A check of several comparisons, such as any two steps, shows the least likely one; its p-value is corrected "
        f"for their number. A check raises an alarm if its p-value is below {found.checks[0].level:.2g}."
    )
    texts = (how_to_read, result_text(found), limits_text(found))
    shown = "\n\n".join(wrapped(text, widest=_WIDTH) for text in texts)
    settings = wrapped(settings_text(found), widest=_WIDTH)
    return "\n".join([settings, "", header, "-" * len(header), *rows, "", shown])


def settings_text(found: MechanismAudit) -> str:
    """Say what ran, how long, and as what it was accounted."""
    seeds = "nothing seeded" if found.seed is None else f"seed {found.seed}"
    trained = "" if found.model == "mlp" else f" on model = {found.model!r}"
    length = "labels read once" if found.one_look else f"{found.steps} steps (at least {MIN_STEPS})"
    return (
        f"Self-test of {found.kind}{trained} with protection.kind = {found.protection} in {found.mode} mode: "
        f"{found.runs} runs, {length}, {found.records:,} identical records, {seeds}, {found.cpu_s:.1f} CPU s. "
        f"Accounted per step: {found.accounted}. Noise is in units of its accounted standard deviation, contributions "
        "in units of the clip."
    )


def result_text(found: MechanismAudit) -> str:
    """Say whether a check raised an alarm, and which."""
    if found.holds:
        return (
            "No alarm: the released numbers agree with the accounted mechanism. If the mechanism is correct, one "
            f"self-test in {1 / found.level:,.0f} raises an alarm by chance."
        )
    worst = min(found.alarms, key=lambda check: check.p_value)
    named = "; ".join(f"{check.name} (possible cause: {check.finds})" for check in found.alarms)
    return (
        "ALARM: the runs did not release what was accounted, so their guarantee does not hold. Checks that failed: "
        f"{named}. A correct mechanism shows a value as unlikely as that of {worst.name!r} with probability at most "
        f"{worst.p_value:.1g}."
    )


def limits_text(found: MechanismAudit) -> str:
    """Say what an agreeing self-test does not prove."""
    text = "Not tested: faults that appear only with other data, settings or run lengths"
    if not found.single_records:
        text += " (the records are identical, so only the number of records in a batch is visible)"
    text += (
        "; noise whose seed an attacker could guess; attacks on the rounding of floating-point numbers; noise along a "
        "record's contribution in a single parameter, and so all noise of a parameter with one number"
    )
    if found.quiet_device:
        text += "; a device's noise in its readings, which is kept small here"
    return f"{text}. Agreement does not prove privacy."


MIN_STEPS = 40
"""Fewest steps of each run."""
LAGS = (1, 2, 3, 4)
_PARTS, _LEAST_PART = 32, 8
"""Most parts of a step whose variances are compared, and the fewest coordinates of one."""
_LEAST_PRODUCTS = 1000
"""Fewest products at a distance: the tail of their sum at 1e-9 is then normal up to a third."""
_MIN_PAIRS = 20
"""Smallest number of pairs of batch sizes in a correlation: with 20, a correlation of 0.9 is found at a p-value of 1e-5
even among several hundred."""


@dataclass(frozen=True, kw_only=True)
class BatchLaw:
    """Mean and variance of a batch's accounted size; the variance is 0 for batches of fixed size."""

    mean: float
    variance: float

    @classmethod
    def binomial(cls, n_records: int, probability: float) -> BatchLaw:
        """Return the law Binomial(n, q): each record enters with probability q, independently of the others."""
        return cls(mean=n_records * probability, variance=n_records * probability * (1 - probability))


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The noisy sums of one run along its records' directions, in units of the largest contribution.

    Attributes:
        along: Component of each step's sum along a contribution, shape (steps,): the batch's size plus noise.
        along_std: Standard deviation of that noise.
        by_layer: Components along each layer's part of a contribution, shape (steps, layers).
        shares: The stated norm of each layer's part, shape (layers,).
    """

    along: np.ndarray
    along_std: float
    by_layer: np.ndarray
    shares: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Released:
    """What one run released, split for the checks.

    Attributes:
        noise: Components that no record touches, divided by their accounted standard deviation, shape (steps,
            coordinates). They are independent N(0, 1) under the accounted mechanism.
        sums: The other components.
        batch: Law of the batch sizes.
        signal_noise: For noise whose covariance depends on the features, its whitened components along the layers'
            inputs and across the records' signals, shape (steps, others); None for other noise.
        parameters: The columns of `noise` that belong to each parameter, if several parameters have separate noise.
        prefixes: The first numbers of two parameters, without the records' contributions, as pairs of shape (steps,
            numbers). The first of a pair is N(0, I) for any value of the second.
    """

    noise: np.ndarray
    sums: Sums
    batch: BatchLaw
    signal_noise: np.ndarray | None = None
    parameters: Mapping[str, slice] = field(default_factory=dict)
    prefixes: Sequence[tuple[np.ndarray, np.ndarray]] = ()


def checked(released: Sequence[Released]) -> list[Check]:
    """Return all checks that apply to at least two runs of equal length."""
    noise = np.stack([run.noise for run in released])  # (runs, steps, coordinates)
    parameters, checks = released[0].parameters, noise_checks(noise)
    if len(parameters) > 1:
        parts = [noise[..., columns] for columns in parameters.values()]
        finds = "a weight or a bias without noise, or with weaker noise"
        checks.append(Check.variance("noise: variance in a parameter", parts, finds))
        pairs = []
        for runs in zip(*(run.prefixes for run in released), strict=True):
            one, other = (np.concatenate(side) for side in zip(*runs, strict=True))
            pairs.append((cosine(one, other), one.size))
        checks.append(Check.correlation("noise: two parameters", pairs, "one noise for two parameters"))
    signals = [run.signal_noise for run in released if run.signal_noise is not None]
    if signals:
        along = np.stack(signals)  # along the layers' inputs
        finds = "noise weaker or stronger than accounted"
        checks += [
            Check.variance("noise on signals: variance", [along], finds),
            _any_two(along, "noise on signals: any two steps"),
            *(_lag(along, lag, "noise on signals") for lag in LAGS[:1]),
        ]
    return checks + sum_checks([run.sums for run in released], released[0].batch)


def sum_checks(sums: Sequence[Sums], batch: BatchLaw) -> list[Check]:
    """Check contributions and batch sizes."""
    whole, by_layer = (np.concatenate([getattr(run, name) for run in sums]) for name in ("along", "by_layer"))
    shares, std, count = sums[0].shares, sums[0].along_std, len(whole)
    variance = batch.variance + std**2
    found = [
        Check.normal(
            "sum: mean, in records",
            float(whole.mean()),
            batch.mean,
            math.sqrt(variance / count),
            "a wider clip, a larger sampling probability, another divisor",
        )
    ]
    means = by_layer.mean(axis=0) / batch.mean
    if not batch.variance:
        # batches of fixed size: the layer whose mean is farthest from its share; all layers have the same noise
        worst = int(np.argmax(np.abs(means - shares)))
        error = std * math.sqrt(by_layer.shape[1] / count) / batch.mean
        finds = "a layer that is not clipped"
        name, layers = "contribution: norm in a layer", len(shares)
        own = (float(means[worst]), float(shares[worst]), error, finds)
        return [*found, Check.normal(name, *own, comparisons=layers)]
    # the norm of a contribution over all layers, sqrt(sum_l mean_l^2) / mean batch
    wanted = float(np.linalg.norm(shares))
    error = math.sqrt((batch.variance * (wanted / batch.mean) ** 2 + (std / batch.mean) ** 2) / count)
    finds = "each layer clipped to the whole bound"
    norm = float(np.linalg.norm(means))
    found.append(Check.normal("contribution: norm over layers", norm, wanted, error, finds))
    # the variance of the sums; the excess kurtosis of the binomial is below 0.01 here and neglected
    squares = sum(float(np.sum(np.square(run.along - run.along.mean()))) for run in sums)
    degrees = count - len(sums)
    found.append(
        Check(
            name="batch size: variance",
            observed=squares / degrees,
            expected=variance,
            standard_error=variance * math.sqrt(2 / degrees),
            p_value=chi_squared_p_value(squares / variance, degrees),
            finds="batches of fixed size, division by the realised size",
        )
    )
    # the correlation of batch sizes: of the same step in two runs, and of any two steps
    sizes = np.stack([run.along for run in sums])  # (runs, steps)
    pairs = [(sizes[i], sizes[j]) for j in range(len(sizes)) for i in range(j)]
    for lag in range(1, sizes.shape[1]):
        steps = np.arange(sizes.shape[1] - lag)
        for phase in (0, 1):  # alternate blocks of `lag` steps, so that no two pairs share a step
            first = steps[steps // lag % 2 == phase]
            if first.size * len(sizes) >= _MIN_PAIRS:
                pairs.append((sizes[:, first].ravel(), sizes[:, first + lag].ravel()))
    correlations = [(cosine(a - a.mean(), b - b.mean()), len(a) - 1) for a, b in pairs]  # Pearson's
    text = "a batch used again, or in another run"
    return [*found, Check.correlation("batch size: any two steps", correlations, text)]


# Numbers that should be independent N(0, 1)


def shared(checks: Sequence[Check], level: float) -> tuple[Check, ...]:
    """Give each check an equal share of the family level, the probability of any alarm (Bonferroni)."""
    return tuple(replace(check, level=level / len(checks)) for check in checks)


def noise_checks(noise: np.ndarray) -> list[Check]:
    """Check numbers that should be independent N(0, 1), shape (runs, steps, coordinates)."""
    size, count = noise.size, max(1, min(_PARTS, noise.shape[2] // _LEAST_PART))
    steps = list(noise.reshape(-1, noise.shape[2]))  # an empty batch may be a step without noise
    parts = np.array_split(noise, count, axis=2)  # of a step, some neighbouring coordinates
    distance, centred = (
        kolmogorov_distance(noise),
        "noise that is not centred, records in coordinates that none ",
    )
    return [
        Check.variance("noise: variance", [noise], "noise weaker or stronger than accounted"),
        Check.variance("noise: variance in a step", steps, "a step without noise, or with less"),
        Check.variance("noise: variance in a part", parts, "a part of a step without noise"),
        Check.normal("noise: mean", float(noise.mean()), 0.0, 1 / math.sqrt(size), f"{centred}should touch"),
        Check(
            name="noise: distance from normal",
            observed=distance,
            expected=0.8687 / math.sqrt(size),  # mean and standard deviation of the limit law
            standard_error=0.2603 / math.sqrt(size),
            p_value=float(kolmogorov(distance * math.sqrt(size))),  # by the limit law of large n
            finds="another law with the same variance",
        ),
        *(_lag(noise, lag) for lag in LAGS),
        _any_two(noise, "noise: any two steps"),
        _between_coordinates(noise),
    ]


def _lag(noise: np.ndarray, lag: int, name: str = "noise") -> Check:
    """Check the correlation of steps t and t + lag, for each phase t mod (lag + 1), whose pairs share no step."""
    firsts = [np.arange(phase, noise.shape[1] - lag, lag + 1) for phase in range(lag + 1)]
    pairs = [(noise[:, first], noise[:, first + lag]) for first in firsts]
    found = [(cosine(a, b), a.size) for a, b in pairs]
    return Check.correlation(f"{name}: steps {lag} apart", found, "noise used again")


def _any_two(noise: np.ndarray, name: str) -> Check:
    """Check the largest cosine between two steps, of one run or of two."""
    rows = noise.reshape(-1, noise.shape[2])
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(norms > 0, norms, 1.0)
    found = (unit @ unit.T)[np.triu_indices(len(rows), 1)]
    r = float(found[np.argmax(np.abs(found))])
    p = bonferroni(cosine_p_value(r, noise.shape[2]), len(found))
    text = "noise used again at any distance, or in another run"
    return Check(name, r, 0.0, 1 / math.sqrt(noise.shape[2]), p, text)


def _between_coordinates(noise: np.ndarray) -> Check:
    """Check the mean product of two coordinates of a step, for every distance at which enough products are known.

    Products at one distance are uncorrelated and of variance 1, so that a sum of many is normal.
    """
    rows, size = noise.shape[0] * noise.shape[1], noise.shape[2]
    spectrum = np.fft.rfft(noise, 2 * size, axis=2)
    sums = np.fft.irfft(np.sum(np.square(np.abs(spectrum)), axis=(0, 1)), 2 * size)
    distances = np.arange(1, max(size - _LEAST_PRODUCTS // rows, 2))
    errors = 1 / np.sqrt(np.maximum(rows * (size - distances), 1))
    means = sums[distances] * errors**2
    worst = int(np.argmax(np.abs(means / errors)))
    finds = "one number for several coordinates, a part that repeats another"
    found = (float(means[worst]), 0.0, float(errors[worst]), finds)
    return Check.normal("noise: coordinates of a step", *found, comparisons=len(distances))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return <a, b> / (||a|| ||b||) of two arrays of one shape; 0 if one of them is 0."""
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.vdot(a, b)) / scale if scale else 0.0


def kolmogorov_distance(values: np.ndarray) -> float:
    """Return the largest distance of the empirical distribution function from that of N(0, 1)."""
    expected = ndtr(np.sort(values, axis=None))
    n = len(expected)
    ranks = np.arange(n + 1) / n
    return float(max(np.max(ranks[1:] - expected), np.max(expected - ranks[:-1])))
