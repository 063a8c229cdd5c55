"""Code blocks of the pages are run, or say why not; commands that they show exist, with their options and keys."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from opusim.training.cli.app import app
from opusim.training.engine import session
from tests.support.code_blocks import Block, code_blocks, run_page, shortened
from tests.support.commands import subcommands

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RUN = ("getting-started", "calibrate", "choosing-a-trainer", "release", "privacy-labels")
"""Pages whose commands are run in order, at a quick size."""
NOT_RUN = {
    "README": "the commands of getting-started.md, which are run",
    "analog": "minutes on FashionMNIST; the commands are validated",
    "any-module": "minutes, or files of the reader; tests/training/networks run the same models",
    "private-loops": "downloads, or several processes; tests/test_examples.py runs the scripts",
    "convex": "minutes on MNIST; the commands are validated",
    "devices": "minutes of camera frames, or LightOn's hardware and library",
    "extending": "installs a package; tests/opusim/devices/test_third_party_device.py does it",
    "optical-features": "minutes on FashionMNIST; tests/test_gallery.py runs the scripts",
    "own-instrument": "needs instruments; tests/opusim/devices/test_bench.py runs it on doubles of their libraries",
    "privacy-records": "minutes on FashionMNIST; the commands are validated",
    "serving": "needs a server and keys; tests/opusim/serving starts both",
    "forward-only": "minutes, or a language model from the network; the commands are validated",
}
"""Pages whose blocks are not run as they stand, apart from sessions (`>>>`), and why."""
BLOCKS = [block for page in PAGES for block in code_blocks(page)]


def unexplained(block: Block) -> bool:
    """Whether a block is neither run nor says why not."""
    listed = block.page in RUN or block.page in NOT_RUN
    return not (block.is_doctest or block.reason or listed)


def test_every_block_is_run_or_says_why_not(tmp_path: Path) -> None:
    assert [(block.page, block.text) for block in BLOCKS if unexplained(block)] == []
    assert set(NOT_RUN) <= {block.page for block in BLOCKS}
    page = tmp_path / "new.md"
    page.write_text("```console\nls\n```\n\n<!-- not run: needs hardware -->\n```console\nls\n```\n")
    first, second = code_blocks(page)
    assert unexplained(first)
    assert not unexplained(second)
    assert second.reason == "needs hardware"


def test_commands_are_shortened_and_one_that_fails_is_found(tmp_path: Path) -> None:
    assert shortened("opusim train pdfa --data digits") == "opusim train pdfa --data digits --epochs 1"
    assert shortened("opusim train pdfa --epochs 3") == "opusim train pdfa --epochs 3"
    assert shortened("opusim audit RUN --trials 100") == "opusim audit RUN --trials 40"
    assert shortened("opusim evaluate RUN --json > out.json") == "opusim evaluate RUN --json > out.json"
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```console\nfalse  # fails\n```\n")
    with pytest.raises(AssertionError, match="false"):
        list(run_page(page, tmp_path, "opusim"))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_pages_run(name: str, tmp_path: Path) -> None:
    program = f"env PYTHONPATH={ROOT} {sys.executable} -c 'from opusim.training.cli import main; main()'"
    ran = list(run_page(ROOT / "docs" / f"{name}.md", tmp_path, program))
    assert len(ran) >= 2


COMMANDS = typer.main.get_command(app)
SHOWING = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
SHOWN = re.compile(r"(?<![\w/.-])opusim(?: (?:[^`\n\\]|\\\n)*)")


def shown_commands() -> list[str]:
    texts = [page.read_text() for page in SHOWING]
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
