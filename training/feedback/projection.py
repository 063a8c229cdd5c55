"""Show the error to a feedback matrix and read its projection: digital, or through a noisy device.

Symbols: e error, a row for each reading (rows, n_inputs); B feedback matrix (n_outputs, n_inputs), entries of variance
1; t_k frames in {-1, 0, 1}; g_k noise of a reading. An encoding writes e as s sum_k w_k t_k + c 1 with public weights
w_k and, for each row, one factor s and one constant c in all entries; the reading of e is then
s sum_k w_k (B t_k + g_k) + c B 1, with B 1 measured once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from opusim import checks
from opusim.devices.base import NoisyDevice
from opusim.devices.baseline import measure_noise
from opusim.devices.usage import DeviceWork
from opusim.encodings import bit_planes, ternarize
from opusim.noise import MeasuredNoise
from opusim.randomness.seeds import derive_seed

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
        offset: c of each row, shape (rows, 1); None for 0.
    """

    frames: Tensor
    weights: Tensor | None = None
    scale: Tensor | None = None
    offset: Tensor | None = None

    def decoded(self, readings: Tensor, ones: Tensor | None = None) -> Tensor:
        """Return s sum_k w_k r_k + c B 1 of readings r_k, shape (K * rows, n_outputs), computed in place."""
        total = readings
        if self.weights is not None:
            rows, n_outputs = self.frames.shape[1], readings.shape[1]  # there may be no rows
            total = (self.weights @ readings.view(len(self.weights), rows * n_outputs)).view(rows, n_outputs)
        if self.scale is not None:
            total = total.mul_(self.scale)
        return total if self.offset is None or ones is None else total.addcmul_(self.offset, ones)

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
    has_offset: bool = False
    """Whether the encoding has a constant c."""

    def seek(self, step: int, *, before: int = 0) -> None:  # noqa: B027  # optional hook
        """Set the step that keys the next batches' draws, and the rows that other processes encode before them."""

    @abstractmethod
    def __call__(self, error: Tensor) -> Encoded:
        """Encode a batch of errors e, float32, shape (rows, n_inputs)."""


class AbsoluteTernary(Encoding):
    """t = ternarize(e, threshold), s = 1: the encoding of the PDFA paper, which loses the error's norm.

    Args:
        threshold: In units of e, at least 0.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    @override
    def __call__(self, error: Tensor) -> Encoded:
        return Encoded(frames=ternarize(error, self._threshold)[None])


class RelativeTernary(Encoding):
    """t = ternarize(e, threshold * rms(e)), with s and c the least-squares solution of e = s t + c 1, for each row.

    The constant matters for errors of few entries: that of ten classes has one large entry and nine small ones, which
    sum to zero, and t shows only the large one. Without c, every record then sends the same direction, the mean of B's
    columns, and residual streams collapse; with c, the code of such a row is exact.

    The encoding is homogeneous: a e has the same frames and a times s and c, so that a loss may be averaged over the
    batch or scaled (mixed precision) without losing entries.

    Args:
        threshold: In units of the row's root mean square, at least 0; 0 shows the sign of every entry. For normally
            distributed entries 0.61 gives the largest cosine between t and e, 0.9.
    """

    has_offset = True

    def __init__(self, threshold: float) -> None:
        checks.non_negative(threshold=threshold)
        self._threshold = threshold

    @override
    def __call__(self, error: Tensor) -> Encoded:
        n = error.shape[1]
        rms = torch.linalg.vector_norm(error, dim=1, keepdim=True) / n**0.5
        shown = error.abs() > self._threshold * rms
        frames = error.sign().mul_(shown)
        mean, sums = error.mean(dim=1, keepdim=True), frames.sum(dim=1, keepdim=True)  # of e, and of t
        dot, size = torch.linalg.vecdot(error, frames)[:, None], sums.abs()  # <e, t>, |<1, t>|
        count = shown.sum(dim=1, keepdim=True)  # <t, t>
        variance = (count - size) + size * (n - size) / n  # <t, t> - <1, t>^2 / n
        constant = variance == 0  # t is 0 or 1 throughout, up to its sign: c is left to t
        scale = torch.where(constant, dot, dot - mean * sums) / torch.where(
            constant, count.clamp_min(1), variance
        )
        return Encoded(frames=frames[None], scale=scale, offset=mean - scale * sums / n)


class StochasticTernary(Encoding):
    """t_i = sign(e_i - c) with probability |e_i - c| / s, else 0, so that the mean of s t + c 1 is e.

    c is the row's median and s = max|e - c|. The entries of a classifier's error are small and nearly equal but for a
    few; without c, drawing them would add noise.

    Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning", 2017, equations 2
    and 3. Where few entries are large and many small, as in the error of a classifier, a threshold drops the small ones
    in every record alike, which biases the feedback; here each of them is shown with a small probability.

    Args:
        seed: Seed of the draws, in [0, 2^64); a draw depends on it, on the step and on the batches since `seek`.
    """

    has_offset = True

    def __init__(self, seed: int) -> None:
        self._seed, self._step, self._batches, self._before = seed, 0, 0, 0

    def seek(self, step: int, *, before: int = 0) -> None:
        """See Encoding.seek; the draws of a row are the same whichever process encodes it."""
        self._step, self._batches, self._before = step, 0, before

    @override
    def __call__(self, error: Tensor) -> Encoded:
        seed = derive_seed(self._seed, f"ternary codes of step {self._step}, batch {self._batches}")
        self._batches += 1
        generator = torch.Generator().manual_seed(seed % 2**63)
        torch.rand(self._before, error.shape[1], generator=generator)  # those of other processes' rows
        drawn = torch.rand(error.shape, generator=generator).to(error.device, non_blocking=True)
        median = error.median(dim=1, keepdim=True).values
        # a single entry is shown itself
        offset = median if error.shape[1] > 1 else torch.zeros_like(median)
        rest = error - offset
        scale = rest.abs().amax(dim=1, keepdim=True)
        frames = rest.sign().mul_(drawn * scale < rest.abs())
        return Encoded(frames=frames[None], scale=scale, offset=offset)


class BitPlanes(Encoding):
    """Signed binary digits of e / max|e|, s = max|e| of the row (`opusim.encodings.bit_planes`).

    Args:
        planes: K, the number of digits, from 1 to 24.
    """

    def __init__(self, planes: int) -> None:
        checks.integer(planes=planes, minimum=1, maximum=24)
        self.frames_per_row = planes

    @override
    def __call__(self, error: Tensor) -> Encoded:
        scale = error.abs().amax(dim=1, keepdim=True)  # (rows, 1)
        digits, weights = bit_planes(
            error / scale.clamp_min(torch.finfo(error.dtype).tiny), self.frames_per_row
        )
        return Encoded(frames=digits, weights=weights, scale=scale)


def make_encoding(name: EncodingName, *, threshold: float, planes: int, seed: int = 0) -> Encoding | None:
    """Return an encoding by name, or None for "real", which shows the error itself; "sign" is ternary with threshold 0.

    Raises ValueError for an unknown name or a number out of range; see the classes for the numbers.
    """
    checks.choice(("real", "ternary", "stochastic", "planes", "sign"), encoding=name)
    if name == "real":
        return None
    if name == "stochastic":
        return StochasticTernary(seed)
    if name == "planes":
        return BitPlanes(planes)
    return RelativeTernary(threshold if name == "ternary" else 0.0)


def calibration_work(vectors: int) -> DeviceWork:
    """Return the device work of measuring B v for a number of vectors, such as B 1 or all columns."""
    return DeviceWork(projections=_CALIBRATION_READINGS * vectors, calls=1)


class Projection(ABC):
    """Reads B e for all points of feedback at once; points use slices of one reading.

    Args:
        encoding: How e is shown, or None to project e itself.
    """

    def __init__(self, encoding: Encoding | None) -> None:
        self._encoding = encoding

    def seek(self, step: int, *, before: int = 0) -> None:
        """Set the step of the next readings, as in `Encoding.seek`; a device has its own steps."""
        if self._encoding is not None:
            self._encoding.seek(step, before=before)

    def noise_std(self, error: Tensor) -> Tensor:
        """Return the deviation of a reading's noise, mean over rows, in units of B e: shape () or one per output."""
        return error.new_zeros(())

    def noise_power(self, error: Tensor) -> Tensor:
        """Return the variance of a reading's noise, mean over rows; see `noise_std`."""
        return error.new_zeros(())

    def shown(self, error: Tensor) -> float:
        """Return the share of the entries of the error, shape (rows, n_inputs), that the projection sees, in [0, 1]."""
        return 1.0 if self._encoding is None else self._encoding(error).shown

    @abstractmethod
    def read(self, error: Tensor) -> Tensor:
        """Return the projected error, shape (rows, n_outputs), of e, shape (rows, n_inputs)."""

    @abstractmethod
    def columns(self, n_inputs: int) -> Tensor:
        """Return B transposed as the trainer knows it, shape (n_inputs, n_outputs)."""


class DenseProjection(Projection):
    """B e, or B of the encoded error, without a device; the matrix is B transposed, (n_inputs, n_outputs)."""

    def __init__(self, matrix: Tensor, *, encoding: Encoding | None = None) -> None:
        super().__init__(encoding)
        self._matrix = matrix

    def columns(self, n_inputs: int) -> Tensor:
        """See Projection.columns: B transposed exactly."""
        return self._matrix

    @override
    def read(self, error: Tensor) -> Tensor:
        if self._encoding is None:
            return error @ self._matrix
        encoded = self._encoding(error)
        frames = encoded.frames.flatten(0, 1)
        ones = None if encoded.offset is None or not len(frames) else self._matrix.sum(dim=0)
        return encoded.decoded(frames @ self._matrix, ones)


class DeviceProjection(Projection):
    """B of the encoded error plus noise, read from a noisy device (PDFA paper, section 4).

    Args:
        device: An open device of at least n_inputs inputs, of which the first are used.
        encoding: How e is shown.
        n_inputs: Width of e; None for the device's.
        ones: B 1 as it was measured, shape (n_outputs,). None measures it at once if the encoding has an offset.

    Attributes:
        ones: See above; None if the encoding has no offset.
    """

    _encoding: Encoding

    def __init__(
        self,
        device: NoisyDevice,
        *,
        encoding: Encoding,
        n_inputs: int | None = None,
        ones: Tensor | None = None,
    ) -> None:
        super().__init__(encoding)
        self._device = device
        n = device.n_inputs if n_inputs is None else n_inputs
        self._unused = device.n_inputs - n
        if ones is None and encoding.has_offset:
            ones = self._measured(torch.ones(1, n))[0]
        self.ones = ones
        law = device.stated_noise
        if law is None:  # measure the variances
            device.seek(_CALIBRATION_STEP)
            law = measure_noise(lambda rows: device.project_for_all(self._padded(rows)), n)
        self._law = law
        self._std = torch.as_tensor(self._law.variance_bounds()[1], dtype=torch.float32).sqrt()

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Self:
        """Return this very projection: a copied model reads the same device."""
        return self

    @override
    def noise_std(self, error: Tensor) -> Tensor:
        encoded = self._encoding(error)
        return self._std_at(encoded) * encoded.noise_gain().mean()

    @override
    def noise_power(self, error: Tensor) -> Tensor:
        encoded = self._encoding(error)
        return (self._std_at(encoded) ** 2) * encoded.noise_gain().square().mean()

    def _std_at(self, encoded: Encoded) -> Tensor:
        """Return the standard deviation of one reading of these frames: the largest of the law, or as measured."""
        if not isinstance(self._law, MeasuredNoise):
            return self._std.to(encoded.frames.device)
        rows = encoded.frames.flatten(0, 1)
        found = self._law.variance_at(float(rows.count_nonzero()) / max(len(rows), 1))
        return torch.as_tensor(found, dtype=torch.float32).sqrt().to(rows.device)

    @override
    def read(self, error: Tensor) -> Tensor:
        encoded = self._encoding(error)
        frames = encoded.frames.flatten(0, 1)
        readings = self._device.project(self._padded(frames) if self._unused else frames)
        if self.ones is not None and self.ones.device != error.device:
            self.ones = self.ones.to(error.device)  # once
        return encoded.decoded(readings, self.ones)

    def columns(self, n_inputs: int) -> Tensor:
        """See Projection.columns: the mean of several readings of each column, which hardware can measure too."""
        return self._measured(torch.eye(n_inputs))

    def _measured(self, vectors: Tensor) -> Tensor:
        """Return B v for vectors (rows, n_inputs), the mean of several readings."""
        self._device.seek(_CALIBRATION_STEP)
        readings = self._device.project_for_all(self._padded(vectors.repeat(_CALIBRATION_READINGS, 1)))
        return readings.view(_CALIBRATION_READINGS, len(vectors), -1).mean(dim=0)

    def _padded(self, vectors: Tensor) -> Tensor:
        """Return vectors with zeros at the device's further inputs."""
        return nn.functional.pad(vectors, (0, self._unused))
