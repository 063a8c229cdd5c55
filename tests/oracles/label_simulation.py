"""The layers and signals of one PDFA step under two labels of a record; nothing here is shared with the accountant."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Layer:
    h: np.ndarray  # (m, d), with the constant of the bias
    slopes: np.ndarray  # (m, n)
    signals: np.ndarray  # (m, labels, n)
    sigma: float
    floor: float


def random_layers(generator: np.random.Generator, *, m: int, labels: int, floor: float) -> list[Layer]:
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
    return layers


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
