"""A trainer and a protection of other packages are found, configured and explained, train, are priced and audited."""

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

ROOT = Path(__file__).parents[3]
PACKAGES = [ROOT / "tests" / "support" / f"third_party_{what}" for what in ("trainer", "protection")]
BASE: dict[str, Any] = {
    "epochs": 3, "threads": 1, "data": {"n_classes": 3}, "sampler": {"batch_size": 12}, "optimizer": {"lr": 0.1},
}  # fmt: skip


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in PACKAGES:
        monkeypatch.syspath_prepend(str(folder))


Y = np.arange(120) % 3
ARRAYS = np.random.default_rng(3).normal(size=(120, 6)) + 2 * np.eye(6)[Y], Y
RECORD = {"kind": "record", "epsilon": 3.0}


def config(trainer: str, **protection: Any) -> dict[str, Any]:
    return {**BASE, "trainer": {"kind": trainer}, "protection": protection or {"kind": "none"}}


def test_a_trainer_learns(tmp_path: Path) -> None:
    run = train(config("softmax"), data=ARRAYS, folder=tmp_path / "run")
    assert run.summary["train_accuracy"] > 0.8
    (guarantee,) = run.guarantees
    assert guarantee.epsilon == float("inf")


@pytest.mark.parametrize(("trainer", "protection"), [
    pytest.param("softmax", RECORD, marks=pytest.mark.slow),
    ("softmax", {"kind": "shield", "noise_multiplier": 1.5}),
    pytest.param("bp", {"kind": "shield"}, marks=pytest.mark.slow),
])  # fmt: skip
def test_it_is_priced_resumed_and_audited(
    tmp_path: Path, trainer: str, protection: Any, ctrl_c_at: Any
) -> None:
    wanted = {**config(trainer, **protection), "model": {"hidden": [4]}}
    _, run = require_resumed_alike(tmp_path, wanted, ARRAYS, ctrl_c_at(5))
    (guarantee,) = run.guarantees
    assert guarantee.is_proven
    assert 0 < guarantee.epsilon < 6
    assert run.config.protection.epsilon is None or guarantee.epsilon <= 3
    assert read_ledger(tmp_path / "cut").guarantees() == [guarantee]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = audit_run(tmp_path / "cut", data=ARRAYS, trials=60)
    assert found.findings
    assert load_run(tmp_path / "cut").config == run.config
    brought = {"softmax": "lab-softmax", "shield": "lab-shield"}
    for kind in (trainer, protection["kind"]):
        assert kind not in brought or run.facts["versions"][brought[kind]] == "1.0"


def test_a_trainer_takes_no_protection_unless_it_lists_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from lab_softmax.config import SoftmaxConfig

    monkeypatch.setattr(SoftmaxConfig, "protections", TrainerSection.protections)
    with pytest.raises(ConfigError, match="protection.kind: 'record' is not for trainer.kind = 'softmax'"):
        load_config(config("softmax", **RECORD))


def test_a_trainer_without_declarations_is_not_private(tmp_path: Path, monkeypatch: Any) -> None:
    from lab_softmax.trainer import SoftmaxTrainer

    monkeypatch.setattr(SoftmaxTrainer, "applies", frozenset())
    with pytest.raises(NoGuarantee, match="protection.kind = 'record' needs a trainer that applies"):
        train(config("softmax", **RECORD), data=ARRAYS, folder=tmp_path / "run")
    train(config("softmax"), data=ARRAYS, folder=tmp_path / "plain")
    with pytest.raises(NoGuarantee, match="trainer.kind = 'softmax' applies no protection"):
        audit_run(tmp_path / "plain", data=ARRAYS, trials=60)  # nor is its protected control


@pytest.mark.parametrize(
    ("asks", "message"),
    [(False, "never asked for their writer"), (True, "step 0: trainer.kind = 'softmax' moved its parameters without")],
)  # fmt: skip
def test_a_trainer_must_use_its_writer(tmp_path: Path, monkeypatch: Any, asks: bool, message: str) -> None:
    from lab_softmax.trainer import SoftmaxTrainer

    given = SoftmaxTrainer.gradients
    drop = (lambda self, device: (given(self, device), None)[1]) if asks else lambda self, device: None
    monkeypatch.setattr(SoftmaxTrainer, "gradients", drop)
    with pytest.raises(NoGuarantee, match=message):
        train(config("softmax", **RECORD), data=ARRAYS, folder=tmp_path / "run")


@pytest.mark.parametrize("trainer", ["zo", "convex"])
def test_a_writer_means_nothing_to_own_noise(tmp_path: Path, monkeypatch: Any, trainer: str) -> None:
    from lab_shield.config import ShieldConfig
    from lab_shield.protection import ShieldProtection

    monkeypatch.setattr(ShieldConfig, "trainers", (trainer,))
    monkeypatch.setattr(ShieldConfig, "relation_of", lambda self, trainer: Adjacency(trainer.relations[0]))
    with pytest.raises(NoGuarantee, match=f"trainer.kind = '{trainer}' applies 'own noise'"):
        train(config(trainer, kind="shield"), data=ARRAYS, folder=tmp_path / "run")
    monkeypatch.setattr(ShieldProtection, "needs", frozenset({"own noise"}))
    assert train(config(trainer, kind="shield"), data=ARRAYS, folder=tmp_path / "own").guarantees


@pytest.mark.parametrize("trainer", ["zo", "convex"])
def test_a_trainer_with_its_own_noise_needs_a_multiplier(trainer: str) -> None:
    """Only a run without protection is noiseless; a multiplier of 0 is an audit's control."""
    resolved = load_config(config(trainer, **RECORD)).replaced(data={"name": "arrays"})
    dataset = from_arrays(*ARRAYS, n_classes=3, validation_fraction=0.1, split_seed=0)
    plan = RunPlan.resolve(resolved, dataset)
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
        train(config(trainer), data=ARRAYS, folder=tmp_path / "run")


@pytest.mark.slow
def test_the_self_test_takes_a_protection_of_another_package() -> None:
    found = audit_mechanism("bp", settings=["protection.kind=shield"], steps=40, seed=1, level=1e-6)
    assert found.holds
    assert (found.protection, found.records, found.single_records) == ("shield", 400, True)


def test_their_keys_are_checked_and_completed() -> None:
    trainer = {"kind": "softmax", "temperature": 2.0}
    config = load_config({"trainer": trainer, "protection": {"kind": "shield"}})
    assert (config.sampler.scheme, config.protection.poisson) == ("poisson", True)
    assert (config.protection.noise_multiplier, config.protection.epsilon) == (2.0, None)
    assert (load_config(config), config.model_dump()["trainer"]["temperature"]) == (config, 2.0)
    for settings, message in (
        (["trainer.kind=softmax", "trainer.temperature=0"], "trainer.temperature: must be more than 0"),
        (["trainer.temperature=2"], "trainer.temperature: 2 does nothing here: it needs trainer.kind"),
        (["trainer.kind=zo", "protection.kind=shield"], "'shield' is not for trainer.kind = 'zo'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(settings=settings)


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


def test_a_class_of_another_kind_is_refused_by_itself(tmp_path: Path, monkeypatch: Any) -> None:
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
    response = {"kind": "label-randomized-response", "stages": 2}
    for special in (*({"kind": "label-readout", "noise": noise} for noise in ("counts", "argmax")), response):
        assert issubclass(PROTECTIONS.validated({**special, "epsilon": 1.0}).implementing_class(), Protection)
