"""Checkpoints: one safetensors file each, replaced at once, with its facts as JSON in the header.

Nothing in a checkpoint executes when it is read. The header (`opusim.training.runs.storage`) holds the schema version,
the step, the engine's running sums, a digest of the tensors, a seal of the run's other files, and a digest of all
these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from opusim.accounting.journal import Witness, head_file, read_positioned
from opusim.accounting.ledger import read_ledger
from opusim.crossbar.layers import DeviceLinear
from opusim.errors import ConfigError
from opusim.files import require_regular, write_file
from opusim.training.errors import RunFolderError
from opusim.training.networks.optimizers import TailAverage, load_optimizer_tensors, optimizer_tensors
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import REMEDY, Header, Seal, checkpoint_path, list_checkpoints, read_header


class Trained(Protocol):
    """The parts of a trainer that a checkpoint keeps (`opusim.training.engine.algorithm.Trainer`)."""

    optimizer: torch.optim.Optimizer

    @property
    def model(self) -> nn.Module:
        """The trained module."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters by name."""

    @property
    def state(self) -> dict[str, Tensor]:
        """Everything else that a resumed run needs, by name."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint's facts, and its "model.*", "optimizer.*", "state.*", "average.*" and "device.*" tensors."""

    header: Header
    tensors: dict[str, Tensor]

    @property
    def step(self) -> int:
        """Steps done."""
        return self.header.step

    @property
    def progress(self) -> Mapping[str, Any]:
        """The engine's running sums and the usage of the device, as JSON."""
        return self.header.progress

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names start with a prefix, under their names without it."""
        return {name[len(prefix) :]: t for name, t in self.tensors.items() if name.startswith(prefix)}


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    trainer: Trained,
    average: TailAverage,
    progress: Mapping[str, Any],
    seal: Seal,
    keep: int,
) -> Header:
    """Write a checkpoint and remove all but the newest `keep`; return its facts.

    It has the trainer's parameters and state, those of its optimizer and of devices, the average and the progress, and
    seals the other files of the run. On an OSError earlier checkpoints are untouched.
    """
    tensors = {f"model.{name}": tensor for name, tensor in trainer.tensors.items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer_tensors(trainer.optimizer).items()}
    tensors |= {f"state.{name}": tensor for name, tensor in trainer.state.items()}
    tensors |= {f"average.{name}": tensor for name, tensor in average.state.items()}
    for name, held in held_by_devices(trainer.model).items():
        tensors |= {f"device.{name}.{key}": tensor for key, tensor in held.items()}
    tensors = _on_cpu(tensors)
    header = Header(step=step, progress=progress, tensors=_digest(tensors), seal=seal)
    write_file(checkpoint_path(folder, step), save(tensors, metadata=header.to_metadata()))
    for old in list_checkpoints(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return header


def reseal_checkpoint(path: Path, seal: Seal) -> Header:
    """Rewrite a checkpoint with another seal; everything else in it stays, and all of it on an error."""
    checkpoint = read_checkpoint(path)
    header = replace(checkpoint.header, seal=seal)
    write_file(path, save(checkpoint.tensors, metadata=header.to_metadata()))
    return header


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check its digests; raise RunFolderError if it is missing, cut, damaged or another."""
    header = read_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise RunFolderError(f"{path} is not a readable checkpoint ({error}); {REMEDY}") from error
    if header.tensors != _digest(tensors):
        raise RunFolderError(f"{path} is damaged (its tensors do not match their digest); {REMEDY}")
    return Checkpoint(header=header, tensors=tensors)


def require_checkpoints(folder: RunFolder) -> None:
    """Check every checkpoint's tensors (RunFolderError), and its ledger against the run's (LedgerCorrupt)."""
    witnesses = [
        Witness(name=f"checkpoint {path.stem}", position=read_checkpoint(path).header.seal.ledger)
        for path in list_checkpoints(folder.checkpoints)
    ]
    read_ledger(folder.ledger_file, witnesses=witnesses)


def copy_parameters(
    checkpoint: Checkpoint, wanted: Mapping[str, Tensor], path: Path, *, prefix: str = "model."
) -> None:
    """Copy a checkpoint's parameters, of names with a prefix, over those of a network.

    Raises RunFolderError if it is of another network; the message names the path and the first difference.
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


def restore(trainer: Trained, average: TailAverage, checkpoint: Checkpoint, path: Path) -> None:
    """Restore a trainer, its optimizer, the running average and the state of devices from a checkpoint.

    Raises RunFolderError if it is of another network, or of other devices.
    """
    copy_parameters(checkpoint, trainer.tensors, path)
    copy_parameters(checkpoint, trainer.state, path, prefix="state.")
    load_optimizer_tensors(trainer.optimizer, checkpoint.named("optimizer."))
    place = next(iter(trainer.tensors.values())).device
    average.load(checkpoint.named("average."), place)
    layers = layers_on_devices(trainer.model)
    ending = ".identity"  # every layer on a device has this
    saved = [key.removesuffix(ending) for key in checkpoint.named("device.") if key.endswith(ending)]
    if digital := sorted(set(saved) - layers.keys()):
        raise RunFolderError(
            f"{path}: layer {digital[0]!r} ran on a device, and is digital in the model that is given; convert the "
            "model with the same device and seed (opusim.convert)"
        )
    hold_on_devices(trainer.model, {name: checkpoint.named(f"device.{name}.") for name in layers})


def layers_on_devices(model: nn.Module) -> dict[str, DeviceLinear]:
    """Return the layers of a model whose products run on devices, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, DeviceLinear)}


def held_by_devices(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the state of the devices under a model's layers, by the layers' names (`DeviceLinear.get_extra_state`)."""
    return {name: layer.get_extra_state() for name, layer in layers_on_devices(model).items()}


def hold_on_devices(model: nn.Module, states: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Restore the state of devices; a layer whose state is empty, as in older checkpoints, keeps its own.

    Raises RunFolderError if a state is another chip's.
    """
    for name, layer in layers_on_devices(model).items():
        try:
            if states.get(name):
                layer.set_extra_state(states[name])
        except ConfigError as error:
            raise RunFolderError(f"layer {name!r} cannot resume: {error}") from error


def adopt_ledger(folder: RunFolder, source: Path) -> None:
    """Replace the ledger of a finished run, and update its checkpoints and its summary accordingly.

    A search uses this: its ledger pays for the choice among several runs, which each run's own ledger does not. The
    source and the head next to it are copied. Raises LedgerCorrupt if it was changed, cut or reordered, and
    RunFolderError if the run is not finished or damaged.
    """
    (_, position), summary = read_positioned(source), folder.read_summary()
    if summary is None:
        raise RunFolderError(
            f"run folder {folder.path} holds no finished run; finish it with: {folder.resume_command}"
        )
    write_file(folder.ledger_file, source.read_bytes())
    write_file(head_file(folder.ledger_file), head_file(source).read_bytes())
    for path in list_checkpoints(folder.checkpoints):
        reseal_checkpoint(path, replace(read_header(path).seal, ledger=position))
    folder.finish(summary, position)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace a file with tensors of any torch type (safetensors), with a schema version."""
    write_file(path, save(_on_cpu(tensors), metadata={"schema_version": "1"}))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of any safetensors file; raise ValueError, which names it, if it is something else."""
    try:
        require_regular(path)
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not readable as safetensors ({error}); give another file") from error


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the BLAKE2b digest of names, types, shapes and bytes, in the order of names."""
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
    return state.hexdigest()
