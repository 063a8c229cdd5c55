"""Noise that is missing, cut, slow or repeated: refused where readings show it, else named under trust by size."""

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.devices.calibration_faults import RARE, TRUSTED, asked, pink
from opusim.calibration.reading_noise import (
    cut_tails,
    evaluate_readings,
    far_limits,
    far_out,
    least_energy,
    low_frequencies,
    missing_numbers,
    missing_readings,
    near_mean,
    one_value,
    slow_noise,
    standardised,
)
from opusim.devices.certificate import Certificate, GaussianLaw, TrustedProperty

Random = np.random.Generator
N, P, LEVEL = 200, 100, 1e-6


def normal(random: Random, segments: int = 3) -> list[np.ndarray]:
    return [standardised(random.standard_normal((N, P))) for _ in range(segments)]


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
    found = [STATISTICS[name](normal(np.random.default_rng([seed, i]))) for i in range(runs)]
    for level in (0.1, 0.02):
        assert np.mean(np.array(found) < level) < level + 5 * (level * (1 - level) / runs) ** 0.5


@pytest.mark.parametrize("name", ["low frequencies", "near the mean", "far out"])
def test_exact_statistics_are_not_idle(name: str, seed: int) -> None:
    """Below 0.5 they fall in a fifth of sound runs at least; an idle test never does."""
    found = [STATISTICS[name](normal(np.random.default_rng([seed, 7, i]))) for i in range(25)]
    assert np.mean(np.array(found) < 0.5) > 0.1


def test_each_stated_size_shows_and_a_fifth_of_it_does_not(seed: int) -> None:
    """The size shows with probability 0.99; of twelve runs at least ten find it."""
    random = np.random.default_rng(seed)
    numbers = missing_numbers(3 * N * P, N, LEVEL).size
    slow = slow_noise(N, 3 * P, LEVEL / 5).size

    def silent(share: float) -> list[np.ndarray]:
        return [standardised(np.where(random.random(z.shape) < share, 0.0, z)) for z in normal(random)]

    def waves(share: float) -> list[np.ndarray]:
        found = []
        for z in normal(random):
            wave = 10 * (pink(random, np.zeros_like(z), np.arange(N)))  # of variance 1
            found.append(standardised((1 - share) ** 0.5 * z + share**0.5 * wave))
        return found

    for make, size, statistic in ((silent, numbers, near_mean), (waves, slow, low_frequencies)):
        assert sum(statistic(make(size)) < LEVEL for _ in range(12)) >= 10
        assert sum(statistic(make(size / 5)) < LEVEL for _ in range(12)) <= 2


def test_a_cut_at_the_stated_distance_shows(seed: int) -> None:
    random = np.random.default_rng(seed)
    limit = cut_tails(far_limits([(N, P)] * 3)[-1], N).size
    assert 2.8 < limit < 3.4
    cut = [standardised(np.clip(random.standard_normal((N, P)), -limit, limit)) for _ in range(3)]
    assert far_out(cut) < LEVEL
    assert far_out(normal(random)) > LEVEL


def test_silent_readings_and_stretches_show_with_probability_099(seed: int) -> None:
    share = missing_readings(1000).size
    assert (1 - share) ** 1000 == pytest.approx(0.01)
    random = np.random.default_rng(seed)
    one, stretch = (random.standard_normal((N, P)) for _ in range(2))
    one[20] = 0
    stretch[64:96, 3] *= 0.05
    for faulty in (one, stretch):
        assert least_energy([standardised(faulty)]) < LEVEL


def test_a_value_that_outputs_share_shows_where_others_are_as_fine_as_their_type(seed: int) -> None:
    random = np.random.default_rng(seed)
    sound = random.standard_normal((N, P)).astype(np.float32)
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
    plain = Certificate(
        device="d",
        description_digest="0",
        date="2026-11-27",
        n_inputs=1,
        n_outputs=1,
        frames=1,
        confidence=0.95,
        beta=1e-6,
        remarks=["a"],
    )
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
