"""Run Algorithm 1 of the DP-ULR paper as published: clipping by module, controller, remedies of appendix A.4.

For module l the covariance of a batch's estimate is Sigma / sigma^2 with Sigma = sum_i L_0i^2 J_i^T J_i (eq. 25) before
any clipping. The controller chooses sigma^2 <= min eigenvalue(Sigma) / (K C^2 sigma_0^2) (eq. 8). For a linear or
convolutional module Sigma = I (x) sum_ip L_0i^2 u_ip u_ip^T, which is rank-deficient if an input is constant, and then
no sigma satisfies eq. 8. The paper then moves the noise to the parameters (J = I), or adds noise of covariance
sigma_0^2 C^2 I - Sigma / (sigma^2 K) with negative eigenvalues set to 0. None of this proves privacy (docs/ulr.md).
"""

from __future__ import annotations

import scipy.linalg
import torch
from torch import Tensor

from opusim.accounting.guarantee import NoGuarantee
from opusim.randomness.streams import NoiseStream
from opusim.training.networks.clipping import (
    bounded_factors,
    by_record,
    finite_rows,
    row_norms,
)
from opusim.training.ulr.config import UlrConfig
from opusim.training.ulr.estimator import Estimator, Losses, ModuleSequence, Outputs, parameter_estimates
from opusim.training.ulr.trainer import Update, used_records

_RANK_TOLERANCE = 1e-10
"""Eigenvalues below this share of the largest one count as 0."""


class PublishedUpdate(Update):
    """Writes the gradients of Algorithm 1.

    Args:
        network: The network.
        options: copies (K), target_std (sigma_0), clip_norm (C, per module), remedy, and sigma, the upper limit of the
            controller, or the noise itself under remedy = 'extra-noise'.
        divisor: N_B.
        noise: Noise of the estimate.
        extra: Independent N(0, 1) for noise that completes a covariance.

    Raises:
        ValueError: The remedy needs a module's covariance, which only linear and ungrouped convolutional modules have.
    """

    def __init__(
        self,
        network: ModuleSequence,
        options: UlrConfig,
        divisor: float,
        *,
        noise: NoiseStream,
        extra: NoiseStream,
    ) -> None:
        self._network = network
        self._options = options
        self._divisor = divisor
        self._noise = noise
        self._extra = extra
        self._estimator = Estimator(
            copies=options.copies, reduction="none", rows_per_pass=options.rows_per_pass
        )

    def seek(self, step: int) -> None:
        """See Update."""
        self._noise.seek(step)
        self._extra.seek(step)

    def set_gradients(
        self, outputs: Outputs, losses: Losses, clean: Tensor, records: Tensor | None = None
    ) -> Tensor:
        """See Update."""
        if self._options.remedy == "parameters":
            return self._from_parameter_noise(outputs, losses, clean)
        network, options = self._network, self._options
        weights = torch.where(torch.isfinite(clean), clean, 0.0)
        roots = [self._root(layer, h, weights) for layer, h in enumerate(outputs.inputs)]
        sigmas = [self._sigma(layer, root) for layer, root in enumerate(roots)]
        signals = self._estimator.signals(network, outputs, losses, clean, self._noise, sigmas)
        used = used_records(signals, clean)
        for layer, (delta, h) in enumerate(zip(signals, outputs.inputs, strict=True)):
            kept = finite_rows(delta, used), finite_rows(h, used)
            found = network.jacobians[layer].contributions(*kept)
            factors = bounded_factors(found.squared_norms().sqrt(), options.clip_norm)
            for parameter, total in found.totals(factors):
                parameter.grad = total.div_(self._divisor).float()
            if options.remedy == "extra-noise":
                self._complete(layer, roots[layer] / (sigmas[layer] * options.copies**0.5))
        return used

    def _root(self, layer: int, h: Tensor, weights: Tensor) -> Tensor:
        """Return R with R^T R = sum_ip L_0i^2 u_ip u_ip^T, shape (batch x positions, inputs)."""
        rows = self._network.jacobians[layer].factor_rows(h)
        if rows is None:
            raise ValueError(
                f"layer {layer + 1}: remedy = {self._options.remedy!r} needs the covariance of its noise, which only "
                "linear and ungrouped convolutional modules have; use trainer.remedy = 'parameters'"
            )
        return (rows * by_record(weights, rows)).flatten(0, 1)

    def _sigma(self, layer: int, root: Tensor) -> float:
        """Return the controller's noise (eq. 8), or the configured one if extra noise completes it.

        Raises:
            NoGuarantee: The covariance is rank-deficient, so no sigma satisfies eq. 8.
        """
        options = self._options
        if options.remedy == "extra-noise":
            return options.sigma
        exact = root.double()
        values = torch.linalg.eigvalsh(exact.T @ exact)
        if not float(values[0]) > _RANK_TOLERANCE * float(values[-1]):
            rank = int((values > _RANK_TOLERANCE * values[-1]).sum())
            raise NoGuarantee(
                f"layer {layer + 1}: Assumption 1 of the DP-ULR paper fails, the batch's noise has rank {rank} of "
                f"{len(values)} for every output, and no sigma satisfies eq. 8; use trainer.remedy = 'extra-noise' or "
                "'parameters'"
            )
        return self._allowed(float(values[0]))

    def _allowed(self, smallest: float) -> float:
        """Return the largest sigma that eq. 8 allows at this smallest eigenvalue, up to the configured limit."""
        options = self._options
        bound = smallest / (options.copies * (options.clip_norm * options.target_std) ** 2)
        return min(options.sigma, max(bound, 1e-12) ** 0.5)

    def _complete(self, layer: int, root: Tensor) -> None:
        """Add noise that completes R^T R, the covariance of the estimate (root is scaled by 1 / (sigma sqrt(K)))."""
        options = self._options
        parameters = self._network.layer_parameters(layer)
        outputs = parameters[0].shape[0]
        normals = self._extra.normal((outputs, root.shape[1])).to(root.device)
        noise = completing_noise(normals, root, options.target_std * options.clip_norm) / self._divisor
        weight, *bias = parameters
        columns = weight[0].numel()
        if weight.grad is not None:
            weight.grad.add_(noise[:, :columns].reshape(weight.shape))
        for parameter in bias:
            if parameter.grad is not None:
                parameter.grad.add_(noise[:, columns])

    def _from_parameter_noise(self, outputs: Outputs, losses: Losses, clean: Tensor) -> Tensor:
        """Write gradients from noise on the parameters of one module at a time: J = I and Sigma = sum_i L_0i^2 I."""
        options, used = self._options, torch.isfinite(clean)
        sigma = self._allowed(float(clean[used].double().square().sum()))
        for layer in range(self._network.depth):
            totals = None
            for rows, records in parameter_estimates(
                self._network, layer, outputs.inputs[layer], losses, self._noise, sigma, options.copies
            ):
                finite = torch.isfinite(rows).all(dim=1) & used[records]
                kept = finite_rows(rows, finite)
                factors = bounded_factors(row_norms(kept), options.clip_norm)
                used[records] &= finite
                part = (factors @ kept.double()).float()
                totals = part if totals is None else totals + part
            self._write(layer, totals)
        return used

    def _write(self, layer: int, total: Tensor | None) -> None:
        """Write a layer's gradients from their flat sum, or zeros if there is none."""
        parameters = self._network.layer_parameters(layer)
        sizes = [parameter.numel() for parameter in parameters]
        if total is None:
            total = parameters[0].new_zeros(sum(sizes))
        for parameter, part in zip(parameters, total.detach().split(sizes), strict=True):
            parameter.grad = (part / self._divisor).reshape(parameter.shape)


def completing_noise(normals: Tensor, root: Tensor, level: float) -> Tensor:
    """Return rows of covariance level^2 I - R^T R, negative eigenvalues set to 0 (appendix A.4), float32.

    They are N times the root of that covariance, N (level I + V g(S) V^T), for R^T R = V S V^T and
    g(s) = sqrt(max(level^2 - s, 0)) - level. If R has fewer rows than columns, V is never formed: with
    R R^T = U S U^T the second term is N R^T U (g(S) / S) U^T R, and g(s) / s is smooth at 0.

    Args:
        normals: N, independent N(0, 1), shape (outputs, inputs).
        root: R, float32, shape (any, inputs); the smaller of its Gram matrices is decomposed.
        level: sigma_0 C > 0.
    """
    if len(root) < root.shape[1]:
        values, u = _spectrum(root)
        return level * normals + ((normals @ root.T @ u) * _slopes(values, level)) @ u.T @ root
    values, v = _spectrum(root.T)
    return level * normals + ((normals @ v) * (values * _slopes(values, level))) @ v.T


def _slopes(values: Tensor, level: float) -> Tensor:
    """Return g(s) / s of `completing_noise`: -1 / (sqrt(level^2 - s) + level), or -level / s for s >= level^2."""
    square = level**2
    return torch.where(
        values < square,
        -1 / ((square - values).clamp_min(0.0).sqrt() + level),
        -level / values.clamp_min(square),
    )


def _spectrum(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of rows rows^T, float32.

    They are computed in float64: squared losses span decades, so in float32 the rounding of large eigenvalues hides
    small ones, and divide and conquer ends in NaN. If it fails in float64 too, QR iteration takes over.
    """
    exact = rows.double()
    matrix = exact @ exact.T
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:
        found = scipy.linalg.eigh(matrix.cpu().numpy(), driver="ev")
        values, vectors = (torch.from_numpy(part).to(matrix.device) for part in found)
    return values.clamp_min(0.0).float(), vectors.float()
