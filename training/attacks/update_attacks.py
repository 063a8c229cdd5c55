"""Attacks on an update: from the weights before and after a step, tell whether a record was in its batch.

The row-space attack needs the least knowledge and the least computation; the covariance and the difference attack also
know all other records of the batch and can compute the step without noise (`replay`). Their laws stand in the classes.
Source: docs/privacy-records.md, section 4 (whole records have no guarantee at any sigma).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from opusim.training.attacks.base import (
    Attack,
    Candidates,
    Observation,
    OuterProducts,
    Records,
    Trial,
    layer_gradient,
)
from opusim.training.attacks.replay import NoiselessStep
from opusim.training.networks.clipping import ActivationClipping
from opusim.training.networks.network import FullyConnected
from opusim.training.protections.base import with_constant

_MIN_RESIDUAL = 1e-17
"""Smaller residuals score like this one."""
_SPARE_DIRECTIONS = 8
"""Random combinations of rows beyond the expected rank."""
_REFINEMENTS = 2
"""Subspace iterations."""
_MAX_MULTIPLICATIONS = 1e10
"""Limits the rows that a covariance trial looks at."""
_MAX_NUMBERS = 1e7
"""Numbers held at once while the covariances are factored."""
_RIDGE = 1e-7
"""Ridge of a covariance relative to its mean diagonal, invisible in a float32 update."""
_SUM_TOLERANCE = 0.01
"""Most by which a step's own update may miss the difference of two batches' updates, relative to its norm. Float32
weights round the difference by about a tenth of this."""
_TESTS = 4
"""Simulated steps on which the attacker tests that a record's update is what it takes it for."""
_MIN_NORM = 1e-30
"""Keeps quotients of norms finite."""
_MAX_LOG_RATIO = 30.0
"""No number of trials distinguishes larger log ratios. Without noise a larger ratio is one of rounding errors."""

_Groups: TypeAlias = list[list[Tensor]]
"""Vectors of the parameters of each group."""


class RowSpaceAttack(Attack):
    """Look for a record's input in the row space of the first layer's update.

    The gradient of layer 1 is (1/m) sum_i delta_i (h_i, 1)^T for any noise in delta_i: its rows are combinations of the
    batch's inputs. If m is below the fan-in and at most the width, they span all of them, so that a member's input lies
    in the row space and another record's does not. The score is -log10 of the relative norm of the part of the record's
    input outside the row space. The clipping of inputs in the update is public.
    """

    name = "row space"
    knows = (
        "the candidate's features and the batch's size, but no other record, neither the device nor its noise"
    )

    def __init__(self, clipping: ActivationClipping, *, width: int, depth: int, bias: bool) -> None:
        self._clipping, self._width, self._depth, self._bias = clipping, width, depth, bias

    @override
    def score(self, observation: Observation, candidates: Candidates) -> float:
        h = self._clipping(candidates.member.x, layer=0, depth=self._depth, n_layer=self._width)
        size = observation.batch_size
        basis = self.once(observation, "rows", lambda: row_space(observation.gradient(0), size))
        outside = residual(with_constant(h, bias=self._bias)[0], basis)
        return -math.log10(max(outside, _MIN_RESIDUAL))

    def figure(self, score: float) -> str:
        """Return the relative residual."""
        return f"residual {10**-score:.2g}"


def row_space(gradient: Tensor, rank: int) -> Tensor:
    """Return an orthonormal basis, shape (fan_in, at most rank + 8), that contains the span of the rows up to rounding.

    Slightly more random combinations of the rows than the expected rank, the batch size, span the same space (Halko,
    Martinsson, Tropp 2011); the spare directions are rounding errors. Subspace iterations average the rounding errors
    over all rows.
    """
    n, fan_in = gradient.shape
    wanted = min(n, rank + _SPARE_DIRECTIONS, fan_in)
    if wanted == n:
        return torch.linalg.qr(gradient.t()).Q
    generator = torch.Generator().manual_seed(0)  # the attacker's own randomness, not secret
    mixing = torch.randn(n, wanted, generator=generator, dtype=gradient.dtype).to(gradient.device)
    basis = torch.linalg.qr(gradient.t() @ mixing).Q
    for _ in range(_REFINEMENTS):
        basis = torch.linalg.qr(gradient.t() @ torch.linalg.qr(gradient @ basis).Q).Q
    return basis


def residual(h: Tensor, basis: Tensor) -> float:
    """Return the norm of the part of h outside the span of an orthonormal basis, relative to |h|; 0 for h = 0."""
    exact = h.double()
    norm = float(exact.norm())
    return float((exact - basis @ (basis.t() @ exact)).norm()) / norm if norm else 0.0


class CovarianceAttack(Attack):
    """Compute the likelihood ratio of the first layer's rows, whose noise a record widens along its own input.

    Without the signals, row j of the first layer's summed update is y_j ~ N(0, sigma^2 A_j) without the candidate, with
    A_j = sum_i phi'_ij^2 h_i h_i^T over the others, and N(w_j h, sigma^2 (A_j + phi'_j^2 h h^T)) with it, where w_j is
    the candidate's signal. With a_j = phi'_j^2 h^T A_j^-1 h, p_j = phi'_j h^T A_j^-1 y_j / sigma and
    u_j = w_j / (phi'_j sigma),

        log-likelihood ratio = sum_j [p_j u_j - u_j^2 a_j / 2 + (p_j - u_j a_j)^2 / (2 (1 + a_j)) - log(1 + a_j) / 2].

    sigma is estimated from the rows, and a_j does not depend on it: more noise hides nothing. This attack serves
    batches above the fan-in, for which the row space says nothing.

    Args:
        noiseless: Computes the signals.
        clipping: Clipping of the inputs in the update.
        through_clip: Whether clipped neurons have slope 0.
        depth: Layers of the network.
        bias: Whether the first layer has a bias.
    """

    name = "covariance"
    centre = 0.0
    knows = "all other records of the batch, the candidate, the weights and the device's matrix, not sigma"

    def __init__(
        self,
        noiseless: NoiselessStep[FullyConnected],
        clipping: ActivationClipping,
        *,
        through_clip: bool,
        depth: int,
        bias: bool,
    ) -> None:
        self._shadow, self._clipping, self._through_clip = noiseless, clipping, through_clip
        self._depth, self._bias = depth, bias

    @override
    def score(self, observation: Observation, candidates: Candidates) -> float:
        # if a record is replaced, the ratio of the two records
        score = self._ratio(observation, candidates.member)
        return (
            score
            if candidates.replacement is None
            else score - self._ratio(observation, candidates.replacement)
        )

    def _ratio(self, observation: Observation, record: Records) -> float:
        def others() -> Rows:
            known = self._sum(observation, observation.others)
            left = observation.gradient(0) * observation.batch_size - known
            return Rows(left, *self._layer(observation, observation.others))

        h, slope = self._layer(observation, record)
        own = self._sum(observation, record)
        signal = own @ h[0] / h[0].square().sum()  # w_j, shape (n,)
        rows: Rows = self.once(observation, "rows", others)
        return rows.log_likelihood_ratio(h[0], slope[0], signal)

    def _sum(self, observation: Observation, records: Records) -> Tensor:
        """Return the first layer's summed update without noise; the run averages over its batch."""
        gradients = self._shadow.gradients(observation.before, records, step=observation.step)
        return layer_gradient(gradients, 0) * len(records.x)

    def _layer(self, observation: Observation, records: Records) -> tuple[Tensor, Tensor]:
        """Return the inputs as the first layer's update takes them, and its slopes phi'_1, float64, shape (n, n_1)."""
        network = self._shadow.network_at(observation.before)
        forward = network.forward(records.x)
        slopes = torch.ones_like(forward.pre_activations[0])
        slopes = network.multiply_by_derivative(slopes, forward, 0, through_clip=self._through_clip).double()
        h = self._clipping(records.x, layer=0, depth=self._depth, n_layer=slopes.shape[1])
        return with_constant(h, bias=self._bias).double(), slopes


class Rows:
    """Rows y_j of an update without the others' signals, (n, d), and the others' h_i, (m, d), and phi'_ij, (m, n)."""

    def __init__(self, left: Tensor, inputs: Tensor, slopes: Tensor) -> None:
        m, d = inputs.shape
        self._n = min(len(left), max(int(_MAX_MULTIPLICATIONS // (m * d * d + d**3 // 3)), 1))
        self._left, factors = left[: self._n], []
        for part in slopes[:, : self._n].t().split(max(int(_MAX_NUMBERS // (m * d)), 1)):
            scaled = part[:, :, None] * inputs  # (rows, m, d)
            gram = scaled.transpose(1, 2) @ scaled  # A_j, with a ridge
            diagonal = gram.diagonal(dim1=1, dim2=2)
            diagonal.add_(_RIDGE * diagonal.mean(dim=1, keepdim=True) + 1e-300)
            factors.append(torch.linalg.cholesky(gram))
        self._factors = torch.cat(factors)  # (n, d, d)
        self._whitened = self._solve(self._left[:, :, None])[:, :, 0]  # A_j^-1 y_j, (n, d)
        self._sigma = ((self._left * self._whitened).sum() / (d * self._n)).sqrt().clamp_min(1e-300)

    def log_likelihood_ratio(self, h: Tensor, slope: Tensor, signal: Tensor) -> float:
        """Return the log-likelihood ratio of a batch with and without input h, shape (d,); see CovarianceAttack.

        Slopes phi'_j and signals w_j have shape (n,).
        """
        leverage = (self._solve(h.expand(self._n, -1)[:, :, None])[:, :, 0] * h).sum(dim=1)  # (n,)
        slope, signal = slope[: self._n], signal[: self._n]
        a, p = slope.square() * leverage, slope * (self._whitened @ h) / self._sigma
        u = torch.where(slope == 0, 0.0, signal / slope / self._sigma)
        terms = p * u - u * u * a / 2 + (p - u * a).square() / (2 * (1 + a)) - torch.log1p(a) / 2
        return float(terms.sum())

    def _solve(self, right: Tensor) -> Tensor:
        return torch.cholesky_solve(right, self._factors)


class DifferenceAttack(Attack):
    """Compute the update of both worlds, and the likelihood ratio of the released update between them.

    For a group of parameters let g be the released gradient, g_0 and g_1 those of the second and the first world
    without the credited noise, and d = g_1 - g_0. For Gaussian noise of variance v in every direction,

        log likelihood ratio = sum over groups of (<g - k g_0, k d> - ||k d||^2 / 2) / v.

    Layers differ in their noise (a device adds noise only to hidden layers), so the attacker estimates each group's v
    and k from simulated steps of the second world: k = sum <g, g_0> / sum ||g_0||^2, below 1 if a device's noise
    lengthens what is clipped, and v is the mean of <g - k g_0, d>^2 / ||d||^2. All other randomness of a step
    (directions, probes of a likelihood ratio) counts as public, since no guarantee rests on it.

    If a batch's update is the sum of its records' own updates, as protected records with a fixed divisor make it, d is
    the candidate's own update, and a step on one record gives it. If a record's update is an outer product in each
    layer, the inner products follow from what `KeptTerms` keeps. The attacker tests both on its first simulated
    steps and computes whole batches if a test ever fails, so a divisor that depends on the batch does not escape it.

    Args:
        noiseless: Computes updates without the credited noise.
        groups: Names of the attacked parameters, in groups with the same noise; a group must not have so much noise
            that it hides the others.
    """

    name = "difference"
    centre = 0.0
    knows = "all other records of the batch, the candidate, the weights, the device's matrix and every public seed"

    def __init__(self, noiseless: NoiselessStep[Any], *, groups: Sequence[Sequence[str]]) -> None:
        self._shadow, self._groups = noiseless, groups
        self._learnt: list[np.ndarray] = []
        self.adds_up: bool | None = None
        """Whether updates were sums over records in every simulated step, or None before any."""
        self.has_terms: bool | None = None
        """Whether they were the sums of the records' outer products in every simulated step, or None before any."""

    @override
    def learn(self, trial: Trial) -> None:
        # estimate k and v of the groups, and test whether updates are sums over records
        observation, candidates = trial.observation, trial.candidates
        tested = len(self._learnt) >= _TESTS
        known: tuple[Sequence[Any], Sequence[Any]] | None = None
        if tested and self.has_terms:
            known = self._terms(observation, candidates)
        if known is not None:
            released = self._released(observation, rounded=True)
        else:
            released = self._released(observation)
            absent, step = known = self._worlds(observation, candidates)
            if self.has_terms is not False:
                terms = self._terms(observation, candidates)
                bias = [len(group) > 1 for group in self._groups]
                self.has_terms = terms is not None and all(
                    _close([one.parts(bias=own) for one, own in zip(found, bias, strict=True)], whole)
                    for found, whole in zip(terms, (absent, step), strict=True)
                )
            if self.adds_up is not False:
                self.adds_up = self.has_terms or _close(self._sums(observation, candidates)[1], step)
        others = _dots(known[0], released), _dots(known[0], known[0])
        self._learnt.append(np.stack([*_products(released, *known), *others]))

    @override
    def score(self, observation: Observation, candidates: Candidates) -> float:
        known: tuple[Sequence[Any], Sequence[Any]] | None = None
        if self.has_terms:
            known = self._terms(observation, candidates)
        released = self._released(observation, rounded=known is not None)
        if known is None:
            worlds = self._sums if self.adds_up else self._worlds
            known = worlds(observation, candidates)
        released_step, others_step, step = _products(released, *known)
        k = v = np.ones(len(self._groups))  # before anything was learnt
        if self._learnt:
            learnt = np.stack(self._learnt, axis=1)  # of shape (5, steps, groups)
            k = np.clip(learnt[3].sum(axis=0) / np.maximum(learnt[4].sum(axis=0), _MIN_NORM), 0.0, 1.0)
            squares = (learnt[0] - k * learnt[1]) ** 2 / np.maximum(learnt[2], _MIN_NORM)
            v = np.maximum(squares.mean(axis=0), _MIN_NORM)
        ratio = float(np.sum((k * (released_step - k * others_step) - k**2 * step / 2) / v))
        return min(max(ratio, -_MAX_LOG_RATIO), _MAX_LOG_RATIO)

    def figure(self, score: float) -> str:
        """Return the log ratio."""
        return f"log ratio {score:.2g}"

    def _terms(
        self, observation: Observation, candidates: Candidates
    ) -> tuple[list[OuterProducts], list[OuterProducts]] | None:
        """Return g_0 and d of each layer as outer products, or None if they are none."""
        weights, replacement = observation.before, candidates.replacement
        absent = self.once(observation, "terms", lambda: self._shadow.terms(weights, observation.others))
        step = self._shadow.terms(weights, candidates.member)
        if absent is None or step is None or len(step) != len(self._groups):
            return None
        if replacement is None:
            return absent, step
        other = self._shadow.terms(weights, replacement)
        if other is None:
            return None
        return (
            [without.with_products(away) for without, away in zip(absent, other, strict=True)],
            [one.with_products(away, -1.0) for one, away in zip(step, other, strict=True)],
        )

    def _worlds(self, observation: Observation, candidates: Candidates) -> tuple[_Groups, _Groups]:
        """Return g_0 and d from the updates of both worlds' batches."""
        others, replacement = observation.others, candidates.replacement
        absent = self._known(observation)
        if replacement is not None:
            absent = self._update(observation, others.followed_by(replacement))
        present = self._update(observation, others.followed_by(candidates.member))
        return absent, _added(present, absent, -1)

    def _sums(self, observation: Observation, candidates: Candidates) -> tuple[_Groups, _Groups]:
        """Return g_0 and d from the others' update and those of single records."""
        others = self._known(observation)
        step = self._update(observation, candidates.member)
        if candidates.replacement is None:
            return others, step
        replacement = self._update(observation, candidates.replacement)
        return _added(others, replacement, 1), _added(step, replacement, -1)

    def _released(self, observation: Observation, *, rounded: bool = False) -> _Groups:
        """Return the released update, float64, or rounded to the parameters' own type."""
        make = observation.rounded_gradients if rounded else observation.gradients
        found: _Groups = self.once(observation, f"released {rounded}", lambda: self._grouped(make()))
        return found

    def _known(self, observation: Observation) -> _Groups:
        """Return the update of the others."""
        others = observation.others
        found: _Groups = self.once(observation, "others", lambda: self._update(observation, others))
        return found

    def _update(self, observation: Observation, records: Records) -> _Groups:
        return self._grouped(self._shadow.gradients(observation.before, records, step=observation.step))

    def _grouped(self, gradients: Mapping[str, Tensor]) -> _Groups:
        """Return the parameters of each group as vectors."""
        return [[gradients[name].flatten() for name in names] for names in self._groups]


def _products(released: _Groups, absent: Sequence[Any], step: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """Return <g, d>, <g_0, d> and ||d||^2 of each group."""
    return _dots(step, released), _dots(absent, step), _dots(step, step)


def _dots(first: Sequence[Any], second: Sequence[Any]) -> np.ndarray:
    """Return the inner products of groups; each is a list of vectors or, of a layer, outer products."""
    found = []
    for one, other in zip(first, second, strict=True):
        if not isinstance(one, OuterProducts):
            found.append(sum(float(a @ b) for a, b in zip(one, other, strict=True)))
        else:
            found.append(one.dot(other) if isinstance(other, OuterProducts) else one.dot_parts(other))
    return np.array(found)


def _added(first: Sequence[Sequence[Tensor]], second: _Groups, factor: int) -> _Groups:
    """Return first + factor second."""
    return [
        [torch.add(a, b, alpha=factor) for a, b in zip(one, other, strict=True)]
        for one, other in zip(first, second, strict=True)
    ]


def _close(first: Sequence[Sequence[Tensor]], second: _Groups) -> bool:
    """Return whether every group's difference is small relative to the second's norm."""
    apart = _added(first, second, -1)
    return bool((_dots(apart, apart) <= _SUM_TOLERANCE**2 * _dots(second, second)).all())
