"""Show the error to a feedback matrix and read its projection: digital, or through a noisy device.

Symbols: e error, a row for each reading (rows, n_inputs); B feedback matrix (n_outputs, n_inputs), entries of variance
1; t_k frames in {-1, 0, 1}; g_k noise of a reading. An encoding writes e as s sum_k w_k t_k with public weights w_k and
one factor s for each row; the reading of e is then s sum_k w_k (B t_k + g_k).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from opusim import checks
from opusim.devices.base import NoisyDevice
from opusim.encodings import bit_planes, ternarize
from opusim.randomness import derive_seed

EncodingName = Literal["real", "ternary", "stochastic", "planes", "sign"]
_CALIBRATION_STEP = 2**64 - 2
"""Step number for reading columns of B; no training step repeats its noise."""
_CALIBRATION_READINGS = 64


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A batch of errors as a device is shown it.

    Attributes:
        frames: t_1 .. t_K, shape (K, rows, n_inputs).
        weights: w_1 .. w_K, shape (K,); None for one frame of weight 1.
        scale: s of each row, shape (rows, 1); None for 1.
    """

    frames: Tensor
    weights: Tensor | None = None
    scale: Tensor | None = None

    def decoded(self, readings: Tensor) -> Tensor:
        """Return s sum_k w_k r_k, computed in place.

        Args:
            readings: r_k, shape (K * rows, n_outputs).
        """
        total = readings
        if self.weights is not None:
            total = (self.weights @ readings.view(len(self.weights), -1)).view(self.frames.shape[1], -1)
        return total if self.scale is None else total.mul_(self.scale)

    def noise_gain(self) -> Tensor:
        """Return the factor on the standard deviation of one reading's noise for each row, shape (rows, 1) or ()."""
        weights = self.frames.new_ones(1) if self.weights is None else self.weights
        gain = weights.square().sum().sqrt()
        return gain if self.scale is None else gain * self.scale.abs()

    @property
    def shown(self) -> float:
        """Share of the entries of the frames that are not 0."""
        return float(self.frames.count_nonzero()) / max(self.frames.numel(), 1)


class Encoding(ABC):
    """A way to show real errors to a device that takes entries in {-1, 0, 1}."""

    frames_per_row: int = 1
    """K, the readings of a row."""

    def seek(self, step: int) -> None:  # noqa: B027  # optional hook
        """Say which step the next batches belong to; an encoding that draws numbers keys them by it."""

    @abstractmethod
    def __call__(self, error: Tensor) -> Encoded:
        """Encode a batch of errors.

        Args:
            error: e, float32, shape (rows, n_inputs).
        """


class AbsoluteTernary(Encoding):
    """t = ternarize(e, threshold), s = 1: the encoding of the PDFA paper, which loses the error's norm.

    Args:
        threshold: In units of e, at least 0.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def __call__(self, error: Tensor) -> Encoded:
        """See Encoding."""
        return Encoded(frames=ternarize(error, self._threshold)[None])


class RelativeTernary(Encoding):
    """t = ternarize(e, threshold * rms(e)), s = <e, t> / <t, t>, for each row.

    s t is the best approximation of e along t. The encoding is homogeneous: c e has the same frames and c times the
    scale, so that a loss may be averaged over the batch or scaled (mixed precision) without losing entries.

    Args:
        threshold: In units of the row's root mean square, at least 0; 0 shows the sign of every entry. For normally
            distributed entries 0.61 gives the largest cosine between t and e, 0.9.
    """

    def __init__(self, threshold: float) -> None:
        checks.non_negative(threshold=threshold)
        self._threshold = threshold

    def __call__(self, error: Tensor) -> Encoded:
        """See Encoding."""
        rms = torch.linalg.vector_norm(error, dim=1, keepdim=True) / error.shape[1] ** 0.5
        shown = error.abs() > self._threshold * rms
        frames = error.sign().mul_(shown)
        sums = torch.linalg.vecdot(error, frames)[:, None]
        return Encoded(frames=frames[None], scale=sums / shown.sum(dim=1, keepdim=True).clamp_min(1))


class StochasticTernary(Encoding):
    """t_i = sign(e_i) with probability |e_i| / s, else 0; s = max|e| of the row, so that the mean of s t is e.

    Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning", 2017, equations 2
    and 3. Where few entries are large and many small, as in the error of a classifier, a threshold drops the small ones
    in every record alike, which is a bias of the feedback; here they are shown now and then.

    Args:
        seed: Seed of the draws, in [0, 2^64); a draw depends on it, on the step and on the batches since `seek`.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._step, self._batches = seed, 0, 0

    def seek(self, step: int) -> None:
        """See Encoding.seek."""
        self._step, self._batches = step, 0

    def __call__(self, error: Tensor) -> Encoded:
        """See Encoding."""
        seed = derive_seed(self._seed, f"ternary codes of step {self._step}, batch {self._batches}")
        self._batches += 1
        generator = torch.Generator().manual_seed(seed % 2**63)
        drawn = torch.rand(error.shape, generator=generator).to(error.device)
        scale = error.abs().amax(dim=1, keepdim=True)
        frames = error.sign().mul_(drawn * scale < error.abs())
        return Encoded(frames=frames[None], scale=scale)


class BitPlanes(Encoding):
    """Signed binary digits of e / max|e|, s = max|e| of the row (`opusim.encodings.bit_planes`).

    Args:
        planes: K, the number of digits, from 1 to 24.
    """

    def __init__(self, planes: int) -> None:
        checks.integer(planes=planes, minimum=1, maximum=24)
        self.frames_per_row = planes

    def __call__(self, error: Tensor) -> Encoded:
        """See Encoding."""
        scale = error.abs().amax(dim=1, keepdim=True)  # (rows, 1)
        digits, weights = bit_planes(
            error / scale.clamp_min(torch.finfo(error.dtype).tiny), self.frames_per_row
        )
        return Encoded(frames=digits, weights=weights, scale=scale)


def make_encoding(name: EncodingName, *, threshold: float, planes: int, seed: int = 0) -> Encoding | None:
    """Return an encoding by name, or None for "real", which shows the error itself.

    Args:
        name: real, ternary (relative threshold), stochastic, planes or sign (ternary with threshold 0).
        threshold: See `RelativeTernary`; only for "ternary".
        planes: See `BitPlanes`; only for "planes".
        seed: See `StochasticTernary`; only for "stochastic".

    Raises:
        ValueError: The name is unknown, or a number is out of range.
    """
    checks.choice(("real", "ternary", "stochastic", "planes", "sign"), encoding=name)
    if name == "real":
        return None
    if name == "stochastic":
        return StochasticTernary(seed)
    if name == "planes":
        return BitPlanes(planes)
    return RelativeTernary(threshold if name == "ternary" else 0.0)


class Projection(ABC):
    """Reads B e for all points of feedback at once; points use slices of one reading."""

    def seek(self, step: int) -> None:  # noqa: B027  # optional hook
        """Say which step the next readings belong to; see `Encoding.seek`."""

    def noise_std(self, error: Tensor) -> Tensor:
        """Return the standard deviation of a reading's noise, mean over rows, in units of B e.

        Args:
            error: e, shape (rows, n_inputs).

        Returns:
            One value, shape (), or one per output.
        """
        return error.new_zeros(())

    def noise_power(self, error: Tensor) -> Tensor:
        """Return the variance of a reading's noise, mean over rows; see `noise_std`."""
        return error.new_zeros(())

    def shown(self, error: Tensor) -> float:
        """Return the share of the entries of the error that the projection sees, in [0, 1].

        Args:
            error: e, shape (rows, n_inputs).
        """
        return 1.0

    @abstractmethod
    def read(self, error: Tensor) -> Tensor:
        """Return the projected error, shape (rows, n_outputs).

        Args:
            error: e, shape (rows, n_inputs).
        """

    @abstractmethod
    def columns(self, n_inputs: int) -> Tensor:
        """Return B transposed as the trainer knows it, shape (n_inputs, n_outputs)."""


class DigitalProjection(Projection):
    """B e, or B of the encoded error, as a matrix product.

    Args:
        matrix: B transposed, shape (n_inputs, n_outputs); entries N(0, 1).
        encoding: How e is shown, or None to project e itself.
    """

    def __init__(self, matrix: Tensor, *, encoding: Encoding | None = None) -> None:
        self._matrix = matrix
        self._encoding = encoding

    def seek(self, step: int) -> None:
        """See Projection.seek."""
        if self._encoding is not None:
            self._encoding.seek(step)

    def shown(self, error: Tensor) -> float:
        """See Projection.shown."""
        return 1.0 if self._encoding is None else self._encoding(error).shown

    def read(self, error: Tensor) -> Tensor:
        """See Projection.read."""
        if self._encoding is None:
            return error @ self._matrix
        encoded = self._encoding(error)
        return encoded.decoded(encoded.frames.flatten(0, 1) @ self._matrix)

    def columns(self, n_inputs: int) -> Tensor:
        """See Projection.columns: B transposed exactly."""
        return self._matrix


class DeviceProjection(Projection):
    """B of the encoded error plus noise, read from a noisy device (PDFA paper, section 4).

    Args:
        device: An open device of at least n_inputs inputs, of which the first are used.
        encoding: How e is shown.
    """

    def __init__(self, device: NoisyDevice, *, encoding: Encoding) -> None:
        self._device = device
        self._encoding = encoding
        self._std = torch.as_tensor(device.noise.variance_bounds()[1], dtype=torch.float32).sqrt()

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Self:
        """Return this very projection: a copied model reads the same device."""
        return self

    def seek(self, step: int) -> None:
        """See Projection.seek; the device has its own steps."""
        self._encoding.seek(step)

    def noise_std(self, error: Tensor) -> Tensor:
        """See Projection.noise_std."""
        return self._std.to(error.device) * self._encoding(error).noise_gain().mean()

    def noise_power(self, error: Tensor) -> Tensor:
        """See Projection.noise_power."""
        return (self._std.to(error.device) ** 2) * self._encoding(error).noise_gain().square().mean()

    def shown(self, error: Tensor) -> float:
        """See Projection.shown."""
        return self._encoding(error).shown

    def read(self, error: Tensor) -> Tensor:
        """See Projection.read."""
        encoded = self._encoding(error)
        unused = self._device.n_inputs - error.shape[1]
        frames = encoded.frames.flatten(0, 1)
        return encoded.decoded(
            self._device.project(nn.functional.pad(frames, (0, unused)) if unused else frames)
        )

    def columns(self, n_inputs: int) -> Tensor:
        """See Projection.columns: the mean of several readings of each column, which hardware can measure too."""
        self._device.seek(_CALIBRATION_STEP)
        one_hot = torch.eye(n_inputs, self._device.n_inputs).repeat(_CALIBRATION_READINGS, 1)
        return self._device.project(one_hot).view(_CALIBRATION_READINGS, n_inputs, -1).mean(dim=0)
