"""Checkpoints: one safetensors file each, replaced at once, with its facts as JSON in the header.

Nothing in a checkpoint executes when it is read. The header holds schema version, step, the engine's
running sums and a digest of the tensors, so a damaged or cut file is noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from opusim.files import parse_json, require_regular
from training.averaging import TailAverage
from training.errors import RunFolderError
from training.optimizers import load_optimizer_tensors, optimizer_tensors
from training.runs.storage import write_file
from training.trainer import Trainer

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
        step: Steps done.
        tensors: "model.*", "optimizer.*", "state.*" and "average.*" tensors.
        progress: The engine's running sums and the usage of the device, as JSON.
    """

    step: int
    tensors: dict[str, Tensor]
    progress: dict[str, Any]

    def named(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with a prefix, without it."""
        return {name[len(prefix) :]: t for name, t in self.tensors.items() if name.startswith(prefix)}


def checkpoint_path(folder: Path, step: int) -> Path:
    """Name of the checkpoint of a step; names sort by step."""
    return folder / f"step-{step:010d}.safetensors"


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    trainer: Trainer,
    average: TailAverage,
    progress: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write a checkpoint and remove all but the newest `keep`.

    Raises:
        OSError: The disk is full or not writable; earlier checkpoints are untouched.
    """
    tensors = {f"model.{name}": tensor for name, tensor in trainer.tensors.items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer_tensors(trainer.optimizer).items()}
    tensors |= {f"state.{name}": tensor for name, tensor in trainer.state.items()}
    tensors |= {f"average.{name}": tensor for name, tensor in average.state.items()}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    facts = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "progress": dict(progress),
        "digest": _digest(tensors),
    }
    path = checkpoint_path(folder, step)
    write_file(path, save(tensors, metadata={"opusim": json.dumps(facts, allow_nan=False)}))
    for old in list_checkpoints(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-*.safetensors"))


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check its digest.

    Raises:
        RunFolderError: The file is missing, cut, damaged or of another schema.
    """
    try:
        require_regular(path)  # safetensors would wait for a named pipe
        with safe_open(path, framework="pt") as file:
            facts = parse_json((file.metadata() or {})["opusim"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise RunFolderError(f"{path} is not a readable checkpoint ({error}); {_REMEDY}") from error
    if facts.get("schema_version") != SCHEMA_VERSION:
        raise RunFolderError(
            f"{path}: schema_version {facts.get('schema_version')} is not {SCHEMA_VERSION}; "
            "read it with the opusim that wrote it"
        )
    if facts["digest"] != _digest(tensors):
        raise RunFolderError(f"{path} is damaged (its tensors do not match their digest); {_REMEDY}")
    return Checkpoint(step=facts["step"], tensors=tensors, progress=facts["progress"])


def copy_parameters(
    checkpoint: Checkpoint, wanted: Mapping[str, Tensor], path: Path, *, prefix: str = "model."
) -> None:
    """Copy a checkpoint's parameters into those of a network.

    Args:
        checkpoint: What was read.
        wanted: The network's parameters by name; they are overwritten.
        path: The file, for the message.
        prefix: Of the parameters' names in the checkpoint.

    Raises:
        RunFolderError: The checkpoint is of another network; the message names the first difference.
    """
    found = checkpoint.named(prefix)
    for name in sorted(wanted.keys() | found.keys()):
        shapes = [list(t[name].shape) if name in t else None for t in (wanted, found)]
        if shapes[0] != shapes[1]:
            raise RunFolderError(
                f"{path} is a checkpoint of another network: {name} has shape {shapes[1]} there and "
                f"{shapes[0]} here; load it into the network it was written from"
            )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(found[name])


def restore(trainer: Trainer, average: TailAverage, checkpoint: Checkpoint, path: Path) -> None:
    """Give a trainer the parameters, the optimizer's state and its own of a checkpoint, and the average its means."""
    copy_parameters(checkpoint, trainer.tensors, path)
    copy_parameters(checkpoint, trainer.state, path, prefix="state.")
    load_optimizer_tensors(trainer.optimizer, checkpoint.named("optimizer."))
    place = next(iter(trainer.tensors.values())).device
    average.load(checkpoint.named("average."), place)


_REMEDY = "delete it to go on from the checkpoint before it"


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """BLAKE2b over names, types, shapes and bytes, in the order of names."""
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
    return state.hexdigest()
