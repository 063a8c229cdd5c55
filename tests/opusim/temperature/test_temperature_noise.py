"""Temperature to noise and back, and dark current's two laws."""

import numpy as np
import pytest
import torch

from opusim.devices.registry import open_device
from opusim.errors import ConfigError
from opusim.temperature.dark_current import DoublingDarkCurrent, TableDarkCurrent
from opusim.temperature.noise import temperature_noise

WINDOW = {"n_inputs": 10, "n_outputs": 500}
X = torch.randint(-1, 2, (6, 10), generator=torch.Generator().manual_seed(3)).float()
DOUBLING = DoublingDarkCurrent(
    dark_current_ref_e_per_s=30.0,
    temperature_ref_c=25.0,
    doubling_k=6.5,
    temperature_min_c=-30.0,
    temperature_max_c=60.0,
)
TABLE = TableDarkCurrent(temperatures_c=(-20.0, 10.0, 50.0), dark_currents_e_per_s=(0.27, 2.7, 81.0))


@pytest.mark.parametrize("law", [DOUBLING, TABLE])
def test_each_law_inverts_itself(law: DoublingDarkCurrent | TableDarkCurrent) -> None:
    for t in np.linspace(law.temperature_min_c, law.temperature_max_c, 7):
        assert law.temperature_c(law.current_e_per_s(t)) == pytest.approx(t, abs=1e-9)
    with pytest.raises(
        ValueError, match="cannot be reached by temperature, .* change the exposure or the bias light"
    ):
        law.temperature_c(1e9)
    with pytest.raises(ValueError, match="temperature_c = 99"):
        law.current_e_per_s(99.0)


def test_the_laws_are_what_they_say() -> None:
    assert DOUBLING.current_e_per_s(25.0 + 6.5) == pytest.approx(60.0)
    assert TABLE.current_e_per_s(-5.0) == pytest.approx(0.27 * 10**0.5)
    with pytest.raises(ValueError, match="strictly increasing"):
        TableDarkCurrent(temperatures_c=(0.0, 0.0), dark_currents_e_per_s=(1.0, 2.0))
    with pytest.raises(ValueError, match="one for each of the 2 temperatures_c"):
        TableDarkCurrent(temperatures_c=(0.0, 1.0), dark_currents_e_per_s=(1.0, 2.0, 3.0))


def test_a_table_replaces_the_doubling_law_in_a_description() -> None:
    table = {"temperatures_c": [0.0, 50.0], "dark_currents_e_per_s": [2.7, 270.0]}
    with open_device("camera_low_light", camera={"dark": {"table": table}}, **WINDOW) as device:
        assert device.exposure.dark_current_e == pytest.approx(0.2 * 27.0)
        assert device.description.provenance["camera.dark.table.temperatures_c"].status == "override"


def test_noise_at_another_temperature_is_that_of_a_device_at_it() -> None:
    with open_device("camera_low_light", camera={"anchor": {"frames": 0}}, **WINDOW) as device:
        law = temperature_noise(device, X)
    for t in (-30.0, 25.0, 60.0):
        settings = {"anchor": {"frames": 0}, "dark": {"temperature_c": t}}
        with open_device("camera_low_light", camera=settings, **WINDOW) as warm:
            assert law.std(t) ** 2 == pytest.approx(float(warm.reading_variance(X).mean()), rel=1e-9)
    assert law.std(60.0) > 1.5 * law.std(-30.0)  # temperature visibly matters on this preset


def test_temperature_comes_back_from_the_noise() -> None:
    with open_device("camera_low_light", **WINDOW) as device:
        law = temperature_noise(device, X)
    for t in (-30.0, 0.0, 41.5, 60.0):
        assert law.temperature_c(law.std(t)) == pytest.approx(t, abs=1e-4)
        assert 0 < law.dark_share(t) < 1
    with pytest.raises(ValueError, match="cannot be reached by temperature"):
        law.temperature_c(100.0)


def test_what_temperature_cannot_set_is_refused() -> None:
    with (
        open_device("camera", camera={"dark": None}, **WINDOW) as device,
        pytest.raises(ConfigError, match="camera.dark: is off"),
    ):
        temperature_noise(device, X)
    with (
        open_device("camera", camera={"sensor": {"shot_noise": False}}, **WINDOW) as device,
        pytest.raises(ConfigError, match="dark current makes no noise"),
    ):
        temperature_noise(device, X)
