"""An OPU as a torch module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opusim.lightonml.opu import OPU
from opusim.lightonml.projections import OpuTransformer, chosen_opu


class OPUMap(OpuTransformer, nn.Module):
    """`OPU.transform`, or `OPU.linear_transform`, as a module without parameters; its output carries no gradient.

    Args:
        n_components: Number of outputs.
        opu: The OPU; None makes one, as `OPU(n_components)` does.
        ndims: 1 for vectors, 2 for matrices.
        n_2d_features: Rows and columns of packed matrices.
        packed: Whether eight features stand in a byte.
        simulated: Whether to make a simulated OPU.
        max_n_features: See `OPU`, for one that is made here.
        verbose_level: See `opusim.lightonml.set_verbose_level`; -1 leaves it.
        linear: Whether to map linearly.
    """

    def __init__(
        self,
        n_components: int,
        opu: OPU | None = None,
        ndims: int = 1,
        n_2d_features: tuple[int, int] | None = None,
        packed: bool = False,
        simulated: bool = False,
        max_n_features: int | None = None,
        verbose_level: int = -1,
        linear: bool = False,
    ) -> None:
        super().__init__()
        self.opu = chosen_opu(
            opu, n_components, max_n_features, simulated=simulated, verbose_level=verbose_level
        )
        self.n_components, self.ndims, self.n_2d_features = n_components, ndims, n_2d_features
        self.packed, self.simulated, self.linear = packed, simulated, linear

    def fit(
        self, X: Any = None, y: Any = None, n_features: Any = None, packed: bool = False, online: bool = False
    ) -> None:
        """Learn the number of features, from X or from n_features; see `OPU.fit1d` and `OPU.fit2d`."""
        self._fit_opu(X, n_features, packed, online)

    @torch._disable_dynamo
    def forward(self, input: Tensor) -> Tensor:
        """Return the features of a tensor, float32; a module that was not fitted is fitted to it."""
        found: Tensor = self._map(input)
        return found

    def extra_repr(self) -> str:
        """Return what a printed model shows."""
        return f"{self.opu.device.name!r}, out_features={self.n_components}, ndims={self.ndims}, linear={self.linear}"
