"""The covariance attack: a record in the batch widens the update's noise along its own input, at every sigma.

With the signals' part subtracted, row j of the first layer's summed update is y_j ~ N(0, sigma^2 A_j) without the
candidate, A_j = sum_i phi'_ij^2 h_i h_i^T over the others, and N(w_j h, sigma^2 (A_j + phi'_j^2 h h^T)) with it, w_j
its own signal. With a_j = phi'_j^2 h^T A_j^-1 h, p_j = phi'_j h^T A_j^-1 y_j / sigma and u_j = w_j / (phi'_j sigma),

    log-likelihood ratio = sum_j [p_j u_j - u_j^2 a_j / 2 + (p_j - u_j a_j)^2 / (2 (1 + a_j)) - log(1 + a_j) / 2].

sigma is estimated from the rows themselves, and a_j does not depend on it: more noise hides nothing. For batches
above the fan-in, where the row space says nothing.
Source: docs/privacy.md, section 2 (whole records have no guarantee at any sigma).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from training.attacks.base import Attack, Candidates, Observation, Records, layer_gradient
from training.attacks.replay import NoiselessStep
from training.networks.clipping import ActivationClipping
from training.networks.network import FullyConnected
from training.protections.base import with_constant

_WORK = 1e10  # multiplications a trial may take: it limits the rows that are looked at
_MEMORY = 1e7  # numbers
_RIDGE = 1e-7


class CovarianceAttack(Attack):
    """The likelihood ratio of the first layer's rows.

    Args:
        noiseless: Computes the signals' part.
        clipping: What the update does to the inputs.
        through_clip: Whether clipped neurons have slope 0.
        depth: Layers of the network.
        bias: Whether the first layer has a bias.
    """

    name = "covariance"
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
        self._noiseless, self._clipping, self._through_clip = noiseless, clipping, through_clip
        self._depth, self._bias = depth, bias
        self._seen: tuple[Observation, Rows] | None = None

    def score(self, observation: Observation, candidates: Candidates) -> float:
        """See Attack.score; where a record is replaced, the ratio of the two."""
        score = self._ratio(observation, candidates.member)
        return (
            score
            if candidates.replacement is None
            else score - self._ratio(observation, candidates.replacement)
        )

    def _ratio(self, observation: Observation, record: Records) -> float:
        if self._seen is None or self._seen[0] is not observation:
            left = observation.gradient(0) * observation.batch_size - self._sum(
                observation, observation.others
            )
            self._seen = observation, Rows(left, *self._layer(observation, observation.others))
        h, slope = self._layer(observation, record)
        own = self._sum(observation, record)
        signal = own @ h[0] / h[0].square().sum()  # w_j, shape (n,)
        return self._seen[1].log_likelihood_ratio(h[0], slope[0], signal)

    def _sum(self, observation: Observation, records: Records) -> Tensor:
        """The first layer's summed update without noise; the run averages over its batch."""
        gradients = self._noiseless.gradients(observation.weights[-2], records, step=observation.step)
        return layer_gradient(gradients, 0) * len(records.x)

    def _slopes(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The slopes phi'_1 of records, float64, shape (n, n_1)."""
        network = self._noiseless.network_at(weights)
        forward = network.forward(x)
        slope = network.derivative(forward, 0, through_clip=self._through_clip)
        return torch.ones_like(forward.pre_activations[0]).double() if slope is None else slope.double()

    def _layer(self, observation: Observation, records: Records) -> tuple[Tensor, Tensor]:
        """What the first layer's update takes for the inputs, and its slopes, float64."""
        weights = observation.weights[-2]
        slopes = self._slopes(weights, records.x)
        h = self._clipping(records.x, layer=0, depth=self._depth, n_layer=slopes.shape[1])
        return with_constant(h, bias=self._bias).double(), slopes


class Rows:
    """Rows of an update less the others' signals, and the covariance that the others give them.

    Args:
        left: y_j, shape (n, d), float64 like all.
        inputs: h_i of the others, shape (m, d).
        slopes: phi'_ij of the others, shape (m, n).
    """

    def __init__(self, left: Tensor, inputs: Tensor, slopes: Tensor) -> None:
        m, d = inputs.shape
        self._n = min(len(left), max(int(_WORK // (m * d * d + d**3 // 3)), 1))
        self._left = left[: self._n]
        self._factors = torch.cat(
            [
                _cholesky(part, inputs)
                for part in slopes[:, : self._n].t().split(max(int(_MEMORY // (m * d)), 1))
            ]
        )  # (n, d, d)
        self._whitened = self._solve(self._left[:, :, None])[:, :, 0]  # A_j^-1 y_j, (n, d)
        self._sigma = ((self._left * self._whitened).sum() / (d * self._n)).sqrt().clamp_min(1e-300)

    def log_likelihood_ratio(self, h: Tensor, slope: Tensor, signal: Tensor) -> float:
        """The candidate in the batch against the others alone; see the module's law.

        Args:
            h: Of the candidate, shape (d,).
            slope: phi'_j, shape (n,).
            signal: w_j, shape (n,).
        """
        leverage = (self._solve(h.expand(self._n, -1)[:, :, None])[:, :, 0] * h).sum(dim=1)  # (n,)
        slope, signal = slope[: self._n], signal[: self._n]
        a, p = slope.square() * leverage, slope * (self._whitened @ h) / self._sigma
        u = torch.where(slope == 0, 0.0, signal / slope / self._sigma)
        terms = p * u - u * u * a / 2 + (p - u * a).square() / (2 * (1 + a)) - torch.log1p(a) / 2
        return float(terms.sum())

    def _solve(self, right: Tensor) -> Tensor:
        return torch.cholesky_solve(right, self._factors)


def _cholesky(slopes: Tensor, inputs: Tensor) -> Tensor:
    """Factors of A_j, shape (rows, d, d), from slopes (rows, m); a ridge that no float32 update could show."""
    scaled = slopes[:, :, None] * inputs  # (rows, m, d)
    gram = scaled.transpose(1, 2) @ scaled
    diagonal = gram.diagonal(dim1=1, dim2=2)
    diagonal.add_(_RIDGE * diagonal.mean(dim=1, keepdim=True) + 1e-300)
    return torch.linalg.cholesky(gram)
