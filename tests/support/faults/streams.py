"""Faulty sources of the noise that guarantees rest on, for faults that go in wherever a run makes such a source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from opusim.randomness.streams import NoiseStream
from tests.support.faults.base import all_replaced

CREDITED = ("central-noise", "scalar-noise", "label-noise", "private-loop", "score-noise")
"""Purposes of the streams that a guarantee rests on."""
_MAKERS = (
    "training.protections.base:noise_stream",
    "training.zeroth_order.algorithm:noise_stream",
    "training.protections.noisy_labels:noise_stream",
    "training.private_loop.start:noise_stream",
    "training.tuning:noise_stream",
)


class Wrapped(NoiseStream):
    """A stream whose draws a fault may change.

    Args:
        stream: The right one.
    """

    def __init__(self, stream: NoiseStream) -> None:
        self.stream = stream

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        return self.stream.normal(shape, device=device)

    def seek(self, step: int) -> None:
        self.stream.seek(step)


@contextmanager
def credited_noise(change: Callable[[str, NoiseStream], NoiseStream]) -> Iterator[None]:
    """Have every credited noise come from `change(mode, right stream)`."""

    def made(maker: Callable[..., NoiseStream]) -> Callable[..., NoiseStream]:
        def make(mode: str, seed: int | None, purpose: str) -> NoiseStream:
            stream = maker(mode, seed, purpose)
            return change(mode, stream) if purpose in CREDITED else stream

        return make

    targets: dict[str, Callable[[Any], Any]] = dict.fromkeys(_MAKERS, made)
    with all_replaced(targets):
        yield


def on_release(kind: Callable[[NoiseStream], NoiseStream]) -> Callable[[str, NoiseStream], NoiseStream]:
    """Return a change of release mode only."""
    return lambda mode, stream: kind(stream) if mode == "release" else stream
