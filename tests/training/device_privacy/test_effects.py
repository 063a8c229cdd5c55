"""Effects of a real instrument: what the table says of faults whose consequences are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.devices.effects import contains
from opusim.errors import ConfigError
from opusim.noise import FluctuatingCountNoise, PhotonCountNoise
from training.device_privacy.effects import (
    EPSILON,
    EffectRow,
    EffectTable,
    dimmed,
    effect_rows,
    effects_figure,
    label_epsilon,
)

pytestmark = pytest.mark.compiled

SHOWN = ("none", "laser power", "hot pixels", "dropped frames", "moving medium")


@pytest.fixture(scope="module")
def rows() -> dict[str, EffectRow]:
    table = EffectTable("camera_low_light", n_outputs=100)
    return {effect.name: table.row(effect) for effect in table.effects if effect.name in SHOWN}


@pytest.mark.slow
def test_the_sound_camera_is_the_measure(rows: dict[str, EffectRow]) -> None:
    sound = rows["none"]
    assert sound.correlation > 0.97
    assert sound.noise == pytest.approx(1, abs=0.01)
    assert sound.learning == 1
    assert sound.epsilon == pytest.approx(EPSILON, abs=0.01)
    assert sound.certified is not None
    assert EPSILON < sound.certified < 2 * EPSILON
    assert sound.monitor == ""


def test_each_fault_does_what_it_must(rows: dict[str, EffectRow]) -> None:
    power, hot, dropped, moved = (rows[name] for name in SHOWN[1:])
    assert power.epsilon is not None
    assert power.certified is not None
    assert EPSILON < power.epsilon < power.certified
    assert hot.certified is None
    assert hot.refusal.startswith("dark current is the same at all pixels")
    assert dropped.epsilon is None
    assert dropped.noise > 1.3
    assert dropped.monitor.startswith("loses or repeats frames")
    assert moved.learning < 0.9
    assert moved.epsilon is None
    assert "decorrelated" in moved.monitor


def test_the_table_and_the_figure_name_every_effect(rows: dict[str, EffectRow], tmp_path: Path) -> None:
    printed = effect_rows(rows.values())
    assert [row["effect"] for row in printed] == list(SHOWN)
    assert printed[2]["certified"].startswith("refused: dark current")
    assert printed[3]["epsilon"] == "no law"
    effects_figure(list(rows.values()), "camera_low_light").savefig(tmp_path / "effects.png")
    assert (tmp_path / "effects.png").stat().st_size > 10_000


def test_less_light_is_more_private_and_a_narrower_certificate_misses() -> None:
    numbers = {"rate_low": np.full((4, 9), 5.0), "rate_high": np.full((4, 9), 9.0)}
    steady = PhotonCountNoise(**numbers)
    power = FluctuatingCountNoise(**numbers, power_law="log_normal", power_rms=0.1)
    for law in (steady, power):
        assert label_epsilon(dimmed(law, 0.1)) < label_epsilon(law)
        assert contains(law, dimmed(law, 0.9))
        assert not contains(dimmed(law, 0.9), law)
        assert not contains(replace(law, rate_low=law.rate_low + 0.1, rate_high=law.rate_high + 0.1), law)
    assert label_epsilon(steady) < label_epsilon(power)
    assert not contains(replace(power, power_rms=0.09), power)


def test_a_reference_beam_has_effects_of_its_own() -> None:
    table = EffectTable("camera_holography", n_outputs=100)
    rows = {
        e.name: table.row(e) for e in table.effects if e.name in ("none", "vibration, path", "phase steps")
    }
    assert list(rows) == ["none", "vibration, path", "phase steps"]
    assert rows["none"].epsilon == pytest.approx(EPSILON, abs=0.01)
    assert "reference's light" in rows["none"].refusal
    assert rows["vibration, path"].noise > 1.01
    assert rows["vibration, path"].epsilon is None
    assert rows["phase steps"].correlation < rows["none"].correlation + 1e-4
    assert rows["phase steps"].epsilon == pytest.approx(EPSILON, abs=0.01)


def test_a_device_without_a_camera_is_refused() -> None:
    with pytest.raises(ConfigError, match="need a camera's twin"):
        EffectTable("gaussian")
    with pytest.raises(ValueError, match="n_outputs"):
        EffectTable("camera_low_light", n_outputs=10)
