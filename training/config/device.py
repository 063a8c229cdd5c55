"""Which device a run uses."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class DeviceChoice(BaseModel):
    """A device description by name or path, with keys of the description overridden."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    name: str = "gaussian"
    """A name of `opusim device list`, or the path of a TOML file; other keys of this section, such as
    device.noise.sigma, override keys of that description. Refused where the run opens no device."""

    @property
    def overrides(self) -> dict[str, Any]:
        """The keys given beside the name, as a nested mapping."""
        return dict(self.model_extra or {})
