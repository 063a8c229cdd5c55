"""Put a trained network on programmable devices: one device for each linear layer and each convolution.

`opusim.crossbar.placement` decides which layers these are, and refuses to leave weight matrices digital in silence.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.utils import parametrize

from opusim import checks
from opusim.crossbar.conversion import (
    DigitalProducts,
    Placement,
    convertible_layers,
    covers,
    is_transposed,
    placements,
    plain_class,
    weight_matrices,
)
from opusim.crossbar.layers import (
    DeviceConv2d,
    DeviceLinear,
    DeviceTransposedLinear,
    patch_size,
    zero_padding,
)
from opusim.description.schema import load_description
from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_device
from opusim.devices.usage import Usage
from opusim.randomness import derive_seed


class DeviceModel(nn.Module):
    """A module whose linear and convolutional layers run on devices; made by `convert`.

    Use it as a context manager, or call `close`.

    Args:
        model: a module that holds device layers.
        placement: where each layer of it is.
        digital: names and patterns of layers and parameters that may multiply digitally.
    """

    def __init__(
        self, model: nn.Module, placement: Sequence[Placement] = (), digital: Collection[str] = ()
    ) -> None:
        super().__init__()
        self.model = model
        self.placement = tuple(placement)
        """Each layer with parameters: its name, its class, its number of parameters, and its device or None."""
        self._digital, self._is_checked = tuple(digital), False
        self.register_load_state_dict_pre_hook(_add_prefix)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises:
            ValueError: in the first call, a weight multiplies digitally without being named in `digital`, such as by
                torch.nn.functional.linear(x, layer.weight).
        """
        if self._is_checked or torch.compiler.is_compiling():
            return self.model(*args, **kwargs)
        named = weight_matrices(self.model)
        accepted = {id(p) for name, p in named.items() if any(covers(each, name) for each in self._digital)}
        with DigitalProducts({name: p for name, p in named.items() if id(p) not in accepted}):
            output = self.model(*args, **kwargs)
        self._is_checked = True
        return output

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
    """Put a copy of a network on devices: one for each nn.Linear and nn.Conv2d.

    Subclasses of these two that keep their forward pass count too, and so does transformers' Conv1D. Every other weight
    matrix, such as those of nn.MultiheadAttention, nn.LSTM, nn.Conv1d or a parameter of your own, has to be named in
    `digital`; embeddings and normalisations stay digital anyway, and `DeviceModel.placement` lists all. A layer that
    stands at several places of the network is one device. The fused kernel of nn.TransformerEncoderLayer, which reads
    weights and not devices, is not used in the copy.

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
        digital: names of layers that stay digital, as `named_modules` of the network tells them, and of parameters. The
            name of a module stands for all inside it; shell patterns such as "blocks.*.attention" are allowed.
        **overrides: sections laid over the description's, as for `open_device`.

    Returns:
        The network on open devices, programmed.

    Raises:
        ConfigError: the device cannot be used, or is smaller than a layer.
        ValueError: the network has no layer that can run on a device, a weight matrix is neither of such a layer nor
            named in `digital`, a convolution has groups or another padding than zeros given in numbers, or `digital`
            names no weight matrix.
    """
    checks.instance(nn.Module, model=model)
    converted = _without_compilation(copy.deepcopy(model))
    found = convertible_layers(converted, digital)
    for _, module in found:
        if isinstance(module, nn.Conv2d):
            zero_padding(module)
    _without_parametrizations(converted)
    _without_fused_kernels(converted)
    medium = load_description(device, overrides or None).medium
    chip = 0 if medium is None else medium.seed
    options = {"compensate_drift": compensate_drift, "programming_step": programming_step}
    placed = placements(converted, {module: str(device) for _, module in found})
    with ExitStack() as devices:
        for name, module in found:
            n_inputs, n_outputs = _window(module)
            opened = open_device(
                device,
                mode=mode,
                seed=derive_seed(seed, "device of layer", name),
                n_inputs=n_inputs,
                n_outputs=n_outputs,
                **{**overrides, "medium": {"seed": derive_seed(seed, "chip of layer", name, chip) >> 1}},
            )
            devices.callback(opened.close)
            converted = _replaced(converted, module, _layer_on(opened, module, **options))
        devices.pop_all()
    return DeviceModel(converted, placed, digital)


def _window(module: Any) -> tuple[int, int]:
    """Return inputs and outputs of a layer's matrix."""
    if isinstance(module, nn.Conv2d):
        return patch_size(module), module.out_channels
    if is_transposed(module):
        n_inputs, n_outputs = module.weight.shape
        return n_inputs, n_outputs
    return module.in_features, module.out_features


def _layer_on(device: NoisyDevice, module: Any, **options: Any) -> nn.Module:
    """Return a layer's form on a device."""
    if isinstance(module, nn.Conv2d):
        return DeviceConv2d(module, device, **options)
    if is_transposed(module):
        return DeviceTransposedLinear(module, device, **options)
    return DeviceLinear(module, device, **options)


def _add_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take the state of the module inside too, whose keys lack the name of this one."""
    inner = f"{prefix}model."
    named = [key for key in state if key.startswith(prefix)]
    if not any(key.startswith(inner) for key in named):
        for key in named:
            state[inner + key.removeprefix(prefix)] = state.pop(key)


def _without_compilation(model: nn.Module) -> nn.Module:
    """Return a copied model whose parts run uncompiled: compiled ones would multiply with the weights of before."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            setattr(module, name, _uncompiled(child))
    return _uncompiled(model)


def _uncompiled(module: nn.Module) -> nn.Module:
    """Return what torch.compile was given for a module, or the module."""
    return module._modules.get("_orig_mod") or module


def _without_parametrizations(model: nn.Module) -> None:
    """Make parametrized layers of a copied model plain ones that hold their parameters of evaluation mode.

    `torch.nn.utils.parametrize.remove_parametrizations` would also change the class of the layers that were copied.
    """
    for module in list(model.modules()):
        if isinstance(module, (nn.Linear, nn.Conv2d)) and parametrize.is_parametrized(module):
            module.eval()
            held = {name: getattr(module, name).detach().clone() for name in module.parametrizations}  # type: ignore[union-attr]
            module.__class__ = plain_class(module)
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
