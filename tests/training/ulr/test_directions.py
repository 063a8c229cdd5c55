"""Orthogonal directions and matched covariances: the mean of the estimate, its variance, chunks, bad records."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from opusim.randomness.streams import noise_stream
from opusim.training.ulr import estimator as directions
from opusim.training.ulr.estimator import (
    Draws,
    Estimator,
    Isotropic,
    Matched,
    ModuleSequence,
    coordinates_of,
    haar_columns,
    needed_copies,
)
from tests.support.ulr_models import losses_of, new_network, records, whole_jacobian

SIGMA = 0.4
STEPS, SHARED = 100, 50
"""Steps, whose means are independent, and records of a step, which share directions."""
REFERENCE = 20_000


def signals_of(
    network: ModuleSequence, x: Tensor, y: Tensor, *, seed: int, step: int = 0, **options: object
) -> list[Tensor]:
    outputs, losses, noise = (
        network.forward(x),
        losses_of(y),
        noise_stream("experiment", seed, "output-noise"),
    )
    noise.seek(step)
    settings = {"copies": 3, "reduction": "antithetic", **options}
    clean = losses(outputs.output, slice(None)).flatten()
    return Estimator(**settings).signals(  # type: ignore[arg-type]
        network, outputs, losses, clean, noise, [SIGMA] * network.depth
    )


def means_by_step(network: ModuleSequence, layer: int, seed: int, **options: object) -> Tensor:
    """Mean parameter gradient of one record repeated, one row a step, shape (steps, parameters)."""
    x, y = records(1, network.n_inputs)
    outputs = network.forward(x)
    jacobian = whole_jacobian(network, layer, outputs.inputs[layer])
    many = x.expand(SHARED, -1), y.expand(SHARED)
    steps = (signals_of(network, *many, seed=seed, step=step, **options)[layer] for step in range(STEPS))
    return torch.stack([signal.flatten(1).mean(dim=0) @ jacobian for signal in steps])


def reference(network: ModuleSequence, layer: int, seed: int, *, ball: bool, matched: bool) -> Tensor:
    """Gradients by autograd of the loss smoothed by the law's own noise, shape (draws, parameters)."""
    x, y = records(1, network.n_inputs)
    outputs = network.forward(x)
    jacobian, value = whole_jacobian(network, layer, outputs.inputs[layer]), outputs.values[layer]
    root = SIGMA * (matched_root(jacobian) if matched else torch.eye(value.numel()))
    size = root.shape[1]
    z = torch.randn(REFERENCE, size, generator=torch.Generator().manual_seed(seed))
    if ball:  # uniform in the ball of radius sqrt(size)
        radius = torch.rand(REFERENCE, 1, generator=torch.Generator().manual_seed(seed + 1)) ** (1 / size)
        z = z / z.norm(dim=1, keepdim=True) * radius * size**0.5
    noisy = (value + (z @ root.T).view(-1, *value.shape[1:])).requires_grad_(True)
    loss = nn.functional.cross_entropy(
        network.output_from(layer, noisy), y.expand(REFERENCE), reduction="sum"
    )
    return torch.autograd.grad(loss, noisy)[0].flatten(1) @ jacobian


def matched_root(jacobian: Tensor) -> Tensor:
    """A root of the covariance (J J^T)^(1/2), floored at 1 % and of mean 1 on all outputs, from J itself."""
    left, s, _ = torch.linalg.svd(jacobian.double(), full_matrices=False)
    left, s = left[:, s > 1e-6 * s[0]], s[s > 1e-6 * s[0]].clamp_min(0.01 * s[0])
    return (left * (s * len(jacobian) / s.sum()).sqrt()).float()


def deviation(name: str, layer: int, seed: int, *, ball: bool, matched: bool, **options: object) -> float:
    """Largest distance of the estimate's mean from the smoothed gradient, in standard errors of both."""
    network = new_network(name)
    laws = {"directions": "orthogonal" if ball else "independent", "matched": matched, **options}
    found = means_by_step(network, layer, seed, **laws)
    exact = reference(network, layer, seed + 2, ball=ball, matched=matched)
    error = (found.var(dim=0) / len(found) + exact.var(dim=0) / len(exact)).sqrt() + 1e-6
    return float(((found.mean(dim=0) - exact.mean(dim=0)) / error).abs().max())


LAWS = [
    ("linear", 0, True, False),
    ("convolution", 0, False, True),
    ("convolution", 0, True, True),
    ("linear over positions", 0, False, True),
    ("linear over positions", 0, True, True),
]


@pytest.mark.parametrize(("name", "layer", "ball", "matched"), LAWS)
def test_the_mean_is_the_true_gradient(name: str, layer: int, ball: bool, matched: bool, seed: int) -> None:
    assert deviation(name, layer, seed, ball=ball, matched=matched) < 5


@pytest.mark.parametrize("reduction", ["clean-loss", "leave-one-out", "none"])
def test_reductions_keep_the_mean_of_orthogonal_copies(reduction: str, seed: int) -> None:
    assert deviation("linear", 0, seed, ball=True, matched=False, reduction=reduction) < 5


@pytest.mark.parametrize("fault", ["radius", "score of isotropic noise"])
def test_planted_faults_are_caught(fault: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "radius":  # 20 % too long
        monkeypatch.setattr(directions, "haar_columns", lambda normals: 1.2 * haar_columns(normals))
        assert deviation("linear", 0, seed, ball=True, matched=False) > 5
    else:
        monkeypatch.setattr(Matched, "score", lambda self, drawn: self.noise(drawn[None])[0])
        assert deviation("convolution", 0, seed, ball=False, matched=True) > 5


def test_as_many_orthogonal_copies_as_outputs_give_a_linear_loss_its_gradient(seed: int) -> None:
    """Squared error of antithetic pairs is linear up to third order, which is zero: the estimate has no variance."""
    network = new_network("linear")
    x, y = records(7, network.n_inputs)
    slopes = torch.randn(3, generator=torch.Generator().manual_seed(seed))
    outputs = network.forward(x)
    last = network.depth - 1

    def linear(output: Tensor, rows: slice) -> Tensor:
        return (output @ slopes).view(-1, len(y[rows]))

    def found(copies: int, law: str) -> Tensor:
        noise = noise_stream("experiment", seed, "output-noise")
        clean = linear(outputs.output, slice(None))[0]
        parts = Estimator(copies=copies, reduction="antithetic", directions=law).signals(  # type: ignore[arg-type]
            network, outputs, linear, clean, noise, [SIGMA] * network.depth
        )
        return parts[last]

    torch.testing.assert_close(found(3, "orthogonal"), slopes.expand(7, 3), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found(6, "orthogonal"), slopes.expand(7, 3), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found(3, "independent"), slopes.expand(7, 3), rtol=0.1)


def test_orthogonal_pairs_beyond_the_outputs_are_not_drawn(seed: int) -> None:
    """Seven pairs on layers of fewer outputs are as many as the outputs; other reductions draw all seven."""
    network = new_network("linear")
    x, y = records(9, network.n_inputs)
    outputs = [value.shape[1] for value in network.forward(x).values]
    assert max(outputs) <= 7
    assert [needed_copies(7, n, "orthogonal", "antithetic") for n in outputs] == outputs
    others = (("orthogonal", "clean-loss"), ("independent", "antithetic"))
    assert [needed_copies(7, 3, *law) for law in others] == [7, 7]
    more, enough = (
        signals_of(network, x, y, seed=seed, copies=n, directions="orthogonal") for n in (7, max(outputs))
    )
    for a, b in zip(more, enough, strict=True):
        assert torch.equal(a, b)


def test_copies_of_a_record_are_orthogonal_and_of_one_length(seed: int) -> None:
    value = torch.zeros(4, 6)
    draws = Draws(Isotropic(value), noise_stream("experiment", seed, "z"), SIGMA, 8, "orthogonal", like=value)
    z = torch.cat([draws.next(3)[1], draws.next(5)[1]]).transpose(0, 1)  # (records, copies, outputs)
    for group in (z[:, :6], z[:, 6:]):
        gram = group @ group.mT / (6 * SIGMA**2)
        torch.testing.assert_close(gram, torch.eye(group.shape[1]).expand_as(gram), rtol=0, atol=1e-5)
    assert not torch.allclose(z[0].abs(), z[1].abs(), rtol=0.1)  # a shift of its own for every record


def test_matched_noise_lowers_the_variance_of_a_convolution(seed: int) -> None:
    network = new_network("convolution")
    x, y = records(1, network.n_inputs)
    many = x.expand(2000, -1), y.expand(2000)
    jacobian = whole_jacobian(network, 0, network.forward(x).inputs[0])
    plain, matched = (
        (signals_of(network, *many, seed=seed, matched=choice)[0].flatten(1) @ jacobian).var(dim=0).sum()
        for choice in (False, True)
    )
    assert matched < 0.8 * plain


@pytest.mark.parametrize("name", ["linear", "convolution", "linear over positions", "residual block"])
@pytest.mark.parametrize("law", ["orthogonal", "independent"])
def test_chunking_changes_nothing_but_rounding(name: str, law: str, seed: int) -> None:
    network = new_network(name)
    x, y = records(9, network.n_inputs)
    options = {"directions": law, "matched": True, "copies": 7}
    whole = signals_of(network, x, y, seed=seed, **options)
    for rows in (1, 18, 70, 10_000):
        parts = signals_of(network, x, y, seed=seed, rows_per_pass=rows, **options)
        for a, b in zip(whole, parts, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    other = signals_of(network, x, y, seed=seed + 1, **options)
    assert not torch.allclose(whole[0], other[0], rtol=1e-2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_record_depends_on_itself_only(bad: float, seed: int) -> None:
    network = new_network("convolution")
    x, y = records(6, network.n_inputs)
    options = {"directions": "orthogonal", "matched": True}
    clean = signals_of(network, x, y, seed=seed, **options)
    x[2] = bad
    poisoned = signals_of(network, x, y, seed=seed, **options)
    keep = torch.tensor([0, 1, 3, 4, 5])
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a[keep], b[keep])


def test_no_records_and_records_of_zeros_have_finite_noise(seed: int) -> None:
    network = ModuleSequence(
        nn.Sequential(nn.Unflatten(1, (2, 4, 5)), nn.Conv2d(2, 3, 3, bias=False), nn.Flatten(), nn.Linear(18, 3)),
        n_inputs=40,
    )  # fmt: skip
    for n, law in itertools.product((0, 2), ("independent", "orthogonal")):
        x, y = torch.zeros(n, 40), torch.zeros(n, dtype=torch.long)
        for signal in signals_of(network, x, y, seed=seed, directions=law, matched=True):
            assert len(signal) == n
            assert torch.isfinite(signal).all()


def test_modules_at_one_position_keep_isotropic_noise() -> None:
    network = new_network("linear")
    outputs = network.forward(records(3, network.n_inputs)[0])
    found = coordinates_of(network.jacobians[0], outputs.values[0], outputs.inputs[0], matched=True)
    assert isinstance(found, Isotropic)
