"""Faults that the field's trackers report: opusim is silent about none of them."""

from __future__ import annotations

import pytest

from benchmarks.attacks.silent import PLANTS, Plant, judged


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.title)
def test_opusim_notices_or_prevents_each_fault(plant: Plant) -> None:
    assert judged(plant, "opusim").verdict in ("refuses", "tells", "no harm")
