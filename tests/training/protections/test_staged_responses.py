"""Labels that are randomized in stages: every label once, of priors that never saw it, and runs from end to end."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from opusim import training
from opusim.accounting.guarantee import BudgetExceeded, NoGuarantee
from opusim.accounting.ledger import read_ledger
from opusim.accounting.mechanisms.labels import RandomizedResponse, StagedResponse
from opusim.errors import ConfigError
from opusim.training.engine.plan import load_data
from opusim.training.protections import noisy_labels
from opusim.training.protections.noisy_labels import ResponseModel, StagedResponses, drawn_parts, randomize
from opusim.training.runs.storage import read_array

K, N, EPSILON = 4, 1200, 1.5


def clusters(n: int = N, seed: int = 0) -> tuple[torch.Tensor, np.ndarray]:
    """Records around one centre a class."""
    draw = np.random.default_rng(seed)
    labels = np.arange(n) % K
    x = 2.0 * np.eye(K)[labels] + draw.normal(size=(n, K))
    return torch.from_numpy(x).float(), labels


def mechanism(stages: int = 3) -> StagedResponse:
    return StagedResponse(step_epsilon=EPSILON, n_classes=K, stages=stages)


def kept(x: torch.Tensor, labels: np.ndarray, stages: int = 3, seed: int = 4) -> np.ndarray:
    return noisy_labels.randomize_in_stages(x, labels, mechanism(stages), np.random.default_rng(seed)).numpy()


def test_every_record_is_in_one_part_of_even_size(seed: int) -> None:
    parts = drawn_parts(1000, 7, np.random.default_rng(seed))
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))
    assert {len(part) for part in parts} == {142, 143}
    share = np.mean([np.mean(part < 500) for part in parts])
    assert abs(share - 0.5) < 5 * math.sqrt(0.25 / 1000)
    assert not np.array_equal(np.sort(parts[0]), np.arange(len(parts[0])))


@pytest.mark.parametrize("parts", [[[0, 1, 2], [2, 3]], [[0, 1], [3]], [[0, 1], [2, 2, 3]]])
def test_a_record_that_would_answer_twice_or_never_is_refused(parts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="^parts: must hold every record once"):
        StagedResponses(torch.zeros(4, 1), [np.array(part) for part in parts], mechanism(2))


def test_a_label_moves_nothing_before_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one source of randomness: its own row, and only what later parts make of its answer."""
    x, labels = clusters()
    parts = drawn_parts(N, 3, np.random.default_rng(4))
    whole = kept(x, labels)
    for number, part in enumerate(parts):
        changed = labels.copy()
        record = part[5]
        changed[record] = (labels[record] + 1) % K
        found = kept(x, changed)
        earlier = np.setdiff1d(np.concatenate(parts[: number + 1]), [record])
        assert np.array_equal(found[earlier, :K], whole[earlier, :K])
        if number == 2:
            assert np.array_equal(found[:, K:], whole[:, K:])  # nor the last prior
    priors = ResponseModel.priors  # planted: they know the labels of their own part
    monkeypatch.setattr(ResponseModel, "priors", lambda self: 0.5 * priors(self) + 0.5 * np.eye(K)[changed])
    assert not np.array_equal(kept(x, changed)[:, K:], whole[:, K:])


def test_what_is_kept_never_tells_more_than_epsilon() -> None:
    """Rows of stored scores span epsilon at most, in float32, also for records of extreme features."""
    x, labels = clusters()
    x[0], x[1], x[2], x[3] = math.nan, math.inf, 3e38, -1e20
    x[4:9] = 0.0
    found = kept(x, labels).astype(np.float64)
    assert np.isfinite(found).all()
    span = np.ptp(found[:, :K], axis=1)
    assert span.max() <= EPSILON * (1 + 1e-6)
    assert span.min() > 0  # every answer tells something
    assert np.allclose(np.exp(found[:2, K:]), 1 / K, rtol=1e-5)  # nothing is known of what is not finite
    np.testing.assert_allclose(np.exp(found[:, K:]).sum(axis=1), 1.0, rtol=1e-5)


def test_priors_are_flat_without_a_response_or_usable_features() -> None:
    x, labels = clusters(60)
    assert np.array_equal(ResponseModel(x, K).priors(), np.full((60, K), 1 / K))
    parts = drawn_parts(60, 2, np.random.default_rng(1))
    responses = StagedResponses(torch.full((60, 2), 3e38), parts, mechanism(2))
    for _ in range(2):
        responses.answer(labels, np.random.default_rng(2))
    np.testing.assert_allclose(np.exp(responses.kept[:, K:]), 1 / K)


def told(scores: np.ndarray, prior: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Log-probability of the own label of each record, given what is kept."""
    total = scores + prior
    total = total - np.log(np.exp(total).sum(axis=1, keepdims=True))
    return np.asarray(total[np.arange(len(labels)), labels])


def test_stages_tell_more_of_the_labels_at_the_same_epsilon() -> None:
    """By five standard errors over records; with features that say nothing they do not."""
    x, labels = clusters(4000)
    response, draw = RandomizedResponse.from_epsilon(EPSILON, K), np.random.default_rng(3)
    plain = randomize(torch.from_numpy(labels), response, draw, pay=lambda _: None)
    without = told(plain.numpy(), np.zeros((4000, K)), labels)

    def gain(features: torch.Tensor) -> float:
        found = kept(features, labels, stages=4, seed=3)
        more = told(found[:, :K], found[:, K:], labels) - without
        return float(more.mean() / (more.std() / math.sqrt(len(more))))

    assert gain(x) > 5
    shuffled = torch.from_numpy(np.random.default_rng(9).permutation(4000))
    assert gain(x[shuffled]) < 5  # planted


def test_features_in_half_precision_make_the_same_model() -> None:
    x, labels = clusters()
    single, half = kept(x.half().float(), labels), kept(x.half(), labels)
    assert np.array_equal(single, half)


def test_training_begins_with_the_last_prior() -> None:
    scores, prior = torch.randn(5, K), torch.log_softmax(torch.randn(5, K), dim=1)
    labels = noisy_labels.NoisyLabels(log_likelihood=scores, flat_steps=2, first_prior=prior)
    output, records = torch.randn(3, K), torch.tensor([4, 0, 2])
    first, later = labels.targets(output, records, 1), labels.targets(output, records, 2)
    torch.testing.assert_close(first, torch.softmax(scores[records] + prior[records], dim=1))
    informed = scores[records] + torch.log_softmax(output, dim=1)
    torch.testing.assert_close(later, torch.softmax(informed, dim=1))


def config(stages: int | None, **changes: Any) -> dict[str, Any]:
    protection = {"kind": "label-randomized-response", "epsilon": 2.0}
    return {
        **{"epochs": 2, "threads": 1, "seed": 3, "model": {"hidden": [6]}, "trainer": {"kind": "bp"}},
        "data": {"n_classes": 3, "validation_fraction": 0.0}, "sampler": {"batch_size": 20},
        "protection": protection if stages is None else {**protection, "stages": stages}, **changes,
    }  # fmt: skip


def data(n: int = 80) -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(1).normal(size=(n, 5)), np.arange(n) % 3


def test_one_stage_is_randomized_response_bit_for_bit(tmp_path: Path) -> None:
    for name, stages in (("default", None), ("one", 1)):
        training.train(config(stages), data=data(), folder=tmp_path / name)
    stored = read_array(tmp_path / "one" / "labels.safetensors")
    assert np.array_equal(stored, read_array(tmp_path / "default" / "labels.safetensors"))
    (paid,) = read_ledger(tmp_path / "one").mechanisms
    assert isinstance(paid, RandomizedResponse)
    settings = training.load_run(tmp_path / "one").folder.read_config()
    labels, seed = load_data(settings, data()).train.y, settings.seed_for("labels")
    expected = randomize(labels, paid, np.random.default_rng(seed), pay=lambda _: None)
    assert np.array_equal(stored, expected.numpy())


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_a_run_in_stages_pays_once_and_says_so(tmp_path: Path, mode: str) -> None:
    settings = config(3, mode=mode)
    settings = {key: settings[key] for key in settings.keys() - ({"seed"} if mode == "release" else set())}
    run = training.train(settings, data=data(), folder=tmp_path)
    assert read_array(tmp_path / "labels.safetensors").shape == (80, 6)
    (paid,) = read_ledger(tmp_path).mechanisms
    assert isinstance(paid, StagedResponse)
    assert (paid.stages, paid.n_classes) == (3, 3)
    (guarantee,) = run.guarantees
    assert guarantee.is_proven
    assert guarantee.epsilon <= 2.0 < paid.step_epsilon * (1 + 1e-4)
    assert "in 3 stages" in guarantee.mechanism
    assert any("drawn into" in one.text and one.holds for one in guarantee.assumptions)


def test_nothing_unpaid_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Mock()
    monkeypatch.setattr("opusim.training.protections.noisy_labels.respond_among", drawn)
    refuse = Mock(side_effect=BudgetExceeded("no"))
    monkeypatch.setattr("opusim.accounting.ledger.Ledger.pay_once", refuse)
    with pytest.raises(BudgetExceeded):
        training.train(config(2), data=data(), folder=tmp_path)
    assert not drawn.called


@pytest.mark.parametrize(("stages", "records", "message"), [
    (9, data, "protection.stages = 9: leaves less than 10 of the 80 records in a part; take at most 8"),
    (2, lambda: (np.zeros((40, noisy_labels.MOST_FEATURES + 1)), np.arange(40) % 3), "set data.components"),
])  # fmt: skip
def test_what_stages_lack_is_named(stages: int, records: Callable, message: str, tmp_path: Path) -> None:
    with pytest.raises(NoGuarantee, match=message):
        training.train(config(stages), data=records(), folder=tmp_path)


def test_tokens_are_refused(tmp_path: Path) -> None:
    tokens = torch.randint(0, 7, (40, 5))
    data = {"inputs": "tokens", "vocabulary": 7, "n_classes": 3, "validation_fraction": 0.0}
    settings = config(2, data=data)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Flatten(), torch.nn.Linear(20, 3))
    del settings["model"]
    with pytest.raises((NoGuarantee, ConfigError), match="protection.stages = 2: .*'tokens'"):
        training.train(settings, data=(tokens, np.arange(40) % 3), model=model, folder=tmp_path)


@pytest.mark.parametrize("stages", [0, 65, 1.5, "two"])
def test_a_number_of_stages_is_checked(stages: object) -> None:
    protection = {"kind": "label-randomized-response", "epsilon": 1.0, "stages": stages}
    with pytest.raises(ConfigError, match="protection.stages"):
        training.load_config(config(1, protection=protection))
