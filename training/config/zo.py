"""Options of zeroth-order training."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from training.config.language import LanguageConfig
from training.config.protection import ProtectionConfig, Relation
from training.config.section import Section


class ZoConfig(Section):
    """Forward passes alone: the loss on both sides of a random direction tells how far to go along it.

    The update takes lr, schedule and weight_decay of the section `optimizer`, and neither momentum nor moments.
    """

    relations: ClassVar[tuple[Relation, ...]] = ("zero_out", "add_or_remove_one")
    """What protection.relation may be under protection.kind = 'record'; the first is its default."""

    kind: Literal["zo"] = "zo"
    """zo: zeroth-order training (SPSA) in place, with private scalars under protection.kind = 'record'."""
    perturbation: float = Field(1e-3, gt=0.0)
    """phi: how far the parameters are moved to each side (0.001 to 0.01 in the DP-ZO paper)."""
    directions: int = Field(1, ge=1, le=1024)
    """Directions a step, all on the step's batch and released together. Their updates are averaged."""
    law: Literal["gaussian", "laplace"] = "gaussian"
    """Law of the scalar noise; laplace is purely private (protection.delta = 0), and protection.noise_multiplier is
    then its scale over the clip."""
    settle_every: int = Field(64, ge=1)
    """Steps after which parameters in half precision are set to their float32 copies on disk, which the step log
    moves; parameters in float32 have no copy."""
    keep_base: bool = True
    """Whether the run folder keeps the parameters that training began with, from which the step log is replayed."""

    language: LanguageConfig = LanguageConfig()

    def uses_device(self, protection: ProtectionConfig) -> bool:
        """Whether the run opens its device."""
        return protection.kind == "record" and protection.noise == "device"
