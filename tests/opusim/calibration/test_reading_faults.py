"""Readings with weaker noise than their standard deviation: refused by the test for it, or named under trust."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import chi2

from benchmarks.devices.calibration_faults import BROKEN, RARE, TRUSTED, asked, attempt, pink
from opusim.calibration.reading_noise import (
    ReadingNoise,
    _product_variance,
    cut_tails,
    evaluate_readings,
    far_limits,
    far_out,
    independence_p_values,
    least_energy,
    low_frequencies,
    missing_numbers,
    missing_readings,
    near_mean,
    one_value,
    slow_noise,
    smallest_variance,
    standardised,
    variance_lower_limit,
)
from opusim.description.schema import load_description
from opusim.devices.certificate import Certificate, GaussianLaw, TrustedProperty
from opusim.p_values import FAMILY_ALARM, PropertyTest, decide
from tests.opusim.common import refuses
from tests.support.certificates import certificate_of

OUTPUTS, READINGS = "outputs do not correlate", "readings do not repeat or follow from earlier ones"
SIZES = "sizes of the outputs' noises do not correlate"
SIZES_IN_TIME = "sizes of noise do not follow from earlier ones"
LAW, GRID, INPUTS = ("each output is Gaussian", "readings lie on no grid", "noise is the same at every input")
N = 500
Random = np.random.Generator


def normal(random: Random, *shape: int) -> np.ndarray:
    return random.standard_normal(shape)


def common_mode(random: Random, share: float) -> np.ndarray:
    signs = random.choice([-1.0, 1.0], 600)
    return (1 - share) ** 0.5 * normal(random, N, 600) + share**0.5 * normal(random, N, 1) * signs


def copies(random: Random) -> np.ndarray:
    return np.tile(normal(random, N, 300), 2)


def part_copy(random: Random) -> np.ndarray:
    z = normal(random, N, 100)
    return np.hstack([z, 0.4 * z[:, :1] + 0.84**0.5 * normal(random, N, 1)])


def mixture(random: Random) -> np.ndarray:
    """Half of the outputs rotated by a matrix into the other half: no pair correlates by more than chance."""
    half = normal(random, N, 300)
    return np.hstack([half, half @ np.linalg.qr(normal(random, 300, 300))[0]])


def two_tails(random: Random) -> np.ndarray:
    """Fourth moments 1.8 and 4.2, which average to a Gaussian's 3."""
    wide = (1.4 / 3 * 3 - 1) / (0.1 * 0.9)
    scales = np.where(random.random((N, 50)) < 0.1, 1 + 0.9 * wide**0.5, 1 - 0.1 * wide**0.5)
    heavy = np.sqrt(scales) * normal(random, N, 50)
    return np.hstack([3**0.5 * random.uniform(-1, 1, (N, 50)), heavy])


def one_tail(random: Random) -> np.ndarray:
    return np.hstack([normal(random, N, 99), 3**0.5 * random.uniform(-1, 1, (N, 1))])


def regression(random: Random, lag: int, strength: float, signs: np.ndarray) -> np.ndarray:
    """Autoregression at a lag, of a sign for each output."""
    fresh = normal(random, N, signs.size)
    values = fresh.copy()
    for i in range(lag, N):
        values[i] = strength * signs * values[i - lag] + (1 - strength**2) ** 0.5 * fresh[i]
    return values


def common_scale(random: Random) -> np.ndarray:
    return normal(random, N, 100) * (1 + 0.2 * normal(random, N, 1))


def signed_copies(random: Random) -> np.ndarray:
    """The second half has the sizes of the first and signs of its own: nothing correlates but sizes."""
    half = normal(random, N, 50)
    return np.hstack([half, half * random.choice([-1.0, 1.0], half.shape)])


def slow_scale(random: Random) -> np.ndarray:
    """Sizes follow a slow wave of another phase at each output."""
    phases = 2 * np.pi * random.random(100)
    return normal(random, N, 100) * (1 + 0.2 * np.sin(2 * np.pi * np.arange(N)[:, None] / 100 + phases))


FAULTS: dict[str, tuple[str, Callable[[Random], np.ndarray]]] = {
    "common mode of random signs": (OUTPUTS, lambda r: common_mode(r, 0.9)),
    "common mode, 99.9 %": (OUTPUTS, lambda r: common_mode(r, 0.999)),
    "common mode, 2 %": (OUTPUTS, lambda r: common_mode(r, 0.02)),
    "copies": (OUTPUTS, copies),
    "one copy of 40 %": (OUTPUTS, part_copy),
    "sums of many outputs": (OUTPUTS, mixture),
    "neighbours, 5 %": (OUTPUTS, lambda r: (lambda z: z[:, 1:] + 0.05 * z[:, :-1])(normal(r, N, 601))),
    "lag 2": (READINGS, lambda r: regression(r, 2, 0.95, np.ones(100))),
    "lag 7 of random signs": (READINGS, lambda r: regression(r, 7, 0.3, r.choice([-1.0, 1.0], 100))),
    "period 250": (READINGS, lambda r: np.tile(normal(r, 250, 100), (2, 1))),
    "one with period 250": (
        READINGS,
        lambda r: np.hstack([normal(r, N, 99), np.tile(normal(r, 250, 1), (2, 1))]),
    ),
    "one reading twice": (READINGS, lambda r: (lambda z: np.vstack([z, z[:1]]))(normal(r, N, 100))),
    "slow drift": (READINGS, lambda r: normal(r, N, 100) + np.linspace(0, 0.5, N)[:, None]),
    "common scale": (SIZES, common_scale),
    "signed copies": (SIZES, signed_copies),
    "slow scale": (SIZES_IN_TIME, slow_scale),
    "half light, half heavy tails": (LAW, two_tails),
    "one uniform output": (LAW, one_tail),
    "mixture of two scales": (LAW, lambda r: normal(r, N, 100) * np.where(r.random((N, 100)) < 0.05, 2, 1)),
    "grid of 0.02": (GRID, lambda r: np.round(normal(r, N, 100) / 0.02) * 0.02),
    "grid of 0.005": (GRID, lambda r: np.round(normal(r, N, 100) / 0.005) * 0.005),
    "blurred": (GRID, lambda r: np.round(normal(r, N, 100) / 0.005) * 0.005 + 1e-5 * normal(r, N, 100)),
    "rounded off": (GRID, lambda r: (normal(r, N, 100) + 1e5).astype(np.float32)),
}


def property_of(found: ReadingNoise, name: str) -> PropertyTest:
    return next(test for test in found.tests if test.text.startswith(name))


@pytest.mark.parametrize("fault", list(FAULTS))
def test_each_fault_fails_its_own_test(fault: str, seed: int) -> None:
    name, make = FAULTS[fault]
    found = evaluate_readings(make(np.random.default_rng(seed)), beta=1e-6)
    assert not property_of(found, name).holds
    assert not found.is_gaussian


def test_sound_readings_fail_none_and_broken_devices_are_refused(seed: int) -> None:
    random = np.random.default_rng(seed)
    for number_type in (np.float64, np.float32):
        for shape in ((N, 600), (4, 60, 100), (30, 1), (2, 200, 3)):
            found = evaluate_readings((3 + 2.7 * normal(random, *shape)).astype(number_type), beta=1e-6)
            assert found.is_gaussian, [test for test in found.tests if not test.holds]
    wanted = {name: "refused" if broken else "holds" for name, broken in BROKEN.items()}
    assert {name: attempt(broken, 9000) for name, broken in BROKEN.items()} == wanted


def test_noise_that_depends_on_the_input_or_is_used_again_is_seen(seed: int) -> None:
    """Of all outputs by 4 %, of each output by 10 % up or down, of one output by half."""
    random = np.random.default_rng(seed)
    sound = normal(random, 4, N, 100)
    assert property_of(evaluate_readings(sound, beta=1e-6), INPUTS).holds
    one = np.ones(100)
    one[7] = 1.5
    for factor in (1.04 * np.ones(100), random.choice([0.9, 1.1], 100), one):
        faulty = sound.copy()
        faulty[2] *= factor
        assert not property_of(evaluate_readings(faulty, beta=1e-6), INPUTS).holds
    sound = normal(np.random.default_rng(seed), 3, N, 100)
    faulty = np.concatenate([sound, 3 * sound[1:2] + 10])
    found = evaluate_readings(faulty, beta=1e-6)
    assert "largest cosine of two readings" in property_of(found, READINGS).text


def test_the_quietest_input_and_direction_are_certified(seed: int) -> None:
    values = normal(np.random.default_rng(seed), 4, N, 100)
    values[3] *= 0.5
    found = evaluate_readings(values, beta=1e-6)
    assert found.smallest_std_low < 0.5
    alone = evaluate_readings(values[3], beta=1e-6 / 4)
    assert found.smallest_std_low == alone.smallest_std_low
    values = np.random.default_rng(seed).standard_normal((40, 3)) @ [[1, 0.9, 0], [0, 0.4, 0], [0, 0, 2]]
    output = smallest_variance(values, independent_outputs=True)
    assert output == pytest.approx(values.var(axis=0, ddof=1).min())
    least = np.linalg.eigvalsh(np.cov(values.T))[0]
    assert smallest_variance(values, independent_outputs=False) == pytest.approx(least)
    assert smallest_variance(values, independent_outputs=False) < 0.5 * output
    refuses(ValueError, "readings = 4.*as many", smallest_variance, values[:4], independent_outputs=False)
    assert smallest_variance(values[:4], independent_outputs=True) > 0


def test_constant_outputs_and_what_readings_cannot_bound_are_named(seed: int) -> None:
    random = np.random.default_rng(seed)
    few, many = (evaluate_readings(normal(random, *shape), beta=1e-6) for shape in ((60, 100), (200, 20)))
    assert "60 readings cannot bound the smallest eigenvalue of 100 outputs" in few.assumptions[0]
    assert "the limit holds for correlated outputs too" in many.assumptions[0]
    values = normal(np.random.default_rng(seed), 60, 20)
    values[:, 3] = 1.0
    assert "constant outputs" in property_of(evaluate_readings(values, beta=1e-6), LAW).text
    assert not evaluate_readings(np.zeros((60, 20)), beta=1e-6).is_gaussian


def test_variances_over_all_orders_are_exact() -> None:
    """Against all 720 orders of six numbers."""
    from itertools import permutations

    values = np.array([-1.7, -0.3, 0.2, 0.9, 1.4, -0.5])
    values = (values - values.mean()) / values.std()
    orders = np.array(list(permutations(values)))
    for lag in (1, 2, 4):
        products = np.sum(orders[:, lag:] * orders[:, :-lag], axis=1)
        assert products.mean() == pytest.approx(-(6 - lag) / 5)
        assert products.var() == pytest.approx(float(_product_variance(6, lag, np.mean(values**4))))


def test_whole_numbers_are_tested_by_ranks(seed: int) -> None:
    """Codes of a coarse converter, some outputs nearly constant: no false alarm by ranks; a copied output is seen."""
    random = np.random.default_rng(seed)
    means = random.uniform(-0.5, 0.5, 300)
    for _ in range(10):
        codes = np.rint(means + 0.3 * normal(random, 100, 300))
        found = decide(independence_p_values([codes[:50], codes[50:]], ranked=True))
        assert all(test.holds for test in found), found
    codes = np.rint(3 * normal(random, N, 300))
    codes[:, 200] = codes[:, 20]
    assert not decide(independence_p_values([codes], ranked=True))[0].holds


def least_p_values(seed: int, runs: int, **options: bool) -> np.ndarray:
    """Of each run the smallest p-value times the number of properties: below alpha at a rate of at most alpha."""
    shapes = [(4, 60, 40), (1, 200, 150), (2, 100, 300), (4, 40, 8), (10, 30, 60)]
    least = np.empty(runs)
    for number in range(runs):
        random = np.random.default_rng([seed, number])
        values = random.standard_normal(shapes[number % len(shapes)])
        if options:
            values = np.rint(3 * values)
        tests = evaluate_readings(values, beta=1e-6, gaussian=not options).tests
        needed = [test.p_value for test in tests if test.needed]
        least[number] = min(needed) * len(needed)
    return least


def assert_alarm_rate(least: np.ndarray) -> None:
    """At five standard errors of the nominal rate, upwards: Bonferroni may stay below it."""
    for level in (0.1, 0.02):
        assert np.mean(least < level) < level + 5 * (level * (1 - level) / least.size) ** 0.5
    assert np.mean(least < FAMILY_ALARM) < FAMILY_ALARM + 5 * (FAMILY_ALARM / least.size) ** 0.5
    assert np.mean(least < 0.5) > 0.1  # the tests are not idle


@pytest.mark.slow
def test_sound_readings_alarm_at_the_stated_rate_at_most(seed: int) -> None:
    assert_alarm_rate(least_p_values(seed, 60))


@pytest.mark.slow
@pytest.mark.parametrize("codes", [False, True])
def test_two_thousand_sound_calibrations_alarm_at_the_stated_rate_at_most(codes: bool, seed: int) -> None:
    assert_alarm_rate(least_p_values(seed, 2000, **({"codes": True} if codes else {})))


def test_the_limit_is_passed_with_probability_beta() -> None:
    for readings, beta in ((3, 0.2), (50, 1e-6)):
        limit = variance_lower_limit(2.7, readings=readings, beta=beta)
        assert chi2.sf((readings - 1) * 2.7 / limit, readings - 1) == pytest.approx(beta)
    assert variance_lower_limit(0.0, readings=9, beta=0.1) == 0
    for wrong in ({"readings": 1, "beta": 0.1}, {"readings": 9, "beta": 0.0}, {"readings": 9, "beta": 1.0}):
        refuses(ValueError, r"readings = 1|beta = ", variance_lower_limit, 1.0, **wrong)


Random = np.random.Generator
ROWS, COLUMNS, LEVEL = 200, 100, 1e-6


def standard(random: Random, segments: int = 3) -> list[np.ndarray]:
    return [standardised(random.standard_normal((ROWS, COLUMNS))) for _ in range(segments)]


STATISTICS: dict[str, Callable[[list[np.ndarray]], float]] = {
    "least energy": least_energy,
    "low frequencies": low_frequencies,
    "far out": far_out,
    "near the mean": near_mean,
    "one value": lambda parts: one_value(parts[0].astype(np.float32)),
}


@pytest.mark.parametrize("name", list(STATISTICS))
def test_p_values_of_sound_readings_are_as_rare_as_they_say(name: str, seed: int) -> None:
    """At five standard errors, upwards: Bonferroni and bounds may stay below the level."""
    runs = 25
    found = [STATISTICS[name](standard(np.random.default_rng([seed, i]))) for i in range(runs)]
    for level in (0.1, 0.02):
        assert np.mean(np.array(found) < level) < level + 5 * (level * (1 - level) / runs) ** 0.5


@pytest.mark.parametrize("name", ["low frequencies", "near the mean", "far out"])
def test_exact_statistics_are_not_idle(name: str, seed: int) -> None:
    """Below 0.5 they fall in a fifth of sound runs at least; an idle test never does."""
    found = [STATISTICS[name](standard(np.random.default_rng([seed, 7, i]))) for i in range(25)]
    assert np.mean(np.array(found) < 0.5) > 0.1


def test_each_stated_size_shows_and_a_fifth_of_it_does_not(seed: int) -> None:
    """The size shows with probability 0.99; of twelve runs at least ten find it."""
    random = np.random.default_rng(seed)
    numbers = missing_numbers(3 * ROWS * COLUMNS, ROWS, LEVEL).size
    slow = slow_noise(ROWS, 3 * COLUMNS, LEVEL / 5).size

    def silent(share: float) -> list[np.ndarray]:
        return [standardised(np.where(random.random(z.shape) < share, 0.0, z)) for z in standard(random)]

    def waves(share: float) -> list[np.ndarray]:
        found = []
        for z in standard(random):
            wave = 10 * (pink(random, np.zeros_like(z), np.arange(ROWS)))  # of variance 1
            found.append(standardised((1 - share) ** 0.5 * z + share**0.5 * wave))
        return found

    for make, size, statistic in ((silent, numbers, near_mean), (waves, slow, low_frequencies)):
        assert sum(statistic(make(size)) < LEVEL for _ in range(12)) >= 10
        assert sum(statistic(make(size / 5)) < LEVEL for _ in range(12)) <= 2


def test_cut_silent_and_shared_readings_show_at_the_stated_size(seed: int) -> None:
    random = np.random.default_rng(seed)
    limit = cut_tails(far_limits([(ROWS, COLUMNS)] * 3)[-1], ROWS).size
    assert 2.8 < limit < 3.4
    cut = [standardised(np.clip(random.standard_normal((ROWS, COLUMNS)), -limit, limit)) for _ in range(3)]
    assert far_out(cut) < LEVEL < far_out(standard(random))
    share = missing_readings(1000).size
    assert (1 - share) ** 1000 == pytest.approx(0.01)
    random = np.random.default_rng(seed)
    one, stretch = (random.standard_normal((ROWS, COLUMNS)) for _ in range(2))
    one[20] = 0
    stretch[64:96, 3] *= 0.05
    for faulty in (one, stretch):
        assert least_energy([standardised(faulty)]) < LEVEL
    random = np.random.default_rng(seed)
    sound = random.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    assert one_value(sound) > 1e-3
    faulty = np.where(random.random(sound.shape) < 1e-3, 0.0, sound).astype(np.float32)
    assert one_value(faulty) < LEVEL


IN_CI = ("a tenth of the noise at bright inputs", "one number in 1,000 without noise")


@pytest.mark.parametrize("name", [n if n in IN_CI else pytest.param(n, marks=pytest.mark.slow) for n in RARE])
def test_noise_that_readings_show_to_be_faulty_is_refused(name: str) -> None:
    broken, bright = RARE[name]
    assert asked(broken, 9000, bright=bright, readings=500).noise is None


@pytest.mark.parametrize("name", list(TRUSTED))
def test_noise_that_no_reading_shows_to_be_faulty_is_named(name: str) -> None:
    broken, text = TRUSTED[name]
    found = asked(broken, 9000, readings=200)
    assert isinstance(found.noise, GaussianLaw)
    named = next(entry for entry in found.trust if entry.text.startswith(text))
    assert named.line in found.assumptions
    if named.unit == "readings":
        assert named.size == 5 * 200  # every input's readings: shorter than the period that was planted
    else:
        assert named.size > 1e-4  # a larger share than the planted one


def test_a_certificate_without_trust_keeps_its_digest_and_words() -> None:
    """Certificates of earlier versions have no such list, and runs know them by their digests."""
    plain = certificate_of(load_description("gaussian"), None, n_inputs=1, n_outputs=1, remarks=["a"])
    assert "trust" not in plain.dump()
    assert plain.assumptions == ("a",)
    facts = {"fault": "a repeat after up to", "size": 2500.0, "unit": "readings"}
    entry = TrustedProperty(text="noise does not repeat", **facts)
    more = plain.model_copy(update={"trust": [entry]})
    assert Certificate.model_validate(more.dump()) == more
    assert more.digest != plain.digest
    assert more.assumptions[1].endswith("would have shown a repeat after up to 2,500 readings")


@pytest.mark.slow
def test_three_hundred_sound_sets_of_readings_alarm_at_the_stated_rate(seed: int) -> None:
    """All tests of readings share one level: at 5 %, at most 24 of 300 sound sets may fail any of them."""
    alarms = 0
    for number in range(300):
        values = np.random.default_rng([seed, 11, number]).standard_normal((5, 60, 60))
        tests = evaluate_readings(values, beta=1e-6).tests
        alarms += min(test.p_value for test in tests) * len(tests) < 0.05
    assert alarms <= 24
