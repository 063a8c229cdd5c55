"""Media, and counter-based directions: entries, independence of everything else, moving along them in place."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opusim.medium import transmission as medium_module
from opusim.medium.transmission import MAX_OUTPUTS, TABLE_STEP, Direction, Medium, gaussian_table
from opusim.processes import Abandoned, pausing
from tests.opusim.common import refuses, ternary, with_threads
from tests.oracles import naive_philox


def test_the_table_is_pinned_and_has_its_stated_moments() -> None:
    digest = hashlib.sha256(gaussian_table().astype("<f4").tobytes()).hexdigest()
    assert digest == "f32b3e374f6a48d0fce3070d6080b730cb169189d32f1e8ddc2fe121196ba3c2"
    table = gaussian_table().astype(np.float64)
    assert np.all(table == -table[::-1])
    assert np.all(table / TABLE_STEP == np.rint(table / TABLE_STEP))
    assert table.mean() == 0
    assert 1 - table.var() == pytest.approx(8.8e-7, rel=0.01)
    assert np.mean(table**4) / table.var() ** 2 == pytest.approx(2.9992, abs=1e-4)
    assert table.max() == pytest.approx(4.32495, abs=1e-5)
    assert np.unique(table).size == 19323


@settings(max_examples=30, deadline=None)
@given(
    output=st.integers(0, MAX_OUTPUTS - 1),
    column=st.integers(0, 2**32 - 1),
    seed=st.integers(0, 2**64 - 1),
    plane=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 2**32 - 1),
)
def test_any_entry_follows_the_rule(output: int, column: int, seed: int, plane: int, epoch: int) -> None:
    table = gaussian_table()
    largest = Medium(2**32, MAX_OUTPUTS, seed, plane=plane, epoch=epoch)
    tile = largest.tile(range(output, output + 1), range(column, column + 1))
    assert tile.item() == naive_philox.medium_entry(table, output, column, seed, plane, epoch)


@pytest.mark.parametrize(("first", "last"), [(0, 1), (3, 11), (8, 16), (5, 2100), (2040, 2057), (7, 7)])
def test_numba_and_torch_tiles_agree_with_the_dense_matrix(first: int, last: int) -> None:
    medium = Medium(9, 2100, 5)
    dense = medium.dense()
    tile = medium.tile(slice(first, last), slice(2, 9))
    assert torch.equal(tile, dense[2:9, first:last])
    assert torch.equal(medium._torch_tile(range(first, last), range(2, 9), torch.device("cpu")), tile)


def test_a_ternary_projection_is_exact_for_every_tiling(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    x = ternary(4, 300, seed)
    dense = Medium(300, 90, seed)
    exact = (x.double() @ dense.dense().double()).float()
    monkeypatch.setattr(medium_module, "_OUTPUTS_PER_TILE", 32)
    monkeypatch.setattr(medium_module, "_INPUTS_PER_TILE", 64)
    monkeypatch.setattr(medium_module, "INPUTS_PER_EXACT_SUM", 128)
    for limit in (0, 1024):
        assert torch.equal(Medium(300, 90, seed, dense_limit_mib=limit).project(x), exact)
    assert torch.equal(dense.project(x), exact)
    assert torch.equal(dense.project(x.flip(0)).flip(0), exact)


@pytest.mark.parametrize("limit", [0, 1024])
def test_a_long_projection_pauses_and_stops(monkeypatch: pytest.MonkeyPatch, seed: int, limit: int) -> None:
    x, paused = ternary(40, 300, seed), list[int]()
    exact = Medium(300, 90, seed).project(x)
    monkeypatch.setattr(medium_module, "PRODUCTS_PER_BLOCK", 90 * 300 * 7)
    monkeypatch.setattr(medium_module, "_ENTRIES_PER_BLOCK", 90 * 70)
    medium = Medium(300, 90, seed, dense_limit_mib=limit)

    def stop_at_third() -> None:
        paused.append(1)
        if len(paused) == 3:
            raise Abandoned

    with pausing(stop_at_third):
        with pytest.raises(Abandoned):
            medium.project(x)
        assert torch.equal(medium.project(x), exact)
    assert len(paused) >= 3 + 5 + (6 if limit else 1)  # parts of the matrix, and blocks of rows
    count = len(paused)
    assert torch.equal(medium.project(x), exact)
    assert len(paused) == count


def test_some_outputs_and_the_whole_size_are_those_of_the_matrix(seed: int) -> None:
    x = torch.zeros(2, 2**18)
    x[0, 5], x[1, 2**18 - 1] = 1, -1
    medium = Medium(2**18, 24, seed, dense_limit_mib=1)
    y = medium.project(x)
    assert torch.equal(y[0], medium.tile(range(24), range(5, 6))[0])
    assert torch.equal(y[1], -medium.tile(range(24), range(2**18 - 1, 2**18))[0])
    x = ternary(3, 70, seed)
    whole = Medium(70, 5000, seed).project(x)
    for limit in (0, 1024):
        medium = Medium(70, 5000, seed, dense_limit_mib=limit)
        assert torch.equal(medium.project(x, range(1999, 4999)), whole[:, 1999:4999])
        assert torch.equal(medium.project(x, slice(3)), whole[:, :3])
    refuses(ValueError, "outputs = .*: must be contiguous", medium.project, x, range(4990, 5001))


@pytest.mark.slow
def test_a_million_inputs_to_a_million_outputs_run_in_a_gibibyte() -> None:
    code = (
        "import torch; from opusim.medium.transmission import Medium\n"
        "x = torch.zeros(16, 10**6); x[:, 7] = 1; x[:, 999_999] = -1\n"
        "m = Medium(10**6, 10**6, 1)\n"
        "y = m.project(x, range(999_000, 10**6))\n"
        "tiles = [m.tile(range(999_000, 10**6), range(i, i + 1))[0] for i in (7, 999_999)]\n"
        "assert torch.equal(y[3], tiles[0] - tiles[1])\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "print(next(line.split()[1] for line in lines if line.startswith('VmHWM')))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert int(out) < 2**20  # KiB


def test_threads_change_neither_entries_nor_directions() -> None:
    one, three = with_threads(lambda: Medium(700, 1100, 3).dense(), 1, 3)
    assert torch.equal(one, three)
    one, two, three = with_threads(lambda: _moved(1_000_003, 0.3), 1, 2, 3)
    assert torch.equal(one, two)
    assert torch.equal(one, three)


def moments_are_standard(entries: np.ndarray) -> bool:
    """Mean 0, variance 1, fourth moment 3 within five standard errors, and rows and columns uncorrelated."""
    n = entries.size
    flat = entries.ravel()
    gram = entries @ entries.T / entries.shape[1]
    off = gram[np.triu_indices(len(gram), 1)]
    return bool(
        abs(flat.mean()) < 5 / np.sqrt(n)
        and abs(np.mean(flat**2) - 1) < 5 * np.sqrt(2 / n)
        and abs(np.mean(flat**4) - 3) < 5 * np.sqrt(96 / n)
        and abs(off.mean()) < 5 / np.sqrt(off.size * entries.shape[1])
    )


def test_entries_are_gaussian_in_law_and_planted_faults_are_not(seed: int) -> None:
    entries = Medium(200, 1000, seed).dense().double().numpy()
    assert moments_are_standard(entries)
    ratio = 1 + 10 / np.sqrt(2 * entries.size)  # ten standard errors of the scale
    assert not moments_are_standard(entries * ratio)
    assert not moments_are_standard(np.repeat(entries[::2], 2, axis=0))
    assert not moments_are_standard(np.random.default_rng(seed).uniform(-(3**0.5), 3**0.5, entries.shape))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Medium(0, 1, 1), "n_inputs = 0"),
        (lambda: Medium(1, MAX_OUTPUTS + 1, 1), "n_outputs = "),
        (lambda: Medium(1, 1, 2**64), "seed = "),
        (lambda: Medium(100, 100, 1, dense_limit_mib=0).dense(), "dense_limit_mib = 0: the dense matrix"),
        (lambda: Medium(4, 4, 1).tile(range(0, 4, 2), range(4)), "outputs = .*: must be contiguous"),
        (lambda: Medium(4, 4, 1).tile(range(4), range(3, 5)), "inputs = .*: must be contiguous"),
        (lambda: Medium(4, 4, 1).project(torch.zeros(1, 5)), r"x has shape \(1, 5\): must be \(any, 4\)"),
    ],
)
def test_bad_arguments_are_named(call: object, message: str) -> None:
    refuses(ValueError, message, call)
    refuses(TypeError, "must be torch.float32", Medium(4, 4, 1).project, torch.zeros(1, 4).double())


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
    refuses(ValueError, "start = 100: .* 2048", Direction(5).add_to, torch.zeros(3), 3, 0.7, start=100)


def test_directions_move_parameters_in_their_own_memory_and_refuse_others() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 5))
    address = parameter.data_ptr()
    Direction(0).add_to(parameter, 0, 1.0)
    assert parameter.data_ptr() == address
    assert parameter.grad_fn is None
    assert not torch.equal(parameter.detach(), torch.ones(3, 5))
    refuses(TypeError, "dtype torch.int64: a direction moves", Direction(0).add_to, torch.arange(3), 0, 1.0)
    refuses(ValueError, r"shape \(4, 3\) is not", Direction(0).add_to, torch.zeros(3, 4).t(), 0, 1.0)
    refuses(ValueError, "seed = -1", Direction, -1)
    refuses(ValueError, "number = 4294967296", lambda: Direction(0).add_to(torch.zeros(2), 2**32, 1.0))
