"""An OPU as a torch module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opusim.lightonml.projections import OpuTransformer


class OPUMap(OpuTransformer, nn.Module):
    """`OPU.transform`, or `OPU.linear_transform`, as a module without parameters; its output carries no gradient.

    Arguments are those of `OpuTransformer`.
    """

    @torch._disable_dynamo
    def forward(self, input: Tensor) -> Tensor:
        """Return the features of a tensor, float32; a module that was not fitted is fitted to it."""
        found: Tensor = self._map(input)
        return found

    def extra_repr(self) -> str:
        """Return what a printed model shows."""
        return f"{self.opu.device.name!r}, out_features={self.n_components}, ndims={self.ndims}, linear={self.linear}"
