"""What several files of this folder use: refusals, vectors, devices with a fault, numbers of threads, a statistic."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from typer.testing import CliRunner

from opusim.camera.speckle import medium_weights
from opusim.cli import app
from opusim.noise import FluctuatingCountNoise, PhotonCountNoise

RUNNER = CliRunner(env={"COLUMNS": "200"})
SILENT: dict[str, Any] = {"shot_noise": False, "full_well_e": None, "read_noise_e": 0.0, "adc_bits": None}
"""A camera's sensor without noise, saturation and rounding; its fixed pattern stays."""
EXACT: dict[str, Any] = {
    "product": {"output_std": 0.0, "current_std": 0.0, "ir_drop": 0.0},
    "converter": {"dac_bits": None, "adc_bits": None, "adc_bound": None},
    "programming_us": None,
    "drift": None,
    "low_frequency": None,
}
"""A crossbar without any imperfection: what runs on it must be the digital product."""


def refuses(error: type, words: str, call: Callable[..., Any], /, *given: Any, **named: Any) -> str:
    """Return what a call's error says; it is of this class, and one line in which the pattern `words` is found."""
    with pytest.raises(error, match=words) as caught:
        call(*given, **named)
    said = str(caught.value)
    assert "\n" not in said
    return said


def ternary(rows: int, width: int, seed: int) -> torch.Tensor:
    """Random rows of -1, 0 and 1, float32."""
    return torch.randint(-1, 2, (rows, width), generator=torch.Generator().manual_seed(seed)).float()


def binary_rows(width: int, step: int = 1) -> torch.Tensor:
    """Every binary row of a width, or each `step`-th of them, float32."""
    return torch.tensor([[(k >> i) & 1 for i in range(width)] for k in range(0, 2**width, step)]).float()


def changed(base: type, **changes: Any) -> type:
    """A subclass with other methods or attributes."""
    return type(base.__name__, (base,), changes)


def with_threads(call: Callable[[], Any], *counts: int) -> list[Any]:
    """What a call returns with each number of threads."""
    before, found = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            found.append(call())
    finally:
        torch.set_num_threads(before)
    return found


def z_of_variance(values: np.ndarray, variance: Any) -> float:
    """Standard errors between the mean squared deviation and its law's, from the sample's own fourth moment."""
    square = np.square(values - values.mean(axis=0)) * len(values) / (len(values) - 1) / variance
    return float((square.mean() - 1) / (square.std() / square.size**0.5))


def covariance_of_media(one: float, other: float) -> float:
    """Of the medium at two grid points, exact: media of different epochs are independent."""
    left, right = dict(medium_weights(one)), dict(medium_weights(other))
    return sum(weight * right.get(epoch, 0.0) for epoch, weight in left.items())


def moments_agree(twin: Any, x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> bool:
    """Whether 3,000 readings of each vector have these moments, at five standard errors of the family.

    The power of a frame is common to all outputs, so that each vector's mean and variance are tested output by output
    at Bonferroni's level.
    """
    count = 3000
    y = torch.stack([twin.project(row.expand(count, -1).contiguous()) for row in x], dim=1).double()
    limit = float(chi2.isf(6e-7 / variance.numel(), 1) ** 0.5)
    z = (y.mean(0) - mean) * (count / variance).sqrt()
    kurtosis = ((y - y.mean(0)) ** 4).mean(0) / y.var(0) ** 2
    ratios = (y.var(0) / variance - 1) / ((kurtosis - 1) / count).sqrt()
    return bool(z.abs().max() < limit and ratios.abs().max() < 1.2 * limit)


def boxes_hold(twin: Any, x: torch.Tensor, tight: float) -> tuple[np.ndarray, np.ndarray]:
    """Return rates of the frames of vectors, and largest ones; they lie in the law's boxes, as variances do.

    Args:
        twin: a camera.
        x: every vector, or many.
        tight: share of the largest rates that some rate exceeds.
    """
    law, rates = twin.noise, twin.frame_rates(x)
    assert isinstance(law, PhotonCountNoise | FluctuatingCountNoise)
    low, high = np.asarray(law.rate_low)[:, None], np.asarray(law.rate_high)[:, None]
    assert np.all((rates >= low) & (rates <= high))
    assert not np.all(rates <= tight * high)
    least, largest = law.variance_bounds()
    variance = twin.reading_variance(x).numpy()
    assert np.all((least <= variance * (1 + 1e-9)) & (variance <= largest * (1 + 1e-9)))
    return rates, high


def run_device(*words: object, code: int = 0) -> str:
    """Return what a command of `opusim device` prints; it ends with this exit code."""
    done = RUNNER.invoke(app, [*map(str, words)])
    assert done.exit_code == code, done.output
    return done.stdout


def device_refuses(error: type, said: str, *words: object) -> None:
    """Check that a command of `opusim device` ends with an error of this class, which says so."""
    refuses(error, said, RUNNER.invoke, app, [*map(str, words)], catch_exceptions=False)


def spent_by(device: Any, call: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
    """Return what a device was used for by a call."""
    before = device.usage
    call(*given, **named)
    return device.usage - before
