"""What a run asks of the network that it trains."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from training.data import Dataset
from training.networks.clipping import Clip


class Network(ABC):
    """A view on a module, whose parameters are the module's own.

    Attributes:
        model: Takes records (batch, ...), gives class scores (batch, n_classes).
    """

    model: nn.Module

    @property
    @abstractmethod
    def n_inputs(self) -> int:
        """Features of a record."""

    @property
    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The trained parameters by name, as a checkpoint holds them; it is restored by copying into them."""

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What `config.json` says of the network, enough to rebuild it: JSON values, "n_inputs" among them."""


class LayeredNetwork(Network):
    """Layers whose per-record gradients J_i^T delta_i need not be formed to be measured and summed.

    J_i is the Jacobian of layer l's output at record i with respect to the layer's own parameters. A protection that
    clips and noises contributions works on any such network.
    """

    @property
    @abstractmethod
    def depth(self) -> int:
        """Number of layers L, from 0 in every other member."""

    @abstractmethod
    def layer_parameters(self, layer: int) -> list[nn.Parameter]:
        """The parameters of a layer, in a fixed order."""

    @abstractmethod
    def squared_norms(self, layer: int, delta: Tensor, h: Tensor) -> Tensor:
        """||J_i^T delta_i||^2 of each record as `set_gradient` computes it, or a bound on it; float64, shape (batch,).

        Finite for every finite record whose contribution float32 can hold, NaN or infinite for others.

        Args:
            layer: Layer number, 0 .. L-1.
            delta: Signal at the layer's output, shape (batch, ...).
            h: The layer's input, shape (batch, ...).
        """

    @abstractmethod
    def set_gradient(
        self, layer: int, delta: Tensor, h: Tensor, divisor: float, clip: Clip | None = None
    ) -> None:
        """Write (1/divisor) sum_i f_i J_i^T delta_i into the gradients of the layer's parameters.

        Args:
            layer: Layer number, 0 .. L-1.
            delta: As for `squared_norms`.
            h: What the update takes for the layer's input, shape (batch, ...).
            divisor: The batch size, or the constant that stands for it.
            clip: The factors f_i, and norms that no contribution may exceed; None for factors of 1.
        """


def require_class_scores(model: Callable[[Tensor], object], records: Tensor, n_classes: int) -> None:
    """Refuse a person's own model that gives no class scores, after a look at what it makes of some records.

    Args:
        model: What is looked at.
        records: Shape (batch, n_inputs), where the model's parameters are.
        n_classes: Of the data.

    Raises:
        ValueError: It cannot take such records, or gives something else than (batch, n_classes).
    """
    try:
        with torch.no_grad():
            output = model(records)
    except RuntimeError as error:  # torch's word for shapes that do not fit
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"model cannot take records of {records.shape[1]} features ({reason}); change its first module, or the data"
        ) from error
    found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if found != (len(records), n_classes):
        raise ValueError(
            f"model gives {found} for {len(records)} records of {n_classes} classes; it must give class scores of "
            "shape (batch, n_classes)"
        )


def parameters_digest(tensors: Mapping[str, Tensor]) -> str:
    """BLAKE2b over the bytes of the tensors, in their order."""
    state = hashlib.blake2b(digest_size=16)
    for tensor in tensors.values():
        state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def tensor_facts(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    """Name, shape and type of each tensor, as a header holds them."""
    return [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()]


class DescribedModule(nn.Module):
    """A module that says how to load it again.

    Attributes:
        description: JSON values, as `config.json` keeps them; empty if the module cannot be loaded by its description.
    """

    description: dict[str, Any]


class ModuleNetwork(Network):
    """A person's own module; its parameters that require a gradient are trained, the others stay.

    Args:
        model: Takes records (batch, n_inputs), gives class scores (batch, n_classes). It is put into evaluation mode.
        n_inputs: Features of a record.

    Raises:
        ValueError: No parameter requires a gradient.
    """

    def __init__(self, model: nn.Module, n_inputs: int) -> None:
        self.model = model.eval()
        self._n_inputs = n_inputs
        if not self.tensors:
            raise ValueError(
                "model has no parameter that requires a gradient; those that do are trained: "
                "call requires_grad_(True) on them"
            )

    @property
    def n_inputs(self) -> int:
        """Features of a record."""
        return self._n_inputs

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The trained parameters under the module's own names; one that is shared stands once."""
        return {
            name: parameter.detach()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    @property
    def facts(self) -> dict[str, Any]:
        """Its width, class, trained parameters and a digest of the others: to know it again, not to rebuild it."""
        facts = {
            "n_inputs": self._n_inputs,
            "module": type(self.model).__name__,
            "tensors": tensor_facts(self.tensors),
        }
        frozen: dict[str, Tensor] = {n: p for n, p in self.model.named_parameters() if not p.requires_grad}
        frozen |= dict(self.model.named_buffers())
        facts |= {"frozen": parameters_digest(frozen)} if frozen else {}
        described = isinstance(self.model, DescribedModule) and self.model.description
        return facts | ({"language": self.model.description} if described else {})


def build_module_network(model: nn.Module, dataset: Dataset) -> ModuleNetwork:
    """A person's own module, after a look at what it makes of two records.

    Raises:
        TypeError, ValueError: It gives no class scores for the data's classes, or has nothing to train.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    network = ModuleNetwork(model, dataset.n_features)
    place = next(iter(network.tensors.values())).device
    require_class_scores(model, dataset.train.x[:2].to(place), dataset.n_classes)
    return network
