"""Results of benchmarks: one JSON file each, replaced atomically, with date, machine, versions and commit."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from opusim.files import write_file
from opusim.training.runs.folder import versions

FOLDER = Path(__file__).parent / "results"
FACTS = ("benchmark", "date", "commit", "machine")
_NUMBERS = re.compile(r"\[([-+.\deE,\s]+)\]")
"""A list of numbers, which takes one line of a file."""


def save_results(name: str, content: dict[str, Any]) -> Path:
    """Write benchmarks/results/NAME.json; returns its path."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    facts = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine()}
    whole = {"benchmark": name, **facts, **content}
    text = json.dumps(whole, indent=2, allow_nan=False)
    write_file(path, (_NUMBERS.sub(_on_one_line, text) + "\n").encode())
    return path


def load_results(name: str) -> dict[str, Any]:
    """Read what an earlier call saved; empty if there is nothing."""
    path = FOLDER / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def selected(rows: Iterable[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def rows_of(name: str, part: str = "rows", **wanted: Any) -> list[dict[str, Any]]:
    """Return the rows of a part of some results that have these values."""
    return selected(load_results(name).get(part, []), **wanted)


def keep_row(name: str, cell: Mapping[str, Any], part: str = "rows", **figures: Any) -> dict[str, Any]:
    """Save a row, a cell with its figures, in place of an earlier one of the same cell, and print it.

    Args:
        name: Of the results; their other parts stay.
        cell: What tells the row from the others.
        part: Of the results.
        **figures: What was measured.
    """
    results = {key: value for key, value in load_results(name).items() if key not in FACTS}
    row = {**cell, **figures}
    others = [other for other in results.get(part, []) if other not in selected([other], **cell)]
    save_results(name, {**results, part: [*others, row]})
    shown = {key: value for key, value in row.items() if not isinstance(value, list | dict)}
    print(", ".join(f"{key} {value}" for key, value in shown.items()), flush=True)
    return row


def commit() -> str | None:
    """Return the commit of this checkout, or None outside one.

    A plus sign says that files other than results have changed since.
    """
    try:
        found = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", f":(exclude){FOLDER}")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{found}+" if changed else found


def _git(*words: str) -> str:
    command = ["git", "-C", str(FOLDER.parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _on_one_line(found: re.Match[str]) -> str:
    return f"[{' '.join(found[1].split())}]"


def machine() -> dict[str, Any]:
    """Describe the machine: processor, cores, versions."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"processor": processor, "cores": os.cpu_count(), "gpu": gpu, "versions": versions()}
