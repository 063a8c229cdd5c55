"""A trainer and a protection of other packages are found by their entry points, configured and explained."""

import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from opusim.errors import ConfigError
from opusim.training import Algorithm, Protection
from opusim.training.cli.options import key_rows
from opusim.training.config.kinds import PROTECTIONS, TRAINERS, ProtectionSection
from opusim.training.config.run import load_config
from tests.support.packages import install

ROOT = Path(__file__).parents[3]
PACKAGES = [ROOT / "tests" / "support" / f"third_party_{what}" for what in ("trainer", "protection")]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in PACKAGES:
        monkeypatch.syspath_prepend(str(folder))


def opusim(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which says at its end whether it imported torch."""
    code = (
        "import sys\nfrom opusim.training.cli import main\ntry:\n    main()\nfinally:\n"
        "    heavy = [name for name in ('torch', 'numba', 'lab_softmax.trainer') if name in sys.modules]\n"
        "    print('heavy:', *heavy)"
    )
    path = os.pathsep.join(map(str, [*PACKAGES, ROOT]))
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "80"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


def test_their_keys_are_checked_and_completed() -> None:
    config = load_config(
        {"trainer": {"kind": "softmax", "temperature": 2.0}, "protection": {"kind": "shield"}}
    )
    assert (config.sampler.scheme, config.protection.poisson) == ("poisson", True)
    assert (config.protection.noise_multiplier, config.protection.epsilon) == (2.0, None)
    assert load_config(config) == config
    assert config.model_dump()["trainer"]["temperature"] == 2.0
    with pytest.raises(ConfigError, match="trainer.temperature: must be more than 0"):
        load_config({"trainer": {"kind": "softmax", "temperature": 0.0}})
    with pytest.raises(ConfigError, match="trainer.temperature: 2 does nothing here: it needs trainer.kind"):
        load_config(settings=["trainer.temperature=2"])
    with pytest.raises(ConfigError, match="protection.kind: 'shield' is not for trainer.kind = 'zo'"):
        load_config({"trainer": {"kind": "zo"}, "protection": {"kind": "shield"}})


def test_a_section_keeps_what_it_defines_instead_of_a_field() -> None:
    class Fixed(ProtectionSection):
        clip_norm: ClassVar[float] = 0.5
        kind: Literal["fixed"] = "fixed"

        @property
        def noise_multiplier(self) -> float:
            return 3.0

    class Renamed(Fixed):
        kind: Literal["renamed"] = "renamed"

    for section in (Fixed(), Renamed()):
        assert (section.clip_norm, section.clip, section.noise_multiplier) == (0.5, 0.5, 3.0)
        assert (section.noise, section.divisor, section.epsilon) == ("digital", None, None)


def test_a_class_of_another_kind_is_refused_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = dict.fromkeys(("broken", "pdfa"), "json:JSONDecoder")
    install(monkeypatch, tmp_path, "broken", "opusim.trainers", points)
    with pytest.raises(ConfigError, match="trainer.kind: 'broken' cannot be used.*is no TrainerSection"):
        load_config({"trainer": {"kind": "broken"}})
    assert load_config().trainer.kind == "pdfa"  # a package cannot replace a kind of opusim
    assert not any(key == "trainer.broken" for key, _, _ in key_rows())


def test_every_kind_names_a_class_that_exists() -> None:
    for kinds, base in ((TRAINERS, Algorithm), (PROTECTIONS, Protection)):
        for name, section in kinds.every().items():
            needed = {"epsilon": 1.0} if "epsilon" in section.model_fields else {}
            if "kind" in section.dropped:
                continue
            assert issubclass(section(**needed).implementing_class(), base), name
    for special in (
        {"kind": "label-readout", "noise": "counts"},
        {"kind": "label-readout", "noise": "argmax"},
        {"kind": "label-randomized-response", "stages": 2},
    ):
        assert issubclass(PROTECTIONS.validated({**special, "epsilon": 1.0}).implementing_class(), Protection)
