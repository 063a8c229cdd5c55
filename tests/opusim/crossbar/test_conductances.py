"""Moments of the presets' conductances against the published formulas, and planted faults that must be found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from opusim.crossbar import conductances
from opusim.crossbar.device import Pairs
from opusim.description.schema import load_description
from tests.oracles.conductance_moments import moments

DEVICES = 2**18
TIMES_S = {"1 s": 1.0, "1 h": 3600.0, "1 d": 86400.0, "1 y": 365.25 * 86400}
SURE = 5.0


def settings_of(name: str, **changes: Any) -> Any:
    """Return a preset's section; targets stand on the positive side only."""
    settings = load_description(name, {"crossbar": changes} if changes else None).crossbar
    assert settings is not None
    return settings


def found_moments(name: str, g: float, seconds: float) -> tuple[float, float, float, float]:
    """Return mean and standard deviation of many devices, and the standard errors of both."""
    pairs = Pairs(torch.full((DEVICES // 512, 512), g), settings_of(name), chip=3, number=0)
    weights = pairs.weights(seconds, 0).double()
    mean, std = float(weights.mean()), float(weights.std())
    fourth = float(((weights - mean) / std).pow(4).mean())
    return mean, std, std / math.sqrt(DEVICES), std * math.sqrt((fourth - 1) / 4 / DEVICES)


def agrees(name: str, g: float, seconds: float) -> bool:
    """Whether mean and spread fit the formulas at five standard errors, and within 1 %."""
    mean, std, mean_error, std_error = found_moments(name, g, seconds)
    true_mean, true_std = moments(name, g, seconds)
    assert SURE * mean_error < 0.01 * true_mean
    assert SURE * std_error < 0.01 * true_std
    return abs(mean - true_mean) <= SURE * mean_error and abs(std - true_std) <= SURE * std_error


@pytest.fixture
def single(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the other device of each pair out, whose target is 0 and whose law is one-sided."""
    whole = Pairs._at

    def one_side(self: Pairs, side: torch.Tensor, *others: Any) -> torch.Tensor:
        held = whole(self, side, *others)
        return held if bool((side > 0).all()) else held.zero_()

    monkeypatch.setattr(Pairs, "_at", one_side)


@pytest.mark.compiled
@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("name", ["pcm", "hermes", "reram"])
@pytest.mark.parametrize("time", list(TIMES_S))
def test_moments_are_those_of_the_published_formulas(name: str, time: str) -> None:
    for g in (0.3, 0.62, 1.0):
        assert agrees(name, g, TIMES_S[time]), (name, g, time)


def scaled(name: str, factor: float) -> Callable[..., Any]:
    original = getattr(conductances, name)
    return lambda *arguments: original(*arguments) * factor


@pytest.mark.compiled
@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("name", ["pcm", "hermes", "reram"])
@pytest.mark.parametrize("seconds", [0.0, 86400.0, 31_557_600.0])
def test_the_stated_moments_are_those_of_devices(name: str, seconds: float) -> None:
    """Mean and spread within five standard errors and 0.5 %, which the limits that the law leaves out may take."""
    for g in (0.3, 0.62, 1.0):
        mean, std, mean_error, std_error = found_moments(name, g, seconds)
        stated, variance = conductances.moments(torch.tensor([g]), seconds, settings_of(name))
        assert abs(mean - float(stated)) <= SURE * mean_error + 0.005 * mean, (g, mean, float(stated))
        assert abs(std - float(variance) ** 0.5) <= SURE * std_error + 0.005 * std, (g, std)
        assert abs(mean - 1.02 * float(stated)) > SURE * mean_error + 0.005 * mean


@pytest.mark.compiled
@pytest.mark.usefixtures("single")
@pytest.mark.parametrize(
    ("preset", "function", "factor", "time"),
    [
        ("pcm", "spread", 1.03, "1 s"),
        ("reram", "spread", 0.97, "1 d"),
        ("hermes", "piecewise", 1.03, "1 d"),
        ("pcm", "accumulated", 1.03, "1 s"),
        ("hermes", "spread", 0.97, "1 s"),
    ],
)
def test_a_constant_that_is_3_percent_off_is_found(
    preset: str, function: str, factor: float, time: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conductances, function, scaled(function, factor))
    assert not agrees(preset, 1.0, TIMES_S[time])


@pytest.mark.compiled
def test_the_device_at_0_keeps_the_clipped_programming_noise() -> None:
    """max(sigma z, 0) has mean sigma / sqrt(2 pi); both sides of a pair have it, so that weights of 0 stay centred."""
    settings = settings_of("pcm", drift=None, low_frequency=None)
    pairs = Pairs(torch.zeros(512, 512), settings, chip=3, number=0)
    weights = pairs.weights(0.0, 0).double()
    sigma = 0.26348 / 25.0
    std = sigma * math.sqrt(1 - 1 / math.pi)  # twice the variance of one side, sigma^2 (1/2 - 1/(2 pi))
    error = std / math.sqrt(weights.numel())
    assert abs(float(weights.mean())) <= SURE * error
    assert abs(float(weights.std()) / std - 1) <= SURE * math.sqrt(3 / (4 * weights.numel()))
    assert abs(float(weights.std()) / sigma - 1) > 0.1  # the spread without clipping


def test_1_over_f_noise_is_new_at_each_look_and_the_rest_stays() -> None:
    wanted = torch.full((64, 64), 0.8)
    pairs = Pairs(wanted, settings_of("pcm"), chip=3, number=0)
    assert torch.equal(pairs.weights(60.0, 1), pairs.weights(60.0, 1))
    one, other = pairs.weights(60.0, 1), pairs.weights(60.0, 2)
    assert not torch.equal(one, other)
    still = Pairs(wanted, settings_of("pcm", low_frequency=None), chip=3, number=0)
    assert torch.equal(still.weights(60.0, 1), still.weights(60.0, 2))
    together = float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])
    assert together > 0.5  # programming and drift are shared


def test_realised_weights_are_exact_in_short_sums() -> None:
    weights = Pairs(torch.rand(8, 700) * 2 - 1, settings_of("hermes"), chip=3, number=0).weights(5.0, 1)
    assert torch.equal(weights * 2**14, (weights * 2**14).round())
