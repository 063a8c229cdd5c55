"""Budgets and merged mechanisms: what fits, what is computed for it, and what counts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from opusim.accounting import AdditiveNoise, Gaussian, PoissonGaussian, RecordCentral, Unprotected
from opusim.accounting import mechanism as mechanism_module
from opusim.accounting.composition import Budget, guarantees, merge
from opusim.accounting.guarantee import Adjacency, BudgetExceeded, EpsilonBounds, NoGuarantee, Release, Unit
from opusim.accounting.mechanism import CertifiedMechanism, Mechanism
from opusim.accounting.mechanisms.labels import LabelBudget
from opusim.accounting.mechanisms.records import GAUSSIAN

STEP = PoissonGaussian(noise_multiplier=2.0, sampling_probability=0.1)
OTHER = replace(STEP, noise_multiplier=3.0)
DELTA = 1e-5
PRICE = 0.3
"""Of a step, in `linear` budgets."""


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let every step cost 0.3; holds the numbers of steps that were accounted for."""
    asked: list[int] = []

    def spent(self: Budget, mechanisms: Sequence[Mechanism]) -> float:
        asked.append(sum(mechanism.steps for mechanism in mechanisms))
        return PRICE * asked[-1]

    monkeypatch.setattr(Budget, "spent", spent)
    return asked


@pytest.mark.parametrize("paid", [0, 1, 3, 7])
@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("ahead", [0, 1, 5, 50])
def test_as_many_steps_as_fit_are_affordable(linear: list[int], paid: int, each: int, ahead: int) -> None:
    for epsilon in (0.1, 0.3, 1.0, 2.2, 3.0):
        for wanted in range(1, 13):
            before = [STEP.repeated(paid)] if paid else []
            most = max((n for n in range(13) if PRICE * (paid + each * n) <= epsilon), default=0)
            budget = Budget(epsilon=epsilon, delta=DELTA)
            found = budget.affordable(before, [STEP.repeated(each)], wanted, ahead=ahead)
            assert found == min(most, wanted)


def test_steps_ahead_are_accounted_for_once(linear: list[int]) -> None:
    """If the whole run fits, no later block is accounted for; if it does not, each block is."""
    for epsilon, expected in ((100.0, [3 + 2 * 20]), (10.0, [3 + 2 * 20, 3 + 2 * 5, 3 + 2 * 7])):
        budget = Budget(epsilon=epsilon, delta=DELTA)
        linear.clear()
        for wanted, ahead in ((5, 20), (7, 7), (5, 5)):
            assert budget.affordable([STEP.repeated(3)], [STEP.repeated(2)], wanted, ahead=ahead) == wanted
        assert linear == expected
    linear.clear()
    assert Budget(epsilon=10.0, delta=DELTA).affordable([], [STEP], 4) == 4
    assert linear == [4]


def test_several_mechanisms_are_accounted_for_each_time_and_by_themselves(linear: list[int]) -> None:
    budget = Budget(epsilon=3.0, delta=DELTA)
    assert not budget.would_exceed([STEP.repeated(4)], [OTHER])
    assert not budget.would_exceed([STEP.repeated(4)], [OTHER])
    assert not budget.would_exceed([STEP.repeated(8)], [OTHER])
    assert budget.would_exceed([STEP.repeated(8)], [OTHER.repeated(3)])
    assert linear == [5, 5, 9, 11]
    budget = Budget(epsilon=3.0, delta=DELTA)
    assert not budget.would_exceed([], [STEP.repeated(9)])
    assert not budget.would_exceed([], [OTHER.repeated(9)])
    assert budget.would_exceed([], [STEP.repeated(11)])
    assert budget.would_exceed([], [STEP.repeated(11)])
    assert linear[4:] == [9, 9, 11, 11]


@pytest.mark.parametrize(
    ("cost", "exceeds"), [(1.0, False), (math.nextafter(1.0, 2.0), True), (math.nan, True), (math.inf, True)]
)
def test_a_budget_is_spent_to_its_end(cost: float, exceeds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "spent", lambda *_: cost)
    assert Budget(epsilon=1.0, delta=DELTA).would_exceed([], [STEP]) is exceeds


def test_a_refusal_says_whether_a_smaller_step_would_help() -> None:
    budget = Budget(epsilon=1.0, delta=DELTA)
    budget.require([], [STEP])
    spent = budget.spent([STEP.repeated(2)])
    assert spent == guarantees([STEP.repeated(2)], delta=DELTA)[0].epsilon > 0
    with pytest.raises(BudgetExceeded, match=rf"more than epsilon 1 at delta 1e-05 \(spent {spent:.4g}\)"):
        budget.require([STEP.repeated(2)], [STEP.repeated(10_000)])
    with pytest.raises(NoGuarantee, match="has no proven finite guarantee"):
        budget.require([], [Unprotected(what="nothing")])
    assert budget.spent([]) == 0.0


def test_a_budget_counts_only_what_it_is_about() -> None:
    label, record = LabelBudget(budget_mu=0.5), STEP
    for mechanism in (label, record):
        (stated,) = guarantees([mechanism], delta=DELTA)
        for unit in (None, *Unit):
            for adjacency in (None, *Adjacency):
                budget = Budget(epsilon=1.0, delta=DELTA, unit=unit, adjacency=adjacency)
                fits = unit in (None, stated.unit) and adjacency in (None, stated.adjacency)
                assert budget.spent([mechanism]) == (stated.epsilon if fits else math.inf)


@pytest.mark.parametrize("values", [{"epsilon": 0}, {"epsilon": -1.0}, {"epsilon": math.inf}, {"delta": 1.0}])
def test_a_budget_needs_numbers_in_range(values: dict[str, float]) -> None:
    (name,) = values
    with pytest.raises(ValueError, match=f"{name} = "):
        Budget(**{"epsilon": 1.0, "delta": DELTA} | values)
    assert Budget(epsilon=1e-9, delta=0.0).delta == 0


def test_equal_mechanisms_are_one_with_the_sum_of_their_steps() -> None:
    parts = [STEP, OTHER.repeated(4), STEP.repeated(3), OTHER]
    whole = merge(parts)
    assert whole == merge(reversed(parts))
    assert {one.repeated(1): one.steps for one in whole} == {STEP: 4, OTHER: 5}
    assert merge([]) == []


def test_the_guarantee_of_all_is_that_of_their_sum() -> None:
    (both,) = guarantees([OTHER, STEP, STEP], delta=DELTA, enforced=True)
    assert [both] == guarantees([STEP.repeated(2), OTHER], delta=DELTA, enforced=True)
    (less,) = guarantees([OTHER, STEP], delta=DELTA)
    assert less.epsilon < both.epsilon
    checked = [one.holds for one in both.assumptions]
    assert True in checked
    assert True not in [one.holds for one in less.assumptions]
    with pytest.raises(ValueError, match="delta = 1"):
        guarantees([STEP], delta=1.0)
    with pytest.raises(NoGuarantee, match="nothing was paid for"):
        guarantees([], delta=DELTA)
    with pytest.raises(NoGuarantee, match="no accountant covers them together"):
        guarantees([STEP, LabelBudget(budget_mu=0.5)], delta=DELTA)


@pytest.fixture
def own_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test register kinds that no other test sees."""
    monkeypatch.setattr(mechanism_module, "_KINDS", dict(mechanism_module._KINDS))


@pytest.mark.usefixtures("own_kinds")
def test_a_kind_that_states_its_own_number_composes_only_with_itself() -> None:
    """Neither its number for ours, nor ours for it; it is ten times too small."""

    class Own(Gaussian):
        kind = "own_bounds"

        @classmethod
        def bounds(cls, mechanisms: Sequence[Mechanism], adjacency: Adjacency, delta: float) -> EpsilonBounds:
            found = super().bounds(mechanisms, adjacency, delta)
            return replace(found, lower=found.lower / 10, upper=found.upper / 10)

    plain, theirs = Gaussian(noise_multiplier=2.0), Own(noise_multiplier=2.0)
    priced = [guarantees([one], delta=DELTA)[0].epsilon for one in (plain, theirs)]
    assert priced[0] == pytest.approx(10 * priced[1])
    assert guarantees([theirs, Own(noise_multiplier=3.0)], delta=DELTA)[0].epsilon > priced[1]
    with pytest.raises(NoGuarantee, match="no accountant covers them together"):
        guarantees([plain, theirs], delta=DELTA)
    assert (PoissonGaussian.accountant, RecordCentral.accountant) == (AdditiveNoise, RecordCentral)


@pytest.mark.usefixtures("own_kinds")
def test_a_kind_without_a_theorem_is_refused() -> None:
    class Bare(Gaussian):
        kind = "bare"
        theorem = None

    with pytest.raises(NoGuarantee, match="^mechanism 'bare': names no theorem; set one in"):
        guarantees([Bare(noise_multiplier=2.0)], delta=DELTA)


def test_relations_weaken_only_where_the_mechanisms_state_them() -> None:
    """Constants of a record mechanism come from nowhere or from the public number; of others nothing is known."""
    central = RecordCentral(noise_multiplier=2.0, sampling_probability=0.1, clip_norm=1.0, divisor=64)
    both = [central, replace(central, relation=Adjacency.ZERO_OUT)]
    assert guarantees(both, delta=DELTA)[0].adjacency is Adjacency.ZERO_OUT
    with pytest.raises(NoGuarantee, match="their relations differ"):
        guarantees([STEP, replace(STEP, adjacency=Adjacency.ZERO_OUT)], delta=DELTA)


@pytest.mark.usefixtures("own_kinds")
def test_a_noisy_sum_that_a_certificate_vouches_for_spends_its_beta() -> None:
    """AdditiveNoise, which comes first, knows no beta, so that it may not state the kind."""

    @dataclass(frozen=True, kw_only=True)
    class CertifiedSum(AdditiveNoise, CertifiedMechanism):
        kind: ClassVar[str] = "certified_sum"
        noise_law = "gaussian"
        noise_field: ClassVar[str | None] = "noise_multiplier"
        theorem = GAUSSIAN
        noise_multiplier: float = 4.0

        def describe(self) -> str:
            return "a certified sum"

    sure, certified = Gaussian(noise_multiplier=4.0), CertifiedSum(beta=9e-6)
    assert math.isinf(guarantees([certified], delta=9e-6)[0].epsilon)
    (found,) = guarantees([certified], delta=DELTA)
    assert found.epsilon == pytest.approx(guarantees([sure], delta=1e-6)[0].epsilon)
    with pytest.raises(NoGuarantee, match="no accountant covers them together"):
        guarantees([sure, certified], delta=DELTA)


@pytest.mark.usefixtures("own_kinds")
@pytest.mark.parametrize("relation", Adjacency)
def test_a_kind_that_states_its_mu_has_it_under_every_relation(relation: Adjacency) -> None:
    @dataclass(frozen=True, kw_only=True)
    class OfMu(AdditiveNoise):
        kind: ClassVar[str] = "of_mu"
        noise_law = "mu"
        noise_field: ClassVar[str | None] = "mu"
        theorem = GAUSSIAN
        mu: float

        def describe(self) -> str:
            return "a sum"

    (found,) = guarantees([OfMu(mu=0.25, adjacency=relation)], delta=DELTA)
    assert found.epsilon == pytest.approx(guarantees([Gaussian(noise_multiplier=4)], delta=DELTA)[0].epsilon)


@pytest.mark.usefixtures("own_kinds")
def test_what_a_kind_inherits_of_a_statement_counts_wherever_it_comes_from() -> None:
    class NoEpsilon:
        @classmethod
        def bounds(cls, *_: Any) -> EpsilonBounds:
            return EpsilonBounds(lower=0.0, upper=math.inf, method="none")

    class MixedIn(NoEpsilon, Gaussian):
        kind: ClassVar[str] = "mixed_in"

    class Between(AdditiveNoise):
        refuted = "nothing is proven"
        theorem = GAUSSIAN

        def describe(self) -> str:
            return "a sum"

    class Below(Between):
        kind: ClassVar[str] = "below"

    for one in (MixedIn(noise_multiplier=4.0), Below()):
        assert math.isinf(guarantees([one], delta=DELTA)[0].epsilon)


@pytest.mark.usefixtures("own_kinds")
def test_labels_and_releases_that_differ_do_not_compose() -> None:
    class OfLabels(Gaussian):
        kind: ClassVar[str] = "of_labels"
        unit = Unit.LABEL

    one = OfLabels(noise_multiplier=4.0)
    assert [each.unit for each in guarantees([one], delta=DELTA)] == [Unit.LABEL]
    with pytest.raises(NoGuarantee, match="no accountant covers them together"):
        guarantees([one, Gaussian(noise_multiplier=4.0)], delta=DELTA)

    @dataclass(frozen=True, kw_only=True)
    class Chosen(Gaussian):
        kind: ClassVar[str] = "chosen_release"
        release: Release = Release.EVERY_UPDATE  # type: ignore[misc]

    both = [Chosen(noise_multiplier=4.0, release=one) for one in (Release.EVERY_UPDATE, Release.LAST_ITERATE)]
    with pytest.raises(NoGuarantee, match="release differs between them"):
        guarantees(both, delta=DELTA)
