"""Activation functions with the derivatives that a closed-form layer gradient needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_INVERSE_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An elementwise activation phi together with its derivative.

    Attributes:
        name: Name used in configurations.
        module: The torch module class that computes phi.
        derivative: phi'(z) from the pair (z, h = phi(z)); both of shape (batch, width), as is the result.
        multiply: Multiplies its first argument by phi'(z), in place, from (signal, z, h), in one pass.
        slope_bounds: (inf |phi'|, sup |phi'|) over the real line: gamma_min and gamma_max of the PDFA
            paper, section 3.1.
    """

    name: str
    module: type[nn.Module]
    derivative: Callable[[Tensor, Tensor], Tensor]
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor]
    slope_bounds: tuple[float, float]

    def __call__(self, z: Tensor) -> Tensor:
        """Return phi(z), of the shape of z."""
        return _FORWARD[self.name](z)


def _gelu_derivative(z: Tensor, h: Tensor) -> Tensor:
    """d/dz [z Phi(z)] = Phi(z) + z N(z; 0, 1)."""
    return torch.special.ndtr(z) + z * torch.exp(-0.5 * z * z) * _INVERSE_SQRT_2PI


_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "gelu": nn.functional.gelu,
    "identity": lambda z: z,
}

ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        Activation(
            name="tanh",
            module=nn.Tanh,
            derivative=lambda z, h: torch.addcmul(h.new_ones(()), h, h, value=-1.0),
            multiply=lambda s, z, h: torch.ops.aten.tanh_backward(s, h, grad_input=s),
            slope_bounds=(0.0, 1.0),
        ),
        Activation(
            name="relu",
            module=nn.ReLU,
            derivative=lambda z, h: (z > 0).to(z.dtype),
            multiply=lambda s, z, h: torch.ops.aten.threshold_backward(s, h, 0, grad_input=s),
            slope_bounds=(0.0, 1.0),
        ),
        Activation(
            name="sigmoid",
            module=nn.Sigmoid,
            derivative=lambda z, h: torch.addcmul(h, h, h, value=-1.0),
            multiply=lambda s, z, h: torch.ops.aten.sigmoid_backward(s, h, grad_input=s),
            slope_bounds=(0.0, 0.25),
        ),
        # The derivative of GELU is smallest where phi'' = (2 - z^2) N(z) = 0, at z = -sqrt(2): -0.1289,
        # crosses 0 at z = -0.7518 and is largest at z = sqrt(2): 1.1289.
        Activation(
            name="gelu",
            module=nn.GELU,
            derivative=_gelu_derivative,
            multiply=lambda s, z, h: torch.ops.aten.gelu_backward(s, z, grad_input=s),
            slope_bounds=(0.0, 1.1289042),
        ),
        Activation(
            name="identity",
            module=nn.Identity,
            derivative=lambda z, h: torch.ones_like(z),
            multiply=lambda s, z, h: s,
            slope_bounds=(1.0, 1.0),
        ),
    )
}


def activation_of(module: nn.Module) -> Activation:
    """Return the activation that a torch module computes.

    Raises:
        TypeError: The module is none of Tanh, ReLU, Sigmoid, GELU (exact form) and Identity.
    """
    for activation in ACTIVATIONS.values():
        if type(module) is activation.module:
            if isinstance(module, nn.GELU) and module.approximate != "none":
                raise TypeError(
                    f"model: GELU(approximate={module.approximate!r}) has no closed-form derivative here; "
                    "use nn.GELU() in its exact form"
                )
            return activation
    supported = ", ".join(activation.module.__name__ for activation in ACTIVATIONS.values())
    raise TypeError(
        f"model: no closed-form layer gradient for {type(module).__name__}; "
        f"build the network from nn.Linear and the activations {supported}"
    )
