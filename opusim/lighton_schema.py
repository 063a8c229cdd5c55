"""What a description says of a device behind lightonml."""

from __future__ import annotations

from pydantic import Field

from opusim.settings import Section


class LightonSettings(Section):
    """Which OPU lightonml is to drive, and how.

    Attributes:
        simulated: lightonml's own simulated device, a noiseless product, instead of hardware.
        config_file: lightonml's configuration of the appliance, a path from / or an http address; empty for the one
            that the machine names under /etc/lighton.
        exposure_us: exposure of the camera, microseconds; None leaves lightonml's own.
    """

    simulated: bool = False
    config_file: str = ""
    exposure_us: float | None = Field(default=None, gt=0)
