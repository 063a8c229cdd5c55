import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_device


@pytest.fixture(scope="session")
def naive() -> ModuleType:
    """The slow twins; loaded by path, because tests are no package."""
    path = Path(__file__).parents[1] / "oracles" / "naive_philox.py"
    spec = importlib.util.spec_from_file_location("naive_philox", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(
    params=["ideal", "gaussian", "gaussian_temperature", "camera", "camera_low_light", "lightonml_simulated"]
)
def open_any(request: pytest.FixtureRequest) -> Callable[..., NoisyDevice]:
    """Opens a small window of each packaged device: what the contract tests run on."""

    def open_window(**options: object) -> NoisyDevice:
        return open_device(request.param, **{"n_inputs": 12, "n_outputs": 40, **options})

    return open_window
