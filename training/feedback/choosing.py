"""Take arguments of feedback points or choose them by `training.feedback.choice`, and say what was chosen and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from training.feedback.choice import OUTPUT, TRUNK, choose_points, tell, vocabulary_layer
from training.feedback.marking import INPUT, find_points, require_place, warn_of_unnormalised
from training.feedback.wrapping import Wrapping


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
        }

    def extra_repr(self) -> str:
        """Say where feedback enters, and why there."""
        return "\n".join([*self._explained(), f"gain={self.gain:g}"])

    def tell_choices(self) -> None:
        """Log what was chosen, and why, once for each text."""
        if self._reasons:
            chosen = {name: value for name, value in self.chosen.items() if name in self._reasons}
            plain = {"error_at": OUTPUT, "normalised": False, "spread": "broadcast"}
            unusual = any(chosen.get(name, value) != value for name, value in plain.items())
            unusual = unusual or self._reasons.get("points") == TRUNK
            text = ", ".join(self._explained(only_chosen=True))
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
            elif name == "spread" and value == "broadcast" and name in reasons:
                continue
            elif name in reasons:
                lines.append(f"{name}={value!r} ({reasons[name]})")
            elif not only_chosen:
                lines.append(f"{name}={value!r}")
        return lines

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
