"""Whole records: per-record clipping and Gaussian noise on the sum.

Under direct feedback alignment the update of record i is u_i = (s_i * phi'_i) (h_i, 1)^T at each layer and
e_i (h_i, 1)^T at the output, a rank-one matrix, so ||u_i||^2 = sum_l ||s_l * phi'_l||^2 (||h_(l-1)||^2 + 1) is known
without forming it. A step releases [sum over a Poisson(q) batch of min(1, C / ||u_i||) u_i + N(0, (z C)^2)] / divisor:
the Poisson-subsampled Gaussian. Device noise inside a record's reading does no harm (fix all readings; the divergence
is jointly convex), provided that the reading depends on that record alone.
Source: docs/privacy.md, section 3; Abadi et al. 2016 for the mechanism.
"""

from __future__ import annotations

from collections.abc import Sequence

from accounting.convex.mechanisms import RecordReplaced
from accounting.guarantee import Adjacency, Guarantee
from accounting.mechanisms import PoissonGaussian
from accounting.records.mechanisms import ClippedRecords, RecordCentral
from accounting.standard import noise_bounds
from accounting.statement import about_relation, proven_guarantee, spend_certificates, stated, weaker

_CHECKED = (
    "every record enters every batch independently with probability q, drawn afresh at each step",
    "the sum is divided by the stated constant, never by a realised size, and an empty batch takes its noisy step",
    "one factor min(1, C / norm) over all layers clips each record's update, and a value that is not finite counts "
    "as 0",
    "the features were standardised with public constants, not with statistics of the data",
    "the noise is fresh at each step, Gaussian, and not quantised before it is added",
)
_TRUSTED = (
    "batches stay secret: realised sizes, frames, joules, step times and the sampler's state are not released",
    "a record's reading depends on that record alone: no automatic exposure, batch scaling or persistence",
    "neither the noise nor its seed is revealed, and nobody attacks the rounding of floating-point numbers",
)
_DEVICE_LAW = (
    "the device's noise is Gaussian, independent of data and between entries, at least as strong as stated"
)


def guarantees(
    mechanisms: Sequence[RecordCentral], *, delta: float, enforced: bool = False
) -> list[Guarantee]:
    """Epsilon of all steps together in both directions; zero_out unless all are for add_or_remove_one.

    Args:
        mechanisms: At least one.
        delta: In [0, 1); what the certificates of device noise may fail with is taken off first.
        enforced: Whether the training code checked what code can check.
    """
    relation = weaker(mechanism.relation for mechanism in mechanisms)
    return _guarantees(mechanisms, relation, delta, enforced)


def replaced_guarantees(
    mechanisms: Sequence[RecordReplaced], *, delta: float, enforced: bool = False
) -> list[Guarantee]:
    """Epsilon of all steps together, replace_one; arguments as for `guarantees`."""
    return _guarantees(mechanisms, Adjacency.REPLACE_ONE, delta, enforced)


def _guarantees(
    mechanisms: Sequence[ClippedRecords], adjacency: Adjacency, delta: float, enforced: bool
) -> list[Guarantee]:
    sampled = [_sampled(mechanism, adjacency) for mechanism in mechanisms]
    bounds, reason = spend_certificates(
        delta,
        [mechanism.beta for mechanism in mechanisms],
        lambda left: noise_bounds(sampled, adjacency, left),
    )
    device = any(mechanism.device_noise for mechanism in mechanisms)
    return [
        proven_guarantee(
            mechanisms,
            bounds=bounds,
            delta=delta,
            adjacency=adjacency,
            source="docs/privacy.md, section 3: Poisson-subsampled Gaussian on clipped updates (Abadi et al. 2016)",
            assumptions=(
                *stated(_CHECKED, (*_TRUSTED, _DEVICE_LAW) if device else _TRUSTED, enforced=enforced),
                *about_relation(adjacency, enforced=enforced),
            ),
            device_model=device,
            reason=reason,
        )
    ]


def _sampled(mechanism: ClippedRecords, adjacency: Adjacency) -> PoissonGaussian:
    return PoissonGaussian(
        noise_multiplier=mechanism.noise_multiplier,
        sampling_probability=mechanism.sampling_probability,
        steps=mechanism.steps,
        adjacency=adjacency,
    )
