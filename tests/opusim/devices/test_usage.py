import json

import numpy as np
import pytest

from opusim import open_device
from opusim.description.schema import FrameSettings, load_description
from opusim.devices.usage import Usage, UsageMeter


def test_the_meter_counts_seconds_and_joules() -> None:
    meter = UsageMeter(FrameSettings(frame_period_us=270.0, power_w=30.0), 1)
    meter.count(1000)
    before = meter.snapshot()
    meter.count(1000)
    assert (before.frames, before.seconds, before.joules) == pytest.approx((1000, 0.27, 8.1), rel=1e-12)
    assert meter.snapshot() - before == before
    assert before + before == meter.snapshot()
    assert Usage.from_json(json.loads(json.dumps(before.to_json()))) == before
    with pytest.raises(ValueError, match="frames = -1"):
        meter.count(-1)


def test_a_call_of_a_thousand_vectors_takes_what_the_hardware_took() -> None:
    """4.27 to 4.40 s on a real OPU, for widths from 100 to 32,000 (opu-kernel-experiments, opu_time.npy)."""
    for name in ("camera", "camera_fitted"):
        with open_device(name, n_inputs=100, n_outputs=100) as device:
            before = device.usage
            device.intensities(np.ones((1000, 100), dtype=np.uint8))
            spent = device.usage - before
        assert spent.seconds == pytest.approx(0.5)
        assert 4.33 / 2 < spent.seconds + spent.host_seconds < 4.33 * 2
        assert spent.host_seconds > 0


@pytest.mark.parametrize(
    ("overhead", "right"),
    [({}, True), ({"host_us_per_frame": 0.0}, False), ({"frame_period_us": 5000.0}, False)],
)
@pytest.mark.parametrize("name", ["camera", "camera_fitted", "lighton_appliance"])
def test_descriptions_predict_the_measured_call_within_a_factor_of_two(
    name: str, overhead: dict[str, float], right: bool
) -> None:
    description = load_description(name, {"frames": overhead})
    assert (4.33 / 2 < description.frames.call_seconds(1000) < 4.33 * 2) is right
    source = load_description(name).dump()["provenance"]["frames.host_us_per_frame"]
    assert source["status"] == "measured"
    assert "opu_time.npy" in source["source"]


def test_the_host_adds_to_frames_and_calls() -> None:
    settings = FrameSettings(
        frame_period_us=100.0, power_w=1.0, host_us_per_frame=10.0, host_us_per_call=500.0
    )
    meter = UsageMeter(settings, 1)
    meter.count(20)
    meter.count(0)
    assert meter.snapshot().host_seconds == pytest.approx(20 * 10e-6 + 2 * 500e-6)
    assert meter.snapshot().seconds == pytest.approx(2e-3)


def test_frames_of_wide_windows_take_as_long_as_their_read_out() -> None:
    frames = {"readout_us_per_output": 0.5}
    seconds = []
    for outputs in (100, 20_000):
        with open_device("camera", n_inputs=4, n_outputs=outputs, frames=frames) as device:
            before = device.usage
            device.intensities(np.ones((10, 4), dtype=np.uint8))
            seconds.append((device.usage - before).seconds)
    assert seconds == pytest.approx([10 * 500e-6, 10 * 10_000e-6])
