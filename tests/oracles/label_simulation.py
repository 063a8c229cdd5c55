"""One PDFA step under two labels of a record, simulated record by record, and its exact log-likelihood ratio.

Nothing here is shared with the accountant: the noise goes through the update as the training code does it, and the
ratio comes from the update's full covariance matrices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import norm


@dataclass(frozen=True)
class Layer:
    h: np.ndarray  # (m, d), with the constant of the bias
    slopes: np.ndarray  # (m, n)
    signals: np.ndarray  # (m, labels, n)
    sigma: float
    floor: float
    after: bool = False  # noise added after the slope


def random_layers(
    generator: np.random.Generator, *, m: int, labels: int, floor: float, after: bool = False
) -> list[Layer]:
    """Two hidden layers and an output layer; slopes of tanh and of ReLU; signals scaled to a ball of 1."""
    layers = []
    widths = [(int(generator.integers(2, 9)), int(generator.integers(2, 6))) for _ in range(2)]
    for number, (d, n) in enumerate(widths):
        z = generator.standard_normal((m, n))
        slopes = 1 - np.tanh(z) ** 2 if number == 0 else (z > -1).astype(float)
        signal = generator.standard_normal((m, labels, n)) * 2
        signal /= np.maximum(np.linalg.norm(signal, axis=2, keepdims=True), 1.0)
        layers.append(_layer(generator, m, d, slopes, signal, 0.5 + number, floor))
    probabilities = generator.dirichlet(np.ones(labels), size=m)
    errors = probabilities[:, None, :] - np.eye(labels)[None]
    layers.append(_layer(generator, m, 3, np.ones((m, labels)), errors, 0.7, floor))
    return [replace(layer, after=after) for layer in layers]


def _layer(
    generator: np.random.Generator,
    m: int,
    d: int,
    slopes: np.ndarray,
    signals: np.ndarray,
    sigma: float,
    floor: float,
) -> Layer:
    h = generator.standard_normal((m, d)) * generator.exponential(size=(m, 1))
    return Layer(np.hstack([h, np.ones((m, 1))]), slopes, signals, sigma, floor)


def update(
    layer: Layer, labels: np.ndarray, generator: np.random.Generator, trials: int, noise: float = 1.0
) -> np.ndarray:
    """sum_i ((s_i + g_i) * phi'_i) h_i^T + sqrt(lambda) sigma xi, or s_i * phi'_i + g_i; shape (trials, n, d)."""
    m, n = layer.slopes.shape
    signal = layer.signals[np.arange(m), labels]  # (m, n)
    g = noise * layer.sigma * generator.standard_normal((trials, m, n))
    xi = noise * layer.sigma * layer.floor**0.5 * generator.standard_normal((trials, n, layer.h.shape[1]))
    noisy = signal * layer.slopes + g if layer.after else (signal + g) * layer.slopes
    return np.einsum("tmn,md->tnd", noisy, layer.h) + xi


def log_ratio(layer: Layer, released: np.ndarray, record: int, labels: np.ndarray, other: int) -> np.ndarray:
    """log p(released | labels) - log p(released | record's label replaced by other), shape (trials,)."""
    total = np.zeros(len(released))
    changed = labels.copy()
    changed[record] = other
    for j in range(layer.slopes.shape[1]):
        rows = layer.slopes[:, [j]] * layer.h  # (m, d)
        noisy = layer.h if layer.after else rows
        covariance = layer.sigma**2 * (noisy.T @ noisy + layer.floor * np.eye(rows.shape[1]))
        means = [rows.T @ layer.signals[np.arange(len(labels)), chosen, j] for chosen in (labels, changed)]
        from_own, from_other = (released[:, j] - mean for mean in means)
        own = np.einsum("td,td->t", from_own, np.linalg.solve(covariance, from_own.T).T)
        alternative = np.einsum("td,td->t", from_other, np.linalg.solve(covariance, from_other.T).T)
        total += (alternative - own) / 2
    return total


def moments_deviation(ratios: np.ndarray, mu: float) -> float:
    """How far mean and variance are from those of N(mu^2/2, mu^2), in standard errors."""
    n = len(ratios)
    of_mean = abs(ratios.mean() - mu**2 / 2) / (mu / n**0.5)
    of_variance = abs(ratios.var(ddof=1) - mu**2) / (mu**2 * (2 / (n - 1)) ** 0.5)
    return float(max(of_mean, of_variance))


def accuracy_excess(correct: np.ndarray, mu: float) -> float:
    """By how many standard errors a guess between two equally likely labels beats what mu-GDP allows, Phi(mu/2)."""
    allowed = norm.cdf(mu / 2)
    error = (allowed * (1 - allowed) / len(correct)) ** 0.5
    return float((correct.mean() - allowed) / error)
