"""Which layers of a network go to devices, and which weights would multiply digitally.

A weight matrix is a parameter with at least two dimensions longer than 1. Every one has to go to a device or be named
as digital: an accuracy on a chip that a part of the network never saw looks better than it is. Embeddings look rows up
and normalisations scale features, so both stay digital without being named.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from opusim import checks

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
    no_product = [
        name for name, module in taken.items() if isinstance(module, nn.Conv2d) and has_groups(module)
    ]
    return (*others, *no_product)


def placements(model: nn.Module, devices: dict[nn.Module, str]) -> tuple[Placement, ...]:
    """Return where each layer with parameters goes.

    Args:
        model: The digital network.
        devices: Names of the devices of its layers.
    """
    rows = []
    closed: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in closed):
            continue
        whole = module in devices or isinstance(module, nn.MultiheadAttention) or _is_parametrized(module)
        if whole:
            closed.append(f"{name}." if name else "")
        size = sum(p.numel() for p in module.parameters(recurse=whole))
        if size:
            rows.append(Placement(name, plain_class(module).__name__, size, devices.get(module)))
    return tuple(rows)


def covers(entry: str, name: str) -> bool:
    """Return whether an entry of `digital` names a layer, or a module around it; `*` stays within one part."""
    parts, wanted = name.split("."), entry.split(".")
    return len(parts) >= len(wanted) and all(
        fnmatch.fnmatchcase(part, pattern) for part, pattern in zip(parts, wanted, strict=False)
    )


def plain_class(module: nn.Module) -> type:
    """Return the class of a module; of a parametrized one the class from which torch derived it."""
    return type(module).__bases__[0] if _is_parametrized(module) else type(module)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is a Conv1D of transformers: y = x W + b with W of shape (inputs, outputs)."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def has_groups(convolution: nn.Conv2d) -> bool:
    """Return whether a convolution is no product with zero-padded patches: it has groups, or another padding."""
    padded = convolution.padding_mode != "zeros" or isinstance(convolution.padding, str)
    return convolution.groups != 1 or padded


class DigitalProducts(TorchDispatchMode):
    """Refuses products of weights outside of devices while it is active.

    `torch.nn.functional.linear(x, layer.weight)` multiplies with the digital weight of a layer that is on a device.

    Args:
        weights: Parameters to watch, by name.
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
        _require_sizes(name, module)
        if _is_convertible(module):
            taken[name] = module
            closed.append(f"{name}." if name else "")
        elif isinstance(module, nn.MultiheadAttention) or _is_parametrized(module):
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


def _is_parametrized(module: nn.Module) -> bool:
    return parametrize.is_parametrized(module)


def _require_sizes(name: str, module: nn.Module) -> None:
    if any(isinstance(p, UninitializedParameter) for p in module.parameters(recurse=False)):
        raise ValueError(
            f"model: layer {name!r} ({type(module).__name__}) has no size yet; run the network on a record first"
        )


def _listed(names: Collection[str]) -> str:
    return _cut([repr(name) for name in names])


def _cut(shown: list[str]) -> str:
    return ", ".join([*shown[:_SHOWN], *(["..."] if shown[_SHOWN:] else [])])
