"""Shared checkers of arguments, called with keywords, so that every message names parameter and value.

    >>> positive(sigma=0.1)
    >>> positive(sigma=-1.0)
    Traceback (most recent call last):
    ...
    ValueError: sigma = -1.0: must be finite and above 0

Each checker takes any number of parameters and returns nothing. A message reads ``name = value: rule;
remedy``; give the remedy with `remedy` if the rule does not say what to do. Numbers, numpy arrays
and CPU tensors pass through `numpy.asarray`; booleans are not numbers here. Something else than real numbers raises
TypeError, a number out of range ValueError.

`require` checks a tensor's value. Reading a value from a card waits until the card has computed it; a loop that must
not wait at each step collects such checks (`LateChecks`) and reads them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from opusim.plugins import Deferred

if TYPE_CHECKING:
    import torch
else:
    torch = Deferred("torch")

_PLAIN = (float, int)
"""Types of the usual values, which are checked without an array."""


def positive(*, remedy: str = "", **values: Any) -> None:
    """Every value is a finite number above 0 (arrays: every element)."""
    for name, value in values.items():
        if type(value) in _PLAIN and 0 < value < math.inf:
            continue
        array = _real_array(name, value)
        if not bool(np.all(np.isfinite(array) & (array > 0))):
            _refuse(name, value, "must be finite and above 0", remedy)


def non_negative(*, remedy: str = "", **values: Any) -> None:
    """Every value is a finite number of at least 0 (arrays: every element)."""
    for name, value in values.items():
        if type(value) in _PLAIN and 0 <= value < math.inf:
            continue
        array = _real_array(name, value)
        if not bool(np.all(np.isfinite(array) & (array >= 0))):
            _refuse(name, value, "must be finite and at least 0", remedy)


def finite(*, remedy: str = "", **values: Any) -> None:
    """Every value is a finite real number (arrays: every element)."""
    for name, value in values.items():
        if type(value) in _PLAIN and -math.inf < value < math.inf:
            continue
        if not bool(np.all(np.isfinite(_real_array(name, value)))):
            _refuse(name, value, "must be finite", remedy)


def in_range(low: float, high: float, *, remedy: str = "", **values: Any) -> None:
    """Every value lies in the closed interval [low, high] and is not NaN; an end may be infinite."""
    for name, value in values.items():
        if type(value) in _PLAIN and low <= value <= high:
            continue
        array = _real_array(name, value)
        if not bool(np.all((array >= low) & (array <= high))):
            _refuse(name, value, f"must lie in [{low:g}, {high:g}]", remedy)


def in_unit_interval(*, closed: Literal["left", "right", "both", "neither"] = "both", **values: Any) -> None:
    """Every value lies between 0 and 1 (arrays: every element); `closed` names the ends that are allowed."""
    left, right = closed in ("left", "both"), closed in ("right", "both")
    for name, value in values.items():
        if type(value) in _PLAIN and (0 < value < 1 or (value == 0 and left) or (value == 1 and right)):
            continue
        array = _real_array(name, value)
        above = array >= 0 if left else array > 0
        below = array <= 1 if right else array < 1
        if not bool(np.all(above & below)):
            _refuse(name, value, f"must lie in {'[' if left else '('}0, 1{']' if right else ')'}", "")


def integer(
    *, minimum: int | None = None, maximum: int | None = None, remedy: str = "", **values: Any
) -> None:
    """Every value is an integer in [minimum, maximum]; numpy integers too, booleans never."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(_message(name, value, f"must be an integer, not {type(value).__name__}", remedy))
        if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
            if maximum is None:
                rule = f"must be at least {minimum}"
            else:
                rule = f"must be an integer in [{'-inf' if minimum is None else minimum}, {maximum}]"
            _refuse(name, value, rule, remedy)


def choice(allowed: Collection[Any], *, remedy: str = "", **values: Any) -> None:
    """Every value is one of the allowed ones; ValueError otherwise."""
    for name, value in values.items():
        if value not in allowed:
            listed = ", ".join(repr(item) for item in allowed)
            _refuse(name, short(value), f"must be one of {listed}", remedy)


def instance(kind: type | tuple[type, ...], /, *, remedy: str = "", **values: Any) -> None:
    """Every value is an instance of the given type, or of one of the given types; TypeError otherwise."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    expected = " or ".join(item.__name__ for item in kinds)
    for name, value in values.items():
        if not isinstance(value, kinds):
            rule = f"must be {expected}, not {type(value).__name__}"
            raise TypeError(_message(name, short(value), rule, remedy))


def shape(expected: tuple[int | None, ...], *, remedy: str = "", **arrays: Any) -> None:
    """Every array has the expected shape; None stands for any length."""
    for name, array in arrays.items():
        actual = tuple(array.shape)
        same = len(actual) == len(expected)
        if not same or any(e is not None and e != a for e, a in zip(expected, actual, strict=True)):
            wanted = "(" + ", ".join("any" if e is None else str(e) for e in expected) + ")"
            text = f"{name} has shape {actual}: must be {wanted}"
            raise ValueError(f"{text}; {remedy}" if remedy else text)


def complete(**arrays: Any) -> None:
    """Every array has a number at each place; numpy and torch would compute with those behind a mask, or in a gap."""
    for name, array in arrays.items():
        if isinstance(array, np.ma.MaskedArray):
            masked = int(np.count_nonzero(np.ma.getmaskarray(array)))
            if masked:
                raise ValueError(
                    f"{name} has {masked} masked values: every entry must be a number; fill them, as by "
                    f"{name}.filled(0), or leave out their records"
                )
        elif hasattr(array, "is_nested"):
            layout = str(array.layout).removeprefix("torch.")
            found = "nested" if array.is_nested else "masked" if hasattr(array, "get_mask") else layout
            if found != "strided":
                raise TypeError(
                    f"{name} is a {found} tensor: must hold a number at each place; make it dense, as by "
                    f"{name}.to_dense()"
                )


Refusal = Callable[[], Exception | None]
"""Returns the error to raise for a refused value, or warns and returns None."""


class LateChecks:
    """Checks of values on a card that the host reads together, later.

    Attributes:
        failed: The error that `read` raised, or None; after an error, discard the results since the last good read.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, Refusal]] = []
        self.failed: Exception | None = None

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the checks (`require`) of values on a card that this thread makes within the block."""
        token = _late.set(self)
        try:
            yield
        finally:
            _late.reset(token)

    def keep(self, value: torch.Tensor, refusal: Refusal) -> None:
        """Keep a check, see `require`."""
        self._kept.append((value, refusal))

    def read(self) -> None:
        """Read all values kept since the last call in one copy; now and later raise the first refused one's error."""
        if self.failed is not None:
            raise self.failed
        kept, self._kept = self._kept, []
        if not kept:
            return
        held = torch.stack(
            [torch.isfinite(value) if value.is_floating_point() else value for value, _ in kept]
        )
        for holds, (_, refusal) in zip(held.tolist(), kept, strict=True):
            if not holds and (error := refusal()) is not None:
                self.failed = error
                raise error


_late: ContextVar[LateChecks | None] = ContextVar("opusim_late_checks", default=None)


def are_late() -> bool:
    """Return whether a `LateChecks` is collecting, so that checks of tensors on a card are read later."""
    return _late.get() is not None


def require(value: torch.Tensor, refusal: Refusal) -> None:
    """Raise what `refusal` returns, at once, or later if the value is on a card and a `LateChecks` is collecting.

    Args:
        value: Scalar tensor: a truth value, or a real number that must be finite.
        refusal: Is called at most once, perhaps much later, so it should hold no large tensors.
    """
    late = _late.get()
    if late is not None and value.device.type != "cpu":
        late.keep(value, refusal)
        return
    holds = math.isfinite(float(value)) if value.is_floating_point() else bool(value)
    if not holds and (error := refusal()) is not None:
        raise error


def _real_array(name: str, value: Any) -> np.ndarray:
    """Return the value as a numpy array of real numbers, or raise a TypeError that names it."""
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise TypeError(
            _message(name, short(value), f"must be a real number, not {type(value).__name__}", "")
        )
    return array


def short(value: Any) -> str:
    """Return the value in at most 60 characters, so that a message stays one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _message(name: str, value: Any, rule: str, remedy: str) -> str:
    """``name = value: rule; remedy``."""
    text = f"{name} = {value if isinstance(value, str) else short(value)}: {rule}"
    return f"{text}; {remedy}" if remedy else text


def _refuse(name: str, value: Any, rule: str, remedy: str) -> None:
    """Raise the ValueError of a rule broken by a value of the right type."""
    raise ValueError(_message(name, value, rule, remedy))
