"""The examples of training through black boxes, run small."""

import runpy
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(scope="module")
def example() -> SimpleNamespace:
    path = Path(__file__).parents[3] / "examples" / "ulr_black_box.py"
    return SimpleNamespace(**runpy.run_path(str(path)))


@pytest.mark.slow
def test_a_layer_in_another_process_is_trained_through(example: SimpleNamespace) -> None:
    with example.plant() as url:
        through, alone = example.compare(example.Remote(url), epochs=4)
        with urllib.request.urlopen(url, timeout=60) as answer:
            served = int(answer.read())
    assert served > 4 * 1294 * 17  # a clean row and eight pairs for every record and epoch
    assert through > alone + 0.03


def test_spiking_neurons_are_trained_through(example: SimpleNamespace) -> None:
    through, alone = example.compare(example.Spikes(), epochs=4)
    assert through > alone + 0.03


def test_the_spike_count_has_no_derivative_to_use(example: SimpleNamespace) -> None:
    x = torch.linspace(-1, 2, 300, requires_grad=True)
    rate = example.Spikes()(x)
    assert len(rate.unique()) <= 9
    assert float(rate.max()) > 0.9
    assert not rate.requires_grad or not torch.autograd.grad(rate.sum(), x, allow_unused=True)[0]
