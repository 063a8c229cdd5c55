"""The counts of readings at other operating points, against devices that are described so."""

from typing import Any

import numpy as np
import pytest
import torch

from opusim.camera.exposure import OperatingPoint
from opusim.devices.registry import open_device
from opusim.errors import ConfigError, NoiseUnknown

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
        (OperatingPoint(), {"light": {"ambient_flux_per_s": 40.0}}),
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
def test_a_point_is_the_device_described_so(point: OperatingPoint, described: dict[str, Any]) -> None:
    ambient = {"light": {"ambient_flux_per_s": described.get("light", {}).get("ambient_flux_per_s")}}
    with open_device("camera_low_light", **WINDOW, camera=EXACT | ambient) as device:
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


def test_no_guarantee_rests_on_ambient_light() -> None:
    point = OperatingPoint(exposure=0.5)
    lit = EXACT | {"light": {"ambient_flux_per_s": 40.0}}
    with open_device("camera_low_light", **WINDOW, camera=EXACT) as device:
        dark = device.count_law(X)
    with open_device("camera_low_light", **WINDOW, camera=lit) as device:
        law = device.count_law(X)
    np.testing.assert_allclose(law.credited_rates(point), dark.rates(point), rtol=1e-12)
    np.testing.assert_allclose(
        law.rates(point) - dark.rates(point), np.broadcast_to(0.5 * law.ambient_e, (4, 2, 50))
    )
    assert law.std(point) > dark.std(point)


def test_a_medium_that_moves_has_no_fixed_rates() -> None:
    moving = EXACT | {"drift": {"decorrelation_s": 1e5, "seconds_per_step": 1.0}}
    with (
        open_device("camera_low_light", **WINDOW, camera=moving) as device,
        pytest.raises(NoiseUnknown, match="its medium drifts"),
    ):
        device.count_law(X)
