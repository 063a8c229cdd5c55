"""Every kind that a ledger may name: JSON and ledger round trips, calibration, budgets, monotonicity, failures."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting import get_epsilon_gaussian
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from opusim.accounting.composition import Budget, calibrate_noise, guarantees
from opusim.accounting.guarantee import Adjacency, BudgetExceeded, NoGuarantee, Release, Status, Unit
from opusim.accounting.ledger import Ledger, read_ledger
from opusim.accounting.mechanism import Mechanism, mechanism_from_json, mechanism_kinds
from opusim.accounting.mechanisms.convex import ConvexLastIterate
from opusim.accounting.mechanisms.counts import LabelArgmax, LabelCounts
from opusim.accounting.mechanisms.labels import (
    LabelAmplified,
    LabelBudget,
    LabelReadout,
    LabelRelease,
    RandomizedResponse,
    StagedResponse,
)
from opusim.accounting.mechanisms.pdfa import PdfaWithoutFormula, PublishedLayer, PublishedPdfa
from opusim.accounting.mechanisms.records import (
    Gaussian,
    PoissonGaussian,
    PoissonLaplace,
    RecordCentral,
    RecordReplaced,
    Unprotected,
)
from opusim.accounting.mechanisms.selection import NoisyTrial, PrivateSelection
from opusim.accounting.mechanisms.ulr import PublishedUlr, RejectionGaussian
from opusim.accounting.mechanisms.zeroth_order import ZoGaussian, ZoLaplace
from tests.oracles.dp_events import event

DELTA = 1e-5
RECORD = RecordCentral(
    noise_multiplier=1.3, sampling_probability=0.1, clip_norm=0.7, divisor=256, device_noise=True, steps=3
)
PUBLISHED = PublishedPdfa(
    layers=(
        PublishedLayer(fan_in=65, width=32, gamma_min=0.8, gamma_max=1.0, inputs_bounded_below=True),
        PublishedLayer(fan_in=33, width=10, gamma_min=1, gamma_max=1, inputs_bounded_below=False, noised=False),
    ),
    batch_size=256, sigma=5.0, tau_b=1.0, tau_h_min=0.8, tau_h_max=1.0, steps=7,
)  # fmt: skip
CALIBRATED = (
    PoissonGaussian(noise_multiplier=1.0, sampling_probability=0.1, steps=20),
    *(PoissonLaplace(scale=1.0, sampling_probability=0.1, steps=20), Gaussian(noise_multiplier=1.0, steps=4)),
    *(RandomizedResponse.from_epsilon(0.5, 10), RECORD),
    LabelAmplified(noise_multiplier=2.0, sampling_probability=0.2, steps=5),
    LabelBudget(budget_mu=1.0, order="hardware", beta=1e-6),
    *(LabelReadout(mu=2.0, device_law=True, beta=1e-6), LabelRelease(mu=2.0, device_noise=True, beta=1e-6)),
    StagedResponse(step_epsilon=0.5, n_classes=10, stages=3),
    LabelCounts(light=((0.3, 0.1, 0.0), (0.0, 0.2, 0.4)), dark=(3.0, 4.0, 3.5), beta=1e-6),
    LabelArgmax(step_epsilon=1.0, n_classes=4, beta=1e-7),
    RejectionGaussian(noise_multiplier=2.0, sampling_probability=0.1, n_records=1000, min_batch_size=80, steps=4),
    ConvexLastIterate(
        objective="margin", clip=0.5, learning_rate=1.9, batches=6, epochs=3, noise_multiplier=4.0,
        final_noise=2.0,
    ),
    PrivateSelection(mean=5.0, mu=0.5),
    PrivateSelection(
        mean=3.0, mu=0.02, adjacency=Adjacency.ZERO_OUT, release=Release.EVERY_UPDATE,
        trials=(
            NoisyTrial(law="gaussian", scale=1.5, probability=0.1, steps=20, what="Poisson batches"),
            NoisyTrial(law="gaussian", scale=2.0, probability=0.2, steps=10),
        ),
    ),
    ZoGaussian(noise_multiplier=1.2, sampling_probability=0.1, clip_norm=0.5, divisor=16, directions=2, steps=3),
    ZoLaplace(scale=1.2, sampling_probability=0.1, clip_norm=0.5, divisor=16, directions=2, steps=3),
    RecordReplaced(noise_multiplier=1.3, sampling_probability=0.1, clip_norm=0.7, divisor=256, steps=3),
)  # fmt: skip
WITHOUT_NOISE = (
    PUBLISHED,
    PdfaWithoutFormula(missing="a clip of the projected error", steps=2),
    Unprotected(what="bp without protection", steps=9),
    PublishedUlr(
        target_std=4.0, sampling_probability=0.1, n_records=1000, min_batch_size=80, modules=2,
        largest_module=650, sampled=True, steps=3,
    ),
)  # fmt: skip
ALL = CALIBRATED + WITHOUT_NOISE
QUICK = [
    pytest.param(m, marks=pytest.mark.slow) if isinstance(m, RejectionGaussian) else m for m in CALIBRATED
]
"""Those that can be calibrated; that of rejected batches takes 10 s and more."""


def _name(mechanism: Mechanism) -> str:
    return mechanism.kind


def test_every_kind_is_tested_and_none_is_inherited() -> None:
    assert {mechanism.kind for mechanism in ALL} == set(mechanism_kinds()) - {"two_views"}
    # A ledger would be read back as the parent, and priced by the parent's theorem.
    with pytest.raises(ValueError, match="^class Cheaper: inherits kind = 'gaussian', so that a ledger"):
        type("Cheaper", (Gaussian,), {"guarantees": classmethod(lambda cls, mechanisms, **other: [])})


@pytest.mark.parametrize(("changes", "message"), [
    ({"steps": True}, "steps = True: Input should be a valid integer"),
    ({"steps": "3"}, "steps = '3': Input should be a valid integer"),
    ({"steps": 3.5}, "steps = 3.5: Input should be a valid integer"),
    ({"device_noise": "no"}, "device_noise = 'no': Input should be a valid boolean"),
    ({"noise_multiplier": "1.3"}, "noise_multiplier = '1.3': Input should be a valid number"),
    ({"noise_multiplier": "inf"}, "noise_multiplier = inf: must be finite and above 0"),
    ({"relation": "replace_one"}, "relation = 'replace_one': must be 'add_or_remove_one' or 'zero_out'"),
    ({"clip_norm": None}, "clip_norm = None: Input should be a valid number"),
])  # fmt: skip
def test_a_value_of_another_type_is_no_description(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        mechanism_from_json(RECORD.to_json() | changes)


@pytest.mark.parametrize("mechanism", ALL, ids=_name)
def test_descriptions_survive_json_and_a_ledger(mechanism: Mechanism, tmp_path: Path) -> None:
    assert mechanism_from_json(json.loads(json.dumps(mechanism.to_json(), allow_nan=False))) == mechanism
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, mode="experiment", delta=DELTA, enforced=True, block=3) as ledger:
        ledger.pay_once("first", mechanism)
        for step in range(4):
            ledger.pay(step, mechanism.repeated(1), until=4)
        ours = ledger.guarantees()
    content = read_ledger(path)
    assert content.mechanisms == [mechanism.repeated(mechanism.steps + 4)]  # merged
    assert content.guarantees() == ours


@pytest.mark.parametrize("mechanism", QUICK, ids=_name)
def test_calibration_reaches_its_target_from_below(mechanism: Mechanism) -> None:
    found, guarantee = calibrate_noise(mechanism, target_epsilon=1.5, delta=DELTA)
    assert guarantee.is_proven
    assert 1.5 * 0.995 <= guarantee.epsilon <= 1.5
    assert found.steps == mechanism.steps
    assert guarantees([found], delta=DELTA)[0].epsilon == guarantee.epsilon


@pytest.mark.parametrize("mechanism", WITHOUT_NOISE, ids=_name)
def test_a_claim_or_no_guarantee_never_meets_a_target_or_budget(mechanism: Mechanism, tmp_path: Path) -> None:
    """The claimed epsilon of PUBLISHED is finite, and counts for nothing."""
    with pytest.raises(NoGuarantee):
        calibrate_noise(mechanism, target_epsilon=1e6, delta=DELTA)
    budget = Budget(epsilon=1e8, delta=DELTA)
    with Ledger(tmp_path / "l", mode="experiment", delta=DELTA, budget=budget) as ledger:
        with pytest.raises(NoGuarantee, match="no proven finite guarantee"):
            ledger.pay(0, mechanism)
        assert not ledger.content.payments


@pytest.mark.parametrize("mechanism", QUICK, ids=_name)
def test_a_budget_stops_every_kind(mechanism: Mechanism, tmp_path: Path) -> None:
    step, _ = calibrate_noise(mechanism.repeated(1), target_epsilon=0.8, delta=DELTA)
    with Ledger(tmp_path / "l", mode="release", delta=DELTA, budget=Budget(epsilon=1, delta=DELTA)) as ledger:
        ledger.pay_once("first", step)
        with pytest.raises(BudgetExceeded):
            [ledger.pay_once(str(name), step) for name in range(30)]
        assert ledger.guarantees()[0].epsilon <= 1.0


ON_BATCH = (RecordCentral, RecordReplaced, ZoGaussian, ZoLaplace, PoissonGaussian, PoissonLaplace, Gaussian)


@pytest.mark.parametrize("mechanism", ALL, ids=_name)
def test_a_known_batch_is_never_amplified(mechanism: Mechanism) -> None:
    """q = 1, at no smaller epsilon; a kind that says nothing of such an attacker is named."""
    if not isinstance(mechanism, ON_BATCH):
        with pytest.raises(NoGuarantee, match=f"^mechanism '{mechanism.kind}': states no guarantee for"):
            mechanism.known_batch()
        return
    known = mechanism.known_batch()
    assert type(known) is type(mechanism)
    assert getattr(known, "sampling_probability", 1.0) == 1.0
    sampled = guarantees([mechanism], delta=DELTA)[0]
    assert guarantees([known], delta=DELTA)[0].epsilon >= sampled.epsilon


def test_enforced_assumptions_are_marked_and_the_others_are_not() -> None:
    for one in CALIBRATED:
        trusted, checked = (guarantees([one], delta=DELTA, enforced=known)[0] for known in (False, True))
        assert {assumption.holds for assumption in trusted.assumptions} == {None}
        assert {assumption.holds for assumption in checked.assumptions} == {None, True}
        assert trusted.epsilon == checked.epsilon


def test_credited_device_noise_is_proven_under_a_device_model() -> None:
    for mechanism, plain in (
        (RECORD, replace(RECORD, device_noise=False)),
        (LabelReadout(mu=0.5, device_law=True), LabelReadout(mu=0.5)),
        (LabelBudget(budget_mu=0.5, order="hardware"), LabelBudget(budget_mu=0.5)),
    ):
        assert guarantees([mechanism], delta=DELTA)[0].status is Status.PROVEN_UNDER_DEVICE_MODEL
        assert guarantees([plain], delta=DELTA)[0].status is Status.PROVEN
        both = guarantees([mechanism, plain], delta=DELTA)[0]
        assert both.status is Status.PROVEN_UNDER_DEVICE_MODEL


@pytest.mark.slow
def test_events_say_what_the_accountants_say() -> None:
    """dp_accounting's own accountant on the event, under the relation that the event's docstring names."""
    relations = dp_accounting.NeighboringRelation
    for mechanism, relation in (
        (RECORD, relations.ADD_OR_REMOVE_ONE),
        (CALIBRATED[5], relations.REPLACE_ONE),
        (LabelBudget(budget_mu=0.7, steps=3), relations.ADD_OR_REMOVE_ONE),
        (LabelReadout(mu=0.7, steps=3), relations.ADD_OR_REMOVE_ONE),
    ):
        theirs = PLDAccountant(relation).compose(event(mechanism)).get_epsilon(DELTA)
        assert guarantees([mechanism], delta=DELTA)[0].epsilon == pytest.approx(theirs, rel=5e-3)


def test_unprotected_updates_have_no_guarantee_and_label_mus_compose() -> None:
    (guarantee,) = guarantees([WITHOUT_NOISE[2], Unprotected(what="dfa without protection")], delta=DELTA)
    assert (guarantee.status, guarantee.unit) == (Status.NONE, Unit.RECORD)
    assert guarantee.adjacency is Adjacency.ADD_OR_REMOVE_ONE
    assert "bp without protection, 9 steps" in guarantee.mechanism
    (both,) = guarantees([LabelBudget(budget_mu=0.6), LabelBudget(budget_mu=0.8)], delta=DELTA)
    assert both.epsilon == pytest.approx(get_epsilon_gaussian(1.0, DELTA))


@pytest.mark.parametrize("mechanism", ALL, ids=_name)
@pytest.mark.parametrize("delta", [0.0, 1e-300])
def test_failures_go_to_infinity_never_to_zero_or_nan(mechanism: Mechanism, delta: float) -> None:
    """No Gaussian noise is pure, and no numerics reach 1e-300: infinite with a reason, or refused, or exact."""
    try:
        found = guarantees([mechanism], delta=delta)
    except NoGuarantee:
        return
    for guarantee in found:
        assert guarantee.epsilon > 0  # neither 0 nor NaN
        assert math.isfinite(guarantee.epsilon) or guarantee.reason


_noise = st.floats(0.4, 20)
_factor = st.floats(1.05, 3)


@settings(max_examples=6)
@given(_noise, _factor, st.integers(1, 20), st.integers(1, 20))
@pytest.mark.parametrize("mechanism", [
    pytest.param(m, marks=pytest.mark.slow) if isinstance(m, PrivateSelection) else m
    for m in QUICK
    if not isinstance(m, RandomizedResponse)
], ids=_name)  # fmt: skip
def test_more_noise_never_raises_and_more_steps_never_lower(
    mechanism: Mechanism, noise: float, factor: float, steps: int, more: int
) -> None:
    def interval(noise: float, steps: int) -> tuple[float, float]:
        guarantee = guarantees([mechanism.with_noise(noise).repeated(steps)], delta=1e-4)[0]
        lower = guarantee.epsilon if guarantee.epsilon_lower is None else guarantee.epsilon_lower
        return lower, guarantee.epsilon

    here = interval(noise, steps)[1]
    assert interval(noise * factor, steps)[0] <= here
    assert interval(noise, steps + more)[1] >= interval(noise, steps)[0]


@settings(max_examples=10)
@given(st.permutations([0.5, 1.0, 1.5, 2.0]))
@pytest.mark.parametrize("mechanism", [
    RECORD, *(pytest.param(CALIBRATED[n], marks=pytest.mark.slow) for n in (5, 6, 7)),
], ids=_name)  # fmt: skip
def test_the_order_of_composition_does_not_matter(mechanism: Mechanism, order: list[float]) -> None:
    def total(noises: list[float]) -> float:
        return guarantees([mechanism.with_noise(noise) for noise in noises], delta=DELTA)[0].epsilon

    assert total(order) == total(sorted(order))


OF_KIND = {mechanism.kind: mechanism for mechanism in ALL}
BAD: dict[str, list[dict[str, object]]] = {
    "convex": [
        *({"objective": "hinge"}, {"schedule": "step"}, {"noise_multiplier": 0.0}, {"batches": 0}),
        *({"regularisation": -1.0}, {"objective": "squared", "clip": None}),
    ],
    "label_amplified": [{"sampling_probability": 0.0}],
    "label_argmax": [{"n_classes": 1}],
    "label_budget": [{"order": "other"}],
    "label_counts": [
        *({"light": ((1.0, 2.0, 3.0),)}, {"light": ((1.0, 2.0, 3.0), (1.0,))}, {"brightest": 0.0}),
        *({"light": ((1.0, -2.0, 3.0), (1.0, 1.0, 1.0))}, {"dark": (1.0,)}),
    ],
    "label_readout": [{"mu": 0.0}],
    "pdfa_published": [{"sigma": 0.0}, {"order": 1.0}, {"tau_h_min": 2.0}, {"steps": 0}],
    "pdfa_without_formula": [{"missing": ""}],
    "record_central": [
        *({"noise_multiplier": 0.0}, {"sampling_probability": 1.5}, {"steps": 0}, {"divisor": math.nan}),
        *({"beta": 1.0}, {"correlation": ()}, {"correlation": (0.0, 1.0)}, {"correlation": (1.0, math.nan)}),
    ],
    "rejection_gaussian": [{"min_batch_size": 1001}],
    "staged_response": [{"stages": 1}, {"step_epsilon": 0.0}, {"n_classes": 1}],
    "ulr_published": [{"target_std": 1e-200}, {"target_std": 1e200}],
    "unprotected": [{"what": " "}],
    **{
        kind: [{"clip_norm": 0.0}, {"directions": 0}, {"sampling_probability": 0.0}, {"divisor": math.inf}]
        for kind in ("zo_gaussian", "zo_laplace")
    },
}


@pytest.mark.parametrize(("kind", "changes"), [(kind, changes) for kind in BAD for changes in BAD[kind]])
def test_bad_descriptions_are_named(kind: str, changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{list(changes)[-1]}"):
        replace(OF_KIND[kind], **changes)


def test_products_of_a_description_that_overflow_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(gamma_max tau_h_max\)\^2 = inf"):
        replace(PUBLISHED, tau_h_max=1e200)
    with pytest.raises(ValueError, match="bands = 3"):
        replace(RECORD, correlation=(0.8, 0.5, 0.3), sampling_probability=0.4)


@pytest.mark.parametrize("noise", [1e-300, 1e-9, 1e-2, 1e8, 1e300])
@pytest.mark.parametrize("mechanism", [
    m for m in CALIBRATED if not isinstance(m, RandomizedResponse | LabelArgmax | StagedResponse)
], ids=_name)  # fmt: skip
def test_extreme_noise_is_bounded_from_above(mechanism: Mechanism, noise: float) -> None:
    """Neither overflow nor a division by zero, and never less than a hundred times the noise would give."""
    guarantee = guarantees([mechanism.with_noise(noise)], delta=DELTA)[0]
    assert guarantee.epsilon > 100 if noise < 0.1 else guarantee.epsilon < 1
    if 1e-2 <= noise <= 1e8:
        more = guarantees([mechanism.with_noise(100 * noise)], delta=DELTA)[0]
        assert more.epsilon <= guarantee.epsilon
