"""Encode real numbers as the binary frames that a mirror array shows, as scikit-learn transformers.

`fit` learns an encoder's constants, and `transform` returns frames, uint8, entries 0 and 1. Most encoders make one
frame of a record. Those that spread a record over several frames (`rows_per_record` above 1) return all frames of the
first record, then all of the second; `decode` joins the readings of each record again.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from opusim import checks


class FrameEncoder(TransformerMixin, BaseEstimator):
    """The base of all encoders: `fit`, `transform`, and `decode` for encoders with several frames a record."""

    @property
    def rows_per_record(self) -> int:
        """Frames of a record."""
        return 1

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn the number of features and the constants of the code.

        Args:
            X: Records, shape (n, d), finite real numbers.
            y: Ignored.
        """
        checks.complete(X=X)
        self._learn(validate_data(self, X))
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Return the frames of records, uint8, shape (n * rows_per_record, width).

        Args:
            X: Records, shape (n, d).
        """
        checks.complete(X=X)
        check_is_fitted(self)
        return self._encode(validate_data(self, X, reset=False))

    def frames_of(self, records: np.ndarray) -> np.ndarray:
        """Return the frames of records as `transform` does, but without its checks."""
        return self._encode(records)

    def decode(self, readings: np.ndarray) -> np.ndarray:
        """Join the readings of each record's frames.

        Args:
            readings: Shape (n * rows_per_record, k).

        Returns:
            Shape (n, k), or as the encoder says.
        """
        return readings

    def __sklearn_tags__(self) -> Tags:
        """Say that frames are uint8 whatever the records are."""
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = []
        return tags

    def _learn(self, X: np.ndarray) -> None:
        """Learn the code's constants from checked records."""
        raise NotImplementedError

    def _encode(self, X: np.ndarray) -> np.ndarray:
        """Return the frames of checked records."""
        raise NotImplementedError


class ThresholdEncoder(OneToOneFeatureMixin, FrameEncoder):
    """1 where x > threshold, else 0. A threshold of 0 shows the sign.

    Args:
        threshold: A number, or "mean", "median" or "quantile" of the records that `fit` sees.
        quantile: Share of the records below the threshold, for "quantile"; in [0, 1].
        per_feature: Whether each feature learns a threshold of its own; else all share one.

    Attributes:
        threshold_: The threshold in use, shape (d,) or ().
    """

    def __init__(
        self,
        threshold: float | Literal["mean", "median", "quantile"] = "median",
        *,
        quantile: float = 0.5,
        per_feature: bool = True,
    ) -> None:
        self.threshold, self.quantile, self.per_feature = threshold, quantile, per_feature

    def _learn(self, X: np.ndarray) -> None:
        axis = 0 if self.per_feature else None
        if not isinstance(self.threshold, str):
            checks.finite(threshold=self.threshold)
            self.threshold_ = np.asarray(self.threshold, dtype=np.float64)
            return
        checks.choice(("mean", "median", "quantile"), threshold=self.threshold, remedy="or give a number")
        if self.threshold == "mean":
            self.threshold_ = np.mean(X, axis=axis)
            return
        checks.in_unit_interval(quantile=self.quantile)
        share = 0.5 if self.threshold == "median" else self.quantile
        self.threshold_ = np.quantile(X, share, axis=axis)

    def _encode(self, X: np.ndarray) -> np.ndarray:
        return (self.threshold_ < X).astype(np.uint8)


class MultiThresholdEncoder(FrameEncoder):
    """A bit for each of several thresholds: 1 where x exceeds it (a thermometer code).

    Args:
        n_levels: Number of values that the code tells apart, at least 2; a feature takes n_levels - 1 bits.
        spacing: "uniform": thresholds evenly over the range of the records; "quantile": the same number of records
            between any two.
        thresholds: The thresholds themselves, increasing, in place of n_levels and spacing: shape (t,), or (d, t) with
            a row for each feature.
        per_feature: Whether each feature has thresholds of its own.

    Attributes:
        thresholds_: Shape (levels - 1,), or (levels - 1, d) for each feature.
    """

    def __init__(
        self,
        n_levels: int = 8,
        *,
        spacing: Literal["uniform", "quantile"] = "uniform",
        thresholds: Any = None,
        per_feature: bool = False,
    ) -> None:
        self.n_levels, self.spacing, self.thresholds = n_levels, spacing, thresholds
        self.per_feature = per_feature

    def _learn(self, X: np.ndarray) -> None:
        if self.thresholds is not None:
            found = np.asarray(self.thresholds, dtype=np.float64)
            checks.finite(thresholds=found)
            if found.ndim not in (1, 2) or np.any(np.diff(found) <= 0):
                raise ValueError(f"thresholds = {self.thresholds!r}: must be increasing numbers; sort them")
            if found.ndim == 2 and len(found) != X.shape[1]:
                raise ValueError(
                    f"thresholds has shape {found.shape}: must be ({X.shape[1]}, t), a row for each feature"
                )
            self.thresholds_ = found.T
            return
        checks.integer(n_levels=self.n_levels, minimum=2)
        checks.choice(("uniform", "quantile"), spacing=self.spacing)
        shares = np.arange(1, self.n_levels) / self.n_levels
        axis = 0 if self.per_feature else None
        if self.spacing == "quantile":
            self.thresholds_ = np.quantile(X, shares, axis=axis)
        else:
            low, high = np.min(X, axis=axis), np.max(X, axis=axis)
            self.thresholds_ = low + np.multiply.outer(shares, high - low)

    def _encode(self, X: np.ndarray) -> np.ndarray:
        levels = self.thresholds_ if self.thresholds_.ndim == 2 else self.thresholds_[:, None]
        bits = X[:, None, :] > levels[None]  # (n, levels - 1, d)
        return bits.astype(np.uint8).reshape(len(X), -1)


class _PlaneEncoder(FrameEncoder):
    """An encoder into bits of different weights, side by side in one frame or each in a frame of its own."""

    layout: str
    joined: str
    decay: float

    @property
    def _n_bits(self) -> int:
        raise NotImplementedError

    @property
    def rows_per_record(self) -> int:
        """Frames of a record: the number of bits if each has a frame of its own."""
        return self._n_bits if self.layout == "separated" else 1

    def decode(self, readings: np.ndarray) -> np.ndarray:
        """Join the readings of a record's bits, the most significant first.

        sum_k decay^k reading_k, shape (n, k), if joined = "mixed"; decay^k reading_k side by side, shape (n, bits * k),
        if "concatenated". ValueError if the number of readings is no multiple of the bits.
        """
        if self.layout != "separated":
            return readings
        records, rest = divmod(len(readings), self._n_bits)
        if rest:
            raise ValueError(
                f"readings has {len(readings)} rows: must be a multiple of the {self._n_bits} bits; decode what the "
                "same encoder encoded"
            )
        planes = np.asarray(readings).reshape(records, self._n_bits, -1)
        weights = (self.decay ** np.arange(self._n_bits)).astype(np.float32)
        if self.joined == "mixed":
            return np.einsum("nbk,b->nk", planes, weights)
        return (planes * weights[:, None]).reshape(records, -1)

    def _check_layout(self) -> None:
        checks.choice(("concatenated", "separated"), layout=self.layout)
        checks.choice(("mixed", "concatenated"), joined=self.joined)
        checks.positive(decay=self.decay)

    def _laid_out(self, bits: np.ndarray) -> np.ndarray:
        """Return frames of bits of shape (n, bits, d)."""
        n, count, d = bits.shape
        if self.layout == "separated":
            return bits.reshape(n * count, d)
        return bits.transpose(0, 2, 1).reshape(n, d * count)


class BitPlaneEncoder(_PlaneEncoder):
    """Binary digits of numbers, the most significant first: x = low + (high - low) sum_k b_k 2^-k (1 - 2^-n)^-1.

    Args:
        n_bits: Digits, from 1 to 16.
        low: Number whose digits are all 0; None takes the least that `fit` sees. Smaller numbers are encoded as `low`.
        high: Number whose digits are all 1; None takes the largest that `fit` sees. Larger numbers are encoded as
            `high`.
        layout: "concatenated": the digits of a feature side by side in one frame; "separated": a frame for each digit.
        joined: How `decode` joins the readings of separated digits: "mixed" or "concatenated".
        decay: Weight of a digit's reading over that of the digit before. With 0.5, mixed linear readings are the
            readings of x - low over `scale_`.

    Attributes:
        low_, high_: See low and high.
        scale_: Factor that turns mixed readings into readings of x - low, with decay = 0.5.
    """

    def __init__(
        self,
        n_bits: int = 8,
        *,
        low: float | None = None,
        high: float | None = None,
        layout: Literal["concatenated", "separated"] = "concatenated",
        joined: Literal["mixed", "concatenated"] = "mixed",
        decay: float = 0.5,
    ) -> None:
        self.n_bits, self.low, self.high, self.layout, self.joined = n_bits, low, high, layout, joined
        self.decay = decay

    @property
    def _n_bits(self) -> int:
        return self.n_bits

    def _learn(self, X: np.ndarray) -> None:
        checks.integer(n_bits=self.n_bits, minimum=1, maximum=16)
        self._check_layout()
        self.low_ = float(np.min(X) if self.low is None else self.low)
        self.high_ = float(np.max(X) if self.high is None else self.high)
        checks.finite(low=self.low_, high=self.high_)
        if self.high_ < self.low_:
            raise ValueError(f"high = {self.high_:g}: must be at least low = {self.low_:g}; exchange them")
        self.scale_ = (self.high_ - self.low_) * 2 ** (self.n_bits - 1) / (2**self.n_bits - 1)

    def _encode(self, X: np.ndarray) -> np.ndarray:
        span = (self.high_ - self.low_) or 1.0
        top = 2**self.n_bits - 1
        codes = np.rint(np.clip((X.astype(np.float64) - self.low_) / span, 0, 1) * top).astype(np.uint16)
        shifts = np.arange(self.n_bits - 1, -1, -1, dtype=np.uint16)
        return self._laid_out((codes[:, None, :] >> shifts[None, :, None] & 1).astype(np.uint8))


class FloatBitsEncoder(_PlaneEncoder):
    """Bits of numbers as float32 (IEEE 754): sign, then exponent and mantissa from their most significant bits.

    Args:
        sign: Whether the sign is shown.
        exponent_bits: Bits of the exponent, from 0 to 8.
        mantissa_bits: Bits of the mantissa, from 0 to 23.
        layout, joined, decay: See `BitPlaneEncoder`.
    """

    def __init__(
        self,
        *,
        sign: bool = True,
        exponent_bits: int = 8,
        mantissa_bits: int = 23,
        layout: Literal["concatenated", "separated"] = "concatenated",
        joined: Literal["mixed", "concatenated"] = "mixed",
        decay: float = 0.5,
    ) -> None:
        self.sign, self.exponent_bits, self.mantissa_bits = sign, exponent_bits, mantissa_bits
        self.layout, self.joined, self.decay = layout, joined, decay

    @property
    def _n_bits(self) -> int:
        return int(self.sign) + self.exponent_bits + self.mantissa_bits

    def _learn(self, X: np.ndarray) -> None:
        checks.integer(exponent_bits=self.exponent_bits, minimum=0, maximum=8)
        checks.integer(mantissa_bits=self.mantissa_bits, minimum=0, maximum=23)
        self._check_layout()
        if not self._n_bits:
            raise ValueError("sign, exponent_bits and mantissa_bits leave no bit; keep one")

    def _encode(self, X: np.ndarray) -> np.ndarray:
        words = np.ascontiguousarray(X, dtype=np.float32).view(np.uint32)
        shifts = [31] * self.sign + [30 - k for k in range(self.exponent_bits)]
        shifts += [22 - k for k in range(self.mantissa_bits)]
        places = np.array(shifts, dtype=np.uint32)
        return self._laid_out((words[:, None, :] >> places[None, :, None] & 1).astype(np.uint8))


class IdentityEncoder(OneToOneFeatureMixin, FrameEncoder):
    """Records that are frames already: entries 0 and 1."""

    def _learn(self, X: np.ndarray) -> None:
        self._encode(X)

    def _encode(self, X: np.ndarray) -> np.ndarray:
        frames = X.astype(np.uint8)
        if not np.array_equal(frames, X) or frames.max(initial=0) > 1:
            raise ValueError(
                "X holds other numbers than 0 and 1, which no mirror shows; take an encoder such as ThresholdEncoder()"
            )
        return frames


class AutoencoderEncoder(FrameEncoder):
    """Codes b = 1[W x > 0] from which W^T b reconstructs x; W is learnt by gradient descent on the decoder.

    Tissier et al., "Near-lossless binarization of word embeddings", 2019: the code has no gradient, so only the decoder
    W^T is learnt; the encoder uses the same W. The loss is the mean squared error of the reconstruction plus |W^T W -
    1|^2 / 2, which keeps the columns of W apart.

    Args:
        n_bits: Width of the code.
        epochs: Passes over the records.
        batch_size: Records in a step.
        learning_rate: Adam's learning rate.
        random_state: Seed of W and of the batches, in [0, 2^63).

    Attributes:
        mean_: Mean of the records, subtracted before encoding, shape (d,).
        scale_: Root mean square of the centred records.
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
        self.n_bits, self.epochs, self.batch_size = n_bits, epochs, batch_size
        self.learning_rate, self.random_state = learning_rate, random_state

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
                x = records[batch]
                error = (binary_code(weights, x).float() @ weights - x).square().mean()
                (error + orthogonality(weights)).backward()
                optimizer.step()
        self.weights_ = weights.detach().numpy()

    def _encode(self, X: np.ndarray) -> np.ndarray:
        return (self._centred(X) @ self.weights_.T > 0).astype(np.uint8)

    def _centred(self, X: np.ndarray) -> np.ndarray:
        return ((X - self.mean_) / self.scale_).astype(np.float32)


def binary_code(weights: Tensor, x: Tensor) -> Tensor:
    """Return 1[W x > 0] for each row x, bool, shape (n, n_bits); it passes no gradient."""
    return x.detach() @ weights.detach().T > 0


def orthogonality(weights: Tensor) -> Tensor:
    """Return |W^T W - 1|^2 / 2, which keeps the columns of W apart."""
    gram = weights.T @ weights
    return 0.5 * (gram - torch.eye(len(gram), device=gram.device)).square().sum()
