"""Every page of help is whole at 80 columns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.support.commands import subcommands
from training.cli.app import app


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, part in subcommands(command).items():
        yield from commands(part, (*path, name))


def words(path: tuple[str, ...], width: int) -> set[str]:
    page = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": str(width)}, terminal_width=width)
    assert page.exit_code == 0
    assert max(map(len, page.output.splitlines())) <= width
    return {word for word in re.split(r"[\s│]+", page.output) if not set(word) <= set("─╭╮╰╯")}


@pytest.mark.parametrize("path", list(commands(typer.main.get_command(app))), ids=" ".join)
def test_no_page_of_help_breaks_a_word(path: tuple[str, ...]) -> None:
    assert not words(path, 240) - words(path, 80)
