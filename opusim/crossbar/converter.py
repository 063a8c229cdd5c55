"""The converters of a programmable device: digital inputs to voltages, currents to digital outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from opusim import checks


@dataclass(frozen=True, kw_only=True)
class Converter:
    """Bits and bounds between which a programmable device works; the default converts exactly.

    b bits give the 2^b - 1 codes -L ... L with L = 2^(b-1) - 1, so that 0 and both bounds are codes. A number v is
    shown as step * round(v / step), half-way cases to the even code, limited to the bound; step = bound / L.

    Attributes:
        input_bits: bits of an input in [-1, 1], sign included, 2 to 16; None shows inputs as they are.
        output_bits: bits of an output; None reads them as they are.
        output_bound: largest output that is shown, in units of the product, above 0; None without output_bits.
        tile_inputs: inputs that one conversion adds up, at least 1, or None for all; outputs of the tiles are added
            after their conversion.
    """

    input_bits: int | None = None
    output_bits: int | None = None
    output_bound: float | None = None
    tile_inputs: int | None = None

    def __post_init__(self) -> None:
        bits = {
            key: value for key in ("input_bits", "output_bits") if (value := getattr(self, key)) is not None
        }
        checks.integer(minimum=2, maximum=16, **bits)
        if self.tile_inputs is not None:
            checks.integer(minimum=1, tile_inputs=self.tile_inputs)
        if (self.output_bits is None) != (self.output_bound is None):
            raise ValueError("output_bits and output_bound belong together; give both or neither")
        if self.output_bound is not None:
            checks.positive(output_bound=self.output_bound)

    @property
    def input_step(self) -> float:
        """Distance of neighbouring inputs, 0 without input_bits."""
        return 0.0 if self.input_bits is None else 1.0 / levels(self.input_bits)

    @property
    def output_step(self) -> float:
        """Distance of neighbouring outputs of a tile, 0 without output_bits."""
        if self.output_bits is None or self.output_bound is None:
            return 0.0
        return self.output_bound / levels(self.output_bits)

    def tiles(self, n_inputs: int) -> int:
        """Return the number of conversions that a product over so many inputs adds up."""
        return 1 if self.tile_inputs is None else math.ceil(n_inputs / self.tile_inputs)

    def shown(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inputs that the device sees, for x in [-1, 1]; ternary inputs stay as they are."""
        if self.input_bits is None:
            return x
        most = levels(self.input_bits)
        return (x * most).round_().div_(most)


def levels(bits: int) -> int:
    """Return L, the largest code of so many bits."""
    checks.integer(minimum=2, maximum=16, bits=bits)
    return int(2 ** (bits - 1) - 1)
