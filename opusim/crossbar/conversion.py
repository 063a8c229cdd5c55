"""Put a trained network on programmable devices: one device for each linear layer and each convolution.

A weight matrix is a parameter with at least two dimensions longer than 1. Each must go to a device or be named as
digital: an accuracy looks better than it is if a part of the network never ran on the chip. Embeddings look rows up and
normalisations scale features, so both stay digital without being named.

**Noise-aware training** (`noise_aware`): a digital network learns to tolerate a device, by noise on weights and outputs
in training mode only.

Each forward pass in training mode computes y = (W + E) x + b + e. For a number q, E_ij ~ N(0, (q s_i)^2) with
s_i = max_j |W_ij|, and e = 0. For a device, (W + E)_ij = c s_i (m_ij + d_ij z_ij), z_ij ~ N(0, 1), with the mean m and
the spread d that the device states for W_ij / s_i at a time (`ProgrammableDevice.weight_moments`), and with the c of
the layer that makes <c s m, W> equal <W, W>, in units of the rows' scales, as the compensation of drift does. Small
conductances drift more than large ones, so that a network has to learn with the weights that are left. A chip of light,
whose errors spread over the whole matrix, has m = W_ij / s_i and the same d everywhere (`spread_error`).
e_i ~ N(0, (s_i r)^2 k (v + step^2 / 12)) with r = max_j |x_j|, k the conversions of an output, v the least variance of
a conversion's noise, and step that of the converter. What grows with the input in the noise of products is left out.

The gradient treats E / s as a constant and s as a function of the weights: noise grows with the largest weight of a
row, and training lowers that weight if it costs more than it helps. A limit of some standard deviations of their row,
in training and in evaluation, does the same by force (Joshi et al., Nature Communications 2020, take 2 to 2.5). The
gradient passes the limit as if it were not there.
"""

from __future__ import annotations

import copy
import fnmatch
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import TorchDispatchMode

from opusim import checks
from opusim.crossbar.layers import (
    LEAST_SCALE,
    DeviceConv2d,
    DeviceLinear,
    DeviceTransposedLinear,
    has_groups,
    zero_padding,
)
from opusim.crossbar.programmable import ProgrammableDevice
from opusim.description.schema import load_description
from opusim.devices.registry import open_device
from opusim.devices.usage import Usage
from opusim.errors import ConfigError
from opusim.noise import ConverterLatticeNoise, SignalGaussianNoise
from opusim.randomness.seeds import derive_seed
from opusim.randomness.streams import SeededStream


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
        return self._called(self.model, *args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network's own `generate`, such as that of a language model of transformers.

        Raises:
            AttributeError: The network has none.
            ValueError: See `forward`.
        """
        generate: Any = self.model.generate
        return self._called(generate, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Find parts of the module; if only the network inside has an attribute, say where it is."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name == "model" or not hasattr(self.model, name):
                raise
            raise AttributeError(f"{error}; its network has: write .model.{name}") from None

    def _called(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the network; the first time, refuse weights that multiply digitally without being named."""
        if self._is_checked or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        named = weight_matrices(self.model)
        accepted = {id(p) for name, p in named.items() if any(covers(each, name) for each in self._digital)}
        with DigitalProducts({name: p for name, p in named.items() if id(p) not in accepted}):
            output = call(*args, **kwargs)
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

    def __exit__(self, *error: object) -> None:
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
        ConfigError: the device cannot be used, or is an instrument that is smaller than a layer; a layer takes several
            of a smaller simulated device.
        ValueError: the network has no layer that can run on a device, a weight matrix is neither of such a layer nor
            named in `digital`, a convolution has groups or another padding than zeros given in numbers, or `digital`
            names no weight matrix.
    """
    checks.instance(nn.Module, model=model)
    converted = _copied(model)
    # compiled parts would multiply with the old weights
    for module in list(converted.modules()):
        for name, child in list(module.named_children()):
            setattr(module, name, child._modules.get("_orig_mod") or child)
    converted = converted._modules.get("_orig_mod") or converted
    found = convertible_layers(converted, digital)
    for _, module in found:
        if isinstance(module, nn.Conv2d):
            zero_padding(module)
    # parametrized layers become plain ones with their parameters of evaluation mode; torch's own function would
    # also change the class of the layers that were copied
    for layer in list(converted.modules()):
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and parametrize.is_parametrized(layer):
            layer.eval()
            held = {name: getattr(layer, name).detach().clone() for name in layer.parametrizations}  # type: ignore[union-attr]
            layer.__class__ = plain_class(layer)
            del layer.parametrizations
            for name, value in held.items():
                layer.register_parameter(name, nn.Parameter(value))
    _without_fused_kernels(converted)
    medium = load_description(device, overrides or None).medium
    chip = 0 if medium is None else medium.seed
    options = {"compensate_drift": compensate_drift, "programming_step": programming_step}
    # where each layer with parameters goes
    placed: list[Placement] = []
    closed, taken = tuple[str, ...](), {module for _, module in found}
    for name, module in converted.named_modules():
        if name.startswith(closed):
            continue
        multihead = isinstance(module, nn.MultiheadAttention)
        whole = module in taken or multihead or parametrize.is_parametrized(module)
        if whole:
            closed = (*closed, f"{name}." if name else "")
        if size := sum(p.numel() for p in module.parameters(recurse=whole)):
            where = str(device) if module in taken else None
            placed.append(Placement(name, plain_class(module).__name__, size, where))
    with ExitStack() as devices:
        for name, module in found:
            own: Any = module
            kind: Any = DeviceLinear
            if isinstance(module, nn.Conv2d):
                kind, size = DeviceConv2d, (own.in_channels * math.prod(own.kernel_size), own.out_channels)
            elif is_transposed(module):
                kind, size = DeviceTransposedLinear, own.weight.shape
            else:
                size = own.in_features, own.out_features
            opened = open_device(
                device,
                mode=mode,
                seed=derive_seed(seed, "device of layer", name),
                n_inputs=size[0],
                n_outputs=size[1],
                **{**overrides, "medium": {"seed": derive_seed(seed, "chip of layer", name, chip) >> 1}},
            )
            devices.callback(opened.close)
            converted = _replaced(converted, module, kind(module, opened, **options))
        devices.pop_all()
    return DeviceModel(converted, placed, digital)


def _add_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Also accept the state of the module inside, whose keys lack the prefix of this one."""
    inner = f"{prefix}model."
    named = [key for key in state if key.startswith(prefix)]
    if not any(key.startswith(inner) for key in named):
        for key in named:
            state[inner + key.removeprefix(prefix)] = state.pop(key)


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy in which weights that hooks compute, as torch.nn.utils.prune does, are plain parameters."""
    computed: dict[int, Any] = {}  # weights of the last forward pass, which `copy` refuses to copy
    for module in model.modules():
        held = [
            value
            for value in vars(module).values()
            if isinstance(value, Tensor) and value.grad_fn is not None
        ]
        computed |= {id(value): value.detach().clone() for value in held}
    copied = copy.deepcopy(model, computed)
    for module in copied.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, BasePruningMethod | WeightNorm | SpectralNorm):
                hook.remove(module)
                del module._forward_pre_hooks[key]
    return copied


def _without_fused_kernels(model: nn.Module) -> None:
    """Stop encoder layers from giving the weights of their linear layers to one kernel in evaluation mode."""
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


_NO_PRODUCTS = (
    *(nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.PReLU),
    *(nn.modules.batchnorm._NormBase,),
)
_PRODUCTS = {
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "matmul"),
    *("convolution", "_convolution", "mkldnn_rnn_layer", "_cudnn_rnn"),
    *("_transformer_encoder_layer_fwd", "_native_multi_head_attention"),
}
"""Operators of torch whose operands a device would hold."""
_SHOWN = 6
"""Names in a message."""


class Placement(NamedTuple):
    """Where the weights of a layer are.

    Attributes:
        name: Of the layer in `named_modules` of the network, or of a parameter in `named_parameters`.
        kind: Class of the layer in the digital network.
        weights: Number of its parameters.
        device: Name of the device that holds them; None if the layer is digital.
    """

    name: str
    kind: str
    weights: int
    device: str | None


def convertible_layers(model: nn.Module, digital: Collection[str] = ()) -> list[tuple[str, nn.Module]]:
    """Return the layers of a model that `convert` puts on devices, and their names.

    These are nn.Linear and nn.Conv2d, subclasses of them that keep their forward pass, parametrized ones, and
    Conv1D of transformers, a linear layer with transposed weights.

    Args:
        model: The network.
        digital: Names or shell patterns of layers and parameters that stay digital; see `convert`.

    Raises:
        TypeError: The model is no torch module.
        ValueError: There is none, `digital` names what has no weight matrix, a layer has no size yet, or a weight
            matrix is left that is neither of such a layer nor named in `digital`.
    """
    checks.instance(nn.Module, model=model)
    taken, others = _holders(model)
    known = [*taken, *others]
    entries = [digital] if isinstance(digital, str) else list(digital)
    names = [*known, *weight_matrices(model)]
    unknown = [entry for entry in entries if not any(covers(entry, name) for name in names)]
    if isinstance(digital, str) or unknown:
        wrong = digital if isinstance(digital, str) else unknown[0]
        raise ValueError(f"digital = {wrong!r}: must be a list of names of layers, from {_listed(known)}")
    kept = {id(taken[name]) for entry in entries for name in taken if covers(entry, name)}
    found: dict[nn.Module, str] = {}
    for name, module in taken.items():
        if id(module) not in kept:
            found.setdefault(module, name)
    if not found:
        raise ValueError(
            f"model = {type(model).__name__}: has no nn.Linear and no nn.Conv2d to put on a device; give a network "
            "with one"
        )
    left = {name: kind for name, kind in others.items() if not any(covers(entry, name) for entry in entries)}
    if left:
        shown = [f"{name!r} ({kind})" for name, kind in left.items()]
        raise ValueError(
            f"model: {len(left)} of {len(known)} layers with weight matrices run on no device: "
            f"{_cut(shown)}; accept that they stay digital by digital=[{_listed(list(left))}], or build them from "
            "nn.Linear and nn.Conv2d"
        )
    return [(name, module) for module, name in found.items()]


def digital_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of everything with a weight matrix that runs on no device: `digital` for `convert`."""
    taken, others = _holders(model)
    return (*others, *(n for n, each in taken.items() if isinstance(each, nn.Conv2d) and has_groups(each)))


def covers(entry: str, name: str) -> bool:
    """Return whether an entry of `digital` names a layer, or a module around it; `*` stays within one part."""
    parts, wanted = name.split("."), entry.split(".")
    return len(parts) >= len(wanted) and all(
        fnmatch.fnmatchcase(part, pattern) for part, pattern in zip(parts, wanted, strict=False)
    )


def plain_class(module: nn.Module) -> type:
    """Return the class of a module; of a parametrized one the class from which torch derived it."""
    return type(module).__bases__[0] if parametrize.is_parametrized(module) else type(module)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is a Conv1D of transformers: y = x W + b with W of shape (inputs, outputs)."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


class DigitalProducts(TorchDispatchMode):
    """Refuses products of weights, by name, outside of devices while it is active.

    `torch.nn.functional.linear(x, layer.weight)` multiplies with the digital weight of a layer that is on a device.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in weights.items()}
        self._copies: list[Tensor] = []  # kept, so that no other tensor takes their place in memory

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = function.overloadpacket.__name__
        if operator in _PRODUCTS:
            for tensor in _tensors(args):
                if (name := self._name_of(tensor)) is not None:
                    raise ValueError(
                        f"model: weight {name!r} multiplies digitally ({operator}) outside of its layer, as by "
                        f"torch.nn.functional.linear(x, layer.weight); call the layer, or accept that by "
                        f"digital=[{name!r}]"
                    )
        result = function(*args, **(kwargs or {}))
        if operator == "_to_copy" and (name := self._name_of(args[0])) is not None:
            self._copies.append(result)
            self._names[result.untyped_storage().data_ptr()] = name
        return result

    def _name_of(self, tensor: Tensor) -> str | None:
        return self._names.get(tensor.untyped_storage().data_ptr())


def weight_matrices(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters with at least two dimensions longer than 1, by each of their names."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if _is_matrix(parameter)}


def _tensors(args: Any) -> Iterator[Tensor]:
    for entry in args:
        if isinstance(entry, Tensor):
            yield entry
        elif isinstance(entry, list | tuple):
            yield from _tensors(entry)


def _holders(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return layers that devices take, by each of their names, and the class of all else with weight matrices."""
    taken: dict[str, nn.Module] = {}
    others: dict[str, str] = {}
    closed: list[str] = []  # what is inside of these belongs to the layer around it
    for name, module in model.named_modules(remove_duplicate=False):
        if any(name.startswith(prefix) for prefix in closed):
            continue
        if any(isinstance(p, UninitializedParameter) for p in module.parameters(recurse=False)):
            raise ValueError(
                f"model: layer {name!r} ({type(module).__name__}) has no size yet; run the network on a record first"
            )
        if _is_convertible(module):
            taken[name] = module
            closed.append(f"{name}." if name else "")
        elif isinstance(module, nn.MultiheadAttention) or parametrize.is_parametrized(module):
            closed.append(f"{name}." if name else "")
            if weight_matrices(module):
                others[name] = plain_class(module).__name__
        elif not isinstance(module, _NO_PRODUCTS):
            own = [key for key, p in module.named_parameters(recurse=False) if _is_matrix(p)]
            if own and name and not any(True for _ in module.children()):
                others[name] = type(module).__name__
            else:
                prefix = f"{name}." if name else ""
                others |= {f"{prefix}{key}": f"parameter of {type(module).__name__}" for key in own}
    return taken, others


def _is_convertible(module: nn.Module) -> bool:
    kind: Any = plain_class(module)
    if "forward" in vars(module):  # a framework replaced it on this object
        return False
    if issubclass(kind, nn.Conv2d):
        return kind.forward is nn.Conv2d.forward and kind._conv_forward is nn.Conv2d._conv_forward
    return (issubclass(kind, nn.Linear) and kind.forward is nn.Linear.forward) or is_transposed(module)


def _is_matrix(parameter: Tensor) -> bool:
    return sum(size > 1 for size in parameter.shape) > 1


def _listed(names: Collection[str]) -> str:
    return _cut([repr(name) for name in names])


def _cut(shown: list[str]) -> str:
    return ", ".join([*shown[:_SHOWN], *(["..."] if shown[_SHOWN:] else [])])


_POINTS = 2048
"""Points of the table of a device's moments, on each side of 0."""


def noise_aware(
    model: nn.Module,
    noise: float | str | Path,
    *,
    after_s: float = 0.0,
    clip: float | None = None,
    seed: int = 0,
    digital: Collection[str] = (),
) -> nn.Module:
    """Inject noise into a network in training mode, so that it learns to tolerate a device's.

    Each forward pass in training mode draws fresh noise for each nn.Linear and nn.Conv2d that `convert` puts on a
    device; in evaluation mode the network is as it is. Gradients are those at the noisy weights.
    A forward pass that torch.utils.checkpoint repeats draws other noise, and its gradients are wrong.

    Args:
        model: the network, changed in place.
        noise: standard deviation of weights relative to the largest weight of each output's row, at least 0; or a
            device, by name or path: its errors of weights and its noise of outputs.
        after_s: seconds since programming that the network is to tolerate, at least 0; only for a device.
        clip: limit of weights, standard deviations of their row, above 0; None sets no limit.
        seed: seed of the noise, in [0, 2^64).
        digital: names of layers that get no noise, because `convert` will leave them digital.

    Returns:
        The model itself. `convert` takes it as it is, with limited weights.

    Raises:
        ValueError: a number is below 0, after_s goes with a number, or the network has no such layer, has a weight
            matrix that `convert` refuses, is noise-aware already, or has a convolution that `convert` refuses, if noise
            names a device.
        ConfigError: the device states no programming noise.
    """
    layers = convertible_layers(model, digital)
    checks.non_negative(after_s=after_s)
    if clip is not None:
        checks.positive(clip=clip)
    named = isinstance(noise, (str, Path))
    if not named:
        checks.non_negative(noise=noise)
        if after_s:
            raise ValueError(f"after_s = {after_s:g}: a number does not change with time; name a device")
    for name, module in layers:
        if not isinstance(module, (nn.Linear, nn.Conv2d)):
            raise ValueError(
                f"model: layer {name!r} is a {type(module).__name__}, whose columns are outputs; replace it by "
                f"nn.Linear, or leave it without noise by digital=[{name!r}]"
            )
        if parametrize.is_parametrized(module, "weight") and any(
            isinstance(each, _WeightNoise)
            for each in module.parametrizations["weight"]  # type: ignore[index]
        ):
            raise ValueError(f"model: layer {name!r} is noise-aware already; take the network from before")
        if module._parameters.get("weight") is None and not parametrize.is_parametrized(module, "weight"):
            raise ValueError(
                f"model: a hook computes the weight of layer {name!r}, as pruning and the older weight_norm do; take "
                "it off, as by torch.nn.utils.prune.remove(layer, 'weight')"
            )
        if named and isinstance(module, nn.Conv2d):
            zero_padding(module)
    for name, module in layers:
        stream = SeededStream(seed, f"weight noise of layer {name}")
        law: Any = noise
        if named:
            weight: Any = module.weight
            n_outputs, n_inputs = weight.flatten(1).shape
            law = open_device(law, n_inputs=n_inputs, n_outputs=n_outputs)
            if not isinstance(law, ProgrammableDevice):
                reason = f"{law.kind!r} tells no programming noise; give a number instead"
                raise ConfigError(str(noise), "kind", reason)
            outputs = SeededStream(seed, f"output noise of layer {name}")
            # the standard deviation of a reading of small inputs, rounding included, in units of w x
            with law:
                stated, scale = law.described_noise, law.reading_scale
            std = float(stated.std_low / scale) if isinstance(stated, SignalGaussianNoise) else 0.0
            if isinstance(stated, ConverterLatticeNoise):
                squares = stated.conversions * (stated.std_low**2 + stated.step**2 / 12)
                std = float(squares**0.5 / scale)
            module.register_forward_hook(partial(_with_output_noise, std, outputs))
        if clip is not None:
            parametrize.register_parametrization(module, "weight", _Limited(clip))
        parametrize.register_parametrization(module, "weight", _WeightNoise(law, stream, after_s))
    return model


class _Limited(nn.Module):
    """Limit weights to some standard deviations of their row; gradients pass unchanged.

    A row whose weights are all equal, such as a row of one weight, has no limit.
    """

    def __init__(self, clip: float) -> None:
        super().__init__()
        self._clip = clip

    def forward(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            rows = weight.flatten(1)
            std, rounding = (
                rows.std(dim=1, correction=0),
                torch.finfo(rows.dtype).eps * rows.abs().amax(dim=1),
            )
            most = (self._clip * std).masked_fill_(std <= rounding, torch.inf)
            most = most.reshape(-1, *(1,) * (weight.dim() - 1))
            change = weight.clamp(-most, most) - weight
        return weight + change


class _WeightNoise(nn.Module):
    """Replace a weight in training mode by a draw of what a device holds, or add relative noise to it.

    The draw relative to the row's scale is a constant of the backward pass; the scale is not.
    """

    def __init__(self, law: float | ProgrammableDevice, stream: SeededStream, after_s: float) -> None:
        super().__init__()
        self._stream = stream
        self._relative, self._spread = None if isinstance(law, ProgrammableDevice) else law, None
        if isinstance(law, ProgrammableDevice):
            self._spread = law.spread_error()
        if isinstance(law, ProgrammableDevice) and self._spread is None:
            points = torch.linspace(-1, 1, 2 * _POINTS + 1)
            mean, self._std = (row[0] for row in law.weight_moments(points[None], after_s))
            self._shift = mean - points

    def forward(self, weight: Tensor) -> Tensor:
        if not self.training:
            return weight
        rows = weight.flatten(1)
        scale = rows.abs().amax(dim=1, keepdim=True).clamp_min(LEAST_SCALE)
        with torch.no_grad():
            change = self._stream.normal(rows.shape, device=weight.device)
            if self._relative is not None:
                change.mul_(self._relative)
            elif self._spread is not None:
                change.mul_(self._spread * (rows / scale).square().mean().sqrt())
            else:  # a draw of what the device holds minus the weights, from the table of its moments
                relative = rows / scale
                # NaN stays one by `add_`
                index = relative.float().add(1).mul_(_POINTS).round_().nan_to_num_().long()
                mean = self._shift.to(weight.device)[index].add_(relative)
                # <w, mean> becomes <w, w> over the layer, as `DeviceLinear` compensates drift
                factor = relative.square().sum() / (relative * mean).sum().clamp_min(LEAST_SCALE)
                drawn = mean.addcmul_(self._std.to(weight.device)[index], change)
                change = drawn.mul_(factor).sub_(relative)
        return weight + (scale * change.to(weight.dtype)).reshape(weight.shape)


def _with_output_noise(
    std: float, stream: SeededStream, module: nn.Module, inputs: tuple[Any, ...], output: Tensor
) -> Tensor:
    """Add noise to a layer's outputs in training, `std` for weights and inputs in [-1, 1]: a forward hook."""
    if not module.training:
        return output
    with torch.no_grad():
        chain: Any = module.parametrizations["weight"]  # type: ignore[index]
        weight: Tensor = chain.original
        for parametrization in list(chain)[:-1]:  # the last one is the noise
            weight = parametrization(weight)
        rows = weight.detach().flatten(1).abs().amax(dim=1)
        if isinstance(module, nn.Conv2d):  # the largest magnitude of each patch
            sizes: Any = (module.kernel_size, module.dilation, module.padding, module.stride)
            patches = functional.unfold(inputs[0].abs().amax(dim=1, keepdim=True), *sizes)
            largest = patches.amax(dim=1).reshape(len(output), 1, *output.shape[2:])
            rows = rows[:, None, None]
        else:
            largest = inputs[0].abs().amax(dim=-1, keepdim=True)
        noise = stream.normal(output.shape, device=output.device)
        noise = noise.mul_(std).mul_(rows).mul_(largest)
    return output + noise.to(output.dtype)
