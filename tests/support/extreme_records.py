"""Finite float32 numbers on which norms, Gram matrices and sums go wrong unless they are computed with care."""

from collections.abc import Callable

import torch
from torch import Tensor

LARGEST = float(torch.finfo(torch.float32).max)
SUBNORMAL = 1.4e-45
SIZES = (SUBNORMAL, 1e-42, 1e-38, 1e-30, 2.6e-23, 1e-19, 1e-10, 1.0, 1e8, 1e15, 1e19, 1e30, 1e37, 3e38)


def _normal(n: int, size: float, generator: torch.Generator) -> Tensor:
    return torch.randn(n, generator=generator).clamp_(-1.1, 1.1) * size


def _zero_sum(n: int, size: float, generator: torch.Generator) -> Tensor:
    """Numbers whose exact sum is 0, and which do not come in neighbouring pairs."""
    half = _normal(n // 2, size, generator)
    return torch.cat([half, torch.zeros(n % 2), -half.flip(0)])


def _nearly_constant(n: int, size: float, generator: torch.Generator) -> Tensor:
    return size * (1 - 1e-7 * torch.randint(0, 3, (n,), generator=generator))


def _mixed(n: int, size: float, generator: torch.Generator) -> Tensor:
    """Signs and powers of ten from 1e-45 up to the size."""
    low = torch.log10(torch.tensor(SUBNORMAL, dtype=torch.float64))
    high = torch.log10(torch.tensor(size, dtype=torch.float64))
    powers = low + (high - low) * torch.rand(n, generator=generator, dtype=torch.float64)
    signs = 1.0 - 2.0 * torch.randint(0, 2, (n,), generator=generator)
    return (signs * 10**powers).float()


def _spike(n: int, size: float, generator: torch.Generator) -> Tensor:
    values = torch.full((n,), SUBNORMAL)
    values[int(torch.randint(n, (), generator=generator))] = size
    return values


KINDS: dict[str, Callable[[int, float, torch.Generator], Tensor]] = {
    "normal": _normal,
    "zero-sum": _zero_sum,
    "constant": lambda n, size, generator: torch.full((n,), size),
    "nearly constant": _nearly_constant,
    "mixed": _mixed,
    "spike": _spike,
}


def extreme(shape: tuple[int, ...], kind: str, size: float, seed: int) -> Tensor:
    """One record's numbers, finite float32, shape (1, *shape)."""
    generator = torch.Generator().manual_seed(seed)
    n = int(torch.tensor(shape).prod())
    return KINDS[kind](n, size, generator).clamp_(-LARGEST, LARGEST).view(1, *shape)
