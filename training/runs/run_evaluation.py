"""Measuring a run's model on its own test records, on a known data set, or on a person's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from training.data import Split, load_dataset
from training.data.errors import DataError
from training.data.npz import read_arrays
from training.data.records import OWN_ARRAYS
from training.runs.run import Run, load_run


def evaluate_run(path: Path, *, data: str | None = None, arrays: Path | None = None) -> dict[str, Any]:
    """Loss and accuracy of the model in a run folder.

    Args:
        path: The run folder.
        data: A known data set; its test records are taken. None for the run's own.
        arrays: An .npz file with x (n, d) and y (n,) instead.

    Returns:
        {"data": name, "records": n, "loss": ..., "accuracy": ...}.

    Raises:
        DataError: The records cannot be read, or the run was trained on arrays and none are given.
        RunFolderError: There is no run there.
        ValueError: Both data and arrays are given.
    """
    if data is not None and arrays is not None:
        raise ValueError(
            f"data = {data!r} and arrays = {str(arrays)!r}: one of them is enough; leave the other out"
        )
    run = load_run(path)
    if arrays is not None:
        x, y = read_npz(arrays)[:2]
        figures = run.evaluate(x, y)  # it checks the arrays, whose length is asked for next
        return {"data": arrays.name, "records": len(x), **figures}
    if data is None and run.config.data.name == OWN_ARRAYS:
        raise DataError(
            f"run {path} was trained on a person's own arrays; give test records with --arrays FILE.npz"
        )
    name = data or run.config.data.name
    split = _test_records(run, name)
    return {"data": name, "records": len(split), **run.evaluate(split.x, split.y)}


def _test_records(run: Run, name: str) -> Split:
    """Test records of a known data set, features in [0, 1] as the run's own standardisation takes them."""
    dataset = load_dataset(name, split_seed=run.config.data.split_seed, standardise=False)
    if dataset.n_features != run.n_features:
        raise DataError(
            f"data set {name} has {dataset.n_features} features, the run's network takes "
            f"{run.n_features}; evaluate it on data of that width"
        )
    if dataset.test is None:
        raise DataError(f"data set {name} has no test records; give some with --arrays FILE.npz")
    return dataset.test


def read_npz(
    path: Path,
) -> tuple[np.ndarray, np.ndarray] | tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays x and y of a user-supplied .npz file, and ids if it holds them.

    Raises:
        DataError: It cannot be read, or holds other arrays.
    """
    x, y, *ids = read_arrays(path, ("x", "y"), optional=("ids",))
    return (x, y, ids[0]) if ids else (x, y)
