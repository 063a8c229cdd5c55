"""Theorems by name: what they state, on which hypotheses, why they hold, and which code applies them.

Each subject defines its theorems next to its mechanisms. A guarantee cites the theorem by name, and `opusim explain`
prints the rest, so that an installed package can show what an epsilon rests on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from opusim.accounting.guarantee import Adjacency, Assumption, NoGuarantee, Unit

_KNOWN: dict[str, Theorem] = {}

NUMBER_IS_PUBLIC = (
    "the number of records is public and the same for both data sets: in one of them a record is replaced by a null "
    "record that contributes nothing; the sampling probability, the number of steps, the noise and the divisor may "
    "come from that number"
)
NUMBER_IS_UNUSED = (
    "the sampling probability, the number of steps, the noise and the divisor are constants that do not come from the "
    "data, and whether a record is held out does not depend on the others"
)
SEED_IS_SECRET = "neither the noise nor its seed is revealed"
NOISE_IS_SECRET = f"{SEED_IS_SECRET}, and the rounding of floating-point numbers is not attacked"
DEVICE_NOISE_IS_GAUSSIAN = (
    "the device's noise is Gaussian, independent of data and between entries, at least as strong as stated"
)
"""Hypotheses that several theorems share."""
_EXACTLY_ROUNDED = (
    "every {what} is released with its noise as one exactly rounded number on a public grid: the mechanism on the "
    "value that the machine holds, then post-processing"
)
NOISY_SUM = "entry of a step's noisy sum"
"""Name, in statements, of what is exactly rounded in gradients."""
_SUMS_COUNT = (
    "what one record changes of the rounding of a step's sum is bounded by public numbers, for every batch of at most "
    "65,536 records or of twice those that are counted on, and the noise is larger than its multiplier says by that "
    "bound"
)
_SUMS_ROUND = (
    "a step's sum is formed in floating-point numbers; what one record changes of its rounding is not counted, except "
    "in modules that use a parameter several times: only a release on a processor counts it"
)
_CONTRIBUTIONS_ROUND = (
    "the machine computes the contributions of other records alike, to the last digit, whatever the number and the "
    "places of the records in a batch"
)
NO_MIXING = "no layer, hook or loss mixes the records of a batch"
_FOLLOWED = (
    "before it trains, opusim follows the operators of a user's model on invented records and refuses those that mix "
    "records; on trust are code that takes another path in training, native code and memory behind torch, and black "
    "boxes: privacy-records.md, section 1"
)
_ROUNDING_NOT_ATTACKED = "the rounding of floating-point numbers is not attacked"

_NOT_POISSON = {
    "poisson-min-batch": "batches redrawn until they are large enough make records depend on each other",
    "fixed-size": "batches of a fixed size make records depend on each other",
    "shuffled-epochs": "no theorem amplifies shuffled epochs",
    "disjoint-cyclic": "nothing about disjoint batches is random",
}
"""Sampling schemes that are no Poisson sampling, each with why a theorem about Poisson batches does not hold."""

_POISSON = ("poisson", "full-batch")
"""Schemes that are Poisson sampling with some probability, 1 for full batches."""


@dataclass(frozen=True, kw_only=True)
class Theorem:
    """A named theorem behind guarantees; creating one registers it for `opusim explain`.

    Attributes:
        name: A short name in lower case with hyphens.
        title: One line: the mechanism and the tool.
        statement: What holds, with its formula.
        proof: The proof in a few steps.
        code: The function or class that computes the number, dotted.
        reference: Papers; empty if the proof is this project's own.
        page: Where the documentation uses it, such as "privacy-records.md, section 1"; empty if nowhere.
        checked_by_code: Hypotheses that training code can check or enforce.
        trusted: Hypotheses that no code can check.

    Raises:
        ValueError: The name belongs to another theorem.
    """

    name: str
    title: str
    statement: str
    proof: str
    code: str
    reference: str = ""
    page: str = ""
    checked_by_code: tuple[str, ...] = ()
    trusted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if _KNOWN.setdefault(self.name, self) != self:
            raise ValueError(f"theorem {self.name!r}: the name is taken; choose another")

    @property
    def citation(self) -> str:
        """What a guarantee's source says."""
        return f"theorem {self.name} ({'; '.join(filter(None, [self.title, self.reference]))})"

    def assumptions(
        self,
        *,
        enforced: bool,
        checked_by_code: Sequence[str] = (),
        trusted: Sequence[str] = (),
    ) -> tuple[Assumption, ...]:
        """Return the hypotheses as assumptions of a guarantee.

        Args:
            enforced: Whether the code that ran checked what code can check.
            checked_by_code: Further hypotheses of this case that code can check.
            trusted: Further hypotheses of this case that no code can check.
        """
        return assumptions(
            (*self.checked_by_code, *checked_by_code), (*self.trusted, *trusted), enforced=enforced
        )


def printed(hypothesis: str) -> str:
    """Return a hypothesis as readers see it; the text alone is its key in ledgers and documents."""
    return f"{hypothesis} ({_FOLLOWED})" if hypothesis.endswith(NO_MIXING) else hypothesis


def theorem(name: str) -> Theorem:
    """Return a theorem of the modules imported so far; raise ValueError if no theorem has this name."""
    if name not in _KNOWN:
        raise ValueError(f"theorem {name!r}: is not known; choose one of {', '.join(sorted(_KNOWN))}")
    return _KNOWN[name]


def known_theorems() -> list[Theorem]:
    """Return the theorems of the modules imported so far, by name."""
    return [_KNOWN[name] for name in sorted(_KNOWN)]


def assumptions(
    checked_by_code: Sequence[str], trusted: Sequence[str] = (), *, enforced: bool
) -> tuple[Assumption, ...]:
    """Return hypotheses as assumptions: those that code can check hold if such code ran the mechanism (`enforced`)."""
    holds = True if enforced else None
    return (
        *(Assumption(text=text, holds=holds) for text in checked_by_code),
        *(Assumption(text=text) for text in trusted),
    )


def about_relation(
    relation: Adjacency, *, enforced: bool, unit: Unit = Unit.RECORD
) -> tuple[Assumption, ...]:
    """Return what a statement about a relation assumes about the number of records, or of users.

    `enforced`: the code that ran refuses constants that come from the data.
    """
    if relation is Adjacency.ZERO_OUT:
        return _about((Assumption(text=NUMBER_IS_PUBLIC),), unit)
    if relation is Adjacency.ADD_OR_REMOVE_ONE:
        return _about(assumptions((NUMBER_IS_UNUSED,), enforced=enforced), unit)
    return ()


def _about(found: tuple[Assumption, ...], unit: Unit) -> tuple[Assumption, ...]:
    """Return assumptions in which users stand in the place of records, if users are protected."""
    if unit is not Unit.USER:
        return found
    return tuple(replace(one, text=one.text.replace("record", "user")) for one in found)


def about_rounding(
    exactly_rounded: bool,
    *,
    enforced: bool,
    what: str = "number",
    counted: bool = False,
    unit: Unit = Unit.RECORD,
) -> tuple[Assumption, ...]:
    """Return what a statement assumes about the rounding of released numbers (docs/privacy.md, What is rounded how).

    `exactly_rounded`: every release went through `opusim.randomness.rounded` with noise of exact law. `NOISY_SUM` adds
    what is assumed of the rounding of contributions, which the noise covers if `counted`.
    """
    if not exactly_rounded:
        return (Assumption(text=_ROUNDING_NOT_ATTACKED),)
    stated = assumptions((_EXACTLY_ROUNDED.format(what=what),), enforced=enforced)
    if what != NOISY_SUM:
        return stated
    if counted:
        stated += assumptions((_SUMS_COUNT,), enforced=enforced)
    others = (_CONTRIBUTIONS_ROUND,) if counted else (_SUMS_ROUND, _CONTRIBUTIONS_ROUND)
    return _about((*stated, *assumptions((), others, enforced=enforced)), unit)


def leaving_out(**relations: str) -> None:
    """Require (ValueError) relations under which a record's contribution is left out: add_or_remove_one, zero_out."""
    for name, relation in relations.items():
        if relation not in (Adjacency.ADD_OR_REMOVE_ONE, Adjacency.ZERO_OUT):
            raise ValueError(f"{name} = {str(relation)!r}: must be 'add_or_remove_one' or 'zero_out'")


def require_poisson(scheme: str, *, by: str) -> None:
    """Refuse a sampling scheme that is no Poisson sampling; no scheme is approximated by another.

    Args:
        scheme: The sampler's declared scheme.
        by: What needs Poisson batches, such as "protection.kind = 'record'".

    Raises:
        NoGuarantee: The scheme is another one.
    """
    if scheme in _POISSON:
        return
    why = _NOT_POISSON.get(scheme, "nothing is known about this scheme")
    raise NoGuarantee(
        f"sampler.scheme = {scheme!r}: {by} needs Poisson batches; {why}. "
        f"Use {' or '.join(repr(name) for name in _POISSON)}"
    )
