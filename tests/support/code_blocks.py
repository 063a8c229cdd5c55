"""Code blocks of the pages: what each holds, whether it is run, and how the commands of a page are run in order."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]+?) -->\n+)?^ *```(?P<language>\w+)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
CODE = ("python", "console", "toml")
_QUICK_TRAINING = "--epochs 1"
_QUICK_AUDIT = {"--trials": "40", "--canaries": "60", "--steps": "20"}
"""Options that shorten a command: of a training always, of an audit those that the line gives."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A code block of a page."""

    page: str  # its name, without its ending
    language: str  # as the page marks it
    text: str
    reason: str | None  # why it is not run, or None

    @property
    def is_doctest(self) -> bool:
        """Whether the block is a session that shows its results."""
        return self.language == "python" and ">>> " in self.text

    @property
    def commands(self) -> list[str]:
        """The commands of a console block, one each, without comments."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [line.split(" #")[0].strip() for line in lines if line.strip() and self.language == "console"]

    @property
    def file(self) -> str | None:
        """The name of the file that the block shows, from its first line."""
        named = re.match(r"# ([\w.]+)\n", self.text)
        return named[1] if named else None


def code_blocks(page: Path) -> list[Block]:
    """Return the blocks of Python, TOML and commands on a page."""
    return [
        Block(page=page.stem, language=found["language"], text=found["text"], reason=found["reason"])
        for found in _BLOCK.finditer(page.read_text())
        if found["language"] in CODE
    ]


def shortened(command: str) -> str:
    """Return a command of opusim at a size of seconds."""
    words = shlex.split(command)
    if len(words) < 3:
        return command
    if words[1] == "train" and words[2] not in ("resume", "options") and "--epochs" not in words:
        return f"{command} {_QUICK_TRAINING}"
    if words[1] != "audit":
        return command  # as it stands: joined words would quote a shell's `>`
    for option, value in _QUICK_AUDIT.items():
        if option in words:
            words[words.index(option) + 1] = value
    return shlex.join(words)


def run_page(page: Path, folder: Path, program: str, *, quick: bool = True) -> Iterator[tuple[str, str]]:
    """Run the commands of a page in order in an empty folder, `program` for `opusim`, and yield each with its output.

    Files that the page shows are written first; blocks with a reason are left out. `quick` shortens trainings to an
    epoch and audits to few trials. A command that fails raises an AssertionError.
    """
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", "NO_COLOR": "1"}
    blocks = [block for block in code_blocks(page) if block.reason is None and not block.is_doctest]
    for block in blocks:
        if block.file:
            (folder / block.file).write_text(block.text)
    for block in blocks:
        for line in block.commands:
            command = shortened(line) if quick else line
            call = re.sub(r"^opusim\b", program, command)
            done = subprocess.run(
                call, shell=True, cwd=folder, env=settings, capture_output=True, text=True, timeout=1800
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            yield command, done.stdout
