"""How much processor time does each framework example take, and how much of it is the framework's own start?

Every script of examples/any_module and examples/private runs in a process of its own on one thread, once. Seconds are
processor time of the process and of those that it starts: of the interpreter and the script's imports but for opusim;
of torch's compiler, which torch imports when the first optimizer is built; and of the rest, from `import opusim` to the
end. Scripts given as arguments are measured again; the rows of others stay. Required: at most 5 s in all, or at most 5
s of the rest where the framework alone takes longer.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import FOLDER, load_results, save_results

MODULE, NAME = "benchmarks.speed.examples", "examples"
ROOT = FOLDER.parents[1]
FOLDERS = ("any_module", "private")
MARK = "  # opusim"
MOST_S = 5.0
PARTS = ("imports", "compiler", "rest")
CHILD = """
import json, os, runpy, sys

def used():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system

exec({imports!r})
imported = used()
import torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
ready = used()
runpy.run_path({script!r}, run_name="__main__")
print(json.dumps({{"imports": imported, "compiler": ready - imported, "rest": used() - ready}}))
"""


def scripts() -> list[str]:
    """Return the names of all examples, by folder."""
    return [
        f"{folder}/{path.stem}"
        for folder in FOLDERS
        for path in sorted((ROOT / "examples" / folder).glob("*.py"))
    ]


def framework_imports(text: str) -> str:
    """Return the import statements of a script that do not name opusim."""
    lines = [line for line in text.splitlines() if re.match(r"(import|from) \w", line)]
    return "\n".join(line for line in lines if not line.endswith(MARK))


def measure(name: str) -> dict[str, Any]:
    """Run an example and return its seconds by part, and the test accuracy that it prints, in per cent."""
    script = ROOT / "examples" / f"{name}.py"
    code = CHILD.format(imports=framework_imports(script.read_text()), script=str(script))
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, env=settings, capture_output=True, text=True, check=True)
    (accuracy,) = re.findall(r"test accuracy ([\d.]+) %", done.stdout)
    return {"example": name, **json.loads(done.stdout.splitlines()[-1]), "accuracy": float(accuracy)}


def page_section() -> str:
    """Return the seconds of each example."""
    rows = [
        (
            f"`{row['example']}`",
            *(f"{row[part]:.1f}" for part in PARTS),
            f"{sum(row[part] for part in PARTS):.1f}",
            f"{row['accuracy']:.1f}",
        )
        for row in load_results(NAME).get("rows", [])
    ]
    text = (
        "Processor seconds of each framework example: the interpreter and the framework's imports, torch's compiler, "
        "which torch imports for the first optimizer, and the rest, from `import opusim` to the end. "
        f"{command(MODULE)} measures them again."
    )
    header = ("example", "imports", "compiler", "rest", "all", "test accuracy [%]")
    return section("Examples", text, markdown(header, rows)) if rows else ""


def main(names: list[str]) -> None:
    """Measure, print, and save after each example."""
    for name in names:
        found = measure(name)
        print(
            name, *(f"{part} {found[part]:.1f} s" for part in PARTS), f"{found['accuracy']:.1f} %", flush=True
        )
        rows = [row for row in load_results(NAME).get("rows", []) if row["example"] in scripts()]
        rows = [*(row for row in rows if row["example"] != name), found]
        save_results(
            NAME, {"threads": 1, "rows": sorted(rows, key=lambda row: scripts().index(row["example"]))}
        )


if __name__ == "__main__":
    main(sys.argv[1:] or scripts())
