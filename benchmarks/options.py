"""The benchmarks' command lines, and lists in their options, such as `--batches 64,256`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer

from benchmarks.results_file import save_results

T = TypeVar("T", str, int, float)
RowNames = Annotated[str, typer.Option(help="Rows to train, separated by semicolons; all by default.")]
Processes = Annotated[int, typer.Option(help="Runs at the same time, a thread each.")]
Full = Annotated[bool, typer.Option("--full", help="The setting for a card.")]


def program(*commands: Callable[..., object]) -> None:
    """Run the command that the command line names, such as `measure`."""
    app = typer.Typer(add_completion=False, no_args_is_help=True)
    app.callback()(lambda: None)
    for each in commands:
        app.command()(each)
    app()


def program_of_parts(parts: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    """Measure the parts that the command line names, all if it names none; save each as the results of its name."""

    def measure(names: list[str] = typer.Argument(None, metavar="PARTS")) -> None:  # noqa: B008
        """Measure each part and save it."""
        for name in listed("PARTS", ",".join(names or ()), tuple(parts)):
            save_results(name, parts[name]())

    typer.run(measure)


def listed(option: str, line: str, allowed: Sequence[T]) -> list[T]:
    """Return the values that a list names, in its order; all that may stand in it if it is empty.

    Commas separate the values, semicolons where a value itself holds a comma.

    Raises:
        BadParameter: A value is none of them; ends the command with a line that names them.
    """
    if not line:
        return list(allowed)
    separator = ";" if any("," in str(value) for value in allowed) else ","
    names = {value if isinstance(value, str) else f"{value:g}": value for value in allowed}
    found = []
    for part in map(str.strip, line.split(separator)):
        with contextlib.suppress(ValueError):
            part = part if part in names else f"{float(part):g}"  # a number in another form
        if part not in names:
            message = f"{part!r} is none of {f'{separator} '.join(names)}"
            raise typer.BadParameter(message, param_hint=option)
        found.append(names[part])
    return found


def seeds_of(line: str) -> list[int]:
    """Return the seeds that `--seeds` names, separated by commas.

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
