"""Releases of labels: a noisy linear model, label readings, randomized response; laws, prices, posteriors."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Guarantee, Status, Unit
from opusim.accounting.mechanisms.labels import (
    LabelReadout,
    keep_probability,
    label_distance,
    noise_of,
    reading_log_likelihood,
    respond,
    response_log_likelihood,
)
from opusim.randomness.streams import SeededStream
from opusim.training.protections.noisy_labels import NoisyLabels
from opusim.training.protections.released_model import Design, LabelSums, lowered
from tests.oracles.label_readings import label_readout_mu

K = 4
MU = 1.5


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


def _squares(rows: np.ndarray) -> list[Fraction]:
    """The exact squared norms of rows."""
    return [sum((Fraction(float(x)) ** 2 for x in row), Fraction(0)) for row in rows]


def _shares(design: Design, x: torch.Tensor) -> np.ndarray:
    """The rows a_i that a label adds to the sums, read off sums of a data set with that label only, shape (n, d)."""
    n = len(x)
    return design.label_sums(x, torch.arange(n), n).by_class.numpy()


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_the_bound_is_the_largest_share_of_a_label(seed: int, rounds: int) -> None:
    """Exact, rounded up by less than 1e-12; the weights lower the largest share, and a forgotten one moves more."""
    x, y = _records(seed)
    design = Design.levelled(x, ridge=0.01, rounds=rounds, level=1.0)
    sums, rows, shares = design.label_sums(x, y, K), _shares(design, x), _exact_whitened(design, x)
    largest = max(_squares(rows))
    assert largest <= Fraction(sums.largest) ** 2 <= largest * Fraction(1 + 1e-12)
    assert np.sqrt((rows**2).sum(axis=1)) == pytest.approx(shares.astype(float), rel=1e-9, abs=1e-9)
    assert design.weights[6] == shares[6] == 0  # not finite
    assert shares[3] == shares[4] > 0  # the same record twice: each label has its own share
    for record in range(len(x)):  # what a label moves is its row, to the last digit
        other = y.clone()
        other[record] = (y[record] + 1) % K
        moved = (design.label_sums(x, other, K).by_class - sums.by_class).numpy()
        assert np.array_equal(moved[other[record]], rows[record])
        assert np.array_equal(moved[y[record]], -rows[record])
    if rounds:
        plain = Design.levelled(x, ridge=0.01, rounds=0, level=1.0).label_sums(x, y, K).largest
        assert sums.largest < 0.8 * plain
        forgotten = design.weights.clone()
        forgotten[3] = 1.0
        assert shares[3] / float(design.weights[3]) * float(forgotten[3]) > 1.2 * sums.largest


def test_the_largest_share_may_be_in_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are read a block at a time: every block's largest row counts, not the last block's, the fault."""
    monkeypatch.setattr("opusim.training.protections.released_model._ROWS", 16)
    x, y = _records(0)
    design = Design.levelled(x, ridge=0.01, rounds=0, level=1.0)
    rows = _squares(_shares(design, x))
    assert int(np.argmax(rows)) < 16
    assert max(rows[48:]) < max(rows) * Fraction(3, 4)  # the last block
    largest = Fraction(design.label_sums(x, y, K).largest) ** 2
    assert max(rows) <= largest <= max(rows) * Fraction(1 + 1e-12)


@pytest.mark.parametrize("count", [60, 5000])
def test_shares_lie_on_the_lattice_of_all_records(count: int) -> None:
    """Rows are multiples of a step that sums of all records need, so that no order of additions rounds."""
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    design = Design.levelled(x, ridge=0.01, rounds=0, level=1.0)
    sums = design.label_sums(x, torch.arange(count) % K, K)
    steps = sums.by_class * 2.0 ** (50 - count.bit_length())  # entries up to 2 are below 2^52 / count steps
    assert torch.equal(steps, steps.round())


def test_the_model_is_that_of_the_unwhitened_sums(seed: int) -> None:
    """Without noise W = S^-1 sum_i w_i h_i (e(y_i) - 1 / k)^T."""
    x, y = _records(seed)
    design = Design.levelled(x, ridge=0.01, rounds=1, level=1.0)
    sums = design.label_sums(x, y, K)
    expected = design.solved(design.sums(x, y, K))
    assert torch.allclose(design.model(sums.by_class, sums.total), expected, rtol=1e-8, atol=1e-8)


def _deviation(sums: LabelSums, other: LabelSums, sigma: float, seed: int) -> float:
    """How far the log-likelihood ratio of simulated releases is from N(mu^2/2, mu^2), in standard errors."""
    n = 20_000
    many = sums.by_class.expand(n, *sums.by_class.shape)
    released = SeededStream(seed, "releases").rounded(many.numel(), sigma).added_to(many) - many
    shift = sums.by_class - other.by_class
    ratio = ((released * shift).sum(dim=(1, 2)) + shift.square().sum() / 2) / sigma**2
    of_mean = abs(float(ratio.mean()) - MU**2 / 2) / (MU / n**0.5)
    return max(of_mean, abs(float(ratio.var()) - MU**2) / (MU**2 * (2 / n) ** 0.5))


def test_two_worlds_have_the_stated_law_and_faults_do_not(seed: int) -> None:
    x, y = _records(seed)
    design = Design.levelled(x, ridge=0.01, rounds=1, level=1.0)

    def worlds(design: Design, record: int) -> tuple[LabelSums, LabelSums]:
        other = y.clone()
        other[record] = (y[record] + 1) % K
        return design.label_sums(x, y, K), design.label_sums(x, other, K)

    largest = int(np.argmax(_exact_whitened(design, x)))
    first, second = worlds(design, largest)
    sigma = noise_of(MU, first.largest)
    assert _deviation(first, second, sigma, seed) < 5
    assert _deviation(first, second, 0.9 * sigma, seed) > 10  # less noise
    forgotten = design.weights.clone()
    forgotten[3] = 1.0
    unweighted = Design(metric=design.metric, weights=forgotten, ridge=design.ridge)
    assert _deviation(*worlds(unweighted, 3), sigma, seed) > 10  # the weight of a record forgotten
    plain = Design.levelled(x, ridge=0.01, rounds=0, level=1.0)
    shares = _exact_whitened(plain, x).astype(float)
    furthest = worlds(plain, int(np.argmax(shares)))
    percentile = noise_of(MU, float(np.quantile(shares, 0.95)))
    assert _deviation(*furthest, noise_of(MU, shares.max()), seed) < 5
    assert _deviation(*furthest, percentile, seed) > 10  # not the largest share


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
@pytest.mark.parametrize("ridge", [1e-12, 1e-6, 1.0])
def test_extreme_features_stay_within_the_bound(seed: int, name: str, ridge: float) -> None:
    """The bound is about the rows as computed, so that no ridge is too small for it."""
    x = EXTREME[name](_records(seed)[0].nan_to_num(nan=0.5))
    design = Design.levelled(x, ridge=ridge, rounds=2, level=0.5)
    y = torch.zeros(len(x), dtype=torch.int64)
    sums, rows = design.label_sums(x, y, K), _shares(design, x)
    assert max(_squares(rows)) <= Fraction(sums.largest) ** 2
    total = [sum((Fraction(float(value)) for value in column), Fraction(0)) for column in rows.T]
    assert [Fraction(float(value)) for value in sums.by_class[0]] == total
    noise = SeededStream(0, "t").rounded(sums.by_class.numel(), noise_of(1.0, sums.largest) or 1.0)
    assert torch.isfinite(design.model(noise.added_to(sums.by_class), sums.total)).all()


def test_lowered_weights_reach_the_level_and_no_further() -> None:
    norms = torch.tensor([0.0, 1.0, 1.0, 5.0], dtype=torch.float64)
    found = lowered(torch.ones(4, dtype=torch.float64), norms, 1.0)
    limit = float(norms.square().mean().sqrt())
    assert (found * norms).tolist() == pytest.approx([0.0, 1.0, 1.0, limit])
    assert lowered(torch.zeros(2), torch.zeros(2), 1.0).tolist() == [0.0, 0.0]


def _only(mechanism: LabelReadout, delta: float = 1e-5) -> Guarantee:
    (guarantee,) = guarantees([mechanism], delta=delta)
    return guarantee


def test_log_likelihood_ratio_has_the_law_of_mu(seed: int) -> None:
    """Mean and variance under the worst pair; a planted second, uncounted reading is caught."""
    generator = np.random.default_rng(seed)
    codes, sigmas = [generator.standard_normal((4, 2)), generator.standard_normal((6, 2))], [2.0, 3.0]
    mu, n = label_readout_mu(codes, sigmas), 40_000
    assert label_distance(codes[0]) == pytest.approx(label_readout_mu(codes[:1], [1.0]))
    pairs = zip(codes, sigmas, strict=True)
    readings = [code[:, 0] + sigma * generator.standard_normal((n, len(code))) for code, sigma in pairs]
    likelihood = reading_log_likelihood(readings, codes, sigmas)
    ratio = likelihood[:, 0] - likelihood[:, 1]

    def deviation(claimed: float) -> float:
        of_mean = abs(ratio.mean() - claimed**2 / 2) / (claimed / n**0.5)
        return max(of_mean, abs(ratio.var() - claimed**2) / (claimed**2 * (2 / n) ** 0.5))

    assert deviation(mu) < 5
    assert deviation(label_readout_mu(codes[:1], sigmas[:1])) > 10


def test_a_mu_and_a_response_attain_their_epsilon() -> None:
    guarantee = _only(LabelReadout(mu=0.719))
    assert guarantee.epsilon == pytest.approx(3.0, abs=5e-3)
    assert (guarantee.unit, guarantee.status) == (Unit.LABEL, Status.PROVEN)
    likelihood = np.exp(response_log_likelihood(np.arange(10), epsilon=1.3, n_labels=10))
    np.testing.assert_allclose(likelihood.sum(axis=0), 1.0)
    assert np.log(likelihood.max() / likelihood.min()) == pytest.approx(1.3)
    assert keep_probability(0.0, 4) == 0.25


def test_posterior_is_bayes_rule_by_hand() -> None:
    """Prior (0.7, 0.3), likelihoods 1 : 4, posterior 7 : 12, by the code that trains; flat at first."""
    labels = NoisyLabels(log_likelihood=torch.tensor([[0.1, 0.4]]).log(), flat_steps=1)
    logits = torch.tensor([[0.7, 0.3]]).log() + 5.0  # a constant added to a row changes nothing
    flat, informed = (labels.targets(logits, torch.tensor([0]), step) for step in (0, 1))
    np.testing.assert_allclose(flat, [[1 / 5, 4 / 5]], rtol=1e-6)
    np.testing.assert_allclose(informed, [[7 / 19, 12 / 19]], rtol=1e-6)


def test_reading_likelihood_equals_the_gaussian_density(seed: int) -> None:
    generator = np.random.default_rng(seed)
    code, reading = generator.standard_normal((5, 3)), generator.standard_normal((4, 5))
    likelihood = reading_log_likelihood([reading], [code], [1.7])
    density = np.array([[-np.sum((r - b) ** 2) / (2 * 1.7**2) for b in code.T] for r in reading])
    difference = likelihood - density
    np.testing.assert_allclose(difference, np.repeat(difference[:, :1], 3, axis=1), atol=1e-12)


def test_responses_follow_the_law(seed: int) -> None:
    """Frequencies of all pairs, five standard errors over the family; epsilon off by 10 % is caught."""
    generator = np.random.default_rng(seed)
    n, k, epsilon = 200_000, 4, 1.0
    answers = (respond(np.full(n, a), epsilon=epsilon, n_labels=k, generator=generator) for a in range(k))
    frequencies = np.stack([np.bincount(found, minlength=k) / n for found in answers])

    def deviation(claimed: float) -> float:
        law = np.exp(response_log_likelihood(np.arange(k), epsilon=claimed, n_labels=k)).T
        return float(np.max(np.abs(frequencies - law) / np.sqrt(law * (1 - law) / n)))

    assert deviation(epsilon) < 5.5
    assert deviation(1.1 * epsilon) > 10


@pytest.mark.parametrize("labels", [np.array([0, 4]), np.array([-1]), np.array([0.5])])
def test_labels_out_of_range_are_refused(labels: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"labels: must be integers in \[0, 4\)"):
        respond(labels, epsilon=1.0, n_labels=4, generator=np.random.default_rng(0))
