"""A digital feedback matrix of random signs and Hadamard transforms, which takes n log n operations.

With H the Hadamard matrix of order N (entries 1 and -1, N the power of two at or above both widths) and D_1, D_2, D_3
diagonal matrices of random signs,

    B = H D_3 H D_2 H D_1 / N, its first n_outputs rows and n_inputs columns.

Each entry has mean 0 and variance 1 over the signs. Columns of the whole matrix are orthogonal and of norm sqrt(N),
where those of a Gaussian matrix are so only on average. With two transforms, columns would be permutations of one
another up to signs. It is no model of an optical medium, whose entries are independent, and no device offers it.
Source: Yu et al., "Orthogonal random features", 2016, section 4 (their structured form).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from opusim import checks
from opusim.medium.transmission import Medium
from opusim.randomness import derive_seed
from training.feedback.projection import DenseProjection, DigitalProjection, Encoding
from training.networks.base import seeded_generator

ProjectionName = Literal["gaussian", "hadamard"]
_BITS = 7
"""log2 of the largest matrix that a transform multiplies by: small products run at the full rate of large ones."""


@cache
def _hadamard(bits: int) -> Tensor:
    """Return H of order 2^bits in Sylvester's order, float32."""
    matrix = torch.ones(1, 1)
    for _ in range(bits):
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return matrix


def hadamard_transform(x: Tensor) -> Tensor:  # (batch, N) -> (batch, N)
    """Return H x for each row of x; H is the Kronecker product of matrices of order 2^7 at most.

    Args:
        x: Floating-point numbers, shape (batch, N), N a power of two.

    Returns:
        A new tensor of shape (batch, N).

    Raises:
        ValueError: N is no power of two.
    """
    batch, n = x.shape
    if n < 1 or n & (n - 1):
        raise ValueError(f"x has {n} columns: must be a power of two; pad it with zeros")
    bits, after = n.bit_length() - 1, 1
    if not bits:
        return x.clone()
    while bits:
        part = min(_BITS, bits)
        factor = _hadamard(part).to(x)
        if after == 1:  # the last axis
            x = (x.reshape(-1, 2**part) @ factor).view(batch, n)
        else:
            x = (factor @ x.reshape(-1, 2**part, after)).view(batch, n)
        bits, after = bits - part, after << part
    return x


class HadamardProjection(DigitalProjection):
    """B e, or B of the encoded error, by three Hadamard transforms.

    Args:
        n_inputs: Width of e, at least 1.
        n_outputs: Width of B e, at least 1.
        seed: Of the signs, in [0, 2^64).
        place: Torch device of the signs.
        encoding: How e is shown, or None to project e itself.
    """

    def __init__(
        self,
        n_inputs: int,
        n_outputs: int,
        seed: int,
        *,
        place: torch.device | str = "cpu",
        encoding: Encoding | None = None,
    ) -> None:
        checks.integer(n_inputs=n_inputs, n_outputs=n_outputs, minimum=1)
        super().__init__(encoding=encoding)
        self._n_inputs, self._n_outputs = n_inputs, n_outputs
        order = 1 << (max(n_inputs, n_outputs) - 1).bit_length()
        generator = seeded_generator(derive_seed(seed, "signs of a Hadamard projection") >> 1)
        signs = torch.randint(0, 2, (3, order), generator=generator).mul_(2).sub_(1).float()
        self._first = signs[0, :n_inputs].to(place)
        self._others = (signs[1:] / math.sqrt(order)).to(place)

    def product(self, rows: Tensor) -> Tensor:
        """See DigitalProjection.product."""
        mixed = rows.new_zeros(len(rows), self._others.shape[1])
        torch.mul(rows, self._first, out=mixed[:, : self._n_inputs])
        for signs in self._others:
            mixed = hadamard_transform(mixed).mul_(signs)
        return hadamard_transform(mixed)[:, : self._n_outputs].contiguous()

    def columns(self, n_inputs: int) -> Tensor:
        """See Projection.columns: B transposed, up to rounding."""
        return self.product(torch.eye(n_inputs, device=self._first.device))


def digital_projection(
    name: ProjectionName,
    n_inputs: int,
    n_outputs: int,
    seed: int,
    *,
    place: torch.device | str,
    encoding: Encoding | None,
) -> DigitalProjection:
    """Return the digital projection of a name.

    Args:
        name: gaussian: the matrix of the packaged devices' `Medium` of that seed. hadamard: see the module.
        n_inputs: Width of e.
        n_outputs: Width of B e.
        seed: Of the matrix, in [0, 2^64).
        place: Torch device of the result.
        encoding: How e is shown, or None to project e itself.

    Raises:
        ValueError: The name is unknown, or the Gaussian matrix exceeds the memory that it may take.
    """
    checks.choice(("gaussian", "hadamard"), projection=name)
    if name == "hadamard":
        return HadamardProjection(n_inputs, n_outputs, seed, place=place, encoding=encoding)
    return DenseProjection(Medium(n_inputs, n_outputs, seed).dense().to(place), encoding=encoding)
