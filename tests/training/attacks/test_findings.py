"""What a finding of an audit says in a few words."""

from __future__ import annotations

import numpy as np
import pytest

from accounting.audit import AuditPlan, audit
from accounting.guarantee import Adjacency, Guarantee, Release, Status, Unit
from training.attacks.findings import Finding, Role

DELTA = 1e-5
CLAIM = Guarantee(
    epsilon=1.0,
    delta=DELTA,
    unit=Unit.RECORD,
    adjacency=Adjacency.ZERO_OUT,
    release=Release.EVERY_UPDATE,
    status=Status.PROVEN,
    mechanism="test",
    source="test",
)


@pytest.mark.parametrize(
    ("scores", "gap", "says"),
    [
        (20, 9.0, "too few trials to exceed 1"),  # a perfect attack, whose bound ends below the claim
        (200, 9.0, "found, as required"),
        (200, 0.0, "not found by this attack"),
    ],
)
def test_a_broken_control_says_why_it_was_not_found(scores: int, gap: float, says: str) -> None:
    generator = np.random.default_rng(1)
    outside = generator.random(scores)
    plan = AuditPlan(threat_model="sees the update", pair="in or out", delta=DELTA)
    result = audit(outside[::-1] + gap, outside, plan)
    finding = Finding(
        role=Role.BROKEN, attack="difference", members="", others="", auc=1.0, result=result, claim=CLAIM
    )
    assert finding.says == says
