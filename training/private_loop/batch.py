"""The batch at hand in a private loop: the module's passes on it, and what the user received of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from training.networks.record_gradients.recorder import Recorder

Gradients = Sequence[tuple[Tensor, Tensor]]
"""Outputs as the user received them, and the gradients of the records' summed losses there."""


@dataclass(kw_only=True)
class Pass:
    """One call of the module on the batch at hand.

    Attributes:
        args: Its arguments.
        kwargs: Its keyword arguments.
        attached: Its outputs with their graph, by place; empty if parts of the batch run again.
        handed: What the user received in their place.
        versions: How often torch had changed each of these in place when it was handed out.
        states: The states of torch's generators before each part, if parts run again.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    attached: dict[int, Tensor] = field(default_factory=dict)
    handed: dict[int, Tensor] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    states: list[list[Tensor]] = field(default_factory=list)

    def hand(self, place: int, output: Tensor, *, attached: Tensor | None) -> None:
        """Note an output that the user receives.

        Args:
            place: Its place among the outputs.
            output: As the user receives it.
            attached: As the module returned it, or None if parts run again.
        """
        self.handed[place], self.versions[place] = output, output._version
        if attached is not None:
            self.attached[place] = attached

    def wanted(self, gradients: Gradients) -> dict[int, Tensor]:
        """Return the gradients at its outputs, by place."""
        return {n: g for output, g in gradients for n, handed in self.handed.items() if handed is output}


@dataclass(kw_only=True)
class Batch:
    """The batch at hand.

    Attributes:
        step: Its number.
        records: Its size.
        recorder: What its passes are recorded with; None before the first, and if parts run again.
        passes: The calls of the module on it.
        written: Whether its gradients were written.
        failed: How many backward passes on it ended in an error.
    """

    step: int
    records: int
    recorder: Recorder | None = None
    passes: list[Pass] = field(default_factory=list)
    written: bool = False
    failed: int = 0

    def is_output(self, value: Tensor) -> bool:
        """Whether a tensor is an output that the user received, not changed in place."""
        return any(
            value is handed and value._version == one.versions[n]
            for one in self.passes
            for n, handed in one.handed.items()
        )

    def attached(self, gradients: Gradients) -> list[tuple[Tensor, Tensor]]:
        """Return the outputs with their graph, and the gradients at them."""
        return [(one.attached[n], g) for one in self.passes for n, g in one.wanted(gradients).items()]
