"""A certificate may state a law that another package added."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from opusim.description.schema import load_description
from opusim.devices.certificate import Certificate, GaussianLaw, OtherLaw, digest_of, load_certificate
from opusim.devices.simulated import GaussianDevice
from opusim.errors import ConfigError
from opusim.noise import NoiseModel
from tests.support.discrete_noise import DiscreteNoise


@dataclass(frozen=True, kw_only=True, eq=False)
class Laplace(NoiseModel):
    law: ClassVar[str] = "test-laplace"
    scale: np.ndarray
    beta: float = 0.0

    def variance_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        variance = 2 * np.square(self.scale)
        return variance, variance

    def describe(self) -> str:
        return "Laplace"


class LaplaceDevice(GaussianDevice):
    @property
    def described_noise(self) -> Laplace:
        return Laplace(scale=np.full(3, 0.1))


DESCRIPTION = load_description("gaussian")
BETA = 1e-6


def certificate(noise: NoiseModel) -> Certificate:
    return Certificate(
        device="gaussian",
        description_digest=digest_of(DESCRIPTION),
        date="2026-11-22",
        n_inputs=2,
        n_outputs=3,
        frames=10,
        confidence=0.95,
        beta=BETA,
        noise=OtherLaw(**noise.to_json()),
    )


def test_a_law_of_another_package_comes_back_from_its_file(tmp_path: Path) -> None:
    law = Laplace(scale=np.array([0.09, 0.1, 0.11]), beta=BETA)
    path = tmp_path / "certificate.toml"
    certificate(law).write(path)
    device = LaplaceDevice(DESCRIPTION, n_inputs=2, n_outputs=3)
    device.attach_certificate(load_certificate(path))
    assert device.noise == law


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (Laplace(scale=np.ones(3), beta=0.0), "certifies the law 'test-laplace' at beta = 0, the device has"),
        (DiscreteNoise(values=np.array([-1.0, 1.0]), log_masses=np.log([0.5, 0.5])), "certifies the law"),
    ],
)
def test_a_law_that_is_not_the_devices_is_refused(noise: NoiseModel, message: str) -> None:
    device = LaplaceDevice(DESCRIPTION, n_inputs=2, n_outputs=3)
    with pytest.raises(ConfigError, match=message):
        device.attach_certificate(certificate(noise))


def test_an_unknown_law_or_wrong_numbers_are_one_line() -> None:
    unknown = certificate(Laplace(scale=np.ones(3), beta=BETA)).model_dump()
    for law, message in (
        ({"law": "unheard-of"}, "law = 'unheard-of': must be one of .*install the package"),
        ({"law": "test-laplace", "width": 1.0}, "unexpected keyword argument 'width'"),
    ):
        made = Certificate.model_validate(unknown | {"noise": law})
        device = LaplaceDevice(DESCRIPTION, n_inputs=2, n_outputs=3)
        with pytest.raises(ConfigError, match=message):
            device.attach_certificate(made)


def test_noise_of_hardware_is_that_of_one_width_of_its_window() -> None:
    """lightonml's readings grow with the root of the inputs; a simulation states its law for any window."""
    hardware = DESCRIPTION.model_copy(update={"medium": None})
    for description, refuses in ((DESCRIPTION, False), (hardware, True)):
        made = certificate(Laplace(scale=np.ones(3), beta=BETA)).model_copy(
            update={"noise": GaussianLaw(std=0.1), "description_digest": digest_of(description)}
        )
        for n_inputs in (None, 2):
            made.check_device(description, n_outputs=3, n_inputs=n_inputs)
        refused = pytest.raises(ConfigError, match="calibrate with --inputs 8") if refuses else nullcontext()
        with refused:
            made.check_device(description, n_outputs=3, n_inputs=8)
