"""Put a trained network on programmable devices: one device for each linear layer and each convolution."""

from __future__ import annotations

import copy
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.utils import parametrize

from opusim import checks
from opusim.crossbar.layers import DeviceConv2d, DeviceLinear, patch_size, zero_padding
from opusim.description.loading import load_description
from opusim.devices.registry import open_device
from opusim.devices.usage import Usage
from opusim.randomness import derive_seed


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
            *args: Arguments of the module, such as records of the training set; no labels are used. Before a run that
                protects whole records, give public ones: checkpoints hold the corrections, which no guarantee covers.
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
    digital: Collection[str] = (),
    **overrides: Any,
) -> DeviceModel:
    """Put a copy of a network on devices: one for each nn.Linear and nn.Conv2d; other layers stay digital.

    Subclasses of these two stay digital too: torch's attention reads the weights of its projections itself. A layer
    that stands at several places of the network is one device. The fused kernel of nn.TransformerEncoderLayer, which
    reads weights and not devices, is not used in the copy.

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
        digital: names of layers that stay digital, as `named_modules` of the network tells them.
        **overrides: sections laid over the description's, as for `open_device`.

    Returns:
        The network on open devices, programmed.

    Raises:
        ConfigError: the device cannot be used, or is smaller than a layer.
        ValueError: the network has no layer that can run on a device, a convolution has groups or another padding than
            zeros given in numbers, or `digital` names no such layer.
    """
    converted = copy.deepcopy(model)
    found = convertible_layers(converted, digital)
    for _, module in found:
        if isinstance(module, nn.Conv2d):
            zero_padding(module)
    _without_parametrizations(converted)
    _without_fused_kernels(converted)
    medium = load_description(device, overrides or None).medium
    chip = 0 if medium is None else medium.seed
    options = {"compensate_drift": compensate_drift, "programming_step": programming_step}
    with ExitStack() as devices:
        for name, module in found:
            opened = open_device(
                device,
                mode=mode,
                seed=derive_seed(seed, "device of layer", name),
                n_inputs=module.in_features if isinstance(module, nn.Linear) else patch_size(module),
                n_outputs=module.out_features if isinstance(module, nn.Linear) else module.out_channels,
                **{**overrides, "medium": {"seed": derive_seed(seed, "chip of layer", name, chip) >> 1}},
            )
            devices.callback(opened.close)
            layer = DeviceLinear if isinstance(module, nn.Linear) else DeviceConv2d
            converted = _replaced(converted, module, layer(module, opened, **options))  # type: ignore[arg-type]
        devices.pop_all()
    return DeviceModel(converted)


def convertible_layers(
    model: nn.Module, digital: Collection[str] = ()
) -> list[tuple[str, nn.Linear | nn.Conv2d]]:
    """Return the layers of a model that `convert` puts on devices, and their names.

    Subclasses of nn.Linear and nn.Conv2d are left out, except for those that torch makes for parametrized weights.

    Args:
        model: the network.
        digital: names of layers that are left out too.

    Raises:
        TypeError: the model is no torch module.
        ValueError: there is none, or `digital` names what is no such layer.
    """
    checks.instance(nn.Module, model=model)
    named = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, (nn.Linear, nn.Conv2d)) and _plain_class(module) in (nn.Linear, nn.Conv2d)
    }
    if isinstance(digital, str) or (unknown := [name for name in digital if name not in named]):
        wrong = digital if isinstance(digital, str) else unknown[0]
        raise ValueError(
            f"digital = {wrong!r}: must be a list of names of layers, from {', '.join(map(repr, named))}"
        )
    kept = {named[name] for name in digital}
    found: dict[nn.Linear | nn.Conv2d, str] = {}
    for name, module in named.items():
        if module not in kept:
            found.setdefault(module, name)
    if not found:
        raise ValueError(
            f"model = {type(model).__name__}: has no nn.Linear and no nn.Conv2d to put on a device; give a network "
            "with one"
        )
    return [(name, module) for module, name in found.items()]


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


def _without_fused_kernels(model: nn.Module) -> None:
    """Have the encoder layers of a copied transformer call their linear layers in evaluation mode too.

    torch.nn.TransformerEncoderLayer otherwise gives the weights of its layers to one kernel.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _replaced(model: nn.Module, module: nn.Module, layer: nn.Module) -> nn.Module:
    """Return the model with a module replaced wherever it stands; the layer itself if it is the whole model."""
    if module is model:
        return layer
    for name, child in list(model.named_modules(remove_duplicate=False)):
        if child is module:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, layer)
    return model
