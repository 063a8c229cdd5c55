"""What ran, as frozen records: a mechanism's parameters, its description, and the guarantee of several together.

A mechanism is a frozen dataclass with a `kind`. Those of opusim and of other packages alike are found through the
entry-point group `opusim.mechanisms`:

    [project.entry-points."opusim.mechanisms"]
    my_noise = "my_package:MyNoise"

    @dataclass(frozen=True, kw_only=True)
    class MyNoise(Mechanism):
        \"\"\"One line for `opusim account --help`.\"\"\"

        scale: Annotated[float, Doc("b > 0, the noise's scale."), checks.positive]

        kind: ClassVar[str] = "my_noise"
        noise_field: ClassVar[str | None] = "scale"
        theorem: ClassVar[Theorem] = Theorem(name="my-noise", ...)

        def describe(self) -> str: ...

        @classmethod
        def bounds(cls, mechanisms, adjacency, delta): ...

`opusim account my-noise` then has an option for each field, and ledgers write and read it.

Noise multipliers are always the noise's standard deviation over C, the largest norm that one record can add to the sum
(the clip norm), whatever the relation. Replacing a record moves the sum by up to 2 C: accountants add that factor.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from typing_extensions import Doc

from opusim import checks, plugins
from opusim.accounting import numerics
from opusim.accounting.guarantee import (
    Adjacency,
    Assumption,
    EpsilonBounds,
    Guarantee,
    NoGuarantee,
    Release,
    Status,
    Unit,
    from_json,
    to_json,
)
from opusim.accounting.theorems import (
    DEVICE_NOISE_IS_GAUSSIAN,
    Theorem,
    about_relation,
    about_rounding,
    leaving_out,
)


@dataclass(frozen=True)
class Absent:
    """In the annotation of a field that ledgers of earlier versions lack: the value that its absence means."""

    means: Any


Count = Annotated[int, partial(checks.integer, minimum=1)]
Positive = Annotated[float, checks.positive]
NonNegative = Annotated[float, checks.non_negative]
SamplingProbability = Annotated[
    float,
    Doc("q in (0, 1], the probability with which each record enters a batch."),
    partial(checks.in_unit_interval, closed="right"),
]
ExactlyRounded = Annotated[
    bool,
    Doc(
        "Whether each number plus its noise is released as one exactly rounded number (docs/privacy.md); false in "
        "ledgers of opusim before 0.3."
    ),
    Absent(False),
]
CountsSums = Annotated[
    bool,
    Doc(
        "Whether the noise also covers how one record changes the rounding of a step's sum (docs/privacy-records.md); "
        "false in ledgers of opusim before 0.3."
    ),
    Absent(False),
]
DeviceNoise = Annotated[bool, Doc("Whether the credited noise is a device's, of Gaussian law.")]
StatedRelation = Annotated[
    Adjacency,
    Doc(
        "add_or_remove_one if q, the number of steps, the noise and the divisor are constants; zero_out if one of "
        "them was computed from the number of records, which is then public."
    ),
    leaving_out,
    Absent(Adjacency.ZERO_OUT),
]
"""Types of fields with their rules; a field may add its own `Doc`."""


def require_text(remedy: str) -> Callable[..., None]:
    """Return a rule that refuses an empty text; the remedy says what to write."""

    def rule(**texts: str) -> None:
        for name, text in texts.items():
            if not text.strip():
                raise ValueError(f"{name} = '': {remedy}")

    return rule


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
        absent: The value, as the only entry, that a ledger of an earlier version without it means; else empty.
    """

    name: str
    value_type: type
    item: type | None
    meaning: str
    rules: tuple[Callable[..., None], ...]
    default: Any
    required: bool
    absent: tuple[Any, ...]


@functools.cache
def parameters_of(kind: type[Any]) -> tuple[Parameter, ...]:
    """Return the fields of a mechanism, in their order."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for field in fields(kind):
        hint, extras = hints[field.name], list[Any]()
        if get_origin(hint) is Annotated:
            hint, *extras = get_args(hint)
        if get_origin(hint) in (Union, UnionType):
            (hint,) = (part for part in get_args(hint) if part is not NoneType)
        meanings = [extra.documentation for extra in extras if isinstance(extra, Doc)]
        found.append(
            Parameter(
                name=field.name,
                value_type=get_origin(hint) or hint,
                item=next(iter(get_args(hint)), None),
                meaning=meanings[-1] if meanings else "",
                rules=tuple(extra for extra in extras if callable(extra)),
                default=None if field.default is MISSING else field.default,
                required=field.default is MISSING,
                absent=tuple(extra.means for extra in extras if isinstance(extra, Absent)),
            )
        )
    return tuple(found)


SCHEMA_VERSION = 1
ENTRY_POINT_GROUP = "opusim.mechanisms"

Hypotheses = tuple[tuple[str, ...], tuple[str, ...]]
"""Hypotheses that code can check, and those taken on trust."""
_KINDS: dict[str, type[Mechanism]] = {}
_STATING = (
    *("guarantees", "bounds", "common_adjacency", "delta_errors", "hypotheses", "circumstances", "detail"),
    *("why_infinite", "unit", "release", "refuted", "rounded", "device_assumption", "repeats_beta"),
)
"""Members of a class that shape a statement: mechanisms of classes that differ in one of them do not compose."""


@dataclass(frozen=True, kw_only=True)
class Mechanism(ABC):
    """A mechanism that ran `steps` times, each time on the same data with fresh noise.

    A subclass annotates each field with `Annotated[type, Doc("meaning"), rule]`: the meaning becomes the help of its
    option in `opusim account`, and a rule is called as `rule(field=value)` and raises ValueError. Its guarantee follows
    from its `theorem`, its `adjacency` and `bounds`; a subclass that states more overrides `guarantees`.

    Attributes:
        kind: Its name in ledgers; a subclass that sets it is registered, and none may inherit it.
        unit: What one neighbouring change concerns.
        release: What the attacker sees.
        noise_field: The parameter that a calibration sets, or None if it has none.
        noise_is_inverse: Whether the noise is 1 over that parameter, as for a mechanism that states its mu.
        noise_law: The law of `as_noise` on the scale `noise_field`, or "mu" if that field is the mu of a step; None if
            the class names no noisy sum.
        device_assumption: What a guarantee assumes of a device's noise, if that is credited.
        rounded: What is exactly rounded, in a statement's words; None if its statements say nothing of rounding.
        refuted: Why no epsilon is finite, with the remedy, if its theorem proves just that; else None.
        accountant: The class whose `guarantees` states several mechanisms together; mechanisms that share it compose. A
            class is its own accountant if it is `joint`, changes a member that shapes a statement, or inherits none.
        priced: Whether `opusim account` has a command for it.
        taken_upfront: Whether all that it releases is read before the first step, so that steps are post-processing.
        audited: Whether an audit of opusim attacks the code that releases it (benchmarks/attacks/README.md).
    """

    steps: Annotated[Count, Doc("How often it ran, at least 1.")] = 1

    kind: ClassVar[str]
    accountant: ClassVar[type[Mechanism]]
    unit: ClassVar[Unit] = Unit.RECORD
    release = Release.EVERY_UPDATE  # without an annotation: a subclass may make it a field of its own
    noise_field: ClassVar[str | None] = None
    noise_is_inverse: ClassVar[bool] = False
    noise_law: ClassVar[Literal["gaussian", "laplace", "mu"] | None] = None
    device_assumption: ClassVar[str] = DEVICE_NOISE_IS_GAUSSIAN
    rounded: ClassVar[str | None] = None
    refuted: ClassVar[str | None] = None
    priced: ClassVar[bool] = True
    taken_upfront: ClassVar[bool] = False
    audited: ClassVar[bool] = False

    def __init_subclass__(cls, *, joint: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        inherited = getattr(cls, "accountant", None)
        differs = inherited is not None and any(
            _part(cls, name) is not _part(inherited, name) for name in _STATING
        )
        if joint or differs or (inherited is None and ("kind" in vars(cls) or "guarantees" in vars(cls))):
            cls.accountant = cls
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
    def theorem(self) -> Theorem | None:
        """The theorem that proves its guarantee, or that there is none."""
        return None

    @property
    def adjacency(self) -> Adjacency:
        """The relation of its guarantee: its field `relation` (`StatedRelation`) if it has one, else replace_one."""
        return getattr(self, "relation", Adjacency.REPLACE_ONE)

    @property
    def credits_device(self) -> bool:
        """Whether its guarantee rests on the law of a device's noise."""
        return bool(getattr(self, "device_noise", False))

    @property
    def is_rounded(self) -> bool:
        """Whether every number that it releases is exactly rounded with its noise; a device's noise never is."""
        return getattr(self, "exactly_rounded", False) and not self.credits_device

    @property
    def is_counted(self) -> bool:
        """Whether its noise covers the rounding of the sum that it is added to."""
        return getattr(self, "counts_sums", False) and self.is_rounded

    @property
    def public_records(self) -> float | None:
        """The number of records if its public constants give it, else None."""
        return None

    @classmethod
    def guarantees(cls, mechanisms: Sequence[Self], *, delta: float, enforced: bool) -> list[Guarantee]:
        """Return the guarantees of several mechanisms together, all of one kind or of classes that compose (`joint`).

        Args:
            mechanisms: At least one; no two differ in `steps` only.
            delta: In [0, 1).
            enforced: Whether the code that ran them checked what code can check.

        Raises:
            NoGuarantee: No theorem covers them together.
        """
        adjacency = cls.common_adjacency(mechanisms)
        for name in ("unit", "release"):
            if len({getattr(one, name) for one in mechanisms}) > 1:
                raise NoGuarantee(
                    f"mechanisms {mechanisms[0].kind}: {name} differs between them; state each separately"
                )
        # cite the theorem with the most hypotheses: one about sampling before one without
        theorems = [one.theorem for one in mechanisms if one.theorem is not None]
        theorem = max(theorems, key=lambda each: (len(each.checked_by_code), each.name), default=None)
        facts: dict[str, Any] = {
            "delta": delta,
            "unit": mechanisms[0].unit,
            "adjacency": adjacency,
            "release": mechanisms[0].release,
            "mechanism": described(mechanisms),
        }
        if cls.refuted is not None:
            cited = "no theorem" if theorem is None else theorem.citation
            return [
                Guarantee(epsilon=math.inf, status=Status.NONE, source=cited, reason=cls.refuted, **facts)
            ]
        if theorem is None:
            raise NoGuarantee(
                f"mechanism {mechanisms[0].kind!r}: names no theorem; set one in {cls.__name__}"
            )
        # the probability that a certificate is wrong is taken off delta before epsilon is computed
        beta, reason = math.fsum(cls.delta_errors(mechanisms)), None
        if beta == 0 or delta > beta:
            bounds = cls.bounds(mechanisms, adjacency, delta - beta)
        else:
            bounds = EpsilonBounds(lower=0.0, upper=math.inf, method="no numbers")
            whose = "the probability that a certificate is wrong or light brighter than accounted for"
            reason = f"delta = {delta:g} must exceed beta = {beta:g}, {whose}"
        infinite = math.isinf(bounds.upper)
        source = (theorem.citation, cls.detail(mechanisms), "" if infinite else bounds.method)
        checked, trusted = cls.hypotheses(mechanisms, delta=delta, bounds=bounds)
        return [
            Guarantee(
                epsilon=bounds.upper,
                status=proven_status(
                    bounds.upper, device_model=any(one.credits_device for one in mechanisms)
                ),
                source="; ".join(part for part in source if part),
                assumptions=(
                    *theorem.assumptions(enforced=enforced, checked_by_code=checked, trusted=trusted),
                    *cls.circumstances(mechanisms, adjacency, enforced=enforced),
                ),
                epsilon_lower=None if infinite or bounds.lower == bounds.upper else bounds.lower,
                reason=(reason or cls.why_infinite(mechanisms, delta)) if infinite else None,
                **facts,
            )
        ]

    @classmethod
    def bounds(cls, mechanisms: Sequence[Self], adjacency: Adjacency, delta: float) -> EpsilonBounds:
        """Return bounds on epsilon of several mechanisms together, by default those of their noisy sums.

        Args:
            mechanisms: At least one.
            adjacency: The relation.
            delta: The statement's delta minus the errors of certificates, in [0, 1).
        """
        return numerics.noise_bounds([one.as_noise() for one in mechanisms], adjacency, delta)

    @classmethod
    def common_adjacency(cls, mechanisms: Sequence[Self]) -> Adjacency:
        """Return the relation of several mechanisms together.

        If stated relations (`StatedRelation`) differ, zero_out holds for all: if no constant comes from the data, a run
        with a null record equals the run without it, so a guarantee for add_or_remove_one is one for zero_out.

        Raises:
            NoGuarantee: Their relations differ otherwise.
        """
        relations = {one.adjacency for one in mechanisms}
        if len(relations) == 1:
            return mechanisms[0].adjacency
        if Adjacency.REPLACE_ONE not in relations and all(hasattr(one, "relation") for one in mechanisms):
            return Adjacency.ZERO_OUT
        kinds = ", ".join(sorted({f"{one.kind} ({one.adjacency.value})" for one in mechanisms}))
        raise NoGuarantee(f"mechanisms {kinds}: their relations differ; state each separately")

    @classmethod
    def delta_errors(cls, mechanisms: Sequence[Self]) -> list[float]:
        """Return probabilities that a hypothesis fails, which add up and are taken off delta."""
        return []

    @classmethod
    def hypotheses(cls, mechanisms: Sequence[Self], *, delta: float, bounds: EpsilonBounds) -> Hypotheses:
        """Return further hypotheses of this case: those that code can check, and those taken on trust."""
        return (), (cls.device_assumption,) if any(one.credits_device for one in mechanisms) else ()

    @classmethod
    def circumstances(
        cls, mechanisms: Sequence[Self], adjacency: Adjacency, *, enforced: bool
    ) -> tuple[Assumption, ...]:
        """Return what is assumed of rounding and of the number of records."""
        return (
            *cls.about_rounding(mechanisms, enforced=enforced),
            *about_relation(adjacency, enforced=enforced),
        )

    @classmethod
    def about_rounding(cls, mechanisms: Sequence[Self], *, enforced: bool) -> tuple[Assumption, ...]:
        """Return what is assumed of rounding."""
        if cls.rounded is None:
            return ()
        exact, counted = (
            all(found) for found in zip(*((m.is_rounded, m.is_counted) for m in mechanisms), strict=True)
        )
        return about_rounding(
            exact, enforced=enforced, what=cls.rounded, counted=counted, unit=mechanisms[0].unit
        )

    @classmethod
    def detail(cls, mechanisms: Sequence[Self]) -> str:
        """Return an intermediate number for the source, such as "mu = 0.7"; by default none."""
        return ""

    @classmethod
    def why_infinite(cls, mechanisms: Sequence[Self], delta: float) -> str:
        """Return why `bounds` found no finite epsilon."""
        if delta == 0:
            return "Gaussian noise has no finite epsilon at delta = 0; state a delta above 0"
        return f"no finite epsilon at delta = {delta:g} was found; use more noise or a larger delta"

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
        """Return the mechanism for an attacker who knows the other records of a batch: sampling does not amplify it.

        The membership game of an audit assumes that attacker.

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
        if self.noise_law is None:
            raise NoGuarantee(
                f"mechanism {self.kind.replace('_', '-')}: names no noisy sum that dominates it, so that no private "
                "choice between its trials has a price; take another protection, or override as_noise in "
                f"{type(self).__name__}"
            )
        value, steps = float(getattr(self, self._noise_parameter())), self.steps
        if self.noise_law == "mu":  # a relation under which the sum moves half as far needs half the noise
            moved = value if self.adjacency is Adjacency.REPLACE_ONE else 2 * value
            return numerics.NoisySum.of_mu(moved, steps)
        q = float(getattr(self, "sampling_probability", 1.0))
        return numerics.NoisySum(law=self.noise_law, scale=value, probability=q, steps=steps)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, with kind and schema version."""
        return {"kind": self.kind, "schema_version": SCHEMA_VERSION} | to_json(self)

    def _noise_parameter(self) -> str:
        if self.noise_field is None:
            raise NoGuarantee(f"mechanism {self.kind!r}: has no noise that could be set to reach a target")
        return self.noise_field


def _part(owner: type[Mechanism], name: str) -> Any:
    """Return a class member, unbound, from the class or the first base that defines it; None if there is none."""
    return next((vars(one)[name] for one in owner.__mro__ if name in vars(one)), None)


@dataclass(frozen=True, kw_only=True)
class CertifiedMechanism(Mechanism):
    """A mechanism whose noise may be a device's, certified from its frames.

    The certificate's numbers are wrong with probability beta over its calibration frames, which no data change.
    Otherwise the theorem of every mechanism that rests on them holds, so H <= delta' + beta for all of them together:
    one certificate costs its beta once, however many mechanisms and steps rest on it.

    Attributes:
        repeats_beta: Whether a mechanism that names no certificate counts its beta at each step: true if its steps are
            whole runs, which may rest on different calibrations.
    """

    beta: Annotated[
        float,
        Doc(
            "Probability in [0, 1) that the certificate of the device's noise is wrong; one certificate covers all "
            "steps."
        ),
        partial(checks.in_unit_interval, closed="left"),
        Absent(0.0),
    ] = 0.0
    certificate: Annotated[
        str,
        Doc("Digest of that certificate, or empty; mechanisms that name the same one spend its beta once."),
        Absent(""),
    ] = ""

    repeats_beta: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.certificate and not self.beta:
            raise ValueError(
                f"certificate = {self.certificate!r}: needs its beta, above 0; give both or neither"
            )

    @classmethod
    def delta_errors(cls, mechanisms: Sequence[Self]) -> list[float]:
        """Return each certificate's beta once."""
        named: dict[str, float] = {}
        for one in mechanisms:
            if one.certificate:
                named[one.certificate] = max(one.beta, named.get(one.certificate, 0.0))
        unnamed = [
            one.beta * (one.steps if cls.repeats_beta else 1) for one in mechanisms if not one.certificate
        ]
        return [*named.values(), *unnamed]


def mechanism_class(kind: str) -> type[Mechanism]:
    """Return the class of a kind, importing the package whose entry point names it.

    ValueError lists those that exist, or says that the package cannot be used.
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
    """Return the kinds that `mechanism_class` accepts, registered or installed, in alphabetical order."""
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
    found = mechanism_class(str(kind))
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"schema_version = {checks.short(version)}: must be {SCHEMA_VERSION}; read it with the opusim that wrote it"
        )
    parameters = parameters_of(found)
    values = {one.name: one.absent[0] for one in parameters if one.absent} | values
    odd = set(values) ^ {parameter.name for parameter in parameters}
    if odd:
        listed = ", ".join(sorted(odd))[:200]
        raise ValueError(
            f"{kind}: parameters missing or not known: {listed}; read it with the opusim that wrote it"
        )
    return from_json(found, values)


def counted(number: int, word: str) -> str:
    """Return a number and its noun, such as "1 step" or "3,150 steps"."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def described(mechanisms: Sequence[Mechanism]) -> str:
    """Return the descriptions of several mechanisms in one line."""
    return "; ".join(mechanism.describe() for mechanism in mechanisms)


def proven_status(epsilon: float, *, device_model: bool) -> Status:
    """Return `none` for an infinite epsilon, else `proven`, or `proven under a device model` for a device's noise."""
    if math.isinf(epsilon):
        return Status.NONE
    return Status.PROVEN_UNDER_DEVICE_MODEL if device_model else Status.PROVEN
