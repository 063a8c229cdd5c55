"""Compute activations and losses together with their derivatives in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_INVERSE_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An elementwise activation phi and its derivative.

    Attributes:
        name: Name used in configurations.
        module: The torch module class that computes phi.
        function: phi(z), of the shape of z.
        derivative: phi'(z) from (z, h = phi(z)), of the same shape.
        multiply: Multiplies the first of (signal, z, h) by phi'(z), in place and in one pass.
        slope_bounds: (inf |phi'|, sup |phi'|) over the real line: gamma_min and gamma_max of the PDFA
            paper, section 3.1.
    """

    name: str
    module: type[nn.Module]
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor, Tensor], Tensor]
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor]
    slope_bounds: tuple[float, float]


def _gelu_derivative(z: Tensor, h: Tensor) -> Tensor:
    """d/dz [z Phi(z)] = Phi(z) + z N(z; 0, 1)."""
    return torch.special.ndtr(z) + z * torch.exp(-0.5 * z * z) * _INVERSE_SQRT_2PI


ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        Activation(
            name="tanh",
            module=nn.Tanh,
            function=torch.tanh,
            derivative=lambda z, h: torch.addcmul(h.new_ones(()), h, h, value=-1.0),
            multiply=lambda s, z, h: torch.ops.aten.tanh_backward(s, h, grad_input=s),
            slope_bounds=(0.0, 1.0),
        ),
        Activation(
            name="relu",
            module=nn.ReLU,
            function=torch.relu,
            derivative=lambda z, h: (z > 0).to(z.dtype),
            multiply=lambda s, z, h: torch.ops.aten.threshold_backward(s, h, 0, grad_input=s),
            slope_bounds=(0.0, 1.0),
        ),
        Activation(
            name="sigmoid",
            module=nn.Sigmoid,
            function=torch.sigmoid,
            derivative=lambda z, h: torch.addcmul(h, h, h, value=-1.0),
            multiply=lambda s, z, h: torch.ops.aten.sigmoid_backward(s, h, grad_input=s),
            slope_bounds=(0.0, 0.25),
        ),
        # phi'' = (2 - z^2) N(z) = 0 at z = -sqrt(2), where phi' is smallest (-0.1289), and at sqrt(2), where it is
        # largest (1.1289); phi' = 0 at z = -0.7518, so inf |phi'| = 0.
        Activation(
            name="gelu",
            module=nn.GELU,
            function=nn.functional.gelu,
            derivative=_gelu_derivative,
            multiply=lambda s, z, h: torch.ops.aten.gelu_backward(s, z, grad_input=s),
            slope_bounds=(0.0, 1.1289042),
        ),
        Activation(
            name="identity",
            module=nn.Identity,
            function=torch.positive,  # z itself
            derivative=lambda z, h: torch.ones_like(z),
            multiply=lambda s, z, h: s,
            slope_bounds=(1.0, 1.0),
        ),
    )
}
"""Every activation by name."""


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


@dataclass(frozen=True, kw_only=True)
class LossValue:
    """Losses of a batch and their derivative.

    Attributes:
        per_record: L_i of each record, shape (batch,).
        output_gradient: dL_i/dh_L, the error that feedback sends back, shape (batch, n_classes); not divided by the
            batch size.
    """

    per_record: Tensor
    output_gradient: Tensor


def cross_entropy(output: Tensor, labels: Tensor) -> LossValue:
    """-sum_k target_k log softmax(output)_k, whose derivative is softmax(output) - target.

    Args:
        output: Logits, shape (batch, n_classes).
        labels: Class numbers, int64, shape (batch,), which stand for one-hot targets; or targets, float, rows of sum 1,
            shape (batch, n_classes).
    """
    log_probabilities = torch.log_softmax(output, dim=1)
    if labels.is_floating_point():
        per_record = -(labels * log_probabilities).sum(dim=1)
        return LossValue(per_record=per_record, output_gradient=log_probabilities.exp().sub_(labels))
    index = labels.unsqueeze(1)
    gradient = log_probabilities.exp()
    gradient.scatter_add_(1, index, gradient.new_full((), -1.0).expand(index.shape))
    return LossValue(per_record=-log_probabilities.gather(1, index).squeeze(1), output_gradient=gradient)


def squared_error(output: Tensor, labels: Tensor) -> LossValue:
    """||output - target||^2 / 2, whose derivative is output - target.

    Args:
        output: Network outputs, shape (batch, n_classes).
        labels: See `cross_entropy`.
    """
    if labels.is_floating_point():
        residual = output - labels
    else:
        index = labels.unsqueeze(1)
        residual = output.clone()
        residual.scatter_add_(1, index, residual.new_full((), -1.0).expand(index.shape))
    return LossValue(per_record=0.5 * residual.square().sum(dim=1), output_gradient=residual)


LOSSES = {"cross-entropy": cross_entropy, "squared-error": squared_error}
"""Losses with their derivative, by name."""


def cross_entropy_values(output: Tensor, labels: Tensor) -> Tensor:
    """Return the losses of `cross_entropy` at class numbers, shape (batch,), without their derivative."""
    return torch.logsumexp(output, dim=1) - output.gather(1, labels.unsqueeze(1)).squeeze(1)


def squared_error_values(output: Tensor, labels: Tensor) -> Tensor:
    """Return the losses of `squared_error` at class numbers, shape (batch,): (||output||^2 - 2 output_y + 1) / 2."""
    chosen = output.gather(1, labels.unsqueeze(1)).squeeze(1)
    return 0.5 * output.square().sum(dim=1) - chosen + 0.5


LOSS_VALUES = {"cross-entropy": cross_entropy_values, "squared-error": squared_error_values}
"""Losses without their derivative, by name."""
