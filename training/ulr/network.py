"""View an nn.Sequential as layers, each of which can get noise on its output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opusim.training.networks.network import (
    FullyConnected,
    Jacobian,
    LayeredNetwork,
    jacobian_of,
    require_trainable,
)
from opusim.training.networks.record_independence import batch_statistics


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Intermediate values of a forward pass without noise.

    Attributes:
        inputs: Input of each layer, shapes (batch, ...).
        values: v_l, output of each layer, shapes (batch, ...).
        output: Output of the model, shape (batch, n_classes).
    """

    inputs: list[Tensor]
    values: list[Tensor]
    output: Tensor


class ModuleSequence(LayeredNetwork):
    """A view of an nn.Sequential: its modules with parameters are the layers.

    A module without parameters may be any map from a batch of records to a batch of records: an activation without
    derivative, a quantiser, a call to another process. A module with parameters needs only the Jacobian of its own
    output (`opusim.training.networks.network`).

    Args:
        model: The sequence. Every module processes records independently. It is put into evaluation mode (no dropout),
            so that all copies of a record pass through the same function.
        n_inputs: Number of features of a record.

    Raises:
        TypeError: The model is no nn.Sequential, or a module computes batch statistics.
        ValueError: No module has parameters, two share one, or parameters are frozen or not float32.
    """

    def __init__(self, model: nn.Module, *, n_inputs: int) -> None:
        if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
            raise TypeError(
                f"model must be an nn.Sequential of modules, got {type(model).__name__}; wrap its modules in "
                "nn.Sequential(...)"
            )
        if found := batch_statistics(model):
            raise TypeError(
                f"model: {found} mixes the records of a batch, so no record has its own estimate; use nn.GroupNorm or "
                "nn.LayerNorm"
            )
        self.model: nn.Module = model.eval()
        self._n_inputs = n_inputs
        self._head, self.jacobians, self._tails = _split(model)
        require_trainable(
            [jacobian.parameters for jacobian in self.jacobians],
            if_frozen="wrap it in a module without parameters, such as a function of a detached copy",
        )

    @property
    def n_inputs(self) -> int:
        """Number of features of a record."""
        return self._n_inputs

    @property
    def facts(self) -> dict[str, Any]:
        """See Network.facts: the layers of a fully connected network, else how each module prints itself."""
        try:
            return FullyConnected(self.model).facts
        except (TypeError, ValueError):
            return {
                "n_inputs": self.n_inputs,
                "modules": [" ".join(repr(m).split()) for m in self.model.children()],
            }

    def forward(self, x: Tensor) -> Outputs:
        """Run the model without noise.

        Args:
            x: Records, shape (batch, n_inputs).
        """
        inputs, values = [], []
        with torch.no_grad():
            h = _apply(self._head, x)
            for layer, jacobian in enumerate(self.jacobians):
                inputs.append(h)
                values.append(jacobian.module(h))
                h = self.after(layer, values[-1])
        return Outputs(inputs=inputs, values=values, output=h)

    def layer(self, layer: int, h: Tensor) -> Tensor:
        """Return the output of a layer for an input, without noise."""
        return self.jacobians[layer].module(h)

    def after(self, layer: int, value: Tensor) -> Tensor:
        """Pass a layer's output through the modules without parameters up to the next layer."""
        return _apply(self._tails[layer], value)

    def output_from(self, layer: int, value: Tensor) -> Tensor:
        """Pass a layer's output through the rest of the model."""
        rows = self.after(layer, value)
        for later in range(layer + 1, self.depth):
            rows = self.after(later, self.layer(later, rows))
        return rows


def _apply(modules: Iterable[nn.Module], h: Tensor) -> Tensor:
    for module in modules:
        h = module(h)
    return h


def _split(model: nn.Sequential) -> tuple[list[nn.Module], list[Jacobian], list[list[nn.Module]]]:
    """Return the modules before the first layer, the layers, and the modules after each layer."""
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
