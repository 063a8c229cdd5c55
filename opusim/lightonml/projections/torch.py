"""An OPU as a torch module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opusim.lightonml.opu import OPU
from opusim.lightonml.projections import OpuTransformer, chosen_opu


class OPUMap(OpuTransformer, nn.Module):
    """`OPU.transform`, or `OPU.linear_transform`, as a module without parameters; its output carries no gradient.

    Arguments are those of `OpuTransformer`.
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

    @torch._disable_dynamo
    def forward(self, input: Tensor) -> Tensor:
        """Return the features of a tensor, float32; a module that was not fitted is fitted to it."""
        found: Tensor = self._map(input)
        return found

    def extra_repr(self) -> str:
        """Return what a printed model shows."""
        return f"{self.opu.device.name!r}, out_features={self.n_components}, ndims={self.ndims}, linear={self.linear}"
