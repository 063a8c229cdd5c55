"""What ran, as frozen records: a mechanism's parameters, its description, and the guarantee of several together.

A mechanism is a frozen dataclass with a `kind`, found through the entry-point group `opusim.mechanisms`, ours as much
as those of other packages:

    [project.entry-points."opusim.mechanisms"]
    my_noise = "my_package:MyNoise"

    @dataclass(frozen=True, kw_only=True)
    class MyNoise(Mechanism):
        \"\"\"One line for `opusim account --help`.\"\"\"

        scale: Annotated[float, Doc("b > 0, the noise's scale."), checks.positive]

        kind: ClassVar[str] = "my_noise"
        noise_field: ClassVar[str | None] = "scale"

        def describe(self) -> str: ...

        @classmethod
        def guarantees(cls, mechanisms, *, delta, enforced): ...

`opusim account my-noise` then has an option for each field, ledgers write and read it, and it composes with every
mechanism that inherits the same `guarantees`.

Noise multipliers are always the noise's standard deviation over C, the largest norm that one record can add to the sum
(the clip norm), whatever the relation. Replacing a record moves the sum by up to 2 C: accountants count that
themselves, so that one record describes one mechanism.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from typing_extensions import Doc

from accounting import numerics
from accounting.errors import NoGuarantee
from accounting.guarantee import (
    Adjacency,
    Assumption,
    EpsilonBounds,
    Guarantee,
    Release,
    Status,
    Unit,
    from_json,
    to_json,
)
from accounting.theorems import Theorem
from opusim import checks, plugins

SCHEMA_VERSION = 1
ENTRY_POINT_GROUP = "opusim.mechanisms"

Count = Annotated[int, partial(checks.integer, minimum=1)]
Positive = Annotated[float, checks.positive]
NonNegative = Annotated[float, checks.non_negative]
SamplingProbability = Annotated[
    float,
    Doc("q in (0, 1], the probability with which each record enters a batch."),
    partial(checks.in_unit_interval, closed="right"),
]
ErrorProbability = Annotated[
    float,
    Doc(
        "Probability in [0, 1) that the certificate of the device's noise is wrong; one certificate covers all steps."
    ),
    partial(checks.in_unit_interval, closed="left"),
]
CertificateDigest = Annotated[
    str, Doc("Digest of that certificate, or empty; mechanisms that name the same one spend its beta once.")
]
ExactlyRounded = Annotated[
    bool,
    Doc(
        "Whether every number is released with its noise as one exactly rounded number (docs/privacy.md); a ledger of "
        "an opusim before 0.3 says false."
    ),
]
DeviceNoise = Annotated[bool, Doc("Whether the credited noise is a device's, of Gaussian law.")]
"""Types of fields with their rules; a field may add its own `Doc`."""

_KINDS: dict[str, type[Mechanism]] = {}


@dataclass(frozen=True, kw_only=True)
class Mechanism(ABC):
    """A mechanism that ran `steps` times, each time on the same data with fresh noise.

    A subclass annotates each field with `Annotated[type, Doc("meaning"), rule]`: the meaning becomes the help of its
    option in `opusim account`, and a rule is called as `rule(field=value)` and raises ValueError.

    Attributes:
        kind: Its name in ledgers; a subclass that sets it is registered, and none may inherit it.
        unit: What one neighbouring change concerns.
        noise_field: The parameter that a calibration sets, or None if it has none.
        noise_is_inverse: Whether the noise is 1 over that parameter, as for a mechanism that states its mu.
        priced: Whether `opusim account` has a command for it.
        taken_upfront: Whether all that it releases is read before the first step, so that steps are post-processing.
        audited: Whether an audit of opusim attacks the code that releases it (benchmarks/attacks/README.md).
        formerly: Earlier names of this kind; a ledger or a command that uses one is told the new name.
        absent_means: Parameters that ledgers of earlier versions lack, each with the value that its absence means.
    """

    steps: Annotated[Count, Doc("How often it ran, at least 1.")] = 1

    kind: ClassVar[str]
    unit: ClassVar[Unit] = Unit.RECORD
    noise_field: ClassVar[str | None] = None
    noise_is_inverse: ClassVar[bool] = False
    priced: ClassVar[bool] = True
    taken_upfront: ClassVar[bool] = False
    audited: ClassVar[bool] = False
    formerly: ClassVar[tuple[str, ...]] = ()
    absent_means: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" not in vars(cls) and hasattr(cls, "kind"):
            raise ValueError(
                f"class {cls.__name__}: inherits kind = {cls.kind!r}, so that a ledger would be read back as another "
                "class; give it a kind of its own"
            )
        if "kind" in vars(cls):
            is_foreign = not cls.__module__.startswith(f"{__package__}.")
            if is_foreign and plugins.is_ours(ENTRY_POINT_GROUP, cls.kind):
                raise ValueError(f"kind = {cls.kind!r}: is a mechanism of opusim; choose another")
            known = _KINDS.setdefault(cls.kind, cls)
            if known.__qualname__ != cls.__qualname__ or known.__module__ != cls.__module__:
                raise ValueError(f"kind = {cls.kind!r}: is taken by {known.__module__}; choose another")
            _KINDS[cls.kind] = cls

    def __post_init__(self) -> None:
        for parameter in parameters_of(type(self)):
            value = getattr(self, parameter.name)
            if value is None and parameter.default is None:
                continue
            for rule in parameter.rules:
                rule(**{parameter.name: value})
            if isinstance(parameter.value_type, type) and issubclass(
                parameter.value_type, (int, float, Enum)
            ):
                object.__setattr__(self, parameter.name, parameter.value_type(value))

    @abstractmethod
    def describe(self) -> str:
        """Return what ran, in a few words."""

    @property
    def public_records(self) -> float | None:
        """The number of records that its constants tell, which are public; None if they tell none."""
        return None

    @classmethod
    @abstractmethod
    def guarantees(cls, mechanisms: Sequence[Self], *, delta: float, enforced: bool) -> list[Guarantee]:
        """Return the guarantees of several mechanisms together, all of classes that share this method.

        Args:
            mechanisms: At least one; no two differ in `steps` only.
            delta: In [0, 1).
            enforced: Whether the code that ran them checked what code can check.

        Raises:
            NoGuarantee: No theorem covers them together.
        """

    @classmethod
    def starting_noise(cls, parameters: Mapping[str, Any]) -> float:
        """Return a valid value of `noise_field`, from which a calibration starts.

        Args:
            parameters: The other parameters; those that are missing are None.
        """
        return 1.0

    @property
    def noise(self) -> float:
        """How strong the noise is: more of it never costs more epsilon.

        Raises:
            NoGuarantee: The mechanism has no noise that could be set.
        """
        value = float(getattr(self, self._noise_parameter()))
        return 1 / value if self.noise_is_inverse else value

    @property
    def additive(self) -> bool:
        """Whether equal mechanisms of several runs cost what one with all their steps costs."""
        return True

    def repeated(self, steps: int) -> Self:
        """Return the same mechanism with another number of steps."""
        return replace(self, steps=steps)

    def with_noise(self, noise: float) -> Self:
        """Return the same mechanism with another `noise`.

        Raises:
            NoGuarantee: The mechanism has no noise that could be set.
        """
        changes: dict[str, Any] = {self._noise_parameter(): 1 / noise if self.noise_is_inverse else noise}
        return replace(self, **changes)

    def known_batch(self) -> Mechanism:
        """Return what an attacker faces who knows which other records are in the batch: no sampling amplifies it.

        The membership game of an audit is played against that attacker.

        Raises:
            NoGuarantee: The class does not say what is proven against such an attacker.
        """
        raise NoGuarantee(
            f"mechanism {self.kind!r}: states no guarantee for an attacker who knows the batch; "
            f"override known_batch in {type(self).__name__}"
        )

    def as_noise(self) -> numerics.NoisySum:
        """Return a noisy sum whose privacy loss dominates that of all steps, under the relation of the guarantee.

        `opusim tune` prices a choice between trials by it.

        Raises:
            NoGuarantee: The class names none.
        """
        raise NoGuarantee(
            f"mechanism {self.kind.replace('_', '-')}: names no noisy sum that dominates it, so that no private choice "
            f"between its trials has a price; take another protection, or override as_noise in {type(self).__name__}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, with kind and schema version."""
        return {"kind": self.kind, "schema_version": SCHEMA_VERSION} | to_json(self)

    def _noise_parameter(self) -> str:
        if self.noise_field is None:
            raise NoGuarantee(f"mechanism {self.kind!r}: has no noise that could be set to reach a target")
        return self.noise_field


@dataclass(frozen=True, kw_only=True)
class CertifiedMechanism(Mechanism):
    """A mechanism whose noise may be a device's, certified from its frames.

    The certificate's numbers are wrong with probability beta over the frames of its calibration, which no data change.
    On the other event every mechanism that rests on them has its theorem, so H <= delta' + beta for all of them
    together: one certificate costs its beta once, however many mechanisms and steps rest on it.
    """

    beta: ErrorProbability = 0.0
    certificate: CertificateDigest = ""

    absent_means: ClassVar[Mapping[str, Any]] = {"beta": 0.0, "certificate": ""}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.certificate and not self.beta:
            raise ValueError(
                f"certificate = {self.certificate!r}: needs its beta, above 0; give both or neither"
            )


@dataclass(frozen=True)
class Parameter:
    """A field of a mechanism, as its annotation describes it.

    Attributes:
        name: The field.
        value_type: Its type, without None.
        item: The type of its elements if it is a tuple, else None.
        meaning: The text of its `Doc`.
        rules: Checkers, each called with the value under the field's name.
        default: None if it has none or is None.
        required: Whether it has no default.
    """

    name: str
    value_type: type
    item: type | None
    meaning: str
    rules: tuple[Callable[..., None], ...]
    default: Any
    required: bool


def _is_annotated(hint: Any) -> bool:
    return get_origin(hint) is Annotated


@cache
def parameters_of(kind: type[Mechanism]) -> tuple[Parameter, ...]:
    """Return the fields of a mechanism, in their order."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for field in fields(kind):
        hint, *extras = (
            get_args(hints[field.name]) if _is_annotated(hints[field.name]) else [hints[field.name]]
        )
        if get_origin(hint) in (Union, UnionType):
            (hint,) = (part for part in get_args(hint) if part is not NoneType)
        meanings = [extra.documentation for extra in extras if isinstance(extra, Doc)]
        items = get_args(hint)
        default = None if field.default is MISSING else field.default
        found.append(
            Parameter(
                name=field.name,
                value_type=get_origin(hint) or hint,
                item=items[0] if items else None,
                meaning=meanings[-1] if meanings else "",
                rules=tuple(extra for extra in extras if callable(extra)),
                default=default,
                required=field.default is MISSING,
            )
        )
    return tuple(found)


def mechanism_class(kind: str) -> type[Mechanism]:
    """Return the class of a kind, importing the package whose entry point names it.

    Raises:
        ValueError: No class has this kind, and the message lists those that do; or its package cannot be used.
    """
    if kind in plugins.names(ENTRY_POINT_GROUP):
        return _load(kind)
    if kind not in _KINDS:
        raise ValueError(
            f"kind = {checks.short(kind)}: must be one of {', '.join(mechanism_kinds())}; read it with the opusim that "
            "wrote it, or install the package that has this mechanism"
        )
    return _KINDS[kind]


def mechanism_classes() -> dict[str, type[Mechanism]]:
    """Return the installed mechanisms by kind; one whose package cannot be used is left out, with a warning."""
    return plugins.load_all(ENTRY_POINT_GROUP, _load)


def mechanism_kinds() -> list[str]:
    """Return the kinds that `mechanism_class` knows, registered or installed, in alphabetical order."""
    return sorted({*_KINDS, *plugins.names(ENTRY_POINT_GROUP)})


def _load(kind: str) -> type[Mechanism]:
    def problem(found: Any) -> str | None:
        fits = (
            isinstance(found, type) and issubclass(found, Mechanism) and getattr(found, "kind", None) == kind
        )
        return None if fits else "is no Mechanism of that kind"

    found: type[Mechanism] = plugins.load(ENTRY_POINT_GROUP, kind, accept=problem)
    return found


def mechanism_from_json(content: Mapping[str, Any]) -> Mechanism:
    """Read back what `Mechanism.to_json` returned.

    Raises:
        ValueError: The kind, the schema version or a parameter is unknown, or one is missing or out of range.
    """
    values = dict(content)
    kind, version = values.pop("kind", None), values.pop("schema_version", None)
    _refuse_former_name(str(kind))
    found = mechanism_class(str(kind))
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"schema_version = {checks.short(version)}: must be {SCHEMA_VERSION}; read it with the opusim that wrote it"
        )
    values = {**found.absent_means, **values}
    odd = set(values) ^ {parameter.name for parameter in parameters_of(found)}
    if odd:
        listed = ", ".join(sorted(odd))[:200]
        raise ValueError(
            f"{kind}: parameters missing or not known: {listed}; read it with the opusim that wrote it"
        )
    return from_json(found, values)


def _refuse_former_name(kind: str) -> None:
    known = mechanism_kinds()
    for name in known if kind not in known else ():
        try:
            found = mechanism_class(name)
        except ValueError:  # a broken package has no say about other names
            continue
        if kind in found.formerly:
            raise ValueError(
                f"kind = {kind!r}: is now {name!r}; use that, and read old ledgers with the opusim that wrote them"
            )


def counted(number: int, word: str) -> str:
    """Return a number and its noun, such as "1 step" or "3,150 steps"."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def described(mechanisms: Sequence[Mechanism]) -> str:
    """Return the descriptions of several mechanisms in one line."""
    return "; ".join(mechanism.describe() for mechanism in mechanisms)


def require_text(remedy: str) -> Callable[..., None]:
    """Return a rule that refuses an empty text; the remedy says what to write."""

    def rule(**texts: str) -> None:
        for name, text in texts.items():
            if not text.strip():
                raise ValueError(f"{name} = '': {remedy}")

    return rule


def no_guarantee(
    mechanisms: Sequence[Mechanism],
    *,
    delta: float,
    unit: Unit,
    adjacency: Adjacency,
    source: str,
    reason: str,
) -> Guarantee:
    """Return a statement of status none about all updates of these mechanisms together.

    Args:
        mechanisms: What ran.
        delta: delta of the statement.
        unit: What is not protected.
        adjacency: The relation.
        source: The theorem that says so, or "no theorem".
        reason: Why no epsilon is finite, with the remedy.
    """
    return Guarantee(
        epsilon=math.inf,
        delta=delta,
        unit=unit,
        adjacency=adjacency,
        release=Release.EVERY_UPDATE,
        status=Status.NONE,
        mechanism=described(mechanisms),
        source=source,
        reason=reason,
    )


def proven_guarantee(
    mechanisms: Sequence[Mechanism],
    *,
    theorem: Theorem,
    bounds: EpsilonBounds,
    delta: float,
    adjacency: Adjacency,
    assumptions: tuple[Assumption, ...],
    device_model: bool = False,
    reason: str | None = None,
    release: Release = Release.EVERY_UPDATE,
    detail: str = "",
) -> Guarantee:
    """Return the statement that a theorem makes about several mechanisms together.

    Args:
        mechanisms: What ran, at least one, all of the same unit.
        theorem: What proves it.
        bounds: Epsilon at this delta, possibly infinite.
        delta: In [0, 1).
        adjacency: The relation that the bounds are about.
        assumptions: Hypotheses of the theorem.
        device_model: Whether a stated law of a device's noise is among them.
        reason: Why epsilon is infinite, if it is; by default that delta is 0 or the noise too small.
        release: What the attacker sees.
        detail: An intermediate number for the source, such as "mu = 0.7".
    """
    infinite = math.isinf(bounds.upper)
    source = [theorem.citation, detail, "" if infinite else bounds.method]
    return Guarantee(
        epsilon=bounds.upper,
        delta=delta,
        unit=mechanisms[0].unit,
        adjacency=adjacency,
        release=release,
        status=proven_status(bounds.upper, device_model=device_model),
        mechanism=described(mechanisms),
        source="; ".join(part for part in source if part),
        assumptions=assumptions,
        epsilon_lower=None if infinite or bounds.lower == bounds.upper else bounds.lower,
        reason=(reason or _infinite_reason(delta)) if infinite else None,
    )


def proven_status(epsilon: float, *, device_model: bool) -> Status:
    """Return `none` for an infinite epsilon, else `proven`, or `proven under a device model` for a device's noise.

    Args:
        epsilon: What the theorem gives, at least 0, possibly infinite.
        device_model: Whether a stated law of a device's noise is among the assumptions.
    """
    if math.isinf(epsilon):
        return Status.NONE
    return Status.PROVEN_UNDER_DEVICE_MODEL if device_model else Status.PROVEN


def certificate_errors(mechanisms: Sequence[CertifiedMechanism], *, repeated: bool = False) -> list[float]:
    """Return the probabilities of error that add up: each certificate's beta once.

    Args:
        mechanisms: What ran.
        repeated: Whether a mechanism that names no certificate counts its beta at each step, as one whose steps are
            whole runs does: nothing says that these rest on one calibration.
    """
    named: dict[str, float] = {}
    for one in mechanisms:
        if one.certificate:
            named[one.certificate] = max(one.beta, named.get(one.certificate, 0.0))
    unnamed = [one.beta * (one.steps if repeated else 1) for one in mechanisms if not one.certificate]
    return [*named.values(), *unnamed]


def spend_certificates(
    delta: float, betas: Sequence[float], bounds: Callable[[float], EpsilonBounds]
) -> tuple[EpsilonBounds, str | None]:
    """Return bounds at the delta that is left once the device's certificates may fail.

    Args:
        delta: In [0, 1).
        betas: Probabilities that a hypothesis of the device's law fails (a certificate's error), which add up.
        bounds: Computes bounds on epsilon at a delta.

    Returns:
        The bounds, and the reason if they are infinite because of the certificates, else None.
    """
    beta = math.fsum(betas)
    if beta == 0 or delta > beta:
        return bounds(delta - beta), None
    nothing = EpsilonBounds(lower=0.0, upper=math.inf, method="no numbers")
    whose = "the probability that a certificate is wrong or light brighter than accounted for"
    return nothing, f"delta = {delta:g} must exceed beta = {beta:g}, {whose}"


def _infinite_reason(delta: float) -> str:
    if delta == 0:
        return "Gaussian noise has no finite epsilon at delta = 0; state a delta above 0"
    return f"no finite epsilon at delta = {delta:g} was found; use more noise or a larger delta"
