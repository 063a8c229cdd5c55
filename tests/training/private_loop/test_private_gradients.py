"""A private loop writes the clipped sum of its batch over a constant, with noise of the accounted variance.

Released models tell no digits of their sums, and the statement says what is rounded where.
"""

import math
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
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import opusim
from opusim.randomness.rounded import grid_of
from opusim.randomness.streams import NoiseStream, SeededStream, SystemStream
from opusim.training.private_loop.module import PrivateModule
from opusim.training.protections.record import RecordGradients
from tests.support.private_loops import Parts, parts, private_loop, records, run_epoch
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
    return parameters_to_vector(p.grad for p in private.module.parameters())


def clipped_sum(model: nn.Module, x: Tensor, y: Tensor, clip: float) -> Tensor:
    """The clipped sum of cross-entropies by a loop over records."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in parameters))
    for record, label in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(record[None]), label[None])
        flat = parameters_to_vector(torch.autograd.grad(loss, parameters))
        total += flat * min(1.0, clip / float(flat.norm()))
    return total


@pytest.mark.parametrize("limit", [None, 5, 1])
@pytest.mark.parametrize("kind", ["plain", "feedback", "the model with hooks of feedback"])
def test_the_gradient_is_the_clipped_sum_over_the_expected_size(
    tmp_path: Path, kind: str, limit: int | None
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    model = plain if kind == "plain" else opusim.FeedbackAlignment(plain, ["1", "3"])
    module = model if kind == "feedback" else plain
    options = {"noise_multiplier": TINY, "max_grad_norm": 0.3, "max_physical_batch_size": limit}
    with private_loop(tmp_path, parts(module), **options) as private:
        x, y = first_batch(private)
        loss = private.criterion(module(x), y)
        loss.backward()
        found = written(private)
    wanted = clipped_sum(model, x, y, 0.3) / 12
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss.detach(), nn.functional.cross_entropy(model(x), y).detach())
    assert not torch.allclose(wanted * 12 / len(x), wanted, rtol=1e-5)  # the realised size would be noticed
    if isinstance(model, opusim.FeedbackAlignment):
        with model.backpropagating():
            exact = clipped_sum(model, x, y, 0.3) / 12
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
    moves: list[list[Tensor]] = [[], []]
    while private.step < steps:
        before = [p.detach().clone() for p in private.module.parameters()]
        run_epoch(private, steps=1)
        for p, old in zip(private.module.parameters(), before, strict=True):
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
    with private_loop(tmp_path, given, noise_multiplier=multiplier, max_grad_norm=1e-4) as private:
        if fault == "smaller noise":
            private._private.gradients._noise_std *= 0.9
        weights, biases, count = released_variance(private, 60)
    wanted = (0.5 * multiplier * 1e-4 / 12) ** 2  # 0.5 is the learning rate
    errors = [abs(found / wanted - 1) / math.sqrt(2 / count) for found in (weights, biases)]
    assert (max(errors) < 5) == (fault == "none")


@pytest.mark.parametrize(("rate", "holds"), [(None, True), (0.23, False)])
def test_records_enter_batches_at_the_stated_rate(tmp_path: Path, rate: float | None, holds: bool) -> None:
    """q = b / n over 1500 steps; a rate that differs from the one claimed by 15 % is found."""
    q, steps = 0.2, 1500
    with private_loop(tmp_path, parts(count=60, batch_size=12), sample_rate=rate) as private:
        indices = private.data_loader.sampler.indices
        sizes = torch.tensor([len(indices(step)) for step in range(steps)], dtype=torch.float64)
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
    trusted = " ".join(one["text"] for one in guarantee["assumptions"] if one["holds"] is None)
    assert len(checked) == 7
    assert "every record enters" in " ".join(checked)
    assert "standardised" in trusted
    assert "criterion" in trusted
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
    given = (*parts()[:3], DataLoader(TensorDataset(x, y), batch_size=12))
    options = {"sample_rate": 1.0, "relation": "add_or_remove_one", "max_physical_batch_size": limit}
    with (
        patch.object(SeededStream, "add_rounded", SeededStream.add_to),
        private_loop(folder, given, **options) as private,
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
    x, y = records(12).tensors
    x[7] = x[7].sign() * size
    keep = [n for n in range(12) if n != 7]
    found = gradient_of(tmp_path / "with", x, y, limit)
    without = gradient_of(tmp_path / "without", x[keep], y[keep], limit)
    moved = float((found - without).norm()) * 12
    assert moved <= 1 + 1e-5
    assert moved > 0.5 or size not in (1.0, 1e4)


def test_a_clip_that_is_too_wide_is_found(tmp_path: Path) -> None:
    x, y = records(12).tensors
    found = gradient_of(tmp_path / "with", 1e4 * x, y, None, widened=1.1)
    without = gradient_of(tmp_path / "without", 1e4 * x[:11], y[:11], None, widened=1.1)
    assert float((found - without).norm()) * 12 > 1.05


# Rounding


FEATURES, CLASSES, BATCH = 200, 10, 64
Z = 20.0
ADD_ROUNDED = SystemStream.add_rounded


def linear(std: float) -> Parts:
    """One layer and SGD at rate 1, on records of which every batch holds all."""
    torch.manual_seed(0)
    module = nn.Linear(FEATURES, CLASSES)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    loader = DataLoader(TensorDataset(torch.randn(BATCH, FEATURES), torch.arange(BATCH) % CLASSES), BATCH)
    return module, torch.optim.SGD(module.parameters(), lr=1.0), nn.CrossEntropyLoss(), loader


def released_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, std: float = 0.0, rounded: bool
) -> tuple[np.ndarray, np.ndarray, float]:
    """The noisy sum that a release step's parameters tell, the sum, which an attacker computes, and the noise.

    Weights are drawn with a standard deviation.
    """
    sums: list[Tensor] = []
    stds: list[float] = []

    def seen(self: SystemStream, y: Tensor, std: float) -> Tensor:
        sums.append(y.detach().clone().flatten())
        stds.append(std)
        return ADD_ROUNDED(self, y, std) if rounded else self.add_to(y, std)  # else the planted fault

    monkeypatch.setattr(SystemStream, "add_rounded", seen)
    given = linear(std)
    before = parameters_to_vector(given[0].parameters()).detach()
    with private_loop(folder, given, noise_multiplier=Z, seed=None, mode="release") as private:
        run_epoch(private, steps=1)
    after = parameters_to_vector(given[0].parameters()).detach()
    return ((before - after) * BATCH).numpy(), torch.cat(sums).numpy(), stds[0]


def other_sum(true: np.ndarray) -> np.ndarray:
    """The sum of a neighbouring data set: another record moves it by the clip norm."""
    move = np.random.default_rng(0).normal(size=len(true))
    return (true - move / np.linalg.norm(move)).astype(np.float32)


def test_no_candidate_sum_fits_a_step_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At zero initial weights parameters tell every digit of the noisy sum. With added float32 noise only one fits."""
    added, true, std = released_step(tmp_path / "added", monkeypatch, rounded=False)
    assert explained(added, true, std) == 1.0
    assert explained(added, other_sum(true), std) < 0.99
    found, true, std = released_step(tmp_path / "rounded", monkeypatch, rounded=True)
    assert (found.astype(np.float64) / grid_of(std) % 1 == 0).all()
    shares = [explained(found, guess, std) for guess in (true, other_sum(true))]
    middle, n = sum(shares) / 2, len(true)
    assert abs(shares[0] - shares[1]) < 5 * math.sqrt(2 * max(middle * (1 - middle), 1 / n) / n)


def test_steps_from_other_weights_lie_on_the_grid_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the optimizer's own rounding, whatever the sum: half of its grid steps are odd."""
    found, true, std = released_step(tmp_path / "a", monkeypatch, std=1e-4, rounded=True)
    steps = found.astype(np.float64) / grid_of(std)
    assert np.abs(steps - np.rint(steps)).max() < 0.01
    odd = float((np.rint(steps) % 2 != 0).sum())
    assert abs(odd - len(true) / 2) < 5 * math.sqrt(len(true) / 4)


ROUNDED = ("every entry of a step's noisy sum", "its rounding is", "for every batch", "not attacked")
"""Parts of what a statement says of rounding; the last one is said if nothing is rounded."""


@pytest.mark.parametrize(
    ("mode", "place", "holds"),
    [
        ("experiment", "cpu", [[True], [None], [], []]),
        ("release", "cpu", [[True], [], [True], []]),
        ("experiment", "cuda", [[], [], [], [None]]),
        ("release", "cuda", [[True], [None], [], []]),
        ("release", "mps", [[], [], [], [None]]),
    ],
)
def test_the_statement_says_that_sums_are_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, place: str, holds: list[list[bool | None]]
) -> None:
    if place != "cpu":
        monkeypatch.setattr(PrivateModule, "place", place)
    with private_loop(tmp_path, mode=mode, seed=1 if mode == "experiment" else None) as private:
        run_epoch(private, steps=1)
        (stated,) = private.statement().guarantees
    assert [[one.holds for one in stated.assumptions if text in one.text] for text in ROUNDED] == holds


def test_a_module_that_moves_within_a_step_is_refused(tmp_path: Path) -> None:
    private = private_loop(tmp_path)
    x, y = next(iter(private.data_loader))
    private._private.paid_on = "cuda"
    with pytest.raises(RuntimeError, match="was moved to or from a graphics card after step 0 was paid"):
        private.criterion(private.module(x), y).backward()


def test_a_stream_of_ones_own_is_added_as_it_is(tmp_path: Path) -> None:
    """Streams written for earlier versions know `normal` only."""

    class Own(NoiseStream):
        def normal(self, shape: object, *, device: object = "cpu") -> torch.Tensor:
            return torch.ones(tuple(shape))  # type: ignore[call-overload]

        def seek(self, step: int) -> None:
            pass

    assert Own().add_rounded(torch.zeros(2, 2), 0.3).flatten().tolist() == pytest.approx([0.3] * 4)
