"""Noise on a sum over a batch, the textbook mechanisms: sampled Gaussian, sampled Laplace, Gaussian without sampling.

| mechanism | delta = 0 | delta > 0 |
| --- | --- | --- |
| Gaussian, no sampling | none | exact: mu^2 = sum of (k / z)^2, epsilon of mu-GDP |
| Poisson-sampled Gaussian | none | privacy loss distribution in both directions; Renyi where doubles fail |
| Poisson-sampled Laplace | closed form | the smaller of closed form and privacy loss distribution |

k is 1 if a record is added, removed or made null, and 2 if one is replaced (its sum moves by 2 C). The numbers come
from `accounting.numerics`; what cannot be computed raises `NoGuarantee` or is infinite with a reason.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

from typing_extensions import Doc

from accounting import numerics
from accounting.errors import NoGuarantee
from accounting.guarantee import Adjacency, Guarantee
from accounting.mechanisms import Mechanism, Positive, SamplingProbability, counted, proven_guarantee
from accounting.theorems import Theorem, about_relation

_CHECKED = (
    "the noise of every step is fresh",
    "each record's contribution is clipped to norm C before the sum, across all layers together",
    "the sum is divided by a public constant, never by the batch's own size",
)
_SAMPLED = "every record enters every batch independently with probability q"
_SECRET_BATCHES = "batches stay secret"
_TRUSTED = ("neither the noise nor the seed that it came from is ever revealed",)

GAUSSIAN = Theorem(
    name="gaussian",
    title="Gaussian mechanism",
    statement="A sum that one record moves by at most k C, plus N(0, (z C)^2) in every coordinate, is mu-GDP with mu "
    "= k / z, and T such releases are mu-GDP with mu^2 = T (k / z)^2. Then delta(epsilon) = Phi(mu/2 - "
    "epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu). k is 1 if a record is added, removed or made null, 2 "
    "if one is replaced.",
    proof="Along the difference v of the two sums the outputs are N(0, 1) and N(|v| / (z C), 1) after scaling, and "
    "every other direction has the same law. Trade-off functions of Gaussian shifts compose by adding mu^2.",
    reference="Balle and Wang 2018; Dong, Roth and Su 2019",
    code="accounting.numerics.closed_forms.gaussian_bounds",
    page="privacy-records.md, section 3",
    checked_by_code=_CHECKED,
    trusted=_TRUSTED,
)
SAMPLED_GAUSSIAN = Theorem(
    name="sampled-gaussian",
    title="Poisson-sampled Gaussian mechanism",
    statement="A sum over a secret Poisson(q) batch of contributions of norm at most C, plus N(0, (z C)^2), is "
    "dominated, in units of C, by (1 - q) N(0, z^2) + q N(1, z^2) against N(0, z^2), in both orders, if a "
    "record is added, removed or made null, and by (1 - q) N(0, z^2) + q N(1, z^2) against (1 - q) N(0, "
    "z^2) + q N(-1, z^2) if one is replaced.",
    proof="Fix the other records' sum (hockey-stick divergences are jointly convex) and shift it to 0; the pair then "
    "grows with the norm of the record's contribution. Dominating pairs compose adaptively. Their privacy loss "
    "distribution is discretised from above (connect the dots) and from below (a polygon between tangents), so "
    "epsilon is known between two bounds; Renyi divergences take over where doubles cannot follow the losses.",
    reference="Zhu, Dong and Wang 2022; Doroshenko et al. 2022; Mironov 2017",
    code="accounting.numerics.sampled_noise.noise_bounds",
    page="privacy-records.md, section 3",
    checked_by_code=(*_CHECKED, _SAMPLED),
    trusted=(*_TRUSTED, _SECRET_BATCHES),
)
SAMPLED_LAPLACE = Theorem(
    name="sampled-laplace",
    title="Poisson-sampled Laplace mechanism",
    statement="A sum over a secret Poisson(q) batch of scalars of size at most C, plus Laplace noise of scale b C, "
    "costs at delta = 0 exactly log(1 + q (e^(1/b) - 1)) a step if a record is added, removed or made null,"
    " and log((1 - q + q e^(1/b)) / (1 - q + q e^(-1/b))) if one is replaced; pure epsilons add up.",
    proof="The ratio of the sampled densities is at most 1 - q + q e^(1/b), and its inverse at most "
    "1 / (1 - q + q e^(-1/b)), which is less. At delta > 0 the distribution of the loss is composed instead, and the "
    "smaller epsilon counts.",
    reference="DP-ZO, Propositions A.1, A.2; Zhu et al. 2022",
    code="accounting.numerics.sampled_noise.noise_bounds",
    page="privacy-records.md, section 3",
    checked_by_code=(*_CHECKED, _SAMPLED),
    trusted=(*_TRUSTED, _SECRET_BATCHES),
)

Relation = Annotated[
    Adjacency,
    Doc(
        "add or remove a record, or replace it by a null record (the sum moves by C), or by another (by 2 C)."
    ),
]


@dataclass(frozen=True, kw_only=True)
class AdditiveNoise(Mechanism):
    """Noise on a sum of contributions of norm at most C. Subclasses say which; all of one relation compose.

    A subclass implements `describe` and `as_noise`.
    """

    adjacency: Relation = Adjacency.ADD_OR_REMOVE_ONE

    theorem: ClassVar[Theorem]

    @abstractmethod
    def as_noise(self) -> numerics.NoisySum:
        """Return law, scale over C, sampling probability and steps, in numbers."""

    @classmethod
    def guarantees(cls, mechanisms: Sequence[Self], *, delta: float, enforced: bool) -> list[Guarantee]:
        """Return one guarantee of all mechanisms together; see `Mechanism.guarantees`."""
        relations = {mechanism.adjacency for mechanism in mechanisms}
        if len(relations) != 1:
            kinds = ", ".join(sorted({f"{one.kind} ({one.adjacency.value})" for one in mechanisms}))
            raise NoGuarantee(f"mechanisms {kinds}: their relations differ; state each separately")
        adjacency = relations.pop()
        theorem = _strongest_needed({mechanism.theorem.name: mechanism.theorem for mechanism in mechanisms})
        return [
            proven_guarantee(
                mechanisms,
                theorem=theorem,
                bounds=numerics.noise_bounds([one.as_noise() for one in mechanisms], adjacency, delta),
                delta=delta,
                adjacency=adjacency,
                assumptions=(
                    *theorem.assumptions(enforced=enforced),
                    *about_relation(adjacency, enforced=enforced),
                ),
            )
        ]


def _strongest_needed(theorems: dict[str, Theorem]) -> Theorem:
    """The theorem whose hypotheses contain those of the others: one about sampling before one without."""
    return max(theorems.values(), key=lambda one: (len(one.checked_by_code), one.name))


@dataclass(frozen=True, kw_only=True)
class PoissonGaussian(AdditiveNoise):
    """Sum over a Poisson batch of vectors with norm at most C, plus N(0, (z C)^2) in every coordinate."""

    noise_multiplier: Annotated[Positive, Doc("z, above 0: standard deviation over C.")]
    sampling_probability: SamplingProbability

    kind: ClassVar[str] = "poisson_gaussian"
    noise_field: ClassVar[str | None] = "noise_multiplier"
    theorem: ClassVar[Theorem] = SAMPLED_GAUSSIAN

    def describe(self) -> str:
        """Return what ran, in a few words."""
        return (
            f"Gaussian noise, multiplier {self.noise_multiplier:g}, on Poisson batches "
            f"(q = {self.sampling_probability:g}), {counted(self.steps, 'step')}"
        )

    def known_batch(self) -> Self:
        """Return the same mechanism with q = 1."""
        return replace(self, sampling_probability=1.0)

    def as_noise(self) -> numerics.NoisySum:
        """Return the noise in numbers."""
        return numerics.NoisySum(
            law="gaussian",
            scale=self.noise_multiplier,
            probability=self.sampling_probability,
            steps=self.steps,
        )


@dataclass(frozen=True, kw_only=True)
class Gaussian(AdditiveNoise):
    """Sum over all records of vectors with norm at most C, plus N(0, (z C)^2) in every coordinate: no sampling."""

    noise_multiplier: Annotated[Positive, Doc("z, above 0: standard deviation over C.")]

    kind: ClassVar[str] = "gaussian"
    noise_field: ClassVar[str | None] = "noise_multiplier"
    theorem: ClassVar[Theorem] = GAUSSIAN

    def describe(self) -> str:
        """Return what ran, in a few words."""
        return f"Gaussian noise, multiplier {self.noise_multiplier:g}, on all records, {counted(self.steps, 'step')}"

    def known_batch(self) -> Self:
        """Return the mechanism itself: its batch is all records."""
        return self

    def as_noise(self) -> numerics.NoisySum:
        """Return the noise in numbers."""
        return numerics.NoisySum(law="gaussian", scale=self.noise_multiplier, steps=self.steps)


@dataclass(frozen=True, kw_only=True)
class PoissonLaplace(AdditiveNoise):
    """Sum over a Poisson batch of scalars of size at most C, plus Laplace noise of scale b C."""

    scale: Annotated[Positive, Doc("b, above 0: the Laplace scale over C.")]
    sampling_probability: SamplingProbability

    kind: ClassVar[str] = "poisson_laplace"
    noise_field: ClassVar[str | None] = "scale"
    theorem: ClassVar[Theorem] = SAMPLED_LAPLACE

    def describe(self) -> str:
        """Return what ran, in a few words."""
        return (
            f"Laplace noise, scale {self.scale:g}, on Poisson batches (q = {self.sampling_probability:g}), "
            f"{counted(self.steps, 'step')}"
        )

    def known_batch(self) -> Self:
        """Return the same mechanism with q = 1."""
        return replace(self, sampling_probability=1.0)

    def as_noise(self) -> numerics.NoisySum:
        """Return the noise in numbers."""
        return numerics.NoisySum(
            law="laplace", scale=self.scale, probability=self.sampling_probability, steps=self.steps
        )
