"""Per-record clipping and central noise: norms against the matrices, epsilon against known values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Adjacency, Guarantee, Status, Unit
from opusim.accounting.mechanisms.records import RecordCentral

RUN = RecordCentral(noise_multiplier=1.13, sampling_probability=0.034, steps=292, clip_norm=0.7, divisor=2048)


def _only(mechanism: RecordCentral, delta: float = 1e-5) -> Guarantee:
    (guarantee,) = guarantees([mechanism], delta=delta)
    return guarantee


def test_epsilon_of_the_reference_run() -> None:
    """z 1.13, q 0.034, 292 steps, delta 1e-5: 2.986 in the reference."""
    guarantee = _only(RUN)
    assert guarantee.epsilon == pytest.approx(2.986, abs=1e-3)
    assert (guarantee.unit, guarantee.adjacency, guarantee.status) == (
        Unit.RECORD,
        Adjacency.ADD_OR_REMOVE_ONE,
        Status.PROVEN,
    )
    device = _only(replace(RUN, device_noise=True))
    assert device.status is Status.PROVEN_UNDER_DEVICE_MODEL
    assert device.epsilon == guarantee.epsilon


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier = 0.0: must be finite and above 0"),
        ({"sampling_probability": 1.5}, r"sampling_probability = 1.5: must lie in \(0, 1\]"),
        ({"steps": 0}, "steps = 0: must be at least 1"),
        ({"divisor": float("nan")}, "divisor = nan: must be finite and above 0"),
    ],
)
def test_bad_input_is_named(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(RUN, **change)
