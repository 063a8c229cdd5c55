"""The per-record gradients of layers, J_i^T delta_i, as uses of their parameters.

J_i = d v_i / d theta is the Jacobian of a module's output at record i with respect to its own parameters. Linear and
convolutional modules use a closed form (`opusim.training.networks.contributions`), every other module torch.func.vjp of
that module only; nothing behind the module is differentiated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from opusim.crossbar.layers import DeviceConv2d, DeviceLinear
from opusim.training.networks.base import Network
from opusim.training.networks.clipping import Clip
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.networks.contributions.uses import ConvolutionUse, LinearUse, Use


class Jacobian(ABC):
    """J_i of one module.

    Args:
        module: Processes the records of a batch independently.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = list(module.parameters())

    @abstractmethod
    def use(self, delta: Tensor, h: Tensor) -> Use:
        """Return the use of the module's parameters at which record i adds J_i^T delta_i.

        Args:
            delta: Signal at the module's output, shape (batch, ...).
            h: The module's input, shape (batch, ...).
        """

    def contributions(self, delta: Tensor, h: Tensor) -> Contributions:
        """Return what the records add to the module's parameters alone; arguments as `use` takes them."""
        return Contributions([(self.parameters, [self.use(delta, h)])], len(delta))

    def set_gradient(self, delta: Tensor, h: Tensor, divisor: float) -> None:
        """Write (1/divisor) sum_i J_i^T delta_i into the gradients of the parameters, without a clip.

        One backward pass through the module.
        """
        with torch.enable_grad():
            output = self.module(h.detach())
            gradients = torch.autograd.grad(output, self.parameters, delta, allow_unused=True)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient.div_(divisor)

    def factor_rows(self, h: Tensor) -> Tensor | None:
        """Return the rows u_ip of J_i^T J_i = I (x) sum_p u_ip u_ip^T, shape (batch, positions, inputs).

        The identity acts on the module's outputs (channels); a last entry of 1 stands for the bias.

        Returns:
            The rows, or None if the Jacobian has no such form.
        """
        return None


class LinearJacobian(Jacobian):
    """v = W h + b: J_i^T delta_i = delta_i (h_i, 1)^T is an outer product and is never formed.

    If a record has several positions, as a sequence does, the products are summed over them.
    """

    def __init__(self, module: nn.Linear | DeviceLinear) -> None:
        super().__init__(module)
        self._weight, self._bias = module.weight, module.bias

    def use(self, delta: Tensor, h: Tensor) -> LinearUse:
        """See Jacobian."""
        return LinearUse(delta, h, self._weight, self._bias)

    def set_gradient(self, delta: Tensor, h: Tensor, divisor: float) -> None:
        """See Jacobian: one matrix product, written in place, and a sum for the bias."""
        signals, weight = delta.flatten(0, -2), self._weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)  # reused: allocating costs more than writing the product
        torch.addmm(weight.grad, signals.t(), h.flatten(0, -2), beta=0, alpha=1 / divisor, out=weight.grad)
        if self._bias is not None:
            self._bias.grad = signals.sum(dim=0).div_(divisor)

    def factor_rows(self, h: Tensor) -> Tensor:
        """See Jacobian: (h_i, 1), one row per position."""
        rows = h.view(len(h), -1, h.shape[-1])
        return rows if self._bias is None else torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], dim=-1)


class ConvolutionJacobian(Jacobian):
    """v_op = w_o . u_p + b_o at every position p, where u_p is the patch of the input under the kernel.

    J_i^T delta_i = sum_p delta_ip (u_ip, 1)^T.
    """

    def __init__(self, module: nn.Conv2d) -> None:
        super().__init__(module)
        self._convolution = module
        names = ("stride", "padding", "dilation", "groups")
        self._options = {name: getattr(module, name) for name in names}

    def use(self, delta: Tensor, h: Tensor) -> ConvolutionUse:
        """See Jacobian."""
        return ConvolutionUse(delta, h, self._convolution.weight, self._convolution.bias, self._options)

    def set_gradient(self, delta: Tensor, h: Tensor, divisor: float) -> None:
        """See Jacobian: the convolution's weight gradient."""
        ones = torch.ones(len(delta), dtype=torch.float64, device=delta.device)
        use = self.use(delta, h)
        totals = use.totals(Clip(factors=ones, rounded=ones.float(), squares=ones, kept=None))
        for parameter, total in zip(use.wrt, totals, strict=True):
            parameter.grad = total.div_(divisor)

    def factor_rows(self, h: Tensor) -> Tensor | None:
        """See Jacobian: one patch per position; None for grouped convolutions, whose groups see different patches."""
        return None if self._convolution.groups > 1 else self.use(h[:, None], h).factor_rows()


class DeviceConvolutionJacobian(Jacobian):
    """A convolution on a device: that of a linear layer at the positions of its patches; the device is not read."""

    def __init__(self, module: DeviceConv2d) -> None:
        super().__init__(module)
        self._convolution, self._product = module, LinearJacobian(module.product)

    def use(self, delta: Tensor, h: Tensor) -> LinearUse:
        """See Jacobian."""
        return self._product.use(_positions(delta), self._convolution.patches(h))

    def set_gradient(self, delta: Tensor, h: Tensor, divisor: float) -> None:
        """See Jacobian."""
        self._product.set_gradient(_positions(delta), self._convolution.patches(h), divisor)

    def factor_rows(self, h: Tensor) -> Tensor:
        """See Jacobian: one patch per position."""
        return self._product.factor_rows(self._convolution.patches(h))


class FunctionalJacobian(Jacobian):
    """Any module that torch.func can differentiate with respect to its parameters, such as a residual block."""

    def use(self, delta: Tensor, h: Tensor) -> ModuleUse:
        """See Jacobian."""
        return ModuleUse(self.module, delta, h)


class ModuleUse(Use):
    """The parameters of a whole module, whose per-record gradients are formed.

    Args:
        module: Maps h to the output.
        delta: Signal at the output, shape (batch, ...).
        h: Input, shape (batch, ...).
    """

    def __init__(self, module: nn.Module, delta: Tensor, h: Tensor) -> None:
        named = dict(module.named_parameters())
        self.wrt, self.records = list(named.values()), len(delta)
        self._names = list(named)
        self._module, self._delta, self._h = module, delta, h

    @property
    def numbers(self) -> int:
        """See Use."""
        return 8 * sum(tensor.numel() for tensor in self.wrt) + self._delta[:1].numel()

    def rows(self, part: slice) -> list[Tensor]:
        """See Use: J_i^T delta_i by torch.func.vjp."""
        values = [tensor.detach() for tensor in self.wrt]

        def of_record(signal: Tensor, x: Tensor) -> tuple[Tensor, ...]:
            def output(*parameters: Tensor) -> Tensor:
                found: Tensor = torch.func.functional_call(
                    self._module, dict(zip(self._names, parameters, strict=True)), (x[None],)
                )
                return found[0]

            gradients: tuple[Tensor, ...] = torch.func.vjp(output, *values)[1](signal)
            return gradients

        return list(torch.func.vmap(of_record)(self._delta[part], self._h[part]))


class LayeredNetwork(Network):
    """A network whose layers measure and sum per-record gradients J_i^T delta_i without forming them.

    J_i is the Jacobian of layer l's output at record i with respect to the layer's own parameters. A protection that
    clips contributions and adds noise works on every such network. Layers are numbered 0 .. L-1.

    Attributes:
        jacobians: The Jacobian of each layer.
    """

    jacobians: Sequence[Jacobian]

    @property
    def depth(self) -> int:
        """Number of layers L."""
        return len(self.jacobians)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all layers, in order."""
        return [parameter for jacobian in self.jacobians for parameter in jacobian.parameters]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters by position, "layer1.weight", "layer1.bias", ..., whatever the names of the modules."""
        return {
            f"layer{number}.{name}": parameter.detach()
            for number, jacobian in enumerate(self.jacobians, start=1)
            for name, parameter in jacobian.module.named_parameters()
        }

    def layer_parameters(self, layer: int) -> list[nn.Parameter]:
        """Return the parameters of a layer, in a fixed order."""
        return self.jacobians[layer].parameters

    def contributions(self, deltas: Sequence[Tensor], inputs: Sequence[Tensor]) -> Contributions:
        """Return what the records of a batch add to the parameters of all layers.

        Args:
            deltas: Signal at each layer's output, shapes (batch, ...).
            inputs: Each layer's input as the update uses it, shapes (batch, ...).
        """
        return Contributions(
            [
                (jacobian.parameters, [jacobian.use(delta, h)])
                for jacobian, delta, h in zip(self.jacobians, deltas, inputs, strict=True)
            ],
            len(deltas[0]),
        )

    def set_gradient(self, layer: int, delta: Tensor, h: Tensor, divisor: float) -> None:
        """Write (1/divisor) sum_i J_i^T delta_i into the gradients of the layer's parameters.

        Args:
            layer: Layer number.
            delta: Signal at the layer's output, shape (batch, ...).
            h: The layer's input as the update uses it, shape (batch, ...).
            divisor: The batch size, or a constant in its place.
        """
        self.jacobians[layer].set_gradient(delta, h, divisor)


def require_trainable(layers: Sequence[Sequence[nn.Parameter]], *, if_frozen: str) -> None:
    """Refuse layers whose parameters a step cannot update independently of other layers.

    Args:
        layers: The parameters of each layer.
        if_frozen: What to do about a frozen layer.

    Raises:
        ValueError: Two layers share a parameter, or one is frozen or not float32.
    """
    seen: set[int] = set()
    for number, parameters in enumerate(layers, start=1):
        for parameter in parameters:
            if id(parameter) in seen:
                raise ValueError(
                    f"model: layer {number} shares parameters with an earlier layer; give each layer its own"
                )
            seen.add(id(parameter))
            if not parameter.requires_grad:
                raise ValueError(
                    f"model: layer {number} is frozen (requires_grad is False), but every layer is trained; {if_frozen}"
                )
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"model: layer {number} has dtype {parameter.dtype}; train in torch.float32 (model.float())"
                )


def jacobian_of(module: nn.Module) -> Jacobian:
    """Return the Jacobian of a module with parameters, in closed form if there is one."""
    if type(module) in (nn.Linear, DeviceLinear):
        return LinearJacobian(module)  # type: ignore[arg-type]
    if isinstance(module, DeviceConv2d):
        return DeviceConvolutionJacobian(module)
    if type(module) is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return ConvolutionJacobian(module)
    return FunctionalJacobian(module)


def _positions(delta: Tensor) -> Tensor:
    """Return signals of channels (batch, channels, height, width) as rows of positions (batch, positions, channels)."""
    return delta.flatten(2).transpose(1, 2)
