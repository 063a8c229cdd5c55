"""Every page of help is whole at 80 columns."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from opusim.training.cli.app import app
from opusim.training.cli.options import key_rows, topics
from tests.support.command import opusim
from tests.support.commands import subcommands


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, part in subcommands(command).items():
        yield from commands(part, (*path, name))


@pytest.mark.parametrize(("arguments", "absent"), [
    (["--help"], {"torch", "numpy", "pydantic", "rich.console", "matplotlib", "opusim.training.cli.train"}),
    (["train", "--help"], {"torch", "numba", "scipy", "matplotlib", "opusim.training.engine.session"}),
    (["train", "pdfa", "--help"], {"torch", "numba", "scipy", "matplotlib", "opusim.training.feedback.trainer"}),
    (["train", "options", "zo"], {"torch", "numba", "scipy", "matplotlib", "transformers"}),
])  # fmt: skip
def test_a_page_of_help_imports_only_what_it_shows(arguments: list[str], absent: set[str]) -> None:
    code = (
        "import sys\nfrom opusim.training.cli import main\ntry:\n    main()\nfinally:\n"
        f"    print('loaded:', *sorted({absent!r} & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert shown.stdout.splitlines()[-1] == "loaded:", shown


@pytest.mark.parametrize(("line", "part"), [
    ("trian", "no such command 'trian'; did you mean 'train'?"),
    ("train PDFA", "did you mean 'pdfa'"),
    ("train pdfa model.hidden=256,256", "(model.hidden=256,256); write --set model.hidden=256,256;"),
    ("train pdfaa", "did you mean 'pdfa'"),
    ("train backprop", "did you mean 'bp'"),
    ("sweep noise.toml", "did you mean 'curve'"),
    ("device effects camera", "it was dropped: "),
    ("runs nothere", "the commands here are list, rm;"),
    ("curve", "missing argument 'SPEC'"),
    ("train pdfa --noise 0.5", "write --set device.noise.sigma=VALUE"),
    ("train bp --noise 0.5", "it is an option of ulr"),
    ("train bp --device ideal", "an option of convex, pdfa, "),
    ("train pdfa --lr 0.1", "write --set optimizer.lr=VALUE"),
    ("train pdfa --learning-rate=0.1", "write --set optimizer.lr=VALUE"),
    ("train pdfa --optimizer adam", "write --set optimizer.name=VALUE"),
    ("train pdfa --gpu", "write --set torch_device=VALUE"),
    ("train pdfa --stages 4", "write --set protection.stages=VALUE"),
    ("train pdfa --dataset mnist", "did you mean --data?"),
    ("train pdfa --eps 3", "did you mean --epsilon?"),
    ("train zo --lawn laplace", "no such option: --lawn"),
    ("train pdfa --protect dp-sgd", "did you mean 'record'?"),
    ("train pdfa --protect recrod", "opusim: --protect: 'recrod' is no protection"),
    ("train pdfa --protect label-release", "opusim: --epsilon: is missing"),
    ("train pdfa --protect label-budget --epsilon 3", "opusim: --protect: 'label-budget' was dropped"),
    ("train pdfa --set device.noise=0.5", "give its keys instead of 0.5, such as sigma = 0.5"),
    ("train pdfa --set noise.sigma=0.5", "did you mean 'device.noise'?"),
    ("train pdfa --set model.hidden=256", "must be a list, such as [256]"),
    ("train pdfa --set optimizer.learning_rate=1", "did you mean 'lr'?"),
    ("train pdfa --set trainer.kind=PDFA", "did you mean 'pdfa'?"),
    ("train pdfa --set --data digits", "'--data' follows"),
    ("train pdfa --epochs many", "'--epochs'"),
    ("train pdfa --epochs=many", "'--epochs'"),
    ("train pdfa --epochs", "option '--epochs' needs a value"),
    ("train pdfa --epochs 0", "opusim: --epochs: must be at least 1"),
    ("train pdfa --epochs 3 --set epochs=0", "opusim: configuration: epochs: must be"),
    ("train pdfa --sigma -1 --data digits", "opusim: --sigma: must be at least 0"),
    ("train pdfa --epsilon 1 --epsilon=8", "'--epsilon' is given twice, '1' and '8'"),
    ("train pdfa --through-clip --no-through-clip", "contradict each other"),
    ("train pdfa --device nope", "opusim: --device 'nope': no such device"),
    ("train pdfa --device=--data", "opusim: --device '--data': no such device"),
    ("train convex --method random", "--method random: must be one of cyclic, full, poisson"),
    ("train options stages", "opusim: TOPIC: 'stages' is no topic"),
    ("account photon-counts", "missing option '--rate-low'"),
    ("account photon-counts --rate-low -3 --rate-high 1", "opusim: --rate-low -3: must"),
    ("account photon-counts --rate-low 3 --rate-high=1", "opusim: --rate-high 1: must be at least"),
    ("audit --mechanism nope", "opusim: --mechanism 'nope': must be one of"),
])  # fmt: skip
def test_a_wrong_command_line_is_refused_in_one_line(line: str, part: str, tmp_path: Path) -> None:
    told = opusim(*line.split(), cwd=tmp_path)
    assert (told.returncode, told.stdout, told.stderr.count("\n")) == (2, "", 1), told
    assert part in told.stderr


def test_options_are_listed_by_topic_and_word() -> None:
    keys = {key for key, _, _ in key_rows("zo")}
    assert {"trainer.law", "trainer.language.prompt"} <= keys
    assert all(key.startswith("trainer.") for key in keys)
    assert {key for key, _, _ in key_rows("record", search="divisor")} == {"protection.divisor"}
    assert {"run", "sampler", "pdfa", "label-readout"} <= set(topics())
    assert all(topics().values())
    shown = CliRunner().invoke(app, ["train", "options", "optimizer", "--search", "MOMENTUM"])
    assert "optimizer.nesterov" in shown.output
    assert "optimizer.lr" not in shown.output
    shown = CliRunner().invoke(app, ["train", "options", "--search", "read_noise"])
    assert "device.camera.sensor.read_noise_e" in shown.output
    wrong = ((["zoo"], "no topic; take one of run"), (["--search", "qqq"], "no key has this word"))
    for arguments, reason in wrong:
        refused = CliRunner().invoke(app, ["train", "options", *arguments])
        assert reason in str(refused.exception)


@pytest.mark.parametrize(("line", "code"), [("", 2), ("--version", 0), ("train --help", 0)])
def test_help_and_version_keep_their_exit_codes(line: str, code: int, tmp_path: Path) -> None:
    assert opusim(*line.split(), cwd=tmp_path).returncode == code
