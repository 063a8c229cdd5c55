"""How many files a run's configuration passes on its way to the first step, and how often it comes back to one."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import training
from training.config.run import RunConfig
from training.engine.plan import RunPlan

TRAINING = str(Path(training.__file__).parent)
MOST_FILES = 17
MOST_VISITS = 6
"""The plan is resolved, sized, calibrated and started; each asks the plan's own file again."""


def takes_a_run(frame: FrameType) -> bool:
    """Whether a call takes a configuration or a plan as an argument; the object that a method belongs to is none."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return any(
        isinstance(frame.f_locals.get(name), RunConfig | RunPlan)
        for name in names
        if name not in ("self", "cls")
    )


@pytest.mark.parametrize("kind", ["bp", "pdfa", "zo"])
def test_a_configuration_passes_few_files(tmp_path: Path, kind: str) -> None:
    generator, y, way = np.random.default_rng(3), np.arange(120) % 3, []
    config: dict[str, Any] = {
        "trainer": {"kind": kind},
        "epochs": 1,
        "threads": 1,
        "data": {"n_classes": 3},
        "sampler": {"batch_size": 12},
        "model": {"hidden": [4]},
        "protection": {"kind": "record", "epsilon": 3.0},
    }

    def follow(frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(TRAINING) and takes_a_run(frame):
            way.append(path.removeprefix(TRAINING))

    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        training.train(config, data=(generator.normal(size=(120, 6)), y), folder=tmp_path)
    finally:
        sys.setprofile(before)
    assert len(set(way)) <= MOST_FILES, sorted(set(way))
    outside = [file for file in way if "config" not in file]  # validation asks the sections again and again
    visits = Counter(file for file, _ in groupby(outside))
    assert max(visits.values()) <= MOST_VISITS, visits
