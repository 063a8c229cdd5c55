import json

import pytest

from opusim.devices.usage import Usage, UsageMeter


def test_the_meter_counts_seconds_and_joules() -> None:
    meter = UsageMeter(frame_period_us=270.0, power_w=30.0)
    meter.count(1000)
    before = meter.snapshot()
    meter.count(1000)
    assert (before.frames, before.seconds, before.joules) == pytest.approx((1000, 0.27, 8.1), rel=1e-12)
    assert meter.snapshot() - before == before
    assert before + before == meter.snapshot()
    assert Usage.from_json(json.loads(json.dumps(before.to_json()))) == before
    with pytest.raises(ValueError, match="frames = -1"):
        meter.count(-1)
