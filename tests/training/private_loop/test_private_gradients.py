"""A private loop writes the clipped sum of its batch over a constant, with noise of the accounted variance.

Released models tell no digits of their sums, and the statement says what is rounded where.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
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
from opusim import training
from opusim.accounting.mechanism import mechanism_from_json
from opusim.accounting.mechanisms.records import RecordCentral, share_of_sum
from opusim.randomness.rounded import grid_of
from opusim.randomness.streams import NoiseStream, SeededStream, SystemStream, noise_stream
from opusim.training import Clipping
from opusim.training.attacks.findings import Role
from opusim.training.attacks.run_audit import audit_run
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.networks.contributions.uses import LinearUse
from opusim.training.private_loop.module import PrivateModule
from opusim.training.protections.record import RecordGradients
from tests.support.private_loops import Parts, parts, private_loop, records, run_epoch
from tests.support.run_folders import require_resumed_alike
from tests.support.subtraction import explained

TINY, CLIP, EXPECTED = 1e-9, 0.3, 6
"""A noise multiplier whose noise no tolerance here sees, and numbers of loops with other rules of clipping."""
NORMS = (0.1, 0.4)
RULES: dict[str, Any] = {
    "per_layer": "per_layer",
    "two norms": "per_layer",
    "automatic": Clipping(kind="automatic", stability=0.2),
    "adaptive": Clipping(kind="adaptive", target_quantile=0.7, bound_rate=0.8),
}


def clipped(rule: str, parts_of_layers: list[Tensor], bound: float) -> Tensor:
    """What a gradient contributes, by the formulas of `opusim.training.protections.clipping`; norms in float64."""
    norms = [float(part.double().norm()) for part in parts_of_layers]
    whole = math.hypot(*norms)
    bounds = {"per_layer": [bound / 2**0.5] * 2, "two norms": list(NORMS)}.get(rule)
    if bounds is not None:
        factors = [min(1.0, c / norm) for c, norm in zip(bounds, norms, strict=True)]
    else:
        factors = [bound / (whole + 0.2) if rule == "automatic" else min(1.0, bound / whole)] * 2
    return torch.cat([f * part for f, part in zip(factors, parts_of_layers, strict=True)])


def loop_of(folder: Path, rule: str, **options: Any) -> opusim.PrivateTraining:
    return private_loop(folder, parts(batch_size=EXPECTED), **settings_of(rule), **options)


def settings_of(rule: str) -> dict[str, Any]:
    return {"max_grad_norm": NORMS if rule == "two norms" else CLIP, "clipping": RULES[rule]}


def first_batch(private: opusim.PrivateTraining) -> tuple[Tensor, Tensor]:
    for x, y in private.data_loader:
        if len(x):
            return x, y
        private.criterion(private.module(x), y).backward()
    raise AssertionError("every batch was empty")


def written(private: opusim.PrivateTraining) -> Tensor:
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
def test_the_gradient_is_the_clipped_sum_over_b(tmp_path: Path, kind: str, limit: int | None) -> None:
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
def test_noise_has_the_accounted_variance(
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
    sizes, features = [], loader.dataset.tensors[0]
    for step, (x, y) in enumerate(loader):
        assert torch.equal(x, features[loader.sampler.indices(step)])
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        sizes.append(len(x))
        assert bool((model[0].weight != before).any())
        assert x.shape[1:] == (8,)
        assert y.dtype == torch.int64
    assert min(sizes) == 0 < max(sizes)
    assert 0 not in ran
    assert sum(ran) == sum(sizes)
    assert private.step == len(sizes) == 20


def test_epsilon_is_that_of_dp_accounting_and_has_its_hypotheses(tmp_path: Path) -> None:
    with private_loop(tmp_path, noise_multiplier=1.3) as private:
        assert private.epsilon == 0
        for _ in range(3):
            run_epoch(private)
        event = PoissonSampledDpEvent(0.2, GaussianDpEvent(1.3))
        theirs = PLDAccountant().compose(event, 15).get_epsilon(1e-5)
        assert private.step == 15
        assert private.epsilon == pytest.approx(theirs, rel=1e-3)
        assert private.get_epsilon(1e-3) < private.epsilon
        before = private.epsilon
    assert private.epsilon == before
    (stated,) = private.statement().guarantees
    assert (stated.epsilon, stated.adjacency) == (before, opusim.accounting.Adjacency.ZERO_OUT)
    checked = [one.text for one in stated.assumptions if one.holds]
    trusted = " ".join(one.text for one in stated.assumptions if one.holds is None)
    assert len(checked) == 7
    assert "every record enters" in " ".join(checked)
    assert "standardised" in trusted
    assert "criterion" in trusted
    assert private.statement().to_json()["seed_stored"]


def test_add_or_remove_one_takes_no_constant_from_the_number_of_records(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="relation = 'add_or_remove_one' needs sample_rate"):
        private_loop(tmp_path, relation="add_or_remove_one")
    facts = []
    for count in (60, 61):
        options = {"relation": "add_or_remove_one", "sample_rate": 0.2}
        with private_loop(tmp_path / str(count), parts(count=count), **options) as private:
            facts.append(
                (replace(private.settings, data=None), len(private.data_loader))
            )  # but for the digest
            run_epoch(private)
        (guarantee,) = private.statement().guarantees
        assert guarantee.adjacency is opusim.accounting.Adjacency.ADD_OR_REMOVE_ONE
    assert facts[0] == facts[1]


def gradient_of(folder: Path, x: Tensor, y: Tensor, *, widened: float = 1.0, **options: Any) -> Any:
    """The private sum of all records and the count within the bound, with the same noise in each call, unrounded."""
    given = (*parts()[:3], DataLoader(TensorDataset(x, y), batch_size=12))
    options |= {"sample_rate": 1.0, "relation": "add_or_remove_one"}
    with (
        patch.object(SeededStream, "add_rounded", SeededStream.add_to),
        private_loop(folder, given, **options) as private,
    ):
        private._private.gradients._clip_norm *= widened
        data, labels = next(iter(private.data_loader))
        private.criterion(private.module(data), labels).backward()
        counts = private._private.gradients.state.get("released_counts", torch.zeros(1))
        return written(private).double() * 12, float(counts[0]) * 12


SIZES = (1e-38, 1.0, 1e4, 1e18, 1e30, 3e38, math.inf, math.nan)


@pytest.mark.parametrize(
    ("rule", "size", "limit"),
    [
        *itertools.product(["flat"], SIZES, [None, 5]), *itertools.product(RULES, (1e-38, 1e30, math.nan), [None]),
    ],
)  # fmt: skip
def test_no_record_moves_more_than_the_bound(
    tmp_path: Path, rule: str, size: float, limit: int | None
) -> None:
    """The noise of two data sets that differ in one record is the same, so what is left is the record.

    Values that float32 cannot hold count neither within the bound nor beyond it.
    """
    x, y = records(12).tensors
    x[7] = x[7].sign() * size
    keep = [n for n in range(12) if n != 7]
    options = {} if rule == "flat" else {"noise_multiplier": TINY, **settings_of(rule)}
    options["max_physical_batch_size"] = limit
    found, count = gradient_of(tmp_path / "with", x, y, **options)
    without, fewer = gradient_of(tmp_path / "without", x[keep], y[keep], **options)
    moved = float((found - without).norm())
    assert moved <= {"flat": 1.0, "two norms": math.hypot(*NORMS)}.get(rule, CLIP) * (1 + 1e-5)
    assert moved > 0.5 or rule != "flat" or size not in (1.0, 1e4)
    counted = 0.5 if rule == "adaptive" and size < 1 else 0.0
    assert abs(abs(count - fewer) - counted) < 1e-6


def test_a_clip_that_is_too_wide_is_found(tmp_path: Path) -> None:
    x, y = records(12).tensors
    found, _ = gradient_of(tmp_path / "with", 1e4 * x, y, widened=1.1)
    without, _ = gradient_of(tmp_path / "without", 1e4 * x[:11], y[:11], widened=1.1)
    assert float((found - without).norm()) > 1.05


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


def released_step(folder: Path, monkeypatch: pytest.MonkeyPatch, *, std: float = 0.0, rounded: bool) -> Any:
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


def test_steps_from_other_weights_lie_on_the_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# Clipping by layer, automatic and adaptive


@pytest.mark.parametrize(("rule", "users"), [*((rule, False) for rule in RULES), ("adaptive", True)])
def test_the_gradient_is_the_sum_of_what_the_rule_leaves(tmp_path: Path, rule: str, users: bool) -> None:
    """Also in parts of a batch and in filled batches; the bound moves by the records of all parts, and no others."""
    ids = {"user_ids": [f"{n % 13}" for n in range(60)], "records_per_user": 2} if users else {}
    options = {"noise_multiplier": TINY, "max_physical_batch_size": 4, "fixed_batches": True}
    private = loop_of(tmp_path, rule, **options, **ids)
    model, optimizer, criterion, loader = private
    x, y = loader.dataset.tensors
    bound = CLIP
    for step, batch in enumerate(loader):
        wanted, within = torch.zeros(sum(p.numel() for p in model.parameters())), 0.0
        for unit in loader.sampler.indices(step).tolist():
            own = loader.users.chosen(unit, step) if users else [unit]
            loss = nn.functional.cross_entropy(model._call_impl(x[own]), y[own])
            found = torch.autograd.grad(loss, list(model.parameters()))
            layers = [torch.cat([g.flatten() for g in found[n : n + 2]]) for n in (0, 2)]
            wanted += clipped(rule, layers, bound)
            within += 0.5 if float(torch.cat(layers).norm()) <= bound else -0.5
        optimizer.zero_grad()
        criterion(model(batch[0]), batch[1]).backward()
        torch.testing.assert_close(written(private), wanted / EXPECTED, rtol=1e-4, atol=1e-6)
        optimizer.step()
        if rule == "adaptive":
            bound *= math.exp(-0.8 * (within / EXPECTED + 0.5 - 0.7))
            assert private._private.gradients._moving.value == pytest.approx(bound, rel=1e-6)
    assert rule != "adaptive" or bound > 1.5 * CLIP
    private.close()


def test_a_sum_and_its_count_cost_what_the_multiplier_says() -> None:
    """1 / z_s^2 + 1 / (2 r z)^2 is at most 1 / z^2, and not by much less, in exact arithmetic."""
    generator = np.random.default_rng(5)
    for z, r in zip(10.0 ** generator.uniform(-3, 4, 200), generator.uniform(0.6, 40, 200), strict=True):
        one = RecordCentral(
            noise_multiplier=z, sampling_probability=0.1, clip_norm=1, divisor=1, clipping="adaptive", count_noise=r,
        )  # fmt: skip
        spent = (
            1 / Fraction(z / share_of_sum(float(r))) ** 2
            + 1 / (2 * Fraction(float(r)) * Fraction(float(z))) ** 2
        )
        assert Fraction(1) - Fraction(1, 10**10) < spent * Fraction(float(z)) ** 2 <= 1
        assert one.as_noise().scale == z


def released(writer: RecordGradients, rows: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise of sums and of counts over the bound of each step, of batches whose contributions are exactly 0."""
    weight, sums, counts = nn.Parameter(torch.zeros(40, 50)), [], []
    for step in range(steps):
        bound, before = writer._moving.value, writer.state["released_counts"].clone()
        writer.seek(step)
        use = LinearUse(torch.zeros(rows, 40), torch.zeros(rows, 50), weight)
        writer.set_gradients([Contributions([([weight], [use])], rows)])
        assert weight.grad is not None
        sums.append(weight.grad.double().flatten().numpy() / bound)
        counts.append(float((writer.state["released_counts"] - before)[0]))
    return np.concatenate(sums), np.array(counts)


@pytest.mark.parametrize(
    ("mode", "fault", "rows"),
    [("experiment", "none", 3), ("experiment", "count", 3), ("experiment", "sum", 0), ("release", "none", 0)],
)
def test_sums_and_counts_have_their_noise(mode: str, fault: str, rows: int) -> None:
    """Also of empty batches. Planted: the count without noise; the sum with z in place of z_s."""
    z, r, steps = 1.3, 0.6, 150
    stream = noise_stream(mode, 7 if mode == "experiment" else None, "test")
    rule = Clipping(kind="adaptive", count_noise=r, bound_rate=0.01)
    writer = RecordGradients(clip_norm=0.5, noise_multiplier=z, divisor=1.0, noise=stream, clipping=rule)
    if fault == "count":
        writer._count_std = 0.0
    if fault == "sum":
        writer._multiplier = z
    sums, counts = released(writer, rows, steps)
    stds = {"sum": z / share_of_sum(r), "count": r * z}
    errors = {}
    for name, found in (("sum", sums), ("count", counts - rows / 2)):  # a gradient of 0 is within every bound
        errors[name] = (float(np.mean(found**2)) / stds[name] ** 2 - 1) / math.sqrt(2 / len(found))
        assert abs(float(found.mean())) < 5 * stds[name] / math.sqrt(len(found))
    assert {name for name, error in errors.items() if abs(error) > 5} == {fault} - {"none"}
    first = sums.reshape(steps, -1)[:, 0]
    assert abs(np.corrcoef(first, counts + np.arange(steps) * 1e-12)[0, 1]) < 5 / steps**0.5


@pytest.mark.parametrize("planted", [False, True])
def test_a_record_without_gradient_adds_nothing(planted: bool) -> None:
    """Planted: C / |g| without the constant, which is infinite for such a record, so that the sum is no number."""
    rule, weight = Clipping(kind="automatic", stability=1e-6), nn.Parameter(torch.zeros(2, 2))
    stream = noise_stream("experiment", 1, "test")
    writer = RecordGradients(clip_norm=1e12, noise_multiplier=0.0, divisor=1.0, noise=stream, clipping=rule)
    use = LinearUse(torch.zeros(1, 2), torch.zeros(1, 2), weight)

    def without_constant(self: Clipping, squares: Tensor, bound: float) -> Tensor:
        return bound / torch.zeros_like(squares)

    with patch.object(Clipping, "factors", without_constant if planted else Clipping.factors):
        writer.set_gradients([Contributions([([weight], [use])], 1)])
    assert weight.grad is not None
    assert bool((weight.grad == 0).all()) != planted


# Statements, folders, refusals


WORDS = {
    "per_layer": "clipped by layer", "automatic": "scaled below", "adaptive": "a bound that noisy counts move",
}  # fmt: skip


def test_the_ledger_and_the_statement_name_the_rule(tmp_path: Path) -> None:
    epsilons = []
    for rule in RULES:
        with loop_of(tmp_path / rule, rule) as private:
            run_epoch(private)
            document = private.statement().to_json()
        (mechanism,), (stated,) = document["mechanisms"], document["guarantees"]
        kind, adaptive = "per_layer" if rule == "two norms" else rule, rule == "adaptive"
        assert mechanism["clipping"] == kind
        assert (mechanism["count_noise"] == 5.0) == adaptive
        assert stated["theorem"]["name"] == "adaptive-" * adaptive + "clipped-records"
        assert WORDS[kind] in mechanism["description"]
        held = " ".join(one["text"] for one in stated["assumptions"] if one["holds"])
        assert ("released before, also in a run that was resumed" in held) == adaptive
        epsilons.append(stated["epsilon"])
        for key in ("clipping", "count_noise", "description"):  # which a ledger of an earlier version lacks
            del mechanism[key]
        older: Any = mechanism_from_json(mechanism)
        assert older.clipping == "flat"
    assert len(set(epsilons)) == 1


@pytest.mark.parametrize(("rule", "kept"), [("two norms", True), ("adaptive", True), ("adaptive", False)])
def test_a_resumed_loop_repeats_an_uninterrupted_one(tmp_path: Path, rule: str, kept: bool) -> None:
    """Planted: the save forgets what moved the bound."""
    whole, stopped = (loop_of(tmp_path / name, rule) for name in ("whole", "stopped"))
    run_epoch(whole)
    run_epoch(stopped, steps=4)
    stopped.save()
    stopped.close()
    again = loop_of(tmp_path / "stopped", rule, resume=True)
    if not kept:
        for tensor in again._private.gradients.state.values():
            tensor.zero_()
    run_epoch(again)
    pairs = zip(whole.module.parameters(), again.module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs) == kept
    whole.close()
    again.close()


DATA = np.random.default_rng(1).normal(size=(90, 6)), np.arange(90) % 3


def config(**protection: Any) -> dict[str, Any]:
    return {
        "trainer": {"kind": "bp"}, "epochs": 2, "seed": 4, "threads": 1, "model": {"hidden": [8]},
        "optimizer": {"name": "sgd", "lr": 0.5}, "sampler": {"batch_size": 9}, "data": {"n_classes": 3},
        "protection": {"kind": "record", "noise_multiplier": 1.0, "clip_norm": 0.1, **protection},
    }  # fmt: skip


def test_a_resumed_run_repeats_an_uninterrupted_one(tmp_path: Path, ctrl_c_at: type) -> None:
    given = config(clipping="adaptive", bound_rate=1.0)
    whole, _ = require_resumed_alike(tmp_path, given, DATA, ctrl_c_at(7))
    assert "a bound that noisy counts move" in whole.guarantees[0].mechanism


OTHERWISE = "is for bp, dfa, tdfa and pdfa, .*"


@pytest.mark.parametrize(
    ("kind", "protection", "match"),
    [
        ("bp", {"clipping": "adaptive", "bands": 2}, "protection.bands: 2 is not for protection.clipping ="),
        ("bp", {"clipping": "adaptive", "count_noise": 0.5}, "count_noise"),
        ("bp", {"clipping": "per_layer", "clip_norm": None, "layer_norms": [1.0]}, "has 1 norms, and the module"),
        ("bp", {"clipping": "per_layer", "layer_norms": [1.0, 2.0]}, "protection.clip_norm: 0.1 follows from"),
        ("bp", {"clipping": "per_layer", "clip_norm": None, "layer_norms": [1.0, 0.0]}, "must be numbers in"),
        ("bp", {"clipping": "medium"}, "protection.clipping"),
        ("zo", {"clipping": "automatic"}, f"{OTHERWISE} leave it out"),
        ("ulr", {"clipping": "automatic"}, f"{OTHERWISE} take trainer.clip = 'module'"),
    ],
)  # fmt: skip
def test_wrong_configurations_are_refused(tmp_path: Path, kind: str, protection: Any, match: str) -> None:
    given = {**config(**protection), "trainer": {"kind": kind}}
    with pytest.raises((opusim.ConfigError, ValueError), match=match):
        opusim.train(given, data=DATA, folder=tmp_path)


# Games of single steps


def without_the_root() -> Any:
    """Each of L layers is clipped to C, so that a record adds up to sqrt(L) C."""

    def bounds(self: Clipping, layers: int, bound: float) -> Tensor:
        return torch.full((layers, 1), bound, dtype=torch.float64)

    return patch.object(Clipping, "_bounds", bounds)


def counts_without_noise() -> Any:
    finish: Callable[..., None] = RecordGradients._finish

    def found(self: RecordGradients, *args: Any, **options: Any) -> None:
        self._count_std = 0.0
        finish(self, *args, **options)

    return patch.object(RecordGradients, "_finish", found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "fault"),
    [("per_layer", without_the_root), ("adaptive", counts_without_noise), ("automatic", None)],
)
def test_the_game_of_single_steps_finds_planted_faults(tmp_path: Path, rule: str, fault: Any) -> None:
    data = np.random.default_rng(1).normal(size=(200, 20)), np.arange(200) % 3
    given = config(clipping=rule, clip_norm=0.05)
    given |= {"epochs": 1, "model": {"hidden": [24, 24, 24]}, "sampler": {"batch_size": 12}}
    training.train(given, data=data, folder=tmp_path)
    found = audit_run(tmp_path, data=data, trials=200, seed=7)
    assert found.controls_hold
    assert not any(each.refutes for each in found.of(Role.RUN))
    if fault is not None:
        with fault():
            found = audit_run(tmp_path, data=data, trials=200, seed=7)
        assert any(each.refutes for each in found.of(Role.RUN))
