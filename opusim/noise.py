"""What a device's noise is: frozen laws, never a bare variance.

A variance proves nothing about privacy: a scale mixture of the same variance can leak everything. A consumer therefore
asks for the law and refuses by name a law that it has no theorem for. The meaning of a law never changes; a new fact
gets a new class.

Another package adds a law by subclassing `NoiseModel` with a frozen dataclass that names it in `law`, and makes it
readable from JSON through the entry-point group ``opusim.noise_laws`` (the law's name = its class). Needs numpy only,
because privacy accounting reads it without the device layer.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any, ClassVar, final

import numpy as np

from opusim import checks, plugins
from opusim.tables import Shown

ENTRY_POINT_GROUP = "opusim.noise_laws"
JsonObject = dict[str, Any]


class NoiseModel(Shown, ABC):
    """Base of the noise laws.

    A law is a frozen dataclass, made with ``eq=False``, and a direct subclass of this one: a subclass of another law
    would pass for that law in a theorem that does not hold for it. Two models are equal if they are the same law with
    the same numbers. `to_json` gives plain JSON values and `NoiseModel.from_json` takes them back without loss.

    Attributes:
        law: the name of the law, fixed, used in run folders and certificates.
        beta: probability that the numbers of the law are wrong, if they come from a calibration.
    """

    law: ClassVar[str]
    beta: float = 0.0
    _laws: ClassVar[dict[str, type[NoiseModel]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__bases__ != (NoiseModel,):
            raise TypeError(f"{cls.__name__}: a law is a subclass of NoiseModel itself, and of nothing else")
        name = cls.__dict__.get("law")
        if not isinstance(name, str) or not name:
            raise TypeError(f"{cls.__name__}: names no law; give it a class attribute law")
        known = NoiseModel._laws.setdefault(name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{cls.__name__}: law = {name!r} is taken by {known.__module__}.{known.__name__}")

    @abstractmethod
    def variance_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lowest and highest variance that the law allows, elementwise, squared units of the reading."""

    @abstractmethod
    def describe(self) -> str:
        """Return the law in one line of text."""

    def _shown(self) -> dict[str, object]:
        return {"law": self.describe(), "beta": self.beta or None}

    def to_json(self) -> JsonObject:
        """Return the law and its numbers as JSON values (arrays become nested lists)."""
        content: JsonObject = {"law": self.law}
        for field in fields(self):  # type: ignore[arg-type]  # every law is a dataclass
            value = getattr(self, field.name)
            content[field.name] = value.tolist() if isinstance(value, np.ndarray) else value
        return content

    def summary(self) -> JsonObject:
        """Return the law in four short values, for records that cannot hold all its numbers.

        Returns:
            Its name, its description, beta, and the digest (BLAKE2b of 16 bytes of what `to_json` gives), by which
            two models are compared.
        """
        content = json.dumps(self.to_json(), sort_keys=True)
        digest = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        return {"law": self.law, "description": self.describe(), "beta": self.beta, "digest": digest}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> NoiseModel:
        """Return the model that `to_json` wrote.

        Raises:
            ValueError: the law is unknown, its package cannot be used, or its numbers are out of range.
            TypeError: a number is missing or unknown.
        """
        arguments = dict(content)
        law = arguments.pop("law", None)
        if law in plugins.names(ENTRY_POINT_GROUP):
            plugins.load(  # its class registers itself
                ENTRY_POINT_GROUP,
                str(law),
                accept=lambda found: None if getattr(found, "law", None) == law else "is no law of that name",
            )
        remedy = "install the package that brings this law, or a newer version of opusim"
        checks.choice(tuple(NoiseModel._laws), law=law, remedy=remedy)
        return NoiseModel._laws[law](**arguments)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(
            np.array_equal(getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)  # type: ignore[arg-type]
        )

    def __hash__(self) -> int:
        values = (np.asarray(getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        return hash((self.law, *((value.shape, value.tobytes()) for value in values)))


@final
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GaussianNoise(NoiseModel):
    """Independent Gaussian noise per output, the same for every input: N(0, diag(std^2)).

    Attributes:
        std: standard deviation in units of the reading, at least 0; one number for all outputs, or shape
            (n_outputs,). Kept as a read-only float64 array of no or one axis.
        n_outputs: number of outputs, at least 1.
        beta: probability that the numbers are wrong, if they come from a calibration, in [0, 1); a guarantee adds it
            to its delta.
    """

    law: ClassVar[str] = "gaussian"
    std: np.ndarray | float
    n_outputs: int
    beta: float = 0.0

    def __post_init__(self) -> None:
        _check_beta(self.beta)
        checks.integer(n_outputs=self.n_outputs, minimum=1)
        checks.non_negative(std=self.std)
        std = _frozen(self.std)
        if std.ndim > 0:
            checks.shape((self.n_outputs,), std=std, remedy="give one number, or one for each output")
        object.__setattr__(self, "std", std)
        object.__setattr__(self, "n_outputs", int(self.n_outputs))

    @property
    def min_std(self) -> float:
        """The smallest standard deviation over the outputs: what a guarantee may rest on."""
        return float(np.min(self.std))

    @property
    def is_uniform(self) -> bool:
        """Whether every output has the same standard deviation."""
        std = np.asarray(self.std)
        return std.ndim == 0 or bool(np.all(std == std[0]))

    def scaled(self, gain: float) -> GaussianNoise:
        """Return the law of gain times the noise, for a public constant gain other than 0.

        Raises:
            ValueError: gain is 0, infinite or NaN.
        """
        checks.positive(abs_gain=abs(gain), remedy="a gain is a finite constant other than 0")
        return GaussianNoise(std=np.asarray(self.std) * abs(gain), n_outputs=self.n_outputs, beta=self.beta)

    def variance(self) -> np.ndarray:
        """std^2, shape () or (n_outputs,)."""
        return np.square(self.std)

    def variance_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the variance twice: the law leaves nothing open."""
        return self.variance(), self.variance()

    def describe(self) -> str:
        """Return the law in one line of text."""
        if self.is_uniform:
            return f"Gaussian, standard deviation {self.min_std:g} at each of {self.n_outputs} outputs"
        low, high = self.min_std, float(np.max(self.std))
        return f"Gaussian, standard deviation {low:g} to {high:g} over {self.n_outputs} outputs"


@final
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MeasuredNoise(NoiseModel):
    """Noise known by its measured variances only: enough for training, but no guarantee may credit it.

    Attributes:
        levels: number of nonzero entries of each measured input, rising from 0.
        variances: variance of each output's readings at each level, squared units of the reading, at least 0, shape
            (levels, n_outputs).
        readings: readings that were taken of each input, at least 2.
    """

    law: ClassVar[str] = "measured"
    levels: np.ndarray
    variances: np.ndarray
    readings: int

    def __post_init__(self) -> None:
        checks.integer(readings=self.readings, minimum=2)
        checks.non_negative(levels=self.levels, variances=self.variances)
        levels, variances = _frozen(self.levels), _frozen(self.variances)
        if levels.ndim != 1 or variances.ndim != 2 or len(levels) != len(variances) or not len(levels):
            raise ValueError(
                f"variances has shape {variances.shape} for levels of shape {levels.shape}: must be (levels, "
                "n_outputs); give one row for each level"
            )
        if levels[0] != 0 or bool(np.any(np.diff(levels) <= 0)):
            raise ValueError(
                f"levels = {levels.tolist()}: must rise from 0; sort them, and add blank readings"
            )
        object.__setattr__(self, "levels", levels)
        object.__setattr__(self, "variances", variances)

    def variance_at(self, level: float) -> np.ndarray:
        """Return each output's variance for an input with `level` nonzero entries, interpolated linearly."""
        above = int(np.clip(np.searchsorted(self.levels, level), 1, max(len(self.levels) - 1, 1)))
        if len(self.levels) == 1:
            return np.array(self.variances[0])
        low, high = self.levels[above - 1], self.levels[above]
        share = float(np.clip((level - low) / (high - low), 0.0, 1.0))
        return np.asarray((1 - share) * self.variances[above - 1] + share * self.variances[above])

    def variance_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return 0, since nothing is credited, and the largest variance that was measured."""
        return np.zeros(self.variances.shape[1]), self.variances.max(axis=0)

    def describe(self) -> str:
        """Return the law in one line of text."""
        low, high = (float(np.sqrt(row.mean())) for row in (self.variances[0], self.variances[-1]))
        return (
            f"measured from {self.readings} readings, credits nothing: standard deviation {low:.3g} (blank) to "
            f"{high:.3g} (dense), mean over {self.variances.shape[1]} outputs"
        )


@final
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PhotonCountNoise(NoiseModel):
    """Photon counts: independent Poisson counts per pixel and frame, whose rates lie in known boxes.

    A count has law Poisson(rate) with rate_low <= rate <= rate_high; its place in the box may depend on
    the data. The boxes are therefore what a guarantee rests on, the variance (equal to the rate) is not.

    Attributes:
        rate_low: lowest expected count per pixel and frame, in electrons, at least 0; any shape. A rate_low
            of 0 gives no finite guarantee.
        rate_high: highest expected count, of the same shape, at least rate_low.
        weight: units of the reading per electron, of the rates' shape, frames first, if a reading is a sum over frames
            of weight times count; None if the reading is the counts themselves.
        added_variance: least variance that read noise and rounding add to the reading, squared units of the reading, at
            least 0, one number or the shape of a reading; earns no privacy.
        added_variance_high: largest such variance if rounding makes it depend on the counts, else None.
        beta: as for `GaussianNoise`.
    """

    law: ClassVar[str] = "photon_count"
    rate_low: np.ndarray | float
    rate_high: np.ndarray | float
    weight: np.ndarray | None = None
    added_variance: np.ndarray | float = 0.0
    beta: float = 0.0
    added_variance_high: np.ndarray | float | None = None

    def __post_init__(self) -> None:
        _check_beta(self.beta)
        checks.non_negative(rate_low=self.rate_low, rate_high=self.rate_high)
        low, high = _frozen(self.rate_low), _frozen(self.rate_high)
        checks.shape(low.shape, rate_high=high, remedy="rate_low and rate_high need one shape")
        if bool(np.any(high < low)):
            raise ValueError("rate_high: must be at least rate_low everywhere; exchange the two?")
        object.__setattr__(self, "rate_low", low)
        object.__setattr__(self, "rate_high", high)
        checks.non_negative(added_variance=self.added_variance)
        object.__setattr__(self, "added_variance", _frozen(self.added_variance))
        if self.added_variance_high is not None:
            high_added = _frozen(self.added_variance_high)
            if not np.all(high_added >= self.added_variance):  # NaN included
                raise ValueError("added_variance_high: must be at least added_variance everywhere")
            object.__setattr__(self, "added_variance_high", high_added)
        if self.weight is not None:
            checks.finite(weight=self.weight)
            weight = _frozen(self.weight)
            checks.shape(low.shape, weight=weight, remedy="one weight for each rate, frames first")
            object.__setattr__(self, "weight", weight)

    @property
    def n_outputs(self) -> int:
        """Number of outputs of a reading: the length of the rates' last axis, 1 without axes."""
        shape = np.shape(self.rate_low)
        return int(shape[-1]) if shape else 1

    def variance_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the bounds for a reading: sum over frames of weight^2 rate, plus the added variance.

        Without weights: the rates plus the added variance, since a Poisson count's variance is its mean.
        """
        most = self.added_variance if self.added_variance_high is None else self.added_variance_high
        low, high = self._counts(np.asarray(self.rate_low)), self._counts(np.asarray(self.rate_high))
        return np.asarray(low + self.added_variance), np.asarray(high + most)

    def _counts(self, rates: np.ndarray) -> np.ndarray:
        return rates if self.weight is None else np.sum(np.square(self.weight) * rates, axis=0)

    def describe(self) -> str:
        """Return the law in one line of text."""
        low, high = float(np.min(self.rate_low)), float(np.max(self.rate_high))
        return f"Poisson counts, rates between {low:g} and {high:g} electrons per pixel and frame"


POWER_LAWS = {"log_normal": 1.0, "gaussian": 0.2}
"""Laws of a light's power, and the largest relative standard deviation that each may have."""
_UP = 1 + 1e-9  # above the rounding of the normal quantile


@dataclass(frozen=True, kw_only=True)
class LightPower:
    """The power W >= 0 of a light in a frame, relative to its mean.

    | law | W of a standard normal g | why |
    | --- | --- | --- |
    | log_normal | exp(s g - s^2 / 2), s^2 = log(1 + rms^2) | mean 1, always above 0 |
    | gaussian | max(0, 1 + rms g) | mean 1 up to 1e-8 for rms <= 0.2; relative intensity noise of a laser |

    Attributes:
        law: a key of `POWER_LAWS`.
        rms: relative standard deviation, at least 0, at most the law's largest.
    """

    law: str
    rms: float

    def __post_init__(self) -> None:
        checks.choice(tuple(POWER_LAWS), power_law=self.law)
        checks.in_range(0.0, POWER_LAWS[self.law], power_rms=self.rms)

    @property
    def log_std(self) -> float:
        """s: standard deviation of log W under the log-normal law."""
        return math.sqrt(math.log1p(self.rms**2))

    def of_normal(self, g: np.ndarray | float) -> np.ndarray:
        """Return W for standard normal numbers, of their shape; rises with g."""
        if self.law == "gaussian":
            return np.maximum(0.0, 1.0 + self.rms * np.asarray(g, dtype=np.float64))
        s = self.log_std
        return np.asarray(np.exp(s * np.asarray(g, dtype=np.float64) - 0.5 * s * s))

    def limit(self, beta: float) -> float:
        """Return a w_max >= 1 with P(W > w_max) <= beta, in [0, 1); infinite at beta = 0 if W fluctuates.

        It also holds for every smaller rms: exp(s g - s^2 / 2) is largest at s = g, not at the largest s.
        """
        _check_beta(beta)
        if self.rms == 0:
            return 1.0
        if beta == 0:
            return math.inf
        g = -NormalDist().inv_cdf(beta) * _UP
        if self.law == "log_normal" and 0 < g < self.log_std:
            return math.exp(0.5 * g * g) * _UP
        return max(1.0, float(self.of_normal(g)) * _UP)


@final
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FluctuatingCountNoise(NoiseModel):
    """Photon counts under light whose power W fluctuates, common to all pixels of a frame.

    Given W = w in a frame, its counts are independent Poisson(w light + d), where light <= rate_high - rate_low and the
    dark rate d >= rate_low depends neither on the data nor on W. W has the named law in every frame, whatever
    patterns were shown before; the powers of different frames may depend on each other in any way.

    `at_most` gives the boxes of steady counts that a guarantee rests on. W's own noise earns no privacy.

    Attributes:
        rate_low: least dark rate of each pixel and frame, electrons, at least 0, shape (frames, pixels); a number is
            one pixel in one frame.
        rate_high: rate_low plus the brightest light at power 1, of the same shape.
        power_law: the law of W, a key of `POWER_LAWS`.
        power_rms: relative standard deviation of W; an upper limit if it was measured.
        weight: as for `PhotonCountNoise`.
        added_variance: as for `PhotonCountNoise`.
        beta: as for `GaussianNoise`.
        added_variance_high: as for `PhotonCountNoise`.
    """

    law: ClassVar[str] = "fluctuating_photon_count"
    rate_low: np.ndarray | float
    rate_high: np.ndarray | float
    power_law: str
    power_rms: float
    weight: np.ndarray | None = None
    added_variance: np.ndarray | float = 0.0
    beta: float = 0.0
    added_variance_high: np.ndarray | float | None = None

    def __post_init__(self) -> None:
        steady = self._steady(1.0, self.beta)
        shape = np.shape(steady.rate_low)
        if len(shape) not in (0, 2):
            raise ValueError(
                f"rate_low: shape {shape} does not tell frames from pixels; give (frames, pixels), or one number"
            )
        for name in ("rate_low", "rate_high", "weight", "added_variance", "added_variance_high"):
            object.__setattr__(self, name, getattr(steady, name))
        object.__setattr__(self, "power_rms", self.power.rms)

    @property
    def power(self) -> LightPower:
        """The law of W."""
        return LightPower(law=self.power_law, rms=float(self.power_rms))

    @property
    def n_outputs(self) -> int:
        """As for `PhotonCountNoise`."""
        return self._steady(1.0, 0.0).n_outputs

    @property
    def frames(self) -> int:
        """Frames of one reading: the length of the rates' first axis, 1 without axes."""
        shape = np.shape(self.rate_low)
        return int(shape[0]) if shape else 1

    def at_most(self, frames: int, beta: float) -> PhotonCountNoise:
        """Return steady counts that bound these except with probability beta.

        Its boxes hold the light of power w_max, where frames * P(W > w_max) <= beta (`LightPower.limit`), a union bound
        that holds for every joint law of the frames. See the theorem fluctuating-light.

        Args:
            frames: frames whose pattern depends on one record, over all readings, at least 1.
            beta: in (0, 1), or 0 if W does not fluctuate.

        Returns:
            Boxes [rate_low, rate_low + w_max (rate_high - rate_low)], with this law's beta plus the given one.

        Raises:
            ValueError: a number is out of range, or beta is 0 for light that fluctuates.
        """
        checks.integer(minimum=1, frames=frames)
        brightest = self.power.limit(beta / frames)
        if math.isinf(brightest):
            raise ValueError(
                f"beta = {beta}: light of the law {self.power_law!r} exceeds every power with some probability; give a "
                "beta above 0"
            )
        return self._steady(brightest, self.beta + beta)

    def _steady(self, brightest: float, beta: float) -> PhotonCountNoise:
        """The counts at one power, dark rates as they are."""
        low, high = np.asarray(self.rate_low, dtype=np.float64), np.asarray(self.rate_high, dtype=np.float64)
        return PhotonCountNoise(
            rate_low=low,
            rate_high=high if brightest == 1 else low + brightest * (high - low),
            weight=self.weight,
            added_variance=self.added_variance,
            added_variance_high=self.added_variance_high,
            beta=beta,
        )

    def variance_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the steady counts' bounds; the upper one adds rms^2 times the square of all weighted light.

        The powers of a reading's frames may agree, so that their contributions add before they are squared.
        """
        low, high = self._steady(1.0, 0.0).variance_bounds()
        light = np.asarray(self.rate_high) - np.asarray(self.rate_low)
        total = light if self.weight is None else np.sum(np.abs(self.weight) * light, axis=0)
        return low, np.asarray(high + np.square(self.power_rms * total))

    def describe(self) -> str:
        """Return the law in one line of text."""
        steady = self._steady(1.0, 0.0).describe()
        name = self.power_law.replace("_", "-")
        return f"{steady} at mean power; power of a frame {name}, {self.power_rms:.3%} rms"


@final
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SignalGaussianNoise(NoiseModel):
    """Independent Gaussian noise per output whose standard deviation depends on the input and on the weights.

    A reading of x is m(x) + N(0, s(x)^2) at each output, with std_low <= s(x) <= std_high for every allowed x. Because
    s depends on x, the noise itself reveals something about x: theorems on Gaussian noise of fixed variance do not
    hold.

    Attributes:
        std_low: smallest standard deviation at any output for any input, units of the reading, at least 0.
        std_high: largest one, at least std_low.
        n_outputs: number of outputs, at least 1.
        beta: as for `GaussianNoise`.
    """

    law: ClassVar[str] = "signal_gaussian"
    std_low: float
    std_high: float
    n_outputs: int
    beta: float = 0.0

    def __post_init__(self) -> None:
        _check_beta(self.beta)
        checks.integer(n_outputs=self.n_outputs, minimum=1)
        _check_ordered(self.std_low, self.std_high)

    def variance_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """std_low^2 and std_high^2, shape ()."""
        return np.asarray(self.std_low**2), np.asarray(self.std_high**2)

    def describe(self) -> str:
        """Return the law in one line of text."""
        return (
            f"Gaussian, standard deviation {self.std_low:g} to {self.std_high:g} by input and weights, at each of "
            f"{self.n_outputs} outputs"
        )


@final
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ConverterLatticeNoise(NoiseModel):
    """Signal-dependent Gaussian noise, read through converters whose codes are the multiples of a step.

    A reading is the sum over `conversions` of step * round((m + z) / step), limited to the converter's range, with
    independent z ~ N(0, s^2) and std_low <= s <= std_high; m and s depend on the input and on the weights. Readings lie
    on a lattice and a limit may be met for one input and not for another, so that no theorem on added noise holds.

    Attributes:
        step: distance of neighbouring codes, units of the reading, above 0.
        std_low: smallest standard deviation of z, units of the reading, at least 0.
        std_high: largest one, at least std_low.
        conversions: converted numbers that a reading adds up, at least 1.
        clips: whether some input reaches the converter's limit, beyond which the noise is lost.
        n_outputs: number of outputs, at least 1.
        beta: as for `GaussianNoise`.
    """

    law: ClassVar[str] = "converter_lattice"
    step: float
    std_low: float
    std_high: float
    conversions: int
    clips: bool
    n_outputs: int
    beta: float = 0.0

    def __post_init__(self) -> None:
        _check_beta(self.beta)
        checks.positive(step=self.step)
        checks.integer(n_outputs=self.n_outputs, conversions=self.conversions, minimum=1)
        checks.instance(bool, clips=self.clips)
        _check_ordered(self.std_low, self.std_high)

    def variance_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the limits over all m and s, shape (): the rounded variance is extreme for m on a code and half-way.

        At m half-way between two codes and s = 0 it is step^2 / 4; clipping only lowers it, down to 0.
        """
        low, high = self.std_low / self.step, self.std_high / self.step
        least = 0.0 if self.clips else rounded_variance(0.0, low)
        most = max(0.25, rounded_variance(0.5, high))
        scale = self.conversions * self.step**2
        return np.asarray(scale * least), np.asarray(scale * most)

    def describe(self) -> str:
        """Return the law in one line of text."""
        return (
            f"Gaussian, standard deviation {self.std_low:g} to {self.std_high:g} by input and weights, rounded to "
            f"multiples of {self.step:g} in {self.conversions} conversions, at each of {self.n_outputs} outputs"
        )


def rounded_variance(mean: float, std: float) -> float:
    """Variance of round(mean + std * N(0, 1)), by the sum over integers; s^2 + 1/12 to 30 digits for s above 2."""
    if std > 2.0:
        return std**2 + 1 / 12
    centre = round(mean)
    if std == 0.0:
        return 0.25 if abs(mean - centre) == 0.5 else 0.0
    reach = math.ceil(9 * std) + 2
    codes = np.arange(centre - reach, centre + reach + 1)
    edges = np.array(
        [math.erf((edge - mean) / (std * math.sqrt(2))) for edge in (*(codes - 0.5), codes[-1] + 0.5)]
    )
    masses = np.diff(edges) / 2
    return float(masses @ (codes - masses @ codes) ** 2)


def _check_ordered(std_low: float, std_high: float) -> None:
    checks.non_negative(std_low=std_low, std_high=std_high)
    if std_high < std_low:
        raise ValueError(
            f"std_high = {std_high:g}: must be at least std_low = {std_low:g}; exchange the two?"
        )


def _check_beta(beta: float) -> None:
    if not (isinstance(beta, (int, float)) and 0 <= beta < 1):
        raise ValueError(f"beta = {beta}: must be a probability in [0, 1)")


def _frozen(value: Any) -> np.ndarray:
    """Return a read-only float64 copy."""
    array = np.array(value, dtype=np.float64)
    array.flags.writeable = False
    return array
