"""The documented way from a camera's frames to a private network, run command by command."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opusim.training.cli.app import app

pytestmark = [pytest.mark.compiled, pytest.mark.slow]

PAGE = Path(__file__).parents[3] / "docs" / "calibrate.md"
QUICK = {
    "device record": ["--outputs", "400", "--steps", "5"],
    "device calibrate": ["--readings", "60", "--frames", "64"],
    "device check": ["--readings", "60"],
    "account device": ["--outputs", "40", "--target-epsilon", "3"],
    "train pdfa": ["--epochs", "1", "--set", "model.hidden=[40]", "--set", "data.components=32"],
    "audit --mechanism": ["--level", "1e-6"],
}
"""What keeps a command small; nothing else of it is changed but the data set."""


def documented(device: str, kept: str) -> list[list[str]]:
    """Commands of the page's section, for a device and what is kept."""
    section = PAGE.read_text().split("### From frames to a private network")[1]
    block = re.search(r"```console\n(.*?)```", section, re.DOTALL)
    lines = block.group(1).replace("\\\n", " ").splitlines()
    assert len(lines) == 11
    found = []
    for line in lines:
        words = shlex.split(line.replace("fashion-mnist", "digits").replace("=counts", f"={kept}"))[1:]
        steady = words[:2] == ["audit", "--mechanism"]  # the self-test takes a steady camera of its own
        words = words if steady else [word.replace("camera_low_light", device) for word in words]
        words = [kept if word == "counts" else word for word in words]
        found.append([*words, *QUICK.get(" ".join(words[:2]), [])])
    return found


@pytest.mark.parametrize(
    ("device", "kept"), [("camera_low_light", "counts"), ("camera_fluctuating", "argmax")]
)
def test_the_chain_runs(device: str, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = {}
    for words in documented(device, kept):
        result = CliRunner(env={"COLUMNS": "160"}).invoke(app, words)
        assert result.exit_code == 0, f"opusim {shlex.join(words)}\n{result.output}\n{result.exception!r}"
        said[shlex.join(words)] = " ".join(result.output.split())
    statement = next(text for call, text in said.items() if call.startswith("account run"))
    assert "Proven under a device model" in statement
    assert "of device 'warm'" in statement
    assert "the laser is dimmed from the certified light by the stated factor" in statement
    assert ("delta holds beta of use" in statement) == (device == "camera_fluctuating")
    assert "No alarm" in next(text for call, text in said.items() if call.startswith("audit"))
    for epsilon in (8, 3, 1):
        assert (tmp_path / f"private-{epsilon}" / "ledger.jsonl").exists()
