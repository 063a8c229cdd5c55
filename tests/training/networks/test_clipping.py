from collections.abc import Callable

import pytest
import torch

from opusim.training.networks.clipping import (
    ActivationClipping,
    ball_factors,
    clip_entries,
    offset_entries,
    sphere_factors,
)


def vectors(seed: int = 3) -> torch.Tensor:
    return 2.7 * torch.randn(8, 11, generator=torch.Generator().manual_seed(seed))


def test_clip_is_the_papers_formula() -> None:
    v = vectors()
    expected = torch.sign(v) * torch.minimum(v.abs(), torch.tensor(1.3))
    assert torch.equal(clip_entries(v, 1.3), expected)


def test_offset_adds_a_constant() -> None:
    assert torch.equal(offset_entries(vectors(), 0.25), vectors() + 0.25)
    assert torch.equal(offset_entries(vectors(), 0.0), vectors())


@pytest.mark.parametrize("factors", [ball_factors, sphere_factors])
@pytest.mark.parametrize("radius", [0.3, 1.0, 27.0])
def test_scale_keeps_zero_rows(factors: Callable[[torch.Tensor, float], torch.Tensor], radius: float) -> None:
    v = torch.zeros(2, 3)
    assert torch.equal(v * factors(v, radius), v)


@pytest.mark.parametrize(
    ("layers", "clipped"),
    [
        ("all", [True, True, True]),
        ("hidden", [False, True, True]),
        ("feedback", [True, True, False]),
        ("none", [False] * 3),
    ],
)
def test_which_layers_are_clipped(layers: str, clipped: list[bool]) -> None:
    clipping = ActivationClipping(tau_h_max=1.0, layers=layers)
    assert [clipping.applies_to(layer, 3) for layer in range(3)] == clipped


@pytest.mark.parametrize(("width", "root"), [("fan-in", 11**0.5), ("layer", 4**0.5)])
def test_bounds_of_equation_9(width: str, root: float) -> None:
    clipping = ActivationClipping(tau_h_max=1.7, tau_h_min=0.3, width=width)
    h = vectors()
    expected = (h + 0.3 / root).clamp(-1.7 / root, 1.7 / root)
    torch.testing.assert_close(clipping(h, layer=1, depth=3, n_layer=4), expected)


def test_without_tau_nothing_changes() -> None:
    h = vectors()
    assert ActivationClipping(tau_h_min=0.3)(h, layer=0, depth=2, n_layer=4) is h
