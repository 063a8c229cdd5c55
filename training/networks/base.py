"""Define the interface of a run's network, and check user-supplied modules."""

from __future__ import annotations

import hashlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opusim.devices.base import NoisyDevice
from opusim.processes import require_memory
from opusim.training.data import Dataset

BYTES_PER_PARAMETER = 8
"""Least memory of training: a float32 weight and its gradient."""
_LEAST_AT_ONCE = 256
"""Least `records_at_once` of any network."""


class Network(ABC):
    """A view of a module; it shares the module's parameters.

    Attributes:
        model: Maps records (batch, ...) to class scores (batch, n_classes).
    """

    model: nn.Module
    records_at_once: int = 4096
    """Records of one forward pass outside training."""

    record_shape: tuple[int, ...] | None = None
    """Shape in which the model takes a record; a vector if it is None."""

    def shaped(self, x: Tensor) -> Tensor:
        """Return records (batch, n_inputs) in the shape that the model takes."""
        return x if self.record_shape is None else x.view(len(x), *self.record_shape)

    def outputs(self, x: Tensor) -> Tensor:
        """Return the model's outputs for records (batch, n_inputs), as they are used after training."""
        outputs: Tensor = self.model(self.shaped(x))
        return outputs

    @property
    @abstractmethod
    def n_inputs(self) -> int:
        """Number of features of a record."""

    @property
    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The trained parameters by name, as a checkpoint stores them; restoring one copies into them."""

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers that a state_dict holds, such as running statistics, by name."""
        kept = self.model.state_dict().keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in kept}

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """The network in `config.json`, enough to rebuild or recognise it: JSON values, "n_inputs" among them."""


def require_room(dataset: Dataset) -> None:
    """Refuse (ValueError) outputs of a forward pass, such as scores of many classes, that need too much memory."""
    records = min(_LEAST_AT_ONCE, len(dataset.train))
    positions = dataset.n_features if dataset.target == "tokens" else 1
    require_memory(
        4 * records * positions * dataset.n_classes,
        why=f"outputs for {records} records",
        remedy="give fewer classes",
        n_classes=dataset.n_classes,
    )


@dataclass(frozen=True, kw_only=True)
class SharedRows:
    """A batch whose records share rows: a function of it or of several copies, and its map to the records' outputs."""

    function: Callable[..., Tensor]
    batch: tuple[Tensor, ...]
    outputs: Callable[[Tensor], Tensor]


class DescribedModule(nn.Module):
    """A module that can be loaded again from a description, and can invent records that it takes.

    Attributes:
        description: JSON values, stored in `config.json`; empty if the module has none.
        notes: Lines to print when a run starts; a release prints them too.
        packs: Whether a pass without a graph may put several records into one row, each apart from the others.
        alike: Whether a record's output must have the same bits in any batch, which may take longer.
    """

    description: dict[str, Any]
    notes: tuple[str, ...] = ()
    packs: bool = False
    alike: bool = False

    @abstractmethod
    def invented_records(self, n_inputs: int) -> Tensor:
        """Return records that it takes, drawn without reading any data, shape (n, n_inputs), n at least 2."""

    def in_shared_rows(self, x: Tensor) -> SharedRows | None:
        """Return records in rows that several share, each apart from the others, or None if it has no such form."""
        return None

    def whole_records(self) -> AbstractContextManager[None]:
        """Process whole batches within the block; outside it the module may skip entries that change no score."""
        return nullcontext()


def other_numbers(model: object) -> str | None:
    """Return the remedy for a module whose parameters are not float32, as records are; None if they are."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    other = [p.dtype for p in parameters if p.is_floating_point() and p.dtype != torch.float32]
    return f"the module holds {other[0]} and records are torch.float32; give model.float()" if other else None


def require_not_of_opacus(module: nn.Module, name: str = "model") -> None:
    """Refuse (ValueError) a module of Opacus or with its hooks, which compute per-record gradients in every pass."""
    if type(module).__module__.startswith("opacus.grad_sample"):
        raise ValueError(
            f"{name} is a {type(module).__name__} of Opacus, which opusim replaces; give the plain module, which "
            f"{name}.to_standard_module() returns"
        )
    if any(hasattr(parameter, "grad_sample") for parameter in module.parameters()):
        raise ValueError(
            f"{name} has hooks of Opacus; take them off by to_standard_module() of its GradSampleModule, or build it "
            "anew"
        )


def require_fresh_noise(model: nn.Module) -> None:
    """Refuse (ValueError) devices whose noise can be rebuilt from a seed; a run in release mode needs fresh noise.

    Adding or removing a record shifts the rows after it to other noise. If that noise is known, the outputs of these
    rows change too, and no per-record clip bounds the sum. Checkpoints also store the position in such noise.
    """
    for name, module in model.named_modules():
        device = getattr(module, "device", None)
        if isinstance(device, NoisyDevice) and device.mode != "release":
            raise ValueError(
                f"model: {f'layer {name!r}' if name else type(module).__name__} reads device {device.name!r} in mode = "
                f"{device.mode!r}, whose noise can be rebuilt from its seed; for a release run open the device, or "
                "convert the model, with mode='release'"
            )


def parameters_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return BLAKE2b over the bytes of the tensors, in their order."""
    state = hashlib.blake2b(digest_size=16)
    for tensor in tensors.values():
        state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def tensor_facts(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    """Return name, shape and dtype of each tensor as JSON values."""
    return [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()]


@contextmanager
def preserved_modes(module: nn.Module) -> Iterator[None]:
    """Put the training and evaluation modes of a module's parts back after the block."""
    modes = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def seeded_torch(seed: int | None, place: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch's global generators, the CPU's and the place's, in the block (None: by the system); put them back."""
    chosen = secrets.randbits(63) if seed is None else seed % 2**63
    device = torch.device(place)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(chosen)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(chosen)
        yield


def seeded_generator(seed: int | None) -> torch.Generator:
    """Return a generator of this seed, or one seeded by the system if it is None."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
