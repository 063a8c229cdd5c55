"""A private trainer says which trained tensors it has not moved, and looks only at parameters that are released."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import opusim
from opusim.training.engine.steps import STEPS_TO_MOVE, Movement
from tests.support.private_loops import network, parts, private_loop, run_epoch

DATA = np.random.default_rng(0).normal(size=(40, 4)), np.arange(40) % 2
CONFIG: dict[str, Any] = {
    "epochs": 4, "threads": 1, "data": {"n_classes": 2, "validation_fraction": 0.0},
    "sampler": {"scheme": "poisson", "batch_size": 8}, "protection": {"kind": "record", "noise_multiplier": 1.0},
}  # fmt: skip


class PutBack(opusim.Callback):
    """Puts one tensor back after each step."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._first = tensor, tensor.clone()

    def on_step(self, *, step: int) -> None:
        self._tensor.copy_(self._first)


@pytest.mark.parametrize("kind", ["zo", "dfa"])
def test_a_run_names_what_rests(tmp_path: Path, kind: str) -> None:
    config = {**CONFIG, "trainer": {"kind": kind}}
    moving, model = (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)) for _ in range(2))
    opusim.train(config, data=DATA, model=moving, folder=tmp_path / "1")
    planted = PutBack(model[2].bias.detach())
    with pytest.warns(UserWarning, match=r"^after 16 steps, 1 of 4 trained tensors have not moved: 2\.bias"):
        opusim.train(config, data=DATA, model=model, folder=tmp_path / "2", callbacks=[planted])


def test_a_private_loop_names_what_has_no_rate(tmp_path: Path) -> None:
    with private_loop(tmp_path / "1") as private:
        for _ in range(4):
            run_epoch(private)
    model = network()
    _, _, criterion, loader = parts(model)
    groups = [{"params": [*model[0].parameters(), model[2].weight]}, {"params": [model[2].bias], "lr": 0.0}]
    with private_loop(tmp_path / "2", (model, torch.optim.SGD(groups, lr=0.5), criterion, loader)) as private:
        for _ in range(3):
            run_epoch(private)
        with pytest.warns(UserWarning, match=r"^after 16 steps, 1 of 4 .* moved: 2\.bias"):
            run_epoch(private)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_one_bit_of_one_entry_is_movement(dtype: torch.dtype) -> None:
    module = nn.Linear(300, 300, bias=False, dtype=dtype)
    movement = Movement(module)
    last = torch.view_as_real(module.weight.detach()) if dtype.is_complex else module.weight.detach()
    last.flatten()[-1:].copy_(torch.nextafter(last.flatten()[-1:], torch.full((1,), 9.0, dtype=last.dtype)))
    movement.tell(16)  # a warning fails the test


@pytest.mark.parametrize(("trainer", "protection", "when"), [
    ({"kind": "dfa"}, CONFIG["protection"], STEPS_TO_MOVE),
    ({"kind": "dfa"}, {"kind": "none"}, None),
    ({"kind": "convex", "hyperplanes": 6}, {"kind": "last-iterate", "epsilon": 3.0}, 20),
])  # fmt: skip
def test_only_released_parameters_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: dict[str, Any], protection: dict[str, Any],
    when: int | None,
) -> None:  # fmt: skip
    """A run of the last iterate releases no model before its last one."""
    looks: list[int] = []
    monkeypatch.setattr(Movement, "tell", lambda self, steps: looks.append(steps))
    config = {**CONFIG, "trainer": trainer, "protection": protection}
    if trainer["kind"] == "convex":
        config["sampler"] = {"scheme": "disjoint-cyclic", "batch_size": 8}
    opusim.train(config, data=DATA, folder=tmp_path / "run")
    assert looks == ([] if when is None else [when])
