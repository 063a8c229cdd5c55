"""A private loop writes the clipped sum of its batch over a constant, with noise of the accounted variance.

Released models tell no digits of their sums, and the statement says what is rounded where.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import opusim
from opusim.randomness.rounded import grid_of
from opusim.randomness.streams import NoiseStream, SeededStream, SystemStream, rounds_exactly
from opusim.training.private_loop.module import PrivateModule
from opusim.training.protections.record import RecordGradients
from tests.support.private_loops import Parts, parts, private_loop, run_epoch
from tests.support.subtraction import explained

TINY = 1e-9
"""A noise multiplier whose noise no tolerance here sees."""


def first_batch(private: opusim.PrivateTraining) -> tuple[Tensor, Tensor]:
    """The first batch that has records."""
    for x, y in private.data_loader:
        if len(x):
            return x, y
        private.criterion(private.module(x), y).backward()
    raise AssertionError("every batch was empty")


def written(private: opusim.PrivateTraining) -> Tensor:
    """All gradients, as one vector."""
    return torch.cat([p.grad.flatten() for p in private.module.parameters() if p.grad is not None])


def clipped_sum(model: nn.Module, loss: Any, x: Tensor, y: Tensor, clip: float) -> Tensor:
    """The clipped sum by a loop over records."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in parameters))
    for record, label in zip(x, y, strict=True):
        own = torch.autograd.grad(loss(model(record[None]), label[None]), parameters)
        flat = torch.cat([g.flatten() for g in own])
        total += flat * min(1.0, clip / float(flat.norm()))
    return total


@pytest.mark.parametrize("limit", [None, 5, 1])
def test_the_gradient_is_the_clipped_sum_over_the_expected_size(tmp_path: Path, limit: int | None) -> None:
    private = private_loop(tmp_path, noise_multiplier=TINY, max_grad_norm=0.6, max_physical_batch_size=limit)
    x, y = first_batch(private)
    loss = private.criterion(private.module(x), y)
    loss.backward()
    found = written(private)
    private.close()
    wanted = clipped_sum(private.module, nn.functional.cross_entropy, x, y, 0.6) / 12
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    expected = nn.functional.cross_entropy(private.module(x), y)
    torch.testing.assert_close(loss.detach(), expected.detach())
    assert not torch.allclose(wanted * 12 / len(x), wanted, rtol=1e-5)  # the realised size would be noticed


def through_feedback(error_at: str | None) -> tuple[nn.Module, opusim.FeedbackAlignment]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    return model, opusim.FeedbackAlignment(model, ["1", "3"], error_at=error_at)


@pytest.mark.parametrize("limit", [None, 5])
@pytest.mark.parametrize("given", ["the wrapper", "the model with its hooks"])
def test_feedback_alignment_is_clipped_by_record(tmp_path: Path, limit: int | None, given: str) -> None:
    model, feedback = through_feedback(None)
    module = feedback if given == "the wrapper" else model
    options = {"noise_multiplier": TINY, "max_grad_norm": 0.3, "max_physical_batch_size": limit}
    private = private_loop(tmp_path, parts(module), **options)
    x, y = first_batch(private)
    private.criterion(module(x), y).backward()
    found = written(private)
    private.close()
    wanted = clipped_sum(feedback, nn.functional.cross_entropy, x, y, 0.3) / 12
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    with feedback.backpropagating():
        exact = clipped_sum(feedback, nn.functional.cross_entropy, x, y, 0.3) / 12
    assert not torch.allclose(found, exact, rtol=1e-2)


class WithoutNoiseOnBiases(RecordGradients):
    """A planted fault."""

    def set_gradients(self, parts: Any, **options: Any) -> None:
        found = list(parts)
        super().set_gradients(found, **options)
        for parameter in found[-1].parameters:
            if parameter.ndim == 1 and parameter.grad is not None:
                parameter.grad.zero_()


def released_variance(private: opusim.PrivateTraining, steps: int) -> tuple[float, float, int]:
    """Mean square of what the optimizer adds to weights and to biases, and the number of biases."""
    model, optimizer, criterion, loader = private
    moves: list[list[Tensor]] = [[], []]
    while private.step < steps:
        for x, y in loader:
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            for p, old in zip(model.parameters(), before, strict=True):
                moves[p.ndim == 1].append((p.detach() - old).flatten().double())
    weights, biases = (torch.cat(found) for found in moves)
    return float(weights.square().mean()), float(biases.square().mean()), len(biases)


@pytest.mark.filterwarnings("ignore:after 16 steps")  # without noise, biases rest
@pytest.mark.parametrize("fault", ["none", "no noise on biases", "smaller noise"])
def test_noise_from_loader_to_parameters_has_the_accounted_variance(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are clipped to 1e-4, so that all that moves the parameters is noise of z C / b times the rate."""
    if fault == "no noise on biases":
        monkeypatch.setattr("opusim.training.private_loop.start.RecordGradients", WithoutNoiseOnBiases)
    given = parts(nn.Sequential(nn.Linear(8, 100), nn.Tanh(), nn.Linear(100, 3)))
    multiplier = 2000.0
    private = private_loop(tmp_path, given, noise_multiplier=multiplier, max_grad_norm=1e-4)
    if fault == "smaller noise":
        private._private.gradients._noise_std *= 0.9
    weights, biases, count = released_variance(private, 60)
    private.close()
    wanted = (0.5 * multiplier * 1e-4 / 12) ** 2  # 0.5 is the learning rate
    errors = [abs(found / wanted - 1) / math.sqrt(2 / count) for found in (weights, biases)]
    assert (max(errors) < 5) == (fault == "none")


@pytest.mark.parametrize(("rate", "holds"), [(None, True), (0.23, False)])
def test_records_enter_batches_at_the_stated_rate(tmp_path: Path, rate: float | None, holds: bool) -> None:
    """q = b / n over 1500 steps; a rate that differs from the one claimed by 15 % is found."""
    given = parts(count=60, batch_size=12)
    private = private_loop(tmp_path, given, sample_rate=rate)
    loader, q, steps = private.data_loader, 0.2, 1500
    sizes = torch.tensor([len(loader.sampler.indices(step)) for step in range(steps)], dtype=torch.float64)
    private.close()
    standard_error = math.sqrt(q * (1 - q) / (60 * steps))
    assert (abs(float(sizes.mean()) / 60 - q) < 5 * standard_error) == holds
    variance, wanted = float(sizes.var()), 60 * q * (1 - q)
    assert (abs(variance / wanted - 1) < 5 * math.sqrt(2 / steps)) or not holds


def test_the_loader_hands_out_what_the_sampler_drew(tmp_path: Path) -> None:
    private = private_loop(tmp_path)
    features = private.data_loader.dataset.tensors[0]
    for step, (x, y) in enumerate(private.data_loader):
        assert torch.equal(x, features[private.data_loader.sampler.indices(step)])
        private.criterion(private.module(x), y).backward()
    assert private.step == len(private.data_loader) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_empty_batches_are_steps_like_any_other(tmp_path: Path, workers: int) -> None:
    given = parts(count=20, batch_size=1, num_workers=workers)
    ran: list[int] = []
    first = given[0][0]
    forward = first.forward
    first.forward = lambda x: ran.append(len(x)) or forward(x)
    private = private_loop(tmp_path, given)
    model, optimizer, criterion, loader = private
    ran.clear()  # of the probes
    sizes, moved = [], []
    for x, y in loader:
        before = model[0].weight.detach().clone()
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sizes.append(len(x))
        moved.append(bool((model[0].weight != before).any()))
        assert x.shape[1:] == (8,)
        assert y.dtype == torch.int64
    assert min(sizes) == 0 < max(sizes)
    assert all(moved)
    assert 0 not in ran
    assert sum(ran) == sum(sizes)
    assert private.step == len(sizes) == 20


def test_epsilon_is_that_of_dp_accounting(tmp_path: Path) -> None:
    private = private_loop(tmp_path, noise_multiplier=1.3)
    assert private.epsilon == 0
    for _ in range(3):
        run_epoch(private)
    event = PoissonSampledDpEvent(0.2, GaussianDpEvent(1.3))
    theirs = PLDAccountant().compose(event, 15).get_epsilon(1e-5)
    assert private.step == 15
    assert private.epsilon == pytest.approx(theirs, rel=1e-3)
    assert private.get_epsilon(1e-3) < private.epsilon
    closed = private.epsilon
    private.close()
    assert private.epsilon == closed
    (stated,) = private.statement().guarantees
    assert (stated.epsilon, stated.adjacency) == (closed, opusim.accounting.Adjacency.ZERO_OUT)


def test_the_statement_says_what_was_checked_and_what_is_trusted(tmp_path: Path) -> None:
    private = private_loop(tmp_path)
    run_epoch(private)
    document = private.statement().to_json()
    (guarantee,) = document["guarantees"]
    checked = [one["text"] for one in guarantee["assumptions"] if one["holds"]]
    trusted = [one["text"] for one in guarantee["assumptions"] if one["holds"] is None]
    assert len(checked) == 7
    assert any("every entry of a step's noisy sum is released" in text for text in checked)
    assert any("every record enters" in text for text in checked)
    assert [text for text in trusted if "standardised" in text]
    assert [text for text in trusted if "criterion" in text]
    assert document["seed_stored"]


def test_add_or_remove_one_takes_no_constant_from_the_number_of_records(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="relation = 'add_or_remove_one' needs sample_rate"):
        private_loop(tmp_path, relation="add_or_remove_one")
    facts = []
    for count in (60, 61):
        private = private_loop(
            tmp_path / str(count), parts(count=count), relation="add_or_remove_one", sample_rate=0.2
        )
        facts.append((replace(private.settings, data=None), len(private.data_loader)))  # but for the digest
        run_epoch(private)
        (guarantee,) = private.statement().guarantees
        assert guarantee.adjacency is opusim.accounting.Adjacency.ADD_OR_REMOVE_ONE
        private.close()
    assert facts[0] == facts[1]


def gradient_of(folder: Path, x: Tensor, y: Tensor, limit: int | None, *, widened: float = 1.0) -> Tensor:
    """The private gradient of all records, with the same noise in each call, unrounded: grid steps are 1e-3."""
    module, optimizer, criterion, _ = parts()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=12)
    options = {"sample_rate": 1.0, "relation": "add_or_remove_one", "max_physical_batch_size": limit}
    with (
        patch.object(SeededStream, "add_rounded", SeededStream.add_to),
        private_loop(folder, (module, optimizer, criterion, loader), **options) as private,
    ):
        private._private.gradients._clip_norm *= widened
        data, labels = next(iter(private.data_loader))
        private.criterion(private.module(data), labels).backward()
        return written(private).double()


@pytest.mark.parametrize("limit", [None, 5])
@pytest.mark.parametrize("size", [1e-38, 1.0, 1e4, 1e18, 1e30, 3e38, math.inf, math.nan])
def test_no_record_moves_a_release_by_more_than_the_clip(
    tmp_path: Path, size: float, limit: int | None
) -> None:
    """The noise of two data sets that differ in one record is the same, so what is left is the record."""
    x, y = (t.clone() for t in parts()[3].dataset.tensors)
    x, y = x[:12], y[:12]
    x[7] = x[7].sign() * size
    keep = [n for n in range(12) if n != 7]
    both = (
        gradient_of(tmp_path / "with", x, y, limit),
        gradient_of(tmp_path / "without", x[keep], y[keep], limit),
    )
    moved = float((both[0] - both[1]).norm()) * 12
    assert moved <= 1 + 1e-5
    assert moved > 0.5 or size not in (1.0, 1e4)


def test_a_clip_that_is_too_wide_is_found(tmp_path: Path) -> None:
    x, y = parts()[3].dataset.tensors
    gradients = [
        gradient_of(tmp_path / str(count), 1e4 * x[:count], y[:count], None, widened=1.1)
        for count in (12, 11)
    ]
    assert float((gradients[0] - gradients[1]).norm()) * 12 > 1.05


# Rounding


FEATURES, CLASSES, BATCH = 200, 10, 64
Z = 20.0
ADD_ROUNDED = SystemStream.add_rounded
TRUSTED = "the rounding of floating-point numbers is not attacked"


def linear(init: Callable[[torch.Tensor], torch.Tensor]) -> Parts:
    """One layer and SGD at rate 1, on records of which every batch holds all."""
    torch.manual_seed(0)
    module = nn.Linear(FEATURES, CLASSES)
    for parameter in module.parameters():
        init(parameter)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH)
    return module, torch.optim.SGD(module.parameters(), lr=1.0), nn.CrossEntropyLoss(), loader


def released_step(
    folder: Path, init: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch, *, rounded: bool,
) -> tuple[np.ndarray, np.ndarray, float]:  # fmt: skip
    """The noisy sum that a release step's parameters tell, the sum, which an attacker computes, and the noise."""
    sums: list[torch.Tensor] = []
    stds: list[float] = []

    def seen(self: SystemStream, y: torch.Tensor, std: float) -> torch.Tensor:
        sums.append(y.detach().clone().flatten())
        stds.append(std)
        return ADD_ROUNDED(self, y, std) if rounded else self.add_to(y, std)  # else the planted fault

    monkeypatch.setattr(SystemStream, "add_rounded", seen)
    given = linear(init)
    before = nn.utils.parameters_to_vector(given[0].parameters()).detach().clone()
    private = private_loop(folder, given, noise_multiplier=Z, seed=None, mode="release")
    run_epoch(private, steps=1)
    after = nn.utils.parameters_to_vector(private.module.parameters()).detach()
    private.close()
    return ((before - after) * BATCH).numpy(), torch.cat(sums).numpy(), stds[0]


def other_sum(true: np.ndarray) -> np.ndarray:
    """The sum of a neighbouring data set: another record moves it by the clip norm."""
    move = np.random.default_rng(0).normal(size=len(true))
    return (true - move / np.linalg.norm(move)).astype(np.float32)


def test_no_candidate_sum_fits_a_step_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At zero initial weights parameters tell every digit of the noisy sum. With added float32 noise only one fits."""
    added, true, std = released_step(tmp_path / "added", nn.init.zeros_, monkeypatch, rounded=False)
    assert explained(added, true, std) == 1.0
    assert explained(added, other_sum(true), std) < 0.99
    found, true, std = released_step(tmp_path / "rounded", nn.init.zeros_, monkeypatch, rounded=True)
    assert (found.astype(np.float64) / grid_of(std) % 1 == 0).all()
    shares = [explained(found, guess, std) for guess in (true, other_sum(true))]
    middle, n = sum(shares) / 2, len(true)
    assert abs(shares[0] - shares[1]) < 5 * math.sqrt(2 * max(middle * (1 - middle), 1 / n) / n)


def test_steps_from_other_weights_lie_on_the_grid_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the optimizer's own rounding, whatever the sum: half of its grid steps are odd."""
    found, true, std = released_step(
        tmp_path / "a", lambda p: nn.init.normal_(p, std=1e-4), monkeypatch, rounded=True
    )
    steps = found.astype(np.float64) / grid_of(std)
    assert np.abs(steps - np.rint(steps)).max() < 0.01
    odd = float((np.rint(steps) % 2 != 0).sum())
    assert abs(odd - len(true) / 2) < 5 * math.sqrt(len(true) / 4)


def rounding(private: opusim.PrivateTraining) -> dict[str, bool | None]:
    (stated,) = private.statement().guarantees
    words = ("exactly rounded number", "not attacked", "rounding is not counted", "for every batch")
    return {one.text: one.holds for one in stated.assumptions if any(word in one.text for word in words)}


def test_the_statement_says_that_sums_are_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode, place in itertools.product(("experiment", "release"), ("cpu", "cuda", "mps")):
        if place != "cpu":
            monkeypatch.setattr(PrivateModule, "place", place)
        seed = 1 if mode == "experiment" else None
        private = private_loop(tmp_path / f"{mode} {place}", mode=mode, seed=seed)
        run_epoch(private, steps=1)
        found, counted = rounding(private), (mode, place) == ("release", "cpu")
        monkeypatch.undo()
        if not rounds_exactly(place, mode):
            assert found == {TRUSTED: None}
            continue
        assert [holds for t, holds in found.items() if "every entry of a step's noisy sum" in t] == [True]
        assert [holds for text, holds in found.items() if "its rounding is" in text] == [None] * (not counted)
        assert [holds for t, holds in found.items() if "for every batch" in t] == [True] * counted
        assert TRUSTED not in found


def test_a_module_that_moves_within_a_step_is_refused(tmp_path: Path) -> None:
    private = private_loop(tmp_path)
    model, _, criterion, loader = private
    for x, y in loader:
        private._private.paid_on = "cuda"
        with pytest.raises(RuntimeError, match="was moved to or from a graphics card after step 0 was paid"):
            criterion(model(x), y).backward()
        break


def test_a_stream_of_ones_own_is_added_as_it_is(tmp_path: Path) -> None:
    """Streams written for earlier versions know `normal` only."""

    class Own(NoiseStream):
        def normal(self, shape: object, *, device: object = "cpu") -> torch.Tensor:
            return torch.ones(tuple(shape))  # type: ignore[call-overload]

        def seek(self, step: int) -> None:
            pass

    assert Own().add_rounded(torch.zeros(2, 2), 0.3).flatten().tolist() == pytest.approx([0.3] * 4)
