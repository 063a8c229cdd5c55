"""A model as a sequence of modules, each of which may get noise on its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from training.networks.base import LayeredNetwork
from training.networks.clipping import Clip
from training.networks.jacobians import Jacobian, LinearJacobian, jacobian_of
from training.networks.network import FullyConnected, write_linear_gradient


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a forward pass without noise leaves behind.

    Attributes:
        inputs: Input of each layer, shapes (batch, ...).
        values: v_l, output of each layer, shapes (batch, ...).
        output: Output of the model, shape (batch, n_classes).
    """

    inputs: list[Tensor]
    values: list[Tensor]
    output: Tensor


class ModuleSequence(LayeredNetwork):
    """A view on an nn.Sequential: its modules with parameters are the layers, the others stand between them.

    A module without trained parameters may be anything that maps a batch of records to a batch of records: an
    activation without derivative, a quantiser, a call to another process. Of a module with parameters only the Jacobian
    of its own output is needed (`training.networks.jacobians`).

    Args:
        model: The sequence. Every module treats records apart from each other. It is put into evaluation mode (no
            dropout, so that all copies of a record go through one function).

    Raises:
        TypeError: The model is no nn.Sequential, or a module mixes records.
        ValueError: No module has parameters, one is used twice, or parameters are not float32 or partly frozen.
    """

    def __init__(self, model: nn.Module, *, n_inputs: int) -> None:
        if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
            raise TypeError(
                f"model must be an nn.Sequential of modules, got {type(model).__name__}; wrap its modules in "
                "nn.Sequential(...)"
            )
        _check_records_apart(model)
        self.model: nn.Module = model.eval()
        self._n_inputs = n_inputs
        self._head, self.jacobians, self._tails = _split(model)
        _check_parameters(self.jacobians)

    @property
    def depth(self) -> int:
        """Number of modules with parameters."""
        return len(self.jacobians)

    @property
    def n_inputs(self) -> int:
        """Features of a record."""
        return self._n_inputs

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all layers, in order."""
        return [parameter for jacobian in self.jacobians for parameter in jacobian.parameters]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters by place, "layer1.weight", "layer1.bias", ..., whatever the modules are called."""
        return {
            f"layer{number}.{name}": parameter.detach()
            for number, jacobian in enumerate(self.jacobians, start=1)
            for name, parameter in jacobian.module.named_parameters()
        }

    @property
    def facts(self) -> dict[str, Any]:
        """See Network.facts: the layers of a fully connected network, else the modules' own descriptions."""
        try:
            return FullyConnected(self.model).facts
        except (TypeError, ValueError):
            return {
                "n_inputs": self.n_inputs,
                "modules": [" ".join(repr(m).split()) for m in self.model.children()],
            }

    def layer_parameters(self, layer: int) -> list[nn.Parameter]:
        """See LayeredNetwork."""
        return self.jacobians[layer].parameters

    def squared_norms(self, layer: int, delta: Tensor, h: Tensor) -> Tensor:
        """See LayeredNetwork."""
        return self.jacobians[layer].squared_norms(delta, h)

    def set_gradient(
        self, layer: int, delta: Tensor, h: Tensor, divisor: float, clip: Clip | None = None
    ) -> None:
        """See LayeredNetwork."""
        jacobian = self.jacobians[layer]
        if isinstance(jacobian, LinearJacobian) and delta.ndim == 2:
            write_linear_gradient(jacobian.parameters, delta, h, divisor, clip)
            return
        for parameter, total in zip(jacobian.parameters, jacobian.total(delta, h, clip), strict=True):
            parameter.grad = total.div_(divisor).float()

    def forward(self, x: Tensor) -> Outputs:
        """Run the model without noise.

        Args:
            x: Records, shape (batch, n_inputs).
        """
        inputs, values = [], []
        with torch.no_grad():
            h = _through(self._head, x)
            for layer, jacobian in enumerate(self.jacobians):
                inputs.append(h)
                values.append(jacobian.module(h))
                h = self.after(layer, values[-1])
        return Outputs(inputs=inputs, values=values, output=h)

    def layer(self, layer: int, h: Tensor) -> Tensor:
        """Output of a layer, without noise."""
        return self.jacobians[layer].module(h)

    def after(self, layer: int, value: Tensor) -> Tensor:
        """What the modules without parameters behind a layer make of its output."""
        return _through(self._tails[layer], value)


def _through(modules: list[nn.Module], h: Tensor) -> Tensor:
    for module in modules:
        h = module(h)
    return h


def _split(model: nn.Sequential) -> tuple[list[nn.Module], list[Jacobian], list[list[nn.Module]]]:
    """What stands before the first layer, the layers, and what stands behind each of them."""
    head: list[nn.Module] = []
    jacobians: list[Jacobian] = []
    tails: list[list[nn.Module]] = []
    for module in model:
        if any(True for _ in module.parameters()):
            jacobians.append(jacobian_of(module))
            tails.append([])
        else:
            (tails[-1] if tails else head).append(module)
    if not jacobians:
        raise ValueError("model holds no module with parameters; there is nothing to train")
    return head, jacobians, tails


def _check_records_apart(model: nn.Module) -> None:
    """Refuse batch statistics, with parameters or without: one record would move the others' contributions."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise TypeError(
                f"model: {type(module).__name__} mixes the records of a batch, so a record has no estimate of its "
                "own; use nn.GroupNorm or nn.LayerNorm"
            )


def _check_parameters(jacobians: list[Jacobian]) -> None:
    """Refuse layers whose parameters a step could not update on their own."""
    seen: set[int] = set()
    for number, jacobian in enumerate(jacobians, start=1):
        for parameter in jacobian.parameters:
            if id(parameter) in seen:
                raise ValueError(
                    f"model: layer {number} shares parameters with an earlier one; give it its own"
                )
            seen.add(id(parameter))
            if not parameter.requires_grad:
                raise ValueError(
                    f"model: layer {number} is frozen (requires_grad is False); wrap it in a module without "
                    "parameters of its own, such as a function of a detached copy"
                )
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"model: layer {number} has dtype {parameter.dtype}; train in torch.float32 (model.float())"
                )
