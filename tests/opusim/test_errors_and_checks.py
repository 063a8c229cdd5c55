"""Errors, checks of arguments, encodings, and p-values against closed forms."""

import math
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from opusim import checks, errors
from opusim.encodings import binarize, bit_planes, check_ternary, split_frames, ternarize
from opusim.files import OwnProcess
from opusim.p_values import (
    bonferroni,
    chi_squared_p_value,
    cosine_p_value,
    decide,
    gamma_p_value,
    normal_p_value,
)
from opusim.training.attacks.mechanism.checks import noise_checks
from tests.opusim.common import refuses
from tests.support.forked import in_forked_process


def test_config_error_is_one_line_and_pickles() -> None:
    error = errors.ConfigError("a.toml", "noise.sigma", "must be positive")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "a.toml: noise.sigma: must be positive"
    assert (again.file, again.key, again.reason) == ("a.toml", "noise.sigma", "must be positive")


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.DeviceTimeout, TimeoutError),
        (errors.DeviceFault, RuntimeError),
        (errors.DeviceBusy, errors.DeviceError),
        (errors.NoiseBelowCertificate, errors.OpusimError),
    ],
)
def test_errors_derive_from_what_a_caller_catches(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)


@pytest.mark.parametrize("good", [1, 0.5, np.float32(2), np.array([1.0, 2.0]), torch.tensor([3.0])])
def test_positive_accepts(good: object) -> None:
    checks.positive(value=good)


@pytest.mark.parametrize("bad", [0, -1.0, np.nan, np.inf, np.array([1.0, 0.0])])
def test_positive_refuses_by_name(bad: object) -> None:
    refuses(ValueError, r"^sigma = .*: .* above 0; lower it$", checks.positive, sigma=bad, remedy="lower it")


def test_checks_name_types_limits_choices_and_shapes() -> None:
    refuses(TypeError, "sigma = 'a': must be a real number, not str", checks.positive, sigma="a")
    refuses(TypeError, "flag = True: must be a real number, not bool", checks.finite, flag=True)
    refuses(TypeError, "n = True: must be an integer, not bool", checks.integer, n=True)
    with pytest.raises(ValueError, match="must be finite") as caught:
        checks.finite(x=np.full(1000, np.nan))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 120
    checks.in_range(0, 1, p=0, q=1)
    checks.integer(n=np.int64(3), minimum=3, maximum=3)
    checks.non_negative(x=0)
    refuses(ValueError, r"p = 1.5: must lie in \[0, 1\]", checks.in_range, 0, 1, p=1.5)
    refuses(ValueError, r"p = nan: must lie in \[0, inf\]", checks.in_range, 0, np.inf, p=np.nan)
    refuses(ValueError, r"n = 2: must be at least 3", checks.integer, n=2, minimum=3)
    checks.choice(("a", "b"), mode="a")
    checks.shape((None, 3), x=np.zeros((7, 3)))
    refuses(ValueError, "mode = 'c': must be one of 'a', 'b'", checks.choice, ("a", "b"), mode="c")
    refuses(TypeError, "x = 1: must be Tensor or ndarray", checks.instance, (torch.Tensor, np.ndarray), x=1)
    for wrong in (np.zeros(3), np.zeros((3, 7)), np.zeros((7, 3, 1))):
        refuses(ValueError, r"x has shape .*: must be \(any, 3\)", checks.shape, (None, 3), x=wrong)


ENDS = {"both": {0, 1}, "left": {0}, "right": {1}, "neither": set()}


@pytest.mark.parametrize(("closed", "allowed"), ENDS.items())
def test_the_ends_of_the_unit_interval(closed: str, allowed: set[int]) -> None:
    checks.in_unit_interval(closed=closed, p=np.array([1e-300, 0.5, 1 - 1e-15]))
    for value in (0, 1, -0.1, 1.1, np.nan):
        if value in allowed:
            checks.in_unit_interval(closed=closed, p=value)
        else:
            refuses(ValueError, r"p = .* in [\[(]0, 1[\])]$", checks.in_unit_interval, closed=closed, p=value)


def test_a_forked_process_is_not_the_process_that_made_an_object() -> None:
    """Neither is a later one to which the system gives the number of an ended one, so that forks count too."""
    made = OwnProcess()
    made.require("the loop")
    assert made.is_this
    found = in_forked_process(lambda: made.require("the loop"))
    assert found.startswith(f"RuntimeError: the loop belongs to process {os.getpid()}, and process")
    assert in_forked_process(lambda: OwnProcess().is_this) == "True"
    assert in_forked_process(lambda: pickle.loads(pickle.dumps(made)).is_this) == "True"

    def with_the_number_of_its_parent(number: int = os.getpid()) -> bool:
        os.getpid = lambda: number  # in the forked process only
        return made.is_this

    assert in_forked_process(with_the_number_of_its_parent) == "False"


REAL = st.floats(-1e6, 1e6, width=32)


@given(values=st.lists(REAL, max_size=20), threshold=st.floats(0, 1e3, width=32))
def test_ternarize_follows_its_rule(values: list[float], threshold: float) -> None:
    naive = [1.0 if v > threshold else -1.0 if v < -threshold else 0.0 for v in values]
    assert ternarize(torch.tensor(values), threshold).tolist() == naive


def test_codes_have_their_sign_and_refuse_by_name() -> None:
    e = torch.tensor([0.27, -0.27, math.inf, -math.inf], dtype=torch.float64)
    code = ternarize(e, 0.27)
    assert code.tolist() == [0, 0, 1, -1]
    assert code.dtype == torch.float32
    refuses(ValueError, "e holds NaN", ternarize, torch.tensor([math.nan]), 0.1)
    refuses(ValueError, r"threshold = -0.1: must be finite and at least 0", ternarize, torch.zeros(1), -0.1)
    refuses(ValueError, "threshold = nan", ternarize, torch.zeros(1), math.nan)
    refuses(TypeError, "complex64: must be real", ternarize, torch.zeros(1, dtype=torch.complex64), 0.1)
    e = 2 * torch.rand(6, 30, generator=torch.Generator().manual_seed(5)) - 1
    assert torch.equal(binarize(e, 0.1), (e > 0.1).float())
    refuses(ValueError, "no binary code", binarize, torch.tensor([math.nan]), 0.0)
    refuses(TypeError, "must be real", binarize, torch.tensor([1j]), 0.0)
    refuses(ValueError, "threshold", binarize, e, math.nan)


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
    assert decoded(torch.tensor([math.inf, -math.inf]), 3).tolist() == [0.875, -0.875]


def test_bit_planes_take_any_shape_and_refuse_by_name() -> None:
    e = 2 * torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(1)) - 1
    digits, _ = bit_planes(e, 5)
    flat, _ = bit_planes(e.flatten(), 5)
    assert torch.equal(digits.flatten(1), flat)
    assert bit_planes(torch.zeros(0, 3), 2)[0].shape == (2, 0, 3)
    assert not decoded(torch.zeros(7), 4).any()
    refuses(ValueError, "e holds NaN", bit_planes, torch.tensor([0.5, math.nan]), 3)
    for planes in (0, 25):
        refuses(ValueError, f"planes = {planes}", bit_planes, e, planes)
    for wrong in (torch.zeros(1, dtype=torch.complex64), torch.tensor([True])):
        refuses(TypeError, "must be real", bit_planes, wrong, 3)


def test_frames_are_binary_and_nan_and_wrapped_bytes_are_named() -> None:
    x = torch.tensor([[-1, 0, 1], [1, 1, -1]], dtype=torch.int8)
    positive, negative = split_frames(x)
    assert torch.equal(positive.to(torch.int8) - negative.to(torch.int8), x)
    assert not torch.any(positive & negative)
    refuses(ValueError, "x holds -2: a device shows -1, 0 or 1", split_frames, x * 2)
    refuses(ValueError, "x holds NaN", check_ternary, torch.tensor([math.nan]))
    refuses(ValueError, "x holds 255.*wrap -1", check_ternary, torch.tensor([255], dtype=torch.uint8))


@pytest.mark.parametrize("bad", [0.5, -2.0, math.inf, -math.inf, 1e-40, 1 + 2**-20])
def test_other_values_are_refused_wherever_they_stand(bad: float) -> None:
    x = torch.zeros(7, 9)
    x[6, 8] = bad
    refuses(ValueError, "encode real values first", check_ternary, x)


def test_cosines_variances_and_normal_deviates_have_their_exact_law() -> None:
    for r in (0.0, 0.1, -0.5, 0.9):
        assert cosine_p_value(r, 3) == pytest.approx(1 - abs(r))  # uniform on the sphere (Archimedes)
        assert cosine_p_value(r, 2) == pytest.approx(1 - 2 * math.asin(abs(r)) / math.pi)
    assert cosine_p_value(1.0, 50) == 0.0
    for total in (0.3, 2.0, 9.0):
        tails = (1 - math.exp(-total / 2), math.exp(-total / 2))  # chi-squared of two degrees
        assert chi_squared_p_value(total, 2) == pytest.approx(2 * min(tails))
    law = stats.gamma(3.7, scale=0.4)
    assert gamma_p_value(0.9, law.mean(), law.var()) == pytest.approx(2 * law.cdf(0.9))
    assert gamma_p_value(2.9, law.mean(), law.var()) == pytest.approx(2 * law.sf(2.9))
    assert normal_p_value(-1.959963985) == pytest.approx(0.05, rel=1e-8) == normal_p_value(1.959963985)
    assert 0 < normal_p_value(35.0) < 1e-260


def test_what_is_no_number_raises_every_alarm() -> None:
    assert bonferroni(0.4, 3) == 1.0
    assert math.isnan(bonferroni(math.nan, 3))
    assert math.isnan(chi_squared_p_value(math.nan, 10))
    assert math.isnan(float(cosine_p_value(math.nan, 10)))
    noise = np.random.default_rng(3).normal(size=(2, 40, 50))
    noise[1, 7, 3] = math.nan
    quiet = [check.name for check in noise_checks(noise) if not math.isnan(check.p_value)]
    assert quiet == []


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_a_property_with_a_statistic_that_is_no_number_does_not_hold(order: tuple[str, str]) -> None:
    p_values = {"a": 0.7, "b": math.nan}
    (found,) = decide({"readings are independent": {name: p_values[name] for name in order}})
    assert not found.holds
