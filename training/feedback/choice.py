"""Choose where feedback enters a model: feedback points, the place of the error, and feedback through a layer norm.

The structure of a model gives the points, and the layer before which the error may be taken. Its first forward pass
decides what the structure leaves open. What the user gives or the model declares is never changed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from opusim.training.feedback.choice import (
    INPUT,
    OUTPUT,
    activations,
    find_blocks,
    find_points,
    layers,
    repeated,
    unnormalised,
)
from opusim.training.feedback.marking import require_place, warn_of_unnormalised
from opusim.training.feedback.wrapping import Wrapping

_LOG = logging.getLogger("opusim")
TRUNK = "the end of the convolutions"
_GAIN_OF_STREAMS = 0.3
_USUAL = {"error_at": OUTPUT, "normalised": False, "spread": "broadcast", "gain": 1.0}
"""What is chosen if nothing speaks for more."""


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
    """Return the one point of a convolutional model, at the end of its convolutions; None for other models."""
    names, modules, blocks = layers(model), dict(model.named_modules()), repeated(model)
    places = [n for n, (name, _) in enumerate(names[:-1]) if isinstance(modules[name], _ConvNd)]
    if not places or not all(_convolves(block) for _, block in blocks):
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


class Choosing(Wrapping):
    """Chooses arguments that are not given, and tells what was chosen; subclasses call `_choose`.

    Attributes:
        _reasons: Why each argument that was not given was chosen as it is, in a few words.
    """

    _reasons: dict[str, str]

    @property
    def chosen(self) -> dict[str, Any]:
        """Points, place of the error and feedback as arguments of this class; None is for the first pass to decide."""
        return {
            "points": self.points,
            "error_at": None if self._vocabulary is not None else self.error_at or OUTPUT,
            "normalised": self._normalised,
            "spread": "full" if self._full else "broadcast",
            "gain": self.gain,
        }

    def extra_repr(self) -> str:
        """Say where feedback enters, and why there."""
        return "\n".join(self._explained())

    def tell_choices(self) -> None:
        """Log what was chosen, and why, once for each text."""
        chosen = {name: value for name, value in self.chosen.items() if name in self._reasons}
        text = ", ".join(self._explained(only_chosen=True))
        unusual = any(_USUAL.get(name, value) != value for name, value in chosen.items())
        if text:
            unusual = unusual or self._reasons.get("points") == TRUNK
            tell(f"FeedbackAlignment takes {text}; an argument that you give wins", unusual=unusual)

    def _explained(self, *, only_chosen: bool = False) -> list[str]:
        """Return each argument with its value, and with the reason if it was chosen."""
        reasons = self._reasons
        if "error_at" in reasons and self.error_at is not None and self.error_at.endswith(INPUT):
            reasons["error_at"] = "before the vocabulary layer"
        if "normalised" in reasons:
            reasons["normalised"] = (
                f"{'a' if self._normalised else 'no'} point is an unnormalised residual sum"
            )
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

    def _look(self, calls: Sequence[tuple[str, Tensor]]) -> None:
        """See PointHooks."""
        self._normalised = bool(unnormalised(calls))
        is_chosen = "gain" in self._reasons and self.gain == _USUAL["gain"]  # it may have been set since
        if self._normalised and is_chosen:
            self.gain = _GAIN_OF_STREAMS

    def _tell(self, calls: Sequence[tuple[str, Tensor]]) -> None:
        """See PointHooks."""
        if not self.gain:
            return
        if self._normalised is False and "normalised" not in self._reasons:
            warn_of_unnormalised(calls)
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
        """Set what is given, and choose what is not; see FeedbackAlignment.

        Raises:
            ValueError: There is no such submodule, or the error's place is a point.
        """
        self._reasons = {} if normalised is not None else {"normalised": ""}
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
        self.error_at, self._vocabulary = None, None
        if error_at is None:
            declared = getattr(self.model, "error_at", False)
            if declared is not None and not isinstance(declared, str):
                self._reasons["error_at"] = "the model's output"
                self._vocabulary = vocabulary_layer(self.model, self.points)
                return
            error_at = declared or OUTPUT
        self.error_at = require_place(self.model, error_at) or None
        if self.error_at in self.points:
            raise ValueError(
                f"error_at = {error_at!r} is a feedback point too; leave it out of points, so that it receives the "
                "true gradient"
            )


@cache
def tell(text: str, *, unusual: bool) -> None:
    """Log what was chosen, each text once in a process.

    Args:
        text: What was chosen, and why.
        unusual: Whether it is more than blocks, the model's output and plain feedback: then at level WARNING, which is
            printed unless the user says otherwise, else at level INFO.
    """
    _LOG.log(logging.WARNING if unusual else logging.INFO, "opusim: %s", text)
