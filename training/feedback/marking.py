"""Choose feedback points among the submodules of a model, and look at what they return."""

from __future__ import annotations

import fnmatch
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeGuard

from torch import Tensor, nn

INPUT = ".input"
"""Behind the name of a submodule, as `error_at`: what the submodule receives, instead of what it returns."""
OUTPUT = ""
"""As `error_at`: the output of the whole model, which has this name in `named_modules`."""
_CONTAINERS = (nn.Sequential, nn.ModuleList)
_PASSED = (
    "View",
    "UnsafeView",
    "Reshape",
    "Transpose",
    "Permute",
    "Clone",
    "ToCopy",
    "NativeDropout",
    "Relu",
    "Gelu",
    "Silu",
)
"""Names of the autograd nodes, before "Backward", behind which a residual sum is still unnormalised."""
_MOST_STEPS = 6


def find_points(
    model: nn.Module, points: str | type[nn.Module] | Sequence[str | type[nn.Module]]
) -> tuple[str, ...]:
    """Return the names of the submodules that are feedback points, in the order of the model.

    Args:
        model: The model.
        points: "blocks" (see `find_blocks`), or names, shell patterns of names, or classes of submodules. As in
            paths, "layers.*" means layers.0 and layers.1, and not layers.0.norm.

    Raises:
        ValueError: Nothing matches, or points is empty.
        TypeError: An entry is neither a string nor a class of modules.
    """
    if isinstance(points, str) and points == "blocks":
        return find_blocks(model)
    entries = [points] if isinstance(points, str | type) else list(points)
    if not entries:
        raise ValueError("points is empty; give names, or train the plain model by backpropagation")
    modules = {name: module for name, module in model.named_modules() if name}
    chosen: set[str] = set()
    for entry in entries:
        chosen |= _matches(modules, entry)
    return tuple(name for name in modules if name in chosen)


def _matches(modules: Mapping[str, nn.Module], entry: object) -> set[str]:
    """Return the names of the submodules that one entry of `points` means."""
    if isinstance(entry, str):
        found = {name for name in modules if _fits(name, entry)}
        label = repr(entry)
    elif isinstance(entry, type) and issubclass(entry, nn.Module):
        found = {name for name, module in modules.items() if isinstance(module, entry)}
        label = entry.__name__
    else:
        raise TypeError(f"points holds {entry!r}; give names, patterns or classes of submodules")
    if not found:
        raise ValueError(f"points: no submodule is {label}; {_some_names(modules, str(entry))}")
    return found


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern means a name; `*` stays within one part of it, as in a path."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def require_place(model: nn.Module, error_at: str) -> str:
    """Return the name of a place that the error can be taken at: "NAME", "NAME.input", or "" for the model's output.

    Raises:
        ValueError: There is no such submodule.
    """
    modules = dict(model.named_modules())
    if error_at not in modules and error_at.removesuffix(INPUT) not in modules:
        del modules[""]
        raise ValueError(f"error_at = {error_at!r} is no submodule; {_some_names(modules, error_at)}")
    return error_at


def _some_names(modules: Mapping[str, nn.Module], wanted: str) -> str:
    close = get_close_matches(wanted, modules, n=3)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return (
        f"it has {', '.join(list(modules)[:8])}{', ...' if len(modules) > 8 else ''} (model.named_modules())"
    )


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the feedback points that "blocks" stands for.

    1. `model.feedback_points`, if the model declares them.
    2. The repeated blocks but the last: the outermost modules with submodules of their own, of the most frequent class,
       at least two of them; two classes if they are equally frequent, as the layers of an encoder and a decoder.
       Sequential and ModuleList are looked into.
    3. Without repeated blocks: every activation module with a parameterised module behind it, as in an MLP.
    4. Without these, as in models that call functions such as `torch.relu`: every layer but the last.

    Raises:
        ValueError: None of these exists.
    """
    declared = getattr(model, "feedback_points", None)
    if declared is not None:
        return find_points(model, declared)
    blocks = (
        [name for name, _ in repeated(model)[:-1]]
        or activations(model)
        or [behind for _, behind in layers(model)[:-1]]
    )
    if not blocks:
        names = [name for name, _ in model.named_modules() if name]
        known = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise ValueError(
            f"points = 'blocks' finds no repeated block in {type(model).__name__}, and no two layers with parameters; "
            "name the submodules whose output receives feedback: points=[...], in a "
            f"configuration trainer.points=[...], from {known or 'a model that has submodules'}"
        )
    return tuple(blocks)


def repeated(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost modules of the most frequent classes with submodules, at least two, with their names."""
    candidates = list(_composites(model, ""))
    counts = Counter(type(module) for _, module in candidates)
    while candidates and max(counts.values()) < 2:  # look one level deeper
        candidates = [found for name, module in candidates for found in _composites(module, f"{name}.")]
        counts = Counter(type(module) for _, module in candidates)
    if not candidates:
        return []
    most = max(counts.values())
    return [(name, module) for name, module in candidates if counts[type(module)] == most]


def _composites(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the nearest modules below one that have children and parameters; containers are looked into."""
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            yield from _composites(child, f"{prefix}{name}.")
        elif next(child.children(), None) is not None and next(child.parameters(), None) is not None:
            yield prefix + name, child


def activations(model: nn.Module) -> list[str]:
    """Return the activation modules that a parameterised leaf follows, in the order of definition."""
    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    last = max((n for n, (_, leaf) in enumerate(leaves) if list(leaf.parameters())), default=0)
    return [
        name
        for number, (name, leaf) in enumerate(leaves)
        if name
        and number < last
        and type(leaf).__module__ == "torch.nn.modules.activation"
        and not isinstance(leaf, nn.MultiheadAttention)
    ]


def layers(model: nn.Module) -> list[tuple[str, str]]:
    """Return the layers with a matrix of parameters, in the order of definition, each with the norm that follows it.

    A layer is a submodule that torch calls: one without submodules of its own, or attention. An embedding is none. If
    no norm follows, the layer's name stands twice.
    """
    found: list[tuple[str, str]] = []
    inside = "-"
    for name, module in model.named_modules():
        if not name or name.startswith(inside) or type(module).forward is nn.Module.forward:
            continue
        attends = isinstance(module, nn.MultiheadAttention)
        if attends:
            inside = f"{name}."  # its output layer is not called
        elif list(module.children()) or isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if attends or any(parameter.ndim >= 2 for parameter in module.parameters(recurse=False)):
            found.append((name, name))
        elif found and list(module.parameters(recurse=False)):
            found[-1] = found[-1][0], name
    return found


def unnormalised(calls: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Return the points whose outputs are residual sums that no normalisation follows.

    The projected error does not shrink as the stream grows, so such a stream may grow without bound.

    Args:
        calls: Name and output of each point; the autograd graph of an output says how it was computed.
    """
    return list(dict.fromkeys(name for name, output in calls if _is_unnormalised(output)))


def warn_of_unnormalised(calls: Sequence[tuple[str, Tensor]]) -> None:
    """Warn of points whose streams nothing normalises, of a user who wants plain feedback there."""
    found = [repr(name) for name in unnormalised(calls)]
    if found:
        warnings.warn(
            f"no norm follows the residual sum at feedback points {', '.join(found)}; projected errors may let it grow "
            "until the model falls to chance. Put a norm behind the sum (a post-norm block) or at the end of the "
            "branch, leave normalised out, or start the layer before the error from the feedback (start_from_feedback)",
            stacklevel=2,
        )


def _is_unnormalised(output: Tensor) -> bool:
    """Whether an output is a sum of summands that may both grow."""
    node: Any = output.grad_fn
    for _ in range(_MOST_STEPS):
        if not _keeps_scale(node):
            break
        node = node.next_functions[0][0]
    return _operation(node) == "Add" and all(_may_grow(before) for before, _ in node.next_functions)


def _may_grow(node: Any) -> bool:
    """Whether a summand is neither a bias nor the output of a normalisation."""
    return node is not None and type(node).__name__ != "AccumulateGrad" and "Norm" not in _operation(node)


def _operation(node: Any) -> str:
    """Return the name of an autograd node's operation."""
    return type(node).__name__.partition("Backward")[0]


def _keeps_scale(node: Any) -> bool:
    """Whether a node's output grows in proportion to its first input; a product with a constant does (dropout)."""
    constant = (
        _operation(node) == "Mul" and len(node.next_functions) == 2 and node.next_functions[1][0] is None
    )
    return (constant or _operation(node) in _PASSED) and bool(node.next_functions)


def is_a_stream(received: object) -> TypeGuard[Tensor]:
    """Whether what a vocabulary layer receives has positions: the layer then predicts a token at each one."""
    return isinstance(received, Tensor) and received.is_floating_point() and received.ndim >= 3


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in a module's output: a tensor, or a tuple, list or mapping of outputs."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from tensors_of(value)


def mapped(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a module's output with every floating-point tensor in it changed."""
    if isinstance(output, Tensor):
        return change(output) if output.is_floating_point() else output
    if isinstance(output, Mapping):
        return type(output)(**{key: mapped(value, change) for key, value in output.items()})
    if isinstance(output, tuple) and hasattr(output, "_fields"):  # a named tuple
        return type(output)(*(mapped(value, change) for value in output))
    if isinstance(output, tuple | list):
        return type(output)(mapped(value, change) for value in output)
    return output
