"""Labels that a camera counts: what is kept has the law that is paid for, and nothing else is."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.stats import norm

from opusim import open_device, training
from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import BudgetExceeded
from opusim.accounting.ledger import read_ledger
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.counts import LabelArgmax, LabelCounts, argmax_epsilon
from opusim.camera.stages import number_law
from opusim.devices.base import NoisyDevice
from opusim.devices.certificate import Certificate, PhotonCountLaw
from opusim.errors import ConfigError
from opusim.training.errors import RunInterrupted
from opusim.training.protections import argmax_labels
from opusim.training.protections.argmax_labels import ArgmaxReadout, LabelFrames, confusion, shared_range
from opusim.training.protections.counted_labels import CountsReadout, equidistant_pixels, read_counts
from opusim.training.runs.storage import read_array
from tests.support.certificates import certificate_of

K, N, EPSILON, DELTA = 4, 20_000, 2.0, 0.02
PAIRS = list(permutations(range(K), 2))
LIMIT, PAIR_LIMIT = norm.isf(norm.sf(5.0) / K), norm.isf(norm.sf(5.0) / K**2)


@pytest.fixture(scope="module")
def frames() -> Iterator[LabelFrames]:
    with open_device("camera_low_light", n_inputs=K, n_outputs=48) as device:
        yield LabelFrames.of(device, K)


@pytest.fixture(scope="module")
def counts(frames: LabelFrames) -> CountsReadout:
    return CountsReadout.within(frames, epsilon=EPSILON, delta=DELTA)


@pytest.fixture(scope="module")
def answers(frames: LabelFrames) -> ArgmaxReadout:
    return ArgmaxReadout.within(frames, epsilon=EPSILON)


def test_the_light_reaches_epsilon_from_below(counts: CountsReadout, answers: ArgmaxReadout) -> None:
    for mechanism, delta in ((counts.mechanism, DELTA), (answers.mechanism, 0.0)):
        (found,) = guarantees([mechanism], delta=delta)
        assert 0.995 * EPSILON <= found.epsilon <= EPSILON
    assert 0 < counts.light < answers.light < 1  # an answer tells less than the counts


def test_light_stays_between_least_and_described(frames: LabelFrames, monkeypatch: Any) -> None:
    assert CountsReadout.within(frames, epsilon=1e6, delta=DELTA).light == 1.0
    monkeypatch.setattr(argmax_labels, "LEAST_LIGHT", 0.1)
    with pytest.raises(ConfigError, match="0.01 is below what any light gives"):
        ArgmaxReadout.within(frames, epsilon=0.01)


def realised_delta(readout: CountsReadout, a: int, b: int, light: float) -> tuple[float, float]:
    """E max(0, 1 - e^(epsilon - loss)) of the electron counts of label a against b, and its standard error."""
    rates = readout.frames.rates(light)[:, readout.pixels]
    drawn = np.random.default_rng(a * K + b).poisson(rates[a], (N, rates.shape[1]))
    stated = readout.mechanism.rates
    losses = drawn @ np.log(stated[a] / stated[b]) - (stated[a] - stated[b]).sum()
    excess = np.maximum(0.0, -np.expm1(EPSILON - losses))
    return float(excess.mean()), float(excess.std() / math.sqrt(N))


def test_counts_reveal_no_more_than_is_paid_for(counts: CountsReadout) -> None:
    found = [realised_delta(counts, a, b, counts.light) for a, b in PAIRS]
    assert all(delta <= DELTA + 5 * error for delta, error in found)
    assert max(delta for delta, _ in found) > DELTA / 2  # the worst pair is near what is stated
    brighter = [realised_delta(counts, a, b, 1.5 * counts.light) for a, b in PAIRS]
    assert any(delta > DELTA + 5 * error for delta, error in brighter)  # planted: more light than is stated


def calibration(scores: np.ndarray, labels: np.ndarray) -> float:
    """How far the mean posterior of each class is from its frequency, record by record, in standard errors."""
    posterior = np.exp(scores - np.logaddexp.reduce(scores, axis=1)[:, None])
    sharp = posterior * (posterior - np.eye(K)[labels])  # of mean 0 if P(class | counts) is the posterior
    return float(np.max(np.abs(sharp.mean(axis=0)) / (sharp.std(axis=0) / math.sqrt(len(sharp)))))


def test_training_gets_the_posterior_of_the_kept_counts(counts: CountsReadout, seed: int) -> None:
    paid: list[Mechanism] = []
    labels = torch.from_numpy(np.random.default_rng(seed).integers(0, K, N))
    counts.frames.device.seek(seed % 2**32)
    scores = read_counts(counts, labels, pay=paid.append).double().numpy()
    assert paid == [counts.mechanism]
    assert calibration(scores, labels.numpy()) < LIMIT
    assert calibration(1.8 * scores, labels.numpy()) > LIMIT  # planted: too sure of the label
    before = counts.frames.device.usage.frames
    read_counts(counts, labels[:7], pay=paid.append)
    assert counts.frames.device.usage.frames == before + 7  # each label is shown once


def frequencies(readout: ArgmaxReadout, n: int, draw: Any) -> np.ndarray:
    """How often each label, shown n times, has each answer."""
    found, own = np.zeros((K, K)), np.repeat(np.arange(K), n)
    np.add.at(found, (own, readout.answers(torch.from_numpy(own), draw)), 1 / n)
    return found


def deviation(found: np.ndarray, law: np.ndarray | float, n: int) -> float:
    """Of frequencies from their law, or from a response that keeps labels with a probability, in standard errors."""
    if isinstance(law, float):
        other = (1 - law) / (K - 1)
        law = other + (law - other) * np.eye(K)
    return float(np.max(np.abs(found - law) / np.sqrt(law * (1 - law) / n)))


def test_answers_are_the_randomized_response_that_is_paid_for(answers: ArgmaxReadout, seed: int) -> None:
    n, keep = 15_000, answers.mechanism.keep_probability
    assert keep == pytest.approx(answers.keep, rel=1e-3)
    found = frequencies(answers, n, np.random.default_rng(seed))
    assert deviation(found, keep, n) < PAIR_LIMIT < deviation(found, 1.05 * keep, n)
    draw = np.random.default_rng(seed)
    scores = argmax_labels.read_argmax(answers, torch.arange(50) % K, draw, pay=lambda _: None)
    np.testing.assert_allclose(torch.exp(scores.double()).sum(dim=1).numpy(), 1.0, rtol=1e-5)
    assert len(torch.unique(scores)) == 2  # of the counts nothing but the answer is left


def test_planted_fault_one_permutation_for_all_records_is_found(answers: ArgmaxReadout, seed: int) -> None:
    class Constant:
        """Permutes no labels, and breaks ties as usual."""

        generator, calls = np.random.default_rng(seed), 0

        def random(self, size: tuple[int, ...]) -> np.ndarray:
            self.calls += 1
            return np.tile(np.arange(K) / K, (size[0], 1)) if self.calls % 2 else self.generator.random(size)

    found = frequencies(answers, 15_000, Constant())
    assert deviation(found, answers.mechanism.keep_probability, 15_000) > PAIR_LIMIT


def test_nothing_is_shown_before_it_is_paid(counts: CountsReadout, answers: Any, monkeypatch: Any) -> None:
    refuse = Mock(side_effect=BudgetExceeded("no"))
    monkeypatch.setattr(type(counts.frames.device), "dimmed_frames", lambda *_: pytest.fail("a frame"))
    labels = torch.zeros(3).long()
    with pytest.raises(BudgetExceeded):
        read_counts(counts, labels, pay=refuse)
    with pytest.raises(BudgetExceeded):
        argmax_labels.read_argmax(answers, labels, np.random.default_rng(0), pay=refuse)


def test_kept_pixels_are_nearly_equidistant() -> None:
    light = np.random.default_rng(3).exponential(size=(10, 128))
    first, second = np.triu_indices(10, 1)

    def evenness(pixels: np.ndarray) -> float:
        distances = np.square(light[first][:, pixels] - light[second][:, pixels]).sum(axis=1)
        return float(distances.mean() / distances.max())

    kept = equidistant_pixels(light)
    assert len(kept) > 40
    assert evenness(kept) > 0.9 > 0.8 > evenness(np.arange(128))
    one_hot = np.repeat(np.eye(3), 4, axis=1)
    assert len(equidistant_pixels(one_hot)) == 12  # equidistant as it is


def test_groups_are_disjoint_and_lit_by_their_label() -> None:
    light = np.random.default_rng(4).exponential(size=(5, 37))
    groups = argmax_labels.label_groups(light)
    assert groups.shape == (5, 7)
    assert len(np.unique(groups)) == 35
    lit = light[:, groups].sum(axis=2)  # (labels, groups)
    assert np.array_equal(lit.argmax(axis=0), np.arange(5))
    with pytest.raises(ConfigError, match="needs an output for each of 5 labels, and there are 4"):
        argmax_labels.label_groups(light[:, :4])


LIMITS = {"dark_e_low": 5.7, "dark_e_high": 6.3, "light_ratio_low": 0.9, "light_ratio_high": 1.1}
"""Of a device whose dark charge is 6 electrons."""


def certified_of(device: NoisyDevice, beta: float = 1e-3, **limits: Any) -> Certificate:
    window = {"n_inputs": device.n_inputs, "n_outputs": device.n_outputs}
    return certificate_of(device.description, PhotonCountLaw(**LIMITS | limits), **window, beta=beta)


@contextmanager
def certified(camera: dict[str, Any] | None = None, **limits: float) -> Iterator[LabelFrames]:
    with open_device("camera_low_light", n_inputs=K, n_outputs=48, camera=camera or {}) as device:
        device.attach_certificate(certified_of(device, **limits))
        yield LabelFrames.of(device, K)


def test_a_certificate_dims_light_and_takes_its_beta(counts: CountsReadout, answers: ArgmaxReadout) -> None:
    with certified() as limits:
        assert limits.excess == 1.1
        found = CountsReadout.within(limits, epsilon=EPSILON, delta=DELTA)
        assert 0.8 * counts.light < found.light < counts.light / 1.05
        channel = ArgmaxReadout.within(limits, epsilon=EPSILON)
        assert channel.keep < answers.keep
        assert channel.keep < channel.mechanism.keep_probability
        for mechanism in (found.mechanism, channel.mechanism):
            assert mechanism.beta == 1e-3
            assert mechanism.certificate == certified_of(limits.device).digest


@pytest.mark.slow
def test_a_certificate_with_wide_limits_of_dark_charge_takes_smaller_groups(answers: ArgmaxReadout) -> None:
    with certified(dark_e_low=4.0, dark_e_high=8.0) as wide:
        found = ArgmaxReadout.within(wide, epsilon=EPSILON)
        assert found.groups.shape[1] < answers.groups.shape[1]
        largest = confusion(wide, answers.groups, shared_range(wide, answers.groups.shape[1], 1e-6))
        assert argmax_epsilon(*largest, symmetrised=True) > EPSILON  # groups of all pixels would be refused
        chosen = confusion(wide, found.groups, shared_range(wide, found.groups.shape[1], found.light).worst)
        assert argmax_epsilon(*chosen, symmetrised=True) <= EPSILON
        message = r"0.01 is below what any light gives within the limits of device.certificate, \d"
        with pytest.raises(ConfigError, match=message):
            ArgmaxReadout.within(wide, epsilon=0.01)


def test_certified_answers_allow_for_all_dark_light_of_the_certificate(answers: ArgmaxReadout) -> None:
    groups, light = answers.groups, answers.light
    with certified(dark_e_high=7.0) as frames:
        whole = shared_range(frames, groups.shape[1], light)
        lower, upper = confusion(frames, groups, whole)
        for group in range(K):
            dark = np.full(48, 5.7)
            dark[groups[group]] = 7.0  # the dark light that this group gains by
            rates = dark + light * frames.light
            found = argmax_labels.confusion_at(frames.law, groups, rates, rates)[0]
            assert np.all((lower <= found + 1e-12) & (found <= upper + 1e-12))
    with certified() as narrow:  # planted: limits that the dark light exceeds
        whole = shared_range(narrow, groups.shape[1], light)
        assert np.any(found > confusion(narrow, groups, whole)[1])


SPREAD = {"dark_mean_e_low": 5.95, "dark_mean_e_high": 6.05, "dark_deviation_e": 0.25}
"""Of a device whose dark charges differ by at most 0.05 electrons, at 5 standard deviations."""


@pytest.mark.slow
def test_groups_of_uneven_dark_charge_stay_within_the_limits(answers: ArgmaxReadout, seed: int) -> None:
    """The sum over a group matters: however uneven its pixels are, a limit of its mean is enough."""
    groups, light, random = answers.groups, answers.light, np.random.default_rng(seed)
    with certified(**SPREAD) as frames:
        whole = shared_range(frames, groups.shape[1], light)
        narrow = argmax_labels.largest_epsilon(partial(confusion, frames, groups), whole, 1.0)

        def uneven(spread: float, favoured: float) -> float:
            deviations = random.normal(scale=spread, size=48)
            deviations[groups] -= deviations[groups].mean(axis=1, keepdims=True)
            shift = favoured * 0.25 / math.sqrt(groups.shape[1])
            deviations[groups] += shift * random.choice((-1, 1), size=(K, 1))
            rates = 6.0 + deviations + light * frames.light
            matrix = argmax_labels.confusion_at(frames.law, groups, rates, rates)
            return argmax_epsilon(*matrix, symmetrised=True)

        assert max(uneven(0.5, 1.0) for _ in range(5)) <= narrow
        twice = light * frames.light  # planted: groups whose means differ by more than the limit
        gained = []
        for label in range(K):
            dark = np.full(48, 5.0)
            dark[groups[label]] = 7.0
            rates = dark + twice
            gained.append(argmax_labels.confusion_at(frames.law, groups, rates, rates)[0][label, label])
        assert np.all(gained > np.diag(confusion(frames, groups, whole)[1]))
    with certified() as boxes:
        whole = shared_range(boxes, groups.shape[1], light)
        assert narrow < argmax_labels.largest_epsilon(partial(confusion, boxes, groups), whole, 1.0)


@pytest.mark.slow
def test_what_outputs_share_is_covered_in_cells(answers: ArgmaxReadout) -> None:
    """One box of all light and dark charge would let groups differ by what they share."""
    groups, light = answers.groups, answers.light
    with certified(**SPREAD) as frames:
        limits, whole = partial(confusion, frames, groups), shared_range(frames, groups.shape[1], light)
        found = argmax_labels.largest_epsilon(limits, whole, argmax_labels.own_light(frames.light, groups))
        at_once = argmax_epsilon(*limits(whole), symmetrised=True)
        points = [
            argmax_epsilon(
                *limits(argmax_labels.Cell(least=w, most=w, dark_low=d, dark_high=d)), symmetrised=True
            )
            for w in np.linspace(whole.least, whole.most, 4)
            for d in np.linspace(whole.dark_low, whole.dark_high, 4)
        ]
    assert max(points) <= found < 0.9 * at_once
    assert found <= 1.006 * max(points)


def test_frames_dimmer_than_their_mean_are_covered() -> None:
    """A certificate bounds the mean light from below, and half of all frames are dimmer than that."""
    rms, steps = 2e-3, 8  # as opusim.calibration.calibrate allows for
    high = 1.01 * (1 + steps * rms)
    with certified(light_ratio_low=0.99, light_ratio_high=high) as frames:
        whole = shared_range(frames, 4, 0.5)
    assert 0.5 * 0.95 < whole.least <= 0.5 * 0.99 * (1 - steps * rms)
    assert whole.most == 0.5 * high


def test_dead_pixels_tell_nothing_under_a_certificate_either() -> None:
    with certified({"pixels": {"dead_share": 0.1}}) as frames:
        assert np.any(np.all(frames.light == 0, axis=0))
        found = CountsReadout.within(frames, epsilon=EPSILON, delta=DELTA)
        assert 0 < found.light < 1
        assert np.all(np.isfinite(found.log_likelihood(torch.arange(K))))


def test_answers_of_a_faulty_instrument_have_the_stated_law(seed: int) -> None:
    """Cross-talk, stuck mirrors, hot, dead and uneven pixels, and a read-out that bends."""
    pixels = {"hot_share": 0.05, "hot_factor": 3.0, "dead_share": 0.05, "dcnu": 0.2, "crosstalk": 0.1}
    faults = {
        "pixels": pixels | {"nonlinearity": 0.2}, "mirrors": {"stuck_on": 0.1, "contrast": 100.0},
        "sensor": {"full_well_e": 60.0}, "anchor": {"most_saturated": 1.0},
    }  # fmt: skip
    n, light = 4000, 0.04
    with open_device("camera_low_light", n_inputs=K, n_outputs=48, camera=faults, seed=seed) as device:
        frames = LabelFrames.of(device, K)
        groups, own = argmax_labels.label_groups(frames.light), np.repeat(np.arange(K), n)
        taken = frames.taken(torch.from_numpy(own), light).astype(np.float64)
        sums = taken[:, groups].sum(axis=2) + np.random.default_rng(seed).random((len(own), K))
        law = confusion(frames, groups, argmax_labels.Cell(least=light, most=light))[0]
        straight = number_law(frames.rates(light), frames.law.offset_e, frames.law.sensor)
    found = np.zeros((K, K))
    np.add.at(found, (own, sums.argmax(axis=1)), 1 / n)
    assert deviation(found, law, n) < PAIR_LIMIT
    codes = straight.first + np.arange(straight.masses.shape[2])
    means = straight.masses[0] @ codes
    errors = np.sqrt((straight.masses[0] @ codes**2 - means**2) / n)
    off = np.abs(taken[:n].mean(axis=0) - means) / errors
    assert off.max() > 5  # planted: numbers of a straight read-out


DRIFTING = {"law": "log_normal", "rms": 0.01, "drift_rms": 0.01, "drift_s": 3600.0, "seconds_per_step": 1.0}


@pytest.mark.parametrize(("camera", "message"), [
    (None, "device 'gaussian' counts no photons at rates that are known"),
    ({"drift": {"decorrelation_s": 1e5, "seconds_per_step": 1.0}}, "known; use a camera without drift"),
    ({"transfer": {"dropped": 0.01}}, "use a camera without drift"),
    ({"light": {"power": DRIFTING}}, "camera.light.power.drift_rms"),
    ({"pixels": {"row_noise_e": 1.0}}, "camera.pixels.row_noise_e"),
])  # fmt: skip
def test_devices_that_count_no_labels_are_refused(camera: dict[str, Any] | None, message: str) -> None:
    name, options = ("gaussian", {}) if camera is None else ("camera_low_light", {"camera": camera})
    device = open_device(name, n_inputs=K, n_outputs=8, **options)
    with device, pytest.raises(ConfigError, match=message):
        LabelFrames.of(device, K)


ONCE: dict[str, Any] = {
    "epochs": 2, "threads": 1, "model": {"hidden": [24]}, "data": {"n_classes": 3}, "sampler": {"batch_size": 16},
    "device": {"name": "camera_low_light"},
}  # fmt: skip


def config_of(noise: str, **others: Any) -> dict[str, Any]:
    return {**ONCE, "protection": {"kind": "label-readout", "epsilon": 3.0, "noise": noise}, **others}


def data(n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(1).normal(size=(n, 5)), np.arange(n) % 3


def certified_section(folder: Path, **limits: Any) -> tuple[dict[str, str], Certificate]:
    """The section `device` of a camera under a certificate, and that certificate."""
    with open_device("camera_low_light", n_inputs=3, n_outputs=24) as device:
        certificate = certified_of(device, beta=1e-6, **limits)
    certificate.write(folder / "certificate.toml")
    return {"name": "camera_low_light", "certificate": str(folder / "certificate.toml")}, certificate


@pytest.mark.parametrize("mode", ["experiment", "release"])
@pytest.mark.parametrize(("noise", "kind"), [("counts", LabelCounts), ("argmax", LabelArgmax)])
def test_a_run_states_and_pays_one_look(noise: str, kind: type[Mechanism], mode: str, tmp_path: Path) -> None:
    run = training.train(config_of(noise, mode=mode), data=data(), folder=tmp_path / "run")
    (guarantee,) = run.guarantees
    assert guarantee.status.value == "proven under a device model"
    assert 2.9 < guarantee.epsilon <= 3.0
    ledger = read_ledger(run.folder.ledger_file)
    (mechanism,) = ledger.mechanisms
    assert isinstance(mechanism, kind)
    assert mechanism.steps == 1
    scores = read_array(run.folder.labels_file)
    assert scores.shape == (54, 3)
    assert (len(np.unique(scores)) == 2) == (noise == "argmax")


@pytest.mark.parametrize(("noise", "kind"), [("counts", LabelCounts), ("argmax", LabelArgmax)])
def test_a_run_under_a_certificate_pays_its_beta_once(noise: str, kind: Any, tmp_path: Path) -> None:
    chosen, certificate = certified_section(tmp_path, dark_e_low=5.9, dark_e_high=6.1)
    run = training.train(config_of(noise, device=chosen), data=data(), folder=tmp_path / "run")
    assert 2.9 < run.guarantees[0].epsilon <= 3.0
    (mechanism,) = read_ledger(run.folder.ledger_file).mechanisms
    assert isinstance(mechanism, kind)
    assert (mechanism.beta, mechanism.certificate) == (1e-6, certificate.digest)


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_a_run_measures_rates_that_a_certificate_omits(mode: str, tmp_path: Path, ctrl_c_at: type) -> None:
    """Pixels respond by 0.5 % otherwise than described, which only frames tell."""
    open_light = {"light_spread": "unknown", "frame_ratio_high": 1.001}
    gains = {"gain_dn_per_e_low": 0.99, "gain_dn_per_e_high": 1.01}
    chosen, _ = certified_section(tmp_path, **open_light, **gains)
    config = config_of("counts", device=chosen, mode=mode)
    with pytest.raises(ConfigError, match="light_spread: leaves the light of single outputs open"):
        training.train(config, data=data(), folder=tmp_path / "unmeasured")
    config["protection"] = {**config["protection"], "rate_frames": 1000}
    with pytest.raises(RunInterrupted):
        training.train(config, data=data(), folder=tmp_path / "run", watcher=ctrl_c_at(2))
    run = training.train(data=data(), folder=tmp_path / "run", resume=True)
    (guarantee,) = run.guarantees
    assert 2.9 < guarantee.epsilon <= 3.0
    assert guarantee.theorem == "measured-rates"
    (mechanism,) = read_ledger(run.folder.ledger_file).mechanisms
    assert isinstance(mechanism, LabelCounts)
    assert 1e-6 < mechanism.beta < 2e-6  # a tenth of what the certificate leaves of delta
    assert "of the measured light" in mechanism.describe()


def test_experiments_repeat_and_releases_do_not(tmp_path: Path) -> None:
    def look(noise: str, mode: str, name: str) -> np.ndarray:  # 0.8^n of two releases show the same n labels
        run = training.train(config_of(noise, mode=mode), data=data(120), folder=tmp_path / name)
        return read_array(run.folder.labels_file)

    for noise in ("counts", "argmax"):
        first, again = (look(noise, "experiment", f"{noise}{turn}") for turn in (1, 2))
        np.testing.assert_array_equal(first, again)
        fresh = look(noise, "release", f"{noise}3")
        assert not np.array_equal(fresh, look(noise, "release", f"{noise}4"))


@pytest.mark.parametrize(("config", "message"), [
    (config_of("counts", device={"name": "gaussian"}), "'counts' needs a device that counts photons"),
    (config_of("device"), "'device' takes a Gaussian law, .* counts photons; use 'counts' or 'argmax'"),
    (config_of("argmax", trainer={"kind": "bp"}, device={}), "'argmax' needs a device"),
    (config_of("argmax", model={"hidden": [2]}), "'argmax' needs an output for each of 3 labels"),
])  # fmt: skip
def test_runs_that_cannot_count_labels_are_refused_at_once(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        training.train(config, data=data(), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
