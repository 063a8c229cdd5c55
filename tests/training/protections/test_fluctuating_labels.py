"""Labels that a camera counts under light that fluctuates: what is kept holds for every power that a frame may have."""

import math
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

from opusim import open_device, training
from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Status
from opusim.accounting.ledger import read_ledger
from opusim.accounting.mechanisms.counts import LabelArgmax, argmax_epsilon
from opusim.description.schema import load_description
from opusim.devices.certificate import FluctuatingCountLaw
from opusim.errors import ConfigError
from opusim.noise import LightPower
from opusim.training.protections import argmax_labels
from opusim.training.protections.argmax_labels import ArgmaxReadout, Cell, LabelFrames, confusion
from opusim.training.protections.counted_labels import CountsReadout
from opusim.training.reports.device_privacy import OperatingPoint, label_counts
from tests.support.certificates import certificate_of
from tests.training.protections.test_counted_labels import DELTA, EPSILON, LIMIT, PAIRS, K, N, calibration

POWER = {"law": "log_normal", "rms": 0.3}
"""Far more than a laser's, so that a light that does not allow for it is seen at this size."""
CAMERA: dict[str, Any] = {"camera": {"light": {"power": POWER}}}


@pytest.fixture(scope="module")
def frames() -> Iterator[LabelFrames]:
    with open_device("camera_low_light", n_inputs=K, n_outputs=48, **CAMERA) as device:
        yield LabelFrames.of(device, K)


@pytest.fixture(scope="module")
def counts(frames: LabelFrames) -> CountsReadout:
    return CountsReadout.within(frames, epsilon=EPSILON, delta=DELTA)


@pytest.fixture(scope="module")
def answers(frames: LabelFrames) -> ArgmaxReadout:
    return ArgmaxReadout.within(frames, epsilon=EPSILON, delta=DELTA)


def realised_delta(readout: CountsReadout, a: int, b: int, light: float) -> tuple[float, float]:
    """E max(0, 1 - e^(epsilon - loss)) for an attacker who also sees the power of the frame, and its standard error."""
    frames, generator = readout.frames, np.random.default_rng(a * K + b)
    power = frames.power.of_normal(generator.standard_normal(N))[:, None]
    shown, other = (frames.light[label, readout.pixels] for label in (a, b))
    dark = frames.dark[readout.pixels]
    rates = [light * power * part + dark for part in (shown, other)]
    losses = (generator.poisson(rates[0]) * np.log(rates[0] / rates[1]) - (rates[0] - rates[1])).sum(axis=1)
    excess = np.maximum(0.0, -np.expm1(EPSILON - losses))
    return float(excess.mean()), float(excess.std() / math.sqrt(N))


def test_kept_counts_hold_even_if_the_power_of_each_frame_is_known(counts: CountsReadout) -> None:
    found = [realised_delta(counts, a, b, counts.light) for a, b in PAIRS]
    assert all(delta <= DELTA + 5 * error for delta, error in found)
    at_mean = counts.light * counts.frames.brightest(counts.mechanism.power_error)  # planted: the mean power
    brighter = [realised_delta(counts, a, b, at_mean) for a, b in PAIRS]
    assert any(delta > DELTA + 5 * error for delta, error in brighter)


def test_the_power_takes_its_share_of_delta(counts: CountsReadout, answers: ArgmaxReadout) -> None:
    for mechanism in (counts.mechanism, answers.mechanism):
        assert mechanism.power_error == argmax_labels.POWER_SHARE * DELTA
        (found,) = guarantees([mechanism], delta=DELTA)
        assert 0.98 * EPSILON <= found.epsilon <= EPSILON  # an answer leaves some of delta unused
        assert found.status is Status.PROVEN_UNDER_DEVICE_MODEL
        assert any("delta holds beta of use = 0.002" in each.text for each in found.assumptions)
        (nothing,) = guarantees([mechanism], delta=mechanism.power_error)
        assert math.isinf(nothing.epsilon)
        assert "light brighter than accounted for" in str(nothing.reason)
        twice = guarantees([mechanism.repeated(2)], delta=2 * mechanism.power_error)
        assert math.isinf(twice[0].epsilon)  # every frame may be too bright


def test_an_answer_tells_no_more_at_any_power_that_is_allowed_for(answers: ArgmaxReadout) -> None:
    frames, stated = answers.frames, answers.mechanism.step_epsilon
    brightest = frames.brightest(answers.mechanism.power_error)

    def epsilon(power: float) -> float:
        light = answers.light * power
        found = confusion(frames, answers.groups, Cell(least=light, most=light))
        return argmax_epsilon(*found, symmetrised=True)

    powers = brightest * np.linspace(0.01, 1, 23)
    assert max(epsilon(float(power)) for power in powers) <= stated <= EPSILON
    assert epsilon(1.02 * brightest) > stated  # planted: a brighter frame


def test_powers_below_the_brightest_are_searched_too() -> None:
    """A matrix whose epsilon is largest at half the power: epsilon at the brightest is no bound."""

    def limits(cell: Cell) -> tuple[np.ndarray, np.ndarray]:
        least, most = cell.least, cell.most
        ends = [0.5 + 0.4 * math.exp(-200 * (light - 0.5) ** 2) for light in (least, most)]
        top = 0.9 if least <= 0.5 <= most else max(ends)
        low, other = min(ends), 1 - np.eye(2)
        return low * np.eye(2) + (1 - top) * other, top * np.eye(2) + (1 - low) * other

    at_most = math.log(0.9 / 0.1)
    found = argmax_labels.largest_epsilon(limits, Cell(least=0.0, most=1.0), 1.0)
    assert at_most <= found * (1 + 1e-9) <= 1.006 * at_most
    brightest = Cell(least=1.0, most=1.0)  # planted: the brightest only
    assert argmax_labels.largest_epsilon(limits, brightest, 1.0) < 0.01


def test_training_gets_the_posterior_over_the_powers(counts: CountsReadout, seed: int) -> None:
    labels = torch.from_numpy(np.random.default_rng(seed).integers(0, K, N))
    counts.frames.device.seek(seed % 2**32)
    scores = counts.log_likelihood(labels)
    assert calibration(scores, labels.numpy()) < LIMIT
    assert calibration(2.5 * scores, labels.numpy()) > LIMIT  # planted: too sure of the label


def test_answers_are_the_randomized_response_of_the_mean_power(answers: ArgmaxReadout, seed: int) -> None:
    n = 15_000
    own = np.repeat(np.arange(K), n)
    answers.frames.device.seek(seed % 2**32)
    found = answers.answers(torch.from_numpy(own), np.random.default_rng(seed))
    kept = float((found == own).mean())
    error = math.sqrt(answers.keep * (1 - answers.keep) / own.size)
    assert abs(kept - answers.keep) < 5 * error
    assert abs(kept - answers.mechanism.keep_probability) > 5 * error  # that of the brightest frame


LAW = FluctuatingCountLaw(
    **{"dark_e_low": 5.7, "dark_e_high": 6.3, "light_ratio_low": 0.9, "light_ratio_high": 1.1},
    **{"power_law": "log_normal", "power_rms_low": 0.28, "power_rms_high": 0.32},
)


def test_a_certificate_of_fluctuating_light_adds_spread_and_beta(counts: CountsReadout, answers: Any) -> None:
    with open_device("camera_low_light", n_inputs=K, n_outputs=48, **CAMERA) as device:
        certificate = certificate_of(device.description, LAW, n_inputs=K, n_outputs=48)
        device.attach_certificate(certificate)
        limits = LabelFrames.of(device, K)
        assert limits.power.rms == 0.32
        kept = CountsReadout.within(limits, epsilon=EPSILON, delta=DELTA)
        channel = ArgmaxReadout.within(limits, epsilon=EPSILON, delta=DELTA)
    assert kept.light < counts.light / 1.1
    brightest = limits.brightest(channel.mechanism.power_error)
    whole = argmax_labels.shared_range(limits, answers.groups.shape[1], answers.light * brightest, least=0.0)
    at_described = argmax_epsilon(*confusion(limits, answers.groups, whole.worst), symmetrised=True)
    assert at_described > 1.1 * EPSILON  # planted: the light without a certificate
    for mechanism in (kept.mechanism, channel.mechanism):
        assert (mechanism.beta, mechanism.certificate) == (1e-3, certificate.digest)
        assert mechanism.power_error == pytest.approx(argmax_labels.POWER_SHARE * (DELTA - 1e-3))
        (found,) = guarantees([mechanism], delta=DELTA)
        assert any("dimmed from the certified light" in each.text for each in found.assumptions)
    with pytest.raises(ConfigError, match="0.001 leaves nothing .* set it above the beta = 0.001"):
        ArgmaxReadout.within(limits, epsilon=EPSILON, delta=1e-3)


@pytest.mark.parametrize("kept", ["counts", "argmax", "reading"])
def test_account_device_takes_the_light_of_training(kept: str) -> None:
    description = load_description("camera_low_light", {"camera": {"light": {"power": POWER}}})
    found = label_counts(description, n_classes=K, n_outputs=24, delta=DELTA, kept=kept)  # type: ignore[arg-type]
    light = found.share_for(EPSILON, "light")
    assert light is not None
    statement = found.guarantee(OperatingPoint(light=light))
    assert 0.98 * EPSILON <= statement.epsilon <= EPSILON
    assert any("delta holds beta of use" in each.text for each in statement.assumptions)
    if kept == "reading":
        return
    with open_device("camera_low_light", n_inputs=K, n_outputs=24, **CAMERA) as device:
        seen = LabelFrames.of(device, K)
        readout = CountsReadout if kept == "counts" else ArgmaxReadout
        assert readout.within(seen, epsilon=EPSILON, delta=DELTA).light == pytest.approx(light, rel=5e-3)


@pytest.mark.slow
def test_account_device_holds_where_darker_frames_tell_more() -> None:
    """Full pixels tie, so that a bright frame tells less than a dark one: the brightest alone are no bound."""
    changes: dict[str, Any] = {
        "light": {"power": POWER},
        "sensor": {"full_well_e": 12.0, "adc_bits": 6, "black_level_dn": 8.0},
        "anchor": {"most_saturated": 1.0},
    }
    description = load_description("camera_low_light", {"camera": changes})
    found = label_counts(description, n_classes=2, n_outputs=2, delta=DELTA, kept="argmax")
    target = 0.4
    assert found.may_reach(target, OperatingPoint())  # planted: the brightest frames tell less
    assert found.epsilon(OperatingPoint()) > target
    light = found.share_for(target, "light")
    assert light is not None
    assert light < 1
    assert found.guarantee(OperatingPoint(light=light)).epsilon <= target


def test_answers_under_light_that_fluctuates_need_a_delta(frames: LabelFrames) -> None:
    with pytest.raises(ConfigError, match="protection.delta: 0 leaves nothing for light that fluctuates"):
        ArgmaxReadout.within(frames, epsilon=EPSILON)


@pytest.mark.slow
def test_a_run_states_the_device_model_and_its_beta_of_use(tmp_path: Path) -> None:
    config = {
        "epochs": 1, "data": {"name": "digits"}, "model": {"hidden": [40]},
        "device": {"name": "camera_low_light", **CAMERA},
        "protection": {"kind": "label-readout", "noise": "argmax", "epsilon": 3.0}, "trainer": {"kind": "pdfa"},
    }  # fmt: skip
    training.train(config, folder=tmp_path / "run")
    (mechanism,) = read_ledger(tmp_path / "run" / "ledger.jsonl").mechanisms
    assert isinstance(mechanism, LabelArgmax)
    assert mechanism.power_error == pytest.approx(1e-6)
    assert "light brighter with probability 1e-06" in mechanism.describe()


def test_a_certificate_of_another_law_of_the_power_is_refused() -> None:
    with open_device("camera_low_light", n_inputs=K, n_outputs=8, **CAMERA) as device:
        stated = device.noise
        other = LAW.model_copy(update={"power_law": "gaussian", "power_rms_low": 0.1, "power_rms_high": 0.12})
        certificate = certificate_of(device.description, other, n_inputs=K, n_outputs=8)
    with pytest.raises(ConfigError, match="power_law: is 'gaussian', the device's .* is 'log_normal'"):
        certificate.certified(stated)
    same = certificate.model_copy(update={"noise": other.model_copy(update={"power_law": "log_normal"})})
    assert same.certified(stated).beta == 1e-3


@pytest.mark.parametrize("name", ["log_normal", "gaussian"])
@pytest.mark.parametrize("beta", [1e-6, 0.05, 0.3, 0.45, 0.6])
def test_the_limit_of_an_upper_spread_holds_for_smaller_ones(name: str, beta: float) -> None:
    """A certificate states an upper limit of the spread; the largest spread need not have the largest quantile."""
    most = 1.0 if name == "log_normal" else 0.2
    limit = LightPower(law=name, rms=most).limit(beta)
    laws = (LightPower(law=name, rms=float(rms)) for rms in most * np.linspace(0.001, 1, 200))
    quantiles = [float(law.of_normal(norm.isf(beta))) for law in laws]
    assert max(quantiles) <= limit <= 1.001 * max(*quantiles, 1.0)


def test_holograms_hold_even_if_the_power_of_each_frame_is_known() -> None:
    """The reference's light fluctuates with the field's: it is light, and nothing of it is dark."""
    found = label_counts(load_description("camera_holography", CAMERA), n_classes=3, n_outputs=6, delta=DELTA)
    light = found.share_for(EPSILON, "light")
    assert light is not None
    law = found.law
    dark = law.credited_rates(OperatingPoint(light=1e-300))[:4, 0]  # (frames, pixels), no reference
    assert float(dark.max()) < 0.1 * float(law.light_e[4:].min())
    generator = np.random.default_rng(5)
    power = law.power.of_normal(generator.standard_normal((N, 4)))[:, :, None]

    def exceeds(light: float) -> bool:
        for a, b in permutations(range(3), 2):
            rates = [light * power * law.light_e[:4, label] + dark for label in (a, b)]
            losses = generator.poisson(rates[0]) * np.log(rates[0] / rates[1]) - (rates[0] - rates[1])
            excess = np.maximum(0.0, -np.expm1(EPSILON - losses.sum(axis=(1, 2))))
            if excess.mean() > DELTA + 5 * excess.std() / math.sqrt(N):
                return True
        return False

    assert not exceeds(light)
    at_mean = light * law.power.limit(argmax_labels.POWER_SHARE * DELTA / 4)
    assert exceeds(at_mean)  # planted: only the mean is allowed for


def test_labels_of_holograms_are_refused_where_no_frame_has_the_reference() -> None:
    refused = pytest.raises(ConfigError, match="reads holograms")
    with open_device("camera_holography", n_inputs=K, n_outputs=8) as device, refused:
        LabelFrames.of(device, K)
    description, size = load_description("camera_holography"), {"n_classes": K, "n_outputs": 8}
    for kept in ("counts", "argmax"):
        with pytest.raises(ConfigError, match="reads holograms"):
            label_counts(description, **size, delta=DELTA, kept=kept)  # type: ignore[arg-type]
