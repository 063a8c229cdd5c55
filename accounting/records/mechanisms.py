"""Whole records: per-record clipping with central noise, and updates without any protection.

Under direct feedback alignment the update of record i is u_i = (s_i * phi'_i) (h_i, 1)^T at each layer and
e_i (h_i, 1)^T at the output, a rank-one matrix, so ||u_i||^2 = sum_l ||s_l * phi'_l||^2 (||h_(l-1)||^2 + 1) is known
without forming it. A step releases [sum over a Poisson(q) batch of min(1, C / ||u_i||) u_i + N(0, (z C)^2)] / divisor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self

from typing_extensions import Doc

from accounting import numerics
from accounting.guarantee import Adjacency, Guarantee
from accounting.mechanisms import (
    CertifiedMechanism,
    DeviceNoise,
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
    NOISE_IS_SECRET,
    Theorem,
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
        NOISE_IS_SECRET,
    ),
)


@dataclass(frozen=True, kw_only=True)
class ClippedRecords(CertifiedMechanism):
    """Common to all relations: [sum over a Poisson batch of clipped updates + N(0, (z C)^2)] / divisor."""

    noise_multiplier: Annotated[Positive, Doc("z > 0, the noise's standard deviation over clip_norm.")]
    sampling_probability: SamplingProbability
    clip_norm: Annotated[Positive, Doc("C > 0, the largest norm of a record's update over all layers.")]
    divisor: Annotated[
        Positive,
        Doc("The constant that divides the noisy sum, above 0; it is post-processing and costs nothing."),
    ]
    device_noise: DeviceNoise = False

    noise_field: ClassVar[str | None] = "noise_multiplier"
    audited: ClassVar[bool] = True

    def describe(self) -> str:
        """Return what ran, in a few words."""
        return (
            f"records clipped to {self.clip_norm:g}, {'device' if self.device_noise else 'Gaussian'} noise with "
            f"multiplier {self.noise_multiplier:g}, Poisson batches (q = {self.sampling_probability:g}), "
            f"{counted(self.steps, 'step')}, divided by {self.divisor:g}"
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
        **CertifiedMechanism.absent_means,
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
    return proven_guarantee(
        mechanisms,
        theorem=CLIPPED_RECORDS,
        bounds=bounds,
        delta=delta,
        adjacency=adjacency,
        assumptions=(
            *CLIPPED_RECORDS.assumptions(
                enforced=enforced, trusted=(DEVICE_NOISE_IS_GAUSSIAN,) if device else ()
            ),
            *about_relation(adjacency, enforced=enforced),
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
