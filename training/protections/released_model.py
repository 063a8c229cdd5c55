"""One noisy linear model of public features: labels enter it once, and it is all that training sees of them.

The features h_i, with the constant 1, are public. The design comes from them only: weights w_i in [0, 1], and the
Cholesky factor L of S = sum_i w_i h_i h_i^T + lambda I. What is released is

    R = sum_i a_i e(y_i)^T + sigma Z,   a_i = w_i L^-1 h_i,

exactly rounded, with one-hot labels e(y_i), independent Z of N(0, 1) and sigma = sqrt(2) C / mu, C = max_i |a_i|. The
a_i are rounded toward zero first, so that their sums are exact. The model is a function of R and of public numbers,

    W = L^-T (R - sum_i a_i 1^T / k)^T = S^-1 (sum_i w_i h_i (e(y_i) - 1 / k)^T + sigma L Z).

Records far from the others have large leverages |L^-1 h_i|^2; smaller weights of these lower C.

The geometry of label noise (`Metric`) is a positive definite matrix over a layer's inputs, P = sum_r w_r h_r h_r^T +
lambda I over public rows h_r, which include the bias's constant 1; lambda is a stated share of the mean of the sum's
diagonal. The leverage of a row is h^T P^-1 h, computed in float64. Noise is drawn with the same factor L (P = L L^T)
from which the leverages are computed.
Source: docs/privacy-labels.md, sections 1 and 3 (leverage scores), 4 (one noisy linear model).
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opusim import checks
from opusim.accounting.mechanisms.labels import LabelRelease, noise_of
from opusim.devices.base import NoisyDevice
from opusim.devices.usage import DeviceWork
from opusim.randomness.rounded import toward_zero
from opusim.training.data.formats import unnamed_until_whole
from opusim.training.data.public_maps import cached_file
from opusim.training.protections.base import calibrated_once
from opusim.training.protections.noisy_labels import LABEL_STEP, OneLookProtection, Pay
from opusim.training.ridge.config import RidgeConfig
from opusim.training.runs.folder import RunFolder

_FLOOR_OF_SINGLE_PRECISION = 1e-4
"""Least lambda, over the mean of the diagonal, at which the sum may be rounded to float32: 1,600 times its rounding."""
_NO_GEOMETRY = (
    "the public inputs of a layer are too large for float32; lower optimizer.lr, or rescale the features"
)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """P by its Cholesky factor.

    Attributes:
        factor: L, lower triangular, float64, shape (d, d).
    """

    factor: Tensor

    @classmethod
    def of_rows(
        cls, rows: Tensor, *, weights: Tensor | None = None, floor: float, scale: float = 1.0
    ) -> Metric:
        """Return P of public rows h_r, with the bias's constant, shape (n, d), times a number.

        Any positive definite matrix of public numbers is a sound P, as long as noise and leverages have the same
        factor. The sum is therefore formed in the precision of the rows if lambda, `floor` times the mean of its
        diagonal, is far above its rounding. Weights are w_r >= 0, by default 1 / n each.
        """
        if weights is None and floor >= _FLOOR_OF_SINGLE_PRECISION:
            p = (rows.t() @ rows).double().div_(len(rows))
            if p.device.type != "cpu" and checks.are_late():
                factor, failed = torch.linalg.cholesky_ex(_with_ridge(p, floor).mul_(scale))
                checks.require(failed == 0, lambda: ValueError(_NO_GEOMETRY))
                return cls(factor=factor)
            if torch.isfinite(p.diagonal()).all():
                factor, failed = torch.linalg.cholesky_ex(_with_ridge(p, floor).mul_(scale))
                if not failed:
                    return cls(factor=factor)
        h = rows.double()
        weighted = h / len(h) if weights is None else h * weights.double()[:, None]
        return cls(factor=torch.linalg.cholesky(_with_ridge(h.t() @ weighted, floor).mul_(scale)))

    def leverages(self, rows: Tensor) -> Tensor:
        """Return h^T P^-1 h of each row h, with the bias's constant, float64, shape (batch,)."""
        return self.whiten(rows).square().sum(dim=1)

    def whiten(self, rows: Tensor) -> Tensor:
        """Return L^-1 h of each row h, with the bias's constant, float64, shape (batch, d)."""
        return torch.linalg.solve_triangular(self.factor, rows.double().t(), upper=False).t()

    def colour(self, white: Tensor) -> Tensor:
        """Return rows with covariance P, made of rows of independent N(0, 1), float64, shape (n, d)."""
        return white.double() @ self.factor.t()


def _with_ridge(p: Tensor, floor: float) -> Tensor:
    """Add lambda to the diagonal of a matrix, in place; returns it."""
    p.diagonal().add_(floor * p.diagonal().mean().clamp_min(torch.finfo(p.dtype).tiny))
    return p


def equalised_weights(rows: Tensor, *, rounds: int, floor: float) -> Tensor:
    """Return Kiefer-Wolfowitz weights of the D-optimal design of rows h_r, float64, sum 1, shape (n,).

    Each round multiplies w_r by lev_r / sum_k w_k lev_k; the largest leverage falls towards its minimum d. The weights
    depend only on public features. For `floor` see `Metric.of_rows`.
    """
    weights = rows.new_full((len(rows),), 1 / len(rows), dtype=torch.float64)
    for _ in range(rounds):
        weights = weights * Metric.of_rows(rows, weights=weights, floor=floor).leverages(rows)
        weights = weights / weights.sum()
    return weights


_ROWS, _COLUMNS = 4096, 1024
"""Records, and columns of S, of one matrix product."""
_NOT_KEPT = (OSError, ValueError, KeyError, IndexError, EOFError, TypeError, zipfile.BadZipFile, zlib.error)
"""Errors of reading a design that was never kept, or whose file is incomplete."""
_LARGEST_SHARE = 2.0
"""Bound on the entries of a_i, which fixes the grid of their sums. |a_i| is at most 1 up to rounding, since S has the
term w_i h_i h_i^T, with a weight that is not smaller."""


@dataclass(frozen=True, kw_only=True)
class LabelSums:
    """Sums over the labels, before the noise: all that is read of them.

    Attributes:
        by_class: sum_i a_i e(y_i)^T, exact, float64, shape (k, d).
        total: sum_i a_i, exact and the same for all labels, float64, shape (d,).
        largest: C = max_i |a_i|, rounded up.
    """

    by_class: Tensor
    total: Tensor
    largest: float


@dataclass(frozen=True, kw_only=True)
class Design:
    """The part of a linear model that comes from the features, before a label is read.

    Attributes:
        metric: S by its factor L, float64, shape (d, d); d counts the constant.
        weights: w_i in [0, 1], float64, shape (n,).
        ridge: lambda.
    """

    metric: Metric
    weights: Tensor
    ridge: float

    @classmethod
    def of(cls, x: Tensor, *, ridge: float, weights: Tensor | None = None) -> Design:
        """Return the design of records x, shape (n, d - 1), of these weights, by default 1, and 0 if not finite.

        `ridge` is lambda over the mean of the diagonal of sum_i w_i h_i h_i^T.
        """
        weights = finite(x).double() if weights is None else weights
        total = x.new_zeros((x.shape[1] + 1,) * 2, dtype=torch.float64)
        for rows, h in blocks(x):
            weighted = h * weights[rows, None]
            for start in range(0, len(total), _COLUMNS):  # the lower triangle and a little more
                stop = start + _COLUMNS
                total[start:stop, :stop].addmm_(weighted[:, start:stop].t(), h[:, :stop])
        scaled = ridge * float(total.diagonal().mean().clamp_min(torch.finfo(total.dtype).tiny))
        total.diagonal().add_(scaled)
        return cls(
            metric=Metric(factor=torch.linalg.cholesky(total.tril() + total.tril(-1).t())),
            weights=weights,
            ridge=scaled,
        )

    @classmethod
    def levelled(cls, x: Tensor, *, ridge: float, rounds: int, level: float) -> Design:
        """Return the design of a protected model of features x, shape (n, d - 1).

        Each round lowers the weights of all records so that no w_i |L^-1 h_i| exceeds `level` times the root mean
        square of |L^-1 h_i|, and forms S with these weights. In the end they are lowered once more under that S.
        Without rounds all weights are 1. For `ridge` see `of`.
        """
        design = cls.of(x, ridge=ridge)
        whole, norms = design.weights, design.norms(x)
        for _ in range(rounds):
            design = cls.of(x, ridge=ridge, weights=lowered(whole, norms, level))
            norms = design.norms(x)
        return replace(design, weights=lowered(design.weights, norms, level)) if rounds else design

    def norms(self, x: Tensor) -> Tensor:
        """Return |L^-1 h_i|, float64, shape (n,)."""
        return torch.cat([self.metric.leverages(h).sqrt() for _, h in blocks(x)])

    def sums(self, x: Tensor, y: Tensor, n_classes: int) -> Tensor:
        """Return sum_i w_i h_i t_i^T, float64, shape (k, d)."""
        total = x.new_zeros((n_classes, x.shape[1] + 1), dtype=torch.float64)
        for rows, h in blocks(x):
            targets = torch.nn.functional.one_hot(y[rows], n_classes).double() - 1 / n_classes
            total.addmm_((targets * self.weights[rows, None]).t(), h)
        return total

    def solved(self, sums: Tensor) -> Tensor:
        """Return S^-1 of rows, shape (k, d)."""
        return torch.cholesky_solve(sums.t(), self.metric.factor).t()

    def label_sums(self, x: Tensor, y: Tensor, n_classes: int) -> LabelSums:
        """Return the sums over the labels y, shape (n,), of the design's features; see `LabelSums`."""
        by_class = x.new_zeros((n_classes, x.shape[1] + 1), dtype=torch.float64)
        largest = 0.0
        for rows, h in blocks(x):
            shares = (self.metric.whiten(h) * self.weights[rows, None]).clamp(-_LARGEST_SHARE, _LARGEST_SHARE)
            shares = toward_zero(shares, bound=_LARGEST_SHARE, count=len(x))
            largest = max(largest, largest_norm(shares))
            by_class.addmm_(torch.nn.functional.one_hot(y[rows], n_classes).double().t(), shares)
        return LabelSums(by_class=by_class, total=by_class.sum(dim=0), largest=largest)

    def model(self, released: Tensor, total: Tensor) -> Tensor:
        """Return W, shape (k, d), from the released R, float64, shape (k, d), and `LabelSums.total`."""
        centred = released - total / len(released)
        return torch.linalg.solve_triangular(self.metric.factor.t(), centred.t(), upper=True).t()


def largest_norm(rows: Tensor) -> float:
    """Return the largest Euclidean norm of float64 rows, rounded up beyond the error of d additions and a root."""
    return float(rows.square().sum(dim=1).max().sqrt()) * (1 + (rows.shape[1] + 8) * 2.0**-52)


def finite(x: Tensor) -> Tensor:
    """Return which records have finite features only, bool, shape (n,)."""
    return torch.cat([torch.isfinite(part).all(dim=1) for part in x.split(_ROWS)])


def lowered(weights: Tensor, norms: Tensor, level: float) -> Tensor:
    """Return weights so low that no w_i q_i, q_i = |L^-1 h_i|, exceeds `level` times the given root mean square."""
    shares = weights * norms
    factors = level * shares.square().mean().sqrt() / shares  # NaN if all shares are 0
    return weights * factors.clamp_max(1.0).nan_to_num(nan=1.0)


def blocks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield some records at a time with the constant 1, float64, shape (rows, d); 0 for a record that is not finite."""
    for start in range(0, len(x), _ROWS):
        rows = slice(start, start + _ROWS)
        part = x[rows].double()
        h = torch.cat([part, part.new_ones(len(part), 1)], dim=1)
        yield rows, torch.where(torch.isfinite(h).all(dim=1, keepdim=True), h, 0.0)


def public_design(x: Tensor, *, cached: bool, **settings: Any) -> Design:
    """Return the design of a protected run's features, of settings as in `Design.levelled`.

    If `cached` it is kept next to the features of a public map (`OPUSIM_CACHE`), and reused for the same features.
    """
    file = cached_file(json.dumps({"version": 1, **settings}), x, ".npz") if cached else None
    if file is not None:
        with suppress(*_NOT_KEPT), file.open("rb") as stream, np.load(stream) as kept:
            factor, weights = (torch.from_numpy(kept[name]).to(x.device) for name in ("factor", "weights"))
            return Design(metric=Metric(factor=factor), weights=weights, ridge=float(kept["ridge"]))
    design = Design.levelled(x, **settings)
    if file is not None:
        a, w = design.metric.factor.cpu().numpy(), design.weights.cpu().numpy()
        # a full or read-only disk costs time, not the run
        with suppress(OSError), unnamed_until_whole(file) as unfinished:
            np.savez(unfinished, factor=a, weights=w, ridge=np.float64(design.ridge))
    return design


class LabelReleaseProtection(OneLookProtection):
    """Labels: one noisy linear model, which the run folder keeps."""

    needs = frozenset({"own noise"})
    payment = "model"

    @property
    def mechanism(self) -> LabelRelease:
        """What the one model releases at the run's epsilon."""
        options = self.options
        start = LabelRelease(mu=1.0, device_noise=options.noise == "device", **self.plan.credit)
        return calibrated_once(start, epsilon=options.epsilon, delta=options.delta)

    def soft_labels(self, device: NoisyDevice | None, folder: RunFolder) -> None:
        """See Protection.soft_labels: training sees the model; refuse a device whose noise cannot be credited."""
        self.central_noise(device)

    def work_before(self) -> DeviceWork:
        """See Protection.work_before; one draw for all weights, from a device with d outputs."""
        dataset = self.dataset
        width = dataset.n_features + 1
        return self.noise_work([dataset.n_classes * width], width)

    def look(self, device: NoisyDevice | None, pay: Pay) -> Tensor:
        """Return the one model, shape (k, d).

        The design is computed before it is paid for, because it needs no label and takes the time.
        """
        dataset, place = self.dataset, self.config.torch_device
        x, y = dataset.train.x.to(place), dataset.train.y.to(place)
        design, mechanism = self.design(x), self.mechanism
        pay(mechanism)
        found, total = self.drawn(design, x, y, mu=mechanism.mu, device=device)
        return design.model(found, total).cpu()

    def design(self, x: Tensor) -> Design:
        """Return the design of the run's training features, which is kept if they come from a public map."""
        return public_design(
            x,
            cached=self.dataset.public_map is not None and not self.config.data.is_own,
            ridge=self.config.trainer_as(RidgeConfig).ridge,
            rounds=self.options.rounds,
            level=self.options.level,
        )

    def drawn(
        self, design: Design, x: Tensor, y: Tensor, *, mu: float, device: NoisyDevice | None
    ) -> tuple[Tensor, Tensor]:
        """Return R of a design at mu > 0, from the first noise of its source, and `LabelSums.total`."""
        sums = design.label_sums(x, y, self.dataset.n_classes)
        if not sums.largest:  # no record has a finite feature, so that nothing is read of labels
            return sums.by_class, sums.total
        noise = self.central_noise(device)
        for source in (device, noise):
            if source is not None:
                source.seek(LABEL_STEP)
        drawn = noise.rounded(sums.by_class.numel(), noise_of(mu, sums.largest))
        return drawn.added_to(sums.by_class), sums.total
