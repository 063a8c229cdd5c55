"""From the first parameters and the step log to the final ones, to the bit, without any data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from training.runs.checkpoints import read_tensors
from training.zeroth_order.perturbation import Walk
from training.zeroth_order.step_log import (
    BASE_FILE,
    LOG_FILE,
    LogContent,
    LogHeader,
    StepLogCorrupt,
    parameters_digest,
    tensor_facts,
)


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Where a step log led.

    Attributes:
        steps: How many were replayed.
        tensors: The parameters behind the last of them, by name.
        digest: Of these parameters.
        arrived: Whether they are, to the bit, those that the log's mark names; None where there is no mark.
    """

    steps: int
    tensors: dict[str, Tensor]
    digest: str
    arrived: bool | None


def replay(
    path: str | Path,
    *,
    base: str | Path | None = None,
    on_step: Callable[[int, int], None] = lambda done, of: None,
) -> Replayed:
    """Rebuild the parameters that a step log leads to.

    Args:
        path: A step log, or the run folder that holds one.
        base: The parameters that training began with, safetensors; None for the file beside the log. It may hold
            more tensors than were trained.
        on_step: Told how many steps are done, of how many.

    Raises:
        StepLogCorrupt: The log was changed, cut or reordered; the base is another; or the parameters at the end are
            not those of the mark.
    """
    log = Path(path) / LOG_FILE if Path(path).is_dir() else Path(path)
    content = LogContent.read(log)
    tensors = _base_tensors(content.header, Path(base) if base is not None else log.with_name(BASE_FILE))
    walk = Walk(
        list(tensors.values()),
        perturbation=content.header.perturbation,
        weight_decay=content.header.weight_decay,
    )
    for number, entry in enumerate(content.entries, start=1):
        walk.repeat(entry)
        on_step(number, len(content.entries))
    walk.settle()
    digest = parameters_digest(tensors)
    arrived = None if content.parameters is None else digest == content.parameters
    if arrived is False:
        raise StepLogCorrupt(
            f"{log}: its {len(content.entries)} steps lead to parameters {digest}, but the mark names "
            f"{content.parameters}; log, base or mark were changed"
        )
    return Replayed(steps=len(content.entries), tensors=tensors, digest=digest, arrived=arrived)


def _base_tensors(header: LogHeader, path: Path) -> dict[str, Tensor]:
    """The first parameters, in the order of the log.

    Raises:
        StepLogCorrupt: They are not those that the log begins with.
    """
    held = read_tensors(path)
    names = [name for name, _, _ in header.tensors]
    missing = [name for name in names if name not in held]
    if missing:
        raise StepLogCorrupt(f"{path}: holds no {missing[0]}, which the log moves; give the run's own base")
    tensors = {name: held[name] for name in names}
    if tensor_facts(tensors) != header.tensors or parameters_digest(tensors) != header.base:
        raise StepLogCorrupt(f"{path}: is not what the log began with; give the run's own base")
    return {name: torch.empty_like(tensor).copy_(tensor) for name, tensor in tensors.items()}
