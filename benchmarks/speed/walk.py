"""How far does one have to walk through the code? Calls, functions and files of the product on the way of one action.

Counted while it runs (`sys.setprofile`): calls of functions of opusim, with properties. Comprehensions are not counted,
nor a generator each time that it goes on, nor the accounting's numerics. An action runs once before, so that what is
computed once for all is not counted.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opusim
from benchmarks.results_file import save_results
from benchmarks.speed.operators import models, private_step
from benchmarks.speed.steps import protected_step

ROOT = Path(__file__).parents[2]
PRODUCT = f"{ROOT / 'opusim'}/"
NUMERICS = str(ROOT / "opusim" / "accounting" / "numerics")
_INLINE = {"<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"}
CEILINGS = {
    "a projection of 32 rows on a camera": 50,
    "open_device('camera')": 279,
    "a protected step of an MLP, closed form": 93,
    "a protected step of an MLP, recorded": 46,
    "a protected step of an encoder, recorded": 197,
    "forward, backward and step under make_private": 111,
    "make_private": 485,
}
"""Calls in product code; they only fall."""
Action = Callable[[], object]


class Walk(NamedTuple):
    """What an action called: calls of product functions, these functions, their files, and calls between files."""

    calls: int
    functions: int
    files: int
    moves: int


def walked(action: Action) -> Walk:
    """Count the calls of an action, after one that is not counted."""
    action()
    return counted(action)


def counted(action: Action) -> Walk:
    """Count the calls of an action."""
    functions, seen, moves = Counter[CodeType](), set[FrameType](), 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal moves
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(PRODUCT) or name.startswith(NUMERICS):
            return
        if frame.f_code.co_name in _INLINE or (frame.f_code.co_flags & CO_GENERATOR and frame in seen):
            return
        seen.add(frame)
        functions[frame.f_code] += 1
        caller = frame.f_back
        moves += caller is not None and caller.f_code.co_filename != name

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    files = {code.co_filename for code in functions}
    return Walk(functions.total(), len(functions), len(files), moves)


def loop(folder: str) -> dict[str, Any]:
    """Return the parts of a private loop on invented records."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3))
    records = TensorDataset(torch.randn(64, 20), torch.randint(0, 3, (64,)))
    return {
        "module": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(),
        "data_loader": DataLoader(records, batch_size=16),
        "folder": folder,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "target_delta": 1e-5,
        "seed": 1,
    }


def actions(folder: str) -> dict[str, Action]:
    """Return the actions by name."""
    camera = opusim.open_device("camera", n_inputs=64, n_outputs=128, seed=1)
    rows = torch.sign(torch.randn(32, 64))
    _, x, y = models()["mlp"]
    numbers = iter(range(10**6))
    opened = []

    def private() -> None:
        opened.append(opusim.make_private(**loop(f"{folder}/{next(numbers)}")))

    def step() -> None:
        module, optimizer, criterion, _ = opened[-1]
        x, y = next(batches)
        criterion(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    private()
    batches = (batch for _ in range(100) for batch in opened[-1].data_loader)
    found: dict[str, Action] = {
        "a projection of 32 rows on a camera": lambda: camera.project(rows),
        "open_device('camera')": lambda: opusim.open_device("camera", n_inputs=64, n_outputs=128, seed=1),
        "a protected step of an MLP, closed form": protected_step(x[:32], y[:32], "experiment", "pdfa"),
        "a protected step of an MLP, recorded": private_step(*models()["mlp"]),
        "a protected step of an encoder, recorded": private_step(*models()["encoder"]),
        "forward, backward and step under make_private": step,
        "make_private": private,
    }
    return found


def measured() -> list[dict[str, Any]]:
    """Return a row for each action."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [{"action": name, **walked(action)._asdict()} for name, action in actions(folder).items()]


if __name__ == "__main__":
    save_results("walk", {"rows": measured()})
