from collections.abc import Callable

import pytest

from opusim import NoisyDevice, open_device


@pytest.fixture(params=["ideal", "gaussian", "camera", "camera_low_light", "lightonml_simulated"])
def open_any(request: pytest.FixtureRequest) -> Callable[..., NoisyDevice]:
    """Opens a small window of each packaged device: what the contract tests run on."""

    def open_window(**options: object) -> NoisyDevice:
        return open_device(request.param, **{"n_inputs": 12, "n_outputs": 40, **options})

    return open_window
