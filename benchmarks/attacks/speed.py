"""What does an audit cost, next to the run that it audits and next to the same audit at an earlier commit?

    python -m benchmarks.attacks.speed measure --old CHECKOUT     (resumes; CHECKOUT is a work tree of 02c3c03)
    python -m benchmarks.attacks.speed show

Processor seconds of whole commands, one after the other, with one thread each. The two audits of single steps are
interleaved after one pair that is not counted; the median of three is kept.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from opusim.tables import print_table

MODULE, NAME = "benchmarks.attacks.speed", "audit_speed"
OLD = "02c3c03"
REPEATS = 3
ROOT = Path(__file__).parents[2]
COLUMN_NAMES = ("audit", "next to", "CPU s of the audit", "CPU s of the other", "ratio", "required at most")


class Ratio(NamedTuple):
    """What is compared with what.

    Attributes:
        audit: Name of the command in the results.
        other: Name of the other one.
        required: Most that the ratio may be.
    """

    audit: str
    other: str
    required: float


RATIOS = (
    Ratio("single steps, digits", f"single steps, digits, at {OLD}", 0.35),
    Ratio("one training, digits", "run, digits", 3.0),
    Ratio("one training, fashion-mnist", "run, fashion-mnist", 2.0),
)
RUN = ("train", "pdfa", "--protect", "record", "--epsilon", "3")
EPOCHS = {"digits": (), "fashion-mnist": ("--epochs", "2")}


def spent(arguments: tuple[str, ...], checkout: Path) -> float:
    """Run a command of a checkout; return its processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", "from opusim.training.cli import main; main()", *arguments]
    subprocess.run(program, env=environment, cwd=checkout, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(old: Path | None) -> None:
    """Measure the commands that are missing; those of the earlier commit only if its work tree is given."""
    with tempfile.TemporaryDirectory(prefix="opusim-speed-") as scratch:
        for data in EPOCHS:
            if any(data in name and _missing(name) for ratio in RATIOS for name in ratio[:2]):
                run = Path(scratch) / data
                train = (*RUN, "--data", data, *EPOCHS[data], "--out", str(run))
                _keep(f"run, {data}", spent(train, ROOT))
                _keep(f"one training, {data}", spent(("audit", str(run), "--one-run", "--seed", "1"), ROOT))
                if data == "digits" and old is not None:
                    _single_steps(run, Path(scratch) / f"{data}-old", old)


def _single_steps(run: Path, before: Path, old: Path) -> None:
    """Audit single steps of a run and of one of the earlier commit in turn; the first pair is not counted."""
    spent((*RUN, "--data", "digits", "--out", str(before)), old)
    pairs = [
        [
            spent(("audit", str(folder), "--seed", "1"), checkout)
            for folder, checkout in ((run, ROOT), (before, old))
        ]
        for _ in range(REPEATS + 1)
    ][1:]
    for name, seconds in zip(RATIOS[0][:2], zip(*pairs, strict=True), strict=True):
        _keep(name, statistics.median(seconds))


def _missing(name: str) -> bool:
    return name not in load_results(NAME).get("cpu_s", {})


def _keep(name: str, seconds: float) -> None:
    save_results(NAME, {"cpu_s": {**load_results(NAME).get("cpu_s", {}), name: round(seconds, 2)}})


def table_rows() -> list[tuple[str, ...]]:
    """Return a line for each ratio whose two commands were measured."""
    found = load_results(NAME).get("cpu_s", {})
    return [
        (
            ratio.audit,
            ratio.other,
            f"{found[ratio.audit]:.1f}",
            f"{found[ratio.other]:.1f}",
            f"{found[ratio.audit] / found[ratio.other]:.2f}",
            f"{ratio.required:g}",
        )
        for ratio in RATIOS
        if ratio.audit in found and ratio.other in found
    ]


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    rows = table_rows()
    if not rows:
        return ""
    text = (
        f"Processor seconds of whole commands, start included, one thread ({load_results(NAME)['date']}, "
        f"{command(MODULE, 'measure')}): `opusim train pdfa --protect record --epsilon 3` (two epochs of "
        "FashionMNIST), `opusim audit RUN` and `opusim audit RUN --one-run`."
    )
    return section("What an audit costs", text, markdown(COLUMN_NAMES, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["measure", "show"], nargs="?", default="show")
    parser.add_argument("--old", type=Path, help=f"a work tree of {OLD}")
    given = parser.parse_args()
    if given.what == "measure":
        measure(given.old)
    print_table("What an audit costs", COLUMN_NAMES, table_rows())


if __name__ == "__main__":
    main()
