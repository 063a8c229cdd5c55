"""What ran, as frozen data: a mechanism's description knows its parameters, its text and its event, and no arithmetic.

An accountant reads descriptions; a ledger writes them (`Mechanism.to_json`) and reads them back
(`mechanism_from_json`). A new kind is a frozen dataclass with `@register_mechanism`, whose module is named in `_HOMES`.

Noise multipliers are always the noise's standard deviation over C, the largest norm that one record can add to the
sum (the clip norm), whatever the relation. Replacing a record then moves the sum by up to 2 C: accountants count that
themselves, so one description means one mechanism.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self

from accounting.errors import NoGuarantee
from accounting.guarantee import Adjacency, Unit
from opusim import checks

if TYPE_CHECKING:
    from dp_accounting import DpEvent

SCHEMA_VERSION = 1

_HOMES = {
    "poisson_gaussian": "accounting.mechanisms",
    "poisson_laplace": "accounting.mechanisms",
    "gaussian": "accounting.mechanisms",
    "randomized_response": "accounting.mechanisms",
    "record_central": "accounting.records.mechanisms",
    "unprotected": "accounting.records.mechanisms",
    "convex": "accounting.convex.mechanisms",
    "record_replaced": "accounting.convex.mechanisms",
    "private_selection": "accounting.selection.mechanism",
    "label_amplified": "accounting.labels.mechanisms",
    "label_budget": "accounting.labels.mechanisms",
    "label_once": "accounting.labels.mechanisms",
    "zo_gaussian": "accounting.zeroth_order.mechanisms",
    "zo_laplace": "accounting.zeroth_order.mechanisms",
    "pdfa_published": "accounting.pdfa.mechanisms",
    "pdfa_without_formula": "accounting.pdfa.mechanisms",
    "ulr_published": "accounting.ulr.mechanisms",
    "rejection_gaussian": "accounting.ulr.mechanisms",
}
"""The module of every kind that a ledger may name."""

_KINDS: dict[str, type[Mechanism]] = {}


@dataclass(frozen=True, kw_only=True)
class Mechanism(ABC):
    """A mechanism that ran `steps` times, each time on the same data with fresh noise.

    Attributes:
        steps: How often it ran, at least 1.
        kind: Its name in ledgers.
        accountant: Where its guarantees are computed, as "module:function"; the function takes a sequence of
            descriptions that name it, `delta` and `enforced`, and returns a list of `Guarantee`.
        unit: What one neighbouring change concerns.
        noise_field: The parameter that a calibration sets; None where there is none.
        absent_means: Parameters that ledgers of earlier versions lack, each with the value that stands for its absence.
    """

    steps: int = 1

    kind: ClassVar[str]
    accountant: ClassVar[str] = "accounting.standard:guarantees"
    unit: ClassVar[Unit] = Unit.RECORD
    noise_field: ClassVar[str | None] = None
    absent_means: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        checks.integer(minimum=1, steps=self.steps)
        object.__setattr__(self, "steps", int(self.steps))

    @abstractmethod
    def describe(self) -> str:
        """What ran, in a few words."""

    @abstractmethod
    def event(self) -> DpEvent:
        """The event of all steps, for any accountant of dp_accounting."""

    @property
    def noise(self) -> float:
        """How strong the noise is: more of it never costs more epsilon.

        Raises:
            NoGuarantee: It has none that could be set.
        """
        return float(getattr(self, self._noise_parameter()))

    def repeated(self, steps: int) -> Self:
        """The same mechanism with another number of steps."""
        return replace(self, steps=steps)

    def with_noise(self, noise: float) -> Self:
        """The same mechanism with another `noise`.

        Raises:
            NoGuarantee: It has none that could be set.
        """
        changes: dict[str, Any] = {self._noise_parameter(): noise}
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with kind and schema version."""
        return {"kind": self.kind, "schema_version": SCHEMA_VERSION} | {
            key: getattr(value, "value", value) for key, value in asdict(self).items()
        }

    def _noise_parameter(self) -> str:
        if self.noise_field is None:
            raise NoGuarantee(f"mechanism {self.kind!r}: has no noise that could be set to reach a target")
        return self.noise_field

    def _to_floats(self, *names: str) -> None:
        """Store numbers as floats: dp_accounting drops compositions of an int or a numpy float32."""
        for name in names:
            object.__setattr__(self, name, float(getattr(self, name)))


def leaving_out(relation: str) -> Adjacency:
    """The relation of a mechanism whose sum moves by at most C: add_or_remove_one or zero_out.

    Raises:
        ValueError: It is another.
    """
    if relation not in (Adjacency.ADD_OR_REMOVE_ONE, Adjacency.ZERO_OUT):
        raise ValueError(f"relation = {str(relation)!r}: must be 'add_or_remove_one' or 'zero_out'")
    return Adjacency(relation)


def counted(number: int, word: str) -> str:
    """A number and its noun, such as "1 step" or "3,150 steps"."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def register_mechanism(kind: type[Mechanism]) -> type[Mechanism]:
    """Make a class known under its `kind`; its module must stand in `_HOMES` to be found by a ledger."""
    _KINDS[kind.kind] = kind
    return kind


def mechanism_from_json(content: Mapping[str, Any]) -> Mechanism:
    """The description that `Mechanism.to_json` wrote.

    Raises:
        ValueError: The kind, the schema version or a parameter is not known, one is missing or out of range.
    """
    values = dict(content)
    kind, version = values.pop("kind", None), values.pop("schema_version", None)
    if kind not in _HOMES:
        raise ValueError(
            f"kind = {kind!r}: must be one of {', '.join(_HOMES)}; read it with the opusim that wrote it"
        )
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"schema_version = {version!r}: must be {SCHEMA_VERSION}; read it with the opusim that wrote it"
        )
    import_module(_HOMES[kind])
    values = {**_KINDS[kind].absent_means, **values}
    names = {field.name for field in fields(_KINDS[kind])}
    if set(values) != names:
        odd = ", ".join(sorted(set(values) ^ names))
        raise ValueError(
            f"{kind}: parameters missing or not known: {odd}; read it with the opusim that wrote it"
        )
    return _KINDS[kind](**values)


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class PoissonGaussian(Mechanism):
    """Sum over a Poisson batch of vectors with norm at most C, plus N(0, (z C)^2) in every coordinate.

    Attributes:
        noise_multiplier: z, above 0: standard deviation over C.
        sampling_probability: q in (0, 1], the probability with which each record enters a batch.
        adjacency: Add or remove a record, or replace it by a null record (the sum moves by C), or by another (by 2 C).
    """

    noise_multiplier: float
    sampling_probability: float
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE

    kind: ClassVar[str] = "poisson_gaussian"
    noise_field: ClassVar[str | None] = "noise_multiplier"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(noise_multiplier=self.noise_multiplier)
        checks.in_unit_interval(closed="right", sampling_probability=self.sampling_probability)
        object.__setattr__(self, "adjacency", Adjacency(self.adjacency))
        self._to_floats("noise_multiplier", "sampling_probability")

    def describe(self) -> str:
        """What ran, in a few words."""
        return (
            f"Gaussian noise, multiplier {self.noise_multiplier:g}, on Poisson batches "
            f"(q = {self.sampling_probability:g}), {counted(self.steps, 'step')}"
        )

    def event(self) -> DpEvent:
        """Self-composed Poisson-sampled Gaussian; z over C, which dp_accounting's PLD takes for either relation."""
        import dp_accounting as dp

        step = dp.PoissonSampledDpEvent(self.sampling_probability, dp.GaussianDpEvent(self.noise_multiplier))
        return dp.SelfComposedDpEvent(step, self.steps)


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class Gaussian(Mechanism):
    """Sum over all records of vectors with norm at most C, plus N(0, (z C)^2) in every coordinate: no sampling.

    Attributes:
        noise_multiplier: z, above 0: standard deviation over C.
        adjacency: Add or remove a record, or replace it by a null record (the sum moves by C), or by another (by 2 C).
    """

    noise_multiplier: float
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE

    kind: ClassVar[str] = "gaussian"
    noise_field: ClassVar[str | None] = "noise_multiplier"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(noise_multiplier=self.noise_multiplier)
        object.__setattr__(self, "adjacency", Adjacency(self.adjacency))
        self._to_floats("noise_multiplier")

    def describe(self) -> str:
        """What ran, in a few words."""
        return f"Gaussian noise, multiplier {self.noise_multiplier:g}, on all records, {counted(self.steps, 'step')}"

    def event(self) -> DpEvent:
        """Self-composed Gaussian."""
        import dp_accounting as dp

        return dp.SelfComposedDpEvent(dp.GaussianDpEvent(self.noise_multiplier), self.steps)


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class PoissonLaplace(Mechanism):
    """Sum over a Poisson batch of scalars of size at most C, plus Laplace noise of scale b C.

    Attributes:
        scale: b, above 0: the Laplace scale over C.
        sampling_probability: q in (0, 1].
        adjacency: Add or remove a record, or replace it by a null record (the sum moves by C), or by another (by 2 C).
    """

    scale: float
    sampling_probability: float
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE

    kind: ClassVar[str] = "poisson_laplace"
    noise_field: ClassVar[str | None] = "scale"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(scale=self.scale)
        checks.in_unit_interval(closed="right", sampling_probability=self.sampling_probability)
        object.__setattr__(self, "adjacency", Adjacency(self.adjacency))
        self._to_floats("scale", "sampling_probability")

    def describe(self) -> str:
        """What ran, in a few words."""
        return (
            f"Laplace noise, scale {self.scale:g}, on Poisson batches (q = {self.sampling_probability:g}), "
            f"{counted(self.steps, 'step')}"
        )

    def event(self) -> DpEvent:
        """Self-composed Poisson-sampled Laplace."""
        import dp_accounting as dp

        step = dp.PoissonSampledDpEvent(self.sampling_probability, dp.LaplaceDpEvent(self.scale))
        return dp.SelfComposedDpEvent(step, self.steps)


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class RandomizedResponse(Mechanism):
    """A label stays with probability `keep_probability`, else it becomes one of the others, each as likely.

    Attributes:
        keep_probability: Above 1 / n_classes (there it says nothing) and below 1.
        n_classes: k, at least 2.
    """

    keep_probability: float
    n_classes: int

    kind: ClassVar[str] = "randomized_response"
    unit: ClassVar[Unit] = Unit.LABEL
    noise_field: ClassVar[str | None] = "keep_probability"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer(minimum=2, n_classes=self.n_classes)
        if not 1 / self.n_classes < self.keep_probability < 1:
            raise ValueError(
                f"keep_probability = {self.keep_probability!r}: must lie in (1 / n_classes, 1), "
                f"here ({1 / self.n_classes:g}, 1)"
            )
        object.__setattr__(self, "n_classes", int(self.n_classes))
        self._to_floats("keep_probability")

    @classmethod
    def from_epsilon(cls, epsilon: float, n_classes: int, steps: int = 1) -> RandomizedResponse:
        """The response with e^epsilon = keep (k - 1) / (1 - keep), per step.

        Raises:
            ValueError: epsilon is not above 0, or so large that the label always stays.
        """
        checks.positive(epsilon=epsilon)
        checks.integer(minimum=2, n_classes=n_classes)
        keep = 1 / (1 + (n_classes - 1) * math.exp(-epsilon))
        if keep == 1:
            raise ValueError(f"epsilon = {epsilon:g}: is so large that the label always stays; ask for less")
        return cls(keep_probability=keep, n_classes=n_classes, steps=steps)

    @property
    def noise(self) -> float:
        """1 / epsilon of one response."""
        return 1 / self.step_epsilon

    def with_noise(self, noise: float) -> RandomizedResponse:
        """The response of epsilon = 1 / noise."""
        return RandomizedResponse.from_epsilon(1 / noise, self.n_classes, self.steps)

    @property
    def step_epsilon(self) -> float:
        """log(keep (k - 1) / (1 - keep)), the pure epsilon of one response."""
        return math.log(self.keep_probability * (self.n_classes - 1) / (1 - self.keep_probability))

    def describe(self) -> str:
        """What ran, in a few words."""
        times = "" if self.steps == 1 else f", {self.steps:,} fresh responses for each label"
        return (
            f"randomized response over {self.n_classes} labels, kept with {self.keep_probability:.4g}{times}"
        )

    def event(self) -> DpEvent:
        """The steps one by one: dp_accounting's PLD ignores the count of this event."""
        import dp_accounting as dp

        noise = (1 - self.keep_probability) * self.n_classes / (self.n_classes - 1)
        return dp.ComposedDpEvent([dp.RandomizedResponseDpEvent(noise, self.n_classes)] * self.steps)
