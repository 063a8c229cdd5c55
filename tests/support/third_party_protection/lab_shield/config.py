"""The options of the protection; light, because `opusim train --help` imports it."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from opusim.training import ProtectionSection
from opusim.training.config.sections import Given


class ShieldConfig(ProtectionSection):
    """Whole records on Poisson batches, with a fixed noise multiplier."""

    implementation = "lab_shield.protection:ShieldProtection"
    summary: ClassVar[str] = "Whole records at a fixed noise (from lab-shield)."
    poisson = True
    trainers: ClassVar[tuple[str, ...]] = ("bp", "softmax")

    kind: Literal["shield"] = "shield"
    """shield: clipped records and central noise of a fixed strength."""
    noise_multiplier: float = Field(2.0, gt=0.0)
    """z, the noise's standard deviation over the clip."""

    @classmethod
    def defaults(cls, given: Given) -> dict[str, dict[str, Any]]:
        """Poisson batches."""
        return {"sampler": {"scheme": "poisson"}}
