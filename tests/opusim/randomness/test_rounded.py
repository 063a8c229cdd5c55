"""Exactly rounded noise: its law, its error bound, border cases, and that a release fits every value equally well."""

import math
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from opusim.randomness.kernels import digits_from_philox
from opusim.randomness.rounded import ExactNoise, Law, NormalNoise, _interval, _standard, grid_of, toward_zero
from opusim.randomness.streams import NoiseStream, SeededStream, SystemStream, noise_stream
from tests.opusim.common import refuses
from tests.oracles import naive_philox
from tests.support.forked import in_forked_process

LAWS: tuple[Law, ...] = ("gaussian", "laplace")
STREAMS = {"seeded": lambda: SeededStream(3, "test"), "system": SystemStream}


def released(stream: NoiseStream, values: torch.Tensor, scale: float, law: Law = "gaussian") -> torch.Tensor:
    return stream.rounded(values.numel(), scale, law).added_to(values)


def words_of(seed: int, count: int) -> np.ndarray:
    """Random words, and the extreme ones in every combination."""
    random = np.random.default_rng(seed).integers(0, 2**64, (count, 2), dtype=np.uint64)
    edges = [1, 2, 2**11, 2**32, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2**32, 2**64 - 2, 2**64 - 1]
    powers = [2**k for k in range(1, 64, 7)]
    pairs = [(u, v) for u in edges + powers for v in [0, 2**63, 2**64 - 1, 2**62]]
    return np.concatenate([random, np.array(pairs, dtype=np.uint64)])


def exact(u: int, v: int, law: Law) -> mpmath.mpf:
    """X from the middle of 64 digits, in 60 decimal digits, by the definition."""
    with mpmath.workdps(60):
        first, second = ((mpmath.mpf(word) + 0.5) / 2**64 for word in (u, v))
        exponential = -mpmath.log(first)
        if law == "laplace":
            return +exponential if v >= 2**63 else -exponential
        return mpmath.sqrt(2 * exponential) * mpmath.cos(2 * mpmath.pi * second)


@pytest.mark.parametrize("law", LAWS)
def test_the_error_bound_holds_and_reaches_all_digits_that_are_not_drawn(seed: int, law: Law) -> None:
    words = words_of(seed, 200)
    x, error = _standard(words[:, 0], words[:, 1], law)
    for (u, v), found, bound in zip(words.tolist(), x, error, strict=True):
        with mpmath.workdps(60):
            assert abs(exact(u, v, law) - mpmath.mpf(float(found))) < float(bound) / 2
        low, high = _interval(u, v, 64, law)
        assert Fraction(float(found)) - Fraction(float(bound)) <= low
        assert high <= Fraction(float(found)) + Fraction(float(bound))
    ordinary = error[:200]
    assert np.median(ordinary) < 2.0**-44  # so that border cases are one in 10^9 and fewer


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", list(STREAMS))
def test_released_numbers_have_their_law_on_their_grid(name: str, law: Law) -> None:
    """Kolmogorov-Smirnov at five standard errors' probability; a scale 10 % too small is the planted fault."""
    scale, n, level = 2.7, 60_000, 5.7e-7
    law_of = stats.norm(scale=scale) if law == "gaussian" else stats.laplace(scale=scale)
    found = released(STREAMS[name](), torch.full((n,), 1e6), scale, law).numpy() - 1e6
    assert grid_of(scale) == 2.0**-9
    assert (found / grid_of(scale) % 1 == 0).all()
    spread = found + grid_of(scale) * (np.random.default_rng(0).random(n) - 0.5)
    assert stats.kstest(spread, law_of.cdf).pvalue > level
    assert stats.kstest(0.9 * spread, law_of.cdf).pvalue < level


def subtracted(noise: torch.Tensor, values: torch.Tensor, guess: torch.Tensor, scale: float) -> float:
    """The share of the numbers of a release that lie on the grid of float32 noise after a guess is subtracted."""
    left = (values + noise - guess) / scale
    return float((left == left.float().double()).double().mean())


def test_a_release_fits_every_value_equally_well_and_added_noise_only_the_right_one(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, other = (torch.randn(2000, dtype=torch.float64, generator=generator) for _ in range(2))
    scale, stream = 1.6, SystemStream()
    for guess in (values, other):  # every number lies on the public grid, whatever the value
        left = released(stream, values, scale) / grid_of(scale)
        assert torch.equal(left, left.round())
        assert subtracted(released(stream, values, scale) - values, values, guess, scale) < 0.01
    added = scale * stream.normal((2000,)).double()  # the planted fault
    assert subtracted(added, values, values, scale) > 0.5 > subtracted(added, values, other, scale)


def test_neighbours_of_a_grid_point_have_one_law(seed: int) -> None:
    """Values within a cell of the grid shift the law of what is released by less than the cell: Kolmogorov-Smirnov."""
    scale, n = 1.0, 40_000
    first, second = (
        released(SeededStream(seed + k, "x"), torch.full((n,), value).double(), scale).numpy()
        for k, value in enumerate((0.0, grid_of(scale) * 0.3))
    )
    assert stats.ks_2samp(first, second).pvalue > 5.7e-7
    assert stats.ks_2samp(first, second + 0.05).pvalue < 5.7e-7


@pytest.mark.parametrize("value", [0.0, 3e3, 2.0**39])
def test_the_grid_does_not_follow_the_value(value: float) -> None:
    """Half of the released steps are odd, six standard errors; a grid that values make coarser, the fault, has none."""
    values = torch.full((400,), value, dtype=torch.float64)
    steps = released(SystemStream(), values, 1.0) / grid_of(1.0)
    assert torch.equal(steps, steps.round())
    assert abs(float((steps % 2).sum()) - 200) < 6 * 10


@pytest.mark.parametrize("law", LAWS)
def test_a_number_next_to_an_edge_is_exact(seed: int, law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value puts the middle of the drawn digits as near to an edge as float64 can: interval arithmetic decides."""
    decided: list[int] = []
    original = ExactNoise._exact
    monkeypatch.setattr(ExactNoise, "_exact", lambda *args: decided.append(original(*args)) or decided[-1])
    h = Fraction(grid_of(1.0))
    for count, (u, v) in enumerate(words_of(seed, 40)[:40].tolist(), start=1):
        middle = Fraction(*mpmath.libmp.to_rational(exact(u, v, law)._mpf_))
        value = float(5 * h + h / 2 - middle)
        noise = ExactNoise(np.array([[u, v]], dtype=np.uint64), lambda _: 2**63, 1.0, law)
        found = Fraction(float(noise.added_to(torch.tensor([value], dtype=torch.float64))))
        assert len(decided) == count
        low, high = _interval((u << 64) | 2**63, (v << 64) | 2**63, 128, law)
        assert found in {math.floor((Fraction(value) + x) / h + Fraction(1, 2)) * h for x in (low, high)}
        assert found in (5 * h, 6 * h)


def test_digits_that_are_all_zero_are_extended_and_seeded_ones_have_a_naive_twin() -> None:
    digits = iter([0, 0, 2**63, 0])
    noise = ExactNoise(np.zeros((1, 2), dtype=np.uint64), lambda _: next(digits), 1.0, "laplace")
    found = -float(noise.added_to(torch.zeros(1)))
    assert list(digits) == []
    assert found == pytest.approx(129 * math.log(2), abs=2.0**-10)
    words = np.empty((5, 2), dtype=np.uint64)
    digits_from_philox(words, 7, 3, 5, 11, 13)
    for number, row in enumerate(words.tolist()):
        w0, w1, w2, w3 = naive_philox.philox4x32((number, 7, 3, 5), 11 + (13 << 32))
        assert row == [(w1 << 32) | w0, (w3 << 32) | w2]


@pytest.mark.parametrize("law", LAWS)
def test_experiments_repeat_and_releases_do_not(law: Law) -> None:
    def twice(mode: str) -> list[list[float]]:
        found = []
        for step in (5, 5, 6):
            stream = noise_stream(mode, 3, "scalar-noise")
            stream.seek(step)
            found.append(released(stream, torch.zeros(3), 1.0, law).tolist())
        return found

    first, again, other = twice("experiment")
    assert first == again != other
    first, again, other = twice("release")
    assert first != again != other
    stream = noise_stream("experiment", 3, "a")
    four, two = (released(stream, torch.zeros(n), 1.0, law)[:2].tolist() for n in (4, 2))
    assert four != two
    short, long = (released(noise_stream("experiment", 3, "a"), torch.zeros(n), 1.0, law) for n in (2, 5))
    assert torch.equal(short, long[:2])  # a shorter draw is the beginning of a longer one


def test_further_digits_are_fresh_and_finished_numbers_on_the_grid() -> None:
    """Each draws 64 new bits: six standard errors of the ones among them; a constant, the fault, repeats."""
    stream = SystemStream()
    noise = stream.rounded(2, 1.0)
    assert isinstance(noise, ExactNoise)
    assert stream.state == {}  # a checkpoint keeps nothing of it
    digits = [noise._more(number) for number in (0, 0, 1, 1) * 50]
    assert len(set(digits)) == len(digits)
    ones = sum(word.bit_count() for word in digits)
    assert abs(ones - 32 * len(digits)) < 6 * math.sqrt(16 * len(digits))
    numbers = torch.tensor([0.5, -1.25, 3.0])
    found = NormalNoise(numbers, 2.0, "gaussian").added_to(torch.tensor([[0.1], [0.2], [1e4]]))
    assert found.flatten().tolist() == pytest.approx([1.1, -2.3, 10_006.0], abs=grid_of(2.0) / 2)
    assert (found / grid_of(2.0) % 1 == 0).all()
    four = NormalNoise(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), 1.0, "laplace").added_to(torch.zeros(1))
    assert four.tolist() == [3.0]


def test_a_forked_process_rounds_with_other_noise() -> None:
    """From the first draw after the fork on, further digits too; a kept cipher gives both the same numbers."""
    stream = SystemStream()
    stream.rounded(1, 1.0)

    def drawn() -> list[Any]:
        noise = stream.rounded(4, 1.0)
        assert isinstance(noise, ExactNoise)
        return [*noise.added_to(torch.zeros(4)).tolist(), noise._more(0)]

    there = in_forked_process(drawn)
    assert there.startswith("[")
    here = str(drawn())
    assert not set(there.strip("[]").split(", ")) & set(here.strip("[]").split(", "))


@pytest.mark.parametrize("bound", [1.0, 0.05, 3e-7, 1e30])
@pytest.mark.parametrize("count", [1, 1000, 2**22])
def test_contributions_never_grow_and_their_sums_are_exact(seed: int, bound: float, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    raw = (torch.rand(min(count, 4000), dtype=torch.float64, generator=generator) * 2 - 1) * bound
    raw[:1] = bound
    found = toward_zero(raw, bound=bound, count=count)
    assert (found.abs() <= raw.abs()).all()
    assert (raw - found).abs().max() <= bound * count * 2.0**-49
    whole = sum((Fraction(x) for x in found.tolist()), Fraction(0))
    for order in (found, found.flip(0), found[torch.randperm(len(found), generator=generator)]):
        assert Fraction(float(order.sum())) == whole
        assert Fraction(float(order.cumsum(0)[-1])) == whole


@pytest.mark.parametrize(
    ("values", "scale", "message"),
    [
        *(([math.nan], 1.0, "must be finite and at most"), ([math.inf], 1.0, "must be finite and at most")),
        *(([2.0**41], 1.0, "bound them first"), ([0.0, 0.0], 1.0, "noise was drawn for 1; give as many")),
        *(([0.0], 0.0, "scale = 0: must lie in"), ([0.0], math.nan, "rescale the values")),
    ],
)
def test_values_and_scales_out_of_range_are_refused(values: list[float], scale: float, message: str) -> None:
    def release(*_: Any) -> torch.Tensor:
        return SystemStream().rounded(1, scale).added_to(torch.tensor(values, dtype=torch.float64))

    refuses(ValueError, message, release)
