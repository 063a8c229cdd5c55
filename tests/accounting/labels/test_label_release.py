"""One noisy linear model: its price, the exact law of two worlds, and what float64 may round."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from dp_accounting import get_epsilon_gaussian

from accounting.composition import guarantees
from accounting.errors import NoGuarantee
from accounting.guarantee import Guarantee, Status, Unit
from accounting.labels.linear_model import LabelRelease, noise_of, whitened_bound
from opusim.randomness.streams import SeededStream
from training.protections.metric import Metric
from training.protections.released_model import Design, lowered, noisy_sums

K = 4
MU = 1.5


def _only(mechanism: LabelRelease, delta: float = 1e-5) -> Guarantee:
    (guarantee,) = guarantees([mechanism], delta=delta)
    return guarantee


def test_guarantee_and_the_certificates_share_of_delta() -> None:
    guarantee = _only(LabelRelease(mu=0.719))
    assert guarantee.epsilon == pytest.approx(3.0, abs=5e-3)
    assert (guarantee.unit, guarantee.status) == (Unit.LABEL, Status.PROVEN)
    device = _only(LabelRelease(mu=0.5, device_noise=True, beta=5e-6))
    assert device.status is Status.PROVEN_UNDER_DEVICE_MODEL
    assert device.epsilon == pytest.approx(get_epsilon_gaussian(2.0, 5e-6))
    (both,) = guarantees([LabelRelease(mu=0.6), LabelRelease(mu=0.4, steps=4)], delta=1e-5)
    assert both.epsilon == pytest.approx(get_epsilon_gaussian(1.0, 1e-5))


def _records(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """60 records of 7 features: some far out, one twice, one of zeros, one that is not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 7, generator=generator) * torch.tensor([1.0, 1, 1, 5, 5, 0.1, 0.01])
    x[3] *= 8
    x[4] = x[3]
    x[5] = 0
    x[6, 2] = float("nan")
    return x, torch.randint(K, (60,), generator=generator)


def _exact_rows(x: torch.Tensor) -> np.ndarray:
    """h_i in extended precision, shape (n, d)."""
    h = np.column_stack([x.double().numpy(), np.ones(len(x))]).astype(np.longdouble)
    return np.where(np.isfinite(h).all(axis=1, keepdims=True), h, 0)


def _exact_whitened(design: Design, x: torch.Tensor) -> np.ndarray:
    """w_i |L^-1 h_i| of the computed L and w by forward substitution in extended precision, shape (n,)."""
    factor, rows = design.metric.factor.numpy().astype(np.longdouble), _exact_rows(x)
    solved = np.zeros_like(rows)
    for column in range(rows.shape[1]):
        known = solved[:, :column] @ factor[column, :column]
        solved[:, column] = (rows[:, column] - known) / factor[column, column]
    return design.weights.numpy() * np.sqrt((solved**2).sum(axis=1))


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_the_bound_is_the_largest_share_of_a_label(seed: int, rounds: int) -> None:
    """Rounded up by less than 1e-9; the weights lower the largest share, and the faults move more than is paid for."""
    x, y = _records(seed)
    design, bound = Design.levelled(x, ridge=0.01, rounds=rounds, level=1.0)
    shares = _exact_whitened(design, x)
    assert shares.max() <= bound <= shares.max() * (1 + 1e-9)
    assert design.weights[6] == shares[6] == 0  # not finite
    assert shares[3] == shares[4] > 0  # the same record twice: each label has its own share
    sums = design.sums(x, y, K)
    moved = []
    for record in range(len(x)):
        other = y.clone()
        other[record] = (y[record] + 1) % K
        difference = (design.sums(x, other, K) - sums).t()
        moved.append(
            float(torch.linalg.solve_triangular(design.metric.factor, difference, upper=False).norm())
        )
    assert moved == pytest.approx(list(2**0.5 * shares), rel=1e-9, abs=1e-14)
    if rounds:
        plain = Design.levelled(x, ridge=0.01, rounds=0, level=1.0)[1]
        assert bound < 0.8 * plain
        forgotten = design.weights.clone()
        forgotten[3] = 1.0
        assert shares[3] / float(design.weights[3]) * float(forgotten[3]) > 1.2 * bound


def _worlds(design: Design, x: torch.Tensor, y: torch.Tensor, record: int) -> list[torch.Tensor]:
    other = y.clone()
    other[record] = (y[record] + 1) % K
    return [design.sums(x, labels, K) for labels in (y, other)]


def _deviation(
    draw: Callable[[torch.Tensor, SeededStream], torch.Tensor],
    worlds: list[torch.Tensor],
    covariance: torch.Tensor,
    seed: int,
) -> float:
    """How far the log-likelihood ratio of simulated releases is from N(mu^2/2, mu^2), in standard errors.

    Args:
        draw: Returns a release of a world's sums.
        worlds: The sums under two labels.
        covariance: Of each class's row, as the release really has it.
        seed: Of the noise.
    """
    n, noise = 20_000, SeededStream(seed, "releases")
    many = torch.cat([worlds[0]] * n)
    released = draw(many, noise) - many
    shift = worlds[0] - worlds[1]
    direction = torch.linalg.solve(covariance, shift.t()).t()
    half = float((direction * shift).sum()) / 2
    ratio = (released.view(n, *shift.shape) * direction).sum(dim=(1, 2)) + half
    of_mean = abs(float(ratio.mean()) - MU**2 / 2) / (MU / n**0.5)
    return max(of_mean, abs(float(ratio.var()) - MU**2) / (MU**2 * (2 / n) ** 0.5))


def test_two_worlds_have_the_stated_law_and_faults_do_not(seed: int) -> None:
    x, y = _records(seed)
    design, bound = Design.levelled(x, ridge=0.01, rounds=1, level=1.0)
    record = int(np.argmax(_exact_whitened(design, x)))
    worlds, factor = _worlds(design, x, y, record), design.metric.factor
    sigma = noise_of(MU, bound)

    def draw(sums: torch.Tensor, noise: SeededStream) -> torch.Tensor:
        return noisy_sums(design, sums, mu=MU, bound=bound, noise=noise)

    assert _deviation(draw, worlds, sigma**2 * factor @ factor.t(), seed) < 5

    forgotten = design.weights.clone()
    forgotten[3] = 1.0
    unweighted = Design(metric=design.metric, weights=forgotten, ridge=design.ridge)
    assert (
        _deviation(draw, _worlds(unweighted, x, y, 3), sigma**2 * factor @ factor.t(), seed) > 10
    )  # the weight of a record forgotten

    turned = Design(metric=Metric(factor=factor.t()), weights=design.weights, ridge=design.ridge)

    def wrong(sums: torch.Tensor, noise: SeededStream) -> torch.Tensor:
        return noisy_sums(turned, sums, mu=MU, bound=bound, noise=noise)

    costs = [
        _deviation(wrong, _worlds(design, x, y, each), sigma**2 * factor.t() @ factor, seed)
        for each in (0, 3, record)
    ]
    assert max(costs) > 10  # noise of L^T Z: another geometry


EXTREME = {
    "huge": lambda x: x * 1e30,
    "tiny": lambda x: x * 1e-30,
    "many scales": lambda x: x * 10.0 ** torch.arange(-12, 9, 3),
    "one record": lambda x: x[:1],
    "constant": lambda x: torch.ones_like(x),
    "zero": lambda x: torch.zeros_like(x),
    "none is finite": lambda x: torch.full_like(x, float("inf")),
    "half precision": lambda x: x.half(),
}


@pytest.mark.parametrize("name", list(EXTREME))
@pytest.mark.parametrize("ridge", [1e-6, 1.0])
def test_extreme_features_stay_within_the_bound(seed: int, name: str, ridge: float) -> None:
    x = EXTREME[name](_records(seed)[0].nan_to_num(nan=0.5))
    design, bound = Design.levelled(x, ridge=ridge, rounds=2, level=0.5)
    shares = _exact_whitened(design, x)
    assert shares.max() <= bound <= shares.max() * (1 + 1e-6) + 1e-9
    sums = design.sums(x, torch.zeros(len(x), dtype=torch.int64), K)
    assert torch.isfinite(
        design.solved(noisy_sums(design, sums, mu=1.0, bound=bound, noise=SeededStream(0, "t")))
    ).all()


def test_a_ridge_that_rounding_may_cancel_is_refused() -> None:
    stated = {"trace": 1.0, "n_records": 60_000, "n_features": 4000}
    assert 1 < whitened_bound(0.1, ridge=1e-6 / 4000, **stated) / 0.1 < 1.01
    with pytest.raises(NoGuarantee, match=r"^trainer\.ridge: .* raise it at least \d+-fold"):
        whitened_bound(0.1, ridge=1e-12, **stated)


def test_lowered_weights_reach_the_level_and_no_further() -> None:
    norms = torch.tensor([0.0, 1.0, 1.0, 5.0], dtype=torch.float64)
    found = lowered(torch.ones(4, dtype=torch.float64), norms, 1.0)
    limit = float(norms.square().mean().sqrt())
    assert (found * norms).tolist() == pytest.approx([0.0, 1.0, 1.0, limit])
    assert lowered(torch.zeros(2), torch.zeros(2), 1.0).tolist() == [0.0, 0.0]
