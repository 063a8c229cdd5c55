"""Faults that the field's trackers report: opusim is silent about none of them."""

import pytest

from benchmarks.attacks.silent import PLANTS, PROGRAMS, judged


@pytest.mark.slow
@pytest.mark.parametrize("plant", PROGRAMS)
def test_opusim_notices_or_prevents_each_fault(plant: str) -> None:
    assert judged(plant, "opusim")["verdict"] in ("refuses", "tells", "no harm")


def test_each_fault_has_a_text() -> None:
    assert PLANTS.keys() == PROGRAMS.keys()
