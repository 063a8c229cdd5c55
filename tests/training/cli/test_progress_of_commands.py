"""Every long command says on standard error how far it is, and keeps standard output for its result."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from opusim import progress
from opusim.training.cli import main

SMALL = ("--epochs", "1", "--set", "model.hidden=[8]", "--set", "threads=1")
SPEC = """
title = "t"
config = { data.name = "digits", epochs = 1, model.hidden = [4], trainer.kind = "bp" }
axes.seed = [0, 1]
"""


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines for work of any length, as often as there is one."""
    monkeypatch.setattr(progress, "_WORTH_A_LINE_S", 0.0)
    monkeypatch.setattr(progress, "BETWEEN_LINES_S", 0.0)
    monkeypatch.setattr(progress, "_POLL_S", 0.001)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["opusim", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code


COMMANDS = [
    ("train pdfa", "steps", ("train", "pdfa", *SMALL, "--out", "a")),
    (
        "train bp",
        "steps",
        ("train", "bp", *SMALL, "--protect", "label-amplified", "--noise-multiplier", "1", "--out", "b"),
    ),
    ("audit", "trials", ("audit", "run", "--trials", "40", "--json")),
    ("sweep", "runs", ("curve", "spec.toml", "--jobs", "1")),
    (
        "tune",
        "trials",
        (
            "tune",
            "convex",
            "--out",
            "c",
            "--epsilon",
            "8",
            "--data",
            "digits",
            "--seed",
            "1",
            "--choose",
            "epochs=1,2",
        ),
    ),
    (
        "account device",
        "evaluations",
        ("account", "device", "camera_low_light", "--target-epsilon=8", "--outputs=64"),
    ),
    ("device record", "frames", ("device", "record", "camera", "--out=d", "--steps=4", "--outputs=4096")),
]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("label", "unit", "arguments"), COMMANDS, ids=[label for label, _, _ in COMMANDS])
def test_a_long_command_tells_how_far_it_is(
    label: str,
    unit: str,
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    if arguments[0] == "audit":
        call(monkeypatch, "train", "bp", *SMALL, "--quiet", "--out", "run", "--set", "sampler.batch_size=4")
        capsys.readouterr()
    call(monkeypatch, *arguments)
    output = capsys.readouterr()
    line = re.compile(
        rf"^{label}: [\d,]+ of [\d,]+ {unit}(, about \d+(\.\d+)? (s|min) left|; the time left .*)( \(.*\))?$"
    )
    assert [text for text in output.err.splitlines() if line.match(text)], output.err
    assert not [text for text in output.out.splitlines() if line.match(text)]
    if "--json" in arguments:
        json.loads(output.out)


@pytest.mark.usefixtures("at_once")
def test_quiet_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    call(monkeypatch, "train", "bp", *SMALL, "--quiet", "--out", "run")
    assert capsys.readouterr().err == ""
