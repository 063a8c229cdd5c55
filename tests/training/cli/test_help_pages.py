"""Every page of help is whole at 80 columns."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.support.commands import subcommands
from training.cli.app import app
from training.cli.options import key_rows, topics


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


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], {"torch", "numpy", "pydantic", "rich.console", "matplotlib", "training.cli.train"}),
        (["train", "--help"], {"torch", "numba", "scipy", "matplotlib", "training.engine.session"}),
        (["train", "pdfa", "--help"], {"torch", "numba", "scipy", "matplotlib", "training.feedback.trainer"}),
        (["train", "options", "zo"], {"torch", "numba", "scipy", "matplotlib", "transformers"}),
    ],
)
def test_a_page_of_help_imports_only_what_it_shows(arguments: list[str], absent: set[str]) -> None:
    code = (
        "import sys\nfrom training.cli import main\ntry:\n    main()\nfinally:\n"
        f"    print('loaded:', *sorted({absent!r} & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert shown.stdout.splitlines()[-1] == "loaded:", shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'"),
        (["train", "pdfaa"], "Did you mean 'pdfa'"),
        (["train", "zo", "--lawn", "laplace"], "No such option: --lawn"),
    ],
)
def test_a_misspelt_command_or_option_is_named(arguments: list[str], message: str) -> None:
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert message in " ".join(refused.output.replace("│", " ").split())


def test_options_are_listed_by_topic_and_word() -> None:
    keys = {key for key, _, _ in key_rows("zo")}
    assert {"trainer.law", "trainer.language.prompt"} <= keys
    assert all(key.startswith("trainer.") for key in keys)
    assert {key for key, _, _ in key_rows("record", search="divi")} == {"protection.divisor"}
    assert {"run", "sampler", "pdfa", "label-readout"} <= set(topics())
    assert all(topics().values())
    shown = CliRunner().invoke(app, ["train", "options", "optimizer", "--search", "MOMENTUM"])
    assert "optimizer.nesterov" in shown.output
    assert "optimizer.lr" not in shown.output
    for arguments, reason in (
        (["zoo"], "no topic; take one of run"),
        (["--search", "qqq"], "no key has this word"),
    ):
        refused = CliRunner().invoke(app, ["train", "options", *arguments])
        assert reason in str(refused.exception)
