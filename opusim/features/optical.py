"""Optical random features for scikit-learn, torch and scipy, and the kernel that they approximate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin, clone
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from opusim import checks
from opusim.description.schema import load_description
from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_device
from opusim.encodings import binarize, bit_planes
from opusim.errors import ConfigError
from opusim.features.encoders import FrameEncoder, ThresholdEncoder


class OpticalFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Map records to |R x|^degree of their binary codes x, read from a device, or to the linear B x.

    `fit` learns the encoder's constants, the only part of the map that depends on records, and opens the device. The
    map works in Pipeline, GridSearchCV and clones. A pickle holds the configuration and the encoder's constants, but
    not the device, which is opened again when it is needed.

    Args:
        n_components: Number of features: outputs of the device.
        device: Name or file of a device, or an open device that is large enough. The description of a named device
            fixes the map, through its medium.
        encoder: How a record becomes frames (`opusim.features.encoders`); None takes ThresholdEncoder(): 1 where a
            feature exceeds its median.
        degree: Even exponent of |R x|: 2 gives the intensities, 4 their squares.
        linear: Whether features are B x instead of |R x|^degree.
        bias: Number of mirrors that are always on, next to the code's.
        options: Sections laid over the device's description, such as {"noise": {"sigma": 0.2}}.
        random_state: Seed of the device's noise, in [0, 2^64); the medium's seed is in the description.

    Attributes:
        encoder_: The fitted encoder.
        device_: The open device.
        n_frame_inputs_: Mirrors of a frame, the bias included.

    Example:
        >>> from sklearn.datasets import load_digits
        >>> x, _ = load_digits(return_X_y=True)
        >>> OpticalFeatures(500).fit_transform(x[:10]).shape
        (10, 500)
    """

    def __init__(
        self,
        n_components: int = 1000,
        *,
        device: str | Path | NoisyDevice = "ideal",
        encoder: FrameEncoder | None = None,
        degree: int = 2,
        linear: bool = False,
        bias: int = 0,
        options: Mapping[str, Any] | None = None,
        random_state: int = 0,
    ) -> None:
        self.n_components, self.device, self.encoder, self.degree = n_components, device, encoder, degree
        self.linear, self.bias, self.options, self.random_state = linear, bias, options, random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn the encoder's constants and open the device.

        Args:
            X: Records, shape (n, d).
            y: Ignored.

        Raises:
            TypeError, ValueError, ConfigError: An argument is out of range, or the device is too small.
            CapabilityMissing: The device gives no intensities.
            DeviceError: The device cannot be opened.
        """
        checks.complete(X=X)
        checks.integer(n_components=self.n_components, minimum=1)
        checks.integer(bias=self.bias, minimum=0)
        checks.integer(degree=self.degree, minimum=2)
        if self.degree % 2:
            raise ValueError(f"degree = {self.degree}: must be even; an intensity has degree 2")
        records = validate_data(self, X)
        self.close()
        self.encoder_ = (ThresholdEncoder() if self.encoder is None else clone(self.encoder)).fit(records)
        self.n_frame_inputs_ = self.encoder_.transform(records[:1]).shape[1] + self.bias
        self._open()
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Return the features of records, float32, shape (n, n_components).

        Encoders with several frames a record join their readings first, which may widen the result.

        Args:
            X: Records, shape (n, d).
        """
        checks.complete(X=X)
        check_is_fitted(self)
        return self._features(validate_data(self, X, reset=False))

    def blocks(self, X: Any, batch_size: int = 1024) -> Iterator[np.ndarray]:
        """Yield the features of records in blocks, so that memory holds one block at a time.

        Args:
            X: Records, shape (n, d).
            batch_size: Records in a block, at least 1.
        """
        checks.complete(X=X)
        checks.integer(batch_size=batch_size, minimum=1)
        check_is_fitted(self)
        records = validate_data(self, X, reset=False)
        for start in range(0, len(records), batch_size):
            yield self._features(records[start : start + batch_size])

    def close(self) -> None:
        """Close a device that `fit` opened; a device that was given open stays open."""
        device = self.__dict__.pop("device_", None)
        if device is not None and device is not self.device:
            device.close()

    def __sklearn_tags__(self) -> Tags:
        """Say that a noisy device gives other numbers in each call."""
        tags = super().__sklearn_tags__()
        tags.non_deterministic = False  # a device that is given open is read once a call
        if not isinstance(self.device, NoisyDevice):
            opened = self.__dict__.get("device_")
            description = (
                load_description(self.device, dict(self.options or {}))
                if opened is None
                else opened.description
            )
            noise, tags.non_deterministic = description.noise, True
            simulated = description.lighton is None or description.lighton.simulated
            if simulated and description.kind in ("ideal", "gaussian", "lighton"):
                tags.non_deterministic = noise is not None and noise.value() > 0
        tags.transformer_tags.preserves_dtype = []
        return tags

    def __getstate__(self) -> dict[str, Any]:
        """Leave an open device out; TypeError if the device itself was given instead of its name."""
        if isinstance(self.device, NoisyDevice):
            raise TypeError(
                f"device = {self.device.name!r} is open, and an open device cannot be pickled; give its name or file"
            )
        state: dict[str, Any] = dict(super().__getstate__())
        state.pop("device_", None)
        return state

    def __getattr__(self, name: str) -> Any:
        """Open the device again where a pickle left it out."""
        if name == "device_" and "n_frame_inputs_" in self.__dict__:
            self._open()
            return self.__dict__["device_"]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _n_features_out(self) -> int:
        """Number of columns, for `get_feature_names_out`."""
        rows = self.encoder_.rows_per_record
        return int(self.encoder_.decode(np.zeros((rows, self.n_components), dtype=np.float32)).shape[1])

    def _open(self) -> None:
        device = self.device
        if not isinstance(device, NoisyDevice):
            device = open_device(
                device,
                n_inputs=self.n_frame_inputs_,
                n_outputs=self.n_components,
                seed=self.random_state,
                **(self.options or {}),
            )
        require_window(device, self.n_frame_inputs_, self.n_components)
        if not self.linear:
            device.require("intensities")
        self.device_ = device

    def _features(self, records: np.ndarray) -> np.ndarray:
        frames = self.encoder_.frames_of(records)
        frames = widened(frames, self.device_.n_inputs, bias=self.bias)
        if self.linear:
            readings = self.device_.project(frames)[:, : self.n_components]
        else:
            readings = self.device_.intensities(frames)[:, : self.n_components]
            if self.degree > 2:
                readings = readings ** (self.degree // 2)
        return np.asarray(self.encoder_.decode(readings))


class OpticalLayer(nn.Module):
    """Intensities |R x|^2 of 1[x > threshold], or B x of entries in {-1, 0, 1}, as a torch module without parameters.

    The output carries no gradient, so that layers before it do not learn. Any leading shape is taken.

    Args:
        device: An open device; its window gives the widths.
        linear: Whether to project instead.
        threshold: Inputs above it switch their mirrors on; None takes inputs that are 0 and 1 already, and is the only
            choice for linear layers.
    """

    def __init__(self, device: NoisyDevice, *, linear: bool = False, threshold: float | None = None) -> None:
        super().__init__()
        checks.instance(NoisyDevice, device=device)
        if threshold is not None:
            checks.finite(threshold=threshold)
        if linear and threshold is not None:
            raise ValueError(
                f"threshold = {threshold:g} is for intensities; a linear layer takes entries -1, 0 and 1"
            )
        if not linear:
            device.require("intensities")
        self.device, self.linear, self.threshold = device, linear, threshold

    @torch._disable_dynamo
    def forward(self, x: Tensor) -> Tensor:
        """Return features, float32, shape (..., n_outputs), of x, shape (..., n_inputs)."""
        rows = x.detach().reshape(-1, x.shape[-1])
        if self.threshold is not None:
            rows = binarize(rows, self.threshold)
        with torch.no_grad():
            found = self.device.project(rows) if self.linear else self.device.intensities(rows)
        return found.reshape(*x.shape[:-1], self.device.n_outputs)

    def extra_repr(self) -> str:
        """Return what a printed model shows."""
        what = "linear" if self.linear else "intensities"
        return f"{self.device.name!r}, {self.device.n_inputs}, {self.device.n_outputs}, {what}"


class OpticalOperator(LinearOperator):
    """B of an open device as a linear operator of scipy: `operator @ x` reads B x of real vectors x.

    Each vector is divided by its largest entry s and shown in signed binary digits (`opusim.encodings.bit_planes`), so
    an entry errs by at most 2^-planes s, and a reading's noise is multiplied by less than 0.58 s. Every product is a
    new reading. `operator.T @ y` is computed from the matrix, so the device must have the capability `matrix`.

    Args:
        device: The device; its window gives the shape, (n_outputs, n_inputs).
        planes: Digits of an entry, from 1 to 24; each digit takes the frames of one reading.

    Example:
        >>> device = open_device("ideal", n_inputs=200, n_outputs=20)
        >>> a = np.ones((500, 200))
        >>> basis = np.linalg.qr((OpticalOperator(device) @ a.T).T)[0]  # Halko, Martinsson and Tropp 2011
        >>> bool(np.allclose(basis @ (basis.T @ a), a, atol=1e-4))
        True
    """

    def __init__(self, device: NoisyDevice, *, planes: int = 8) -> None:
        checks.instance(NoisyDevice, device=device)
        checks.integer(planes=planes, minimum=1, maximum=24)
        super().__init__(dtype=np.dtype(np.float32), shape=(device.n_outputs, device.n_inputs))
        self.device, self.planes = device, planes

    def _matmat(self, X: Any) -> np.ndarray:
        """Return B X for columns X, shape (n_inputs, k)."""
        checks.complete(X=X)
        columns = np.asarray(X)
        if columns.dtype.kind not in "iufb":
            raise TypeError(f"X has dtype {columns.dtype}: must be real numbers; give its parts one by one")
        rows = torch.from_numpy(np.ascontiguousarray(columns.T, dtype=np.float32))
        scale = rows.abs().amax(dim=1, keepdim=True)
        digits, weights = bit_planes(rows / scale.clamp_min(torch.finfo(torch.float32).tiny), self.planes)
        readings = self.device.project(digits.flatten(0, 1)).unflatten(0, (self.planes, -1))
        return (torch.tensordot(weights, readings, dims=1) * scale).T.numpy()

    def _rmatmat(self, X: Any) -> np.ndarray:
        """Return B^T X for columns X, shape (n_outputs, k); CapabilityMissing if the device does not tell B."""
        return np.asarray(np.asarray(self.device.require("matrix").matrix()).T @ X)


def opu_kernel(X: Any, Y: Any = None, *, degree: int = 2, bias: float = 0.0, gain: float = 1.0) -> np.ndarray:
    """Return the expected product of two intensities, the OPU kernel, exact for real vectors.

    For rows r of a complex medium with independent standard complex normal entries, E|r_i|^2 = 1, and s = degree / 2,

        k(x, y) = E[|r x|^degree |r y|^degree] = (s!)^2 sum_i C(s, i)^2 (x.y)^(2i) (|x|^2 |y|^2)^(s - i),

    which is |x|^2 |y|^2 + (x.y)^2 at degree 2. Features are `device.intensities(x) ** s / sqrt(n_outputs)`: their dot
    products have this mean. Sources: Saade et al., "Random projections through multiple optical scattering", 2016,
    for degree 2; Ohana et al., "Kernel computations from large-scale random features obtained by optical processing
    units", 2020, for even degrees. scikit-learn takes the function as a kernel, as in KernelRidge(kernel=opu_kernel).

    Args:
        X: Vectors, shape (n, d) or (d,).
        Y: Vectors, shape (m, d) or (d,); None takes X.
        degree: An even number of at least 2.
        bias: b^2, added to every dot product: a vector with one more entry b, or b^2 mirrors that are always on.
        gain: Factor on the intensities.

    Returns:
        float64, shape (n, m); a number for two vectors.

    Raises:
        ValueError: Another degree or shape.
    """
    checks.integer(degree=degree, minimum=2)
    checks.non_negative(bias=bias)
    checks.positive(gain=gain)
    if degree % 2:
        raise ValueError(f"degree = {degree}: must be even; an intensity has degree 2")
    checks.complete(X=X, Y=Y)
    x = np.asarray(X, dtype=np.float64)
    y = x if Y is None else np.asarray(Y, dtype=np.float64)
    if x.shape[-1:] != y.shape[-1:] or not 1 <= x.ndim <= 2 or not 1 <= y.ndim <= 2:
        raise ValueError(f"X has shape {x.shape} and Y {y.shape}: must be (n, d) and (m, d) with the same d")
    dots = x @ y.T + bias
    sizes = np.multiply.outer(np.sum(x * x, axis=-1) + bias, np.sum(y * y, axis=-1) + bias)
    s = degree // 2
    total = sum(math.comb(s, i) ** 2 * dots ** (2 * i) * sizes ** (s - i) for i in range(s + 1))
    return np.asarray(math.factorial(s) ** 2 * gain**degree * total)


def require_window(device: NoisyDevice, n_inputs: int, n_outputs: int) -> None:
    """Refuse (ConfigError) an open device that is too small."""
    for key, has, needed in (
        ("n_inputs", device.n_inputs, n_inputs),
        ("n_outputs", device.n_outputs, n_outputs),
    ):
        if has < needed:
            raise ConfigError(
                device.name, key, f"the device is open with {has}, and {needed} are needed; open it wider"
            )


def widened(frames: np.ndarray, n_inputs: int, *, bias: int) -> np.ndarray:
    """Return frames widened to a device: of the added mirrors, the first `bias` are on and the others off."""
    width = frames.shape[1]
    if width == n_inputs:
        return frames
    wide = np.zeros((len(frames), n_inputs), dtype=frames.dtype)
    wide[:, :width] = frames
    wide[:, width : width + bias] = 1
    return wide
