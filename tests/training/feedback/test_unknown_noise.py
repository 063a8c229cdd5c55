"""Unprotected training needs no law of the device's noise: its own readings tell the variance, and what changed."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import opusim
from opusim.description.schema import load_description
from opusim.devices.simulated import GaussianDevice
from opusim.errors import DeviceFault, NoiseUnknown
from opusim.noise import MeasuredNoise
from opusim.training.feedback.projection import AbsoluteTernary, DeviceProjection
from opusim.training.reports.run_report import write_report
from tests.support.appliance import connect

SIGMA = 0.3


class Lawless(GaussianDevice):
    """An instrument: noise that rises with the entries of the input, and no law."""

    @property
    def described_noise(self) -> Any:
        raise NoiseUnknown(f"device {self.name!r} states no law")

    factor = 1.0

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        clean = x @ self.medium.dense(torch.device("cpu"))
        level = 1 + x.abs().sum(dim=1, keepdim=True) / self.n_inputs
        return clean + self._stream.normal(clean.shape) * self.factor * SIGMA * level.sqrt()


def lawless(*, monitor: dict[str, Any] | None = None, **options: Any) -> Lawless:
    sections = {"noise": {"sigma": SIGMA}, **({} if monitor is None else {"monitor": monitor})}
    description = load_description("gaussian", sections)
    return Lawless(description, n_inputs=8, n_outputs=512, **options).open()


def test_the_variance_is_measured_by_level() -> None:
    with lawless(seed=3) as device:
        projection = DeviceProjection(device, encoding=AbsoluteTernary(0.5))
        law = projection._law
        error = torch.ones(4, 8)
        error[:, 4:] = 0
        power = projection.noise_power(error)
    assert isinstance(law, MeasuredNoise)
    np.testing.assert_array_equal(law.levels, [0, 4, 8])
    sure = 5 * math.sqrt(2 / (512 * (law.readings - 1)))  # relative, of a mean of 512 sample variances
    for found, level in zip(law.variances, (1.0, 1.5, 2.0), strict=True):
        assert abs(found.mean() / (SIGMA**2 * level) - 1) <= sure
    assert abs(float(power.mean()) / (SIGMA**2 * 1.5) - 1) <= sure


def test_a_measured_law_credits_nothing() -> None:
    law = MeasuredNoise(levels=np.array([0.0, 4.0]), variances=np.array([[1.0, 2.0], [3.0, 6.0]]), readings=9)
    np.testing.assert_array_equal(law.variance_bounds(), ([0, 0], [3, 6]))
    np.testing.assert_allclose(law.variance_at(1.0), [1.5, 3.0])
    np.testing.assert_allclose(law.variance_at(9.0), [3.0, 6.0])
    assert "credits nothing" in law.describe()
    assert MeasuredNoise.from_json(law.to_json()) == law
    with pytest.raises(ValueError, match="levels = .* must rise from 0"):
        MeasuredNoise(levels=np.array([1.0]), variances=np.ones((1, 2)), readings=9)
    with pytest.raises(ValueError, match="give one row for each level"):
        MeasuredNoise(levels=np.array([0.0]), variances=np.ones((2, 2)), readings=9)


def seek_all(device: Lawless, steps: range) -> None:
    for step in steps:
        device.seek(step)


@pytest.mark.parametrize(("factor", "words"), [(0.5, "has 0.2"), (1.5, "has 2.")])
def test_noise_that_changes_is_found_without_a_law(factor: float, words: str) -> None:
    with lawless(monitor={"every_steps": 1}) as device:
        seek_all(device, range(5))
        device.factor = factor
        with pytest.raises(DeviceFault, match=f"{words}.* times the noise variance that it had") as found:
            seek_all(device, range(5, 15))
    assert not {"private", "privacy", "certified"} & set(str(found.value).split())


def train(folder: Path, device: dict[str, Any], **sections: Any) -> Any:
    return opusim.train(
        {
            "epochs": 3, "data": {"name": "digits"}, "trainer": {"kind": "pdfa"}, "model": {"hidden": [128]},
            "device": {"name": "lighton_appliance", **device}, **sections,
        },
        folder=folder,
    )  # fmt: skip


def test_an_appliance_trains_unprotected_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = connect(monkeypatch, tmp_path)
    run = train(tmp_path / "run", {"lighton": section})
    assert run.facts["noise"] is None
    assert run.summary["test_accuracy"] > 0.4  # chance is 0.1
    assert "not stated" in write_report(run).read_text()
    protected = {"kind": "record", "noise": "device", "epsilon": 3.0}
    with pytest.raises(NoiseUnknown, match="measure it by `opusim device calibrate`"):
        train(tmp_path / "private", {"lighton": section}, protection=protected)


@pytest.mark.parametrize("sigma", [0.01, 5.0])
def test_an_assumed_sigma_stops_no_unprotected_run(tmp_path: Path, monkeypatch: Any, sigma: float) -> None:
    section = connect(monkeypatch, tmp_path)
    run = train(tmp_path / "run", {"lighton": section, "noise": {"sigma": sigma}}, epochs=1)
    assert run.summary["steps"] == 6
