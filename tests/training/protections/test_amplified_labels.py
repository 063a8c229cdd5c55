"""Clipping and noise in the geometry of public features, against covariances written out in full."""

from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

from opusim import training
from opusim.randomness.streams import noise_stream
from opusim.training.errors import RunInterrupted
from opusim.training.networks.network import FullyConnected
from opusim.training.protections.amplified_labels import AmplifiedLabels, whitened_norms
from opusim.training.protections.released_model import Metric, equalised_weights
from tests.support.run_folders import equal, newest

WIDTHS = (5, 7, 6, 3)  # inputs, two hidden layers, classes
CLIP, DIVISOR, FLOOR, ROUNDS = 0.27, 17.0, 0.05, 30
N_PUBLIC, SIZES = 40, [width + 1 for width in WIDTHS[:-1]]
Signals = tuple[list[torch.Tensor], list[torch.Tensor]]
pytestmark = pytest.mark.usefixtures("one_thread")


def new_network(*, bias: bool = True) -> FullyConnected:
    torch.manual_seed(3)
    layers = [(nn.Linear(fan_in, width, bias=bias), nn.Tanh()) for fan_in, width in pairwise(WIDTHS)]
    return FullyConnected(nn.Sequential(*chain.from_iterable(layers))[:-1])


def normals(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def public_inputs() -> list[torch.Tensor]:
    """Layer inputs of public records, some far from the rest."""
    return [(1 + 4 * normals(7 + layer, N_PUBLIC, 1) ** 2) * normals(layer, N_PUBLIC, width)
            for layer, width in enumerate(WIDTHS[:-1])]  # fmt: skip


def signals(seed: int, batch: int, scale: float = 1.0) -> Signals:
    """delta_l and h_(l-1) of a batch."""
    deltas = [scale * normals(seed + layer, batch, width) for layer, width in enumerate(WIDTHS[1:])]
    inputs = [normals(seed + 9 + layer, batch, width) for layer, width in enumerate(WIDTHS[:-1])]
    return deltas, inputs


def protection(z: float = 0.0, *, seed: int = 5, every: int = 1, **others: Any) -> AmplifiedLabels:
    others = {"equalise": False, "sizes": SIZES} | others
    return AmplifiedLabels(
        clip_norm=CLIP, noise_multiplier=z, divisor=DIVISOR, floor=FLOOR, reference=public_inputs()[0],
        noise=noise_stream("experiment", seed, "central-noise"), reference_every=every, **others,
    )  # fmt: skip


def geometry(public: list[torch.Tensor], *, bias: bool = True, equalise: bool = False) -> list[np.ndarray]:
    """P_l in plain numpy: second moments of public rows, times the sum of all fan-ins, plus the floor."""
    rows = [np.hstack([h.double().numpy(), np.ones((len(h), int(bias)))]) for h in public]
    total = sum(row.shape[1] for row in rows)
    covariances = []
    for layer, row in enumerate(rows):
        weights = np.full(len(row), 1 / len(row))
        for _ in range(ROUNDS if equalise and layer == 0 else 0):
            inverse = np.linalg.inv(_with_floor(row.T @ (row * weights[:, None])))
            weights = weights * np.einsum("nd,de,ne->n", row, inverse, row)
            weights /= weights.sum()
        covariances.append(_with_floor(total * row.T @ (row * weights[:, None])))
    return covariances


def _with_floor(p: np.ndarray) -> np.ndarray:
    return p + FLOOR * np.trace(p) / len(p) * np.eye(len(p))


def whitened(network: FullyConnected, covariances: list[np.ndarray]) -> np.ndarray:
    """P^(-1/2) of the whole update, vectorised over all rows of all layers: one long vector."""
    parts = []
    for linear, p in zip(network.linears, covariances, strict=True):
        assert linear.weight.grad is not None
        update = linear.weight.grad
        if linear.bias is not None:
            update = torch.cat([update, linear.bias.grad[:, None]], dim=1)
        block = np.kron(np.eye(len(update)), p)  # rows are independent, each of covariance P_l
        parts.append(np.linalg.solve(np.linalg.cholesky(block), update.double().numpy().ravel()))
    return np.concatenate(parts) * DIVISOR


def write(shield: AmplifiedLabels, network: FullyConnected, of: Signals, public: Any = None) -> list:
    """The gradients that a batch leaves under a protection."""
    shield.set_gradients([network.contributions(*of)], public_inputs=public)
    return [parameter.grad.clone() for parameter in network.parameters]


@pytest.mark.parametrize("bias", [True, False])
def test_without_noise_the_gradient_is_the_clipped_sum(bias: bool) -> None:
    network = new_network(bias=bias)
    deltas, inputs = signals(1, 13)
    deltas = [torch.logspace(-2, 1, 13)[:, None] * delta for delta in deltas]
    covariances = geometry(public_inputs(), bias=bias)
    expected = [torch.zeros_like(parameter) for parameter in network.parameters]
    clipped = 0
    for i in range(13):
        contribution, square = [], 0.0
        for delta, h, p in zip(deltas, inputs, covariances, strict=True):
            row = np.append(h[i].double().numpy(), [1.0] * bias)
            square += float(delta[i].double().square().sum()) * row @ np.linalg.inv(p) @ row
            contribution += [torch.outer(delta[i], h[i]), *([delta[i]] if bias else [])]
        clipped += square**0.5 > CLIP
        for total, g in zip(expected, contribution, strict=True):
            total += g * min(1.0, CLIP / square**0.5) / DIVISOR
    assert 0 < clipped < 13  # both sides of the clip were looked at
    found = write(protection(), network, (deltas, inputs), public_inputs())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("equalise", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_a_contribution_is_in_the_clip_and_two_labels_within_its_double(bias: bool, equalise: bool) -> None:
    """Whitened by the noise's full covariance; labels enter through delta, which may be anything."""
    network = new_network(bias=bias)
    covariances = geometry(public_inputs(), bias=bias, equalise=equalise)
    others, rest = signals(30, 4)
    widest = 0.0
    for trial in range(12):
        scale = 10.0 ** (trial - 5)
        mine, features = signals(50 + trial, 1, scale)
        labels = [mine, [-delta for delta in mine], [normals(99, 1, w) * scale for w in WIDTHS[1:]]]
        sums = []
        for deltas in labels:
            shield = protection(equalise=equalise)
            write(shield, network, (deltas, features), public_inputs())
            assert np.linalg.norm(whitened(network, covariances)) <= CLIP * (1 + 1e-5)
            batch = [torch.cat(pair) for pair in zip(others, deltas, strict=True)]
            rows = [torch.cat(pair) for pair in zip(rest, features, strict=True)]
            write(shield, network, (batch, rows), public_inputs())
            sums.append(whitened(network, covariances))
        gaps = [np.linalg.norm(a - b) for a in sums for b in sums]
        assert max(gaps) <= 2 * CLIP * (1 + 1e-4)
        widest = max(widest, *gaps)
    assert widest > 1.999 * CLIP  # two opposite signals attain it


def test_hidden_layers_follow_the_weights_of_the_moment() -> None:
    """The geometry of the second call is that of the second call's public features."""
    network, shield, of = new_network(), protection(), signals(1, 1, scale=100.0)
    later = [public_inputs()[0], 0.1 * public_inputs()[1], 3.0 * public_inputs()[2]]
    for public in (public_inputs(), later):
        write(shield, network, of, public)
    assert np.linalg.norm(whitened(network, geometry(later))) == pytest.approx(CLIP, rel=1e-4)
    assert np.linalg.norm(whitened(network, geometry(public_inputs()))) != pytest.approx(CLIP, rel=0.01)


def test_a_kept_geometry_clips_and_colours_until_it_is_due_again() -> None:
    """Rows that are shown between two computations change nothing; the clip holds in the geometry of the first ones."""
    network, of = new_network(), signals(1, 1, 1e4)
    shield, shown = protection(every=3), public_inputs()
    norms = []
    for step in range(4):
        shield.seek(step)
        assert (shield.reference is not None) == (step in (0, 3))
        if step == 3:
            shown = [shown[0], *(3 * h for h in shown[1:])]
        write(shield, network, of, shown if step in (0, 3) else None)
        norms.append(np.linalg.norm(whitened(network, geometry(public_inputs()))))
    np.testing.assert_allclose(norms[:3], CLIP, rtol=1e-5)
    assert norms[3] > 1.2 * CLIP  # another geometry, in which it was clipped
    with pytest.raises(ValueError, match="public_inputs is missing"):
        write(shield, network, of)  # step 3 is due


@pytest.mark.parametrize("fault", [False, True])
def test_noise_at_a_kept_step_has_the_kept_factor(monkeypatch: pytest.MonkeyPatch, fault: bool) -> None:
    """An empty batch releases the generator's draws, coloured by the factor that clips."""
    network, shield, empty = new_network(), protection(1.0, every=4), signals(1, 0)
    shield.seek(0)
    write(shield, network, empty, public_inputs())
    if fault:  # noise of the rows of the moment, under a clip in the kept geometry
        later, colour = Metric.of_rows(torch.eye(WIDTHS[1] + 1), floor=FLOOR), Metric.colour
        monkeypatch.setattr(
            Metric, "colour", lambda self, white: colour(later if white.shape[1] == 8 else self, white)
        )
    shield.seek(1)
    write(shield, network, empty)
    stream = noise_stream("experiment", 5, "central-noise")
    stream.seek(1)
    shapes = [(width, fan_in + 1) for fan_in, width in pairwise(WIDTHS)]
    draws = [stream.add_rounded(torch.zeros(shape), CLIP).double() for shape in shapes]
    factors = [torch.from_numpy(np.linalg.cholesky(p)) for p in geometry(public_inputs())]
    same = []
    for linear, white, factor in zip(network.linears, draws, factors, strict=True):
        found = torch.cat([linear.weight.grad, linear.bias.grad[:, None]], dim=1).double()
        wanted = white @ factor.t() / DIVISOR
        same.append(torch.allclose(found, wanted, rtol=1e-4, atol=1e-7))
    assert same == [True, not fault, True]


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e15])
def test_the_clip_holds_in_a_kept_geometry_however_the_activations_moved(size: float) -> None:
    network, shield = new_network(), protection(every=4)
    shield.seek(0)
    write(shield, network, signals(1, 0), public_inputs())
    deltas, inputs = signals(1, 1, 1e15)
    shield.seek(2)
    write(shield, network, (deltas, [inputs[0], *(size * h for h in inputs[1:])]))
    assert np.linalg.norm(whitened(network, geometry(public_inputs()))) == pytest.approx(CLIP, rel=1e-5)


def test_a_kept_geometry_needs_the_layers_sizes() -> None:
    with pytest.raises(ValueError, match="sizes is missing; reference_every = 2 keeps"):
        protection(1.0, every=2, sizes=None)


def test_a_run_that_stops_at_any_step_goes_on_bit_for_bit(tmp_path: Path, ctrl_c_at: type) -> None:
    """Steps 0, 4 and 8 compute the geometry of hidden layers; the steps after 2, 3, 5 and 6 resume with a kept one."""
    config = {
        "seed": 7, "epochs": 3, "data": {"n_classes": 3}, "model": {"hidden": [6, 5]}, "trainer": {"kind": "dfa"},
        "sampler": {"scheme": "poisson", "batch_size": 15},
        "protection": {"kind": "label-amplified", "noise_multiplier": 1.0},
    }  # fmt: skip
    data = normals(1, 60, 5).numpy(), np.arange(60) % 3
    training.train(config, data=data, folder=tmp_path / "unbroken")
    for step in (2, 3, 5, 6):
        begun = {"config": config} if step == 2 else {"resume": True}
        with pytest.raises(RunInterrupted):
            training.train(**begun, data=data, folder=tmp_path / "broken", watcher=ctrl_c_at(step))
    training.train(data=data, folder=tmp_path / "broken", resume=True)
    unbroken, broken = (newest(tmp_path / name) for name in ("unbroken", "broken"))
    assert {"state.label_geometry_1", "state.label_geometry_2"} <= unbroken.keys()
    assert equal(unbroken, broken)


def test_a_writer_that_resumes_between_two_computations_goes_on() -> None:
    network, of = new_network(), signals(1, 9)
    first, second = protection(1.0, every=4), protection(1.0, every=4)
    first.seek(0)
    write(first, network, of, public_inputs())
    for name, tensor in first.state.items():
        second.state[name].copy_(tensor)
    changed = [public_inputs()[0], *(2 * h for h in public_inputs()[1:])]  # of weights that have moved
    fresh = protection(1.0, every=4)  # planted fault: without the state it takes the new rows
    for step in (2, 3):
        found = []
        for shield in (first, second, fresh):
            shield.seek(step)
            found.append(write(shield, network, of, None if shield.reference is None else changed))
        assert all(map(torch.equal, found[0], found[1]))
    assert not all(map(torch.equal, found[0], found[2]))


def test_planted_fault_a_norm_without_the_geometry_is_caught() -> None:
    """Clipped by the plain norm of the update, a record of unusual features stands out of the noise."""
    network = new_network()
    deltas, inputs = signals(1, 1)
    inputs[0] = 50 * inputs[0]
    plain = sum(float(d.square().sum() * (h.square().sum() + 1)) for d, h in zip(deltas, inputs, strict=True))
    factor = CLIP / plain**0.5
    for linear, delta, h in zip(network.linears, deltas, inputs, strict=True):
        linear.weight.grad = factor * delta.t() @ h / DIVISOR
        linear.bias.grad = factor * delta.sum(dim=0) / DIVISOR
    flat = [h[:, :1] * 0.01 for h in public_inputs()]  # public features that vary little
    narrow = [part.expand(-1, width) for part, width in zip(flat, WIDTHS[:-1], strict=True)]
    assert np.linalg.norm(whitened(network, geometry(narrow))) > 2 * CLIP


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["delta", "features"])
def test_a_record_that_is_not_finite_counts_as_zero(value: float, part: str) -> None:
    network, (deltas, inputs), shield = new_network(), signals(1, 6), protection()
    without = [d[1:] for d in deltas], [h[1:] for h in inputs]
    expected = write(shield, network, without, public_inputs())
    (deltas if part == "delta" else inputs)[1][0, 2] = value
    torch.testing.assert_close(write(shield, network, (deltas, inputs), public_inputs()), expected)


NOISE_WIDTH, NOISE_Z = 20_000, 2.7
NOISE_LIMIT = float(norm.isf(norm.sf(5.0) / 21))  # 21 entries of a symmetric 6 x 6 matrix


def covariance_deviation(seed: int) -> float:
    """How far the noise's covariance is from (z C / divisor)^2 P in standard errors, worst entry.

    An empty batch leaves the noise alone: 20,000 independent rows of six entries, the bias's last.
    """
    network = FullyConnected(nn.Sequential(nn.Linear(5, NOISE_WIDTH)))
    public, empty = [public_inputs()[0]], ([torch.zeros(0, NOISE_WIDTH)], [torch.zeros(0, 5)])
    weight, bias = write(protection(NOISE_Z, seed=seed), network, empty, public)
    noise = torch.cat([weight, bias[:, None]], dim=1).double().numpy()
    factor = np.linalg.cholesky(geometry(public)[0]) * NOISE_Z * CLIP / DIVISOR
    white = np.linalg.solve(factor, noise.T)  # (6, rows), of covariance 1 if all is right
    error = white @ white.T / NOISE_WIDTH - np.eye(6)
    return float(np.max(np.abs(error) / np.sqrt((1 + np.eye(6)) / NOISE_WIDTH)))


@pytest.mark.parametrize("fault", [None, "not coloured", "bias forgotten", "five percent"])
def test_noise_has_the_covariance_of_the_geometry(monkeypatch: Any, fault: str | None, seed: int) -> None:
    colour = Metric.colour

    def wrong(self: Metric, white: torch.Tensor) -> torch.Tensor:
        if fault == "not coloured":
            return white
        if fault == "five percent":
            return 1.05 * colour(self, white)
        narrow = Metric(factor=self.factor[:-1, :-1])  # the bias has noise of its own
        return torch.cat([colour(narrow, white[:, :-1]), white[:, -1:]], dim=1)

    if fault is not None:
        monkeypatch.setattr(Metric, "colour", wrong)
    assert (covariance_deviation(seed) > NOISE_LIMIT) == (fault is not None)


def test_an_ordinary_record_has_whitened_features_of_norm_one() -> None:
    """Mean over the public records of sum_l h^T P_l^-1 h: 1 but for the floor, so that C is in units of delta."""
    total = 0.0
    for row, p in zip(public_inputs(), geometry(public_inputs()), strict=True):
        h = np.hstack([row.double().numpy(), np.ones((N_PUBLIC, 1))])
        total += float(np.einsum("nd,de,ne->n", h, np.linalg.inv(p), h).mean())
    assert 0.8 < total < 1.0
    ones = [torch.full((N_PUBLIC, 1), 1.0) for _ in WIDTHS[1:]]
    rows = [torch.cat([h, torch.ones(N_PUBLIC, 1)], dim=1) for h in public_inputs()]
    metrics = [Metric(factor=torch.from_numpy(np.linalg.cholesky(p))) for p in geometry(public_inputs())]
    white = [metric.whiten(row) for row, metric in zip(rows, metrics, strict=True)]
    assert float(whitened_norms(ones, white).square().mean()) == pytest.approx(total)


def test_leverages_equal_the_inverse() -> None:
    rows, base = normals(1, 9, 6), 3.7 * normals(2, 25, 6)
    p = (base.t() @ base / 25).double().numpy()
    p += 0.3 * np.trace(p) / 6 * np.eye(6)
    h = rows.double().numpy()
    expected = np.einsum("nd,de,ne->n", h, np.linalg.inv(p), h)
    np.testing.assert_allclose(Metric.of_rows(base, floor=0.3).leverages(rows).numpy(), expected, rtol=1e-6)


def test_equalising_lowers_the_largest_leverage_towards_the_dimension() -> None:
    rows = torch.cat([normals(1, 2000, 7) * (1 + normals(2, 2000, 1) ** 2), torch.ones(2000, 1)], dim=1)

    def largest(rounds: int) -> float:
        weights = equalised_weights(rows, rounds=rounds, floor=1e-9)
        assert float(weights.sum()) == pytest.approx(1.0)
        assert float(weights.min()) >= 0
        return float(Metric.of_rows(rows, weights=weights, floor=1e-9).leverages(rows).max())

    before, some, more = largest(0), largest(5), largest(ROUNDS)
    assert before > 5 * 8
    assert before > some > more
    assert 8 * (1 - 1e-6) <= more < 1.25 * 8
