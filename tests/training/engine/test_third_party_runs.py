"""A trainer and a protection of other packages are found, configured and explained, train, are priced and audited."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch

from opusim.accounting.guarantee import Adjacency, NoGuarantee
from opusim.accounting.ledger import read_ledger
from opusim.errors import ConfigError
from opusim.training import Algorithm, Protection
from opusim.training.attacks.mechanism.audit import audit_mechanism
from opusim.training.attacks.run_audit import audit_run
from opusim.training.cli.options import key_rows
from opusim.training.config.kinds import PROTECTIONS, TRAINERS, ProtectionSection, TrainerSection
from opusim.training.config.run import load_config
from opusim.training.data import from_arrays
from opusim.training.engine.plan import RunPlan
from opusim.training.engine.session import train
from opusim.training.protections.base import NoProtection, SoftLabels
from opusim.training.runs.run import load_run
from tests.support.packages import install
from tests.support.run_folders import require_resumed_alike

SUPPORT = Path(__file__).parents[2] / "support"
PACKAGES = {"trainer": SUPPORT / "third_party_trainer", "protection": SUPPORT / "third_party_protection"}
BASE: dict[str, Any] = {
    "epochs": 3, "threads": 1, "data": {"n_classes": 3}, "sampler": {"batch_size": 12}, "optimizer": {"lr": 0.1},
}  # fmt: skip


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in PACKAGES.values():
        monkeypatch.syspath_prepend(str(folder))


def arrays() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    y = np.arange(120) % 3
    return generator.normal(size=(120, 6)) + 2 * np.eye(6)[y], y


def config(trainer: str, **protection: Any) -> dict[str, Any]:
    return {**BASE, "trainer": {"kind": trainer}, "protection": protection or {"kind": "none"}}


def test_a_trainer_learns(tmp_path: Path) -> None:
    run = train(config("softmax"), data=arrays(), folder=tmp_path / "run")
    assert run.summary["train_accuracy"] > 0.8
    (guarantee,) = run.guarantees
    assert guarantee.epsilon == float("inf")


@pytest.mark.parametrize(
    ("trainer", "protection"),
    [
        pytest.param("softmax", {"kind": "record", "epsilon": 3.0}, marks=pytest.mark.slow),
        ("softmax", {"kind": "shield", "noise_multiplier": 1.5}),
        pytest.param("bp", {"kind": "shield"}, marks=pytest.mark.slow),
    ],
)
def test_it_is_priced_resumed_and_audited(
    tmp_path: Path, trainer: str, protection: dict[str, Any], ctrl_c_at: type
) -> None:
    wanted = {**config(trainer, **protection), "model": {"hidden": [4]}}
    _, run = require_resumed_alike(tmp_path, wanted, arrays(), ctrl_c_at(5))
    (guarantee,) = run.guarantees
    assert guarantee.is_proven
    assert 0 < guarantee.epsilon < 6
    assert run.config.protection.epsilon is None or guarantee.epsilon <= 3
    assert read_ledger(tmp_path / "cut").guarantees() == [guarantee]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = audit_run(tmp_path / "cut", data=arrays(), trials=60)
    assert found.findings
    assert load_run(tmp_path / "cut").config == run.config
    brought = {"softmax": "lab-softmax", "shield": "lab-shield"}
    for kind in (trainer, protection["kind"]):
        assert kind not in brought or run.facts["versions"][brought[kind]] == "1.0"


RECORD = {"kind": "record", "epsilon": 3.0}


def test_a_trainer_takes_no_protection_unless_it_lists_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from lab_softmax.config import SoftmaxConfig

    monkeypatch.setattr(SoftmaxConfig, "protections", TrainerSection.protections)
    with pytest.raises(ConfigError, match="protection.kind: 'record' is not for trainer.kind = 'softmax'"):
        load_config(config("softmax", **RECORD))


def test_a_trainer_without_declarations_is_not_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lab_softmax.trainer import SoftmaxTrainer

    monkeypatch.setattr(SoftmaxTrainer, "applies", frozenset())
    with pytest.raises(NoGuarantee, match="protection.kind = 'record' needs a trainer that applies"):
        train(config("softmax", **RECORD), data=arrays(), folder=tmp_path / "run")
    train(config("softmax"), data=arrays(), folder=tmp_path / "plain")
    with pytest.raises(NoGuarantee, match="trainer.kind = 'softmax' applies no protection"):
        audit_run(tmp_path / "plain", data=arrays(), trials=60)  # nor is its protected control


@pytest.mark.parametrize(
    ("asks", "message"),
    [(False, "never asked for their writer"), (True, "step 0: trainer.kind = 'softmax' moved its parameters without")],
)  # fmt: skip
def test_a_trainer_that_leaves_its_writer_out_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: bool, message: str
) -> None:
    from lab_softmax.trainer import SoftmaxTrainer

    given = SoftmaxTrainer.gradients
    drop = (lambda self, device: (given(self, device), None)[1]) if asks else lambda self, device: None
    monkeypatch.setattr(SoftmaxTrainer, "gradients", drop)
    with pytest.raises(NoGuarantee, match=message):
        train(config("softmax", **RECORD), data=arrays(), folder=tmp_path / "run")


@pytest.mark.parametrize("trainer", ["zo", "convex"])
def test_a_writer_means_nothing_to_a_trainer_with_its_own_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: str
) -> None:
    from lab_shield.config import ShieldConfig
    from lab_shield.protection import ShieldProtection

    monkeypatch.setattr(ShieldConfig, "trainers", (trainer,))
    monkeypatch.setattr(ShieldConfig, "relation_of", lambda self, trainer: Adjacency(trainer.relations[0]))
    with pytest.raises(NoGuarantee, match=f"trainer.kind = '{trainer}' applies 'own noise'"):
        train(config(trainer, kind="shield"), data=arrays(), folder=tmp_path / "run")
    monkeypatch.setattr(ShieldProtection, "needs", frozenset({"own noise"}))
    assert train(config(trainer, kind="shield"), data=arrays(), folder=tmp_path / "own").guarantees


@pytest.mark.parametrize("trainer", ["zo", "convex"])
def test_a_trainer_with_its_own_noise_needs_a_multiplier(trainer: str) -> None:
    """Only a run without protection is noiseless; a multiplier of 0 is an audit's control."""
    resolved = load_config(config(trainer, kind="record", epsilon=3.0))
    plan = RunPlan.resolve(
        resolved.replaced(data={"name": "arrays"}),
        from_arrays(*arrays(), n_classes=3, validation_fraction=0.1, split_seed=0),
    )
    with pytest.raises(ValueError, match="protection.noise_multiplier is missing"):
        plan.unchecked(protection={"noise_multiplier": None}).algorithm.trainer(None)
    plan.unchecked(protection={"noise_multiplier": 0.0}).algorithm.trainer(None)


@pytest.mark.parametrize("trainer", ["ulr", "zo", "convex"])
def test_labels_are_not_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: str) -> None:
    class Flat(SoftLabels):
        def targets(self, output: torch.Tensor, records: torch.Tensor, step: int) -> torch.Tensor:
            return torch.full_like(output, 1 / output.shape[1])

    monkeypatch.setattr(NoProtection, "soft_labels", lambda self, device, folder: Flat())
    with pytest.raises(NoGuarantee, match=f"needs a trainer that applies 'soft labels'.*'{trainer}'"):
        train(config(trainer), data=arrays(), folder=tmp_path / "run")


@pytest.mark.slow
def test_the_self_test_takes_a_protection_of_another_package() -> None:
    found = audit_mechanism("bp", settings=["protection.kind=shield"], steps=40, seed=1, level=1e-6)
    assert found.holds
    assert (found.protection, found.records, found.single_records) == ("shield", 400, True)


# Configuration


ROOT = Path(__file__).parents[3]


def opusim(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which says at its end whether it imported torch."""
    code = (
        "import sys\nfrom opusim.training.cli import main\ntry:\n    main()\nfinally:\n"
        "    heavy = [name for name in ('torch', 'numba', 'lab_softmax.trainer') if name in sys.modules]\n"
        "    print('heavy:', *heavy)"
    )
    path = os.pathsep.join(map(str, [*PACKAGES.values(), ROOT]))
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
