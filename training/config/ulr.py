"""Options of unified likelihood ratio training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from training.config.section import Section


class UlrConfig(Section):
    """Forward passes with noise on one module's output at a time, whose score times the loss is the gradient."""

    kind: Literal["ulr"] = "ulr"
    """ulr: unified likelihood ratio."""
    copies: int = Field(1, ge=1)
    """Noisy copies of every record for each module (K in the paper); antithetic pairs count as one."""
    sigma: float = Field(0.1, gt=0.0)
    """Standard deviation of the noise on a module's output."""
