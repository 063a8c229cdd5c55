"""Operators, waits and calls of a step do not grow: what keeps a step light on a graphics card, checked without one."""

import multiprocessing
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from benchmarks.speed import operators, walk
from opusim.training.networks import clipping
from opusim.training.networks.record_gradients import recorder
from tests.support.shared_checks import with_marks

ROWS = with_marks(operators.CEILINGS, ("encoder", "gpt", "lstm"))


@pytest.mark.parametrize("name", ROWS)
def test_a_private_step_stays_below_its_ceilings(name: str) -> None:
    row = operators.measured(name)
    assert row["private"] <= operators.CEILINGS[name] * row["plain"]
    assert row["waits"] <= 1


def test_planted_fault_a_wait_in_every_layer_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from opusim.training.networks.contributions import uses

    measured = uses.measured

    def waiting(values: Iterable[Tensor], *, coarsely: bool = False) -> object:
        found = measured(values, coarsely=coarsely)
        for each in found:
            float(each.norms.sum())
        return found

    monkeypatch.setattr(uses, "measured", waiting)
    assert operators.measured("mlp")["waits"] > 5


@pytest.mark.parametrize("name", ROWS)
def test_no_operator_of_a_step_hides_a_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without values, where all that needs one raises; the look that the processor takes is left out."""
    model, x, y = operators.models()[name]
    step = operators.private_step(model, x, y)
    step()
    monkeypatch.setattr(clipping, "are_all", lambda kept: False)
    monkeypatch.setattr(recorder, "_OWN", ())  # such a tensor keeps its class: hand over all functions
    with FakeTensorMode(allow_non_fake_inputs=True):
        step()
    monkeypatch.undo()
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(DataDependentOutputException):
        step()


def test_operators_views_and_waits_are_told_apart() -> None:
    x = torch.randn(4, 3)

    def step() -> None:
        x.t().flatten()  # a view, and a copy
        torch.nonzero(x > 0)
        bool(x.sum() > 0)
        x[x > 0].numpy()

    found, waits = operators.counted(step)
    assert found["aten.t"] == 0
    assert found["aten.clone"] == 1
    assert waits == {"aten.nonzero": 1, "aten._local_scalar_dense": 1, "aten.index": 1, "numpy or tolist": 1}


def test_actions_take_no_more_calls_than_before() -> None:
    # In a process of its own: hooks and patches that other tests left on torch would make checks look further.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = {row["action"]: row["calls"] for row in pool.apply(walk.measured)}
    assert found.keys() == walk.CEILINGS.keys()
    # Two in a hundred for what depends on the machine, such as a cache that a first call fills.
    assert {name: calls for name, calls in found.items() if calls > 1.02 * walk.CEILINGS[name]} == {}


def test_a_walk_counts_calls_functions_and_files() -> None:
    linear = nn.Linear(2, 2)  # no code of the product
    assert walk.counted(lambda: linear(torch.zeros(1, 2))) == (0, 0, 0, 0)
    from opusim.training.networks.clipping import row_norms

    assert walk.counted(lambda: [row_norms(torch.ones(2, 2)) for _ in range(3)]) == (3, 1, 1, 3)
