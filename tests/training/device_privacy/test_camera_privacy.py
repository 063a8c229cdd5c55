"""Temperature to sigma to epsilon and back, for label readings of a camera."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import NoGuarantee, Status, Unit
from opusim.accounting.mechanisms.counts import argmax_epsilon
from opusim.accounting.mechanisms.labels import LabelReadout, label_distance
from opusim.camera.exposure import OperatingPoint
from opusim.description.schema import load_description
from opusim.devices.certificate import PhotonCountLaw
from opusim.devices.registry import open_device
from opusim.errors import ConfigError
from opusim.training.cli.app import app
from opusim.training.protections.argmax_labels import (
    ArgmaxReadout,
    Cell,
    LabelFrames,
    confusion,
    label_groups,
    shared_range,
)
from opusim.training.protections.counted_labels import CountsReadout
from opusim.training.reports.device_privacy import LabelCounts, label_counts, target_rows, temperature_rows
from tests.support.certificates import certificate_of

DELTA = 1e-2
HOT = OperatingPoint(temperature_c=60.0, light=0.01)


@pytest.fixture(scope="module")
def counts() -> LabelCounts:
    return of_camera(outputs=64)


def of_camera(
    changes: dict[str, Any] | None = None, *, classes: int = 3, outputs: int = 16, kept: Any = "reading"
) -> LabelCounts:
    description = load_description("camera_low_light", changes)
    return label_counts(description, n_classes=classes, n_outputs=outputs, delta=DELTA, kept=kept)


def realised_delta(
    counts: LabelCounts, point: OperatingPoint, epsilon: float, seed: int, frames: int = 2
) -> tuple[float, float]:
    """E max(0, 1 - exp(epsilon - loss)) over drawn counts, the largest over pairs of labels, and its error."""
    random = np.random.default_rng(seed)
    rates = counts.law.rates(point)[:frames].transpose(1, 0, 2).reshape(3, -1)
    found = []
    for a in range(3):
        drawn = random.poisson(rates[a], (20_000, rates.shape[1]))
        for b in {0, 1, 2} - {a}:
            loss = drawn @ np.log(rates[a] / rates[b]) - (rates[a] - rates[b]).sum()
            excess = np.maximum(0.0, -np.expm1(epsilon - loss))
            found.append((float(excess.mean()), float(excess.std() / excess.size**0.5)))
    return max(found)


def test_counts_leak_at_most_what_is_stated_and_more_than_sigma_says(counts: LabelCounts, seed: int) -> None:
    delta, error = realised_delta(counts, HOT, counts.epsilon(HOT), seed)
    assert delta <= DELTA + 5 * error
    with open_device("camera_low_light", n_inputs=3, n_outputs=64) as device:
        mu = label_distance(device.matrix().double().numpy()) / counts.law.std(HOT)
    (gaussian,) = guarantees([LabelReadout(mu=mu, device_law=True)], delta=DELTA)
    assert gaussian.epsilon < counts.epsilon(HOT)
    delta, error = realised_delta(counts, HOT, gaussian.epsilon, seed)  # planted fault: a variance for a law
    assert delta > DELTA + 10 * error


def test_the_statement_names_its_law(counts: LabelCounts) -> None:
    found = counts.guarantee(OperatingPoint())
    assert found.status is Status.PROVEN_UNDER_DEVICE_MODEL
    assert found.unit is Unit.LABEL
    assert "128 photon counts" in found.mechanism


def test_epsilon_falls_with_temperature_bias_and_less_light(counts: LabelCounts) -> None:
    for knob, values in (
        ("temperature_c", (-30.0, 20.0, 60.0)),
        ("light", (1.0, 0.1, 0.001)),
        ("exposure", (1.0, 0.3, 1e-4)),
        ("bias_e", (0.0, 10.0, 1e4)),
    ):
        epsilons = [counts.epsilon(OperatingPoint(**{knob: value})) for value in values]
        assert epsilons == sorted(epsilons, reverse=True)
        assert len(set(epsilons)) == 3


def test_each_way_back_gives_the_target(counts: LabelCounts) -> None:
    target = 3.0
    temperature, light = counts.temperature_for(target, 0.01), counts.share_for(target, "light")
    exposure, bias = counts.share_for(target, "exposure"), counts.bias_for(target)
    assert None not in (temperature, light, exposure, bias)
    for point in (
        OperatingPoint(temperature_c=temperature, light=0.01), OperatingPoint(light=light),
        OperatingPoint(exposure=exposure), OperatingPoint(bias_e=bias),
    ):  # fmt: skip
        assert target * (1 - 1e-2) <= counts.epsilon(point) <= target
    assert counts.temperature_for(target, 1.0) is None
    assert counts.temperature_for(1e6, 1.0) == -30.0
    assert counts.share_for(1e6, "light") == 1.0
    assert replace(counts, delta=1e-12).share_for(0.5, "exposure") is None


def test_settings_stay_within_the_target_as_they_are_printed(counts: LabelCounts) -> None:
    ways = {
        "temperature, at 0.01 of the light": lambda t: OperatingPoint(temperature_c=t, light=0.01),
        "laser light": lambda share: OperatingPoint(light=share),
        "exposure": lambda us: OperatingPoint(exposure=us / counts.law.exposure_us),
        "bias light": lambda bias: OperatingPoint(bias_e=bias),
    }
    checked = set()
    for target in (3.0, 5.0):
        for row in target_rows(counts, [target]):
            if row["by"] in ways and row["epsilon"]:
                epsilon = counts.epsilon(ways[row["by"]](float(row["setting"].split()[0])))
                assert 0.98 * target <= epsilon <= target, row
                assert float(row["epsilon"]) == pytest.approx(epsilon, abs=5.1e-4)
                checked.add(row["by"])
    assert {"temperature, at 0.01 of the light", "laser light", "exposure"} <= checked


def test_a_camera_without_dark_current_has_no_temperatures() -> None:
    found = of_camera({"camera": {"dark": None}})
    assert [row["°C"] for row in temperature_rows(found)] == ["off"]
    assert math.isfinite(found.epsilon(OperatingPoint()))
    assert {row["by"] for row in target_rows(found, [3.0])} == {"laser light", "exposure", "bias light"}


def test_an_exposure_that_no_camera_takes_is_not_offered() -> None:
    light = {"shortest_exposure_us": 150_000.0}
    found = of_camera({"camera": {"light": light, "dark": None}}, classes=2, outputs=3)
    rows = {row["by"]: row for row in target_rows(found, [1.0])}
    assert rows["exposure"]["setting"].endswith("the camera exposes 150000 at least")
    assert not rows["exposure"]["epsilon"]


def test_an_exposure_that_averages_the_power_is_not_searched() -> None:
    power = {"law": "gaussian", "rms": 0.05, "correlation_us": 2000.0, "averages": True}
    found = of_camera({"camera": {"light": {"power": power}, "dark": None}}, classes=2, outputs=3)
    with pytest.raises(ValueError, match="exposure = 0.5: frames average the laser's power"):
        found.epsilon(OperatingPoint(exposure=0.5))  # shorter frames see more of the power's noise
    rows = {row["by"]: row["setting"] for row in target_rows(found, [3.0])}
    assert rows["exposure"].startswith("not searched")
    assert not rows["laser light"].startswith("not searched")


def test_the_command_draws_both_directions(tmp_path: Path) -> None:
    figure = tmp_path / "figure.png"
    call = f"account device camera_low_light --outputs 8 --classes 2 --target-epsilon 2 --figure {figure}"
    result = CliRunner().invoke(app, call.split())
    assert result.exit_code == 0, result.output
    assert figure.is_file()
    refused = CliRunner().invoke(app, ["account", "device", "gaussian", "--figure", str(figure)])
    assert "counts no photons" in str(refused.exception)


@pytest.mark.parametrize("target", ["0", "-1", "nan"])
def test_a_target_that_is_no_epsilon_is_refused_before_anything_is_printed(target: str) -> None:
    call = ["account", "device", "camera", "--outputs", "8", "--target-epsilon", target]
    refused = CliRunner().invoke(app, call)
    assert "target_epsilon = " in str(refused.exception)
    assert not refused.output


@pytest.mark.parametrize("kept", ["counts", "argmax"])
def test_what_training_keeps_is_inverted_too(kept: str) -> None:
    """The light of `account device` is the one that training takes at the same epsilon."""
    target, found = 2.0, of_camera(outputs=18, kept=kept)
    light, exposure = found.share_for(target, "light"), found.share_for(target, "exposure")
    assert light is not None
    assert exposure is not None
    for point in (OperatingPoint(light=light), OperatingPoint(exposure=exposure)):
        assert 0.99 * target <= found.epsilon(point) <= target
    assert exposure < light  # a shorter exposure has less dark charge, which hides the label
    with open_device("camera_low_light", n_inputs=3, n_outputs=18) as device:
        kind = CountsReadout if kept == "counts" else ArgmaxReadout
        readout = kind.within(LabelFrames.of(device, 3), epsilon=target, delta=DELTA)
    assert readout.light == pytest.approx(light, rel=5e-3)
    assert found.temperature_for(target, light * 1.1) is not None


@pytest.mark.slow
def test_holograms_leak_no_more_than_their_exact_counts_say(seed: int) -> None:
    """The four frames of a label under the reference beam, which dims with the laser; the others tell nothing."""
    description = load_description("camera_holography")
    holograms = label_counts(description, n_classes=3, n_outputs=64, delta=DELTA)
    stated = holograms.epsilon(HOT)
    delta, error = realised_delta(holograms, HOT, stated, seed, frames=4)
    assert delta <= DELTA + 5 * error
    half = replace(holograms, law=replace(holograms.law, light_e=holograms.law.light_e[:4]))
    assert half.epsilon(HOT) < stated  # planted fault: two of the four frames are forgotten
    delta, error = realised_delta(holograms, HOT, half.epsilon(HOT), seed, frames=4)
    assert delta > DELTA + 5 * error


def test_kept_counts_are_for_cameras_only() -> None:
    for call, message in (
        (["gaussian", "--kept", "counts"], "'gaussian' counts no photons"),
        (["camera", "--kept", "all"], "kept = 'all'"),
    ):
        refused = CliRunner().invoke(app, ["account", "device", *call])
        assert message in str(refused.exception)


@pytest.mark.parametrize("kept", ["reading", "counts"])
def test_ambient_light_that_may_be_gone_buys_no_epsilon(kept: str) -> None:
    point, fluxes = OperatingPoint(light=0.05), (None, 1e3)
    dark, lit = (of_camera({"camera": {"light": {"ambient_flux_per_s": x}}}, kept=kept) for x in fluxes)
    assert lit.epsilon(point) == pytest.approx(dark.epsilon(point), rel=1e-6)
    assert lit.law.std(point) > 2 * dark.law.std(point)


def test_the_argmax_under_ambient_light_is_refused() -> None:
    found = of_camera({"camera": {"light": {"ambient_flux_per_s": 100.0}}}, kept="argmax")
    with pytest.raises(ConfigError, match="ambient_flux_per_s: .* electrons a frame may change"):
        found.epsilon(OperatingPoint())


LIMITS = PhotonCountLaw(
    **{"dark_e_low": 5.7, "dark_e_high": 6.3, "dark_mean_e_low": 5.95, "dark_mean_e_high": 6.05},
    **{"dark_deviation_e": 0.25, "light_ratio_low": 0.98, "light_ratio_high": 1.1},
)
"""They hold, with shared and single dark charge apart."""


@pytest.mark.parametrize("kept", ["counts", pytest.param("argmax", marks=pytest.mark.slow), "reading"])
def test_a_certificate_takes_the_light_of_training_and_its_beta(kept: str) -> None:
    target, description = 2.0, load_description("camera_low_light")
    with open_device("camera_low_light", n_inputs=3, n_outputs=18) as device:
        certificate = certificate_of(device.description, LIMITS, n_inputs=3, n_outputs=18)
        device.attach_certificate(certificate)
        readout = {"counts": CountsReadout, "argmax": ArgmaxReadout}.get(kept)
        trained = readout and readout.within(LabelFrames.of(device, 3), epsilon=target, delta=DELTA)
    options: dict[str, Any] = {"n_classes": 3, "n_outputs": 18, "delta": DELTA, "kept": kept}
    held = label_counts(description, certificate=certificate, **options)
    free = label_counts(description, **options)
    (row,) = target_rows(held, [target])
    assert row["by"] == "laser light"
    assert 0.97 * target <= float(row["epsilon"]) <= target
    if trained:
        assert float(row["setting"].split()[0]) == pytest.approx(trained.light, rel=6e-3)
    point = OperatingPoint(light=float(row["setting"].split()[0]))
    assert free.epsilon(point) < 0.97 * held.epsilon(point)  # planted: the description's own numbers
    stated = held.guarantee(point)
    assert stated.delta == DELTA
    strict = replace(held, delta=1e-3)  # beta takes all of it
    assert not math.isfinite(_or_refused(strict, point))


def _or_refused(counts: LabelCounts, point: OperatingPoint) -> float:
    try:
        return counts.guarantee(point).epsilon
    except NoGuarantee:
        return math.inf


def test_the_command_takes_a_certificate_and_refuses_that_of_another_device(tmp_path: Path) -> None:
    file, described = tmp_path / "certificate.toml", load_description("camera_low_light")
    certificate_of(described, LIMITS, n_inputs=2, n_outputs=8).write(file)
    call = ["--outputs", "8", "--classes", "2", "--target-epsilon", "2", "--delta", "0.01"]
    call += ["--certificate", str(file)]
    found = CliRunner().invoke(app, ["account", "device", "camera_low_light", *call], env={"COLUMNS": "200"})
    assert found.exit_code == 0, found.output
    assert "of the described light" in found.output
    assert "temperature" not in found.output  # a certificate holds at one temperature
    small = CliRunner().invoke(app, ["account", "device", "camera_low_light", *call, "--delta", "0.001"])
    assert "must exceed beta = 0.001, the certificate's own error; raise delta" in str(small.exception)
    refused = CliRunner().invoke(app, ["account", "device", "camera_fluctuating", *call])
    assert "is that of 'camera_low_light'; calibrate this device" in str(refused.exception)


DRIFTING = {"law": "log_normal", "rms": 0.01, "drift_rms": 0.01, "drift_s": 3600.0, "seconds_per_step": 1.0}


@pytest.mark.parametrize("kept", ["counts", "argmax"])
@pytest.mark.parametrize(("camera", "message"), [
    ({"light": {"power": DRIFTING}}, "drift_rms: drifts from training step to training step"),
    ({"transfer": {"dropped": 0.01}}, "use a camera without drift and lost frames"),
])  # fmt: skip
def test_what_training_does_not_keep_is_unaccounted(kept: str, camera: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of_camera({"camera": camera}, kept=kept)


def test_an_answer_is_stated_at_the_credited_dark_charge_where_that_tells_more() -> None:
    """Away from its reference a doubling rule gives more dark charge than is credited."""
    found = of_camera({"temperature_c": 50.0}, outputs=24, kept="argmax")
    frames, groups, point = found.seen, label_groups(found.seen.light), OperatingPoint(light=0.05)
    excess = found.law.dark_e(point) - found.law.credited_dark_e(point)
    assert excess > 0.2 * found.law.credited_dark_e(point)
    whole = shared_range(frames, groups.shape[1], 0.05)
    assert whole == Cell(least=0.05, most=0.05, dark_low=-excess)
    at = [
        argmax_epsilon(*confusion(frames, groups, replace(whole, dark_low=dark, dark_high=dark)), symmetrised=True)
        for dark in np.linspace(-excess, 0.0, 5)
    ]  # fmt: skip
    assert found.epsilon(point) == pytest.approx(max(at), rel=1e-9)
    assert at == sorted(at, reverse=True)
    assert at[-1] < 0.95 * at[0]  # planted: the described charge taken for the credited one
    cold = of_camera(outputs=24, kept="argmax").seen
    assert shared_range(cold, 8, 0.05) == Cell(least=0.05, most=0.05)
