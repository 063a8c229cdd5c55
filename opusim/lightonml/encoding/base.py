"""Encoders and decoders under lightonml's names: scikit-learn transformers over `opusim.features.encoders`.

They take arrays and tensors, and return the same library's. Learnt values are attributes that end in an underscore; a
second `fit` learns them again. Where a law differs from lightonml's, the class says so.
"""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
import sklearn.exceptions
from sklearn.base import BaseEstimator, TransformerMixin

from opusim import checks
from opusim.features.encoders import BitPlaneEncoder, FloatBitsEncoder, FrameEncoder, ThresholdEncoder
from opusim.features.encoders import MultiThresholdEncoder as ThermometerEncoder
from opusim.lightonml.inputs import as_array, like

_WIDEST = 16


class BaseTransformer(TransformerMixin, BaseEstimator):
    """The base of encoders and decoders: `fit` does nothing, `transform` is the subclass's."""

    def fit(self, X: Any = None, y: Any = None) -> Self:
        """Learn nothing."""
        return self

    def transform(self, X: Any) -> Any:
        """Encode or decode an array or a tensor."""
        raise NotImplementedError


class NoEncoding(BaseTransformer):
    """X as it is."""

    def transform(self, X: Any) -> Any:
        """Return X."""
        return X


class NoDecoding(NoEncoding):
    """Readings as they are."""


class _Encoder(BaseTransformer):
    """An encoder whose work an encoder of `opusim.features` does.

    Attributes:
        coder_: That encoder, once it is fitted.
    """

    def fit(self, X: Any = None, y: Any = None) -> Self:
        """Learn the constants of the code from X, shape (n, d)."""
        self.coder_ = self._coder().fit(self._prepared(as_array(X)))
        return self

    def transform(self, X: Any) -> Any:
        """Return the frames of X, uint8, 0 and 1.

        Raises:
            sklearn.exceptions.NotFittedError: The code learns from data, and `fit` was not called.
            TypeError, ValueError: X is empty, holds NaN, or has another width than `fit` saw.
        """
        records = self._prepared(as_array(X))
        coder = getattr(self, "coder_", None)
        if coder is None:
            if self._learns():
                raise sklearn.exceptions.NotFittedError(
                    f"{type(self).__name__} learns its constants from data; call fit on the training data before "
                    "transform"
                )
            coder = self._coder().fit(records)
        return like(coder.transform(records), X)

    def _coder(self) -> FrameEncoder:
        """Return the encoder that does the work, not fitted."""
        raise NotImplementedError

    def _learns(self) -> bool:
        """Whether its constants come from data."""
        return False

    def _prepared(self, X: np.ndarray) -> np.ndarray:
        """Return the records as the encoder takes them."""
        return X


class BinaryThresholdEncoder(_Encoder):
    """1 where X > threshold, or X < threshold if not greater_is_one; X of any shape.

    lightonml prints a warning if the threshold lies outside the data; `fit` refuses it.

    Args:
        threshold_enc: The threshold, or "auto" for the median of each feature.
        greater_is_one: Which side is 1.

    Attributes:
        threshold_: The thresholds in use, once fitted.
    """

    def __init__(self, threshold_enc: float | str = "auto", greater_is_one: bool = True) -> None:
        self.threshold_enc, self.greater_is_one = threshold_enc, greater_is_one

    def fit(self, X: Any = None, y: Any = None) -> Self:
        """Learn the medians for "auto"; for a number check that it lies in the range of X.

        Raises:
            ValueError: It lies outside: every code would be the same.
        """
        values = as_array(X)
        if not self._learns() and values.size:
            low, high = float(values.min()), float(values.max())
            remedy = "as in the data that fit sees; outside of it every code is the same"
            checks.in_range(low, high, threshold_enc=self.threshold_enc, remedy=remedy)
        super().fit(X)
        self.threshold_ = self._sign * self.coder_.threshold_
        return self

    def transform(self, X: Any) -> Any:
        """Return the code, uint8, in the shape of X."""
        return super().transform(X).reshape(as_array(X).shape)

    @property
    def _sign(self) -> int:
        return 1 if self.greater_is_one else -1

    def _learns(self) -> bool:
        if isinstance(self.threshold_enc, str):
            checks.choice(("auto",), threshold_enc=self.threshold_enc, remedy="or give a number")
            return True
        checks.finite(threshold_enc=self.threshold_enc)
        return False

    def _coder(self) -> FrameEncoder:
        threshold: Any = "median" if self._learns() else self._sign * np.float64(self.threshold_enc)
        return ThresholdEncoder(threshold)

    def _prepared(self, X: np.ndarray) -> np.ndarray:
        return self._sign * X.reshape(len(X) if X.ndim > 1 else 1, -1).astype(np.float64)


class MultiThresholdEncoder(_Encoder):
    """A bit for each threshold, 1 where X exceeds it; all features at the first threshold, then at the second.

    "quantiles" interpolates linearly; lightonml takes midpoints.

    Args:
        thresholds: "linspace", "quantiles", or increasing numbers, shape (t,), or (d, t) with columnwise.
        n_bins: Values that the code tells apart, one more than its thresholds; ignored if they are given.
        columnwise: Whether each feature has thresholds of its own.
    """

    def __init__(self, thresholds: Any = "linspace", n_bins: int = 8, columnwise: bool = False) -> None:
        self.thresholds, self.n_bins, self.columnwise = thresholds, n_bins, columnwise

    def _learns(self) -> bool:
        if isinstance(self.thresholds, str):
            checks.choice(("linspace", "quantiles"), thresholds=self.thresholds, remedy="or give numbers")
            return True
        return False

    def _coder(self) -> FrameEncoder:
        if self._learns():
            spacing: Any = "uniform" if self.thresholds == "linspace" else "quantile"
            return ThermometerEncoder(self.n_bins, spacing=spacing, per_feature=self.columnwise)
        if np.ndim(self.thresholds) != 1 + self.columnwise:
            raise ValueError(
                f"thresholds has shape {np.shape(self.thresholds)}: must be (d, t) with columnwise=True, else (t,); "
                f"give it that shape, or set columnwise={not self.columnwise}"
            )
        return ThermometerEncoder(thresholds=self.thresholds)


class ConcatenatedBitPlanEncoder(BaseTransformer):
    """Bits of unsigned integers of 8 or 16 bits, next to each other, the most significant first.

    lightonml shows the bytes of wider types in the machine's order, and those of floats as stored; here 16 bits are in
    order, and floats, negative numbers and wider types are refused.

    Args:
        n_bits: Bits that are kept, at least 1.
        starting_bit: Number of leading bits that are left out.
    """

    def __init__(self, n_bits: int = 8, starting_bit: int = 0) -> None:
        self.n_bits, self.starting_bit = n_bits, starting_bit

    def transform(self, X: Any) -> Any:
        """Return the bits, uint8, shape (n, d * n_bits)."""
        checks.integer(n_bits=self.n_bits, minimum=1)
        checks.integer(starting_bit=self.starting_bit, minimum=0)
        numbers = as_array(X)
        width = 8 * numbers.dtype.itemsize
        if numbers.dtype.kind not in "bu" or width > _WIDEST:
            raise TypeError(
                f"X has dtype {numbers.dtype}: must be uint8 or uint16, whose bits are digits; scale it and use "
                "astype(numpy.uint8), or take SeparatedBitPlanEncoder or ConcatenatedFloat32Encoder"
            )
        if self.starting_bit + self.n_bits > width:
            raise ValueError(
                f"starting_bit + n_bits = {self.starting_bit + self.n_bits}: {numbers.dtype} has {width}; lower n_bits"
            )
        coder = BitPlaneEncoder(width, low=0, high=2**width - 1)
        bits = coder.fit_transform(numbers).reshape(*numbers.shape, width)
        kept = bits[..., self.starting_bit : self.starting_bit + self.n_bits]
        return like(kept.reshape(len(numbers), -1), X)


class Float32Encoder(_Encoder):
    """Bits of float32, each in a row of its own: sign, exponent, mantissa, the most significant first.

    X is converted to float32; lightonml reads the bytes of other types as if they were float32.

    Args:
        sign_bit: Whether the sign is kept.
        exp_bits: Bits of the exponent, from 0 to 8.
        mantissa_bits: Bits of the mantissa, from 0 to 23.

    Attributes:
        n_bits: Rows of a record.
    """

    _layout = "separated"

    def __init__(self, sign_bit: bool = True, exp_bits: int = 8, mantissa_bits: int = 23) -> None:
        self.sign_bit, self.exp_bits, self.mantissa_bits = sign_bit, exp_bits, mantissa_bits

    @property
    def n_bits(self) -> int:
        """Bits that are kept."""
        return int(self.sign_bit) + self.exp_bits + self.mantissa_bits

    def _coder(self) -> FrameEncoder:
        return FloatBitsEncoder(
            sign=bool(self.sign_bit),
            exponent_bits=self.exp_bits,
            mantissa_bits=self.mantissa_bits,
            layout=self._layout,  # type: ignore[arg-type]
        )


class ConcatenatedFloat32Encoder(Float32Encoder):
    """Bits of float32 next to each other, shape (n, d * n_bits); arguments as for `Float32Encoder`."""

    _layout = "concatenated"


class SequentialBaseTwoEncoder(_Encoder):
    """Binary digits in which the digit of weight 2^k stands 2^k times, shape (n, d (n_gray_levels - 1)).

    lightonml fails above 256 levels; here 2^16 are distinct.

    Args:
        n_gray_levels: Values that the code tells apart, a power of 2 from 2 to 65536.
    """

    def __init__(self, n_gray_levels: int = 16) -> None:
        self.n_gray_levels = n_gray_levels

    def _learns(self) -> bool:
        return True

    def _coder(self) -> FrameEncoder:
        checks.integer(n_gray_levels=self.n_gray_levels, minimum=2, maximum=2**_WIDEST)
        if self.n_gray_levels & (self.n_gray_levels - 1):
            raise ValueError(f"n_gray_levels = {self.n_gray_levels}: must be a power of 2, such as 16")
        return BitPlaneEncoder(self.n_gray_levels.bit_length() - 1)

    def transform(self, X: Any) -> Any:
        """Return the code, uint8; see above."""
        frames, bits = as_array(super().transform(X)), self.n_gray_levels.bit_length() - 1
        digits = frames.reshape(len(frames), -1, bits)
        code = digits.repeat(2 ** np.arange(bits - 1, -1, -1), axis=2)
        return like(code.reshape(len(frames), -1), X)


class SeparatedBitPlanEncoder(BaseTransformer):
    """Binary digits of the positive parts of X, then of the negative parts, each digit in a row of its own.

    The largest magnitude on each side is coded as all ones, and learnt anew by each `transform`. For integers it is
    (2^precision - 1) 2^k with the k that makes the code a shift of their digits.

    Args:
        precision: Digits, from 1 to 16 (lightonml: 8).

    Attributes:
        magnitude_p: Factor that `SeparatedBitPlanDecoder` gives the positive rows; 0 if there are none.
        magnitude_n: The same for the negative rows.
    """

    def __init__(self, precision: int = 6) -> None:
        self.precision = precision

    def __sklearn_clone__(self) -> Self:
        return type(self)(self.precision)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return what `SeparatedBitPlanDecoder` needs: precision, and after a transform the two magnitudes."""
        learnt = {name: vars(self)[name] for name in ("magnitude_p", "magnitude_n") if name in vars(self)}
        return {"precision": self.precision, **learnt}

    def transform(self, X: Any) -> Any:
        """Return the digits, uint8, shape (sides * n * precision, d)."""
        checks.integer(precision=self.precision, minimum=1, maximum=_WIDEST)
        numbers = as_array(X)
        if numbers.ndim != 2 or not numbers.size:
            raise ValueError(f"X has shape {numbers.shape}: must be (n, d), not empty; use reshape")
        checks.finite(X=numbers, remedy="fill gaps first, as by sklearn.impute.SimpleImputer()")
        whole = numbers.dtype.kind != "f"
        sides, factors = [], []
        for part in (numbers.astype(np.float64), -numbers.astype(np.float64)):
            top = float(part.max())
            if top > 0 and whole:
                shift = self.precision - math.ceil(math.log2(top + 1))
                top = (2**self.precision - 1) * 0.5**shift
            coder = BitPlaneEncoder(
                self.precision, low=0.0, high=max(top, 0.0) or 1.0, layout="separated"
            ).fit(part)
            factors.append(coder.scale_ if top > 0 else 0.0)
            if top > 0:
                sides.append(coder.transform(part))
        self.magnitude_p, self.magnitude_n = factors
        rows = sides or [np.zeros((len(numbers) * self.precision, numbers.shape[1]), dtype=np.uint8)]
        return like(np.concatenate(rows), X)


class MixingBitPlanDecoder(BaseTransformer):
    """sum_k decay^k reading_k of a record's bits, shape (n, k); lightonml had it until 1.3.

    Args:
        n_bits: Bits of a record, as its encoder says.
        decoding_decay: Weight of a bit's reading over that of the bit before.
    """

    _joined: Any = "mixed"

    def __init__(self, n_bits: int = 8, decoding_decay: float = 0.5) -> None:
        self.n_bits, self.decoding_decay = n_bits, decoding_decay

    def transform(self, X: Any) -> Any:
        """Return the joined readings, float32.

        Raises:
            ValueError: The rows are no multiple of n_bits.
        """
        checks.integer(n_bits=self.n_bits, minimum=1)
        checks.positive(decoding_decay=self.decoding_decay)
        coder = BitPlaneEncoder(
            self.n_bits, layout="separated", joined=self._joined, decay=self.decoding_decay
        )
        return like(coder.decode(as_array(X).astype(np.float32)), X)


class ConcatenatingBitPlanDecoder(MixingBitPlanDecoder):
    """The weighted readings of all bits next to each other, shape (n, n_bits * k)."""

    _joined = "concatenated"


class SeparatedBitPlanDecoder(BaseTransformer):
    """Linear readings of X from readings of the rows of `SeparatedBitPlanEncoder`: positive minus negative parts.

    Args:
        precision: The encoder's.
        magnitude_p: The encoder's after its transform.
        magnitude_n: The encoder's after its transform.
        decoding_decay: Weight of a digit's reading over that of the digit before; 0.5 is right for linear readings.
    """

    def __init__(
        self, precision: int, magnitude_p: float = 1.0, magnitude_n: float = 0.0, decoding_decay: float = 0.5
    ) -> None:
        self.precision, self.magnitude_p, self.magnitude_n = precision, magnitude_p, magnitude_n
        self.decoding_decay = decoding_decay

    def transform(self, X: Any) -> Any:
        """Return the readings, float32, shape (n, k).

        Raises:
            ValueError: The rows are no multiple of the digits of both sides.
        """
        mixed = MixingBitPlanDecoder(self.precision, self.decoding_decay).transform(as_array(X))
        factors = [factor for factor in (self.magnitude_p, -self.magnitude_n) if factor] or [0.0]
        if len(mixed) % len(factors):
            raise ValueError(
                f"readings has {len(mixed)} records: must be even, the positive and then the negative parts; decode "
                "what the same encoder encoded"
            )
        parts = np.split(mixed, len(factors))
        found = np.einsum("s,snk->nk", np.asarray(factors, dtype=np.float32), np.stack(parts))
        return like(found, X)
