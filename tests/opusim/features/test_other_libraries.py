"""The examples that bring a device to TRAK and to ReservoirPy agree with what these libraries compute themselves."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[3] / "examples"


def example(name: str, library: str) -> dict[str, Any]:
    pytest.importorskip(library)
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_the_projector_of_trak_keeps_inner_products() -> None:
    projector = example("trak_projector", "trak")["OpticalProjector"](300, 2000, optics="ideal", planes=12)
    gradients = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    parts = {"a": gradients[:, :100].reshape(6, 10, 10), "b": gradients[:, 100:]}
    found = projector.project(parts, model_id=0)
    squares = (gradients**2).sum(1)
    true = gradients @ gradients.T
    std = ((squares[:, None] * squares + true**2) / 2000).sqrt()  # of products of 2,000 normal projections
    assert bool((((found @ found.T) / 2000 - true).abs() < 5 * std).all())
    assert torch.equal(projector.project(gradients, model_id=0), found)
    other = projector.project(gradients, model_id=1)  # another model sees another matrix
    assert abs(float((other * found).sum() / found.square().sum())) < 5 / 2000**0.5
    projector.free_memory()
    assert torch.equal(projector.project(gradients, model_id=0), found)


def test_the_noise_of_the_projector_does_not_repeat() -> None:
    projector = example("trak_projector", "trak")["OpticalProjector"](50, 400)
    gradients, found = torch.ones(1, 50), []
    for _ in range(2):
        found += [projector.project(gradients, model_id=0) for _ in range(2)]
        projector.free_memory()
    assert len({tuple(each.flatten().tolist()) for each in found}) == 4


def test_the_node_of_reservoirpy_follows_its_equation() -> None:
    names = example("reservoir_node", "reservoirpy")
    node = names["OpticalReservoir"](30, lr=0.3, sr=0.8, input_scaling=0.7, planes=20)
    x = np.random.default_rng(0).normal(size=(6, 2))
    found, state = node.run(x), np.zeros(30)
    matrix = np.asarray(node.operator.device.matrix())
    assert abs(matrix.var() - 1) < 5 * (2 / matrix.size) ** 0.5
    for step, given in enumerate(x):
        drive = 0.8 / 30**0.5 * matrix[:, :30] @ state + 0.7 * matrix[:, 30:] @ given
        state = 0.7 * state + 0.3 * np.tanh(drive)
        assert np.allclose(found[step], state, atol=1e-4)


@pytest.mark.slow
def test_the_examples_of_other_libraries_show_what_they_say() -> None:
    scores = example("trak_projector", "trak")["main"]()
    assert abs(scores["device"] - scores["TRAK"]) < 0.1
    errors = example("reservoir_node", "reservoirpy")["main"]()
    assert errors["ideal"] < 2 * errors["ReservoirPy"]
    assert errors["gaussian"] > errors["ideal"]
