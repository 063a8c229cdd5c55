"""Randomized responses in stages: those of each part of the records choose among which classes the next part answers.

The first part answers by k-ary randomized response. Then, part after part, a model of all responses so far predicts
every record's class from its features, and a label is randomized among the likeliest classes of the prediction. A
model sees features, which are public, and responses, never a label; every label is randomized once.
Source: Ghazi, Golowich, Kumar, Manurangsi and Zhang 2021, algorithms 2 and 3; docs/privacy-labels.md, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from opusim.accounting.mechanisms.labels import (
    StagedResponse,
    UniformSource,
    among_log_likelihood,
    among_targets,
    respond_among,
    telling_labels,
)
from opusim.training.networks.clipping import full_precision

LEAST_PART = 10
"""Least number of records of a part; every tenth is held out of its model."""
MOST_FEATURES = 16_384
"""Largest number of features: a model holds three matrices of its square, 6 GiB at this number."""
_LEAST_PRIOR = float(np.finfo(np.float32).tiny)
_ROWS = 4096
"""Records of one matrix product."""
_RIDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_SHARPNESSES = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
"""Between these ridges, and factors of a regression's output, held-out responses choose."""


def drawn_parts(n_records: int, stages: int, source: UniformSource) -> list[np.ndarray]:
    """Return the numbers of the records of each part, drawn at random; every record is in one of them.

    Args:
        n_records: n.
        stages: Number of parts; their sizes differ by at most 1.
        source: Of random numbers; the parts need not be secret.
    """
    return np.array_split(np.argsort(source.random((n_records,)), kind="stable"), stages)


class StagedResponses:
    """The responses of one part of the records after the other; the caller has paid for them.

    Args:
        x: Public features, shape (n, d).
        parts: What `drawn_parts` returned.
        mechanism: What is paid for.

    Attributes:
        kept: The log-likelihood of every class, and behind it the logarithm of the last prior, float64, shape (n, 2 k).

    Raises:
        ValueError: The parts do not hold every record once: a label would be randomized twice, or never.
    """

    def __init__(self, x: Tensor, parts: Sequence[np.ndarray], mechanism: StagedResponse) -> None:
        if not np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(x))):
            raise ValueError(
                "parts: must hold every record once, or a label would be randomized twice or never"
            )
        k = mechanism.n_classes
        self._left, self._epsilon = list(parts), mechanism.step_epsilon
        self._model = ResponseModel(x, k)
        self.kept = np.full((len(x), 2 * k), -math.log(k))

    def answer(self, labels: np.ndarray, source: UniformSource) -> None:
        """Randomize the labels of the next part among those that the responses so far make likely.

        Args:
            labels: Class numbers of all records, shape (n,); those of other parts are not looked at.
            source: Of randomness; the operating system's own for a release.
        """
        part, epsilon, k = self._left.pop(0), self._epsilon, self.kept.shape[1] // 2
        priors = self._model.priors()
        among = telling_labels(priors[part], epsilon=epsilon)
        observed = respond_among(labels[part], among, epsilon=epsilon, generator=source)
        scores = among_log_likelihood(observed, among, epsilon=epsilon)
        self.kept[part, :k], self.kept[:, k:] = scores, np.log(np.maximum(priors, _LEAST_PRIOR))
        if self._left:
            self._model.add(part, *among_targets(observed, among, priors[part], epsilon=epsilon), scores)


def randomize_in_stages(
    x: Tensor, labels: np.ndarray, mechanism: StagedResponse, source: UniformSource
) -> Tensor:
    """Randomize every label once, in parts drawn at random; see `StagedResponses`.

    Returns:
        What is kept of them, float32, shape (n, 2 k).
    """
    responses = StagedResponses(x, drawn_parts(len(x), mechanism.stages, source), mechanism)
    for _ in range(mechanism.stages):
        responses.answer(labels, source)
    return torch.from_numpy(responses.kept).float()


class ResponseModel:
    """What responses say of the class of every record: softmax(beta f), f a weighted ridge regression on the features.

    Ridge and beta are those under which the responses of held-out records are likeliest; f is then fitted to all.

    Args:
        x: Features of all records, shape (n, d); read in blocks, and not copied.
        n_classes: k.
    """

    def __init__(self, x: Tensor, n_classes: int) -> None:
        self._x, self._k = x, n_classes
        self._fitted, self._held = _Sums(x, n_classes), _Sums(x, n_classes)
        self._records: list[np.ndarray] = []
        self._scores: list[np.ndarray] = []

    def add(self, part: np.ndarray, targets: np.ndarray, weights: np.ndarray, scores: np.ndarray) -> None:
        """Take the responses of some records, in random order; every tenth is held out.

        Args:
            part: The numbers of the records, shape (m,).
            targets: See `among_targets`, shape (m, k).
            weights: Above 0, shape (m,).
            scores: The log-likelihood of every class, shape (m, k).
        """
        held = np.arange(len(part)) % LEAST_PART == 0
        for rows, sums in ((~held, self._fitted), (held, self._held)):
            sums.add(self._x, part[rows], targets[rows], weights[rows])
        self._records.append(part[held])
        self._scores.append(scores[held])

    def priors(self) -> np.ndarray:
        """Return the probabilities of the classes, shape (n, k); flat for records whose features are not finite.

        They are flat for all records before the first response.
        """
        everyone = np.arange(len(self._x))
        if not self._records:
            return np.full((len(everyone), self._k), 1 / self._k)
        records, scores = np.concatenate(self._records), torch.from_numpy(np.concatenate(self._scores))
        best = (-math.inf, _RIDGES[-1], 0.0)
        for ridge in _RIDGES:
            output = _predicted(self._x, self._fitted.solved(ridge), records)
            for beta in _SHARPNESSES:
                chances = torch.log_softmax(beta * output, dim=1) + scores
                best = max(best, (float(torch.logsumexp(chances, dim=1).mean()), ridge, beta))
        self._fitted.merge(self._held)
        self._held = _Sums(self._x, self._k)
        output = _predicted(self._x, self._fitted.solved(best[1]), everyone)
        return np.asarray(torch.softmax(best[2] * output, dim=1).numpy())


class _Sums:
    """Sums over some records: w h h^T and w h t^T, with the features and a constant 1 in h.

    Args:
        x: Features, shape (n, d).
        n_classes: k.
    """

    def __init__(self, x: Tensor, n_classes: int) -> None:
        width = x.shape[1] + 1
        self._squares = x.new_zeros((width, width), dtype=torch.float64)
        self._products = x.new_zeros((width, n_classes), dtype=torch.float64)

    def add(self, x: Tensor, records: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> None:
        """Add some records; products of blocks are formed in float32."""
        for start in range(0, len(records), _ROWS):
            rows = slice(start, start + _ROWS)
            h = _inputs(x, records[rows])
            weighted = h * torch.from_numpy(weights[rows]).to(h)[:, None]
            with full_precision():
                self._squares += weighted.t() @ h
                self._products += weighted.t() @ torch.from_numpy(targets[rows]).to(h)

    def merge(self, other: _Sums) -> None:
        """Add the records of others."""
        self._squares += other._squares
        self._products += other._products

    def solved(self, ridge: float) -> Tensor:
        """Return (sum of w h h^T + lambda I)^-1 sum of w h t^T, shape (d + 1, k); 0 if it is not finite.

        Args:
            ridge: lambda over the mean of the diagonal, above 0.
        """
        squares = self._squares.clone()
        squares.diagonal().add_(ridge * squares.diagonal().mean())
        factor, failed = torch.linalg.cholesky_ex(squares)
        found = torch.cholesky_solve(self._products, factor)
        return found if not failed and torch.isfinite(found).all() else torch.zeros_like(found)


def _inputs(x: Tensor, records: np.ndarray) -> Tensor:
    """Return features with a constant 1, float32, shape (m, d + 1); 0 for a record that is not finite."""
    part = x[torch.from_numpy(records).to(x.device)].float()
    h = torch.cat([part, part.new_ones(len(part), 1)], dim=1)
    return torch.where(torch.isfinite(h).all(dim=1, keepdim=True), h, 0.0)


def _predicted(x: Tensor, solution: Tensor, records: np.ndarray) -> Tensor:
    """Return the regression's output for some records, float64, on the CPU, shape (m, k); 0 for what is not finite."""
    with full_precision():
        parts = [
            _inputs(x, records[start : start + _ROWS]) @ solution.float()
            for start in range(0, len(records), _ROWS)
        ]
    output = torch.cat(parts).double().cpu()
    return torch.where(torch.isfinite(output).all(dim=1, keepdim=True), output, 0.0)
