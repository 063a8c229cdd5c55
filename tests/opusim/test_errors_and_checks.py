import os
import pickle

import numpy as np
import pytest
import torch

from opusim import checks, errors
from opusim.files import OwnProcess
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
    with pytest.raises(ValueError, match=r"^sigma = .*: must be finite and above 0; lower it$"):
        checks.positive(sigma=bad, remedy="lower it")


def test_type_is_told_apart_from_value() -> None:
    with pytest.raises(TypeError, match="sigma = 'a': must be a real number, not str"):
        checks.positive(sigma="a")
    with pytest.raises(TypeError, match="flag = True: must be a real number, not bool"):
        checks.finite(flag=True)
    with pytest.raises(TypeError, match="n = True: must be an integer, not bool"):
        checks.integer(n=True)


def test_limits_belong_to_the_range() -> None:
    checks.in_range(0, 1, p=0, q=1)
    checks.integer(n=np.int64(3), minimum=3, maximum=3)
    checks.non_negative(x=0)
    with pytest.raises(ValueError, match=r"p = 1.5: must lie in \[0, 1\]"):
        checks.in_range(0, 1, p=1.5)
    with pytest.raises(ValueError, match=r"p = nan: must lie in \[0, inf\]"):
        checks.in_range(0, np.inf, p=np.nan)
    with pytest.raises(ValueError, match=r"n = 2: must be at least 3"):
        checks.integer(n=2, minimum=3)


@pytest.mark.parametrize(
    ("closed", "allowed"), [("both", {0, 1}), ("left", {0}), ("right", {1}), ("neither", set())]
)
def test_the_ends_of_the_unit_interval(closed: str, allowed: set[int]) -> None:
    checks.in_unit_interval(closed=closed, p=np.array([1e-300, 0.5, 1 - 1e-15]))
    for value in (0, 1, -0.1, 1.1, np.nan):
        if value in allowed:
            checks.in_unit_interval(closed=closed, p=value)
        else:
            with pytest.raises(ValueError, match=r"p = .*: must lie in [\[(]0, 1[\])]$"):
                checks.in_unit_interval(closed=closed, p=value)


def test_choice_instance_and_shape() -> None:
    checks.choice(("a", "b"), mode="a")
    checks.shape((None, 3), x=np.zeros((7, 3)))
    with pytest.raises(ValueError, match="mode = 'c': must be one of 'a', 'b'"):
        checks.choice(("a", "b"), mode="c")
    with pytest.raises(TypeError, match="x = 1: must be Tensor or ndarray, not int"):
        checks.instance((torch.Tensor, np.ndarray), x=1)
    for wrong in (np.zeros(3), np.zeros((3, 7)), np.zeros((7, 3, 1))):
        with pytest.raises(ValueError, match=r"x has shape .*: must be \(any, 3\)"):
            checks.shape((None, 3), x=wrong)


def test_a_long_value_is_cut_to_one_line() -> None:
    with pytest.raises(ValueError, match="must be finite") as caught:
        checks.finite(x=np.full(1000, np.nan))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 120


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
