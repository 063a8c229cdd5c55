"""How far a run's configuration goes from `train` to the ledger: calls that take it, their files, and validations."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from opusim import training
from opusim.accounting.ledger import Ledger
from opusim.training.config.run import RunConfig
from opusim.training.engine.plan import RunPlan

TRAINING = str(Path(training.__file__).parent)
MOST_CALLS, MOST_FILES = 60, 12
"""Calls outside the files of the configuration itself, which ask one another while it is validated."""
MOST_VALIDATIONS = 2
"""As it is read, and once more with the names of a user's own data and module."""


def takes_a_run(frame: FrameType) -> bool:
    """Whether a call takes a configuration or a plan as an argument; the object that a method belongs to is none."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    own = [frame.f_locals.get(name) for name in names if name not in ("self", "cls")]
    return any(isinstance(value, RunConfig | RunPlan) for value in own)


@pytest.mark.parametrize("kind", ["bp", "pdfa", "zo"])
def test_a_configuration_goes_a_short_way(tmp_path: Path, kind: str) -> None:
    generator, y = np.random.default_rng(3), np.arange(120) % 3
    way: list[str] = []
    validations = 0
    config: dict[str, Any] = {
        "trainer": {"kind": kind}, "epochs": 1, "threads": 1, "data": {"n_classes": 3}, "sampler": {"batch_size": 12},
        "model": {"hidden": [4]}, "protection": {"kind": "record", "epsilon": 3.0},
    }  # fmt: skip

    def follow(frame: FrameType, event: str, argument: object) -> None:
        nonlocal validations
        path = frame.f_code.co_filename
        if event != "call":
            return
        if frame.f_code is Ledger.__init__.__code__:
            sys.setprofile(before)
        elif path.startswith(TRAINING):
            validations += frame.f_code is RunConfig._check.__code__  # type: ignore[attr-defined]
            if "config" not in path and takes_a_run(frame):
                way.append(path.removeprefix(TRAINING))

    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        training.train(config, data=(generator.normal(size=(120, 6)), y), folder=tmp_path)
    finally:
        sys.setprofile(before)
    assert 20 < len(way) <= MOST_CALLS, way
    assert len(set(way)) <= MOST_FILES, sorted(set(way))
    assert 1 <= validations <= MOST_VALIDATIONS
