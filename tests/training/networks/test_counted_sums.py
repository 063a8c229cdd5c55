"""Sums of clipped contributions round by at most what the noise of a release counts, in whatever order they are added.

`one_after_another` is the worst machine that the bound allows: it adds float32 products in a row, and rounds each time.
Numbers are chosen so that it rounds to the same side again and again.
"""

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from opusim.randomness.streams import noise_stream
from opusim.training.data.samplers import most_records
from opusim.training.networks.clipping import MOST_RECORDS, SUM_ERROR, CountedSums, bounded_factors
from opusim.training.networks.contributions import sums, uses
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.networks.contributions.uses import NOWHERE, ConvolutionUse, LinearUse
from opusim.training.networks.record_gradients.tape import RecordTape
from opusim.training.protections.record import RecordGradients, require_counted_sums
from tests.support.record_models import Custom

MANY = 2330


def one_after_another(self: LinearUse, delta: Tensor, h: Tensor, into: Any = NOWHERE) -> list[Tensor]:
    """The products of a linear map in the precision of its signals, added in the order of the records."""
    signals, inputs = delta.flatten(0, 1).numpy(), h.flatten(0, 1).numpy()
    terms = signals[:, :, None] * inputs[:, None, :]
    terms = np.concatenate([np.zeros_like(terms, shape=(1, *terms.shape[1:])), terms])  # for no record
    return [torch.from_numpy(np.cumsum(terms, axis=0, dtype=terms.dtype)[-1].copy())]


def along(share: float, binade: int) -> float:
    """1 and a part of the last place of numbers from 2^binade on, which a sum in this range loses in every addition."""
    return 1.0 + share * 2.0 ** (binade - 23)


def contributions(values: Tensor) -> Contributions:
    """Records of one number each, which all go the same way."""
    weight, n = nn.Parameter(torch.zeros(1, 1)), len(values)
    return Contributions([([weight], [LinearUse(values[:, None], torch.ones(n, 1), weight)])], n)


def error_of(values: Tensor, block: int | None) -> Fraction:
    """How far the sum is from the exact one, for a clip that takes no part."""
    found = contributions(values)
    ((_, total),) = found.totals(torch.ones_like(found.squared_norms()), block=block)
    return abs(Fraction(float(total)) - sum(map(Fraction, values.tolist())))


@pytest.mark.parametrize("records", [1, 256, 409, 410, MANY, 5000])
@pytest.mark.parametrize("binade", [6, 8, 9, 10, 11])
def test_the_worst_order_stays_within(records: int, binade: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearUse, "products", one_after_another)
    counted = CountedSums.of(records, processes=1)
    values = torch.full((records,), along(0.49, binade))
    assert 2 * error_of(values, counted.block) <= counted.error
    values[::3] *= -1  # and parts that cancel
    assert 2 * error_of(values, counted.block) <= counted.error


@pytest.mark.parametrize(("block", "binade"), [(None, 10), (MANY // 2, 9)])
def test_longer_blocks_do_not(block: int | None, binade: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted faults: one sum, as without a release, and blocks of half the records."""
    monkeypatch.setattr(LinearUse, "products", one_after_another)
    values = torch.full((MANY,), along(0.49, binade))
    assert 2 * error_of(values, block) > CountedSums.of(MANY, processes=1).error


def test_blocks_are_as_long_as_the_error_allows() -> None:
    """Up to 579 records are one sum; the error is the bound of the theorem, for two neighbouring batches."""
    assert CountedSums.of(409, processes=1).block == 409
    stated = {256: 0.018, 1024: 0.039, 4096: 0.002}  # in docs/privacy-records.md
    for expected, error in stated.items():
        most = most_records(float(expected), records=60_000, processes=1)
        assert CountedSums.of(most, processes=1).error == pytest.approx(error, abs=5e-4)
    for records, processes in ((256, 1), (1220, 1), (3000, 1), (300, 4)):
        counted = CountedSums.of(records, processes=processes)
        terms = counted.block + math.ceil(records / counted.block)
        least = 2 * records * processes * (terms + 2) * 2.0**-24
        assert least < counted.error < 1.05 * least + 3e-3
        assert counted.error <= 0.06
    assert CountedSums.of(10_000, processes=1).block == 0
    assert CountedSums.of(10_000, processes=1).error < 0.013


def layers(records: int) -> Iterator[tuple[str, Contributions, Tensor]]:
    """Kinds of layers with extreme records, and the exact sum of what each record contributes, at C = 1."""
    generator = torch.Generator().manual_seed(5)
    sizes = 2.0 ** (torch.arange(records) % 80 - 40.0)  # factors bring all of them to the clip, or below
    same = torch.randn(24, generator=generator)
    inputs = torch.randn(1, 40, generator=generator) * sizes.sqrt()[:, None]
    weight, bias = nn.Parameter(torch.zeros(24, 40)), nn.Parameter(torch.zeros(24))
    delta = same * sizes.sqrt()[:, None]
    found = Contributions([([weight, bias], [LinearUse(delta, inputs, weight, bias)])], records)
    rows = torch.cat([delta[:, :, None] * inputs.double()[:, None, :], delta.double()[:, :, None]], dim=2)
    yield "one position", found, rows.flatten(1)
    base = torch.rand(1, 1, 40, generator=generator) + 0.5
    towards = torch.randn(records, 1, 40, generator=generator) / 8
    pairs = torch.cat([1e5 * base + towards, (1e5 * base).expand(records, -1, -1)], dim=1)
    signals = torch.stack([same, -same]).expand(records, -1, -1).contiguous()
    found = Contributions([([weight], [LinearUse(signals, pairs, weight)])], records)
    rows = torch.einsum("ipa,ipb->iab", signals.double(), pairs.double())
    yield "positions that cancel", found, rows.flatten(1)
    kernel = nn.Parameter(torch.zeros(4, 3, 2, 2))
    images = torch.randn(records, 3, 6, 6, generator=generator) * sizes[:, None, None, None]
    outer = torch.randn(1, 4, 5, 5, generator=generator).expand(records, -1, -1, -1).contiguous()
    options = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    use = ConvolutionUse(outer, images, kernel, None, options)
    found = Contributions([([kernel], [use])], records)
    yield "gradients that are formed", found, use.rows(slice(None))[0].double().flatten(1)


@pytest.mark.parametrize(("records", "each"), [(25, 20), (200, 20), (100, 2)])
def test_users_stay_within_it(records: int, each: int) -> None:
    """Gradients of users are formed if k is large enough, and added in float32; against a float64 loop over users."""
    generator = torch.Generator().manual_seed(4)
    weight, bias = nn.Parameter(torch.zeros(24, 40)), nn.Parameter(torch.zeros(24))
    delta = torch.randn(records, each, 24, generator=generator)
    delta[::5, 1::2] = -delta[::5, :1]  # users whose records nearly cancel
    inputs = torch.rand(records, each, 40, generator=generator) + 1
    found = Contributions([([weight, bias], [LinearUse(delta, inputs, weight, bias)])], records)
    counted = CountedSums.of(records, processes=1)
    factors = bounded_factors(found.squared_norms().sum(dim=0).sqrt(), 1.0)
    totals = found.totals(factors.expand(1, -1), block=counted.block)
    assert totals[0][1].dtype == (torch.float32 if each == 20 else torch.float64)
    wanted, longest = torch.zeros(24, 41, dtype=torch.float64), 0.0
    for own, signal, h in zip(factors, delta.double(), inputs.double(), strict=True):
        gradient = torch.cat([signal.T @ h, signal.sum(dim=0)[:, None]], dim=1)
        wanted += float(own) * gradient
        longest = max(longest, float(own * gradient.norm()))
    assert 0.999 < longest <= 1 + 1e-6
    total = torch.cat([totals[0][1], totals[1][1][:, None]], dim=1).double()
    formed = records * each * 2.0**-24 * float(delta.norm(dim=2).max() * inputs.norm(dim=2).max())
    assert float((total - wanted).norm()) <= counted.error / 2 + formed


@pytest.mark.parametrize("records", [256, 1220, 3600])
def test_layers_stay_within_it_on_this_machine(records: int) -> None:
    """Against float64 sums of the contributions; a factor that rounds to float32 is no error of the sum."""
    counted = CountedSums.of(records, processes=1)
    for kind, found, rows in layers(records):
        factors = bounded_factors(found.squared_norms().sum(dim=0).sqrt(), 1.0)
        own = factors if kind == "positions that cancel" else factors.float().double()
        wanted = (own[:, None] * rows).sum(dim=0)
        totals = found.totals(factors.expand(1, -1), block=counted.block)
        total = torch.cat([p.double().reshape(len(p), -1) for _, p in totals], dim=1).flatten()
        assert float((total - wanted).norm()) <= counted.error / 2 + records * 2.0**-24, kind


def released_noise(parts: list[Tensor], counted: CountedSums | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The noise's standard deviation of a step, and the blocks in which its parts were added."""
    drawn: list[float] = []
    noise = noise_stream("release", None, "central-noise")
    monkeypatch.setattr(noise, "add_rounded", lambda gradient, std: drawn.append(std) or gradient)
    writer = RecordGradients(clip_norm=0.5, noise_multiplier=3.0, divisor=8.0, noise=noise, counted=counted)
    blocks: list[int | None] = []
    totals = Contributions.totals

    def seen(self: Contributions, factors: Tensor, into: Any = NOWHERE, block: int | None = None) -> Any:
        blocks.append(block)
        return totals(self, factors, into, block)

    monkeypatch.setattr(Contributions, "totals", seen)
    writer.set_gradients(contributions(values) for values in parts)
    return drawn[0], blocks


def test_the_noise_of_a_release_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of records; those beyond the public number are added in float64."""
    counted = CountedSums.of(1000, processes=1)
    assert counted.error > 0.02  # so that a noise that leaves it out is another number
    for sizes, wanted in (
        ([0], [counted.block]),
        ([400, 600], [counted.block] * 2),
        ([400, 601], [counted.block, 0]),
        ([1001], [0]),
    ):
        found, blocks = released_noise([torch.ones(n) for n in sizes], counted, monkeypatch)
        assert found == pytest.approx(3.0 * 0.5 * (1 + counted.error), rel=1e-12)
        assert blocks == wanted
        monkeypatch.undo()
    assert released_noise([torch.ones(1001)], None, monkeypatch) == (1.5, [None])


@pytest.mark.parametrize("records", [11, 1000, 4472])
def test_more_records_than_are_counted_stay_within_it(records: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sum is not rounded before it has its noise; in float32 one record more would move it by too much."""
    counted, clip = CountedSums.of(records, processes=1), along(2.0**11, 0)
    noise = noise_stream("release", None, "central-noise")
    sums: list[Tensor] = []
    monkeypatch.setattr(noise, "add_rounded", lambda total, std: sums.append(total.clone()) or total)
    writer = RecordGradients(clip_norm=clip, noise_multiplier=1.0, divisor=8.0, noise=noise, counted=counted)
    for number in range(2**16 - 60, 2**16 - 40):
        writer.set_gradients([contributions(torch.full((number,), 2.0))])
    moves = [float(after - before) / clip for before, after in itertools.pairwise(sums)]
    assert max(abs(move - 1) for move in moves) < counted.error
    rounded = [float(after.float() - before.float()) / clip for before, after in itertools.pairwise(sums)]
    assert max(abs(move - 1) for move in rounded) > CountedSums.of(4472, processes=1).error


# Products that cancel, of several uses of a weight or at several positions. With W (x + d) - W x a record's gradient
# is delta d^T, and the sums of the uses over the batch are larger by |x| / |d|; in float32 their rounding moved the
# clipped sum by up to 124 C.

INPUTS, OUTPUTS, CLIP = 64, 16, 1.0


def linear() -> nn.Module:
    return nn.Linear(INPUTS, OUTPUTS, bias=False)


def twice() -> nn.Module:
    """W (x + d) - W x by two uses of W."""
    return Custom(lambda m, x: m.w(x[:, 0]) - m.w(x[:, 1]), w=linear())


def stacked() -> nn.Module:
    """The same by one use at two positions."""
    return Custom(lambda m, x: (both := m.w(x))[:, 0] - both[:, 1], w=linear())


def convolved() -> nn.Module:
    """The same by a convolution over two positions."""
    weight = nn.Conv1d(INPUTS, OUTPUTS, 1, bias=False)
    return Custom(lambda m, x: (both := m.w(x.mT))[..., 0] - both[..., 1], w=weight)


def recurrent() -> nn.Module:
    """The same by sixty-four uses of W."""
    return Custom(lambda m, x: sum(m.w(x[:, 0]) - m.w(x[:, 1]) for _ in range(32)) / 32, w=linear())


def pairs(records: int, ratio: float, kind: torch.dtype = torch.float32) -> Tensor:
    """x + d and x for each record, |d| about 1 and |x| about ratio times that, numbers that `kind` holds."""
    generator = torch.Generator().manual_seed(3)
    base = torch.rand(INPUTS, generator=generator) + 0.5
    x = torch.empty(records, 2, INPUTS)
    x[:, 1] = ratio * base * (1 + 0.1 * torch.rand(records, 1, generator=generator))
    x[:, 0] = x[:, 1] + torch.randn(records, INPUTS, generator=generator) / 8
    return x.to(kind).float()


SIGNAL = torch.ones(OUTPUTS) / 4  # the gradient at each record's output, of norm 1


def error_of_uses(build: Any, x: Tensor, *, autocast: bool = False) -> float:
    """How far the clipped sum is from the exact sum of the records' clipped gradients, in units of C."""
    torch.manual_seed(0)
    model = build()
    tape = RecordTape(model, torch.randn(7, 2, INPUTS))
    with tape.recording(len(x)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = model(x)
        (outputs.float() @ SIGNAL).sum().backward()
    factors = bounded_factors(tape.squared_norms().sum(dim=0).sqrt(), CLIP)
    tape.clip(CLIP)
    differences = x[:, 0].double() - x[:, 1].double()
    norms = differences.norm(dim=1)  # of delta d^T, for |delta| = 1
    assert float((factors * norms).max()) <= CLIP * (1 + 1e-6)
    wanted = torch.outer(SIGNAL.double(), factors @ differences)
    return float((model.w.weight.grad.double().view_as(wanted) - wanted).norm()) / CLIP


@pytest.mark.parametrize(
    ("build", "ratio", "records"),
    [(twice, 1e2, 4096), (twice, 1e4, 4096), (twice, 1e6, 4096), (twice, 1e5, 256), (recurrent, 1e4, 256)],
)
def test_several_uses_round_by_what_the_noise_counts(build: Any, ratio: float, records: int) -> None:
    """Half of `SUM_ERROR` for each of two neighbouring batches."""
    assert error_of_uses(build, pairs(records, ratio)) <= SUM_ERROR / 2


@pytest.mark.parametrize("build", [twice, stacked, convolved])
def test_mixed_precision_counts_as_much(build: Any) -> None:
    """Inputs that bfloat16 holds; signals are then recorded in bfloat16, and their products in float64."""
    x = pairs(1024, 1e3, torch.bfloat16)
    assert error_of_uses(build, x, autocast=True) <= SUM_ERROR / 2


@pytest.mark.parametrize("build", [stacked, convolved])
@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e6])
def test_positions_that_cancel_round_less_than_the_stated_sum(build: Any, ratio: float) -> None:
    """The page states n^2 2^-24 C for records whose products do not cancel."""
    records = 1024
    assert error_of_uses(build, pairs(records, ratio)) <= records**2 * 2.0**-24


@pytest.mark.parametrize("build", [twice, stacked, convolved])
def test_float32_sums_would_not(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault is what was done before."""
    totals_of: Any = uses.OuterUse.totals_of.__func__  # type: ignore[attr-defined]

    def float32(cls: type, found: Any, into: Any = uses.NOWHERE, block: int | None = None) -> Any:
        return totals_of(cls, found, into)

    monkeypatch.setattr(uses.OuterUse, "totals_of", classmethod(float32))
    monkeypatch.setattr(sums, "CANCELLED", 2.0**-20)
    monkeypatch.setattr(uses, "MILD", 0.0)
    monkeypatch.setattr(uses, "_GRAM_RAISES", 0.0)  # Gram matrices in float32 bound the cancelling, too
    assert error_of_uses(build, pairs(1024, 1e5)) > 0.1


@pytest.mark.parametrize(("build", "several"), [(twice, True), (stacked, False), (recurrent, True)])
def test_the_noise_counts_the_sums_error(build: Any, several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For batches without records, too, and for batches in parts."""
    drawn: list[float] = []
    noise = noise_stream("experiment", 1, "central-noise")
    monkeypatch.setattr(noise, "add_rounded", lambda gradient, std: drawn.append(std) or gradient)
    writer = RecordGradients(clip_norm=0.5, noise_multiplier=3.0, divisor=8.0, noise=noise)
    model = build()
    tape = RecordTape(model, torch.randn(7, 2, INPUTS))
    assert tape.several_uses is several

    def recorded(x: Tensor) -> RecordTape:
        with tape.recording(len(x)):
            if len(x):
                model(x).sum().backward()
        return tape

    for batch in ([pairs(8, 1.0)], [pairs(0, 1.0)], [pairs(4, 1.0), pairs(3, 1.0)]):
        writer.set_gradients(recorded(x).contributions for x in batch)
    wanted = 3.0 * 0.5 * (1.01 if several else 1.0)  # of the sum, before the divisor
    assert drawn == pytest.approx([wanted] * len(drawn), rel=1e-12)
    assert len(drawn) == 3


def test_more_records_than_the_sums_error_is_proven_for_are_refused() -> None:
    tape, most = RecordTape(twice(), torch.randn(7, 2, INPUTS)), MOST_RECORDS // 4
    require_counted_sums(tape, most, processes=2, name="batch_size")
    with pytest.raises(ValueError, match=f"batch_size = {most + 1}: a parameter .* is used several times"):
        require_counted_sums(tape, most + 1, processes=2, name="batch_size")
