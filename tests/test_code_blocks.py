"""Every code block of the pages is run, or says why not."""

import sys
from pathlib import Path

import pytest

from tests.support.code_blocks import Block, code_blocks, run_page, shortened

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


def test_every_block_is_run_or_says_why_not() -> None:
    assert [(block.page, block.text) for block in BLOCKS if unexplained(block)] == []
    assert set(NOT_RUN) <= {block.page for block in BLOCKS}


def test_an_unexplained_block_is_found(tmp_path: Path) -> None:
    page = tmp_path / "new.md"
    page.write_text("```console\nls\n```\n\n<!-- not run: needs hardware -->\n```console\nls\n```\n")
    first, second = code_blocks(page)
    assert unexplained(first)
    assert not unexplained(second)
    assert second.reason == "needs hardware"


def test_commands_are_shortened() -> None:
    assert shortened("opusim train pdfa --data digits") == "opusim train pdfa --data digits --epochs 1"
    assert shortened("opusim train pdfa --epochs 3") == "opusim train pdfa --epochs 3"
    assert shortened("opusim audit RUN --trials 100") == "opusim audit RUN --trials 40"
    assert shortened("opusim evaluate RUN --json > out.json") == "opusim evaluate RUN --json > out.json"


def test_a_command_that_fails_is_found(tmp_path: Path) -> None:
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
