"""Choose where feedback enters a model: feedback points, the place of the error, and feedback through a layer norm.

The structure of a model gives the points, and the layer before which the error may be taken. Its first forward pass
decides what the structure leaves open. Arguments that the user gives or the model declares are never changed.
"""

from __future__ import annotations

import fnmatch
import logging
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

# Residual streams that no normalisation bounds: the projected error does not shrink as such a stream grows, so it may
# grow without bound. A point is in one if its output is a residual sum, which its autograd graph shows
# (`unnormalised`), or is added to a residual sum later, as that of a branch in x + branch(norm(x)) is (`Followed`).

_PASSED = (
    *("View", "UnsafeView", "Reshape", "Transpose", "Permute"),
    *("Clone", "ToCopy", "NativeDropout", "Relu", "Gelu", "Silu"),
)
"""Names of autograd nodes, before "Backward", that leave a residual sum unnormalised."""
_MOST_STEPS = 6
_SUMS = ("add", "radd", "iadd")
"""Names of torch's functions and operators, without underscores, that add two tensors."""
_FACTORS = ("mul", "rmul", "imul", "div", "idiv", "itruediv", "truediv")
_KEPT = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "relu", "gelu", "silu"),
    *("view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute"),
    *("clone", "contiguous", "to", "float", "half", "bfloat16", "double", "type", "type_as"),
)
"""Names of functions whose output grows in proportion to their first argument."""
_NORMS = (
    *("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "normalize"),
    *("mean", "var", "std", "var_mean", "norm", "pow", "square"),
)
"""Names of functions that normalise, or that a normalisation written out begins with."""


def unnormalised(calls: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Return the points whose outputs, by their graph, are residual sums that no normalisation follows."""
    found: dict[str, None] = {}
    for name, output in calls:
        node = _source(output.grad_fn)
        # A sum of summands that may both grow: neither is a bias or the output of a normalisation.
        if _operation(node) == "Add" and all(
            before is not None
            and type(before).__name__ != "AccumulateGrad"
            and "Norm" not in _operation(before)
            for before, _ in node.next_functions
        ):
            found[name] = None
    return list(found)


def _source(node: Any) -> Any:
    """Return the autograd node to whose output that of a node is proportional."""
    for _ in range(_MOST_STEPS):
        # a product with a constant keeps the scale, as in dropout
        before: Any = node.next_functions if node is not None else ()
        constant = _operation(node) == "Mul" and len(before) == 2 and before[1][0] is None
        if not before or not (constant or _operation(node) in _PASSED):
            break
        node = before[0][0]
    return node


def _operation(node: Any) -> str:
    """Return the name of an autograd node's operation."""
    return type(node).__name__.partition("Backward")[0]


@dataclass(eq=False)
class _Use:
    """How a pass uses a point's output: summed with one that may grow, read by a normalisation, or added as it is."""

    summed: bool = False
    normalised: bool = False
    added: bool = False


class Followed:
    """Follows the outputs of points through one forward pass, to find those that are added to a residual stream.

    A tensor that is followed is of a class of its own until `end`, so that torch hands over the functions that take it;
    values, gradients and all other tensors stay as they are.
    """

    def __init__(self) -> None:
        self._uses: list[_Use] = []
        self._tensors: list[weakref.ref[Tensor]] = []

    def start(self, returned: Tensor, computed: Tensor) -> None:
        """Follow what a point returns (`computed` has its graph), unless a normalisation at its end bounds it."""
        if _grows(computed) and type(returned) is Tensor:
            self.follow(returned, self.use())

    def use(self, *, summed: bool = False) -> _Use:
        """Return a new record of uses."""
        self._uses.append(_Use(summed=summed))
        return self._uses[-1]

    def follow(self, tensor: Tensor, use: _Use) -> None:
        """Note the uses of a tensor in this record."""
        if type(tensor) is Tensor:
            tensor.__class__ = _FollowedTensor
            self._tensors.append(weakref.ref(tensor))
        if type(tensor) is _FollowedTensor:
            tensor.followed, tensor.use = self, use

    def end(self) -> bool:
        """Stop, and return whether a point is added to an unnormalised stream.

        A residual stream x + branch(norm(x)) is read by a normalisation and added to the next branch as it is. In a
        post-norm block, norm(x + branch(x)), only the normalisation takes the sum; without norms, none takes it.
        """
        for reference in self._tensors:
            _release(reference())
        self._tensors = []
        return any(use.summed and use.normalised and use.added for use in self._uses)


class _FollowedTensor(Tensor):
    """A tensor whose uses are noted."""

    followed: Followed
    use: _Use

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Compute as with plain tensors, and note how those that are followed are used."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        followed = [tensor for tensor in tensors if type(tensor) is cls]
        if any(kind is not cls for kind in types):  # another class that says how its tensors are computed
            for tensor in followed:
                _release(tensor)
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            if followed and any(isinstance(leaf, Tensor) for leaf in tree_leaves(found)):
                name = getattr(func, "__name__", "").strip("_")
                owner, use = followed[0].followed, followed[0].use
                constant = len(followed) == 1 and all(t.is_leaf for t in tensors if t is not followed[0])
                if name in _SUMS:
                    if sum(map(_grows, tensors)) > 1:
                        for tensor in followed:
                            tensor.use.added = True
                        use = owner.use(summed=True)
                    owner.follow(found, use)
                elif name in _KEPT or (name in _FACTORS and constant):
                    owner.follow(found, use)
                else:
                    for tensor in followed:
                        tensor.use.normalised |= name in _NORMS
                    _release(found)  # if it was changed in place
        return found


def _grows(tensor: Tensor) -> bool:
    """Return whether a tensor is an activation that no normalisation bounds: followed, or computed from parameters."""
    if type(tensor) is _FollowedTensor:
        return True
    return tensor.grad_fn is not None and "Norm" not in _operation(_source(tensor.grad_fn))


def _release(tensor: Any) -> None:
    """Give a tensor that is followed its own class back."""
    if type(tensor) is _FollowedTensor:
        del tensor.followed, tensor.use
        tensor.__class__ = Tensor  # type: ignore[assignment]


INPUT = ".input"
"""Suffix of a submodule's name in `error_at`: the error is taken at its input instead of its output."""
OUTPUT = ""
"""`error_at` for the output of the whole model, which has this name in `named_modules`."""
_CONTAINERS = (nn.Sequential, nn.ModuleList)


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
        if isinstance(entry, str):  # `*` stays within one part of a name, as in a path
            wanted, label = entry.split("."), repr(entry)
            parts = {name: name.split(".") for name in modules if name.count(".") == entry.count(".")}
            found = {name for name, own in parts.items() if all(map(fnmatch.fnmatchcase, own, wanted))}
        elif isinstance(entry, type) and issubclass(entry, nn.Module):
            found, label = {name for name, m in modules.items() if isinstance(m, entry)}, entry.__name__
        else:
            raise TypeError(f"points holds {entry!r}; give names, patterns or classes of submodules")
        if not found:
            raise ValueError(f"points: no submodule is {label}; {_some_names(modules, str(entry))}")
        chosen |= found
    return tuple(name for name in modules if name in chosen)


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
       The search enters Sequential and ModuleList.
    3. Without repeated blocks: every activation module that a parameterised module follows, as in an MLP.
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
    """Yield the nearest modules below one that have children and parameters; the search enters containers."""
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


def is_a_stream(received: object) -> TypeGuard[Tensor]:
    """Return whether what a vocabulary layer receives has positions: the layer then predicts a token at each one."""
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
    """Apply a change to every floating-point tensor in a module's output."""
    if isinstance(output, Tensor):
        return change(output) if output.is_floating_point() else output
    if isinstance(output, Mapping):
        return type(output)(**{key: mapped(value, change) for key, value in output.items()})
    if isinstance(output, tuple) and hasattr(output, "_fields"):  # a named tuple
        return type(output)(*(mapped(value, change) for value in output))
    if isinstance(output, tuple | list):
        return type(output)(mapped(value, change) for value in output)
    return output


_LOG = logging.getLogger("opusim")
TRUNK = "the end of the convolutions"
_GAIN_OF_STREAMS = 0.3
_USUAL = {"error_at": OUTPUT, "normalised": False, "spread": "broadcast", "gain": 1.0}
"""The usual values; a choice of another one is logged at level WARNING."""


class ChosenPoints(NamedTuple):
    """Feedback points that suit a model, how a row of the error reaches positions (`spread`), and why."""

    names: tuple[str, ...]
    spread: Literal["broadcast", "full"]
    reason: str


def choose_points(model: nn.Module) -> ChosenPoints:
    """Return the feedback points that suit a model.

    They are those of `find_blocks`, except in a convolutional model: it has one point, after its last convolution
    before the head. Convolutions keep weights from aligning with a random projection (Refinetti et al., "Align, then
    memorise", 2021), so that each further point costs accuracy. If the head has weights of its own for each position,
    each position has its own outputs of B, too.

    Raises:
        ValueError: There are none.
    """
    found = find_blocks(model)
    if getattr(model, "feedback_points", None) is not None:
        return ChosenPoints(found, "broadcast", "declared by the model")
    trunk = _convolutions(model)
    if trunk is not None:
        return trunk
    if repeated(model):
        return ChosenPoints(found, "broadcast", "the repeated blocks but the last")
    return ChosenPoints(
        found, "broadcast", "the activations" if activations(model) else "the layers but the last"
    )


def _convolutions(model: nn.Module) -> ChosenPoints | None:
    """Return the one point of a convolutional model, at the end of its convolutions; None for other models."""
    names, modules, blocks = layers(model), dict(model.named_modules()), repeated(model)
    places = [n for n, (name, _) in enumerate(names[:-1]) if isinstance(modules[name], _ConvNd)]
    if not places or not all(any(isinstance(m, _ConvNd) for m in block.modules()) for _, block in blocks):
        return None
    (layer, behind), (head, _) = names[places[-1]], names[places[-1] + 1]
    last = f"{blocks[-1][0]}." if blocks else "-"
    if head.startswith(last):  # the last block ends the model, and learns from the true gradient
        return ChosenPoints((blocks[-2][0],), "broadcast", TRUNK)
    if layer.startswith(last):
        behind = blocks[-1][0]
    else:
        order = list(modules)
        between = order[order.index(layer) : order.index(head)]
        behind = next((name for name in activations(model) if name in between), behind)
    channels, wanted = modules[layer].out_channels, getattr(modules[head], "in_features", 0)
    own = wanted > channels and wanted % channels == 0
    return ChosenPoints((behind,), "full" if own else "broadcast", TRUNK)


def vocabulary_layer(model: nn.Module, points: Sequence[str]) -> str | None:
    """Return the name of the linear layer, outside the points, that gives a score to each token, or None.

    It shares its weight with an embedding, or is the last linear layer and has an output for each entry of one.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not any(f"{name}.".startswith(f"{point}.") for point in points)
    ]
    for name, linear in linears:
        if any(linear.weight is embedding.weight for embedding in embeddings):
            return name
    if linears and linears[-1][1].out_features in {embedding.num_embeddings for embedding in embeddings}:
        return linears[-1][0]
    return None


def starting_at(layer: str) -> str:
    """Return the calls that let feedback start as the gradient of a linear layer, in a loop and in a run."""
    return (
        f"model.start_from_feedback({layer!r}) before training, so that feedback starts as the gradient of this layer "
        f"(opusim train: the module's attribute feedback_start = {layer!r}, and model.initial_output=feedback)"
    )


class Choosing:
    """Chooses arguments that are not given, and logs the choices; subclasses call `_choose`.

    Attributes:
        model: The module whose submodules are points.
        points: Names of the points.
        error_at: Name of the submodule whose output carries the error, or "NAME.input" for its input; None for the
            model's output.
        gain: Factor on the feedback.
    """

    model: nn.Module
    gain: float
    _normalised: bool | None

    @property
    def unstarted(self) -> str | None:
        """Name of the layer that `start_from_feedback` suits and has not set; None if there is none, or no size yet."""
        return None

    @property
    def chosen(self) -> dict[str, Any]:
        """Points, place of the error and feedback as arguments of this class; None if the first pass will decide."""
        return {
            "points": self.points,
            "error_at": None if self._vocabulary is not None else self.error_at or OUTPUT,
            "normalised": self._normalised,
            "spread": "full" if self._full else "broadcast",
            "gain": self.gain,
        }

    def extra_repr(self) -> str:
        """Say where feedback enters, and why there."""
        start = self.unstarted
        return "\n".join([*self._explained(), *([] if start is None else [starting_at(start)])])

    def tell_choices(self, *, started: bool = False) -> None:
        """Log what was chosen, and why, once for each text; unless `started`, also a layer that can be started."""
        chosen = {name: value for name, value in self.chosen.items() if name in self._reasons}
        text = ", ".join(self._explained(only_chosen=True))
        unusual = any(_USUAL.get(name, value) != value for name, value in chosen.items())
        if text:
            unusual = unusual or self._reasons.get("points") == TRUNK
            start = None if started else self.unstarted
            more = "" if start is None else f"; try {starting_at(start)}"
            tell(f"FeedbackAlignment takes {text}; an argument that you give wins{more}", unusual=unusual)

    def _explained(self, *, only_chosen: bool = False) -> list[str]:
        """Return each argument with its value, and with the reason if it was chosen."""
        reasons = self._reasons
        if "error_at" in reasons and self.error_at is not None and self.error_at.endswith(INPUT):
            reasons["error_at"] = "before the vocabulary layer"
        lines = []
        for name, value in self.chosen.items():
            if value is None:
                lines.append(f"{name}: the first forward pass decides")
            elif name in ("spread", "gain") and name in reasons and _USUAL[name] == value:
                lines += [] if only_chosen else [f"{name}={value!r}"]
            elif name in reasons:
                lines.append(f"{name}={value!r} ({reasons[name]})")
            elif not only_chosen:
                lines.append(f"{name}={value!r}")
        return lines

    def _look(self, calls: Sequence[tuple[str, Tensor]], *, added: bool) -> None:
        """Decide from the calls' outputs whether feedback is normalised; a point may be `added` to a bare stream."""
        is_sum = bool(unnormalised(calls))
        self._normalised = is_sum or added
        self._reasons["normalised"] = (
            "a point is added to an unnormalised stream"
            if added and not is_sum
            else f"{'a' if is_sum else 'no'} point is an unnormalised residual sum"
        )
        is_chosen = "gain" in self._reasons and self.gain == _USUAL["gain"]  # it may have been set since
        if self._normalised and is_chosen:
            self.gain = _GAIN_OF_STREAMS

    def _tell(self, calls: Sequence[tuple[str, Tensor]]) -> None:
        """Log the choices in the first forward pass that learns, or warn; calls have each point's name and output."""
        if not self.gain:
            return
        wants_plain = self._normalised is False and "normalised" not in self._reasons
        if wants_plain and (found := ", ".join(map(repr, unnormalised(calls)))):
            warnings.warn(
                f"no norm follows the residual sum at feedback points {found}; projected errors may let it grow until "
                "the model falls to chance. Put a norm after the sum (a post-norm block) or at the end of the branch, "
                "leave normalised out, or start the layer before the error from the feedback (start_from_feedback)",
                stacklevel=2,
            )
        self.tell_choices()

    def _choose(
        self,
        points: Any,
        *,
        error_at: str | None,
        spread: Literal["broadcast", "full"] | None,
        normalised: bool | None,
        gain: float | None,
    ) -> None:
        """Set the arguments that are given, and choose the others; see FeedbackAlignment for them and their errors."""
        self._reasons = {} if normalised is not None else {"normalised": ""}
        """The reason for each chosen argument, in a few words."""
        found = choose_points(self.model) if points is None else None
        if found is not None:
            self._reasons["points"] = found.reason
        self.points = find_points(self.model, points) if found is None else found.names
        if spread is None:
            self._reasons["spread"] = "the head has weights for each position"
            spread = "broadcast" if found is None else found.spread
        self._full, self._normalised = spread == "full", normalised
        self.gain = 1.0 if gain is None else gain
        if gain is None:
            self._reasons["gain"] = "normalised feedback is large while the stream is small"
        self.error_at: str | None = None
        self._vocabulary: str | None = None
        if error_at is None:
            declared = getattr(self.model, "error_at", False)
            if declared is not None and not isinstance(declared, str):
                self._reasons["error_at"] = "the model's output"
                self._vocabulary = vocabulary_layer(self.model, self.points)
                return
            error_at = declared or OUTPUT
        modules = dict(self.model.named_modules())
        if error_at not in modules and error_at.removesuffix(INPUT) not in modules:
            del modules[""]
            raise ValueError(f"error_at = {error_at!r} is no submodule; {_some_names(modules, error_at)}")
        self.error_at = error_at or None
        if self.error_at in self.points:
            raise ValueError(
                f"error_at = {error_at!r} is a feedback point too; leave it out of points, so that it receives the "
                "true gradient"
            )


@cache
def tell(text: str, *, unusual: bool) -> None:
    """Log what was chosen and why, each text once in a process: at WARNING, which is printed, if `unusual`."""
    _LOG.log(logging.WARNING if unusual else logging.INFO, "opusim: %s", text)
