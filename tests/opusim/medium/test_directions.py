"""Counter-based directions: their entries, their independence of everything else, and moving along them in place."""

import numpy as np
import pytest
import torch

from opusim.medium.transmission import Direction, Medium

SIZES = (1, 7, 2048, 2049, 300_000)


def _moved(size: int, scale: float, seed: int = 5, number: int = 3) -> torch.Tensor:
    tensor = torch.zeros(size)
    Direction(seed).add_to(tensor, number, scale)
    return tensor


@pytest.mark.parametrize("size", SIZES)
def test_entries_are_those_of_the_medium(size: int) -> None:
    """The slow twin: the tile of a medium, by kernels of its own."""
    expected = Medium(4, size, 5).tile(slice(0, size), slice(3, 4))[0]
    assert torch.equal(_moved(size, 1.0), expected)
    assert torch.equal(Direction(5).entries(3, 0, size), expected)


def test_bits_do_not_depend_on_threads() -> None:
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(_moved(1_000_003, 0.3))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_seeds_and_tensors_have_directions_of_their_own(seed: int) -> None:
    """Correlations below five standard errors; a shared direction, the planted fault, is at one."""
    size = 100_000
    first = _moved(size, 1.0, seed)
    limit = 5 / np.sqrt(size)
    for other in (_moved(size, 1.0, seed + 1), _moved(size, 1.0, seed, number=4)):
        assert abs(float((first * other).mean())) < limit
    assert abs(float((first * _moved(size, 1.0, seed)).mean())) > limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernel_and_torch_path_agree_to_the_bit(dtype: torch.dtype) -> None:
    start = torch.linspace(-2, 2, 5001).to(dtype)
    z = Direction(11).entries(2, 0, 5001)
    moved = start.clone()
    Direction(11).add_to(moved, 2, 0.37)
    assert torch.equal(moved, (start.float() + z * np.float32(0.37).item()).to(dtype))
    both = start.clone()
    Direction(11).return_and_move(both, 2, back=-0.2, keep=0.9, move=0.11)
    back, keep, move = (np.float32(v).item() for v in (-0.2, 0.9, 0.11))
    assert torch.equal(both, ((start.float() + z * back) * keep + z * move).to(dtype))


def test_one_pass_and_parts_give_the_bits_of_the_whole() -> None:
    start = torch.linspace(-1, 1, 10_000)
    fused, apart = start.clone(), start.clone()
    Direction(1).return_and_move(fused, 0, back=1e-3, keep=1 - 1e-4, move=-2.7e-3)
    Direction(1).add_to(apart, 0, 1e-3)
    apart.mul_(np.float32(1 - 1e-4).item())
    Direction(1).add_to(apart, 0, -2.7e-3)
    assert torch.equal(fused, apart)
    whole = _moved(10_000, 0.7)
    for dtype in (torch.float32, torch.float16):
        part = torch.zeros(10_000 - 4096, dtype=dtype)
        Direction(5).add_to(part, 3, 0.7, start=4096)
        assert torch.equal(part, whole[4096:].to(dtype))
    with pytest.raises(ValueError, match="start = 100: must be a multiple of 2048"):
        Direction(5).add_to(torch.zeros(3), 3, 0.7, start=100)


def test_parameters_are_moved_in_their_own_memory() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 5))
    address = parameter.data_ptr()
    Direction(0).add_to(parameter, 0, 1.0)
    assert parameter.data_ptr() == address
    assert parameter.grad_fn is None
    assert not torch.equal(parameter.detach(), torch.ones(3, 5))


def test_bad_input_is_named() -> None:
    with pytest.raises(TypeError, match="dtype torch.int64: a direction moves floating-point"):
        Direction(0).add_to(torch.arange(3), 0, 1.0)
    with pytest.raises(ValueError, match=r"shape \(4, 3\) is not contiguous"):
        Direction(0).add_to(torch.zeros(3, 4).t(), 0, 1.0)
    with pytest.raises(ValueError, match="seed = -1"):
        Direction(-1)
    with pytest.raises(ValueError, match="number = 4294967296"):
        Direction(0).add_to(torch.zeros(2), 2**32, 1.0)
