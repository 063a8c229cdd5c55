"""Encode real numbers as what a device can show: ternary vectors, binary frames, bit planes."""

from __future__ import annotations

import math

import torch

from opusim import checks


def ternarize(e: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return the ternary code of PDFA: 1 where e > threshold, -1 where e < -threshold, else 0.

    Source: the photonic DFA paper, section 4. Values equal to plus or minus the threshold become 0. The code keeps
    no magnitude: the trainer sets the scale of the result.

    Args:
        e: real tensor of any shape.
        threshold: finite, at least 0, in units of e.

    Returns:
        float32, same shape and torch device, values in {-1, 0, 1}.

    Raises:
        TypeError: e is not a real tensor.
        ValueError: e holds a NaN (it would silently become 0), or the threshold is out of range.
    """
    if type(e) is not torch.Tensor or e.is_complex() or e.dtype == torch.bool:
        _check_real(e)
    if not (isinstance(threshold, (int, float)) and math.isfinite(threshold) and threshold >= 0):
        checks.non_negative(threshold=threshold)
    values = e.detach()
    _refuse_nan(values, "ternary")
    return (values > threshold).float().sub_((values < -threshold).float())


def binarize(e: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return the frame of a mirror array: 1 where e > threshold, else 0; what `CameraDevice.intensities` shows.

    Args:
        e: real tensor of any shape.
        threshold: finite, in units of e.

    Returns:
        float32, same shape and torch device, values in {0, 1}.

    Raises:
        TypeError: e is not a real tensor.
        ValueError: e holds a NaN, or the threshold is not finite.
    """
    _check_real(e)
    checks.finite(threshold=threshold)
    values = e.detach()
    _refuse_nan(values, "binary")
    return (values > threshold).float()


def bit_planes(e: torch.Tensor, planes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Signed binary digits of numbers in [-1, 1]: e = sum_k w_k t_k up to 2^-planes, w_k = 2^-k, k = 1 .. planes.

    Digits are chosen from the largest down, t_k = ternarize(rest, w_k / 2). A projection of e is then
    sum_k w_k (B t_k + g_k): the standard deviation of its noise is sqrt(sum_k w_k^2) < 0.58 times that of one reading,
    at `planes` times the frames.

    Args:
        e: real tensor of any shape; values beyond [-1, 1] saturate.
        planes: number of digits, from 1 to 24.

    Returns:
        The digits, float32, values in {-1, 0, 1}, shape (planes, *e.shape); the weights w, float32, shape (planes,).

    Raises:
        TypeError: e is not a real tensor.
        ValueError: e holds a NaN, or planes is out of range.
    """
    _check_real(e)
    checks.integer(planes=planes, minimum=1, maximum=24)
    rest = e.detach().float().clamp(-1.0, 1.0)
    digits = []
    for plane in range(1, planes + 1):
        digits.append(ternarize(rest, 0.5 ** (plane + 1)))
        rest = rest - 0.5**plane * digits[-1]
    return torch.stack(digits), 0.5 ** torch.arange(1, planes + 1, dtype=torch.float32, device=e.device)


def _refuse_nan(values: torch.Tensor, code: str) -> None:
    if not values.is_floating_point():
        return
    text = f"e holds NaN: a NaN has no {code} code; did the training diverge? Lower the learning rate"
    if values.device.type != "cpu":
        checks.require((values == values).all(), lambda: ValueError(text))
    elif bool(torch.isnan(values).any()):
        raise ValueError(text)


def _check_real(e: torch.Tensor) -> None:
    checks.instance(torch.Tensor, e=e)
    if e.is_complex() or e.dtype == torch.bool:
        raise TypeError(f"e has dtype {e.dtype}: must be real; take real and imaginary parts apart first")


def split_frames(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two binary frames of a ternary vector, x = positive - negative.

    Args:
        x: tensor of any shape, entries in {-1, 0, 1}.

    Returns:
        positive and negative, uint8, same shape, entries in {0, 1}; a mirror is on in at most one of the two.

    Raises:
        TypeError: x is not a tensor.
        ValueError: another entry than -1, 0, 1 occurs.
    """
    checks.instance(torch.Tensor, x=x)
    check_ternary(x)
    return (x > 0).to(torch.uint8), (x < 0).to(torch.uint8)


def check_ternary(x: torch.Tensor) -> None:
    """Refuse entries other than -1, 0 and 1; the message names the first (unless read late) and the encoder to use."""
    if x.dtype == torch.bool:
        return
    if x.device.type != "cpu" and checks.are_late():
        text = "x holds other numbers than -1, 0 and 1, or NaN: a device shows -1, 0 or 1; did the training diverge?"
        checks.require((x == torch.sign(x)).all(), lambda: ValueError(text))
        return
    if torch.equal(x, torch.sign(x)):
        return
    wrong = x[x != torch.sign(x)].flatten()[0].item()
    if math.isnan(wrong):
        raise ValueError("x holds NaN: a device shows -1, 0 or 1; did the training diverge?")
    hint = "; unsigned integers wrap -1 to their largest value, use int8" if not x.dtype.is_signed else ""
    raise ValueError(
        f"x holds {wrong:g}: a device shows -1, 0 or 1; "
        f"encode real values first, by encodings.ternarize, bit_planes or (for frames) binarize{hint}"
    )
