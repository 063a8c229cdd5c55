"""Choose where feedback enters a model: feedback points, the place of the error, and feedback through a layer norm.

The structure of a model gives the points, and the layer before which the error may be taken. Its first forward pass
decides what the structure leaves open. What the user gives or the model declares is never changed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple, TypeGuard

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from training.feedback.marking import activations, find_blocks, layers, repeated, unnormalised

_LOG = logging.getLogger("opusim")
OUTPUT = ""
"""As `error_at`: the output of the whole model, which has this name in `named_modules`."""
TRUNK = "the end of the convolutions"


class ChosenPoints(NamedTuple):
    """Feedback points that suit a model.

    Attributes:
        names: Their names.
        spread: How one row of the error reaches a record's positions.
        reason: Why they were chosen, in a few words.
    """

    names: tuple[str, ...]
    spread: Literal["broadcast", "full"]
    reason: str


def choose_points(model: nn.Module) -> ChosenPoints:
    """Return the feedback points that suit a model.

    They are those of `find_blocks`, but for convolutions: these have one point, behind the last one before the head.
    Their structure keeps weights from aligning with a random projection (Refinetti et al., "Align, then memorise",
    2021), so that each further point costs accuracy. If the head has weights of its own for each position, each
    position has its own outputs of B, too.

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
    """Return the point behind the last convolution before the head, or None for a model of other layers."""
    names = layers(model)
    modules = dict(model.named_modules())
    places = [n for n, name in enumerate(names) if isinstance(modules[name[0]], _ConvNd)]
    blocks = repeated(model)
    if not places or places[-1] == len(names) - 1 or not all(map(_convolves, dict(blocks).values())):
        return None
    (layer, behind), (head, _) = names[places[-1]], names[places[-1] + 1]
    if blocks:
        if not f"{layer}.".startswith(f"{blocks[-1][0]}."):
            return None
        behind = blocks[-1][0]
    else:
        order = list(modules)
        between = order[order.index(layer) : order.index(head)]
        behind = next((name for name in activations(model) if name in between), behind)
    channels, wanted = modules[layer].out_channels, getattr(modules[head], "in_features", 0)
    own = wanted > channels and wanted % channels == 0
    return ChosenPoints((behind,), "full" if own else "broadcast", TRUNK)


def _convolves(block: nn.Module) -> bool:
    """Whether a block holds convolutions."""
    return any(isinstance(module, _ConvNd) for module in block.modules())


def vocabulary_layer(model: nn.Module, points: Sequence[str]) -> str | None:
    """Return the name of the linear layer that gives a score to each token, or None if no layer looks like one.

    It shares its weight with an embedding, or is the last linear layer and has an output for each entry of one.

    Args:
        model: The model.
        points: Its feedback points, whose parts are no such layer.
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


def is_a_stream(received: object) -> TypeGuard[Tensor]:
    """Whether what a vocabulary layer receives has positions: the layer then predicts a token at each one."""
    return isinstance(received, Tensor) and received.is_floating_point() and received.ndim >= 3


def needs_norm(calls: Sequence[tuple[str, Tensor]]) -> bool:
    """Whether a point's output is a residual sum that nothing normalises, so that its stream may grow."""
    return bool(unnormalised(calls))


@cache
def tell(text: str, *, unusual: bool) -> None:
    """Log what was chosen, each text once in a process.

    Args:
        text: What was chosen, and why.
        unusual: Whether it is more than blocks, the model's output and plain feedback: then at level WARNING, which is
            printed unless the user says otherwise, else at level INFO.
    """
    _LOG.log(logging.WARNING if unusual else logging.INFO, "opusim: %s", text)
