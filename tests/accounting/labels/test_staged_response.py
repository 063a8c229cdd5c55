"""Responses among some labels: exact channels, sets, targets, and what a whole look in stages costs."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from opusim.accounting.composition import guarantees
from opusim.accounting.mechanisms.labels import (
    RandomizedResponse,
    StagedResponse,
    among_log_likelihood,
    among_targets,
    respond_among,
    response_log_likelihood,
    telling_labels,
)
from opusim.training.protections.noisy_labels import ResponseModel

DELTA = 1e-5


def channel(among: np.ndarray, epsilon: float) -> np.ndarray:
    """P(answer | label) of a record that may take some labels, shape (k, answers)."""
    k, answers = len(among), np.flatnonzero(among)
    rows = np.tile(among, (len(answers), 1))
    found = np.exp(among_log_likelihood(answers, rows, epsilon=epsilon)).T
    assert found.shape == (k, len(answers))
    return found


def largest_ratio(law: np.ndarray) -> float:
    return float(np.log(law.max(axis=0) / law.min(axis=0)).max())


@settings(max_examples=200)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=12).filter(any), st.floats(1e-6, 300))
def test_no_prior_makes_an_answer_tell_more_than_epsilon(masses: list[float], epsilon: float) -> None:
    prior = np.array(masses) / sum(masses)
    law = channel(telling_labels(prior[None], epsilon=epsilon)[0], epsilon)
    np.testing.assert_allclose(law.sum(axis=1), 1.0, rtol=1e-12)
    assert law.shape[1] >= 2
    assert largest_ratio(law) == pytest.approx(epsilon, rel=1e-9, abs=1e-12)  # attained, and not exceeded


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_every_size_of_the_set_keeps_epsilon(size: int) -> None:
    """Also the sizes that are never chosen; a planted outside answer of its own would exceed it."""
    law = channel(np.arange(6) < size, 0.9)
    assert largest_ratio(law) <= 0.9 + 1e-12
    named = law.copy()
    named[size:] = np.eye(law.shape[1])[0]  # planted: labels outside give the first label, always
    assert size in (1, 6) or largest_ratio(np.maximum(named, 1e-9)) > 0.9


@pytest.mark.parametrize("size", [2, 3, 5])
def test_answers_have_the_law_that_is_accounted(size: int, seed: int) -> None:
    """Frequencies of 10^5 answers for each label within five errors of the family; 5 % of epsilon more is caught."""
    k, n, epsilon = 5, 100_000, 1.1
    members = np.isin(np.arange(k), [4, 0, 2, 1, 3][:size])
    among, law = np.tile(members, (n, 1)), channel(members, epsilon)
    limit = norm.isf(norm.sf(5.0) / law.size)

    def deviation(drawn: float) -> float:
        draw = np.random.default_rng(seed)
        worst = 0.0
        for label in range(k):
            labels = np.full(n, label)
            found = np.bincount(respond_among(labels, among, epsilon=drawn, generator=draw), minlength=k)
            assert not found[~members].any()
            p = law[label]
            worst = max(worst, float(np.max(np.abs(found[members] / n - p) / np.sqrt(p * (1 - p) / n))))
        return worst

    assert deviation(epsilon) < limit
    assert deviation(1.05 * epsilon) > limit


def test_among_all_labels_it_is_randomized_response_as_with_a_flat_prior() -> None:
    observed = np.arange(4)
    everything = among_log_likelihood(observed, np.ones((4, 4), dtype=bool), epsilon=0.7)
    np.testing.assert_allclose(everything, response_log_likelihood(observed, epsilon=0.7, n_labels=4))
    assert telling_labels(np.full((1, 10), 0.1), epsilon=3.0).all()
    assert telling_labels(np.eye(10), epsilon=3.0).sum(axis=1).tolist() == [2] * 10


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0, 8.0])
def test_the_set_is_the_one_that_tells_most(epsilon: float) -> None:
    """Mutual information by its definition, over all sizes of the set."""
    draw = np.random.default_rng(5)
    for prior in draw.dirichlet(np.full(5, 0.4), size=30):
        order = np.argsort(-prior)
        told = {}
        for size in range(2, 6):
            law = channel(np.isin(np.arange(5), order[:size]), epsilon)
            answers = prior @ law
            told[size] = float(np.sum(prior[:, None] * law * np.log(law / answers)))
        among = telling_labels(prior[None], epsilon=epsilon)[0]
        assert told[int(among.sum())] == pytest.approx(max(told.values()), abs=1e-12)
        assert set(np.flatnonzero(among)) == set(order[: among.sum()])


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 5.0])
def test_targets_have_the_mean_that_is_stated(epsilon: float) -> None:
    """Exactly, over the channel: the one-hot label inside, 1 / m of the error in the mass outside."""
    prior = np.array([0.5, 0.05, 0.3, 0.15])
    for members in ([True] * 4, [True, False, True, False]):
        among = np.array(members)
        law, answers = channel(among, epsilon), np.flatnonzero(among)
        rows = np.tile(among, (len(answers), 1))
        targets, weights = among_targets(answers, rows, np.tile(prior, (len(answers), 1)), epsilon=epsilon)
        outside, m = prior[~among].sum(), among.sum()
        for label in range(4):
            wrong = float(not among[label]) - outside
            expected = np.where(among, np.eye(4)[label] * among[label] + wrong / m, prior)
            np.testing.assert_allclose(law[label] @ targets, expected, atol=1e-12)
        variance = (law[0] @ targets**2 - (law[0] @ targets) ** 2).sum()
        assert 1 / weights[0] == pytest.approx(1 + variance)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: telling_labels(np.array([[0.5, math.nan]]), epsilon=1.0), "priors.*finite"),
    (lambda: telling_labels(np.ones((1, 2)) / 2, epsilon=0.0), "epsilon = 0.0: must be finite and above"),
    (lambda: answered([3], [[True, True]]), r"labels: must be integers in \[0, 2\)"),
    (lambda: answered([0], [[False, False]]), "among: a record may take no label at all"),
])  # fmt: skip
def test_bad_responses_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def answered(labels: list[int], among: list[list[bool]]) -> np.ndarray:
    draw = np.random.default_rng(0)
    return respond_among(np.array(labels), np.array(among), epsilon=1.0, generator=draw)


def pasts(epsilon: float) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
    """Log-likelihoods of records 0 and 1, and the priors of four records, for each two answers of the former."""
    x = torch.tensor([[0.0], [1.0], [0.2], [0.9]])
    flat, everything = np.full((2, 3), 1 / 3), np.ones((2, 3), dtype=bool)
    found = {}
    for past in itertools.product(range(3), repeat=2):
        scores = among_log_likelihood(np.array(past), everything, epsilon=epsilon)
        model = ResponseModel(x, 3)
        model.add(np.arange(2), *among_targets(np.array(past), everything, flat, epsilon=epsilon), scores)
        found[past] = scores, model.priors()
    return found


def transcripts(labels: tuple[int, ...], epsilon: float, known: dict, *, peeks: bool = False) -> np.ndarray:
    """Probabilities of all transcripts of four records in two parts, shape (pasts, answers, answers)."""
    found = []
    for scores, priors in known.values():
        if peeks:  # planted
            priors = 0.5 * priors + 0.5 * np.eye(3)[list(labels)]
        total = np.full((1, 1), math.exp(scores[0, labels[0]] + scores[1, labels[1]]))
        for record in (2, 3):
            among = telling_labels(priors[[record]], epsilon=epsilon)[0]
            answers = np.zeros(3)
            answers[among] = channel(among, epsilon)[labels[record]]
            total = total[..., None] * answers
        found.append(total.ravel())
    return np.array(found)


def most_told(epsilon: float, *, peeks: bool = False) -> float:
    """The largest log-likelihood ratio of all data sets of four records that differ in one label."""
    known = pasts(epsilon)
    everything = itertools.product(range(3), repeat=4)
    law = {labels: transcripts(labels, epsilon, known, peeks=peeks) for labels in everything}
    worst = 0.0
    for labels, own in law.items():
        assert own.sum() == pytest.approx(1.0)
        for record, other in itertools.product(range(4), range(3)):
            theirs = law[(*labels[:record], other, *labels[record + 1 :])]
            with np.errstate(divide="ignore", invalid="ignore"):
                worst = max(worst, float(np.nanmax(np.log(own / theirs))))
    return worst


def test_a_whole_transcript_tells_exactly_epsilon() -> None:
    """A prior that sees the own label tells more."""
    assert most_told(1.3) == pytest.approx(1.3, rel=1e-9)
    assert most_told(1.3, peeks=True) > 1.31


def test_the_pure_epsilon_and_the_exact_one_at_a_delta() -> None:
    one = StagedResponse(step_epsilon=1.7, n_classes=10, stages=4)
    (pure,) = guarantees([one], delta=0.0)
    assert pure.epsilon == 1.7
    (found,) = guarantees([one], delta=DELTA)
    delta = (math.exp(1.7) - math.exp(found.epsilon)) / (1 + math.exp(1.7))  # of two outcomes
    assert delta == pytest.approx(DELTA, rel=1e-3)
    keep = 1 / (1 + math.exp(-1.7))
    two = RandomizedResponse(keep_probability=keep, n_classes=2, steps=6)
    other = StagedResponse(step_epsilon=1.7, n_classes=3, stages=2, steps=4)
    (both,) = guarantees([one.repeated(2), other], delta=DELTA)
    assert both.epsilon == pytest.approx(guarantees([two], delta=DELTA)[0].epsilon)
    (mixed,) = guarantees([one, StagedResponse(step_epsilon=0.5, n_classes=10, stages=4)], delta=DELTA)
    assert mixed.epsilon == pytest.approx(2.2)
