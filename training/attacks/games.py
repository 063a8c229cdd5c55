"""A game of two worlds that differ in one label or record, played through a mechanism's own code, many trials at once.

The auditor crafts the data: they are as bad as the theorem allows, so that a sound and tight theorem is nearly reached.
A trial is one record's part in the release. Trials of a pass share nothing but public numbers: no record's label, coin
or noise reaches the numbers that another record's score is made of, so they are independent.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from opusim import checks
from opusim.accounting.audit import (
    AuditPlan,
    AuditResult,
    Estimate,
    Estimator,
    audit,
    audit_drawn_noise,
    estimated,
)
from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Guarantee
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.convex import ConvexLastIterate, learning_rates, proven_mu
from opusim.accounting.mechanisms.counts import LabelCounts
from opusim.accounting.mechanisms.labels import (
    LabelAmplified,
    LabelReadout,
    LabelRelease,
    RandomizedResponse,
    StagedResponse,
)
from opusim.accounting.one_run import Law
from opusim.randomness.streams import derive_seed
from opusim.training.attacks.base import Adversary, crafted
from opusim.training.attacks.findings import Role
from opusim.training.convex.trainer import GatedNetwork, GatedRelu
from opusim.training.engine.plan import RunPlan
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.networks.contributions.uses import LinearUse
from opusim.training.networks.network import FullyConnected
from opusim.training.networks.optimizers import set_learning_rate
from opusim.training.protections.amplified_labels import AmplifiedLabelProtection
from opusim.training.protections.base import PrivateGradients, Protection
from opusim.training.protections.noisy_labels import (
    OneLookProtection,
    StagedResponseProtection,
    StagedResponses,
    drawn_parts,
)
from opusim.training.protections.record import LastIterateProtection
from opusim.training.protections.released_model import LabelReleaseProtection

PARTS = 20
"""Parts in which the trials of a world are played, so that a progress bar moves."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """What one adversary reached.

    Attributes:
        adversary: Who.
        first: Its scores of trials of the first world, shape (n,).
        second: Those of the second world, shape (n,).
        bound: The lower bound on epsilon that holds for any mechanism.
        gaussian: The lower bound under the Gaussian law that a theorem gives, or None without one.
        drawn: The lower bound from the noise that was drawn, or None if scores without noise are not known.
    """

    adversary: Adversary
    first: np.ndarray
    second: np.ndarray
    bound: AuditResult
    gaussian: AuditResult | None
    drawn: AuditResult | None = None

    @property
    def law(self) -> Law:
        """What a theorem says of the release."""
        return Law.ANY if self.gaussian is None else Law.GAUSSIAN

    @property
    def best(self) -> AuditResult:
        """The largest of the bounds."""
        found = [each for each in (self.bound, self.gaussian, self.drawn) if each is not None]
        return max(found, key=lambda result: result.epsilon_lower)

    @property
    def estimate(self) -> Estimate:
        """What the scores say at face value, under the Gaussian law if there is one."""
        return estimated(self.first, self.second, self.gaussian or self.bound)


class TwoWorlds(ABC):
    """A game: a mechanism with its proven guarantee, two neighbouring worlds, and adversaries.

    Attributes:
        title: The mechanism in a few words.
        pair: The two worlds.
        mechanism: What the run is accounted as.
        actual: What the game's code releases: `mechanism`, or one with much less noise after `weakened`.
        adversaries: Who looks at each trial.
        is_gaussian: Whether a theorem says that the release is mu-GDP.
        together: Trials that one pass plays.
    """

    title: str
    pair: str
    mechanism: Mechanism
    actual: Mechanism
    adversaries: tuple[Adversary, ...]
    is_gaussian: bool = False
    together: int = 1

    def scores(self, count: int, *, first: bool, seed: int) -> np.ndarray:
        """Play at least one trial in one world, by default in passes; return scores, shape (adversaries, count).

        Games of different seeds in [0, 2^63) share no randomness; a release run's mechanism ignores the seed.
        """
        return in_passes(count, self.together, lambda own: self._pass(own, first=first), seed=seed)

    def _pass(self, seed: int, *, first: bool) -> np.ndarray:
        """Return the scores of one pass, shape (adversaries, together)."""
        raise NotImplementedError(f"{type(self).__name__} must override _pass, or scores")

    def values(self) -> tuple[float, float] | None:
        """Return the score of each world without noise, if all trials of a world have one and Gaussian noise is added.

        The noise that was drawn is then known, and shows its deviation; None for any other game, and for several
        adversaries.
        """
        return None

    @abstractmethod
    def weakened(self) -> TwoWorlds:
        """Return the same game on the same code with much less noise, which the guarantee no longer covers."""

    def guarantee(self, delta: float) -> Guarantee:
        """Return the proven guarantee of the mechanism."""
        return guarantees([self.mechanism], delta=delta)[0]

    def true_epsilon(self, delta: float) -> float:
        """Return the proven epsilon of what the game's code releases, which a weakened game exceeds `guarantee` by."""
        return guarantees([self.actual], delta=delta)[0].epsilon


def played(
    game: TwoWorlds,
    *,
    trials: int,
    seed: int,
    delta: float,
    null: bool = False,
    on_trials: Callable[[int], None] = lambda count: None,
) -> list[Played]:
    """Play a game of at least 40 trials; return what each adversary reached at delta.

    With `null` the second world is the first one again, so that there is nothing to find. `on_trials` is called with
    the number of trials done since its last call. The seed, in [0, 2^63), repeats a game whose mechanism takes seeds.
    """
    checks.integer(minimum=40, trials=trials)
    count, worlds = trials // 2, []
    share = max(game.together, -(-count // PARTS // game.together) * game.together)  # whole passes
    for first in (True, False):
        own, scores = derive_seed(seed, "world", int(first)), []
        for number, size in enumerate(min(share, count - start) for start in range(0, count, share)):
            part = derive_seed(own, "part", number) >> 1
            scores.append(game.scores(size, first=first or null, seed=part))
            on_trials(size)
        worlds.append(np.concatenate(scores, axis=1))
    with_law = game.is_gaussian and delta > 0
    values = game.values() if with_law else None
    estimators = [Estimator.CLOPPER_PEARSON]
    if with_law:
        estimators.append(Estimator.GAUSSIAN)
    if values is not None:
        values = (values[0], values[0]) if null else values
        estimators.append(Estimator.DRAWN_NOISE)
    error = (Role.NULL if null else Role.RUN).error
    confidence = 1 - error / (len(game.adversaries) * len(estimators))
    found = []
    for adversary, one, other in zip(game.adversaries, *worlds, strict=True):
        plans = [
            AuditPlan(
                threat_model=adversary.threat_model,
                pair=game.pair,
                delta=delta,
                confidence=confidence,
                estimator=estimator,
                mechanism_law="gaussian" if game.is_gaussian else None,
                seed=derive_seed(seed, "halves") >> 1,
            )
            for estimator in estimators
        ]
        results = [audit(one, other, plan) for plan in plans[: 1 + with_law]]
        found.append(
            Played(
                adversary=adversary,
                first=one,
                second=other,
                bound=results[0],
                gaussian=results[1] if with_law else None,
                drawn=None if values is None else audit_drawn_noise(one, other, values, plans[-1]),
            )
        )
    return found


def protected(plan: RunPlan, kind: type) -> Any:
    """Return the protection of a run, which must be of this class."""
    checks.instance(kind, protection=plan.protection)
    return plan.protection


def in_passes(count: int, size: int, play: Callable[[int], np.ndarray], *, seed: int) -> np.ndarray:
    """Return the scores of passes of `size` trials each, cut to `count`, shape (adversaries, count)."""
    passes = -(-count // size)
    scores = [play(derive_seed(seed, "pass", number) >> 1) for number in range(passes)]
    return np.concatenate(scores, axis=1)[:, :count]


# Labels that are looked at once (randomized response, noisy readings, photon counts and their argmax): everything that
# training learns of the labels is one array, the log-likelihood of every class for each record. A recipient of the run
# folder has that array, and no test of the two worlds is better than the likelihood ratio.

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

    A look finds its noise, or its light, before it begins, so many labels are looked at together. As in every game on a
    run's labels or last model, the plan is the run, whose records are replaced by the auditor's, and `accounted` is
    what it is accounted as, by default the plan's own mechanism.
    """

    together = 50_000

    def __init__(self, plan: RunPlan, accounted: Mechanism | None = None) -> None:
        self._plan = plan
        self.actual = protected(plan, OneLookProtection).mechanism
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

    @override
    def scores(self, count: int, *, first: bool, seed: int) -> np.ndarray:
        # the whole data set has the label in question, and each record is a trial
        own, other = self._labels
        plan = self._plan.unchecked(seed=seed)
        labels = torch.full((count,), own if first else other)
        plan = replace(
            plan, dataset=crafted(labels[:, None].float() * 0, labels, n_classes=plan.dataset.n_classes)
        )
        with plan.opened_device() as device:
            seen = protected(plan, OneLookProtection).look(device, lambda mechanism: None).double().numpy()
        return np.asarray(seen[:, own] - seen[:, other])[None]

    @override
    def weakened(self) -> LookGame:
        # the look at four times the epsilon
        epsilon = 4.0 * float(self._plan.protection.options.epsilon or 0.0)
        return type(self)(self._plan.unchecked(protection={"epsilon": epsilon}), self.mechanism)

    def _farthest(self) -> tuple[int, int]:
        """The two labels whose looks are farthest apart; 0 and 1 if all pairs are alike."""
        accounted, pairs = self.mechanism, list(permutations(range(self._plan.dataset.n_classes), 2))
        if isinstance(accounted, LabelCounts):
            of_two = {
                pair: replace(accounted, light=tuple(accounted.light[label] for label in pair))
                for pair in pairs
            }
            return max(pairs, key=lambda pair: guarantees([of_two[pair]], delta=_PAIR_DELTA)[0].epsilon)
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
    """

    @override
    def scores(self, count: int, *, first: bool, seed: int) -> np.ndarray:
        # each record of the last part is a trial
        protection = protected(self._plan.unchecked(seed=seed), StagedResponseProtection)
        mechanism, past = protection.mechanism, np.random.default_rng(_PAST)
        parts = drawn_parts(mechanism.stages * max(count, _LEAST_KNOWN), mechanism.stages, past)
        labels, known, trials = np.arange(len(parts) * len(parts[0])) % 2, parts[0][0], parts[-1]
        labels[trials] = 0 if first else 1
        responses = StagedResponses(torch.zeros(len(labels), 1), parts, mechanism)
        for source in (*[past] * (len(parts) - 1), protection.source()):
            responses.answer(labels, source)
        ratios, priors = (half[:, 0] - half[:, 1] for half in np.split(responses.kept, 2, axis=1))
        return np.asarray(ratios[trials] + priors[trials] - priors[known])[None, :count]


# Labels that are protected at every step by secret batches: the auditor owns a layer and its records. Record i has the
# feature e_i and nothing else, so column i of the update holds its signal and noise only. A pass plays a run's steps on
# all records at once, with the run's own sampler and the writer that its protection makes, and each record is a trial.
# The signals of the two labels are opposite and as large as the protection lets through. The attacker sees every
# update.

RECORDS = 128
"""Records of a pass, or whose labels are attacked in one model: few enough for small matrices, and for few passes."""
OPPOSITE = torch.tensor([0.5, -0.5])
"""The error of label 1 if both logits are equal; that of label 0 is its negative, and they are sqrt(2) apart."""
LARGE = 1e3


class AmplifiedGame(TwoWorlds):
    """Plays the run's steps on one layer of two outputs; every record enters each batch by the sampler's own coins."""

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
        self._plan, protection = plan, protected(plan, AmplifiedLabelProtection)
        self.actual = protection.mechanism(protection.noise_multiplier).repeated(plan.total_steps)
        self.mechanism = self.actual if accounted is None else accounted

    @override
    def weakened(self) -> AmplifiedGame:
        # a quarter of the noise at every step
        quarter = self._plan.protection.noise_multiplier / 4
        return AmplifiedGame(self._plan.unchecked(protection={"noise_multiplier": quarter}), self.mechanism)

    @override
    def _pass(self, seed: int, *, first: bool) -> np.ndarray:
        accounted, section = self.mechanism, self._plan.protection.options
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
    """Return a run on the auditor's layer of two outputs and its `RECORDS` records, with these keys of its sampler."""
    layer = torch.nn.Linear(RECORDS, len(OPPOSITE), bias=False)
    dataset = crafted(torch.eye(RECORDS), torch.zeros(RECORDS).long(), n_classes=len(OPPOSITE))
    plan = replace(plan, dataset=dataset, network=FullyConnected(torch.nn.Sequential(layer)))
    return plan.unchecked(seed=seed, sampler=sampler)


@contextmanager
def writer_of(plan: RunPlan) -> Iterator[PrivateGradients]:
    """Yield the writer of a plan's protection, which draws on the run's own device if that is credited."""
    with plan.opened_device() as device:
        writer = plan.protection.gradients(device)
        if writer is None:
            raise TypeError(f"plan: protection.kind = {plan.protection.options.kind!r} writes no gradients")
        yield writer


def _log_mixture(q: float, shift: float, x: np.ndarray) -> np.ndarray:
    """Return log of ((1 - q) N(0, 1) + q N(shift, 1)) / N(0, 1) at x."""
    absent = math.log1p(-q) if q < 1 else -np.inf
    return np.logaddexp(absent, math.log(q) + shift * x - shift**2 / 2)


def written(writer: PrivateGradients, plan: RunPlan, step: int, signals: Tensor, batch: Tensor) -> np.ndarray:
    """Write one step's gradient; return its part along the signals for each record, float64, shape (RECORDS,).

    The batch's records have signals of shape (batch, 2); writer and plan are those of `writer_of` and `on_one_layer`.
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


# One noisy linear model of public features: a record's label is a or b, and the attacker sees the model.
#
# The auditor owns the features: record i is R e_i, and as many records again are 0, half of them with either label, so
# that they add nothing to the difference of two columns. The model is a function of the noisy sums and public numbers,
# and they are one of the model, so the attacker sees them. A label moves them along g_i = w_i L^-1 h_i, and the noise
# is independent N(0, sigma^2) in every direction. The likelihood ratio of the two labels is a function of the sum along
# g_i in the column of a less that in the column of b.
#
# The g_i of different records share the constant feature and are almost orthogonal. The attacker reads along the
# orthonormal directions that are nearest to them, the rows of (G G^T)^(-1/2) G, and subtracts what the labels of all
# other records add, which it knows. So trials of one model are independent, and each loses less than 1e-6 of its
# signal.

_LENGTH = 1e3
"""R: so long that the constant feature, which all records share, is next to nothing."""


class ReleasedModelGame(TwoWorlds):
    """One record's label is 0 or 1, and the noisy linear model of all labels, its noise over `louder`, is released."""

    title = "one noisy linear model of public features"
    pair = "a record's label is 0 or 1"
    is_gaussian = True
    together = RECORDS
    mechanism: LabelRelease
    actual: LabelRelease
    adversaries = (
        Adversary(
            name="likelihood ratio",
            sees="the released model",
            knows="all features, the weights and the factor of the design, and all other labels",
        ),
    )

    def __init__(self, plan: RunPlan, accounted: LabelRelease | None = None, *, louder: float = 1.0) -> None:
        protection = protected(plan, LabelReleaseProtection)
        self.mechanism = protection.mechanism if accounted is None else accounted
        self._mu = louder * protection.mechanism.mu
        self.actual = replace(self.mechanism, mu=self._mu)
        self._louder = louder
        x = torch.cat([_LENGTH * torch.eye(RECORDS), torch.zeros(RECORDS, RECORDS)])
        dataset = crafted(x, torch.arange(len(x)) % 2, n_classes=plan.dataset.n_classes)
        self._plan = replace(plan, dataset=dataset)
        self._design = protection.design(x)
        whitened = self._design.metric.whiten(torch.cat([x, torch.ones(len(x), 1)], dim=1).double())
        self._shares = self._design.weights[:RECORDS, None] * whitened[:RECORDS]  # g_i, shape (RECORDS, d)
        left, _, right = torch.linalg.svd(self._shares, full_matrices=False)
        self._directions = left @ right  # (G G^T)^(-1/2) G
        others = self._shares @ self._directions.t()  # what record i adds to the reading of j
        self._from_others = others.sum(dim=0) - others.diagonal()

    @override
    def weakened(self) -> ReleasedModelGame:
        # a quarter of the noise
        return ReleasedModelGame(self._plan, self.mechanism, louder=4 * self._louder)

    @override
    def _pass(self, seed: int, *, first: bool) -> np.ndarray:
        # a pass is one model
        plan = self._plan.unchecked(seed=seed)
        x, y = plan.dataset.train.x, plan.dataset.train.y.clone()
        y[:RECORDS] = 0 if first else 1
        protection = protected(plan, LabelReleaseProtection)
        with plan.opened_device() as device:
            noisy, _ = protection.drawn(self._design, x, y, mu=self._mu, device=device)
        seen = (noisy[0] - noisy[1]) @ self._directions.t()  # difference of two columns along each direction
        known = self._from_others if first else -self._from_others
        return np.asarray((seen - known).numpy())[None]


# The last iterate

TRIALS = 256
"""Records of a batch, each a trial. The bound does not depend on their number."""
LEAN = 50.0
"""Logit that the second feature gives a record, far beyond every residual's bound."""
_SHARE = 1e-3
"""s, the share of a record's features that tells which residual it has."""


class LastIterateGame(TwoWorlds):
    """One record of a fixed batch is one of two with opposite residuals, in every epoch.

    The auditor owns the records. Trial i has two features of its own, e_i and f_i. Its record is c e_i + s f_i with
    label 1 or c e_i - s f_i with label 0, s small, and the public initial weights of f_i are so large that the two
    records' residuals are opposite, and at their bound from the first step to the last. Then the weights of e_i
    follow the linear recursion that the theorem's bound is made of: v <- (1 - eta lambda) v -+ (eta / b) c C +
    noise. All other records of the run have another feature. The attacker sees the last weights. It also knows the
    noise that was drawn before the record was first used: the theorem holds for any weights at that step, and so
    counts no noise before it. Without this knowledge noise that the theorem does not count would hide that later
    noise is missing.

    Runs without noise tell the score of each world, so the noise that was drawn is known of every trial.

    Args:
        plan: A run of convex training that releases its last model only.
        accounted: What the run is accounted as; None takes the plan's own mechanism.
        position: The batch that the record is in, from 0; None takes the one that tells most.
        lean: Logit that the second feature gives a record. A small one leaves the residuals within their bound, where
            they depend on the model.
    """

    title = "last iterate of noisy gradient descent with fixed batches"
    pair = "a record is x with label 1, or x' next to it with label 0, whose residuals are opposite"
    is_gaussian = True
    together = TRIALS
    mechanism: ConvexLastIterate
    actual: ConvexLastIterate
    adversaries = (
        Adversary(
            name="last weights",
            sees="the last model only",
            knows="all other records, the batches, all constants, the initial weights, and the noise that was drawn "
            "before the record was first used",
        ),
    )

    def __init__(
        self,
        plan: RunPlan,
        accounted: ConvexLastIterate | None = None,
        *,
        position: int | None = None,
        lean: float = LEAN,
    ) -> None:
        self._plan, self._lean = plan, lean
        protection = protected(plan, LastIterateProtection)
        self.actual = protection.algorithm.mechanism(protection.noise_multiplier)
        self.mechanism = self.actual if accounted is None else accounted
        self._position = int(np.argmax(self.exact_mus())) if position is None else position
        self._values: tuple[float, float] | None = None

    def exact_mus(self) -> np.ndarray:
        """Return mu of the linear instance for each batch that the record may be in, shape (batches,).

        It is the distance of the two means over the standard deviation of the noise from the record's first use on,
        both in closed form.
        """
        own = self.actual
        rates = learning_rates(own)
        # from a step to the end
        kept = np.append(np.cumprod((1 - rates * own.regularisation)[::-1])[::-1][1:], 1.0)
        noises = rates * own.noise_multiplier
        noises[-1] = math.hypot(noises[-1], own.final_noise * own.learning_rate * own.noise_multiplier)
        distance = (2 * rates * kept).reshape(own.epochs, own.batches).sum(axis=0)
        later = np.cumsum(((noises * kept) ** 2)[::-1])[::-1][: own.batches]  # from a step on
        return np.asarray(distance / np.sqrt(later))

    @property
    def exact_share(self) -> float:
        """Mu of the linear instance over what is proven, at most 1."""
        return float(self.exact_mus()[self._position] / proven_mu(self.actual))

    @override
    def values(self) -> tuple[float, float] | None:
        # residuals that depend on the model make trials differ
        if self._lean < LEAN:
            return None
        if self._values is None:
            first, second = (float(self._pass(0, first=world, noisy=False).mean()) for world in (True, False))
            self._values = first, second
        return self._values

    @override
    def weakened(self) -> LastIterateGame:
        # a quarter of the noise at every step
        quarter = self._plan.protection.noise_multiplier / 4
        plan = self._plan.unchecked(protection={"noise_multiplier": quarter})
        return LastIterateGame(plan, self.mechanism, position=self._position, lean=self._lean)

    @override
    def _pass(self, seed: int, *, first: bool, noisy: bool = True) -> np.ndarray:
        # a pass is a whole run on `TRIALS` trials
        plan = self._crafted(seed, first=first)
        if not noisy:
            plan = plan.unchecked(protection={"noise_multiplier": 0.0, "noise": "digital"})
        train = plan.dataset.train
        with self._plan.unchecked(seed=seed).opened_device() as device:
            trainer = plan.algorithm.trainer(device)
            weights = plan.network.tensors["weight"]  # of e_i: rows below TRIALS
            for step in range(plan.total_steps):
                if step == self._position:
                    drawn_before = _difference(weights)
                set_learning_rate(trainer.optimizer, plan.algorithm.config.optimizer, step / plan.total_steps)
                batch = plan.sampler.indices(step)
                trainer.step(train.x[batch], train.y[batch], step=step)
        later = learning_rates(self.actual)[self._position :]
        kept = float(np.prod(1 - later * self.actual.regularisation))
        return np.asarray(_difference(weights) - kept * drawn_before)[None]

    def _crafted(self, seed: int, *, first: bool) -> RunPlan:
        """Return the run on the auditor's records and initial weights."""
        k, classes = self.actual.batches, self._plan.dataset.n_classes
        x = torch.zeros(k * TRIALS, 2 * TRIALS + 1)
        x[:, -1] = 1.0
        mine = torch.arange(TRIALS) + self._position * TRIALS  # the sampler takes records in their order
        side = 1.0 if first else -1.0
        x[mine] = torch.cat(
            [
                math.sqrt(1 - _SHARE**2) * torch.eye(TRIALS),
                side * _SHARE * torch.eye(TRIALS),
                torch.zeros(TRIALS, 1),
            ],
            dim=1,
        )
        y = torch.zeros(len(x), dtype=torch.int64)
        y[mine] = 1 if first else 0
        model = GatedRelu(x.shape[1], classes, torch.zeros(1, x.shape[1]), centre=False)
        decay = float(np.prod(1 - learning_rates(self.actual) * self.actual.regularisation))
        start = self._lean / _SHARE / max(abs(decay), 1e-6)
        model.weight.data[TRIALS : 2 * TRIALS, 0, 0] = start
        model.weight.data[TRIALS : 2 * TRIALS, 0, 1] = -start
        plan = replace(self._plan, dataset=crafted(x, y, n_classes=classes), network=GatedNetwork(model))
        return plan.unchecked(
            seed=seed,
            trainer={"hyperplanes": 1, "centre": False, "gates": "seed"},
            sampler={"scheme": "disjoint-cyclic", "batch_size": TRIALS},
        )


def _difference(weights: torch.Tensor) -> np.ndarray:
    """Return the weights of each e_i for class 1 less those for class 0, float64, shape (TRIALS,)."""
    found = weights.detach()[:TRIALS, 0].double().numpy()
    return np.asarray(found[:, 1] - found[:, 0])


_GAMES: tuple[tuple[type[Protection], Callable[[RunPlan], TwoWorlds]], ...] = (
    (LabelReleaseProtection, ReleasedModelGame),
    (StagedResponseProtection, StagedLookGame),
    (OneLookProtection, LookGame),
    (AmplifiedLabelProtection, AmplifiedGame),
    (LastIterateProtection, LastIterateGame),
)


def game_of(plan: RunPlan) -> TwoWorlds | None:
    """Return the game that audits a run whose guarantee is about labels or its last model; None of any other run."""
    return next((game(plan) for kind, game in _GAMES if isinstance(plan.protection, kind)), None)
