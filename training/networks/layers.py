"""Measure and sum the per-record gradients of layers: J_i^T delta_i, without forming them if there is a closed form.

J_i = d v_i / d theta is the Jacobian of a module's output at record i with respect to its own parameters. Linear and
convolutional modules use a closed form, every other module torch.func.vjp of that module only; nothing behind the
module is differentiated.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from opusim.crossbar.layers import DeviceConv2d, DeviceLinear
from training.networks.base import Network
from training.networks.clipping import (
    Clip,
    cancels,
    finite_rows,
    norm_bounds,
    product_slack,
    row_norms,
    safe_in_float32,
    scaled_rows,
)

_NUMBERS_LIMIT = 2**24
"""Numbers of per-record gradients or unfolded inputs in memory at once, counted in float32."""


class Jacobian(ABC):
    """J_i of one module.

    Args:
        module: Processes the records of a batch independently.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = list(module.parameters())

    @abstractmethod
    def squared_norms(self, delta: Tensor, h: Tensor) -> Tensor:
        """Return ||J_i^T delta_i||^2 of each record as `total` forms it, or a bound on it, float64, shape (batch,).

        Args:
            delta: Signal at the module's output, shape (batch, ...).
            h: The module's input, shape (batch, ...).
        """

    @abstractmethod
    def total(self, delta: Tensor, h: Tensor, clip: Clip | None = None) -> list[Tensor]:
        """Return sum_i f_i J_i^T delta_i, one tensor per parameter, float32 or float64.

        Args:
            delta: See `squared_norms`.
            h: See `squared_norms`.
            clip: The factors f_i, and norms that no contribution may exceed; None for factors of 1.
        """

    def set_gradient(self, delta: Tensor, h: Tensor, divisor: float, clip: Clip | None) -> None:
        """Write (1/divisor) sum_i f_i J_i^T delta_i into the gradients of the parameters."""
        for parameter, total in zip(self.parameters, self.total(delta, h, clip), strict=True):
            parameter.grad = total.div_(divisor).float()

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
        self._bias = module.bias is not None

    def squared_norms(self, delta: Tensor, h: Tensor) -> Tensor:
        """See Jacobian: ||delta_i||^2 (||h_i||^2 + 1) for one position per record."""
        if delta.ndim == 2:
            return outer_squared_norms(delta, h, bias=self._bias)
        signals, rows = delta.flatten(1, -2), self.factor_rows(h)
        return outer_sum_bounds(signals.mT, rows.mT).square()

    def total(self, delta: Tensor, h: Tensor, clip: Clip | None = None) -> list[Tensor]:
        """See Jacobian: one matrix product, and a sum for the bias."""
        return _totals(delta, h, clip, self._products, ones=math.prod(delta.shape[1:-1]) * self._bias)

    def set_gradient(self, delta: Tensor, h: Tensor, divisor: float, clip: Clip | None) -> None:
        """See Jacobian; one position per record is written in place."""
        if delta.ndim == 2:
            write_linear_gradient(self.parameters, delta, h, divisor, clip)
        else:
            super().set_gradient(delta, h, divisor, clip)

    def factor_rows(self, h: Tensor) -> Tensor:
        """See Jacobian: (h_i, 1), one row per position."""
        return _with_ones(h.view(len(h), -1, h.shape[-1]), self._bias)

    def _products(self, delta: Tensor, h: Tensor) -> list[Tensor]:
        signals = delta.flatten(0, -2)
        weight = signals.t() @ h.flatten(0, -2)
        return [weight, signals.sum(dim=0)] if self._bias else [weight]


class ConvolutionJacobian(Jacobian):
    """v_op = w_o . u_p + b_o at every position p, where u_p is the patch of the input under the kernel.

    J_i^T delta_i = sum_p delta_ip (u_ip, 1)^T. Its norm comes from the Gram matrices of patches and signals,
    sum_pq (u_p . u_q) (delta_p . delta_q), or from the gradient itself, whichever takes fewer products. It is raised by
    the largest possible error of the float32 sum over positions.
    """

    def __init__(self, module: nn.Conv2d) -> None:
        super().__init__(module)
        self._convolution = module

    def squared_norms(self, delta: Tensor, h: Tensor) -> Tensor:
        """See Jacobian; computed for as many records at once as memory allows."""
        patch = self._convolution.weight[0].numel() * self._convolution.groups
        positions = delta.shape[2] * delta.shape[3]
        records = max(1, _NUMBERS_LIMIT // (2 * patch * positions))  # patches are held in float64
        parts = [self._part(d, x) for d, x in zip(delta.split(records), h.split(records), strict=True)]
        return torch.cat(parts)

    def total(self, delta: Tensor, h: Tensor, clip: Clip | None = None) -> list[Tensor]:
        """See Jacobian: the convolution's weight gradient, with the signals as gradient of its output."""
        module = self._convolution
        ones = math.prod(delta.shape[2:]) * module.groups * (module.bias is not None)
        return _totals(delta, h, clip, self._products, ones=ones, copies=module.weight[0, 0].numel())

    def factor_rows(self, h: Tensor) -> Tensor | None:
        """See Jacobian: one patch per position; None for grouped convolutions, whose groups see different patches."""
        if self._convolution.groups > 1:
            return None
        return _with_ones(self._patches(h).transpose(1, 2), self._convolution.bias is not None)

    def _products(self, delta: Tensor, h: Tensor) -> list[Tensor]:
        module = self._convolution
        weight = conv2d_weight(
            h,
            module.weight.shape,
            delta,
            stride=module.stride,
            padding=_as_pair(module.padding),
            dilation=module.dilation,
            groups=module.groups,
        )
        return [weight] if module.bias is None else [weight, delta.sum(dim=(0, 2, 3))]

    def _part(self, delta: Tensor, h: Tensor) -> Tensor:
        """Return squared norms of some records, each group's bias together with its weights."""
        groups = self._convolution.groups
        patches = self._patches(h).unflatten(1, (groups, -1))  # (batch, groups, patch, positions)
        if self._convolution.bias is not None:
            patches = torch.cat([patches, torch.ones_like(patches[:, :, :1])], dim=2)
        signals = delta.flatten(2).unflatten(1, (groups, -1))  # (batch, groups, channels, positions)
        return outer_sum_bounds(signals, patches).square().sum(dim=1)

    def _patches(self, h: Tensor) -> Tensor:
        """Shape (batch, channels x kernel, positions)."""
        module = self._convolution
        return nn.functional.unfold(
            h,
            _as_pair(module.kernel_size),
            _as_pair(module.dilation),
            _as_pair(module.padding),
            _as_pair(module.stride),
        )


class DeviceConvolutionJacobian(Jacobian):
    """A convolution on a device: that of a linear layer at the positions of its patches; the device is not read."""

    def __init__(self, module: DeviceConv2d) -> None:
        super().__init__(module)
        self._convolution, self._product = module, LinearJacobian(module.product)

    def squared_norms(self, delta: Tensor, h: Tensor) -> Tensor:
        """See Jacobian."""
        return self._product.squared_norms(_positions(delta), self._convolution.patches(h))

    def total(self, delta: Tensor, h: Tensor, clip: Clip | None = None) -> list[Tensor]:
        """See Jacobian."""
        return self._product.total(_positions(delta), self._convolution.patches(h), clip)

    def factor_rows(self, h: Tensor) -> Tensor:
        """See Jacobian: one patch per position."""
        return self._product.factor_rows(self._convolution.patches(h))


class FunctionalJacobian(Jacobian):
    """Any module that torch.func can differentiate with respect to its parameters, such as a residual block."""

    def squared_norms(self, delta: Tensor, h: Tensor) -> Tensor:
        """See Jacobian; the per-record gradients are formed for a few records at once."""
        squares = [row_norms(rows).square() for rows in self._record_gradients(delta, h)]
        return torch.cat(squares) if squares else delta.new_zeros(0, dtype=torch.float64)

    def total(self, delta: Tensor, h: Tensor, clip: Clip | None = None) -> list[Tensor]:
        """See Jacobian: one backward pass through the module, or with a clip the sum of scaled per-record gradients.

        Sums inside the module may cancel, so nothing bounds the rounding of a backward pass over scaled signals.
        """
        if clip is not None:
            return self._clipped_total(delta, h, clip)
        with torch.enable_grad():
            output = self.module(h.detach())
            gradients = torch.autograd.grad(output, self.parameters, delta, allow_unused=True)
        return [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self.parameters, gradients, strict=True)
        ]

    def _clipped_total(self, delta: Tensor, h: Tensor, clip: Clip) -> list[Tensor]:
        """Sum clipped gradients; each is measured again, so that another rounding cannot exceed its norm."""
        sizes = [parameter.numel() for parameter in self.parameters]
        total, start = torch.zeros(sum(sizes), dtype=torch.float64, device=delta.device), 0
        for rows in self._record_gradients(delta, h):
            part = slice(start, start + len(rows))
            norms, realised = clip.norms[part], row_norms(rows)
            factors = torch.where(realised > norms, norms / realised, 1.0) * clip.factors[part]
            used = torch.isfinite(realised) & (factors > 0)
            scaled = scaled_rows(finite_rows(rows, used), torch.where(used, factors, 0.0))
            total += scaled.rows.sum(dim=0, dtype=torch.float64) + scaled.exact.sum(dim=0)
            start = part.stop
        pieces = total.split(sizes)
        return [piece.view_as(parameter) for piece, parameter in zip(pieces, self.parameters, strict=True)]

    def _record_gradients(self, delta: Tensor, h: Tensor) -> Iterator[Tensor]:
        """Yield J_i^T delta_i as rows, some records at a time, shapes (some, parameters)."""
        named = {name: parameter.detach() for name, parameter in self.module.named_parameters()}

        def of_record(signal: Tensor, x: Tensor) -> Tensor:
            def output(values: dict[str, Tensor]) -> Tensor:
                return torch.func.functional_call(self.module, values, (x[None],))[0]

            pull = torch.func.vjp(output, named)[1]
            return torch.cat([gradient.flatten() for gradient in pull(signal)[0].values()])

        size = sum(parameter.numel() for parameter in self.parameters)
        records = max(1, _NUMBERS_LIMIT // (8 * size + delta[:1].numel()))
        parts = zip(delta.split(records), h.split(records), strict=True)
        return (torch.func.vmap(of_record)(d, x) for d, x in parts if len(d))


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

    def squared_norms(self, layer: int, delta: Tensor, h: Tensor) -> Tensor:
        """Return ||J_i^T delta_i||^2 of each record, or a bound on it, float64, shape (batch,).

        It bounds the contributions that `set_gradient` computes, with their rounding. Finite for every finite record
        whose contribution float32 can hold, NaN or infinite for others.

        Args:
            layer: Layer number.
            delta: Signal at the layer's output, shape (batch, ...).
            h: The layer's input, shape (batch, ...).
        """
        return self.jacobians[layer].squared_norms(delta, h)

    def set_gradient(
        self, layer: int, delta: Tensor, h: Tensor, divisor: float, clip: Clip | None = None
    ) -> None:
        """Write (1/divisor) sum_i f_i J_i^T delta_i into the gradients of the layer's parameters.

        Args:
            layer: Layer number.
            delta: Signal at the layer's output, shape (batch, ...).
            h: The layer's input as the update uses it, shape (batch, ...).
            divisor: The batch size, or a constant in its place.
            clip: The factors f_i, and norms that no contribution may exceed; None for factors of 1.
        """
        self.jacobians[layer].set_gradient(delta, h, divisor, clip)


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


def write_linear_gradient(
    parameters: Sequence[nn.Parameter], delta: Tensor, h: Tensor, divisor: float, clip: Clip | None = None
) -> None:
    """Write (1/divisor) sum_i f_i delta_i (h_i, 1)^T into the gradients of a weight and, if there is one, its bias.

    Args:
        parameters: The weight, then the bias.
        delta: Shape (batch, n_l).
        h: Shape (batch, n_(l-1)).
        divisor: The batch size, or a constant in its place.
        clip: The factors f_i; None for factors of 1.
    """
    scaled = None if clip is None else scaled_rows(delta, clip.factors)
    rows, weight = delta if scaled is None else scaled.rows, parameters[0]
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)  # reused: allocating costs more than writing the product
    torch.addmm(weight.grad, rows.t(), h, beta=0, alpha=1 / divisor, out=weight.grad)
    for bias in parameters[1:]:
        bias.grad = rows.sum(dim=0).div_(divisor)
    if scaled is not None and len(scaled.apart):
        exact = scaled.exact / divisor
        totals = exact.t() @ h[scaled.apart].double(), exact.sum(dim=0)
        for parameter, total in zip(parameters, totals, strict=False):
            if parameter.grad is not None:
                parameter.grad.add_(total.float())


def outer_squared_norms(delta: Tensor, h: Tensor, *, bias: bool) -> Tensor:
    """Return a bound on ||delta_i (h_i, 1)^T||^2, at most 4e-4 above it, float64, shape (batch,).

    Args:
        delta: Shape (batch, n_l).
        h: Shape (batch, n_(l-1)).
        bias: Whether the layer has a bias, for which the 1 stands.
    """
    return norm_bounds(delta).square_() * norm_bounds(h).square_().add_(float(bias))


def outer_sum_bounds(signals: Tensor, patches: Tensor) -> Tensor:
    """Return a bound on ||sum_p s_p u_p^T|| for any order of a float32 sum, float64, shape (...,).

    The bound adds the norm, by the cheaper of Gram matrices and the product itself, and |s| |u| times the relative
    error of a float32 sum over the positions. The second term matters if the sum cancels, as for signals of mean zero
    on equal patches. Gram matrices are computed in float64, since they lose half of the digits, and so is each product
    that float32 might not hold.

    Args:
        signals: s_p as columns, shape (..., a, positions).
        patches: u_p as columns, shape (..., b, positions).
    """
    (a, positions), b = signals.shape[-2:], patches.shape[-2]
    lead, slack = signals.shape[:-2], product_slack(positions)
    s, u = signals.reshape(-1, a, positions), patches.reshape(-1, b, positions)
    sizes = norm_bounds(s), norm_bounds(u)
    if positions * (a + b) < a * b:
        s, u = s.double(), u.double()
        norms = ((s.mT @ s) * (u.mT @ u)).sum(dim=(-2, -1)).clamp_min(0.0).sqrt()
        slack += ((a + b + positions**2) * 2.0**-52) ** 0.5  # of the square, which may cancel too
    else:
        norms = norm_bounds(s @ u.mT)
        slack *= 2  # this sum rounds too
        unsafe = ~(safe_in_float32(sizes[0]) & safe_in_float32(sizes[1]))
        if bool(unsafe.any()):
            norms[unsafe] = row_norms(s[unsafe].double() @ u[unsafe].double().mT)
    return (norms + slack * sizes[0] * sizes[1]).view(lead)


def _totals(
    delta: Tensor,
    h: Tensor,
    clip: Clip | None,
    products: Callable[[Tensor, Tensor], list[Tensor]],
    *,
    ones: int,
    copies: int = 1,
) -> list[Tensor]:
    """Sum clipped products over records and positions; records whose products cancel are added in float64.

    Args:
        delta: Signals, shape (batch, ...).
        h: Inputs, shape (batch, ...).
        clip: Factors and norms; None for factors of 1, in float32.
        products: Maps signals and inputs of one dtype to sums.
        ones: How often the bias's constant 1 enters a record's products.
        copies: How often a record's input enters at most.
    """
    if clip is None:
        return products(delta, h)
    sizes = (copies * norm_bounds(h).square() + ones).sqrt()
    return scaled_rows(delta, clip.factors, cancels(norm_bounds(delta) * sizes, clip.norms)).totals(
        h, products
    )


def _with_ones(rows: Tensor, bias: bool) -> Tensor:
    return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], dim=-1) if bias else rows


def _positions(delta: Tensor) -> Tensor:
    """Return signals of channels (batch, channels, height, width) as rows of positions (batch, positions, channels)."""
    return delta.flatten(2).transpose(1, 2)


def _as_pair(value: object) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)  # type: ignore[arg-type, return-value]
