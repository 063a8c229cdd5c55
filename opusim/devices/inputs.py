"""Check what a caller gives to a device and what the device returns.

These are the only checks: a device class gets checked batches, and callers get checked readings in their array library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from opusim import checks
from opusim.encodings import check_ternary
from opusim.errors import DeviceFault
from opusim.noise import GaussianNoise, NoiseModel

Array = TypeVar("Array", torch.Tensor, np.ndarray)


def ternary_batch(x: torch.Tensor | np.ndarray, n_inputs: int, device: torch.device) -> torch.Tensor:
    """Return a batch (batch, n_inputs) of entries -1, 0, 1 and any real dtype as float32 on the device's torch device.

    It may share memory with x. TypeError: x is no tensor or array, or is complex. ValueError: another shape, a tensor
    that requires a gradient, or another entry.
    """
    tensor = _real_rows(x, n_inputs)
    check_ternary(tensor)
    return tensor.to(device=device, dtype=torch.float32)


def real_batch(x: torch.Tensor | np.ndarray, width: int, device: torch.device) -> torch.Tensor:
    """Return a batch (batch, width) in [-1, 1] as float32 on the device's torch device; see `ternary_batch`."""
    tensor = _real_rows(x, width).to(device=device, dtype=torch.float32)
    if tensor.numel():
        low, high = (float(end) for end in torch.aminmax(tensor))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(
                "x holds NaN or infinite numbers, which no device can show: must lie in [-1, 1]; look at the inputs, "
                "and at the layers before the device, whose weights may have diverged"
            )
        if not -1 <= low <= high <= 1:
            raise ValueError(
                f"x holds values from {low:g} to {high:g}: must lie in [-1, 1]; divide by the largest magnitude, and "
                "multiply the product by it"
            )
    return tensor


def matrix_to_program(matrix: torch.Tensor, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return a matrix (n_outputs, n_inputs) in [-1, 1] as a float32 tensor on the device's torch device."""
    checks.instance(torch.Tensor, matrix=matrix)
    checks.shape(shape, matrix=matrix, remedy="pad it with zeros, or open another window")
    checks.in_range(-1, 1, matrix=matrix.detach().cpu(), remedy="divide by the largest magnitude")
    return matrix.detach().to(device=device, dtype=torch.float32)


def _real_rows(x: torch.Tensor | np.ndarray, n_inputs: int) -> torch.Tensor:
    """Return rows of real numbers as a tensor; it shares memory with x if x can be written."""
    plain = type(x) is torch.Tensor and x.layout == torch.strided and not x.is_nested
    if not (plain and x.ndim == 2 and x.shape[1] == n_inputs):
        checks.instance((torch.Tensor, np.ndarray), x=x)
        checks.complete(x=x)
        checks.shape(
            (None, n_inputs),
            x=x,
            remedy="a device takes one row for each vector; use reshape, or open another window",
        )
    if isinstance(x, np.ndarray):
        if x.dtype.kind not in "iufb":
            raise TypeError(f"x has dtype {x.dtype}: must be real; use astype(numpy.float32)")
        return torch.from_numpy(x if x.flags.writeable else x.copy())
    if x.requires_grad:
        raise ValueError("x requires a gradient, and a device has none; pass x.detach()")
    if x.is_complex():
        raise TypeError(f"x has dtype {x.dtype}: must be real; project real and imaginary part apart")
    return x


class BinaryFrames:
    """Checked binary vectors (frames, n_inputs), made float32 a few rows at a time.

    `packed` ones hold eight mirrors in a byte, as `numpy.packbits` gives them: uint8, (frames, ceil(n_inputs / 8)).
    """

    def __init__(self, x: torch.Tensor | np.ndarray, n_inputs: int, *, packed: bool = False) -> None:
        self._n_inputs, self._packed = n_inputs, packed
        self._rows = _real_rows(x, -(-n_inputs // 8) if packed else n_inputs)
        if packed:
            if self._rows.dtype != torch.uint8:
                raise TypeError(
                    f"x has dtype {self._rows.dtype}: packed frames are uint8, as numpy.packbits(x, axis=1) gives them"
                )
            return
        if self._rows.dtype == torch.bool or not self._rows.numel():
            return
        if self._rows.dtype == torch.uint8:
            binary = int(self._rows.amax()) <= 1
        else:
            binary = torch.equal(self._rows, (self._rows > 0).to(self._rows.dtype))
        if binary:
            return
        wrong = self._rows[(self._rows != 0) & (self._rows != 1)][0].item()
        if math.isnan(wrong):
            raise ValueError(
                "x holds NaN: a frame shows 0 or 1; fill gaps first, as by sklearn.impute.SimpleImputer()"
            )
        if wrong == -1:
            raise ValueError("x holds -1: a frame shows 0 or 1; split it by encodings.split_frames(x)")
        hint = "; unsigned integers wrap -1 to their largest value, use int8"
        raise ValueError(
            f"x holds {wrong:g}: a frame shows 0 or 1; encode real values first, by an encoder of "
            "opusim.features.encoders such as ThresholdEncoder(), or by encodings.binarize(x, threshold)"
            f"{'' if self._rows.dtype.is_signed else hint}"
        )

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """Return some frames, float32, shape (some, n_inputs), on a torch device."""
        part = self._rows[start:stop]
        if self._packed:
            bits = np.unpackbits(part.cpu().numpy(), axis=1, count=self._n_inputs)
            part = torch.from_numpy(bits)
        return part.to(device=device, dtype=torch.float32)


def new_intensities(x: Array, shape: tuple[int, int], out: np.ndarray | torch.Tensor | None) -> Any:
    """Return where intensities are written: `out`, float32 or uint8, once checked, or a new array of x's library."""
    if out is None:
        if isinstance(x, np.ndarray):
            return np.empty(shape, dtype=np.float32)
        return torch.empty(shape, dtype=torch.float32, device=x.device)
    checks.instance((torch.Tensor, np.ndarray), out=out)
    checks.shape(shape, out=out, remedy="give a row for each frame and a column for each output")
    if str(out.dtype).removeprefix("torch.") not in ("float32", "uint8"):
        raise TypeError(f"out has dtype {out.dtype}: must be float32, or uint8 for digital numbers of 8 bits")
    return out


def write_intensities(out: Any, start: int, numbers: torch.Tensor) -> None:
    """Write rows of intensities into an array of `new_intensities`; uint8 takes whole numbers from 0 to 255 only."""
    rows = slice(start, start + len(numbers))
    if out.dtype == (np.uint8 if isinstance(out, np.ndarray) else torch.uint8):
        codes = numbers.to(torch.uint8)
        if not torch.equal(codes.float(), numbers):
            raise ValueError(
                "out has dtype uint8, and the intensities are not whole numbers from 0 to 255; give out of float32"
            )
        numbers = codes
    out[rows] = numbers.cpu().numpy() if isinstance(out, np.ndarray) else numbers.to(out.device)


def like_input(y: torch.Tensor, x: Array) -> Array:
    """Return the result in the caller's library and on the caller's torch device."""
    return y.cpu().numpy() if isinstance(x, np.ndarray) else y.to(x.device)


def drawn_shape(shape: Sequence[int], n_outputs: int, law: NoiseModel | None) -> tuple[int, ...]:
    """Return a checked shape of drawn noise; it ends in n_outputs unless a Gaussian law is the same at every output."""
    for length in shape:
        checks.integer(length=length, minimum=0)
    uniform = isinstance(law, GaussianNoise) and law.is_uniform
    if not uniform and (len(shape) == 0 or shape[-1] != n_outputs):
        raise ValueError(
            f"shape = {tuple(shape)}: the noise differs from output to output, so the last length must be "
            f"n_outputs = {n_outputs}; draw that, and take the outputs you need"
        )
    return tuple(int(length) for length in shape)


def check_reading(y: torch.Tensor, shape: tuple[int, ...], name: str) -> None:
    """Refuse (DeviceFault) what is no finite float32 tensor of the shape that the device's class was asked for."""
    if not isinstance(y, torch.Tensor) or y.dtype != torch.float32:
        found = f"a tensor of {y.dtype}" if isinstance(y, torch.Tensor) else f"a {type(y).__name__}"
        raise DeviceFault(f"device {name!r} returned {found}, not a float32 tensor; correct its class")
    if tuple(y.shape) != shape:
        raise DeviceFault(
            f"device {name!r} returned shape {tuple(y.shape)} instead of {shape}; reset the device"
        )
    text = f"device {name!r} returned NaN or infinity; reset the device"
    if y.device.type != "cpu" and checks.are_late():
        checks.require(torch.isfinite(y).all(), lambda: DeviceFault(text))
    # one bad entry spoils the sum, which is cheap to compute; if it overflows, entries are checked one by one
    elif y.numel() and not math.isfinite(float(y.sum())) and not bool(torch.isfinite(y).all()):
        raise DeviceFault(text)
