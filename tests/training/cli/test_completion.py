"""A shell can ask the command for completions, of subcommands that load late among them."""

import os
import subprocess
import sys

import pytest

CALL = [
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'opusim'; from opusim.training.cli import main; main()",
]


def asked(**variables: str) -> str:
    """Return what the command answers to a shell."""
    settings = {**os.environ, **variables}
    return subprocess.run(CALL, env=settings, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize(("words", "answer"), [
    pytest.param("opusim tra", "train", marks=pytest.mark.slow),
    ("opusim device ca", "calibrate"),
    ("opusim train pdfa --prot", "--protect"),
    pytest.param("opusim nothing", "", marks=pytest.mark.slow),
])  # fmt: skip
def test_words_are_completed(words: str, answer: str) -> None:
    number = str(len(words.split()) - 1)
    found = asked(_OPUSIM_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=number)
    assert found.split() == answer.split()


def test_the_script_for_bash_is_printed() -> None:
    assert "complete -o default -F" in asked(_OPUSIM_COMPLETE="source_bash")
