"""From an epsilon to the noise that it takes, and by how much a device of fixed noise misses it."""

import math
import re
from pathlib import Path

import pytest

from opusim.accounting.composition import guarantees
from opusim.accounting.mechanisms.labels import LabelReadout, label_distance
from opusim.description.schema import load_description
from opusim.devices.certificate import Certificate, GaussianLaw, digest_of
from opusim.devices.registry import open_described
from opusim.errors import ConfigError
from opusim.training.engine.session import train
from opusim.training.reports.device_privacy import device_levels
from opusim.training.runs.run import load_run
from tests.support.certificates import certificate_of

OUTPUTS, BETA, DELTA = 40, 1e-6, 1e-5


def certificate(name: str, std: float, **overrides: dict[str, float]) -> Certificate:
    description = load_description(name, overrides)
    return certificate_of(description, GaussianLaw(std=std), n_inputs=10, n_outputs=OUTPUTS, beta=BETA)


def test_the_certified_noise_and_its_beta_take_the_described_ones_place() -> None:
    description = load_description("gaussian", {"noise": {"sigma": 5.0}})
    with open_described(description, n_inputs=10, n_outputs=OUTPUTS) as device:
        distance = label_distance(device.require("matrix").matrix().double().numpy())
    own, target = device_levels(
        description, n_classes=10, n_outputs=OUTPUTS, targets=[3.0], delta=DELTA,
        certificate=certificate("gaussian", 4.0, noise={"sigma": 5.0}),
    )  # fmt: skip
    (expected,) = guarantees([LabelReadout(mu=distance / 4.0)], delta=DELTA - BETA)
    assert own.epsilon == expected.epsilon
    (reached,) = guarantees([LabelReadout(mu=distance / target.sigma)], delta=DELTA - BETA)
    assert reached.epsilon == pytest.approx(3.0, rel=1e-4)
    makes_up = math.sqrt(target.sigma**2 - 4.0**2)
    assert f"digital noise of standard deviation {makes_up:.6g} makes up the rest" in target.remark


@pytest.mark.parametrize(("name", "way"), [
    ("gaussian", r"set device.noise.sigma = (?P<value>[\d.]+), then calibrate again"),
    ("gaussian_temperature", "little; leave protection.top_up out, so that digital noise makes up the"),
])  # fmt: skip
def test_a_device_of_fixed_noise_says_by_how_much_it_misses(tmp_path: Path, name: str, way: str) -> None:
    path = tmp_path / "certificate.toml"
    certificate(name, 0.09).write(path)
    base = {
        "epochs": 1, "threads": 1, "trainer": {"kind": "pdfa"}, "model": {"hidden": [OUTPUTS]},
        "protection": {"kind": "label-readout", "epsilon": 3.0, "noise": "device", "top_up": False},
    }  # fmt: skip
    chosen = {"name": name, "certificate": str(path)}
    with pytest.raises(ConfigError, match=rf"has 0\.09, [\d.]+ times too .*{way}") as error:
        train({**base, "device": chosen}, folder=tmp_path / "run")
    found = re.search(way, str(error.value))
    if found is None or not found.groupdict():
        return
    sigma = float(found["value"]) * 1.001  # the message shows four digits
    louder = certificate(name, sigma, noise={"sigma": sigma})
    louder.write(path)
    chosen |= {"noise": {"sigma": sigma / 0.99}}
    described = digest_of(load_description(name, {"noise": {"sigma": sigma / 0.99}}))
    louder.model_copy(update={"description_digest": described}).write(path)
    train({**base, "device": chosen}, folder=tmp_path / "run")
    (reached,) = load_run(tmp_path / "run").guarantees
    assert 2.9 < reached.epsilon <= 3.0


@pytest.mark.parametrize("name", ["pcm", "hermes", "reram", "mzi_mesh", "microring_bank"])
def test_a_crossbar_is_told_why_its_noise_earns_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: noise: .*no theorem credits .*: its status is none"):
        device_levels(load_description(name), n_classes=10, n_outputs=20, targets=[3.0], delta=1e-5)
