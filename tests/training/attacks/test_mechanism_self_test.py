"""The self-test of the mechanism: quiet on the product as it is, and loud on every planted fault."""

import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
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
from tests.support.faults import FAULTS, NAMED, OF_ONE_RUN
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


def nightly(cases: Iterable[tuple[str, ...]], *, but: Collection[tuple[str, ...]]) -> list[Any]:
    """Return cases as parameters, of which all are slow but those that every run of the tests takes."""
    return [pytest.param(*case, marks=() if case in but else pytest.mark.slow) for case in cases]


SOUND: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    **{kind: (kind, "record", (), "") for kind in STEPWISE},
    **{f"{kind}, {labels}": (kind, labels, (), "") for labels in LABELS for kind in FEEDBACKS},
    "last iterate": ("convex", "last-iterate", (), "at the end"),
    "stages": ("dfa", "label-randomized-response", ("protection.stages=3",), "in 3 stages"),
    "argmax": ("pdfa", "label-readout", ("protection.noise=argmax",), ""),
    "counts of a camera": ("pdfa", "label-readout", ("protection.noise=counts",), ""),
    "noise of a device": ("pdfa", "record", ("protection.noise=device",), "device noise"),
    "bands": ("bp", "record", ("protection.bands=4",), ""),
    "joint clip of loss differences": ("zo", "record", ("trainer.clip=joint",), "jointly clipped"),
    "clip by layer": ("ulr", "record", ("trainer.clip=module",), ""),
}
"""Laws of noise: trainer, protection, settings, and what the self-test says of them."""


@pytest.mark.parametrize(
    ("name", "mode"),
    nightly(
        itertools.product(SOUND, MODES),
        but=[
            ("pdfa", "release"), ("last iterate", "release"), ("pdfa, label-randomized-response", "release"),
            ("counts of a camera", "release"),
        ],
    ),
)  # fmt: skip
def test_trainers_release_what_is_accounted(name: str, mode: str, seed: int) -> None:
    kind, protection, settings, says = SOUND[name]
    found = self_test(kind, mode, seed, protection=protection, settings=settings)
    assert found.holds, report_text(found)
    assert says in found.accounted
    assert found.coordinates >= 40 or protection.startswith("label")
    assert any(check.name.startswith("counts: ") for check in found.checks) is name.startswith("counts")


@pytest.mark.parametrize(
    ("kind", "protection", "mode"),
    nightly(
        [
            *itertools.product(STEPWISE, ["record"], MODES),
            *(("bp", "label-amplified", mode) for mode in MODES),
        ],
        but=[("bp", "record", "release")],
    ),
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


def kept_too_often(respond: Callable[..., Any]) -> Callable[..., Any]:
    return lambda labels, among, *, epsilon, **rest: respond(labels, among, epsilon=1.2 * epsilon, **rest)


def from_one_number(respond: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, generator, **rest: respond(*given, generator=OneNumber(generator), **rest)


def from_a_known_seed(randomize: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, labels, mechanism, source: randomize(x, labels, mechanism, np.random.default_rng(0))


STAGED_FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "response: share of labels kept": ("respond_among", kept_too_often),
    "response: records apart": ("respond_among", from_one_number),
    "response: equal in two runs": ("randomize_in_stages", from_a_known_seed),
}
"""The check that finds each, what is replaced, and by what."""


class OneNumber:
    def __init__(self, source: UniformSource) -> None:
        self._source = source

    def random(self, size: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(self._source.random((1,)), size)


@pytest.mark.parametrize("check", nightly(zip(STAGED_FAULTS), but=[("response: share of labels kept",)]))
def test_faults_of_staged_responses_are_found(check: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrap = STAGED_FAULTS[check]
    monkeypatch.setattr(noisy_labels, name, wrap(getattr(noisy_labels, name)))
    kind, protection, settings, _ = SOUND["stages"]
    found = self_test(kind, "experiment", seed, protection=protection, settings=settings, level=1e-4)
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


@pytest.mark.slow
def test_loss_differences_clipped_one_by_one_are_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, n clipped differences have up to sqrt(n) times the norm."""

    def one_by_one(found: Sequence[Differences], clip: float) -> list[Differences]:
        return [replace(each, values=each.values.clamp(-clip, clip)) for each in found]

    monkeypatch.setattr("opusim.training.zeroth_order.trainer.jointly_clipped", one_by_one)
    assert not self_test("zo", "experiment", seed, settings=["trainer.clip=joint"]).holds


IN_CI = [
    ("noise_halved", "pdfa", "record", "release"), ("bias_unclipped", "pdfa", "record", "release"),
    ("sampled_too_often", "pdfa", "record", "release"),
    ("labels_kept_too_often", "pdfa", "label-randomized-response", "release"),
]  # fmt: skip
"""One fault of noise, of contributions, of batches and of labels; the others are planted every night."""


PLANTED = {fault.name: fault for fault in (*FAULTS, *OF_ONE_RUN)}
EVERYWHERE = [
    (fault.name, kind, protection, mode)
    for fault in PLANTED.values()
    for kind, protection, mode in itertools.product(fault.trainers, fault.protections, fault.modes)
    if fault.applies(trainer=kind, protection=protection, mode=mode)
]


@pytest.mark.parametrize(("name", "kind", "protection", "mode"), nightly(EVERYWHERE, but=IN_CI))
def test_faults_are_found_everywhere(name: str, kind: str, protection: str, mode: str, seed: int) -> None:
    fault = PLANTED[name]
    with fault.planted():
        found = self_test(
            kind, mode, seed, level=1e-4, protection=protection, steps=60, settings=fault.settings,
            single_records=fault.small_batches,
        )  # fmt: skip
    assert {check.name for check in found.alarms} & set(fault.checks), report_text(found)


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
        along, shares = by_layer.sum(axis=1) / 2**0.5, np.full(2, 2**-0.5)
        sums = Sums(along=along, along_std=z, by_layer=by_layer, shares=shares)
        runs.append(Released(noise=noise, sums=sums, batch=BatchLaw.binomial(400, 0.1)))
    return runs


@pytest.mark.parametrize("z", [pytest.param(0.5, marks=pytest.mark.slow), 3.0])
@pytest.mark.parametrize(
    "fault", ["", "noise", "reused", "sizes", "layers", "a part", "a part again", "a step"]
)
def test_synthetic_updates_alarm_where_they_must(fault: str, z: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(20):
        found = shared(checked(synthetic(generator, z=z, fault=fault)), 1e-6)
        assert any(check.alarm for check in found) == bool(fault), found


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


READOUT, LIMITS = "protection.kind=label-readout protection.noise=", "leaves only limits of the light"


@pytest.mark.parametrize(
    ("kind", "settings", "error", "message"),
    [
        ("bp", "protection.kind=last-iterate", ConfigError, "'last-iterate' is not for trainer.kind ="),
        ("bp", "protection.kind=none", NoGuarantee, "no guarantee covers the steps of bp"),
        ("bp", "data.name=mnist", ConfigError, "data.name: is reserved"),
        ("bp", "optimizer.momentum=0.9", ConfigError, "optimizer.momentum: is reserved"),
        ("bp", "sampler.batch_size=64", ConfigError, "must divide the 400 records"),
        ("bp", "protection.clip_norm=50", ValueError, "protection.clip_norm = 50: must be at most"),
        ("zo", "trainer.directions=8", ConfigError, "use at least 41"),
        ("zo", "trainer.law=laplace", ConfigError, "use 'gaussian'"),
        ("pdfa", "device.name=camera", ConfigError, "use 'ideal' or 'gaussian'"),
        ("pdfa", "device.noise.sigma=0.5", ConfigError, "use at most 0.01"),
        ("pdfa", f"{READOUT}device", ConfigError, "reads labels through a matrix"),
        ("pdfa", f"{READOUT}counts device.name=camera_fluctuating", ConfigError, f"camera.light.power: {LIMITS}"),
        ("pdfa", f"{READOUT}counts device.certificate=my.toml", ConfigError, f"device.certificate: {LIMITS}"),
        ("adam", "", ValueError, "kind"),
        ("private-loop", "protection.bands=4", ConfigError, "does not apply to a private loop"),
        ("private-loop", "trainer.clip=module", ConfigError, "does not apply to a private loop"),
        ("private-loop", "protection.kind=label-budget", ConfigError, "does not apply to a private loop"),
        ("pdfa", "protection.unit=user protection.records_per_user=2", ConfigError, "'convolution' or 'attention'"),
    ],
)  # fmt: skip
def test_untestable_is_refused(kind: str, settings: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        training.audit_mechanism(kind, settings=settings.split(), steps=40, seed=1)


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
