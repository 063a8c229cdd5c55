"""Runs of long experiments: trained once, resumed after a stop, read back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed
from torch import nn

import opusim
from opusim.training.config import load_config
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.run import Run


def train_or_read(config: dict[str, Any], path: Path, *, model: nn.Module | None = None) -> Run:
    """Return the run of a configuration: read back if it is finished, otherwise started or resumed in its folder.

    Raises:
        ValueError: The folder holds a run of another configuration.
    """
    folder = RunFolder(path)
    if not folder.started:
        return opusim.train(config, model=model, folder=path)
    _require_same(config, folder, of_configuration=model is None)
    if folder.finished:
        return opusim.load_run(path, model=model, trust_code=True)  # code that the configuration here names
    return opusim.train(model=model, folder=path, resume=True, trust_code=True)


def in_parallel(function: Callable[..., Any], tasks: Iterable[Sequence[Any]], *, jobs: int) -> Iterator[Any]:
    """Return what a function makes of each task, which is its arguments, as soon as it is there; `jobs` at a time."""
    calls = (delayed(function)(*task) for task in tasks)
    found: Iterator[Any] = Parallel(n_jobs=jobs, return_as="generator_unordered")(calls)
    return found


def private_accuracy(run: Run) -> dict[str, Any]:
    """Return accuracies of a finished run, per cent, and the epsilon of its one guarantee with its status."""
    summary = run.summary or {}
    (guarantee,) = run.guarantees
    return {
        "test": 100 * summary["test_accuracy"],
        "validation": 100 * summary["validation_accuracy"] if "validation_accuracy" in summary else None,
        "stated_epsilon": guarantee.epsilon,
        "status": guarantee.status.value,
    }


def _require_same(config: dict[str, Any], folder: RunFolder, *, of_configuration: bool) -> None:
    """Refuse a folder that holds another configuration; what the run resolved itself may differ."""
    kept = folder.read_config()
    wanted = load_config(config)
    resolved: dict[str, Any] = {"threads": kept.threads}
    if not of_configuration:
        resolved["model"] = kept.model
    noise = {"noise_multiplier": kept.protection.noise_multiplier} if wanted.protection.epsilon else {}
    correlated = {"correlation": kept.protection.correlation} if wanted.protection.bands > 1 else {}
    protection = wanted.protection.model_copy(update=noise | correlated)
    if wanted.model_copy(update=resolved | {"protection": protection}) != kept:
        raise ValueError(
            f"run folder {folder.path} holds another configuration; remove it or choose another one"
        )
