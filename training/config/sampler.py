"""How records are drawn into batches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from training.config.section import Section


class SamplerConfig(Section):
    """How records are drawn into batches (see training.data.samplers)."""

    scheme: Literal[
        "shuffled-epochs", "poisson", "poisson-min-batch", "fixed-size", "disjoint-cyclic", "full-batch"
    ] = "shuffled-epochs"
    """Sampling scheme; an accountant asks for it by this name. Unless it is given, protection.kind = 'record' and
    'label-amplified' take poisson, and convex takes disjoint-cyclic otherwise."""
    batch_size: int = Field(256, ge=1)
    """Records in a batch (expected number under Poisson sampling); 250 by default for convex. Where
    sampling_probability is given it is only the default of protection.divisor."""
    sampling_probability: float | None = Field(None, gt=0.0, le=1.0)
    """q, with which each record enters a Poisson batch, and 1 / q steps an epoch; None takes batch_size over the number
    of training records. protection.relation = 'add_or_remove_one' needs it: there that number is private."""
    min_batch_size: int | None = Field(None, ge=1)
    """Smallest batch that poisson-min-batch accepts."""
    drop_last: bool = False
    """Leave out the last, shorter batch of an epoch (shuffled-epochs only)."""
