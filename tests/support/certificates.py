"""Certificates as a calibration would write them, without its readings."""

import datetime
from typing import Any

from opusim.description.schema import DeviceDescription
from opusim.devices.certificate import Certificate, digest_of


def certificate_of(
    description: DeviceDescription, noise: Any, *, n_inputs: int, n_outputs: int, **changes: Any
) -> Certificate:
    """A certificate of a law for the calibrated window of a device, of today, with beta 1e-3 unless said otherwise."""
    fields: dict[str, Any] = {
        "device": description.name, "description_digest": digest_of(description),
        "date": datetime.date.today().isoformat(), "frames": 1000, "confidence": 0.95, "beta": 1e-3,
    }  # fmt: skip
    return Certificate(**fields | changes, noise=noise, n_inputs=n_inputs, n_outputs=n_outputs)
