import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opusim.encodings import binarize, bit_planes, check_ternary, split_frames, ternarize

REAL = st.floats(-1e6, 1e6, width=32)


@given(values=st.lists(REAL, max_size=20), threshold=st.floats(0, 1e3, width=32))
def test_ternarize_follows_its_rule(values: list[float], threshold: float) -> None:
    naive = [1.0 if v > threshold else -1.0 if v < -threshold else 0.0 for v in values]
    assert ternarize(torch.tensor(values), threshold).tolist() == naive


def test_the_threshold_itself_gives_zero_and_infinity_a_sign() -> None:
    e = torch.tensor([0.27, -0.27, math.inf, -math.inf], dtype=torch.float64)
    code = ternarize(e, 0.27)
    assert code.tolist() == [0, 0, 1, -1]
    assert code.dtype == torch.float32


def test_ternarize_refuses_by_name() -> None:
    with pytest.raises(ValueError, match="e holds NaN"):
        ternarize(torch.tensor([math.nan]), 0.1)
    with pytest.raises(ValueError, match=r"threshold = -0.1: must be finite and at least 0"):
        ternarize(torch.zeros(1), -0.1)
    with pytest.raises(ValueError, match="threshold = nan"):
        ternarize(torch.zeros(1), math.nan)
    with pytest.raises(TypeError, match=r"e has dtype torch.complex64: must be real"):
        ternarize(torch.zeros(1, dtype=torch.complex64), 0.1)


def test_binarize_follows_its_rule_and_refuses_by_name() -> None:
    e = 2 * torch.rand(6, 30, generator=torch.Generator().manual_seed(5)) - 1
    assert torch.equal(binarize(e, 0.1), (e > 0.1).float())
    with pytest.raises(ValueError, match="no binary code"):
        binarize(torch.tensor([math.nan]), 0.0)
    with pytest.raises(TypeError, match="must be real"):
        binarize(torch.tensor([1j]), 0.0)
    with pytest.raises(ValueError, match="threshold"):
        binarize(e, math.nan)


UNIT = st.floats(-1, 1, width=32)


def decoded(e: torch.Tensor, planes: int) -> torch.Tensor:
    digits, weights = bit_planes(e, planes)
    assert digits.shape == (planes, *e.shape)
    assert set(digits.unique().tolist()) <= {-1.0, 0.0, 1.0}
    assert weights.tolist() == [2.0**-k for k in range(1, planes + 1)]
    return torch.tensordot(weights.double(), digits.double(), dims=1)


@given(values=st.lists(UNIT, max_size=20), planes=st.integers(1, 24))
def test_bit_planes_show_a_number_to_the_last_digit(values: list[float], planes: int) -> None:
    e = torch.tensor(values, dtype=torch.float32)
    error = (decoded(e, planes) - e.double()).abs()
    assert bool((error <= 2.0**-planes).all())


@given(values=st.lists(st.floats(1, 2.0**90, width=32), min_size=1, max_size=5), planes=st.integers(1, 24))
def test_bit_planes_saturate(values: list[float], planes: int) -> None:
    e = torch.tensor([values, [-value for value in values]])
    assert torch.equal(decoded(e, planes), torch.sign(e).double() * (1 - 2.0**-planes))
    assert torch.equal(
        decoded(torch.tensor([math.inf, -math.inf]), 3), torch.tensor([0.875, -0.875]).double()
    )


def test_bit_planes_take_any_shape_and_refuse_by_name() -> None:
    e = 2 * torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(1)) - 1
    digits, _ = bit_planes(e, 5)
    flat, _ = bit_planes(e.flatten(), 5)
    assert torch.equal(digits.flatten(1), flat)
    assert bit_planes(torch.zeros(0, 3), 2)[0].shape == (2, 0, 3)
    assert not decoded(torch.zeros(7), 4).any()
    with pytest.raises(ValueError, match="e holds NaN"):
        bit_planes(torch.tensor([0.5, math.nan]), 3)
    for planes in (0, 25):
        with pytest.raises(ValueError, match=f"planes = {planes}"):
            bit_planes(e, planes)
    for wrong in (torch.zeros(1, dtype=torch.complex64), torch.tensor([True])):
        with pytest.raises(TypeError, match="must be real"):
            bit_planes(wrong, 3)


def test_frames_are_binary_and_their_difference_is_the_vector() -> None:
    x = torch.tensor([[-1, 0, 1], [1, 1, -1]], dtype=torch.int8)
    positive, negative = split_frames(x)
    assert torch.equal(positive.to(torch.int8) - negative.to(torch.int8), x)
    assert not torch.any(positive & negative)
    with pytest.raises(ValueError, match="x holds -2: a device shows -1, 0 or 1"):
        split_frames(x * 2)


@pytest.mark.parametrize("bad", [0.5, -2.0, math.inf, -math.inf, 1e-40, 1 + 2**-20])
def test_other_values_are_refused_wherever_they_stand(bad: float) -> None:
    x = torch.zeros(7, 9)
    x[6, 8] = bad
    with pytest.raises(ValueError, match="encode real values first"):
        check_ternary(x)


def test_nan_and_wrapped_bytes_are_named() -> None:
    with pytest.raises(ValueError, match="x holds NaN"):
        check_ternary(torch.tensor([math.nan]))
    with pytest.raises(ValueError, match=r"x holds 255.*unsigned integers wrap -1"):
        check_ternary(torch.tensor([255], dtype=torch.uint8))
