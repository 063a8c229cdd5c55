"""The batch at hand in a private loop: its physical batches, the passes on them, and what the user received."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from opusim.plugins import Deferred
from opusim.training.networks.record_gradients.recorder import Recorder

stats = Deferred("scipy.stats")

OVERFLOW = 1e-9
"""Chance, at most, that a step needs more than its fixed number of physical batches, which time can tell."""
FIXED_FROM = 1024
"""Expected records of a batch from which physical batches are fixed on a processor, too: they cost a fifth there."""

Gradients = Sequence[tuple[Tensor, Tensor]]
"""Outputs as the user received them, and the gradients of the records' summed losses there."""


@dataclass(frozen=True, kw_only=True)
class PhysicalBatches:
    """How each process runs its part of a step's records: forward and backward passes on a few of them at a time.

    Attributes:
        size: Records in a pass at most; None for all.
        count: How often a pass runs in each step, whatever was drawn: rows of weight zero fill the passes up to `size`.
            None if only the drawn records run.
    """

    size: int | None = None
    count: int | None = None

    @classmethod
    def fixed(cls, most: int, *, size: int | None) -> PhysicalBatches:
        """Return the least equal batches that hold a number of records.

        Args:
            most: Records that the batches hold, at least 1.
            size: Records in a pass at most; None for all.
        """
        count = 1 if size is None else -(-most // size)
        return cls(size=-(-most // count), count=count)

    def rows(self, records: int) -> int:
        """Return the rows that run for a number of drawn records; more batches run if they do not fit."""
        if self.count is None or self.size is None:
            return records
        return self.size * max(self.count, -(-records // self.size))


def most_records(expected: float, *, records: int | None, processes: int) -> int:
    """Return how many records of a step one process holds, exceeded with a chance of at most `OVERFLOW`.

    The step draws M records, Binomial(n, b / n). If n is private, M stands for Poisson(b), whose upper tail is above
    that of each such binomial law (Anderson and Samuels 1967), so that the number tells nothing of n.

    Args:
        expected: b, above 0.
        records: n, or None if it is private.
        processes: Which share the step's records as equally as they can.
    """
    law = stats.poisson(expected) if records is None else stats.binom(records, min(expected / records, 1.0))
    return max(1, -(-int(law.isf(OVERFLOW)) // processes))


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
        records: Its rows.
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
