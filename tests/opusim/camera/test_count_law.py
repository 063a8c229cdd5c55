"""The counts of readings at other operating points, against devices that are described so."""

import numpy as np
import pytest
import torch

from opusim.camera.exposure import OperatingPoint
from opusim.devices.registry import open_device
from opusim.errors import ConfigError

X = torch.tensor([[1, 0, -1, 0], [0, 1, 1, -1]]).float()
WINDOW = {"n_inputs": 4, "n_outputs": 50}
EXACT = {"anchor": {"frames": 0}}


@pytest.mark.parametrize(
    ("point", "described"),
    [
        (OperatingPoint(), {}),
        (OperatingPoint(temperature_c=47.0), {"dark": {"temperature_c": 47.0}}),
        (OperatingPoint(light=0.27), {"light": {"anchor_flux_per_s": 0.27 * 1250}}),
        (OperatingPoint(exposure=0.27), {"light": {"exposure_us": 0.27 * 200_000}}),
        (OperatingPoint(bias_e=2.7), {"light": {"bias_flux_per_s": 2.7 / 0.8 / 0.2}}),
        (
            OperatingPoint(temperature_c=0.0, light=0.1, exposure=0.5, bias_e=1.6),
            {
                "light": {"anchor_flux_per_s": 125.0, "exposure_us": 100_000, "bias_flux_per_s": 10.0},
                "dark": {"temperature_c": 0.0},
            },
        ),
    ],
)
def test_a_point_is_the_device_described_so(point: OperatingPoint, described: dict[str, object]) -> None:
    with open_device("camera_low_light", **WINDOW, camera=EXACT) as device:
        law = device.count_law(X)
    with open_device("camera_low_light", **WINDOW, camera=EXACT | described) as device:
        np.testing.assert_allclose(law.rates(point), device.frame_rates(X), rtol=1e-12)
        assert law.std(point) == pytest.approx(float(device.reading_variance(X).mean().sqrt()), rel=1e-12)
        assert law.dark_e(point) == pytest.approx(device.exposure.dark_current_e)


def test_a_points_numbers_are_checked() -> None:
    for wrong in ({"light": 0.0}, {"exposure": -1.0}, {"bias_e": -0.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            OperatingPoint(**wrong)
    silent = EXACT | {"sensor": {"shot_noise": False}}
    with (
        open_device("camera_low_light", **WINDOW, camera=silent) as device,
        pytest.raises(ConfigError, match="counts have no law; switch it on"),
    ):
        device.count_law(X)
