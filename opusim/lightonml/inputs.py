"""Read what a user gives to an OPU: shapes, bits, batches; and lay features out on mirrors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from opusim import checks
from opusim.lightonml.context import Roi
from opusim.lightonml.types import FeaturesFormat, InputRoiStrategy

_ENCODE = (
    "encode it first, by transform(X, encoder_cls=BinaryThresholdEncoder(threshold)), or by SeparatedBitPlanEncoder() "
    "and SeparatedBitPlanDecoder for linear_transform (opusim.lightonml.encoding.base)"
)


def as_array(X: Any) -> np.ndarray:
    """Return real numbers as a plain array; tensors of any torch device, arrays and lists are taken.

    Raises:
        TypeError: They are no real numbers.
    """
    checks.complete(X=X)
    found = X.detach().cpu().numpy() if isinstance(X, torch.Tensor) else np.asarray(X)
    if found.dtype.kind not in "iufb":
        raise TypeError(
            f"X has dtype {found.dtype}: must be real numbers; give an array of 0 and 1, such as uint8"
        )
    return np.asarray(found)


def like(found: np.ndarray, X: Any) -> Any:
    """Return an array in the library, and on the torch device, of X."""
    return (
        torch.from_numpy(np.ascontiguousarray(found)).to(X.device) if isinstance(X, torch.Tensor) else found
    )


@dataclass(frozen=True)
class Features:
    """The features of a vector: what `fit1d` and `fit2d` learn.

    Attributes:
        shape: One length, or rows and columns.
        packed: Whether eight of them stand in a byte, as `numpy.packbits` gives them.
    """

    shape: tuple[int, ...]
    packed: bool = False

    @property
    def size(self) -> int:
        """Number of features."""
        return math.prod(self.shape)

    @property
    def axes(self) -> tuple[int, ...]:
        """Last axes of X: the shape, or the bytes."""
        return (-(-self.size // 8),) if self.packed else self.shape

    def rows(self, X: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return vectors as rows, and the shape of the batch.

        Args:
            X: One vector, or a batch with one or two leading axes.

        Raises:
            ValueError: Another shape than was fitted, or nothing at all.
            TypeError: Packed bits that are not uint8.
        """
        leading = X.ndim - len(self.axes)
        if leading < 0 or X.shape[leading:] != self.axes:
            what = (
                f"{self.axes[0]} bytes for {self.size} features" if self.packed else f"features {self.axes}"
            )
            raise ValueError(
                f"X has shape {X.shape}: its last axes must be the {what} of the last fit; call fit1d or fit2d on "
                "vectors like these (on encoded ones, if an encoder changes their number of features)"
            )
        if leading > 2:
            raise ValueError(f"X has shape {X.shape}: a batch has at most two leading axes; use reshape")
        if X.size == 0:
            raise ValueError(f"X is empty, shape {X.shape}; give at least one vector")
        if self.packed and X.dtype != np.uint8:
            raise TypeError(f"X has dtype {X.dtype}: packed bits are uint8; use numpy.packbits(X, axis=-1)")
        return X.reshape(-1, math.prod(self.axes)), X.shape[:leading]

    def unpacked(self, rows: np.ndarray) -> np.ndarray:
        """Return rows with an entry for each feature."""
        return np.unpackbits(rows, axis=1, count=self.size) if self.packed else rows


def features_of(X: np.ndarray | None, n_features: Any, *, packed: bool, axes: int) -> Features:
    """Return the features that a fit is told or sees.

    Args:
        X: Vectors, or None.
        n_features: Their number or their shape, or None to take it from X.
        packed: Whether X is packed.
        axes: 1 or 2.

    Raises:
        TypeError, ValueError: They are missing, out of range, or contradict each other.
    """
    name = "n_features" if axes == 1 else "n_features (rows, columns)"
    if n_features is not None:
        shape = tuple(n_features) if isinstance(n_features, Iterable) else (n_features,)
        if len(shape) != axes:
            raise ValueError(f"n_features = {n_features!r}: must be {axes} number(s) for fit{axes}d")
        for length in shape:
            checks.integer(n_features=length, minimum=1)
        told = Features(tuple(int(length) for length in shape), packed)
        if X is not None and X.shape[-len(told.axes) :] != told.axes:
            raise ValueError(
                f"n_features = {n_features!r} and X of shape {X.shape} contradict each other; leave n_features out, "
                "or pack X by numpy.packbits(X, axis=-1) and say packed=True"
            )
        return told
    if X is None:
        raise ValueError(f"X and {name} are both missing: a fit needs one of them; give vectors, or {name}")
    if packed and axes == 2:
        raise ValueError(f"{name} is missing: packed bits do not tell it; give it with packed=True")
    if X.ndim < axes:
        raise ValueError(
            f"X has shape {X.shape}: fit{axes}d needs at least {axes} axes; use fit1d, or reshape"
        )
    if X.size == 0:
        raise ValueError(f"X is empty, shape {X.shape}; give at least one vector, or {name}")
    shape = (8 * X.shape[-1],) if packed else X.shape[-axes:]
    return Features(tuple(int(length) for length in shape), packed)


def require_shown(rows: np.ndarray, *, ternary: bool) -> None:
    """Refuse entries that no mirror shows.

    Args:
        rows: Any shape.
        ternary: Whether -1 is allowed, which takes a second frame.

    Raises:
        ValueError: Names the first such entry, and the encoder to use.
    """
    if rows.dtype == np.bool_:
        return
    right = (rows == 0) | (rows == 1)
    if ternary:
        right |= rows == -1
    if bool(right.all()):
        return
    wrong = rows[~right][0]
    may = "-1, 0 or 1" if ternary else "0 or 1"
    if np.isnan(wrong):
        raise ValueError(
            "X holds NaN, which no encoder knows; fill gaps first, as by sklearn.impute.SimpleImputer()"
        )
    hint = ""
    if wrong == -1:
        hint = "; linear_transform takes -1"
    elif rows.dtype.kind == "u" and wrong == np.iinfo(rows.dtype).max:
        hint = "; unsigned integers wrap -1 to their largest value: use int8 and linear_transform"
    raise ValueError(f"X holds {wrong:g}: a device shows {may}; {_ENCODE}{hint}")


@dataclass(frozen=True)
class Layout:
    """Where features stand on the mirrors of a frame.

    Attributes:
        features: The features.
        array: Rows and columns of the window, or None if features stand one after the other.
        factor: Mirrors along the side of a macro-pixel.
    """

    features: Features
    array: tuple[int, int] | None = None
    factor: int = 1

    @property
    def width(self) -> int:
        """Mirrors of the window."""
        return self.features.size if self.array is None else math.prod(self.array)

    @property
    def format(self) -> FeaturesFormat:
        """How features become mirrors."""
        return FeaturesFormat.lined if self.array is None else FeaturesFormat.macro_2d

    @property
    def roi(self) -> Roi:
        """Offset and size of the region that shows features."""
        if self.array is None:
            return (0, 0), (1, self.features.size)
        size = [self.factor * length for length in self.features.shape]
        offset = [all_ // 2 - length // 2 for all_, length in zip(self.array, size, strict=True)]
        return (offset[0], offset[1]), (size[0], size[1])

    def frames(self, rows: np.ndarray) -> np.ndarray:
        """Return the frames of unpacked rows, shape (n, width)."""
        if self.array is None:
            return rows
        (top, left), (height, width) = self.roi
        frames = np.zeros((len(rows), *self.array), dtype=rows.dtype)
        squares = (
            rows.reshape(-1, *self.features.shape).repeat(self.factor, axis=1).repeat(self.factor, axis=2)
        )
        frames[:, top : top + height, left : left + width] = squares
        return frames.reshape(len(rows), -1)


def layout_of(features: Features, mirror_shape: tuple[int, int] | None, strategy: InputRoiStrategy) -> Layout:
    """Return the layout of features.

    Args:
        features: The features.
        mirror_shape: Rows and columns of the device's mirrors, or None if it has no geometry.
        strategy: What 2-D features take.

    Raises:
        ValueError: They do not fit.
    """
    if mirror_shape is None or len(features.shape) == 1 or strategy is InputRoiStrategy.small:
        return Layout(features)
    factor = min(all_ // length for all_, length in zip(mirror_shape, features.shape, strict=True))
    if not factor:
        rows, columns = mirror_shape
        raise ValueError(
            f"features of shape {features.shape} do not fit the device's {rows} x {columns} mirrors; turn or crop "
            "them, or use fit1d on X.reshape(len(X), -1)"
        )
    return Layout(features, mirror_shape, factor)


@dataclass(frozen=True)
class Fit:
    """What a fit decides.

    Attributes:
        features: Number, or shape, of the features.
        layout: Where they stand on the mirrors.
        online: Whether vectors come one by one.
        n_components: Outputs.
        strategy: The OPU's strategy then, which the fit may override.
        timing: Exposure and time of a frame, if the fit sets them, microseconds.
    """

    features: Features
    layout: Layout
    online: bool
    n_components: int
    strategy: InputRoiStrategy
    timing: tuple[tuple[str, float], ...]
