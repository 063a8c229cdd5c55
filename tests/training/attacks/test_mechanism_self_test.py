"""The self-test of the mechanism: quiet on the product as it is, and loud on every planted fault."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from opusim import training
from opusim.accounting.guarantee import NoGuarantee
from opusim.accounting.mechanisms.labels import StagedResponse, UniformSource
from opusim.errors import ConfigError
from opusim.training.attacks.mechanism.audit import staged_checks
from opusim.training.attacks.mechanism.checks import (
    MIN_STEPS,
    BatchLaw,
    Check,
    MechanismAudit,
    Released,
    Sums,
    checked,
    report_text,
    settings_text,
    shared,
)
from opusim.training.attacks.mechanism.readings import Amounts, single_record_checks
from opusim.training.cli.app import app
from opusim.training.cli.runs import Steps
from opusim.training.protections import noisy_labels
from opusim.training.zeroth_order.trainer import Differences
from tests.support.command import opusim
from tests.support.faults import FAULTS, NAMED, OF_ONE_RUN, Fault
from tests.support.faults.base import FEEDBACKS, MODES, STEPWISE

LEVELS = {"experiment": 1e-6, "release": 1e-9}
"""No seed fixes a release run, so its alarms by chance must never be met."""
LABELS = ("label-amplified", "label-randomized-response")
QUICK = {"zo": ("trainer.directions=41",)}


def self_test(
    kind: str, mode: str, seed: int, *, level: float | None = None, protection: str = "record", steps: int = 40,
    settings: Sequence[str] = (), single_records: bool = False,
) -> MechanismAudit:  # fmt: skip
    return training.audit_mechanism(
        kind, mode=mode, steps=steps, settings=[f"protection.kind={protection}", *QUICK.get(kind, ()), *settings],
        seed=seed if mode == "experiment" else None, level=LEVELS[mode] if level is None else level,
        single_records=single_records,
    )  # fmt: skip


def require_found(fault: Fault, kind: str, protection: str, mode: str, seed: int) -> None:
    with fault.planted():
        found = self_test(
            kind, mode, seed, level=1e-4, protection=protection, steps=60, settings=fault.settings,
            single_records=fault.small_batches,
        )  # fmt: skip
    assert {check.name for check in found.alarms} & set(fault.checks), report_text(found)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        (kind, mode)
        if (kind, mode) == ("pdfa", "release")
        else pytest.param(kind, mode, marks=pytest.mark.slow)
        for kind in STEPWISE
        for mode in MODES
    ],
)
def test_trainers_release_what_is_accounted(kind: str, mode: str, seed: int) -> None:
    found = self_test(kind, mode, seed)
    assert found.holds, report_text(found)
    assert found.coordinates >= 40


@pytest.mark.parametrize(
    ("kind", "protection", "mode"),
    [
        ("bp", "record", "release"),
        *(
            pytest.param(kind, "record", mode, marks=pytest.mark.slow)
            for kind in STEPWISE
            for mode in MODES
            if (kind, mode) != ("bp", "release")
        ),
        *(pytest.param("bp", "label-amplified", mode, marks=pytest.mark.slow) for mode in MODES),
    ],
)
def test_small_batches_release_what_is_accounted(kind: str, protection: str, mode: str, seed: int) -> None:
    found = self_test(kind, mode, seed, protection=protection, single_records=True)
    assert found.holds, report_text(found)
    assert found.single_records == (protection == "record")
    checks = {check.name: check for check in found.checks}
    if protection == "record":
        assert checks["empty batches: variance"].standard_error < 0.5  # some, but with probability 1e-8
        assert checks["records: coins"].expected == pytest.approx(2 * 84 / 6)
    else:
        assert "small batches: noise of a step" in checks


@pytest.mark.parametrize("mode", ["release", pytest.param("experiment", marks=pytest.mark.slow)])
def test_the_last_iterate_has_the_accounted_noise_at_every_step(mode: str, seed: int) -> None:
    found = self_test("convex", mode, seed, protection="last-iterate")
    assert "at the end" in found.accounted
    assert found.holds, report_text(found)
    assert found.coordinates >= 40


RELEASED = {
    **{protection: ("pdfa", protection, ()) for protection in LABELS},
    "stages": ("dfa", "label-randomized-response", ("protection.stages=3",)),
    "argmax": ("pdfa", "label-readout", ("protection.noise=argmax",)),
    "noise of a device": ("pdfa", "record", ("protection.noise=device",)),
    "bands": ("bp", "record", ("protection.bands=4",)),
}
"""Further laws of noise: trainer, protection and settings."""


@pytest.mark.parametrize(
    "name",
    [name if name == "label-randomized-response" else pytest.param(name, marks=pytest.mark.slow) for name in RELEASED],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["release", pytest.param("experiment", marks=pytest.mark.slow)])
def test_further_noise_is_what_is_accounted(name: str, mode: str, seed: int) -> None:
    kind, protection, settings = RELEASED[name]
    found = self_test(kind, mode, seed, protection=protection, settings=settings)
    assert found.holds, report_text(found)
    if name == "noise of a device":
        assert "device noise" in found.accounted
    if name == "stages":
        assert "in 3 stages" in found.accounted


STAGED = ("protection.stages=3",)
STAGED_FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "response: share of labels kept": (
        "respond_among",
        lambda respond: (
            lambda labels, among, *, epsilon, generator: respond(
                labels, among, epsilon=1.2 * epsilon, generator=generator
            )
        ),
    ),
    "response: records apart": (
        "respond_among",
        lambda respond: (
            lambda labels, among, *, epsilon, generator: respond(
                labels, among, epsilon=epsilon, generator=OneNumber(generator)
            )
        ),
    ),
    "response: equal in two runs": (
        "randomize_in_stages",
        lambda randomize: (
            lambda x, labels, mechanism, source: randomize(x, labels, mechanism, np.random.default_rng(0))
        ),
    ),
}
"""The check that finds each, what is replaced, and by what."""


class OneNumber:
    """The same number for all records."""

    def __init__(self, source: UniformSource) -> None:
        self._source = source

    def random(self, size: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(self._source.random((1,)), size)


@pytest.mark.parametrize(
    "check",
    [
        check if check.endswith("labels kept") else pytest.param(check, marks=pytest.mark.slow)
        for check in STAGED_FAULTS
    ],
)
def test_faults_of_staged_responses_are_found(check: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrap = STAGED_FAULTS[check]
    monkeypatch.setattr(noisy_labels, name, wrap(getattr(noisy_labels, name)))
    found = self_test(
        "dfa", "experiment", seed, protection="label-randomized-response", settings=STAGED, level=1e-4
    )
    assert check in {alarm.name for alarm in found.alarms}, report_text(found)


@pytest.mark.filterwarnings("error")
def test_responses_from_sets_without_a_common_class_are_no_evidence(seed: int) -> None:
    """They differ for certain, so only records whose sets meet tell whether two runs drew apart."""
    epsilon, n = 2.0, 4000
    draws = np.random.default_rng(seed)
    labels = draws.integers(0, 4, n)

    def responses(apart: bool) -> np.ndarray:
        lower = np.full(n, True) if not apart else np.arange(n) < n // 2
        first = np.where(lower, 0, 2)
        inside = labels // 2 == first // 2
        stays = draws.random(n) < np.where(inside, 1 / (1 + math.exp(-epsilon)), 0.5)
        own = np.where(inside, labels, first)
        answers = np.where(stays, own, 2 * first + 1 - own)
        scores = np.where(np.arange(4) // 2 == first[:, None] // 2, -epsilon, -1.0)
        scores[np.arange(n), answers] = 0.0
        return scores

    mechanism = StagedResponse(steps=1, step_epsilon=epsilon, n_classes=4, stages=2)
    runs = [responses(False), responses(True)]
    checks = {check.name: check for check in shared(staged_checks(runs, labels, mechanism), 1e-4)}
    equal = checks["response: equal in two runs"]
    assert not any(check.alarm for check in checks.values()), checks
    assert equal.standard_error == pytest.approx(1 / math.sqrt(n // 2))
    runs[1][: n // 2] = runs[0][: n // 2]
    copied = {check.name: check for check in shared(staged_checks(runs, labels, mechanism), 1e-4)}
    assert copied["response: equal in two runs"].alarm


def test_labels_that_a_camera_counts_have_the_accounted_law(seed: int) -> None:
    found = self_test(
        "pdfa", "release", seed, protection="label-readout", settings=["protection.noise=counts"]
    )
    assert found.holds, report_text(found)
    assert any(check.name.startswith("counts: ") for check in found.checks)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("device.name=camera_fluctuating", "device.camera.light.power"),
        ("device.certificate=mine.toml", "device.certificate"),
    ],
)
def test_light_of_which_only_limits_are_known_is_refused(setting: str, key: str) -> None:
    settings = ["protection.kind=label-readout", "protection.noise=counts", setting]
    with pytest.raises(ConfigError, match=f"{key}: leaves only limits of the light"):
        training.audit_mechanism("pdfa", settings=settings, steps=40, seed=1)


@pytest.mark.slow
def test_a_sound_clip_by_layer_raises_no_alarm(seed: int) -> None:
    found = training.audit_mechanism(
        "ulr", settings=["trainer.clip=module"], steps=40, seed=seed, level=LEVELS["experiment"]
    )
    assert found.holds, report_text(found)


@pytest.mark.slow
def test_joint_clips_of_loss_differences_are_accounted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, the planted fault, n clipped differences have up to sqrt(n) times the norm."""
    found = self_test("zo", "experiment", seed, settings=["trainer.clip=joint"])
    assert "jointly clipped" in found.accounted
    assert found.holds, report_text(found)

    def one_by_one(found: Sequence[Differences], clip: float) -> list[Differences]:
        return [replace(each, values=each.values.clamp(-clip, clip)) for each in found]

    monkeypatch.setattr("opusim.training.zeroth_order.trainer.jointly_clipped", one_by_one)
    assert not self_test("zo", "experiment", seed, settings=["trainer.clip=joint"]).holds


IN_CI = ("noise_halved", "bias_unclipped", "sampled_too_often", "labels_kept_too_often")
"""One fault of noise, of contributions, of batches and of labels; the others are planted every night."""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=() if fault.name in IN_CI else pytest.mark.slow)
        for fault in (*FAULTS, *OF_ONE_RUN)
    ],
)
def test_every_fault_is_found_once(fault: Fault, seed: int) -> None:
    kind = "pdfa" if "pdfa" in fault.trainers else fault.trainers[0]
    require_found(fault, kind, fault.protections[0], fault.modes[-1], seed)


EVERYWHERE = [
    pytest.param(fault, kind, protection, mode, id=f"{fault.name}-{kind}-{protection}-{mode}")
    for fault in (*FAULTS, *OF_ONE_RUN)
    for kind in fault.trainers
    for protection in fault.protections
    for mode in fault.modes
    if fault.applies(trainer=kind, protection=protection, mode=mode)
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "kind", "protection", "mode"), EVERYWHERE)
def test_faults_are_found_everywhere(fault: Fault, kind: str, protection: str, mode: str, seed: int) -> None:
    require_found(fault, kind, protection, mode, seed)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", FEEDBACKS)
@pytest.mark.parametrize("protection", LABELS)
def test_label_protections_everywhere(protection: str, kind: str, mode: str, seed: int) -> None:
    found = self_test(kind, mode, seed, protection=protection)
    assert found.holds, report_text(found)


@pytest.mark.slow
def test_a_seed_repeats_a_self_test() -> None:
    first, second = (self_test("dfa", "experiment", seed) for seed in (3, 3))
    assert first.checks == second.checks


def synthetic(generator: np.random.Generator, *, z: float, fault: str = "") -> list[Released]:
    """Two runs of 60 updates, n 400, q 0.1, of a mechanism that is right but for its fault."""
    runs = []
    for _ in range(2):
        noise = generator.normal(size=(60, 40))
        sizes = generator.binomial(400, 0.1, size=60).astype(float)
        if fault == "noise":
            noise *= 0.5**0.5
        if fault == "reused":
            noise[1::2] = noise[::2]
        if fault == "a part":
            noise[:, 24:32] *= 0.5
        if fault == "a part again":
            noise[:, 23:36] = noise[:, :13]
        if fault == "a step":
            noise[17] *= 0.1
        if fault == "sizes":
            sizes[:] = 40.0
        by_layer = np.outer(sizes, [2**-0.5, 2**-0.5]) * (2**0.5 if fault == "layers" else 1.0)
        by_layer += z * generator.normal(size=(60, 2))
        runs.append(
            Released(
                noise=noise,
                sums=Sums(
                    along=by_layer.sum(axis=1) / 2**0.5, along_std=z, by_layer=by_layer, shares=np.full(2, 2**-0.5),
                ),
                batch=BatchLaw.binomial(400, 0.1),
            ),
        )  # fmt: skip
    return runs


@pytest.mark.parametrize("z", [pytest.param(0.5, marks=pytest.mark.slow), 3.0])
@pytest.mark.parametrize(
    "fault", ["", "noise", "reused", "sizes", "layers", "a part", "a part again", "a step"]
)
def test_synthetic_updates_alarm_where_they_must(fault: str, z: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(20):
        alarms = [
            check.name
            for check in shared(checked(synthetic(generator, z=z, fault=fault)), 1e-6)
            if check.alarm
        ]
        assert bool(alarms) == bool(fault), alarms


RECORDS, Q = 12, 1 / 6


def synthetic_amounts(generator: np.random.Generator, *, fault: str = "") -> list[Amounts]:
    """Two runs of 80 small batches, of a mechanism that is right but for its fault."""
    runs = []
    coins = generator.random((2, 80, RECORDS))
    if fault == "opposed coins":
        coins[..., 1::2] = 1 - coins[..., ::2]
    if fault == "mirrored coins":
        coins[..., RECORDS // 2 :] = coins[..., : RECORDS // 2][..., ::-1]
    if fault == "coins of a step again":
        coins[:, 40:] = coins[:, :40]
    if fault == "coins of a run again":
        coins[1] = coins[0]
    for inside in coins < Q:
        size = inside.sum(axis=1, keepdims=True)
        amounts = inside.astype(float)
        if fault == "one not clipped":
            amounts[:, 5] *= 1.2
        if fault == "alone not clipped":
            amounts *= np.where(size == 1, 1.2, 1.0)
        noise = generator.normal(size=(80, 40))
        if fault == "empty without noise":
            noise *= size > 0
        if fault == "one with less noise":
            noise *= np.where(size == 1, 0.7, 1.0)
        std = np.full(RECORDS, 0.1)
        along = std * generator.normal(size=amounts.shape) * (0.5 if fault == "less noise along" else 1.0)
        runs.append(Amounts(amounts=amounts + along, std=std, noise=noise, probability=Q))
    return runs


FAULTY_AMOUNTS = {
    "one not clipped": "records: contribution",
    "alone not clipped": "records: alone in a batch",
    "less noise along": "records: noise along them",
    "opposed coins": "records: coins of two",
    "mirrored coins": "records: coins of two",
    "coins of a step again": "records: coins of two steps",
    "coins of a run again": "records: coins of two steps",
    "empty without noise": "empty batches: variance",
    "one with less noise": "batches of one: variance",
}
"""The check that finds each."""


@pytest.mark.parametrize("fault", ["", *FAULTY_AMOUNTS])
def test_synthetic_small_batches_alarm_where_they_must(fault: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(5):
        found = shared(single_record_checks(synthetic_amounts(generator, fault=fault)), 1e-6)
        alarms = {check.name for check in found if check.alarm}
        assert alarms == ({FAULTY_AMOUNTS[fault]} if fault else set())


@pytest.mark.slow
@pytest.mark.parametrize(
    "of",
    [lambda g: checked(synthetic(g, z=1.0)), lambda g: single_record_checks(synthetic_amounts(g))],
    ids=["updates", "small batches"],
)
def test_p_values_of_synthetic_noise_are_uniform_enough(of: Callable[..., list[Check]], seed: int) -> None:
    generator = np.random.default_rng(seed)
    n, share = 200, 0.05
    found = np.array([[check.p_value for check in of(generator)] for _ in range(n)])  # (n, checks)
    below = np.mean(found < share, axis=0)
    limit = share + 5 * math.sqrt(share * (1 - share) / n)
    assert np.all(below <= limit), below


def test_a_value_that_is_no_number_is_an_alarm() -> None:
    values = {"name": "x", "expected": 0.0, "standard_error": 1.0, "level": 1e-6, "finds": ""}
    assert Check(observed=math.nan, p_value=math.nan, **values).alarm
    assert not Check(observed=0.0, p_value=1.0, **values).alarm


@pytest.mark.slow
def test_a_planted_fault_leaves_nothing_behind(seed: int) -> None:
    for fault in NAMED.values():
        with fault.planted():
            pass
    with pytest.raises(RuntimeError), FAULTS[0].planted():
        raise RuntimeError
    assert self_test("dfa", "experiment", seed).holds


@pytest.mark.parametrize(
    ("kind", "settings", "error", "message"),
    [
        ("bp", ["protection.kind=last-iterate"], ConfigError, "'last-iterate' is not for trainer.kind ="),
        ("bp", ["protection.kind=none"], NoGuarantee, "no guarantee covers the steps of bp"),
        ("bp", ["data.name=mnist"], ConfigError, "data.name: is reserved"),
        ("bp", ["optimizer.momentum=0.9"], ConfigError, "optimizer.momentum: is reserved"),
        ("bp", ["sampler.batch_size=64"], ConfigError, "must divide the 400 records"),
        ("bp", ["protection.clip_norm=50"], ValueError, "protection.clip_norm = 50: must be at most"),
        ("zo", ["trainer.directions=8"], ConfigError, "use at least 41"),
        ("zo", ["trainer.law=laplace"], ConfigError, "use 'gaussian'"),
        ("pdfa", ["device.name=camera"], ConfigError, "use 'ideal' or 'gaussian'"),
        ("pdfa", ["device.noise.sigma=0.5"], ConfigError, "use at most 0.01"),
        (
            "pdfa",
            ["protection.kind=label-readout", "protection.noise=device"],
            ConfigError,
            "reads labels through a matrix",
        ),
        ("adam", [], ValueError, "kind"),
    ],
)
def test_untestable_is_refused(kind: str, settings: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        training.audit_mechanism(kind, settings=settings, steps=40, seed=1)


def test_the_command_prints_and_keeps_a_table(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    options = ["--steps", "40", "--seed", "5", "--level", "1e-6", "--out", str(out)]
    result = CliRunner().invoke(app, ["audit", "--mechanism", "dfa", *options])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    kept = json.loads(out.read_text())
    assert kept.pop("seal")
    found = MechanismAudit.from_json(kept)
    assert found.holds
    assert found.seed == 5
    needed = f"at least {MIN_STEPS}"
    assert f"{found.steps} steps ({needed})" in settings_text(found).partition(". ")[0]
    assert needed in Steps.__metadata__[0].help
    with pytest.raises(ValueError, match=needed):
        training.audit_mechanism("dfa", steps=MIN_STEPS - 1)
    assert json.loads(json.dumps(found.to_json())) == kept
    with pytest.raises(ValueError, match="schema_version"):
        MechanismAudit.from_json({"schema_version": 0})


def test_the_command_ends_with_1_after_an_alarm() -> None:
    with FAULTS[0].planted():
        arguments = ["audit", "--mechanism", "convex", "--set", "protection.kind=last-iterate", "--seed", "5"]
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "ALARM: the runs did not release what was accounted" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mechanism", "bp", "--set", "protection.kind=none"], "no guarantee covers the steps of bp"),
        (["--mechanism", "dfa", "runs/x"], "RUN is for the audit of a run"),
        (["--mechanism", "dfa", "--trials", "9"], "--trials is for the audit of a run"),
        (["runs/x", "--mode", "release"], "--mode goes with --mechanism KIND only"),
        ([], "RUN is missing"),
    ],
)
def test_the_command_refuses_bad_input(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = opusim("audit", *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr.strip().splitlines()[-1]
