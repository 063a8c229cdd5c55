"""What all tests share: seeds, quick syncs, kernels that are not compiled or run without a card."""

import os
import random
import secrets
import signal
import zlib
from collections.abc import Iterator
from typing import NoReturn

import hypothesis
import numba
import numpy as np
import pytest
import torch

from opusim.training.networks.record_independence import seed_torch
from tests.support.killing import skip_syncs

collect_ignore_glob = ["support/third_party_*", "support/lightonopu_double", "support/own_bench"]
"""Packages that tests install: looking for examples in them would import them, and under a second name."""

FRESH = os.environ.get("OPUSIM_FRESH_SEEDS") == "1"
UNCOMPILED_S = 60
"""Longest time of a test in seconds where the kernels are not compiled."""
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a module of kernels is imported
hypothesis.settings.register_profile("opusim", deadline=None, derandomize=not FRESH, database=None)
hypothesis.settings.load_profile("opusim")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what would take hours in plain Python and only repeats what the kernels' own tests show."""
    if numba.config.DISABLE_JIT:
        left_out = pytest.mark.skip(reason="the kernels are not compiled, and it takes millions of numbers")
        for item in items:
            if item.get_closest_marker("compiled"):
                item.add_marker(left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Give a test a minute if the kernels are not compiled; one that takes longer is skipped."""
    if not numba.config.DISABLE_JIT:
        return (yield)

    def skip(*_: object) -> NoReturn:
        pytest.skip(f"the kernels are not compiled, and it takes more than {UNCOMPILED_S} s")

    before = signal.signal(signal.SIGALRM, skip)
    signal.alarm(UNCOMPILED_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session", autouse=True)
def syncs_return_at_once() -> Iterator[None]:
    """Let os.fsync check its descriptor and return: no test cuts the power, and a disk takes milliseconds for each.

    Tests of what is synced, and when, watch the calls. Nightly tests (OPUSIM_FRESH_SEEDS) and processes of their own
    do sync.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not FRESH:
            patch.setattr(os, "fsync", os.fsync)  # put back at the end
            skip_syncs()
        yield


@pytest.fixture(autouse=True)
def global_generators(request: pytest.FixtureRequest) -> None:
    """Start the shared generators of torch, numpy and random from the test's name, or a fresh seed, printed."""
    start = secrets.randbits(32) if FRESH else zlib.crc32(request.node.nodeid.encode())
    if FRESH:
        print(f"{request.node.nodeid}: shared generators start from {start}")
    seed_torch(start)
    np.random.seed(start)
    random.seed(start)


@pytest.fixture
def gpu() -> torch.device:
    """The first NVIDIA GPU; a test that asks for it is skipped where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return torch.device("cuda:0")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fixed seed, or a fresh one, printed, if OPUSIM_FRESH_SEEDS is 1 (nightly)."""
    if not FRESH:
        return 20260101
    value = secrets.randbits(32)
    print(f"{request.node.nodeid}: seed {value}")
    return value
