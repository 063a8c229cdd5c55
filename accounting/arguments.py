"""Checkers of arguments, called with keywords, so that a message names parameter, value and rule.

>>> positive(sigma=0.1)
>>> positive(sigma=-1.0)
Traceback (most recent call last):
...
ValueError: sigma = -1.0: must be finite and above 0

(The checkers of `opusim.checks` are out of reach: accounting imports the noise laws and the errors only. numpy waits
inside: the descriptions of mechanisms import this file, and the command line imports those for its help.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def positive(**values: Any) -> None:
    """Every value is finite and above 0; arrays elementwise.

    Raises:
        ValueError: A value is 0, negative, infinite or NaN.
    """
    for name, value in values.items():
        if not _all_finite(value, lambda array: array > 0):
            raise ValueError(f"{name} = {_short(value)}: must be finite and above 0")


def non_negative(**values: Any) -> None:
    """Every value is finite and at least 0; arrays elementwise.

    Raises:
        ValueError: A value is negative, infinite or NaN.
    """
    for name, value in values.items():
        if not _all_finite(value, lambda array: array >= 0):
            raise ValueError(f"{name} = {_short(value)}: must be finite and at least 0")


def finite(**values: Any) -> None:
    """Every value is finite; arrays elementwise.

    Raises:
        ValueError: A value is infinite or NaN.
    """
    for name, value in values.items():
        if not _all_finite(value, lambda array: array == array):
            raise ValueError(f"{name} = {_short(value)}: must be finite")


def fraction(*, one_allowed: bool = False, **values: float) -> None:
    """Every value lies in (0, 1), or in (0, 1] where one_allowed.

    Raises:
        ValueError: A value lies outside, or is NaN.
    """
    for name, value in values.items():
        if not (0 < value < 1 or (one_allowed and value == 1)):
            raise ValueError(f"{name} = {value!r}: must lie in (0, 1{']' if one_allowed else ')'}")


def share(**values: float) -> None:
    """Every value lies in [0, 1).

    Raises:
        ValueError: A value lies outside, or is NaN.
    """
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} = {value}: must lie in [0, 1)")


def count(*, minimum: int = 1, **values: Any) -> None:
    """Every value is an integer of at least the minimum; a boolean is none.

    Raises:
        TypeError: A value is not an integer.
        ValueError: A value is below the minimum.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} = {_short(value)}: must be an integer, not {type(value).__name__}")
        if value < minimum:
            raise ValueError(f"{name} = {value}: must be at least {minimum}")


def shape(expected: tuple[int | None, ...], **arrays: np.ndarray) -> None:
    """Every array has the expected shape; None stands for any length.

    Raises:
        ValueError: An array has another number of axes, or another length.
    """
    for name, array in arrays.items():
        actual = array.shape
        same = len(actual) == len(expected)
        if not same or any(e is not None and e != a for e, a in zip(expected, actual, strict=True)):
            wanted = "(" + ", ".join("any" if e is None else str(e) for e in expected) + ")"
            raise ValueError(f"{name} has shape {actual}: must be {wanted}")


def _all_finite(value: Any, rule: Callable[[Any], Any]) -> bool:
    if isinstance(value, float | int):
        return math.isfinite(value) and bool(rule(value))
    import numpy as np

    array = np.asarray(value, dtype=float)
    return bool(np.all(np.isfinite(array) & rule(array)))


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
