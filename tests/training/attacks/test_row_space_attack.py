"""The attacks themselves: exact algebra first, then their laws on simulated updates."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from opusim.accounting.audit import area_under_curve
from opusim.training.attacks.base import EarlierSteps, steps_needed
from opusim.training.attacks.update_attacks import Rows, residual, row_space
from opusim.training.config.sections import OptimizerConfig
from opusim.training.networks.optimizers import make_optimizer

RATE = 0.27


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.03},
        {"momentum": 0.9, "weight_decay": 0.03, "nesterov": True},
        {"momentum": 0.0, "weight_decay": 0.3},
    ],
)
def test_momentum_and_decay_are_undone_from_weights_alone(options: dict) -> None:
    config = OptimizerConfig(lr=RATE, **options)
    generator = torch.Generator().manual_seed(1)
    parameter = nn.Parameter(torch.randn(5, 7, generator=generator, dtype=torch.float64))
    optimizer = make_optimizer([parameter], config)
    gradients = torch.randn(60, 5, 7, generator=generator, dtype=torch.float64)
    history = [parameter.detach().clone()]
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
        history.append(parameter.detach().clone())
    seen = history[-(steps_needed(config) + 2) :]  # what went before is not shown
    torch.testing.assert_close(_last_gradient(seen, config), gradients[-1], rtol=0, atol=1e-9)
    without = _last_gradient(seen, config.model_copy(update={"weight_decay": 0.0, "momentum": 0.0}))
    plain = options == {"momentum": 0.0}
    assert (float((without - gradients[-1]).abs().max()) > 0.1) != plain  # planted: nothing undone


def _last_gradient(weights: list[Tensor], options: OptimizerConfig) -> Tensor:
    named = [{"w": tensor} for tensor in weights]
    return EarlierSteps.of_weights(named[:-1], options, RATE).gradient("w", weights[-1])


@pytest.mark.parametrize("name", ["adam", "adamw", "nadam", "radam", "adamax"])
def test_the_means_of_the_adam_family_tell_the_gradient(name: str, seed: int) -> None:
    config = OptimizerConfig(name=name, lr=RATE, weight_decay=0.03)
    generator = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(torch.randn(5, 7, generator=generator))
    optimizer = make_optimizer([parameter], config)
    for _ in range(6):
        weights = parameter.detach().clone()
        before = optimizer.state[parameter]["exp_avg"].clone() if optimizer.state else torch.zeros(5, 7)
        parameter.grad = gradient = torch.randn(5, 7, generator=generator)
        optimizer.step()
        after = optimizer.state[parameter]["exp_avg"]
        for read in ("gradient", "rounded_gradient"):
            earlier = EarlierSteps.of_means({"w": before}, {"w": weights}, config)
            found = getattr(earlier, read)("w", after)
            # the mean is rounded at 2^-24 of its size, and the quotient by 1 - beta1 makes ten times that of it
            torch.testing.assert_close(found.double(), gradient.double(), rtol=0, atol=2e-5)
    planted = EarlierSteps.of_means({"w": before}, {"w": weights}, config.model_copy(update={"beta1": 0.5}))
    assert float((planted.gradient("w", after) - gradient).abs().max()) > 0.1


@pytest.mark.parametrize("sigma", [0.1, 1.0, 1e4])
def test_the_row_space_holds_members_and_no_others_at_any_noise(sigma: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(30, 80, generator=generator, dtype=torch.float64) + 0.7
    deltas = torch.randn(20, 50, generator=generator, dtype=torch.float64)
    deltas = deltas + sigma * torch.randn(20, 50, generator=generator, dtype=torch.float64)
    basis = row_space(deltas.t() @ inputs[:20] / 20, 20)
    assert max(residual(h, basis) for h in inputs[:20]) < 1e-10
    assert min(residual(h, basis) for h in inputs[20:]) > 0.3
    full = deltas.t() @ inputs[:20]
    full += 10 * max(sigma, 1.0) * torch.randn(50, 80, generator=generator, dtype=torch.float64)
    assert min(residual(h, row_space(full, 20)) for h in inputs[:20]) > 0.01  # noise on the sum hides them


def test_the_likelihood_ratio_equals_that_of_the_densities(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    m, d, n = 40, 6, 9
    inputs = torch.randn(m, d, generator=generator, dtype=torch.float64)
    slopes = torch.rand(m, n, generator=generator, dtype=torch.float64)
    h, slope, signal = (torch.randn(k, generator=generator, dtype=torch.float64) for k in (d, n, n))
    left = torch.randn(n, d, generator=generator, dtype=torch.float64)
    rows = Rows(left, inputs, slopes)
    covariances = [(slopes[:, j, None] * inputs).t() @ (slopes[:, j, None] * inputs) for j in range(n)]
    energy = sum(float(y @ torch.linalg.solve(a, y)) for y, a in zip(left, covariances, strict=True))
    variance = energy / (n * d)
    total = 0.0
    for j, a in enumerate(covariances):
        without = torch.distributions.MultivariateNormal(torch.zeros(d, dtype=torch.float64), variance * a)
        wider = variance * (a + slope[j] ** 2 * torch.outer(h, h))
        within = torch.distributions.MultivariateNormal(signal[j] * h, wider)
        total += float(within.log_prob(left[j]) - without.log_prob(left[j]))
    assert rows.log_likelihood_ratio(h, slope, signal) == pytest.approx(total, rel=1e-5)


@pytest.mark.slow
def test_the_covariance_tells_members_without_any_signal_at_any_noise(seed: int) -> None:
    """Batch 400, fan-in 32, 256 rows, a record of 1.4 times the usual norm; a planted noise of its own hides it."""
    generator = torch.Generator().manual_seed(seed)
    coins = [trial % 2 == 0 for trial in range(60)]
    found, louder, hidden = [], [], []
    for present in coins:
        inputs = torch.randn(401, 32, generator=generator, dtype=torch.float64)
        inputs[400] *= 2**0.5
        slopes = torch.rand(401, 256, generator=generator, dtype=torch.float64)
        noise = torch.randn(401, 256, generator=generator, dtype=torch.float64) * slopes
        for scores, sigma, kept in (
            (found, 0.1, 400 + present),
            (louder, 1e4, 400 + present),
            (hidden, 0.1, 400),
        ):
            rows = Rows(sigma * noise[:kept].t() @ inputs[:kept], inputs[:400], slopes[:400])
            silence = torch.zeros(256, dtype=torch.float64)
            scores.append(rows.log_likelihood_ratio(inputs[400], slopes[400], silence))
    assert found == pytest.approx(louder, rel=1e-6)
    standard_error = (1 / 12 * (1 / 30 + 1 / 30)) ** 0.5
    assert _auc(found, coins) - 0.5 > 5 * standard_error
    assert abs(_auc(hidden, coins) - 0.5) < 5 * standard_error


def _auc(scores: list[float], coins: list[bool]) -> float:
    values, present = np.array(scores), np.array(coins)
    return area_under_curve(values[present], values[~present])


def test_auc_counts_pairs() -> None:
    first, second = np.array([3.0, 1.0, 2.0]), np.array([2.0, 0.0])
    pairs = [(a > b) + (a == b) / 2 for a in first for b in second]
    assert area_under_curve(first, second) == pytest.approx(np.mean(pairs))
