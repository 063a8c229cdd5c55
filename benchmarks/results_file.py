"""Where benchmarks leave their figures: one JSON file each, replaced at once, with machine and versions."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from training.runs.folder import versions
from training.runs.storage import write_json

FOLDER = Path(__file__).parent / "results"


def save_results(name: str, content: dict[str, Any]) -> Path:
    """Write benchmarks/results/NAME.json; returns its path."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    write_json(path, {"benchmark": name, "date": time.strftime("%Y-%m-%d"), "machine": machine(), **content})
    return path


def load_results(name: str) -> dict[str, Any]:
    """Read what an earlier call left, or an empty mapping."""
    path = FOLDER / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def machine() -> dict[str, Any]:
    """The machine in words: processor, cores, versions."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"processor": processor, "cores": os.cpu_count(), "gpu": gpu, "versions": versions()}
