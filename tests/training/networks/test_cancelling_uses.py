"""Products that cancel, of several uses of a weight or at several positions, are summed over a batch within the clip.

With W (x + d) - W x a record's gradient is delta d^T, and the sums of the uses over the batch are larger by |x| / |d|.
In float32 their rounding alone moved the clipped sum by up to 124 C.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opusim.randomness.streams import noise_stream
from opusim.training.networks.clipping import MOST_RECORDS, SUM_ERROR, bounded_factors
from opusim.training.networks.contributions import sums, uses
from opusim.training.networks.record_gradients.tape import RecordTape
from opusim.training.protections.record import RecordGradients, require_counted_sums
from tests.support.record_models import Custom

INPUTS, OUTPUTS, CLIP = 64, 16, 1.0


def twice() -> nn.Module:
    """W (x + d) - W x by two uses of W."""
    return Custom(lambda m, x: m.w(x[:, 0]) - m.w(x[:, 1]), w=nn.Linear(INPUTS, OUTPUTS, bias=False))


def stacked() -> nn.Module:
    """The same by one use at two positions."""
    return Custom(lambda m, x: (both := m.w(x))[:, 0] - both[:, 1], w=nn.Linear(INPUTS, OUTPUTS, bias=False))


def convolved() -> nn.Module:
    """The same by a convolution over two positions."""
    return Custom(
        lambda m, x: (both := m.w(x.mT))[..., 0] - both[..., 1], w=nn.Conv1d(INPUTS, OUTPUTS, 1, bias=False)
    )


def recurrent() -> nn.Module:
    """The same by sixty-four uses of W."""
    return Custom(
        lambda m, x: sum(m.w(x[:, 0]) - m.w(x[:, 1]) for _ in range(32)) / 32,
        w=nn.Linear(INPUTS, OUTPUTS, bias=False),
    )


def pairs(records: int, ratio: float, kind: torch.dtype = torch.float32) -> Tensor:
    """x + d and x for each record, |d| about 1 and |x| about ratio times that, numbers that `kind` holds."""
    generator = torch.Generator().manual_seed(3)
    base = torch.rand(INPUTS, generator=generator) + 0.5
    x = torch.empty(records, 2, INPUTS)
    x[:, 1] = ratio * base * (1 + 0.1 * torch.rand(records, 1, generator=generator))
    x[:, 0] = x[:, 1] + torch.randn(records, INPUTS, generator=generator) / 8
    return x.to(kind).float()


SIGNAL = torch.ones(OUTPUTS) / 4  # the gradient at each record's output, of norm 1


def error_of(build: Any, x: Tensor, *, autocast: bool = False) -> float:
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
    assert error_of(build, pairs(records, ratio)) <= SUM_ERROR / 2


@pytest.mark.parametrize("build", [twice, stacked, convolved])
def test_mixed_precision_counts_as_much(build: Any) -> None:
    """Inputs that bfloat16 holds; signals are then recorded in bfloat16, and their products in float64."""
    x = pairs(1024, 1e3, torch.bfloat16)
    assert error_of(build, x, autocast=True) <= SUM_ERROR / 2


@pytest.mark.parametrize("build", [stacked, convolved])
@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e6])
def test_positions_that_cancel_round_less_than_the_stated_sum(build: Any, ratio: float) -> None:
    """The page states n^2 2^-24 C for records whose products do not cancel."""
    records = 1024
    assert error_of(build, pairs(records, ratio)) <= records**2 * 2.0**-24


@pytest.mark.parametrize("build", [twice, stacked, convolved])
def test_float32_sums_would_not(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault is what was done before."""

    totals_of: Any = uses.OuterUse.totals_of.__func__  # type: ignore[attr-defined]

    def float32(
        cls: type, found: Any, into: Any = uses.NOWHERE, block: int | None = None
    ) -> list[list[Tensor]]:
        summed: list[list[Tensor]] = totals_of(cls, found, into)
        return summed

    monkeypatch.setattr(uses.OuterUse, "totals_of", classmethod(float32))
    monkeypatch.setattr(sums, "CANCELLED", 2.0**-20)
    monkeypatch.setattr(uses, "MILD", 0.0)
    monkeypatch.setattr(uses, "_GRAM_RAISES", 0.0)  # Gram matrices in float32 bound the cancelling, too
    assert error_of(build, pairs(1024, 1e5)) > 0.1


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
    model = twice()
    tape = RecordTape(model, torch.randn(7, 2, INPUTS))
    most = MOST_RECORDS // 4
    require_counted_sums(tape, most, processes=2, name="batch_size")
    with pytest.raises(
        ValueError, match=f"batch_size = {most + 1}: a parameter of the module is used several times"
    ):
        require_counted_sums(tape, most + 1, processes=2, name="batch_size")
