"""An encoder that learns its binary code: an autoencoder with tied weights."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from opusim import checks
from opusim.features.encoders import FrameEncoder


class AutoencoderEncoder(FrameEncoder):
    """Codes b = 1[W x > 0] from which W^T b reconstructs x; W is learnt by gradient descent on the decoder.

    Tissier et al., "Near-lossless binarization of word embeddings", 2019: the code has no gradient, so that only the
    decoder W^T is learnt, and the encoder follows because it is the same W. The loss is the mean squared error of the
    reconstruction plus |W^T W - 1|^2 / 2, which keeps the columns of W apart.

    Args:
        n_bits: Width of the code.
        epochs: Passes over the records.
        batch_size: Records of a step.
        learning_rate: Adam's learning rate.
        random_state: Seed of W and of the batches, in [0, 2^63).

    Attributes:
        mean_: Mean of the records, which is taken off before encoding, shape (d,).
        scale_: Root mean square of what is left.
        weights_: W, shape (n_bits, d).
    """

    def __init__(
        self,
        n_bits: int = 256,
        *,
        epochs: int = 5,
        batch_size: int = 128,
        learning_rate: float = 1e-3,
        random_state: int = 0,
    ) -> None:
        self.n_bits = n_bits
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state

    def reconstruct(self, codes: np.ndarray) -> np.ndarray:
        """Return the records that codes stand for, float32, shape (n, d)."""
        return np.asarray(codes, dtype=np.float32) @ self.weights_ * self.scale_ + self.mean_

    def _learn(self, X: np.ndarray) -> None:
        checks.integer(n_bits=self.n_bits, epochs=self.epochs, batch_size=self.batch_size, minimum=1)
        checks.positive(learning_rate=self.learning_rate)
        checks.integer(random_state=self.random_state, minimum=0, maximum=2**63 - 1)
        self.mean_ = np.mean(X, axis=0, dtype=np.float64).astype(np.float32)
        self.scale_ = float(np.sqrt(np.mean(np.square(X - self.mean_)))) or 1.0
        records = torch.from_numpy(self._centred(X))
        generator = torch.Generator().manual_seed(self.random_state)
        d = records.shape[1]
        weights = torch.randn(self.n_bits, d, generator=generator).div_(self.n_bits**0.5).requires_grad_()
        optimizer = torch.optim.Adam([weights], lr=self.learning_rate)
        for _ in range(self.epochs):
            for batch in torch.randperm(len(records), generator=generator).split(self.batch_size):
                optimizer.zero_grad()
                _loss(weights, records[batch]).backward()
                optimizer.step()
        self.weights_ = weights.detach().numpy()

    def _encode(self, X: np.ndarray) -> np.ndarray:
        return (self._centred(X) @ self.weights_.T > 0).astype(np.uint8)

    def _centred(self, X: np.ndarray) -> np.ndarray:
        return ((X - self.mean_) / self.scale_).astype(np.float32)


def binary_code(weights: Tensor, x: Tensor) -> Tensor:
    """Return 1[W x > 0], bool, shape (n, n_bits), of rows x; the code passes no gradient."""
    return x.detach() @ weights.detach().T > 0


def orthogonality(weights: Tensor) -> Tensor:
    """Return |W^T W - 1|^2 / 2, which keeps the columns of W apart."""
    gram = weights.T @ weights
    return 0.5 * (gram - torch.eye(len(gram), device=gram.device)).square().sum()


def _loss(weights: Tensor, x: Tensor) -> Tensor:
    """Return the loss of a batch."""
    error = (binary_code(weights, x).float() @ weights - x).square().mean()
    return error + orthogonality(weights)
