"""How long do whole runs take, against the plainest script that does the same, and against an earlier commit?

`opusim train pdfa` on digits and on MNIST (15 epochs, report included) over `benchmarks/speed/plain.py`, a script of
torch, scikit-learn and matplotlib that loads, trains and draws the same, by photonic DFA and by backpropagation. The
demo, and two epochs of label-amplified training on FashionMNIST, over the same at commit 02c3c03. Each is a process of
its own on one thread, in turn with what it is measured against; medians of processor and of wall time. The demo starts
as many processes as there are cores, so its wall time is what counts. The first turn compiles kernels and does not
count. Required: at most 1.3, 1.1, 0.45 and 0.35.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.markdown import command, markdown, section, verdict
from benchmarks.results_file import load_results, save_results
from benchmarks.speed.commands import BEFORE, ROOT, START, seconds_of, worktree
from opusim.tables import print_table

MODULE, NAME = "benchmarks.speed.whole_runs", "whole_runs"
PLAIN = str(Path(__file__).with_name("plain.py"))
EPOCHS = "15"
AMPLIFIED = ("train", "pdfa", "--data", "fashion-mnist", "--protect", "label-amplified", "--epsilon", "1")
COLUMNS = ("run", "against", "processor time", "of the other", "ratio", "ratio of wall time", "at most")


class Pair(NamedTuple):
    """A run and what it is measured against.

    Attributes:
        run: Arguments of Python here; OUT stands for a new folder.
        other: Arguments of Python for the other.
        earlier: Whether the other runs at the earlier commit.
        most: Largest ratio allowed, or None if no limit is set.
        clock: The time that the limit is on.
    """

    run: tuple[str, ...]
    other: tuple[str, ...]
    earlier: bool
    most: float | None
    clock: Literal["processor", "wall"] = "processor"


def _opusim(*arguments: str) -> tuple[str, ...]:
    return ("-c", START, *arguments, "--quiet", "--set", "threads=1", "--out", "OUT")


def _train(data: str) -> tuple[str, ...]:
    return _opusim("train", "pdfa", "--data", data, "--epochs", EPOCHS)


def _plain(data: str, trainer: str) -> tuple[str, ...]:
    return (PLAIN, data, trainer, EPOCHS, "OUT")


PAIRS = {
    "digits, photonic DFA": Pair(_train("digits"), _plain("digits", "pdfa"), False, 1.3),
    "digits, against backpropagation": Pair(_train("digits"), _plain("digits", "bp"), False, None),
    "MNIST, photonic DFA": Pair(_train("mnist"), _plain("mnist", "pdfa"), False, 1.1),
    "MNIST, against backpropagation": Pair(_train("mnist"), _plain("mnist", "bp"), False, None),
    "make demo": Pair(("-m", "benchmarks.pdfa.demo"), ("-m", "benchmarks.demo_digits"), True, 0.45, "wall"),
    "label-amplified, two epochs": Pair(
        _opusim(*AMPLIFIED, "--epochs", "2", "--set", "data.components=64"),
        _opusim(*AMPLIFIED, "--epochs", "2", "--set", "data.components=64"),
        True,
        0.35,
    ),
}


def measure(pair: Pair, before: Path, folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Median seconds of a run and of what it is measured against, by clock."""
    found: dict[str, list[dict[str, float]]] = {"run": [], "other": []}
    sides = {"run": (pair.run, ROOT), "other": (pair.other, before if pair.earlier else ROOT)}
    for repeat in range(-1, repeats):
        for side, (arguments, tree) in sides.items():
            out = str(folder / f"{side}-{repeat}")
            call = [sys.executable, *(out if word == "OUT" else word for word in arguments)]
            place = folder / side if "-m" in arguments else folder
            taken = seconds_of(call, tree, _with_examples(place, tree))
            if repeat >= 0:
                found[side].append(taken)
    return {
        side: {clock: statistics.median(each[clock] for each in taken) for clock in ("wall", "processor")}
        for side, taken in found.items()
    }


def _with_examples(folder: Path, tree: Path) -> Path:
    """Make a folder from which the demo finds its device file."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / "examples").symlink_to(tree / "examples")
    return folder


def table_rows() -> list[tuple[str, ...]]:
    """Return a line for each pair that was measured."""
    rows = []
    for name, found in load_results(NAME).get("seconds", {}).items():
        pair = PAIRS[name]
        ratios = {clock: found["run"][clock] / found["other"][clock] for clock in ("processor", "wall")}
        other = f"the same at {BEFORE}" if pair.earlier else f"plain.py, {pair.other[2]}"
        met = (
            ""
            if pair.most is None
            else f"{pair.most:g} of {pair.clock}: {verdict(ratios[pair.clock] <= pair.most)}"
        )
        times = (f"{found[side]['processor']:.2f} s" for side in ("run", "other"))
        rows.append((name, other, *times, *(f"{ratio:.2f}" for ratio in ratios.values()), met))
    return rows


def page_section() -> str:
    """Return the section of the result pages; empty without results."""
    if not table_rows():
        return ""
    text = (
        f"Whole runs, reports and figures included, one thread ({load_results(NAME)['date']}, {command(MODULE)}). "
        "[plain.py](plain.py) is a script of torch, scikit-learn and matplotlib that loads, trains and draws the same. "
        "The demo's runs are processes side by side on all cores, so the limit is on its wall time. Every fourth "
        "label-amplified step computes the activations of all public records and their products in every layer "
        "(`protection.reference_every`)."
    )
    return section("Whole runs", text, markdown(COLUMNS, table_rows()))


def main() -> None:
    """Measure, print and save after each pair."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--before", type=Path, help=f"A tree of {BEFORE}; else a new worktree.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        before = options.before or stack.enter_context(worktree(Path(name)))
        for each in options.only:
            seconds: dict[str, Any] = dict(load_results(NAME).get("seconds", {}))
            seconds[each] = measure(PAIRS[each], before, Path(name) / each.replace(" ", "-"), options.repeats)
            save_results(NAME, {"seconds": {key: seconds[key] for key in PAIRS if key in seconds}})
    print_table("Whole runs", COLUMNS, table_rows())


if __name__ == "__main__":
    main()
