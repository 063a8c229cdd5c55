"""Layers whose product runs on a programmable device: put a trained network on devices, or train it in place.

A layer y = W x + b keeps its parameters in digital memory. Row i of W is programmed divided by s_i = max_j |W_ij|, an
input is shown divided by r = max_j |x_j|, and the reading is multiplied by s_i r; biases are added digitally. The
backward pass is straight-through: gradients are those of the digital W, at the inputs that were given.

An input whose product meets the bound of a converter is shown again at half its size, up to six times, and its reading
is multiplied by as much: the bound management of aihwkit (Gokmen, Rasch and Haensch, IEDM 2019).

Drift lowers all conductances by about the same factor. Each layer therefore reads a few fixed vectors v after
programming and after each wait, and multiplies its outputs by the g that makes g <y, W v> equal <W v, W v>, y the
readings. This is the global drift compensation of Joshi et al., Nature Communications 2020, by least squares; sums of
magnitudes, which they take, grow with the noise.

`DeviceModel.compensate` corrects single outputs too, from inputs of the user: y_i <- a_i y_i + b_i, by least squares
against the digital product with the inputs that reach the layer. Inputs of a mean other than 0, as behind a ReLU, make
an offset of the errors of a row. Joshi et al. adapt the statistics of batch normalization to the same end.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from opusim import checks
from opusim.description.loading import load_description
from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_device
from opusim.devices.usage import Usage
from opusim.errors import ConfigError
from opusim.randomness import derive_seed

_REFERENCE_VECTORS = 64
_MOST_HALVINGS = 6
LEAST_SCALE = 1e-30
"""Smallest scale of a row or of an input."""


class DeviceLinear(nn.Module):
    """A linear layer on a programmable device.

    Args:
        linear: the digital layer, whose parameters are shared.
        device: open, with the capabilities `program` and `multiply`, and a window of the layer's size.
        compensate_drift: whether outputs are divided by the measured loss of the conductances.
        programming_step: the change of an entry of W / s that has the matrix programmed again before the next product
            or wait, in training and in evaluation mode; None programs only when `program` is called.

    Raises:
        CapabilityMissing: the device cannot be programmed, or cannot multiply.
        ConfigError: its window has another size.
        ValueError: programming_step is below 0.
    """

    def __init__(
        self,
        linear: nn.Linear,
        device: NoisyDevice,
        *,
        compensate_drift: bool = True,
        programming_step: float | None = None,
    ) -> None:
        super().__init__()
        size = (linear.out_features, linear.in_features)
        if (device.n_outputs, device.n_inputs) != size:
            raise ConfigError(
                device.name,
                "n_inputs",
                f"the window has {device.n_inputs} inputs and {device.n_outputs} outputs, the layer {size[1]} and "
                f"{size[0]}; open the device with the layer's size",
            )
        if programming_step is not None:
            checks.non_negative(programming_step=programming_step)
        self.weight, self.bias = linear.weight, linear.bias
        self.device = device
        self._programmable, self._multiplies = device.require("program"), device.require("multiply")
        self._compensate, self._step = compensate_drift, programming_step
        generator = torch.Generator().manual_seed(1)
        self._reference = torch.randint(-1, 2, (_REFERENCE_VECTORS, size[1]), generator=generator).float()
        self._gain = 1.0
        self._compensating = False
        self.program()

    def program(self) -> None:
        """Write the present weights to the device; drift starts again."""
        with torch.no_grad():
            weight = self.weight.detach()
            self._row_scale = weight.abs().amax(dim=1).clamp_min(LEAST_SCALE)
            self._wanted = weight / self._row_scale[:, None]
            self._programmable.program(self._wanted)
        self._row_gain, self._row_offset = torch.ones(len(weight)), torch.zeros(len(weight))
        self._measure_gain()

    def wait(self, seconds: float) -> None:
        """Let time pass on the device, then measure the compensation of drift again.

        Raises:
            CapabilityMissing: the device does not drift.
        """
        drifting = self.device.require("wait")
        self._follow()
        drifting.wait(seconds)
        self._measure_gain()

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b as the device gives it.

        Args:
            x: shape (..., in_features), finite.

        Returns:
            Shape (..., out_features), of x's dtype.
        """
        self._follow()
        y: Tensor = _StraightThrough.apply(x, self.weight, self)
        return y if self.bias is None else y + self.bias

    def read(self, x: Tensor) -> Tensor:
        """Return the device's product with the rows of x, without gradient, float32, shape (..., out_features)."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        largest = rows.abs().amax(dim=1, keepdim=True).clamp_min(LEAST_SCALE)
        product = self._within_bound((rows / largest).clamp_(-1, 1))
        product = product.mul_(largest).mul_(self._row_scale.to(product.device) * self._gain)
        if self._compensating:
            self._fit_rows(product, rows @ self.weight.detach().T.float())
        product = product.mul_(self._row_gain.to(product.device)).add_(self._row_offset.to(product.device))
        return product.reshape(*x.shape[:-1], -1)

    @contextmanager
    def compensating(self) -> Iterator[None]:
        """Fit gain and offset of every output to the inputs of each forward pass; see `DeviceModel.compensate`."""
        self._compensating = True
        try:
            yield
        finally:
            self._compensating = False

    def _fit_rows(self, read: Tensor, exact: Tensor) -> None:
        """Set a and b of every output to the least squares of exact against a read + b, over rows of inputs."""
        about, wanted = read - read.mean(dim=0), exact - exact.mean(dim=0)
        power = about.square().sum(dim=0)
        gain = torch.where(power > 0, (about * wanted).sum(dim=0) / power, 1.0)
        self._row_gain, self._row_offset = gain, exact.mean(dim=0) - gain * read.mean(dim=0)

    def _within_bound(self, rows: Tensor) -> Tensor:
        """Return the product; rows that meet a converter's bound are shown again at half, a quarter, ... of their size.

        Such repeats are counted as frames. A device that does not tell which rows those are reads each row once.
        """
        product = self._multiplies.multiply(rows)
        repeated = torch.arange(len(rows), device=rows.device)
        for halvings in range(1, _MOST_HALVINGS + 1):
            met = getattr(self.device, "saturated", None)
            if met is None or not bool(met.any()):
                break
            repeated = repeated[met.to(repeated.device)]
            product[repeated] = self._multiplies.multiply(rows[repeated] / 2**halvings) * 2**halvings
        return product

    def extra_repr(self) -> str:
        """Return size and device."""
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}, device={self.device.name}"

    def _follow(self) -> None:
        """Program the present weights if one has moved by more than the programming step."""
        if self._step is not None and self._moved() > self._step:
            self.program()

    def _moved(self) -> float:
        """Return the largest change of a weight since it was programmed, in units of its row's scale."""
        with torch.no_grad():
            return float((self.weight / self._row_scale[:, None] - self._wanted).abs().max())

    def _measure_gain(self) -> None:
        """Measure the compensation of drift from readings of the reference vectors."""
        self._gain = 1.0
        if self._compensate:
            expected = self._reference @ self._wanted.T
            found = float((self._within_bound(self._reference) * expected).sum())
            self._gain = float(expected.square().sum()) / found if found > 0 else 1.0


class _StraightThrough(torch.autograd.Function):
    """The device's product forward, the digital weights backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: DeviceLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        return layer.read(x).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        (signal,) = signals
        rows, inputs = (each.reshape(-1, each.shape[-1]).to(weight.dtype) for each in (signal, x))
        return (rows @ weight).reshape(x.shape).to(x.dtype), rows.T @ inputs, None


class DeviceConv2d(nn.Module):
    """A two-dimensional convolution as a product with unfolded patches on a programmable device.

    Args:
        convolution: the digital layer, with one group and zero padding given in numbers.
        device: as for `DeviceLinear`, with in_channels * kernel height * width inputs and out_channels outputs.
        **options: those of `DeviceLinear`.

    Raises:
        ValueError: groups, or another padding.
    """

    def __init__(self, convolution: nn.Conv2d, device: NoisyDevice, **options: Any) -> None:
        super().__init__()
        padding = zero_padding(convolution)
        flat = nn.Linear(patch_size(convolution), convolution.out_channels, bias=False, device="meta")
        flat.weight = nn.Parameter(convolution.weight.detach().flatten(1).clone())
        flat.register_parameter(
            "bias", next((p for n, p in convolution.named_parameters() if n == "bias"), None)
        )
        self.product = DeviceLinear(flat, device, **options)
        self._shape = convolution.kernel_size, convolution.dilation, padding, convolution.stride
        self._unfold = nn.Unfold(*self._shape)

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution as the device gives it, shape (batch, out_channels, height, width)."""
        y = self.product(self.patches(x)).transpose(1, 2)
        sizes = [
            (length + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for length, kernel, dilation, padding, stride in zip(x.shape[2:], *self._shape, strict=True)
        ]
        return y.reshape(len(x), -1, *sizes)

    def patches(self, x: Tensor) -> Tensor:
        """Return what the device multiplies, shape (batch, positions, in_channels * kernel height * width)."""
        patches: Tensor = self._unfold(x).transpose(1, 2)
        return patches


class DeviceModel(nn.Module):
    """A module whose linear and convolutional layers run on devices; made by `convert`.

    Use it as a context manager, or call `close`.

    Args:
        model: a module that holds device layers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.model(*args, **kwargs)

    @property
    def layers(self) -> tuple[DeviceLinear, ...]:
        """The products that run on devices, in the order of the module."""
        return tuple(module for module in self.modules() if isinstance(module, DeviceLinear))

    @property
    def usage(self) -> Usage:
        """What all devices have used; they work one after the other."""
        return sum((layer.device.usage for layer in self.layers), start=Usage())

    def program(self) -> None:
        """Write the present weights to all devices."""
        for layer in self.layers:
            layer.program()

    def wait(self, seconds: float) -> None:
        """Let time pass on all devices, from the last programming on; see `DeviceLinear.wait`."""
        for layer in self.layers:
            layer.wait(seconds)

    def compensate(self, *args: Any, **kwargs: Any) -> None:
        """Run the module on inputs, and correct every output of every device by a gain and an offset found with them.

        The corrections take two numbers for each output, act from this pass on and last until a layer is programmed.
        A device that waited may be compensated again. A hundred images or more keep the fit's own error small.

        Args:
            *args: Arguments of the module, such as records of the training set; no labels are used.
            **kwargs: Keyword arguments of the module.
        """
        with ExitStack() as stack, torch.no_grad():
            for layer in self.layers:
                stack.enter_context(layer.compensating())
            self.model(*args, **kwargs)

    def seek(self, step: int) -> None:
        """Position the noise of all devices at a step; see `NoisyDevice.seek`."""
        for layer in self.layers:
            layer.device.seek(step)

    def close(self) -> None:
        """Close all devices."""
        for layer in self.layers:
            layer.device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def convert(
    model: nn.Module,
    device: str | Path,
    *,
    seed: int = 0,
    mode: str = "experiment",
    compensate_drift: bool = True,
    programming_step: float | None = None,
    **overrides: Any,
) -> DeviceModel:
    """Put a copy of a network on devices: one for each nn.Linear and nn.Conv2d; other layers stay digital.

    Subclasses of these two stay digital too: torch's attention reads the weights of its projections itself.

        >>> import torch, opusim
        >>> with opusim.convert(torch.nn.Linear(4, 3), "pcm") as analog:
        ...     analog.wait(3600.0)
        ...     analog(torch.ones(2, 4)).shape, analog.usage.programmings
        (torch.Size([2, 3]), 1)

    Args:
        model: the trained network; it is left as it is. A noise-aware one is converted without its injected noise.
        device: name or path of a description with the capabilities `program` and `multiply`.
        seed: which chips and which noise, in [0, 2^64); each layer gets a chip of its own.
        mode: ``experiment`` or ``release``, for the noise of products.
        compensate_drift: see `DeviceLinear`.
        programming_step: see `DeviceLinear`; for training in place.
        **overrides: sections laid over the description's, as for `open_device`.

    Returns:
        The network on open devices, programmed.

    Raises:
        ConfigError: the device cannot be used, or is smaller than a layer.
        ValueError: the network has no layer that can run on a device.
    """
    converted = copy.deepcopy(model)
    _without_parametrizations(converted)
    found = convertible_layers(converted)
    medium = load_description(device, overrides or None).medium
    chip = 0 if medium is None else medium.seed
    options = {"compensate_drift": compensate_drift, "programming_step": programming_step}
    for name, module in found:
        opened = open_device(
            device,
            mode=mode,
            seed=derive_seed(seed, "device of layer", name),
            n_inputs=module.in_features if isinstance(module, nn.Linear) else patch_size(module),
            n_outputs=module.out_features if isinstance(module, nn.Linear) else module.out_channels,
            **{**overrides, "medium": {"seed": derive_seed(seed, "chip of layer", name, chip) >> 1}},
        )
        layer = DeviceLinear if isinstance(module, nn.Linear) else DeviceConv2d
        converted = _replaced(converted, name, layer(module, opened, **options))  # type: ignore[arg-type]
    return DeviceModel(converted)


def convertible_layers(model: nn.Module) -> list[tuple[str, nn.Linear | nn.Conv2d]]:
    """Return the layers of a model that `convert` puts on devices, and their names.

    Subclasses of nn.Linear and nn.Conv2d are left out, except for those that torch makes for parametrized weights.

    Raises:
        ValueError: there is none.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) and _plain_class(module) in (nn.Linear, nn.Conv2d)
    ]
    if not found:
        raise ValueError(
            f"model = {type(model).__name__}: has no nn.Linear and no nn.Conv2d; give a network with one"
        )
    return found


def zero_padding(convolution: nn.Conv2d) -> tuple[int, ...]:
    """Return the zeros that a convolution adds on either side of each axis.

    Raises:
        ValueError: it is no product with zero-padded patches: it has groups, or another padding.
    """
    padding = convolution.padding
    if convolution.groups != 1 or convolution.padding_mode != "zeros" or isinstance(padding, str):
        raise ValueError(
            f"{convolution}: a device takes one group and zero padding given in numbers; keep this layer digital"
        )
    return padding


def patch_size(convolution: nn.Conv2d) -> int:
    """Return the numbers of an unfolded patch: in_channels * kernel height * width."""
    height, width = convolution.kernel_size
    return convolution.in_channels * height * width


def _plain_class(module: nn.Module) -> type:
    """Return the class of a module; of a parametrized one the class from which torch derived it."""
    return type(module).__bases__[0] if parametrize.is_parametrized(module) else type(module)


def _without_parametrizations(model: nn.Module) -> None:
    """Make parametrized layers of a copied model plain ones that hold their parameters of evaluation mode.

    `torch.nn.utils.parametrize.remove_parametrizations` would also change the class of the layers that were copied.
    """
    for module in list(model.modules()):
        if isinstance(module, (nn.Linear, nn.Conv2d)) and parametrize.is_parametrized(module):
            module.eval()
            held = {name: getattr(module, name).detach().clone() for name in module.parametrizations}  # type: ignore[union-attr]
            module.__class__ = _plain_class(module)
            del module.parametrizations
            for name, value in held.items():
                module.register_parameter(name, nn.Parameter(value))


def _replaced(model: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """Return the model with the module of a name replaced; the layer itself if it is the whole model."""
    if not name:
        return layer
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)
    return model
