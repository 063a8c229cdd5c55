"""The benchmarks' command lines, and lists in their options, such as `--batches 64,256`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import typer

T = TypeVar("T", str, int, float)


def program(*commands: Callable[..., object]) -> None:
    """Run the command that the command line names, such as `measure`."""
    app = typer.Typer(add_completion=False, no_args_is_help=True)
    app.callback()(lambda: None)
    for each in commands:
        app.command()(each)
    app()


def listed(option: str, line: str, allowed: Sequence[T]) -> list[T]:
    """Return the values that a list names, in its order; all that may stand in it if it is empty.

    Commas separate the values, semicolons where a value itself holds a comma.

    Args:
        option: Its name, such as "--batches".
        line: What was given.
        allowed: What may stand in it.

    Raises:
        BadParameter: A value is none of them; ends the command with a line that names them.
    """
    if not line:
        return list(allowed)
    separator = ";" if any("," in str(value) for value in allowed) else ","
    return [_one(option, part.strip(), allowed, separator) for part in line.split(separator)]


def seeds_of(line: str) -> list[int]:
    """Return the seeds that `--seeds` names, separated by commas.

    Args:
        line: What was given.

    Raises:
        BadParameter: A part is no whole number of at least 0.
    """
    parts = [part.strip() for part in line.split(",")]
    for part in parts:
        if not part.isdecimal():
            raise typer.BadParameter(
                f"{part!r} is no seed; give whole numbers from 0, such as 0,1,2", param_hint="--seeds"
            )
    return [int(part) for part in parts]


def _one(option: str, part: str, allowed: Sequence[T], separator: str) -> T:
    for value in allowed:
        if part == value if isinstance(value, str) else _number(part) == value:
            return value
    names = f"{separator} ".join(value if isinstance(value, str) else f"{value:g}" for value in allowed)
    raise typer.BadParameter(f"{part!r} is none of {names}", param_hint=option)


def _number(part: str) -> float | None:
    try:
        return float(part)
    except ValueError:
        return None
