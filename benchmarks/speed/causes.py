"""Where does the processor time of the commands that people type most go, and what was it at an earlier commit?

Each command runs in a process of its own on this tree and on that of commit 02c3c03, in turn, after a run of each that
does not count; medians of processor time. One more process of this tree tells the causes (`benchmarks.speed.clock`).
Required of the ratios: `evaluate` and `report` at most 0.4, `account device camera_low_light` at most 0.2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.markdown import Row, command, markdown, section, verdict
from benchmarks.results_file import load_results, save_results
from benchmarks.speed.commands import BEFORE, ROOT, START, seconds_of, worktree
from opusim.tables import print_table

MODULE, NAME = "benchmarks.speed.causes", "causes"
TRAIN = "train pdfa --data digits"
COMMANDS = {
    "--help": ["--help"],
    TRAIN: [*TRAIN.split(), "--quiet", "--set", "threads=1", "--out", "RUN"],
    "evaluate": ["evaluate", "RUN"],
    "report": ["report", "RUN"],
    "runs list": ["runs", "list", "."],
    "account run": ["account", "run", "RUN"],
    "account device camera_low_light": ["account", "device", "camera_low_light"],
    "account device gaussian": ["account", "device", "gaussian"],
    "device show camera": ["device", "show", "camera"],
    "explain randomized-response": ["explain", "randomized-response"],
}
"""Arguments of each command; RUN stands for the run that `train` makes."""
REQUIRED = {"evaluate": 0.4, "report": 0.4, "account device camera_low_light": 0.2}
_SHOWN = 6
"""Causes in the table; the smaller ones are added up."""
_CLOCK = Path(__file__).with_name("clock.py")


def arguments_of(name: str, run: str) -> list[str]:
    """Return a command's arguments, with the name of its run."""
    return [run if word == "RUN" else word for word in COMMANDS[name]]


def total_of(name: str, tree: Path, folder: Path, repeats: int) -> float:
    """Median processor seconds of a command; the first repeat of several compiles kernels and does not count."""
    found = []
    for repeat in range(repeats):
        run = "run" if name != TRAIN or repeat == repeats - 1 else f"run-{repeat}"
        found.append(
            seconds_of([sys.executable, "-c", START, *arguments_of(name, run)], tree, folder)["processor"]
        )
    return statistics.median(found[1:] or found)


def causes_of(name: str, folder: Path) -> dict[str, float]:
    """Processor seconds of a command on this tree by cause."""
    out = folder / "causes.json"
    run = "run-of-causes" if name == TRAIN else "run"
    seconds_of([sys.executable, str(_CLOCK), str(out), *arguments_of(name, run)], ROOT, folder)
    return dict(sorted(json.loads(out.read_text()).items(), key=lambda each: -each[1]))


def measure(name: str, now: Path, earlier: tuple[Path, Path], repeats: int) -> dict[str, Any]:
    """Seconds of a command by cause, in all, and at the earlier commit (None if it had no such command)."""
    before, folder = earlier
    try:
        then: float | None = total_of(name, before, folder, repeats)
    except RuntimeError:
        then = None
    return {"now": total_of(name, ROOT, now, repeats), "before": then, "causes": causes_of(name, now)}


def shown_causes(causes: dict[str, float]) -> str:
    """The largest causes, in seconds."""
    largest = list(causes.items())[:_SHOWN]
    rest = sum(causes.values()) - sum(value for _, value in largest)
    return ", ".join(f"{cause} {value:.2f}" for cause, value in [*largest, ("others", rest)] if value >= 0.01)


def ratio_of(found: dict[str, Any]) -> float | None:
    """Processor time over that of the earlier commit."""
    return None if found["before"] is None else float(found["now"] / found["before"])


def table_rows(commands: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a line for each command, as text."""
    rows = []
    for name, found in commands.items():
        ratio, most = ratio_of(found), REQUIRED.get(name)
        shown = ("-", "-") if ratio is None else (f"{found['before']:.2f} s", f"{ratio:.2f}")
        met = None if most is None or ratio is None else ratio <= most
        rows.append(
            (
                f"opusim {name}",
                f"{found['now']:.2f} s",
                *shown,
                "" if most is None else f"{most:g}: {verdict(met)}",
                shown_causes(found["causes"]),
            )
        )
    return rows


COLUMNS = ("command", "processor time", f"at {BEFORE}", "ratio", "required at most", "seconds by cause")


def causes_section() -> str:
    """Return the section of the result pages."""
    commands = load_results(NAME).get("commands", {})
    text = (
        "Processor time of whole commands on one thread, and its causes on this tree. A cause has the time that no "
        "cause within it has; what a process does at its end has no cause. Other processes ran on the machine; ratios "
        "are of runs in turn. `account device camera_low_light` needs torch to compute the medium, and bounds epsilon "
        "anew at each of the points that its tables search."
    )
    return section(
        "Where the time of commands goes", text, command(MODULE), markdown(COLUMNS, table_rows(commands))
    )


def speed_rows() -> list[Row]:
    """Return the ratios that something is required of."""
    found = load_results(NAME).get("commands", {})
    return [
        (f"processor time of `opusim {name}`", f"{ratio:.2f} of that at {BEFORE}", command(MODULE))
        for name in REQUIRED
        if name in found and (ratio := ratio_of(found[name])) is not None
    ]


def main() -> None:
    """Measure, print and save after each command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=6, help="With the first, which does not count.")
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument("--before", type=Path, help=f"A tree of {BEFORE} that has run; else a new worktree.")
    options = parser.parse_args()
    found = dict(load_results(NAME).get("commands", {}))
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        before = options.before or stack.enter_context(worktree(Path(name)))
        now, then = Path(name) / "now", Path(name) / "then"
        now.mkdir()
        then.mkdir()
        for each in dict.fromkeys([TRAIN, *options.only]):
            found[each] = measure(each, now, (before, then), options.repeats)
            save_results(NAME, {"commands": {key: found[key] for key in COMMANDS if key in found}})
    print_table("Commands", COLUMNS, table_rows(found))


if __name__ == "__main__":
    main()
