"""Faulty sources of the noise that guarantees rest on, for faults that go in wherever a run makes such a source."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from opusim.randomness.streams import NoiseStream
from tests.support.faults.base import all_replaced, replaced

CREDITED = ("central-noise", "scalar-noise", "label-noise", "private-loop", "score-noise")
"""Purposes of the streams that a guarantee rests on."""
_MAKERS = (
    "opusim.training.protections.base:noise_stream",
    "opusim.training.zeroth_order.trainer:noise_stream",
    "opusim.training.protections.noisy_labels:noise_stream",
    "opusim.training.private_loop.start:noise_stream",
    "opusim.training.sweeps.tuning:noise_stream",
)


class Wrapped(NoiseStream):
    """A stream whose draws a fault may change."""

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


@contextmanager
def changed_noise(change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Iterator[None]:
    """Change the noise of a clipped sum, one tensor for each parameter, before the parameters receive it."""

    def changed(write: Callable[..., None]) -> Callable[..., None]:
        def written(self: Any, parts: Any, **options: Any) -> None:
            found = list(parts)
            parameters, std = found[0].parameters, self._noise_std
            self._noise_std = 0.0
            write(self, found)
            sums = [parameter.grad for parameter in parameters]
            self._noise_std = std
            write(self, found)
            noise = change([p.grad - total for p, total in zip(parameters, sums, strict=True)])
            for parameter, total, own in zip(parameters, sums, noise, strict=True):
                parameter.grad = total + own

        return written

    with replaced("opusim.training.protections.record:RecordGradients._write", changed):
        yield


def on_release(kind: Callable[[NoiseStream], NoiseStream]) -> Callable[[str, NoiseStream], NoiseStream]:
    """Return a change of release mode only."""
    return lambda mode, stream: kind(stream) if mode == "release" else stream
