"""The games of labels that are looked at once: randomized response, noisy readings, photon counts and their argmax.

Everything that training learns of the labels is one array, the log-likelihood of every class for each record. A
recipient of the run folder has that array, and no test of the two worlds is better than the likelihood ratio.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import torch

from accounting.composition import guarantees
from accounting.devices.counts import LabelCounts
from accounting.labels.mechanisms import LabelReadout, RandomizedResponse, StagedResponse
from accounting.mechanisms import Mechanism
from training.attacks.games.base import Adversary, TwoWorlds, crafted, same_labels
from training.engine.plan import RunPlan
from training.protections.noisy_labels import OneLookProtection, StagedResponseProtection
from training.protections.staged_responses import StagedResponses, drawn_parts

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
        if isinstance(accounted, LabelReadout) and self._plan.config.protection.noise == "device":
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
