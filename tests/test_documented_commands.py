"""Every command that the README and docs/ show is one, with options and keys that exist."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from opusim.training.cli.app import app
from opusim.training.engine import session
from tests.support.commands import subcommands

COMMANDS = typer.main.get_command(app)
ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
SHOWN = re.compile(r"(?<![\w/.-])opusim(?: (?:[^`\n\\]|\\\n)*)")


def shown_commands() -> list[str]:
    texts = [page.read_text() for page in PAGES]
    shown = [match.group().replace("\\\n", " ") for text in texts for match in SHOWN.finditer(text)]
    lines = [line.split(" #")[0].split("&&")[0].strip() for line in shown]
    return [line for line in dict.fromkeys(lines) if is_command(line)]


def is_command(line: str) -> bool:
    words = line.split()
    return len(words) > 1 and words[1] in subcommands(COMMANDS)


def unknown(line: str) -> list[str]:
    """Subcommands and options of a line that do not exist."""
    command, words = COMMANDS, shlex.split(line)[1:]
    while subcommands(command) and words:
        name = words.pop(0)
        if name not in subcommands(command):
            return [name]
        command = subcommands(command)[name]
    known = {option for parameter in command.params for option in parameter.opts}
    return [word for word in words if word.startswith("--") and word not in known]


def trains(line: str) -> bool:
    """Whether a line is a whole training command that needs no file of the reader's."""
    words = line.split()
    needs = (".toml", "FOLDER", "remote://")
    return words[1] == "train" and "--data" in words and not any(word in line for word in needs)


@pytest.mark.parametrize("line", shown_commands())
def test_commands_and_options_exist(line: str) -> None:
    assert unknown(line) == []


class ReachedError(Exception):
    """A command was understood: training would begin."""


@pytest.mark.parametrize("line", [line for line in shown_commands() if trains(line)])
def test_configurations_are_valid(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*arguments: object, **options: object) -> None:
        raise ReachedError

    monkeypatch.setattr(session, "train", begin)
    monkeypatch.setattr("opusim.devices.access.require_present", lambda description: None)
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert isinstance(result.exception, ReachedError), result.exception or result.output


def test_planted_faults_are_found() -> None:
    assert len(shown_commands()) > 40
    assert unknown("opusim train pdfa --epsilom 3") == ["--epsilom"]
    assert unknown("opusim device calibrat camera") == ["calibrat"]
    assert sum(map(trains, shown_commands())) > 12
