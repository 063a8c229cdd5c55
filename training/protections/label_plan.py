"""How strong the noise of a label protection is: from the run's epsilon to mu, flips and noise multipliers."""

from __future__ import annotations

import math

from accounting.calibration import calibrate
from accounting.label_mechanisms import LabelBudget, LabelOnce
from accounting.mechanisms import RandomizedResponse
from training.config.run import RunConfig
from training.data.samplers import Sampler
from training.networks.network import FullyConnected
from training.protections.plan import total_steps

_SPENDING = 0.8
"""Share of a label budget that an average record is meant to spend; the rest is for records of high leverage."""


def label_budget(config: RunConfig) -> LabelBudget:
    """The budget of every record's label in the whole run."""
    found, _ = calibrate(
        LabelBudget(budget_mu=1.0, device_noise=config.protection.noise == "device"),
        target_epsilon=config.protection.epsilon or math.nan,
        delta=config.protection.delta,
    )
    return found


def label_mu(config: RunConfig) -> float:
    """Mu of one reading of every label."""
    found, _ = calibrate(
        LabelOnce(mu=1.0), target_epsilon=config.protection.epsilon or math.nan, delta=config.protection.delta
    )
    return found.mu


def label_response(config: RunConfig, n_classes: int) -> RandomizedResponse:
    """Randomized response at the run's epsilon."""
    found, _ = calibrate(
        RandomizedResponse.from_epsilon(1.0, n_classes),
        target_epsilon=config.protection.epsilon or math.nan,
        delta=config.protection.delta,
    )
    return found


def label_noise(config: RunConfig, network: FullyConnected, sampler: Sampler) -> float:
    """The noise multiplier z at which a record of average leverage spends a stated share of its budget by the end.

    The mean leverage in a batch of m is at most (fan_in + 1) / m, and mu^2 = 4 lev / z^2 for each layer and step.
    """
    batch = sampler.expected_batch_size
    fan_ins = [linear.in_features + (linear.bias is not None) for linear in network.linears]
    leverage = sum(min(1.0, fan_in / batch) for fan_in in fan_ins)
    visits = total_steps(config, sampler) * batch / sampler.n_records
    return 2 * math.sqrt(visits * leverage / _SPENDING) / label_budget(config).budget_mu
