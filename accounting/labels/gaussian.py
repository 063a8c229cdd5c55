"""Labels under Gaussian trade-offs: mechanisms that are mu-GDP each are sqrt(sum of mu^2)-GDP together.

Source: Dong, Roth and Su 2019, corollary 3.3; docs/privacy.md, sections 5 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from accounting.guarantee import Adjacency, Assumption, Guarantee
from accounting.labels.mechanisms import LabelBudget, LabelOnce
from accounting.standard import gaussian_bounds
from accounting.statement import proven_guarantee, spend_certificates


def label_guarantee(
    mechanisms: Sequence[LabelBudget | LabelOnce],
    *,
    delta: float,
    source: str,
    assumptions: tuple[Assumption, ...],
    device_model: bool,
) -> Guarantee:
    """epsilon(delta - sum of steps beta) of mu^2 = sum of steps / noise^2, replace_one.

    Args:
        mechanisms: At least one. A certificate's beta is charged at each of the steps.
        delta: In [0, 1).
        source: The theorem.
        assumptions: Its hypotheses.
        device_model: Whether a device's noise is credited.
    """
    mu = math.hypot(*(math.sqrt(one.steps) / one.noise for one in mechanisms))
    bounds, reason = spend_certificates(
        delta,
        [one.steps * one.beta for one in mechanisms],
        lambda left: gaussian_bounds(mu, left),
    )
    return proven_guarantee(
        mechanisms,
        bounds=bounds,
        delta=delta,
        adjacency=Adjacency.REPLACE_ONE,
        source=source,
        assumptions=assumptions,
        device_model=device_model,
        reason=reason,
    )
