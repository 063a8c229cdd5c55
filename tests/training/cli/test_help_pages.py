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

from opusim.training.cli.app import app, main
from opusim.training.cli.options import key_rows, topics, trainer_options
from opusim.training.feedback.config import PdfaConfig
from tests.support.commands import subcommands


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


@pytest.mark.parametrize("path", [("train", "bp"), ("audit",), ("account", "run"), ("device", "list")])
def test_a_flag_shows_no_type_since_it_takes_no_value(path: tuple[str, ...]) -> None:
    assert {"--help"} < words(path, 80)
    assert "<bool>" not in words(path, 80)
    assert not words(path, 80) & {"BOOLEAN", "[boolean]"}


def test_an_option_with_choices_says_what_they_choose() -> None:
    page = CliRunner().invoke(app, ["train", "pdfa", "--help"], terminal_width=240).output
    shown = " ".join(page.replace("│", " ").split())
    assert (
        "Where noise enters: after the reading (hardware) or after scaling into tau_B (published);" in shown
    )
    assert "Which signals are scaled to tau_b: only longer ones (ball, eq. 8) or every one (sphere);" in shown


def test_choices_are_introduced_by_a_sentence() -> None:
    """Help shows the first sentence of a key, so it must say what is chosen, not only describe the first choice."""
    for key, _, meaning in key_rows():
        text = meaning.partition("] ")[2] if meaning.startswith("[") else meaning
        if key.startswith("trainer.") and key != "trainer.kind":
            first = re.match(r"([\w-]+): ", text)
            assert first is None or first[1] in {"z", "phi", "k"}, (key, meaning)


def test_a_default_that_depends_on_the_model_is_told_once() -> None:
    told = {option.name: option.help for option in trainer_options("pdfa", PdfaConfig)}
    assert told["encoding"].endswith("by default ternary for an mlp and stochastic for other modules).")
    assert told["slices"].endswith("the default of other modules).")
    assert told["gain"].endswith("(by default 1, and 0.3 where the feedback is chosen to be normalised).")
    assert told["signal-gain"].endswith("1.0 by default.")


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (
            ["--help"],
            {"torch", "numpy", "pydantic", "rich.console", "matplotlib", "opusim.training.cli.train"},
        ),
        (["train", "--help"], {"torch", "numba", "scipy", "matplotlib", "opusim.training.engine.session"}),
        (
            ["train", "pdfa", "--help"],
            {"torch", "numba", "scipy", "matplotlib", "opusim.training.feedback.trainer"},
        ),
        (["train", "options", "zo"], {"torch", "numba", "scipy", "matplotlib", "transformers"}),
    ],
)
def test_a_page_of_help_imports_only_what_it_shows(arguments: list[str], absent: set[str]) -> None:
    code = (
        "import sys\nfrom opusim.training.cli import main\ntry:\n    main()\nfinally:\n"
        f"    print('loaded:', *sorted({absent!r} & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert shown.stdout.splitlines()[-1] == "loaded:", shown


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["trian"], ("opusim: no such command 'trian'; did you mean 'train'? `opusim --help`",)),
        (["train", "PDFA"], ("opusim train: no such command 'PDFA'; did you mean 'pdfa'",)),
        (["train", "backprop"], ("no such command 'backprop'; did you mean 'bp'",)),
        (["sweep", "noise.toml"], ("opusim: no such command 'sweep'; did you mean 'curve'",)),
        (["train", "pdfa", "--noise", "0.5"], ("--noise; write --set device.noise.sigma=VALUE for that of",)),
        (["train", "bp", "--noise", "0.5"], ("no such option: --noise; it is an option of ulr",)),
        (
            ["train", "pdfa", "model.hidden=256,256"],
            ("(model.hidden=256,256); write --set model.hidden=256,256;",),
        ),
        (["train", "pdfa", "--lr", "0.1"], ("no such option: --lr; write --set optimizer.lr=VALUE",)),
        (["train", "pdfa", "--learning-rate=0.1"], ("--learning-rate; write --set optimizer.lr=VALUE",)),
        (["train", "pdfa", "--optimizer", "adam"], ("--optimizer; write --set optimizer.name=VALUE",)),
        (["train", "pdfa", "--dataset", "mnist"], ("no such option: --dataset; did you mean --data?",)),
        (["train", "pdfa", "--eps", "3"], ("no such option: --eps; did you mean --epsilon?",)),
        (["train", "pdfa", "--gpu"], ("no such option: --gpu; write --set torch_device=VALUE",)),
        (["train", "pdfa", "--protect", "dp-sgd"], ("'dp-sgd' is no protection; did you mean 'record'?",)),
        (
            ["train", "pdfa", "--set", "device.noise=0.5"],
            ("give its keys instead of 0.5, such as sigma = 0.5",),
        ),
        (
            ["train", "pdfa", "--set", "noise.sigma=0.5"],
            ("noise: unknown key; did you mean 'device.noise'?",),
        ),
        (
            ["train", "pdfa", "--set", "model.hidden=256"],
            ("model.hidden: must be a list, such as [256], got 256",),
        ),
        (["train", "pdfa", "--set", "optimizer.learning_rate=1"], ("unknown key; did you mean 'lr'?",)),
        (["train", "pdfa", "--set", "trainer.kind=PDFA"], ("'PDFA' is no trainer; did you mean 'pdfa'?",)),
        (["train", "pdfaa"], ("opusim train: no such command 'pdfaa'; did you mean 'pdfa'",)),
        (["train", "zo", "--lawn", "laplace"], ("opusim train zo: no such option: --lawn",)),
        (["train", "bp", "--device", "ideal"], ("no such option: --device", "an option of convex, pdfa, ")),
        (
            ["train", "pdfa", "--epochs", "many"],
            ("opusim train pdfa: ", "'--epochs'", "got 'many'", "`opusim"),
        ),
        (["train", "pdfa", "--epochs=many"], ("'--epochs'", "got 'many'")),
        (["curve"], ("opusim curve: missing argument 'SPEC'",)),
        (["train", "pdfa", "--epochs"], ("opusim train pdfa: option '--epochs' needs a value; `opusim",)),
        (
            ["train", "pdfa", "--set", "--data", "digits"],
            ("option '--set' needs a value", "'--data' follows"),
        ),
        (["train", "pdfa", "--epsilon", "1", "--epsilon=8"], ("'--epsilon' is given twice, '1' and '8'",)),
        (["train", "pdfa", "--through-clip", "--no-through-clip"], ("contradict each other; give one",)),
        (["train", "pdfa", "--stages", "4"], ("--stages; write --set protection.stages=VALUE",)),
        (["runs", "nothere"], ("no such command 'nothere'; the commands here are list, rm;",)),
        (["account", "photon-counts"], ("missing option '--rate-low' (Lowest expected count",)),
        (["train", "options", "stages"], ("opusim: TOPIC: 'stages' is no topic", "or write --search stages")),
        (
            ["train", "pdfa", "--epochs", "0"],
            ("opusim: --epochs: must be at least 1 and at most 1e+09, got 0",),
        ),
        (
            ["train", "pdfa", "--epochs", "3", "--set", "epochs=0"],
            ("opusim: configuration: epochs: must be",),
        ),
        (["train", "pdfa", "--sigma", "-1", "--data", "digits"], ("opusim: --sigma: must be at least 0",)),
        (
            ["train", "pdfa", "--protect", "recrod"],
            ("opusim: --protect: 'recrod' is no protection; did you",),
        ),
        (["train", "pdfa", "--protect", "label-release"], ("opusim: --epsilon: is missing; kind =",)),
        (
            ["train", "pdfa", "--protect", "label-budget", "--epsilon", "3"],
            (
                "opusim: --protect: 'label-budget' was dropped; take",
                "'label-randomized-response' or 'record'",
            ),
        ),
        (["train", "pdfa", "--device", "nope"], ("opusim: --device 'nope': no such device; known",)),
        (["train", "pdfa", "--device=--data"], ("opusim: --device '--data': no such device",)),
        (
            ["account", "photon-counts", "--rate-low", "-3", "--rate-high", "1"],
            ("opusim: --rate-low -3: must",),
        ),
        (["audit", "--mechanism", "nope"], ("opusim: --mechanism 'nope': must be one of",)),
        (
            ["device", "effects", "camera"],
            ("no such command 'effects'; it was dropped: ", "device calibrate`"),
        ),
        (
            ["account", "photon-counts", "--rate-low", "3", "--rate-high=1"],
            ("opusim: --rate-high 1: must be at least",),
        ),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(
    arguments: list[str],
    parts: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["opusim", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    told = capsys.readouterr()
    assert (stopped.value.code, told.out, told.err.count("\n")) == (2, "", 1), told
    assert not [part for part in parts if part not in told.err], told.err


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--version"], 0), (["train", "--help"], 0)])
def test_help_and_version_keep_their_exit_codes(
    arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["opusim", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == code
    assert len("".join(capsys.readouterr())) > 10


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
