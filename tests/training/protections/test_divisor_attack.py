"""Membership read off the scale of the noise, if a divisor depends on the private records (arXiv 2605.15648)."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from opusim.accounting.audit import AuditPlan, AuditResult, Verdict, audit
from opusim.accounting.mechanisms.records import RecordCentral
from opusim.randomness.streams import SeededStream
from opusim.training.networks.network import FullyConnected
from opusim.training.protections.record import RecordGradients
from tests.support.faults import NAMED

MULTIPLIER, DELTA, BATCH, TRIALS = 2.0, 1e-5, 20, 400


def attack(*, noise: SeededStream) -> AuditResult:
    """Tell a batch of 21 records from one of 20, by the noise in 10,100 weights.

    The records' gradients are zero, so that only the divisor can tell. The attacker takes smaller noise for a larger
    batch.
    """
    network = FullyConnected(nn.Sequential(nn.Linear(100, 100)))
    writer = RecordGradients(clip_norm=1.0, noise_multiplier=MULTIPLIER, divisor=float(BATCH), noise=noise)

    def score(records: int) -> float:
        writer.set_gradients([network.contributions([torch.zeros(records, 100)], [torch.ones(records, 100)])])
        return -float(sum(p.grad.square().sum() for p in network.layer_parameters(0)))

    worlds = [np.array([score(records) for _ in range(TRIALS)]) for records in (BATCH + 1, BATCH)]
    plan = AuditPlan(threat_model="one update", pair="a record added", delta=DELTA, confidence=1 - 1e-6)
    return audit(*worlds, plan)


@pytest.mark.parametrize("at_fault", [False, True])
def test_noise_tells_the_size_of_a_batch_only_if_the_divisor_does(at_fault: bool) -> None:
    """With n records a constant divisor gives nothing; the batch's own size gives more than the step's epsilon."""
    facts = {"noise_multiplier": MULTIPLIER, "sampling_probability": 1.0, "clip_norm": 1.0}
    step = RecordCentral(**facts, divisor=float(BATCH))
    (claim,) = RecordCentral.guarantees([step], delta=DELTA, enforced=True)
    with NAMED["divided_by_realised_size"].planted() if at_fault else nullcontext():
        found = attack(noise=SeededStream(24, "test"))
    assert (found.verdict(claim) is Verdict.REFUTED) == at_fault
    assert (found.epsilon_lower == found.ceiling) == at_fault
