"""Whole records: per-record clipping with central noise, and updates without any protection.

Under direct feedback alignment the update of record i is u_i = (s_i * phi'_i) (h_i, 1)^T at each layer and
e_i (h_i, 1)^T at the output, a rank-one matrix, so ||u_i||^2 = sum_l ||s_l * phi'_l||^2 (||h_(l-1)||^2 + 1) is known
without forming it. A step releases [sum over a Poisson(q) batch of min(1, C / ||u_i||) u_i + N(0, (z C)^2)] / divisor.
The noise of several steps may be correlated: row t of inverse(C) Z for a banded matrix C (theorem banded-records).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self

from typing_extensions import Doc

from accounting import numerics
from accounting.guarantee import Adjacency, Guarantee
from accounting.mechanisms import (
    CertifiedMechanism,
    DeviceNoise,
    ExactlyRounded,
    Mechanism,
    Positive,
    SamplingProbability,
    certificate_errors,
    counted,
    no_guarantee,
    proven_guarantee,
    require_text,
    spend_certificates,
)
from accounting.theorems import (
    DEVICE_NOISE_IS_GAUSSIAN,
    SEED_IS_SECRET,
    Theorem,
    about_noisy_sums,
    about_relation,
    leaving_out,
    weaker,
)

CLIPPED_RECORDS = Theorem(
    name="clipped-records",
    title="Poisson-sampled Gaussian noise on clipped updates",
    statement="[sum over a secret Poisson(q) batch of min(1, C / ||u_i||) u_i + N(0, (z C)^2)] / divisor is the "
    "Poisson-sampled Gaussian mechanism with multiplier z. For add_or_remove_one q, the number of steps, z "
    "and the divisor must be constants; for zero_out they may come from the number of records, which is "
    "then public; for replace_one the sum moves by up to 2 C.",
    proof="Fix the device's readings: a step is then a sum of contributions of norm at most C, and averaging over "
    "readings cannot raise a jointly convex divergence, so device noise before the clip neither harms nor "
    "helps. Dividing by a constant is post-processing. For zero_out every constant is the same for both data "
    "sets, and the null record contributes nothing. The rest is theorem sampled-gaussian.",
    reference="Abadi et al. 2016; Zhu, Dong and Wang 2022",
    code="accounting.records.mechanisms.RecordCentral",
    page="privacy-records.md, sections 1 and 2",
    checked_by_code=(
        "every record enters every batch independently with probability q, by a new draw at each step",
        "the sum is divided by the stated constant, never by a realised size, and an empty batch takes its noisy step",
        "one factor min(1, C / norm) over all layers clips each record's update, and a value that is not finite counts "
        "as 0",
        "the features were standardised with public constants, not with statistics of the data",
        "the noise is fresh at each step, Gaussian, and not quantised before it is added",
    ),
    trusted=(
        "batches stay secret: realised sizes, frames, joules, step times and the sampler's state are not released",
        "a record's reading depends on that record only: no automatic exposure, batch scaling or persistence",
        "a record's update does not depend on other records: no layer, hook or loss mixes the records of a batch",
        SEED_IS_SECRET,
    ),
)

BANDED_RECORDS = Theorem(
    name="banded-records",
    title="Banded noise on clipped updates from cyclic Poisson batches",
    statement="Let C be lower triangular with C_(t+k, t) = c_k for 0 <= k < b, and 0 elsewhere. T steps release [sum "
    "over the batch of min(1, L / ||u_i||) u_i + row t of inverse(C) Z] / divisor, where L is the clip and Z has "
    "independent entries of N(0, (z L)^2). Each record is in one of b subsets by a uniform coin of its own, and step t "
    "draws each record of subset t mod b with probability b q. All steps together are dominated by ceil(T / b) "
    "releases of the Poisson(b q)-sampled Gaussian mechanism with multiplier z / |c|, where |c| is the largest norm of "
    "a column of C, for the relations of theorem clipped-records.",
    proof="C is invertible and public, so C G + Z is released, where G holds the sums as rows; C is lower triangular, "
    "so what is known before step t is the same. Fix the coins of all other records and the subset of this one: "
    "divergences are jointly convex, and these coins have the same law for both data sets. The record may be drawn at "
    "steps s, s + b, ... only. Drawn at s with update u it adds c_k u to row s + k, k < b. So no row holds two draws, "
    "and these blocks of b rows hold at most ceil(T / b) draws. In a block the record adds a vector of norm at most "
    "|c| L that is fixed before the block begins. What the other records add in answer to earlier rows is the same "
    "function for both data sets and drops out of the ratio of densities. Each block is then the Poisson(b q)-sampled "
    "Gaussian mechanism, and blocks compose adaptively. A run that is resumed with new noise and new coins is several "
    "such releases.",
    reference="Choquette-Choo et al. 2023; McKenna 2024",
    code="accounting.records.mechanisms.ClippedRecords",
    page="privacy-records.md, section 7",
    checked_by_code=(
        "every record is in one of b subsets by a uniform coin of its own, and no number of records shapes a subset",
        "step t draws each record of subset t mod b independently with probability b q, and no other record",
        "the sum is divided by the stated constant, never by a realised size, and an empty batch takes its noisy step",
        "one factor min(1, L / norm) over all layers clips each record's update, with the same L at every step, and a "
        "value that is not finite counts as 0",
        "the features were standardised with public constants, not with statistics of the data",
        "the rows of Z are fresh at each step and Gaussian; a run that resumes in release mode begins C anew and pays "
        "for that",
    ),
    trusted=CLIPPED_RECORDS.trusted,
)


_ROUNDING = 1e-12
"""By how much a product of a number of bands and a probability may miss 1, which it stands for."""


def require_bands(bands: int, probability: float) -> None:
    """Refuse more subsets of records than steps in which a record is drawn once on average.

    Args:
        bands: b, the number of steps over which noise is correlated, and of subsets.
        probability: q, with which a record is drawn in a step, averaged over its subset's coin.

    Raises:
        ValueError: b q exceeds 1.
    """
    if bands * probability > 1 + _ROUNDING:
        raise ValueError(
            f"bands = {bands}: times the sampling probability {probability:g} is {bands * probability:.4g}, the "
            "probability with which a record of one of as many subsets would be drawn; must be at most 1: take at most "
            f"{int(1 / probability)} bands, or smaller batches"
        )


def _require_correlation(**coefficients: tuple[float, ...]) -> None:
    for name, values in coefficients.items():
        if not values or not all(math.isfinite(value) for value in values) or values[0] <= 0:
            raise ValueError(
                f"{name} = {values}: must be finite numbers of which the first is above 0; give 1 for independent noise"
            )


@dataclass(frozen=True, kw_only=True)
class ClippedRecords(CertifiedMechanism):
    """Common to all relations: [sum over a Poisson batch of clipped updates + N(0, (z C)^2)] / divisor.

    With several coefficients the noise is correlated over steps and the batches are cyclic (theorem banded-records).
    Its steps then are those of one run. A ledger that adds a part with new noise adds bands - 1 steps more, which is
    enough: ceil(m / b) + ceil(n / b) <= ceil((m + n + b - 1) / b).
    """

    noise_multiplier: Annotated[Positive, Doc("z > 0, the noise's standard deviation over clip_norm.")]
    sampling_probability: SamplingProbability
    clip_norm: Annotated[Positive, Doc("C > 0, the largest norm of a record's update over all layers.")]
    divisor: Annotated[
        Positive,
        Doc("The constant that divides the noisy sum, above 0; it is post-processing and costs nothing."),
    ]
    device_noise: DeviceNoise = False
    correlation: Annotated[
        tuple[float, ...],
        Doc(
            "Coefficient c_0, c_1, ... of noise that is correlated over as many steps (bands); by default 1, for "
            "independent noise. Step t then draws from one of as many subsets of the records, with probability bands q."
        ),
        _require_correlation,
    ] = (1.0,)
    exactly_rounded: ExactlyRounded = False

    noise_field: ClassVar[str | None] = "noise_multiplier"
    audited: ClassVar[bool] = True
    absent_means: ClassVar[Mapping[str, Any]] = {
        **CertifiedMechanism.absent_means,
        "correlation": (1.0,),
        "exactly_rounded": False,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "correlation", tuple(map(float, self.correlation)))
        require_bands(self.bands, self.sampling_probability)

    @property
    def additive(self) -> bool:
        """See Mechanism.additive; the last of ceil(steps / b) releases may be a part."""
        return self.bands == 1

    @property
    def bands(self) -> int:
        """Number of steps over which the noise is correlated: 1 for independent noise."""
        return len(self.correlation)

    def describe(self) -> str:
        """Return what ran, in a few words."""
        batches = "Poisson batches" if self.bands == 1 else f"cyclic Poisson batches of {self.bands} subsets"
        over = "" if self.bands == 1 else f" correlated over {self.bands} steps"
        return (
            f"records clipped to {self.clip_norm:g}, {'device' if self.device_noise else 'Gaussian'} noise{over} with "
            f"multiplier {self.noise_multiplier:g}, {batches} (q = {self.sampling_probability:g}), "
            f"{counted(self.steps, 'step')}, divided by {self.divisor:g}"
        )

    @property
    def public_records(self) -> float | None:
        """The divisor over q: the records of which a batch has as many as the divisor, on average."""
        return self.divisor / self.sampling_probability

    def known_batch(self) -> Self:
        """Return the same mechanism with q = 1, or 1 / bands: the record's subset is known, too."""
        return replace(self, sampling_probability=1 / self.bands)

    def as_noise(self) -> numerics.NoisySum:
        """Return the noise in numbers: ceil(steps / b) releases at b q with z over the largest column norm of C."""
        probability = self.bands * self.sampling_probability
        return numerics.NoisySum(
            law="gaussian",
            scale=self.noise_multiplier / math.hypot(*self.correlation[: self.steps]),
            probability=1.0 if probability > 1 - _ROUNDING else probability,
            steps=-(-self.steps // self.bands),
        )


@dataclass(frozen=True, kw_only=True)
class RecordCentral(ClippedRecords):
    """Clipping and central noise: [sum over a Poisson batch of clipped updates + N(0, (z C)^2)] / divisor."""

    relation: Annotated[
        Adjacency,
        Doc(
            "add_or_remove_one if q, the number of steps, the noise and the divisor are constants; zero_out if one of "
            "them was computed from the number of records, which is then public."
        ),
        leaving_out,
    ] = Adjacency.ADD_OR_REMOVE_ONE

    kind: ClassVar[str] = "record_central"
    absent_means: ClassVar[Mapping[str, Any]] = {
        **ClippedRecords.absent_means,
        "relation": Adjacency.ZERO_OUT,
    }

    @classmethod
    def guarantees(cls, mechanisms: Sequence[Self], *, delta: float, enforced: bool) -> list[Guarantee]:
        """Return epsilon of all steps in both directions: zero_out, unless all are for add_or_remove_one."""
        relation = weaker(mechanism.relation for mechanism in mechanisms)
        return [_clipped_guarantee(mechanisms, relation, delta, enforced)]


@dataclass(frozen=True, kw_only=True)
class RecordReplaced(ClippedRecords):
    """Per-record clipping and central noise on Poisson batches, for replacing a record; every update is released.

    Replacing a record moves a batch's sum by up to 2 C.
    """

    kind: ClassVar[str] = "record_replaced"
    priced: ClassVar[bool] = False
    adjacency: ClassVar[Adjacency] = Adjacency.REPLACE_ONE

    @classmethod
    def guarantees(cls, mechanisms: Sequence[Self], *, delta: float, enforced: bool) -> list[Guarantee]:
        """Return epsilon of all steps together, replace_one."""
        return [_clipped_guarantee(mechanisms, Adjacency.REPLACE_ONE, delta, enforced)]


def _clipped_guarantee(
    mechanisms: Sequence[ClippedRecords], adjacency: Adjacency, delta: float, enforced: bool
) -> Guarantee:
    sums = [mechanism.as_noise() for mechanism in mechanisms]
    bounds, reason = spend_certificates(
        delta,
        certificate_errors(mechanisms),
        lambda left: numerics.noise_bounds(sums, adjacency, left),
    )
    device = any(mechanism.device_noise for mechanism in mechanisms)
    theorem = BANDED_RECORDS if any(mechanism.bands > 1 for mechanism in mechanisms) else CLIPPED_RECORDS
    return proven_guarantee(
        mechanisms,
        theorem=theorem,
        bounds=bounds,
        delta=delta,
        adjacency=adjacency,
        assumptions=(
            *theorem.assumptions(enforced=enforced, trusted=(DEVICE_NOISE_IS_GAUSSIAN,) if device else ()),
            *about_relation(adjacency, enforced=enforced),
            *about_noisy_sums(
                all(one.exactly_rounded and one.bands == 1 for one in mechanisms) and not device,
                enforced=enforced,
            ),
        ),
        device_model=device,
        reason=reason,
    )


@dataclass(frozen=True, kw_only=True)
class Unprotected(Mechanism):
    """Updates that carry no protection of records."""

    what: Annotated[
        str,
        Doc("What ran, in a few words, such as 'bp without protection'."),
        require_text("must say what ran, such as 'bp without protection'"),
    ]

    kind: ClassVar[str] = "unprotected"
    priced: ClassVar[bool] = False

    def describe(self) -> str:
        """Return what ran, in a few words."""
        return f"{self.what}, {counted(self.steps, 'step')}"

    @classmethod
    def guarantees(cls, mechanisms: Sequence[Self], *, delta: float, enforced: bool) -> list[Guarantee]:
        """Return one statement of status none; `enforced` changes nothing, since nothing is assumed."""
        return [
            no_guarantee(
                mechanisms,
                delta=delta,
                unit=mechanisms[0].unit,
                adjacency=Adjacency.ADD_OR_REMOVE_ONE,
                source="no theorem",
                reason="records are neither clipped nor covered by central noise; protect them with --protect record",
            )
        ]
