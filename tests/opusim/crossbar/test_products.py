"""Conductances against the published formulas, products of a crossbar against a plain loop and every code's mass."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from opusim.crossbar import device as conductances
from opusim.crossbar import device as products
from opusim.crossbar.device import Pairs, TiledProduct, add_codes
from opusim.crossbar.programmable import Converter
from opusim.description.crossbar import ProductSettings
from opusim.description.schema import load_description
from opusim.noise import rounded_variance
from opusim.randomness.streams import NoiseStream, SeededStream
from tests.opusim.common import refuses, ternary, with_threads
from tests.oracles.conductance_moments import moments

SURE = 5.0
CONVERTER = Converter(input_bits=6, output_bits=7, output_bound=2.7, tile_inputs=7)
SPREADS = {"output_std": 0.05, "weight_std": 0.03, "current_std": 0.08}
SETTINGS = ProductSettings(**SPREADS, ir_drop=1.3, ir_drop_conductance_ratio=270.0)


class Given(NoiseStream):  # gives the same numbers that the loop below uses
    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers, self.tile = numbers, -1

    def normal(self, shape: Any, **_: Any) -> torch.Tensor:
        self.tile += 1
        return self.numbers[self.tile]

    def seek(self, step: int) -> None:
        self.tile = -1


def looped(x: np.ndarray, w: np.ndarray, normal: np.ndarray) -> np.ndarray:
    """One output after the other, one tile after the other, in the order of the effects; float64."""
    total = np.zeros((len(x), len(w)))
    for row, out in np.ndindex(*total.shape):
        for tile, start in enumerate(range(0, x.shape[1], 7)):
            shown = np.round(x[row, start : start + 7] * 31) / 31
            weights, n = w[out, start : start + 7], len(w[out, start : start + 7])
            a = n / 270.0 * sum(abs(u) * abs(v) for u, v in zip(weights, shown, strict=True))
            c = 0.05 * a**3 - 0.2 * a**2 + 0.5 * a
            pairs = list(zip(weights, shown, strict=True))
            drop = sum(u * v * (1 - (1 - j / n) ** 2) for j, (u, v) in enumerate(pairs))
            mean = sum(u * v for u, v in pairs) - 1.3 * c * drop
            variance = 0.05**2 + 0.03**2 * sum(v * v for v in shown)
            variance += 0.08**2 * sum(abs(u) * v * v for u, v in pairs)
            code = round((mean + math.sqrt(variance) * normal[tile, row, out]) / (2.7 / 63))
            total[row, out] += min(max(code, -63), 63) * 2.7 / 63
    return total


def data(rows: int = 9, n: int = 17, outputs: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x, w = (torch.rand(shape, generator=generator) * 2 - 1 for shape in ((rows, n), (outputs, n)))
    return x, w, torch.randn((3, rows, outputs), generator=generator)


def test_a_product_is_that_of_the_plain_loop() -> None:
    x, w, normal = data()
    found = TiledProduct(w, CONVERTER, SETTINGS).read(x, Given(normal)).double().numpy()
    expected = looped(x.double().numpy(), w.double().numpy(), normal.double().numpy())
    moved = np.abs(found - expected) > 1e-5
    assert moved.sum() <= 1  # a sum at a rounding edge may take the other code
    assert np.abs(found - expected).max() < 1.01 * 2.7 / 63
    assert np.abs(expected).max() > 2.7  # several tiles add up
    wrong = TiledProduct(w, CONVERTER, SETTINGS.model_copy(update={"ir_drop": 1.0}))
    assert (np.abs(wrong.read(x, Given(normal)).numpy() - expected) > 1e-5).sum() > 5


def test_without_imperfections_products_are_exact_and_converters_show_codes() -> None:
    x, w, _ = data()
    found = TiledProduct(w, Converter(), ProductSettings()).read(x, SeededStream(1, "t"))
    assert torch.allclose(found, x @ w.T, atol=1e-5)
    weights = Pairs(torch.rand(8, 700) * 2 - 1, settings_of("hermes"), chip=3, number=0).weights(5.0, 1)
    assert torch.equal(weights * 2**14, (weights * 2**14).round())
    converter = Converter(input_bits=3)
    x = torch.tensor([-1.0, -0.4, 0.1, 0.0, 0.2, 1.0])
    assert torch.allclose(converter.shown(x), torch.tensor([-1.0, -1 / 3, 0.0, 0.0, 1 / 3, 1.0]))
    assert Converter(input_bits=8).shown(torch.tensor([-1.0, 0.0, 1.0])).tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("bits", [None, 7])
def test_the_variance_told_is_that_of_readings(bits: int | None) -> None:
    x, w, _ = data(rows=1, outputs=4)
    converter = Converter(output_bits=bits, output_bound=None if bits is None else 2.7, tile_inputs=7)
    product = TiledProduct(w, converter, SETTINGS)
    n = 40_000
    readings = product.read(x.repeat(n, 1), SeededStream(5, "t")).double()
    told = product.variance(x)[0]
    centred = readings - readings.mean(0)
    fourth = (centred**4).mean(0)
    error = ((fourth - told**2) / n).sqrt()
    assert bool(((centred**2).mean(0) - told).abs().max() <= SURE * error.max())
    assert bool(((centred**2).mean(0) - 1.1 * told).abs().max() > SURE * error.max())


def test_the_kernel_and_the_torch_operations_agree() -> None:
    x, w, normal = data()
    product = TiledProduct(w, CONVERTER, SETTINGS)
    parts = next(product._tiles(CONVERTER.shown(x)))
    mean, constant, current = parts
    read = mean + (constant[:, None] + 0.08**2 * current).sqrt() * normal[0]
    step = float(read.abs().amax(dim=1).median()) / 63  # about half of the rows meet the bound
    total, saturated = torch.zeros(9, 11), torch.zeros(9, dtype=torch.bool)
    arrays = (each.numpy() for each in (total, saturated, *parts, normal[0]))
    add_codes(*arrays, 0.08**2, np.float32(step), np.float32(63))
    codes = (read / step).round()
    assert torch.allclose(total, codes.clamp(-63, 63) * step, atol=1e-6)
    met = (codes.abs() >= 63).any(dim=1)
    assert torch.equal(saturated, met)
    assert 0 < int(met.sum()) < 9


@pytest.mark.compiled
def test_threads_do_not_change_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    x = ternary(64, 20, 1)
    w = (torch.rand(300, 20, generator=torch.Generator().manual_seed(2)) * 2**14).round() / 2**14
    product = TiledProduct(w, CONVERTER, SETTINGS.model_copy(update={"ir_drop": 0.0}))
    monkeypatch.setattr(products, "_ELEMENTS_PER_THREAD", 64)
    assert torch.equal(*with_threads(lambda: product.read(x, SeededStream(5, "t")), 1, 3))


def test_the_limits_of_the_noise_hold_for_every_input() -> None:
    x, w, _ = data(rows=400)
    product = TiledProduct(w, Converter(tile_inputs=17), SETTINGS)
    low, high = product.std_limits()
    inputs = torch.cat([x, torch.zeros(1, 17), torch.ones(1, 17)])
    variance = product.variance(inputs)
    assert float(variance.min()) == pytest.approx(low**2, rel=1e-6)
    assert float(variance.max()) == pytest.approx(high**2, rel=1e-5)
    assert product.largest_output() == pytest.approx(float(w.abs().sum(1).max()))


def test_rounded_variance_is_extreme_on_a_code_and_half_way() -> None:
    """The limits that the lattice law states, checked on a grid of means and spreads."""
    stds = np.concatenate([[0.0], np.geomspace(0.02, 3.0, 40)])
    grid = np.array([[rounded_variance(mean, std) for mean in np.linspace(0, 0.5, 26)] for std in stds])
    assert np.all(grid >= grid[:, :1] - 1e-12)
    assert np.all(grid <= grid[:, -1:] + 1e-12)
    assert np.all(np.diff(grid[:, 0]) >= -1e-12)  # on a code it grows with the spread
    running = np.maximum.accumulate(grid[:, -1])
    assert np.all(running <= np.maximum(0.25, grid[:, -1]) + 1e-12)
    draws = np.random.default_rng(1).normal(0.3, 0.4, 200_000).round()
    error = math.sqrt(((draws - draws.mean()) ** 4).mean() / draws.size)
    assert abs(draws.var() - rounded_variance(0.3, 0.4)) <= SURE * error
    assert abs(draws.var() - rounded_variance(0.0, 0.4)) > SURE * error


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"input_bits": 1}, "input_bits = 1: must be an integer in \\[2, 16\\]"),
        ({"output_bits": 8}, "output_bits and output_bound belong together"),
        ({"output_bits": 8, "output_bound": 0.0}, "output_bound = 0.0: must be finite and above 0"),
        ({"tile_inputs": 0}, "tile_inputs = 0: must be at least 1"),
    ],
)
def test_a_converter_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    refuses(ValueError, message, Converter, **wrong)


DEVICES = 2**18
TIMES_S = {"1 s": 1.0, "1 h": 3600.0, "1 d": 86400.0, "1 y": 365.25 * 86400}


def settings_of(name: str, **changes: Any) -> Any:
    """Return a preset's section; targets stand on the positive side only."""
    return load_description(name, {"crossbar": changes} if changes else None).crossbar


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
def test_a_constant_3_percent_off_is_found(
    preset: str, function: str, factor: float, time: str, monkeypatch: Any
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
