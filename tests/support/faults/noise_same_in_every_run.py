from __future__ import annotations

from contextlib import AbstractContextManager

from opusim.randomness.streams import NoiseStream, SeededStream
from tests.support.faults.base import STEPWISE, Fault
from tests.support.faults.streams import credited_noise


def _constant(mode: str, stream: NoiseStream) -> NoiseStream:
    return SeededStream(0, "constant") if mode == "release" else stream


def plant() -> AbstractContextManager[None]:
    return credited_noise(_constant)


FAULT = Fault(
    name="noise_same_in_every_run",
    breaks="Release mode draws its noise from a constant seed, so that anybody can take it off.",
    trainers=STEPWISE,
    protections=("record", "label-amplified", "last-iterate"),
    modes=("release",),
    checks=("noise: any two steps",),
    plant=plant,
)
