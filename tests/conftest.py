import os
import secrets

import hypothesis
import numba
import pytest

FRESH = os.environ.get("OPUSIM_FRESH_SEEDS") == "1"
hypothesis.settings.register_profile("opusim", deadline=None, derandomize=not FRESH, database=None)
hypothesis.settings.load_profile("opusim")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what would take hours in plain Python and repeats what the kernels' own tests show."""
    if numba.config.DISABLE_JIT:
        left_out = pytest.mark.skip(reason="the kernels are not compiled, and it takes millions of numbers")
        for item in items:
            if item.get_closest_marker("compiled"):
                item.add_marker(left_out)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fixed seed; a fresh one, printed, where OPUSIM_FRESH_SEEDS asks for it (nightly)."""
    if not FRESH:
        return 20260101
    value = secrets.randbits(32)
    print(f"{request.node.nodeid}: seed {value}")
    return value
