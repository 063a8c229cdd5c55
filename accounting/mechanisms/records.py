"""Mechanisms that protect whole records: noise on a sum over a batch, clipped updates, and no protection at all.

k is 1 if a record is added, removed or made null, and 2 if one is replaced (its sum moves by 2 C). The numbers come
from `opusim.accounting.numerics`; what cannot be computed raises `NoGuarantee` or is infinite with a reason.

Under direct feedback alignment the update of record i is u_i = (s_i * phi'_i) (h_i, 1)^T at each layer and e_i (h_i,
1)^T at the output, a rank-one matrix, so ||u_i||^2 = sum_l ||s_l * phi'_l||^2 (||h_(l-1)||^2 + 1) is known without
forming it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Self

from typing_extensions import Doc

from opusim import checks
from opusim.accounting import numerics
from opusim.accounting.guarantee import Adjacency, Assumption, Unit
from opusim.accounting.mechanism import (
    Absent,
    CertifiedMechanism,
    CountsSums,
    DeviceNoise,
    ExactlyRounded,
    Mechanism,
    Positive,
    SamplingProbability,
    StatedRelation,
    counted,
    require_text,
)
from opusim.accounting.theorems import NO_MIXING, NOISY_SUM, SEED_IS_SECRET, Theorem, about_relation

_CHECKED = (
    "the noise of every step is fresh",
    "each record's contribution is clipped to norm C before the sum, across all layers together",
    "the sum is divided by a public constant, never by the batch's own size",
)
NEW_DRAWS = "every record enters every batch independently with probability q, by a new draw at each step"
STATED_DIVISOR = (
    "the sum is divided by the stated constant, never by a realised size, "
    "and an empty batch takes its noisy step"
)
OWN_READING = (
    "a record's reading depends on that record only: no automatic exposure, batch scaling or persistence"
)
STANDARDISED = "features are standardised, if at all, with public constants, not with statistics of the data"
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
    code="opusim.accounting.numerics.sampled_noise.gaussian_bounds",
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
    code="opusim.accounting.numerics.sampled_noise.noise_bounds",
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
    code="opusim.accounting.numerics.sampled_noise.noise_bounds",
    page="privacy-records.md, section 3",
    checked_by_code=(*_CHECKED, _SAMPLED),
    trusted=(*_TRUSTED, _SECRET_BATCHES),
)

CLIPPED_RECORDS = Theorem(
    name="clipped-records",
    title="Poisson-sampled Gaussian noise on clipped updates",
    statement="[sum over a secret Poisson(q) batch of v_i + N(0, (z C)^2)] / divisor is the Poisson-sampled Gaussian "
    "mechanism with multiplier z. v_i is the update u_i of record i, clipped to norm C: min(1, C / ||u_i||) u_i "
    "(flat), or by layer to norms C_l whose squares add up to C^2 (per_layer), or C u_i / (||u_i|| + s) with a "
    "constant s > 0 (automatic). For add_or_remove_one q, the number of steps, z and the divisor must be constants; "
    "for zero_out they may come from the number of records, which is then public; for replace_one the sum moves by "
    "up to 2 C.",
    proof="v_i depends on record i only and has norm at most C: the squares of the layers' norms add up, and ||u|| / "
    "(||u|| + s) is below 1. Fix the device's readings: a step is then a sum of contributions of norm at most C, and "
    "averaging over readings cannot raise a jointly convex divergence, so device noise before the clip neither harms "
    "nor helps. Dividing by a constant is post-processing. For zero_out every constant is the same for both data "
    "sets, and the null record contributes nothing. The rest is theorem sampled-gaussian.",
    reference="Abadi et al. 2016; Bu et al. 2023; Zhu, Dong and Wang 2022",
    code="opusim.accounting.mechanisms.records.RecordCentral",
    page="privacy-records.md, sections 1 and 2",
    checked_by_code=(
        NEW_DRAWS,
        STATED_DIVISOR,
        "each record's update is clipped to norm C over all layers by the stated rule, and a value that is not finite "
        "counts as 0",
        STANDARDISED,
        "the noise is fresh at each step, Gaussian, and not quantised before it is added",
    ),
    trusted=(
        "batches stay secret: realised sizes, frames, joules, step times and the sampler's state are not released",
        OWN_READING,
        f"a record's update does not depend on other records: {NO_MIXING}",
        SEED_IS_SECRET,
    ),
)
CLIPPED_USERS = Theorem(
    name="clipped-users",
    title="Poisson-sampled Gaussian noise on clipped updates of users",
    statement="[sum over the users of a secret Poisson(q) batch of v_i + N(0, (z C)^2)] / divisor, where v_i is the "
    "mean gradient of at most k records of user i, clipped to norm C by a rule of theorem clipped-records, is the "
    "Poisson-sampled Gaussian mechanism with multiplier z for a user with all its records. k has no influence on it. "
    "For add_or_remove_one q, the number of steps, z and the divisor must be constants; for zero_out they may come "
    "from the number of users, which is then public.",
    proof="Which k records of a user a step takes is drawn from that user's records only, so v_i is a random function "
    "of user i. Fix these draws: divergences are jointly convex, and those of the other users have the same law for "
    "both data sets. A step is then theorem clipped-records with users in the place of records.",
    reference="McMahan et al. 2018; Chua et al. 2024",
    code="opusim.accounting.mechanisms.records.RecordCentral",
    page="privacy-records.md, section 8",
    checked_by_code=(
        "every user enters every batch independently with probability q, by a new draw at each step",
        "at most k records of a user enter a step, chosen by a draw that sees no other user",
        "the mean gradient of a user's records is clipped once to norm C over all layers by the stated rule, and a "
        "value that is not finite counts as 0",
        *(CLIPPED_RECORDS.checked_by_code[n] for n in (1, 3, 4)),
    ),
    trusted=(
        "all records of a user carry the same ID, and a record belongs to one user only",
        *(
            text.replace(
                "a record's update does not depend on other records",
                "a record's gradient depends on no other",
            )
            for text in CLIPPED_RECORDS.trusted
        ),
    ),
)

BANDED_RECORDS = Theorem(
    name="banded-records",
    title="Banded noise on clipped updates from cyclic Poisson batches",
    statement="Let C be lower triangular with C_(t+k, t) = c_k for 0 <= k < b, and 0 elsewhere. T steps release [sum "
    "over the batch of v_i + row t of inverse(C) Z] / divisor, where v_i is the update of record i, clipped to norm "
    "L by a rule of theorem clipped-records, and Z has independent entries of N(0, (z L)^2). Each record is in one "
    "of b subsets by a uniform coin of its own, and step t draws each record of subset t mod b with probability b q. "
    "All steps together are dominated by ceil(T / b) releases of the Poisson(b q)-sampled Gaussian mechanism with "
    "multiplier z / |c|, where |c| is the largest norm of a column of C, for the relations of theorem "
    "clipped-records.",
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
    code="opusim.accounting.mechanisms.records.ClippedRecords",
    page="privacy-records.md, section 7",
    checked_by_code=(
        "every record is in one of b subsets by a uniform coin of its own, and no number of records shapes a subset",
        "step t draws each record of subset t mod b independently with probability b q, and no other record",
        STATED_DIVISOR,
        "each record's update is clipped to norm L over all layers by the stated rule, the same at every step, and a "
        "value that is not finite counts as 0",
        STANDARDISED,
        "the rows of Z are fresh at each step and Gaussian; a run that resumes in release mode begins C anew and pays "
        "for that",
    ),
    trusted=CLIPPED_RECORDS.trusted,
)


def _adaptive(base: Theorem, unit: str) -> Theorem:
    """Return the theorem for a bound that follows from released counts, of records or of users."""
    return replace(
        base,
        name=f"adaptive-{base.name}",
        title=f"Poisson-sampled Gaussian noise on updates of {unit}s, clipped to a bound that released counts move",
        statement="Step t releases [sum over a secret Poisson(q) batch of min(1, C_t / ||u_i||) u_i + N(0, (z_s "
        "C_t)^2)] / divisor, and the sum over the same batch of b_i + N(0, (r z)^2), where b_i is 1/2 if the update "
        f"u_i of {unit} i has norm at most C_t, and else -1/2. r > 1/2, z_s = z / sqrt(1 - 1 / (2 r)^2), and C_t is a "
        "function of earlier releases and of constants. Both together are the Poisson-sampled Gaussian mechanism "
        f"with multiplier z, under the relations of theorem {base.name}.",
        proof="Given the earlier releases C_t is a constant. Divide both sums by the standard deviations of their "
        f"noise: a {unit} then adds a vector with the square 1 / z_s^2 + 1 / (2 r z)^2 = 1 / z^2 at most, and the "
        "noise is standard in every direction. Dominating pairs compose adaptively, so C_t may depend on earlier "
        f"releases. The rest is theorem {base.name}.",
        reference="Andrew et al. 2021; Zhu, Dong and Wang 2022",
        checked_by_code=(
            *base.checked_by_code,
            f"every step, also one without {unit}s, releases the count of {unit}s below the bound with noise of its "
            "own, exactly rounded, and the ledger's multiplier counts it",
            "the bound of a step follows from constants and from counts that were released before, also in a run that "
            "was resumed",
        ),
    )


ADAPTIVE_RECORDS, ADAPTIVE_USERS = _adaptive(CLIPPED_RECORDS, "record"), _adaptive(CLIPPED_USERS, "user")

CLIPPINGS = ("flat", "per_layer", "automatic", "adaptive")
"""Rules that bring a record's update within norm C."""
_LEAST_COUNT_NOISE = 0.6
"""Least ratio of a count's noise to the multiplier: at 1/2 nothing is left for the sum."""


def share_of_sum(count_noise: float) -> float:
    """Return z / z_s = sqrt(1 - 1 / (2 r)^2), the share of the sum's precision left if a count is released with it.

    r is the count's noise over z; raises ValueError if it is out of its range.
    """
    checks.in_range(_LEAST_COUNT_NOISE, 1e6, count_noise=count_noise)
    return math.sqrt(1 - 0.25 / count_noise**2) * (1 - 2.0**-40)  # rounded down: more noise on the sum


@dataclass(frozen=True, kw_only=True)
class AdditiveNoise(Mechanism, joint=True):
    """Noise on a sum of contributions of norm at most C. Subclasses say which; all of one relation compose.

    A subclass implements `describe`, names its `theorem`, and has a `noise_law` or implements `as_noise`.
    """

    adjacency: Annotated[
        Adjacency,
        Doc(
            "add or remove a record, or replace it by a null record (the sum moves by C), or by another (by 2 C)."
        ),
    ] = Adjacency.ADD_OR_REMOVE_ONE

    def known_batch(self) -> Self:
        """Return the same mechanism with q = 1; itself if its batch is all records."""
        changes: dict[str, Any] = (
            {"sampling_probability": 1.0} if hasattr(self, "sampling_probability") else {}
        )
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class PoissonGaussian(AdditiveNoise):
    """Sum over a Poisson batch of vectors with norm at most C, plus N(0, (z C)^2) in every coordinate."""

    noise_multiplier: Annotated[Positive, Doc("z, above 0: standard deviation over C.")]
    sampling_probability: SamplingProbability

    kind: ClassVar[str] = "poisson_gaussian"
    noise_field: ClassVar[str | None] = "noise_multiplier"
    noise_law = "gaussian"
    theorem = SAMPLED_GAUSSIAN

    def describe(self) -> str:
        """Return what ran, in a few words."""
        return (
            f"Gaussian noise, multiplier {self.noise_multiplier:g}, on Poisson batches "
            f"(q = {self.sampling_probability:g}), {counted(self.steps, 'step')}"
        )


@dataclass(frozen=True, kw_only=True)
class Gaussian(AdditiveNoise):
    """Sum over all records of vectors with norm at most C, plus N(0, (z C)^2) in every coordinate: no sampling."""

    noise_multiplier: Annotated[Positive, Doc("z, above 0: standard deviation over C.")]

    kind: ClassVar[str] = "gaussian"
    noise_field: ClassVar[str | None] = "noise_multiplier"
    noise_law = "gaussian"
    theorem = GAUSSIAN

    def describe(self) -> str:
        """Return what ran, in a few words."""
        return f"Gaussian noise, multiplier {self.noise_multiplier:g}, on all records, {counted(self.steps, 'step')}"


@dataclass(frozen=True, kw_only=True)
class PoissonLaplace(AdditiveNoise):
    """Sum over a Poisson batch of scalars of size at most C, plus Laplace noise of scale b C."""

    scale: Annotated[Positive, Doc("b, above 0: the Laplace scale over C.")]
    sampling_probability: SamplingProbability

    kind: ClassVar[str] = "poisson_laplace"
    noise_field: ClassVar[str | None] = "scale"
    noise_law = "laplace"
    theorem = SAMPLED_LAPLACE

    def describe(self) -> str:
        """Return what ran, in a few words."""
        return (
            f"Laplace noise, scale {self.scale:g}, on Poisson batches (q = {self.sampling_probability:g}), "
            f"{counted(self.steps, 'step')}"
        )


_ROUNDING = 1e-12
"""Rounding error of bands times a probability that should be 1, at most."""


def require_bands(bands: int, probability: float) -> None:
    """Refuse (ValueError) more bands b than 1 / q, the average number of steps between two draws of a record.

    Noise is correlated over b steps, and the records are divided into b random subsets; q averages over these.
    """
    if bands * probability > 1 + _ROUNDING:
        raise ValueError(
            f"bands = {bands}: times the sampling probability {probability:g} is {bands * probability:.4g}, but a step "
            "draws each record of its subset with that probability, so it must be at most 1; take at most "
            f"{int(1 / probability)} bands, or smaller batches"
        )


def _require_correlation(**coefficients: tuple[float, ...]) -> None:
    for name, values in coefficients.items():
        if not values or not all(math.isfinite(value) for value in values) or values[0] <= 0:
            raise ValueError(
                f"{name} = {values}: must be finite numbers, the first above 0; give 1 for independent noise"
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
            "Coefficient c_0, c_1, ...: one for each step (band) over which the noise is correlated; by default 1, for "
            "independent noise. Each step draws from one of `bands` subsets of the records, with probability bands q."
        ),
        _require_correlation,
        Absent((1.0,)),
    ] = (1.0,)
    exactly_rounded: ExactlyRounded = False
    counts_sums: CountsSums = False
    clipping: Annotated[
        str,
        Doc(
            "How an update is brought within clip_norm: flat, per_layer, automatic, or adaptive, whose first bound is "
            "clip_norm."
        ),
        Absent("flat"),
    ] = "flat"
    count_noise: Annotated[
        float | None,
        Doc(
            "r, for adaptive clipping: noise of the count of records below the bound, divided by noise_multiplier."
        ),
        share_of_sum,
        Absent(None),
    ] = None

    noise_field: ClassVar[str | None] = "noise_multiplier"
    audited: ClassVar[bool] = True
    rounded: ClassVar[str | None] = NOISY_SUM

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "correlation", tuple(map(float, self.correlation)))
        require_bands(self.bands, self.sampling_probability)
        checks.choice(CLIPPINGS, clipping=self.clipping)
        if (self.clipping == "adaptive") != (self.count_noise is not None):
            raise ValueError(
                f"count_noise = {self.count_noise} under clipping = {self.clipping!r}: is for 'adaptive', which needs "
                "it; give both or neither"
            )
        if self.clipping == "adaptive" and self.bands > 1:
            raise ValueError(
                f"clipping = 'adaptive': noise that is correlated over {self.bands} steps needs the same bound at "
                "each; take another clipping, or leave the correlation out"
            )

    @property
    def additive(self) -> bool:
        """See Mechanism.additive; the last of ceil(steps / b) releases may be a part."""
        return self.bands == 1

    @property
    def theorem(self) -> Theorem:
        """The theorem that proves its guarantee."""
        if self.clipping == "adaptive":
            return ADAPTIVE_RECORDS
        return CLIPPED_RECORDS if self.bands == 1 else BANDED_RECORDS

    @property
    def is_rounded(self) -> bool:
        """See Mechanism.is_rounded; rows of correlated noise are not rounded."""
        return super().is_rounded and self.bands == 1

    @classmethod
    def circumstances(
        cls, mechanisms: Sequence[Self], adjacency: Adjacency, *, enforced: bool
    ) -> tuple[Assumption, ...]:
        """Return what is assumed of the number of records, then of rounding."""
        return (
            *about_relation(adjacency, enforced=enforced, unit=mechanisms[0].unit),
            *cls.about_rounding(mechanisms, enforced=enforced),
        )

    @property
    def bands(self) -> int:
        """Number of steps over which the noise is correlated: 1 for independent noise."""
        return len(self.correlation)

    def describe(self) -> str:
        """Return what ran, in a few words."""
        batches = "Poisson batches" if self.bands == 1 else f"cyclic Poisson batches of {self.bands} subsets"
        over = "" if self.bands == 1 else f" correlated over {self.bands} steps"
        return (
            f"records {self._clipped}, {'device' if self.device_noise else 'Gaussian'} noise{over} with "
            f"multiplier {self.noise_multiplier:g}, {batches} (q = {self.sampling_probability:g}), "
            f"{counted(self.steps, 'step')}, divided by {self.divisor:g}"
        )

    @property
    def _clipped(self) -> str:
        return {
            "per_layer": f"clipped by layer, to {self.clip_norm:g} over all",
            "automatic": f"scaled below {self.clip_norm:g}",
            "adaptive": f"clipped to a bound that noisy counts move, which are released too (count noise "
            f"{self.count_noise or 0:g} of the multiplier), from {self.clip_norm:g}",
        }.get(self.clipping, f"clipped to {self.clip_norm:g}")

    @property
    def public_records(self) -> float | None:
        """The divisor over q: the number of records whose batches have the divisor's size on average."""
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
    """Clipping and central noise: [sum over a Poisson batch of clipped updates + N(0, (z C)^2)] / divisor.

    With `records_per_user` the batch is one of users, and an update is the mean gradient of a user's records.
    """

    relation: StatedRelation = Adjacency.ADD_OR_REMOVE_ONE
    records_per_user: Annotated[
        int | None,
        Doc(
            "k, the most records of a user that a step uses, if users are drawn and clipped; None for records."
        ),
        partial(checks.integer, minimum=1),
        Absent(None),
    ] = None

    kind: ClassVar[str] = "record_central"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.records_per_user is not None:
            if self.bands > 1:
                raise ValueError(
                    f"records_per_user = {self.records_per_user}: no theorem covers users under noise that is "
                    f"correlated over {self.bands} steps; leave the correlation out"
                )
            # of the instance only: the class decides what composes
            object.__setattr__(self, "unit", Unit.USER)

    @property
    def theorem(self) -> Theorem:
        """See ClippedRecords.theorem."""
        if self.records_per_user is None:
            return super().theorem
        return ADAPTIVE_USERS if self.clipping == "adaptive" else CLIPPED_USERS

    def describe(self) -> str:
        """Return what ran, in a few words."""
        found, most = super().describe(), self.records_per_user
        return found if most is None else f"users (at most {counted(most, 'record')} each a step){found[7:]}"


@dataclass(frozen=True, kw_only=True)
class RecordReplaced(ClippedRecords):
    """Per-record clipping and central noise on Poisson batches, for replacing a record; every update is released.

    Replacing a record moves a batch's sum by up to 2 C.
    """

    kind: ClassVar[str] = "record_replaced"
    priced: ClassVar[bool] = False


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
    adjacency = Adjacency.ADD_OR_REMOVE_ONE
    refuted = "records are neither clipped nor covered by central noise; protect them with --protect record"

    def describe(self) -> str:
        """Return what ran, in a few words."""
        return f"{self.what}, {counted(self.steps, 'step')}"
