"""Games of labels: those that are looked at once, and those that are protected at every step.

Looked at once (randomized response, noisy readings, photon counts and their argmax), everything that training learns of
the labels is one array, the log-likelihood of every class for each record. A recipient of the run folder has that
array, and no test of the two worlds is better than the likelihood ratio.

Protected at every step by secret batches, the auditor owns a layer and its records: record
i has the feature e_i and nothing else, so column i of the update holds its signal and noise only. A pass plays a run's
steps on all records at once, with the run's own sampler and the writer that its protection makes, and each record is a
trial. The signals of the two labels are opposite and as large as the protection lets through. The attacker sees every
update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accounting.composition import guarantees
from accounting.mechanisms import Mechanism
from accounting.mechanisms.counts import LabelCounts
from accounting.mechanisms.labels import LabelAmplified, LabelReadout, RandomizedResponse, StagedResponse
from training.attacks.games.base import Adversary, TwoWorlds, crafted, in_passes, same_labels
from training.engine.plan import RunPlan
from training.networks.contributions.sums import Contributions
from training.networks.contributions.uses import LinearUse
from training.networks.network import FullyConnected
from training.protections.amplified_labels import AmplifiedLabelProtection
from training.protections.base import PrivateGradients
from training.protections.config import LabelAmplifiedConfig
from training.protections.noisy_labels import (
    OneLookProtection,
    StagedResponseProtection,
    StagedResponses,
    drawn_parts,
)

_PAIR_DELTA = 1e-5
_LEAST_KNOWN = 2000
"""Least number of records of a part, from which the prior becomes clear."""
_PAST = 20261123
"""Seed of the parts and of the answers before the last part."""
_TITLES = {
    RandomizedResponse: "randomized response",
    StagedResponse: "randomized response in stages",
    LabelReadout: "one noisy reading of each label",
    LabelCounts: "photon counts of each label, kept",
}


class LookGame(TwoWorlds):
    """One record's label is a or b, the two that the look tells apart best.

    A look finds its noise, or its light, before it begins, so many labels are looked at together.

    Args:
        plan: A run whose labels are looked at once; its records are replaced by the auditor's.
        accounted: What the run is accounted as; None takes the plan's own mechanism.
    """

    together = 50_000

    def __init__(self, plan: RunPlan, accounted: Mechanism | None = None) -> None:
        self._plan = plan
        self.actual = _protection(plan).mechanism
        self.mechanism = self.actual if accounted is None else accounted
        self._labels = self._farthest()
        self.is_gaussian = isinstance(self.mechanism, LabelReadout)
        a, b = self._labels
        self.title = _TITLES.get(type(self.mechanism), "the brightest group of a camera's pixels")
        self.pair = f"a record's label is {a} or {b}"
        self.adversaries = (
            Adversary(
                name="likelihood ratio",
                sees="what the run keeps of every label: the log-likelihood of each class, given the reading or answer",
                knows="all features, all other labels, and the law of what is kept, its matrix included",
            ),
        )

    def scores(self, count: int, *, first: bool, seed: int) -> np.ndarray:
        """See TwoWorlds.scores; the whole data set has the label in question, and each record is a trial."""
        own, other = self._labels
        plan = self._plan.unchecked(seed=seed)
        labels = same_labels(count, own if first else other)
        plan = replace(
            plan, dataset=crafted(labels[:, None].float() * 0, labels, n_classes=plan.dataset.n_classes)
        )
        with plan.opened_device() as device:
            seen = _protection(plan).look(device, lambda mechanism: None).double().numpy()
        return np.asarray(seen[:, own] - seen[:, other])[None]

    def weakened(self) -> LookGame:
        """See TwoWorlds.weakened: the look at four times the epsilon."""
        epsilon = 4.0 * float(self._plan.config.protection.epsilon or 0.0)
        return type(self)(self._plan.unchecked(protection={"epsilon": epsilon}), self.mechanism)

    def _farthest(self) -> tuple[int, int]:
        """The two labels whose looks are farthest apart; 0 and 1 if all pairs are alike."""
        accounted, pairs = self.mechanism, list(permutations(range(self._plan.dataset.n_classes), 2))
        if isinstance(accounted, LabelCounts):
            return max(pairs, key=lambda pair: _epsilon_of_pair(accounted, pair))
        if isinstance(accounted, LabelReadout):
            with self._plan.opened_device() as device:
                codes = (
                    np.eye(2) if device is None else device.require("matrix").matrix().cpu().double().numpy()
                )
            return max(pairs, key=lambda pair: float(np.linalg.norm(codes[:, pair[0]] - codes[:, pair[1]])))
        return 0, 1


class StagedLookGame(LookGame):
    """The label of a record of the last part is 0 or 1; the attacker knows those of all earlier parts.

    All records have the same features, and earlier ones belong to class 0 and 1 in turn. So the prior of the last part
    leaves both likely, and an answer among these two tells most. The earlier parts answer alike in every pass, as the
    theorem holds for any past, and no trial's label reaches another trial, as all are in the last part. A record's
    prior enters its score less the prior of a record of the same features, which is known.

    Args:
        plan: A run whose labels are randomized in stages; its records are replaced by the auditor's.
        accounted: What the run is accounted as; None takes the plan's own mechanism.
    """

    def scores(self, count: int, *, first: bool, seed: int) -> np.ndarray:
        """See TwoWorlds.scores; each record of the last part is a trial."""
        protection = self._plan.unchecked(seed=seed).protection
        if not isinstance(protection, StagedResponseProtection):
            raise TypeError("plan: does not randomize labels in stages")
        mechanism, past = protection.mechanism, np.random.default_rng(_PAST)
        parts = drawn_parts(mechanism.stages * max(count, _LEAST_KNOWN), mechanism.stages, past)
        labels, known, trials = np.arange(len(parts) * len(parts[0])) % 2, parts[0][0], parts[-1]
        labels[trials] = 0 if first else 1
        responses = StagedResponses(torch.zeros(len(labels), 1), parts, mechanism)
        for source in (*[past] * (len(parts) - 1), protection.source()):
            responses.answer(labels, source)
        ratios, priors = (half[:, 0] - half[:, 1] for half in np.split(responses.kept, 2, axis=1))
        return np.asarray(ratios[trials] + priors[trials] - priors[known])[None, :count]


def _protection(plan: RunPlan) -> OneLookProtection:
    found = plan.protection
    if not isinstance(found, OneLookProtection):
        raise TypeError(
            f"plan: protection.kind = {plan.config.protection.kind!r} does not look at labels once"
        )
    return found


def _epsilon_of_pair(mechanism: LabelCounts, pair: tuple[int, int]) -> float:
    two = replace(mechanism, light=tuple(mechanism.light[label] for label in pair))
    return guarantees([two], delta=_PAIR_DELTA)[0].epsilon


# Labels that are protected at every step

RECORDS = 128
"""Records of a pass: few enough for small matrices, many enough for few passes."""
OPPOSITE = torch.tensor([0.5, -0.5])
"""The error of label 1 if both logits are equal; that of label 0 is its negative, and they are sqrt(2) apart."""
LARGE = 1e3


class AmplifiedGame(TwoWorlds):
    """Plays the run's steps on one layer of two outputs; every record enters each batch by the sampler's own coins.

    Args:
        plan: A run whose labels are protected by noise on its gradients.
        accounted: What the run is accounted as; None takes the plan's own mechanism.

    Raises:
        TypeError: The plan has another protection.
    """

    mechanism: LabelAmplified
    actual: LabelAmplified
    title = "secret batches and noise of a public covariance"
    adversaries = (
        Adversary(
            name="likelihood ratio",
            sees="every update",
            knows="all features and initial weights, all other labels, and the noise's covariance; the batches stay "
            "secret",
        ),
    )
    pair = "a record's label is 0 or 1, which send opposite signals"
    together = RECORDS

    def __init__(self, plan: RunPlan, accounted: LabelAmplified | None = None) -> None:
        self._plan, protection = plan, plan.protection
        if not isinstance(protection, AmplifiedLabelProtection):
            raise TypeError(
                f"plan: protection.kind = {plan.config.protection.kind!r} protects no labels at every step"
            )
        self.actual = protection.mechanism(protection.noise_multiplier).repeated(plan.total_steps)
        self.mechanism = self.actual if accounted is None else accounted

    def scores(self, count: int, *, first: bool, seed: int) -> np.ndarray:
        """See TwoWorlds.scores."""
        return in_passes(count, RECORDS, lambda own: self._pass(own, first=first), seed=seed)

    def weakened(self) -> AmplifiedGame:
        """See TwoWorlds.weakened: a quarter of the noise at every step."""
        quarter = self._plan.protection.noise_multiplier / 4
        return AmplifiedGame(self._plan.unchecked(protection={"noise_multiplier": quarter}), self.mechanism)

    def _pass(self, seed: int, *, first: bool) -> np.ndarray:
        """Scores of one pass, shape (adversaries, RECORDS)."""
        accounted, section = self.mechanism, self._plan.config.protection_as(LabelAmplifiedConfig)
        q, shift = accounted.sampling_probability, 1 / accounted.noise_multiplier
        plan = on_one_layer(self._plan, seed, {"scheme": "poisson", "sampling_probability": q})
        plan = plan.unchecked(protection={"divisor": 1.0, "reference_size": RECORDS})
        std = plan.protection.noise_multiplier * section.clip * math.sqrt(1 + section.floor)
        signals = (1 if first else -1) * LARGE * OPPOSITE.repeat(RECORDS, 1)
        found = np.zeros(RECORDS)
        with writer_of(plan) as writer:
            for step in range(accounted.steps):
                batch = plan.sampler.indices(step)
                seen = written(writer, plan, step, signals[batch], batch) / std
                found += _log_mixture(q, shift, seen) - _log_mixture(q, shift, -seen)
        return found[None]


def on_one_layer(plan: RunPlan, seed: int, sampler: Mapping[str, Any]) -> RunPlan:
    """Return a run on the auditor's layer of two outputs and its `RECORDS` records.

    Args:
        plan: The run.
        seed: Of its batches and noise.
        sampler: Keys of its sampler.
    """
    layer = torch.nn.Linear(RECORDS, len(OPPOSITE), bias=False)
    dataset = crafted(torch.eye(RECORDS), same_labels(RECORDS, 0), n_classes=len(OPPOSITE))
    plan = replace(plan, dataset=dataset, network=FullyConnected(torch.nn.Sequential(layer)))
    return plan.unchecked(seed=seed, sampler=sampler)


@contextmanager
def writer_of(plan: RunPlan) -> Iterator[PrivateGradients]:
    """Yield the writer of a plan's protection, which draws on the run's own device if that is credited."""
    with plan.unchecked(seed=plan.config.seed).opened_device() as device:
        writer = plan.protection.gradients(device)
        if writer is None:
            raise TypeError(f"plan: protection.kind = {plan.config.protection.kind!r} writes no gradients")
        yield writer


def _log_mixture(q: float, shift: float, x: np.ndarray) -> np.ndarray:
    """Return log of ((1 - q) N(0, 1) + q N(shift, 1)) / N(0, 1) at x."""
    absent = math.log1p(-q) if q < 1 else -np.inf
    return np.logaddexp(absent, math.log(q) + shift * x - shift**2 / 2)


def written(writer: PrivateGradients, plan: RunPlan, step: int, signals: Tensor, batch: Tensor) -> np.ndarray:
    """Write one step's gradient; return its part along the signals for each record, float64, shape (RECORDS,).

    Args:
        writer: The writer of `writer_of`.
        plan: The run of `on_one_layer`.
        step: The step's number.
        signals: Of the batch's records, shape (batch, 2).
        batch: Numbers of its records.
    """
    x = plan.dataset.train.x
    writer.seek(step)
    reference = writer.reference
    public = None if reference is None else [reference]
    (weight,) = plan.network.model.parameters()
    found = Contributions([([weight], [LinearUse(signals.clone(), x[batch], weight)])], len(batch))
    writer.set_gradients([found], records=batch, public_inputs=public)
    if weight.grad is None:
        raise TypeError("writer: wrote no gradient")
    gradient = weight.grad.double().numpy()  # (2, RECORDS)
    return (gradient[0] - gradient[1]) / 2**0.5
